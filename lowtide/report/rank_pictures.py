"""Pictures of a pipeline as measured: ranks against time, and the memory of each rank.

What: each function draws one picture in one `Theme`, as pictures.py does. Times are those of rank_step.py.
Cost: about 0.3 s a picture with 8 ranks. Not covered: more than the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lowtide.report.pictures import Theme, byte_unit, svg, time_unit
from lowtide.report.rank_step import MESSAGES, RankStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 6
_LABELLED_SPANS = 120
"""Of a rank: more would not be read."""
_PALE = {"input gradient": 0.6, "wait": 0.55}
"""Opacity of lanes that are less than others."""
_CHARACTER_SHARE = 1 / 120
"""Of the width, what a character of a label takes."""


def ranks_picture(ranks: Sequence[RankStep], theme: Theme) -> str | None:
    """What each rank does when; None where no rank did anything."""
    if not any(each.spans for each in ranks):
        return None
    colour_of = {
        "forward": theme.kept,
        "backward": theme.swapped,
        "input gradient": theme.swapped,
        "weight gradient": theme.recomputed,
        "pair": theme.state,
        "wait": theme.budget,
        "send": theme.plain,
        "receive": theme.faint,
    }

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Patch

        figure.set_size_inches(9.2, min(1.3 + 0.5 * len(ranks), 14))
        panel = figure.subplots()
        start, end = min(each.start for each in ranks), max(each.end for each in ranks)
        scale, unit = time_unit(end - start)
        seen = {span.lane for each in ranks for span in each.spans}
        for row, each in enumerate(ranks):
            for lane in (lane for lane in colour_of if lane in seen):
                place = (row + 0.22, 0.2) if lane in MESSAGES else (row - 0.4, 0.6)
                spans = [span for span in each.spans if span.lane == lane]
                bars = [((span.start - start) * scale, (span.end - span.start) * scale) for span in spans]
                panel.broken_barh(bars, place, color=colour_of[lane], alpha=_PALE.get(lane, 1.0), linewidth=0)
            labelled = [span for span in each.spans if span.lane not in (*MESSAGES, "wait")]
            for span in labelled if len(labelled) <= _LABELLED_SPANS else ():
                if span.end - span.start > len(span.name) * _CHARACTER_SHARE * (end - start):
                    middle = ((span.start + span.end) / 2 - start) * scale
                    panel.text(middle, row - 0.1, span.name, ha="center", va="center", fontsize=6, color=theme.paper)
        panel.set_yticks(range(len(ranks)), [f"rank {each.rank}" for each in ranks])
        panel.set_ylim(len(ranks) - 0.45, -0.55)
        panel.set_xlim(0, (end - start) * scale)
        panel.grid(axis="y", visible=False)
        panel.set_xlabel(f"time, {unit}")
        figure.legend(
            handles=[
                Patch(color=colour, alpha=_PALE.get(lane, 1.0), linewidth=0, label=lane)
                for lane, colour in colour_of.items()
                if lane in seen
            ],
            loc="outside right upper",
        )

    return svg(draw, theme)


def rank_memory_picture(ranks: Sequence[RankStep], theme: Theme) -> str | None:
    """Bytes of each rank over the step; None where nobody counted. Of many ranks, those that had most."""
    counted = [each for each in ranks if each.memory]
    if not counted:
        return None
    most = sorted(counted, key=lambda each: -max(found for _, found in each.memory))[:_MOST_LINES]
    colours = (theme.kept, theme.swapped, theme.recomputed, theme.plain, theme.budget, theme.state)

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9.2, 2.8)
        panel = figure.subplots()
        start = min(each.start for each in ranks)
        end = max(each.end for each in ranks)
        times, unit = time_unit(end - start)
        scale, bytes_unit = byte_unit(max(found for each in most for _, found in each.memory))
        for each, colour in zip(sorted(most, key=lambda each: each.rank), colours):
            x = [(seconds - start) * times for seconds, _ in each.memory]
            y = [found / scale for _, found in each.memory]
            mark = "o" if len(x) == 1 else ""
            panel.plot(x, y, color=colour, drawstyle="steps-post", marker=mark, label=f"rank {each.rank}")
        panel.set_ylim(bottom=0)
        panel.set_xlim(0, (end - start) * times)
        panel.set(xlabel=f"time, {unit}", ylabel=bytes_unit)
        figure.legend(loc="outside right upper")

    return svg(draw, theme)
