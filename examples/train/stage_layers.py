"""Which layers each stage of a run's pipeline has: equally many, balanced by their time, as written, or as the offset
of MindSpore Transformers' files says.

What: `layers_of_run` deals the layers to the stages; `sections_of_stages` gives the sections `recompute_config` and
`swap_config` the grid of this run's pipeline, by which their counts and tables are read.
Time of a layer is that of a trace of one micro-batch by the roofline of the run's device, embedding and head counted
with the first and the last stage: a number that every rank, and every run that is resumed, finds again.
Cost: of a trace a second or two; else none. Not covered: what a device measures; files that were written for another
pipeline (refused by name).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from lowtide.config.run import RunConfig
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Sections
from lowtide.mindformers.schema.grid import make_grid
from lowtide.mindformers.schema.issues import Issues
from lowtide.pipeline.cluster.split import split_layers
from lowtide.pipeline.schedule import Schedule, as_v, layers_of_stages
from lowtide.profiling.fake.trace import trace
from lowtide.runtime.autopilot.plan_model import hardware_of_device
from lowtide.timeline.hardware import load_hardware


def layers_of_run(run: RunConfig, schedule: Schedule, model: Any, device: torch.device) -> tuple[range, ...]:
    """The layers of each stage, in the order of the model. Raises `ConfigError` with its place."""
    assert run.pipeline is not None
    num_layers, wanted = len(model.model.layers), run.pipeline.layers
    if run.sections is not None and run.sections.newer is None and run.sections.offset not in (0, None):
        if wanted != "even":
            run.fail("pipeline.layers", "'pipeline.layers' says what 'offset' says already; leave one of them out")
        return _ranges(_by_offset(run, schedule, num_layers))
    if wanted == "even":
        try:
            return layers_of_stages(num_layers, schedule.num_stages)
        except ConfigError as error:
            run.fail("pipeline", f"{error}; or write 'pipeline.layers: balanced'")
    if isinstance(wanted, tuple):
        if (len(wanted), sum(wanted)) != (schedule.num_stages, num_layers):
            run.fail(
                "pipeline.layers",
                f"'pipeline.layers' has {len(wanted)} numbers that add up to {sum(wanted)}; '{schedule.name}' has "
                f"{schedule.num_stages} stages here, and the model {num_layers} layers",
            )
        return _ranges(wanted)
    if num_layers < schedule.num_stages:
        run.fail("pipeline", f"pipeline: {num_layers} layers are too few for {schedule.num_stages} stages")
    return _ranges(_balanced(run, schedule.num_stages, model, device))


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    ends = list(accumulate(sizes))
    return tuple(range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _balanced(run: RunConfig, num_stages: int, model: Any, device: torch.device) -> list[int]:
    """Sizes of stages, of which none is empty, so that the slowest is as fast as can be."""
    tokens = torch.empty(run.train.batch_size, run.data.sequence_length, dtype=torch.int64, device="meta")
    hardware = load_hardware(hardware_of_device(device))
    profile = trace(model, {"input_ids": tokens, "labels": tokens}, hardware=hardware)
    layers, first, last = seconds_of_parts(profile, "model.layers", len(model.model.layers))
    sizes = list(split_layers(layers, num_stages, first=first, last=last))
    # The split of a cluster may leave the two ends without a layer; here each stage is a module with some.
    for empty, beside in ((0, 1), (num_stages - 1, num_stages - 2)):
        if not sizes[empty]:
            giver = max(range(num_stages), key=sizes.__getitem__) if sizes[beside] == 1 else beside
            sizes[giver] -= 1
            sizes[empty] += 1
    return sizes


def seconds_of_parts(profile: Profile, container: str, num_layers: int) -> tuple[list[float], float, float]:
    """Forward and backward of each layer of `container`; what stands before them, and after."""
    layers, ends = [0.0] * num_layers, [0.0, 0.0]
    is_before = True
    for name, seconds in zip(profile.op_names, profile.op_seconds, strict=True):
        number = name.removeprefix(f"{container}.").partition(".")[0] if name.startswith(f"{container}.") else ""
        if number.isdecimal():
            layers[int(number)] += seconds
            is_before = False
        else:
            ends[0 if is_before or "embed" in name else 1] += seconds
    return layers, ends[0], ends[1]


def _by_offset(run: RunConfig, schedule: Schedule, num_layers: int) -> list[int]:
    found = sections_of_stages(run, schedule, num_layers)
    grid = make_grid(
        num_layers,
        found.pipeline_stage,
        found.pp_interleave_num,
        found.offset,
        Issues(compat=False, places=found.places),
        zero_bubble_v=found.zero_bubble_v,
    )
    return [size for row in grid.sizes for size in row]


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
