"""Gauges: Prometheus finds every committed round on the node's metrics port, and no gauge can end a run."""

from __future__ import annotations

import re
import socket
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.util.metrics
from test_resume import Notes, config_for, source  # noqa: F401 - `source` is a fixture

from ray_muloco import fit
from ray_muloco.runtime import gauges
from ray_muloco.runtime.gauges import Gauged

DEADLINE_SECONDS = 40.0  # seen after three; Ray passes figures on once a second here
RECORD = {"round": 3, "train_loss": 2.5, "participants": 2, "uplink_bytes": 10, "downlink_bytes": 20, "heal_bytes": 0}

Figures = dict[tuple[str, str], float]
"""(gauge, direction or nothing) → value."""


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """The port on which a private one-node cluster serves its metrics: the node's agent does, the dashboard is not needed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False,
        _metrics_export_port=port, _system_config={"metrics_report_interval_ms": 1000},
    )  # fmt: skip
    try:
        yield port
    finally:
        ray.shutdown()


def scraped(port: int, run: str) -> list[Figures]:
    """What Prometheus would read of a run, process by process."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, Figures] = defaultdict(dict)
    for name, tags, value in re.findall(r"^ray_(muloco_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        if labels["run"] == run:
            found[labels["WorkerId"]][name, labels.get("direction", "")] = float(value)
    return list(found.values())


def expected(records: list[dict[str, Any]]) -> Figures:
    """What the gauges show after these rounds: the last one's figures, and the bytes of all."""
    last = {(name, ""): float(records[-1][key]) for name, key in gauges.FIGURES.items()}
    return last | {(gauges.BYTES, direction): float(sum(r[key] for r in records)) for direction, key in gauges.DIRECTIONS.items()}


class Scraper(Notes):
    """Reads the metrics port while the coordinator of the run still lives: until this listener has heard the last round, it does."""

    def __init__(self, port: int, run: str, last_tokens: int, before: list[dict[str, Any]]) -> None:
        super().__init__()
        self.port, self.run, self.last_tokens, self.before = port, run, last_tokens, before
        self.seen: list[Figures] = []

    def round(self, record: dict[str, Any]) -> None:
        super().round(record)
        if record["tokens"] < self.last_tokens:
            return
        deadline = time.monotonic() + DEADLINE_SECONDS
        while expected(self.before + self.rounds) not in self.seen and time.monotonic() < deadline:
            time.sleep(0.2)
            self.seen = scraped(self.port, self.run)


@pytest.mark.ray
def test_prometheus_reads_the_newest_round_and_the_bytes_of_the_whole_run(metrics_port: int, source: Path, tmp_path: Path) -> None:  # noqa: F811
    """Every gauge, with the run's name; a run that is resumed, here with a longer budget, counts its bytes on."""
    config = config_for(source, tmp_path, "watched")
    first = Scraper(metrics_port, "watched", config.budget_tokens, [])
    fit(config, listener=first)
    assert expected(first.rounds) in first.seen
    assert {name for name, _ in expected(first.rounds)} == set(gauges.NAMES)
    longer = config.override({"budget_tokens": 2 * config.budget_tokens})
    second = Scraper(metrics_port, "watched", longer.budget_tokens, first.rounds)
    fit(longer, listener=second)
    assert second.described["resumed_round"] == len(first.rounds)
    assert expected(first.rounds + second.rounds) in second.seen


class FakeGauge:
    """A gauge of Ray's that remembers, or fails."""

    values: dict[tuple[str, str], float]
    fails = False

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self.name, self.tag_keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        if self.fails:
            raise RuntimeError("the agent is gone")
        assert set(tags) == set(self.tag_keys)
        self.values[self.name, tags.get("direction", "")] = value


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeGauge]:
    FakeGauge.values, FakeGauge.fails = {}, False
    monkeypatch.setattr(ray.util.metrics, "Gauge", FakeGauge)
    return FakeGauge


def test_gauges_that_fail_are_given_up_with_one_message_and_the_run_goes_on(fake: type[FakeGauge]) -> None:
    notes = Notes()
    gauged = Gauged(notes, "a-run")
    fake.fails = True
    for _ in range(3):
        gauged.round(RECORD)
    assert len(notes.rounds) == 3
    assert len(notes.messages) == 1
    assert "RuntimeError: the agent is gone" in notes.messages[0]
    assert fake.values == {}


def test_what_a_round_lacks_stays_what_it_was(fake: type[FakeGauge]) -> None:
    gauged = Gauged(Notes(), "a-run")
    gauged.info({"resumed_bytes": {"uplink_bytes": 5, "downlink_bytes": 6, "heal_bytes": 7}})
    gauged.round({**RECORD, "tokens_per_second": 100.0})
    gauged.round({**RECORD, "round": 4, "tokens_per_second": None})
    assert fake.values["muloco_tokens_per_second", ""] == 100.0
    assert fake.values["muloco_round", ""] == 4
    assert {direction: fake.values[gauges.BYTES, direction] for direction in gauges.DIRECTIONS} == {"up": 25, "down": 46, "heal": 7}


def test_a_round_of_gauges_takes_microseconds() -> None:
    """Real gauges, no cluster: setting one is a call into Ray's own library, and nothing is sent then."""
    notes = Notes()
    gauged = Gauged(notes, "a-run")
    gauged.round(RECORD)
    begin = time.perf_counter()
    for _ in range(1000):
        gauged.round(RECORD)
    assert time.perf_counter() - begin < 1.0  # 1 ms a round; seen: 0.02
    assert notes.messages == []
