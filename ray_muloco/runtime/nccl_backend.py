"""The replicas' own group over NCCL, for GPUs of one fabric, with the timeout and the abort that Ray's NCCL lacks.

Of this file, the refusal without CUDA has been run, and its options have been checked against torch's signatures; it has
not yet summed over GPUs. NCCL wants one GPU a rank, so the coordinator, which has none, is not a member: the lowest replica
hands it the sum over Gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ray_muloco.runtime.gloo_backend import Transport

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class NcclTransport(Transport):
    """CUDA tensors of this process's current device; each call returns when the device has finished it."""

    def __init__(self, store: Any, *, rank: int, world_size: int, timeout_seconds: float) -> None:
        """Create the communicator among all ranks; RuntimeError with the remedy where there is no CUDA or no NCCL.

        store: this generation's own keys and nothing else's.
        timeout_seconds: bound of each operation; what exceeds it is aborted, and raises in the caller.
        """
        unavailable = why_unavailable()
        if unavailable:
            raise RuntimeError(unavailable)
        with blocking_wait():
            group = dist.ProcessGroupNCCL(store, rank, world_size, nccl_options(timeout_seconds))  # type: ignore[attr-defined]
        super().__init__(group)

    def close(self) -> None:
        """Abort what is pending and free the communicator. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def why_unavailable() -> str:
    """The reason why this process cannot use NCCL, with the remedy; empty when it can."""
    if not torch.cuda.is_available():
        return "NCCL needs a CUDA device in this process and torch sees none; use --scaling.collective gloo, or give replicas GPUs"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; use --scaling.collective gloo, or install a CUDA build of torch"
    return ""


def nccl_options(timeout_seconds: float) -> Any:
    """Options of a communicator whose operations fail after timeout_seconds."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=False)  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    return options


@contextmanager
def blocking_wait() -> Iterator[None]:
    """Inside, a new NCCL group raises its timeouts and its peers' deaths in the caller's wait().

    torch reads this switch from the environment as it makes a group; without it, its watchdog ends the whole process, and
    with it a replica that could have gone on. It is put back, so that other groups of the process keep torch's default.
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before
