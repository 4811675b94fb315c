"""What a cluster can hold, now or once its autoscaler has grown it to its maxima."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ray

MAX_REPLICAS_A_CORE = 16


def num_placeable(bundle: Mapping[str, float]) -> int | None:
    """How many bundles of resources the cluster could hold together; None where an autoscaler's limit is not known or there is none."""
    now = sum(fits(node["Resources"], bundle) for node in ray.nodes() if node["Alive"])
    maxima = autoscaler_maxima(bundle)
    return None if maxima is None else max(now, maxima)


def autoscaler_maxima(bundle: Mapping[str, float]) -> int | None:
    """How many bundles the autoscaler's node groups hold at their maxima: 0 without an autoscaler, None without a known limit."""
    from ray._private.state import state  # the cluster's configuration has no public reader

    config = state.get_cluster_config()
    if config is None:  # Ray's own autoscaler keeps its node types to itself
        return None if has_autoscaler() else 0
    total = 0
    for group in config.node_group_configs:
        held = fits(dict(group.resources), bundle)
        if held and group.max_count < 0:
            return None
        total += held * group.max_count
    return total


def has_autoscaler() -> bool:
    """Whether an autoscaler reports to this cluster.

    A head without one runs a monitor too, some seconds after its start: it says version 0 and names each node type node_ID.
    """
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    version = get_cluster_status(ray.get_runtime_context().gcs_address).stats.autoscaler_version
    if version not in (None, "", "0"):
        return True
    status: Any = json.loads(_internal_kv_get("__autoscaling_status") or b"{}")
    types = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
    return any(not name.startswith("node_") for name in types)


def fits(resources: Mapping[str, Any], bundle: Mapping[str, float]) -> int:
    """How many bundles fit into one node's resources: the least of the quotients over what a bundle needs."""
    return min(int(resources.get(name, 0) // amount) for name, amount in bundle.items() if amount > 0)
