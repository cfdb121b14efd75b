"""Layers that run again as a whole under a budget: what a rule on a layer means, what the planner tries by itself, and
what the runtime makes of it: bits, peaks and the floor."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.rerun_layers import can_rerun, with_reruns
from lowtide.profiling.observe_step import observe
from lowtide.tensors.private import next_sequence_number
from lowtide.tensors.snapshot import why_not_rerun
from lowtide.timeline.step import Link
from tests.support import zoo
from tests.support.grid import in_turn, one_of
from tests.support.independent_count import IndependentCount, state_tensors
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits
from tests.test_first_forward_budget import Counted, build, tokens

LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)
NAMES = ("llama", "llama_bf16", "gpt2_dropout", "deepseek_v3", "transformer_encoder", "shared_layer", "keyword_inputs")


def layers_again(plan: Plan) -> list[str]:
    return [name for name in plan.layers if plan.rules.decide(name, is_site=False).fate is Fate.RECOMPUTE]


def planned(profile: Profile, **memory: Any) -> Plan:
    return plan_profile(profile, load_memory({"min_bytes": 1, **memory}), link=LINK)


@pytest.mark.parametrize(("name", "engine"), in_turn(2, NAMES, ["host", virtual(5)]))
def test_bits_and_peaks_of_layers_that_run_again(name: str, engine: str) -> None:
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    torch.manual_seed(1)
    profile = observe(model, lambda: case.loss(model, batch))
    torch.manual_seed(1)
    case.loss(model, batch).backward()
    truth = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    plans = [planned(profile, budget="1TiB", recompute="all")]
    predicted = plans[0].predicted
    assert predicted is not None and layers_again(plans[0])
    # Inputs of the layers are swapped where that is asked for.
    plans.append(planned(profile, budget=predicted.floor_bytes, recompute="all"))
    for plan in plans:
        assert plan.predicted is not None
        with lowtide.apply(model, plan, engine=engine) as tide:
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                tide.settle()
                torch.manual_seed(1)
                with tide.audit() as audit:
                    case.loss(model, batch).backward()
                found = [parameter.grad for parameter in model.parameters()]
                assert all(a is b or same_bits(a, b) for a, b in zip(found, truth, strict=True))
            assert (tide.stats.num_divergences, tide.stats.num_unknown) == (0, 0)
            assert tide.stats.recomputed_bytes > 0
        print(name, engine, audit.peak_bytes, plan.predicted.peak_bytes, plan.predicted.plain_peak_bytes)
        assert audit.peak_bytes <= plan.predicted.peak_bytes
        assert audit.peak_bytes >= 0.85 * plan.predicted.peak_bytes


@pytest.mark.parametrize(("name", "share"), in_turn(2, ["bert", "shared_layers", "gru_and_attention"], [0.0, 0.5]))
def test_a_rule_on_all_layers_beside_a_budget(name: str, share: float) -> None:
    """Budgets from the floor on, in every step, on models that the zoo does not have."""
    model, _ = build(name)
    profile = observe(model, (tokens(),))
    found = planned(profile, budget="1TiB", recompute="all").predicted
    assert found is not None
    budget = found.floor_bytes + int(share * (found.peak_bytes - found.floor_bytes))
    counted = Counted(name, budget, virtual(3), recompute="all", min_bytes=1)
    torch.manual_seed(1)
    batches = [tokens()] * 3
    with counted.tide as tide:
        for number, batch in enumerate(batches):
            independent_bytes, audited_bytes = counted.step(batch)
            assert audited_bytes <= budget, f"step {number}: audited {audited_bytes} of {budget}"
            assert independent_bytes == audited_bytes
        assert tide.plan is not None and tide.stats is not None
        assert layers_again(tide.plan)
        assert tide.stats.num_divergences == tide.stats.num_unknown == 0
    counted.assert_plain_bits(name, batches)


@pytest.mark.parametrize("fate", ["keep", "swap"])
def test_a_layer_with_a_fate_of_its_own_is_not_run_again(fate: str) -> None:
    """Where copies are slow, running it again would be faster; and the runtime keeps what a rule keeps."""
    case = zoo.CASES["llama"]
    model, batch = case.build(0), case.batch(0)
    profile = observe(model, lambda: case.loss(model, batch))
    named, *others = profile.layers
    memory = {"swap": others, "keep": [named]} if fate == "keep" else {"swap": [named, *others]}
    slow = Link(out_bytes_per_second=1e5, in_bytes_per_second=1e5)
    plan = plan_profile(profile, load_memory({"min_bytes": 1, "budget": "1TiB", **memory}), link=slow)
    assert plan.predicted is not None and layers_again(plan) == []
    with lowtide.apply(model, plan) as tide:
        case.loss(model, batch).backward()
        model.zero_grad(set_to_none=True)
        tide.settle()
        with tide.audit() as audit:
            case.loss(model, batch).backward()
    assert audit.peak_bytes <= plan.predicted.peak_bytes


def test_unusual_lives_of_layers_that_run_again() -> None:
    """Two forwards in flight, a graph that is kept, a graph that is dropped, gradients that accumulate."""
    case = zoo.CASES["gpt2_dropout"]
    results = []
    for engine in (None, virtual(1), virtual(7), "host"):
        model, batches = case.build(0), [case.batch(number) for number in range(3)]
        profile = observe(model, functools.partial(case.loss, model, batches[0]))
        plan = planned(profile, budget="1TiB", recompute="all", swap=["*"])  # the layers' inputs, too
        assert layers_again(plan) and any(site.fate is Fate.SWAP for site in plan.sites)
        tide = None if engine is None else lowtide.apply(model, plan, engine=engine)
        torch.manual_seed(2)
        first, second = (case.loss(model, batch) for batch in batches[:2])
        second.backward()
        first.backward(retain_graph=True)
        case.loss(model, batches[2])  # dropped
        first.backward()
        results.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        if tide is not None:
            assert tide.stats.num_divergences == 0
            tide.remove()
            assert tide._scheduler.num_open() == 0
    for found in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(found, results[0], strict=True))


class Stack(nn.Module):
    """Layers that save much and are given little."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 16))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_without_swap_layers_run_again_where_recipes_do_not_reach() -> None:
    """As few layers as the budget asks for; the printed floor is one that a plan reaches."""
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(256, 16)
    profile = observe(model, (x,))
    nodes = tuple(dataclasses.replace(node, recipe=None, why_no_recipe="random") for node in profile.nodes)
    profile = dataclasses.replace(profile, nodes=nodes)
    with pytest.raises(lowtide.BudgetError) as caught:
        planned(profile, budget=1, swap="none")
    floor_bytes = caught.value.floor_bytes
    everything = planned(profile, budget="1TiB", swap="none").predicted
    assert everything is not None and floor_bytes < 0.6 * everything.peak_bytes
    numbers = []
    for share in (0.0, 0.3, 0.6, 0.9, 1.0):
        budget = floor_bytes + int(share * (everything.peak_bytes - floor_bytes))
        plan = planned(profile, budget=budget, swap="none")
        assert plan.predicted is not None and plan.predicted.peak_bytes <= budget
        numbers.append(len(layers_again(plan)))
        with lowtide.apply(model, plan, engine=virtual(1)) as tide:
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                with tide.audit() as audit:
                    model(x).backward()
            assert audit.peak_bytes <= budget
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] >= 4 and numbers[-1] == 0


def test_what_a_plan_says_of_layers_that_run_again() -> None:
    model, x = Stack(), torch.randn(64, 16)
    plan = planned(observe(model, (x,)), budget="1TiB", recompute=["layers.2-4"])
    assert layers_again(plan) == ["layers.2", "layers.3", "layers.4"]
    gone = [site for site in plan.sites if site.fate is Fate.RECOMPUTE]
    assert {site.layer for site in gone} == {"layers.2", "layers.3", "layers.4"}
    assert {site.reason for site in gone} == {"its layer runs again"}
    assert plan.predicted is not None and plan.predicted.recompute_seconds > 0
    assert Plan.from_json(plan.to_json()) == plan
    assert "layers 2-4" in str(plan)


def test_a_layer_that_writes_into_its_input_is_left_to_recipes() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.mul_(2)).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Writes() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    model, x = Model(), torch.randn(8, 16)
    profile = observe(model, (x,))
    assert {call.why_not for call in profile.calls} == {"it writes into its input"}
    assert layers_again(planned(profile, budget="1TiB", recompute="all")) == []


FLAG = {"is_deep": False}


def _deep_or_not(h: torch.Tensor) -> torch.Tensor:
    return h.sin().cos() if FLAG["is_deep"] else h.sin()


class Noisy(nn.Module):
    """A layer without recipes: all that it saves starts from random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 128), nn.Linear(128, 128), nn.Linear(128, 16)
        self.kind = ""
        self.steps: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x) + torch.rand(128))
        h = torch.tanh(self.second(h) + torch.rand(128))
        if self.steps is not None:
            h = h * (1 + next(self.steps))
        if self.kind == "writes":
            with torch.no_grad():
                self.last.bias.mul_(0.5)
        h = h * torch.rand(128)
        return self.last(_deep_or_not(h) if self.kind == "helper" else h.sin())


class NoisyStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Noisy() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


MEMORY = {"swap": "none", "min_bytes": 0}
NUM_FOUND = 1 + 6 * 6
"""A loss and the gradients of a `NoisyStack`."""


@functools.cache
def _budget_for(num_layers: int) -> int:
    """What is enough if `num_layers` of the stack run again."""
    profile = observe(NoisyStack(), (torch.ones(256, 16),))
    everything = planned(profile, budget="1TiB", swap="none").predicted
    assert everything is not None
    names = [f"layers.{number}" for number in range(num_layers)]
    some = planned(profile, budget="1TiB", swap="none", recompute=names).predicted
    assert some is not None and some.peak_bytes < everything.peak_bytes
    return some.peak_bytes + 1024


def _steps(
    budget: int | None, change: Any, *, num_steps: int = 4, in_step: bool = False, **memory: Any
) -> tuple[list[torch.Tensor], Any]:
    """Losses and gradients of some steps; `change(model, step, where)` is called before and in the middle of each."""
    model, x = NoisyStack(), torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
    memory = {**MEMORY, **memory}
    tide = (
        None
        if budget is None
        else lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(1), strict=True)
    )
    found = []
    torch.manual_seed(5)
    for step in range(num_steps):
        change(model, step, "before")

        def closure(step: int = step) -> torch.Tensor:
            FLAG["is_deep"] = False
            loss = model(x)
            change(model, step, "between")
            loss.backward()
            return loss.detach()

        loss = tide.step(closure) if tide is not None and in_step else closure()
        found += [loss, *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]
        model.zero_grad()
    FLAG["is_deep"] = False
    if tide is not None:
        tide.remove()
    return found, tide


@pytest.mark.parametrize(
    ("kind", "why"), [("iterator", "it can reach an iterator, 'steps'"), ("writes", "it writes to its own parameters")]
)
def test_what_recompute_refuses_is_not_planned(kind: str, why: str) -> None:
    def change(model: NoisyStack, step: int, where: str) -> None:
        layer = model.layers[1]
        assert isinstance(layer, Noisy)
        if kind == "writes":
            layer.kind = "writes"
        elif layer.steps is None:
            layer.steps = [0.1]
        if kind == "iterator" and where == "before":
            layer.steps = iter([0.1 * step] * 9)  # the observed step moves it on by one

    model = NoisyStack()
    change(model, 1, "before")
    profile = observe(model, (torch.randn(256, 16),))
    reasons = {call.name: call.why_not for call in profile.calls}
    assert reasons.pop("layers.1").startswith(why) and set(reasons.values()) == {""}
    found, tide = _steps(_budget_for(3), change)
    assert layers_again(tide.plan) and "layers.1" not in layers_again(tide.plan)
    truth, _ = _steps(None, change)
    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))


def test_a_cache_that_holds_tokens_is_a_reason_not_to_run_again() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, past_key_value: Any = None) -> torch.Tensor:
            return self.linear(x + past_key_value[0]).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attends() for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, past_key_value=[1.0])
            return x.sum()

    profile = observe(Model(), (torch.randn(8, 16),))
    assert {call.why_not for call in profile.calls} == {"its past_key_value already holds tokens"}


def test_a_layer_that_is_given_an_object_with_activations_is_not_planned_to_run_again() -> None:
    """The object stays for the second run, and what other layers put into it stays with it."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, carried: SimpleNamespace) -> None:
            carried.gates.append(carried.x.sigmoid())
            carried.x = carried.x + self.second(self.first(carried.gates[-1]).tanh())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Fills() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            carried = SimpleNamespace(x=x * 2, gates=[])
            for layer in self.layers:
                layer(carried)
            return carried.x.square().mean() + sum(gate.mean() for gate in carried.gates)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 32)
    profile = observe(model, (x,))
    assert [call.why_not.partition(" with")[0] for call in profile.calls] == ["it is given an object"] * 3
    budget = planned(profile, budget="9GiB", swap="none").predicted.peak_bytes - 2 * x.nbytes
    with lowtide.optimize(model, budget, memory={"min_bytes": 1, "swap": "none"}, engine=virtual(0)) as tide:
        model(x).backward()
        for _ in range(2):
            model.zero_grad()
            with IndependentCount(state_tensors(model, None, [x])) as count:
                model(x).backward()
            assert count.peak_bytes <= max(budget, tide.plan.predicted.peak_bytes)


def test_deadlines_of_a_layers_input_count_from_no_earlier_than_it_begins() -> None:
    """The runtime counts from there. Nothing is saved before this layer that would show autograd's number."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inlet = nn.Linear(16, 16)
            parts = ((nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2))
            self.layers = nn.ModuleList(nn.Sequential(*each) for each in parts)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inlet(x)
            begins.append(next_sequence_number())
            return self.layers[1](self.layers[0](h)).sum()

    begins: list[int] = []
    model, x = Model(), torch.randn(4, 8, 16)
    start = next_sequence_number()
    model(x)
    profile = with_reruns(observe(model, (x,)), ["layers.0"])
    by_name = {node.name: node for node in profile.nodes}
    assert by_name["inlet.addmm"].first_sequence >= begins[0] - start > 0


def test_a_layer_that_refuses_later_is_kept_and_then_planned_without() -> None:
    """An iterator that was not there in the observed step."""

    def change(model: NoisyStack, step: int, where: str) -> None:
        if step == 1 and where == "before":
            model.layers[1].steps = iter([0.1, 0.2, 0.3, 0.4])

    with pytest.warns(UserWarning, match=r"'layers\.1' \(Noisy\) can reach an iterator, 'steps'.* It is kept\."):
        found, tide = _steps(_budget_for(3), change)
    truth, _ = _steps(None, change)
    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))
    assert [event.why for event in tide.events if "again" in event.why] == ["layers cannot run again"]
    assert layers_again(tide.plan) and "layers.1" not in layers_again(tide.plan)
    assert tide.num_corrections == sum(":" in event.why for event in tide.events)


def test_a_layer_that_refuses_its_second_run_is_kept_when_the_step_is_run_again() -> None:
    """State behind a function that the forward calls, which nobody can see before."""

    def change(model: NoisyStack, step: int, where: str) -> None:
        model.layers[1].kind = "helper"
        FLAG["is_deep"] = where == "between" and step == 1

    with pytest.warns(UserWarning, match=r"a layer cannot be run again .*'layers\.1' is kept now"):
        found, tide = _steps(_budget_for(3), change, in_step=True)
    truth, _ = _steps(None, change)
    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))
    assert "layers cannot run again" in [event.why for event in tide.events]
    assert layers_again(tide.plan) and "layers.1" not in layers_again(tide.plan)
    with pytest.raises(RuntimeError, match=r"the recomputed 'layers\.1' \(Noisy\) did something else"):
        _steps(_budget_for(3), change)


def test_a_layer_that_refused_is_kept_by_the_plans_of_other_shapes_too() -> None:
    """Without `tide.step`, which would run the step again: a second refusal would be an error."""
    batches = [torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(num_rows)) for num_rows in (256, 260)]

    def steps(budget: int | None) -> list[torch.Tensor]:
        model = NoisyStack()
        model.layers[1].kind = "helper"
        tide = (
            None
            if budget is None
            else lowtide.optimize(model, budget=budget, memory=MEMORY, engine=virtual(1), strict=True)
        )
        torch.manual_seed(5)
        found = []
        for number, changes in ((0, False), (1, False), (1, True), (0, True), (1, False)):

            def closure(number: int = number, changes: bool = changes) -> torch.Tensor:
                FLAG["is_deep"] = False
                loss = model(batches[number])
                FLAG["is_deep"] = changes
                loss.backward()
                return loss.detach()

            refuses = tide is not None and len(found) == 2 * NUM_FOUND
            loss = tide.step(closure) if refuses else closure()  # type: ignore[union-attr]
            found += [loss, *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]
            model.zero_grad()
            if tide is not None and len(found) == 2 * NUM_FOUND:
                assert all("layers.1" in layers_again(shape.plan) for shape in tide.source.table)
        FLAG["is_deep"] = False
        if tide is not None:
            assert [event.why for event in tide.events].count("layers cannot run again") == 1
            tide.remove()
        return found

    with pytest.warns(UserWarning, match=r"a layer cannot be run again .*'layers\.1' is kept now"):
        found = steps(_budget_for(3))
    assert all(same_bits(a, b) for a, b in zip(found, steps(None), strict=True))


def test_layers_that_refuse_one_after_another_are_all_kept_in_one_step() -> None:
    """More of them than a step has attempts when memory runs out."""

    def change(model: NoisyStack, step: int, where: str) -> None:
        for layer in model.layers[:4]:
            layer.kind = "helper"
        FLAG["is_deep"] = where == "between" and step == 1

    with pytest.warns(UserWarning, match="a layer cannot be run again") as said:
        found, _ = _steps(1 << 30, change, in_step=True, recompute=["layers.0-3"])
    truth, _ = _steps(None, change)
    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))
    kept = [str(warning.message).split("'")[-2] for warning in said if "is kept now" in str(warning.message)]
    assert len(kept) == len(set(kept)) == 4


def test_a_layer_that_refuses_where_no_other_plan_fits() -> None:
    def change(model: NoisyStack, step: int, where: str) -> None:
        if step == 1 and where == "before":
            model.layers[1].steps = iter([0.1, 0.2, 0.3, 0.4])

    with pytest.warns(UserWarning, match="It is kept"), pytest.raises(lowtide.BudgetError, match="no plan fits"):
        _steps(_budget_for(5), change)


class Odd:
    """A cache that nobody can measure."""


class TakesACache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, past_key_value: Any = None) -> torch.Tensor:
        return x + self.linear(x).tanh()


def test_a_cache_that_cannot_be_measured_is_a_reason_and_no_error() -> None:
    assert why_not_rerun(TakesACache(), (torch.ones(2, 16),), {"past_key_value": Odd()}) == (
        "nobody can say how many tokens its past_key_value holds"
    )


def test_memory_that_runs_out_in_a_second_run_says_nothing_about_the_layer() -> None:
    """Also where it is a plain RuntimeError, as of torch's allocator on the host: the plan is made smaller."""
    model, x = NoisyStack(), torch.randn(256, 16)
    calls = iter(range(1000))

    def fail_once(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1 and next(calls) == 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    model.layers[2].last.register_forward_pre_hook(fail_once)
    with lowtide.apply(model, {"recompute": ["layers.*"], "min_bytes": 0}, engine=virtual(1)) as tide:
        with pytest.warns(UserWarning, match=r"out of memory \(.*\); everything is swapped now, and the micro-batch"):
            tide.step(lambda: model(x).backward())
        assert tide.stats.num_retries == 1


class _Operators(TorchDispatchMode):
    """Counts matrix products inside the layers' forwards of a backward pass."""

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_backward = False
        self._inside: list[str] = []
        for name in layers:
            layer = model.get_submodule(name)
            layer.forward = functools.partial(self._run, name, layer.forward)

    def _run(self, name: str, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        self._inside.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_backward and self._inside and _is_product(func.overloadpacket.__name__):
            self.counts[self._inside[-1]] += 1
        return func(*args, **(kwargs or {}))


def _is_product(operator: str) -> bool:
    return operator.rstrip("_0123456789") in {"mm", "addmm", "bmm", "baddbmm"}


@pytest.mark.parametrize("name", one_of(2, NAMES))
def test_a_second_run_ends_where_the_profile_says(name: str) -> None:
    """Matrix products stand for what takes time: the last one of an MLP is not run, unless something after it saves."""
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    torch.manual_seed(1)
    profile = observe(model, lambda: case.loss(model, batch))
    operators = _Operators(model, profile.layers)
    with lowtide.apply(model, planned(profile, budget="1TiB", recompute="all")):
        for _ in range(3):  # the first ones go to the end of each layer, and look at what it gives
            operators.counts.clear()
            torch.manual_seed(1)
            loss = case.loss(model, batch)
            with operators:
                operators.is_backward = True
                loss.backward()
            operators.is_backward = False
    expected: Counter[str] = Counter()
    for call in profile.calls:
        names = profile.op_names[call.first_op : call.enough_op]
        expected[call.name] += sum(_is_product(op.rpartition(".")[2]) for op in names)
    print(name, operators.counts, expected, [(call.enough_op, call.end_op) for call in profile.calls])
    assert operators.counts == expected


class _ChecksItself(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = checkpoint(self.inner, x, use_reentrant=True)
        assert isinstance(made, torch.Tensor)
        return made


class _Whole(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_layer_that_saves_nothing_but_its_input_is_not_run_again() -> None:
    """It would take time, and hold its result beside what its own checkpoint makes."""
    torch.manual_seed(0)
    plain, *others = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3))
    model, x = _Whole(plain, *map(_ChecksItself, others)), torch.randn(32, 16)
    assert can_rerun(observe(model, lambda: model(x))) == ("layers.0",)
