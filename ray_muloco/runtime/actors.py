"""The two actors. Their methods forward; what they forward to imports torch, and does so in the actor's process only.

Ray names an actor's process after its class: `ray::ReplicaActor`, `ray::CoordinatorActor`.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError, ReplicaLostError, RunError

if TYPE_CHECKING:
    from ray_muloco.runtime.drill import Drill
    from ray_muloco.runtime.links import ReplicaLink, Wiring
    from ray_muloco.training.checkpoint import FileRecord
    from ray_muloco.training.group import CheckpointTarget
    from ray_muloco.training.plan import ReplicaReport, SegmentPlan
    from ray_muloco.training.replica import Replica

NAMESPACE = "ray_muloco"
FETCH_SECONDS = 60.0
SILENT_FOLLOWER_SECONDS = 10.0
MAX_EVENTS, EVENTS_AT_ONCE = 4000, 500
FILES, HEALING, CONTROL = "files", "healing", "control"
COORDINATOR = "coordinator"  # the resource of nodes that are kept for coordinators (cluster.yaml)


class ReplicaActor:
    """A replica in a process of its own. Phases run on one thread; files are written and awaited on another."""

    def __init__(self, replica_id: int) -> None:
        self.replica_id = replica_id
        self.link: ReplicaLink | None = None
        self._files = ThreadPoolExecutor(1)
        self._saving: Future[FileRecord] | None = None
        self._kept: dict[int, dict[str, Any]] = {}
        self._num_kept = 0

    def hardware(self) -> dict[str, Any]:
        """Where this replica is and what it computes with; imports torch, so that the next call finds it there."""
        from ray_muloco.core.precision import native_bf16
        from ray_muloco.runtime.collectives import NCCL, RAY_NCCL, why_unavailable

        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "native_bf16": native_bf16(self._device()),
            "unavailable": {backend: why_unavailable(backend) for backend in (NCCL, RAY_NCCL)},
        }

    def build(self, config: TrainConfig, data_dir: str, fingerprint: str, probe: tuple[str, str], inner_state: Callable[[], dict[str, Any]] | None) -> None:
        """Make the model, read the data, restore the inner state."""
        from ray_muloco.runtime.setup import build_replica

        self.replica: Replica = build_replica(config, self.replica_id, self._device(), data_dir, fingerprint, probe)
        if inner_state is not None:
            self.replica.load_state_tensors(inner_state())

    def join(self, wiring: Wiring) -> None:
        """Leave the old generation's groups, if any, and enter the new one's."""
        from ray_muloco.runtime.links import ReplicaLink

        self.leave()
        self.link = ReplicaLink(wiring)

    def ping(self) -> None:
        """A sign of life."""

    def leave(self) -> None:
        """Close the groups of the current generation."""
        if self.link is not None:
            self.link.close()
        self.link = None

    def run_inner(self, plan: SegmentPlan) -> ReplicaReport:
        """The inner phase of a plan; data-parallel replicas average gradients on the way."""
        if not self.replica.config.is_data_parallel:
            return self.replica.run_inner(plan)
        assert self.link is not None, "data-parallel replicas train in a group"
        return self.replica.run_inner(plan, self.link.average_)

    @ray.method(concurrency_group=CONTROL)
    def cut_short(self) -> None:
        """End the inner phase after the step it is at: the others are done, and the round's grace is over."""
        self.replica.cut_short()

    def contribute(self, scale: float, timeout: float) -> None:
        """Join the exchange with scale · Δ; a scale of 0 takes part and adds nothing, whatever Δ is. timeout: seconds a collective may take."""
        assert self.link is not None
        self.link.set_timeout(timeout)
        self.link.contribute(self.replica.theta, self.replica.flat, scale)

    def hand_over(self, timeout: float) -> None:
        """Send this replica's parameters to the coordinator (data-parallel methods)."""
        assert self.link is not None
        self.link.set_timeout(timeout)
        self.link.hand_over(self.replica.flat)

    def receive(self, timeout: float) -> int:
        """Take θ from the coordinator and begin from it; returns its digest."""
        assert self.link is not None
        self.link.set_timeout(timeout)
        theta_digest = self.link.receive_(self.replica.theta)
        self.replica.adopt()
        return theta_digest

    def roll_back(self) -> None:
        """Forget the last inner phase."""
        self.replica.roll_back()

    def reset_inner_state(self) -> None:
        """Begin the inner optimizer anew."""
        self.replica.reset_inner_state()

    def keep_state(self) -> int:
        """Copy the inner state as it is at this boundary, for joiners; returns the copy's number."""
        self._num_kept += 1
        self._kept[self._num_kept] = self.replica.state_tensors()
        return self._num_kept

    @ray.method(concurrency_group=HEALING)
    def give_state(self, number: int) -> dict[str, Any]:
        """The inner state that `keep_state`, whose answer this call waits for, has copied; this replica trains on meanwhile."""
        return self._kept.pop(number)

    @ray.method(concurrency_group=HEALING)
    def fail(self, kind: str, delay: float, factor: float = 1.0) -> None:
        """Die, stop, slow down by a factor, or take this node down after so many seconds: a drill's fault."""
        from ray_muloco.runtime.drill import HANG, NODE, SLOW, dragged

        time.sleep(delay)
        if kind == SLOW:  # in the place of the method: a replica that was never slowed asks nothing
            self.replica.inner_steps = dragged(self.replica.inner_steps, factor)
            return
        if kind == NODE:
            os.kill(os.getppid(), signal.SIGKILL)  # the node's raylet, whose child every actor is
        os.kill(os.getpid(), signal.SIGSTOP if kind == HANG else signal.SIGKILL)

    def load_state(self, states: Sequence[ray.ObjectRef[dict[str, Any]]], donor: int, timeout: float) -> int:
        """Take a donor's inner state; returns its bytes. ReplicaLostError when the donor died, or was silent, before it gave it."""
        from ray_muloco.training.group import num_bytes

        begin = time.monotonic()
        try:
            tensors = ray.get(states[0], timeout=timeout)
        except RayError as error:
            raise ReplicaLostError(donor, time.monotonic() - begin, str(error).splitlines()[0]) from None
        self.replica.load_state_tensors(tensors)
        return num_bytes(tensors)

    def evaluate(self, sequence_numbers: Sequence[int]) -> dict[int, tuple[float, int]]:
        """Nats and bytes of validation sequences under θ."""
        return self.replica.evaluate(sequence_numbers)

    def save(self, target: CheckpointTarget) -> None:
        """Copy the state now; write it on the files thread."""
        from ray_muloco.training.group import write_replica

        self._saving = self._files.submit(write_replica, target, self.replica_id, self.replica.state_tensors())

    @ray.method(concurrency_group=FILES)
    def saved(self, timeout: float) -> FileRecord:
        """The record of the file that `save` began."""
        assert self._saving is not None
        return self._saving.result(timeout)

    def _device(self) -> str:
        return "cuda" if ray.get_gpu_ids() else "cpu"


class CoordinatorActor:
    """The run, off the driver: a lost driver connection is not a lost run.

    `start` begins the session on a thread of its own; drivers poll `events` and ask it to stop. The last one that follows it
    takes the process down; when nobody does within a minute of its end, it ends by itself.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._info: dict[str, Any] = {}
        self._outcome: tuple[str, Any] | None = None
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._followers: dict[str, float] = {}  # when each driver asked last, until it has the outcome
        self._config: TrainConfig | None = None

    def start(self, config: TrainConfig, tracking_uri: str, exit_unfetched: bool, drill: Drill | None = None) -> str:
        """Begin the session, once: `begun`, or what it is since an earlier driver began it, `running` or `ended`.

        Raises ConfigError when it is running with other settings than these.
        """
        from ray_muloco.training import preflight

        if self._config is not None:
            if self._outcome is None:
                preflight.refuse_other_settings(config, self._config, running=True)
            return "running" if self._outcome is None else "ended"
        self._config = config
        threading.Thread(target=self._run, args=(config, tracking_uri, exit_unfetched, drill), name="session", daemon=True).start()
        return "begun"

    def _run(self, config: TrainConfig, tracking_uri: str, exit_unfetched: bool, drill: Drill | None) -> None:
        try:
            from ray_muloco.runtime.setup import run_on_ray

            outcome = ("result", run_on_ray(config, tracking_uri, self, self._stop.is_set, drill))
        except (ConfigError, RunError) as error:
            outcome = ("error", error)
        except Exception as error:  # the driver, another process, raises it with the traceback as text
            outcome = ("error", RunError("the coordinator failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        with self._news:
            self._outcome = outcome
            self._news.notify_all()
        if exit_unfetched:
            time.sleep(FETCH_SECONDS)
            os._exit(0)

    # Listener: called by the session, on its thread

    def info(self, info: dict[str, Any]) -> None:
        """What the run is."""
        self._info = info
        self._tell("info", info)

    def round(self, record: dict[str, Any]) -> None:
        """A committed round."""
        self._tell("round", record)

    def message(self, text: str) -> None:
        """A sentence for people."""
        self._tell("message", text)

    def _tell(self, kind: str, value: Any) -> None:
        with self._news:
            self._events.append((kind, value))
            self._num_events += 1
            self._news.notify_all()

    # Control: called by the driver, while the session runs

    @ray.method(concurrency_group=CONTROL)
    def events(self, follower: str, begin: int, wait_seconds: float) -> tuple[list[tuple[str, Any]], int, tuple[str, Any] | None]:
        """Some events from number `begin` on, the number to go on from, and the outcome, if there is one; waits a little for news.

        follower: who asks. Who comes late, or is slow, misses the oldest: metrics.jsonl has all rounds.
        """
        with self._news:
            self._followers[follower] = time.monotonic()
            self._news.wait_for(lambda: self._num_events > begin or self._outcome is not None, timeout=wait_seconds)
            first = self._num_events - len(self._events)
            missed = [("info", self._info)] if begin < first else []  # without it nothing else can be shown
            begin = max(begin, first)
            events = list(itertools.islice(self._events, begin - first, begin - first + EVENTS_AT_ONCE))
            return missed + events, begin + len(events), self._outcome

    @ray.method(concurrency_group=CONTROL)
    def part(self, follower: str) -> int:
        """This driver has the outcome; returns how many others are still to fetch it. One that has not asked lately is gone."""
        with self._news:
            self._followers.pop(follower, None)
            return sum(time.monotonic() - asked < SILENT_FOLLOWER_SECONDS for asked in self._followers.values())

    @ray.method(concurrency_group=CONTROL)
    def request_stop(self) -> None:
        """Stop at the next commit, with a checkpoint."""
        self._stop.set()


def replica_actor(num_cpus: float, num_gpus: float) -> Any:
    """The remote class of replicas, with threads for files, joiners and the coordinator's word beside the one for phases; a dead one is not restarted empty."""
    decorate: Any = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, concurrency_groups={FILES: 1, HEALING: 1, CONTROL: 1})  # type: ignore[call-overload]
    return decorate(ReplicaActor)


def coordinator_actor(name: str, detached: bool) -> Any:
    """The remote class of the coordinator, named so that the same command finds a run that is still going on."""
    decorate: Any = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={CONTROL: 4})  # type: ignore[call-overload]
    # where nodes say that they are for coordinators, take one of those: a spot node would take the run down with it
    marked = {"resources": {COORDINATOR: 0.001}} if ray.cluster_resources().get(COORDINATOR) else {}
    return decorate(CoordinatorActor).options(**marked, name=name, namespace=NAMESPACE, lifetime="detached" if detached else None, get_if_exists=True)
