"""Paths and URIs, read and written through pyarrow.fs; whatever goes wrong there becomes one line that names the file.

A path is local; a URI (file://, s3://, gs:// and what else pyarrow knows) names its own file system. Finding a remote place has a
deadline here, reading and writing there those of pyarrow's clients.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ray_muloco.errors import ConfigError, RunError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

_T = TypeVar("_T")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
REMOTE_DEADLINE_SECONDS = 30.0
PART = ".part"  # ends the name of a local file that is still being written


def is_uri(location: str) -> bool:
    """Whether a location names its file system; anything else is a local path."""
    return bool(_URI.match(location))


def without_secrets(location: str) -> str:
    """A location as it may be shown: a URI without its query and the credentials before its host."""
    return re.sub(r"://[^/@]*:[^/@]*@", "://", location.partition("?")[0]) if is_uri(location) else location


@dataclass(frozen=True)
class Location:
    """A file or directory of a file system; `text` is how the user wrote it, `field` the setting it came from. Pickles."""

    filesystem: fs.FileSystem
    path: str
    text: str
    field: str = "data.source"

    def child(self, name: str) -> Location:
        """The entry `name` of this directory."""
        return Location(self.filesystem, f"{self.path.rstrip('/')}/{name}", f"{self.text.rstrip('/')}/{name}", self.field)

    @property
    def is_local(self) -> bool:
        """Whether the path names a file of this machine."""
        from pyarrow import fs

        return isinstance(self.filesystem, fs.LocalFileSystem)

    def info(self) -> fs.FileInfo:
        """Type, size and time of modification; ConfigError if the place cannot be reached."""
        with reading(self):
            return _within_deadline(self, lambda: self.filesystem.get_file_info(self.path))

    def files(self) -> list[fs.FileInfo]:
        """Files below this directory at any depth in order of their paths, without hidden ones (".name") and what is in those."""
        from pyarrow import fs

        selector = fs.FileSelector(self.path, recursive=True)
        with reading(self):
            found = _within_deadline(self, lambda: self.filesystem.get_file_info(selector), 10 * REMOTE_DEADLINE_SECONDS)
        root = self.path.rstrip("/") + "/"
        visible = [info for info in found if info.is_file and not any(part.startswith(".") for part in info.path.removeprefix(root).split("/"))]
        return sorted(visible, key=lambda info: info.path.encode("utf-8", "surrogateescape"))

    def read_bytes(self) -> bytes:
        """The whole content; ConfigError if it cannot be read."""
        with reading(self), self.filesystem.open_input_stream(self.path) as stream:
            return stream.read()


def resolve(location: str, field: str = "data.source") -> Location:
    """The location a path or URI names; nothing need exist there.

    Raises ConfigError for a scheme that pyarrow does not know and for a service that cannot be reached.
    """
    from pyarrow import fs

    if not is_uri(location):
        return Location(fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(location)), location, field)
    plain = without_secrets(location)
    unresolved = Location(fs.LocalFileSystem(), plain, plain, field)
    try:
        with reading(unresolved, "names a place that cannot be reached"):
            filesystem, path = _within_deadline(unresolved, lambda: _from_uri(location), remote=True)
    except ConfigError as error:  # pyarrow repeats the address, credentials and all
        raise ConfigError(field, plain, error.allowed.replace(location, plain), error.remedy) from None
    return Location(filesystem, path, plain, field)


@functools.lru_cache(maxsize=64)
def _from_uri(uri: str) -> tuple[fs.FileSystem, str]:
    """Kept, because finding a bucket's region takes a conversation over the network."""
    from pyarrow import fs

    if uri.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in uri:  # its default is to retry for a quarter of an hour
        uri += ("&" if "?" in uri else "?") + f"retry_limit_seconds={REMOTE_DEADLINE_SECONDS / 2:g}"
    return fs.FileSystem.from_uri(uri)


def _within_deadline(location: Location, work: Callable[[], _T], seconds: float = REMOTE_DEADLINE_SECONDS, remote: bool = False) -> _T:
    """What `work` returns; for remote places ConfigError if it takes longer than `seconds`."""
    if not remote and location.is_local:
        return work()
    outcome: list[Any] = []

    def target() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise ConfigError(location.field, location.text, f"did not answer within {seconds:g} s", "check the address, the credentials and the network")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def reading(location: Location, what: str = "cannot be read") -> Iterator[None]:
    """Turns the failures of reading and parsing a file into ConfigError with the file's name."""
    import zlib

    import pyarrow as pa

    try:
        yield
    except FileNotFoundError:
        raise ConfigError(location.field, location.text, "does not exist") from None
    except (OSError, EOFError, NotImplementedError, zlib.error, pa.ArrowException) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(location.field, location.text, f"{what} ({_first_sentence(reason)})") from None


def _first_sentence(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:200].rstrip() + " …"


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OutputDirectory:
    """A directory that is written whole file by whole file: a name is either absent or complete. Pickles.

    Local files are written beside their name, synced and renamed; object stores show an object when its upload has ended.
    Raises RunError("storage", …) when the place refuses.
    """

    def __init__(self, location: Location) -> None:
        self.location = location

    @property
    def text(self) -> str:
        return self.location.text

    def path(self, name: str) -> str:
        return self.location.child(name).path

    def size(self, name: str) -> int | None:
        """Bytes of the file, or None if there is none."""
        with self._refusals(name):
            info = self.location.filesystem.get_file_info(self.path(name))
            return info.size if info.is_file else None

    def names(self) -> list[str]:
        """Names of the entries, sorted; none if the directory does not exist."""
        from pyarrow import fs

        with self._refusals(""):
            found = self.location.filesystem.get_file_info(fs.FileSelector(self.location.path, allow_not_found=True))
            return sorted(info.base_name for info in found)

    def read(self, name: str) -> bytes | None:
        """The file's content, or None if there is none."""
        with self._refusals(name):
            try:
                with self.location.filesystem.open_input_stream(self.path(name)) as stream:
                    return stream.read()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, name: str, fill: bytes | Callable[[pa.NativeFile], None]) -> int:
        """Write a file, of these bytes or of what `fill` puts into a stream; returns its size. A reader sees all of it or nothing."""
        path, filesystem = self.path(name), self.location.filesystem
        target = f"{path}.{os.getpid()}.{threading.get_ident()}{PART}" if self.location.is_local else path
        with self._refusals(name):
            filesystem.create_dir(path.rpartition("/")[0], recursive=True)
            with filesystem.open_output_stream(target) as stream:
                if isinstance(fill, bytes):
                    stream.write(fill)
                else:
                    fill(stream)
                size = stream.tell()
            if target != path:
                _sync(target)
                os.replace(target, path)
            return size

    def delete(self, name: str) -> None:
        """Remove a file or a directory with all that is in it; nothing happens if there is none."""
        with self._refusals(name):
            info = self.location.filesystem.get_file_info(self.path(name))
            if info.is_file:
                self.location.filesystem.delete_file(info.path)
            elif info.type.name == "Directory":
                self.location.filesystem.delete_dir(info.path)

    @contextlib.contextmanager
    def _refusals(self, name: str) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (OSError, pa.ArrowException) as error:
            place = f"{self.text.rstrip('/')}/{name}".rstrip("/")
            raise RunError("storage", f"{place} cannot be used: {_first_sentence(str(error))}") from None
