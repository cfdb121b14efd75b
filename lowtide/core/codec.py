"""A codec: how one storage is stored smaller between forward and backward, to the bit, as data.

What: a kept or swapped site may be stored in another form: a mask in one bit for each element, say. `Codec` says which
form, how many bytes it takes, and what it costs. Made by profiling/smaller.py, weighed by planner/smaller.py, carried
out by tensors/codecs.py and runtime/recompute/encoded.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A smaller form of one storage. Decoding it gives every bit of the storage back."""

    kind: str
    """One of `tensors.codecs.KINDS`."""
    nbytes: int
    """Bytes of the smaller form of the whole storage."""
    work_bytes: int
    """Most bytes that encoding or decoding needs beside the storage and its smaller form."""
    seconds: float
    """Encoding once and decoding once."""
