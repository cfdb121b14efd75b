"""The few things an accelerator must be able to do, as one object.

What: streams, events, copies, buffers, pinned slabs and the allocator's peak, through `torch.Stream`, `torch.Event`,
`torch.accelerator` and `torch.get_device_module`: the same code for CUDA, NPU and XPU.
Why an object: `AcceleratorEngine` decides *order* (what waits for what). With the device behind a protocol the same
decisions run in tests on simulated streams that execute late or early at will, on a machine without a device.

Facts the code rests on:
- `with stream:` keeps what to restore on the stream object itself. Two threads inside the same stream would restore
  each other's streams, and a worker shares each lane's stream with its callers; so `TorchDevice.copy` keeps it locally.
- `torch.Event` has timing off by default, and `elapsed_time` needs both events made with timing on.

NUMA: slabs are pinned by a short-lived thread bound to the CPUs of the device's NUMA node, where /sys and the device's
PCI address tell it (CUDA does; where a device module has no PCI address, the pages fall where the caller runs).

Not covered: devices without streams (that is the host engine's work).

How long the compute stream waited for copies, as the device saw it.

What: a pair of timing events around each wait of the compute stream, read later from a ring.
Why: the host cannot see these waits (it has long gone on), and they are what a plan has to answer for.
Cost: per timed wait two event records, some microseconds on the device as well, which are counted as stall. Nothing
ever synchronises: pairs are read once the device has passed them, a few with each new wait.

Not covered: waits that found their event complete (the engine skips them, they cost nothing), and time for which the
host was blocked (the engine's `wait` returns that).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.engines.tiers.host_limit import cpus_near, stay_on
from lowtide.errors import ConfigError

STALL_RING = 1024
"""Timed waits that the device has not passed yet. Beyond it waits go untimed: stalls are then under-reported."""


class StallMeter:
    """Sums the device time that the compute stream spent in waits."""

    def __init__(self, ops: TorchDevice) -> None:
        self._ops = ops
        self._pairs: deque[tuple[torch.Event, torch.Event]] = deque()
        self._pool: deque[tuple[torch.Event, torch.Event]] = deque()
        self._seconds = 0.0

    def wait(self, stream: torch.Stream, event: torch.Event) -> None:
        """Make `stream` wait for `event`, and time it."""
        self._read(2)  # more than comes in, so that the ring empties as the device catches up
        if len(self._pairs) >= STALL_RING:
            stream.wait_event(event)
            return
        new = functools.partial(self._ops.new_event, timing=True)
        before, after = self._pool.pop() if self._pool else (new(), new())
        before.record(stream)
        stream.wait_event(event)
        after.record(stream)
        self._pairs.append((before, after))

    def seconds(self) -> float:
        """Stalls known so far; waits still in the device's future are not in it."""
        self._read(len(self._pairs))
        return self._seconds

    def _read(self, at_most: int) -> None:
        while at_most > 0 and self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            self._seconds += before.elapsed_time(after) / 1e3
            self._pool.append((before, after))
            at_most -= 1


CopyPairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(target, source) pairs of uint8 tensors of equal length."""


class TorchDevice:
    """The device as the engine sees it: whatever accelerator this torch was built for. Tests have simulated ones."""

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type != device.type:
            found = "none" if accelerator is None else f"'{accelerator.type}'"
            raise ConfigError(
                f"device '{device}' cannot be swapped by the accelerator engine: the accelerator of this torch is "
                f"{found}. Move the model to that device, or use the host engine."
            )
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.local_cpus = cpus_near(self.device)
        """The CPUs near it; None where the system does not say."""

    def current_stream(self) -> torch.Stream:
        """The calling thread's current stream: the compute lane."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        """A stream that no computation uses."""
        return torch.Stream(self.device)

    def new_event(self, *, timing: bool = False) -> torch.Event:
        """An event that has not been recorded."""
        return torch.Event(self.device, enable_timing=timing)

    def copy(self, stream: Any, pairs: CopyPairs) -> None:
        """Enqueue copies on `stream`, from any thread, without blocking it. Host memory in them is pinned."""
        # Setting a stream also makes its device the current one. The guard goes back without opening a context on the
        # caller's device, where there was none; `set_device_index` would.
        with torch.accelerator.device_index(self.device.index):
            previous = torch.accelerator.current_stream(self.device)
            torch.accelerator.set_stream(stream)
            try:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            finally:
                torch.accelerator.set_stream(previous)

    def new_storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Device memory from the allocator's pool of the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def new_slab(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, near the device. Raises RuntimeError where the machine has no more."""
        if self.local_cpus is None:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        return _in_thread_on(self.local_cpus, lambda: self._new_slab_here(nbytes))

    def _new_slab_here(self, nbytes: int) -> torch.Tensor:
        self.enter_thread()
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def in_place(self, pinned: torch.Tensor) -> torch.UntypedStorage:
        """The memory of `pinned` (bytes) as memory of the device, kept alive by it. Raises ConfigError where the device
        has no call for it."""
        if self.device.type != "cuda":
            raise ConfigError(
                f"lowtide.swap_optimizer: tier 'mapped': kernels of '{self.device.type}' cannot be shown main memory "
                "that the host sees too; use tier 'host'"
            )
        # The protocol with which arrays of CUDA are handed over: pinned memory has one address for host and device.
        array = {"shape": (pinned.numel(),), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 2}
        shown = types.SimpleNamespace(__cuda_array_interface__=array, owner=pinned)
        return torch.as_tensor(shown, device=self.device).untyped_storage()

    def enter_thread(self) -> None:
        """To be called once by each thread of ours that will copy."""
        # A new thread starts on device 0; working there would open a context on a device that may be another rank's.
        torch.accelerator.set_device_index(self.device.index)

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph; False on devices that have none."""
        asked = getattr(torch.get_device_module(self.device), "is_current_stream_capturing", None)
        return asked is not None and asked()

    def allocated_bytes(self, which: str) -> int | None:
        """What the allocator has given out: 'current', or 'peak' since `reset_peak`. None where it does not count."""
        return allocated_bytes(self._memory_modules(), self.device, which)

    def reset_peak(self) -> None:
        """Start a new peak."""
        reset_peak(self._memory_modules(), self.device)

    def _memory_modules(self) -> tuple[Any, ...]:
        # torch_npu up to 2.12 has no `DeviceAllocator`; its own module has had these functions all along.
        return torch.get_device_module(self.device), torch.accelerator


def allocated_bytes(modules: Sequence[Any], device: torch.device, which: str) -> int | None:
    """See `TorchDevice.allocated_bytes`: from the first of these modules that knows.

    The nested statistics are what the allocator has; the flat ones are sorted copies, dear if asked for at each layer.
    """
    for module in modules:
        with contextlib.suppress(AttributeError, RuntimeError, KeyError):
            return int(module.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"][which])
        with contextlib.suppress(AttributeError, RuntimeError, KeyError):
            return int(module.memory_stats(device)[f"allocated_bytes.all.{which}"])
    return None


def reset_peak(modules: Sequence[Any], device: torch.device) -> None:
    """Nothing where the allocator has no statistics (`CUDAPluggableAllocator`): then it has no peak either."""
    for module in modules:
        with contextlib.suppress(AttributeError, RuntimeError):
            module.reset_peak_memory_stats(device)
            return


def _in_thread_on(cpus: frozenset[int], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run `make` in a thread bound to `cpus`: first touch puts the pages on their node; the caller's binding stays."""
    made: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            stay_on(cpus)
            made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="lowtide-pin")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return made[0]
