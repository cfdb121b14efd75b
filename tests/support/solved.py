"""Random solved plans: whatever the solver might say, and much that it never would."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, Site


def random_plan(profile: Profile, seed: int, *, made: float = 0.5, swapped: float = 0.3) -> Plan:
    """A solved plan in which each node has a random fate among those that it may have.

    `made` and `swapped` are the shares of nodes that are to be recomputed and swapped. Of the rest, and of what is
    swapped, every other site that fits a codec is stored smaller.
    """
    draw, of_codecs = random.Random(seed), random.Random(seed)
    fates = {node.name: _draw_fate(node, draw, made, swapped) for node in profile.nodes}
    needed: set[str] = set()
    for node in reversed(profile.nodes):
        if node.retained_input is not None and node.name not in needed:
            fates.pop(node.name)
            continue
        if fates[node.name] is Fate.RECOMPUTE:
            assert node.recipe is not None
            needed |= set(node.recipe.nodes)
    decisions = [_decision(node, fates[node.name], draw) for node in profile.nodes if node.name in fates]
    decisions = [_smaller(node, profile) if of_codecs.random() < 0.5 else node for node in decisions]
    return solved_plan(profile, decisions)


def _smaller(decision: SiteDecision, profile: Profile) -> SiteDecision:
    """Stored smaller, if it is kept or swapped and fits a codec."""
    codec = next((node.codec for node in profile.nodes if node.name == decision.name), None)
    if codec is None or decision.fate is Fate.RECOMPUTE:
        return decision
    return dataclasses.replace(decision, codec=codec)


def plan_with(profile: Profile, fates: Mapping[str, Fate], **more: int) -> Plan:
    """A solved plan with these fates by name; everything else is kept."""
    decisions = []
    for node in profile.nodes:
        fate = fates.get(node.name, Fate.KEEP)
        if node.retained_input is not None and node.name not in fates:
            continue
        distances = {"prefetch": 2, "leave": 2, **more} if fate is Fate.SWAP else {}
        decisions.append(_plain_decision(node, fate, **distances))
    return solved_plan(profile, decisions)


def solved_plan(profile: Profile, decisions: list[SiteDecision]) -> Plan:
    return Plan(layers=profile.layers, min_bytes=0, sites=tuple(decisions), is_solved=True)


def _draw_fate(node: Site, draw: random.Random, made: float, swapped: float) -> Fate:
    number = draw.random()
    if node.recipe is not None and number < made:
        return Fate.RECOMPUTE
    return Fate.SWAP if draw.random() < swapped else Fate.KEEP


def _decision(node: Site, fate: Fate, draw: random.Random) -> SiteDecision:
    if fate is not Fate.SWAP:
        return _plain_decision(node, fate)
    return _plain_decision(node, fate, prefetch=draw.choice((0, 1, 3, 10, 100)), leave=draw.choice((0, 1, 3, 10, 1000)))


def _plain_decision(node: Site, fate: Fate, **distances: int) -> SiteDecision:
    return SiteDecision(
        name=node.name,
        layer=node.layer,
        nbytes=node.nbytes,
        dtype=node.dtype,
        fate=fate,
        retained_input=node.retained_input,
        recipe=node.recipe if fate is Fate.RECOMPUTE else None,
        reason="drawn",
        **distances,
    )
