"""Classes of faults that were found once, each of which the attack draws from then on. `CLASSES` names them.

A class is a block (hidden.py), a way to get gradients, or a habit beside it; `drawn` gives a draw that is ordinary but
for it, so that nothing else hides what it does. To add one: write the block, function or `Side`, and one line in
`CLASSES`. Those of which lowtide is known to do something wrong are listed in `NOT_YET`, and are drawn only by name
(`python -m tests.attack --class NAME`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.attack.habits import Run, Side, operate
from tests.attack.hidden import Rounds
from tests.attack.now import TOKENS, WIDTH, Now

CHANGE = 2
"""The step before which a habit changes the model."""


# -- ways to get gradients -------------------------------------------------------------------------------------------


def preference(run: Run, step: int) -> None:
    """Two forwards before one backward, as in preference optimization."""
    chosen, rejected = run.forward(step, 0), run.forward(step, 1)
    run.between(step)
    run.backward(-F.logsigmoid(rejected - chosen))


def siamese(run: Run, step: int) -> None:
    """Three forwards of one model, joined in one loss."""
    first, second, third = (run.forward(step, micro) for micro in range(3))
    run.between(step)
    run.backward(F.relu(first - second + 0.2) + (first - third).square())


def gpipe_by_hand(run: Run, step: int) -> None:
    """All forwards, then all backwards in the same order."""
    losses = [run.forward(step, micro) / 4 for micro in range(4)]
    run.between(step)
    for index in range(len(losses)):
        run.backward(losses[index])
        losses[index] = losses[index].detach()


def own_embedding(run: Run, step: int) -> None:
    """The input hangs on the model's own parameters."""
    loss = run.forward(step, model=lambda x, **given: run.model(x + run.model.inlet(x), **given))
    run.between(step)
    run.backward(loss)


def prompt_of_frozen_model(run: Run, step: int) -> None:
    """Only the input is trained."""
    if step == 0:
        run.model.requires_grad_(False)
        run.prompt = torch.zeros(WIDTH, requires_grad=True)  # type: ignore[attr-defined]
    prompt: Tensor = run.prompt  # type: ignore[attr-defined]
    loss = run.forward(step, model=lambda x, **given: run.model(x + prompt, **given))
    run.between(step)
    run.backward(loss)
    run.trace.note(f"{step} gradient of the prompt", prompt.grad)


def jagged(run: Run, step: int) -> None:
    """Texts of different lengths in one tensor."""
    x = run.batch(step)["x"]
    lengths = [1 + (index + step) % TOKENS for index in range(len(x))]
    nested = torch.nested.nested_tensor([row[:n] for row, n in zip(x, lengths)], layout=torch.jagged)
    loss = run.model(nested, now=Now()).values().float().square().mean()
    run.trace.note(f"{step} loss", loss)
    run.last_x = x
    run.between(step)
    run.backward(loss)


CORES: dict[str, Callable[[Run, int], None]] = {
    "preference": preference,
    "siamese": siamese,
    "gpipe_by_hand": gpipe_by_hand,
    "own_embedding": own_embedding,
    "prompt_of_frozen_model": prompt_of_frozen_model,
    "jagged": jagged,
}


# -- what loops do beside ----------------------------------------------------------------------------------------------


class Lean(Side):
    is_lean = True


class GlobalHookBetween(Side):
    """A hook on all modules of the process, between forward and backward."""

    handle: Any = None

    def between(self, run: Run, step: int) -> None:
        def double(module: nn.Module, args: Any, output: Any) -> Any:
            return output * 2 if isinstance(module, nn.Linear) else None

        self.handle = torch.nn.modules.module.register_module_forward_hook(double)

    def after(self, run: Run, step: int) -> None:
        self.close()

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()


class Features(Side):
    """A hook keeps what a layer gave in a dictionary outside of the model; the next step reads it."""

    def start(self, run: Run) -> None:
        self.kept: dict[str, Tensor] = {}
        block = run.model.layers[-1].blocks[0]
        block.register_forward_hook(lambda module, args, output: self.kept.__setitem__("last", output))
        block.register_forward_pre_hook(lambda module, args: (args[0] + self._from_before(), *args[1:]))

    def _from_before(self) -> Tensor | float:
        return 0.1 * self.kept["last"].detach().mean() if "last" in self.kept else 0.0


class Unfreezes(Lean):
    def before(self, run: Run, step: int) -> None:
        if step == 0:
            self.frozen = [p for layer in list(run.model.layers)[:-1] for p in layer.parameters()]
            for parameter in self.frozen:
                parameter.requires_grad_(False)
        if step == CHANGE:
            for parameter in self.frozen:
                parameter.requires_grad_()


class EvalFirst(Lean):
    """What is trained is looked at in eval mode first, gradients and all."""

    def before(self, run: Run, step: int) -> None:
        run.model.train(step >= CHANGE)


class DropoutLater(Lean):
    def before(self, run: Run, step: int) -> None:
        for module in run.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.25 if step >= CHANGE else 0.0


class AppendsLayers(Lean):
    def before(self, run: Run, step: int) -> None:
        if step == CHANGE:
            run.model.layers.append(run.model.layers[-1])
            operate(run)  # on the last place


class FlagLater(Lean):
    """An attribute that the forward reads: from then on the first layer runs once more."""

    def before(self, run: Run, step: int) -> None:
        if step == CHANGE:
            run.model.traits |= {"twice"}


class RoundsLater(Lean):
    """Something that no flag shows: a block runs once more from then on."""

    def before(self, run: Run, step: int) -> None:
        if step == CHANGE:
            for module in run.model.modules():
                if isinstance(module, Rounds):
                    module.one_more()


class KernelLater(Lean):
    def before(self, run: Run, step: int) -> None:
        run.around = [lambda: sdpa_kernel(SDPBackend.MATH)] if step >= CHANGE else []


class Lengths(Lean):
    """Texts of other lengths in each step, up to six times the first."""

    def before(self, run: Run, step: int) -> None:
        run.size = (run.size[0], TOKENS * (1, 6, 2, 4)[step % 4])


class ReplacesBuffers(Lean):
    """Other tensors of the same values take the place of buffers, as in `load_state_dict(assign=True)`."""

    def before(self, run: Run, step: int) -> None:
        for module in run.model.modules() if step == CHANGE else ():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.clone())


class EarlyStop(Side):
    """torch's checkpoints are told to stop early, or not to."""

    def before(self, run: Run, step: int) -> None:
        is_on = run.random("early stop").random() < 0.5
        run.around = [lambda: set_checkpoint_early_stop(is_on)]
        if run.random("early stop", "backward").random() < 0.5:
            run.around_backward = [lambda: set_checkpoint_early_stop(is_on)]


SIDES: dict[str, type[Side]] = {
    "global_hook_between": GlobalHookBetween,
    "features": Features,
    "unfreezes": Unfreezes,
    "eval_first": EvalFirst,
    "dropout_later": DropoutLater,
    "appends_layers": AppendsLayers,
    "flag_later": FlagLater,
    "rounds_later": RoundsLater,
    "kernel_later": KernelLater,
    "lengths": Lengths,
    "replaces_buffers": ReplacesBuffers,
    "early_stop": EarlyStop,
}


# -- optimizers --------------------------------------------------------------------------------------------------------


class Noisy(torch.optim.AdamW):
    """Adds noise of a generator of its own, and counts in an object of its own."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.source, self.counts = torch.Generator().manual_seed(7), {"steps": [0]}

    def step(self, closure: Any = None) -> Any:
        self.counts["steps"][0] += 1
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    noise = torch.empty(parameter.shape).normal_(generator=self.source).to(parameter.dtype)
                    parameter.add_(noise, alpha=0.01 * self.counts["steps"][0])
        return super().step(closure)


def doubled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One that has a parameter twice in a group, which torch warns of, and steps twice."""
    return torch.optim.SGD([*parameters, parameters[0]], lr=0.05, momentum=0.9, foreach=False)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "noisy": lambda parameters: Noisy(parameters, lr=1e-2),
    "doubled": doubled,
}


# -- classes -----------------------------------------------------------------------------------------------------------

RERUN = ("recompute", "both", "leaves", "solved", "optimize", "looked", "looked")
WITH_PLANS = ("optimize",)
EVERY = ("recompute", "swap", "both", "solved", "optimize")


@dataclass(frozen=True)
class Fault:
    """One class: what a draw of it has, and under which plans it is drawn."""

    block: str = ""
    core: str = "plain"
    side: str = ""
    optimizer: str = ""
    plans: tuple[str, ...] = RERUN
    layers: tuple[str, ...] = ("pointwise", "gated")
    """Ordinary blocks around it."""
    states: tuple[str, ...] = ("stays",)
    own_loss: bool | None = None
    may_be_refused: bool = True
    """Whether a refusal by name is an answer; else it stops a run that could go on."""
    num_steps: int = 4


_HIDDEN = """
    namespace thread_local context_variable bytes object_array weak_dictionary locked_object enum_member imported_module
    in_place_distribution global_module global_norm filled_by_hook teacher noted_on_weight
"""

CLASSES: dict[str, Fault] = {
    **{name: Fault(block=name) for name in _HIDDEN.split()},
    "global_hook_between": Fault(side="global_hook_between", plans=("recompute", "leaves", "solved", "optimize")),
    "features": Fault(side="features"),
    "leaves": Fault(block="leaves", plans=WITH_PLANS),
    "checkpoint_inside": Fault(block="checkpoint_inside", plans=(*EVERY, "leaves")),
    "early_stop": Fault(side="early_stop", layers=("checkpointed", "pointwise"), plans=EVERY, may_be_refused=False),
    "own_backward": Fault(block="own_backward", plans=("recompute", "swap", "both", "leaves")),
    "replaces_buffers": Fault(
        side="replaces_buffers", layers=("conv", "normed"), plans=("recompute", "leaves", "both")
    ),
    "selective_cells": Fault(block="selective_cells", plans=("selective",)),
    "preference": Fault(core="preference", plans=WITH_PLANS),
    "siamese": Fault(core="siamese", plans=WITH_PLANS),
    "gpipe_by_hand": Fault(core="gpipe_by_hand", plans=WITH_PLANS),
    "own_embedding": Fault(core="own_embedding", plans=EVERY, may_be_refused=False),
    "prompt_of_frozen_model": Fault(core="prompt_of_frozen_model", plans=EVERY, may_be_refused=False),
    "jagged": Fault(core="jagged", layers=("pointwise",), plans=EVERY, own_loss=False),
    "unfreezes": Fault(side="unfreezes", plans=WITH_PLANS, num_steps=5),
    "eval_first": Fault(side="eval_first", plans=WITH_PLANS, layers=("dropouts", "gated"), num_steps=5),
    "dropout_later": Fault(side="dropout_later", plans=WITH_PLANS, layers=("dropouts", "gated"), num_steps=5),
    "appends_layers": Fault(side="appends_layers", plans=WITH_PLANS, num_steps=5),
    "flag_later": Fault(side="flag_later", plans=WITH_PLANS, num_steps=5),
    "rounds_later": Fault(block="rounds", side="rounds_later", plans=WITH_PLANS, num_steps=6),
    "kernel_later": Fault(side="kernel_later", plans=WITH_PLANS, layers=("attention", "gated"), num_steps=5),
    "lengths": Fault(side="lengths", plans=WITH_PLANS, may_be_refused=False),
    "parameter_twice": Fault(optimizer="doubled", plans=("keep",), states=("step", "backward", "in_backward")),
    "trial_of_an_optimizer": Fault(optimizer="noisy", plans=("keep",), states=("step", "backward", "auto")),
}

COUNTED_CORES = frozenset({"preference", "siamese", "gpipe_by_hand"})
"""Several forwards before one backward: one step, for a budget."""

NOT_YET: frozenset[str] = frozenset({"rounds_later"})
"""Classes of which some draw is wrong today. Take a name out when it is mended."""
