"""RayGroup: replicas as actors, in generations.

A generation is the current membership. It is wired anew when the membership changes, before the next collective, never
inside one. Every wait has a deadline; who did not keep it is gone, by name. A death in the inner phase costs nothing to
the others; one in the exchange aborts the group, and the survivors exchange again from the same Δ.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.errors import CollectiveError, RunError
from ray_muloco.runtime import exchange, fabric
from ray_muloco.runtime.answers import collect, first_death, late
from ray_muloco.runtime.collectives import Group, join
from ray_muloco.runtime.links import bucket_elements
from ray_muloco.runtime.nodes import POLL_SECONDS
from ray_muloco.runtime.roster import Roster
from ray_muloco.runtime.wiring import Wirer, refusal
from ray_muloco.training import storage
from ray_muloco.training.checkpoint import FileRecord
from ray_muloco.training.group import (
    BYTES_PER_ELEMENT,
    CheckpointTarget,
    ExchangeOutcome,
    InnerOutcome,
    PublishOutcome,
    copies_inner_state,
    inner_phase_traffic,
)  # fmt: skip
from ray_muloco.training.ledger import SAVE_DEADLINE_SECONDS
from ray_muloco.training.membership import Census, Changes
from ray_muloco.training.metrics import Traffic
from ray_muloco.training.plan import SegmentPlan
from ray_muloco.training.preflight import run_path_of

MAX_EXCHANGE_ATTEMPTS = 3
MAX_BLAMELESS_ATTEMPTS = 2
RECENT_ROUNDS = 8
BEGINNERS_FACTOR = 3
"""How much more time a round has in which someone trains for the first time: nobody knows yet how fast it is."""


class RayGroup:
    """Replica actors and the coordinator's side of their collectives; lives in the coordinator's process."""

    def __init__(self, roster: Roster, fingerprint: str, data_dir: str) -> None:
        self.roster, self.fingerprint, self.data_dir = roster, fingerprint, data_dir
        self.generation = 0
        self.traffic = Traffic()
        self._probe: tuple[str, str] | None = None
        self._link: Group | None = None
        self._wirer: Wirer | None = None
        self._bucket_elements = 0
        self._num_params = 0
        self._wired: tuple[int, ...] = ()
        self._unhealed: set[int] = set()
        """Members that have not received a committed θ yet: they neither count nor donate."""
        self._beginners: set[int] = set()
        """Members that have not finished a round yet."""
        self._unsaid: dict[int, str] = {}
        """Members lost where no outcome could say so; the next boundary does."""
        self._failed_saves: list[str] = []
        self._failure = ""
        """What the last collective failed of."""
        self._usual: dict[str, deque[float]] = {}
        """Seconds that recent calls of a kind took, when nobody was lost."""
        self._step_seconds: dict[int, deque[float]] = {}
        """Seconds a step of each replica's recent inner phases."""
        self._boundary = 0.0
        self._round_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)
        """From one boundary to the next, evaluation and checkpoint included."""
        self._exchange_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self.roster.members))

    @property
    def actors(self) -> dict[int, Any]:
        """The members' actors by replica id, ascending."""
        return {k: self.roster.members[k].actor for k in self.alive}

    # ---- beginning and end

    def start(self, config: TrainConfig, generation: int, inner_states: Mapping[int, Callable[[], dict[str, Tensor]]]) -> None:
        self.config, self.generation = config, generation
        self._wirer = wirer = Wirer(config, self.roster.hardware())
        self._bucket_elements = bucket_elements(bool(wirer.fabric))
        run_path = run_path_of(config)
        self._probe = probe = (run_path, storage.write_probe(run_path))  # stays while the run lasts: joiners look for it too
        self.roster.refuse = lambda facts: refusal(wirer.fabric, config.scaling.collective, self.roster.hosts(), facts)
        # by order of id: which of those asked for are placed is Ray's choice
        states = {k: inner_states[n] for n, k in enumerate(sorted(self.roster.hardware())) if n in inner_states}
        self.roster.open(lambda k: (config, self.data_dir, self.fingerprint, probe, states.get(k)), list(states))
        self.roster.start()
        states.clear()  # whoever is placed later joins a run that is past them
        self._unhealed = set(self.alive)

    def close(self) -> None:
        self._unwire()
        if self._wirer is not None:
            self._wirer.close()
        if self._probe is not None:
            storage.remove_probe(*self._probe)
        self.roster.close()

    def num_rendezvous_keys(self) -> int:
        """Keys in the run's rendezvous store: those of generations that are over are removed."""
        return len(self._wirer.store.keys()) if self._wirer is not None else 0

    # ---- membership

    def regroup(self, wait_seconds: float = 0.0) -> Changes:
        donors = [k for k in self.alive if k not in self._unhealed]
        begin, self._boundary = self._boundary, time.monotonic()
        if begin and not wait_seconds:
            self._round_seconds.append(self._boundary - begin)
        if wait_seconds:  # nothing else asks them meanwhile: a death would go unnoticed, and be waited for
            self._ask({k: a.ping.remote() for k, a in self.actors.items()}, self._floor())
        changes = self.roster.regroup(wait_seconds, donors, max(self._round_seconds, default=0.0))
        self._unhealed.update(changes.joined)
        self._beginners.update(changes.joined)
        self.traffic.heal_bytes += self.roster.take_healed_bytes()
        failed, self._failed_saves = tuple(self._failed_saves), []
        unsaid, self._unsaid = {k: f"lost: {cause}" for k, cause in self._unsaid.items()}, {}
        return Changes(changes.joined, {**unsaid, **changes.left}, (*failed, *changes.notes))

    def census(self) -> Census:
        pending = self.roster.pending()
        return Census(len(self.alive), len(self.roster.recruits) - pending, pending)

    def eject(self, replica_ids: Sequence[int]) -> None:
        for k in replica_ids:
            self.roster.drop(k)

    def heal(self, replica_ids: Sequence[int]) -> None:
        spoilt = [] if self.config.is_data_parallel else [k for k in replica_ids if k in self.roster.members]
        donor = self._kept_state(besides=spoilt) if spoilt and copies_inner_state(self.config) else None
        copied: dict[int, int] = {}
        if donor is not None:
            k, number = donor
            state = self.actors[k].give_state.remote(number)
            limit = self._exchange_deadline()  # an inner state is about as large as θ; everybody waits, so a donor that is silent now is not waited for long
            copied = self._ask({s: self.actors[s].load_state.remote([state], k, limit) for s in spoilt}, limit + self._floor())
            self.traffic.heal_bytes += sum(copied.values())
        # nobody to copy from, or the donor died on the way
        rest = [k for k in spoilt if k in self.roster.members and k not in copied]
        self._ask({k: self.actors[k].reset_inner_state.remote() for k in rest}, self.config.scaling.first_round_seconds)

    def _kept_state(self, besides: Sequence[int]) -> tuple[int, int] | None:
        """A donor that has copied its inner state, and the copy's number; one that is silent is lost, and the next one asked."""
        while donors := [k for k in self.alive if k not in self._unhealed and k not in besides]:
            kept = self._ask({donors[0]: self.actors[donors[0]].keep_state.remote()}, self._deadline("copy"), "copy")
            if kept:
                return donors[0], kept[donors[0]]
        return None

    # ---- phases

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        if self.config.is_data_parallel:
            gone: dict[int, str] = {}
            try:
                self._wire(gone)
            except CollectiveError as error:
                gone |= self._survey(str(error))
                return InnerOutcome({}, gone)
            if gone:  # the others begin the round again without them
                return InnerOutcome({}, gone)
        actors = self.actors
        limit = self._inner_deadline(plans)
        if self.config.is_data_parallel:  # those whom one silent member keeps waiting must be freed before they are called silent too
            limit += self.config.scaling.collective_timeout_seconds
        begin = time.monotonic()
        calls = {k: actors[k].run_inner.remote(plan) for k, plan in plans.items()}
        if self.config.scaling.grace_seconds:
            for k in late(calls, limit, self.config.scaling.grace_seconds):
                actors[k].cut_short.remote()
        self._watch_nodes(list(calls.values()), begin + limit)
        reports, lost = self._collect(calls, limit, begin)
        self._beginners = self._beginners & set(self.alive) - reports.keys()
        self.roster.finished(reports)
        for k, report in reports.items():  # of those who came: a wait for someone silent is no measure of the next round
            self._step_seconds.setdefault(k, deque(maxlen=RECENT_ROUNDS)).append(report.seconds / report.num_steps)
        self._step_seconds = {k: seconds for k, seconds in self._step_seconds.items() if k in self.roster.members}
        if len(reports) < len(plans):  # a group that failed someone repeats its failure: the next phase forms a new one
            self._unwire()
        first = next(iter(plans.values()))
        inner_phase_traffic(self.config, self.traffic, self._num_params, len(plans), first.num_steps)
        return InnerOutcome(reports, lost)

    def exchange(self, weights: Mapping[int, float], out: Tensor) -> ExchangeOutcome:
        lost: dict[int, str] = {}
        for _ in range(MAX_EXCHANGE_ATTEMPTS + len(weights)):
            merged = tuple(k for k in sorted(weights) if k in self.roster.members)
            if not merged:
                return ExchangeOutcome((), lost)
            refs = self._attempt(
                lost, lambda merged=merged: self._dispatch_exchange(weights, merged), lambda link, merged=merged: self._sum_into(link, out, merged)
            )
            if refs is not None:
                self.traffic.uplink_bytes += BYTES_PER_ELEMENT * out.numel() * (1 if self.config.is_data_parallel else len(merged))
                return ExchangeOutcome(merged, lost)
        raise RunError("exchange failed", f"no exchange of generation {self.generation} succeeded though replicas {list(self.alive)} live: {self._failure}")

    def publish(self, theta: Tensor) -> PublishOutcome:
        lost: dict[int, str] = {}
        for attempt in range(MAX_EXCHANGE_ATTEMPTS + len(self.alive) + 1):
            if not self.alive:
                return PublishOutcome({}, lost)
            if attempt >= MAX_BLAMELESS_ATTEMPTS:  # the members managed before they came
                lost |= dict.fromkeys(self._unhealed & set(self.alive), "could not be sent the first θ") if len(self._unhealed) < len(self.alive) else {}
                self.eject([k for k in lost if k in self.roster.members])
            digests = self._attempt(
                lost,
                lambda: {k: a.receive.remote(self._exchange_deadline()) for k, a in self.actors.items()},
                lambda link: exchange.publish(link, theta, self._bucket_elements),
            )
            if digests is not None:
                self._num_params = theta.numel()
                self.traffic.count_publication(BYTES_PER_ELEMENT * theta.numel(), digests, self._unhealed)
                self._unhealed.clear()
                return PublishOutcome(digests, lost)
        raise RunError(
            "publication of θ failed", f"no broadcast of generation {self.generation} succeeded though replicas {list(self.alive)} live: {self._failure}"
        )

    def roll_back(self) -> None:
        self._ask({k: a.roll_back.remote() for k, a in self.actors.items()}, self._floor())

    def evaluate(self, shares: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
        actors = self.actors
        calls = {k: actors[k].evaluate.remote(numbers) for k, numbers in shares.items() if numbers}
        largest = max(map(len, shares.values()))  # with fewer replicas each has more to measure
        parts = self._ask(calls, self._deadline("evaluate", work=largest), "evaluate", work=largest)
        return {number: loss for part in parts.values() for number, loss in part.items()}

    def save(self, target: CheckpointTarget) -> Callable[[], dict[int, FileRecord]]:
        self._ask({k: a.save.remote(target) for k, a in self.actors.items()}, self._deadline("copy"), "copy")
        refs = {k: a.saved.remote(SAVE_DEADLINE_SECONDS) for k, a in self.actors.items()}
        begin, limit = time.monotonic(), self._deadline("save", SAVE_DEADLINE_SECONDS)

        def collect() -> dict[int, FileRecord]:
            records: dict[int, FileRecord] = {}
            for k, ref in refs.items():
                try:
                    records[k] = ray.get(ref, timeout=max(1.0, limit - (time.monotonic() - begin)))
                except RayError as error:  # the commit is whole without one inner state
                    self._failed_saves.append(f"replica {k} did not write its part of a checkpoint: {str(error).splitlines()[-1]}")
            if len(records) == len(refs):
                self._took("save", time.monotonic() - begin)
            return records

        return collect

    # ---- collectives

    def _dispatch_exchange(self, weights: Mapping[int, float], merged: tuple[int, ...]) -> dict[int, Any]:
        if self.config.is_data_parallel:
            return {merged[0]: self.actors[merged[0]].hand_over.remote(self._exchange_deadline())}
        return {k: a.contribute.remote(weights.get(k, 0.0), self._exchange_deadline()) for k, a in self.actors.items()}

    def _sum_into(self, link: Group, out: Tensor, merged: tuple[int, ...]) -> None:
        if self.config.is_data_parallel:
            fabric.take_over_(link, out, self._bucket_elements, rank=self._wired.index(merged[0]) + 1)
        else:
            exchange.collect_(link, out, self._bucket_elements)

    def _attempt(self, lost: dict[int, str], dispatch: Callable[[], dict[int, Any]], act: Callable[[Group], object]) -> dict[int, Any] | None:
        """One collective among all members: dispatch, join in, get. None when it failed; who is to blame is dropped."""
        begin, known = time.monotonic(), len(lost)
        limit = self._exchange_deadline()
        try:
            link = self._wire(lost)
            if len(lost) > known:  # who died while the group was formed does not count: the caller dispatches anew
                return None
            refs = dispatch()
        except CollectiveError as error:
            self._failure = str(error)
            lost.update(self._survey(str(error)))
            return None
        failed = False
        try:
            link.set_timeout(limit)
            act(link)
        except CollectiveError as error:
            failed, self._failure = True, str(error)
            self._unwire()
        # all began with one timeout: where the coordinator's is over the others are free too, but for who is silent
        answers, gone = self._collect(refs, self._floor() if failed else limit + self._floor())
        lost.update(gone)
        if failed or len(answers) < len(refs):
            self._unwire()
            if not gone and time.monotonic() - begin > limit:
                lost.update(self._survey("silent in a collective"))
                self._exchange_seconds.clear()  # if nobody is to blame the deadline was too short: back to the longest
            return None
        self._exchange_seconds.append(time.monotonic() - begin)
        return answers

    def _wire(self, lost: dict[int, str]) -> Group:
        """The coordinator's group of the current membership, formed when it is not there yet; `lost` gains who died meanwhile."""
        while self._link is None or self._wired != self.alive:
            self._unwire()
            if not self.alive:
                raise CollectiveError("none", "join", 0.0, "no replica is left")
            assert self._wirer is not None, "start() comes first"
            self.generation += 1
            wired = self.alive
            main, wirings = self._wirer.wire(self.generation, wired, self._exchange_deadline())
            actors, deadline = self.actors, time.monotonic() + self._exchange_deadline() + self._floor()
            refs = {k: actors[k].join.remote(wirings[k]) for k in wired}
            try:
                self._link = join(main, watch=lambda refs=refs: first_death(refs))
            except CollectiveError as error:
                self._link = None
                self._wirer.give_up(wirings.values(), str(error))
            joined, gone = self._collect(refs, deadline - time.monotonic())  # all began with one timeout, and are free by then
            lost.update(gone)
            self._wired = wired
            if self._link is None or len(joined) < len(wired):  # without all of its members a group is none
                self._unwire()
                if not gone:
                    raise CollectiveError(f"generation {self.generation}", "join", 0.0, "the group could not be formed though all replicas answer")
        return self._link

    def _unwire(self) -> None:
        if self._link is not None:
            self._link.leave()
        self._link = None

    # ---- waiting

    def _watch_nodes(self, calls: Sequence[Any], until: float) -> None:
        """Look which nodes are drained as long as replicas compute, so that the boundary need not ask."""
        waiting = list(calls)
        while waiting and (left := until - time.monotonic()) > 0:
            self.roster.look()
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(POLL_SECONDS, left))

    def _collect(self, calls: Mapping[int, Any], limit: float, begin: float | None = None) -> tuple[dict[int, Any], dict[int, str]]:
        """Answers and losses (`answers.collect`); lost ones are dropped from the membership."""
        answers, lost = collect(calls, limit, begin)
        for k in lost:
            self.roster.drop(k)
        return answers, lost

    def _ask(self, calls: Mapping[int, Any], limit: float, kind: str = "", work: int = 1) -> dict[int, Any]:
        """Answers alone; the next boundary tells who was lost meanwhile. kind, work: what is to be remembered of how long so much took."""
        begin = time.monotonic()
        answers, lost = self._collect(calls, limit)
        self._unsaid.update(lost)
        if kind and not lost:
            self._took(kind, (time.monotonic() - begin) / work)
        return answers

    def _took(self, kind: str, seconds: float) -> None:
        self._usual.setdefault(kind, deque(maxlen=RECENT_ROUNDS)).append(seconds)

    def _deadline(self, kind: str, first: float | None = None, work: int = 1) -> float:
        """Deadline of calls of a kind, by what so much work took recently; `first` (the first round's) while none has."""
        scaling = self.config.scaling
        if kind not in self._usual:
            return scaling.first_round_seconds if first is None else first
        return max(scaling.hang_floor_seconds, scaling.hang_factor * work * statistics.median(self._usual[kind]))

    def _survey(self, cause: str) -> dict[int, str]:
        """Ask everyone for a sign of life; who gives none is lost."""
        _, lost = self._collect({k: a.leave.remote() for k, a in self.actors.items()}, self._floor())
        return {k: f"{seen} ({cause})" for k, seen in lost.items()}

    def _floor(self) -> float:
        return self.config.scaling.hang_floor_seconds

    def _inner_deadline(self, plans: Mapping[int, SegmentPlan]) -> float:
        """By each replica's own usual step and the steps it is to do now; who is not known yet is thought as slow as the slowest."""
        scaling = self.config.scaling
        if not self._step_seconds or (self.config.compile and self._beginners):
            return scaling.first_round_seconds  # kernels are still being compiled
        known = {k: statistics.median(seconds) for k, seconds in self._step_seconds.items()}
        usual = max(known.get(k, max(known.values())) * plan.num_steps for k, plan in plans.items())
        return max(scaling.hang_floor_seconds, scaling.hang_factor * (BEGINNERS_FACTOR if self._beginners else 1) * usual)

    def _exchange_deadline(self) -> float:
        """Deadline of one collective: by what recent ones took, at most scaling.collective_timeout_seconds."""
        scaling = self.config.scaling
        if not self._exchange_seconds:
            return scaling.collective_timeout_seconds
        usual = max(scaling.hang_floor_seconds, scaling.hang_factor * statistics.median(self._exchange_seconds))
        return min(scaling.collective_timeout_seconds, usual)
