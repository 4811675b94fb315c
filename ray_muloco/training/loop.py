"""The whole algorithm on one screen.

    plan → inner phase → decide → exchange → commit → heal → regroup → publish → (evaluate, record, checkpoint)

The loop knows neither Ray nor compression nor method: those are members of `ReplicaGroup` and settings of `Coordinator`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ray_muloco.errors import RunError
from ray_muloco.training.coordinator import Coordinator, record_of
from ray_muloco.training.evaluate import Evaluation, combine, shares
from ray_muloco.training.group import ReplicaGroup
from ray_muloco.training.ledger import Ledger, RoundClock
from ray_muloco.training.plan import Decision, SegmentPlan

MAX_FRUITLESS_ATTEMPTS = 20


def train(coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger, should_stop: Callable[[], bool]) -> str:
    """Train until the token budget is committed; `finished`, or `stopped` when asked to, at a commit either way.

    Raises RunError when the run cannot go on.
    """
    clock = RoundClock()
    while not coordinator.finished:
        if should_stop() or not _await_enough(coordinator, group, ledger, should_stop):
            return "stopped"
        clock.start()
        plans = coordinator.plan(group.alive)
        inner = group.run_inner(plans)
        clock.lap("inner")
        decision, reports, lost = coordinator.decide(plans, inner.reports, inner.lost), inner.reports, inner.lost
        if decision.action == "commit":
            exchanged = group.exchange(coordinator.weights(decision.participants, reports), coordinator.merged)
            clock.lap("exchange")
            lost = {**lost, **exchanged.lost}
            decision = coordinator.decide(plans, {k: r for k, r in reports.items() if k not in lost}, lost)
        ledger.reasons(decision.reasons)
        if decision.action != "commit":
            _try_again(coordinator, group, ledger, plans, decision, lost)
            continue

        assert exchanged.merged == decision.participants, "the sum is of exactly those who count"
        committed = coordinator.commit(plans, reports, decision)
        clock.committed()
        group.heal(decision.sitting_out)  # before anyone joins, who would copy what is spoilt
        ledger.reasons(group.regroup().reasons)
        _publish(coordinator, group, ledger)
        clock.lap("exchange")

        record = record_of(coordinator, plans, reports, decision.participants, committed)
        evaluation = evaluate(coordinator, group, ledger.validation_sequences) if ledger.evaluation_due(coordinator) else None
        ledger.record(record, evaluation, group, clock)
        clock = RoundClock()
        if ledger.checkpoint_due(coordinator):
            ledger.save(coordinator, group)
    return "finished"


def _publish(coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger) -> None:
    """Every replica receives θ; one that holds other bits afterwards is let go: the coordinator's are the truth."""
    published = group.publish(coordinator.theta)
    ledger.reasons(f"replica {k} lost while θ was published: {cause}" for k, cause in published.lost.items())
    strays = coordinator.disagreeing(published.digests)
    if strays:
        group.eject(strays)
        ledger.reasons(f"replica {k} ejected: its θ differs from the coordinator's after the commit" for k in strays)
    coordinator.regrouped(group.generation)


def _try_again(
    coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger, plans: Mapping[int, SegmentPlan], decision: Decision, lost: Mapping[int, str]
) -> None:
    """Give the round up and its samples back, take in who is ready meanwhile; raise when trying again will not help."""
    group.roll_back()
    group.heal(decision.sitting_out)  # also before the end: what is spoilt must not be in the last checkpoint
    if decision.action == "abort":
        raise RunError(decision.abort_reason, "; ".join(decision.reasons))
    coordinator.retry(plans, decision, lost)
    if coordinator.fruitless >= MAX_FRUITLESS_ATTEMPTS:
        raise RunError("no round commits", f"{coordinator.fruitless} attempts running ended without a commit; the last one: {'; '.join(decision.reasons)}")
    _take_in(coordinator, group, ledger)


def _take_in(coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger, wait_seconds: float = 0.0) -> None:
    """A boundary without a commit: joiners that are ready receive the θ there is."""
    changes = group.regroup(wait_seconds)
    ledger.reasons(changes.reasons)
    if changes.joined:
        _publish(coordinator, group, ledger)
    coordinator.regrouped(group.generation)


def _await_enough(coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger, should_stop: Callable[[], bool]) -> bool:
    """Wait until enough replicas live to train on; False when asked to stop meanwhile."""
    patience = None
    while not coordinator.enough(group.alive):
        if should_stop():
            return False
        patience = patience or ledger.patience()
        patience.check(group.census())
        _take_in(coordinator, group, ledger, wait_seconds=0.5)
    return True


def evaluate(coordinator: Coordinator, group: ReplicaGroup, sequences: Collection[int]) -> Evaluation | None:
    """Validation loss of θ, measured by all replicas together; None when none lives to measure it."""
    left, losses = set(sequences), {}
    while left and group.alive:  # what a lost replica was to measure is left for another
        losses |= group.evaluate(shares(sorted(left), group.alive))
        left -= losses.keys()
    return combine(losses, coordinator.config.model.sequence_length) if not left else None
