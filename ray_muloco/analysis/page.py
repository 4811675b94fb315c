"""The report's pieces: a style sheet for light, dark, phone and paper, and the HTML of sections, figures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ray_muloco.analysis.plots import Chart

STYLE = """
:root{--ink:#1c2433;--soft:#5b6678;--page:#fff;--card:#f6f8fb;--rule:#dde3ec;--c0:#5b7aa8;--c1:#c2410c;--c2:#0f766e;--c3:#a3aab7;--mark:#b45309}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaf2;--soft:#9aa6b8;--page:#12161d;--card:#1a2029;--rule:#2c3542;--c0:#8fb0e0;--c1:#fb923c;--c2:#2dd4bf;--c3:#6b7686;--mark:#fbbf24}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 18px 60px}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:36px 0 12px;padding-top:14px;border-top:1px solid var(--rule)}h3{font-size:1rem;margin:18px 0 6px}
header p,.note{color:var(--soft);margin:6px 0 14px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(148px,1fr));gap:10px;margin:14px 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}.tile span{font-size:.78rem;color:var(--soft);line-height:1.3;display:block}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:16px;margin-bottom:14px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 12px 6px;max-width:640px}
figcaption{font-weight:600;font-size:.95rem}.keys{font-size:.8rem;color:var(--soft);margin-top:2px}.key{margin-right:14px;white-space:nowrap}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:5px;vertical-align:-1px}
svg{display:block;width:100%;height:auto;margin-top:4px}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}svg .label{font-size:12px}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}.mark{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:3 3}
rect{shape-rendering:crispEdges}path{fill:none;stroke-width:1.8;stroke-linejoin:round}path.broad{stroke-width:6;stroke-opacity:.45}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}
.k0{background:var(--c0)}.k1{background:var(--c1)}.k2{background:var(--c2)}.k3{background:var(--c3)}
.scroll{overflow-x:auto;margin:8px 0}table{border-collapse:collapse;font-size:.86rem;min-width:min(100%,420px)}
th,td{text-align:left;padding:4px 18px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}th{color:var(--soft);font-weight:600}.scroll th,.scroll td:first-child{white-space:nowrap;overflow-wrap:normal}
.cards{columns:3 300px;column-gap:16px}.card{break-inside:avoid;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 12px;margin:0 0 14px}
.card h3{margin:0 0 4px}.card table{min-width:0;width:100%}.card td{font-size:.8rem;padding-right:8px}.card td:last-child{text-align:right;padding-right:0}.card tr:last-child td{border:0}small{color:var(--soft);font-weight:400;display:block}
.changed td:first-child,.changed td:nth-child(2){font-weight:600;color:var(--c1)}
summary{cursor:pointer;color:var(--soft);font-size:.9rem}
@media print{:root{--ink:#000;--soft:#444;--page:#fff;--card:#fff;--rule:#ccc;--c0:#44618c;--c1:#b03a0a;--c2:#0b5f58;--c3:#999;--mark:#8a4a06}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}main{max-width:none;padding:0}figure,.tile,tr{break-inside:avoid}h2,h3{break-after:avoid}.charts{grid-template-columns:1fr 1fr}}
"""


def section(title: str, content: str) -> str:
    """A part of the page under a heading; content is HTML."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def figures(charts: Sequence[Chart]) -> str:
    """Charts side by side."""
    return f"<div class='charts'>{''.join(figure(chart) for chart in charts)}</div>"


def figure(chart: Chart) -> str:
    """A chart with its title and keys, or the note that stands in for it."""
    body = chart.svg or f"<p class='note'>{escape(chart.note)}</p>"
    keys = f"<div class='keys'>{chart.keys}</div>" if chart.keys and chart.svg else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{keys}{body}</figure>"


def table(rows: Sequence[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """Rows of text; whatever is in them is escaped."""
    head = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in heads)}</tr></thead>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table>{head}<tbody>{body}</tbody></table></div>"
