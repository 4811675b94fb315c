"""Directories of prepared shards: found by their manifest, opened in place, fetched from a URI."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_muloco.data.build import FORMAT, MANIFEST, STATE, TOKENIZER
from ray_muloco.data.cache import once
from ray_muloco.data.corpus import EMBEDDED
from ray_muloco.data.locations import Location, reading, resolve
from ray_muloco.data.shards import ShardRecord, TokenShards
from ray_muloco.data.tokenizer import BYTES, ByteTokenizer, Tokenizer, tokenizer_from_spec
from ray_muloco.data.units import TRAIN, VALIDATION
from ray_muloco.errors import ConfigError

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


def find_prepared(source: str, field: str = "data.source", *, allow_unfinished: bool = False) -> Prepared | None:
    """The prepared shards that a source names, None if it is something else.

    Raises ConfigError for shards of another version, for a damaged manifest and for a directory whose preparation was interrupted.
    """
    if source == EMBEDDED:
        return None
    location = resolve(source, field)
    if location.info().type.name != "Directory":
        return None
    if not location.child(MANIFEST).info().is_file:
        if not allow_unfinished and location.child(STATE).child("plan.json").info().is_file:
            raise ConfigError(field, location.text, "was not prepared to the end", "run the same jobs/prepare.py again: it goes on where it stopped")
        return None
    try:
        manifest = json.loads(location.child(MANIFEST).read_bytes())
    except ValueError:
        return None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(version, str) or not version.startswith(_FAMILY):
        return None
    if version != FORMAT:
        raise ConfigError(field, location.text, f"holds {version!r}; this program reads {FORMAT!r}", "prepare it again")
    prepared = Prepared(location, manifest)
    try:
        counts = [sum(record.num_tokens for record in prepared.records(side)) for side in (TRAIN, VALIDATION)]
        if counts != [manifest["splits"][side]["num_tokens"] for side in (TRAIN, VALIDATION)]:
            raise ValueError("its counts of tokens disagree")
        if any("/" in record.file or record.file.startswith(".") for side in (TRAIN, VALIDATION) for record in prepared.records(side)):
            raise ValueError("a shard lies outside")
        for key, kind in (("vocab_size", int), ("tokenizer", str), ("tokenizer_digest", str)):
            if not isinstance(manifest[key], kind):
                raise TypeError(f"{key} is {manifest[key]!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(field, location.child(MANIFEST).text, f"is damaged ({type(error).__name__}: {error})", "prepare it again") from None
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
    """Local directories as they are; others are copied below `cache_dir` once, named by where and what they are."""
    if prepared.location.is_local:
        return prepared
    files = {shard.file: shard.num_bytes for side in (TRAIN, VALIDATION) for shard in prepared.records(side)}
    if prepared.manifest["tokenizer"] == TOKENIZER:
        files[TOKENIZER] = -1

    def make(working: Path) -> None:
        for file, num_bytes in files.items():
            target = working / file
            if not target.is_file() or target.stat().st_size != num_bytes:
                _fetch(prepared.location.child(file), target)
        (working / MANIFEST).write_text(json.dumps(prepared.manifest))

    def whole(directory: Path) -> Prepared | None:
        return Prepared(resolve(str(directory)), prepared.manifest) if (directory / MANIFEST).is_file() else None

    name = hashlib.sha256(json.dumps([prepared.location.text, prepared.manifest]).encode()).hexdigest()[:16]
    return once(Path(cache_dir).expanduser().absolute() / f"mirror-{name}", whole, make)


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
