"""A micro-batch that runs out of memory, wherever that happens, leaves what a micro-batch leaves that never did.

Memory runs out at an operator (a dispatch mode raises once, before the operator runs): for one small model (nine in
`make test-extended`) at every operator of the micro-batch in turn; for every fourth other pair of a model and a plan
(in `make test-extended` for all) at 4 operators, drawn with a fixed seed. And in every call to the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from tests.support import zoo
from tests.support.failing import Failing
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import VirtualEngine

SEED = 5
KEEP = {"swap": "none", "min_bytes": 0}
SWAP = {"swap": "all", "min_bytes": 0}
RECOMPUTE = {"recompute": "all", "min_bytes": 0}

pytestmark = pytest.mark.filterwarnings("ignore:lowtide. out of memory:UserWarning")


class Step:
    """Two micro-batches under a tide, the second of which may run out of memory, and what they leave."""

    def __init__(self, case: zoo.Case, memory: dict, *, engine: Any, observed: bool = False) -> None:
        self.case = case
        self.model = case.build(SEED)
        self.observed = observed
        self.weights = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.memory = memory
        self.engine = engine
        self.num_retries = 0

    def run(self, mode: TorchDispatchMode) -> dict[str, Tensor]:
        case, model = self.case, self.model
        model.load_state_dict(self.weights)
        model.zero_grad(set_to_none=True)
        batches = [case.batch(10 + number) for number in range(3)]
        engine = VirtualEngine(SEED) if self.engine is None else self.engine
        with lowtide.apply(model, self.memory, engine=engine) as tide:
            torch.manual_seed(SEED)
            # Micro-batch 0 observes, unless the one that fails is to be the observed one.
            for number in range(1 if self.observed else 0, 2):
                with mode if number == 1 else Failing():
                    loss = tide.step(lambda n=number: self.micro_batch(batches[n]))
            seen = {"loss": loss, "random": torch.get_rng_state()}
            seen |= {f"grad:{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
            seen |= {f"buffer:{name}": b.clone() for name, b in model.named_buffers()}
            tide.settle()
            assert (tide._scheduler.num_open(), tide._scheduler.ledger.now_bytes) == (0, 0)
            assert (tide.stats.host_bytes, tide.stats.disk_bytes) == (0, 0)
            if isinstance(engine, VirtualEngine):
                assert engine.violations == []
            self.num_retries = tide.stats.num_retries
            self.stats = tide.stats
        return seen

    def micro_batch(self, batch: dict[str, Tensor]) -> Tensor:
        loss = self.case.loss(self.model, batch)
        (loss / 2).backward()
        return loss.detach()


def assert_same(seen: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    assert seen.keys() == truth.keys()
    wrong = [key for key in truth if not zoo.same_bits(seen[key], truth[key])]
    assert not wrong, wrong[:5]


# Dropout, batch norm, experts, views, tied weights, sparse gradients...
NAMES = (
    "mlp", "tied", "unet", "gpt2_dropout", "qwen3_moe_eager", "shared_layer", "lora_autocast", "custom_function",
    "stateful", "draws", "inplace_input", "nested", "checkpointed", "transformer_encoder", "llama",
)  # fmt: skip
PLANS = ("keep", "swap", "recompute", "mixed")
EVERYWHERE = [("nested", "mixed")]
EVERYWHERE_EXTENDED = [
    ("mlp", "recompute"), ("tied", "swap"),
    ("unet", "swap"), ("custom_function", "recompute"), ("stateful", "keep"), ("inplace_input", "mixed"),
    ("shared_layer", "mixed"), ("draws", "mixed"),
]  # fmt: skip
NUM_SOME = 4
QUICK = ("mlp", "unet", "gpt2_dropout", "stateful", "tied", "checkpointed")
QUICK_PLANS = ("swap", "recompute")
SOME = [
    (name, plan)
    for name in NAMES
    for plan in PLANS
    if (name, plan) not in EVERYWHERE + EVERYWHERE_EXTENDED and not (name in QUICK and plan in QUICK_PLANS)
]


def _plans(case: zoo.Case) -> dict[str, dict]:
    return {
        "keep": KEEP,
        "swap": SWAP,
        "recompute": RECOMPUTE,
        "mixed": dict(case.mixed_plans[0] if case.mixed_plans else SWAP),
    }


def _fail(case: zoo.Case, memory: dict, *, num_places: int | None, observed: bool = False) -> int:
    """Fails at so many operators of the micro-batch, drawn with a fixed seed, or at each of them."""
    step = Step(case, memory, engine=None, observed=observed)
    counting = Failing()
    truth = step.run(counting)
    plain_stats = step.stats
    assert plain_stats.num_retries == 0
    numbers = range(counting.num_ops)
    if num_places is not None:
        numbers = Random(SEED).sample(numbers, min(num_places, len(numbers)))
    for number in numbers:
        mode = Failing(number)
        try:
            assert_same(step.run(mode), truth)
        except BaseException as error:
            error.add_note(f"operator {number} of {counting.num_ops}")
            raise
        assert (mode.num_raised, step.stats.num_retries) == (1, 1)
        assert step.stats.num_forwards == plain_stats.num_forwards
    return len(numbers)


@pytest.mark.parametrize(("name", "plan"), in_turn(2, QUICK, QUICK_PLANS))
def test_out_of_memory_at_some_operators_changes_no_bit(name: str, plan: str) -> None:
    _fail(zoo.CASES[name], _plans(zoo.CASES[name])[plan], num_places=NUM_SOME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"), [*EVERYWHERE, *(pytest.param(*pair, marks=pytest.mark.extended) for pair in EVERYWHERE_EXTENDED)]
)
def test_out_of_memory_at_every_operator_changes_no_bit(
    name: str, plan: str, record_property: Callable[[str, int], None]
) -> None:
    """Small models, each under one plan."""
    memory = _plans(zoo.CASES[name])[plan]
    record_property("num_operators", _fail(zoo.CASES[name], memory, num_places=None))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [*one_of(16, SOME), *one_of(8, EVERYWHERE_EXTENDED)])
def test_out_of_memory_at_a_sample_of_operators_changes_no_bit(name: str, plan: str) -> None:
    """Of the other pairs of a model and a plan every 16th: 4 operators of each."""
    _fail(zoo.CASES[name], _plans(zoo.CASES[name])[plan], num_places=NUM_SOME)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), in_turn(3, QUICK, ("swap", "recompute", "mixed")))
def test_out_of_memory_in_the_observed_step_changes_no_bit(name: str, plan: str) -> None:
    _fail(zoo.CASES[name], _plans(zoo.CASES[name])[plan], num_places=NUM_SOME, observed=True)


# -- the engine --------------------------------------------------------------------------------------------------------


class Tight(VirtualEngine):
    """Runs out of memory in the n-th of some calls, and in those after it."""

    def __init__(self, name: str, at: int, num_failures: int = 1) -> None:
        super().__init__(SEED)
        self.left = at + 1
        self.num_failures = num_failures
        self.failing = name

    def _count(self, name: str) -> None:
        if name == self.failing:
            self.left -= 1
            if -self.num_failures < self.left <= 0:
                raise MemoryError

    def allocate(self, nbytes: int, tier: str) -> Any:
        self._count("allocate")
        return super().allocate(nbytes, tier)

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        self._count("new_buffer")
        return super().new_buffer(nbytes, device)

    def copy_out(self, source: torch.UntypedStorage, slot: Any) -> None:
        self._count("copy_out")
        super().copy_out(source, slot)

    def copy_in(self, slot: Any, target: torch.UntypedStorage) -> None:
        self._count("copy_in")
        super().copy_in(slot, target)


@pytest.mark.parametrize(
    ("name", "call"), in_turn(2, ["mlp", "tied"], ["allocate", "new_buffer", "copy_out", "copy_in"])
)
def test_out_of_memory_in_the_engine_changes_no_bit(name: str, call: str) -> None:
    truth = Step(zoo.CASES[name], SWAP, engine=None).run(Failing())
    num_failed = num_retries = 0
    # A fetch tries twice.
    num_failures = 2 if call in ("new_buffer", "copy_in") else 1
    while True:
        step = Step(zoo.CASES[name], SWAP, engine=Tight(call, num_failed, num_failures))
        assert_same(step.run(Failing()), truth)
        if step.engine.left > 0:
            break
        # A fetch gives up what was fetched ahead, and tries again: then nothing has to be run again.
        assert step.stats.num_retries == 1 or call in ("new_buffer", "copy_in")
        num_retries += step.stats.num_retries
        num_failed += 1
    assert num_failed > 0
    assert num_retries > 0


def test_a_fetch_that_could_not_start_is_not_mistaken_for_one_that_ran() -> None:
    """Without `tide.step`: the graph is retained, the error caught, and backward run again."""
    case = zoo.CASES["mlp"]
    model, twin = case.build(SEED), case.build(SEED)
    torch.manual_seed(1)
    case.loss(twin, case.batch(1)).backward()
    with lowtide.apply(model, SWAP, engine=Tight("copy_in", 10**6, num_failures=10**6)) as tide:
        case.loss(model, case.batch(0)).backward()
        model.zero_grad(set_to_none=True)
        tide.engine.left = 1
        torch.manual_seed(1)
        loss = case.loss(model, case.batch(1))
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        model.zero_grad(set_to_none=True)
        tide.engine.left = 10**6
        loss.backward()
    assert all(zoo.same_bits(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
