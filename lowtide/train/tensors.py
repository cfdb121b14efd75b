"""Tensors in a file: the safetensors format, a length, a header in JSON, and bytes. Nothing in it can run.

What: `write_tensors` writes a new file and flushes it to disk; `TensorFile` reads the header of one and then the bytes,
straight into tensors that are there already. Names, dtypes and shapes come from those tensors: what the file says of
itself is compared with them before a byte is read, never believed.
Why not `torch.save` or `torch.distributed.checkpoint`: both read pickles back, and a pickle is a program. Why not the
safetensors package: its writer neither flushes nor hashes nor sets permissions; its files and these are the same.
Cost: one pass over the bytes, hashed on the way (SHA-256, 0.3 to 2 GB/s a core); for a tensor of an accelerator one
copy of it in main memory at a time.
Of a DTensor the file has the whole, and each rank keeps its part.
Not covered: writing DTensors, sparse and quantized tensors, dtypes that the format has no name for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.train.shards import fill

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 64 << 20
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written, as it was meant to be."""

    num_bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Writes a new file that only its owner can read, and flushes it to disk. Raises `OSError`."""
    # Wide elements first, so that every tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {**_described(tensor), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    digest = hashlib.sha256()
    with open_new(path) as file:
        pieces: Iterator[bytes | memoryview] = itertools.chain(
            (len(header).to_bytes(_LENGTH_BYTES, "little"), header),
            (_bytes_of(tensors[name].cpu().contiguous()) for name in names),
        )
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return Written(num_bytes=_LENGTH_BYTES + len(header) + end, sha256=digest.hexdigest())


def open_new(path: Path) -> Any:
    """A new file, for its owner only from its first moment on."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


class TensorFile:
    """A file of tensors, of which only the header has been read."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError`: the file is not one of tensors."""
        self.path = path
        try:
            with path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = file.read(num_bytes) if num_bytes <= _MOST_HEADER_BYTES else b""
            entries = json.loads(header)
        except OSError as error:
            raise ConfigError(f"{path.name}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{path.name} is not a file of tensors") from None
        if not isinstance(entries, dict):
            raise ConfigError(f"{path.name} is not a file of tensors")
        self.entries: dict[str, Any] = entries
        self._start = _LENGTH_BYTES + num_bytes

    def read_into(self, tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor] | None = None) -> None:
        """Fills every tensor of the file, but `others`: the file has tensors like these, which are not read.

        Raises `ConfigError` for one that is not like the tensor here.
        """
        skipped = others or {}
        end = 0
        for name in self.entries:
            tensor = skipped[name] if name in skipped else tensors[name]
            begin, end = end, end + tensor.numel() * tensor.element_size()
            if self.entries[name] != {**_described(tensor), "data_offsets": [begin, end]}:
                raise ConfigError(f"{self.path.name} has another '{name}': {self.entries[name]}")
        with self.path.open("rb") as file:
            file.seek(self._start)
            for name in self.entries:
                if name in skipped:
                    file.seek(skipped[name].nbytes, os.SEEK_CUR)
                    continue
                tensor = tensors[name].detach()
                is_here = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
                target = tensor if is_here else torch.empty(tensor.shape, dtype=tensor.dtype)
                if file.readinto(_bytes_of(target)) != tensor.numel() * tensor.element_size():
                    raise ConfigError(f"{self.path.name} ends in the middle of '{name}'")
                if not is_here:
                    fill(tensor, target)


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    assert tensor.dtype in _DTYPES, f"{tensor.dtype} has no name in this format"
    return {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape)}


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU itself, not a copy."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)
