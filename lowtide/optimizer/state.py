"""What stands as `optimizer.state` while it is swapped, and what checkpoints make of it.

What: `SettledState` is the `defaultdict` that torch's optimizers use; each reading or writing first makes sure that
what was sent to main memory has arrived there. `ShownState` puts one in place of the optimizer's own mapping, takes
over a mapping that somebody else puts there, and has the hooks of `state_dict` and `load_state_dict`.
Why: a step ends before its last copies do, so that the next forward need not wait. Whoever reads the state in between
must not see bytes of the step before. Inside a step the optimizer reads what is on the device, and nothing waits.

Checkpoints are torch's own calls in torch's format: `state_dict()` gives the tensors that are in main memory or in the
file. Around `load_state_dict()` hooks take the large tensors out and give them buckets, one by one.
Why not torch's alone: it moves all of the state to the device at once, and casts it to the parameter's dtype: moments
in float32 of parameters in bfloat16 lose 16 bits for good. Here a tensor gets the dtype that the optimizer's own tensor
of this name has. Where there is none yet, torch.optim's optimizers would make it in the parameter's dtype, so that is
it; for others it stays as it was saved.

Cost: half a microsecond a call of the mapping; one copy of the state to load it. A copy of the mapping (`copy`,
`deepcopy`, `pickle`) is a plain `defaultdict`.
Not covered: a tensor or the inner mapping of one parameter, kept in a variable over a step: call `handle.flush()`. Load
hooks of the user's that are registered after lowtide's see placeholders in place of large tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from lowtide.optimizer.buckets import movable
from lowtide.optimizer.store import StateStore, entries_of


class ShownState:
    """See the module's text. `after_load` is called when a checkpoint was loaded. `refuse(call)` raises where `call`
    ('state_dict', 'load_state_dict') may not be now."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: StateStore,
        *,
        refuse: Callable[[str], None],
        after_load: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._refuse = refuse
        self._after_load = after_load
        self._is_stepping = False
        self._show(optimizer.state)
        self._hooks = (
            optimizer.register_state_dict_pre_hook(lambda _: self._get_ready("state_dict")),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._take_out(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._put_in(), prepend=True),
        )

    def _show(self, content: Any) -> None:
        """What was put as `optimizer.state` is the user's own from now on, and stands there in our mapping."""
        self.original = content
        self._shown = SettledState(self.settle, getattr(content, "default_factory", None), content)
        self._optimizer.state = self._shown

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Within, `optimizer.state` is the optimizer's own to read, and nothing waits for copies."""
        before, self._is_stepping = self._is_stepping, True
        try:
            yield
        finally:
            self._is_stepping = before

    def settle(self) -> None:
        """Somebody else than the optimizer looks into the state: main memory has what was sent. He may write, also
        through `.data`, which nothing shows, so what is on its way to the device is given up."""
        if not self._is_stepping:
            self._store.transfers.give_up()
            self._store.transfers.settle()

    def take_over(self) -> None:
        """Where somebody has put another mapping in place of `optimizer.state`: what is on its way belongs to the old
        one; from then on the new one counts."""
        optimizer, put = self._optimizer, self._optimizer.state
        if put is self._shown or self._is_stepping:
            return
        optimizer.state = self._shown
        try:
            self.settle()
        finally:
            original = self.original
            self._show(put)
            if isinstance(put, SettledState):
                self.original = original

    def refresh(self) -> None:
        """Take in what was put in place of the state, or of a part of it."""
        self.take_over()
        with self.stepping():
            self._store.refresh()

    def take_off(self) -> None:
        """The user's own mapping stands as `optimizer.state` again, with what is there now."""
        for hook in self._hooks:
            hook.remove()
        if isinstance(self._optimizer.state, SettledState):
            content = dict(self._optimizer.state.items())
            self.original.clear()
            self.original.update(content)
            self._optimizer.state = self.original

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _get_ready(self, call: str) -> None:
        self._refuse(call)
        self.take_over()
        self.settle()

    def _take_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._get_ready("load_state_dict")
        parameter_of = dict(self._numbered(state_dict))
        state = {
            number: self._held(parameter_of[number], entries) if number in parameter_of else entries
            for number, entries in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def _numbered(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
        """The parameters by their numbers in a checkpoint. Where the two do not fit, torch says so after us."""
        for saved, group in zip(state_dict["param_groups"], self._optimizer.param_groups, strict=False):
            yield from zip(saved["params"], group["params"], strict=False)

    def _held(self, parameter: torch.Tensor, entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        # Torch casts and moves tensors; an object that it does not know it passes on as it is.
        return {
            key: SimpleNamespace(tensor=value, dtype=self._dtype_of(parameter, key, value))
            if key != "step" and movable(value, None, self._store.min_bytes)
            else value
            for key, value in entries.items()
        }

    def _dtype_of(self, parameter: torch.Tensor, key: Any, value: torch.Tensor) -> torch.dtype:
        own = entries_of(self._optimizer.state, parameter).get(key)
        if isinstance(own, torch.Tensor):
            return own.dtype
        is_torchs = type(self._optimizer).__module__.startswith("torch.optim")
        return parameter.dtype if is_torchs and parameter.is_floating_point() else value.dtype

    def _put_in(self) -> None:
        """Replace the state that torch made by one whose large tensors have buckets."""
        optimizer, store = self._optimizer, self._store
        for parameter, entries in optimizer.state.items():
            if isinstance(entries, dict):
                held = {key: value for key, value in entries.items() if isinstance(value, SimpleNamespace)}
                device = store.device if parameter in store.residents else None
                entries.update({key: value.tensor.detach().to(device, value.dtype) for key, value in held.items()})
        self._show(optimizer.state)
        store.start_anew()
        self._after_load()


def _settled(name: str) -> Any:
    """A method of `defaultdict` that waits for copies first."""
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(state: SettledState, *args: Any, **kwargs: Any) -> Any:
        state._settle()
        return method(state, *args, **kwargs)

    return call


_OBJECTS = ("__getitem__", "__setitem__", "__delitem__", "__missing__", "__contains__", "__len__", "__iter__")
_NAMES = ("get", "keys", "items", "values", "setdefault", "update", "pop", "popitem", "clear")


def _settling(kind: Any) -> Any:
    """The class, with these methods of `defaultdict` waiting for copies first."""
    for name in (*_OBJECTS, *_NAMES):
        setattr(kind, name, _settled(name))
    return kind


@_settling
class SettledState(defaultdict):
    """See the module's text. `settle` returns once main memory has what was sent."""

    def __init__(self, settle: Callable[[], None], factory: Callable[[], Any] | None, content: Mapping) -> None:
        super().__init__(factory, content)
        self._settle = settle

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def copy(self) -> Any:
        return defaultdict(self.default_factory, self.items())

    __copy__ = copy

    def __reduce__(self) -> tuple:
        return defaultdict, (self.default_factory, dict(self.items()))
