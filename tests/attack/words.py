"""Losses over a vocabulary so large that lowtide takes them in slices, and what loops do with logits.

A model of such a draw has a head of `WORDS` words. Its loss is in the model, called as models of transformers call
theirs (`loss_function`), or in the loop (`Rig.cross_entropy`). 384 rows of 16,411 words are 24 MiB in fp32: just enough
for slices, with no threshold lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WORDS = 16_411
SAMPLES = 64
IGNORED = -100

PLACES = ("function", "function", "masked", "loop", "loop", "custom")
"""Where the loss is: transformers' own of causal or masked models, the loop, or a function that somebody set."""


@dataclass(frozen=True)
class WordLoss:
    """One such loss."""

    place: str
    cap: float = 0.0
    """Logits are capped softly here; 0: not at all."""
    ignored: float = 0.0
    """The share of rows without a word."""
    items: str = ""
    """What is given as `num_items_in_batch`: "", "int" or "tensor"."""
    smoothing: float = 0.0
    z_loss: float = 0.0
    has_weights: bool = False
    """Of classes."""

    def cross_entropy(self, loss: Callable[..., Tensor], logits: Tensor, labels: Tensor) -> Tensor:
        """`loss` of a whole batch, as a loop calls it."""
        how: dict[str, Any] = {"label_smoothing": self.smoothing, "z_loss": self.z_loss, "upcast": True}
        if self.has_weights:
            how["weight"] = torch.linspace(0.5, 1.5, WORDS)
        return loss(logits.flatten(0, 1), labels.flatten(), **how)


def drawn_loss(seed: int, *, is_inside: bool) -> WordLoss | None:
    """Of one draw in ten. `is_inside`: the plan wants a model that makes its own loss."""
    r = Random(f"{seed} loss")
    if r.random() >= 0.1:
        return None
    place = r.choice([each for each in PLACES if not (is_inside and each == "loop")])
    inside = place != "loop"
    return WordLoss(
        place,
        cap=r.choice((0.0, 0.0, 5.0)),
        ignored=r.choice((0.0, 0.3, 0.9)),
        items=r.choice(("", "int", "tensor")) if inside else "",
        smoothing=0.0 if inside else r.choice((0.0, 0.1)),
        z_loss=0.0 if inside else r.choice((0.0, 0.0, 1e-3)),
        has_weights=not inside and r.random() < 0.2,
    )


def plain_cross_entropy(
    logits: Tensor, labels: Tensor, *, upcast: bool, z_loss: float, label_smoothing: float, weight: Tensor | None = None
) -> Tensor:
    """What a loop without lowtide has."""
    whole = logits.float() if upcast else logits
    loss = F.cross_entropy(whole, labels, weight=weight, label_smoothing=label_smoothing)
    if not z_loss:
        return loss
    squares = torch.logsumexp(whole, 1).square().masked_fill(labels == IGNORED, 0.0)
    return loss + z_loss * (squares.sum() / (labels != IGNORED).sum())


def focal(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss that somebody wrote: confident rows weigh less."""
    rows, words = logits.float().view(-1, vocab_size), labels.view(-1)
    each = F.cross_entropy(rows, words, reduction="none")
    return ((1 - (-each).exp()).square() * each).sum() / (words != IGNORED).sum().clamp(min=1)


def losses_of_transformers() -> dict[str, Callable[..., Tensor]]:
    """By place."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    return {"function": ForCausalLMLoss, "masked": ForMaskedLMLoss}
