"""Where recompute and swap name the same layer: which parts are still swapped.

Two rules, both documented by MindSpore Transformers. What is recomputed is not swapped: recompute frees the memory
anyway. And what a recomputed part reads is not swapped: recompute needs it again at a time of its own, so upstream
keeps it on the device. If only some names inside a part are recomputed, the rest of the part is swapped, and `holes`
lists the names that are not.

A layer's output is read by the next layer: layers.py, which knows both layers, handles that case.
Not covered: a layer that is swapped as a whole. Here it loses only what is recomputed in it; what the recomputed parts
read is found in the profile of a step (mindformers/plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.mindformers.schema.aliases import FAMILIES, ROLES, Role, family_of
from lowtide.mindformers.schema.names import Tree, all_names, is_within, lookup, operators_below

LAYER = "<layer>"
"""The name of a layer as a whole among swapped parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of one swapped part."""

    is_swapped: bool
    """Not recomputed itself. With a `reader` it stays on the device all the same."""
    holes: tuple[str, ...] = ()
    """Below it, but recomputed."""
    reader: str = ""
    """The recomputed part that reads it and for which it stays on the device."""
    inputs: tuple[str, ...] = ()
    """All that the reader reads: what can be swapped instead."""


def judge(target: str, recomputed: Sequence[str], tree: Tree | None) -> Verdict:
    """Is `target` still swapped when these parts of its layer are recomputed?"""
    if any(target != LAYER and is_within(target, outer) for outer in recomputed):
        return Verdict(is_swapped=False)
    inside = [name for name in recomputed if target == LAYER or is_within(name, target)]
    if inside and tree is not None:
        operators = list(_operators(tree)) if target == LAYER else operators_below(target, tree)
        if all(any(is_within(operator, outer) for outer in inside) for operator in operators):
            return Verdict(is_swapped=False, holes=tuple(inside))
    for reader in _readers(target, tree) if target != LAYER else ():
        for outer in recomputed:
            if is_within(reader, outer) and not is_within(outer, target):
                return Verdict(is_swapped=True, reader=outer, inputs=tuple(_inputs(reader, tree)))
    return Verdict(is_swapped=True, holes=tuple(inside))


def roles_of(name: str, tree: Tree | None) -> set[str]:
    """Names of the roles that a part may stand for; `layer_output` for what makes the layer's output."""
    names = {role.name for role, _ in _roles(name, tree)}
    return names | {"layer_output"} if "add" in names else names


def _operators(tree: Tree) -> list[str]:
    return [name for name in all_names(tree) if not lookup(name, tree)]


def _roles(name: str, tree: Tree | None) -> list[tuple[Role, str]]:
    """The roles that a name may stand for, each with the naming it is written in."""
    family = family_of(tree)
    families = FAMILIES if family == "other" else (family,)
    return [(role, family) for role in ROLES for family in families if name in _names(role, family)]


def _names(role: Role, family: str) -> tuple[str, ...]:
    """The names of a role that is one part; where it is two Hugging Face modules, each has a role of its own."""
    names = role.names(family)
    return names if family != "hf" or len(names) == 1 else ()


def _readers(name: str, tree: Tree | None) -> list[str]:
    """Names of the parts that read the output of `name`."""
    found: list[str] = []
    for role, family in _roles(name, tree):
        for reader in ROLES:
            found += _names(reader, family) if reader.name in role.readers else ()
    return list(dict.fromkeys(found))


def _inputs(reader: str, tree: Tree | None) -> list[str]:
    """Names of the parts whose output `reader` reads; of one role the first name that the layer has."""
    found: dict[str, None] = {}
    for role, family in _roles(reader, tree):
        for source in ROLES:
            names = _names(source, family) if role.name in source.readers else ()
            found |= dict.fromkeys([name for name in names if tree is None or lookup(name, tree) is not False][:1])
    return [name for name in found if not any(is_within(name, other) and name != other for other in found)]
