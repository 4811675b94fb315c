"""Attention confined to documents: QK norm and rotary positions, then softmax over the visible positions.

Legend: B batch, T time, H heads, C head_dim.
"""

# torch types backward as (ctx, *grad_outputs); here the gradients coming in are named
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ray_muloco.core.layers import apply, inverse_rms, unit_backward_

# Up to this length the T x T weights that the explicit form keeps for its backward pass take less memory than all else.
EXPLICIT_MAX_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Positions:
    """What every block needs to know about the batch's positions.

    rotary: fp32 [T, C/2, 2], cos and sin of the angle t θ^(-2j/C) by which pair j is turned at time t.
    mask: bool [B, 1, T, T], who may see whom; None for plain causality.
    bias: the same as 0 or -inf for the explicit form to add to scores, [1 or B*H, T, T]; None where the fused form serves.
    """

    rotary: Tensor
    mask: Tensor | None
    bias: Tensor | None


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin of t θ^(-2j/C) for t < T, j < C/2: fp32 [T, C/2, 2], computed in fp64 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), theta**-exponents)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(device, torch.float32)


def document_mask(tokens: Tensor, separator_id: int | None) -> Tensor | None:
    """Who may see whom, bool [B, 1, T, T]: same document and not later. None where plain causality says the same.

    The separator opens a document: document = cumsum(tokens == separator_id). One at position 0 opens the document
    that fills the sequence, so only later ones matter.
    """
    if separator_id is None:
        return None
    opens = tokens == separator_id
    if not bool(opens[:, 1:].any()):
        return None
    document = opens.cumsum(1)
    return (document.unsqueeze(2) == document.unsqueeze(1)).tril_().unsqueeze(1)


def score_bias(mask: Tensor | None, length: int, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The mask as a bias on scores: 0 where visible, -inf elsewhere; [1, T, T] when causal, else [B*H, T, T]."""
    if mask is None:
        return torch.full((1, length, length), float("-inf"), dtype=dtype).triu_(1)
    bias = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return bias.expand(-1, num_heads, -1, -1).flatten(0, 1)


def attend(qkv: Tensor, q_gain: Tensor, k_gain: Tensor, epsilon: float, positions: Positions) -> Tensor:
    """Attention of projections qkv [B T, 3 H C] to [B T, H C]: norm and rotate q and k, weigh v by softmax."""
    q, k, v = cast("tuple[Tensor, Tensor, Tensor]", apply(_Heads, qkv, q_gain, k_gain, epsilon, positions.rotary))  # [B, H, T, C]
    if positions.bias is not None:
        out = cast(Tensor, apply(_Explicit, q, k, v, positions.bias))
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=positions.mask, is_causal=positions.mask is None, scale=1.0)
    return out.transpose(1, 2).reshape(qkv.shape[0], -1)


class _Heads(Function):
    """qkv [B T, 3 H C] to q, k, v [B, H, T, C]: q and k normalised over C, scaled by gain and rotated; q / sqrt(C)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, q_gain: Tensor, k_gain: Tensor, epsilon: float, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        width = q_gain.shape[0]
        heads = qkv.view(-1, rotary.shape[0], 3, qkv.shape[1] // (3 * width), width).permute(2, 0, 3, 1, 4).contiguous()  # [3, B, H, T, C]
        x = heads[:2].to(torch.float32, copy=True)
        inverse = inverse_rms(x, epsilon)
        gain = torch.stack((q_gain * width**-0.5, k_gain)).view(2, 1, 1, 1, width)
        q, k = _turn(x.mul_(inverse).mul_(gain), rotary).to(qkv.dtype)
        ctx.save_for_backward(heads[:2], inverse, gain, rotary)
        return q, k, heads[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, gain, rotary = ctx.saved_tensors
        heads = torch.stack((grad_q, grad_k, grad_v))  # [3, B, H, T, C]
        grad = _turn(heads[:2].float(), rotary, back=True)
        unit = x.float() * inverse
        product = grad * unit
        grad_gain = product.sum((1, 2, 3))
        along = product.mul_(gain).mean(-1, keepdim=True)
        heads[:2] = unit_backward_(grad.mul_(gain), unit, inverse, along)
        return heads.permute(1, 3, 0, 2, 4).reshape(-1, 3 * grad_q.shape[1] * grad_q.shape[3]), grad_gain[0] * gain.shape[-1] ** -0.5, grad_gain[1], None, None


def _turn(x: Tensor, rotary: Tensor, *, back: bool = False) -> Tensor:
    """Turn the pairs (x_2j, x_2j+1) of [..., T, C] fp32 by the table's angles, or back by them."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic and stumbles over complex numbers
        (real, imaginary), (cos, sin) = pairs.unbind(-1), rotary.unbind(-1)
        sin = -sin if back else sin
        return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).view(x.shape)
    turn = torch.view_as_complex(rotary)
    torch.view_as_complex(pairs).mul_(turn.conj() if back else turn)
    return x


class _Explicit(Function):
    """softmax(q k^T + bias) v with the weights kept for the backward pass.

    For CPUs that multiply bf16: the fused kernel there computes its products the slow way, and is three to seven times slower.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        shape = q.shape
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # [B*H, T, C]
        weights = torch.baddbmm(bias, q, k.mT).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return (weights @ v).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        shape = grad.shape
        grad = grad.flatten(0, 1)
        grad_v = weights.mT @ grad
        grad_scores = cast(Tensor, torch.ops.aten._softmax_backward_data(grad @ v.mT, weights, -1, weights.dtype))
        return (grad_scores @ k).view(shape), (grad_scores.mT @ q).view(shape), grad_v.view(shape), None
