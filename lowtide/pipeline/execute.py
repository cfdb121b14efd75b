"""One rank of a pipeline, for one step at a time.

What: `Pipeline.step` has torch's pipeline runtime walk this rank's row of the schedule (torch_stage.py), in which the
functions of this file carry out what computes. A forward reads its input, runs the stage's module on
leaves, and keeps the places of the outputs in the graph, not the outputs. A result is sent as soon as
it is made and those before it to the same rank are on their way; it is asked for where the schedule says, so that no
buffer waits longer than it must. The turn of a V is handed over as a leaf, without a copy.
Why exact: every stage adds up its weight gradients in the order of the micro-batches, raw, and divides once at the end
(gradients.py). One process that does the same gets the same bits. Weights of the loss, and what the inputs or targets
were computed from, are divided with them; weights that stages share are kept equal.
A failure on one rank ends the step on all, with one text that names the rank and its action (agree.py).

Cost: of the host about what one process pays for the same calls; of memory the chunks and messages that live_chunks.py
counts.
Not covered: skip connections between stages, double backward across stages, dropout that draws what one process draws
(a warning says so), FSDP2 around a stage (refused where halves of pairs take turns). After a step that failed a new
pipeline must be made.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import ConfigError, PipelineError
from lowtide.pipeline.agree import (
    FailureNote,
    agree,
    check_parallel,
    check_stages,
    checked,
    facts_of,
    facts_of_numerics,
    facts_of_optimizer,
    meet,
    named_weights,
    refuse_difference,
)
from lowtide.pipeline.experts import average_over_replicas
from lowtide.pipeline.gradients import Place, StepGradients, Tie, TiedWeights, described, gradient_norm, without_ddp
from lowtide.pipeline.live_chunks import read_by_then
from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Result, Schedule
from lowtide.pipeline.torch_stage import (
    Places,
    Tensors,
    arguments_of,
    as_tuple,
    backward,
    keep_whole,
    passed_on,
    runtime_of,
    unwritten,
    walk,
    with_places,
)
from lowtide.pipeline.transport import GroupTransport
from lowtide.pipeline.weight_gradients import WeightGradients, weights_behind
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.kinds import device_of
from lowtide.tensors.private import tree_leaves

Half = Callable[[], None]
"""A forward or a backward, with what it needs at hand. It sends its own result."""
RunPair = Callable[[Half | None, Half | None], None]
"""Carries out a forward and a backward; None stands for a half that has no partner."""


def one_after_the_other(forward: Half | None, backward: Half | None) -> None:
    """Without overlap."""
    for half in (forward, backward):
        if half is not None:
            half()


class Pipeline:
    """To be made by all ranks of `group` at once. Raises ConfigError on all of them for a mistake on any."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        group: Any = None,
        weight_gradients: WeightGradients | None = None,
        run_pair: RunPair = one_after_the_other,
        tied: Sequence[Tie] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """schedule: with transfers or without. stages: those of this rank, by number. loss: of the last stage's output
        and an entry of `targets`; its rank has one. group: absent, all ranks of the job. weight_gradients: absent, I
        does the whole backward and W nothing. run_pair: how a pair is carried out, and a forward or backward outside of
        pairs, with None for the other half. tied: the weights and buffers that several stages share, as `find_ties`
        finds them in all stages of a model, or `()`; absent, what `cut` found, and else weights of two ranks that begin
        with the same values are refused. optimizer: of this rank, whose settings are compared with those of the others
        before the first step.
        """
        self.rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self.group = group
        self.stages, self.replicas = without_ddp(stages)
        """Of stages that had DistributedDataParallel around them: that."""
        self.device = torch.device("cpu")
        """Of the stages."""
        self.loss = loss
        self.weight_gradients = weight_gradients
        self.run_pair = run_pair
        self.optimizer = optimizer
        self.weights: dict[int, list[torch.Tensor]] = {}
        """What each stage of the rank trains; the loss is part of the last one."""
        self.tied = TiedWeights((), {}, (), self.rank)
        mistake = None
        facts: dict[str, object] = {}
        named: dict[Place, torch.Tensor] = {}
        try:
            self.schedule = checked(schedule, num_ranks)
            check_stages(self.schedule, self.rank, self.stages, loss)
            self.device = device_of(nn.ModuleList(self.stages.values()))
            check_parallel(self.stages, self.replicas, takes_turns=run_pair is not one_after_the_other)
            if weight_gradients is not None and weight_gradients.most_kept is not None:
                _check_kept(weight_gradients, run_pair)
            named = named_weights(self.stages, loss, self.schedule.num_stages - 1)
            for place, weight in named.items():
                self.weights.setdefault(place.stage, []).append(weight)
            facts, tied = facts_of(self.stages.values(), tied, takes_turns=run_pair is not one_after_the_other)
            self.tied = TiedWeights(tied or (), named, self.schedule.rank_of_stage, self.rank, self.stages)
        except ConfigError as error:
            mistake = str(error)
        samples = {place: described(weight) for place, weight in named.items()} if tied is None else {}
        name = agree(schedule, mistake, facts, samples, group)
        self.transport: GroupTransport | None = None
        if num_ranks > 1:
            note = FailureNote(f"lowtide/pipeline/{name}", num_ranks)
            self.transport = GroupTransport(group, self.device, note)
        if weight_gradients is not None:
            weight_gradients.enter(self.stages.values())
        self.plans: Any = None
        """Those of `fit_stages`, as long as they are in force."""
        self._walk: _Walk | None = None
        """Of the step that is under way."""
        self.gone = read_by_then(self.schedule, self.rank)
        """Of actions of this rank: results that it has sent, and need not hold any more when it computes."""
        self.num_steps = 0
        self._failure: str | None = None

    def step(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        divide_by: float | None = None,
        keywords: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Forward and backward of one batch; its gradients are added to those of the weights.

        inputs: on the rank of the first stage, an entry for each micro-batch: a tensor, a tuple of inputs, or a mapping
        by keyword. targets: on the rank of the last stage, what the loss reads. divide_by: what the gradients are
        divided by when the last one was added, the same on all ranks; absent, the number of micro-batches. keywords: of
        each micro-batch, keyword arguments of every stage of this rank.
        Gives the loss of each micro-batch, on the rank of the last stage. Raises what a stage or the loss raised, and
        `PipelineError` on all other ranks.
        """
        if self._failure is not None:
            raise PipelineError(f"pipeline: it has ended: {self._failure}; make a new one")
        if self.num_steps == 0:
            self._open()
        self.num_steps += 1
        gradients = StepGradients(self.weights, shared=self.tied.weights)
        step = self._walk = _Walk(self, gradients, inputs, targets, keywords)
        try:
            if (mistake := self.batch_mistake(inputs, targets)) is not None:
                raise mistake
            divide_by = float(self.schedule.num_micro_batches if divide_by is None else divide_by)
            step.run(divide_by)
        except BaseException as error:
            gradients.take_back()
            if self.weight_gradients is not None:
                self.weight_gradients.forget()
            self._end(error, f"{step.at} of step {self.num_steps}")
            raise
        finally:
            self._walk = None
        gradients.give(divide_by)
        if step.draws and self.schedule.num_micro_batches * self.schedule.num_stages > 1:
            stages = ", ".join(map(str, sorted(step.draws)))
            warnings.warn(
                f"lowtide: pipeline: stage {stages} draws random numbers (dropout). One process draws them in another "
                "order, so its losses are not these to the bit",
                stacklevel=2,
            )
        return tuple(loss for _, loss in sorted(step.losses.items()))

    def gradient_norm(self) -> torch.Tensor:
        """The norm of the gradients of all stages, shared weights counted once: what `torch.nn.utils.get_total_norm`
        gives of the whole model in one process, to the bit. Collective over the ranks of the pipeline."""
        with self.ending_all("gradient_norm"):
            if self.num_steps and self.transport is not None:
                gather = functools.partial(self.transport.meet, "gradient_norm")
            else:  # before the first step there is no transport yet, and ranks meet in the group
                gather = functools.partial(meet, "gradient_norm", group=self.group)
            return gradient_norm(self.weights, self.tied.counted_elsewhere(), gather)

    def _open(self) -> None:
        """Before the first step ranks meet. Raises ConfigError on all where something differs that must be equal."""
        facts = facts_of_numerics(self.device) | facts_of_optimizer(self.optimizer)
        answers = meet("the first step", (facts, self.tied.samples()), self.group)
        refuse_difference("pipeline", [facts for facts, _ in answers])
        self.tied.check([samples for _, samples in answers])

    @property
    def modules(self) -> nn.ModuleList:
        """The stages, and the loss where it is a module."""
        return nn.ModuleList([*self.stages.values(), *([self.loss] if isinstance(self.loss, nn.Module) else [])])

    @functools.cached_property
    def runtime(self) -> Any:
        """Torch's; made for the first step."""
        return runtime_of(self.schedule, self.stages, self.rank, lambda: self._walk)

    def state(self) -> tuple[Any, ...]:
        """Where it is as it was, stages pass on the same for batches of the same shapes."""
        device_type = self.device.type
        return (
            tuple(weight.requires_grad for each in self.weights.values() for weight in each),
            tuple(stage.training for stage in self.stages.values()),
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None,
        )

    def batch_mistake(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> ConfigError | None:
        """Where this rank has an end of the model and was not given what belongs there."""
        last = self.schedule.num_stages - 1
        for name, batch, stage in (("inputs", inputs, 0), ("targets", targets, last)):
            if stage not in self.stages:
                continue
            length = len(batch) if isinstance(batch, Sized) else None
            if length != self.schedule.num_micro_batches:
                given = "none" if batch is None else f"a {type(batch).__name__}" if length is None else str(length)
                return ConfigError(
                    f"pipeline: rank {self.rank} has stage {stage} and needs {name} for "
                    f"{self.schedule.num_micro_batches} micro-batches; it was given {given}"
                )
        return None

    @contextlib.contextmanager
    def ending_all(self, at: str) -> Iterator[None]:
        """What is raised inside ends the pipeline on all ranks, as a step that fails does."""
        try:
            yield
        except BaseException as error:
            self._end(error, at)
            raise

    def close(self) -> None:
        """Leave the stages as they were. From now on every I does the whole backward."""
        if self.weight_gradients is not None:
            self.weight_gradients.leave()
            self.weight_gradients = None

    def _end(self, error: BaseException, at: str) -> None:
        """Tell the other ranks, and the reader of the traceback, once."""
        if self._failure is not None:
            return
        if isinstance(error, PipelineError):
            self._failure = str(error).removeprefix("pipeline: ")
        else:
            place = f"rank {self.rank} failed at {at}"
            self._failure = f"{place}: {type(error).__name__}: {error}"
            error.add_note(f"lowtide: {place}")
        if self.transport is not None:
            is_first = self.transport.note.settle(self._failure) == self._failure
            self.transport.give_up()
            if is_first:
                self.transport.note.linger()


def _check_kept(weights: WeightGradients, run_pair: RunPair) -> None:
    """Raises ConfigError where nothing would run what is kept."""
    home = getattr(run_pair, "__self__", None)
    if run_pair is one_after_the_other or getattr(home, "weight_gradients", weights) is not weights:
        raise ConfigError(
            f"pipeline: WeightGradients(most_kept={weights.most_kept}) has the waits of an Overlap run weight "
            "gradients, and that of this pipeline does not know them; give "
            "run_pair=Overlap(weight_gradients=...).run_pair with the same ones"
        )


def _shape_of(entry: Any) -> tuple[Any, ...]:
    """Of a micro-batch: micro-batches that have the same are passed on in the same shapes."""
    leaves = tree_leaves(entry)
    return tuple((tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else str(each) for each in leaves)


def _random_states(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Of the generators that a forward of this module draws from."""
    device = device_of(module)
    own = () if device.type == "cpu" else (torch.get_device_module(device).get_rng_state(device),)
    return (torch.get_rng_state(), *own)


class _Walk:
    """One step of one rank."""

    def __init__(
        self,
        pipeline: Pipeline,
        gradients: StepGradients,
        inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None,
        keywords: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self._pipeline = pipeline
        self._transport = pipeline.transport
        self._gradients = gradients
        row = [action for rank, _, action in pipeline.schedule.parts() if rank == pipeline.rank]
        self._split = {(each.stage, each.micro_batch) for each in row if each.kind is Kind.BACKWARD_WEIGHT}
        """Chunks whose weight gradients can be put off."""
        self._inputs, self._targets, self._keywords = inputs, targets, keywords
        self.draws: set[int] = set()
        """In the first step: stages that drew random numbers in their first forward."""
        self.at: AnyAction | str = "its start"
        """For the text of a failure."""
        self.error: BaseException | None = None
        self._chunks: dict[tuple[int, int], tuple[Tensors, Places]] = {}
        """Of forwards without their backwards: what came from the stage before, and the places of the outputs."""
        self._local: dict[Result, tuple[Tensors, Callable[[], None]]] = {}
        """Results that this rank made for itself."""
        self.losses: dict[int, torch.Tensor] = {}
        """By micro-batch."""
        self._lock = threading.Lock()
        """Two halves of a pair may end on two threads."""
        self._made: dict[Result, Tensors] = {}
        """Results whose turn to be sent has not come."""
        self._to_send: dict[int, deque[Result]] = defaultdict(deque)
        """To each rank, in the order of the schedule."""
        for action in row:
            if action.kind.is_send:
                result = action.carries
                reader = self._pipeline.schedule.reader(result)
                assert reader is not None
                self._to_send[reader].append(result)

    def run(self, divide_by: float) -> None:
        weights = self._pipeline.weight_gradients
        if weights is not None:
            weights.of_stage = self._gradients.of_stage
        self._pipeline.tied.begin()
        plans, lack = self._pipeline.plans, 0
        facts = {"values of divide_by": divide_by, "budgets": "none" if plans is None else "plans for one"}
        if plans is not None:
            lack = plans.lacks(self._inputs, self._targets, self._gradients.bytes_before())
        if self._transport is not None:
            shapes = None if self._inputs is None else [_shape_of(entry) for entry in self._inputs]
            lack = self._transport.begin(shapes, state=self._pipeline.state(), facts=facts, lack=lack)
        if plans is not None:
            plans.renew(lack, self._inputs, self._targets)
        walk(self._pipeline.runtime)
        if self.error is not None:
            raise self.error
        self.at = "its end"
        if weights is not None:
            weights.finish()
        self._refuse_written_buffers()
        for stage, replicated in sorted(self._pipeline.replicas.items()):
            with self._gradients.of_stage(stage):
                average_over_replicas(replicated)
        self._pipeline.tied.exchange(self._gradients, self._transport)
        if self._transport is not None:
            self._transport.finish()
        assert not (self._chunks or self._local or self._made)

    def _refuse_written_buffers(self) -> None:
        """In the first step on all ranks together, before any of them uses a gradient."""
        tied = self._pipeline.tied
        faults = [tied.written_buffer()]
        if self._transport is not None and tied.has_ties and self._pipeline.num_steps == 1:
            faults = self._transport.meet("the end of the first step", faults[0])
        for fault in filter(None, faults):
            raise ConfigError(fault)

    def do(self, every: AnyAction) -> None:
        """An action of the row. What it raises is raised when the runtime has come to the end of the row: what it says
        of an error is the rows of all ranks."""
        if self.error is not None:
            return
        try:
            self._do(every)
        except BaseException as error:
            self.error = error

    def _do(self, every: AnyAction) -> None:
        self.at = every
        if not isinstance(every, Pair) and every.kind.is_receive:
            assert self._transport is not None
            result = every.carries
            self._transport.ask(result, source=self._pipeline.schedule.rank_of_stage[result.stage])
        elif not isinstance(every, Pair) and every.kind is Kind.BACKWARD_WEIGHT:
            if (weights := self._weights_of((every.stage, every.micro_batch))) is not None:
                weights.run((every.stage, every.micro_batch))
        else:
            ready = {part.kind is Kind.FORWARD: self._ready(part) for part in every.parts}
            if self._transport is not None:
                self._transport.let_go_of(self._pipeline.gone[every])
            self._pipeline.run_pair(ready.get(True), ready.get(False))
            if self._pipeline.weight_gradients is not None:
                self._pipeline.weight_gradients.run_most(self._split)

    def _weights_of(self, chunk: tuple[int, int]) -> WeightGradients | None:
        """What puts off the weight gradients of a chunk, if anything does."""
        weights = self._pipeline.weight_gradients
        return weights if chunk in self._split or (weights is not None and weights.most_kept is not None) else None

    def _ready(self, action: Action) -> Half:
        """The action, when what it reads from another stage is there."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is Kind.FORWARD:
            leaves = self._take(Result(Kind.FORWARD, stage - 1, micro_batch)) if stage > 0 else ()
            return functools.partial(self._forward, action, leaves)
        is_last = stage == self._pipeline.schedule.num_stages - 1
        given = None if is_last else self._take(Result(Kind.BACKWARD, stage + 1, micro_batch))
        return functools.partial(self._backward, action, given)

    def _take(self, result: Result) -> Tensors:
        if result in self._local:
            tensors, check = self._local.pop(result)
            check()
            return tensors
        assert self._transport is not None
        return self._transport.read(result)

    def _forward(self, action: Action, leaves: Tensors) -> None:
        stage, micro_batch = chunk = action.stage, action.micro_batch
        module = self._pipeline.stages[stage]
        given: Any = ()
        keywords = {} if self._keywords is None else self._keywords[micro_batch]
        is_first = self._pipeline.num_steps == 1 and micro_batch == 0
        before = _random_states(module) if is_first else ()
        weights = self._weights_of(chunk)
        with weights.forward(chunk) if weights is not None else contextlib.nullcontext():
            if stage == 0:
                assert self._inputs is not None
                given = self._inputs[micro_batch]
                args, named = arguments_of(given)
                output = module(*args, **named, **keywords)
            else:
                output = module(*leaves, **keywords)
            made = tree_leaves(output)
            if stage == self._pipeline.schedule.num_stages - 1:
                output = self._loss_of(output, micro_batch)
        if is_first:
            self._learn_from(stage, made, (*leaves, *tree_leaves(given)))
            if not all(map(torch.equal, before, _random_states(module))):
                self.draws.add(stage)
        if weights is not None and self._pipeline.num_steps == 1:
            self._refuse_mixed(stage, (*made, *as_tuple(output)), leaves)
        # The graphs of what a batch was computed from, and of the loss, can be other ones each time.
        for weight in weights_behind([*tree_leaves(given), *as_tuple(output)], until=(*leaves, *made)):
            self._gradients.include(stage, weight)
        places, outputs = with_places(passed_on(output, stage))
        self._chunks[chunk] = leaves, places
        self._give(action, outputs)

    def _learn_from(self, stage: int, made: Sequence[Any], given: Sequence[Any]) -> None:
        """Once: what the stage trains that is not registered in it. FSDP2 has other parameters in a forward."""
        if fsdp_modules(self._pipeline.stages[stage]):
            return
        known = self._pipeline.weights.setdefault(stage, [])
        for weight in weights_behind(made, until=given):
            if not any(weight is each for each in known):
                known.append(weight)
                self._gradients.include(stage, weight)

    def _refuse_mixed(self, stage: int, made: Sequence[Any], leaves: Tensors) -> None:
        """ConfigError for a weight that is put off, and that the stage, its loss or its input uses in another way."""
        mixed: list[torch.Tensor] = []
        weights_behind(made, until=leaves, mixed=mixed)
        for weight in mixed:
            named = self._pipeline.stages[stage].named_parameters()
            name = next((f"'{name}'" for name, each in named if each is weight), f"a weight {list(weight.shape)}")
            raise ConfigError(
                f"pipeline: stage {stage} uses {name} in a linear layer that puts weight gradients off, and in another "
                "way: they would be added up in another order. Use it in one way, make the layer a subclass of "
                "nn.Linear (which puts nothing off), or leave weight_gradients out"
            )

    def _loss_of(self, output: Any, micro_batch: int) -> torch.Tensor:
        assert self._pipeline.loss is not None and self._targets is not None
        loss = self._pipeline.loss(output, self._targets[micro_batch])
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"pipeline: the loss gave {found}; expected a tensor with one number")
        if not loss.requires_grad:
            raise ConfigError(
                f"pipeline: the loss of micro-batch {micro_batch} has no graph, so nothing would get a gradient; it "
                "was computed without gradients, or detached, or from what is not trained"
            )
        self.losses[micro_batch] = loss.detach().clone()  # that of mse_loss keeps memory as large as its input
        return loss

    def _backward(self, action: Action, given: Tensors | None) -> None:
        chunk = action.stage, action.micro_batch
        if given is None:
            given = (torch.ones_like(self.losses[action.micro_batch]),)
        weights = self._weights_of(chunk)
        putting_off = weights.put_off(chunk) if weights is not None else contextlib.nullcontext()
        keep_whole(self._pipeline.stages[action.stage])
        with self._gradients.of_stage(action.stage), putting_off:
            found = backward(*self._chunks.pop(chunk), given)
        self._give(action, found)

    def _give(self, action: Action, tensors: Tensors) -> None:
        """Hand a result on: to this rank, or to another one as soon as those before it have gone."""
        result = action.makes
        reader = None if result is None else self._pipeline.schedule.reader(result)
        if result is None or reader is None:
            return
        if reader == self._pipeline.rank:
            self._local[result] = tensors, unwritten(result, tensors)
            return
        assert self._transport is not None
        with self._lock:
            self._made[result] = tensors
            waiting = self._to_send[reader]
            while waiting and waiting[0] in self._made:
                following = waiting.popleft()
                self._transport.send(following, self._made.pop(following), to=reader)
