"""Who is lost while a generation is formed is not merged: RayGroup's exchange over scripted formations, without a cluster."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError
from toy import toy_config

from ray_muloco.errors import CollectiveError
from ray_muloco.runtime import answers
from ray_muloco.runtime.actors import EVENTS_AT_ONCE, MAX_EVENTS, CoordinatorActor
from ray_muloco.runtime.group import RayGroup


class Formations(RayGroup):
    """A RayGroup of stand-ins. `deaths`: whom each formation finds dead, in turn; the sum is over those who are dispatched."""

    def __init__(self, replicas: int, deaths: list[list[int]], method: str = "muloco") -> None:
        members = {k: SimpleNamespace(actor=None) for k in range(replicas)}
        roster: Any = SimpleNamespace(members=members, drop=lambda k: members.pop(k, None), finished=lambda ids: None)
        super().__init__(roster, "toy", "")
        self.config = toy_config(method=method, scaling__num_replicas=replicas, batch_sequences=replicas, scaling__min_replicas=1)
        self.deaths, self.dispatched = deaths, []
        self._wired = self.alive

    def _wire(self, lost: dict[int, str]) -> Any:
        for k in self.deaths.pop(0) if self.deaths else []:
            self.roster.drop(k)
            lost[k] = "its actor died"
        if not self.alive:
            raise CollectiveError("none", "join", 0.0, "no replica is left")
        self._wired = self.alive
        return SimpleNamespace(set_timeout=lambda seconds: None)

    def _dispatch_exchange(self, weights: Any, merged: tuple[int, ...]) -> dict[int, Any]:
        self.dispatched.append(merged)
        return dict.fromkeys(merged)

    def _sum_into(self, link: Any, out: torch.Tensor, merged: tuple[int, ...]) -> None:
        out.fill_(sum(2.0**k for k in merged))

    def _collect(self, calls: Any, limit: float) -> Any:
        return dict(calls), {}


@pytest.mark.parametrize("deaths", [[[1]], [[], []], [[1], [2]], [[0, 2]]])
def test_the_sum_and_the_outcome_name_the_same_replicas(deaths: list[list[int]]) -> None:
    """D04: one that reported and then died with its node was found dead by the formation, left out of the sum and booked as merged:
    the mean was divided by one too many, and its samples counted as trained."""
    dead = {k for formation in deaths for k in formation}
    group, out = Formations(3, [list(d) for d in deaths]), torch.zeros(4)
    outcome = group.exchange(dict.fromkeys(range(3), 1.0), out)
    assert set(outcome.merged) == set(range(3)) - dead
    assert set(outcome.lost) == dead
    assert out[0] == sum(2.0**k for k in outcome.merged)
    assert group.dispatched == [outcome.merged], "nothing is dispatched before it is known who is there"


def test_a_formation_that_finds_everybody_dead_merges_nobody() -> None:
    group = Formations(2, [[0, 1]])
    outcome = group.exchange({0: 1.0, 1: 1.0}, torch.zeros(4))
    assert outcome.merged == ()
    assert set(outcome.lost) == {0, 1}


def test_data_parallel_replicas_do_not_begin_a_round_with_the_dead() -> None:
    """The plan of one found dead was dispatched all the same: a KeyError ended the run."""
    group = Formations(3, [[1]], method="muon-dp")
    outcome = group.run_inner(dict.fromkeys(range(3), SimpleNamespace(num_steps=1)))  # type: ignore[arg-type]
    assert outcome.reports == {}
    assert set(outcome.lost) == {1}


def plans(**steps: int) -> Any:
    return {int(k[1:]): SimpleNamespace(num_steps=n) for k, n in steps.items()}


def test_a_deadline_is_of_the_work_that_is_asked_for_now() -> None:
    """With fewer to share it, a survivor has more to evaluate than the median knew, and with the fastest gone more steps: healthy ones were called silent."""
    group = Formations(3, [])
    group.config = group.config.override({"scaling.hang_floor_seconds": 1.0, "scaling.hang_factor": 5.0})
    assert group._inner_deadline(plans(_0=30)) == group.config.scaling.first_round_seconds
    group._step_seconds = {0: deque([0.1, 0.1, 9.0]), 1: deque([1.0])}
    assert group._inner_deadline(plans(_0=60, _1=6)) == pytest.approx(5 * 6.0), "a slow one with few steps does not stretch everyone's"
    assert group._inner_deadline(plans(_1=60)) == pytest.approx(5 * 60.0), "nor is it held to them once it has many"
    group._beginners = {2}
    assert group._inner_deadline(plans(_0=60, _2=6)) == pytest.approx(3 * 5 * 6.0)
    group._ask({0: None}, 1.0, "evaluate", work=10)
    group._usual["evaluate"][0] = 0.5  # seconds a sequence
    assert group._deadline("evaluate", work=80) == pytest.approx(5 * 40.0)


class Method:
    """An actor's method that answers at once, or never; keeps what it was called with."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, list[tuple[Any, ...]]()

    def remote(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.answer


def test_a_donor_that_falls_silent_while_it_heals_is_not_waited_for_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stopped after it had copied its inner state held the whole run for five minutes: the wait is an exchange's, then the spoilt one begins anew."""
    group, limits = Formations(2, []), list[float]()
    donor = SimpleNamespace(keep_state=Method(1), give_state=Method("a state that never comes"))
    spoilt = SimpleNamespace(load_state=Method(None), reset_inner_state=Method(True))
    group.roster.members = {k: SimpleNamespace(actor=actor) for k, actor in enumerate((donor, spoilt))}  # type: ignore[assignment]

    def collected(calls: Any, limit: float) -> Any:
        limits.append(limit)
        return {k: answer for k, answer in calls.items() if answer is not None}, {}

    monkeypatch.setattr(group, "_collect", collected)
    group._usual["copy"] = deque([0.1])
    group._exchange_seconds = deque([0.1])
    group.heal([1])
    ((_, named, patience),) = spoilt.load_state.calls
    scaling = group.config.scaling
    assert named == 0
    assert patience == group._exchange_deadline() <= scaling.collective_timeout_seconds
    assert limits[1] == patience + scaling.hang_floor_seconds, "who asks waits a little longer than who is asked"
    assert len(spoilt.reset_inner_state.calls) == 1


def test_a_death_of_any_kind_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says by other names than an actor's death that a node ran out of memory, or is gone: those ended the whole run."""
    failures = {"a": OutOfMemoryError("the node ran out of memory"), "b": NodeDiedError("the node died"), "c": ObjectLostError("00" * 28, None, "")}

    def get(ref: str, timeout: float) -> Any:
        raise failures[ref]

    monkeypatch.setattr(answers, "ray", SimpleNamespace(wait=lambda refs, **_: ([refs[0]], refs[1:]), get=get))
    found, lost = answers.collect({0: "a", 1: "b", 2: "c"}, 10.0)
    assert found == {}
    assert set(lost) == {0, 1, 2}
    assert "memory" in lost[0]


def test_a_late_driver_gets_a_runs_events_in_pieces() -> None:
    """All of a long run's rounds in one answer took longer than the driver waits, who then took a healthy coordinator down."""
    coordinator = CoordinatorActor()
    coordinator.info({"name": "long"})
    for n in range(MAX_EVENTS + 700):
        coordinator.message(str(n))
    heard, infos, begin = [], [], 0
    while True:
        events, begin, _ = coordinator.events("me", begin, 0.0)
        if not events:
            break
        assert len(events) <= EVENTS_AT_ONCE + 1
        infos += [value for kind, value in events if kind == "info"]
        heard += [int(value) for kind, value in events if kind == "message"]
    assert infos == [{"name": "long"}]
    assert heard == list(range(700, MAX_EVENTS + 700)), "the oldest are in metrics.jsonl"
    coordinator.message("news")
    assert coordinator.events("me", begin, 0.0)[0] == [("message", "news")]
