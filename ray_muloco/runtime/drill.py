"""Fault drills: a run under a schedule of faults, real ones, in the phases where they hurt.

A schedule is data, drawn from a seed. Faults are injected where the phase is known, in the coordinator's process: a
replica is told to kill, stop or slow itself, or to kill its node, after a moment; the coordinator kills itself. Each fault is written to a file
before it happens, so that a coordinator that comes back knows which ones are behind it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_list
from torch import Tensor

from ray_muloco.runtime.group import RayGroup
from ray_muloco.runtime.leaks import shared_files
from ray_muloco.runtime.roster import Roster
from ray_muloco.training.checkpoint import FileRecord
from ray_muloco.training.group import Changes, CheckpointTarget, ExchangeOutcome, InnerOutcome, PublishOutcome
from ray_muloco.training.plan import SegmentPlan

KILL, HANG, NODE, COORDINATOR, SLOW = "kill", "hang", "node", "coordinator", "slow"
PHASES = ("inner", "exchange", "publish", "checkpoint")
RARE = 10
"""Of so many drawn faults one is a hang and one the coordinator's death."""
UNKNOWN_PHASE_SECONDS = 0.05
USUAL_STEPS = 101
"""Recent inner steps of a slowed replica that say how long one takes it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: what happens, in which phase of the first round from `round` on that has one.

    moment: share of the phase's usual time after which it happens; victim: share of the living replicas before the victim;
    factor: how many times as long a slow replica's inner steps take from its next inner phase on.
    """

    number: int
    round: int
    kind: str
    phase: str
    moment: float
    victim: float
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Drill:
    """A schedule of faults, and the JSON lines file that says which have happened."""

    faults: tuple[Fault, ...]
    log: str
    speeds: str = ""
    """JSON lines file for the inner steps a second of each replica, a line a round; empty for none."""
    still: bool = False
    """Whether odd rounds end without a look at the membership: what elasticity costs is the difference to even ones."""


def draw_faults(count: int, seed: int, rounds: int) -> tuple[Fault, ...]:
    """`count` faults spread evenly over the rounds, their kinds, phases, moments and victims drawn by the seed.

    One in ten is a hang and one in ten the coordinator's death, at least one each where there are three faults; the rest are
    kills. A fault comes in the first six tenths of its share of rounds, so that what it set off can end before the next.
    """
    generator = random.Random(seed)
    rare = [kind for kind in (HANG, COORDINATOR) for _ in range(max(1, count // RARE) if count > 2 else 0)]
    drawn = rare + [KILL] * (count - len(rare))
    generator.shuffle(drawn)
    share = rounds / max(count, 1)
    return tuple(
        Fault(
            number=n,
            round=max(2, 1 + int(share * (n + 0.1 + 0.5 * generator.random()))),
            kind=kind,
            phase=generator.choice(PHASES),
            moment=generator.random(),
            victim=generator.random(),
        )
        for n, kind in enumerate(drawn)
    )


def read_log(path: str) -> list[dict[str, Any]]:
    """The faults that happened, in order; a torn last line is none."""
    happened: list[dict[str, Any]] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if os.path.exists(path) else []:
        with contextlib.suppress(ValueError):
            happened.append(json.loads(line))
    return happened


def usage_path(log: str) -> str:
    """The file, beside a drill's log, with what the coordinator's process held after each round."""
    return f"{log.removesuffix('.jsonl')}-usage.jsonl"


class InnerSteps(Protocol):
    """Replica.inner_steps."""

    def __call__(self, plan: SegmentPlan) -> Iterator[None]: ...


def dragged(inner_steps: InnerSteps, factor: float) -> InnerSteps:
    """The inner loop with every step stretched to `factor` times its length by sleep, which leaves the core to others.

    A step's length is what this thread computes in a usual one of them: what it waits for a busy core, or for a neighbour's use of
    the caches, would be stretched too, and a replica be slow and unsteady instead of slow.
    """
    computed: deque[float] = deque(maxlen=USUAL_STEPS)

    def steps(plan: SegmentPlan) -> Iterator[None]:
        begin = time.thread_time()
        for _ in inner_steps(plan):
            computed.append(time.thread_time() - begin)
            time.sleep((factor - 1) * statistics.median(computed))
            yield
            begin = time.thread_time()

    return steps


class DrilledGroup(RayGroup):
    """A RayGroup whose replicas, or whose coordinator, fail as scheduled."""

    def __init__(self, roster: Roster, fingerprint: str, data_dir: str, drill: Drill) -> None:
        super().__init__(roster, fingerprint, data_dir)
        self._log, self._speeds, self._still = drill.log, drill.speeds, drill.still
        done = {entry["number"] for entry in read_log(drill.log)}
        self._due = [fault for fault in drill.faults if fault.number not in done]
        self._round = self._noted_round = 0
        self._phase_seconds: dict[str, float] = {}
        """What each phase took when no fault was in it."""

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        self._round = next(iter(plans.values())).round_number
        with self._phase("inner"):
            outcome = super().run_inner(plans)
        if self._speeds:
            speeds = {k: report.num_steps / report.seconds for k, report in sorted(outcome.reports.items())}
            with open(self._speeds, "a", encoding="utf-8") as file:
                file.write(json.dumps({"round": self._round, "steps_per_second": speeds}) + "\n")
        return outcome

    def regroup(self, wait_seconds: float = 0.0) -> Changes:
        if self._still and self._round % 2:
            return Changes((), {})
        return super().regroup(wait_seconds)

    def _watch_nodes(self, calls: Sequence[Any], until: float) -> None:
        if not (self._still and self._round % 2):
            super()._watch_nodes(calls, until)

    def exchange(self, weights: Mapping[int, float], out: Tensor) -> ExchangeOutcome:
        with self._phase("exchange"):
            return super().exchange(weights, out)

    def publish(self, theta: Tensor) -> PublishOutcome:
        with self._phase("publish"):
            outcome = super().publish(theta)
        if self._round > self._noted_round and not self._still:
            self._noted_round = self._round
            self._note_usage()
        return outcome

    def _note_usage(self) -> None:
        """What this process, Ray and the longest-lived replica hold after a round, for the question whether it grows: a line in a file beside the log."""
        me, oldest = psutil.Process(), self.roster.members[self.alive[0]].facts if self.alive else {}
        usage = {
            "round": self._round, "pid": os.getpid(), "resident_bytes": me.memory_info().rss, "descriptors": me.num_fds(), "threads": me.num_threads(),
            "rendezvous_keys": self.num_rendezvous_keys(), "shared_memory_files": len(shared_files()),
            "named_actors": len(ray.util.list_named_actors(all_namespaces=True)), "ray_keys": len(_internal_kv_list("")),
        }  # fmt: skip
        if oldest.get("host") == ray.util.get_node_ip_address():
            with contextlib.suppress(psutil.NoSuchProcess):
                replica = psutil.Process(oldest["pid"])
                usage |= {
                    "replica_resident_bytes": replica.memory_info().rss,
                    "replica_descriptors": replica.num_fds(),
                    "replica_threads": replica.num_threads(),
                }
        with open(usage_path(self._log), "a", encoding="utf-8") as file:
            file.write(json.dumps(usage) + "\n")

    def save(self, target: CheckpointTarget) -> Callable[[], dict[int, FileRecord]]:
        with self._phase("checkpoint"):
            return super().save(target)

    @contextlib.contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        due = next((fault for fault in self._due if fault.phase == phase and fault.round <= self._round), None)
        if due is not None and self.alive:
            self._due.remove(due)
            self._inject(due, due.moment * self._phase_seconds.get(phase, UNKNOWN_PHASE_SECONDS))
        begin = time.monotonic()
        yield
        if due is None:
            self._phase_seconds[phase] = time.monotonic() - begin

    def _inject(self, fault: Fault, delay: float) -> None:
        alive = self.alive
        victim = alive[int(fault.victim * len(alive))]
        entry = {**asdict(fault), "in_round": self._round, "replica": None if fault.kind == COORDINATOR else victim, "time": time.time() + delay}
        with open(self._log, "a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
            log.flush()
            os.fsync(log.fileno())
        if fault.kind == COORDINATOR:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            self.actors[victim].fail.remote(fault.kind, delay, fault.factor)
