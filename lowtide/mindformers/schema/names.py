r"""Which parts of a layer a pattern names.

A pattern is a regular expression per level, with `\.` between the levels: `feed_forward\.w1\.activation\.silu`. Each
level must match one name completely; paths start below the layer. That is what MindSpore Transformers reads; three
readings are added, each only where that one finds nothing:

- plain dots between the levels, `feed_forward.mul`, which upstream takes for wildcards inside one name;
- names of another world: MindSpore paths on a Hugging Face model and Hugging Face paths on a MindSpore tree;
- for the built-in list of ops on a Hugging Face model, the same op of other MLPs of the layer (shared experts).

Without a tree any name matches, and a pattern stands for itself; one with wildcards (`.*\.flash_attention`) stands for
the parts of MindSpore Transformers' Llama that fit, as its documents show them.

Expressions come from a file that somebody else wrote, and must not stop the program: `re` tries one choice after the
other, and `(a+)+b` on a name of 40 letters takes for ever, as `.*.*.*.*.*.*x` does. So before an expression is used,
its choices are multiplied (`problem`), as if every character of it fitted every character of a name. A repetition
counts as many choices as it may have lengths, times the choices inside it to the power of that length. Alternatives add
up. Three `.*` are allowed, four are not; a repetition inside a repetition seldom is.
Cost: some microseconds an expression; at worst some milliseconds a name. Not covered: what is harmless because its
characters exclude each other, as in `(\w+,)*`: refused like the others.

Where recompute and swap name the same layer, what is recomputed is not swapped (`left_of_swap`): recompute frees the
memory anyway. And what a recomputed part reads is not (`recomputed_reader`): recompute needs it again at a time of its
own, so upstream keeps it on the device. If only some names inside a part are recomputed, the rest of the part is
swapped, and the names that are not are its holes. A layer's output is read by the next layer: layers.py, which knows
both, handles that case, and the profile of a step (mindformers/plan.py) what recomputed parts of a swapped layer read.
"""

from __future__ import annotations

import difflib
import functools
import re
import re._constants as code  # type: ignore[import-not-found]
import re._parser as regex_parser  # type: ignore[import-not-found]
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.mindformers.schema.aliases import FAMILIES, FREE_OPS, FUNCTIONS, LLAMA, ROLES, Role, family_of
from lowtide.mindformers.schema.issues import Issues

Tree = Mapping[str, Any]
"""Name -> None for an operator, -> a tree for a module."""

Names = Tree | Sequence[Tree]
"""One tree for all layers, or one per layer."""

_QUANTIFIERS = frozenset("*+?{")
_MOST_CHARACTERS = 1_000
_NAME_CHARACTERS = 64
_MOST_TRIES = (_NAME_CHARACTERS + 1) ** 3
_REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternMatch:
    """Everything that a pattern names in one layer."""

    groups: tuple[tuple[str, ...], ...] = ()
    """Names that share a parent; upstream's log shows the last one of each."""
    reading: str = "exact"
    """exact | plain dots | alias | free | nothing"""
    translated: tuple[str, ...] = ()
    """With `alias`: the names in MindSpore's own tree that the pattern stands for."""

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def logged(self) -> list[str]:
        """The names that upstream's log shows: of matches that share a parent the last one."""
        if not self.translated:
            return [group[-1] for group in self.groups]
        last = {name.rpartition(".")[0]: name for name in self.translated}
        return [name for name in self.translated if last[name.rpartition(".")[0]] == name]


def trees_of(names: Names | None, num_layers: int, issues: Issues) -> list[Tree | None]:
    if names is None or isinstance(names, Mapping):
        return [names] * num_layers
    if isinstance(names, str) or not all(isinstance(tree, Mapping) for tree in names):
        issues.refuse("names", "must be a mapping of names, or one mapping per layer")
    if len(names) != num_layers:
        issues.refuse("names", f"has {len(names)} layers, but the model has {num_layers}")
    return list(names)


def levels(pattern: str) -> list[str]:
    r"""The expressions between `\.`."""
    return pattern.split(r"\.")


def check(pattern: str) -> str | None:
    """What is wrong with a pattern, or None."""
    for level in levels(pattern):
        if (found := problem(level)) is not None:
            inside = f" in {level!r}, which is what stands between two '\\.'" if level != pattern else ""
            return f"{found}{inside}"
    return None


def matches_everything(pattern: str) -> bool:
    """Does the last level match any name at all? There upstream trips over attributes that are not operators."""
    return fits(levels(pattern)[-1], "__class__")


def looks_like(one: str, other: str) -> bool:
    """Do two patterns name the same, level by level, when one is read as a name?"""
    ones, others = levels(one), levels(other)
    return len(ones) == len(others) and all(fits(a, b) or fits(b, a) for a, b in zip(ones, others, strict=True))


def find(pattern: str, tree: Tree | None, *, is_default: bool = False) -> PatternMatch:
    """What `pattern` names in a layer with these names. `is_default`: the pattern is from a built-in list."""
    if tree is None:
        plain = _plain_levels(pattern)
        parts = plain or levels(pattern)
        known = [name for role in LLAMA for name in role.legacy if _names(parts, name)]
        names = known if known and any(re.escape(part) != part for part in parts) else [".".join(parts)]
        unknown = tuple((name,) for name in names)
        return PatternMatch(groups=unknown, reading="plain dots" if plain else "exact")
    if groups := tuple(_walk(tree, levels(pattern), "")):
        return PatternMatch(groups=groups)
    plain = _plain_levels(pattern)
    if plain and (groups := tuple(_walk(tree, plain, ""))):
        return PatternMatch(groups=groups, reading="plain dots")
    parts = plain or levels(pattern)
    if names := _translate(parts, tree, is_default=is_default):
        groups = tuple((name,) for name in names)
        return PatternMatch(groups=groups, reading="alias", translated=_as_upstream(parts, tree))
    if family_of(tree) == "hf" and parts[-1] in FREE_OPS:
        return PatternMatch(reading="free")
    return PatternMatch(reading="nothing")


def find_whole(expression: str, tree: Tree | None) -> list[str]:
    """The parts of a layer whose whole path fits, in any naming; without a tree the expression itself."""
    if tree is None:
        return [expression.replace("\\.", ".")]
    functions = [
        name for name, module in FUNCTIONS.items() if family_of(tree) == "hf" and lookup(module, tree) is not False
    ]
    if found := [name for name in (*all_names(tree), *functions) if fits(expression, name)]:
        return found
    if family_of(tree) != "hf":
        return []
    roles = [role for role in ROLES if any(fits(expression, name) for name in (*role.legacy, *role.mcore))]
    return list(dict.fromkeys(name for role in roles for name in _present(role, tree)))


def nearest(pattern: str, tree: Tree, n: int = 3) -> list[str]:
    """Names of the layer that look most like the pattern."""
    wanted = ".".join(_plain_levels(pattern) or levels(pattern))
    names = list(all_names(tree))
    if family_of(tree) == "hf":
        names += [name for role in ROLES if _present(role, tree) for name in role.legacy]
    same_end = [name for name in names if name.rsplit(".", 1)[-1] == wanted.rsplit(".", 1)[-1]]
    close = difflib.get_close_matches(wanted, names, n=n, cutoff=0.5)
    by_likeness = sorted(same_end, key=lambda name: -difflib.SequenceMatcher(a=name, b=wanted).ratio())
    return list(dict.fromkeys([*by_likeness, *close]))[:n]


def all_names(tree: Tree, prefix: str = "") -> Iterator[str]:
    for name, below in tree.items():
        yield f"{prefix}{name}"
        if below is not None:
            yield from all_names(below, f"{prefix}{name}.")


def operators_below(name: str, tree: Tree | None) -> list[str]:
    """All operators of a part of the layer; itself if it has none, or if it is not known."""
    below = lookup(name, tree)
    if not isinstance(below, Mapping):
        return [name]
    found = [path for path in all_names(below, f"{name}.") if not isinstance(lookup(path, tree), Mapping)]
    return found or [name]


def operator_in(module: str, trees: Sequence[Tree | None]) -> str:
    """The name of some operator right in a module, for an example."""
    below: Tree = next((found for found in (lookup(module, tree) for tree in trees) if found), {})
    return next((name for name, inner in below.items() if inner is None), "...")


def lookup(name: str, tree: Tree | None) -> Any:
    """A tree for a module, None for an operator, False for what is not there."""
    below: Any = tree
    for part in name.split("."):
        if not isinstance(below, Mapping) or part not in below:
            return False
        below = below[part]
    return below


def is_within(name: str, outer: str) -> bool:
    """Is `name` the part `outer`, or something in it?"""
    return name == outer or name.startswith(f"{outer}.")


def _walk(tree: Tree, parts: Sequence[str], prefix: str) -> Iterator[tuple[str, ...]]:
    first, *rest = parts
    found = [name for name in tree if fits(first, name)]
    if rest:
        for name in found:
            if tree[name] is not None:
                yield from _walk(tree[name], rest, f"{prefix}{name}.")
        return
    ops = sorted(name for name in found if tree[name] is None)
    modules = [name for name in found if tree[name] is not None]
    if found:
        yield tuple(f"{prefix}{name}" for name in (*ops, *modules))


@functools.cache
def _plain_levels(pattern: str) -> Sequence[str]:
    """The levels with plain dots as separators too; empty when that changes nothing."""
    pieces: list[str] = []
    for level in levels(pattern):
        start = depth = 0
        for at, character in enumerate(level):
            is_escaped = at > 0 and level[at - 1] == "\\"
            depth += 0 if is_escaped else (character in "([{") - (character in ")]}")
            following = level[at + 1 : at + 2]
            if character == "." and not depth and at > start and following and following not in _QUANTIFIERS:
                pieces.append(level[start:at])
                start = at + 1
        pieces.append(level[start:])
    return pieces if len(pieces) > len(levels(pattern)) else []


def _translate(parts: Sequence[str], tree: Tree, *, is_default: bool) -> list[str]:
    """Names of the tree for a pattern that is written in another naming."""
    family = family_of(tree)
    names: list[str] = []
    for role in ROLES:
        if family == "hf" and any(_names(parts, name) for name in (*role.legacy, *role.mcore, *role.hf)):
            names += _present(role, tree)
            if is_default and not names:
                kind = role.name.rsplit(":", 1)[-1]
                for other in ROLES:
                    names += _present(other, tree) if other.name.rsplit(":", 1)[-1] == kind else []
        elif family in ("legacy", "mcore") and role.hf and all(_names(parts, name) for name in role.hf):
            names += [name for name in role.names(family) if lookup(name, tree) is not False][:1]
    return list(dict.fromkeys(names))


def _as_upstream(parts: Sequence[str], tree: Tree) -> tuple[str, ...]:
    """The names of MindSpore Transformers that a pattern on a Hugging Face model fits, where the layer has the part."""
    if family_of(tree) != "hf":
        return ()
    for family in ("legacy", "mcore"):
        roles = [role for role in ROLES if _present(role, tree)]
        found = [name for role in roles for name in role.names(family) if _names(parts, name)]
        if found:
            return tuple(dict.fromkeys(found))
    return ()


def _names(parts: Sequence[str], name: str) -> bool:
    pieces = name.split(".")
    return len(pieces) == len(parts) and all(fits(part, piece) for part, piece in zip(parts, pieces, strict=True))


def _present(role: Role, tree: Tree) -> list[str]:
    """The Hugging Face names of a role that this layer has; function calls are had where their module is."""
    return [
        name
        for name in role.hf
        if lookup(name, tree) is not False or (name in FUNCTIONS and lookup(FUNCTIONS[name], tree) is not False)
    ]


def problem(expression: str) -> str | None:
    """What is wrong with an expression, or None."""
    if len(expression) > _MOST_CHARACTERS:
        return f"has {len(expression)} characters, of at most {_MOST_CHARACTERS}"
    try:
        _read(expression)
        parsed = regex_parser.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {getattr(error, 'msg', str(error))}"
    if _tries(parsed) > _MOST_TRIES:
        return "repeats what repeats, or has too many choices: to match a name may take for ever"
    return None


@functools.lru_cache(maxsize=256)
def _read(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


def fits(expression: str, text: str) -> bool:
    """Whether all of `text` matches. Only for an expression without a `problem`."""
    return _read(expression).fullmatch(text) is not None


def _tries(items: Any) -> int:
    """In how many ways a sequence of parts may match a name, at most. Counts no further than just above the limit."""
    tries = 1
    for op, argument in items:
        if op in _REPEATS:
            fewest, most, body = argument
            rounds = min(most, _NAME_CHARACTERS)
            each = _tries(body)
            tries *= (max(rounds - fewest, 0) + 1) * (each if each == 1 else min(each, _MOST_TRIES) ** rounds)
        elif op is code.BRANCH:
            tries *= sum(map(_tries, argument[1]))
        else:
            for below in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(below, regex_parser.SubPattern):
                    tries *= _tries(below)
        tries = min(tries, _MOST_TRIES + 1)
    return tries


LAYER = "<layer>"
"""The name of a layer as a whole among swapped parts."""


def left_of_swap(target: str, recomputed: Sequence[str], tree: Tree | None) -> list[str] | None:
    """What lies in `target` and is recomputed with these parts of its layer; None where all of it is."""
    if any(target != LAYER and is_within(target, outer) for outer in recomputed):
        return None
    inside = [name for name in recomputed if target == LAYER or is_within(name, target)]
    if inside and tree is not None:
        operators = operators_below(target, tree)
        if target == LAYER:
            operators = [name for name in all_names(tree) if not lookup(name, tree)]
        if all(any(is_within(operator, outer) for outer in inside) for operator in operators):
            return None
    return inside


def recomputed_reader(target: str, recomputed: Sequence[str], tree: Tree | None) -> tuple[str, list[str]]:
    """The recomputed part that reads `target`, which stays on the device for it, and all that its reader reads, which
    can be swapped instead. Empty where there is none."""
    for reader in _readers(target, tree) if target != LAYER else ():
        for outer in recomputed:
            if is_within(reader, outer) and not is_within(outer, target):
                return outer, _inputs(reader, tree)
    return "", []


def roles_of(name: str, tree: Tree | None) -> set[str]:
    """Names of the roles that a part may stand for; `layer_output` for what makes the layer's output."""
    names = {role.name for role, _ in _roles(name, tree)}
    return names | {"layer_output"} if "add" in names else names


def _roles(name: str, tree: Tree | None) -> list[tuple[Role, str]]:
    """The roles that a name may stand for, each with the naming it is written in."""
    family = family_of(tree)
    families = FAMILIES if family == "other" else (family,)
    return [(role, family) for role in ROLES for family in families if name in _names_in(role, family)]


def _names_in(role: Role, family: str) -> tuple[str, ...]:
    """The names of a role that is one part; where it is two Hugging Face modules, each has a role of its own."""
    names = role.names(family)
    return names if family != "hf" or len(names) == 1 else ()


def _readers(name: str, tree: Tree | None) -> list[str]:
    """Names of the parts that read the output of `name`."""
    found: list[str] = []
    for role, family in _roles(name, tree):
        for reader in ROLES:
            found += _names_in(reader, family) if reader.name in role.readers else ()
    return list(dict.fromkeys(found))


def _inputs(reader: str, tree: Tree | None) -> list[str]:
    """Names of the parts whose output `reader` reads; of one role the first name that the layer has."""
    found: dict[str, None] = {}
    for role, family in _roles(reader, tree):
        for source in ROLES:
            names = _names_in(source, family) if role.name in source.readers else ()
            found |= dict.fromkeys([name for name in names if tree is None or lookup(name, tree) is not False][:1])
    return [name for name in found if not any(is_within(name, other) and name != other for other in found)]
