"""A swapped optimizer among everything that other people do with optimizers."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import ConfigError
from lowtide.optimizer import store
from lowtide.profiling.state_bytes import state_bytes
from tests.support import zoo
from tests.support.optimizer_zoo import STEPS, Case, assert_same, assert_same_value, result_of, swapped, train
from tests.support.virtual_engine import VirtualEngine, virtual

CASE = Case("AdamW", "foreach", torch.float32, has_missing=True)


def _steps(case: Case, parameters: Any, optimizer: Any, numbers: Any) -> None:
    for step in numbers:
        case.set_gradients(parameters, step)
        optimizer.step()


# -- between steps -----------------------------------------------------------------------------------------------------


def test_between_steps_the_state_is_valid_and_not_on_the_device() -> None:
    engine = VirtualEngine(1)
    parameters, optimizer = CASE.build()
    plain_parameters, plain = CASE.build()
    handle = swapped(optimizer, engine)
    for step in range(5):
        for p, o in ((parameters, optimizer), (plain_parameters, plain)):
            CASE.set_gradients(p, step)
            o.step()
        assert_same(result_of(parameters, optimizer), result_of(plain_parameters, plain))
    saved = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in saved), "torch.save writes whole storages"
    stats = handle.stats
    moments = sum(8 * p.numel() for p in parameters if p in optimizer.state)
    steps = 4 * sum(p in optimizer.state for p in parameters)
    assert (stats.swapped_bytes, stats.resident_bytes) == (moments, steps)
    assert stats.num_steps == 5
    assert str(handle).startswith("AdamW: ")
    assert type(optimizer) is torch.optim.AdamW
    handle.detach()
    handle.detach()
    assert vars(optimizer).keys() == vars(plain).keys()
    assert type(optimizer.state) is type(plain.state)


def test_the_resident_share_stays_on_the_device() -> None:
    for share, expected in ((1.0, 0.0), (0.5, None), (0.0, 1.0)):
        engine = VirtualEngine(0)
        parameters, optimizer = CASE.build()
        handle = swapped(optimizer, engine, resident=share)
        _steps(CASE, parameters, optimizer, range(6))
        stats = handle.stats
        moved = stats.swapped_bytes / (stats.swapped_bytes + stats.resident_bytes)
        assert moved == pytest.approx(expected, abs=0.01) if expected is not None else 0.3 < moved < 0.7
        handle.detach()


def test_state_that_was_there_before_is_taken_over() -> None:
    truth = train(CASE, None)
    parameters, optimizer = CASE.build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    engine = VirtualEngine(2)
    handle = None
    for step in range(STEPS):
        if step % 3 == 2:
            handle = swapped(optimizer, engine)
        elif handle is not None and step % 3 == 1:
            handle.detach()
        CASE.set_gradients(parameters, step)
        optimizer.step()
        scheduler.step()
    assert_same(result_of(parameters, optimizer), truth)
    assert engine.violations == []


def test_state_that_the_user_changes_counts() -> None:
    def change(optimizer: Any, parameters: Any, step: int) -> None:
        if step == 3:
            optimizer.state[parameters[0]]["exp_avg"].mul_(2)
        if step == 5:
            optimizer.state[parameters[3]]["exp_avg"] = torch.full((7, 33), 0.5)
        if step == 6:
            optimizer.state[parameters[4]].clear()
        if step == 7:
            optimizer.state[parameters[3]]["exp_avg"].data = torch.full((7, 33), 0.25)
        if step == 8:
            optimizer.state.clear()

    results = []
    for is_swapped in (False, True):
        parameters, optimizer = CASE.build()
        engine = VirtualEngine(4)
        handle = swapped(optimizer, engine) if is_swapped else None
        for step in range(10):
            CASE.set_gradients(parameters, step)
            change(optimizer, parameters, step)
            optimizer.step()
        results.append(result_of(parameters, optimizer))
        if handle:
            handle.detach()
            assert engine.violations == []
            assert engine.num_slots == 0
    assert_same(results[1], results[0])


def test_groups_added_later_are_swapped_too() -> None:
    results = []
    for is_swapped in (False, True):
        parameters, optimizer = CASE.build()
        engine = VirtualEngine(4)
        handle = swapped(optimizer, engine) if is_swapped else None
        late = nn.Parameter(torch.ones(30, 40))
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": [late], "lr": 0.5})
            late.grad = torch.full_like(late, 0.1 * step)
            CASE.set_gradients(parameters, step)
            optimizer.step()
        results.append(result_of([*parameters, late], optimizer))
        if handle:
            assert late in handle._store.bucket_of
            handle.detach()
    assert_same(results[1], results[0])


def test_names_of_parameters_go_with_them() -> None:
    results = []
    for is_swapped in (False, True):
        parameters, _ = CASE.build()
        optimizer = Named([(f"p{number}", parameter) for number, parameter in enumerate(parameters)])
        handle = swapped(optimizer, VirtualEngine(0)) if is_swapped else None
        _steps(CASE, parameters, optimizer, range(4))
        results.append(result_of(parameters, optimizer))
        if handle:
            handle.detach()
    assert_same(results[1], results[0])
    assert [results[1].state[number]["name"] for number in (0, 1, 3)] == ["p0", "p1", "p3"]


class Named(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None:
                    self.state[parameter]["name"] = name
                    self.state[parameter]["last"] = parameter.grad.clone()
                    parameter.sub_(parameter.grad * group["lr"])


def test_an_interrupted_step_says_so() -> None:
    class Interrupted(VirtualEngine):
        def copy_in(self, slot, target):
            raise KeyboardInterrupt

    parameters, optimizer = CASE.build()
    handle = swapped(optimizer, Interrupted(0))
    _steps(CASE, parameters, optimizer, range(1))
    groups = optimizer.param_groups
    with pytest.raises(KeyboardInterrupt):
        _steps(CASE, parameters, optimizer, range(1, 2))
    assert optimizer.param_groups is groups
    with pytest.raises(RuntimeError, match=r"^lowtide: step: the last step stopped half-way .*call handle.resume\(\)"):
        optimizer.step()
    handle.detach()


def test_closures_are_evaluated_once_with_gradients_enabled() -> None:
    parameters, optimizer = CASE.build()
    handle = swapped(optimizer, VirtualEngine(0))
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        CASE.set_gradients(parameters, len(calls))
        return 0.25 * len(calls)

    with torch.no_grad():
        assert [optimizer.step(closure), optimizer.step(closure=closure)] == [0.25, 0.5]
    assert calls == [True, True]
    assert optimizer.step() is None
    handle.detach()


def test_hooks_run_once_a_step_and_see_the_users_groups() -> None:
    parameters, optimizer = CASE.build()
    handle = swapped(optimizer, VirtualEngine(0))
    seen: list[str] = []
    groups = optimizer.param_groups
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(f"pre {o.param_groups is groups}"))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(f"post {o.param_groups is groups}"))
    with torch.autograd.profiler.profile() as profiler:
        _steps(CASE, parameters, optimizer, range(2))
    assert seen == ["pre True", "post True"] * 2
    assert [e.count for e in profiler.key_averages() if e.key == "Optimizer.step#AdamW.step"] == [2]
    handle.detach()


# -- others that put their hands on an optimizer ----------------------------------------------------------------------


@pytest.mark.parametrize("order", ["scheduler first", "swap first"])
def test_schedulers_in_either_order(order: str, recwarn: pytest.WarningsRecorder) -> None:
    truth = train(CASE, None)
    parameters, optimizer = CASE.build()
    handle = None if order == "scheduler first" else swapped(optimizer, VirtualEngine(0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    handle = handle or swapped(optimizer, VirtualEngine(0))
    for step in range(STEPS):
        if step == 8:
            handle.detach()
        CASE.set_gradients(parameters, step)
        optimizer.step()
        scheduler.step()
    assert_same(result_of(parameters, optimizer), truth)
    assert not recwarn.list


@pytest.mark.parametrize("implementation", ["for-loop", "fused"])
def test_a_grad_scaler_skips_steps_with_infs(implementation: str) -> None:
    case = Case("AdamW", implementation, torch.float32, has_missing=False)
    results = []
    for is_swapped in (False, True):
        parameters, optimizer = case.build()
        engine = VirtualEngine(5)
        handle = swapped(optimizer, engine) if is_swapped else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        scaler.scale(torch.ones(()))
        for step in range(8):
            case.set_gradients(parameters, step)
            with torch.no_grad():
                for parameter in parameters:
                    parameter.grad.mul_(scaler.get_scale())
                if step in (2, 5):
                    parameters[3].grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        results.append(result_of(parameters, optimizer))
        if handle:
            handle.detach()
            assert engine.violations == []
    assert_same(results[1], results[0])


def test_a_tensor_as_learning_rate_keeps_its_identity() -> None:
    results = []
    for is_swapped in (False, True):
        parameters, _ = CASE.build()
        rate = torch.tensor(0.01)
        optimizer = torch.optim.Adam(parameters, lr=rate, foreach=False)
        handle = swapped(optimizer, VirtualEngine(0)) if is_swapped else None
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            CASE.set_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] is rate
        results.append(result_of(parameters, optimizer))
        if handle:
            handle.detach()
    assert_same(results[1], results[0])


def test_accelerate_wraps_a_swapped_optimizer() -> None:
    accelerate = pytest.importorskip("accelerate")
    results = []
    for order in ("plain", "before", "after"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = VirtualEngine(1)
        handle = swapped(optimizer, engine) if order == "before" else None
        wrapped_model, wrapped = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
        if order == "after":
            handle = swapped(wrapped, engine)
        for step in range(4):
            wrapped_model(torch.full((3, 16), 0.1 * step)).square().sum().backward()
            wrapped.step()
            wrapped.zero_grad()
        results.append(result_of(list(model.parameters()), optimizer))
        if handle:
            assert handle.stats.num_steps == 4
            handle.detach()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_who_kept_the_own_step_of_the_class_gets_the_same_bits() -> None:
    truth = train(CASE, None)
    parameters, optimizer = CASE.build()
    kept = optimizer.step
    engine = VirtualEngine(1)
    handle = swapped(optimizer, engine)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            CASE.set_gradients(parameters, step)
            kept() if step % 2 else optimizer.step()
            optimizer._opt_called = True
            scheduler.step()
    assert [str(warning.message) for warning in caught] == [
        "lowtide: AdamW.step was called past the swap (by who kept it from before), so all of its state is on the "
        "device in each step; attach before accelerator.prepare and other wrappers"
    ]
    assert_same(result_of(parameters, optimizer), truth)
    handle.detach()
    assert engine.violations == []


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_activations_and_state_are_swapped_over_one_engine(overlap: str) -> None:
    case = zoo.CASES["llama"]
    results = []
    for is_swapped in (False, True):
        model = case.build(0)
        optimizer = zoo.make_optimizer(model)
        engine = VirtualEngine(6)
        if is_swapped:
            tide = lowtide.apply(model, {"swap": "all", "min_bytes": 0}, optimizer=optimizer, engine=engine)
            handle = swapped(optimizer, engine, overlap=overlap)
        result = zoo.train(case, model, optimizer, 0, num_steps=4, accumulate=2)
        if is_swapped:
            handle.detach()
            tide.remove()
            assert engine.violations == []
            # `train` copies parameters by hand, before it looks at the optimizer's state.
            result.parameters.update({f"4:{k}": p.detach().clone() for k, p in model.named_parameters()})
        results.append(result)
    zoo.assert_same(results[1], results[0])


def test_a_swapped_optimizer_is_planned_for_like_a_plain_one(recwarn: pytest.WarningsRecorder) -> None:
    reports = []
    for is_swapped in (False, True):
        parameters, optimizer = CASE.build()
        model = nn.ParameterList(parameters)
        handle = swapped(optimizer, VirtualEngine(0)) if is_swapped else None
        _steps(CASE, parameters, optimizer, range(3))
        before = result_of(parameters, optimizer)
        counted = state_bytes(model, inputs=0, optimizer=optimizer, device_type="cpu", is_accelerator=False)
        assert_same(result_of(parameters, optimizer), before)
        _steps(CASE, parameters, optimizer, range(3, 6))
        reports.append((counted.optimizer, counted.optimizer_temporaries))
        if handle:
            handle.detach()
    assert reports[1] == reports[0]
    assert not recwarn.list


# -- what is left behind -----------------------------------------------------------------------------------------------


def test_copies_of_the_optimizer_are_plain() -> None:
    parameters, optimizer = CASE.build()
    handle = swapped(optimizer, VirtualEngine(0))
    _steps(CASE, parameters, optimizer, range(3))
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin.state) is type(optimizer.state).__mro__[1]
        assert_same_value(twin.state_dict(), optimizer.state_dict(), "state_dict")
        assert "step" not in vars(twin)
    handle.detach()


def test_nothing_keeps_a_detached_optimizer_alive() -> None:
    parameters, optimizer = CASE.build()
    engine = VirtualEngine(0)
    with swapped(optimizer, engine):
        _steps(CASE, parameters, optimizer, range(3))
    gone = [weakref.ref(optimizer), *(weakref.ref(parameter) for parameter in parameters)]
    del optimizer, parameters
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert engine.num_slots == 0


def test_two_optimizers_share_an_engine() -> None:
    truth = train(CASE, None)
    engine = VirtualEngine(0)
    pairs = [CASE.build() for _ in range(2)]
    handles = [swapped(optimizer, engine) for _, optimizer in pairs]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch) for _, optimizer in pairs]
    for step in range(STEPS):
        for (parameters, optimizer), scheduler in zip(pairs, schedulers, strict=True):
            CASE.set_gradients(parameters, step)
            optimizer.step()
            scheduler.step()
    for (parameters, optimizer), handle in zip(pairs, handles, strict=True):
        assert_same(result_of(parameters, optimizer), truth)
        handle.detach()
    assert engine.violations == []
    assert engine.num_slots == 0


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "Counted", "Adafactor"])
@pytest.mark.parametrize(("saving", "loading"), [("plain", "swapped"), ("swapped", "plain"), ("swapped", "swapped")])
def test_checkpoints_go_from_plain_to_swapped_and_back(kind: str, saving: str, loading: str) -> None:
    case = Case(kind, "for-loop", torch.bfloat16, has_missing=True)
    parameters, optimizer = case.build()
    _steps(case, parameters, optimizer, range(8))
    truth = result_of(parameters, optimizer)

    parameters, optimizer = case.build()
    engine = VirtualEngine(1)
    handle = swapped(optimizer, engine) if saving == "swapped" else None
    _steps(case, parameters, optimizer, range(4))
    file = io.BytesIO()
    torch.save((parameters, optimizer.state_dict()), file)
    assert len(file.getvalue()) < 60_000
    if handle:
        handle.detach()

    file.seek(0)
    saved, state_dict = torch.load(file)
    parameters, optimizer = case.build()
    handle = swapped(optimizer, engine) if loading == "swapped" else None
    if handle:
        _steps(case, parameters, optimizer, range(2))
    with torch.no_grad():
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(state_dict)
    assert_same_value(optimizer.state_dict(), state_dict, "state_dict")
    _steps(case, parameters, optimizer, range(4, 8))
    assert_same(result_of(parameters, optimizer), truth)
    if handle:
        assert handle.stats.swapped_bytes > 0
        handle.detach()
    assert engine.violations == []
    assert engine.num_slots == 0


def test_a_swapped_optimizer_loads_its_own_state() -> None:
    parameters, optimizer = CASE.build()
    handle = swapped(optimizer, VirtualEngine(3))
    _steps(CASE, parameters, optimizer, range(3))
    before = result_of(parameters, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(result_of(parameters, optimizer), before)
    handle.detach()
    assert_same(result_of(parameters, optimizer), before)


@pytest.mark.parametrize("resident", [0.0, 1.0])
def test_live_chunks_keep_their_dtype(resident: float) -> None:
    """torch's own call would make float32 moments of parameters in bfloat16 bfloat16."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    average = self.state[parameter].setdefault("average", torch.zeros(parameter.shape))
                    average.add_(parameter.grad.float())
                    parameter.sub_((average * group["lr"]).bfloat16())

    def make() -> Any:
        parameter = nn.Parameter(torch.full((10, 10), 0.3, dtype=torch.bfloat16))
        parameter.grad = torch.full_like(parameter, 0.1)
        return parameter, Wide([parameter])

    parameter, optimizer = make()
    optimizer.step()
    saved = optimizer.state_dict()
    other, loaded = make()
    handle = swapped(loaded, VirtualEngine(0), resident=resident)
    loaded.load_state_dict(saved)
    assert_same_value(dict(loaded.state[other]), dict(optimizer.state[parameter]), "state")
    handle.detach()


# -- words -------------------------------------------------------------------------------------------------------------


def _refusal(optimizer: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        lowtide.swap_optimizer(optimizer, **{"engine": virtual(0), **options})
    text = str(caught.value)
    assert text.startswith("lowtide.swap_optimizer: ")
    return text.removeprefix("lowtide.swap_optimizer: ")


class WithoutDisk(VirtualEngine):
    tiers = ("host",)


def test_refusals() -> None:
    parameter = nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam([parameter])
    assert _refusal(adam, tier="hots") == "tier 'hots' is none of host, disk, mapped; did you mean 'host'?"
    assert _refusal(adam, overlap="backwards").startswith("overlap 'backwards' is none of auto, step")
    assert _refusal(adam, resident=2) == (
        "resident is a share from 0 to 1, not 2; memory.optimizer: auto finds the share for a budget"
    )
    assert _refusal(adam, resident="auto").startswith("resident is a share from 0 to 1, not 'auto'; ")
    assert _refusal(adam, bucket_bytes="2GiB") == (
        "bucket_bytes is 'auto' or from 4096 bytes to 1.0 GiB, not 2.0 GiB; larger ones move no faster, and three are "
        "on the device at a time"
    )
    assert _refusal(adam, bucket_bytes="much").startswith("bucket_bytes: ")
    assert _refusal(adam, min_bytes="much").startswith("min_bytes: ")
    assert _refusal(nn.Linear(2, 2)) == "takes a torch.optim.Optimizer, or a wrapper around one, not Linear"
    assert _refusal(torch.optim.LBFGS([parameter])) == (
        "LBFGS evaluates the closure several times in a step, with all of its state; it stays as it is"
    )
    for flag in ("capturable", "differentiable"):
        assert _refusal(torch.optim.Adam([parameter], **{flag: True})) == (
            f"Adam with {flag}=True keeps its state where a graph has seen it; make it with {flag}=False"
        )
    assert _refusal(torch.optim.Adam([{"params": []}])) == "Adam has no parameters; attach when it has some"
    assert _refusal(adam, tier="disk", engine=WithoutDisk(0)) == (
        "the engine 'virtual:0' has no tier 'disk'; it has host"
    )
    elsewhere = nn.Parameter(torch.ones(4, device="meta"))
    assert _refusal(torch.optim.Adam([parameter, elsewhere])) == (
        "Adam has parameters on cpu and meta; make one optimizer for each device, and swap each"
    )
    assert _refusal(torch.optim.Adam([elsewhere])) == (
        "the parameters have no memory yet (device 'meta'); attach later"
    )
    wrapped = torch.optim.Adam([parameter])
    wrapped.step = test_refusals  # type: ignore[method-assign]
    assert _refusal(wrapped) == (
        "somebody has put test_refusals in place of Adam.step; attach first, then wrap the step"
    )
    with swapped(adam, VirtualEngine(0)):
        assert _refusal(adam) == "this Adam is swapped already; call detach() of its handle first"
    with swapped(adam, VirtualEngine(0)):
        pass


def _clear(optimizer: Any, first: Any) -> None:
    optimizer.state.clear()


def _delete(optimizer: Any, first: Any) -> None:
    del optimizer.state[first]


def _set(optimizer: Any, first: Any) -> None:
    optimizer.state[first] = {}


def _update(optimizer: Any, first: Any) -> None:
    optimizer.state |= {first: {}}


def _popitem(optimizer: Any, first: Any) -> None:
    optimizer.state.popitem()


def _halve(optimizer: Any, first: Any) -> None:
    optimizer.state.setdefault(first, {})["exp_avg"].mul_(0.5)


def _put_copies(optimizer: Any, first: Any) -> None:
    optimizer.state = defaultdict(dict, {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()})


def _put_nothing(optimizer: Any, first: Any) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("change", [_clear, _delete, _set, _update, _popitem, _halve, _put_copies, _put_nothing])
def test_writing_to_the_state_comes_after_what_is_under_way(overlap: str, change: Any) -> None:
    results = []
    for engine in (None, VirtualEngine(3)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = swapped(optimizer, engine, overlap=overlap) if engine else None
        for step in range(6):
            model(torch.full((3, 24), 0.1 * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, 5):
                change(optimizer, next(model.parameters()))
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
            assert type(optimizer.state) is defaultdict
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


# -- without memory for the way back -----------------------------------------------------------------------------------


class _NoMemoryAt:
    """Stands as the copy to the device, and fails once."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory")
        return tensor.to(device, copy=True)


@pytest.mark.parametrize("call", [1, 4, 7])
@pytest.mark.parametrize("steps_between", [0, 2])
def test_detach_goes_on_where_memory_ran_out(call: int, steps_between: int, monkeypatch: Any) -> None:
    results = []
    for is_swapped in (False, True):
        parameters, optimizer = CASE.build()
        engine = VirtualEngine(4)
        handle = swapped(optimizer, engine) if is_swapped else None
        late = nn.Parameter(torch.ones(30, 40))
        _steps(CASE, parameters, optimizer, range(3))
        if handle:
            with monkeypatch.context() as patch:
                patch.setattr(store, "_copy", _NoMemoryAt(call))
                with pytest.raises(torch.OutOfMemoryError):
                    handle.detach()
        for step in range(3, 3 + steps_between):
            if step == 3:
                optimizer.add_param_group({"params": [late], "lr": 0.5})
            late.grad = torch.full_like(late, 0.1 * step)
            _steps(CASE, parameters, optimizer, [step])
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        _steps(CASE, parameters, optimizer, range(5, 7))
        results.append(result_of([*parameters, late], optimizer))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("overlap", ["backward", "in_backward"])
def test_the_swap_stays_in_force_where_detach_has_no_memory(overlap: str, monkeypatch: Any) -> None:
    results = []
    for is_swapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = VirtualEngine(1)
        handle = swapped(optimizer, engine, overlap=overlap) if is_swapped else None
        for step in range(6):
            model(torch.full((3, 24), 0.1 * step)).square().mean().backward()
            if handle and step == 3:
                with monkeypatch.context() as patch:
                    patch.setattr(store, "_copy", _NoMemoryAt(3))
                    with pytest.raises(torch.OutOfMemoryError):
                        handle.detach()
            optimizer.step()
            optimizer.zero_grad()
        if handle:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])
