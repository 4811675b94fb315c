"""Displays: a line a round in a log, a panel on a terminal, and never the reason that a run ends."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import _display
import pytest
from _display import LiveDisplay, Pace, PlainDisplay, make_display
from rich.console import Console

from ray_muloco.training.membership import Census, Patience

RESULT = {
    "name": "a-run", "val_loss": 2.345, "val_bits_per_byte": 3.21, "tokens": 1_000_000, "rounds": 10, "seconds": 75.0, "tokens_per_second": 13_333.0,
    "uplink_bytes": 84_000_000, "downlink_bytes": 84_000_000, "participants_mean": 3.9, "alive_mean": 4.0, "num_params": 512_000, "status": "finished",
}  # fmt: skip
WAITING = "waiting for replicas since 10 s: 1 replicas live, 3 are needed"
INFO = {"name": "a-run", "method": "muloco", "preset": "tiny", "num_params": 512_000, "replicas": 4, "compute_dtype": "bf16", "storage": "/runs/a-run"}


def record_of(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": number, "tokens": number * 100_000, "train_loss": 5.0 / number, "val_loss": None, "participants": 4, "alive": 4,
        "uplink_bytes": 8_400_000, "downlink_bytes": 8_400_000, "tokens_per_second": 12_345.6,
    } | changes  # fmt: skip


class Clock:
    """Time as the test tells it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def live(total_tokens: int = 1_000_000) -> tuple[LiveDisplay, Terminal]:
    screen = Terminal()
    return LiveDisplay(total_tokens, Console(file=screen, force_terminal=True, width=100, color_system=None)), screen


def make_run(directory: Path, tracker: str = "mlflow") -> Path:
    run = directory / "a-run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"run": {"tracker": tracker}}))
    for name in ("loss.png", "report.html"):
        (run / name).write_text("x")
    return run


def test_a_terminal_gets_the_panel_and_a_log_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_display(10, stream=Terminal()), LiveDisplay)
    assert isinstance(make_display(10, stream=io.StringIO()), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(10, stream=Terminal()), PlainDisplay)


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_log_stays_a_log_where_colours_are_asked_for(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job logs` shows what a job wrote into a file: no panel, no escape sequences."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv(variable, "1")
    log = io.StringIO()
    with make_display(1_000_000, stream=log) as display:
        display.start(INFO)
        display.round(record_of(1, alive=3, participants=3, pending=1))
        display.message(WAITING)
        display.finish(RESULT, "/nowhere")
    assert isinstance(display, PlainDisplay)
    assert "\x1b" not in log.getvalue()
    assert "\r" not in log.getvalue()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "4/4"), ({"healing": 0, "pending": None}, "4/4"), ({"participants": 3, "healing": 1, "pending": 2}, "3/4 +1 healing, 2 pending"),
        ({"alive": 3, "participants": 3, "healing": 1}, "3/3 +1 healing"), ({"alive": 2, "participants": 2, "pending": 2}, "2/2 +2 pending"),
    ],
)  # fmt: skip
def test_replicas_on_their_way_are_shown_beside_those_that_take_part(changes: dict[str, Any], shown: str) -> None:
    log = io.StringIO()
    with PlainDisplay(1_000_000, log) as plain:
        plain.round(record_of(1, **changes))
    assert f"  replicas {shown}  up " in log.getvalue()
    display, screen = live()
    with display:
        display.start(INFO)
        display.round(record_of(1, **changes))
    last = " ".join(re.sub(r"[│\s]+", " ", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())).split())
    words = shown.split()
    assert f"replicas {words[0]}" in last
    assert all(word in last for word in words)
    assert ("healing" in last, "pending" in last) == ("healing" in shown, "pending" in shown)


def test_who_waits_for_replicas_says_so_in_lines_and_above_the_panel() -> None:
    """The session's own sentence, whenever it comes: after the round it follows, whole, on a line of its own."""
    log, clock = io.StringIO(), Clock()
    plain = PlainDisplay(1_000_000, log, clock)
    plain.start(INFO)
    plain.round(record_of(1))
    plain.round(record_of(2))  # held back
    patience = Patience(3, 300.0, plain.message, clock)
    for clock.now in range(0, 31, 5):
        patience.check(Census(alive=2, healing=1, pending=1))
    lines = log.getvalue().splitlines()[-4:]
    assert lines[0].startswith("round 2/10")
    state = "2 replicas live, 3 are needed (scaling.min-replicas); 1 are getting ready, 1 are not placed"
    assert lines[1:] == [f"waiting for replicas since {seconds} s: {state}" for seconds in (10, 20, 30)]
    display, screen = live()
    with display:
        display.start(INFO)
        display.message(lines[1])
    assert lines[1] in screen.getvalue()


def test_a_log_line_says_all_of_a_round() -> None:
    log, clock = io.StringIO(), Clock()
    display = PlainDisplay(1_000_000, log, clock)
    display.start(INFO)
    clock.now = 10.0
    display.round(record_of(1, val_loss=4.5))
    line = log.getvalue().splitlines()[-1]
    for part in (
        "round 1/10",
        "100k tokens (10%)",
        "loss 5.000",
        "val 4.500",
        "12.3k tokens/s",
        "replicas 4/4",
        "up 8.40 MB",
        "down 8.40 MB",
        "left 1 min 30 s",
    ):
        assert part in line
    assert len(line) < 160


def test_lines_come_once_a_second_but_evaluations_and_the_last_round_always() -> None:
    log, clock = io.StringIO(), Clock()
    display = PlainDisplay(1_000_000, log, clock)
    display.start({})
    for number in range(1, 11):
        clock.now += 0.3
        display.round(record_of(number, val_loss=3.0 if number == 3 else None))
    shown = [int(line.split()[1].split("/")[0]) for line in log.getvalue().splitlines() if line.startswith("round")]
    assert shown == [1, 3, 7, 10]


def test_a_round_held_back_is_shown_when_the_run_stops_early() -> None:
    log, clock = io.StringIO(), Clock()
    with PlainDisplay(1_000_000, log, clock) as display:
        display.start({})
        display.round(record_of(1))
        display.round(record_of(2))
    assert "round 2/10" in log.getvalue()


def test_the_last_lines_name_plot_report_and_the_command_that_opens_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, log = make_run(tmp_path), io.StringIO()
    PlainDisplay(1_000_000, log).finish(RESULT, str(run))
    text = log.getvalue()
    for part in (
        "a-run: finished",
        "2.345 nats a token",
        "3.210 bits a byte",
        "1 min 15 s",
        "84.0 MB / 84.0 MB",
        "3.90 of 4.00 alive",
        f"{run}/loss.png",
        f"{run}/report.html",
    ):
        assert part in text
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in text


def test_places_that_do_not_exist_are_not_named(tmp_path: Path) -> None:
    run, log = make_run(tmp_path, tracker="none"), io.StringIO()
    (run / "loss.png").unlink()
    PlainDisplay(1_000_000, log).finish(RESULT, str(run))
    assert "loss.png" not in log.getvalue()
    assert "mlflow" not in log.getvalue()


def test_older_runs_in_the_retired_format_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M04: who upgraded reads where the runs are now, and how the old ones are seen."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    run, log = make_run(tmp_path), io.StringIO()
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").write_text("name: Default\n")
    PlainDisplay(1_000_000, log).finish(RESULT, str(run))
    assert f"sqlite:///{tmp_path}/mlflow.db; the older ones in {tmp_path}/mlruns" in log.getvalue()


def test_a_stopped_run_says_how_it_goes_on() -> None:
    log = io.StringIO()
    PlainDisplay(1_000_000, log).finish({**RESULT, "status": "stopped"}, "/nowhere")
    assert "stopped and checkpointed; the same command goes on" in log.getvalue()


@pytest.mark.parametrize("make", ["plain", "live"])
@pytest.mark.parametrize("empty", [{}, None])
def test_missing_and_null_figures_are_dashes(make: str, empty: dict[str, Any] | None) -> None:
    display, out = live() if make == "live" else (PlainDisplay(1_000_000, stream := io.StringIO()), stream)
    nothing = {} if empty is not None else dict.fromkeys([*RESULT, *INFO, *record_of(1), "resumed_from", "resumed_tokens", "budget_tokens", "tracking_uri"])
    with display:
        display.start(nothing)
        display.round(nothing)
        display.round({**nothing, "train_loss": math.nan, "tokens": math.nan})
        display.finish(nothing, "/nowhere")
    assert "–" in out.getvalue()
    assert "None" not in out.getvalue()


def test_the_panel_shows_the_latest_round_and_the_totals() -> None:
    display, screen = live()
    with display:
        display.start(INFO)
        display.round(record_of(1, val_loss=4.5))
        display.message("replica 2 [was] lost")
        display.round(record_of(2))
    text = screen.getvalue()
    for part in (
        "a-run · muloco",
        "loss 2.500",
        "val loss 4.500",
        "replicas 4/4",
        "round 2/10",
        "up 16.8 MB",
        "200k / 1.00M tokens",
        "█▁",
        "replica 2 [was] lost",
    ):
        assert part in text


def test_the_panel_leaves_the_terminal_with_its_cursor() -> None:
    display, screen = live()
    with contextlib.suppress(KeyboardInterrupt), display:
        display.start(INFO)
        raise KeyboardInterrupt
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert screen.getvalue().count(hidden) == screen.getvalue().count(shown) == 1
    display.close()
    assert screen.getvalue().count(shown) == 1


def test_a_resumed_run_says_from_where_and_its_rate_does_not_count_what_was_there() -> None:
    log, clock = io.StringIO(), Clock()
    display = PlainDisplay(1_000_000, log, clock)
    display.start({**INFO, "resumed_from": "/runs/a-run/checkpoints/round-000005", "resumed_round": 5, "resumed_tokens": 500_000})
    clock.now = 10.0
    display.round(record_of(6))
    assert "resumed after round 5 from /runs/a-run/checkpoints/round-000005" in log.getvalue()
    assert "left 40 s" in log.getvalue()


def test_quiet_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with make_display(1_000_000, quiet=True) as display:
        display.start(INFO)
        display.round(record_of(1, val_loss=1.0))
        display.message("something")
        display.finish(RESULT, "/nowhere")
    assert capfd.readouterr() == ("", "")


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    """`train | head` closes the pipe in the middle."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display = PlainDisplay(1_000_000, Closed())
    display.start(INFO)
    for number in range(1, 11):
        display.round(record_of(number, val_loss=1.0))
    display.finish(RESULT, "/nowhere")


def test_an_encoding_without_our_letters_makes_poorer_lines_not_errors() -> None:
    """A terminal in the C locale gets lines: the panel is made of letters it does not have."""

    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    raw = io.BytesIO()
    with make_display(1_000_000, stream=Ascii(raw, encoding="ascii")) as display:
        display.start(INFO)
        display.round(record_of(1))
        display.message("replica 1 ejected: its θ differs")
        display.round(record_of(2))
        display.finish(RESULT, "/nowhere")
    assert isinstance(display, PlainDisplay)
    for part in (b"ejected: its ? differs", b"round 2/10", b"2.345"):
        assert part in raw.getvalue()


def test_the_time_left_follows_recent_rounds_and_runs_down() -> None:
    clock = Clock()
    pace = Pace(1_000_000, clock)
    pace.begin(0)
    assert pace.seconds_left() is None
    for number in range(1, 51):  # slow at first: forgotten after RATE_ROUNDS rounds
        clock.now += 10.0 if number <= 50 - _display.RATE_ROUNDS else 1.0
        pace.advance({"round": number, "tokens": number * 10_000})
    assert pace.seconds_left() == pytest.approx(50.0)
    clock.now += 20.0
    assert pace.seconds_left() == pytest.approx(30.0)
    assert pace.num_rounds == 100
    clock.now += 1000.0
    assert pace.seconds_left() == 0.0
