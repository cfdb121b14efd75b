"""A plan as plain text: one row per run of equal layers, bytes by fate, and why.

Plain text because logs get pasted. Layers are equal when their sites are the same in name (after the layer's own),
bytes, dtype and fate; the reasons of a run are joined. What lies outside the layers has a row of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.planner.fate import Fate
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.planner.plan import Plan, SiteDecision

_FATES = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
_OUTSIDE = "outside layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    label: str
    num_layers: int
    fate: str
    bytes_by_fate: tuple[int, ...]
    """Bytes of all layers of the run, in the order of `_FATES`."""
    why: str


def plan_table(plan: Plan) -> str:
    """The text of `print(plan)`, without a trailing newline."""
    lines = [_headline(plan)]
    if plan.does_nothing:
        lines.append("This plan does nothing: every activation is kept.")
    if plan.rules.rules:
        lines.append("")
        lines += _rule_lines(plan)
    if not plan.sites:
        lines.append("")
        lines += _unobserved_lines(plan)
        return "\n".join(lines)
    rows = _site_rows(plan)
    lines.append("")
    lines += _table(rows)
    return "\n".join(lines)


def _headline(plan: Plan) -> str:
    num_layers, num_sites = len(plan.layers), len(plan.sites)
    observed = f"{num_sites} {_plural('site', num_sites)}" if num_sites else "no step observed yet"
    parts = [f"plan {plan.digest()}", f"{num_layers} {_plural('layer', num_layers)}", observed]
    parts.append(f"storages below {format_bytes(plan.min_bytes)} are kept")
    if plan.host_budget_bytes is not None:
        parts.append(f"host budget {format_bytes(plan.host_budget_bytes)}")
    if plan.disk_budget_bytes is not None:
        parts.append(f"disk budget {format_bytes(plan.disk_budget_bytes)}")
    if plan.disk_path is not None:
        parts.append(f"disk path {plan.disk_path}")
    return ", ".join(parts)


def _rule_lines(plan: Plan) -> list[str]:
    cells = [("rule", "fate", "prefetch", "tier", "written at")]
    for rule in plan.rules.rules:
        is_swap = rule.fate is Fate.SWAP
        prefetch = ("auto" if rule.prefetch is None else str(rule.prefetch)) if is_swap else ""
        tier = (rule.tier.value if rule.tier else "fastest") if is_swap else ""
        cells.append((rule.pattern.text, rule.fate.value, prefetch, tier, rule.where))
    return _align(cells, numeric=())


def _unobserved_lines(plan: Plan) -> list[str]:
    """Which layers a rule covers whole; what rules say of ops inside layers is known after a step."""
    if not plan.layers:
        return ["no layers"]
    keys: list[tuple[str, str]] = []
    for layer in plan.layers:
        decision = plan.rules.decide(layer, is_site=False)
        keys.append((decision.fate.value, decision.reason if decision.rule else "no rule names the whole layer"))
    cells = [("layers", "fate", "why")]
    for first, last in _runs(plan.layers, keys):
        cells.append((_layers_label(plan.layers, first, last), *keys[first]))
    return _align(cells, numeric=())


def _site_rows(plan: Plan) -> list[_Row]:
    by_layer: dict[str | None, list[SiteDecision]] = {layer: [] for layer in plan.layers}
    for site in plan.sites:
        by_layer.setdefault(site.layer if site.layer in by_layer else None, []).append(site)
    keys = [_signature(layer, by_layer[layer]) for layer in plan.layers]
    rows = []
    for first, last in _runs(plan.layers, keys):
        sites = [site for layer in plan.layers[first : last + 1] for site in by_layer[layer]]
        rows.append(_row(_layers_label(plan.layers, first, last), last - first + 1, sites))
    if by_layer.get(None):
        rows.append(_row(_OUTSIDE, 1, by_layer[None]))
    return rows


def _signature(layer: str, sites: Iterable[SiteDecision]) -> Hashable:
    return tuple((site.name.removeprefix(layer), site.nbytes, site.dtype, site.fate, site.tier) for site in sites)


def _row(label: str, num_layers: int, sites: Sequence[SiteDecision]) -> _Row:
    totals = tuple(sum(site.nbytes for site in sites if site.fate is fate) for fate in _FATES)
    counts = [(sum(site.fate is fate for site in sites) // num_layers, fate) for fate in _FATES]
    mix = " + ".join(f"{count} {fate.value}" for count, fate in counts if count)
    moved = [site for site in sites if site.fate is not Fate.KEEP]
    reasons = list(dict.fromkeys(site.reason for site in moved or sites))
    return _Row(
        label=label, num_layers=num_layers, fate=mix or "no sites", bytes_by_fate=totals, why="; ".join(reasons)
    )


def _table(rows: Sequence[_Row]) -> list[str]:
    cells: list[tuple[str, ...]] = [("", "sites each", "kept", "swapped", "recomputed", "why")]
    cells += [(row.label, row.fate, *map(_size, row.bytes_by_fate), row.why) for row in rows]
    totals = [sum(row.bytes_by_fate[index] for row in rows) for index in range(len(_FATES))]
    cells.append(("total", "", *map(_size, totals), ""))
    return _align(cells, numeric=(2, 3, 4))


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _runs(layers: Sequence[str], keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Inclusive index ranges of neighbours with equal keys and names that count up: `h.3`, `h.4`."""
    runs: list[tuple[int, int]] = []
    for index, key in enumerate(keys):
        if runs and keys[runs[-1][0]] == key and _follows(layers[index - 1], layers[index]):
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _follows(before: str, after: str) -> bool:
    stem, _, number = after.rpartition(".")
    return number.isdecimal() and before == f"{stem}.{int(number) - 1}"


def _layers_label(layers: Sequence[str], first: int, last: int) -> str:
    stem, _, number = layers[first].rpartition(".")
    if not number.isdecimal():
        return layers[first]
    is_only_stem = all(layer.rpartition(".")[0] == stem for layer in layers)
    numbers = number if first == last else f"{number}-{layers[last].rpartition('.')[2]}"
    if not is_only_stem:
        return f"{stem}.{numbers}"
    return f"layer {numbers}" if first == last else f"layers {numbers}"


def _align(cells: Sequence[tuple[str, ...]], *, numeric: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for row in cells:
        texts = [
            text.rjust(width) if column in numeric else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(texts).rstrip())
    return lines


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
