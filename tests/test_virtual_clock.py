"""Predicted and real step times in the same order, on a clock that repeats itself.

The real runtime runs a real model on the clocked engine, where every operator takes its roofline time and every copy
its share of the link; the timeline predicts the same step from a trace. Random plans of very different cost are ranked
by both.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from scipy.stats import kendalltau
from torch import nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.planner.by_rules import problem_of
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.problem import decisions
from lowtide.profiling.fake.trace import trace
from lowtide.timeline.events import run
from lowtide.timeline.memory import plain_curve
from tests.engines.clocked import ClockedEngine, ClockMode
from tests.engines.roofline_clock import HARDWARE, LINK, seconds_of

MIN_BYTES = 4096
NUM_PLANS = 12


def make_model(name: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if name == "gpt2":
        config = GPT2Config(vocab_size=64, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=0,
                            eos_token_id=0, use_cache=False)  # fmt: skip
        return GPT2LMHeadModel(config).train()
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=176, num_hidden_layers=4,
                         num_attention_heads=4, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config).train()


def random_plans(profile: Profile, seed: int) -> list[Plan]:
    """Plans of any kind: random shares of fates, scheduled by the timeline for a random budget; and solved ones."""
    draw = random.Random(seed)
    problem = problem_of(profile, load_memory({"budget": 1, "min_bytes": MIN_BYTES}))
    plain_bytes = int(plain_curve(problem.step).max())
    solved = plan_profile(
        profile, load_memory({"budget": plain_bytes, "min_bytes": MIN_BYTES}), link=LINK
    )  # for everything but the sites
    assert solved.predicted is not None
    plans = []
    for _ in range(NUM_PLANS):
        share_kept, share_swapped = draw.random(), draw.random()
        fates = []
        for item in problem.step.items:
            wanted = Fate.SWAP if draw.random() < share_swapped else Fate.RECOMPUTE
            wanted = Fate.KEEP if draw.random() < share_kept else wanted
            fates.append(wanted if wanted in item.fates else Fate.KEEP)
        # The least that these fates can reach with all the waiting in the world is a budget that can be kept.
        least = run(problem.step, fates, LINK, budget_bytes=0).peak_bytes
        budget = least + int((plain_bytes - least) * draw.random())
        timeline = run(problem.step, fates, LINK, budget_bytes=budget)
        sites = decisions(
            problem, fates, timeline.evict_by, timeline.prefetch_at, dict.fromkeys(range(len(fates)), "random")
        )
        predicted = dataclasses.replace(
            solved.predicted, step_seconds=timeline.step_seconds, peak_bytes=timeline.peak_bytes
        )
        plans.append(dataclasses.replace(solved, sites=sites, predicted=predicted))
    return plans


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.extended), "gpt2"])
def test_plans_rank_as_predicted(name: str) -> None:
    model = make_model(name)
    ids = torch.randint(64, (2, 64), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    profile = trace(model, batch, hardware=HARDWARE)
    predicted, measured, errors = [], [], []
    for plan in random_plans(profile, seed=11):
        engine = ClockedEngine(
            out_bytes_per_second=LINK.out_bytes_per_second,
            in_bytes_per_second=LINK.in_bytes_per_second,
            latency_seconds=LINK.latency_seconds,
        )
        with lowtide.apply(model, plan, engine=engine) as tide:
            model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
            tide.settle()
            start = engine.clock.now
            with ClockMode(engine.clock, seconds_of):
                model(**batch).loss.backward()
            model.zero_grad(set_to_none=True)
        assert plan.predicted is not None
        predicted.append(plan.predicted.step_seconds)
        measured.append(engine.clock.now - start)
        errors.append(abs(predicted[-1] / measured[-1] - 1))
    tau = kendalltau(predicted, measured).statistic
    spread = max(measured) / min(measured)
    median = sorted(errors)[len(errors) // 2]
    print(f"{name}: Kendall tau {tau:.3f}, errors {median:.2%} median, {max(errors):.2%} worst, spread {spread:.2f}")
    assert spread > 1.1
    assert tau >= 0.9
