"""From a configuration to tokens: open prepared shards in place, or build shards below a cache directory once and reuse them.

The cache is keyed by what decides its content (files, tokenizer, split), built beside its name and renamed when whole; a
caller that finds another at work waits for it, and what a killed one left is continued.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_muloco.config import DataConfig
from ray_muloco.data import build
from ray_muloco.data.cache import once
from ray_muloco.data.corpus import SourceFile, find_files, iter_pieces
from ray_muloco.data.documents import Split
from ray_muloco.data.locations import OutputDirectory, resolve
from ray_muloco.data.prepared import Prepared, find_prepared, mirror, open_prepared
from ray_muloco.data.readers import parquet_weights, passages
from ray_muloco.data.shards import TokenShards
from ray_muloco.data.tokenizer import BYTES, Tokenizer, load_tokenizer, spec_digest
from ray_muloco.data.units import TRAIN, VALIDATION
from ray_muloco.errors import ConfigError

_PARQUET_TO_CHECK = 64
_HASH_LOOK_BYTES = 4 << 20
_BYTES_PER_TOKEN = 16  # more than any tokenizer makes of ordinary text


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Tokens to train on and to validate with. `fingerprint` is equal wherever both and the tokenizer are equal."""

    train: TokenShards
    validation: TokenShards
    tokenizer: Tokenizer
    fingerprint: str


def open_dataset(data: DataConfig, *, sequence_length: int, vocab_size: int, cache_dir: str) -> Dataset:
    """The token shards of a configuration, built below the local directory `cache_dir` if they are not there yet.

    Raises ConfigError for a source, tokenizer or vocabulary that cannot be used, RunError("storage", …) if the cache cannot be written.
    """
    prepared = find_prepared(data.source)
    if prepared is not None:
        _require_usable(prepared, data, sequence_length, vocab_size)
        return _dataset(mirror(prepared, cache_dir))
    tokenizer = load_tokenizer(data.tokenizer)
    _require_vocabulary(tokenizer.vocab_size, data, vocab_size)
    plan = build.make_plan(data, spec_digest(tokenizer.spec))
    manifest: dict[str, Any] = {}
    for mode in plan.modes:
        cached = _cached(plan, mode, tokenizer, Path(cache_dir).expanduser())
        manifest = cached.manifest
        if build.long_enough(manifest, sequence_length):
            return _dataset(cached)
    sides = manifest["splits"]
    raise build.too_short(sides[TRAIN]["num_tokens"], sides[VALIDATION]["num_tokens"], data, sequence_length)


def check_source(data: DataConfig, *, sequence_length: int, vocab_size: int) -> None:
    """Refuse in about a second what `open_dataset` would refuse, as far as the beginning of the source shows it; builds nothing.

    Raises ConfigError as `open_dataset` does.
    """
    prepared = find_prepared(data.source)
    if prepared is not None:
        _require_usable(prepared, data, sequence_length, vocab_size)
        return
    tokenizer = load_tokenizer(data.tokenizer)
    _require_vocabulary(tokenizer.vocab_size, data, vocab_size)
    files = find_files(data.source)
    others = find_files(data.validation_source, "data.validation-source") if data.validation_source else []
    for file in [file for file in (*files, *others) if file.kind == "parquet"][:_PARQUET_TO_CHECK]:
        parquet_weights(file, data.text_column)
    if others:
        num_train, _ = _count(files, Split(mode=TRAIN), data, tokenizer, sequence_length)
        _, num_validation = _count(others, Split(mode=VALIDATION), data, tokenizer, sequence_length)
    else:
        split = Split(mode="hash", fraction=data.validation_fraction)
        num_train, num_validation = _count(files, split, data, tokenizer, sequence_length, _HASH_LOOK_BYTES)
        if min(num_train, num_validation) <= sequence_length:
            num_train, num_validation = _count(files, dataclasses.replace(split, mode="tail"), data, tokenizer, sequence_length)
    if min(num_train, num_validation) <= sequence_length:
        raise build.too_short(num_train, num_validation, data, sequence_length)


def tokenizer_digest(data: DataConfig) -> str:
    """`spec_digest` of the tokenizer that a configuration's tokens come from: prepared shards bring their own. ConfigError if there is none."""
    prepared = find_prepared(data.source)
    return spec_digest(load_tokenizer(data.tokenizer).spec) if prepared is None else prepared.manifest["tokenizer_digest"]


def _count(
    files: list[SourceFile], split: Split, data: DataConfig, tokenizer: Tokenizer, sequence_length: int, most_bytes: int | None = None
) -> tuple[int, int]:
    """Tokens on each side, counted until both (or the one there is) exceed a sequence or `most_bytes` of text were read."""
    counts = [0, 0]
    wanted = {TRAIN: (0,), VALIDATION: (1,)}.get(split.mode, (0, 1))
    num_bytes = 0
    for piece in iter_pieces(files, data.text_column, 1 << 40):
        tail_tokens = int(piece.file.num_bytes * split.fraction) // _BYTES_PER_TOKEN
        if split.mode == "tail" and piece.file.kind == "text" and tail_tokens > sequence_length:
            return sequence_length + 1, sequence_length + 1  # its tail lies far from its beginning; it need not be read
        for passage in passages(piece, split, data.text_column):
            if passage.text:
                counts[passage.validation] += len(tokenizer.encode_batch([passage.text])[0]) + passage.opens
                num_bytes += len(passage.text)
            if all(counts[side] > sequence_length for side in wanted) or (most_bytes is not None and num_bytes > most_bytes):
                return counts[0], counts[1]
    return counts[0], counts[1]


def _require_vocabulary(num_ids: int, data: DataConfig, vocab_size: int) -> None:
    if num_ids != vocab_size:
        name = "of the prepared shards" if data.tokenizer == BYTES and num_ids != 257 else f"{data.tokenizer!r}"
        raise ConfigError(
            "model.vocab-size", vocab_size, f"must be the {num_ids} ids of the tokenizer {name}, separator included", f"pass --model.vocab-size {num_ids}"
        )


def _require_usable(prepared: Prepared, data: DataConfig, sequence_length: int, vocab_size: int) -> None:
    if data.validation_source:
        raise ConfigError(
            "data.validation-source",
            data.validation_source,
            "must be empty where data.source is prepared shards: they hold a validation side",
            "prepare with it instead",
        )
    if data.tokenizer != BYTES and spec_digest(load_tokenizer(data.tokenizer).spec) != prepared.manifest["tokenizer_digest"]:
        raise ConfigError(
            "data.tokenizer", data.tokenizer, f"is not the tokenizer that {data.source} was prepared with", "leave --data.tokenizer out: shards bring their own"
        )
    _require_vocabulary(prepared.manifest["vocab_size"], data, vocab_size)
    if not build.long_enough(prepared.manifest, sequence_length):
        sides = prepared.manifest["splits"]
        raise build.too_short(sides[TRAIN]["num_tokens"], sides[VALIDATION]["num_tokens"], data, sequence_length)


def _dataset(prepared: Prepared) -> Dataset:
    train, validation, tokenizer = open_prepared(prepared)
    names = f"{train.digest} {validation.digest} {spec_digest(tokenizer.spec)}"
    return Dataset(train=train, validation=validation, tokenizer=tokenizer, fingerprint=hashlib.sha256(names.encode()).hexdigest())


def _cached(plan: build.Plan, mode: str, tokenizer: Tokenizer, cache_dir: Path) -> Prepared:
    """The cached directory of one way to split, built if it is missing or damaged."""

    def make(working: Path) -> None:
        output = OutputDirectory(resolve(str(working), "run.storage-path"))
        build.begin(plan, output)
        build.publish(output, build.build_shards(plan, mode, output, tokenizer), tokenizer)

    return once(cache_dir / f"shards-{plan.key[:16]}-{mode}", _whole, make)


def _whole(directory: Path) -> Prepared | None:
    """The cached shards if they are all there; None if they are not, or are damaged."""
    if not (directory / build.MANIFEST).is_file():
        return None
    try:
        found = find_prepared(str(directory))
        if found is not None:
            open_prepared(found)
    except ConfigError:
        return None
    return found
