"""What a power cut leaves: a checkpoint never tells of rounds whose lines it took with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_resume import config_for, source, train  # noqa: F401 - `source` is a fixture


def test_the_lines_of_a_checkpoints_rounds_are_on_disk_before_its_manifest(
    source: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A resumed run cuts metrics.jsonl to its checkpoint and cannot invent what is missing.

    On disk is what the file held when it was last synced, or a rename put a synced file in its place. At the instant in which a
    manifest takes its name, that must be all rounds up to its own.
    """
    metrics = tmp_path / "x" / "metrics.jsonl"
    fsync, replace = os.fsync, os.replace
    on_disk: list[int] = []
    committed: list[tuple[int, list[int]]] = []

    def rounds() -> list[int]:
        return [json.loads(line)["round"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def syncing(descriptor: int) -> None:
        written = rounds()
        fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(metrics):
            on_disk[:] = written

    def replacing(old: Any, new: Any) -> None:
        replace(old, new)
        if str(new) == str(metrics):
            on_disk[:] = rounds()
        if "/round-" in str(new) and str(new).endswith("manifest.json"):
            committed.append((json.loads(Path(new).read_text())["round"], list(on_disk)))

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "replace", replacing)
    train(config_for(source, tmp_path, "x", checkpoint__every_rounds=2), stop_after=3)
    train(config_for(source, tmp_path, "x", checkpoint__every_rounds=2))
    assert [number for number, _ in committed] == [2, 3, 4, 5]
    for number, safe in committed:
        assert safe[:number] == list(range(1, number + 1))
