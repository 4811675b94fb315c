"""Reports: one page and one plot from whatever a run left behind, complete, readable and self-contained."""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ray_muloco import presets
from ray_muloco.analysis import formats, plots, svg
from ray_muloco.analysis.participation import MAX_REASONS, lost_tokens, participation
from ray_muloco.analysis.report import headline, read_run, write_report
from ray_muloco.config import Method
from ray_muloco.errors import ConfigError
from ray_muloco.training.metrics import summarize

VOID = {"meta", "line", "path", "rect", "circle", "i"}


def record_of(number: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl as a healthy muloco run writes it."""
    return {
        "round": number, "tokens": number * 1000, "train_loss": 5 / number**0.3, "val_loss": 4.9 / number**0.3 if number % 5 == 0 else None,
        "val_bits_per_byte": 2.0 if number % 5 == 0 else None, "inner_lr": 0.01, "participants": 4, "alive": 4, "generation": 1, "num_steps": 10,
        "pseudogradient_norm": 2.0, "outer_update_norm": 1.5, "replica_cosine": 0.4, "grad_norm": 1.0, "uplink_bytes": 4000, "downlink_bytes": 4000,
        "heal_bytes": 0, "seconds_inner": 1.0, "seconds_exchange": 0.2, "seconds_outer": 0.1, "seconds": 1.5, "tokens_per_second": 700.0, "reasons": [],
    } | changes  # fmt: skip


def make_run(directory: Path, records: list[dict[str, Any]], *, method: Method = "muloco", finished: bool = True, tail: str = "") -> Path:
    """A run's directory."""
    run = directory / "a-run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(presets.nano(method, 4).override({"inner.lr": 0.123}).to_dict()))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    if finished and records:
        identity = {"name": "a-run", "method": method, "preset": "nano", "num_params": 123_456, "theta_digest": -77, "checkpoint": "/runs/a-run/checkpoints/x"}
        (run / "result.json").write_text(json.dumps(summarize(records, identity)))
    return run


class _Balanced(HTMLParser):
    """Fails on a tag that is closed out of turn, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID or tag == "line":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID and tag != "line":
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(run: Path) -> tuple[str, str]:
    """Write the report of a run; its source and its text."""
    page = Path(write_report(str(run))).read_text(encoding="utf-8")
    parser = _Balanced()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    width, height = struct.unpack(">II", (run / "loss.png").read_bytes()[16:24])
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert min(width, height) >= 500
    assert sorted(path.name for path in run.iterdir() if "tmp" in path.name) == []
    return page, " ".join(" ".join(parser.text).split())


def test_a_finished_run_has_every_figure_of_its_result(tmp_path: Path) -> None:
    run = make_run(tmp_path, [record_of(number) for number in range(1, 21)])
    page, text = page_of(run)
    result = json.loads((run / "result.json").read_text())
    assert len(page) > 5000
    assert "Finished." in text
    for figure in (formats.fixed(result["val_loss"]), "123k", "20.0k", "30 s", "80.0 kB", "-77", "/runs/a-run/checkpoints/x"):
        assert figure in text
    for part in (
        "Loss against tokens",
        "Loss against time",
        "Loss against bytes exchanged",
        "Participation",
        "Seconds of a round",
        "Norms",
        "Cosine",
        "Configuration",
        "torch",
    ):
        assert part in text
    assert page.count("<svg") == 9


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    """No address, no script, nothing to fetch; both themes, phones and paper are provided for."""
    page, _ = page_of(make_run(tmp_path, [record_of(number) for number in range(1, 8)]))
    assert re.findall(r"(?:https?:)?//[a-z]", page) == []
    assert re.findall(r"<script|<link|<img|@import|url\(", page) == []
    for provision in ("prefers-color-scheme:dark", "width=device-width", "@media print", "<!doctype html>"):
        assert provision in page


def test_the_configuration_marks_what_differs_from_the_preset(tmp_path: Path) -> None:
    _, text = page_of(make_run(tmp_path, [record_of(1)]))
    assert "1 of " in text
    assert "0.123 preset: 0.02" in text


def test_data_parallel_runs_say_why_charts_are_missing(tmp_path: Path) -> None:
    nothing = {"pseudogradient_norm": None, "replica_cosine": None}
    page, text = page_of(make_run(tmp_path, [record_of(number, **nothing) for number in range(1, 8)], method="adamw-dp"))
    assert "A data-parallel method has no pseudogradient." in text
    assert page.count("<svg") == 8


@pytest.mark.parametrize(
    "changes", [{}, {"val_loss": 3.0}, {"train_loss": None, "seconds": None}, {"seconds": 0.0, "tokens": 0, "uplink_bytes": 0, "downlink_bytes": 0}]
)
def test_a_run_of_one_round_is_drawn(changes: dict[str, Any], tmp_path: Path) -> None:
    page, _ = page_of(make_run(tmp_path, [record_of(1, **changes)], finished=False))
    assert len(page) > 5000
    assert "nan" not in re.sub(r"<style>.*</style>", "", page).lower().replace("nano", "")


def test_a_run_without_rounds_or_figures_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path, [])
    page, text = page_of(run)
    assert len(page) > 5000
    assert "No round has been committed yet." in text
    (run / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2, "reasons": null}\n')
    (run / "config.json").write_text("not json")
    _, text = page_of(run)
    assert "config.json is missing or cannot be read." in text


def test_a_run_that_goes_on_is_reported_so_far(tmp_path: Path) -> None:
    """No result.json yet, and the last line is half-written: the whole rounds count."""
    run = make_run(tmp_path, [record_of(number) for number in range(1, 7)], finished=False, tail='{"round": 7, "tokens": 70')
    _, text = page_of(run)
    assert "Not finished: the figures are those of its 6 rounds so far." in text
    figures = headline(read_run(str(run)))
    assert figures["tokens"] == "6.00k"
    assert figures["time"] == "9.0 s"
    assert figures["sent up"] == "24.0 kB"
    assert figures["validation loss, nats a token"] == formats.fixed(4.9 / 5**0.3)


def test_a_round_written_twice_counts_once_and_rounds_are_in_order(tmp_path: Path) -> None:
    run = make_run(tmp_path, [record_of(2), record_of(1), record_of(2, train_loss=9.0)], finished=False, tail="[1]\nnull\n17\n")
    assert [(record["round"], record["train_loss"]) for record in read_run(str(run)).records] == [(1, 5.0), (2, 9.0)]


def test_changes_of_membership_are_drawn_and_told(tmp_path: Path) -> None:
    records = [
        record_of(1),
        record_of(2, alive=3, participants=3, generation=2, reasons=["replica 1 was <lost> & gone"]),
        record_of(3, alive=3, participants=3, generation=2),
    ]
    page, text = page_of(make_run(tmp_path, records))
    assert page.count('class="mark"') == 1
    assert "replica 1 was <lost> & gone" in text
    assert "<lost>" not in page


def test_participation_is_drawn_by_state_and_summed_up(tmp_path: Path) -> None:
    """A lost replica, asked for anew, healing and back: four lines, the tokens it cost, and what the merged replicas were worth."""
    full = {"healing": 0, "pending": 0, "effective_replicas": 4.0, "tokens_merged": 1000, "tokens_lost": 0}
    records = [
        record_of(1, **full),
        record_of(2, **full | {"alive": 3, "participants": 3, "pending": 1, "effective_replicas": 3.0, "tokens_merged": 750, "tokens_lost": 250}),
        record_of(3, **full | {"alive": 3, "participants": 2, "healing": 1, "effective_replicas": 2.0, "tokens_merged": 500}),
        record_of(4, **full),
    ]
    page, text = page_of(make_run(tmp_path, records))
    chart = plots.participation_chart(records)
    assert re.findall(r"</i>(\w+)", chart.keys) == ["alive", "participants", "pending", "healing"]
    assert len(re.findall(r"<path", chart.svg)) == 4
    assert chart.svg in page
    assert "effective replicas, mean 3.25" in text
    assert "tokens lost 250 (7.7 % of those trained)" in text
    assert headline(read_run(str(tmp_path / "a-run")))["tokens lost"] == "250"


def test_records_of_older_versions_have_the_lines_they_know_and_dashes(tmp_path: Path) -> None:
    records = [record_of(number) for number in range(1, 5)]
    _, text = page_of(make_run(tmp_path, records))
    assert re.findall(r"</i>(\w+)", plots.participation_chart(records).keys) == ["alive", "participants"]
    assert "effective replicas, mean –" in text
    assert "tokens lost –" in text
    assert "Nobody was lost, healed or ejected." in text
    assert "Changes of membership were not recorded." in participation([{"round": 1}])


def test_a_run_that_got_the_new_figures_on_the_way_sums_the_rounds_that_have_them() -> None:
    records = [record_of(1), record_of(2, tokens_merged=500, tokens_lost=250), record_of(3, tokens_merged=500, tokens_lost=None)]
    assert lost_tokens(records) == "250 (50.0 % of those trained)"
    assert lost_tokens([record_of(1, tokens_merged=0, tokens_lost=3)]) == "3"
    assert lost_tokens([record_of(1, tokens_merged=10**6, tokens_lost=3)]) == "3 (under 0.1 % of those trained)"


def test_the_newest_reasons_are_told_and_the_older_ones_counted(tmp_path: Path) -> None:
    """At most MAX_REASONS, newest first, rounds by their whole number; a sentence says how many are left out."""
    records = [record_of(12_000 + number, reasons=[f"replica {number} <b>lost</b>", f"replica {number} joins"]) for number in range(1, 151)]
    page, text = page_of(make_run(tmp_path, records))
    assert f"The newest {MAX_REASONS} of 300: 100 older ones are left out here and are in metrics.jsonl." in text
    told = re.findall(r"<tr><td>(\d+)</td><td>replica (\d+) (?:&lt;b&gt;lost&lt;/b&gt;|joins)</td>", page)
    assert len(told) == MAX_REASONS
    assert (told[0], told[-1]) == (("12150", "150"), ("12051", "51"))
    assert "<b>lost" not in page
    few = tmp_path / "few"
    few.mkdir()
    assert "left out here" not in page_of(make_run(few, records[:100]))[1]


def test_marks_never_run_together() -> None:
    """Many changes become short marks above the chart, each telling its first round and how many it stands for."""
    marked = [record_of(number, reasons=[f"because {number} & so on"] if number % 3 == 0 else []) for number in range(1, 3001)]
    drawn = plots.participation_chart(marked).svg
    places = [float(x) for x in re.findall(r'class="mark" x1="([\d.]+)"', drawn)]
    assert len(places) <= (svg.WIDTH - svg.LEFT - svg.RIGHT) / svg.MARK_PIXELS + 1
    assert all(b - a > 0.2 for a, b in itertools.pairwise(places))
    assert set(re.findall(r'class="mark" [^>]*y2="(\d+)"', drawn)) == {str(svg.TOP - 2)}
    assert "round 3: because 3 &amp; so on … and " in drawn
    assert len(plots.membership_marks(marked)) == 1000
    long = plots.membership_marks([record_of(1, reasons=["x" * 10_000])])
    assert len(long[0].text) < 300


def test_a_spike_of_pending_replicas_survives_a_long_run() -> None:
    records = [record_of(number, healing=0, pending=3 if number == 5003 else 0) for number in range(1, 10_001)]
    chart = plots.participation_chart(records).svg
    spike = re.findall(r'<path class="s2 broad" d="([^"]*)"', chart)[0]
    heights = {float(y) for y in re.findall(r"V([\d.]+)", spike)}
    assert len(heights) == 2


def test_a_long_run_stays_a_light_page(tmp_path: Path) -> None:
    """Points are averaged, dips in participation survive it."""
    records = [record_of(number, participants=1 if number == 5003 else 4) for number in range(1, 10_001)]
    page, _ = page_of(make_run(tmp_path, records))
    assert len(page) < 300_000
    steps = svg.thinned([(float(record["round"]), float(record["participants"])) for record in records], min)
    assert len(steps) <= svg.MAX_POINTS
    assert min(y for _, y in steps) == 1.0
    assert (steps[0][0], steps[-1][0]) == (1.0, 10_000.0)


def test_what_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be the directory of a run.*config\.json"):
        write_report(str(tmp_path / "nowhere"))


def test_the_report_does_not_import_matplotlib_until_it_draws() -> None:
    code = "import sys, ray_muloco.analysis.report; sys.exit(any(m in sys.modules for m in ('matplotlib', 'torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_phases_and_their_rest_add_up_to_the_round() -> None:
    columns = plots.phases([record_of(1), record_of(2, seconds=None), record_of(3, seconds=0.5)])
    assert columns["seconds_rest"] == [pytest.approx(0.2), None, 0.0]


# ---- numbers and ticks


@given(st.floats(-1e12, 1e12), st.floats(0, 1e12), st.integers(2, 8))
@example(0.0, 5e-324, 2)
def test_ticks_enclose_what_they_measure_in_even_steps(low: float, width: float, about: int) -> None:
    high = low + width
    found = svg.ticks(low, high, about)
    step = found[1] - found[0]
    slack = 1e-6 * step + 1e-9 * abs(low)
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= about + 3
    assert all(b - a == pytest.approx(step, rel=1e-3, abs=1e-9 * abs(low)) for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(("text", "expected"), [
    (formats.count(0), "0"), (formats.count(999), "999"), (formats.count(999.6), "1.00k"), (formats.count(1_234_567), "1.23M"), (formats.count(100_000), "100k"),
    (formats.count(None), "–"), (formats.count(math.nan), "–"), (formats.count(-2_500), "-2.50k"), (formats.num_bytes(1e9), "1.00 GB"), (formats.num_bytes(12), "12 B"),
    (formats.seconds(0.0123), "12.3 ms"), (formats.seconds(0), "0 s"), (formats.seconds(59.96), "1 min 00 s"), (formats.seconds(4000), "1 h 06 min"), (formats.seconds(200_000), "2 d 7 h"),
    (formats.seconds(None), "–"), (formats.seconds(-1), "–"), (formats.fixed(2.0), "2.000"), (formats.fixed(0), "0.000"), (formats.fixed(1e-5), "1.00e-05"), (formats.fixed(math.inf), "–"), (formats.fixed(5000, 3), "5000"), (formats.fixed(99_999, 4), "99999"),
    (formats.trimmed("2.50M"), "2.5M"), (formats.trimmed("30.0k"), "30k"), (formats.trimmed("100"), "100"), (formats.trimmed("1.00e-05"), "1e-05"), (formats.trimmed("10.05"), "10.05"),
])  # fmt: skip
def test_numbers_read_as_people_write_them(text: str, expected: str) -> None:
    assert text == expected


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=50), st.integers(0, 20))
def test_a_sparkline_has_at_most_its_width_and_shows_the_fall(values: list[float | None], width: int) -> None:
    assert len(formats.sparkline(values, width)) <= width
    assert formats.sparkline([3.0, 2.0, 1.0], 3) == "█▅▁"
