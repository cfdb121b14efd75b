"""TRL's SFTTrainer with LoRA, and batches of different lengths: each new length gets a plan.

pip install trl peft
"""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lowtide
from lowtide.adapters.transformers import TideCallback

words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "low": 2, "high": 3, "tide": 4}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}

callback = TideCallback(budget="21MiB", memory={"min_bytes": 0})
trainer = SFTTrainer(
    model=LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)),
    args=SFTConfig(
        output_dir="out", max_steps=4, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[]
    ),
    train_dataset=Dataset.from_dict({"text": ["low tide high tide " * (16 - number % 3) for number in range(32)]}),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    callbacks=[callback],
)
trainer.train()
lowtide.write_report(callback.tide, "run.html")
