"""What a run of the trainer (examples/train) leaves for its report, kept up to date while it goes on.

What: run.json (how the run stands), plan.json, step.json (the plan on the clock) and events.json (what the autopilot
decided) of the first rank; rank-R.json (its last step) of each rank of a pipeline. Each file is replaced
as a whole, so a reader never sees half of one.
A full disk ends no training: what cannot be written is left out, which is said once.
Cost: a run of the timeline for each plan that is made; a file of a rank each 16 steps. Not covered: metrics.jsonl,
which examples/train/progress.py writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lowtide.planner.host_costs import HOST_COSTS
from lowtide.report import rank_step, run_state
from lowtide.report.played_step import play, played_to_json
from lowtide.report.rank_step import RankStep
from lowtide.report.run_state import RunState
from lowtide.report.story import Story, story_of, story_to_json
from lowtide.runtime.autopilot.autopilot import Autopilot
from lowtide.runtime.autopilot.plan_source import BudgetSource

METRICS, RUN, PLAN, STEP, EVENTS = "metrics.jsonl", "run.json", "plan.json", "step.json", "events.json"
_EVERY_STEPS = 16
"""Of the files of ranks, once so many steps have had one each: counted, so that all ranks write the same steps."""
_MOST_WRITES = 64
"""Batches that change their shape all the time change plans as often; those after that are not worth a file."""
_MOST_PEAKS = 4096


def rank_name(rank: int) -> str:
    return f"rank-{rank}.json"


class RunFiles:
    """Of one rank. `warn` hears, once, that a file could not be written."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._warn = warn
        self._has_warned = False
        self._state: RunState | None = None
        self._digest: str | None = None
        self._story: Story | None = None
        self._num_writes = 0
        self._peaks: list[tuple[int, int]] = []
        self._num_rank_steps = 0

    def begin(self, *, num_steps: int, num_ranks: int, is_first: bool, device: str) -> None:
        """Training begins. The first rank says so, and clears what an earlier run has left."""
        self._state = RunState.now(num_steps=num_steps, num_ranks=num_ranks, device=device)
        if is_first:
            for name in (PLAN, STEP, EVENTS, *(path.name for path in self._folder.glob("rank-*.json"))):
                with contextlib.suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
            self._write(RUN, run_state.to_json(self._state))

    def end(self, *, stopped_by: str | None) -> None:
        """Of the first rank: all steps are done, or a signal came. Nothing where there was none to do."""
        if self._state is None:
            return
        state = dataclasses.replace(self._state, state="stopped" if stopped_by else "done", why=stopped_by or "")
        self._write(RUN, run_state.to_json(state))

    def failed(self, why: str, *, step: int, rank: int) -> None:
        """Of the rank that failed first. Nothing before training has begun."""
        if self._state is not None:
            state = dataclasses.replace(self._state, state="failed", why=why, step=step, rank=rank)
            self._write(RUN, run_state.to_json(state))

    def follow(self, handle: Any) -> None:
        """Write the plan in force, if it is another one than before. A handle without a solved plan writes nothing."""
        if not isinstance(handle, Autopilot) or self._num_writes == _MOST_WRITES:
            return
        plan = handle.plan
        if plan is None or plan.predicted is None:
            return
        story = story_of(handle)
        if story != self._story:
            self._story = story
            self._write(EVENTS, story_to_json(story))
        if plan.digest() == self._digest:
            return
        assert isinstance(handle.source, BudgetSource)
        assert handle.profile is not None and handle.link is not None
        known: Any = {"link": handle.link, "has_gradients": handle.has_gradients, "costs": HOST_COSTS}
        played = play(plan, handle.profile, handle.source.config, **known)
        self._digest = plan.digest()
        self._num_writes += 1
        self._write(PLAN, plan.to_json())
        self._write(STEP, played_to_json(played))

    def note_peak(self, step: int, peak_bytes: int | None) -> None:
        """Of this rank, after each step."""
        if peak_bytes is not None:
            self._peaks.append((step, peak_bytes))
        if len(self._peaks) > _MOST_PEAKS:
            self._peaks = self._peaks[::2]

    def note_rank(self, make: Callable[[], RankStep], *, step: int, is_last: bool) -> None:
        """Write what this rank did in a step: of the first steps, of some later ones, and of the last."""
        self._num_rank_steps += 1
        if is_last or self._num_rank_steps <= _EVERY_STEPS or step % _EVERY_STEPS == 0:
            made = dataclasses.replace(make(), peaks=tuple(self._peaks))
            self._write(rank_name(made.rank), rank_step.to_json(made))

    def _write(self, name: str, text: str) -> None:
        partial = self._folder / f".{name}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(self._folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            if not self._has_warned:
                self._has_warned = True
                self._warn(
                    f"lowtide: {self._folder / name} cannot be written: {error.strerror}; training goes on, and its "
                    "report will lack what happens from now on"
                )
