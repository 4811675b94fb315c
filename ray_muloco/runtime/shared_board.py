"""Memory that all members of a group on one machine can see: what they exchange is copied once, not through sockets.

Each member owns a segment: a header in which it counts its arrivals, and two slots. A walk over a tensor fills the slots in
turn, and all members meet once a turn; so while one slot is read the other may be written. All walk equal tensors in the
same order. A segment has no name in any file system: it is gone with the processes that map it, however they end.

A meeting ends early when a member's process dies (the kernel tells through its pidfd) or has left, and late by timeout.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NUM_TURNS = 2
HEADER_BYTES = 4096
LARGEST_SLOT_BYTES, SMALLEST_SLOT_BYTES = 4 << 20, 64 << 10
BOARD_BYTES = 64 << 20
"""What all slots of a board take together, unless there are so many members that the smallest slots take more."""
ARRIVALS, LEFT = 0, 1  # fields of the header, int64
TOKEN_OFFSET, TOKEN_BYTES = 64, 32
NUM_EAGER_LOOKS = 50
SHORTEST_NAP_SECONDS, LONGEST_NAP_SECONDS = 2e-5, 5e-4


def slot_bytes(world_size: int) -> int:
    """Size of each slot, a multiple of every element's size."""
    return min(LARGEST_SLOT_BYTES, max(SMALLEST_SLOT_BYTES, BOARD_BYTES // (NUM_TURNS * world_size) // HEADER_BYTES * HEADER_BYTES))


def segment_bytes(world_size: int) -> int:
    """Size of each member's segment."""
    return HEADER_BYTES + NUM_TURNS * slot_bytes(world_size)


class Board:
    """The mapped segments of all members, by rank."""

    def __init__(self, segments: list[mmap.mmap], processes: list[int], rank: int, timeout_seconds: float) -> None:
        """processes: a pidfd of each member's process; the board closes them."""
        self._rank, self.timeout_seconds, self._processes = rank, timeout_seconds, processes
        self._headers = [memoryview(segment)[:TOKEN_OFFSET].cast("q") for segment in segments]
        whole = [torch.frombuffer(segment, dtype=torch.uint8)[HEADER_BYTES:] for segment in segments]
        self._slot_bytes = slot_bytes(len(segments))
        self._slots = [[slots[turn * self._slot_bytes :][: self._slot_bytes] for slots in whole] for turn in range(NUM_TURNS)]
        self._turn = self._num_meetings = 0
        self._deaths = select.poll()
        for process in processes:
            self._deaths.register(process, select.POLLIN)

    def walk(self, flat: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Pieces of a 1-D tensor, each with the slots of its turn, by rank, in its type and size."""
        num_elements = self._slot_bytes // flat.element_size()
        for begin in range(0, flat.numel(), num_elements):
            piece = flat[begin : begin + num_elements]
            yield piece, [slot.view(flat.dtype)[: piece.numel()] for slot in self._slots[self._turn]]
            self._turn = (self._turn + 1) % NUM_TURNS

    def meet(self) -> None:
        """Return once every member has come here as often; RuntimeError naming who died, left or did not come in time."""
        self._num_meetings += 1
        _fence()  # what was written into slots is seen before the arrival
        self._headers[self._rank][ARRIVALS] = self._num_meetings
        deadline = time.monotonic() + self.timeout_seconds
        for rank, header in enumerate(self._headers):
            if header[ARRIVALS] < self._num_meetings:
                self._wait_for(rank, deadline)
        _fence()

    def close(self) -> None:
        """Tell the others that this member has left, and let go."""
        self._headers[self._rank][LEFT] = 1
        for process in self._processes:
            os.close(process)

    def _wait_for(self, rank: int, deadline: float) -> None:
        header, nap = self._headers[rank], SHORTEST_NAP_SECONDS
        for _ in range(NUM_EAGER_LOOKS):
            if header[ARRIVALS] >= self._num_meetings:
                return
            os.sched_yield()
        while header[ARRIVALS] < self._num_meetings:
            absent = self._absence()
            if header[ARRIVALS] >= self._num_meetings:  # came, and left while we looked
                return
            if absent:
                raise RuntimeError(absent)
            if time.monotonic() >= deadline:
                raise RuntimeError(f"rank {rank} did not come within {self.timeout_seconds:g} s")
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_SECONDS)

    def _absence(self) -> str:
        """Who will not come to this meeting any more, if anyone."""
        dead = [self._processes.index(descriptor) for descriptor, _ in self._deaths.poll(0)]
        missing = [rank for rank, header in enumerate(self._headers) if header[ARRIVALS] < self._num_meetings]
        for rank in missing:
            if rank in dead:
                return f"the process of rank {rank} died"
        for rank in missing:
            if self._headers[rank][LEFT]:
                return f"rank {rank} left the group"
        return ""


class Offer:
    """One member's segment, offered to the others through the store until they have all mapped it."""

    def __init__(self, store: Any, rank: int, world_size: int, *, through_memory: bool) -> None:
        self._descriptor = -1
        # Linux only; elsewhere all goes through sockets
        if not (through_memory and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")):
            store.set(f"board/{rank}", "")
            return
        self._descriptor = os.memfd_create("ray_muloco")
        os.ftruncate(self._descriptor, segment_bytes(world_size))
        token = secrets.token_hex(TOKEN_BYTES // 2)
        os.pwrite(self._descriptor, token.encode(), TOKEN_OFFSET)
        store.set(f"board/{rank}", f"{os.getpid()} {self._descriptor} {token}")

    def close(self) -> None:
        """Take the offer back; what is mapped stays mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def map_all(store: Any, rank: int, world_size: int, timeout_seconds: float) -> Board | None:
    """The board of all members' offers, or nothing when one of them is on another machine or out of sight."""
    segments: list[mmap.mmap] = []
    with contextlib.ExitStack() as unless_all:
        processes: list[int] = []
        for member in range(world_size):
            seen = _map(store.get(f"board/{member}").decode(), segment_bytes(world_size))  # raises when a member did not offer in time
            if seen is not None:
                segments.append(seen[0])
                processes.append(seen[1])
                unless_all.callback(os.close, seen[1])
        if len(segments) < world_size:
            return None
        board = Board(segments, processes, rank, timeout_seconds)
        unless_all.pop_all()  # the board closes them
    return board


def _map(offer: str, num_bytes: int) -> tuple[mmap.mmap, int] | None:
    """The segment of an offer and a pidfd of its owner, when this process can see both."""
    if not offer:
        return None
    pid, number, token = offer.split()
    process = descriptor = -1
    try:
        process = os.pidfd_open(int(pid))
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        # the same numbers may name another process here
        if os.pread(descriptor, TOKEN_BYTES, TOKEN_OFFSET) == token.encode() and os.fstat(descriptor).st_size == num_bytes:
            segment, owner, process = mmap.mmap(descriptor, num_bytes), process, -1
            return segment, owner
    except OSError:  # another machine, container or user
        return None
    finally:
        for opened in (process, descriptor):
            if opened >= 0:
                os.close(opened)
    return None


_memory_order = threading.Lock()


def _fence() -> None:
    """Order this thread's accesses to memory before and after, on processors that do not keep their order by themselves.

    A lock given back and taken again does that; Python offers no plainer way.
    """
    with _memory_order:
        pass
    with _memory_order:
        pass
