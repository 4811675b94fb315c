"""open_dataset: built once, found again, shared by those who come together, and refused up front when it cannot be."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_texts import SEPARATOR, documents, sentences, write_jsonl, write_parquet, write_texts

from ray_muloco.config import DataConfig
from ray_muloco.data import build, cache
from ray_muloco.data.dataset import Dataset, check_source, open_dataset
from ray_muloco.data.documents import Split, document_key
from ray_muloco.data.preparation import check, prepare
from ray_muloco.data.tokenizer import train_bpe
from ray_muloco.errors import ConfigError, RunError

LENGTH = 32


def opened(source: Path | str, cache_dir: Path, sequence_length: int = LENGTH, vocab_size: int = 257, **data: object) -> Dataset:
    config = DataConfig(source=str(source), **data)  # pyright: ignore[reportArgumentType]
    check_source(config, sequence_length=sequence_length, vocab_size=vocab_size)
    return open_dataset(config, sequence_length=sequence_length, vocab_size=vocab_size, cache_dir=str(cache_dir))


def refused(source: Path | str, cache_dir: Path, match: str, sequence_length: int = LENGTH, vocab_size: int = 257, **data: object) -> None:
    """Both the check up front and the opening itself refuse, in the same words."""
    config = DataConfig(source=str(source), **data)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=match):
        check_source(config, sequence_length=sequence_length, vocab_size=vocab_size)
    with pytest.raises(ConfigError, match=match):
        open_dataset(config, sequence_length=sequence_length, vocab_size=vocab_size, cache_dir=str(cache_dir))


# ---- what is in it


def test_every_document_is_opened_by_a_separator_and_is_on_one_side(tmp_path: Path) -> None:
    texts = sentences(200)
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "cache", validation_fraction=0.2)
    train, validation = documents(dataset.train), documents(dataset.validation)
    assert dataset.train.tokens(0, 1).tolist() == dataset.validation.tokens(0, 1).tolist() == [SEPARATOR]
    assert sorted(train + validation) == sorted(texts)
    assert [text for text in texts if text in set(train)] == train, "in order"


def test_the_embedded_corpus_serves_every_byte_level_preset(tmp_path: Path) -> None:
    dataset = opened("embedded", tmp_path / "cache", sequence_length=256)
    assert dataset.train.num_tokens > 5_000_000
    assert dataset.validation.num_tokens > 100_000
    batch = dataset.train.batch(np.array([0, 5, 11_111]), 256)
    assert batch.shape == (3, 257)
    assert 0 <= batch.min() <= batch.max() <= SEPARATOR
    assert dataset.tokenizer.decode(batch[0].tolist()).isprintable() is False
    assert "import" in dataset.tokenizer.decode(dataset.train.tokens(0, 100_000).tolist())


def test_a_source_of_its_own_for_validation_is_taken_whole(tmp_path: Path) -> None:
    train, validation = sentences(40), sentences(20, seed=1)
    dataset = opened(write_texts(tmp_path / "t", train), tmp_path / "cache", validation_source=str(write_parquet(tmp_path / "v.parquet", validation)))
    assert documents(dataset.train) == train
    assert documents(dataset.validation) == validation


@pytest.mark.parametrize("count", [1, 3])
def test_where_a_side_would_be_too_short_every_tail_is_cut_off(tmp_path: Path, count: int) -> None:
    texts = ["".join(sentences(60, seed=seed)) for seed in range(count)]
    dataset = opened(write_texts(tmp_path / "t", texts), tmp_path / "cache", validation_fraction=0.1)
    assert [head + tail for head, tail in zip(documents(dataset.train), documents(dataset.validation), strict=True)] == texts


def test_the_split_of_one_source_depends_on_the_length_only_where_it_must(tmp_path: Path) -> None:
    """A longer sequence that the hash split cannot serve takes the tails; asking for the shorter one again gives its own split."""
    pool, split = sentences(400), Split(mode="hash", fraction=0.1)
    chosen = [text for text in pool if split.is_validation(document_key(text.encode(), len(text.encode())))][:1]
    rest = [text for text in pool if not split.is_validation(document_key(text.encode(), len(text.encode())))][:60]
    source = write_texts(tmp_path / "t", chosen + rest)
    short, long, again = (opened(source, tmp_path / "cache", sequence_length=length, validation_fraction=0.1) for length in (16, 128, 16))
    assert documents(short.validation) == chosen
    assert short.fingerprint == again.fingerprint != long.fingerprint
    assert len(documents(long.validation)) == 61


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    """P03: two machines with other paths and times agree; another text, split or tokenizer does not."""
    texts = sentences(100)
    first = opened(write_texts(tmp_path / "a", texts), tmp_path / "cache")
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere")
    assert opened(tmp_path / "elsewhere", tmp_path / "other").fingerprint == first.fingerprint
    (tmp_path / "tokenizer.json").write_text(train_bpe(texts, 300))
    others = [
        opened(write_texts(tmp_path / "b", [*texts[:-1], "changed"]), tmp_path / "cache"),
        opened(tmp_path / "a", tmp_path / "cache", validation_fraction=0.4),
        opened(tmp_path / "a", tmp_path / "cache", tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=300),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(50))
    before = opened(source, tmp_path / "cache", validation_fraction=0.4)
    (source / "0007.txt").write_text("something new")
    after = opened(source, tmp_path / "cache", validation_fraction=0.4)
    assert "something new" in documents(after.train) + documents(after.validation)
    assert before.fingerprint != after.fingerprint


def test_a_batch_after_a_crash_is_that_of_the_uninterrupted_run(tmp_path: Path) -> None:
    """P07: the data position is the committed count of samples and nothing else is written down, so no second series can disagree."""
    from ray_muloco.data.sampler import SampleOrder

    source = write_texts(tmp_path / "t", sentences(300))
    one = opened(source, tmp_path / "cache")
    order = SampleOrder(9, one.train.num_sequences(LENGTH))
    expected = one.train.batch(order.sequence_indices(np.arange(40, 48)), LENGTH)
    shutil.rmtree(tmp_path / "cache")
    again = opened(source, tmp_path / "cache")
    resumed = SampleOrder(9, again.train.num_sequences(LENGTH))
    assert np.array_equal(again.train.batch(resumed.sequence_indices(np.arange(40, 48)), LENGTH), expected)


# ---- the cache


def _open_and_report(source: str, cache_dir: str, results) -> None:
    dataset = open_dataset(DataConfig(source=source), sequence_length=LENGTH, vocab_size=257, cache_dir=cache_dir)
    results.put((dataset.fingerprint, os.stat(next(Path(cache_dir).glob("shards-*/train-*"))).st_ino))


def test_those_who_come_together_share_one_build(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(300))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_open_and_report, args=(str(source), str(tmp_path / "cache"), results)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(30)
    assert len(found) == 1, "one fingerprint, one file"
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == [next((tmp_path / "cache").glob("shards-*")).name]


def test_a_builder_killed_in_the_middle_leaves_nothing_half_done(tmp_path: Path) -> None:
    """kill -9 at several moments of a build of many units: no half cache takes the name, and the next caller goes on to the same one."""
    source = write_jsonl(tmp_path / "a.jsonl", sentences(4000))
    program = """
import sys, time
from ray_muloco.config import DataConfig
from ray_muloco.data import corpus, locations
from ray_muloco.data.dataset import open_dataset
corpus.SMALLEST_UNIT_BYTES = 20_000
write = locations.OutputDirectory.write
def slow(self, name, fill):
    time.sleep(0.02)
    size = write(self, name, fill)
    if "/unit-" in name:
        print(name, flush=True)
    return size
locations.OutputDirectory.write = slow
print(open_dataset(DataConfig(source=sys.argv[1]), sequence_length=32, vocab_size=257, cache_dir=sys.argv[2]).fingerprint)
"""
    cache_dir, done = tmp_path / "cache", []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(source), str(cache_dir)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        done += [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        process.stdout.close()
        assert not list(cache_dir.glob("shards-*"))
    ends = [
        subprocess.run([sys.executable, "-c", program, str(source), str(directory)], capture_output=True, text=True, timeout=60, check=True).stdout.split()
        for directory in (cache_dir, tmp_path / "clean")
    ]
    assert ends[0][-1] == ends[1][-1], "the same fingerprint as that of an uninterrupted build"
    assert len(set(done)) == 9 == len(ends[1]) - len(ends[0]), "no finished unit is done again"
    assert not list(cache_dir.glob(".*.making*"))


@pytest.mark.parametrize("damage", ["truncated shard", "missing shard", "broken manifest"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, damage: str) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    before = opened(source, tmp_path / "cache").fingerprint
    directory = next((tmp_path / "cache").glob("shards-*"))
    shard = next(directory.glob("train-*"))
    if damage == "truncated shard":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif damage == "missing shard":
        shard.unlink()
    else:
        (directory / "manifest.json").write_text('{"format": "ray_muloco shards 1"}')
    assert opened(source, tmp_path / "cache").fingerprint == before


def test_a_lock_that_is_never_freed_delays_and_does_not_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped builder keeps its lock: who waited long enough builds beside it."""
    import fcntl

    source = write_texts(tmp_path / "t", sentences(100))
    key = build.make_plan(DataConfig(source=str(source)), "bytes").key
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(cache, "LOCK_WAIT_SECONDS", 0.2)
    with open(tmp_path / "cache" / f".shards-{key[:16]}-hash.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert documents(opened(source, tmp_path / "cache").train)


def test_a_cache_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="storage"):
        opened(source, tmp_path / "file" / "cache")


# ---- prepared shards


def prepared(source: Path, output: Path | str, **data: object) -> dict:
    return prepare(check(DataConfig(source=str(source), **data), str(output), sequence_length=LENGTH))  # pyright: ignore[reportArgumentType]


def test_prepared_shards_are_opened_in_place(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    prepared(source, tmp_path / "shards")
    dataset = opened(tmp_path / "shards", tmp_path / "cache")
    assert dataset.fingerprint == opened(source, tmp_path / "other").fingerprint
    assert not (tmp_path / "cache").exists()


def test_prepared_shards_bring_their_tokenizer(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(300))
    prepared(source, tmp_path / "shards", tokenizer="bpe:300")
    dataset = opened(tmp_path / "shards", tmp_path / "cache", vocab_size=300)
    assert dataset.tokenizer.vocab_size == 300
    text = dataset.tokenizer.decode(dataset.train.tokens(0, dataset.train.num_tokens).tolist())
    assert all(part in text for part in ("quick brown", "日本"))
    same = opened(tmp_path / "shards", tmp_path / "cache", vocab_size=300, tokenizer=str(tmp_path / "shards" / "tokenizer.json"))
    assert same.fingerprint == dataset.fingerprint
    (tmp_path / "other.json").write_text(train_bpe(sentences(300, seed=5), 280))
    refused(tmp_path / "shards", tmp_path / "cache", "not the tokenizer", vocab_size=300, tokenizer=str(tmp_path / "other.json"))
    refused(tmp_path / "shards", tmp_path / "cache", r"model\.vocab-size is 257.*--model\.vocab-size 300")


def test_prepared_shards_at_a_uri_are_fetched_once(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    prepared(source, "mock://mirror/shards", tokenizer="bpe:300")
    first = opened("mock://mirror/shards", tmp_path / "cache", vocab_size=300)
    copies = {path: path.stat().st_ino for path in (tmp_path / "cache").glob("mirror-*/*")}
    assert {path.suffix for path in copies} == {".arrow", ".json"}
    assert opened("mock://mirror/shards", tmp_path / "cache", vocab_size=300).fingerprint == first.fingerprint
    assert {path: path.stat().st_ino for path in (tmp_path / "cache").glob("mirror-*/*")} == copies


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"format": "ray_muloco shards 99"}, "reads 'ray_muloco shards 1'"),
        ({"splits": {}}, "is damaged"),
        ({"vocab_size": None}, "is damaged"),
        ({"splits": {"train": {"num_tokens": 9, "shards": []}, "validation": {"num_tokens": 0, "shards": []}}}, "is damaged"),
        (
            {
                "splits": {
                    side: {"num_tokens": 99, "shards": [{"file": "../x", "num_tokens": 99, "num_bytes": 1, "sha256": ""}]} for side in ("train", "validation")
                }
            },
            "lies outside",
        ),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named(tmp_path: Path, damage: dict, message: str) -> None:
    manifest = prepared(write_texts(tmp_path / "t", sentences(100)), tmp_path / "shards")
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(manifest | damage))
    refused(tmp_path / "shards", tmp_path / "cache", message)


def test_shards_that_were_not_prepared_to_the_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "shards" / "_prepare").mkdir(parents=True)
    (tmp_path / "shards" / "_prepare" / "plan.json").write_text("{}")
    refused(tmp_path / "shards", tmp_path / "cache", "not prepared to the end.*again")


def test_a_directory_with_a_manifest_of_something_else_is_a_directory_of_texts(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    (source / "manifest.json").write_text('{"name": "an app"}')
    assert documents(opened(source, tmp_path / "cache").train)


def test_prepared_shards_take_no_validation_source(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(100))
    prepared(source, tmp_path / "shards")
    refused(tmp_path / "shards", tmp_path / "cache", r"data\.validation-source", validation_source=str(source))


# ---- refused up front


@pytest.mark.parametrize("text", ["", "too short", "x" * (LENGTH + 1)])
def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path: Path, text: str) -> None:
    refused(write_texts(tmp_path / "t", [text]), tmp_path / "cache", rf"data\.source is .*needs a sequence of {LENGTH} tokens.*--model\.sequence-length")


def test_the_shortest_corpus_that_serves_is_accepted(tmp_path: Path) -> None:
    """Each side needs T + 1 tokens; the separator is one of them."""
    source = write_texts(tmp_path / "t", ["x" * (2 * LENGTH)])
    dataset = opened(source, tmp_path / "cache", validation_fraction=0.5)
    assert dataset.train.num_tokens == dataset.validation.num_tokens == LENGTH + 1
    refused(write_texts(tmp_path / "u", ["x" * (2 * LENGTH - 1)]), tmp_path / "cache", "needs a sequence", validation_fraction=0.5)


def test_a_short_validation_source_is_refused_by_its_own_name(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "t", sentences(50))
    refused(source, tmp_path / "cache", r"data\.validation-source is", validation_source=str(write_texts(tmp_path / "v", ["short"])))


@pytest.mark.parametrize("vocab_size", [256, 258, 128_256])
def test_a_vocabulary_that_is_not_the_tokenizers_is_refused_with_the_flag(tmp_path: Path, vocab_size: int) -> None:
    refused("embedded", tmp_path / "cache", rf"model\.vocab-size is {vocab_size}: must be the 257 ids.*--model\.vocab-size 257", vocab_size=vocab_size)


def test_bad_sources_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not parquet")
    refused(tmp_path / "broken.parquet", tmp_path / "cache", r"data\.source is .*broken\.parquet")
    refused(tmp_path / "nowhere", tmp_path / "cache", r"data\.source is .*nowhere.*does not exist")
    refused(tmp_path / "nowhere", tmp_path / "cache", r"data\.tokenizer is .*nowhere", tokenizer=str(tmp_path / "nowhere"))
    write_texts(tmp_path / "t", sentences(50))
    write_parquet(tmp_path / "t" / "p.parquet", sentences(5), name="body")
    refused(tmp_path / "t", tmp_path / "cache", r"data\.text-column is 'text'.*p\.parquet")


def test_the_check_reads_the_beginning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MB of text: a few hundred kilobytes are enough to see that it serves."""
    from ray_muloco.data import dataset as dataset_module

    write_jsonl(tmp_path / "a.jsonl", ["x" * 2000] * 32_000)
    (tmp_path / "big.txt").write_bytes(b"line of text\n" * 2_000_000)
    read = 0

    def counting(*arguments):
        nonlocal read
        for passage in original(*arguments):
            read += len(passage.text)
            yield passage

    original = dataset_module.passages
    monkeypatch.setattr(dataset_module, "passages", counting)
    for name in ("a.jsonl", "big.txt"):
        check_source(DataConfig(source=str(tmp_path / name)), sequence_length=128, vocab_size=257)
    assert read < 12_000_000, "the hash of equal documents never gives a second side, so 4 MB are read before the tails are tried"
