"""Collectives of the run, through ray.util.collective: the only file that imports it.

A `Group` belongs to one generation of the membership. Its backends are the program's own (`MULOCO_GLOO`, `MULOCO_NCCL`),
registered with Ray in each actor as it joins, because a driver that never joins should not pay for importing torch.
Every failure is a `CollectiveError`, and by the time it is raised the group is gone and its sockets are closed: that is
what frees the other members. A group is never repaired; the survivors join the next generation.

Ranks exist here and in the files below only; callers know replicas.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ray_muloco.errors import CollectiveError
from ray_muloco.runtime.rendezvous import GLOO, NCCL, RAY_NCCL, Membership, StoreServer, form, sentence

if TYPE_CHECKING:
    from torch import Tensor

DESCRIPTION_BYTES = 128

__all__ = ["GLOO", "NCCL", "RAY_NCCL", "Group", "Membership", "StoreServer", "join", "why_unavailable"]

# Ray hands a backend (world_size, rank, group_name) and nothing else; what else a formation needs waits here by name.
_forming: dict[str, Callable[[], Any]] = {}


def join(membership: Membership, watch: Callable[[], str] | None = None) -> Group:
    """Enter a generation's group inside an actor; returns when all of its members are connected.

    watch: asked while others are awaited; a non-empty answer ends the formation at once, for every member.
    Raises CollectiveError when a member did not come in time, died, or `watch` gave a reason.
    """
    import ray
    from ray.util import collective

    _register()
    group, backend = Group(membership), cast(Any, membership.backend)
    _forming[membership.name] = lambda: form(membership, ray.util.get_node_ip_address(), watch)
    try:
        if reason := why_unavailable(membership.backend):
            raise group._lost("join", 0.0, reason)
        group._attempt(
            "join",
            lambda: collective.init_collective_group(membership.world_size, membership.rank, backend, membership.name),
        )
    finally:
        _forming.pop(membership.name, None)
    return group


class Group:
    """One member's hold on one generation's group.

    Tensors are contiguous and on the backend's device. Methods ending in `_` work in place. Members issue collectives in
    one order, one at a time; only transfers between different pairs of ranks may run in several threads at once.
    """

    def __init__(self, membership: Membership) -> None:
        self.name, self.rank, self.world_size = membership.name, membership.rank, membership.world_size
        self.backend = membership.backend
        self.scratch: dict[str, Tensor] = {}
        """Buffers the exchange keeps from round to round: fresh pages cost more than what is written into them."""
        self._failure: CollectiveError | None = None
        self._lock = threading.Lock()

    @property
    def shared(self) -> bool:
        """Whether all members share one machine's memory, the same on every member; their sums then run in rank order."""
        from ray.util import collective

        if self.backend != GLOO or self._failure is not None:
            return False
        return cast(Any, collective.get_group_handle(self.name)).transport.shared

    def set_timeout(self, seconds: float) -> None:
        """Bound this member's collectives from now on. All members should: one that waits for a silent member is freed by no one else."""
        from ray.util import collective

        if self.backend != RAY_NCCL and self._failure is None:
            cast(Any, collective.get_group_handle(self.name)).transport.set_timeout(seconds)

    def reduce_(self, buffer: Tensor, root: int = 0) -> None:
        """buffer <- sum over all ranks at root. Elsewhere the buffer is scratch: its content afterwards is undefined."""
        self._call("reduce", buffer, dst_rank=root)

    def broadcast_(self, buffer: Tensor, root: int = 0) -> None:
        """buffer <- the root's buffer."""
        self._call("broadcast", buffer, src_rank=root)

    def allreduce_(self, buffer: Tensor, operation: str = "SUM") -> None:
        """buffer <- SUM, MIN, MAX or PRODUCT over all ranks, everywhere, with the same bits."""
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
        """Let go of the group: its sockets, its scratch, and what Ray keeps under its name. Idempotent."""
        from ray.util import collective

        self.scratch.clear()
        if collective.is_group_initialized(self.name):
            collective.destroy_collective_group(self.name)
        if self.backend == RAY_NCCL:
            _forget_stock_store(self.name)

    def _call(self, operation: str, *arguments: Any, **options: Any) -> None:
        from ray.util import collective

        if self._failure is not None:
            raise self._failure
        self._attempt(operation, lambda: getattr(collective, operation)(*arguments, group_name=self.name, **options))
        if self.backend == RAY_NCCL:
            _synchronize()

    def _attempt(self, operation: str, call: Callable[[], None]) -> None:
        started, cause = time.monotonic(), ""
        try:
            call()
        except Exception as error:
            cause = sentence(error)
        # outside the handler: the caught traceback would be carried along, and with it whatever its frames hold
        if cause:
            raise self._lost(operation, time.monotonic() - started, cause)

    def _lost(self, operation: str, seconds: float, cause: str) -> CollectiveError:
        """Drop the group; the first failure is the one that every later call repeats, not those it causes."""
        with self._lock:
            if self._failure is None:
                self._failure = CollectiveError(self.name, operation, seconds, cause)
        self.leave()
        return self._failure


def why_unavailable(backend: str) -> str:
    """The reason why this process cannot join groups of a backend, with the remedy; empty when it can."""
    if backend == GLOO:
        return ""
    from ray.util.collective import is_backend_available

    from ray_muloco.runtime import nccl_backend

    if reason := nccl_backend.why_unavailable():
        return reason
    if backend == RAY_NCCL and not is_backend_available(RAY_NCCL):
        return "Ray's NCCL group needs cupy; install cupy-cuda12x (cupy-cuda13x for a CUDA 13 torch), or use --scaling.collective nccl"
    return ""


def _synchronize() -> None:
    """Wait for the device: Ray's NCCL group works on a stream of its own and returns early."""
    import torch

    torch.cuda.synchronize()


def _forget_stock_store(group_name: str) -> None:
    """End the detached actor in which Ray's NCCL group keeps its communicator id, which outlives a rank 0 that died.

    It is named after the GPU's number in its process (0 for a replica that sees one GPU) and the group.
    """
    import ray
    from ray.util.collective.const import get_store_name

    try:
        ray.kill(ray.get_actor(get_store_name(f"0@{group_name}")))
    except ValueError:  # rank 0 lived to end it, or no communicator was ever made
        return


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
            self.transport = _forming[group_name]()

        @classmethod
        def backend(cls) -> str:
            return name

        @classmethod
        def check_backend_availability(cls) -> bool:
            return True  # the transport refuses with its reason, which Ray's own refusal does not give

        def destroy_group(self) -> None:
            self.transport.close()

        def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
            self.transport.allreduce(tensor[0], allreduce_options.reduceOp.name)

        def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
            self.transport.reduce(tensor[0], reduce_options.root_rank, reduce_options.reduceOp.name)

        def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
            self.transport.broadcast(tensor[0], broadcast_options.root_rank)

        def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
            self.transport.allgather(tensor_list[0], tensor[0])

        def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
            self.transport.reduce_scatter(tensor[0], tensor_list[0], reducescatter_options.reduceOp.name)

        def send(self, tensor: Any, send_options: Any) -> None:
            self.transport.send(tensor[0], send_options.dst_rank)

        def recv(self, tensor: Any, recv_options: Any) -> None:
            self.transport.recv(tensor[0], recv_options.src_rank)

        def barrier(self, barrier_options: Any = None) -> None:
            self.transport.barrier()

    return Backend
