"""Where a run's figures go beside metrics.jsonl: trackers that never make training wait, and never stop it.

The only file that imports mlflow, and only inside functions: the import takes seconds. `MlflowTracker` gives all of
MLflow's work to one background thread, so that one thread is the one writer of a run. It starts with the first committed
round, when nobody waits for a first step any more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol

from ray_muloco.config import flatten
from ray_muloco.training.mlflow_store import artifact_location, ensure_database, failure_of, quiet_loggers, quoted, redacted, retrying

Status = Literal["FINISHED", "FAILED", "KILLED"]

QUEUE_ITEMS = 10_000
ROUNDS_A_BATCH = 32  # MLflow takes 1000 metrics a call; a round has about 30
ITEMS_A_BATCH = 100  # MLflow's limit of parameters, and of tags
PARAMETER_CHARACTERS = 6000  # MLflow's limit
TAG_CHARACTERS = 5000  # the lowest of the limits of MLflow's versions
NAME_CHARACTERS = 250
FLUSH_SECONDS = 60.0
MLFLOW_DEFAULTS = {  # for this process, where the user has not set them
    "MLFLOW_DISABLE_TELEMETRY": "true",  # a training program does not phone home on its own account
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "5",  # a minute: a server's restart, but not MLflow's four minutes
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # stdout is the display's
}

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Follows one run: start, a record a round, files, the end. No method raises for a store that fails, or waits for it."""

    def start(self, name: str, parameters: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None) -> None:
        """Begin a run, or continue the one of `run_id`. parameters: nested plain values, as in config.json."""
        ...

    def log(self, record: Mapping[str, Any]) -> None:
        """A committed round, as in metrics.jsonl; its numbers are logged at step = round."""
        ...

    def artifact(self, path: str) -> None:
        """A local file that belongs to the run."""
        ...

    def finish(self, status: Status) -> None:
        """Flush within a deadline and close the run."""
        ...

    def run_id(self, timeout_seconds: float) -> str | None:
        """The store's name of the run once it has one; None if it has none in that time, or never will."""
        ...


class NullTracker:
    """Follows nothing."""

    def start(self, name: str, parameters: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None) -> None:
        """Nothing begins."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Nothing is logged."""

    def artifact(self, path: str) -> None:
        """Nothing is kept."""

    def finish(self, status: Status) -> None:
        """Nothing ends."""

    def run_id(self, timeout_seconds: float) -> str | None:
        """No run, no name."""
        return None


class DictTracker:
    """Keeps everything in memory: for tests and notebooks."""

    def __init__(self) -> None:
        self.name = ""
        self.parameters: dict[str, Any] = {}
        self.tags: dict[str, str] = {}
        self.records: list[dict[str, Any]] = []
        self.artifacts: list[str] = []
        self.status: Status | None = None
        self._run_id: str | None = None

    def start(self, name: str, parameters: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None) -> None:
        """Remember what the run is."""
        self.name, self.parameters, self.tags, self._run_id = name, flatten(parameters), dict(tags), run_id or name

    def log(self, record: Mapping[str, Any]) -> None:
        """Append the record; one of a round already there replaces it and what followed, as in a resumed run's file."""
        self.records = [kept for kept in self.records if kept["round"] < record["round"]] + [dict(record)]

    def artifact(self, path: str) -> None:
        """Append the path."""
        self.artifacts.append(path)

    def finish(self, status: Status) -> None:
        """Remember how it ended."""
        self.status = status

    def run_id(self, timeout_seconds: float) -> str | None:
        """The run's name, or the id it was continued with."""
        return self._run_id


class _Begin(NamedTuple):
    name: str
    parameters: dict[str, Any]
    tags: dict[str, str]
    run_id: str | None


class MlflowTracker:
    """One MLflow run, written by one background thread.

    The first failure earns one warning and turns the tracker off; training goes on and metrics.jsonl has every round.
    uri: an absolute tracking URI (`tracking_uri`); warn: takes that one sentence, by default a logger.
    """

    def __init__(self, uri: str, experiment: str = "ray_muloco", *, warn: Callable[[str], None] | None = None, flush_seconds: float = FLUSH_SECONDS) -> None:
        self.uri, self.experiment = uri, experiment
        self._warn = warn or _logger.warning
        self._flush_seconds = flush_seconds
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(QUEUE_ITEMS)
        self._begin: _Begin | None = None
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._known = threading.Event()  # the run id is known, or never will be
        self._run_id: str | None = None
        self._patience_ends: float | None = None
        self._off = False
        self._num_dropped = 0
        self._lost_artifacts = False

    def start(self, name: str, parameters: Mapping[str, Any], tags: Mapping[str, str], run_id: str | None) -> None:
        """Remember what the run is; the thread starts with the first thing there is to write."""
        self._begin = _Begin(name, flatten(parameters), dict(tags), run_id)
        self._run_id = run_id

    def log(self, record: Mapping[str, Any]) -> None:
        """Queue a round; dropped, and counted, when the store is thousands of rounds behind."""
        self._put("round", (time.time_ns() // 1_000_000, dict(record)))

    def artifact(self, path: str) -> None:
        """Queue a file; it is read when its turn comes."""
        self._put("artifact", path)

    def run_id(self, timeout_seconds: float) -> str | None:
        """The MLflow run id. All calls together wait `timeout_seconds`: a store that hangs costs that once, not every checkpoint."""
        if self._begin is None or self._off:
            return self._run_id
        self._ensure_thread()
        if self._patience_ends is None:
            self._patience_ends = time.monotonic() + timeout_seconds
        self._known.wait(min(timeout_seconds, max(0.0, self._patience_ends - time.monotonic())))
        return self._run_id

    def finish(self, status: Status) -> None:
        """Write what is queued and close the run, within the flush deadline."""
        if self._begin is None:
            return
        deadline = time.monotonic() + self._flush_seconds
        self._put("end", status, patience_seconds=self._flush_seconds)
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._turn_off(f"did not take everything within {self._flush_seconds:.0f} s")
        if self._num_dropped and not self._off:
            self._warn(f"MLflow at {redacted(self.uri)} was too slow: {self._num_dropped} items were not logged there; metrics.jsonl has every round")
        self._begin = None

    # ---- the training's side

    def _put(self, kind: str, payload: Any, patience_seconds: float = 0.0) -> None:
        if self._begin is None or self._off:
            return
        self._ensure_thread()
        try:
            self._queue.put((kind, payload), block=patience_seconds > 0, timeout=patience_seconds or None)
        except queue.Full:
            self._num_dropped += 1

    def _ensure_thread(self) -> None:
        with self._thread_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
                self._thread.start()

    def _turn_off(self, why: str) -> None:
        with self._thread_lock:
            if self._off:
                return
            self._off = True
        self._warn(f"MLflow tracking is off for the rest of this run: {redacted(self.uri)} {why}; metrics.jsonl has every round")

    # ---- the thread's side

    def _work(self) -> None:
        assert self._begin is not None
        try:
            with quiet_loggers() as quieten:
                run = _MlflowRun(self.uri, self.experiment, self._begin, self._warn, quieten)
                self._run_id = run.run_id
                self._known.set()
                while not self._off and not self._write(run):
                    pass
        except Exception as error:  # any failure of a tracker is a warning, never the run's
            self._turn_off(f"failed ({failure_of(self.uri, error)})")
        finally:
            self._known.set()

    def _write(self, run: _MlflowRun) -> bool:
        """Write what is queued, many rounds in one call; whether the end was reached."""
        rounds: list[tuple[int, dict[str, Any]]] = []
        item: tuple[str, Any] | None = self._queue.get()
        while item is not None and item[0] == "round":
            rounds.append(item[1])
            item = None
            if len(rounds) < ROUNDS_A_BATCH:
                with contextlib.suppress(queue.Empty):
                    item = self._queue.get_nowait()
        if rounds:
            run.log(rounds)
        if item is not None and item[0] == "artifact":
            self._keep(run, item[1])
        if item is not None and item[0] == "end":
            run.end(item[1])
        return item is not None and item[0] == "end"

    def _keep(self, run: _MlflowRun, path: str) -> None:
        """Store a file; where that fails (a bucket without credentials), the figures and the end of the run still count."""
        if self._lost_artifacts:
            return
        try:
            run.artifact(path)
        except Exception as error:
            self._lost_artifacts = True
            self._warn(f"MLflow at {redacted(self.uri)} did not take {path} ({failure_of(self.uri, error)}); the run's directory has it")


class _MlflowRun:
    """The MLflow run itself; lives on one thread."""

    def __init__(self, uri: str, experiment: str, begin: _Begin, warn: Callable[[str], None], quieten: Callable[[], None]) -> None:
        for name, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        quieten()
        name, parameters, tags, run_id = begin.name, begin.parameters, begin.tags, begin.run_id
        ensure_database(uri, lambda fresh: MlflowClient(fresh).search_experiments(max_results=1))
        self._client = MlflowClient(uri)
        experiment_id = self._experiment(uri, experiment)
        found = self._find(run_id) if run_id else None
        if run_id and found is None:
            warn(f"MLflow run {run_id} no longer exists at {redacted(uri)}; the resumed run continues as a new one")
        self._old_metrics: dict[str, dict[int, float]] | None = None
        if found is not None:
            self._old_metrics = {}
            retrying(lambda: self._client.update_run(found.info.run_id, status="RUNNING"))
        run = found or retrying(lambda: self._client.create_run(experiment_id, run_name=name))
        self.run_id: str = run.info.run_id
        self._describe(parameters, tags, dict(run.data.params))

    def log(self, rounds: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Metrics of several rounds in one transaction; (time in ms, record) each."""
        from mlflow.entities import Metric

        metrics = [
            Metric(key, value, timestamp, int(record.get("round", 0)))
            for timestamp, record in rounds
            for key, value in numbers_of(record).items()
            if not self._has(key, int(record.get("round", 0)), value)
        ]
        for begin in range(0, len(metrics), 1000):
            part = metrics[begin : begin + 1000]
            try:
                retrying(lambda part=part: self._client.log_batch(self.run_id, metrics=part))
            except Exception:
                finite = [metric for metric in part if abs(metric.value) < float("inf")]
                if len(finite) == len(part):
                    raise
                # some stores refuse NaN or infinity; the finite numbers are still worth having
                retrying(lambda finite=finite: self._client.log_batch(self.run_id, metrics=finite))

    def artifact(self, path: str) -> None:
        """Copy a file into the run."""
        if os.path.exists(path):
            retrying(lambda: self._client.log_artifact(self.run_id, path))

    def end(self, status: Status) -> None:
        """Close the run."""
        retrying(lambda: self._client.set_terminated(self.run_id, status))

    def _experiment(self, uri: str, name: str) -> str:
        from mlflow.exceptions import MlflowException

        def find_or_create() -> str:
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                try:
                    return self._client.create_experiment(name, artifact_location=artifact_location(uri, name))
                except MlflowException as error:  # another process was faster
                    if error.error_code != "RESOURCE_ALREADY_EXISTS":
                        raise
                    experiment = self._client.get_experiment_by_name(name)
            if experiment is None or experiment.lifecycle_stage != "active":
                raise RuntimeError(f"experiment {name!r} was deleted there; bring it back with `mlflow experiments restore`")
            return experiment.experiment_id

        return retrying(find_or_create)

    def _find(self, run_id: str) -> Any:
        """The run to continue, or None when the store has none of this id that is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            run = retrying(lambda: self._client.get_run(run_id))
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _describe(self, parameters: Mapping[str, Any], tags: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Parameters and tags. A parameter never changes in MLflow: a value that a resumed run changed (a longer budget) becomes a tag."""
        from mlflow.entities import Param, RunTag

        values = {_name(key): str(value)[:PARAMETER_CHARACTERS] for key, value in parameters.items()}
        changed = {f"resumed.{key}": value for key, value in values.items() if key in known and known[key] != value}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        run_tags = [RunTag(_name(key), str(value)[:TAG_CHARACTERS]) for key, value in {**tags, **changed}.items()]
        for begin in range(0, max(len(params), len(run_tags)), ITEMS_A_BATCH):
            batch = {"params": params[begin : begin + ITEMS_A_BATCH], "tags": run_tags[begin : begin + ITEMS_A_BATCH]}
            retrying(lambda batch=batch: self._client.log_batch(self.run_id, **batch))

    def _has(self, key: str, step: int, value: float) -> bool:
        """Whether a continued run already has this value at this step: rounds after its checkpoint are trained again."""
        if self._old_metrics is None:
            return False
        if key not in self._old_metrics:
            history = retrying(lambda: self._client.get_metric_history(self.run_id, key))
            self._old_metrics[key] = {metric.step: metric.value for metric in sorted(history, key=lambda metric: metric.timestamp)}
        old = self._old_metrics[key].get(step)
        stored = max(-sys.float_info.max, min(value, sys.float_info.max)) if value == value else value  # as databases keep infinity
        return old is not None and (old in (value, stored) or (old != old and value != value))


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record but its round, as MLflow takes them; None, text and lists are left out."""
    return {_name(key): float(value) for key, value in record.items() if key != "round" and isinstance(value, Real)}


# ---- stores


def tracking_uri(storage_path: str, environment: Mapping[str, str] | None = None) -> str:
    """MLFLOW_TRACKING_URI where it is set, else the database mlflow.db in `storage_path`, a local directory.

    Always absolute: the processes of a run have different working directories, and must mean the same store.
    """
    given = (os.environ if environment is None else environment).get("MLFLOW_TRACKING_URI", "").strip()
    if not given:
        return f"sqlite:///{quoted(os.path.abspath(storage_path))}/mlflow.db"
    if given.startswith("sqlite:///") and given != "sqlite:///:memory:":
        return f"sqlite:///{os.path.abspath(given.removeprefix('sqlite:///'))}"
    is_path = not re.match(r"[a-z][a-z0-9+.-]*:|databricks$|databricks-uc$|uc$", given)
    if is_path or (given.startswith("file:") and not given.startswith("file://")):
        return f"file://{os.path.abspath(given.removeprefix('file:'))}"
    return given


def _name(key: str) -> str:
    """A name MLflow takes: letters, digits and _ - . / : space."""
    return re.sub(r"[^\w\-./: ]", "_", key)[:NAME_CHARACTERS]
