"""Where the observed step puts what autograd saved, so that it sees when everybody else lets go.

What: three places with two calls. `put` takes the bytes of a storage and gives a ticket; `get` brings them back in a
new storage. `FileStash` (no accelerator: resident memory really falls, so that the observed step itself is small),
`HostStash` (an accelerator: main memory), `FakeStash` (fake tensors have no bytes: a new empty storage will do).

Cost: one synchronous copy each way; an observed step is slower by that much. Not covered: overlap, pinned memory, tiers
(that is the runtime's business).
"""

from __future__ import annotations

import os
import tempfile
from typing import Any, Protocol

import torch

from lowtide.tensors.view import byte_view


class ByteStash(Protocol):
    """A place for bytes. The ticket is the place's own business."""

    def put(self, storage: torch.UntypedStorage) -> Any:
        """Copy the bytes of `storage` away."""

    def get(self, ticket: Any) -> torch.UntypedStorage:
        """A new storage with those bytes."""

    def close(self) -> None:
        """Give everything back."""


class FileStash:
    """An unlinked temporary file. The kernel may cache it, but that memory is not the process's."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="lowtide-observe-", buffering=0)  # noqa: SIM115
        self._end = 0

    def put(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        nbytes, offset = storage.nbytes(), self._end
        view, done = byte_view(storage).numpy().data, 0
        while done < nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        self._end += nbytes
        return offset, nbytes

    def get(self, ticket: tuple[int, int]) -> torch.UntypedStorage:
        offset, nbytes = ticket
        target = torch.empty(nbytes, dtype=torch.uint8)
        view, done = target.numpy().data, 0
        while done < nbytes:
            num = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if num == 0:
                raise OSError("observe: the temporary file ends before what was written to it")
            done += num
        return target.untyped_storage()

    def close(self) -> None:
        self._file.close()


class HostStash:
    """Main memory, for tensors on an accelerator."""

    def put(self, storage: torch.UntypedStorage) -> tuple[torch.Tensor, torch.device]:
        return byte_view(storage).cpu(), storage.device

    def get(self, ticket: tuple[torch.Tensor, torch.device]) -> torch.UntypedStorage:
        return ticket[0].to(ticket[1]).untyped_storage()

    def close(self) -> None:
        pass


class FakeStash:
    """Fake tensors: only the size matters."""

    def put(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes()

    def get(self, ticket: int) -> torch.UntypedStorage:
        return torch.empty(ticket, dtype=torch.uint8, device="cpu").untyped_storage()

    def close(self) -> None:
        pass
