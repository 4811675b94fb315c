"""The decoder's arithmetic: projections, norms and SwiGLU, with backward passes written by hand.

Autograd would compute the same gradients from the same formulas, one kernel a formula sign; at the sizes that train on
CPUs those passes over memory cost more than the matrix products. Here a pass is made once and in place where it can be.
Norms and sums are fp32 whatever the compute type; matrix products and SwiGLU run in the type of their input.

Legend: N rows (tokens), D width, M output features, F SwiGLU width.
"""

# torch types backward as (ctx, *grad_outputs); each of these has one gradient coming in, and its name says which
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def project(x: Tensor, *weights: Tensor) -> Tensor:
    """x [..., D] times each weight [M_i, D] transposed, side by side: [..., sum M_i], in the type of x.

    The weights are cast and stacked first: one matrix product forward and two backward, however many weights there are.
    """
    return cast(Tensor, apply(_Project, x, *weights))


def rms_norm(x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension; fp32 inside, the result in `dtype`."""
    return cast(Tensor, apply(_RMSNorm, x, gain, epsilon, dtype))


def add_rms_norm(residual: Tensor, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """residual + rms_norm(x), in fp32."""
    return cast(Tensor, apply(_AddRMSNorm, residual, x, gain, epsilon))


def swiglu(gate_and_value: Tensor) -> Tensor:
    """silu(a) * b of [..., 2 F], a its first half and b its second."""
    return cast(Tensor, apply(_SwiGLU, gate_and_value))


def apply(function: Any, *arguments: Any) -> Any:
    """function.apply(*arguments), for a type checker that torch tells nothing about `apply`."""
    return function.apply(*arguments)


def inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / sqrt(mean(x^2) + epsilon) over the last dimension, kept; x fp32."""
    norm = cast(Tensor, torch.ops.aten.linalg_vector_norm(x, 2, [-1], True))
    return norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()


class _Project(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        weight = weights[0].to(x.dtype) if len(weights) == 1 else torch.cat([w.to(x.dtype) for w in weights])
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.weight_dtype = [w.shape[0] for w in weights], weights[0].dtype
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)  # [N, M]
        grad_x = (grad @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return grad_x, *[None] * len(ctx.rows)
        return grad_x, *(grad.t() @ x.flatten(0, -2)).to(ctx.weight_dtype).split(ctx.rows)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        inverse = inverse_rms(x.float(), epsilon)
        unit = x.float() * inverse
        ctx.save_for_backward(unit, inverse, gain)
        ctx.x_dtype = x.dtype
        return (unit * gain).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_gain = _rms_norm_backward(grad.float(), *ctx.saved_tensors)
        return grad_x.to(ctx.x_dtype), grad_gain, None, None


class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        x32 = x.float()
        inverse = inverse_rms(x32, epsilon)
        unit = x32 * inverse
        ctx.save_for_backward(unit, inverse, gain)
        ctx.x_dtype = x.dtype
        return torch.addcmul(residual, unit, gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_gain = _rms_norm_backward(grad, *ctx.saved_tensors)
        return grad, grad_x.to(ctx.x_dtype), grad_gain, None


def _rms_norm_backward(grad: Tensor, unit: Tensor, inverse: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gain: (g * grad - unit * mean(g * grad * unit)) / rms and sum over rows of grad * unit."""
    product = grad * unit
    along = (product @ gain).unsqueeze(-1).div_(gain.shape[0])
    grad_x = (grad * gain).addcmul_(unit, along, value=-1).mul_(inverse)
    return grad_x, product.flatten(0, -2).sum(0)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_and_value: Tensor) -> Tensor:
        gate, value = gate_and_value.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_and_value, activated)
        return activated * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_and_value, activated = ctx.saved_tensors
        gate, value = gate_and_value.chunk(2, dim=-1)
        if torch.compiler.is_compiling():  # it fuses this itself, and has no out= for parts of a tensor
            return torch.cat((torch.ops.aten.silu_backward(grad * value, gate), grad * activated), dim=-1)
        out = torch.empty_like(gate_and_value)
        grad_gate, grad_value = out.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return out
