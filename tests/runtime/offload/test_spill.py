"""The watermark: live bytes stay below a limit where they can, and no bit changes whatever the limit is."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.offload.scheduler import OffloadScheduler
from lowtide.runtime.offload.site import PrefetchQueue
from lowtide.runtime.offload.spill import Guard
from lowtide.runtime.session.tide import Tide
from tests.support import zoo
from tests.support.grid import in_turn, one_of
from tests.support.independent_count import IndependentCount
from tests.support.virtual_engine import VirtualEngine, virtual

SEED = 4
KEEP = {"swap": "none", "min_bytes": 0}
BOTH = {"swap": "none", "recompute": "all", "min_bytes": 0}
FATES = {"keep": KEEP, "recompute": BOTH}
NAMES = [name for name in zoo.CASES if name not in ("checkpointed", "llama_checkpointed")]


def _spilled(
    case: zoo.Case, memory: dict, limit_bytes: int, *, engine: Any, num_steps: int = 2
) -> tuple[zoo.Result, Any]:
    """As `zoo.lowtide_step`, under a limit on activations: the model's own bytes are added."""
    model = case.build(SEED)
    optimizer = zoo.make_optimizer(model)
    with lowtide.apply(model, memory, optimizer=optimizer, engine=engine) as tide:
        tide.set_limit(tide._model_state_bytes() + limit_bytes)
        result = zoo.train(case, model, optimizer, SEED, num_steps=num_steps, accumulate=2)
        stats = tide.stats
        gc.collect()
        tide.settle()
        assert (tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes) == (0, 0)
        assert (tide.stats.host_bytes, tide.stats.disk_bytes) == (0, 0)
        assert getattr(tide.engine, "violations", []) == []
    return result, stats


@pytest.mark.parametrize(("name", "fate"), in_turn(2, zoo.CASES, reversed(FATES)))
def test_a_limit_of_nothing_spills_everything_and_changes_no_bit(name: str, fate: str) -> None:
    memory = FATES[fate]
    truth = zoo.plain_result(name, SEED, num_steps=2, accumulate=2)
    result, stats = _spilled(zoo.CASES[name], memory, 0, engine=virtual(SEED))
    zoo.assert_same(result, truth)
    if memory is KEEP and name not in ("checkpointed", "llama_checkpointed"):
        assert stats.num_spills > 0
        assert stats.spilled_bytes > 0.5 * stats.saved_bytes
    assert stats.num_over_limit > 0  # parameters and gradients alone are above such a limit
    assert stats.saved_bytes == stats.kept_bytes + stats.swapped_bytes + stats.recomputed_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(2, zoo.CASES))
@pytest.mark.parametrize("numbers", [range(1), pytest.param(range(1, 5), marks=pytest.mark.extended)], ids=["", "more"])
def test_any_limit_on_any_machine_changes_no_bit(name: str, numbers: range) -> None:
    case = zoo.CASES[name]
    truth = zoo.plain_result(name, SEED, num_steps=2, accumulate=2)
    for number in numbers:
        random = Random(f"{name}{number}")
        plan = random.choice([KEEP, BOTH, *({**plan} for plan in case.mixed_plans)])
        limit_bytes = random.randrange(200_000)
        try:
            zoo.assert_same(_spilled(case, plan, limit_bytes, engine=virtual(number))[0], truth)
        except Exception as error:
            error.add_note(f"seed {number}, limit {limit_bytes}, {plan}")
            raise


@pytest.mark.parametrize("name", ["llama_bf16", "unet", "gpt2_dropout"])
def test_spilling_to_a_disk_changes_no_bit(name: str, tmp_path: Any) -> None:
    truth = zoo.plain_result(name, SEED, num_steps=2, accumulate=2)
    memory = {**KEEP, "disk_path": str(tmp_path)}
    result, stats = _spilled(zoo.CASES[name], memory, 20_000, engine="host")
    zoo.assert_same(result, truth)
    assert stats.num_spills > 0


def _net() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))


def _apply(model: nn.Module, limit_bytes: int | None, **more: Any) -> Tide:
    tide = lowtide.apply(model, {**KEEP, **more}, engine=virtual(SEED))
    tide.set_limit(None if limit_bytes is None else tide._model_state_bytes() + limit_bytes)
    return tide


ROWS = 512  # each of the eight outputs is 64 KiB
SITE = ROWS * 32 * 4


@pytest.mark.parametrize("num_sites", [3, 5, 7])
def test_the_peak_stays_below_the_limit_and_what_was_saved_first_goes_first(num_sites: int) -> None:
    model, twin = _net(), _net()
    x = torch.randn(ROWS, 32)
    twin(x).square().sum().backward()
    state = sum(p.nbytes for p in model.parameters())
    limit = int(num_sites * SITE * 1.02) + state // 25
    with _apply(model, limit) as tide:
        loss = model(x).square().sum()
        assert tide._scheduler.ledger.now_bytes <= num_sites * SITE
        # One beyond the mark is seen before it is sent.
        assert tide._scheduler.ledger.peak_bytes <= (num_sites + 1) * SITE
        assert tide.stats.num_spills == 8 - num_sites
        assert tide.stats.spilled_bytes == (8 - num_sites) * SITE
        assert tide.stats.num_over_limit == 0
        loss.backward()
        assert tide.engine.violations == []
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_without_need_nothing_is_spilled() -> None:
    model = _net()
    with _apply(model, 20 * SITE) as tide:
        model(torch.randn(ROWS, 32)).sum().backward()
        assert (tide.stats.num_spills, tide.stats.spilled_bytes, tide.stats.num_over_limit) == (0, 0, 0)
        assert tide.stats.kept_bytes == 8 * SITE
        tide.set_limit(0)
        model(torch.randn(ROWS, 32)).sum().backward()
        assert tide.stats.num_spills > 0
        tide.reset_stats()
        tide.set_limit(None)
        model(torch.randn(ROWS, 32)).sum().backward()
        assert tide.stats.num_spills == 0


@pytest.mark.filterwarnings("ignore:lowtide. no room left:UserWarning")
def test_with_nowhere_to_go_everything_stays_and_is_counted() -> None:
    model, twin = _net(), _net()
    x = torch.randn(ROWS, 32)
    twin(x).square().sum().backward()
    with _apply(model, 0, host_budget=0, disk_budget=0) as tide:
        model(x).square().sum().backward()
        assert tide.stats.num_spills == 0
        assert tide.stats.num_over_limit > 0
        assert tide.stats.num_kept_for_lack_of_room > 0
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_write_after_saving_is_still_found() -> None:
    model = _net()
    with _apply(model, 0):
        x = model[0](torch.randn(ROWS, 32))
        for is_late in (False, True):
            y = model(torch.randn(ROWS, 32).requires_grad_()) if is_late else x
            del y
        hidden: list[torch.Tensor] = []
        hook = model[0].register_forward_hook(lambda module, args, output: hidden.append(output))
        loss = model(torch.randn(ROWS, 32)).sum()
        hook.remove()
        hidden[0].detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_several_live_graphs_retained_ones_and_dropped_ones() -> None:
    model, twin = _net(), _net()
    xs = [torch.randn(ROWS, 32) for _ in range(3)]

    def life(net: nn.Module) -> None:
        losses = [net(x).square().sum() for x in xs]
        net(xs[0])
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        losses[2].backward()

    life(twin)
    with _apply(model, 2 * SITE) as tide:
        life(model)
        gc.collect()
        tide.settle()
        assert tide.stats.num_spills > 20
        assert (tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes) == (0, 0)
        assert tide.engine.violations == []
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_gradients_that_came_are_counted_in_the_next_forward() -> None:
    model = _net()
    state_bytes = sum(p.nbytes for p in model.parameters())
    # The mark is a fiftieth below the limit: all sites fit with the parameters, and not with gradients beside them.
    high_bytes = state_bytes + 8 * SITE + state_bytes // 2
    with _apply(model, high_bytes * 50 // 49 + 1 - state_bytes) as tide:
        for has_gradients in (False, True):
            model(torch.randn(ROWS, 32)).sum().backward()
            assert (tide.stats.num_spills > 0) is has_gradients


def test_what_was_written_to_is_not_spilled() -> None:
    """It stays where it is, so that the error is that of plain autograd and no byte is sent for nothing."""
    model = _net()
    hidden: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: hidden.append(output))

    def write(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        hidden[-1].detach().add_(1)

    model[1].register_forward_hook(write)
    with _apply(model, 4 * SITE) as tide:
        loss = model(torch.randn(ROWS, 32)).sum()
        assert tide.stats.num_spills > 0
        assert tide._scheduler.find(hidden[0].untyped_storage(), 0, None) is None
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@dataclass(frozen=True)
class Choice:
    """Of an expert. A bare number would make another plan."""

    number: int


class ChoosingLayer(nn.Module):
    """A frozen expert, chosen by the step: recipes of the first step do not hold in others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64).requires_grad_(False) for _ in range(4))

    def forward(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        return x + self.after(nn.functional.silu(self.experts[choice.number](torch.tanh(self.before(x)))))


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ChoosingLayer() for _ in range(4))

    def forward(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, choice)
        return x.square().mean()


def test_where_recipes_do_not_hold_the_step_stays_within_its_budget() -> None:
    """What was to be recomputed is sent away in place of that, as far as the budget has no room for it."""
    x = torch.randn(16, 32, 64, generator=torch.Generator().manual_seed(0))
    memory = {"recompute": ["layers.*.experts.*"], "swap": "none", "min_bytes": 0}
    predicted = lowtide.plan(Chosen(), (x, Choice(0)), budget="1GiB", memory=memory).predicted
    assert predicted is not None
    budget = predicted.peak_bytes + 64
    model, truth = Chosen(), Chosen()
    tide = lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(0))
    model(x, Choice(0)).backward()  # observes, which is not what the budget is about
    model.zero_grad(set_to_none=True)
    assert tide.stats is not None and tide.stats.recomputed_bytes == 4 * 16 * 32 * 64 * 4
    with IndependentCount([*model.parameters(), x]) as live:
        model(x, Choice(2)).backward()
    assert live.peak_bytes <= budget, live.peak_bytes / budget
    assert tide.stats.num_divergences == tide.stats.num_spills == 4
    truth(x, Choice(2)).backward()
    for one, other in zip(model.parameters(), truth.parameters(), strict=True):
        assert one.grad is other.grad or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    tide.remove()


class LossLayer(ChoosingLayer):
    """Nothing is saved after what the recipe was to make."""

    def forward(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        return nn.functional.mse_loss(self.experts[choice.number](torch.tanh(self.before(x))), self.after(x))


class EndsInALoss(Chosen):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = LossLayer()

    def forward(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, choice)
        return x


@pytest.mark.filterwarnings("error::UserWarning")
def test_what_the_last_operator_saved_is_sent_away_when_the_forward_is_over() -> None:
    x = torch.randn(16, 32, 64, generator=torch.Generator().manual_seed(0))
    memory = {"recompute": ["layers.*.experts.*"], "swap": "none", "min_bytes": 0}
    plan = lowtide.plan(EndsInALoss(), (x, Choice(0)), budget="1GiB", memory=memory)
    model = EndsInALoss()
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        tide.set_limit(1 << 40, slack_bytes=0)
        model(x, Choice(0)).backward()
        assert tide.stats.recomputed_bytes == 4 * 16 * 32 * 64 * 4
        model(x, Choice(2))
        assert tide.stats.num_divergences == tide.stats.num_spills == 4


def test_what_was_sent_away_for_the_mark_is_not_asked_for_twice() -> None:
    with lowtide.apply(nn.Linear(2, 2), {"swap": "none"}, engine=virtual(0)) as tide:
        tide.set_limit(1 << 40, slack_bytes=150)
        guard = tide._context.guard
        assert guard is not None
        guard.begin()
        tensors = [torch.zeros(25), torch.zeros(25)]
        shares = [tide._scheduler.ledger.hold(tensor, 100) for tensor in tensors]
        first = guard.offer(tensors[0], shares[0], PrefetchQueue())
        away: Any = SimpleNamespace(copy=SimpleNamespace(slot=object()))
        first.site = away  # sent away since
        second = guard.offer(tensors[1], shares[1], PrefetchQueue())
        guard.end()
        assert tide.stats.num_spills == 0
        assert second.site is None


def test_where_there_is_no_room_to_send_anything_the_step_says_what_it_takes() -> None:
    x = torch.randn(16, 32, 64, generator=torch.Generator().manual_seed(0))
    memory = {"recompute": ["layers.*.experts.*"], "swap": "none", "min_bytes": 0}
    predicted = lowtide.plan(Chosen(), (x, Choice(0)), budget="1GiB", memory=memory).predicted
    assert predicted is not None
    model = Chosen()
    engine = VirtualEngine(0, host_bytes=0, disk_bytes=0)
    tide = lowtide.optimize(model, budget=predicted.peak_bytes + 64, memory=memory, engine=engine)
    model(x, Choice(0)).backward()
    model.zero_grad(set_to_none=True)
    with pytest.warns(UserWarning, match=r"0\.5 MiB of what the plan makes again had to stay.* by 0\.5 MiB"):
        model(x, Choice(2)).backward()
    assert tide.stats is not None and tide.stats.num_over_limit
    tide.remove()


class _Two(nn.Module):
    """Two losses of one activation: the first saves it, the second a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = self.layer(x)
        return made.square().sum(), made.t().cos().sum()


@pytest.mark.parametrize("limit_bytes", [2**30, 0])
def test_bytes_are_counted_as_long_as_any_view_of_a_storage_is_saved(limit_bytes: int) -> None:
    """The first handle of a storage counts them, and its node may die before those of further views."""
    torch.manual_seed(SEED)
    model, twin = _Two(), _Two()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(ROWS, 32)
    twin(x)[1].backward()
    with _apply(model, limit_bytes) as tide:
        first, second = model(x)
        held_bytes = tide.live_bytes
        assert limit_bytes == 0 or held_bytes >= SITE
        del first
        gc.collect()
        assert tide.live_bytes == held_bytes
        second.backward()
        del second
        gc.collect()
        tide.settle()
        assert tide.live_bytes == 0
    assert zoo.same_bits(model.layer.weight.grad, twin.layer.weight.grad)


class _ReadTwice(_Two):
    """Spilled with both of its readers, when the product saves what it needs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        first, second = super().forward(x)
        return first * second


def test_what_was_spilled_is_fetched_once_for_all_of_its_readers() -> None:
    model = _ReadTwice()
    with _apply(model, 0) as tide:
        model(torch.randn(ROWS, 32)).backward()
        tide.settle()
        stats = tide.stats
        assert (stats.num_spills, stats.copied_out_bytes, stats.copied_in_bytes) == (1, SITE, SITE)


def test_what_had_its_data_exchanged_is_not_spilled() -> None:
    scheduler = OffloadScheduler(VirtualEngine(SEED))
    guard = Guard(2**30, scheduler=scheduler, min_bytes=0, state_bytes=int)
    queue, leaf = PrefetchQueue(), torch.ones(8, 8)
    handle = guard.keep(leaf, queue, None)
    further = guard.view(leaf[2:], queue, None)
    assert further is not None and further.first is handle
    leaf.data = torch.zeros(8, 8)
    with scheduler.lock:
        handle.spill()
    assert zoo.same_bits(further.open(), torch.ones(6, 8))
