"""One process's part of a run, from the lock to the result: begin or resume, train, finish.

The coordinator's actor runs this over a `RayGroup`; `--local` runs it over a `LocalGroup`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ray_muloco.config import TrainConfig
from ray_muloco.core.precision import native_bf16
from ray_muloco.data.dataset import Dataset, open_dataset
from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training import preflight
from ray_muloco.training.checkpoint import CheckpointRef, open_checkpoint
from ray_muloco.training.coordinator import Coordinator
from ray_muloco.training.evaluate import validation_sequences
from ray_muloco.training.group import LocalGroup, ReplicaGroup, replica_file
from ray_muloco.training.inference import pack_text
from ray_muloco.training.ledger import Ledger, Listener
from ray_muloco.training.loop import train
from ray_muloco.training.manifest import MODEL_FILE, OUTER_FILE, TOKENIZER_FILE
from ray_muloco.training.tracking import MlflowTracker, NullTracker, Tracker


@dataclass(frozen=True, slots=True)
class Seats:
    """A group whose members are placed but hold nothing yet: `group(dataset, data_dir)` makes it work."""

    native_bf16: Callable[[], bool]
    group: Callable[[Dataset, str], ReplicaGroup]


def local_seats() -> Seats:
    """Seats of a LocalGroup: this process and its CPUs."""
    return Seats(lambda: native_bf16("cpu"), lambda dataset, data_dir: LocalGroup(dataset))


def run_session(config: TrainConfig, tracking_uri: str, seats: Seats, listener: Listener, should_stop: Callable[[], bool]) -> dict[str, Any]:
    """Train a checked configuration to its end, or to a requested stop; returns result.json's content.

    tracking_uri: MLflow's, as the driver's environment says: the coordinator's process has another environment.
    Raises ConfigError for input that only the cluster could refuse, RunError when the run gave up.
    """
    tracker: Tracker = MlflowTracker(tracking_uri, warn=listener.message) if config.run.tracker == "mlflow" else NullTracker()
    ledger = Ledger(config, tracker, listener)
    status = "FAILED"
    group: ReplicaGroup | None = None
    try:
        resumed = ledger.latest()
        if resumed is not None:  # again, under the lock: another writer may have made the run what it is since the first check
            config = preflight.reconcile(config, TrainConfig.from_dict(resumed.manifest["config"]))
        if config.compute_dtype == "auto":
            config = config.override({"compute_dtype": "bf16" if seats.native_bf16() else "fp32"})
        dataset = open_dataset(config.data, sequence_length=config.model.sequence_length, vocab_size=config.model.vocab_size, cache_dir=ledger.data_dir)
        coordinator = begin(config, dataset, resumed)
        ledger.open(config, resumed)
        tracker.start(
            config.run_name,
            config.to_dict(),
            {"method": config.method, "preset": config.preset, "run_path": ledger.run_path},
            resumed.manifest.get("mlflow_run_id") if resumed else None,
        )
        ledger.validation_sequences = validation_sequences(
            config.validation_tokens, dataset.validation.num_sequences(config.model.sequence_length), config.model.sequence_length
        )
        if dataset.tokenizer.spec != "bytes":
            ledger.more_files = {TOKENIZER_FILE: {"tokenizer": pack_text(dataset.tokenizer.spec)}}
        listener.info({**describe(config, coordinator, dataset, resumed, ledger), "tracking_uri": tracking_uri if config.run.tracker == "mlflow" else None})
        group = seats.group(dataset, ledger.data_dir)
        group.start(config, coordinator.progress.generation + bool(resumed), inner_states(config, resumed))
        first_publish(coordinator, group, ledger)
        try:
            outcome = train(coordinator, group, ledger, should_stop)
        except Exception:
            ledger.rescue(coordinator, group)
            raise
        result = ledger.finish(coordinator, group, outcome)
        status = "FINISHED" if outcome == "finished" else "KILLED"
        return result
    except RunError as error:
        ledger.settle()
        raise type(error)(error.reason, error.detail, error.checkpoint or ledger.checkpoint_path()) from error
    finally:
        ledger.settle()  # replicas may still be writing their part of a checkpoint
        with contextlib.ExitStack() as closing:
            closing.callback(ledger.close)
            closing.callback(tracker.finish, status)
            if group is not None:
                closing.callback(group.close)


def begin(config: TrainConfig, dataset: Dataset, resumed: CheckpointRef | None) -> Coordinator:
    """The coordinator of a new run, of a new run with another's weights, or of a resumed one."""
    coordinator = Coordinator(config, dataset.tokenizer.separator_id)
    if resumed is not None:
        if resumed.manifest["data_fingerprint"] != dataset.fingerprint:
            raise ConfigError(
                "data.source",
                config.data.source,
                "is not what this run was trained on so far: its documents, tokenizer or split changed",
                "restore the data, or choose another --run.name",
            )
        names = [MODEL_FILE] + ([] if config.is_data_parallel else [OUTER_FILE])
        coordinator.restore(resumed.manifest, {name: resumed.read_tensors(name) for name in names})
    elif config.init_from:
        tensors = open_checkpoint(config.init_from, field="init-from").read_tensors(MODEL_FILE)
        views = coordinator.layout.views(coordinator.theta)
        mismatched = sorted(views.keys() ^ tensors.keys()) + [name for name, view in views.items() if name in tensors and tensors[name].shape != view.shape]
        if mismatched:
            raise ConfigError(
                "init-from",
                config.init_from,
                f"holds another model: {mismatched[0]} is on one side only or has another shape",
                "use the preset and model flags it was trained with",
            )
        coordinator.load_weights(tensors)
    coordinator.data_fingerprint = dataset.fingerprint
    return coordinator


def inner_states(config: TrainConfig, resumed: CheckpointRef | None) -> dict[int, Callable[[], dict[str, torch.Tensor]]]:
    """How each replica of a resumed run reads its inner state: the n-th lowest id takes the n-th lowest one's.

    One more than were saved takes the lowest one's, as a joiner does. Empty when no replica lived to save its own.
    """
    saved = sorted(resumed.manifest["replicas"]) if resumed is not None else []
    if resumed is None or not saved:
        return {}
    return {k: partial(resumed.read_tensors, replica_file(saved[k] if k < len(saved) else saved[0])) for k in range(config.scaling.most_replicas)}


def first_publish(coordinator: Coordinator, group: ReplicaGroup, ledger: Ledger) -> None:
    """θ to every replica before the first round; refuses to start unless all that live hold the same bits."""
    published = group.publish(coordinator.theta)
    ledger.reasons(f"replica {k} lost while θ was published: {cause}" for k, cause in published.lost.items())
    strays = coordinator.disagreeing(published.digests)
    if strays:
        raise RunError("replicas disagree at the start", "; ".join(f"replica {k} holds other parameters than the coordinator" for k in strays))
    coordinator.regrouped(group.generation)


def describe(config: TrainConfig, coordinator: Coordinator, dataset: Dataset, resumed: CheckpointRef | None, ledger: Ledger) -> dict[str, Any]:
    """What a display says of a run before its first round."""
    return {
        "name": config.run_name, "method": config.method, "preset": config.preset, "num_params": coordinator.layout.numel,
        "replicas": config.scaling.num_replicas, "threads_per_replica": config.scaling.threads_per_replica, "compute_dtype": config.compute_dtype,
        "budget_tokens": config.budget_tokens, "train_tokens": dataset.train.num_tokens, "storage": ledger.run_path,
        "resumed_from": resumed.path if resumed else "", "resumed_round": resumed.round if resumed else 0, "resumed_tokens": coordinator.progress.tokens,
        "resumed_bytes": ledger.resumed_bytes,
    }  # fmt: skip
