"""The decoder's arithmetic: projections, norms and SwiGLU, with backward passes written by hand.

Autograd would compute the same gradients from the same formulas, one kernel an operator; at the sizes that train on CPUs
those passes over memory, and what they keep for the backward pass, cost more than the matrix products. Here each pass is
made once, in place where it can be, and what is cheap to compute again is not kept.
Norms and sums are fp32 whatever the compute type; matrix products and SwiGLU run in the compute type.

Legend: N tokens (batch times time), D width, M output features of one weight, F SwiGLU width.
"""

# torch types backward as (ctx, *grad_outputs); each of these has one gradient coming in, and its name says which
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def project(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, D] times weight [M, D] transposed: [N, M], in the type of x."""
    return cast(Tensor, apply(_Project, x, weight))


def norm_project(x: Tensor, gain: Tensor, epsilon: float, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """x / rms(x) * gain, then times each weight [M_i, D] transposed, side by side: [N, sum M_i] in `dtype`; x [N, D] fp32.

    rms(x) = sqrt(mean(x^2) + epsilon) of each row. The weights are stacked: one matrix product forward and two backward.
    """
    return cast(Tensor, apply(_NormProject, x, gain, epsilon, dtype, *weights))


def add_rms_norm(residual: Tensor, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """residual + x / rms(x) * gain, all [N, D]; residual and result fp32."""
    return cast(Tensor, apply(_AddRMSNorm, residual, x, gain, epsilon))


def swiglu_project(gate_and_value: Tensor, weight: Tensor) -> Tensor:
    """silu(a) * b times weight [M, F] transposed: [N, M]; a is the first half of [N, 2 F] and b the second."""
    return cast(Tensor, apply(_SwiGLUProject, gate_and_value, weight))


def apply(function: Any, *arguments: Any) -> Any:
    """function.apply(*arguments), for a type checker that torch tells nothing about `apply`."""
    return function.apply(*arguments)


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over the last dimension, kept; x fp32."""
    norm = cast(Tensor, torch.ops.aten.linalg_vector_norm(x, 2, [-1], True))
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


def unit_backward_(grad: Tensor, unit: Tensor, inverse: Tensor, along: Tensor) -> Tensor:
    """In place: the gradient g of unit = x * inverse_rms(x) becomes that of x, (g - unit * along) / rms; all fp32.

    along = mean(g * unit) over the last dimension, kept.
    """
    return grad.addcmul_(unit, along, value=-1).mul_(inverse)


def _norm_backward(grad: Tensor, unit: Tensor, inverse: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gain, from that of x * inverse_rms(x) * gain; all fp32, [N, D]."""
    product = grad * unit
    along = (product @ gain).div_(gain.shape[0]).unsqueeze(-1)
    return unit_backward_(grad * gain, unit, inverse, along), product.sum(0)


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        cast_weight = weight.to(x.dtype)
        ctx.save_for_backward(x, cast_weight)
        return F.linear(x, cast_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return grad @ weight, (grad.t() @ x).float() if ctx.needs_input_grad[1] else None


class _NormProject(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        inverse = inverse_rms(x, epsilon)
        unit = x * inverse
        normed = (unit * gain).to(dtype)
        casts = [w.to(dtype) for w in weights]
        weight = torch.cat(casts) if len(casts) > 1 else casts[0]
        ctx.save_for_backward(unit, inverse, gain, normed, weight)
        ctx.rows = [w.shape[0] for w in weights]
        return F.linear(normed, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, inverse, gain, normed, weight = ctx.saved_tensors
        grad_x, grad_gain = _norm_backward((grad @ weight).float(), unit, inverse, gain)
        if not any(ctx.needs_input_grad[4:]):
            return grad_x, grad_gain, None, None, *[None] * len(ctx.rows)
        return grad_x, grad_gain, None, None, *torch.split_with_sizes((grad.t() @ normed).float(), ctx.rows)


class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        x32 = x.float()
        inverse = inverse_rms(x32, epsilon)
        ctx.save_for_backward(x, inverse, gain)
        return torch.addcmul(residual, x32 * inverse, gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, gain = ctx.saved_tensors
        grad_x, grad_gain = _norm_backward(grad, x.float() * inverse, inverse, gain)
        return grad, grad_x.to(x.dtype), grad_gain, None


class _SwiGLUProject(Function):
    @staticmethod
    def forward(ctx: Any, gate_and_value: Tensor, weight: Tensor) -> Tensor:
        gate, value = gate_and_value.chunk(2, dim=-1)
        activated, cast_weight = F.silu(gate), weight.to(gate.dtype)
        ctx.save_for_backward(gate_and_value, activated, cast_weight)
        return F.linear(activated * value, cast_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_and_value, activated, weight = ctx.saved_tensors
        gate, value = gate_and_value.chunk(2, dim=-1)
        grad_weight = (grad.t() @ (activated * value)).float() if ctx.needs_input_grad[1] else None
        grad = grad @ weight
        if torch.compiler.is_compiling():  # it fuses this itself, and has no out= for parts of a tensor
            return torch.cat((torch.ops.aten.silu_backward(grad * value, gate), grad * activated), dim=-1), grad_weight
        out = torch.empty_like(gate_and_value)
        grad_gate, grad_value = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(value), gate, grad_input=grad_gate)
        return out, grad_weight
