"""The store behind the tracker: what its URI means on this machine, how people open it, and how processes share it.

Does without importing mlflow, so that a display can name the command that opens the runs at no cost.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shlex
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

LOCK_DEADLINE_SECONDS = 120.0

_T = TypeVar("_T")


def redacted(uri: str) -> str:
    """The URI without a password, for messages."""
    return re.sub(r"://([^/@:]*):[^/@]*@", r"://\1:…@", uri)


def open_command(uri: str) -> str:
    """What a user types, or opens, to see the runs of a store."""
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        return redacted(uri)
    if scheme == "file":  # MLflow's retired format: refused from 3.13 on unless asked for
        return f"MLFLOW_ALLOW_FILE_STORE=true {_program()} ui --backend-store-uri {shlex.quote(uri.removeprefix('file://'))}"
    return f"{_program()} ui --backend-store-uri {shlex.quote(redacted(uri))}"


def _program() -> str:
    """mlflow as a user can type it: by its path where it lies beside this Python and no other is found first."""
    beside = os.path.join(os.path.dirname(sys.executable), "mlflow")
    if not os.path.exists(beside) or shutil.which("mlflow") == beside:
        return "mlflow"
    return shlex.quote(min(beside, os.path.relpath(beside), key=len))


def old_runs_notice(uri: str, directories: Sequence[str]) -> str | None:
    """A sentence for who has runs in MLflow's retired directory format beside these directories, else None."""
    for directory in dict.fromkeys(os.path.abspath(directory) for directory in directories):
        runs = os.path.join(directory, "mlruns")
        if uri != f"file://{runs}" and _is_file_store(runs):
            return f"MLflow runs are kept in {redacted(uri)}; the older ones in {runs} stay there: {open_command(f'file://{runs}')}"
    return None


def _is_file_store(path: str) -> bool:
    with contextlib.suppress(OSError):
        return any(os.path.isfile(os.path.join(entry.path, "meta.yaml")) for entry in os.scandir(path) if entry.is_dir())
    return False


def sqlite_path(uri: str) -> str | None:
    """The file of a SQLite store."""
    return unquote(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def artifact_location(uri: str, experiment: str) -> str | None:
    """Beside a SQLite database, since MLflow's default is ./mlruns of whichever process came first; else the server's choice."""
    path = sqlite_path(uri)
    return f"file://{quote(os.path.join(os.path.dirname(path), 'mlartifacts', experiment))}" if path else None


def quoted(path: str) -> str:
    """A path as it stands in a SQLite URI: what would begin an escape or the options is escaped."""
    return path.replace("%", "%25").replace("?", "%3F")


def retrying(call: Callable[[], _T]) -> _T:
    """Call again while a database says that another process is writing, up to a deadline."""
    deadline, pause = time.monotonic() + LOCK_DEADLINE_SECONDS, 0.05
    while True:
        try:
            return call()
        except Exception as error:
            busy = re.search(r"database (table )?is locked|deadlock", str(error))
            if not busy or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def failure_of(uri: str, error: BaseException) -> str:
    """One line that says why a store failed, without passwords; with the way out where there is a known one."""
    text = " ".join(redacted(str(error)).split())
    if "MLFLOW_ALLOW_FILE_STORE" in text:
        return (
            "MLflow has retired this directory format: unset MLFLOW_TRACKING_URI to use a database beside the runs, move the old runs with "
            "`mlflow migrate-filestore`, or set MLFLOW_ALLOW_FILE_STORE=true"
        )
    if "Caused by" in text:  # what the network said, not how often it was asked
        text = text.split("Caused by", 1)[1].split("Error(", 1)[-1].strip(" ()'\"")
    return f"{type(error).__name__}: {text}"[:300]


def ensure_database(uri: str, initialize: Callable[[str], object]) -> None:
    """Create the database of a SQLite URI unless it is there: by one process, whichever comes first, and whole.

    MLflow's first call on a fresh database creates and migrates the tables, and concurrent first calls would each.
    initialize: takes a SQLite URI and makes that call.
    """
    path = sqlite_path(uri)
    if path is None or _is_there(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.lock", "a") as lock:
        deadline = time.monotonic() + LOCK_DEADLINE_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}.lock was held for {LOCK_DEADLINE_SECONDS:.0f} s") from None
                time.sleep(0.05)
            except OSError:  # a file system without locks: the rename alone has to do, and the last one wins before any run is in it
                break
        if not _is_there(path):
            _create_database(path, initialize)


def _is_there(path: str) -> bool:
    return os.path.exists(path) and os.path.getsize(path) > 0


def _create_database(path: str, initialize: Callable[[str], object]) -> None:
    """Make a database beside, and put it in its place whole.

    The migrations are hundreds of transactions: a process killed among them would leave tables that no later one can
    finish. In memory they also take a second, and not the ten that a slow disk makes of them.
    """
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="mlflow-", dir=memory if os.access(memory, os.W_OK) else None) as directory:
        made, beside = os.path.join(directory, "mlflow.db"), f"{path}.{os.getpid()}.new"
        initialize(f"sqlite:///{made}")
        with contextlib.closing(sqlite3.connect(made)) as source, contextlib.closing(sqlite3.connect(beside)) as target:
            source.backup(target)
        os.replace(beside, path)


class _NotFromThread(logging.Filter):
    """Drops what one thread logs: MLflow narrates its migrations and repeats as errors what it raises anyway."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self._thread


@contextlib.contextmanager
def quiet_loggers() -> Iterator[Callable[[], None]]:
    """While open, this thread's chatter through MLflow's loggers is dropped; call the value once MLflow has made its handlers."""
    silence = _NotFromThread(threading.get_ident())
    quiet: list[logging.Filterer] = [logging.getLogger(name) for name in ("urllib3.connectionpool", "alembic.runtime.migration")]

    def add_handlers() -> None:
        for name in ("mlflow", "alembic", "sqlalchemy.engine"):
            quiet.extend(logging.getLogger(name).handlers)
        for place in quiet:
            place.addFilter(silence)

    try:
        yield add_handlers
    finally:
        for place in quiet:
            place.removeFilter(silence)
