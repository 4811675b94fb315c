"""What a dry run promises is what a run does: bytes on the wire, bytes of state, steps and rounds."""

from __future__ import annotations

import math

import pytest
from toy import LENGTH, Harness, toy_config, toy_dataset

from ray_muloco.runtime.capacity import fits
from ray_muloco.training.estimate import estimate, inner_state_bytes
from ray_muloco.training.preflight import with_threads


@pytest.mark.parametrize(("method", "replicas"), [("muloco", 1), ("muloco", 4), ("diloco", 2), ("muon-dp", 2), ("adamw-dp", 1)])
def test_estimated_bytes_are_the_bytes_of_a_run(method: str, replicas: int) -> None:
    config = toy_config(method=method, scaling__num_replicas=replicas, budget_tokens=12 * 8 * LENGTH)
    needs, harness = estimate(config), Harness(config, toy_dataset())
    assert needs.num_params == harness.coordinator.layout.numel
    state = harness.group.replicas[0].state_tensors()
    steps = sum(4 * tensor.numel() for name, tensor in state.items() if name.endswith("step") or ".step." in name)
    assert sum(4 * tensor.numel() for tensor in state.values()) - steps == inner_state_bytes(config)
    harness.group.traffic.take()
    harness.round()
    traffic = harness.group.traffic.take()
    assert (traffic.uplink_bytes, traffic.downlink_bytes) == (needs.uplink_bytes_per_round, needs.downlink_bytes_per_round)
    harness.run()
    assert harness.coordinator.progress.round_number == needs.num_rounds


def test_threads_are_shared_out_and_a_given_number_stays() -> None:
    config = toy_config(scaling__num_replicas=4, scaling__threads_per_replica=0)
    assert with_threads(config, 2).scaling.threads_per_replica == 1
    assert with_threads(config, 16).scaling.threads_per_replica == 4
    assert with_threads(config.override({"scaling.threads_per_replica": 3}), 16).scaling.threads_per_replica == 3


def test_a_node_holds_as_many_replicas_as_its_scarcest_resource() -> None:
    assert fits({"CPU": 8, "GPU": 2}, {"CPU": 2, "GPU": 1}) == 2
    assert fits({"CPU": 8}, {"CPU": 2, "GPU": 0}) == 4
    assert fits({"CPU": 8}, {"CPU": 1, "GPU": 1}) == 0
    assert math.isfinite(fits({"CPU": 0.5}, {"CPU": 1}))
