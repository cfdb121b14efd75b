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
import json
from collections import defaultdict
from typing import Any

from lowtide.cli.plan import read_plan
from lowtide.cli.waiting import width_of_stdout
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.text_table import align, layers_label, plural, runs, wrapped
from lowtide.units import format_bytes, format_seconds


def run(args: argparse.Namespace) -> int:
    """Prints the difference. Raises `ConfigError` for a file that is no plan."""
    diff = plan_diff(read_plan(args.first), read_plan(args.second))
    if args.json:
        print(json.dumps(diff))
    else:
        is_told_apart = args.first.name != args.second.name
        first, second = (path.name if is_told_apart else str(path) for path in (args.first, args.second))
        print("\n".join(diff_lines(diff, first, second, width_of_stdout())))
    return 0 if diff["is_same"] else 1


def plan_diff(first: Plan, second: Plan) -> dict[str, Any]:
    """The document: what `second` does otherwise than `first`. What both promise may differ between two that do the
    same."""
    before, after = {site.name: site for site in first.sites}, {site.name: site for site in second.sites}
    layers = first.layers if len(first.layers) >= len(second.layers) else second.layers
    old, new = [[str(rule) for rule in plan.rules.rules] for plan in (first, second)]
    diff = {
        "figures": _compared_rows(first, second),
        "changes": _changes(before, after, layers),
        "rules_gone": [rule for rule in old if rule not in new],
        "rules_new": [rule for rule in new if rule not in old],
        "num_sites": len(before.keys() & after.keys()),
    }
    return diff | {"is_same": not (diff["changes"] or diff["rules_gone"] or diff["rules_new"])}


def diff_lines(diff: dict[str, Any], first: str, second: str, width: int | None = None) -> list[str]:
    """Lines of text, of at most `width` characters; `first` and `second` are what the user calls the plans."""
    cells = [("", first, second, "change"), *(tuple(figure.values()) for figure in diff["figures"])]
    lines = align(cells, numeric=(1, 2, 3), width=width)
    for head, rules in ((f"rules only in {first}", diff["rules_gone"]), (f"rules only in {second}", diff["rules_new"])):
        lines += ["", head, *wrapped((f"  {rule}" for rule in rules), width)] if rules else []
    if not diff["changes"]:
        known = (
            f"all {diff['num_sites']} {plural('site', diff['num_sites'])}" if diff["num_sites"] else "no sites known"
        )
        return [*lines, "", f"the same fates: {known}"]
    num_changed = sum(change["num_sites"] for change in diff["changes"])
    rows = [(f"other fates: {num_changed} {plural('site', num_changed)}", "sites", "bytes", "which")]
    for was in diff["changes"]:
        rows.append(
            (f"{was['before']} -> {was['after']}", str(was["num_sites"]), format_bytes(was["nbytes"]), was["where"])
        )
    return [*lines, "", *align(rows, numeric=(1, 2), width=width)]


def _fate(site: SiteDecision | None) -> str:
    """'absent': the plan does not know it."""
    if site is None:
        return "absent"
    if site.retained_input is not None and site.fate is Fate.KEEP:
        return "retained input"  # held because a recipe starts from it
    where = f" ({site.tier.value})" if site.tier is not None else ""
    smaller = f" as {site.codec.kind}" if site.codec is not None else ""
    return f"{site.fate.value}{where}{smaller}"


def _changes(
    before: dict[str, SiteDecision], after: dict[str, SiteDecision], layers: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Sites of one name and one change in neighbouring layers make one row, the most bytes first. Bytes are those of
    the second plan; of activations that it lacks, of the first."""
    groups: dict[tuple[str, str, str], dict[str | None, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, site in (before | after).items():
        was, becomes = _fate(before.get(name)), _fate(after.get(name))
        if was != becomes:
            layer = site.layer if site.layer in layers else None
            groups[was, becomes, name if layer is None else name.removeprefix(f"{layer}.")][layer].append(site.nbytes)
    changes = []
    for (was, becomes, name), by_layer in groups.items():
        inside = [layer for layer in layers if layer in by_layer]
        rows = [([size], name) for size in by_layer.get(None, ())]
        for start, end in runs(inside, [None] * len(inside)):
            sizes = [size for layer in inside[start : end + 1] for size in by_layer[layer]]
            rows.append((sizes, f"{layers_label(inside, start, end)}: {name}"))
        for sizes, where in rows:
            own = {"before": was, "after": becomes, "where": where}
            changes.append({**own, "num_sites": len(sizes), "nbytes": sum(sizes)})
    return sorted(changes, key=lambda change: -change["nbytes"])


_PROMISES = (
    ("peak", format_bytes, "peak_bytes"),
    ("peak, everything kept", format_bytes, "plain_peak_bytes"),
    ("floor", format_bytes, "floor_bytes"),
    ("step", format_seconds, "step_seconds"),
    ("step, everything kept", format_seconds, "plain_seconds"),
    ("stalls", format_seconds, "stall_seconds"),
    ("recompute", format_seconds, "recompute_seconds"),
)
_FATES = (("kept", Fate.KEEP), ("swapped", Fate.SWAP), ("recomputed", Fate.RECOMPUTE))


def _compared_rows(first: Plan, second: Plan) -> list[dict[str, str]]:
    """Figures of both plans, as text; `change` is empty where there is none, or no number."""
    plans = (first, second)
    rows: list[tuple[str, Any, list[Any]]] = [
        ("plan", str, [plan.digest() for plan in plans]),
        ("budget", format_bytes, [plan.budget_bytes for plan in plans]),
    ]
    if first.predicted is not None or second.predicted is not None:
        rows += [(what, form, [getattr(plan.predicted, key, None) for plan in plans]) for what, form, key in _PROMISES]
    for what, fate in _FATES:
        sites = [
            [site.nbytes for site in plan.sites if site.fate is fate and not site.retained_input] for plan in plans
        ]
        rows.append((what, format_bytes, list(map(sum, sites))))
    moved = [0 if plan.optimizer is None else plan.optimizer.moved_bytes for plan in plans]
    rows += [
        ("layers", str, [len(plan.layers) for plan in plans]),
        ("min_bytes", format_bytes, [plan.min_bytes for plan in plans]),
        ("loss", str, [plan.loss for plan in plans]),
        ("optimizer state elsewhere", format_bytes, moved),
    ]
    figures = []
    for what, form, values in rows:
        texts = ["-" if value is None else form(value) for value in values]
        change = ""
        if form is not str and None not in values and texts[0] != texts[1]:
            change = f"{'+' if values[1] > values[0] else ''}{form(values[1] - values[0])}"
        figures.append({"what": what, "first": texts[0], "second": texts[1], "change": change})
    return figures
