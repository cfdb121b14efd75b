"""What is not as a snapshot remembers it, by name: the question that tests ask of a step that must leave no trace."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from lowtide.tensors.private import disable_current_modes
from lowtide.tensors.remembered import PLAIN, WRAPPED, Attributes, Items, Name, Record, State, TensorState, _version
from lowtide.tensors.snapshot import Snapshot
from lowtide.tensors.view import same_bytes


def changed(snapshot: Snapshot) -> list[str]:
    """`layers.0.count`, `layers.1.cache['x']`, `numpy's random state`."""
    with disable_current_modes(), torch.no_grad():
        found = [name for record in (*snapshot.changed(), *snapshot._tensors) for name in _changed(record)]
    return list(dict.fromkeys(found))


def _changed(record: Record | TensorState) -> Iterator[str]:
    if isinstance(record, TensorState):
        if record._is_moved() or _is_written(record) or record.tensor.requires_grad != record._flags:
            yield str(record.name)
    elif isinstance(record, Attributes):
        yield from _changed_names(record)
    elif isinstance(record, Items):
        if not _is_equal(tuple(record.value), tuple(record.then)):
            yield str(record.name)
    elif isinstance(record, State) or not _is_equal(record.now(), record.then):
        yield str(record.name)


def _changed_names(record: Attributes) -> Iterator[str]:
    now, then, missing = record.now(), record.then, record
    for key in {**then, **now}:
        is_wrapper = record.is_module and key in WRAPPED
        if not is_wrapper and not _is_equal(now.get(key, missing), then.get(key, missing)):
            yield str(Name(record.name, key, record.is_item))
    if now.keys() == then.keys() and [*now] != [*then] and not record.is_module:
        yield str(record.name)  # another order


def _is_equal(now: Any, then: Any) -> bool:
    """Whether a value was replaced by an equal one, or not at all. What is no plain value must be the same object."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, tuple):
        return len(now) == len(then) and all(_is_equal(one, other) for one, other in zip(now, then, strict=True))
    if isinstance(now, float):
        return now.hex() == then.hex()
    if isinstance(now, types.MethodType):
        return bool(now == then)
    return type(now) in PLAIN and bool(now == then)


def _is_written(state: TensorState) -> bool:
    if _version(state.tensor) != state._version:
        return True
    if state._alias is None or state._copy is None or not state._is_small:
        return False
    return not same_bytes(state._alias, state._copy)
