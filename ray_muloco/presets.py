"""Presets: functions that return a complete configuration. Standard library only.

Four byte-level scales for laptops and tests, and the six published scales of arXiv 2505.23725 (models.csv of its tables;
their optimizer settings are the published ones where published). The budget is 20 tokens a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ray_muloco.config import METHODS, InnerConfig, Method, ModelConfig, OuterConfig, ScalingConfig, TrainConfig
from ray_muloco.errors import ConfigError

TOKENS_PER_PARAMETER = 20


def num_params(model: ModelConfig) -> int:
    """Trainable parameters of the decoder, exactly: blocks, norms, embedding, head.

    A block holds wq wk wv wo, the three SwiGLU matrices, four RMSNorm gains over D and two over head_dim (QK norm).
    """
    attention = 4 * model.d_model * model.num_heads * model.head_dim
    ffn = 3 * model.d_model * model.ffn_dim
    gains = 4 * model.d_model + 2 * model.head_dim
    embeddings = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2)
    return model.num_layers * (attention + ffn + gains) + model.d_model + embeddings


class _Shape(NamedTuple):
    d_model: int
    num_layers: int
    num_heads: int
    head_dim: int
    vocab_size: int
    sequence_length: int

    def model(self) -> ModelConfig:
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            ffn_dim=self.d_model * 11 // 4,
            vocab_size=self.vocab_size,
            sequence_length=self.sequence_length,
        )


BYTE_VOCABULARY = 257  # 256 bytes and the document separator
PUBLISHED_VOCABULARY = 128_256
_BYTE_SHAPES = {
    "nano": _Shape(48, 3, 3, 16, BYTE_VOCABULARY, 128),
    "tiny": _Shape(96, 4, 3, 32, BYTE_VOCABULARY, 128),
    "mini": _Shape(160, 6, 5, 32, BYTE_VOCABULARY, 256),
    "small": _Shape(320, 8, 5, 64, BYTE_VOCABULARY, 256),
}
# the published budgets in steps of 512 sequences of 2048 tokens: 20.0 to 20.5 tokens a parameter
_PUBLISHED_STEPS = {"150M": 2880, "416M": 8160, "914M": 17520, "1.76B": 33600, "3.1B": 58560, "15B": 290640}
_MULTIPLIERS = {"150M": 1, "416M": 2, "914M": 3, "1.76B": 4, "3.1B": 5, "15B": 9}
# λ_base of the published weight decay rule λ = λ_base (B / 512) / K, for Muon and for AdamW
_DECAY_BASES = {"150M": (0.01, 0.001), "416M": (0.01, 0.01), "914M": (0.01, 0.01), "1.76B": (0.001, 0.001), "3.1B": (0.001, 0.001), "15B": (1e-4, 1e-4)}
_PUBLISHED_WARMUP_STEPS = 500


def nano(method: Method = "muloco", replicas: int = 1) -> TrainConfig:
    """0.1 million parameters, bytes: seconds a run, for tests."""
    return _byte_level("nano", method, replicas)


def tiny(method: Method = "muloco", replicas: int = 1) -> TrainConfig:
    """0.5 million parameters, bytes: a minute or two a run."""
    return _byte_level("tiny", method, replicas)


def mini(method: Method = "muloco", replicas: int = 1) -> TrainConfig:
    """2 million parameters, bytes: for a laptop."""
    return _byte_level("mini", method, replicas)


def small(method: Method = "muloco", replicas: int = 1) -> TrainConfig:
    """10 million parameters, bytes: for a laptop overnight, or one accelerator."""
    return _byte_level("small", method, replicas)


def published(name: str, method: Method = "muloco", replicas: int = 1) -> TrainConfig:
    """A published scale: width 512 m, depth 6 m, heads 4 m of 128 (arXiv 2505.23725).

    Expects the Llama 3 tokenizer's 128,256 ids: pass its file as data.tokenizer.
    """
    m = _MULTIPLIERS[name]
    model = _Shape(512 * m, 6 * m, 4 * m, 128, PUBLISHED_VOCABULARY, 2048).model()
    batch = max(512, replicas)
    budget = _PUBLISHED_STEPS[name] * 512 * model.sequence_length
    muon = method.startswith("mu")
    k = 1 if method.endswith("-dp") else replicas
    decay = _DECAY_BASES[name][0 if muon else 1] * (batch / 512) / k
    steps = budget / (batch * model.sequence_length)
    lr = 0.0442 / math.sqrt(2) ** (m - 2) if muon else 0.003906 / math.sqrt(2) ** (m - 2)
    inner = InnerConfig(lr=lr, weight_decay=decay, warmup_fraction=min(0.5, _PUBLISHED_WARMUP_STEPS / steps))
    outer = OuterConfig(lr=0.9 if replicas > 1 else 0.7, momentum=(0.6 if replicas < 4 else 0.8) if muon else (0.8 if replicas < 8 else 0.9))
    return TrainConfig(
        preset=name, method=method, model=model, inner=inner, outer=outer, scaling=ScalingConfig(num_replicas=replicas),
        budget_tokens=budget, batch_sequences=batch, sync_interval=30, validation_tokens=2_097_152,
    )  # fmt: skip


def _byte_level(name: str, method: Method, replicas: int) -> TrainConfig:
    model = _BYTE_SHAPES[name].model()
    muon = method.startswith("mu")
    inner = InnerConfig(lr=0.02 if muon else 0.002, adamw_lr_factor=0.25)
    outer = OuterConfig(lr=0.7, momentum=0.3 if replicas <= 4 else 0.5)
    return TrainConfig(
        preset=name, method=method, model=model, inner=inner, outer=outer, scaling=ScalingConfig(num_replicas=replicas),
        budget_tokens=TOKENS_PER_PARAMETER * num_params(model), batch_sequences=math.ceil(32 / replicas) * replicas, sync_interval=15,
    )  # fmt: skip


PRESETS: dict[str, Callable[[Method, int], TrainConfig]] = {
    "nano": nano,
    "tiny": tiny,
    "mini": mini,
    "small": small,
    **{name: (lambda method="muloco", replicas=1, name=name: published(name, method, replicas)) for name in _MULTIPLIERS},
}


def get(name: str, method: Method = "muloco", replicas: int = 1) -> TrainConfig:
    """The preset of that name for a method and a number of replicas; ConfigError names the presets there are."""
    if name not in PRESETS:
        raise ConfigError("PRESET", name, f"must be one of {', '.join(PRESETS)}")
    if method not in METHODS:
        raise ConfigError("method", method, f"must be one of {', '.join(METHODS)}")
    if replicas < 1:
        raise ConfigError("scaling.num-replicas", replicas, "must be an integer of at least 1")
    return PRESETS[name](method, replicas)
