"""Modules for Lightning's Trainer. A file of their own: whoever collects the tests does not wait for that import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn


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


class Two(Lit):
    def __init__(self) -> None:
        super().__init__(None)
        self.head = nn.Linear(8, 8)
