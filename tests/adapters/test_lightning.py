"""Lightning's Trainer: a module whose `training_step` calls another is told so; given that one, bits are equal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.runtime.session.forward_patch import patched_module
from tests.adapters.saving import saved_share
from tests.support.virtual_engine import virtual

if TYPE_CHECKING:
    from lowtide.adapters.lightning import TideCallback
    from tests.support.lightning_modules import Lit

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


def _optimize(pick: Callable[[Lit], nn.Module]) -> Callable[[Lit], Any]:
    return lambda lit: lowtide.optimize(
        pick(lit), budget="1GiB", optimizer=lit.optimizers(), engine=virtual(1)
    )  # fmt: skip


def _swap(lit: Lit) -> Any:
    return lowtide.apply(lit, {"swap": "all", "min_bytes": 0}, optimizer=lit.optimizers(), engine=virtual(1))


def _train(
    path: Path, apply: Callable[[Any], Any] | None, callback: TideCallback | None = None, **how: Any
) -> tuple[Lit, list[str]]:
    import lightning.pytorch as pl

    from tests.support.lightning_modules import Lit

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    lit = Lit(apply)
    data = torch.utils.data.TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=10,
        accelerator="cpu",
        default_root_dir=path,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
        **{**quiet, **how},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(lit, torch.utils.data.DataLoader(data, batch_size=4))
    return lit, [str(warning.message) for warning in caught if str(warning.message).startswith("lowtide")]


def _weights(lit: Lit) -> list[Tensor]:
    return [parameter.detach() for parameter in lit.parameters()]


def test_ten_steps_of_the_trainer(tmp_path: Path) -> None:
    plain, _ = _train(tmp_path, None)
    body, said = _train(tmp_path, _optimize(lambda lit: lit.body))
    assert said == []
    assert body.wrapped == ["LightningAdamW"]
    assert body.tides[0].plan is not None
    layers, said = _train(tmp_path, _swap)
    assert said == []
    assert layers.tides[0].stats.swapped_bytes
    for lit in (body, layers):
        assert all(torch.equal(one, other) for one, other in zip(_weights(lit), _weights(plain), strict=True))


def test_the_module_around_it_is_told(tmp_path: Path) -> None:
    plain, _ = _train(tmp_path, None)
    lit, said = _train(tmp_path, _optimize(lambda lit: lit))
    assert said == [
        "lowtide: gradients arrived at 'body' (Body), and the forward of Lit, which lowtide.optimize wrapped, was "
        "never called; give lowtide.optimize the module whose forward runs, so nothing is planned or moved."
    ]
    assert all(torch.equal(one, other) for one, other in zip(_weights(lit), _weights(plain), strict=True))


def _callback(**how: Any) -> TideCallback:
    asked = {"budget": "1GiB", "engine": virtual(1), "say": lambda line: None}
    from lowtide.adapters.lightning import TideCallback

    return TideCallback(**{**asked, **how})


HABITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all of them": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"},
    "accumulates": {"accumulate_grad_batches": 2},
    "clips": {"gradient_clip_val": 0.1},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize(
    "habit", ["plain", "all of them", *(pytest.param(habit, marks=pytest.mark.extended) for habit in [*HABITS][2:])]
)
def test_ten_steps_with_the_callback(habit: str, tmp_path: Path) -> None:
    plain, _ = _train(tmp_path, None, **HABITS[habit])
    swaps = {"swap": "all", "min_bytes": 0}
    for callback in (_callback(), _callback(budget=None, memory=swaps), _callback(module="body")):
        lit, said = _train(tmp_path, None, callback, **HABITS[habit])
        assert said == []
        assert all(torch.equal(one, other) for one, other in zip(_weights(lit), _weights(plain), strict=True))
        assert patched_module(lit.body) is None
        assert callback.stats.num_forwards
        assert bool(callback.stats.swapped_bytes) == (callback.tide.plan.rules.rules != ())
        if callback.tide.plan.is_solved:
            assert saved_share(callback.tide) == 0  # a budget in which everything fits


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gradient_clip_val": 0.1, "precision": "bf16-mixed"}, "gradient_clip_val=0.1"),
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    ],
)
def test_what_needs_all_gradients_is_refused_beside_updates_in_backward(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    callback = _callback(memory={"optimizer": "in_backward"})
    with pytest.raises(lowtide.ConfigError) as caught:
        _train(tmp_path, None, callback, **settings)
    assert str(caught.value) == (
        f"TideCallback: memory updates each parameter in backward and frees its gradient, and {said} needs all "
        "gradients after that; leave out weights, and write optimizer: auto"
    )


def test_row_counts_reach_the_logger(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    callback = _callback()
    _train(tmp_path, None, callback, logger=CSVLogger(tmp_path, name="run"), log_every_n_steps=5)
    head, *rows = (tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()
    last = dict(zip(head.split(","), rows[-1].split(","), strict=True))
    assert float(last["lowtide/peak_device_bytes"]) == callback.stats.peak_device_bytes
    assert float(last["lowtide/predicted_peak_bytes"]) == callback.tide.plan.predicted.peak_bytes
    assert float(last["lowtide/step_seconds"]) > 0


def test_a_module_that_cannot_be_told_is_asked_for() -> None:
    import lightning.pytorch as pl

    from tests.support.lightning_modules import Two

    class Pair(Two):
        def configure_optimizers(self) -> Any:
            self.automatic_optimization = False
            return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.body, self.head)]

    def fit(callback: TideCallback, model: type[Two] = Two) -> None:
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8)), batch_size=4)
        pl.Trainer(max_steps=1, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet).fit(
            model(), data
        )

    with pytest.raises(lowtide.ConfigError) as caught:
        fit(_callback())
    assert str(caught.value) == (
        "TideCallback: which module does Two.training_step call? Write TideCallback(..., module=NAME); its children "
        "with parameters are: body, head"
    )
    with pytest.raises(lowtide.ConfigError) as caught:
        fit(_callback(module="boddy"))
    assert str(caught.value) == "TideCallback: Two has no module 'boddy'; its children are: body, head"
    fit(_callback(module="body"))
    with pytest.raises(lowtide.ConfigError) as caught:
        fit(_callback(module="body"), Pair)
    assert str(caught.value) == (
        "TideCallback: needs one optimizer, and there are 2; in on_train_start call "
        "lowtide.optimize(module.generator, budget, optimizer=...) for each part that is to be planned for"
    )
