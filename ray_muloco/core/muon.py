"""The inner optimizer: Muon for hidden matrices, AdamW for everything else.

Matrices of one shape are stacked: their momentum lies in one buffer and all of them are orthogonalised by the same few
batched products, which is what makes small models fast.

Legend: n matrices of one shape, M×N each (M fan_out, N fan_in).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ray_muloco.config import InnerConfig
from ray_muloco.core.adamw import AdamWGroup
from ray_muloco.core.labels import Label, label_parameters, matrix_shape
from ray_muloco.core.newton_schulz import Workspace, coefficient_set, newton_schulz, orthogonalize
from ray_muloco.errors import ConfigError

__all__ = ["InnerOptimizer", "build_inner_optimizer", "label_parameters", "newton_schulz", "update_scale"]

# Matrices are orthogonalised in chunks of so many elements (a larger matrix is a chunk of its own): this bounds the workspace.
# A CPU wants a chunk to stay in its caches from step to step, an accelerator wants enough work for one launch.
CHUNK_ELEMENTS_CPU = 1 << 18
CHUNK_ELEMENTS_ACCELERATOR = 1 << 23


def update_scale(scaling: str, fan_out: int, fan_in: int) -> float:
    """Factor s on an orthogonalised update of a fan_out × fan_in matrix.

    "spectral_norm": √(fan_out / fan_in), equal feature learning at every width (arXiv 2310.17813);
    "rms_norm": 0.2 √max(fan_out, fan_in), the root mean square of an AdamW update (arXiv 2502.16982);
    "original": √max(1, fan_out / fan_in), Jordan's rule. A rate η of one rule is η s / s' of another.
    Raises ConfigError for any other name.
    """
    if scaling == "spectral_norm":
        return math.sqrt(fan_out / fan_in)
    if scaling == "rms_norm":
        return 0.2 * math.sqrt(max(fan_out, fan_in))
    if scaling == "original":
        return math.sqrt(max(1.0, fan_out / fan_in))
    raise ConfigError("inner.scaling", scaling, "must be one of spectral_norm, rms_norm, original")


class MuonStack:
    """Muon on matrices of one shape.

    Rule: M <- μ M + G ; O = NS(M), or NS(G + μ M) with Nesterov ; W <- (1 - η λ) W ; W <- W - η s O.
    Weights of three or more dimensions are their [fan_out, fan_in] matrices throughout. Source: arXiv 2505.23725.
    """

    def __init__(self, members: Sequence[tuple[str, nn.Parameter]], inner: InnerConfig, compute_dtype: torch.dtype) -> None:
        self.names = [name for name, _ in members]
        self.parameters = [parameter for _, parameter in members]
        self.inner, self.coefficients = inner, coefficient_set(inner.coefficients)
        first = self.parameters[0]
        self.shape = matrix_shape(tuple(first.shape))
        self.scale = update_scale(inner.scaling, *self.shape)
        self.momentum = torch.zeros(len(members), *self.shape, dtype=torch.float32, device=first.device)  # [n, M, N]
        self.momenta = list(self.momentum)
        chunk_elements = CHUNK_ELEMENTS_CPU if first.device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
        self.chunk = min(len(members), max(1, chunk_elements // math.prod(self.shape)))
        self.workspace = Workspace(self.chunk, self.shape, compute_dtype, first.device)

    def step(self, lr: float) -> None:
        """One Muon step at learning rate `lr` on every member that has a gradient."""
        present = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        for begin in range(0, len(present), self.chunk):
            self._step_chunk(present[begin : begin + self.chunk], lr)

    def _step_chunk(self, present: Sequence[int], lr: float) -> None:
        updates = orthogonalize(self._directions(present), self.coefficients, self.workspace)
        if updates.dtype is not torch.float32:  # one conversion for all rather than one inside each addition
            updates = self.workspace.scaled[: len(present)].copy_(updates)
        keep, rate = 1.0 - lr * self.inner.weight_decay, -lr * self.scale
        for i, update in zip(present, updates.unbind(), strict=True):
            parameter = self.parameters[i]
            if self.inner.weight_decay:
                parameter.mul_(keep)
            parameter.add_(update.view(parameter.shape), alpha=rate)

    def _directions(self, present: Sequence[int]) -> Tensor:
        """Take the gradients into the momentum; returns what is to be orthogonalised, fp32 [n, M, N]."""
        mu, directions = self.inner.momentum, self.workspace.scaled[: len(present)]
        for row, i in enumerate(present):
            gradient, momentum = cast(Tensor, self.parameters[i].grad).reshape(self.shape), self.momenta[i]
            torch.add(gradient, momentum, alpha=mu, out=momentum)  # one pass over both
            if self.inner.nesterov:
                torch.add(gradient, momentum, alpha=mu, out=directions[row])
        if self.inner.nesterov:
            return directions
        first, last = present[0], present[-1]
        if last - first + 1 == len(present):  # nobody is missing: no copy
            return self.momentum[first : last + 1]
        return torch.stack([self.momenta[i] for i in present], out=directions)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live state by name."""
        return {f"muon.momentum.{name}": self.momenta[i].view(self.parameters[i].shape) for i, name in enumerate(self.names)}


class InnerOptimizer:
    """Muon and AdamW over the parameters of one replica; reads p.grad, changes parameters in place, never a gradient.

    A parameter without gradient is left alone: no decay, no momentum, no step count. All state exists from construction and
    is fp32. The two groups share the scheduled learning rate, AdamW's times `adamw_lr_factor`, and the weight decay.

    named_parameters: (name, parameter) pairs; frozen parameters are passed over. labels: "muon" or "adamw" by name.
    compute_dtype: fp32 or bf16, type of the Newton-Schulz products. Raises ValueError for a trainable parameter that is
    listed twice, has no label or is not fp32.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        labels: Mapping[str, Label],
        inner: InnerConfig,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        self.inner = inner
        stacks: dict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = {}
        rest: list[tuple[str, nn.Parameter]] = []
        seen: set[int] = set()
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            _check(name, parameter, labels, seen)
            if labels[name] == "muon":
                stacks.setdefault((matrix_shape(tuple(parameter.shape)), parameter.device), []).append((name, parameter))
            else:
                rest.append((name, parameter))
        self.muon = [MuonStack(members, inner, compute_dtype) for members in stacks.values()]
        self.adamw = AdamWGroup(rest, inner)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One step at the scheduled learning rate η_in."""
        for stack in self.muon:
            stack.step(lr)
        self.adamw.step(lr * self.inner.adamw_lr_factor)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for group in (*self.muon, self.adamw):
            for parameter in group.parameters:
                parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """All state by name, live: momentum and moments (fp32, in the parameter's shape) and step counts (fp32 scalars)."""
        state: dict[str, Tensor] = {}
        for group in (*self.muon, self.adamw):
            state.update(group.state_tensors())
        return state

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a saved state in, exactly. Raises ValueError when names or shapes are not those of this optimizer."""
        state = self.state_tensors()
        if state.keys() != tensors.keys():
            odd = sorted(state.keys() ^ tensors.keys())
            raise ValueError(f"optimizer state does not fit: {len(odd)} names are on one side only, {odd[0]} first")
        for name, tensor in state.items():
            if tensor.shape != tensors[name].shape:
                raise ValueError(f"optimizer state {name} has shape {list(tensors[name].shape)}: it must be {list(tensor.shape)}")
        for name, tensor in state.items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def reset(self) -> None:
        """Back to the state at construction."""
        for tensor in self.state_tensors().values():
            tensor.zero_()


def _check(name: str, parameter: nn.Parameter, labels: Mapping[str, Label], seen: set[int]) -> None:
    if id(parameter) in seen:
        raise ValueError(f"parameter {name} is listed twice: a tied parameter would be stepped twice")
    if name not in labels:
        raise ValueError(f"parameter {name} has no label: it would not be trained")
    if parameter.dtype is not torch.float32:
        raise ValueError(f"parameter {name} is {parameter.dtype}: master weights must be torch.float32")
    seen.add(id(parameter))


def build_inner_optimizer(model: nn.Module, *, uses_muon: bool, inner: InnerConfig, compute_dtype: torch.dtype) -> InnerOptimizer:
    """The inner optimizer of a method: Muon with AdamW beside it, or AdamW on everything (at `inner.lr`, factor 1)."""
    labels: dict[str, Label] = label_parameters(model)
    if not uses_muon:
        labels = dict.fromkeys(labels, "adamw")
        inner = dataclasses.replace(inner, adamw_lr_factor=1.0)
    return InnerOptimizer(model.named_parameters(), labels, inner, compute_dtype=compute_dtype)
