"""The whole algorithm on one screen.

    plan → inner phase → decide → exchange → commit → publish → (evaluate, record, checkpoint)

The loop knows neither Ray nor compression nor method: those are members of `ReplicaGroup` and settings of `Coordinator`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ray_muloco.errors import RunError
from ray_muloco.training.coordinator import Coordinator, record_of
from ray_muloco.training.evaluate import Evaluation, combine, shares
from ray_muloco.training.group import ReplicaGroup
from ray_muloco.training.ledger import Ledger, RoundClock
from ray_muloco.training.plan import Decision, SegmentPlan


def train(coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger, should_stop: Callable[[], bool]) -> str:
    """Train until the token budget is committed; `finished`, or `stopped` when asked to, at a commit either way.

    Raises RunError when the run cannot go on, naming the checkpoint to resume from.
    """
    while not coordinator.finished:
        if should_stop():
            return "stopped"
        coordinator.require_enough(group.alive)
        clock = RoundClock()
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

        committed = coordinator.commit(plans, reports, decision)
        clock.lap("outer")
        _publish(coordinator, group, ledger)
        clock.lap("exchange")

        if not group.alive:  # nobody is left to evaluate or to write a checkpoint
            coordinator.require_enough(group.alive)
        group.reset_inner_state(decision.sitting_out)
        record = record_of(coordinator, reports, decision.participants, committed)
        evaluation = evaluate(coordinator, group, ledger.validation_sequences) if ledger.evaluation_due(coordinator) else None
        ledger.record(record, evaluation, group, clock)
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
    """Give the round up and its samples back; raise when that will not help."""
    if decision.action == "abort":
        raise RunError(decision.abort_reason, "; ".join(decision.reasons), ledger.checkpoint_path())
    group.roll_back()
    group.reset_inner_state(decision.sitting_out)
    coordinator.retry(plans, decision, lost)
    coordinator.regrouped(group.generation)


def evaluate(coordinator: Coordinator, group: ReplicaGroup, sequences: Sequence[int]) -> Evaluation:
    """Validation loss of θ, measured by all replicas together."""
    return combine(group.evaluate(shares(sequences, group.alive)), coordinator.config.model.sequence_length)
