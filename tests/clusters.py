"""What the tests of cluster.yaml, cluster.gcp.yaml and jobs/rayjob.yaml share."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import train

ROOT = Path(__file__).resolve().parents[1]
STRINGS = dict[str, str]
HEALTH_CHECKS = {"initial_delay_ms": 1000, "period_ms": 1000, "timeout_ms": 1000, "failure_threshold": 3}  # a hung node is dead after 6 seconds


def parse(arguments: list[str]) -> train.Flags:
    """The flags of this training command, with a local directory in the bucket's place: the parser looks for the run there."""
    return train.parse([re.sub(r"^(s3|gs)://BUCKET/", "file:///nowhere/", argument) for argument in arguments])


def pinned_ray() -> str:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def misspelled(value: Any, known: Any, where: str = "") -> list[str]:
    """Places of a document whose name or kind of value is not in the table of known ones; STRINGS are strings under any names."""
    if known == STRINGS:
        return [] if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()) else [where]
    if isinstance(known, dict) and isinstance(value, dict):
        return [place for key, item in value.items() for place in (misspelled(item, known[key], f"{where}.{key}") if key in known else [f"{where}.{key}"])]
    if isinstance(known, list) and isinstance(value, list):
        return [place for index, item in enumerate(value) for place in misspelled(item, known[0], f"{where}[{index}]")]
    return [] if isinstance(known, type) and type(value) is known else [where]


def launched(config: dict[str, Any], bundles: list[dict[str, float]], unavailable: str = "") -> dict[str, int]:
    """What Ray's own autoscaler would start for these pending actors, by node type; `unavailable` came lately and did not start."""
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    autoscaling = AutoscalingConfig(copy.deepcopy(config), skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        max_num_nodes=autoscaling.get_max_num_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(bundle) for bundle in bundles]),
        recoverable_resource_availabilities={unavailable: 0.0} if unavailable else {},
    )
    reply = ResourceDemandScheduler().schedule(request)
    assert not reply.infeasible_resource_requests
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def bundles_of(command: list[str]) -> list[dict[str, float]]:
    """What the replicas of this training command ask Ray for."""
    scaling = parse(command[2:]).config.scaling
    return [{"CPU": scaling.threads_per_replica, "GPU": scaling.gpus_per_replica}] * scaling.num_replicas
