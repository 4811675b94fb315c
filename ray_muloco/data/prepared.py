"""Directories of prepared shards: found by their manifest, opened in place, fetched from a URI."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_muloco.config import DataConfig
from ray_muloco.data.build import FORMAT, MANIFEST, STATE, TOKENIZER
from ray_muloco.data.corpus import EMBEDDED
from ray_muloco.data.locations import Location, reading, resolve
from ray_muloco.data.shards import ShardRecord, TokenShards
from ray_muloco.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, tokenizer_from_spec
from ray_muloco.data.units import TRAIN, VALIDATION
from ray_muloco.errors import ConfigError, RunError

_FAMILY = FORMAT.rpartition(" ")[0]
_COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class Prepared:
    """A directory of shards and its manifest."""

    location: Location
    manifest: dict[str, Any]

    def records(self, side: str) -> list[ShardRecord]:
        """The shards of `train` or `validation` in order."""
        return [ShardRecord(**shard) for shard in self.manifest["splits"][side]["shards"]]


def find_prepared(data: DataConfig) -> Prepared | None:
    """The prepared shards that a configuration's source names, None if it is something else.

    Raises ConfigError for shards of another version, for a damaged manifest and for a directory whose preparation was interrupted.
    """
    if data.source == EMBEDDED:
        return None
    location = resolve(data.source)
    if location.info().type.name != "Directory":
        return None
    if not location.child(MANIFEST).info().is_file:
        if location.child(STATE).child("plan.json").info().is_file:
            raise ConfigError("data.source", location.text, "was not prepared to the end", "run the same jobs/prepare.py again: it goes on where it stopped")
        return None
    try:
        manifest = json.loads(location.child(MANIFEST).read_bytes())
    except ValueError:
        return None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, str) or not version.startswith(_FAMILY):
        return None
    if version != FORMAT:
        raise ConfigError("data.source", location.text, f"holds {version!r}; this program reads {FORMAT!r}", "prepare it again")
    prepared = Prepared(location, manifest)
    try:
        counts = [sum(record.num_tokens for record in prepared.records(side)) for side in (TRAIN, VALIDATION)]
        if counts != [manifest["splits"][side]["num_tokens"] for side in (TRAIN, VALIDATION)]:
            raise ValueError("its counts of tokens disagree")
        for key, kind in (("vocab_size", int), ("tokenizer", str), ("tokenizer_digest", str)):
            if not isinstance(manifest[key], kind):
                raise TypeError(f"{key} is {manifest[key]!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("data.source", location.child(MANIFEST).text, f"is damaged ({type(error).__name__}: {error})", "prepare it again") from None
    return prepared


def open_prepared(prepared: Prepared) -> tuple[TokenShards, TokenShards, Tokenizer]:
    """Training shards, validation shards and tokenizer of a local directory; ConfigError names a file that is damaged."""
    directory, manifest = prepared.location.path, prepared.manifest
    train, validation = (TokenShards(directory, prepared.records(side), manifest["vocab_size"]) for side in (TRAIN, VALIDATION))
    if manifest["tokenizer"] == BYTES:
        return train, validation, ByteTokenizer()
    file = prepared.location.child(TOKENIZER)
    return train, validation, tokenizer_from_spec(file.read_bytes().decode("utf-8", "replace"), file.text)


def mirror(prepared: Prepared, cache_dir: str) -> Prepared:
    """Local directories as they are; others are copied below `cache_dir` once, named by their manifest's content."""
    if prepared.location.is_local:
        return prepared
    name = hashlib.sha256(json.dumps([prepared.location.text, prepared.manifest]).encode()).hexdigest()[:16]
    final = Path(cache_dir).expanduser().absolute() / f"mirror-{name}"
    if not (final / MANIFEST).is_file():
        working = final.with_name(f".{final.name}-{uuid.uuid4().hex}")
        try:
            working.mkdir(parents=True)
            files = [shard.file for side in (TRAIN, VALIDATION) for shard in prepared.records(side)]
            for file in [*files, *([TOKENIZER] if prepared.manifest["tokenizer"] == TOKENIZER else []), MANIFEST]:
                _fetch(prepared.location.child(file), working / Path(file).name)
            os.rename(working, final)
        except OSError as error:
            if not (final / MANIFEST).is_file():  # else another process was first
                raise RunError("storage", f"the copy of {prepared.location.text} in {final} cannot be made: {error}") from None
        finally:
            shutil.rmtree(working, ignore_errors=True)
    return Prepared(resolve(str(final)), prepared.manifest)


def _fetch(source: Location, target: Path) -> None:
    with open(target, "wb") as file:
        with reading(source):
            stream = source.filesystem.open_input_stream(source.path)
        with stream:
            while True:
                with reading(source):
                    block = stream.read(_COPY_BYTES)
                if not block:
                    return
                file.write(block)
