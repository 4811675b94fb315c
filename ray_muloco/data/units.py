"""One unit of work: pieces of text in, shards of tokens and a record of them out.

A unit depends on nothing but its job, so units run in any order, in any number of processes, and a finished one is kept:
its record, written last, says that its shards are whole.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_muloco.data.corpus import Unit
from ray_muloco.data.documents import SKIPPED, Passage, Split
from ray_muloco.data.locations import OutputDirectory
from ray_muloco.data.readers import passages
from ray_muloco.data.shards import SHARD_TOKENS, ShardRecord, token_dtype, write_shard
from ray_muloco.data.tokenizer import Tokenizer

TRAIN, VALIDATION = "train", "validation"
_BATCH_BYTES = 1 << 20
_BATCH_PASSAGES = 1024
_COUNT_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitJob:
    """What one unit of work needs to know; `state` is the directory of records below the output. Pickles."""

    unit: Unit
    split: Split
    text_column: str
    output: OutputDirectory
    state: str

    @property
    def record_name(self) -> str:
        return f"{self.state}/unit-{self.unit.number:05d}.json"


@dataclass(kw_only=True)
class SideRecord:
    """What a unit (or all of them) put on one side of the split; `counts` [V] is how often each id occurs."""

    shards: list[ShardRecord] = field(default_factory=list)
    num_documents: int = 0
    text_bytes: int = 0
    counts: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    def add(self, other: SideRecord) -> None:
        """Append what the next unit holds."""
        self.shards.extend(other.shards)
        self.num_documents += other.num_documents
        self.text_bytes += other.text_bytes
        self.counts += other.counts


@dataclass(kw_only=True)
class UnitRecord:
    """What became of a unit; `num_skipped` counts documents without text."""

    number: int
    train: SideRecord
    validation: SideRecord
    num_skipped: int = 0

    def to_json(self) -> bytes:
        sides = {name: {**asdict(side), "counts": _pack(side.counts)} for name, side in ((TRAIN, self.train), (VALIDATION, self.validation))}
        return json.dumps({"number": self.number, "num_skipped": self.num_skipped, **sides}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> UnitRecord:
        values = json.loads(text)
        sides = {}
        for name in (TRAIN, VALIDATION):
            side = values[name]
            shards = [ShardRecord(**shard) for shard in side["shards"]]
            sides[name] = SideRecord(**{**side, "shards": shards, "counts": _unpack(side["counts"])})
        return cls(number=values["number"], num_skipped=values["num_skipped"], **sides)


def build_unit(job: UnitJob, tokenizer: Tokenizer) -> UnitRecord:
    """Tokenize a unit, write its shards, then its record.

    Raises ConfigError for a file that is not what it should be, RunError("storage", …) if the output refuses.
    """
    writers = {name: _ShardWriter(job.output, f"{name}-{job.unit.number:05d}", tokenizer.vocab_size) for name in (TRAIN, VALIDATION)}
    num_skipped = 0
    for group in _groups(job):
        written = [passage for passage in group if passage is not SKIPPED]
        num_skipped += len(group) - len(written)
        for passage, ids in zip(written, tokenizer.encode_batch([passage.text for passage in written]), strict=True):
            writer = writers[VALIDATION if passage.validation else TRAIN]
            if passage.opens:
                writer.open_document(tokenizer.separator_id)
            writer.append(ids, len(passage.text))
    record = UnitRecord(number=job.unit.number, train=writers[TRAIN].finish(), validation=writers[VALIDATION].finish(), num_skipped=num_skipped)
    job.output.write(job.record_name, record.to_json())
    return record


def finished_unit(job: UnitJob) -> UnitRecord | None:
    """The record of a unit that was finished before and whose shards are all there, else None."""
    text = job.output.read(job.record_name)
    if text is None:
        return None
    record = UnitRecord.from_json(text)
    shards = [*record.train.shards, *record.validation.shards]
    return record if all(job.output.size(shard.file) == shard.num_bytes for shard in shards) else None


def _groups(job: UnitJob) -> Iterator[list[Passage]]:
    """Passages in batches for the tokenizer: large enough to be quick, small enough to bound memory."""
    group: list[Passage] = []
    size = 0
    for piece in job.unit.pieces:
        for passage in passages(piece, job.split, job.text_column):
            group.append(passage)
            size += len(passage.text)
            if size >= _BATCH_BYTES or len(group) >= _BATCH_PASSAGES:
                yield group
                group, size = [], 0
    if group:
        yield group


class _ShardWriter:
    """Collects tokens of one side and writes a shard whenever SHARD_TOKENS of them are there."""

    def __init__(self, output: OutputDirectory, prefix: str, vocab_size: int) -> None:
        self._output, self._prefix, self._vocab_size = output, prefix, vocab_size
        self._buffer: NDArray[Any] = np.empty(0, dtype=token_dtype(vocab_size))
        self._used = 0
        self._record = SideRecord(counts=np.zeros(vocab_size, dtype=np.int64))

    def open_document(self, separator_id: int) -> None:
        self._record.num_documents += 1
        self._write(np.array([separator_id], dtype=self._buffer.dtype))

    def append(self, ids: NDArray[Any], text_bytes: int) -> None:
        self._record.text_bytes += text_bytes
        self._write(ids)

    def finish(self) -> SideRecord:
        self._flush()
        return self._record

    def _write(self, ids: NDArray[Any]) -> None:
        while len(ids):
            if self._used == len(self._buffer):
                self._make_room(len(ids))
            part = ids[: len(self._buffer) - self._used]
            self._buffer[self._used : self._used + len(part)] = part
            self._used += len(part)
            ids = ids[len(part) :]

    def _make_room(self, wanted: int) -> None:
        """Double the buffer up to a shard's size; a full one is written out."""
        if self._used >= SHARD_TOKENS:
            self._flush()
            return
        size = min(SHARD_TOKENS, max(2 * self._used, wanted, 1 << 16))
        grown = np.empty(size, dtype=self._buffer.dtype)
        grown[: self._used] = self._buffer[: self._used]
        self._buffer = grown

    def _flush(self) -> None:
        if not self._used:
            return
        tokens, record = self._buffer[: self._used], self._record
        name = f"{self._prefix}-{len(record.shards):03d}.arrow"
        num_bytes = self._output.write(name, lambda sink: write_shard(tokens, sink))
        record.shards.append(ShardRecord(file=name, num_tokens=len(tokens), num_bytes=num_bytes, sha256=hashlib.sha256(tokens.data).hexdigest()))
        for start in range(0, len(tokens), _COUNT_TOKENS):  # in parts: counting makes an int64 copy
            record.counts += np.bincount(tokens[start : start + _COUNT_TOKENS], minlength=self._vocab_size)
        self._used = 0


def _pack(counts: NDArray[np.int64]) -> str:
    return base64.b85encode(zlib.compress(counts.astype("<i8").tobytes(), 1)).decode()


def _unpack(text: str) -> NDArray[np.int64]:
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), dtype="<i8").astype(np.int64)
