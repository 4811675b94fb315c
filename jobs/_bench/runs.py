"""Whole runs: `fit` on Ray against the same loop in bare processes, and against plain distributed data-parallel training."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from _bench.exchange import receive
from _bench.measure import Effort, Figure, at_least, compare
from ray_muloco import presets
from ray_muloco.config import TrainConfig

TIMEOUT_SECONDS = 900.0
SYNC_INTERVAL = 30
NUM_ROUNDS = 7  # the first is warm-up: kernels are chosen, pages touched


def fit_k1(effort: Effort) -> Iterator[Figure]:
    """K=1: tokens a second of fit's inner phases against the same inner loop in one bare process."""
    with tempfile.TemporaryDirectory() as storage:
        config = run_config(1, storage, effort)
        yield compare(
            "tiny, K=1, inner phase",
            lambda: fit_rate(config, ("seconds_inner",)),
            lambda: bare_rate(config, storage),
            "tokens/s",
            effort.repeats,
            at_least(0.97),
        )


def fit_k2(effort: Effort) -> Iterator[Figure]:
    """K=2 on two cores: tokens a second of fit, exchange included, against two bare processes that never talk."""
    with tempfile.TemporaryDirectory() as storage:
        config = run_config(2, storage, effort)
        yield compare(
            "tiny, K=2, exchange included",
            lambda: fit_rate(config, ("seconds_inner", "seconds_exchange", "seconds_outer")),
            lambda: bare_rate(config, storage),
            "tokens/s",
            effort.repeats,
            at_least(0.93),
        )


def ddp(effort: Effort) -> Iterator[Figure]:
    """tiny, K=2, the rounds of a whole run with evaluation and checkpoint, against plain DDP, which has neither."""
    with tempfile.TemporaryDirectory() as storage:
        config = run_config(2, storage, effort)
        for name, method in (("Muon", "muon-dp"), ("AdamW", "adamw-dp")):
            plain = config.override({"method": method})
            yield compare(
                f"tiny, K=2, whole run against DDP with {name}",
                lambda: whole_rate(config),
                lambda plain=plain: ddp_rate(plain, storage),
                "tokens/s",
                effort.repeats,
                at_least(1.1),
            )


def run_config(replicas: int, storage: str, effort: Effort) -> TrainConfig:
    """tiny with one thread a replica; evaluation, checkpoint and report once, at the end."""
    config = presets.tiny("muloco", replicas)
    rounds, interval = (3, 5) if effort.quick else (NUM_ROUNDS, SYNC_INTERVAL)
    return config.override(
        {
            "sync_interval": interval, "budget_tokens": rounds * interval * config.batch_sequences * config.model.sequence_length,
            "eval_every_rounds": rounds, "checkpoint.every_rounds": rounds, "scaling.threads_per_replica": 1,
            "run.storage_path": storage, "run.tracker": "none",
        }
    )  # fmt: skip


# ---- ours


def fit_rounds(config: TrainConfig, drill: Any = None) -> list[dict[str, Any]]:
    """The records of a new run of this configuration, which loses no replica. drill: what slows them (runtime.drill.Drill)."""
    from ray_muloco import fit

    named = config.override({"run.name": f"bench-{time.time_ns()}"})
    records = fit(named, drill=drill).metrics
    if sum(record["participants"] != config.scaling.num_replicas for record in records):
        raise AssertionError("a replica was lost during the benchmark: the figure would be meaningless")
    return records


def fit_rate(config: TrainConfig, phases: tuple[str, ...]) -> float:
    """Tokens a second of these phases over all rounds but the first."""
    records = fit_rounds(config)
    seconds = sum(record[phase] for record in records[1:] for phase in phases)
    return (records[-1]["tokens"] - records[0]["tokens"]) / seconds


def whole_rate(config: TrainConfig) -> float:
    """Tokens a second of whole rounds, first one and last evaluation included."""
    records = fit_rounds(config)
    return records[-1]["tokens"] / sum(record["seconds"] for record in records)


# ---- baselines


def num_steps(config: TrainConfig) -> int:
    """Inner steps of each replica over the whole run."""
    return config.budget_tokens // (config.batch_sequences * config.model.sequence_length)


def bare_rate(config: TrainConfig, storage: str) -> float:
    """Tokens a second of the replicas' inner loop in bare processes, all but the first round."""
    timed_steps = num_steps(config) - config.sync_interval
    seconds = run_processes(bare_replica, config.scaling.num_replicas, (config, storage, timed_steps))
    return timed_steps * config.batch_sequences * config.model.sequence_length / max(seconds)


def ddp_rate(config: TrainConfig, storage: str) -> float:
    """Tokens a second of plain DDP over as many steps as the run takes, the first one included."""
    tokens = Path(storage, "tokens.npy")
    if not tokens.exists():
        dataset = open_embedded(config, storage)
        np.save(tokens, dataset.train.tokens(0, min(dataset.train.num_tokens, 1 << 24)))
    with tempfile.TemporaryDirectory() as rendezvous:
        seconds = run_processes(ddp_process, config.scaling.num_replicas, (config, str(tokens), f"{rendezvous}/store", num_steps(config)))
    return config.budget_tokens / max(seconds)


def open_embedded(config: TrainConfig, storage: str) -> Any:
    """The run's dataset, built once beside the runs."""
    from ray_muloco.data.dataset import open_dataset

    cache = str(Path(storage, ".data"))
    return open_dataset(config.data, sequence_length=config.model.sequence_length, vocab_size=config.model.vocab_size, cache_dir=cache)


def run_processes(program: Callable[..., None], count: int, arguments: tuple[Any, ...]) -> list[float]:
    """Start `program(index, count, *arguments, pipe)` so many times, let all begin together, collect their seconds."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for index in range(count):
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=in_own_session, args=(program, index, count, *arguments, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    for pipe in pipes:
        receive(pipe)  # ready: model built, first steps taken
    for pipe in pipes:
        pipe.send("go")
    seconds = [receive(pipe) for pipe in pipes]
    for process in processes:
        process.join(TIMEOUT_SECONDS)
    return seconds


def in_own_session(program: Callable[..., None], *arguments: Any) -> None:
    """Run a program as Ray runs its actors: Linux shares a busy machine out by session, so both sides must have one a process."""
    os.setsid()
    program(*arguments)


def bare_replica(index: int, count: int, config: TrainConfig, storage: str, timed_steps: int, pipe: Any) -> None:
    """One bare process: a replica's inner loop, round by round, without Ray and without an exchange."""
    import torch

    from _bench.steps import replica_loop
    from ray_muloco.core.memory import keep_freed_memory
    from ray_muloco.core.precision import native_bf16

    torch.set_num_threads(1)
    keep_freed_memory()  # as replica actors do: the comparison is about Ray
    config = config.override({"compute_dtype": "bf16" if native_bf16() else "fp32"})
    run = replica_loop(config, open_embedded(config, storage), index)
    run(config.sync_interval)
    pipe.send("ready")
    pipe.recv()
    begin = time.perf_counter()
    for _ in range(timed_steps // config.sync_interval):
        run(config.sync_interval)
    pipe.send(time.perf_counter() - begin)


def ddp_process(index: int, count: int, config: TrainConfig, tokens: str, rendezvous: str, steps: int, pipe: Any) -> None:
    """One process of plain DDP over gloo in fp32: the plain model, torch's optimizers, data in memory."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from _bench.plain import plain_batches, plain_optimizers, plain_step, plain_twin
    from ray_muloco.core.model import build_model
    from ray_muloco.data.tokenizer import ByteTokenizer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=index, world_size=count)
    separator = ByteTokenizer().separator_id
    model = plain_twin(build_model(config.model, seed=config.seed, separator_id=separator), config.model, separator)
    wrapped = DistributedDataParallel(model)
    optimizers = plain_optimizers(model, config)
    batches = plain_batches(np.load(tokens), config.model.sequence_length, config.replica_batch_sequences, seed=index)
    pipe.send("ready")
    pipe.recv()
    begin = time.perf_counter()
    for _ in range(steps):
        plain_step(wrapped, model, optimizers, next(batches), config.inner.clip_norm)
    pipe.send(time.perf_counter() - begin)
    dist.destroy_process_group()
