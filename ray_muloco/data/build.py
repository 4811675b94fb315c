"""A source into a directory of shards: plan units, run them, sum up, and publish the manifest last.

Who runs the units is an argument, so one process and a Ray cluster make the same bytes. An interrupted build goes on where it
stopped: records of finished units lie in the directory's `_prepare` until the manifest is there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ray_muloco.config import DataConfig
from ray_muloco.data.corpus import SourceFile, Unit, find_files, plan_units, source_fingerprint
from ray_muloco.data.documents import Split, document_key
from ray_muloco.data.locations import PART, OutputDirectory, reading, without_secrets
from ray_muloco.data.readers import passages
from ray_muloco.data.tokenizer import BYTES, SMALLEST_BPE, Tokenizer, bpe_size, spec_digest, tokenizer_from_spec, train_bpe
from ray_muloco.data.units import TRAIN, VALIDATION, SideRecord, UnitJob, UnitRecord, build_unit, finished_unit
from ray_muloco.errors import ConfigError

FORMAT = "ray_muloco shards 1"
MANIFEST, TOKENIZER, STATE = "manifest.json", "tokenizer.json", "_prepare"
BPE_TRAINING_BYTES = 128 << 20
_HEADS_TO_READ = 256

RunUnits = Callable[[Sequence[UnitJob], Tokenizer], Iterator[UnitRecord]]
Report = Callable[[UnitRecord, int, int], None]
"""Called for each finished unit with its record, the number of finished units and the number of all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be built. `key` names it: equal keys, equal bytes."""

    data: DataConfig
    sources: tuple[tuple[SourceFile, ...], ...]
    units: tuple[tuple[Unit, ...], ...]
    key: str

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to split, in the order in which they are tried: a later one where an earlier leaves a side too short."""
        if len(self.sources) == 2:
            return ("given",)
        return ("tail",) if _one_sided(self) else ("hash", "tail")

    def jobs(self, mode: str, output: OutputDirectory) -> list[UnitJob]:
        """The jobs of one way to split."""
        fraction, column = self.data.validation_fraction, self.data.text_column
        splits = [Split(mode=TRAIN), Split(mode=VALIDATION)] if mode == "given" else [Split(mode=mode, fraction=fraction)]  # pyright: ignore[reportArgumentType]
        state = f"{STATE}/{mode}"
        return [
            UnitJob(unit=unit, split=split, text_column=column, output=output, state=state)
            for split, units in zip(splits, self.units, strict=True)
            for unit in units
        ]


def make_plan(data: DataConfig, tokenizer_name: str, unit_bytes: int = 0) -> Plan:
    """The plan for a configuration's source; `tokenizer_name` stands for the tokenizer in its key.

    Raises ConfigError for a source that does not exist, holds nothing known or is visibly broken.
    """
    sources = [tuple(find_files(data.source))]
    if data.validation_source:
        sources.append(tuple(find_files(data.validation_source, "data.validation-source")))
    units: list[tuple[Unit, ...]] = []
    count = 0
    for files in sources:
        planned = plan_units(list(files), data.text_column, unit_bytes)
        units.append(tuple(Unit(number=count + unit.number, pieces=unit.pieces) for unit in planned))
        count += len(planned)
    settings = {
        "format": FORMAT,
        "sources": [source_fingerprint(list(files)) for files in sources],
        "tokenizer": tokenizer_name,
        "validation_fraction": data.validation_fraction,
        "text_column": data.text_column,
        "units": [[[(piece.file.name, piece.start, piece.stop) for piece in unit.pieces] for unit in planned] for planned in units],
    }
    return Plan(data=data, sources=tuple(sources), units=tuple(units), key=hashlib.sha256(json.dumps(settings).encode()).hexdigest())


def run_here(jobs: Sequence[UnitJob], tokenizer: Tokenizer) -> Iterator[UnitRecord]:
    """Run units one after the other in this process."""
    for job in jobs:
        yield build_unit(job, tokenizer)


def begin(plan: Plan, output: OutputDirectory) -> str:
    """Clear what another plan or a killed writer left; returns the way to split that an interrupted build had come to."""
    text = output.read(f"{STATE}/plan.json")
    state = json.loads(text) if text else {}
    if state.get("key") != plan.key:
        output.delete(STATE)
        output.write(f"{STATE}/plan.json", json.dumps({"key": plan.key, "mode": ""}).encode())
        state = {}
    for name in output.names():
        if is_leftover(name) and (not state or name.endswith(PART)):
            output.delete(name)
    return state.get("mode", "")


def build_shards(
    plan: Plan, mode: str, output: OutputDirectory, tokenizer: Tokenizer, *, run_units: RunUnits = run_here, report: Report | None = None
) -> dict[str, Any]:
    """Build the shards of one way to split, and return their manifest, which `publish` writes. Finished units are not done again."""
    output.write(f"{STATE}/plan.json", json.dumps({"key": plan.key, "mode": mode}).encode())
    return _manifest(plan, mode, tokenizer, _run(plan.jobs(mode, output), tokenizer, run_units, report))


def publish(output: OutputDirectory, manifest: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Make a built directory valid: tokenizer, then manifest; then what is no longer needed goes."""
    if manifest["tokenizer"] == TOKENIZER:
        output.write(TOKENIZER, tokenizer.spec.encode())
    named = {shard["file"] for side in manifest["splits"].values() for shard in side["shards"]}
    for name in output.names():
        if is_leftover(name) and name not in named:
            output.delete(name)
    output.write(MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    output.delete(STATE)


_SHARD_NAME = re.compile(rf"({TRAIN}|{VALIDATION})-\d{{5,}}-\d{{3,}}\.arrow")


def is_leftover(name: str) -> bool:
    """Whether a build could have written a file of this name: a shard, or one that it was still writing."""
    if name.endswith(PART):
        return bool(_SHARD_NAME.match(name)) or name.startswith((MANIFEST, TOKENIZER))
    return bool(_SHARD_NAME.fullmatch(name))


def trained_bpe(plan: Plan, output: OutputDirectory) -> Tokenizer:
    """The tokenizer of `bpe:N`, trained on the source's training documents once for each plan and kept with its state."""
    size, name = bpe_size(plan.data.tokenizer), f"{STATE}/{TOKENIZER}"
    kept = output.read(name)
    if kept is None:
        kept = train_bpe(_training_texts(plan), size or SMALLEST_BPE).encode()
        output.write(name, kept)
    return tokenizer_from_spec(kept.decode(), plan.data.tokenizer)


def _training_texts(plan: Plan) -> Iterator[str]:
    """Text of training documents, an equal share from each unit, BPE_TRAINING_BYTES at most."""
    mode = plan.modes[0]
    split = Split(mode=TRAIN if mode == "given" else mode, fraction=plan.data.validation_fraction)  # pyright: ignore[reportArgumentType]
    share = BPE_TRAINING_BYTES // max(1, len(plan.units[0]))
    for unit in plan.units[0]:
        taken = 0
        for passage in (passage for piece in unit.pieces for passage in passages(piece, split, plan.data.text_column)):
            if passage.text and not passage.validation:
                yield passage.text.decode("utf-8", "replace")
                taken += len(passage.text)
                if taken >= share:
                    break


def _one_sided(plan: Plan) -> bool:
    """Whether the hash leaves a side without a document, as far as a look at a few files can say: saves a useless build."""
    files, split = plan.sources[0], Split(mode="hash", fraction=plan.data.validation_fraction)
    if len(files) > _HEADS_TO_READ or any(file.kind != "text" for file in files):
        return False
    sides: set[bool] = set()
    for file in files:
        with reading(file.location), file.location.filesystem.open_input_file(file.location.path) as stream:
            if stream.size():
                sides.add(split.is_validation(document_key(stream.read_at(1 << 16, 0), stream.size())))
        if len(sides) == 2:
            return False
    return True


def _run(jobs: Sequence[UnitJob], tokenizer: Tokenizer, run_units: RunUnits, report: Report | None) -> list[UnitRecord]:
    records: dict[int, UnitRecord] = {}
    remaining: list[UnitJob] = []
    for job in jobs:
        record = finished_unit(job)
        if record is None:
            remaining.append(job)
        else:
            records[record.number] = record
            if report:
                report(record, len(records), len(jobs))
    for record in run_units(remaining, tokenizer):
        records[record.number] = record
        if report:
            report(record, len(records), len(jobs))
    return [records[job.unit.number] for job in jobs]


def _manifest(plan: Plan, mode: str, tokenizer: Tokenizer, records: Iterable[UnitRecord]) -> dict[str, Any]:
    sides = {name: SideRecord(counts=np.zeros(tokenizer.vocab_size, dtype=np.int64)) for name in (TRAIN, VALIDATION)}
    num_skipped = 0
    for record in records:
        sides[TRAIN].add(record.train)
        sides[VALIDATION].add(record.validation)
        num_skipped += record.num_skipped
    return {
        "format": FORMAT,
        "key": plan.key,
        "source": without_secrets(plan.data.source),
        "split": {"mode": mode, "validation_fraction": plan.data.validation_fraction},
        "tokenizer": BYTES if tokenizer.spec == BYTES else TOKENIZER,
        "tokenizer_digest": spec_digest(tokenizer.spec),
        "vocab_size": tokenizer.vocab_size,
        "separator_id": tokenizer.separator_id,
        "num_skipped_documents": num_skipped,
        "splits": {name: _side(side, tokenizer.unknown_id) for name, side in sides.items()},
    }


def _side(side: SideRecord, unknown_id: int | None) -> dict[str, Any]:
    unknown = int(side.counts[unknown_id]) if unknown_id is not None else 0
    return {
        "num_tokens": side.num_tokens,
        "num_documents": side.num_documents,
        "text_bytes": side.text_bytes,
        "entropy_bits_per_token": round(unigram_entropy(side.counts), 6),
        "unknown_rate": unknown / max(1, side.num_tokens),
        "shards": [shard.to_dict() for shard in side.shards],
    }


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Σ p log2(1/p) over the relative frequencies p of ids, in bits a token; 0 for no tokens."""
    present = counts[counts > 0] / max(1, counts.sum())
    return float(-(present * np.log2(present)).sum()) + 0.0


def long_enough(manifest: dict[str, Any], sequence_length: int) -> bool:
    """Whether each side of the split holds one sequence and the token after it."""
    return min(manifest["splits"][side]["num_tokens"] for side in (TRAIN, VALIDATION)) > sequence_length


def too_short(num_train: int, num_validation: int, data: DataConfig, sequence_length: int) -> ConfigError:
    """The error for a source of which a side of the split is shorter than one sequence and the token after it."""
    field, value = "data.source", data.source
    if data.validation_source and num_train > sequence_length:
        field, value = "data.validation-source", data.validation_source
    found = f"gives {num_train} tokens to train on and {num_validation} to validate with"
    return ConfigError(
        field,
        without_secrets(value),
        f"{found}, and each side needs a sequence of {sequence_length} tokens and one more",
        "add text, or shorten --model.sequence-length",
    )
