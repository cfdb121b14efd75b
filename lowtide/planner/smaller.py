"""Storages that are kept or swapped in a smaller form: a further way for a site, in terms that the solver has already.

What: `with_codecs` gives a site that fits a codec two things: a node for its smaller form, which nothing but a plan
makes, and a recipe of no steps, which makes the site from that node. So "kept smaller" is: the site is made, the form
is kept; "swapped smaller": the site is made, the form is swapped. Ticks, lifetimes, the program, the search and the
timeline stay as they are. `merged` turns the answer into one decision for each site.

The account, in half-open lifetimes: the site is there until the operator after which it can be sent (`send_ops` of
problem.py: the runtime encodes when the next operator saves something), its form from that operator to the site's first
need, where both are there; while either is made, `Codec.work_bytes` on top. So a storage that something else holds for
long frees little, and one that is held until backward frees nothing and gets no codec.

Which sites: without a recipe that rules allow (a recipe frees all of its bytes), of at least `min_bytes`, and not named
by a rule (rules name fates, and a fate is about a storage as it is).

Cost: linear in nodes. Not covered: the choice between a codec and a recipe for one site; encoding is charged with
decoding, in backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from lowtide.core.codec import Codec
from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile, Site
from lowtide.core.recipe import Anchor, Geometry, Recipe, RecipeInput

SIDE = "smaller form"
"""`Anchor.side` of the nodes that stand for smaller forms."""


def with_codecs(
    profile: Profile,
    *,
    sends: Sequence[int],
    sequences: Sequence[int],
    names: Collection[str],
    min_bytes: int,
) -> Profile:
    """The profile in which sites among `names` may be stored smaller. `sends`: for each node the operator after which
    it can be sent away; `sequences`: autograd's number at that operator."""
    nodes: list[Site] = []
    for node, send, sequence in zip(profile.nodes, sends, sequences, strict=True):
        codec, dies = node.codec, max(node.dies, send + 1)
        is_asked = node.name in names and node.nbytes >= min_bytes
        if codec is None or not is_asked or not node.reads or dies >= node.reads[0]:
            nodes.append(node)
            continue
        form = _form(node, codec, send, sequence)
        nodes += [dataclasses.replace(node, dies=dies, recipe=_decoding(node, codec, form)), form]
    return dataclasses.replace(profile, nodes=tuple(sorted(nodes, key=lambda node: node.saved)))


def _form(node: Site, codec: Codec, send: int, sequence: int) -> Site:
    return Site(
        name=form_of(node.name),
        layer=node.layer,
        nbytes=codec.nbytes,
        dtype="uint8",
        op=node.op,
        anchor=Anchor(module=node.name, side=SIDE, leaf=0),
        born=send,
        saved=send,
        dies=send,
        first_sequence=sequence,
    )


def _decoding(node: Site, codec: Codec, form: Site) -> Recipe:
    flat = Geometry(size=(codec.nbytes,), stride=(1,), offset=0, dtype="uint8")
    return Recipe(
        inputs=(RecipeInput(kind="node", name=form.name, geometry=flat),),
        steps=(),
        seconds=codec.seconds,
        transient_bytes=node.nbytes + codec.work_bytes,
        is_shape_free=True,
    )


def form_of(name: str) -> str:
    """The name of a site's smaller form. No storage of a model has a name with a blank."""
    return f"{name} smaller"


def is_form(node: Site) -> bool:
    """Whether a node stands for the smaller form of a site."""
    return node.anchor is not None and node.anchor.side == SIDE


def decodes(recipe: Recipe | None) -> bool:
    """Whether a recipe makes a site from its smaller form."""
    return recipe is not None and not recipe.steps


def merged(decisions: Iterable[SiteDecision], profile: Profile, describe: Callable[[Codec], str]) -> list[SiteDecision]:
    """One decision for each site: that of its smaller form, where it is made from that. `profile` has the codecs."""
    listed = list(decisions)
    by_name = {site.name: site for site in listed}
    codecs = {node.name: node.codec for node in profile.nodes}
    result = []
    for site in listed:
        if site.anchor is not None and site.anchor.side == SIDE:
            continue
        if not decodes(site.recipe):
            result.append(site)
            continue
        form, codec = by_name[form_of(site.name)], codecs[site.name]
        assert codec is not None
        result.append(
            dataclasses.replace(
                site,
                fate=form.fate,
                prefetch=form.prefetch,
                leave=form.leave,
                recipe=None,
                codec=codec,
                cost_seconds=codec.seconds,
                reason=describe(codec),
            )
        )
    return result


def fates_of(sites: Iterable[SiteDecision]) -> dict[str, Fate]:
    """The reverse of `merged`: fates by name, of sites and of their smaller forms."""
    fates: dict[str, Fate] = {}
    for site in sites:
        fates[site.name] = site.fate
        if site.codec is not None:
            fates[site.name], fates[form_of(site.name)] = Fate.RECOMPUTE, site.fate
    return fates
