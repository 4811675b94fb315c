"""The report's account of who took part: replicas by round, what that cost, and what changed and why.

Records of older versions say less; what none of them says is a dash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray_muloco.analysis import formats, plots
from ray_muloco.analysis.page import figure, table
from ray_muloco.analysis.plots import Records
from ray_muloco.training.metrics import mean

MAX_REASONS = 200


def participation(records: Records) -> str:
    """The section's content as HTML."""
    chart = figure(plots.participation_chart(records))
    note = "<p class='note'>A vertical line is a change of membership. Effective replicas: as many as were merged when all of them did the same, fewer when some did less.</p>"
    return f"<div class='charts'>{chart}<div>{table(list(totals(records).items()))}{note}</div></div>{reasons(records)}" if records else chart


def totals(records: Records) -> dict[str, str]:
    """Name → figure as text, over all rounds."""
    told = [record for record in records if plots.reasons_of(record)]
    return {
        "participants, mean": formats.fixed(average(records, "participants"), 3),
        "alive, mean": formats.fixed(average(records, "alive"), 3),
        "effective replicas, mean": formats.fixed(average(records, "effective_replicas"), 3),
        "tokens lost": lost_tokens(records),
        "rounds with a change": f"{len(told)} of {len(records)}",
    }


def average(records: Records, key: str) -> float | None:
    """Mean of a column over the rounds that have it."""
    return mean([value for value in plots.values(records, key) if value is not None])


def lost_tokens(records: Records) -> str:
    """Tokens planned and not merged, and their ratio to those trained on in the same rounds."""
    rows = [record for record in records if formats.is_number(record.get("tokens_lost"))]
    if not rows:
        return formats.DASH
    lost = math.fsum(record["tokens_lost"] for record in rows)
    trained = math.fsum(value for value in plots.values(rows, "tokens_merged") if value is not None)
    return f"{formats.count(lost)} ({share(lost / trained)} of those trained)" if trained else formats.count(lost)


def share(ratio: float) -> str:
    """0.0123 → 1.2 %; what is little and not nothing never reads as nothing."""
    return "under 0.1 %" if 0 < ratio < 0.001 else f"{100 * ratio:.1f} %"


def reasons(records: Records) -> str:
    """A table of the newest changes by round, newest first, and a sentence that says how many are left out."""
    told = [(round_name(record), reason) for record in reversed(records) for reason in plots.reasons_of(record)]
    if not told:
        known = any(isinstance(record.get("reasons"), list) for record in records)
        return f"<p class='note'>{'Nobody was lost, healed or ejected.' if known else 'Changes of membership were not recorded.'}</p>"
    left_out = len(told) - MAX_REASONS
    more = (
        f"<p class='note'>The newest {MAX_REASONS} of {len(told)}: {left_out} older ones are left out here and are in metrics.jsonl.</p>"
        if left_out > 0
        else ""
    )
    return f"<h3>What changed, and why</h3>{more}{table(told[:MAX_REASONS], ('round', 'reason'))}"


def round_name(record: Mapping[str, Any]) -> str:
    """The round's whole number: 12345, not 12.3k, which other rounds are too."""
    return f"{record['round']:.0f}" if formats.is_number(record.get("round")) else formats.DASH
