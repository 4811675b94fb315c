"""Checkpoints: one directory is one committed round, and exists from the moment its manifest does.

    checkpoints/
      round-000012/
        model.safetensors        θ by parameter name
        outer.safetensors        u by parameter name
        replica-0.safetensors    inner state of replica 0, written by that replica
        …
        manifest.json            integers of the commit, config, size and SHA-256 of every file above

Everything that decides what comes next (θ, u, cursor, inner states) lies in one directory under one manifest, so a resumed
run can never combine the model of one commit with the data position of another. The order of writes is the guarantee:
files (each synced to disk), then the manifest in one instant, then old checkpoints go, manifest first. A process killed
anywhere in between leaves complete checkpoints and directories without a manifest, and those do not exist.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ray_muloco.errors import ConfigError, RunError
from ray_muloco.training.locations import DirectoryStorage, Storage, join, open_storage, refused_as, resolve, staged_path
from ray_muloco.training.manifest import (
    MANIFEST,
    MODEL_FILE,
    DamagedManifestError,
    checkpoint_names,
    checkpoint_order,
    encode_manifest,
    read_manifest,
)  # fmt: skip
from ray_muloco.training.tensorfile import FileRecord, hash_stream, read_tensor_file, write_tensor_stream

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_WRITER = "writer.json"


def write_tensors(
    location: str, checkpoint_name: str, file_name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], staging_dir: str
) -> FileRecord:
    """Write one file of a checkpoint that `CheckpointStore.begin` has named; from any process that sees the location.

    The record goes to whoever commits. Raises RunError `storage`, in particular where the location is not visible here.
    """
    storage = open_storage(location)
    return storage.create(f"{checkpoint_name}/{file_name}", lambda stream: write_tensor_stream(stream, file_name, tensors, metadata), staging_dir)


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A complete checkpoint; small and picklable, so that replicas can read their own file."""

    path: str
    """Directory or URI."""
    round: int
    """The committed round."""
    manifest: dict[str, Any]
    staging_dir: str = ""
    """Local directory for downloads; empty means the system's temporary directory."""

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory."""
        return self.path.partition("?")[0].rstrip("/").rpartition("/")[2]

    @property
    def files(self) -> dict[str, FileRecord]:
        """The checkpoint's files by name."""
        return {entry["name"]: FileRecord(**entry) for entry in self.manifest["files"]}

    def read_tensors(self, file_name: str, verify: bool = True) -> dict[str, Tensor]:
        """The tensors of one file. They are mapped from it: copy what is to be kept.

        verify=False skips the hash of a local file; a download is always checked. Raises RunError `checkpoint` naming a
        file that is missing or damaged.
        """
        expected = self._record(file_name)
        storage = open_storage(self.path)
        if isinstance(storage, DirectoryStorage):
            if verify:
                self.verify([file_name])
            return read_tensor_file(os.path.join(storage.location, file_name))
        self._check_size(storage, expected)
        return _fetch(storage, file_name, self.staging_dir, lambda found: self._compare(expected, found))

    def verify(self, file_names: Iterable[str] = ()) -> None:
        """Hash the named files, or all; raises RunError `checkpoint` naming the first that is not what was written."""
        records = [self._record(name) for name in file_names] or list(self.files.values())
        storage = open_storage(self.path)

        def check(expected: FileRecord) -> None:
            self._check_size(storage, expected)
            with storage.open(expected.name) as source:
                self._compare(expected, hash_stream(source, expected.name))

        if len(records) == 1:
            check(records[0])
        else:
            with concurrent.futures.ThreadPoolExecutor(min(4, len(records) or 1)) as pool:
                list(pool.map(check, records))

    def _record(self, file_name: str) -> FileRecord:
        files = self.files
        if file_name not in files:
            raise RunError("checkpoint", f"{self.path} has no file {file_name}; it has {', '.join(sorted(files))}")
        return files[file_name]

    def _check_size(self, storage: Storage, expected: FileRecord) -> None:
        size = storage.size(expected.name)
        if size != expected.num_bytes:
            raise self._damaged(expected, "it is missing" if size is None else f"it has {size} bytes instead of {expected.num_bytes}")

    def _compare(self, expected: FileRecord, found: FileRecord) -> None:
        if found != expected:
            raise self._damaged(expected, f"its SHA-256 is {found.sha256[:12]}… instead of {expected.sha256[:12]}…")

    def _damaged(self, expected: FileRecord, how: str) -> RunError:
        return RunError("checkpoint", f"{join(self.path, expected.name)} is damaged: {how}")


class CheckpointStore:
    """The checkpoints of one run, by its only writer.

    location: directory or URI that holds them and nothing else. staging_dir: local directory for uploads and downloads.
    keep: complete checkpoints that stay, at least 1.
    """

    def __init__(self, location: str, *, staging_dir: str, keep: int) -> None:
        if keep < 1:
            raise ConfigError("checkpoint.keep", keep, "must be an integer of at least 1")
        self._storage = open_storage(location)
        self.location = self._storage.location
        self.staging_dir, self.keep = os.path.abspath(staging_dir), keep
        self._begun: set[str] = set()
        self._verified: set[str] = set()
        self._claim = b""

    # ---- writing

    def begin(self, round_number: int) -> str:
        """Name of a new, empty checkpoint directory; what unfinished saves left behind is removed.

        The name is one that no directory here has, complete or not: a replica still writing for a save that was given up
        cannot touch this one. A round written again (after its first checkpoint proved damaged) gets a suffix.
        """
        self._claim_writing()
        self._check_claim()  # what looks unfinished may be what the new writer is writing
        names = self._names()
        attempts = [checkpoint_order(name)[1] for name in names if checkpoint_order(name)[0] == round_number]
        name = f"round-{round_number:06d}" + (f"-{max(attempts) + 1}" if attempts else "")
        self._begun = {other for other in self._begun if checkpoint_order(other)[0] != round_number}
        self._remove([other for other in names if other not in self._begun and self._storage.size(f"{other}/{MANIFEST}") is None])
        self._storage.make_directory(name)
        self._begun.add(name)
        return name

    def commit(self, checkpoint_name: str, manifest: Mapping[str, Any], files: Iterable[FileRecord]) -> CheckpointRef:
        """Make a checkpoint exist: all its files are checked to be there, then the manifest is written, then old ones go.

        manifest: JSON values; `round`, `name`, `files` and `format_version` are set here. Raises RunError `storage` when a
        file is not visible from here, `fenced` when another process has begun to write this run.
        """
        records = sorted(files, key=lambda record: record.name)
        for record in records:
            size = self._storage.size(f"{checkpoint_name}/{record.name}")
            if size != record.num_bytes:
                raise RunError(
                    "storage",
                    f"{record.name} of {join(self.location, checkpoint_name)} has {size} bytes as seen from the coordinator, {record.num_bytes} were written",
                )
        own = {
            "round": checkpoint_order(checkpoint_name)[0],
            "name": checkpoint_name,
            "format_version": FORMAT_VERSION,
            "files": [asdict(record) for record in records],
        }
        content = json.loads(json.dumps({**manifest, **own}))
        self._check_claim()
        self._storage.write_bytes(f"{checkpoint_name}/{MANIFEST}", encode_manifest(content))
        self._begun.discard(checkpoint_name)
        self._verified.add(checkpoint_name)
        self._prune(checkpoint_name)
        return CheckpointRef(join(self.location, checkpoint_name), content["round"], content, self.staging_dir)

    def _prune(self, newest: str) -> None:
        """Leave `newest` and the complete checkpoints of the rounds before it, `keep` in all.

        Later rounds and other saves of this round go too: they belong to a history that the run fell back from.
        """
        try:
            older = [ref.name for ref in self.all() if ref.round < checkpoint_order(newest)[0]]
            kept = {newest, *self._begun, *older[max(0, len(older) - self.keep + 1) :]}
            self._remove([name for name in self._names() if name not in kept])
        except RunError as error:  # the commit stands all the same
            logger.warning("old checkpoints were left at %s: %s", self.location, error.detail)

    def _remove(self, names: Iterable[str]) -> None:
        """Delete checkpoints, manifest first: a kill in between leaves none that looks complete.

        Failures are told, not raised: a directory that cannot be deleted is no reason to stop training.
        """
        for name in names:
            try:
                self._storage.delete_file(f"{name}/{MANIFEST}")
                self._storage.delete_tree(name)
            except RunError as error:
                logger.warning("checkpoint %s was not deleted: %s", name, error.detail)

    def _claim_writing(self) -> None:
        """Say once, where all who share the location can read it, that this store writes now: the last one to say so does."""
        if not self._claim:
            self._storage.make_directory("")
            self._claim = json.dumps({"writer": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}).encode()
            self._storage.write_bytes(_WRITER, self._claim)

    def _check_claim(self) -> None:
        """Just before a manifest is written: whoever claimed last may still write one, for as long as it takes to write it."""
        found = self._storage.read_bytes(_WRITER)
        if self._claim and found != self._claim:
            other = json.loads(found) if found else None
            who = f"taken over by process {other['pid']} on {other['host']}" if other else f"deleted: {join(self.location, _WRITER)} is gone"
            raise RunError("fenced", f"the run at {self.location} was {who}")

    # ---- reading

    def all(self) -> list[CheckpointRef]:
        """The complete checkpoints, oldest first; one with a damaged manifest is told and left out. Other files are not read."""
        refs: list[CheckpointRef] = []
        for name in self._names():
            try:
                ref = _read_ref(self._storage, name, self.staging_dir)
            except DamagedManifestError as error:
                logger.warning("checkpoint %s is passed over: %s", name, error.detail)
                continue
            refs += [ref] if ref is not None else []
        return refs

    def latest(self, verify: bool = True) -> CheckpointRef | None:
        """The newest complete checkpoint, None if there is none.

        verify: hash every file (once a process), and fall back, with a warning, from a damaged checkpoint to the one before.
        Raises RunError `checkpoint` when there are checkpoints but every one is damaged: that is no new run.
        """
        damage = ""
        for name in reversed(self._names()):
            try:
                ref = _read_ref(self._storage, name, self.staging_dir)
                if ref is None:
                    continue
                if verify and name not in self._verified:
                    ref.verify()
                    self._verified.add(name)
                return ref
            except RunError as error:
                if error.reason != "checkpoint":
                    raise
                damage = error.detail
                logger.warning("checkpoint %s is passed over: %s", name, damage)
        if damage:
            raise RunError("checkpoint", f"no checkpoint at {self.location} can be read; {damage}")
        return None

    def _names(self) -> list[str]:
        """Directories with a checkpoint's name, complete or not, oldest first."""
        return checkpoint_names(self._storage)


def _read_ref(storage: Storage, name: str, staging_dir: str) -> CheckpointRef | None:
    """The checkpoint in a directory (name "" for the storage's own), None if it has no manifest."""
    manifest = read_manifest(storage, name)
    path = join(storage.location, name) if name else storage.location
    return None if manifest is None else CheckpointRef(path, manifest["round"], manifest, staging_dir)


def open_checkpoint(location: str, *, field: str = "checkpoint") -> CheckpointRef:
    """The checkpoint at a path or URI: a checkpoint's directory, or a run's or its checkpoints/ (then the newest one).

    Raises ConfigError naming `field` where there is none, RunError `checkpoint` where every one is damaged.
    """
    with refused_as(field, location):
        storage = open_storage(location, field=field)
        ref = _read_ref(storage, "", "")
        if ref is not None:
            return ref
        for directory in (storage.location, join(storage.location, "checkpoints")):
            found = CheckpointStore(directory, staging_dir=tempfile.gettempdir(), keep=1).latest()
            if found is not None:
                return found
        raise ConfigError(field, location, "must be a complete checkpoint, or a run that has one", _what_is_at(storage))


def _what_is_at(storage: Storage) -> str:
    names = storage.list_names()
    if names:
        return f"it holds {', '.join(names[:5])}{' …' if len(names) > 5 else ''} and no {MANIFEST}"
    file_system, path = resolve(storage.location)
    return "it is a file" if file_system.get_file_info(path).is_file else "there is nothing at this location"


# ---- weights alone


def export_weights(checkpoint: CheckpointRef, output: str) -> None:
    """Write θ and the configuration of a checkpoint to a directory or URI, as model.safetensors and config.json.

    config.json is what `TrainConfig.from_dict` reads; `load_weights`, or any safetensors reader, opens the result.
    """
    tensors = checkpoint.read_tensors(MODEL_FILE)
    config = checkpoint.manifest.get("config")
    if config is None:
        raise RunError("checkpoint", f"the manifest of {checkpoint.path} holds no config")
    storage = open_storage(output, field="output")
    storage.make_directory("")
    metadata = {"format": "pt", "round": str(checkpoint.round)}
    storage.create(MODEL_FILE, lambda stream: write_tensor_stream(stream, MODEL_FILE, tensors, metadata), checkpoint.staging_dir)
    storage.write_bytes("config.json", json.dumps(config, indent=2).encode())


def load_weights(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and named tensors θ that `export_weights` wrote, from a directory or URI; needs no Ray.

        config, tensors = load_weights("exported")
        config = TrainConfig.from_dict(config)
        model = build_model(config.model, seed=0, separator_id=256)
        model.load_state_dict(tensors, strict=False)   # a tied head is in the file once

    Raises ConfigError where there are no exported weights.
    """
    storage = open_storage(path, field="weights")
    config = storage.read_bytes("config.json")
    if config is None or storage.size(MODEL_FILE) is None:
        raise ConfigError("weights", path, f"must be a directory with {MODEL_FILE} and config.json", "export_weights makes one from a checkpoint")
    if isinstance(storage, DirectoryStorage):
        return json.loads(config), read_tensor_file(os.path.join(storage.location, MODEL_FILE))
    return json.loads(config), _fetch(storage, MODEL_FILE, "", lambda found: None)


def _fetch(storage: Storage, file_name: str, staging_dir: str, check: Callable[[FileRecord], None]) -> dict[str, Tensor]:
    """Download a file, check what arrived, and map it; the mapping outlives the file's name."""
    with staged_path(staging_dir) as path:
        with open(path, "xb") as copy, storage.open(file_name) as source:
            check(hash_stream(source, file_name, copy_to=copy))
        return read_tensor_file(path)
