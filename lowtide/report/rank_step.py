"""The last step of one rank of a pipeline as measured: what it did when, its memory, and its peak in every step.

What: `RankStep` is what rank-0.json, rank-1.json, ... say; each rank writes its own. Times are seconds before
(negative) or after the moment at which all ranks met after their passes, so that ranks of several machines can stand
below each other: they are as exact as a small all-reduce is short.
Cost: some 100 bytes a span. Not covered: earlier steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.report.elements import Table
from lowtide.timeline.events import Event
from lowtide.units import format_bytes, format_seconds

COMPUTE = ("forward", "backward", "input gradient", "weight gradient", "pair")
MESSAGES = ("send", "receive")
LANES = (*COMPUTE, "wait", *MESSAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The last step of one rank."""

    rank: int
    step: int
    """Which step the spans are of."""
    schedule: str
    holds: str
    """Which part of the model."""
    spans: tuple[Event, ...]
    """Spans on `LANES`, by start."""
    memory: tuple[tuple[float, int], ...]
    """Seconds and bytes, after each action."""
    memory_is: str
    """Whose count that is."""
    peaks: tuple[tuple[int, int], ...]
    """Step and peak bytes, as the trainer counts them; empty where it counts none."""
    predicted_bytes: int | None
    budget_bytes: int | None

    def __post_init__(self) -> None:
        if any(span.lane not in LANES or not -1e9 < span.start <= span.end < 1e9 for span in self.spans):
            raise ConfigError("a span on no lane, or of no time")

    @property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for span in self.spans if span.lane not in MESSAGES), default=0.0)

    def seconds_in(self, lanes: tuple[str, ...]) -> float:
        """Together, of lanes that do not overlap."""
        return sum(span.end - span.start for span in self.spans if span.lane in lanes)


def rank_table(ranks: tuple[RankStep, ...], *, is_without_temporaries: bool = False) -> Table:
    """A row for each rank. `is_without_temporaries`: as in `Measured`."""
    rows: list[tuple[str, ...]] = [
        ("rank", "holds", "computes", "waits", "peak, measured", "peak, predicted", "budget")
    ]
    for each in ranks:
        whole = each.end - each.start
        rows.append(
            (
                str(each.rank),
                each.holds,
                _with_share(each.seconds_in(COMPUTE), whole),
                _with_share(each.seconds_in(("wait",)), whole),
                _bytes(max((found for _, found in each.peaks), default=None)),
                _bytes(each.predicted_bytes),
                _bytes(each.budget_bytes),
            )
        )
    last = max(each.step for each in ranks)
    caption = f"Times are of the passes of step {last}; peaks are the highest of all steps."
    if is_without_temporaries:
        caption += " Predicted peaks have temporaries, measured ones do not: on the CPU they are not counted."
    return Table(title="Ranks", caption=caption, rows=tuple(rows))


def _with_share(seconds: float, whole: float) -> str:
    return f"{format_seconds(seconds)} ({100 * seconds / whole:.0f} %)" if whole else "-"


def _bytes(found: int | None) -> str:
    return "-" if found is None else format_bytes(found)
