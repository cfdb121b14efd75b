"""A tensor as a view of a storage at a version: how it lies there, who made it, whether it was written to since.

How a tensor looks at a storage. Plain data; holds no tensor.

Cost: half a microsecond to write one down. Not covered: tensors that are not strided.
"""

from __future__ import annotations

import functools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from lowtide.core.recipe import Geometry
from lowtide.tensors.private import base_of, disable_current_modes, is_view, negated, version_of
from lowtide.tensors.wrappers import hollow, inside, is_desugared


class Shape(NamedTuple):
    """Size, stride and offset, in elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        return cls(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @classmethod
    def from_geometry(cls, geometry: Geometry) -> Shape:
        return cls(geometry.size, geometry.stride, geometry.offset, getattr(torch, geometry.dtype))

    def at(self, offset: int, dtype: torch.dtype | None = None) -> Shape:
        """The same size and stride elsewhere in a storage, and with `dtype` if it is given."""
        return Shape(self.size, self.stride, offset, dtype or self.dtype)

    def end_bytes(self) -> int:
        """Bytes from the start of the storage to the end of the last element."""
        if 0 in self.size:
            return 0
        last = sum((count - 1) * step for count, step in zip(self.size, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this shape over `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def part_of(tensor: torch.Tensor) -> Shape | None:
    """The part of its storage that `tensor`'s version counter speaks for; None for all of it.

    Views share the counter of their base, and an ordinary base is all of its storage. What `unsafe_chunk` gives out are
    no views: tensors with a counter each, written one by one (the gates of `GRUCell` and `LSTMCell` on the host), so
    that one counter says nothing of the bytes of the others. Cost: about 0.5 us.
    """
    owner = base_of(tensor) if is_view(tensor) else tensor
    assert owner is not None
    return None if owner.numel() * owner.itemsize == owner.untyped_storage().nbytes() else Shape.of(owner)


def may_overlap(one: Shape, other: Shape) -> bool:
    """False only where two views of one storage share no byte: they lie apart, or interleave as `chunk` cuts rows."""
    if 0 in one.size or 0 in other.size:
        return False
    if one.dtype != other.dtype:
        return True
    first, second = sorted((one, other), key=lambda shape: shape.offset)
    if first.end_bytes() <= second.offset * second.dtype.itemsize:
        return False
    if first.stride != second.stride or not first.stride:
        return True
    # A shared element has an index in each view; the sum of (difference of indices) times stride is the difference of
    # offsets. With strides that nest (each steps over all that the smaller ones reach), there are two candidates for
    # each difference, from the largest stride down.
    rests = {second.offset - first.offset}
    spans = sorted(zip(first.stride, first.size, second.size, strict=True), reverse=True)
    for index, (stride, rows, others) in enumerate(spans):
        if stride == 0:
            continue
        reach = sum(below * (max(pair) - 1) for below, *pair in spans[index + 1 :])
        if reach >= stride:
            return True
        steps = {step for rest in rests for step in (rest // stride, rest // stride + 1)}
        rests = {rest - step * stride for rest in rests for step in steps if -others < step < rows}
        rests = {rest for rest in rests if abs(rest) <= reach}
    return 0 in rests


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A flat uint8 tensor over all bytes of a storage. Owns a reference to it, like any tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def write(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """`tensor.copy_(values)`, also of an expanded tensor, which torch refuses to write to: of elements that are one in
    memory, the first is written."""
    for dim, (size, step) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
        if step == 0 and size > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN and the sign of zero included. They may be on two devices."""
    if one.size() != other.size() or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta  # no bytes
    if one.is_quantized:  # its bytes have no view, and its scale is beside them
        here = one.detach().to(other.device)
        return torch.equal(here.int_repr(), other.int_repr()) and torch.equal(here.dequantize(), other.dequantize())
    first, second = (
        tensor.detach().to(other.device).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for tensor in (one, other)
    )
    return torch.equal(first, second)


_LEAST_WIDTH = 4095
"""Of the grid whose columns and rows are added up; odd, so that rows of a weight begin in different columns."""


def sum_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A number that changes when a byte does, or its place (but for changes that cancel out)."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()  # words of eight bytes begin at such addresses
    width = max(min(flat.numel() // 8, _LEAST_WIDTH), math.isqrt(flat.numel() // 8) | 1)
    whole = flat.numel() // (8 * width) * (8 * width)
    grid = flat[:whole].view(torch.int64).view(-1, width)
    sums = torch.cat([grid.sum(0), grid.sum(1), flat[whole:].to(torch.int64)])
    sums ^= sums >> 32  # highest bits are signs, and two of them add up to nothing
    return (sums * torch.arange(1, 2 * sums.numel(), 2, device=flat.device)).sum()


_NUM_SAMPLES = 64


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds on this rank; of a sparse one, its values."""
    local = inside(tensor.detach())
    return local.coalesce().values() if local.is_sparse else local


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of some 64 of its elements, spread evenly: equal for values that are not numbers, too."""
    local = values_of(tensor)
    spread = local.reshape(-1)[:: max(1, local.numel() // _NUM_SAMPLES)]
    return spread.clone().view(torch.uint8)


class TensorOrigin(NamedTuple):
    """Where a saved tensor came from, for the words of an error."""

    producer: type
    """Type of the node that made it; NoneType for a leaf."""
    output_nr: int
    """Which output of that node it is."""
    is_view: bool
    """Whether it is a view: autograd gives a view whose base was modified a new node."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorOrigin:
        return cls(type(tensor.grad_fn), tensor.output_nr, is_view(tensor))


def modified_error(tensor: torch.Tensor, size: torch.Size, now: int, then: int, origin: TensorOrigin) -> RuntimeError:
    """The error that plain autograd raises for a saved tensor that was modified in place, in its own words.

    `tensor` gives dtype and device.
    """
    name, hint = _torch_names(origin)
    which = f", which is output {origin.output_nr} of {name}," if name else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{_type_name(tensor)} {list(size)}]{which} is at version {now}; expected version {then} instead. {hint}"
    )


_RENAMED = frozenset({"Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"})
"""Types that torch's errors call by their Python names; the others keep those that they have in C++."""


def _type_name(tensor: torch.Tensor) -> str:
    name = tensor.type()
    kind = name.rpartition(".")[2].removesuffix("Tensor")
    return name if kind in _RENAMED else f"{tensor.device.type.upper()}{kind}Type"


def _torch_names(origin: TensorOrigin) -> tuple[str, str]:
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


def version_alias(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares `tensor`'s version counter and none of its memory (a sparse one: with its memory).

    `detach()` shares the counter; assigning `.data` replaces the storage and leaves the counter in place. On devices of
    torch's PrivateUse1 kind (NPU) only a tensor with the same conjugate and negative bits may be assigned.
    """
    if type(tensor) is not torch.Tensor and is_desugared((type(tensor),)):
        return hollow(tensor)
    alias = tensor.detach()
    try:
        alias.data = without_bytes(tensor.dtype, tensor.device)
    except RuntimeError:
        if tensor.layout is torch.strided:
            empty = without_bytes(tensor.dtype, tensor.device)
            empty = empty.conj() if tensor.is_conj() else empty
            alias.data = negated(empty) if tensor.is_neg() else empty
    return alias


@functools.cache
def without_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without bytes: one for all of a kind, since to make it takes as long as the rest of an alias."""
    with torch.inference_mode(mode=False), disable_current_modes():
        return torch.empty(0, dtype=dtype, device=device)


def nan_in_place_of(shape: Shape, device: torch.device) -> torch.Tensor:
    """One NaN (-1 where the type has none) in the size of a tensor whose bytes are not on the device."""
    number = float("nan") if shape.dtype.is_floating_point or shape.dtype.is_complex else -1
    return torch.full((), number, dtype=shape.dtype, device=device).expand(shape.size).data  # without a base


class View:
    """One saved tensor as a view of a storage, and the version at which it was saved."""

    __slots__ = ("alias", "origin", "shape", "version")

    def __init__(self, tensor: torch.Tensor, version: int | None = None, origin: TensorOrigin | None = None) -> None:
        """`version`, `origin`: those of the saved tensor, if `tensor` is a later alias of it."""
        self.shape = Shape.of(tensor)
        self.version = version_of(tensor) if version is None else version
        self.origin = TensorOrigin.of(tensor) if origin is None else origin
        self.alias = version_alias(tensor)

    def is_intact(self) -> bool:
        """Whether the tensor has not been modified in place since it was saved."""
        return version_of(self.alias) == self.version

    def check(self) -> None:
        """Raise RuntimeError if the tensor was modified in place since it was saved."""
        now = version_of(self.alias)
        if now != self.version:
            raise modified_error(self.alias, torch.Size(self.shape.size), now, self.version, self.origin)

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The same view over another storage with the same bytes."""
        return self.shape.over(storage)
