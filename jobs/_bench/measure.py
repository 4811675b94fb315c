"""What a measurement is: ours and a baseline, taken in turns, as one ratio with its target."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """What the ratio ours / baseline must be: between two bounds, one of which may be missing."""

    low: float = -math.inf
    high: float = math.inf

    def met(self, ratio: float) -> bool:
        """Whether the ratio is neither below nor above."""
        return self.low <= ratio <= self.high

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"≥ {self.low:g}"
        return f"≤ {self.high:g}" if math.isinf(self.low) else f"{self.low:g} – {self.high:g}"


def at_least(bound: float) -> Target:
    """For rates: more is better."""
    return Target(low=bound)


def at_most(bound: float) -> Target:
    """For times and sizes: less is better."""
    return Target(high=bound)


def within(share: float) -> Target:
    """For what should make no difference: 1 ± share."""
    return Target(1 - share, 1 + share)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table. ours and baseline are in `unit`; target None is a line to read, not to hold."""

    case: str
    ours: float
    baseline: float
    unit: str
    target: Target | None = None

    @property
    def ratio(self) -> float:
        """ours / baseline."""
        return self.ours / self.baseline if self.baseline else float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much to measure: `repeats` turns of each side, and whether sizes are cut to see only that all of it works."""

    repeats: int
    quick: bool


def compare(case: str, ours: Callable[[], float], baseline: Callable[[], float], unit: str, repeats: int, target: Target | None = None) -> Figure:
    """Medians of both sides, measured A B A B …: what slows the machine for a while slows both."""
    pairs = [(ours(), baseline()) for _ in range(repeats)]
    mine, theirs = zip(*pairs, strict=True)
    return Figure(case, statistics.median(mine), statistics.median(theirs), unit, target)


def rate(work: Callable[[], object], amount: float) -> float:
    """Amount of work a second, of one call."""
    begin = time.perf_counter()
    work()
    return amount / (time.perf_counter() - begin)
