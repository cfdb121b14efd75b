"""`optimizer.state` while it is swapped: a mapping like any other, that waits for copies before it shows anything.

What: `SettledState` is the `defaultdict` that torch's optimizers use; each reading or writing first makes sure that
updates which were put off are done, and that what was sent to main memory has arrived there.
Why: a step ends before its last copies do, so that the next forward need not wait. Whoever reads the state in between
must not see bytes of the step before. Inside a step the optimizer reads what is on the device, and nothing waits.
Cost: half a microsecond a call. A copy of it (`copy`, `deepcopy`, `pickle`) is a plain `defaultdict`.

Not covered: a tensor or the inner mapping of one parameter, kept in a variable over a step: call `handle.flush()`.

Checkpoints of a swapped optimizer: torch's own calls, in torch's format, without all of the state on the device.

What: `state_dict()` gives the tensors that are in main memory or in the file, as `optimizer.state` shows them.
`load_state_dict()` is torch's; hooks of ours take the large tensors out before it and give them homes after it, bucket
by bucket. What plain torch saved can be loaded here, and the other way round.
Why not torch's alone: it moves all of the state to the device at once, and casts it to the parameter's dtype: moments
in float32 of parameters in bfloat16 lose 16 bits for good. Here a tensor gets the dtype that the optimizer's own tensor
of this name has. Where there is none yet, torch.optim's optimizers would make it in the parameter's dtype, so that is
it; for others it stays as it was saved.

As with a plain optimizer, what `state_dict()` gives is not a copy: the next step changes it.
Cost: one copy of the state. Not covered: load hooks of the user's that are registered after lowtide's see placeholders
in place of large tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lowtide.optimizer.buckets import movable
from lowtide.optimizer.store import StateStore, entries_of


class _HeldState:
    """A tensor that torch's `load_state_dict` passes on as it is."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor = tensor
        self.dtype = dtype


class Checkpoints:
    """The hooks of one optimizer. `before_save` and `before_load` may raise; `after_load` gets the mapping that torch
    has made, and no earlier step matters from then on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: StateStore,
        *,
        before_save: Callable[[], None],
        before_load: Callable[[], None],
        after_load: Callable[[Any], None],
        settle: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._store = store
        self._before_save = before_save
        self._before_load = before_load
        self._after_load = after_load
        self._settle = settle
        self._hooks = (
            optimizer.register_state_dict_pre_hook(lambda _: self._before_save()),
            optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: self._take_out(state_dict)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._put_in(), prepend=True),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _take_out(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self._before_load()
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
        return {key: self._held_or_not(parameter, key, value) for key, value in entries.items()}

    def _held_or_not(self, parameter: torch.Tensor, key: Any, value: Any) -> Any:
        if key == "step" or not isinstance(value, torch.Tensor):
            return value
        if not movable(value, None, self._store.min_bytes):
            return value
        return _HeldState(value, self._dtype_of(parameter, key, value))

    def _dtype_of(self, parameter: torch.Tensor, key: Any, value: torch.Tensor) -> torch.dtype:
        own = entries_of(self._optimizer.state, parameter).get(key)
        if isinstance(own, torch.Tensor):
            return own.dtype
        is_torchs = type(self._optimizer).__module__.startswith("torch.optim")
        return parameter.dtype if is_torchs and parameter.is_floating_point() else value.dtype

    def _put_in(self) -> None:
        """Replace the state that torch made by one whose large tensors have homes."""
        optimizer, store = self._optimizer, self._store
        for parameter, entries in optimizer.state.items():
            if isinstance(entries, dict):
                held = {key: value for key, value in entries.items() if isinstance(value, _HeldState)}
                device = store.device if parameter in store.residents else None
                entries.update({key: value.tensor.detach().to(device, value.dtype) for key, value in held.items()})
        made = optimizer.state
        optimizer.state = SettledState(self._settle, made.default_factory, made)
        store.start_anew()
        self._after_load(made)


class SettledState(defaultdict):
    """See the module's text. `settle` returns once main memory has what was sent."""

    def __init__(self, settle: Callable[[], None], factory: Callable[[], Any] | None, content: Mapping) -> None:
        super().__init__(factory, content)
        self._settle = settle

    def __getitem__(self, key: Any) -> Any:
        self._settle()
        return super().__getitem__(key)

    def __missing__(self, key: Any) -> Any:
        self._settle()
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._settle()
        return super().__contains__(key)

    def __len__(self) -> int:
        self._settle()
        return super().__len__()

    def __iter__(self) -> Iterator:
        self._settle()
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._settle()
        return super().get(key, default)

    def keys(self) -> Any:
        self._settle()
        return super().keys()

    def items(self) -> Any:
        self._settle()
        return super().items()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._settle()
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._settle()
        super().__delitem__(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._settle()
        return super().setdefault(key, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super().update(*args, **kwargs)

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def pop(self, *args: Any) -> Any:
        self._settle()
        return super().pop(*args)

    def popitem(self) -> tuple:
        self._settle()
        return super().popitem()

    def clear(self) -> None:
        self._settle()
        super().clear()

    def copy(self) -> Any:
        return defaultdict(self.default_factory, self.items())

    __copy__ = copy

    def __reduce__(self) -> tuple:
        return defaultdict, (self.default_factory, dict(self.items()))
