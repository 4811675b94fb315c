"""A replica: one copy of the model with its inner loop.

It holds θ, the last committed parameters, and θ_k, its own, which H inner steps move away from θ. Between commits it
reads nothing but its plan. Inner optimizer state stays here: never reset by a commit, never averaged, never sent.

Legend: B sequences a step, T tokens a sequence, P parameters (flat, fp32).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.core.model import build_model
from ray_muloco.core.muon import build_inner_optimizer
from ray_muloco.core.params import digest, flatten_parameters_
from ray_muloco.core.schedules import lr_factor
from ray_muloco.data.dataset import Dataset
from ray_muloco.data.sampler import SampleOrder
from ray_muloco.training.evaluate import sequence_losses
from ray_muloco.training.plan import ReplicaReport, SampleRange, SegmentPlan

NORM_CHUNK_ELEMENTS = 1 << 20


def sample_indices(ranges: Sequence[SampleRange]) -> np.ndarray:
    """The indices of all ranges, in order, int64."""
    return np.concatenate([np.arange(r.start, r.stop, dtype=np.int64) for r in ranges])


def squared_distance(a: Tensor, b: Tensor) -> float:
    """Squared norm of a - b for flat tensors, summed in fp64 chunk by chunk; not finite when any element is not."""
    total = 0.0
    for begin in range(0, a.numel(), NORM_CHUNK_ELEMENTS):
        part = slice(begin, begin + NORM_CHUNK_ELEMENTS)
        total += float(torch.linalg.vector_norm(a[part] - b[part], dtype=torch.float64)) ** 2
    return total


class Replica:
    """Model, inner optimizer and data of one replica on one device.

    theta: flat fp32 [P], the last committed global parameters; `flat`: flat fp32 [P], the model's own parameters.
    """

    def __init__(self, config: TrainConfig, replica_id: int, dataset: Dataset, device: str = "cpu") -> None:
        self.config, self.replica_id, self.device = config, replica_id, torch.device(device)
        self.dataset = dataset
        self.model = build_model(
            config.model,
            seed=config.seed,
            separator_id=dataset.tokenizer.separator_id,
            activation_checkpointing=config.activation_checkpointing,
            device=device,
        )
        self.layout, self.flat = flatten_parameters_(self.model)
        self.theta = self.flat.clone()
        self.compute_dtype = torch.bfloat16 if config.compute_dtype == "bf16" else torch.float32
        self.optimizer = build_inner_optimizer(self.model, uses_muon=config.uses_muon, inner=config.inner, compute_dtype=self.compute_dtype)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.order = SampleOrder(config.seed, dataset.train.num_sequences(config.model.sequence_length))
        if config.compile:
            self.model.compile()
        self.sequence_nll = self.model.sequence_nll
        self.flat_grad: Tensor | None = None
        self._rollback: dict[str, Tensor] = {}
        if config.is_data_parallel:
            self._share_gradients()
        self._report: ReplicaReport | None = None
        self._first_step_time = 0.0
        self._cut_short = threading.Event()

    # ---- inner phase

    def run_inner(self, plan: SegmentPlan, average_: Callable[[Tensor], None] | None = None) -> ReplicaReport:
        """Take the plan's inner steps; `average_` replaces the flat gradient by its mean over replicas (data-parallel)."""
        for _ in self.inner_steps(plan):
            if average_ is not None:
                assert self.flat_grad is not None
                average_(self.flat_grad)
        return self.report()

    def inner_steps(self, plan: SegmentPlan) -> Iterator[None]:
        """The inner loop; pauses once a step, when the gradient is there and not yet clipped.

        Whoever drives it may change the gradients in place: that is all the data-parallel methods need.
        """
        begin = time.perf_counter()
        self._cut_short.clear()
        if self.config.is_data_parallel:
            self._rollback = {name: tensor.clone() for name, tensor in self.optimizer.state_tensors().items()}
        sequences = self.order.sequence_indices(sample_indices(plan.ranges))
        losses, norms, lr = [], [], 0.0
        for step in range(plan.num_steps):
            batch = sequences[step * plan.batch_sequences : (step + 1) * plan.batch_sequences]
            losses.append(self._backward(batch))
            yield
            norms.append(self._clip())
            lr = self.config.inner.lr * lr_factor(
                plan.progress(step), warmup_fraction=self.config.inner.warmup_fraction, final_fraction=self.config.inner.final_lr_fraction
            )
            self.optimizer.step(lr)
            self._zero_gradients()
            if not self._first_step_time:
                self._first_step_time = time.time()
            if self._cut_short.is_set():
                break
        self._report = ReplicaReport(
            replica_id=self.replica_id,
            round_number=plan.round_number,
            generation=plan.generation,
            num_steps=len(norms),
            tokens=len(norms) * plan.batch_sequences * self.config.model.sequence_length,
            train_loss=float(torch.stack(losses).double().mean()),
            squared_norm=squared_distance(self.theta, self.flat),
            grad_norm=float(torch.stack(norms).double().mean()),
            inner_lr=lr,
            seconds=time.perf_counter() - begin,
            first_step_time=self._first_step_time,
            digest=digest(self.flat) if self.config.is_data_parallel else None,
        )

    def cut_short(self) -> None:
        """End the inner phase that is going on after the step it is at; called from another thread."""
        self._cut_short.set()

    def report(self) -> ReplicaReport:
        """What the last inner phase came to."""
        assert self._report is not None, "report() before inner_steps() was driven to its end"
        return self._report

    def _backward(self, sequence_numbers: np.ndarray) -> Tensor:
        """Accumulate the gradient of the mean loss over these sequences; returns that loss in nats a token."""
        length = self.config.model.sequence_length
        micro = self.config.micro_batch_sequences or len(sequence_numbers)
        total = torch.zeros((), device=self.device)
        for begin in range(0, len(sequence_numbers), micro):
            batch = self.dataset.train.batch(sequence_numbers[begin : begin + micro], length)
            sequences = torch.from_numpy(batch).to(self.device)  # [B, T+1]
            with self._autocast():
                loss = self.sequence_nll(sequences).sum() / (len(sequence_numbers) * length)
            loss.backward()
            total += loss.detach()
        return total

    def _clip(self) -> Tensor:
        """Scale the gradient to at most clip_norm; returns its norm before."""
        clip = self.config.inner.clip_norm
        return torch.nn.utils.clip_grad_norm_(self.parameters, clip if clip else math.inf, foreach=True)

    def _autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.compute_dtype is torch.bfloat16)

    def _share_gradients(self) -> None:
        """Let every p.grad be a view of one flat buffer, which the replicas average in one go."""
        self.flat_grad = torch.zeros_like(self.flat)
        views = self.layout.views(self.flat_grad)
        for name, parameter in self.model.named_parameters():
            if name in views:
                parameter.grad = views[name]

    def _zero_gradients(self) -> None:
        if self.flat_grad is not None:
            self.flat_grad.zero_()
        else:
            self.optimizer.zero_grad()

    # ---- around a commit

    def adopt(self) -> None:
        """Begin from θ: θ_k ← θ. Inner state stays, and is what the next round begins with."""
        self.flat.copy_(self.theta)
        self._zero_gradients()
        self._rollback = {}

    def roll_back(self) -> None:
        """Undo an inner phase that cannot commit: θ_k ← θ, and for data-parallel methods inner state of the round's start."""
        if self._rollback:
            self.optimizer.load_state_tensors(self._rollback)
        self.adopt()

    def reset_inner_state(self) -> None:
        """Forget the inner optimizer's state, which a pseudogradient that was not finite has spoilt."""
        self.optimizer.reset()
        self._rollback = {}

    # ---- evaluation and checkpoints

    def evaluate(self, sequence_numbers: Sequence[int]) -> dict[int, tuple[float, int]]:
        """Nats and bytes of each validation sequence under θ, which the model holds after `adopt`."""
        return sequence_losses(
            self.model, self.dataset.validation, self.dataset.tokenizer.token_num_bytes, sequence_numbers,
            length=self.config.model.sequence_length, device=self.device, autocast=self._autocast,
        )  # fmt: skip

    def state_tensors(self) -> dict[str, Tensor]:
        """The replica's part of a checkpoint: its inner optimizer's state, copied, on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.optimizer.state_tensors().items()}

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state_tensors` gave, exactly."""
        self.optimizer.load_state_tensors(tensors)
        self._rollback = {}
