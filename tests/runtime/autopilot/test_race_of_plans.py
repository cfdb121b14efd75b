"""Plans that race on real steps: the best of them stays, and nobody can tell from bits that there was a race."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import threading
import warnings
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import MemoryConfig, load_memory
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.engines.virtual import VirtualEngine
from lowtide.errors import RecomputeRefusedError
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.problem import state_bytes
from lowtide.profiling.fake.trace import trace
from lowtide.runtime.autopilot import race as race_module
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.phases import Phase
from lowtide.runtime.autopilot.plan_cache import CachedPlan
from lowtide.runtime.autopilot.plan_source import BudgetSource, Facts
from lowtide.runtime.autopilot.race import FINAL_STEPS, MAX_STEPS
from lowtide.runtime.recompute.fingerprint import RecipeMismatchError
from lowtide.runtime.session.optimizer_state import PlacedState
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.ranks import ALONE
from lowtide.timeline.step import Link
from tests import two_ranks
from tests.engines.clocked import ClockedEngine, ClockMode
from tests.engines.roofline_clock import HARDWARE, seconds_of
from tests.runtime.autopilot.test_autopilot import MIN_BYTES, Whole, assert_same, budget_of, gradients, net, rows, step

FAST = Link(out_bytes_per_second=2e9, in_bytes_per_second=2e9, latency_seconds=1e-6)
JUST_FAST_ENOUGH = Link(out_bytes_per_second=5e8, in_bytes_per_second=5e8, latency_seconds=1e-6)
NUM_LAYERS, NUM_ROWS = 6, 256


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))


class Dice(VirtualEngine):
    """Steps take as long as the seed says: anything can win."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._times = random.Random(seed)
        self._now = 0.0

    def mark_time(self) -> float:  # type: ignore[override]
        self._now += self._times.expovariate(1.0)
        return self._now

    def seconds_between(self, start: float, end: float) -> float:  # type: ignore[override]
        return end - start


class Mispriced:
    """Plans by prices that no measurement mends: those of `profile` and `link`."""

    def __init__(self, model: nn.Module, config: MemoryConfig, engine: Any, profile: Profile, link: Link) -> None:
        self._inner = BudgetSource(model, config, engine)
        self._profile = profile
        self._link = link
        self.budget_bytes = config.budget
        self.races = True
        self.plans: dict[str, Plan] = {}

    def measure_link(self) -> Link:
        return self._link

    def make_plan(self, profile: Profile, facts: Facts, budget_bytes: int | None) -> Plan:
        assert facts.link is not None
        believed = facts.link.compute_share, facts.link.touch_seconds_per_byte
        if believed != (self._link.compute_share, self._link.touch_seconds_per_byte):  # what a race has shown
            self.plans["learned prices"] = self._inner.make_plan(self._profile, facts, budget_bytes)
            return self.plans["learned prices"]
        if "solver's" not in self.plans:  # other prices stay as they are
            facts = dataclasses.replace(facts, link=self._link)
            self.plans["solver's"] = self._inner.make_plan(self._profile, facts, budget_bytes)
        return self.plans["solver's"]

    def rivals(self, plan: Plan, profile: Profile, facts: Facts, budget_bytes: int) -> dict[str, Plan]:
        found = self._inner.rivals(plan, self._profile, dataclasses.replace(facts, link=self._link), budget_bytes)
        self.plans |= found
        return found

    def localized(self, plan: Plan, profile: Profile) -> Plan:
        return plan

    def equip(self, tide: Tide, known: CachedPlan, budget_bytes: int | None) -> None:
        self._inner.equip(tide, known, budget_bytes)

    def close(self) -> None:
        self._inner.close()


@functools.cache
def priced(share: float) -> tuple[Profile, MemoryConfig]:
    """A step by roofline, and a budget that leaves room for plans of three kinds."""
    profile = trace(net(num_layers=NUM_LAYERS), (rows(NUM_ROWS),), hardware=HARDWARE)
    found = plan_profile(profile, load_memory({"budget": 1 << 40, "min_bytes": MIN_BYTES}), link=FAST).predicted
    assert found is not None
    budget = found.floor_bytes + int(share * (found.plain_peak_bytes - found.floor_bytes))
    return profile, load_memory({"budget": budget, "min_bytes": MIN_BYTES, "check": "sampled"})


def mispriced(
    model: nn.Module, engine: Any, link: Link, *, share: float = 0.7, **more: Any
) -> tuple[Mispriced, Autopilot]:
    profile, config = priced(share)
    source = Mispriced(model, config, engine, profile, link)
    placed = PlacedState(model, None, engine, "lowtide.optimize")
    return source, Autopilot(model, source, None, engine, owns_engine=False, placed=placed, **more)


def engine_of(link: Link, factor: float = 1.0, compute_share: float = 0.0) -> ClockedEngine:
    rate = link.out_bytes_per_second * factor
    return ClockedEngine(
        out_bytes_per_second=rate,
        in_bytes_per_second=rate,
        latency_seconds=link.latency_seconds,
        compute_share=compute_share,
    )


def timed_step(model: nn.Module, engine: ClockedEngine, compute_factor: float) -> list[Tensor]:
    with ClockMode(engine.clock, lambda *call: seconds_of(*call) * compute_factor):
        return step(model, rows(NUM_ROWS))


def true_seconds(plan: Plan, engine: ClockedEngine, compute_factor: float) -> float:
    """What a step under this plan takes by itself."""
    model = net(num_layers=NUM_LAYERS)
    with lowtide.apply(model, plan, engine=engine) as tide:
        step(model, rows(NUM_ROWS))
        tide.settle()
        start = engine.clock.now
        timed_step(model, engine, compute_factor)
        return engine.clock.now - start


@pytest.mark.parametrize(
    ("link", "link_factor", "compute_factor"),
    [pytest.param(FAST, 0.1, 1.0, id="slow link"), pytest.param(JUST_FAST_ENOUGH, 1.0, 0.5, id="fast compute")],
)
def test_with_wrong_prices_it_ends_with_the_best_of_its_candidates(
    link: Link, link_factor: float, compute_factor: float
) -> None:
    """The link is ten times slower than the solver believes, or compute twice as fast."""
    truth, model, engine = net(num_layers=NUM_LAYERS), net(num_layers=NUM_LAYERS), engine_of(link, link_factor)
    said: list[str] = []
    torch.manual_seed(5)
    expected = [step(truth, rows(NUM_ROWS)) for _ in range(28)]
    num_raced = num_finals = 0
    source, tide = mispriced(model, engine, link, group=ALONE, say=said.append)
    with tide:
        torch.manual_seed(5)
        for number in range(28):
            assert_same(timed_step(model, engine, compute_factor), expected[number], f"step {number}")
            contest = tide._in_force.shapes[tide._in_force.state.key].contest  # type: ignore[index]
            num_finals += contest is not None and contest.link is not None
            num_raced += contest is not None and contest.link is None
            assert tide.stats is not None and tide.stats.num_divergences == tide.stats.num_spills == 0
        assert tide.phase is Phase.SETTLED
        assert 0 < num_raced <= MAX_STEPS and num_finals <= FINAL_STEPS
        assert set(source.plans) - {"learned prices"} == {"solver's", "no swap", "fewest layers"}
        seconds = {
            name: true_seconds(plan, engine_of(link, link_factor), compute_factor)
            for name, plan in source.plans.items()
        }
        best = min(seconds, key=lambda name: seconds[name])
        assert max(seconds.values()) > 1.05 * seconds[best]  # else nothing was at stake
        assert tide.plan is not None and tide.plan.digest() == source.plans[best].digest(), seconds
        (event,) = [event for event in tide.events if event.why.startswith("race: ")]
        assert event.why.startswith(f"race: {best} ") and event.digest == tide.plan.digest()
        (standings,) = tide.races
        assert standings[0].name == best and {each.name for each in standings} == set(source.plans)
        assert f"\nrace: {event.why.removeprefix('race: ')}\n" in str(tide.plan)
        assert any("3 plans race: solver's, no swap, fewest layers" in line for line in said)
        assert Plan.from_json(tide.plan.to_json()) == tide.plan
        assert tide.num_corrections <= 2
        assert best != "solver's"
        assert tide.plan.predicted is not None
        assert tide.plan.predicted.pass_seconds == pytest.approx(seconds[best], rel=0.05)
    assert "forward" not in vars(model)


def test_prices_that_a_race_has_shown_give_one_more_plan() -> None:
    """Each second of copying costs two of compute, and the solver believes in none: some swapping is best."""
    share, num_steps = 2.0, 28
    truth, model, engine = net(num_layers=NUM_LAYERS), net(num_layers=NUM_LAYERS), engine_of(FAST, 1.0, share)
    said: list[str] = []
    torch.manual_seed(5)
    expected = [step(truth, rows(NUM_ROWS)) for _ in range(num_steps)]
    num_raced = 0
    source, tide = mispriced(model, engine, FAST, share=0.5, group=ALONE, say=said.append)
    with tide:
        torch.manual_seed(5)
        for number in range(num_steps):
            assert_same(timed_step(model, engine, 1.0), expected[number], f"step {number}")
            num_raced += tide.phase is Phase.RACING
        assert tide.phase is Phase.SETTLED
        assert MAX_STEPS / 2 < num_raced <= MAX_STEPS + FINAL_STEPS
        seconds = {name: true_seconds(plan, engine_of(FAST, 1.0, share), 1.0) for name, plan in source.plans.items()}
        others = [seconds[name] for name in seconds if name != "learned prices"]
        assert len(others) == 3 and min(others) > seconds["learned prices"]
        assert tide.plan is not None and tide.plan.digest() == source.plans["learned prices"].digest()
        fates = {site.fate for site in tide.plan.sites}
        assert fates == {Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE}
        (event,) = [event for event in tide.events if event.why.startswith("race: ")]
        assert event.why.startswith("race: learned prices ") and tide.plan.raced in event.why
        assert "lowtide: one more plan races 'no swap': learned prices" in said
        assert tide.plan.predicted is not None
        assert tide.plan.predicted.pass_seconds == pytest.approx(seconds["learned prices"], rel=0.05)
        # What is believed from now on is what a second of copying costs.
        assert tide.link is not None and tide.link.compute_share == pytest.approx(share, rel=0.25)
        assert tide.link.out_bytes_per_second == FAST.out_bytes_per_second
        rivals = tide._in_force.shapes[tide._in_force.state.key].rivals or {}  # type: ignore[index]
        assert set(rivals) | {"fewest layers"} == set(source.plans)  # for the next race; the fewest are 'no swap' here


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_with_a_wrong_price_of_memory_it_ends_with_the_best_of_its_candidates(factor: float) -> None:
    """Memory that is taken again costs a tenth of what the solver believes, or ten times as much."""
    profile, config = priced(0.7)
    free, none = (
        plan_profile(profile, dataclasses.replace(config, swap=swap), link=FAST).predicted for swap in (None, "none")
    )
    assert free is not None and none is not None
    # For a tenth of it the plan that swaps is faster, for ten times as much the other.
    touched = free.plain_peak_bytes - state_bytes(profile)
    price = (none.pass_seconds - free.pass_seconds) / touched * (0.2 if factor > 1 else 5.0)
    assert price > 0.0
    truth, model, engine = net(num_layers=NUM_LAYERS), net(num_layers=NUM_LAYERS), engine_of(FAST)
    link = dataclasses.replace(FAST, touch_seconds_per_byte=factor * price)
    torch.manual_seed(5)
    expected = [step(truth, rows(NUM_ROWS)) for _ in range(28)]
    num_raced = num_finals = 0
    source, tide = mispriced(model, engine, link, group=ALONE)

    def touch(plan: Plan | None) -> float:
        return price * touched if plan is not None and Fate.SWAP in {site.fate for site in plan.sites} else 0.0

    with tide:
        torch.manual_seed(5)
        for number in range(28):
            assert_same(timed_step(model, engine, 1.0), expected[number], f"step {number}")
            engine.clock.now += touch(tide.plan)
            contest = tide._in_force.shapes[tide._in_force.state.key].contest  # type: ignore[index]
            num_finals += contest is not None and contest.link is not None
            num_raced += contest is not None and contest.link is None
        assert tide.phase is Phase.SETTLED and 0 < num_raced <= MAX_STEPS and num_finals <= FINAL_STEPS
        first = source.plans["solver's"]
        rival = "with swap" if factor > 1 else "no swap"
        assert (touch(first) == 0.0) == (factor > 1) and (touch(source.plans[rival]) > 0.0) == (factor > 1)
        assert first.predicted is not None
        assert ("no activation is swapped: that would take" in str(first)) == (factor > 1)
        seconds = {name: true_seconds(plan, engine_of(FAST), 1.0) + touch(plan) for name, plan in source.plans.items()}
        best = min(seconds, key=lambda name: seconds[name])
        assert best == rival or (best == "learned prices" and factor < 1)
        assert max(seconds.values()) > 1.05 * seconds[best]
        assert tide.plan is not None and seconds[best] == pytest.approx(
            true_seconds(tide.plan, engine_of(FAST), 1.0) + touch(tide.plan)
        ), seconds
        (event,) = [event for event in tide.events if event.why.startswith("race: ")]
        assert event.why.startswith(f"race: {best} ") and rival in event.why
        assert "no activation is swapped" not in str(tide.plan)


@functools.cache
def _racing_budget(num_layers: int, share: float) -> int:
    """Bytes do not depend on times."""
    return budget_of(net(num_layers=num_layers), (rows(),), share)


def racing(
    engine: Any, *, num_layers: int = 4, share: float = 0.7, say: Any = None, **more: Any
) -> tuple[nn.Module, Autopilot]:
    model = net(num_layers=num_layers)
    budget = _racing_budget(num_layers, share)
    tide = lowtide.optimize(model, budget=budget, memory={"min_bytes": MIN_BYTES, **more}, engine=engine, say=say)
    return model, tide


def until_racing(model: nn.Module, tide: Autopilot, *, with_rival: bool = False) -> None:
    """Steps until plans race, and one that is only tried is in force."""
    for _ in range(20):
        step(model, rows())
        if tide.phase is Phase.RACING and (tide._races.rival is not None or not with_rival):
            return
    raise AssertionError("no race")


@pytest.mark.parametrize("kind", ["host", 2])
def test_a_race_changes_no_bit(kind: str | int) -> None:
    """Dropout draws what it draws; whatever wins, parameters are the same after many steps of training."""
    engine: Any = kind if isinstance(kind, str) else Dice(kind)
    truth = net()
    model, tide = racing(engine)
    results = []
    phases = []
    with tide:
        for one in (truth, model):
            torch.manual_seed(5)
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            found = []
            for number in range(20):
                found.append(step(one, rows(seed=number)))
                optimizer.step()
                if one is model:
                    phases.append(tide.phase)
                    assert tide.stats is not None and tide.stats.num_divergences == 0
            results.append([*found, [parameter.detach() for parameter in one.parameters()]])
        for number, (plain, raced) in enumerate(zip(*results, strict=True)):
            assert_same(raced, plain, f"step {number}")
        # On the host, measured times decide whether there are plans that differ, and for how long they race.
        if kind != "host":
            assert [event.why[:6] for event in tide.events].count("race: ") == 1
            assert 1 <= phases.count(Phase.RACING) <= MAX_STEPS
    if isinstance(engine, Dice):
        assert not engine.violations and engine.num_slots == 0


@pytest.mark.parametrize("name", ["stateful", "inplace_input", "lora_autocast"])
def test_no_model_notices_a_race(name: str) -> None:
    """State that a forward pass leaves, inputs that it writes to, and autocast."""
    case = zoo.CASES[name]
    truth, model = Whole(case), Whole(case)
    budget = budget_of(Whole(case), case.batch(0), 0.6, zoo.make_optimizer(model))
    engine = Dice(1)
    results = []
    for one in (truth, model):
        optimizer, tide = zoo.make_optimizer(one), None
        if one is model:
            before = zoo.footprint(model)
            how: Any = {"memory": {"min_bytes": MIN_BYTES}, "engine": engine, "optimizer": optimizer}
            tide = lowtide.optimize(model, budget=budget, **how)
        torch.manual_seed(5)
        found = []
        for number in range(18):
            found.append(step(one, **case.batch(number % 5)))
            optimizer.step()
        results.append(found)
    assert tide is not None and tide.events[-1].why.startswith("race: ")
    tide.remove()
    assert zoo.footprint(model) == before and not engine.violations
    for number, (plain, raced) in enumerate(zip(*results, strict=True)):
        assert_same(raced, plain, f"step {number}")


def test_every_plan_of_a_race_fits_the_budget() -> None:
    model, tide = racing(Dice(2))
    names = set()
    with tide:
        until_racing(model, tide)
        contest = tide._in_force.shapes[tide._in_force.state.key].contest  # type: ignore[index]
        assert contest is not None
        while tide.phase is Phase.RACING:
            names.add(contest.in_force.name)
            plan, stats = tide.plan, tide.stats
            assert plan is not None and plan.predicted is not None and stats is not None
            assert plan.predicted.peak_bytes <= tide._planning.budget_bytes
            assert stats.peak_device_bytes <= tide._planning.budget_bytes and stats.num_spills == 0
            step(model, rows())
    assert len(names) == len(contest.entrants) >= 2


class Heap(Dice):
    """A step pays for what another plan left behind."""

    forgotten: list[str]

    def forget_free_memory(self) -> bool:
        self.forgotten.append("")
        return True


def test_where_a_step_pays_for_another_plans_a_turn_is_two_steps() -> None:
    engine = Heap(2)
    engine.forgotten = []
    model, tide = racing(engine)
    order: list[str] = []
    with tide:
        for _ in range(34):
            step(model, rows())
            contest = tide._in_force.shapes[tide._in_force.state.key].contest  # type: ignore[index]
            if contest is not None:
                order.append(contest.in_force.name)
        assert tide.phase is Phase.SETTLED
    num_changes = sum(one != other for one, other in itertools.pairwise(order))
    assert order and all(order[at] == order[at + 1] for at in range(0, len(order) - 1, 2))
    # Once before the first turn, and at each change; at the end only where another plan stays.
    assert 1 + num_changes <= len(engine.forgotten) <= 2 + num_changes
    assert not engine.violations


def test_without_a_race_the_plan_is_the_solvers() -> None:
    model, tide = racing(Dice(1), race=False)
    with tide:
        for _ in range(8):
            step(model, rows())
        assert [event.why for event in tide.events] == ["first step"]
        assert tide.phase is Phase.SETTLED and tide.plan is not None and not tide.plan.raced


@pytest.mark.parametrize(("share", "rules"), [(2.0, {}), (0.05, {"recompute": "none"})])
def test_one_plan_is_no_race(share: float, rules: dict[str, str]) -> None:
    """Everything fits; or so little, under a rule, that there is no other plan."""
    model, tide = racing(Dice(1), share=share, **rules)
    with tide:
        for _ in range(8):
            step(model, rows())
            assert tide.phase is not Phase.RACING
        assert [event.why for event in tide.events] == ["first step"]


def test_removed_in_the_middle_of_a_race() -> None:
    truth, engine = net(), Dice(3)
    before = zoo.footprint(net())
    model, tide = racing(engine)
    until_racing(model, tide, with_rival=True)
    model.zero_grad(set_to_none=True)
    state = torch.get_rng_state()
    loss = model(rows())
    tide.remove()
    tide.remove()
    assert tide.phase is Phase.REMOVED and tide.stats is not None
    assert zoo.footprint(model) == before
    loss.backward()  # of a plan that is gone
    found = [loss.detach().clone(), *gradients(model)]
    torch.set_rng_state(state)
    assert_same(found, step(truth, rows())[:-1])
    del loss
    assert not engine.violations


def test_the_losers_are_gone() -> None:
    model, tide = racing(Dice(2))
    with tide:
        until_racing(model, tide, with_rival=True)
        contest = tide._races.rival
        assert contest is not None
        tides = set()
        while tide.phase is Phase.RACING:
            tides.add(tide.tide)
            step(model, rows())
        assert len(tides) == len(contest.entrants)
        assert {repr(each).split()[1] for each in tides - {tide.tide}} == {"removed:"}


def test_rivals_are_made_for_what_is_left_of_the_budget() -> None:
    model, tide = racing(Dice(2), share=0.9)
    with tide:
        step(model, rows())
        before = tide._planning.budget_bytes
        tide.tighten()
        until_racing(model, tide, with_rival=True)
        assert tide.plan is not None and tide.plan.budget_bytes == int(0.9 * before)


def test_each_shape_has_its_race() -> None:
    sizes = [64] * 4 + [80] * 4 + [64, 80, 50, 70] * 14  # the last two are served by plans of larger ones
    batches = [rows(size, seed=number) for number, size in enumerate(sizes)]
    truth = net()
    torch.manual_seed(5)
    expected = [step(truth, batch) for batch in batches]
    model = net()
    budget = budget_of(net(), (rows(64),), 0.9)
    engine = Dice(2)
    memory = {"min_bytes": MIN_BYTES}
    with lowtide.optimize(model, budget=budget, memory=memory, engine=engine) as tide:
        torch.manual_seed(5)
        for number, batch in enumerate(batches):
            assert_same(step(model, batch), expected[number], f"step {number}")
        whys = [event.why for event in tide.events]
        assert whys.count("first step") == whys.count("new shape") == 1
        raced = [shape for shape in tide._in_force.shapes if shape.result]
        assert len(raced) == sum(why.startswith("race: ") for why in whys) >= 1
        assert all(shape.contest is None for shape in tide._in_force.shapes)
    assert not engine.violations


def test_two_shapes_that_take_turns_have_their_races() -> None:
    """No shape comes twice in a row."""
    batches = [rows((64, 24)[number % 2], seed=number) for number in range(48)]
    truth, model, engine = net(), net(), Dice(4)
    torch.manual_seed(5)
    expected = [step(truth, batch) for batch in batches]
    budget = budget_of(net(), (rows(64),), 0.6)
    with lowtide.optimize(model, budget=budget, memory={"min_bytes": 1}, engine=engine) as tide:
        torch.manual_seed(5)
        for number, batch in enumerate(batches):
            assert_same(step(model, batch), expected[number], f"step {number}")
            assert tide.stats is not None and tide.stats.num_divergences == 0
        whys = [event.why for event in tide.events]
        assert whys.count("first step") == whys.count("new shape") == 1
        raced = [shape for shape in tide._in_force.shapes if shape.result]
        assert len(raced) >= 1, whys
        assert all(shape.contest is None and shape.num_reviews >= 2 for shape in tide._in_force.shapes)
    assert not engine.violations


def test_a_second_thread_ends_the_race_where_it_is() -> None:
    model, tide = racing(Dice(3))
    with tide:
        until_racing(model, tide, with_rival=True)
        thread = threading.Thread(target=lambda: step(model, rows()))
        thread.start()
        thread.join()
        assert tide.phase is Phase.SETTLED
        for _ in range(4):
            step(model, rows())
            assert tide.phase is Phase.SETTLED
        assert not [event for event in tide.events if event.why.startswith("race")]


def test_nothing_races_where_two_threads_train() -> None:
    said: list[str] = []
    model, tide = racing(Dice(3), say=said.append)
    with tide:
        step(model, rows())
        thread = threading.Thread(target=lambda: step(model, rows()))
        thread.start()
        thread.join()
        for _ in range(8):
            step(model, rows())
        assert tide.phase is Phase.SETTLED
    assert not [line for line in said if "plans race" in line]


@pytest.mark.parametrize("what", ["memory", "layer", "recipe"])
def test_a_rival_that_fails_is_out_and_the_bits_are_the_same(what: str) -> None:
    error: Exception = {
        "memory": torch.OutOfMemoryError("no more"),
        "layer": RecomputeRefusedError("it has changed", "layers.0", can_stay=True),
        "recipe": RecipeMismatchError("layers.0.1.gelu"),
    }[what]
    truth, said, failed = net(), [], []
    model, tide = racing(Dice(3), say=said.append)

    def closure() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        loss = model(rows())
        contest = tide._races.rival
        if contest is not None and not failed:
            failed.append(contest.in_force.name)
            raise error
        loss.backward()
        return [loss.detach().clone(), *gradients(model), torch.get_rng_state()]

    with tide, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        found = [tide.step(closure) for _ in range(18)]
        torch.manual_seed(5)
        for number, each in enumerate(found):
            assert_same(each, step(truth, rows()), f"step {number}")
        assert failed and [line for line in said if f"the race goes on without the plan '{failed[0]}': " in line]
        assert tide.phase is Phase.SETTLED and failed[0] not in (
            tide._in_force.shapes[tide._in_force.state.key].rivals or {}
        )
        assert tide.plan is not None and not tide.plan.raced.startswith(failed[0])
        assert "out of memory" not in [event.why for event in tide.events]


def test_a_rival_whose_recipe_does_not_hold_is_out() -> None:
    model, tide = racing(Dice(3))
    with tide:
        until_racing(model, tide, with_rival=True)
        contest = tide._races.rival
        assert contest is not None and tide.tide is not None
        name = contest.in_force.name
        watch = tide.tide._context.watch(model.layers[0])
        watch.refusal = "It drew from a generator of its own."
        step(model, rows())
        assert contest.race.out and contest.in_force.name != name
        for _ in range(12):
            step(model, rows())
        assert tide.phase is Phase.SETTLED
        assert "layers cannot run again" not in [event.why for event in tide.events]


def test_tighten_ends_the_race_and_begins_another() -> None:
    model, tide = racing(Dice(3))
    with tide:
        until_racing(model, tide, with_rival=True)
        tide.tighten()
        assert tide.phase is Phase.SETTLED
        for _ in range(16):
            step(model, rows())
        whys = [event.why[:6] for event in tide.events]
        assert whys == ["first ", "out of", "race: "]
        assert tide.plan is not None and tide.plan.budget_bytes == tide.events[1].budget_bytes


def test_it_races_again_when_steps_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link becomes slower; and again nothing is known of that but the time of a step."""
    monkeypatch.setattr(race_module, "EVERY_STEPS", 22)
    engine = engine_of(FAST)
    model, tide = racing(engine)
    with tide:
        for number in range(64):
            step(model, rows())
            # As long as a step of the plan takes on this device, once for all plans.
            engine.clock.now += 1.0 if number < 25 else 2.0
        races = [event for event in tide.events if event.why.startswith("race: ")]
        assert len(races) == 2
        assert races[1].forward > 25
        assert races[1].seconds < races[0].seconds  # the plans were there


def ranks_race(rank: int) -> dict[str, Any]:
    """Each rank is fast with another plan; and what is slow on one rank is slow for all."""
    engine = engine_of(FAST)
    truth, model = net(num_layers=NUM_LAYERS), net(num_layers=NUM_LAYERS)
    costs = [{"solver's": 3.0, "no swap": 2.0}, {"solver's": 1.0, "no swap": 2.5}][rank]
    order = []
    _, tide = mispriced(model, engine, FAST)
    with tide:
        for _ in range(28):
            state = torch.get_rng_state()
            found = step(model, rows(NUM_ROWS))
            torch.set_rng_state(state)
            assert_same(found, step(truth, rows(NUM_ROWS)))
            contest = tide._in_force.shapes[tide._in_force.state.key].contest  # type: ignore[index]
            if contest is not None:
                order.append(contest.in_force.name)
                engine.clock.now += costs.get(contest.in_force.name, 4.0)
        assert tide.phase is Phase.SETTLED and tide.plan is not None
        return {"order": order, "result": tide.events[-1].why, "digest": tide.plan.digest()}


def ranks_part(rank: int) -> dict[str, Any]:
    """In the middle of the race the second rank meets a batch that the first one does not."""
    truth, model = net(num_layers=NUM_LAYERS), net(num_layers=NUM_LAYERS)
    said: list[str] = []
    _, tide = mispriced(model, engine_of(FAST), FAST, say=said.append)
    with tide:
        tide._planning.consensus._patience_seconds = 600.0
        for number in range(18):
            if number == 7:
                tide._planning.consensus._patience_seconds = 1.0  # from now on they wait in vain
            batch = rows(NUM_ROWS + 8 * rank * (number == 7))
            state = torch.get_rng_state()
            found = step(model, batch)
            torch.set_rng_state(state)
            assert_same(found, step(truth, batch))
        assert tide.phase is Phase.SETTLED and tide.plan is not None and not tide.plan.raced
        return {
            "digests": {event.digest for event in tide.events[:1]} | {tide.plan.digest()},
            "called_off": [line for line in said if "the race is called off" in line],
        }


@pytest.fixture(scope="module")
def said_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict, dict]]:
    return two_ranks.run(__name__, [("ranks_race", {}), ("ranks_part", {})], tmp_path_factory.mktemp("ranks"))


def test_two_ranks_race_in_one_order_and_the_slowest_decides(said_by_ranks: list[tuple[dict, dict]]) -> None:
    first, second = said_by_ranks[0]
    assert first == second
    # Copies seem to be dear: a plan with fewer of them comes in.
    finals = ["learned prices", "no swap"] * (FINAL_STEPS // 2)
    assert first["order"] == ["solver's", "no swap", "fewest layers"] * 4 + finals
    assert first["result"] == "race: no swap 2.50 s, solver's 3.00 s, fewest layers 4.00 s, learned prices 4.00 s"


def test_ranks_that_part_company_call_the_race_off(said_by_ranks: list[tuple[dict, dict]]) -> None:
    for each in said_by_ranks[1]:
        assert len(each["digests"]) == 1  # the solver's plan, as before the race
        assert each["called_off"] == ["lowtide: the race is called off: the ranks have parted company"]
