"""Replicas as the training loop sees them, and the member that keeps them all in this process.

`ReplicaGroup` is the seam: the loop is written once over it. `LocalGroup` runs the replicas one after another, for tests,
debugging and reading; `runtime.group.RayGroup` runs them as actors. Both follow the same phases and count the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.core.outer import pseudogradient_
from ray_muloco.core.params import digest
from ray_muloco.data.dataset import Dataset
from ray_muloco.training.checkpoint import FileRecord, write_tensors
from ray_muloco.training.membership import Census, Changes
from ray_muloco.training.metrics import Traffic
from ray_muloco.training.plan import ReplicaReport, SegmentPlan
from ray_muloco.training.replica import Replica

BYTES_PER_ELEMENT = 4


@dataclass(frozen=True, slots=True)
class InnerOutcome:
    """What an inner phase brought back: a report or a cause of loss for every replica that was asked."""

    reports: Mapping[int, ReplicaReport]
    lost: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExchangeOutcome:
    """Whose contributions are in the merged buffer, and who was lost on the way."""

    merged: tuple[int, ...]
    lost: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """Digest of θ as each replica received it, and who was lost on the way."""

    digests: Mapping[int, int]
    lost: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointTarget:
    """Where the replicas' files of one checkpoint go."""

    location: str
    name: str
    staging_dir: str


class ReplicaGroup(Protocol):
    """A changing set of replicas. `generation` numbers the membership; every method acts on the living ones."""

    generation: int
    traffic: Traffic

    @property
    def alive(self) -> tuple[int, ...]:
        """Ids of the living replicas, ascending."""
        ...

    def start(self, config: TrainConfig, generation: int, inner_states: Mapping[int, Callable[[], dict[str, Tensor]]]) -> None:
        """Make the replicas and give each its inner state (a function that reads it), where there is one."""
        ...

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        """Every planned replica's inner phase, in parallel where the group can."""
        ...

    def exchange(self, weights: Mapping[int, float], out: Tensor) -> ExchangeOutcome:
        """out <- Σ w_k Δ_k over the replicas named in weights (data-parallel: the lowest one's parameters).

        Always a fresh sum over those that are left; nothing else moves.
        """
        ...

    def publish(self, theta: Tensor) -> PublishOutcome:
        """Give every living replica θ to begin from. What one receives first is counted as healing, not as downlink."""
        ...

    def roll_back(self) -> None:
        """Every living replica forgets an inner phase that will not commit."""
        ...

    def heal(self, replica_ids: Sequence[int]) -> None:
        """Give these replicas an inner state as a joiner gets it: a copy of another's, or a new one.

        Nothing for data-parallel methods, whose replicas were rolled back to the state of the round's start.
        """
        ...

    def eject(self, replica_ids: Sequence[int]) -> None:
        """Let these replicas go; the survivors form a new generation."""
        ...

    def regroup(self, wait_seconds: float = 0.0) -> Changes:
        """At a boundary: let joiners in that are ready (θ reaches them by `publish`), ask for replicas that are missing.

        wait_seconds: how long to wait for news when there is nothing else to do.
        """
        ...

    def census(self) -> Census:
        """How many replicas are alive, healing and pending."""
        ...

    def evaluate(self, shares: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
        """Nats and bytes of validation sequences by number; shares says which replica is to measure which."""
        ...

    def save(self, target: CheckpointTarget) -> Callable[[], dict[int, FileRecord]]:
        """Copy every replica's state now, write it beside the training; the function returned waits for the files."""
        ...

    def close(self) -> None:
        """End the replicas and give back all they hold."""
        ...


def replica_file(replica_id: int) -> str:
    """File of a checkpoint that holds a replica's inner state."""
    return f"replica-{replica_id}.safetensors"


def copies_inner_state(config: TrainConfig) -> bool:
    """Whether a joiner's inner state is a copy: always for data-parallel methods, whose replicas are one model."""
    return config.is_data_parallel or config.scaling.join_inner_state == "donor"


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def inner_phase_traffic(config: TrainConfig, traffic: Traffic, num_params: int, num_replicas: int, num_steps: int) -> None:
    """Count what data-parallel replicas exchange each step: a gradient up and its mean down, unless there is one replica."""
    if config.is_data_parallel and num_replicas > 1:
        payload = BYTES_PER_ELEMENT * num_params * num_replicas * num_steps
        traffic.uplink_bytes += payload
        traffic.downlink_bytes += payload


class LocalGroup:
    """All replicas in this process, one after another; sums run in order of replica id."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.generation = 0
        self.traffic = Traffic()
        self.replicas: dict[int, Replica] = {}
        self._unhealed: set[int] = set()
        self._next_id = 0

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self.replicas))

    def start(self, config: TrainConfig, generation: int, inner_states: Mapping[int, Callable[[], dict[str, Tensor]]]) -> None:
        self.config, self.generation = config, generation
        for replica_id in range(config.scaling.num_replicas):
            self._add(inner_states[replica_id]() if replica_id in inner_states else None)

    def _add(self, inner_state: dict[str, Tensor] | None) -> int:
        replica_id = self._next_id
        self._next_id += 1
        self.replicas[replica_id] = Replica(self.config, replica_id, self.dataset)
        self._unhealed.add(replica_id)
        if inner_state is not None:
            self.replicas[replica_id].load_state_tensors(inner_state)
        return replica_id

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        runs = {k: self.replicas[k].inner_steps(plans[k]) for k in sorted(plans)}
        if self.config.is_data_parallel:
            for _ in zip(*runs.values(), strict=True):  # all replicas have their gradients of one step
                self._average_gradients(sorted(runs))
        else:
            for steps in runs.values():
                for _ in steps:
                    pass
        first = next(iter(plans.values()))
        inner_phase_traffic(self.config, self.traffic, self._num_params, len(runs), first.num_steps)
        return InnerOutcome({k: self.replicas[k].report() for k in runs})

    def _average_gradients(self, replica_ids: Sequence[int]) -> None:
        gradients = [g for k in replica_ids if (g := self.replicas[k].flat_grad) is not None]
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total += gradient
        total /= len(gradients)
        for gradient in gradients:
            gradient.copy_(total)

    def exchange(self, weights: Mapping[int, float], out: Tensor) -> ExchangeOutcome:
        merged = tuple(sorted(weights))
        if self.config.is_data_parallel:
            out.copy_(self.replicas[merged[0]].flat)
            self.traffic.uplink_bytes += BYTES_PER_ELEMENT * out.numel()
            return ExchangeOutcome(merged)
        out.zero_()
        delta = out.new_empty(out.shape)
        for k in merged:
            pseudogradient_(self.replicas[k].theta, self.replicas[k].flat, delta)
            if weights[k] != 1.0:
                delta.mul_(weights[k])
            out.add_(delta)
        self.traffic.uplink_bytes += BYTES_PER_ELEMENT * out.numel() * len(merged)
        return ExchangeOutcome(merged)

    def publish(self, theta: Tensor) -> PublishOutcome:
        digests: dict[int, int] = {}
        for k, replica in sorted(self.replicas.items()):
            replica.theta.copy_(theta)
            replica.adopt()
            digests[k] = digest(replica.theta)
        self.traffic.count_publication(BYTES_PER_ELEMENT * theta.numel(), digests, self._unhealed)
        self._unhealed.clear()
        return PublishOutcome(digests)

    def roll_back(self) -> None:
        for replica in self.replicas.values():
            replica.roll_back()

    def heal(self, replica_ids: Sequence[int]) -> None:
        spoilt = [] if self.config.is_data_parallel else [k for k in replica_ids if k in self.replicas]
        for k in spoilt:
            state = self._donated(besides=replica_ids)
            if state is None:
                self.replicas[k].reset_inner_state()
            else:
                self.replicas[k].load_state_tensors(state)

    def eject(self, replica_ids: Sequence[int]) -> None:
        for k in replica_ids:
            del self.replicas[k]
        self.generation += 1

    def regroup(self, wait_seconds: float = 0.0) -> Changes:
        missing = self.config.scaling.most_replicas - len(self.replicas)
        joined = tuple(self._add(self._donated()) for _ in range(missing))
        self.generation += bool(joined)
        return Changes(joined)

    def census(self) -> Census:
        return Census(len(self.replicas))

    def _donated(self, besides: Sequence[int] = ()) -> dict[str, Tensor] | None:
        """Inner state of a donor, the lowest member that holds a committed θ; None when it is to be, or can only be, a new one."""
        donor = self._donor(besides)
        if donor is None or not copies_inner_state(self.config):
            return None
        state = self.replicas[donor].state_tensors()
        self.traffic.heal_bytes += num_bytes(state)
        return state

    def _donor(self, besides: Sequence[int] = ()) -> int | None:
        return next((k for k in self.alive if k not in self._unhealed and k not in besides), None)

    def evaluate(self, shares: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
        parts = [self.replicas[k].evaluate(numbers) for k, numbers in shares.items()]
        return {number: loss for part in parts for number, loss in part.items()}

    def save(self, target: CheckpointTarget) -> Callable[[], dict[int, FileRecord]]:
        records = {k: write_replica(target, k, replica.state_tensors()) for k, replica in sorted(self.replicas.items())}
        return lambda: records

    def close(self) -> None:
        self.replicas.clear()

    @property
    def _num_params(self) -> int:
        return next(iter(self.replicas.values())).flat.numel()


def write_replica(target: CheckpointTarget, replica_id: int, tensors: dict[str, Tensor]) -> FileRecord:
    """Write a replica's part of a checkpoint."""
    return write_tensors(target.location, target.name, replica_file(replica_id), tensors, {"replica_id": str(replica_id)}, target.staging_dir)
