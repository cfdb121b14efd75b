"""Accelerate: lowtide comes after `prepare`.

pip install transformers accelerate

    accelerate launch --cpu --num_processes 2 examples/with_accelerate.py        or plain python, for one process
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
rows = torch.utils.data.DataLoader(torch.randint(256, (16, 128)), batch_size=4)

accelerator = Accelerator(cpu=True)
model, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), rows)
with lowtide.optimize(model, budget="8MiB", memory={"min_bytes": 0}, optimizer=optimizer) as tide:
    for tokens in rows:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    lowtide.write_report(tide, "run.html")
accelerator.end_training()
