"""Layers that are run again as a whole, from their kept or swapped inputs: a fate that a solved plan can have.

What: `with_reruns` turns the profile of a step into that of the same step with some layers run again. Their forward
operators stand a second time before the first backward operator that reads what the layer saved. What it saved is gone
in between, and no node any more; what it was given stays, as a site that is read when the layer runs again. A solver
then plans the rest as always. `choices` says which sets of layers are worth a try.

Why a profile and not a fate of items: everything after it (ticks, lifetimes, sequence numbers, the program, the
timeline) stays as it is.

A second run ends where nothing is saved any more: before the last product of an MLP, say, whose input is all that
backward needs. Those operators take no time here. Their bytes are counted, for a run that is fingerprinted to its end.

Cost: linear in operators and nodes. Not covered: the time of a second run that goes to its end all the same (the
first of a plan, one with Functions or compiled parts); layers that write into their inputs, or that are given something
that is no node (`LayerCall.why_not`); the random state that each run holds (5 KB of main memory).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from lowtide.core.profile import ByteSpan, LayerCall, Profile, Shift, Site, byte_curve

_GONE = "its layer runs again"


def can_rerun(profile: Profile) -> tuple[str, ...]:
    """Layers of which every call can be run again, and that save something beside their inputs, in order."""
    refused = {call.name for call in profile.calls if call.why_not}
    called = [call for call in profile.calls if call.end_op > call.first_op and call.name not in refused]
    saving = {rerun.call.name for rerun in _RerunProfile(profile, called, 0.0).reruns.values()}
    return tuple(name for name in profile.layers if name in saving)


@dataclass(frozen=True, slots=True)
class _Rerun:
    """One call of a layer that is run again."""

    call: LayerCall
    at: int
    """Backward operator before which it runs again, in the old count."""
    start: int
    """Its first operator, in the new count."""

    @property
    def length(self) -> int:
        return self.call.end_op - self.call.first_op


def call_seconds(profile: Profile, layer: str, more_seconds: float = 0.0) -> float:
    """What running a layer once more takes. `more_seconds`: of each call, beside its operators."""
    calls = [call for call in profile.calls if call.name == layer]
    return sum(more_seconds + sum(profile.op_seconds[call.first_op : call.enough_op]) for call in calls)


def with_reruns(profile: Profile, layers: Collection[str], *, more_seconds: float = 0.0) -> Profile:
    """The step in which every call of `layers` runs again before backward needs it. `more_seconds`: what a second run
    takes beside its operators."""
    own = [call for call in profile.calls if call.name in layers and call.end_op > call.first_op]
    if not own:
        return profile
    return _RerunProfile(profile, own, more_seconds).profile()


class _RerunProfile:
    def __init__(self, profile: Profile, calls: Sequence[LayerCall], more_seconds: float) -> None:
        self.old = profile
        self.more_seconds = more_seconds
        self.calls = sorted(calls, key=lambda call: call.first_op)
        self.starts = [call.first_op for call in self.calls]
        self.inputs = {name for call in calls for name in call.inputs}
        self.gone = {node.name: call for node in profile.nodes if (call := self._drops(node)) is not None}
        ends: dict[int, int] = {}
        self.over: dict[int, int] = {}
        """By its first operator: when the backward of a call is over, and with it what the call holds on to."""
        for node in profile.nodes:
            call = self.gone.get(node.name)
            if call is not None and node.reads:
                ends[call.first_op] = min(ends.get(call.first_op, node.reads[0]), node.reads[0])
                self.over[call.first_op] = max(self.over.get(call.first_op, 0), node.release)
        reads = sorted(
            (max(node.reads), call.first_op)
            for node in profile.nodes
            if (call := self.gone.get(node.name)) and node.reads
        )
        # A layer that saves nothing of its own has nothing to run again for.
        points = sorted((self._first_open(at, first, reads), -first) for first, at in ends.items())
        by_start = {call.first_op: call for call in self.calls}
        self.reruns: dict[int, _Rerun] = {}
        start = 0
        for at, negative in points:
            rerun = _Rerun(by_start[-negative], at, at + start)
            self.reruns[-negative] = rerun
            start += rerun.length
        self.shift = Shift((rerun.at, rerun.length) for rerun in self.reruns.values())

    def _first_open(self, at: int, first: int, reads: list[tuple[int, int]]) -> int:
        """The first backward operator of the call that reads its nodes at `at`: a parameter that is saved inside is
        among what a second run gives back, and may be asked for before any node."""
        name = next(call.name for call in self.calls if call.first_op == first)
        others = [op for op, other in reads if other != first and op < at]
        least = max([self.old.num_forward_ops, *(op + 1 for op in others)])
        names = self.old.op_names
        while at > least and names[at - 1].startswith(f"{name}.") and names[at - 1].endswith(":backward"):
            at -= 1
        return at

    def _call_of(self, op: int) -> LayerCall | None:
        place = bisect.bisect_right(self.starts, op) - 1
        call = self.calls[place] if place >= 0 else None
        return call if call is not None and op < call.end_op else None

    def _drops(self, node: Site) -> LayerCall | None:
        """The call that makes the node, and with which it goes; None where it stays."""
        call = self._call_of(node.born)
        if call is None or node.name in self.inputs:
            return None
        # Saved after the call was over, too: somebody else reads it.
        return None if node.retained_input is None and node.last_sequence > call.end_sequence else call

    # -- what comes out --------------------------------------------------------------------------------------------

    def profile(self) -> Profile:
        old = self.old
        pieces = sorted(self.reruns.values(), key=lambda rerun: rerun.start)

        def column(values: Sequence, part: Callable[[_Rerun], Sequence]) -> list:
            result: list = []
            position = 0
            for rerun in pieces:
                result += values[position : rerun.at]
                position = rerun.at
                result += part(rerun)
            return result + list(values[position:])

        names = column(old.op_names, lambda rerun: old.op_names[rerun.call.first_op : rerun.call.end_op])
        seconds = column(old.op_seconds, self._rerun_seconds)
        gradients = column(old.op_gradient_bytes, lambda rerun: [old.op_gradient_bytes[rerun.at - 1]] * rerun.length)
        op_bytes = map(sum, zip(column(old.op_bytes, self._rerun_bytes), byte_curve(self._gone_spans(), len(names))))
        return dataclasses.replace(
            old,
            op_names=tuple(names),
            op_seconds=tuple(seconds),
            op_gradient_bytes=tuple(gradients),
            op_bytes=tuple(op_bytes),
            nodes=tuple(sorted(self._nodes(), key=lambda node: node.saved)),
            calls=(),
        )

    def _rerun_seconds(self, rerun: _Rerun) -> Sequence[float]:
        call = rerun.call
        seconds = list(self.old.op_seconds[call.first_op : call.enough_op]) + [0.0] * (call.end_op - call.enough_op)
        seconds[0] += self.more_seconds
        return seconds

    def _rerun_bytes(self, rerun: _Rerun) -> list[int]:
        """Beside nodes: what lives across the point at which it runs, and what the call itself makes."""
        around = min(self.old.op_bytes[rerun.at - 1], self.old.op_bytes[rerun.at])
        return [around + made for made in rerun.call.op_bytes]

    def _gone_spans(self) -> Iterator[ByteSpan]:
        """The bytes of what is no node any more: while the forward runs, and from the second run to its last reader."""
        num_ops = len(self.old.op_names)
        for node in self.old.nodes:
            call = self.gone.get(node.name)
            if call is not None:
                yield node.born, self.shift.end(min(node.dies, num_ops)), node.nbytes
            else:
                call = self._call_of(node.born)
            rerun = self.reruns.get(call.first_op) if call is not None else None
            if rerun is None:
                continue
            # Also what stays as a node is made a second time.
            shift = rerun.start - rerun.call.first_op
            stop = min(node.dies, rerun.call.end_op) + shift
            if node.name in self.gone and node.reads:
                stop = max(stop, self.shift.end(node.release))
            yield node.born + shift, stop, node.nbytes
        for first, rerun in self.reruns.items():
            yield rerun.start, self.shift.end(self.over[first]), rerun.call.staying_bytes

    def _nodes(self) -> list[Site]:
        kept = [node for node in self.old.nodes if node.name not in self.gone]
        there = {node.name for node in kept}
        given: dict[str, list[_Rerun]] = {}
        for rerun in self.reruns.values():
            for name in rerun.call.inputs:
                given.setdefault(name, []).append(rerun)
        return [self._node(node, given.get(node.name, []), there) for node in kept]

    def _node(self, node: Site, readers: list[_Rerun], there: set[str]) -> Site:
        recipe, why = node.recipe, node.why_no_recipe
        is_made = self._call_of(node.born) is not None
        if recipe is not None and (readers or is_made or not there.issuperset(recipe.nodes)):
            recipe, why = None, _GONE
        together = node.collective_recipe
        if together is not None and (readers or is_made or not there.issuperset(together.nodes)):
            together = None
        reads = {self.shift.op(read) for read in node.reads}
        release = self.shift.end(node.release) if node.reads else 0
        saved, first, last = node.saved, node.first_sequence, node.last_sequence
        if readers:
            reads |= {rerun.start for rerun in readers}
            release = max(release, *(self.shift.end(self.over[rerun.call.first_op]) for rerun in readers))
            # Handed over when the layer begins.
            begins = min(rerun.call.first_op for rerun in readers)
            if node.retained_input is not None or begins <= node.saved:
                saved = max(begins - 1, node.born, 0)
                first = self._sequence_at(saved)
            last = max(0 if node.retained_input is not None else last, *(rerun.call.end_sequence for rerun in readers))
        return dataclasses.replace(
            node,
            retained_input=None if readers else node.retained_input,
            saved=saved,
            dies=self.shift.end(node.dies),
            reads=tuple(sorted(reads)),
            release=release,
            first_sequence=first,
            last_sequence=last,
            recipe=recipe,
            why_no_recipe=why,
            collective_recipe=together,
            codec=None if readers or is_made else node.codec,
        )

    def _sequence_at(self, op: int) -> int:
        """Autograd's number after operator `op`, as far as saves show it: that of the next save, since a copy's
        deadline counts from here, and an early one costs no memory."""
        return min((node.first_sequence for node in self.old.sites if node.saved > op), default=0)
