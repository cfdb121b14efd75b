"""What the first forward under a solved plan showed: whether it was the forward that the plan was made for.

Why: a plan that does not fit costs memory, never a value, so nothing fails; the user has to be told once, with names.

Cost: none after the first forward. Not covered: models that change later; `stats.num_divergences` counts those.
"""

from __future__ import annotations

import dataclasses
import warnings

from lowtide.planner.fate import Fate
from lowtide.planner.plan import SiteDecision
from lowtide.runtime.tables import Setting
from lowtide.runtime.weaver import Node

# A solved plan that misses more than this share of the saved bytes was made for something else.
_UNPLANNED_SHARE = 0.01


def with_bytes_seen(site: SiteDecision, seen: SiteDecision | None) -> SiteDecision:
    """A planned site with the bytes that the first forward showed."""
    return site if seen is None else dataclasses.replace(site, nbytes=seen.nbytes, dtype=seen.dtype)


def warn_about_other_sites(setting: Setting) -> None:
    """After the first forward under a solved plan: was it the forward that the plan was made for?"""
    assert setting.nodes is not None
    planned = [node for node in setting.nodes.values() if node.decision.fate is not Fate.KEEP]
    absent = [node.name for node in planned if not node.was_seen and _must_appear(node)]
    wrong = [node.name for node in planned if node.has_failed]
    saved_bytes = sum(site.nbytes for site in setting.sites.values())
    unplanned_bytes = sum(setting.unplanned.values())
    parts = []
    if unplanned_bytes > _UNPLANNED_SHARE * saved_bytes:
        largest = sorted(setting.unplanned, key=lambda name: -setting.unplanned[name])
        share = 100 * unplanned_bytes / saved_bytes
        parts.append(f"{share:.0f} % of what it saved is not in the plan and is kept ({_some(largest)})")
    if absent:
        parts.append(f"it did not save what the plan wants swapped or recomputed ({_some(absent)})")
    if wrong:
        parts.append(f"recipes of the plan gave other values, and their sites are kept ({_some(wrong)})")
    if parts:
        warnings.warn(
            f"lowtide: the first forward was not the one that the plan was made for: {'; '.join(parts)}. Memory may "
            "differ from what was predicted; plan again for this model and batch.",
            stacklevel=4,
        )


def _must_appear(node: Node) -> bool:
    # Without a recipe it goes with its layer, in which nothing is saved.
    return node.decision.fate is Fate.SWAP or node.is_made


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
