"""The zoo itself: every case trains, and is what it says it is.

That its plain step repeats itself to the bit is in every test that compares with it.
"""

from __future__ import annotations

import pytest
import torch

from lowtide.profiling.layers import find_layers
from tests.support import zoo

CASES = list(zoo.CASES.values())
by_name = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@by_name
def test_every_trained_parameter_gets_a_gradient_and_moves(case: zoo.Case) -> None:
    result = zoo.plain_result(case.name, 3, num_steps=3, accumulate=2)
    assert len(result.loss) == 6
    assert all(torch.isfinite(loss) for loss in result.loss.values())
    model = case.build(3)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    without = {name for name in trained if not any(f"{step}:{name}" in result.grads for step in range(2))}
    assert not without
    still = [name for name, value in trained.items() if zoo.same_bits(result.parameters[f"3:{name}"], value)]
    assert len(still) < len(trained)


def test_other_seed_other_numbers() -> None:
    case = zoo.CASES["mlp"]
    zoo.assert_same(zoo.plain_step(case, 3), zoo.plain_step(case, 3))
    with pytest.raises(AssertionError, match="tensors differ"):
        zoo.assert_same(zoo.plain_step(case, 4), zoo.plain_step(case, 3))


@by_name
def test_layers_and_flags_are_what_the_case_says(case: zoo.Case) -> None:
    model = case.build(3)
    assert find_layers(model) == case.layers
    before = torch.get_rng_state()
    case.loss(model, case.batch(0))
    assert torch.equal(torch.get_rng_state(), before) is not case.draws


@by_name
def test_saved_tensor_count_varies_only_where_the_case_says(case: zoo.Case) -> None:
    counts = set()
    for seed in range(6 if case.varies else 2):
        model, count = case.build(seed), [0]
        with torch.autograd.graph.saved_tensors_hooks(lambda t, count=count: _count(t, count), lambda t: t):
            case.loss(model, case.batch(seed))
        counts.add(count[0])
    assert (len(counts) > 1) is case.varies, counts


def _count(tensor: torch.Tensor, count: list[int]) -> torch.Tensor:
    count[0] += 1
    return tensor


def test_same_bits_sees_what_equality_does_not() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert zoo.same_bits(nan, nan.clone())
    assert not zoo.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not zoo.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert zoo.same_bits(torch.zeros(0), torch.zeros(0))
    assert zoo.same_bits(torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj())


def test_assert_same_names_what_differs() -> None:
    truth = zoo.plain_step(zoo.CASES["mlp"], 3)
    other = zoo.Result(**{**vars(truth), "grads": {key: value + 1 for key, value in truth.grads.items()}})
    with pytest.raises(AssertionError, match=r"6 of \d+ tensors differ: \['grads\[0:0.weight\]'"):
        zoo.assert_same(other, truth)
