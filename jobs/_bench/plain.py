"""The plainest correct fp32 training loop in PyTorch: what anyone would write first, and the baseline of most cases.

The model is that of ray_muloco.core.model, written again with torch's own parts and no thought of speed; `check_same_model`
holds the two against each other before anything is timed.

Legend: B sequences, T tokens a sequence, D width, H heads, C head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_muloco.config import ModelConfig, TrainConfig


class PlainBlock(nn.Module):
    """Attention and SwiGLU, each between two norms."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, width, epsilon = config.d_model, config.num_heads * config.head_dim, config.norm_epsilon
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.norm1 = nn.RMSNorm(d, eps=epsilon)
        self.wq, self.wk, self.wv = (nn.Linear(d, width, bias=False) for _ in range(3))
        self.wo = nn.Linear(width, d, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=epsilon) for _ in range(2))
        self.norm2 = nn.RMSNorm(d, eps=epsilon)
        self.norm3 = nn.RMSNorm(d, eps=epsilon)
        self.w1, self.w2 = (nn.Linear(d, config.ffn_dim, bias=False) for _ in range(2))
        self.w3 = nn.Linear(config.ffn_dim, d, bias=False)
        self.norm4 = nn.RMSNorm(d, eps=epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (linear(y).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        q, k = turn(self.q_norm(q), cos, sin), turn(self.k_norm(k), cos, sin)  # [B, H, T, C]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.norm2(self.wo(y.transpose(1, 2).reshape(batch, length, -1)))
        y = self.norm3(x)
        return x + self.norm4(self.w3(F.silu(self.w1(y)) * self.w2(y)))


class PlainDecoder(nn.Module):
    """Token ids [B, T] to the mean loss of predicting targets [B, T], in nats a token."""

    def __init__(self, config: ModelConfig, separator_id: int) -> None:
        super().__init__()
        self.separator_id = separator_id
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.d_model, eps=config.norm_epsilon)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.sequence_length), frequencies).repeat_interleave(2, dim=1)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [T, C]
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        mask = None
        separators = tokens == self.separator_id
        if separators[:, 1:].any():
            document = separators.cumsum(1)
            mask = (document[:, None, :, None] == document[:, None, None, :]).tril()  # [B, 1, T, T]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, mask)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def hidden_matrices(self) -> list[nn.Parameter]:
        """What Muon trains."""
        return [p for p in self.blocks.parameters() if p.ndim == 2]

    def other_parameters(self) -> list[nn.Parameter]:
        """What AdamW trains beside it."""
        hidden = {id(p) for p in self.hidden_matrices()}
        return [p for p in self.parameters() if id(p) not in hidden]


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [B, H, T, C]: the pairs (x_2i, x_2i+1) turn."""
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


def plain_optimizers(model: PlainDecoder, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """torch's own Muon and AdamW with this run's settings, or AdamW alone."""
    adamw = {"betas": (config.inner.adamw_beta1, config.inner.adamw_beta2), "weight_decay": config.inner.weight_decay}
    if not config.uses_muon:
        return [torch.optim.AdamW(model.parameters(), lr=config.inner.lr, **adamw)]
    muon = torch.optim.Muon(
        model.hidden_matrices(), lr=config.inner.lr, weight_decay=config.inner.weight_decay, momentum=config.inner.momentum, nesterov=config.inner.nesterov
    )
    return [muon, torch.optim.AdamW(model.other_parameters(), lr=config.inner.lr * config.inner.adamw_lr_factor, **adamw)]


def plain_batches(tokens: np.ndarray, sequence_length: int, batch_sequences: int, seed: int) -> Iterator[Tensor]:
    """Shuffled batches [B, T + 1] without end, from a stream of tokens held in memory."""
    generator = np.random.default_rng(seed)
    num_sequences = (len(tokens) - 1) // sequence_length
    while True:
        order = generator.permutation(num_sequences)
        for begin in range(0, num_sequences - batch_sequences + 1, batch_sequences):
            rows = [tokens[s * sequence_length : (s + 1) * sequence_length + 1] for s in order[begin : begin + batch_sequences]]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


def plain_step(forward: Callable[[Tensor, Tensor], Tensor], model: PlainDecoder, optimizers: list[torch.optim.Optimizer], batch: Tensor, clip: float) -> None:
    """One training step on a batch [B, T + 1]; forward: the model itself, or what wraps it."""
    loss = forward(batch[:, :-1], batch[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def plain_twin(model: nn.Module, config: ModelConfig, separator_id: int) -> PlainDecoder:
    """A plain decoder with the weights of a ray_muloco Decoder."""
    twin = PlainDecoder(config, separator_id)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return twin


def check_same_model(model: nn.Module, twin: PlainDecoder, batch: Tensor) -> None:
    """Refuse to time two different functions: both losses on a batch [B, T + 1] in fp32 must agree to rounding."""
    with torch.no_grad():
        theirs = float(twin(batch[:, :-1], batch[:, 1:]))
        mine = float(model.sequence_nll(batch).sum()) / batch[:, 1:].numel()  # pyright: ignore[reportCallIssue]
    if not abs(mine - theirs) <= 1e-4 * abs(theirs):
        raise AssertionError(f"the baseline is another model: its loss is {theirs:.6f}, ours {mine:.6f}")
