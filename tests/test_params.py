"""Laws of the flat layout: every trainable parameter once, no copies, buckets that cover, a digest that tells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ray_muloco.core.params import FlatLayout, digest, flatten_parameters_


class Odd(nn.Module):
    """Tied weights, a frozen one, a scalar, an empty one and names with dots."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.inner = nn.ModuleDict({"a-b": nn.Linear(3, 5), "c": nn.Linear(5, 7, bias=False)})
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.full((11,), 9.0), requires_grad=False)


def test_layout_counts_each_trainable_parameter_once_in_order():
    """U02 (a tied weight listed twice), E11 (frozen tensors left out)."""
    layout = FlatLayout.of(Odd())
    assert layout.names == ("scale", "nothing", "table.weight", "inner.a-b.weight", "inner.a-b.bias", "inner.c.weight")
    sizes = [shape.numel() for shape in layout.shapes]
    assert sizes == [1, 0, 21, 15, 5, 35]
    assert layout.offsets == tuple(sum(sizes[:i]) for i in range(len(sizes)))
    assert layout.numel == sum(sizes)


def test_flattening_keeps_every_value_and_leaves_frozen_parameters_alone():
    model = Odd()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frozen_at = model.frozen.data_ptr()
    layout, flat = flatten_parameters_(model)
    assert flat.dtype is torch.float32
    assert flat.is_contiguous()
    assert flat.shape == (layout.numel,)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert model.frozen.data_ptr() == frozen_at
    assert model.out.weight is model.table.weight


def test_the_buffer_is_the_model_in_both_directions():
    model = Odd()
    layout, flat = flatten_parameters_(model)
    flat.fill_(3.0)
    assert all(bool((p == 3.0).all()) for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        model.inner["c"].weight.fill_(-1.0)
    assert bool((layout.views(flat)["inner.c.weight"] == -1.0).all())
    assert float(flat.sum()) == 3.0 * (layout.numel - 35) - 35


def test_an_optimizer_step_on_the_parameters_moves_the_buffer():
    model = Odd()
    _, flat = flatten_parameters_(model)
    before = flat.clone()
    model.inner["c"](model.inner["a-b"](model.table.weight)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert not torch.equal(flat, before)
    assert torch.equal(flat[1:22].view(7, 3), model.table.weight)


def test_half_precision_parameters_become_fp32():
    model = nn.Linear(4, 4).to(torch.bfloat16)
    _, flat = flatten_parameters_(model)
    assert flat.dtype is torch.float32
    assert model.weight.dtype is torch.float32


def test_a_model_with_nothing_to_train_has_an_empty_buffer():
    layout, flat = flatten_parameters_(nn.ReLU())
    assert (layout.numel, flat.numel(), list(layout.buckets(5))) == (0, 0, [])


def test_a_layout_costs_no_memory_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 12)
    layout, flat = flatten_parameters_(model)
    assert flat.is_meta
    assert layout.numel == (1 << 32) + (1 << 12)


def test_views_alias_any_buffer_of_the_layout():
    layout = FlatLayout.of(Odd())
    buffer = torch.arange(layout.numel, dtype=torch.float32)
    views = layout.views(buffer)
    assert [tuple(view.shape) for view in views.values()] == [(), (0, 4), (7, 3), (5, 3), (5,), (7, 5)]
    views["inner.a-b.bias"].zero_()
    assert int((buffer == 0).sum()) == 1 + 5
    with pytest.raises(ValueError, match="does not fit"):
        layout.views(torch.zeros(layout.numel + 1))
    with pytest.raises(ValueError, match="does not fit"):
        layout.views(torch.zeros(layout.numel, 1))


@given(sizes=st.lists(st.integers(0, 40), max_size=12), cap=st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_buckets_of_any_size_reduce_every_element_exactly_once(sizes: list[int], cap: int):
    """D03: sizes 6, 6, 6 with cap 10 left the third tensor out, one larger than the cap was never sent."""
    module = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])
    layout = FlatLayout.of(module)
    counts = torch.zeros(layout.numel, dtype=torch.int64)
    for bucket in layout.buckets(cap):
        assert 0 < bucket.stop - bucket.start <= cap
        counts[bucket] += 1
    assert bool((counts == 1).all())
    assert layout.numel == sum(sizes)


def test_buckets_of_no_elements_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        next(FlatLayout.of(nn.Linear(2, 2)).buckets(0))


@pytest.mark.parametrize("numel", [0, 1, 7, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 600_001])
def test_digest_is_the_integer_sum_of_the_bits(numel: int):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = int(flat.numpy().view(np.int32).astype(np.int64).sum())
    assert digest(flat) == expected


def test_digest_changes_with_any_single_bit_and_with_the_sign_of_zero():
    """D10: replicas that differ anywhere are told apart."""
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    reference = digest(flat)
    for bit in range(32):
        changed = flat.clone()
        mask = torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(torch.int32)
        changed.view(torch.int32)[bit * 31] ^= mask
        assert digest(changed) != reference, bit
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_digest_of_a_long_buffer_is_exact_and_fits_an_int64():
    """Ten million equal bit patterns: no float anywhere in the sum."""
    flat = torch.full((10_000_000,), float("-inf"))
    bits = int(np.array([-np.inf], dtype=np.float32).view(np.int32)[0])
    assert digest(flat) == bits * 10_000_000
    assert torch.tensor(digest(flat), dtype=torch.int64).item() == digest(flat)


def test_digest_does_not_hide_what_is_not_a_number():
    flat = torch.zeros(10)
    flat[3] = float("nan")
    assert digest(flat) != digest(torch.zeros(10))


def test_digest_of_another_type_is_refused():
    with pytest.raises(ValueError, match="fp32"):
        digest(torch.zeros(4, dtype=torch.bfloat16))
