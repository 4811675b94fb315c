"""Laws of the orthogonalisation: equivariance, scale, bands, and that every order of its products gives one answer.

Reference: the published polynomial applied to the singular values in fp64.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ray_muloco.core.newton_schulz import COEFFICIENT_SETS, Workspace, newton_schulz, orthogonalize
from ray_muloco.errors import ConfigError

FP32, BF16 = torch.float32, torch.bfloat16
SETS = list(COEFFICIENT_SETS)
# step by step and Gram form; stripes in fp32 from a side of 256 on
SHAPES = [(40, 40), (48, 17), (24, 66), (66, 24), (280, 300), (260, 560), (560, 260)]
# where singular values from 2e-3 of the Frobenius norm on land: extremes of the composed polynomial
BANDS = {"muloco": (0.852, 1.146), "jordan": (0.681, 1.203), "polar_express": (0.870, 1.124)}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def orthogonal(n: int, seed: int) -> Tensor:
    return torch.linalg.qr(gaussian(n, n, seed=seed).double())[0]


def with_spectrum(values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix of these singular values, fp32."""
    m = len(values)
    return ((orthogonal(rows, seed)[:, :m] * values.double()) @ orthogonal(columns, seed + 1)[:m]).float()


def mapped(values: Tensor, name: str) -> Tensor:
    """Singular values after all steps, fp64."""
    published = COEFFICIENT_SETS[name]
    y = values.double() / (values.double().norm() * published.norm_factor)
    for a, b, c in published.steps:
        y = a * y + b * y**3 + c * y**5
    return y


def reference(matrix: Tensor, name: str) -> Tensor:
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u * mapped(s, name)) @ v


def step_by_step(matrix: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """The rule as it is printed, in the type given."""
    x = (matrix / (matrix.norm() * COEFFICIENT_SETS[name].norm_factor)).to(dtype)
    x = x.mT if x.shape[0] > x.shape[1] else x
    for a, b, c in COEFFICIENT_SETS[name].steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum() / (a.double().norm() * b.double().norm()))


SPECTRA = {
    "flat": lambda m: torch.ones(m),
    "power law": lambda m: torch.arange(1, m + 1) ** -1.0,
    "exponential": lambda m: torch.logspace(0, -3, m),
    "steep": lambda m: torch.logspace(0, -5, m),
    "half rank": lambda m: (torch.arange(m) < m // 2).float(),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_result_is_the_published_polynomial_of_the_singular_values(shape: tuple[int, int], name: str):
    """U01: the default path orthogonalises; wide, tall and square, one by one, Gram form and stripes alike."""
    matrix = gaussian(*shape)
    # fp32 rounding, carried through a slope of up to 965 at zero
    torch.testing.assert_close(newton_schulz(matrix, name, FP32).double(), reference(matrix, name), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(40, 40), (24, 66), (260, 560)])
def test_hard_spectra_neither_burst_nor_leave_the_direction(shape: tuple[int, int], spectrum: str, name: str):
    """U10: negative eigenvalues that rounding makes must not grow, in fp32 nor in bf16."""
    matrix = with_spectrum(SPECTRA[spectrum](min(shape)), *shape)
    expected, ceiling = reference(matrix, name), BANDS[name][1]
    exact = newton_schulz(matrix, name, FP32).double()
    torch.testing.assert_close(exact, expected, atol=1e-3, rtol=0.0)
    rounded = newton_schulz(matrix, name, BF16).double()
    assert torch.linalg.matrix_norm(rounded, 2) < ceiling + 0.05  # bf16 has 3 digits
    loss, plain_loss = 1 - cosine(rounded, expected), 1 - cosine(step_by_step(matrix, name, BF16), expected)
    assert loss < plain_loss + 0.002  # what bf16 costs anyway; a burst costs 0.1 to 1


@pytest.mark.parametrize("name", SETS)
def test_singular_values_above_two_thousandths_of_the_norm_land_in_the_published_band(name: str):
    """U01."""
    low, high = BANDS[name]
    values = torch.logspace(0, -2.7, 48)
    values = values[values >= 2e-3 * values.norm()]
    landed = torch.linalg.svdvals(newton_schulz(with_spectrum(values, 48, 64), name, FP32))[: len(values)]
    assert float(landed.min()) > low - 1e-3
    assert float(landed.max()) < high + 1e-3
    grid = torch.logspace(-2.6989, 0, 100_000, dtype=torch.float64)  # the bands above are the polynomial's own
    ends = torch.stack([mapped_alone(grid, name).min(), mapped_alone(grid, name).max()])
    torch.testing.assert_close(ends, torch.tensor([low, high], dtype=torch.float64), atol=1e-3, rtol=0.0)


def mapped_alone(x: Tensor, name: str) -> Tensor:
    """The polynomial of a singular value that is this share of the Frobenius norm."""
    y = x / COEFFICIENT_SETS[name].norm_factor
    for a, b, c in COEFFICIENT_SETS[name].steps:
        y = a * y + b * y**3 + c * y**5
    return y


@pytest.mark.parametrize("shape", SHAPES)
def test_rotating_the_input_rotates_the_output(shape: tuple[int, int]):
    """f(Q X R) = Q f(X) R."""
    matrix, q, r = gaussian(*shape), orthogonal(shape[0], 1), orthogonal(shape[1], 2)
    turned = (q @ matrix.double() @ r).float()
    expected = q @ newton_schulz(matrix, "muloco", FP32).double() @ r
    torch.testing.assert_close(newton_schulz(turned, "muloco", FP32).double(), expected, atol=2e-4, rtol=0.0)  # as above, twice


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(40, 40), (24, 66), (66, 24)])
@pytest.mark.parametrize("scale", [1e-30, 1e-7, 3.0, 1e30])
def test_scaling_the_input_changes_nothing(scale: float, shape: tuple[int, int], dtype: torch.dtype):
    """U10: f(c X) = f(X) for tiny and huge gradients."""
    matrix = gaussian(*shape)
    tolerance = 1e-4 if dtype is FP32 else 0.05  # c X is rounded once, which bf16 may see as another last digit
    torch.testing.assert_close(newton_schulz(matrix * scale, "muloco", dtype), newton_schulz(matrix, "muloco", dtype), atol=tolerance, rtol=0.0)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", SETS)
def test_zero_stays_zero_beside_others_in_its_stack(name: str, dtype: torch.dtype):
    """U05, U10: no division by zero."""
    stack = torch.stack([gaussian(8, 20), torch.zeros(8, 20), gaussian(8, 20, seed=1)])
    result = newton_schulz(stack, name, dtype)
    assert not result[1].any()
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result[2], newton_schulz(stack[2], name, dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(32, 32), (24, 66), (66, 24)])
def test_rank_one_keeps_its_direction(shape: tuple[int, int], scale: float, dtype: torch.dtype):
    """U10: rank-1 gradients, at any scale, are finite; their one singular value lands in the band."""
    u, v = gaussian(shape[0], seed=1), gaussian(shape[1], seed=2)
    result = newton_schulz(torch.outer(u, v) * scale, "muloco", dtype).double()
    along = (u / u.norm()).double() @ result @ (v / v.norm()).double()
    assert 0.85 < float(along) < 1.15
    if dtype is FP32:  # in bf16 rounding fills the null space
        assert cosine(result, torch.outer(u, v)) > 0.9999


@pytest.mark.parametrize("shape", [(96, 96), (264, 96), (96, 264), (320, 880), (640, 640)])
def test_bf16_agrees_with_fp32(shape: tuple[int, int]):
    """U10: cosine above 0.99, gradient-like decaying spectrum included; bf16 in stripes from 640 on."""
    for matrix in (gaussian(*shape), with_spectrum(torch.arange(1, min(shape) + 1) ** -1.0, *shape)):
        assert cosine(newton_schulz(matrix, "muloco", BF16), newton_schulz(matrix, "muloco", FP32)) > 0.99


@pytest.mark.parametrize("shape", [(24, 66), (66, 24), (40, 40)])
def test_every_order_of_the_products_gives_one_answer(shape: tuple[int, int]):
    """Segments and stripes are speed, not mathematics."""
    stack = torch.stack([gaussian(*shape, seed=seed) for seed in range(3)])
    results: list[Tensor] = []
    for segments in ((1, 1, 1, 1, 1), (2, 2, 1), (5,)):
        for striped in (False, True):
            workspace = Workspace(3, shape, FP32, stack.device)
            workspace.segments, workspace.striped = segments, striped
            workspace.squares = [torch.empty(3, min(shape), min(shape)) for _ in range(4)]
            results.append(orthogonalize(stack, COEFFICIENT_SETS["muloco"], workspace).clone())
    for one, other in pairwise(results):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (2, 3, 10, 6), (0, 4, 5)])
def test_any_leading_dimensions_are_stacks_of_matrices(shape: tuple[int, ...]):
    stack = gaussian(*shape)
    result = newton_schulz(stack, "muloco", FP32)
    assert result.shape == stack.shape
    rows = stack.reshape(-1, *shape[-2:])
    for one, expected in zip(result.reshape(rows.shape), rows, strict=True):
        torch.testing.assert_close(one.double(), reference(expected, "muloco"), atol=1e-4, rtol=0.0)


def test_input_is_left_as_it_was():
    """U05: the momentum is the input."""
    matrix = gaussian(24, 66)
    before = matrix.clone()
    newton_schulz(matrix, "muloco", FP32)
    assert torch.equal(matrix, before)


def test_polar_express_carries_its_published_safety_factor():
    """The first of its steps as others print it, with 1.01 in it; 1.01 on the norm as well."""
    first = torch.tensor(COEFFICIENT_SETS["polar_express"].steps[0], dtype=torch.float64)
    torch.testing.assert_close(first, torch.tensor([8.205160414005574, -22.90193498705605, 16.460724910180314], dtype=torch.float64))
    assert COEFFICIENT_SETS["polar_express"].norm_factor == 1.01


def test_unknown_sets_and_types_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"inner\.coefficients is 'quintic': must be one of muloco, jordan, polar_express"):
        newton_schulz(gaussian(4, 4), "quintic", FP32)
    with pytest.raises(ConfigError, match=r"compute-dtype is torch\.float16"):
        newton_schulz(gaussian(4, 4), "muloco", torch.float16)
