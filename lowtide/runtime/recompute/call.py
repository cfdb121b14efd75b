"""One call of a module, with its arguments, so that the module can run again from the same or other tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from lowtide.tensors.compiled import without_wrappers
from lowtide.tensors.private import is_compiled_function, original_of_compiled, tree_flatten, tree_unflatten
from lowtide.tensors.remembered import PLAIN
from lowtide.tensors.second_run import CACHE_NAMES, num_cached


class Call:
    """A module's forward with its arguments taken apart, so that it can run again from other tensors.

    The first run gets the caller's own containers (lists, dicts), so that the caller sees what the module writes into
    them. Later runs get new containers, filled as the caller's were before the first run. A tensor that was passed
    twice is one tensor in every run.
    """

    __slots__ = ("_constants", "_places", "_spec", "_written", "forward", "module", "tensors")

    def __init__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> None:
        self.module = module
        self.forward = forward
        self._written: tuple[tuple, dict] | None = (args, kwargs)
        leaves, self._spec = tree_flatten((args, kwargs))
        unique = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        order = {key: index for index, key in enumerate(unique)}
        self.tensors: list[torch.Tensor] = list(unique.values())
        self._places = [(i, order[id(leaf)]) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def objects(self) -> list[Any]:
        """Arguments that may have a state of their own: those that are neither tensors nor plain values."""
        return [leaf for leaf in self._constants if type(leaf) not in PLAIN]

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
        leaves = list(self._constants)
        for place, index in self._places:
            leaves[place] = tensors[index]
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self.forward(*args, **kwargs)


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
        f"lowtide: recomputed layers do not fill {', '.join(named)}; set use_cache=False to say so yourself.",
        stacklevel=2,
    )
    kwargs = {**kwargs, **dict.fromkeys(named)}
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return args, kwargs
