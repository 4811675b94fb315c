"""The coordinator: holds θ and u, plans, decides, and takes the outer step.

Nothing of it moves before a commit: θ, u, the sample cursor, the token count and the round number change together, in
`commit`, once the merged pseudogradient is complete. Legend: P parameters (flat, fp32).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.core.model import build_model
from ray_muloco.core.outer import outer_step_
from ray_muloco.core.params import digest, flatten_parameters_
from ray_muloco.training.manifest import MODEL_FILE, OUTER_FILE
from ray_muloco.training.metrics import mean, replica_cosine
from ray_muloco.training.plan import (
    MAX_FAILED_ATTEMPTS,
    Decision,
    Progress,
    ReplicaReport,
    SamplePool,
    SampleRange,
    SegmentPlan,
    decide,
    joined_ranges,
    plan_round,
    unmerged_ranges,
)  # fmt: skip

OUTER_CHUNK_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did: norms for the record; None where the method has no such thing."""

    pseudogradient_norm: float | None
    outer_update_norm: float
    replica_cosine: float | None


class Coordinator:
    """θ, u, and the integers of progress.

    theta: flat fp32 [P]; momentum: flat fp32 [P], absent for data-parallel methods; merged: flat fp32 [P], what the
    exchange fills: the weighted sum of pseudogradients, or the next θ of data-parallel methods.
    """

    def __init__(self, config: TrainConfig, separator_id: int) -> None:
        self.config = config
        model = build_model(config.model, seed=config.seed, separator_id=separator_id)
        self.layout, self.theta = flatten_parameters_(model)
        self.theta = self.theta.detach()
        self.momentum: Tensor | None = None if config.is_data_parallel else torch.zeros_like(self.theta)
        self.merged = torch.empty_like(self.theta)
        self.progress = Progress()
        self.data_fingerprint = ""
        self.speeds: dict[int, float] = {}
        """Inner steps a second of each replica in the last round it reported."""
        self.fruitless = 0
        """Attempts running that ended without a commit, whatever for."""
        self.lost_tokens = 0
        """Tokens planned since the last commit and not merged."""

    @property
    def finished(self) -> bool:
        """Whether the token budget is trained."""
        return self.progress.tokens >= self.config.budget_tokens

    # ---- plan, decide

    def enough(self, alive: Collection[int]) -> bool:
        """Whether as many replicas live as a round may commit with: with fewer nothing is trained."""
        return len(alive) >= self.config.scaling.fewest_replicas

    def plan(self, alive: Iterable[int]) -> dict[int, SegmentPlan]:
        """The next round's plan for each living replica; committing nothing."""
        speeds = self.speeds if self.config.scaling.equal_time_rounds else {}
        alive = sorted(alive)
        plans, _ = plan_round(self.config, self.progress, alive, {k: v for k, v in speeds.items() if k in alive})
        return plans

    def decide(self, plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], lost: Mapping[int, str]) -> Decision:
        """Who is merged; a pure function of what came back (`plan.decide`) with this run's thresholds."""
        fewest = self.config.scaling.fewest_replicas
        decision = decide(plans, reports, lost, fewest, self.progress.failed_attempts)
        digests = {reports[k].digest for k in decision.participants}
        if self.config.is_data_parallel and decision.action == "commit" and len(digests) > 1:
            drifted = f"data-parallel replicas {list(decision.participants)} ended the round with different parameters; it is run again"
            last = self.progress.failed_attempts + 1 >= MAX_FAILED_ATTEMPTS
            return dataclasses.replace(decision, action="abort" if last else "retry", abort_reason="replicas drifted", reasons=(*decision.reasons, drifted))
        if self.config.is_data_parallel and decision.action == "commit" and lost:
            # the survivors' gradients stopped being averages in mid-round: the round is run again from its start
            return dataclasses.replace(decision, action="retry")
        return decision

    @staticmethod
    def weights(participants: Iterable[int], reports: Mapping[int, ReplicaReport]) -> dict[int, float]:
        """w_k over the largest w of the round: tokens processed, 1.0 exactly when all did the same.

        The largest is taken over all reports, so that a smaller set of survivors keeps the weights it was summed with.
        """
        most = max(report.tokens for report in reports.values())
        return {k: reports[k].tokens / most for k in sorted(participants)}

    # ---- commit

    def commit(self, plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], decision: Decision) -> Committed:
        """Take the outer step on what the exchange left in `merged`, and move every integer with it.

        muloco, diloco:  Ψ = Σ w_k Δ_k / Σ w_k,  u ← μ u + Ψ,  θ ← θ − η_out (Ψ + μ u)     (arXiv 2505.23725, Algorithm 1)
        data-parallel:   θ ← the replicas' common parameters.
        """
        weights = self.weights(decision.participants, reports)
        committed = self._take_over() if self.momentum is None else self._outer_step(self.momentum, weights, reports)
        pool, skipped = self._settle(plans, {k: reports[k].num_steps for k in weights}, decision)
        self.progress = dataclasses.replace(
            self.progress,
            round_number=self.progress.round_number + 1,
            tokens=self.progress.tokens + sum(reports[k].tokens for k in weights),
            pool=pool,
            failed_attempts=0,
            skipped_samples=self.progress.skipped_samples + skipped,
        )
        self.fruitless = 0
        self.speeds = {k: report.num_steps / report.seconds for k, report in reports.items() if report.seconds > 0}
        return committed

    def _settle(self, plans: Mapping[int, SegmentPlan], merged: Mapping[int, int], decision: Decision) -> tuple[SamplePool, int]:
        """The pool after a round, and the samples given up on; a plan not merged returns and counts as lost work. merged: steps by replica."""
        returned, skipped = unmerged_ranges(plans, merged, decision.sitting_out)
        unmerged = sum(len(r) for k, plan in plans.items() if k not in merged for r in plan.ranges)
        self.lost_tokens += unmerged * self.config.model.sequence_length
        pool = self.progress.pool.without(r for plan in plans.values() for r in plan.ranges)
        return pool.give_back(returned), skipped

    def retry(self, plans: Mapping[int, SegmentPlan], decision: Decision, lost: Mapping[int, str]) -> None:
        """Give a round up: its ranges return to the pool; θ, u and the round number stay."""
        self.fruitless += 1
        pool, skipped = self._settle(plans, {}, decision)
        self.progress = dataclasses.replace(
            self.progress,
            pool=pool,
            failed_attempts=self.progress.failed_attempts + (not lost),
            skipped_samples=self.progress.skipped_samples + skipped,
        )

    def take_lost_tokens(self) -> int:
        """Tokens planned and not merged since this was asked last."""
        taken, self.lost_tokens = self.lost_tokens, 0
        return taken

    def _outer_step(self, momentum: Tensor, weights: Mapping[int, float], reports: Mapping[int, ReplicaReport]) -> Committed:
        outer = self.config.outer
        total = sum(weights.values())
        sums = torch.zeros(2, dtype=torch.float64)  # |Ψ|², |Ψ + μu|²
        for begin in range(0, self.theta.numel(), OUTER_CHUNK_ELEMENTS):  # one chunk stays in cache from the first read to the last
            part = slice(begin, begin + OUTER_CHUNK_ELEMENTS)
            mean_pseudogradient = self.merged[part].div_(total)
            sums[0] += torch.linalg.vector_norm(mean_pseudogradient, dtype=torch.float64) ** 2
            outer_step_(self.theta[part], momentum[part], mean_pseudogradient, lr=outer.lr, mu=outer.momentum)
            sums[1] += torch.linalg.vector_norm(mean_pseudogradient, dtype=torch.float64) ** 2
        psi_squared, step_squared = (float(s) for s in sums)
        squared_norms = [weights[k] ** 2 * reports[k].squared_norm for k in sorted(weights)]
        cosine = replica_cosine(psi_squared * total**2, squared_norms)
        return Committed(psi_squared**0.5, outer.lr * step_squared**0.5, cosine)

    def _take_over(self) -> Committed:
        moved = float(torch.linalg.vector_norm(self.merged - self.theta, dtype=torch.float64))
        self.theta.copy_(self.merged)
        return Committed(None, moved, None)

    def regrouped(self, generation: int) -> None:
        """Remember the membership's number."""
        self.progress = dataclasses.replace(self.progress, generation=generation)

    def digest(self) -> int:
        """Integer sum over the bits of θ, which every replica must agree with."""
        return digest(self.theta)

    def disagreeing(self, digests: Mapping[int, int]) -> list[int]:
        """Replicas whose θ is not the coordinator's: theirs is wrong, by definition."""
        truth = self.digest()
        return sorted(k for k, value in digests.items() if value != truth)

    # ---- checkpoints

    def snapshot(self) -> dict[str, dict[str, Tensor]]:
        """Copies of θ and u by parameter name, file by file."""
        files = {MODEL_FILE: self.theta.clone()}
        if self.momentum is not None:
            files[OUTER_FILE] = self.momentum.clone()
        return {name: self.layout.views(flat) for name, flat in files.items()}

    def manifest(self) -> dict[str, Any]:
        """The integers of the commit, for the manifest of its checkpoint."""
        progress = self.progress
        return {
            "round": progress.round_number,
            "tokens": progress.tokens,
            "cursor": progress.pool.cursor,
            "returned_ranges": [[r.start, r.stop, r.attempts, r.failed_on] for r in progress.pool.returned],
            "generation": progress.generation,
            "skipped_samples": progress.skipped_samples,
            "seeds": {"model": self.config.seed, "data_order": self.config.seed},
            "theta_digest": self.digest(),
            "data_fingerprint": self.data_fingerprint,
        }

    def restore(self, manifest: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Become what `snapshot` and `manifest` described, exactly."""
        self.load_weights(files[MODEL_FILE])
        if self.momentum is not None:
            self._load(self.momentum, files[OUTER_FILE])
        self.progress = Progress(
            round_number=manifest["round"],
            tokens=manifest["tokens"],
            pool=SamplePool(manifest["cursor"], tuple(SampleRange(*r) for r in manifest["returned_ranges"])),
            generation=manifest["generation"],
            skipped_samples=manifest["skipped_samples"],
        )

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """θ from named tensors; everything else stays."""
        self._load(self.theta, tensors)

    def _load(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for name, view in self.layout.views(flat).items():
            view.copy_(tensors[name])


def record_of(
    coordinator: Coordinator, plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], merged: Iterable[int], committed: Committed
) -> dict[str, Any]:
    """The part of a round's record that follows from plans, reports and commit."""
    merged = sorted(merged)
    tokens = sum(reports[k].tokens for k in merged)
    return {
        "round": coordinator.progress.round_number,
        "tokens": coordinator.progress.tokens,
        "train_loss": sum(reports[k].train_loss * reports[k].tokens for k in merged) / tokens,
        "inner_lr": reports[merged[0]].inner_lr,
        "num_steps": max(reports[k].num_steps for k in merged),
        "participants": len(merged),
        "effective_replicas": tokens**2 / sum(reports[k].tokens ** 2 for k in merged),
        "tokens_merged": tokens,
        "tokens_lost": coordinator.take_lost_tokens(),
        "grad_norm": mean([reports[k].grad_norm for k in merged]),
        "pseudogradient_norm": committed.pseudogradient_norm,
        "outer_update_norm": committed.outer_update_norm,
        "replica_cosine": committed.replica_cosine,
        "samples": joined_ranges(r for k in merged for r in plans[k].trained(reports[k].num_steps)),
        "first_step_time": min(reports[k].first_step_time for k in merged),
        "skipped_samples": coordinator.progress.skipped_samples,
    }
