"""A run stopped anywhere and started again is the run that was never stopped, bit for bit: weights, momentum, order, records."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs
from toy import LENGTH, toy_config

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training import locations, preflight
from ray_muloco.training.checkpoint import open_checkpoint
from ray_muloco.training.metrics import UNITS
from ray_muloco.training.plan import ReplicaReport
from ray_muloco.training.replica import Replica
from ray_muloco.training.session import local_seats, run_session


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of texts, each a document."""
    directory = tmp_path_factory.mktemp("texts")
    for number in range(40):
        lines = [f"{number}: the {word} counts {number * i % 97}" for i, word in enumerate(["fox", "dog", "hen"] * 8)]
        (directory / f"{number:02}.txt").write_text("\n".join(lines))
    return directory


class Notes:
    """A listener that keeps what it hears, and asks to stop after so many rounds."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.stop_after, self.rounds, self.messages = stop_after, [], []

    def info(self, info: dict[str, Any]) -> None:
        self.described = info

    def round(self, record: dict[str, Any]) -> None:
        self.rounds.append(record)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def should_stop(self) -> bool:
        return len(self.rounds) >= self.stop_after


def config_for(source: Path, storage: Path, name: str, **changes: Any) -> TrainConfig:
    rounds = 5
    return toy_config(
        data__source=str(source), run__storage_path=str(storage), run__name=name, budget_tokens=rounds * 3 * 8 * LENGTH - 5 * LENGTH,
        eval_every_rounds=2, **changes,
    )  # fmt: skip


def train(config: TrainConfig, stop_after: int = 10**9) -> tuple[dict[str, Any], Notes]:
    torch.set_num_threads(1)
    notes = Notes(stop_after)
    checked = preflight.check(config)
    if checked.finished_result is not None:
        return checked.finished_result, notes
    return run_session(checked.config, preflight.tracking_uri_of(checked.config), local_seats(), notes, notes.should_stop), notes


def records(config: TrainConfig) -> list[dict[str, Any]]:
    """The run's rounds without what a clock decides."""
    lines = (Path(config.run.storage_path) / config.run.name / "metrics.jsonl").read_text().splitlines()
    timeless = [{k: v for k, v in json.loads(line).items() if not k.startswith(("seconds", "tokens_per")) and not k.endswith("_time")} for line in lines]
    return [{k: v for k, v in record.items() if k not in ("generation", "heal_bytes")} for record in timeless]


def state(config: TrainConfig) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint, by file and name."""
    checkpoint = open_checkpoint(str(Path(config.run.storage_path) / config.run.name))
    return {f"{file}:{name}": tensor for file in checkpoint.files for name, tensor in checkpoint.read_tensors(file).items()}


@pytest.mark.parametrize("method", ["muloco", "diloco", "muon-dp"])
def test_resume_at_any_round_equals_the_uninterrupted_run(source: Path, tmp_path: Path, method: str) -> None:
    """D08, D16, K01, P07, T01: θ, u, inner state, cursor and records continue from one commit."""
    whole = config_for(source, tmp_path, "whole", method=method)
    result, _ = train(whole)
    assert result["status"] == "finished"
    for stop_after in range(1, result["rounds"]):
        cut = config_for(source, tmp_path, f"cut-{stop_after}", method=method)
        stopped, _ = train(cut, stop_after)
        assert (stopped["status"], stopped["rounds"]) == ("stopped", stop_after)
        resumed, notes = train(cut)
        assert notes.described["resumed_round"] == stop_after
        assert resumed["theta_digest"] == result["theta_digest"]
        assert records(cut) == records(whole)
        whole_state, cut_state = state(whole), state(cut)
        assert whole_state.keys() == cut_state.keys()
        assert all(torch.equal(whole_state[name], cut_state[name]) for name in whole_state)


def test_a_finished_run_is_not_trained_again(source: Path, tmp_path: Path) -> None:
    """T02: the same command knows what its run is."""
    config = config_for(source, tmp_path, "done")
    result, _ = train(config)
    again, notes = train(config)
    assert again == result
    assert notes.rounds == []


def test_a_longer_budget_goes_on_and_the_schedule_ends_at_its_end(source: Path, tmp_path: Path) -> None:
    config = config_for(source, tmp_path, "longer")
    train(config)
    longer = config.override({"budget_tokens": 2 * config.budget_tokens})
    result, notes = train(longer)
    assert result["tokens"] >= longer.budget_tokens
    assert notes.described["resumed_round"] == 5
    assert notes.rounds[0]["inner_lr"] > notes.rounds[-1]["inner_lr"]
    assert notes.rounds[-1]["inner_lr"] == pytest.approx(0.1 * config.inner.lr, rel=1e-2)


@pytest.mark.parametrize("replicas", [1, 4])
def test_another_number_of_replicas_resumes(source: Path, tmp_path: Path, replicas: int) -> None:
    """Missing replicas take a donor's inner state, as joiners do; tokens and order go on."""
    config = config_for(source, tmp_path, f"k{replicas}")
    train(config, stop_after=2)
    result, notes = train(config.override({"scaling.num_replicas": replicas}))
    assert result["status"] == "finished"
    assert {record["participants"] for record in notes.rounds} == {replicas}
    assert [record["round"] for record in records(config)] == list(range(1, result["rounds"] + 1))
    assert math.isfinite(result["val_loss"])


def test_changed_settings_are_refused_with_all_differences(source: Path, tmp_path: Path) -> None:
    config = config_for(source, tmp_path, "changed")
    train(config, stop_after=1)
    with pytest.raises(ConfigError, match=r"inner\.lr 0\.01 -> 0\.02, seed 0 -> 3"):
        train(config.override({"inner.lr": 0.02, "seed": 3}))
    with pytest.raises(ConfigError, match="budget_tokens"):
        train(config.override({"budget_tokens": config.budget_tokens - 1}))


def test_a_rounds_pace_leaves_evaluation_out_and_a_runs_pace_has_it(source: Path, tmp_path: Path) -> None:
    """`UNITS` said of both that they were over the round's seconds, and the figures of one run did not agree."""
    config = config_for(source, tmp_path, "paced").override({"eval_every_rounds": 1})
    result, notes = train(config)
    before = 0
    for record in notes.rounds:
        phases = record["seconds_inner"] + record["seconds_exchange"] + record["seconds_outer"]
        assert record["tokens_per_second"] == pytest.approx((record["tokens"] - before) / phases)
        assert record["seconds"] > phases, "evaluation takes time"
        before = record["tokens"]
    assert result["tokens_per_second"] == pytest.approx(result["tokens"] / math.fsum(record["seconds"] for record in notes.rounds))
    assert "evaluation is left out" in UNITS["tokens_per_second"]
    assert "evaluation included" in UNITS["seconds"]


def test_changed_data_is_refused(source: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for path in source.iterdir():
        (texts / path.name).write_text(path.read_text())
    config = config_for(texts, tmp_path, "data")
    train(config, stop_after=1)
    (texts / "00.txt").write_text("something else " * 50)
    with pytest.raises(ConfigError, match=r"data\.source"):
        train(config)


def test_init_from_takes_the_weights_and_nothing_else(source: Path, tmp_path: Path) -> None:
    first = config_for(source, tmp_path, "first")
    train(first, stop_after=2)
    second = config_for(source, tmp_path, "second", init_from=str(tmp_path / "first"), seed=9)
    _, notes = train(second, stop_after=1)
    assert (notes.described["resumed_round"], notes.rounds[0]["round"]) == (0, 1)
    third = config_for(source, tmp_path, "third", seed=9)
    _, fresh = train(third, stop_after=1)
    assert notes.rounds[0]["train_loss"] < fresh.rounds[0]["train_loss"]
    with pytest.raises(ConfigError, match="init-from"):
        train(config_for(source, tmp_path, "fourth", init_from=str(tmp_path / "nowhere")))
    wider = config_for(source, tmp_path, "fifth", init_from=str(tmp_path / "first"), model__d_model=32)
    with pytest.raises(ConfigError, match="another model"):
        train(wider)


def test_a_run_that_gives_up_names_the_checkpoint_to_resume_from(source: Path, tmp_path: Path) -> None:
    """A learning rate that makes every pseudogradient infinite ends the run as diverged, with what to resume from."""
    config = config_for(source, tmp_path, "wild", inner__lr=1e30, inner__clip_norm=0.0, checkpoint__every_rounds=1)
    with pytest.raises(RunError, match="diverged") as caught:
        train(config)
    assert "not finite" in caught.value.detail


def test_what_a_run_saves_when_it_gives_up_can_be_resumed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last checkpoint held the spoilt momenta of the attempt that was given up, and the two failures before it: every resume gave up at once."""
    config = config_for(source, tmp_path, "cured", checkpoint__every_rounds=1000)
    broken = Replica.report

    def spoilt(self: Replica) -> ReplicaReport:
        report = broken(self)
        if report.round_number < 3:
            return report
        for tensor in self.optimizer.state_tensors().values():
            tensor.fill_(math.nan)
        return dataclasses.replace(report, squared_norm=math.nan)

    with monkeypatch.context() as patch:
        patch.setattr(Replica, "report", spoilt)
        with pytest.raises(RunError, match="diverged") as caught:
            train(config)
    assert caught.value.checkpoint.endswith("round-000002")
    result, _ = train(config)  # on a machine that computes
    assert result["status"] == "finished"
    assert math.isfinite(result["val_loss"])


def test_a_run_holds_nothing_that_a_loader_executes(source: Path, tmp_path: Path) -> None:
    """No pickle among a run's files: safetensors, JSON, pictures and text."""
    config = config_for(source, tmp_path, "safe", checkpoint__every_rounds=1)
    train(config)
    files = [path for path in (tmp_path / "safe").rglob("*") if path.is_file()]
    assert {path.suffix for path in files if "checkpoints" in path.parts} == {".json", ".safetensors"}
    assert not [path for path in files if path.read_bytes()[:2] in (b"PK", b"\x80\x04", b"\x80\x05", b"\x80\x02")]


def test_mlflow_goes_on_in_the_same_run_and_has_each_round_once(source: Path, tmp_path: Path) -> None:
    """A resumed run continues its MLflow run; metrics equal metrics.jsonl, each step once."""
    import mlflow

    config = config_for(source, tmp_path, "tracked", run__tracker="mlflow")
    train(config, stop_after=2)
    result, _ = train(config)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = [run for experiment in client.search_experiments() for run in client.search_runs([experiment.experiment_id])]
    assert len(runs) == 1
    assert runs[0].info.status == "FINISHED"
    history = client.get_metric_history(runs[0].info.run_id, "train_loss")
    assert sorted(m.step for m in history) == list(range(1, result["rounds"] + 1))
    by_step = {m.step: m.value for m in history}
    assert all(by_step[record["round"]] == pytest.approx(record["train_loss"]) for record in records(config))
    names = {artifact.path for artifact in client.list_artifacts(runs[0].info.run_id)}
    assert {"config.json", "report.html", "loss.png"} <= names


def test_a_run_kept_at_a_uri_resumes_on_a_machine_that_never_saw_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are written at the URI, small files staged and uploaded: with the local copy gone, the run goes on from there."""
    whole, _ = train(config_for(source, tmp_path, "whole"))
    (tmp_path / "store").mkdir()
    store = fs.SubTreeFileSystem(str(tmp_path / "store"), fs.LocalFileSystem())  # no local file system to pyarrow, so remote to us
    monkeypatch.setattr(locations, "_from_uri", lambda location: (store, location.partition("://")[2].partition("?")[0]))
    config = config_for(source, tmp_path, "far").override({"run.storage_path": "s3://bucket/runs"})
    monkeypatch.setenv("HOME", str(tmp_path / "first"))
    stopped, _ = train(config, stop_after=2)
    assert stopped["status"] == "stopped"
    monkeypatch.setenv("HOME", str(tmp_path / "second"))
    resumed, notes = train(config)
    assert notes.described["resumed_round"] == 2
    assert resumed["theta_digest"] == whole["theta_digest"]
    again, notes = train(config)
    assert (again, notes.rounds) == (resumed, [])


def test_settings_are_checked_again_under_the_lock(source: Path, tmp_path: Path) -> None:
    """Two commands began at once: the one that waited for the lock finds another's run, and may not go on with other settings."""
    config = preflight.check(config_for(source, tmp_path, "raced")).config
    train(config, stop_after=1)
    notes = Notes()
    with pytest.raises(ConfigError, match=r"seed 0 -> 7"):
        run_session(config.override({"seed": 7}), "", local_seats(), notes, notes.should_stop)
    assert train(config)[0]["status"] == "finished", "the lock was given back and the run is what it was"
