"""`ray job submit` on a started cluster: logs without a terminal, stop with a checkpoint, the same command goes on; with a token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ray_cluster import ROOT, free_port, rounds
from test_resume import source  # noqa: F401 - a fixture

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RAY = str(Path(sys.executable).parent / "ray")
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
STOP_WAIT = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}, **more}


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head that wants a token, its dashboard on the loopback; the address jobs are submitted to."""
    port = free_port()
    command = [
        RAY, "start", "--head", "--block", f"--port={free_port()}", "--num-cpus=8", "--include-dashboard=true", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}", "--object-store-memory=100000000", "--disable-usage-stats",
    ]  # fmt: skip
    log = (tmp_path_factory.mktemp("head") / "log").open("w")
    head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment(**TOKEN))
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    while ray_job(address, "list").returncode != 0:
        assert time.monotonic() < deadline, "the dashboard did not come up"
        time.sleep(1)
    yield address
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)


def ray_job(address: str, *arguments: str, auth: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [RAY, "job", arguments[0], "--address", address, *arguments[1:]]
    return subprocess.run(command, cwd=ROOT, env=environment(**(auth or TOKEN)), capture_output=True, text=True, timeout=120)


def submit(address: str, submission: str, source: Path, storage: str, *more: str) -> None:  # noqa: F811
    done = ray_job(
        address, "submit", "--no-wait", "--submission-id", submission, "--working-dir", ".", "--runtime-env-json", STOP_WAIT, "--", sys.executable,
        "jobs/train.py", "nano", "--data.source", str(source), "--run.storage-path", storage, "--batch-sequences", "8", "--sync-interval", "3",
        "--scaling.num-replicas", "2", "--scaling.threads-per-replica", "1", "--run.tracker", "none", *more,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for(address: str, submission: str, *states: str, seconds: float = 150) -> str:
    """The job's status once it is one of these; its logs when it never is."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        said = ray_job(address, "status", submission).stdout
        for state in states:
            if state in said:
                return state
        time.sleep(1)
    raise AssertionError(f"{submission} is not {states}: {ray_job(address, 'logs', submission).stdout[-3000:]}")


def test_without_the_token_nothing_can_be_submitted(dashboard: str) -> None:
    """Whoever reaches the port could run code: in token mode a request without one is refused, and nothing runs."""
    for auth in ({"RAY_AUTH_MODE": "disabled"}, {**TOKEN, "RAY_AUTH_TOKEN": "f" * 32}):
        refused = ray_job(dashboard, "submit", "--no-wait", "--submission-id", "intruder", "--", "echo", "hello", auth=auth)
        assert refused.returncode != 0
        assert "401" in refused.stdout + refused.stderr or "403" in refused.stdout + refused.stderr or "auth" in (refused.stdout + refused.stderr).lower()
    assert "intruder" not in ray_job(dashboard, "list").stdout


def test_a_job_is_stopped_with_a_checkpoint_and_the_same_command_finishes_it(source: Path, tmp_path: Path, dashboard: str) -> None:  # noqa: F811
    """Logs are lines; `ray job stop` waits for the checkpoint; submitted again the run goes on by its name. T02."""
    flags = ("--run.name", "first", "--budget-tokens", "600000", "--checkpoint.every-rounds", "1000")
    submit(dashboard, "first", source, str(tmp_path), *flags)
    deadline = time.monotonic() + 120
    while len(rounds(tmp_path, "first")) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    ray_job(dashboard, "stop", "first")
    wait_for(dashboard, "first", "STOPPED", "stopped")
    reached = rounds(tmp_path, "first")
    checkpoints = sorted((tmp_path / "first" / "checkpoints").glob("round-*/manifest.json"))
    assert json.loads(checkpoints[-1].read_text())["round"] == reached[-1] >= 3
    logs = ray_job(dashboard, "logs", "first").stdout
    assert re.search(r"^round \d+/\d+ .* tokens/s  replicas 2/2", logs, re.MULTILINE), logs[-2000:]
    assert "stopping at the next commit, with a checkpoint" in logs
    ours = [line for line in logs.splitlines() if "cli.py" not in line]
    assert "\x1b" not in "".join(ours), "no colours, no cursor movements in a log"
    submit(dashboard, "again", source, str(tmp_path), *flags)
    wait_for(dashboard, "again", "SUCCEEDED", "succeeded")
    result = json.loads((tmp_path / "first" / "result.json").read_text())
    assert result["status"] == "finished"
    assert rounds(tmp_path, "first") == list(range(1, result["rounds"] + 1))


def test_two_runs_on_one_cluster_do_not_touch_each_other(source: Path, tmp_path: Path, dashboard: str) -> None:  # noqa: F811
    """Same flags but name and seed, at the same time: each is what it would be alone, and a third in a relative path is refused."""
    for name, seed in (("a", "1"), ("b", "2"), ("c", "1")):
        submit(dashboard, f"both-{name}", source, str(tmp_path), "--run.name", name, "--seed", seed, "--budget-tokens", "40000")
    submit(dashboard, "relative", source, "runs", "--run.name", "d")
    for name in "abc":
        wait_for(dashboard, f"both-{name}", "SUCCEEDED", "succeeded")
    results = {name: json.loads((tmp_path / name / "result.json").read_text()) for name in "abc"}
    assert results["a"]["theta_digest"] == results["c"]["theta_digest"] != results["b"]["theta_digest"]
    assert all(r["participants_mean"] == 2 and r["generations"] == 1 for r in results.values())
    wait_for(dashboard, "relative", "FAILED", "failed")
    assert "must be absolute or a URI inside a Ray job" in ray_job(dashboard, "logs", "relative").stdout
