"""One generation's group over torch's Gloo process group: bounded, on a named interface, gone at the first failure.

`Transport` is what both backends share, `GlooTransport` the CPU one. Neither knows Ray: `runtime/collectives.py` puts
them behind ray.util.collective. torch's process-wide default group is never made, so a replica may use it for itself.

Why not Ray's own GLOO: its groups are sub-groups of the first group a process ever made, which outlives its members.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ray_muloco.runtime.shared_board import Board, Offer, map_all

REDUCE_OPS = {"SUM": dist.ReduceOp.SUM, "PRODUCT": dist.ReduceOp.PRODUCT, "MIN": dist.ReduceOp.MIN, "MAX": dist.ReduceOp.MAX}
COMBINE: dict[str, Any] = {"SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
NUM_SENDING_THREADS = 2


class Transport:
    """Blocking collectives over one torch process group, which is dropped inside the failing call.

    Peers that wait for a dead or stopped member are not freed by an abort, only by a timeout or by closed sockets; so
    whoever sees a failure lets go of its sockets before the error travels on, and the failure runs round the ring.
    Errors come as torch raises them; `RuntimeError` when the group is gone already.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._timeout: timedelta | None = None

    def set_timeout(self, seconds: float) -> None:
        """Bound this member's operations from now on, instead of by the timeout of the formation."""
        self._timeout = timedelta(seconds=seconds)

    @property
    def closed(self) -> bool:
        """Whether the sockets are gone."""
        return self._group is None

    def close(self) -> None:
        """Let go of the sockets. Idempotent."""
        self._group = None

    def allreduce(self, tensor: Tensor, operation: str) -> None:
        """tensor <- op over all ranks, everywhere, in place."""
        options = self._bounded(dist.AllreduceOptions())
        options.reduceOp = REDUCE_OPS[operation]
        self._run("allreduce", [tensor], options)

    def reduce(self, tensor: Tensor, root: int, operation: str) -> None:
        """tensor <- op over all ranks at root; elsewhere the tensor is scratch and its content afterwards undefined."""
        options = self._bounded(dist.ReduceOptions())
        options.reduceOp, options.rootRank, options.rootTensor = REDUCE_OPS[operation], root, 0
        self._run("reduce", [tensor], options)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """tensor <- the root's tensor, in place."""
        options = self._bounded(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        self._run("broadcast", [tensor], options)

    def allgather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        """outputs[r] <- tensor of rank r."""
        self._run("allgather", [outputs], [tensor], self._bounded(AllgatherOptions()))

    def reduce_scatter(self, tensor: Tensor, inputs: list[Tensor], operation: str) -> None:
        """tensor <- op over all ranks of their inputs[own rank]."""
        options = self._bounded(dist.ReduceScatterOptions())
        options.reduceOp = REDUCE_OPS[operation]
        self._run("reduce_scatter", [tensor], [inputs], options)

    def send(self, tensor: Tensor, rank: int) -> None:
        """Hand a tensor to a rank of this group."""
        self._run("send", [tensor], rank, 0)

    def recv(self, tensor: Tensor, rank: int) -> None:
        """tensor <- what that rank of this group sends."""
        self._run("recv", [tensor], rank, 0)

    def barrier(self) -> None:
        """Return once every rank has come here."""
        self._run("barrier", self._bounded(dist.BarrierOptions()))

    def _bounded(self, options: Any) -> Any:
        """These options with this member's timeout, if it has one of its own."""
        if self._timeout is not None:
            options.timeout = self._timeout
        return options

    def _run(self, method: str, *arguments: Any) -> None:
        with self._dropping_on_failure():
            if self._group is None:
                raise RuntimeError("the group is closed")
            work = getattr(self._group, method)(*arguments)
            if self._timeout is not None and method in ("send", "recv"):  # these take no options
                work.wait(self._timeout)
            else:
                work.wait()

    @contextmanager
    def _dropping_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # a frame kept alive by the traceback would keep the sockets open
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise


class GlooTransport(Transport):
    """CPU tensors of any gloo type: fp64, fp32, fp16, bf16, int8, uint8, int32, int64, bool (sums of int8 wrap).

    Members that all share one machine exchange through memory and meet over Gloo, with the same bounds and failures:
    sums then run in rank order. `shared` says so, the same on every member.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, host: str, timeout_seconds: float, through_memory: bool = True) -> None:
        """Connect to every other rank through `store`.

        store: this generation's own keys and nothing else's.
        host: address of the interface to use; what the host name resolves to is often 127.0.0.1.
        timeout_seconds: bound of the formation and of each operation.
        through_memory: False keeps to the sockets also on one machine.
        """
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout_seconds)
        options._threads = NUM_SENDING_THREADS
        # not lazy: a member that cannot be reached shows now and not in the middle of a sum
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        super().__init__(dist.ProcessGroupGloo(store, rank, world_size, options))
        self._rank, self._board = rank, None
        self._board = self._share(Offer(store, rank, world_size, through_memory=through_memory), store, world_size, timeout_seconds)

    @property
    def shared(self) -> bool:
        """Whether tensors go through memory, and sums in rank order."""
        return self._board is not None

    def set_timeout(self, seconds: float) -> None:
        """Bound this member's operations from now on, instead of by the timeout of the formation."""
        super().set_timeout(seconds)
        if self._board is not None:
            self._board.timeout_seconds = seconds

    def close(self) -> None:
        """Let go of the sockets and of the memory. Idempotent."""
        super().close()
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def allreduce(self, tensor: Tensor, operation: str) -> None:
        """tensor <- op over all ranks, everywhere, in place."""
        board = self._board
        if board is None:
            super().allreduce(tensor, operation)
            return
        with self._dropping_on_failure():
            for piece, slots in board.walk(tensor.view(-1)):
                slots[self._rank].copy_(piece)
                board.meet()
                shares = [slot.tensor_split(len(slots)) for slot in slots]  # each rank sums one share of the piece
                shares[self._rank][self._rank].copy_(_combined([share[self._rank] for share in shares], operation))
                board.meet()
                for share, part in enumerate(piece.tensor_split(len(slots))):
                    part.copy_(shares[share][share])

    def reduce(self, tensor: Tensor, root: int, operation: str) -> None:
        """tensor <- op over all ranks at root; elsewhere the tensor is scratch and its content afterwards undefined."""
        board = self._board
        if board is None:
            super().reduce(tensor, root, operation)
            return
        with self._dropping_on_failure():
            for piece, slots in board.walk(tensor.view(-1)):
                if self._rank != root or root != 0:
                    slots[self._rank].copy_(piece)
                board.meet()
                if self._rank == root:
                    total = piece if root == 0 else piece.copy_(slots[0])
                    for slot in slots[1:]:
                        COMBINE[operation](total, slot, out=total)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """tensor <- the root's tensor, in place."""
        board = self._board
        if board is None:
            super().broadcast(tensor, root)
            return
        with self._dropping_on_failure():
            for piece, slots in board.walk(tensor.view(-1)):
                if self._rank == root:
                    slots[root].copy_(piece)
                board.meet()
                if self._rank != root:
                    piece.copy_(slots[root])

    def allgather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        """outputs[r] <- tensor of rank r."""
        board, done = self._board, 0
        if board is None:
            super().allgather(outputs, tensor)
            return
        with self._dropping_on_failure():
            for piece, slots in board.walk(tensor.view(-1)):
                slots[self._rank].copy_(piece)
                board.meet()
                for output, slot in zip(outputs, slots, strict=True):
                    output.view(-1)[done : done + len(piece)].copy_(slot)
                done += len(piece)

    def barrier(self) -> None:
        """Return once every rank has come here."""
        board = self._board
        if board is None:
            super().barrier()
            return
        with self._dropping_on_failure():
            board.meet()

    def _share(self, offer: Offer, store: Any, world_size: int, timeout_seconds: float) -> Board | None:
        """The members' common memory, if every one of them can see that of all the others."""
        try:
            board = map_all(store, self._rank, world_size, timeout_seconds)
            everyone = torch.tensor([int(board is not None)])
            self.allreduce(everyone, "MIN")
            if board is not None and not everyone.item():
                board.close()
            return board if everyone.item() else None
        finally:
            offer.close()


def _combined(values: Sequence[Tensor], operation: str) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        COMBINE[operation](total, value, out=total)
    return total
