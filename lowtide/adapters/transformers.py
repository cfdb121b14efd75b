"""Hugging Face's Trainer, and TRL's trainers, which are Trainers.

    from lowtide.adapters.transformers import TideCallback
    Trainer(..., callbacks=[TideCallback(budget="20GiB")])

What: when training begins, lowtide plans the model (or applies the rules of `memory=`), with the optimizer that
Accelerate has wrapped. When training ends, the model is plain again. Losses and weights are the same to the bit.
Resuming, gradient accumulation, mixed precision, evaluation in mid-training, PEFT and `accelerate launch` with DDP need
nothing more.

Trainer's own activation checkpointing (TRL turns it on by default) is switched off while lowtide acts, and on again
afterwards: in a layer that Trainer checkpoints there would be nothing left to plan.

Scalars: with each log, the entry of `state.log_history` gets the figures of `Attached.scalars`. Trainer calls its own
reporters (TensorBoard, Weights & Biases) before the callbacks of users. `callback.log_to(trainer)` puts this callback
first, so that the reporters get the figures too.

Refused when training begins: updates in backward (`memory.optimizer: in_backward`, `memory.weights`), since Trainer
takes the norm of all gradients in each step.
Not covered: DeepSpeed and Megatron integrations, which bring models and optimizers of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lowtide import ConfigError
from lowtide.adapters.attach import Attached, shown


class TideCallback(TrainerCallback):
    """lowtide for one Trainer. `tide` is the handle, `stats` its figures (those of the last run once it is over).

    `budget`: bytes per device, or text such as "20GiB". `memory`: rules, a plan, or the path of a YAML file, as for
    `lowtide.apply`; with `budget`, limits for the solver. `engine` as there. `say` gets a line when a plan is made (by
    default on stderr, from rank 0). Raises ConfigError at once where neither budget nor memory is given, and in
    `train()` for what does not fit the model.
    """

    tide, stats = shown("tide"), shown("stats")

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        memory: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
        engine: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.attached = Attached("TideCallback", budget=budget, memory=memory, engine=engine, say=say or _above_the_bar)
        self._logs_to_all = False
        """It comes before Trainer's reporters, and gives them its figures."""
        self._restore_checkpointing: Callable[[], None] | None = None

    def remove(self) -> None:
        """Make the model plain again, after a training that ended with an error. Idempotent."""
        self.attached.remove()
        if self._restore_checkpointing is not None:
            self._restore_checkpointing()
            self._restore_checkpointing = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.remove()
        model = kwargs["model"]
        self._take_over(model, args, speaks=state.is_world_process_zero)
        try:
            speaks = state.is_world_process_zero
            # Trainer takes it with and without clipping, to log it.
            needs = "the norm of gradients that Trainer takes"
            self.attached.attach(model, kwargs["optimizer"], speaks=speaks, needs=needs)
        except BaseException:
            self.remove()
            raise

    def log_to(self, trainer: Trainer) -> None:
        """Have the reporters of `trainer` log the figures too: this callback, which is one of its own, comes first from
        now on. Raises ConfigError where it is none of them."""
        callbacks = trainer.callback_handler.callbacks
        if not any(callback is self for callback in callbacks):
            raise ConfigError(
                "TideCallback.log_to: this callback is not one of the trainer's; pass callbacks=[callback]"
            )
        callbacks.remove(self)
        callbacks.insert(0, self)
        self._logs_to_all = True

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self.attached.step_begins()

    def on_step_end(self, *_: Any, **kwargs: Any) -> None:
        self.attached.step_ends()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.log_history and "loss" in state.log_history[-1]:
            figures = self.attached.scalars()
            state.log_history[-1].update(figures)
            if self._logs_to_all and logs is not None:
                logs.update(figures)  # Trainer gives one and the same dictionary to all callbacks

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self.remove()

    def _take_over(self, model: Any, args: TrainingArguments, *, speaks: bool) -> None:
        """Switch off the model's own activation checkpointing, and remember how to switch it on."""
        # transformers before 5.20 say "gradient checkpointing".
        word = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"
        if not getattr(model, f"is_{word}_checkpointing", False):
            return
        getattr(model, f"{word}_checkpointing_disable")()
        # Trainer takes these two out of the keyword arguments of torch's checkpoint, which all others are.
        how = dict(getattr(args, f"{word}_checkpointing_kwargs", None) or {})
        own = {key: how.pop(key) for key in ("every_n_layers", "offload") if key in how}
        self._restore_checkpointing = lambda: getattr(model, f"{word}_checkpointing_enable")(how or None, **own)
        if speaks:
            self.attached.tell(
                f"lowtide: the model's own {word} checkpointing is off while lowtide plans; write "
                f"{word}_checkpointing=False to do without this line"
            )


def _above_the_bar(line: str) -> None:
    """On stderr, where Trainer draws its progress: a line of its own, not the end of the bar."""
    tqdm.write(line, file=sys.stderr)
