"""Collectives that are issued again in backward, for `select_comm_recompute`.

What: in a sequence-parallel layer a norm gives out a share of the sequence, an all-gather makes the whole of it, and
the projections save the whole for their weight gradients. With the collective at the norm recomputed, only the share
stays, and the all-gather runs once more before the first reader.

When is a collective *at* an op? When it is given that op's output (through views and casts, at most), as that
all-gather is; or when it runs in that module, as a reduce-scatter inside of a projection does. Only functional
collectives count, for they name their group (catalog/recipes.py), and only what they give out and autograd saves: the
rest takes no memory. What they are given stays on the device.

Order: all ranks of a group issue the same collectives in the same order, because backward follows the autograd graph
and their graphs are equal; what else could part them is in runtime/weaver.py.
Names of groups: a rank's own. A plan that all ranks take over from the first one is given the names of each.
Cost: the collective once more, without anything to hide it behind. Not covered: sites that no op of the file names,
and collectives that write into a tensor they are given (`torch.distributed.all_gather_into_tensor`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lowtide.catalog.site import Profile, Site
from lowtide.errors import ConfigError
from lowtide.planner.plan import Plan

# What may stand between an op and its collective.
_VIEWS_AND_CASTS = frozenset({"aten._to_copy.default", "aten.clone.default", "aten.as_strided.default"})
_WORDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}


def is_at(node: Site, part: str, start: int, is_of: Callable[[str, str], bool]) -> bool:
    """Does the node, which has a `collective_recipe`, come from a collective at this part of its layer?

    Names below the layer begin at character `start`; `is_of(name, part)`: does the part produce the node of this name?
    """
    recipe = node.collective_recipe
    assert recipe is not None
    if is_of(node.name[start:], part):
        return True
    ops = [step.op for step in recipe.steps]
    first = next(place for place, op in enumerate(ops) if op.split(".")[1] in recipe.collectives)
    is_given = bool(recipe.nodes) and all(is_of(name[start:], part) for name in recipe.nodes)
    return is_given and _VIEWS_AND_CASTS.issuperset(ops[:first])


def made_again(nodes: Sequence[Site]) -> str:
    """`its all-gather is made again`: the collectives that make these nodes."""
    names = [name for node in nodes if node.collective_recipe for name in node.collective_recipe.collectives]
    kinds = dict.fromkeys(_WORDS.get(name, name) for name in names)
    counts = {kind: sum(_WORDS.get(name, name) == kind for name in names) for kind in kinds}
    words = [kind if count == 1 else f"{count} {kind}s" for kind, count in counts.items()]
    return f"its {' and '.join(words)} {'is' if len(names) == 1 else 'are'} made again"


def with_own_groups(plan: Plan, profile: Profile) -> Plan:
    """A plan that another rank made, with the names that this rank has for the process groups of its recipes.

    `profile` is what this rank observed. Raises `ConfigError` if that has no such collective.
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
