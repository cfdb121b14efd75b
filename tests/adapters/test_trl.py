"""TRL's trainers beside SFTTrainer: equal to plain to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.adapters.transformers import TideCallback
from tests.adapters.accelerated import Tokens, llama
from tests.support.virtual_engine import virtual

ARGUMENTS: dict[str, Any] = {
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(62)} | {"<pad>": 62, "<eos>": 63}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def dpo(folder: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset  # type: ignore[import-untyped]
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    texts = [" ".join(str(int(word) % 62) for word in row) for row in Tokens().tokens]
    rows = {"prompt": ["1 2 3"] * len(texts), "chosen": texts, "rejected": [f"{text} 7 9" for text in texts[::-1]]}
    return DPOTrainer(
        model=llama(),
        args=DPOConfig(output_dir=str(folder), per_device_train_batch_size=2, **ARGUMENTS),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks,
    )


def grpo(folder: Path, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(len(word) for word in text.split()) % 7) for text in completions]

    return GRPOTrainer(
        model=llama(),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=24,
            **ARGUMENTS,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1 2 3", "4 5", "6 7 8 9", "10 11"]}),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [dpo, grpo])
def test_bits_are_those_without_lowtide(make: Any, tmp_path: Path) -> None:
    """The reference of DPO (the model without its adapters) and the generation of GRPO run beside the plan."""

    def trained(callback: TideCallback | None) -> tuple[dict[str, Tensor], list[float]]:
        trainer = make(tmp_path, [] if callback is None else [callback])
        trainer.train()
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return weights, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, losses = trained(None)
    memory = {"recompute": ["layers.0"], "swap": ["layers.1"], "min_bytes": 0}
    callback = TideCallback(memory=memory, engine=virtual(1), say=lambda line: None)
    ours, our_losses = trained(callback)
    assert our_losses == losses and len(losses) == 3
    assert all(torch.equal(value, plain[name]) for name, value in ours.items())
    assert callback.stats.recomputed_bytes and callback.stats.swapped_bytes
