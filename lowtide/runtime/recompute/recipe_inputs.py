"""What recipes start from: links to sources (recipe_sources.py), and links to parameters and buffers."""

from __future__ import annotations

from typing import Protocol

import torch

from lowtide.recipes.proof import Start
from lowtide.tensors.private import storage_key, version_of
from lowtide.tensors.view import Shape


class Source(Protocol):
    """A storage that a recipe may start from."""

    shape: Shape
    last_use: int
    """Autograd's sequence number of the last save that needs it, directly or through recipes."""
    num_readers: int

    @property
    def nbytes(self) -> int:
        """The bytes of the storage."""

    def is_intact(self) -> bool:
        """Whether its bytes are still those of the forward pass."""

    def read(self) -> torch.UntypedStorage:
        """The storage with the bytes on the device, for one of `num_readers`."""

    def start(self, name: str, shape: Shape) -> Start:
        """Its identity, for the proof that a recipe starts from it, seen as `shape`."""


class Link:
    """One input of a recipe: a source, and the shape in which the recipe reads it."""

    __slots__ = ("name", "shape", "source")

    def __init__(self, name: str, source: Source, shape: Shape) -> None:
        self.name = name
        self.source = source
        self.shape = shape

    def open(self) -> torch.Tensor:
        return self.shape.over(self.source.read())

    def start(self) -> Start:
        return self.source.start(self.name, self.shape)

    def seen_as(self, shape: Shape) -> Link:
        """The same source in another shape."""
        return Link(self.name, self.source, shape)

    def is_intact(self) -> bool:
        return self.source.is_intact()


class StateLink:
    """One input of a recipe: a parameter or a buffer, as it was in the forward.

    `counter` is the tensor that has the version: the tensor itself, or the distributed one around it.
    """

    __slots__ = ("counter", "name", "shape", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor, shape: Shape, counter: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.counter = counter
        self.version = version_of(counter)
        self.shape = shape

    def open(self) -> torch.Tensor:
        storage = self.tensor.untyped_storage()
        if self.shape.end_bytes() > storage.nbytes():
            raise RuntimeError(
                f"lowtide: parameter '{self.name}' is sharded at this moment of the backward pass, but something that "
                "was dropped is to be made from it. The step is not the one that the plan was made for; plan again, or "
                "give it the fate keep or swap."
            )
        return self.shape.over(storage)

    def start(self) -> Start:
        return Start(self.name, storage_key(self.tensor.untyped_storage()), version_of(self.tensor), self.shape)

    def seen_as(self, shape: Shape) -> StateLink:
        """The same tensor in another shape."""
        return StateLink(self.name, self.tensor, shape, self.counter)

    def is_intact(self) -> bool:
        return version_of(self.counter) == self.version
