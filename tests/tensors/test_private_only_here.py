"""Private symbols of torch and transformers are named in lowtide/tensors/private.py and nowhere else in the package.

Reads the source. Three kinds of places count: imports; attributes that begin with an underscore and that no class or
module of lowtide has, or that a tensor, storage, module, optimizer, operator or autograd node of torch has; and strings
that are such a name, or a path to a private module of torch. Not seen: names put together at run time.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide

_PACKAGE = Path(lowtide.__file__).parent
_HOME = _PACKAGE / "tensors" / "private.py"
_LIBRARIES = ("torch", "transformers", "torch_npu")

ALLOWED = {
    "sys._getframe": "Python's own: the only way to look at the frames below",
    "self.lock._is_owned": "of Python's RLock: nothing public says that this very thread holds it",
}
"""Foreign private names that may stand where they do, and why. None is torch's."""

OPERATORS = {
    "_c10d_functional": "a namespace of operators: what a profile calls them",
    "_c10d_functional_autograd": "a namespace of operators: what a profile calls them",
}
"""Strings that are names of operators, which are data."""


def _sources() -> list[Path]:
    return sorted(path for path in _PACKAGE.rglob("*.py") if path != _HOME)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _names_of_torch() -> frozenset[str]:
    weight = torch.ones(1, requires_grad=True)
    samples = (weight, weight.untyped_storage(), (weight * 2).grad_fn, nn.GRU(1, 1), nn.BatchNorm1d(1), torch.ops)
    samples += (torch.optim.SGD([weight]), torch.ops.aten.add.Tensor, torch.ops.aten.add)
    return frozenset(name for sample in samples for name in dir(sample) if _is_private(name))


@functools.cache
def _nodes(source: str) -> list[ast.AST]:
    """Of the tree of a file; two tests read all files."""
    return list(ast.walk(ast.parse(source)))


def _own_names(sources: Iterable[str]) -> frozenset[str]:
    """What lowtide defines: functions, classes, variables, fields, slots, and attributes that its classes give self."""
    names = set()
    for node in (node for source in sources for node in _nodes(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return frozenset(names)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _private_module(path: str) -> bool:
    first, *others = path.split(".")
    return first in _LIBRARIES and any(_is_private(name) for name in others)


def foreign_names(source: str, own: frozenset[str], of_torch: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each private name in `source` that is not lowtide's."""
    nodes, no_operators = _nodes(source), of_torch - set(OPERATORS)
    skipped = {id(part) for node in nodes for part in _no_names(node)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if _private_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in _LIBRARIES:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, path) for path in paths if _private_module(path))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr):
            name = ast.unparse(node)
            is_known = node.attr in own and (_is_self(node.value) or node.attr not in of_torch)
            if not is_known or _private_module(name):
                yield node.lineno, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            name = node.value
            yield from [(node.lineno, repr(name))] * (_private_module(name) or name in no_operators)


def _no_names(node: ast.AST) -> Iterator[ast.AST]:
    """Strings that are no names of torch's: docstrings, slots."""
    if isinstance(node, ast.Expr):
        yield node.value
    elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets):
        yield from ast.walk(node.value)


def test_no_private_name_of_torch_elsewhere() -> None:
    sources = {path: path.read_text() for path in _sources()}
    own = _own_names(sources.values())
    of_torch = _names_of_torch()
    found = [
        f"{path.relative_to(_PACKAGE)}:{line}: {name}"
        for path, text in sources.items()
        for line, name in foreign_names(text, own, of_torch)
        if name not in ALLOWED
    ]
    assert not found, "give it a name and a test in lowtide/tensors/private.py:\n" + "\n".join(found)


def test_every_exception_is_needed() -> None:
    own, of_torch = frozenset[str](), frozenset[str]()
    found = {name for path in _sources() for _, name in foreign_names(path.read_text(), own, of_torch)}
    assert found >= set(ALLOWED)
    text = "\n".join(path.read_text() for path in _sources())
    assert all(f'"{name}"' in text for name in OPERATORS)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils._pytree import tree_leaves", "torch.utils._pytree.tree_leaves"),
        ("from torch.overrides import _modes", "torch.overrides._modes"),
        ("from transformers.modeling_utils import _thing", "transformers.modeling_utils._thing"),
        ("torch._C._current_graph_task_id()", "torch._C"),
        ("tensor._version", "tensor._version"),
        ("self.tensor._version", "self.tensor._version"),
        ("model()._buffers", "model()._buffers"),
        ("thing._never_heard_of", "thing._never_heard_of"),
        ("self._never_heard_of", "self._never_heard_of"),
        ("getattr(tensor, '_base', None)", "'_base'"),
        ("sys.modules['torch._dynamo.eval_frame']", "'torch._dynamo.eval_frame'"),
        ("torch._mine()", "torch._mine"),
        ("self._version", ""),
        ("self._mine", ""),
        ("other._mine", ""),
        ("'a text on torch'", ""),
        ("__slots__ = ('_version',)", ""),
    ],
)
def test_the_guard_sees(line: str, found: str) -> None:
    names = [name for _, name in foreign_names(line, frozenset({"_mine", "_version"}), _names_of_torch())]
    assert found in names if found else not names
