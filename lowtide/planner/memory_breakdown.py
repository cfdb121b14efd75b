"""Where the bytes are at the worst moment of a step, with everything kept and with the plan.

What: `memory_breakdown` makes the lines of the account. The worst moments are two different ones.
Cost: some arithmetic. Not covered: other moments.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.core.decisions import AccountLine
from lowtide.planner.problem import Problem, state_bytes

OPTIMIZER, TEMPORARIES = "optimizer state", "head, loss, temporaries"


def memory_breakdown(
    problem: Problem,
    plain: Sequence[int],
    planned: Sequence[int],
    plain_problem: Problem | None = None,
    *,
    moving: Sequence[int] | None = None,
    slot_bytes: int = 0,
    has_gradients: bool = False,
) -> tuple[AccountLine, ...]:
    """The lines, whose last one is their sum.

    `plain_problem` is the one of the plain curve, where it is another. 'activations' is what changes: bytes of nodes.
    'temporaries' is the rest: results that live for a few operators, and gradients that are on their way.
    Where shares of the optimizer's state are items of `problem`, `moving` is what of them is there in each tick, and
    `slot_bytes` what passes through in the optimizer's.
    """
    before = _column(plain_problem or problem, plain, None, 0, has_gradients=has_gradients)
    after = _column(problem, planned, moving, slot_bytes, has_gradients=has_gradients)
    return tuple(AccountLine(what=name, plain_bytes=before[name], planned_bytes=after[name]) for name in before)


def _column(
    problem: Problem, curve: Sequence[int], moving: Sequence[int] | None, slot_bytes: int, *, has_gradients: bool
) -> dict[str, int]:
    state = problem.profile.state
    tick = max(range(len(curve)), key=curve.__getitem__)
    base = problem.step.ticks[tick].base_bytes
    there = moving[tick] if moving is not None else 0
    slots = slot_bytes if tick == len(problem.starts) - 1 else 0
    gradients = gradients_at(problem, tick, has_gradients)
    fixed = state_bytes(problem.profile, has_gradients=has_gradients) - problem.state_bytes
    return {
        "weights": state.parameters,
        OPTIMIZER: state.optimizer - problem.state_bytes + there + slots,
        "buffers and batch": state.buffers + state.inputs + state.others + state.rounding,
        "gradients": gradients,
        "activations": int(curve[tick]) - base - there,
        TEMPORARIES: base - slots - fixed - (0 if has_gradients else gradients),
        "peak": int(curve[tick]),
    }


def gradients_at(problem: Problem, tick: int, has_gradients: bool) -> int:
    """Bytes of gradients that have been made by a tick."""
    profile = problem.profile
    if has_gradients:
        return profile.state.gradients
    if tick >= len(problem.starts) - 1:
        return profile.state.gradients
    return profile.op_gradient_bytes[problem.starts[tick + 1] - 1]
