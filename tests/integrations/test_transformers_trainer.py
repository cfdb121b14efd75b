"""Hugging Face's Trainer, whose callbacks get an optimizer that Accelerate has wrapped: equal to plain to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import lowtide

SMALL = {"min_bytes": 0}
BUDGET = "560KiB"


def _llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
            attention_dropout=dropout,
        )
    )


class Tokens(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(64, (16, 24), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Lowtide(TrainerCallback):
    """`optimize` with what the Trainer hands out."""

    def __init__(self, **how: Any) -> None:
        self.how = how
        self.tide: Any = None
        self.optimizers: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.optimizers.append(type(kwargs["optimizer"]).__name__)
        call = lowtide.optimize if "budget" in self.how else lowtide.apply
        self.tide = call(kwargs["model"], optimizer=kwargs["optimizer"], engine="virtual:1", **self.how)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.stats = self.tide.stats
        self.tide.remove()


def _train(path: Path, callback: Lowtide | None, **more: Any) -> tuple[dict[str, Tensor], list[float]]:
    model = _llama(dropout=0.1)
    arguments: dict[str, Any] = {
        "output_dir": str(path),
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**{**arguments, **more}),
        train_dataset=Tokens(),
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {name: value.clone() for name, value in model.state_dict().items()}, losses


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=["", "two", "bf16"])
def test_eight_steps_of_the_trainer(tmp_path: Path, more: dict[str, Any]) -> None:
    plain, losses = _train(tmp_path, None, **more)
    assert len(losses) == 8
    assert losses[-1] != losses[0]
    small = {"budget": BUDGET, "memory": SMALL}
    for how in (small,) if more else (small, {"budget": "1GiB"}):
        callback = Lowtide(**how)
        weights, ours = _train(tmp_path, callback, **more)
        assert callback.optimizers == ["AcceleratedOptimizer"]
        assert ours == losses
        assert all(torch.equal(value, plain[name]) for name, value in weights.items())
        assert bool(callback.stats.swapped_bytes) == (how["budget"] == BUDGET)


@pytest.mark.parametrize("how", ["optimize", "apply"])
def test_accelerate_with_its_own_optimizer(how: str) -> None:
    """The optimizer is the same object, with the same state and groups, after the observed step as before it."""

    def run(call: str) -> list[Tensor]:
        accelerator = Accelerator(cpu=True)
        model = _llama()
        inside = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared, optimizer = accelerator.prepare(model, inside)
        groups, state = inside.param_groups, inside.state
        tide: Any = None
        if call == "optimize":
            tide = lowtide.optimize(prepared, budget="1GiB", optimizer=optimizer, engine="virtual:1")
        elif call == "apply":
            tide = lowtide.apply(prepared, {"swap": "all", "min_bytes": 0}, optimizer=optimizer, engine="virtual:1")
        tokens = Tokens().tokens[:2]
        for _ in range(3):
            accelerator.backward(prepared(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        assert inside.param_groups is groups
        assert inside.state is state
        assert {id(p) for p in state} == {id(p) for p in model.parameters()}
        if tide is not None:
            tide.remove()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(how), run("plain"), strict=True))
