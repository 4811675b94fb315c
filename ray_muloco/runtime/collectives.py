"""Collectives of the run, through ray.util.collective: the only file that imports it.

A `Group` belongs to one generation of the membership. Its backends are the program's own (`MULOCO_GLOO`, `MULOCO_NCCL`),
registered with Ray in each actor as it joins, because a driver that never joins should not pay for importing torch.
Every failure is a `CollectiveError`, and by the time it is raised the group is gone and its sockets are closed: that is
what frees the other members. A group is never repaired; the survivors join the next generation.

Ranks exist here and in the files below only; callers know replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray_muloco.errors import CollectiveError
from ray_muloco.runtime.rendezvous import Membership, StoreServer, connect, give_up, roll_call, sweep

if TYPE_CHECKING:
    from torch import Tensor

GLOO, NCCL, RAY_NCCL = "MULOCO_GLOO", "MULOCO_NCCL", "NCCL"
DESCRIPTION_BYTES = 128

__all__ = ["GLOO", "NCCL", "RAY_NCCL", "Group", "Membership", "StoreServer", "join"]

# Ray hands a backend (world_size, rank, group_name) and nothing else; what else a formation needs waits here by name.
_forming: dict[str, Callable[[], Any]] = {}


def join(membership: Membership, watch: Callable[[], str] | None = None) -> Group:
    """Enter a generation's group inside an actor; returns when all of its members are connected.

    watch: asked while others are awaited; a non-empty answer ends the formation at once, for every member.
    Raises CollectiveError when a member did not come in time, died, or `watch` gave a reason.
    """
    from ray.util import collective

    _register()
    group = Group(membership)
    _forming[membership.name] = lambda: _form(membership, watch)
    try:
        group._attempt(
            "join",
            lambda: collective.init_collective_group(membership.world_size, membership.rank, membership.backend, membership.name),
        )
    finally:
        _forming.pop(membership.name, None)
    return group


class Group:
    """One member's hold on one generation's group. Not for two threads at once: members must issue calls in one order.

    Tensors are contiguous and on the backend's device. Methods ending in `_` work in place.
    """

    def __init__(self, membership: Membership) -> None:
        self.name, self.rank, self.world_size = membership.name, membership.rank, membership.world_size
        self.backend = membership.backend

    def reduce_(self, buffer: Tensor, root: int = 0) -> None:
        """buffer <- sum over all ranks at root. Elsewhere the buffer is scratch: its content afterwards is undefined."""
        self._call("reduce", buffer, dst_rank=root)

    def broadcast_(self, buffer: Tensor, root: int = 0) -> None:
        """buffer <- the root's buffer."""
        self._call("broadcast", buffer, src_rank=root)

    def allreduce_(self, buffer: Tensor, operation: str = "SUM") -> None:
        """buffer <- SUM, MIN, MAX or PRODUCT over all ranks, everywhere."""
        from ray.util.collective.types import ReduceOp

        self._call("allreduce", buffer, op=ReduceOp[operation])

    def allgather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in the order of ranks; all of one shape and type."""
        outputs = [tensor.new_empty(tensor.shape) for _ in range(self.world_size)]
        self._call("allgather", outputs, tensor)
        return outputs

    def send(self, tensor: Tensor, rank: int) -> None:
        """Hand a tensor to one rank of this group."""
        self._call("send", tensor, dst_rank=rank)

    def recv_(self, buffer: Tensor, rank: int) -> None:
        """buffer <- what that rank of this group sends."""
        self._call("recv", buffer, src_rank=rank)

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self._call("barrier")

    def agree(self, description: str) -> None:
        """Raise CollectiveError on every member, naming the odd ranks, unless all of them describe the same thing.

        Collectives over unequal buffers hang or end the process, so whoever is about to exchange first says what:
        elements, type, bucket. Costs one exchange of 128 bytes. The truth is what most say; in a tie, what rank 0 says.
        """
        from ray_muloco.runtime.agreement import disagreement, pack, unpack

        rows = self.allgather(pack(description, DESCRIPTION_BYTES))
        odd = disagreement([unpack(row) for row in rows])
        if odd:
            raise self._lost("agree", 0.0, odd)

    def leave(self) -> None:
        """Let go of the group: its sockets, and what Ray keeps under its name. Idempotent."""
        from ray.util import collective

        if collective.is_group_initialized(self.name):
            collective.destroy_collective_group(self.name)

    def _call(self, operation: str, *arguments: Any, **options: Any) -> None:
        from ray.util import collective

        self._attempt(operation, lambda: getattr(collective, operation)(*arguments, group_name=self.name, **options))

    def _attempt(self, operation: str, call: Callable[[], None]) -> None:
        started, cause = time.monotonic(), ""
        try:
            call()
        except Exception as error:
            cause = _sentence(error)
        # outside the handler: the caught traceback would be carried along, and with it whatever its frames hold
        if cause:
            raise self._lost(operation, time.monotonic() - started, cause)

    def _lost(self, operation: str, seconds: float, cause: str) -> CollectiveError:
        self.leave()
        return CollectiveError(self.name, operation, seconds, cause)


def _sentence(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:300]}" if first else type(error).__name__


def _form(membership: Membership, watch: Callable[[], str] | None) -> Any:
    """The connected transport of one member; on failure the others are told and nothing stays behind here."""
    from ray.util import get_node_ip_address
    from torch.distributed import PrefixStore

    store = connect(membership)
    roll_call(store, membership, watch)
    place = {"rank": membership.rank, "world_size": membership.world_size, "timeout_seconds": membership.timeout_seconds}
    own_keys = PrefixStore(f"{membership.name}/group", store)
    try:
        if membership.backend == NCCL:
            from ray_muloco.runtime.nccl_backend import NcclTransport

            transport = NcclTransport(own_keys, **place)
        else:
            from ray_muloco.runtime.gloo_backend import GlooTransport

            transport = GlooTransport(own_keys, host=get_node_ip_address(), **place)
        transport.barrier()
    except Exception as error:
        give_up(store, membership, f"rank {membership.rank} failed: {_sentence(error)}")
        raise
    if membership.rank == 0:
        sweep(store, membership)
    return transport


def _register() -> None:
    """Make the own backends known to this process's ray.util.collective, once."""
    from ray.util.collective.backend_registry import _global_registry, register_collective_backend

    for name in (GLOO, NCCL):
        if not _global_registry.is_registered(name):
            register_collective_backend(name, _backend_class(name))


def _backend_class(name: str) -> Any:
    """The class Ray instantiates for one of the own backends: it turns Ray's options into a transport's arguments."""
    from ray.util.collective.collective_group.base_collective_group import BaseGroup

    class Backend(BaseGroup):
        def __init__(self, world_size: int, rank: int, group_name: str) -> None:
            super().__init__(world_size, rank, group_name)
            if group_name not in _forming:
                raise RuntimeError(f"{name} groups are entered through ray_muloco.runtime.collectives.join")
            self._transport = _forming[group_name]()

        @classmethod
        def backend(cls) -> str:
            return name

        @classmethod
        def check_backend_availability(cls) -> bool:
            return True  # the transport refuses with its reason, which Ray's own refusal does not give

        def destroy_group(self) -> None:
            self._transport.close()

        def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
            self._transport.allreduce(tensor[0], allreduce_options.reduceOp.name)

        def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
            self._transport.reduce(tensor[0], reduce_options.root_rank, reduce_options.reduceOp.name)

        def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
            self._transport.broadcast(tensor[0], broadcast_options.root_rank)

        def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
            self._transport.allgather(tensor_list[0], tensor[0])

        def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
            self._transport.reduce_scatter(tensor[0], tensor_list[0], reducescatter_options.reduceOp.name)

        def send(self, tensor: Any, send_options: Any) -> None:
            self._transport.send(tensor[0], send_options.dst_rank)

        def recv(self, tensor: Any, recv_options: Any) -> None:
            self._transport.recv(tensor[0], recv_options.src_rank)

        def barrier(self, barrier_options: Any = None) -> None:
            self._transport.barrier()

    return Backend
