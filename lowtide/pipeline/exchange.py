"""`all_to_all`: the one call through which a block sends its tokens to the experts of other ranks, and gets them back.

What: rank r gives `input_splits[q]` rows to rank q and gets `output_splits[q]` rows from it, in the order of the ranks.
The backward sends the gradient of each row to where the row came from. An ordinary MoE block needs no more than this to
be overlapped with the backward of another micro-batch (overlap.py).
`start_all_to_all` is the same call in two parts: what stands between it and its `wait` runs while rows travel, and the
backward of what stands there runs while gradients travel: shared experts hide an exchange of their own micro-batch.

How: two autograd nodes, one where rows leave and one where they are waited for, with an empty tensor between them. In
backward autograd takes nodes in the reverse order of forward, so the second one starts the exchange of the gradients,
what stands between the two runs, and the first one waits.
Inside an active half of a pair (overlap.py), a wait first lets the other half run. Exchanges of integers do not: they
say how many rows will come, their result is needed at once, and they have no backward.

In a layer that lowtide recomputes, the second run takes the rows that the first one got
(runtime/recompute/collectives.py). Inside `torch.utils.checkpoint` an exchange is refused.

Cost: one collective each way, and 17 us of the host around it; nothing is copied but rows that are not contiguous.
Not covered: double backward; tensors whose rows are not their first dimension; graphs whose nodes run on several
devices, for which autograd promises no order of exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from lowtide.errors import ConfigError
from lowtide.runtime.recompute.collectives import KeptResults, draw_once
from lowtide.runtime.saved.handle import is_checkpoint_hook
from lowtide.tensors.private import top_saved_tensors_hooks


@dataclass(frozen=True, slots=True)
class Route:
    """How many rows come from each rank and go to each rank of a group."""

    output_splits: tuple[int, ...]
    input_splits: tuple[int, ...]
    group: Any

    def back(self) -> Route:
        return Route(self.input_splits, self.output_splits, self.group)


Wait = Callable[[], Any]
"""Waits for an exchange that was started."""
running_half: ContextVar[Any] = ContextVar("lowtide_running_half", default=None)
"""The half of a pair (overlap.py) that this thread carries out, or None. On an accelerator autograd calls backward on
threads of its own, which do not have it: there an exchange asks the home of the half that it was made in."""


def all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, group: Any = None
) -> torch.Tensor:
    """The rows that the ranks of `group` sent to this one, of shape `[sum(output_splits), *x.shape[1:]]`.

    x: `[sum(input_splits), ...]`. `group`: the expert-parallel ranks; absent, all ranks.
    """
    return start_all_to_all(x, output_splits, input_splits, group=group).wait()


def start_all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, group: Any = None
) -> Pending:
    """As `all_to_all`, without waiting: `wait` of what this gives has the rows. Until then nobody may write to `x`."""
    route = Route(tuple(output_splits), tuple(input_splits), group)
    if len(x) != sum(route.input_splits):
        raise ConfigError(
            f"lowtide: all_to_all was given {len(x)} rows and input_splits that add up to {sum(route.input_splits)}: "
            "they say how many rows go to each rank"
        )
    kept, is_again = draw_once()
    if not is_again and is_checkpoint_hook(top_saved_tensors_hooks()):
        raise ConfigError(
            "lowtide: all_to_all was called inside torch.utils.checkpoint, which would route and send the tokens once "
            "more in backward; checkpoint the parts before, between and after the exchanges, or have lowtide "
            "recompute the layer (`recompute: all`), which keeps what was received"
        )
    half = running_half.get()
    if half is not None:
        half.check(x)
    exchange = _Exchange(route)
    if kept is not None and is_again:
        exchange.given = kept.take_rows((sum(route.output_splits), *x.shape[1:]), x.dtype)
    return Pending(_Leave.apply(x, exchange), exchange, None if is_again else kept)


class Pending:
    """An exchange that was started."""

    __slots__ = ("_exchange", "_kept", "_rows", "_token")

    def __init__(self, token: torch.Tensor, exchange: _Exchange, kept: KeptResults | None) -> None:
        self._token = token
        self._exchange = exchange
        self._kept = kept
        self._rows: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The rows. Further calls give the same tensor."""
        if self._rows is None:
            self._rows = _Arrive.apply(self._token, self._exchange)
            if self._kept is not None:
                self._kept.note_rows(self._rows)
        return self._rows


class _Exchange:
    """What the two nodes of one exchange share: the rows under way, in forward or in one backward pass."""

    __slots__ = ("given", "home", "route", "under_way")

    def __init__(self, route: Route) -> None:
        self.route = route
        self.under_way: tuple[torch.Tensor, torch.Tensor, Wait] | None = None
        half = running_half.get()
        self.home = None if half is None else half.home
        self.given: torch.Tensor | None = None
        """In a layer's second run: what the first one got."""

    def start(self, x: torch.Tensor, route: Route) -> None:
        rows = x.new_empty(sum(route.output_splits), *x.shape[1:])
        sent = x.contiguous()
        half = running_half.get()
        if half is None and self.home is not None:
            half = self.home.backward_half
        wait = start_on_group(rows, sent, route).wait if half is None else half.start(rows, sent, route)
        self.under_way = rows, sent, wait

    def wait(self) -> torch.Tensor:
        assert self.under_way is not None, "an exchange was waited for that nobody started"
        (rows, _, wait), self.under_way = self.under_way, None
        wait()
        return rows


def start_on_group(rows: torch.Tensor, sent: torch.Tensor, route: Route) -> Any:
    """Start the exchange of `sent`, into `rows`, on the group of `route`. Gives a work, which has a `wait`."""
    return dist.all_to_all_single(
        rows, sent, list(route.output_splits), list(route.input_splits), group=route.group, async_op=True
    )


class _Leave(torch.autograd.Function):
    """Rows leave; in backward their gradients are waited for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        if exchange.given is None:
            exchange.start(x, exchange.route)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    """Rows are waited for; in backward their gradients leave."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        if exchange.given is not None:
            rows, exchange.given = exchange.given, None
            return rows
        return exchange.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.start(gradient, ctx.exchange.route.back())
        return gradient.new_zeros(0), None


def is_exchange(node: Any) -> bool:
    """Whether an autograd node is one end of an exchange."""
    return isinstance(getattr(node, "exchange", None), _Exchange)
