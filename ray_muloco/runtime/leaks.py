"""What a run may leave behind on this machine, looked for: processes, file descriptors, shared memory, named actors."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

SHARED_MEMORY = "/dev/shm"
SETTLE_SECONDS = 20.0
MORE_DESCRIPTORS, MORE_THREADS = 8, 4
"""What a library may open between two uses without being a leak."""


@dataclass(frozen=True, slots=True)
class Belongings:
    """What this process and its children hold at a moment."""

    processes: frozenset[str]
    shared_memory: frozenset[str]
    num_descriptors: int
    num_threads: int


def belongings() -> Belongings:
    """What is held now: processes started by this one, shared-memory files of this user, own descriptors and threads."""
    me = psutil.Process()
    names: set[str] = set()
    for process in me.children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                names.add(f"process {process.pid} {process.name()}")
        except psutil.NoSuchProcess:
            continue
    return Belongings(frozenset(names), frozenset(shared_files()), me.num_fds(), me.num_threads())


def shared_files() -> list[str]:
    """Shared-memory files of this user."""
    if not os.path.isdir(SHARED_MEMORY):
        return []
    with os.scandir(SHARED_MEMORY) as entries:
        return [f"shared memory {entry.name}" for entry in entries if _mine(entry)]


def _mine(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except FileNotFoundError:
        return False


def leaks(before: Belongings, *, more_descriptors: int = MORE_DESCRIPTORS, more_threads: int = MORE_THREADS) -> list[str]:
    """What is held now and was not before, by name; what is on its way out gets a moment.

    A library's first use opens descriptors and threads that stay, so compare with the time after one; so many more are no leak.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = belongings()
        found = sorted((now.processes - before.processes) | (now.shared_memory - before.shared_memory))
        if now.num_descriptors > before.num_descriptors + more_descriptors:
            found.append(f"{now.num_descriptors - before.num_descriptors} file descriptors")
        if now.num_threads > before.num_threads + more_threads:
            found.append(f"{now.num_threads - before.num_threads} threads")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)
