"""The exchange of a round among 4 replicas and the coordinator, against plain torch gloo on buffers of the same size.

Both sides do the same outer work (a sum to one process, the result back to all) in five processes of one thread each; ours
also forms the pseudogradient, takes the outer step and checks digests.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _bench.measure import Effort, Figure, at_most, compare

NUM_REPLICAS = 4
STAGING_LIMIT_MB = 256.0
TIMEOUT_SECONDS = 120.0


def exchange(effort: Effort) -> Iterator[Figure]:
    """Seconds of an exchange of 100 MB, and how much memory it takes beyond θ, u and Δ, for two sizes of model."""
    megabytes = 10 if effort.quick else 100
    with RayMembers(megabytes) as ours, PlainMembers(megabytes) as baseline:
        ours.exchange()
        baseline.exchange()
        yield compare(f"{megabytes} MB, {NUM_REPLICAS} replicas", ours.exchange, baseline.exchange, "s", max(effort.repeats, 2), at_most(1.25))
    for size in (megabytes, 4 * megabytes):
        with RayMembers(size) as members:
            yield Figure(f"staging memory at {size} MB", members.staging_megabytes(), STAGING_LIMIT_MB, "MB", at_most(1.0))


class Member:
    """One process of our side: rank 0 is the coordinator, the others are replicas. A Ray actor."""

    def __init__(self, num_elements: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.theta = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
        self.other = self.theta * 0.9  # the coordinator's momentum, or a replica's own parameters
        self.sum = torch.zeros_like(self.theta)
        self.group: Any = None
        self.store: Any = None

    def serve(self) -> str:
        """Host the run's rendezvous store; returns its address."""
        import ray

        from ray_muloco.runtime.collectives import StoreServer

        self.store = StoreServer(ray.util.get_node_ip_address())
        return self.store.address

    def join(self, membership: Any) -> None:
        """Enter the group."""
        from ray_muloco.runtime.collectives import join

        self.group = join(membership)

    def exchange(self) -> tuple[float, int]:
        """Seconds of one exchange from a common start, and the digest of the new θ here."""
        from ray_muloco.core.outer import outer_step_
        from ray_muloco.runtime import exchange
        from ray_muloco.runtime.links import STAR_BUCKET_ELEMENTS as BUCKET_ELEMENTS
        from ray_muloco.training.coordinator import OUTER_CHUNK_ELEMENTS

        self.group.barrier()
        begin = time.perf_counter()
        if self.group.rank == 0:
            exchange.collect_(self.group, self.sum, BUCKET_ELEMENTS)
            for first in range(0, self.sum.numel(), OUTER_CHUNK_ELEMENTS):
                part = slice(first, first + OUTER_CHUNK_ELEMENTS)
                outer_step_(self.theta[part], self.other[part], self.sum[part].div_(NUM_REPLICAS), lr=0.7, mu=0.6)
            digest = exchange.publish(self.group, self.theta, BUCKET_ELEMENTS)
        else:
            exchange.contribute(self.group, start=self.theta, end=self.other, scale=1.0, bucket_elements=BUCKET_ELEMENTS)
            digest = exchange.receive_(self.group, self.theta, BUCKET_ELEMENTS)
        return time.perf_counter() - begin, digest

    def staging_megabytes(self) -> float:
        """How far resident memory rises above what is held before an exchange, while one goes on."""
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        before = resident_megabytes()
        self.exchange()
        return max(0.0, resident_megabytes("VmHWM") - before)

    def leave(self) -> None:
        """Leave the group and stop the store."""
        if self.group is not None:
            self.group.leave()
        if self.store is not None:
            self.store.close()


def resident_megabytes(field: str = "VmRSS") -> float:
    """Resident memory of this process (VmRSS), or its highest since the mark was reset (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6  # the kernel's kB are KiB
    raise AssertionError(f"/proc/self/status has no {field}: this figure needs Linux")


class RayMembers:
    """Our five processes, on a private cluster."""

    def __init__(self, megabytes: int) -> None:
        self.num_elements = megabytes * 1_000_000 // 4
        self.members: list[Any] = []

    def __enter__(self) -> RayMembers:
        import ray

        from ray_muloco.runtime.collectives import GLOO, Membership

        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])  # where the actors find this file
        ray.init(
            address="local", num_cpus=NUM_REPLICAS + 1, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
        self.members = [ray.remote(Member).options(num_cpus=1).remote(self.num_elements) for _ in range(NUM_REPLICAS + 1)]
        address: Any = ray.get(self.members[0].serve.remote(), timeout=TIMEOUT_SECONDS)
        run_id = f"bench-{secrets.token_hex(4)}"
        memberships = [Membership(address, run_id, 1, len(self.members), rank, 60.0, GLOO) for rank in range(len(self.members))]
        self._all("join", memberships)
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        try:
            self._all("leave")
        finally:
            ray.shutdown()

    def exchange(self) -> float:
        """Seconds until the last member was done; all of them must hold the same θ."""
        seconds, digests = zip(*self._all("exchange"), strict=True)
        if len(set(digests)) != 1:
            raise AssertionError(f"members hold different parameters after the exchange: digests {digests}")
        return max(seconds)

    def staging_megabytes(self) -> float:
        """The member with the most."""
        self._all("exchange")
        return max(self._all("staging_megabytes"))

    def _all(self, method: str, arguments: list[Any] | None = None) -> Any:
        import ray

        calls = [getattr(member, method).remote(*([arguments[i]] if arguments else [])) for i, member in enumerate(self.members)]
        return ray.get(calls, timeout=TIMEOUT_SECONDS)


class PlainMembers:
    """The baseline's five processes: torch.distributed and nothing else."""

    def __init__(self, megabytes: int) -> None:
        self.num_elements = megabytes * 1_000_000 // 4
        self.directory = tempfile.TemporaryDirectory()
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def __enter__(self) -> PlainMembers:
        spawn = multiprocessing.get_context("spawn")
        for rank in range(NUM_REPLICAS + 1):
            mine, theirs = spawn.Pipe()
            arguments = (rank, NUM_REPLICAS + 1, f"{self.directory.name}/rendezvous", self.num_elements, theirs)
            process = spawn.Process(target=plain_member, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(mine)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.send(False)
        for process in self.processes:
            process.join(TIMEOUT_SECONDS)
        self.directory.cleanup()

    def exchange(self) -> float:
        """Seconds until the last member was done."""
        for pipe in self.pipes:
            pipe.send(True)
        return max(receive(pipe) for pipe in self.pipes)


def receive(pipe: Connection) -> Any:
    """What comes through a pipe, within the deadline."""
    if not pipe.poll(TIMEOUT_SECONDS):
        raise TimeoutError(f"a process of the baseline did not answer for {TIMEOUT_SECONDS:g} s")
    return pipe.recv()


def plain_member(rank: int, world_size: int, rendezvous: str, num_elements: int, pipe: Connection) -> None:
    """One process of the baseline: reduce to rank 0 and broadcast from it, each time the pipe says so."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    buffer = torch.randn(num_elements)
    while pipe.recv():
        dist.barrier()
        begin = time.perf_counter()
        dist.reduce(buffer, 0)
        dist.broadcast(buffer, 0)
        pipe.send(time.perf_counter() - begin)
    dist.destroy_process_group()
