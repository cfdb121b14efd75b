"""Hugging Face's Trainer, TRL's SFTTrainer with LoRA, and Accelerate: equal to plain to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

import lowtide
from lowtide.adapters.transformers import TideCallback
from lowtide.runtime.session.forward_patch import patched_module
from tests import two_ranks
from tests.adapters.accelerated import BUDGET, SMALL, Tokens, accelerated, llama


def _callback(budget: str | None = BUDGET, memory: Any = SMALL, said: list[str] | None = None) -> TideCallback:
    say = said.append if said is not None else lambda line: None
    return TideCallback(budget=budget, memory=memory, engine="virtual:1", say=say)


def _trainer(path: Path, callback: TideCallback | None, **more: Any) -> Trainer:
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
    return Trainer(
        model=llama(dropout=0.1),
        args=TrainingArguments(**{**arguments, **more}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[] if callback is None else [callback],
    )


def _outcome(trainer: Trainer) -> tuple[dict[str, Tensor], list[float]]:
    """Weights, and the losses of training and evaluation."""
    entries = trainer.state.log_history
    losses = [entry[key] for entry in entries for key in ("loss", "eval_loss", "grad_norm") if key in entry]
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}, losses


def _same(one: tuple[dict[str, Tensor], list[float]], other: tuple[dict[str, Tensor], list[float]]) -> bool:
    return one[1] == other[1] and all(torch.equal(value, other[0][name]) for name, value in one[0].items())


def _trained(path: Path, callback: TideCallback | None, **more: Any) -> Trainer:
    trainer = _trainer(path, callback, **more)
    trainer.train()
    return trainer


HABITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "evaluates": {"eval_strategy": "steps", "eval_steps": 3},
}


Outcome = tuple[dict[str, Tensor], list[float]]


@pytest.fixture(scope="module")
def plain_outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What a habit leaves behind without lowtide; each is run once."""
    return functools.cache(lambda habit: _outcome(_trained(tmp_path_factory.mktemp("plain"), None, **HABITS[habit])))


@pytest.mark.parametrize("habit", HABITS)
def test_eight_steps_of_the_trainer(habit: str, tmp_path: Path, plain_outcome: Callable[[str], Outcome]) -> None:
    plain = plain_outcome(habit)
    assert len(plain[1]) >= 16
    for budget in (BUDGET,) if habit != "plain" else (BUDGET, "1GiB"):
        callback = _callback(budget)
        trainer = _trained(tmp_path, callback, **HABITS[habit])
        assert _same(_outcome(trainer), plain)
        assert bool(callback.stats.swapped_bytes) == (budget == BUDGET)
        logged = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
        assert logged["lowtide/swapped_bytes"] == callback.stats.swapped_bytes
        assert patched_module(trainer.model) is None


def test_rules_without_a_budget(tmp_path: Path, plain_outcome: Callable[[str], Outcome]) -> None:
    plain = plain_outcome("plain")
    callback = _callback(None, {"swap": "all", "min_bytes": 0})
    assert _same(_outcome(_trained(tmp_path, callback)), plain)
    assert callback.stats.swapped_bytes


def test_a_run_that_is_resumed(tmp_path: Path, plain_outcome: Callable[[str], Outcome]) -> None:
    plain = plain_outcome("plain")
    _trained(tmp_path / "ours", _callback(), save_strategy="steps", save_steps=4)
    again = _trainer(tmp_path / "ours", _callback())
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    losses = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
    assert losses == plain[1][::2]
    assert all(torch.equal(value, plain[0][name]) for name, value in again.model.state_dict().items())


def test_its_own_checkpointing_is_off_while_lowtide_plans(tmp_path: Path) -> None:
    how = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    plain = _trained(tmp_path, None, **how)
    said: list[str] = []
    callback = _callback(said=said)
    trainer = _trained(tmp_path, callback, **how)
    assert _same(_outcome(trainer), _outcome(plain))
    assert said[0] == (
        "lowtide: the model's own activation checkpointing is off while lowtide plans; write "
        "activation_checkpointing=False to do without this line"
    )
    assert callback.stats.num_skipped_calls == 0
    assert callback.stats.swapped_bytes
    assert trainer.model.is_activation_checkpointing


def test_after_an_error_the_next_training_begins_anew(tmp_path: Path) -> None:
    plain = _trainer(tmp_path, None)
    torch.manual_seed(5)  # the order of the batches is drawn in `train()`
    plain.train()
    callback = _callback("1KiB", {"min_bytes": 1 << 30})  # nothing can be moved: no way out is looked for
    trainer = _trainer(tmp_path, callback)
    with pytest.raises(lowtide.BudgetError):
        trainer.train()
    callback.remove()
    assert trainer.model is not None
    assert patched_module(trainer.model) is None
    trainer.remove_callback(callback)
    trainer.add_callback(_callback())
    torch.manual_seed(5)
    trainer.train()
    assert _same(_outcome(trainer), _outcome(plain))


def test_nothing_to_do_is_a_mistake() -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        TideCallback()
    assert str(caught.value) == (
        "TideCallback: nothing to do; write budget='20GiB', or memory= with rules or the path of a YAML file"
    )


def test_lora_in_sft_trainer(tmp_path: Path) -> None:
    """TRL checkpoints by default; PEFT trains what it puts beside the frozen weights."""
    from datasets import Dataset  # type: ignore[import-untyped]
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {str(number): number for number in range(62)} | {"<pad>": 62, "<eos>": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(str(int(word) % 62) for word in row) for row in Tokens().tokens]

    def trained(callback: TideCallback | None, **more: Any) -> tuple[dict[str, Tensor], list[float]]:
        trainer = SFTTrainer(
            model=llama(),
            args=SFTConfig(
                output_dir=str(tmp_path),
                max_steps=4,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
                dataset_num_proc=None,
                **more,
            ),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=fast,
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"),
            callbacks=[] if callback is None else [callback],
        )
        trainer.train()
        return _outcome(trainer)

    plain = trained(None)
    budget = _callback("8MiB")  # TRL's loss has one buffer of 6 MiB, whatever the model's size
    assert _same(trained(budget), plain)
    assert budget.stats.kept_bytes
    rules = _callback(None, {"swap": "all", "recompute": ["layers.0"], "min_bytes": 0})
    assert _same(trained(rules), plain)
    assert rules.stats.swapped_bytes
    assert rules.stats.recomputed_bytes


@pytest.mark.parametrize("how", ["optimize", "apply"])
def test_accelerate_with_its_own_optimizer(how: str) -> None:
    """The optimizer is the same object, with the same state and groups, after the observed step as before it."""
    assert all(torch.equal(one, other) for one, other in zip(accelerated(how), accelerated("plain"), strict=True))


def test_accelerate_on_two_ranks(tmp_path: Path) -> None:
    """DDP by Accelerate: the process group is there, as under `accelerate launch`."""
    jobs: list[two_ranks.Job] = [("on_a_rank", {"call": call}) for call in ("plain", "optimize")]
    plain, ours = two_ranks.run("tests.adapters.accelerated", jobs, tmp_path)
    assert plain == ours
    assert plain[0] == plain[1]
