"""What works row by row, in blocks of a declared number of rows: blocks, sums and comparisons, which head and layers
share, and the function of autograd that layers are made of.

Which sum: rows 0 to R-1 are the first block, and so on. Outputs and gradients of inputs are made block by block. The
gradient of each weight is that of the blocks, each in the dtype that autograd gives it, added up in order in fp32 or
wider and rounded once. The bits depend on R and on the batch, on nothing else (contract 20).

How: forward runs each block without a graph, and keeps the inputs and one number of each row of the results. Backward
runs each block again under autograd, and compares these numbers, which are sums over the bits of a row: where one
differs, no gradient is given. In a trace, which has no values, the second block stands for all that follow it
(`REPEAT`), so that a million tokens are traced as fast as two blocks.

Cost: the forward once more; for each call a wait for the device, and for each weight an fp32 sum.
Not covered: second derivatives; what draws random numbers, whose second run is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.tensors.kinds import tensors_in
from lowtide.tensors.private import FakeTensor, TorchDispatchMode, schema_of, top_saved_tensors_hooks

REPEAT = "planning_repeat"
"""An operator of traces: what runs from here on stands for so many times as much, until it is given 0."""
_AS_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Run = Callable[[slice, list[Any], list[Any]], tuple[torch.Tensor, ...]]
"""The results for a block, from its number, its rows of the inputs, and the weights; the first dimension is rows."""


@dataclass(frozen=True, slots=True)
class RowWise:
    """What is done to each block."""

    run: Run
    rows: int
    num_inputs: int
    what: str
    """Its name in messages: 'a layer in blocks'."""
    fix: str
    """What to do where it is refused."""

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results for all rows. `tensors`: inputs of as many rows each, and the weights."""
        made: tuple[torch.Tensor, ...] = _InDeclaredBlocks.apply(self, *tensors)
        return made


class _InDeclaredBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: RowWise, *tensors: Any) -> tuple[torch.Tensor, ...]:
        inputs, weights = list(tensors[: work.num_inputs]), list(tensors[work.num_inputs :])
        num_rows, kind = len(inputs[0]), inputs[0].device.type
        # Casts of one block: the cache of autocast would hold copies of all weights, without a graph.
        ctx.autocast = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}
        results: list[torch.Tensor] = []
        numbers = inputs[0].new_empty(num_rows, dtype=torch.int64)
        with torch.autocast(kind, **ctx.autocast, cache_enabled=False):
            for part in declared_blocks(num_rows, work.rows, inputs[0]):
                made = work.run(part, [each[part] for each in inputs], weights)
                if not results:
                    results = [each.new_empty((num_rows, *each.shape[1:])) for each in made]
                for whole, block in zip(results, made, strict=True):
                    whole[part] = block
                numbers[part] = _numbers_of_rows(made)
                del made, block
        for each in (*results, numbers):
            name_at_once(each)
        ctx.work = work
        ctx.save_for_backward(*inputs, numbers, *weights)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *of_results: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work: RowWise = ctx.work
        if torch.is_grad_enabled():
            raise RuntimeError(f"lowtide: a second derivative (create_graph) of {work.what} is not covered; {work.fix}")
        saved, num_inputs = list(ctx.saved_tensors), work.num_inputs
        inputs, numbers, weights = saved[:num_inputs], saved[num_inputs], saved[num_inputs + 1 :]
        needs, needs_weights = ctx.needs_input_grad[1 : num_inputs + 1], ctx.needs_input_grad[num_inputs + 1 :]
        kind = inputs[0].device.type
        again = torch.empty_like(numbers)
        of_inputs = [torch.empty_like(each) if need else None for each, need in zip(inputs, needs, strict=True)]
        sums: list[torch.Tensor | None] = [None] * len(weights)
        for part in declared_blocks(len(inputs[0]), work.rows, inputs[0]):
            with torch.enable_grad(), _unwatched(), torch.autocast(kind, **ctx.autocast, cache_enabled=False):
                given = [_leaf(each[part], need) for each, need in zip(inputs, needs, strict=True)]
                leaves = [_leaf(each, need) for each, need in zip(weights, needs_weights, strict=True)]
                made = work.run(part, given, leaves)
            again[part] = _numbers_of_rows(made)
            wanted = [each for each in (*given, *leaves) if each.requires_grad]
            pairs = [(each, of[part]) for each, of in zip(made, of_results, strict=True) if each.requires_grad]
            roots, of_roots = zip(*pairs, strict=True) if pairs else ((), ())
            gradients = list(torch.autograd.grad(roots, wanted, of_roots, allow_unused=True))
            del given, leaves, made, wanted, pairs, roots, of_roots
            for whole in (each for each in of_inputs if each is not None):
                whole[part] = 0.0 if gradients[0] is None else gradients[0]
                del gradients[0]
            for number, need in enumerate(needs_weights):
                if need:
                    sums[number] = _added(sums[number], gradients.pop(0))
        compare_again(numbers, again, work.what, work.fix)
        totals = zip(sums, weights, strict=True)
        return None, *of_inputs, *(None if total is None else total.to(weight.dtype) for total, weight in totals)


def _added(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The declared sum, with the next block's gradient."""
    if gradient is None:
        return total
    if total is None:  # a copy: of weights that are added up autograd gives one gradient for all
        return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return total.add_(gradient)


def name_at_once(tensor: torch.Tensor) -> None:
    """Write nothing to a tensor that blocks have filled. A storage bears the name of what wrote to it last, with a
    number that counts such writes; the blocks of a trace are fewer than those of the step that is planned."""
    tensor.detach()[:0].zero_()


def _leaf(tensor: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(needs_gradient)


def _numbers_of_rows(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A whole number for each row, in which all bits of its results are."""
    values = [each.detach().reshape(len(each), -1) for each in results]
    sums = [each.view(_AS_INTEGERS[each.element_size()]).sum(1, dtype=torch.int64) for each in values]
    return torch.stack(sums).sum(0)


class RowsApart(TorchDispatchMode):
    """Raises an error where an operator lets rows talk to each other, as far as shapes show it. `refusal` makes the
    error of a reason.

    The number of rows is a prime that no other dimension has, so the dimension of rows is known by its size. An
    operator that is given such a dimension must give one back, and must not work along it. Shapes do not show an
    operator that mixes rows by numbers and keeps all sizes, such as an index; a run of real tensors does."""

    num_rows = 10_007

    def __init__(self, refusal: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refusal = refusal

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        given = {argument.name: argument.default_value for argument in schema_of(op).arguments}
        given |= {**dict(zip(given, args, strict=False)), **kwargs}
        reason = self._why_not(op, given, tensors_in(result))
        if reason:
            raise self._refusal(f"{reason} ({op})")
        return result

    def _why_not(self, op: Any, given: dict[str, Any], results: list[torch.Tensor]) -> str:
        if torch.Tag.nondeterministic_seeded in op.tags:
            return "it draws random numbers"
        rows_of_results = [self._rows_in(each) for each in results if each.numel()]
        if not any(self._rows_in(each) for each in tensors_in(given)):
            begins = any(rows_of_results) and str(op).startswith(_PLACES)
            return "what it gives for a row depends on its place in what it is given" if begins else ""
        first = next((value for value in given.values() if isinstance(value, torch.Tensor)), None)
        along = [] if first is None else [dim in self._rows_in(first) for dim in _dims_of(op, given, first)]
        is_mixed = any(along) or any(len(rows) != 1 for rows in rows_of_results)
        return "what it gives for a row depends on other rows" if is_mixed else ""

    def _rows_in(self, tensor: torch.Tensor) -> list[int]:
        return [dim for dim, size in enumerate(tensor.shape) if size and size % self.num_rows == 0]


_PLACES = ("aten.arange", "aten.slice", "aten.linspace", "aten.tril_indices", "aten.eye")
_BY_PLACE = ("conv", "pool", "_norm", "upsample", "pad", "grid")
"""Parts of the names of operators that work on all dimensions but the first."""


def _dims_of(op: Any, given: dict[str, Any], tensor: torch.Tensor) -> Iterable[int]:
    """The dimensions of its first tensor along which an operator works, as its schema and its name say it."""
    if op.is_view:
        return ()
    if "normalized_shape" in given:
        return range(tensor.ndim - len(given["normalized_shape"]), tensor.ndim)
    if any(part in str(op) for part in _BY_PLACE):
        return range(1, tensor.ndim)
    dims = given.get("dim", given.get("dims", ()))
    if isinstance(dims, int):
        dims = (dims,)
    elif not dims and "dims" in given:  # all
        dims = range(tensor.ndim)
    return [dim % max(1, tensor.ndim) for dim in dims or ()]


def _unwatched() -> contextlib.AbstractContextManager[Any]:
    """Inside, whoever watches what is saved does not see what one block saves for the moment."""
    if top_saved_tensors_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def slices(num_rows: int, rows: int, like: torch.Tensor | None = None) -> list[slice]:
    """So many rows at a time."""
    return [slice(start, start + rows) for start in range(0, num_rows, rows)]


def declared_blocks(num_rows: int, rows: int, like: torch.Tensor) -> Iterator[slice]:
    """The blocks of `rows` rows in order; of a trace only two, of which the second counts for all that follow."""
    parts = slices(num_rows, rows)
    if not isinstance(like, FakeTensor) or len(parts) <= 2:
        yield from parts
        return
    yield parts[0]
    _repeat()(like, num_rows / rows - 1)
    yield parts[1]
    _repeat()(like, 0.0)


@functools.lru_cache(maxsize=1)
def _repeat() -> Any:
    """Registered on first use: who never plans never sees it."""
    torch.library.define(f"lowtide::{REPEAT}", "(Tensor like, float times) -> Tensor")

    @torch.library.register_fake(f"lowtide::{REPEAT}")
    def _(like: torch.Tensor, times: float) -> torch.Tensor:
        return like.new_empty(0)

    return torch.ops.lowtide.planning_repeat


def compare_again(first: torch.Tensor, again: torch.Tensor, what: str, fix: str) -> None:
    """RuntimeError unless a second run gave the very bits of the first."""
    if isinstance(first, FakeTensor) or torch.equal(first.view(torch.uint8), again.view(torch.uint8)):
        return
    raise RuntimeError(
        f"lowtide: {what} gave other values in the backward pass than in the forward pass, so its gradients would be "
        "those of another step; what it reads changed without a version that counts it, or it does not repeat itself "
        f"on this device (torch.use_deterministic_algorithms); {fix}"
    )
