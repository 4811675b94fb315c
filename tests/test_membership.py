"""Waiting for replicas, saying who came and went, and rounds in which the slow do less."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from toy import LENGTH, toy_config, toy_dataset

from ray_muloco.config import TrainConfig
from ray_muloco.data.dataset import Dataset
from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training.coordinator import Coordinator, record_of
from ray_muloco.training.group import InnerOutcome, LocalGroup
from ray_muloco.training.membership import SAY_EVERY_SECONDS, Census, Changes, Patience
from ray_muloco.training.plan import SegmentPlan


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return toy_dataset()


def test_patience_says_every_ten_seconds_whom_it_waits_for() -> None:
    clock, said = Clock(), []
    patience = Patience(3, 600.0, said.append, clock)
    for second in range(36):
        clock.now = 100.0 + second
        patience.check(Census(1, healing=second // 20, pending=2))
    assert SAY_EVERY_SECONDS == 10.0
    assert [s.split(":")[0] for s in said] == [f"waiting for replicas since {seconds} s" for seconds in (10, 20, 30)]
    assert "1 replicas live, 3 are needed (scaling.min-replicas); 0 are getting ready, 2 are not placed" in said[0]
    assert "1 are getting ready" in said[1]


def test_patience_ends_at_the_limit_and_names_the_knob() -> None:
    """E16: nobody waits for ever; the reason says how many were there, how many were wanted and what to change."""
    clock, said = Clock(), []
    patience = Patience(2, 25.0, said.append, clock)
    clock.now += 24.9
    patience.check(Census(1))
    clock.now += 0.1
    with pytest.raises(RunError, match=r"too few replicas: 1 replicas live, 2 are needed .* after 25 s \(scaling.rejoin-timeout-seconds\)"):
        patience.check(Census(1))
    with pytest.raises(RunError):
        Patience(2, 0.0, said.append, clock).check(Census(1))


def test_changes_are_told_in_sentences() -> None:
    changes = Changes((4, 5), {3: "left: its node is drained", 1: "lost: its actor died"}, ("replica 6 could not start: no disk",))
    assert changes.reasons == (
        "replica 4 joins",
        "replica 5 joins",
        "replica 1 lost: its actor died",
        "replica 3 left: its node is drained",
        "replica 6 could not start: no disk",
    )
    assert Changes().reasons == ()


class PacedGroup(LocalGroup):
    """A LocalGroup whose replicas have clocks of their own: `paces`, in steps a second."""

    paces: Mapping[int, float]

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        outcome = super().run_inner(plans)
        return InnerOutcome({k: dataclasses.replace(r, seconds=r.num_steps / self.paces[k]) for k, r in outcome.reports.items()})


class Run:
    """Rounds of equal time, one at a time."""

    def __init__(self, config: TrainConfig, dataset: Dataset, paces: Mapping[int, float]) -> None:
        self.coordinator = Coordinator(config, dataset.tokenizer.separator_id)
        self.group = PacedGroup(dataset)
        self.group.paces = paces
        self.group.start(config, 0, {})
        self.group.publish(self.coordinator.theta)

    def round(self):
        """Plans, reports and record of a round, and θ before it with each replica's end."""
        coordinator, group = self.coordinator, self.group
        plans = coordinator.plan(group.alive)
        reports = group.run_inner(plans).reports
        before, ends = coordinator.theta.clone(), {k: r.flat.clone() for k, r in group.replicas.items()}
        decision = coordinator.decide(plans, reports, {})
        group.exchange(coordinator.weights(decision.participants, reports), coordinator.merged)
        committed = coordinator.commit(plans, reports, decision)
        group.publish(coordinator.theta)
        return plans, reports, record_of(coordinator, plans, reports, decision.participants, committed), before, ends


def equal_time_config(**changes) -> TrainConfig:
    return toy_config(scaling__num_replicas=3, scaling__equal_time_rounds=True, batch_sequences=6, sync_interval=8, budget_tokens=8 * 6 * 6 * LENGTH, **changes)


@pytest.mark.parametrize("method", ["muloco", "diloco"])
def test_a_replica_with_a_slow_clock_takes_fewer_steps_and_counts_for_less(dataset: Dataset, method: str) -> None:
    """D04, D18: Ψ is the token-weighted mean, everyone ends the round at one learning rate, and no round is longer than the fast need."""
    run = Run(equal_time_config(method=method, outer__lr=1.0, outer__momentum=0.0), dataset, {0: 8.0, 1: 2.0, 2: 7.9})
    plans, *_ = run.round()
    assert {p.num_steps for p in plans.values()} == {8}, "nobody's speed is known yet"
    plans, reports, record, before, ends = run.round()
    fast = plans[0].num_steps
    assert {k: p.num_steps for k, p in plans.items()} == {0: fast, 1: round(fast / 4), 2: fast}
    assert max(r.seconds for r in reports.values()) <= fast / 7.9 + 1e-9
    assert len({round(r.inner_lr, 12) for r in reports.values()}) == 1
    tokens = {k: 2 * LENGTH * p.num_steps for k, p in plans.items()}
    assert {k: r.tokens for k, r in reports.items()} == tokens
    assert record["tokens_merged"] == sum(tokens.values())
    assert record["effective_replicas"] == pytest.approx(sum(tokens.values()) ** 2 / sum(t**2 for t in tokens.values()))
    mean = sum((before.double() - ends[k].double()) * t for k, t in tokens.items()) / sum(tokens.values())
    torch.testing.assert_close(run.coordinator.theta.double(), before.double() - mean, rtol=0, atol=1e-6)  # fp32 sums


def test_the_budget_and_the_schedule_end_together_though_replicas_are_uneven(dataset: Dataset) -> None:
    """D18: the last step of the run is at the schedule's end for the slow as for the fast, and no sample is read twice."""
    config = equal_time_config()
    run = Run(config, dataset, {0: 8.0, 1: 1.0, 2: 3.0})
    seen: list[int] = []
    while not run.coordinator.finished:
        plans, reports, record, *_ = run.round()
        seen += [i for p in plans.values() for r in p.ranges for i in range(r.start, r.stop)]
    assert sorted(seen) == list(range(run.coordinator.progress.pool.cursor))
    assert run.coordinator.progress.tokens == LENGTH * len(seen)
    assert {round(r.inner_lr, 9) for r in reports.values()} == {round(0.1 * config.inner.lr, 9)}
    assert record["tokens"] < config.budget_tokens * 1.1, "the last round is no longer than what is left"


def test_a_joiner_counts_as_the_slowest_until_its_speed_is_known(dataset: Dataset) -> None:
    """D18: nobody waits for what is not known; the next round knows better. Its learning rate is the others'."""
    run = Run(equal_time_config(scaling__min_replicas=1), dataset, {0: 8.0, 1: 8.0, 2: 4.0, 3: 2.0})
    run.round()
    run.group.eject([1])
    assert run.group.regroup().joined == (3,)
    run.group.publish(run.coordinator.theta)
    plans, reports, *_ = run.round()
    assert plans[3].num_steps == plans[2].num_steps == round(plans[0].num_steps / 2)
    assert len({round(r.inner_lr, 12) for r in reports.values()}) == 1
    plans, reports, *_ = run.round()
    assert plans[3].num_steps == round(plans[0].num_steps / 4)
    assert len({round(r.inner_lr, 12) for r in reports.values()}) == 1


def test_data_parallel_replicas_take_the_same_steps_or_the_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scaling\.equal-time-rounds"):
        equal_time_config(method="muon-dp")


def test_a_local_group_grows_to_max_replicas(dataset: Dataset) -> None:
    group = LocalGroup(dataset)
    group.start(toy_config(scaling__max_replicas=4), 0, {})
    assert group.census() == Census(2, healing=0, pending=0)
    assert group.regroup().joined == (2, 3)
    assert group.generation == 1
    assert group.regroup().joined == ()
    assert group.census().alive == 4
