"""Everything that can be refused before work begins, and what an existing run means for a new command.

Imports neither torch nor ray: the driver runs this while the cluster starts.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from ray_muloco.config import TrainConfig
from ray_muloco.data.dataset import check_source, tokenizer_digest
from ray_muloco.data.tokenizer import spec_digest
from ray_muloco.errors import ConfigError
from ray_muloco.training import storage
from ray_muloco.training.manifest import MANIFEST, newest_checkpoint, newest_manifest, tokenizer_spec
from ray_muloco.training.metrics import Result
from ray_muloco.training.tracking import tracking_uri

# What a resumed run may change: who computes and what is kept, never what is computed. A longer budget is allowed too.
CHANGEABLE = ("scaling.", "checkpoint.", "run.")
# What the names and shapes of a model's parameters follow from; a run may start from weights that agree in these.
SHAPES = ("d_model", "num_layers", "num_heads", "head_dim", "ffn_dim", "vocab_size", "tie_embeddings")


@dataclass(frozen=True, slots=True)
class Preflight:
    """A checked configuration, and what is already there."""

    config: TrainConfig
    run_path: str
    """Absolute directory or URI of the run."""
    finished_result: dict[str, Any] | None
    """result.json of a run that has nothing left to do."""


def absolute_path(location: str) -> str:
    """A location as every process must see it, whatever its working directory: URIs and names that are no paths stay."""
    return location if location in ("", "embedded") or storage.is_uri(location) else os.path.abspath(os.path.expanduser(location))


def run_path_of(config: TrainConfig) -> str:
    """Directory or URI of the run's files."""
    return storage.join(config.run.storage_path, config.run_name)


def check(config: TrainConfig) -> Preflight:
    """Check all input against the disk and against an earlier run of this name; ConfigError says what to do."""
    config = config.override({"run.storage_path": absolute_path(config.run.storage_path), "run.name": config.run_name})
    paths = {"data.source": config.data.source, "data.validation_source": config.data.validation_source, "init_from": config.init_from}
    if os.path.exists(config.data.tokenizer):
        paths["data.tokenizer"] = config.data.tokenizer
    config = config.override({name: absolute_path(path) for name, path in paths.items()})
    run_path = run_path_of(config)
    saved = saved_config(config)
    if saved is not None:
        config = reconcile(config, saved)
        result = result_of_run(run_path)
        if result is not None and result.get("status") == "finished" and result["tokens"] >= config.budget_tokens:
            return Preflight(config, run_path, result)
    storage.require_writable(config.run.storage_path)
    if storage.local_path(run_path) is not None:
        storage.require_writable(run_path)
    check_source(config.data, sequence_length=config.model.sequence_length, vocab_size=config.model.vocab_size)
    if saved is None and config.init_from:
        check_initial_weights(config)
    return Preflight(config, run_path, None)


def saved_config(config: TrainConfig) -> TrainConfig | None:
    """What the run of this name and place was started with, by its config.json or else its checkpoint; None where it has no checkpoint."""
    place, run_path = config.run.storage_path, run_path_of(config)
    storage.resolve(place)
    with storage.refused_as("run.storage-path", place):
        if not has_checkpoint(run_path):
            return None
        saved = read_json(storage.join(run_path, "config.json"))
        if saved is None:
            found = newest_manifest(run_path)
            saved = found[1].get("config") if found else None
    return None if saved is None else TrainConfig.from_dict(saved)


def check_initial_weights(config: TrainConfig) -> None:
    """Refuse an `init_from` that is no checkpoint, holds another model, or was trained on other ids."""
    with storage.refused_as("init-from", config.init_from):
        found = newest_manifest(config.init_from, field="init-from")
        if found is None:
            raise ConfigError(
                "init-from", config.init_from, f"is no checkpoint: it has no {MANIFEST}", "give a directory below checkpoints/, or a run's directory"
            )
        path, manifest = found
        model, theirs = config.to_dict()["model"], manifest.get("config", {}).get("model", {})
        different = ", ".join(
            f"model.{name.replace('_', '-')} {theirs.get(name)!r} there, {model[name]!r} here" for name in SHAPES if theirs.get(name) != model[name]
        )
        if different:
            raise ConfigError("init-from", config.init_from, f"holds another model: {different}", "use the preset and model flags it was trained with")
        if spec_digest(tokenizer_spec(path, manifest)) != tokenizer_digest(config.data):
            raise ConfigError(
                "init-from",
                config.init_from,
                "was trained with another tokenizer than the data is read with",
                "use data and a tokenizer whose ids mean the same",
            )


def reconcile(config: TrainConfig, saved: TrainConfig) -> TrainConfig:
    """The configuration a resumed run goes on with: the saved one's answers to `auto`, and the changes that are allowed.

    Refuses any other change, with all differences in one line.
    """
    if config.compute_dtype == "auto":
        config = config.override({"compute_dtype": saved.compute_dtype})
    if config.scaling.threads_per_replica == 0 and config.scaling.num_replicas == saved.scaling.num_replicas:
        config = config.override({"scaling.threads_per_replica": saved.scaling.threads_per_replica})
    refuse_other_settings(config, saved)
    return config


def refuse_other_settings(config: TrainConfig, saved: TrainConfig, *, running: bool = False) -> None:
    """ConfigError with all differences in one line, but for those a run may change: scale, checkpoints, names, a longer budget.

    running: the other run is going on, with its budget; the answer to an `auto` is its own.
    """
    if running and "auto" in (config.compute_dtype, saved.compute_dtype):
        config = config.override({"compute_dtype": saved.compute_dtype})
    refused = {
        name: values
        for name, values in config.differences(saved).items()
        if not name.startswith(CHANGEABLE) and not (name == "budget_tokens" and config.budget_tokens > saved.budget_tokens and not running)
    }
    if refused:
        changes = ", ".join(f"{name} {theirs!r} -> {mine!r}" for name, (mine, theirs) in refused.items())
        raise ConfigError(
            "run.name",
            config.run_name,
            f"is a run that {'is going on' if running else 'was started'} with other settings ({changes})",
            "stop it first, or choose another --run.name" if running else "choose another --run.name, or start from its weights with --init-from",
        )


def has_checkpoint(run_path: str) -> bool:
    """Whether a run has at least one complete checkpoint."""
    return bool(newest_checkpoint(run_path))


def result_of_run(run_path: str) -> dict[str, Any] | None:
    """result.json of a run whose last session has ended; a session removes it when it begins."""
    return read_json(storage.join(run_path, "result.json"))


def read_json(location: str) -> dict[str, Any] | None:
    """A JSON file at a path or URI; None when it is not there."""
    text = storage.read_text(location)
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ConfigError("run.name", location, f"is damaged ({error})", "restore the file, or choose another --run.name") from error


def with_threads(config: TrainConfig, num_cpus: int) -> TrainConfig:
    """The configuration with `threads_per_replica` chosen: the CPUs shared out, at least one each."""
    if config.scaling.threads_per_replica:
        return config
    return config.override({"scaling.threads_per_replica": max(1, num_cpus // config.scaling.num_replicas)})


def result_of(summary: dict[str, Any], run_path: str) -> Result:
    """The Result of a run from its result.json and metrics.jsonl."""
    metrics = storage.read_metrics(storage.join(run_path, "metrics.jsonl"))
    return Result(summary["val_loss"], summary["rounds"], summary["tokens"], run_path, metrics, summary["status"], summary)


def tracking_uri_of(config: TrainConfig) -> str:
    """Where the runs of this storage path are tracked, as this process's environment says."""
    return tracking_uri(storage.local_directory(config.run.storage_path))
