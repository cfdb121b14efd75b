"""What the ranks of tests/pipeline/test_all_at_once.py do: a pipeline with all there is, products cut by torch's own
tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import lowtide
from lowtide.pipeline import Overlap, Pipeline, split_experts
from lowtide.pipeline.cut_model import cut
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import layers_of_stages
from lowtide.tensors.ranks import ALONE
from tests.pipeline.test_cut_model import CONFIGS
from tests.support.virtual_engine import virtual
from tests.support.zoo import mixed

M, TOKENS, SIZE, NUM_STEPS = 4, 8, 2, 3


def model_of() -> Any:
    config = CONFIGS["qwen3_moe"]()
    config.num_hidden_layers, config.tie_word_embeddings = 4, True
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def batch_of(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 64, (2, TOKENS), generator=generator) for _ in range(M)]


def alone() -> tuple[list[float], dict[str, Tensor]]:
    """Of one process: the losses of all micro-batches, and the weights in the end."""
    model, losses = model_of(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for tokens in batch_of(step):
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / M).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def _with_all_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"position_ids": torch.arange(TOKENS)[None]}


def _cut(stage: Any, mesh: Any) -> None:
    stage.model.register_forward_pre_hook(_with_all_positions, with_kwargs=True)
    part, whole = Shard(1), Replicate()
    for layer in stage.model.layers:
        plan: dict = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan["self_attn.o_proj"] = RowwiseParallel(output_layouts=part)
        kwargs = {
            "input_kwarg_layouts": {"hidden_states": part},
            "desired_input_kwarg_layouts": {"hidden_states": whole},
        }
        plan["self_attn"] = PrepareModuleInput(**kwargs)
        parallelize_module(layer, mesh, plan, src_data_rank=None)


def everything(rank: int) -> tuple[list[float], dict[str, Any], int, int, int]:
    """The losses of this rank's part of each micro-batch; its weights in the end, whole; bytes that were recomputed and
    swapped, and those of the optimizer that moved."""
    mesh = init_device_mesh("cpu", (2, SIZE), mesh_dim_names=("pipeline", "tensor"))
    group, place = mesh["tensor"].get_group(), rank % SIZE
    schedule = make_schedule("dualpipev", num_ranks=2, num_micro_batches=M)
    model = model_of()
    stages = cut(model, layers_of_stages(4, schedule.num_stages))
    own = {stage: stages[stage] for stage in schedule.stages_of(rank // SIZE)}
    modules = nn.ModuleList(own.values())
    experts = split_experts(modules, group=group, num_parts=2)
    for stage in own.values():
        _cut(stage, mesh["tensor"])
    has_loss = schedule.num_stages - 1 in own

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        following = F.pad(tokens, (0, 1), value=-100)[:, 1:].chunk(SIZE, 1)[place]
        total = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
        return total / (tokens.shape[0] * (TOKENS - 1))

    optimizer = torch.optim.SGD(modules.parameters(), lr=0.1, momentum=0.9)
    engine: Any = virtual(rank)
    pipeline = Pipeline(
        schedule,
        own,
        loss=loss_of if has_loss else None,
        group=mesh["pipeline"].get_group(),
        run_pair=Overlap().run_pair,
        optimizer=optimizer,
    )
    rules = mixed(recompute=["model.layers.0.self_attn"], swap=["model.layers.*"])
    tides = [lowtide.apply(stage, rules, engine=engine, group=ALONE) for stage in own.values()]
    state = lowtide.swap_optimizer(optimizer, engine=engine, bucket_bytes=1 << 12, min_bytes=0)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        tokens = batch_of(step)
        parts = [each.chunk(SIZE, 1)[place] for each in tokens]
        made = pipeline.step(parts if 0 in own else None, tokens if has_loss else None)
        losses += [loss.item() for loss in made]
        rows = {id(parameter) for parameter in experts.own_parameters()}
        for parameter in modules.parameters():
            if not isinstance(parameter, DTensor) and id(parameter) not in rows:
                dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
    again, swapped = (sum(getattr(tide.stats, f"{fate}_bytes") for tide in tides) for fate in ("recomputed", "swapped"))
    moved = state.stats.swapped_bytes
    state.detach()
    for tide in tides:
        tide.remove()
    pipeline.close()
    experts.remove()
    ends = {}
    for stage, module in own.items():
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            # Each stage has one layer.
            ends[name.replace("layers.0", f"layers.{stage}").replace("head", "model.embed_tokens")] = (
                whole.detach().numpy()
            )
    return losses, ends, again, swapped, moved
