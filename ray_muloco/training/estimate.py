"""What a configuration will need, by arithmetic: for `--dry-run`, without torch and without a cluster.

Bytes. P parameters, of which H in hidden matrices (Muon keeps one number for each) and P - H elsewhere (AdamW keeps two).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ray_muloco.config import TrainConfig
from ray_muloco.presets import num_params

FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Sizes in bytes unless named otherwise."""

    num_params: int
    num_steps: int
    num_rounds: int
    replica_state_bytes: int
    replica_activation_bytes: int
    coordinator_bytes: int
    uplink_bytes_per_round: int
    downlink_bytes_per_round: int
    checkpoint_bytes: int
    disk_bytes: int

    @property
    def replica_bytes(self) -> int:
        """Memory of a replica."""
        return self.replica_state_bytes + self.replica_activation_bytes


def estimate(config: TrainConfig) -> Estimate:
    """Memory, traffic and disk of a run.

    replica: θ, θ_k and gradients (3 P) and inner state; activations are a rule of thumb (each block keeps about 10 D + 3 F
    numbers a token in the compute type, and the head 2 V in fp32), with activation checkpointing D a block and one block.
    coordinator: θ and Ψ, and u for methods with an outer step, and as much again of θ and u while a checkpoint is written.
    """
    total = num_params(config.model)
    inner = inner_state_bytes(config)
    outer = not config.is_data_parallel
    replicas = config.scaling.num_replicas
    num_steps = math.ceil(config.budget_tokens / (config.batch_sequences * config.model.sequence_length))
    hops = math.ceil(num_steps / math.ceil(num_steps / config.sync_interval)) if config.is_data_parallel and replicas > 1 else 0
    payload = FP32_BYTES * total
    checkpoint = payload * (2 if outer else 1) + replicas * inner
    return Estimate(
        num_params=total,
        num_steps=num_steps,
        num_rounds=math.ceil(num_steps / config.sync_interval),
        replica_state_bytes=3 * payload + inner * (2 if config.is_data_parallel else 1),
        replica_activation_bytes=activation_bytes(config),
        coordinator_bytes=payload * (5 if outer else 3),
        uplink_bytes_per_round=payload * (replicas if outer else 1 + hops * replicas),
        downlink_bytes_per_round=payload * replicas * (1 + hops),
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * (config.checkpoint.keep + 1),
    )


def inner_state_bytes(config: TrainConfig) -> int:
    """Inner optimizer state of one replica."""
    model = config.model
    hidden = model.num_layers * (4 * model.d_model * model.num_heads * model.head_dim + 3 * model.d_model * model.ffn_dim)
    total = num_params(model)
    return FP32_BYTES * (hidden + 2 * (total - hidden) if config.uses_muon else 2 * total)


def activation_bytes(config: TrainConfig) -> int:
    """Activations that one forward pass keeps for the backward pass (rule of thumb)."""
    model = config.model
    sequences = config.micro_batch_sequences or config.replica_batch_sequences
    compute_bytes = 4 if config.compute_dtype == "fp32" else 2
    block = 10 * model.d_model + 3 * model.ffn_dim
    per_token = (model.num_layers * model.d_model + block) if config.activation_checkpointing else model.num_layers * block
    return sequences * model.sequence_length * (compute_bytes * per_token + 2 * FP32_BYTES * model.vocab_size)
