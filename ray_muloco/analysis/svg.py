"""Small charts as SVG text: colours come from the page's style sheet, so that one drawing serves light, dark and paper.

Coordinates are pixels of a fixed drawing area that the page scales. What is None or not finite is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from ray_muloco.analysis import formats

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 10, 40
MAX_POINTS = 300
MARK_PIXELS = 4  # marks nearer than this become one
MAX_LONG_MARKS = 40  # more would hide the lines: they become short ones above the chart

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: y over x, equally long. Rank in the list gives the colour; a broad step shows beneath a step of the same height.

    peaks: of the points of a long step that become one the highest is drawn; else the lowest.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: Literal["line", "step", "broad", "dots"] = "line"
    peaks: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line at x, with a sentence for who points at it."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Axes:
    """Labels and number formats of a chart; x_from_zero, from_zero: that axis begins at 0."""

    x_label: str
    y_label: str
    x_format: Format
    y_format: Format
    from_zero: bool = False
    x_from_zero: bool = False


class _Frame:
    """Maps data to pixels and draws axes."""

    def __init__(self, xs: Iterable[float], ys: Iterable[float], axes: Axes) -> None:
        xs, ys = list(xs), list(ys)
        self.x_low, self.x_high = _range(min(0.0, min(xs)) if axes.x_from_zero else min(xs), max(xs))
        low, high = min(ys), max(ys)
        self.y_ticks = ticks(min(0.0, low) if axes.from_zero else low, high, 5)
        self.y_low, self.y_high = self.y_ticks[0], self.y_ticks[-1]
        self.x_ticks = [tick for tick in ticks(self.x_low, self.x_high, 5) if self.x_low <= tick <= self.x_high]
        self.axes = axes

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)

    def draw(self, content: list[str]) -> str:
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.axes.y_label)} against {escape(self.axes.x_label)}">']
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{escape(formats.trimmed(self.axes.y_format(tick)))}</text>')
        for tick in self.x_ticks:
            x = self.x(tick)
            anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{escape(formats.trimmed(self.axes.x_format(tick)))}</text>'
            )
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.axes.x_label)}</text>')
        return "".join([*parts, *content, "</svg>"])


def line_chart(series: Sequence[Series], axes: Axes, marks: Sequence[Mark] = ()) -> str:
    """Lines, steps and dots over one pair of axes; empty when there is nothing finite to draw."""
    points = [_finite(one) for one in series]
    everything = [point for one in points for point in one]
    if not everything:
        return ""
    frame = _Frame([x for x, _ in everything], [y for _, y in everything], axes)
    content = _draw_marks(marks, frame)
    for rank, (one, finite) in enumerate(zip(series, points, strict=True)):
        extreme = max if one.peaks else min
        content += _draw(one, thinned(finite, extreme if one.kind in ("step", "broad") else _mean), frame, rank)
    return frame.draw(content)


def _draw_marks(marks: Sequence[Mark], frame: _Frame) -> list[str]:
    """A line for each mark within the frame; of those that would run together the first, which says how many it stands for."""
    columns: dict[int, list[Mark]] = {}
    for mark in marks:
        if frame.x_low <= mark.x <= frame.x_high:
            columns.setdefault(int(frame.x(mark.x) / MARK_PIXELS), []).append(mark)
    bottom = HEIGHT - BOTTOM if len(columns) <= MAX_LONG_MARKS else TOP - 2
    drawn = []
    for group in columns.values():
        x, more = frame.x(group[0].x), f" … and {len(group) - 1} more up to {frame.axes.x_label} {group[-1].x:.0f}" if len(group) > 1 else ""
        drawn.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="1" y2="{bottom}"><title>{escape(group[0].text + more)}</title></line>')
    return drawn


def stacked_chart(x: Sequence[float], layers: Sequence[Series], axes: Axes) -> str:
    """Bars of layers on top of one another, averaged over neighbours when there are many; empty when nothing is finite."""
    kept = [index for index in range(len(x)) if any(is_finite(layer.y[index]) for layer in layers)]
    if not kept:
        return ""
    groups = _groups(kept, 90)
    heights = [[_mean([layer.y[index] or 0.0 for index in group if is_finite(layer.y[index])] or [0.0]) for layer in layers] for group in groups]
    centres = [_mean([x[index] for index in group]) for group in groups]
    step = (x[kept[-1]] - x[kept[0]]) / max(1, len(groups) - 1) or 1.0
    frame = _Frame([centres[0] - step / 2, centres[-1] + step / 2], [0.0, max(math.fsum(bar) for bar in heights)], axes)
    width = (frame.x(step) - frame.x(0.0)) * (0.82 if len(groups) < 40 else 1.04)
    content = []
    for centre, bar in zip(centres, heights, strict=True):
        base = 0.0
        for rank, height in enumerate(bar):
            top = frame.y(base + height)
            content.append(
                f'<rect class="f{rank}" x="{frame.x(centre) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(0.0, frame.y(base) - top):.2f}"/>'
            )
            base += height
    return frame.draw(content)


def legend(labels: Sequence[str]) -> str:
    """Names of the lines beside their colours, in order."""
    return "".join(f'<span class="key"><i class="k{rank}"></i>{escape(label)}</span>' for rank, label in enumerate(labels))


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that enclose [low, high], in steps of 1, 2, 2.5 or 5 times a power of ten."""
    low, high = _range(low, high)
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def is_finite(value: float | None) -> bool:
    """Whether a value can be drawn."""
    return formats.is_number(value)


def thinned(points: Sequence[tuple[float, float]], reduce: Callable[[list[float]], float]) -> list[tuple[float, float]]:
    """At most MAX_POINTS points: stretches of neighbours become (mean x, reduced y); the ends stay."""
    if len(points) <= MAX_POINTS:
        return list(points)
    inner = [(_mean([points[i][0] for i in group]), reduce([points[i][1] for i in group])) for group in _groups(range(1, len(points) - 1), MAX_POINTS - 2)]
    return [points[0], *inner, points[-1]]


def _draw(series: Series, points: Sequence[tuple[float, float]], frame: _Frame, rank: int) -> list[str]:
    if not points:
        return []
    pixels = [(frame.x(x), frame.y(y)) for x, y in points]
    path = f"M{pixels[0][0]:.1f} {pixels[0][1]:.1f}"
    for x, y in pixels[1:]:
        path += f"H{x:.1f}V{y:.1f}" if series.kind in ("step", "broad") else f"L{x:.1f} {y:.1f}"
    drawn = [f'<path class="s{rank}{" broad" if series.kind == "broad" else ""}" d="{path}"/>'] if len(pixels) > 1 else []
    if series.kind == "dots" or len(pixels) == 1:
        for (x, y), (data_x, data_y) in zip(pixels, points, strict=True):
            text = escape(f"{series.label} {frame.axes.y_format(data_y)} at {frame.axes.x_format(data_x)}")
            drawn.append(f'<circle class="f{rank}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"><title>{text}</title></circle>')
    return drawn


def _finite(series: Series) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(series.x, series.y, strict=True) if y is not None and is_finite(x) and is_finite(y)]


def _groups(items: Sequence[int], at_most: int) -> list[list[int]]:
    count = min(at_most, len(items))
    return [list(items[len(items) * i // count : len(items) * (i + 1) // count]) for i in range(count)]


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


TINIEST = 1e-290  # below it a step's own power of ten is no number any more


def _range(low: float, high: float) -> tuple[float, float]:
    """A range that has a width, around the values."""
    if high - low > max(1e-12 * max(abs(low), abs(high)), TINIEST):
        return low, high
    margin = abs(low) * 0.05 if abs(low) > 1e3 * TINIEST else 0.5
    return low - margin, high + margin
