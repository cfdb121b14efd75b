"""What one rank of a running pipeline keeps, swaps and recomputes: one plan for each of its stages, within one budget.

What: every micro-batch of a stage follows the same plan, and several of them are in flight. So what a chunk holds
between its forward and its backward counts as often as the schedule has chunks there (moments.py), and what it needs
while it is computed counts once. `plan_rank` gives the solver the profile of one chunk with two things added to it: to
each operator, the bytes that the rest of the rank holds at that time; and between forward and backward an operator of
no time, the *turn*, that leaves only so much room as a chunk may hold in flight.
How much that is, is searched: more means less to recompute, and less room for the chunk that is computed. All stages
of a rank go the same part of the way from the least that each can hold to all that it saves.
Why it is safe: no number is averaged. If each chunk in flight holds no more than its turn allows, then at each moment
of the schedule state, chunks, messages and the chunk that runs are within the budget.
Cost: about ten solutions a stage. Not covered: plans that differ from one micro-batch to the next, which could keep
more of those that are in flight for a short time only; a gap to the fastest plan; the time that a rank waits for
others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.config.memory import MemoryConfig
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile, Site, StateBytes
from lowtide.errors import BudgetError
from lowtide.pipeline.moments import MessageKind, Moment
from lowtide.pipeline.schedule import Kind
from lowtide.planner.again import can_run_again
from lowtide.planner.plan_profile import floor_of_kept, plan_profile, problem_of
from lowtide.recipes.proof import LOG_SECONDS
from lowtide.timeline.events import run
from lowtide.timeline.step import Link
from lowtide.units import GIB, MIB, format_bytes

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the way that is possible at all, the parts that are tried for the least time."""
_FINE = 1 / 32
"""How closely that way is known: this share of all that is saved."""
_GAIN = 1e-3
"""Nobody measures less."""
_SLACK_SHARE = 64
"""A chunk may hold this share more than the least there is: whole activations leave a little later than in theory."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """A rank, and what it may have."""

    chunks: Mapping[int, StageChunk]
    """By stage."""
    moments: tuple[Moment, ...]
    state: StateBytes
    """Of the rank: `gradients` once for each stage that a parameter is in; `inputs` are the whole batch, and what else
    is there all the time."""
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


def plan_rank(task: RankTask) -> RankPlan:
    """The fastest that was found. Raises `BudgetError` where nothing fits, which says what budget would be enough."""
    search = _Search(task)
    most = search.at(1.0)
    if most is not None and all(plan.does_nothing for plan in most.plans.values()):
        return most
    found = search.at(0.0)
    if found is None:
        raise search.refusal()
    low, high = (0.0, 1.0) if most is None else (1.0, 1.0)
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (low, middle) if search.at(middle) is None else (middle, high)
    for share in _SHARES:
        tried = search.at(share * low)
        found = found if tried is None else _faster(found, tried)
    return found


def _faster(one: RankPlan, other: RankPlan) -> RankPlan:
    """The second where the first is not worth its trouble."""
    seconds, others = (sum(plan.step_seconds.values()) for plan in (one, other))
    return one if seconds < (1 - _GAIN) * others else other


class _Search:
    """Plans of a rank by how much its chunks may hold in flight."""

    def __init__(self, task: RankTask) -> None:
        self.task = task
        self.most = {stage: _held_bytes(chunk.profile) for stage, chunk in task.chunks.items()}
        self.least = {stage: min(self.most[stage], self._least_held(stage)) for stage in task.chunks}
        self._known: dict[tuple[float, int], RankPlan | None] = {}

    def at(self, share: float) -> RankPlan | None:
        """With so much of the way from the least to all that is saved; None: it does not fit."""
        key = share, self.task.budget_bytes
        if key not in self._known:
            self._known[key] = self._planned(self._limits(share), self.task.budget_bytes)
        return self._known[key]

    def _limits(self, share: float) -> dict[int, int]:
        """Of each stage, what a chunk may hold in flight beside its input."""
        limits = {}
        for stage, most in self.most.items():
            least = min(most, self.least[stage] + self.least[stage] // _SLACK_SHARE + 1)
            limits[stage] = least + int(share * (most - least))
        return limits

    def _planned(self, limits: Mapping[int, int], budget_bytes: int) -> RankPlan | None:
        plans = {}
        try:
            for stage in self.task.chunks:
                plans[stage] = self._plan(stage, limits, budget_bytes)
        except BudgetError:
            return None
        return RankPlan(
            plans=plans,
            held_bytes={stage: limits[stage] + self.task.chunks[stage].input_bytes for stage in plans},
            peak_bytes=max(self._peak_bytes(stage, limits, plan, budget_bytes) for stage, plan in plans.items()),
            step_seconds={stage: _seconds(plan) for stage, plan in plans.items()},
        )

    def _plan(self, stage: int, limits: Mapping[int, int], budget_bytes: int) -> Plan:
        room = budget_bytes - _state_bytes(self._state(stage)) - limits[stage]
        if room < 0:
            raise BudgetError("no room for a chunk", floor_bytes=budget_bytes - room)
        return self._solved(self._profile(stage, limits, turn_bytes=room), budget_bytes)

    def _profile(self, stage: int, limits: Mapping[int, int], *, turn_bytes: int) -> Profile:
        """Of one chunk, beside what the rest of the rank may hold."""
        return with_turn(
            dataclasses.replace(self.task.chunks[stage].profile, state=self._state(stage)),
            forward_bytes=self._beside_bytes(stage, limits, is_forward=True),
            turn_bytes=turn_bytes,
            backward_bytes=self._beside_bytes(stage, limits, is_forward=False),
        )

    def _peak_bytes(self, stage: int, limits: Mapping[int, int], plan: Plan, budget_bytes: int) -> int:
        """What the rank needs at most while it computes a chunk. (The plan counts the limit of the turn as needed.)"""
        layers = tuple(rule.pattern.text for rule in plan.rules.rules if rule.fate is Fate.RECOMPUTE)
        profile = self._profile(stage, limits, turn_bytes=0)
        problem = problem_of(profile, self.task.config, has_gradients=True, layers=layers)
        fate_of = {site.name: site.fate for site in plan.sites}
        fates = [fate_of.get(problem.profile.nodes[index].name, Fate.KEEP) for index in problem.nodes]
        return run(problem.step, fates, self.task.link, budget_bytes=budget_bytes).peak_bytes

    def _solved(self, profile: Profile, budget_bytes: int) -> Plan:
        return plan_profile(
            profile,
            self.task.config,
            link=self.task.link,
            budget_bytes=budget_bytes,
            has_gradients=True,
            log_seconds=LOG_SECONDS,
            with_ways_out=False,
        )

    def _state(self, stage: int) -> StateBytes:
        state = self.task.state
        return dataclasses.replace(state, inputs=state.inputs + self.task.chunks[stage].input_bytes)

    def _beside_bytes(self, stage: int, limits: Mapping[int, int], *, is_forward: bool) -> int:
        """The most that other chunks and messages hold while a chunk of this stage runs."""
        found = [0]
        for moment in self.task.moments:
            if (stage, is_forward) in moment.running:
                chunks = sum(
                    number * (limits[other] + self.task.chunks[other].input_bytes) for other, number in moment.live
                )
                found.append(chunks + sum(number * self._message_bytes(kind) for kind, number in moment.messages))
        return max(found)

    def _message_bytes(self, kind: MessageKind) -> int:
        """Also of a neighbour's result, which is as large as what this rank reads or gave."""
        chunks = self.task.chunks
        direction, stage = kind
        if direction is Kind.FORWARD:
            nbytes = chunks[stage].output_bytes if stage in chunks else chunks[stage + 1].input_bytes
        else:
            nbytes = chunks[stage].input_gradient_bytes if stage in chunks else chunks[stage - 1].output_gradient_bytes
        return nbytes + HEAD_BYTES

    def _least_held(self, stage: int) -> int:
        """The least that a chunk can hold in flight: by single activations, or with all layers run again."""
        state = self._state(stage)
        alone = dataclasses.replace(self.task.chunks[stage].profile, state=state)
        profile = with_turn(alone, forward_bytes=0, turn_bytes=_NO_LIMIT, backward_bytes=0)
        beyond = _NO_LIMIT + _state_bytes(state)
        layers = can_run_again(profile) if self.task.config.recomputes_freely else ()
        again = problem_of(profile, self.task.config, has_gradients=True, layers=layers) if layers else None
        found = [] if again is None else [floor_of_kept(again) - beyond]
        try:
            self._solved(profile, beyond)
            found.append(0)
        except BudgetError as error:
            found.append(error.floor_bytes - beyond)
        return max(0, min(found))

    # -- when nothing fits -----------------------------------------------------------------------------------------

    def refusal(self) -> BudgetError:
        """Says what would be enough, to within a few percent."""
        limits, state = self._limits(0.0), self.task.state
        enough = _up(self._enough(limits))
        counts = {stage: max((dict(m.live)[stage] + sum(s == stage for s, _ in m.running)) for m in self.task.moments)
                  for stage in self.task.chunks}  # fmt: skip
        held = "; ".join(
            f"stage {stage} has {number} in flight, of which each holds at least "
            f"{format_bytes(limits[stage] + self.task.chunks[stage].input_bytes)}"
            for stage, number in counts.items()
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
        while self._planned(limits, high) is None:
            low, high = high, 2 * high
            assert high < _NO_LIMIT, "chunks cannot hold what was found to be possible"
        while high - low > _FINE * low:
            middle = (low + high) // 2
            low, high = (low, middle) if self._planned(limits, middle) is not None else (middle, high)
        return high


HEAD_BYTES = 1024
"""Of a message, beside its tensors."""


def with_turn(profile: Profile, *, forward_bytes: int, turn_bytes: int, backward_bytes: int) -> Profile:
    """The same step with so many bytes more in each half, and an operator of no time between them, at which there are
    `turn_bytes` beside what the step itself holds then."""
    turn = profile.num_forward_ops
    # Alive at the turn is what both neighbours have.
    around = min(profile.op_bytes[turn - 1 : turn + 1])
    made = profile.op_gradient_bytes[turn - 1]

    def column(values: Sequence, at_turn: object) -> tuple:
        return (*values[:turn], at_turn, *values[turn:])

    nbytes = [each + (forward_bytes if op < turn else backward_bytes) for op, each in enumerate(profile.op_bytes)]
    return dataclasses.replace(
        profile,
        op_names=column(profile.op_names, "the turn from forward to backward"),
        op_seconds=column(profile.op_seconds, 0.0),
        op_bytes=column(nbytes, around + turn_bytes),
        op_gradient_bytes=column(profile.op_gradient_bytes, made),
        nodes=tuple(_past_turn(node, turn) for node in profile.nodes),
    )


def _past_turn(node: Site, turn: int) -> Site:
    return dataclasses.replace(
        node,
        dies=node.dies + (node.dies > turn),
        reads=tuple(read + (read >= turn) for read in node.reads),
        release=node.release + (node.release > turn),
    )


def _held_bytes(profile: Profile) -> int:
    """What a chunk holds in flight if all is kept."""
    turn = profile.num_forward_ops
    nodes = (node for node in profile.sites if node.born < turn < max(node.dies, node.release))
    return sum(node.nbytes for node in nodes) + min(profile.op_bytes[turn - 1 : turn + 1])


def _state_bytes(state: StateBytes) -> int:
    return state.parameters + state.buffers + state.optimizer + state.inputs + state.gradients


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds + plan.predicted.check_seconds


def _up(num_bytes: int) -> int:
    unit = GIB if num_bytes >= GIB else MIB
    return -(-num_bytes * 10 // unit) * unit // 10
