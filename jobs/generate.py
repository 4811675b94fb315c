"""Sample text from a checkpoint.

    python jobs/generate.py --checkpoint runs/tiny-muloco-k4 --prompt "def " --max-tokens 200

--checkpoint is a checkpoint's directory or URI, or a run's (its newest checkpoint is taken).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from _main import check_json_place, parse, run, write_json


@dataclass(frozen=True)
class Flags:
    """What to sample."""

    checkpoint: str
    """Directory or URI of a checkpoint or of a run."""
    prompt: str = ""
    """Text to continue; empty begins a document."""
    max_tokens: int = 200
    """Tokens to sample at most; the end of the document ends the sample earlier."""
    temperature: float = 0.8
    """Softmax temperature; 0 always takes the likeliest token."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0 means all."""
    seed: int = 0
    """Seed of the sampling."""
    json: str = ""
    """Write prompt, sample and checkpoint to this file."""


def main() -> int:
    """Run the job; returns its exit code."""
    flags = parse(Flags, description=__doc__)
    check_json_place(flags.json)
    from ray_muloco.training.inference import load_trained, sample

    trained = load_trained(flags.checkpoint)
    ids = list(sample(trained, flags.prompt, max_tokens=flags.max_tokens, temperature=flags.temperature, top_k=flags.top_k, seed=flags.seed))
    text = trained.tokenizer.decode(ids)
    sys.stdout.write(f"{flags.prompt}{text}\n")
    write_json(flags.json, {"checkpoint": flags.checkpoint, "round": trained.round_number, "prompt": flags.prompt, "sample": text})
    return 0


if __name__ == "__main__":
    run(main)
