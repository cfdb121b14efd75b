"""A small Hugging Face Llama, cut for tensor and sequence parallelism by torch's own means: parameters are DTensors."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

NUM_LAYERS, TOKENS, BATCH, WIDTH, NUM_WORDS = 4, 16, 2, 32, 32


def build(mesh: DeviceMesh, num_layers: int = NUM_LAYERS) -> torch.nn.Module:
    """This rank's part of the model. `mesh` has the one dimension "tp"."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=NUM_WORDS,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, _layer_plan())
    return model


def _layer_plan() -> dict:
    cut, whole = Shard(1), Replicate()
    plan: dict = {name: ColwiseParallel() for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    plan |= {name: ColwiseParallel() for name in ("mlp.gate_proj", "mlp.up_proj")}
    plan |= {name: RowwiseParallel(output_layouts=cut) for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
    plan["mlp"] = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,))
    plan["self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    return plan


def step(model: torch.nn.Module, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and this rank's part of the gradients."""
    tokens = torch.randint(0, NUM_WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))
    # The model would count positions by its share of the sequence.
    loss = model(input_ids=tokens, labels=tokens, position_ids=torch.arange(TOKENS)[None]).loss
    loss.backward()
    gradients = [local(parameter.grad).clone() for parameter in model.parameters()]
    model.zero_grad()
    return local(loss.detach()).clone(), gradients


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
