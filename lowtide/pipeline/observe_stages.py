"""One micro-batch through all stages of a pipeline, each of which is observed: what a chunk makes, saves and frees.

What: `observe_stages` is called by all ranks. The largest micro-batch goes from stage to stage through the messages of
the pipeline; each stage observes a whole step of it, forward and backward (one extra step that leaves no trace, and
whose saved activations are elsewhere meanwhile). The last stage's step has the loss in it.
Where stages exchange rows with other ranks (experts), how many come is up to the routing. So `with_rows_of_all` takes
all micro-batches through the stages, forward alone, and counts their rows (turns.py has what follows from them). Inside
an `ExchangeWatch` the exchanges of this thread are as ever, and written down.
Why through messages: what a stage is given in the real step has just that shape, dtype and need of a gradient.
Cost: one step of one micro-batch, one stage after the other; with exchanges the forwards of all others too. Not
covered: what the loss saves is kept and counted, since it is the caller's own function, which hooks of a stage do not
see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.profile import Profile, Shift, StayingBytes, byte_curve
from lowtide.errors import ConfigError
from lowtide.pipeline.exchange import Route, start_on_group
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.overlap import BACKWARD, Event, Overlap, Start
from lowtide.pipeline.rank_plan import StageChunk
from lowtide.pipeline.schedule import Kind, Result
from lowtide.pipeline.torch_stage import Tensors, arguments_of, keep_whole, passed_on
from lowtide.pipeline.turns import Exchange, Rows, growth_of, with_more_rows
from lowtide.pipeline.weight_gradients import WeightGradients, weights_behind
from lowtide.profiling.observe_call import observe_call
from lowtide.profiling.step_recorder import StepRecorder
from lowtide.profiling.untouched import untouched
from lowtide.tensors.fsdp import fsdp_modules, whole_bytes
from lowtide.tensors.kinds import device_of, tensors_in
from lowtide.tensors.live_bytes import unique_bytes
from lowtide.tensors.private import disable_current_modes, dispatch_modes, tree_leaves
from lowtide.tensors.ranks import gather


class _Output:
    """What a stage gave in the observed step, for the next one."""

    def __init__(self) -> None:
        self.tensors: Tensors = ()
        self.recorder: StepRecorder | None = None
        """Of the step. (A variable of the function that notes it would be put back afterwards.)"""
        self.gathered: tuple[int, ...] = ()
        """At each operator, the bytes of weights that FSDP2 has gathered."""
        self.of_loss: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Weights that only the loss knows, and their gradients, which the observed step must not change."""

    def note(self, given: Tensors) -> None:
        """Copies, since the step lets go of its own."""
        with disable_current_modes(), torch.no_grad():
            self.tensors = tuple(
                None if each is None else each.detach().clone().requires_grad_(each.requires_grad) for each in given
            )


def observe_stages(
    pipeline: Pipeline, inputs: Sequence[Any] | None, targets: Sequence[Any] | None
) -> dict[int, StageChunk]:
    """One micro-batch goes through all stages; what was seen of this rank's."""
    with pipeline.ending_all("the step that is observed"):
        number, is_steady = _largest(pipeline, inputs)
        found: dict[int, StageChunk] = {}

        def observe(stage: int, args: tuple, kwargs: dict[str, Any]) -> Tensors:
            is_last = stage == pipeline.schedule.num_stages - 1
            target = targets[number] if is_last and targets is not None else None
            output = _Output()
            later = _KeptUntilW()
            with later if _is_split(pipeline, stage) else contextlib.nullcontext():
                profile, exchanges = _observe_stage(pipeline, stage, (args, kwargs), output, target)
            if later.kept and exchanges:
                pipeline.close()
                return observe(stage, args, kwargs)
            profile, put_off_bytes, product_bytes = later.within(profile)
            whole, more, travel = whole_bytes(pipeline.stages[stage])
            found[stage] = StageChunk(
                gathered_bytes=whole,
                whole_gradient_bytes=more,
                travel_bytes=travel,
                away=_away(output.gathered, profile.num_forward_ops, whole),
                put_off_bytes=put_off_bytes,
                product_bytes=product_bytes,
                profile=profile if is_steady and not exchanges else profile.without_sizes(),
                exchanges=exchanges,
                input_bytes=_bytes_of(args) if stage else 0,
                output_bytes=0 if is_last else _bytes_of(output.tensors),
                input_gradient_bytes=_bytes_of(args, with_gradient=True) if stage else 0,
                output_gradient_bytes=0 if is_last else _bytes_of(output.tensors, with_gradient=True),
            )
            return output.tensors

        _through(pipeline, inputs, number, observe)
    return found


def with_rows_of_all(
    pipeline: Pipeline, inputs: Sequence[Any] | None, chunks: Mapping[int, StageChunk]
) -> dict[int, StageChunk]:
    """The same chunks, with room for the rows of every micro-batch. Collective, where any stage exchanges rows. Raises
    ConfigError where they cannot be told from those of the one that was observed."""
    most = {
        stage: [(e.num_sent, e.num_received) for e in chunk.exchanges if e.start < chunk.profile.num_forward_ops]
        for stage, chunk in chunks.items()
    }
    with pipeline.ending_all("the rows of all micro-batches"):
        for number in range(pipeline.schedule.num_micro_batches):
            _through(pipeline, inputs, number, functools.partial(_count, pipeline, most))
        return {stage: _grown(stage, chunk, most[stage]) for stage, chunk in chunks.items()}


def _through(
    pipeline: Pipeline,
    inputs: Sequence[Any] | None,
    number: int,
    use: Callable[[int, tuple, dict[str, Any]], Tensors],
) -> None:
    """A micro-batch goes through all stages. `use` makes of what a stage is given what it passes on."""
    schedule, rank, transport = pipeline.schedule, pipeline.rank, pipeline.transport
    given: Tensors = ()
    for stage in schedule.stages_of(rank):
        if stage == 0:
            assert inputs is not None
            args, kwargs = arguments_of(inputs[number])
        else:
            result = Result(Kind.FORWARD, stage - 1, number)
            if (source := schedule.rank_of_stage[stage - 1]) != rank:
                assert transport is not None
                transport.ask(result, source=source)
                given = transport.read(result)
            args, kwargs = given, {}
        given = use(stage, args, kwargs)
        reader = schedule.reader(Result(Kind.FORWARD, stage, number))
        if reader not in (None, rank):
            assert transport is not None and reader is not None
            transport.send(Result(Kind.FORWARD, stage, number), given, to=reader)
    if transport is not None:
        transport.finish()


def _observe_stage(
    pipeline: Pipeline, stage: int, given: tuple[tuple, dict[str, Any]], output: _Output, target: Any
) -> tuple[Profile, tuple[Exchange, ...]]:
    is_last, module = stage == pipeline.schedule.num_stages - 1, pipeline.stages[stage]

    def use(call: Callable[[], Any]) -> Any:
        output.recorder = _recorder()
        if output.recorder is not None:
            for each in tensors_in((given, target)):  # of the batch parts, which count as a whole
                output.recorder.state.storages.enroll(each, "input", "input")
        made = call()
        keep_whole(module)
        if not is_last:
            made = passed_on(made, stage)
            output.note(made)
            _refuse_idle(stage, made)
        else:
            assert pipeline.loss is not None
            loss = pipeline.loss(made, target)
            own = set(module.parameters())
            behind = weights_behind([loss], until=tree_leaves(made))
            output.of_loss = output.of_loss or [(weight, weight.grad) for weight in behind if weight not in own]
            for weight, _ in output.of_loss:
                weight.grad = None
            made = (loss,)
            del loss
        places = tuple(_Place.apply(each) for each in made if each is not None)
        del made
        torch.empty(0)  # the last operator of the forward, at which what it gave is gone
        return places

    with _watch(pipeline) as watch:
        profile = observe_call(module, *given, None, use=use)
    keep_whole(module, is_kept=False)
    for each in fsdp_modules(module):
        each.reshard()
    for weight, gradient in output.of_loss:
        weight.grad = gradient
    assert output.recorder is not None
    saves = output.recorder.saves
    held = {node.name for index, node in saves.nodes.items() if index in saves.kept}
    num_ops = len(profile.op_bytes)
    output.gathered = byte_curve(output.recorder.gathered, num_ops)
    # An input that has gone through a hook of FSDP2's is a node, and counts with what the chunk was given as well.
    given_nodes = {node.name for node in saves.nodes.values() if node.storage.kind == "input"}
    twice = sum(site.nbytes for site in profile.sites if site.name in given_nodes and site.dies >= num_ops)
    profile = kept_outside(profile, held, [nbytes + twice for nbytes in output.gathered])
    if torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(device_of(module).type):
        profile = with_casts_of_before(profile, output.recorder.casts)
    return profile, tuple(watch.exchanges)


def _away(gathered: Sequence[int], turn: int, whole_bytes: int) -> tuple[int, ...]:
    """Of the weights of a stage that its last forward has resharded, what is not there at each operator. Empty where
    FSDP2 leaves all of them gathered."""
    least = min(gathered[turn - 1 : turn + 1])
    away = tuple(max(0, whole_bytes - max(least, nbytes)) for nbytes in gathered)
    return away if any(away) else ()


def _refuse_idle(stage: int, made: Tensors) -> None:
    """ConfigError for a stage that has no backward."""
    why = ""
    if (recorder := _recorder()) is not None and not recorder.num_ops:
        why = "which computes nothing"
    elif not any(each is not None and each.requires_grad for each in made):
        why = "from which nothing goes on that needs a gradient (it is frozen, or detached)"
    if why:
        raise ConfigError(
            f"pipeline: a budget cannot be planned for stage {stage}, {why}; write rules: recompute, swap, keep"
        )


class _Place(torch.autograd.Function):
    """In place of an output or a loss, of which a pipeline keeps its place in the graph and no memory."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.new_empty(()).expand(output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _watch(pipeline: Pipeline) -> ExchangeWatch:
    overlap = getattr(pipeline.run_pair, "__self__", None)
    return ExchangeWatch(overlap.start if isinstance(overlap, Overlap) else start_on_group)


def _count(pipeline: Pipeline, most: dict[int, Rows], stage: int, args: tuple, kwargs: dict[str, Any]) -> Tensors:
    """The forward of one stage, which leaves no trace but the rows that it exchanged, where they are the most."""
    module = pipeline.stages[stage]
    with untouched(module, (args, kwargs), device_of(module)), torch.no_grad(), _watch(pipeline) as watch:
        output = module(*args, **kwargs)
    if len(watch.rows) != len(most[stage]):
        raise ConfigError(
            f"pipeline: stage {stage} exchanges rows {len(most[stage])} times in one micro-batch and "
            f"{len(watch.rows)} times in another, which cannot be planned for; write rules: recompute, swap, keep"
        )
    most[stage] = [(max(a, b), max(c, d)) for (a, c), (b, d) in zip(most[stage], watch.rows, strict=True)]
    if stage == pipeline.schedule.num_stages - 1:
        return ()
    return tuple(None if each is None else each.detach() for each in passed_on(output, stage))


def _grown(stage: int, chunk: StageChunk, most: Rows) -> StageChunk:
    """As of a micro-batch with more rows than any that was seen."""
    growth = growth_of(chunk.exchanges, chunk.profile.num_forward_ops, most)
    if growth is None:
        raise ConfigError(
            f"pipeline: no row came to the experts of stage {stage} in the micro-batch that was observed, so what a "
            "row takes is not known; make micro-batches larger, or write rules: recompute, swap, keep"
        )
    grown = (
        dataclasses.replace(each, nbytes=math.ceil(each.nbytes * factor))
        for each, factor in zip(chunk.exchanges, growth, strict=True)
    )
    profile = with_more_rows(chunk.profile, chunk.exchanges, growth)
    return dataclasses.replace(chunk, profile=profile, exchanges=tuple(grown))


def kept_outside(profile: Profile, held: Collection[str], elsewhere: Iterable[int]) -> Profile:
    """The same step, in which what the loss holds too (`held`) is no node and stays: hooks of the stage do not see the
    loss. And in which `elsewhere`, bytes at each operator, does not count: weights that FSDP2 gathers. Whether those
    are there depends on what the stage did before."""
    gone = {node.name: node for node in profile.sites if node.name in held}
    num_ops = len(profile.op_bytes)
    spans = [(max(node.born, 0), min(max(node.dies, node.release), num_ops), node.nbytes) for node in gone.values()]
    spans += [(op, op + 1, -nbytes) for op, nbytes in enumerate(elsewhere)]
    hurt = [
        node.name for node in profile.nodes if node.recipe is not None and not gone.keys().isdisjoint(node.recipe.nodes)
    ]
    calls = (
        dataclasses.replace(call, why_not="the loss holds what it starts from")
        if not gone.keys().isdisjoint(call.inputs)
        else call
        for call in profile.calls
    )
    left = _with_more(profile, spans).without_recipes(hurt)
    nodes = tuple(node for node in left.nodes if node.name not in gone)
    staying = (
        StayingBytes(name=node.name, layer=node.layer, nbytes=node.nbytes, dtype=node.dtype, reason="the loss holds it")
        for node in gone.values()
    )
    return dataclasses.replace(left, nodes=nodes, calls=tuple(calls), staying=(*left.staying, *staying))


def with_casts_of_before(profile: Profile, casts: Sequence[tuple[int, int, int]]) -> Profile:
    """The same step as one of a later micro-batch, to which autocast gives the casts that it made of weights in the
    first one. `casts`: as a `StepRecorder` has them. Their nodes are older than all others of the micro-batch, so they
    run last in its backward, and the gradients of the casts wait for that; and distances are shorter by these nodes."""
    num_ops, turn = len(profile.op_bytes), profile.num_forward_ops
    backward = {name: op for op, name in reversed([*enumerate(profile.op_names)][turn:])}
    waiting = [(backward.get(f"{profile.op_names[op]}:backward", turn), num_ops, nbytes) for op, _, nbytes in casts]
    without = Shift((number, -1) for _, number, _ in casts).op
    nodes = (
        dataclasses.replace(
            node, first_sequence=without(node.first_sequence), last_sequence=without(node.last_sequence)
        )
        for node in profile.nodes
    )
    calls = (dataclasses.replace(call, end_sequence=without(call.end_sequence)) for call in profile.calls)
    return dataclasses.replace(_with_more(profile, waiting), nodes=tuple(nodes), calls=tuple(calls))


def _with_more(profile: Profile, spans: Iterable[tuple[int, int, int]]) -> Profile:
    """The same step with more bytes from one operator to another."""
    more = byte_curve(spans, len(profile.op_bytes))
    return dataclasses.replace(profile, op_bytes=tuple(map(operator.add, profile.op_bytes, more)))


def _largest(pipeline: Pipeline, inputs: Sequence[Any] | None) -> tuple[int, bool]:
    """The number of the micro-batch with the most in it, and whether all have the same shapes."""
    own = None
    if inputs is not None:
        shapes = {tuple(each.shape for each in tensors_in(entry)) for entry in inputs}
        sizes = list(map(size_of, inputs))
        own = sizes.index(max(sizes)), len(shapes) == 1
    found: tuple[int, bool] = next(each for each in gather(own, pipeline.group) if each is not None)
    return found


def size_of(entry: Any) -> int:
    """Elements of a micro-batch."""
    return sum(each.numel() for each in tensors_in(entry))


def _bytes_of(tree: Any, *, with_gradient: bool = False) -> int:
    tensors = tensors_in(tree)
    return sum(each.nbytes for each in tensors if each.requires_grad) if with_gradient else unique_bytes(tensors)


def _recorder() -> StepRecorder | None:
    """Of the step that is observed here."""
    return next((mode for mode in dispatch_modes() if isinstance(mode, StepRecorder)), None)


# -- what it puts off --------------------------------------------------------------------------------------------------


def _is_split(pipeline: Pipeline, stage: int) -> bool:
    """Whether weight gradients of this stage are put off."""
    has_w = any(each.kind is Kind.BACKWARD_WEIGHT and each.stage == stage for *_, each in pipeline.schedule.parts())
    return pipeline.weight_gradients is not None and has_w


class _KeptUntilW(contextlib.ExitStack):
    """What a stage would keep from I to W, of a whole step that is observed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[int, int]] = []
        """Of each weight gradient: the operator from which on, and how many bytes more."""
        self._inputs: list[tuple[StorageWeakRef, int]] = []
        """Storages, and their bytes."""
        self._counted: set[int] = set()
        self._products: list[int] = []
        self._recorder: StepRecorder | None = None

    def __enter__(self) -> _KeptUntilW:
        self.enter_context(WeightGradients().watched(self))
        return self

    def number_of(self, x: torch.Tensor) -> int:
        """The same for inputs of one storage."""
        storage = x.untyped_storage()
        weak = StorageWeakRef(storage)
        for number, (other, _) in enumerate(self._inputs):
            if other == weak and not other.expired():
                return number
        self._inputs.append((weak, storage.nbytes()))
        return len(self._inputs) - 1

    def made(self, number: int, of_output: torch.Tensor, gradient: torch.Tensor) -> None:
        """A weight's gradient, of the input with this number and the output's gradient, which W would make."""
        recorder = _recorder()
        if recorder is not self._recorder:  # a step that is observed once more
            self._recorder = recorder
            self.kept.clear()
            self._counted.clear()
            self._products.clear()
        nbytes = of_output.untyped_storage().nbytes() + (0 if number in self._counted else self._inputs[number][1])
        self._counted.add(number)
        self.kept.append((0 if recorder is None else recorder.num_ops, nbytes))
        self._products.append(gradient.nbytes)

    def within(self, profile: Profile) -> tuple[Profile, int, int]:
        """The same step, in which it stays; its bytes in the end; and those of the largest gradient."""
        num_ops = len(profile.op_bytes)
        profile = _with_more(profile, [(first, num_ops, nbytes) for first, nbytes in self.kept])
        total = sum(nbytes for _, nbytes in self.kept)
        return profile, total, max(self._products, default=0)


# -- its exchanges -----------------------------------------------------------------------------------------------------


class ExchangeWatch:
    """Inside, what this thread computes is a half without a partner, whose exchanges are written down."""

    def __init__(self, start: Start) -> None:
        """`start`: starts an exchange, as `Overlap` takes it."""
        self.exchanges: list[Exchange] = []
        """In the order in which they were started."""
        self._start = start
        self._recorder: StepRecorder | None = None
        self._places: dict[int, int] = {}
        """Of those that take turns, by their number in the half."""
        self._alone = Overlap(start=self._begin, log=self._note).alone(BACKWARD)

    @property
    def rows(self) -> Rows:
        return [(each.num_sent, each.num_received) for each in self.exchanges]

    def _begin(self, rows: torch.Tensor, sent: torch.Tensor, route: Route) -> Any:
        recorder = _recorder()
        if recorder is not self._recorder:  # a step that is observed once more
            self._recorder = recorder
            self.exchanges.clear()
        at = 0 if recorder is None else recorder.num_ops
        self.exchanges.append(
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
        return self._start(rows, sent, route)

    def _note(self, event: Event) -> None:
        if event.kind == "issue":
            self._places[event.number] = len(self.exchanges) - 1
        elif event.kind == "wait" and self._recorder is not None:
            place = self._places[event.number]
            each = self.exchanges[place]
            self.exchanges[place] = dataclasses.replace(each, wait=max(each.wait, self._recorder.num_ops))

    def __enter__(self) -> ExchangeWatch:
        self._alone.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._alone.__exit__(*error)
