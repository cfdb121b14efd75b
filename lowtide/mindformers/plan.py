"""A plan that follows `recompute_config` and `swap_config` to the letter: fates by name instead of by budget.

What: `plan_sections` takes what was resolved for each layer (mindformers/schema) and the profile of one step, and gives
every node its fate:

- A layer that is recomputed as a whole runs again. If an output in it is excluded, the layer does not run again as a
  whole; each of its other nodes is recomputed by its own recipe.
- The output of a recomputed op is dropped, and recomputed by its recipe. A retained input that the recipe needs is
  held.
- The outputs of a swapped op that backward reads are swapped, and the fetch starts as many operators before the first
  reader as the file says. For a whole layer or a module these are the outputs of everything in it.
- Recompute wins over swap, and what a recipe or a recomputed layer reads stays on the device.
- Where the collectives at an op are recomputed, their results are dropped, and they are issued again in backward. In a
  sequence-parallel layer the output of a norm is this rank's share of the sequence; only the share stays, and the
  all-gather runs once more before the first reader. Only functional collectives count, because they name their group
  (recipes/build.py), and only their results that autograd saves. All ranks of a group issue the same collectives in the
  same order, because backward follows the autograd graph and their graphs are equal
  (runtime/recompute/recipe_graph.py). Names of groups are each rank's own (`with_own_groups`).

Why from a profile: a default file names the attention kernel and the product of the gated MLP, which are no modules;
and only a step shows what is saved, how large it is, and what reads it.
Cost: the names times the parts of a layer. Not covered: translating names (the resolution has the model's own names).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, Site
from lowtide.core.recipe import Recipe
from lowtide.core.rules import Pattern, Rule, Rules, base_op
from lowtide.errors import ConfigError
from lowtide.mindformers.plan_rows import FilePlan, Row, prefetch_of, rows_of_step
from lowtide.mindformers.schema import LayerPlan, Resolution
from lowtide.mindformers.schema.aliases import tree_of
from lowtide.mindformers.schema.issues import layers_text
from lowtide.mindformers.schema.names import LAYER
from lowtide.planner.problem import needed_retained_inputs

_KERNEL, _AFTER_KERNEL = "self_attn.sdpa", "self_attn.o_proj"


def plan_sections(profile: Profile, resolution: Resolution, memory: MemoryConfig | None = None) -> FilePlan:
    """The plan of a resolution for the model and the step that the profile shows.

    `memory` says where bytes may go, and how small a storage is kept anyway; without it none is too small.
    """
    assert len(profile.layers) == len(resolution.layers)
    return _Planner(profile, resolution, memory).planned()


@dataclass(slots=True)
class _Fate:
    fate: Fate
    part: tuple[int, str] | None
    """The (layer, part) in whose row of the table its bytes are counted."""
    reason: str
    prefetch: int | None = None
    runs_with_layer: bool = False
    is_collective: bool = False
    """Recomputed by all ranks together."""

    def recipe_of(self, node: Site) -> Recipe | None:
        """The recipe of the node under this fate. None if it is not recomputed, or is recomputed with its layer."""
        if self.fate is not Fate.RECOMPUTE or self.runs_with_layer:
            return None
        return node.collective_recipe if self.is_collective else node.recipe


@dataclass(slots=True)
class _Planner:
    profile: Profile
    resolution: Resolution
    memory: MemoryConfig | None
    fates: dict[str, _Fate] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    empty: dict[str, list[int]] = field(default_factory=dict)
    bare: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By (part, why): the layers in which no collective at that part can be issued again."""
    names: dict[int, str] = field(default_factory=dict)
    by_layer: dict[int, list[Site]] = field(default_factory=dict)

    def planned(self) -> FilePlan:
        numbers = [layer.index for layer in self.resolution.layers]  # a stage of a pipeline does not start at 0
        self.names = dict(zip(numbers, self.profile.layers, strict=True))
        nodes = self.profile.nodes
        self.by_layer = {
            index: [node for node in nodes if node.name.startswith(f"{name}.")] for index, name in self.names.items()
        }
        for layer in self.resolution.layers:
            self._swap(layer)
            self._recompute(layer)
            self._recompute_collectives(layer)
        self._keep_what_is_read()
        self._note_distances()
        again = [(Pattern.parse(self.names[x.index]), x.why[LAYER]) for x in self.resolution.layers if _is_rerun(x)]
        plan = Plan(
            layers=self.profile.layers,
            rules=Rules(tuple(Rule(pattern=name, fate=Fate.RECOMPUTE, where=why) for name, why in again)),
            min_bytes=self.memory.least_bytes if self.memory else 0,
            **(self.memory.tier_limits if self.memory else {}),
            sites=tuple(self._decisions()),
            is_solved=True,
            loss=self.profile.loss,
        )
        return FilePlan(plan=plan, rows=self._rows(), notes=tuple(self.notes))

    def _within(self, layer: LayerPlan, part: str) -> list[Site]:
        """The nodes that a part of a layer produces."""
        nodes = self.by_layer[layer.index]
        if part == LAYER:
            return nodes
        start = len(self.names[layer.index]) + 1
        produced = [node for node in nodes if _is_of(node.name[start:], part)]
        if produced or part != _KERNEL:
            return produced
        # Here attention is several operators, not one kernel; the projection after them reads their output.
        readers = [node.recipe for node in nodes if _is_of(node.name[start:], _AFTER_KERNEL) and node.recipe]
        outputs = {name for recipe in readers for name in recipe.nodes}
        return [node for node in nodes if node.name in outputs]

    # ---- fates

    def _swap(self, layer: LayerPlan) -> None:
        for part, written in layer.swap_ops.items():
            prefetch = prefetch_of(written)
            nodes = [node for node in self._within(layer, part) if node.retained_input is None]
            if not nodes:
                self.empty.setdefault(part, []).append(layer.index)
            for node in nodes:
                distance = self._distance(node, layer.index, prefetch)
                fate = _Fate(Fate.SWAP, (layer.index, part), layer.why[part], distance)
                if node.nbytes < (self.memory.least_bytes if self.memory else 1):
                    fate = _Fate(Fate.KEEP, None, "smaller than min_bytes")
                elif node.reads and node.dies >= node.reads[0]:
                    fate = _Fate(Fate.KEEP, (layer.index, part), "something else holds it until backward")
                self.fates[node.name] = fate

    def _distance(self, node: Site, index: int, prefetch: int) -> int:
        """The distance in operators. If files count layers: from the first read of something of layer i + N."""
        if self.resolution.prefetch_unit == "operators":
            return prefetch
        ahead = self.by_layer.get(index + prefetch) or self.profile.sites  # in another stage: as early as possible
        return max(1, max(site.last_sequence for site in ahead if site.retained_input is None) - node.last_sequence)

    def _recompute(self, layer: LayerPlan) -> None:
        if _is_rerun(layer):
            outputs = self._read_outside(layer.index)
            for node in self.by_layer[layer.index]:
                if node.retained_input is None and node.name not in outputs:
                    place = (layer.index, LAYER)
                    self.fates[node.name] = _Fate(Fate.RECOMPUTE, place, layer.why[LAYER], runs_with_layer=True)
                else:
                    self.fates.pop(node.name, None)
            return
        kept = {node.name for part in layer.recompute_exclude_ops for node in self._within(layer, part)}
        parts = [LAYER] if layer.full_recompute else layer.recompute_ops
        if layer.full_recompute:
            kept |= self._read_outside(layer.index)
        for part in parts:
            nodes = self._within(layer, part)
            if not any(node.retained_input is None for node in nodes):
                self.empty.setdefault(part, []).append(layer.index)
            for node in nodes:
                if node.name in kept:
                    continue
                place = (layer.index, part)
                if node.recipe is None:
                    reason = f"cannot be recomputed: {node.why_no_recipe}"
                    self.fates[node.name] = _Fate(Fate.KEEP, place, reason)
                else:
                    self.fates[node.name] = _Fate(Fate.RECOMPUTE, place, layer.why[part])

    def _recompute_collectives(self, layer: LayerPlan) -> None:
        nodes = [node for node in self.by_layer[layer.index] if node.retained_input is None]
        start = len(self.names[layer.index]) + 1
        for part in layer.comm_recompute_ops:
            issued_again = [node for node in nodes if node.collective_recipe and is_at(node, part, start, _is_of)]
            for node in issued_again:
                why = layer.comm_why[part]
                self.fates[node.name] = _Fate(Fate.RECOMPUTE, (layer.index, part), why, is_collective=True)
            if not issued_again:
                reasons = {node.why_no_recipe for node in nodes if node.collective_recipe is None}
                why = "; ".join(sorted(reason for reason in reasons if reason.startswith("collective")))
                self.bare.setdefault((part, why), []).append(layer.index)

    def _read_outside(self, index: int) -> set[str]:
        """The outputs of a layer: nodes from which recipes outside of it start."""
        own = {node.name for node in self.by_layer[index]}
        readers = [node for node in self.profile.nodes if node.name not in own and node.recipe is not None]
        return own & {name for node in readers if node.recipe is not None for name in node.recipe.nodes}

    def _keep_what_is_read(self) -> None:
        """What recomputed nodes start from stays on the device, as MindSpore Transformers' documents say."""
        for node in self.profile.nodes:
            fate = self.fates.get(node.name)
            recipe = fate.recipe_of(node) if fate is not None and not fate.runs_with_layer else node.recipe
            if fate is None or fate.fate is not Fate.RECOMPUTE or recipe is None:
                continue
            for name in recipe.nodes:
                source = self.fates.get(name)
                if source is not None and source.fate is Fate.SWAP:
                    reader = self._named(fate)
                    self.fates[name] = _Fate(Fate.KEEP, source.part, f"{reader} reads it and is recomputed")

    def _named(self, fate: _Fate) -> str:
        assert fate.part is not None
        layer, part = fate.part
        return f"layer {layer}" if part == LAYER else f"'{part}' of layer {layer}"

    def _note_distances(self) -> None:
        """Note distances that reach past the start of backward, where no fetch can start, and rules without effect."""
        last = max((node.last_sequence for node in self.profile.sites), default=0)
        early: dict[int, set[int]] = {}
        for node in self.profile.nodes:
            fate = self.fates.get(node.name)
            if fate is None or fate.fate is not Fate.SWAP or fate.part is None or fate.prefetch is None:
                continue
            if fate.prefetch > last - node.last_sequence:
                early.setdefault(fate.prefetch, set()).add(fate.part[0])
        for prefetch, layers in early.items():
            self.notes.append(
                f"backward_prefetch {prefetch} reaches past the start of backward in {layers_text(layers)}: "
                "fetched as early as possible there"
            )
        for part, indices in self.empty.items():
            what = (
                "backward reads nothing that the layer makes"
                if part == LAYER
                else f"backward reads no output of '{part}'"
            )
            self.notes.append(f"no effect: {what} in {layers_text(indices)}")
        self._note_collectives()

    def _note_collectives(self) -> None:
        for (part, why), indices in self.bare.items():
            if self.profile.is_fake:
                self.notes.append(
                    f"select_comm_recompute at '{part}' in {layers_text(indices)}: a step that is traced in one "
                    "process has no collectives, so they are not in the table"
                )
                continue
            what = "backward reads no result of a functional collective there"
            reason = f" ({why})" if why else ""
            self.notes.append(f"no effect: select_comm_recompute at '{part}' in {layers_text(indices)}: {what}{reason}")
        excluded = [x.index for x in self.resolution.layers if x.full_recompute and x.comm_recompute_exclude_ops]
        if excluded:
            self.notes.append(
                f"no effect: select_comm_recompute_exclude in {layers_text(excluded)}: what is recomputed there is the "
                "layer, not a collective"
            )

    # ---- what comes out

    def _decisions(self) -> Iterator[SiteDecision]:
        unnamed = _Fate(Fate.KEEP, None, "no rule names it")
        fates = {node.name: self.fates.get(node.name, unnamed) for node in self.profile.nodes}
        found = {node.name: fates[node.name].recipe_of(node) for node in self.profile.nodes}
        recipes = {name: recipe for name, recipe in found.items() if recipe is not None}
        needed = needed_retained_inputs(self.profile, recipes)
        for node in self.profile.nodes:
            if node.retained_input is not None and node.name not in needed:
                continue
            fate, recipe = fates[node.name], recipes.get(node.name)
            yield SiteDecision.of(
                node,
                fate.fate,
                fate.reason,
                prefetch=fate.prefetch if fate.fate is Fate.SWAP else None,
                retained_input=node.retained_input,
                recipe=recipe,
                cost_seconds=recipe.seconds if recipe else 0.0,
            )

    def _rows(self) -> tuple[Row, ...]:
        sizes: dict[tuple[int, str, Fate], int] = {}
        reasons: dict[tuple[int, str], str] = {}
        issued: dict[tuple[int, str], list[Site]] = {}
        for node in self.profile.sites:
            fate = self.fates.get(node.name)
            if fate is None or fate.part is None:
                continue
            if fate.is_collective:
                issued.setdefault(fate.part, []).append(node)
                continue
            key = (*fate.part, fate.fate)
            sizes[key] = sizes.get(key, 0) + node.nbytes
            if fate.fate is Fate.KEEP:
                reasons.setdefault(fate.part, fate.reason)
        made = {
            part: (sum(node.nbytes for node in nodes), recomputed_collectives(nodes)) for part, nodes in issued.items()
        }
        return tuple(rows_of_step(self.resolution, sizes, reasons, made))


def _is_rerun(layer: LayerPlan) -> bool:
    """Whether the layer runs again as a whole. With an output excluded, its parts are recomputed one by one instead."""
    return layer.full_recompute and not layer.recompute_exclude_ops


def _is_of(name: str, part: str) -> bool:
    """Whether an op or a module of a layer produces this node. Both names start below the layer."""
    if name.startswith(f"{part}."):
        return True
    path, _, op = name.rpartition(".")
    return (f"{path}." if path else "") + base_op(op) == part


def names_of_layers(module_names: Sequence[str], layers: Sequence[str]) -> list[dict]:
    """For each layer the tree of its modules' names, as `resolve` takes it."""
    return [
        tree_of(name.removeprefix(f"{layer}.") for name in module_names if name.startswith(f"{layer}."))
        for layer in layers
    ]


# Operators that may stand between an op and its collective.
_VIEWS_AND_CASTS = frozenset({"aten._to_copy.default", "aten.clone.default", "aten.as_strided.default"})
_WORDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}


def is_at(node: Site, part: str, start: int, is_of: Callable[[str, str], bool]) -> bool:
    """Whether the node, which has a `collective_recipe`, comes from a collective at this part of its layer.

    Names below the layer begin at character `start`. `is_of(name, part)`: whether the part produces this node.
    """
    recipe = node.collective_recipe
    assert recipe is not None
    if is_of(node.name[start:], part):
        return True
    ops = [step.op for step in recipe.steps]
    first = next(place for place, op in enumerate(ops) if op.split(".")[1] in recipe.collectives)
    is_given = bool(recipe.nodes) and all(is_of(name[start:], part) for name in recipe.nodes)
    return is_given and _VIEWS_AND_CASTS.issuperset(ops[:first])


def recomputed_collectives(nodes: Sequence[Site]) -> str:
    """The collectives that make these nodes, as a phrase: `its all-gather is recomputed`."""
    names = [name for node in nodes if node.collective_recipe for name in node.collective_recipe.collectives]
    kinds = dict.fromkeys(_WORDS.get(name, name) for name in names)
    counts = {kind: sum(_WORDS.get(name, name) == kind for name in names) for kind in kinds}
    words = [kind if count == 1 else f"{count} {kind}s" for kind, count in counts.items()]
    return f"its {' and '.join(words)} {'is' if len(names) == 1 else 'are'} recomputed"


def with_own_groups(plan: Plan, profile: Profile) -> Plan:
    """A plan that another rank made, with this rank's names of the process groups in its recipes.

    `profile` is what this rank observed. Raises `ConfigError` if this rank did not observe such a collective.
    """
    own = {node.name: node.collective_recipe for node in profile.nodes}
    sites = []
    for site in plan.sites:
        if site.recipe is None or not site.recipe.collectives:
            sites.append(site)
            continue
        recipe = own.get(site.name)
        if recipe is None or recipe.collectives != site.recipe.collectives:
            raise ConfigError(
                f"recompute_config.select_comm_recompute: the first rank has a collective at '{site.name}' that this "
                "rank has not; ranks that share a plan must run the same layers"
            )
        sites.append(dataclasses.replace(site, recipe=recipe))
    return plan.with_sites(sites)
