"""Turn text into token shards, in parallel on Ray: what jobs/train.py takes as --data.source.

    python jobs/prepare.py --data.source my/texts --output shards
    python jobs/prepare.py --data.source s3://bucket/corpus --data.tokenizer bpe:32768 --output s3://bucket/shards

The same command again goes on where an interrupted one stopped. Exit codes: 0 done, 2 bad input, 4 gave up.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from _main import check_json_place, parse, run, write_json

from ray_muloco.config import DataConfig
from ray_muloco.data.locations import is_uri
from ray_muloco.data.preparation import MODEST_SEQUENCE_LENGTH, Preparation, check, prepare
from ray_muloco.data.units import UnitRecord
from ray_muloco.errors import ConfigError
from ray_muloco.training.storage import require_writable

_LINE_EVERY_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of this job."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """What to read. The tokenizer may also be `bpe:N`: a byte-level BPE of N ids, trained on the source."""
    output: str
    """Directory or URI for the shards."""
    sequence_length: int = MODEST_SEQUENCE_LENGTH
    """Where a side of the split would be shorter than this many tokens, every document's tail is cut off for validation instead."""
    unit_bytes: int = 0
    """Text in one unit of work; 0 takes a 64th of the source, from 16 to 64 MiB."""
    local: bool = False
    """Do everything in this process, without Ray."""
    json: str = ""
    """Write the figures to this file."""


class PlainProgress:
    """A line for the first unit, the last, and every few seconds."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()
        self._text_bytes = 0

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        print(text, flush=True)

    def unit(self, record: UnitRecord, done: int, total: int) -> None:
        """A finished unit: `done` of `total`."""
        self._text_bytes += record.train.text_bytes + record.validation.text_bytes
        now = time.monotonic()
        if done in (1, total) or now - self._said >= _LINE_EVERY_SECONDS:
            self._said = now
            print(f"unit {done} of {total}, {self._text_bytes / 1e6:,.1f} MB of text, {now - self._began:.1f} s", flush=True)


class LiveProgress:
    """A bar on a terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("units"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns)
        self._task = self._progress.add_task("units", total=None, text="")
        self._text_bytes = 0

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text)

    def unit(self, record: UnitRecord, done: int, total: int) -> None:
        """A finished unit: `done` of `total`."""
        self._text_bytes += record.train.text_bytes + record.validation.text_bytes
        self._progress.update(self._task, completed=done, total=total, text=f"{self._text_bytes / 1e6:,.1f} MB")


def main() -> int:
    """Run the job; returns its exit code."""
    flags = parse(Flags, prog="prepare.py", description=__doc__)
    check_json_place(flags.json)
    preparation = check(flags.data, _durable(flags.output), sequence_length=flags.sequence_length, unit_bytes=flags.unit_bytes)
    began = time.monotonic()
    finished_before = preparation.finished_manifest is not None
    if not finished_before:
        require_writable(os.path.expanduser(flags.output), field="output")
    with LiveProgress() if sys.stdout.isatty() else PlainProgress() as progress:
        one_unit = sum(map(len, preparation.plan.units)) == 1  # nothing to do in parallel: starting Ray would take longer
        manifest = _prepare_somewhere(preparation, progress, local=flags.local or finished_before or one_unit)
    figures = summary(manifest, preparation, time.monotonic() - began)
    _print(figures, finished_before)
    write_json(flags.json, figures)
    return 0


def _prepare_somewhere(preparation: Preparation, progress: Any, *, local: bool) -> dict[str, Any]:
    """Prepare in this process, on the cluster of RAY_ADDRESS, or on a private Ray with this machine's cores."""
    if local:
        return prepare(preparation, report=progress.unit, say=progress.say)
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray leaves a token in the home directory, which later clusters then demand
    from ray_muloco.runtime.prepare import RayUnits, cluster

    with cluster(address, os.cpu_count() or 1):
        return prepare(preparation, run_units=RayUnits(), report=progress.unit, say=progress.say)


def _durable(output: str) -> str:
    """The output, refused where it would lie in the throw-away working directory of a Ray job."""
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") and not is_uri(output) and not os.path.isabs(os.path.expanduser(output)):
        raise ConfigError("output", output, "must be absolute or a URI inside a Ray job, whose working directory is thrown away", "for example /shared/shards")
    return output


def summary(manifest: dict[str, Any], preparation: Preparation, seconds: float) -> dict[str, Any]:
    """The manifest's figures without its list of shards."""
    sides = {
        name: {key: value for key, value in side.items() if key != "shards"} | {"num_shards": len(side["shards"])} for name, side in manifest["splits"].items()
    }
    kept = {key: manifest[key] for key in ("source", "split", "tokenizer", "vocab_size", "num_skipped_documents")}
    return {"output": preparation.output.text, **kept, "splits": sides, "seconds": seconds}


def _print(figures: dict[str, Any], finished_before: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    title = f"{figures['output']}: {figures['tokenizer']}, {figures['vocab_size']:,} ids, split by {figures['split']['mode']}"
    table = Table(Column("side", no_wrap=True), title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tokens", "documents", "text bytes", "shards", "bits/token", "unknown"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, side in figures["splits"].items():
        counts = (f"{side[key]:,}" for key in ("num_tokens", "num_documents", "text_bytes", "num_shards"))
        table.add_row(name, *counts, f"{side['entropy_bits_per_token']:.3f}", f"{side['unknown_rate']:.2%}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if figures["num_skipped_documents"]:
        console.print(f"{figures['num_skipped_documents']:,} documents without text were skipped")
    vocabulary = "" if figures["vocab_size"] == 257 else f" --model.vocab-size {figures['vocab_size']}"
    done = "was finished before" if finished_before else f"took {figures['seconds']:.1f} s"
    console.print(f"{done}; next: python jobs/train.py tiny --data.source {figures['output']}{vocabulary}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    run(main)
