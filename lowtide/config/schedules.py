"""The pipeline schedules by name: what run files, the search for a cluster and the generators have to know of each.

What: one table. How a schedule is made is in pipeline/generators.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunSchedule = Literal["gpipe", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev", "one_stage_overlap"]
"""Those that can be run, and so all that have a generator."""
ClusterSchedule = Literal[
    "auto", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev", "dualpipe", "one_stage_overlap"
]
"""Those that a plan for a cluster takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """What is known of a schedule before one is made."""

    stages_per_rank: int | None
    """None: as many as are asked for; 2, if nobody asks."""
    has_pairs: bool = False
    """Whether a forward and a backward run together, so that each hides the other's communication."""
    is_searched: bool = True
    """Whether the search for a cluster tries it where the run file leaves it open."""
    is_for_one_rank: bool = False
    played_as: str | None = None
    """The schedule that stands for this one on a clock, if it has no generator of its own."""
    upstream: str | None = None
    """`pipeline_scheduler` of MindSpore Transformers."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(stages_per_rank=1, is_searched=False),
    "1f1b": ScheduleKind(stages_per_rank=1, upstream="1f1b"),
    "interleaved": ScheduleKind(stages_per_rank=None, upstream="1f1b"),
    "zb_v": ScheduleKind(stages_per_rank=2, upstream="zero_bubble_v"),
    "interleaved_overlap": ScheduleKind(stages_per_rank=None, has_pairs=True),
    "dualpipev": ScheduleKind(stages_per_rank=2, has_pairs=True, upstream="zero_bubble_v"),
    "dualpipe": ScheduleKind(stages_per_rank=2, has_pairs=True, played_as="dualpipev"),
    "one_stage_overlap": ScheduleKind(stages_per_rank=1, has_pairs=True, is_for_one_rank=True),
}
"""In the order in which a search tries them."""
