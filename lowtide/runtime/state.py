"""What a second run of a module must find as the first run found it: buffers, parameters, random and autocast state.

Each class takes its picture when it is made, before the first run, and offers a context manager in which the picture
holds again; outside of it nothing has changed.

Cost: a clone of each buffer of the module (dropped again if the run did not change it), one walk over its submodules.
Not covered: Python attributes that a forward changes, and state outside of the module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.catalog.sharded import is_sharded
from lowtide.catalog.trace import is_plain

_HELD_BUFFER_BYTES = 2**20


class BufferState:
    """A module's buffers as they were before a run, for the second run; only those that the run changed are held.

    A change is seen by identity, version and value. On an accelerator comparing values would wait for the device, so
    small buffers are simply held, and large ones trusted to their version.
    """

    __slots__ = ("_before",)

    def __init__(self, module: nn.Module) -> None:
        with _disable_current_modes():
            self._before = [
                (owner, name, buffer, buffer._version, buffer.detach().clone())
                for owner in module.modules()
                for name, buffer in owner._buffers.items()
                if buffer is not None and buffer.numel()
            ]

    def settle(self) -> None:
        """The first run is over: let go of the copies that are not needed."""
        with _disable_current_modes():
            self._before = [entry for entry in self._before if _has_changed(*entry)]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the buffers are what the first run found; what is written to them is forgotten."""
        current = [(owner, name, owner._buffers[name]) for owner, name, *_ in self._before]
        try:
            for owner, name, _, _, before in self._before:
                owner._buffers[name] = before.clone()
            yield
        finally:
            for owner, name, buffer in current:
                owner._buffers[name] = buffer


def _has_changed(owner: nn.Module, name: str, buffer: torch.Tensor, version: int, before: torch.Tensor) -> bool:
    if owner._buffers.get(name) is not buffer or buffer._version != version:
        return True
    if buffer.device.type == "cpu":
        return not torch.equal(buffer, before)
    return buffer.untyped_storage().nbytes() <= _HELD_BUFFER_BYTES


class ParameterState:
    """The tensors that played a module's parameters in a run: `functional_call` lends others for one call only."""

    __slots__ = ("_then",)

    def __init__(self, module: nn.Module) -> None:
        self._then = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the parameters are the tensors of the first run."""
        lent = [entry for entry in self._then if entry[0]._parameters.get(entry[1]) is not entry[2]]
        # A sharded parameter is gathered, and given back, by its owner, not by us.
        lent = [entry for entry in lent if not is_plain(entry[2]) or entry[2].untyped_storage().nbytes()]
        lent = [(owner, name, then) for owner, name, then in lent if not _is_gathered_now(owner, name, then)]
        current = [(owner, name, owner._parameters[name]) for owner, name, _ in lent]
        for owner, name, parameter in lent:
            owner._parameters[name] = parameter
        try:
            yield
        finally:
            for owner, name, now in current:
                owner._parameters[name] = now


def _is_gathered_now(owner: nn.Module, name: str, then: torch.Tensor) -> bool:
    now = owner._parameters[name]
    return is_sharded(then) and now is not None and not is_sharded(now)


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
            torch.set_rng_state(self.cpu)
            if self.device_type is not None:
                set_device_states(self.devices, self.states, device_type=self.device_type)
            yield


def autocast_state(device_type: str) -> Callable[[], contextlib.AbstractContextManager]:
    """A factory of contexts that re-enter autocast as it is now on `device_type`."""
    if not torch.amp.is_autocast_available(device_type):
        return contextlib.nullcontext
    is_enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    is_caching = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching)
