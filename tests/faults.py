"""Faults on script: a LocalGroup whose replicas are lost, silent, spoilt or late wherever a script says so.

What RayGroup does when a member is lost (drop it, sum afresh over the survivors, broadcast again) this group does too, so
that the loop, the coordinator and the ledger meet the same outcomes in every phase, without a cluster.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.data.dataset import Dataset
from ray_muloco.training.checkpoint import FileRecord
from ray_muloco.training.group import CheckpointTarget, ExchangeOutcome, InnerOutcome, LocalGroup, PublishOutcome
from ray_muloco.training.membership import Census, Changes
from ray_muloco.training.plan import SegmentPlan
from ray_muloco.training.replica import Replica

if TYPE_CHECKING:
    from laws import Laws

KINDS: dict[str, tuple[str, ...]] = {
    "inner": ("dead", "silent", "nan", "short"),  # before its report; after its last step; a pseudogradient that is not finite; out of grace
    "exchange": ("before", "mid", "all"),  # before the sum; with half of it done; everyone
    "heal": ("donor", "receiver"),  # while the state for a spoilt replica is copied
    "regroup": ("leave", "joiner", "donor"),  # off a drained node; a joiner fails; its donor dies while it copies
    "publish": ("before", "mid", "acknowledge", "digest"),  # θ never came; broadcast twice; no digest came back; other bits
    "evaluate": ("lost",),
    "save": ("lost", "late"),  # before its state is copied; after that, its file never written
}
DATA_PARALLEL_KINDS: dict[str, tuple[str, ...]] = {
    **KINDS,
    "wiring": ("dead", "nobody"),  # the group cannot be formed: nobody begins the round
    "inner": ("dead", "silent", "nan", "stall", "drift"),  # all interrupted though nobody died; other parameters than the others
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens in a phase of the given attempt at a round (from 1; 0 is before the first), or the next time there is such a phase.

    victim: position among those alive then.
    """

    attempt: int
    phase: str
    kind: str
    victim: int = 0


class Script:
    """Faults to come, for a run and for what resumes it. join_after: boundaries from a loss to its replacement."""

    def __init__(self, *faults: Fault, join_after: int = 0) -> None:
        self.faults, self.join_after = list(faults), join_after
        self.attempt = 0

    def __repr__(self) -> str:
        return f"Script(*{self.faults}, join_after={self.join_after})"

    def due(self, phase: str, *kinds: str) -> list[Fault]:
        """The faults (of these kinds) that strike in this phase now; they strike once."""
        struck = [f for f in self.faults if f.phase == phase and f.attempt <= self.attempt and (not kinds or f.kind in kinds)]
        self.faults = [f for f in self.faults if f not in struck]
        return struck


class FaultyGroup(LocalGroup):
    """A LocalGroup under a script, telling the laws what it does."""

    def __init__(self, dataset: Dataset, script: Script, laws: Laws) -> None:
        super().__init__(dataset)
        self.script, self.laws = script, laws
        self._unsaid: dict[int, str] = {}
        self._coming: list[int] = []
        """Boundaries until each replica asked for is ready."""
        self._poison = self._rewire = False

    def start(self, config: TrainConfig, generation: int, inner_states: Mapping[int, Callable[[], dict[str, Tensor]]]) -> None:
        super().start(config, generation, inner_states)
        self.laws.began(self)

    def _victim(self, fault: Fault) -> int | None:
        return self.alive[fault.victim % len(self.alive)] if self.alive else None

    def _lose(self, victim: int | None, lost: dict[int, str], cause: str = "its actor died") -> None:
        if victim is not None:
            del self.replicas[victim]
            self._unhealed.discard(victim)
            self._rewire = True
            lost[victim] = cause

    def _wire(self) -> None:
        """A changed membership has another number from its next collective on."""
        self.generation += self._rewire
        self._rewire = False

    # ---- inner phase

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        self.script.attempt += 1
        self.laws.inner_begins(plans)
        lost: dict[int, str] = {}
        outcome = self._in_step(plans, lost) if self.config.is_data_parallel else self._alone(plans, lost)
        self.laws.inner_ended(outcome)
        return outcome

    def _alone(self, plans: Mapping[int, SegmentPlan], lost: dict[int, str]) -> InnerOutcome:
        faults = self.script.due("inner")
        for fault in faults:
            if fault.kind == "dead":
                self._lose(self._victim(fault), lost)
            if fault.kind == "short" and (victim := self._victim(fault)) is not None:
                self.replicas[victim].inner_steps = one_step(self.replicas[victim])  # type: ignore[method-assign]
        living = {k: plan for k, plan in plans.items() if k not in lost}
        reports = dict(super().run_inner(living).reports) if living else {}
        for fault in faults:
            victim = self._victim(fault)
            if fault.kind == "silent" and victim is not None:
                self._lose(victim, lost, "silent for 30 s")
                del reports[victim]
            if fault.kind == "nan" and victim is not None:
                self._spoil(victim)
                reports[victim] = dataclasses.replace(reports[victim], squared_norm=math.nan)
        reports = {k: dataclasses.replace(r, seconds=r.num_steps * (1.0 + k % 3)) for k, r in reports.items()}  # some are slow
        return InnerOutcome(reports, lost)

    def _in_step(self, plans: Mapping[int, SegmentPlan], lost: dict[int, str]) -> InnerOutcome:
        self._wire()
        wiring, faults = self.script.due("wiring"), self.script.due("inner")
        for fault in wiring:
            if fault.kind == "dead":
                self._lose(self._victim(fault), lost)
        if wiring:
            return InnerOutcome({}, lost)
        if any(fault.kind in ("dead", "stall") for fault in faults):
            steps = [self.replicas[k].inner_steps(plans[k]) for k in sorted(plans)]
            for _ in itertools.islice(zip(*steps, strict=True), 2):  # one step taken, and the second gradient there
                self._average_gradients(self.alive)
            for fault in faults:
                if fault.kind == "dead":
                    self._lose(self._victim(fault), lost)
            return InnerOutcome({}, lost)
        self._poison = any(fault.kind == "nan" for fault in faults)
        reports = dict(super().run_inner(plans).reports)
        for fault in faults:
            victim = self._victim(fault)
            if fault.kind == "silent" and victim is not None:
                self._lose(victim, lost, "silent for 30 s")
                del reports[victim]
            if fault.kind == "drift" and victim is not None:
                self.replicas[victim].flat[0] += 1.0
                reports[victim] = dataclasses.replace(reports[victim], digest=1)
        return InnerOutcome(reports, lost)

    def _average_gradients(self, replica_ids: Sequence[int]) -> None:
        if self._poison and (gradient := self.replicas[replica_ids[-1]].flat_grad) is not None:
            gradient[0], self._poison = math.nan, False
        super()._average_gradients(replica_ids)

    def _spoil(self, victim: int) -> None:
        """What a NaN gradient leaves behind: parameters and momentum that are not finite."""
        self.replicas[victim].flat.fill_(math.nan)
        for tensor in self.replicas[victim].optimizer.state_tensors().values():
            tensor.fill_(math.nan)

    # ---- exchange and publication

    def exchange(self, weights: Mapping[int, float], out: Tensor) -> ExchangeOutcome:
        self.laws.exchange_begins(weights)
        self._wire()
        lost: dict[int, str] = {}
        for fault in self.script.due("exchange"):
            if fault.kind == "mid":
                out.fill_(math.nan)  # half a sum, of a group that is gone
            for victim in self.alive if fault.kind == "all" else (self._victim(fault),):
                self._lose(victim, lost)
        self._wire()
        survivors = {k: w for k, w in weights.items() if k in self.replicas}
        return ExchangeOutcome(super().exchange(survivors, out).merged if survivors else (), lost)

    def publish(self, theta: Tensor) -> PublishOutcome:
        lost: dict[int, str] = {}
        faults = self.script.due("publish")
        for fault in faults:
            if fault.kind == "mid":
                for k in self.alive[::2]:
                    self.replicas[k].theta.copy_(theta)
                    self.replicas[k].adopt()
            if fault.kind in ("before", "mid"):
                self._lose(self._victim(fault), lost)
        self._wire()
        digests = dict(super().publish(theta).digests)
        for fault in faults:
            victim = self._victim(fault)
            if fault.kind == "acknowledge" and victim is not None:
                self._lose(victim, lost)
                del digests[victim]
            if fault.kind == "digest" and victim is not None:
                self.replicas[victim].theta[0] += 1.0
                self.replicas[victim].adopt()
                digests[victim] += 1
        self.laws.published(digests)
        return PublishOutcome(digests, lost)

    # ---- around a round

    def roll_back(self) -> None:
        super().roll_back()
        self.laws.rolled_back()

    def heal(self, replica_ids: Sequence[int]) -> None:
        if replica_ids:
            for fault in self.script.due("heal"):
                donor = self._donor(besides=replica_ids)
                self._lose(donor if fault.kind == "donor" else replica_ids[0], self._unsaid)
        super().heal(replica_ids)
        self.laws.healed(replica_ids)

    def regroup(self, wait_seconds: float = 0.0) -> Changes:
        left = {k: f"lost: {cause}" for k, cause in self._unsaid.items()}
        self._unsaid, notes = {}, []
        for fault in self.script.due("regroup", "leave"):
            self._lose(self._victim(fault), left, "left: its node is drained, 60 s before the deadline")
        missing = self.config.scaling.most_replicas - len(self.replicas) - len(self._coming)
        self._coming = [n - 1 for n in (*self._coming, *[self.script.join_after + 1] * missing)]
        ready = self._coming.count(0)
        self._coming = [n for n in self._coming if n > 0]
        for fault in self.script.due("regroup", "joiner", "donor") if ready else ():
            if fault.kind == "joiner" and ready:
                ready -= 1
                self._coming.append(self.script.join_after + 2)
                notes.append("replica ? could not start: its actor died; another is asked for in 1 s")
            if fault.kind == "donor" and ready:
                self._lose(self._donor(), left, "lost: its actor died")
        joined: list[int] = []
        for _ in range(ready):
            donor = self._donor()
            k = self._add(self._donated())
            self.laws.joins(k, donor)
            joined.append(k)
        self.generation += bool(joined)
        return Changes(tuple(joined), left, tuple(notes))

    def census(self) -> Census:
        return Census(len(self.replicas), 0, len(self._coming))

    def evaluate(self, shares: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
        for fault in self.script.due("evaluate"):
            self._lose(self._victim(fault), self._unsaid)
        return super().evaluate({k: numbers for k, numbers in shares.items() if k in self.replicas})

    def save(self, target: CheckpointTarget) -> Callable[[], dict[int, FileRecord]]:
        faults = self.script.due("save")
        for fault in faults:
            if fault.kind == "lost":
                self._lose(self._victim(fault), self._unsaid)
        collect = super().save(target)
        late: dict[int, str] = {}
        for fault in faults:
            if fault.kind == "late":
                self._lose(self._victim(fault), late)
        self._unsaid |= late
        return lambda: {k: record for k, record in collect().items() if k not in late}


def one_step(replica: Replica) -> Callable[[SegmentPlan], Iterator[None]]:
    """The replica's next inner phase, cut short while it is at its first step."""

    def steps(plan: SegmentPlan) -> Iterator[None]:
        del replica.inner_steps  # the phases after this one are its own again
        for _ in replica.inner_steps(plan):
            replica.cut_short()
            yield

    return steps


def finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether every element is."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
