"""What the C library does with memory that a training step frees. Called by whoever owns the process, never at import."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
_MAPPED_FROM_BYTES = 32 << 20  # the most that mallopt accepts


def keep_freed_memory() -> bool:
    """Have this process keep up to 1 GiB of freed memory for the next step; whether the C library could be told so.

    A training step frees what the next one allocates again. By default glibc returns much of it to the system in between,
    and every page comes back through a page fault: on virtual machines a quarter of the time of a small model's step.
    Allocations of 32 MiB and more are still returned at once. On other C libraries nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in ((_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)))
