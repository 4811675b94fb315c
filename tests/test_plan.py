"""Plan and decide, the pure half of a round: samples are neither lost nor repeated, rounds are even, decisions are fair."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from ray_muloco import presets
from ray_muloco.training.plan import (
    MAX_FAILED_ATTEMPTS,
    Progress,
    ReplicaReport,
    SamplePool,
    SampleRange,
    SegmentPlan,
    decide,
    num_round_steps,
    plan_round,
    unmerged_ranges,
)


def report(replica_id: int, *, loss: float = 1.0, squared_norm: float = 1.0, tokens: int = 128) -> ReplicaReport:
    return ReplicaReport(
        replica_id=replica_id, round_number=1, generation=1, num_steps=1, tokens=tokens, train_loss=loss, squared_norm=squared_norm,
        grad_norm=1.0, inner_lr=0.1, seconds=1.0, first_step_time=1.0,
    )  # fmt: skip


def plans_for(*replicas: int) -> dict[int, SegmentPlan]:
    config = presets.nano(replicas=max(4, len(replicas)))
    return plan_round(config, Progress(), replicas)[0]


@given(st.integers(1, 2000), st.integers(1, 300))
def test_rounds_are_of_nearly_equal_length_and_end_exactly_at_the_budget(total_steps: int, sync_interval: int) -> None:
    """D13: T steps not a multiple of H are spread over ceil(T / H) rounds; no one-step tail, no step left unmerged."""
    lengths, remaining = [], total_steps
    while remaining > 0:
        h = num_round_steps(remaining, 1, sync_interval)
        lengths.append(h)
        remaining -= h
    assert sum(lengths) == total_steps
    assert len(lengths) == math.ceil(total_steps / sync_interval)
    assert max(lengths) - min(lengths) <= 1
    assert max(lengths) <= sync_interval


@given(st.lists(st.tuples(st.sampled_from(["take", "back"]), st.integers(1, 50)), max_size=40))
def test_the_pool_hands_out_every_index_exactly_once_until_it_is_given_back(actions: list[tuple[str, int]]) -> None:
    pool, held = SamplePool(), []
    for action, count in actions:
        if action == "take":
            ranges, pool = pool.take(count)
            assert sum(len(r) for r in ranges) == count
            held.extend(ranges)
        elif held:
            pool = pool.give_back([held.pop(count % len(held))])
    indices = sorted(i for r in (*held, *pool.returned) for i in range(r.start, r.stop))
    assert indices == list(range(pool.cursor))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=6), st.integers(60, 90), st.integers(1, 80), st.integers(0, 3))
def test_a_pool_without_what_was_taken_is_the_pool_that_take_left(pieces: list[tuple[int, int]], cursor: int, count: int, avoid: int) -> None:
    """The coordinator learns from plans alone what is left: a plan is all that a round's book-keeping needs."""
    returned, end = [], 0
    for gap, length in pieces:
        returned.append(SampleRange(end + gap, end + gap + length, failed_on=gap % 4))
        end += gap + length
    pool = SamplePool(max(cursor, end), tuple(returned))
    taken, left = pool.take(count, avoid)
    assert pool.without(taken) == left
    assert all(r.failed_on != avoid for r in taken)


def test_samples_that_failed_on_one_replica_are_tried_on_another() -> None:
    """D20: dealt to the same replica again, a range that one broken GPU turns into NaN would be skipped as poisonous."""
    pool = SamplePool(100, (SampleRange(0, 64, attempts=1, failed_on=0),))
    config = presets.nano(replicas=2)
    plans, _ = plan_round(config, Progress(pool=pool), (0, 1))
    assert plans[0].ranges[0].start == 100
    assert plans[1].ranges[0].start == 0
    alone, _ = plan_round(config, Progress(pool=pool), (0,))
    assert alone[0].ranges[0].start == 0, "nobody else is there to try"


def test_rounds_of_equal_time_give_slow_replicas_fewer_steps() -> None:
    """steps_k = max(1, round(h · v_k / v_max)), all of it when within 20 %; everyone walks the same part of the schedule."""
    config = presets.nano(replicas=4).override({"sync_interval": 30, "budget_tokens": 10**7})
    plans, _ = plan_round(config, Progress(), (0, 1, 2, 3), {0: 10.0, 1: 8.1, 2: 3.3, 3: 0.01})
    assert [plans[k].num_steps for k in range(4)] == [30, 30, 10, 1]
    ends = [plan.progress(plan.num_steps - 1) for plan in plans.values()]
    assert max(ends) - min(ends) < 1e-12
    assert [sum(len(r) for r in plan.ranges) for plan in plans.values()] == [plan.num_steps * plan.batch_sequences for plan in plans.values()]


def test_returned_samples_are_read_before_new_ones() -> None:
    pool = SamplePool(100, (SampleRange(10, 13), SampleRange(40, 42)))
    ranges, rest = pool.take(7)
    assert [(r.start, r.stop) for r in ranges] == [(10, 13), (40, 42), (100, 102)]
    assert rest == SamplePool(102)


def test_every_replica_has_a_range_of_its_own_and_the_same_schedule() -> None:
    """P09: replicas never read the same sample."""
    plans = plans_for(0, 1, 3)
    indices = [i for plan in plans.values() for r in plan.ranges for i in range(r.start, r.stop)]
    assert len(indices) == len(set(indices))
    assert len({(p.num_steps, p.progress_start, p.progress_per_step) for p in plans.values()}) == 1


def test_with_fewer_replicas_the_batch_of_each_stays_and_the_budget_lasts_longer() -> None:
    four, two = plans_for(0, 1, 2, 3), plans_for(0, 2)
    assert four[0].batch_sequences == two[0].batch_sequences
    assert two[0].progress_per_step == four[0].progress_per_step / 2


def test_progress_reaches_one_at_the_last_step_of_the_budget() -> None:
    config = presets.nano(replicas=2).override({"budget_tokens": 40 * 32 * 128, "sync_interval": 7})
    progress, last = Progress(), 0.0
    while progress.tokens < config.budget_tokens:
        plans, pool = plan_round(config, progress, (0, 1))
        plan = plans[0]
        assert plan.progress_start >= last - 1e-12
        last = plan.progress(plan.num_steps - 1)
        progress = Progress(tokens=progress.tokens + plan.num_steps * 32 * 128, pool=pool)
    assert math.isclose(last, 1.0)


def test_all_finite_reports_commit() -> None:
    plans = plans_for(0, 1)
    decision = decide(plans, {0: report(0), 1: report(1)}, {}, fewest=2, failed_attempts=0)
    assert (decision.action, decision.participants, decision.reasons) == ("commit", (0, 1), ())


def test_a_pseudogradient_that_is_not_finite_sits_out_by_name() -> None:
    """D20: never masked, never merged; the others go on."""
    plans = plans_for(0, 1, 2)
    for bad in (report(1, squared_norm=math.nan), report(1, squared_norm=math.inf), report(1, loss=math.nan)):
        decision = decide(plans, {0: report(0), 1: bad, 2: report(2)}, {}, fewest=2, failed_attempts=0)
        assert (decision.action, decision.participants, decision.sitting_out) == ("commit", (0, 2), (1,))
        assert "replica 1" in decision.reasons[0]


def test_fewer_than_min_replicas_never_commit() -> None:
    """E01, E05: below scaling.min-replicas nothing is merged, whoever is left; the run waits for others."""
    plans = plans_for(0, 1, 2)
    decision = decide(plans, {0: report(0)}, {1: "died", 2: "died"}, fewest=2, failed_attempts=0)
    assert decision.action == "wait"
    assert "scaling.min-replicas" in decision.reasons[-1]


def test_a_loss_leaves_the_survivors_to_commit() -> None:
    plans = plans_for(0, 1, 2)
    decision = decide(plans, {0: report(0), 2: report(2)}, {1: "its actor died"}, fewest=1, failed_attempts=0)
    assert (decision.action, decision.participants) == ("commit", (0, 2))
    assert decision.reasons == ("replica 1 lost: its actor died",)


def test_nothing_finite_is_tried_again_and_then_called_diverged() -> None:
    plans = plans_for(0, 1)
    bad = {k: report(k, squared_norm=math.nan) for k in (0, 1)}
    actions = [decide(plans, bad, {}, fewest=1, failed_attempts=n) for n in range(MAX_FAILED_ATTEMPTS)]
    assert [d.action for d in actions] == ["retry"] * (MAX_FAILED_ATTEMPTS - 1) + ["abort"]
    assert actions[-1].abort_reason == "diverged"


def test_replicas_interrupted_by_a_loss_start_the_round_again() -> None:
    """Data-parallel replicas whose peer died have no report: they live, and the round is planned anew."""
    plans = plans_for(0, 1, 2)
    decision = decide(plans, {}, {1: "its actor died"}, fewest=2, failed_attempts=0)
    assert decision.action == "retry"


def test_ranges_of_a_lost_replica_return_and_of_a_failing_one_are_skipped_after_two_attempts() -> None:
    """P10, D20: a lost replica's samples are trained on by another; poisonous ones are given up on, and counted."""
    plans = plans_for(0, 1, 2)
    returned, skipped = unmerged_ranges(plans, merged={0: plans[0].num_steps}, failed=(2,))
    assert sorted(r.start for r in returned) == sorted(r.start for k in (1, 2) for r in plans[k].ranges)
    assert {r.start: r.attempts for r in returned} == {plans[1].ranges[0].start: 0, plans[2].ranges[0].start: 1}
    assert skipped == 0
    again = {2: SegmentPlan(**{f: getattr(plans[2], f) for f in plans[2].__slots__} | {"ranges": tuple(r for r in returned if r.attempts)})}
    returned, skipped = unmerged_ranges(again, merged={}, failed=(2,))
    assert returned == ()
    assert skipped == len(plans[2].ranges[0])


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 40))
def test_a_phase_cut_short_gives_back_exactly_what_it_did_not_read(num_steps: int, batch: int, done: int) -> None:
    """Out of grace after some of its steps: those samples are trained on, the others return, untried, and nothing is both."""
    done = min(done, num_steps)
    half = num_steps * batch // 2
    ranges = tuple(r for r in (SampleRange(50, 50 + half), SampleRange(500, 500 + num_steps * batch - half)) if len(r))
    plan = SegmentPlan(
        round_number=1, generation=1, replica_id=0, ranges=ranges, num_steps=num_steps, batch_sequences=batch, progress_start=0.0, progress_per_step=0.1
    )  # fmt: skip
    returned, skipped = unmerged_ranges({0: plan}, {0: done}, ())
    read = [i for r in plan.trained(done) for i in range(r.start, r.stop)]
    left = [i for r in returned for i in range(r.start, r.stop)]
    assert len(read) == done * batch
    assert read + left == [i for r in ranges for i in range(r.start, r.stop)]
    assert skipped == 0
