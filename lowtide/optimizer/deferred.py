"""Updates that wait for the next forward pass: each bucket steps just before the first module that needs it.

What: with `overlap="deferred"` a step sets gradients and hyper-parameters aside. In the next forward pass each module's
pre-hook steps the buckets of its own parameters, while later ones arrive. Why: then the copies have the whole forward
pass to hide behind, and clipping, accumulation and schedulers are exact, since all that they do is done when the step
begins.

Why it is exact: no operator of that forward pass is given a parameter whose update still waits. While updates wait, a
mode looks at what torch's functions are given, and steps a bucket before its parameter is read by hand, in whatever
order. `regions` are modules that must find all of their parameters updated when they begin: what a plan runs again
compares its parameters before and after (tensors/run_state.py). An update runs under the modes and settings that
were in force in `step()`, whatever the forward pass has (autocast, inference mode, a `TorchFunctionMode`).

What steps at once: parameters that have no state yet, that no module of the model owns, and all in a step with a fused
`GradScaler`, which tells the optimizer of infs only then. Before a forward pass without gradients, and in one that does
not begin with a call of the model, all updates are done first.

In between, parameters are those of before the step. `optimizer.state`, checkpoints of model and optimizer, and the next
step bring them up to date first. Who reads parameters elsewhere (an average of weights, `module.weight` by hand) calls
`handle.flush()`. That is why this way must be asked for.
Gradients must stay as they are until they are used (`zero_grad()` may drop them), and so must parameters. Where a
version says that something wrote to them, RuntimeError says so: such a step cannot be done to the bits of plain, and a
checkpoint mends it.

Cost: gradients live until their module runs; some 3 us for each torch function that is called while updates wait. Not
covered: compiled models, FSDP2 (both refused); code below torch's functions that holds a parameter (a captured graph).
Not seen: writes that no version counts (`parameter.data`), and those to parameters that share a storage with others.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide.errors import ConfigError
from lowtide.optimizer.hooks import OwnedHook
from lowtide.optimizer.step import Part, StepRun
from lowtide.tensors.private import (
    TENSOR_QUESTIONS,
    disable_current_modes,
    dispatch_modes,
    function_modes,
    is_compiled_module,
    pop_function_mode,
    push_function_mode,
    storage_key,
    version_of,
)
from lowtide.tensors.wrappers import is_distributed

_ASKS_ONLY = frozenset(
    {"device", "dim", "dtype", "element_size", "grad", "grad_fn", "is_contiguous", "is_cuda", "is_floating_point"}
    | {
        "is_inference",
        "is_leaf",
        "is_sparse",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "numel",
        "requires_grad",
        "shape",
    }
    | {"size", "storage_offset", "stride", "untyped_storage", *TENSOR_QUESTIONS}
)
"""What does not read the values of a tensor. An address (`data_ptr`) and an alias (`data`, `detach`) may be read."""


class DeferredUpdates:
    """See the module's text. `advance(run, numbers)` steps parts of a run; None: all that are left.

    `take_over()` sees to it that `optimizer.state` is the mapping of when the step began, while parts of it step.
    `fetch_more(run)` starts the way of the next parts' buckets, `retire()` gives the last ones' memory back. `tear(run,
    error)`: this step cannot go on. `regions`: modules of the model; it is read when one of them begins, so that it may
    change.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[torch.Tensor],
        advance: Callable[[StepRun, list[int] | None], None],
        take_over: Callable[[], None],
        *,
        fetch_more: Callable[[StepRun], None],
        retire: Callable[[], None],
        tear: Callable[[StepRun, RuntimeError], None],
        regions: Collection[nn.Module] = (),
    ) -> None:
        self._advance = advance
        self._take_over = take_over
        self._fetch_more = fetch_more
        self._retire = retire
        self._tear = tear
        self._run: StepRun | None = None
        self.stopped: StepRun | None = None
        """What stopped half-way, with the gradients that were set aside for it."""
        self._waiting: list[DeferredUpdates] = []
        """Itself while updates wait: the model's hooks hold this list, so that an optimizer that is dropped now is
        dropped after they are done."""
        self._versions: dict[torch.Tensor, int] = {}
        """Of gradients."""
        self._left_as: dict[torch.Tensor, tuple[int, int]] = {}
        """How the step has left parameters that wait; until the first of them is updated."""
        self._part_of: dict[torch.Tensor, int] = {}
        self._modes: list[Any] = []
        """That were in force when the step began."""
        self._num_writes: dict[torch.Tensor, int] = {}
        self._reads = _Reads(self)
        wanted = set(parameters)
        self._may_wait = {p for module in model.modules() for p in module.parameters(recurse=False)} & wanted
        self._hooks: list[Any] = []
        for module in model.modules():
            own: list[torch.Tensor] = [p for p in module.parameters(recurse=False) if p in wanted]
            below: list[torch.Tensor] = [p for p in module.parameters() if p in wanted]
            if below:
                begin = _before(module, own, below, regions)
                self._hooks.append(self._hook(begin).put_on(module.register_forward_pre_hook, prepend=True))
            if own:
                self._hooks += [
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
        self._reads.end()
        for hook in self._hooks:
            hook.remove()

    def num_writes(self, parameter: torch.Tensor) -> int:
        """How often updates that were put off have written to a parameter, as its version counts."""
        return self._num_writes.get(parameter, 0)

    def gradients(self) -> list[torch.Tensor]:
        """Those that are held for updates that wait."""
        return [] if self._run is None else [self._run.gradients[p] for p in self._part_of]

    def _begin_forward(self) -> None:
        self._reads.end()  # of a forward pass that was interrupted
        if self._run is None:
            return
        if not torch.is_grad_enabled():
            self.flush()
        else:
            self._take_over()
            if self._run is not None:
                self._reads.begin()

    def _end_forward(self) -> None:
        """What no module has asked for was not needed; it does not wait for what happens to gradients next."""
        self._reads.end()
        self.flush()
        self._retire()

    # -- a step --------------------------------------------------------------------------------------------------------

    def set_aside(self, run: StepRun, ready: Collection[int]) -> None:
        """Step what cannot wait, and keep the rest. `ready`: numbers of the parts that may wait, as far as the
        optimizer is concerned."""
        self.flush()
        wanted = {number: set(run.parts[number].parameters()) for number in run.todo}
        waits = self._may_wait & run.gradients.keys()
        at_once = [n for n, own in wanted.items() if n not in ready or not own or not own <= waits]
        self._advance(run, at_once)
        for parameter in {p for number in at_once for p in wanted[number]}:
            run.gradients.pop(parameter, None)
        if not run.todo:
            return
        self._run, self.stopped = run, None
        self._modes = function_modes()
        self._waiting.append(self)
        self._part_of = {p: number for number in run.todo for p in wanted[number]}
        self._versions = {p: version_of(run.gradients[p]) for p in self._part_of}
        self._left_as = {p: _now(p) for p in self._part_of if _has_own_storage(p)}
        self._reads.waiting = {id(p): p for p in self._part_of}
        self._fetch_more(run)

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

    def before_module(self, parameters: Iterable[torch.Tensor]) -> None:
        """A module begins that needs these parameters."""
        if self._run is not None and not self._reads.is_on:
            self.flush()  # nobody sees what this forward pass reads by hand
        self.before_reading(parameters)

    def before_reading(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step what these parameters wait for."""
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
            parameters = part.parameters()
            for parameter in parameters:
                self._reads.waiting.pop(id(parameter), None)  # what follows reads them
            self._check(run, part)
            before = [version_of(parameter) for parameter in parameters]
            if len(run.todo) == 1:
                self._forget()  # whatever comes of it
            try:
                with _as_in_the_step(self._modes), _gradients_of(part, run):
                    self._advance(run, [number])
            except BaseException:
                self._forget()
                self.stopped = run
                raise
            for parameter, then in zip(parameters, before, strict=True):
                self._num_writes[parameter] = self.num_writes(parameter) + version_of(parameter) - then
                del self._part_of[parameter], run.gradients[parameter]
            if run.todo:
                self._fetch_more(run)

    def _forget(self) -> None:
        self._run = None
        self._waiting.clear()
        self._reads.waiting.clear()

    def _check(self, run: StepRun, part: Part) -> None:
        """RuntimeError, and no way on, where something that an update needs is not what it was in `step()`."""
        left_as, self._left_as = self._left_as, {}
        what = ""
        if any(version_of(run.gradients[p]) != self._versions[p] for p in part.parameters()):
            what = "gradients were written to before the deferred update that needs them; use"
            what += " zero_grad(set_to_none=True), or call handle.flush() first"
        elif any(_now(p) != then for p, then in left_as.items()):
            what = "parameters were written to before the deferred update of them; call handle.flush() first"
        if what:
            self._forget()
            error = RuntimeError(f"lowtide: {what}. This step cannot be done any more: load a checkpoint")
            self._tear(run, error)
            raise error


def _now(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes where somebody writes to a parameter, or puts other values into it (`parameter.data = values`)."""
    return version_of(parameter), storage_key(parameter.untyped_storage())


def _has_own_storage(parameter: torch.Tensor) -> bool:
    """Whether nothing else counts the versions of a parameter: views of one tensor share theirs."""
    is_plain = type(parameter) in (torch.Tensor, nn.Parameter) and parameter.layout == torch.strided
    return is_plain and parameter.untyped_storage().nbytes() == parameter.nbytes


def _before(
    module: nn.Module, own: list[torch.Tensor], below: list[torch.Tensor], regions: Collection[nn.Module]
) -> Callable[[DeferredUpdates], None]:
    """Of a module: its own parameters, or those of all modules in it."""

    def before(updates: DeferredUpdates) -> None:
        parameters = below if regions and module in regions else own
        if parameters:
            updates.before_module(parameters)

    return before


@contextlib.contextmanager
def _as_in_the_step(modes: list[Any]) -> Iterator[None]:
    """Inside, an update finds what it would have found in `step()`: these function modes, neither autocast nor
    inference mode nor the forward pass's dispatch modes. Those that count bytes go on counting."""
    counting = [mode for mode in dispatch_modes() if getattr(mode, "counts_bytes", False)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        accelerator = torch.accelerator.current_accelerator()
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if dispatch_modes():
            stack.enter_context(disable_current_modes())
        for mode in counting:
            stack.enter_context(mode)
        now = function_modes()
        if now != modes:
            stack.callback(_exchange_modes, now)
            _exchange_modes(modes)
        yield


def _exchange_modes(modes: list[Any]) -> None:
    """Have these function modes in force on this thread, and no others."""
    for _ in function_modes():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


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


class _Reads(TorchFunctionMode):
    """Has the update of a parameter done before a function of torch is given it. On from the beginning of a forward
    pass in which updates wait to its end."""

    def __init__(self, updates: DeferredUpdates) -> None:
        super().__init__()
        self.waiting: dict[int, torch.Tensor] = {}
        """By identity."""
        self._updates = weakref.ref(updates)

    @property
    def is_on(self) -> bool:
        return any(mode is self for mode in function_modes())

    def begin(self) -> None:
        push_function_mode(self)

    def end(self) -> None:
        """Take it off, wherever it is: others may have come on top that an error left there."""
        if self.is_on:
            _exchange_modes([mode for mode in function_modes() if mode is not self])

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.waiting:
            found = self._among(args)
            if kwargs:
                found += self._among(kwargs.values())
            if found and _name_of(func) not in _ASKS_ONLY:
                updates = self._updates()
                if updates is not None:
                    updates.before_reading(found)
        return func(*args, **kwargs)

    def _among(self, values: Iterable[Any]) -> list[torch.Tensor]:
        """What waits of these, and of lists of them. Called for each function, so it makes no generator."""
        waiting, found = self.waiting, []
        for value in values:
            if id(value) in waiting:
                found.append(value)
            elif isinstance(value, list | tuple):
                found += self._among(value)
        return found


def _name_of(func: Any) -> str:
    return str(getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", ""))


def why_not_deferred(model: nn.Module, parameters: Iterable[torch.Tensor]) -> str:
    """Why updates of these parameters cannot wait for the forward pass, as the end of a sentence; empty where they
    can."""
    if any(is_distributed(parameter) for parameter in parameters):
        return "does not go with FSDP2, which gathers parameters before their modules are called"
    if any(is_compiled_module(module) for module in model.modules()) or type(model).__name__ == "OptimizedModule":
        return "does not go with a compiled model"
    return ""


def check_model(model: nn.Module | None, overlap: str, parameters: list[torch.Tensor]) -> nn.Module:
    """ConfigError where updates cannot be deferred."""
    if model is None:
        raise ConfigError(
            f"lowtide.swap_optimizer: overlap '{overlap}' follows the modules of a model; give it as model="
        )
    reason = why_not_deferred(model, parameters)
    if reason:
        raise ConfigError(f"lowtide.swap_optimizer: overlap '{overlap}' {reason}; use 'backward'")
    return model
