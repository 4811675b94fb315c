"""Validation of the global parameters: nats a token and bits a byte over a fixed set of sequences.

The set is cut into chunks of fixed size, so that the sum is the same whoever evaluates which chunk: the numbers do not
depend on how many replicas there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from ray_muloco.core.model import Decoder
from ray_muloco.data.shards import TokenShards
from ray_muloco.training.metrics import bits_per_byte

CHUNK_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation loss in nats a token and bits a byte, over so many tokens."""

    loss: float
    bits_per_byte: float | None
    num_tokens: int


def validation_sequences(validation_tokens: int, available: int, length: int) -> list[int]:
    """The sequences that a validation budget buys, at least one, spread evenly over all there are.

    Evenly, because neighbours are alike: the first so many may all lie in one odd document.
    """
    count = max(1, min(available, validation_tokens // length))
    return [number * available // count for number in range(count)]


def shares(sequences: Sequence[int], replicas: Sequence[int]) -> dict[int, list[int]]:
    """Validation sequences for each replica: whole chunks, dealt out in turn."""
    dealt: dict[int, list[int]] = {replica_id: [] for replica_id in replicas}
    for chunk, begin in enumerate(range(0, len(sequences), CHUNK_SEQUENCES)):
        dealt[replicas[chunk % len(replicas)]].extend(sequences[begin : begin + CHUNK_SEQUENCES])
    return dealt


@torch.no_grad()
def sequence_losses(
    model: Decoder, shards: TokenShards, token_num_bytes: np.ndarray, sequence_numbers: Sequence[int], *,
    length: int, device: torch.device, autocast: Callable[[], AbstractContextManager[object]],
) -> dict[int, tuple[float, int]]:  # fmt: skip
    """Summed nats and summed bytes of the predicted tokens of each sequence, by its number."""
    losses: dict[int, tuple[float, int]] = {}
    model.eval()
    for begin in range(0, len(sequence_numbers), CHUNK_SEQUENCES):
        numbers = sequence_numbers[begin : begin + CHUNK_SEQUENCES]
        batch = shards.batch(np.asarray(numbers, dtype=np.int64), length)
        with autocast():
            nats = model.sequence_nll(torch.from_numpy(batch).to(device))  # [B]
        num_bytes = token_num_bytes[batch[:, 1:]].sum(axis=1)
        losses.update(zip(numbers, zip(nats.double().tolist(), num_bytes.tolist(), strict=True), strict=True))
    model.train()
    return losses


def combine(by_sequence: Mapping[int, tuple[float, int]], length: int) -> Evaluation:
    """One evaluation from nats and bytes by sequence, added up in order of sequence, whoever measured it."""
    total_nats = math.fsum(by_sequence[s][0] for s in sorted(by_sequence))
    total_bytes = sum(num_bytes for _, num_bytes in by_sequence.values())
    num_tokens = len(by_sequence) * length
    return Evaluation(total_nats / num_tokens, bits_per_byte(total_nats, total_bytes), num_tokens)
