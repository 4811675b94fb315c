"""Train under a schedule of faults, and say what they cost: run this before you trust a cluster.

    python jobs/drill.py tiny --scaling.num-replicas 4 --faults 12 --drill-seed 3
    python jobs/drill.py tiny --scaling.num-replicas 4 --faults 0 --kill-every 10 --kill-coordinator-at 55

The same configuration is trained twice on a private cluster, undisturbed and under faults: real ones, a replica killed
(SIGKILL) or stopped (SIGSTOP), the coordinator killed, in the inner phase, the exchange, the publication and the
checkpoint. Every flag of jobs/train.py is one here; the budget defaults to ten rounds a fault.

Exit code 0: every fault happened, no sample was lost or repeated, all digests agree, nothing is left behind; 1: the reason
is the last line; 2: bad flags; 3: stopped; 4: the run gave up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from _display import make_display
from _main import check_json_place, run, write_json
from _preset import parse_with_preset
from rich.console import Console
from rich.table import Table

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError
from ray_muloco.training.storage import atomic_write_text

ROUNDS_A_FAULT = 10
STOPPED = 3


@dataclass(frozen=True)
class Flags:
    """Flags of this job beside the configuration's."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """What to train."""
    faults: int = 12
    """Faults drawn by the seed: kills, and at most one in ten each a hang and the coordinator's death."""
    drill_seed: int = 0
    """Seed of the faults' kinds, phases, moments and victims."""
    kill_every: int = 0
    """Kill a replica every so many rounds besides; 0 does not."""
    hang_every: int = 0
    """Stop a replica every so many rounds besides; 0 does not."""
    kill_coordinator_at: tuple[int, ...] = ()
    """Rounds in which the coordinator is killed besides."""
    drop_node: int = 0
    """Nodes that crash besides, spread over the run; each replica then has a node of its own on this machine."""
    keep_budget: Annotated[bool, tyro.conf.Suppress] = False
    """Whether the budget was given; otherwise it is ten rounds a fault."""
    json: str = ""
    """Write the figures to this file."""
    quiet: bool = False
    """Say nothing but errors and the report."""


def defaults(config: TrainConfig, given: dict[str, str]) -> Flags:
    """A drill's own defaults: survivors go on, checkpoints are close, the run has a name of its own."""
    changes: dict[str, Any] = {"checkpoint.every_rounds": 2, "scaling.min_replicas": 1, "scaling.max_replicas": config.scaling.num_replicas}
    if "run.name" not in given:
        changes["run.name"] = f"drill-{config.run_name}"
    return Flags(config=config.override(changes), keep_budget="budget-tokens" in given)


def main() -> int:
    """Run the job; returns its exit code."""
    from ray_muloco.analysis.recovery import unsound

    flags = parse_with_preset(sys.argv[1:], "drill.py", __doc__, Flags, defaults)
    check_json_place(flags.json)
    report = drill(flags)
    if report is None:
        return STOPPED
    show(report)
    write_json(flags.json, report)
    if reasons := unsound(report):
        print(f"the drill failed: {'; '.join(reasons)}", file=sys.stderr)
    return 1 if reasons else 0


def drill(flags: Flags) -> dict[str, Any] | None:
    """Train twice, undisturbed and under faults; the report, or None when asked to stop."""
    from ray_muloco.analysis.recovery import growth, recovery_report, seconds_between
    from ray_muloco.runtime.drill import Drill, read_log, usage_path
    from ray_muloco.runtime.fit import fit
    from ray_muloco.runtime.leaks import MORE_THREADS, belongings, leaks
    from ray_muloco.training.manifest import newest_manifest
    from ray_muloco.training.storage import local_directory

    if os.environ.pop("RAY_ADDRESS", ""):
        print("RAY_ADDRESS is set: a drill kills what it meets, and so it trains on a private cluster all the same", file=sys.stderr)
    config, faults = planned(flags)
    before = belongings()
    directory = local_directory(f"{config.run.storage_path}/{config.run_name}")
    os.makedirs(directory, exist_ok=True)
    log = os.path.join(directory, "drill.jsonl")
    keep_schedule(os.path.join(directory, "drill-schedule.json"), faults, config)
    calm = config.override({"run.name": f"{config.run_name}-undisturbed"})
    with prepared(flags, config) as listener:
        listener.message("first the same run without faults, to compare with")
        undisturbed = fit(calm, listener=listener)
    if undisturbed.status == "stopped":
        return None
    before = dataclasses.replace(belongings(), processes=before.processes, shared_memory=before.shared_memory)  # a first use opens what stays
    usual = statistics.median(seconds_between(undisturbed.metrics))
    config = config.override({"scaling.hang_floor_seconds": max(2.0, 2 * usual), "scaling.hang_factor": 2.0})
    with prepared(flags, config) as listener:
        listener.message(f"now with {len(faults)} faults; a replica is called silent after {config.scaling.hang_floor_seconds:.1f} s")
        result = fit(config, listener=listener, drill=Drill(faults, log))
    if result.status == "stopped":
        return None
    found = newest_manifest(result.path)
    assert found is not None, "a finished run has a checkpoint"
    report = recovery_report(result.metrics, read_log(log), found[1], undisturbed.metrics, config.scaling.num_replicas)
    ray_threads = 1 + config.scaling.num_replicas + flags.drop_node if flags.drop_node else 0  # Ray keeps one for each node that this process ever started
    left = leaks(before, more_threads=MORE_THREADS + ray_threads)
    return {**report, "scheduled": len(faults), "growth": growth(read_log(usage_path(log))), "leaks": left, "run": result.path}


@contextlib.contextmanager
def prepared(flags: Flags, config: TrainConfig) -> Iterator[Any]:
    """Where both runs of a drill train, and who is told of them: on nodes of their own where nodes are to crash."""
    from ray_muloco.runtime.cluster import one_node_a_replica

    with make_display(config.budget_tokens, quiet=flags.quiet) as display:
        if flags.drop_node:
            with one_node_a_replica(config.scaling.num_replicas, max(1, config.scaling.threads_per_replica)) as replenish:
                yield Replenisher(display, replenish)
        else:
            yield display


def keep_schedule(path: str, faults: tuple[Any, ...], config: TrainConfig) -> None:
    """Write the schedule beside the run; ConfigError when the run there had another one, whose faults would be reported as these."""
    schedule = [dataclasses.asdict(fault) for fault in faults]
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            if json.load(file) != schedule:
                raise ConfigError("run.name", config.run_name, "is a drill under other faults", "choose another --run.name, or remove its directory")
    atomic_write_text(path, json.dumps(schedule))


class Replenisher:
    """Passes on what is said of a run, and starts nodes for those that crashed meanwhile."""

    def __init__(self, display: Any, replenish: Callable[[], None]) -> None:
        self.info, self._display, self._replenish = display.info, display, replenish

    def round(self, record: dict[str, Any]) -> None:
        """A committed round."""
        self._display.round(record)
        self._replenish()

    def message(self, text: str) -> None:
        """A sentence for people."""
        self._display.message(text)
        self._replenish()


def planned(flags: Flags) -> tuple[TrainConfig, tuple[Any, ...]]:
    """The configuration with its budget, and all faults in order of their rounds."""
    from ray_muloco.runtime.drill import COORDINATOR, HANG, KILL, NODE, Fault, draw_faults
    from ray_muloco.training.preflight import absolute_path

    for name in ("faults", "kill_every", "hang_every", "drop_node"):
        if getattr(flags, name) < 0:
            raise ConfigError(name.replace("_", "-"), getattr(flags, name), "must be 0 or more")
    config = flags.config.override({"run.storage_path": absolute_path(flags.config.run.storage_path), "run.name": flags.config.run_name})
    round_tokens = config.sync_interval * config.batch_sequences * config.model.sequence_length
    if not flags.keep_budget:
        wanted = [flags.faults + flags.drop_node + 1, flags.kill_every, flags.hang_every, 1 + max(flags.kill_coordinator_at, default=0) // ROUNDS_A_FAULT]
        config = config.override({"budget_tokens": ROUNDS_A_FAULT * max(wanted) * round_tokens})
    rounds = config.budget_tokens // round_tokens
    if rounds < 2 * (flags.faults + flags.drop_node):
        raise ConfigError(
            "budget-tokens",
            config.budget_tokens,
            f"is {rounds} rounds, too few for {flags.faults + flags.drop_node} faults",
            "take more tokens or fewer faults",
        )
    for at_round in flags.kill_coordinator_at:
        if not 1 <= at_round <= rounds:
            raise ConfigError(
                "kill-coordinator-at", at_round, f"must be 1 to {rounds}, a round of this budget", "take an earlier round, or more --budget-tokens"
            )
    quiet_end = max(2, rounds - ROUNDS_A_FAULT // 2)
    drawn = [*draw_faults(flags.faults, flags.drill_seed, quiet_end)]
    drawn += [dataclasses.replace(f, kind=NODE) for f in draw_faults(flags.drop_node, flags.drill_seed + 1, quiet_end)]
    at = [(r, KILL) for r in range(flags.kill_every, quiet_end, flags.kill_every)] if flags.kill_every else []
    at += [(r, HANG) for r in range(flags.hang_every, quiet_end, flags.hang_every)] if flags.hang_every else []
    at += [(r, COORDINATOR) for r in flags.kill_coordinator_at]
    drawn += [Fault(number=0, round=r, kind=kind, phase="inner", moment=0.5, victim=0.99) for r, kind in at]
    ordered = sorted(drawn, key=lambda fault: fault.round)
    return config, tuple(dataclasses.replace(fault, number=n) for n, fault in enumerate(ordered))


def show(report: dict[str, Any]) -> None:
    """The recovery report as a table."""
    waits, rounds, kills = report["seconds_to_next_commit"], report["rounds_to_next_commit"], report["kill_delay_seconds"]
    table = Table(title="Recovery", show_header=False)
    rows = {
        "faults": f"{report['faults']} of {report['scheduled']} scheduled ({', '.join(f'{n} {kind}' for kind, n in sorted(report['by_kind'].items()))})",
        "in phases": ", ".join(f"{n} {phase}" for phase, n in sorted(report["by_phase"].items())),
        "rounds": f"{report['rounds']} of {report['round_seconds']:.2f} s",
        "from fault to next commit": f"median {statistics.median(waits):.2f} s, {statistics.median(rounds):.1f} rounds; worst {max(waits):.1f} s"
        if waits
        else "-",
        "a kill delays its round by": f"median {statistics.median(kills):.2f} s, worst {max(kills):.2f} s" if kills else "-",
        "goodput": f"{report['goodput']:.1%} of what the living replicas could have trained; pace {report['pace_ratio']:.1%} of the undisturbed run's",
        "replicas alive, merged": f"{report['alive_mean']:.2f}, {report['participants_mean']:.2f} (mean)",
        "samples lost, repeated": f"{report['samples_lost']}, {report['samples_repeated']}",
        "digests agree": "yes" if report["digests_agree"] else "NO",
        "validation loss": f"{report['val_loss']:.4f}, undisturbed {report['val_loss_undisturbed']:.4f}",
        "coordinator's growth": ", ".join(f"{name.replace('_', ' ')} {ratio:.3f}" for name, ratio in report["growth"].items()) or "-",
        "left behind": ", ".join(report["leaks"]) or "nothing",
        "report": f"{report['run']}/report.html",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    run(main)
