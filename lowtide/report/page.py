"""A report as one HTML file: it opens offline, needs no script, and follows the reader's light or dark theme.

What: `page` puts pictures and tables of a `Report` into one text. Pictures are images inside of the file, each in both
themes; the browser shows the one that fits. Every picture has a title with its subject, and a caption that says what is
predicted and what was measured.
Cost: milliseconds beyond the pictures. Not covered: reports of several runs at once; `lowtide diff` compares plans.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from lowtide.core.plan_table import percent, plan_table
from lowtide.report.compared_curves import largest_difference
from lowtide.report.pictures import (
    DARK,
    LIGHT,
    fate_picture,
    history_picture,
    lane_picture,
    memory_picture,
    sweep_picture,
)
from lowtide.report.report import Report
from lowtide.units import format_bytes
from lowtide.version import __version__

_FAR_GAP = 0.1
"""Share of the fastest step possible that a plan may be away from it before a caption says so."""
_CSS = """
:root { color-scheme: light dark;
  --ink: #1d2733; --soft: #57626e; --paper: #ffffff; --card: #f5f7f9; --line: #d8dee4; --bad: #c2352b; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa6b2; --paper: #11161c; --card: #1a2129; --line: #323c47; --bad: #ff7b6e; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.2rem 4rem; max-width: 62rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1.1rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .7rem .8rem; }
.tile b { display: block; font-size: 1.2rem; } .tile span { color: var(--soft); font-size: .85rem; }
figure { margin: .5rem 0; } figure > div { overflow-x: auto; }
figure img { width: 100%; min-width: 40rem; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .25rem .9rem .25rem 0; text-align: left;
       border-bottom: 1px solid var(--line); vertical-align: top; } td.n, th.n { text-align: right; }
pre { background: var(--card); border-radius: .5rem; padding: .8rem; overflow-x: auto; font-size: .8rem; }
.wide { overflow-x: auto; }
.failure { border-left: .3rem solid var(--bad); background: var(--card); border-radius: .3rem; padding: .6rem .9rem;
       margin: 1rem 0; overflow-wrap: anywhere; white-space: pre-line; } .failure b { color: var(--bad); }
"""


def page(report: Report) -> str:
    """The whole HTML text."""
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        f'<p class="soft">{escape(report.subtitle)}</p>',
        _failure(report),
        _tiles(report),
        *(f"<p>{escape(line)}</p>" for line in report.remarks),
    ]
    pictures = [history_picture(report.history, report.plan, theme) for theme in (LIGHT, DARK)]
    parts += _section("The run", _of_run(report), pictures)
    if report.ranks:
        parts.append(_ranks(report))
    if report.played is not None:
        parts += _section(
            "Memory over one step",
            "Predicted, stacked by owner. The dotted line is the same step with everything kept, on its own clock."
            + _second_runs(report)
            + _measured_line(report),
            [memory_picture(report.played, theme, report.measured) for theme in (LIGHT, DARK)],
        )
        parts += _section(
            "What runs when",
            "Predicted. Copies out and in have a lane each; where compute has to wait for one, it says so.",
            [lane_picture(report.played, theme) for theme in (LIGHT, DARK)],
        )
    if report.plan is not None:
        pictures = [fate_picture(report.plan, theme) for theme in (LIGHT, DARK)]
        parts += _section(
            "The fate of each activation", "Decided by the plan; the table at the end has the reasons.", pictures
        )
    if report.sweep:
        pictures = [sweep_picture(report.sweep, theme, report.measured) for theme in (LIGHT, DARK)]
        parts += _section("What other budgets would cost", _sweep_caption(report), pictures)
    for table in report.tables:
        parts += [f"<h2>{escape(table.title)}</h2>", f'<p class="soft">{escape(table.caption)}</p>', _table(table.rows)]
    if report.plan is not None:
        parts += ["<h2>The plan</h2>", f"<pre>{escape(plan_table(report.plan))}</pre>"]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n"
        f'<p class="soft">lowtide {__version__}</p>\n</body>\n</html>\n'
    )


def _sweep_caption(report: Report) -> str:
    """Says where a short search ended far from the bound: there the picture is worse than the truth may be."""
    far = [swept for swept in report.sweep if swept.predicted.gap > _FAR_GAP]
    caption = "Predicted: the best plan that a short search found for each budget."
    if not far:
        return caption
    where = ", ".join(f"{format_bytes(swept.budget_bytes)} ({percent(swept.predicted.gap)})" for swept in far)
    return f"{caption} A faster one may exist at {where}: plan for that budget itself, which searches longer."


def _failure(report: Report) -> str:
    """What a reader must know before all else."""
    if not report.failure:
        return ""
    heading, *lines = report.failure
    body = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<div class="failure"><b>{escape(heading)}</b>{body}</div>'


def _of_run(report: Report) -> str:
    whose = "of the first rank" if report.ranks else "of this rank"
    return f"Measured, {whose}: every step that was done."


def _second_runs(report: Report) -> str:
    assert report.played is not None and report.plan is not None
    layers = {f"recompute {layer}" for layer in report.plan.layers}
    if layers.isdisjoint(event.name for event in report.played.events):
        return ""
    return " What a layer makes while it runs again counts as temporaries."


def _measured_line(report: Report) -> str:
    """Which lines of the memory picture are measured."""
    if report.measured.peak_bytes is None:
        return " Nothing here is measured: this plan has not run."
    if report.measured.curve is None:
        return (
            " The measured line is one figure, the highest peak of all steps. The bytes over time were not measured; a "
            "step inside of tide.audit() measures them."
        )
    said = (
        " The measured line has the bytes after each operator of an audited step (tide.audit()). Counting makes a step "
        "slower, so each layer's part is stretched to the predicted time; within a layer the line may lie to the left "
        "or to the right of the prediction."
    )
    assert report.played is not None
    apart, num_parts = largest_difference(report.measured.curve, report.played)
    return said + (
        f" From layer to layer the step has {num_parts} parts; their highest bytes, measured and predicted, are at "
        f"most {format_bytes(apart)} apart."
    )


def _ranks(report: Report) -> str:
    """Where the lanes of the ranks can be seen."""
    first = report.ranks[0]
    return (
        f'<p class="soft">Step {first.step}, schedule {escape(first.schedule)}: what each rank did when, and its '
        "memory after each action, is in the trace. Write a report that ends in .trace.json, for Perfetto.</p>"
    )


def _tiles(report: Report) -> str:
    tiles = [
        f'<div class="tile"><span>{escape(tile.what)}</span><b>{escape(tile.value)}</b>'
        f"<span>{escape(tile.beside)}</span></div>"
        for tile in report.tiles
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _section(title: str, caption: str, pictures: Sequence[str | None]) -> list[str]:
    """`pictures`: the light one and the dark one."""
    light, dark = pictures
    if light is None or dark is None:
        return []
    return [
        f"<h2>{escape(title)}</h2>",
        f'<figure><div><picture><source media="(prefers-color-scheme: dark)" srcset="{_data(dark)}">'
        f'<img alt="{escape(title)}" src="{_data(light)}"></picture></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>",
    ]


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    cells += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'
