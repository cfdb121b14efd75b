"""How one storage is made from others, or stored smaller to the bit, as data.

What: `Recipe` has inputs and steps, each step one operator with its arguments; `Geometry` is how a tensor lies over its
storage; `RetainedInput` is where module hooks catch a storage. Made by `recipes/build.py`, followed by
`recipes/execute.py`. `Codec` is a smaller form of a kept or swapped storage: a mask in one bit for each element, say.
Made by profiling/smaller.py, weighed by planner/smaller.py, carried out by tensors/codecs.py and
runtime/recompute/recipe_graph.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

# Steps that look at bytes in another dtype.
_REINTERPRETS = frozenset({"aten.view.dtype", "aten.view_as_real.default", "aten.view_as_complex.default"})
# Functional collectives, and what waits for them.
_COLLECTIVES, _WAIT = "_c10d_functional.", "_c10d_functional.wait_tensor."


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a tensor views a storage: size, stride, offset. Counts are elements of `dtype`, not bytes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    """`bfloat16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeInput:
    """One tensor that a recipe starts from."""

    kind: str
    """'node' (a site or a retained input), 'parameter' or 'buffer'."""
    name: str
    """Name of the node, or dotted name of the parameter or buffer."""
    geometry: Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeStep:
    """One operator of a recipe.

    `args` and `kwargs` are JSON values, in which a dictionary with one key stands for something else:
    {"input": i} the i-th input of the recipe; {"step": i, "output": k} output k of the i-th step (0 if it has one);
    {"dtype": "bfloat16"}, {"device": "cuda"} (always the model's own), {"layout": "strided"},
    {"memory_format": "contiguous_format"}; {"float": "inf"} for what JSON cannot write; {"list": [...]} is not needed.
    """

    op: str
    """`aten.mul.Tensor`: namespace, packet, overload."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A straight-line list of operators that makes a node's storage again, bit for bit.

    The last step's output `output` is a tensor whose storage has exactly the node's bytes.
    """

    inputs: tuple[RecipeInput, ...]
    steps: tuple[RecipeStep, ...]
    output: int = 0
    seconds: float
    transient_bytes: int
    """Most bytes that exist at once while it runs, beyond its inputs and including its result."""
    LEFT_FIELDS: ClassVar[frozenset[str]] = frozenset({"is_shape_free"})
    """Of files that older versions wrote: not needed any more."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes it reads."""
        return tuple(dict.fromkeys(entry.name for entry in self.inputs if entry.kind == "node"))

    @property
    def can_follow_sizes(self) -> bool:
        """Whether a forward pass of other shapes, which is compared with it, can say in which sizes (recipes/build.py).
        Else it holds for its own shapes only."""
        return not any(step.op in _REINTERPRETS for step in self.steps) and not self.collectives

    @property
    def collectives(self) -> tuple[str, ...]:
        """Names of the collectives that it issues, in order (`all_gather_into_tensor`); all ranks must run it."""
        ops = (step.op for step in self.steps)
        return tuple(op.split(".")[1] for op in ops if op.startswith(_COLLECTIVES) and not op.startswith(_WAIT))

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the process groups of its collectives, as the rank that observed them calls them."""
        steps = (step for step in self.steps if step.op.startswith(_COLLECTIVES) and not step.op.startswith(_WAIT))
        return tuple(dict.fromkeys(step.args[-1] for step in steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedInput:
    """Where an ordinary module hook can catch a tensor."""

    module: str
    side: str
    """'input' or 'output'."""
    leaf: int
    """Which leaf of the (args, kwargs), or of the output, as `torch.utils._pytree` flattens them."""
    call: int = 0
    """Which call of that module within one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """A smaller form of one storage. Decoding it gives every bit of the storage back."""

    kind: str
    """One of `tensors.codecs.KINDS`."""
    nbytes: int
    """Bytes of the smaller form of the whole storage."""
    work_bytes: int
    """Most bytes that encoding or decoding needs beside the storage and its smaller form."""
    seconds: float
    """Encoding once and decoding once."""
