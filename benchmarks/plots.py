"""A picture for those questions that one helps with, as SVG.

What: `draw` writes the plot of a record, or nothing where there is none for its question. Emulated and computed numbers
say so in the title. Text stays text, ids come from a fixed salt and no date is written, so that the same record gives
the same bytes (with the same matplotlib).
Cost: a second for importing matplotlib. Not covered: questions without an entry in `_PLOTS`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.record import Record
from benchmarks.tables import label_of

_STYLE = {
    "svg.hashsalt": "lowtide",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_PANELS_A_ROW = 3
Rows = Sequence[dict[str, Any]]


def draw(record: Record, path: Path) -> bool:
    """Write the plot of `record` to `path`; False where there is nothing to draw."""
    plot = _PLOTS.get(record.question)
    rows = [row for row in record.rows if not row.get("error")]
    if plot is None or not rows:
        return False
    with mpl.rc_context(_STYLE):
        figure = Figure(layout="constrained")
        if not plot(figure, rows, record):
            return False
        kind = "" if record.kind == "measured" else f" [{record.kind}]"
        figure.suptitle(f"{record.hardware['name']}{kind}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return True


def _time_against_memory(figure: Figure, rows: Rows, record: Record) -> bool:
    """One panel a model: what is left of plain's activation memory, against the time of a step."""
    rows = [row for row in rows if row.get("saved_share") is not None and row.get("ratio_median")]
    models = list(dict.fromkeys(str(row.get("model")) for row in rows))
    if not models:
        return False
    num_columns = min(len(models), _PANELS_A_ROW)
    num_rows = -(-len(models) // num_columns)
    figure.set_size_inches(3.4 * num_columns + 1.8, 3.2 * num_rows)
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flatten()
    for panel in panels[len(models) :]:
        panel.remove()
    panels = panels[: len(models)]
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    for panel, model in zip(panels, models, strict=True):
        for place, method in enumerate(methods):
            points = sorted(
                (1 - row["saved_share"], row["ratio_median"])
                for row in rows
                if str(row.get("model")) == model and str(row["method"]) == method
            )
            if points:
                panel.plot(*zip(*points, strict=True), color=f"C{place % 10}", label=method,
                           marker="o" if place < 10 else "s")  # fmt: skip
        panel.set(title=model)
        panel.set_xlim(left=0)
    figure.supxlabel("activation memory, plain = 1", fontsize=9)
    figure.supylabel("time of a step, plain = 1", fontsize=9)
    figure.legend(*_entries(panels), loc="outside right upper")
    return True


def _entries(panels: Any) -> tuple[list[Any], list[str]]:
    """Handles and labels of all panels, each label once."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _predicted(figure: Figure, rows: Rows, record: Record) -> bool:
    """Peaks and times, predicted against measured."""
    figure.set_size_inches(8, 3.8)
    peaks, times = figure.subplots(1, 2)
    for place, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        of_model = [row for row in rows if row["model"] == model]
        for panel, x, y, scale in (
            (peaks, "peak_bytes", "predicted_peak_bytes", 2**20),
            (times, "ratio_median", "predicted_ratio", 1),
        ):
            xs, ys = ([row[key] / scale for row in of_model] for key in (x, y))
            panel.plot(xs, ys, "o", color=f"C{place}", label=model, alpha=0.8)
    for panel, what in ((peaks, "peak, MiB"), (times, "time of a step, plain = 1")):
        low, high = (pick((*panel.get_xlim(), *panel.get_ylim())) for pick in (min, max))
        panel.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
        panel.set(xlabel=f"measured {what}", ylabel=f"predicted {what}")
    peaks.legend()
    return True


def _planning_time(figure: Figure, rows: Rows, record: Record) -> bool:
    figure.set_size_inches(6, 3.6)
    panel = figure.subplots()
    rows = sorted(rows, key=lambda row: row["num_parameters"])
    xs = [row["num_parameters"] / 1e9 for row in rows]
    for key in ("trace_seconds", "solve_seconds"):
        panel.plot(xs, [row[key] for row in rows], "o-", label=label_of(key))
    panel.set(xscale="log", xlabel="parameters, 10⁹", ylabel="seconds", ylim=(0, None))
    panel.legend()
    return True


def _published_setting(figure: Figure, rows: Rows, record: Record) -> bool:
    """Bars of the gain over full recompute; of the run on a device, the steps' times."""
    figure.set_size_inches(7, 3.6)
    panel = figure.subplots()
    if record.kind == "computed":
        keys = ("published_gain_percent", "planned_gain_percent", "ceiling_gain_percent")
        for place, key in enumerate(keys):
            heights = [row[key] for row in rows]
            panel.bar([index + 0.27 * (place - 1) for index in range(len(rows))], heights, 0.25, label=label_of(key))
        names = [str(row["setting"]) for row in rows]
        panel.set(ylabel="gain over full recompute, %")
        figure.legend(loc="outside lower center", ncols=3)
    else:
        names = [str(row["method"]) for row in rows]
        panel.bar(range(len(rows)), [row["seconds_median"] for row in rows], 0.5)
        panel.set(ylabel="seconds a step")
    panel.set_xticks(range(len(rows)), [textwrap.fill(name, 14) for name in names], fontsize=7)
    return True


def _scaling(figure: Figure, rows: Rows, record: Record) -> bool:
    rows = [row for row in rows if row["outcome"] == "fits"]
    if not rows:
        return False
    figure.set_size_inches(6, 3.6)
    panel = figure.subplots()
    found, given = ([row for row in rows if row["which"] == which] for which in ("fastest", "published"))
    xs = [row["num_devices"] for row in found]
    panel.plot(xs, [row["tokens_per_second"] for row in found], "o-", label="fastest layout, predicted")
    for row in given:
        panel.plot(row["num_devices"], row["tokens_per_second"], "s", label="published layout, predicted")
        panel.plot(row["num_devices"], row["published_tokens_per_second"], "x", label="published layout, published")
    panel.set(xscale="log", xlabel="devices", ylabel="tokens per second and device", ylim=(0, None))
    panel.set_xticks(xs, [f"{count:,}" for count in xs], fontsize=7)
    panel.minorticks_off()
    panel.legend(loc="lower left")
    return True


def _details(figure: Figure, rows: Rows, record: Record) -> bool:
    """Rates by the size of a copy."""
    rows = [row for row in rows if row["piece"] == "copy_size"]
    if not rows:
        return False
    figure.set_size_inches(6, 3.6)
    panel = figure.subplots()
    sizes = [row["size_bytes"] / 2**20 for row in rows]
    for key in ("out_bytes_per_second", "in_bytes_per_second", "both_bytes_per_second"):
        panel.plot(sizes, [row[key] / 1e9 for row in rows], "o-", label=label_of(key))
    panel.set(xscale="log", xlabel="size of a copy, MiB", ylabel="GB/s", ylim=(0, None))
    panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
    panel.minorticks_off()
    panel.legend()
    return True


_PLOTS: dict[str, Callable[[Figure, Rows, Record], bool]] = {
    "time_against_memory": _time_against_memory,
    "predicted": _predicted,
    "planning_time": _planning_time,
    "published_setting": _published_setting,
    "scaling": _scaling,
    "details": _details,
}
