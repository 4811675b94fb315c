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
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.data.dataset import Dataset
from ray_muloco.errors import CollectiveError, ConfigError, RunError
from ray_muloco.runtime import exchange, fabric
from ray_muloco.runtime.actors import replica_actor
from ray_muloco.runtime.collectives import Group, join
from ray_muloco.runtime.links import bucket_elements
from ray_muloco.runtime.wiring import Wirer
from ray_muloco.training import storage
from ray_muloco.training.checkpoint import FileRecord
from ray_muloco.training.group import (
    BYTES_PER_ELEMENT,
    CheckpointTarget,
    ExchangeOutcome,
    InnerOutcome,
    PublishOutcome,
    inner_phase_traffic,
)  # fmt: skip
from ray_muloco.training.ledger import SAVE_DEADLINE_SECONDS
from ray_muloco.training.metrics import Traffic
from ray_muloco.training.plan import SegmentPlan
from ray_muloco.training.preflight import run_path_of

MAX_EXCHANGE_ATTEMPTS = 3
RECENT_ROUNDS = 8


class RaySeats:
    """The replicas' actors, asked for but empty. They come up while the coordinator reads its files."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        actor = replica_actor(max(1, config.scaling.threads_per_replica), config.scaling.gpus_per_replica)
        self.actors = {k: actor.remote(k) for k in range(config.scaling.num_replicas)}
        self._asked = {k: a.hardware.remote() for k, a in self.actors.items()}
        self._hardware: dict[int, dict[str, Any]] = {}

    def hardware(self) -> dict[int, dict[str, Any]]:
        """What each replica computes with, once all are placed."""
        if self._hardware:
            return self._hardware
        limit = self.config.scaling.placement_timeout_seconds
        _, waiting = ray.wait(list(self._asked.values()), num_returns=len(self._asked), timeout=limit)
        missing = [k for k, ref in self._asked.items() if ref in waiting]
        if missing:
            raise RunError(
                "replicas not placed",
                f"replicas {missing} of {len(self.actors)} were not placed within {limit:.0f} s; the cluster has {ray.available_resources()} free (scaling.placement-timeout-seconds)",
            )
        self._hardware = {k: ray.get(ref, timeout=limit) for k, ref in self._asked.items()}
        return self._hardware

    def native_bf16(self) -> bool:
        """Whether every replica multiplies bf16 natively."""
        return all(h["native_bf16"] for h in self.hardware().values())

    def group(self, dataset: Dataset, data_dir: str) -> RayGroup:
        """The group of these actors."""
        return RayGroup(self, dataset.fingerprint, data_dir)

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors.values():
            ray.kill(actor, no_restart=True)
        self.actors = {}


class RayGroup:
    """Replica actors and the coordinator's side of their collectives; lives in the coordinator's process."""

    def __init__(self, seats: RaySeats, fingerprint: str, data_dir: str) -> None:
        self.seats, self.fingerprint, self.data_dir = seats, fingerprint, data_dir
        self.actors: dict[int, Any] = seats.actors
        self.generation = 0
        self.traffic = Traffic()
        self._link: Group | None = None
        self._wirer: Wirer | None = None
        self._bucket_elements = 0
        self._num_params = 0
        self._wired: tuple[int, ...] = ()
        self._inner_seconds: deque[float] = deque(maxlen=RECENT_ROUNDS)

    @property
    def alive(self) -> tuple[int, ...]:
        return tuple(sorted(self.actors))

    # ---- beginning and end

    def start(self, config: TrainConfig, generation: int, inner_states: Mapping[int, Callable[[], dict[str, Tensor]]]) -> None:
        self.config, self.generation = config, generation
        self._wirer = Wirer(config, self.seats.hardware())
        self._bucket_elements = bucket_elements(bool(self._wirer.fabric))
        run_path = run_path_of(config)
        probe = (run_path, storage.write_probe(run_path))
        refs = {k: a.build.remote(config, self.data_dir, self.fingerprint, probe, inner_states.get(k)) for k, a in self.actors.items()}
        _, errors = self._collect(refs, config.scaling.first_round_seconds)
        storage.remove_probe(*probe)
        if errors:
            raise RunError("replicas could not start", "; ".join(f"replica {k}: {cause}" for k, cause in errors.items()))

    def close(self) -> None:
        self._unwire()
        if self._wirer is not None:
            self._wirer.close()
        self.seats.close()
        self.actors = {}

    # ---- phases

    def run_inner(self, plans: Mapping[int, SegmentPlan]) -> InnerOutcome:
        begin = time.perf_counter()
        if self.config.is_data_parallel:
            try:
                self._wire()
            except CollectiveError as error:
                return InnerOutcome({}, self._survey(str(error)))
        refs = {k: self.actors[k].run_inner.remote(plan) for k, plan in plans.items()}
        reports, lost = self._collect(refs, self._inner_deadline())
        self._inner_seconds.append(time.perf_counter() - begin)
        if len(reports) < len(plans):  # a group that failed someone repeats its failure: the next phase forms a new one
            self._unwire()
        first = next(iter(plans.values()))
        inner_phase_traffic(self.config, self.traffic, self._num_params, len(plans), first.num_steps)
        return InnerOutcome(reports, lost)

    def exchange(self, weights: Mapping[int, float], out: Tensor) -> ExchangeOutcome:
        lost: dict[int, str] = {}
        for _ in range(MAX_EXCHANGE_ATTEMPTS + len(weights)):
            merged = tuple(k for k in sorted(weights) if k in self.actors)
            if not merged:
                return ExchangeOutcome((), lost)
            refs = self._attempt(
                lost, lambda merged=merged: self._dispatch_exchange(weights, merged), lambda link, merged=merged: self._sum_into(link, out, merged)
            )
            if refs is not None:
                self.traffic.uplink_bytes += BYTES_PER_ELEMENT * out.numel() * (1 if self.config.is_data_parallel else len(merged))
                return ExchangeOutcome(merged, lost)
        raise RunError("exchange failed", f"no exchange of generation {self.generation} succeeded though replicas {list(self.alive)} live")

    def publish(self, theta: Tensor, *, heal: bool = False) -> PublishOutcome:
        lost: dict[int, str] = {}
        for _ in range(MAX_EXCHANGE_ATTEMPTS + len(self.actors)):
            if not self.actors:
                return PublishOutcome({}, lost)
            digests = self._attempt(
                lost, lambda: {k: a.receive.remote() for k, a in self.actors.items()}, lambda link: exchange.publish(link, theta, self._bucket_elements)
            )
            if digests is not None:
                payload = BYTES_PER_ELEMENT * theta.numel() * len(digests)
                self._num_params = theta.numel()
                if heal:
                    self.traffic.heal_bytes += payload
                else:
                    self.traffic.downlink_bytes += payload
                return PublishOutcome(digests, lost)
        raise RunError("publication of θ failed", f"no broadcast of generation {self.generation} succeeded though replicas {list(self.alive)} live")

    def roll_back(self) -> None:
        self._collect({k: a.roll_back.remote() for k, a in self.actors.items()}, self._floor())

    def reset_inner_state(self, replica_ids: Sequence[int]) -> None:
        self._collect({k: self.actors[k].reset_inner_state.remote() for k in replica_ids if k in self.actors}, self._floor())

    def eject(self, replica_ids: Sequence[int]) -> None:
        for k in replica_ids:
            self._drop(k)

    def evaluate(self, shares: Mapping[int, Sequence[int]]) -> dict[int, tuple[float, int]]:
        losses: dict[int, tuple[float, int]] = {}
        todo = {k: list(numbers) for k, numbers in shares.items() if numbers}
        while todo:
            parts, lost = self._collect({k: self.actors[k].evaluate.remote(numbers) for k, numbers in todo.items()}, self.config.scaling.first_round_seconds)
            for part in parts.values():
                losses.update(part)
            left = [number for k in lost for number in todo[k]]
            if left and not self.actors:
                raise RunError("evaluation failed", "; ".join(f"replica {k}: {cause}" for k, cause in lost.items()))
            todo = {self.alive[0]: left} if left else {}
        return losses

    def save(self, target: CheckpointTarget) -> Callable[[], dict[int, FileRecord]]:
        actors = dict(self.actors)
        self._collect({k: a.save.remote(target) for k, a in actors.items()}, self.config.scaling.first_round_seconds)
        refs = {k: a.saved.remote(SAVE_DEADLINE_SECONDS) for k, a in actors.items()}

        def collect() -> dict[int, FileRecord]:
            records: dict[int, FileRecord] = {}
            for k, ref in refs.items():
                try:
                    records[k] = ray.get(ref, timeout=SAVE_DEADLINE_SECONDS)
                except RayActorError:  # lost after the commit: the checkpoint is complete without its inner state
                    continue
            if not records:
                raise RunError("checkpoint failed", "no replica lived to write its part")
            return records

        return collect

    # ---- collectives

    def _dispatch_exchange(self, weights: Mapping[int, float], merged: tuple[int, ...]) -> dict[int, Any]:
        if self.config.is_data_parallel:
            return {merged[0]: self.actors[merged[0]].hand_over.remote()}
        return {k: a.contribute.remote(weights.get(k, 0.0)) for k, a in self.actors.items()}

    def _sum_into(self, link: Group, out: Tensor, merged: tuple[int, ...]) -> None:
        if self.config.is_data_parallel:
            fabric.take_over_(link, out, self._bucket_elements, rank=self._wired.index(merged[0]) + 1)
        else:
            exchange.collect_(link, out, self._bucket_elements)

    def _attempt(self, lost: dict[int, str], dispatch: Callable[[], dict[int, Any]], act: Callable[[Group], object]) -> dict[int, Any] | None:
        """One collective among all members: dispatch, join in, get. None when it failed; who is to blame is dropped."""
        begin = time.monotonic()
        try:
            link = self._wire()
            refs = dispatch()
        except CollectiveError as error:
            lost.update(self._survey(str(error)))
            return None
        failed = False
        try:
            act(link)
        except CollectiveError:
            failed = True
            self._unwire()
        answers, gone = self._collect(refs, self.config.scaling.collective_timeout_seconds + self._floor())
        lost.update(gone)
        if failed or len(answers) < len(refs):
            self._unwire()
            if not gone and time.monotonic() - begin > self.config.scaling.collective_timeout_seconds:
                lost.update(self._survey("silent in a collective"))
            return None
        return answers

    def _wire(self) -> Group:
        """The coordinator's group of the current membership, formed when it is not there yet."""
        while self._link is None or self._wired != self.alive:
            self._unwire()
            if not self.actors:
                raise CollectiveError("none", "join", 0.0, "no replica is left")
            assert self._wirer is not None, "start() comes first"
            self.generation += 1
            wired = self.alive
            main, wirings = self._wirer.wire(self.generation, wired)
            refs = {k: self.actors[k].join.remote(wirings[k]) for k in wired}
            try:
                self._link = join(main, watch=lambda refs=refs: first_death(refs))
            except CollectiveError as error:
                self._link = None
                self._wirer.give_up(wirings.values(), str(error))
            joined, gone = self._collect(refs, self.config.scaling.collective_timeout_seconds + self._floor())
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

    def _collect(self, refs: Mapping[int, Any], limit: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Answers by replica, and causes for those that are lost: dead, silent beyond `limit` seconds, or failed in our own code.

        A replica whose collective failed lives and is in neither. Lost ones are dropped from the membership.
        """
        deadline = time.monotonic() + limit
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}
        waiting = {ref: k for k, ref in refs.items()}
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                lost.update(dict.fromkeys(waiting.values(), f"silent for {limit:.0f} s"))
                break
            k = waiting.pop(ready[0])
            try:
                answers[k] = ray.get(ready[0], timeout=max(1.0, deadline - time.monotonic()))
            except RayActorError as error:
                lost[k] = f"its actor died ({str(error).splitlines()[0]})"
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, BaseException) else error
                if isinstance(cause, ConfigError):
                    raise cause from None
                if not isinstance(cause, CollectiveError):
                    lost[k] = f"{type(cause).__name__}: {cause}"
            except GetTimeoutError:
                lost[k] = f"its answer did not arrive within {limit:.0f} s"
        for k in lost:
            self._drop(k)
        return answers, lost

    def _survey(self, cause: str) -> dict[int, str]:
        """Ask everyone for a sign of life; who gives none is lost."""
        _, lost = self._collect({k: a.leave.remote() for k, a in self.actors.items()}, self._floor())
        return {k: f"{seen} ({cause})" for k, seen in lost.items()}

    def _drop(self, replica_id: int) -> None:
        actor = self.actors.pop(replica_id, None)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def _floor(self) -> float:
        return self.config.scaling.hang_floor_seconds

    def _inner_deadline(self) -> float:
        scaling = self.config.scaling
        if not self._inner_seconds:
            return scaling.first_round_seconds
        return max(scaling.hang_floor_seconds, scaling.hang_factor * statistics.median(self._inner_seconds))


def first_death(refs: Mapping[int, Any]) -> str:
    """Names a replica whose actor died under one of these calls; empty while none did. Does not wait."""
    ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)
    for k, ref in refs.items():
        if ref in ready:
            try:
                ray.get(ref, timeout=1.0)
            except RayActorError:
                return f"replica {k} died"
            except (RayTaskError, GetTimeoutError):  # whoever collects the answers deals with these
                continue
    return ""
