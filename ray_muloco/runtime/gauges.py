"""What a run tells Prometheus while it goes on: gauges of its newest committed round, through `ray.util.metrics`.

The coordinator's process sets them; its node's metrics port (`ray start --metrics-export-port`) serves them as `ray_<name>`.
Ray passes them on every ten seconds (`metrics_report_interval_ms`) and forgets them two such intervals after the process
has ended: rounds faster than that are not all seen, and metrics.jsonl has every one. ray is imported where gauges are made,
so that the names can be had without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_muloco.training.metrics import UNITS

if TYPE_CHECKING:
    from ray_muloco.training.ledger import Listener

FIGURES = {
    "muloco_round": "round",
    "muloco_loss": "train_loss",
    "muloco_tokens_per_second": "tokens_per_second",
    "muloco_participants": "participants",
    "muloco_alive": "alive",
    "muloco_generation": "generation",
    "muloco_exchange_seconds": "seconds_exchange",
}
"""Gauge → the key of a round's record whose value it shows."""

BYTES = "muloco_bytes"
DIRECTIONS = {"up": "uplink_bytes", "down": "downlink_bytes", "heal": "heal_bytes"}
"""Value of the tag `direction` of BYTES → the key of a round's record that it adds up over the run."""

NAMES = (*FIGURES, BYTES)


class Gauged:
    """A run's listener that shows every round in gauges and passes everything on to another listener.

    The figures that a gauge lacks in a round (None) stay what they were. Gauges that fail are given up, with one message.
    Bytes are those of the history that stands: a resumed run begins with the bytes of the rounds it kept.
    """

    def __init__(self, listener: Listener, run: str) -> None:
        self._listener, self._tags = listener, {"run": run}
        self._bytes = dict.fromkeys(DIRECTIONS, 0)
        self._gauges: dict[str, Any] = {}
        self._off = False

    def info(self, info: dict[str, Any]) -> None:
        """What the run is, and the bytes of the rounds before."""
        before = info.get("resumed_bytes") or {}
        self._bytes = {direction: before.get(key, 0) for direction, key in DIRECTIONS.items()}
        self._listener.info(info)

    def round(self, record: dict[str, Any]) -> None:
        """A committed round."""
        self._listener.round(record)
        if self._off:
            return
        try:
            self._show(record)
        except Exception as error:  # a gauge is never the reason that a run ends
            self._off = True
            self._listener.message(f"the gauges for Prometheus are off for the rest of this run: {type(error).__name__}: {error}")

    def message(self, text: str) -> None:
        """A sentence for people."""
        self._listener.message(text)

    def _show(self, record: Mapping[str, Any]) -> None:
        self._gauges = self._gauges or make_gauges()
        for name, key in FIGURES.items():
            if record.get(key) is not None:
                self._gauges[name].set(record[key], self._tags)
        for direction, key in DIRECTIONS.items():
            self._bytes[direction] += record.get(key) or 0
            self._gauges[BYTES].set(self._bytes[direction], {**self._tags, "direction": direction})


def make_gauges() -> dict[str, Any]:
    """Ray's gauges by name; each carries the run's name as a tag."""
    from ray.util.metrics import Gauge

    gauges = {name: Gauge(name, UNITS[key], ("run",)) for name, key in FIGURES.items()}
    return gauges | {BYTES: Gauge(BYTES, "payload bytes of the run so far: up, down, and first and healing transfers", ("run", "direction"))}
