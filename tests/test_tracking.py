"""Trackers: every round reaches the store once, and no store can slow, stop or confuse a run."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_resume import Notes, config_for, source  # noqa: F401 - `source` is a fixture

from ray_muloco import presets
from ray_muloco.errors import RunError
from ray_muloco.training import preflight
from ray_muloco.training.group import InnerOutcome, LocalGroup
from ray_muloco.training.mlflow_store import old_runs_notice
from ray_muloco.training.session import Seats, run_session
from ray_muloco.training.tracking import QUEUE_ITEMS, DictTracker, MlflowTracker, NullTracker, Tracker, numbers_of, tracking_uri

pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")  # SQLAlchemy about MLflow

NUM_PROCESSES = 16
SIXTEEN_WRITERS = """
import multiprocessing, os, sys
from ray_muloco.training.tracking import MlflowTracker, tracking_uri
import alembic.command, mlflow.store.tracking.sqlalchemy_store, mlflow.tracking, sqlalchemy.orm  # once, before the fork: sixteen imports would
sqlalchemy.orm.configure_mappers()  # take the test's time, and test nothing

uri = tracking_uri(sys.argv[1], {})

def write(number):
    os.makedirs(f"elsewhere-{number}")
    os.chdir(f"elsewhere-{number}")
    tracker = MlflowTracker(uri, flush_seconds=240)
    tracker.start(f"run-{number}", {"number": number}, {}, None)
    for round_number in range(1, 51):
        tracker.log({"round": round_number, **{f"metric_{i}": number + i / 10 + round_number for i in range(10)}})
    tracker.finish("FINISHED")

processes = [multiprocessing.get_context("fork").Process(target=write, args=(number,)) for number in range(16)]
for process in processes:
    process.start()
for process in processes:
    process.join()
"""


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A database that sixteen processes opened at once while it did not exist, each in a directory of its own."""
    work = tmp_path_factory.mktemp("sixteen")
    done = subprocess.run([sys.executable, "-c", SIXTEEN_WRITERS, "storage"], cwd=work, capture_output=True, text=True, timeout=300, check=False)
    return work, done


@pytest.fixture
def store(sixteen: tuple[Path, Any], tmp_path: Path) -> str:
    """The URI of a database with MLflow's tables, apart from every other test's."""
    shutil.copy(sixteen[0] / "storage" / "mlflow.db", tmp_path / "mlflow.db")
    return tracking_uri(str(tmp_path), {})


@pytest.fixture
def warnings() -> list[str]:
    return []


def rows(uri: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Ask the database itself, so that what is tested is what is there."""
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        return database.execute(query, values).fetchall()


def tracked(
    uri: str, warnings: list[str], records: list[dict[str, Any]], *, run_id: str | None = None, status: Any = "FINISHED", parameters: Any = None, **options: Any
) -> str | None:
    """One run of a tracker from start to finish."""
    tracker = MlflowTracker(uri, options.pop("experiment", "here"), warn=warnings.append, **options)
    tracker.start("run", parameters or {"seed": 0}, {"kind": "test"}, run_id)
    for record in records:
        tracker.log(record)
    tracker.finish(status)
    return tracker.run_id(0)


def silent_server() -> socket.socket:
    """Takes connections and never answers."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(8)
    return server


# ---- many processes, one store


def test_sixteen_processes_that_open_a_fresh_database_at_once_lose_no_metric(sixteen: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """M03: the schema is created once, and 16 times 500 metrics are all there, without a word on stderr."""
    work, done = sixteen
    uri = tracking_uri(str(work / "storage"), {})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert rows(uri, "select count(*), count(distinct run_uuid), count(distinct key) from metrics") == [(NUM_PROCESSES * 500, NUM_PROCESSES, 10)]
    assert rows(uri, "select count(*) from runs where status = 'FINISHED'") == [(NUM_PROCESSES,)]
    expected = sum(number + i / 10 + r for number in range(NUM_PROCESSES) for i in range(10) for r in range(1, 51))
    assert rows(uri, "select sum(value) from metrics")[0][0] == pytest.approx(expected, rel=1e-12)


def test_processes_in_other_directories_log_into_the_same_store(sixteen: tuple[Path, Any]) -> None:
    """M01: nothing but the one database was written, whatever a process's working directory."""
    work, _ = sixteen
    assert [name for directory in work.glob("elsewhere-*") for name in os.listdir(directory)] == []
    assert {path.name for path in (work / "storage").iterdir()} >= {"mlflow.db"}


# ---- the retired directory format


def test_an_old_mlruns_directory_does_not_disturb_and_is_pointed_out(store: str, warnings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M04: runs go to the database, and the message names its URI and how the old runs are seen."""
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("name: Default\n")
    monkeypatch.chdir(tmp_path)
    run_id = tracked(store, warnings, [{"round": 1, "train_loss": 2.0}])
    assert warnings == []
    assert rows(store, "select value from metrics where run_uuid = ?", run_id) == [(2.0,)]
    notice = old_runs_notice(store, ["."])
    assert notice is not None
    assert store in notice
    assert f"mlflow ui --backend-store-uri {tmp_path}/mlruns" in notice


def test_a_store_in_the_retired_format_is_refused_with_the_way_out(warnings: list[str], tmp_path: Path) -> None:
    """M04: a tracking URI that is still a directory costs a sentence that says what to do, not a run."""
    assert tracked(f"file://{tmp_path}/mlruns", warnings, [{"round": 1, "train_loss": 2.0}]) is None
    assert len(warnings) == 1
    assert "unset MLFLOW_TRACKING_URI" in warnings[0]
    assert "MLFLOW_ALLOW_FILE_STORE" in warnings[0]


# ---- one run


def test_a_run_is_logged_with_steps_parameters_tags_files_and_status(store: str, warnings: list[str], tmp_path: Path) -> None:
    config = presets.tiny(replicas=4).to_dict()
    tracker = MlflowTracker(store, "here", warn=warnings.append)
    tracker.start("run", {**config, "long": "x" * 7000, "many": {f"p{i}": i for i in range(150)}}, {"method": "muloco"}, None)
    (tmp_path / "report.html").write_text("page")
    tracker.log({"round": 7, "train_loss": 2.0, "val_loss": None, "participants": 4, "reasons": ["a"]})
    tracker.artifact(str(tmp_path / "report.html"))
    tracker.artifact(str(tmp_path / "was-never-written.png"))
    tracker.finish("KILLED")
    run_id = tracker.run_id(0)
    assert warnings == []
    assert sorted(rows(store, "select key, value, step from metrics where run_uuid = ?", run_id)) == [("participants", 4.0, 7), ("train_loss", 2.0, 7)]
    parameters = dict(rows(store, "select key, value from params where run_uuid = ?", run_id))
    assert (parameters["inner.lr"], parameters["many.p149"], len(parameters["long"])) == ("0.02", "149", 6000)
    assert ("method", "muloco") in rows(store, "select key, value from tags where run_uuid = ?", run_id)
    assert rows(store, "select status, name from runs where run_uuid = ?", run_id) == [("KILLED", "run")]
    assert [path.read_text() for path in (tmp_path / "mlartifacts").rglob("report.html")] == ["page"]


def test_numbers_are_taken_and_everything_else_is_left_out() -> None:
    record = {"round": 3, "a": 1, "b": 2.5, "c": None, "d": "text", "e": ["list"], "f": True, "bad name!": 1.0}
    assert numbers_of(record) == {"a": 1.0, "b": 2.5, "f": 1.0, "bad name_": 1.0}


def test_values_that_are_not_finite_do_not_cost_the_finite_ones(store: str, warnings: list[str]) -> None:
    run_id = tracked(store, warnings, [{"round": 1, "train_loss": math.nan, "grad_norm": math.inf, "tokens": 5, "val_loss": None}])
    assert warnings == []
    logged = {key: (value, nan) for key, value, nan in rows(store, "select key, value, is_nan from metrics where run_uuid = ?", run_id)}
    assert logged["tokens"] == (5.0, 0)
    assert logged["train_loss"][1] == 1
    assert "val_loss" not in logged


def test_a_resumed_run_continues_and_logs_only_what_differs(store: str, warnings: list[str]) -> None:
    """Rounds after the checkpoint are trained again: the same value at the same step stays one, another value is added."""
    first = [{"round": r, "train_loss": 5.0 / r, "grad_norm": math.inf, "odd": math.nan} for r in range(1, 6)]
    run_id = tracked(store, warnings, first, status="KILLED")
    again = [{"round": r, "train_loss": 5.0 / r if r != 5 else 0.5, "grad_norm": math.inf, "odd": math.nan} for r in range(4, 8)]
    assert tracked(store, warnings, again, run_id=run_id) == run_id
    assert warnings == []
    logged = rows(store, "select step, value from metrics where run_uuid = ? and key = 'train_loss' order by step, timestamp", run_id)
    assert logged == [(1, 5.0), (2, 2.5), (3, 5 / 3), (4, 1.25), (5, 1.0), (5, 0.5), (6, 5 / 6), (7, 5 / 7)]
    assert rows(store, "select key, count(*) from metrics where run_uuid = ? and key in ('grad_norm', 'odd') group by key", run_id) == [
        ("grad_norm", 7),
        ("odd", 7),
    ]
    assert rows(store, "select status from runs where run_uuid = ?", run_id) == [("FINISHED",)]


def test_a_parameter_that_a_resumed_run_changed_becomes_a_tag(store: str, warnings: list[str]) -> None:
    """MLflow refuses another value for a parameter; a longer budget must not cost the tracking."""
    run_id = tracked(store, warnings, [{"round": 1, "tokens": 1}], parameters={"budget_tokens": 10, "seed": 0})
    tracked(store, warnings, [{"round": 2, "tokens": 2}], parameters={"budget_tokens": 20, "seed": 0, "new": 1}, run_id=run_id)
    assert warnings == []
    assert sorted(rows(store, "select key, value from params where run_uuid = ?", run_id)) == [("budget_tokens", "10"), ("new", "1"), ("seed", "0")]
    assert rows(store, "select key, value from tags where run_uuid = ? and key like 'resumed.%'", run_id) == [("resumed.budget_tokens", "20")]


@pytest.mark.parametrize("gone", ["never was", "deleted"])
def test_a_run_id_that_is_gone_begins_a_new_run_with_one_warning(gone: str, store: str, warnings: list[str]) -> None:
    run_id = "0123456789abcdef0123456789abcdef"
    if gone == "deleted":
        run_id = tracked(store, warnings, [{"round": 1, "tokens": 1}])
        with sqlite3.connect(store.removeprefix("sqlite:///")) as database:
            database.execute("update runs set lifecycle_stage = 'deleted' where run_uuid = ?", (run_id,))
    new = tracked(store, warnings, [{"round": 2, "tokens": 2}], run_id=run_id)
    assert new not in (None, run_id)
    assert len(warnings) == 1
    assert run_id in warnings[0]
    assert rows(store, "select step, value from metrics where run_uuid = ?", new) == [(2, 2.0)]


# ---- a run's membership


class Fragile(LocalGroup):
    """Loses replica 1 in its second round; in the fourth, if it is to, everything."""

    def __init__(self, dataset: Any, falls: bool) -> None:
        super().__init__(dataset)
        self.falls, self.num_phases = falls, 0

    def run_inner(self, plans: Any) -> InnerOutcome:
        outcome = super().run_inner(plans)
        self.num_phases += 1
        if self.num_phases == 4 and self.falls:
            raise RunError("too few replicas", "none lives")
        if self.num_phases != 2:
            return outcome
        del self.replicas[1]
        self.generation += 1
        return InnerOutcome({k: report for k, report in outcome.reports.items() if k != 1}, {1: "its process was killed"})


@pytest.mark.parametrize("falls", [False, True])
def test_who_took_part_is_logged_every_round_and_why_it_changed_is_kept(falls: bool, source: Path, store: str, tmp_path: Path) -> None:  # noqa: F811
    """Numbers of the membership as metrics, the reasons in metrics.jsonl as an artifact: also, and above all, of a run that gave up."""
    config = preflight.check(config_for(source, tmp_path / "runs", "fragile", run__tracker="mlflow", scaling__min_replicas=1)).config
    seats = Seats(lambda: False, lambda dataset, data_dir: Fragile(dataset, falls))
    with pytest.raises(RunError) if falls else contextlib.nullcontext():
        run_session(config, store, seats, Notes(), lambda: False)
    [(run_id, status, artifacts)] = rows(store, "select run_uuid, status, artifact_uri from runs where name = 'fragile'")
    assert status == ("FAILED" if falls else "FINISHED")
    keys = ("participants", "alive", "healing", "pending", "effective_replicas", "tokens_merged", "tokens_lost", "generation")
    written = [json.loads(line) for line in (tmp_path / "runs" / "fragile" / "metrics.jsonl").read_text().splitlines()]
    assert len(written) == 3 if falls else len(written) > 4
    expected = {(key, record["round"], float(record[key])) for record in written for key in keys}
    assert expected <= set(rows(store, "select key, step, value from metrics where run_uuid = ?", run_id))
    assert rows(store, "select value from metrics where run_uuid = ? and key = 'tokens_lost' and step = 2", run_id)[0][0] > 0
    assert rows(store, "select count(*) from metrics where run_uuid = ? and key = 'reasons'", run_id) == [(0,)]
    kept = Path(artifacts.removeprefix("file://"), "metrics.jsonl").read_text()
    reasons = {record["round"]: record["reasons"] for record in map(json.loads, kept.splitlines())}
    assert len(reasons) == len(written)
    assert any("its process was killed" in reason for reason in reasons[2])
    assert any("joins" in reason for reason in reasons[2])


# ---- stores that fail


@pytest.mark.parametrize(
    "uri", ["sqlite:////dev/null/mlflow.db", "nonsense://nowhere", "postgresql://user:secret@127.0.0.1:1/db", "http://user:secret@127.0.0.1:9"]
)
def test_a_store_that_cannot_be_reached_costs_one_warning(uri: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert tracked(uri, warnings, [{"round": r, "train_loss": 1.0} for r in range(1, 100)]) is None
    assert len(warnings) == 1
    assert "metrics.jsonl" in warnings[0]
    assert "secret" not in warnings[0]


def test_a_database_that_breaks_in_the_middle_costs_one_warning_and_no_round_waits(store: str, warnings: list[str]) -> None:
    tracker = MlflowTracker(store, "here", warn=warnings.append)
    tracker.start("run", {}, {}, None)
    tracker.log({"round": 1, "tokens": 1})
    run_id = tracker.run_id(60)
    with sqlite3.connect(store.removeprefix("sqlite:///")) as database:
        database.execute("drop table metrics")
    for number in range(2, 200):
        tracker.log({"round": number, "tokens": number})
    tracker.finish("FINISHED")
    assert tracker.run_id(60) == run_id
    assert len(warnings) == 1


def test_a_store_that_never_answers_holds_nothing_up(warnings: list[str]) -> None:
    """Logging returns, the queue stays bounded, the checkpoint waits for the run id once, finish keeps its deadline."""
    with silent_server() as server:
        tracker = MlflowTracker(f"http://127.0.0.1:{server.getsockname()[1]}", warn=warnings.append, flush_seconds=0.3)
        tracker.start("run", {}, {}, None)
        for number in range(1, QUEUE_ITEMS + 500):
            tracker.log({"round": number, "train_loss": 1.0})
        begin = time.perf_counter()
        assert tracker.run_id(0.3) is None
        waited = time.perf_counter()
        assert [tracker.run_id(0.3) for _ in range(20)] == [None] * 20
        assert time.perf_counter() - waited < 10 * (waited - begin)  # twenty waits of their own would be 20 times the first
        tracker.finish("FINISHED")
    assert len(warnings) == 1
    assert "0 s" in warnings[0]


def test_files_that_the_store_refuses_do_not_cost_the_end_of_the_run(store: str, warnings: list[str], tmp_path: Path) -> None:
    (tmp_path / "mlartifacts").write_text("in the way")
    (tmp_path / "a.png").write_text("a")
    tracker = MlflowTracker(store, "blocked", warn=warnings.append)
    tracker.start("run", {}, {}, None)
    tracker.artifact(str(tmp_path / "a.png"))
    tracker.artifact(str(tmp_path / "a.png"))
    tracker.log({"round": 1, "tokens": 1})
    tracker.finish("FINISHED")
    assert len(warnings) == 1
    assert "a.png" in warnings[0]
    assert rows(store, "select status from runs where run_uuid = ?", tracker.run_id(0)) == [("FINISHED",)]


# ---- what does not happen


def test_nothing_is_written_before_the_first_round_and_nothing_without_a_start(warnings: list[str]) -> None:
    """MLflow's import takes seconds that the first inner step must not wait for; a run refused before its start leaves no trace."""
    before = {thread for thread in threading.enumerate() if thread.name == "mlflow"}
    tracker = MlflowTracker("nonsense://nowhere", warn=warnings.append)
    tracker.log({"round": 1})
    tracker.finish("FAILED")
    tracker.start("run", {}, {}, None)
    assert {thread for thread in threading.enumerate() if thread.name == "mlflow"} <= before
    assert warnings == []


def test_importing_the_tracker_does_not_import_mlflow() -> None:
    code = "import sys, ray_muloco.training.tracking; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_the_silence_of_one_thread_leaves_other_threads_heard(store: str, warnings: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """MLflow's own loggers work as before for a program that uses MLflow too, during a run and after it."""
    tracker = MlflowTracker(store, "here", warn=warnings.append)
    tracker.start("run", {}, {}, None)
    assert tracker.run_id(60) is not None
    logging.getLogger("mlflow.elsewhere").warning("heard during the run")
    tracker.finish("FINISHED")
    logging.getLogger("mlflow.elsewhere").warning("heard after the run")
    heard = capfd.readouterr().err
    assert "heard during the run" in heard
    assert "heard after the run" in heard
    assert len(heard.splitlines()) == 2


# ---- the other members


@pytest.mark.parametrize("make", [NullTracker, DictTracker])
def test_every_tracker_takes_a_run_from_start_to_finish(make: Any) -> None:
    tracker: Tracker = make()
    tracker.start("run", {"inner": {"lr": 0.1}}, {}, None)
    tracker.log({"round": 1, "train_loss": None})
    tracker.artifact("a.png")
    tracker.finish("FINISHED")
    assert tracker.run_id(0) in (None, "run")


def test_the_dict_tracker_follows_the_surviving_history() -> None:
    tracker = DictTracker()
    tracker.start("run", {"inner": {"lr": 0.1}}, {}, "earlier")
    for number, loss in ((1, 3.0), (2, 2.0), (3, 1.0), (2, 2.5)):
        tracker.log({"round": number, "train_loss": loss})
    assert [(record["round"], record["train_loss"]) for record in tracker.records] == [(1, 3.0), (2, 2.5)]
    assert tracker.parameters == {"inner.lr": 0.1}
    assert tracker.run_id(0) == "earlier"
