"""Replicas of unequal speed: the plan follows what was measured, and nobody is left out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from test_resume import config_for, source  # noqa: F401 - `source` is a fixture

from ray_muloco import fit
from ray_muloco.runtime.drill import SLOW, Drill, Fault, read_log

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
