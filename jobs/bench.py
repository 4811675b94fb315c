"""Speed and memory, each as a ratio to something plain in the same run.

    python jobs/bench.py [CASE …] [--quick] [--json PATH]

Every figure is a median of interleaved runs (A B A B …) with equal threads. Without names all cases run, in half an hour or
so; the machine should have nothing else to do. --quick cuts sizes and repeats to see that all of it works: its figures say
nothing.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from _bench.measure import Effort, Figure
from _main import check_json_place, parse, run, write_json
from rich.console import Console
from rich.table import Table

CaseName = Literal["muon", "inner", "fit-k1", "fit-k2", "ddp", "startup", "exchange", "data", "elastic-off", "equal-time", "ray-train-elastic"]
# each case runs in a process of its own: its module, its function, its number of A B turns
CASES: dict[str, tuple[str, str, int]] = {
    "muon": ("_bench.steps", "muon", 15),
    "inner": ("_bench.steps", "inner", 7),
    "fit-k1": ("_bench.runs", "fit_k1", 5),
    "fit-k2": ("_bench.runs", "fit_k2", 11),
    "ddp": ("_bench.runs", "ddp", 5),
    "startup": ("_bench.startup", "startup", 5),
    "exchange": ("_bench.exchange", "exchange", 15),
    "data": ("_bench.reading", "data", 7),
    "elastic-off": ("_bench.elastic", "elastic_off", 6),
    "equal-time": ("_bench.elastic", "equal_time", 5),
    "ray-train-elastic": ("_bench.elastic", "ray_train_elastic", 5),
}


@dataclass(frozen=True)
class Arguments:
    """Measure speed and memory against plain baselines."""

    cases: Annotated[tuple[CaseName, ...], tyro.conf.Positional] = ()
    """Cases to run; all of them if none is named."""
    quick: bool = False
    """Small sizes and two turns: shows that the benchmarks work, not how fast anything is."""
    json: Path | None = None
    """File for the figures: {benchmark: {case: {ours, baseline, ratio, unit}}}."""


def run_case(name: str, quick: bool) -> list[Figure]:
    """All figures of one case, in this process."""
    module, function, repeats = CASES[name]
    return list(getattr(importlib.import_module(module), function)(Effort(repeats=2 if quick else repeats, quick=quick)))


def measure(names: Iterable[str], quick: bool, console: Console) -> dict[str, list[Figure]]:
    """Figures of each case, each from a fresh process, so that none inherits another's memory or threads."""
    figures: dict[str, list[Figure]] = {}
    os.environ["OMP_NUM_THREADS"] = "1"  # what Ray gives a worker, and so what every process here gets
    for name in names:
        with console.status(f"measuring {name}"), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            figures[name] = process.submit(run_case, name, quick).result()
        for figure in figures[name]:
            console.print(f"{name}: {figure.case}: ratio {figure.ratio:.2f}")
    return figures


def table(figures: dict[str, list[Figure]]) -> Table:
    """The figures for people."""
    result = Table("benchmark", "case", "ours", "baseline", "unit", "ratio", "target", title="ours / baseline, medians of interleaved runs")
    for column in result.columns[2:]:
        column.justify = "right"
    for name, rows in figures.items():
        for f in rows:
            style = "" if f.target is None else "green" if f.target.met(f.ratio) else "red"
            result.add_row(name, f.case, f"{f.ours:,.4g}", f"{f.baseline:,.4g}", f.unit, f"{f.ratio:.3f}", str(f.target or "–"), style=style)
    return result


def as_json(figures: dict[str, list[Figure]]) -> dict[str, dict[str, dict[str, object]]]:
    """The figures for programs."""
    return {name: {f.case: {"ours": f.ours, "baseline": f.baseline, "ratio": f.ratio, "unit": f.unit} for f in rows} for name, rows in figures.items()}


def main() -> int:
    """Measure, print, write."""
    arguments = parse(Arguments, description=__doc__)
    check_json_place(arguments.json)
    console = Console(width=None if sys.stdout.isatty() else 140)
    figures = measure(arguments.cases or tuple(CASES), arguments.quick, console)
    console.print(table(figures))
    write_json(arguments.json, as_json(figures))
    return 0


if __name__ == "__main__":
    run(main)
