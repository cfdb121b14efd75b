"""One rank of a pipeline of two: the sections on each stage, torch's schedules, and gradients compared to the bit."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.mindformers.schema import Sections
from tests.support.virtual_engine import virtual

NUM_LAYERS, NUM_STAGES, TOKENS, WIDTH, VOCABULARY, NUM_MICRO_BATCHES, NUM_STEPS = 8, 2, 8, 16, 16, 4, 2
Config = dict[str, Any]


def op_swap(*entries: tuple[str, int, Any]) -> Config:
    listed = [{"op_name": name, "backward_prefetch": prefetch, "layers": layers} for name, prefetch, layers in entries]
    return {"swap": True, "op_swap": listed}


CONFIGS: dict[str, Config] = {
    "counts per stage": {"recompute_config": {"recompute": [1, 2]}},
    "a table": {
        "recompute_config": {"recompute": [[0, 2]], "select_recompute": {r"feed_forward\.mul": [[3, 1]]}},
    },
    "a table for chunks": {
        "recompute_config": {"recompute": [[1, 0], [0, 2]], "select_recompute": [3, 1]},
    },
    "swap everything": {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": True}]},
    },
    "mixed": {
        "recompute_config": {"recompute": [2, 4], "select_recompute": {"feed_forward": [0, 5]}},
        "swap_config": op_swap(("attention", 20, True), ("feed_forward", 3, [1, 3, 6])),
    },
    "across the seam": {
        "recompute_config": {"recompute": [0, 4], "select_recompute": {r"attention_norm\.norm": [2, 6]}},
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 50, "layers": [1, 3, 5, 7]}]},
    },
}


class Stage(nn.Module):
    """Some layers of a Llama, under the numbers 0, 1, ... or, `numbered`, under those of the whole model."""

    def __init__(self, whole: LlamaForCausalLM, held: range, *, numbered: bool) -> None:
        super().__init__()
        layers = {str(index): whole.model.layers[index] for index in held}
        self.embed = whole.model.embed_tokens if held.start == 0 else None
        self.layers = nn.ModuleDict(layers) if numbered else nn.ModuleList(layers.values())
        self.rotary = whole.model.rotary_emb
        self.head = nn.Sequential(whole.model.norm, whole.lm_head) if held.stop == NUM_LAYERS else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x if self.embed is None else self.embed(x)
        rotation = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            hidden = layer(hidden, position_embeddings=rotation)
        return hidden if self.head is None else self.head(hidden)


def stages_of(rank: int, num_chunks: int, *, numbered: bool) -> dict[int, Stage]:
    """First layer -> the stage, for all chunks of a rank."""
    torch.manual_seed(0)
    whole = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
    ).train()
    size = NUM_LAYERS // (NUM_STAGES * num_chunks)
    starts = [(chunk * NUM_STAGES + rank) * size for chunk in range(num_chunks)]
    return {start: Stage(whole, range(start, start + size), numbered=numbered) for start in starts}


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(stages: dict[int, Stage], rank: int, schedule: type) -> list[torch.Tensor]:
    """Losses and gradients of a few steps."""
    size = NUM_LAYERS // (NUM_STAGES * len(stages))
    built = [
        PipelineStage(stage, start // size, NUM_STAGES * len(stages), torch.device("cpu"))
        for start, stage in stages.items()
    ]
    whole = schedule(built if schedule is ScheduleInterleaved1F1B else built[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    found: list[torch.Tensor] = []
    for seed in range(NUM_STEPS):
        tokens = torch.randint(
            0, VOCABULARY, (2 * NUM_MICRO_BATCHES, TOKENS), generator=torch.Generator().manual_seed(seed)
        )
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if rank == 0 else ()
        if rank == NUM_STAGES - 1:
            whole.step(*inputs, target=tokens, losses=losses)
        else:
            whole.step(*inputs)
        found += [loss.detach() for loss in losses]
        for stage in stages.values():
            found += [parameter.grad.clone() for parameter in stage.parameters()]
            stage.zero_grad()
    return found


@functools.cache
def plain_of(rank: int, schedule: type, num_chunks: int, numbered: bool) -> list[torch.Tensor]:
    """What plain training gives."""
    return train(stages_of(rank, num_chunks, numbered=numbered), rank, schedule)


def tried(name: str, rank: int, schedule: type, *, num_chunks: int = 1, numbered: bool = False) -> dict[str, Any]:
    """One configuration on all stages of this rank: what differs from plain training, and what was done."""
    plain = plain_of(rank, schedule, num_chunks, numbered)
    stages = stages_of(rank, num_chunks, numbered=numbered)
    sections = Sections(
        written=CONFIGS[name],
        num_layers=NUM_LAYERS,
        pipeline_stage=NUM_STAGES,
        pp_interleave_num=num_chunks,
        compat=False,
    )
    tides = {
        start: lowtide.apply(stage, sections, engine=virtual(start), **({} if numbered else {"first_layer": start}))
        for start, stage in stages.items()
    }
    got = train(stages, rank, schedule)
    same = [torch.equal(a, b) for a, b in zip(got, plain, strict=True)]
    result: dict[str, Any] = {"name": name, "different": same.count(False), "compared": len(same)}
    result["rows"] = [
        [row.layer, row.part, row.fate, row.nbytes] for tide in tides.values() for row in tide.source.file_plan.rows
    ]
    forwards = {tide.stats.num_forwards for tide in tides.values()}
    assert len(forwards) == 1
    result["num_forwards"] = forwards.pop()
    for what in ("num_divergences", "swapped_bytes", "recomputed_bytes"):
        result[what] = sum(getattr(tide.stats, what) for tide in tides.values())
    for tide in tides.values():
        tide.remove()
    return result


def all_schedules(rank: int, *, is_more: bool) -> dict[str, Any]:
    """`is_more`: each of torch's schedules with each configuration; else each with one of them."""
    runs: dict[str, Any] = {}
    for number, name in enumerate(("a table", "counts per stage", "swap everything", "mixed", "across the seam")):
        for place, schedule in enumerate((ScheduleGPipe, Schedule1F1B)):
            if is_more or number == place:
                numbered = schedule is Schedule1F1B
                runs[f"{name}, {schedule.__name__}"] = tried(name, rank, schedule, numbered=numbered)
    for name in ("counts per stage", "a table for chunks", *(("mixed",) if is_more else ())):
        runs[f"{name}, two chunks"] = tried(name, rank, ScheduleInterleaved1F1B, num_chunks=2)
    return runs
