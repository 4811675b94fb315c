"""Units of preparation as Ray tasks: one core each, a bounded number in flight, a deadline on every wait.

A unit writes its own shards and record, so a task returns only the record, and one that died is simply run again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ray_muloco.data.build import STATE
from ray_muloco.data.tokenizer import BYTES, Tokenizer, tokenizer_from_spec
from ray_muloco.data.units import UnitJob, UnitRecord, build_unit
from ray_muloco.errors import ConfigError, RunError

OBJECT_STORE_BYTES = 128 << 20
UNIT_DEADLINE_SECONDS = 3600.0
_RETRIES = 3
_IN_FLIGHT_PER_CORE = 2


@contextlib.contextmanager
def cluster(address: str, num_cpus: int) -> Iterator[None]:
    """A connected Ray: the one this process has, the one at `address`, or (address empty) a private one that ends with the block."""
    if ray.is_initialized():
        yield
        return
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
            object_store_memory=OBJECT_STORE_BYTES,
        )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


class RayUnits:
    """Runs units as tasks on the connected Ray and yields their records as they finish.

    Raises what a unit raises of ConfigError and RunError, and RunError("preparing", …) when a unit keeps dying or none
    finishes within `deadline_seconds`.
    """

    def __init__(self, deadline_seconds: float = UNIT_DEADLINE_SECONDS) -> None:
        self._deadline_seconds = deadline_seconds

    def __call__(self, jobs: Sequence[UnitJob], tokenizer: Tokenizer) -> Iterator[UnitRecord]:
        """The records of the jobs, in the order in which they finish."""
        if not jobs:
            return
        spec, build = ray.put(tokenizer.spec), _build
        if tokenizer.spec != BYTES:  # one thread a task: the tokenizers library would otherwise take every core for each of them
            build = _build.options(runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}})
        limit = _IN_FLIGHT_PER_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
        waiting, running = iter(jobs), {}
        try:
            while True:
                for job in waiting:
                    running[build.remote(job, spec)] = job
                    if len(running) >= limit:
                        break
                if not running:
                    return
                done, _ = ray.wait(list(running), num_returns=1, timeout=self._deadline_seconds)
                if not done:
                    numbers = ", ".join(str(job.unit.number) for job in list(running.values())[:8])
                    raise RunError("preparing", f"none of the units {numbers} was finished in {self._deadline_seconds:g} s; is the cluster busy?")
                yield _result(done[0], running.pop(done[0]))
        finally:
            for reference in running:
                ray.cancel(reference, force=True)


@ray.remote(num_cpus=1, max_retries=_RETRIES)
def _build(job: UnitJob, spec: str) -> UnitRecord:
    if job.output.size(f"{STATE}/plan.json") is None:
        host = ray.util.get_node_ip_address()
        raise ConfigError(
            "output", job.output.text, f"cannot be seen by node {host}", "name a directory that all nodes mount, or a URI such as s3://bucket/shards"
        )
    return build_unit(job, _tokenizer(spec))


@functools.lru_cache(maxsize=1)
def _tokenizer(spec: str) -> Tokenizer:
    return tokenizer_from_spec(spec)


def _result(reference: Any, job: UnitJob) -> UnitRecord:
    try:
        return ray.get(reference, timeout=60.0)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ConfigError | RunError):
            raise cause from None
        raise RunError("preparing", f"unit {job.unit.number} failed: {type(cause).__name__}: {cause}") from error
    except RayError as error:
        first_line = str(error).strip().splitlines()[0]
        raise RunError("preparing", f"unit {job.unit.number} was lost {_RETRIES + 1} times: {type(error).__name__}: {first_line}") from error
