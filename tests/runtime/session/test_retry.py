"""What a micro-batch changes is put back when memory runs out in it: gradients, buffers, attributes, random states.

Also what becomes of the plan, what is refused, what is said, and, in a process of its own, memory that really runs out.
Memory that runs out at every operator in turn: test_retry_everywhere.py.
"""

from __future__ import annotations

import errno
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.runtime.session.tide import Tide, tighter
from lowtide.tensors.out_of_memory import is_out_of_memory
from tests.support import processes, zoo
from tests.support.failing import Failing
from tests.support.virtual_engine import virtual

SEED = 5
KEEP = {"swap": "none", "min_bytes": 0}

pytestmark = pytest.mark.filterwarnings("ignore:lowtide. out of memory:UserWarning")


# -- gradients ---------------------------------------------------------------------------------------------------------


def _net() -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def _apply(model: nn.Module, memory: dict = KEEP, **more: Any) -> Tide:
    return lowtide.apply(model, memory, engine=virtual(SEED), **more)


def _fail_after(number: int) -> Callable[[Tensor], None]:
    """A tensor hook that runs out of memory in its n-th call, once."""
    calls = [0]

    def hook(_grad: Tensor) -> None:
        calls[0] += 1
        if calls[0] == number:
            raise torch.OutOfMemoryError("made up")

    return hook


@pytest.mark.parametrize("first_is_none", [True, False])
def test_gradients_that_are_complete_are_not_added_twice(first_is_none: bool) -> None:
    model, twin = _net(), _net()
    x = torch.randn(4, 8)
    for net in (model, twin) if not first_is_none else ():
        net(x * 3).square().sum().backward()
    twin(x).square().sum().backward()
    objects = [p.grad for p in model.parameters()]
    model[0][0].weight.register_hook(_fail_after(1))  # the last but one to be accumulated
    with _apply(model) as tide:
        tide.step(lambda: model(x).square().sum().backward())
        assert tide.stats.num_retries == 1
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    if not first_is_none:
        assert all(p.grad is g for p, g in zip(model.parameters(), objects, strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_several_accumulations_in_one_micro_batch(fails_at: int) -> None:
    """Two backward passes in one closure: ((old + a) + b), not old + (a + b)."""
    model, twin = _net(), _net()
    x, y = torch.randn(4, 8), torch.randn(4, 8) * 1e3

    def closure(net: nn.Module) -> None:
        net(x).square().sum().backward()
        net(y).square().sum().backward()

    for net in (model, twin):
        net(x * 7).square().sum().backward()
    closure(twin)
    model[0][0].weight.register_hook(_fail_after(fails_at))
    with _apply(model) as tide:
        tide.step(lambda: closure(model))
        assert tide.stats.num_retries == (fails_at <= 2)
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_failures_in_backward() -> None:
    model, twin = _net(), _net()
    x = torch.randn(4, 8)
    for net in (model, twin):
        net(x * 7).square().sum().backward()
    twin(x).square().sum().backward()
    model[1][0].weight.register_hook(_fail_after(1))
    model[0][0].weight.register_hook(_fail_after(1))
    with _apply(model) as tide:
        tide.step(lambda: model(x).square().sum().backward())
        assert tide.stats.num_retries == 2
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, tokens: Tensor, is_tied: bool = False) -> Tensor:
        y = self.linear(self.embedding(tokens))
        return y @ self.embedding.weight.t() if is_tied else y


@pytest.mark.parametrize("is_tied", [False, True], ids=["sparse", "sparse-then-dense"])
@pytest.mark.parametrize("where", ["linear", "embedding"])
def test_sparse_gradients(is_tied: bool, where: str) -> None:
    torch.manual_seed(0)
    model = Embedded()
    torch.manual_seed(0)
    twin = Embedded()
    tokens = torch.randint(0, 16, (2, 5))
    for net in (model, twin):
        net(tokens).square().sum().backward()
    twin(tokens + 0, is_tied).square().sum().backward()
    getattr(model, where).weight.register_hook(_fail_after(1))
    with _apply(model) as tide:
        tide.step(lambda: model(tokens, is_tied).square().sum().backward())
        assert tide.stats.num_retries == 1
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_closure_that_begins_with_zero_grad_frees_what_it_drops() -> None:
    model, twin = _net(), _net()
    x = torch.randn(4, 8)
    twin(x).square().sum().backward()
    model(x).square().sum().backward()
    model[0][0].weight.register_hook(_fail_after(1))
    before = [TensorWeakRef(p.grad) for p in model.parameters()]

    def closure() -> None:
        model.zero_grad(set_to_none=True)
        assert [old() for old in before] == [None] * 6
        model(x).square().sum().backward()

    with _apply(model) as tide:
        tide.step(closure)
        assert tide.stats.num_retries == 1
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def _refused(model: nn.Module, closure: Callable[[], Any], **more: Any) -> str:
    with _apply(model, **more) as tide, pytest.raises(torch.OutOfMemoryError) as caught:
        tide.step(closure)
    (note,) = caught.value.__notes__
    return note


def test_what_cannot_be_taken_back_is_refused_in_words() -> None:
    x = torch.randn(4, 8)
    start = "lowtide: this micro-batch was not run again: "

    def failing(net: nn.Module, before: Callable[[], Any] = lambda: None, **how: Any) -> Callable[[], Any]:
        def closure() -> None:
            before()
            net(x).square().sum().backward(**how)

        net(x).square().sum().backward()
        net[0][0].weight.register_hook(_fail_after(1))
        return closure

    net = _net()
    closure = failing(net)
    net[2][0].weight.register_post_accumulate_grad_hook(lambda p: None)
    assert _refused(net, closure) == (
        start + "parameters have post-accumulate-grad hooks, which have acted on gradients of the failed run."
    )
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert _refused(net, failing(net, optimizer.step), optimizer=optimizer) == (
        start + "the closure wrote to parameters (an optimizer step belongs outside of it)."
    )
    net = _net()
    net.wide = nn.Parameter(torch.zeros(128))
    # One element, between those of which there are samples.
    assert _refused(net, failing(net, lambda: net.wide.detach()[1].add_(1))) == (  # type: ignore[operator]
        start + "the closure wrote to parameters (an optimizer step belongs outside of it)."
    )
    for own in (True, False):  # past its version; and a frozen one
        net = _net()
        net[1][0].bias.requires_grad_(own)
        assert _refused(net, failing(net, lambda: net[1][0].bias.data.add_(0.25))) == (  # noqa: B023
            start + "the closure wrote to parameters (an optimizer step belongs outside of it)."
        )
    net = _net()
    assert _refused(net, failing(net, lambda: net.zero_grad(set_to_none=False))) == (
        start + "the closure changed gradients by itself (do so outside of it)."
    )
    net = _net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert _refused(net, failing(net, create_graph=True)) == (
            start + "gradients were accumulated with create_graph=True, which replaces them."
        )


def test_a_closure_that_does_less_the_second_time_is_found_out() -> None:
    model = _net()
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    model[0][0].weight.register_hook(_fail_after(1))
    runs = [lambda: model(x), lambda: model(x).square().sum().backward()]
    with _apply(model) as tide, pytest.raises(RuntimeError) as caught:
        tide.step(lambda: runs.pop()())  # noqa: PLW0108
    assert str(caught.value).startswith("lowtide: the closure given to tide.step ran out of memory, was run again, ")


def test_another_error_in_the_second_run_leaves_gradients_in_place() -> None:
    model = _net()
    x = torch.randn(4, 8)
    model(x).square().sum().backward()
    objects = [p.grad for p in model.parameters()]
    model[0][0].weight.register_hook(_fail_after(1))

    def broken() -> None:
        raise ZeroDivisionError

    runs = [broken, lambda: model(x).square().sum().backward()]
    with _apply(model) as tide, pytest.raises(ZeroDivisionError):
        tide.step(lambda: runs.pop()())  # noqa: PLW0108
    assert all(p.grad is g for p, g in zip(model.parameters(), objects, strict=True))
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# -- everything else that a micro-batch changes ------------------------------------------------------------------------


FAILING: list[bool] = []


class Habits(nn.Module):
    """Counts, lists, caches, replaces and draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("large", torch.zeros(2**19))
        self.num_calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen.append(self.num_calls)
        self.small.add_(1)
        self.replaced = self.replaced + 1
        self.large[0] += 1
        if not hasattr(self, "cache"):
            self.cache = 1
            self.register_buffer("late", torch.ones(2), persistent=False)
        y = self.linear(x) * random.random() + numpy.random.rand() + torch.rand(8)
        if FAILING:
            FAILING.clear()
            raise torch.OutOfMemoryError("made up")
        return y


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_buffers_attributes_and_generators_are_put_back(fails_at: int) -> None:
    def run(fails: bool) -> tuple:
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        model = Habits()
        with _apply(model) as tide:
            for number in range(3):
                if fails and number == fails_at:
                    FAILING.append(True)
                loss = tide.step(lambda: model(torch.ones(2, 8)).sum())
            assert tide.stats.num_retries == fails
            assert tide.stats.num_forwards == 3
        buffers = {name: buffer.sum().item() for name, buffer in model.named_buffers()}
        return (
            loss.item(), buffers, model.num_calls, model.seen, list(model.state_dict()),
            random.random(), numpy.random.rand(), torch.rand(1).item(),
        )  # fmt: skip

    assert run(fails=True) == run(fails=False)


# -- the plan ----------------------------------------------------------------------------------------------------------


def _rules(plan: Plan) -> list[tuple[str, str]]:
    return [(rule.fate.value, rule.pattern.text) for rule in plan.rules.rules]


def test_plans_become_tighter_step_by_step() -> None:
    keep = Rule(pattern=Pattern.parse("layers.0"), fate=Fate.KEEP)
    plan = Plan(layers=("layers.0",), rules=Rules((keep,)), min_bytes=0)
    swapped = tighter(plan, has_room=True)
    assert swapped is not None
    assert (_rules(swapped[0]), swapped[1]) == ([("swap", "*")], "everything is swapped now")
    recomputed = tighter(swapped[0], has_room=True)
    assert recomputed is not None
    assert _rules(recomputed[0]) == [("recompute", "*"), ("swap", "*")]
    assert recomputed[1] == "all layers are recomputed now"
    assert tighter(recomputed[0], has_room=True) is None
    full = tighter(plan, has_room=False)
    assert full is not None and full[1] == "all layers are recomputed now"
    assert tighter(Plan(layers=(), rules=swapped[0].rules, min_bytes=0), has_room=True) is None


def test_the_last_words_say_what_was_tried_and_what_is_needed() -> None:
    case = zoo.CASES["mlp"]
    model = case.build(SEED)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _apply(model) as tide, pytest.raises(torch.OutOfMemoryError) as caught, Failing(9, for_ever=True):
        tide.step(lambda: case.loss(model, case.batch(0)).backward())
    place, note = caught.value.__notes__
    assert place.startswith("Memory ran out here:\n")
    assert "test_retry.py" in place
    assert note.startswith(
        "lowtide: memory ran out 3 times in this micro-batch (everything is swapped now; then all layers are "
        "recomputed now). Parameters, gradients, buffers and optimizer state alone are "
    )
    assert note.endswith("Use smaller micro-batches or a larger device.")
    assert all(p.grad is None for p in model.parameters())
    assert all(zoo.same_bits(p, before[name]) for name, p in model.named_parameters())


def test_a_retry_is_told_once_with_what_was_done() -> None:
    case = zoo.CASES["mlp"]
    model = case.build(SEED)
    with _apply(model) as tide, pytest.warns(UserWarning, match="out of memory") as told, Failing(3):
        tide.step(lambda: case.loss(model, case.batch(0)).backward())
    assert [str(warning.message) for warning in told] == [
        "lowtide: out of memory (made up, at aten.addmm.default); everything is swapped now, and the micro-batch is "
        "run again."
    ]
    assert told[0].filename == __file__


def test_the_autopilot_plans_for_less() -> None:
    case = zoo.CASES["llama"]
    model, twin = case.build(SEED), case.build(SEED)
    optimizer = zoo.make_optimizer(model)
    for number in range(3):
        (case.loss(twin, case.batch(number)) / 3).backward()
    with lowtide.optimize(model, budget="10MiB", optimizer=optimizer, engine=virtual(SEED)) as auto:
        for number in range(3):
            with Failing(300) if number == 1 else Failing():
                auto.step(lambda n=number: (case.loss(model, case.batch(n)) / 3).backward())
        assert [event.why for event in auto.events].count("out of memory") == 1
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_after_remove_a_step_is_just_the_closure() -> None:
    model = _net()
    tide = _apply(model)
    tide.remove()

    def fail() -> None:
        raise torch.OutOfMemoryError("made up")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        tide.step(fail)
    assert not hasattr(caught.value, "__notes__")
    assert tide.step(lambda: 7) == 7


# -- errors ------------------------------------------------------------------------------------------------------------


def test_which_errors_are_about_memory() -> None:
    chained = RuntimeError("could not be read back")
    chained.__cause__ = MemoryError()
    about = [
        torch.OutOfMemoryError("x"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("NPU out of memory. Tried to allocate 138.00 MiB"),
        chained,
    ]
    others = [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "No space"), KeyboardInterrupt()]
    assert [is_out_of_memory(error) for error in about + others] == [True] * len(about) + [False] * len(others)


REAL = """
import resource, torch, lowtide
from pathlib import Path
from torch import nn

net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Tanh()) for _ in range(6)))
x = torch.randn(2**18 + 1, 32)  # 32 MiB: blocks that malloc gives back when they are freed
small = x[:64]
def closure(x):
    net(x).square().mean().backward()
with lowtide.apply(net, {"swap": "none", "layers": [str(i) for i in range(6)]}) as tide:
    tide.step(lambda: closure(small))
    net.zero_grad(set_to_none=True)
    used = int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmData")).split()[1])
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + 350 * 2**20, resource.RLIM_INFINITY))
    tide.step(lambda: closure(x))
    tide.step(lambda: closure(small))
    print(tide.stats.num_retries)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
grads = [p.grad for p in net.parameters()]
net.zero_grad(set_to_none=True)
closure(x)
closure(small)
print(all(torch.equal(g, p.grad) for g, p in zip(grads, net.parameters())))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_memory_that_really_runs_out(tmp_path: Path) -> None:
    """600 MiB of activations where 350 MiB may be had: the first attempt fails in the allocator itself."""
    status, out, err = processes.program(REAL, tmp_path)
    assert status == 0, err[-2000:]
    num_retries, is_same = out.split()
    assert int(num_retries) >= 1
    assert is_same == "True"
