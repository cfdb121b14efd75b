"""Which codec a saved storage fits, and what that codec costs: learned in the observed step.

What: `measured_codec` tries the kinds of a dtype on the bytes that backward is about to read, which are final by then,
and takes the smallest that holds them; its price is the time of encoding and decoding. On an accelerator only kinds
that fit unseen are tried, and integers that are below a limit by what made them. `traced_codec` says the same of a
storage that has no bytes, at a roofline's price.

Cost: in the observed step only. What fits is encoded four times and decoded three times; of the rest 4,096 elements are
read for each kind. Not covered: whether the bytes fit in a later step; that is looked at in each
(runtime/recompute/recipe_graph.py). No mode sees the operators that run here: they are none of the step's.
"""

from __future__ import annotations

import time

import torch

from lowtide.core.recipe import Codec
from lowtide.engines.device_ops import TorchDevice
from lowtide.profiling.op_timer import seconds_between, timing_mark
from lowtide.tensors.codecs import (
    always_fits,
    encode,
    encoded_bytes,
    kinds_below,
    kinds_of,
    num_operators,
    work_bytes,
)
from lowtide.tensors.private import DisableTorchDispatch
from lowtide.timeline.hardware import Hardware

# Bytes that encoding and decoding read and write, for each element of a mask.
_TRAFFIC = 9
# Operators that narrow integers, and make them wide again.
_NARROWING = 8
_TRIALS = 3
# On the host, in a step, bytes have left the cache: 34 masks of a T5, 45 MB, took 17 ms there, and 8 ms in trials.
_OUT_OF_CACHE = 2.0
# Less is not worth the operators.
_LEAST_BYTES = 1024


def measured_codec(storage: torch.UntypedStorage, dtype: torch.dtype, limit: int | None = None) -> Codec | None:
    """The smallest form that holds these bytes, and what it took; None where none is smaller. `limit`: elements are
    below it, and not below 0, whatever the step (recipes/graph.py)."""
    kinds = kinds_of(dtype) if storage.device.type == "cpu" else _kinds_by_dtype(dtype, limit)
    if storage.nbytes() < _LEAST_BYTES:
        return None
    with DisableTorchDispatch():
        return _measured(kinds, storage, dtype)


def _kinds_by_dtype(dtype: torch.dtype, limit: int | None) -> tuple[str, ...]:
    kind = always_fits(dtype)
    return (kind,) if kind else kinds_below(dtype, limit)[:1]


def _measured(kinds: tuple[str, ...], storage: torch.UntypedStorage, dtype: torch.dtype) -> Codec | None:
    nbytes = storage.nbytes()
    sizes = {kind: size for kind in kinds if (size := encoded_bytes(kind, nbytes, dtype)) < nbytes}
    for kind in sorted(sizes, key=lambda kind: sizes[kind]):
        if encode(kind, storage, dtype) is not None:
            # The least of a few: the first is slower, and on a machine that others use too any of them may be.
            seconds = min(_seconds(kind, storage, dtype) for _ in range(_TRIALS))
            return _codec(kind, nbytes, dtype, seconds)
    return None


def _seconds(kind: str, storage: torch.UntypedStorage, dtype: torch.dtype) -> float:
    if storage.device.type == "cpu":
        busy, wall = time.thread_time(), time.perf_counter()
        _round_trip(kind, storage, dtype)
        return _OUT_OF_CACHE * min(time.perf_counter() - wall, time.thread_time() - busy)
    # The device's own time: the host is ahead of it in a step, and has to wait for it here.
    ops = TorchDevice(storage.device)
    start = timing_mark(ops)
    _round_trip(kind, storage, dtype)
    return seconds_between(start, timing_mark(ops))


def _round_trip(kind: str, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    encoded = encode(kind, storage, dtype)
    assert encoded is not None
    encoded.decoder.run([encoded.data], storage.device)


def traced_codec(nbytes: int, dtype: torch.dtype, hardware: Hardware, limit: int | None = None) -> Codec | None:
    """The form that a storage of `nbytes` fits whatever its values are; None where there is none. `limit` as above."""
    kinds = _kinds_by_dtype(dtype, limit)
    if not kinds or nbytes < _LEAST_BYTES:
        return None
    kind, count = kinds[0], nbytes // dtype.itemsize
    traffic, launches = _TRAFFIC * count, num_operators(count)
    if kind != always_fits(dtype):
        # Read twice, for its extremes and to be narrowed; written and read; made again.
        traffic, launches = 3 * nbytes + 2 * encoded_bytes(kind, nbytes, dtype), _NARROWING
    moved = hardware.op_seconds(0.0, traffic, "float32")
    seconds = max(moved, launches * hardware.launch_seconds)
    codec = _codec(kind, nbytes, dtype, seconds)
    return codec if codec.nbytes < nbytes else None


def _codec(kind: str, nbytes: int, dtype: torch.dtype, seconds: float) -> Codec:
    return Codec(
        kind=kind,
        nbytes=encoded_bytes(kind, nbytes, dtype),
        work_bytes=work_bytes(kind, nbytes, dtype),
        seconds=seconds,
    )
