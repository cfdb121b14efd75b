"""Put the layers back that a trace skipped: their operators, storages, nodes and recipes are copies of a neighbour's.

What: in a run of equal layers F M s s ... s L, only F, M and L ran (fake_model.py). Each `s` gets a copy of M's
forward operators where it would have run, and of M's backward operators where its backward would have. An index of M is
read as a distance from the start of the layer that it lies in: M itself, the next layer (M's output is saved and freed
there), or the one before (gradients flow there); the copy gets the same distance in its own neighbours. What lies
anywhere else happens once, and only moves.

Cost: a few microseconds a copied storage. Not covered: operators that run between the layers, and a backward in which
those of two layers mix; the caller then traces every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.core.profile import Shift
from lowtide.core.recipe import Recipe
from lowtide.profiling.fake.fake_model import CannotSkipError, Run
from lowtide.profiling.step_record import NodeRecord, Operators, Span, Trace
from lowtide.recipes.graph import Storage


def expand(trace: Trace, runs: tuple[Run, ...]) -> Trace:
    """The trace as it would be if the skipped layers of `runs` had run. Raises CannotSkipError if that is not clear."""
    for run in runs:
        trace = _Expansion(trace, run).done()
    return trace


@dataclass(slots=True, frozen=True)
class _Place:
    """Where a layer's operators are: starts and ends, forward and backward, and its sequence numbers."""

    name: str
    first: int
    end: int
    back: int
    back_end: int
    sequence: int


class _Expansion:
    def __init__(self, trace: Trace, run: Run) -> None:
        self.trace = trace
        first, second, *self.skipped, last = run
        spans: dict[str, Span] = {}
        for span in trace.spans:
            if span.name in spans:
                raise CannotSkipError
            spans[span.name] = span
        if any(name not in spans for name in run):
            raise CannotSkipError
        self.first, self.model, self.last = (self._place(spans[name]) for name in (first, second, last))
        if self.last.end - self.last.first != self.model.end - self.model.first:
            raise CannotSkipError
        # What runs between layers would have seen a skipped layer's input and output as one tensor.
        if self.model.end != self.last.first or self.last.back_end != self.model.back:
            raise CannotSkipError
        model_span = spans[second]
        length, back_length = self.model.end - self.model.first, self.model.back_end - self.model.back
        self.num_sequences = model_span.end_sequence - model_span.first_sequence
        inserts, sequences = [], []
        points = []
        for name in self.skipped:
            span = spans[name]
            back = self._back_point(span.first_sequence)
            points.append((span.first_op, back, span.first_sequence))
            inserts += [(span.first_op, length), (back, back_length)]
            sequences.append((span.first_sequence, self.num_sequences))
        self.shift, self.sequences = Shift(inserts), Shift(sequences)
        start_sequence = trace.ops.start_sequence
        self.relative = Shift([(point - start_sequence, length) for point, length in sequences])
        self.copies = list(self._copies(points, length, back_length))

    def _place(self, span: Span) -> _Place:
        trace = self.trace
        mine = [
            index
            for index in range(trace.ops.num_forward, len(trace.ops.names))
            if span.first_sequence <= trace.ops.sequences[index] < span.end_sequence
        ]
        if not mine or mine[-1] - mine[0] + 1 != len(mine):
            raise CannotSkipError
        return _Place(span.name, span.first_op, span.end_op, mine[0], mine[-1] + 1, span.first_sequence)

    def _back_point(self, sequence: int) -> int:
        """The first backward operator of anything that ran before `sequence` in forward."""
        trace = self.trace
        for index in range(trace.ops.num_forward, len(trace.ops.names)):
            if 0 <= trace.ops.sequences[index] < sequence:
                return index
        raise CannotSkipError

    def _copies(self, points: list[tuple[int, int, int]], length: int, back_length: int) -> Iterator[_Place]:
        """Where the skipped layers' operators are going to be."""
        for number, (first, back, sequence) in enumerate(points):
            # Of several layers at one place, the earlier comes first in forward and last in backward.
            start = self.shift.end(first) + sum(length for other in points[:number] if other[0] == first)
            back_start = self.shift.end(back) + sum(back_length for other in points[number + 1 :] if other[1] == back)
            before = sum(self.num_sequences for other in points[:number] if other[2] == sequence)
            yield _Place(
                self.skipped[number],
                start,
                start + length,
                back_start,
                back_start + back_length,
                self.sequences.end(sequence) + before,
            )

    # -- numbers ---------------------------------------------------------------------------------------------------

    def _moved(self, place: _Place) -> _Place:
        op, sequence = self.shift.op, self.sequences.op(place.sequence)
        first, back = op(place.first), op(place.back)
        return _Place(
            place.name, first, first + place.end - place.first, back, back + place.back_end - place.back, sequence
        )

    def _index(self, places: list[_Place], *, is_end: bool, is_backward: bool = False) -> Callable[[int], int]:
        """How an index that concerns a thing of M reads for the same thing of a copy, between its neighbours."""
        before, own, after = places
        model, first, last = self.model, self.first, self.last
        absolute = self.shift.end if is_end else self.shift.op
        late = 1 if is_end else 0
        num_ops = len(self.trace.ops.names)

        def read(index: int) -> int:
            if index < model.first + late or index == num_ops:
                return absolute(index)
            if index < model.end + late:
                return own.first + index - model.first
            if index < last.end + late:
                return after.first + index - last.first
            if index < last.back + late:
                return absolute(index)
            if index < last.back_end + late and not is_backward:
                return after.back + index - last.back
            if index < model.back_end + late:
                return own.back + index - model.back
            if first.back + late <= index < first.back_end + late and is_backward:
                return before.back + index - first.back
            return absolute(index)

        return read

    # -- the copy --------------------------------------------------------------------------------------------------

    def done(self) -> Trace:
        trace, copies = self.trace, self.copies
        own = [self._moved(self.first), self._moved(self.model), *copies, self._moved(self.last)]
        storages: list[Storage] = []
        replaced: dict[int, Storage] = {}
        cloned: list[dict[int, Storage]] = [{} for _ in copies]
        for storage in trace.storages:
            if not self._is_of_model(storage):
                replaced[storage.index] = self._add(storages, self._moved_storage(storage, own))
                continue
            for number in range(len(copies) + 1):
                copy = self._add(storages, self._copied_storage(storage, own[number : number + 3]))
                if number:
                    cloned[number - 1][storage.index] = copy
                else:
                    replaced[storage.index] = copy
        where = [replaced, *cloned]
        return dataclasses.replace(
            trace,
            ops=Operators(
                clock=trace.ops.clock,
                names=self._column(trace.ops.names, renamed=True),
                seconds=self._column(trace.ops.seconds),
                sequences=self._sequence_column(),
                num_forward=self.shift.op(trace.ops.num_forward - 1) + 1,
                start_sequence=trace.ops.start_sequence,
                temporary=self._temporary(),
            ),
            storages=storages,
            off_device={table[i].index for table in where for i in trace.off_device if i in table},
            nodes=sorted(self._nodes(own, where), key=lambda node: (node.saved, node.storage.index)),
            never_read=list(self._never_read(own, where)),
            staying={table[i].index: why for table in where for i, why in trace.staying.items() if i in table},
            gradients={table[i].index for table in where for i in trace.gradients if i in table},
            hidden=[table[s.index] for table in where for s in trace.hidden if s.index in table],
            spans=list(self._spans(own)),
        )

    def _is_of_model(self, storage: Storage) -> bool:
        born, model = storage.born, self.model
        return model.first <= born < model.end or model.back <= born < model.back_end

    def _add(self, storages: list[Storage], storage: Storage) -> Storage:
        storage.index = len(storages)
        storages.append(storage)
        return storage

    def _moved_storage(self, storage: Storage, own: list[_Place]) -> Storage:
        dies = storage.dies
        if dies is not None:
            is_flow = self.last.back <= storage.born < self.model.back < dies <= self.model.back_end
            # A gradient that flowed from L to M now flows from L to the copy before it.
            dies = own[-2].back + dies - self.model.back if is_flow else self.shift.end(dies)
        born = self.shift.op(storage.born) if storage.born >= 0 else -1
        return dataclasses.replace(storage, born=born, dies=dies)

    def _copied_storage(self, storage: Storage, places: list[_Place]) -> Storage:
        is_backward = storage.born >= self.model.back
        born = self._index(places, is_end=False, is_backward=is_backward)(storage.born)
        dies = storage.dies
        if dies is not None:
            dies = self._index(places, is_end=True, is_backward=is_backward)(dies)
        return dataclasses.replace(storage, name=self._renamed(storage.name, places), born=born, dies=dies)

    def _renamed(self, name: str, places: list[_Place]) -> str:
        """A name around M, as it is around the copy."""
        for old, new in zip((self.first.name, self.model.name, self.last.name), places):
            if name == old or name.startswith((old + ".", old + ":")):
                return new.name + name[len(old) :]
        return name

    def _with_recipes(self, node: NodeRecord, places: list[_Place]) -> NodeRecord:
        """The node, whose recipes start from what is around the copy."""

        def renamed(recipe: Any) -> Any:
            if not isinstance(recipe, Recipe):
                return recipe
            inputs = tuple(dataclasses.replace(i, name=self._renamed(i.name, places)) for i in recipe.inputs)
            return dataclasses.replace(recipe, inputs=inputs)

        alone, together = map(renamed, node.recipes)
        return dataclasses.replace(node, recipes=(alone, together))

    def _column(self, column: list, renamed: bool = False) -> list:
        """A column of the operators, with M's entries again at each copy's place."""
        model, position = self.model, 0
        result: list = []
        pieces = [(copy.first, model.first, model.end, copy) for copy in self.copies]
        pieces += [(copy.back, model.back, model.back_end, copy) for copy in self.copies]
        for start, begin, end, copy in sorted(pieces, key=lambda piece: piece[0]):
            missing = start - len(result)
            result += column[position : position + missing]
            position += missing
            part = column[begin:end]
            result += [self._renamed_op(entry, copy) for entry in part] if renamed else part
        return result + column[position:]

    def _temporary(self) -> list[tuple[int, int]]:
        column = [0] * len(self.trace.ops.names)
        for number, nbytes in self.trace.ops.temporary:
            column[number] = nbytes
        return [(number, nbytes) for number, nbytes in enumerate(self._column(column)) if nbytes]

    def _renamed_op(self, name: str, copy: _Place) -> str:
        old = self.model.name
        return copy.name + name[len(old) :] if name.startswith((old + ".", old + ":")) else name

    def _sequence_column(self) -> list[int]:
        trace, model = self.trace, self.model
        moved = [number if number < 0 else self.sequences.op(number) for number in trace.ops.sequences]
        column = self._column(moved)
        for copy in self.copies:
            for offset in range(model.back_end - model.back):
                old = trace.ops.sequences[model.back + offset]
                column[copy.back + offset] = copy.sequence + old - model.sequence
        return column

    def _nodes(self, own: list[_Place], where: list[dict[int, Storage]]) -> Iterator[NodeRecord]:
        for node in self.trace.nodes:
            if not self._is_of_model(node.storage):
                yield self._moved_node(node, where[0][node.storage.index], own[-3:])
                continue
            for number, table in enumerate(where):
                yield self._copied_node(node, table[node.storage.index], own[number : number + 3])

    def _moved_node(self, node: NodeRecord, storage: Storage, around_last: list[_Place]) -> NodeRecord:
        model, last = self.model, self.last
        reads = [self.shift.op(index) for index in node.reads]
        in_model = [index for index in node.reads if model.back <= index < model.back_end]
        is_shared = any(last.back <= index < last.back_end for index in node.reads)
        if in_model and is_shared:
            reads += [copy.back + index - model.back for copy in self.copies for index in in_model]
        # L starts from what M made: now from what the copy before it made.
        is_last = node.name.startswith(last.name + ".")
        return dataclasses.replace(
            self._with_recipes(node, around_last) if is_last else node,
            storage=storage,
            saved=self.shift.op(node.saved) if node.saved >= 0 else -1,
            reads=sorted(reads),
            release=self.shift.end(node.release),
            first_sequence=self.relative.op(node.first_sequence),
            last_sequence=self.relative.op(node.last_sequence),
        )

    def _copied_node(self, node: NodeRecord, storage: Storage, places: list[_Place]) -> NodeRecord:
        read = self._index(places, is_end=False)
        gone = self._index(places, is_end=True)
        retained_input = node.retained_input
        if retained_input is not None:
            retained_input = dataclasses.replace(retained_input, module=self._renamed(retained_input.module, places))
        return dataclasses.replace(
            self._with_recipes(node, places),
            storage=storage,
            name=self._renamed(node.name, places),
            retained_input=retained_input,
            saved=read(node.saved),
            reads=[read(index) for index in node.reads],
            release=gone(node.release) if node.reads else 0,
            first_sequence=self._sequence(node.first_sequence, places),
            last_sequence=self._sequence(node.last_sequence, places),
        )

    def _sequence(self, number: int, places: list[_Place]) -> int:
        """A sequence number relative to the forward's start, near M, as it is near the copy."""
        start = self.trace.ops.start_sequence
        absolute = number + start
        # Numbers are those after a save: the operator's own is one less.
        for old, new in ((self.last, places[2]), (self.model, places[1])):
            if old.sequence < absolute <= old.sequence + self.num_sequences:
                return new.sequence + absolute - old.sequence - start
        return self.relative.op(number)

    def _never_read(self, own: list[_Place], where: list[dict[int, Storage]]) -> Iterator[tuple[int, int]]:
        for index, release in self.trace.never_read:
            if not self._is_of_model(self.trace.storages[index]):
                yield where[0][index].index, self.shift.end(release)
                continue
            for number, table in enumerate(where):
                gone = self._index(own[number : number + 3], is_end=True)
                yield table[index].index, gone(release)

    def _spans(self, own: list[_Place]) -> Iterator[Span]:
        copies = {copy.name: number for number, copy in enumerate(self.copies)}
        model = next(span for span in self.trace.spans if span.name == self.model.name)
        for span in self.trace.spans:
            number, like = copies.get(span.name), span
            first, sequence, inputs = self.shift.op(span.first_op), self.sequences.op(span.first_sequence), span.inputs
            if span.name == self.last.name:
                inputs = tuple(self._renamed(name, own[-3:]) for name in inputs)
            if number is not None:
                like, first, sequence = model, self.copies[number].first, self.copies[number].sequence
                # Two places of F and M come before the first copy.
                inputs = tuple(self._renamed(name, own[number + 1 : number + 4]) for name in model.inputs)
            yield dataclasses.replace(
                like,
                name=span.name,
                first_op=first,
                end_op=first + like.end_op - like.first_op,
                enough_op=first + like.enough_op - like.first_op,
                first_sequence=sequence,
                end_sequence=sequence + like.end_sequence - like.first_sequence,
                inputs=inputs,
            )
