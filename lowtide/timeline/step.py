"""What a timeline runs: a training step as numbers. Plain data, no torch.

A step is a row of *ticks* (one or more operators that ran one after another), forward ticks first, and the *items* that
live across them. An item is one activation storage, or a retained input; a plan gives each one a fate. Everything else
that is on the device while a tick runs is in the tick's own `base_bytes`: model state, gradients made so far,
temporaries.

Lifetimes are half open, in ticks: born `a`, gone `b` means present in ticks `a .. b-1`.
Units: bytes, seconds, tick indices. Not covered: how a profile becomes a step (planner/problem.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.core.fate import Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A piece of computation."""

    seconds: float
    base_bytes: int
    """Most bytes on the device while it runs, beyond the items."""
    name: str = ""
    """Of the operator that needs most of them, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """How an item that is only on a visit comes and goes."""

    nbytes: int = 0
    """What comes; 0: it is no visitor."""
    leave_bytes: int = 0
    """What leaves after it was read, in backward."""
    fetch_from: int = 0
    """It is not fetched before this tick, in which its place is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that is kept, swapped or recomputed."""

    name: str
    nbytes: int
    born: int
    saved: int
    """It can be sent away once this tick has run."""
    dies: int
    """First tick in which only autograd still holds it. Before this it is present whatever its fate."""
    reads: tuple[int, ...] = ()
    """Backward ticks that read it, ascending. Empty for a retained input, which only recipes read."""
    release: int = 0
    """First tick in which backward no longer holds it."""
    fates: tuple[Fate, ...] = (Fate.KEEP, Fate.SWAP)
    """The fates that it may have."""
    recipe_seconds: float = 0.0
    """Of a smaller form: what making it costs, and making the item from it."""
    recipe_bytes: int = 0
    """Bytes that its recipe needs beyond its inputs and its result, while it runs. Of a smaller form: in tick `born`
    while it is made, and while the item is made from it."""
    check_bytes: int = 0
    """Bytes of its fingerprint if its fate is recompute: from tick `born` to `Step.check_until - 1`."""
    inputs: tuple[int, ...] = ()
    """Items that its recipe reads (indices into `Step.items`), produced before it."""
    form: int | None = None
    """The item that stands for its smaller form. Where that one is kept or swapped, a fate of recompute means made from
    it, and not by the recipe. Where that one may not be recomputed, this item has no recipe."""
    form_of: int | None = None
    """Of a smaller form: the item that is made from it. Its own fate recompute means that there is no such form: what
    is made again is made by its recipe."""
    visit: Visit = Visit()
    """Of what is elsewhere when the step begins and is read once, in forward or backward, through a place that ticks
    count among their own bytes. Its own `nbytes` are 0."""

    @property
    def is_retained_input(self) -> bool:
        """Not saved by autograd: present only if a recipe reads it."""
        return not self.reads

    def is_for_forward(self, num_forward_ticks: int) -> bool:
        """A visitor that forward reads: nothing is to be decided about it, and it is only on the clock."""
        return self.visit.nbytes > 0 and self.reads[0] < num_forward_ticks

    @property
    def sources(self) -> tuple[int, ...]:
        """All that it may be made from."""
        return self.inputs if self.form is None else (*self.inputs, self.form)


Move = tuple[tuple[int, Fate], ...]
"""Items and the fates that they get."""


def ways(items: Sequence[Item], index: int) -> Iterator[Move]:
    """What may become of an item: each fate, and where it may be made from its smaller form, each fate of that one."""
    item = items[index]
    for fate in item.fates:
        if fate is Fate.RECOMPUTE and item.form is not None:
            for form_fate in items[item.form].fates:
                yield ((index, fate), (item.form, form_fate))
        else:
            yield ((index, fate),)


def making_seconds(items: Sequence[Item], way: Move) -> float:
    """What one of the `ways` costs compute: that of the recipe, or of the codec; nothing where nothing is made."""
    (index, fate), *of_form = way
    if fate is not Fate.RECOMPUTE:
        return 0.0
    for form, form_fate in of_form:
        if form_fate is not Fate.RECOMPUTE:
            return items[form].recipe_seconds
    return items[index].recipe_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step of one micro-batch."""

    ticks: tuple[Tick, ...]
    num_forward_ticks: int
    items: tuple[Item, ...]
    """In order of `saved`."""
    stops: tuple[int, ...] = ()
    """Ticks before which copies can be waited for (forward) or started (backward), ascending: a runtime without a
    dispatch mode can look at its plan only where autograd saves or reads something. Empty: before every tick. A tick
    after which an item can be sent is followed by a stop, and a tick that reads an item is one."""
    check_until: int = 0
    """First tick in which fingerprints are gone: backward is over."""
    watched: tuple[int, ...] = ()
    """Ticks at which lanes count although memory never does: a program looks at them whatever the curve is."""

    @property
    def compute_seconds(self) -> float:
        """Time of the step when everything is kept."""
        return sum(tick.seconds for tick in self.ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between the device and the next tier, under load. Bytes per second of each direction."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0
    """Added to each copy."""
    compute_share: float = 0.0
    """Seconds by which compute falls behind for each second that a copy runs (contention)."""
    page_fault_seconds_per_byte: float = 0.0
    """Where memory that copies free goes back to the system (the host engine): what the first touch of a byte costs
    when it is taken again. 0 where an allocator keeps it."""
