"""Locations: directories and pyarrow.fs URIs behind one interface.

A location is a directory (`runs/x`, `file:///data/runs`) or a URI of `pyarrow.fs` (`s3://bucket/runs`). Directories are
written with plain system calls, because only those can promise that bytes are on disk (fsync of file and directory) and
that a name changes in one instant (rename). Object stores replace whole objects at once, which is the same promise.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, Protocol, TypeVar

import pyarrow as pa
from pyarrow import fs

from ray_muloco.errors import ConfigError, RunError

T = TypeVar("T")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
OBJECT_STORES = ("s3", "gcs", "abfs")
COPY_BYTES = 4 << 20
_STAGED = re.compile(r"ray_muloco-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+\.stage")


# ---- locations


def is_uri(location: str) -> bool:
    """Whether a location names its scheme (`s3://bucket/x`, `file:///x`) rather than being a plain path."""
    return _SCHEME.match(location) is not None


def join(location: str, *names: str) -> str:
    """The location of something below `location`; the query of a URI (`?region=…`) stays at its end."""
    if not is_uri(location):
        return os.path.join(location, *names)
    base, question_mark, query = location.partition("?")
    names = tuple(name for name in names if name)
    return "/".join((base.rstrip("/"), *names)) + question_mark + query


def resolve(location: str, *, field: str = "run.storage-path") -> tuple[fs.FileSystem, str]:
    """The file system of a location and the path in it; plain paths become absolute.

    Raises ConfigError naming `field` for an unknown scheme, a missing bucket, or a store that cannot be reached.
    """
    allowed = "must be a directory, or a URI such as s3://bucket/path, gs://bucket/path, abfs://container@account/path, hdfs://host/path or file:///path"
    if not location.strip():
        raise ConfigError(field, location, allowed)
    if not is_uri(location):
        return fs.LocalFileSystem(), os.path.abspath(location)
    try:
        file_system, path = _from_uri(location)
    except (ValueError, OSError, NotImplementedError, ImportError, pa.ArrowException) as error:
        raise ConfigError(field, location, allowed, f"pyarrow.fs says: {str(error).splitlines()[0]}") from error
    if file_system.type_name in OBJECT_STORES and not path.strip("/"):
        raise ConfigError(field, location, "names no bucket", f"write {location.split(':')[0]}://bucket/path")
    return file_system, path


@functools.lru_cache(maxsize=64)
def _from_uri(location: str) -> tuple[fs.FileSystem, str]:
    """Kept, because a bucket's region is looked up over the network each time a file system is made."""
    if location.startswith(("gs://", "gcs://")) and "retry_limit_seconds" not in location:
        location += ("&" if "?" in location else "?") + "retry_limit_seconds=60"  # its own default is 15 minutes of silence
    return fs.FileSystem.from_uri(location)


def local_path(location: str) -> str | None:
    """The absolute path of a location on the local file system (a plain path or file://), None for any other."""
    file_system, path = resolve(location)
    return path if isinstance(file_system, fs.LocalFileSystem) else None


def split(location: str) -> tuple[str, str]:
    """The location of the directory that holds a file, and the file's name."""
    if not is_uri(location):
        return os.path.split(os.path.abspath(location))
    base, question_mark, query = location.partition("?")
    parent, _, name = base.rstrip("/").rpartition("/")
    return parent + question_mark + query, name


@contextlib.contextmanager
def refused_as(field: str, location: str) -> Iterator[None]:
    """While input is still being looked at, a storage that fails is a bad place to have named: ConfigError naming `field`."""
    try:
        yield
    except RunError as error:
        if error.reason != "storage":
            raise
        raise ConfigError(field, location, "cannot be used", error.detail) from error


# ---- one interface, two members


class Storage(Protocol):
    """Files below one location, named by relative paths. Every failure is a RunError with reason `storage`."""

    location: str

    def list_names(self) -> list[str]:
        """Names directly below the location, sorted; none if it does not exist or is a file."""
        ...

    def make_directory(self, name: str) -> None:
        """Make a directory and those above it."""
        ...

    def create(self, name: str, write: Callable[[BinaryIO], T], staging_dir: str) -> T:
        """Make a file of what `write` writes, whole and durable or not at all. Its directory must exist."""
        ...

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace a small file in one instant, durably. Its directory must exist."""
        ...

    def read_bytes(self, name: str) -> bytes | None:
        """A small file's content, None if there is no such file."""
        ...

    def open(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file to be read from start to end."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file, None if there is no such file."""
        ...

    def delete_file(self, name: str) -> None:
        """Remove a file, durably; a file that does not exist is no error."""
        ...

    def delete_tree(self, name: str) -> None:
        """Remove a directory and all below it; one that does not exist is no error."""
        ...


def open_storage(location: str, *, field: str = "run.storage-path") -> Storage:
    """The storage of a location: plain system calls for local directories, pyarrow.fs for the rest."""
    file_system, path = resolve(location, field=field)
    if isinstance(file_system, fs.LocalFileSystem):
        return DirectoryStorage(path)
    return RemoteStorage(location, file_system, path)


@contextlib.contextmanager
def _told_as_run_error(action: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RunError("storage", f"cannot {action} {where}: {error}") from error


class DirectoryStorage:
    """A directory of this machine, or of a file system that every node has mounted."""

    def __init__(self, path: str) -> None:
        self.location = os.path.abspath(path)

    def _path(self, name: str) -> str:
        return os.path.join(self.location, name) if name else self.location

    def list_names(self) -> list[str]:
        with _told_as_run_error("list", self.location), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.location))
        return []

    def make_directory(self, name: str) -> None:
        path = self._path(name)
        with _told_as_run_error("make", path):
            missing = []
            while not os.path.isdir(path):
                missing.append(path)
                path = os.path.dirname(path)
            for path in reversed(missing):
                os.makedirs(path, exist_ok=True)
                sync_directory(os.path.dirname(path))

    def create(self, name: str, write: Callable[[BinaryIO], T], staging_dir: str) -> T:
        path = self._path(name)
        temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}.tmp")
        with _told_as_run_error("write", path):
            if not os.path.isdir(os.path.dirname(path)):
                raise OSError(f"{os.path.dirname(path)} does not exist on {socket.gethostname()}; every node must see the run's storage path")
            try:
                with open(temporary, "xb") as stream:
                    result = write(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            sync_directory(os.path.dirname(path))
        return result

    def write_bytes(self, name: str, data: bytes) -> None:
        self.create(name, lambda stream: stream.write(data), "")

    def read_bytes(self, name: str) -> bytes | None:
        path = self._path(name)
        with _told_as_run_error("read", path), contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as stream:
            return stream.read()
        return None

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with _told_as_run_error("read", self._path(name)), open(self._path(name), "rb") as stream:
            yield stream

    def size(self, name: str) -> int | None:
        with _told_as_run_error("read", self._path(name)), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(self._path(name))
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def delete_file(self, name: str) -> None:
        path = self._path(name)
        with _told_as_run_error("delete", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            sync_directory(os.path.dirname(path))

    def delete_tree(self, name: str) -> None:
        with _told_as_run_error("delete", self._path(name)), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path(name))


def sync_directory(path: str) -> None:
    """Make names made, changed or removed in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network file systems that sync names by themselves
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def staged_path(staging_dir: str) -> Iterator[str]:
    """Path for a file that lives in a local directory (empty: the system's temporary one) as long as the block.

    What killed processes of this machine left there is removed.
    """
    directory, host = staging_dir or tempfile.gettempdir(), socket.gethostname()
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        match = _STAGED.fullmatch(name)
        if match is not None and match["host"] == host and not _process_exists(int(match["pid"])):
            with contextlib.suppress(OSError):  # another process swept first, or the file is another user's
                os.unlink(os.path.join(directory, name))
    path = os.path.join(directory, f"ray_muloco-{host}-{os.getpid()}-{secrets.token_hex(8)}.stage")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class RemoteStorage:
    """Anything else that pyarrow.fs can open. Large files are staged on the local disk, then uploaded."""

    def __init__(self, location: str, file_system: fs.FileSystem, path: str) -> None:
        self.location, self._fs, self._root = location, file_system, path.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def list_names(self) -> list[str]:
        with _told_as_run_error("list", self.location), contextlib.suppress(NotADirectoryError):
            return sorted(entry.base_name for entry in self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True)))
        return []

    def make_directory(self, name: str) -> None:
        with _told_as_run_error("make", join(self.location, name)):
            self._fs.create_dir(self._path(name), recursive=True)

    def create(self, name: str, write: Callable[[BinaryIO], T], staging_dir: str) -> T:
        with _told_as_run_error("write", join(self.location, name)), staged_path(staging_dir) as staged:
            with open(staged, "xb") as stream:
                result = write(stream)
            with open(staged, "rb") as source, self._fs.open_output_stream(self._path(name)) as target:
                shutil.copyfileobj(source, target, COPY_BYTES)
        return result

    def write_bytes(self, name: str, data: bytes) -> None:
        path = self._path(name)
        temporary = path if self._fs.type_name in OBJECT_STORES else f"{path}.{secrets.token_hex(4)}.tmp"
        with _told_as_run_error("write", join(self.location, name)):
            with self._fs.open_output_stream(temporary) as stream:
                stream.write(data)
            if temporary != path:
                self._fs.move(temporary, path)

    def read_bytes(self, name: str) -> bytes | None:
        if self.size(name) is None:
            return None
        with self.open(name) as stream:
            return stream.read()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with _told_as_run_error("read", join(self.location, name)), self._fs.open_input_stream(self._path(name)) as stream:
            yield stream

    def size(self, name: str) -> int | None:
        with _told_as_run_error("read", join(self.location, name)), contextlib.suppress(NotADirectoryError):
            info = self._fs.get_file_info(self._path(name))
            return info.size if info.type == fs.FileType.File else None
        return None

    def delete_file(self, name: str) -> None:
        if self.size(name) is not None:
            with _told_as_run_error("delete", join(self.location, name)):
                self._fs.delete_file(self._path(name))

    def delete_tree(self, name: str) -> None:
        with _told_as_run_error("delete", join(self.location, name)), contextlib.suppress(FileNotFoundError):
            self._fs.delete_dir(self._path(name))
