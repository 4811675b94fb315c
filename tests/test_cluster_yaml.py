"""cluster.yaml and cluster.gcp.yaml are examples that `ray up` accepts and whose commands run, checked without a cloud."""

from __future__ import annotations

import json
import os
import re
import shlex
from typing import Any

import pytest
import yaml
from clusters import HEALTH_CHECKS, ROOT, bundles_of, launched, misspelled, parse, pinned_ray

from ray_muloco.training.storage import is_uri

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of libraries that Ray's command line imports
FILES = {"aws": "cluster.yaml", "gcp": "cluster.gcp.yaml"}

# What the files use of the clouds' own words, level by level; a list's items are described by its one item. Ray passes these on unread, so a typo would
# show only at the cloud. EC2: RunInstances. GCP: instances.insert, in which Ray writes `scheduling` as a list.
PROVIDER = {
    "aws": {"type": str, "region": str, "availability_zone": str, "cache_stopped_nodes": bool},
    "gcp": {"type": str, "region": str, "availability_zone": str, "project_id": str, "cache_stopped_nodes": bool},
}
NODE_CONFIG: dict[str, dict[str, Any]] = {
    "aws": {
        "InstanceType": str,
        "IamInstanceProfile": {"Name": str},
        "InstanceMarketOptions": {"MarketType": str},
        "BlockDeviceMappings": [{"DeviceName": str, "Ebs": {"VolumeSize": int, "VolumeType": str}}],
    },
    "gcp": {
        "machineType": str,
        "disks": [{"boot": bool, "autoDelete": bool, "type": str, "initializeParams": {"diskSizeGb": int, "sourceImage": str}}],
        "metadata": {"items": [{"key": str, "value": str}]},
        "serviceAccounts": [{"email": str, "scopes": [str]}],
        "scheduling": [{"preemptible": bool, "onHostMaintenance": str}],
    },
}


@pytest.fixture(scope="module", params=list(FILES))
def cloud(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def cluster(cloud: str) -> dict[str, Any]:
    """The file as Ray reads it, defaults filled in and validated by Ray itself (its schema calls for no cloud library)."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    before = os.getcwd()
    prepared = prepare_config(load(cloud))
    validate_config(prepared)
    assert os.getcwd() == before
    return prepared


def load(cloud: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / FILES[cloud]).read_text(encoding="utf-8"))


def node_types(cluster: dict[str, Any]) -> dict[str, Any]:
    return cluster["available_node_types"]


def workers(cluster: dict[str, Any]) -> dict[str, Any]:
    return {name: node for name, node in node_types(cluster).items() if name != cluster["head_node_type"]}


def is_spot(node: dict[str, Any]) -> bool:
    config = node["node_config"]
    return config.get("InstanceMarketOptions", {}).get("MarketType") == "spot" or {"preemptible": True} in config.get("scheduling", [])


def documented_commands(cloud: str) -> list[list[str]]:
    """The command lines in the file's opening comment, continued lines joined."""
    comment = re.match(r"(#.*\n)+", (ROOT / FILES[cloud]).read_text(encoding="utf-8"))
    assert comment is not None
    text = re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.startswith("  ")]


def submitted(cloud: str) -> tuple[list[str], list[str]]:
    """The documented `ray job submit`: its own arguments, and the command it submits."""
    [command] = [command for command in documented_commands(cloud) if command[:3] == ["ray", "job", "submit"]]
    cut = command.index("--")
    return command[3:cut], command[cut + 1 :]


def starts(cluster: dict[str, Any], who: str) -> tuple[dict[str, str], list[str]]:
    """The one `ray start` of head or worker: its environment, and its arguments."""
    [line] = [line for line in cluster[f"{who}_start_ray_commands"] if "ray start" in line]
    words = shlex.split(line)
    cut = words.index("ray")
    assert words[cut + 1] == "start"
    return dict(word.split("=", 1) for word in words[:cut]), words[cut + 2 :]


def test_minimum_is_at_most_maximum_for_every_node_type(cluster: dict[str, Any]) -> None:
    """Ray's own validation does not look at this."""
    for name, node in node_types(cluster).items():
        assert 0 <= node.get("min_workers", 0) <= node.get("max_workers", 0) <= cluster["max_workers"], name


def test_the_head_holds_the_one_coordinator_and_gives_no_cpu_to_replicas(cluster: dict[str, Any]) -> None:
    holders = {name for name, node in node_types(cluster).items() if node["resources"].get("coordinator")}
    assert holders == {cluster["head_node_type"]}
    assert node_types(cluster)["head"]["resources"] == {"CPU": 0, "coordinator": 1}


def test_spot_workers_are_preferred_and_on_demand_workers_of_the_same_kind_step_in(cluster: dict[str, Any]) -> None:
    spot = {name: node for name, node in workers(cluster).items() if is_spot(node)}
    on_demand = {name: node for name, node in workers(cluster).items() if not is_spot(node)}
    assert spot
    assert on_demand
    assert not is_spot(node_types(cluster)[cluster["head_node_type"]])
    assert min(node["priority"] for node in spot.values()) > max(node["priority"] for node in on_demand.values())

    def kind(node: dict[str, Any]) -> str:
        config = {name: value for name, value in node["node_config"].items() if name != "InstanceMarketOptions"}
        config["scheduling"] = [item for item in config.get("scheduling", []) if "preemptible" not in item]
        return yaml.safe_dump([node["resources"], config])

    assert len({kind(node) for node in workers(cluster).values()}) == 1


def test_ray_starts_spot_workers_for_the_documented_run_and_on_demand_ones_when_there_are_no_more(cloud: str) -> None:
    config = load(cloud)
    bundles = bundles_of(submitted(cloud)[1])
    assert launched(config, bundles) == {"worker_spot": len(bundles)}
    assert launched(config, bundles, unavailable="worker_spot") == {"worker_on_demand": len(bundles)}
    config["available_node_types"]["worker_spot"]["max_workers"] = 3
    assert launched(config, bundles) == {"worker_spot": 3, "worker_on_demand": len(bundles) - 3}


def test_provider_and_node_configs_are_spelled_as_the_cloud_spells_them(cloud: str, cluster: dict[str, Any]) -> None:
    assert cluster["provider"]["type"] == cloud
    assert set(cluster["provider"]) == set(PROVIDER[cloud])
    assert misspelled(cluster["provider"], PROVIDER[cloud]) == []
    for name, node in node_types(cluster).items():
        assert misspelled(node["node_config"], NODE_CONFIG[cloud], name) == []
    assert all(zone.startswith(cluster["provider"]["region"]) for zone in cluster["provider"]["availability_zone"].split(","))


def test_replicas_may_write_their_part_of_a_checkpoint(cloud: str, cluster: dict[str, Any]) -> None:
    """Ray gives its default identity to the head alone."""
    identity = {"aws": "IamInstanceProfile", "gcp": "serviceAccounts"}[cloud]
    assert all(node["node_config"].get(identity) for node in workers(cluster).values())


def test_the_image_runs_the_pinned_ray(cluster: dict[str, Any]) -> None:
    assert f":{pinned_ray()}-py311" in cluster["docker"]["image"]


def test_every_start_says_whether_tokens_are_asked_for(cluster: dict[str, Any]) -> None:
    """Ray would otherwise decide by what lies in the home directory, differently on each node."""
    modes = {starts(cluster, who)[0].get("RAY_AUTH_MODE") for who in ("head", "worker")}
    assert len(modes) == 1
    assert modes <= {"disabled", "token"}


def test_the_dashboard_listens_on_the_loopback_interface_alone(cluster: dict[str, Any]) -> None:
    _, arguments = starts(cluster, "head")
    assert [word for word in arguments if word.startswith("--dashboard-host")] == ["--dashboard-host=127.0.0.1"]


def test_the_head_finds_a_hung_node_in_seconds(cluster: dict[str, Any]) -> None:
    environment, _ = starts(cluster, "head")
    found = {name.removeprefix("RAY_health_check_"): int(value) for name, value in environment.items() if name.startswith("RAY_health_check_")}
    assert found == HEALTH_CHECKS


def test_start_commands_are_rays(cluster: dict[str, Any]) -> None:
    """Every option exists, and head and workers meet at the same port."""
    from ray.scripts.scripts import start

    for who in ("head", "worker"):
        start.make_context("start", list(starts(cluster, who)[1]), resilient_parsing=False)
    assert "--head" in starts(cluster, "head")[1]
    assert "--port=6379" in starts(cluster, "head")[1]
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in starts(cluster, "head")[1]
    assert starts(cluster, "worker")[1] == ["--address=$RAY_HEAD_IP:6379"]


def test_a_stopped_job_gets_the_time_for_its_checkpoint(cloud: str, cluster: dict[str, Any]) -> None:
    """Ray kills after 3 seconds otherwise: said for every job at the head's start, and once more where the job is submitted."""
    options, _ = submitted(cloud)
    variables = json.loads(options[options.index("--runtime-env-json") + 1])["env_vars"]
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) == int(starts(cluster, "head")[0]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 120


def test_the_documented_submission_parses(cloud: str, cluster: dict[str, Any]) -> None:
    from ray.dashboard.modules.job.cli import submit

    options, command = submitted(cloud)
    submit.make_context("submit", [*options, "--", *command])
    assert command[:2] == ["python", "jobs/train.py"]
    flags = parse(command[2:])
    assert is_uri(flags.config.run.storage_path)
    assert is_uri(flags.config.data.source)
    assert flags.config.run.name
    assert flags.config.scaling.num_replicas <= cluster["max_workers"]
    assert flags.config.scaling.placement_timeout_seconds >= 900  # a worker takes minutes to start
    assert not flags.local


def test_the_other_documented_commands_name_the_file(cloud: str) -> None:
    from ray.scripts.scripts import cli

    named = [command for command in documented_commands(cloud) if command[0] == "ray" and command[1] != "job"]
    assert {command[1] for command in named} >= {"up", "dashboard"}
    for command in named:
        cli.commands[command[1]].make_context(command[1], command[2:])
        assert command[-1] == FILES[cloud]


def test_the_program_is_installed_from_where_it_is_copied_to(cluster: dict[str, Any]) -> None:
    [target] = [target for target, source in cluster["file_mounts"].items() if source == "."]
    [install] = [line for line in cluster["setup_commands"] if "pip install" in line]
    assert f"--constraint {target}/constraints.txt" in install
    assert install.endswith(f"--editable {target}")
    assert not set(cluster["rsync_exclude"]) & {"jobs", "ray_muloco", "constraints.txt", "pyproject.toml"}
