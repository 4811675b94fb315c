"""What elasticity costs while nothing happens, and what it is worth when something does."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _bench.measure import Effort, Figure, at_least, at_most, compare, within
from _bench.runs import fit_rounds, run_config
from ray_muloco import presets
from ray_muloco.config import TrainConfig

JOBS = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300.0
PAUSE = re.compile(r"no training for (-?[0-9.]+) s")
KILL_ROUND = 5
SLOWER = 3.0
DRAG = 8.0
"""What sleep makes of every replica's steps, so that four of them leave two cores mostly idle."""
STILL_INTERVAL, STILL_BUDGETS = 3, 3
"""Steps between two exchanges, and how many times as much is trained as in other cases: what is measured is short."""
SETTLED_ROUNDS = 4
"""Rounds until all four replicas are slowed, and one was planned by the speeds that followed."""


def elastic_off(effort: Effort) -> Iterator[Figure]:
    """tiny, K=2, nothing happens: a run's rounds that end with a look at the membership (drains, deaths, joiners) against those that do not.

    Both take turns round by round in the same processes: the exchange takes ten milliseconds, and differs between two runs of the
    same program by more than it could between these. The medians are over all rounds but each run's first two, which choose
    kernels and touch pages. The exchange's seconds include the boundary.
    """
    from ray_muloco.runtime.drill import Drill

    changes = {
        "sync_interval": STILL_INTERVAL,
        "eval_every_rounds": 1000,
        "checkpoint.every_rounds": 1000,
        "scaling.min_replicas": 1,
        "scaling.max_replicas": 2,
    }
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for _ in range(effort.repeats):
        with tempfile.TemporaryDirectory() as storage:
            config = run_config(2, storage, effort)
            config = config.override({**changes, "budget_tokens": STILL_BUDGETS * config.budget_tokens})
            for record in fit_rounds(config, Drill((), f"{storage}/log.jsonl", still=True))[2:]:
                sides[record["round"] % 2 == 0].append(record)
    yield Figure("tiny, K=2, inner phase", inner_rate(sides[True]), inner_rate(sides[False]), "tokens/s", within(0.02))
    yield Figure("tiny, K=2, exchange", exchange_seconds(sides[True]), exchange_seconds(sides[False]), "s", within(0.02))


def inner_rate(records: list[dict[str, Any]]) -> float:
    """Median tokens a second of a round's inner phase."""
    return statistics.median(record["tokens_merged"] / record["seconds_inner"] for record in records)


def exchange_seconds(records: list[dict[str, Any]]) -> float:
    """Median seconds of a round's exchange, both ways."""
    return statistics.median(record["seconds_exchange"] for record in records)


def equal_time(effort: Effort) -> Iterator[Figure]:
    """Four replicas, one of them three times slower: the tokens a second of a run over the sum of what each one could do.

    The whole is Σ v_k, v_k the tokens a second of replica k's inner phases, measured in the same rounds while all four run. So that
    cores do not decide, replicas sleep instead of computing: each of three takes DRAG times as long as its computation, one
    3 DRAG times. Synchronous rounds wait for the slowest, (3 + 1) v / 3 of 3⅓ v, or 0.4; rounds of equal time should not.
    """
    turns: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as storage:
        for turn in range(1 if effort.quick else max(2, effort.repeats // 2)):
            for equal in (True, False):
                config = slow_config(storage, effort).override({"scaling.equal_time_rounds": equal})
                turns[equal].append(paces(config, f"{storage}/drill-{turn}-{equal}"))
    for equal, name, target in ((True, "rounds of equal time", at_least(0.9)), (False, "synchronous rounds", None)):
        run, whole = (statistics.median(values) for values in zip(*turns[equal], strict=True))
        yield Figure(f"nano, K=4, one {SLOWER:g}x slower, {name}", run, whole, "tokens/s", target)


def slow_config(storage: str, effort: Effort) -> TrainConfig:
    """nano with four replicas and a round of two seconds or so."""
    config = presets.nano("muloco", 4)
    rounds, interval = (SETTLED_ROUNDS + 2, 6) if effort.quick else (SETTLED_ROUNDS + 8, 30)
    return config.override(
        {
            "sync_interval": interval, "budget_tokens": rounds * interval * config.batch_sequences * config.model.sequence_length,
            "eval_every_rounds": 1000, "checkpoint.every_rounds": 1000, "scaling.threads_per_replica": 1,
            "run.storage_path": storage, "run.tracker": "none",
        }
    )  # fmt: skip


def paces(config: TrainConfig, files: str) -> tuple[float, float]:
    """Tokens a second of the run from commit to commit, and Σ v_k, both over the settled rounds."""
    from ray_muloco.analysis.recovery import pace
    from ray_muloco.runtime.drill import SLOW, Drill, Fault, read_log

    moments = ((1, "inner"), (1, "exchange"), (1, "publish"), (2, "exchange"))
    faults = tuple(
        Fault(number=k, round=at, kind=SLOW, phase=phase, moment=0.0, victim=k / 4, factor=DRAG * (SLOWER if k == 3 else 1.0))
        for k, (at, phase) in enumerate(moments)
    )
    Path(files).mkdir()
    records = fit_rounds(config, Drill(faults, f"{files}/log.jsonl", f"{files}/speeds.jsonl"))
    settled = [line["steps_per_second"] for line in read_log(f"{files}/speeds.jsonl") if line["round"] > SETTLED_ROUNDS]
    step_tokens = config.replica_batch_sequences * config.model.sequence_length
    return pace(records[SETTLED_ROUNDS - 1 :]), step_tokens * sum(statistics.median(line[k] for line in settled) for k in settled[0])


def ray_train_elastic(effort: Effort) -> Iterator[Figure]:
    """tiny on two nodes of this machine, a process killed with -9 or a node crashed: seconds without training, ours and Ray Train's.

    Theirs: from the crash to the next step that its restarted workers finish, less a usual step; ScalingConfig(num_workers=(1, 2)),
    a checkpoint every 20 steps. Ours: by how much later than usual the round committed that the crash hit; the other replica
    trained on meanwhile. Both with the same health checks, those of runtime.cluster.
    """
    turns = 1 if effort.quick else max(2, effort.repeats // 2)
    for kind, name in (("kill", "a process killed"), ("node", "a node crashed")):
        if not (effort.quick and kind == "node"):
            yield compare(
                f"tiny, K=2, {name}", lambda kind=kind: our_pause(kind, effort), lambda kind=kind: their_pause(kind), "s without training", turns, at_most(0.2)
            )


def our_pause(kind: str, effort: Effort) -> float:
    """Seconds by which the round in which a replica dies commits later than the rounds before it; at least 0."""
    from ray_muloco import fit
    from ray_muloco.analysis.recovery import delays, seconds_between
    from ray_muloco.runtime.cluster import one_node_a_replica
    from ray_muloco.runtime.drill import Drill, Fault, read_log

    with tempfile.TemporaryDirectory() as storage:
        config = run_config(2, storage, effort)
        round_tokens = config.sync_interval * config.batch_sequences * config.model.sequence_length
        config = config.override(
            {
                "budget_tokens": (KILL_ROUND + 3) * round_tokens, "eval_every_rounds": 1000, "checkpoint.every_rounds": 1000,
                "scaling.min_replicas": 1, "scaling.max_replicas": 2, "run.name": f"bench-{time.time_ns()}",
            }
        )  # fmt: skip
        log = f"{storage}/drill.jsonl"
        fault = Fault(number=0, round=KILL_ROUND, kind=kind, phase="inner", moment=0.5, victim=0.99)
        with one_node_a_replica(2, 1):
            records = fit(config, drill=Drill((fault,), log)).metrics
        usual = statistics.median(seconds_between(records[: KILL_ROUND - 1]))
        found = delays(records, read_log(log), kind, usual)
        if len(found) != 1 or all(record["participants"] == 2 for record in records):
            raise AssertionError(f"no replica was lost to the fault, or in no round: delays {found}")
        return max(0.0, found[0])


def their_pause(kind: str) -> float:
    """The baseline program, in processes of its own."""
    with tempfile.TemporaryDirectory() as storage:
        command = [sys.executable, "-m", "_bench.torch_elastic", storage, kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=JOBS, check=False)
    found = PAUSE.search(done.stdout)
    if done.returncode or not found:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return float(found[1])
