"""`recompute_config` and `swap_config` resolved for a model of so many layers: what happens to each part of each layer.

What: `resolve(...)` gives the tables as MindSpore Transformers normalises them, its log lines, and for every layer what
is recomputed and what is swapped, with recompute winning over swap. It looks at names and numbers only.
Why `log_lines` and `layers` may differ: upstream logs a swap also where recompute undoes it, and of several parts with
one parent only the last. The lines follow upstream; `layers` is what happens, and `warnings` says where the two part.
Cost: a few expressions per pattern and layer.
Not covered: carrying any of it out; the newer schema (`recompute: {mode: ...}`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lowtide.config.mindformers.aliases import family_of
from lowtide.config.mindformers.flow import LAYER, Verdict, judge, roles_of
from lowtide.config.mindformers.grid import Grid, Table, make_grid
from lowtide.config.mindformers.issues import Issues, layers_text
from lowtide.config.mindformers.names import (
    Found,
    Names,
    Tree,
    check,
    find,
    is_within,
    matches_everything,
    nearest,
    operator_in,
    trees_of,
)
from lowtide.config.mindformers.recompute import SELECT_KEYS, Recompute, read_recompute
from lowtide.config.mindformers.swap import Prefetch, Swap, first_entry, read_swap


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
    gathers_again: bool | None = None
    """Sharded parameters of recomputed layers are gathered again in backward; None: the file does not say."""
    slices_inputs: bool = False
    """Recomputed layers keep a slice of their inputs on each tensor-parallel rank."""


def resolve(
    recompute_config: object = None,
    swap_config: object = None,
    *,
    num_layers: int,
    pipeline_stage: int = 1,
    pp_interleave_num: int = 1,
    offset: object = 0,
    names: Names | None = None,
    compat: bool = True,
) -> Resolution:
    """Resolve the two sections for a model of `num_layers` layers.

    `names`: what a layer consists of, `{"feed_forward": {"mul": None, "w1": {...}}}`: None for an operator, a mapping
    for a module; one for all layers or one per layer. Absent: any name matches.
    `compat`: True follows MindSpore Transformers and warns where it hangs, crashes or silently does nothing; False
    refuses there. Raises `ConfigError`; the dotted key is the place.
    """
    return resolve_sections(
        recompute_config,
        swap_config,
        num_layers=num_layers,
        pipeline_stage=pipeline_stage,
        pp_interleave_num=pp_interleave_num,
        offset=offset,
        names=names,
        issues=Issues(compat=compat),
    )


def resolve_sections(
    recompute_config: object,
    swap_config: object,
    *,
    num_layers: int,
    pipeline_stage: int,
    pp_interleave_num: int,
    offset: object,
    names: Names | None,
    issues: Issues,
    held: range | None = None,
) -> Resolution:
    """`resolve` for values whose places are known to `issues`. `held`: only these layers, those of one stage."""
    grid = make_grid(num_layers, pipeline_stage, pp_interleave_num, offset, issues)
    trees = trees_of(names, num_layers, issues)
    families = {family_of(tree) for tree in trees}
    family = "mcore" if families == {"mcore"} else "legacy"
    swap = read_swap(swap_config, num_layers, family=family, issues=issues)
    recompute = read_recompute(recompute_config, grid, swap=swap.is_on, family=family, issues=issues)
    indices = range(num_layers) if held is None else held
    work = _Work(grid=grid, trees=trees, recompute=recompute, swap=swap, issues=issues, last_layer=indices[-1])
    work.check_patterns()
    layers = [work.layer(index) for index in indices]
    work.report()
    if held is not None:
        _note_other_split(grid, held, issues)
    issues.note_foreign()
    return Resolution(
        num_layers_per_stage=grid.table(),
        normalized=recompute.normalized() | swap.normalized(),
        layers=layers,
        log_lines=[*work.head_lines(), *work.lines],
        warnings=issues.warnings,
        notes=issues.notes,
        gathers_again=recompute.gathers_again,
        slices_inputs=recompute.slices_inputs,
    )


def _note_other_split(grid: Grid, held: range, issues: Issues) -> None:
    """Counts are of the file's stages; say so where the module at hand is not one of them."""
    chunk, stage = grid.locate(held[0])
    first = grid.starts[chunk][stage]
    written = range(first, first + grid.sizes[chunk][stage])
    if held != written and grid.num_stages * grid.num_chunks > 1:
        issues.note(
            f"this module holds {layers_text(held)}, but by the file stage {stage} of chunk {chunk} holds "
            f"{layers_text(written)}; counts are read by the file"
        )


@dataclass(slots=True, kw_only=True)
class _Work:
    """One resolution on its way; collects lines and what has to be said once for many layers."""

    grid: Grid
    trees: list[Tree | None]
    recompute: Recompute
    swap: Swap
    issues: Issues
    last_layer: int
    lines: list[str] = field(default_factory=list)
    found: dict[tuple[str, int], Found] = field(default_factory=dict)
    asked: dict[tuple[str, str], list[Found]] = field(default_factory=dict)
    """(path, pattern) -> what it named, layer by layer, in the layers where it applies."""
    lost: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """(path, sentence) -> layers in which a swap is undone."""

    # ---- patterns

    def _patterns(self) -> list[tuple[str, str, bool]]:
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
        for path, pattern, _ in self._patterns():
            if (problem := check(pattern)) is not None:
                self.issues.refuse(path, f"{problem}; write names with '\\.' between the levels: {pattern!r}")

    def _find(self, pattern: str, layer: int, path: str, *, is_default: bool) -> Found:
        tree = self.trees[layer]
        key = (pattern, id(tree))
        if key not in self.found:
            self.found[key] = find(pattern, tree, is_default=is_default)
        self.asked.setdefault((path, pattern), []).append(self.found[key])
        return self.found[key]

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
        if not self.swap.is_on:
            kept = self._select("select_recompute_exclude", index, {})
            comm_kept = self._select("select_comm_recompute_exclude", index, {})
        swapped: dict[str, Prefetch] = {}
        holes: dict[str, list[str]] = {}
        stays: dict[str, str] = {}
        lost: dict[str, str] = {}
        for target, prefetch, path, verdict in self._swap(index, ops, is_full=is_full) if self.swap.is_on else ():
            if not verdict.is_swapped:
                lost[target] = "the whole layer is recomputed" if is_full else "it is recomputed"
                continue
            swapped[target] = prefetch
            why.setdefault(target, self.issues.where(path))
            if verdict.holes:
                holes[target] = list(verdict.holes)
            if verdict.reader:
                stays[target] = verdict.reader
        return LayerPlan(
            index=index,
            stage=stage,
            chunk=chunk,
            full_recompute=is_full,
            recompute_ops=[name for name in ops if name not in kept],
            comm_recompute_ops=[name for name in comm if name not in comm_kept],
            recompute_exclude_ops=kept,
            comm_recompute_exclude_ops=comm_kept,
            swap_ops=swapped,
            swap_holes=holes,
            swap_stays=stays,
            swap_lost=lost,
            why=why,
            comm_why=comm_why,
        )

    def _select(self, key: str, index: int, why: dict[str, str]) -> list[str]:
        """What one `select_*` key names in a layer, each part once, and the log lines for it."""
        names: dict[str, str] = {}
        logged: list[str] = []
        only_operators = key != "select_recompute"
        for pattern, selection in self.recompute.by_key[key].items():
            if not selection.covers(index):
                continue
            if matches_everything(pattern):
                self._everything(selection.path, pattern)
            found = self._find(pattern, index, selection.path, is_default=selection.is_default)
            for group in found.groups:
                matches = [match for match in group if not (only_operators and match.is_op is False)]
                for match in group:
                    if match not in matches:
                        self._module_where_operator(key, match.name, selection.path)
                for match in matches:
                    why.setdefault(match.name, self.issues.where(selection.path))
                    if names.setdefault(match.name, pattern) != pattern:
                        self._twice(selection.path, match.name, names[match.name], pattern)
                logged += [match.name for match in matches[-1:]] if not found.translated else []
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
        self.issues.tolerate(
            path,
            f"names the module '{name}', but {key} takes operators only",
            meaning="ignored",
            fix=f"name an operator in it, such as '{name}\\.{operator_in(name, self.trees)}'",
        )

    def _everything(self, path: str, pattern: str) -> None:
        self.issues.tolerate(
            path,
            f"'{pattern}' matches every name at its last level, where upstream crashes",
            meaning="every operator and module there",
            fix="name the parts, or the module around them",
        )

    def _check_overlaps(self, names: dict[str, str], key: str, index: int) -> None:
        """Parts inside another selected part, and casts that the older norms recompute by themselves."""
        selections = self.recompute.by_key[key]
        for name, pattern in names.items():
            path = selections[pattern].path
            outer = next((other for other in names if other != name and is_within(name, other)), None)
            if outer is not None:
                self.issues.tolerate(
                    path,
                    f"names '{name}', which lies in '{outer}', itself selected; older MindSpore refuses that",
                    meaning=f"'{outer}' decides",
                    fix="remove one of them",
                )
            if name.endswith("norm.cast") and family_of(self.trees[index]) == "legacy":
                self.issues.tolerate(
                    path,
                    f"names '{name}', which upstream's norms recompute anyway, so that it crashes",
                    meaning="recomputed",
                    fix="remove it",
                )

    def _twice(self, path: str, name: str, first: str, second: str) -> None:
        self.issues.tolerate(
            path,
            f"names '{name}' by two patterns, '{first}' and '{second}', over which upstream may stumble",
            meaning="recomputed once",
            fix="remove one of them",
        )

    # ---- swap

    def _swap(self, index: int, ops: list[str], *, is_full: bool) -> Iterator[tuple[str, Prefetch, str, Verdict]]:
        """The parts of a layer that are to be swapped, with prefetch and rule, and what recompute leaves of each."""
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
            for match in found.matches:
                asked.pop(match.name, None)
                asked[match.name] = (entry.prefetch, entry.path)
            for name in found.logged:
                logged.append(f"{name if '.' in name else '.' + name}, value={entry.prefetch}")
        if logged:
            self.lines.append(f"Set op_swap at layer {index}: {', '.join(logged)}")
        for target, (prefetch, path) in asked.items():
            yield target, prefetch, path, self._judge(target, path, index, ops, is_full=is_full)

    def _judge(self, target: str, path: str, index: int, ops: list[str], *, is_full: bool) -> Verdict:
        """What recompute leaves of a swapped part; says why for what it does not leave."""
        what = "the layer" if target == LAYER else f"'{target}'"
        if is_full:
            self._lose(path, f"{what} is not swapped in {{layers}}: the whole layer is recomputed there", index)
            return Verdict(is_swapped=False)
        verdict = judge(target, ops, self.trees[index])
        if verdict.reader:
            inputs = ", ".join(f"'{name}'" for name in verdict.inputs)
            self._lose(
                path,
                f"{what} is not swapped in {{layers}}: '{verdict.reader}' reads it and is recomputed there, so that it "
                f"has to stay on the device; lowtide can swap what a recomputed part reads instead: take "
                f"'{verdict.reader}' and {inputs} into the section 'memory', under recompute and under swap",
                index,
            )
        elif not verdict.is_swapped:
            self._lose(path, f"{what} is not swapped in {{layers}}: it is recomputed there", index)
        elif verdict.holes:
            inner = ", ".join(f"'{name}'" for name in verdict.holes)
            self._lose(path, f"of {what} the part {inner} is not swapped in {{layers}}: it is recomputed there", index)
        if verdict.is_swapped and self._is_output(target, index) and self._next_recomputes(index):
            self._lose(
                path,
                f"the output of {{layers}} is not swapped with {what}: the layer after it reads it and is recomputed",
                index,
            )
        return verdict

    def _is_output(self, target: str, index: int) -> bool:
        """Does the part make what the next layer reads?"""
        return target == LAYER or "layer_output" in roles_of(target, self.trees[index])

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
            if any("input_norm" in roles_of(match.name, self.trees[following]) for match in found.matches):
                return True
        return False

    def _lose(self, path: str, sentence: str, index: int) -> None:
        self.lost.setdefault((path, sentence), []).append(index)

    # ---- what is said once

    def head_lines(self) -> list[str]:
        lines = []
        if not self.swap.is_on:
            lines.append(f"num_layers per stage: {self.grid.table()}")
            lines.append(f"Accumulated num_layers per stage: {self.grid.accumulated()}")
        tables = self.recompute.log_texts() | self.swap.normalized()
        lines.append(f"Formative layer_recompute: {tables['layer_recompute']}")
        for key, pattern in self.recompute.removed:
            lines.append(f"The pattern {pattern} in {key} conflicts with {key}_exclude and will be removed.")
        lines += [f"Formative {key}: {tables[key]}" for key in SELECT_KEYS]
        if self.swap.is_on:
            lines.append(f"Formative layer swap: {tables['layer_swap']}")
            lines.append(f"Formative op swap: {tables['op_swap']}")
        return lines

    def report(self) -> None:
        """Warnings that are about many layers at once: undone swaps, and patterns that name nothing."""
        for (path, sentence), layers in self.lost.items():
            self.issues.warn(path, sentence.format(layers=layers_text(layers)))
        defaults: dict[str, list[tuple[str, list[Found]]]] = {}
        is_default = {(path, pattern): default for path, pattern, default in self._patterns()}
        for (path, pattern), found in self.asked.items():
            if is_default[path, pattern]:
                defaults.setdefault(path, []).append((pattern, found))
            else:
                self._report_pattern(path, pattern, found)
        for path, group in defaults.items():
            if not any(one.groups for _, found in group for one in found):
                self._report_nothing(path, " and ".join(f"'{pattern}'" for pattern, _ in group), group[0][0])

    def _report_pattern(self, path: str, pattern: str, found: list[Found]) -> None:
        readings = {one.reading for one in found}
        if readings == {"free"}:
            self.issues.note(f"no effect: {path} '{pattern}', because it is a view or a cast in PyTorch")
        elif not readings & {"exact", "plain dots", "alias"}:
            self._report_nothing(path, f"'{pattern}'", pattern)
        elif "plain dots" in readings and self.issues.compat:
            separated = pattern.replace("\\.", ".").replace(".", "\\.")
            self.issues.warn(
                path, f"'{pattern}' has plain dots, with which upstream matches nothing; read as '{separated}'"
            )
        elif "alias" in readings and "exact" not in readings:
            names = next(one for one in found if one.reading == "alias").matches
            shown = ", ".join(f"'{match.name}'" for match in names)
            if self.issues.compat and family_of(self.trees[0]) in ("legacy", "mcore"):
                self.issues.warn(
                    path, f"'{pattern}' is a Hugging Face name, which upstream does not know; read as {shown}"
                )
            else:
                self.issues.note(f"{path}: '{pattern}' is here {shown}")

    def _report_nothing(self, path: str, shown: str, pattern: str) -> None:
        tree = next((tree for tree in self.trees if tree is not None), {})
        names = nearest(pattern, tree)
        hint = "nearest: " + ", ".join(f"'{name}'" for name in names) if names else "names start below the layer"
        if pattern.startswith(("layers", "model")):
            hint = "names start below the layer, and layers are chosen by number"
        self.issues.tolerate(path, f"{shown} names nothing in a layer", meaning=f"it does nothing; {hint}", fix=hint)
