"""Nodes come and go: crash, drain, silence, and an autoscaler that follows the demand of pending replicas."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from test_ray_cluster import free_port, job, rounds
from test_resume import Notes, config_for, source  # noqa: F401 - `source` is a fixture

from ray_muloco import fit
from ray_muloco.runtime.cluster import one_node_a_replica
from ray_muloco.runtime.nodes import draining_nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def replenish() -> Iterator[Callable[[], None]]:
    """A head for the coordinator and a node for each of three replicas; the function that starts nodes for lost ones."""
    with one_node_a_replica(3, 1) as replenish:
        yield replenish


class NodeFault(Notes):
    """Does something to the node of a replica when a round is heard; brings new nodes up afterwards; stops the run once `seen` has been."""

    def __init__(self, act: Callable[[dict[str, Any]], None], replenish: Callable[[], None], seen: str, at_round: int = 3) -> None:
        super().__init__()
        self.at_round, self.act, self.replenish, self.seen, self.node = at_round, act, replenish, seen, None
        self.more = 3

    def round(self, record: dict[str, Any]) -> None:
        super().round(record)
        if record["round"] == self.at_round:
            self.node = next(n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU"))
            self.act(self.node)
        elif self.node is not None and record["round"] > self.at_round:
            self.replenish()
        if any(self.seen in message for message in self.messages):
            self.more -= 1
            if self.more == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def raylet_of(node: dict[str, Any]) -> int:
    """Process id of a node's raylet on this machine."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line and line[0].endswith("raylet") and any(a == f"--node_manager_port={node['NodeManagerPort']}" for a in line):
            return process.pid
    ports = {c.laddr.port: c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
    return ports[node["NodeManagerPort"]]


def crash(node: dict[str, Any]) -> None:
    os.kill(raylet_of(node), signal.SIGKILL)


def stop(node: dict[str, Any]) -> None:
    """As an operator stops a node: it says goodbye to the cluster, and ends."""
    os.kill(raylet_of(node), signal.SIGTERM)


def silence(node: dict[str, Any]) -> None:
    """The node's processes stop, as when a network goes dark: no socket closes."""
    import psutil

    raylet = psutil.Process(raylet_of(node))
    for process in [*raylet.children(recursive=True), raylet]:
        process.suspend()


@pytest.mark.parametrize("fault", [crash, stop, silence])
def test_a_lost_node_costs_its_replica_and_nothing_else(source: Path, tmp_path: Path, replenish: Callable[[], None], fault: Any) -> None:  # noqa: F811
    """D04, D06, T01: the survivors commit on, the replacement comes up on another node, and the run ends with all three."""
    config = config_for(source, tmp_path, fault.__name__, scaling__num_replicas=3, batch_sequences=6, scaling__min_replicas=1)
    config = config.override({"budget_tokens": 5000 * config.budget_tokens, "sync_interval": 30, "scaling.hang_floor_seconds": 4.0})
    result = fit(config, listener=NodeFault(fault, replenish, seen="joins"))
    participants = [r["participants"] for r in result.metrics]
    assert result.status == "stopped"
    assert participants[0] == participants[-1] == 3
    assert min(participants) == 2
    assert [r["round"] for r in result.metrics] == list(range(1, len(participants) + 1))
    assert any("joins" in reason for r in result.metrics for reason in r["reasons"])


def test_a_replica_leaves_a_drained_node_before_the_deadline_and_loses_nothing(
    source: Path,  # noqa: F811
    tmp_path: Path,
    replenish: Callable[[], None],
) -> None:
    """A spot node with notice: its replica trains on until the deadline is near, leaves at a boundary, and no token is lost."""
    seconds = 8.0

    def drain(node: dict[str, Any]) -> None:
        from ray._private.state import state
        from ray._raylet import GcsClient

        client = GcsClient(address=ray.get_runtime_context().gcs_address)
        accepted, why = client.drain_node(node["NodeID"], 2, "spot notice", int((time.time() + seconds) * 1000))  # 2: preemption
        assert accepted, why
        assert node["NodeID"] in state.get_draining_nodes()
        assert abs(draining_nodes()[node["NodeID"]] - time.time() - seconds) < 5

    config = config_for(source, tmp_path, "drained", scaling__num_replicas=3, batch_sequences=6, scaling__min_replicas=1)
    config = config.override({"budget_tokens": 5000 * config.budget_tokens, "sync_interval": 30})
    result = fit(config, listener=NodeFault(drain, lambda: None, seen="left: its node is drained"))
    reasons = [(r["round"], reason) for r in result.metrics for reason in r["reasons"]]
    assert result.status == "stopped"
    assert any("will leave: its node is drained" in reason for _, reason in reasons)
    ((left, sentence),) = [(number, reason) for number, reason in reasons if "left: its node is drained" in reason]
    assert int(sentence.split(" s before the deadline")[0].split()[-1]) >= 0, sentence
    assert result.metrics[left - 1]["participants"] == 3, "the round before the leave was merged whole"
    assert sum(r["tokens_lost"] for r in result.metrics) == 0
    assert result.metrics[-1]["participants"] == 2


# ---- an autoscaler


@pytest.fixture
def autoscaling(tmp_path: Path) -> Iterator[str]:
    """A head with Ray's fake multi-node provider: demand brings nodes up in seconds, idle ones go after 6 s; its address."""
    port = free_port()
    host = ray.util.get_node_ip_address() if ray.is_initialized() else ray._private.services.get_node_ip_address()
    head_id = "f" * 51 + "00000"
    empty: dict[str, Any] = {key: {} for key in ("auth", "file_mounts", "docker")}
    lists: dict[str, Any] = {key: [] for key in ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands", "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")}  # fmt: skip
    config = {
        "cluster_name": "fake", "max_workers": 4, "upscaling_speed": 10.0, "idle_timeout_minutes": 0.1, "head_node_type": "ray.head.default",
        "provider": {
            "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider", "use_node_id_as_ip": True,
            "disable_node_updaters": True, "disable_launch_config_check": True, "launch_multiple": True, "head_node_id": head_id, "gcs_address": f"{host}:{port}",
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0, "coordinator": 1}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": {"CPU": 1, "object_store_memory": 80 * 2**20}, "node_config": {}, "min_workers": 0, "max_workers": 4},
        },
        "file_mounts_sync_continuously": False, **empty, **lists,
    }  # fmt: skip
    path = tmp_path / "autoscaling.json"
    path.write_text(json.dumps(config))
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=0", '--resources={"coordinator": 1}',
        f"--autoscaling-config={path}", "--include-dashboard=false", "--dashboard-agent-listen-port=0", "--object-store-memory=100000000", "--disable-usage-stats",
    ]  # fmt: skip
    environment = {
        **os.environ, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": head_id,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head_id, "RAY_AUTH_MODE": "disabled",
    }  # fmt: skip
    with (tmp_path / "head.log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield f"{host}:{port}"
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(45)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)


WATCH = """
import json, sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
while True:
    print(sum(n["Alive"] and n["Resources"].get("CPU", 0) > 0 for n in ray.nodes()), flush=True)
    time.sleep(0.5)
"""


def participants(storage: Path, name: str) -> list[int]:
    path = storage / name / "metrics.jsonl"
    return [json.loads(line)["participants"] for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def test_pending_replicas_are_the_demand_an_autoscaler_acts_on(source: Path, tmp_path: Path, autoscaling: str) -> None:  # noqa: F811
    """From nothing to four nodes by demand, training from the first on; when the run has ended the nodes go again."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    deadline = time.monotonic() + 60
    watcher = None
    while watcher is None and time.monotonic() < deadline:
        time.sleep(3)
        watcher = subprocess.Popen([sys.executable, "-c", WATCH, autoscaling], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        time.sleep(4)
        if watcher.poll() is not None:
            watcher = None
    assert watcher is not None
    assert watcher.stdout is not None
    seen: list[int] = []
    try:
        run = job(
            source, tmp_path, "grown", autoscaling, "--scaling.num-replicas", "4", "--scaling.min-replicas", "1", "--scaling.max-replicas", "4",
            "--scaling.start-grace-seconds", "0", "--budget-tokens", "60000000", "--sync-interval", "20",
        )  # fmt: skip
        deadline = time.monotonic() + 150
        while participants(tmp_path, "grown")[-1:] != [4] and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        run.send_signal(signal.SIGTERM)
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 3, output[-3000:]
        merged = participants(tmp_path, "grown")
        assert merged[-1] == 4
        assert merged[0] < 4, "it began before all were there"
        assert rounds(tmp_path, "grown") == list(range(1, len(merged) + 1))
        end = time.monotonic() + 60
        os.set_blocking(watcher.stdout.fileno(), False)
        while (not seen or seen[-1]) and time.monotonic() < end:
            seen += [int(word) for word in (watcher.stdout.read() or "").split()]
            time.sleep(1)
        assert max(seen) == 4
        assert seen[-1] == 0, f"idle nodes stayed: {seen[-20:]}"
    finally:
        watcher.kill()
