"""Exact codecs: a storage in fewer bytes, and back with every bit.

What: `encode(kind, storage, dtype)` gives the smaller form of a storage, or None where a value does not fit the kind;
`Encoded.decoder` makes the bytes again. The kinds (`KINDS`):

| kind | of | fits | bytes |
|---|---|---|---|
| `bits` | bool (dropout masks, comparisons) | always, as torch writes bool | 1 bit for each element |
| `two values` | other numbers | at most two bit patterns, as in the noise of dropout on the host | the same |
| `uint8`, `int16`, `int32` | wider integers (indices) | all values in the range of that type | of that type |

How: eight bytes that are 0 or 1 are one 64-bit word; one product with a constant moves their lowest bits into the
highest byte (the partial products do not overlap, so nothing carries). Back: a table has the eight elements of each
of the 256 bytes, and one gather takes its rows. All works on integers: NaN, -0.0, infinities and denormals are bit
patterns like any other, and nothing is rounded.

Why it is safe: whether values fit is looked at in each call on the host. On an accelerator a look would make the host
wait. There only bool is stored smaller, which fits unseen (`fits_unseen`), and integers that are below a limit by what
made them (indices of a max-pool): `Encoded.misfit` says on the device, for whoever asks later, whether some were not.

Cost: memory traffic, 2 to 4 passes over the storage to encode, one to decode; on one core of a shared host 0.5 ns an
element to encode bits (two values: 1.7 ns) and 0.5 ns to decode them. Beside the storage and its smaller form at most
`work_bytes`, because all goes piece by piece: 16 pieces, or 16,384 elements. Not covered: storages whose bytes are no
whole number of elements, or whose address is not a multiple of eight (None); bytes of a bool that are neither 0 nor 1
on an accelerator (they come from `view(torch.bool)` only): these come back as 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lowtide.tensors.private import AutoDispatchBelowAutograd, DisableAutocast

BITS, TWO_VALUES = "bits", "two values"
_NARROW = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}
KINDS = (BITS, TWO_VALUES, *_NARROW)

_LEAST_PIECE = 1 << 14
_MOST_PIECES = 16
# A byte for each bit: 8 for a word, which is packed into one.
_LANES = 8
_GATHER = 0x0102040810204080
_TO_LOWEST = 56
_SPREAD = 0x0101010101010101
_OWN_BITS = 0x8040201008040201 - (1 << 64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROBE = 4096
_WORK = {BITS: 2, TWO_VALUES: 2}
"""Bytes for each element of a piece: the words, and which of the two values it has."""
_BYTES = 256
"""Values of a byte: rows of the table that decodes bits."""
_GRAIN = 1 << 15
"""Elements from which on operators of the host ask how many threads they may use. In a new thread, to ask is to set it,
and other kernels give other sums then: fewer elements are decoded without asking."""


class Decoder(NamedTuple):
    """Makes a storage from its smaller form. Has the interface of a recipe's program (recipes/execute.py)."""

    kind: str
    dtype: torch.dtype
    num_elements: int
    """Of the storage."""
    numbers: tuple[int, ...] = ()
    """Two values: the bit patterns of a zero and of a one, as integers of the element's width. Integers that nobody
    looked at: the least there is. What did not fit may have become negative; a kernel that reads it before the misfit
    is told must not leave its tensor."""

    def run(self, inputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """A flat tensor of `dtype` over a new storage. `inputs`: the smaller form, and nothing else."""
        (data,) = inputs
        with torch.no_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
            out = torch.empty(self.num_elements, dtype=self.dtype, device=device)
            if self.kind in _WORK:
                zero, one = self.numbers or (0, 1)
                _unpack(data, out.view(_INTEGERS[self.dtype.itemsize]), zero, one)
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


def fits_unseen(dtype: torch.dtype) -> str | None:
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
    if dtype.itemsize not in _INTEGERS or dtype.is_complex:
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
    return _WORK.get(kind, 0) * min(_piece(count), -(-count // _LANES) * _LANES) + 8 * _LANES + table


def num_operators(count: int) -> int:
    """Operators that encoding and decoding `count` bits launch."""
    return 6 * -(-count // _piece(count)) + 8


def encode(kind: str, storage: torch.UntypedStorage, dtype: torch.dtype) -> Encoded | None:
    """The smaller form of a whole storage, read as elements of `dtype`; None where it does not fit.

    On the host every element is looked at. On an accelerator only a kind that `fits_unseen` may be asked for, or a
    narrower integer, whose `misfit` has to be read then. Runs on the current stream, below autograd and autocast.
    """
    nbytes = storage.nbytes()
    if nbytes == 0 or nbytes % dtype.itemsize or storage.data_ptr() % _LANES or kind not in kinds_of(dtype):
        return None
    is_host = storage.device.type == "cpu"
    assert is_host or kind == fits_unseen(dtype) or kind in _NARROW
    with torch.no_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
        count = nbytes // dtype.itemsize
        integers = torch.empty(0, dtype=_INTEGERS[dtype.itemsize], device=storage.device)
        elements = integers.set_(storage, 0, (count,), (1,))
        if not is_host and kind in _NARROW:
            return _narrowed_unseen(elements.view(dtype), kind)
        if kind == BITS:
            found = _bits(elements, looks=is_host)
        elif kind == TWO_VALUES:
            found = _two_values(elements)
        else:
            found = _narrowed(elements.view(dtype), _NARROW[kind])
        if found is None:
            return None
        data, numbers = found
        return Encoded(data, Decoder(kind, dtype, count, numbers))


_Found = tuple[torch.Tensor, tuple[int, ...]] | None


def _bits(bools: torch.Tensor, *, looks: bool) -> _Found:
    packed = _new_bits(bools)
    for start, end in _pieces(len(bools)):
        piece = bools[start:end]
        if not looks:
            # Whatever a kernel takes for True is stored as 1.
            piece = piece.ne(0).view(torch.uint8)
        elif int(piece.max()) > 1:
            return None
        _pack(piece, packed[start // _LANES : -(-end // _LANES)])
    return packed, ()


def _two_values(elements: torch.Tensor) -> _Found:
    if not _has_two_values(elements[:_PROBE]):
        return None  # as most activations: no need to read the rest
    zero, one = _extremes(elements)
    packed = _new_bits(elements)
    for start, end in _pieces(len(elements)):
        piece = elements[start:end]
        is_one = piece == one
        # To bool takes a quarter of the time of a comparison, and the noise of dropout has zeros.
        if zero != one and not _same(is_one, piece.to(torch.bool) if zero == 0 else piece != zero):
            return None
        _pack(is_one.view(torch.uint8), packed[start // _LANES : -(-end // _LANES)])
    return packed, (zero, one)


def _extremes(elements: torch.Tensor) -> tuple[int, int]:
    least, most = elements.aminmax()
    return int(least), int(most)


def _has_two_values(elements: torch.Tensor) -> bool:
    zero, one = _extremes(elements)
    return zero == one or _same(elements == one, elements != zero)


def _same(bools: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether they are equal; as words where they are whole ones, which takes a fifth of the time."""
    if bools.numel() % _LANES == 0:
        bools, others = bools.view(torch.int64), others.view(torch.int64)
    return torch.equal(bools, others)


def _narrowed(elements: torch.Tensor, narrow: torch.dtype) -> _Found:
    limits = torch.iinfo(narrow)
    for part in (elements[:_PROBE], elements):
        least, most = _extremes(part)
        if least < limits.min or most > limits.max:
            return None
    return elements.to(narrow), ()


def _narrowed_unseen(elements: torch.Tensor, kind: str) -> Encoded:
    limits = torch.iinfo(_NARROW[kind])
    least, most = elements.aminmax()
    misfit = least.lt(limits.min).logical_or_(most.gt(limits.max)).to(torch.int32)
    return Encoded(elements.to(_NARROW[kind]), Decoder(kind, elements.dtype, len(elements), (0,)), misfit)


def _new_bits(elements: torch.Tensor) -> torch.Tensor:
    return torch.empty(-(-len(elements) // _LANES), dtype=torch.uint8, device=elements.device)


def _piece(count: int) -> int:
    """Elements of one piece: a multiple of eight."""
    return max(_LEAST_PIECE, -(-count // (_MOST_PIECES * _LANES)) * _LANES)


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    step = _piece(count)
    return ((start, min(start + step, count)) for start in range(0, count, step))


def _pack(ones: torch.Tensor, packed: torch.Tensor) -> None:
    """Bytes that are 0 or 1 into bits, the first into the lowest bit (on a little-endian machine)."""
    num_words, rest = divmod(ones.numel(), _LANES)
    words = ones[: num_words * _LANES].view(torch.int64) * _GATHER
    packed[:num_words].copy_(words.bitwise_right_shift_(_TO_LOWEST))
    if rest:
        last = torch.zeros(_LANES, dtype=torch.uint8, device=ones.device)
        last[:rest].copy_(ones[num_words * _LANES :])
        _pack(last, packed[num_words:])


def _unpack(packed: torch.Tensor, out: torch.Tensor, zero: int, one: int) -> None:
    """The number `one` for each bit that is set, else `zero`: as many as `out` has elements."""
    # Not `arange`, which asks for the number of threads too.
    each_byte = torch.ones(_BYTES, dtype=torch.int64, device=out.device).cumsum(0).sub_(1)
    words = each_byte.mul_(_SPREAD).bitwise_and_(_OWN_BITS)
    is_one = words.view(torch.uint8).view(_BYTES, _LANES).ne(0)
    table = torch.full((_BYTES, _LANES), zero, dtype=out.dtype, device=out.device).masked_fill_(is_one, one)
    is_small = out.device.type == "cpu" and out.numel() < _GRAIN
    for start, end in _pieces(out.numel()):
        rows = packed[start // _LANES : -(-end // _LANES)].to(torch.int32)
        num_whole, rest = divmod(end - start, _LANES)
        whole = out[start : end - rest].view(num_whole, _LANES)
        if is_small:
            torch.gather(table, 0, rows[:num_whole, None].to(torch.int64).expand(-1, _LANES), out=whole)
        else:
            torch.index_select(table, 0, rows[:num_whole], out=whole)
        if rest:
            out[end - rest : end].copy_(table[rows[num_whole:]][0, :rest])
