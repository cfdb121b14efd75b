"""Layers that use `torch.func` inside: their saved tensors are left to plain autograd.

Why: where saved-tensor hooks are active, PyTorch raises an error in `grad`, `vjp`, `jacrev` and `hessian`, whoever set
the hooks. (`vmap` and `jvp` work.) So such a layer runs without hooks: what it saves stays, whatever the plan says, and
a warning names the layer.

The first forward finds out: the layer's forward starts and raises; everything that it changed is restored, and it runs
again without hooks. Later forwards run it without hooks at once.

Cost: one walk over each layer in the first forward, nothing later. Not covered: a layer that begins to use `torch.func`
after its first forward, or that writes to its inputs before: it is refused by name once, and runs from then on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.runtime.hooks.table import LayerTable
from lowtide.tensors.private import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
    tree_leaves,
    version_of,
)
from lowtide.tensors.random_state import RandomState
from lowtide.tensors.remembered import PLAIN
from lowtide.tensors.snapshot import take

_REFUSAL = "don't yet support saved tensor hooks"


def run_allowing_transforms(
    layer: LayerTable, hooked: Callable[..., Any], forward: Callable, given: tuple[tuple, dict]
) -> Any:
    """`hooked` on the arguments `given`, or `forward` where hooks are in the way.

    Called inside hooks of ours, and no other.
    """
    args, kwargs = given
    if layer.uses_transforms:
        with _without_hooks():
            return forward(*args, **kwargs)
    before = _Before(layer, given) if not layer.tables else None
    try:
        return hooked(*args, **kwargs)
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
        layer.uses_transforms = True
        where = f"'{layer.name}'" if layer.name else "the model"
        if before is None or not before.can_go_back():
            raise RuntimeError(
                f"lowtide: {where} used torch.func (grad, vjp, jacrev or hessian) in this forward, but not in its "
                "first one, or only after it had written to its inputs or to a large buffer; PyTorch does not allow "
                f"saved-tensor hooks around it. Run this step again: what {where} saves is left to plain autograd from "
                "now on."
            ) from error
    warnings.warn(
        f"lowtide: {where} uses torch.func (grad, vjp, jacrev or hessian), around which PyTorch allows no saved-tensor "
        "hooks: what it saves stays on the device, whatever the plan says.",
        stacklevel=2,
    )
    before.go_back()
    with _without_hooks():
        return forward(*args, **kwargs)


class _Before:
    """What a forward may change, as it was before."""

    def __init__(self, layer: LayerTable, given: tuple[tuple, dict]) -> None:
        leaves = tree_leaves(given)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._tensors = [(tensor, version_of(tensor)) for tensor in tensors if not tensor.is_inference()]
        beside = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN]
        self._state = take(layer.module, beside=beside or None, code=True)
        self._random = RandomState(tensors)

    def can_go_back(self) -> bool:
        """Whether it can be restored. Not if inputs or large buffers were written to: these have no copies."""
        return not self._state.lost() and all(version_of(tensor) == version for tensor, version in self._tensors)

    def go_back(self) -> None:
        self._state.restore()
        self._random.set()


@contextlib.contextmanager
def _without_hooks() -> Iterator[None]:
    """Inside, the innermost saved-tensor hooks are switched off."""
    hooks = top_saved_tensors_hooks()
    assert hooks is not None
    pop_saved_tensors_hooks()
    try:
        yield
    finally:
        push_saved_tensors_hooks(*hooks)
