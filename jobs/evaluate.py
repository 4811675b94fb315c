"""Evaluate a checkpoint: nats a token, perplexity and bits a byte, on its own validation data or on any other.

python jobs/evaluate.py --checkpoint runs/tiny-muloco-k4
python jobs/evaluate.py --checkpoint runs/tiny-muloco-k4 --data.source my/texts --validation-tokens 1000000
"""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from _main import check_json_place, parse, run, write_json

from ray_muloco.errors import ConfigError
from ray_muloco.training.storage import refused_as

if TYPE_CHECKING:
    from ray_muloco.data.dataset import Dataset
    from ray_muloco.training.inference import Trained


@dataclass(frozen=True)
class Flags:
    """What to evaluate, on what."""

    checkpoint: str
    """Directory or URI of a checkpoint or of a run."""
    source: Annotated[str, tyro.conf.arg(name="data.source")] = ""
    """Data to evaluate on; empty takes the data the checkpoint was trained with."""
    split: Literal["validation", "train"] = "validation"
    """Side of the data."""
    validation_tokens: int = 0
    """Tokens to evaluate at most; 0 takes as many as the run did."""
    cache: str = "runs/.data"
    """Local directory for token shards built from raw text."""
    threads: int = 0
    """CPU threads; 0 takes all cores."""
    json: str = ""
    """Write the figures to this file."""


def main() -> int:
    """Run the job; returns its exit code."""
    flags = parse(Flags, description=__doc__)
    check_json_place(flags.json)
    if flags.validation_tokens < 0:
        raise ConfigError("validation-tokens", flags.validation_tokens, "must be 0 (as the run) or more")
    if flags.threads < 0:
        raise ConfigError("threads", flags.threads, "must be 0 (all cores) or more")
    import torch

    torch.set_num_threads(flags.threads or os.cpu_count() or 1)
    figures = evaluate(flags)
    print("\n".join(f"{name:20} {value}" for name, value in figures.items()))
    write_json(flags.json, figures)
    return 0


def evaluate(flags: Flags) -> dict[str, object]:
    """Loss of the checkpoint's parameters over sequences spread over a split, in fp32."""
    from contextlib import nullcontext

    import torch

    from ray_muloco.training.evaluate import combine, sequence_losses, validation_sequences
    from ray_muloco.training.inference import load_trained

    trained = load_trained(flags.checkpoint)
    length = trained.config.model.sequence_length
    dataset = open_data(flags, trained)
    shards = dataset.validation if flags.split == "validation" else dataset.train
    sequences = validation_sequences(flags.validation_tokens or trained.config.validation_tokens, shards.num_sequences(length), length)
    losses = sequence_losses(
        trained.model, shards, trained.tokenizer.token_num_bytes, sequences, length=length, device=torch.device("cpu"), autocast=nullcontext
    )
    result = combine(losses, length)
    return {
        "checkpoint": flags.checkpoint, "round": trained.round_number, "split": flags.split, "tokens": result.num_tokens, "loss": result.loss,
        "perplexity": math.exp(result.loss), "bits_per_byte": result.bits_per_byte,
    }  # fmt: skip


def open_data(flags: Flags, trained: Trained) -> Dataset:
    """The data to evaluate on, as tokens of the checkpoint's own tokenizer: the file that the run was given may be gone or another by now."""
    from ray_muloco.data.dataset import open_dataset, tokenizer_digest
    from ray_muloco.data.tokenizer import BYTES, spec_digest

    spec = trained.tokenizer.spec
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tokenizer.json"
        file.write_text(spec, encoding="utf-8")
        changes = {"data.source": flags.source, "data.validation_source": ""} if flags.source else {}
        data = trained.config.override({**changes, "data.tokenizer": BYTES if spec == BYTES else str(file)}).data
        if tokenizer_digest(data) != spec_digest(spec):
            raise ConfigError(
                "data.source",
                data.source,
                "was prepared with another tokenizer than the checkpoint was trained with",
                "prepare it with the checkpoint's tokenizer",
            )
        sizes = {"sequence_length": trained.config.model.sequence_length, "vocab_size": trained.config.model.vocab_size}
        with refused_as("cache", flags.cache):
            return open_dataset(data, **sizes, cache_dir=os.path.abspath(flags.cache))


if __name__ == "__main__":
    run(main)
