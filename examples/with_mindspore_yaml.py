"""A file of MindSpore Transformers: its `recompute_config` and `swap_config` mean here what they mean there."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

FILE = Path(__file__).parent / "mindformers" / "swap_4_mixed.yaml"

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters())

with lowtide.apply(model, FILE, optimizer=optimizer) as tide:
    for _ in range(3):
        tokens = torch.randint(256, (2, 64))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(tide.plan)  # every activation, and the line of the file that decided about it
