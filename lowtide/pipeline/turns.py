"""What two halves of a pair may hold at once: they take turns at exchanges, so one's place says the other's.

What: of a pair (overlap.py) the backward begins, and each half lets the other one run when it waits for rows of an
exchange. So while a half runs from one of its waits to the next, the other one stands at a known one. `slots_of` lists
these moments, and `shares_of` deals the room that a pair has to both: to each what it needs at least there, and of the
rest a part as large as what it could use.
Exchanges are seen when a chunk is observed. How many rows one brings is up to the routing: `with_more_rows` gives a
profile the bytes of a micro-batch that gets more of them.
Why it is safe: in each slot the two parts are together no more than the room, and a plan keeps each operator below its
part in all slots that have it.
Cost: operators times exchanges, in numpy. Not covered: a half whose number of exchanges differs from one micro-batch to
the next; any other way to carry out a pair than `Overlap`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.profile import Profile, Shift, Site
from lowtide.planner.problem import op_base_bytes
from lowtide.planner.problem import state_bytes as bytes_of_state

_UNLIMITED = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One exchange of rows, as a chunk was observed. Operators are numbered as in its profile."""

    start: int
    """The operator that starts it."""
    wait: int
    """The first operator after somebody has waited for it."""
    num_sent: int
    """Rows."""
    num_received: int
    nbytes: int
    """Of what is received."""
    num_ranks: int
    takes_turn: bool
    """Whether the other half of a pair may run before it is waited for. Counts of rows are needed at once."""


@dataclass(frozen=True, slots=True)
class Half:
    """The forward or the backward of a chunk: operators `first .. end - 1`, and those before which it stands."""

    first: int
    end: int
    stops: tuple[int, ...]

    def running(self, number: int) -> range | None:
        """The operators from one stop to the next; None where it has no more. Those around a stop are in both pieces,
        since a layer that runs again may do so on either side."""
        bounds = (self.first, *self.stops, self.end)
        if number + 1 >= len(bounds):
            return None
        return range(max(self.first, bounds[number] - 1), min(self.end, bounds[number + 1] + 1))

    def standing(self, number: int) -> range:
        """The operators around its stop after `number` pieces; after the last piece the last operator."""
        if number == 0:
            return range(0)
        if number > len(self.stops):
            return range(self.end - 1, self.end)
        stop = self.stops[number - 1]
        return range(max(self.first, stop - 1), min(self.end, stop + 1))


def halves_of(num_ops: int, num_forward_ops: int, exchanges: Sequence[Exchange]) -> tuple[Half, Half]:
    """Forward and backward of a chunk."""
    waits = [each.wait for each in exchanges if each.takes_turn]
    forward = tuple(wait for wait in waits if wait <= num_forward_ops)
    backward = tuple(wait for wait in waits if wait > num_forward_ops)
    return Half(0, num_forward_ops, forward), Half(num_forward_ops, num_ops, backward)


def slots_of(forward: Half, backward: Half) -> Iterator[tuple[range, range]]:
    """Operators of both: while those of one half are at work, the other half is at those. Empty: it has not begun.
    Backward begins; each runs to its next wait and hands over; one that is over hands over for good."""
    for number in range(max(len(forward.stops), len(backward.stops)) + 1):
        runs = backward.running(number)
        if runs is not None:
            yield forward.standing(number), runs
        runs = forward.running(number)
        if runs is not None:
            yield runs, backward.standing(number + 1)


Needs = tuple[np.ndarray, np.ndarray]
"""Of a chunk, for each operator: bytes that no plan can move, and those that are there if all is kept."""


def needs_of(profile: Profile) -> Needs:
    """Beside the rank's state, whose gradients exist already."""
    beside = bytes_of_state(profile, has_gradients=True)
    sites = {index: node for index, node in enumerate(profile.nodes) if node.retained_input is None}
    staying = {
        index: index in sites and node.dies >= min(node.reads, default=0) for index, node in enumerate(profile.nodes)
    }
    least, most = (
        op_base_bytes(profile, kept, has_gradients=True) - beside
        for kept in (staying, {index: index in sites for index in staying})
    )
    for index, node in sites.items():
        for read in () if staying[index] else node.reads:
            least[read] += node.nbytes  # whatever its fate, it is there when it is read
    return np.minimum(least, most), most


def shares_of(
    forward: tuple[Half, Needs], backward: tuple[Half, Needs], room_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each operator of the two chunks: the bytes that it may have while it is in the pair."""
    own = [np.full(len(least), _UNLIMITED, np.int64) for _, (least, _) in (forward, backward)]
    for ops in slots_of(forward[0], backward[0]):
        least, most = (
            [_highest(needs[column], each) for (_, needs), each in zip((forward, backward), ops)] for column in (0, 1)
        )
        rest = room_bytes - sum(least)
        could = [high - low for low, high in zip(least, most)]
        share = could[0] / sum(could) if sum(could) else 0.5
        given = least[0] + math.floor(rest * share)
        for vector, each, limit in zip(own, ops, (given, room_bytes - given)):
            vector[each.start : each.stop] = np.minimum(vector[each.start : each.stop], limit)
    return own[0], own[1]


def _highest(column: np.ndarray, ops: range) -> int:
    return int(column[ops.start : ops.stop].max()) if ops else 0


# -- the turn from forward to backward --------------------------------------------------------------------------------


def with_turn(profile: Profile, beside: np.ndarray, *, turn_bytes: int) -> Profile:
    """The same step with so many bytes more at each operator, and one of no time between forward and backward, at which
    there are `turn_bytes` beside what the step itself holds then."""
    turn = profile.num_forward_ops
    shift = Shift([(turn, 1)])
    # Alive at the turn is what both neighbours have.
    around = min(profile.op_bytes[turn - 1 : turn + 1])
    made = profile.op_gradient_bytes[turn - 1]

    def column(values: Sequence, at_turn: object) -> tuple:
        return (*values[:turn], at_turn, *values[turn:])

    nbytes = [own + more for own, more in zip(profile.op_bytes, beside.tolist(), strict=True)]
    return dataclasses.replace(
        profile,
        op_names=column(profile.op_names, "the turn from forward to backward"),
        op_seconds=column(profile.op_seconds, 0.0),
        op_bytes=column(nbytes, around + turn_bytes),
        op_gradient_bytes=column(profile.op_gradient_bytes, made),
        nodes=tuple(
            dataclasses.replace(
                node, dies=shift.end(node.dies), reads=tuple(map(shift.op, node.reads)), release=shift.end(node.release)
            )
            for node in profile.nodes
        ),
    )


# -- rows ----------------------------------------------------------------------------------------------------------

Rows = list[tuple[int, int]]
"""Of each exchange of a forward: rows sent, rows received."""
_MORE_ROWS = 1.25
"""So many times the most rows of a micro-batch that was seen are planned for."""


def growth_of(exchanges: Sequence[Exchange], num_forward_ops: int, most: Rows) -> tuple[float, ...] | None:
    """How many times the rows of each exchange a plan has to have room for. `most`: the most of any micro-batch.

    What comes to the experts of a rank is up to the routing, and grows by `_MORE_ROWS` beyond what was seen. What comes
    back from them is as much as was sent. In backward it is the other way round. None: nothing came to the experts.
    """
    forward = [each for each in exchanges if each.start < num_forward_ops]
    found: list[float] = []
    away: list[int] = []
    """Exchanges of which nothing has come back yet."""
    way_there: dict[int, int] = {}
    """Of an exchange that brings back what another one sent: that other one."""
    for number, (each, (_, received)) in enumerate(zip(forward, most, strict=True)):
        there = next((n for n in reversed(away) if _is_back(forward[n], each)), None)
        ratio = _ratio(received, each.num_received)
        if not each.takes_turn or each.num_ranks == 1:
            found.append(ratio)
        elif there is not None:
            away.remove(there)
            way_there[number] = there
            found.append(ratio)
        elif not each.num_received:
            return None
        else:
            away.append(number)
            found.append(_MORE_ROWS * ratio)
    left = [number for number, each in enumerate(forward) if each.takes_turn]
    for each in exchanges[len(forward) :]:
        while left and not _is_back(forward[left[-1]], each):
            left.pop()
        if not left:
            found.append(_MORE_ROWS)
            continue
        number = left.pop()
        there = way_there.get(number)
        sent = _ratio(most[number][0], forward[number].num_sent)
        found.append(sent if there is None else found[there])
    return tuple(found)


def _is_back(one: Exchange, other: Exchange) -> bool:
    """Whether the second goes the way of the first, the other way round."""
    both = one.takes_turn and other.takes_turn
    return both and (one.num_sent, one.num_received) == (other.num_received, other.num_sent)


def _ratio(most: int, seen: int) -> float:
    return most / seen if seen else 1.0


def with_more_rows(profile: Profile, exchanges: Sequence[Exchange], growth: Sequence[float]) -> Profile:
    """The same step, in which what is computed on exchanged rows has more bytes.

    `growth`, one for each exchange: how many times the rows that were received. What an exchange brings is there from
    its start on, and everything that is made until the next one is taken to grow with it.
    """
    num_ops = len(profile.op_bytes)
    times = np.ones(num_ops)
    ends = [each.wait + 1 for each in exchanges[1:]] + [num_ops] * bool(exchanges)
    for each, end, factor in zip(exchanges, ends, growth, strict=True):
        most = profile.num_forward_ops if each.start < profile.num_forward_ops else num_ops
        # Room for the rows is made, and what is sent is copied, just before.
        part = slice(max(0, each.start - 2), min(end, most))
        times[part] = np.maximum(times[part], factor)
    if not (times > 1.0).any():
        return profile
    op_bytes = (math.ceil(nbytes * factor) for nbytes, factor in zip(profile.op_bytes, times.tolist()))
    nodes = (_larger(node, float(times[max(node.born, 0)])) for node in profile.nodes)
    return dataclasses.replace(profile, op_bytes=tuple(op_bytes), nodes=tuple(nodes))


def _larger(node: Site, factor: float) -> Site:
    if factor == 1.0:
        return node
    recipe = node.recipe
    if recipe is not None:
        recipe = dataclasses.replace(recipe, transient_bytes=math.ceil(recipe.transient_bytes * factor))
    return dataclasses.replace(node, nbytes=math.ceil(node.nbytes * factor), recipe=recipe, codec=None)


def with_kept_rows(profile: Profile, exchanges: Sequence[Exchange], layers: Collection[str]) -> Profile:
    """The same step, in which `layers`, which run again, keep what they received in their first run; other layers that
    exchange rows run once."""
    op_bytes = list(profile.op_bytes)
    calls = []
    for call in profile.calls:
        own = [each for each in exchanges if call.first_op <= each.start < call.end_op]
        why_not = call.why_not
        if own and call.name not in layers:
            why_not = why_not or "it exchanges rows with other ranks"
        elif own:
            released = [node.release for node in profile.nodes if node.reads and node.layer == call.name]
            for each in own:
                for op in range(each.start, max(released, default=len(op_bytes))):
                    op_bytes[op] += each.nbytes
        calls.append(dataclasses.replace(call, why_not=why_not))
    return dataclasses.replace(profile, op_bytes=tuple(op_bytes), calls=tuple(calls))
