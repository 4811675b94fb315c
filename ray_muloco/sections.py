"""The sections of a configuration: frozen records, each field with its unit and source, validated as they are made.

Standard library only. `config.TrainConfig` puts them together; the checks at the top are shared with it.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ray_muloco.errors import ConfigError


def require(condition: bool, name: str, value: object, allowed: str, remedy: str = "") -> None:
    if not condition:
        raise ConfigError(name, value, allowed, remedy)


type_hints = functools.cache(get_type_hints)


def check_types(record: Any, section: str = "") -> None:
    """Refuse values of another type than the field's before anything compares them; a choice must be one of its words.

    Flags arrive parsed, but values from Python, Tune and config.json do not. True is no number.
    """
    for name, kind in type_hints(type(record)).items():
        value, dotted = getattr(record, name), f"{section}{name.replace('_', '-')}"
        if get_origin(kind) is Literal:
            require(value in get_args(kind), dotted, value, f"must be one of {', '.join(get_args(kind))}")
        elif kind is float:
            require(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value), dotted, value, "must be a finite number")
        else:
            require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), dotted, value, f"must be of type {kind.__name__}")


def check_positive(record: Any, section: str, *names: str) -> None:
    """Refuse values of these fields that are not above 0 (integers: under 1)."""
    for name in names:
        value = getattr(record, name)
        allowed = "must be an integer of at least 1" if type_hints(type(record))[name] is int else "must be a finite number above 0"
        require(value > 0, f"{section}{name.replace('_', '-')}", value, allowed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Decoder of arXiv 2505.23725: Llama-style, norms before and after each sub-layer, QK norm, SwiGLU, untied head."""

    d_model: int
    """Width D of the residual stream."""
    num_layers: int
    """Number of decoder blocks."""
    num_heads: int
    """Attention heads; num_heads * head_dim is the attention width."""
    head_dim: int
    """Width of one head; even, for rotary positions."""
    ffn_dim: int
    """Hidden width of SwiGLU; 2.75 * d_model in the published models."""
    vocab_size: int = 257
    """Ids the tokenizer can produce, the document separator included; 257 for bytes."""
    sequence_length: int = 128
    """Tokens T a sequence."""
    rope_theta: float = 5e5
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-6
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool = False
    """Use the embedding as the output head (the published models do not)."""

    def __post_init__(self) -> None:
        check_types(self, "model.")
        check_positive(self, "model.", "d_model", "num_layers", "num_heads", "head_dim", "ffn_dim", "sequence_length", "norm_epsilon")
        require(self.vocab_size >= 2, "model.vocab-size", self.vocab_size, "must be at least 2")
        require(self.head_dim % 2 == 0, "model.head-dim", self.head_dim, "must be even (rotary positions turn pairs)")
        require(self.rope_theta > 1, "model.rope-theta", self.rope_theta, "must be above 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerConfig:
    """The inner optimizer: Muon for hidden matrices and AdamW for the rest (muloco, muon-dp), or AdamW alone."""

    lr: float = 0.02
    """Peak learning rate η_in, reached at the end of warm-up."""
    weight_decay: float = 0.0
    """Decoupled weight decay λ, multiplied by the scheduled learning rate."""
    warmup_fraction: float = 0.05
    """Share of the token budget over which the learning rate rises linearly."""
    final_lr_fraction: float = 0.1
    """Learning rate at the end of the budget over its peak (cosine in between)."""
    clip_norm: float = 1.0
    """Global gradient norm above which a replica's gradient is scaled down; 0 turns clipping off."""
    momentum: float = 0.9
    """Momentum of Muon: M <- momentum * M + G."""
    nesterov: bool = False
    """Orthogonalise G + momentum * M instead of M (the common Muon setting, then with momentum 0.95)."""
    scaling: Literal["spectral_norm", "rms_norm", "original"] = "spectral_norm"
    """Muon's step size rule: sqrt(out/in), 0.2 sqrt(max(out, in)), or sqrt(max(1, out/in))."""
    coefficients: Literal["muloco", "jordan", "polar_express"] = "muloco"
    """Published coefficient set of the five Newton-Schulz steps."""
    adamw_lr_factor: float = 1.0
    """Learning rate of the AdamW group over lr in Muon runs (tiny models want it below 1)."""
    adamw_beta1: float = 0.9
    """First-moment decay of AdamW."""
    adamw_beta2: float = 0.99
    """Second-moment decay of AdamW."""
    adamw_epsilon: float = 1e-8
    """Epsilon of AdamW."""

    def __post_init__(self) -> None:
        check_types(self, "inner.")
        require(self.lr > 0, "inner.lr", self.lr, "must be a finite number above 0", "for example --inner.lr 0.02")
        require(self.weight_decay >= 0, "inner.weight-decay", self.weight_decay, "must be 0 or more")
        require(0 <= self.warmup_fraction < 1, "inner.warmup-fraction", self.warmup_fraction, "must be in [0, 1)")
        require(0 <= self.final_lr_fraction <= 1, "inner.final-lr-fraction", self.final_lr_fraction, "must be in [0, 1]")
        require(self.clip_norm >= 0, "inner.clip-norm", self.clip_norm, "must be 0 (off) or more")
        for name in ("momentum", "adamw_beta1", "adamw_beta2"):
            require(0 <= getattr(self, name) < 1, f"inner.{name.replace('_', '-')}", getattr(self, name), "must be in [0, 1)")
        check_positive(self, "inner.", "adamw_lr_factor", "adamw_epsilon")


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterConfig:
    """The outer step: SGD with Nesterov momentum on the mean pseudogradient. Ignored by the data-parallel methods."""

    lr: float = 0.7
    """Outer learning rate η_out, constant."""
    momentum: float = 0.6
    """Outer momentum μ, constant; wants to grow with the number of replicas."""

    def __post_init__(self) -> None:
        check_types(self, "outer.")
        require(self.lr > 0, "outer.lr", self.lr, "must be a finite number above 0", "0.7 is a good start")
        require(0 <= self.momentum < 1, "outer.momentum", self.momentum, "must be in [0, 1)", "0.6 is a good start")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where text comes from and how it becomes sequences."""

    source: str = "embedded"
    """`embedded` (the sources of Python's standard library), a path or URI to text, JSONL or Parquet, or prepared shards."""
    validation_source: str = ""
    """A source of its own for validation; empty takes a share of `source` by a hash of each document."""
    validation_fraction: float = 0.05
    """Share of documents kept for validation when there is no validation_source."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json of the tokenizers library."""
    text_column: str = "text"
    """Column (Parquet) or key (JSONL) that holds the text."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        require(bool(self.source.strip()), "data.source", self.source, "must be 'embedded', a path or a URI")
        require(0 < self.validation_fraction < 1, "data.validation-fraction", self.validation_fraction, "must be between 0 and 1, both excluded")
        require(bool(self.tokenizer.strip()), "data.tokenizer", self.tokenizer, "must be 'bytes' or the path of a tokenizer.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How many replicas, on what, and how long the run waits for them."""

    num_replicas: int = 1
    """K: replicas the run is planned for; every rule that names K means this number."""
    min_replicas: int = 0
    """Fewest replicas a round may commit with; 0 means num_replicas, or 1 when max_replicas is set."""
    max_replicas: int = 0
    """Replicas the run grows to as the cluster finds room; 0 means num_replicas."""
    join_inner_state: Literal["donor", "fresh"] = "donor"
    """Inner optimizer state of a joiner: a copy of another replica's, or none (data-parallel methods always copy)."""
    equal_time_rounds: bool = False
    """Give slower replicas fewer inner steps, so that all end a round together; merging is weighted by tokens. Not for data-parallel methods."""
    grace_seconds: float = 0.0
    """In rounds of equal time: once one replica has done its steps, how long the others may go on before they end at the step they are at; 0 waits for all."""
    threads_per_replica: int = 0
    """CPU threads each replica computes with; 0 shares the machine's cores out, at least one each."""
    gpus_per_replica: float = 0.0
    """GPUs Ray reserves for each replica; 0 trains on CPUs."""
    collective: Literal["auto", "gloo", "nccl", "ray-nccl"] = "auto"
    """Backend of the exchange among replicas: the program's own Gloo, its own NCCL group, or Ray's stock NCCL group."""
    placement_timeout_seconds: float = 600.0
    """How long the start waits for min_replicas to be placed before the run gives up."""
    start_grace_seconds: float = 20.0
    """Once min_replicas are placed, how much longer the start waits for the rest of num_replicas."""
    rejoin_timeout_seconds: float = 600.0
    """How long a run with fewer than min_replicas waits for others before it gives up, with a checkpoint."""
    hang_floor_seconds: float = 30.0
    """A replica is never called silent before this many seconds of a phase."""
    hang_factor: float = 5.0
    """A replica is silent after this many times what its steps usually take, by the median of its recent rounds; thrice that while someone is new."""
    first_round_seconds: float = 900.0
    """Deadline of what has no usual length yet: building a replica, the run's first round, kernels that are still being compiled."""
    collective_timeout_seconds: float = 60.0
    """Deadline of one collective operation; what a stopped member can cost the others."""

    def __post_init__(self) -> None:
        check_types(self, "scaling.")
        check_positive(self, "scaling.", "num_replicas", "placement_timeout_seconds", "hang_floor_seconds", "hang_factor")
        check_positive(self, "scaling.", "first_round_seconds", "collective_timeout_seconds")
        for name in ("start_grace_seconds", "rejoin_timeout_seconds", "grace_seconds"):
            require(getattr(self, name) >= 0, f"scaling.{name.replace('_', '-')}", getattr(self, name), "must be 0 or more")
        require(
            0 <= self.min_replicas <= self.num_replicas,
            "scaling.min-replicas",
            self.min_replicas,
            f"must be between 0 (automatic) and scaling.num-replicas, {self.num_replicas}",
        )
        require(
            self.max_replicas == 0 or self.max_replicas >= self.num_replicas,
            "scaling.max-replicas",
            self.max_replicas,
            f"must be 0 (no growth) or at least scaling.num-replicas, {self.num_replicas}",
        )
        require(
            not self.grace_seconds or self.equal_time_rounds,
            "scaling.grace-seconds",
            self.grace_seconds,
            "must be 0 unless rounds are of equal time",
            "set --scaling.equal-time-rounds",
        )
        require(self.threads_per_replica >= 0, "scaling.threads-per-replica", self.threads_per_replica, "must be 0 (automatic) or more")
        require(self.gpus_per_replica >= 0, "scaling.gpus-per-replica", self.gpus_per_replica, "must be 0 or more")

    @property
    def fewest_replicas(self) -> int:
        """Fewest replicas a round may commit with."""
        return self.min_replicas or (1 if self.max_replicas else self.num_replicas)

    @property
    def most_replicas(self) -> int:
        """Replicas the run asks for."""
        return self.max_replicas or self.num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the committed state is written and how much of it stays."""

    every_rounds: int = 10
    """Rounds between checkpoints; the last round is always written."""
    keep: int = 2
    """Complete checkpoints that stay."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint.")
        check_positive(self, "checkpoint.", "every_rounds", "keep")


_RUN_NAME = re.compile(r"(?!(mlflow\.db|mlartifacts)$)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # MLflow's own names lie beside the runs


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What the run is called and where its files lie."""

    name: str = ""
    """Directory of the run below storage_path; empty makes one from preset, method and replicas."""
    storage_path: str = "runs"
    """Directory or pyarrow.fs URI (s3://, gs://) that holds the runs."""
    tracker: Literal["mlflow", "none"] = "mlflow"
    """Where per-round metrics go beside metrics.jsonl."""
    lock_wait_seconds: float = 60.0
    """How long a second writer waits for the run's lock before it gives up."""

    def __post_init__(self) -> None:
        check_types(self, "run.")
        require(
            not self.name or bool(_RUN_NAME.fullmatch(self.name)),
            "run.name",
            self.name,
            "must be 1 to 100 letters, digits, '.', '_' or '-' and begin with a letter or digit",
            "a name is one directory below run.storage-path",
        )
        require(bool(self.storage_path.strip()), "run.storage-path", self.storage_path, "must be a directory or a URI")
        require(self.lock_wait_seconds >= 0, "run.lock-wait-seconds", self.lock_wait_seconds, "must be 0 or more")
