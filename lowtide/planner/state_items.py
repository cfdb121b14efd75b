"""An optimizer's state as items of a step, so that a solver weighs it against activations: one budget, one link.

What: `with_state` adds shares of the state to a problem. Each has one of three fates:
- keep: it stays on the device;
- swap: it leaves while forward runs and comes back while backward runs, into memory that backward has freed, on the
  lanes that copy activations too. All such shares are on the device when the optimizer steps;
- recompute, which here means *streamed*: it comes and goes while the optimizer steps, through three slots of one bucket
  (Megatron-LM's chunked offload of optimizer state, #6244, has two). Compute waits for it: the time of a copy in the
  slower direction, since both run at once and the last copy out has the next forward to land in. That is s P / (N BW),
  with s bytes a parameter, P parameters, N shards and a link of BW bytes a second.

How: the step repeats, so a share is there when forward starts, like an activation saved by the first tick, and is read
in one more tick after that of the optimizer. These two moments have no bytes of their own: what is there between steps
is there in the optimizer's tick too, which has the gradients as well. The optimizer's tick has, beside the shares that
are kept or swapped, the slots, and temporaries of one bucket and not of all parameters.

Cost: at most 64 items more. Not covered: that streamed shares are on the host as well as swapped ones (the caller takes
both from its budget), and micro-batches: a step of several is planned as one that is its first and its last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lowtide.core.fate import Fate
from lowtide.core.profile import Profile
from lowtide.planner.problem import Problem
from lowtide.timeline.events import Timeline
from lowtide.timeline.step import Item, Tick

NAME = "optimizer state"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShares:
    """Parts of the state that may be elsewhere between steps, whole buckets each."""

    frees_gradients: ClassVar[bool] = False
    """Whether parameters are updated, and gradients freed, while backward runs."""

    sizes: tuple[int, ...]
    fates: tuple[Fate, ...]
    """What each of them may be."""
    streamed_seconds: tuple[float, ...]
    """What compute waits for each of them if it is streamed."""
    slot_bytes: int
    temporaries: int
    """What the optimizer needs beside one bucket."""
    bucket_bytes: int = 0
    num_places: int = 0
    """Of buckets on the device, where they are another number than while the optimizer steps."""

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def host_bytes(self) -> int:
        """What may be on the next tier at once."""
        return self.nbytes

    def here(self, profile: Profile, *, has_gradients: bool) -> Profile:
        """The step as far as it is there all the time. `has_gradients`: those of earlier passes are."""
        return profile

    def added_to(self, problem: Problem, profile: Profile) -> Problem:
        """`problem` of the step that is `here`, with what comes and goes as its last items. `profile`: before that."""
        return with_state(problem, self)

    def there(self, problem: Problem, fates: Sequence[Fate], timeline: Timeline) -> tuple[int, int]:
        """Of the state, what is on the device at the peak: bytes of items, and of places that ticks count."""
        tick, start = timeline.peak_tick, len(problem.nodes)
        if tick in (0, len(problem.step.ticks) - 1):
            return 0, 0  # moments without bytes of their own
        shares = zip(self.sizes, fates[start:], timeline.evict_by[start:], timeline.prefetch_at[start:], strict=True)
        here = sum(
            size
            for size, fate, gone, back in shares
            if fate is Fate.KEEP or (gone is not None and back is not None and not gone <= tick < back)
        )
        moves = any(fate is not Fate.KEEP for fate in fates[start:])
        return here, self.slot_bytes if moves and tick == len(problem.starts) - 1 else 0


def with_state(problem: Problem, shares: StateShares) -> Problem:
    """The problem in which these shares are the last items of the step."""
    step, state, nbytes = problem.step, problem.profile.state, shares.nbytes
    ticks = [dataclasses.replace(tick, base_bytes=tick.base_bytes - nbytes) for tick in step.ticks]
    ticks[0] = dataclasses.replace(ticks[0], base_bytes=ticks[0].base_bytes - nbytes)
    bucketed = ticks[-1].base_bytes - state.optimizer_temporaries + shares.temporaries + shares.slot_bytes
    ticks[-1] = dataclasses.replace(ticks[-1], base_bytes=bucketed)
    last = len(ticks)
    ticks.append(Tick(seconds=0.0, base_bytes=-nbytes, name="after the step of the optimizer"))
    items = tuple(
        Item(
            name=f"{NAME} {number}",
            nbytes=size,
            born=0,
            saved=0,
            dies=1,
            reads=(last,),
            release=last + 1,
            fates=shares.fates,
            recipe_seconds=seconds,
        )
        for number, (size, seconds) in enumerate(zip(shares.sizes, shares.streamed_seconds, strict=True))
    )
    return dataclasses.replace(
        problem,
        step=dataclasses.replace(
            step,
            ticks=tuple(ticks),
            items=(*step.items, *items),
            stops=tuple(sorted({*step.stops, 1, last})),
            watched=(last,),
        ),
        held=tuple(there - nbytes for there in problem.held),
        state_bytes=nbytes,
    )


def split(problem: Problem, fates: Sequence[Fate]) -> tuple[tuple[Fate, ...], tuple[Fate, ...]]:
    """The fates of activations, and those of shares of the state."""
    num_nodes = len(problem.nodes)
    return tuple(fates[:num_nodes]), tuple(fates[num_nodes:])


def in_order(problem: Problem, fates: Sequence[Fate]) -> tuple[Fate, ...]:
    """As many shares with each fate, in the order in which the optimizer steps them: what is there, what comes early,
    what is streamed. Shares of one size are all alike."""
    own, state = split(problem, fates)
    order = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
    return (*own, *sorted(state, key=order.index))
