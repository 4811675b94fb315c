"""What a run's records look like: the loss plot as PNG, and the charts of the report.

records: lines of metrics.jsonl in order; any value may be missing or None. matplotlib is imported where it draws.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
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
    "seconds_inner": "inner steps",
    "seconds_exchange": "exchange",
    "seconds_outer": "outer step",
    "seconds_rest": "evaluation and records",
    "tokens_per_second": "tokens a second",
    "inner_lr": "inner learning rate",
}
"""Short names for legends; what each figure is, with its unit, says `training.metrics.UNITS`."""


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
    return [
        _loss_chart("Loss against tokens", "tokens trained on", tokens, formats.count, records),
        _loss_chart("Loss against time", "time", seconds, formats.seconds, records),
        _loss_chart("Loss against bytes exchanged", "bytes up and down, all replicas", traffic, formats.num_bytes, records),
    ]


def _loss_chart(title: str, x_label: str, x: Sequence[float], x_format: Any, records: Records) -> Chart:
    if not any(x):
        return Chart(title, "", "", "Nothing of it was recorded in this run.")
    series = [Series(LABELS["train_loss"], x, values(records, "train_loss")), Series(LABELS["val_loss"], x, values(records, "val_loss"), "dots")]
    svg = line_chart(series, Axes(x_label, "loss in nats a token", x_format, lambda value: formats.fixed(value, 3)))
    return Chart(title, legend([one.label for one in series]), svg, "No loss was recorded.")


def participation_chart(records: Records) -> Chart:
    """Participants and alive replicas by round; a vertical line where the membership's generation changed."""
    rounds = _rounds(records)
    marks = [
        Mark(number, f"round {number:.0f}: generation {record.get('generation')}")
        for number, before, record in zip(rounds[1:], records, records[1:], strict=False)
        if record.get("generation") != before.get("generation")
    ]
    series = [Series(LABELS[key], rounds, values(records, key), "step") for key in ("alive", "participants")]
    svg = line_chart(series, Axes("round", "replicas", formats.count, formats.count, from_zero=True), marks)
    return Chart("Participation", legend([one.label for one in series]), svg, "No participation was recorded.")


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
        series, Axes("round", title, formats.count, lambda value: formats.fixed(value, 3) if abs(value) < 1e4 else formats.count(value), from_zero=from_zero)
    )
    return Chart(title, legend([one.label for one in series]) if len(series) > 1 else "", svg, note)


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
    for key, column, colour, style in (
        ("train_loss", train, "#7a8ba8", {"linewidth": 1.4}),
        ("val_loss", val, "#c2410c", {"linewidth": 2.0, "marker": "o", "markersize": 4}),
    ):
        points = [(x, y) for x, y in zip(tokens, column, strict=True) if x is not None and y is not None]
        if points:
            alone = {"marker": "o"} if len(points) == 1 else {}
            axes.plot(*zip(*points, strict=True), color=colour, label=f"{LABELS[key]}, last {formats.fixed(points[-1][1])}", **{**style, **alone})
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("loss in nats a token")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", wrap=True)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formats.count(value)))
    axes.grid(color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(frameon=False, loc="upper right")
    else:
        axes.text(0.5, 0.5, "no loss has been recorded yet", ha="center", va="center", transform=axes.transAxes)
    beside = f"{path}.{os.getpid()}.tmp"
    FigureCanvasAgg(figure).print_png(beside)
    os.replace(beside, path)
