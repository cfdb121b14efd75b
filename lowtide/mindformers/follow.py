"""`recompute_config` and `swap_config` on a model: observe the first step, then do what the file says.

What: `follow` does for files of MindSpore Transformers what `optimize` does for a budget. It puts one wrapper on the
model. The first forward pass of each shape is observed (one extra step that leaves no trace), which shows what each op
saves and how it can be recomputed. Then mindformers/plan.py decides the fates, and the runtime carries them out.
Why a step is observed: files name single operators (`flash_attention`, `feed_forward.mul`) that are no modules.
Cost: that of the autopilot, without its solver. Not covered: DTensor parameters of FSDP2 and of tensor parallelism in
one model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.base import Engine
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import attach_where
from lowtide.mindformers import sliced_inputs as slices
from lowtide.mindformers.collectives import with_own_groups
from lowtide.mindformers.plan import names_of_layers, plan_sections
from lowtide.mindformers.plan_rows import FilePlan, table
from lowtide.mindformers.resharding import Resharding
from lowtide.mindformers.schema import Resolution, Sections
from lowtide.mindformers.schema.issues import Issues, layers_text
from lowtide.profiling.layers import find_layers, is_numbered, named_layers
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.autopilot.plan_source import Facts
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.compiled import refuse_compiled
from lowtide.tensors.fsdp import is_cut_twice
from lowtide.tensors.optimizers import optimizer_of
from lowtide.tensors.ranks import ALONE


def follow(
    model: nn.Module,
    sections: Sections,
    *,
    memory: MemoryConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    group: Any = None,
    first_layer: int | None = None,
    tp_group: Any = None,
    say: Callable[[str], None] | None = None,
) -> Autopilot:
    """Carry out the two sections on `model` until `remove()`. Raises `ConfigError` at once where they do not fit it.

    `group` and `first_layer` are those of `lowtide.apply`. `tp_group` is the tensor-parallel process group; absent,
    that of the mesh dimension 'tp' of DTensor parameters. The tide's `source` (`FilePlans`) has the plan as written.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.apply: expected a torch.nn.Module, not {type(model).__name__}")
    if patched_module(model) is not None:
        raise ConfigError("lowtide.apply: this model is already under a lowtide plan; call remove() on it first")
    refuse_compiled(model, "lowtide.apply", parts=True)
    if is_cut_twice(model):
        raise ConfigError(
            "lowtide.apply: recompute_config and swap_config are not covered for a model that both FSDP2 and tensor "
            "parallelism cut; use rules (the section 'memory')"
        )
    optimizer = optimizer_of(optimizer, "lowtide.apply")
    config = memory or MemoryConfig()
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    if first_layer is None:
        first_layer = _numbered_from(model, layers, sections)
    resolution = resolve_for(model, sections, layers, first_layer)
    if first_layer is not None and group is None:
        group = ALONE  # ranks of other stages have other layers, and wait for the output of this one
    bare = plan_from_rules(dataclasses.replace(config, budget=None, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    placed = PlacedState(model, optimizer, chosen, "lowtide.apply")
    placed.check(bare.optimizer)
    slicing = slicing_for(model, sections, resolution, tp_group)
    source = FilePlans(model, resolution=resolution, layers=layers, memory=memory, slicing=slicing, say=say)
    tide = Autopilot(
        model, source, optimizer, chosen, owns_engine=chosen is not engine, placed=placed, group=group, say=say
    )
    try:
        placed.follow(bare)
    except BaseException:
        tide.remove()
        raise
    return tide


def slicing_for(model: nn.Module, sections: Sections, resolution: Resolution, group: Any) -> tuple[Any, list[str]]:
    """The group over which inputs of recomputed layers are sliced (or None), and lines that say so."""
    if not resolution.slices_inputs:
        return None, [] if group is None else [f"no effect: tp_group; no {slices.KEY} is in force"]
    found = group if group is not None else slices.tensor_parallel_group(model)
    if found is None:
        issues = Issues(compat=sections.compat, places=sections.places)
        issues.tolerate(
            f"recompute_config.{slices.KEY}",
            "needs the tensor-parallel group, and no parameter of this model is a DTensor on a mesh dimension 'tp'",
            meaning="it has no effect; give the group: lowtide.apply(..., tp_group=group)",
            fix="give the group, lowtide.apply(..., tp_group=group), or set it to false",
        )
        return None, issues.warnings
    num_ranks = torch.distributed.get_world_size(found)
    if num_ranks == 1:
        return None, [f"no effect: {slices.KEY}; the tensor-parallel group has one rank"]
    return found, [f"{slices.KEY}: each of {num_ranks} ranks keeps 1/{num_ranks} of the inputs of recomputed layers"]


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
    # The parts of other stages' layers are not known, and nobody reads them: the first layer's stand in for them.
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
    """A `PlanSource` that follows `recompute_config` and `swap_config`, whatever that costs."""

    def __init__(
        self,
        model: nn.Module,
        *,
        resolution: Resolution,
        layers: tuple[str, ...],
        memory: MemoryConfig | None,
        slicing: tuple[Any, list[str]],
        say: Callable[[str], None] | None,
    ) -> None:
        self.budget_bytes: int | None = None
        self.resolution = resolution
        self.file_plan: FilePlan | None = None
        """The plan in force and its table; None before the first step."""
        self._memory = memory
        self._say = say
        self._has_said: set[str] = set()
        # As rules: the loss is left alone unless the section says otherwise.
        rules = dataclasses.replace(memory or MemoryConfig(), budget=None, recompute=None, swap=None)
        self._loss = attach_where(model, **rules.slices_loss)
        self._resharding = Resharding(model, resolution, layers)
        self._tp_group, self._notes_about_slices = slicing

    def measure_link(self) -> None:
        """Nothing is timed."""

    def make_plan(self, profile: Profile, facts: Facts, budget_bytes: int | None) -> Plan:
        """The plan that the file asks for, for the observed step. Says once what it does, and what has no effect.

        `facts` are ignored: the plan stays as written. A site whose recipe does not hold is kept;
        `tide.failed_recipes` names it.
        """
        self.file_plan = plan_sections(profile, self.resolution, self._memory)
        notes = [*self.resolution.notes, *self._resharding.notes, *self._notes_about_slices, *self.file_plan.notes]
        for line in [
            *self.resolution.log_lines,
            *(f"warning: {text}" for text in self.resolution.warnings),
            *(f"note: {text}" for text in notes),
            *table(self.file_plan.rows),
        ]:
            self._say_once(line)
        return self.file_plan.plan

    def localized(self, plan: Plan, profile: Profile) -> Plan:
        """The first rank's plan, with this rank's own process groups in it."""
        return with_own_groups(plan, profile)

    def equip(self, tide: Tide, known: CachedPlan, budget_bytes: int | None) -> None:
        """Have inputs sliced, where the file asks for it. There is no guard: nothing happens that is not written."""
        if self._tp_group is not None:
            tide.slice_inputs(slices.Slices(self._tp_group, self._say_once))

    def close(self) -> None:
        """Give FSDP2's modules their own settings back, and the model its own loss. Idempotent."""
        self._resharding.undo()
        if self._loss is not None:
            self._loss.remove()

    def _say_once(self, line: str) -> None:
        if self._say is not None and line not in self._has_said:
            self._has_said.add(line)
            self._say(line)


def sections_in(memory: Any) -> Sections | None:
    """The two sections, if that is what `memory` is: a file with one of them, a mapping with them, or `Sections`."""
    from lowtide.config.source import read_yaml
    from lowtide.mindformers.schema import has_sections, read_sections
    from lowtide.mindformers.schema.file import SECTIONS
    from lowtide.mindformers.schema.newer import is_newer

    if isinstance(memory, Sections):
        return memory
    if isinstance(memory, Mapping):
        newer = {key: value for key, value in memory.items() if is_newer(key, value)}
        if not newer and not any(key in SECTIONS for key in memory):
            return None
        unknown = [key for key in memory if key not in (*(newer or SECTIONS), "compat")]
        if unknown:
            raise ConfigError(f"{unknown[0]}: cannot stand beside {' and '.join(newer or SECTIONS)}")
        return Sections(
            newer=newer or None,
            recompute_config=memory.get("recompute_config"),
            swap_config=memory.get("swap_config"),
            compat=bool(memory.get("compat", False)),
        )
    if isinstance(memory, str) or hasattr(memory, "__fspath__"):
        root = read_yaml(memory)
        return read_sections(memory, root) if has_sections(root) else None
    return None
