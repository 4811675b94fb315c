"""Checkpoints that say which round they are of, and the program whose saves are killed.

Run as a program (`saves.py STAGING_DIR MODE LOCATION …`, mode `moments` or `steps`) this file forks savers and kills them.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import fsspec.implementations.local  # noqa: F401  (here once, not in every fork)
import torch
from torch import Tensor

from ray_muloco.errors import RunError
from ray_muloco.training import locations
from ray_muloco.training.checkpoint import CheckpointRef, CheckpointStore, FileRecord, write_tensors
from ray_muloco.training.storage import join, list_names

NUM_REPLICAS = 4
FILES = ("model.safetensors", "outer.safetensors", *(f"replica-{k}.safetensors" for k in range(NUM_REPLICAS)))


def contents(round_number: int, numel: int = 50) -> dict[str, Tensor]:
    """Tensors that say which round they are of."""
    return {"weight": torch.full((numel,), float(round_number)), "steps": torch.tensor(round_number)}


def write_files(store: CheckpointStore, name: str, round_number: int, numel: int = 50) -> list[FileRecord]:
    """All files of a checkpoint, as coordinator and replicas write them."""
    return [write_tensors(store.location, name, file, contents(round_number, numel), {"round": str(round_number)}, store.staging_dir) for file in FILES]


def save(store: CheckpointStore, round_number: int, numel: int = 50) -> CheckpointRef:
    """One whole checkpoint."""
    name = store.begin(round_number)
    return store.commit(name, {"cursor": 10 * round_number, "config": {}}, write_files(store, name, round_number, numel))


def assert_whole(ref: CheckpointRef) -> None:
    """Every file has its hash and is of the round that the manifest names."""
    ref.verify()
    assert set(ref.files) == set(FILES)
    assert ref.manifest["cursor"] == 10 * ref.round
    for file in FILES:
        tensors = ref.read_tensors(file)
        assert tensors["steps"].item() == ref.round
        assert bool((tensors["weight"] == ref.round).all())


def kill_main(mode: str, location: str, staging_dir: str) -> None:
    """Fork a process that prints what it finds and saves on, and kill it; again and again, and look once more at the end.

    This process itself neither saves nor looks: it stays without threads, so that a fork is a whole process. (Torch is
    imported once here; a program a kill would import it fifty times.)
    """
    begin = time.perf_counter()
    acknowledged, _ = _run_saver(location, staging_dir, 0, num_saves=3)  # from here on a save has old checkpoints to remove
    save_seconds = (time.perf_counter() - begin) / 3
    if mode == "steps":
        step, ended = 0, False
        while not ended:
            step += 1
            acknowledged, ended = _run_saver(location, staging_dir, acknowledged, num_saves=1, kill_at_step=step)
    else:
        randomness = random.Random(20250523)
        for _ in range(50):
            acknowledged, _ = _run_saver(location, staging_dir, acknowledged, kill_after_seconds=randomness.uniform(0, 2 * save_seconds))
    _run_saver(location, staging_dir, acknowledged, num_saves=0)


def _run_saver(
    location: str, staging_dir: str, acknowledged: int, *, num_saves: int = 10**9, kill_at_step: int = 0, kill_after_seconds: float = math.inf
) -> tuple[int, bool]:
    """The last round whose commit returned, in this saver or before it, and whether the saver ended by itself.

    kill_at_step: the saver is killed at that step of its saves. kill_after_seconds: it is killed that long after it began.
    """
    assert threading.active_count() == 1
    read_end, write_end = os.pipe()
    saver = os.fork()
    if saver == 0:
        _as_child(lambda: _look_and_save(location, staging_dir, acknowledged, num_saves, kill_at_step, write_end))
    os.close(write_end)
    if kill_after_seconds < math.inf:
        os.read(read_end, 2)  # it has looked
        time.sleep(kill_after_seconds)
        os.kill(saver, signal.SIGKILL)
    _, status = os.waitpid(saver, 0)
    with os.fdopen(read_end, "rb") as stream:
        words = stream.read().split()
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return max(acknowledged, *map(int, words), 0), not os.WIFSIGNALED(status)


def _look_and_save(location: str, staging_dir: str, acknowledged: int, num_saves: int, kill_at_step: int, write_end: int) -> None:
    found = {"location": location, "acknowledged": acknowledged, **_found(location, staging_dir)}
    print(json.dumps(found), flush=True)
    os.write(write_end, b"0 ")
    if kill_at_step:
        _die_at_step(kill_at_step)
    store = CheckpointStore(location, staging_dir=staging_dir, keep=2)
    for round_number in range(found["newest"] + 1, found["newest"] + 1 + num_saves):
        save(store, round_number, 50 if kill_at_step else 60_000)
        os.write(write_end, f"{round_number} ".encode())


def _die_at_step(step: int) -> None:
    """From now on this process counts what it asks of the file system, and is killed before the given request."""
    left = step

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count()
            return function(*arguments, **options)

        return call

    for name in ("mkdir", "fsync", "replace", "rename", "unlink", "remove", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))

    scandir = os.scandir  # deletions take a manifest last, unless they are told otherwise: the order of a directory is nobody's promise
    os.scandir = lambda path: contextlib.nullcontext(sorted(scandir(path), key=lambda entry: entry.name == "manifest.json"))  # type: ignore[assignment]

    class TornFile(io.FileIO):
        """A file in which a kill can come in the middle of a write."""

        def write(self, data: Any) -> int:
            middle = len(data) // 2
            super().write(data[:middle])
            count()
            return middle + super().write(data[middle:])

    locations.open = lambda path, mode: (TornFile if "x" in mode else open)(path, mode.replace("b", "") if "x" in mode else mode)  # type: ignore[attr-defined]


def _found(location: str, staging_dir: str) -> dict[str, Any]:
    """What a new process finds, every complete checkpoint verified."""
    told = io.StringIO()
    logging.basicConfig(stream=told)
    store = CheckpointStore(location, staging_dir=staging_dir, keep=2)
    latest, complete = store.latest(), store.all()
    try:
        for ref in complete:
            assert_whole(ref)
    except (AssertionError, RunError) as error:
        told.write(repr(error))
    return {
        "newest": latest.round if latest else 0,
        "complete": len(complete),
        "damage": told.getvalue(),
        "phases": _phases(location, latest.round if latest else 0),
    }


def _phases(location: str, newest: int) -> list[str]:
    """Where in a save the kill must have come, from what it left."""
    phases: list[str] = []
    for name in list_names(location):
        if not name.startswith("round-"):
            continue
        names = list_names(join(location, name))
        if any(part.endswith(".tmp") for part in names):
            phases.append("in a file")
        if "manifest.json" not in names:
            phases.append("before the manifest" if int(name[6:12]) > newest else "in a deletion")
    return phases or ["after the manifest"]


def _as_child(work: Callable[[], object]) -> None:
    """Do the work and end, running nothing of the parent's clean-up."""
    status = 1
    try:
        work()
        status = 0
    except BaseException as error:
        sys.stderr.write(f"{error!r}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number in range(2, len(sys.argv), 2):
        kill_main(sys.argv[number], sys.argv[number + 1], sys.argv[1])
