"""What one rank of a running pipeline keeps, swaps and recomputes: one plan for each of its stages, within one budget.

What: every micro-batch of a stage follows the same plan, and several of them are in flight. So what a chunk holds
between its forward and its backward counts as often as the schedule has chunks there (live_chunks.py), and what it
needs while it is computed counts once. `plan_rank` gives the solver the profile of one chunk with two things added to
it: to each operator, the bytes that the rest of the rank holds at that time; and between forward and backward an
operator of no time, the *turn*, that leaves only so much room as a chunk may hold in flight.
How much that is, is searched: more means less to recompute, and less room for the chunk that is computed. All stages
of a rank go the same part of the way from the least that each can hold to all that it saves.
Of a pair whose halves take turns both chunks are computed at once: each gets a part of the room at each of its
operators (turns.py), and what is left of it is what the operator finds taken.
Why it is safe: no number is averaged. If each chunk in flight holds no more than its turn allows, then at each moment
of the schedule state, chunks, messages and the chunks that run are within the budget.
With `memory.optimizer: swap` the state that can move is on the next tier while micro-batches run, and comes and goes
through three buckets while the optimizer steps; with `auto` as much of it moves as makes the step shortest. It does not
move during backward: the end of one backward is no sign that the step of the optimizer is near.
Cost: about ten solutions a stage, up to five times that with `auto`. Not covered: plans that differ from one
micro-batch to the next, which could keep more of those that are in flight for a short time only; a gap to the fastest
plan; the time that a rank waits for others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Fate, Tier
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, StateBytes
from lowtide.errors import BudgetError
from lowtide.pipeline import turns
from lowtide.pipeline.live_chunks import HEAD_BYTES, MessageKind, Moment
from lowtide.pipeline.schedule import Kind
from lowtide.pipeline.turns import Exchange, Half, halves_of, needs_of, slots_of, with_turn
from lowtide.planner.by_rules import HOST_COSTS, problem_of
from lowtide.planner.place_state import NUM_SLOTS, bucket_size, refuse_without_effect, shares_of
from lowtide.planner.plan_profile import plan_within, space_of
from lowtide.planner.problem import Problem, accumulated
from lowtide.planner.smaller import fates_of
from lowtide.planner.space import Space
from lowtide.planner.state_items import StateShares
from lowtide.timeline.events import run
from lowtide.timeline.memory import curve
from lowtide.timeline.step import Link
from lowtide.units import MIB, format_bytes, printed_up

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the way that is possible at all, the parts that are tried for the least time."""
_FINE = 1 / 32
"""How closely that way is known: this share of all that is saved."""
_GAIN = 1e-3
"""Nobody measures less."""
_SLACK_SHARE = 64
"""A chunk may hold this share more than the least there is: whole activations leave a little later than in theory."""
_PARTS = (1.0, 0.75, 0.5, 0.25)
"""Of the optimizer's state that can move; most is tried first, since it fits if anything does."""
_NO_LIMIT = 2**50
"""Bytes that no rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChunk:
    """One stage with one micro-batch, as it was observed."""

    profile: Profile
    input_bytes: int
    """Of what the stage before passes on; it is held until the chunk's backward is over. 0 of the first stage."""
    output_bytes: int
    """Of what it passes on."""
    input_gradient_bytes: int
    output_gradient_bytes: int
    exchanges: tuple[Exchange, ...] = ()
    """Of rows with other ranks, in order."""
    gathered_bytes: int = 0
    """Of the weights that FSDP2 shards, while they are whole."""
    whole_gradient_bytes: int = 0
    """How many more bytes their gradients take until they are reduced."""
    travel_bytes: int = 0
    """Buffers while all of them are gathered or reduced."""
    away: tuple[int, ...] = ()
    """For each operator, the bytes of weights that are not there where the last forward of the stage has resharded
    them. Empty: none."""
    put_off_bytes: int = 0
    """What it keeps from I to W."""
    product_bytes: int = 0
    """What W needs beside it."""

    def away_at(self, ops: slice) -> np.ndarray:
        return np.array(self.away[ops] or 0, np.int64)

    def unmade_at(self, ops: slice) -> np.ndarray:
        """Of its gradients, those that are not there yet in the first backward of a step, or before it."""
        return self.profile.op_gradient_bytes[-1] - accumulated(self.profile)[ops]

    @property
    def away_in_flight(self) -> int:
        """Between two actions of the stage."""
        turn = self.profile.num_forward_ops
        return int(self.away_at(slice(turn - 1, turn + 1)).min())

    @property
    def halves(self) -> tuple[Half, Half]:
        """Forward and backward, as they take turns in pairs."""
        return halves_of(len(self.profile.op_bytes), self.profile.num_forward_ops, self.exchanges)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """A rank, and what it may have."""

    chunks: Mapping[int, StageChunk]
    """By stage."""
    moments: tuple[Moment, ...]
    state: StateBytes
    """Of the rank: `gradients` once for each stage that a parameter is in; `inputs` are the whole batch, and what else
    is there all the time."""
    between_bytes: int = 0
    """What is needed between the last chunk and the step of the optimizer."""
    num_micro_batches: int
    budget_bytes: int
    config: MemoryConfig
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Plans of the stages of a rank that fit together."""

    plans: Mapping[int, Plan]
    held_bytes: Mapping[int, int]
    """The most that a chunk of each stage holds in flight, with its input."""
    peak_bytes: int
    """What the rank needs at most, as predicted."""
    step_seconds: Mapping[int, float]
    """Of one chunk: forward and backward, with what its plan adds."""
    optimizer: OptimizerPlacement | None = None
    """Where its state is between steps; None: on the device."""


def plan_rank(task: RankTask) -> RankPlan:
    """The fastest that was found. Raises `BudgetError` where nothing fits, which says what budget would be enough."""
    search = _Search(dataclasses.replace(task, config=_of_one_chunk(task)))
    return search.rank_plan(_best_share(search))


def _of_one_chunk(task: RankTask) -> MemoryConfig:
    """With the part of the slower tier that one chunk may fill: as many as there are share it."""
    if task.config.host_budget is None:
        return task.config
    most = max(len(moment.running) + sum(number for _, number in moment.live) for moment in task.moments)
    return dataclasses.replace(task.config, host_budget=task.config.host_budget // most)


def _best_share(search: _Search) -> float:
    """Of the way, the part whose plans are fastest; less of it where more is not worth its trouble."""
    most = search.at(1.0)
    if most is not None and all(plan.does_nothing for plan in most.values()):
        return 1.0
    if search.at(0.0) is None:
        raise search.refusal()
    low, high = (0.0, 1.0) if most is None else (1.0, 1.0)
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (middle, high) if search.has_plan(middle) else (low, middle)
    best = 0.0
    for share in _SHARES:
        if search.seconds_at(best) >= (1 - _GAIN) * search.seconds_at(share * low):
            best = share * low
    return best


class _Search:
    """Plans of a rank by how much its chunks may hold in flight."""

    def __init__(self, task: RankTask) -> None:
        self.task = task
        self.most = {stage: self._most_held(stage) for stage in task.chunks}
        self.needs = {stage: needs_of(self.chunk_profile(stage)) for stage in task.chunks}
        self.least = {stage: min(self.most[stage], self._least_held(stage)) for stage in task.chunks}
        self._known: dict[float, dict[int, Plan] | None] = {}

    def at(self, share: float) -> dict[int, Plan] | None:
        """The plans of the stages with so much of the way from the least to all that is saved; None: it does not
        fit."""
        if share not in self._known:
            budget_bytes, spaces = self.task.budget_bytes, self._spaces(self._limits(share), self.task.budget_bytes)
            plans = {
                stage: plan_within(space, budget_bytes, with_floor=False) for stage, space in (spaces or {}).items()
            }
            self._known[share] = None if spaces is None else plans
        return self._known[share]

    def seconds_at(self, share: float) -> float:
        """Of one chunk of each stage."""
        plans = self.at(share)
        return math.inf if plans is None else sum(map(_seconds, plans.values()))

    def has_plan(self, share: float) -> bool:
        """Whether `at` gives a plan, without the search for the fastest."""
        return self._spaces(self._limits(share), self.task.budget_bytes) is not None

    def _limits(self, share: float) -> dict[int, int]:
        """Of each stage, what a chunk may hold in flight beside its input."""
        limits = {}
        for stage, most in self.most.items():
            least = min(most, self.least[stage] + self.least[stage] // _SLACK_SHARE + 1)
            limits[stage] = least + int(share * (most - least))
        return limits

    def rank_plan(self, share: float) -> RankPlan:
        """With these plans, and what chunks hold under them. They may hold less than the limit that the plans were
        given: activations leave whole, and layers may run again by rule."""
        plans, limits = self.at(share), self._limits(share)
        assert plans is not None
        held = {stage: min(limits[stage], self._held_under(stage, plan)) for stage, plan in plans.items()}
        return RankPlan(
            plans=plans,
            held_bytes={stage: nbytes + self.task.chunks[stage].input_bytes for stage, nbytes in held.items()},
            peak_bytes=self._peak_bytes(plans, held),
            step_seconds={stage: _seconds(plan) for stage, plan in plans.items()},
        )

    def _spaces(self, limits: Mapping[int, int], budget_bytes: int) -> dict[int, Space] | None:
        """Of all stages; None where one of them has no plan within the budget."""
        spaces = {}
        for stage in self.task.chunks:
            room = budget_bytes - _state_bytes(self._state(stage)) - limits[stage]
            if room < 0:
                return None
            beside = self.beside(stage, limits, budget_bytes)
            space = self._space(with_turn(self.chunk_profile(stage), beside, turn_bytes=room))
            if not space.has_plan(budget_bytes):
                return None
            spaces[stage] = space
        return None if max(self._weights_bytes(limits), default=0) > budget_bytes else spaces

    def chunk_profile(self, stage: int) -> Profile:
        """Of one chunk, beside the state of the rank."""
        return dataclasses.replace(self.task.chunks[stage].profile, state=self._state(stage))

    def beside(self, stage: int, limits: Mapping[int, int], budget_bytes: int) -> np.ndarray:
        """For each operator of a chunk, the most that the rest of the rank may hold meanwhile."""
        found = np.full(len(self.needs[stage][0]), -self.task.chunks[stage].gathered_bytes, np.int64)
        forward, backward = self.task.chunks[stage].halves
        for moment in self.task.moments:
            rest = self._rest_bytes(moment, limits)
            if len(moment.running) < 2:
                for half, is_forward in ((forward, True), (backward, False)):
                    if moment.running == ((stage, is_forward),):
                        part = slice(half.first, half.end)
                        found[part] = np.maximum(found[part], rest - self._absent_at(part, stage, moment))
                continue
            (ahead, _), (behind, _) = pair = sorted(moment.running, key=lambda each: not each[1])
            if (stage, True) not in pair and (stage, False) not in pair:
                continue
            room = budget_bytes - _state_bytes(self.task.state) - rest - self._input_bytes(moment)
            own = turns.shares_of(
                (self.task.chunks[ahead].halves[0], self.needs[ahead]),
                (self.task.chunks[behind].halves[1], self.needs[behind]),
                room,
            )
            others = rest + self._input_bytes(moment) - self.task.chunks[stage].input_bytes
            for share, each, half in zip(own, (ahead, behind), (forward, backward), strict=True):
                if each == stage:
                    part = slice(half.first, half.end)
                    found[part] = np.maximum(found[part], others + np.maximum(room - share[part], 0))
        for stop in (*forward.stops, *backward.stops):  # a layer that runs again there may do so on either side
            found[stop - 1 : stop + 1] = found[stop - 1 : stop + 1].max()
        return found

    def _absent_at(self, part: slice, stage: int, moment: Moment) -> np.ndarray | int:
        """For each of these operators of a chunk, weights and gradients of its stage that count and are not there."""
        chunk = self.task.chunks[stage]
        away = chunk.away_at(part) if stage in moment.resharded else 0
        return away + (chunk.unmade_at(part) if stage in moment.fresh else 0)

    def _peak_bytes(self, plans: Mapping[int, Plan], limits: Mapping[int, int]) -> int:
        """What the rank needs at most, as its plans are. `limits`: what chunks hold in flight beside their inputs."""
        own, found = {}, self._weights_bytes(limits)
        for stage, each in plans.items():
            own[stage], step_of_optimizer_bytes = self._most_under(stage, limits, each)
            found.append(step_of_optimizer_bytes)
        for moment in (each for each in self.task.moments if each.running):
            rest = _state_bytes(self.task.state) + self._rest_bytes(moment, limits) + self._input_bytes(moment)
            (ahead, is_forward), *more = sorted(moment.running, key=lambda each: not each[1])
            if not more:
                half = self.task.chunks[ahead].halves[0 if is_forward else 1]
                found.append(rest + own[ahead](range(half.first, half.end), moment))
                continue
            behind = more[0][0]
            halves = self.task.chunks[ahead].halves[0], self.task.chunks[behind].halves[1]
            for forward, backward in slots_of(*halves):
                found.append(rest + own[ahead](forward) + own[behind](backward))
        return max(found)

    def _most_under(self, stage: int, limits: Mapping[int, int], plan: Plan) -> tuple[Callable[..., int], int]:
        """What a chunk needs at most at some operators under its plan, at a moment or with all weights and gradients
        there, beside the state of its rank and its input; and what there is when the optimizer steps."""
        task, profile = self.task, self.chunk_profile(stage)
        state_bytes = _state_bytes(profile.state)

        def problem_beside(beside: np.ndarray, turn_bytes: int) -> tuple[Problem, list[Fate]]:
            return _problem_under(with_turn(profile, beside, turn_bytes=turn_bytes), task.config, plan)

        room = task.budget_bytes - state_bytes - limits[stage]
        problem, fates = problem_beside(self.beside(stage, limits, task.budget_bytes), room)
        played = run(problem.step, fates, task.link, budget_bytes=task.budget_bytes)

        @functools.cache
        def most(ops: range, moment: Moment | None = None) -> int:
            if not ops:
                return 0
            apart = np.full(len(profile.op_bytes), -_NO_LIMIT, np.int64)  # others do not count
            part = slice(ops.start, ops.stop)
            apart[part] = 0 if moment is None else -self._absent_at(part, stage, moment)
            problem, fates = problem_beside(apart, -_NO_LIMIT)
            there = curve(problem.step, fates, evict_by=played.evict_by, prefetch_at=played.prefetch_at)
            return int(there[:-1].max()) - state_bytes

        return most, played.curve[-1]

    def _weights_bytes(self, limits: Mapping[int, int]) -> list[int]:
        """What there is while weight gradients that were put off are made, and while FSDP2 gathers or reduces a stage,
        before its first action and after its last, when it has no chunk in flight."""
        chunks = self.task.chunks
        products = max(chunk.product_bytes for chunk in chunks.values())
        found = []
        for moment in self.task.moments:
            own = [
                chunks[stage].travel_bytes - dict(moment.live)[stage] * (limits[stage] + chunks[stage].input_bytes)
                for stage, _ in moment.running
            ]
            found.append(_state_bytes(self.task.state) + self._rest_bytes(moment, limits) + max(own, default=products))
        return found

    def _space(self, profile: Profile) -> Space:
        return space_of(profile, self.task.config, self.task.link, has_gradients=True, costs=HOST_COSTS)

    def _state(self, stage: int) -> StateBytes:
        state = self.task.state
        return dataclasses.replace(state, inputs=state.inputs + self.task.chunks[stage].input_bytes)

    def _rest_bytes(self, moment: Moment, limits: Mapping[int, int]) -> int:
        """What chunks that do not run and messages hold."""
        chunks = sum(number * (limits[other] + self.task.chunks[other].input_bytes) for other, number in moment.live)
        running = {stage for stage, _ in moment.running}
        chunks -= sum(self.task.chunks[stage].away_in_flight for stage in set(moment.resharded) - running)
        chunks -= sum(self.task.chunks[stage].profile.op_gradient_bytes[-1] for stage in set(moment.fresh) - running)
        return chunks + sum(number * self._message_bytes(kind) for kind, number in moment.messages)

    def _input_bytes(self, moment: Moment) -> int:
        """What the chunks that run were given."""
        return sum(self.task.chunks[stage].input_bytes for stage, _ in moment.running)

    def _message_bytes(self, kind: MessageKind) -> int:
        """Also of a neighbour's result, which is as large as what this rank reads or gave."""
        chunks = self.task.chunks
        direction, stage = kind
        if direction is Kind.BACKWARD_WEIGHT:
            return chunks[stage].put_off_bytes
        if direction is Kind.FORWARD:
            nbytes = chunks[stage].output_bytes if stage in chunks else chunks[stage + 1].input_bytes
        else:
            nbytes = chunks[stage].input_gradient_bytes if stage in chunks else chunks[stage - 1].output_gradient_bytes
        return nbytes + HEAD_BYTES

    def _most_held(self, stage: int) -> int:
        """What a chunk holds in flight if all is kept but what rules recompute."""
        return self._held_under(stage, plan_within(self._space(self._at_turn(stage)), 4 * _NO_LIMIT, with_floor=False))

    def _held_under(self, stage: int, plan: Plan) -> int:
        """What a chunk holds in flight under its plan, without its input. What is swapped counts as kept: when it is
        gone is up to the link."""
        profile = self._at_turn(stage)
        problem, fates = _problem_under(profile, self.task.config, plan)
        kept = [Fate.KEEP if fate is Fate.SWAP else fate for fate in fates]
        items = tuple(dataclasses.replace(item, fates=tuple(Fate)) for item in problem.step.items)  # rules may swap
        step = dataclasses.replace(problem.step, items=items)
        # The worst moment is the turn.
        return run(step, kept, self.task.link).peak_bytes - _NO_LIMIT - _state_bytes(profile.state)

    def _at_turn(self, stage: int) -> Profile:
        """A chunk that alone is alive, with a turn at which there is more than ever."""
        profile = self.chunk_profile(stage)
        return with_turn(profile, np.zeros(len(profile.op_bytes), np.int64), turn_bytes=_NO_LIMIT)

    def _least_held(self, stage: int) -> int:
        """The least that a chunk can hold in flight: by single activations, or with all layers run again."""
        profile = self._at_turn(stage)
        return max(0, self._space(profile).floor_bytes - _NO_LIMIT - _state_bytes(profile.state))

    # -- when nothing fits -----------------------------------------------------------------------------------------

    def refusal(self) -> BudgetError:
        """Says what would be enough, to within a few percent."""
        limits, state = self._limits(0.0), self.task.state
        enough = printed_up(self._enough(limits))
        counts = {stage: max(moment.num_of(stage) for moment in self.task.moments) for stage in self.task.chunks}
        held = "; ".join(
            f"stage {stage} has {number} in flight, of which each holds at least "
            f"{format_bytes(nbytes) if nbytes >= MIB // 1000 else f'{nbytes} bytes'}"
            for stage, number in counts.items()
            for nbytes in [limits[stage] + self.task.chunks[stage].input_bytes]
        )
        return BudgetError(
            f"no plan fits the budget of {format_bytes(self.task.budget_bytes)}: of the micro-batches {held}; beside "
            f"them are {format_bytes(_state_bytes(state))} of weights, gradients, optimizer state and batch. Raise the "
            f"budget to {format_bytes(enough)}, make micro-batches smaller, or take a schedule with fewer in flight",
            floor_bytes=enough,
        )

    def _enough(self, limits: Mapping[int, int]) -> int:
        """A budget for which there is a plan."""
        low = high = self.task.budget_bytes
        while self._spaces(limits, high) is None:
            low, high = high, 2 * high
            assert high < _NO_LIMIT, "chunks cannot hold what was found to be possible"
        while high - low > _FINE * low:
            middle = (low + high) // 2
            low, high = (low, middle) if self._spaces(limits, middle) is not None else (middle, high)
        return high


def _problem_under(profile: Profile, config: MemoryConfig, plan: Plan) -> tuple[Problem, list[Fate]]:
    """The solver's problem of a step, and the fates that `plan` gives its sites."""
    layers = tuple(rule.pattern.text for rule in plan.rules.rules if rule.fate is Fate.RECOMPUTE)
    fate_of = fates_of(plan.sites)
    problem = problem_of(profile, config, has_gradients=True, layers=layers)
    names = (problem.profile.nodes[index].name for index in problem.nodes)
    return problem, [fate_of.get(name, Fate.KEEP) for name in names]


def _state_bytes(state: StateBytes) -> int:
    return state.parameters + state.buffers + state.optimizer + state.inputs + state.gradients


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds + plan.predicted.check_seconds


# -- beside an optimizer's state ---------------------------------------------------------------------------------------


def plan_rank_with_state(task: RankTask) -> RankPlan:
    """The fastest that was found, with where the state is. Raises `BudgetError` where nothing fits, and `ConfigError`
    where `memory.optimizer` is `swap` and main memory has no room."""
    wanted = task.config.optimizer
    state, config = task.state, dataclasses.replace(task.config, optimizer="keep")
    temporaries = max(state.optimizer_temporaries, task.between_bytes)
    task = dataclasses.replace(task, config=config)
    kept = dataclasses.replace(task, state=dataclasses.replace(state, optimizer_temporaries=temporaries))
    if wanted == "keep":
        return plan_rank(kept)
    if wanted == "swap" and state.optimizer_movable:
        refuse_without_effect(state, dataclasses.replace(config, optimizer="swap"))
    shares = shares_of(task.state, task.link, task.config.host_budget, may_stay=True)
    if shares is None:
        return plan_rank(kept)
    if wanted == "swap":
        return _with_moved(task, shares, len(shares.sizes), "memory.optimizer asks for it")
    found: list[RankPlan] = []
    refusals: list[BudgetError] = []
    numbers = [0, *dict.fromkeys(max(1, round(part * len(shares.sizes))) for part in _PARTS)]
    for number in numbers:
        try:
            reason = "its memory is worth more to chunks in flight than its copies cost"
            found.append(_with_moved(task, shares, number, reason) if number else plan_rank(kept))
        except BudgetError as error:
            refusals.append(error.with_traceback(None))  # its frames would be a cycle
            continue
        if number == 0 and all(plan.does_nothing for plan in found[0].plans.values()):
            break
    if not found:
        raise min(refusals, key=lambda error: error.floor_bytes)
    return min(found, key=lambda plan: _seconds_of_step(task, plan))


def _with_moved(task: RankTask, shares: StateShares, number: int, reason: str) -> RankPlan:
    """With the last `number` shares elsewhere between steps."""
    moved_bytes = sum(shares.sizes[-number:])
    state, host_bytes = task.state, task.config.host_budget
    left = dataclasses.replace(
        state,
        optimizer=state.optimizer - moved_bytes,
        # Also what stays is stepped bucket by bucket.
        optimizer_temporaries=max(shares.temporaries + shares.slot_bytes, task.between_bytes),
    )
    limits = dataclasses.replace(task.config, host_budget=None if host_bytes is None else host_bytes - moved_bytes)
    found = plan_rank(dataclasses.replace(task, state=left, config=limits))
    device = next(iter(task.chunks.values())).profile.device
    placement = OptimizerPlacement(
        moved_bytes=moved_bytes,
        resident_bytes=state.optimizer_movable - moved_bytes,
        tier=Tier.DISK if device == "cpu" else Tier.HOST,
        bucket_bytes=bucket_size(state, task.link),
        num_slots=NUM_SLOTS,
        overlap="step",
        exposed_seconds=sum(shares.streamed_seconds[-number:]),
        reason=reason,
    )
    return dataclasses.replace(found, optimizer=placement)


def _seconds_of_step(task: RankTask, plan: RankPlan) -> float:
    """Of a step, as far as plans differ."""
    exposed = 0.0 if plan.optimizer is None else plan.optimizer.exposed_seconds
    return task.num_micro_batches * sum(plan.step_seconds.values()) + exposed
