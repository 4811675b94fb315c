"""The laws of an elastic run, checked while it goes on: at every plan, inner phase, exchange, commit and publication.

`run` is a whole session, files and all, over a `FaultyGroup`; `Laws` watches it and remembers it over resumes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import FaultyGroup, Script, finite
from torch import Tensor
from toy import toy_config

from ray_muloco.config import ModelConfig, TrainConfig
from ray_muloco.core.params import digest
from ray_muloco.data.dataset import Dataset
from ray_muloco.training import session
from ray_muloco.training.coordinator import Committed, Coordinator
from ray_muloco.training.group import InnerOutcome, copies_inner_state
from ray_muloco.training.ledger import Ledger
from ray_muloco.training.plan import Decision, ReplicaReport, SampleRange, SegmentPlan
from ray_muloco.training.replica import Replica, sample_indices

LENGTH = 8
SMALL = ModelConfig(d_model=8, num_layers=1, num_heads=1, head_dim=8, ffn_dim=8, vocab_size=257, sequence_length=LENGTH)


def small_config(storage: Path, *, rounds: int = 6, replicas: int = 3, **changes: Any) -> TrainConfig:
    """A run of so many rounds of two inner steps if nothing is lost, one sequence a replica and step."""
    changes = {"sync_interval": 2, "eval_every_rounds": 2, "checkpoint__every_rounds": 3, **changes}
    return toy_config(
        model=SMALL, run__storage_path=str(storage), scaling__num_replicas=replicas, batch_sequences=replicas,
        budget_tokens=rounds * 2 * replicas * LENGTH, validation_tokens=4 * LENGTH, **changes,
    )  # fmt: skip


def indices(ranges: Iterable[SampleRange]) -> list[int]:
    """All sample indices of these ranges."""
    ranges = list(ranges)
    return sample_indices(ranges).tolist() if ranges else []


def state_bytes(replica: Replica) -> dict[str, bytes]:
    """Every tensor of the inner state, bit for bit."""
    return {name: tensor.numpy().tobytes() for name, tensor in replica.optimizer.state_tensors().items()}


class Laws:
    """What has been committed, who holds what; asserts on everything that happens."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.trained: list[list[int]] = []
        """Sample indices by committed round."""
        self.participants: list[tuple[int, ...]] = []
        self.generations: list[int] = []
        self.attempts = 0
        self.safe_rounds = 0
        """Rounds that a resume must find."""
        self.joined: dict[int, int] = {}
        """Number of committed rounds when each joiner joined."""

    # ---- a session begins

    def watch(self, coordinator: WatchedCoordinator) -> WatchedCoordinator:
        self.coordinator = coordinator
        coordinator.laws = self
        return coordinator

    def began(self, group: FaultyGroup) -> None:
        self.group = group
        committed = self.coordinator.progress.round_number
        assert self.safe_rounds <= committed <= len(self.trained)
        del self.trained[committed:], self.participants[committed:], self.generations[committed:]
        self.theta_digest = self.coordinator.digest()
        self.holders: set[int] = set()
        self.seen = set(group.alive)
        self.replicas: dict[int, Replica] = {}
        self.expected: dict[int, dict[str, bytes]] = {}
        """Inner state that each replica should begin its next inner phase with."""
        self.planned_tokens = self.merged_tokens = self.recorded_lost_tokens = 0
        assert group.generation >= max(self.generations, default=0)
        self.skipped_before = self.coordinator.progress.skipped_samples
        self.failures = Counter({i: r.attempts for r in self.coordinator.progress.pool.returned for i in indices([r])})
        """How often each sample was in a plan whose pseudogradient was not finite."""
        self.samples_are_accounted_for()

    def must_not_lose_rounds(self) -> None:
        """The session ended in order: what it committed is durable."""
        self.safe_rounds = len(self.trained)

    # ---- inner phase, exchange

    def inner_begins(self, plans: Mapping[int, SegmentPlan]) -> None:
        group, truth = self.group, self.coordinator.digest()
        self.attempts += 1
        assert tuple(sorted(plans)) == group.alive, "everyone alive is planned, joiners too"
        assert len(plans) >= self.config.scaling.fewest_replicas
        assert set(plans) <= self.holders, "who never received a committed θ is planned"
        self.at_begin: dict[int, dict[str, bytes]] = {}
        for k in plans:
            replica = group.replicas[k]
            assert digest(replica.theta) == digest(replica.flat) == truth, f"replica {k} begins from another θ"
            assert self.replicas.setdefault(k, replica) is replica, "a survivor was made anew"
            self.at_begin[k] = state_bytes(replica)
            assert self.at_begin[k] == self.expected.get(k, self.at_begin[k]), f"inner state of replica {k} is not what it was left with"
            assert finite(replica.optimizer.state_tensors()), f"replica {k} begins with a spoilt inner state"
        if self.config.is_data_parallel:
            assert len({tuple(sorted(state.items())) for state in self.at_begin.values()}) == 1, "replicas of one model have different inner states"
        self.planned_tokens += sum(p.num_steps * p.batch_sequences * LENGTH for p in plans.values())
        assert all(sum(len(r) for r in p.ranges) == p.num_steps * p.batch_sequences for p in plans.values())

    def inner_ended(self, outcome: InnerOutcome) -> None:
        replicas = self.group.replicas
        self.ends = {k: replicas[k].flat.clone() for k in outcome.reports}
        self.expected = {k: state_bytes(replica) for k, replica in replicas.items()}

    def exchange_begins(self, weights: Mapping[int, float]) -> None:
        assert set(weights) <= self.holders

    def rolled_back(self) -> None:
        if self.config.is_data_parallel:
            self.expected = {k: state for k, state in self.at_begin.items() if k in self.group.replicas}

    # ---- commit

    def committed(self, before: tuple[Tensor, Tensor | None, Any], plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], decision: Decision):
        theta, momentum, progress = before
        merged, after = decision.participants, self.coordinator.progress
        assert digest(theta) == self.theta_digest, "θ moved between two commits"
        self.theta_digest = self.coordinator.digest()
        assert after.round_number == progress.round_number + 1 == len(self.trained) + 1
        assert after.tokens == progress.tokens + sum(reports[k].tokens for k in merged) > progress.tokens
        assert len(merged) >= self.config.scaling.fewest_replicas
        assert set(merged) <= self.holders & set(self.group.alive)
        rates = [reports[k].inner_lr for k in merged if reports[k].num_steps == plans[k].num_steps]
        assert not rates or max(rates) - min(rates) <= 1e-9 * max(rates), "one schedule for all (D18)"
        if momentum is None:
            assert all(torch.equal(self.coordinator.theta, self.ends[k]) for k in merged)
        else:
            total = sum(reports[k].tokens for k in merged)
            mean = sum((theta.double() - self.ends[k].double()) * (reports[k].tokens / total) for k in merged)
            moved = self.config.outer.momentum * momentum.double() + mean
            expected = theta.double() - self.config.outer.lr * (mean + self.config.outer.momentum * moved)
            # the sum of pseudogradients is fp32: a few units in the last place of parameters near 1
            torch.testing.assert_close(self.coordinator.theta.double(), expected, rtol=0, atol=2e-6)
        self.trained.append([i for k in merged for i in indices(plans[k].ranges)[: reports[k].num_steps * plans[k].batch_sequences]])
        self.participants.append(merged)
        self.merged_tokens += sum(plans[k].num_steps * plans[k].batch_sequences * LENGTH for k in merged)  # what nobody worked on is no work lost
        self.failures.update(i for k in decision.sitting_out for i in indices(plans[k].ranges))
        self.samples_are_accounted_for()

    def given_up(self, before: tuple[Tensor, Tensor | None, Any], plans: Mapping[int, SegmentPlan], decision: Decision) -> None:
        theta, momentum, progress = before
        assert torch.equal(self.coordinator.theta, theta)
        assert momentum is None or torch.equal(self.coordinator.momentum, momentum)  # type: ignore[arg-type]
        assert (self.coordinator.progress.round_number, self.coordinator.progress.tokens) == (progress.round_number, progress.tokens)
        if not self.config.is_data_parallel:
            usable = [k for k, r in self.coordinator.reports.items() if r.finite]
            assert len(usable) < self.config.scaling.fewest_replicas, "enough replicas were left: the round in flight should have committed"
        self.failures.update(i for k in decision.sitting_out for i in indices(plans[k].ranges))
        self.samples_are_accounted_for()

    def samples_are_accounted_for(self) -> None:
        """Every index below the cursor was trained on once, or waits to be, or was given up on and counted."""
        progress = self.coordinator.progress
        every = np.array([*(i for round_ in self.trained for i in round_), *indices(progress.pool.returned)], dtype=np.int64)
        assert len(np.unique(every)) == len(every), "a sample is trained on twice"
        assert len(every) + progress.skipped_samples == progress.pool.cursor, "a sample is lost"
        assert progress.skipped_samples - self.skipped_before == sum(count >= 2 for count in self.failures.values()), "given up on too early, or too late"
        assert not len(every) or every.max() < progress.pool.cursor

    # ---- membership

    def published(self, digests: Mapping[int, int]) -> None:
        truth = self.coordinator.digest()
        self.holders = {k for k in (self.holders | set(digests)) & set(self.group.alive) if digests.get(k) == truth}

    def joins(self, k: int, donor: int | None) -> None:
        assert k not in self.seen, "an id is used twice"
        self.seen.add(k)
        self.joined[k] = len(self.trained)
        self.expected[k] = self._copied(donor)

    def healed(self, replica_ids: Sequence[int]) -> None:
        if self.config.is_data_parallel:  # rolled back to the round's start, which is finite and everybody's
            return
        donors = [d for d in self.group.alive if d in self.holders and d not in replica_ids]
        for k in set(replica_ids) & set(self.group.alive):
            self.expected[k] = self._copied(donors[0] if donors else None)

    def _copied(self, donor: int | None) -> dict[str, bytes]:
        """What a joiner's inner state is to be."""
        some = next(iter(self.group.replicas.values()))
        if donor is None or not copies_inner_state(self.config):
            return {name: bytes(tensor.numel() * tensor.element_size()) for name, tensor in some.optimizer.state_tensors().items()}
        assert donor in self.holders, "who never received a committed θ is a donor"
        return state_bytes(self.group.replicas[donor])

    # ---- records

    def recorded(self, record: Mapping[str, Any]) -> None:
        truth = self.coordinator.digest()
        assert {digest(r.theta) for r in self.group.replicas.values()} | {digest(r.flat) for r in self.group.replicas.values()} <= {truth}
        assert set(self.group.alive) <= self.holders
        assert record["round"] == len(self.trained)
        assert record["participants"] == len(self.participants[-1])
        assert record["generation"] >= max(self.generations, default=0)
        self.generations.append(record["generation"])
        due = record["round"] % self.config.eval_every_rounds == 0 or self.coordinator.finished
        assert (record["val_loss"] is not None) == (due and bool(self.group.alive)), "whoever is left measures what the lost were to measure"
        self.recorded_lost_tokens += record["tokens_lost"]
        assert self.recorded_lost_tokens == self.planned_tokens - self.merged_tokens

    def ended(self) -> None:
        assert self.recorded_lost_tokens + self.coordinator.lost_tokens == self.planned_tokens - self.merged_tokens


class WatchedCoordinator(Coordinator):
    """A Coordinator that tells the laws what it does."""

    laws: Laws
    reports: Mapping[int, ReplicaReport]

    def _now(self) -> tuple[Tensor, Tensor | None, Any]:
        return self.theta.clone(), None if self.momentum is None else self.momentum.clone(), self.progress

    def decide(self, plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], lost: Mapping[int, str]) -> Decision:
        self.reports = reports
        return super().decide(plans, reports, lost)

    def commit(self, plans: Mapping[int, SegmentPlan], reports: Mapping[int, ReplicaReport], decision: Decision) -> Committed:
        before = self._now()
        committed = super().commit(plans, reports, decision)
        self.laws.committed(before, plans, reports, decision)
        return committed

    def retry(self, plans: Mapping[int, SegmentPlan], decision: Decision, lost: Mapping[int, str]) -> None:
        before = self._now()
        super().retry(plans, decision, lost)
        self.laws.given_up(before, plans, decision)


class Crash(BaseException):
    """The coordinator's process ends, without a word: what deals with exceptions does not get to deal with it."""


class Silent:
    """A listener that does not listen."""

    def info(self, info: dict[str, Any]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def round(self, record: dict[str, Any]) -> None:
        pass


class Listener(Silent):
    """Tells the laws what is recorded; asks to stop, or crashes, after a round."""

    def __init__(self, laws: Laws, stop_after: int, crash_after: int, stop_in_need: bool) -> None:
        self.laws, self.stop_after, self.crash_after, self.stop_in_need = laws, stop_after, crash_after, stop_in_need
        self.asked_in_need = 0

    def round(self, record: dict[str, Any]) -> None:
        self.laws.recorded(record)

    def should_stop(self) -> bool:
        if len(self.laws.trained) >= self.crash_after:
            raise Crash
        self.asked_in_need += not self.laws.coordinator.enough(self.laws.group.alive)
        return len(self.laws.trained) >= self.stop_after or (self.stop_in_need and self.asked_in_need > 1)


NEVER = 10**9


def run(
    config: TrainConfig, dataset: Dataset, script: Script, laws: Laws, *, stop_after: int = NEVER, crash_after: int = NEVER, stop_in_need: bool = False
) -> dict[str, Any] | None:
    """A session of the run under the script; its result, or None when it crashed. A second call resumes it.

    It is stopped, or crashes, after so many rounds; or is stopped while it waits for replicas.
    """
    torch.set_num_threads(1)
    listener = Listener(laws, stop_after, crash_after, stop_in_need)
    seats = session.Seats(lambda: False, lambda dataset, data_dir: FaultyGroup(dataset, script, laws))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "open_dataset", lambda *_, **__: dataset)
        patch.setattr(session, "Coordinator", lambda config, separator_id: laws.watch(WatchedCoordinator(config, separator_id)))
        patch.setattr(Ledger, "_report", lambda self: None)  # a plot takes longer than the run
        try:
            result = session.run_session(config, "", seats, listener, listener.should_stop)
        except Crash:
            return None
    laws.ended()
    laws.must_not_lose_rounds()
    return result


def records(config: TrainConfig) -> list[dict[str, Any]]:
    """The rounds on record."""
    return [json.loads(line) for line in (Path(config.run.storage_path) / config.run_name / "metrics.jsonl").read_text().splitlines()]


def assert_finished(config: TrainConfig, laws: Laws, result: dict[str, Any] | None) -> None:
    """The run is done, and its records are of one history."""
    rounds = records(config)
    assert result is not None
    assert result["status"] == "finished"
    assert [r["round"] for r in rounds] == list(range(1, len(laws.trained) + 1))
    assert [r["participants"] for r in rounds] == [len(p) for p in laws.participants]
    assert rounds[-1]["tokens"] == sum(r["tokens_merged"] for r in rounds) == LENGTH * sum(map(len, laws.trained)) >= config.budget_tokens
    assert all(b["tokens"] > a["tokens"] and b["generation"] >= a["generation"] for a, b in itertools.pairwise(rounds))
    assert all(r["alive"] <= config.scaling.most_replicas for r in rounds)
    assert result["theta_digest"] == laws.coordinator.digest()
