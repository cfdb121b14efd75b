"""The advice to halve the micro-batch: with a figure that holds, and only where it is a way out."""

from __future__ import annotations

import functools

import pytest
import torch

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.profile import Profile
from lowtide.planner.advice import batch_rows
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling.fake.trace import trace
from lowtide.timeline.hardware import load_hardware
from lowtide.units import parse_bytes

HARDWARE = load_hardware("h100")


@functools.cache
def profile_of(num_rows: int, num_tokens: int = 256, hidden: int = 64) -> Profile:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(num_rows, num_tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    return trace(model, batch, hardware=HARDWARE, optimizer=torch.optim.AdamW(model.parameters()))


def refused(profile: Profile, *, with_suggestions: bool = True, **memory: object) -> lowtide.BudgetError:
    config = load_memory({"budget": 1, "min_bytes": 1, **memory})
    with pytest.raises(lowtide.BudgetError) as caught:
        plan_profile(profile, config, link=HARDWARE.link, with_suggestions=with_suggestions)
    return caught.value


@pytest.mark.parametrize("memory", [{}, {"swap": "none"}])
def test_the_figure_is_what_half_the_batch_needs(memory: dict[str, object]) -> None:
    said = refused(profile_of(8), **memory).suggestions[-1]
    assert said.startswith("half the micro-batch: needs about ")
    needed = parse_bytes(said.removeprefix("half the micro-batch: needs about "))
    assert needed == pytest.approx(refused(profile_of(4), with_suggestions=False, **memory).floor_bytes, rel=0.1)


def test_it_is_no_way_out_of_a_batch_of_one() -> None:
    assert batch_rows(profile_of(1)) == 1
    assert not any("micro-batch" in way for way in refused(profile_of(1)).suggestions)


def test_it_is_no_way_out_where_the_step_of_the_optimizer_is_in_the_way() -> None:
    error = refused(profile_of(2, num_tokens=8, hidden=256))
    assert "set by the step of the optimizer" in str(error)
    assert not any("micro-batch" in way for way in error.suggestions)
