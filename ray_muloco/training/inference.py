"""A trained model out of a checkpoint: load it, sample from it. No Ray, no run, no optimizer.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.core.model import Decoder, build_model
from ray_muloco.data.tokenizer import Tokenizer, tokenizer_from_spec
from ray_muloco.errors import ConfigError
from ray_muloco.training.checkpoint import CheckpointRef, open_checkpoint
from ray_muloco.training.manifest import MODEL_FILE, TOKENIZER_FILE


def pack_text(text: str) -> Tensor:
    """A text as a tensor of its UTF-8 bytes, so that a checkpoint can hold it."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def tokenizer_of(checkpoint: CheckpointRef) -> Tokenizer:
    """The tokenizer a checkpoint was trained with; it lies in the checkpoint unless it is plain bytes."""
    if TOKENIZER_FILE not in checkpoint.files:
        return tokenizer_from_spec("bytes")
    return tokenizer_from_spec(bytes(checkpoint.read_tensors(TOKENIZER_FILE)["tokenizer"].tolist()).decode())


@dataclass(frozen=True, slots=True)
class Trained:
    """A checkpoint's model, ready for inference on the CPU or a GPU."""

    model: Decoder
    tokenizer: Tokenizer
    config: TrainConfig
    round_number: int


def load_trained(location: str, device: str = "cpu") -> Trained:
    """The model of a checkpoint, or of a run's newest one. ConfigError names what is wrong with the location."""
    checkpoint = open_checkpoint(location)
    config = TrainConfig.from_dict(checkpoint.manifest["config"])
    tokenizer = tokenizer_of(checkpoint)
    model = build_model(config.model, seed=config.seed, separator_id=tokenizer.separator_id, device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in checkpoint.read_tensors(MODEL_FILE).items():
            parameters[name].copy_(tensor)
    model.eval()
    return Trained(model, tokenizer, config, checkpoint.round)


@torch.no_grad()
def sample(trained: Trained, prompt: str, *, max_tokens: int, temperature: float = 0.8, top_k: int = 0, seed: int = 0) -> Iterator[int]:
    """Token ids that continue a prompt, one at a time, until max_tokens or the end of the document.

    Each is drawn from softmax(logits / temperature) over the top_k likeliest (0: all); temperature 0 takes the likeliest.
    The context is the last T tokens, T the length the model was trained with.
    """
    if max_tokens < 1:
        raise ConfigError("max-tokens", max_tokens, "must be an integer of at least 1")
    if not (math.isfinite(temperature) and (temperature == 0 or temperature >= 1e-3)):
        raise ConfigError("temperature", temperature, "must be 0 (greedy) or a number from 0.001 on")
    if top_k < 0:
        raise ConfigError("top-k", top_k, "must be 0 (all) or more")
    if not 0 <= seed < 2**63:
        raise ConfigError("seed", seed, "must be an integer from 0 to 2^63 - 1")
    device = next(trained.model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    separator = trained.tokenizer.separator_id
    tokens = [separator, *(int(i) for i in trained.tokenizer.encode(prompt))]
    length = trained.config.model.sequence_length
    for _ in range(max_tokens):
        context = torch.tensor([tokens[-length:]], dtype=torch.int64, device=device)  # [1, T]
        token = draw(trained.model(context)[0, -1].float().cpu(), temperature, top_k, generator)  # from [V]
        if token == separator:
            return
        tokens.append(token)
        yield token


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id from logits [V]."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        floor = torch.topk(logits, min(top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
