"""Pairs: their order, their bits, their errors, and what the second thread takes over. One rank, whose rows arrive at
the wait; two ranks are in test_overlap_ranks.py."""

from __future__ import annotations

import contextvars
import dataclasses
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import lowtide
from benchmarks.overlap_figures import pair_order
from lowtide.engines.base import Lane
from lowtide.errors import ConfigError, RecomputeRefusedError
from lowtide.pipeline import Overlap, all_to_all, start_all_to_all
from lowtide.pipeline.exchange import Route
from lowtide.pipeline.overlap import Event
from tests.pipeline import moe
from tests.pipeline.late_link import late
from tests.support.exposed import exposed
from tests.support.grid import in_turn
from tests.support.virtual_engine import VirtualEngine
from tests.support.zoo import same_bits


class Stop(Exception):
    pass


def alone(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """One half after the other: what pairs are compared with here."""
    overlap, losses = Overlap(start=late), []
    for batch in batches:
        made: list[Tensor] = []
        overlap.run_pair(lambda made=made, batch=batch: made.append(model(batch)), None)
        overlap.run_pair(None, made[0].backward)
        losses.append(made[0].detach())
    return losses


def step(model: nn.Module, run: Callable[[nn.Module, list[Tensor]], list[Tensor]], num: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return moe.result(model, run(model, moe.batches(0, num)))


def in_pairs(overlap: Overlap) -> Callable[[nn.Module, list[Tensor]], list[Tensor]]:
    return overlap.run


def different(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys() and len(a) > 20
    return [name for name in a if not same_bits(a[name], b[name])]


def words(log: list[Any], pair: int) -> str:
    """A pair in a line: `B.` a segment of the backward, `B0>` an exchange starts, `>B0` it is there, `F#` counts. What
    the link itself says, `send` and `wait`, stands before what it belongs to."""
    shapes = {"segment": "{h}.", "issue": "{h}{n}>", "wait": ">{h}{n}", "counts": "{h}#"}
    found, said = [], ""
    for event in log:
        if isinstance(event, str):
            said += f"{event} "
        else:
            if event.pair == pair:
                found.append(said + shapes[event.kind].format(h=event.half[0].upper(), n=event.number))
            said = ""
    return " ".join(found)


# -- order and bits ----------------------------------------------------------------------------------------------------


def test_halves_take_turns_where_they_wait() -> None:
    model, log = moe.make(0, 1, num_layers=1), []

    def link(rows: Tensor, sent: Tensor, route: Route) -> Any:
        work = late(rows, sent, route)
        if rows.is_floating_point():
            log.append("send")
            work.wait, wait = lambda: (log.append("wait"), wait()), work.wait
        return work

    Overlap(start=link, log=log.append).run(model, moe.batches(0, 2))
    assert words(log, 0) == "F# F. send F0> F. wait >F0 F. send F1> F. wait >F1 F."
    assert words(log, 1) == (
        "B. send B0> B. F# F. send F0> F. wait >B0 B. send B1> B. wait >F0 F. send F1> F. wait >B1 B. wait >F1 F."
    )
    assert words(log, 2) == words(log, 0).replace("F# ", "").replace("F", "B")


@pytest.mark.parametrize(("num_forward", "num_backward"), [(1, 1), (3, 3), (1, 3), (3, 1)])
def test_the_order_that_predictions_use_is_the_real_one(num_forward: int, num_backward: int) -> None:
    ahead, behind = moe.make(0, 1, num_layers=num_forward), moe.make(0, 1, num_layers=num_backward)
    log, made, batch = [], [], moe.batches(0, 1)[0]
    overlap = Overlap(start=late, log=log.append)
    overlap.run_pair(lambda: made.append(behind(batch)), None)
    overlap.run_pair(lambda: ahead(batch), made[0].backward)
    real = [dataclasses.replace(event, pair=0) for event in log if event.pair == 1 and event.kind != "counts"]
    assert real == pair_order(2 * num_forward, 2 * num_backward)


@pytest.mark.parametrize("hides", [False, True])
def test_pairs_have_the_bits_of_their_halves_alone_and_hide_every_exchange(hides: bool) -> None:
    model, log = moe.make(0, 1, num_layers=3, hides=hides), []
    truth = step(model, alone)
    assert different(step(model, in_pairs(Overlap(start=late, log=log.append))), truth) == []
    paired = [event for event in log if event.pair in (1, 2)]
    assert exposed(paired) == []
    assert sum(event.kind == "issue" for event in paired) == 2 * 2 * 2 * 3
    assert len(exposed(log)) == 2 * 2 * 3  # the first forward and the last backward


@pytest.mark.parametrize(("num_forward", "num_backward"), [(1, 3), (3, 1)])
def test_a_half_with_more_exchanges_goes_on_alone(num_forward: int, num_backward: int) -> None:
    ahead, behind = moe.make(0, 1, num_layers=num_forward), moe.make(0, 1, num_layers=num_backward)
    batch = moe.batches(0, 1)[0]
    log: list[Event] = []
    overlap = Overlap(start=late, log=log.append)
    torch.manual_seed(5)
    truth = moe.result(behind, alone(behind, [batch]))
    torch.manual_seed(5)
    made: list[Tensor] = []
    overlap.run_pair(lambda: made.append(behind(batch)), None)
    overlap.run_pair(lambda: ahead(batch), made[0].backward)
    found = moe.result(behind, [made[0].detach()])
    assert different(found, truth) == []
    assert len(exposed(event for event in log if event.pair == 1)) == (3 if num_backward > num_forward else 4)


def test_exactly_one_half_runs() -> None:
    model = moe.make(0, 1)
    inside: list[str] = []
    seen: set[tuple[str, ...]] = set()

    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            _busy("F")
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            _busy("B")
            return gradient

    def _busy(name: str) -> None:
        inside.append(name)
        time.sleep(0.002)
        seen.add(tuple(inside))
        inside.remove(name)

    for layer in model.layers:
        for part in (layer.attention, layer.experts):
            part.register_forward_hook(lambda module, args, output: Busy.apply(output))
    Overlap(start=late).run(model, moe.batches(0))
    assert seen == {("F",), ("B",)}


def test_what_stands_between_start_and_wait_runs_there_in_backward_too() -> None:
    order: list[str] = []

    def noted(name: str, x: Tensor) -> Tensor:
        order.append(name)
        made = x * 2
        made.register_hook(lambda gradient: order.append(f"{name}'"))
        return made

    def link(rows: Tensor, sent: Tensor, route: Route) -> Any:
        order.append("start")
        work = late(rows, sent, route)
        work.wait, wait = lambda: (order.append("wait"), wait()), work.wait
        return work

    overlap = Overlap(start=link)
    x = torch.randn(3, 2, requires_grad=True)
    made: list[Tensor] = []

    def forward() -> None:
        before = noted("before", x)
        pending = start_all_to_all(before, [3], [3])
        shared = noted("shared", before)
        made.append((noted("after", pending.wait()) + shared).sum())

    overlap.run_pair(forward, None)
    overlap.run_pair(None, made[0].backward)
    assert order[:5] == ["before", "start", "shared", "wait", "after"]
    assert order[5:] == ["after'", "start", "shared'", "wait", "before'"]
    assert torch.equal(x.grad, torch.full((3, 2), 8.0))


def test_a_pending_exchange_gives_one_tensor_and_can_be_read_twice() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    made: list[Tensor] = []

    def forward() -> None:
        pending = start_all_to_all(x, [3], [3])
        assert pending.wait() is pending.wait()
        made.append((pending.wait() ** 2).sum())

    overlap = Overlap(start=late)
    overlap.run_pair(forward, None)
    for times in (1, 2):
        overlap.run_pair(None, lambda: made[0].backward(retain_graph=True))
        assert torch.equal(x.grad, 2 * times * x)


# -- recompute and swap ------------------------------------------------------------------------------------------------

PLANS = {
    "layers": {"recompute": "all"},
    "parts": {"recompute": ["layers.*.attention", "layers.*.experts"]},
    "swap": {"swap": "all", "min_bytes": 0},
    "both": {"recompute": ["layers.0", "layers.1.attention"], "swap": ["layers.1", "layers.2"], "min_bytes": 0},
}


@pytest.mark.parametrize(("plan", "seed"), in_turn(3, PLANS, range(3)))
def test_plans_do_not_change_a_bit(plan: str, seed: int) -> None:
    memory: dict[str, Any] = PLANS[plan]
    model, log = moe.make(0, 1, num_layers=3, hides=seed == 1), []
    truth = step(model, alone)
    with lowtide.apply(model, memory, engine=VirtualEngine(seed=seed)) as tide:
        overlap = Overlap(start=late, log=log.append)
        for _ in range(2):
            assert different(step(model, in_pairs(overlap)), truth) == []
        stats = tide.stats
    assert (stats.recomputed_bytes > 0) == ("recompute" in memory) and (stats.swapped_bytes > 0) == ("swap" in memory)
    assert stats.num_divergences == 0
    # A layer that runs again exchanges nothing again.
    assert sum(event.kind == "issue" for event in log) == 2 * 3 * 3 * 2 * 2


class Remembering(nn.Module):
    """A layer that draws, and changes a buffer and an attribute, before and after it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.dropout = nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.dropout(torch.tanh(self.inner(x)))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean())
        rows = all_to_all(h, [len(h)], [len(h)])
        return x + self.dropout(torch.tanh(self.outer(rows))) * (1 + self.mean[0]) * self.calls


def test_a_layer_that_both_halves_are_in_has_one_state_for_each() -> None:
    batches = [torch.randn(4 + number, 8) for number in range(4)]

    def found(run: Callable[[nn.Module, list[Tensor]], list[Tensor]], memory: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Remembering(), Remembering())
        with lowtide.apply(model, memory):
            losses = run(lambda batch: model(batch).square().mean(), batches)
        assert [layer.calls for layer in model] == [4, 4]
        return [*losses, *(parameter.grad for parameter in model.parameters()), *model.buffers()]

    truth = found(alone, {})
    result = found(lambda model, batches: Overlap(start=late).run(model, batches), {"recompute": "all"})
    assert all(same_bits(a, b) for a, b in zip(result, truth, strict=True))


def test_rows_that_a_recomputed_layer_received_are_in_the_ledger() -> None:
    model, batch = moe.make(0, 1, num_layers=2), moe.batches(0, 1)[0]
    received = 2 * (2 * batch.numel() * moe.TOP_K * moe.WIDTH * 4 + moe.EXPERTS * 8)
    state = sum(parameter.nbytes for parameter in model.parameters())
    found = []
    for memory in ({"recompute": "all"}, {}):
        made: list[Tensor] = []
        with lowtide.apply(model, memory) as tide:
            Overlap(start=late).run_pair(lambda made=made: made.append(model(batch)), None)
            found.append(tide.stats)
            del made
    recomputed, plain = found
    assert recomputed.kept_bytes > received
    assert recomputed.peak_device_bytes - state == recomputed.kept_bytes
    assert recomputed.saved_bytes == plain.saved_bytes


class Fetching(VirtualEngine):
    """Writes down when bytes come back, and when somebody needs them."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(seed=0)
        self.log = log
        self.arrivals: dict[int, Any] = {}

    def copy_in(self, slot: Any, target: Any) -> None:
        super().copy_in(slot, target)
        self.log.append(("fetch", len(self.arrivals)))

    def record(self, lane: Lane) -> Any:
        event = super().record(lane)
        if lane is Lane.IN:
            self.arrivals[id(event)] = (len(self.arrivals), event)
        return event

    def wait(self, lane: Lane, event: Any) -> float:
        if lane is Lane.COMPUTE and id(event) in self.arrivals:
            self.log.append(("need", self.arrivals[id(event)][0]))
        return super().wait(lane, event)


def test_fetches_start_before_the_segment_that_needs_them() -> None:
    model, log = moe.make(0, 1, num_layers=3), []
    with lowtide.apply(model, {"swap": "all", "min_bytes": 0}, engine=Fetching(log)):
        Overlap(start=late, log=log.append).run(model, moe.batches(0, 2))
    fetched: dict[int, int] = {}
    handed_over = -1
    needed = []
    for place, event in enumerate(log):
        if isinstance(event, Event):
            if (event.pair, event.half) == (1, "forward"):
                handed_over = place
        elif event[0] == "fetch":
            fetched[event[1]] = place
        elif handed_over >= 0 and fetched[event[1]] < place:
            needed.append(fetched[event[1]] < handed_over)
        if event == Event(1, "backward", "segment", 12):
            break
    assert len(needed) > 50 and all(needed)


# -- errors ------------------------------------------------------------------------------------------------------------


class Breaking(nn.Module):
    """A model that raises in forward or backward, before the exchange of this number."""

    def __init__(self, where: str, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.model = moe.make(0, 1)
        self.where, self.number, self.error = where, number, error
        self.num = 0
        self.is_armed = False

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(batch)

    def link(self, rows: Tensor, sent: Tensor, route: Route) -> Any:
        is_backward = threading.current_thread() is not threading.main_thread()
        if self.is_armed and rows.is_floating_point() and is_backward == (self.where == "backward"):
            self.num += 1
            if self.num > self.number:
                raise self.error("this one")
        return late(rows, sent, route)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_ends_both_halves_and_is_raised_as_it_was(where: str, number: int, error: type[BaseException]) -> None:
    model = Breaking(where, number, error)
    truth = step(model, alone)
    overlap = Overlap(start=model.link)
    first: list[Tensor] = []
    overlap.run_pair(lambda: first.append(model(moe.batches(0)[0])), None)
    model.is_armed = True
    ended: list[str] = []

    def half(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            try:
                call()
            except BaseException as caught:
                ended.append(type(caught).__name__)
                raise

        return run

    with pytest.raises(error) as caught:
        overlap.run_pair(half(lambda: model(moe.batches(0)[1])), half(first[0].backward))
    assert str(caught.value) == "this one"
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "link" in frames and ("backward" if where == "backward" else "forward") in frames
    is_first = (where, number) == ("backward", 0)  # then the forward has not begun
    assert sorted(ended) == sorted([error.__name__] if is_first else [error.__name__, "Abandoned"])
    model.is_armed = False
    model.zero_grad()
    assert different(step(model, in_pairs(overlap)), truth) == []


def test_when_both_raise_the_first_error_counts() -> None:
    ended: list[str] = []

    def backward() -> None:
        all_to_all(torch.ones(1, 2), [1], [1])
        raise Stop("of the backward")

    def forward() -> None:
        try:
            all_to_all(torch.ones(1, 2), [1], [1])
        finally:
            ended.append("forward")
            raise Stop("of the forward")

    with pytest.raises(Stop, match=r"^of the backward$"):
        Overlap(start=late).run_pair(forward, backward)
    assert ended == ["forward"]


def test_a_second_thread_that_cannot_be_made_ready_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(is_on: bool) -> None:
        raise Stop("not here")

    monkeypatch.setattr(torch, "set_autocast_cache_enabled", fails)
    with pytest.raises(Stop, match=r"^not here$"):
        Overlap(start=late).run_pair(lambda: None, lambda: None)


def test_nothing_outlives_a_step_or_an_error() -> None:
    gc.collect()
    gc.disable()
    try:
        for armed in (False, True):
            model = Breaking("forward", 1, Stop)
            alive: list[weakref.ref] = []
            model.model.layers[0].norm.register_forward_hook(
                lambda module, args, output, alive=alive: alive.append(weakref.ref(output))
            )
            overlap = Overlap(start=model.link)
            made: list[Tensor] = []
            overlap.run_pair(lambda made=made, model=model: made.append(model(moe.batches(0)[0])), None)
            model.is_armed = armed
            try:
                overlap.run_pair(lambda made=made, model=model: made.append(model(moe.batches(0)[1])), made[0].backward)
            except Stop:
                assert armed
            assert len(alive) == 2
            made.clear()
            if armed:
                # Nodes that autograd had lined up on a thread when an error came stay there until its next backward.
                overlap.run_pair(lambda: None, torch.ones(1, requires_grad=True).sum().backward)
            assert [found for found in alive if found() is not None] == []
    finally:
        gc.enable()


# -- what the second thread takes over ---------------------------------------------------------------------------------


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_backward_finds_the_state_of_the_callers_thread() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    found: list[Any] = []
    packed: list[Any] = []

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        found.append((
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), variable.get(),
            torch.ones(()).device.type, len(torch.utils._python_dispatch._get_current_dispatch_mode_stack()),
            threading.current_thread() is threading.main_thread(), torch.get_num_threads(),
        ))  # fmt: skip
        _ = x.exp() if torch.is_grad_enabled() else None

    def run() -> None:
        overlap.run_pair(lambda: None, backward)

    overlap = Overlap(start=late)
    run()
    variable.set(3)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
        Passing(),
    ):
        run()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        run()
    run()
    threads = torch.get_num_threads()
    plain = (True, False, torch.bfloat16, 3, "cpu", 0, False, threads)
    assert found[0] == (True, False, torch.bfloat16, 0, "cpu", 0, False, threads)
    assert found[1] == (False, True, torch.bfloat16, 3, "meta", 1, False, threads)
    assert found[2:] == [plain, plain] and len(packed) == 1


def test_a_backward_does_not_empty_the_casts_of_the_forward() -> None:
    """A weight that a forward uses twice under autocast is cast once; its two gradients are added up in bf16."""
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(6, 8, requires_grad=True)

    def model() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            # Recomputed in backward while the other half waits for its rows, between its two uses of the weight.
            sent = checkpoint(lambda x, weight: nn.functional.linear(x, weight).exp(), x, weight, use_reentrant=False)
            return (nn.functional.linear(all_to_all(sent, [6], [6]), weight) ** 2).float().sum()

    def gradients(run: Callable[[Overlap], Any]) -> Tensor:
        weight.grad = None
        run(Overlap(start=late))
        return weight.grad

    def one_by_one(overlap: Overlap) -> None:
        for _ in range(3):
            made: list[Tensor] = []
            overlap.run_pair(lambda made=made: made.append(model()), None)
            overlap.run_pair(None, made[0].backward)

    truth = gradients(one_by_one)
    assert same_bits(gradients(lambda overlap: overlap.run(lambda _: model(), range(3))), truth)


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(forward: Callable[[], Any], kind: type[BaseException] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        Overlap(start=late).run_pair(forward, None)
    return str(caught.value)


def test_a_checkpoint_around_an_exchange_is_refused_before_anybody_waits() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    assert refused(lambda: checkpoint(lambda x: all_to_all(x, [3], [3]), x, use_reentrant=False)) == (
        "lowtide: all_to_all was called inside torch.utils.checkpoint, which would route and send the tokens once "
        "more in backward; checkpoint the parts before, between and after the exchanges, or have lowtide recompute "
        "the layer (`recompute: all`), which keeps what was received"
    )


def test_rows_that_do_not_add_up_are_refused() -> None:
    assert refused(lambda: all_to_all(torch.ones(3, 2), [3], [2])) == (
        "lowtide: all_to_all was given 3 rows and input_splits that add up to 2: they say how many rows go to each rank"
    )


def test_a_pair_inside_a_pair_is_refused() -> None:
    overlap = Overlap(start=late)
    with pytest.raises(ConfigError) as caught:
        overlap.run_pair(lambda: overlap.run_pair(None, None), None)
    assert str(caught.value) == (
        "lowtide: a half of a pair began another pair; give that one a lowtide.pipeline.Overlap of its own"
    )
    overlap.run_pair(None, None)


class Layer(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.weight)


def _twice_at_first(x: Tensor) -> Tensor:
    rows = all_to_all(x, [3], [3])
    return rows.exp() if torch._C._current_graph_task_id() == -1 else all_to_all(rows, [3], [3]).exp()


def _others_at_first(x: Tensor) -> Tensor:
    is_first = torch._C._current_graph_task_id() == -1
    return all_to_all(x if is_first else x[:2], [len(x) - (not is_first)], [len(x) - (not is_first)]).exp()


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (lambda x: all_to_all(x, [3], [3]).mul_(2).exp(), "it wrote into the rows that it received"),
        (_twice_at_first, "it exchanges rows more often in its second run than in its first"),
        (_others_at_first, "it received rows of shape (3, 2), and of shape (2, 2) when it was run again"),
    ],
)
def test_a_recomputed_layer_that_cannot_take_the_same_rows_is_refused(
    inner: Callable[[Tensor], Tensor], why: str
) -> None:
    model, made, overlap = nn.Sequential(Layer(inner)), [], Overlap(start=late)
    with lowtide.apply(model, {"recompute": ["0"]}):
        overlap.run_pair(lambda: made.append(model(torch.ones(3, 2, requires_grad=True)).sum()), None)
        with pytest.raises(RecomputeRefusedError) as caught:
            overlap.run_pair(None, made[0].backward)
    assert str(caught.value) == (
        f"lowtide: the recomputed '0' (Layer) cannot be run again: {why}. It depends on something that lowtide cannot "
        "put back: state outside of the model's objects, a nested function's variables, or work that is not the same "
        "twice. Give this module the fate keep or swap."
    )
