"""`recompute_config` and `swap_config` on a model: the first step is observed, and then everything is as written.

What: `follow` is for files of MindSpore Transformers what `optimize` is for a budget: one wrapper on the model; the
first forward pass of each shape is observed (one extra step that leaves no trace), which shows what every op saves and
how it is made again; planner/sections.py then says the fates, and the runtime carries them out.
Why to observe: single operators are named (`flash_attention`, `feed_forward.mul`) that are no modules.
Cost: that of the autopilot, without its solver. Not covered: `recompute_slice_activation` and
`parallel_optimizer_comm_recompute`, which are named in a line; sharded parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from lowtide.catalog.layers import find_layers, named_layers
from lowtide.catalog.site import Profile
from lowtide.catalog.wrappers import is_fully_sharded
from lowtide.config.mindformers import Resolution, Sections
from lowtide.config.native import MemoryConfig
from lowtide.errors import ConfigError
from lowtide.planner.collectives import with_own_groups
from lowtide.planner.plan import Plan
from lowtide.planner.sections import Written, names_of_layers, plan_sections, table
from lowtide.runtime.adapt import AutoTide
from lowtide.runtime.agree import agreed
from lowtide.runtime.engines.base import Engine
from lowtide.runtime.engines.choose import choose_engine
from lowtide.runtime.patch import patched_module
from lowtide.timeline.step import Link


def follow(
    model: nn.Module,
    sections: Sections,
    *,
    memory: MemoryConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    engine: Engine | str | None = None,
    group: Any = None,
    say: Callable[[str], None] | None = None,
) -> WrittenTide:
    """Carry out the two sections on `model` until `remove()`. Raises `ConfigError` at once for what does not fit it."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.apply: expected a torch.nn.Module, not {type(model).__name__}")
    if patched_module(model) is not None:
        raise ConfigError("lowtide.apply: this model is already under a lowtide plan; call remove() on it first")
    if is_fully_sharded(model):
        raise ConfigError(
            "lowtide.apply: this model's parameters are sharded (DTensor), which recompute_config and swap_config "
            "cannot act on in this version; write what you want into the section 'memory'"
        )
    config = memory or MemoryConfig()
    layers = named_layers(model, config.layers) if config.layers is not None else find_layers(model)
    resolution = resolve_for(model, sections, layers)
    bare = Plan.from_rules(dataclasses.replace(config, budget=None, recompute=None, swap=None), layers)
    chosen = choose_engine(engine, model, bare)
    how: Any = {"owns_engine": chosen is not engine, "group": group, "say": say}
    return WrittenTide(model, config, optimizer, chosen, resolution=resolution, memory=memory, **how)


def resolve_for(model: nn.Module, sections: Sections, layers: tuple[str, ...]) -> Resolution:
    """The sections for this very model: its number of layers, and the names in them."""
    if not layers:
        raise ConfigError(
            f"{sections.source}: no repeated block was found in this model; name the layers in the section 'memory', "
            "under layers"
        )
    written = sections.num_layers
    if written is not None and len(layers) not in (written, written + sections.num_extra_layers):
        raise ConfigError(f"{sections.source}: says {written} layers, but the model has {len(layers)}")
    names = names_of_layers([name for name, _ in model.named_modules()], layers)
    return sections.resolve(num_layers=len(layers), names=names)


class WrittenTide(AutoTide):
    """A model under `recompute_config` and `swap_config`. Shows the face of a `Tide`."""

    def __init__(self, *args: Any, resolution: Resolution, memory: MemoryConfig | None, **how: Any) -> None:
        model, config, *rest = args
        # There is no budget; the autopilot's is not asked for anywhere below.
        super().__init__(model, dataclasses.replace(config, budget=1), *rest, **how)
        self.resolution = resolution
        self.written: Written | None = None
        """The plan in force and its table; None before the first step."""
        self._memory = memory
        self._has_said: set[str] = set()

    def _measure_link(self) -> Link:
        return Link(out_bytes_per_second=1.0, in_bytes_per_second=1.0)  # nothing is timed

    def _make_plan(self, profile: Profile, budget_bytes: int) -> Plan:
        self.written = plan_sections(profile, self.resolution, self._memory)
        notes = [*self.resolution.notes, *self.written.notes]
        for line in [
            *self.resolution.log_lines,
            *(f"warning: {text}" for text in self.resolution.warnings),
            *(f"note: {text}" for text in notes),
            *table(self.written.rows),
        ]:
            self._say_once(line)
        return with_own_groups(agreed(self.written.plan, None, self._group), profile)

    def _say_once(self, line: str) -> None:
        if line not in self._has_said:
            self._has_said.add(line)
            self._say(line)

    def _guard_limit(self, plan: Plan) -> int | None:
        return None  # as written, and nothing else

    def _review(self, key: tuple) -> None:
        """Nothing was predicted, so nothing is compared."""

    def _time_backward(self, output: Any) -> None:
        """The same."""

    def _expect_gradients(self) -> None:
        self._expects_gradients = True  # fates do not depend on them

    def _tighten(self, error: BaseException) -> str | None:
        """After an out-of-memory error: as under rules, because there is no budget to plan anew for."""
        return self._tide._tighten(error) if self._tide is not None else None


def sections_in(memory: Any) -> Sections | None:
    """The two sections, if that is what `memory` is: a file with one of them, a mapping with them, or `Sections`."""
    from lowtide.config.mindformers import has_sections, read_sections
    from lowtide.config.mindformers.file import SECTIONS
    from lowtide.config.source import read_yaml

    if isinstance(memory, Sections):
        return memory
    if isinstance(memory, Mapping):
        if not any(key in SECTIONS for key in memory):
            return None
        unknown = [key for key in memory if key not in (*SECTIONS, "compat")]
        if unknown:
            raise ConfigError(f"{unknown[0]}: cannot stand beside recompute_config and swap_config")
        return Sections(
            recompute_config=memory.get("recompute_config"),
            swap_config=memory.get("swap_config"),
            compat=bool(memory.get("compat", False)),
        )
    if isinstance(memory, str) or hasattr(memory, "__fspath__"):
        root = read_yaml(memory)
        return read_sections(memory, root) if has_sections(root) else None
    return None
