"""What a rank of a pipeline holds while it computes: the chunks in flight and the messages, moment by moment. No clock.

What: `live_mixes` counts the chunks of each stage along a row. `live_chunks_of` adds what else is there: a *moment* is
one action that computes, or the two of a pair; it says which other chunks of the rank are alive meanwhile, and which
messages its memory may hold. Moments that hold less than another are left out, so a few remain whatever the number of
micro-batches.
A chunk is alive from its forward to the end of the backward that reads its activations: B, or I of a backward that is
split (in `live_mixes`: W). What it keeps from I to W counts as a message that waits for W.
A message that was asked for is counted until it is read. One that was sent is counted until this rank knows that its
reader has begun: by a message that came back, through however many ranks. The executor holds it just as long
(`read_by_then`), so the count holds for any speed of any rank.
Cost: actions times ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Result, Schedule

HEAD_BYTES = 1024
"""Of a message, beside its tensors."""
MessageKind = tuple[Kind, int]
"""FORWARD: the output of this stage. BACKWARD: the gradient of its input. BACKWARD_WEIGHT: what it keeps until W."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One or two chunks are computed, and the rest is held."""

    running: tuple[tuple[int, bool], ...]
    """(stage, whether it is the forward). None of them: weight gradients that were put off."""
    live: tuple[tuple[int, int], ...]
    """(stage, number of its other chunks that are alive), of every stage of the rank."""
    messages: tuple[tuple[MessageKind, int], ...]
    """(whose result, how many of them)."""
    resharded: tuple[int, ...] = ()
    """Stages of which FSDP2 has let go of weights: their last action was a forward."""
    fresh: tuple[int, ...] = ()
    """Stages whose first backward is not over: of their gradients there is no more than it has made."""

    def num_of(self, stage: int) -> int:
        """Chunks of a stage that are alive or run."""
        return dict(self.live)[stage] + sum(which == stage for which, _ in self.running)

    def holds_as_much_as(self, other: Moment) -> bool:
        """Whether it holds all that `other` does, while the same is computed."""
        return (
            self.running == other.running
            and _covers(dict(self.live), dict(other.live))
            and _covers(dict(self.messages), dict(other.messages))
            and set(self.resharded) <= set(other.resharded)
            and set(self.fresh) <= set(other.fresh)
        )


def _covers(one: dict, other: dict) -> bool:
    return all(one.get(key, 0) >= number for key, number in other.items())


def live_chunks_of(
    schedule: Schedule, rank: int, *, pairs_at_once: bool, puts_off: bool = False, reshards: Collection[int] = ()
) -> tuple[Moment, ...]:
    """Of a schedule with its transfers, which has passed `verify`. `pairs_at_once`: the halves of a pair take turns;
    else the forward is over when the backward begins. `puts_off`: W has something to do. `reshards`: stages whose
    forward lets go of weights that its backward gathers."""
    found: list[Moment] = []
    for moment in _walk(schedule, rank, pairs_at_once, puts_off, reshards):
        if not any(other.holds_as_much_as(moment) for other in found):
            found = [other for other in found if not moment.holds_as_much_as(other)]
            found.append(moment)
    return tuple(found)


def read_by_then(schedule: Schedule, rank: int) -> dict[AnyAction, frozenset[Result]]:
    """For each action of a rank, once it has what it reads: results that the rank has sent, and of which it knows from
    then on that their readers have begun. `live_chunks_of` counts them no more."""
    place = {result: (home, at) for home, at, action in schedule.parts() for result in _read_by(schedule, action)}
    """Of each result that travels: the rank that reads it, and the position of the action that does."""
    seen = set[Result]()
    found: dict[AnyAction, frozenset[Result]] = {}
    sent: set[Result] = set()
    for every, known in zip(schedule.actions[rank], _known_positions(schedule, rank), strict=True):
        read = {each for each in sent if known.get(place[each][0], -1) >= place[each][1]} - seen
        seen |= read
        found[every] = frozenset(read)
        for part in every.parts:
            result = part.makes
            if result is not None and schedule.reader(result) not in (None, rank):
                sent.add(result)
    return found


def _walk(
    schedule: Schedule, rank: int, pairs_at_once: bool, puts_off: bool, reshards: Collection[int]
) -> Iterator[Moment]:
    gone = read_by_then(schedule, rank)
    live: Counter[int] = Counter(dict.fromkeys(schedule.stages_of(rank), 0))
    waiting: set[Result] = set()
    """Asked for, or made here for this very rank, and not read yet."""
    sent: set[Result] = set()
    put_off: Counter[tuple[Kind, int]] = Counter()
    resharded: set[int] = set()
    fresh = set(live)

    def moment(running: tuple[Action, ...]) -> Moment:
        counts = put_off + Counter((result.kind, result.stage) for result in (*waiting, *sent))
        return Moment(
            tuple((action.stage, action.kind is Kind.FORWARD) for action in running),
            tuple(sorted(live.items())),
            tuple(sorted(counts.items())),
            tuple(sorted(resharded)),
            tuple(sorted(fresh)),
        )

    def begin(action: Action) -> None:
        waiting.difference_update(schedule.needs(action))
        if action.kind is not Kind.FORWARD:
            live[action.stage] -= 1  # it is the one that runs

    def end(action: Action) -> None:
        resharded.discard(action.stage)
        if action.kind is Kind.FORWARD:
            live[action.stage] += 1
            resharded.update({action.stage} & set(reshards))
        else:
            fresh.discard(action.stage)
        if puts_off and action.kind is Kind.BACKWARD_INPUT:
            put_off[Kind.BACKWARD_WEIGHT, action.stage] += 1
        result = action.makes
        reader = None if result is None else schedule.reader(result)
        if result is not None and reader is not None:
            (waiting if reader == rank else sent).add(result)

    for every in schedule.actions[rank]:
        sent -= gone[every]
        parts = [part for part in every.parts if not part.kind.is_transfer and part.kind is not Kind.BACKWARD_WEIGHT]
        waiting.update(part.carries for part in every.parts if part.kind.is_receive)
        if puts_off and every.parts[0].kind is Kind.BACKWARD_WEIGHT:
            yield moment(())
            put_off[Kind.BACKWARD_WEIGHT, every.parts[0].stage] -= 1
        if isinstance(every, Pair) and not pairs_at_once:
            # What the second half reads is there before the first one begins.
            for part in parts:
                begin(part)
                yield moment((part,))
                end(part)
        elif parts:
            for part in parts:
                begin(part)
            yield moment(tuple(parts))
            for part in parts:
                end(part)


def _read_by(schedule: Schedule, action: Action) -> Iterator[Result]:
    """Results of other stages that an action reads."""
    if not action.kind.is_transfer and action.kind is not Kind.BACKWARD_WEIGHT:
        yield from (result for result in schedule.needs(action) if result.stage != action.stage)


def _known_positions(schedule: Schedule, rank: int) -> list[dict[int, int]]:
    """For each action of `rank`: up to which position each other rank has certainly come when it begins."""
    makers = {action.makes: (other, place) for other, place, action in schedule.parts()}
    known: list[list[dict[int, int]]] = [[] for _ in schedule.actions]
    """Of each rank, when each of its actions begins."""
    is_moving = True
    while is_moving:
        is_moving = False
        for other, row in enumerate(schedule.actions):
            while len(known[other]) < len(row):
                parts = row[len(known[other])].parts
                sources = [makers[result] for part in parts for result in _read_by(schedule, part)]
                if any(position >= len(known[maker]) for maker, position in sources):
                    break
                # A rank that stands at an action is done with those before it.
                now = dict(known[other][-1]) if known[other] else {}
                now[other] = len(known[other]) - 1
                for maker, position in sources:
                    for which, reached in (*known[maker][position].items(), (maker, position)):
                        now[which] = max(now.get(which, -1), reached)
                known[other].append(now)
                is_moving = True
    assert all(len(of_rank) == len(row) for of_rank, row in zip(known, schedule.actions, strict=True))
    return known[rank]


# -- what a whole row shows --------------------------------------------------------------------------------------------


def live_mixes(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    """For each action of a rank, how many chunks of each of its stages are alive while it runs."""
    live = dict.fromkeys(schedule.stages_of(rank), 0)
    found = []
    for every in schedule.actions[rank]:
        for action in every.parts:
            live[action.stage] += action.kind is Kind.FORWARD
        found.append(tuple(live.values()))
        for action in every.parts:
            live[action.stage] -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    return found


def is_in_order(schedule: Schedule) -> bool:
    """Whether every stage adds up its weight gradients in the order of the micro-batches. Then sums are those of one
    process that does the micro-batches one after another, to the bit; else only up to rounding."""
    last: dict[int, int] = {}
    for *_, action in schedule.parts():
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            if action.micro_batch < last.get(action.stage, 0):
                return False
            last[action.stage] = action.micro_batch
    return True
