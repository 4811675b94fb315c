"""What a job shows while it trains and when it is done: a live panel on a terminal, plain lines in a log.

A display never stops a run: a closed pipe or an odd encoding makes it fall silent or poorer, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ray_muloco.analysis import formats
from ray_muloco.training.mlflow_store import old_runs_notice, open_command
from ray_muloco.training.tracking import tracking_uri

LINE_EVERY_SECONDS = 1.0
RATE_ROUNDS = 20
DASH = formats.DASH


class Display(Protocol):
    """Follows one run for people. Missing and None values show as dashes. Use as a context manager, or call `close`."""

    def start(self, info: Mapping[str, Any]) -> None:
        """What the run is, once: name, method, preset, num_params, replicas, compute_dtype, storage, resumed_from …"""
        ...

    def info(self, info: Mapping[str, Any]) -> None:
        """The same as `start`, by the name a run's listener has."""
        ...

    def round(self, record: Mapping[str, Any]) -> None:
        """A committed round, as in metrics.jsonl."""
        ...

    def message(self, text: str) -> None:
        """A sentence that stays on the screen."""
        ...

    def finish(self, result: Mapping[str, Any], run_dir: str) -> None:
        """The figures of result.json, and where plot, report and MLflow are to be found."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was; any number of times."""
        ...

    def __enter__(self) -> Display: ...

    def __exit__(self, *error: object) -> None: ...


def make_display(total_tokens: int, quiet: bool = False, stream: TextIO | None = None) -> Display:
    """Live on a terminal, lines elsewhere, nothing when quiet. total_tokens: the run's budget; stream: stdout by default."""
    console = Console(file=stream)
    if quiet:
        return PlainDisplay(total_tokens, None)
    # is_terminal also follows FORCE_COLOR, which people set for logs: a panel drawn into a log cannot be read
    if console.is_terminal and console.file.isatty() and not console.is_dumb_terminal and console.encoding.startswith("utf"):
        return LiveDisplay(total_tokens, console)
    return PlainDisplay(total_tokens, stream or sys.stdout)


class Pace:
    """How far and how fast a run is: tokens, rate over recent rounds evaluation included, time left."""

    def __init__(self, total_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_tokens = total_tokens
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque(maxlen=RATE_ROUNDS)
        self.tokens = 0.0
        self.num_rounds: int | None = None

    def begin(self, tokens: float) -> None:
        """The run stands at so many tokens now."""
        self.tokens = tokens
        self._recent.append((self._clock(), tokens))

    def advance(self, record: Mapping[str, Any]) -> None:
        """Take a round in; guesses the number of rounds from its size."""
        before, tokens = self.tokens, record.get("tokens")
        if not formats.is_number(tokens):
            return
        self.begin(float(tokens))  # type: ignore[arg-type]
        step, number = self.tokens - before, record.get("round")
        if step > 0 and isinstance(number, int):
            self.num_rounds = number + max(0, -int(-(self.total_tokens - self.tokens) // step))

    @property
    def fraction(self) -> float:
        """Share of the budget that is committed, in [0, 1]."""
        return min(1.0, self.tokens / self.total_tokens) if self.total_tokens > 0 else 0.0

    @property
    def done(self) -> bool:
        """Whether the budget is used up."""
        return self.tokens >= self.total_tokens

    def seconds_left(self) -> float | None:
        """At the pace of recent rounds, or None before there is one."""
        if len(self._recent) < 2:
            return None
        (begin, first), (end, last) = self._recent[0], self._recent[-1]
        if last <= first or end <= begin:
            return None
        return max(0.0, (self.total_tokens - self.tokens) * (end - begin) / (last - first) - (self._clock() - end))


class PlainDisplay:
    """A line a round, at most one a second; evaluations and the last round always."""

    def __init__(self, total_tokens: int, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = Pace(total_tokens, clock)
        self._stream, self._clock = stream, clock
        self._last_line = -float("inf")
        self._held: str | None = None
        self._tracking_uri: str | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        """One or two lines."""
        self._tracking_uri = info.get("tracking_uri")
        self._pace.begin(float(info.get("resumed_tokens") or 0))
        for line in header_lines(info):
            self._print(line)

    info = start  # a display is a run's listener

    def round(self, record: Mapping[str, Any]) -> None:
        """A line, or held back until a second has passed."""
        self._pace.advance(record)
        self._held = round_line(record, self._pace)
        now = self._clock()
        if record.get("val_loss") is not None or self._pace.done or now - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line = now
            self._flush()

    def message(self, text: str) -> None:
        """The sentence as it is, after the round it follows."""
        self._flush()
        self._print(text)

    def finish(self, result: Mapping[str, Any], run_dir: str) -> None:
        """The last round if it was held back, the figures, the places."""
        self._flush()
        rows = result_rows(result)
        width = max(len(name) for name, _ in rows)
        for line in [result_title(result), *(f"  {name:<{width}}  {value}" for name, value in rows), *place_lines(run_dir, self._tracking_uri)]:
            self._print(line)

    def close(self) -> None:
        """The last round if it was held back."""
        self._flush()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _flush(self) -> None:
        if self._held is not None:
            self._print(self._held)
            self._held = None

    def _print(self, line: str) -> None:
        if self._stream is None:
            return
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)
        except (OSError, ValueError):  # the reader of our output went away: the run goes on
            self._stream = None


class LiveDisplay:
    """A panel that stays at the bottom of a terminal while messages scroll above it."""

    def __init__(self, total_tokens: int, console: Console) -> None:
        self._pace = Pace(total_tokens)
        self._console = console
        self._info: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._losses: list[float | None] = []
        self._val_loss: float | None = None
        self._uplink_bytes = self._downlink_bytes = 0.0
        self._live: Live | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        """Print what the run is and open the panel."""
        self._info = dict(info)
        self._pace.begin(float(info.get("resumed_tokens") or 0))
        for line in header_lines(info):
            self._say(line)
        self._open()

    info = start  # a display is a run's listener

    def round(self, record: Mapping[str, Any]) -> None:
        """Show the round."""
        self._open()
        self._pace.advance(record)
        self._record = dict(record)
        self._losses.append(record.get("train_loss"))
        if record.get("val_loss") is not None:
            self._val_loss = record["val_loss"]
        self._uplink_bytes += record.get("uplink_bytes") or 0
        self._downlink_bytes += record.get("downlink_bytes") or 0

    def message(self, text: str) -> None:
        """Print above the panel."""
        self._say(text)

    def finish(self, result: Mapping[str, Any], run_dir: str) -> None:
        """Close the panel, print the table and the places."""
        self.close()
        table = Table(title=result_title(result), title_justify="left", show_header=False, title_style="bold")
        table.add_column(style="cyan")
        table.add_column(justify="right")
        for name, value in result_rows(result):
            table.add_row(name, value)
        with contextlib.suppress(OSError, ValueError):
            self._console.print(table)
        for line in place_lines(run_dir, self._info.get("tracking_uri")):
            self._say(line)

    def close(self) -> None:
        """Stop the panel; its last state stays on the screen."""
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()
            self._live = None

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> None:
        if self._live is None:
            # twice a second: with --local this thread shares the interpreter with the training
            self._live = Live(get_renderable=self._panel, console=self._console, refresh_per_second=2, transient=False)
            self._live.start()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        record, pace = self._record, self._pace
        cells = Table.grid(expand=True, padding=(0, 2))
        for _ in range(4):
            cells.add_column(ratio=1)
        cells.add_row(*(_cell(name, value) for name, value in (
            ("loss", formats.fixed(record.get("train_loss"))), ("val loss", formats.fixed(self._val_loss)),
            ("tokens/s", formats.count(record.get("tokens_per_second"))), ("replicas", replicas_of(record)),
        )))  # fmt: skip
        cells.add_row(*(_cell(name, value) for name, value in (
            ("round", rounds_of(record, pace)), ("up", formats.num_bytes(self._uplink_bytes)),
            ("down", formats.num_bytes(self._downlink_bytes)), ("left", time_left(pace)),
        )))  # fmt: skip
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        bar.add_row(ProgressBar(total=1.0, completed=pace.fraction), f"{formats.count(pace.tokens)} / {formats.count(pace.total_tokens)} tokens")
        parts: list[RenderableType] = [cells, bar]
        if not self._console.options.ascii_only and len(self._losses) > 1:
            parts.append(Text(formats.sparkline(self._losses, max(8, min(60, self._console.width - 6))), style="green"))
        title = " · ".join(str(self._info[key]) for key in ("name", "method") if self._info.get(key))
        return Panel(Group(*parts), title=title or None, title_align="left")


def _cell(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


# ---- sentences and figures, the same for both displays


def header_lines(info: Mapping[str, Any]) -> list[str]:
    """What is trained, with what, where it is kept, and where it goes on from."""
    parameters = f"{formats.count(info['num_params'])} parameters" if info.get("num_params") else ""
    replicas = f"{info['replicas']} replica{'s' if info['replicas'] != 1 else ''}" if info.get("replicas") else ""
    budget = f"{formats.count(info['budget_tokens'])} tokens" if info.get("budget_tokens") else ""
    parts = (info.get("method"), info.get("preset"), parameters, replicas, info.get("compute_dtype"), budget)
    what = ", ".join(str(part) for part in parts if part)
    lines = [f"{info.get('name') or 'run'}: {what or 'training'}"]
    if info.get("storage"):
        lines.append(f"kept in {info['storage']}")
    if info.get("resumed_from"):
        lines.append(f"resumed after round {_said(info, 'resumed_round')} from {info['resumed_from']}")
    return lines


def round_line(record: Mapping[str, Any], pace: Pace) -> str:
    """One line that says all of a round."""
    val = f"  val {formats.fixed(record['val_loss'])}" if record.get("val_loss") is not None else ""
    eta = "" if pace.done or pace.seconds_left() is None else f"  left {time_left(pace)}"
    return (
        f"round {rounds_of(record, pace)}  {formats.count(record.get('tokens'))} tokens ({100 * pace.fraction:.0f}%)"
        f"  loss {formats.fixed(record.get('train_loss'))}{val}  {formats.count(record.get('tokens_per_second'))} tokens/s"
        f"  replicas {replicas_of(record)}  up {formats.num_bytes(record.get('uplink_bytes'))}"
        f"  down {formats.num_bytes(record.get('downlink_bytes'))}{eta}"
    )


def rounds_of(record: Mapping[str, Any], pace: Pace) -> str:
    """Round and rounds to come, `12/293`."""
    return f"{_said(record, 'round')}/{pace.num_rounds}" if pace.num_rounds else _said(record, "round")


def time_left(pace: Pace) -> str:
    """Time to the end of the budget, in whole seconds."""
    left = pace.seconds_left()
    return DASH if left is None else f"{math.ceil(left)} s" if left <= 59 else formats.seconds(left)


def replicas_of(record: Mapping[str, Any]) -> str:
    """Participants of those alive, and who is on the way: `3/4 +1 healing, 2 pending`."""
    coming = ", ".join(f"{record[key]} {key}" for key in ("healing", "pending") if record.get(key))
    return f"{_said(record, 'participants')}/{_said(record, 'alive')}" + (f" +{coming}" if coming else "")


def result_title(result: Mapping[str, Any]) -> str:
    """How it ended."""
    if result.get("status") == "stopped":
        return f"{result.get('name') or 'run'}: stopped and checkpointed; the same command goes on"
    return f"{result.get('name') or 'run'}: finished"


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of result.json in the order one asks for them."""
    participants, alive = result.get("participants_mean"), result.get("alive_mean")
    replicas = DASH if participants is None else f"{formats.fixed(participants, 3)} of {formats.fixed(alive, 3)} alive"
    return [
        ("validation loss", f"{formats.fixed(result.get('val_loss'))} nats a token"),
        ("", f"{formats.fixed(result.get('val_bits_per_byte'))} bits a byte"),
        ("tokens", formats.count(result.get("tokens"))),
        ("rounds", _said(result, "rounds")),
        ("time", formats.seconds(result.get("seconds"))),
        ("tokens a second", formats.count(result.get("tokens_per_second"))),
        ("sent up / down", f"{formats.num_bytes(result.get('uplink_bytes'))} / {formats.num_bytes(result.get('downlink_bytes'))}"),
        ("participants", replicas),
        ("parameters", formats.count(result.get("num_params"))),
    ]


def _said(figures: Mapping[str, Any], key: str) -> str:
    """A figure as it is, or a dash."""
    return DASH if figures.get(key) is None else str(figures[key])


def place_lines(run_dir: str, uri: str | None = None) -> list[str]:
    """Where to look: plot, report, MLflow. A file that was not written is not named; uri: of the tracker, if it is known."""
    lines = [
        f"{name:<10} {os.path.join(run_dir, file)}"
        for name, file in (("loss plot", "loss.png"), ("report", "report.html"))
        if "://" in run_dir or os.path.exists(os.path.join(run_dir, file))
    ]
    if uri or _tracker_of(run_dir) == "mlflow":
        storage = os.path.dirname(os.path.abspath(run_dir))
        uri = uri or tracking_uri(storage)
        lines.append(f"{'MLflow':<10} {open_command(uri)}")
        notice = old_runs_notice(uri, [os.getcwd(), storage])
        lines += [notice] if notice else []
    return lines


def _tracker_of(run_dir: str) -> str:
    try:
        with open(os.path.join(run_dir, "config.json"), encoding="utf-8") as file:
            return json.load(file)["run"]["tracker"]
    except (OSError, ValueError, KeyError, TypeError):
        return "none"
