"""Token shards: uncompressed Arrow IPC files, memory-mapped; many of them are one stream of tokens.

A shard file holds one column `tokens` in one record batch, so its tokens are one contiguous piece of memory:

    stream    = shard 0 | shard 1 | …                  N tokens, uint16 (vocabularies to 65,536 ids) or uint32
    sequence s = stream[s T : s T + T + 1]              T inputs and their T targets; neighbours share one token

Legend: n sequences asked for, T tokens a sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ray_muloco.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_TOKENS = 1 << 24
# Reading from a map makes its pages resident, 64 KiB at a touch; past this much the maps are dropped and made anew,
# so that resident memory does not grow with the corpus. The page cache keeps the data either way.
MAPPED_BYTES = 256 << 20
_TOUCH_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One shard file: `sha256` is that of its tokens as little-endian bytes, whatever surrounds them in the file."""

    file: str
    num_tokens: int
    num_bytes: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_shard(tokens: NDArray[Any], sink: pa.NativeFile) -> None:
    """Write one shard's tokens [N] of uint16 or uint32 as an Arrow IPC file."""
    import pyarrow as pa

    kind = pa.uint16() if tokens.dtype.itemsize == 2 else pa.uint32()
    column = pa.Array.from_buffers(kind, len(tokens), [None, pa.py_buffer(tokens)])
    batch = pa.record_batch([column], schema=pa.schema([pa.field("tokens", kind, nullable=False)]))
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


class _Shard:
    """One mapped file. The map can be dropped and made anew: the place of the tokens in the file is remembered."""

    def __init__(self, path: Path, record: ShardRecord, dtype: np.dtype[Any]) -> None:
        self.path, self.num_tokens, self.dtype = path, record.num_tokens, dtype
        self._offset = _locate_tokens(path, record, dtype)
        self._tokens: NDArray[Any] | None = None

    @property
    def tokens(self) -> NDArray[Any]:
        """The shard's tokens [N], a read-only view of the file."""
        if self._tokens is None:
            import pyarrow as pa

            with pa.memory_map(str(self.path)) as source:  # closing gives the descriptor back; the buffer keeps the map
                source.seek(self._offset)
                buffer = source.read_buffer(self.num_tokens * self.dtype.itemsize)
            self._tokens = np.frombuffer(buffer, dtype=self.dtype)
        return self._tokens

    def drop(self) -> None:
        self._tokens = None


class TokenShards:
    """One logical stream of tokens over many shard files.

    `batch` may drop and remake maps, so one object serves one thread; opening the same files twice costs nothing.
    Raises ConfigError, naming the file, when one is missing, truncated or not what its record says.
    """

    def __init__(self, directory: str | Path, records: Sequence[ShardRecord], vocab_size: int) -> None:
        self.records = tuple(record for record in records if record.num_tokens)
        dtype = token_dtype(vocab_size)
        self._shards = [_Shard(Path(directory) / record.file, record, dtype) for record in self.records]
        self._starts = np.concatenate([[0], np.cumsum([record.num_tokens for record in self.records], dtype=np.int64)]).astype(np.int64)
        self._bounded = int(self._starts[-1]) * dtype.itemsize <= MAPPED_BYTES
        self._touched_bytes = 0
        self._windows: dict[tuple[int, int], NDArray[Any]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens N of the stream."""
        return int(self._starts[-1])

    @property
    def digest(self) -> str:
        """SHA-256 over the shards' own digests and lengths, in order: equal for equal streams cut at equal places."""
        lines = "".join(f"{record.num_tokens} {record.sha256}\n" for record in self.records)
        return hashlib.sha256(lines.encode()).hexdigest()

    def num_sequences(self, sequence_length: int) -> int:
        """Sequences of T tokens (and one more to predict) that the stream holds: (N - 1) // T."""
        return max(0, self.num_tokens - 1) // sequence_length

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """stream[start:stop], a view of the mapped file where one shard holds all of it, a copy at a seam."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.num_tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        if first == len(self._shards) or stop <= self._starts[first + 1]:
            shard = self._shards[min(first, len(self._shards) - 1)].tokens if self._shards else np.empty(0, np.uint16)
            offset = int(self._starts[first]) if first < len(self._shards) else start
            return shard[start - offset : stop - offset]
        pieces: list[NDArray[Any]] = []
        while start < stop:
            end = min(stop, int(self._starts[first + 1]))
            pieces.append(self._shards[first].tokens[start - int(self._starts[first]) : end - int(self._starts[first])])
            start, first = end, first + 1
        return np.concatenate(pieces)

    def batch(self, sequence_numbers: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
        """Sequences [n] as tokens [n, T + 1] of int64: row r holds stream[s T : s T + T + 1] for s = sequence_numbers[r].

        Raises IndexError for a number outside [0, num_sequences(T)).
        """
        numbers = np.asarray(sequence_numbers, dtype=np.int64)
        if numbers.size == 0:
            return np.empty((0, sequence_length + 1), dtype=np.int64)
        if int(numbers.min()) < 0 or int(numbers.max()) >= self.num_sequences(sequence_length):
            raise IndexError(f"sequence numbers {int(numbers.min())} to {int(numbers.max())} of {self.num_sequences(sequence_length)}")
        if not self._bounded:
            self._account(numbers.size, sequence_length)
        starts = numbers * sequence_length
        if len(self._shards) == 1:
            return self._window(0, sequence_length)[starts].astype(np.int64)
        return self._gather(starts, sequence_length)

    def _gather(self, starts: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
        """Rows from several shards: shard by shard where many rows share one, row by row otherwise."""
        width = sequence_length + 1
        out = np.empty((starts.size, width), dtype=np.int64)
        owners = np.searchsorted(self._starts, starts, side="right") - 1
        seams = starts + width > self._starts[owners + 1]
        inner = owners[~seams] if seams.any() else owners
        present = np.unique(inner)
        if inner.size >= 4 * present.size:
            for owner in present.tolist():
                rows = np.flatnonzero((owners == owner) & ~seams)
                out[rows] = self._window(owner, sequence_length)[starts[rows] - self._starts[owner]]
            remaining = np.flatnonzero(seams).tolist()
        else:
            remaining = range(starts.size)
        local = (starts - self._starts[owners]).tolist()
        for row in remaining:
            if seams[row]:
                out[row] = self.tokens(int(starts[row]), int(starts[row]) + width)
            else:
                out[row] = self._shards[owners[row]].tokens[local[row] : local[row] + width]
        return out

    def _window(self, owner: int, sequence_length: int) -> NDArray[Any]:
        """All runs of T + 1 tokens of a shard as the rows of a view [N - T, T + 1]: one fancy index gathers a batch."""
        if (owner, sequence_length) not in self._windows:
            tokens = self._shards[owner].tokens
            shape = (len(tokens) - sequence_length, sequence_length + 1)
            self._windows[owner, sequence_length] = as_strided(tokens, shape, tokens.strides * 2, writeable=False)
        return self._windows[owner, sequence_length]

    def _account(self, num_sequences: int, sequence_length: int) -> None:
        self._touched_bytes += num_sequences * (_TOUCH_BYTES + (sequence_length + 1) * 4)
        if self._touched_bytes > MAPPED_BYTES:
            self._touched_bytes = 0
            self._windows.clear()
            for shard in self._shards:
                shard.drop()


def _locate_tokens(path: Path, record: ShardRecord, dtype: np.dtype[Any]) -> int:
    """Byte offset of the tokens in a shard file, after checking that file and record agree in everything but the content."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            size = source.size()
            if size != record.num_bytes:
                raise ConfigError("data.source", str(path), f"has {size} bytes where its manifest says {record.num_bytes}", "prepare it again")
            reader = pa.ipc.open_file(source)
            column = reader.get_batch(0).column(0)
            source.seek(0)
            start = source.read_buffer(1).address
            buffer = column.buffers()[1]
            kind = pa.uint16() if dtype.itemsize == 2 else pa.uint32()
            if reader.num_record_batches != 1 or column.type != kind or len(column) != record.num_tokens:
                raise ConfigError("data.source", str(path), f"is no shard of {record.num_tokens} tokens of {kind}", "prepare it again")
            return buffer.address - start
    except (OSError, pa.ArrowException, IndexError) as error:
        raise ConfigError("data.source", str(path), f"is a shard that cannot be read ({error})", "prepare it again") from None
