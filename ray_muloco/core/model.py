"""The decoder of MuLoCo (arXiv 2505.23725): Llama-style, with a norm after each sub-layer as well as before it.

    x <- x + PostNorm(Attention(PreNorm(x)))        x <- x + PostNorm(FFN(PreNorm(x)))

Full multi-head attention with QK-RMSNorm before the rotary positions, SwiGLU, no biases, a final RMSNorm.

Legend: B batch, T time, D model width, H heads, C head_dim, F SwiGLU width, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ray_muloco.config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * gain over the last dimension; computed in fp32, gain fp32, result in x's type."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.epsilon) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention over [B, T, D] with QK norm and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.wq = nn.Linear(config.d_model, width, bias=False)
        self.wk = nn.Linear(config.d_model, width, bias=False)
        self.wv = nn.Linear(config.d_model, width, bias=False)
        self.wo = nn.Linear(width, config.d_model, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_epsilon)
        self.k_norm = RMSNorm(config.head_dim, config.norm_epsilon)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        heads = (*x.shape[:2], self.num_heads, self.head_dim)
        q, k, v = self.wq(x).view(heads), self.wk(x).view(heads), self.wv(x).view(heads)  # [B, T, H, C]
        q, k = rotate(self.q_norm(q), rotary), rotate(self.k_norm(k), rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, C]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: w3 (silu(w1 x) * w2 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.d_model, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.ffn_dim, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, epsilon = config.d_model, config.norm_epsilon
        self.attention_pre_norm = RMSNorm(width, epsilon)
        self.attention = Attention(config)
        self.attention_post_norm = RMSNorm(width, epsilon)
        self.ffn_pre_norm = RMSNorm(width, epsilon)
        self.ffn = FeedForward(config)
        self.ffn_post_norm = RMSNorm(width, epsilon)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x = x + self.attention_post_norm(self.attention(self.attention_pre_norm(x), rotary, mask))
        return x + self.ffn_post_norm(self.ffn(self.ffn_pre_norm(x)))


class Decoder(nn.Module):
    """Token ids to logits, documents packed and attention confined to them.

    The separator opens a document: document_id = cumsum(tokens == separator_id). Without a separator_id a sequence is
    one document.
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
        self._rotary: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] in fp32 of tokens [B, T] int64."""
        mask = document_mask(tokens, self.separator_id)
        rotary = self._rotary_tables(tokens)
        x = self.embedding(tokens)  # [B, T, D]
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = cast(Tensor, checkpoint(block, x, rotary, mask, use_reentrant=False, preserve_rng_state=False))
            else:
                x = block(x, rotary, mask)
        return self.head(self.final_norm(x)).float()

    def sequence_nll(self, sequences: Tensor) -> Tensor:
        """Summed nats [B] fp32 of the T predictions in each of sequences [B, T + 1]."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        logits = self(inputs)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return nll.view(targets.shape).sum(1)

    def _rotary_tables(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        length = tokens.shape[1]
        if self._rotary is None or self._rotary[0].shape[0] < length or self._rotary[0].device != tokens.device:
            longest = max(length, self.config.sequence_length)
            self._rotary = rotary_tables(longest, self.config.head_dim, self.config.rope_theta, tokens.device)
        cos, sin = self._rotary
        return cos[:length], sin[:length]


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, C] fp32 of the angle t θ^(-2i/C); pair i is (x_i, x_{i + C/2}). Computed in fp64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device=device), theta**-exponents)  # [T, C/2]
    angles = torch.cat((angles, angles), dim=1).unsqueeze(1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on x [B, T, H, C]; computed in fp32, result in x's type."""
    cos, sin = rotary
    first, second = x.float().chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def document_mask(tokens: Tensor, separator_id: int | None) -> Tensor | None:
    """Which positions may see which, bool [B, 1, T, T]: same document, and not later. None where plain causality says the same."""
    if separator_id is None:
        return None
    opens = tokens == separator_id
    # a separator at position 0 opens the document that fills the sequence
    if not bool(opens[:, 1:].any()):
        return None
    document = opens.cumsum(1)
    same = document.unsqueeze(2) == document.unsqueeze(1)  # [B, T, T]
    return same.tril_().unsqueeze(1)


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
