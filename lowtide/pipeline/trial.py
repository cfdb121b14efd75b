"""Whether each stage can take what the one before it passes on, asked before any rank waits for a message.

What: `try_stages` runs the forward of each stage on tensors without bytes, one stage after the other, and passes their
shapes on. A stage that raises is tried once more with real tensors of zeros; if it raises again, all ranks raise one
ConfigError, which names the stages, the shapes and the module.
Why twice: some operators and control flow that depends on data do not work without bytes. A stage that cannot be tried
so is left to the first forward, as are those after it.
Why it is safe: gradients are off, so plans that are on a stage step aside. What the stage reaches is put back
afterwards (profiling/observe_step.py), as are random states; fake tensors that it keeps are taken out. A collective
ends the trial before it is issued.
Cost: one forward of each stage without its arithmetic, once for a pipeline. Not covered: shapes of other micro-batches
than the first, the loss, gradients; what a stage or its hooks do that Python's objects do not show (a file, a counter
that a function keeps).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.pipeline import stage_call
from lowtide.pipeline.schedule import Schedule
from lowtide.profiling.fake.fake_model import grouped_experts, lend, mode_of, without_numbers
from lowtide.profiling.fake.trace import quietly
from lowtide.profiling.observe_step import device_of, untouched
from lowtide.profiling.step_recorder import COLLECTIVES
from lowtide.tensors.private import TorchDispatchMode
from lowtide.tensors.ranks import gather


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
    schedule: Schedule, rank: int, stages: Mapping[int, nn.Module], inputs: Sequence[Any] | None, group: Any
) -> None:
    """Collective. Raises ConfigError on all ranks for a stage that cannot take what is passed on to it."""
    passed = Passed()
    for stage in range(schedule.num_stages):
        own: Passed | None = None
        if stage in stages:
            own = _tried(stages[stage], _given(inputs, passed, stage), _what(inputs, passed, stage), (stage, rank))
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


def _without_bytes(module: nn.Module, given: Any) -> Passed | None:
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
                return Passed(_shapes_of(stage_call.call(module, without_numbers(given, mode))))
    except _NotShown:
        return Passed(is_known=False)
    except Exception:
        return None  # because of what it was given, or because it needs bytes: real tensors tell


def _tried(module: nn.Module, given: Callable[[], Any], what: str, place: tuple[int, int]) -> Passed:
    device = device_of(module)
    if (passed := _without_bytes(module, given())) is not None:
        return passed
    running: list[str] = []
    try:
        # Hooks come after the snapshot, or it would put back what they write.
        with untouched(module, (), device), _watched(module, running), torch.no_grad(), _NoCollectives():
            stage_call.call(module, _on(given(), device))
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
    outputs = stage_call.as_tuple(output)
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
