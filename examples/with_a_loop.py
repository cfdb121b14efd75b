"""A training loop of your own within a memory budget. Each `with_*.py` here is a whole program; the models are tiny.

python examples/with_a_loop.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters())

memory = {"min_bytes": 0}  # for these small tensors; leave it out for a real model
with lowtide.optimize(model, "8MiB", memory=memory, optimizer=optimizer) as tide:
    for step in range(4):
        tokens = torch.randint(256, (4, 128))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print(tide.plan)  # what each layer keeps, swaps and recomputes, and why
    lowtide.write_report(tide, "run.html")
