"""Which layers each stage of a run's pipeline has: evenly many, or as the offset of MindSpore Transformers' files says.

What: `sections_of_stages` gives the sections `recompute_config` and `swap_config` the grid of this run's pipeline, by
which their counts and tables are read; `layers_of_run` deals the layers to the stages.
Cost: none. Not covered: files that were written for another pipeline (refused by name).
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Sections
from lowtide.mindformers.schema.grid import make_grid
from lowtide.mindformers.schema.issues import Issues
from lowtide.pipeline.schedule import Schedule, as_v, layers_of_stages
from lowtide.train.run_file import RunConfig


def layers_of_run(run: RunConfig, schedule: Schedule, num_layers: int) -> tuple[range, ...]:
    """The layers of each stage, in the order of the model. Raises `ConfigError` with its place."""
    sections = run.sections
    if sections is None or sections.newer is not None or sections.offset in (0, None):
        try:
            return layers_of_stages(num_layers, schedule.num_stages)
        except ConfigError as error:
            run.fail("pipeline", str(error))
    found = sections_of_stages(run, schedule, num_layers)
    grid = make_grid(
        num_layers,
        found.pipeline_stage,
        found.pp_interleave_num,
        found.offset,
        Issues(compat=False, places=found.places),
        zero_bubble_v=found.zero_bubble_v,
    )
    ends = list(accumulate(size for row in grid.sizes for size in row))
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def sections_of_stages(run: RunConfig, schedule: Schedule, num_layers: int) -> Sections:
    """The sections of the run file, in which counts are those of this pipeline's stages and chunks."""
    sections = run.sections
    assert sections is not None
    num_chunks = schedule.num_stages // schedule.num_ranks
    comes_back = num_chunks == 2 and schedule.rank_of_stage == as_v(schedule.num_ranks) and schedule.num_ranks > 1
    for name, written, wanted in (
        ("pipeline_stage", sections.pipeline_stage, schedule.num_ranks),
        ("pp_interleave_num", sections.pp_interleave_num, num_chunks),
        ("num_layers", sections.num_layers, num_layers),
    ):
        if written not in (None, 1, wanted):
            Issues(compat=False, places=sections.places).refuse(
                name, f"is {written!r}, but the section 'pipeline' and the model make it {wanted}; take it out"
            )
    if sections.zero_bubble_v and not comes_back:
        run.fail(
            "pipeline.schedule",
            f"'pipeline.schedule' is '{schedule.name}', but the file says pipeline_scheduler: zero_bubble_v, whose "
            "second chunk comes back; choose zb_v or dualpipev, or take pipeline_scheduler out",
        )
    return dataclasses.replace(
        sections,
        pipeline_stage=schedule.num_ranks,
        pp_interleave_num=num_chunks,
        num_layers=num_layers,
        num_extra_layers=0,
        zero_bubble_v=comes_back,
    )
