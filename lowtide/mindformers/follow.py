"""`recompute_config` and `swap_config` on a model: observe the first step, then do what the file says.

What: `follow` does for files of MindSpore Transformers what `optimize` does for a budget. It puts one wrapper on the
model. The first forward pass of each shape is observed (one extra step that leaves no trace), which shows what each op
saves and how it can be recomputed. Then mindformers/plan.py decides the fates, and the runtime carries them out.
Why a step is observed: files name single operators (`flash_attention`, `feed_forward.mul`) that are no modules.
Cost: that of the autopilot, without its solver. Not covered: DTensor parameters of FSDP2 and of tensor parallelism in
one model.

`parallel_optimizer_comm_recompute`: whether the parameters of recomputed layers are gathered again in backward.

What: after a module's forward FSDP2 either shards its parameters again (and gathers them a second time before the
backward), or keeps them whole until then. In recomputed layers true asks for the first, false for the second. Where the
file does not have the key, FSDP2 stays as the user built it. `undo` gives each module its own setting back.
Why here: what reads these parameters in backward is the layer that runs again.
Cost of true: one all-gather a layer and step; of false: the layer's parameters from forward to backward.
Not covered: recomputed single ops, and modules that shard several layers as one.

`recompute_slice_activation`: tensor-parallel ranks share the inputs of recomputed layers between them.

What: with tensor parallelism each rank runs a layer on the same input, and a recomputed layer holds only its inputs. So
each of N ranks keeps one N-th of an input, and the whole is gathered when backward runs the layer again. The flat
storage is cut, so layout and shape do not matter.
Why inputs are compared: if ranks had different inputs, their slices would make up a tensor that no rank had, and
gradients would be wrong without an error. So in each forward pass that is recorded (the first, and those after a change
of shapes) every input is compared over the group before it is cut. If it differs, all ranks refuse the step. With
sequence parallelism inputs differ: there each rank has its own slice already, and there is nothing to gain.

Only inputs are cut that need a gradient and whose storage nothing else holds whole: hidden states, not masks or rotary
tables. An input of several layers is cut once. An input that has no N equal parts is kept whole, and a line says so.

Cost: one all-gather for each input in backward, in the order in which backward reaches the layers. Not covered:
swapped inputs (those stay whole), and inputs that begin to differ between ranks after they were compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.config.memory import MemoryConfig, plan_from_rules
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.base import EngineChoice
from lowtide.engines.choose import choose_engine
from lowtide.errors import ConfigError
from lowtide.loss.attach import attach_where
from lowtide.mindformers.collectives import with_own_groups
from lowtide.mindformers.plan import names_of_layers, plan_sections
from lowtide.mindformers.plan_rows import FilePlan, table
from lowtide.mindformers.schema import Resolution, Sections
from lowtide.mindformers.schema.issues import Issues, layers_text
from lowtide.profiling.layers import find_layers, is_numbered, named_layers
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.autopilot.plan_source import Facts
from lowtide.runtime.saved.handle import Kept
from lowtide.runtime.saved.stats import Counters, Ledger
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.compiled import refuse_compiled
from lowtide.tensors.fsdp import after_forward, fsdp_modules, is_cut_twice
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.optimizers import optimizer_of
from lowtide.tensors.private import storage_key, version_of
from lowtide.tensors.ranks import ALONE
from lowtide.tensors.view import View

KEY_SLICES = "recompute_slice_activation"
_MAX_CHUNK = 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Any odd number will do: as a factor it makes the sum depend on the order.
_FACTOR = 0x9E3779B97F4A7C1

Parts = dict[int, tuple[StorageWeakRef, int, "InputSlice"]]
"""What one forward pass has cut, by storage key: the storage, its version then, and this rank's part."""


def tensor_parallel_group(model: nn.Module) -> Any:
    """The process group of the mesh dimension 'tp' of the model's DTensor parameters; None without one."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            return mesh.get_group("tp")
    return None


class InputSlice:
    """This rank's part of one storage. Counts its bytes in the ledger."""

    __slots__ = ("__weakref__", "flat", "group", "nbytes")

    def __init__(self, flat: torch.Tensor, group: Any, ledger: Ledger) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.nbytes = flat.numel() // size
        ledger.hold(self, self.nbytes)
        self.group = group
        self.flat = flat.narrow(0, rank * self.nbytes, self.nbytes).clone()

    def whole(self) -> torch.UntypedStorage:
        """The storage with the parts of all ranks. Collective: all ranks must call it."""
        flat = self.flat.new_empty(self.nbytes * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(flat, self.flat, group=self.group)
        return flat.untyped_storage()


class Sliced:
    """A saved tensor of which this rank holds only a part."""

    __slots__ = ("part", "view")

    def __init__(self, part: InputSlice, tensor: torch.Tensor) -> None:
        self.part = part
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor, gathered. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        return self.view.over(self.part.whole())


class Slices:
    """Cuts the inputs of recomputed layers of one tide."""

    def __init__(self, group: Any, say: Callable[[str], None]) -> None:
        self.group = group
        self.say = say

    def instead_of(
        self,
        handle: Any,
        tensor: torch.Tensor,
        parts: Parts,
        where: str,
        *,
        counters: Counters,
        ledger: Ledger,
        compares: bool,
    ) -> Any:
        """The handle on an input of layer `where`: `handle`, or one on a slice. Collective with `compares`.

        Raises ConfigError on every rank if the ranks have different inputs.
        """
        if not is_plain(tensor) or not tensor.is_floating_point() or not tensor.requires_grad:
            return handle
        storage = tensor.untyped_storage()
        known = parts.get(storage_key(storage))
        if known is not None and not known[0].expired() and known[1] == version_of(tensor):
            return Sliced(known[2], tensor)
        if type(handle) is not Kept or not handle.is_first:
            return handle
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        num_ranks = dist.get_world_size(self.group)
        fits = tensor.numel() % num_ranks == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
        if compares:
            # Also where it does not fit: all ranks must issue the same collectives.
            self._compare(flat.view(_BITS[tensor.element_size()]), where)
        if not fits:
            if compares:
                self.say(
                    f"note: {KEY_SLICES}: an input of '{where}' is kept whole; its {tensor.numel()} numbers are no "
                    f"storage of their own that {num_ranks} ranks could share equally"
                )
            return handle
        part = InputSlice(flat, self.group, ledger)
        counters.kept_bytes += part.nbytes - storage.nbytes()
        parts[storage_key(storage)] = (StorageWeakRef(storage), version_of(tensor), part)
        return Sliced(part, tensor)

    def _compare(self, bits: torch.Tensor, where: str) -> None:
        mine = torch.tensor([bits.numel(), _checksum(bits)], device=bits.device)
        all_of_them = mine.new_empty(2 * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(all_of_them, mine, group=self.group)
        found = all_of_them.view(-1, 2).tolist()
        other = next((rank for rank, entry in enumerate(found) if entry != found[0]), None)
        if other is None:
            return
        raise ConfigError(
            f"{KEY_SLICES}: an input of '{where}' is not the same on ranks 0 and {other} of the tensor-parallel group, "
            "so a slice of it would give wrong gradients. With sequence parallelism each rank has its own slice "
            f"already; set {KEY_SLICES} to false"
        )


def _checksum(bits: torch.Tensor) -> int:
    """A number that depends on each bit and on their order. `bits` is 1-D, of an integer dtype."""
    total = 0
    for start in range(0, bits.numel(), _MAX_CHUNK):
        chunk = bits[start : start + _MAX_CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + chunk.numel(), device=bits.device) * _FACTOR
        total = (total + int((chunk * (weights | 1)).sum())) % 2**62
    return total


KEY_GATHERS = "parallel_optimizer_comm_recompute"


class Resharding:
    """The setting of the FSDP2 modules in recomputed layers. In force until `undo()`."""

    def __init__(self, model: nn.Module, resolution: Resolution, layers: Sequence[str]) -> None:
        self.notes: list[str] = []
        """Lines that say what has no effect, and why."""
        self._before: list[tuple[Any, str, Any]] = []
        # In a stage of a pipeline, plans have the whole model's layer numbers, and names have the stage's own.
        recomputed = [(plan.index, name) for plan, name in zip(resolution.layers, layers, strict=True)
                      if plan.full_recompute]  # fmt: skip
        if resolution.gathers_again is None or not recomputed:
            return
        if not fsdp_modules(model):
            if resolution.gathers_again:
                self.notes.append(f"no effect: {KEY_GATHERS}; no parameters are sharded by FSDP2 in this model")
            return
        found = {index: fsdp_modules(model.get_submodule(name)) for index, name in recomputed}
        for module in (module for modules in found.values() for module in modules):
            self._before += after_forward(module)
            module.set_reshard_after_forward(resolution.gathers_again, recurse=False)
        untouched = [index for index, modules in found.items() if not modules]
        if untouched:
            self.notes.append(
                f"no effect: {KEY_GATHERS} in {layers_text(untouched)}; no module there is sharded by itself"
            )
        kept = [index for index, modules in found.items() if modules and not resolution.gathers_again]
        if kept:
            self.notes.append(
                f"{KEY_GATHERS} is false: the gathered parameters of {layers_text(kept)} stay on the device from "
                "forward to backward; true frees them"
            )

    def undo(self) -> None:
        """Give each module its own setting back. Idempotent."""
        for owner, name, value in self._before:
            setattr(owner, name, value)
        self._before.clear()


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
    placed = PlacedState(optimizer, chosen, "lowtide.apply")
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
        return None, [] if group is None else [f"no effect: tp_group; no {KEY_SLICES} is in force"]
    found = group if group is not None else tensor_parallel_group(model)
    if found is None:
        issues = Issues(compat=sections.compat, places=sections.places)
        issues.tolerate(
            f"recompute_config.{KEY_SLICES}",
            "needs the tensor-parallel group, and no parameter of this model is a DTensor on a mesh dimension 'tp'",
            meaning="it has no effect; give the group: lowtide.apply(..., tp_group=group)",
            fix="give the group, lowtide.apply(..., tp_group=group), or set it to false",
        )
        return None, issues.warnings
    num_ranks = torch.distributed.get_world_size(found)
    if num_ranks == 1:
        return None, [f"no effect: {KEY_SLICES}; the tensor-parallel group has one rank"]
    return found, [f"{KEY_SLICES}: each of {num_ranks} ranks keeps 1/{num_ranks} of the inputs of recomputed layers"]


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
            tide.slice_inputs(Slices(self._tp_group, self._say_once))

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
