"""The modules of the observed step: which one runs, what goes into it and comes out, and whether a layer can run again.

What: ordinary module hooks (`enter`, `begin`, `end`, `leave`) keep the path of the module that is running, and make a
`Span` of each call of a layer. What a hook of the runtime could hold on to, and what a layer is given, gets a node
(`NodeRecord`) where it has none: a recipe, or a second run of the layer, may start from it.

Cost: four hooks a module call. Not covered: what operators run inside (step_recorder.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.core.recipe import RetainedInput
from lowtide.profiling.saved_tensors import SavedTensorRecorder
from lowtide.profiling.step_record import NodeRecord, Span, StepState
from lowtide.recipes.graph import Storage
from lowtide.tensors.kinds import is_plain_or_fake, tensors_in, versions_of_parameters
from lowtide.tensors.private import next_sequence_number, tree_leaves
from lowtide.tensors.snapshot import why_not_rerun
from lowtide.tensors.wrappers import inside


class ModuleWatch:
    """See the module's text. `begin_names` is called when the model's forward begins: names count from there."""

    def __init__(
        self,
        state: StepState,
        saves: SavedTensorRecorder,
        layers: tuple[str, ...],
        begin_names: Callable[[], None],
    ) -> None:
        self.state = state
        self._saves = saves
        self._layers = frozenset(layers)
        self._begin_names = begin_names
        self._num_calls: dict[str, int] = {}
        self._calls: list[Span] = []
        """Of layers, in the order in which they began."""
        self._open: list[Span] = []
        self._spans: list[Span] = []
        """Of layers, in the order in which they ended."""
        self.caught: dict[int, NodeRecord] = {}
        """Nodes of what module hooks could hold on to, by index of their storage."""
        self.skipped: frozenset[str] = frozenset()
        """Layers that only pass their input on; nothing is caught there."""
        self.is_autocast = False
        self.leaves: list[torch.Tensor] = []
        """Of what the model was called with."""
        self.batch = ""
        """Shapes and dtypes of what the model was called with; empty before it was."""

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """For before other hooks: what these run is the module's own."""
        state = self.state
        if not name and not state.ops.is_backward:
            self._enter_root(args, kwargs)
        state.path.append(name)
        self.is_autocast = torch.is_autocast_enabled(state.device.type)
        self._num_calls[name] = self._num_calls.get(name, -1) + 1

    def begin(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """For after other hooks, which may give the forward something else: there the runtime's wrapper stands."""
        if name in self._layers and self.state.is_inside:
            self._enter_layer(name, module, args, kwargs)
        self._catch(name, "input", (args, kwargs))

    def end(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        """For before other hooks: what they make of the output (the sum over tensor-parallel ranks) no wrapper sees
        there. It is caught where a module around this one gives it out, or the next one takes it in."""
        self._catch(name, "output", output)

    def leave(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        """For after other hooks."""
        state = self.state
        if len(state.path) > 1:
            state.path.pop()
        if self._open and self._open[-1].name == name:
            self._leave_layer(self._open.pop(), module)
        if not name:
            state.is_inside = False

    # -- the model -----------------------------------------------------------------------------------------------------

    def _enter_root(self, args: tuple, kwargs: dict) -> None:
        if self._num_calls.get("") is not None:
            return
        state = self.state
        state.is_inside = True
        self.batch = describe(args, kwargs)
        self.leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        # The runtime's recorder starts here: what came before has no name that a plan could use.
        state.named.clear()
        self._begin_names()
        state.ops.begin_forward()
        for record in state.storages.alive():
            # Made from what the model does not own, by operators that a planned step cannot run again.
            record.producer = None
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None:
                state.storages.enroll(leaf, "input", "input")

    # -- layers --------------------------------------------------------------------------------------------------------

    def _enter_layer(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        state = self.state
        span = Span(name=name, first_op=state.ops.count)
        with state.silently():
            span.why_not = why_not_rerun(module, args, kwargs)
        span.given, span.versions = self._given_to(name, (args, kwargs), span), versions_of_parameters(module)
        self._calls.append(span)
        self._open.append(span)
        state.layer = name

    def _given_to(self, name: str, tree: Any, span: Span) -> dict[int, int]:
        """What a layer is given, by index, and how often each was written; nodes for what has none yet."""
        state, saves = self.state, self._saves
        given: dict[int, int] = {}
        for number, leaf in enumerate(tree_leaves(tree)):
            if not isinstance(leaf, torch.Tensor):
                span.objects.append(leaf)
                continue
            local = inside(leaf)
            record = state.storages.find(local) if is_plain_or_fake(local) else None
            if record is None:
                span.why_not = "it is given a tensor that is not an ordinary one"
                continue
            given[record.index] = record.num_writes
            is_known = record.index in self.caught or record.index in saves.nodes
            if not is_known and record.index in state.named and saves.is_movable(local):
                node = self._new_node(record, local, name, "input", number)
                node.is_given = not leaf.is_floating_point() or not saves.is_activation(leaf, record)
        return given

    def _leave_layer(self, span: Span, module: nn.Module) -> None:
        state = self.state
        if any(state.storages.records[index].num_writes != writes for index, writes in span.given.items()):
            span.why_not = "it writes into its input"
        if span.versions != versions_of_parameters(module):
            span.why_not = "it writes to its own parameters"
        if any(held.grad_fn is not None for held in tensors_in([getattr(o, "__dict__", None) for o in span.objects])):
            span.why_not = "it is given an object with activations inside, which would stay as long as that does"
        span.objects.clear()
        span.end_op, span.end_sequence = state.ops.count, next_sequence_number()
        span.enough_op = min(max(self._saves.enough_op, span.first_op), span.end_op)
        self._spans.append(span)
        state.layer = self._open[-1].name if self._open else ""

    def spans(self) -> list[Span]:
        """The calls of layers, with the names of what each was given. The step is over."""
        known = {index: node.name for nodes in (self.caught, self._saves.nodes) for index, node in nodes.items()}
        records = self.state.storages.records
        for span in self._calls:
            own = [index for index in span.given if records[index].kind in ("made", "unknown")]
            span.inputs = tuple(known.get(index, records[index].name) for index in own)
        return self._spans

    # -- what a hook could hold on to ----------------------------------------------------------------------------------

    def _catch(self, name: str, side: str, tree: Any) -> None:
        """Remember which tensors an ordinary hook on this module could hold on to."""
        state, saves = self.state, self._saves
        if not state.is_inside or state.is_silent or name in self.skipped:
            return
        for number, given in enumerate(tree_leaves(tree)):
            leaf = inside(given) if isinstance(given, torch.Tensor) else None
            if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or not is_plain_or_fake(leaf):
                continue
            record = state.storages.find(leaf)
            if record is None or record.index in self.caught or not saves.is_movable(leaf):
                continue
            if record.index in state.named and saves.is_activation(leaf, record):
                self._new_node(record, leaf, name, side, number)

    def _new_node(self, record: Storage, tensor: torch.Tensor, name: str, side: str, leaf: int) -> NodeRecord:
        node = self._saves.new_node(record, tensor, self.state.named[record.index])
        node.retained_input = RetainedInput(module=name, side=side, leaf=leaf, call=self._num_calls[name])
        self.caught[record.index] = node
        return node


def describe(args: tuple, kwargs: dict[str, Any]) -> str:
    """`input_ids=int64[2, 8], labels=int64[2, 8]`: the tensors of a call, as one line."""
    parts = [("", value) for value in args] + list(kwargs.items())
    words = []
    for key, value in parts:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                dtype = str(leaf.dtype).removeprefix("torch.")
                words.append(f"{key}{'=' if key else ''}{dtype}{list(leaf.shape)}")
    return ", ".join(words)
