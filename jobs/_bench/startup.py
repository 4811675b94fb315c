"""From the command to the end of the first training step: our training program against Ray Train's TorchTrainer.

Both are programs started from nothing, timed from the start of the process by a line they print.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _bench.measure import Effort, Figure, at_most, compare

JOBS = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300.0
FIRST_STEP = re.compile(r"first inner step after ([0-9.]+) s")


def startup(effort: Effort) -> Iterator[Figure]:
    """Seconds from `python jobs/train.py tiny` to the end of its first inner step; corpus prepared anew each time."""
    yield compare("tiny, first inner step", ours, torch_trainer, "s", 1 if effort.quick else max(3, effort.repeats // 2), at_most(0.7))


def ours() -> float:
    """A short run in a new place, so that nothing is there before it."""
    with tempfile.TemporaryDirectory() as storage:
        short = ("--budget-tokens", "20000", "--sync-interval", "5", "--run.storage-path", storage)
        return seconds_to_first_step([str(JOBS / "train.py"), "tiny", *short])


def torch_trainer() -> float:
    """The baseline program."""
    with tempfile.TemporaryDirectory() as storage:
        return seconds_to_first_step(["-m", "_bench.torch_trainer", storage])


def seconds_to_first_step(arguments: list[str]) -> float:
    """Run a Python program to its end; the seconds it reports from its start to its first step."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=JOBS, check=False)
    whole = time.perf_counter() - begin
    found = FIRST_STEP.search(done.stdout)
    if done.returncode or not found:
        raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode} and reported no first step:\n{(done.stdout + done.stderr)[-2000:]}")
    seconds = float(found[1])
    if not 0 < seconds < whole:
        raise AssertionError(f"{' '.join(arguments)} reports its first step after {seconds} s of {whole:.1f} s")
    return seconds
