"""Small things to test with: a model of a few thousand parameters, and token shards made from a seed.

Synthetic tokens, because the embedded corpus differs between Python releases and a golden trajectory must not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ray_muloco.config import InnerConfig, ModelConfig, OuterConfig, RunConfig, ScalingConfig, TrainConfig
from ray_muloco.data.dataset import Dataset
from ray_muloco.data.tokenizer import ByteTokenizer
from ray_muloco.training.coordinator import Committed, Coordinator
from ray_muloco.training.group import LocalGroup
from ray_muloco.training.plan import ReplicaReport, SegmentPlan

LENGTH = 16
MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, head_dim=8, ffn_dim=24, vocab_size=257, sequence_length=LENGTH)


def toy_config(**changes: Any) -> TrainConfig:
    """A run of a few thousand parameters in fp32; `changes` are dotted fields with __ for the dot."""
    config = TrainConfig(
        preset="toy", method="muloco", model=MODEL, inner=InnerConfig(lr=0.01), outer=OuterConfig(lr=0.7, momentum=0.5),
        scaling=ScalingConfig(num_replicas=2, threads_per_replica=1), run=RunConfig(name="toy", tracker="none"),
        budget_tokens=12 * 8 * LENGTH, batch_sequences=8, sync_interval=3, compute_dtype="fp32", validation_tokens=8 * LENGTH,
    )  # fmt: skip
    return config.override({name.replace("__", "."): value for name, value in changes.items()})


class MemoryShards:
    """Tokens in memory with the reading half of `TokenShards`."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.all_tokens = tokens
        self.num_tokens = len(tokens)

    def num_sequences(self, sequence_length: int) -> int:
        return (self.num_tokens - 1) // sequence_length

    def batch(self, sequence_numbers: np.ndarray, sequence_length: int) -> np.ndarray:
        starts = sequence_numbers[:, None] * sequence_length
        return self.all_tokens[starts + np.arange(sequence_length + 1)].astype(np.int64)


def toy_shards(num_tokens: int, seed: int) -> Any:
    """Tokens with something to learn: each byte is the one before plus a small step, and now and then a separator."""
    generator = np.random.default_rng(seed)
    tokens = np.cumsum(generator.integers(-2, 3, num_tokens)) % 64
    tokens[generator.random(num_tokens) < 0.02] = 256
    return MemoryShards(tokens)


def toy_dataset(num_tokens: int = 40_000) -> Dataset:
    """A dataset of synthetic tokens with a byte tokenizer."""
    return Dataset(train=toy_shards(num_tokens, 1), validation=toy_shards(4_000, 2), tokenizer=ByteTokenizer(), fingerprint="toy")


class Harness:
    """Coordinator and LocalGroup without files: rounds one at a time, for laws."""

    def __init__(self, config: TrainConfig, dataset: Dataset) -> None:
        torch.set_num_threads(1)
        self.config = config
        self.coordinator = Coordinator(config, dataset.tokenizer.separator_id)
        self.group = LocalGroup(dataset)
        self.group.start(config, 0, {})
        self.group.publish(self.coordinator.theta)

    def round(self, plans: dict[int, SegmentPlan] | None = None) -> tuple[dict[int, ReplicaReport], Committed]:
        """One whole round; with `plans`, on those instead of the coordinator's own."""
        plans = plans or self.coordinator.plan(self.group.alive)
        inner = self.group.run_inner(plans)
        decision = self.coordinator.decide(plans, inner.reports, inner.lost)
        assert decision.action == "commit", decision.reasons
        self.group.exchange(self.coordinator.weights(decision.participants, inner.reports), self.coordinator.merged)
        committed = self.coordinator.commit(plans, inner.reports, decision)
        self.group.publish(self.coordinator.theta)
        return dict(inner.reports), committed

    def run(self) -> None:
        """Rounds until the budget is committed."""
        while not self.coordinator.finished:
            self.round()
