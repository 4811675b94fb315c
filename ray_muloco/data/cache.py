"""Directories that are made once on a machine and then shared: built beside their name, renamed when whole.

Safety rests on the rename alone. The lock saves work: who comes second waits for the first, and what a killed maker left
behind is found by the next under the same name and continued.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ray_muloco.errors import RunError

_T = TypeVar("_T")
LOCK_WAIT_SECONDS = 3600.0
_LOCK_POLL_SECONDS = 0.05


def once(final: Path, whole: Callable[[Path], _T | None], make: Callable[[Path], None]) -> _T:
    """What `whole` makes of the directory `final`; where that is None, `make` fills a directory that then takes the name.

    `make` may find the remains of an earlier try in its directory. Raises what `make` raises, and RunError("storage", …) if
    the place cannot be written.
    """
    if (found := whole(final)) is not None:
        return found
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _lock(final.with_name(f".{final.name}.lock")) as alone:
            if (found := whole(final)) is not None:
                return found
            working = final.with_name(f".{final.name}.making" + ("" if alone else f"-{uuid.uuid4().hex}"))
            working.mkdir(exist_ok=True)
            make(working)
            _take_name(working, final, whole)
    except OSError as error:
        raise RunError("storage", f"the cache {final} cannot be made: {error}") from None
    found = whole(final)
    if found is None:
        raise RunError("storage", f"the cache {final} is damaged as soon as it is written")
    return found


def _take_name(working: Path, final: Path, whole: Callable[[Path], object | None]) -> None:
    """Rename the finished directory; a damaged one in its place goes, a whole one that came first stays."""
    if final.exists() and whole(final) is None:
        shutil.rmtree(final, ignore_errors=True)
    try:
        working.rename(final)
    except OSError:
        if whole(final) is None:
            raise
        shutil.rmtree(working, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Held by one process at a time and released by its end, however it ends; False where it could not be had in time."""
    with open(path, "w") as file:
        yield _acquire(file.fileno())


def _acquire(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:  # a file system without locks
            return False
