"""What a run's records look like: the loss plot as PNG, and the charts of the report.

records: lines of metrics.jsonl in order; any value may be missing or None. matplotlib is imported where it draws.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ray_muloco.analysis import formats
from ray_muloco.analysis.svg import Axes, Mark, Series, legend, line_chart, stacked_chart

Records = Sequence[Mapping[str, Any]]

LABELS = {
    "train_loss": "training",
    "val_loss": "validation",
    "pseudogradient_norm": "pseudogradient",
    "outer_update_norm": "outer update",
    "replica_cosine": "cosine",
    "participants": "participants",
    "alive": "alive",
    "healing": "healing",
    "pending": "pending",
    "seconds_inner": "inner steps",
    "seconds_exchange": "exchange",
    "seconds_outer": "outer step",
    "seconds_rest": "evaluation and records",
    "tokens_per_second": "tokens a second",
    "inner_lr": "inner learning rate",
}
"""Short names for legends; what each figure is, with its unit, says `training.metrics.UNITS`."""

MAX_DOTS = 40
MAX_MARK_CHARACTERS = 200


class Chart(NamedTuple):
    """A titled drawing: svg is empty when the run has nothing to draw, and note says why."""

    title: str
    keys: str
    svg: str
    note: str


def values(records: Records, key: str) -> list[float | None]:
    """A column of numbers; what is missing or not finite is None."""
    return [record.get(key) if formats.is_number(record.get(key)) else None for record in records]


def cumulative(records: Records, *keys: str) -> list[float]:
    """Running sum over the rounds of some columns' sum; missing counts as nothing."""
    return list(itertools.accumulate(sum(record[key] for key in keys if formats.is_number(record.get(key))) for record in records))


def round_seconds(record: Mapping[str, Any]) -> float:
    """Seconds of a round, or of its phases where the whole was not recorded."""
    if formats.is_number(record.get("seconds")):
        return record["seconds"]
    return sum(record[key] for key in ("seconds_inner", "seconds_exchange", "seconds_outer") if formats.is_number(record.get(key)))


# ---- charts of the report


def loss_charts(records: Records) -> list[Chart]:
    """Loss against tokens, against time and against bytes exchanged."""
    tokens = [value or 0.0 for value in values(records, "tokens")]
    seconds = list(itertools.accumulate(round_seconds(record) for record in records))
    traffic = cumulative(records, "uplink_bytes", "downlink_bytes")
    unit, size = _time_unit(seconds[-1] if seconds else 0.0)
    return [
        _loss_chart("Loss against tokens", "tokens trained on", tokens, formats.count, records),
        _loss_chart("Loss against time", f"time in {unit}", [second / size for second in seconds], formats.count, records),
        _loss_chart("Loss against bytes exchanged", "bytes up and down, all replicas", traffic, formats.num_bytes, records),
    ]


def _loss_chart(title: str, x_label: str, x: Sequence[float], x_format: Callable[[float], str], records: Records) -> Chart:
    if not any(x):
        return Chart(title, "", "", "Nothing of it was recorded in this run.")
    series = [Series(LABELS["train_loss"], x, values(records, "train_loss")), Series(LABELS["val_loss"], x, values(records, "val_loss"), "dots")]
    axes = Axes(x_label, "loss in nats a token", x_format, lambda value: formats.fixed(value, 3), x_from_zero=True)
    return Chart(title, legend([one.label for one in series]), line_chart(series, axes), "No loss was recorded.")


def _time_unit(longest_seconds: float) -> tuple[str, float]:
    """The unit in which a duration has a few digits before the point, and its seconds."""
    units = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, size) for name, size in units if longest_seconds >= 3 * size), ("seconds", 1.0))


def participation_chart(records: Records) -> Chart:
    """Replicas by state and round; a vertical line at rounds before whose commit the membership changed, with the reasons."""
    rounds = _rounds(records)
    series = [
        Series(LABELS["alive"], rounds, values(records, "alive"), "broad"),
        Series(LABELS["participants"], rounds, values(records, "participants"), "step"),
        Series(LABELS["pending"], rounds, values(records, "pending"), "broad", peaks=True),
        Series(LABELS["healing"], rounds, values(records, "healing"), "step", peaks=True),
    ]
    drawn = [one for one in series if any(value is not None for value in one.y)]  # the last two are unknown to older records
    svg = line_chart(drawn, Axes("round", "replicas", formats.count, formats.count, from_zero=True), membership_marks(records))
    return Chart("Replicas by round", legend([one.label for one in drawn]), svg, "No participation was recorded.")


def membership_marks(records: Records) -> list[Mark]:
    """Rounds that have reasons, or another generation than the round before."""
    marks = []
    for number, before, record in zip(_rounds(records), [None, *records], records, strict=False):
        text = "; ".join(reasons_of(record))
        if not text and before is not None and record.get("generation") != before.get("generation"):
            text = f"generation {record.get('generation')}"
        if text:
            cut = text if len(text) <= MAX_MARK_CHARACTERS else f"{text[:MAX_MARK_CHARACTERS]}…"
            marks.append(Mark(number, f"round {number:.0f}: {cut}"))
    return marks


def reasons_of(record: Mapping[str, Any]) -> list[str]:
    """What changed in the membership before this round's commit; nothing where a record does not say."""
    reasons = record.get("reasons")
    return [str(reason) for reason in reasons] if isinstance(reasons, list) else []


def phases(records: Records) -> dict[str, list[float | None]]:
    """Seconds of every round by phase, and what the phases leave of the whole."""
    named: dict[str, list[float | None]] = {key: values(records, key) for key in ("seconds_inner", "seconds_exchange", "seconds_outer")}
    named["seconds_rest"] = [
        max(0.0, record["seconds"] - sum(column[index] or 0.0 for column in named.values())) if formats.is_number(record.get("seconds")) else None
        for index, record in enumerate(records)
    ]
    return named


def phase_chart(records: Records) -> Chart:
    """Where the seconds of a round went."""
    layers = [Series(LABELS[key], _rounds(records), column) for key, column in phases(records).items()]
    svg = stacked_chart(_rounds(records), layers, Axes("round", "seconds a round", formats.count, formats.seconds, from_zero=True))
    return Chart("Seconds of a round", legend([layer.label for layer in layers]), svg, "No times were recorded.")


def round_chart(title: str, records: Records, keys: Sequence[str], note: str, *, from_zero: bool = False) -> Chart:
    """Columns against rounds; the note stands in for a chart that has no values."""
    drawn = [key for key in keys if any(value is not None for value in values(records, key))]
    series = [Series(LABELS[key], _rounds(records), values(records, key)) for key in drawn]
    svg = line_chart(
        series, Axes("round", title, formats.count, lambda value: formats.fixed(value, 3) if abs(value) < 1e3 else formats.count(value), from_zero=from_zero)
    )
    return Chart(title, legend([one.label for one in series]) if len(keys) > 1 else "", svg, note)


def _rounds(records: Records) -> list[float]:
    return [number if number is not None else float(index + 1) for index, number in enumerate(values(records, "round"))]


# ---- loss.png


def write_loss_plot(path: str, records: Records, title: str) -> None:
    """Training and validation loss against tokens, as PNG; written beside and renamed, so that a reader never sees half of it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    tokens, train, val = values(records, "tokens"), values(records, "train_loss"), values(records, "val_loss")
    for key, column, colour, width in (("train_loss", train, "#7a8ba8", 1.4), ("val_loss", val, "#c2410c", 2.0)):
        points = [(x, y) for x, y in zip(tokens, column, strict=True) if x is not None and y is not None]
        if points:
            dotted = len(points) == 1 or (key == "val_loss" and len(points) <= MAX_DOTS)
            label = f"{LABELS[key]}, last {formats.fixed(points[-1][1])}"
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, label=label, marker="o" if dotted else "", markersize=4)
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss in nats a token")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", wrap=True)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.trimmed(formats.count(value))))
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.set_xlim(left=0)
        axes.legend(frameon=False, loc="upper right")
    else:
        axes.text(0.5, 0.5, "no loss has been recorded yet", ha="center", va="center", transform=axes.transAxes)
    beside = f"{path}.{os.getpid()}.tmp"
    FigureCanvasAgg(figure).print_png(beside)
    os.replace(beside, path)
