"""A small U-Net: convolutions, group norms, max-pooling down, transposed convolutions up, and skips that live long.

What: `build_unet(sizes)` is a segmentation model in the form of a transformers model, so that the methods which put
transformers' layers under checkpointing work on it too. Every block is such a layer. `UNet(pixel_values, labels)` gives
an output with `.loss`, one class for each pixel.
Why our own: the model that is asked must not be one of language only. Skips are saved early and read late, which no
stack of equal layers has, and a max-pool saves int64 indices.
Cost: that of the convolutions. Not covered: attention in the middle, as diffusion models have it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SemanticSegmenterOutput

NUM_CLASSES = 4
_GROUPS = 4


class UNetConfig(PreTrainedConfig):
    """`channels` of the first level, doubled `levels` times on the way down."""

    model_type = "benchmark-unet"

    def __init__(self, channels: int = 16, levels: int = 2, dropout: float = 0.1, **rest: Any) -> None:
        super().__init__(**rest)
        self.channels = channels
        self.levels = levels
        self.dropout = dropout


class Block(GradientCheckpointingLayer):
    """Two convolutions, each with a norm and a ReLU, and dropout of whole channels."""

    def __init__(self, num_in: int, num_out: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(num_in, num_out, 3, padding=1),
            nn.GroupNorm(_GROUPS, num_out),
            nn.ReLU(),
            nn.Dropout2d(dropout),
            nn.Conv2d(num_out, num_out, 3, padding=1),
            nn.GroupNorm(_GROUPS, num_out),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class UNet(PreTrainedModel):
    """See the module."""

    config_class = UNetConfig
    main_input_name = "pixel_values"
    supports_gradient_checkpointing = True

    def __init__(self, config: UNetConfig) -> None:
        super().__init__(config)
        widths = [config.channels * 2**level for level in range(config.levels + 1)]
        pairs = list(itertools.pairwise(widths))
        self.first = Block(3, widths[0], config.dropout)
        self.down = nn.ModuleList(Block(narrow, wide, config.dropout) for narrow, wide in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in reversed(pairs))
        self.up = nn.ModuleList(Block(2 * narrow, narrow, config.dropout) for narrow, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], NUM_CLASSES, 1)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SemanticSegmenterOutput:
        """`pixel_values`: samples x 3 x side x side; `labels`: samples x side x side."""
        x = self.first(pixel_values)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(functional.max_pool2d(x, 2))
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((skips.pop(), grow(x)), dim=1))
        logits = self.head(x)
        return SemanticSegmenterOutput(loss=functional.cross_entropy(logits, labels), logits=logits)


def build_unet(sizes: Mapping[str, int]) -> UNet:
    """`hidden` channels at the first level, `layers` levels below it."""
    return UNet(UNetConfig(channels=sizes["hidden"], levels=sizes["layers"]))


def side_of(sizes: Mapping[str, int]) -> int:
    """Pixels a side, for about `sequence` pixels: a multiple of what the lowest level needs."""
    multiple = 2 ** sizes["layers"]
    return max(round(sizes["sequence"] ** 0.5 / multiple), 1) * multiple
