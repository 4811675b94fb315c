"""Random faults, random stops and crashes, random sizes: the laws of an elastic run hold, and the run finishes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from faults import DATA_PARALLEL_KINDS, KINDS, Fault, Script
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from laws import NEVER, Laws, assert_finished, run, small_config
from toy import toy_dataset

from ray_muloco.errors import RunError

DATASET = toy_dataset()
NUM_ROUNDS = 6
GIVEN_UP = ("diverged", "replicas drifted", "unreachable")


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, Any], Script, list[tuple[str, int]]]:
    """Settings, faults, and the rounds after which the run is stopped or crashes."""
    method = draw(st.sampled_from(["muloco", "diloco", "muon-dp"]))
    replicas = draw(st.integers(1, 5))
    settings_ = {
        "method": method, "replicas": replicas, "scaling__min_replicas": draw(st.integers(1, replicas)),
        "scaling__max_replicas": draw(st.sampled_from([0, replicas + 1])), "scaling__join_inner_state": draw(st.sampled_from(["donor", "fresh"])),
        "scaling__equal_time_rounds": method != "muon-dp" and draw(st.booleans()),
    }  # fmt: skip
    kinds = DATA_PARALLEL_KINDS if method == "muon-dp" else KINDS
    places = st.sampled_from([(phase, kind) for phase, kinds_ in kinds.items() for kind in kinds_])
    faults = st.builds(lambda attempt, place, victim: Fault(attempt, *place, victim), st.integers(1, NUM_ROUNDS + 2), places, st.integers(0, 4))
    script = Script(*draw(st.lists(faults, max_size=6, unique=True)), join_after=draw(st.integers(0, 3)))
    ends = draw(st.lists(st.tuples(st.sampled_from(["stop_after", "crash_after"]), st.integers(1, NUM_ROUNDS)), max_size=2))
    return settings_, script, ends


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(schedules())
def test_no_schedule_of_faults_breaks_a_law(schedule: tuple[dict[str, Any], Script, list[tuple[str, int]]]) -> None:
    """E01, E05, E13, D04, D08, D15, D18: whatever happens when, and wherever the run is cut and resumed."""
    changes, script, ends = schedule
    with tempfile.TemporaryDirectory() as storage:
        config = small_config(Path(storage), rounds=NUM_ROUNDS, **changes)
        laws = Laws(config)
        for end, round_number in [*ends, ("stop_after", NEVER), ("stop_after", NEVER), ("stop_after", NEVER)]:
            try:
                result = run(config, DATASET, script, laws, **{end: round_number})
            except RunError as error:  # three attempts running were spoilt: the same command goes on from the last commit
                if error.reason not in GIVEN_UP:
                    raise
                event(error.reason)
                result = None
                laws.must_not_lose_rounds()
            if result is not None and result["status"] == "finished":
                break
        assert_finished(config, laws, result)
        event(f"{len(ends)} interruptions")
