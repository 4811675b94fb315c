"""The roster: whom a run asked for, who is on the way, who is a member.

    asked for → placed → built → (healed by a donor) → ready → member, at a round's boundary

A replica that is wanted and not placed stays a pending actor: that is the demand an autoscaler acts on. Ids are never
used twice: a replacement is another replica.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError, ReplicaLostError, RunError, StoppedError
from ray_muloco.runtime.actors import replica_actor
from ray_muloco.runtime.answers import died, raised
from ray_muloco.runtime.nodes import DrainWatch, is_placed
from ray_muloco.training.group import copies_inner_state
from ray_muloco.training.membership import SAY_EVERY_SECONDS, Changes

POLL_SECONDS = 0.2
ARRIVAL_SECONDS = 10.0
DRAIN_MARGIN_SECONDS = 2.0
HEALING_SECONDS = 300.0
"""How long an inner state may be on its way from a donor."""
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Pauses before the next replica is asked for, by the number of failures running."""


@dataclass(slots=True)
class Recruit:
    """A replica on its way to membership. `call` is the actor's method that is awaited."""

    actor: Any
    call: Any
    stage: str = "asked"
    """`asked`, `placed` (and silent so far), `building`, `built`, `healing` or `ready`."""
    since: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)
    has_state: bool = False
    """Whether its inner state came from a checkpoint."""
    donors_tried: int = 0


@dataclass(slots=True)
class Member:
    """A replica that trains. facts: where it is and what it computes with."""

    actor: Any
    facts: dict[str, Any]
    leaving: bool = False
    has_trained: bool = False


class Roster:
    """Replica actors of a run, from the asking to the end."""

    def __init__(self, config: TrainConfig, say: Callable[[str], None], should_stop: Callable[[], bool] = lambda: False) -> None:
        """say: told every ten seconds whom the start waits for; should_stop: asked whether it is to go on waiting."""
        self.config, self._say, self._should_stop = config, say, should_stop
        self._waited = False
        self.members: dict[int, Member] = {}
        self.recruits: dict[int, Recruit] = {}
        self.refuse: Callable[[Mapping[str, Any]], str] = lambda facts: ""
        """Says why a placed replica cannot take part, if it cannot."""
        self._healed_bytes = 0
        self._class = replica_actor(max(1, config.scaling.threads_per_replica), config.scaling.gpus_per_replica)
        self._build: Callable[[int], tuple[Any, ...]] | None = None
        self._drains = DrainWatch()
        self._next_id = 0
        self._failures = 0
        self._not_before = 0.0
        self._looked = time.monotonic()
        self._keeping: dict[int, Any] = {}
        """Calls by which donors copy their inner state for joiners, of the last boundary."""
        self._backlog: list[str] = []
        """Sentences that the next boundary is to report."""
        self._ask()

    # ---- beginning and end

    def hardware(self) -> dict[int, dict[str, Any]]:
        """What each placed replica computes with, once enough of them are placed.

        Waits for min_replicas, and a little longer for the rest of num_replicas. RunError names those that are missing.
        """
        scaling = self.config.scaling
        if self._placed() >= scaling.fewest_replicas and self._waited:
            return {k: r.facts for k, r in self.recruits.items() if r.facts}
        begin = said = time.monotonic()
        enough_since = 0.0
        while (placed := self._placed()) < scaling.num_replicas:
            now = time.monotonic()
            if placed >= scaling.fewest_replicas:
                enough_since = enough_since or now
                if now - enough_since >= scaling.start_grace_seconds:
                    break
            elif now - begin >= scaling.placement_timeout_seconds:
                missing = sorted(k for k, r in self.recruits.items() if not r.facts)
                raise RunError(
                    "replicas not placed",
                    f"replicas {missing} of {scaling.num_replicas} were not placed within {scaling.placement_timeout_seconds:.0f} s; "
                    f"the cluster has {ray.available_resources()} free (scaling.placement-timeout-seconds)" + "".join(f"; {note}" for note in self._backlog),
                )
            if now - said >= SAY_EVERY_SECONDS:
                said = now
                self._say(
                    f"waiting for replicas since {now - begin:.0f} s: {placed} of {scaling.num_replicas} are placed, {scaling.fewest_replicas} are needed"
                )
            if self._should_stop():
                raise StoppedError("stopped before the start", f"{placed} of {scaling.num_replicas} replicas were placed")
            self._backlog += self._poll(POLL_SECONDS)
            self._ask()
        self._waited = True
        return {k: r.facts for k, r in self.recruits.items() if r.facts}

    def native_bf16(self) -> bool:
        """Whether every placed replica multiplies bf16 natively."""
        return all(facts["native_bf16"] for facts in self.hardware().values())

    def open(self, build: Callable[[int], tuple[Any, ...]], with_state: Sequence[int]) -> None:
        """From now on replicas are built with these arguments as soon as they are placed. with_state: ids whose arguments hold an inner state."""
        self._build = build
        for k, recruit in self.recruits.items():
            recruit.has_state = k in with_state
            if recruit.stage == "building":
                recruit.call, recruit.since = recruit.actor.build.remote(*build(k)), time.monotonic()

    def start(self) -> None:
        """Build those that are placed, and make them members; RunError when none of them comes up, or their own ConfigError."""
        placed = set(self.hardware())
        failures: list[str] = []
        while any(k in placed and r.stage == "building" for k, r in self.recruits.items()):
            failures += self._poll(POLL_SECONDS, at_start=True)
            if self._should_stop():
                raise StoppedError("stopped before the start", "replicas were being built")
        resumed = any(recruit.has_state for recruit in self.recruits.values())
        for k in sorted(placed & self.recruits.keys()):
            if self.recruits[k].stage == "ready" or not resumed:  # one asked for since then has no state of the checkpoint
                self._admit(k)
        if not self.members:
            raise RunError("replicas could not start", "; ".join(failures))
        for recruit in self.recruits.values():  # whoever comes later joins a run that is past the checkpoint's state
            recruit.has_state = False
            if recruit.stage == "ready" and copies_inner_state(self.config):
                recruit.stage = "built"
        self._backlog += failures

    def close(self) -> None:
        """End all actors."""
        for seat in (*self.members.values(), *self.recruits.values()):
            ray.kill(seat.actor, no_restart=True)
        self.members, self.recruits = {}, {}

    # ---- members

    def drop(self, replica_id: int) -> None:
        """End a member's actor; a stopped process takes seconds to die, which nobody waits for."""
        member = self.members.pop(replica_id, None)
        if member is not None:
            ray.kill(member.actor, no_restart=True)
            if not member.has_trained:
                self._pause()

    def finished(self, replica_ids: Iterable[int]) -> None:
        """These members finished an inner phase: what replicas fail of, if they do, is not how they begin."""
        for k in replica_ids:
            if k in self.members and not self.members[k].has_trained:
                self.members[k].has_trained = True
                self._failures = 0

    def pending(self) -> int:
        """Replicas asked for and not placed."""
        return sum(r.stage == "asked" for r in self.recruits.values())

    def hosts(self) -> set[str]:
        """Where members and accepted recruits are."""
        return {seat.facts["host"] for seat in (*self.members.values(), *self.recruits.values()) if seat.facts}

    def take_healed_bytes(self) -> int:
        """Bytes of inner state that reached recruits since this was asked last."""
        taken, self._healed_bytes = self._healed_bytes, 0
        return taken

    # ---- a boundary

    def look(self) -> None:
        """Look which nodes are drained, ahead of the boundary."""
        self._drains.look()

    def regroup(self, wait_seconds: float, donors: Sequence[int], round_seconds: float) -> Changes:
        """Move recruits on, let members go whose nodes end, let in who is ready, ask for who is missing.

        donors: members that hold a committed θ; round_seconds: what a round takes, for those that must leave before a deadline.
        """
        notes, self._backlog = self._backlog, []
        left: dict[int, str] = {}
        notes += self._poll(wait_seconds)
        deadlines = self._drains.deadlines()
        notes += self._notice_drains(deadlines)
        room = self.config.scaling.most_replicas - self._staying()
        if room > 0 or not self.config.is_data_parallel:
            notes += self._heal(donors)
        if self.config.is_data_parallel:  # one model: the copy must be of this very boundary, so it is awaited
            notes += self._await_healing(left)
        joining = sorted(k for k, r in self.recruits.items() if r.stage == "ready")[: max(0, room)]
        left |= self._leave(deadlines, round_seconds, len(joining))
        joined = joining[: max(0, self.config.scaling.most_replicas - len(self.members))]
        for k in joined:
            self._admit(k)
        self._ask()
        return Changes(tuple(joined), left, tuple(notes))

    def _notice_drains(self, deadlines: Mapping[str, float]) -> list[str]:
        """Mark members whose nodes are drained: replacements are asked for at the first notice. Recruits there are let go."""
        for k in [k for k, r in self.recruits.items() if r.facts.get("node_id") in deadlines]:
            self._dismiss(k)
        notes: list[str] = []
        for k, member in sorted(self.members.items()):
            if member.facts["node_id"] in deadlines and not member.leaving:
                member.leaving = True
                notes.append(f"replica {k} will leave: its node is drained within {deadlines[member.facts['node_id']] - time.time():.0f} s")
        return notes

    def _leave(self, deadlines: Mapping[str, float], round_seconds: float, num_joining: int) -> dict[int, str]:
        """Let go of leaving members that have a replacement now, or no time for another round."""
        left: dict[int, str] = {}
        for k, member in sorted(self.members.items()):
            seconds = deadlines.get(member.facts["node_id"], math.inf) - time.time()
            if member.leaving and (len(left) < num_joining or seconds < 2 * round_seconds + DRAIN_MARGIN_SECONDS):
                left[k] = f"left: its node is drained, {seconds:.0f} s before the deadline"
        for k in left:
            self.drop(k)
        return left

    def _staying(self) -> int:
        return sum(not member.leaving for member in self.members.values())

    def _admit(self, replica_id: int) -> None:
        recruit = self.recruits.pop(replica_id)
        self.members[replica_id] = Member(recruit.actor, recruit.facts)

    def _ask(self) -> None:
        """Ask Ray for the replicas that are missing, unless the last ones just failed."""
        if time.monotonic() < self._not_before:
            return
        for _ in range(self.config.scaling.most_replicas - self._staying() - len(self.recruits)):
            k, self._next_id = self._next_id, self._next_id + 1
            actor = self._class.remote(k)
            self.recruits[k] = Recruit(actor, actor.hardware.remote())

    def _placed(self) -> int:
        return sum(bool(r.facts) for r in self.recruits.values())

    def _poll(self, wait_seconds: float, *, at_start: bool = False) -> list[str]:
        """Move every recruit on whose call has been answered; sentences about those that failed, and are dismissed."""
        calls = {r.call: k for k, r in self.recruits.items() if r.call is not None}
        ready: list[Any] = []
        if calls:
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=wait_seconds, fetch_local=False)
            ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0, fetch_local=False) if ready else ([], [])
        elif wait_seconds:
            time.sleep(wait_seconds)
        failures = [cause for call in ready if (cause := self._answered(calls[call], at_start))]
        self._notice_placed()
        failures += [self._fail(k, "was silent while it got ready") for k, r in list(self.recruits.items()) if self._is_late(r)]
        return failures

    def _answered(self, k: int, at_start: bool) -> str:
        """One recruit's call has an answer: its next stage, or why it has none."""
        recruit = self.recruits[k]
        try:
            value: Any = ray.get(recruit.call, timeout=ARRIVAL_SECONDS)
        except GetTimeoutError:
            return self._fail(k, f"gave an answer that did not arrive within {ARRIVAL_SECONDS:.0f} s")
        except RayTaskError as error:
            cause = raised(error)
            if isinstance(cause, ReplicaLostError):  # its donor, not itself
                recruit.stage, recruit.call, recruit.since = "built", None, time.monotonic()
                return f"replica {k} takes its inner state from another replica: {cause}"
            if isinstance(cause, ConfigError) and at_start:
                raise cause from None
            return self._fail(k, f"could not start: {type(cause).__name__}: {cause}")
        except RayError as error:
            return self._fail(k, f"could not start: {died(error)}")
        recruit.call, recruit.since = None, time.monotonic()
        if recruit.stage in ("asked", "placed"):
            if why := self.refuse(value):
                return self._fail(k, f"cannot take part: {why}")
            recruit.facts, recruit.stage = value, "building"
            if self._build is not None:
                recruit.call = recruit.actor.build.remote(*self._build(k))
        elif recruit.stage == "building":
            recruit.stage = "ready" if recruit.has_state or not copies_inner_state(self.config) else "built"
        else:
            self._healed_bytes += value
            recruit.stage = "ready"
        return ""

    def _notice_placed(self) -> None:
        """Whoever has a process and has not answered yet has begun its time to answer; Ray is asked every ten seconds."""
        if time.monotonic() - self._looked < SAY_EVERY_SECONDS:
            return
        self._looked = time.monotonic()
        for recruit in self.recruits.values():
            if recruit.stage == "asked" and is_placed(recruit.actor):
                recruit.stage, recruit.since = "placed", time.monotonic()

    def _is_late(self, recruit: Recruit) -> bool:
        return recruit.call is not None and recruit.stage != "asked" and time.monotonic() - recruit.since > self.config.scaling.first_round_seconds

    def _heal(self, donors: Sequence[int]) -> list[str]:
        """Have every built recruit copy a donor's inner state, while the others train on."""
        notes: list[str] = []
        states: dict[int, Any] = {}
        self._keeping = {}
        for k, recruit in sorted(self.recruits.items()):
            if recruit.stage != "built":
                continue
            if not donors:
                if not self.members:
                    recruit.stage = "ready"
                    notes.append(f"replica {k} begins with a new inner state: nobody lives to copy one from")
                continue
            donor = donors[recruit.donors_tried % len(donors)]
            recruit.donors_tried += 1
            states[donor] = states.get(donor) or self._state_of(donor)
            # in a list: the receiver fetches it, and knows whose death it was
            recruit.call, recruit.stage = recruit.actor.load_state.remote([states[donor]], donor, HEALING_SECONDS), "healing"
        return notes

    def _state_of(self, donor: int) -> Any:
        """The inner state that a donor has now, on its way; the donor pauses only to copy it."""
        actor = self.members[donor].actor
        self._keeping[donor] = kept = actor.keep_state.remote()
        return actor.give_state.remote(kept)

    def _await_healing(self, left: dict[int, str]) -> list[str]:
        """Wait until recruits have their inner state; a donor that does not even copy its own is lost, and in `left`."""
        begin, patience = time.monotonic(), self.config.scaling.hang_floor_seconds
        notes: list[str] = []
        while any(r.stage == "healing" for r in self.recruits.values()) and time.monotonic() < begin + HEALING_SECONDS:
            notes += self._poll(POLL_SECONDS)
            if self._keeping and time.monotonic() > begin + patience:
                _, silent = ray.wait(list(self._keeping.values()), num_returns=len(self._keeping), timeout=0, fetch_local=False)
                for donor in [k for k, kept in self._keeping.items() if kept in silent]:
                    self.drop(donor)
                    left[donor] = f"lost: silent for {patience:.0f} s while it copied its inner state for a joiner"
                self._keeping = {}
        late = [k for k, r in self.recruits.items() if r.stage == "healing"]
        return notes + [self._fail(k, "did not get its inner state in time") for k in late]

    def _fail(self, replica_id: int, cause: str) -> str:
        self._dismiss(replica_id)
        return f"replica {replica_id} {cause}; another is asked for at a boundary, {self._pause():.0f} s from now at the earliest"

    def _pause(self) -> float:
        """Ask for nobody for a while, longer with every failure running."""
        pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        self._not_before = time.monotonic() + pause
        return pause

    def _dismiss(self, replica_id: int) -> None:
        ray.kill(self.recruits.pop(replica_id).actor, no_restart=True)
