"""The run's files and records: what was committed, as a user and a resumed run will read it.

A run's directory holds config.json, metrics.jsonl (a line a round), checkpoints/, and in the end result.json, loss.png
and report.html. One writer at a time, by a fenced lock. With storage at a URI the files live in a local staging directory
and are uploaded at each checkpoint; checkpoints themselves are written at the URI.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from ray_muloco.config import TrainConfig
from ray_muloco.errors import RunError
from ray_muloco.training import preflight, storage
from ray_muloco.training.checkpoint import CheckpointRef, CheckpointStore, FileRecord, write_tensors
from ray_muloco.training.coordinator import Coordinator
from ray_muloco.training.evaluate import Evaluation
from ray_muloco.training.group import CheckpointTarget, ReplicaGroup
from ray_muloco.training.membership import Patience
from ray_muloco.training.metrics import summarize, total_bytes
from ray_muloco.training.tracking import Tracker

RUN_ID_WAIT_SECONDS = 60.0
SAVE_DEADLINE_SECONDS = 1800.0
TEXT_FILES = ("config.json", "metrics.jsonl", "result.json")
REPORT_FILES = ("loss.png", "report.html")


class Listener(Protocol):
    """Who follows a run while it goes on."""

    def info(self, info: dict[str, Any]) -> None:
        """What the run is, once, before its first round."""
        ...

    def round(self, record: dict[str, Any]) -> None:
        """A committed round."""
        ...

    def message(self, text: str) -> None:
        """A sentence for people."""
        ...


class RoundClock:
    """Wall-clock seconds of a round by phase; a phase may have several laps.

    The round's own time begins where the one before was recorded: waits, failed attempts and checkpoints are in it.
    """

    def __init__(self) -> None:
        self.begin = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {"inner": 0.0, "exchange": 0.0, "outer": 0.0}
        self.commit_time = 0.0

    def start(self) -> None:
        """An attempt at the round begins; what went before it belongs to no phase."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap was spent in `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now

    def committed(self) -> None:
        """The outer step is taken: this is the round's commit."""
        self.lap("outer")
        self.commit_time = time.time()

    def total(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self.begin


class Ledger:
    """One run's records and checkpoints, by its only writer."""

    def __init__(self, config: TrainConfig, tracker: Tracker, listener: Listener) -> None:
        self.config, self.tracker, self.listener = config, tracker, listener
        self.run_path = preflight.run_path_of(config)
        self.directory = storage.local_directory(self.run_path)
        self.lock = storage.RunLock(self.directory, config.run.lock_wait_seconds, on_wait=listener.message)
        self._recorded_round = max((record["round"] for record in storage.read_metrics(self.metrics_path)), default=0)
        storage.download(self.run_path, self.directory, TEXT_FILES)
        self.store = CheckpointStore(storage.join(self.run_path, "checkpoints"), staging_dir=self.staging_dir, keep=config.checkpoint.keep)
        self.validation_sequences: list[int] = []
        self.resumed_bytes = total_bytes([])
        self.more_files: dict[str, dict[str, Tensor]] = {}  # what every checkpoint carries beside the run's state
        self._reasons: list[str] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[str] | None = None
        self._saved_round = -1
        self._tokens = 0

    @property
    def staging_dir(self) -> str:
        """Local directory for files on their way to the run's location."""
        return os.path.join(self.directory, ".staging")

    @property
    def data_dir(self) -> str:
        """Local directory, beside the runs, for token shards built from raw text."""
        return os.path.join(os.path.dirname(self.directory), ".data")

    @property
    def metrics_path(self) -> str:
        """The file with a line a round."""
        return os.path.join(self.directory, "metrics.jsonl")

    # ---- beginning

    def latest(self) -> CheckpointRef | None:
        """The newest complete checkpoint of this run."""
        return self.store.latest()

    def open(self, config: TrainConfig, resumed: CheckpointRef | None) -> None:
        """Write the resolved configuration, and cut the metrics to what the checkpoint knows."""
        self.config = config
        self._saved_round = resumed.round if resumed else -1
        self._tokens = resumed.manifest["tokens"] if resumed else 0
        kept = resumed.round if resumed else 0
        known = storage.read_metrics(self.metrics_path)
        self.resumed_bytes = total_bytes([record for record in known if record["round"] <= kept])
        recorded = max(self._recorded_round, known[-1]["round"] if known else 0)
        if recorded > kept:
            self.reasons([f"{recorded - kept} rounds since the checkpoint of round {kept} were lost with the coordinator, and are trained again"])
        storage.truncate_metrics(self.metrics_path, kept)
        for stale in ("result.json", *REPORT_FILES):
            storage.remove(os.path.join(self.directory, stale))
        storage.atomic_write_text(os.path.join(self.directory, "config.json"), json.dumps(config.to_dict(), indent=2))
        self._upload()

    # ---- rounds

    def reasons(self, reasons: Iterable[str]) -> None:
        """Changes of membership since the last record; said at once, recorded with the next round."""
        for reason in reasons:
            self._reasons.append(reason)
            self.listener.message(reason)

    def patience(self) -> Patience:
        """How long the run may wait for replicas it lacks, from now on."""
        scaling = self.config.scaling
        return Patience(scaling.fewest_replicas, scaling.rejoin_timeout_seconds, self.listener.message)

    def record(self, record: dict[str, Any], evaluation: Evaluation | None, group: ReplicaGroup, clock: RoundClock) -> None:
        """Complete a round's record and write it: file, tracker, listener."""
        traffic, census = group.traffic.take(), group.census()
        trained_seconds = sum(clock.seconds.values())
        tokens = record["tokens"] - self._tokens
        record |= {
            "alive": census.alive,
            "healing": census.healing,
            "pending": census.pending,
            "generation": group.generation,
            "val_loss": evaluation.loss if evaluation else None,
            "val_bits_per_byte": evaluation.bits_per_byte if evaluation else None,
            "uplink_bytes": traffic.uplink_bytes,
            "downlink_bytes": traffic.downlink_bytes,
            "heal_bytes": traffic.heal_bytes,
            "seconds_inner": clock.seconds["inner"],
            "seconds_exchange": clock.seconds["exchange"],
            "seconds_outer": clock.seconds["outer"],
            "seconds": clock.total(),
            "commit_time": clock.commit_time,
            "tokens_per_second": tokens / trained_seconds if trained_seconds else None,
            "reasons": self._reasons,
        }
        self._reasons = []
        self._tokens = record["tokens"]
        self.lock.check()
        storage.append_metrics(self.metrics_path, record)
        self.tracker.log(record)
        self.listener.round(record)

    def evaluation_due(self, coordinator: Coordinator) -> bool:
        """Whether θ is to be evaluated after the round just committed."""
        return coordinator.finished or coordinator.progress.round_number % self.config.eval_every_rounds == 0

    def checkpoint_due(self, coordinator: Coordinator) -> bool:
        """Whether the round just committed is to be written."""
        return coordinator.finished or coordinator.progress.round_number % self.config.checkpoint.every_rounds == 0

    # ---- checkpoints

    def save(self, coordinator: Coordinator, group: ReplicaGroup) -> None:
        """Begin a checkpoint of the commit just made: states are copied now, files written beside the training."""
        if coordinator.progress.round_number == self._saved_round:
            return
        self._finish_pending()
        self.lock.check()
        name = self.store.begin(coordinator.progress.round_number)
        collect = group.save(CheckpointTarget(self.store.location, name, self.staging_dir))
        files, manifest = {**coordinator.snapshot(), **self.more_files}, coordinator.manifest()
        manifest |= {"config": self.config.to_dict()}
        self._saved_round = coordinator.progress.round_number
        self._pending = self._writer.submit(self._write, name, files, manifest, collect)

    def _write(self, name: str, files: dict[str, Any], manifest: dict[str, Any], collect: Callable[[], dict[int, FileRecord]]) -> str:
        records = [
            write_tensors(self.store.location, name, file, tensors, {"round": str(manifest["round"])}, self.staging_dir) for file, tensors in files.items()
        ]
        replicas = collect()
        manifest["replicas"] = sorted(replicas)
        manifest["mlflow_run_id"] = self.tracker.run_id(RUN_ID_WAIT_SECONDS)
        self.lock.check()
        storage.sync_metrics(self.metrics_path)  # both before the commit: a resumed run cuts metrics to its checkpoint, and cannot invent what is missing
        self._upload()
        self.store.commit(name, manifest, [*records, *replicas.values()])
        return name

    def _finish_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result(timeout=SAVE_DEADLINE_SECONDS)
        except Exception as error:
            raise RunError("checkpoint failed", f"{type(error).__name__}: {error}", self.checkpoint_path()) from error

    def checkpoint_path(self) -> str:
        """Path of the newest complete checkpoint, or nothing."""
        latest = self.store.latest()
        return latest.path if latest else ""

    # ---- end

    def finish(self, coordinator: Coordinator, group: ReplicaGroup, status: str) -> dict[str, Any]:
        """Make the last commit durable, and write what the run came to. status: `finished` or `stopped`."""
        if coordinator.progress.round_number > 0:
            self.save(coordinator, group)
        self._finish_pending()
        result = summarize(
            storage.read_metrics(self.metrics_path),
            {
                "name": self.config.run_name, "method": self.config.method, "preset": self.config.preset,
                "num_params": coordinator.layout.numel, "theta_digest": coordinator.digest(), "checkpoint": self.checkpoint_path(), "status": status,
            },
        )  # fmt: skip
        storage.atomic_write_text(os.path.join(self.directory, "result.json"), json.dumps(result, indent=2))
        self._report()
        self._upload()
        for name in (*TEXT_FILES, *REPORT_FILES):
            if os.path.exists(os.path.join(self.directory, name)):
                self.tracker.artifact(os.path.join(self.directory, name))
        return result

    def _report(self) -> None:
        try:
            from ray_muloco.analysis.report import write_report  # matplotlib takes a second: only a run that ends pays it

            write_report(self.directory)
        except Exception as error:  # a plot that cannot be drawn must not fail a run that trained; the user is told
            self.listener.message(f"the report could not be written: {type(error).__name__}: {error}")

    def rescue(self, coordinator: Coordinator, group: ReplicaGroup) -> None:
        """Make the last commit durable before the run gives up; whoever lives writes its part."""
        try:
            if coordinator.progress.round_number > 0 and coordinator.progress.tokens == self._tokens:  # a round without a record is trained again
                self.save(coordinator, group)
            self._finish_pending()
        except Exception as error:  # the run's own reason to end matters more, and names the newest checkpoint there is
            self.listener.message(f"the last commit could not be saved: {type(error).__name__}: {error}")
        if os.path.exists(self.metrics_path):
            self.tracker.artifact(self.metrics_path)  # the reasons of all rounds, which matter most in a run that failed

    def settle(self) -> None:
        """Wait for a checkpoint on its way; whether it failed is said by whoever needed it."""
        if self._pending is not None:
            with contextlib.suppress(Exception):
                self._pending.result(timeout=SAVE_DEADLINE_SECONDS)

    def close(self) -> None:
        """Give the lock back; a checkpoint on its way is awaited."""
        self._writer.shutdown(wait=True)
        self.lock.release()

    def _upload(self) -> None:
        storage.upload(self.directory, self.run_path, (*TEXT_FILES, *REPORT_FILES))
