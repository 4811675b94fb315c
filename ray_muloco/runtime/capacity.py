"""What a cluster can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

MAX_REPLICAS_A_CORE = 16


def num_placeable(bundle: Mapping[str, float]) -> int | None:
    """How many bundles of resources the living nodes hold together; None where an autoscaler may add nodes."""
    if has_autoscaler():
        return None
    return sum(fits(node["Resources"], bundle) for node in ray.nodes() if node["Alive"])


def fits(resources: Mapping[str, Any], bundle: Mapping[str, float]) -> int:
    """How many bundles fit into one node's resources: the least of the quotients over what a bundle needs."""
    return min(int(resources.get(name, 0) // amount) for name, amount in bundle.items() if amount > 0)


def has_autoscaler() -> bool:
    """Whether an autoscaler reports to this cluster."""
    from ray.experimental.internal_kv import _internal_kv_get

    return any(_internal_kv_get(key) is not None for key in (b"__autoscaling_status", b"__autoscaling_status_v2"))
