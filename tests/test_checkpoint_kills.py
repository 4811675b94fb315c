"""kill -9 at every step and at random moments of a save: the newest complete checkpoint always loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import saves
from saves import FILES, assert_whole, save

from ray_muloco.training.checkpoint import CheckpointStore
from ray_muloco.training.storage import list_names


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    """Every kill of this file, by one helper program: see `saves.kill_main`."""
    root = tmp_path_factory.mktemp("kills")
    series = {"moments": f"{root}/moments", "steps": f"{root}/steps", "steps at a URI": f"fsspec+file://{root}/uri"}
    arguments = [argument for name, location in series.items() for argument in (name.split()[0], location)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, saves.__file__, str(root / "staging"), *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return Kills(series, {name: [seen for seen in found if seen["location"] == location] for name, location in series.items()}, root / "staging")


@dataclass(frozen=True)
class Kills:
    """By series of kills: its location, and what was found after each kill, oldest first."""

    locations: dict[str, str]
    found: dict[str, list[dict[str, Any]]]
    staging_dir: Path


def assert_never_backwards(found: list[dict[str, Any]]) -> None:
    newest = 0
    for seen in found:
        assert seen["damage"] == "", seen
        assert seen["newest"] >= newest, "the round went backwards"
        assert seen["newest"] >= seen["acknowledged"], "a commit that had returned was lost"
        assert seen["complete"] >= min(seen["newest"], 2), "a complete checkpoint went before its successor was there"
        newest = seen["newest"]


def test_kill_9_at_random_moments_of_a_save_always_leaves_the_newest_complete_checkpoint(kills: Kills) -> None:
    """K01: 50 kills from outside, at seeded moments of an endless series of saves."""
    found = kills.found["moments"]
    assert len(found) == 52  # before the first save, after the first three, and after each kill
    assert_never_backwards(found)
    assert found[-1]["newest"] > 3, "the savers were killed before they could save"
    assert_cleans_up(kills.locations["moments"], kills.staging_dir, found[-1]["newest"])


@pytest.mark.parametrize(("series", "torn"), [("steps", {"in a file"}), ("steps at a URI", set())])
def test_kill_9_at_every_step_of_a_save_always_leaves_the_newest_complete_checkpoint(series: str, torn: set[str], kills: Kills) -> None:
    """K01: the saver kills itself at each system call of a save in turn: torn writes, syncs, renames, deletions."""
    found = kills.found[series]
    assert_never_backwards(found)
    assert {phase for seen in found for phase in seen["phases"]} >= {"before the manifest", "after the manifest", "in a deletion", *torn}
    assert_cleans_up(kills.locations[series], kills.staging_dir, found[-1]["newest"])


def assert_cleans_up(location: str, staging_dir: Path, newest: int) -> None:
    """The next two saves that are let finish leave two checkpoints and nothing of those that were not."""
    store = CheckpointStore(location, staging_dir=str(staging_dir), keep=2)
    for round_number in (newest + 1, newest + 2):
        ref = save(store, round_number)
        ref.read_tensors(FILES[0])
    names = [name for name in list_names(location) if name.startswith("round-")]
    assert names == [ref.name for ref in store.all()]
    assert [ref.round for ref in store.all()] == [newest + 1, newest + 2]
    for ref in store.all():
        assert_whole(ref)
        assert sorted(list_names(ref.path)) == sorted([*FILES, "manifest.json"])
    assert not staging_dir.exists() or os.listdir(staging_dir) == []
