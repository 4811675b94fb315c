"""Golden trajectories: 20 rounds on synthetic tokens, recorded once. They change only when a change is about computation.

To record anew, after a change that is meant to change them: python tests/test_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toy import LENGTH, Harness, toy_config, toy_dataset

GOLDEN = Path(__file__).parent / "golden" / "trajectories.json"
CASES: dict[str, dict[str, Any]] = {
    "muloco-k4": {"method": "muloco", "scaling__num_replicas": 4},
    "diloco-k4": {"method": "diloco", "scaling__num_replicas": 4},
    "muon-dp-k2": {"method": "muon-dp", "scaling__num_replicas": 2},
    "muloco-k1-rms": {"method": "muloco", "scaling__num_replicas": 1, "inner__scaling": "rms_norm", "inner__weight_decay": 0.1},
}
NUM_ROUNDS = 20


def trajectory(case: str) -> list[dict[str, float | None]]:
    """Loss and norms of each round."""
    config = toy_config(budget_tokens=NUM_ROUNDS * 3 * 8 * LENGTH, **CASES[case])
    harness = Harness(config, toy_dataset())
    rows = []
    while not harness.coordinator.finished:
        reports, committed = harness.round()
        loss = sum(r.train_loss for r in reports.values()) / len(reports)
        rows.append({"train_loss": loss, "pseudogradient_norm": committed.pseudogradient_norm, "outer_update_norm": committed.outer_update_norm})
    return rows


@pytest.mark.parametrize("case", CASES)
def test_twenty_rounds_follow_the_recorded_trajectory(case: str) -> None:
    """Losses to 1e-4 and norms to 1e-3: what the order of sums in another CPU's matrix products may change in 60 steps."""
    expected = json.loads(GOLDEN.read_text())[case]
    rows = trajectory(case)
    assert len(rows) == len(expected) == NUM_ROUNDS
    for row, golden in zip(rows, expected, strict=True):
        for name, value in golden.items():
            tolerance = 1e-4 if name == "train_loss" else 1e-3
            assert row[name] == (pytest.approx(value, rel=tolerance) if value is not None else None)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({case: trajectory(case) for case in CASES}, indent=1))
