"""Programs: what a recipe says is what runs, below autograd and autocast, and nothing is held too long."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.core.recipe import Geometry, Recipe, RecipeInput, RecipeStep
from lowtide.errors import ConfigError
from lowtide.recipes.execute import CompiledRecipe

CPU = torch.device("cpu")


def recipe(*steps: RecipeStep, num_inputs: int = 1, output: int = 0) -> Recipe:
    geometry = Geometry(size=(4,), stride=(1,), offset=0, dtype="float32")
    inputs = tuple(RecipeInput(kind="node", name=f"node{i}", geometry=geometry) for i in range(num_inputs))
    return Recipe(
        inputs=inputs, steps=steps, output=output, seconds=0.0, transient_bytes=0
    )  # fmt: skip


def step(op: str, *args: Any, **kwargs: Any) -> RecipeStep:
    return RecipeStep(op=op, args=args, kwargs=kwargs)


def made(index: int, output: int = 0) -> dict[str, int]:
    return {"step": index, "output": output}


def test_constants_lists_and_outputs() -> None:
    program = CompiledRecipe(
        recipe(
            step("aten.full.default", [4], {"float": "-inf"}, dtype={"dtype": "float32"}, device={"device": "cuda"}),
            step("aten.maximum.default", made(0), {"input": 0}),
            step("aten.sort.default", made(1), -1),
            step("aten.cat.default", [made(2), {"input": 1}, made(2, 1)]),
            step("aten.clone.default", made(3), memory_format={"memory_format": "contiguous_format"}),
            num_inputs=2,
        )
    )
    x, y = torch.tensor([3.0, 1.0, 2.0, 4.0]), torch.zeros(1)
    result = program.run([x, y], CPU)
    assert result.tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 0.0, 3.0]
    assert program.run([x, y], CPU).tolist() == result.tolist()


def test_an_output_of_several_is_the_result() -> None:
    program = CompiledRecipe(recipe(step("aten.sort.default", {"input": 0}), output=1))
    assert program.run([torch.tensor([2.0, 1.0])], CPU).tolist() == [1, 0]


def test_writes_in_place_leave_the_inputs_alone() -> None:
    x = torch.ones(4)
    steps = (
        step("aten.clone.default", {"input": 0}),
        step("aten.mul_.Tensor", made(0), 3),
        step("aten.exp_.default", made(1)),
    )
    result = CompiledRecipe(recipe(*steps)).run([x], CPU)
    assert torch.equal(result, torch.full((4,), 3.0).exp())
    assert torch.equal(x, torch.ones(4))
    assert x._version == 0


def test_nothing_is_saved_and_nothing_is_cast() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4, requires_grad=True).exp()
    program = CompiledRecipe(recipe(step("aten.mm.default", {"input": 0}, {"input": 1}), num_inputs=2))
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        result = program.run([x, weight], CPU)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
    assert result.dtype is torch.float32
    assert result.grad_fn is None
    assert torch.equal(result, (x @ weight).detach())


def test_intermediate_results_go_with_their_last_reader() -> None:
    alive: list[int] = []
    refs: list[weakref.ref] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            alive.append(sum(ref() is not None for ref in refs))
            out = func(*args, **(kwargs or {}))
            refs.append(weakref.ref(out.untyped_storage()))
            return out

    steps = [step("aten.exp.default", {"input": 0}), *(step("aten.sin.default", made(i)) for i in range(6))]
    program = CompiledRecipe(recipe(*steps))
    x = torch.ones(4)
    with Watch():
        program.run([x], CPU)
    assert alive == [0, 1, 1, 1, 1, 1, 1]


def test_the_inputs_are_not_held() -> None:
    x = torch.ones(4)
    ref = weakref.ref(x)
    program = CompiledRecipe(recipe(step("aten.exp.default", {"input": 0})))
    program.run([x], CPU)
    del x
    assert ref() is None


@pytest.mark.parametrize("op", ["aten.no_such_thing.default", "aten.mul.NoSuchOverload", "nowhere.mul.Tensor"])
def test_an_operator_that_does_not_exist(op: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompiledRecipe(recipe(step(op, {"input": 0})))
    assert str(caught.value) == (
        f"recipe: this torch ({torch.__version__}) has no operator '{op}'; "
        "profile the model again with the torch that trains it"
    )


def test_a_step_costs_a_few_python_calls() -> None:
    """Beside the operator itself: microseconds, on whatever machine."""
    steps = [step("aten.neg.default", {"input": 0}), *(step("aten.neg.default", made(i)) for i in range(99))]
    program = CompiledRecipe(recipe(*steps))
    x, calls = torch.ones(1), []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        program.run([x], CPU)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 6 * 100


def test_operators_run_with_gradients_on_as_they_ran_and_record_nothing() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            seen.append(torch.is_grad_enabled())
            return func(*args, **(kwargs or {}))

    program = CompiledRecipe(recipe(step("aten.exp.default", {"input": 0})))
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad(), Watch():
        result = program.run([x], CPU)
    assert seen == [True]
    assert result.grad_fn is None
    assert not result.requires_grad


def test_an_operator_that_gives_nothing_is_an_error() -> None:
    ones = [torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 1)]
    given = [{"input": 0}, {"input": 1}, {"input": 2}, [1], [1], [0], [1], False, [0], 1, [True, False, False]]
    program = CompiledRecipe(recipe(step("aten.convolution_backward.default", *given), num_inputs=3, output=1))
    with pytest.raises(RuntimeError, match=r"^lowtide: an operator of a recipe gave no tensor where it gave one"):
        program.run(ones, CPU)
