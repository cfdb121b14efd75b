"""Time by hand: what a copy takes, who waits for whom, and when the runtime of a solved plan does what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.engines.base import Lane
from lowtide.errors import TierFull
from lowtide.profiling.observe_step import observe
from tests.engines.clocked import ClockedEngine, ClockMode
from tests.support import zoo
from tests.support.solved import plan_with

KIB = 1024


def engine_of(**options: Any) -> ClockedEngine:
    """1 KiB a second each way."""
    return ClockedEngine(out_bytes_per_second=KIB, in_bytes_per_second=KIB, **options)


def storage_of(nbytes: int, value: int = 0) -> torch.UntypedStorage:
    return torch.full((nbytes,), value, dtype=torch.uint8).untyped_storage()


def test_a_copy_takes_latency_and_bytes_over_bandwidth_and_compute_waits_for_the_rest() -> None:
    engine = engine_of(latency_seconds=0.5)
    slot = engine.allocate(2 * KIB, "host")
    engine.clock.now = 10.0
    engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
    engine.copy_out(storage_of(2 * KIB, 7), slot)
    done = engine.record(Lane.OUT)
    assert not engine.query(done)
    engine.clock.now = 11.0
    assert engine.wait(Lane.COMPUTE, done) == 1.5
    assert (engine.clock.now, engine.clock.stalled) == (12.5, 1.5)
    assert engine.query(done)
    assert engine.wait(Lane.COMPUTE, done) == 0.0
    back = engine.new_buffer(2 * KIB, torch.device("cpu"))
    engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
    engine.copy_in(slot, back)
    assert engine.record(Lane.IN).at == 15.0
    assert set(back) == {7}
    engine.free(slot)
    assert engine.memory_in_use() == {"host": 0}


def test_lanes_are_queues_of_their_own_and_copies_slow_compute_by_their_share() -> None:
    engine = engine_of(compute_share=0.25)
    slots = [engine.allocate(KIB, "host") for _ in range(2)]
    for slot in slots:
        engine.copy_out(storage_of(KIB), slot)
    assert engine.record(Lane.OUT).at == 2.0
    engine.copy_in(slots[0], storage_of(KIB))
    assert engine.record(Lane.IN).at == 1.0
    assert engine.clock.now == 0.75


def test_the_cap_holds() -> None:
    engine = engine_of(host_bytes=KIB)
    engine.allocate(KIB, "host")
    with pytest.raises(TierFull):
        engine.allocate(1, "host")


# -- the runtime on a clock ------------------------------------------------------------------------------------------


class Squares(nn.Module):
    """x -> x * x, n times: each saves its input of 1 KiB, and takes 1 s forward and 1 s backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(KIB // 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight.expand(KIB // 4) + x
        for _ in range(8):
            y = y.cos()
        return y


def seconds_of(func: Any, args: tuple, out: Any) -> float:
    """A second for each cos, and for each step of its derivative that multiplies the gradient."""
    return {"cos": 1.0, "mul": 1.0}.get(func.overloadpacket.__name__, 0.0)


X = torch.linspace(-1, 1, KIB // 4)


def timed(plan: Plan, engine: ClockedEngine, num_steps: int = 2) -> tuple[float, float]:
    """Seconds of the last step, and how many of them compute waited. Checks the gradients."""
    truth = Squares()
    truth(X).sum().backward()
    model = Squares()
    with lowtide.apply(model, plan, engine=engine) as tide:
        for _ in range(num_steps):
            model.zero_grad(set_to_none=True)
            tide.settle()
            start, stalled = engine.clock.now, engine.clock.stalled
            with ClockMode(engine.clock, seconds_of):
                model(X).sum().backward()
            assert zoo.same_bits(model.weight.grad, truth.weight.grad)
        assert tide.stats.num_divergences == 0
    return engine.clock.now - start, engine.clock.stalled - stalled


def planned(names: list[str], **distances: int) -> Plan:
    model = Squares()
    profile = observe(model, lambda: model(X).sum(), layers=())
    assert [node.name for node in profile.sites] == ["add", *("cos" if not i else f"cos_{i}" for i in range(7))]
    return plan_with(profile, dict.fromkeys(names, Fate.SWAP), **distances)


def test_kept_takes_what_compute_takes() -> None:
    assert timed(planned([]), engine_of()) == (16.0, 0.0)


def test_one_copy_hides_behind_compute() -> None:
    """'add' leaves while the other seven run, and is fetched three operators ahead of its reader, the last."""
    assert timed(planned(["add"], leave=7, prefetch=3), engine_of()) == (16.0, 0.0)


def test_a_copy_that_must_be_gone_is_waited_for() -> None:
    """Sent when cos_0 has run, at 1 s; takes 4 s; its deadline is when the forward saves for its third operator."""
    slow = ClockedEngine(out_bytes_per_second=KIB / 4, in_bytes_per_second=1e9)
    seconds, stalled = timed(planned(["add"], leave=2, prefetch=3), slow)
    assert stalled == pytest.approx(3.0, abs=1e-5)
    assert seconds == pytest.approx(19.0, abs=1e-5)


def test_what_has_a_deadline_has_left_when_the_forward_is_over() -> None:
    """Sent at 1 s, 20 s long: the forward ends at 8 s and waits for 13."""
    slow = ClockedEngine(out_bytes_per_second=KIB / 20, in_bytes_per_second=1e9)
    seconds, stalled = timed(planned(["add"], leave=1000, prefetch=3), slow)
    assert stalled == pytest.approx(13.0, abs=1e-5)
    assert seconds == pytest.approx(29.0, abs=1e-5)


@pytest.mark.parametrize(("prefetch", "expected"), [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0), (4, 0.0), (5, 0.0)])
def test_a_fetch_starts_at_its_distance(prefetch: int, expected: float) -> None:
    """'add' is read by the last of eight operators of backward; its fetch takes 4 s."""
    slow = ClockedEngine(out_bytes_per_second=1e9, in_bytes_per_second=KIB / 4)
    seconds, stalled = timed(planned(["add"], leave=7, prefetch=prefetch), slow)
    assert stalled == pytest.approx(expected, abs=1e-5)
    assert seconds == pytest.approx(16.0 + expected, abs=1e-5)


def test_fetches_start_in_the_order_of_their_distances_not_of_saving() -> None:
    """'cos_3' is read three operators before 'add', but 'add' was told to start first: it must not wait its turn."""
    model = Squares()
    profile = observe(model, lambda: model(X).sum(), layers=())
    plan = plan_with(profile, {"add": Fate.SWAP, "cos_3": Fate.SWAP}, leave=1000)
    distances = {"add": 7, "cos_3": 0}
    sites = [
        site if site.fate is not Fate.SWAP else type(site)(**{**_fields(site), "prefetch": distances[site.name]})
        for site in plan.sites
    ]
    plan = Plan(layers=(), min_bytes=0, sites=tuple(sites), is_solved=True)
    slow = ClockedEngine(out_bytes_per_second=1e9, in_bytes_per_second=KIB / 5)
    # Both fetches take 5 s. 'add' comes first, from 0 to 5 s; 'cos_3' is needed at 3 s and there at 10 s. In order of
    # saving 'cos_3' would come first, from 3 to 8 s, and 'add', from 8 to 13 s, would be waited for from 12 s on.
    _, stalled = timed(plan, slow)
    assert stalled == pytest.approx(7.0, abs=1e-5)


def _fields(site: Any) -> dict[str, Any]:
    return {name: getattr(site, name) for name in type(site).__dataclass_fields__}


def test_recomputing_takes_the_time_of_the_recipe() -> None:
    model = Squares()
    profile = observe(model, lambda: model(X).sum(), layers=())
    for count in (1, 4, 7):
        made = {f"cos_{i}" if i else "cos": Fate.RECOMPUTE for i in range(count)}
        assert timed(plan_with(profile, made), engine_of()) == (16.0 + count, 0.0)
