"""Put the layers back that a trace skipped: their operators, nodes and bytes are copies of a neighbour's.

What: in a run of equal layers F M s s ... s L, only F, M and L ran (fake_model.py). In the profile of that step each
`s` gets M's forward operators behind M's own, and M's backward operators before M's own, so that backward comes to the
last copy first. What M makes, each copy makes: what is near M (M itself, the layer behind it, where M's output is saved
and freed, and the backward of the layer before it, where gradients flow) is as far from the copy. What lies anywhere
else happens once, and only moves. Bytes are counted anew, from when each storage is there: gradients add up, and some
storages live to the end of the forward pass.

Cost: some microseconds a copied storage. Not covered: operators that run between the layers, and a backward in which
those of two layers mix; the caller then traces every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lowtide.core.profile import ByteSpan, LayerCall, Profile, Shift, Site, byte_curve
from lowtide.core.recipe import Recipe
from lowtide.profiling.fake.fake_model import CannotSkipError, Run


def expand(
    profile: Profile, spans: Iterable[ByteSpan], gradients: Iterable[ByteSpan], runs: tuple[Run, ...]
) -> Profile:
    """The profile as it would be if the skipped layers of `runs` had run. `spans` and `gradients` are those of its
    `op_bytes` and `op_gradient_bytes`. Raises CannotSkipError if that is not clear."""
    for run in runs:
        expansion = _Expansion(profile, run)
        profile = expansion.profile()
        spans, gradients = list(expansion.spans(spans)), list(expansion.spans(gradients))
    num_ops = len(profile.op_names)
    op_bytes, gradient_bytes = byte_curve(spans, num_ops), byte_curve(gradients, num_ops)
    return dataclasses.replace(profile, op_bytes=op_bytes, op_gradient_bytes=gradient_bytes)


class _Expansion:
    """One run. Its layers have numbers: M is 0, the copies follow, L comes after them."""

    def __init__(self, profile: Profile, run: Run) -> None:
        self.old = profile
        self.names = run
        first, model, *skipped, last = run
        calls = {call.name: call for call in profile.calls}
        if len(calls) < len(profile.calls) or any(name not in calls for name in run):
            raise CannotSkipError
        self.num_copies = len(skipped)
        self.model, self.last = calls[model], calls[last]
        self.last_back, self.back, self.first_back, end = self._backward(last, model, first)
        self.ends = (self.first_back, end)
        self.length, self.back_length = self.model.end_op - self.model.first_op, self.first_back - self.back
        lengths = self.last.end_op - self.last.first_op, self.back - self.last_back
        # What runs between layers would have seen a skipped layer's input and output as one tensor.
        if self.model.end_op != self.last.first_op or lengths != (self.length, self.back_length):
            raise CannotSkipError
        self.num_sequences = self.last.end_sequence - self.model.end_sequence
        inserts = [(self.model.end_op, self.length), (self.back, self.back_length)]
        self.shift = Shift((point, self.num_copies * length) for point, length in inserts)
        self.sequences = Shift([(self.model.end_sequence, self.num_copies * self.num_sequences)])

    def _backward(self, *layers: str) -> list[int]:
        """Where the backward operators of these layers begin, which follow one another, and where the last ones end."""
        starts, end = [], -1
        for layer in layers:
            names = enumerate(self.old.op_names[self.old.num_forward_ops :], self.old.num_forward_ops)
            mine = [index for index, name in names if _lies_in(name, layer)]
            if not mine or len(mine) != mine[-1] + 1 - mine[0] or end not in (-1, mine[0]):
                raise CannotSkipError
            starts.append(mine[0])
            end = mine[-1] + 1
        return [*starts, end]

    def profile(self) -> Profile:
        """But for the columns of bytes."""
        old, skipped = self.old, self.names[2:-1]
        signatures = dict(zip(old.layers, old.signatures, strict=True))
        nodes = (self._site(node, number) for node in old.nodes for number in self._numbers(node.born))
        return dataclasses.replace(
            old,
            signatures=tuple(signatures[self.model.name if name in skipped else name] for name in old.layers),
            num_forward_ops=self.shift.end(old.num_forward_ops),
            op_names=self._column(old.op_names, self._renamed),
            op_seconds=self._column(old.op_seconds, lambda seconds, number: seconds),
            nodes=tuple(sorted(nodes, key=lambda node: node.saved)),
            staying=self._repeated(old.staying),
            hidden=self._repeated(old.hidden),
            calls=tuple(map(self._call, old.calls)),
        )

    def spans(self, spans: Iterable[ByteSpan]) -> Iterator[ByteSpan]:
        """When the storages are there that were there then, and their copies."""
        for start, end, nbytes in spans:
            for number in self._numbers(start):
                yield self._at(start, number), self._at(end, number, is_end=True), nbytes

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _numbers(self, op: int) -> Iterable[int | None]:
        """Of the layers in which what operator `op` makes is made; None: in no layer of the run, or before M."""
        if self.model.first_op <= op < self.model.end_op or self.back <= op < self.first_back:
            return range(self.num_copies + 1)
        if self.last.first_op <= op < self.last.end_op or self.last_back <= op < self.back:
            return (self.num_copies + 1,)
        return (None,)

    def _at(self, index: int, number: int | None, *, is_end: bool = False) -> int:
        """An operator, or the end of a lifetime, that concerns what is made in layer `number`."""
        place = index - is_end
        if number is not None and index < len(self.old.op_names):
            copies = min(number, self.num_copies)
            if self.model.first_op <= place < self.last.end_op:
                return index + copies * self.length
            if self.last_back <= place < self.ends[number <= self.num_copies]:
                return index + self.num_copies * self.length + (self.num_copies - copies) * self.back_length
        return self.shift.end(index) if is_end else self.shift.op(index)

    def _sequence(self, value: int, number: int | None) -> int:
        """Autograd's number, counted from the start of the forward pass: after M's begin, up to L's last."""
        if number is None or not self.model.end_sequence - self.num_sequences <= value <= self.last.end_sequence:
            return self.sequences.op(value)
        return value + min(number, self.num_copies) * self.num_sequences

    # -- what comes out --------------------------------------------------------------------------------------------

    def _renamed(self, name: str, number: int | None) -> str:
        """A name around M, as it is around the layer."""
        around = () if number is None else self.names[min(number, self.num_copies) :]
        for old, new in zip((*self.names[:2], self.last.name), around):
            if _lies_in(name, old):
                return new + name[len(old) :]
        return name

    def _column(self, column: Sequence, copied: Callable[[Any, int], Any]) -> tuple:
        """A column of the operators, with M's entries again for each copy."""
        model, numbers = self.model, range(1, self.num_copies + 1)
        forward = (copied(entry, number) for number in numbers for entry in column[model.first_op : model.end_op])
        backward = (
            copied(entry, number) for number in reversed(numbers) for entry in column[self.back : self.first_back]
        )
        return (
            *column[: model.end_op],
            *forward,
            *column[model.end_op : self.back],
            *backward,
            *column[self.back :],
        )

    def _repeated(self, entries: Sequence) -> tuple:
        """Named entries, with M's again for each copy."""
        mine = [place for place, entry in enumerate(entries) if _lies_in(entry.name, self.model.name)]
        behind = mine[-1] + 1 if mine else 0
        copies = []
        for number in range(1, self.num_copies + 1):
            for entry in (entries[place] for place in mine):
                fields = {"name", "layer"} & {field.name for field in dataclasses.fields(entry)}
                names = {field: self._renamed(getattr(entry, field), number) for field in fields}
                copies.append(dataclasses.replace(entry, **names))
        return (*entries[:behind], *copies, *entries[behind:])

    def _site(self, site: Site, number: int | None) -> Site:
        reads = [self._at(read, number) for read in site.reads]
        in_model = [read for read in site.reads if self.back <= read < self.first_back]
        if number is None and in_model and any(self.last_back <= read < self.back for read in site.reads):
            reads += [self._at(read, copy) for copy in range(1, self.num_copies + 1) for read in in_model]
        retained = site.retained_input
        if retained is not None:
            retained = dataclasses.replace(retained, module=self._renamed(retained.module, number))
        return dataclasses.replace(
            site,
            name=self._renamed(site.name, number),
            layer=site.layer and self._renamed(site.layer, number),
            retained_input=retained,
            born=self._at(site.born, number),
            saved=self._at(site.saved, number),
            dies=self._at(site.dies, number, is_end=True),
            reads=tuple(sorted(reads)),
            release=self._at(site.release, number, is_end=True),
            first_sequence=self._sequence(site.first_sequence, number),
            last_sequence=self._sequence(site.last_sequence, number),
            recipe=self._recipe(site.recipe, number),
            collective_recipe=self._recipe(site.collective_recipe, number),
        )

    def _recipe(self, recipe: Recipe | None, number: int | None) -> Recipe | None:
        """It starts from what is around the layer."""
        if recipe is None or number is None:
            return recipe
        inputs = (dataclasses.replace(entry, name=self._renamed(entry.name, number)) for entry in recipe.inputs)
        return dataclasses.replace(recipe, inputs=tuple(inputs))

    def _call(self, call: LayerCall) -> LayerCall:
        number = self.names.index(call.name) - 1 if call.name in self.names[1:] else None
        like = call if number in (None, 0, self.num_copies + 1) else self.model
        first = self._at(like.first_op, number)
        return dataclasses.replace(
            like,
            name=call.name,
            first_op=first,
            end_op=first + like.end_op - like.first_op,
            enough_op=first + like.enough_op - like.first_op,
            end_sequence=self.sequences.end(like.end_sequence)
            if number is None
            else self._sequence(like.end_sequence, number),
            inputs=tuple(self._renamed(name, number) for name in like.inputs),
        )


def _lies_in(name: str, layer: str) -> bool:
    return name == layer or name.startswith((f"{layer}.", f"{layer}:"))
