"""FSDP2: the layers are sharded first, then lowtide. The budget is that of each rank.

torchrun --nproc-per-node 2 examples/with_fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())

with lowtide.optimize(model, "7MiB", memory={"min_bytes": 0}, optimizer=optimizer) as tide:
    for _ in range(4):
        tokens = torch.randint(256, (4, 128))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(tide.plan)  # all ranks have agreed on it
dist.destroy_process_group()
