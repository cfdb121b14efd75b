"""What a saved tensor is, found out once: the record `Saved`, and which storages are the model's parameters.

Why: each fate has its own conditions (a storage, a plain type, this device). A condition that is tested in several
places may be tested differently in each.

A tensor that is kept by the table, while no guard watches live bytes, gets no record: its handle needs none, and the
record costs half as much as keeping a tensor. Whether a tensor is a parameter is not in the record, because the table
stores it; where there is no table yet, `Parameters` finds it out.

Cost: 2 us a record. Not covered: versions, because they change; code that compares a version reads it at that moment.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowtide.tensors.kinds import is_plain, leads_to_parameter, storage_keys, unregistered_in
from lowtide.tensors.private import base_of, is_view, storage_key
from lowtide.tensors.wrappers import inside


class Saved:
    """One tensor that autograd saves, or that recipes start from: what the rest of a pass needs to know of it."""

    __slots__ = ("grad_fn", "is_movable", "is_plain", "storage", "tensor")

    def __init__(self, tensor: torch.Tensor, grad_fn: Any, device: torch.device) -> None:
        """`tensor`: the plain tensor; `grad_fn`: autograd's node that made it, or that made the wrapper around it."""
        self.tensor = tensor
        self.grad_fn = grad_fn
        self.is_plain = is_plain(tensor)
        """Dense, strided, with bytes, and of no subclass but Parameter."""
        self.storage: torch.UntypedStorage | None = None
        """The storage of a plain tensor; None for others, which may have none."""
        self.is_movable = False
        """It may leave `device` and come back as a view of the same bytes."""
        if self.is_plain:
            storage = self.storage = tensor.untyped_storage()
            # Conjugate and negative bits are not part of a storage view; such tensors are rare, small, and stay.
            is_as_stored = not (tensor.is_conj() or tensor.is_neg())
            self.is_movable = is_as_stored and storage.nbytes() > 0 and tensor.device == device

    @property
    def key(self) -> int:
        """The storage's key in tables of live storages. Only for a plain tensor."""
        assert self.storage is not None
        return storage_key(self.storage)


class Parameters:
    """Which storages are the model's own, in one forward pass."""

    __slots__ = ("_keys_of_layer", "_keys_of_model", "_model")

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._keys_of_model: set[int] | None = None
        self._keys_of_layer: set[int] | None = None

    def forget_layer(self) -> None:
        """Another layer begins: look up its storages again, because sharded training gives a layer other, gathered
        parameters during its forward."""
        self._keys_of_layer = None

    def has(self, tensor: torch.Tensor, layer: nn.Module) -> bool:
        """A parameter or buffer, a view of one, or a cast of one that autograd can see. `layer`: the one that runs."""
        # Whether something is a Parameter is a question that torch answers in Python.
        if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):
            return True
        if is_view(tensor) and isinstance(base_of(tensor), nn.Parameter):
            return True
        local = inside(tensor)
        if not is_plain(local):
            return False
        return self._has_key(storage_key(local.untyped_storage()), layer) or leads_to_parameter(tensor)

    def _has_key(self, key: int, layer: nn.Module) -> bool:
        if self._keys_of_model is None:
            self._keys_of_model = storage_keys(self._model).union(*map(storage_keys, unregistered_in(self._model)))
        if self._keys_of_layer is None:
            self._keys_of_layer = storage_keys(layer)
        return key in self._keys_of_model or key in self._keys_of_layer
