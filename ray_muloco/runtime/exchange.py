"""The exchange of one round, bucket by bucket: pseudogradients up to the coordinator, parameters back down.

Coordinator: `collect_`, then (after the outer step) `publish`. Replicas: `contribute`, then `receive_`. All walk the same
buckets of the flat layout in the same order, so staging memory is one bucket whatever the model.

Legend: flat fp32 buffers of P elements; buckets of B elements, the last one shorter.
Every function raises CollectiveError: when members disagree about P, type or B (naming who), when one died, or in time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ray_muloco.core.outer import pseudogradient_
from ray_muloco.core.params import digest
from ray_muloco.runtime.collectives import Group

COORDINATOR_RANK = 0


def contribute(group: Group, *, start: Tensor, end: Tensor, scale: float, bucket_elements: int) -> None:
    """Replica's half of the sum: scale * (start - end) goes to the coordinator; start and end stay as they are."""
    agree_on(group, "sum", start, bucket_elements)
    staging = _staging(start, bucket_elements)
    for part in _buckets(start, bucket_elements):
        delta = pseudogradient_(start[part], end[part], _like(staging, start[part]))
        if scale != 1.0:
            delta.mul_(scale)
        if group.world_size == 2:
            group.send(delta, COORDINATOR_RANK)
        else:
            group.reduce_(delta, COORDINATOR_RANK)


def collect_(group: Group, psi: Tensor, bucket_elements: int) -> None:
    """Coordinator's half of the sum: psi <- sum of what the replicas contribute."""
    agree_on(group, "sum", psi, bucket_elements)
    for part in _buckets(psi, bucket_elements):
        bucket = psi[part]
        if group.world_size == 2:
            group.recv_(bucket, 1)
        else:
            group.reduce_(bucket.zero_(), COORDINATOR_RANK)


def publish(group: Group, theta: Tensor, bucket_elements: int, root: int = COORDINATOR_RANK) -> int:
    """Send theta to every other member; returns its digest."""
    return _spread(group, theta, bucket_elements, root)


def receive_(group: Group, theta: Tensor, bucket_elements: int, root: int = COORDINATOR_RANK) -> int:
    """theta <- the root's; returns the digest of what arrived."""
    return _spread(group, theta, bucket_elements, root)


def give(group: Group, theta: Tensor, bucket_elements: int, root: int) -> int:
    """Every member gets the root's theta, whoever the root is; returns its digest."""
    return _spread(group, theta, bucket_elements, root)


def _spread(group: Group, theta: Tensor, bucket_elements: int, root: int) -> int:
    agree_on(group, f"from {root}", theta, bucket_elements)
    staging, total = None if theta.device.type == "cpu" else _staging(theta, bucket_elements), 0
    for part in _buckets(theta, bucket_elements):
        bucket = theta[part]
        wire = bucket if staging is None else _like(staging, bucket)
        if staging is not None and group.rank == root:
            wire.copy_(bucket)
        group.broadcast_(wire, root)
        if staging is not None and group.rank != root:
            bucket.copy_(wire)
        total += digest(wire)
    return _wrap(total)


def _buckets(flat: Tensor, bucket_elements: int) -> Iterator[slice]:
    for begin in range(0, flat.numel(), bucket_elements):
        yield slice(begin, min(begin + bucket_elements, flat.numel()))


def agree_on(group: Group, purpose: str, flat: Tensor, bucket_elements: int) -> None:
    """Refuse to begin unless all members are about to exchange the same thing: purpose, elements, type, bucket."""
    group.agree(f"{purpose}: {flat.numel()} {str(flat.dtype).removeprefix('torch.')} in buckets of {bucket_elements}")


def _staging(flat: Tensor, bucket_elements: int) -> Tensor:
    return torch.empty(min(bucket_elements, flat.numel()), dtype=flat.dtype, pin_memory=flat.device.type == "cuda")


def _like(staging: Tensor, bucket: Tensor) -> Tensor:
    return staging[: bucket.numel()]


def _wrap(total: int) -> int:
    """An integer modulo 2^64, as a signed 64-bit one."""
    return (total + 2**63) % 2**64 - 2**63
