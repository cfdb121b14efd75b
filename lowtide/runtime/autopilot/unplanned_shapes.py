"""What a loop is told of forward passes that no plan was made for.

- No plan fits: a `BudgetError` leaves the model as it was, so that its caller can take another budget, or none. But it
  is a `ValueError`, and a loop that leaves bad batches out (`except ValueError`) would go on without a plan, and not
  know. So the next forward pass that trains without a plan warns once.
- Ctrl-C ended the observed step: what it had drawn and written was put back. The next forward pass says so.
- The backward pass of the observed step failed (a hook of the user's, a number that is none): the loop is to hear of it
  from its own backward pass, so this step runs without a plan. If its backward pass goes well, the fault is in being
  observed, and the next observed step that fails is an error.

Why it is safe: nothing here changes what is computed; the hook on the model goes by itself, or with `remove()`.
Cost: nothing while steps can be observed. Not covered: a loop that calls `model.forward` itself after a `BudgetError`,
where no hook runs.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from lowtide.errors import BudgetError
from lowtide.runtime.autopilot.observe_call import BackwardClock, is_training
from lowtide.runtime.session.forward_patch import handle_of
from lowtide.tensors.private import num_dispatch_modes


class UnplannedShapes:
    """Of one model on autopilot."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._interrupted = ""
        """By what the last observed step was ended, if that was no `Exception` and nobody was told yet."""
        self._backward: BackwardClock | None = None
        """The backward pass of the last observed step failed; this says if that of the real one did not."""
        self._reminder: _Reminder | None = None

    def note_refusal(self, error: BudgetError) -> None:
        """No plan fits, and the model is as it was."""
        self._reminder = _Reminder(self._model, error)

    def note_interrupt(self, error: BaseException) -> None:
        """The observed step was ended by something that is meant to end the program."""
        self._interrupted = type(error).__name__

    def tell_interrupt(self) -> None:
        """Somebody caught that, and trains on: warn once."""
        what, self._interrupted = self._interrupted, ""
        if what:
            warnings.warn(
                f"lowtide: {what} ended a forward pass of {type(self._model).__name__} while it was observed. What it "
                "had drawn and written by then was put back: training goes on as if it had not begun, where without "
                "lowtide a part of it would have stayed.",
                stacklevel=2,
            )

    def may_go_on(self) -> bool:
        """Whether a step whose observed backward pass failed may run without a plan."""
        return self._backward is None or not self._backward.seconds

    def go_on(self, error: BaseException) -> None:
        """It does, and `error` is what the observed backward pass raised."""
        self._backward = BackwardClock()
        first = str(error).partition("\n")[0]
        warnings.warn(
            f"lowtide: the backward pass of {type(self._model).__name__} failed while it was observed, with "
            f"{type(error).__name__}: {first}; so this step runs without a plan, and the next one is observed again.",
            stacklevel=2,
        )

    def follow(self, output: Any) -> None:
        """Its forward pass gave `output`."""
        if self._backward is not None:
            self._backward.follow(output, lambda: 0.0)

    def note_success(self) -> None:
        """A step was observed to its end."""
        self._backward = None

    def close(self) -> None:
        """Say nothing from now on. Idempotent."""
        if self._reminder is not None:
            self._reminder.close()


class _Reminder:
    """A hook on the model that warns in its next forward pass that trains without a plan, and goes."""

    def __init__(self, model: nn.Module, error: BudgetError) -> None:
        # Not the error: it refers to its frames, and those to all that is above them.
        self._why = str(error).partition("\n")[0]
        self._hook = model.register_forward_pre_hook(self._before)

    def close(self) -> None:
        self._hook.remove()

    def _before(self, model: nn.Module, args: Any) -> None:
        if not is_training() or num_dispatch_modes():  # or somebody looks at a step, as `observe` and `plan` do
            return
        self.close()
        if handle_of(model) is None:
            warnings.warn(
                f"lowtide: {type(model).__name__} trains without a plan from here on, since the BudgetError of a "
                f"forward pass before was caught ({self._why}). Call remove() on the handle if that is what you want.",
                stacklevel=2,
            )
