"""Budgets for models with compiled layers: the bits of the same compiled model without lowtide, the predicted peak, and
nothing compiled for lowtide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lowtide
from tests.support.compiled_models import WIDTH, assert_same, build, num_frames, train
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual

ROWS = (64, 64, 64)
HABITS: dict[str, Any] = {"habits": ("", "breaks", "writes", "", ""), "which": (0, 1, 2)}


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("rules", [{}, {"swap": "none"}], ids=["swap", "recompute"])
def test_a_budget_holds_to_the_byte_and_changes_no_bit(rules: dict[str, Any]) -> None:
    truth = train(build(**HABITS), ROWS)
    before = num_frames()
    for budget in ("1MiB", "180KiB", "150KiB"):
        model = build(**HABITS)
        memory = {"min_bytes": 1, **rules}
        with lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(1)) as tide:
            assert_same(train(model, ROWS), truth)
            assert tide.plan is not None and tide.stats is not None and tide.tide is not None
            with tide.tide.audit() as audit:
                train(model, ROWS[:1])
            assert audit.peak_bytes <= tide.plan.predicted.peak_bytes
            moved = tide.stats.recomputed_bytes if rules else tide.stats.swapped_bytes
            assert bool(moved) == (budget != "1MiB")
            assert (tide.stats.num_unknown, tide.stats.num_divergences, tide.stats.num_spills) == (0, 0, 0)
    assert num_frames() == before


def test_what_is_observed_of_a_compiled_layer() -> None:
    model = build(which=(0, 1), habits=("", "", ""))
    model(torch.ones(64, WIDTH)).backward()
    before = num_frames(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    profile = lowtide.observe(model, (torch.ones(64, WIDTH),))
    assert num_frames() == before[0]
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
@pytest.mark.parametrize("rules", one_of(2, [{}, {"swap": "none"}]))
def test_inductor_layers_under_a_budget(rules: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small layer: a compiler is needed, and seconds. Not its search for the widest vectors, which compiles a
    program for each width, nor its pool of processes, nor code that is fast."""
    from torch._inductor import config, cpu_vec_isa

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    monkeypatch.setattr(config, "compile_threads", 1)
    how: dict[str, Any] = {"habits": ("", ""), "which": (0,), "backend": "inductor"}
    truth = train(build(**how), ROWS)
    before = num_frames()
    model = build(**how)
    memory = {"min_bytes": 1, **rules}
    with lowtide.optimize(model, budget="80KiB", memory=memory, engine=virtual(1)) as tide:
        assert_same(train(model, ROWS), truth)
        assert tide.stats is not None
        assert tide.stats.recomputed_bytes if rules else tide.stats.swapped_bytes
    assert num_frames() == before


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, vocab_size=64, use_cache=False
    )
    return LlamaForCausalLM(config), "model.layers"


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=64, n_positions=32, use_cache=False)
    return GPT2LMHeadModel(config), "transformer.h"


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config), "model.layers"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [*(pytest.param(make, marks=pytest.mark.extended) for make in (_llama, _qwen3_moe)), _gpt2]
)
def test_models_of_transformers_of_which_two_layers_are_compiled(make: Any) -> None:
    def compiled() -> Any:
        torch.manual_seed(0)
        model, layers = make()
        for index in (0, 2):
            model.get_submodule(f"{layers}.{index}").compile(backend="aot_eager")
        return model.train()

    def steps(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = []
        for seed in range(2):
            tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
            losses.append(model(input_ids=tokens, labels=tokens).loss)
            losses[-1].backward()
        return [*losses, *(p.grad for p in model.parameters() if p.grad is not None), torch.get_rng_state()]

    truth = steps(compiled())
    before = num_frames()
    for rules in ({"swap": "all", "min_bytes": 0}, {"recompute": "all"}):
        model = compiled()
        with lowtide.apply(model, rules, engine=virtual(2)) as tide:
            assert_same(steps(model), truth)
            assert tide.stats.swapped_bytes or tide.stats.recomputed_bytes
    whole_bytes = 0
    for share in (1.0, 0.8):
        model = compiled()
        budget: Any = int(share * whole_bytes) if whole_bytes else "1GiB"
        memory = {"min_bytes": 1}
        with lowtide.optimize(model, budget=budget, memory=memory, engine=virtual(2)) as tide:
            assert_same(steps(model), truth)
            assert tide.plan is not None and tide.stats is not None
            assert bool(tide.stats.swapped_bytes) == bool(whole_bytes)
            assert (tide.stats.num_unknown, tide.stats.num_divergences, tide.stats.num_spills) == (0, 0, 0)
            whole_bytes = tide.plan.predicted.peak_bytes
    assert num_frames() == before
