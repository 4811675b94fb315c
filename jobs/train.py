"""Train a language model with MuLoCo, DiLoCo or data-parallel Muon and AdamW.

    python jobs/train.py tiny --method muloco --scaling.num-replicas 4
    ray job submit --working-dir . -- python jobs/train.py small --run.storage-path /shared/runs

Every field of the configuration is a flag; the preset and the method set their defaults. The same command with the same
--run.name resumes an unfinished run. Exit codes: 0 done, 2 bad input, 3 stopped and checkpointed on request, 4 gave up.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from _display import make_display
from _main import check_json_place, run, write_json
from _preset import parse_with_preset

from ray_muloco.config import TrainConfig
from ray_muloco.errors import ConfigError

STOPPED = 3


@dataclass(frozen=True)
class Flags:
    """Flags of this job beside the configuration's."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """What to train."""
    local: bool = False
    """Run everything in this process, without Ray."""
    dry_run: bool = False
    """Check all of the input, print parameters, memory, bytes a round and disk, and stop."""
    json: str = ""
    """Write the result (or, with --dry-run, the estimate) to this file."""
    quiet: bool = False
    """Say nothing but errors."""


def parse(arguments: list[str]) -> Flags:
    """The flags of this job."""
    return parse_with_preset(arguments, "train.py", __doc__, Flags, lambda config, given: Flags(config=config))


def main() -> int:
    """Run the job; returns its exit code."""
    flags = parse(sys.argv[1:])
    config = flags.config
    check_json_place(flags.json)
    refuse_throwaway_storage(config)
    if flags.dry_run:
        return dry_run(config, flags.json)
    with make_display(config.budget_tokens, quiet=flags.quiet) as display:
        result = train(config, flags.local, Stopwatch(display))
        display.finish(result.summary, result.path)
    write_json(flags.json, result.summary)
    return STOPPED if result.status == "stopped" else 0


def train(config: TrainConfig, local: bool, display: Any) -> Any:
    """fit on Ray, or in this process."""
    if local:
        from ray_muloco.training.local import fit_local

        return fit_local(config, listener=display)
    from ray_muloco.runtime.fit import fit

    return fit(config, listener=display)


class Stopwatch:
    """Passes on what is said of a run, and once how long the first inner step took to come."""

    def __init__(self, display: Any) -> None:
        self.info, self.message, self._round = display.info, display.message, display.round
        self._waiting = True

    def round(self, record: dict[str, Any]) -> None:
        """A committed round."""
        if self._waiting:
            import psutil

            seconds = record["first_step_time"] - psutil.Process().create_time()
            if seconds > 0:  # not when this process follows a run that was going on before it
                self.message(f"first inner step after {seconds:.1f} s")
            self._waiting = False
        self._round(record)


def refuse_throwaway_storage(config: TrainConfig) -> None:
    """Inside a Ray job the working directory is an unpacked copy that is thrown away: a relative path would lose the run."""
    from ray_muloco.training.storage import is_uri

    path = config.run.storage_path
    if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") and not is_uri(path) and not os.path.isabs(os.path.expanduser(path)):
        raise ConfigError(
            "run.storage-path",
            path,
            "must be absolute or a URI inside a Ray job, whose working directory is thrown away",
            "for example --run.storage-path /shared/runs or s3://bucket/runs",
        )


def dry_run(config: TrainConfig, json_path: str) -> int:
    """Check the input and print what the run will need."""
    import dataclasses

    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from ray_muloco.training import preflight
    from ray_muloco.training.estimate import estimate

    checked = preflight.check(config)
    needs = estimate(checked.config)
    table = Table(title=f"{checked.config.run_name}: {config.method}, {config.scaling.num_replicas} replicas", show_header=False)
    rows = {
        "parameters": f"{needs.num_params:,}",
        "tokens": f"{config.budget_tokens:,} in {needs.num_steps:,} steps, {needs.num_rounds:,} rounds",
        "memory of a replica": f"{decimal(needs.replica_bytes)} (of it activations, roughly {decimal(needs.replica_activation_bytes)})",
        "memory of the coordinator": decimal(needs.coordinator_bytes),
        "bytes a round": f"{decimal(needs.uplink_bytes_per_round)} up, {decimal(needs.downlink_bytes_per_round)} down",
        "disk": f"{decimal(needs.disk_bytes)} ({decimal(needs.checkpoint_bytes)} a checkpoint)",
        "run directory": checked.run_path,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    write_json(json_path, {**dataclasses.asdict(needs), "replica_bytes": needs.replica_bytes})
    return 0


if __name__ == "__main__":
    run(main)
