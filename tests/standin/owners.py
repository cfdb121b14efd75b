"""Who owns the bytes on the stand-in at the worst moment of a step, beside what the plan said of that moment.

Run: `LOWTIDE_STANDIN=1 python -m tests.standin.owners SEED NUMBER`, a draw of `on_device/test_optimize.py`. It prints,
of the first planned step above its budget (else of the largest), the account of the plan in force, and the blocks that
were there: how many, their bytes, who wrote to them last, and the lines of Python that asked for them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from tests.standin import device

_NUM_FRAMES = 5
_OURS = ("/lowtide/", "/transformers/", "/tests/", "/torch/optim/")


@dataclass(slots=True)
class Blocks:
    """Blocks of the device that were given out while somebody watched."""

    before_bytes: int
    """What was there already."""
    asked: list[str] = field(default_factory=list)
    """By block: who asked for it."""
    found: list[device.Life] = field(default_factory=list)
    """The same blocks, once nobody watches any more."""

    def at_peak(self, start: int, end: int) -> tuple[int, list[int]]:
        """The most bytes between two moments, beside those that were there before, and the numbers of the blocks that
        were there then."""
        changes = [(life.born, life.nbytes) for life in self.found]
        changes += [(life.dies, -life.nbytes) for life in self.found if life.dies >= 0]
        now = most = 0
        when = start
        for moment, change in sorted(changes):
            now += change
            if start <= moment < end and now > most:
                most, when = now, moment
        there = [n for n, life in enumerate(self.found) if life.born <= when and (life.dies < 0 or life.dies > when)]
        return most, there

    def lines(self, there: list[int]) -> Iterator[str]:
        """One for each kind of block, the largest first."""
        kinds = Counter((self.found[number].what, self.asked[number]) for number in there)
        sizes: Counter[tuple[str, str]] = Counter()
        for number in there:
            sizes[self.found[number].what, self.asked[number]] += self.found[number].nbytes
        for kind, nbytes in sizes.most_common():
            what, asked = kind
            yield f"{nbytes:>9,} bytes in {kinds[kind]:>3}: {what or 'still there at the end'} | {asked}"


@contextmanager
def watched() -> Iterator[Blocks]:
    """Inside, each block that is given out is noted, with whoever asks for it. For all devices together."""
    blocks = Blocks(torch.accelerator.memory_allocated())

    def hear(number: int) -> None:
        node = torch._C._current_autograd_node()
        frames = " < ".join(_frames(sys._getframe()))
        blocks.asked.append(f"{'' if node is None else node.name() + ': '}{frames}")

    with device.watching(hear):
        yield blocks
    blocks.found = device.lives(len(blocks.asked))


def _frames(frame: FrameType | None) -> Iterator[str]:
    left = _NUM_FRAMES
    while frame is not None and left:
        code = frame.f_code
        if any(part in code.co_filename for part in _OURS) and code.co_filename != __file__:
            left -= 1
            yield f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back


def main(seed: int, number: int) -> None:
    """Print the owners of one draw."""
    from tests.standin import budgets
    from tests.standin.on_device import test_optimize

    training, share, policy, chance = test_optimize.drawn(seed)
    truth = budgets.plain(training)
    budget_bytes = truth.resting_bytes + int(share * (truth.peak_bytes - truth.resting_bytes))
    print(f"{training}\nplain {truth.peak_bytes:,}, at rest {truth.resting_bytes:,}, budget {budget_bytes:,}")
    steps: list[tuple[int, str]] = []  # when each was over, and the plan then; first, when planned steps began

    def look(tide: Any) -> None:
        if tide is None:
            steps[:] = [(device.moment(), "")]
            return
        assert tide.plan is not None and tide.plan.predicted is not None
        account = ", ".join(f"{line.what} {line.planned_bytes:,}" for line in tide.plan.account)
        steps.append((device.moment(), f"plan {tide.plan.digest()}: {account}"))

    device.play(policy, chance)
    with budgets.at_given_prices(budgets.Prices.drawn(seed, number)), watched() as blocks:
        got = budgets.planned(training, budget_bytes, look)
    device.play("late")
    for event in got.events:
        print(f"before step {event.forward}: {event.why}, {event.budget_bytes:,}, {event.digest}")
    print(*got.warned, f"budget {got.budget_bytes:,}; peaks {got.peaks}", sep="\n")
    worst = next((n for n, peak in enumerate(got.peaks) if peak > got.budget_bytes), None)
    worst = got.peaks.index(max(got.peaks)) if worst is None else worst
    start, (end, account) = steps[worst][0], steps[worst + 1]
    most, there = blocks.at_peak(start, end)
    print(f"step {worst}: {most:,} beside {blocks.before_bytes:,}\n{account}")
    print(*blocks.lines(there), sep="\n")


if __name__ == "__main__":
    device.load()
    main(*map(int, sys.argv[1:]))
