"""Hugging Face's Trainer, TRL's SFTTrainer with LoRA, and Accelerate: equal to plain to the bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import lowtide
from lowtide.adapters.transformers import TideCallback
from lowtide.runtime.session.forward_patch import patched_module
from tests.adapters.accelerated import BUDGET, SMALL, Tokens, accelerated, environment_of, llama, on_a_rank
from tests.adapters.saving import saved_share
from tests.support import two_ranks
from tests.support.virtual_engine import virtual


def _callback(budget: str | None = BUDGET, memory: Any = SMALL, said: list[str] | None = None) -> TideCallback:
    say = said.append if said is not None else lambda line: None
    return TideCallback(budget=budget, memory=memory, engine=virtual(1), say=say)


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
    "all of them": {"bf16": True, "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3},
    "accumulates": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "evaluates": {"eval_strategy": "steps", "eval_steps": 3},
}


Outcome = tuple[dict[str, Tensor], list[float]]


@pytest.fixture(scope="module")
def plain_outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What a habit leaves behind without lowtide; each is run once."""
    return functools.cache(lambda habit: _outcome(_trained(tmp_path_factory.mktemp("plain"), None, **HABITS[habit])))


@pytest.mark.parametrize(
    "habit", ["plain", "all of them", *(pytest.param(habit, marks=pytest.mark.extended) for habit in [*HABITS][2:])]
)
def test_eight_steps_of_the_trainer(habit: str, tmp_path: Path, plain_outcome: Callable[[str], Outcome]) -> None:
    plain = plain_outcome(habit)
    assert len(plain[1]) >= 16
    for budget in (BUDGET,) if habit != "plain" else (BUDGET, "1GiB"):
        callback = _callback(budget)
        trainer = _trained(tmp_path, callback, **HABITS[habit])
        assert _same(_outcome(trainer), plain)
        assert bool(callback.stats.swapped_bytes) == (budget == BUDGET)
        assert (saved_share(callback.tide) > 0) == (budget == BUDGET)
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


def test_its_own_choice_of_layers_and_offload_come_back(
    tmp_path: Path, plain_outcome: Callable[[str], Outcome]
) -> None:
    """The library's own offload needs pinned memory, so an accelerator, and never runs here: it is off meanwhile."""
    options = {"every_n_layers": 2, "offload": True, "use_reentrant": False}
    how = {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}
    callback = _callback()
    trainer = _trained(tmp_path, callback, **how)
    assert _same(_outcome(trainer), plain_outcome("plain"))
    assert callback.stats.num_skipped_calls == 0
    layers = trainer.model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    function = layers[0]._gradient_checkpointing_func
    assert function.func is not torch.utils.checkpoint.checkpoint
    assert function.keywords == {"use_reentrant": False}


class Seen(TrainerCallback):
    """A reporter, as TensorBoard's and Weights & Biases' are: it comes before the callbacks of users."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


FIGURES = {
    "lowtide/peak_device_bytes",
    "lowtide/kept_bytes",
    "lowtide/swapped_bytes",
    "lowtide/recomputed_bytes",
    "lowtide/stall_seconds",
    "lowtide/num_divergences",
    "lowtide/predicted_peak_bytes",
    "lowtide/predicted_micro_batch_seconds",
    "lowtide/step_seconds",
}


@pytest.mark.parametrize("joins", [False, True])
def test_reporters_get_the_figures_once_they_are_asked_to(joins: bool, tmp_path: Path) -> None:
    callback, seen = _callback(), Seen()
    trainer = _trainer(tmp_path, callback, max_steps=4, logging_steps=2)
    trainer.callback_handler.callbacks.insert(1, seen)
    if joins:
        callback.log_to(trainer)
        callback.log_to(trainer)
    trainer.train()
    figures = [{name for name in logs if name.startswith("lowtide/")} for logs in seen.logs if "loss" in logs]
    assert figures == [FIGURES if joins else set()] * 2
    (first, last) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert set(last) >= FIGURES
    plan = callback.tide.plan
    assert last["lowtide/predicted_peak_bytes"] == plan.predicted.peak_bytes
    assert last["lowtide/peak_device_bytes"] == callback.stats.peak_device_bytes
    assert first["lowtide/step_seconds"] > 0


@pytest.mark.parametrize("memory", [{"optimizer": "in_backward"}, {"weights": "swap"}])
def test_updates_in_backward_are_refused_when_training_begins(memory: dict[str, str], tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _callback(memory={**SMALL, **memory}), max_grad_norm=0)
    with pytest.raises(lowtide.ConfigError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "TideCallback: memory updates each parameter in backward and frees its gradient, and the norm of gradients "
        "that Trainer takes needs all gradients after that; leave out weights, and write optimizer: auto"
    )
    assert patched_module(trainer.model) is None


def test_a_callback_of_another_trainer_cannot_log() -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        _callback().log_to(_trainer(Path("out"), None))
    assert str(caught.value) == (
        "TideCallback.log_to: this callback is not one of the trainer's; pass callbacks=[callback]"
    )


def test_tensorboard_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = _callback()
    trainer = _trainer(tmp_path, callback, max_steps=4, logging_steps=2, report_to=["tensorboard"])
    callback.log_to(trainer)
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = {tag.removeprefix("train/") for tag in events.Tags()["scalars"]}
    assert tags >= FIGURES


class Removes(TrainerCallback):
    def __init__(self, callback: TideCallback, step: int) -> None:
        self.callback, self.step = callback, step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.callback.remove()


def test_taken_off_in_mid_training(tmp_path: Path, plain_outcome: Callable[[str], Outcome]) -> None:
    callback = _callback()
    trainer = _trainer(tmp_path, callback)
    trainer.add_callback(Removes(callback, 4))
    trainer.train()
    assert _same(_outcome(trainer), plain_outcome("plain"))
    assert callback.stats.num_forwards <= 4
    assert patched_module(trainer.model) is None


def test_a_cell_that_runs_again(tmp_path: Path) -> None:
    """A new trainer and a new callback on a model that an interrupted training left under a plan."""
    plain = _trainer(tmp_path, None)
    torch.manual_seed(5)
    plain.train()
    lost, said = _callback(), []
    model = llama(dropout=0.1)
    lost.attached.attach(model, None, speaks=False)  # as `train()` does before it is interrupted
    again = _callback(said=said)
    trainer = _trainer(tmp_path, again)
    trainer.model = trainer.model_wrapped = model
    torch.manual_seed(5)
    trainer.train()
    assert _same(_outcome(trainer), _outcome(plain))
    assert said[0] == "lowtide: another plan was on this model; it is taken off, and this one begins"
    assert patched_module(model) is None


def test_after_an_error_the_next_training_begins_anew(tmp_path: Path) -> None:
    plain = _trainer(tmp_path, None)
    torch.manual_seed(5)  # the order of the batches is drawn in `train()`
    plain.train()
    callback = _callback(
        "1KiB", {"min_bytes": 1 << 30, "strict": True}
    )  # nothing can be moved: no way out is looked for
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
    assert saved_share(budget.tide) >= 0
    rules = _callback(None, {"swap": "all", "recompute": ["layers.0"], "min_bytes": 0})
    assert _same(trained(rules), plain)
    assert rules.stats.swapped_bytes
    assert rules.stats.recomputed_bytes


@pytest.mark.parametrize("how", ["optimize", "apply"])
def test_accelerate_with_its_own_optimizer(how: str) -> None:
    """The optimizer is the same object, with the same state and groups, after the observed step as before it."""
    assert all(torch.equal(one, other) for one, other in zip(accelerated(how), accelerated("plain"), strict=True))


def trainer_on_a_rank(rank: int, folder: str, budget: str | None) -> list[Any]:
    """As `accelerate launch` runs a script with a Trainer: DDP around the model, a part of each batch for each rank."""
    environment_of(rank)
    callback = None if budget is None else _callback(budget)
    trainer = _trained(Path(folder) / str(rank), callback, max_steps=4, ddp_backend="gloo")
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    weights, losses = _outcome(trainer)
    if callback is not None:
        assert callback.stats.swapped_bytes + callback.stats.recomputed_bytes
    return [{name: value.tolist() for name, value in weights.items()}, losses]


def test_accelerate_on_two_ranks(tmp_path: Path) -> None:
    """DDP by Accelerate: the process group is there, as under `accelerate launch`."""
    calls = ("plain", "optimize", "inside")
    jobs: list[two_ranks.Job] = [(on_a_rank.__name__, {"call": call}) for call in calls]
    jobs += [("trainer_on_a_rank", {"folder": str(tmp_path), "budget": budget}) for budget in (None, BUDGET)]
    plain, ours, inside, trainers, under_a_budget = two_ranks.run(__name__, jobs, tmp_path)
    assert plain == ours == inside
    assert plain[0] == plain[1]
    assert trainers == under_a_budget
    assert trainers[0][0] == trainers[1][0]
    assert len(trainers[0][1]) == 8
