"""The exchange of one round, bucket by bucket: pseudogradients up to the coordinator, parameters back down.

Coordinator: `collect_`, then (after the outer step) `publish`. Replicas: `contribute`, then `receive_`. All walk the same
buckets of the flat layout in the same order, so staging memory does not grow with the model: B bounds a transfer, and
what is staged for the sum is bounded besides. Between CPUs the broadcast stages nothing, and likes a large B.

The sum runs in rank order, with the same bits as in one process, when all members share one machine (through memory), or
when there are at most RANK_ORDER_MAX_REPLICAS: these send to the coordinator, all at once, K transfers into one node. More
replicas on several machines sum around Gloo's ring, whose cost a node does not depend on K; the same members give the
same bits every time, but not those of the rank order.

Legend: flat fp32 buffers of P elements; buckets of B elements, the last one shorter; K replicas.
Every function raises CollectiveError: when members disagree about P, type or B (naming who), when one died, or in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from ray_muloco.core.outer import pseudogradient_
from ray_muloco.core.params import digest
from ray_muloco.runtime.collectives import Group

COORDINATOR_RANK = 0
RANK_ORDER_MAX_REPLICAS = 4
SUM_STAGING_BYTES = 32 << 20
"""Bound of what a member stages for the sum, whatever B, K and P are: more would only fall out of the processor's cache."""


def contribute(group: Group, *, start: Tensor, end: Tensor, scale: float, bucket_elements: int) -> None:
    """Replica's half of the sum: scale * (start - end) goes to the coordinator; start and end stay as they are.

    While one bucket is on the wire the next is computed. A scale of 0 adds exact zeros, whatever start and end hold.
    """
    bucket_elements = _fitting(bucket_elements, group)
    agree_on(group, "sum", start, bucket_elements)
    hand_in = way_to_coordinator(group)
    slots = _staging(group, "contribute", 2, bucket_elements, start)
    with ThreadPoolExecutor(1) as wire:
        on_the_wire: Future[None] | None = None
        for number, part in enumerate(buckets(start, bucket_elements)):
            delta = _delta(group, start[part], end[part], scale, slots[number % 2])
            if on_the_wire:
                on_the_wire.result()
            on_the_wire = wire.submit(lambda delta=delta: hand_in(delta, COORDINATOR_RANK))
        if on_the_wire:
            on_the_wire.result()


def collect_(group: Group, psi: Tensor, bucket_elements: int) -> None:
    """Coordinator's half of the sum: psi (on the CPU) <- sum of what the replicas contribute."""
    bucket_elements = _fitting(bucket_elements, group)
    agree_on(group, "sum", psi, bucket_elements)
    if _in_lanes(group):
        _collect_in_lanes_(group, psi, bucket_elements)
        return
    for part in buckets(psi, bucket_elements):
        group.reduce_(psi[part].zero_(), COORDINATOR_RANK)


def publish(group: Group, theta: Tensor, bucket_elements: int, root: int = COORDINATOR_RANK) -> int:
    """Send theta to every other member; returns its digest."""
    return _spread(group, theta, bucket_elements, root)


def receive_(group: Group, theta: Tensor, bucket_elements: int, root: int = COORDINATOR_RANK) -> int:
    """theta <- the root's; returns the digest of what arrived."""
    return _spread(group, theta, bucket_elements, root)


def agree_on(group: Group, purpose: str, flat: Tensor, bucket_elements: int) -> None:
    """Refuse to begin unless all members are about to exchange the same thing: purpose, elements, type, bucket."""
    group.agree(f"{purpose}: {flat.numel()} {str(flat.dtype).removeprefix('torch.')} in buckets of {bucket_elements}")


def buckets(flat: Tensor, bucket_elements: int) -> Iterator[slice]:
    """Slices that cover a flat buffer, each element once, in order."""
    for begin in range(0, flat.numel(), bucket_elements):
        yield slice(begin, min(begin + bucket_elements, flat.numel()))


def way_to_coordinator(group: Group) -> Callable[[Tensor, int], None]:
    """How a member hands a bucket of the sum to the coordinator, which `collect_` expects: hand_in(bucket, COORDINATOR_RANK)."""
    return group.send if _in_lanes(group) else group.reduce_


def _collect_in_lanes_(group: Group, psi: Tensor, bucket_elements: int) -> None:
    """Receive a bucket from every replica at once, add them in order; the next bucket travels meanwhile."""
    ranks = range(1, group.world_size)
    slots = _staging(group, "collect", 2 * len(ranks), bucket_elements, psi)
    parts = list(buckets(psi, bucket_elements))
    with ExitStack() as stack:
        # one thread a replica: what it sends arrives in the order in which receives are posted, so they must not overtake
        lanes = [stack.enter_context(ThreadPoolExecutor(1)) for _ in ranks]

        def post(number: int) -> list[tuple[Tensor, Future[None]]]:
            half = slots[number % 2 * len(ranks) :]
            received = [half[lane][: psi[parts[number]].numel()] for lane in range(len(ranks))]
            return [(buffer, lane.submit(group.recv_, buffer, rank)) for rank, lane, buffer in zip(ranks, lanes, received, strict=True)]

        coming = post(0) if parts else []
        for number, part in enumerate(parts):
            arriving, coming = coming, post(number + 1) if number + 1 < len(parts) else []
            for lane, (buffer, arrival) in enumerate(arriving):
                arrival.result()
                # the first as 0 + Δ, like a sum that begins at zero: a negative zero comes out the same
                torch.add(buffer, psi[part] if lane else 0.0, out=psi[part])


def _spread(group: Group, theta: Tensor, bucket_elements: int, root: int) -> int:
    """Broadcast theta from root; CPU buffers travel as they are, others through one pinned bucket."""
    on_cpu = theta.device.type == "cpu"
    agree_on(group, f"from {root}", theta, bucket_elements)
    for part in buckets(theta, bucket_elements):
        bucket = theta[part]
        wire = bucket if on_cpu else _staging(group, "spread", 1, bucket_elements, theta)[0][: bucket.numel()]
        if not on_cpu and group.rank == root:
            wire.copy_(bucket)
        group.broadcast_(wire, root)
        if not on_cpu and group.rank != root:
            bucket.copy_(wire)
    return digest(theta)


def _delta(group: Group, start: Tensor, end: Tensor, scale: float, slot: Tensor) -> Tensor:
    """scale * (start - end) in a CPU slot, computed where start and end lie."""
    delta = slot[: start.numel()]
    if scale == 0.0:
        return delta.zero_()
    work = delta if start.device.type == "cpu" else _staging(group, "delta", 1, slot.numel(), start, on_device=True)[0][: start.numel()]
    pseudogradient_(start, end, work)
    if scale != 1.0:
        work.mul_(scale)
    return delta if work is delta else delta.copy_(work)


def _in_lanes(group: Group) -> bool:
    """Whether each replica sends to the coordinator by itself."""
    return not group.shared and group.world_size - 1 <= RANK_ORDER_MAX_REPLICAS


def _fitting(bucket_elements: int, group: Group) -> int:
    """At most the bucket of which all that a member stages of it stays below the bound; the same on every member."""
    num_slots = 2 * max(1, group.world_size - 1 if _in_lanes(group) else 1)
    return min(bucket_elements, SUM_STAGING_BYTES // (4 * num_slots))


def _staging(group: Group, purpose: str, num_slots: int, num_elements: int, flat: Tensor, *, on_device: bool = False) -> list[Tensor]:
    """Buffers of this group kept for a purpose; pinned host memory for flats on a GPU, unless on_device."""
    num_elements = min(num_elements, max(flat.numel(), 1))
    kept = group.scratch.get(purpose)
    if kept is None or kept.shape != (num_slots, num_elements) or kept.dtype != flat.dtype:
        device = flat.device if on_device else torch.device("cpu")
        pinned = flat.device.type == "cuda" and not on_device
        kept = group.scratch[purpose] = torch.empty((num_slots, num_elements), dtype=flat.dtype, device=device, pin_memory=pinned)
    return list(kept.unbind())
