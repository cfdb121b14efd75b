"""Hugging Face's Trainer: one callback.

pip install transformers accelerate
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lowtide
from lowtide.adapters.transformers import TideCallback

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (16, 128))]

callback = TideCallback(budget="8MiB", memory={"min_bytes": 0})
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out", max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
    ),
    train_dataset=rows,
    callbacks=[callback],
)
callback.log_to(trainer)  # TensorBoard and the others log lowtide's figures too
trainer.train()
lowtide.write_report(callback.tide, "run.html")
