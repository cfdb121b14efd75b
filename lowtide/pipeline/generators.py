"""The schedules of the field, each written as the loops that its authors describe. `make_schedule` makes one by name.

What: every generator gives the computing actions of all ranks; `with_transfers` adds sends and receives. Where torch
has the schedule, the actions equal torch's one by one (tests/pipeline/test_generators.py).

In the comments P is the number of ranks, M that of micro-batches, r the rank. F, B, I and W are the times of the four
kinds of action on one stage, F&B that of a pair.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from lowtide.config.run import SCHEDULES
from lowtide.errors import ConfigError, did_you_mean
from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Schedule, as_v, in_rounds, made_by


class _Row:
    """The actions of one rank while they are written. Each stage takes its micro-batches in order, so an action needs
    only its kind and its stage."""

    def __init__(self) -> None:
        self.actions: list[AnyAction] = []
        self._next: Counter[tuple[Kind, int]] = Counter()

    def _take(self, kind: Kind, stage: int) -> Action:
        """The next micro-batch of this stage. Both kinds of backward count on one counter."""
        counted = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
        micro_batch = self._next[counted, stage]
        self._next[counted, stage] += 1
        if kind is Kind.BACKWARD:
            self._next[Kind.BACKWARD_WEIGHT, stage] += 1
        return Action(kind, stage, micro_batch)

    def forward(self, stage: int) -> None:
        self.actions.append(self._take(Kind.FORWARD, stage))

    def backward(self, stage: int) -> None:
        self.actions.append(self._take(Kind.BACKWARD, stage))

    def backward_input(self, stage: int) -> None:
        self.actions.append(self._take(Kind.BACKWARD_INPUT, stage))

    def backward_weight(self, stage: int) -> None:
        self.actions.append(self._take(Kind.BACKWARD_WEIGHT, stage))

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        self.actions.append(Pair(self._take(Kind.FORWARD, forward_stage), self._take(Kind.BACKWARD, backward_stage)))


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965). Every activation of the batch is held."""
    rows = []
    for rank in range(num_ranks):
        row = _Row()
        for _ in range(num_micro_batches):
            row.forward(rank)
        for _ in range(num_micro_batches):
            row.backward(rank)
        rows.append(tuple(row.actions))
    return Schedule("gpipe", num_micro_batches, in_rounds(num_ranks, 1), tuple(rows))


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al., arXiv 2006.09503): rank r holds at most P - r chunks.

    Bubble: (P - 1)(F + B).
    """
    rows = []
    for rank in range(num_ranks):
        row = _Row()
        warm_up = min(num_ranks - 1 - rank, num_micro_batches)
        for _ in range(warm_up):
            row.forward(rank)
        for _ in range(num_micro_batches - warm_up):
            row.forward(rank)
            row.backward(rank)
        for _ in range(warm_up):
            row.backward(rank)
        rows.append(tuple(row.actions))
    return Schedule("1f1b", num_micro_batches, in_rounds(num_ranks, 1), tuple(rows))


def interleaved(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., arXiv 2104.04473): 1F1B with several smaller stages on each rank, which it
    visits in rounds of at least P micro-batches (when M >= P). Bubble: (P - 1)(F + B) of a stage, which is
    `stages_per_rank` times smaller."""
    return _interleaved("interleaved", num_ranks, num_micro_batches, stages_per_rank, overlap=False)


def interleaved_overlap(num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Schedule:
    """Interleaved 1F1B with one more micro-batch in warm-up (Megatron-LM's `--overlap-moe-expert-parallel-comm`;
    MindSpeed's `--moe-fb-overlap`): the forward and the backward that meet in the steady state are then of different
    chunks on every rank, and run as a pair. Costs one more chunk in memory."""
    return _interleaved("interleaved_overlap", num_ranks, num_micro_batches, stages_per_rank, overlap=True)


def _interleaved(name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int, *, overlap: bool) -> Schedule:
    per_round = _micro_batches_per_round(name, num_ranks, num_micro_batches)
    total = stages_per_rank * num_micro_batches
    rows = []
    for rank in range(num_ranks):
        forwards = [turn // per_round % stages_per_rank * num_ranks + rank for turn in range(total)]
        backwards = [num_ranks * (stages_per_rank - 1) + 2 * rank - stage for stage in forwards]
        row = _Row()
        warm_up = (stages_per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank) + (1 if overlap else 0)
        warm_up = min(warm_up, total)
        for turn in range(warm_up):
            row.forward(forwards[turn])
        for turn in range(total - warm_up):
            if overlap:
                row.pair(forwards[warm_up + turn], backwards[turn])
            else:
                row.forward(forwards[warm_up + turn])
                row.backward(backwards[turn])
        for turn in range(total - warm_up, total):
            row.backward(backwards[turn])
        rows.append(tuple(row.actions))
    return Schedule(name, num_micro_batches, in_rounds(num_ranks, stages_per_rank), tuple(rows))


def _micro_batches_per_round(name: str, num_ranks: int, num_micro_batches: int) -> int:
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds:
        below = num_micro_batches // num_rounds * num_rounds
        raise ConfigError(
            f"pipeline: {num_micro_batches} micro-batches on {num_ranks} ranks do not split into {num_rounds} equal "
            f"rounds of '{name}'; use {below} or {below + num_rounds} micro-batches"
        )
    return num_micro_batches // num_rounds


def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): two stages on each rank, as a V; weight gradients fill the bubble.

    No rank waits between its first and its last action when F = I = W and M >= 2P - 1. With fewer micro-batches the
    actions are those of 2P - 1 micro-batches without the superfluous ones, as torch has them.
    """
    at_least = max(num_micro_batches, 2 * num_ranks - 1)
    rows = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        row = _Row()
        # warm-up: forwards until the first micro-batch comes back from the turn
        for _ in range(2 * (num_ranks - rank) - 1):
            row.forward(down)
        for _ in range(rank):
            row.forward(up)
            row.forward(down)
        for _ in range(num_ranks - rank):
            row.forward(up)
            row.backward_input(up)
            row.backward_weight(up)
        # steady: one forward and one backward of each of the two stages
        num_down, num_up = 2 * num_ranks - 1 - rank, num_ranks
        while num_up < at_least:
            if num_down < at_least:
                row.forward(down)
                num_down += 1
            row.backward_input(down)
            row.backward_weight(down)
            row.forward(up)
            row.backward_input(up)
            row.backward_weight(up)
            num_up += 1
        # cool-down: gradients of inputs first, since other ranks wait for them
        for _ in range(rank):
            row.backward_input(down)
            row.backward_input(up)
        for _ in range(num_ranks - rank):
            row.backward_input(down)
            row.backward_weight(down)
        for _ in range(rank):
            row.backward_weight(up)
        for _ in range(rank):
            row.backward_weight(down)
        rows.append(tuple(every for every in row.actions if every.parts[0].micro_batch < num_micro_batches))
    return Schedule("zb_v", num_micro_batches, as_v(num_ranks), tuple(rows))


def dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """DualPipeV (DeepSeek, github.com/deepseek-ai/DualPipe, dualpipe/dualpipev.py): two stages on each rank, as a V,
    and a forward and a backward of different chunks run as a pair (F&B) for most of the step.

    Bubble: (P - 1)(F&B + B - 3W) on the last rank, for F = I >= W and F&B >= B. Every rank holds at most
    2P + 1 chunks. It pays only where a pair is faster than its two parts one after the other.
    """
    if num_micro_batches < 2 * num_ranks:
        raise ConfigError(
            f"pipeline: 'dualpipev' on {num_ranks} ranks needs at least {2 * num_ranks} micro-batches (2 x ranks), "
            f"not {num_micro_batches}"
        )
    rows = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        row = _Row()
        put_off: deque[int] = deque()
        """Stages of the input gradients whose weight gradients are still to come, oldest first."""

        # 1. F0, 2(P - r - 1) times: fill the way down.
        for _ in range(2 * (num_ranks - rank - 1)):
            row.forward(down)

        # 2. F0 F1, r + 1 times: the first micro-batches come back up.
        for _ in range(rank + 1):
            row.forward(down)
            row.forward(up)

        # 3. I1 W1 F1, P - r - 1 times: the gradient goes on its way before the weights are seen to.
        for _ in range(num_ranks - rank - 1):
            row.backward_input(up)
            row.backward_weight(up)
            row.forward(up)

        # 4. F0&B1 F1&B0, M - 2P + r + 1 times: the main part. The turn does its first two apart, which is earlier.
        for turn in range(num_micro_batches - 2 * num_ranks + rank + 1):
            if turn == 0 and rank == num_ranks - 1:
                row.forward(down)
                row.backward(up)
            else:
                row.pair(down, up)
            row.pair(up, down)

        # 5. B1 F1&B0, P - r - 1 times: nothing is left to go down.
        for _ in range(num_ranks - rank - 1):
            row.backward(up)
            row.pair(up, down)

        # 6. B1 B0, r + 1 times: of these 2(r + 1) the second half puts its weight gradients off.
        for turn in range(2 * (rank + 1)):
            stage = up if turn % 2 == 0 else down
            if turn < rank + 1:
                row.backward(stage)
            else:
                row.backward_input(stage)
                put_off.append(stage)

        # 7. W I0, P - r - 1 times.
        for _ in range(num_ranks - rank - 1):
            row.backward_weight(put_off.popleft())
            row.backward_input(down)
            put_off.append(down)

        # 8. W, r + 1 times: the rest of what was put off.
        for _ in range(rank + 1):
            row.backward_weight(put_off.popleft())

        assert not put_off
        rows.append(tuple(row.actions))
    return Schedule("dualpipev", num_micro_batches, as_v(num_ranks), tuple(rows))


def one_stage_overlap(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Pairs without a pipeline (MindSpeed's and Megatron-LM's forward-backward overlap at PP = 1): the forward of each
    micro-batch runs with the backward of the one before. Two micro-batches are held instead of one."""
    if num_ranks != 1:
        raise ConfigError(f"pipeline: 'one_stage_overlap' is for 1 rank, not {num_ranks}; use 'dualpipev' for more")
    row = _Row()
    row.forward(0)
    for _ in range(num_micro_batches - 1):
        row.pair(0, 0)
    row.backward(0)
    return Schedule("one_stage_overlap", num_micro_batches, (0,), (tuple(row.actions),))


def paired(schedule: Schedule) -> Schedule:
    """The same schedule, in which a forward and the full backward right after it are a pair where they can be one.

    `dualpipev` has such two on the last rank, where its main part begins; apart they are earlier by what their weight
    gradients take, so that a pair pays where these are put off (`WeightGradients(most_kept=...)`). Other schedules may
    stand still then (`gpipe` does), which `verify` says.
    """
    rows = []
    for row in schedule.actions:
        made: list[AnyAction] = []
        for each in row:
            before = made[-1] if made else None
            if (
                isinstance(each, Action)
                and each.kind is Kind.BACKWARD
                and isinstance(before, Action)
                and before.kind is Kind.FORWARD
                and made_by(before) not in schedule.needs(each)
            ):
                made[-1] = Pair(before, each)
            else:
                made.append(each)
        rows.append(tuple(made))
    return replace(schedule, actions=tuple(rows))


GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "interleaved_overlap": interleaved_overlap,
    "zb_v": zb_v,
    "dualpipev": dualpipev,
    "one_stage_overlap": one_stage_overlap,
}
"""`SCHEDULES` of config/run.py has what else is known of each."""
MOST_FORWARDS = 2**18
"""Of all ranks together in one step. A schedule of so many is made in seconds; each takes about a kilobyte."""


def make_schedule(name: str, *, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None = None) -> Schedule:
    """The schedule of this name. `stages_per_rank` can be chosen for interleaved schedules only; absent, it is 2."""
    if name not in GENERATORS:
        names = ", ".join(f"'{known}'" for known in GENERATORS)
        near = did_you_mean(name, GENERATORS)
        raise ConfigError(f"pipeline: unknown schedule '{name}'{near or f'; known are {names}'}")
    for what, number in (("ranks", num_ranks), ("micro-batches", num_micro_batches)):
        if number < 1:
            raise ConfigError(f"pipeline: the number of {what} must be at least 1, not {number}")
    make, own = GENERATORS[name], SCHEDULES[name].stages_per_rank
    num_stages = num_ranks * (stages_per_rank or own or 2)
    if num_stages * num_micro_batches > MOST_FORWARDS:
        raise ConfigError(
            f"pipeline: {num_stages} stages x {num_micro_batches} micro-batches are {num_stages * num_micro_batches} "
            f"forward passes in one schedule, of at most {MOST_FORWARDS}; take fewer of one of them"
        )
    if stages_per_rank is None:
        return make(num_ranks, num_micro_batches)
    if own is None:
        if stages_per_rank < 1:
            raise ConfigError(f"pipeline: the number of stages of a rank must be at least 1, not {stages_per_rank}")
        return make(num_ranks, num_micro_batches, stages_per_rank)
    if stages_per_rank != own:
        raise ConfigError(
            f"pipeline: '{name}' has stages_per_rank {own}, not {stages_per_rank}; 'interleaved' takes any number"
        )
    return make(num_ranks, num_micro_batches)
