"""A thousand steps in which things go wrong all the time, and nothing is left of any of them.

Graphs are dropped, forwards and backwards raise, graphs overlap, plans are removed and applied again. Counted before
and after: bytes on the slower tiers, the runtime's objects, threads, open files, and what Python allocated.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support import zoo
from tests.support.failing import Failing
from tests.support.virtual_engine import VirtualEngine, virtual

WIDTH = 16
NUM_STEPS = 1_000
WARM_UP_STEPS = 100
_NUM_OPS = 40
"""Fewer than there are in one of these steps under any plan."""
MEMORY = {
    "swap": {"swap": "all", "min_bytes": 0},
    "recompute": {"recompute": "all", "min_bytes": 0},
    "both": {"swap": "all", "recompute": "all", "min_bytes": 0},
    "mixed": {"swap": ["layers.0", "layers.2"], "recompute": ["layers.1"], "min_bytes": 0},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.fails:
            raise ZeroDivisionError
        return x + self.dropout(y) * y


def _loss(model: nn.Module, num_rows: int = 4) -> Tensor:
    return model(torch.randn(num_rows, WIDTH)).square().mean()


def _ordinary(model: nn.Module) -> None:
    _loss(model).backward()


def _drop(model: nn.Module) -> None:
    _loss(model)


def _fail_forward(model: nn.Module) -> None:
    model.layers[1].fails = True
    with pytest.raises(ZeroDivisionError):
        _loss(model)
    model.layers[1].fails = False


def _fail_backward(model: nn.Module) -> None:
    def fail(_grad: Tensor) -> None:
        raise ZeroDivisionError

    loss = _loss(model)
    hook = model.layers[1].linear.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()


def _overlap(model: nn.Module) -> None:
    losses = [_loss(model) for _ in range(3)]
    losses[1].backward()
    losses[0].backward(retain_graph=True)
    losses[0].backward()


def _half(model: nn.Module) -> None:
    torch.autograd.grad(_loss(model), model.layers[2].linear.weight)


def _double(model: nn.Module) -> None:
    weights = list(model.parameters())
    sum(g.square().sum() for g in torch.autograd.grad(_loss(model), weights, create_graph=True)).backward()


def _other_shape(model: nn.Module) -> None:
    _loss(model, 7).backward()


def _quiet(model: nn.Module) -> None:
    with torch.no_grad():
        _loss(model)


LIVES: tuple[Callable[[nn.Module], None], ...] = (
    _ordinary, _drop, _ordinary, _fail_forward, _ordinary, _fail_backward, _overlap, _half, _double, _other_shape,
    _quiet,
)  # fmt: skip


def _num_objects() -> int:
    gc.collect()
    return sum(str(getattr(type(o), "__module__", "")).startswith("lowtide.runtime") for o in gc.get_objects())


def _num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _left() -> tuple[int, ...]:
    """Objects, bytes, threads and files, counted after what is unreachable has gone."""
    return _num_objects(), _storage_bytes(), threading.active_count(), _num_open_files()


def _run(model: nn.Module, num_steps: int) -> None:
    for step in range(num_steps):
        LIVES[step % len(LIVES)](model)
        model.zero_grad(set_to_none=True)


def _storage_bytes() -> int:
    """Bytes of all tensors that Python can see: on this machine the model's device is main memory."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (Tensor, nn.Parameter) and found.layout is torch.strided:
            storages[found.untyped_storage()._cdata] = found.untyped_storage().nbytes()
    return sum(storages.values())


MOST_GROWTH_BLOCKS, MOST_GROWTH_BYTES = 80, 40_000
"""In a thousand steps each of LIVES is lived 90 times, so a block that one of them leaves is noticed. Lists and the
like may also grow by what exists elsewhere; these breathe by some 20 kB."""


def _blocks() -> tuple[int, int]:
    """Blocks that Python has allocated, and the bytes of lists, dictionaries and other containers."""
    gc.collect()
    num_blocks = sys.getallocatedblocks()
    return num_blocks, sum(map(sys.getsizeof, gc.get_objects()))


def _blocks_after_a_thousand_steps(model: nn.Module, tide: lowtide.Tide) -> tuple[int, int]:
    _run(model, NUM_STEPS)
    tide.settle()
    return _blocks()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files in /proc")
@pytest.mark.parametrize(
    ("plan", "engine"),
    [
        ("mixed", "host"),  # every fate, on an engine with threads
        pytest.param("swap", virtual(0), marks=pytest.mark.extended),
        pytest.param("both", "host", marks=pytest.mark.extended),
        *(pytest.param(plan, virtual(1), marks=pytest.mark.extended) for plan in MEMORY),
    ],
)
def test_nothing_grows_over_a_thousand_steps(plan: str, engine: str, tmp_path: Path) -> None:
    model = zoo.Stack(*(Block() for _ in range(3)))
    memory = {**MEMORY[plan], **({"disk_path": str(tmp_path)} if engine == "host" else {})}
    tide = lowtide.apply(model, memory, engine=engine)
    _run(model, WARM_UP_STEPS)
    tide.settle()
    before = _left()
    blocks = _blocks()
    for _ in range(3):
        older, blocks = blocks, _blocks_after_a_thousand_steps(model, tide)
        num_more, bytes_more = blocks[0] - older[0], blocks[1] - older[1]
        # Now and then one dictionary is made anew at twice its size.
        if bytes_more < MOST_GROWTH_BYTES and num_more < MOST_GROWTH_BLOCKS:
            break
    assert _left() == before
    assert bytes_more < MOST_GROWTH_BYTES
    assert num_more < MOST_GROWTH_BLOCKS
    stats = tide.stats
    assert (stats.host_bytes, stats.disk_bytes) == (0, 0)
    assert tide._scheduler.ledger.now_bytes == 0
    assert tide._scheduler.num_open() == 0
    tide.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", [virtual(0), "host"])
@pytest.mark.parametrize("num_rounds", [5, pytest.param(50, marks=pytest.mark.extended)])
def test_nothing_is_left_of_many_tides(engine: str, num_rounds: int, tmp_path: Path) -> None:
    """Each leaves nothing at all, so a few of them would show what one leaves."""
    model = zoo.Stack(*(Block() for _ in range(3)))

    def one(plan: str) -> None:
        memory = {**MEMORY[plan], **({"disk_path": str(tmp_path)} if engine == "host" else {})}
        with lowtide.apply(model, memory, engine=engine):
            _run(model, len(LIVES))

    for plan in MEMORY:
        one(plan)
    before = _left()
    for _ in range(num_rounds):
        for plan in MEMORY:
            one(plan)
    assert _left() == before


def _step_without_memory(tide: lowtide.Tide, place: int, *, for_ever: bool) -> None:
    """A micro-batch that runs out of memory at one operator of its forward or backward, or from there on for ever."""
    mode = Failing(place, for_ever=for_ever)
    try:
        with mode:
            tide.step(lambda: _ordinary(tide.model))
    except torch.OutOfMemoryError:
        assert for_ever
    assert mode.num_raised > 0
    tide.model.zero_grad(set_to_none=True)


def _assert_nothing_open(tide: lowtide.Tide) -> None:
    gc.collect()
    tide.settle()
    stats = tide.stats
    assert (stats.host_bytes, stats.disk_bytes) == (0, 0)
    assert (tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes) == (0, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lowtide. out of memory:UserWarning")
@pytest.mark.parametrize("engine", [virtual(0), pytest.param("host", marks=pytest.mark.extended)])
def test_nothing_is_left_of_micro_batches_that_ran_again(engine: str, tmp_path: Path) -> None:
    """Memory runs out at each operator, twice in a tide: after the first everything is swapped, after the second
    everything is recomputed."""
    model = zoo.Stack(*(Block() for _ in range(3)))
    memory = {"swap": "none", "min_bytes": 0, **({"disk_path": str(tmp_path)} if engine == "host" else {})}

    def one(number: int) -> None:
        with lowtide.apply(model, memory, engine=engine) as tide:
            for place in (number, _NUM_OPS - 1 - number):
                _step_without_memory(tide, place, for_ever=False)
            assert tide.stats.num_retries == 2
            _assert_nothing_open(tide)

    for number in range(5):
        one(number)
    before = _left()
    for number in range(_NUM_OPS):
        one(number)
    assert _left() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lowtide. out of memory:UserWarning")
@pytest.mark.parametrize("plan", [pytest.param("swap", marks=pytest.mark.extended), "mixed"])
def test_nothing_is_left_of_micro_batches_that_failed_for_good(plan: str) -> None:
    model = zoo.Stack(*(Block() for _ in range(3)))
    with lowtide.apply(model, MEMORY[plan], engine=virtual(0)) as tide:
        before = None
        for _ in range(3):  # what the tide learns when a forward first ends stays, so the first round only warms up
            for place in range(_NUM_OPS):
                _step_without_memory(tide, place, for_ever=True)
            before = before or _left()
        assert _left() == before
        _assert_nothing_open(tide)


@pytest.mark.parametrize("engine", [virtual(0), virtual(1), "host"])
def test_a_graph_that_outlives_its_tide_still_works_and_then_frees_everything(engine: str, tmp_path: Path) -> None:
    model = zoo.Stack(*(Block() for _ in range(3)))
    _ordinary(model)
    torch.manual_seed(0)
    want = torch.autograd.grad(_loss(model), list(model.parameters()))
    memory = {**MEMORY["mixed"], **({"disk_path": str(tmp_path)} if engine == "host" else {})}
    before = None
    for _ in range(2):  # the first round only warms up: it imports, too
        with lowtide.apply(model, memory, engine=engine):
            _ordinary(model)
            torch.manual_seed(0)
            loss = _loss(model)
        got = torch.autograd.grad(loss, list(model.parameters()))
        assert all(zoo.same_bits(*pair) for pair in zip(got, want, strict=True))
        del loss, got
        before = before or _left()
    assert _left() == before


class _KeepsOutput(nn.Module):
    """A model that keeps what it gave last, and with it a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.last = x
        return x


_MODULES = ["layers.*.linear", "layers.*.dropout"]


@pytest.mark.parametrize("is_removed", [True, False], ids=["removed", "in force"])
@pytest.mark.parametrize(
    "memory",
    [{"keep": ["*"]}, {"swap": "all"}, {"recompute": "all"}, {"recompute": _MODULES}, "budget"],
    ids=["keep", "swap", "recompute", "recomputed modules", "budget"],
)
def test_a_model_that_keeps_its_last_output_dies_with_it(memory: dict | str, is_removed: bool) -> None:
    model, engine = _KeepsOutput(), VirtualEngine(0)
    if isinstance(memory, str):
        handle = lowtide.optimize(model, budget="1MiB", engine=engine)
    else:
        handle = lowtide.apply(model, {**memory, "min_bytes": 0}, engine=engine)
    for _ in range(3):
        model(torch.randn(64, WIDTH))
    if is_removed:
        handle.remove()
    weak = weakref.ref(model)
    del model, handle
    gc.collect()
    assert weak() is None
    assert not (is_removed and engine.num_slots)


@pytest.mark.parametrize("memory", [{}, {"recompute": "all", "min_bytes": 0}], ids=["alone", "recompute"])
def test_a_model_whose_weights_come_and_go_dies_with_its_last_output(memory: dict) -> None:
    model = _KeepsOutput()
    weights = lowtide.swap_weights(model, torch.optim.SGD(model.parameters(), lr=0.1), min_bytes=0)
    plan = lowtide.apply(model, memory) if memory else None
    model(torch.randn(64, WIDTH))
    if plan is not None:
        plan.remove()
    weights.remove()
    weak = weakref.ref(model)
    del model, weights, plan
    gc.collect()
    assert weak() is None


def test_a_recomputed_layer_runs_again_after_its_model_is_gone() -> None:
    def grad_of(memory: dict) -> Tensor:
        torch.manual_seed(0)
        model, x = _KeepsOutput(), torch.ones(4, WIDTH, requires_grad=True)
        if memory:
            lowtide.apply(model, memory)
        out, weak, model.last = model(x), weakref.ref(model), None
        del model
        gc.collect()
        assert weak() is None
        out.sum().backward()
        return x.grad

    assert zoo.same_bits(grad_of({"recompute": "all", "min_bytes": 0}), grad_of({}))
