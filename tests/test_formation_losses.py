"""Who is lost while a generation is formed is not merged: RayGroup's exchange over scripted formations, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import toy_config

from ray_muloco.errors import CollectiveError
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
