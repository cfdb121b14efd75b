"""Habits that decide how much a step saves, and that shapes do not show: plans follow, bits stay, budgets hold.

Each habit is a training loop of a few phases. What every step holds at once is counted by an account of its own
(tests/support/independent_count.py); losses and weights are compared with those of the plain loop. The first step of
a phase may pass the budget, since nothing is known of it before it runs; no later one may, unless a warning says by how
much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import lowtide
from tests.support import zoo
from tests.support.grid import one_of
from tests.support.independent_count import IndependentCount, state_tensors
from tests.support.virtual_engine import virtual

WIDTH, ROWS = 32, 16
NUM_STEPS = 3
"""Of each phase."""


class Block(nn.Module):
    def __init__(self, p: float = 0.1) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, WIDTH)
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 8)
        self.is_cut = False
        self.num_calls = 0
        self.order = list(range(len(self.layers)))

    def forward(self, x: Tensor, twice: bool = False, scale: float = 1.0) -> Tensor:  # (N, T, WIDTH) -> scalar
        self.num_calls += 1
        inner = x
        for layer in (*(self.layers[i] for i in self.order), *(self.layers if twice else ())):
            if self.is_cut:
                inner = x = x.detach().requires_grad_()
            x = layer(x)
        return (scale * self.head(x)).square().mean() + (inner.sum() * 0 if self.is_cut else 0)


Loop = Callable[[nn.Module, int], Tensor]


def batch(seed: int, length: int = 16, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def one(model: nn.Module, number: int) -> Tensor:
    loss = model(batch(number))
    loss.backward()
    return loss


def called(**how: Any) -> Loop:
    def loop(model: nn.Module, number: int) -> Tensor:
        loss = model(batch(number), **how)
        loss.backward()
        return loss

    return loop


def joint(*lengths: int) -> Loop:
    """So many forward passes, and one backward pass from the sum of their losses."""

    def loop(model: nn.Module, number: int) -> Tensor:
        loss = torch.stack([model(batch(10 * number + i, n)) for i, n in enumerate(lengths)]).sum()
        loss.backward()
        return loss

    return loop


def in_turn(num: int, *, is_reversed: bool) -> Loop:
    """So many forward passes, then their backward passes, as a pipeline written by hand has them."""

    def loop(model: nn.Module, number: int) -> Tensor:
        losses = [model(batch(10 * number + i)) for i in range(num)]
        for loss in reversed(losses) if is_reversed else losses:
            loss.backward()
        return torch.stack(losses).detach().sum()

    return loop


def accumulating(loop: Loop) -> Loop:
    def twice(model: nn.Module, number: int) -> Tensor:
        return loop(model, 100 * number) + loop(model, 100 * number + 1)

    return twice


def kernel(model: nn.Module, number: int) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return one(model, number)


def with_input_gradient(model: nn.Module, number: int) -> Tensor:
    loss = model(batch(number).requires_grad_())
    loss.backward()
    return loss


@dataclasses.dataclass(frozen=True)
class Phase:
    loop: Loop = one
    change: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.layers[:-1].requires_grad_(False)


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.requires_grad_(True)


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.eval()


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()


def grown(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    new = [Block()]
    model.layers.extend(new)
    model.order = list(range(len(model.layers)))
    optimizer.add_param_group({"params": [p for block in new for p in block.parameters()]})


def dropping(p: float) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    return change


def hooked(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, args: kept.clear())
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: kept.append(output.exp()))


def cut(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.is_cut = True


def listed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.order += [0, 1]


HABITS: dict[str, tuple[Phase, ...]] = {
    "unfrozen": (Phase(change=freeze), Phase(change=unfreeze), Phase(change=freeze)),
    "first in eval": (Phase(change=evaluating), Phase(change=training)),
    "dropout": (Phase(change=dropping(0.0)), Phase(change=dropping(0.2)), Phase(change=dropping(0.0))),
    "grown": (Phase(), Phase(change=grown)),
    "hooks": (Phase(), Phase(change=hooked)),
    "a list": (Phase(), Phase(change=listed)),
    "a flag": (Phase(), Phase(called(twice=True)), Phase()),
    "a kernel": (Phase(), Phase(kernel)),
    "input gradients": (Phase(), Phase(with_input_gradient)),
    "leaves inside": (Phase(change=cut),),
    "two passes": (Phase(joint(16, 16)),),
    "two passes of unlike lengths": (Phase(joint(16, 9)), Phase(joint(7, 16))),
    "two passes, later four": (Phase(), Phase(joint(16, 16)), Phase(joint(16, 16, 16, 16))),
    "two passes, accumulated": (Phase(accumulating(joint(16, 16))),),
    "a pipeline by hand": (Phase(in_turn(4, is_reversed=True)),),
    "first in, first out": (Phase(in_turn(3, is_reversed=False)),),
}


def trained(phases: tuple[Phase, ...], budget: int | None = None) -> tuple[list[Tensor], list[list[int]], Any]:
    """Losses and weights; the counted peaks of each phase; and the handle, which was removed."""
    torch.manual_seed(0)
    model = Net(num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tide = None
    results: list[Tensor] = []
    peaks: list[list[int]] = []
    try:
        for number, phase in enumerate(phases):
            phase.change(model, optimizer)
            if budget is not None and tide is None:
                how: Any = {"memory": {"min_bytes": 1}, "optimizer": optimizer, "engine": virtual(1)}
                tide = lowtide.optimize(model, budget=budget, **how)
            peaks.append([])
            for step in range(NUM_STEPS):
                torch.manual_seed(100 * number + step)
                count = IndependentCount([state_tensors(model, optimizer)])
                with count:
                    loss = phase.loop(model, 100 * number + step)
                    optimizer.step()
                    optimizer.zero_grad()
                results.append(loss.detach().clone())
                peaks[-1].append(count.peak_bytes)
    finally:
        if tide is not None:
            tide.remove()
    return [*results, *(parameter.detach().clone() for parameter in model.parameters())], peaks, tide


_MORE = (
    "hooks",
    "dropout",
    "a flag",
    "input gradients",
    "two passes of unlike lengths",
    "two passes, accumulated",
    "first in, first out",
)


def test_state_that_no_copy_of_the_optimizer_showed_is_in_the_plan_once_it_is_there() -> None:
    torch.manual_seed(0)
    model = Net(num_layers=2)
    optimizer = torch.optim.ASGD(model.parameters())  # which looks at the number of its steps
    budget, peaks = 800_000, []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tide = lowtide.optimize(model, budget, memory={"min_bytes": 1}, optimizer=optimizer, engine=virtual(1))
        for step in range(NUM_STEPS):
            with IndependentCount([state_tensors(model, optimizer)]) as count:
                one(model, step)
            optimizer.step()
            optimizer.zero_grad()
            peaks.append(count.peak_bytes)
        tide.remove()
    assert any("ASGD cannot step without values" in str(each.message) for each in told)
    assert [event.why for event in tide.events] == ["first step", "the model changed: its optimizer has more state"]
    assert max(peaks[1:]) <= budget


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] if name in _MORE else []) for name in HABITS]
)
def test_plans_follow_what_the_loop_does(name: str) -> None:
    phases = HABITS[name]
    truth, plain, _ = trained(phases)
    most = max(max(peaks[1:]) for peaks in plain)
    share = Random(name).choice((0.6, 0.7, 0.85))
    budget = int(share * most)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        results, peaks, tide = trained(phases, budget)
    assert all(map(torch.equal, results, truth))
    said = [str(each.message) for each in told if "fits the budget of" in str(each.message)]
    assert len(said) <= len(phases)
    for own in peaks:
        is_seen_late = name == "a list"  # when a step has saved something else
        assert said or max(own[1 + is_seen_late :]) <= budget, [[round(p / budget, 3) for p in own] for own in peaks]
    # Several forward passes are seen when the second one comes, and nothing has to be observed for them.
    assert said or "passes" not in name or "lengths" in name or max(map(max, peaks[1:]), default=0) <= budget
    # What was there before is taken up again, and nothing is planned twice for it.
    most_events = 2 * len(phases) + 1 + (name in ("first in, first out", "two passes, accumulated"))
    events = [event.why for event in tide.events if not event.is_correction]
    assert len(events) <= most_events, events


# -- fine-tunings, optimizers, numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", one_of(5, range(5)))
def test_no_fine_tuning_dies_of_a_length(seed: int) -> None:
    """Texts of drawn lengths, in a budget below the floor of the longest: such steps run, and one warning says so."""
    draw = Random(seed)
    lengths = [draw.choice([6, 8, 12]), *(draw.randint(4, 40) for _ in range(3)), 48]

    def run(budget: int | None) -> tuple[list[Tensor], list[str], Any]:
        torch.manual_seed(seed)
        model = Net(num_layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        tide = None
        if budget is not None:
            tide = lowtide.optimize(
                model, budget=budget, memory={"min_bytes": 1}, optimizer=optimizer, engine=virtual(2)
            )
        losses = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for number in range(len(lengths)):
                torch.manual_seed(number)
                losses.append(joint(lengths[number])(model, number).detach().clone())
                optimizer.step()
                optimizer.zero_grad()
        if tide is not None:
            tide.remove()
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        return [*losses, *weights], [str(each.message) for each in told if "strict: true" in str(each.message)], tide

    truth, _, _ = run(None)
    _, _, tide = run(1 << 30)
    state = tide.profile.state
    budget = state.parameters + state.gradients + state.optimizer + 60_000
    results, said, tide = run(budget)
    assert all(map(torch.equal, results, truth))
    assert 1 <= len(said) <= 7
    assert "for inputs of 16x48x32 fits the budget of" in said[-1] and "more. Such steps run under that one" in said[-1]


def test_an_optimizer_that_was_not_given_is_found() -> None:
    budget = 1_150_000

    def peaks() -> list[int]:
        torch.manual_seed(0)
        model, foreign = Net(), nn.Linear(3, 3)
        halves = list(model.parameters())[:20], list(model.parameters())[20:]
        optimizers = [torch.optim.AdamW(halves[0]), torch.optim.SGD(halves[1], momentum=0.9)]
        other = torch.optim.Adam(foreign.parameters())
        counted = []
        hooks = list(register_optimizer_step_pre_hook.__globals__["_global_optimizer_pre_hooks"])
        with lowtide.optimize(model, budget=budget, memory={"min_bytes": 1}, engine=virtual(3)) as tide:
            for number in range(4):
                count = IndependentCount([state_tensors(model, each) for each in optimizers])
                with count:
                    foreign(torch.ones(1, 3)).sum().backward()
                    other.step()
                    one(model, number)
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
                counted.append(count.peak_bytes)
            assert [event.why for event in tide.events][:2] == ["first step", "an optimizer was found"]
            assert tide.profile.state.optimizer > 0
        assert list(register_optimizer_step_pre_hook.__globals__["_global_optimizer_pre_hooks"]) == hooks
        return counted

    assert max(peaks()[1:]) <= budget


def test_a_plan_may_change_while_other_tensors_play_the_parameters() -> None:
    """As in meta-learning, where the weights that an inner step has made see a batch of another shape."""

    def steps(budget: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        how: dict[str, Any] = {"memory": {"min_bytes": 0}, "optimizer": optimizer, "engine": virtual(0)}
        under = contextlib.nullcontext() if budget is None else lowtide.optimize(model, budget, **how)
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), under as tide:
            warnings.simplefilter("error")
            for number in range(2):
                weights = dict(model.named_parameters())
                inner = torch.func.functional_call(model, weights, (batch(number, rows=8),))
                found = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
                others = {key: w - 0.1 * g for (key, w), g in zip(weights.items(), found, strict=True)}
                torch.func.functional_call(model, others, (batch(number + 2),)).backward()
                optimizer.step()
            assert tide is None or len(tide.events) > 1
        return [*model.parameters()]

    assert all(map(zoo.same_bits, steps("1600KiB"), steps(None)))


@pytest.mark.parametrize("begins_frozen", [False, True])
def test_a_model_may_be_frozen_while_another_one_learns(begins_frozen: bool) -> None:
    """As the generator of a pair, in the steps of its critic (Lightning's `toggle_optimizer`)."""

    def steps(budget: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, critic = Net(), nn.Linear(1, 1)
        parts = (model, critic) if begins_frozen else (critic, model)
        optimizers = {part: torch.optim.Adam(part.parameters()) for part in parts}
        how: dict[str, Any] = {"memory": {"min_bytes": 0}, "optimizer": optimizers[model], "engine": virtual(0)}
        with contextlib.nullcontext() if budget is None else lowtide.optimize(model, budget, **how) as tide:
            for number in range(3):
                for frozen in parts:
                    frozen.requires_grad_(False)
                    critic(model(batch(number)).view(1)).square().backward()
                    frozen.requires_grad_(True)
                    for optimizer in optimizers.values():
                        optimizer.step()
                        optimizer.zero_grad()
            assert tide is None or (len(tide.events) == 1 and tide.stats.peak_device_bytes < 1600 << 10)
        return [p for part in parts for p in part.parameters()]

    assert all(map(zoo.same_bits, steps("1600KiB"), steps(None)))


def test_an_optimizer_of_another_model_is_refused_by_name() -> None:
    foreign = torch.optim.Adam(nn.Linear(3, 3).parameters())
    words = (
        r"this Adam has none of the parameters of Net: it steps 2 others. Give the optimizer that trains the model, "
        r"made from model.parameters\(\)$"
    )
    with pytest.raises(lowtide.ConfigError, match="^lowtide.optimize: " + words):
        lowtide.optimize(Net(), budget="1GiB", optimizer=foreign)
    with pytest.raises(lowtide.ConfigError, match="^lowtide.apply: " + words):
        lowtide.apply(Net(), {}, optimizer=foreign)


def test_numbers_that_change_nothing_cost_one_observed_step() -> None:
    """A temperature that the loop lowers, a counter that the forward pass moves, and a number that it does not read."""
    model = Net()
    model.temperature = 1.0
    with lowtide.optimize(model, budget="1GiB", memory={"min_bytes": 1}, engine=virtual(1)) as tide:
        for number in range(6):
            model.temperature = 1.0 - 0.1 * number
            called(scale=1.0 + number)(model, number)
            model.zero_grad()
        assert [event.why for event in tide.events] == ["first step", "the model changed: temperature is 0.9, not 1.0"]
        called(twice=True)(model, 0)
        assert [event.why for event in tide.events][2:] == ["new shape"]


def test_a_strict_budget_is_an_error_and_the_floor_that_it_names_will_do() -> None:
    """Also where micro-batches accumulate, and where a step has several forward passes."""
    for loop in (one, accumulating(one), joint(16, 16)):
        budget = 1 << 10
        for _ in range(4):
            model = Net()
            memory = {"min_bytes": 1, "strict": True}
            with lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(1)) as tide:
                try:
                    for number in range(3):
                        loop(model, number)
                        model.zero_grad()
                    break
                except lowtide.BudgetError as error:
                    budget = max(budget + 1, error.floor_bytes)
        else:
            raise AssertionError(f"{budget} was said to be enough")
        assert tide.events


class OwnOutput(Net):
    """Its loss is an attribute of an object that is no container to torch."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(x))


def test_forward_passes_that_give_an_object_are_planned_as_others_are() -> None:
    def events(model: nn.Module, pick: Callable[[Any], Tensor]) -> tuple[list[str], int]:
        with lowtide.optimize(model, "1536KiB", memory={"min_bytes": 1}, engine=virtual(1)) as tide:
            for number in range(NUM_STEPS):
                losses = [pick(model(batch(number))), pick(model(batch(number + 9)))]
                for loss in losses:
                    loss.backward()
                model.zero_grad()
        return [event.why for event in tide.events], tide.stats.num_spills

    found = events(OwnOutput(), lambda output: output.loss)
    assert found == events(Net(), lambda loss: loss)
    assert found == (["first step", "several forward passes before a backward pass"], 0)


def test_nothing_is_observed_on_a_guess_where_an_iterator_would_move_on() -> None:
    """A list changes what a step saves, and nothing says so but the misfits; an observed step would take a number."""

    def losses(budget: str | None) -> list[torch.Tensor]:
        model = Scaled()
        tide = None if budget is None else lowtide.optimize(model, budget, memory={"min_bytes": 0}, engine=virtual(1))
        found = []
        for number in range(6):
            if number == 2:
                model.scales = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            if number == 4:
                model.rounds[0] = 3
            loss = model(torch.ones(8, 16))
            loss.backward()
            model.zero_grad()
            found.append(loss.detach())
        if tide is not None:
            assert [event.why for event in tide.events] == ["first step"]
            tide.remove()
        return found

    assert all(map(torch.equal, losses("1GiB"), losses(None)))


class Scaled(nn.Module):
    """Reads how often it runs from a list, and a factor from an iterator that comes later."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.rounds = [1]
        self.scales: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds[0]):
            x = self.linear(x).tanh()
        return x.square().sum() * (1.0 if self.scales is None else next(self.scales))


class Remembers(nn.Module):
    """Its last output stays with it, in training alone, where there was a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.last: Any = 0

    def forward(self, x: Tensor) -> Tensor:  # (N, 16) -> scalar
        for layer in self.layers:
            x = x + layer(x)
        if self.training:
            self.last = x.detach()
        return x.square().mean()


def test_a_setting_that_becomes_a_tensor_is_compared_by_its_kind() -> None:
    torch.manual_seed(0)
    model = Remembers()
    x = torch.randn(8, 16)
    with lowtide.optimize(model, budget="1GiB", engine=virtual(1)) as tide:
        for step in range(6):
            model.train(step % 2 == 0)
            if step == 3:
                model.last = 0
            model(x + step).backward()
        assert isinstance(model.last, Tensor)
        assert len(tide.events) <= 4
