"""Which nodes end: asked while others work, so that a boundary does not wait for the answer."""

from __future__ import annotations

import pytest

from ray_muloco.runtime import nodes


def test_a_boundary_asks_only_what_nobody_looked_at_for_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking at the boundary made the exchange of a small model four per cent longer, once a second, for nothing."""
    now, asked = 100.0, 0

    def draining_nodes() -> dict[str, float]:
        nonlocal asked
        asked += 1
        return {"node": float(asked)}

    monkeypatch.setattr(nodes, "draining_nodes", draining_nodes)
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now)
    watch = nodes.DrainWatch()
    assert watch.deadlines() == {"node": 1.0}, "who never looked asks"
    for moment in (100.5, 101.0, 101.9, 102.0, 103.0):
        now = moment
        watch.look()
    assert asked == 4, "at most once a second"
    now = 104.9
    assert watch.deadlines() == {"node": 4.0}
    now = 105.0
    assert watch.deadlines() == {"node": 5.0}, "never older than two seconds"


def test_a_failed_look_is_not_taken_for_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment of asking was noted before the answer: after an error the boundary believed the answer before it."""

    def unreachable() -> dict[str, float]:
        raise ConnectionError

    watch = nodes.DrainWatch()
    monkeypatch.setattr(nodes, "draining_nodes", unreachable)
    with pytest.raises(ConnectionError):
        watch.look()
    monkeypatch.setattr(nodes, "draining_nodes", lambda: {"node": 1.0})
    assert watch.deadlines() == {"node": 1.0}
