"""Habits of training loops. `CORES` are ways to get gradients in a step, of which a run has one; `SIDES` are what loops
do before, in between and after, of which it may have several.

Everything here is ordinary PyTorch, and none of it knows whether the model is under a plan; only `Run.rig` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.attack.models import Model, ModelDraw, batch_of, logits_of, loss_of
from tests.attack.moody import PlannedFailure
from tests.attack.now import TOKENS, Now, drawn, tell
from tests.attack.traces import Trace


@dataclasses.dataclass
class Run:
    """A training run under way."""

    model: Model
    optimizer: torch.optim.Optimizer
    drawn: ModelDraw
    way: str
    seed: int
    rig: Any
    trace: Trace
    sides: list[Any] = dataclasses.field(default_factory=list)
    size: tuple[int, int] = (4, TOKENS)
    """Samples and tokens of a micro-batch."""
    around: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    """Contexts of this step's forward passes."""
    around_backward: list[Callable[[], Any]] = dataclasses.field(default_factory=list)
    pending: Tensor | None = None
    last_logits: Tensor | None = None
    looks_at_logits: bool = False
    takes_two_losses: bool = False
    """Of the same logits, where they are those of a vocabulary."""
    optimizer_steps: bool = True
    play: Callable[[int], None] = lambda step: None
    """One whole step."""

    def random(self, *salt: Any) -> Random:
        """A source of choices that is the same in every run of this draw."""
        return Random(f"{self.seed} {salt}")

    def now(self, step: int, micro: int = 0) -> Now:
        """The numbers of a micro-batch."""
        return drawn(self.seed, 10 * step + micro, self.way)

    def batch(self, step: int, micro: int = 0) -> dict[str, Tensor]:
        """The data of a micro-batch."""
        return batch_of(self.drawn, 1000 * self.seed + 10 * step + micro, *self.size)

    def forward(self, step: int, micro: int = 0, model: Callable | None = None, **changes: Any) -> Tensor:
        """The loss of a micro-batch."""
        now = dataclasses.replace(self.now(step, micro), **changes)
        batch = self.batch(step, micro)
        given = tell(self.model, now, self.way)
        if self.drawn.own_loss:
            given["labels"] = batch["labels"]
        with contextlib.ExitStack() as stack:
            for make in self.around:
                stack.enter_context(make())
            output = (model or self.model)(batch["x"], **given)
        loss = self._loss(output, batch["labels"])
        self.trace.note(f"{step}.{micro} loss", loss)
        self.last_x = batch["x"]
        return loss

    def _loss(self, output: Any, labels: Tensor) -> Tensor:
        words, logits = self.drawn.words, logits_of(output)
        if words is None or logits is None:
            return loss_of(output, labels)

        def once_more(labels: Tensor) -> Tensor:
            if words.place == "loop":
                return words.cross_entropy(self.rig.cross_entropy, logits, labels)
            return self.model.loss_of(logits, labels)

        self.last_logits = logits if self.looks_at_logits else None
        loss = once_more(labels) if words.place == "loop" else loss_of(output, labels)
        return loss + once_more(labels.flip(0)) if self.takes_two_losses else loss

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward, in this step's contexts."""
        with contextlib.ExitStack() as stack:
            for make in self.around_backward:
                stack.enter_context(make())
            loss.backward(**kwargs)
        if self.last_x.grad is not None:
            self.trace.note("gradient of the input", self.last_x.grad)

    def between(self, step: int) -> None:
        """What the side habits do between forward and backward."""
        for side in self.sides:
            side.between(self, step)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def some_module(self, *salt: Any) -> nn.Module:
        """Any module inside the model."""
        modules = [module for name, module in self.model.named_modules() if name]
        return self.random(*salt).choice(modules)


# -- ways to get gradients -------------------------------------------------------------------------------------------


def plain(run: Run, step: int) -> None:
    loss = run.forward(step)
    run.between(step)
    run.backward(loss)


def accumulate(run: Run, step: int) -> None:
    for micro in range(3):
        loss = run.forward(step, micro)
        run.between(step)
        run.backward(loss / 3)
        del loss


def in_flight(run: Run, step: int) -> None:
    losses = [run.forward(step, micro) for micro in range(run.random("in_flight").choice((2, 3)))]
    run.between(step)
    run.random("order", step).shuffle(losses)
    while losses:
        run.backward(losses.pop())


def summed(run: Run, step: int) -> None:
    loss = run.forward(step, 0) + run.forward(step, 1)
    run.between(step)
    run.backward(loss)


def delayed(run: Run, step: int) -> None:
    """One micro-batch in flight: its backward comes after the next one's forward, past an optimizer step."""
    run.pending, before = run.forward(step), run.pending
    run.between(step)
    if before is not None:
        run.backward(before)


def retained(run: Run, step: int) -> None:
    loss = run.forward(step)
    run.backward(loss, retain_graph=True)
    run.between(step)
    run.backward(loss)


def twice_differentiated(run: Run, step: int) -> None:
    loss = run.forward(step)
    gradients = torch.autograd.grad(loss, run.trained(), create_graph=True, allow_unused=True)
    run.between(step)
    penalty = [gradient.pow(2).sum() for gradient in gradients if gradient is not None and gradient.requires_grad]
    run.backward(loss + 0.1 * sum(penalty))


def partly_differentiated(run: Run, step: int) -> None:
    loss = run.forward(step)
    some = run.trained()[::2]
    run.between(step)
    for parameter, gradient in zip(some, torch.autograd.grad(loss, some, allow_unused=True), strict=True):
        parameter.grad = gradient


def dropped(run: Run, step: int) -> None:
    run.forward(step, 1)
    plain(run, step)


def failing(run: Run, step: int) -> None:
    """The forward ends in an error somewhere, and the loop goes on with the next batch."""

    def fail(module: nn.Module, args: Any) -> None:
        raise PlannedFailure

    # Maybe before there is a plan, and maybe with a shape that has none.
    is_first = run.random("fails early", step).random() < 0.5
    if step % 2 or (step == 0 and is_first):
        handle = run.some_module("fails").register_forward_pre_hook(fail)
        with contextlib.suppress(PlannedFailure):
            run.forward(step, 1)
        handle.remove()
    plain(run, step)


def failing_backward(run: Run, step: int) -> None:
    def fail(gradient: Tensor) -> None:
        raise PlannedFailure

    if step % 2:
        parameter = run.random("fails", step).choice(run.trained())
        handle = parameter.register_hook(fail)
        with contextlib.suppress(PlannedFailure):
            run.backward(run.forward(step, 1))
        handle.remove()
        run.optimizer.zero_grad()
    plain(run, step)


def functional(run: Run, step: int) -> None:
    """Other tensors play the parameters."""
    lent = {name: (p.detach() * 1.1).requires_grad_(p.requires_grad) for name, p in run.model.named_parameters()}
    loss = run.forward(step, model=lambda *args, **kwargs: torch.func.functional_call(run.model, lent, args, kwargs))
    run.between(step)
    run.backward(loss)
    for name, parameter in run.model.named_parameters():
        parameter.grad = lent[name].grad


def transformed(run: Run, step: int) -> None:
    """The whole step in torch.func."""
    model = run.model
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_from(parameters: dict[str, Tensor]) -> Tensor:
        return run.forward(step, model=lambda *a, **k: torch.func.functional_call(model, parameters, a, k)).sum()

    run.trace, kept = Trace(), run.trace  # values inside of torch.func cannot be looked at
    run.trace.note = lambda *args: None  # type: ignore[method-assign]
    try:
        gradients = torch.func.grad(loss_from)(trained)
    finally:
        run.trace = kept
    run.between(step)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.get(name)


def dual(run: Run, step: int) -> None:
    """Forward-mode derivatives on the way, as in Hessian-vector products."""
    with forward_ad.dual_level():

        def model(x: Tensor, **given: Any) -> Any:
            if not x.is_floating_point():
                return run.model(x, **given)
            return run.model(forward_ad.make_dual(x, torch.ones_like(x)), **given)

        loss = run.forward(step, model=model)
        primal, tangent = forward_ad.unpack_dual(loss)
        run.trace.note(f"{step} tangent", tangent)
        run.between(step)
        run.backward(primal)


def in_closure(run: Run, step: int) -> None:
    """Forward and backward in one function, given to whoever runs it."""
    for micro in range(2):

        def closure(micro: int = micro) -> Tensor:
            loss = run.forward(step, micro)
            run.between(step)
            run.backward(loss)
            return loss.detach()

        run.trace.note(f"{step}.{micro} from step", run.rig.step(closure))


def searching(run: Run, step: int) -> None:
    """An optimizer that calls for the loss as often as it likes."""

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        plain(run, step)
        return run.forward(step).detach()

    run.optimizer.step(closure)


def in_thread(run: Run, step: int) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            plain(run, step)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


CORES: dict[str, Callable[[Run, int], None]] = {
    "plain": plain,
    "accumulate": accumulate,
    "in_flight": in_flight,
    "summed": summed,
    "delayed": delayed,
    "retained": retained,
    "twice_differentiated": twice_differentiated,
    "partly_differentiated": partly_differentiated,
    "dropped": dropped,
    "failing": failing,
    "failing_backward": failing_backward,
    "functional": functional,
    "transformed": transformed,
    "dual": dual,
    "in_closure": in_closure,
    "searching": searching,
    "in_thread": in_thread,
}
LEAN_CORES = frozenset({"plain", "accumulate"})
"""One forward at a time and nothing beside it: what a budget is for."""


# -- what loops do beside ----------------------------------------------------------------------------------------------


class Side:
    """A habit beside the way to get gradients; does nothing unless it says so."""

    is_lean = False
    """Holds no memory that a budget would have to know of."""

    def start(self, run: Run) -> None:
        """The model is made, and nobody has put a plan on it."""

    def before(self, run: Run, step: int) -> None:
        """Before the forward."""

    def between(self, run: Run, step: int) -> None:
        """Between forward and backward."""

    def after(self, run: Run, step: int) -> None:
        """After backward, before the optimizer's step."""

    def close(self) -> None:
        """The run is over, well or badly."""


class Clips(Side):
    is_lean = True

    def after(self, run: Run, step: int) -> None:
        run.trace.note(f"{step} norm", torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.5))


class Evaluates(Side):
    """A look at another batch, without gradients, in eval mode or not."""

    def before(self, run: Run, step: int) -> None:
        self._look(run, step)

    def _look(self, run: Run, step: int) -> None:
        with run.random("evaluates", step).choice((torch.no_grad, torch.inference_mode))():
            run.model.eval()
            run.trace.note(f"{step} evaluated", run.forward(step, 7).clone())
            run.model.train()


class EvaluatesBetween(Evaluates):
    def before(self, run: Run, step: int) -> None:
        pass

    def between(self, run: Run, step: int) -> None:
        self._look(run, step)


class ForwardWithoutGradients(Side):
    """In train mode, so that statistics, counters and random states move."""

    def between(self, run: Run, step: int) -> None:
        with torch.no_grad():
            run.forward(step, 8)


class EvalSteps(Side):
    """Every other step in eval mode."""

    is_lean = True

    def before(self, run: Run, step: int) -> None:
        run.model.train(step % 2 == 0)


class EvalBetween(Side):
    def before(self, run: Run, step: int) -> None:
        run.model.train()

    def between(self, run: Run, step: int) -> None:
        run.model.eval()


class EvalParts(Side):
    """Some modules are in eval mode, others than in the last step."""

    is_lean = True

    def before(self, run: Run, step: int) -> None:
        run.model.train()
        run.some_module("parts", step).eval()


class Freezes(Side):
    """Other parameters are trained in each step."""

    def before(self, run: Run, step: int) -> None:
        for parameter in getattr(self, "frozen", []):
            parameter.requires_grad_()
        trained = run.trained()
        self.frozen = run.random("freezes", step).sample(trained, len(trained) // 3)
        for parameter in self.frozen:
            parameter.requires_grad_(False)
            parameter.grad = None


class FreezesBetween(Side):
    def before(self, run: Run, step: int) -> None:
        for parameter in getattr(self, "frozen", []):
            parameter.requires_grad_()

    def between(self, run: Run, step: int) -> None:
        self.frozen = run.random("between", step).sample(run.trained(), 2)
        for parameter in self.frozen:
            parameter.requires_grad_(False)


class WritesParameter(Side):
    """A parameter is written between forward and backward. Where plain autograd saved it, plain autograd says so."""

    names = ("bias", "", "table", "experts", "prompts", "base")

    def between(self, run: Run, step: int) -> None:
        name = run.random("writes").choice(self.names)
        found = [p for key, p in run.model.named_parameters() if name in key] or list(run.model.parameters())
        write(run.random("writes", step), found)


class WritesData(Side):
    """The same behind autograd's back, as older code does."""

    def between(self, run: Run, step: int) -> None:
        run.random("data", step).choice(list(run.model.parameters())).data.add_(0.25)


class WritesBuffer(Side):
    def between(self, run: Run, step: int) -> None:
        found = [b for b in run.model.buffers() if b.is_floating_point() and b.layout is torch.strided]
        if found:
            write(run.random("buffer", step), found)


def write(r: Random, tensors: list[Tensor]) -> None:
    """Write to one of some tensors: all of it, or one element."""
    chosen = r.choice(tensors)
    with torch.no_grad():
        if r.random() < 0.5:
            chosen.add_(0.5)
        else:
            chosen.view(-1)[r.randrange(chosen.numel())] += 0.5


class WritesTable(Side):
    """One element of the rows that blocks have just looked up."""

    def between(self, run: Run, step: int) -> None:
        r, row = run.random("table", step), run.now(step).choice
        for module in run.model.modules():
            table = getattr(module, "table", None)
            if isinstance(table, Tensor) and table.ndim == 3:
                write(r, [table[row]])


class WritesActivation(Side):
    """What a module returned is written to between forward and backward."""

    def before(self, run: Run, step: int) -> None:
        self.found: list[Tensor] = []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self.found.append(output.detach())

        self.handle = run.some_module("activation", step).register_forward_hook(hook)

    def between(self, run: Run, step: int) -> None:
        self.handle.remove()
        for tensor in self.found:
            tensor.mul_(0.5)
        self.found = []


class WritesAttribute(Side):
    """Tensors and numbers in attributes of modules change between forward and backward."""

    def between(self, run: Run, step: int) -> None:
        named = ("eps", "p", "negative_slope", "threshold", "alpha", "beta", "lambd", "num_calls", "dropout")
        for module in run.model.modules():
            own = vars(module)
            for name in named:
                if isinstance(own.get(name), (int, float)) and not isinstance(own[name], bool):
                    setattr(module, name, own[name] * 0.9 if isinstance(own[name], float) else own[name] + 1)
            for name in ("table", "mean", "weight"):
                if isinstance(own.get(name), Tensor) and not own[name].requires_grad:
                    own[name].mul_(1.5)


class OtherNumbersBetween(Side):
    """The next step's numbers are told before this step's backward."""

    def between(self, run: Run, step: int) -> None:
        tell(run.model, run.now(step, 9), run.way)


class DrawsBetween(Side):
    """Somebody else draws random numbers between forward and backward."""

    def between(self, run: Run, step: int) -> None:
        torch.rand(3), random.random(), np.random.rand()
        for module in run.model.modules():
            source = vars(module).get("source")
            if isinstance(source, torch.Generator):
                torch.rand(2, generator=source)
            elif source is not None and hasattr(source, "random"):
                source.random()


class Reseeds(Side):
    def between(self, run: Run, step: int) -> None:
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)


class DtypeBetween(Side):
    def before(self, run: Run, step: int) -> None:
        torch.set_default_dtype(torch.float32)

    def between(self, run: Run, step: int) -> None:
        torch.set_default_dtype(torch.float64)


class DtypeSteps(Side):
    def before(self, run: Run, step: int) -> None:
        torch.set_default_dtype(torch.float64 if step % 2 else torch.float32)


class BackendSteps(Side):
    """Every other step with another attention kernel."""

    def before(self, run: Run, step: int) -> None:
        run.around = [lambda: sdpa_kernel(SDPBackend.MATH)] if step % 2 else []


class BackendBetween(Side):
    def before(self, run: Run, step: int) -> None:
        torch.backends.cuda.enable_flash_sdp(True)

    def between(self, run: Run, step: int) -> None:
        torch.backends.cuda.enable_flash_sdp(False)


class DeterministicBetween(Side):
    def before(self, run: Run, step: int) -> None:
        torch.use_deterministic_algorithms(False)

    def between(self, run: Run, step: int) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)


class ThreadsBetween(Side):
    def before(self, run: Run, step: int) -> None:
        torch.set_num_threads(1)

    def between(self, run: Run, step: int) -> None:
        torch.set_num_threads(2)


class AutocastSteps(Side):
    """Every other step under autocast."""

    def before(self, run: Run, step: int) -> None:
        run.around = [lambda: torch.autocast("cpu", torch.bfloat16)] if step % 2 else []


class AutocastBackward(Side):
    def before(self, run: Run, step: int) -> None:
        run.around_backward = [lambda: torch.autocast("cpu", torch.bfloat16)]


class Sizes(Side):
    """Other numbers of samples and tokens in each step."""

    def before(self, run: Run, step: int) -> None:
        r = run.random("sizes", step)
        run.size = (run.size[0] + r.choice((-1, 0, 1)), r.choice((TOKENS - 2, TOKENS, TOKENS)))


class KeepsZeros(Side):
    """Gradients are set to zero, not to None."""

    def after(self, run: Run, step: int) -> None:
        run.zeroes_in_place = True  # type: ignore[attr-defined]


class Averages(Side):
    """A running average of the weights, written into a twin."""

    def after(self, run: Run, step: int) -> None:
        if not hasattr(self, "twin"):
            self.twin = [p.detach().clone() for p in run.model.parameters()]
        for mean, parameter in zip(self.twin, run.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        run.trace.note(f"{step} average", self.twin)


class GradientHooks(Side):
    """Hooks on parameters: one changes the gradient by a number that grows, one looks at what was accumulated."""

    def before(self, run: Run, step: int) -> None:
        if step == 0:
            for index, parameter in enumerate(run.trained()):
                calls = itertools.count(index)
                parameter.register_hook(lambda gradient, calls=calls: gradient * (1 + 0.1 * next(calls)))
            last = run.trained()[-1]
            last.register_post_accumulate_grad_hook(lambda p: run.trace.note("accumulated", p.grad))


class OutputHooks(Side):
    """A forward hook that registers a tensor hook on what a module returns."""

    def before(self, run: Run, step: int) -> None:
        if step == 1:
            self._on(run.random("hook").choice(list(run.model.layers)))

    def _on(self, module: nn.Module) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(lambda gradient: gradient * 0.5)

        module.register_forward_hook(hook)


class HookBetween(Side):
    """A forward hook that changes values, registered when the forward has already run, and gone afterwards."""

    def between(self, run: Run, step: int) -> None:
        module = run.some_module("late hook", step)
        self.handle = module.register_forward_hook(lambda m, a, out: out * 2 if isinstance(out, Tensor) else out)

    def after(self, run: Run, step: int) -> None:
        self.handle.remove()


class Surgery(Side):
    """A layer is replaced by a new one in the middle of training."""

    def before(self, run: Run, step: int) -> None:
        if step == 2:
            operate(run)


class SurgeryBetween(Side):
    def between(self, run: Run, step: int) -> None:
        if step == 1:
            operate(run)


def operate(run: Run) -> None:
    """Put a fresh layer in the place of the last one, and hand its weights to the optimizer."""
    layer = type(run.model.layers[-1])(run.drawn.layers[-1], run.drawn.traits)
    layer = layer.to(next(run.model.parameters()).dtype)
    run.model.layers[-1] = layer
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if trained:
        run.optimizer.add_param_group({"params": trained})


class Reapplies(Side):
    """The plan is taken off and put on again."""

    def before(self, run: Run, step: int) -> None:
        if step == 2:
            run.rig.stop()
            run.rig.start(run.model, run.optimizer)


class RemovesBetween(Side):
    """The plan is taken off while a graph is alive."""

    def before(self, run: Run, step: int) -> None:
        if step == 2:
            run.rig.start(run.model, run.optimizer)

    def between(self, run: Run, step: int) -> None:
        if step == 1:
            run.rig.stop()


class Suspends(Side):
    """One step without the plan."""

    def before(self, run: Run, step: int) -> None:
        if step == 1:
            run.rig.suspend()
        if step == 2:
            run.rig.resume()


class ReadsLogits(Side):
    """Before the backward pass and after it."""

    def before(self, run: Run, step: int) -> None:
        run.looks_at_logits = True

    def between(self, run: Run, step: int) -> None:
        self.logits, run.last_logits = run.last_logits, None
        self._note(run, step)

    def after(self, run: Run, step: int) -> None:
        self._note(run, step)

    def _note(self, run: Run, step: int) -> None:
        if self.logits is not None:
            run.trace.note(f"{step} logits", self.logits.detach())


class WritesLogits(Side):
    """Between the loss and its backward pass. Plain autograd does not mind."""

    def before(self, run: Run, step: int) -> None:
        run.looks_at_logits = step == 1

    def between(self, run: Run, step: int) -> None:
        if run.last_logits is not None:
            write(run.random("logits", step), [run.last_logits])
        run.last_logits = None


class TwoLosses(Side):
    def before(self, run: Run, step: int) -> None:
        run.takes_two_losses = True


class Prunes(Side):
    """Weights are set to zero and rows of tables exchanged between steps."""

    is_lean = True

    def before(self, run: Run, step: int) -> None:
        with torch.no_grad():
            for parameter in list(run.model.parameters())[::3]:
                parameter.view(-1)[run.random("prunes", step).randrange(parameter.numel())] = 0.0


SIDES: dict[str, type[Side]] = {
    "clips": Clips,
    "evaluates": Evaluates,
    "evaluates_between": EvaluatesBetween,
    "forward_without_gradients": ForwardWithoutGradients,
    "eval_steps": EvalSteps,
    "eval_between": EvalBetween,
    "eval_parts": EvalParts,
    "freezes": Freezes,
    "freezes_between": FreezesBetween,
    "writes_parameter": WritesParameter,
    "writes_data": WritesData,
    "writes_buffer": WritesBuffer,
    "writes_table": WritesTable,
    "writes_activation": WritesActivation,
    "writes_attribute": WritesAttribute,
    "other_numbers_between": OtherNumbersBetween,
    "draws_between": DrawsBetween,
    "reseeds": Reseeds,
    "dtype_between": DtypeBetween,
    "dtype_steps": DtypeSteps,
    "backend_steps": BackendSteps,
    "backend_between": BackendBetween,
    "deterministic_between": DeterministicBetween,
    "threads_between": ThreadsBetween,
    "autocast_steps": AutocastSteps,
    "autocast_backward": AutocastBackward,
    "sizes": Sizes,
    "keeps_zeros": KeepsZeros,
    "averages": Averages,
    "gradient_hooks": GradientHooks,
    "output_hooks": OutputHooks,
    "hook_between": HookBetween,
    "surgery": Surgery,
    "surgery_between": SurgeryBetween,
    "reapplies": Reapplies,
    "removes_between": RemovesBetween,
    "suspends": Suspends,
    "prunes": Prunes,
}


class WritesGradients(Side):
    """Behind autograd's back, between backward and step."""

    is_lean = True

    def after(self, run: Run, step: int) -> None:
        r = run.random("writes gradients", step)
        there = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        for gradient in r.sample(there, min(2, len(there))):
            if r.random() < 0.5:
                gradient.data.mul_(0.5)
            else:
                gradient.data.view(-1)[r.randrange(gradient.numel())] += 0.25


class UnscalesGradients(Side):
    """As a `GradScaler` does before the step, by a kernel whose writes no version counts."""

    is_lean = True

    def after(self, run: Run, step: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(run.optimizer)


RARE_SIDES: dict[str, type[Side]] = {"writes_gradients": WritesGradients, "unscales_gradients": UnscalesGradients}
WORD_SIDES: dict[str, type[Side]] = {
    "reads_logits": ReadsLogits,
    "writes_logits": WritesLogits,
    "two_losses": TwoLosses,
}
"""Of models with a vocabulary."""


@contextlib.contextmanager
def own_process_state() -> Iterator[None]:
    """What habits change in the whole process is as it was afterwards."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    flash, is_deterministic = torch.backends.cuda.flash_sdp_enabled(), torch.are_deterministic_algorithms_enabled()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.use_deterministic_algorithms(is_deterministic)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
