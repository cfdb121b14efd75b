"""One micro-batch through all stages of a pipeline, each of which is observed: what a chunk makes, saves and frees.

What: `observe_stages` is called by all ranks. The largest micro-batch goes from stage to stage through the messages of
the pipeline; each stage observes a whole step of it, forward and backward (one extra step that leaves no trace, and
whose saved activations are elsewhere meanwhile). The last stage's step has the loss in it.
Why through messages: what a stage is given in the real step has just that shape, dtype and need of a gradient.
Cost: one step of one micro-batch, one stage after the other. Not covered: what the loss saves is kept and counted,
since it is the caller's own function, which hooks of a stage do not see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.core.profile import Profile
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.rank_plan import StageChunk
from lowtide.pipeline.schedule import Kind, Result
from lowtide.pipeline.stage_call import Tensors
from lowtide.profiling.step_recorder import OUTSIDE
from lowtide.runtime.autopilot.observe_call import observe_call
from lowtide.tensors.live_bytes import unique_bytes
from lowtide.tensors.private import disable_current_modes, next_sequence_number, tree_leaves
from lowtide.tensors.ranks import gather


class _Output:
    """What a stage gave in the observed step, for the next one."""

    def __init__(self) -> None:
        self.tensors: Tensors = ()
        self.num_nodes = 0
        """Of autograd's graph. (A variable of the function that notes it would be put back after the step.)"""

    def note(self, output: Any, num_nodes: int) -> None:
        """Copies, since the step lets go of its own."""
        self.num_nodes = num_nodes
        given = tuple(output) if isinstance(output, tuple | list) else (output,)
        with disable_current_modes(), torch.no_grad():
            self.tensors = tuple(
                None if each is None else each.detach().clone().requires_grad_(each.requires_grad) for each in given
            )


def observe_stages(
    pipeline: Pipeline, inputs: Sequence[Any] | None, targets: Sequence[Any] | None
) -> dict[int, StageChunk]:
    """One micro-batch goes through all stages; what was seen of this rank's."""
    schedule, rank = pipeline.schedule, pipeline.rank
    with pipeline.ending_all("the step that is observed"):
        number, is_steady = _largest(pipeline, inputs)
        found: dict[int, StageChunk] = {}
        given: Tensors = ()
        for stage in schedule.stages_of(rank):
            if stage == 0:
                assert inputs is not None
                args, kwargs = _arguments(inputs[number])
            else:
                result = Result(Kind.FORWARD, stage - 1, number)
                source = schedule.rank_of_stage[stage - 1]
                if source != rank:
                    assert pipeline.transport is not None
                    pipeline.transport.ask(result, source=source)
                    given = pipeline.transport.read(result)
                args, kwargs = given, {}
            is_last = stage == schedule.num_stages - 1
            target = targets[number] if is_last and targets is not None else None
            output = _Output()
            profile = _observe_stage(pipeline, stage, (args, kwargs), output, target)
            found[stage] = StageChunk(
                profile=profile if is_steady else profile.without_sizes(is_proven=False),
                input_bytes=_bytes_of(args) if stage else 0,
                output_bytes=0 if is_last else _bytes_of(output.tensors),
                input_gradient_bytes=_bytes_of(args, with_gradient=True) if stage else 0,
                output_gradient_bytes=0 if is_last else _bytes_of(output.tensors, with_gradient=True),
            )
            given = output.tensors
            reader = schedule.reader(Result(Kind.FORWARD, stage, number))
            if reader not in (None, rank):
                assert pipeline.transport is not None and reader is not None
                pipeline.transport.send(Result(Kind.FORWARD, stage, number), given, to=reader)
        if pipeline.transport is not None:
            pipeline.transport.finish()
    return found


def _observe_stage(
    pipeline: Pipeline, stage: int, given: tuple[tuple, dict[str, Any]], output: _Output, target: Any
) -> Profile:
    is_last = stage == pipeline.schedule.num_stages - 1

    def use(call: Callable[[], Any]) -> Any:
        start = next_sequence_number()
        made = call()
        output.note(made, next_sequence_number() - start)
        assert not is_last or pipeline.loss is not None
        return pipeline.loss(made, target) if is_last and pipeline.loss is not None else made

    profile = observe_call(pipeline.stages[stage], *given, None, use=use)
    return kept_outside(profile, output.num_nodes)


def kept_outside(profile: Profile, end_sequence: int) -> Profile:
    """The same step, in which what somebody else than the stage saves is no node: hooks of the stage do not see it.

    `end_sequence`: autograd's number when the stage was over, counted as in the profile.
    """
    gone = {
        node.name: node
        for node in profile.sites
        if node.last_sequence >= end_sequence or node.name.startswith(f"{OUTSIDE}.")
    }
    if not gone:
        return profile
    op_bytes = list(profile.op_bytes)
    for node in gone.values():
        for op in range(max(node.born, 0), min(max(node.dies, node.release), len(op_bytes))):
            op_bytes[op] += node.nbytes
    hurt = [
        node.name for node in profile.nodes if node.recipe is not None and not gone.keys().isdisjoint(node.recipe.nodes)
    ]
    calls = (
        dataclasses.replace(call, why_not="the loss holds what it starts from")
        if not gone.keys().isdisjoint(call.inputs)
        else call
        for call in profile.calls
    )
    left = profile.without_recipes(hurt)
    nodes = tuple(node for node in left.nodes if node.name not in gone)
    return dataclasses.replace(left, op_bytes=tuple(op_bytes), nodes=nodes, calls=tuple(calls))


def _arguments(entry: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(entry, Mapping):
        return (), dict(entry)
    return (tuple(entry) if isinstance(entry, tuple | list) else (entry,)), {}


def _largest(pipeline: Pipeline, inputs: Sequence[Any] | None) -> tuple[int, bool]:
    """The number of the micro-batch with the most in it, and whether all have the same shapes."""
    sizes = None if inputs is None else [_shapes(entry) for entry in inputs]
    own = None if sizes is None else (max(range(len(sizes)), key=lambda n: sizes[n][0]), len(set(sizes)) == 1)
    found: tuple[int, bool] = next(each for each in gather(own, pipeline.group) if each is not None)
    return found


def _shapes(entry: Any) -> tuple[int, tuple]:
    tensors = [leaf for leaf in tree_leaves(entry) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() for tensor in tensors), tuple(tuple(tensor.shape) for tensor in tensors)


def _bytes_of(tree: Any, *, with_gradient: bool = False) -> int:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if with_gradient:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.requires_grad)
    return unique_bytes(tensors)
