"""The run on Ray: actors and collectives compute what one process computes, and a lost replica costs the others nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from test_resume import Notes, config_for, records, source, state, train  # noqa: F401 - `source` is a fixture

from ray_muloco import fit
from ray_muloco.analysis.recovery import audit_samples
from ray_muloco.errors import ConfigError, RunError
from ray_muloco.runtime.drill import KILL, PHASES, Drill, Fault, read_log
from ray_muloco.training import preflight
from ray_muloco.training.manifest import newest_manifest

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def max_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a if a[name].numel())


@pytest.mark.parametrize(("method", "replicas"), [("muloco", 1), ("muloco", 4), ("diloco", 2), ("muon-dp", 2)])
def test_actors_equal_one_process_bit_for_bit(source: Path, tmp_path: Path, method: str, replicas: int) -> None:  # noqa: F811
    """Sums run in rank order on one machine: RayGroup equals LocalGroup in θ, u, inner state, records and bytes."""
    on_ray = config_for(source, tmp_path, "ray", method=method, scaling__num_replicas=replicas)
    local = config_for(source, tmp_path, "local", method=method, scaling__num_replicas=replicas)
    result = fit(on_ray)
    expected, _ = train(local)
    assert result.summary["theta_digest"] == expected["theta_digest"]
    assert records(on_ray) == records(local)
    ours, theirs = state(on_ray), state(local)
    assert max_difference(ours, theirs) == 0.0


def test_a_run_started_on_ray_goes_on_in_one_process_and_back(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """T02: one format, one truth, wherever the run is continued."""
    whole, _ = train(config_for(source, tmp_path, "whole"))
    cut = config_for(source, tmp_path, "cut", checkpoint__every_rounds=1)
    train(cut, stop_after=2)
    assert fit(cut).summary["theta_digest"] == whole["theta_digest"]


@ray.remote
class FabricCoordinator:
    """A coordinator whose replicas exchange in a group of their own, as over NCCL, here over Gloo."""

    def run(self, config: Any) -> dict[str, Any]:
        from ray_muloco.runtime import wiring
        from ray_muloco.runtime.collectives import GLOO
        from ray_muloco.runtime.fit import Silent
        from ray_muloco.runtime.setup import run_on_ray

        wiring.choose_fabric = lambda *_: GLOO
        return run_on_ray(config, "", Silent(), lambda: False)


@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_that_sum_among_themselves_commit_what_one_process_does(source: Path, tmp_path: Path, replicas: int) -> None:  # noqa: F811
    """The fabric wiring (the lowest replica hands Ψ to the coordinator and takes θ back) with Gloo in the place of NCCL."""
    changes = {"scaling__num_replicas": replicas, "batch_sequences": 6}
    actor = FabricCoordinator.options(num_cpus=0).remote()
    config = preflight.check(config_for(source, tmp_path, "fabric", **changes)).config
    result = ray.get(actor.run.remote(config), timeout=120)
    expected, _ = train(config_for(source, tmp_path, "local", **changes))
    assert result["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-4)
    assert result["rounds"] == expected["rounds"]


class Killer(Notes):
    """Kills a replica's process, or sends it another signal, when a round is heard."""

    def __init__(self, at_round: int, victim: int, number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.at_round, self.victim, self.number = at_round, victim, number

    def round(self, record: dict[str, Any]) -> None:
        super().round(record)
        if record["round"] == self.at_round:
            replica_processes()[self.victim].send_signal(self.number)


def replica_processes() -> list[psutil.Process]:
    """Replica actors of this process's Ray, by age."""
    return actor_processes("ReplicaActor")


def actor_processes(name: str) -> list[psutil.Process]:
    """Actors of a class of this process's Ray, by age."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, or a zombie, while we looked
            if name in " ".join(process.cmdline()[:1]):
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def long(config: Any) -> Any:
    """The configuration with rounds enough for faults to be seen and mended."""
    return config.override({"budget_tokens": 60 * config.budget_tokens, "sync_interval": 20})


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
def test_the_survivors_of_a_kill_commit_on_and_another_replica_joins_them(source: Path, tmp_path: Path, method: str) -> None:  # noqa: F811
    """D04, D06: a replica killed with -9 in mid-round is named; the others go on, another takes its place, no sample is lost."""
    config = long(config_for(source, tmp_path, "killed", method=method, scaling__num_replicas=3, batch_sequences=6, scaling__min_replicas=1))
    result = fit(config, listener=Killer(at_round=3, victim=1))
    participants = [r["participants"] for r in result.metrics]
    assert result.status == "finished"
    assert participants[0] == participants[-1] == 3
    assert min(participants) == 2
    reasons = [reason for r in result.metrics for reason in r["reasons"]]
    assert any("lost" in reason for reason in reasons)
    assert "replica 3 joins" in reasons
    assert result.tokens >= config.budget_tokens
    manifest = newest_manifest(result.path)
    assert manifest is not None
    assert audit_samples(result.metrics, manifest[1]["cursor"], manifest[1]["returned_ranges"], manifest[1]["skipped_samples"]) == (0, 0)
    assert [r["round"] for r in result.metrics] == list(range(1, len(participants) + 1))
    assert all(b["tokens"] > a["tokens"] and b["generation"] >= a["generation"] for a, b in itertools.pairwise(result.metrics))


class Watcher(Notes):
    """Notes which replica processes live at every round."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[set[int]] = []

    def round(self, record: dict[str, Any]) -> None:
        super().round(record)
        self.processes.append({process.pid for process in replica_processes()})


@pytest.mark.parametrize("phase", PHASES)
def test_a_replica_killed_in_any_phase_takes_no_other_process_along(source: Path, tmp_path: Path, phase: str) -> None:  # noqa: F811
    """Elastic 1: the survivors keep their processes whatever the phase; no sample is lost or repeated, and every round is there once."""
    config = long(
        config_for(source, tmp_path, f"kill-{phase}", scaling__num_replicas=3, batch_sequences=6, scaling__min_replicas=1, checkpoint__every_rounds=2)
    )
    log, watcher = tmp_path / "drill.jsonl", Watcher()
    fault = Fault(number=0, round=4, kind=KILL, phase=phase, moment=0.2, victim=0.0)
    result = fit(config, listener=watcher, drill=Drill((fault,), str(log)))
    (happened,) = read_log(str(log))
    assert (happened["phase"], happened["in_round"]) == (phase, 4)
    before = watcher.processes[1]
    assert len(before) == 3
    assert all(len(before & processes) >= 2 for processes in watcher.processes[1:-1]), "those who did not die are those who were there"
    assert len(before & watcher.processes[-2]) == 2
    reasons = [reason for r in result.metrics for reason in r["reasons"]]
    assert sum("lost" in reason and f"replica {happened['replica']}" in reason for reason in reasons) >= 1, reasons
    assert not any("lost" in reason and f"replica {k}" in reason for reason in reasons for k in (1, 2)), reasons
    manifest = newest_manifest(result.path)
    assert manifest is not None
    assert audit_samples(result.metrics, manifest[1]["cursor"], manifest[1]["returned_ranges"], manifest[1]["skipped_samples"]) == (0, 0)
    assert [r["round"] for r in result.metrics] == list(range(1, result.rounds + 1))
    assert result.metrics[-1]["participants"] == 3


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
def test_a_stopped_replica_costs_its_deadline_and_nobody_else_is_blamed(source: Path, tmp_path: Path, method: str) -> None:  # noqa: F811
    """SIGSTOP: data-parallel survivors are kept waiting inside a collective; they were called silent with the one they waited for."""
    config = long(config_for(source, tmp_path, "hung", method=method, scaling__num_replicas=3, batch_sequences=6, scaling__min_replicas=1))
    config = config.override({"scaling.hang_floor_seconds": 3.0, "scaling.collective_timeout_seconds": 4.0})
    result = fit(config, listener=Killer(at_round=3, victim=1, number=signal.SIGSTOP))
    participants = [r["participants"] for r in result.metrics]
    lost = [reason for r in result.metrics for reason in r["reasons"] if "lost" in reason]
    assert result.status == "finished"
    assert participants[0] == participants[-1] == 3
    assert min(participants) == 2
    assert len(lost) == 1, lost


def test_with_fewer_than_min_replicas_nothing_commits_until_another_has_joined(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """E01: with min_replicas at its default no round commits without all; the run waits for the replacement and finishes."""
    config = long(config_for(source, tmp_path, "few"))
    result = fit(config, listener=Killer(at_round=2, victim=0))
    assert result.status == "finished"
    assert {r["participants"] for r in result.metrics} == {2}
    assert any("the round is given up until there are more" in reason for r in result.metrics for reason in r["reasons"])
    assert sum(r["tokens_lost"] for r in result.metrics) > 0


def test_a_run_that_waits_in_vain_gives_up_with_a_checkpoint_of_its_last_commit(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Nothing is lost: not a round is trained again when the same command goes on."""
    config = long(config_for(source, tmp_path, "vain", checkpoint__every_rounds=1000, scaling__rejoin_timeout_seconds=0.0))
    with pytest.raises(RunError, match="too few replicas") as caught:
        fit(config, listener=Killer(at_round=2, victim=0))
    last = records(config)[-1]["round"]
    assert caught.value.checkpoint.endswith(f"round-{last:06}")
    result = fit(config.override({"scaling.rejoin_timeout_seconds": 60.0}))
    assert result.status == "finished"
    assert [r["round"] for r in records(config)] == list(range(1, result.rounds + 1))


def test_a_coordinator_that_dies_is_followed_by_another_from_the_checkpoint(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """T01, D08: killed with -9, it comes back with θ, u, inner state and cursor of one commit: the same bits as undisturbed."""

    class CoordinatorKiller(Notes):
        def round(self, record: dict[str, Any]) -> None:
            super().round(record)
            if record["round"] == 5 and not self.killed:
                self.killed = True
                actor_processes("CoordinatorActor")[-1].kill()

        killed = False

    config = config_for(source, tmp_path, "headless", checkpoint__every_rounds=2).override({"sync_interval": 1})
    killer = CoordinatorKiller()
    result = fit(config, listener=killer)
    undisturbed, _ = train(config_for(source, tmp_path, "undisturbed").override({"sync_interval": 1}))
    assert killer.killed
    assert any("goes on from" in m and "round-00000" in m for m in killer.messages), "from a checkpoint, not from the beginning"
    (said,) = [m for m in killer.messages if "were lost with the coordinator" in m]
    num_lost, kept = map(int, re.findall(r"\d+", said)[:2])  # `n rounds since the checkpoint of round m`
    assert kept % 2 == 0, "a checkpoint's round"
    assert num_lost + kept >= 5, "it died in a round after the fifth"
    assert result.summary["theta_digest"] == undisturbed["theta_digest"]
    assert [r["round"] for r in records(config)] == list(range(1, result.rounds + 1))


def test_a_stop_is_heard_at_the_next_commit(source: Path, tmp_path: Path) -> None:  # noqa: F811
    config = config_for(source, tmp_path, "stop")
    config = config.override({"budget_tokens": 50 * config.budget_tokens})

    class Stopper(Notes):
        def round(self, record: dict[str, Any]) -> None:
            super().round(record)
            if record["round"] == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    result = fit(config, listener=Stopper())
    assert result.status == "stopped"
    assert 2 <= result.rounds < 50
    assert signal.getsignal(signal.SIGTERM) is not None


def test_two_runs_of_one_name_do_not_write_together(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """The same command twice on one cluster: the second follows the first and ends with its result."""
    config = config_for(source, tmp_path, "twice")
    config = config.override({"budget_tokens": 20 * config.budget_tokens})
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(fit(config)))
    first.start()
    deadline = time.monotonic() + 60
    while not (Path(config.run.storage_path) / "twice" / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    notes = Notes()
    second = fit(config, listener=notes)
    first.join(timeout=120)
    assert any("already going on" in m or "finished" in m for m in notes.messages)
    assert second.summary["theta_digest"] == results[0].summary["theta_digest"]
    assert [r["round"] for r in records(config)] == list(range(1, second.rounds + 1))


def test_more_replicas_than_the_cluster_can_hold_are_refused_at_once(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """E16: refused in seconds, with the reason and the fix, never a hang; also once the head's monitor, which every head has, reports."""
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"the cluster could hold \d+ replicas"):
        fit(config_for(source, tmp_path, "many", scaling__num_replicas=64, batch_sequences=64))
    assert time.monotonic() - begin < 30


def test_fit_leaves_no_actor_behind_and_the_callers_ray_alone(source: Path, tmp_path: Path) -> None:  # noqa: F811
    fit(config_for(source, tmp_path, "clean"))
    assert ray.is_initialized()
    deadline = time.monotonic() + 20
    while replica_processes() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert replica_processes() == []


def test_ctrl_c_checkpoints_exits_3_and_leaves_no_process(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """A private cluster of a job: SIGINT ends the run at a commit with exit code 3, and everything it started is gone."""
    command = [
        sys.executable, "jobs/train.py", "nano", "--data.source", str(source), "--run.storage-path", str(tmp_path), "--run.name", "interrupted",
        "--budget-tokens", "2000000", "--batch-sequences", "8", "--sync-interval", "2", "--scaling.num-replicas", "2", "--run.tracker", "none",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    metrics = tmp_path / "interrupted" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while (not metrics.exists() or metrics.read_text().count("\n") < 2) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output[-2000:]
    left = [p for p in psutil.process_iter() if in_session(p, process.pid)]
    psutil.wait_procs(left, timeout=20)
    assert [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    last = json.loads(metrics.read_text().splitlines()[-1])
    checkpoints = sorted((tmp_path / "interrupted" / "checkpoints").glob("round-*/manifest.json"))
    assert json.loads(checkpoints[-1].read_text())["round"] == last["round"]
    assert math.isfinite(last["train_loss"])


def in_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session
    except ProcessLookupError:
        return False


def test_replicas_get_the_threads_with_which_all_find_room(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """On a joined cluster of 16 logical CPUs, the most threads with which every replica still has a place; a given number stays."""
    from ray_muloco.runtime.fit import _with_threads_that_fit

    for replicas, threads in ((1, 16), (3, 5), (4, 4), (6, 2)):
        config = config_for(source, tmp_path, "t", scaling__num_replicas=replicas, batch_sequences=12, scaling__threads_per_replica=0)
        assert _with_threads_that_fit(config).scaling.threads_per_replica == threads
    assert _with_threads_that_fit(config.override({"scaling.threads_per_replica": 3})).scaling.threads_per_replica == 3
