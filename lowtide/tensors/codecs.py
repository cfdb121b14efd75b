"""Exact codecs: a storage in fewer bytes, and back with every bit.

What: `encode(kind, storage, dtype)` gives the smaller form of a storage, or None where a value does not fit the kind;
`Encoded.decoder` makes the bytes again. The kinds (`KINDS`):

| kind | of | fits | bytes |
|---|---|---|---|
| `bits` | bool (dropout masks, comparisons) | always, as torch writes bool | 1 bit for each element |
| `two values` | other numbers | at most two bit patterns, as in the noise of dropout on the host | the same |
| `uint8`, `int16`, `int32` | wider integers (indices) | all values in the range of that type | of that type |

How: on the host numpy packs what is compared with one of the two values, and counts, so that a third one is seen. On
an accelerator eight bytes that are 0 or 1 are one 64-bit word; one product with a constant moves their lowest bits into
the highest byte (the partial products do not overlap, so nothing carries). Back, on both: a table has the eight
elements of each of the 256 bytes, and one gather takes its rows. All works on integers: NaN, -0.0, infinities and
denormals are bit patterns like any other, and nothing is rounded.

Why numpy: torch took longer to launch operators and to wake its threads than for the bytes (3.9 ms for 147,456 floats
beside another process, 0.05 now). And to ask for the number of threads, as torch's operators do, sets it in a new one.

Why it is safe: whether values fit is looked at in each call on the host. On an accelerator a look would make the host
wait. There only bool is stored smaller, which fits unseen (`always_fits`), and integers that are below a limit by what
made them (indices of a max-pool): `Encoded.misfit` says on the device whether some were not, and may be read later.

Cost: on one core 0.25 ns an element to encode two values and 0.13 ns to decode them, twice that where the bytes have
left the cache. Beside the storage and its smaller form at most `work_bytes`, because all goes piece by piece: 16
pieces, or 16,384 elements. Not covered: storages whose bytes are no whole number of elements, or whose address is not a
multiple of eight (None); bytes of a bool that are neither 0 nor 1 on an accelerator: these come back as 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lowtide.tensors.private import AutoDispatchBelowAutograd, DisableAutocast

BITS, TWO_VALUES = "bits", "two values"
_NARROW = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}
KINDS = (BITS, TWO_VALUES, *_NARROW)

_LEAST_CHUNK = 1 << 14
_MOST_CHUNKS = 16
# A byte for each bit: 8 for a word, which is packed into one.
_LANES = 8
_GATHER = 0x0102040810204080
_TO_LOWEST = 56
_SPREAD = 0x0101010101010101
_OWN_BITS = 0x8040201008040201 - (1 << 64)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROBE = 4096
_WORK = {BITS: 2, TWO_VALUES: 2}
"""Bytes for each element of a piece: the words, and which of the two values it has."""
_BYTES = 256
"""Values of a byte: rows of the table that decodes bits."""


class Decoder(NamedTuple):
    """Makes a storage from its smaller form. Has the interface of a recipe's program (recipes/execute.py)."""

    kind: str
    dtype: torch.dtype
    num_elements: int
    """Of the storage."""
    numbers: tuple[int, ...] = ()
    """Two values: the bit patterns of a zero and of a one, as integers of the element's width. Integers that were not
    looked at: the least there is. What did not fit may have become negative; a kernel that reads it before the misfit
    is told must not leave its tensor."""

    def run(self, inputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """A flat tensor of `dtype` over a new storage. `inputs`: the smaller form, and nothing else."""
        (data,) = inputs
        with torch.no_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
            out = torch.empty(self.num_elements, dtype=self.dtype, device=device)
            zero, one = self.numbers if self.kind == TWO_VALUES else (0, 1)
            if self.kind in _WORK and device.type == "cpu":
                _unpack(data.numpy(), out.view(INTEGERS[self.dtype.itemsize]).numpy(), zero, one)
            elif self.kind in _WORK:
                _unpack_on_device(data, out.view(torch.uint8))
            elif device.type == "cpu":
                out.numpy()[:] = data.numpy()
            else:
                out.copy_(data)
                if self.numbers:
                    out.clamp_(min=self.numbers[0])
            return out


class Encoded(NamedTuple):
    """A storage in its smaller form."""

    data: torch.Tensor
    """Flat; alone on its storage."""
    decoder: Decoder
    misfit: torch.Tensor | None = None
    """On an accelerator, where values may not fit: an int32 there, 1 if some did not. `data` is of no use then."""


def always_fits(dtype: torch.dtype) -> str | None:
    """The kind that every storage of this dtype fits, whatever its values; None where there is none."""
    return BITS if dtype is torch.bool else None


def kinds_below(dtype: torch.dtype, limit: int | None) -> tuple[str, ...]:
    """The kinds that integers from 0 to `limit` - 1 fit, the smallest first. None: nothing is known of them."""
    if limit is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return ()
    narrower = (kind for kind, narrow in _NARROW.items() if narrow.itemsize < dtype.itemsize)
    return tuple(kind for kind in narrower if limit - 1 <= torch.iinfo(_NARROW[kind]).max)


def kinds_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Kinds that storages of this dtype may fit, the smallest first."""
    if dtype is torch.bool:
        return (BITS,)
    if dtype.itemsize not in INTEGERS or dtype.is_complex:
        return ()
    if dtype.is_floating_point:
        return (TWO_VALUES,)
    return (TWO_VALUES, *(kind for kind, narrow in _NARROW.items() if narrow.itemsize < dtype.itemsize))


def encoded_bytes(kind: str, nbytes: int, dtype: torch.dtype) -> int:
    """Bytes of the smaller form of a storage of `nbytes`."""
    count = nbytes // dtype.itemsize
    if kind in _NARROW:
        return count * _NARROW[kind].itemsize
    assert kind in KINDS
    return -(-count // _LANES)


def work_bytes(kind: str, nbytes: int, dtype: torch.dtype) -> int:
    """Most bytes that encoding or decoding needs beside the storage and its smaller form."""
    assert kind in KINDS
    count, table = nbytes // dtype.itemsize, _BYTES * _LANES * (dtype.itemsize + 2) if kind in _WORK else 0
    return _WORK.get(kind, 0) * min(_chunk_length(count), -(-count // _LANES) * _LANES) + 8 * _LANES + table


def num_operators(count: int) -> int:
    """Operators that encoding and decoding `count` bits launch."""
    return 6 * -(-count // _chunk_length(count)) + 8


def encode(kind: str, storage: torch.UntypedStorage, dtype: torch.dtype) -> Encoded | None:
    """The smaller form of a whole storage, read as elements of `dtype`; None where it does not fit.

    On the host every element is looked at. On an accelerator only a kind that `always_fits` may be asked for, or a
    narrower integer, whose `misfit` has to be read then. Runs on the current stream, below autograd and autocast.
    """
    nbytes = storage.nbytes()
    if nbytes == 0 or nbytes % dtype.itemsize or storage.data_ptr() % _LANES or kind not in kinds_of(dtype):
        return None
    is_host = storage.device.type == "cpu"
    assert is_host or kind == always_fits(dtype) or kind in _NARROW
    with torch.no_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
        count = nbytes // dtype.itemsize
        integers = torch.empty(0, dtype=INTEGERS[dtype.itemsize], device=storage.device)
        elements = integers.set_(storage, 0, (count,), (1,))
        if not is_host:
            if kind in _NARROW:
                return _narrowed_on_device(elements.view(dtype), kind)
            return Encoded(_bits_on_device(elements), Decoder(kind, dtype, count))
        if kind in _NARROW:
            data = _narrowed(elements.view(dtype), _NARROW[kind])
            return None if data is None else Encoded(data, Decoder(kind, dtype, count))
        packed = torch.empty(-(-count // _LANES), dtype=torch.uint8)
        numbers = (0, 1) if kind == BITS else _candidates(elements.numpy())
        if not _packs(elements.numpy(), *numbers, packed.numpy()):
            return None
        return Encoded(packed, Decoder(kind, dtype, count, () if kind == BITS else numbers))


# -- on the host -------------------------------------------------------------------------------------------------------


def _candidates(elements: NDArray[Any]) -> tuple[int, int]:
    """Two values that it may consist of: those of the first elements, or of all where these are equal."""
    first = elements[:_PROBE]
    if first.min() == first.max():
        first = elements
    return int(first.min()), int(first.max())


def _packs(elements: NDArray[Any], zero: int, one: int, packed: NDArray[np.uint8]) -> bool:
    """Write a bit for each element that is `one`; whether all others are `zero`."""
    is_one = np.empty(min(_chunk_length(len(elements)), len(elements)), dtype=np.bool_)
    for start, end in _chunks(len(elements)):
        piece, ones = elements[start:end], is_one[: end - start]
        np.equal(piece, one, out=ones)
        packed[start // _LANES : -(-end // _LANES)] = np.packbits(ones, bitorder="little")
        num_others = len(piece) - np.count_nonzero(ones)
        if zero == 0 != one:  # seen without a comparison
            num_others -= len(piece) - np.count_nonzero(piece)
        elif zero != one:
            num_others -= np.count_nonzero(np.equal(piece, zero, out=ones))
        if num_others:
            return False
    return True


def _unpack(packed: NDArray[np.uint8], out: NDArray[Any], zero: int, one: int) -> None:
    """The number `one` for each bit that is set, else `zero`: as many as `out` has elements."""
    is_one = np.unpackbits(np.arange(_BYTES, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.bool_)
    table = np.where(is_one, one, zero).astype(out.dtype)
    num_whole, rest = divmod(len(out), _LANES)
    rows = out[: num_whole * _LANES].reshape(num_whole, _LANES)
    for start, end in _chunks(num_whole * _LANES):
        part = slice(start // _LANES, end // _LANES)
        np.take(table, packed[part], axis=0, out=rows[part], mode="clip")
    if rest:
        out[-rest:] = table[packed[num_whole], :rest]


def _narrowed(elements: torch.Tensor, narrow: torch.dtype) -> torch.Tensor | None:
    limits, numbers = torch.iinfo(narrow), elements.numpy()
    if numbers.min() < limits.min or numbers.max() > limits.max:
        return None
    data = torch.empty(len(elements), dtype=narrow)
    data.numpy()[:] = numbers
    return data


# -- on an accelerator -------------------------------------------------------------------------------------------------


def _bits_on_device(bools: torch.Tensor) -> torch.Tensor:
    """The first of eight elements becomes the lowest bit (on a little-endian machine)."""
    packed = torch.empty(-(-len(bools) // _LANES), dtype=torch.uint8, device=bools.device)
    for start, end in _chunks(len(bools)):
        # Whatever a kernel takes for True is stored as 1.
        ones = bools[start:end].ne(0).view(torch.uint8)
        if rest := len(ones) % _LANES:
            ones = torch.cat((ones, ones.new_zeros(_LANES - rest)))
        words = (ones.view(torch.int64) * _GATHER).bitwise_right_shift_(_TO_LOWEST)
        packed[start // _LANES : -(-end // _LANES)].copy_(words)
    return packed


def _narrowed_on_device(elements: torch.Tensor, kind: str) -> Encoded:
    limits = torch.iinfo(_NARROW[kind])
    least, most = elements.aminmax()
    misfit = least.lt(limits.min).logical_or_(most.gt(limits.max)).to(torch.int32)
    return Encoded(elements.to(_NARROW[kind]), Decoder(kind, elements.dtype, len(elements), (0,)), misfit)


def _chunk_length(count: int) -> int:
    """Elements of one piece: a multiple of eight."""
    return max(_LEAST_CHUNK, -(-count // (_MOST_CHUNKS * _LANES)) * _LANES)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    step = _chunk_length(count)
    return ((start, min(start + step, count)) for start in range(0, count, step))


def _unpack_on_device(packed: torch.Tensor, out: torch.Tensor) -> None:
    """1 for each bit that is set, else 0: as many as `out` has elements."""
    words = torch.arange(_BYTES, device=out.device).mul_(_SPREAD).bitwise_and_(_OWN_BITS)
    table = words.view(torch.uint8).view(_BYTES, _LANES).ne(0).view(torch.uint8)
    for start, end in _chunks(out.numel()):
        rows = packed[start // _LANES : -(-end // _LANES)].to(torch.int32)
        num_whole, rest = divmod(end - start, _LANES)
        whole = out[start : end - rest].view(num_whole, _LANES)
        torch.index_select(table, 0, rows[:num_whole], out=whole)
        if rest:
            out[end - rest : end].copy_(table[rows[num_whole:]][0, :rest])
