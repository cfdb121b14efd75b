"""Weight gradients that are put off: of the `nn.Linear` modules of a stage, and of what calls `linear` by itself.

What: a schedule may split a backward into I, the gradient of the input that another rank waits for, and W, the
gradients of the weights, which can fill a wait. Inside `forward(chunk)` `linear` and `grouped_linear` record a backward
that, inside `put_off(chunk)`, gives the gradient of the input and keeps the weight's as a closure; `run(chunk)` runs
those. A pipeline has the `nn.Linear` modules of its stages call `linear` (`enter`).
Why not autograd's graph, as torch's runtime splits it: its walk runs custom functions twice, and recomputes a
checkpointed block once more for each group of parameters.
Why a stand-in for the weight in the graph: a function that returned no gradient for the weight itself would still wake
the weight's hooks, with None. The stand-in is a leaf that nobody looks at; the closure ends in the weight's own
accumulation node, whose hooks then fire once, as in a plain backward.
Why the same bits: the products are those of torch's own formulas, and the gradients of a weight that a chunk uses more
than once are summed up before they are added, as autograd does.

With `most_kept` every backward puts off, and a half of a pair (overlap.py) that waits for an exchange while no other
half can run has the oldest *stretch* run: what was put off from one start of an exchange, or wait, to the next. That is
one order, the same in every run and on every rank, whatever the clock says. After each action, chunks
beyond `most_kept` are run; at the end of the step, all. A stage adds up its chunks in the order of their backwards, so
bits are those of a backward that puts nothing off. Products run one by one; a weight's are added up when all uses of
the forward have come, or the backward is over.

Cost: input and output gradient of each such call stay from I to W, or for `most_kept` chunks more. Nothing is copied.
The call goes through a function written in Python, 10 to 20 us.
Not covered: other modules, which do their weights in I; a weight that a stage also uses in another way, as far as the
first step shows it (refused); double backward; DDP inside a stage with a split backward; budgets beside `most_kept`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lowtide.errors import ConfigError
from lowtide.tensors.compiled import ForwardPatch, compiled_parts
from lowtide.tensors.kinds import is_plain_or_fake
from lowtide.tensors.private import disable_current_modes

Chunk = tuple[int, int]
"""Stage, micro-batch."""
_Closure = Callable[[], torch.Tensor]
_Uses = list[tuple[GradientEdge, _Closure]]
"""Of a weight in one chunk: the places in the graph that gradients are of (perhaps of a cast), and what gives these."""
_Stretch = list[Callable[[], object]]
"""What was put off from one exchange to the next, in order: products, and sums of weights whose uses have all come."""
_WEIGHT = 1
"""The place of the weight among the inputs of the functions of this file."""


class _PutOff:
    """What one chunk has put off: of each weight, the closures that give its gradients, in order of the backward."""

    def __init__(self) -> None:
        self.is_in_backward = False
        """Whether I runs. A backward at any other time (a step that is observed inside the forward) is a plain one."""
        self.num_uses: Counter[Any] = Counter()
        """Of each weight in the forward, by its leaf in the graph."""
        self.casts: set[tuple[Any, Any]] = set()
        """Nodes of the graph: autocast's cast of a weight, and the bias beside it."""
        self._closures: dict[Any, _Uses] = {}
        """Of weights of which not all uses have come."""
        self._ready: _Stretch = []
        """What nobody has taken yet."""
        self.watch: Any = None
        """Of a step that is observed: it numbers inputs, and is told of what a plain backward does at once."""

    def add(self, edge: GradientEdge, number: int, closure: _Closure, of_output: torch.Tensor) -> None:
        """number: of the input, for the watch. of_output: the gradient that the closure holds beside it."""
        if self.is_in_backward:
            leaf = _leaf_of(edge.node)
            uses = self._closures.setdefault(leaf, [])
            # It computes when it is first called, and what sums up has that.
            uses.append((edge, functools.cache(_as_in_backward(closure, of_output.device.type))))
            self._ready.append(uses[-1][1])
            if len(uses) == self.num_uses[leaf]:
                self._ready.append(functools.partial(_add_up, self._closures.pop(leaf)))
            return
        gradient = closure()
        if self.watch is not None:
            self.watch.made(number, of_output, gradient)
        torch.autograd.backward((edge,), (gradient,))

    def take(self) -> _Stretch:
        """What can be computed, each once. When the backward is over this is all."""
        if not self.is_in_backward:
            self._ready += (functools.partial(_add_up, uses) for uses in self._closures.values())
            self._closures = {}
        taken, self._ready = self._ready, []
        return taken


def _add_up(uses: _Uses) -> None:
    """The gradients of one weight. Casts of it end in one sum, as in a plain backward."""
    found: dict[tuple[Any, int], tuple[GradientEdge, torch.Tensor]] = {}
    with torch.no_grad():  # the forward in which it may run has hooks for what a graph saves
        while uses:
            edge, closure = uses.pop(0)
            place, gradient = (edge.node, edge.output_nr), closure()
            found[place] = edge, found[place][1] + gradient if place in found else gradient
    edges, gradients = zip(*found.values(), strict=True)
    torch.autograd.backward(edges, gradients)


def _leaf_of(node: Any) -> Any:
    """The leaf behind casts and views of a weight; where several tensors made it, where they come together."""
    while not hasattr(node, "variable") and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node


def _as_in_backward(closure: _Closure, kind: str) -> _Closure:
    """Under the autocast of now, whatever that of the forward is in which it may run."""
    dtype, is_on = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def run() -> torch.Tensor:
        with torch.no_grad(), torch.autocast(kind, dtype=dtype, enabled=is_on):
            return closure()

    return run


_CHUNK: ContextVar[_PutOff | None] = ContextVar("lowtide_pipeline_chunk", default=None)
"""Set while a forward or an I of a chunk runs: models call `linear` as a plain function, and have no object to ask."""


@contextlib.contextmanager
def _within(chunk: _PutOff) -> Iterator[None]:
    token = _CHUNK.set(chunk)
    try:
        yield
    finally:
        _CHUNK.reset(token)


class WeightGradients:
    """The weight gradients that one rank has put off."""

    def __init__(self, *, most_kept: int | None = None) -> None:
        """most_kept: backwards that the schedule does not split put off too, for waits to run
        (`Overlap(weight_gradients=...)`), and those of so many chunks may stay for later waits when their backward is
        over; absent, only I puts off, and only W runs."""
        if most_kept is not None and most_kept < 0:
            raise ConfigError(f"lowtide.pipeline.WeightGradients: most_kept must be 0 or more, not {most_kept}")
        self.most_kept = most_kept
        self.of_stage: Callable[[int], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """Around what is added up for a stage. The step that is under way sets it."""
        self._chunks: defaultdict[Chunk, _PutOff] = defaultdict(_PutOff)
        """Whose backward is not over."""
        self._waiting: deque[tuple[Chunk, _Stretch]] = deque()
        """Stretches, in the order in which they were put off."""
        self._linears: list[ForwardPatch] = []

    def enter(self, stages: Collection[nn.Module]) -> None:
        """Have the `nn.Linear` modules of these stages call `linear`, until `leave()`.

        Left as they are: modules of other classes or with a forward of their own, inside of compiled ones, with a
        weight that another module has too; and calls with a weight that tensor parallelism shares out.
        """
        modules = {id(module): module for stage in stages for module in stage.modules()}
        num_holders = Counter(id(held) for module in modules.values() for held in module.parameters(recurse=False))
        compiled = {id(part) for stage in stages for each in compiled_parts(stage).values() for part in each.modules()}
        for number, module in modules.items():
            if type(module) is not nn.Linear or "forward" in vars(module) or number in compiled:
                continue
            if num_holders[id(dict(module.named_parameters(recurse=False)).get("weight"))] == 1:
                around = functools.partial(_as_linear, module)
                self._linears.append(ForwardPatch(module, around, is_below=True))

    def leave(self) -> None:
        """Leave the stages as they were. Idempotent."""
        while self._linears:
            self._linears.pop().undo()

    def forward(self, chunk: Chunk) -> contextlib.AbstractContextManager[None]:
        """Around the forward of a chunk whose backward is split."""
        return _within(self._chunks[chunk])

    def watched(self, watch: Any) -> contextlib.AbstractContextManager[None]:
        """Around a whole step of a stage, whose backward is a plain one."""
        chunk = _PutOff()
        chunk.watch = watch
        return _within(chunk)

    @contextlib.contextmanager
    def put_off(self, chunk: Chunk) -> Iterator[None]:
        """Around the I of a chunk, which may run its forward again."""
        put_off = self._chunks[chunk]
        put_off.is_in_backward = True
        put_off.casts.clear()  # a layer that runs again has its casts of the forward
        try:
            with self.forward(chunk):
                yield
        finally:
            put_off.is_in_backward = False
        self.end_stretches()
        del self._chunks[chunk]

    def end_stretches(self) -> None:
        """An exchange starts, or is waited for."""
        self._waiting += ((chunk, taken) for chunk, put_off in self._chunks.items() if (taken := put_off.take()))

    def at_wait(self, *, is_alone: bool) -> bool:
        """A half waits for an exchange. Where it is alone, run the oldest stretch; False if nothing was run."""
        self.end_stretches()
        if not is_alone or self.most_kept is None or not self._waiting:
            return False
        with disable_current_modes():
            self._run(*self._waiting.popleft())
        return True

    def run(self, chunk: Chunk) -> None:
        """Add up what the chunk has put off; beside `most_kept` after all that was put off before it."""
        last = max((number for number, each in enumerate(self._waiting) if each[0] == chunk), default=-1)
        for each in list(self._waiting)[: last + 1]:
            if self.most_kept is not None or each[0] == chunk:
                self._waiting.remove(each)
                self._run(*each)

    def _run(self, chunk: Chunk, stretch: _Stretch) -> None:
        with self.of_stage(chunk[0]):
            while stretch:
                stretch.pop(0)()

    def run_most(self, split: Collection[Chunk]) -> None:
        """Add up the oldest chunks, until so many are left as may be kept. split: those that their W will run."""
        kept = [chunk for chunk in dict.fromkeys(chunk for chunk, _ in self._waiting) if chunk not in split]
        for chunk in kept[: max(0, len(kept) - (self.most_kept or 0))]:
            self.run(chunk)

    def finish(self) -> None:
        """At the end of a step: add up what is left."""
        while self._waiting:
            self._run(*self._waiting.popleft())

    def forget(self) -> None:
        """After a step that failed."""
        self._chunks.clear()
        self._waiting.clear()


def is_put_off() -> bool:
    """Whether weight gradients of what runs now can be put off."""
    return _CHUNK.get() is not None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, with weight gradients that a pipeline can put off. Raises ConfigError for a layer
    with a bias that runs twice in a micro-batch under autocast."""
    edge, chunk = None, _CHUNK.get()
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        if chunk is None and _is_cast(weight, dtype):
            return F.linear(x, weight, bias)
        if chunk is not None and _is_cast(weight, dtype) and weight.requires_grad and torch.is_grad_enabled():
            edge = _edge_of_cast(weight)
            if bias is not None and _is_cast(bias, dtype) and bias.requires_grad:
                use = edge.node, get_gradient_edge(bias).node
                if use in chunk.casts:
                    raise ConfigError(
                        f"lowtide.pipeline: a linear layer of shape {list(weight.shape)} with a bias runs twice in one "
                        "micro-batch under autocast, where the gradients of its bias would be added up in another "
                        "type; give the layer no bias, the stage bf16 weights, or the pipeline no weight_gradients"
                    )
                chunk.casts.add(use)
        x, weight = (each.to(dtype) if _is_cast(each, dtype) else each for each in (x, weight))
        bias = bias.to(dtype) if bias is not None and _is_cast(bias, dtype) else bias
    return _call(_Linear, x, weight, bias, edge)


def _is_cast(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast casts it."""
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)


def _edge_of_cast(weight: torch.Tensor) -> GradientEdge:
    """Where autocast's own cast of a weight stands in the graph. It keeps one for several uses, whose gradients are
    added up there, in the type of the cast. A product of no rows shows it."""
    target = get_gradient_edge(weight).node
    node: Any = F.linear(weight.new_empty(0, weight.shape[-1]), weight).grad_fn
    while (following := next(each for each, _ in node.next_functions if each is not None)) is not target:
        node = following
    return GradientEdge(node, 0)


def _as_linear(module: nn.Linear, forward: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
    weight = module.weight
    if len(args) != 1 or kwargs or not all(map(is_plain_or_fake, (*args, weight))):
        return forward(*args, **kwargs)
    if not weight.is_contiguous() or weight.is_complex():  # of which torch computes other products
        return forward(*args, **kwargs)
    return linear(args[0], weight, module.bias)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`, with weight gradients that a pipeline can put off.

    x: `[rows, in]`, sorted by group. weight: `[groups, in, out]`. offsets: int32, where the rows of each group end.
    """
    return _call(_Grouped, x, weight, offsets, None)


def _call(
    function: type[Any], x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor | None, edge: GradientEdge | None
) -> torch.Tensor:
    """edge: of the weight in the graph, where it is not its own."""
    chunk = _CHUNK.get()
    put_off = None
    if chunk is not None:
        if weight.requires_grad and not chunk.is_in_backward:
            # Without gradients too: a checkpoint that runs the call again has it count here.
            chunk.num_uses[_leaf_of(get_gradient_edge(weight).node)] += 1
        if weight.requires_grad and torch.is_grad_enabled():
            number = -1 if chunk.watch is None else chunk.watch.number_of(x)
            put_off = functools.partial(chunk.add, edge or get_gradient_edge(weight), number)
            weight = weight.detach().requires_grad_()
    output: torch.Tensor = function.apply(x, weight, other, put_off)
    return output


def weights_behind(
    tensors: Sequence[Any], *, until: Sequence[Any] = (), mixed: list[Any] | None = None
) -> list[torch.Tensor]:
    """The leaves that a backward from these tensors adds gradients to, those that are put off among them. The graph is
    followed as far as the tensors of `until`. `mixed` is given those that are put off and also used in another way."""
    seen = set(_nodes_of(until))
    waiting = _nodes_of(tensors)
    found = []
    put_off, others = set(), set(waiting)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if (weight := getattr(node, "variable", None)) is not None:
            found.append(weight)
        following = [each for each, _ in node.next_functions]
        leaf = None
        if isinstance(call := getattr(node, "put_off", None), functools.partial):
            following[_WEIGHT] = None  # a stand-in for the weight itself
            leaf = _leaf_of(call.args[0].node)
            put_off.add(leaf)
        others.update(following)
        waiting += [each for each in (*following, leaf) if each is not None]
    if mixed is not None:
        mixed += (node.variable for node in put_off & others if hasattr(node, "variable"))
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
        of_weight = _given_or_put_off(ctx, lambda: flat.t() @ x.reshape(-1, x.shape[-1]), gradient)
        return for_x, of_weight, for_bias, None


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
        of_weight = _given_or_put_off(ctx, lambda: F.grouped_mm(x.t(), gradient, offs=offsets), gradient)
        return for_x, of_weight, None, None


def _given_or_put_off(ctx: Any, of_weight: _Closure, of_output: torch.Tensor) -> torch.Tensor | None:
    if not ctx.needs_input_grad[1]:
        return None
    if ctx.put_off is None:
        return of_weight()
    ctx.put_off(of_weight, of_output)
    return None
