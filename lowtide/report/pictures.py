"""Pictures of a step, as SVG text: memory over time, lanes, and what other budgets cost.

What: each `draw_` function puts one picture into a figure; `svg` makes the figure and gives its text for a light page,
`on_dark` that for a dark one. Text stays text, ids come from a fixed salt, no date is written: the same step gives the
same bytes with the same matplotlib.
Cost: a second to import matplotlib, then about 0.2 s a picture; long steps are thinned to what a screen can show.
Not covered: anything one can click on.
"""

from __future__ import annotations

import io
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.report.budget_sweep import Sweep
from lowtide.report.export import Setting
from lowtide.report.played_step import OWNERS, Played, thinned_starts
from lowtide.report.report import Measured
from lowtide.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_POINTS = 600
_MOST_BARS = 400
"""Most bars of a lane; beyond it neighbours are drawn as one bar."""
_FAR = 2.5
"""A line so many times above all else is not drawn."""
_LANES = {"compute": "compute", "stall": "compute waits", "out": "copies out", "in": "copies in"}
_LOOKS = tomllib.loads((Path(__file__).parent / "pictures.toml").read_text(encoding="utf-8"))
_COLOURS: Mapping[str, str] = _LOOKS["light"]
_INK, _FAINT, _PLAIN, _BUDGET, _STATE, _KEPT, _SWAPPED, _RECOMPUTED = _COLOURS.values()
_OF_OWNERS = (_STATE, _KEPT, _SWAPPED, _RECOMPUTED)
"""In the order of `OWNERS`."""
_DOTTED: Any = {"color": _PLAIN, "linewidth": 1.2, "linestyle": ":"}


def svg(draw: Callable[..., None], *what: Any) -> str:
    """The text of what `draw` puts into a figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    coloured = {key: _COLOURS[name] for key, name in _LOOKS["style_in"].items()}
    with mpl.rc_context(_LOOKS["style"] | coloured):
        figure = Figure(layout="constrained")
        draw(figure, *what)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def on_dark(picture: str) -> str:
    """The same picture in the colours of a dark page."""
    for name, light in _COLOURS.items():
        picture = picture.replace(light, _LOOKS["dark"][name])
    return picture


def draw_memory(figure: Figure, played: Played, measured: Measured) -> None:
    """Bytes on the device over the planned step, stacked by owner; the plain step, the budget and the measured peak as
    lines."""
    figure.set_size_inches(9.2, 3.6)
    panel = figure.subplots()
    scale, unit = _byte_unit(max(played.plain_bytes))
    starts = thinned_starts(len(played.starts), _MOST_POINTS)
    times, time_word = _time_unit(played.step_seconds)
    x = np.append(np.array(played.starts)[starts], played.step_seconds) * times
    shown = _fullest(np.array(played.planned_bytes), starts)
    floor = np.zeros(len(starts))
    for name, part, colour in zip(OWNERS, played.bytes_by_owner, _OF_OWNERS, strict=True):
        top = floor + np.array(part)[shown] / scale
        panel.fill_between(x, _step(floor), _step(top), step="post", color=colour, linewidth=0, label=name)
        floor = top
    plain = np.maximum.reduceat(np.array(played.plain_bytes), starts) / scale
    plain_x = np.append((np.cumsum(played.seconds) - played.seconds)[starts], sum(played.seconds)) * times
    panel.plot(plain_x, _step(plain), drawstyle="steps-post", label="everything kept", **_DOTTED)
    most = max(float(plain.max()), float(floor.max()), (measured.peak_bytes or 0) / scale)
    most = _draw_budget(panel, played.budget_bytes, most, scale)
    turn = played.starts[played.num_forward_ticks] * times
    if measured.peak_bytes is not None:
        panel.axhline(measured.peak_bytes / scale, color=_INK, linewidth=1.2, label="peak, measured")
    panel.axvline(turn, color=_FAINT, linewidth=1)
    panel.set_ylim(0, 1.12 * most)
    panel.set_xlim(0, max(float(x[-1]), float(plain_x[-1])))
    for shift, word, side in ((-5, "forward", "right"), (5, "backward", "left")):
        _note(panel, word, (turn, 1.12 * most), (shift, 0), ha=side, va="top")
    panel.set(xlabel=f"time, {time_word}", ylabel=f"on the device, {unit}")
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")


def draw_lanes(figure: Figure, played: Played) -> None:
    """What compute and the two copy lanes do when, and when compute waits."""
    figure.set_size_inches(9.2, 2.2)
    panel = figure.subplots()
    times, time_word = _time_unit(played.step_seconds)
    for row, lane in enumerate(_LANES):
        events = [event for event in played.events if event.lane == lane]
        colour = {"stall": _BUDGET, "compute": _STATE}.get(lane, _SWAPPED)
        for is_again, shade in ((False, colour), (True, _RECOMPUTED)):
            group = [event for event in events if event.name.startswith("recompute ") == is_again]
            bars = _bars([(event.start * times, event.end * times) for event in group], played.step_seconds * times)
            panel.broken_barh(bars, (row - 0.36, 0.72), color=shade, linewidth=0)
    panel.set_yticks(range(len(_LANES)), [*_LANES.values()])
    panel.invert_yaxis()
    panel.set_ylim(len(_LANES) - 0.5, -0.5)
    panel.set_xlim(0, played.step_seconds * times)
    panel.grid(axis="y", visible=False)
    panel.set_xlabel(f"time, {time_word}")
    if any(event.name.startswith("recompute ") for event in played.events):
        panel.text(1.01, 0.94, "recomputed", transform=panel.transAxes, va="top", color=_RECOMPUTED, fontsize=8)


def draw_sweep(figure: Figure, sweep: Sweep, own_bytes: int | None, others: Mapping[str, Setting]) -> None:
    """Time of a step against the budget; the plan's own is marked. `others`: without a plan, against their peaks."""
    figure.set_size_inches(9.2, 3.2)
    panel = figure.subplots()
    scale, unit = _byte_unit(max(sweep))
    times, time_word = _time_unit(max(predicted.step_seconds for predicted in sweep.values()))
    points = [(budget / scale, predicted.step_seconds * times) for budget, predicted in sweep.items()]
    panel.plot([x for x, _ in points], [y for _, y in points], "o-", color=_KEPT, markersize=4)
    for here in (point for budget, point in zip(sweep, points, strict=True) if budget == own_bytes):
        panel.plot(*([each] for each in here), "o", color=_BUDGET, markersize=9)
        _note(panel, "you are here", here, (0, -18), ha="center")
    for name, setting in others.items():
        here = (setting.peak_bytes / scale, setting.step_seconds * times)
        panel.plot(*([each] for each in here), "x", color=_PLAIN, markersize=7)
        _note(panel, name, here, (4, 7), color=_PLAIN)
    plain = next(iter(sweep.values())).plain_seconds * times
    panel.axhline(plain, **_DOTTED)
    _note(panel, "everything kept", (points[-1][0], plain), (0, -10), color=_PLAIN)
    panel.margins(y=0.2)
    panel.set(xlabel=f"budget, {unit}", ylabel=f"predicted step, {time_word}")


def _note(panel: Any, text: str, at: tuple[float, float], shift: tuple[int, int], **how: Any) -> None:
    """Small text beside a point."""
    panel.annotate(text, at, xytext=shift, textcoords="offset points", fontsize=8, **{"color": _INK, **how})


def _step(values: np.ndarray) -> np.ndarray:
    """For `steps-post`: the last value holds to the end."""
    return np.append(values, values[-1])


def _fullest(totals: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """In each part, which begins at one of `starts`, the tick with most bytes: all that is drawn was there at once."""
    ends = np.append(starts[1:], len(totals))
    return np.array([start + int(totals[start:end].argmax()) for start, end in zip(starts, ends)])


def _draw_budget(panel: Any, budget_bytes: int | None, most: float, scale: int) -> float:
    """The budget as a line, or in words where a picture that shows it would show nothing else. Gives the highest value
    that the picture must show."""
    if budget_bytes is None:
        return most
    budget = budget_bytes / scale
    line: Any = {"color": _BUDGET, "linewidth": 1.2, "linestyle": "--"}
    if budget <= _FAR * most:
        panel.axhline(budget, **line, label="budget")
        return max(most, budget)
    panel.plot([], [], **line, label=f"budget {format_bytes(budget_bytes)},\nabove the picture")
    return most


def _bars(spans: Sequence[tuple[float, float]], total: float) -> list[tuple[float, float]]:
    """(start, width) of bars; those closer than a screen can show become one."""
    nearest = total / _MOST_BARS / 4 if len(spans) > _MOST_BARS else 0.0
    bars: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if bars and start - sum(bars[-1]) <= nearest:
            bars[-1] = (bars[-1][0], max(end, sum(bars[-1])) - bars[-1][0])
        else:
            bars.append((start, end - start))
    return bars


def _byte_unit(most_bytes: int) -> tuple[int, str]:
    return (GIB, "GiB") if most_bytes >= GIB else (MIB, "MiB")


def _time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 1 else (1e3, "ms")
