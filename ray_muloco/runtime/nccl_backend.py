"""The replicas' own group over NCCL, for GPUs of one fabric, with the timeout and the abort that Ray's NCCL lacks.

What has been run of this file is its refusal without CUDA and the checks of its arguments against torch's own
signatures; no sum over two GPUs has been taken with it yet. NCCL wants one GPU a rank, so the coordinator, which has none,
is not a member: the lowest replica hands it the sum over Gloo.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ray_muloco.runtime.gloo_backend import Transport


class NcclTransport(Transport):
    """CUDA tensors of this process's current device; each call returns when the device has finished it."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, timeout_seconds: float) -> None:
        """Create the communicator among all ranks.

        store: this generation's own keys and nothing else's.
        timeout_seconds: bound of the formation and of each operation; torch's watchdog aborts what exceeds it.
        """
        unavailable = why_unavailable()
        if unavailable:
            raise RuntimeError(unavailable)
        device = torch.device("cuda", torch.cuda.current_device())
        options = nccl_options(timeout_seconds)
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)  # type: ignore[attr-defined]
        # now and not at the first sum, so that a missing member shows in the formation
        group.eager_connect_single_device(device)
        self._device = device
        super().__init__(group)

    def close(self) -> None:
        """Abort what is pending and free the communicator. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _run(self, method: str, *arguments: Any) -> None:
        super()._run(method, *arguments)
        # NCCL's wait() orders streams and returns early; the caller reads from the CPU side next
        torch.cuda.synchronize(self._device)


def why_unavailable() -> str:
    """The reason why this process cannot use NCCL, with the remedy; empty when it can."""
    if not torch.cuda.is_available():
        return "NCCL needs a CUDA device in this process and torch sees none; use --scaling.collective gloo, or give replicas GPUs"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL; use --scaling.collective gloo, or install a CUDA build of torch"
    return ""


def nccl_options(timeout_seconds: float) -> Any:
    """Options of a blocking communicator whose operations fail after timeout_seconds."""
    options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_seconds)
    options.is_high_priority_stream = False
    return options
