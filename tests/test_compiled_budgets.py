"""Budgets for models with compiled layers: the bits of the same compiled model without lowtide, the predicted peak, and
nothing compiled for lowtide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lowtide
from lowtide.tensors.private import num_compiled_graphs
from tests.compiled_models import WIDTH, assert_same, build, train

ROWS = (64, 64, 64)
HABITS: dict[str, Any] = {"habits": ("", "breaks", "writes", ""), "which": (0, 1, 2)}


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _frames() -> tuple[int, int]:
    return torch._dynamo.utils.counters["frames"]["total"], num_compiled_graphs()


@pytest.mark.parametrize("rules", [{}, {"swap": "none"}], ids=["swap", "recompute"])
def test_a_budget_holds_to_the_byte_and_changes_no_bit(rules: dict[str, Any]) -> None:
    truth = train(build(**HABITS), ROWS)
    before = _frames()
    for budget in ("1MiB", "150KiB", "130KiB"):
        model = build(**HABITS)
        memory = {"min_bytes": 1, "race": False, **rules}
        with lowtide.optimize(model, budget=budget, memory=memory, engine="virtual:1") as tide:
            assert_same(train(model, ROWS), truth)
            assert tide.plan is not None and tide.stats is not None and tide.tide is not None
            with tide.tide.audit() as audit:
                train(model, ROWS[:1])
            assert audit.peak_bytes <= tide.plan.predicted.peak_bytes
            moved = tide.stats.recomputed_bytes if rules else tide.stats.swapped_bytes
            assert bool(moved) == (budget != "1MiB")
            assert (tide.stats.num_unplanned, tide.stats.num_divergences, tide.stats.num_spills) == (0, 0, 0)
    assert _frames() == before


def test_what_is_observed_of_a_compiled_layer() -> None:
    model = build(which=(0, 1), habits=("", "", ""))
    model(torch.ones(64, WIDTH)).backward()
    before = _frames(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    profile = lowtide.observe(model, (torch.ones(64, WIDTH),))
    assert _frames() == before[0]
    assert_same([parameter.grad for parameter in model.parameters() if parameter.grad is not None], before[1])
    assert profile.layers == ("layers.0", "layers.1", "layers.2")
    inside = [node for node in profile.nodes if node.layer == "layers.0"]
    assert {node.op for node in inside} == {"compiled"}
    assert {node.recipe for node in inside} == {None}
    # Every node is there from its one operator on, and read by one operator of the backward pass.
    assert len({node.born for node in inside}) == 1
    assert len({node.reads for node in inside if node.name != "layers.0.compiled_6"}) == 1
    names = list(profile.op_names)
    assert names.count("layers.0.compiled_6") == names.count("layers.0.compiled_6:backward") == 1
    assert profile.signatures[0] == profile.signatures[1]
    assert not profile.calls[0].why_not


@pytest.mark.slow
def test_inductor_layers_under_a_budget(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small layer: a compiler is needed, and seconds."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    how: dict[str, Any] = {"habits": ("", ""), "which": (0,), "backend": "inductor"}
    truth = train(build(**how), ROWS)
    before = _frames()
    for rules in ({}, {"swap": "none"}):
        model = build(**how)
        memory = {"min_bytes": 1, "race": False, **rules}
        with lowtide.optimize(model, budget="80KiB", memory=memory, engine="virtual:1") as tide:
            assert_same(train(model, ROWS), truth)
            assert tide.stats is not None
            assert tide.stats.recomputed_bytes if rules else tide.stats.swapped_bytes
    assert _frames() == before
