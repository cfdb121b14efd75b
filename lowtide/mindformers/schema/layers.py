"""One layer after the other: which parts of it the rules name, and what recompute leaves of a swap.

What: `Work` holds the rules as read (recompute.py, swap.py) and the names of every layer, and gives a `LayerPlan` for
each. On the way it collects upstream's log lines of the layers, and what has to be said once for many layers
(`report_lost` and `report_patterns` say it).
Why the log lines and the plans may differ: upstream logs a swap also where recompute undoes it, and of several parts
with one parent only the last.
Cost: a few expressions per pattern and layer. Not covered: what upstream prints before the first layer (`head_lines`).

What is said once about many layers: upstream's tables, swaps that are undone, patterns that name nothing.

The result of resolving the two sections: a plan for each layer, with its log lines, notes and warnings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.mindformers.schema.aliases import family_of
from lowtide.mindformers.schema.grid import Grid, Table
from lowtide.mindformers.schema.issues import Issues, layers_text
from lowtide.mindformers.schema.names import (
    LAYER,
    PatternMatch,
    Tree,
    check,
    find,
    is_within,
    left_of_swap,
    lookup,
    matches_everything,
    nearest,
    operator_in,
    recomputed_reader,
    roles_of,
)
from lowtide.mindformers.schema.recompute import SELECT_KEYS, Prefetch, Recompute
from lowtide.mindformers.schema.swap import Swap, first_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """What happens to one layer. Names are relative to the layer; `<layer>` is the layer as a whole."""

    index: int
    stage: int
    chunk: int
    full_recompute: bool = False
    recompute_ops: list[str] = field(default_factory=list)
    """Empty where the whole layer is recomputed."""
    comm_recompute_ops: list[str] = field(default_factory=list)
    """Operators whose collectives are recomputed."""
    recompute_exclude_ops: list[str] = field(default_factory=list)
    """Operators that are kept although the layer, or a part around them, is recomputed."""
    comm_recompute_exclude_ops: list[str] = field(default_factory=list)
    swap_ops: dict[str, Prefetch] = field(default_factory=dict)
    """Part -> prefetch distance, in the order applied: a later part decides for what it shares with an earlier one."""
    swap_holes: dict[str, list[str]] = field(default_factory=dict)
    """Swapped part -> what in it is recomputed instead."""
    swap_stays: dict[str, str] = field(default_factory=dict)
    """Part of `swap_ops` -> the recomputed part that reads it: it is asked to be swapped, but stays on the device."""
    swap_lost: dict[str, str] = field(default_factory=dict)
    """Part -> why it is not swapped although a rule says so: it is recomputed."""
    why: dict[str, str] = field(default_factory=dict)
    """Recomputed or swapped part, or `<layer>` -> the rule that decides, and where it was written."""
    comm_why: dict[str, str] = field(default_factory=dict)
    """The same for the operators of `comm_recompute_ops`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Lists and dicts as JSON has them, so that it can be printed, dumped and compared."""

    num_layers_per_stage: Table
    """`[chunk][stage]`."""
    normalized: dict[str, Any]
    """Counts `[chunk][stage]`; with swap on, layer indices or `True`."""
    layers: list[LayerPlan]
    """Of the whole model, or of one stage of it."""
    log_lines: list[str]
    warnings: list[str]
    notes: list[str]
    """What has no effect here and why; nothing is wrong."""
    prefetch_unit: str = "operators"
    """What a prefetch distance counts: 'operators' of the backward pass, or 'layers'."""
    regathers: bool | None = None
    """Sharded parameters of recomputed layers are gathered again in backward; None: the file does not say."""
    keeps_collectives: bool = False
    """What collectives give in recomputed layers is kept, and they are not issued again."""
    slices_inputs: bool = False
    """Recomputed layers keep a slice of their inputs on each tensor-parallel rank."""


@dataclass(slots=True, kw_only=True)
class Work:
    """One resolution on its way; collects lines and what has to be said once for many layers."""

    grid: Grid
    trees: list[Tree | None]
    recompute: Recompute
    swap: Swap
    issues: Issues
    last_layer: int
    lines: list[str] = field(default_factory=list)
    matches: dict[tuple[str, int], PatternMatch] = field(default_factory=dict)
    matches_by_rule: dict[tuple[str, str], list[PatternMatch]] = field(default_factory=dict)
    """(path, pattern) -> what it named, layer by layer, in the layers where it applies."""
    lost: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """(path, sentence) -> layers in which a swap is undone."""

    # ---- patterns

    def patterns(self) -> list[tuple[str, str, bool]]:
        """(path, pattern, is_default)."""
        rules = [
            (selection.path, pattern, selection.is_default)
            for key in SELECT_KEYS
            for pattern, selection in self.recompute.by_key[key].items()
        ]
        if self.swap.is_on:
            for pattern, entries in self.swap.ops.items():
                rules += [(entry.path, pattern, self.swap.is_default) for entry in entries]
        return rules

    def check_patterns(self) -> None:
        for path, pattern, _ in self.patterns():
            if (problem := check(pattern)) is not None:
                self.issues.refuse(path, f"{problem}; write names with '\\.' between the levels: {pattern!r}")

    def _find(self, pattern: str, layer: int, path: str, *, is_default: bool) -> PatternMatch:
        tree = self.trees[layer]
        key = (pattern, id(tree))
        if key not in self.matches:
            self.matches[key] = find(pattern, tree, is_default=is_default)
        self.matches_by_rule.setdefault((path, pattern), []).append(self.matches[key])
        return self.matches[key]

    # ---- one layer

    def layer(self, index: int) -> LayerPlan:
        chunk, stage = self.grid.locate(index)
        is_full = self.recompute.full.covers(index)
        if is_full and not (self.swap.is_on and self.recompute.full.shown is True):
            self.lines.append(f"Set full recompute at layer {index}")
        why: dict[str, str] = {}
        if is_full:
            why[LAYER] = self.issues.where(self.recompute.full.path)
        ops: list[str] = []
        comm: list[str] = []
        comm_why: dict[str, str] = {}
        if not is_full:
            ops = self._select("select_recompute", index, why)
            comm = self._select("select_comm_recompute", index, comm_why)
        kept: list[str] = []
        comm_kept: list[str] = []
        if not self.swap.is_on or self.recompute.takes_modules:
            kept = self._select("select_recompute_exclude", index, {})
            comm_kept = self._select("select_comm_recompute_exclude", index, {})
        plan = LayerPlan(
            index=index,
            stage=stage,
            chunk=chunk,
            full_recompute=is_full,
            recompute_ops=[name for name in ops if name not in kept],
            comm_recompute_ops=[name for name in comm if name not in comm_kept],
            recompute_exclude_ops=kept,
            comm_recompute_exclude_ops=comm_kept,
            why=why,
            comm_why=comm_why,
        )
        if self.swap.is_on:
            self._swap(plan, ops)
        return plan

    def _select(self, key: str, index: int, why: dict[str, str]) -> list[str]:
        """What one `select_*` key names in a layer, each part once, and the log lines for it."""
        names: dict[str, str] = {}
        logged: list[str] = []
        only_operators = key != "select_recompute" and not self.recompute.takes_modules
        for pattern, selection in self.recompute.by_key[key].items():
            if not selection.covers(index):
                continue
            if matches_everything(pattern):
                self.issues.tolerate(selection.path, "matches_everything", pattern=pattern)
            found = self._find(pattern, index, selection.path, is_default=selection.is_default)
            tree = self.trees[index] if only_operators and found.reading != "alias" else None
            for group in found.groups:
                modules = [name for name in group if isinstance(lookup(name, tree), Mapping)]
                named = [name for name in group if name not in modules]
                for name in modules:
                    self._module_where_operator(key, name, selection.path)
                for name in named:
                    why.setdefault(name, self.issues.where(selection.path))
                    if names.setdefault(name, pattern) != pattern:
                        how = {"name": name, "first": names[name], "second": pattern}
                        self.issues.tolerate(selection.path, "named_twice", **how)
                logged += named[-1:] if not found.translated else []
            logged += found.logged if found.translated else []
        if key == "select_recompute":
            self._check_overlaps(names, key, index)
        if logged:
            what = "comm recompute" if "comm" in key else "recompute"
            verb = " exclude" if "exclude" in key else "" if self.swap.is_on else " on"
            self.lines.append(f"Set select {what}{verb} at layer {index}: {', '.join(logged)}")
        return list(names)

    def _module_where_operator(self, key: str, name: str, path: str) -> None:
        shown = name if "." in name else f".{name}"
        kind = "select recompute/comm_recompute exclude" if "exclude" in key else "communication recompute"
        self.lines.append(
            f"For {kind}, {shown} is expected to be operation but got cell, this configuration will not be effective."
        )
        operator = operator_in(name, self.trees)
        self.issues.tolerate(path, "module_for_operator", name=name, key=key, operator=operator)

    def _check_overlaps(self, names: dict[str, str], key: str, index: int) -> None:
        """Parts inside another selected part, and casts that the older norms recompute by themselves."""
        selections = self.recompute.by_key[key]
        for name, pattern in names.items():
            path = selections[pattern].path
            outer = next((other for other in names if other != name and is_within(name, other)), None)
            if outer is not None:
                self.issues.tolerate(path, "within_another", name=name, outer=outer)
            if name.endswith("norm.cast") and family_of(self.trees[index]) == "legacy":
                self.issues.tolerate(path, "cast_of_norm", name=name)

    # ---- swap

    def _swap(self, plan: LayerPlan, ops: list[str]) -> None:
        """Fill in which parts of a layer are swapped, and what recompute, that of `ops` too, leaves of each."""
        index = plan.index
        asked: dict[str, tuple[Prefetch, str]] = {}
        entry = first_entry(self.swap.layers, index)
        if entry is not None:
            asked[LAYER] = (entry.prefetch, entry.path)
            self.lines.append(f"Set layer swap at layer {index} and value is: {entry.prefetch}")
        logged: list[str] = []
        for pattern, entries in self.swap.ops.items():
            entry = first_entry(entries, index)
            if entry is None:
                continue
            found = self._find(pattern, index, entry.path, is_default=self.swap.is_default)
            for name in found.names:
                asked.pop(name, None)
                asked[name] = (entry.prefetch, entry.path)
            for name in found.logged:
                logged.append(f"{name if '.' in name else '.' + name}, value={entry.prefetch}")
        if logged:
            self.lines.append(f"Set op_swap at layer {index}: {', '.join(logged)}")
        for target, (prefetch, path) in asked.items():
            self._weigh(plan, target, path, ops)
            if target not in plan.swap_lost:
                plan.swap_ops[target] = prefetch
                plan.why.setdefault(target, self.issues.where(path))

    def _weigh(self, plan: LayerPlan, target: str, path: str, ops: list[str]) -> None:
        """Write down what recompute does not leave of a swapped part, and say why."""
        index, tree = plan.index, self.trees[plan.index]
        what = "the layer" if target == LAYER else f"'{target}'"
        holes = None if plan.full_recompute else left_of_swap(target, ops, tree)
        if holes is None:
            why = "the whole layer is recomputed" if plan.full_recompute else "it is recomputed"
            plan.swap_lost[target] = why
            self._lose(path, f"{what} is not swapped in {{layers}}: {why} there", index)
            return
        reader, read = recomputed_reader(target, ops, tree)
        if reader:
            plan.swap_stays[target] = reader
            inputs = ", ".join(f"'{name}'" for name in read)
            self._lose(
                path,
                f"{what} is not swapped in {{layers}}: '{reader}' reads it and is recomputed there, so that it has to "
                f"stay on the device; lowtide can swap what a recomputed part reads instead: take '{reader}' and "
                f"{inputs} into the section 'memory', under recompute and under swap",
                index,
            )
        elif holes:
            plan.swap_holes[target] = holes
            inner = ", ".join(f"'{name}'" for name in holes)
            self._lose(path, f"of {what} the part {inner} is not swapped in {{layers}}: it is recomputed there", index)
        is_output = target == LAYER or "layer_output" in roles_of(target, tree)
        if is_output and self._next_recomputes(index):
            self._lose(
                path,
                f"the output of {{layers}} is not swapped with {what}: the layer after it reads it and is recomputed",
                index,
            )

    def _next_recomputes(self, index: int) -> bool:
        """Does the next layer recompute what reads its input?"""
        following = index + 1
        if following > self.last_layer:
            return False
        if self.recompute.full.covers(following):
            return True
        for pattern, selection in self.recompute.by_key["select_recompute"].items():
            if not selection.covers(following):
                continue
            found = find(pattern, self.trees[following], is_default=selection.is_default)
            if any("input_norm" in roles_of(name, self.trees[following]) for name in found.names):
                return True
        return False

    def _lose(self, path: str, sentence: str, index: int) -> None:
        self.lost.setdefault((path, sentence), []).append(index)


def head_lines(work: Work) -> list[str]:
    """What upstream prints before the first layer."""
    lines = []
    if not work.swap.is_on:
        lines.append(f"num_layers per stage: {work.grid.table()}")
        lines.append(f"Accumulated num_layers per stage: {work.grid.accumulated()}")
    tables = work.recompute.log_texts() | work.swap.normalized()
    lines.append(f"Formative layer_recompute: {tables['layer_recompute']}")
    for key, pattern in work.recompute.removed:
        lines.append(f"The pattern {pattern} in {key} conflicts with {key}_exclude and will be removed.")
    lines += [f"Formative {key}: {tables[key]}" for key in SELECT_KEYS]
    if work.swap.is_on:
        lines.append(f"Formative layer swap: {tables['layer_swap']}")
        lines.append(f"Formative op swap: {tables['op_swap']}")
    return lines


def report_patterns(work: Work) -> None:
    """Warnings about patterns that name nothing, or something else than they look like."""
    defaults: dict[str, list[tuple[str, list[PatternMatch]]]] = {}
    is_default = {(path, pattern): default for path, pattern, default in work.patterns()}
    for (path, pattern), found in work.matches_by_rule.items():
        if is_default[path, pattern]:
            defaults.setdefault(path, []).append((pattern, found))
        else:
            _report_pattern(work, path, pattern, found)
    for path, group in defaults.items():
        if not any(one.groups for _, found in group for one in found):
            report_nothing(work, path, " and ".join(f"'{pattern}'" for pattern, _ in group), group[0][0])


def report_lost(work: Work) -> None:
    """Swaps that recompute undoes."""
    for (path, sentence), layers in work.lost.items():
        work.issues.warn(path, sentence.format(layers=layers_text(layers)))


def _report_pattern(work: Work, path: str, pattern: str, found: list[PatternMatch]) -> None:
    readings = {one.reading for one in found}
    if readings == {"free"}:
        work.issues.note(f"no effect: {path} '{pattern}', because it is a view or a cast in PyTorch")
    elif not readings & {"exact", "plain dots", "alias"}:
        report_nothing(work, path, f"'{pattern}'", pattern)
    elif "plain dots" in readings and work.issues.compat:
        separated = pattern.replace("\\.", ".").replace(".", "\\.")
        work.issues.warn(
            path, f"'{pattern}' has plain dots, with which upstream matches nothing; read as '{separated}'"
        )
    elif "alias" in readings and "exact" not in readings:
        names = next(one for one in found if one.reading == "alias").names
        shown = ", ".join(f"'{name}'" for name in names)
        if work.issues.compat and family_of(work.trees[0]) in ("legacy", "mcore"):
            work.issues.warn(path, f"'{pattern}' is a Hugging Face name, which upstream does not know; read as {shown}")
        else:
            work.issues.note(f"{path}: '{pattern}' is here {shown}")


def report_nothing(work: Work, path: str, shown: str, pattern: str) -> None:
    tree = next((tree for tree in work.trees if tree is not None), {})
    names = nearest(pattern, tree)
    hint = "nearest: " + ", ".join(f"'{name}'" for name in names) if names else "names start below the layer"
    if pattern.startswith(("layers", "model")):
        hint = "names start below the layer, and layers are chosen by number"
    work.issues.tolerate(path, "names_nothing", shown=shown, hint=hint)
