"""What is not as a snapshot remembers it, by name: the question that tests ask of a step that must leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowtide.tensors.private import disable_current_modes
from lowtide.tensors.remembered import TensorState, _version
from lowtide.tensors.snapshot import Snapshot
from lowtide.tensors.view import same_bytes


def changed(snapshot: Snapshot) -> list[str]:
    """`layers.0.count`, `layers.1.cache['x']`, `numpy's random state`."""
    with disable_current_modes(), torch.no_grad():
        found = [name for record in (*snapshot._records, *snapshot._tensors) for name in _changed(record)]
    return list(dict.fromkeys(found))


def _changed(record: Any) -> Iterator[str]:
    if isinstance(record, TensorState):
        if record._is_moved() or _is_written(record) or record.tensor.requires_grad != record._flags:
            yield str(record.name)
    else:
        yield from record.changed()


def _is_written(state: TensorState) -> bool:
    if _version(state.tensor) != state._version:
        return True
    if state._alias is None or state._copy is None or not state._is_small:
        return False
    return not same_bytes(state._alias, state._copy)
