"""Why a layer cannot be run again, as far as one look at it tells.

What: recompute refuses by name what it cannot put back (runtime/recompute/watch.py, region.py). What of
that shows in one call of a layer is found here, so that a planner does not choose what the runtime would refuse:
something that cannot be wound back, a key-value cache that holds tokens, a layer that writes to its own parameters.

Cost: one walk over what the layer reaches. Not covered: what shows only in the second run itself, and what begins
later; the runtime keeps such a layer, or says its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.tensors.private import tree_leaves, version_of
from lowtide.tensors.remembered import PLAIN
from lowtide.tensors.snapshot import take

CACHE_NAMES = ("past_key_values", "past_key_value", "layer_past")
"""Keyword inputs that are key-value caches."""


def why_not_rerun(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Why this call of `module` could not be repeated, in words; empty where nothing speaks against it."""
    caches = {name: kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None}
    try:
        holds_tokens = any(num_cached(module, cache) for cache in caches.values())
    except Exception:  # somebody else's class, asked in somebody else's forward
        return f"nobody can say how many tokens its {next(iter(caches))} holds"
    if holds_tokens:
        return f"its {next(iter(caches))} already holds tokens"
    leaves = tree_leaves((args, {key: value for key, value in kwargs.items() if key not in caches}))
    beside = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN]
    iterator = take(module, beside=beside or None, code=True, process=False).iterator
    return f"it can reach an iterator, '{iterator}', which cannot be wound back" if iterator else ""


def num_cached(module: nn.Module, cache: Any) -> int:
    """Tokens that a key-value cache holds for the layer `module`."""
    index = getattr(module, "layer_idx", getattr(getattr(module, "self_attn", None), "layer_idx", 0))
    length = getattr(cache, "get_seq_length", None)
    return int(length(index or 0)) if callable(length) else len(cache)


def versions_of_parameters(module: nn.Module) -> list[int]:
    """How often each of its parameters has been written to in place; those of inference mode cannot be."""
    return [0 if parameter.is_inference() else version_of(parameter) for parameter in module.parameters()]
