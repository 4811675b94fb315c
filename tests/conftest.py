"""What every test file shares: one thread, checked types in core, reproducible random cases, and a cluster on request."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# For this process and those that tests start: one thread, so that figures and sums do not depend on the machine; no token
# authentication, so that no test leaves a token in the home directory; no long goodbye of nodes that tests take away.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# Under pytest every call into core is checked against its annotations; in production nothing is.
install_import_hook("ray_muloco.core", "beartype.beartype")

# A slow machine is no failure of the code: no deadlines. In CI the same cases every time.
settings.register_profile("house", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("house")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test one thread, also after one that changed the number; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """A private one-node cluster of 16 logical CPUs for the tests of one file; the ray module."""
    import ray

    ray.init(address="local", num_cpus=16, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
    try:
        yield ray
    finally:
        ray.shutdown()
