"""What the pack hook returns: the objects that own what is needed to give a saved tensor back.

Why: PyTorch promises neither the order of unpacking nor that every graph is run backward, once, or at all. So nothing
here sits in a queue or a table keyed by position: autograd holds the handle, the handle owns the bytes, and when the
graph dies the handle dies, and everything it owned is given back.

Three handles:
- `Kept` owns a detached alias (never the tensor itself: an output that owns its own node would never be freed).
- `Swapped` refers to a `Site`, the one copy that all saved views of a storage share, and remembers its own view.
- `Rerun` (runtime/recompute.py) owns the inputs of a module and runs it again.

Every handle checks the tensor's version when it is opened. Plain autograd does so by itself; as soon as any
saved-tensor hook is active it does not, and an in-place write after saving would silently give wrong gradients.

Cost: about 1 us a kept tensor, 6 us a swapped one. Not covered: writes through `.data` or by kernels that do not bump
the version counter; plain autograd does not see those either.
"""

from __future__ import annotations

import torch

_HINT = (
    "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True)."
)


def modified_error(dtype: torch.dtype, shape: torch.Size, device: torch.device, now: int, then: int) -> RuntimeError:
    """The error that plain autograd raises for a saved tensor that was modified in place."""
    kind = torch.empty(0, dtype=dtype, device=device).type()
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}] is at version {now}; expected version {then} instead. {_HINT}"
    )


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares `tensor`'s version counter and none of its memory.

    `detach()` shares the counter; assigning `.data` replaces the storage and leaves the counter in place.
    """
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


class Kept:
    """A saved tensor that stays on the device."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.version = tensor._version
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()

    def open(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was modified in place since it was saved."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified_error(tensor.dtype, tensor.shape, tensor.device, tensor._version, self.version)
        return tensor


class KeptSite(Kept):
    """The first handle on a kept storage: it also carries the storage's bytes in the ledger while it lives."""

    __slots__ = ("ledger", "nbytes")

    def __init__(self, tensor: torch.Tensor, nbytes: int, ledger) -> None:
        super().__init__(tensor)
        self.nbytes = nbytes
        self.ledger = ledger
        ledger.add(nbytes)

    def __del__(self) -> None:
        self.ledger.subtract(self.nbytes)


class View:
    """How one saved tensor looks at a storage, and the version at which it was saved."""

    __slots__ = ("device", "dtype", "offset", "size", "stride", "version", "witness")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version
        self.witness = version_witness(tensor)

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place since it was saved."""
        if self.witness._version != self.version:
            raise modified_error(self.dtype, self.size, self.device, self.witness._version, self.version)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view over another storage with the same bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Swapped:
    """A saved tensor whose storage is a `Site`."""

    __slots__ = ("site", "view")

    def __init__(self, site, tensor: torch.Tensor) -> None:
        self.site = site
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor, fetched if need be. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        return self.view.over(self.site.read())


def open_handle(handle) -> torch.Tensor:
    """The unpack hook: a module-level function, so that no graph holds the state of the forward that built it."""
    return handle.open()
