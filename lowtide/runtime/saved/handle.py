"""What the pack hook returns: the objects that own what is needed to give a saved tensor back.

Why: PyTorch does not promise an order of unpacking, nor that backward runs once, or at all, through each graph. So no
queue and no table by position owns bytes: autograd holds the handle, the handle owns the bytes, and when the graph dies
the handle dies and frees everything that it owned.

Two handles:
- `Kept` owns a detached alias (never the tensor itself: an output that owns its own node would never be freed).
- `Shared` refers to what all saved views of a storage share, and stores its own view. That is an `OffloadedStorage`, a
  `RecomputedSource`, or a `Rerun` (runtime/hooks/regions.py), which owns the inputs of a module and runs it again.

A `Wrapped` is around one of these where autograd saves a tensor that wraps another (this rank's part of a distributed
tensor, the result of a collective). A fate is about bytes, and these are inside; but autograd expects the wrapper back,
and counts in-place writes only on the wrapper.

Every handle checks the tensor's version when it is opened. Plain autograd does so by itself; as soon as any
saved-tensor hook is active it does not, and an in-place write after saving would silently give wrong gradients.

Cost: of a kept tensor in forward_pass.py; some 30 us a distributed tensor and 50 us
a result of a collective. Not covered: writes through `.data` or by kernels that do not bump the version counter; plain
autograd does not see those either. Python attributes of a saved parameter (`weight.main_grad`): PyTorch wraps what an
unpack hook returns into a new tensor, whatever it is. Wrappers that were written into before they were saved are left
to plain autograd (runtime/hooks/forward_pass.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.runtime.saved.stats import Share
from lowtide.tensors.compiled import never_compiled
from lowtide.tensors.private import is_view, version_of
from lowtide.tensors.view import TensorOrigin, View, modified_error
from lowtide.tensors.wrappers import hollow, shell_of


class Kept:
    """A saved tensor that stays on the device.

    `on_open` is called each time before the tensor is read; prefetch distances count these calls. `bytes_of` counts the
    storage in the ledger for as long as this handle lives; None for a further view of a storage that another handle
    counts.
    """

    __slots__ = ("__weakref__", "bytes_of", "on_open", "origin", "tensor", "version")

    def __init__(
        self,
        tensor: torch.Tensor,
        on_open: Callable[[], None] | None = None,
        bytes_of: object = None,
        origin: TensorOrigin | None = None,
    ) -> None:
        """`origin`: where the tensor came from, if that is known already."""
        grad_fn = tensor.grad_fn
        self.version = version_of(tensor)
        self.origin = origin or TensorOrigin(type(grad_fn), tensor.output_nr, is_view(tensor))
        self.tensor = tensor if grad_fn is None else tensor.detach()
        self.on_open = on_open
        self.bytes_of = bytes_of

    @property
    def is_first(self) -> bool:
        """Whether this handle counts the bytes of its storage in the ledger."""
        return isinstance(self.bytes_of, Share)

    def is_intact(self) -> bool:
        """Whether its bytes are still those of the forward pass."""
        return version_of(self.tensor) == self.version

    def read(self) -> torch.UntypedStorage:
        """The storage with the bytes on the device, for a recipe that starts from it."""
        return self.tensor.untyped_storage()

    def open(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was modified in place since it was saved."""
        if self.on_open is not None:
            self.on_open()
        tensor = self.tensor
        if version_of(tensor) != self.version:
            raise modified_error(tensor, tensor.size(), version_of(tensor), self.version, self.origin)
        return tensor


class Shared:
    """A saved tensor that views a storage, which other saved tensors may view too.

    `source` owns it: `source.read()` gives the storage with the bytes of the forward pass, fetched or recomputed, for
    one of its readers. `on_open`: as in `Kept`.
    """

    __slots__ = ("on_open", "source", "view")

    def __init__(self, source: Any, tensor: torch.Tensor, on_open: Callable[[], None] | None = None) -> None:
        self.source = source
        self.on_open = on_open
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        if self.on_open is not None:
            self.on_open()
        return self.view.over(self.source.read())


@never_compiled
def open_handle(handle) -> torch.Tensor:
    """The unpack hook. A module-level function, so that a graph does not hold the forward pass that built it."""
    return handle.open()


def is_checkpoint_hook(hooks: tuple[Callable, Callable] | None) -> bool:
    """Whether these saved-tensor hooks are those of a `torch.utils.checkpoint` region (forward or recompute)."""
    if hooks is None:
        return False
    return getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint" or (
        "checkpoint" in getattr(hooks[0], "__qualname__", "") and "_hook" in getattr(hooks[0], "__qualname__", "")
    )


class Wrapped:
    """A saved wrapper. Another handle gives back the plain tensor inside."""

    __slots__ = ("alias", "local", "origin", "shell", "size", "version")

    def __init__(self, tensor: torch.Tensor, local: Any) -> None:
        self.local = local
        self.shell = shell_of(tensor)
        self.origin = TensorOrigin.of(tensor)
        self.size = tensor.size()
        self.version = version_of(tensor)
        self.alias = hollow(tensor)

    def open(self) -> torch.Tensor:
        """What was saved. Raises RuntimeError if it was modified in place since."""
        if version_of(self.alias) != self.version:
            like = torch.empty(0, dtype=self.alias.dtype, device=self.alias.device)
            raise modified_error(like, self.size, version_of(self.alias), self.version, self.origin)
        local = self.local.open()
        return local if self.shell is None else self.shell(local)
