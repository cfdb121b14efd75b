"""The schedules of the field, each written as the loops that its authors describe. `make_schedule` makes one by name.

What: every generator gives the computing actions of all ranks; `with_transfers` adds sends and receives. Where torch
has the schedule, the actions equal torch's one by one (tests/pipeline/test_generators.py).

In the comments P is the number of ranks, M that of micro-batches, r the rank. F, B, I and W are the times of the four
kinds of action on one stage, F&B that of a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lowtide.config.run import SCHEDULES
from lowtide.errors import ConfigError, did_you_mean
from lowtide.pipeline.schedule import Action, AnyAction, Kind, Pair, Schedule, as_v, in_rounds


class _Row:
    """The actions of one rank while they are written, in the words of the papers: `F0&B1` is a pair of the forward of
    its first stage and the backward of its second one. Each stage takes its micro-batches in order."""

    def __init__(self, *stages: int) -> None:
        """stages: of the rank, which the words number from 0 on."""
        self.actions: list[AnyAction] = []
        self._stages = stages
        self._next: Counter[tuple[Kind, int]] = Counter()

    def _take(self, word: str) -> Action:
        """The next micro-batch of this stage. Both kinds of backward count on one counter."""
        kind, stage = Kind(word[0]), self._stages[int(word[1:])]
        counted = Kind.BACKWARD if kind is Kind.BACKWARD_INPUT else kind
        micro_batch = self._next[counted, stage]
        self._next[counted, stage] += 1
        if kind is Kind.BACKWARD:
            self._next[Kind.BACKWARD_WEIGHT, stage] += 1
        return Action(kind, stage, micro_batch)

    def add(self, words: str, times: int = 1) -> None:
        """All of the words, so many times."""
        for word in words.split() * times:
            parts = [self._take(part) for part in word.split("&")]
            self.actions.append(Pair(*parts) if len(parts) == 2 else parts[0])


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965). Every activation of the batch is held."""
    rows = []
    for rank in range(num_ranks):
        row = _Row(rank)
        row.add("F0", num_micro_batches)
        row.add("B0", num_micro_batches)
        rows.append(tuple(row.actions))
    return Schedule("gpipe", num_micro_batches, in_rounds(num_ranks, 1), tuple(rows))


def one_forward_one_backward(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al., arXiv 2006.09503): rank r holds at most P - r chunks.

    Bubble: (P - 1)(F + B).
    """
    rows = []
    for rank in range(num_ranks):
        row = _Row(rank)
        warm_up = min(num_ranks - 1 - rank, num_micro_batches)
        row.add("F0", warm_up)
        row.add("F0 B0", num_micro_batches - warm_up)
        row.add("B0", warm_up)
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
    turns = [turn // per_round % stages_per_rank for turn in range(total)]
    forwards, backwards = [f"F{turn}" for turn in turns], [f"B{stages_per_rank - 1 - turn}" for turn in turns]
    rows = []
    for rank in range(num_ranks):
        row = _Row(*range(rank, num_ranks * stages_per_rank, num_ranks))
        warm_up = (stages_per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank) + (1 if overlap else 0)
        warm_up = min(warm_up, total)
        row.add(" ".join(forwards[:warm_up]))
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            row.add(f"{forward}&{backward}" if overlap else f"{forward} {backward}")
        row.add(" ".join(backwards[total - warm_up :]))
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
        row = _Row(rank, 2 * num_ranks - 1 - rank)
        # warm-up: forwards until the first micro-batch comes back from the turn
        row.add("F0", 2 * (num_ranks - rank) - 1)
        row.add("F1 F0", rank)
        row.add("F1 I1 W1", num_ranks - rank)
        # steady: one forward and one backward of each of the two stages
        left_down = at_least - (2 * num_ranks - 1 - rank)
        row.add("F0 I0 W0 F1 I1 W1", left_down)
        row.add("I0 W0 F1 I1 W1", at_least - num_ranks - left_down)
        # cool-down: gradients of inputs first, since other ranks wait for them
        row.add("I0 I1", rank)
        row.add("I0 W0", num_ranks - rank)
        row.add("W1", rank)
        row.add("W0", rank)
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
        row = _Row(rank, 2 * num_ranks - 1 - rank)
        after = num_ranks - rank - 1
        """Ranks behind this one: P - r - 1."""
        row.add("F0", 2 * after)  # 1. fill the way down
        row.add("F0 F1", rank + 1)  # 2. the first micro-batches come back up
        row.add("I1 W1 F1", after)  # 3. the gradient goes on its way before the weights are seen to

        # 4. M - 2P + r + 1 times: the main part. The turn does its first two apart, which is earlier.
        row.add("F0&B1 F1&B0" if after else "F0 B1 F1&B0")
        row.add("F0&B1 F1&B0", num_micro_batches - 2 * num_ranks + rank)

        row.add("B1 F1&B0", after)  # 5. nothing is left to go down

        # 6. B1 B0, r + 1 times: of these 2(r + 1) the second half puts its weight gradients off.
        stages = [1, 0] * (rank + 1)
        row.add(" ".join(f"B{stage}" for stage in stages[: rank + 1]))
        row.add(" ".join(f"I{stage}" for stage in stages[rank + 1 :]))

        put_off = [*stages[rank + 1 :], *[0] * after]
        """Stages whose weight gradients are still to come, oldest first, those of the next line among them."""
        row.add(" ".join(f"W{stage} I0" for stage in put_off[:after]))  # 7.
        row.add(" ".join(f"W{stage}" for stage in put_off[after:]))  # 8. the rest of what was put off
        rows.append(tuple(row.actions))
    return Schedule("dualpipev", num_micro_batches, as_v(num_ranks), tuple(rows))


def one_stage_overlap(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Pairs without a pipeline (MindSpeed's and Megatron-LM's forward-backward overlap at PP = 1): the forward of each
    micro-batch runs with the backward of the one before. Two micro-batches are held instead of one."""
    if num_ranks != 1:
        raise ConfigError(f"pipeline: 'one_stage_overlap' is for 1 rank, not {num_ranks}; use 'dualpipev' for more")
    row = _Row(0)
    row.add("F0")
    row.add("F0&B0", num_micro_batches - 1)
    row.add("B0")
    return Schedule("one_stage_overlap", num_micro_batches, (0,), (tuple(row.actions),))


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
