"""Newton-Schulz orthogonalisation of stacks of matrices: M = U S Vᵀ becomes about U Vᵀ, by matrix products alone.

Each step applies an odd quintic to all singular values at once: X <- a X + (b A + c A²) X with A = X Xᵀ. The published
coefficient sets do not converge to 1: they push every singular value above a floor into a band around 1, fast.

Two orders of the same products. Step by step, X is multiplied in each step: (2 r + 1) m³ each, r = max(M, N) / m. The Gram
form takes a *segment* of steps on m×m matrices alone, since all that happens to X is multiplication by polynomials of
R = X Xᵀ: with P = a I + b R + c R² per step, Q <- P Q, R <- P R P, and at the end X <- Q X. It needs fewer products where X
is wide, but rounding makes small eigenvalues of R negative, and those grow by a² each step: five steps are sound in fp32
and burst in bf16, where segments of two are as exact as step by step (measured against fp64 on flat, power-law, exponential
and rank-one spectra).

Legend: n matrices of one shape, M×N each; m = min(M, N).
"""

from __future__ import annotations

from typing import NamedTuple, cast

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


GRAM_FORM_ASPECT = 2.0  # from r = 1.5 on the Gram form has fewer products; below 2 its additions eat the gain
NUM_STRIPES = 4
STRIPES_MIN_SIDE = {torch.float32: 256, torch.bfloat16: 640}  # on CPUs, measured; below, one large product is faster


class Workspace:
    """Buffers and plan for stacks of up to `num_matrices` matrices of one shape, reused by every call.

    scaled: fp32 [n, M, N]; x, y: [n, M, N] and squares: [n, m, m] each, of the compute type.
    """

    def __init__(self, num_matrices: int, shape: tuple[int, int], compute_dtype: torch.dtype, device: torch.device) -> None:
        if compute_dtype not in STRIPES_MIN_SIDE:
            raise ConfigError("compute-dtype", compute_dtype, "must be torch.float32 or torch.bfloat16")
        side = min(shape)
        if max(shape) < GRAM_FORM_ASPECT * side:
            self.segments = (1, 1, 1, 1, 1)
        else:
            self.segments = (5,) if compute_dtype is torch.float32 else (2, 2, 1)
        self.tall = shape[0] > shape[1]
        self.striped = device.type == "cpu" and side >= STRIPES_MIN_SIDE[compute_dtype]
        self.x = torch.empty(num_matrices, *shape, dtype=compute_dtype, device=device)
        self.y = torch.empty_like(self.x)
        num_squares = 2 if max(self.segments) == 1 else 4
        self.squares = [torch.empty(num_matrices, side, side, dtype=compute_dtype, device=device) for _ in range(num_squares)]
        self.scaled = self.x if compute_dtype is torch.float32 else torch.empty_like(self.x, dtype=torch.float32)


@torch.no_grad()
def orthogonalize(matrices: Tensor, coefficients: CoefficientSet, workspace: Workspace) -> Tensor:
    """Orthogonalise fp32 [n, M, N] in the workspace's compute type; the result, [n, M, N], lies in the workspace.

    Rule: M / max|M| first, so that neither 1e-30 nor 1e+30 leaves the range of fp32 when squared, and the direction does not
    depend on scale; then X = M / (‖M‖_F + 1e-7), then the steps. Zero stays zero. `matrices` may be `workspace.scaled`.
    """
    n = len(matrices)
    x, y, scaled = workspace.x[:n], workspace.y[:n], workspace.scaled[:n]
    squares = [square[:n] for square in workspace.squares]
    # two plain reductions: the infinity norm of torch is not vectorised on CPUs and takes twenty times as long
    peak = torch.maximum(matrices.amax((1, 2), keepdim=True), matrices.amin((1, 2), keepdim=True).neg_())
    torch.div(matrices, peak.clamp_(min=torch.finfo(torch.float32).tiny), out=scaled)
    norm = cast(Tensor, torch.linalg.vector_norm(scaled, dim=(1, 2), keepdim=True))  # pyright: ignore[reportUnknownMemberType]
    scaled.div_(norm.mul_(coefficients.norm_factor).add_(NORM_EPSILON))
    x.copy_(scaled)
    begin = 0
    for length in workspace.segments:
        _segment(x, y, squares, coefficients.steps[begin : begin + length], workspace)
        begin += length
        x, y = y, x
    return x


def _segment(x: Tensor, y: Tensor, squares: list[Tensor], steps: tuple[tuple[float, float, float], ...], plan: Workspace) -> None:
    """Write X, [n, M, N], after these steps to y; one step costs a product of m×m and two with X, more take the Gram form."""
    tall, symmetric = plan.tall, _striped_product if plan.striped else _product
    gram, bend = squares[:2]  # R and b R + c R²
    symmetric(x.mT, x, gram, gram, 0.0, 1.0) if tall else symmetric(x, x.mT, gram, gram, 0.0, 1.0)
    a, b, c = steps[0]
    symmetric(gram, gram, bend, gram, b, c)
    if len(steps) == 1:
        torch.baddbmm(x, x, bend, beta=a, out=y) if tall else torch.baddbmm(x, bend, x, beta=a, out=y)
        return
    product, spare = squares[2:]  # Q
    product.copy_(bend).diagonal(dim1=1, dim2=2).add_(a)
    for next_a, next_b, next_c in steps[1:]:
        symmetric(gram, bend, spare, gram, a, 1.0)  # R P
        symmetric(spare, bend, gram, spare, a, 1.0)  # R P²
        a, b, c = next_a, next_b, next_c
        symmetric(gram, gram, bend, gram, b, c)
        symmetric(product, bend, spare, product, a, 1.0)
        product, spare = spare, product
    torch.bmm(x, product, out=y) if tall else torch.bmm(product, x, out=y)


def _product(left: Tensor, right: Tensor, out: Tensor, addend: Tensor, beta: float, alpha: float) -> None:
    """out <- beta addend + alpha left right, stacks; beta = 0 ignores the addend, which may then be `out`."""
    torch.baddbmm(addend, left, right, beta=beta, alpha=alpha, out=out)


def _striped_product(left: Tensor, right: Tensor, out: Tensor, addend: Tensor, beta: float, alpha: float) -> None:
    """The same for results known to be symmetric: the blocks above the diagonal, stripe by stripe, mirrored below it.

    Saves (1 - 1 / stripes) / 2 of the work. All products here are symmetric: they are polynomials of one symmetric matrix.
    """
    side = out.shape[-1]
    width = -(-side // NUM_STRIPES)
    for i in range(len(out)):
        for begin in range(0, side, width):
            end = min(begin + width, side)
            stripe = out[i, begin:end, begin:]
            torch.addmm(addend[i, begin:end, begin:], left[i, begin:end], right[i, :, begin:], beta=beta, alpha=alpha, out=stripe)
            out[i, end:, begin:end].copy_(out[i, begin:end, end:].mT)


def newton_schulz(matrices: Tensor, coefficients: str, compute_dtype: torch.dtype) -> Tensor:
    """Orthogonalise matrices of shape [..., M, N] with the five Newton-Schulz steps of a published coefficient set.

    Returns [..., M, N] in `compute_dtype` (fp32 or bf16). f(Q X R) = Q f(X) R for orthogonal Q and R, f(c X) = f(X) for
    c > 0, f(0) = 0; singular values above about 2e-3 of ‖X‖_F land in the set's band around 1.
    Raises ConfigError for an unknown set. Sources: see COEFFICIENT_SETS.
    """
    rows, columns = matrices.shape[-2:]
    stack = matrices.detach().reshape(-1, rows, columns).float()
    workspace = Workspace(len(stack), (rows, columns), compute_dtype, stack.device)
    return orthogonalize(stack, coefficient_set(coefficients), workspace).reshape(matrices.shape)
