"""Budgets kept: random budgets between the floor and plain, over real models, on the host and the virtual engine.

For every one of them: the solver's plan is carried out by the real runtime, the peak that an audit of every live byte
measures is within the budget and close to the prediction, and loss and gradients are plain's to the bit.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.planner.by_rules import problem_of
from lowtide.planner.plan_profile import plan_profile
from lowtide.planner.solve import floor
from lowtide.profiling.observe_call import observe_call
from lowtide.profiling.observe_step import observe
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.timeline.memory import plain_curve
from lowtide.timeline.step import Link
from tests.support import zoo
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

MIN_BYTES = 4096
# Of the tiny steps below, the first link carries a good part in time and the second next to nothing.
LINKS = (
    Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9),
    Link(out_bytes_per_second=2e7, in_bytes_per_second=2e7),
)


@dataclass(frozen=True)
class Subject:
    """A model, and how its loss is made."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]


def tokens(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (2, 64), generator=generator)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def small(**more: object) -> dict[str, object]:
    return {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, **more}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**small(intermediate_size=176, num_key_value_heads=2))
    return LlamaForCausalLM(config).to(torch.bfloat16)


def gpt2_with_dropout() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=4, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **small(intermediate_size=96, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=16,
                num_key_value_heads=2)
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **small(intermediate_size=128, moe_intermediate_size=48, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                topk_group=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
                qk_nope_head_dim=16, v_head_dim=16, num_key_value_heads=4)
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


class ConvNet(nn.Module):
    """Batch statistics, in-place activations, residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)) for _ in range(5)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:  # (N, 3, H, W) -> scalar
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).logsumexp(1).sum()


def images(model: nn.Module) -> Tensor:
    return model(torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2)))


SUBJECTS = {
    "llama_bf16": Subject(llama, tokens),
    "gpt2_dropout": Subject(gpt2_with_dropout, tokens),
    "qwen3_moe": Subject(qwen3_moe, tokens),
    "deepseek_v3": Subject(deepseek_v3, tokens),
    "convnet": Subject(ConvNet, images),
}


def take_step(subject: Subject, model: nn.Module) -> dict[str, Tensor]:
    """One forward and backward from the same random state; loss, gradients and buffers."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = subject.loss(model)
    loss.backward()
    result = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {**result, **{name: buffer.clone() for name, buffer in model.named_buffers()}, "loss": loss.detach().clone()}


def restore(model: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(state[name])


@pytest.mark.slow
@pytest.mark.parametrize("num_budgets", one_of(2, [1, 2]))
@pytest.mark.parametrize("name", one_of(2, SUBJECTS))
def test_random_budgets_are_kept(name: str, num_budgets: int) -> None:
    subject = SUBJECTS[name]
    torch.manual_seed(3)
    model = subject.make().train()
    start = {key: buffer.clone() for key, buffer in model.named_buffers()}
    torch.manual_seed(7)
    profile = observe(model, lambda: subject.loss(model))
    truth = take_step(subject, model)
    draw = random.Random(f"budgets of {name}")
    errors = []
    for number, link in enumerate(LINKS):
        problem = problem_of(profile, load_memory({"budget": 1, "min_bytes": MIN_BYTES}))
        floor_bytes, plain_bytes = floor(problem.step)[0], int(plain_curve(problem.step).max())
        assert floor_bytes < plain_bytes
        for index in range(num_budgets):
            budget = draw.randint(floor_bytes, plain_bytes)
            plan = plan_profile(
                profile, load_memory({"budget": budget, "min_bytes": MIN_BYTES}), link=link, time_limit_seconds=0.2
            )
            assert plan.predicted is not None
            # Each link with an engine of its own; of two budgets, with both.
            engine = "host" if (number + index) % 2 else virtual(index)
            restore(model, start)
            peak_bytes, result = run_plan(subject, model, plan, engine, start)
            where = f"{name}, {engine}, budget {budget} of {floor_bytes} to {plain_bytes}"
            assert result.keys() == truth.keys()
            wrong = [key for key in truth if not same_bits(result[key], truth[key])]
            assert not wrong, f"{where}: {wrong[:4]} differ"
            assert peak_bytes <= budget, f"{where}: peak {peak_bytes}, predicted {plan.predicted.peak_bytes}"
            errors.append(abs(plan.predicted.peak_bytes - peak_bytes) / peak_bytes)
    print(f"{name}: {len(errors)} runs, median error {statistics.median(errors):.3%}, worst {max(errors):.3%}")
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.05


def run_plan(
    subject: Subject, model: nn.Module, plan: lowtide.Plan, engine: Any, start: dict[str, Tensor]
) -> tuple[int, dict[str, Tensor]]:
    """The audited peak of a planned step, and what a planned step leaves behind."""
    with lowtide.apply(model, plan, engine=engine) as tide:
        take_step(subject, model)  # recorded
        tide.reset_stats()
        restore(model, start)
        result = take_step(subject, model)
        restore(model, start)
        model.zero_grad(set_to_none=True)
        tide.settle()
        with tide.audit() as audit:
            torch.manual_seed(7)
            subject.loss(model).backward()
        assert tide.stats.num_divergences == 0
        if engine != "host":
            assert tide.engine.violations == []
        return audit.peak_bytes, result


@pytest.mark.parametrize(
    "name", one_of(2, ["llama_bf16", "tied", "gpt2_dropout", "deepseek_v3", "lora_autocast", "unet"])
)
def test_the_peak_is_exact_when_gradients_accumulate(name: str) -> None:
    """A new gradient lives beside the older one until autograd has added it, which is not at once."""
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    profile = observe(model, lambda: case.loss(model, batch))
    memory = load_memory({"budget": "1TiB", "min_bytes": 1})
    for has_gradients in (False, True):
        with LiveBytes(model=model) as live:
            case.loss(model, batch).backward()
        predicted = plan_profile(profile, memory, link=LINKS[0], has_gradients=has_gradients).predicted
        assert predicted is not None
        assert predicted.plain_peak_bytes == live.peak_bytes


@pytest.mark.parametrize("is_frozen", [False, True])
def test_casts_that_autocast_remembers_are_in_the_prediction(is_frozen: bool) -> None:
    """Autograd saves neither the first layer's weight, since its input needs no gradient, nor any bias. Of parameters
    that are not trained autocast remembers nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    if is_frozen:
        model.requires_grad_(False)
        model[0].bias.requires_grad_()
    x = torch.randn(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        profile = observe_call(model, (x,), {}, None)
        torch.set_autocast_cache_enabled(False)
        without = observe_call(model, (x,), {}, None)
        torch.set_autocast_cache_enabled(True)
    last = next(index for index, name in enumerate(profile.op_names) if name.startswith("3.addmm"))
    # Without a cache the last layer's own bias is there too while it is added.
    casts_bytes = 2 * 64 if is_frozen else 2 * (64 * 64 + 3 * 64)
    assert profile.op_bytes[last] - without.op_bytes[last] == casts_bytes
