"""Updates that wait for the next forward pass: each bucket steps just before the first module that needs it.

What: with `overlap="deferred"` a step sets gradients and hyper-parameters aside, and each module's forward pre-hook
steps the buckets of its own parameters, while later ones arrive. Why: then the copies have the whole forward pass to
hide behind, and clipping, accumulation and schedulers are exact, since all that they do is done when the step begins.

Which parameters may wait is learned in one forward pass: those that no operator reads before a module that owns them
was called. All others step at once, as do all in a step with a fused `GradScaler`, which tells the optimizer of infs
only then.

In between, parameters are those of before the step. `optimizer.state`, checkpoints of model and optimizer, and the next
step bring them up to date first. Who reads parameters elsewhere (an average of weights, `module.weight` by hand) calls
`handle.flush()`. That is why this way must be asked for.
Gradients must stay as they are until they are used: `zero_grad()` may drop them, and RuntimeError says where something
wrote to them.

Cost: gradients live until their module runs. Not covered: compiled models, FSDP2 (both refused); forward passes that
read a parameter in another order than the first one did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide.errors import ConfigError
from lowtide.optimizer.hooks import OwnedHook
from lowtide.optimizer.step import Part, StepRun
from lowtide.tensors.private import is_compiled_module, version_of
from lowtide.tensors.wrappers import is_distributed

_ASKS_ONLY = frozenset(
    {"device", "dim", "dtype", "element_size", "is_cuda", "is_floating_point", "is_leaf", "layout", "ndim", "numel"}
    | {"requires_grad", "shape", "size", "stride"}
)
"""What does not read the values of a tensor."""


class DeferredUpdates:
    """See the module's text. `advance(run, numbers)` steps parts of a run; None: all that are left.

    `take_over()` sees to it that `optimizer.state` is the mapping of when the step began, while parts of it step.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[torch.Tensor],
        advance: Callable[[StepRun, list[int] | None], None],
        take_over: Callable[[], None],
    ) -> None:
        self._advance = advance
        self._take_over = take_over
        self._run: StepRun | None = None
        self.stopped: StepRun | None = None
        """What stopped half-way, with the gradients that were set aside for it."""
        self._waiting: list[DeferredUpdates] = []
        """Itself while updates wait: the model's hooks hold this list, so that an optimizer that is dropped now is
        dropped after they are done."""
        self._versions: dict[torch.Tensor, int] = {}
        wanted = set(parameters)
        self._watch = _Watch(wanted)
        self._may_wait: set[torch.Tensor] = set()
        self._part_of: dict[torch.Tensor, int] = {}
        self._hooks: list[Any] = []
        for module in model.modules():
            own: list[torch.Tensor] = [p for p in module.parameters(recurse=False) if p in wanted]
            if own:
                self._hooks += [
                    self._hook(_before(own)).put_on(module.register_forward_pre_hook, prepend=True),
                    self._hook(DeferredUpdates.flush).put_on(module.register_state_dict_pre_hook),
                    self._hook(DeferredUpdates.flush).put_on(module.register_load_state_dict_pre_hook),
                ]
        self._hooks += [
            self._hook(DeferredUpdates._begin_forward).put_on(model.register_forward_pre_hook, prepend=True),
            self._hook(DeferredUpdates._end_forward).put_on(model.register_forward_hook, always_call=True),
        ]

    def _hook(self, call: Callable[[DeferredUpdates], None]) -> OwnedHook:
        return OwnedHook(self, lambda updates, *_: call(updates), holds=self._waiting)

    def remove(self) -> None:
        self.flush()
        for hook in self._hooks:
            hook.remove()

    def _begin_forward(self) -> None:
        if not self._may_wait:
            self._watch.begin()

    def _end_forward(self) -> None:
        """What no module has asked for was not needed; it does not wait for what happens to gradients next."""
        if not self._may_wait:
            self._watch.end()
            self._may_wait = self._watch.announced - self._watch.read_before
        self.flush()

    # -- a step --------------------------------------------------------------------------------------------------------

    def set_aside(self, run: StepRun, optimizer: torch.optim.Optimizer) -> None:
        """Step what cannot wait, and keep the rest."""
        self.flush()
        waits = self._may_wait & run.gradients.keys() if not hasattr(optimizer, "found_inf") else set()
        wanted = {number: set(run.parts[number].parameters()) for number in run.todo}
        self._advance(run, [n for n, parameters in wanted.items() if not parameters or not parameters <= waits])
        if not run.todo:
            return
        self._run, self.stopped = run, None
        self._waiting.append(self)
        self._part_of = {p: number for number in run.todo for p in run.parts[number].parameters()}
        self._versions = {p: version_of(run.gradients[p]) for p in self._part_of}

    def flush(self) -> None:
        """Step all that still waits."""
        if self._run is not None:
            self._take_over()
        if self._run is not None:
            self._step(list(self._run.todo))

    def resume(self) -> None:
        """Step what is left of the step that stopped, with its own gradients, whatever `.grad` shows by now."""
        self._run, self.stopped = self.stopped, None
        self._waiting.append(self)
        self.flush()

    def _before_module(self, parameters: list[torch.Tensor]) -> None:
        self._watch.announced.update(parameters)
        if self._run is not None:
            self._take_over()
        if self._run is not None:
            numbers = {self._part_of[p] for p in parameters if p in self._part_of}
            if numbers:
                self._step([number for number in self._run.todo if number in numbers])

    def _step(self, numbers: list[int]) -> None:
        run = self._run
        assert run is not None
        for number in numbers:
            part = run.parts[number]
            self._check(part)
            if len(run.todo) == 1:
                self._forget()  # whatever comes of it
            try:
                with _as_outside_of_forward(), _gradients_of(part, run):
                    self._advance(run, [number])
            except BaseException:
                self._forget()
                self.stopped = run
                raise
            for parameter in part.parameters():
                del self._part_of[parameter], run.gradients[parameter]

    def _forget(self) -> None:
        self._run = None
        self._waiting.clear()

    def _check(self, part: Part) -> None:
        assert self._run is not None
        if any(version_of(self._run.gradients[p]) != self._versions[p] for p in part.parameters()):
            raise RuntimeError(
                "lowtide: gradients were written to before the deferred update that needs them; use "
                "zero_grad(set_to_none=True), or call handle.flush() first"
            )


def _before(parameters: list[torch.Tensor]) -> Callable[[DeferredUpdates], None]:
    return lambda updates: updates._before_module(parameters)


@contextlib.contextmanager
def _as_outside_of_forward() -> Iterator[None]:
    """An optimizer expects neither autocast nor inference mode, which a forward pass may have."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        accelerator = torch.accelerator.current_accelerator()
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def _gradients_of(part: Part, run: StepRun) -> Iterator[None]:
    """The gradients that were there when the step began are there again."""
    now = [(parameter, parameter.grad) for parameter in part.parameters()]
    for parameter, _ in now:
        parameter.grad = run.gradients[parameter]
    try:
        yield
    finally:
        for parameter, gradient in now:
            parameter.grad = gradient


class _Watch(TorchFunctionMode):
    """Notes which parameters were read before a module that owns them was called, in one forward pass."""

    def __init__(self, wanted: set[torch.Tensor]) -> None:
        super().__init__()
        self.announced: set[torch.Tensor] = set()
        self.read_before: set[torch.Tensor] = set()
        self._wanted = {id(parameter): parameter for parameter in wanted}
        self._is_on = False

    def begin(self) -> None:
        if not self._is_on:
            self._is_on = True
            self.announced.clear()
            self.__enter__()

    def end(self) -> None:
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", "")
        if name not in _ASKS_ONLY:
            for value in _tensors((*args, *(kwargs or {}).values())):
                parameter = self._wanted.get(id(value))
                if parameter is not None and parameter not in self.announced:
                    self.read_before.add(parameter)
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def check_model(model: nn.Module | None, overlap: str, parameters: list[torch.Tensor]) -> nn.Module:
    """ConfigError where updates cannot be deferred."""
    if model is None:
        raise ConfigError(
            f"lowtide.swap_optimizer: overlap '{overlap}' follows the modules of a model; give it as model="
        )
    if any(is_distributed(parameter) for parameter in parameters):
        raise ConfigError(
            f"lowtide.swap_optimizer: overlap '{overlap}' does not go with FSDP2, which gathers parameters before "
            "their modules are called; use 'backward'"
        )
    if any(is_compiled_module(module) for module in model.modules()) or type(model).__name__ == "OptimizedModule":
        raise ConfigError(
            f"lowtide.swap_optimizer: overlap '{overlap}' does not go with a compiled model; use 'backward'"
        )
    return model
