"""A stage of ours in torch's pipeline runtime, which asks it for receives. And what a stage does with one micro-batch.

What: torch's runtime walks the row of this rank, and calls the functions that are registered with it for what computes.
For a receive of the row it asks the stage; this one begins it with the transport and gives the runtime no work of its
own. Sends are left out of the row: a result goes as soon as it is made.
Why not the receives of `PipelineStage`: they have a buffer for each micro-batch, allocated once, of one shape.
`with_places` finds the *places* of a forward's outputs in autograd's graph. They stay, and not the outputs. `backward`
begins at the places, with the gradients that came, and gives those of the leaves. A backward does not need an output
tensor: once it is sent or handed over, its memory is free, unless the stage itself saved it.
FSDP2: a stage whose module is sharded as a whole is gathered before its first action of a step; its gradients are
added up whole, and reduced once, after its last action.
Cost: none of its own; gathered weights and whole gradients of a stage under FSDP2 stay for the step, as torch has it.
Not covered: what torch's own actions do with a stage that holds no outputs (they are not used); double backward across
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as Collection
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, OVERLAP_F_B

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Result, Schedule
from lowtide.tensors.fsdp import is_fsdp
from lowtide.tensors.private import await_unshard, make_schedule_runtime, version_of

Step = Callable[[], Any]
"""The step that is under way: it carries out actions of the rank's row but for sends (`do`), and has the `error` of one
that has raised."""

_KINDS = {
    FORWARD: Kind.FORWARD,
    FULL_BACKWARD: Kind.BACKWARD,
    BACKWARD_INPUT: Kind.BACKWARD_INPUT,
    BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT,
}


class Stage(PipelineStage):
    """Of one rank. What torch's class would hold for its own actions (buffers, caches) is never made."""

    def __init__(self, module: nn.Module, number: int, schedule: Schedule, *, rank: int, step: Step) -> None:
        self.submod = module
        self.stage_index, self.num_stages = number, schedule.num_stages
        self.group_rank, self.group_size = rank, schedule.num_ranks
        self.has_backward = True
        self._step = step

    def clear_runtime_states(self) -> None:
        """There are none."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._step().do(Action(Kind.RECEIVE_FORWARD, self.stage_index, fwd_chunk_id))
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        self._step().do(Action(Kind.RECEIVE_BACKWARD, self.stage_index, bwd_chunk_id))
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # After a failure others must not train on a part of the sum: they wait, until they hear of it.
        if self._step().error is None:
            super().perform_reduce_grad(grad_scale_factor)


def runtime_of(schedule: Schedule, modules: Mapping[int, nn.Module], rank: int, step: Step) -> Any:
    """Torch's runtime with the rows of `schedule`, for a rank and the stages that it has."""
    by_number = {
        number: Stage(module, number, schedule, rank=rank, step=step) for number, module in sorted(modules.items())
    }
    rows = [[every for every in row if not every.parts[0].kind.is_send] for row in schedule.actions]
    cells = [[str(every) for every in row] for row in rows]
    cells[rank] = _with_gathers(rows[rank], {number for number, each in modules.items() if is_fsdp(each)})
    runtime = make_schedule_runtime(list(by_number.values()), schedule.num_micro_batches, cells)

    def carry_out(action: Any, _: Any) -> None:
        every = _ours(action)
        for part in every.parts:
            await_unshard(runtime, by_number[part.stage])
        step().do(every)

    for kind in (*_KINDS, OVERLAP_F_B):
        runtime.register_custom_function(kind, carry_out)
    return runtime


def _with_gathers(row: Sequence[AnyAction], sharded: Collection[int]) -> list[str]:
    """With the actions that gather and reduce these stages."""
    computes = [[part.stage for part in every.parts if not part.kind.is_transfer] for every in row]
    cells = []
    for place, every in enumerate(row):
        own = sharded & set(computes[place])
        cells += [f"{stage}UNSHARD" for stage in sorted(own) if not any(stage in before for before in computes[:place])]
        cells.append(str(every))
        for stage in sorted(own):
            if not any(stage in after for after in computes[place + 1 :]):
                cells += [f"{stage}REDUCE_GRAD", f"{stage}RESHARD"]
    return cells


def keep_whole(module: Any, is_kept: bool = True) -> None:
    """Keep a stage under FSDP2 gathered, and its gradients whole, until the row reduces them; or stop that."""
    if is_fsdp(module):
        module.set_is_last_backward(not is_kept)
        module.set_reshard_after_backward(not is_kept)
        module.set_requires_gradient_sync(not is_kept)


def walk(runtime: Any) -> None:
    """Carry out the row of this rank once."""
    for asked in (runtime.fwd_recv_ops, runtime.bwd_recv_ops):
        asked.clear()  # torch's own functions would take these out
    with torch.enable_grad():
        runtime.step(return_outputs=False)


def _ours(action: Any) -> AnyAction:
    if action.sub_actions:
        return Pair(*(Action(_KINDS[each.computation_type], each.stage_index, each.microbatch_index)
                      for each in action.sub_actions))  # fmt: skip
    return Action(_KINDS[action.computation_type], action.stage_index, action.microbatch_index)


# -- on one micro-batch -----------------------------------------------------------------------------------------------


Tensors = tuple[torch.Tensor | None, ...]
Places = tuple[GradientEdge | None, ...]
"""Of outputs in autograd's graph; None where no gradient flows. The activations hang on them."""


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a stage is called with for an entry of the batch: a tensor, a tuple of inputs, or a mapping by keyword."""
    return ((), dict(batch)) if isinstance(batch, Mapping) else (as_tuple(batch), {})


def as_tuple(output: Any) -> tuple[Any, ...]:
    """What a stage gives, as what it passes on."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def passed_on(output: Any, stage: int) -> Tensors:
    """What a stage gives to the next one. Raises ConfigError for what cannot be passed on."""
    for each in (outputs := as_tuple(output)):
        if not (each is None or isinstance(each, torch.Tensor)):
            raise ConfigError(
                f"pipeline: stage {stage} gave a {type(each).__name__}; what one stage passes on to the next is a "
                "tensor or a tuple of tensors"
            )
    return outputs


def with_places(outputs: Tensors) -> tuple[Places, Tensors]:
    """The places of outputs, and these as leaves for the stage after, which share their memory."""
    places = []
    following: list[torch.Tensor | None] = []
    for each in outputs:
        has_gradient = each is not None and each.requires_grad
        places.append(get_gradient_edge(each) if each is not None and has_gradient else None)
        following.append(None if each is None else each.detach().requires_grad_(has_gradient))
    return tuple(places), tuple(following)


def unwritten(result: Result, tensors: Tensors) -> Callable[[], None]:
    """To be called when the reader has them: ConfigError where one (a buffer, a part of the batch) has changed."""
    held = [(each, version_of(each)) for each in tensors if each is not None]

    def check() -> None:
        if any(version_of(each) != version for each, version in held):
            raise ConfigError(
                f"pipeline: what stage {result.stage} passed on at {result.send} was written to before its reader "
                "began; pass on a copy: clone()"
            )

    return check


def backward(leaves: Tensors, places: Places, gradients: Tensors) -> Tensors:
    """The gradients of the leaves. Those of the weights are added up by autograd."""
    roots = [(place, given) for place, given in zip(places, gradients, strict=True) if place and given is not None]
    if roots:
        torch.autograd.backward([place for place, _ in roots], [given for _, given in roots])
    found = []
    for leaf in leaves:
        found.append(None if leaf is None else leaf.grad)
        if leaf is not None:
            leaf.grad = None
    return tuple(found)
