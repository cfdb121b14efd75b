"""Plans that 0.1.0 saved are carried out by this version: fates, recipes and distances as they were, the same bits.

`plans_of_0_1_0` holds what 0.1.0 wrote (commit 06e1f47) for the model below: one that it solved for 76,731 bytes on an
H200's roofline with `swap: ["*.mlp"]`, and one by rules, as it stood after a step.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

FOLDER = Path(__file__).parent / "plans_of_0_1_0"


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, use_cache=False, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).train()


@pytest.mark.filterwarnings("ignore:lowtide. memory.swap:UserWarning")
@pytest.mark.parametrize("name", ["solved", "rules"])
def test_a_plan_of_0_1_0_is_carried_out(name: str) -> None:
    plan = Plan.from_json((FOLDER / f"{name}.json").read_text())
    fates = Counter(site.fate for site in plan.sites)
    assert plan.is_solved == (name == "solved")
    assert fates[Fate.SWAP] and fates[Fate.RECOMPUTE]
    model, ids = llama(), torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    truth = [parameter.grad.clone() for parameter in model.parameters()]
    with lowtide.apply(model, plan, engine=virtual(1)) as tide:
        for _ in range(2):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            assert all(same_bits(p.grad, was) for p, was in zip(model.parameters(), truth, strict=True))
        stats = tide.stats
        assert (stats.num_divergences, stats.num_unknown, tide.failed_recipes) == (0, 0, {})
        assert stats.swapped_bytes == 2 * sum(site.nbytes for site in plan.sites if site.fate is Fate.SWAP)
        assert stats.recomputed_bytes == 2 * sum(site.nbytes for site in plan.sites if site.fate is Fate.RECOMPUTE)
