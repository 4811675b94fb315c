"""The outer step: SGD with Nesterov momentum on the mean pseudogradient.

The only place that knows the sign of the pseudogradient and how the outer learning rate enters. Every function works on
flat fp32 buffers, in place and element by element, so a buffer may be treated whole or bucket by bucket with equal bits.

Legend: P parameters (flat, fp32).
"""

from __future__ import annotations

import torch
from torch import Tensor


def pseudogradient_(start: Tensor, end: Tensor, out: Tensor) -> Tensor:
    """Write a replica's pseudogradient into `out` and return it.

    Rule: Δ = θ - θ_k, start minus end, so that descending along Δ moves θ to where the replica went (arXiv 2311.08105).
    Shapes: start, end, out fp32 [P]; `out` may be `end` itself, whose values are then lost.
    """
    return torch.sub(start, end, out=out)


def outer_step_(theta: Tensor, momentum: Tensor, mean_pseudogradient: Tensor, *, lr: float, mu: float) -> None:
    """Take one outer step in place; `mean_pseudogradient` is consumed and holds the update direction Ψ + μ u afterwards.

    Rule: u <- μ u + Ψ ; θ <- θ - η_out (Ψ + μ u). Equals `torch.optim.SGD(nesterov=True)` bit for bit (with μ = 0, plain
    SGD); u starts at zero. No temporary is made: what remains in `mean_pseudogradient`, times η_out, is what θ moved by.
    Shapes: theta, momentum, mean_pseudogradient fp32 [P], or equal slices of the three. Source: arXiv 2505.23725.
    """
    momentum.mul_(mu).add_(mean_pseudogradient)
    mean_pseudogradient.add_(momentum, alpha=mu)
    theta.add_(mean_pseudogradient, alpha=-lr)
