"""One run as one page: report.html and loss.png from config.json, metrics.jsonl and result.json.

The page needs nothing but itself: no script, no font, no address. Missing files, rounds and figures leave notes, not errors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
from dataclasses import dataclass
from html import escape
from typing import Any

from ray_muloco import presets
from ray_muloco.analysis import formats, plots
from ray_muloco.analysis.page import STYLE, figures, section, table
from ray_muloco.analysis.participation import average, lost_tokens, participation
from ray_muloco.analysis.plots import Chart
from ray_muloco.config import flatten
from ray_muloco.errors import ConfigError
from ray_muloco.training.metrics import UNITS

MAX_TABLE_ROWS = 24
PACKAGES = ("ray_muloco", "torch", "ray", "numpy", "pyarrow", "tokenizers", "safetensors", "mlflow")


@dataclass(frozen=True, slots=True)
class Run:
    """What a run's directory says; any part may be empty."""

    directory: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    result: dict[str, Any]

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.result.get("name") or os.path.basename(os.path.abspath(self.directory)))

    def figure(self, key: str) -> Any:
        """A figure of result.json, or of the configuration."""
        value = self.result.get(key)
        return self.config.get(key) if value is None else value


def read_run(run_dir: str) -> Run:
    """Read a run's directory. ConfigError when it holds neither config.json nor metrics.jsonl.

    A line of metrics.jsonl that is not a whole record (a crash in mid-write) is passed over; of a round written twice
    the later line counts.
    """
    names = ("config.json", "metrics.jsonl")
    if not any(os.path.exists(os.path.join(run_dir, name)) for name in names):
        raise ConfigError("RUN", run_dir, "must be the directory of a run", f"neither {' nor '.join(names)} is there")
    by_round: dict[float, dict[str, Any]] = {}
    for line in _text(os.path.join(run_dir, "metrics.jsonl")).splitlines():
        record = _parsed(line)
        number = record.get("round")
        if isinstance(number, int | float) and math.isfinite(number):
            by_round[number] = record
    records = [by_round[number] for number in sorted(by_round)]
    return Run(run_dir, _parsed(_text(os.path.join(run_dir, "config.json"))), records, _parsed(_text(os.path.join(run_dir, "result.json"))))


def write_report(run_dir: str) -> str:
    """Write loss.png and report.html into a run's directory; returns the path of report.html."""
    run = read_run(run_dir)
    plots.write_loss_plot(os.path.join(run_dir, "loss.png"), run.records, _title(run))
    path = os.path.join(run_dir, "report.html")
    beside = f"{path}.{os.getpid()}.tmp"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(render(run))
    os.replace(beside, path)
    return path


def render(run: Run) -> str:
    """The page as text."""
    rate = plots.round_chart("Inner learning rate", run.records, ["inner_lr"], "No learning rate was recorded.", from_zero=True)
    speed = plots.round_chart("Tokens a second, without evaluation", run.records, ["tokens_per_second"], "No rate was recorded.", from_zero=True)
    sections = [
        _headline(run),
        section("Loss", figures([*plots.loss_charts(run.records), rate]) + _evaluations(run)),
        section("Participation", participation(run.records)),
        section("Where the time went", figures([plots.phase_chart(run.records), speed]) + _phases(run)),
        section("The outer step", figures(_outer_charts(run))),
        section("Configuration", _configuration(run)),
        section("What the figures are", f"<details><summary>Columns of metrics.jsonl</summary>{table(list(UNITS.items()), ('column', 'meaning'))}</details>"),
        section("Environment", table([(name, value) for name, value in environment().items()], ("package", "version"))),
    ]
    title = escape(_title(run))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n'
        + "\n".join(sections)
        + "\n</main></body></html>\n"
    )


# ---- sections


def _title(run: Run) -> str:
    method, preset = run.figure("method"), run.figure("preset")
    what = ", ".join(str(part) for part in (method, preset) if part)
    replicas = run.config.get("scaling", {}).get("num_replicas") if isinstance(run.config.get("scaling"), dict) else None
    return f"{run.name}: {what}" + (f", K = {replicas}" if replicas else "") if what else run.name


def _headline(run: Run) -> str:
    figures = headline(run)
    tiles = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures.items())
    facts = [
        (name, str(run.result[key]))
        for key, name in (("checkpoint", "checkpoint"), ("theta_digest", "digest of the parameters"))
        if run.result.get(key) not in (None, "")
    ]
    return f"<header><h1>{escape(_title(run))}</h1><p>{escape(_state(run))}</p></header>\n<div class='tiles'>{tiles}</div>\n" + (table(facts) if facts else "")


def _state(run: Run) -> str:
    if not run.records:
        return "No round has been committed yet."
    if not run.result:
        return f"Not finished: the figures are those of its {len(run.records)} rounds so far."
    if run.result.get("status") == "stopped":
        return "Stopped on request and checkpointed; the same command goes on."
    return "Finished."


def headline(run: Run) -> dict[str, str]:
    """Name → figure as text, in reading order; from result.json, or from the rounds there are."""
    records, result = run.records, run.result
    last = records[-1] if records else {}
    evaluated = [record for record in records if formats.is_number(record.get("val_loss"))]
    latest = evaluated[-1] if evaluated else {}
    seconds = math.fsum(plots.round_seconds(record) for record in records)
    traffic = {key: (plots.cumulative(records, key) or [None])[-1] for key in ("uplink_bytes", "downlink_bytes", "heal_bytes")}

    def of(key: str, otherwise: Any) -> Any:
        return result[key] if result.get(key) is not None else otherwise

    tokens = of("tokens", last.get("tokens"))
    return {
        "validation loss, nats a token": formats.fixed(of("val_loss", latest.get("val_loss"))),
        "validation bits a byte": formats.fixed(of("val_bits_per_byte", latest.get("val_bits_per_byte"))),
        "training loss, last round": formats.fixed(last.get("train_loss")),
        "parameters": formats.count(result.get("num_params")),
        "tokens": formats.count(tokens),
        "rounds": formats.count(of("rounds", last.get("round"))),
        "time": formats.seconds(of("seconds", seconds)),
        "tokens a second, evaluation included": formats.count(of("tokens_per_second", tokens / seconds if seconds and formats.is_number(tokens) else None)),
        "sent up": formats.num_bytes(of("uplink_bytes", traffic["uplink_bytes"])),
        "sent down": formats.num_bytes(of("downlink_bytes", traffic["downlink_bytes"])),
        "first and healing transfers": formats.num_bytes(of("heal_bytes", traffic["heal_bytes"])),
        "participants, mean": formats.fixed(of("participants_mean", average(records, "participants")), 3),
        "alive, mean": formats.fixed(of("alive_mean", average(records, "alive")), 3),
        "effective replicas, mean": formats.fixed(average(records, "effective_replicas"), 3),
        "tokens lost": lost_tokens(records).partition(" (")[0],
        "generation": formats.count(of("generations", last.get("generation"))),
    }


def _evaluations(run: Run) -> str:
    evaluated = [record for record in run.records if formats.is_number(record.get("val_loss"))]
    if not evaluated:
        return "<p class='note'>The parameters have not been evaluated.</p>"
    shown = evaluated[:: max(1, math.ceil(len(evaluated) / MAX_TABLE_ROWS))]
    shown = shown if shown[-1] is evaluated[-1] else [*shown, evaluated[-1]]
    rows = [
        (
            formats.count(r.get("round")),
            formats.count(r.get("tokens")),
            formats.fixed(r.get("train_loss")),
            formats.fixed(r.get("val_loss")),
            formats.fixed(r.get("val_bits_per_byte")),
        )
        for r in shown
    ]
    some = f"{len(rows)} of {len(evaluated)} evaluations" if len(rows) < len(evaluated) else "all evaluations"
    return f"<details><summary>Table: {some}</summary>{table(rows, ('round', 'tokens', 'training', 'validation', 'bits a byte'))}</details>"


def _phases(run: Run) -> str:
    totals = {key: math.fsum(value for value in column if value is not None) for key, column in plots.phases(run.records).items()}
    whole = math.fsum(totals.values())
    if not whole:
        return ""
    rows = [(plots.LABELS[key], formats.seconds(total), f"{100 * total / whole:.1f} %") for key, total in totals.items()]
    return table(rows, ("phase", "in the run", "share"))


def _outer_charts(run: Run) -> list[Chart]:
    data_parallel = str(run.figure("method") or "").endswith("-dp")
    no_norms = "A data-parallel method has no pseudogradient." if data_parallel else "No norms were recorded."
    no_cosine = no_norms if data_parallel else "A cosine needs two replicas."
    return [
        plots.round_chart("Norms", run.records, ["pseudogradient_norm", "outer_update_norm"], no_norms, from_zero=True),
        plots.round_chart("Cosine between replicas", run.records, ["replica_cosine"], no_cosine),
    ]


def _configuration(run: Run) -> str:
    if not run.config:
        return "<p class='note'>config.json is missing or cannot be read.</p>"
    flat = flatten(run.config)
    usual: dict[str, Any] = {}
    with contextlib.suppress(ConfigError, KeyError, TypeError, ValueError):
        usual = flatten(presets.get(flat["preset"], flat["method"], flat["scaling.num_replicas"]).to_dict())
    changed = {name for name, value in flat.items() if name in usual and usual[name] != value and not name.startswith("run.")}
    groups: dict[str, list[str]] = {}
    for name, value in flat.items():
        group, _, field = name.rpartition(".")
        was = f" <small>preset: {escape(_plain(usual[name]))}</small>" if name in changed else ""
        row = f"<tr{' class=changed' if was else ''}><td>{escape(field)}</td><td>{escape(_plain(value))}{was}</td></tr>"
        groups.setdefault(group, []).append(row)
    cards = "".join(
        f"<div class='card'><h3>{escape(group or 'training')}</h3><table><tbody>{''.join(rows)}</tbody></table></div>" for group, rows in groups.items()
    )
    said = f"{len(changed)} of {len(flat)} settings differ from the preset {flat.get('preset')}." if usual else ""
    return f"<p class='note'>{escape(said)}</p><div class='cards'>{cards}</div>"


def environment() -> dict[str, str]:
    """Versions of what a run depends on, where this report was written; nothing is imported for it."""
    versions = {"Python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} logical CPUs"}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _plain(value: Any) -> str:
    return "" if value == "" else f"{value:,}".replace(",", " ") if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
