"""Runs of equal layers: which layers of a model need not be run, because their neighbour shows what they do.

What: layers of one class, with parameters of equal names, shapes and dtypes and with equal plain attributes (but for
their own index), in a row. Of each run the first two and the last are traced; the forward of the others is replaced,
on the instance and for the time of the trace, by one that returns its input. expand_layers.py puts their operators
back.

Cost: one walk over the layers. Not covered: layers whose output is not one tensor of their input's shape, which are all
traced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.tensors.private import tree_flatten, tree_leaves, tree_unflatten

_NUM_TRACED = 3


class CannotSkipError(Exception):
    """The layers look equal but cannot stand for each other: trace all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Equal layers in a row: `first`, `second`, then those that are not run, then `last`."""

    first: str
    second: str
    skipped: tuple[str, ...]
    last: str


def find_runs(model: nn.Module, layers: tuple[str, ...]) -> tuple[Run, ...]:
    """The runs of more than three equal layers, in order."""
    modules = dict(model.named_modules())
    shared = _shared_parameters(model)
    runs: list[list[str]] = []
    previous: Any = None
    for name in layers:
        looks = (name.rpartition(".")[0], _looks(modules[name]))
        is_alone = any(id(parameter) in shared for parameter in modules[name].parameters())
        if previous is not None and looks == previous and not is_alone:
            runs[-1].append(name)
        else:
            runs.append([name])
        previous = None if is_alone else looks
    return tuple(
        Run(first=run[0], second=run[1], skipped=tuple(run[2:-1]), last=run[-1])
        for run in runs
        if len(run) > _NUM_TRACED
    )


def _shared_parameters(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _looks(layer: nn.Module) -> tuple:
    """What must be equal for two layers to do the same work."""
    parts: list[Any] = []
    for name, module in layer.named_modules():
        parts.append((name, type(module), module.training, _plain_attributes(module)))
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    parts.extend((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors)
    return tuple(parts)


def _plain_attributes(module: nn.Module) -> tuple:
    found: list[tuple[str, Any]] = []
    for key, value in vars(module).items():
        is_own_index = isinstance(value, int) and not isinstance(value, bool) and ("idx" in key or "index" in key)
        if key.startswith("_") or is_own_index:
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if all(part is None or isinstance(part, bool | int | float | str | torch.dtype) for part in parts):
            found.append((key, value))
    return tuple(sorted(found, key=lambda entry: entry[0]))


@contextlib.contextmanager
def skipping(model: nn.Module, runs: tuple[Run, ...]) -> Iterator[None]:
    """Inside, the skipped layers of `runs` give their input back."""
    modules = dict(model.named_modules())
    hooks, patched = [], []
    try:
        for run in runs:
            template = _Template()
            hooks.append(modules[run.second].register_forward_hook(template.note))
            for name in run.skipped:
                own = modules[name].__dict__
                patched.append((own, own.get("forward")))
                own["forward"] = template.stand_in
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for own, before in patched:
            if before is None:
                own.pop("forward", None)
            else:
                own["forward"] = before


class _Template:
    """How the second layer's output looks, and a forward that looks the same."""

    def __init__(self) -> None:
        self._leaves: list[Any] | None = None
        self._spec: Any = None
        self._looks: tuple | None = None

    def note(self, module: nn.Module, args: Any, output: Any) -> None:
        leaves, self._spec = tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(tensors) != 1:
            raise CannotSkipError
        self._looks = (tensors[0].shape, tensors[0].dtype)
        self._leaves = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]

    def stand_in(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
        if hidden is None or self._leaves is None or (hidden.shape, hidden.dtype) != self._looks:
            raise CannotSkipError
        return tree_unflatten([hidden if leaf is None else leaf[0] for leaf in self._leaves], self._spec)
