"""What Ray shows nowhere in its public interface: nodes that are about to end, and whether an actor waits for a place."""

from __future__ import annotations

import math
import time
from typing import Any

POLL_SECONDS = 1.0
OLDEST_SECONDS = 2.0


class DrainWatch:
    """Which nodes are being drained and until when; asking Ray takes a millisecond, so that it is done while others work."""

    def __init__(self) -> None:
        self._asked = -math.inf
        self._deadlines: dict[str, float] = {}

    def look(self) -> None:
        """Ask Ray, at most once a second."""
        self._ask_after(POLL_SECONDS)

    def deadlines(self) -> dict[str, float]:
        """Unix time at which each draining node ends, by node id; infinity where Ray was told none. At most two seconds old."""
        self._ask_after(OLDEST_SECONDS)
        return self._deadlines

    def _ask_after(self, seconds: float) -> None:
        if time.monotonic() - self._asked >= seconds:
            self._deadlines = draining_nodes()
            self._asked = time.monotonic()


def draining_nodes() -> dict[str, float]:
    """Unix time of the deadline of every node that is being drained, by node id in hex; infinity for none."""
    from ray._private.state import state

    return {node_id: deadline_ms / 1000 if deadline_ms else math.inf for node_id, deadline_ms in state.get_draining_nodes().items()}


def is_placed(actor: Any) -> bool:
    """Whether an actor's process runs: one that does not answer then is not waiting for a place."""
    from ray._private.state import state

    return state.actor_table(actor._actor_id.hex()).get("State") == "ALIVE"
