"""Lightning's Trainer.

    from lowtide.adapters.lightning import TideCallback
    Trainer(..., callbacks=[TideCallback(budget="20GiB")])

What: when training starts, lowtide plans the module that runs forward (or applies the rules of `memory=`), with the
optimizer that Lightning has wrapped. When training ends or fails, the module is plain again. Losses and weights are the
same to the bit. Figures go to Lightning's loggers with each logged step.

Which module: lowtide acts on calls of a module, and Lightning calls `training_step`, which is none. `module=` names the
module that `training_step` calls, such as "model". Absent: the LightningModule itself if it defines `forward`, else the
one child that has parameters.

Not covered: several optimizers (manual optimization), FSDP and DeepSpeed strategies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lowtide import ConfigError
from lowtide.adapters.attach import Attached, shown


class TideCallback(Callback):
    """lowtide for one Trainer. `tide` is the handle, `stats` its figures (those of the last run once it is over).

    `budget`, `memory`, `engine`, `say`: as for `lowtide.adapters.transformers.TideCallback`. `module`: the name of the
    module that `training_step` calls. Raises ConfigError at once where neither budget nor memory is given, and in
    `fit()` for a name that is not there and for what does not fit the module.
    """

    tide, stats = shown("tide"), shown("stats")

    def __init__(
        self,
        budget: int | str | None = None,
        *,
        module: str | None = None,
        memory: Mapping[str, Any] | str | os.PathLike[str] | Any = None,
        engine: Any = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.attached = Attached("TideCallback", budget=budget, memory=memory, engine=engine, say=say)
        self._module = module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"TideCallback: needs one optimizer, and there are {len(trainer.optimizers)}; in on_train_start call "
                "lowtide.optimize(module.generator, budget, optimizer=...) for each part that is to be planned for"
            )
        module = module_that_runs(pl_module, self._module)
        needs = [f"gradient_clip_val={trainer.gradient_clip_val}"] if trainer.gradient_clip_val else []
        if trainer.accumulate_grad_batches > 1:
            needs.append(f"accumulate_grad_batches={trainer.accumulate_grad_batches}")
        if trainer.precision == "16-mixed":
            needs.append("precision='16-mixed'")
        self.attached.attach(module, trainer.optimizers[0], speaks=trainer.is_global_zero, needs=", ".join(needs))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.attached.step_begins()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.attached.step_ends()
        pl_module.log_dict(self.attached.scalars())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.attached.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.attached.remove()


def module_that_runs(pl_module: LightningModule, name: str | None) -> torch.nn.Module:
    """The module whose forward `training_step` calls: `name`, or the one there can only be. Raises ConfigError."""
    if name is not None:
        try:
            return pl_module.get_submodule(name)
        except AttributeError:
            names = ", ".join(child for child, _ in pl_module.named_children())
            raise ConfigError(
                f"TideCallback: {type(pl_module).__name__} has no module {name!r}; its children are: {names}"
            ) from None
    if type(pl_module).forward is not LightningModule.forward:
        return pl_module
    children = {child: module for child, module in pl_module.named_children() if any(True for _ in module.parameters())}
    if len(children) != 1:
        raise ConfigError(
            f"TideCallback: which module does {type(pl_module).__name__}.training_step call? Write "
            f"TideCallback(..., module=NAME); its children with parameters are: {', '.join(children) or 'none'}"
        )
    return next(iter(children.values()))
