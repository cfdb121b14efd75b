"""What was observed: sites, recipes, and the profile of one step. Plain data, no torch.

A *step* here is one micro-batch: its forward pass and its backward pass. Time is counted in operators: operator `i` is
the i-th that ran, forward first. A lifetime is half open: born at `a`, gone at `b` means present while operators
`a .. b-1` run.

Nodes are what a plan decides about: *sites* (storages that autograd saves) and *retained inputs* (module inputs or
outputs that it does not save, but that a recipe may start from). Both have a name, the path of the module that was
running and the operator that produced the storage (`model.layers.3.mlp.mul`), unique within one forward pass.

Units: bytes, seconds, operator indices. Not covered: how a profile comes about (profiling/).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from lowtide.core.json_text import LEAST, OLD_NAME, build, parse_json
from lowtide.core.recipe import Codec, Recipe, RetainedInput
from lowtide.errors import ConfigError, FieldError

PROFILE_SCHEMA = 6
_MOST_AMOUNT = 10**18
"""Bytes, seconds and numbers of operators above it are a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One node: a storage that autograd saves, or a retained input that it does not."""

    name: str
    layer: str | None
    """`model.layers.3`, or None outside the layers."""
    nbytes: int
    dtype: str
    op: str
    """Short name of the operator that produced it (`mul`, `sdpa`)."""
    retained_input: RetainedInput | None = field(default=None, metadata={OLD_NAME: "anchor"})
    """None for a site; a node that autograd saves is never a retained input."""
    born: int = field(metadata={LEAST: -1})
    """Forward operator that produced it; -1 if it was there before the first."""
    saved: int
    """Forward operator after which its (first) hook ran: from here on it can be sent away."""
    dies: int
    """The first operator that runs after all other owners than autograd have released it."""
    reads: tuple[int, ...] = ()
    """Backward operators before which autograd opens it, ascending; empty for a retained input."""
    release: int = 0
    """The first operator that runs after backward has released it (if nothing else holds it). 0 for a retained
    input."""
    first_sequence: int = 0
    """Autograd's sequence number at its first save, or where a retained input is caught, counted from the start of the
    forward pass."""
    last_sequence: int = 0
    """The same at its last save: backward first reads it at the operator with this number."""
    recipe: Recipe | None = None
    why_no_recipe: str = ""
    """'random', 'collective', 'unknown producer', 'mutated', 'input' or another short phrase; empty with a recipe."""
    collective_recipe: Recipe | None = None
    """A recipe with collectives, for a node that no rank can recompute alone. All ranks must run it together, so it is
    used only where a rule names the node."""
    codec: Codec | None = None
    """The smallest form that held it in this step; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes that are on the device under every plan, counted by unique storage."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    """Gradients of the trained parameters, once they all exist."""
    optimizer: int = 0
    """State between steps."""
    optimizer_movable: int = 0
    """The part of `optimizer` in tensors of 16,384 elements and more: it may be elsewhere between steps."""
    optimizer_unit: int = 0
    """The most of `optimizer_movable` that one bucket must hold: of a parameter, or of a stretch of its elements."""
    optimizer_temporaries: int = 0
    """Most that `optimizer.step()` needs beyond everything else."""
    optimizer_share_at_once: float = 1.0
    """Part of `optimizer_movable` whose parameters these temporaries are of: all where it steps a list of all of them,
    that of the largest where it steps one after the other."""
    inputs: int = 0
    """The batch."""
    foreign: int = field(default=0, metadata={OLD_NAME: "others"})
    """On the device before the first observed step, and of none of these: batches that are there already, other
    models. 0 where the device does not count its bytes."""
    rounding: int = 0
    """Most that the device's allocator gives out beyond what it is asked for."""
    fingerprint: int = 0
    """For each storage that a recipe makes, while the plan has it made: what the allocator gives out for the words by
    which it is compared (runtime/recompute/fingerprint.py). 0 on the host, which keeps them elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenBytes:
    """A storage that a custom `autograd.Function` keeps by itself (`ctx.x = tensor`): no plan can reach it."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StayingBytes:
    """A storage that autograd saves and that no plan can decide about. It is counted in `Profile.op_bytes`."""

    name: str
    layer: str | None
    nbytes: int
    dtype: str
    reason: str
    """'never read by backward', 'not a plain tensor on the device', 'another activation has the same name'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One call of a layer: what running it once more would take."""

    name: str
    first_op: int
    end_op: int
    """Its forward operators are `first_op .. end_op - 1`."""
    enough_op: int
    """A second run of it ends before this operator: from here on it saves nothing."""
    end_sequence: int
    """Autograd's sequence number when it was over, counted from the start of the forward pass."""
    inputs: tuple[str, ...]
    """Names of the nodes that it was given."""
    op_bytes: tuple[int, ...]
    """For each of its operators: bytes alive of what the call itself has made, without the nodes."""
    staying_bytes: int
    """What it makes that autograd saves and that is no node: a second run holds it until its backward is over."""
    why_not: str = ""
    """Why it cannot be run again; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One observed step. The columns `op_*` have one entry for each operator, forward first."""

    model: str
    """Class name of the model."""
    device: str
    """'cpu', 'cuda', ...: where times were measured, or the hardware whose roofline gave them."""
    is_fake: bool
    """True when no device ran: times are a roofline's, bytes are exact."""
    batch: str
    """Shapes and dtypes of the batch, as one line; the key under which a plan is cached."""
    layers: tuple[str, ...]
    signatures: tuple[str, ...]
    """Parallel to `layers`: layers of one signature saved the same things."""
    state: StateBytes
    num_forward_ops: int
    op_names: tuple[str, ...]
    """`model.layers.3.mlp.mul`; backward operators end in `:backward`."""
    op_seconds: tuple[float, ...]
    op_bytes: tuple[int, ...]
    """Bytes alive while the operator runs and its outputs exist, without `state` (gradients excepted: those that have
    been made so far are in here) and without the nodes."""
    op_gradient_bytes: tuple[int, ...]
    """The part of `op_bytes` that is gradients of parameters made so far (each from the operator that made it on)."""
    nodes: tuple[Site, ...]
    """In order of `saved`."""
    staying: tuple[StayingBytes, ...] = ()
    """What autograd saves beyond the sites."""
    hidden: tuple[HiddenBytes, ...] = ()
    """What lives from forward to backward although no hook saw it."""
    calls: tuple[LayerCall, ...] = ()
    """Calls of the layers, in order."""
    num_collectives: int = 0
    """Calls in the forward pass that wait for other ranks."""
    loss: str = "plain"
    """'sliced' where the loss was taken in slices of rows (`memory.loss`)."""
    loss_rows: int | None = None
    """Of a block of head and loss, where that was asked for."""
    layer_rows: int | None = None
    """Of a block of a layer, likewise."""
    row_wise: tuple[str, ...] = ()
    """Patterns of the modules that were taken in such blocks in place of layers."""
    layer_weights: tuple[int, ...] = ()
    """Parallel to `layers`: bytes of the weights of each that can be elsewhere until its turn. Empty: not known."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """The nodes that autograd saves."""
        return tuple(node for node in self.nodes if node.retained_input is None)

    @property
    def saved_bytes(self) -> int:
        """Unique bytes that plain autograd keeps between forward and backward."""
        return sum(site.nbytes for site in self.sites)

    def with_times(self, share: float) -> Profile:
        """The same step in so much of the time."""
        seconds = tuple(seconds * share for seconds in self.op_seconds)
        return dataclasses.replace(self, op_seconds=seconds, nodes=tuple(_faster(node, share) for node in self.nodes))

    def with_loop_bytes(self, nbytes: int) -> Profile:
        """The same step, with so many bytes more between forward and backward: what the loop around the model takes for
        a loss of its own."""
        op_bytes = list(self.op_bytes)
        op_bytes[self.num_forward_ops] += nbytes
        return dataclasses.replace(self, op_bytes=tuple(op_bytes))

    def without_sizes(self) -> Profile:
        """The same step without the recipes that hold for its shapes only."""

        def free(node: Site) -> Site:
            if node.collective_recipe is not None:
                return dataclasses.replace(node, collective_recipe=None)
            if node.recipe is None or node.recipe.can_follow_sizes:
                return node
            return dataclasses.replace(node, recipe=None, why_no_recipe="holds for one shape only")

        return dataclasses.replace(self, nodes=tuple(map(free, self.nodes)))

    def without_recipes(self, names: Collection[str]) -> Profile:
        """The same step, in which these nodes have no recipe."""
        return self._with_nodes(names, recipe=None, why_no_recipe="does not hold in every step")

    def without_codecs(self, names: Collection[str]) -> Profile:
        """The same step, in which these nodes are stored as they are."""
        return self._with_nodes(names, codec=None)

    def _with_nodes(self, names: Collection[str], **fields: Any) -> Profile:
        if not names:
            return self
        nodes = (dataclasses.replace(node, **fields) if node.name in names else node for node in self.nodes)
        return dataclasses.replace(self, nodes=tuple(nodes))

    def without_second_runs(self, layers: Collection[str]) -> Profile:
        """The same step, in which these layers cannot be run again."""
        if not layers:
            return self
        calls = (
            dataclasses.replace(call, why_not="a step has refused it") if call.name in layers else call
            for call in self.calls
        )
        return dataclasses.replace(self, calls=tuple(calls))

    def to_json(self) -> str:
        """JSON text; `Profile.from_json` gives back an equal profile."""
        return json.dumps({"schema": PROFILE_SCHEMA, **dataclasses.asdict(self)}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote. Raises `ConfigError` when the text is something else."""
        document = parse_json(text, "profile", "; write one: lowtide profile RUN.yaml --out profile.json")
        if not isinstance(document, dict) or "schema" not in document:
            raise ConfigError(
                "profile: this is no profile of lowtide; write one: lowtide profile RUN.yaml --out profile.json"
            )
        if document.pop("schema") != PROFILE_SCHEMA:
            raise ConfigError("profile: written by another version of lowtide; profile the model again")
        try:
            profile = build(cls, document, _MOST_AMOUNT)
            _check(profile)
        except FieldError as mistake:
            raise ConfigError(f"profile: not a profile of lowtide ({mistake}); profile the model again") from None
        return profile


def _faster(node: Site, share: float) -> Site:
    alone, together = (
        None if recipe is None else dataclasses.replace(recipe, seconds=recipe.seconds * share)
        for recipe in (node.recipe, node.collective_recipe)
    )
    codec = None if node.codec is None else dataclasses.replace(node.codec, seconds=node.codec.seconds * share)
    return dataclasses.replace(node, recipe=alone, collective_recipe=together, codec=codec)


def _check(profile: Profile) -> None:
    """What the parts of an edited profile must have in common. Raises `FieldError`."""
    num_ops, names = len(profile.op_names), {node.name for node in profile.nodes}
    for column in ("op_seconds", "op_bytes", "op_gradient_bytes"):
        if (length := len(getattr(profile, column))) != num_ops:
            raise FieldError(column, f"expected {num_ops} entries as in op_names, not {length}")
    if len(profile.signatures) != len(profile.layers):
        raise FieldError("signatures", f"expected one for each of {len(profile.layers)} layers")
    if profile.layer_weights and len(profile.layer_weights) != len(profile.layers):
        raise FieldError("layer_weights", f"expected one for each of {len(profile.layers)} layers")
    if not 0 < profile.num_forward_ops < num_ops:
        raise FieldError("num_forward_ops", f"expected a number from 1 to {num_ops - 1}")
    if len(names) != len(profile.nodes):
        raise FieldError("nodes", "two nodes have one name")
    for index, node in enumerate(profile.nodes):
        _check_node(node, names, profile, "nodes", index)
    for index, call in enumerate(profile.calls):
        where = ("calls", index)
        if not 0 <= call.first_op <= call.enough_op <= call.end_op <= profile.num_forward_ops:
            raise FieldError((*where, "first_op"), f"expected operators within 0 to {profile.num_forward_ops}")
        if len(call.op_bytes) != call.end_op - call.first_op:
            raise FieldError((*where, "op_bytes"), "expected one number for each operator of the call")
        if not names.issuperset(call.inputs):
            raise FieldError((*where, "inputs"), "expected names of nodes")


def _check_node(node: Site, names: set[str], profile: Profile, *where: str | int) -> None:
    num_ops = len(profile.op_names)
    for name in ("born", "saved", "dies", "release"):
        if not -1 <= getattr(node, name) <= num_ops + 1:
            raise FieldError((*where, name), f"expected an operator's number from -1 to {num_ops + 1}")
    if not node.born <= node.saved <= profile.num_forward_ops or node.saved < 0:
        raise FieldError((*where, "saved"), f"expected a forward operator's number, at least {max(node.born, 0)}")
    if node.dies < max(node.born, 0):
        raise FieldError((*where, "dies"), f"expected an operator's number, at least {max(node.born, 0)}")
    if list(node.reads) != sorted(node.reads) or any(
        not profile.num_forward_ops <= read <= num_ops for read in node.reads
    ):
        raise FieldError((*where, "reads"), f"expected ascending numbers from {profile.num_forward_ops} to {num_ops}")
    if node.layer is not None and node.layer not in profile.layers:
        raise FieldError((*where, "layer"), "expected the name of a layer, or null")
    for kind in ("recipe", "collective_recipe"):
        recipe = getattr(node, kind)
        if recipe is not None and not names.issuperset(recipe.nodes):
            raise FieldError((*where, kind, "inputs"), "expected names of nodes")


ByteSpan = tuple[int, int, int]
"""The operators while which something is there (first, end), and its bytes."""


def byte_curve(spans: Iterable[ByteSpan], num_ops: int) -> tuple[int, ...]:
    """The sum of bytes at each operator."""
    changes = [0] * (num_ops + 1)
    for first, end, nbytes in spans:
        changes[first] += nbytes
        changes[max(first, end)] -= nbytes
    return tuple(accumulate(changes[:num_ops]))


class Shift:
    """How numbers move when others are inserted."""

    def __init__(self, inserts: Iterable[tuple[int, int]]) -> None:
        """inserts: the number before which something is inserted, and how long that is."""
        inserts = sorted(inserts)
        self._points = [point for point, _ in inserts]
        self._sums = [0, *accumulate(length for _, length in inserts)]

    def op(self, index: int) -> int:
        """An operator: it comes after what is inserted at its place."""
        return index + self._sums[bisect.bisect_right(self._points, index)]

    def end(self, index: int) -> int:
        """The end of a lifetime: it comes before what is inserted at its place."""
        return index + self._sums[bisect.bisect_left(self._points, index)]


def layer_of(name: str, layers: Iterable[str]) -> str | None:
    """The layer that a name lies in."""
    parts = name.split(".")
    known = set(layers)
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in known:
            return prefix
    return None
