"""Exchange through the replicas' own group: averages of gradients, sums over a fast fabric, parameters handed over.

Peers: the group of the replicas alone, ranks in order of replica id. Main: the group with the coordinator (rank 0), of
which over a fabric only the lowest replica (rank 1) is a member. Buckets keep staging memory at one bucket.
Legend: flat fp32 buffers of P elements, on the replica's device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ray_muloco.core.outer import pseudogradient_
from ray_muloco.core.params import digest
from ray_muloco.runtime.collectives import Group
from ray_muloco.runtime.exchange import COORDINATOR_RANK, agree_on, buckets, way_to_coordinator

LOWEST = 0


def average_(peers: Group, gradient: Tensor, bucket_elements: int) -> None:
    """gradient <- its mean over the peers; every peer gets the same bits."""
    for part in buckets(gradient, bucket_elements):
        peers.allreduce_(gradient[part])
    gradient.div_(peers.world_size)


def hand_over(main: Group, flat: Tensor, bucket_elements: int) -> None:
    """Send a flat buffer to the coordinator as it is."""
    for part in buckets(flat, bucket_elements):
        main.send(flat[part].cpu(), COORDINATOR_RANK)


def take_over_(main: Group, out: Tensor, bucket_elements: int, rank: int) -> None:
    """Coordinator's side of `hand_over`: out <- the buffer of that rank."""
    for part in buckets(out, bucket_elements):
        main.recv_(out[part], rank)


def contribute_over_fabric(peers: Group, main: Group | None, *, start: Tensor, end: Tensor, scale: float, bucket_elements: int) -> None:
    """Sum scale · (start − end) among the peers; the lowest, the only one with a main group, hands the sum to the coordinator."""
    if main is not None:
        agree_on(main, "sum", start, bucket_elements)
    staging = torch.empty(min(bucket_elements, start.numel()), dtype=start.dtype, device=start.device)
    for part in buckets(start, bucket_elements):
        delta = pseudogradient_(start[part], end[part], staging[: end[part].numel()])
        if scale == 0.0:
            delta.zero_()  # not a product: whatever start and end hold, nothing is added
        elif scale != 1.0:
            delta.mul_(scale)
        if peers.world_size > 1:
            peers.reduce_(delta, LOWEST)
        if main is not None:
            way_to_coordinator(main)(delta.cpu(), COORDINATOR_RANK)


def receive_over_fabric_(peers: Group, main: Group | None, theta: Tensor, bucket_elements: int) -> int:
    """theta <- the coordinator's, through the lowest peer; returns the digest of what arrived."""
    if main is not None:
        agree_on(main, f"from {COORDINATOR_RANK}", theta, bucket_elements)
    total = 0
    for part in buckets(theta, bucket_elements):
        bucket = theta[part]
        if main is not None:
            wire = bucket if bucket.device.type == "cpu" else torch.empty(bucket.shape, dtype=bucket.dtype, pin_memory=True)
            main.broadcast_(wire, COORDINATOR_RANK)
            bucket.copy_(wire)
        if peers.world_size > 1:
            peers.broadcast_(bucket, LOWEST)
        total += digest(bucket)
    return (total + 2**63) % 2**64 - 2**63
