"""What a source consists of: files, cut into pieces that can be read independently, packed into units of work.

The plan is a pure function of the names and sizes of the files (and the row groups of Parquet), so that any number of
processes, in any order, cuts the same corpus in the same places.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ray_muloco.data.locations import Location, reading, resolve
from ray_muloco.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import fs

EMBEDDED = "embedded"
Kind = Literal["embedded", "text", "jsonl", "parquet"]
# fmt: off
TEXT_EXTENSIONS = (
    ".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv", ".log", ".srt",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".java", ".kt", ".scala", ".go", ".rs", ".js", ".mjs", ".ts", ".jsx", ".tsx",
    ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".m", ".swift", ".hs", ".ml", ".clj", ".ex", ".erl", ".sql", ".sh", ".css", ".scss",
    ".toml", ".yaml", ".yml", ".ini", ".cfg",
)
# fmt: on
JSONL_EXTENSIONS = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
SMALLEST_UNIT_BYTES, LARGEST_UNIT_BYTES = 16 << 20, 64 << 20
_UNITS = 64
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file of the source: `name` is its path below the source."""

    location: Location
    kind: Kind
    name: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The part [start, stop) of a file: bytes of text and JSON lines, row groups of Parquet. `weight` is its text in bytes, about."""

    file: SourceFile
    start: int
    stop: int
    weight: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Pieces that are tokenized together, in order, into shards of their own."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def weight(self) -> int:
        return sum(piece.weight for piece in self.pieces)


def embedded_root() -> Path:
    """Directory of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def find_files(source: str, field: str = "data.source") -> list[SourceFile]:
    """The files of a source in the order in which they are read: that of their paths.

    Raises ConfigError when there is no such place or it holds no file of a known kind.
    """
    if source == EMBEDDED:
        return _embedded_files(field)
    return files_at(resolve(source, field))


def files_at(location: Location) -> list[SourceFile]:
    """The files at a location, as `find_files` finds them."""
    info = location.info()
    if info.is_file:
        return [_source_file(location, info, _kind_of_file(location.path), info.base_name)]
    if info.type.name != "Directory":
        raise ConfigError(location.field, location.text, "does not exist", "pass 'embedded', or a path or URI of text, JSONL or Parquet")
    files: list[SourceFile] = []
    root = location.path.rstrip("/") + "/"
    for entry in location.files():
        kind = _kind_in_directory(entry.path)
        if kind is not None:
            name = entry.path.removeprefix(root)
            files.append(_source_file(location.child(name), entry, kind, name))
    if not files:
        raise ConfigError(
            location.field, location.text, "holds no text, JSONL or Parquet file", "known are .txt, .md, .py and other text, .jsonl, .jsonl.gz, .parquet"
        )
    return files


def source_fingerprint(files: list[SourceFile]) -> str:
    """A digest of the names, sizes and times of the files (of the embedded corpus: the Python version instead of times)."""
    digest = hashlib.sha256()
    for file in files:
        stamp = platform.python_version() if file.kind == "embedded" else f"{file.location.path} {file.mtime_ns}"
        digest.update(f"{file.kind} {file.name} {file.num_bytes} {stamp}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def plan_units(files: list[SourceFile], text_column: str, unit_bytes: int = 0) -> list[Unit]:
    """Cut files into pieces and pack those, in order, into units of about `unit_bytes` (0: a 64th of the source, 16 to 64 MiB).

    Raises ConfigError for a Parquet file that is broken, holds no rows or lacks the column.
    """
    total = sum(file.num_bytes for file in files)
    unit_bytes = unit_bytes or min(max(total // _UNITS, SMALLEST_UNIT_BYTES), LARGEST_UNIT_BYTES)
    units: list[Unit] = []
    pieces: list[Piece] = []
    weight = 0
    for piece in iter_pieces(files, text_column, unit_bytes):
        if pieces and weight + piece.weight > unit_bytes:
            units.append(Unit(number=len(units), pieces=tuple(pieces)))
            pieces, weight = [], 0
        pieces.append(piece)
        weight += piece.weight
    if pieces:
        units.append(Unit(number=len(units), pieces=tuple(pieces)))
    return units


def iter_pieces(files: Iterable[SourceFile], text_column: str, unit_bytes: int) -> Iterator[Piece]:
    """The pieces of files in order, none much above `unit_bytes` where it can be cut. A file is looked at when its turn comes."""
    from ray_muloco.data.readers import parquet_weights

    for file in files:
        if file.kind == "parquet":
            start, weight = 0, 0
            weights = parquet_weights(file, text_column)
            for group, group_bytes in enumerate(weights):
                if weight and weight + group_bytes > unit_bytes:
                    yield Piece(file=file, start=start, stop=group, weight=weight)
                    start, weight = group, 0
                weight += group_bytes
            yield Piece(file=file, start=start, stop=len(weights), weight=weight)
        elif file.num_bytes > unit_bytes and not file.name.endswith(".gz"):
            parts = -(-file.num_bytes // unit_bytes)
            edges = [file.num_bytes * i // parts for i in range(parts + 1)]
            for start, stop in itertools.pairwise(edges):
                yield Piece(file=file, start=start, stop=stop, weight=stop - start)
        else:
            yield Piece(file=file, start=0, stop=file.num_bytes, weight=file.num_bytes)


def _source_file(location: Location, info: fs.FileInfo, kind: Kind, name: str) -> SourceFile:
    return SourceFile(location=location, kind=kind, name=name, num_bytes=info.size or 0, mtime_ns=info.mtime_ns or 0)


def _kind_in_directory(path: str) -> Kind | None:
    lower = path.lower()
    if lower.endswith(".parquet"):
        return "parquet"
    if lower.endswith(JSONL_EXTENSIONS):
        return "jsonl"
    return "text" if lower.endswith(TEXT_EXTENSIONS) else None


def _kind_of_file(path: str) -> Kind:
    """A file named outright is text unless its name says otherwise."""
    kind = _kind_in_directory(path)
    return kind or ("jsonl" if path.lower().endswith((".json", ".json.gz")) else "text")


def _embedded_files(field: str) -> list[SourceFile]:
    """Python sources of the standard library: no tests, no packages installed beside it, nothing generated at build time."""
    from pyarrow import fs

    local, root = fs.LocalFileSystem(), embedded_root()
    files: list[SourceFile] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRECTORIES and not name.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(directory, name)
                relative = path.relative_to(root).as_posix()
                location = Location(local, str(path), relative, field)
                with reading(location):
                    files.append(SourceFile(location=location, kind="embedded", name=relative, num_bytes=path.stat().st_size, mtime_ns=0))
    if not files:
        raise ConfigError(field, EMBEDDED, "needs the sources of Python's standard library, which this Python lacks", "pass a path or URI")
    return sorted(files, key=lambda file: file.name)
