"""Small edits of one function, made on its syntax tree. A mutant names the function and one of these, and quotes no
lines, so that moved code, other comments and another format leave it as it is.

Each edit looks for one place: the innermost statement, condition or operand in which all of the given names occur, or
the expressions that are equal to a given one. No place, or several, is a ValueError: the mutant does not fit any more.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Edit:
    """What is done (`gives`, `drops`, ...), to what, and what comes in its place."""

    kind: str
    names: tuple[str, ...]
    new: str = ""

    def apply(self, function: Function) -> None:
        """Change the function. Raises ValueError where there is not one place for it."""
        _KINDS[self.kind](function, self)


def gives(expression: str) -> Edit:
    """The function returns this and does nothing else."""
    return Edit("gives", (), expression)


def drops(*names: str) -> Edit:
    """The statement in which all of these names occur is left out."""
    return Edit("drops", names)


def never(*names: str) -> Edit:
    """The condition in which all of these names occur is false."""
    return Edit("condition", names, "False")


def always(*names: str) -> Edit:
    """The condition in which all of these names occur is true."""
    return Edit("condition", names, "True")


def without(*names: str) -> Edit:
    """Of an `and` or `or`, the operand in which all of these names occur is left out."""
    return Edit("without", names)


def puts(old: str, new: str) -> Edit:
    """This expression is another one, wherever it stands in the function."""
    return Edit("puts", (old,), new)


def last_step(expression: str) -> Edit:
    """The last `x += something` of the function adds this."""
    return Edit("last_step", (), expression)


def changed(text: str, function: str, edit: Edit) -> str:
    """A module's text with an edit of a function of it (`name` or `Class.name`). ValueError where it does not fit."""
    module = ast.parse(text)
    edit.apply(function_in(module, function))
    return ast.unparse(ast.fix_missing_locations(module))


def function_in(module: ast.Module, path: str) -> Function:
    """The function of this name; of several (a property and its setter) the first."""
    place: Any = module
    for name in path.split("."):
        place = next((node for node in place.body if getattr(node, "name", None) == name), None)
        if place is None:
            raise ValueError(f"there is no '{path}'")
    return place


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _names_in(node: ast.AST) -> set[str]:
    """Variables, attributes, keywords and texts in a piece of code."""
    found: set[str] = set()
    for each in ast.walk(node):
        for key in ("id", "attr", "arg", "value", "name"):
            word = getattr(each, key, None)
            if isinstance(word, str):
                found.add(word)
    return found


def _one(found: list[Any], function: Function, edit: Edit) -> Any:
    if len(found) != 1:
        raise ValueError(f"{edit.kind} {edit.names} fits {len(found)} places in '{function.name}'")
    return found[0]


def _innermost(nodes: list[Any], names: tuple[str, ...]) -> list[Any]:
    """Those in which all names occur, and in no part of theirs that is among the nodes too."""
    fitting = [node for node in nodes if set(names) <= _names_in(node)]
    return [n for n in fitting if not any(other is not n and other in set(ast.walk(n)) for other in fitting)]


def _gives(function: Function, edit: Edit) -> None:
    function.body = [ast.Return(_expression(edit.new))]


def _drops(function: Function, edit: Edit) -> None:
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
    gone = _one(_innermost(statements, edit.names), function, edit)
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and gone in block:
                block[block.index(gone)] = ast.Pass()


def _conditions(function: Function) -> Iterator[tuple[ast.expr, Callable[[ast.expr], None]]]:
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield node.test, lambda new, node=node: setattr(node, "test", new)
        if isinstance(node, ast.comprehension):
            for index, test in enumerate(node.ifs):
                yield test, lambda new, node=node, index=index: node.ifs.__setitem__(index, new)


def _condition(function: Function, edit: Edit) -> None:
    places = list(_conditions(function))
    found = _one(_innermost([test for test, _ in places], edit.names), function, edit)
    next(put for test, put in places if test is found)(_expression(edit.new))


def _without(function: Function, edit: Edit) -> None:
    chains = [node for node in ast.walk(function) if isinstance(node, ast.BoolOp)]
    operand = _one(_innermost([value for chain in chains for value in chain.values], edit.names), function, edit)
    chain = next(chain for chain in chains if operand in chain.values)
    chain.values.remove(operand)
    if len(chain.values) == 1:
        chain.values.append(ast.Constant(isinstance(chain.op, ast.And)))


class _Puts(ast.NodeTransformer):
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self.num_found = ast.dump(_expression(old)), new, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr) and ast.dump(node) == self._old:
            self.num_found += 1
            return _expression(self._new)
        return self.generic_visit(node)


def _puts(function: Function, edit: Edit) -> None:
    replacer = _Puts(edit.names[0], edit.new)
    function.body = [replacer.visit(statement) for statement in function.body]
    if not replacer.num_found:
        _one([], function, edit)


def _last_step(function: Function, edit: Edit) -> None:
    found = [node for node in ast.walk(function) if isinstance(node, ast.AugAssign)]
    _one(found[-1:], function, edit).value = _expression(edit.new)


_KINDS: dict[str, Callable[[Function, Edit], None]] = {
    "gives": _gives,
    "drops": _drops,
    "condition": _condition,
    "without": _without,
    "puts": _puts,
    "last_step": _last_step,
}
