"""Pieces of files into passages of UTF-8 text, streaming: a text file is one document, a JSON line or Parquet row too.

Memory is bounded by a block, a JSON line or a batch of Parquet rows, whatever the file. What is not text, not JSON, not Parquet
or lacks the column becomes one line that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ray_muloco.data import documents
from ray_muloco.data.corpus import Piece, SourceFile, embedded_root
from ray_muloco.data.documents import HEAD_BYTES, Passage, Split, cut_document, document_key
from ray_muloco.data.locations import reading
from ray_muloco.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_NEWLINE_REACH_BYTES = 1 << 16
_BATCH_ROWS = 256
_BOM = b"\xef\xbb\xbf"


def passages(piece: Piece, split: Split, text_column: str) -> Iterator[Passage]:
    """The passages of a piece in order, SKIPPED for each document without text.

    Raises ConfigError naming the file (and line) for what is not text, not JSON, not Parquet, or lacks the column.
    """
    iterator = _READERS[piece.file.kind](piece, split, text_column)
    while True:
        with reading(piece.file.location):
            try:
                passage = next(iterator)
            except StopIteration:
                return
        yield passage


def _read_embedded(piece: Piece, split: Split, _: str) -> Iterator[Passage]:
    """A source of the standard library, split by its name; on another machine it lies elsewhere, so the path is made anew."""
    text = (embedded_root() / piece.file.name).read_bytes().decode("utf-8", "replace").encode()
    yield from cut_document(text, split, piece.file.name.encode())


def _read_text(piece: Piece, split: Split, _: str) -> Iterator[Passage]:
    file = piece.file
    with file.location.filesystem.open_input_file(file.location.path) as stream:
        size = stream.size()
        if size != file.num_bytes:
            raise ConfigError(file.location.field, file.location.text, "changed while it was being read")
        if size <= documents.BLOCK_BYTES and (piece.start, piece.stop) == (0, size):
            raw = stream.read()
            _require_text(raw, file, 0)
            yield from cut_document(raw.removeprefix(_BOM), split, document_key(raw, size))
            return
        sides = [(0, size, split.is_validation(document_key(stream.read_at(HEAD_BYTES, 0), size)))]
        if split.mode == "tail":
            cut = _boundary(stream, split.cut(size), size, lines=False)
            sides = [(0, cut, False), (cut, size, True)]
        first, last = _boundary(stream, piece.start, size), _boundary(stream, piece.stop, size)
        for begin, end, validation in sides:
            yield from _read_range(stream, file, (max(first, begin), min(last, end)), begin, validation)


def _read_range(stream: pa.NativeFile, file: SourceFile, part: tuple[int, int], opening: int, validation: bool) -> Iterator[Passage]:
    """Bytes [start, stop) of a large text file, block by block; the block at `opening` opens the document."""
    start, stop = part
    while start < stop:
        block = stream.read_at(min(documents.BLOCK_BYTES, stop - start), start)
        if not block:
            raise ConfigError(file.location.field, file.location.text, "changed while it was being read")
        end = len(block) if start + len(block) >= stop else _last_line_end_of_block(block)
        block = block[:end]
        _require_text(block, file, start)
        yield Passage(block.removeprefix(_BOM) if start == 0 else block, start == opening, validation)
        start += end


def _last_line_end_of_block(block: bytes) -> int:
    newline = block.rfind(b"\n")
    if newline >= 0:
        return newline + 1
    end = len(block) - 1
    while end > len(block) - 5 and block[end] & 0xC0 == 0x80:
        end -= 1
    return max(end, 1)


def _boundary(stream: pa.NativeFile, position: int, size: int, *, lines: bool = True) -> int:
    """The cut near `position` on which both neighbours agree: after the next newline, else before the next character."""
    if position <= 0 or position >= size:
        return min(max(position, 0), size)
    if lines:
        near = stream.read_at(min(_NEWLINE_REACH_BYTES, size - position + 1), position - 1)
        if (newline := near.find(b"\n")) >= 0:
            return position + newline
    near = stream.read_at(min(4, size - position), position)
    return position + next((i for i, byte in enumerate(near) if byte & 0xC0 != 0x80), len(near))


def _require_text(block: bytes, file: SourceFile, offset: int) -> None:
    try:
        block.decode("utf-8")
        bad = block.find(b"\0")
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        raise ConfigError(file.location.field, file.location.text, f"is not UTF-8 text (byte {offset + bad})", "convert it, or move what is not text away")


def _read_jsonl(piece: Piece, split: Split, text_column: str) -> Iterator[Passage]:
    for index, line in enumerate(_lines(piece), start=1):
        if not line.strip():
            continue
        try:
            text = _text_of_line(line, text_column)
        except ValueError as error:
            location, number = piece.file.location, index + _lines_before(piece)
            raise ConfigError(location.field, f"{location.text}:{number}", str(error)) from None
        yield from cut_document((text or "").encode("utf-8", "replace"), split)


def _text_of_line(line: bytes, text_column: str) -> str | None:
    """The text of a JSON line, None where it is null; ValueError says in words what is wrong."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not a line of JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be a JSON object with the key {text_column!r}")
    if text_column not in record:
        raise ValueError(f"has no key {text_column!r}, only {', '.join(list(record)[:20]) or 'none'}; pass --data.text-column")
    text = record[text_column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"must hold text under {text_column!r}, and holds {type(text).__name__}; pass --data.text-column")
    return text


def _lines(piece: Piece) -> Iterator[bytes]:
    """The lines that begin in the piece."""
    location = piece.file.location
    if piece.file.name.lower().endswith(".gz"):
        with location.filesystem.open_input_stream(location.path, compression="gzip") as stream:
            yield from _split_lines(iter(lambda: stream.read(documents.BLOCK_BYTES), b""))
        return
    with location.filesystem.open_input_file(location.path) as stream:
        start, stop = (_next_line_start(stream, edge, piece.file.num_bytes) for edge in (piece.start, piece.stop))
        blocks = (stream.read_at(min(documents.BLOCK_BYTES, stop - position), position) for position in range(start, stop, documents.BLOCK_BYTES))
        for index, line in enumerate(_split_lines(blocks)):
            yield line.removeprefix(_BOM) if index == start == 0 else line


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        lines = block.split(b"\n")
        if len(lines) > 1:
            yield b"".join([*rest, lines[0]])
            yield from lines[1:-1]
            rest = []
        rest.append(lines[-1])
    if last := b"".join(rest):
        yield last


def _lines_before(piece: Piece) -> int:
    """Lines of the file before the piece's first; counted only when there is a line to complain about."""
    if piece.start == 0:
        return 0
    with piece.file.location.filesystem.open_input_file(piece.file.location.path) as stream:
        stop = _next_line_start(stream, piece.start, piece.file.num_bytes)
        return sum(stream.read_at(min(documents.BLOCK_BYTES, stop - start), start).count(b"\n") for start in range(0, stop, documents.BLOCK_BYTES))


def _next_line_start(stream: pa.NativeFile, position: int, size: int) -> int:
    """The first place at or after `position` where a line begins."""
    if position <= 0:
        return 0
    position -= 1
    while position < size:
        block = stream.read_at(min(documents.BLOCK_BYTES, size - position), position)
        newline = block.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += max(1, len(block))
    return size


def _read_parquet(piece: Piece, split: Split, text_column: str) -> Iterator[Passage]:
    with _open_parquet(piece.file) as parquet:
        _require_text_column(parquet, piece.file, text_column)
        for group in range(piece.start, piece.stop):
            # one row group at a time, read through a small buffer: neither is kept when the next is read
            for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=[text_column], use_threads=False):
                yield from _rows(batch.column(0), split)


def _rows(column: pa.Array, split: Split) -> Iterator[Passage]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for text in column.to_pylist():
        yield from cut_document((text or "").encode(), split)


def parquet_weights(file: SourceFile, text_column: str) -> list[int]:
    """Bytes of text in each row group, as the footer says; ConfigError for a broken or empty file or a missing column."""
    with reading(file.location, "is not a whole Parquet file"), _open_parquet(file) as parquet:
        _require_text_column(parquet, file, text_column)
        metadata = parquet.metadata
        if metadata.num_rows == 0:
            raise ConfigError(file.location.field, file.location.text, "holds no rows", "remove the file")
        # columns are looked up in a row group: asking for metadata.schema would tie a knot that keeps the footer in memory
        first = metadata.row_group(0)
        leaf = [first.column(i).path_in_schema for i in range(first.num_columns)].index(text_column)
        return [max(1, metadata.row_group(i).column(leaf).total_uncompressed_size) for i in range(metadata.num_row_groups)]


def _open_parquet(file: SourceFile) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file.location.path, filesystem=file.location.filesystem, pre_buffer=False, buffer_size=documents.BLOCK_BYTES)


def _require_text_column(parquet: pq.ParquetFile, file: SourceFile, text_column: str) -> None:
    import pyarrow as pa

    schema = parquet.schema_arrow
    if text_column not in schema.names:
        names = ", ".join(schema.names[:20]) or "none"
        raise ConfigError("data.text-column", text_column, f"is no column of {file.location.text}; its columns are {names}", "pass --data.text-column")
    kind: Any = schema.field(text_column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind) or pa.types.is_null(kind)):
        raise ConfigError("data.text-column", text_column, f"must hold text, and holds {kind} in {file.location.text}")


_READERS: dict[str, Callable[[Piece, Split, str], Iterator[Passage]]] = {
    "embedded": _read_embedded,
    "text": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
}
