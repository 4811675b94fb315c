"""Laws of the learning-rate schedule: a function of progress through the budget and of nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_muloco.core.schedules import lr_factor

fractions = st.floats(0.0, 1.0)
warmups = st.floats(0.0, 0.9)


def test_schedule_rises_linearly_then_falls_as_a_cosine_to_its_final_share():
    def factor(progress: float) -> float:
        return lr_factor(progress, warmup_fraction=0.05, final_fraction=0.1)

    assert factor(0.0) == 0.0
    assert factor(0.0125) == pytest.approx(0.25)
    assert factor(0.05) == 1.0
    assert factor(0.05 + 0.95 / 3) == pytest.approx(0.1 + 0.9 * 0.75)  # cos(π/3) = 1/2
    assert factor(0.525) == pytest.approx(0.55)  # half way down
    assert factor(1.0) == pytest.approx(0.1)


def test_schedule_without_warmup_starts_at_its_peak():
    assert lr_factor(0.0, warmup_fraction=0.0, final_fraction=0.1) == 1.0


def test_published_schedule_warms_up_for_500_steps():
    """500 of 10,000 steps: step n of the warm-up stands at n / 500 of the peak."""
    for step in (0, 1, 250, 499, 500):
        assert lr_factor(step / 10_000, warmup_fraction=0.05, final_fraction=0.1) == pytest.approx(step / 500)


@given(progress=st.floats(-1e6, 1e6), warmup=warmups, final=fractions)
def test_factor_stays_between_zero_and_one_and_progress_is_clamped(progress: float, warmup: float, final: float):
    """A run that ends past its budget stays at the final rate."""
    factor = lr_factor(progress, warmup_fraction=warmup, final_fraction=final)
    assert 0.0 <= factor <= 1.0
    assert factor == lr_factor(min(max(progress, 0.0), 1.0), warmup_fraction=warmup, final_fraction=final)
    assert lr_factor(math.inf, warmup_fraction=warmup, final_fraction=final) == pytest.approx(final, abs=1e-12)


@given(a=fractions, b=fractions, warmup=warmups, final=fractions)
def test_factor_rises_during_warmup_and_never_rises_after_it(a: float, b: float, warmup: float, final: float):
    early, late = sorted((a, b))
    first = lr_factor(early, warmup_fraction=warmup, final_fraction=final)
    second = lr_factor(late, warmup_fraction=warmup, final_fraction=final)
    if late <= warmup:
        assert first <= second + 1e-12  # rounding of the division
    if early >= warmup:
        assert first >= second - 1e-12


@given(warmup=st.floats(0.01, 0.9), final=fractions)
def test_factor_is_continuous_where_warmup_ends(warmup: float, final: float):
    below = lr_factor(math.nextafter(warmup, 0.0), warmup_fraction=warmup, final_fraction=final)
    assert below == pytest.approx(lr_factor(warmup, warmup_fraction=warmup, final_fraction=final))
