"""Whether the first forward under a solved plan was the forward that the plan was made for; and rules that move
nothing.

Why: a plan that does not fit costs memory but gives no wrong value, so nothing fails. One warning tells the user, with
names.

Cost: none after the first forward. Not covered: models that change later; `stats.num_divergences` counts those.
"""

from __future__ import annotations

import dataclasses
import warnings

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.rules import Rule
from lowtide.runtime.hooks.context import PlanContext
from lowtide.runtime.recompute.recipe_nodes import Node
from lowtide.units import format_bytes

# A solved plan that misses more than this share of the saved bytes was made for something else.
_UNPLANNED_SHARE = 0.01


def with_bytes_seen(site: SiteDecision, seen: SiteDecision | None) -> SiteDecision:
    """A planned site with the bytes that the first forward showed."""
    return site if seen is None else dataclasses.replace(site, nbytes=seen.nbytes, dtype=seen.dtype)


def warn_about_other_sites(context: PlanContext) -> None:
    """Warn after the first forward under a solved plan if it was not the forward that the plan was made for."""
    assert context.nodes is not None
    planned = [node for node in context.nodes.values() if node.decision.fate is not Fate.KEEP or node.is_encoded]
    absent = [node.name for node in planned if not node.was_seen and _must_appear(node)]
    wrong = [node.name for node in planned if node.has_failed and not node.is_encoded]
    whole = [node.name for node in planned if node.has_failed and node.is_encoded]
    saved_bytes = sum(site.nbytes for site in context.sites.values())
    unplanned_bytes = sum(context.unplanned.values())
    parts = []
    if unplanned_bytes > _UNPLANNED_SHARE * saved_bytes:
        largest = sorted(context.unplanned, key=lambda name: -context.unplanned[name])
        share = 100 * unplanned_bytes / saved_bytes
        parts.append(f"{share:.0f} % of what it saved is not in the plan and is kept ({_some(largest)})")
    if absent:
        parts.append(f"it did not save what the plan wants swapped or recomputed ({_some(absent)})")
    if wrong:
        parts.append(f"recipes of the plan do not hold in it, and their sites are kept ({_some(wrong)})")
    if whole:
        parts.append(f"what the plan stores smaller does not fit its codec, and is kept whole ({_some(whole)})")
    if parts:
        warnings.warn(
            f"lowtide: the first forward was not the one that the plan was made for: {'; '.join(parts)}. Memory may "
            "differ from what was predicted; plan again for this model and batch.",
            stacklevel=4,
        )


def _must_appear(node: Node) -> bool:
    # Without a recipe it is recomputed with its layer, in which nothing is saved.
    return node.decision.fate is Fate.SWAP or node.is_made


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def warn_about_small_sites(context: PlanContext) -> None:
    """Warn after the first forward under rules about each swap rule that moves nothing, for all that it names is
    smaller than `min_bytes`."""
    by_rule: dict[int, tuple[Rule, list[SiteDecision]]] = {}
    for site in context.sites.values():
        rule = context.stay_rules.decide(site.name).rule
        if rule is not None and rule.fate is Fate.SWAP:
            by_rule.setdefault(id(rule), (rule, []))[1].append(site)
    for rule, sites in by_rule.values():
        if any(site.fate is not Fate.KEEP or site.nbytes >= context.min_bytes for site in sites):
            continue
        largest = max(site.nbytes for site in sites)
        where = f" ({rule.where})" if rule.where else ""
        warnings.warn(
            f"lowtide: {rule}{where} moves nothing: what it names is smaller than min_bytes, "
            f"{format_bytes(context.min_bytes)} (the largest of {len(sites)} activations has {format_bytes(largest)}); "
            f"write min_bytes: {largest}, or less",
            stacklevel=4,
        )
