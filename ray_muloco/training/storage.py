"""What a run keeps: small files at any location, and in its own local directory the lock and metrics.jsonl.

One writer a run, atomic replacement of every small file, whole lines only. Neither locks nor appended lines exist on
object storage, so a run kept at a URI has a local directory (`local_directory`) whose files are uploaded.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyarrow import fs

from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training.locations import (
    COPY_BYTES,
    OBJECT_STORES,
    DirectoryStorage,
    RemoteStorage,
    Storage,
    is_uri,
    join,
    local_path,
    open_storage,
    refused_as,
    resolve,
    split,
    sync_directory,
)  # fmt: skip

__all__ = [
    "RunLock", "append_metrics", "atomic_write_text", "check_probe", "describe_holder", "download", "is_uri", "join", "list_names", "local_directory",
    "local_path", "open_storage", "read_metrics", "read_text", "refused_as", "remove", "remove_probe", "require_writable", "resolve", "split", "sync_metrics",
    "truncate_metrics", "upload", "write_probe",
]  # fmt: skip

_LOCK_RECORD_BYTES = 512
"""Length of the record in run.lock, constant, so that one write replaces the whole of it."""


# ---- small files by location


def atomic_write_text(location: str, text: str) -> None:
    """Replace a text file at a path or URI in one instant; readers see the old content or the new, never a part."""
    parent, name = split(location)
    storage = open_storage(parent)
    storage.make_directory("")
    storage.write_bytes(name, text.encode())


def read_text(location: str) -> str | None:
    """A text file at a path or URI, None if there is no such file."""
    parent, name = split(location)
    data = open_storage(parent).read_bytes(name)
    return None if data is None else data.decode()


def list_names(location: str) -> list[str]:
    """Names directly below a directory or URI, sorted; none if it does not exist."""
    return open_storage(location).list_names()


def remove(location: str) -> None:
    """Remove a file at a path or URI; one that does not exist is no error."""
    parent, name = split(location)
    open_storage(parent).delete_file(name)


def local_directory(location: str) -> str:
    """The directory of this machine that stands for a location: itself, or for a URI one below ~/.cache/ray_muloco.

    The same location always has the same directory, and local_directory(join(x, name)) lies in local_directory(x).
    """
    path = local_path(location)
    if path is not None:
        return path
    scheme, _, rest = location.partition("?")[0].partition(":")
    names = [name for name in rest.split("/") if name not in ("", ".", "..")]
    return os.path.join(os.path.expanduser("~"), ".cache", "ray_muloco", scheme, *names)


def upload(directory: str, location: str, names: Iterable[str]) -> None:
    """Copy those of the named files that exist in a local directory to a location."""
    if local_path(location) == os.path.abspath(directory):
        return
    storage = open_storage(location)
    storage.make_directory("")
    for name in names:
        path = os.path.join(directory, name)
        if os.path.exists(path):
            with open(path, "rb") as source:
                storage.create(name, lambda stream, source=source: shutil.copyfileobj(source, stream, COPY_BYTES), directory)


def download(location: str, directory: str, names: Iterable[str]) -> None:
    """Make a local directory's copies of the named files what they are at a location; those not there are left alone."""
    if local_path(location) == os.path.abspath(directory):
        return
    source, target = open_storage(location), open_storage(directory)
    target.make_directory("")
    for name in names:
        data = source.read_bytes(name)
        if data is not None:
            target.write_bytes(name, data)


# ---- probes: can the storage path be written, and can every node see it?


def require_writable(location: str, *, field: str = "run.storage-path") -> None:
    """Refuse a location that cannot be written, before there is anything to write; ConfigError names `field`.

    A file is written and removed again, in the location or, where it does not exist yet, in what there is of its path: no
    directory is made, so none has to be removed under the hands of another run. (Object stores have no directories.)
    """
    with refused_as(field, location):
        storage = _what_there_is(location, field)
        name = f".probe-{secrets.token_hex(8)}"
        storage.write_bytes(name, b"")
        storage.delete_file(name)


def _what_there_is(location: str, field: str) -> Storage:
    """The location, or the nearest directory above it that exists; ConfigError where a file is in the way."""
    file_system, path = resolve(location, field=field)
    if file_system.type_name in OBJECT_STORES:
        return open_storage(location, field=field)
    try:
        while (kind := file_system.get_file_info(path).type) == fs.FileType.NotFound and path not in ("", "/"):
            path = os.path.dirname(path.rstrip("/"))
    except OSError as error:
        raise ConfigError(field, location, "cannot be used", str(error)) from error
    if kind not in (fs.FileType.Directory, fs.FileType.NotFound):
        raise ConfigError(field, location, f"must be a directory, and {path} is a file", "name another directory")
    return DirectoryStorage(path) if isinstance(file_system, fs.LocalFileSystem) else RemoteStorage(location, file_system, path)


def write_probe(location: str) -> str:
    """Write a small file with a random name below a location; returns its token for `check_probe` on other nodes.

    Raises ConfigError when the location cannot be written.
    """
    token = secrets.token_hex(8)
    try:
        storage = open_storage(location)
        storage.make_directory("")
        storage.write_bytes(f".probe-{token}", token.encode())
    except RunError as error:
        raise ConfigError("run.storage-path", location, "must be writable", error.detail) from error
    return token


def check_probe(location: str, token: str) -> bool:
    """Whether this process sees, at this location, what `write_probe` wrote: a node that does not cannot take part."""
    try:
        return open_storage(location).read_bytes(f".probe-{token}") == token.encode()
    except (ConfigError, RunError):
        return False


def remove_probe(location: str, token: str) -> None:
    """Take the probe away again."""
    open_storage(location).delete_file(f".probe-{token}")


# ---- metrics.jsonl


def append_metrics(path: str, record: Mapping[str, Any]) -> None:
    """Add one record as one line, in one write; numbers that are not finite become null, which JSON can say.

    The line is on disk for good only after `sync_metrics`.
    """
    line = json.dumps(_finite(record), allow_nan=False) + "\n"
    with open(path, "ab", buffering=0) as stream:
        stream.write(line.encode())


def sync_metrics(path: str) -> None:
    """Make the lines written so far survive a power cut, and the name of their file too."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    sync_directory(os.path.dirname(os.path.abspath(path)))


def truncate_metrics(path: str, last_round: int) -> int:
    """Keep the lines of rounds up to `last_round`, dropping later ones and any torn line; returns how many are kept."""
    text = read_text(path)
    if text is None:
        return 0
    kept = [line for line in text.splitlines() if 0 <= _round_of(line) <= last_round]
    atomic_write_text(path, "".join(f"{line}\n" for line in kept))
    return len(kept)


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; a torn line is skipped, a file that does not exist has none."""
    return [json.loads(line) for line in (read_text(path) or "").splitlines() if _round_of(line) >= 0]


def _round_of(line: str) -> int:
    """Round of a line of metrics, -1 for a torn one."""
    try:
        record = json.loads(line)
    except ValueError:
        return -1
    round_number = record.get("round") if isinstance(record, dict) else None
    return round_number if isinstance(round_number, int) else -1


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- one writer a run


class RunLock:
    """One run has one writer. A kernel lock on `run.lock` that dies with its process, and a number that only grows.

    The lock keeps a second writer out; the number (the fencing token) tells a writer whose lock was lost without its
    knowledge (a network file system's lease, a run directory deleted and made again) that it must stop: `check`.
    Making a RunLock takes the lock; `release`, or the end of a `with` block, gives it back:

        with RunLock(run_dir, wait_seconds=60.0) as lock:
            lock.check()   # before each commit

    wait_seconds: how long to wait for another writer. on_wait is called once, with a sentence that names that writer,
    if the lock is not free at once. Raises RunError `locked` when the wait was in vain, ConfigError where the directory
    cannot be written or locked.
    """

    def __init__(self, run_dir: str, wait_seconds: float, on_wait: Callable[[str], None] | None = None) -> None:
        self.run_dir = os.path.abspath(run_dir)
        self.path = os.path.join(self.run_dir, "run.lock")
        self.token = 0
        self._descriptor = -1
        self._record = b""
        deadline = time.monotonic() + wait_seconds
        while not self._try_acquire():
            holder = describe_holder(_read_holder(self.path))
            if on_wait is not None:
                on_wait(f"run {self.run_dir} is being written by {holder}; waiting up to {wait_seconds:g} s")
                on_wait = None
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunError("locked", f"run {self.run_dir} is being written by {holder}; waited {wait_seconds:g} s")
            time.sleep(min(0.1, left))

    def _try_acquire(self) -> bool:
        try:
            os.makedirs(self.run_dir, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError("run.storage-path", self.run_dir, "must be writable", str(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            os.close(descriptor)
            raise ConfigError("run.storage-path", self.run_dir, "must be on a file system with file locks", f"flock failed: {error}") from error
        if not _names_file(self.path, descriptor):  # deleted and made again while we waited: this lock keeps nobody out
            os.close(descriptor)
            return self._try_acquire()
        self._descriptor = descriptor
        self.token = int(_read_holder(self.path).get("token", 0)) + 1
        holder = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self._record = json.dumps(holder).encode().ljust(_LOCK_RECORD_BYTES - 1) + b"\n"
        os.pwrite(descriptor, self._record, 0)
        os.fsync(descriptor)
        return True

    def check(self) -> None:
        """Raises RunError `fenced` unless this is still the run's only writer."""
        if self._descriptor < 0:
            raise RunError("fenced", f"run {self.run_dir} is not locked by this process")
        if not _names_file(self.path, self._descriptor):
            raise RunError("fenced", f"{self.path} was deleted while this process was writing the run")
        if os.pread(self._descriptor, _LOCK_RECORD_BYTES, 0) != self._record:
            raise RunError("fenced", f"run {self.run_dir} was taken over by {describe_holder(_read_holder(self.path))}")

    def release(self) -> None:
        """Let the next writer in; a second call does nothing."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # at once, even if a forked child still holds a copy of the descriptor
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _names_file(path: str, descriptor: int) -> bool:
    """Whether a path still leads to the file that a descriptor has open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_holder(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            holder = json.loads(stream.read())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def describe_holder(holder: Mapping[str, Any]) -> str:
    """A run's writer in words."""
    if not holder:
        return "another process"
    return f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}"
