"""`lowtide diff A.json B.json`: what the second plan does otherwise than the first.

Reads two plans that `lowtide plan --out` or `Plan.to_json` wrote; needs no model and no torch. Exit status, as for
`diff`: 0 if both do the same, 1 if not, 2 for a mistake.

What two plans do otherwise: promises, settings, rules, and the fate of each activation.

Why: a new plan is made when a budget, a batch or a machine changes; a user wants to see what that changed, and a
reviewer what a saved plan in a repository will do differently.
Sites are told by name. A site that only one of the plans has (a retained input, or a step that saved other tensors) is
absent from the other. Cost: one pass over both. Not covered: recipes that differ, and when swapped sites travel.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.cli.waiting import width_of_stdout
from lowtide.config.source import read_text
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.text_table import align, layers_label, plural, runs, wrapped
from lowtide.errors import ConfigError
from lowtide.units import format_bytes, format_seconds

_ABSENT = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of both plans, as text; `change` is empty where there is none, or no number."""

    what: str
    first: str
    second: str
    change: str = ""

    @property
    def differs(self) -> bool:
        return self.first != self.second


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """Sites of one name in a run of layers that have another fate in the second plan."""

    before: str
    """'keep', 'swap', 'recompute', 'retained input', 'keep as bits'; 'absent': this plan does not know them."""
    after: str
    where: str
    """`layers 0-3: mlp.act_fn.silu`, or the whole name outside of layers."""
    num_sites: int
    nbytes: int
    """Bytes of all of them in the second plan; of activations that it lacks, in the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """Two plans, side by side."""

    figures: tuple[Figure, ...]
    changes: tuple[PlanChange, ...]
    """The most bytes first."""
    rules_gone: tuple[str, ...]
    rules_new: tuple[str, ...]
    num_sites: int
    """Sites that both plans know."""

    @property
    def is_same(self) -> bool:
        """Whether both plans do the same. What they promise may differ."""
        return not (self.changes or self.rules_gone or self.rules_new)


def plan_diff(first: Plan, second: Plan) -> PlanDiff:
    """What `second` does otherwise than `first`."""
    before, after = {site.name: site for site in first.sites}, {site.name: site for site in second.sites}
    moved = [
        (before.get(name), after.get(name))
        for name in dict.fromkeys((*before, *after))
        if _fate(before.get(name)) != _fate(after.get(name))
    ]
    layers = first.layers if len(first.layers) >= len(second.layers) else second.layers
    old, new = [_rules(plan) for plan in (first, second)]
    return PlanDiff(
        figures=tuple(_figures(first, second)),
        changes=tuple(_changes(moved, layers)),
        rules_gone=tuple(rule for rule in old if rule not in new),
        rules_new=tuple(rule for rule in new if rule not in old),
        num_sites=len(before.keys() & after.keys()),
    )


def diff_lines(diff: PlanDiff, first: str, second: str, width: int | None = None) -> list[str]:
    """Lines of text, of at most `width` characters; `first` and `second` are what the user calls the plans."""
    cells = [("", first, second, "change"), *((f.what, f.first, f.second, f.change) for f in diff.figures)]
    lines = align(cells, numeric=(1, 2, 3), width=width)
    for head, rules in ((f"rules only in {first}", diff.rules_gone), (f"rules only in {second}", diff.rules_new)):
        lines += ["", head, *wrapped((f"  {rule}" for rule in rules), width)] if rules else []
    if not diff.changes:
        known = f"all {diff.num_sites} {plural('site', diff.num_sites)}" if diff.num_sites else "no sites known"
        return [*lines, "", f"the same fates: {known}"]
    num_changed = sum(change.num_sites for change in diff.changes)
    rows = [(f"{c.before} -> {c.after}", str(c.num_sites), format_bytes(c.nbytes), c.where) for c in diff.changes]
    columns = (f"other fates: {num_changed} {plural('site', num_changed)}", "sites", "bytes", "which")
    return [*lines, "", *align([columns, *rows], numeric=(1, 2), width=width)]


def _fate(site: SiteDecision | None) -> str:
    if site is None:
        return "absent"
    if site.retained_input is not None and site.fate is Fate.KEEP:
        return "retained input"  # held because a recipe starts from it
    where = f" ({site.tier.value})" if site.tier is not None else ""
    smaller = f" as {site.codec.kind}" if site.codec is not None else ""
    return f"{site.fate.value}{where}{smaller}"


def _rules(plan: Plan) -> list[str]:
    return [str(rule) for rule in plan.rules.rules]


def _changes(
    moved: Iterable[tuple[SiteDecision | None, SiteDecision | None]], layers: tuple[str, ...]
) -> list[PlanChange]:
    """Sites of one name and one change in neighbouring layers make one row."""
    groups: dict[tuple[str, str, str], dict[str | None, list[int]]] = {}
    for before, after in moved:
        site = after if after is not None else before
        assert site is not None
        layer = site.layer if site.layer in layers else None
        name = site.name if layer is None else site.name.removeprefix(f"{layer}.")
        by_layer = groups.setdefault((_fate(before), _fate(after), name), {})
        by_layer.setdefault(layer, []).append(site.nbytes)
    changes = []
    for (was, becomes, name), by_layer in groups.items():
        inside = [layer for layer in layers if layer in by_layer]
        for first, last in runs(inside, [None] * len(inside)):
            sizes = [size for layer in inside[first : last + 1] for size in by_layer[layer]]
            where = f"{layers_label(inside, first, last)}: {name}"
            changes.append(PlanChange(before=was, after=becomes, where=where, num_sites=len(sizes), nbytes=sum(sizes)))
        for size in by_layer.get(None, ()):
            changes.append(PlanChange(before=was, after=becomes, where=name, num_sites=1, nbytes=size))
    return sorted(changes, key=lambda change: -change.nbytes)


def _promised(key: str) -> Callable[[Plan], Any]:
    return lambda plan: None if plan.predicted is None else getattr(plan.predicted, key)


def _with_fate(fate: Fate) -> Callable[[Plan], int]:
    return lambda plan: sum(s.nbytes for s in plan.sites if s.fate is fate and s.retained_input is None)


def _moved(plan: Plan) -> int | None:
    return 0 if plan.optimizer is None else plan.optimizer.moved_bytes


_PROMISES = (
    ("peak", format_bytes, _promised("peak_bytes")),
    ("peak, everything kept", format_bytes, _promised("plain_peak_bytes")),
    ("floor", format_bytes, _promised("floor_bytes")),
    ("step", format_seconds, _promised("step_seconds")),
    ("step, everything kept", format_seconds, _promised("plain_seconds")),
    ("stalls", format_seconds, _promised("stall_seconds")),
    ("recompute", format_seconds, _promised("recompute_seconds")),
)
_DECISIONS = (
    ("kept", format_bytes, _with_fate(Fate.KEEP)),
    ("swapped", format_bytes, _with_fate(Fate.SWAP)),
    ("recomputed", format_bytes, _with_fate(Fate.RECOMPUTE)),
    ("layers", str, lambda plan: len(plan.layers)),
    ("min_bytes", format_bytes, lambda plan: plan.min_bytes),
    ("loss", str, lambda plan: plan.loss),
    ("optimizer state elsewhere", format_bytes, _moved),
)


def _figures(first: Plan, second: Plan) -> Iterator[Figure]:
    rows: list[Any] = [("plan", str, Plan.digest), ("budget", format_bytes, lambda plan: plan.budget_bytes)]
    rows += _PROMISES if first.predicted is not None or second.predicted is not None else ()
    for what, form, value_of in (*rows, *_DECISIONS):
        values = [value_of(plan) for plan in (first, second)]
        texts = [_ABSENT if value is None else form(value) for value in values]
        change = ""
        if form is not str and None not in values and texts[0] != texts[1]:
            change = f"{'+' if values[1] > values[0] else ''}{form(values[1] - values[0])}"
        yield Figure(what=what, first=texts[0], second=texts[1], change=change)


_MOST_BYTES = 1 << 28
"""A plan of 1,000 layers has some 20 MB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="A.json", help="a plan, as `lowtide plan --out` writes it")
    parser.add_argument("second", type=Path, metavar="B.json", help="another one")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the difference. Raises `ConfigError` for a file that is no plan."""
    diff = plan_diff(read_plan(args.first), read_plan(args.second))
    if args.json:
        print(json.dumps({**dataclasses.asdict(diff), "is_same": diff.is_same}))
    else:
        print("\n".join(diff_lines(diff, *_names(args.first, args.second), width_of_stdout())))
    return 0 if diff.is_same else 1


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises `ConfigError`, with the path, for one that is none."""
    text = read_text(path, most_bytes=_MOST_BYTES)
    try:
        return Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _names(first: Path, second: Path) -> tuple[str, str]:
    return (first.name, second.name) if first.name != second.name else (str(first), str(second))
