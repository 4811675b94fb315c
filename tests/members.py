"""Ray actors that stand in for replicas and coordinator in tests of the collectives: light, and willing to die."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ray_muloco.errors import CollectiveError
from ray_muloco.runtime.collectives import GLOO, Membership

TIMEOUT_SECONDS = 20.0


class Member:
    """One process of a group. Its group methods answer with values, or raise what the collective raised."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.groups: dict[str, Any] = {}

    def pid(self) -> int:
        return os.getpid()

    def num_file_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def serve(self) -> str:
        import ray

        from ray_muloco.runtime.collectives import StoreServer

        self.server = StoreServer(ray.util.get_node_ip_address())
        return self.server.address

    def keys(self) -> list[str]:
        return self.server.keys()

    def give_up(self, membership: Membership, reason: str) -> None:
        self.server.give_up(membership, reason)

    def pretend_to_be_here(self, membership: Membership) -> None:
        """What a member that died right after the roll call left in the store."""
        from ray_muloco.runtime.rendezvous import connect

        connect(membership).set(f"{membership.name}/here/{membership.rank}", "1")

    def join(self, membership: Membership, label: str = "main") -> float:
        from ray_muloco.runtime.collectives import join

        if label in self.groups:
            self.leave(label)
        begin = time.monotonic()
        self.groups[label] = join(membership)
        return time.monotonic() - begin

    def leave(self, label: str = "main") -> None:
        self.groups.pop(label).leave()

    def shares_memory(self, label: str = "main") -> bool:
        return self.groups[label].shared

    def call(self, method: str, *arguments: Any, label: str = "main") -> Any:
        """Call a method of the group; answers the first tensor argument, which methods in place have changed."""
        result = getattr(self.groups[label], method)(*arguments)
        return arguments[0] if result is None and arguments else result

    def exchange(self, function: str, *arguments: Any, label: str = "main", **options: Any) -> Any:
        """Call a function of the exchange; answers its result, or the tensor it filled."""
        from ray_muloco.runtime import exchange

        result = getattr(exchange, function)(self.groups[label], *arguments, **options)
        return arguments[0] if result is None and arguments else result

    def sum_forever(self, num_elements: int) -> None:
        """All-reduce until something fails."""
        import torch

        buffer = torch.zeros(num_elements)
        while True:
            self.groups["main"].allreduce_(buffer)

    def exchange_forever(self, num_elements: int, bucket_elements: int) -> None:
        """Whole exchanges, each side its part, until something fails."""
        import torch

        from ray_muloco.runtime import exchange

        group, theta, end = self.groups["main"], torch.ones(num_elements), torch.zeros(num_elements)
        while True:
            if group.rank == exchange.COORDINATOR_RANK:
                exchange.collect_(group, end, bucket_elements)
                exchange.publish(group, theta, bucket_elements)
            else:
                exchange.contribute(group, start=theta, end=end, scale=1.0, bucket_elements=bucket_elements)
                exchange.receive_(group, theta, bucket_elements)


class Cast:
    """Members by position, and the groups they form; `own` makes members, the first of which hosts the store."""

    def __init__(self, ray: Any, members: list[Any], run_id: str, address: str) -> None:
        self.ray, self.members, self.run_id, self.address = ray, members, run_id, address
        self.generation = 0

    @classmethod
    def own(cls, ray: Any, num_members: int, run_id: str) -> Cast:
        members = [spawn(ray) for _ in range(num_members)]
        return cls(ray, members, run_id, ray.get(members[0].serve.remote(), timeout=60))

    def end(self) -> None:
        for member in self.members:
            self.ray.kill(member)

    def memberships(self, num_members: int, timeout_seconds: float = TIMEOUT_SECONDS, backend: str = GLOO, memory: bool = True) -> list[Membership]:
        """Places in a new generation."""
        self.generation += 1
        return [Membership(self.address, self.run_id, self.generation, num_members, r, timeout_seconds, backend, memory) for r in range(num_members)]

    def form(self, members: list[Any], timeout_seconds: float = TIMEOUT_SECONDS, label: str = "main", memory: bool = True) -> None:
        """A new generation of these members, in this order."""
        places = self.memberships(len(members), timeout_seconds, memory=memory)
        self.all([m.join.remote(p, label) for m, p in zip(members, places, strict=True)])

    def leave(self, members: list[Any]) -> None:
        self.all([m.leave.remote() for m in members])

    def all(self, refs: list[Any]) -> list[Any]:
        return self.ray.get(refs, timeout=90)

    def failure(self, ref: Any) -> CollectiveError:
        """The CollectiveError that a call raised, as it came across processes."""
        try:
            answer = self.ray.get(ref, timeout=90)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            assert isinstance(cause, CollectiveError), cause
            return cause
        raise AssertionError(f"no failure but {answer}")


def spawn(ray: Any) -> Any:
    """One more member, in a process of its own; it travels by value, for the tests are on nobody's path there."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return ray.remote(num_cpus=0)(Member).remote()
