"""The exchanges of rows that one stage takes part in while it is observed: how many rows, and between which operators.

What: inside an `ExchangeWatch` the exchanges of this thread (exchange.py) are as ever, and written down. It stands
where a half of a pair stands (overlap.py), so it is told when one starts and when it is waited for.
Cost: none that shows. Not covered: collectives that a stage calls on `torch.distributed` itself.
"""

from __future__ import annotations

import contextvars
import dataclasses
from types import TracebackType
from typing import Any

import torch

from lowtide.pipeline.exchange import Half, Home, Route, Work, running_half, start_on_group
from lowtide.pipeline.turns import Exchange
from lowtide.profiling.step_recorder import StepRecorder
from lowtide.tensors.private import dispatch_modes


class ExchangeWatch:
    """A half without a partner, and its own home."""

    def __init__(self, start: Any = start_on_group) -> None:
        """`start`: starts an exchange, as `Overlap` takes it."""
        self._start = start
        self._started: list[Exchange] = []
        self._recorder: StepRecorder | None = None
        self._token: contextvars.Token | None = None
        self.backward_half: Half | None = None

    @property
    def home(self) -> Home:
        return self

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """In the order in which they were started."""
        return tuple(self._started)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Of each: rows sent, rows received."""
        return [(each.num_sent, each.num_received) for each in self._started]

    def check(self, x: torch.Tensor) -> None:
        """A half of a pair refuses modules of FSDP2 here; alone they are right."""

    def start(self, rows: torch.Tensor, sent: torch.Tensor, route: Route) -> Work:
        recorder = next((mode for mode in dispatch_modes() if isinstance(mode, StepRecorder)), None)
        if recorder is not self._recorder:  # a step that is observed once more
            self._recorder = recorder
            self._started.clear()
        at = 0 if recorder is None else recorder.num_ops
        work = self._start(rows, sent, route)
        self._started.append(
            Exchange(
                start=at,
                wait=at + 1,
                num_sent=len(sent),
                num_received=len(rows),
                nbytes=rows.nbytes,
                num_ranks=len(route.input_splits),
                takes_turn=rows.is_floating_point() or rows.is_complex(),
            )
        )
        return _Watched(self, len(self._started) - 1, work)

    def waited(self, number: int) -> None:
        """The exchange with this number is about to be waited for."""
        if self._recorder is not None:
            each = self._started[number]
            self._started[number] = dataclasses.replace(each, wait=max(each.wait, self._recorder.num_ops))

    def __enter__(self) -> ExchangeWatch:
        self._token = running_half.set(self)
        self.backward_half = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        running_half.reset(self._token)
        self.backward_half = None


class _Watched:
    """A collective of a watched stage."""

    __slots__ = ("_number", "_watch", "_work")

    def __init__(self, watch: ExchangeWatch, number: int, work: Work) -> None:
        self._watch = watch
        self._number = number
        self._work = work

    def wait(self) -> None:
        self._watch.waited(self._number)
        self._work.wait()
