"""One stage on one micro-batch: its trial, its forward, and its backward from what is left of it.

What: `with_places` keeps of a forward its leaves and the *places* of its outputs in autograd's graph. `backward` starts
from the places, with the gradients that came, and gives those of the leaves.
Why places: a backward does not need an output tensor. Once it is sent or handed over, its memory is free, unless the
stage itself saved it.
`try_stages` asks, before any rank waits for a message, whether each stage can take what the one before it passes on. It
runs each forward on tensors without bytes and passes their shapes on. A stage that raises is tried once more with real
zeros, for some operators do not work without bytes; if it raises again, all ranks raise one ConfigError, which names
the stages, the shapes and the module. A stage that cannot be tried is left to the first forward, as are those after it.
The trial leaves no trace: what the stage reaches is put back (profiling/observe_step.py), and a collective ends it.
Cost: one forward of each stage without its arithmetic, once for a pipeline. Not covered: double backward across stages;
shapes of other micro-batches than the first, the loss, gradients; what Python's objects do not show (a file).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import Schedule
from lowtide.profiling.fake.fake_model import grouped_experts, lend, mode_of, without_numbers
from lowtide.profiling.fake.trace import quietly
from lowtide.profiling.observe_step import device_of
from lowtide.profiling.step_recorder import COLLECTIVES
from lowtide.profiling.untouched import untouched
from lowtide.tensors.private import TorchDispatchMode
from lowtide.tensors.ranks import gather

Tensors = tuple[torch.Tensor | None, ...]
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LiveChunk:
    """What stays of a forward until its backward. The activations hang on the places."""

    leaves: Tensors
    """What came from the stage before."""
    places: tuple[GradientEdge | None, ...]
    """Of the outputs, in their order; None where no gradient flows."""


def call(module: Callable[..., Any], batch: Any, keywords: Mapping[str, Any] = _NOTHING) -> Any:
    """On an entry of the batch: a tensor, a tuple of inputs, or a mapping by keyword."""
    if isinstance(batch, Mapping):
        return module(**batch, **keywords)
    return module(*batch, **keywords) if isinstance(batch, tuple | list) else module(batch, **keywords)


def as_tuple(output: Any) -> tuple[Any, ...]:
    """What a stage gives, as what it passes on."""
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def with_places(leaves: Tensors, output: Any, stage: int) -> tuple[LiveChunk, Tensors]:
    """What a forward leaves, and its outputs as leaves for the stage after, which share their memory."""
    outputs = as_tuple(output)
    places = []
    following: list[torch.Tensor | None] = []
    for each in outputs:
        if not (each is None or isinstance(each, torch.Tensor)):
            raise ConfigError(
                f"pipeline: stage {stage} gave a {type(each).__name__}; what one stage passes on to the next is a "
                "tensor or a tuple of tensors"
            )
        has_gradient = each is not None and each.requires_grad
        places.append(get_gradient_edge(each) if each is not None and has_gradient else None)
        following.append(None if each is None else each.detach().requires_grad_(has_gradient))
    return LiveChunk(leaves, tuple(places)), tuple(following)


def backward(chunk: LiveChunk, gradients: Sequence[torch.Tensor | None]) -> Tensors:
    """The gradients of the leaves. Those of the weights are added up by autograd."""
    roots = [
        (place, given) for place, given in zip(chunk.places, gradients, strict=True) if place and given is not None
    ]
    if roots:
        torch.autograd.backward([place for place, _ in roots], [given for _, given in roots])
    found = []
    for leaf in chunk.leaves:
        found.append(None if leaf is None else leaf.grad)
        if leaf is not None:
            leaf.grad = None
    return tuple(found)


# -- a trial, before any rank waits ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor that one stage passes on to the next. Plain, so that it can travel."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of the trial of one stage."""

    shapes: tuple[Shape | None, ...] = ()
    error: str | None = None
    is_known: bool = True
    """False: it could not be tried."""


class _NotShown(Exception):
    """The stage does what a trial cannot."""


def try_stages(
    schedule: Schedule, stages: Mapping[int, nn.Module], inputs: Sequence[Any] | None, group: Any, **keywords: Any
) -> None:
    """Collective. keywords: what every stage of the rank gets as well. Raises ConfigError on all ranks for a stage that
    cannot take what is passed on to it."""
    passed = Passed()
    for stage in range(schedule.num_stages):
        own: Passed | None = None
        if stage in stages:
            given = _given(inputs, passed, stage), keywords
            own = _tried(stages[stage], given, _what(inputs, passed, stage), (stage, schedule.rank_of_stage[stage]))
        passed = next(each for each in gather(own, group) if each is not None)
        if passed.error is not None:
            raise ConfigError(passed.error)
        if not passed.is_known:
            return


def _given(inputs: Sequence[Any] | None, passed: Passed, stage: int) -> Callable[[], Any]:
    """What makes the input of a stage: that of the batch, or zeros."""
    if stage == 0:
        assert inputs is not None
        return lambda: inputs[0]
    return lambda: tuple(None if each is None else torch.zeros(each.shape, dtype=each.dtype) for each in passed.shapes)


def _what(inputs: Sequence[Any] | None, passed: Passed, stage: int) -> str:
    """In words."""
    if stage == 0:
        return "the first micro-batch"
    return f"what stage {stage - 1} passes on, {', '.join(map(str, passed.shapes))},"


def _without_bytes(module: nn.Module, given: tuple[Any, Mapping[str, Any]]) -> Passed | None:
    """What a stage passes on; None if it raises."""
    mode = mode_of(module)
    try:
        with (
            untouched(module, (), device_of(module)),
            grouped_experts(module),
            quietly(),
            torch.no_grad(),
        ):
            lend(module, mode)
            with mode, _NoCollectives():
                return Passed(_shapes_of(call(module, *without_numbers(given, mode))))
    except _NotShown:
        return Passed(is_known=False)
    except Exception:
        return None  # because of what it was given, or because it needs bytes: real tensors tell


def _tried(
    module: nn.Module, given: tuple[Callable[[], Any], Mapping[str, Any]], what: str, place: tuple[int, int]
) -> Passed:
    device, (make, keywords) = device_of(module), given
    if (passed := _without_bytes(module, (make(), keywords))) is not None:
        return passed
    running: list[str] = []
    try:
        # Hooks come after the snapshot, or it would put back what they write.
        with untouched(module, (), device), _watched(module, running), torch.no_grad(), _NoCollectives():
            call(module, *_on((make(), keywords), device))
    except _NotShown:
        return Passed(is_known=False)
    except Exception as error:
        where = f"its module '{running[-1]}'" if running and running[-1] else "it"
        stage, rank = place
        return Passed(
            error=f"pipeline: stage {stage} (rank {rank}) cannot take {what} since {where} raises "
            f"{type(error).__name__}: {error}"
        )
    return Passed(is_known=False)


def _shapes_of(output: Any) -> tuple[Shape | None, ...]:
    outputs = as_tuple(output)
    if not all(each is None or isinstance(each, torch.Tensor) for each in outputs):
        raise _NotShown  # the first forward says it
    return tuple(None if each is None else Shape(tuple(each.shape), each.dtype) for each in outputs)


def _on(entry: Any, device: torch.device) -> Any:
    if isinstance(entry, Mapping):
        return {key: _on(value, device) for key, value in entry.items()}
    if isinstance(entry, tuple | list):
        return tuple(_on(each, device) for each in entry)
    return entry.to(device) if isinstance(entry, torch.Tensor) else entry


@contextlib.contextmanager
def _watched(module: nn.Module, running: list[str]) -> Iterator[None]:
    """Inside, `running` has the names of the modules that have begun and not ended."""

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    def end(*_: Any) -> None:
        running.pop()

    hooks = []
    for name, each in module.named_modules():
        hooks.append(each.register_forward_pre_hook(begin(name), prepend=True))
        hooks.append(each.register_forward_hook(end))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _NoCollectives(TorchDispatchMode):
    """Ends a trial before ranks would wait for each other."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise _NotShown
        return func(*args, **(kwargs or {}))
