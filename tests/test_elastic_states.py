"""Every phase of a round, every fault: the run goes on, and nothing is lost, repeated or believed that should not be."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import DATA_PARALLEL_KINDS, KINDS, Fault, Script
from laws import LENGTH, NEVER, Laws, Silent, assert_finished, records, run, small_config
from toy import Harness, toy_dataset

from ray_muloco.core.model import build_model
from ray_muloco.data.dataset import Dataset
from ray_muloco.errors import RunError
from ray_muloco.training import coordinator, replica
from ray_muloco.training.ledger import Ledger
from ray_muloco.training.tracking import NullTracker

WALK = [("muloco", phase, kind) for phase, kinds in KINDS.items() for kind in kinds]
WALK += [("muon-dp", phase, kind) for phase, kinds in DATA_PARALLEL_KINDS.items() for kind in kinds]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return toy_dataset()


def script_for(phase: str, kind: str, victim: int, join_after: int) -> Script:
    """The fault in the second attempt; with what must happen first for its phase to come."""
    if phase == "heal":
        first = [Fault(2, "inner", "nan", victim)]
    elif phase == "regroup" and kind != "leave":
        first = [Fault(2, "inner", "silent", victim)]
    else:
        first = []
    return Script(*first, Fault(2, phase, kind, victim), join_after=join_after)


@pytest.mark.parametrize("min_replicas", [1, 3])
@pytest.mark.parametrize(("method", "phase", "kind"), WALK)
def test_a_fault_in_any_phase_costs_what_was_in_flight_and_nothing_else(
    dataset: Dataset, tmp_path: Path, method: str, phase: str, kind: str, min_replicas: int
) -> None:
    """E01, E13, D04, D15: each fault, with enough left to go on and with too few; the laws hold all along."""
    config = small_config(tmp_path, method=method, scaling__min_replicas=min_replicas)
    for victim in (0, 2):
        config = config.override({"run.name": f"victim-{victim}"})
        laws, script = Laws(config), script_for(phase, kind, victim, join_after=1)
        assert_finished(config, laws, run(config, dataset, script, laws))
        assert not script.faults, "the fault never came"
        if min_replicas == 1:
            tried_again = phase in ("inner", "exchange", "heal", "wiring") if method == "muon-dp" else (phase, kind) == ("exchange", "all")
            tried_again += phase == "regroup" and kind != "leave" and method == "muon-dp"  # the loss that made room for a joiner
            assert laws.attempts == len(laws.trained) + tried_again


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
@pytest.mark.parametrize("kind", ["before", "mid", "acknowledge"])
def test_a_loss_while_the_first_parameters_are_sent_is_a_loss_like_any_other(dataset: Dataset, tmp_path: Path, method: str, kind: str) -> None:
    """E10: with too few left the run waits, and a joiner copies the state of one that has made no step yet."""
    for min_replicas in (1, 3):
        config = small_config(tmp_path, method=method, scaling__min_replicas=min_replicas, run__name=f"few-{min_replicas}")
        laws = Laws(config)
        assert_finished(config, laws, run(config, dataset, Script(Fault(0, "publish", kind, 1), join_after=1), laws))
        assert laws.participants[0] == ((0, 2) if min_replicas == 1 else (0, 2, 3))


def test_a_run_does_not_start_from_different_parameters(dataset: Dataset, tmp_path: Path) -> None:
    """D10: round 0 begins with one θ, or not at all, by the name of the odd one."""
    config = small_config(tmp_path, scaling__min_replicas=1)
    with pytest.raises(RunError, match="replica 1 holds other parameters"):
        run(config, dataset, Script(Fault(0, "publish", "digest", 1)), Laws(config))


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
def test_nobody_copies_a_spoilt_state(dataset: Dataset, tmp_path: Path, method: str) -> None:
    """A joiner that arrives at the end of the very round in which its donor-to-be was spoilt has a finite state all the same."""
    config = small_config(tmp_path, method=method, scaling__min_replicas=1)
    laws = Laws(config)
    script = Script(Fault(1, "inner", "silent", 2), Fault(2, "inner", "nan", 0), join_after=1 if method == "muloco" else 0)
    assert_finished(config, laws, run(config, dataset, script, laws))


def test_samples_that_spoil_two_replicas_are_given_up_on_and_stay_so(dataset: Dataset, tmp_path: Path) -> None:
    """D20: not after one failure, and after two for good: a resumed run knows of them."""
    config = small_config(tmp_path, scaling__min_replicas=1)
    laws, script = Laws(config), Script(Fault(2, "inner", "nan", 0), Fault(3, "inner", "nan", 1))
    run(config, dataset, script, laws, stop_after=4)
    assert_finished(config, laws, run(config, dataset, script, laws))
    assert [r["skipped_samples"] for r in records(config)[:5]] == [0, 0, 2, 2, 2]


def test_only_attempts_that_fail_running_are_counted_against_a_run(dataset: Dataset, tmp_path: Path) -> None:
    """Two spoilt attempts, a commit, two more: the run goes on; three in a row end it as diverged."""
    config = small_config(tmp_path)
    laws = Laws(config)
    spoilt = [Fault(a, "inner", "nan", a % 3) for a in (2, 3, 5, 6)]
    assert_finished(config, laws, run(config, dataset, Script(*spoilt), laws))
    config = config.override({"run.name": "diverged"})
    with pytest.raises(RunError, match="diverged"):
        run(config, dataset, Script(*spoilt, Fault(4, "inner", "nan", 1)), Laws(config))


def test_the_fastest_replica_may_be_lost_while_the_sum_is_taken(dataset: Dataset, tmp_path: Path) -> None:
    """D04: weights are relative to the most that anyone did; when that one is gone the others' sum is still divided by its own weights."""
    config = small_config(tmp_path, scaling__min_replicas=1, scaling__equal_time_rounds=True, sync_interval=6)
    laws = Laws(config)
    assert_finished(config, laws, run(config, dataset, Script(Fault(2, "exchange", "mid", 0), join_after=1), laws))
    assert laws.participants[1] == (1, 2)


def test_the_only_replica_with_the_truth_may_die_and_the_truth_stays(dataset: Dataset, tmp_path: Path) -> None:
    """E01: A dies while B holds no committed θ: B commits nothing of its own, it receives the coordinator's θ and goes on from that."""
    config = small_config(tmp_path, replicas=2, scaling__min_replicas=1, eval_every_rounds=1)
    laws = Laws(config)
    script = Script(Fault(3, "inner", "dead", 1), Fault(3, "publish", "before", 0), join_after=0)
    assert_finished(config, laws, run(config, dataset, script, laws))
    assert laws.participants[2:4] == [(0,), (2, 3)] or laws.participants[2:4] == [(0,), (2,)]
    losses = [r["val_loss"] for r in records(config)]
    assert max(later - earlier for earlier, later in pairwise(losses)) < 0.1, "a model of random weights is a nat worse"


def test_all_replicas_may_die_at_once(dataset: Dataset, tmp_path: Path) -> None:
    """E01, E13: with nobody left the run waits for new replicas, which begin with θ and a new inner state, under new ids."""
    for method in ("muloco", "muon-dp"):
        config = small_config(tmp_path, method=method, run__name=method)
        laws = Laws(config)
        script = Script(*(Fault(2, "inner", "silent", v) for v in (0, 1, 2)), join_after=2)
        assert_finished(config, laws, run(config, dataset, script, laws))
        assert laws.participants[1] == (3, 4, 5)


def test_a_run_that_waits_for_replicas_hears_a_stop_and_gives_up_in_the_end(dataset: Dataset, tmp_path: Path) -> None:
    """E16: either way the last commit is durable, and the same command goes on from it."""
    config = small_config(tmp_path, scaling__rejoin_timeout_seconds=0.0)
    laws, script = Laws(config), Script(Fault(3, "inner", "dead", 1), join_after=NEVER)
    with pytest.raises(RunError, match=r"too few replicas: 2 replicas live, 3 are needed .*round-000002"):
        run(config, dataset, script, laws)
    laws.must_not_lose_rounds()
    script.faults.append(Fault(5, "inner", "dead", 1))
    patient = config.override({"scaling.rejoin_timeout_seconds": 600.0})
    result = run(patient, dataset, script, laws, stop_in_need=True)
    assert result is not None
    assert (result["status"], result["rounds"]) == ("stopped", 3)
    assert_finished(patient, laws, run(patient, dataset, script, laws))


def test_half_of_the_replicas_do_not_commit_where_more_are_needed(dataset: Dataset, tmp_path: Path) -> None:
    """E05: 4 partitioned into 2 + 2. The side without the coordinator has nobody to commit with; the other waits for min_replicas."""
    config = small_config(tmp_path, replicas=4, scaling__min_replicas=3)
    laws = Laws(config)
    cut_off = [Fault(2, "exchange", "mid", v) for v in (0, 1)]
    assert_finished(config, laws, run(config, dataset, Script(*cut_off, join_after=3), laws))
    assert all(len(p) >= 3 for p in laws.participants)
    assert records(config)[1]["tokens_lost"] == 4 * 2 * LENGTH
    config = small_config(tmp_path, replicas=4, scaling__min_replicas=2, run__name="two")
    laws = Laws(config)
    assert_finished(config, laws, run(config, dataset, Script(*cut_off, join_after=3), laws))
    assert laws.attempts == len(laws.trained)
    assert len(laws.participants[1]) == 2


def test_two_coordinators_never_commit_to_one_run(dataset: Dataset, tmp_path: Path) -> None:
    """E05: were each half to have a coordinator, one of them has the run's lock and the other does not begin."""
    config = small_config(tmp_path, run__lock_wait_seconds=0.0)
    first = Ledger(config, NullTracker(), Silent())
    laws = Laws(config)
    try:
        with pytest.raises(RunError, match="lock"):
            run(config, dataset, Script(), laws)
    finally:
        first.close()
    assert_finished(config, laws, run(config, dataset, Script(), laws))


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
def test_a_joiner_is_merged_within_two_rounds(dataset: Dataset, tmp_path: Path, method: str) -> None:
    """D06, E15: it joins during a commit, begins with that commit's θ, and the next round is its first."""
    config = small_config(tmp_path, method=method, scaling__min_replicas=1)
    laws = Laws(config)
    assert_finished(config, laws, run(config, dataset, Script(Fault(2, "publish", "acknowledge", 1), join_after=1), laws))
    ((joiner, rounds_then),) = laws.joined.items()
    assert "replica 3 joins" in records(config)[rounds_then - 1]["reasons"]
    assert [joiner in p for p in laws.participants] == [n >= rounds_then for n in range(len(laws.participants))]


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
def test_a_joiner_slower_than_several_rounds_is_still_let_in(dataset: Dataset, tmp_path: Path, method: str) -> None:
    """E09: the others train on for four rounds while it gets ready; it comes in, with the θ of that boundary."""
    config = small_config(tmp_path, method=method, rounds=8, scaling__min_replicas=1)
    laws = Laws(config)
    assert_finished(config, laws, run(config, dataset, Script(Fault(2, "inner", "silent", 1), join_after=4), laws))
    lone_rounds = [p for p in laws.participants if p == (0, 2)]
    assert len(lone_rounds) >= 4
    assert laws.participants[-1] == (0, 2, 3)


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
@pytest.mark.parametrize("join_after", [0, 3])
def test_most_of_the_living_take_part_though_faults_come_every_few_rounds(dataset: Dataset, tmp_path: Path, method: str, join_after: int) -> None:
    """E04: K = 8, a fault every P = 3 attempts. A fault costs its own replica's round and no survivor's.

    Of P attempts with K planned replicas each, less `join_after` while the replacement is on its way, one contribution is
    lost: mean K_eff / alive ≥ 1 - 1 / (P K - join_after), 0.95 here. In data-parallel rounds, which start again, all are merged.
    """
    period, replicas = 3, 8
    config = small_config(tmp_path, method=method, rounds=16, replicas=replicas, scaling__min_replicas=1)
    laws = Laws(config)
    script = Script(*(Fault(a, "inner", "silent", a) for a in range(2, 15, period)), join_after=join_after)
    assert_finished(config, laws, run(config, dataset, script, laws))
    rounds = records(config)
    assert not script.faults
    bound = 1 - 1 / (period * replicas - join_after)
    assert sum(r["effective_replicas"] for r in rounds) >= bound * sum(r["alive"] for r in rounds) - 1e-6
    assert min(r["participants"] for r in rounds) >= replicas - 1 - join_after // period
    if method == "muloco":
        assert laws.attempts == len(laws.trained), "no survivor's work was thrown away"


@pytest.mark.parametrize("method", ["muloco", "muon-dp"])
def test_a_joiner_of_a_model_with_frozen_parameters(dataset: Dataset, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """E10, E11: frozen tensors have no state and are not sent; join, checkpoint and resume work without them."""

    def build(*arguments: Any, **options: Any) -> Any:
        model = build_model(*arguments, **options)
        next(model.blocks.parameters()).requires_grad_(False)
        return model

    for module in (coordinator, replica):
        monkeypatch.setattr(module, "build_model", build)
    config = small_config(tmp_path, method=method)
    laws = Laws(config)
    script = Script(Fault(0, "publish", "mid", 1), Fault(3, "inner", "dead", 0))
    run(config, dataset, script, laws, stop_after=4)
    assert_finished(config, laws, run(config, dataset, script, laws))
    whole = sum(p.numel() for p in build_model(config.model, seed=0, separator_id=0).parameters())
    assert laws.coordinator.layout.numel < whole


@pytest.mark.parametrize(
    ("method", "state", "copied"), [("muloco", "donor", True), ("muloco", "fresh", False), ("diloco", "donor", True), ("muon-dp", "fresh", True)]
)
def test_a_joiner_has_the_inner_state_of_its_donor_or_a_new_one(dataset: Dataset, tmp_path: Path, method: str, state: str, copied: bool) -> None:
    """D07, D08: every momentum tensor is the donor's, bit for bit, at the boundary of the join; without inner steps it adds exactly nothing."""
    config = small_config(tmp_path, method=method, scaling__join_inner_state=state, scaling__min_replicas=1)
    harness = Harness(config, dataset)
    harness.round()
    harness.round()
    harness.group.eject([2])
    assert harness.group.regroup().joined == (3,)
    donor, joiner = (harness.group.replicas[k].optimizer.state_tensors() for k in (0, 3))
    assert donor.keys() == joiner.keys()
    assert all(torch.equal(joiner[name], tensor if copied else torch.zeros_like(tensor)) for name, tensor in donor.items())
    assert any(tensor.any() for tensor in donor.values())
    published = harness.group.publish(harness.coordinator.theta)
    assert published.digests[3] == harness.coordinator.digest()
    if method != "muon-dp":
        harness.group.exchange({3: 1.0}, harness.coordinator.merged)
        assert torch.count_nonzero(harness.coordinator.merged) == 0
