"""A cluster of several nodes on this machine, one for each replica: where a node can crash without taking the others along."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import ray

from ray_muloco.runtime.actors import COORDINATOR, NAMESPACE

NODE_STORE_BYTES = 80 * 2**20
# a silent node is called dead after 3 s instead of a minute; read by the head as it starts
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3", "RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
}  # fmt: skip


@contextlib.contextmanager
def one_node_a_replica(num_replicas: int, threads: int) -> Iterator[Callable[[], None]]:
    """Connect this process to a private cluster of a head for the coordinator and a node for each replica.

    Yields a function that starts new nodes for those that crashed; like everything here it is for the main thread only.
    """
    from ray.cluster_utils import Cluster

    ours = {name: value for name, value in HEALTH_CHECKS.items() if name not in os.environ}
    os.environ.update(ours)
    node = {"object_store_memory": NODE_STORE_BYTES, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0, "resources": {COORDINATOR: 1}})
    try:
        for _ in range(num_replicas):
            cluster.add_node(num_cpus=threads, **node)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)

        def replenish() -> None:
            alive = sum(n["Alive"] for n in ray.nodes()) - 1
            handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            for _ in range(num_replicas - alive):
                cluster.add_node(wait=False, num_cpus=threads, **node)
            for number, handler in handlers.items():  # starting a node takes SIGTERM for itself, and a run that is to stop would die
                signal.signal(number, handler)

        yield replenish
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name in ours:
            del os.environ[name]
