"""How the members of one generation find each other: a key-value store in the coordinator, and a roll call over it.

torch is imported inside functions, so that a driver may import this for its records alone.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

GLOO, NCCL, RAY_NCCL = "MULOCO_GLOO", "MULOCO_NCCL", "NCCL"
CONNECTING_SECONDS = 10.0
POLL_SECONDS = 0.005
SERVER_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Membership:
    """One member's place in one generation of one run: all that `join` needs, and it pickles.

    A (run_id, generation, backend) is used once. After a failure, formation included, take the next generation.
    """

    address: str
    """host:port of the run's store."""
    run_id: str
    """Unique for each start of a run; names no other run on this store."""
    generation: int
    """Number of the membership."""
    world_size: int
    """Members of the group."""
    rank: int
    """This member's position, in [0, world_size)."""
    timeout_seconds: float
    """Bound of the formation and of each operation."""
    backend: str = GLOO
    """MULOCO_GLOO, MULOCO_NCCL, or NCCL for Ray's stock group."""
    through_memory: bool = True
    """MULOCO_GLOO: let members that all share one machine exchange through memory instead of sockets."""

    @property
    def name(self) -> str:
        """Name of the group, the same on every member and never used twice."""
        return f"{self.run_id}/{self.generation}/{self.backend}"


class StoreServer:
    """The store of a whole run, served from this process (the coordinator's) until close().

    It outlives every generation: a group's rendezvous never depends on a member that may have died.
    """

    def __init__(self, host: str) -> None:
        """host: address of this machine that the replicas can reach; the port is chosen by the system."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=SERVER_TIMEOUT_SECONDS)
        self._store: Any = TCPStore(host, 0, None, True, timeout=timeout, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"

    def keys(self) -> list[str]:
        """All keys now held; empty between formations."""
        return sorted(self._store.list_keys())

    def give_up(self, membership: Membership, reason: str) -> None:
        """End a formation that can no longer succeed: members waiting in it raise `reason` at once."""
        give_up(self._store, membership, reason)

    def close(self) -> None:
        """Stop serving."""
        self._store = None


def form(membership: Membership, host: str, watch: Callable[[], str] | None = None) -> Any:
    """The connected transport of one member; on failure the others are told, and nothing stays behind here.

    host: address of this node, whose interface carries the group's traffic. watch: see `roll_call`.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = connect(membership)
    roll_call(store, membership, watch)
    try:
        store.set_timeout(timedelta(seconds=_connecting_seconds(membership)))
        transport = _transport(membership, PrefixStore(f"{membership.name}/group", store), host)
        transport.barrier()
        if membership.backend != NCCL:
            transport.set_timeout(membership.timeout_seconds)
    except Exception as error:
        give_up(store, membership, f"rank {membership.rank} failed: {sentence(error)}")
        raise
    if membership.rank == 0:
        sweep(store, membership)
    return transport


def _connecting_seconds(membership: Membership) -> float:
    """Bound of connecting, once everyone has been seen: who dies in that moment does not cost a whole collective's timeout.

    NCCL makes its communicator in its first collective, and its timeout is of the group for good.
    """
    return membership.timeout_seconds if membership.backend == NCCL else min(membership.timeout_seconds, CONNECTING_SECONDS)


def _transport(membership: Membership, own_keys: Any, host: str) -> Any:
    place: dict[str, Any] = {"rank": membership.rank, "world_size": membership.world_size, "timeout_seconds": _connecting_seconds(membership)}
    if membership.backend == NCCL:
        from ray_muloco.runtime.nccl_backend import NcclTransport

        return NcclTransport(own_keys, **place)
    from ray_muloco.runtime.gloo_backend import GlooTransport

    return GlooTransport(own_keys, host=host, through_memory=membership.through_memory, **place)


def connect(membership: Membership) -> Any:
    """A client of the run's store, its own connection, bounded by the membership's timeout."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = membership.address.rpartition(":")
    timeout = timedelta(seconds=membership.timeout_seconds)
    return TCPStore(host, int(port), None, False, timeout=timeout, wait_for_workers=False)


def roll_call(store: Any, membership: Membership, watch: Callable[[], str] | None = None) -> None:
    """Return once every rank of the generation has come here; only then are sockets worth opening.

    watch: asked while waiting; a non-empty answer (such as "replica 2 died") ends the formation for every member at once.
    Raises RuntimeError naming the ranks that never came, or the reason some member gave up.
    """
    prefix = f"{membership.name}/"
    deadline = time.monotonic() + membership.timeout_seconds
    if store.check([f"{prefix}closed"]):
        raise RuntimeError(f"generation {membership.generation} is over; a new one is needed")
    store.set(f"{prefix}here/{membership.rank}", "1")
    missing = [rank for rank in range(membership.world_size) if rank != membership.rank]
    while missing:
        missing = [rank for rank in missing if not store.check([f"{prefix}here/{rank}"])]
        if not missing:
            return
        if store.check([f"{prefix}closed"]):
            raise RuntimeError(store.get(f"{prefix}closed").decode())
        reason = watch() if watch else ""
        if not reason and time.monotonic() >= deadline:
            names = ", ".join(str(rank) for rank in missing)
            reason = f"rank {names} of {membership.world_size} did not come within {membership.timeout_seconds:g} s"
        if reason:
            give_up(store, membership, reason)
            raise RuntimeError(reason)
        time.sleep(POLL_SECONDS)


def give_up(store: Any, membership: Membership, reason: str) -> None:
    """Tell members still waiting in this generation's roll call that it is over."""
    store.set(f"{membership.name}/closed", reason)


def sweep(store: Any, membership: Membership) -> None:
    """Remove the keys of this generation, whose sockets are all connected, and of the run's earlier ones.

    What is left of a formation that failed is removed by the next that succeeds: until then late members read in it
    that it is over.
    """
    for key in store.list_keys():
        parts = key.split("/")
        if parts[0] == membership.run_id and parts[1].isdigit() and int(parts[1]) <= membership.generation:
            same = int(parts[1]) == membership.generation
            if not same or parts[2] == membership.backend:
                store.delete_key(key)


def sentence(error: BaseException) -> str:
    """An error in one line: its type and what it says, without the C++ file it comes from and the advice that follows."""
    lines = str(error).strip().splitlines()
    said = re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". This is typically caused")[0][:300] if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
