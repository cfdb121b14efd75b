"""What steps show that concerns the plans for all shapes.

What: `Facts` is what is known beside the profiles; a plan is made from both (planner.py). `OpenPasses` counts forward
passes whose backward pass is still to come. `SteppingOptimizers` finds optimizers that `optimize` was not given.
`what_failed` names recipes and second runs that did not hold.
Cost: a hook for each output of a planned forward pass; one on all optimizers, until one has stepped.
Not covered: what then happens (autopilot.py); graphs that are retained after their backward pass count as over.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide.core.profile import Profile, StateBytes
from lowtide.optimizer.groups import OwnedHook
from lowtide.planner.smaller import form_of
from lowtide.profiling.state_bytes import state_bytes
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.kinds import tensors_returned
from lowtide.timeline.step import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known beside the profiles, for all shapes."""

    link: Link | None = None
    """As it was measured, and corrected since; None before the first step."""
    has_gradients: bool = False
    """Forward passes find gradients (micro-batches accumulate)."""
    unsteady: frozenset[str] = frozenset()
    """Sites whose recipe did not hold in some step, and smaller forms (planner/smaller.py) that a site did not fit: no
    plan has them again."""
    refused: frozenset[str] = frozenset()
    """Layers that could not be run again in some step: no plan does."""
    resident_state_bytes: int | None = None
    """What stays of the optimizer's state, of which some is elsewhere between steps by now, whatever the shape. None as
    long as all of it stays."""
    num_passes: int = 1
    """Forward passes before a backward pass."""
    beside_bytes: int = 0
    """What the other forward passes of a step hold while one of them is at its worst."""
    optimizer: StateBytes | None = None
    """The state of an optimizer that was found, of which profiles do not know; only its fields about that."""

    def with_optimizer(self, state: StateBytes) -> StateBytes:
        """`state` with that of the optimizer that was found, where it was measured before."""
        if self.optimizer is None or state.optimizer:
            return state
        names = [field.name for field in dataclasses.fields(state) if field.name.startswith("optimizer")]
        return dataclasses.replace(state, **{name: getattr(self.optimizer, name) for name in names})

    def known_to(self, profile: Profile) -> Profile:
        """The profile with the bytes that are known beside it."""
        state = self.with_optimizer(profile.state)
        foreign_bytes = state.foreign + self.beside_bytes
        return dataclasses.replace(profile, state=dataclasses.replace(state, foreign=foreign_bytes))


class OpenPasses:
    """The forward passes whose backward pass is still to come."""

    def __init__(self) -> None:
        self._passes: weakref.WeakSet[_Pass] = weakref.WeakSet()
        """Of which the graph is alive."""
        self.most = 1
        """That were open at the same time."""
        self.output_bytes = 0
        """The most that a forward pass has given to the loop."""
        self._beside: set[Tide] = set()
        """Whose plans were taken off while forward passes under them were open."""

    @property
    def num_open(self) -> int:
        return sum(each.is_open for each in self._passes)

    def spill(self, share_bytes: int) -> int:
        """Bring each open forward pass down to so much, since other plans come for the rest of the step, or since it
        was longer than planned. Returns how many bytes more they hold all the same."""
        own = Counter(tide for each in self._passes if each.is_open and (tide := each.tide()) is not None)
        for tide, num_passes in own.items():
            if tide.live_bytes > share_bytes * num_passes:
                tide.hold_at_most(share_bytes * num_passes)
        self._beside |= own.keys()
        return sum(tide.live_bytes for tide in own) - share_bytes * own.total()

    def bytes_beside(self, in_force: Tide) -> int:
        """What open forward passes hold under other plans than that of `in_force`."""
        return sum(tide.live_bytes for tide in self._beside if tide is not in_force)

    def forget(self) -> None:
        """None is open."""
        self._beside.clear()

    def add(self, output: Any, tide: Tide) -> None:
        """A planned forward pass under `tide` gave `output`: it is open until its backward pass begins."""
        leaves = tensors_returned(output)
        own = _Pass(tide)
        for leaf in leaves:
            if leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(own.begin_backward)
                self._passes.add(own)
        nbytes = sum(leaf.numel() * leaf.element_size() for leaf in leaves if leaf.layout is torch.strided)
        self.output_bytes = max(self.output_bytes, nbytes)


class _Pass:
    """A forward pass. Alive as long as its graph is, which has hooks that belong to it."""

    def __init__(self, tide: Tide) -> None:
        self.tide = weakref.ref(tide)
        self.is_open = True

    def begin_backward(self, gradients: Any) -> None:
        self.is_open = False


class SteppingOptimizers:
    """Finds the optimizers that step the parameters of a model, as soon as they do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that have stepped."""
        self._hook = OwnedHook(self, SteppingOptimizers.note, goes=False).put_on(register_optimizer_step_pre_hook)

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to step."""
        own = {id(parameter) for parameter in self._model.parameters()}
        stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if all(optimizer is not each for each in self.optimizers) and any(id(p) in own for p in stepped):
            self.optimizers.append(optimizer)

    def state(self, device_type: str) -> StateBytes:
        """What they have on such a device: all their state, and the temporaries of the one with the most."""
        how: Any = {"inputs": 0, "device_type": device_type, "is_accelerator": device_type != "cpu"}
        states = [state_bytes(self._model, optimizer=optimizer, **how) for optimizer in self.optimizers]
        most = max(states, key=lambda state: state.optimizer_temporaries)
        return dataclasses.replace(most, optimizer=sum(state.optimizer for state in states))

    def remove(self) -> None:
        """Look no further. Idempotent."""
        self._hook.remove()


def what_failed(tide: Tide, facts: Facts) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
    """Recipes that have not held under `tide`, and layers that could not be run again, as far as `facts` do not have
    them: names, and why. Third, what is unsteady by now."""
    failed = tide.failed_recipes
    # A site may still be stored smaller where its recipe failed, and be made by its recipe where its codec did.
    smaller = {site.name for site in tide.plan.sites if site.codec is not None} if failed else ()
    lost = {name: form_of(name) if name in smaller else name for name in failed}
    failed = {name: why for name, why in failed.items() if lost[name] not in facts.unsteady}
    refused = {name: why for name, why in tide.refused_layers.items() if name not in facts.refused}
    return failed, refused, facts.unsteady | {lost[name] for name in failed}
