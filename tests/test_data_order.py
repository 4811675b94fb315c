"""The order of samples: a function of integers that reads every sequence once an epoch, whoever asks and in whatever portions."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_muloco.data.sampler import SampleOrder

GOLDEN_NARROW = [378, 717, 205, 470, 990, 889]
GOLDEN_WIDE = [263207414768, 386644105720, 912175792038, 867506990746]


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(1, 3000), epoch=st.integers(0, 50))
def test_an_epoch_is_a_permutation(seed: int, size: int, epoch: int) -> None:
    """Disjoint and complete: every sequence once."""
    read = SampleOrder(seed, size).sequence_indices(np.arange(epoch * size, (epoch + 1) * size))
    assert np.array_equal(np.sort(read), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 255, 256, 257, 65_535, 65_536, 65_537, 100_003])
def test_an_epoch_is_complete_at_every_kind_of_size(size: int) -> None:
    read = SampleOrder(7, size).sequence_indices(np.arange(2 * size))
    assert np.array_equal(np.sort(read[:size]), np.arange(size))
    assert np.array_equal(np.sort(read[size:]), np.arange(size))


@given(seed=st.integers(0, 1000), size=st.integers(1, 20_000), indices=st.lists(st.integers(0, 60_000), min_size=1, max_size=40))
def test_a_sample_does_not_depend_on_the_company_it_is_asked_for_in(seed: int, size: int, indices: list[int]) -> None:
    """P07: a resumed run and another number of replicas ask in other portions, and read the same."""
    alone = [int(SampleOrder(seed, size).sequence_indices(np.array([i]))[0]) for i in indices]
    order = SampleOrder(seed, size)
    assert order.sequence_indices(np.array(indices)).tolist() == alone
    assert [int(order.sequence_indices(np.array([i]))[0]) for i in indices] == alone


def test_neighbours_across_the_blocks_that_are_kept_agree_with_single_samples() -> None:
    order, size = SampleOrder(3, 50_000), 50_000
    for start in (4090, 8190, 4096 * 5 - 3, size - 20, 2 * size - 5):
        indices = np.arange(start, start + 40)
        assert order.sequence_indices(indices).tolist() == [int(SampleOrder(3, size).sequence_indices(np.array([i]))[0]) for i in indices]


def test_shapes_are_kept() -> None:
    order = SampleOrder(0, 100)
    assert order.sequence_indices(np.arange(12).reshape(3, 4)).shape == (3, 4)
    assert order.sequence_indices(np.arange(95, 105).reshape(2, 5)).shape == (2, 5)
    assert order.sequence_indices(np.empty(0, dtype=np.int64)).shape == (0,)


def test_three_epochs_with_a_resume_in_the_second_are_three_full_epochs() -> None:
    """P06: the position is one integer, so a resumed epoch neither ends early nor begins anew."""
    size, cut = 1000, 1437
    uninterrupted = SampleOrder(1, size).sequence_indices(np.arange(3 * size))
    resumed = np.concatenate([SampleOrder(1, size).sequence_indices(np.arange(cut)), SampleOrder(1, size).sequence_indices(np.arange(cut, 3 * size))])
    assert np.array_equal(resumed, uninterrupted)
    for epoch in range(3):
        assert np.array_equal(np.sort(resumed[epoch * size : (epoch + 1) * size]), np.arange(size))


def test_replicas_that_share_out_the_indices_read_every_sequence_once() -> None:
    """P09: four replicas, then three from the middle of the epoch: no sequence is read twice and none is left out."""
    size, batch = 960, 12
    shared: list[np.ndarray] = []
    for step in range(size // batch):
        num_replicas = 4 if step < 40 else 3
        share = batch // num_replicas
        for replica in range(num_replicas):
            start = step * batch + replica * share
            shared.append(SampleOrder(5, size).sequence_indices(np.arange(start, start + share)))
    assert np.array_equal(np.sort(np.concatenate(shared)), np.arange(size))


def test_epochs_and_seeds_differ_in_order() -> None:
    """P10: no two epochs, and no two seeds, agree in more places than chance would have it."""
    size = 5000
    orders = [SampleOrder(seed, size).sequence_indices(np.arange(epoch * size, (epoch + 1) * size)) for seed in range(3) for epoch in range(3)]
    for i, one in enumerate(orders):
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.06, "neighbours are unrelated; 4 standard deviations of 1 / sqrt(5000)"
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.06
        for other in orders[:i]:
            assert (one == other).sum() < 12, "one agreement is expected of random orders"


def test_a_small_corpus_takes_many_orders() -> None:
    """Of the 24 orders of four sequences all appear among 2,000 epochs, none of them far too often."""
    order = SampleOrder(0, 4)
    seen = [tuple(order.sequence_indices(np.arange(4 * epoch, 4 * epoch + 4)).tolist()) for epoch in range(2000)]
    counts = [seen.count(one) for one in set(seen)]
    assert len(counts) == 24
    assert max(counts) < 3 * 2000 / 24


def test_the_order_is_the_same_everywhere() -> None:
    """P03: integers written down once; another platform, NumPy or thread count that read otherwise would break resumed runs."""
    assert SampleOrder(0, 1000).sequence_indices(np.array([0, 1, 2, 999, 1000, 5_000_000])).tolist() == GOLDEN_NARROW
    assert SampleOrder(2**63 - 1, 10**12).sequence_indices(np.array([0, 1, 10**12 - 1, 10**12])).tolist() == GOLDEN_WIDE
    program = "import numpy as np; from ray_muloco.data.sampler import SampleOrder as S; print(S(4, 777).sequence_indices(np.arange(1500)).tolist())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(SampleOrder(4, 777).sequence_indices(np.arange(1500)).tolist())


def test_memory_does_not_depend_on_the_number_of_sequences() -> None:
    """10^15 sequences: a table of them would need petabytes."""
    order = SampleOrder(0, 10**15)
    read = order.sequence_indices(np.array([0, 10**15 - 1, 10**15, 3 * 10**15 + 17]))
    assert len(set(read.tolist())) == 4
    assert all(0 <= number < 10**15 for number in read.tolist())


def test_orders_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SampleOrder(0, 0)
    with pytest.raises(ValueError, match="negative"):
        SampleOrder(0, 5).sequence_indices(np.array([3, -1]))
