"""Weight gradients that are put off, for the modules that ask for it by calling `linear` or `grouped_linear`.

What: a schedule may split a backward into I, the gradient of the input that another rank waits for, and W, the
gradients of the weights, which can fill a wait. Inside `forward(chunk)` these two functions record a backward that,
inside `put_off(chunk)`, gives the gradient of the input and keeps the weight's as a closure; `run(chunk)` runs those.
Why not autograd's graph, as torch's runtime splits it: its walk runs custom functions twice, and recomputes a
checkpointed block once more for each group of parameters.
Why a stand-in for the weight in the graph: a function that returned no gradient for the weight itself would still wake
the weight's hooks, with None. The stand-in is a leaf that nobody looks at; the closure ends in the weight's own
accumulation node, whose hooks then fire once, as in a plain backward.
Why the same bits: the products are those of torch's own formulas, and the gradients of a weight that a chunk uses more
than once are summed up before they are added, as autograd does.

Cost: input and output gradient of each such call stay from I to W. Nothing is copied. The call goes through a function
written in Python, 10 to 20 us.
Not covered: other modules, which do their weights in I; a weight that a stage also uses in another way, or twice under
autocast, whose uses are then added one by one; double backward; DDP inside a stage with a split backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge

Chunk = tuple[int, int]
"""Stage, micro-batch."""
_Closure = Callable[[], torch.Tensor]
_WEIGHT = 1
"""The place of the weight among the inputs of the functions of this file."""


class _PutOff:
    """What one chunk has put off: of each weight, the closures that give its gradients, in order of the backward."""

    def __init__(self) -> None:
        self.num_calls = 0
        """Of `linear` and `grouped_linear`, in the forward."""
        self.is_in_backward = False
        """Whether I runs. A backward at any other time (a step that is observed inside the forward) is a plain one."""
        self._closures: dict[Any, tuple[GradientEdge, list[_Closure]]] = {}
        """By the weight's node in the graph."""
        self.watch: Any = None
        """Of a step that is observed: it numbers inputs, and is told of what a plain backward does at once."""

    def add(self, edge: GradientEdge, number: int, closure: _Closure, of_output: torch.Tensor) -> None:
        """number: of the input, for the watch. of_output: the gradient that the closure holds beside it."""
        if self.is_in_backward:
            self._closures.setdefault(edge.node, (edge, []))[1].append(closure)
            return
        gradient = closure()
        if self.watch is not None:
            self.watch.made(number, of_output, gradient)
        torch.autograd.backward((edge,), (gradient,))

    def run(self) -> None:
        while self._closures:
            edge, closures = self._closures.pop(next(iter(self._closures)))
            gradient = closures.pop(0)()
            while closures:
                gradient = gradient + closures.pop(0)()
            torch.autograd.backward((edge,), (gradient,))


_CHUNK: ContextVar[_PutOff | None] = ContextVar("lowtide_pipeline_chunk", default=None)
"""Set while a forward or an I of a chunk runs: models call `linear` as a plain function, and have no object to ask."""


class WeightGradients:
    """The weight gradients that one rank has put off."""

    def __init__(self, *, may_be_idle: bool = False) -> None:
        """may_be_idle: it is no mistake if no stage puts any off."""
        self.may_be_idle = may_be_idle
        self._chunks: defaultdict[Chunk, _PutOff] = defaultdict(_PutOff)
        self._num_calls = 0
        """In chunks that are done."""

    @contextlib.contextmanager
    def forward(self, chunk: Chunk) -> Iterator[None]:
        """Around the forward of a chunk whose backward is split."""
        token = _CHUNK.set(self._chunks[chunk])
        try:
            yield
        finally:
            _CHUNK.reset(token)

    @contextlib.contextmanager
    def watched(self, watch: Any) -> Iterator[None]:
        """Around a whole step of a stage, whose backward is a plain one."""
        chunk = _PutOff()
        chunk.watch = watch
        token = _CHUNK.set(chunk)
        try:
            yield
        finally:
            _CHUNK.reset(token)

    @contextlib.contextmanager
    def put_off(self, chunk: Chunk) -> Iterator[None]:
        """Around the I of a chunk, which may run its forward again."""
        put_off = self._chunks[chunk]
        put_off.is_in_backward = True
        try:
            with self.forward(chunk):
                yield
        finally:
            put_off.is_in_backward = False

    @property
    def num_calls(self) -> int:
        """How many times one of the functions of this file was called in forwards whose backward is split."""
        return self._num_calls + sum(chunk.num_calls for chunk in self._chunks.values())

    def run(self, chunk: Chunk) -> None:
        """Add up what the chunk has put off. It is forgotten then."""
        put_off = self._chunks.pop(chunk)
        self._num_calls += put_off.num_calls
        put_off.run()

    def forget(self) -> None:
        """After a step that failed."""
        self._chunks.clear()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, with weight gradients that a pipeline can put off."""
    return _call(_Linear, x, weight, bias)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`, with weight gradients that a pipeline can put off.

    x: `[rows, in]`, sorted by group. weight: `[groups, in, out]`. offsets: int32, where the rows of each group end.
    """
    return _call(_Grouped, x, weight, offsets)


def _call(function: type[Any], x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        if other is not None and other.is_floating_point():
            other = other.to(dtype)
    chunk = _CHUNK.get()
    put_off = None
    if chunk is not None:
        chunk.num_calls += 1
        if weight.requires_grad and torch.is_grad_enabled():
            number = -1 if chunk.watch is None else chunk.watch.number_of(x)
            put_off = functools.partial(chunk.add, get_gradient_edge(weight), number)
            weight = weight.detach().requires_grad_()
    output: torch.Tensor = function.apply(x, weight, other, put_off)
    return output


def weights_behind(tensors: Sequence[Any], *, until: Sequence[Any] = ()) -> list[torch.Tensor]:
    """The leaves that a backward from these tensors adds gradients to, those that are put off among them. The graph is
    followed as far as the tensors of `until`."""
    seen = set(_nodes_of(until))
    waiting = _nodes_of(tensors)
    found = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (weight := getattr(node, "variable", None)) is not None:
            found.append(weight)
        following = [each for each, _ in node.next_functions]
        if isinstance(put_off := getattr(node, "put_off", None), functools.partial):
            following[_WEIGHT] = put_off.args[0].node  # of the weight itself, not of its stand-in
        waiting += [each for each in following if each is not None]
    return found


def _nodes_of(tensors: Sequence[Any]) -> list[Any]:
    return [get_gradient_edge(each).node for each in tensors if isinstance(each, torch.Tensor) and each.requires_grad]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, put_off: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put_off = put_off
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        for_x = (flat @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        for_bias = flat.sum(0) if ctx.needs_input_grad[2] else None

        def of_weight() -> torch.Tensor:
            return flat.t() @ x.reshape(-1, x.shape[-1])

        return for_x, _given_or_put_off(ctx, of_weight, gradient), for_bias, None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, put_off: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.put_off = put_off
        return F.grouped_mm(x, weight, offs=offsets)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight, offsets = ctx.saved_tensors
        for_x = F.grouped_mm(gradient, weight.transpose(-1, -2), offs=offsets) if ctx.needs_input_grad[0] else None

        def of_weight() -> torch.Tensor:
            return F.grouped_mm(x.t(), gradient, offs=offsets)

        return for_x, _given_or_put_off(ctx, of_weight, gradient), None, None


def _given_or_put_off(ctx: Any, of_weight: _Closure, of_output: torch.Tensor) -> torch.Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    if ctx.put_off is None:
        return of_weight()
    ctx.put_off(of_weight, of_output)
    return None
