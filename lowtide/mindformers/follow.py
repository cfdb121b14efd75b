"""`recompute_config` and `swap_config` on a model: observe the first step, then do what the file says.

What: `follow` does for files of MindSpore Transformers what `optimize` does for a budget. The first forward pass of
each shape is observed (one extra step that leaves no trace), which shows what each op saves and how it can be
recomputed. Then `plan_sections` decides the fates (plan.py), and a tide carries them out. `FilePlans` holds these plans
by shape; each stays as written, whatever its steps take: nothing is measured, compared or corrected.
Why a step is observed: files name single operators (`flash_attention`, `feed_forward.mul`) that are no modules.
Beside a pipeline (`sections_of_stages`) counts and tables are those of its own stages and chunks; a file that was
written for another pipeline is refused by name.
Cost: the observed step. Not covered: DTensor parameters of FSDP2 and of tensor parallelism in one model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.config.source import read_yaml
from lowtide.core.log import LOG
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.base import EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import attach_where
from lowtide.mindformers.plan import names_of_layers, plan_sections, with_own_groups
from lowtide.mindformers.plan_rows import FilePlan, table
from lowtide.mindformers.schema import Resolution, Sections, has_sections, read_sections
from lowtide.mindformers.schema.file import SECTIONS
from lowtide.mindformers.schema.issues import Issues, layers_text
from lowtide.mindformers.schema.newer import is_newer
from lowtide.mindformers.sharding import KEY_SLICES, resharded, slice_instead_of, tensor_parallel_group
from lowtide.pipeline.schedule import Schedule, as_v
from lowtide.profiling.layers import find_layers, is_numbered, named_layers
from lowtide.runtime.session.apply import checked
from lowtide.runtime.session.consensus import PlanConsensus, agreed
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.shapes import PlanTable, ShapeBucket, ShapePlan
from lowtide.runtime.session.tide import Tide
from lowtide.runtime.session.tides import FIRST_STEP, NEW_SHAPE, Tides
from lowtide.tensors.fsdp import is_cut_twice
from lowtide.tensors.ranks import ALONE


def follow(
    model: nn.Module,
    sections: Sections,
    *,
    memory: MemoryConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: EngineChoice = None,
    group: Any = None,
    first_layer: int | None = None,
    tp_group: Any = None,
) -> Tides:
    """Carry out the two sections on `model` until `remove()`. Raises `ConfigError` at once where they do not fit it.

    `group` and `first_layer` are those of `lowtide.apply`. `tp_group` is the tensor-parallel process group; absent,
    that of the mesh dimension 'tp' of DTensor parameters. The handle's `source` (`FilePlans`) has the plan as written.
    """
    optimizer = checked(model, optimizer, "lowtide.apply", parts=True)
    if is_cut_twice(model):
        raise ConfigError(
            "lowtide.apply: recompute_config and swap_config are not covered for a model that both FSDP2 and tensor "
            "parallelism cut; use rules (the section 'memory')"
        )
    config = memory or MemoryConfig()
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    if first_layer is None:
        first_layer = _numbered_from(model, layers, sections)
    resolution = resolve_for(model, sections, layers, first_layer)
    if first_layer is not None and group is None:
        group = ALONE  # ranks of other stages have other layers, and wait for the output of this one
    bare = plan_from_rules(dataclasses.replace(config, budget=None, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    placed = PlacedState(optimizer, chosen, "lowtide.apply")
    placed.check(bare.optimizer)
    slicing = slicing_for(model, sections, resolution, tp_group)

    def plans(tides: Tides) -> FilePlans:
        return FilePlans(tides, resolution=resolution, layers=layers, memory=memory, slicing=slicing, group=group)

    how: Any = {"owns_engine": chosen is not engine, "placed": placed, "group": group}
    tides = Tides(model, optimizer, chosen, plans, call="lowtide.apply", **how)
    try:
        placed.follow(bare)
    except BaseException:
        tides.remove()
        raise
    return tides


def slicing_for(model: nn.Module, sections: Sections, resolution: Resolution, group: Any) -> tuple[Any, list[str]]:
    """The group over which inputs of recomputed layers are sliced (or None), and lines that say so."""
    if not resolution.slices_inputs:
        return None, [] if group is None else [f"no effect: tp_group; no {KEY_SLICES} is in force"]
    sliced_over = group if group is not None else tensor_parallel_group(model)
    if sliced_over is None:
        issues = Issues(compat=sections.compat, places=sections.places)
        issues.tolerate(f"recompute_config.{KEY_SLICES}", "no_tensor_group")
        return None, issues.warnings
    num_ranks = torch.distributed.get_world_size(sliced_over)
    if num_ranks == 1:
        return None, [f"no effect: {KEY_SLICES}; the tensor-parallel group has one rank"]
    return sliced_over, [
        f"{KEY_SLICES}: each of {num_ranks} ranks keeps 1/{num_ranks} of the inputs of recomputed layers"
    ]


def resolve_for(
    model: nn.Module, sections: Sections, layers: tuple[str, ...], first_layer: int | None = None
) -> Resolution:
    """The sections resolved for this model: for its number of layers, and the names in them.

    With `first_layer` the model is a stage of a pipeline, and its first layer has that number in the file.
    """
    if not layers:
        raise ConfigError(
            f"{sections.source}: no repeated block was found in this model; name the layers in the section 'memory', "
            "under layers"
        )
    written = sections.num_layers
    names = names_of_layers([name for name, _ in model.named_modules()], layers)
    if first_layer is not None:
        return _resolve_stage(sections, names, first_layer)
    if written is not None and len(layers) not in (written, written + sections.num_extra_layers):
        is_split = sections.pipeline_stage != 1 and len(layers) < written
        hint = "; of a stage of a pipeline say where it begins: first_layer=..." if is_split else ""
        raise ConfigError(f"{sections.source}: says {written} layers, but the model has {len(layers)}{hint}")
    return sections.resolve(num_layers=len(layers), names=names)


def _resolve_stage(sections: Sections, names: list[dict], first_layer: int) -> Resolution:
    """The sections for the layers from `first_layer` on, of which `names` are the parts."""
    if not isinstance(sections.num_layers, int):
        raise ConfigError(
            f"{sections.source}: does not say how many layers the whole model has; with first_layer it must "
            "(model.num_layers)"
        )
    held = range(first_layer, first_layer + len(names))
    total = sections.num_layers + sections.num_extra_layers
    if first_layer < 0 or held.stop > total:
        raise ConfigError(
            f"{sections.source}: says {total} layers, 0 to {total - 1}, but this module of {len(names)} would hold "
            f"{layers_text(held)}"
        )
    # The parts of other stages' layers are not known, and not read: the first layer's stand in for them.
    everywhere = [names[index - first_layer] if index in held else names[0] for index in range(total)]
    return sections.resolve(names=everywhere, held=held)


def _numbered_from(model: nn.Module, layers: tuple[str, ...], sections: Sections) -> int | None:
    """The number of the first layer, where a stage keeps its layers under the numbers of the whole model."""
    places = [name.rpartition(".") for name in layers]
    if sections.num_layers in (None, len(layers)) or len({container for container, _, _ in places}) != 1:
        return None
    first = int(places[0][2]) if is_numbered(model.get_submodule(places[0][0])) else None
    if first is None or [int(number) for _, _, number in places] != list(range(first, first + len(layers))):
        return None
    return first


class FilePlans:
    """The plan source of `recompute_config` and `swap_config`: what they say, whatever that costs."""

    budget_bytes = None
    is_compared = False

    def __init__(
        self,
        tides: Tides,
        *,
        resolution: Resolution,
        layers: tuple[str, ...],
        memory: MemoryConfig | None,
        slicing: tuple[Any, list[str]],
        group: Any,
    ) -> None:
        self._tides = tides
        self.resolution = resolution
        self.file_plan: FilePlan | None = None
        """The last plan that was made, and its table; None before the first step."""
        self._memory = memory
        self._table = PlanTable()
        self._key: ShapeBucket | None = None
        """The shapes whose plan is in force."""
        self._ranks = PlanConsensus(group)
        self._told: set[str] = set()
        """Lines that were said."""
        # As rules: the loss is left alone unless the section says otherwise.
        rules = dataclasses.replace(memory or MemoryConfig(), budget=None, recompute=None, swap=None)
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(attach_where(tides.model, **rules.slices_loss))
        self._tp_group, notes = slicing
        self._notes = [*resolution.notes, *resharded(tides.model, resolution, layers, self._undo), *notes]

    @property
    def profile(self) -> Profile | None:
        return None if self._key is None else self._table[self._key].profile

    def prepare(self, args: tuple, kwargs: dict) -> None:
        bucket = self._table.bucket(args, kwargs)
        key = self._table.cover(bucket)
        if key is not None and key != bucket and self._table[key].has_sizes:
            key = None  # no plan is changed for the sake of other shapes
        if key is None:
            what = f"{self._tides.num_forwards} shape {bucket.shapes}"
            if not self._table or self._ranks.may_observe(what):
                self._observe(bucket, args, kwargs)
                return
            key = self._table.largest_for(bucket)
        if key != self._key:
            self._use(key)

    def _observe(self, key: ShapeBucket, args: tuple, kwargs: dict) -> None:
        """Observe a step of this shape, and put the plan that the file asks for in force."""
        start = time.perf_counter()
        why = NEW_SHAPE if self._table else FIRST_STEP
        self._key = None
        keys = [key]

        def planned(profile: Profile) -> ShapePlan:
            is_joint = not self._table or self._ranks.is_together
            if not self._table:
                self._ranks.meet_first(key.shapes, profile)
            if self._table.same_but_numbers(key, profile) is not None:
                keys.append(self._table.bucket(args, kwargs))
            plan = self._plan(profile)
            if is_joint:
                first = agreed(plan, None, self._ranks.group)
                # With other shapes the first rank's plan is not one for this rank.
                plan = with_own_groups(first, profile) if self._ranks.is_together else plan
            return ShapePlan(profile=profile, plan=plan)

        shape = self._tides.observe(args, kwargs, planned, why=why)
        if shape is not None:
            self._table.add(keys[-1], shape)
            self._use(keys[-1])
            seconds = time.perf_counter() - start
            self._tides.note(shape.plan, why=why, seconds=seconds, budget_bytes=None, is_correction=False)

    def _plan(self, profile: Profile) -> Plan:
        """The plan that the file asks for, for the observed step. Says once what it does, and what has no effect.

        It stays as written. A site whose recipe does not hold is kept; `tide.failed_recipes` names it.
        """
        self.file_plan = plan_sections(profile, self.resolution, self._memory)
        for line in [
            *self.resolution.log_lines,
            *(f"warning: {text}" for text in self.resolution.warnings),
            *(f"note: {text}" for text in (*self._notes, *self.file_plan.notes)),
            *table(self.file_plan.rows),
        ]:
            self._say_once(line)
        return self.file_plan.plan

    def _use(self, key: ShapeBucket) -> None:
        self._key, shape = key, self._table.use(key)
        try:
            shape.tide = self._tides.use(shape.plan, shape.tide, equip=self._equip)
        except BaseException:
            self._key = None
            shape.retire()
            raise
        shape.tide.reset_stats()

    def _equip(self, tide: Tide) -> None:
        """Inputs are sliced, and results of collectives kept, where the file asks for it. There is no guard: nothing
        happens that is not written."""
        if self._tp_group is not None:
            tide._context.slices = functools.partial(slice_instead_of, group=self._tp_group, say=self._say_once)
        if self.resolution.keeps_collectives:
            tide.keep_collectives()

    def follow(self, output: Any, tide: Tide) -> None:
        """Nothing is measured."""

    def restart(self, *, was_audited: bool) -> None:
        if self._tides.tide is not None:
            self._tides.tide.reset_stats()

    def tighten(self, error: BaseException, num_tried: int) -> str | None:
        """By the rules of a tide: all swapped, then all layers recomputed."""
        assert self._tides.tide is not None
        return self._tides.tide._tighten(error, num_tried)

    def close(self) -> None:
        """Also: FSDP2's modules have their own settings again, and the model its own loss."""
        for shape in self._table:
            shape.retire()
        self._undo.close()

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            LOG.info("%s", line)


def sections_in(memory: Any) -> Sections | None:
    """The two sections, if that is what `memory` is: a file with one of them, a mapping with them, or `Sections`."""
    if isinstance(memory, Sections):
        return memory
    if isinstance(memory, Mapping):
        newer = {key: value for key, value in memory.items() if is_newer(key, value)}
        if not newer and not any(key in SECTIONS for key in memory):
            return None
        written = {key: value for key, value in memory.items() if key in (newer or SECTIONS)}
        unknown = [key for key in memory if key not in written and key != "compat"]
        if unknown:
            raise ConfigError(f"{unknown[0]}: cannot stand beside {' and '.join(newer or SECTIONS)}")
        return Sections(written=written, compat=bool(memory.get("compat", False)))
    if isinstance(memory, str) or hasattr(memory, "__fspath__"):
        root = read_yaml(memory)
        return read_sections(memory, root) if has_sections(root) else None
    return None


def layers_by_offset(sections: Sections, schedule: Schedule, num_layers: int) -> list[int]:
    """How many layers each stage has, by the file's `offset`."""
    own = sections_of_stages(sections, schedule, num_layers)
    sizes = own.grid(num_layers, Issues(compat=False, places=own.places)).sizes
    return [size for row in sizes for size in row]


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
