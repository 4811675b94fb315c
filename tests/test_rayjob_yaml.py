"""jobs/rayjob.yaml is a RayJob that KubeRay knows, that Ray's autoscaler can act on, and whose entrypoint runs; checked without Kubernetes."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from clusters import HEALTH_CHECKS, ROOT, STRINGS, bundles_of, launched, misspelled, parse, pinned_ray

from ray_muloco.training.storage import is_uri

KNOWN_ENV = [{"name": str, "value": str}]
KNOWN_QUANTITIES = {"cpu": str, "memory": str, "nvidia.com/gpu": str}
# The fields of KubeRay's rayjob_types.go and raycluster_types.go and of Kubernetes' PodSpec, each with its kind. Those of Kubernetes are the manifest's own,
# those of KubeRay all that a user sets, without the objects that the manifest has no use for.
KNOWN_POD = {
    "metadata": {"labels": STRINGS, "annotations": STRINGS},
    "spec": {
        "serviceAccountName": str,
        "terminationGracePeriodSeconds": int,
        "restartPolicy": str,
        "nodeSelector": {"cloud.google.com/gke-accelerator": str, "cloud.google.com/gke-spot": str},
        "tolerations": [{"key": str, "operator": str, "value": str, "effect": str}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": str, "operator": str, "values": [str]}]}]
                }
            }
        },
        "containers": [
            {
                "name": str,
                "image": str,
                "env": KNOWN_ENV,
                "ports": [{"name": str, "containerPort": int}],
                "resources": {"limits": KNOWN_QUANTITIES, "requests": KNOWN_QUANTITIES},
            }
        ],
    },
}
KNOWN_GROUP = {"rayStartParams": {"num-cpus": str, "resources": str}, "resources": STRINGS, "labels": STRINGS, "template": KNOWN_POD}
KNOWN: dict[str, Any] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": STRINGS, "annotations": STRINGS},
    "spec": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "clusterSelector": STRINGS,
        "entrypoint": str,
        "entrypointNumCpus": float,
        "entrypointNumGpus": float,
        "entrypointResources": str,
        "jobId": str,
        "metadata": STRINGS,
        "managedBy": str,
        "rayClusterSpec": {
            "authOptions": {"mode": str, "secretName": str},
            "autoscalerOptions": {"version": str, "idleTimeoutSeconds": int, "upscalingMode": str, "image": str, "imagePullPolicy": str, "env": KNOWN_ENV},
            "enableInTreeAutoscaling": bool,
            "headGroupSpec": KNOWN_GROUP | {"serviceType": str, "enableIngress": bool},
            "headServiceAnnotations": STRINGS,
            "managedBy": str,
            "rayVersion": str,
            "suspend": bool,
            "workerGroupSpecs": [
                KNOWN_GROUP
                | {"groupName": str, "priority": int, "replicas": int, "minReplicas": int, "maxReplicas": int, "idleTimeoutSeconds": int, "numOfHosts": int}
            ],
        },
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
        "submissionMode": str,
        "submitterConfig": {"backoffLimit": int},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
    },
}
REQUIRED = {"apiVersion", "kind", "metadata", "spec"}
SPOT = "cloud.google.com/gke-spot"


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "jobs/rayjob.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cluster(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["rayClusterSpec"]


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for group in groups(cluster) for container in group["template"]["spec"]["containers"]]


def environment(holder: dict[str, Any]) -> dict[str, str]:
    """A container's variables; none is given twice."""
    names = [item["name"] for item in holder["env"]]
    assert len(names) == len(set(names))
    return {item["name"]: item["value"] for item in holder["env"]}


def command(job: dict[str, Any]) -> list[str]:
    return shlex.split(job["spec"]["entrypoint"])


def autoscaling(cluster: dict[str, Any]) -> dict[str, Any]:
    """What Ray's autoscaler makes of the cluster, by the code that reads it inside the head pod."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    return _derive_autoscaling_config_from_ray_cr({"metadata": {"name": "muloco", "namespace": "default"}, "spec": cluster})


def test_it_is_a_rayjob_whose_fields_kuberay_and_kubernetes_know(job: dict[str, Any]) -> None:
    assert set(job) == REQUIRED
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert misspelled(job, KNOWN) == []
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"} <= set(group)
    for container in containers(job["spec"]["rayClusterSpec"]):
        assert {"name", "image", "env", "resources"} <= set(container)


def test_every_container_runs_the_pinned_ray(cluster: dict[str, Any]) -> None:
    assert cluster["rayVersion"] == pinned_ray()
    [image] = {container["image"] for container in containers(cluster)}
    assert image.rpartition(":")[2].startswith(f"{pinned_ray()}-py311")
    text = (ROOT / "jobs/rayjob.yaml").read_text(encoding="utf-8")
    assert f"FROM rayproject/ray:{pinned_ray()}-py311-gpu" in text  # what the comment builds it from
    assert f"--tag {image} " in text


def test_minimum_replicas_and_maximum_are_in_order(cluster: dict[str, Any]) -> None:
    for group in cluster["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] > 0, group["groupName"]
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    assert len(names) == len(set(names))


def test_the_second_autoscaler_is_on(cluster: dict[str, Any]) -> None:
    """It alone knows priorities."""
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["version"] == "v2"


def test_the_head_holds_the_one_coordinator_and_gives_no_cpu_to_replicas(cluster: dict[str, Any]) -> None:
    types = autoscaling(cluster)["available_node_types"]
    assert {name for name, node in types.items() if node["resources"].get("coordinator")} == {"headgroup"}
    assert types["headgroup"]["resources"]["coordinator"] == 1
    assert types["headgroup"]["resources"]["CPU"] == 0
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_asks_for_spot_pods_and_for_on_demand_ones_when_those_do_not_come(job: dict[str, Any], cluster: dict[str, Any]) -> None:
    bundles = bundles_of(command(job))
    config = autoscaling(cluster)
    assert launched(config, bundles) == {"worker-spot": len(bundles)}
    assert launched(config, bundles, unavailable="worker-spot") == {"worker-on-demand": len(bundles)}
    assert int(environment(cluster["autoscalerOptions"])["RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S"]) <= 1800  # Ray's own is an hour


def test_spot_pods_go_to_spot_nodes_and_the_others_do_not(cluster: dict[str, Any]) -> None:
    pods = {group["groupName"]: group["template"]["spec"] for group in cluster["workerGroupSpecs"]}
    spot, on_demand = pods["worker-spot"], pods["worker-on-demand"]
    assert {"key": SPOT, "operator": "Equal", "value": "true", "effect": "NoSchedule"} in spot["tolerations"]
    [term] = on_demand["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": SPOT, "operator": "DoesNotExist"}]
    assert all(item["key"] != SPOT for item in on_demand["tolerations"])
    assert spot["nodeSelector"] == on_demand["nodeSelector"] | {SPOT: "true"}
    assert spot["containers"] == on_demand["containers"]
    for pod in pods.values():
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nodeSelector" not in cluster["headGroupSpec"]["template"]["spec"]  # the coordinator is not on a spot node


def test_a_pod_lives_longer_than_its_drain(cluster: dict[str, Any]) -> None:
    for group in groups(cluster):
        pod = group["template"]["spec"]
        drain = float(environment(pod["containers"][0])["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert 0 < drain < pod["terminationGracePeriodSeconds"]
        assert pod["restartPolicy"] == "Never"


def test_every_container_says_whether_tokens_are_asked_for(cluster: dict[str, Any]) -> None:
    modes = {environment(holder).get("RAY_AUTH_MODE") for holder in (*containers(cluster), cluster["autoscalerOptions"])}
    assert len(modes) == 1
    assert modes <= {"disabled", "token"}


def test_the_dashboard_is_not_shown_outside(cluster: dict[str, Any]) -> None:
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert not cluster["headGroupSpec"].get("enableIngress")


def test_the_head_finds_a_hung_node_in_seconds(cluster: dict[str, Any]) -> None:
    variables = environment(cluster["headGroupSpec"]["template"]["spec"]["containers"][0])
    found = {name.removeprefix("RAY_health_check_"): int(value) for name, value in variables.items() if name.startswith("RAY_health_check_")}
    assert found == HEALTH_CHECKS


def test_the_entrypoint_parses(job: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert command(job)[:2] == ["python", "jobs/train.py"]
    flags = parse(command(job)[2:])
    assert is_uri(flags.config.run.storage_path)
    assert is_uri(flags.config.data.source)
    assert flags.config.run.name  # a job that is tried again finds its run by this name
    assert flags.config.scaling.num_replicas <= cluster["workerGroupSpecs"][0]["maxReplicas"]
    assert flags.config.scaling.placement_timeout_seconds > int(environment(cluster["autoscalerOptions"])["RAY_AUTOSCALER_RECONCILE_ALLOCATE_STATUS_TIMEOUT_S"])
    assert not flags.local


def test_a_stopped_job_gets_the_time_for_its_checkpoint_and_its_cluster_ends_with_it(job: dict[str, Any]) -> None:
    from ray.runtime_env import RuntimeEnv

    runtime_env = yaml.safe_load(job["spec"]["runtimeEnvYAML"])
    assert set(runtime_env) <= set(RuntimeEnv.known_fields)
    assert int(runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 120
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    # KubeRay's default mode: a pod submits, from the image in which the comment puts the program
    assert job["spec"]["submissionMode"] == "K8sJobMode"
    assert re.search(rf"COPY --chown=ray \. {runtime_env['working_dir']}\b", (ROOT / "jobs/rayjob.yaml").read_text(encoding="utf-8"))
