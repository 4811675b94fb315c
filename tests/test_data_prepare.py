"""Preparing: the same bytes however often it is interrupted, a manifest that tells what is there, and one line for bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from data_texts import documents, sentences, write_jsonl, write_parquet, write_texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ray_muloco.config import DataConfig
from ray_muloco.data.build import run_here, unigram_entropy
from ray_muloco.data.dataset import open_dataset
from ray_muloco.data.locations import OutputDirectory, resolve
from ray_muloco.data.preparation import check, prepare
from ray_muloco.data.tokenizer import Tokenizer as AnyTokenizer
from ray_muloco.data.units import UnitJob, UnitRecord
from ray_muloco.errors import ConfigError, RunError

ROOT = Path(__file__).resolve().parents[1]
UNIT_BYTES = 3000


def prepared(source: Path | str, output: Path | str, run_units=run_here, sequence_length: int = 32, **data: object) -> dict:
    config = DataConfig(source=str(source), **data)  # pyright: ignore[reportArgumentType]
    return prepare(check(config, str(output), sequence_length=sequence_length, unit_bytes=UNIT_BYTES), run_units=run_units)


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def job(*flags: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """jobs/prepare.py as a user runs it."""
    command = [sys.executable, str(ROOT / "jobs" / "prepare.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def backwards(jobs: Sequence[UnitJob], tokenizer: AnyTokenizer) -> Iterator[UnitRecord]:
    """Units in the opposite order, as other machines might finish them."""
    return run_here(jobs[::-1], tokenizer)


# ---- the same bytes


def test_the_order_in_which_units_are_done_does_not_matter(tmp_path: Path) -> None:
    """P03: one thread or many, one machine or many."""
    source = write_texts(tmp_path / "t", sentences(300))
    prepared(source, tmp_path / "a")
    prepared(source, tmp_path / "b", run_units=backwards)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert len(content(tmp_path / "a")) > 8


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path, tokenizer: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", sentences(300))
    prepared(source, tmp_path / "whole", tokenizer=tokenizer)
    done: list[int] = []

    def dying(jobs: Sequence[UnitJob], tokenizer: AnyTokenizer) -> Iterator[UnitRecord]:
        """Three units, then the end."""
        for record in run_here(jobs[:3], tokenizer):
            done.append(record.number)
            yield record
        raise KeyboardInterrupt

    for expected in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            prepared(source, tmp_path / "cut", run_units=dying, tokenizer=tokenizer)
        assert len(set(done)) == expected == len(done), "no unit is done twice"
        assert not (tmp_path / "cut" / "manifest.json").exists()
    kept = {path: path.stat().st_ino for path in (tmp_path / "cut").glob("*.arrow")}
    prepared(source, tmp_path / "cut", tokenizer=tokenizer)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert {path: path.stat().st_ino for path in kept} == kept


def test_a_shard_that_vanished_is_made_again(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(300))
    prepared(source, tmp_path / "whole")

    def dying(jobs: Sequence[UnitJob], tokenizer: AnyTokenizer) -> Iterator[UnitRecord]:
        yield from run_here(jobs[:4], tokenizer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "cut", run_units=dying)
    shards = sorted((tmp_path / "cut").glob("train-*"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-8])
    (tmp_path / "cut" / f"{shards[2].name}.123.456.part").write_bytes(b"half")
    prepared(source, tmp_path / "cut")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_work_for_another_source_is_not_taken_for_this_one(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(300))

    def dying(jobs: Sequence[UnitJob], tokenizer: AnyTokenizer) -> Iterator[UnitRecord]:
        yield from run_here(jobs[:3], tokenizer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "cut", run_units=dying)
    (source / "0000.txt").write_text("a change to a file that was done")
    prepared(source, tmp_path / "cut")
    prepared(source, tmp_path / "whole")
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_what_is_prepared_is_not_prepared_again(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    first = prepared(source, tmp_path / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()}
    assert prepared(source, tmp_path / "a") == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").iterdir()} == before


def test_an_object_store_gets_the_same_files(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(200))
    prepared(source, tmp_path / "a", tokenizer="bpe:300")
    prepared(source, "mock://prepare/shards", tokenizer="bpe:300")
    store = OutputDirectory(resolve("mock://prepare/shards"))
    assert {name: store.read(name) for name in store.names()} == content(tmp_path / "a")


def test_tails_replace_a_split_that_is_too_uneven(tmp_path: Path) -> None:
    """Shards of the first try do not stay; an interrupted second try is continued."""
    texts, hashed = sentences(300), []
    source = write_jsonl(tmp_path / "a.jsonl", texts)

    def dying(jobs: Sequence[UnitJob], tokenizer: AnyTokenizer) -> Iterator[UnitRecord]:
        """All units of the first way to split, three of the second."""
        if jobs and jobs[0].split.mode == "hash":
            hashed.append(len(jobs))
            yield from run_here(jobs, tokenizer)
        else:
            yield from run_here(jobs[:3], tokenizer)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "a", sequence_length=100_000, run_units=dying)
    with pytest.raises(KeyboardInterrupt):
        prepared(source, tmp_path / "a", sequence_length=100_000, run_units=dying)
    assert len(hashed) == 1, "the second run goes on with the tails"
    manifest = prepared(source, tmp_path / "a", sequence_length=100_000)
    assert manifest["split"]["mode"] == "tail"
    named = {shard["file"] for side in manifest["splits"].values() for shard in side["shards"]}
    assert {name for name in content(tmp_path / "a") if name.endswith(".arrow")} == named
    dataset = open_dataset(DataConfig(source=str(tmp_path / "a")), sequence_length=32, vocab_size=257, cache_dir="")
    assert [head + tail for head, tail in zip(documents(dataset.train), documents(dataset.validation), strict=True)] == texts


# ---- the manifest


def test_the_manifest_counts_what_is_there(tmp_path: Path) -> None:
    texts = [*sentences(200), None, "", None]
    manifest = prepared(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "a")
    dataset = open_dataset(DataConfig(source=str(tmp_path / "a")), sequence_length=32, vocab_size=257, cache_dir="")
    for name, shards in (("train", dataset.train), ("validation", dataset.validation)):
        side, tokens = manifest["splits"][name], shards.tokens(0, shards.num_tokens)
        assert side["num_tokens"] == len(tokens) == sum(shard["num_tokens"] for shard in side["shards"])
        assert side["num_documents"] == (tokens == 256).sum() == len(documents(shards))
        assert side["text_bytes"] == (tokens != 256).sum()
        _, counts = np.unique(tokens, return_counts=True)
        assert side["entropy_bits_per_token"] == pytest.approx(-(counts / counts.sum() * np.log2(counts / counts.sum())).sum(), abs=1e-6)
        assert side["unknown_rate"] == 0
    assert manifest["num_skipped_documents"] == 3


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    raw = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.train_from_iterator(["known words"], trainers.WordLevelTrainer(special_tokens=["[UNK]", "<s>"], show_progress=False))
    (tmp_path / "tokenizer.json").write_text(raw.to_str())
    source = write_jsonl(tmp_path / "a.jsonl", ["known words and two strangers known words"] * 50)
    manifest = prepared(source, tmp_path / "a", sequence_length=2, tokenizer=str(tmp_path / "tokenizer.json"), validation_source=str(source))
    assert manifest["splits"]["train"]["unknown_rate"] == pytest.approx(3 / 8), "and two strangers, of seven words and the separator"


def test_entropy_is_that_of_the_frequencies() -> None:
    assert unigram_entropy(np.array([5, 5, 5, 5, 0])) == 2
    assert unigram_entropy(np.array([0, 9])) == 0
    assert unigram_entropy(np.zeros(3, dtype=np.int64)) == 0


# ---- refusals


def test_an_output_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    prepared(source, tmp_path / "a")
    before = content(tmp_path / "a")
    with pytest.raises(ConfigError, match="another source or with other settings"):
        prepared(source, tmp_path / "a", validation_fraction=0.5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.arrow").write_text("precious")
    with pytest.raises(ConfigError, match=r"holds 'train\.arrow'"):
        prepared(source, tmp_path / "mine")
    with pytest.raises(ConfigError, match="is a file"):
        prepared(source, tmp_path / "t" / "0000.txt")
    with pytest.raises(ConfigError, match="another directory than"):
        prepared(source, source)
    assert content(tmp_path / "a") == before
    assert content(tmp_path / "mine") == {"train.arrow": b"precious"}


def test_two_writers_of_one_directory_are_one_too_many(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(300))

    def meeting(jobs: Sequence[UnitJob], tokenizer: AnyTokenizer) -> Iterator[UnitRecord]:
        with pytest.raises(ConfigError, match="being written by another"):
            prepared(source, tmp_path / "a")
        return run_here(jobs, tokenizer)

    prepared(source, tmp_path / "a", run_units=meeting)


def test_prepared_shards_are_not_prepared_again(tmp_path: Path) -> None:
    prepared(write_texts(tmp_path / "t", sentences(100)), tmp_path / "a")
    with pytest.raises(ConfigError, match="is prepared already"):
        prepared(tmp_path / "a", tmp_path / "b")


def test_a_place_that_refuses_is_a_storage_error(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match=r"storage: .*file"):
        prepared(source, tmp_path / "file" / "shards")


# ---- the job


def test_the_job_prepares_and_says_what_comes_next(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(300))
    flags = ("--data.source", str(source), "--output", str(tmp_path / "a"), "--data.tokenizer", "bpe:300", "--sequence-length", "32", "--local")
    done = job(*flags, "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    assert f"jobs/train.py tiny --data.source {tmp_path / 'a'} --model.vocab-size 300" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["vocab_size"] == 300
    assert figures["splits"]["train"]["num_tokens"] > figures["splits"]["validation"]["num_tokens"] > 32
    again = job(*flags)
    assert again.returncode == 0
    assert "was finished before" in again.stdout


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """Each line names the field; nothing is left at the output."""
    source = write_texts(tmp_path / "t", sentences(100))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not parquet")
    output = ("--output", str(tmp_path / "a"), "--local")
    for flags, field in {
        ("--data.source", str(tmp_path / "nowhere")): "data.source",
        ("--data.source", str(tmp_path / "broken.parquet")): "data.source",
        ("--data.source", "foo://bucket/x"): "data.source",
        ("--data.source", str(source), "--data.validation-fraction", "1.5"): "data.validation-fraction",
        ("--data.source", str(source), "--data.tokenizer", "bpe:12"): "data.tokenizer",
        ("--data.source", str(source), "--data.tokenizer", "bpe:90000"): "data.tokenizer",
        ("--data.source", str(write_parquet(tmp_path / "p.parquet", sentences(9))), "--data.text-column", "body"): "data.text-column",
        ("--data.source", str(write_texts(tmp_path / "e", [""]))): "data.source",
    }.items():
        done = job(*flags, *output)
        assert done.returncode == 2, (flags, done.stdout, done.stderr)
        assert done.stderr.startswith(f"error: {field} is "), done.stderr
        assert done.stderr.count("\n") == 1
        shutil.rmtree(tmp_path / "a", ignore_errors=True)


def test_a_relative_output_inside_a_ray_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    done = job("--data.source", str(write_texts(tmp_path / "t", sentences(30))), "--output", "shards")
    assert done.returncode == 2
    assert "error: output is 'shards': must be absolute or a URI inside a Ray job" in done.stderr
