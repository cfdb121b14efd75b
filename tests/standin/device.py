"""The stand-in device (device.cpp): built once, loaded into this process, registered as an accelerator of torch.

After `load()` the device is `standin:0` and `standin:1`, and `torch.accelerator` finds it. That cannot be undone: only
processes of their own load it (tests/conftest.py, `LOWTIDE_STANDIN=1`). With `LOWTIDE_STANDIN=npu` it has torch_npu's
names: devices `npu:0` and `npu:1`, the module `torch.npu`.

`play` chooses the adversary: 'late' runs a copy when a wait forces it; 'early' as soon as it may, and queries say so;
'hidden' the same, and queries say no; a number draws; 'clock' lets the host see what is over at the compute stream's
time. `violations()` lists every access that no
record and wait put in order.

The library is built by `torch.utils.cpp_extension` in some ten seconds, and kept in a folder beside torch's own
extensions, named by its source and torch's version: test processes share one build, and wait for it in turn.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

NAME = "npu" if os.environ.get("LOWTIDE_STANDIN") == "npu" else "standin"
NUM_DEVICES = 2
_SOURCE = Path(__file__).with_name("device.cpp")
_Watcher = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_POLICIES = {"late": 0, "early": 1, "random": 2, "clock": 3, "hidden": 4}


def why_not() -> str | None:
    """What is missing to build it; None if nothing is."""
    if sys.platform != "linux":
        return "the stand-in device is built on Linux only"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler for the stand-in device"
    if shutil.which("ninja") is None:
        return "no ninja to build the stand-in device"
    if not (Path(torch.__file__).parent / "include" / "ATen" / "ATen.h").is_file():
        return "this torch came without the headers that the stand-in device is built with"
    return None


def load() -> None:
    """Build it if nobody has, and register it. Idempotent. Raises RuntimeError if it does not compile."""
    if hasattr(torch, NAME):
        return
    library = ctypes.CDLL(str(_built()))
    library.standin_play.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_double]
    library.standin_set_cap.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.standin_refuse.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.standin_set_speeds.argtypes = [ctypes.c_double] * 7
    library.standin_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
    library.standin_violation.argtypes = [ctypes.c_int64]
    library.standin_violation.restype = ctypes.c_char_p
    library.standin_watch.argtypes = [_Watcher]
    library.standin_life.argtypes = [ctypes.c_int64, *[ctypes.POINTER(ctypes.c_int64)] * 3]
    library.standin_life.restype = ctypes.c_char_p
    library.standin_moment.restype = ctypes.c_int64
    library.standin_now.restype = ctypes.c_double
    counts = ("violations", "allocations", "copies", "queued", "entered", "recorded_early")
    for name in ("take_peak", *(f"num_{count}" for count in counts)):
        getattr(library, f"standin_{name}").restype = ctypes.c_int64
    library.standin_start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _built() -> Path:
    from torch.utils import cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    digest = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()).hexdigest()[:12]
    folder = root / f"lowtide_standin_{digest}"
    library = folder / "standin.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # unlike cpp_extension's own, it goes with the process that holds it
        if not (folder / "done").exists():
            (folder / "lock").unlink(missing_ok=True)
            cpp_extension.load(
                "standin",
                [str(_SOURCE)],
                build_directory=str(folder),
                extra_cflags=["-O1", "-std=c++20"],
                is_python_module=False,
            )
            (folder / "done").touch()
    return library


def _module(library: ctypes.CDLL) -> types.ModuleType:
    """What torch and its users ask of `torch.standin` or `torch.npu`: the devices, and their random states."""

    def index(device: object = None) -> int:
        if isinstance(device, int):
            return device
        chosen = None if device is None else torch.device(device).index  # type: ignore[arg-type]
        return torch.accelerator.current_device_index() if chosen is None else chosen

    module = types.ModuleType(f"torch.{NAME}")
    module.library = library  # type: ignore[attr-defined]
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # else torch's checkpoint does not put random states back
        "device_count": lambda: NUM_DEVICES,
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "device": lambda device: torch.accelerator.device_index(index(device)),
        "synchronize": torch.accelerator.synchronize,
        "current_stream": torch.accelerator.current_stream,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: library.standin_seed(index(), seed),
        "manual_seed_all": lambda seed: [library.standin_seed(each, seed) for each in range(NUM_DEVICES)],
        "get_rng_state": lambda device=None: torch.ops.standin.get_rng_state(index(device)),
        "set_rng_state": lambda state, device=None: torch.ops.standin.set_rng_state(index(device), state),
        "memory_allocated": torch.accelerator.memory_allocated,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=NAME, total_memory=torch.accelerator.get_memory_info(index(device))[1]
        ),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _library() -> ctypes.CDLL:
    return torch.get_device_module(NAME).library


def play(policy: str | int, chance: float = 0.5) -> None:
    """Finish everything, then go on by this policy: 'late', 'early', 'hidden', 'clock', or a seed."""
    name, seed = ("random", policy) if isinstance(policy, int) else (policy, 0)
    _library().standin_play(_POLICIES[name], seed, chance)


def set_cap(nbytes: int | None, device: int = 0) -> None:
    """So many bytes may be allocated on this device; None = as many as the host has."""
    _library().standin_set_cap(device, -1 if nbytes is None else nbytes)


@contextmanager
def refusing(first: int, num: int = 1) -> Iterator[None]:
    """Inside, `num` allocations find no memory, after `first` that do."""
    _library().standin_refuse(first, first + num)
    try:
        yield
    finally:
        _library().standin_refuse(-1, -1)


def set_speeds(
    *,
    out: float = 20e9,
    into: float = 20e9,
    memory: float = 1e12,
    flops: float = 1e14,
    launch: float = 1e-6,
    latency: float = 0.0,
    share: float = 0.0,
) -> None:
    """Of the virtual clock: bytes a second of each direction and of the device's memory, operations a second, seconds
    that an operator takes at least and that each copy takes beyond its bytes, and seconds by which computation falls
    behind for each second that a copy runs beside it."""
    _library().standin_set_speeds(out, into, memory, flops, launch, latency, share)


def take_peak(number: int = 0) -> int:
    """The most bytes allocated at once since the last call. Unlike torch's counter nobody else can reset it."""
    return _library().standin_take_peak(number)


def now() -> float:
    """Seconds on the clock of the current stream."""
    return _library().standin_now()


def violations() -> list[str]:
    """The first of the accesses that were not ordered, in words."""
    library, found = _library(), []
    while (text := library.standin_violation(len(found))) is not None:
        found.append(text.decode())
    return found


def forget_violations() -> None:
    _library().standin_forget_violations()


def num_allocations() -> int:
    """Since the process began, of all devices."""
    return _library().standin_num_allocations()


def num_copies() -> int:
    """Between host and device, since the process began."""
    return _library().standin_num_copies()


def num_entered(number: int) -> int:
    """How often other threads than this one went over to device `number`, since the process began."""
    return _library().standin_num_entered(number)


def num_recorded_early() -> int:
    """How often an event was recorded again before the host had seen it complete, since the process began."""
    return _library().standin_num_recorded_early()


@dataclass(frozen=True, slots=True)
class Life:
    """A block that was given out, from when to when. A moment is one allocation or one free."""

    nbytes: int
    born: int
    dies: int
    """-1: it is still there."""
    what: str
    """The operator that wrote to it last; empty while it is there."""


@contextmanager
def watching(hear: Callable[[int], None]) -> Iterator[None]:
    """Inside, `hear` is called for each block that is given out, with its number, in the thread that asks for it."""
    called = _Watcher(hear)
    _library().standin_watch(called)
    try:
        yield
    finally:
        _library().standin_watch(_Watcher())


def lives(num: int) -> list[Life]:
    """The first `num` blocks that were given out while somebody watched, since the process began."""
    library, numbers = _library(), [ctypes.c_int64() for _ in range(3)]
    found = []
    for number in range(num):
        what = library.standin_life(number, *map(ctypes.byref, numbers))
        nbytes, born, dies = (each.value for each in numbers)
        found.append(Life(nbytes, born, dies, what.decode()))
    return found


def moment() -> int:
    """How many blocks have come and gone while somebody watched, since the process began."""
    return _library().standin_moment()


@contextmanager
def without_statistics() -> Iterator[None]:
    """Inside, the allocator has no statistics, and says so by an error, as CUDA's pluggable ones do."""
    _library().standin_set_statistics(0)
    try:
        yield
    finally:
        _library().standin_set_statistics(1)


def num_queued() -> int:
    """Copies that have not run yet."""
    return _library().standin_num_queued()
