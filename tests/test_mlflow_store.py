"""The store behind the tracker: its URI, the commands that open it, its creation, its failures; without MLflow."""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path

import pytest

from ray_muloco.training import mlflow_store
from ray_muloco.training.mlflow_store import ensure_database, failure_of, old_runs_notice, open_command, redacted, retrying
from ray_muloco.training.tracking import tracking_uri


@pytest.mark.parametrize(
    "given", ["", "sqlite:///other.db", "./mlruns", "file:mlruns", "sqlite:////elsewhere/a.db", "http://server:5000", "databricks", "postgresql://u@h/db"]
)
def test_a_tracking_uri_means_the_same_in_every_directory(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M01: relative locations are made absolute where they are read; addresses stay as they are."""
    monkeypatch.chdir(tmp_path)
    uri = tracking_uri("runs", {"MLFLOW_TRACKING_URI": given})
    monkeypatch.chdir("/")
    assert tracking_uri("/elsewhere", {"MLFLOW_TRACKING_URI": uri}) == uri
    if given in ("", "sqlite:///other.db"):
        assert str(tmp_path) in uri
    elif "//" in given or given == "databricks":
        assert uri == given
    else:
        assert uri == f"file://{tmp_path}/mlruns"


def test_the_environment_is_asked_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert tracking_uri("/runs") == "http://server:5000"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert tracking_uri("/runs") == "sqlite:////runs/mlflow.db"


def test_a_fresh_directory_gets_no_notice_of_old_runs(tmp_path: Path) -> None:
    """M04: an empty directory, or one of that name without runs in it, is none."""
    (tmp_path / "mlruns").mkdir()
    assert old_runs_notice("sqlite:////a.db", [str(tmp_path), str(tmp_path / "nowhere")]) is None


@pytest.mark.parametrize(("uri", "command"), [
    ("sqlite:////a b/mlflow.db", "mlflow ui --backend-store-uri 'sqlite:////a b/mlflow.db'"),
    ("http://server:5000", "http://server:5000"),
    ("postgresql://u:secret@h/db", "mlflow ui --backend-store-uri 'postgresql://u:…@h/db'"),
    ("file:///old/mlruns", "MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri /old/mlruns"),
])  # fmt: skip
def test_the_command_that_opens_a_store_can_be_pasted_and_shows_no_password(uri: str, command: str) -> None:
    """The program is named by its path where `mlflow` alone would not be found; the rest is as given."""
    words = open_command(uri).replace("'", "").split()
    programs = [word for word in words if word.endswith("mlflow")]
    assert all(program == "mlflow" or os.access(program, os.X_OK) for program in programs)
    assert re.sub(r"\S*mlflow ui", "mlflow ui", open_command(uri)) == command


def test_a_failure_is_one_short_line_without_passwords() -> None:
    error = RuntimeError("could not reach\nhttp://u:secret@h " + "x" * 1000)
    line = failure_of("http://u:secret@h", error)
    assert "\n" not in line
    assert "secret" not in line
    assert len(line) <= 300
    assert redacted("sqlite:////a@b:c/mlflow.db") == "sqlite:////a@b:c/mlflow.db"


def test_a_database_whose_creation_breaks_off_is_not_there_and_is_created_the_next_time(tmp_path: Path) -> None:
    """M03: half a schema would be a database that no later process can finish."""
    uri = tracking_uri(str(tmp_path / "runs"), {})
    path = tmp_path / "runs" / "mlflow.db"

    def create(fresh: str, *, breaks: bool) -> None:
        with sqlite3.connect(fresh.removeprefix("sqlite:///")) as database:
            database.execute("create table first (x)")
        if breaks:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        ensure_database(uri, lambda fresh: create(fresh, breaks=True))
    assert not path.exists()
    ensure_database(uri, lambda fresh: create(fresh, breaks=False))
    with sqlite3.connect(path) as database:
        assert database.execute("select name from sqlite_master").fetchall() == [("first",)]
    ensure_database(uri, lambda fresh: create(fresh, breaks=True))  # it is there: nobody creates it again
    assert {entry.name for entry in path.parent.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def test_only_a_sqlite_store_is_created() -> None:
    def create(fresh: str) -> None:
        raise AssertionError(fresh)

    for uri in ("http://server:5000", "postgresql://u@h/db", "file:///runs"):
        ensure_database(uri, create)


def test_a_creator_that_holds_the_lock_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M03: a stopped process must not hold every other one up for ever."""
    monkeypatch.setattr(mlflow_store, "LOCK_DEADLINE_SECONDS", 0.0)
    uri = tracking_uri(str(tmp_path), {})
    with pytest.raises(TimeoutError, match=r"mlflow\.db\.lock was held"):
        ensure_database(uri, lambda _: ensure_database(uri, lambda _: None))


def test_a_locked_database_is_asked_again_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """M03: a writer that is only late is waited for; any other failure is not repeated."""
    outcomes: list[Exception | str] = [sqlite3.OperationalError("database is locked"), sqlite3.OperationalError("database is locked"), "written"]

    def write() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert retrying(write) == "written"
    outcomes[:] = [sqlite3.OperationalError("disk is full"), "never asked"]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        retrying(write)
    assert outcomes == ["never asked"]
    monkeypatch.setattr(mlflow_store, "LOCK_DEADLINE_SECONDS", 0.0)
    outcomes[:] = [sqlite3.OperationalError("database is locked"), "too late"]
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        retrying(write)
