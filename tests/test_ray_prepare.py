"""Preparing on Ray: the same bytes as in one process, kept through kill -9, and bad input named from whichever task finds it."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from data_texts import sentences, write_jsonl, write_parquet, write_texts

from ray_muloco.config import DataConfig
from ray_muloco.data.locations import OutputDirectory
from ray_muloco.data.preparation import check, prepare
from ray_muloco.errors import ConfigError, RunError

pytestmark = pytest.mark.ray
ROOT = Path(__file__).resolve().parents[1]
UNIT_BYTES = 4000


def prepared(source: Path, output: Path, deadline_seconds: float = 120.0, **data: object) -> dict:
    from ray_muloco.runtime.prepare import RayUnits

    config = DataConfig(source=str(source), **data)  # pyright: ignore[reportArgumentType]
    return prepare(check(config, str(output), sequence_length=32, unit_bytes=UNIT_BYTES), run_units=RayUnits(deadline_seconds))


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_ray_makes_the_bytes_that_one_process_makes(ray_cluster, tmp_path: Path, tokenizer: str) -> None:
    """P03: text, JSON lines and row groups as units of parallel tasks."""
    source = write_texts(tmp_path / "t", sentences(150))
    write_jsonl(source / "lines.jsonl", sentences(150, seed=1))
    write_parquet(source / "rows.parquet", sentences(150, seed=2), row_group_size=20)
    prepared(source, tmp_path / "ray", tokenizer=tokenizer)
    prepare(check(DataConfig(source=str(source), tokenizer=tokenizer), str(tmp_path / "here"), sequence_length=32, unit_bytes=UNIT_BYTES))
    assert content(tmp_path / "ray") == content(tmp_path / "here")
    assert len(content(tmp_path / "ray")) > 10


def test_bad_input_found_by_a_task_is_named(ray_cluster, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", sentences(300))
    with open(source, "a") as file:
        file.write("{broken\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl:301'.*not a line of JSON"):
        prepared(source, tmp_path / "a")


def test_a_bug_in_a_task_is_told_with_its_unit(ray_cluster, tmp_path: Path) -> None:
    """What is neither bad input nor a refusing disk ends as RunError and not as another library's exception."""
    from ray_muloco.runtime.prepare import RayUnits

    preparation = check(DataConfig(source=str(write_texts(tmp_path / "t", sentences(50)))), str(tmp_path / "a"), unit_bytes=UNIT_BYTES)
    job = preparation.plan.jobs("hash", preparation.output)[0]
    preparation.output.write("_prepare/plan.json", b"{}")
    broken = dataclasses.replace(job, split=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RunError, match=r"preparing: unit 0 failed: AttributeError"):
        list(RayUnits(60.0)([broken], preparation.tokenizer))  # pyright: ignore[reportArgumentType]


class FirstWriteIsTheLast(OutputDirectory):
    """Kills the process that writes here first, once for each unit; `said` is where that is remembered."""

    def write(self, name, fill):
        said = Path(self.location.path, f"killed-{name[:12]}".replace("/", "-"))
        if not said.exists():
            said.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(name, fill)


def test_a_task_whose_process_dies_is_run_again(ray_cluster, tmp_path: Path) -> None:
    from ray import cloudpickle

    from ray_muloco.runtime.prepare import RayUnits

    preparation = check(DataConfig(source=str(write_texts(tmp_path / "t", sentences(100)))), str(tmp_path / "a"), unit_bytes=UNIT_BYTES)
    preparation.output.write("_prepare/plan.json", b"{}")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        lethal = FirstWriteIsTheLast(preparation.output.location)
        jobs = [dataclasses.replace(job, output=lethal) for job in preparation.plan.jobs("hash", preparation.output)][:2]
        assert preparation.tokenizer is not None
        records = list(RayUnits(120.0)(jobs, preparation.tokenizer))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert sorted(record.number for record in records) == [0, 1]
    assert list(tmp_path.glob("a/killed-*"))


def test_a_cluster_without_room_is_given_up_in_time(ray_cluster, tmp_path: Path) -> None:
    """Every wait has a deadline: all CPUs are taken by someone else."""
    import ray

    @ray.remote(num_cpus=16)
    class Greedy:
        def ready(self) -> bool:
            return True

    greedy = Greedy.remote()
    ray.get(greedy.ready.remote(), timeout=60)
    try:
        with pytest.raises(RunError, match=r"preparing: none of the units 0.* finished in 1 s"):
            prepared(write_texts(tmp_path / "t", sentences(150)), tmp_path / "a", deadline_seconds=1.0)
    finally:
        ray.kill(greedy)


def test_an_output_that_a_node_cannot_see_is_refused(ray_cluster, tmp_path: Path) -> None:
    """The driver leaves a file in the output before any task runs; a task that does not find it is on another disk."""
    from ray_muloco.runtime.prepare import RayUnits

    preparation = check(DataConfig(source=str(write_texts(tmp_path / "t", sentences(50)))), str(tmp_path / "a"), unit_bytes=UNIT_BYTES)
    assert preparation.tokenizer is not None
    with pytest.raises(ConfigError, match=r"output is .*cannot be seen by node"):
        list(RayUnits(60.0)(preparation.plan.jobs("hash", preparation.output), preparation.tokenizer))


@pytest.mark.slow
def test_kill_9_in_the_middle_and_the_same_command_again(tmp_path: Path) -> None:
    """The whole job, killed with all it started once some units are done: the second run does the rest, and the bytes are the same."""
    source = write_jsonl(tmp_path / "a.jsonl", sentences(60_000))
    flags = ["--data.source", str(source), "--sequence-length", "32", "--unit-bytes", "30000"]
    command = [sys.executable, str(ROOT / "jobs" / "prepare.py"), *flags, "--output"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen([*command, str(tmp_path / "cut")], stdout=subprocess.PIPE, env=environment, start_new_session=True)
    state = tmp_path / "cut" / "_prepare" / "hash"
    deadline = time.monotonic() + 120
    while len(list(state.glob("unit-*.json"))) < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    kill_session(process.pid)
    process.wait(30)
    assert not (tmp_path / "cut" / "manifest.json").exists(), "killed in the middle"
    kept = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in state.glob("unit-*.json")}
    shards = {path: path.stat().st_ino for record in kept for path in (tmp_path / "cut").glob(f"*-{record.stem.removeprefix('unit-')}-*.arrow")}
    again = subprocess.run([*command, str(tmp_path / "cut")], capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_ino for path in shards} == shards, "finished units are not done again"
    whole = subprocess.run([*command, str(tmp_path / "whole"), "--local"], capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert whole.returncode == 0, whole.stderr
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def kill_session(leader: int) -> None:
    """kill -9 for every process of a session."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                os.kill(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
