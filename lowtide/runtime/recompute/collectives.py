"""What a recomputed region got from other ranks is kept, and its second run does not ask them again.

What: `KeptResults` holds what one run of a region got from the other ranks. There are two kinds of it.
- An exchange of rows that asks (`draw_once`, pipeline/exchange.py): it must not run again in backward. Ranks would
  exchange twice, and where the second routing differed by a bit they would wait for each other for ever.
- Collectives, where that is wanted (`mp_comm_recompute: false`). Around the first run a mode notes the result of each;
  around the second run it gives that one in place of a new one. Covered: functional collectives, which DTensor and
  `torch.distributed.tensor.parallel` issue, and, where FSDP2 does not shard the model, `all_reduce`,
  `all_gather_into_tensor` and `reduce_scatter_tensor` of `torch.distributed`.

A result of a collective that the layer writes into is not kept: its collective is issued again, on all ranks alike. One
that somebody writes into later is refused by name; versions and fingerprints tell.

Cost: the bytes of the results from forward to backward (in the ledger, and in `stats.kept_bytes`), and, for
collectives, 4 us an operator of these layers, in both runs. Not covered: layers with compiled parts, and all other
collectives: they are issued twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch

from lowtide.runtime.recompute.fingerprint import Fingerprints, Print
from lowtide.tensors.compiled import CompiledMode
from lowtide.tensors.private import finished_work, functional_collectives, storage_key, version_of
from lowtide.tensors.wrappers import is_desugared

_FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
_IN_PLACE = ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")
_WAIT, _SEVERAL = "wait_tensor", _IN_PLACE[0]


@functools.cache
def _operators(*, are_in_place: bool) -> dict[int, str]:
    """The collectives that are covered, by identity: torch's operators are asked for their hash in Python."""
    found = {id(getattr(functional_collectives, name).default): name for name in (*_FUNCTIONAL, _WAIT)}
    if are_in_place:
        found |= {id(getattr(torch.ops.c10d, name).default): name for name in _IN_PLACE}
    return found


@dataclass(slots=True)
class _Result:
    """What one collective gave."""

    name: str
    tensor: torch.Tensor
    version: int
    print: Print | None = None
    """None if it has not arrived by then."""
    is_kept: bool = True


_RUN: ContextVar[tuple[KeptResults, bool] | None] = ContextVar("lowtide_recompute_run", default=None)


def draw_once() -> tuple[KeptResults | None, bool]:
    """The results of the region that this thread runs, if it does, and whether it runs it again."""
    found = _RUN.get()
    return (None, False) if found is None else found


class KeptResults:
    """What one run of a region got from the other ranks, in order."""

    def __init__(
        self,
        keep: Callable[[torch.Tensor], None],
        refusal_of: Callable[[str], RuntimeError],
        fingerprints: Fingerprints,
    ) -> None:
        """`keep` is told of each result; `refusal_of` makes an error that names the region."""
        self._keep = keep
        self._refusal_of = refusal_of
        self._fingerprints = fingerprints
        self._rows: list[tuple[torch.Tensor, int]] = []
        """Of exchanges that ask, and their versions."""
        self._num_taken = 0
        self._results: list[_Result] = []
        """Of collectives."""
        self._operators: dict[int, str] = {}
        """The collectives whose results are kept."""
        self._check: Callable[[], Callable[[Print, Print], None] | None] = lambda: None

    def keep_collectives(self, check: Callable[[Print, Print], None], *, are_in_place: bool) -> None:
        """Collectives are not issued again, either. `check` compares two fingerprints: a method of the region, which
        holds this object, so that it is held weakly. `are_in_place`: those of `torch.distributed` are covered."""
        self._operators = _operators(are_in_place=are_in_place)
        self._check = WeakMethod(check)

    @contextlib.contextmanager
    def running(self, *, is_again: bool) -> Iterator[None]:
        """Inside, this thread runs the region: for the first time, or again."""
        self._num_taken = 0
        token = _RUN.set((self, is_again))
        through = functools.partial(self._take, iter(self._results)) if is_again else self._note
        try:
            with _Mode(self._operators, through) if self._operators else contextlib.nullcontext():
                yield
        finally:
            _RUN.reset(token)
        for result in () if is_again else self._results:
            out, then = result.tensor, result.print
            is_written = version_of(out) != result.version
            if result.name in _IN_PLACE or then is not None:
                result.print = self._fingerprints.of(out)
                is_written |= isinstance(then, int) and bool(result.print != then)
            # An alias has the version of what the layer has, and no way to its graph.
            result.tensor, result.is_kept = out.detach(), not is_written

    # -- exchanges that ask --------------------------------------------------------------------------------------------

    def note_rows(self, rows: torch.Tensor) -> None:
        """In the first run: what the next exchange gave."""
        self._keep(rows)
        self._rows.append((rows.detach(), version_of(rows)))

    def take_rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In a later run: the same. Raises RecomputeRefusedError if it is not what is asked for."""
        if self._num_taken == len(self._rows):
            raise self._refusal_of("it exchanges rows more often in its second run than in its first")
        rows, version = self._rows[self._num_taken]
        self._num_taken += 1
        if version_of(rows) != version:
            raise self._refusal_of("it wrote into the rows that it received")
        if (rows.shape, rows.dtype) != (shape, dtype):
            raise self._refusal_of(
                f"it received rows of shape {tuple(rows.shape)}, and of shape {shape} when it was run again"
            )
        return rows.detach()

    # -- collectives ---------------------------------------------------------------------------------------------------

    def _note(self, name: str, func: Any, args: tuple, kwargs: dict) -> Any:
        given = func(*args, **kwargs)
        if name == _WAIT:
            self._note_arrived(given)
        else:
            out = _filled(name, args, given)
            self._keep(out)
            self._results.append(_Result(name, out, version_of(out)))
        return given

    def _note_arrived(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor.untyped_storage())
        for result in self._results:
            if result.print is None and storage_key(result.tensor.untyped_storage()) == key:
                result.print = self._fingerprints.of(result.tensor)

    def _take(self, left: Iterator[_Result], name: str, func: Any, args: tuple, kwargs: dict) -> Any:
        if name == _WAIT:
            return func(*args, **kwargs)
        result = next(left, None)
        if result is None or result.name != name:
            raise self._refusal_of(f"it issues {name} in its second run, where its first one did not")
        if not result.is_kept:
            return func(*args, **kwargs)
        if version_of(result.tensor) != result.version:
            raise self._refusal_of(f"what its {name} had given was written into")
        if result.print is not None:
            check = self._check()
            assert check is not None
            check(result.print, self._fingerprints.of(result.tensor))
        if name not in _IN_PLACE:
            return result.tensor.detach()
        _filled(name, args, None).copy_(result.tensor)
        return args[0], finished_work()


def _filled(name: str, args: tuple, given: Any) -> torch.Tensor:
    """The tensor that a collective has filled or given."""
    if name not in _IN_PLACE:
        return given
    return args[0][0] if isinstance(args[0], list | tuple) else args[0]


class _Mode(CompiledMode):
    """Has collectives go through a function, which gets their name, the operator and its arguments."""

    def __init__(self, operators: dict[int, str], through: Callable[..., Any]) -> None:
        super().__init__()
        self._operators = operators
        self._through = through

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and is_desugared(types):
            return NotImplemented
        name = self._operators.get(id(func))
        if name is None or (name == _SEVERAL and len(args[0]) > 1):
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._through(name, func, args, kwargs or {})
