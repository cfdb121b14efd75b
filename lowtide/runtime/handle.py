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

Cost: about 1 us a kept tensor beside what any saved-tensor hook costs (5 us). Not covered: writes through `.data` or by
kernels that do not bump the version counter; plain autograd does not see those either.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from lowtide.catalog.wrappers import hollow, is_desugared


class Origin(Protocol):
    """Where a saved tensor came from, for the words of an error."""

    @property
    def producer(self) -> type:
        """Type of the node that made it; NoneType for a leaf."""

    @property
    def output_nr(self) -> int:
        """Which output of that node it is."""

    @property
    def is_view(self) -> bool:
        """Whether it is a view: autograd gives a view whose base was modified a new node."""


def modified_error(tensor: torch.Tensor, size: torch.Size, now: int, then: int, origin: Origin) -> RuntimeError:
    """The error that plain autograd raises for a saved tensor that was modified in place, in its own words.

    `tensor` gives dtype and device.
    """
    name, hint = _plain_words(origin)
    which = f", which is output {origin.output_nr} of {name}," if name else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(size)}]{which} is at version {now}; expected version {then} instead. {hint}"
    )


def _plain_words(origin: Origin) -> tuple[str, str]:
    """How this version of torch writes an operator's name, and its hint: learned by making it raise the error."""
    # In a thread of its own: here, saved-tensor hooks may be active, and with those there is no such error.
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(_provoke).result()
    name = "" if origin.producer is type(None) else origin.producer.__name__
    if name and origin.is_view:
        name = "AsStridedBackward0"
    if "ExpBackward0" not in text:
        name = re.sub(r"Backward\d*$", "", name)
    return name, text[text.rindex("Hint: ") :]


def _provoke() -> str:
    with torch.enable_grad():
        broken = torch.ones(1, requires_grad=True).exp()
        result = broken.sin()
        broken.detach().add_(1)
    try:
        result.backward()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("autograd did not notice an in-place write")


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares `tensor`'s version counter and none of its memory.

    `detach()` shares the counter; assigning `.data` replaces the storage and leaves the counter in place.
    """
    if type(tensor) is not torch.Tensor and is_desugared((type(tensor),)):
        return hollow(tensor)
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


class Kept:
    """A saved tensor that stays on the device."""

    __slots__ = ("is_view", "output_nr", "producer", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        grad_fn = tensor.grad_fn
        self.version = tensor._version
        self.producer = type(grad_fn)
        self.output_nr = tensor.output_nr
        self.is_view = tensor._is_view()
        self.tensor = tensor if grad_fn is None else tensor.detach()

    def open(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was modified in place since it was saved."""
        tensor = self.tensor
        if tensor._version != self.version:
            raise modified_error(tensor, tensor.size(), tensor._version, self.version, self)
        return tensor


class KeptSite(Kept):
    """The first handle on a kept storage: it also carries the storage's bytes in the ledger while it lives."""

    __slots__ = ("ledger", "nbytes")

    def __init__(self, tensor: torch.Tensor, nbytes: int, ledger) -> None:
        # Before anything can fail: the finalizer runs in any case.
        self.nbytes = nbytes
        self.ledger = ledger
        ledger.add(nbytes)
        super().__init__(tensor)

    def __del__(self) -> None:
        self.ledger.subtract(self.nbytes)


class View:
    """How one saved tensor looks at a storage, and the version at which it was saved."""

    __slots__ = ("is_view", "offset", "output_nr", "producer", "size", "stride", "version", "witness")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.producer = type(tensor.grad_fn)
        self.output_nr = tensor.output_nr
        self.is_view = tensor._is_view()
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version
        self.witness = version_witness(tensor)

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place since it was saved."""
        if self.witness._version != self.version:
            raise modified_error(self.witness, self.size, self.witness._version, self.version, self)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view over another storage with the same bytes."""
        empty = torch.empty(0, dtype=self.witness.dtype, device=self.witness.device)
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
