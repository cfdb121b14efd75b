"""A count of live bytes that shares nothing with lowtide's own: the second opinion that budgets are held against.

What: a dispatch mode that adds up every storage that an operator reads or gives out, from then until its memory is
freed (seen by a finalizer on the storage), and every buffer that an engine makes for a fetch. What was there before
(parameters, the batch, optimizer state, in any nest of containers) is handed over once. `restart` begins a new peak.

Cost: some microseconds an operator. Not covered: memory inside an operator that is freed before it returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class IndependentCount(TorchDispatchMode):
    """`with IndependentCount(state) as count: step()`, then `count.peak_bytes`."""

    # Not in its `__dict__`: an observed step puts back what a user's mode holds there, and what the step has made is
    # freed, and subtracted here, only after that.
    __slots__ = ("_known", "now_bytes", "peak_bytes")

    def __init__(self, state: Iterable[Any] = (), *, engine: Any = None) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._known: set[int] = set()
        self._add_all(list(state))
        if engine is not None:
            make = engine.new_buffer

            def new_buffer(*args: Any) -> torch.UntypedStorage:
                buffer = make(*args)
                self.add(buffer)
                return buffer

            engine.new_buffer = new_buffer

    def add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if nbytes == 0 or key in self._known:
            return
        self._known.add(key)
        self.now_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._gone, key, nbytes)

    def _add_all(self, tree: Any) -> None:
        for leaf in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(leaf, dict | list | tuple):
                self._add_all(leaf)
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.layout is torch.strided:
                self.add(leaf.untyped_storage())
            elif leaf.layout is torch.sparse_coo:
                self._add_all((leaf._indices(), leaf._values()))

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now_bytes -= nbytes

    def restart(self) -> None:
        self.peak_bytes = self.now_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._add_all((out, args, kwargs))
        return out


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: Iterable[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """What is on the device before a step: parameters, buffers, gradients, optimizer state and the batch."""
    found = [*model.parameters(), *model.buffers(), *batch]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    states = optimizer.state.values() if optimizer is not None else ()
    return [*found, *(value for state in states for value in state.values() if isinstance(value, torch.Tensor))]
