"""Which codec a saved storage fits, and what that codec costs: learned in the observed step.

What: `measured_codec` tries the kinds of a dtype on the bytes that backward is about to read, which are final by then,
and takes the first that holds them and is smaller; its price is the time of that encoding and decoding. On an
accelerator only kinds that fit unseen are tried. `traced_codec` says the same of a storage that has no bytes, at a
roofline's price.

Cost: in the observed step only. What fits is encoded four times and decoded three times; of the rest 4,096 elements are
read. Not covered: whether the bytes fit in a later step; that is looked at in each (runtime/recompute/encoded.py).
"""

from __future__ import annotations

import time

import torch

from lowtide.core.codec import Codec
from lowtide.tensors.codecs import encode, encoded_bytes, fits_unseen, kinds_of, num_operators, work_bytes
from lowtide.timeline.hardware import Hardware

# Bytes that encoding and decoding read and write, for each element of a mask.
_TRAFFIC = 15
_TRIALS = 3
# Less is not worth the operators.
_LEAST_BYTES = 1024


def measured_codec(storage: torch.UntypedStorage, dtype: torch.dtype) -> Codec | None:
    """The smallest form that holds these bytes, and what it took; None where none is smaller."""
    is_host = storage.device.type == "cpu"
    unseen = fits_unseen(dtype)
    if storage.nbytes() < _LEAST_BYTES:
        return None
    for kind in kinds_of(dtype) if is_host else ((unseen,) if unseen else ()):
        if encode(kind, storage, dtype) is None or encoded_bytes(kind, storage.nbytes(), dtype) >= storage.nbytes():
            continue
        # The least of a few: the first is slower, and on a machine that others use too any of them may be.
        return _codec(kind, storage.nbytes(), dtype, min(_seconds(kind, storage, dtype) for _ in range(_TRIALS)))
    return None


def _seconds(kind: str, storage: torch.UntypedStorage, dtype: torch.dtype) -> float:
    started = _now(storage.device)
    encoded = encode(kind, storage, dtype)
    assert encoded is not None
    encoded.decoder.run([encoded.data], storage.device)
    wall, busy = (end - start for end, start in zip(_now(storage.device), started, strict=True))
    return min(wall, busy) if storage.device.type == "cpu" else wall


def traced_codec(nbytes: int, dtype: torch.dtype, hardware: Hardware) -> Codec | None:
    """The form that a storage of `nbytes` fits whatever its values are; None where there is none."""
    kind = fits_unseen(dtype)
    if kind is None or nbytes < _LEAST_BYTES:
        return None
    count = nbytes // dtype.itemsize
    moved, launches = hardware.op_seconds(0.0, _TRAFFIC * count, "float32"), num_operators(count)
    codec = _codec(kind, nbytes, dtype, max(moved, launches * hardware.launch_seconds))
    return codec if codec.nbytes < nbytes else None


def _codec(kind: str, nbytes: int, dtype: torch.dtype, seconds: float) -> Codec:
    return Codec(
        kind=kind,
        nbytes=encoded_bytes(kind, nbytes, dtype),
        work_bytes=work_bytes(kind, nbytes, dtype),
        seconds=seconds,
    )


def _now(device: torch.device) -> tuple[float, float]:
    """Seconds of the wall and of this thread, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter(), time.thread_time()
