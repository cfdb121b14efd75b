"""How many bytes of state other optimizers would have: what people ask before they choose one.

What: `state_by_kind` counts, for parameters with these shapes, the state between steps of the optimizers that are used
most. Exact for what is named; a few bytes of step counters are left out.

Per parameter with n elements of w bytes each:
- SGD: none. With momentum: n w.
- AdamW, as torch has it: 2 n w, both moments in the type of the weights.
- AdamW with fp32 masters, for weights of 16 bits: 12 n, a master copy and both moments in fp32 (Rajbhandari et al.,
  ZeRO, 2020, section 3.1: K = 12). Weights of 32 bits are their own masters: 8 n.
- Adafactor (Shazeer and Stern, 2018, without momentum, as torch has it): one value for each row and each column of the
  last two dimensions of a tensor; n values of a vector; in the type of the weights.
- AdamW in 8 bits (Dettmers et al., 2022; bitsandbytes): 2 n bytes and, for each block of 256 elements, two fp32 scales;
  tensors below 4,096 elements stay in fp32, 8 n.
- Muon (Jordan et al., 2024): n w of momentum for matrices inside layers; AdamW for all others: embeddings, the head,
  norms and biases.

Of a parameter that ranks share (`fully_shard`), n counts the elements of the first rank, which has the most rows. Not
counted there: Adafactor, since torch's cannot step shards, and AdamW in 8 bits, whose blocks of shards nobody here has
tried.

Not covered: temporaries of a step; optimizers that shard, offload or quantise their state in ways of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_BLOCK = 256
_LEAST_QUANTISED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter."""

    shape: tuple[int, ...]
    element_bytes: int
    is_in_layer: bool
    """Inside a repeated block; else it is an embedding, a head or a norm at the end."""
    is_trained: bool = True
    """An optimizer has no state for others."""

    num_shards: int = 1
    """Ranks that share it: `fully_shard` deals its rows, and the first rank has the most."""

    @property
    def count(self) -> int:
        """Elements on the first rank."""
        rows, *inner = self.shape or (1,)
        return math.ceil(rows / self.num_shards) * math.prod(inner)

    @property
    def nbytes(self) -> int:
        return self.count * self.element_bytes


def _adamw(weight: Weight) -> int:
    return 2 * weight.nbytes


def _masters(weight: Weight) -> int:
    return (12 if weight.element_bytes < 4 else 8) * weight.count


def _adafactor(weight: Weight) -> int:
    if len(weight.shape) < 2:
        return weight.nbytes
    *outer, rows, columns = weight.shape
    return math.prod(outer) * (rows + columns) * weight.element_bytes


def _eight_bits(weight: Weight) -> int:
    if weight.count < _LEAST_QUANTISED:
        return 8 * weight.count
    return 2 * weight.count + 2 * 4 * math.ceil(weight.count / _BLOCK)


def _muon(weight: Weight) -> int:
    return weight.nbytes if len(weight.shape) == 2 and weight.is_in_layer else _adamw(weight)


_KINDS: dict[str, Callable[[Weight], int]] = {
    "SGD": lambda weight: 0,
    "SGD with momentum": lambda weight: weight.nbytes,
    "Adafactor": _adafactor,
    "AdamW in 8 bits": _eight_bits,
    "Muon": _muon,
    "AdamW": _adamw,
    "AdamW with fp32 masters": _masters,
}

NOT_OF_SHARDS = ("Adafactor", "AdamW in 8 bits")
"""Kinds that are not counted for parameters in shards."""


def state_by_kind(weights: Sequence[Weight]) -> dict[str, int]:
    """Name of the optimizer -> bytes of its state between steps, on the first of the ranks that share the weights."""
    trained = [weight for weight in weights if weight.is_trained]
    left_out = NOT_OF_SHARDS if any(weight.num_shards > 1 for weight in weights) else ()
    return {name: sum(map(count, trained)) for name, count in _KINDS.items() if name not in left_out}


def shard_of(weight: Weight, num_shards: int) -> Weight:
    """What the first of the ranks has of a parameter that they share."""
    return dataclasses.replace(weight, num_shards=num_shards)
