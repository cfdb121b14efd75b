"""Lightning's Trainer: a module whose `training_step` calls another is told so; given that one, bits are equal."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lowtide

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Lit(pl.LightningModule):
    def __init__(self, apply: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.body = Body()
        self.apply_lowtide = apply
        self.tides: list[Any] = []
        self.wrapped: list[str] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.body(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        if self.apply_lowtide is not None:
            self.wrapped.append(type(self.optimizers()).__name__)
            self.tides.append(self.apply_lowtide(self))


def _optimize(pick: Callable[[Lit], nn.Module]) -> Callable[[Lit], Any]:
    return lambda lit: lowtide.optimize(
        pick(lit), budget="1GiB", optimizer=lit.optimizers(), engine="virtual:1"
    )  # fmt: skip


def _swap(lit: Lit) -> Any:
    return lowtide.apply(lit, {"swap": "all", "min_bytes": 0}, optimizer=lit.optimizers(), engine="virtual:1")


def _train(path: Path, apply: Callable[[Any], Any] | None) -> tuple[Lit, list[str]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    lit = Lit(apply)
    data = torch.utils.data.TensorDataset(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)))
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_steps=10, accelerator="cpu", default_root_dir=path, enable_model_summary=False, **quiet
    )  # fmt: skip
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
