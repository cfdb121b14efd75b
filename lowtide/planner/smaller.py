"""Storages that are kept or swapped in a smaller form: further ways for a site, beside its recipe.

What: `with_codecs` gives a site that fits a codec a node for its smaller form, which nothing but a plan makes. To the
solver, a site with the fate recompute is made from its form where that one is kept or swapped, and by its recipe where
that one's own fate is recompute, which means that there is none (`Item.form` of timeline/step.py). So a site has up to
five ways: kept, swapped, made by its recipe, its form kept, its form swapped; and all are in one program, one search
and one timeline. `problem.decisions` turns the answer into one decision for each site.

The account, in half-open lifetimes: the site is there until the operator after which it can be sent (`send_ops`: the
runtime encodes when the next operator saves something), its form from that operator to the site's first need, where
both are there; while either is made, `Codec.work_bytes` on top. So a storage that something else holds for long frees
little, and one that is held until backward frees nothing and gets no codec.

Which sites: those of at least `min_bytes` that no rule names (rules name fates, and a fate is about a storage as it
is), also those that have a recipe: one may be dear, or start from what would have to be kept for it.

Cost: linear in nodes. Not covered: more than one codec for a site; encoding is charged with decoding, in backward.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile, Site
from lowtide.core.recipe import Codec, RetainedInput
from lowtide.units import format_bytes

SIDE = "smaller form"
"""`RetainedInput.side` of the nodes that stand for smaller forms."""


def with_codecs(profile: Profile, names: Collection[str], min_bytes: int, *, has_recipes: bool = True) -> Profile:
    """The profile in which sites among `names` may be stored smaller. `has_recipes`: or made by their recipes."""
    nodes: list[Site] = []
    for node, (send, sequence) in zip(profile.nodes, _sends(profile), strict=True):
        is_requested = node.name in names and node.nbytes >= min_bytes
        if node.codec is None or not is_requested or not node.reads or max(node.dies, send + 1) >= node.reads[0]:
            nodes.append(node)
            continue
        nodes += [
            node if has_recipes else dataclasses.replace(node, recipe=None),
            _form(node, node.codec, send, sequence),
        ]
    return dataclasses.replace(profile, nodes=tuple(sorted(nodes, key=lambda node: node.saved)))


def send_ops(profile: Profile) -> list[int]:
    """For each node the operator after which the runtime can send it away: the next one that saves something.

    Some operators save what they have not filled yet, so the runtime waits for the next.
    """
    return [op for op, _ in _sends(profile)]


def _sends(profile: Profile) -> list[tuple[int, int]]:
    """For each node the next operator that saves something, and autograd's number there."""
    saves = sorted((node.first_sequence, node.saved) for node in profile.sites)
    sequences = [sequence for sequence, _ in saves]
    end = (profile.num_forward_ops - 1, sequences[-1] + 1 if sequences else 0)
    places = [bisect.bisect_right(sequences, node.first_sequence) for node in profile.nodes]
    return [
        (max(saves[place][1], node.saved), saves[place][0]) if place < len(saves) else end
        for place, node in zip(places, profile.nodes, strict=True)
    ]


def _form(node: Site, codec: Codec, send: int, sequence: int) -> Site:
    return Site(
        name=form_of(node.name),
        layer=node.layer,
        nbytes=codec.nbytes,
        dtype="uint8",
        op=node.op,
        retained_input=RetainedInput(module=node.name, side=SIDE, leaf=0),
        born=send,
        saved=send,
        dies=send,
        first_sequence=sequence,
    )


def form_of(name: str) -> str:
    """The name of a site's smaller form. No storage of a model has a name with a blank."""
    return f"{name} smaller"


def is_form(node: Site) -> bool:
    """Whether a node stands for the smaller form of a site."""
    return node.retained_input is not None and node.retained_input.side == SIDE


def stored_as(codec: Codec) -> str:
    """What a plan says of a site that is stored smaller."""
    return f"stored as {codec.kind} ({format_bytes(codec.nbytes)})"


def fates_of(sites: Iterable[SiteDecision]) -> dict[str, Fate]:
    """Of a plan: fates by name, of sites and of their smaller forms, as a solver has them."""
    fates: dict[str, Fate] = {}
    for site in sites:
        fates[site.name] = site.fate
        if site.codec is not None:
            fates[site.name], fates[form_of(site.name)] = Fate.RECOMPUTE, site.fate
        elif site.fate is Fate.RECOMPUTE:
            fates[form_of(site.name)] = Fate.RECOMPUTE
    return fates
