"""Newton-Schulz orthogonalisation of stacks of matrices: M = U S Vᵀ becomes about U Vᵀ, by matrix products alone.

Each step applies an odd quintic to all singular values at once: X <- a X + (b A + c A²) X with A = X Xᵀ. The published
coefficient sets do not converge to 1: they push every singular value above a floor into a band around 1, fast.

Legend: n matrices of one shape, M×N each; m = min(M, N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ray_muloco.errors import ConfigError


class CoefficientSet(NamedTuple):
    """(a, b, c) of each step, and the factor by which the Frobenius norm is enlarged before the first."""

    steps: tuple[tuple[float, float, float], ...]
    norm_factor: float = 1.0


def _with_safety(steps: tuple[tuple[float, float, float], ...], factor: float) -> tuple[tuple[float, float, float], ...]:
    """Steps for p(x / factor): rounding may then lift a singular value past the interval that p was made for."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in steps)


COEFFICIENT_SETS: dict[str, CoefficientSet] = {
    # arXiv 2505.23725
    "muloco": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024
    "jordan": CoefficientSet(((3.4445, -4.7750, 2.0315),) * 5),
    # Amsel et al., "The Polar Express", arXiv 2505.16932, algorithm 1: its first five steps, safety factor 1.01 in both places
    "polar_express": CoefficientSet(
        _with_safety(
            (
                (8.28721201814563, -23.595886519098837, 17.300387312530933),
                (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
                (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
                (3.3184196573706015, -2.488488024314874, 0.51004894012372),
                (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            ),
            factor=1.01,
        ),
        norm_factor=1.01,
    ),
}
NORM_EPSILON = 1e-7


def coefficient_set(name: str) -> CoefficientSet:
    """The published set of that name; ConfigError names the sets there are."""
    if name not in COEFFICIENT_SETS:
        raise ConfigError("inner.coefficients", name, f"must be one of {', '.join(COEFFICIENT_SETS)}")
    return COEFFICIENT_SETS[name]


class Workspace:
    """Buffers for stacks of up to `num_matrices` matrices of one shape, reused by every call.

    scaled: fp32 [n, M, N]; x, y: [n, M, N] and gram, polynomial: [n, m, m] of the compute type.
    """

    def __init__(self, num_matrices: int, rows: int, columns: int, compute_dtype: torch.dtype, device: torch.device) -> None:
        side = min(rows, columns)
        self.x = torch.empty(num_matrices, rows, columns, dtype=compute_dtype, device=device)
        self.y = torch.empty_like(self.x)
        self.gram = torch.empty(num_matrices, side, side, dtype=compute_dtype, device=device)
        self.polynomial = torch.empty_like(self.gram)
        self.scaled = self.x if compute_dtype is torch.float32 else torch.empty_like(self.x, dtype=torch.float32)


@torch.no_grad()
def orthogonalize(matrices: Tensor, coefficients: CoefficientSet, workspace: Workspace) -> Tensor:
    """Orthogonalise fp32 [n, M, N] in the workspace's compute type; the result, [n, M, N], lies in the workspace.

    Rule: M / max|M| first, so that neither 1e-30 nor 1e+30 leaves the range of fp32 when squared, and the direction does not
    depend on scale; then X = M / (‖M‖_F + 1e-7), then the steps. Zero stays zero. `matrices` may be `workspace.scaled`.
    """
    n = matrices.shape[0]
    tall = matrices.shape[1] > matrices.shape[2]
    x, y, gram, polynomial, scaled = workspace.x[:n], workspace.y[:n], workspace.gram[:n], workspace.polynomial[:n], workspace.scaled[:n]
    peak = torch.linalg.vector_norm(matrices, torch.inf, dim=(1, 2), keepdim=True)
    torch.div(matrices, peak.clamp_(min=torch.finfo(torch.float32).tiny), out=scaled)
    norm = torch.linalg.vector_norm(scaled, dim=(1, 2), keepdim=True)
    torch.div(scaled, norm.mul_(coefficients.norm_factor).add_(NORM_EPSILON), out=x)
    for a, b, c in coefficients.steps:
        torch.bmm(x.mT, x, out=gram) if tall else torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)  # b A + c A²
        torch.baddbmm(x, x, polynomial, beta=a, out=y) if tall else torch.baddbmm(x, polynomial, x, beta=a, out=y)
        x, y = y, x
    return x


def newton_schulz(matrices: Tensor, coefficients: str, compute_dtype: torch.dtype) -> Tensor:
    """Orthogonalise matrices of shape [..., M, N] with five Newton-Schulz steps of a published coefficient set.

    Returns [..., M, N] in `compute_dtype` (fp32 or bf16). f(Q X R) = Q f(X) R for orthogonal Q and R, f(c X) = f(X) for
    c > 0, f(0) = 0; singular values above about 2e-3 of ‖X‖_F land in the set's band around 1.
    Raises ConfigError for an unknown set. Sources: see COEFFICIENT_SETS.
    """
    rows, columns = matrices.shape[-2:]
    stack = matrices.detach().reshape(-1, rows, columns).float()
    workspace = Workspace(stack.shape[0], rows, columns, compute_dtype, stack.device)
    return orthogonalize(stack, coefficient_set(coefficients), workspace).reshape(matrices.shape)
