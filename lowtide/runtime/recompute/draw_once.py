"""What a recomputed region does only once: its second run takes what the first one got.

What: a collective must not run again in backward: ranks would exchange twice, and where the second routing differed by
a bit they would wait for each other for ever. So its result is kept, and the second run takes it. While a region runs,
its thread finds the region's `KeptResults` here, by `draw_once`.

Cost: the bytes of these results from forward to backward; they are in the ledger, and in `stats.kept_bytes`.
Not covered: collectives that do not ask (whatever a block calls on `torch.distributed` itself): they run twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

from lowtide.tensors.private import version_of

_RUN: ContextVar[tuple[KeptResults, bool] | None] = ContextVar("lowtide_recompute_run", default=None)


class KeptResults:
    """What one region got in its first run, in order. `keep` is told of each; `refusal_of` makes an error that names
    the region."""

    __slots__ = ("_keep", "_kept", "_position", "_refusal_of")

    def __init__(self, keep: Callable[[torch.Tensor], None], refusal_of: Callable[[str], RuntimeError]) -> None:
        self._keep = keep
        self._refusal_of = refusal_of
        self._kept: list[tuple[torch.Tensor, int]] = []
        self._position = 0

    @contextlib.contextmanager
    def running(self, *, is_again: bool) -> Iterator[None]:
        """Inside, this thread runs the region: for the first time, or again."""
        self._position = 0
        token = _RUN.set((self, is_again))
        try:
            yield
        finally:
            _RUN.reset(token)

    def note(self, result: torch.Tensor) -> None:
        """In the first run: the next result."""
        self._keep(result)
        self._kept.append((result.detach(), version_of(result)))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In a later run: the next result. Raises RecomputeRefusedError if it is not the one that is asked for."""
        if self._position == len(self._kept):
            raise self._refusal_of("it exchanges rows more often in its second run than in its first")
        result, version = self._kept[self._position]
        self._position += 1
        if version_of(result) != version:
            raise self._refusal_of("it wrote into the rows that it received")
        if (result.shape, result.dtype) != (shape, dtype):
            raise self._refusal_of(
                f"it received rows of shape {tuple(result.shape)}, and of shape {shape} when it was run again"
            )
        return result.detach()


def draw_once() -> tuple[KeptResults | None, bool]:
    """The results of the region that this thread runs, if it does, and whether it runs it again."""
    found = _RUN.get()
    return (None, False) if found is None else found
