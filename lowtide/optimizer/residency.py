"""Which state stays on the device with `resident="auto"`: what the device has room for at its worst moment.

What: `Residency` looks on for three steps while all of the state is elsewhere: how high the device's memory rises, and
how long steps wait for copies. Then it brings whole buckets back to stay, first ones first, and looks on for three more
steps, so that what was predicted stands beside what came of it (`StateChoice`).

    room = what this process can have of the device - 5 % of the device (HEADROOM) - the highest allocation so far

Why not at once: before the first steps nobody knows what activations take. Where steps do not wait, nothing stays:
memory is better left to others then.
When memory runs short later (the room falls below minus half the headroom, or a bucket finds no memory) buckets leave
again, last ones first, until the headroom is free, and never come back by themselves. Which state stays changes no bit.

Predicted exposure, at most: `waited * moved after / moved before`. Of a step's copies a part is hidden and the rest is
waited for; less to copy leaves what is hidden at least as large a part.
Free from: `(hidden + waited) / hidden` times the tokens of these steps, if what hides grows with them. Both are known
where `overlap="auto"` has tried to fetch in backward; else nothing is said.

None stays, and the handle says why: on a device without a counter of its memory (the CPU, whose device is main memory:
what is to leave it, leaves it), and where there are several ranks: ranks that chose differently would step parameters
in another order, and optimizers that talk to each other within a step would wait for ever.
Cost: a call of the driver a step. Not covered: peaks that another part of the process has had reset within a step;
memory that others take within a step.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.core.budget import HEADROOM, DeviceMemory
from lowtide.errors import ConfigError
from lowtide.optimizer.store import StateStore
from lowtide.units import format_bytes

NUM_WATCHED = 3
"""Steps before the choice, and after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChoice:
    """What 'auto' chose, of this rank. Seconds are of one step."""

    moved_bytes: int
    """State in buckets that is elsewhere between steps."""
    resident_bytes: int
    """State in buckets that was brought back to stay, and is still there."""
    reason: str
    """One short phrase."""
    waited_seconds: float | None = None
    """Steps waited so long for copies with all of it elsewhere; None: the engine has others' copies too."""
    predicted_seconds: float | None = None
    """What they wait at most with what stays."""
    measured_seconds: float | None = None
    """What they waited then; None until it is known."""
    free_from: float | None = None
    """Steps with so many times the tokens of these wait for nothing; None: not known."""

    def __str__(self) -> str:
        total = self.moved_bytes + self.resident_bytes
        share = self.resident_bytes / total if total else 0.0
        text = (
            f"resident 'auto': {format_bytes(self.moved_bytes)} elsewhere, {format_bytes(self.resident_bytes)} "
            f"({share:.0%}) stay, {self.reason}"
        )
        if self.predicted_seconds is not None:
            measured = self.measured_seconds
            text += f"; a step waits {self.waited_seconds:.3f} s with none, predicted {self.predicted_seconds:.3f} s, "
            text += "not yet measured" if measured is None else f"measured {measured:.3f} s"
        if self.free_from is not None:
            text += f"; free from {self.free_from:.1f} times the tokens of a step"
        return text


class Residency:
    """See the module's text. `memory()`: what this process can have of the device now.

    `settle()`: do what was put off, and let copies land. `is_alone`: the engine has no copies of others, so that its
    waits are ours. `why_none`: why nothing may stay; empty where something may.
    """

    def __init__(
        self,
        store: StateStore,
        memory: Callable[[], DeviceMemory],
        *,
        settle: Callable[[], None],
        is_alone: bool,
        why_none: str,
    ) -> None:
        self._store = store
        self._memory = memory
        self._settle = settle
        self._is_alone = is_alone
        self._num_timed = 0
        """Steps that were looked at."""
        self._waited_seconds = 0.0
        """Time that all steps had waited when the last of these was over."""
        self._peak_bytes = 0
        self._left_bytes = 0
        """State that stayed, and left since `_peak_bytes` was reached."""
        self._between_bytes: int | None = None
        """Bytes on the device after the last step."""
        self._num_refused = 0
        self._is_short = False
        why_none = why_none or self._why_unknown()
        self._is_watching = not why_none
        self._is_timing = not why_none
        self.choice: StateChoice | None = self._say(why_none) if why_none else None
        """None while it looks on."""

    def after_step(
        self, waited_seconds: Callable[[], float], hidden: tuple[float, float] | None, *, is_settled: bool
    ) -> None:
        """A step is over. `waited_seconds()`: how long steps have waited in all.

        `hidden`: what a step waits without fetching in backward, and with it; None where it was not tried.
        `is_settled`: the way of overlapping is chosen and the state is made.
        """
        if not self._is_watching:
            return
        room = self._room()
        if self.choice is not None and self._store.staying_bytes:
            self._make_room(room)
        if not is_settled or not self._is_timing:
            return
        self._num_timed += 1
        if self._num_timed not in (1, 1 + NUM_WATCHED, 2 + NUM_WATCHED, 2 + 2 * NUM_WATCHED):
            return
        self._store.transfers.settle()  # or the device would not have got to the waits of the last steps
        before, self._waited_seconds = self._waited_seconds, waited_seconds()
        waited = (self._waited_seconds - before) / NUM_WATCHED
        if self._num_timed == 1 + NUM_WATCHED:
            self._choose(room, waited, hidden)
        elif (
            self._num_timed == 2 + 2 * NUM_WATCHED
        ):  # the step after the choice is left out: it waits for buckets to come
            self._is_timing = False
            self._compare(waited)

    def _why_unknown(self) -> str:
        if self._store.engine.device_bytes() is None:
            return f"{self._store.device} has no counter of its memory"
        try:
            self._memory()
        except (ConfigError, RuntimeError) as error:  # a backend without the call
            return f"nothing says how much memory {self._store.device} has ({error})"
        return ""

    # -- memory --------------------------------------------------------------------------------------------------------

    def _room(self) -> int:
        """Bytes that more could stay, less than 0 where too much does."""
        engine, memory = self._store.engine, self._memory()
        in_use, peak = engine.device_bytes() or 0, engine.device_peak_bytes() or 0
        if max(peak, in_use) > self._peak_bytes:
            self._peak_bytes, self._left_bytes = max(peak, in_use), 0
        # What came between steps (another optimizer's state that stays) is not in a peak yet.
        risen = 0 if self._between_bytes is None else max(in_use - self._between_bytes, 0)
        self._between_bytes = in_use
        headroom = int(memory.total_bytes * HEADROOM)
        left = memory.free_bytes - (self._peak_bytes - self._left_bytes)
        self._is_short = left < headroom // 2
        return left - headroom - risen

    def _make_room(self, room: int) -> None:
        """Send away what there is no memory for any more."""
        refused = self._store.transfers.num_refused
        is_refused, self._num_refused = refused > self._num_refused, refused
        if not is_refused and not self._is_short:
            return
        self._settle()
        left = self._store.send_away(None if is_refused else -room)
        self._left_bytes += left
        self._between_bytes = self._store.engine.device_bytes()
        self._is_timing = False
        warnings.warn(
            f"lowtide: memory on {self._store.device} runs short: {format_bytes(left)} of optimizer state that stayed "
            "there are elsewhere from now on",
            RuntimeWarning,
            stacklevel=2,
        )
        self.choice = self._say("the rest left when memory ran short")

    # -- the choice ----------------------------------------------------------------------------------------------------

    def _choose(self, room: int, waited: float, hidden: tuple[float, float] | None) -> None:
        is_known = self._is_alone or waited > 0.0
        self._num_refused = self._store.transfers.num_refused
        before, came = self._store.moved_bytes, 0
        reason = "no step waits for copies"
        if waited > 0.0 or not is_known:
            self._settle()
            came = self._store.let_stay(room)
            reason = f"of {format_bytes(max(room, 0))} that the device has free at its worst moment"
        self._between_bytes = self._store.engine.device_bytes()
        after = before - came
        predicted = waited * after / before if is_known and before else None
        without, ahead = hidden or (0.0, 0.0)
        free_from = None
        if predicted is not None and without > ahead and after:
            # In these steps so much is hidden, however much moves.
            free_from = max(without * after / before / (without - ahead), 1.0)
        self.choice = self._say(
            reason, waited_seconds=waited if is_known else None, predicted_seconds=predicted, free_from=free_from
        )

    def _compare(self, waited: float) -> None:
        assert self.choice is not None
        if self.choice.predicted_seconds is not None:
            self.choice = dataclasses.replace(self.choice, measured_seconds=waited)

    def _say(self, reason: str, **seconds: float | None) -> StateChoice:
        store = self._store
        return StateChoice(moved_bytes=store.moved_bytes, resident_bytes=store.staying_bytes, reason=reason, **seconds)
