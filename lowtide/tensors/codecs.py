"""Exact codecs: a storage in fewer bytes, and back with every bit.

What: `encode(kind, storage, dtype)` gives the smaller form of a storage, or None where a value does not fit the kind;
`Encoded.decoder` makes the bytes again. The kinds (`KINDS`):

| kind | of | fits | bytes |
|---|---|---|---|
| `bits` | bool (dropout masks, comparisons) | always, as torch writes bool | 1 bit for each element |
| `two values` | other numbers | at most two bit patterns, as in the noise of dropout on the host | the same |

How: eight bytes that are 0 or 1 are one 64-bit word; one product with a constant moves their lowest bits into the
highest byte (the partial products do not overlap, so nothing carries). Back: each byte of the product with 0x0101...
is masked with its own bit. All of it works on integers: NaN, -0.0, infinities and denormals are bit patterns like any
other, and nothing is rounded.

Why it is safe: whether values fit is looked at in each call on the host. On an accelerator a look would make the host
wait, so only kinds that fit unseen are used there (`fits_unseen`).

Cost: memory traffic, some 2 passes over the storage; on 2 cores of a shared host about 0.5 ns an element to encode bits
and 1 ns to decode them (processor time). Beside the storage and its smaller form at most `work_bytes`, because both go
piece by piece: 32 pieces, or 131,072 elements. Not covered: storages whose bytes are no whole number of elements, or
whose address is not a multiple of eight (None); bytes of a bool that are neither 0 nor 1 on an accelerator (they come
from `view(torch.bool)` only): these come back as 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lowtide.tensors.private import AutoDispatchBelowAutograd, DisableAutocast

BITS, TWO_VALUES = "bits", "two values"
KINDS = (BITS, TWO_VALUES)

_LEAST_PIECE = 1 << 17
_MOST_PIECES = 32
# A byte for each bit: 8 for a word, which is packed into one.
_LANES = 8
_GATHER = 0x0102040810204080
_TO_LOWEST = 56
_SPREAD = 0x0101010101010101
_OWN_BITS = 0x8040201008040201 - (1 << 64)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROBE = 4096


class Decoder(NamedTuple):
    """Makes a storage from its smaller form. Has the interface of a recipe's program (recipes/execute.py)."""

    kind: str
    dtype: torch.dtype
    num_elements: int
    """Of the storage."""
    values: tuple[int, ...] = ()
    """Bit patterns, as integers of the element's width: of a zero bit, of a one."""

    def run(self, inputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """A flat tensor of `dtype` over a new storage. `inputs`: the smaller form, and nothing else."""
        (packed,) = inputs
        with torch.no_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
            out = torch.empty(self.num_elements, dtype=self.dtype, device=device)
            if self.kind == BITS:
                _unpack(packed, out)
            else:
                self._choose(packed, out.view(_INTEGERS[self.dtype.itemsize]))
            return out

    def _choose(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        zero, one = self.values
        out.fill_(zero)
        for start, end in _pieces(self.num_elements):
            is_one = torch.empty(end - start, dtype=torch.bool, device=out.device)
            _unpack(packed[start // _LANES : -(-end // _LANES)], is_one)
            out[start:end].masked_fill_(is_one, one)


class Encoded(NamedTuple):
    """A storage in its smaller form."""

    data: torch.Tensor
    """Flat uint8; alone on its storage."""
    decoder: Decoder


def fits_unseen(dtype: torch.dtype) -> str | None:
    """The kind that every storage of this dtype fits, whatever its values; None where there is none."""
    return BITS if dtype is torch.bool else None


def kinds_of(dtype: torch.dtype) -> tuple[str, ...]:
    """Kinds that storages of this dtype may fit, the smallest first."""
    if dtype is torch.bool:
        return (BITS,)
    return (TWO_VALUES,) if dtype.itemsize in _INTEGERS and not dtype.is_complex else ()


def encoded_bytes(kind: str, nbytes: int, dtype: torch.dtype) -> int:
    """Bytes of the smaller form of a storage of `nbytes`."""
    assert kind in KINDS
    return -(-(nbytes // dtype.itemsize) // _LANES)


def work_bytes(kind: str, nbytes: int, dtype: torch.dtype) -> int:
    """Most bytes that encoding or decoding needs beside the storage and its smaller form.

    Of a piece, two bytes an element: the words, and which of the two values each element has.
    """
    assert kind in KINDS
    count = nbytes // dtype.itemsize
    return 2 * min(_piece(count), -(-count // _LANES) * _LANES) + 2 * _LANES


def num_operators(count: int) -> int:
    """Operators that encoding and decoding `count` bits launch."""
    return 9 * -(-count // _piece(count))


def encode(kind: str, storage: torch.UntypedStorage, dtype: torch.dtype) -> Encoded | None:
    """The smaller form of a whole storage, read as elements of `dtype`; None where it does not fit.

    On the host every element is looked at. On an accelerator only a kind that `fits_unseen` may be asked for. Runs on
    the current stream, below autograd and autocast.
    """
    nbytes = storage.nbytes()
    if nbytes == 0 or nbytes % dtype.itemsize or storage.data_ptr() % _LANES or kind not in kinds_of(dtype):
        return None
    is_host = storage.device.type == "cpu"
    assert is_host or kind == fits_unseen(dtype)
    with torch.no_grad(), DisableAutocast(), AutoDispatchBelowAutograd():
        count = nbytes // dtype.itemsize
        elements = torch.empty(0, dtype=_INTEGERS[dtype.itemsize], device=storage.device).set_(
            storage, 0, (count,), (1,)
        )
        if kind == BITS:
            data = _bits(elements, looks=is_host)
            return None if data is None else Encoded(data, Decoder(kind, dtype, count))
        return _two_values(elements, dtype)


def _bits(bools: torch.Tensor, *, looks: bool) -> torch.Tensor | None:
    packed = _new_bits(bools)
    for start, end in _pieces(len(bools)):
        piece = bools[start:end]
        if not looks:
            # Whatever a kernel takes for True is stored as 1.
            piece = piece.ne(0).view(torch.uint8)
        elif int(piece.max()) > 1:
            return None
        _pack(piece, packed[start // _LANES : -(-end // _LANES)])
    return packed


def _two_values(elements: torch.Tensor, dtype: torch.dtype) -> Encoded | None:
    if not _has_two_values(elements[:_PROBE], *_extremes(elements[:_PROBE])):
        return None  # as most activations: no need to read the rest
    zero, one = _extremes(elements)
    packed = _new_bits(elements)
    for start, end in _pieces(len(elements)):
        piece = elements[start:end]
        is_one = piece == one
        if zero != one and not torch.equal(is_one, piece != zero):
            return None
        _pack(is_one.view(torch.uint8), packed[start // _LANES : -(-end // _LANES)])
    return Encoded(packed, Decoder(TWO_VALUES, dtype, len(elements), (zero, one)))


def _extremes(elements: torch.Tensor) -> tuple[int, int]:
    least, most = elements.aminmax()
    return int(least), int(most)


def _has_two_values(elements: torch.Tensor, zero: int, one: int) -> bool:
    return zero == one or torch.equal(elements == one, elements != zero)


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
    num_words, rest = divmod(len(ones), _LANES)
    words = ones[: num_words * _LANES].view(torch.int64) * _GATHER
    packed[:num_words].copy_(words.bitwise_right_shift_(_TO_LOWEST))
    if rest:
        last = torch.zeros(_LANES, dtype=torch.uint8, device=ones.device)
        last[:rest].copy_(ones[num_words * _LANES :])
        _pack(last, packed[num_words:])


def _unpack(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Bits into bool. `out` has at most eight elements for each byte of `packed`, and more than eight less."""
    for start, end in _pieces(len(out)):
        few = packed[start // _LANES : -(-end // _LANES)]
        words = few.to(torch.int64)
        words.mul_(_SPREAD).bitwise_and_(_OWN_BITS)
        torch.ne(words.view(torch.uint8)[: end - start], 0, out=out[start:end])
