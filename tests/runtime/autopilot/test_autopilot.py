"""The autopilot on real models: budgets kept, bits unchanged, stable in three planned steps, and no trace left."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.log import Listener
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling import op_timer
from lowtide.profiling.observe_step import observe
from lowtide.runtime.autopilot import measure
from lowtide.runtime.session.tides import Tides
from lowtide.timeline.step import Link
from tests.engines.clocked import ClockedEngine
from tests.support import two_ranks, zoo
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

ROOT = Path(__file__).parents[3]
LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
MIN_BYTES = 256


class Whole(nn.Module):
    """A model and its loss: what the autopilot can see all of."""

    def __init__(self, case: zoo.Case) -> None:
        super().__init__()
        self.case, self.model = case, case.build(0)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.case.loss(self.model, batch)


class Net(nn.Module):
    """Small layers with dropout; any number of rows and, inside, of copies of them."""

    def __init__(self, num_layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(num_layers)
        )
        self.num_copies = [1]
        """A list: plans do not look into it."""
        self.fails_in: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:  # (N, width) -> scalar
        x = x.repeat(*self.num_copies, 1)
        for index, layer in enumerate(self.layers):
            if index in self.fails_in:
                raise KeyError("no such expert")
            x = x + layer(x).tanh()
        return x.square().mean()


def rows(num_rows: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(seed))


def net(**more: Any) -> Net:
    torch.manual_seed(0)
    return Net(**more).train()


def budget_of(model: nn.Module, batch: Any, share: float = 0.5, optimizer: Any = None) -> int:
    """So much of the way from the floor to everything kept."""
    profile = observe(model, batch, optimizer=optimizer)
    memory = load_memory({"budget": 1 << 40, "min_bytes": MIN_BYTES})
    found = plan_profile(profile, memory, link=LINK).predicted
    assert found is not None
    return found.floor_bytes + int(share * (found.plain_peak_bytes - found.floor_bytes))


def optimize(model: nn.Module, budget: int, **more: Any) -> Tides:
    memory = {"min_bytes": MIN_BYTES}
    return lowtide.optimize(model, budget=budget, memory=memory, **{"engine": virtual(1), "strict": True, **more})


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def step(model: nn.Module, *args: Tensor, **batch: Tensor) -> list[Tensor]:
    """Loss, gradients and random state of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(*args, **batch)
    loss.backward()
    return [loss.detach().clone(), *gradients(model), torch.get_rng_state()]


def assert_same(found: list[Tensor], truth: list[Tensor], where: str = "") -> None:
    assert len(found) == len(truth)
    wrong = [index for index, pair in enumerate(zip(found, truth, strict=True)) if not same_bits(*pair)]
    assert not wrong, f"{where}: {wrong} of {len(truth)} differ"


def plain_steps(model: nn.Module, batches: list[Tensor], seed: int = 5) -> list[list[Tensor]]:
    torch.manual_seed(seed)
    return [step(model, batch) for batch in batches]


# ---------------------------------------------------------------------------------------------------------------------
# Budgets and bits


NAMES = (
    "llama", "llama_bf16", "gpt2_dropout", "deepseek_v3", "unet", "transformer_encoder", "tied", "shared_layer",
    "structured_outputs", "stateful", "inplace_input", "lora_autocast",
)  # fmt: skip


ON_THE_HOST_ALWAYS = ("tied",)
ON_THE_HOST = [
    pytest.param(name, "host", marks=() if name in ON_THE_HOST_ALWAYS else (pytest.mark.slow, pytest.mark.extended))
    for name in NAMES
]


@pytest.mark.parametrize(("name", "kind"), [*ON_THE_HOST, *one_of(3, [(name, virtual(3)) for name in NAMES])])
def test_budgets_are_kept_and_no_bit_changes(name: str, kind: str) -> None:
    case = zoo.CASES[name]
    runs = []
    for is_planned in (False, True):
        model = Whole(case)
        optimizer = zoo.make_optimizer(model)
        tide = None
        if is_planned:
            budget = budget_of(model, case.batch(0), optimizer=optimizer)
            before = zoo.footprint(model)
            tide = optimize(model, budget, optimizer=optimizer, engine=kind)
        results = []
        torch.manual_seed(5)
        for number in range(5):
            results.append(step(model, **case.batch(number)))
            optimizer.step()
            if tide is not None:
                assert tide.stats is not None
                assert tide.stats.num_spills == 0, f"step {number}: the guard spilled in a step as planned"
                assert len(tide.events) <= min(number + 1, 3)
        if tide is not None:
            assert tide.tide is not None
            assert (tide.stats.num_divergences, tide.stats.num_unknown) == (0, 0)
            assert tide.num_corrections <= 2
            model.zero_grad(set_to_none=True)
            tide.tide.settle()
            with tide.tide.audit() as audit:
                model(**case.batch(9)).backward()
            assert audit.peak_bytes <= budget, f"{audit.peak_bytes} of {budget}"
            tide.remove()
            assert zoo.footprint(model) == before
        runs.append(results)
    for number, (truth, found) in enumerate(zip(*runs, strict=True)):
        assert_same(found, truth, f"step {number}")


def test_it_is_stable_within_three_planned_steps() -> None:
    model, x = net(), rows()
    tide = optimize(model, budget_of(model, (x,)), engine="host")
    for _ in range(3):
        step(model, x)
    events = list(tide.events)
    assert events[0].why == "first step"
    assert len(events) <= 3
    for _ in range(8):
        step(model, x)
    assert tide.events == events


def test_it_says_where_the_speeds_of_links_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, lines = net(), []
    with Listener(lines.append), optimize(model, budget_of(model, (rows(),))):
        step(model, rows())
    kept = tmp_path / "lowtide" / "links.json"
    assert kept.exists()
    assert [line for line in lines if line.endswith(f"this machine's are kept in {kept}")]


def test_dropout_draws_what_it_draws_without_a_plan() -> None:
    batches = [rows(seed=number) for number in range(4)]
    truth = plain_steps(net(), batches)
    model = net()
    with optimize(model, budget_of(model, (batches[0],))):
        for found, plain in zip(plain_steps(model, batches), truth, strict=True):
            assert_same(found, plain)


def test_gradients_accumulate_as_without_a_plan() -> None:
    model, truth = net(), net()
    budget = budget_of(model, (rows(),), 0.6)
    with optimize(model, budget + sum(p.nbytes for p in model.parameters())) as tide:
        for one in (truth, model):
            torch.manual_seed(5)
            for number in range(2):
                one.zero_grad(set_to_none=True)
                for micro in range(3):
                    one(rows(seed=3 * number + micro)).backward()
        assert_same(gradients(model), gradients(truth))
        assert [event.why for event in tide.events][:2] == ["first step", "gradients stay"]
        assert len(tide.events) <= 3


# ---------------------------------------------------------------------------------------------------------------------
# Shapes


def test_each_shape_has_its_plan_and_known_ones_are_not_observed_again() -> None:
    sizes = [64, 64, 96, 64, 96, 24, 24, 24, 64]
    batches = [rows(size, seed=number) for number, size in enumerate(sizes)]
    truth = plain_steps(net(), batches)
    model = net()
    said: list[str] = []
    budget = budget_of(model, (rows(96),))
    with Listener(said.append), optimize(model, budget) as tide:
        for found, plain in zip(plain_steps(model, batches), truth, strict=True):
            assert_same(found, plain)
        assert [event.why for event in tide.events] == ["first step", "new shape", "new shape"]
        assert sum("observing" in line for line in said) == 3
        assert tide.profile is not None and "64, 32" in tide.profile.batch


def test_a_plan_serves_smaller_batches_too() -> None:
    sizes = [96, 80, 95, 48, 96, 61, 50, 96]
    batches = [rows(size, seed=number) for number, size in enumerate(sizes)]
    truth = plain_steps(net(), batches)
    model = net()
    with optimize(model, budget_of(model, (rows(96),), 0.3)) as tide:
        torch.manual_seed(5)
        at_work = []
        for batch, plain in zip(batches, truth, strict=True):
            assert_same(step(model, batch), plain)
            at_work.append(tide.tide)
        assert [event.why for event in tide.events] == ["first step"]
        assert at_work[2] is at_work[-1]
        assert tide.stats is not None and tide.stats.num_divergences == 0
        assert tide.stats.swapped_bytes + tide.stats.recomputed_bytes > 0


def test_a_plan_that_is_taken_up_again_knows_what_it_learned() -> None:
    model = net()
    before = zoo.footprint(model)
    with optimize(model, budget_of(model, (rows(96),))) as tide:
        at_work = []
        for number, size in enumerate([32, 96, 32, 96, 32]):
            step(model, rows(size, seed=number))
            at_work.append(tide.tide)
        assert at_work[0] is at_work[2] is at_work[4]
        assert at_work[1] is at_work[3] is not at_work[0]
    assert zoo.footprint(model) == before


def test_evaluation_in_between_does_nothing() -> None:
    batches = [rows(seed=number) for number in range(4)]
    truth = plain_steps(net(), batches)
    model = net()
    with optimize(model, budget_of(model, (batches[0],))) as tide:
        torch.manual_seed(5)
        for number, batch in enumerate(batches):
            state = torch.get_rng_state()
            with torch.no_grad():
                model(rows(48, seed=99))
                model.eval()
                value = model(rows(40, seed=98))
                model.train()
            assert not value.requires_grad
            torch.set_rng_state(state)
            assert_same(step(model, batch), truth[number])
        assert [event.why for event in tide.events] == ["first step"]
        assert tide.stats is not None and tide.stats.num_divergences == 0


def test_two_threads_whose_first_forwards_coincide_share_one_plan() -> None:
    """One observes and plans, the other one waits, also where it arrives while that goes on."""
    num_steps, truth, model = 4, net().eval(), net().eval()
    budget = budget_of(net().eval(), (rows(),))
    both, got = threading.Barrier(2), {0: [], 1: []}

    def steps(tried: nn.Module, number: int, found: list[list[Tensor]]) -> None:
        both.wait(60)
        for index in range(num_steps):
            loss = tried(rows(seed=2 * index + number))
            found.append([loss.detach(), *torch.autograd.grad(loss, list(tried.parameters()))])

    with optimize(model, budget) as tide:
        threads = [threading.Thread(target=steps, args=(model, number, got[number])) for number in got]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [event.why for event in tide.events].count("first step") == 1
        assert tide.stats is not None and (tide.stats.num_divergences, tide.stats.num_unknown) == (0, 0)
    for number, found in got.items():
        assert len(found) == num_steps
        for index, step_found in enumerate(found):
            loss = truth(rows(seed=2 * index + number))
            assert_same(step_found, [loss.detach(), *torch.autograd.grad(loss, list(truth.parameters()))])


@pytest.mark.parametrize("rule", [["model.model.layers.0"], "all"])
def test_a_recompute_rule_beside_a_budget_runs_the_layer_again(rule: Any) -> None:
    case = zoo.CASES["llama"]
    batches = [case.batch(number) for number in range(3)]
    truth_model, model = Whole(case), Whole(case)
    memory = {"min_bytes": MIN_BYTES, "recompute": rule}
    with lowtide.optimize(model, budget="1GiB", memory=memory, engine=virtual(1)) as tide:
        for batch in batches:
            assert_same(step(model, **batch), step(truth_model, **batch))
            assert tide.stats is not None
            assert (tide.stats.num_divergences, tide.stats.num_unknown) == (0, 0)
            assert tide.stats.recomputed_bytes > 0
            assert tide.plan is not None
            assert [rule.pattern.text for rule in tide.plan.rules.rules if rule.fate is Fate.RECOMPUTE] == (
                list(tide.plan.layers) if rule == "all" else rule
            )


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def test_a_budget_below_the_floor_leaves_the_model_as_it_was() -> None:
    model, x = net(), rows()
    before = zoo.footprint(model)
    (truth,) = plain_steps(net(), [x])
    tide = optimize(model, 1 << 10)
    torch.manual_seed(5)
    with pytest.raises(lowtide.BudgetError, match="no plan fits; the least that can be reached is") as caught:
        model(x)
    assert caught.value.floor_bytes > 1 << 10
    with pytest.warns(UserWarning, match="trains without a plan from here on"):
        assert_same(step(model, x), truth)
    assert zoo.footprint(model) == before
    tide.remove()
    assert zoo.footprint(model) == before
    assert_same(*plain_steps(model, [x]), truth)


def test_a_new_shape_that_no_plan_fits_is_refused_and_the_known_one_goes_on() -> None:
    model, x = net(), rows()
    (truth,) = plain_steps(net(), [x])
    with optimize(model, budget_of(model, (x,), 0.1)) as tide:
        assert_same(*plain_steps(model, [x]), truth)
        model.zero_grad(set_to_none=True)
        for _ in range(2):
            with pytest.raises(lowtide.BudgetError):
                model(rows(2048))
        assert_same(*plain_steps(model, [x]), truth)
        assert [event.why for event in tide.events] == ["first step"]


def test_an_error_in_the_observed_forward_leaves_what_it_leaves_without_lowtide() -> None:
    model, x = net(), rows()
    (truth,) = plain_steps(net(), [x])
    before = zoo.footprint(model)
    tide = optimize(model, budget_of(model, (x,)))
    under = zoo.footprint(model)
    model.fails_in = {2}
    plain = net()
    plain.fails_in = {2}
    states = []
    for each in (plain, model):
        torch.manual_seed(5)
        with pytest.raises(KeyError, match="no such expert"):
            each(x)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert zoo.footprint(model) == under
    assert tide.events == [] and tide.plan is None
    model.fails_in = set()
    assert_same(*plain_steps(model, [x]), truth)
    assert [event.why for event in tide.events] == ["first step"]
    tide.remove()
    assert zoo.footprint(model) == before


def test_what_is_refused_at_once() -> None:
    model = net()
    with optimize(model, 1 << 30), pytest.raises(lowtide.ConfigError) as caught:
        lowtide.optimize(model, budget="1GiB")
    assert (
        str(caught.value)
        == "lowtide.optimize: this model is already under a lowtide plan; call remove() on that tide first"
    )
    with lowtide.apply(model, {"swap": "none"}), pytest.raises(lowtide.ConfigError, match="already under a lowtide"):
        lowtide.optimize(model, budget="1GiB")
    with pytest.raises(lowtide.ConfigError) as caught:
        lowtide.optimize(lambda x: x, budget="1GiB")  # type: ignore[arg-type]
    assert str(caught.value) == "lowtide.optimize: expected a torch.nn.Module, not function"


def test_a_wrapper_of_somebody_else_stays_where_it_is_when_the_plan_changes() -> None:
    model, truth, num_calls = net(), net(), 0
    with optimize(model, budget_of(model, (rows(),), 0.3)) as tide:
        step(model, rows())
        below = model.forward

        def counted(*args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return below(*args)

        model.forward = counted
        for num_rows in (24, 64, 24):
            torch.manual_seed(num_rows)
            step(model, rows(num_rows))
        assert [event.why for event in tide.events] == ["first step", "new shape"]
    assert num_calls >= 3
    assert model.forward is counted
    for each in (model, truth):
        torch.manual_seed(0)
        each.zero_grad()
        each(rows()).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(model.parameters(), truth.parameters(), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# The guard


def test_a_step_that_saves_more_than_planned_is_spilled() -> None:
    """The shapes of the inputs are the same; what the model makes of them is not."""
    truth, model, x = net(), net(), rows()
    peaks = {}
    for limited in (True, False):
        with optimize(model, budget_of(model, (x,), 0.9)) as tide:
            for one in (truth, model):
                torch.manual_seed(5)
                one.num_copies = [1]
                for _ in range(3):
                    step(one, x)
                one.num_copies = [3]
            assert tide.tide is not None and tide.stats is not None
            assert tide.stats.num_spills == 0
            if not limited:
                tide.tide.set_limit(None)
            torch.manual_seed(6)
            expected = step(truth, x)
            model.zero_grad(set_to_none=True)
            tide.tide.settle()
            torch.manual_seed(6)
            with tide.tide.audit() as audit:
                found = step(model, x)
            assert_same(found, expected)
            peaks[limited] = audit.peak_bytes
            assert (tide.stats.num_spills > 0) == limited
    assert peaks[True] < peaks[False]


# ---------------------------------------------------------------------------------------------------------------------
# Corrections


class Boastful(ClockedEngine):
    """Promises a link that it does not have."""

    name = "boastful"

    def probe_bandwidth(self, nbytes: int) -> Link:
        return Link(out_bytes_per_second=1e13, in_bytes_per_second=1e13)


def test_a_link_that_is_slower_than_its_probe_says_is_corrected() -> None:
    truth, model, x = net(num_layers=8), net(num_layers=8), rows(256)
    engine = Boastful(out_bytes_per_second=1e5, in_bytes_per_second=1e5)
    stalls = []
    with optimize(model, budget_of(model, (x,), 0.3), engine=engine) as tide:
        torch.manual_seed(5)
        expected = [step(truth, x) for _ in range(6)]
        torch.manual_seed(5)
        for number in range(6):
            before = engine.clock.stalled
            assert_same(step(model, x), expected[number])
            stalls.append(engine.clock.stalled - before)
        whys = [event.why for event in tide.events]
        assert whys[0] == "first step"
        assert whys[1].startswith("stalls: ")
        assert 1 <= tide.num_corrections <= 2 and len(whys) <= 3
        assert tide.source.planner.facts.link.in_bytes_per_second < 1e9
    assert stalls[0] > 0
    assert stalls[-1] < stalls[0] / 2, stalls
    assert stalls[2:] == pytest.approx([stalls[2]] * 4)


class _Time:
    """A clock that `slow_at_first` alone moves on, and each look at it by a millionth."""

    def __init__(self) -> None:
        self.now = self.burns = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    thread_time = perf_counter


_TIME = _Time()


@torch.library.custom_op("lowtide_tests::slow_at_first", mutates_args=())
def slow_at_first(x: Tensor) -> Tensor:
    _TIME.now += _TIME.burns
    return x.clone()


class Warming(torch.autograd.Function):
    """An operator that takes longer in its first calls, as kernels that are compiled or tuned do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return slow_at_first(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return slow_at_first(gradient)


class Warm(Net):
    def forward(self, x: Tensor) -> Tensor:
        return Warming.apply(super().forward(x))


def test_a_profile_that_was_too_slow_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (op_timer, measure):
        monkeypatch.setattr(module, "time", _TIME)
    torch.manual_seed(0)
    model, x = Warm(num_layers=8).train(), rows(256)
    budget = budget_of(model, (x,), 0.3)
    engine = Boastful(out_bytes_per_second=6e7, in_bytes_per_second=6e7)  # 25 ms of copies
    memory = {"min_bytes": MIN_BYTES, "recompute": "none"}
    with lowtide.optimize(model, budget=budget, memory=memory, engine=engine) as tide:
        _TIME.burns = 0.4
        for _ in range(4):
            loss = model(x)
            _TIME.burns = 0.04
            loss.backward()
            model.zero_grad(set_to_none=True)
        _TIME.burns = 0.0
        whys = [event.why for event in tide.events]
        assert whys[1].startswith("compute: backward in ")
        assert len(whys) <= 3
        assert tide.profile is not None
        assert sum(tide.profile.op_seconds) < 0.5


# ---------------------------------------------------------------------------------------------------------------------
# Ranks


def plans_with_another(rank: int) -> dict[str, Any]:
    model, x = net(), rows()
    budget = budget_of(model, (x,), 0.4)
    found: dict[str, Any] = {}
    with optimize(model, budget + 100_000 * (1 - rank)) as tide:
        for _ in range(4):
            step(model, x)
        found |= {"digest": tide.plan.digest(), "budget": tide.plan.budget_bytes, "mine": budget}
        found["whys"] = [event.why for event in tide.events]
        found["budgets"] = [event.budget_bytes for event in tide.events]
        found["fates"] = [site.fate.value for site in tide.tide.plan.sites]
        found["moved"] = tide.stats.swapped_bytes + tide.stats.recomputed_bytes
    # A link that only the second rank finds slower than it was told.
    kind, rate = (ClockedEngine, 1e13) if rank == 0 else (Boastful, 1e5)
    model = net(num_layers=8)
    engine = kind(out_bytes_per_second=rate, in_bytes_per_second=rate)
    with optimize(model, budget_of(net(num_layers=8), (rows(256),), 0.3), engine=engine) as tide:
        for _ in range(5):
            step(model, rows(256))
        found["corrected"] = [event.why for event in tide.events]
        found["after"] = tide.plan.digest()
    with optimize(model, 1 << 10) as tide, pytest.raises(lowtide.BudgetError) as caught:
        model(rows(64 * (1 + rank)))
    return found | {"floor": caught.value.floor_bytes, "text": str(caught.value)}


def test_two_ranks_follow_one_plan_and_fail_together(tmp_path: Path) -> None:
    first, second = two_ranks.run(__name__, [("plans_with_another", {})], tmp_path)[0]
    assert first["digest"] == second["digest"]
    assert first["whys"] == second["whys"]
    # The smaller one, which is the second rank's; and each rank did what the plan says, and says so for itself.
    assert first["budget"] == second["budget"] == first["mine"]
    assert first["budgets"] == second["budgets"] == [first["mine"]] * len(first["whys"])
    assert first["fates"] == second["fates"]
    assert first["moved"] == second["moved"] > 0
    # One rank was wrong about its link: both plan again, at the same step.
    assert second["corrected"][1].startswith("stalls: ")
    assert first["corrected"][1] == "another rank corrected its plan"
    assert len(first["corrected"]) == len(second["corrected"]) <= 3
    assert first["after"] == second["after"]
    alone = budget_of(net(), (rows(128),), 0.0)
    assert first["floor"] == second["floor"] >= alone
    assert first["text"] == second["text"]


def test_a_plan_that_is_made_again_keeps_what_was_learned_about_memory() -> None:
    model, x = net(), rows()
    budget = budget_of(model, (x,), 0.9) + sum(p.nbytes for p in model.parameters())
    with optimize(model, budget) as tide:
        step(model, x)
        assert tide.plan is not None and tide.plan.budget_bytes == budget
        tide.source.for_less()
        tightened = int(0.9 * budget)
        assert tide.plan.budget_bytes == tightened
        for _ in range(2):
            model(x).backward()  # gradients accumulate: planned again
        assert [event.why for event in tide.events] == ["first step", "out of memory", "gradients stay"]
        assert [event.budget_bytes for event in tide.events] == [budget, tightened, tightened]
        assert tide.plan.budget_bytes == tightened
        assert tide.plan.predicted is not None and tide.plan.predicted.peak_bytes <= tightened


def test_a_graph_outlives_the_autopilot() -> None:
    case = zoo.CASES["llama_eager"]
    model = case.build(0)
    batch = case.batch(1, "cpu")
    case.loss(model, batch).backward()
    truth = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    tide = lowtide.optimize(model, budget="1GiB", engine="host", memory={"min_bytes": 1, "swap": "all"})
    loss = case.loss(model, batch)
    assert tide.stats is not None
    tide.remove()
    loss.backward()
    assert all(torch.equal(parameter.grad, truth[name]) for name, parameter in model.named_parameters())
