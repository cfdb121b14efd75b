"""One call of a module, with its arguments, so that the module can run again from the same or other tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import nn

from lowtide.tensors.compiled import without_wrappers
from lowtide.tensors.kinds import CACHE_NAMES, num_cached
from lowtide.tensors.private import is_compiled_function, original_of_compiled, tree_flatten, tree_unflatten
from lowtide.tensors.remembered import PLAIN
from lowtide.tensors.wrappers import guise_of

_LEAVES = PLAIN | {torch.Tensor, nn.Parameter}


class Call:
    """A module's forward with its arguments taken apart, so that it can run again from other tensors.

    The first run gets the caller's own containers (lists, dicts), so that the caller sees what the module writes into
    them. Later runs get new containers, filled as the caller's were before the first run. A tensor that was passed
    twice is one tensor in every run.
    """

    def __init__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> None:
        self.module = module
        self.forward = forward
        self._written: tuple[tuple, dict] | None = (args, kwargs)
        self._names = tuple(kwargs)
        self._specs: list[Any] = []
        """Of each argument: how it is made of leaves. None: it is a leaf. A number: it is a tuple of so many leaves."""
        self._constants: list[Any] = []
        """The leaves; None for a tensor."""
        self._places: list[tuple[int, int]] = []
        """Of each leaf that is a tensor: its place among the leaves, and that of the tensor in `tensors`."""
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        """Leaves that may have a state of their own: those that are neither tensors nor plain values."""
        order: dict[int, int] = {}
        for value in (*args, *kwargs.values()):
            leaves: Iterable[Any]
            spec: Any
            if type(value) in _LEAVES:
                leaves, spec = (value,), None
            elif type(value) is tuple and all(type(leaf) in _LEAVES for leaf in value):
                leaves, spec = value, len(value)
            else:
                leaves, spec = tree_flatten(value)
            self._specs.append(spec)
            for leaf in leaves:
                if type(leaf) in PLAIN:
                    self._constants.append(leaf)
                elif isinstance(leaf, torch.Tensor):
                    index = order.setdefault(id(leaf), len(order))
                    if index == len(self.tensors):
                        self.tensors.append(leaf)
                    self._places.append((len(self._constants), index))
                    self._constants.append(None)
                else:
                    self._constants.append(leaf)
                    self.objects.append(leaf)
        self.flags = [tensor.requires_grad for tensor in self.tensors]
        self.guises = [*map(guise_of, self.tensors)]

    def own_forward(self) -> Any:
        """The forward, if it is not the class's own."""
        forward = without_wrappers(self.forward)
        if is_compiled_function(forward):
            forward = original_of_compiled(forward)
        return None if isinstance(forward, MethodType) else forward

    def make_first(self) -> Any:
        """Run the forward on the caller's own arguments."""
        assert self._written is not None
        args, kwargs = self._written
        return self.forward(*args, **kwargs)

    def forget(self) -> None:
        """The first run is over: release its tensors."""
        self._written = None
        self.tensors = []

    def make(self, tensors: list[torch.Tensor]) -> Any:
        """Run the forward on `tensors` in place of the original ones."""
        constants = list(self._constants)
        for place, index in self._places:
            constants[place] = tensors[index]
        leaves = iter(constants)
        values = [_built(spec, leaves) for spec in self._specs]
        num_args = len(values) - len(self._names)
        return self.forward(*values[:num_args], **dict(zip(self._names, values[num_args:], strict=True)))


def _built(spec: Any, leaves: Iterator[Any]) -> Any:
    """An argument, of the next leaves."""
    if spec is None:
        return next(leaves)
    if isinstance(spec, int):
        return tuple(islice(leaves, spec))  # pytree takes five times as long for it
    return tree_unflatten([*islice(leaves, spec.num_leaves)], spec)


def without_cache(
    module: nn.Module, args: tuple, kwargs: dict, refusal_of: Callable[[str], RuntimeError]
) -> tuple[tuple, dict]:
    """Take an empty key-value cache out of a layer's inputs: the layer's second run would append to it again.

    Raises what `refusal_of` makes for a cache that already holds tokens, since dropping it would change the result.
    """
    named = {name: kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None}
    if not named:
        return args, kwargs
    for name, cache in named.items():
        if num_cached(module, cache):
            raise refusal_of(
                f"lowtide: a layer under recompute was called with {name} that already holds tokens; running it again "
                "would change them. Train with use_cache=False, or give this layer another fate."
            )
    warnings.warn(
        f"lowtide: recomputed layers leave {', '.join(named)} empty, for all who read it; set use_cache=False.",
        stacklevel=2,
    )
    kwargs = {**kwargs, **dict.fromkeys(named)}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return args, kwargs
