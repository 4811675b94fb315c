"""Who belongs to a run: what changes at a round's boundary, and how long a run waits for replicas it lacks.

Words: alive, a member that holds a committed θ; healing, placed and on its way to that; pending, asked for and not placed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ray_muloco.errors import RunError

SAY_EVERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What happened to the membership since the last boundary."""

    joined: tuple[int, ...] = ()
    left: Mapping[int, str] = field(default_factory=dict)
    """Members that are gone, with the cause: lost in an evaluation or a checkpoint, or taken off a node that ends."""
    notes: tuple[str, ...] = ()
    """Sentences about replicas that are no members: failed to start, asked for, lost their donor."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """All of it in sentences."""
        return (*(f"replica {k} joins" for k in self.joined), *(f"replica {k} {cause}" for k, cause in sorted(self.left.items())), *self.notes)


@dataclass(frozen=True, slots=True)
class Census:
    """How many replicas are in which state."""

    alive: int
    healing: int = 0
    pending: int = 0


class Patience:
    """Waiting for replicas, with a deadline: says so now and then, and gives up in the end."""

    def __init__(self, needed: int, limit: float, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.needed, self.limit, self._say, self._clock = needed, limit, say, clock
        self._begin = clock()
        self._said = self._begin

    def check(self, census: Census) -> None:
        """Say whom the run waits for, every SAY_EVERY_SECONDS; raise RunError once the limit is over."""
        now = self._clock()
        waited = now - self._begin
        state = f"{census.alive} replicas live, {self.needed} are needed (scaling.min-replicas); {census.healing} are getting ready, {census.pending} are not placed"
        if waited >= self.limit:
            raise RunError("too few replicas", f"{state} after {waited:.0f} s (scaling.rejoin-timeout-seconds)")
        if now - self._said >= SAY_EVERY_SECONDS:
            self._said = now
            self._say(f"waiting for replicas since {waited:.0f} s: {state}")
