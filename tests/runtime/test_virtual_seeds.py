"""Many schedules: whenever copies happen to run, no number is wrong and nothing is left over.

Each seed of the virtual engine is another machine: another moment at which every copy runs, and poison wherever a
program looks too early or lets go too soon. The truth of each model is computed once; each schedule then runs an
observed step, a planned step with a graph that is dropped in between, and two graphs that are alive at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.offload import scheduler as swap
from tests.support import zoo
from tests.support.grid import in_turn
from tests.support.virtual_engine import virtual

# Those that run in a few milliseconds and differ in what they do to the order of copies.
NAMES = (
    "mlp", "tied", "strided_views", "shared_layer", "keyword_inputs", "structured_outputs", "integers", "zero_size",
    "custom_function", "lora", "lora_autocast", "no_grad_inside", "nested", "checkpointed", "unet", "complex",
    "transformer_encoder", "llama", "gpt2_dropout", "qwen3_moe_eager",
)  # fmt: skip
SWAP = {"swap": "all", "min_bytes": 0}
BOTH = {"swap": "all", "recompute": "all", "min_bytes": 0}
FAR = {"swap": [{"match": "*", "prefetch": 2}], "min_bytes": 0}
LATE = {"swap": [{"match": "*", "prefetch": 0, "tier": "disk"}], "min_bytes": 0}
TIGHT = {"swap": "all", "min_bytes": 0, "host_budget": 3000, "disk_budget": 2000}
PLANS = (SWAP, BOTH, FAR, LATE, TIGHT)
NUM_SCHEDULES = 2_000
"""With those of `make test-extended`; `make test` runs one for each model."""
SEEDS_A_TEST = NUM_SCHEDULES // (len(NAMES) * len(PLANS))
NUM_FIRST = SEEDS_A_TEST // 20


def _life(case: zoo.Case, model: nn.Module) -> dict[str, torch.Tensor]:
    """An ordinary step, a dropped graph, two live graphs run backward first-come-first-served, a retained graph."""
    torch.manual_seed(7)
    seen: dict[str, torch.Tensor] = {}
    case.loss(model, case.batch(0)).backward()
    _collect(seen, "step", model)
    case.loss(model, case.batch(1))
    first, second = case.loss(model, case.batch(2)), case.loss(model, case.batch(3))
    first.backward()
    second.backward(retain_graph=case.name != "checkpointed")
    if case.name != "checkpointed":  # a reentrant checkpoint runs backward once only
        second.backward()
    seen["first"], seen["second"] = first.detach(), second.detach()
    _collect(seen, "live", model)
    seen["random"] = torch.get_rng_state()
    return seen


def _collect(seen: dict[str, torch.Tensor], when: str, model: nn.Module) -> None:
    seen.update({f"{when}:{name}": p.grad for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)


def _num_owners() -> int:
    gc.collect()
    return sum(
        type(o) in (swap.OffloadedStorage, swap.Copy, swap.PrefetchQueue, swap.OffloadScheduler)
        for o in gc.get_objects()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [range(NUM_FIRST), pytest.param(range(NUM_FIRST, SEEDS_A_TEST), marks=pytest.mark.extended)],
    ids=["first", "more"],
)
@pytest.mark.parametrize(("name", "plan"), in_turn(5, NAMES, range(len(PLANS))))
@pytest.mark.filterwarnings("ignore:lowtide. no room:UserWarning")
def test_every_schedule_gives_the_same_bits(
    name: str, plan: int, numbers: range, record_property: Callable[[str, int], None]
) -> None:
    case = zoo.CASES[name]
    twin = case.build(3)
    model = case.build(3)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    truth = _life(case, twin)
    owners_before = _num_owners()
    # Every test has seeds of its own, so that no two tests run the same schedule.
    start = (NAMES.index(name) * len(PLANS) + plan) * SEEDS_A_TEST
    for seed in (start + number for number in numbers):
        model.load_state_dict(weights)
        tide = lowtide.apply(model, PLANS[plan], engine=virtual(seed))
        seen = _life(case, model)
        tide.remove()
        assert seen.keys() == truth.keys()
        wrong = [key for key in truth if not zoo.same_bits(seen[key], truth[key])]
        assert not wrong, f"seed {seed}: {wrong[:4]}"
        assert tide.engine.violations == [], f"seed {seed}"
        left = tide.stats
        assert (left.host_bytes, left.disk_bytes, tide.engine.num_slots) == (0, 0, 0), f"seed {seed}"
        del tide
    assert _num_owners() == owners_before
    record_property("num_schedules", len(numbers))


def test_the_schedules_are_as_many_as_promised(capsys: pytest.CaptureFixture[str]) -> None:
    num_schedules = SEEDS_A_TEST * len(NAMES) * len(PLANS)
    assert num_schedules >= NUM_SCHEDULES
    with capsys.disabled():
        print(f"\n{num_schedules} schedules: {len(NAMES)} models x {len(PLANS)} plans x {SEEDS_A_TEST} seeds")
