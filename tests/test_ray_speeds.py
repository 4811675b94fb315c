"""Replicas of unequal speed: the plan follows what was measured, and nobody is left out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from test_resume import config_for, source  # noqa: F401 - `source` is a fixture

from ray_muloco import fit
from ray_muloco.analysis.recovery import audit_samples
from ray_muloco.runtime.drill import SLOW, Drill, Fault, read_log
from ray_muloco.training.manifest import newest_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

NUM_REPLICAS = 3
STEPS = 24


@pytest.mark.parametrize("equal_time", [True, False])
def test_a_slow_replica_gets_fewer_steps_in_rounds_of_equal_time_and_is_still_merged(source: Path, tmp_path: Path, equal_time: bool) -> None:  # noqa: F811
    """One of three replicas takes ten times as long a step from the second round on: more than a busy machine does to the others."""
    batch = 6
    config = config_for(source, tmp_path, "slow", scaling__num_replicas=NUM_REPLICAS, scaling__equal_time_rounds=equal_time, batch_sequences=batch)
    round_tokens = STEPS * batch * config.model.sequence_length
    config = config.override({"sync_interval": STEPS, "budget_tokens": 6 * round_tokens})
    log, speeds = str(tmp_path / "drill.jsonl"), str(tmp_path / "speeds.jsonl")
    fault = Fault(number=0, round=1, kind=SLOW, phase="exchange", moment=0.0, victim=0.5, factor=10.0)
    result = fit(config, drill=Drill((fault,), log, speeds))

    assert [(entry["kind"], entry["replica"]) for entry in read_log(log)] == [(SLOW, 1)]
    measured = [line["steps_per_second"] for line in read_log(speeds)]
    assert all(line["1"] < 0.5 * min(line["0"], line["2"]) for line in measured[1:])
    assert {record["participants"] for record in result.metrics} == {NUM_REPLICAS}
    assert all(a["tokens"] + b["tokens_merged"] == b["tokens"] for a, b in itertools.pairwise(result.metrics))
    for record in result.metrics[2:]:
        fewer = record["tokens_merged"] < record["num_steps"] * batch * config.model.sequence_length
        assert fewer == equal_time
        assert (record["effective_replicas"] < NUM_REPLICAS - 0.05) == equal_time


@pytest.mark.parametrize("patient", [True, False])
def test_a_replica_slower_than_a_collective_may_take_is_waited_for_or_left_by_policy(source: Path, tmp_path: Path, patient: bool) -> None:  # noqa: F811
    """E07: H steps of the slow one take longer than a collective's deadline; elsewhere the fast ones died of that at their rendezvous.

    Here nobody is in a collective before everybody has reported: the round waits as long as its own deadline says, and goes on without it after that.
    """
    config = config_for(source, tmp_path, "skew", scaling__num_replicas=NUM_REPLICAS, scaling__min_replicas=1, batch_sequences=6, sync_interval=STEPS)
    config = config.override({"budget_tokens": 5 * STEPS * 6 * config.model.sequence_length, "scaling.collective_timeout_seconds": 1.5})
    config = config.override({"scaling.hang_floor_seconds": 60.0 if patient else 3.0, "scaling.hang_factor": 5.0 if patient else 1.5})
    log, speeds = str(tmp_path / "drill.jsonl"), str(tmp_path / "speeds.jsonl")
    fault = Fault(number=0, round=2, kind=SLOW, phase="exchange", moment=0.0, victim=0.5, factor=30.0 if patient else 300.0)
    result = fit(config, drill=Drill((fault,), log, speeds))

    assert result.status == "finished"
    if patient:
        slowest = max(STEPS / line["steps_per_second"]["1"] for line in read_log(speeds))
        assert slowest > config.scaling.collective_timeout_seconds, "the fault was too small to show anything"
        assert {record["participants"] for record in result.metrics} == {NUM_REPLICAS}
    else:
        reasons = [reason for record in result.metrics for reason in record["reasons"]]
        assert [reason for reason in reasons if reason.startswith("replica 1 lost: silent for 3 s")]
        assert NUM_REPLICAS - 1 in {record["participants"] for record in result.metrics}


def test_who_is_out_of_grace_ends_at_the_step_it_is_at_and_counts_by_its_tokens(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Nothing foretells the round in which a replica becomes slow: the grace ends it, and what was not read goes to the others."""
    config = config_for(source, tmp_path, "grace", scaling__num_replicas=NUM_REPLICAS, scaling__equal_time_rounds=True, batch_sequences=6, sync_interval=STEPS)
    round_tokens = STEPS * 6 * config.model.sequence_length
    config = config.override({"budget_tokens": 5 * round_tokens, "scaling.grace_seconds": 0.3, "checkpoint.every_rounds": 1})
    log = str(tmp_path / "drill.jsonl")
    fault = Fault(number=0, round=2, kind=SLOW, phase="exchange", moment=0.0, victim=0.5, factor=60.0)
    result = fit(config, drill=Drill((fault,), log))

    slow, after = result.metrics[2:4]
    assert slow["participants"] == NUM_REPLICAS
    assert slow["effective_replicas"] < NUM_REPLICAS
    assert after["samples"][0][0] < slow["samples"][-1][1], "what it did not read was read in the next round"
    assert sum(r["tokens_lost"] for r in result.metrics) == 0, "who was cut short lost no work"
    manifest = newest_manifest(result.path)
    assert manifest is not None
    assert audit_samples(result.metrics, manifest[1]["cursor"], manifest[1]["returned_ranges"], 0) == (0, 0)
    assert result.tokens >= config.budget_tokens
