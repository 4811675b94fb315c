"""What is refused before work begins: places that cannot be used, runs that are others, weights that do not fit; and nothing is left behind."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_texts import sentences, write_texts
from test_resume import config_for, source, train  # noqa: F401 - `source` is a fixture
from toy import LENGTH, MODEL

from ray_muloco.config import DataConfig, TrainConfig
from ray_muloco.core.model import build_model
from ray_muloco.data.preparation import check as check_preparation
from ray_muloco.data.preparation import prepare
from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training import preflight, storage

NUM_IDS = 300


def below(directory: Path) -> list[str]:
    """Every name below a directory, hidden ones too."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def refused(config: TrainConfig, field: str) -> str:
    """The line that a configuration earns, which must blame `field`."""
    with pytest.raises(ConfigError) as caught:
        preflight.check(config)
    assert caught.value.field == field
    return str(caught.value)


# ---- places


@pytest.mark.parametrize("below_file", ["", "/runs", "/deep/er"])
def test_a_file_in_the_way_of_the_runs_is_bad_input(source: Path, tmp_path: Path, below_file: str) -> None:  # noqa: F811
    """`--run.storage-path notes.txt/runs` gave up with code 4, as if a run had begun, and a dry run did not see it at all."""
    (tmp_path / "notes.txt").write_text("in the way")
    line = refused(config_for(source, tmp_path / f"notes.txt{below_file}", "x"), "run.storage-path")
    assert f"notes.txt{below_file}'" in line
    assert "is a file" in line


def test_a_file_with_the_runs_own_name_is_bad_input(source: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "x").write_text("in the way")
    assert "is a file" in refused(config_for(source, tmp_path, "x"), "run.storage-path")


def test_a_place_that_cannot_be_written_is_bad_input(source: Path) -> None:  # noqa: F811
    """/proc takes no files, whoever asks: a read-only mount as root sees it."""
    assert "cannot be used" in refused(config_for(source, Path("/proc"), "x"), "run.storage-path")
    assert "cannot be used" in refused(config_for(source, Path("/proc/runs"), "x"), "run.storage-path")


def test_a_place_that_cannot_be_read_is_bad_input(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Permissions do not stop root, who runs the tests in containers, so the system's answer is put in its mouth."""

    def denied(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", denied)
    assert "Permission denied" in refused(config_for(source, tmp_path, "x"), "run.storage-path")


def test_checking_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """That storage can be written is found out by writing; neither the file nor a directory for it may stay."""
    (tmp_path / "there").mkdir()
    for place in (tmp_path / "there", tmp_path / "not" / "yet"):
        preflight.check(config_for(source, place, "x"))
    assert below(tmp_path) == ["there"]


def test_a_finished_run_on_a_full_or_locked_disk_is_still_finished(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    config = config_for(source, tmp_path, "done")
    result, _ = train(config)
    monkeypatch.setattr(storage, "require_writable", lambda *_, **__: pytest.fail("nothing is to be written"))
    assert preflight.check(config).finished_result == result


@pytest.mark.parametrize(("changes", "field"), [({"init_from": "foo://x"}, "init-from"), ({"run__storage_path": "foo://x"}, "run.storage-path")])
def test_an_unknown_scheme_is_blamed_on_the_flag_that_has_it(source: Path, tmp_path: Path, changes: dict[str, str], field: str) -> None:  # noqa: F811
    """`--init-from foo://x` was told to mend its --run.storage-path."""
    config = config_for(source, tmp_path, "x").override({name.replace("__", "."): value for name, value in changes.items()})
    assert refused(config, field).startswith(f"{field} is 'foo://x': must be a directory, or a URI")


# ---- runs


def test_a_run_without_its_config_json_is_known_by_its_checkpoint(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """config.json was lost: the manifest says the same, so another seed is still refused before the cluster starts, not after."""
    config = config_for(source, tmp_path, "x")
    train(config, stop_after=2)
    (tmp_path / "x" / "config.json").unlink()
    assert preflight.saved_config(config) == config
    assert "seed 0 -> 7" in refused(config.override({"seed": 7}), "run.name")
    newest = Path(preflight.newest_checkpoint(str(tmp_path / "x")))
    (newest / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"no checkpoint at .* can be read; .*manifest\.json is damaged"):
        preflight.check(config)


# ---- weights


@pytest.fixture(scope="module")
def bpe(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:  # noqa: F811
    """Makes shards with a tokenizer of NUM_IDS ids that is trained on the texts of that name."""

    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp("bpe")
        texts = source if name == "source" else write_texts(directory / "texts", sentences(200))
        data = DataConfig(source=str(texts), tokenizer=f"bpe:{NUM_IDS}")
        prepare(check_preparation(data, str(directory / "shards"), sequence_length=LENGTH))
        return directory / "shards"

    return make


def test_weights_of_another_shape_are_refused_by_the_check_alone(source: Path, tmp_path: Path) -> None:  # noqa: F811
    """A dry run passed, and the run was refused once its cluster had started."""
    train(config_for(source, tmp_path, "first"), stop_after=1)
    start = {"init_from": str(tmp_path / "first")}
    preflight.check(config_for(source, tmp_path, "same", **start))
    preflight.check(config_for(source, tmp_path, "longer", **start, model__rope_theta=1e4, model__norm_epsilon=1e-5, model__sequence_length=8))
    line = refused(config_for(source, tmp_path, "wider", **start, model__d_model=32, model__num_layers=1), "init-from")
    assert "another model: model.d-model 16 there, 32 here, model.num-layers 2 there, 1 here" in line
    assert "is no checkpoint" in refused(config_for(source, tmp_path, "none", init_from=str(tmp_path)), "init-from")


def test_weights_trained_on_other_ids_are_refused_by_the_check_alone(
    source: Path,  # noqa: F811
    bpe: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Two vocabularies of one size fit the same matrices, and every id means something else."""
    first, other = bpe("source"), bpe("other")
    ids: dict[str, Any] = {"model__vocab_size": NUM_IDS}
    train(config_for(first, tmp_path, "first", **ids), stop_after=1)
    start = {"init_from": str(tmp_path / "first")}
    preflight.check(config_for(first, tmp_path, "same", **start, **ids))
    preflight.check(config_for(source, tmp_path, "file", **start, **ids, data__tokenizer=str(first / "tokenizer.json")))
    for changes in ({"data__source": str(other)}, {"data__source": str(source), "data__tokenizer": str(other / "tokenizer.json")}):
        config = config_for(first, tmp_path, "other", **start, **ids).override({name.replace("__", "."): value for name, value in changes.items()})
        assert "another tokenizer" in refused(config, "init-from")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MODEL)])
def test_the_shapes_of_a_model_follow_from_the_fields_that_are_compared(field: str) -> None:
    """The check reads no tensor: it is right as long as these fields, and no others, decide names and shapes."""
    changed = {
        "d_model": 32, "num_layers": 3, "num_heads": 1, "head_dim": 4, "ffn_dim": 32, "vocab_size": 300, "sequence_length": 32, "rope_theta": 1e4,
        "norm_epsilon": 1e-5, "tie_embeddings": True,
    }  # fmt: skip

    def shapes(model: Any) -> dict[str, Any]:
        return {name: parameter.shape for name, parameter in build_model(model, seed=0, separator_id=256).named_parameters()}

    assert (shapes(dataclasses.replace(MODEL, **{field: changed[field]})) != shapes(MODEL)) == (field in preflight.SHAPES)
