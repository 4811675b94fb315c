"""What a run is: frozen records, each field with its unit and source, all of it validated before any work begins.

Standard library only. There is one way to vary a configuration, `config.override({"outer.lr": 0.5})`, shared by the
command line, Tune and the tests. Methods are settings of the same round:

    muon-dp, adamw-dp   gradients averaged each step, no outer step
    diloco              AdamW inside, H steps, Nesterov outer step
    muloco              Muon inside, H steps, Nesterov outer step   (arXiv 2505.23725; K = 1 is a method of its own)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeAlias

from ray_muloco.sections import (
    CheckpointConfig,
    DataConfig,
    InnerConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    ScalingConfig,
    check_positive,
    check_types,
    require,
    type_hints,
)

__all__ = [
    "METHODS", "CheckpointConfig", "DataConfig", "InnerConfig", "Method", "ModelConfig", "OuterConfig", "RunConfig", "ScalingConfig", "TrainConfig", "flatten",
]  # fmt: skip

Method: TypeAlias = Literal["muloco", "diloco", "muon-dp", "adamw-dp"]
METHODS: tuple[str, ...] = ("muloco", "diloco", "muon-dp", "adamw-dp")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that decides what a run computes, and where it keeps it."""

    preset: str = "custom"
    """Name of the preset this configuration began as."""
    method: Method = "muloco"
    """Training method."""
    model: ModelConfig
    """Model shape."""
    inner: InnerConfig = field(default_factory=InnerConfig)
    """Inner optimizer."""
    outer: OuterConfig = field(default_factory=OuterConfig)
    """Outer optimizer."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    """Replicas and resources."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""
    run: RunConfig = field(default_factory=RunConfig)
    """Names and places."""
    budget_tokens: int
    """Tokens to train on, summed over replicas; the learning-rate schedule ends with them."""
    batch_sequences: int
    """Global batch B in sequences a step; each replica takes B / K."""
    sync_interval: int = 30
    """H: inner steps in a round."""
    micro_batch_sequences: int = 0
    """Sequences of one forward and backward pass (gradient accumulation); 0 takes a replica's whole batch at once."""
    seed: int = 0
    """Seed of initial weights and data order."""
    eval_every_rounds: int = 5
    """Rounds between evaluations of the global parameters; the last round is always evaluated."""
    validation_tokens: int = 65_536
    """Validation tokens of an evaluation, or fewer if the split holds fewer."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the matrix products; auto takes bf16 where every replica's hardware multiplies it natively."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Compile the model with torch.compile."""
    init_from: str = ""
    """Checkpoint whose weights the run starts from (a new run: optimizer state and data order begin anew)."""

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "", "budget_tokens", "batch_sequences", "sync_interval", "eval_every_rounds", "validation_tokens")
        replicas = self.scaling.num_replicas
        require(
            self.batch_sequences % replicas == 0,
            "batch-sequences",
            self.batch_sequences,
            f"must be a multiple of scaling.num-replicas, {replicas}",
            f"take {math.ceil(self.batch_sequences / replicas) * replicas}",
        )
        per_replica = self.batch_sequences // replicas
        micro = self.micro_batch_sequences
        require(
            micro >= 0 and (micro == 0 or per_replica % micro == 0),
            "micro-batch-sequences",
            micro,
            f"must be 0 (the whole batch) or divide a replica's batch of {per_replica}",
        )
        require(
            not (self.is_data_parallel and self.scaling.equal_time_rounds),
            "scaling.equal-time-rounds",
            True,
            f"is for muloco and diloco: the replicas of {self.method} average their gradients each step, so all take the same steps",
        )
        require(0 <= self.seed < 2**63, "seed", self.seed, "must be an integer from 0 to 2^63 - 1")

    @property
    def is_data_parallel(self) -> bool:
        """Whether replicas average gradients each step and there is no outer step."""
        return self.method.endswith("-dp")

    @property
    def uses_muon(self) -> bool:
        """Whether hidden matrices are trained by Muon."""
        return self.method in ("muloco", "muon-dp")

    @property
    def replica_batch_sequences(self) -> int:
        """Sequences of one inner step of one replica, B / K."""
        return self.batch_sequences // self.scaling.num_replicas

    @property
    def run_name(self) -> str:
        """Name of the run's directory."""
        return self.run.name or f"{self.preset}-{self.method}-k{self.scaling.num_replicas}" + (f"-seed{self.seed}" if self.seed else "")

    def override(self, changes: Mapping[str, Any]) -> TrainConfig:
        """A copy with dotted fields replaced, for example {"outer.lr": 0.5, "seed": 1}; validated like any other.

        Raises ConfigError for a field that does not exist.
        """
        return _override(self, changes, prefix="")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as in config.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` wrote; unknown fields are refused by name."""
        return _from_dict(cls, values, prefix="")

    def differences(self, other: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """Dotted fields in which two configurations differ, with both values."""
        mine, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat.update(flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def _override(record: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    names = [f.name for f in fields(record)]
    nested: dict[str, dict[str, Any]] = {}
    replaced: dict[str, Any] = {}
    for dotted, value in changes.items():
        name, _, rest = dotted.replace("-", "_").partition(".")
        require(name in names, f"{prefix}{dotted}", value, f"no such field; the fields are {', '.join(names)}")
        if rest:
            require(is_dataclass(getattr(record, name)), f"{prefix}{dotted}", value, f"{prefix}{name} has no fields of its own")
            nested.setdefault(name, {})[rest] = value
        else:
            replaced[name] = value
    for name, inner in nested.items():
        replaced[name] = _override(replaced.get(name, getattr(record, name)), inner, f"{prefix}{name}.")
    return dataclasses.replace(record, **replaced)


def _from_dict(cls: Any, values: Mapping[str, Any], prefix: str) -> Any:
    hints = type_hints(cls)
    for name in values:
        require(name in hints, f"{prefix}{name}", values[name], "is no field of this version's configuration")
    built = {name: _from_dict(hints[name], value, f"{prefix}{name}.") if is_dataclass(hints[name]) else value for name, value in values.items()}
    missing = [f.name for f in fields(cls) if f.name not in built and f.default is MISSING and f.default_factory is MISSING]
    require(not missing, f"{prefix}{missing[0]}" if missing else "", None, "is missing from the configuration")
    return cls(**built)
