"""fit: train a configuration on Ray, wherever Ray is.

Uses the Ray already initialised in this process (and never stops that), else the cluster of RAY_ADDRESS, else a private
local one, which it stops. The run itself lives in a coordinator actor; this process follows it and asks it to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError, RunError, StoppedError
from ray_muloco.runtime.actors import NAMESPACE, coordinator_actor
from ray_muloco.runtime.capacity import MAX_REPLICAS_A_CORE, num_placeable
from ray_muloco.runtime.nodes import is_placed
from ray_muloco.training import preflight
from ray_muloco.training.metrics import Result
from ray_muloco.training.preflight import result_of, tracking_uri_of, with_threads
from ray_muloco.training.signals import stop_signals

OBJECT_STORE_BYTES = 100 * 2**20  # tensors travel by collectives; the store carries plans and reports
POLL_SECONDS = 1.0
ANSWER_SECONDS = 60.0
CONNECT_SECONDS = 5.0
MAX_COORDINATOR_DEATHS = 3

__all__ = ["Result", "fit"]


class Silent:
    """A listener that says nothing."""

    def info(self, info: dict[str, Any]) -> None:
        """Ignored."""

    def round(self, record: dict[str, Any]) -> None:
        """Ignored."""

    def message(self, text: str) -> None:
        """Ignored."""


def fit(config: TrainConfig, *, listener: Any = None, drill: Any = None) -> Result:
    """Train to the end of the token budget, or resume and do so; SIGINT and SIGTERM stop it at a commit, with a checkpoint.

    drill: faults to inject (runtime.drill.Drill). listener: an object with info(dict), round(record), message(text), called as the run goes on (training.ledger.Listener).
    Returns a Result whose status is `finished` or `stopped`. Raises ConfigError for bad input, before any work is lost,
    and RunError when the run gave up, with the checkpoint to resume from.
    """
    listener = listener or Silent()
    checked = preflight.check(config)
    if checked.finished_result is not None:
        listener.message(f"run {checked.config.run_name} is finished; nothing to do ({checked.run_path})")
        return result_of(checked.finished_result, checked.run_path)
    with _cluster(checked.config) as (config, joined), stop_signals() as stopping:
        summary = _follow(config, joined, listener, stopping, drill)
    return result_of(summary, checked.run_path)


# ---- the cluster


@contextlib.contextmanager
def _cluster(config: TrainConfig) -> Iterator[tuple[TrainConfig, bool]]:
    """A connected Ray, the configuration with threads chosen for it, and whether others share it."""
    address = os.environ.get("RAY_ADDRESS", "")
    private = not ray.is_initialized() and not address
    if private:
        config = with_threads(config, os.cpu_count() or 1)
        _start_private(config)
    elif not ray.is_initialized():
        _join(address)
    try:
        if not private:
            config = _with_threads_that_fit(config)
        _refuse_unplaceable(config)
        yield config, not private
    finally:
        if private:
            ray.shutdown()


def _with_threads_that_fit(config: TrainConfig) -> TrainConfig:
    """The configuration with `threads_per_replica` chosen: the most with which all replicas still find nodes."""
    most = with_threads(config, int(ray.cluster_resources().get("CPU", 1)))
    if config.scaling.threads_per_replica:
        return config
    for threads in range(most.scaling.threads_per_replica, 1, -1):
        placeable = num_placeable({"CPU": threads, "GPU": config.scaling.gpus_per_replica})
        if placeable is None or placeable >= config.scaling.num_replicas:
            return config.override({"scaling.threads_per_replica": threads})
    return config.override({"scaling.threads_per_replica": 1})


def _join(address: str) -> None:
    """Connect to the cluster of RAY_ADDRESS; one that does not answer is refused in seconds."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "://" not in address:
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise ConfigError(
                "RAY_ADDRESS", address, f"does not answer ({error})", "start the cluster, or unset RAY_ADDRESS to use a private local one"
            ) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            "RAY_ADDRESS", address, f"cannot be joined ({str(error).splitlines()[0]})", "start the cluster, or unset RAY_ADDRESS to use a private local one"
        ) from error


def _start_private(config: TrainConfig) -> None:
    """A local Ray with as many logical CPUs as the run asks for, within reason."""
    cores = os.cpu_count() or 1
    wanted = config.scaling.most_replicas * config.scaling.threads_per_replica
    limit = cores * MAX_REPLICAS_A_CORE
    if wanted > limit:
        raise ConfigError(
            "scaling.max-replicas" if config.scaling.max_replicas else "scaling.num-replicas", config.scaling.most_replicas, f"must be at most {limit // config.scaling.threads_per_replica} on this machine of {cores} cores ({config.scaling.threads_per_replica} threads a replica)",
            "use fewer replicas, or a cluster by RAY_ADDRESS",
        )  # fmt: skip
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray leaves a token in the home directory, which later clusters then demand
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # replicas compute on a thread that is not their first: only with one arena does the C library keep its freed memory
    with _environment("MALLOC_ARENA_MAX", "1"):
        ray.init(
            address="local", num_cpus=max(cores, wanted), include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES, namespace=NAMESPACE,
            _system_config={"worker_niceness": 0},  # Ray's 15 would let everything else on the machine go first
        )  # fmt: skip


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for the processes started meanwhile, unless the user has set it."""
    given = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not given:
            del os.environ[name]


def _refuse_unplaceable(config: TrainConfig) -> None:
    """Refuse a run that the cluster could never hold, in seconds and with the fix."""
    scaling = config.scaling
    placeable = num_placeable({"CPU": max(1, scaling.threads_per_replica), "GPU": scaling.gpus_per_replica})
    if placeable is not None and placeable < scaling.fewest_replicas:
        raise ConfigError(
            "scaling.num-replicas", scaling.num_replicas,
            f"the cluster could hold {placeable} replicas of {scaling.threads_per_replica} CPUs and {scaling.gpus_per_replica:g} GPUs, {scaling.fewest_replicas} are needed",
            "use fewer replicas, set --scaling.threads-per-replica or --scaling.min-replicas, or add nodes",
        )  # fmt: skip


# ---- the run


def _follow(config: TrainConfig, joined: bool, listener: Any, stopping: Callable[[], bool], drill: Any) -> dict[str, Any]:
    """Keep a coordinator running until the run has ended: one that dies is followed by another, from the newest checkpoint."""
    deaths, newest = 0, newest_checkpoint(config)
    stale = preflight.result_of_run(preflight.run_path_of(config))  # of an earlier session, which this one goes on from
    while True:
        coordinator, attached = _find_or_start(config, joined, drill, stopping)
        if attached:
            listener.message(f"run {config.run_name} is already going on; following it")
        try:
            return _unwrap(_relay(coordinator, listener, stopping))
        except RayTaskError:
            raise
        except GetTimeoutError:
            cause = f"it did not answer for {ANSWER_SECONDS:.0f} s"
        except RayError as error:
            cause = str(error).splitlines()[0]
        _end(coordinator)
        result = preflight.result_of_run(preflight.run_path_of(config))
        if result is not None and result != stale:  # it had ended, and another driver that followed it took it down
            return result
        before, newest = newest, newest_checkpoint(config)
        deaths = 1 if newest != before else deaths + 1
        if deaths >= MAX_COORDINATOR_DEATHS:
            raise RunError("the coordinator died", f"{cause}; {deaths} times running without a new checkpoint", newest)
        listener.message(f"the coordinator died ({cause}); another takes its place and goes on from {newest or 'the beginning'}")


def _relay(coordinator: Any, listener: Any, stopping: Callable[[], bool]) -> tuple[str, Any]:
    """Pass on what the coordinator says until it ends, and ask it to stop when this process is asked to; its outcome.

    The last driver to know how it ended takes it down: another would begin a run again that gave up.
    """
    seen, asked, follower = 0, False, secrets.token_hex(8)
    while True:
        if stopping() and not asked:
            listener.message("stopping at the next commit, with a checkpoint")
            coordinator.request_stop.remote()
            asked = True
        events, seen, outcome = ray.get(coordinator.events.remote(follower, seen, POLL_SECONDS), timeout=ANSWER_SECONDS)
        for kind, value in events:
            getattr(listener, kind)(value)
        if outcome is not None and not events:
            with contextlib.suppress(RayActorError, GetTimeoutError):
                if ray.get(coordinator.part.remote(follower), timeout=ANSWER_SECONDS) == 0:
                    _end(coordinator)
            return outcome


def _end(coordinator: Any) -> None:
    with contextlib.suppress(RayActorError):
        ray.kill(coordinator)


def _find_or_start(config: TrainConfig, joined: bool, drill: Any, stopping: Callable[[], bool]) -> tuple[Any, bool]:
    """The run's coordinator, and whether an earlier driver had begun it. One that has ended is replaced."""
    limit_seconds = config.scaling.placement_timeout_seconds
    deadline, cause = time.monotonic() + limit_seconds, "it was not placed"
    actor = coordinator_actor(f"coordinator-{run_key(config)}", detached=joined)
    while True:
        try:
            coordinator = actor.remote()
            call = coordinator.start.remote(config, tracking_uri_of(config), joined, drill)
            while not ray.wait([call], timeout=POLL_SECONDS)[0]:
                if time.monotonic() > deadline or (stopping() and not is_placed(coordinator)):
                    ray.kill(coordinator)  # detached, it would come up some day and stay
                    break
                if stopping():  # one that runs may have begun, and have other followers: it stops in order
                    coordinator.request_stop.remote()
            else:
                state = ray.get(call, timeout=ANSWER_SECONDS)
                if state != "ended":
                    return coordinator, state == "running"
                ray.kill(coordinator)
        except RayTaskError:
            raise
        except RayError as error:  # it ended while we asked, or cannot begin
            cause = str(error).splitlines()[0]
        if stopping():
            raise StoppedError("stopped before the start", "the coordinator was not running yet")
        if time.monotonic() > deadline:
            raise RunError("no coordinator", f"none could be started within {limit_seconds:.0f} s (scaling.placement-timeout-seconds): {cause}")
        time.sleep(0.2)


def _unwrap(outcome: tuple[str, Any]) -> dict[str, Any]:
    kind, value = outcome
    if kind == "error":
        raise value
    return value


def run_key(config: TrainConfig) -> str:
    """What names this run's coordinator on a cluster: two runs never share it."""
    return hashlib.sha256(preflight.run_path_of(config).encode()).hexdigest()[:12]


def newest_checkpoint(config: TrainConfig) -> str:
    """The newest complete checkpoint of a run, found without its coordinator; empty when there is none."""
    return preflight.newest_checkpoint(preflight.run_path_of(config))
