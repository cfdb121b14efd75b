"""Where the bytes are at the worst moment of a step; and advice where no plan fits: what most of the memory is, and the
one or two changes that would mend it, planned and not guessed.

`memory_breakdown` makes the lines of a plan's account, with everything kept and with the plan; the worst moments are
two different ones.
What: `explained` looks at the worst moment of the least that can be reached, names what is most there (weights,
gradients, the optimizer's state, the optimizer's step, activations, or the loss and other temporaries), and plans the
step again with the changes that are about that. What a refusal offered before (larger budgets) follows.

`Change` is such a change. The planner itself knows those that need no other step: the optimizer's state elsewhere, a
fused optimizer, recomputing and swapping where rules forbid it. Who has the model, a trace or a run file, offers more:
half the batch, the loss in slices, other precision, parameters in shards.

Cost: at most `MOST_CHANGES` more steps, planned in a second or two each: under ten seconds.
Not covered: two changes at once; what a change does to training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import AccountLine
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.text_table import percent
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.min_peak import quick_floor
from lowtide.planner.problem import Problem, op_base_bytes, state_bytes
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve
from lowtide.units import format_bytes, format_seconds

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "the optimizer's state"
STEP, ACTIVATIONS, LOSS = "the optimizer's step", "activations", "the loss and other temporaries"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, STEP, ACTIVATIONS, LOSS)
MOST_CHANGES = 3
"""That are planned for one refusal."""
_MOST_SAID = 2
_MOST_LINES = 4
HALF_A_BATCH = "half the micro-batch"
STATE, OTHERS, TEMPORARIES = "optimizer state", "buffers and batch", "head, loss, temporaries"
"""Lines of an account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a step that may need less."""

    text: str
    """What to write or do."""
    helps: frozenset[str]
    """Which of `KINDS` it makes less of."""
    profile: Callable[[], Profile | None]
    """The step with it, of which nothing runs; None where it cannot be had."""
    config: MemoryConfig | None = None
    """The memory section with it; None: the one that there is."""
    beats: str = ""
    """It is worth saying only where it is faster than the change with this text."""


PlanAgain = Callable[[Profile, MemoryConfig], Plan]


def explained(
    error: BudgetError,
    problem: Problem,
    config: MemoryConfig,
    *,
    has_gradients: bool,
    replan: PlanAgain,
    changes: Sequence[Change] = (),
) -> BudgetError:
    """The refusal with what most of the memory is, and with changes that were planned, those that fit first.

    `problem`: the step as it was refused. `replan` plans another step for the same budget, or raises.
    """
    kinds = bytes_by_kind(problem, config.host_budget, has_gradients=has_gradients)
    kind = max(kinds, key=kinds.__getitem__)
    most = f"most of it is {kind}: {format_bytes(kinds[kind])} of {format_bytes(sum(kinds.values()))}"
    own = _own_changes(problem.profile, config)
    planned = list(_planned([one for one in (*own, *changes) if kind in one.helps][:MOST_CHANGES], config, replan))
    said = [text for _, text in sorted(planned, key=lambda found: not found[0])][:_MOST_SAID]
    before, room = error.suggestions, _MOST_LINES - len(said)
    suggestions = (*said, *(before if len(before) <= room else [*before[: room - 1], before[-1]]))
    first = str(error).split("\n")[0]
    lines = [first, f"  {most}", *(f"  - {suggestion}" for suggestion in suggestions)]
    return BudgetError("\n".join(lines), floor_bytes=error.floor_bytes, suggestions=suggestions)


def bytes_by_kind(problem: Problem, host_bytes: int | None, *, has_gradients: bool) -> dict[str, int]:
    """What is there at the worst moment of the least that can be reached by swapping and recomputing: `KINDS` ->
    bytes."""
    arrays = StepArrays.of(problem.step)
    _, fates, _ = quick_floor(arrays, host_bytes)
    curve = floor_curve(arrays, Lifetimes.of(arrays, fates)).tolist()
    tick, column = curve.index(max(curve)), _column(problem, curve, (0, 0), has_gradients)
    step = problem.profile.state.optimizer_temporaries if tick >= len(problem.starts) - 1 else 0
    kept = _kept_bytes(problem, tick)
    return {
        WEIGHTS: column[WEIGHTS],
        GRADIENTS: column[GRADIENTS],
        OPTIMIZER: column[STATE],
        STEP: step,
        ACTIVATIONS: column[ACTIVATIONS] + kept,
        LOSS: max(column[OTHERS] + column[TEMPORARIES] - step - kept, 0),
    }


def _kept_bytes(problem: Problem, tick: int) -> int:
    """Of activations that nothing but to be kept is left for, which count among a tick's base bytes."""
    if tick >= len(problem.starts) - 1:
        return 0
    profile, items = problem.profile, set(problem.nodes)
    fixed = {index: node.retained_input is None for index, node in enumerate(profile.nodes) if index not in items}
    span = slice(problem.starts[tick], problem.starts[tick + 1])
    base = op_base_bytes(profile, fixed)[span]
    return int((base - op_base_bytes(profile, {})[span])[base.argmax()])


def _own_changes(profile: Profile, config: MemoryConfig) -> Iterator[Change]:
    """What can be planned from the profile that there is."""
    state = profile.state
    if not (config.recomputes_freely and config.swaps_freely):
        free = dataclasses.replace(config, recompute=None, swap=None)
        text = "recompute: auto, swap: auto"
        yield Change(text=text, helps=frozenset(KINDS), profile=lambda: profile, config=free)
    if config.optimizer == "keep" and state.optimizer_movable:
        swapped = dataclasses.replace(config, optimizer="swap")
        helps = frozenset({OPTIMIZER, WEIGHTS, GRADIENTS, ACTIVATIONS, LOSS})
        yield Change(text="optimizer: swap", helps=helps, profile=lambda: profile, config=swapped)
        if not profile.num_collectives:
            updated = dataclasses.replace(config, optimizer="in_backward")
            text = "optimizer: in_backward"
            yield Change(text=text, helps=helps, profile=lambda: profile, config=updated, beats="optimizer: swap")
    if state.optimizer_temporaries:
        fused = dataclasses.replace(profile, state=dataclasses.replace(state, optimizer_temporaries=0))
        yield Change(text="an optimizer with fused=True", helps=frozenset({STEP}), profile=lambda: fused)


def _planned(changes: Sequence[Change], config: MemoryConfig, replan: PlanAgain) -> Iterator[tuple[bool, str]]:
    """Whether it fits with the change, and a sentence."""
    seconds: dict[str, float] = {}
    for change in changes:
        profile = change.profile()
        if profile is None:
            continue
        try:
            predicted = replan(profile, change.config or config).predicted
        except BudgetError as error:
            yield False, f"with '{change.text}' it needs {format_bytes(error.floor_bytes)} still"
            continue
        except ConfigError:
            continue  # nothing to move, or no room for it
        assert predicted is not None
        seconds[change.text] = predicted.step_seconds
        if predicted.step_seconds >= seconds.get(change.beats, math.inf):
            continue
        more = predicted.step_seconds / predicted.plain_seconds - 1 if predicted.plain_seconds else 0.0
        yield (
            True,
            (
                f"with '{change.text}' it fits: peak {format_bytes(predicted.peak_bytes)}, "
                f"{format_seconds(predicted.step_seconds)} a step, {percent(more)} over keeping everything"
            ),
        )


# -- the account of a plan ---------------------------------------------------------------------------------------------


def memory_breakdown(
    problem: Problem,
    plain: Sequence[int],
    planned: Sequence[int],
    plain_problem: Problem | None = None,
    *,
    there: tuple[int, int] = (0, 0),
    has_gradients: bool = False,
) -> tuple[AccountLine, ...]:
    """The lines, whose last one is their sum.

    `plain_problem` is the one of the plain curve, where it is another. 'activations' is what changes: bytes of nodes.
    'temporaries' is the rest: results that live for a few operators, and gradients that are on their way.
    `there`: what of the optimizer's state is on the device in items, and in places (`StateShares.there`).
    """
    before = _column(plain_problem or problem, plain, (0, 0), has_gradients)
    after = _column(problem, planned, there, has_gradients)
    return tuple(AccountLine(what=name, plain_bytes=before[name], planned_bytes=after[name]) for name in before)


def _column(problem: Problem, curve: Sequence[int], there: tuple[int, int], has_gradients: bool) -> dict[str, int]:
    state = problem.profile.state
    tick = max(range(len(curve)), key=curve.__getitem__)
    base = problem.step.ticks[tick].base_bytes
    here, slots = there
    gradients = gradients_at(problem, tick, has_gradients)
    fixed = state_bytes(problem.profile, has_gradients=has_gradients) - problem.state_bytes
    return {
        WEIGHTS: state.parameters,
        STATE: state.optimizer - problem.state_bytes + here + slots,
        OTHERS: state.buffers + state.inputs + state.foreign + state.rounding,
        GRADIENTS: gradients,
        ACTIVATIONS: int(curve[tick]) - base - here,
        TEMPORARIES: base - slots - fixed - (0 if has_gradients else gradients),
        "peak": int(curve[tick]),
    }


def gradients_at(problem: Problem, tick: int, has_gradients: bool) -> int:
    """Bytes of gradients that have been made by a tick."""
    profile = problem.profile
    if has_gradients or tick >= len(problem.starts) - 1:
        return profile.state.gradients
    return profile.op_gradient_bytes[problem.starts[tick + 1] - 1]
