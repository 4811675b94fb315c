"""A run on a cluster that others own: the driver may be lost, the run is not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_resume import config_for, source, train  # noqa: F401 - `source` is a fixture

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster's head in processes of its own, ended by their session."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=8", "--include-dashboard=false",
        "--object-store-memory=100000000", "--dashboard-agent-listen-port=0", "--disable-usage-stats",
    ]  # fmt: skip
    log = (tmp_path_factory.mktemp("head") / "log").open("w")
    head = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.2)
    time.sleep(2.0)  # the port opens a moment before the node is registered
    yield f"127.0.0.1:{port}"
    head.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        head.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(head.pid, signal.SIGKILL)


def replicas_of(address: str) -> list[psutil.Process]:
    """Replica actors of this cluster and of no other on the machine: children of its raylets, whose command lines name the head."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if (
                process.cmdline()[:1]
                and process.cmdline()[0].startswith("ray::ReplicaActor")
                and parent
                and address.split(":")[1] in " ".join(parent.cmdline())
            ):
                found.append(process)
    return found


def job(source: Path, storage: Path, name: str, address: str, *more: str) -> subprocess.Popen[str]:  # noqa: F811
    command = [
        sys.executable, "jobs/train.py", "nano", "--data.source", str(source), "--run.storage-path", str(storage), "--run.name", name, "--batch-sequences", "8",
        "--sync-interval", "3", "--scaling.num-replicas", "2", "--scaling.threads-per-replica", "1", "--run.tracker", "none", "--budget-tokens", "400000", *more,
    ]  # fmt: skip
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rounds(storage: Path, name: str) -> list[int]:
    path = storage / name / "metrics.jsonl"
    return [json.loads(line)["round"] for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def test_a_lost_driver_is_not_a_lost_run(source: Path, tmp_path: Path, address: str) -> None:  # noqa: F811
    """The driver is killed with -9: the coordinator goes on, and the same command finds it and ends with its result."""
    first = job(source, tmp_path, "orphan", address)
    deadline = time.monotonic() + 90
    while len(rounds(tmp_path, "orphan")) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(10)
    at_kill = len(rounds(tmp_path, "orphan"))
    assert at_kill >= 3, first.stdout.read() if first.stdout else ""
    second = job(source, tmp_path, "orphan", address)
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output[-2000:]
    assert "following it" in output or "is finished" in output
    result = json.loads((tmp_path / "orphan" / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["generations"] == 1, "the replicas were never replaced"
    assert rounds(tmp_path, "orphan") == list(range(1, result["rounds"] + 1))


def test_relative_storage_inside_a_ray_job_is_refused(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """A job's working directory is thrown away: the path that would lose the run is refused, with what to say instead."""
    command = [sys.executable, "jobs/train.py", "nano", "--run.storage-path", "runs"]
    environment = {**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "run.storage-path" in done.stderr
    assert "/shared/runs" in done.stderr


def test_a_cluster_that_does_not_answer_is_refused_in_seconds(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """RAY_ADDRESS of a cluster that is gone: Ray would try for minutes; one line says what to do instead."""
    begin = time.monotonic()
    refused = job(source, tmp_path, "nowhere", f"127.0.0.1:{free_port()}")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "RAY_ADDRESS" in output
    assert "unset RAY_ADDRESS" in output
    assert time.monotonic() - begin < 40


def test_a_run_that_is_going_on_is_not_followed_under_other_settings(source: Path, tmp_path: Path, address: str) -> None:  # noqa: F811
    """Before the first checkpoint nothing on the disk could refuse them: the second driver would have reported the first one's run as its own."""
    first = job(source, tmp_path, "same", address, "--checkpoint.every-rounds", "100000", "--budget-tokens", "40000000")
    deadline = time.monotonic() + 90
    while len(rounds(tmp_path, "same")) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    other = job(source, tmp_path, "same", address, "--checkpoint.every-rounds", "100000", "--budget-tokens", "40000000", "--inner.lr", "0.001")
    output, _ = other.communicate(timeout=60)
    assert other.returncode == 2, output
    assert "is a run that is going on with other settings (inner.lr" in output
    assert first.poll() is None, "the run itself goes on"
    first.terminate()
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 3, output[-2000:]


def test_every_driver_is_told_that_a_run_gave_up(source: Path, tmp_path: Path, address: str) -> None:  # noqa: F811
    """The first driver to fetch the end took the coordinator down; the other saw a death, and began the run again that had given up."""
    flags = ("--budget-tokens", "40000000", "--checkpoint.every-rounds", "100000", "--scaling.rejoin-timeout-seconds", "0")
    first = job(source, tmp_path, "given-up", address, *flags)
    deadline = time.monotonic() + 90
    while len(rounds(tmp_path, "given-up")) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    second = job(source, tmp_path, "given-up", address, *flags)
    said = ""
    while "following it" not in said and time.monotonic() < deadline:
        said += second.stdout.readline() if second.stdout else ""
    time.sleep(1.0)
    replicas_of(address)[0].kill()
    for driver in (first, second):
        output, _ = driver.communicate(timeout=60)
        assert driver.returncode == 4, output[-2000:]
        assert "too few replicas" in output
        assert "another takes its place" not in output
