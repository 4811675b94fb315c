"""Plan and decide: the pure half of a round.

A plan is data: what a replica will read, at which progress of the budget, for how many steps. A resumed run replays the
same plans because they follow from committed integers alone. The decision is a function of what came back.
Everything here is a frozen value; nothing imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ray_muloco.config import TrainConfig


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Sample indices [start, stop) of the endless stream of epochs; `attempts` counts failed tries to train on them."""

    start: int
    stop: int
    attempts: int = 0
    failed_on: int = -1
    """Replica whose pseudogradient over these samples was not finite, if one's was."""

    def __len__(self) -> int:
        return self.stop - self.start


def split_ranges(ranges: Iterable[SampleRange], count: int) -> tuple[tuple[SampleRange, ...], tuple[SampleRange, ...]]:
    """The first `count` indices of these ranges, in their order, and the rest."""
    first: list[SampleRange] = []
    rest: list[SampleRange] = []
    for r in ranges:
        size = min(count, len(r))
        count -= size
        if size:
            first.append(replace(r, stop=r.start + size))
        if size < len(r):
            rest.append(replace(r, start=r.start + size))
    return tuple(first), tuple(rest)


@dataclass(frozen=True, slots=True)
class SamplePool:
    """What has not been trained on: ranges given back by replicas that failed, then everything from `cursor` on."""

    cursor: int = 0
    returned: tuple[SampleRange, ...] = ()

    def take(self, count: int, avoid: int | None = None) -> tuple[tuple[SampleRange, ...], SamplePool]:
        """The next `count` indices, returned ones first, and the pool without them; not those that failed on `avoid`."""
        avoided = [r for r in self.returned if r.failed_on == avoid]
        taken, left = split_ranges([r for r in self.returned if r.failed_on != avoid], count)
        new = count - sum(map(len, taken))
        if new:
            taken = (*taken, SampleRange(self.cursor, self.cursor + new))
        return taken, SamplePool(self.cursor + new).give_back((*left, *avoided))

    def without(self, ranges: Iterable[SampleRange]) -> SamplePool:
        """The pool once these ranges, which `take` gave out, are trained on or given back apart."""
        taken = sorted(ranges, key=lambda r: r.start)
        left: list[SampleRange] = []
        for head in self.returned:
            begin = head.start
            for r in taken:
                if begin < r.stop and r.start < head.stop:
                    left += [replace(head, start=begin, stop=r.start)] if r.start > begin else []
                    begin = r.stop
            left += [replace(head, start=begin)] if begin < head.stop else []
        return SamplePool(max([self.cursor, *(r.stop for r in taken)]), tuple(left))

    def give_back(self, ranges: Iterable[SampleRange]) -> SamplePool:
        """The pool with those ranges again, in order of index."""
        return replace(self, returned=tuple(sorted((*self.returned, *ranges), key=lambda r: r.start)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentPlan:
    """What one replica does in one segment (a whole round, unless streaming)."""

    round_number: int
    generation: int
    replica_id: int
    ranges: tuple[SampleRange, ...]
    num_steps: int
    batch_sequences: int
    progress_start: float
    """Committed tokens over the budget when the segment begins."""
    progress_per_step: float
    """Share of the budget that one step of all planned replicas is."""

    def progress(self, step: int) -> float:
        """Share of the budget spent once step number `step` (from 0) is done: the schedule's argument for that step."""
        return self.progress_start + (step + 1) * self.progress_per_step

    def trained(self, num_steps: int) -> tuple[SampleRange, ...]:
        """What the first `num_steps` steps read: all of it, unless the phase was cut short."""
        return split_ranges(self.ranges, num_steps * self.batch_sequences)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """What a replica says of its inner phase. Loss in nats a token, norms over all parameters, seconds of wall clock."""

    replica_id: int
    round_number: int
    generation: int
    num_steps: int
    tokens: int
    train_loss: float
    squared_norm: float
    """Squared norm of the pseudogradient; not finite when any of its elements is not."""
    grad_norm: float
    inner_lr: float
    seconds: float
    first_step_time: float
    """Unix time at which the process finished its first inner step ever."""
    digest: int | None = None
    """Digest of the replica's parameters (data-parallel methods, whose replicas must agree before the exchange)."""

    @property
    def finite(self) -> bool:
        """Whether the pseudogradient may be merged."""
        return math.isfinite(self.squared_norm) and math.isfinite(self.train_loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Who is merged, who sits out, who is gone, and whether the round commits."""

    action: str
    """`commit`, `retry` or `wait` (nothing is merged, the ranges return to the pool; `wait` for more replicas), or `abort`."""
    participants: tuple[int, ...]
    sitting_out: tuple[int, ...]
    reasons: tuple[str, ...] = ()
    abort_reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The integers that decide what comes next; part of every checkpoint, never going backwards but for a resume."""

    round_number: int = 0
    """Committed rounds."""
    tokens: int = 0
    """Committed tokens, summed over replicas."""
    pool: SamplePool = field(default_factory=SamplePool)
    generation: int = 0
    failed_attempts: int = 0
    """Attempts running that failed though no replica was lost: too few finite pseudogradients, or no connection."""
    skipped_samples: int = 0
    """Samples given up on after two replicas failed on them."""


MAX_RANGE_ATTEMPTS = 2
MAX_FAILED_ATTEMPTS = 3


def num_round_steps(remaining_tokens: int, tokens_per_step: float, sync_interval: int) -> int:
    """Inner steps h of the next round: T steps left are spread over ceil(T / H) rounds of nearly equal length.

    h = ceil(T / ceil(T / H)). Taken anew each round from what is left, so that no one-step tail with full outer momentum
    ends the run and a run that lost replicas still ends its budget.
    """
    steps = math.ceil(remaining_tokens / tokens_per_step)
    return math.ceil(steps / math.ceil(steps / sync_interval))


SAME_SPEED = 0.8


def speed_fractions(speeds: Mapping[int, float], replicas: Iterable[int]) -> dict[int, float]:
    """f_k = v_k / v_max for each replica; 1 while v_k is within 20 % of v_max. Not measured yet counts as the slowest. speeds: steps a second."""
    fastest, slowest = max(speeds.values(), default=0.0), min(speeds.values(), default=0.0)
    fractions = {k: speeds.get(k, slowest) / fastest if fastest else 1.0 for k in replicas}
    return {k: 1.0 if f >= SAME_SPEED else f for k, f in fractions.items()}


def plan_round(
    config: TrainConfig, progress: Progress, alive: Iterable[int], speeds: Mapping[int, float] | None = None
) -> tuple[dict[int, SegmentPlan], SamplePool]:
    """Plans of the next round for the living replicas in order of id, and the pool that is left if it commits.

    A replica's batch is B / K with K the configured number, whoever lives: with fewer alive the global batch shrinks.
    speeds: steps a second by replica, for rounds of equal time: steps_k = max(1, round(h · v_k / v_max)).
    """
    replicas = sorted(alive)
    batch = config.replica_batch_sequences
    fractions = speed_fractions(speeds or {}, replicas)
    step_tokens = batch * config.model.sequence_length
    num_steps = num_round_steps(config.budget_tokens - progress.tokens, sum(fractions.values()) * step_tokens, config.sync_interval)
    steps = {k: max(1, round(num_steps * fractions[k])) for k in replicas}
    round_tokens = sum(steps.values()) * step_tokens
    plans: dict[int, SegmentPlan] = {}
    pool = progress.pool
    for replica_id in replicas:
        ranges, pool = pool.take(steps[replica_id] * batch, avoid=replica_id if len(replicas) > 1 else None)
        plans[replica_id] = SegmentPlan(
            round_number=progress.round_number + 1,
            generation=progress.generation,
            replica_id=replica_id,
            ranges=ranges,
            num_steps=steps[replica_id],
            batch_sequences=batch,
            progress_start=progress.tokens / config.budget_tokens,
            progress_per_step=round_tokens / steps[replica_id] / config.budget_tokens,
        )
    return plans, pool


def decide(plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], lost: Mapping[int, str], fewest: int, failed_attempts: int) -> Decision:
    """Who takes part, from what came back of a planned round.

    plans: by replica id, everyone who was asked; reports: those who answered; lost: those who are gone, with the cause.
    Who neither answered nor is gone was interrupted by another's loss (data-parallel methods) and lives.
    fewest: replicas that must live for training to go on; failed_attempts: attempts running that failed through no loss.
    A replica whose pseudogradient is not finite sits out, by name.
    """
    participants = tuple(k for k in sorted(reports) if reports[k].finite)
    sitting_out = tuple(k for k in sorted(reports) if not reports[k].finite)
    interrupted = sorted(set(plans) - set(reports) - set(lost))
    num_alive = len(reports) + len(interrupted)
    reasons = [f"replica {k} lost: {cause}" for k, cause in sorted(lost.items())]
    reasons += [f"replica {k} sits out: its pseudogradient is not finite (train loss {reports[k].train_loss})" for k in sitting_out]
    if interrupted:
        reasons.append(f"replicas {interrupted} were interrupted and start the round again")

    def decision(action: str, abort_reason: str = "") -> Decision:
        return Decision(action=action, participants=participants, sitting_out=sitting_out, reasons=tuple(reasons), abort_reason=abort_reason)

    if num_alive < fewest:
        reasons.append(f"{num_alive} of {len(plans)} replicas live, {fewest} are needed (scaling.min-replicas): the round is given up until there are more")
        return decision("wait")
    if not interrupted and len(participants) >= max(fewest, 1):
        return decision("commit")
    if not lost:
        reasons.append(
            f"attempt {failed_attempts + 1} of {MAX_FAILED_ATTEMPTS} has {len(participants)} finite pseudogradients, {max(fewest, 1)} are needed (scaling.min-replicas)"
        )
        if failed_attempts + 1 >= MAX_FAILED_ATTEMPTS:
            return decision("abort", "diverged" if sitting_out else "unreachable")
    return decision("retry")


def unmerged_ranges(plans: Mapping[int, SegmentPlan], merged: Mapping[int, int], failed: Iterable[int]) -> tuple[tuple[SampleRange, ...], int]:
    """Ranges to give back after a round, and how many samples are given up on.

    merged: steps of each replica that was. What else was planned returns to the pool; that of `failed` (not finite) replicas
    with one more attempt against it, and after MAX_RANGE_ATTEMPTS it is skipped.
    """
    failed = set(failed)
    returned: list[SampleRange] = []
    skipped = 0
    for replica_id, plan in sorted(plans.items()):
        for sample_range in split_ranges(plan.ranges, merged.get(replica_id, 0) * plan.batch_sequences)[1]:
            tried = sample_range
            if replica_id in failed:
                tried = replace(tried, attempts=tried.attempts + 1, failed_on=replica_id)
            if tried.attempts >= MAX_RANGE_ATTEMPTS:
                skipped += len(tried)
            else:
                returned.append(tried)
    return tuple(returned), skipped


def joined_ranges(ranges: Iterable[SampleRange]) -> list[list[int]]:
    """[start, stop) of all ranges, ascending, neighbours joined: what a record says was trained on."""
    joined: list[list[int]] = []
    for r in sorted(ranges, key=lambda r: r.start):
        if joined and joined[-1][1] == r.start:
            joined[-1][1] = r.stop
        else:
            joined.append([r.start, r.stop])
    return joined
