"""MindSpore Transformers' sections beside a pipeline: counts and tables by the grid of its stages and chunks.

Why: upstream's files count layers stage by stage, and say the grid elsewhere, or leave it to the command line.
Cost: none. Not covered: files that were written for another pipeline, which are refused by name.
"""

from __future__ import annotations

import dataclasses

from lowtide.mindformers.schema import Sections
from lowtide.mindformers.schema.grid import make_grid
from lowtide.mindformers.schema.issues import Issues
from lowtide.pipeline.schedule import Schedule, as_v


def layers_by_offset(sections: Sections, schedule: Schedule, num_layers: int) -> list[int]:
    """How many layers each stage has, by the file's `offset`."""
    of_stages = sections_of_stages(sections, schedule, num_layers)
    grid = make_grid(
        num_layers,
        of_stages.pipeline_stage,
        of_stages.pp_interleave_num,
        of_stages.offset,
        Issues(compat=False, places=of_stages.places),
        zero_bubble_v=of_stages.zero_bubble_v,
    )
    return [size for row in grid.sizes for size in row]


def sections_of_stages(sections: Sections, schedule: Schedule, num_layers: int) -> Sections:
    """The sections of a file, in which counts are those of this pipeline's stages and chunks.

    Raises `ConfigError` for a file that was written for another pipeline.
    """
    issues = Issues(compat=False, places=sections.places)
    num_chunks = schedule.num_stages // schedule.num_ranks
    comes_back = num_chunks == 2 and schedule.rank_of_stage == as_v(schedule.num_ranks) and schedule.num_ranks > 1
    for name, written, wanted in (
        ("pipeline_stage", sections.pipeline_stage, schedule.num_ranks),
        ("pp_interleave_num", sections.pp_interleave_num, num_chunks),
        ("num_layers", sections.num_layers, num_layers),
    ):
        if written not in (None, 1, wanted):
            issues.refuse(
                name, f"is {written!r}, but the section 'pipeline' and the model make it {wanted}; take it out"
            )
    if sections.zero_bubble_v and not comes_back:
        issues.refuse(
            "pipeline.schedule",
            f"is '{schedule.name}', but the file says pipeline_scheduler: zero_bubble_v, whose second chunk comes "
            "back; choose zb_v or dualpipev, or take pipeline_scheduler out",
        )
    return dataclasses.replace(
        sections,
        pipeline_stage=schedule.num_ranks,
        pp_interleave_num=num_chunks,
        num_layers=num_layers,
        num_extra_layers=0,
        zero_bubble_v=comes_back,
    )
