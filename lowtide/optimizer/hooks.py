"""Hooks on parameters and modules that do not keep what they belong to alive.

What: `OwnedHook` calls a function with its owner as long as that lives; after that it takes itself off.
Why: parameters and modules outlive optimizers. A hook that holds its owner would keep a dropped optimizer, its state
and the engine with its memory for as long as the model lives.
Cost: below a microsecond a call. Not covered: owners that nobody else holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class OwnedHook:
    """See the module's text. `call(owner, *arguments)` must not hold the owner."""

    def __init__(self, owner: object, call: Callable[..., None]) -> None:
        self._owner = weakref.ref(owner)
        self._call = call
        self._handle: Any = None

    def put_on(self, register: Callable[..., Any], **options: Any) -> Any:
        """What `register(hook)` returns, which takes the hook off."""
        self._handle = register(self, **options)
        return self._handle

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._call(owner, *arguments)
        elif self._handle is not None:
            self._handle.remove()

    def __deepcopy__(self, memo: dict) -> OwnedHook:
        """A copied module has the same hook, as with a function."""
        return self
