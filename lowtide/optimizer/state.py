"""`optimizer.state` while it is swapped: a mapping like any other, that waits for copies before it shows anything.

What: `SettledState` is the `defaultdict` that torch's optimizers use; each reading or writing first makes sure that
updates which were put off are done, and that what was sent to main memory has arrived there.
Why: a step ends before its last copies do, so that the next forward need not wait. Whoever reads the state in between
must not see bytes of the step before. Inside a step the optimizer reads what is on the device, and nothing waits.
Cost: half a microsecond a call. A copy of it (`copy`, `deepcopy`, `pickle`) is a plain `defaultdict`.

Not covered: a tensor or the inner mapping of one parameter, kept in a variable over a step: call `handle.flush()`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any


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
