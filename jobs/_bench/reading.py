"""Data: shuffled reading from shards, its memory, and preparing text against the tokenizers library's own rate. One core."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from _bench.exchange import resident_megabytes
from _bench.measure import Effort, Figure, at_least, at_most, compare, rate
from ray_muloco.config import DataConfig
from ray_muloco.data import preparation
from ray_muloco.data.corpus import find_files
from ray_muloco.data.sampler import SampleOrder
from ray_muloco.data.shards import ShardRecord, TokenShards, write_shard
from ray_muloco.data.tokenizer import train_bpe

SHARD_TOKENS = 1 << 24
VOCABULARY = 50_000
READ_TOKENS = 1 << 24
ROUND_BATCHES = 30
MEMORY_LIMIT_MB = 540.0  # whatever the corpus; a shorter one may be mapped as a whole
TOKENS_PER_SECOND = 20e6  # what reading must reach on any machine


def data(effort: Effort) -> Iterator[Figure]:
    """All three."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core on both sides
    num_shards = (2, 4) if effort.quick else (12, 36)  # 400 MB and 1.2 GB
    with tempfile.TemporaryDirectory() as directory:
        small, large = (write_corpus(Path(directory, str(count)), count) for count in num_shards)
        yield from reading(Path(directory, str(num_shards[0])), small, effort)
        for count, records in zip(num_shards, (small, large), strict=True):
            growth = memory_growth(Path(directory, str(count)), records)
            yield Figure(f"memory of reading {count} shards of 34 MB", growth, MEMORY_LIMIT_MB, "MB", at_most(1.0))
    yield preparing(effort)


# ---- reading


def write_corpus(directory: Path, num_shards: int) -> list[ShardRecord]:
    """So many shards of 2^24 tokens of uint16, 32 MB each; content does not matter, so one shard's tokens serve for all."""
    directory.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, SHARD_TOKENS, dtype=np.uint16)
    records = []
    for number in range(num_shards):
        path = directory / f"{number}.arrow"
        with pa.OSFile(str(path), "wb") as sink:
            write_shard(tokens, sink)
        records.append(ShardRecord(file=path.name, num_tokens=len(tokens), num_bytes=path.stat().st_size, sha256="0" * 64))
    return records


def reading(directory: Path, records: list[ShardRecord], effort: Effort) -> Iterator[Figure]:
    """Shuffled batches in the trained order, against the same number of sequences copied from the files in file order."""
    for sequence_length, batch_sequences, num_shards in ((128, 32, 1), (128, 32, len(records)), (2048, 16, len(records))):
        name = f"T={sequence_length}, B={batch_sequences}, {num_shards} shards"
        shards = TokenShards(directory, records[:num_shards], VOCABULARY)
        order = SampleOrder(0, shards.num_sequences(sequence_length))
        tokens = READ_TOKENS // 8 if effort.quick else READ_TOKENS
        num_batches = tokens // (sequence_length * batch_sequences)
        stream = [np.memmap(directory / record.file, dtype=np.uint16, mode="r") for record in records[:num_shards]]

        def shuffled(shards=shards, order=order, length=sequence_length, size=batch_sequences, count=num_batches) -> None:
            for first in range(0, count, ROUND_BATCHES):  # a replica asks for the order of a round at once, then batch by batch
                numbers = order.sequence_indices(np.arange(first * size, min(first + ROUND_BATCHES, count) * size))
                for begin in range(0, len(numbers), size):
                    shards.batch(numbers[begin : begin + size], length)

        def in_order(stream=stream, length=sequence_length, size=batch_sequences, count=num_batches) -> None:
            width = (length + 1) * size
            for batch in range(count):
                file = stream[batch * width // SHARD_TOKENS % len(stream)]
                begin = batch * width % (SHARD_TOKENS - width)
                file[begin : begin + width].astype(np.int64)

        shuffled()
        in_order()
        figure = compare(
            f"{name}: shuffled against in order",
            lambda run=shuffled, amount=tokens: 1e9 / rate(run, amount),
            lambda run=in_order, amount=tokens: 1e9 / rate(run, amount),
            "ns/token",
            effort.repeats,
            at_most(3.0),
        )
        yield figure
        yield Figure(f"{name}: rate", 1e3 / figure.ours, TOKENS_PER_SECOND / 1e6, "M tokens/s", at_least(1.0))


def memory_growth(directory: Path, records: list[ShardRecord]) -> float:
    """Megabytes by which a fresh process grows while it reads shuffled batches from all over a corpus."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grow, (directory, records))


def _grow(directory: Path, records: list[ShardRecord]) -> float:
    length, size = 512, 32
    shards = TokenShards(directory, records, VOCABULARY)
    order = SampleOrder(0, shards.num_sequences(length))
    before = highest = resident_megabytes()
    for batch in range(1500):
        shards.batch(order.sequence_indices(np.arange(batch * size, (batch + 1) * size)), length)
        highest = max(highest, resident_megabytes())
    return highest - before


# ---- preparing


def preparing(effort: Effort) -> Figure:
    """Megabytes of text a second from files to finished shards, against encoding the same texts from memory and no more."""
    import tokenizers

    texts = [Path(file.location.path).read_text(encoding="utf-8", errors="replace") for file in find_files("embedded")]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as directory:
        spec = Path(directory, "tokenizer.json")
        spec.write_text(train_bpe(texts[: len(texts) // 8], 4096), encoding="utf-8")
        library = tokenizers.Tokenizer.from_file(str(spec))
        runs = iter(range(1000))

        def ours() -> Any:
            settings = DataConfig(source="embedded", tokenizer=str(spec))
            return preparation.prepare(preparation.check(settings, str(Path(directory, f"shards-{next(runs)}"))))

        def baseline() -> None:
            library.encode_batch_fast(texts, add_special_tokens=False)

        repeats = min(effort.repeats, 5)
        return compare("preparing the embedded corpus", lambda: rate(ours, megabytes), lambda: rate(baseline, megabytes), "MB/s", repeats, at_least(0.8))
