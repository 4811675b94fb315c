"""Preparing a source for good: shards, tokenizer and manifest in a directory or at a URI that the user names.

The same as what `open_dataset` does in its cache, but shared, inspectable, trained tokenizer included, and with whoever runs the
units given as an argument.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ray_muloco.config import DataConfig
from ray_muloco.data import build
from ray_muloco.data.locations import OutputDirectory, resolve, without_secrets
from ray_muloco.data.prepared import find_prepared
from ray_muloco.data.tokenizer import Tokenizer, bpe_size, load_tokenizer, spec_digest
from ray_muloco.data.units import TRAIN, VALIDATION
from ray_muloco.errors import ConfigError, RunError

MODEST_SEQUENCE_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What is to be prepared; `check` has found nothing to object to."""

    plan: build.Plan
    output: OutputDirectory
    sequence_length: int
    tokenizer: Tokenizer | None
    """None where it is still to be trained on the source."""

    @property
    def finished_manifest(self) -> dict[str, Any] | None:
        """The manifest, if an earlier run finished just this; ConfigError if the directory holds something else."""
        text = self.output.read(build.MANIFEST)
        if text is None:
            allowed = {build.STATE, build.TOKENIZER}
            strange = [name for name in self.output.names() if name not in allowed and not build.is_leftover(name)]
            if strange:
                raise ConfigError("output", self.output.text, f"must be empty or made by this job, and holds {strange[0]!r}", "choose another directory")
            return None
        with contextlib.suppress(ValueError):
            manifest = json.loads(text)
            if isinstance(manifest, dict) and manifest.get("key") == self.plan.key:
                return manifest
        raise ConfigError(
            "output", self.output.text, "holds something prepared from another source or with other settings", "choose another directory, or remove it"
        )


def check(data: DataConfig, output: str, *, sequence_length: int = MODEST_SEQUENCE_LENGTH, unit_bytes: int = 0) -> Preparation:
    """Look at everything that can be wrong before any work is done, and plan.

    unit_bytes: text in a unit of work, 0 for a good choice. Raises ConfigError.
    """
    for field, value, least in (("sequence-length", sequence_length, 1), ("unit-bytes", unit_bytes, 0)):
        if value < least:
            raise ConfigError(field, value, f"must be an integer of at least {least}")
    for field, source in (("data.source", data.source), ("data.validation-source", data.validation_source)):
        if source and find_prepared(source, field, allow_unfinished=True) is not None:
            raise ConfigError(field, without_secrets(source), "is prepared already", "pass it to jobs/train.py as --data.source")
    trained = bpe_size(data.tokenizer) is not None
    tokenizer = None if trained else load_tokenizer(data.tokenizer)
    location = resolve(output, "output")
    if location.info().is_file:
        raise ConfigError("output", location.text, "is a file", "name a directory")
    if data.source != "embedded" and os.path.realpath(location.path) == os.path.realpath(resolve(data.source).path):
        raise ConfigError("output", location.text, "must be another directory than data.source")
    plan = build.make_plan(data, data.tokenizer if tokenizer is None else spec_digest(tokenizer.spec), unit_bytes)
    preparation = Preparation(plan=plan, output=OutputDirectory(location), sequence_length=sequence_length, tokenizer=tokenizer)
    _ = preparation.finished_manifest
    return preparation


def prepare(
    preparation: Preparation, *, run_units: build.RunUnits = build.run_here, report: build.Report | None = None, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Prepare, or go on where an interrupted run stopped, and return the manifest; nothing is done again that is there.

    Documents are split by their hash, unless a side would be shorter than `sequence_length`: then every tail is cut off.
    Raises ConfigError for bad input, RunError if output or units fail for good.
    """
    plan, output = preparation.plan, preparation.output
    with _alone(output):
        finished = preparation.finished_manifest
        if finished is not None:
            output.delete(build.STATE)
            return finished
        reached = build.begin(plan, output)
        tokenizer = preparation.tokenizer or _trained(preparation, say)
        modes = plan.modes
        manifest: dict[str, Any] = {}
        for mode in modes[modes.index(reached) if reached in modes else 0 :]:
            manifest = build.build_shards(plan, mode, output, tokenizer, run_units=run_units, report=report)
            if build.long_enough(manifest, preparation.sequence_length):
                break
            if mode == "hash":
                say(f"a side is shorter than {preparation.sequence_length} tokens: cutting off every document's tail for validation instead")
        if not build.long_enough(manifest, 1):
            sides = manifest["splits"]
            raise build.too_short(sides[TRAIN]["num_tokens"], sides[VALIDATION]["num_tokens"], plan.data, 1)
        build.publish(output, manifest, tokenizer)
        return manifest


def _trained(preparation: Preparation, say: Callable[[str], None]) -> Tokenizer:
    say(f"training a BPE of {bpe_size(preparation.plan.data.tokenizer)} ids on the source")
    return build.trained_bpe(preparation.plan, preparation.output)


@contextlib.contextmanager
def _alone(output: OutputDirectory) -> Iterator[None]:
    """Refuses a second writer of a local directory: the lock is on the directory itself and ends with its process."""
    if not output.location.is_local:
        yield
        return
    try:
        os.makedirs(output.location.path, exist_ok=True)
        descriptor = os.open(output.location.path, os.O_RDONLY)
    except OSError as error:
        raise RunError("storage", f"{output.text} cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("output", output.text, "is being written by another jobs/prepare.py", "wait for it, or choose another directory") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
