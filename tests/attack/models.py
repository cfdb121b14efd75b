"""Models that nobody named: blocks put together at random, and the traits that only a whole model has.

`build` makes the same model from the same `ModelDraw` each time. Its forward takes tokens or vectors, what `tell` says
of this step, and labels if the loss is its own; it returns a tensor, a tuple, a dictionary or a dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attack import chosen, hidden, moody, ordinary
from tests.attack.now import TOKENS, WIDTH, numbers
from tests.attack.words import IGNORED, WORDS, WordLoss, focal, losses_of_transformers

CLASSES = 7
BLOCKS = {**ordinary.BLOCKS, **ordinary.WIDE, **ordinary.ROW_WISE, **chosen.BLOCKS, **moody.BLOCKS, **hidden.BLOCKS}

TRAITS = (
    "tokens",  # an embedding at the start
    "tied",  # the head has the embedding's weight
    "twice",  # the first layer is called once more at the end
    "keywords",  # layers get their inputs by keyword
    "tuples",  # layers return tuples
    "mapping",  # the model returns a dictionary
    "dataclass",  # the model returns a dataclass
    "early_exit",  # in odd steps the last layer is left out
    "bare",  # no residual connections
    "post_norm",
    "autocast",
    "bfloat16",
    "input_gradients",
    "frozen_first",
    "frozen_every_other",
    "shared_list",  # all layers add to one list
)


@dataclass(frozen=True)
class ModelDraw:
    """One model: the blocks of its layers, each with a seed, and its traits."""

    layers: tuple[tuple[tuple[str, int], ...], ...]
    traits: frozenset[str]
    own_loss: bool
    words: WordLoss | None = None

    @property
    def num_classes(self) -> int:
        return CLASSES if self.words is None else WORDS


@dataclass
class Output:
    """What some models return."""

    logits: Tensor
    loss: Tensor | None = None


class Layer(nn.Module):
    """Some blocks one after the other, with a residual connection and a norm around them."""

    def __init__(self, blocks: tuple[tuple[str, int], ...], traits: frozenset[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[name](Random(seed)) for name, seed in blocks)
        self.norm = nn.LayerNorm(WIDTH) if "post_norm" in traits else None
        self.is_bare, self.gives_tuple = "bare" in traits, "tuples" in traits
        self.log: list[int] | None = None

    def forward(self, x: Tensor, now: Any = None) -> Any:
        if self.log is not None:
            self.log.append(len(self.log))
        for block in self.blocks:
            h = block(x, now)
            x = h if self.is_bare else x + h
        if self.norm is not None:
            x = self.norm(x)
        return (x, None) if self.gives_tuple else x


class Model(nn.Module):
    """Inlet, layers, outlet, and perhaps the loss."""

    reads_numbers = True

    def __init__(self, drawn: ModelDraw) -> None:
        super().__init__()
        self.traits, self.own_loss = drawn.traits, drawn.own_loss
        classes = drawn.num_classes
        self.inlet: nn.Module = nn.Embedding(classes, WIDTH) if "tokens" in drawn.traits else nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(blocks, drawn.traits) for blocks in drawn.layers)
        self.outlet = nn.Linear(WIDTH, classes, bias="tied" not in drawn.traits)
        if drawn.traits >= {"tokens", "tied"}:
            self.outlet.weight = self.inlet.weight
        if "shared_list" in drawn.traits:
            log: list[int] = []
            for layer in self.layers:
                layer.log = log

    def forward(self, x: Tensor, labels: Tensor | None = None, now: Any = None) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in self.traits):
            h = self.inlet(x)
            for layer in self._path(now):
                h = layer(x=h, now=now) if "keywords" in self.traits else layer(h, now)
                h = h[0] if isinstance(h, tuple) else h
            logits = self._capped(self.outlet(h))
        loss = self.loss_of(logits, labels) if self.own_loss else None
        if "mapping" in self.traits:
            return {"logits": logits, "loss": loss} if loss is not None else {"logits": logits}
        if "dataclass" in self.traits:
            return Output(logits, loss)
        return logits if loss is None else loss

    def _capped(self, logits: Tensor) -> Tensor:
        return logits

    def loss_of(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        return loss_of(logits, labels)

    def _path(self, now: Any) -> list[nn.Module]:
        layers = list(self.layers)
        if "early_exit" in self.traits and numbers(self, now).is_odd:
            layers = layers[:-1]
        return [*layers, *layers[:1]] if "twice" in self.traits else layers


class WordModel(Model):
    """One whose head has words, and whose loss is called as models of transformers call theirs."""

    def __init__(self, drawn: ModelDraw) -> None:
        super().__init__(drawn)
        assert drawn.words is not None
        self.words = drawn.words

    @property
    def loss_function(self) -> Any:
        return vars(self).get("_loss_function", losses_of_transformers().get(self.words.place, focal))

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        self._loss_function = value

    def get_output_embeddings(self) -> nn.Module:
        return self.outlet

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.words.cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def loss_of(self, logits: Tensor, labels: Tensor | None) -> Tensor:
        items: Any = {"": None, "int": 97, "tensor": torch.tensor(97)}[self.words.items]
        made: Tensor = self.loss_function(logits, labels, vocab_size=WORDS, num_items_in_batch=items)
        return made


def logits_of(output: Any) -> Tensor | None:
    """The logits in whatever a model gave, if they are there."""
    if isinstance(output, dict):
        output = output["logits"]
    elif isinstance(output, Output):
        output = output.logits
    return output if output.ndim > 1 else None


def loss_of(output: Any, labels: Tensor | None) -> Tensor:
    """The loss of whatever a model gave."""
    if isinstance(output, dict):
        output = output.get("loss", output["logits"])
    elif isinstance(output, Output):
        output = output.logits if output.loss is None else output.loss
    if output.ndim == 0:
        return output
    assert labels is not None
    return F.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def build(drawn: ModelDraw, seed: int) -> Model:
    """The model, in train mode, with weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = Model(drawn) if drawn.words is None else WordModel(drawn)
    if "bfloat16" in drawn.traits:
        model.to(torch.bfloat16)
    for index, layer in enumerate(model.layers):
        is_frozen = "frozen_every_other" in drawn.traits and index % 2
        if is_frozen or ("frozen_first" in drawn.traits and index == 0):
            layer.requires_grad_(False)
    return model.train()


def batch_of(drawn: ModelDraw, seed: int, num_samples: int = 4, num_tokens: int = TOKENS) -> dict[str, Tensor]:
    """One micro-batch from a generator of its own: inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    classes, shape = drawn.num_classes, (num_samples, num_tokens)
    labels = torch.randint(classes, shape, generator=generator)
    if drawn.words is not None:
        labels.masked_fill_(torch.rand(shape, generator=generator) < drawn.words.ignored, IGNORED)
    if "tokens" in drawn.traits:
        return {"x": torch.randint(classes, shape, generator=generator), "labels": labels}
    x = torch.randn(num_samples, num_tokens, WIDTH, generator=generator)
    x = x.bfloat16() if "bfloat16" in drawn.traits else x
    return {"x": x.requires_grad_() if "input_gradients" in drawn.traits else x, "labels": labels}
