"""Train a language model with MuLoCo, DiLoCo or data-parallel Muon and AdamW.

    python jobs/train.py tiny --method muloco --scaling.num-replicas 4
    ray job submit --working-dir . -- python jobs/train.py small --run.storage-path /shared/runs

Every field of the configuration is a flag; the preset and the method set their defaults. The same command with the same
--run.name resumes an unfinished run. Exit codes: 0 done, 2 bad input, 3 stopped and checkpointed on request, 4 gave up.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from _display import make_display
from _main import check_json_place, run, write_json
from _main import parse as parse_flags

from ray_muloco import presets
from ray_muloco.config import TrainConfig, flatten
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
    """The flags. What is not given has the preset's value for this method and number of replicas, or that of the run that is resumed."""
    name, rest = ("tiny", arguments) if not arguments or arguments[0].startswith("-") else (arguments[0], arguments[1:])
    if not arguments:
        raise ConfigError("PRESET", "", f"must be one of {', '.join(presets.PRESETS)}", "for example: python jobs/train.py tiny")
    given = first_look(rest)
    method: Any = given.get("method") if given.get("method") in presets.METHODS else "muloco"
    replicas = int(given["scaling.num-replicas"]) if given.get("scaling.num-replicas", "").isdecimal() else 1
    config = as_saved(presets.get(name, method, max(1, replicas)), given)
    flags = parse_flags(Flags, prog=f"train.py {name}", description=__doc__, default=Flags(config=config), args=rest)
    if flags.config.preset != name:
        raise ConfigError("preset", flags.config.preset, f"is given twice: the command says {name}", "name the preset once, as the first word")
    return flags


def first_look(arguments: list[str]) -> dict[str, str]:
    """Those given flags that decide what the others' defaults are. A flag without its value is left for the real parser to refuse."""
    looking = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("method", "scaling.num-replicas", "seed", "run.name", "run.storage-path"):
        looking.add_argument(*dict.fromkeys((f"--{flag}", f"--{flag.replace('-', '_')}")), dest=flag, nargs="?")
    known, _ = looking.parse_known_args([a for a in arguments if a not in ("-h", "--help")])
    return {flag: value for flag, value in vars(known).items() if value}


def as_saved(preset: TrainConfig, given: dict[str, str]) -> TrainConfig:
    """The preset, except that a run which already has a checkpoint goes on with its own settings: a preset's batch or momentum
    may depend on the number of replicas, which is not for a resumed run to change."""
    from ray_muloco.training import preflight

    changes: dict[str, Any] = {flag: given[flag] for flag in ("run.name", "run.storage-path") if flag in given}
    changes |= {"seed": int(given["seed"])} if given.get("seed", "").isdecimal() else {}
    try:
        named = preset.override(changes)
    except ConfigError:  # the real parser says so
        return preset
    saved = preflight.saved_config(named.override({"run.storage_path": preflight.absolute_path(named.run.storage_path)}))
    if saved is None:
        return preset
    kept = {field: value for field, value in flatten(saved.to_dict()).items() if not field.startswith(preflight.CHANGEABLE)}
    try:
        return preset.override({**kept, "preset": preset.preset})
    except ConfigError as error:
        raise ConfigError(
            error.field,
            error.value,
            f"{error.allowed}; run {named.run_name} was started with it",
            "choose another --scaling.num-replicas, or another --run.name",
        ) from error


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
