"""What Ray shows nowhere in its public interface: nodes that are about to end, and whether an actor waits for a place."""

from __future__ import annotations

import math
import time
from typing import Any

POLL_SECONDS = 1.0


class DrainWatch:
    """Which nodes are being drained and until when; asks Ray at most once a second."""

    def __init__(self) -> None:
        self._asked = -math.inf
        self._deadlines: dict[str, float] = {}

    def deadlines(self) -> dict[str, float]:
        """Unix time at which each draining node ends, by node id; infinity where Ray was told none."""
        if time.monotonic() - self._asked >= POLL_SECONDS:
            self._asked = time.monotonic()
            self._deadlines = draining_nodes()
        return self._deadlines


def draining_nodes() -> dict[str, float]:
    """Unix time of the deadline of every node that is being drained, by node id in hex; infinity for none."""
    from ray._private.state import state

    return {node_id: deadline_ms / 1000 if deadline_ms else math.inf for node_id, deadline_ms in state.get_draining_nodes().items()}


def is_placed(actor: Any) -> bool:
    """Whether an actor's process runs: one that does not answer then is not waiting for a place."""
    from ray._private.state import state

    return state.actor_table(actor._actor_id.hex()).get("State") == "ALIVE"
