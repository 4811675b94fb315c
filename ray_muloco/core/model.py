"""The decoder of MuLoCo (arXiv 2505.23725): Llama-style, with a norm after each sub-layer as well as before it.

    x <- x + PostNorm(Attention(PreNorm(x)))        x <- x + PostNorm(FFN(PreNorm(x)))

Full multi-head attention with QK-RMSNorm before the rotary positions, SwiGLU, no biases, a final RMSNorm.

Legend: B batch, T time, N = B T tokens, D model width, H heads, C head_dim, F SwiGLU width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from ray_muloco.config import ModelConfig
from ray_muloco.core.attention import EXPLICIT_MAX_LENGTH, Positions, attend, document_mask, rotary_table, score_bias
from ray_muloco.core.layers import add_rms_norm, norm_project, project, swiglu_project


class RMSNorm(nn.Module):
    """Parameters of a norm, x / sqrt(mean(x^2) + epsilon) * gain: its gain [D], fp32, and epsilon. `layers` computes it."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon


class Attention(nn.Module):
    """Full multi-head attention, causal, with QK norm before the rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.wq = nn.Linear(config.d_model, width, bias=False)
        self.wk = nn.Linear(config.d_model, width, bias=False)
        self.wv = nn.Linear(config.d_model, width, bias=False)
        self.wo = nn.Linear(width, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_dim, config.norm_epsilon)

    def forward(self, x: Tensor, norm: RMSNorm, positions: Positions, dtype: torch.dtype) -> Tensor:
        """The residual stream x [N, D] fp32, normalised by `norm`, to attention's output [N, D] in `dtype`."""
        qkv = norm_project(x, norm.weight, norm.epsilon, (self.wq.weight, self.wk.weight, self.wv.weight), dtype)  # [N, 3 H C]
        return project(attend(qkv, self.q_norm.weight, self.k_norm.weight, self.q_norm.epsilon, positions), self.wo.weight)


class FeedForward(nn.Module):
    """SwiGLU: w3 (silu(w1 x) * w2 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.ffn_dim, config.d_model, bias=False)

    def forward(self, x: Tensor, norm: RMSNorm, dtype: torch.dtype) -> Tensor:
        """The residual stream x [N, D] fp32, normalised by `norm`, to SwiGLU's output [N, D] in `dtype`."""
        gate_and_value = norm_project(x, norm.weight, norm.epsilon, (self.w1.weight, self.w2.weight), dtype)  # [N, 2 F]
        return swiglu_project(gate_and_value, self.w3.weight)


class Block(nn.Module):
    """One decoder block: residual stream [N, D] fp32 in and out, matrix products in `dtype`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, epsilon = config.d_model, config.norm_epsilon
        self.attention_pre_norm = RMSNorm(width, epsilon)
        self.attention = Attention(config)
        self.attention_post_norm = RMSNorm(width, epsilon)
        self.ffn_pre_norm = RMSNorm(width, epsilon)
        self.ffn = FeedForward(config)
        self.ffn_post_norm = RMSNorm(width, epsilon)

    def forward(self, x: Tensor, positions: Positions, dtype: torch.dtype) -> Tensor:
        x = _add_norm(x, self.attention(x, self.attention_pre_norm, positions, dtype), self.attention_post_norm)
        return _add_norm(x, self.ffn(x, self.ffn_pre_norm, dtype), self.ffn_post_norm)


def _add_norm(residual: Tensor, x: Tensor, norm: RMSNorm) -> Tensor:
    return add_rms_norm(residual, x, norm.weight, norm.epsilon)


class Decoder(nn.Module):
    """Token ids to logits, documents packed and attention confined to them.

    The separator opens a document: document_id = cumsum(tokens == separator_id). Without a separator_id a sequence is
    one document. Under autocast the matrix products run in its type; norms, residual stream, logits and loss are fp32.
    """

    def __init__(self, config: ModelConfig, *, separator_id: int | None, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.separator_id, self.activation_checkpointing = config, separator_id, activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = RMSNorm(config.d_model, config.norm_epsilon)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._rotary = rotary_table(config.sequence_length, config.head_dim, config.rope_theta, torch.device("cpu"))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] in fp32 of tokens [B, T] int64."""
        return self._logits(tokens, self._positions(tokens))

    def sequence_nll(self, sequences: Tensor) -> Tensor:
        """Summed nats [B] fp32 of the T predictions in each of sequences [B, T + 1]."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        logits = self._logits(inputs, self._positions(inputs))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).sum(1)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, with torch.compile's arguments; what depends on the tokens' values, the mask, stays outside the graph."""
        self._logits = cast(Any, torch).compile(self._logits, *args, **kwargs)

    def _logits(self, tokens: Tensor, positions: Positions) -> Tensor:
        dtype = _compute_dtype(tokens.device)
        # types are chosen by hand from here on; autocast would only look at every operation again
        with torch.autocast(tokens.device.type, enabled=False):
            x = self.embedding(tokens.flatten())  # [N, D]
            for block in self.blocks:
                if self.activation_checkpointing and torch.is_grad_enabled():
                    x = cast(Tensor, checkpoint(block, x, positions, dtype, use_reentrant=False, preserve_rng_state=False))
                else:
                    x = block(x, positions, dtype)
            logits = norm_project(x, self.final_norm.weight, self.final_norm.epsilon, (self.head.weight,), dtype)
            return logits.float().view(*tokens.shape, -1)

    def _positions(self, tokens: Tensor) -> Positions:
        length, config, dtype = tokens.shape[1], self.config, _compute_dtype(tokens.device)
        if self._rotary.shape[0] < length or self._rotary.device != tokens.device:
            # a table made under inference_mode could not be saved for a later backward pass
            with torch.inference_mode(False):
                self._rotary = rotary_table(max(length, config.sequence_length), config.head_dim, config.rope_theta, tokens.device)
        mask = document_mask(tokens, self.separator_id)
        explicit = dtype is torch.bfloat16 and tokens.device.type == "cpu" and length <= EXPLICIT_MAX_LENGTH
        bias = score_bias(mask, length, config.num_heads, dtype) if explicit else None
        return Positions(self._rotary[:length], mask, bias)


def _compute_dtype(device: torch.device) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else torch.float32


def build_model(config: ModelConfig, *, seed: int, separator_id: int | None, activation_checkpointing: bool = False, device: str = "cpu") -> Decoder:
    """A decoder with its initial weights: a function of config and seed alone, the same on every device and thread count.

    Embedding N(0, 1); wq wk wv w1 std 0.02; wo w2 w3 std 0.02 / sqrt(2 (l + 1)) in block l, counted from 0; head std
    D^(-1/2), redrawn beyond 3 std; gains 1. A tied embedding is drawn as a head is: logits of unit size matter more than
    the scale of a vector that is normalised before its first use. On "meta" nothing is drawn.
    """
    with torch.device("meta"):
        model = Decoder(config, separator_id=separator_id, activation_checkpointing=activation_checkpointing)
    if device == "meta":
        return model
    model.to_empty(device=device)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    initialize_(model, seed)
    return model


@torch.no_grad()
def initialize_(model: Decoder, seed: int) -> None:
    """Draw all weights from a generator of (seed, "init"), on the CPU and in fp64, so that the fp32 values are the same everywhere."""
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/init".encode()).digest()[:8], "big") >> 1)
    head_std = model.config.d_model**-0.5
    if model.embedding.weight is model.head.weight:
        _draw_(model.embedding.weight, head_std, generator, limit=3.0)
    else:
        _draw_(model.embedding.weight, 1.0, generator)
    for depth, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        scaled = 0.02 / math.sqrt(2 * (depth + 1))
        attention, ffn = block.attention, block.ffn
        for linear, std in ((attention.wq, 0.02), (attention.wk, 0.02), (attention.wv, 0.02), (attention.wo, scaled)):
            _draw_(linear.weight, std, generator)
        for linear, std in ((ffn.w1, 0.02), (ffn.w2, scaled), (ffn.w3, scaled)):
            _draw_(linear.weight, std, generator)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
    if model.embedding.weight is not model.head.weight:
        _draw_(model.head.weight, head_std, generator, limit=3.0)


def _draw_(weight: Tensor, std: float, generator: torch.Generator, limit: float = math.inf) -> None:
    """Fill with N(0, std^2), drawn again where beyond `limit` standard deviations."""
    drawn = torch.empty(weight.shape, dtype=torch.float64).normal_(generator=generator)
    while math.isfinite(limit):
        beyond = drawn.abs() > limit
        count = int(beyond.sum())
        if count == 0:
            break
        drawn[beyond] = torch.empty(count, dtype=torch.float64).normal_(generator=generator)
    weight.copy_(drawn.mul_(std))
