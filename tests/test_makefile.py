"""What `make test` says of its two halves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("selection", "codes", "passes"),
    [
        ("tests/test_muon.py", {"not ray": 0, "ray": 5}, True),
        ('-k "exchange and ring"', {"not ray": 5, "ray": 0}, True),
        ("tests/test_muon.py", {"not ray": 1, "ray": 5}, False),
        ("tests/test_muon.py", {"not ray": 5, "ray": 1}, False),
        ("", {"not ray": 0, "ray": 0}, True),
        ("", {"not ray": 0, "ray": 5}, False),
    ],
)
def test_a_selection_of_one_kind_of_test_passes(tmp_path: Path, selection: str, codes: dict[str, int], passes: bool) -> None:
    """`make test ARGS=tests/test_muon.py`, the Makefile's own example, failed with error 5: the file has no test for Ray. No test at all is a failure."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *"not ray"*) exit {codes["not ray"]};; *) exit {codes["ray"]};; esac\n')
    python.chmod(0o755)
    for mark in ("installed", "installed-dev"):
        (tmp_path / mark).touch()
    arguments = ["make", "-C", str(ROOT), "test", f"VENV={tmp_path}", f"ARGS={selection}"]
    told = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]})
    assert (told.returncode == 0) == passes, told.stdout + told.stderr
