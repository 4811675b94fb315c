"""How replicas and coordinator are wired in one generation, and what a replica does on its wires.

star    one Gloo group: the coordinator (rank 0) and every replica. It sums over CPU copies, which is also what crosses
        slow links between sites.
fabric  replicas on GPUs of one fabric sum among themselves (NCCL wants a GPU a rank); the lowest replica hands the sum to
        the coordinator and takes θ back over Gloo.

Data-parallel methods add a group of the replicas alone, in which they average gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_muloco.errors import CollectiveError
from ray_muloco.runtime import exchange, fabric
from ray_muloco.runtime.collectives import Group, Membership, join

if TYPE_CHECKING:
    from torch import Tensor

STAR_BUCKET_ELEMENTS = 32 << 20  # a broadcast stages nothing and likes it large; what is staged for the sum is bounded besides
FABRIC_BUCKET_ELEMENTS = 4 << 20  # staged on the GPU and on its way to the coordinator


def bucket_elements(fabric: bool) -> int:
    """Elements of a transfer, the same for all members of a generation."""
    return FABRIC_BUCKET_ELEMENTS if fabric else STAR_BUCKET_ELEMENTS


@dataclass(frozen=True, slots=True)
class Wiring:
    """One replica's memberships in a generation.

    main: the group with the coordinator; None for replicas of a fabric but the lowest. peers: the group of the replicas
    alone (ranks in order of replica id); None in a star whose method needs none. fabric: peers carry the exchange.
    """

    generation: int
    main: Membership | None
    peers: Membership | None
    fabric: bool


class ReplicaLink:
    """A replica's open groups of one generation."""

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self.bucket_elements = bucket_elements(wiring.fabric)
        self.main: Group | None = join(wiring.main) if wiring.main else None
        try:
            self.peers: Group | None = join(wiring.peers) if wiring.peers else None
        except CollectiveError:
            if self.main is not None:
                self.main.leave()
            raise

    def set_timeout(self, seconds: float) -> None:
        """Bound the collectives of an exchange: by the coordinator's wires, and by a fabric's."""
        for group in (self.main, self.peers if self.wiring.fabric else None):
            if group is not None:
                group.set_timeout(seconds)

    def contribute(self, start: Tensor, end: Tensor, scale: float) -> None:
        """Add scale · (start − end) to the generation's sum, which the coordinator receives."""
        if not self.wiring.fabric:
            assert self.main is not None
            exchange.contribute(self.main, start=start, end=end, scale=scale, bucket_elements=self.bucket_elements)
        else:
            assert self.peers is not None
            fabric.contribute_over_fabric(self.peers, self.main, start=start, end=end, scale=scale, bucket_elements=self.bucket_elements)

    def hand_over(self, flat: Tensor) -> None:
        """Send the parameters themselves to the coordinator: for the lowest replica of a data-parallel run."""
        assert self.main is not None
        fabric.hand_over(self.main, flat, self.bucket_elements)

    def receive_(self, theta: Tensor) -> int:
        """theta <- the coordinator's; returns its digest."""
        if not self.wiring.fabric:
            assert self.main is not None
            return exchange.receive_(self.main, theta, self.bucket_elements)
        assert self.peers is not None
        return fabric.receive_over_fabric_(self.peers, self.main, theta, self.bucket_elements)

    def average_(self, gradient: Tensor) -> None:
        """gradient <- its mean over the replicas."""
        if self.peers is not None and self.peers.world_size > 1:
            fabric.average_(self.peers, gradient, self.bucket_elements)

    def close(self) -> None:
        """Leave the groups; the sockets close."""
        for group in (self.main, self.peers):
            if group is not None:
                group.leave()
        self.main = self.peers = None
