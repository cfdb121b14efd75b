"""What a process has set that a run depends on: what it was in one run, and is again in another.

What: settings of torch that decide which kernel runs (attention backends, default dtype, precisions, determinism,
number of threads), and the modes (`TorchFunctionMode`, `TorchDispatchMode`) of the user that a forward ran under;
random generators; autocast. A `Modes` is taken when a region runs, and entered when it runs again: what has changed
since is set to what it was, and set back after it.
Why not an error: all of these can be put back, and a backward outside of `with sdpa_kernel(...)` is the ordinary case.

`RandomState` is torch's random state on the host and on devices; `surroundings` are that and autocast, for a module
that runs again.

Cost: about 5 us to take settings, and as much to compare; nothing is written while all is as it was. Not covered: other
generators; these are among what moves in a module's first run (runtime/recompute/watch.py); flags that torch does not
let one read (`set_flush_denormal`), the choice of BLAS and linear algebra libraries, environment
variables; how many threads a new thread of the user's computes with before anybody has asked torch for that number in
it: to look is to set it (call `torch.get_num_threads()` there first, also without lowtide, and both runs are alike).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide.tensors.private import (
    DeviceContext,
    bf16_reduction,
    dispatch_modes,
    fp16_accumulation,
    fp16_reduction,
    fp32_precision,
    function_modes,
    get_attention_order,
    get_function_state,
    num_dispatch_modes,
    num_function_modes,
    set_attention_order,
    set_function_state,
)

_backends: Any = torch.backends
_cuda: Any = torch.backends.cuda


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    behind = vars(type(owner)).get(name)  # the function behind the attribute takes a third of the time
    getter = behind.getter if isinstance(behind, _backends.ContextProp) else functools.partial(getattr, owner, name)
    return getter, functools.partial(setattr, owner, name)


def _precision(owner: Any, library: str, kind: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(fp32_precision, library, kind), functools.partial(setattr, owner, "fp32_precision")


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None  # set through `fp32_precision`, torch's newer way, which is read below


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_ATTENTION: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)
# How to read each setting, and how to write it. The general ones before those that they imply.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (get_function_state, set_function_state),
    (torch.get_num_threads, torch.set_num_threads),
    *_ATTENTION,
    (get_attention_order, set_attention_order),  # `sdpa_kernel(..., set_priority=True)`
    (_cuda.fp16_bf16_reduction_math_sdp_allowed, _cuda.allow_fp16_bf16_reduction_math_sdp),
    (_backends.mha.get_fastpath_enabled, _backends.mha.set_fastpath_enabled),
    (_determinism, _set_determinism),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    (_matmul_precision, _set_matmul_precision),
    _precision(_cuda.matmul, "cuda", "matmul"),
    _precision(_backends.cudnn.conv, "cuda", "conv"),
    _precision(_backends.cudnn.rnn, "cuda", "rnn"),
    _precision(_backends.mkldnn.matmul, "mkldnn", "matmul"),
    _precision(_backends.mkldnn.conv, "mkldnn", "conv"),
    _precision(_backends.mkldnn.rnn, "mkldnn", "rnn"),
    (fp16_reduction, functools.partial(setattr, _cuda.matmul, "allow_fp16_reduced_precision_reduction")),
    (bf16_reduction, functools.partial(setattr, _cuda.matmul, "allow_bf16_reduced_precision_reduction")),
    (fp16_accumulation, functools.partial(setattr, _cuda.matmul, "allow_fp16_accumulation")),
    _attribute(_backends.cudnn, "enabled"),
    _attribute(_backends.cudnn, "benchmark"),
    _attribute(_backends.cudnn, "deterministic"),
    _attribute(_backends.mkldnn, "enabled"),
    _attribute(_backends.mkldnn, "deterministic"),
)
_READ = tuple(read for read, _ in _SETTINGS)


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels scaled dot product attention may use. The switches are the process's, whatever the device."""
    return tuple([read() for read, _ in _ATTENTION])


class Modes:
    """Settings and modes as they are now."""

    def __init__(self) -> None:
        self.values = [read() for read in _READ]
        self._modes = _modes_of_the_user()

    def is_still(self, now: Modes) -> bool:
        """Whether all is `now` as it was when this was made, and no mode has to be entered."""
        return now.values == self.values and not self._modes

    def put_back(self, stack: contextlib.ExitStack, now: Modes) -> None:
        """Have all as it was when this was made, until `stack` is left."""
        stack.callback(now._set)
        self._set()
        for mode in self._modes:
            if not any(mode is other for other in now._modes):
                stack.enter_context(mode)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, all is as it was when this was made; afterwards it is as it was before."""
        with contextlib.ExitStack() as stack:
            self.put_back(stack, Modes())
            yield

    def set_if_moved(self) -> None:
        """Have all settings as they were when this was made."""
        if Modes().values != self.values:
            self._set()

    def _set(self) -> None:
        for (read, write), value in zip(_SETTINGS, self.values, strict=True):
            # Read just before: to write one may have changed others.
            if read() != value:
                write(value)


def _modes_of_the_user() -> list[Any]:
    """Modes that may change what operators give. Torch's own count, trace and log, but for that of `torch.device`."""
    if not (num_function_modes() or num_dispatch_modes()):
        return []
    return [mode for mode in (*function_modes(), *dispatch_modes()) if _may_change_results(type(mode))]


def _may_change_results(kind: type) -> bool:
    return kind is DeviceContext or kind.__module__.partition(".")[0] not in ("torch", "lowtide")


# -- random generators and autocast ------------------------------------------------------------------------------------


class RandomState:
    """Random generator states of the host and of the devices of some tensors, as they are now."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.cpu = torch.default_generator.get_state()
        on_device = [t for t in tensors if t.device.type not in ("cpu", "meta")]
        self.device_type = on_device[0].device.type if on_device else None
        self.devices, self.states = get_device_states(*on_device) if on_device else ([], [])

    def is_same(self, other: RandomState) -> bool:
        """Whether nobody has drawn between this one and another one of the same devices."""
        pairs = zip((self.cpu, *self.states), (other.cpu, *other.states), strict=True)
        return all(torch.equal(first, second) for first, second in pairs)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from these states inside, and leave the generators outside untouched."""
        # `fork_rng` takes some 10 us also where there is no device to ask.
        devices = torch.random.fork_rng(self.devices, device_type=self.device_type) if self.device_type else None
        now = torch.default_generator.get_state()
        with devices or contextlib.nullcontext():
            try:
                self.set()
                yield
            finally:
                torch.default_generator.set_state(now)

    def set(self) -> None:
        """Draw from these states from now on."""
        torch.default_generator.set_state(self.cpu)
        if self.device_type is not None:
            set_device_states(self.devices, self.states, device_type=self.device_type)


def autocasts() -> Iterator[tuple[str, torch.dtype]]:
    """The autocasts that are on: on which type of device, to what."""
    accelerator = torch.accelerator.current_accelerator()
    for device_type in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            yield device_type, torch.get_autocast_dtype(device_type)


def surroundings(tensors: list[torch.Tensor]) -> Callable[[], contextlib.AbstractContextManager]:
    """A factory of contexts with torch's random state and autocast as they are now, on the host and on the device of
    some tensors, and with gradients on."""
    random = RandomState(tensors)
    then = [_autocast_now("cpu")]
    if random.device_type is not None and torch.amp.is_autocast_available(random.device_type):
        then.append(_autocast_now(random.device_type))

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with torch.inference_mode(False), random.restored(), contextlib.ExitStack() as stack:
            for cast in then:
                if cast != _autocast_now(cast[0]):
                    stack.enter_context(torch.autocast(*cast))
            yield

    return again


def _autocast_now(device_type: str) -> tuple[str, torch.dtype, bool, bool]:
    """Of a type of device: its name, to which type it casts, whether it does, and whether it remembers casts."""
    return (
        device_type,
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_enabled(device_type),
        torch.is_autocast_cache_enabled(),
    )


def remembered_cast_bytes(module: nn.Module, device_type: str) -> int:
    """Bytes of the casts that autocast, as it is on this thread now, holds on to at most; 0 where it is off or has no
    cache. It remembers casts of float32 leaves that require a gradient."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_cache_enabled():
        return 0
    if not torch.is_autocast_enabled(device_type):
        return 0
    size = torch.get_autocast_dtype(device_type).itemsize
    return sum(p.numel() * size for p in module.parameters() if p.requires_grad and p.dtype is torch.float32)
