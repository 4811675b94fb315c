"""What elasticity costs while nothing happens, and what it is worth when something does."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from typing import Any

from _bench.measure import Effort, Figure, within
from _bench.runs import fit_rounds, run_config


def elastic_off(effort: Effort) -> Iterator[Figure]:
    """tiny, K=2, nothing happens: the rounds of runs that could lose and gain replicas against those of runs that could not.

    Every turn is a run of each; the order within a turn alternates (A B B A), since what comes second finds a warmer machine.
    The medians are over the rounds of all turns but each run's first, which chooses kernels and touches pages.
    """
    with tempfile.TemporaryDirectory() as storage:
        config = run_config(2, storage, effort)
        on = config.override({"scaling.min_replicas": 1, "scaling.max_replicas": 2})
        off = config.override({"scaling.min_replicas": 2, "scaling.max_replicas": 0})
        sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for turn in range(effort.repeats):
            for elastic in (True, False) if turn % 2 else (False, True):
                sides[elastic] += fit_rounds(on if elastic else off)[1:]
    yield Figure("tiny, K=2, inner phase", inner_rate(sides[True]), inner_rate(sides[False]), "tokens/s", within(0.02))
    yield Figure("tiny, K=2, exchange", exchange_seconds(sides[True]), exchange_seconds(sides[False]), "s", within(0.02))


def inner_rate(records: list[dict[str, Any]]) -> float:
    """Median tokens a second of a round's inner phase."""
    return statistics.median(record["tokens_merged"] / record["seconds_inner"] for record in records)


def exchange_seconds(records: list[dict[str, Any]]) -> float:
    """Median seconds of a round's exchange, both ways."""
    return statistics.median(record["seconds_exchange"] for record in records)
