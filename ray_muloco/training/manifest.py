"""What a checkpoint looks like from outside: its names, and the manifest that makes it exist. No tensors and no torch here.

The driver reads this before the cluster starts, `training.checkpoint` writes and reads the rest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from ray_muloco.data.tokenizer import BYTES
from ray_muloco.errors import RunError
from ray_muloco.training.locations import Storage, join, open_storage

MANIFEST = "manifest.json"
MODEL_FILE = "model.safetensors"
OUTER_FILE = "outer.safetensors"
TOKENIZER_FILE = "tokenizer.safetensors"
"""Holds the tokenizer's `spec` as the bytes of one tensor, `tokenizer`; absent where the tokenizer is plain bytes."""
_NAME = re.compile(r"round-(\d{6,})(?:-(\d+))?")


class DamagedManifestError(RunError):
    """A manifest that is there but not whole."""


def checkpoint_order(checkpoint_name: str) -> tuple[int, int]:
    """Round and attempt of a checkpoint directory's name."""
    match = _NAME.fullmatch(checkpoint_name)
    if match is None:
        raise ValueError(f"{checkpoint_name!r} is no checkpoint name; it must be one that begin() returned")
    return int(match[1]), int(match[2] or 0)


def checkpoint_names(storage: Storage) -> list[str]:
    """Directories of a storage with a checkpoint's name, complete or not, oldest first."""
    return sorted((name for name in storage.list_names() if _NAME.fullmatch(name)), key=checkpoint_order)


def encode_manifest(content: Mapping[str, Any]) -> bytes:
    """A manifest as it is stored: readable JSON, its last key the SHA-256 of the rest."""
    return json.dumps({**content, "sha256": _digest(content)}, indent=1).encode()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(storage: Storage, name: str = "") -> dict[str, Any] | None:
    """The manifest of the checkpoint in a directory (name "" for the storage's own), None if it has none.

    Raises DamagedManifestError for one that is not what was written.
    """
    data = storage.read_bytes(f"{name}/{MANIFEST}" if name else MANIFEST)
    if data is None:
        return None
    try:
        manifest = json.loads(data)
        if manifest.pop("sha256") != _digest(manifest):
            raise ValueError("its content does not match its SHA-256")
        _ = manifest["round"], manifest["files"]
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        path = join(storage.location, name) if name else storage.location
        raise DamagedManifestError("checkpoint", f"{join(path, MANIFEST)} is damaged: {error}") from error


def newest_checkpoint(run_path: str, *, field: str = "run.storage-path") -> str:
    """Path of a run's newest complete checkpoint, as its name says and whether or not it is damaged; empty when there is none."""
    storage = open_storage(join(run_path, "checkpoints"), field=field)
    complete = (name for name in reversed(checkpoint_names(storage)) if storage.size(f"{name}/{MANIFEST}") is not None)
    newest = next(complete, "")
    return join(storage.location, newest) if newest else ""


def newest_manifest(location: str, *, field: str = "run.storage-path") -> tuple[str, dict[str, Any]] | None:
    """Path and manifest of a checkpoint, or of the newest one of a run or of its checkpoints/; None where there is none.

    Damaged manifests are passed over, as a resumed run does; RunError `checkpoint` where all of them are.
    """
    own = read_manifest(open_storage(location, field=field))
    if own is not None:
        return location, own
    damage = ""
    for directory in (location, join(location, "checkpoints")):
        storage = open_storage(directory, field=field)
        for name in reversed(checkpoint_names(storage)):
            try:
                manifest = read_manifest(storage, name)
            except DamagedManifestError as error:
                damage = error.detail
                continue
            if manifest is not None:
                return join(directory, name), manifest
    if damage:
        raise RunError("checkpoint", f"no checkpoint at {location} can be read; {damage}")
    return None


def tokenizer_spec(checkpoint_path: str, manifest: Mapping[str, Any]) -> str:
    """The specification of the tokenizer a checkpoint was trained with, as `data.tokenizer` rebuilds it; without torch.

    Raises RunError `checkpoint` where the checkpoint's file of it is missing or damaged.
    """
    if TOKENIZER_FILE not in {entry["name"] for entry in manifest["files"]}:
        return BYTES
    import safetensors
    import safetensors.numpy

    try:
        return safetensors.numpy.load(open_storage(checkpoint_path).read_bytes(TOKENIZER_FILE) or b"")["tokenizer"].tobytes().decode()
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise RunError("checkpoint", f"{join(checkpoint_path, TOKENIZER_FILE)} cannot be read: {error}") from error
