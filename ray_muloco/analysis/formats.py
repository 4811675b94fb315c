"""Numbers as people read them, for displays and reports. None and what is not finite become a dash."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

DASH = "–"
_BLOCKS = "▁▂▃▄▅▆▇█"


def is_number(value: object) -> bool:
    """Whether a value of a record is a finite number; beyond 1e300 it is an overflow on its way, and sums would not be finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def count(value: float | None, unit: str = "") -> str:
    """1234567 → 1.23M: three digits and a power of a thousand, with a unit if there is one."""
    return _scaled(value, ("", "k", "M", "G", "T", "P"), unit)


def num_bytes(value: float | None) -> str:
    """1234567 → 1.23 MB, in powers of a thousand."""
    return _scaled(value, (" B", " kB", " MB", " GB", " TB", " PB"), "")


def seconds(value: float | None) -> str:
    """4000 → 1 h 6 min; below a minute with three digits."""
    if value is None or not is_number(value) or value < 0:
        return DASH
    if value < 59.95:
        return f"{value:.0f} s" if value >= 9.95 or value == 0 else f"{value:.1f} s" if value >= 0.0995 else f"{value * 1e3:.3g} ms"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def fixed(value: float | None, digits: int = 4) -> str:
    """A loss or norm with so many significant digits: 2.345, 0.01234, 1.2e-05."""
    if value is None or not is_number(value):
        return DASH
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(digits - 2, 0)}e}"
    if abs(value) >= 10**digits - 0.5:
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def trimmed(text: str) -> str:
    """2.50M → 2.5M, 30.0k → 30k: for axes, where the zeros say nothing."""
    return re.sub(r"\.(\d*?)0+(?!\d)", lambda found: f".{found[1]}" if found[1] else "", text)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A row of blocks, newest last: the means of `width` stretches of the finite values, from lowest to highest."""
    numbers = [value for value in values if value is not None and is_number(value)]
    if not numbers or width < 1:
        return ""
    cells = min(width, len(numbers))
    bounds = [len(numbers) * cell // cells for cell in range(cells + 1)]
    means = [math.fsum(numbers[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    return "".join(_BLOCKS[min(7, int(8 * (mean - low) / (high - low)))] if high > low else _BLOCKS[0] for mean in means)


def _scaled(value: float | None, prefixes: tuple[str, ...], unit: str) -> str:
    if value is None or not is_number(value):
        return DASH
    scaled, power = float(value), 0
    while abs(scaled) >= 999.5 and power < len(prefixes) - 1:
        scaled, power = scaled / 1000, power + 1
    text = f"{scaled:.0f}" if power == 0 and scaled == int(scaled) else f"{scaled:#.3g}".rstrip(".")
    return f"{text}{prefixes[power]}{unit}"
