"""The jobs as their users meet them: one line and an exit code for bad input, before any work, and runs that go on with what they were."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import _main
import bench
import evaluate
import generate
import prepare
import pytest
import train
from test_resume import config_for, source  # noqa: F401 - `source` is a fixture
from test_resume import train as train_run
from toy import LENGTH

from ray_muloco import presets
from ray_muloco.config import DataConfig, TrainConfig
from ray_muloco.data import preparation
from ray_muloco.errors import ConfigError
from ray_muloco.training import preflight
from ray_muloco.training.manifest import encode_manifest

Job = Callable[..., tuple[int, str, str]]
NUM_IDS = 300


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Job:
    """Runs a job in this process: exit code, standard output, standard error."""

    def call(module: object, *flags: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [f"jobs/{module.__name__}.py", *flags])  # type: ignore[attr-defined]
        with pytest.raises(SystemExit) as stop:
            _main.run(module.main)  # type: ignore[attr-defined]
        said = capsys.readouterr()
        return stop.value.code or 0, said.out, said.err  # type: ignore[return-value]

    return call


def refused(outcome: tuple[int, str, str], begins: str) -> str:
    """The one line of bad input."""
    code, out, err = outcome
    assert (code, out, err.count("\n")) == (2, "", 1), outcome
    assert err.startswith(f"error: {begins}"), err
    return err


# ---- flags


@pytest.mark.parametrize("flag", ["--method", "--scaling.num-replicas", "--seed", "--run.name", "--run.storage-path", "--inner.lr"])
@pytest.mark.parametrize("more", [(), ("--local",)])
def test_a_flag_without_its_value_is_one_line_that_names_it(job: Job, flag: str, more: tuple[str, ...]) -> None:
    """The first look at --method, which decides what the others' defaults are, had a parser of its own, and that one printed its own usage."""
    line = refused(job(train, "nano", flag, *more), f"Missing value for argument '{flag}'")
    assert line.endswith("see train.py nano --help\n")


def test_an_unknown_flag_is_one_line_that_names_those_that_may_be_meant(job: Job) -> None:
    assert "perhaps you meant --seed; see train.py nano --help" in refused(job(train, "nano", "--sed", "3"), "Unrecognized options: --sed, 3")
    assert "diloco" in refused(job(train, "nano", "--method", "sgd"), "invalid choice 'sgd' for argument '--method'")
    assert "--seed" in refused(job(train, "nano", "--seed", "many"), "Error parsing --seed")
    assert "see jobs/evaluate.py --help" in refused(job(evaluate), "Missing from jobs/evaluate.py: --checkpoint")


def test_help_is_no_error(job: Job) -> None:
    code, out, err = job(train, "nano", "--help")
    assert (code, err) == (0, "")
    assert "--scaling.num-replicas" in out


# ---- --json


def test_figures_that_could_not_be_written_are_refused_before_the_work(
    job: Job,
    source: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work was done and then lost in a traceback: training alone looked first."""
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured for nothing"))
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: pytest.fail("evaluated for nothing"))
    monkeypatch.setattr(prepare, "check", lambda *_, **__: pytest.fail("looked for nothing"))
    (tmp_path / "file").write_text("")
    for place, what in {"nowhere/x.json": "must lie in a directory that exists", "file/x.json": "must lie in a directory", "": "is a directory"}.items():
        path = str(tmp_path / place)
        for outcome in (
            job(bench, "muon", "--quick", "--json", path),
            job(evaluate, "--checkpoint", "runs/x", "--json", path),
            job(generate, "--checkpoint", "runs/x", "--json", path),
            job(prepare, "--data.source", str(source), "--output", str(tmp_path / "shards"), "--json", path),
            job(train, "nano", "--dry-run", "--json", path),
        ):
            assert what in refused(outcome, f"json is '{path.rstrip('/')}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


# ---- places


def test_places_that_cannot_be_used_are_bad_input(job: Job, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """A path with a file in its way gave up with code 4 or a traceback, as if the work had failed."""
    file = tmp_path / "notes.txt"
    file.write_text("in the way")
    assert "is a file" in refused(job(train, "nano", "--dry-run", "--run.storage-path", f"{file}/runs"), f"run.storage-path is '{file}/runs'")
    refused(job(train, "nano", "--dry-run", "--run.storage-path", "/proc/runs", "--data.source", str(source)), "run.storage-path is '/proc/runs'")
    start = ("nano", "--dry-run", "--run.storage-path", str(tmp_path), "--data.source", str(source), "--init-from")
    refused(job(train, *start, "foo://x"), "init-from is 'foo://x': must be a directory, or a URI")
    refused(job(train, *start, str(file)), f"init-from is '{file}': is no checkpoint")
    for module in (evaluate, generate):
        assert "it is a file" in refused(job(module, "--checkpoint", str(file)), f"checkpoint is '{file}': must be a complete checkpoint")
        assert "nothing" in refused(job(module, "--checkpoint", f"{file}/x"), f"checkpoint is '{file}/x': must be a complete checkpoint")
        refused(job(module, "--checkpoint", "foo://x"), "checkpoint is 'foo://x': must be a directory, or a URI")
    assert "is a file" in refused(job(prepare, "--data.source", str(source), "--local", "--output", f"{file}/x"), f"output is '{file}/x'")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_a_cache_that_cannot_be_written_is_bad_input(job: Job, source: Path, tmp_path: Path) -> None:  # noqa: F811
    train_run(config_for(source, tmp_path, "x"), stop_after=1)
    (tmp_path / "file").write_text("in the way")
    flags = ("--checkpoint", str(tmp_path / "x"), "--threads", "1", "--cache")
    refused(job(evaluate, *flags, str(tmp_path / "file")), f"cache is '{tmp_path}/file': cannot be used")


# ---- evaluating


def test_text_is_evaluated_with_the_checkpoints_own_tokenizer(job: Job, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Prepared shards bring a tokenizer that the configuration does not name, and a named file may be gone or be another by now.

    The checkpoint holds the one that its ids mean. The same texts give the same loss, as shards or as text.
    """
    texts, shards = tmp_path / "texts", tmp_path / "shards"
    shutil.copytree(source, texts)
    data = DataConfig(source=str(texts), tokenizer=f"bpe:{NUM_IDS}")
    preparation.prepare(preparation.check(data, str(shards), sequence_length=LENGTH))
    shutil.copy(shards / "tokenizer.json", tmp_path / "tokenizer.json")
    train_run(config_for(shards, tmp_path, "shards-run", model__vocab_size=NUM_IDS), stop_after=1)
    train_run(config_for(texts, tmp_path, "file-run", model__vocab_size=NUM_IDS, data__tokenizer=str(tmp_path / "tokenizer.json")), stop_after=1)

    def loss(run: str, *flags: str) -> float:
        figures = tmp_path / "figures.json"
        common = ("--checkpoint", str(tmp_path / run), "--threads", "1", "--cache", str(tmp_path / "cache"), "--json", str(figures))
        code, _, err = job(evaluate, *common, *flags)
        assert code == 0, err
        return json.loads(figures.read_text())["loss"]

    as_shards = loss("shards-run")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert loss("file-run") == loss("file-run", "--data.source", str(texts)) == as_shards
    shutil.rmtree(shards)
    assert loss("shards-run", "--data.source", str(texts)) == as_shards
    preparation.prepare(preparation.check(DataConfig(source=str(texts)), str(shards), sequence_length=LENGTH))
    flags = ("--threads", "1", "--cache", str(tmp_path / "cache"), "--data.source", str(shards))
    assert "another tokenizer" in refused(job(evaluate, "--checkpoint", str(tmp_path / "file-run"), *flags), f"data.source is '{shards}'")


# ---- resuming with another number of replicas


def keep(config: TrainConfig, storage: Path) -> None:
    """A run directory with a checkpoint of this configuration, as far as a driver looks."""
    config = preflight.check(config.override({"run.storage_path": str(storage)})).config
    checkpoint = storage / config.run_name / "checkpoints" / "round-000001"
    checkpoint.mkdir(parents=True)
    (storage / config.run_name / "config.json").write_text(json.dumps(config.to_dict()))
    (checkpoint / "manifest.json").write_bytes(encode_manifest({"round": 1, "files": [], "config": config.to_dict()}))


def test_another_number_of_replicas_resumes_by_the_same_command(job: Job, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """The preset's outer momentum for 2 replicas is another than for 8, so the command was refused until it named each such field as it was."""
    common = ("nano", "--local", "--quiet", "--run.name", "x", "--run.storage-path", str(tmp_path), "--run.tracker", "none", "--data.source", str(source))
    shape = ("--model.sequence-length", "16", "--sync-interval", "2", "--budget-tokens")
    assert presets.nano(replicas=8).outer != presets.nano(replicas=2).outer
    assert job(train, *common, *shape, "1024", "--scaling.num-replicas", "8")[0] == 0
    assert job(train, *common, "--budget-tokens", "2048", "--scaling.num-replicas", "2", "--json", str(tmp_path / "x.json"))[::2] == (0, "")
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (config["scaling"]["num_replicas"], config["outer"]["momentum"], config["sync_interval"]) == (2, presets.nano(replicas=8).outer.momentum, 2)
    assert (json.loads((tmp_path / "x.json").read_text())["rounds"], config["model"]["sequence_length"]) == (2, 16)
    line = refused(job(train, *common, "--scaling.num-replicas", "2", "--outer.momentum", "0.3", "--seed", "5"), "run.name is 'x'")
    assert "(outer.momentum 0.5 -> 0.3, seed 0 -> 5)" in line


def test_what_is_given_counts_and_what_belongs_to_this_command_alone_is_the_presets(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Who computes, what is kept and where is each command's own affair; all else that is not given is the run's."""
    saved = presets.tiny("diloco", 4).override({"data.source": str(source), "checkpoint.keep": 7, "scaling.hang_factor": 9.0, "inner.lr": 0.5, "seed": 3})
    keep(saved.override({"run.name": "x"}), tmp_path)
    config = train.parse(["tiny", "--run.name", "x", "--run.storage-path", str(tmp_path), "--scaling.num-replicas=2", "--budget-tokens", "99999999"]).config
    preset = presets.tiny("muloco", 2)
    assert (config.method, config.seed, config.inner, config.data.source) == ("diloco", 3, saved.inner, str(source))
    assert (config.scaling, config.checkpoint, config.run.name, config.budget_tokens) == (preset.scaling, preset.checkpoint, "x", 99_999_999)
    keep(saved, tmp_path)  # under the name that a command without --run.name gives
    named = train.parse(["tiny", "--method", "diloco", "--scaling.num_replicas", "4", "--seed", "3", f"--run.storage_path={tmp_path}"]).config
    assert named.inner == saved.inner
    assert train.parse(["tiny", "--run.name", "another", "--run.storage-path", str(tmp_path)]).config.inner == presets.tiny().inner


def test_another_preset_is_another_run(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """The first word of a command is given like any flag."""
    keep(presets.tiny().override({"data.source": str(source), "run.name": "x"}), tmp_path)
    flags = train.parse(["nano", "--run.name", "x", "--run.storage-path", str(tmp_path)])
    with pytest.raises(ConfigError, match="preset 'tiny' -> 'nano'"):
        preflight.check(flags.config)


def test_a_batch_that_the_new_replicas_cannot_share_is_said_to_be_the_runs(job: Job, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Three replicas share a batch of 33; two cannot, and no flag of theirs can change what the run was started with."""
    keep(presets.nano(replicas=3).override({"data.source": str(source), "run.name": "x"}), tmp_path)
    flags = ("nano", "--dry-run", "--run.name", "x", "--run.storage-path", str(tmp_path), "--scaling.num-replicas", "2")
    for more in ((), ("--batch-sequences", "32")):
        line = refused(job(train, *flags, *more), "batch-sequences is 33: must be a multiple of scaling.num-replicas, 2; run x was started with it")
        assert "choose another --scaling.num-replicas, or another --run.name" in line
