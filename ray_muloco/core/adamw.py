"""AdamW over named parameters: torch's fused kernel on state that exists from construction.

Legend: P parameters of the group (flat, fp32).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ray_muloco.config import InnerConfig


class AdamWGroup:
    """Moments of all members in two flat buffers, one step count a member (a member without gradient does not count).

    Rule (arXiv 1711.05101, torch's form): W <- (1 - η λ) W ; m <- β1 m + (1 - β1) G ; v <- β2 v + (1 - β2) G² ;
    W <- W - η m̂ / (√v̂ + ε), with m̂ and v̂ corrected for the number of steps.
    """

    def __init__(self, members: Sequence[tuple[str, nn.Parameter]], inner: InnerConfig) -> None:
        self.inner = inner
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        self.first_moments = [torch.zeros_like(p, requires_grad=False, memory_format=torch.contiguous_format) for p in self.parameters]
        self.second_moments = [torch.zeros_like(m) for m in self.first_moments]
        self.steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in self.parameters]

    def step(self, lr: float) -> None:
        """One AdamW step at learning rate `lr` on every member that has a gradient."""
        present = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not present:
            return
        adamw(
            [self.parameters[i] for i in present],
            [self.parameters[i].grad for i in present],  # pyright: ignore[reportArgumentType]
            [self.first_moments[i] for i in present],
            [self.second_moments[i] for i in present],
            [],
            [self.steps[i] for i in present],
            fused=True,
            lr=lr,
            beta1=self.inner.adamw_beta1,
            beta2=self.inner.adamw_beta2,
            eps=self.inner.adamw_epsilon,
            weight_decay=self.inner.weight_decay,
            amsgrad=False,
            maximize=False,
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state by name."""
        state: dict[str, Tensor] = {}
        for i, name in enumerate(self.names):
            state[f"adamw.first_moment.{name}"] = self.first_moments[i]
            state[f"adamw.second_moment.{name}"] = self.second_moments[i]
            state[f"adamw.step.{name}"] = self.steps[i]
        return state
