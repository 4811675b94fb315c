"""Names, units and arithmetic of what a run reports: one line a round, one result a run.

The only place that spells these names. Everything is plain Python so that a line is JSON and pickles small.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNITS = {
    "round": "rounds committed, from 1",
    "tokens": "tokens committed since the run began",
    "train_loss": "nats a token, mean over the round's inner steps and participants",
    "val_loss": "nats a token of the global parameters",
    "val_bits_per_byte": "bits a byte of validation text",
    "inner_lr": "peak-scheduled inner learning rate of the round's last step",
    "participants": "replicas merged in the round",
    "alive": "replicas whose actor lives and that hold a committed theta",
    "healing": "replicas placed and on their way to the committed theta",
    "pending": "replicas asked for and not placed",
    "effective_replicas": "(sum of weights)^2 over the sum of squared weights: K when all merged replicas did the same",
    "tokens_merged": "tokens of the round that were merged",
    "tokens_lost": "tokens planned since the last commit that were not merged; their samples are planned again",
    "generation": "number of the membership",
    "num_steps": "inner steps of the round; the most of any replica",
    "pseudogradient_norm": "norm of the mean pseudogradient",
    "outer_update_norm": "norm of the change of the global parameters",
    "replica_cosine": "mean pairwise cosine of the replicas' pseudogradients",
    "grad_norm": "gradient norm before clipping, mean over the round's steps",
    "uplink_bytes": "payload bytes sent by replicas in the round",
    "downlink_bytes": "payload bytes received by replicas in the round",
    "heal_bytes": "payload bytes of first and healing transfers of the parameters in the round",
    "seconds_inner": "seconds from dispatch to the last report",
    "seconds_exchange": "seconds of the exchange, both ways",
    "seconds_outer": "seconds of the outer step",
    "seconds": "seconds of the round, evaluation included",
    "tokens_per_second": "tokens of the round over the seconds of inner phase, exchange and outer step: evaluation is left out",
    "first_step_time": "Unix time at which the process's first inner step ended",
    "commit_time": "Unix time of the commit",
    "samples": "sample indices [start, stop) that the round was trained on",
    "skipped_samples": "samples given up on after failing on two replicas",
    "reasons": "what changed in the membership, and why",
}


@dataclass(slots=True)
class Traffic:
    """Payload bytes since the last `take`, summed over replicas; first and healing transfers are counted apart."""

    uplink_bytes: int = 0
    downlink_bytes: int = 0
    heal_bytes: int = 0

    def count_publication(self, payload: int, receivers: Collection[int], unhealed: Collection[int]) -> None:
        """θ of `payload` bytes reached these replicas; to those that held none it was a healing transfer."""
        first = sum(k in unhealed for k in receivers)
        self.heal_bytes += first * payload
        self.downlink_bytes += (len(receivers) - first) * payload

    def take(self) -> Traffic:
        """The counts so far; counting begins anew."""
        taken = Traffic(self.uplink_bytes, self.downlink_bytes, self.heal_bytes)
        self.uplink_bytes = self.downlink_bytes = self.heal_bytes = 0
        return taken


def replica_cosine(squared_norm_of_sum: float, squared_norms: Sequence[float]) -> float | None:
    """Mean pairwise cosine of K pseudogradients from two sums: (|ΣΔ|² - Σ|Δ_k|²) / ((K - 1) Σ|Δ_k|²).

    Exact when the norms are equal. None for fewer than two replicas or when nothing moved.
    """
    total = math.fsum(squared_norms)
    if len(squared_norms) < 2 or total == 0.0 or not math.isfinite(total):
        return None
    return (squared_norm_of_sum - total) / ((len(squared_norms) - 1) * total)


def bits_per_byte(nats: float, num_bytes: float) -> float | None:
    """Total nats over total bytes, in bits: nats / (ln 2 · bytes). None when no byte was predicted."""
    return nats / (math.log(2) * num_bytes) if num_bytes else None


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def total_bytes(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Payload bytes of these rounds together, by kind."""
    return {key: sum(record[key] for record in records) for key in ("uplink_bytes", "downlink_bytes", "heal_bytes")}


def summarize(records: Sequence[Mapping[str, Any]], identity: Mapping[str, Any]) -> dict[str, Any]:
    """result.json from all rounds of a run: sums of bytes and seconds, means of participation, last losses.

    tokens_per_second is over `seconds`, so evaluation is in it, unlike in a round's own figure (`UNITS`).
    identity: name, method, preset, num_params, theta_digest, checkpoint.
    """
    last = records[-1] if records else {}
    evaluated = [record for record in records if record.get("val_loss") is not None]
    seconds = math.fsum(record["seconds"] for record in records)
    tokens = last.get("tokens", 0)
    return {
        "name": identity["name"],
        "method": identity["method"],
        "preset": identity["preset"],
        "num_params": identity["num_params"],
        "tokens": tokens,
        "rounds": last.get("round", 0),
        "val_loss": evaluated[-1]["val_loss"] if evaluated else None,
        "val_bits_per_byte": evaluated[-1].get("val_bits_per_byte") if evaluated else None,
        "val_round": evaluated[-1]["round"] if evaluated else None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds if seconds else None,
        **total_bytes(records),
        "participants_mean": mean([record["participants"] for record in records]),
        "alive_mean": mean([record["alive"] for record in records]),
        "generations": last.get("generation", 0),
        "tokens_lost": sum(record.get("tokens_lost", 0) for record in records),
        "theta_digest": identity["theta_digest"],
        "checkpoint": identity["checkpoint"],
        "status": identity.get("status", "finished"),
    }


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to. metrics: the records of all its rounds; status: `finished`, or `stopped` on request."""

    val_loss: float | None
    rounds: int
    tokens: int
    path: str
    metrics: list[dict[str, Any]]
    status: str
    summary: dict[str, Any]
    """result.json."""
