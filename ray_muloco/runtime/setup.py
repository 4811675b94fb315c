"""What the actors run when they begin: the session of the coordinator, the model and data of a replica.

Apart from actors.py so that importing the actors' classes, as the driver must, does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
import torch

from ray_muloco.config import TrainConfig
from ray_muloco.core.memory import keep_freed_memory
from ray_muloco.data.dataset import Dataset, open_dataset
from ray_muloco.errors import ConfigError
from ray_muloco.runtime.drill import Drill, DrilledGroup
from ray_muloco.runtime.gauges import Gauged
from ray_muloco.runtime.group import RayGroup
from ray_muloco.runtime.roster import Roster
from ray_muloco.training import storage
from ray_muloco.training.ledger import Listener
from ray_muloco.training.replica import Replica
from ray_muloco.training.session import Seats, run_session


def run_on_ray(config: TrainConfig, tracking_uri: str, listener: Listener, should_stop: Callable[[], bool], drill: Drill | None = None) -> dict[str, Any]:
    """The session over replica actors; the actors start at once and come up while the session reads its files."""
    torch.set_num_threads(max(1, config.scaling.threads_per_replica))
    roster = Roster(config, listener.message, should_stop)

    def group(dataset: Dataset, data_dir: str) -> RayGroup:
        return DrilledGroup(roster, dataset.fingerprint, data_dir, drill) if drill else RayGroup(roster, dataset.fingerprint, data_dir)

    seats = Seats(roster.native_bf16, group)
    try:
        return run_session(config, tracking_uri, seats, Gauged(listener, config.run_name), should_stop)
    finally:
        roster.close()


def build_replica(config: TrainConfig, replica_id: int, device: str, data_dir: str, fingerprint: str, probe: tuple[str, str]) -> Replica:
    """A replica on this node, once it is sure to see the run's storage and the coordinator's data.

    probe: a location and the token of a file the coordinator left there.
    """
    torch.set_num_threads(max(1, config.scaling.threads_per_replica))
    host = ray.util.get_node_ip_address()
    if not storage.check_probe(*probe):
        raise ConfigError(
            "run.storage-path", config.run.storage_path, f"cannot be seen by node {host}, where replica {replica_id} runs",
            "give a directory on a file system that all nodes mount, or a URI such as s3://bucket/runs",
        )  # fmt: skip
    os.makedirs(data_dir, exist_ok=True)
    dataset = open_dataset(config.data, sequence_length=config.model.sequence_length, vocab_size=config.model.vocab_size, cache_dir=data_dir)
    if dataset.fingerprint != fingerprint:
        raise ConfigError(
            "data.source", config.data.source, f"reads differently on node {host}, where replica {replica_id} runs, than for the coordinator",
            "prepare shards once with jobs/prepare.py and give their location (the embedded corpus differs between Python releases)",
        )  # fmt: skip
    if device == "cpu":
        keep_freed_memory()  # the process is the replica's own
    return Replica(config, replica_id, dataset, device)
