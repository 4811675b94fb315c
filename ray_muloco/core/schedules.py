"""Learning-rate schedules as functions of progress through the token budget: no step counter, so nothing to restore."""

from __future__ import annotations

import math


def lr_factor(progress: float, *, warmup_fraction: float, final_fraction: float) -> float:
    """Learning rate over its peak at this share of the token budget.

    Rule: p / warmup for p < warmup; then final + (1 - final) (1 + cos(π (p - warmup) / (1 - warmup))) / 2, which is 1 at the
    end of warm-up and `final` at the end of the budget. Without warm-up the peak is at p = 0.
    progress: committed tokens over budget tokens, clamped to [0, 1]; warmup_fraction in [0, 1); final_fraction in [0, 1].
    Source: arXiv 2505.23725 (linear warm-up, cosine to a tenth).
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup_fraction:
        return progress / warmup_fraction
    decayed = (progress - warmup_fraction) / (1.0 - warmup_fraction)
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * decayed))
