"""cluster.yaml is an example that `ray up` accepts, checked without a cloud."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
CLOUD_KEYS = {"InstanceType", "InstanceMarketOptions", "BlockDeviceMappings"}  # of EC2's create_instances that the example uses


@pytest.fixture(scope="module")
def cluster() -> dict[str, Any]:
    """The file as Ray reads it, defaults filled in and validated by Ray itself (its schema calls for no cloud library)."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    before = os.getcwd()
    prepared = prepare_config(yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8")))
    validate_config(prepared)
    assert os.getcwd() == before
    return prepared


def node_types(cluster: dict[str, Any]) -> dict[str, Any]:
    return cluster["available_node_types"]


def test_minimum_is_at_most_maximum_for_every_node_type(cluster: dict[str, Any]) -> None:
    """Ray's own validation does not look at this."""
    for name, node in node_types(cluster).items():
        assert 0 <= node.get("min_workers", 0) <= node.get("max_workers", 0) <= cluster["max_workers"], name


def test_the_head_holds_the_one_coordinator(cluster: dict[str, Any]) -> None:
    holders = {name for name, node in node_types(cluster).items() if node["resources"].get("coordinator")}
    assert holders == {cluster["head_node_type"]}
    assert node_types(cluster)["head"]["resources"]["coordinator"] == 1


def test_spot_workers_are_preferred_and_on_demand_workers_of_the_same_kind_step_in(cluster: dict[str, Any]) -> None:
    workers = {name: node for name, node in node_types(cluster).items() if name != cluster["head_node_type"]}
    spot = {name for name, node in workers.items() if node["node_config"].get("InstanceMarketOptions", {}).get("MarketType") == "spot"}
    on_demand = set(workers) - spot
    assert spot
    assert on_demand
    assert min(workers[name]["priority"] for name in spot) > max(workers[name]["priority"] for name in on_demand)
    assert len({workers[name]["node_config"]["InstanceType"] for name in workers}) == 1


def test_node_configs_are_spelled_as_the_cloud_spells_them(cluster: dict[str, Any]) -> None:
    """Ray passes node_config on unread, so a typo would show only at the cloud."""
    for name, node in node_types(cluster).items():
        assert set(node["node_config"]) - CLOUD_KEYS - {"ImageId", "IamInstanceProfile", "KeyName", "SecurityGroupIds", "SubnetIds"} == set(), name


def test_the_image_runs_the_pinned_ray(cluster: dict[str, Any]) -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert f":{pinned[1]}-py311" in cluster["docker"]["image"]
