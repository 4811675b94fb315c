"""Local copies of a run that is kept at a URI: SQLite and JSON lines never live on object storage.

A run's small files lie in a local directory; for a plain path that is the run itself, for a URI a staging directory below
the system's temporary one, whose files are uploaded at each checkpoint and downloaded when a run is resumed elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from ray_muloco.training import storage


def local_directory(location: str) -> str:
    """The directory on this machine that holds a location's small files."""
    path = storage.local_path(location)
    if path is not None:
        return path
    parent, _, name = location.rstrip("/").rpartition("/")
    key = hashlib.sha256(parent.encode()).hexdigest()[:12]
    return os.path.join(tempfile.gettempdir(), "ray_muloco", key, name)


def is_remote(location: str) -> bool:
    """Whether a location is reached by uploads."""
    return storage.local_path(location) is None


def upload(directory: str, location: str, names: Iterable[str]) -> None:
    """Copy those of the named files that exist to a location."""
    for name in names:
        path = os.path.join(directory, name)
        if os.path.exists(path):
            storage.upload_file(path, storage.join(location, name))


def download(location: str, directory: str, names: Iterable[str]) -> None:
    """Copy those of the named text files that exist at a location into a directory; files that are there are newer and stay."""
    for name in names:
        path = os.path.join(directory, name)
        text = None if os.path.exists(path) else storage.read_text(storage.join(location, name))
        if text is not None:
            storage.atomic_write_text(path, text)


def read_metrics(path: str) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first, without a last line that was not finished."""
    records = []
    for line in (storage.read_text(path) or "").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
