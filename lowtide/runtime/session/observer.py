"""A forward pass whose step is observed first, and what a loop hears where that goes wrong.

What: `StepObserver.observe` observes the step that a call of the model begins (profiling/observe_call.py), and has a
plan made of its profile. What goes wrong is raised, and the next forward pass tries again. A batch that the model
itself refuses leaves what it leaves without lowtide.

- The backward pass of the observed step failed (a hook of the user's, a number that is none): the loop is to hear of it
  from its own backward pass, so this step runs without a plan. If its backward pass goes well, the fault is in being
  observed, and the next observed step that fails is an error.
- Ctrl-C ended the observed step: what it had drawn and written was put back. The next forward pass says so.
- No plan fits: a `BudgetError` leaves the model as it was, so that its caller can take another budget, or none. But it
  is a `ValueError`, and a loop that leaves bad batches out (`except ValueError`) would go on without a plan, and not
  know. So the next forward pass that trains without a plan warns once (`Reminder`).

Cost: two to ten times a plain step, once for each shape; nothing in other steps.
Not covered: under several ranks, or where FSDP2 shards the model, a model that fails in the observed step: the error is
raised, and what that forward drew or wrote is restored; a loop that calls `model.forward` itself after a `BudgetError`,
where no hook runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from lowtide.core.profile import Profile
from lowtide.errors import BudgetError, ConfigError
from lowtide.profiling.observe_call import Witness, is_training, loss_or_all, observe_call
from lowtide.runtime.session.forward_patch import handle_of
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.private import num_dispatch_modes, queue_callback, tree_leaves
from lowtide.tensors.ranks import has_company

_Made = TypeVar("_Made")


class StepObserver:
    """Observes steps of one model."""

    def __init__(self, model: nn.Module, placed: PlacedState, group: Any, *, is_inside: bool) -> None:
        """`is_inside`: steps are observed when the model's forward is called, after its own hooks have run."""
        self._model = model
        self._placed = placed
        self._group = group
        self.is_inside = is_inside
        self.is_under_way = False
        """A step is being observed and planned for at this moment."""
        self.witness: Witness | None = None
        """Of the observed step: the first planned forward pass takes it, and shows it what comes out."""
        self._interrupted = ""
        """By what the last observed step was ended, if that was no `Exception` and the loop was not told yet."""
        self._has_ended: bool | None = None
        """Whether the backward pass of a step without a plan has ended, whose observed one failed. None: no such step.
        """

    def observe(
        self,
        args: tuple,
        kwargs: dict,
        forward: Callable[..., Any],
        make: Callable[[Profile], _Made],
        *,
        is_over: Callable[[], bool],
    ) -> _Made | None:
        """What `make` gives for the profile of the step that `forward(*args, **kwargs)` begins, which is the model's
        own. None where this step is to run without a plan; and where `is_over`: the user removed the plan meanwhile.

        Raises what the model raises, and what `make` does.
        """
        self._placed.settle()  # what is written to parameters in an observed step is put back
        witness = self.witness = Witness(type(self._model).__name__)
        profile = None
        self.is_under_way = True
        try:
            how: Any = {"is_inside": self.is_inside, "witness": witness}
            profile = observe_call(self._model, args, kwargs, self._placed.optimizer, **how)
            made = make(profile)
        except BaseException as error:
            self.is_under_way, self.witness = False, None
            came_from_forward, witness.error = witness.error is error, None  # else they would hold each other
            if is_over():
                raise
            if not isinstance(error, Exception):
                self._interrupted = type(error).__name__
            if profile is None and self._is_the_models(error):
                if came_from_forward:
                    _fail_for_real(forward, args, kwargs)
                elif witness.is_over and not self._has_ended:
                    self._go_on_without(error)
                    return None
            raise
        self.is_under_way = False
        self._has_ended = None
        if is_over():
            self.witness = None
            return None
        return made

    def _is_the_models(self, error: BaseException) -> bool:
        """Whether the model raised it, for reasons of its own; and no other rank waits meanwhile."""
        is_ours = isinstance(error, ConfigError) or str(error).startswith("lowtide:")
        if is_ours or not isinstance(error, Exception) or is_out_of_memory(error):
            return False
        return self.is_inside and not has_company(self._group)

    def _go_on_without(self, error: BaseException) -> None:
        self._has_ended = False
        first = str(error).partition("\n")[0]
        warnings.warn(
            f"lowtide: the backward pass of {type(self._model).__name__} failed while it was observed, with "
            f"{type(error).__name__}: {first}; so this step runs without a plan, and the next one is observed again.",
            stacklevel=2,
        )

    def follow_unplanned(self, output: Any) -> None:
        """The forward pass of a step without a plan gave `output`."""
        if self._has_ended is None:
            return
        leaves = (leaf for leaf in tree_leaves(loss_or_all(output)) if isinstance(leaf, torch.Tensor))
        root = next((leaf.grad_fn for leaf in leaves if leaf.grad_fn is not None), None)
        if root is not None:
            root.register_prehook(lambda gradients: queue_callback(self._note_end))

    def _note_end(self) -> None:
        self._has_ended = True

    def tell_interrupt(self) -> None:
        """If Ctrl-C ended the last observed step, the loop has caught that and trains on: warn once."""
        what, self._interrupted = self._interrupted, ""
        if what:
            warnings.warn(
                f"lowtide: {what} ended a forward pass of {type(self._model).__name__} while it was observed. What it "
                "had drawn and written by then was put back: training goes on as if it had not begun, where without "
                "lowtide a part of it would have stayed.",
                stacklevel=2,
            )


def _fail_for_real(forward: Callable[..., Any], args: tuple, kwargs: dict) -> None:
    """The model raised an error while it was observed, and nothing of that forward is left. A loop may leave such a
    batch out and go on: then random numbers were drawn and statistics moved until the error. So the forward runs once
    more, without a plan, and raises the error itself. Returns where it does not."""
    try:
        forward(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            return
        raise error from None


class Reminder:
    """A hook on the model that warns in its next forward pass that trains without a plan, and goes."""

    def __init__(self, model: nn.Module, refusal: BudgetError) -> None:
        # Not the error: it refers to its frames, and those to all that is above them.
        self._why = str(refusal).partition("\n")[0]
        self._hook = model.register_forward_pre_hook(self._before)

    def remove(self) -> None:
        self._hook.remove()

    def _before(self, model: nn.Module, args: Any) -> None:
        if not is_training() or num_dispatch_modes():  # or the step is one that `observe` or `plan` looks at
            return
        self.remove()
        if handle_of(model) is None:
            warnings.warn(
                f"lowtide: {type(model).__name__} trains without a plan from here on, since the BudgetError of a "
                f"forward pass before was caught ({self._why}). Call remove() on the handle if that is what you want.",
                stacklevel=2,
            )
