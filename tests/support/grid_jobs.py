"""What the ranks of tests/pipeline/test_grid.py do: models of transformers under every schedule and every fate, beside
one process."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config

from lowtide.config.run import SCHEDULES
from lowtide.pipeline.cut_model import cut, loss_of
from lowtide.pipeline.generators import GENERATORS, make_schedule
from lowtide.pipeline.gradients import find_ties
from lowtide.pipeline.schedule import layers_of_stages
from tests.pipeline.test_cut_model import CONFIGS, SMALL
from tests.support.shared_jobs import compared, shared

NUM_STEPS = 2
CUT = {"llama": False, "llama, tied": True, "qwen3_moe": True, "deepseek_v3": False}
"""Models that `cut` takes, and whether their embeddings are tied here."""
MODELS = (*CUT, "gpt2", "gemma")
FATES = ("keep", "recompute", "swap", "budget")


class GPT2Part(nn.Module):
    """Some blocks of a GPT-2, whose embedding is tied to its head."""

    def __init__(self, model: Any, own: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        inner = model.transformer
        self.wte, self.wpe = (inner.wte, inner.wpe) if is_first else (None, None)
        self.h = nn.ModuleList(inner.h[number] for number in own)
        self.ln_f, self.lm_head = (inner.ln_f, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h:
            made = block(x)
            x = made if isinstance(made, Tensor) else made[0]
        return x if self.lm_head is None else self.lm_head(self.ln_f(x))


class GemmaPart(nn.Module):
    """Some layers of a Gemma, whose embedding scales, and is tied to its head."""

    def __init__(self, model: Any, own: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        inner = model.model
        self.embed_tokens = inner.embed_tokens if is_first else None
        self.layers = nn.ModuleList(inner.layers[number] for number in own)
        self.rotary = inner.rotary_emb
        self.norm, self.lm_head = (inner.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        around = self.rotary(x, places)
        for layer in self.layers:
            made = layer(x, position_embeddings=around, position_ids=places)
            x = made if isinstance(made, Tensor) else made[0]
        return x if self.lm_head is None else self.lm_head(self.norm(x))


OWN: dict[str, tuple[Any, Any]] = {
    "gpt2": (
        lambda: GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
        ),
        GPT2Part,
    ),
    "gemma": (lambda: GemmaConfig(**SMALL, head_dim=8, tie_word_embeddings=True),
              GemmaPart),
}  # fmt: skip
"""Models that `cut` refuses, in stages of one's own."""


def model_of(kind: str, num_layers: int) -> Any:
    config = OWN[kind][0]() if kind in OWN else CONFIGS[kind]()
    config.num_hidden_layers, config.tie_word_embeddings = num_layers, CUT.get(kind, True)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def stages_of(kind: str, num_stages: int, num_layers: int) -> list[nn.Module]:
    model, layers = model_of(kind, num_layers), layers_of_stages(num_layers, num_stages)
    if kind not in OWN:
        return list(cut(model, layers))
    part, last = OWN[kind][1], num_stages - 1
    return [part(model, own, is_first=number == 0, is_last=number == last) for number, own in enumerate(layers)]


@functools.cache
def texts_of(step: int, num_micro_batches: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 64, (2, 6 + number % 3), generator=generator) for number in range(num_micro_batches)]


def ran(rank: int, kind: str, name: str, fate: str) -> list[str]:
    """What differs from one process in losses, norms, gradients and weights of two steps with clipping."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    number = max(2 * num_ranks, 4)  # the fewest that every schedule takes
    num_stages = make_schedule(name, num_ranks=num_ranks, num_micro_batches=number).num_stages
    stages = stages_of(kind, num_stages, 2 * num_ranks)
    batches = [(texts_of(step, number), texts_of(step, number)) for step in range(NUM_STEPS)]
    return compared(rank, stages, loss_of, name, batches, tied=find_ties(stages), fate=fate)


def three_share(rank: int) -> list[str]:
    """What differs where three of four ranks have one weight, which each sends to two others."""
    return shared(rank, "a weight", "1f1b")[1]


def names_of(num_ranks: int) -> list[str]:
    """The schedules for so many ranks."""
    return [name for name in GENERATORS if SCHEDULES[name].is_for_one_rank == (num_ranks == 1)]
