"""What the pack hook returns: the objects that own what is needed to give a saved tensor back.

Why: PyTorch does not promise an order of unpacking, nor that backward runs once, or at all, through each graph. So no
queue and no table by position owns bytes: autograd holds the handle, the handle owns the bytes, and when the graph dies
the handle dies and frees everything that it owned.

Three handles:
- `Kept` owns a detached alias (never the tensor itself: an output that owns its own node would never be freed).
- `Swapped` refers to an `OffloadedStorage`, which all saved views of a storage share, and stores its own view.
- `RerunView` (runtime/recompute/module_output.py) refers to a `Rerun`, which owns the inputs of a module and runs it
  again.

Every handle checks the tensor's version when it is opened. Plain autograd does so by itself; as soon as any
saved-tensor hook is active it does not, and an in-place write after saving would silently give wrong gradients.

Cost: about 1 us a kept tensor beside what any saved-tensor hook costs (5 us). Not covered: writes through `.data` or by
kernels that do not bump the version counter; plain autograd does not see those either. Python attributes of a saved
parameter (`weight.main_grad`): PyTorch wraps what an unpack hook returns into a new tensor, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowtide.runtime.saved.stats import Share
from lowtide.tensors.compiled import never_compiled
from lowtide.tensors.private import is_view, version_of
from lowtide.tensors.view import Origin, View, modified_error


class Kept:
    """A saved tensor that stays on the device.

    `on_open` is called each time before the tensor is read; prefetch distances count these calls. `bytes_of` counts the
    storage in the ledger for as long as this handle lives; None for a further view of a storage that another handle
    counts.
    """

    __slots__ = ("__weakref__", "bytes_of", "on_open", "origin", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, on_open: Callable[[], None] | None = None, bytes_of: object = None
    ) -> None:
        grad_fn = tensor.grad_fn
        self.version = version_of(tensor)
        self.origin = Origin(type(grad_fn), tensor.output_nr, is_view(tensor))
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


class Swapped:
    """A saved tensor whose storage is an `OffloadedStorage`."""

    __slots__ = ("site", "view")

    def __init__(self, site, tensor: torch.Tensor) -> None:
        self.site = site
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor, fetched if need be. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        return self.view.over(self.site.read())


@never_compiled
def open_handle(handle) -> torch.Tensor:
    """The unpack hook. A module-level function, so that a graph does not hold the forward pass that built it."""
    return handle.open()
