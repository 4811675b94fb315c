"""Flags of the jobs that take a preset and every field of the configuration: train, drill."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from _main import parse as parse_flags

from ray_muloco import presets
from ray_muloco.config import TrainConfig, flatten
from ray_muloco.errors import ConfigError

_T = TypeVar("_T")


def parse_with_preset(arguments: list[str], program: str, description: str | None, kind: type[_T], defaults: Callable[[TrainConfig, dict[str, str]], _T]) -> _T:
    """The flags of a job, after the preset's name. defaults: makes them from the configuration and from what `first_look` saw.

    What is not given has the preset's value for this method and number of replicas, or that of the run that is resumed.
    """
    name, rest = ("tiny", arguments) if not arguments or arguments[0].startswith("-") else (arguments[0], arguments[1:])
    if not arguments:
        raise ConfigError("PRESET", "", f"must be one of {', '.join(presets.PRESETS)}", f"for example: python jobs/{program} tiny")
    given = first_look(rest)
    method: Any = given.get("method") if given.get("method") in presets.METHODS else "muloco"
    replicas = int(given["scaling.num-replicas"]) if given.get("scaling.num-replicas", "").isdecimal() else 1
    config = as_saved(presets.get(name, method, max(1, replicas)), given)
    flags: Any = parse_flags(kind, prog=f"{program} {name}", description=description, default=defaults(config, given), args=rest)
    if flags.config.preset != name:
        raise ConfigError("preset", flags.config.preset, f"is given twice: the command says {name}", "name the preset once, as the first word")
    return flags


def first_look(arguments: list[str]) -> dict[str, str]:
    """Those given flags that decide what the others' defaults are. A flag without its value is left for the real parser to refuse."""
    looking = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("method", "scaling.num-replicas", "seed", "run.name", "run.storage-path", "budget-tokens"):
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
