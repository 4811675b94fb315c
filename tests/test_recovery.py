"""What a drill's figures mean, on records written by hand: pace, goodput, waits, delays, samples lost or repeated, growth."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_muloco.analysis.recovery import audit_samples, delays, goodput, growth, next_commits, pace, quiet_seconds, recovery_report, unsound
from ray_muloco.runtime import drill
from ray_muloco.runtime import leaks as leaks_of
from ray_muloco.runtime.drill import COORDINATOR, HANG, KILL, PHASES, draw_faults, read_log


def record(time: float, tokens: int, alive: int = 4, samples: list[list[int]] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "commit_time": time, "tokens": tokens, "alive": alive, "participants": alive, "healing": 0, "pending": 0, "samples": samples or [],
        "reasons": [], "tokens_lost": 0, "val_loss": None, **changes,
    }  # fmt: skip


CALM = [record(10.0 * n, 1000 * n) for n in range(11)]
# killed at 25 s: the round in flight commits a second late with three, who train at three quarters for two rounds
STRUCK = [record(0, 0), record(10, 1000), record(20, 2000), record(31, 2750, alive=3), record(41, 3500, alive=3, healing=1), record(51, 4500), record(61, 5500)]
KILLED = [{"kind": KILL, "phase": "inner", "time": 25.0}]


def test_pace_and_goodput_count_only_what_the_living_could_have_trained() -> None:
    assert pace(CALM) == 100.0
    assert goodput(CALM, 100.0, 4) == 1.0
    possible = 100.0 * (10 + 10 + 11 + 0.75 * 10 + 0.75 * 10 + 10)
    assert goodput(STRUCK, 100.0, 4) == pytest.approx(5500 / possible)
    assert goodput(STRUCK[:1], 100.0, 4) == 0.0


def test_waits_and_delays_are_from_the_fault_to_the_commit_that_stayed() -> None:
    assert next_commits(STRUCK, [*KILLED, {"kind": HANG, "phase": "inner", "time": 1e9}]) == [6.0]
    assert quiet_seconds(STRUCK, KILLED, 4) == [10, 10, 10]
    assert delays(STRUCK, KILLED, KILL, 10.0) == [1.0]
    assert delays(STRUCK, KILLED, HANG, 10.0) == []
    assert delays(STRUCK, [*KILLED, {"kind": COORDINATOR, "phase": "inner", "time": 28.0}], KILL, 10.0) == [], "the wait was for the coordinator"


def test_the_report_has_what_the_contract_names() -> None:
    manifest = {"cursor": 0, "returned_ranges": [], "skipped_samples": 0}
    report = recovery_report(STRUCK, KILLED, manifest, CALM, 4)
    assert (report["faults"], report["by_kind"], report["rounds"]) == (1, {"kill": 1}, 7)
    assert report["rounds_to_next_commit"] == [0.6]
    assert report["digests_agree"]
    odd = [*STRUCK[:-1], {**STRUCK[-1], "reasons": ["replica 2 ejected: its θ differs from the coordinator's after the commit"]}]
    assert not recovery_report(odd, KILLED, manifest, CALM, 4)["digests_agree"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scheduled": 2}, "1 of 2 scheduled faults happened"),
        ({"samples_lost": 3}, "3 samples were lost"),
        ({"samples_repeated": 5}, "5 samples were trained twice"),
        ({"digests_agree": False}, "digests disagreed"),
        ({"leaks": ["process 7", "2 threads"]}, "left behind: process 7, 2 threads"),
    ],
)
def test_a_drill_that_fails_says_of_what(change: dict[str, Any], said: str) -> None:
    """It ended with exit code 1 and no word: which of five things had gone wrong was to be found in the table."""
    passed = {"faults": 1, "scheduled": 1, "samples_lost": 0, "samples_repeated": 0, "digests_agree": True, "leaks": []}
    assert unsound(passed) == []
    assert unsound({**passed, **change}) == [said]


def test_a_sample_is_in_one_commit_or_waits_or_was_skipped() -> None:
    rounds = [record(0, 0, samples=[[0, 10], [20, 30]]), record(1, 1, samples=[[10, 15]])]
    assert audit_samples(rounds, 30, [[15, 20, 0, -1]], 0) == (0, 0)
    assert audit_samples(rounds, 30, [], 5) == (0, 0)
    assert audit_samples(rounds, 30, [], 0) == (5, 0), "nobody has 15 to 20"
    assert audit_samples([*rounds, record(2, 2, samples=[[8, 12]])], 30, [[15, 20, 0, -1]], 0) == (0, 4)
    assert audit_samples(rounds, 28, [[15, 20, 0, -1]], 0) == (0, 2), "trained beyond the cursor"


@given(st.permutations(range(12)), st.integers(0, 11), st.integers(0, 11))
def test_the_audit_finds_any_lost_and_any_repeated_piece(order: list[int], lost: int, repeated: int) -> None:
    pieces = [[5 * n, 5 * n + 5] for n in order]
    kept = [piece for piece in pieces if piece[0] != 5 * lost]
    assert audit_samples([record(0, 0, samples=kept)], 60, [], 0) == (5, 0)
    assert audit_samples([record(0, 0, samples=[*pieces, pieces[repeated]])], 60, [], 0) == (0, 5)


def test_growth_compares_the_last_fifth_with_the_second_of_the_process_that_lived_longest() -> None:
    own = [{"round": n, "pid": 2, "resident_bytes": 100 + (n if n >= 80 else 0), "descriptors": 30, "shared_memory_files": 0} for n in range(100)]
    other = [{"round": n, "pid": 1, "resident_bytes": 999 * n, "descriptors": n, "shared_memory_files": 0} for n in range(40)]
    found = growth([*other, *own])
    assert found["resident_bytes"] == pytest.approx(1.895)
    assert (found["descriptors"], found["shared_memory_files"]) == (1.0, 1.0)
    assert growth(own[:4]) == {}


def test_faults_follow_from_the_seed_and_rare_ones_are_rare() -> None:
    faults = draw_faults(60, 3, 600)
    assert faults == draw_faults(60, 3, 600) != draw_faults(60, 4, 600)
    kinds = [fault.kind for fault in faults]
    assert (kinds.count(HANG), kinds.count(COORDINATOR), len(kinds)) == (6, 6, 60)
    assert {fault.phase for fault in faults} == set(PHASES)
    assert all(a.round <= b.round for a, b in itertools.pairwise(faults))
    assert all(2 <= fault.round <= 600 and 0 <= fault.moment < 1 and 0 <= fault.victim < 1 for fault in faults)
    assert draw_faults(0, 3, 10) == ()


def test_a_slowed_replica_is_steadily_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step was stretched by its own length: one that a neighbour's use of the caches made longer held its round up eight times as long."""
    computed, now, slept = [1.0, 1.0, 1.0, 5.0, 1.0], 0.0, list[float]()

    def inner_steps(plan: object) -> Iterator[None]:
        nonlocal now
        for seconds in computed:
            now += seconds
            yield

    monkeypatch.setattr(drill.time, "thread_time", lambda: now)
    monkeypatch.setattr(drill.time, "sleep", slept.append)
    assert len(list(drill.dragged(inner_steps, 8.0)(object()))) == len(computed)
    assert slept == [7.0] * 5


def test_a_torn_line_of_the_log_is_no_fault(tmp_path: Any) -> None:
    """The coordinator is killed right after it wrote that it will be: what is whole counts, half a line does not."""
    log = tmp_path / "drill.jsonl"
    assert read_log(str(log)) == []
    log.write_text('{"number": 0}\n{"numb')
    assert read_log(str(log)) == [{"number": 0}]


def test_what_is_left_behind_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks_of, "SETTLE_SECONDS", 0.0)
    before = leaks_of.belongings()
    assert leaks_of.leaks(before) == []
    child = subprocess.Popen(["sleep", "60"])
    opened = [open(os.devnull) for _ in range(9)]  # noqa: SIM115
    try:
        found = leaks_of.leaks(before)
        assert f"process {child.pid} sleep" in found
        assert any("file descriptors" in name for name in found)
    finally:
        child.kill()
        child.wait()
        for file in opened:
            file.close()
