"""Token shards: however the stream is cut into files, a sequence is what the whole stream holds there."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_texts import open_files, write_shards
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_muloco.data import shards as shards_module
from ray_muloco.data.shards import TokenShards, token_dtype
from ray_muloco.errors import ConfigError

CUTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("vocab_size", [257, 70_000])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(cuts=CUTS, sequence_length=st.integers(1, 40), seed=st.integers(0, 99))
def test_a_batch_is_what_the_whole_stream_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool, vocab_size: int, cuts: list[int], sequence_length: int, seed: int
) -> None:
    """Sequence s is stream[s T : s T + T + 1], within a shard, across a seam, and across shards shorter than a sequence."""
    monkeypatch.setattr(shards_module, "MAPPED_BYTES", 1 << 30 if mapped else 0)
    monkeypatch.setattr(shards_module, "OPEN_FILES", 2)
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(0, vocab_size, size) for size in cuts]
    stream = np.concatenate(pieces)
    shards = write_shards(tmp_path / f"{seed}-{len(cuts)}-{sum(cuts)}", pieces, vocab_size)
    count = shards.num_sequences(sequence_length)
    assert count == (len(stream) - 1) // sequence_length
    if count:
        numbers = rng.integers(0, count, 30)
        expected = np.stack([stream[s * sequence_length : s * sequence_length + sequence_length + 1] for s in numbers])
        batch = shards.batch(numbers, sequence_length)
        assert batch.dtype == np.int64
        assert np.array_equal(batch, expected)
    start, stop = sorted(rng.integers(0, len(stream) + 1, 2).tolist())
    assert np.array_equal(shards.tokens(start, stop), stream[start:stop])


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_numbers_outside_the_stream_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    monkeypatch.setattr(shards_module, "MAPPED_BYTES", 1 << 30 if mapped else 0)
    shards = write_shards(tmp_path, [range(50), range(50), range(29)])
    assert shards.num_sequences(16) == 8
    for number in (8, -1, 2**40, -(2**40)):
        with pytest.raises(IndexError):
            shards.batch(np.array([0, number]), 16)
    with pytest.raises(IndexError):
        shards.tokens(100, 130)


def test_no_sequences_make_an_empty_batch(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [range(50)])
    assert shards.batch(np.empty(0, dtype=np.int64), 16).shape == (0, 17)
    assert TokenShards(tmp_path, [], 257).num_sequences(16) == 0


def test_a_sequence_within_a_shard_is_a_view_of_the_file(tmp_path: Path) -> None:
    """Zero-copy: two views of one place share memory; at a seam there is nothing to share."""
    shards = write_shards(tmp_path, [range(60), range(60)])
    one, again, seam = shards.tokens(10, 40), shards.tokens(10, 40), shards.tokens(50, 70)
    assert np.shares_memory(one, again)
    assert not one.flags.writeable
    assert seam.tolist() == [*range(50, 60), *range(10)]


def test_tokens_are_as_narrow_as_the_vocabulary_allows() -> None:
    assert [token_dtype(size).itemsize for size in (2, 257, 65_536, 65_537, 200_000)] == [2, 2, 2, 4, 4]


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_no_descriptor_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    """Maps hold none at all; files that are read are closed with their shards, and no more than OPEN_FILES before."""
    monkeypatch.setattr(shards_module, "MAPPED_BYTES", 1 << 30 if mapped else 0)
    monkeypatch.setattr(shards_module, "OPEN_FILES", 4)
    gc.collect()
    before = open_files()
    shards = write_shards(tmp_path, [range(40)] * 30)
    shards.batch(np.arange(shards.num_sequences(7)), 7)
    assert open_files() - before <= (0 if mapped else 4)
    del shards
    gc.collect()
    assert open_files() == before


def test_memory_does_not_grow_with_a_long_stream(tmp_path: Path) -> None:
    """A process that reads all of a stream beyond MAPPED_BYTES in shuffled batches grows by less than a tenth of it."""
    size = 1 << 21
    write_shards(tmp_path, [np.arange(size) % 257] * 12)  # 48 MB
    program = f"""
import numpy as np, psutil
from pathlib import Path
from ray_muloco.data import shards
from ray_muloco.data.sampler import SampleOrder
shards.MAPPED_BYTES = 16 << 20
records = [shards.ShardRecord(file=p.name, num_tokens={size}, num_bytes=p.stat().st_size, sha256="") for p in sorted(Path({str(tmp_path)!r}).iterdir())]
stream = shards.TokenShards({str(tmp_path)!r}, records, 257)
order = SampleOrder(0, stream.num_sequences(1024))
stream.batch(order.sequence_indices(np.arange(32)), 1024)
before = psutil.Process().memory_info().rss
for i in range(0, order.num_sequences, 32):
    stream.batch(order.sequence_indices(np.arange(i, min(i + 32, order.num_sequences))), 1024)
print(psutil.Process().memory_info().rss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 4.8e6


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    one, same = write_shards(tmp_path / "a", [range(9), range(4)]), write_shards(tmp_path / "b", [range(9), range(4)])
    other = write_shards(tmp_path / "c", [range(9), range(5)])
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize("damage", ["missing", "truncated", "longer", "other file", "empty"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    shards = write_shards(tmp_path, [range(50), range(50)])
    path = tmp_path / shards.records[1].file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[:-100], "longer": content + b"x", "other file": b"x" * len(content), "empty": b""}[damage])
    with pytest.raises(ConfigError, match=path.name):
        TokenShards(tmp_path, shards.records, 257)


def test_a_shard_of_another_width_is_named(tmp_path: Path) -> None:
    shards = write_shards(tmp_path, [range(50)])
    with pytest.raises(ConfigError, match=r"no shard of 50 tokens of uint32"):
        TokenShards(tmp_path, shards.records, 70_000)
