"""jobs/grafana.json is a dashboard that Grafana imports and that shows every gauge of the program, and no other."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
from clusters import ROOT

from ray_muloco.runtime import gauges

GAUGES = {f"ray_{name}" for name in gauges.NAMES}  # Ray puts `ray_` before the names of ray.util.metrics
LABELS = {"run", "direction"}
WORDS = {"max", "by"}  # of PromQL that the dashboard uses
GRID_COLUMNS = 24


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "jobs/grafana.json").read_text(encoding="utf-8"))


def targets(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    """Metrics, labels and words of a query; what stands in quotes is a value."""
    return set(re.findall(r"[A-Za-z_:][\w:]*", re.sub(r'"[^"]*"', "", expression)))


def test_every_gauge_is_shown_and_no_other(dashboard: dict[str, Any]) -> None:
    shown = set()
    for target in targets(dashboard):
        metrics = names_in(target["expr"]) - LABELS - WORDS
        assert len(metrics) == 1, target["expr"]
        assert metrics <= GAUGES, target["expr"]
        shown |= metrics
    assert shown == GAUGES


def test_every_query_keeps_to_the_chosen_runs_and_tells_them_apart(dashboard: dict[str, Any]) -> None:
    for target in targets(dashboard):
        assert target["expr"].count("(") == target["expr"].count(")")
        assert 'run=~"$run"' in target["expr"]
        assert re.match(r"max by \(run\b", target["expr"])
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == set(re.findall(r"\w+", target["expr"].split("(")[1].split(")")[0]))
    [byte_query] = [target["expr"] for target in targets(dashboard) if "ray_muloco_bytes" in target["expr"]]
    assert f'direction=~"{"|".join(gauges.DIRECTIONS)}"' in byte_query
    assert "by (run, direction)" in byte_query


def test_panels_lie_on_the_grid_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        assert set(box) == {"x", "y", "w", "h"}
        assert min(box["x"], box["y"]) >= 0
        assert min(box["w"], box["h"]) > 0
        assert box["x"] + box["w"] <= GRID_COLUMNS
    for one, other in combinations(dashboard["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (one["title"], other["title"])


def test_ids_are_unique(dashboard: dict[str, Any]) -> None:
    identities = [panel["id"] for panel in dashboard["panels"]]
    assert len(identities) == len(set(identities))
    assert all(isinstance(identity, int) and identity > 0 for identity in identities)
    for panel in dashboard["panels"]:
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0


def test_the_data_source_and_the_run_are_chosen_in_the_dashboard(dashboard: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "run"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["run"]["type"] == "query"
    assert re.fullmatch(r"label_values\((\w+), run\)", variables["run"]["query"]["query"])
    assert names_in(variables["run"]["definition"]) & GAUGES
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert all(holder["datasource"] == chosen for holder in (*dashboard["panels"], *targets(dashboard), variables["run"]))


def test_it_has_what_grafana_asks_of_a_dashboard(dashboard: dict[str, Any]) -> None:
    assert dashboard["title"]
    assert re.fullmatch(r"[\w-]{1,40}", dashboard["uid"])
    assert dashboard["schemaVersion"] >= 36  # data sources named by type and uid
    assert "id" not in dashboard  # Grafana gives it; one of another Grafana would be refused
    for panel in dashboard["panels"]:
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["title"]
        assert panel["description"]
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}
