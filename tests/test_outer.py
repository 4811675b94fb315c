"""Laws of the outer step: torch's Nesterov SGD bit for bit, whole or in buckets, in place, and the sign in one place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_muloco.core.outer import outer_step_, pseudogradient_


def rounds_of(num_rounds: int, num_params: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_params, generator=generator) for _ in range(num_rounds)]


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.6), (0.9, 0.8), (1.0, 0.3), (0.7, 0.0), (1.0, 0.9)])
def test_outer_step_matches_torch_nesterov_sgd_bit_for_bit(lr: float, mu: float):
    pseudogradients = rounds_of(6, num_params=1037)
    theta, momentum = torch.randn(1037, generator=torch.Generator().manual_seed(1)), torch.zeros(1037)
    reference = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([reference], lr=lr, momentum=mu, nesterov=mu > 0)
    for mean in pseudogradients:
        reference.grad = mean.clone()
        sgd.step()
        outer_step_(theta, momentum, mean.clone(), lr=lr, mu=mu)
        assert torch.equal(theta, reference.detach())
    if mu > 0:
        assert torch.equal(momentum, sgd.state[reference]["momentum_buffer"])


@given(num_params=st.integers(1, 400), bucket=st.integers(1, 450), mu=st.sampled_from([0.0, 0.3, 0.9]))
def test_any_bucket_size_equals_the_unbucketed_step_bit_for_bit(num_params: int, bucket: int, mu: float):
    """D03: no bucket boundary leaves an element out or steps it twice."""
    whole_theta, whole_momentum = rounds_of(2, num_params, seed=2)
    theta, momentum = whole_theta.clone(), whole_momentum.clone()
    for mean in rounds_of(3, num_params, seed=3):
        direction = mean.clone()
        outer_step_(whole_theta, whole_momentum, direction, lr=0.7, mu=mu)
        for begin in range(0, num_params, bucket):
            part = slice(begin, begin + bucket)
            outer_step_(theta[part], momentum[part], mean[part], lr=0.7, mu=mu)
        assert torch.equal(theta, whole_theta)
        assert torch.equal(momentum, whole_momentum)
        assert torch.equal(mean, direction)


def test_outer_step_equals_the_form_with_the_rate_inside_the_momentum_when_the_rate_is_constant():
    """The papers keep η_out inside the buffer: v <- μ v + η Ψ ; θ <- θ - (η Ψ + μ v)."""
    lr, mu = 0.7, 0.8
    theta, momentum = torch.ones(64, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    other, velocity = theta.clone(), momentum.clone()
    for mean in rounds_of(10, 64):
        mean = mean.double()
        velocity = mu * velocity + lr * mean
        other = other - (lr * mean + mu * velocity)
        outer_step_(theta, momentum, mean, lr=lr, mu=mu)
    torch.testing.assert_close(theta, other)  # fp64 rounding


def test_pseudogradient_is_start_minus_end_so_that_a_plain_step_lands_where_the_replica_went():
    start, end = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.5, 4.0, -3.0])
    out = torch.empty(3)
    returned = pseudogradient_(start, end, out)
    assert returned is out
    assert out.tolist() == [0.5, -2.0, 0.0]
    outer_step_(start, torch.zeros(3), out, lr=1.0, mu=0.0)
    assert torch.equal(start, end)  # exact: the differences are


def test_pseudogradient_may_be_written_over_the_end_point():
    start, end = rounds_of(2, 100)
    expected = start - end
    assert torch.equal(pseudogradient_(start, end, out=end), expected)


def test_pseudogradient_buffer_holds_the_update_direction_after_the_step():
    theta, momentum, mean = torch.zeros(50), *rounds_of(2, 50)
    expected = mean + 0.5 * (0.5 * momentum + mean)
    outer_step_(theta, momentum, mean, lr=2.0, mu=0.5)
    torch.testing.assert_close(mean, expected)  # fp32 rounding: the order of additions differs
    assert torch.equal(theta, -2.0 * mean)


def test_identical_pseudogradients_make_the_momentum_a_geometric_sum():
    theta, momentum = torch.zeros(3), torch.zeros(3)
    for n in range(1, 9):
        outer_step_(theta, momentum, torch.ones(3), lr=1.0, mu=0.5)
        assert momentum.tolist() == [2.0 - 0.5 ** (n - 1)] * 3  # exact in binary


class NoNewStorage(TorchDispatchMode):
    """Refuses every operation whose result does not live in one of the given tensors."""

    def __init__(self, *allowed: Tensor) -> None:
        super().__init__()
        self.allowed = {tensor.untyped_storage().data_ptr() for tensor in allowed}
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        assert result.untyped_storage().data_ptr() in self.allowed, f"{func} made a temporary"
        return result


def test_outer_step_and_pseudogradient_make_no_temporaries():
    """Θ, u and Ψ of a large model fill the coordinator's memory: a fourth buffer must not be needed."""
    theta, momentum, mean = rounds_of(3, 256)
    with NoNewStorage(theta, momentum, mean) as watch:
        outer_step_(theta, momentum, mean, lr=0.7, mu=0.6)
        pseudogradient_(theta, momentum, out=mean)
    assert watch.operations == 5
