"""Collectives that are issued again in backward, for `select_comm_recompute`.

What: in a sequence-parallel layer the output of a norm is this rank's share of the sequence. An all-gather makes the
whole sequence of it, and the projections save the whole for their weight gradients. With the collective at the norm
recomputed, only the share stays, and the all-gather runs once more before the first reader.

A collective is *at* an op if its input is that op's output (through views and casts, at most), as with that all-gather;
or if it runs in that module, as a reduce-scatter inside of a projection does. Only functional collectives count,
because they name their group (recipes/build.py), and only their results that autograd saves: others take no memory
after the forward. The input of the collective stays on the device.

Order: all ranks of a group issue the same collectives in the same order, because backward follows the autograd graph
and their graphs are equal. runtime/recompute/recipe_graph.py says what else could differ, and how that is prevented.
Names of groups: each rank has its own. Where all ranks take over the first one's plan, each puts its own names into it.
Cost: the collective once more, with no compute to hide it behind. Not covered: sites that no op of the file names,
and collectives that write into a tensor they are given (`torch.distributed.all_gather_into_tensor`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, Site
from lowtide.errors import ConfigError

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
