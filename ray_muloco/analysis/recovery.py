"""What a fault drill came to: seconds from fault to next commit, goodput, samples lost or repeated. Pure arithmetic.

Legend: records are metrics.jsonl's, faults the lines of a drill's log, K the configured replicas.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def seconds_between(records: Sequence[Record]) -> list[float]:
    """Seconds from each commit to the next."""
    return [b["commit_time"] - a["commit_time"] for a, b in itertools.pairwise(records)]


def pace(records: Sequence[Record]) -> float:
    """Committed tokens a second, from the first commit to the last; 0 for fewer than two."""
    seconds = records[-1]["commit_time"] - records[0]["commit_time"] if len(records) > 1 else 0.0
    return (records[-1]["tokens"] - records[0]["tokens"]) / seconds if seconds else 0.0


def goodput(records: Sequence[Record], full_pace: float, num_replicas: int) -> float:
    """Tokens committed over those that the living replicas could have trained: Σ Δtokens / Σ Δt · full_pace · alive / K.

    alive of an interval is the number at its beginning, so whoever dies in it counts as living: the work lost with it is a loss.
    """
    possible = sum((b["commit_time"] - a["commit_time"]) * full_pace * a["alive"] / num_replicas for a, b in itertools.pairwise(records))
    return (records[-1]["tokens"] - records[0]["tokens"]) / possible if possible else 0.0


def next_commits(records: Sequence[Record], faults: Iterable[Record]) -> list[float]:
    """Seconds from each fault to the next commit that stayed; faults after the last commit have none."""
    commits = [record["commit_time"] for record in records]
    later = [[commit - fault["time"] for commit in commits if commit >= fault["time"]] for fault in faults]
    return [waits[0] for waits in later if waits]


def quiet_seconds(records: Sequence[Record], faults: Iterable[Record], num_replicas: int) -> list[float]:
    """Seconds of rounds without a fault in them, between commits at which all K replicas lived and none was getting ready."""
    times = [fault["time"] for fault in faults]

    def whole(record: Record) -> bool:
        return record["alive"] == num_replicas and not record["healing"] and not record["pending"]

    return [
        b["commit_time"] - a["commit_time"]
        for a, b in itertools.pairwise(records)
        if whole(a) and whole(b) and not any(a["commit_time"] <= t <= b["commit_time"] for t in times)
    ]


def delays(records: Sequence[Record], faults: Sequence[Record], kind: str, usual: float) -> list[float]:
    """By how many seconds the round in flight at each fault of a kind committed later than an undisturbed round.

    A round that another kind of fault struck too says nothing of this kind.
    """
    found: list[float] = []
    for a, b in itertools.pairwise(records):
        struck = [fault["kind"] for fault in faults if a["commit_time"] <= fault["time"] < b["commit_time"]]
        if set(struck) == {kind}:
            found += [b["commit_time"] - a["commit_time"] - usual] * len(struck)
    return found


def audit_samples(records: Iterable[Record], cursor: int, returned: Iterable[Sequence[int]], skipped: int) -> tuple[int, int]:
    """(lost, repeated) samples of a run: below the cursor each is in one commit, waits among the returned, or was skipped by name."""
    events = sorted(tuple(pair) for record in records for pair in record["samples"])
    waiting = [(r[0], r[1]) for r in returned]
    repeated, end, covered = 0, 0, 0
    for start, stop in sorted([*events, *waiting]):
        repeated += max(0, min(end, stop) - start)
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return max(0, cursor - covered - skipped), repeated + max(0, end - cursor)


def recovery_report(
    records: Sequence[Record], faults: Sequence[Record], manifest: Mapping[str, Any], undisturbed: Sequence[Record], num_replicas: int
) -> dict[str, Any]:
    """The figures of a drill. undisturbed: records of the same run without faults; manifest: of the drilled run's last checkpoint."""
    lost, repeated = audit_samples(records, manifest["cursor"], manifest["returned_ranges"], manifest["skipped_samples"])
    quiet = quiet_seconds(records, faults, num_replicas) or seconds_between(undisturbed)
    usual = statistics.median(quiet) if quiet else 0.0
    waits = next_commits(records, faults)
    full_pace = pace(undisturbed)
    reasons = [reason for record in records for reason in record["reasons"]]
    kills = delays(records, faults, "kill", usual)
    return {
        "faults": len(faults),
        "by_kind": dict(Counter(fault["kind"] for fault in faults)),
        "by_phase": dict(Counter(fault["phase"] for fault in faults)),
        "rounds": len(records),
        "round_seconds": usual,
        "seconds_to_next_commit": waits,
        "rounds_to_next_commit": [wait / usual for wait in waits] if usual else [],
        "kill_delay_seconds": kills,
        "kill_delay_median": statistics.median(kills) if kills else None,
        "goodput": goodput(records, full_pace, num_replicas),
        "pace_ratio": pace(records) / full_pace if full_pace else 0.0,
        "participants_mean": statistics.fmean(record["participants"] for record in records),
        "alive_mean": statistics.fmean(record["alive"] for record in records),
        "tokens_lost": sum(record["tokens_lost"] for record in records),
        "samples_lost": lost,
        "samples_repeated": repeated,
        "digests_agree": not any("its θ differs" in reason or "with different parameters" in reason for reason in reasons),
        "val_loss": last_loss(records),
        "val_loss_undisturbed": last_loss(undisturbed),
    }


def unsound(report: Mapping[str, Any]) -> list[str]:
    """Why a drill has not passed, a clause for each reason; empty when all scheduled faults happened and none of them did harm.

    report: `recovery_report`'s figures, and what was `scheduled` and which `leaks` were found.
    """
    reasons = {
        f"{report['faults']} of {report['scheduled']} scheduled faults happened": report["faults"] != report["scheduled"],
        f"{report['samples_lost']} samples were lost": report["samples_lost"],
        f"{report['samples_repeated']} samples were trained twice": report["samples_repeated"],
        "digests disagreed": not report["digests_agree"],
        f"left behind: {', '.join(report['leaks'])}": report["leaks"],
    }
    return [reason for reason, holds in reasons.items() if holds]


def last_loss(records: Sequence[Record]) -> float | None:
    """Validation loss of the last round that was evaluated."""
    return next((record["val_loss"] for record in reversed(records) if record["val_loss"] is not None), None)


def growth(usage: Sequence[Record]) -> dict[str, float]:
    """What was held in the last fifth of the rounds over what was held in the second fifth, as medians; while the coordinator that lived longest did."""
    longest = Counter(entry["pid"] for entry in usage).most_common(1)
    own = [entry for entry in usage if longest and entry["pid"] == longest[0][0]]
    fifth = len(own) // 5
    if fifth < 2:
        return {}
    early, late = own[fifth : 2 * fifth], own[-fifth:]
    names = [name for name in own[-1] if name not in ("round", "pid")]
    middle = {name: tuple(statistics.median(e.get(name, 0) for e in part) for part in (late, early)) for name in names}
    return {name: after / before if before else 1.0 + after for name, (after, before) in middle.items()}
