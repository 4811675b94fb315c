"""Token shards: uncompressed Arrow IPC files, memory-mapped; many of them are one stream of tokens.

A shard file holds one column `tokens` in one record batch, so its tokens are one contiguous piece of memory:

    stream    = shard 0 | shard 1 | …                  N tokens, uint16 (vocabularies to 65,536 ids) or uint32
    sequence s = stream[s T : s T + T + 1]              T inputs and their T targets; neighbours share one token

Legend: n sequences asked for, T tokens a sequence.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_muloco.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_TOKENS = 1 << 24
MAPPED_BYTES = 512 << 20
OPEN_FILES = 128
_NOWHERE = -(1 << 62)


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
    """One shard file: mapped on first use, or read piece by piece."""

    def __init__(self, path: Path, record: ShardRecord, dtype: np.dtype[Any]) -> None:
        self.path, self.num_tokens, self.dtype = path, record.num_tokens, dtype
        self._offset = _locate_tokens(path, record, dtype)
        self._tokens: NDArray[Any] | None = None
        self._close: weakref.finalize[Any, Any] | None = None
        self._descriptor = -1

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

    def read(self, start: int, stop: int) -> bytes:
        """The bytes of tokens [start, stop) by a system call: nothing becomes resident. The file stays open until `close`."""
        if self._close is None:
            self._descriptor = os.open(self.path, os.O_RDONLY)
            self._close = weakref.finalize(self, os.close, self._descriptor)
        size = self.dtype.itemsize
        return os.pread(self._descriptor, (stop - start) * size, self._offset + start * size)

    def close(self) -> None:
        """Close the file; the next `read` opens it again."""
        if self._close is not None:
            self._close()
            self._close = None


class TokenShards:
    """One logical stream of tokens over many shard files.

    A stream of up to MAPPED_BYTES is gathered from memory maps; a longer one is read by system calls, because the pages that
    random reads touch would stay resident until all of it was. One object serves one thread; opening twice costs nothing.
    Raises ConfigError, naming the file, when one is missing, truncated or not what its record says.
    """

    def __init__(self, directory: str | Path, records: Sequence[ShardRecord], vocab_size: int) -> None:
        self.records = tuple(record for record in records if record.num_tokens)
        self._dtype = token_dtype(vocab_size)
        self._shards = [_Shard(Path(directory) / record.file, record, self._dtype) for record in self.records]
        self._bounds = [0, *itertools.accumulate(record.num_tokens for record in self.records)]
        self._mapped = self.num_tokens * self._dtype.itemsize <= MAPPED_BYTES
        self._widest = max((record.num_tokens for record in self.records), default=0)
        self._windows: dict[int, tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]] = {}
        self._open: dict[int, _Shard] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens N of the stream."""
        return self._bounds[-1]

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
        parts = [self._shards[owner].tokens[begin:end] for owner, begin, end in self._parts(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, dtype=self._dtype)])

    def batch(self, sequence_numbers: NDArray[np.int64], sequence_length: int) -> NDArray[np.int64]:
        """Sequences [n] as tokens [n, T + 1] of int64: row r holds stream[s T : s T + T + 1] for s = sequence_numbers[r].

        Raises IndexError for a number outside [0, num_sequences(T)).
        """
        numbers = np.asarray(sequence_numbers, dtype=np.int64)
        width = sequence_length + 1
        if not numbers.size:
            return np.empty((0, width), dtype=np.int64)
        starts = numbers * sequence_length
        if self._mapped and self._widest > sequence_length:
            windows, edges, shifts = self._window(sequence_length)
            with contextlib.suppress(IndexError):  # NumPy's own check finds the items that lie nowhere: a row at a seam, or none at all
                runs = windows[starts + shifts[np.searchsorted(edges, starts, side="right")]]
                return runs.view(self._dtype).reshape(numbers.size, width).astype(np.int64)
        last = self.num_sequences(sequence_length) - 1
        if int(numbers.min()) < 0 or int(numbers.max()) > last:
            raise IndexError(f"sequence numbers {int(numbers.min())} to {int(numbers.max())}, and the last of them is {last}")
        return self._read(starts, width).astype(np.int64)

    def _window(self, sequence_length: int) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
        """What gathers rows from any number of maps with one index that moves each run of T + 1 tokens as one item.

        Returns all runs as overlapping items of one view, which begins at the lowest of the maps and spans all of them with what
        lies between; the edges between the parts of the stream where a row lies in one map and those where it does not; and for
        each part what takes a place in the stream to its item. Only items inside a map may be read: elsewhere the sum is no index.
        """
        if sequence_length not in self._windows:
            size = self._dtype.itemsize
            maps = [shard.tokens for shard in self._shards]
            addresses = [tokens.__array_interface__["data"][0] for tokens in maps]
            lowest, highest = min(addresses), max(address + tokens.nbytes for address, tokens in zip(addresses, maps, strict=True))
            span = _Span(lowest, (highest - lowest) // size - sequence_length, size, (sequence_length + 1) * size, maps)
            edges, shifts = [0], [_NOWHERE]  # before the stream, then in turn: a row begins and ends in this shard, only begins in it
            for address, (start, stop) in zip(addresses, itertools.pairwise(self._bounds), strict=True):
                edges += [max(start, stop - sequence_length), stop]
                shifts += [(address - lowest) // size - start, _NOWHERE]
            table = np.array([*shifts, _NOWHERE], dtype=np.int64)
            self._windows[sequence_length] = np.asarray(span), np.array(edges, dtype=np.int64), table
        return self._windows[sequence_length]

    def _read(self, starts: NDArray[np.int64], width: int) -> NDArray[Any]:
        """Rows [n, width] one by one: from the maps, or by a system call each (two where a row spans two shards)."""
        if self._mapped:
            return np.concatenate([self.tokens(start, start + width) for start in starts.tolist()]).reshape(starts.size, width)
        parts = [self._opened(owner).read(begin, end) for start in starts.tolist() for owner, begin, end in self._parts(start, start + width)]
        return np.frombuffer(b"".join(parts), dtype=self._dtype).reshape(starts.size, width)

    def _opened(self, owner: int) -> _Shard:
        """A shard about to be read; of the others no more than OPEN_FILES stay open."""
        shard = self._open.get(owner)
        if shard is None:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            shard = self._open[owner] = self._shards[owner]
        return shard

    def _parts(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(shard, begin, end) of the pieces that make up stream[start:stop]."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.num_tokens}")
        parts: list[tuple[int, int, int]] = []
        owner = bisect.bisect_right(self._bounds, start) - 1
        while start < stop:
            first, end = self._bounds[owner], min(stop, self._bounds[owner + 1])
            parts.append((owner, start - first, end - first))
            start, owner = end, owner + 1
        return parts


class _Span:
    """Overlapping items of memory for NumPy: `count` of them, one every `stride` bytes from `address`. Keeps `owners` alive."""

    def __init__(self, address: int, count: int, stride: int, item_bytes: int, owners: Sequence[NDArray[Any]]) -> None:
        self.owners = owners
        self.__array_interface__ = {"version": 3, "data": (address, True), "typestr": f"|V{item_bytes}", "shape": (count,), "strides": (stride,)}


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
            aligned = (buffer.address - start) % dtype.itemsize == 0
            if not aligned or reader.num_record_batches != 1 or column.type != kind or len(column) != record.num_tokens:
                raise ConfigError("data.source", str(path), f"is no shard of {record.num_tokens} tokens of {kind}", "prepare it again")
            return buffer.address - start
    except (OSError, pa.ArrowException, IndexError) as error:
        raise ConfigError("data.source", str(path), f"is a shard that cannot be read ({error})", "prepare it again") from None
