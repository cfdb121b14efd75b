"""Random generators and autocast, as they are now, for a second run that draws as the first one did.

What: `HostRandom` is Python's and numpy's state, `RandomState` torch's on the host and on devices, `autocast_state` the
autocast around a module. Torch's checkpoint restores torch's own for the regions that it runs.
Cost: 2 us a run while nobody draws from Python's or numpy's generator: their bytes are compared where they lie, and the
states are asked for only if these have moved (30 and 40 us). Not covered: generators that only one module holds; these
are among what moves in a module's first run (runtime/recompute/watch.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.tensors.modes import Modes
from lowtide.tensors.private import current_graph_task_id

_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]
_NUM_WORDS = 624
_NUM_SHOWN = 16
"""Words that are compared, beside the position: a draw moves that, or makes all words anew."""


def _shows_its_bytes() -> bool:
    """Whether Python's generator lies in memory as CPython has it: behind the head of its object a position, and 624
    words."""
    if sys.implementation.name != "cpython":
        return False
    words = (ctypes.c_uint32 * (1 + _NUM_WORDS)).from_address(id(_PYTHONS) + object.__basicsize__)
    return (*words[1:], words[0]) == random.getstate()[1]


_IS_VISIBLE = _shows_its_bytes()


class HostRandom:
    """Python's and numpy's random state, as they are now. `last`: what they were a moment ago, if that is known;
    `asks_numpy`: somebody may have set numpy's since.

    Half of a pair of normal numbers, which both generators may hold, does not show in their bytes: Python's is an
    attribute, and numpy is asked again while it holds one.
    """

    __slots__ = ("_bytes", "_numpy", "_python", "_python_bytes")
    _numpy: Any
    _python: Any

    def __init__(self, last: HostRandom | None, *, asks_numpy: bool = False) -> None:
        self._python_bytes = _bytes_of_python()
        is_last = last is not None and self._python_bytes is not None and last._python_bytes == self._python_bytes
        self._python = last._python if is_last else random.getstate()  # type: ignore[union-attr]
        self._bytes, self._numpy = b"", None
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._bytes = _bytes_of_numpy(numpy)
            is_last = last is not None and last._is_still(self._bytes) and not asks_numpy
            self._numpy = last._numpy if is_last else numpy.get_state(legacy=False)  # type: ignore[union-attr]

    def set_from(self, now: HostRandom) -> None:
        """Draws are from here on those that followed, while the state is `now`."""
        is_same = self._python_bytes is not None and now._python_bytes == self._python_bytes
        if now._python is not self._python and not is_same:
            random.setstate(self._python)
        if self._numpy is None or now._numpy is self._numpy:
            return
        if now._numpy is None or now._numpy["has_gauss"] or not self._is_still(now._bytes):
            sys.modules["numpy.random"].set_state(self._numpy)

    def _is_still(self, state: bytes) -> bool:
        """Whether numpy, which was in this state a moment ago and has these bytes now, has surely drawn nothing."""
        return bool(state) and state == self._bytes and not self._numpy["has_gauss"]


class Draws:
    """Python's and numpy's random state, and torch's settings, asked for again and again in one pass."""

    __slots__ = ("_is_new", "_last", "_settings", "_task")

    def __init__(self) -> None:
        self._last: HostRandom | None = None
        self._settings: Modes | None = None
        self._is_new = True
        self._task = -1

    def begin(self) -> None:
        """A forward begins: somebody may have set the state since."""
        self._is_new = True

    def now(self) -> HostRandom:
        task = current_graph_task_id()
        asks = self._is_new or task != self._task
        if asks:
            self._settings = None
        self._is_new, self._task = False, task
        self._last = state = HostRandom(self._last, asks_numpy=asks)
        return state

    def settings(self) -> Modes:
        """Torch's settings as `now` found this pass; to be asked after it."""
        if self._settings is None:
            self._settings = Modes()
        return self._settings


def _bytes_of_python() -> tuple[bytes, float | None] | None:
    """Position and first words of Python's generator, and its half of a pair; None where they cannot be read."""
    if not _IS_VISIBLE:
        return None
    return ctypes.string_at(id(_PYTHONS) + object.__basicsize__, 4 * (1 + _NUM_SHOWN)), _PYTHONS.gauss_next


def _bytes_of_numpy(numpy: Any) -> bytes:
    """The same of numpy's; empty where they cannot be read."""
    address = _address_of(numpy.get_bit_generator())
    # The position is behind the words.
    shown = address + 4 * (_NUM_WORDS - _NUM_SHOWN)
    return ctypes.string_at(shown, 4 * (_NUM_SHOWN + 1)) if address else b""


@functools.lru_cache(1)
def _address_of(generator: Any) -> int:
    return int(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else 0


class RandomState:
    """Random generator states of the host and of the devices of some tensors, as they are now."""

    __slots__ = ("cpu", "device_type", "devices", "states")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.cpu = torch.get_rng_state()
        on_device = [t for t in tensors if t.device.type not in ("cpu", "meta")]
        self.device_type = on_device[0].device.type if on_device else None
        self.devices, self.states = get_device_states(*on_device) if on_device else ([], [])

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from these states inside, and leave the generators outside untouched."""
        with torch.random.fork_rng(devices=self.devices, device_type=self.device_type or "cuda"):
            self.set()
            yield

    def set(self) -> None:
        """Draw from these states from now on."""
        torch.set_rng_state(self.cpu)
        if self.device_type is not None:
            set_device_states(self.devices, self.states, device_type=self.device_type)


def autocast_state(device_type: str) -> Callable[[], contextlib.AbstractContextManager]:
    """A factory of contexts that re-enter autocast as it is now on `device_type`."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext
    is_enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    is_caching = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching)
