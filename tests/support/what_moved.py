"""What is not as a snapshot remembers it, by name: the question that tests ask of a step that must leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowtide.tensors.far_state import Bytes, CachedCalls, NewNames, ObjectArray, _bytes_of
from lowtide.tensors.private import disable_current_modes
from lowtide.tensors.remembered import TRANSPARENT, Array, Empty, Name, State, TensorState, _version
from lowtide.tensors.snapshot import Snapshot
from lowtide.tensors.view import same_bytes


def changed(snapshot: Snapshot) -> list[str]:
    """`layers.0.count`, `layers.1.cache['x']`, `numpy's random state`."""
    with disable_current_modes(), torch.no_grad():
        found = [name for record in (*snapshot._records, *snapshot._tensors) for name in _changed(record)]
    return list(dict.fromkeys(found))


def _changed(record: Any) -> Iterator[str]:
    if isinstance(record, Empty):
        yield from _filled(record)
    elif isinstance(record, State):
        if not _is_same_state(record._get(), record.then):
            yield str(record.name)
    elif isinstance(record, Array):
        if record.array.shape != record.then.shape or record.array.tobytes() != record.then.tobytes():
            yield str(record.name)
    elif isinstance(record, NewNames):
        yield from record._found()
    elif isinstance(record, Bytes):
        yield from [str(record.name)] if _bytes_of(record.value) != record.then else []
    elif isinstance(record, ObjectArray):
        yield from [str(record.name)] if (record.array != record.then).any() else []
    elif isinstance(record, CachedCalls):
        return
    elif isinstance(record, TensorState):
        if record._is_moved() or _is_written(record) or record.tensor.requires_grad != record._flags:
            yield str(record.name)
    else:
        yield from record.changed()


def _filled(record: Empty) -> Iterator[str]:
    for value, name, key in record.found:
        if value:
            # As it is named where there was something in it before.
            where = Name(name, key)
            keys = value if isinstance(value, dict) else ()
            yield from (str(Name(where, item, key not in TRANSPARENT)) for item in keys)
            if not keys:
                yield str(where)


def _is_written(state: TensorState) -> bool:
    if _version(state.tensor) != state._version:
        return True
    if state._alias is None or state._copy is None or not state._is_small:
        return False
    return not same_bytes(state._alias, state._copy)


def _is_same_state(now: Any, then: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return torch.equal(now, then)
    if isinstance(now, dict):
        return all(_is_same_state(now[key], then[key]) for key in then)
    if isinstance(now, tuple) and len(now) == len(then):
        return all(_is_same_state(one, other) for one, other in zip(now, then, strict=True))
    if hasattr(now, "tobytes"):
        return bool(now.tobytes() == then.tobytes())
    return bool(now == then)
