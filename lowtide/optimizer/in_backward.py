"""Updates within the backward pass: a bucket steps as soon as all of its gradients are there, and they are freed.

What: with `overlap="in_backward"` a hook on each parameter counts gradients; the bucket that is complete is fetched,
stepped and sent back while backward goes on. `step()` does what is left. Why: copies hide behind the backward pass,
and a gradient lives only until its bucket steps, so that the device never holds all of them.

Only for training in which each step has one backward pass, and nothing looks at gradients or changes hyper-parameters
between the two: no accumulation, no clipping by a norm over all, no `GradScaler`. A second backward pass before the
step raises RuntimeError; the others cannot be seen from here. Several ranks are refused: gradients of the others are
not there yet when a parameter's own is.
Which gradients a bucket waits for is known from the step before, and a gradient that was kept (`set_to_none=False`)
does not count as one of this pass. Parameters whose state does not move, and state that is still to be made or that
somebody has replaced since the pass began, wait for `step()`. Gradients that were used are None afterwards.

Cost: a few microseconds a parameter. Not covered: see above; that is why this way must be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from lowtide.errors import ConfigError
from lowtide.optimizer.homes import Home
from lowtide.optimizer.hooks import OwnedHook
from lowtide.optimizer.step import Part, Stepper, StepRun


@dataclass(frozen=True, slots=True)
class StepCalls:
    """What a step is made of, by the handle that owns it."""

    begin: Callable[[], StepRun]
    advance: Callable[[StepRun, list[int] | None], None]
    """Step these parts of a run."""
    refresh: Callable[[], None]
    """Take in state that was replaced."""
    stepping: Callable[[], AbstractContextManager[None]]
    """Within, nothing waits for copies."""


class InBackward:
    """See the module's text."""

    def __init__(self, stepper: Stepper, parameters: list[torch.Tensor], calls: StepCalls) -> None:
        self._stepper = stepper
        self._calls = calls
        self._run: StepRun | None = None
        self._stepped: set[torch.Tensor] = set()
        self._order: list[Home] = []
        """Buckets in the order in which they were complete, in this step and in the one before."""
        self._last_order: list[Home] = []
        self._had_gradient: set[torch.Tensor] = set()
        """Parameters, in the step before."""
        self._arrived: set[torch.Tensor] = set()
        """Parameters whose gradient came in this backward pass."""
        self._hooks = [
            OwnedHook(self, InBackward._on_gradient).put_on(p.register_post_accumulate_grad_hook)
            for p in parameters
            if p.requires_grad
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def is_under_way(self) -> bool:
        """Whether backward has updated some parameters and `step()` not yet the others."""
        return self._run is not None

    def let_go(self) -> None:
        """Drop what was fetched ahead; the step that backward began can go on."""
        if self._run is not None:
            self._stepper.give_up(self._run)

    def end(self, parameters: list[torch.Tensor]) -> None:
        """The step that backward began is over; what it has not updated is somebody else's to update."""
        self.let_go()
        self.take(parameters)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter in self._stepped:
            raise RuntimeError(
                "lowtide: a second backward pass before optimizer.step(): with overlap='in_backward' the first one has "
                "updated this parameter already; use 'backward' or 'deferred' to accumulate gradients"
            )
        if parameter in self._arrived:
            self._arrived.clear()  # another pass, before anything could step in the last one
        self._arrived.add(parameter)
        home = self._complete(parameter)
        if home is not None and self._run is None:
            self._calls.refresh()
            home = self._complete(parameter)
        if home is None:
            return
        with self._calls.stepping():
            is_bound = home.is_bound(self._stepper.optimizer.state)
            part = self._stepper.part_of(home) if is_bound else None
        if part is None:
            return  # its state was replaced since, or one of its groups must step at once
        if self._run is None:
            self._run = self._calls.begin()
        self._step(self._run, home, part)

    def _complete(self, parameter: torch.Tensor) -> Home | None:
        """The bucket of this parameter, if all of its gradients are there."""
        home = self._stepper.store.home_of.get(parameter)
        if home is None or home.resident is not None or parameter not in self._had_gradient:
            return None
        expected = [p for p in home.parameters if p in self._had_gradient or p.grad is not None]
        return home if all(p in self._arrived and p.grad is not None for p in expected) else None

    def _step(self, run: StepRun, home: Home, part: Part) -> None:
        run.parts.append(part)
        run.todo.append(len(run.parts) - 1)
        self._order.append(home)
        self._stepped.update(part.parameters())
        self._calls.advance(run, [len(run.parts) - 1])
        for parameter in part.parameters():
            parameter.grad = None
        self._fetch_next(run, home)

    def _fetch_next(self, run: StepRun, home: Home) -> None:
        following = self._last_order.index(home) + 1 if home in self._last_order else len(self._last_order)
        if following < len(self._last_order) and self._last_order[following] in self._stepper.store.homes:
            self._stepper.fetch_ahead(run, self._last_order[following].pieces[0])

    def take(self, parameters: list[torch.Tensor]) -> StepRun | None:
        """The step that backward began, or None. `parameters` are those of the optimizer."""
        run, self._run = self._run, None
        self._had_gradient = {p for p in parameters if p.grad is not None} | self._stepped
        self._last_order, self._order = self._order, []
        self._stepped = set()
        self._arrived = set()
        return run


def check_alone() -> None:
    """ConfigError where other ranks have a part in the gradients."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            "lowtide.swap_optimizer: overlap 'in_backward' is for one rank: when a gradient is there, those of other "
            "ranks are not; use 'backward'"
        )
