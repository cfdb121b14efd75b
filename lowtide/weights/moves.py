"""Where the bytes of weights and gradients are, and the rules by which they move.

What: a `Movable` is the bytes of one parameter, or of its gradient, with a place of its own on a slower tier.
`WeightMoves` brings the items of a *use* to the device (the forward of a layer, its backward, the update of some
parameters), fetches ahead what the next uses need, and sends away what is needed last, so that no more than
`window_bytes` are there.

How a tensor changes place: its `.data` is set. The object, its version counter and its hooks stay. On a CPU, where the
slower tier is a file, an item that is away shows the file mapped, so that reading it is right at any time. On an
accelerator it shows one NaN in the shape of the tensor: a device cannot read the host's memory, and a tensor on another
device would lose its place in autograd's graph (torch makes a new accumulator for it).

The truth is where `.data` points. An interrupt between any two lines leaves a tensor that is right: it points to the
new place only after all of the bytes are there, and to the old one until then. What somebody else has put there (a
`.data` that was assigned, a fresh gradient) is taken in as it is.

The rules of order are those of optimizer/transfers.py. Beside them: compute waits for the copy in before `.data` is
set; a buffer is dropped only after its copy out is complete, and the tensor was not written to meanwhile.

What was written to is known by its version. Writes through `.data` move no version: a sum of all bytes tells them
before a tensor goes. What is written to in its slot while it is on its way to the device is fetched again.

Memory that somebody else holds too (a view, `.data` or an array that was kept) is not parted from it: the item stays
where that is, with a warning, until the other lets go; in its slot, too, from which a CPU computes. A slot whose bytes
are shown by what somebody has kept (a gradient from before `zero_grad()`, the other side of an exchange of `.data`) is
left to that.

What comes next is known from what came after the same use the last time; what is needed last in that row goes first.

Cost: a sum of a tensor's bytes each time that it comes, and that it goes, for which an accelerator's host waits. Not
covered: what is a use, and when (swap.py).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lowtide.engines.base import Engine, Event, Lane, Slot, block
from lowtide.errors import TierFull
from lowtide.tensors.kinds import PLAIN_TYPES
from lowtide.tensors.private import (
    DisableFuncTorch,
    current_graph_task_id,
    disable_current_modes,
    queue_callback,
    storage_key,
    storage_uses,
    version_of,
)
from lowtide.tensors.view import Shape, byte_view, nan_in_place_of, sum_of_bytes

FORWARD, UPDATE = "forward", "update"
Use = tuple[str, str]
"""What items are needed for (`FORWARD`, `UPDATE`, or a part of the rest of a step), and of what."""
_MOST_AHEAD = 8


@dataclass(eq=False, slots=True)
class Movable:
    """The bytes of a parameter, or (`is_gradient`) of its gradient, and where they are."""

    name: str
    parameter: torch.nn.Parameter
    shape: Shape
    is_gradient: bool = field(kw_only=True)
    gradient: Movable | None = None
    """Of a weight: its gradient, if that moves too."""
    slot: Slot | None = None
    host: torch.Tensor | None = None
    """The bytes in the slot, in main memory. Right while no copy is under way."""
    away: torch.Tensor | None = None
    """What the tensor shows while its bytes are in the slot."""
    buffer: torch.UntypedStorage | None = None
    """Its bytes on the device, or where they will arrive."""
    event: Event | None = None
    """Behind the copy in that is under way."""
    version: int | None = None
    """Of the tensor when the slot had the same bytes; None: the slot has others."""
    leaving: tuple[Event, int] | None = None
    """Behind the copy out that is under way, and the version that it copies."""
    total: torch.Tensor | None = None
    """The sum of its bytes when device and slot last had the same."""
    num_assigned: int = 0
    """How often somebody else has put other memory in its place."""
    is_assigned: bool = False
    """Of a gradient: somebody had put it there before the last addition to it."""

    @property
    def nbytes(self) -> int:
        return self.parameter.nbytes

    @property
    def tensor(self) -> torch.Tensor | None:
        """What has the bytes; None where there is no gradient."""
        return self.parameter.grad if self.is_gradient else self.parameter

    @property
    def is_away(self) -> bool:
        """Whether the bytes are in the slot alone."""
        return self.away is not None and _shows(self.tensor, self.away.untyped_storage())

    @property
    def is_here(self) -> bool:
        """Whether the bytes are in the buffer."""
        return self.event is None and _shows(self.tensor, self.buffer)

    @property
    def is_clean(self) -> bool:
        """Whether the slot has the same bytes."""
        tensor = self.tensor
        return tensor is not None and self.version == version_of(tensor)

    @property
    def can_go(self) -> bool:
        """Whether the slot has the bytes that are in the buffer."""
        return self.is_here and self.leaving is None and self.is_clean


def _shows(tensor: torch.Tensor | None, storage: torch.UntypedStorage | None) -> bool:
    if tensor is None or storage is None or tensor.layout is not torch.strided:
        return False
    return storage_key(tensor.untyped_storage()) == storage_key(storage)


@dataclass(slots=True, kw_only=True)
class WeightStats:
    """What a handle has done so far. Bytes are of this rank."""

    swapped_bytes: int = 0
    """Weights that are elsewhere between their layers' turns."""
    resident_bytes: int = 0
    """Weights that stay on the device."""
    window_bytes: int = 0
    """Most bytes of weights and gradients that may be on the device at a time, as far as one use does not need more by
    itself."""
    peak_bytes: int = 0
    """Most bytes of them that were."""
    fetched_bytes: int = 0
    sent_bytes: int = 0
    stall_seconds: float = 0.0
    """Time that the calling thread waited for copies of weights and gradients."""


class UseOrder:
    """Which uses there were and what came after each, and what none of them sends away."""

    def __init__(self) -> None:
        self.last: Use | None = None
        """The name of the use that began last."""
        self.staying: frozenset[Movable] = frozenset()
        """What does not leave for others."""
        self.open: list[tuple[Movable, ...]] = []
        """What must stay: of the uses that have begun and not ended."""
        self.expected: tuple[Movable, ...] = ()
        """Gradients that compute is about to make: room is left for them."""
        self.gathers = False
        """Several micro-batches share the stay of a layer: gradients stay until the last one has added to them."""
        self._uses: dict[Use, tuple[Movable, ...]] = {}
        self._next: dict[Use, Use] = {}
        self._distance: dict[Movable, int] = {}
        """How many uses away the next use of an item is, by what came after each use the last time."""

    def begin(self, key: Use, needed: tuple[Movable, ...], expected: tuple[Movable, ...]) -> None:
        """A use begins."""
        self.expected = expected
        if key != self.last:
            if self.last is not None:
                self._next[self.last] = key
            self.last = key
        self._uses[key] = needed
        self._distance = dict.fromkeys(needed, 0)
        for distance, coming in enumerate(self._coming(key), 1):
            for item in self._uses[coming]:
                self._distance.setdefault(item, distance)

    def _coming(self, key: Use) -> Iterator[Use]:
        """The uses after this one."""
        seen = {key}
        following = self._next.get(key)
        while following is not None and following not in seen:
            seen.add(following)
            yield following
            following = self._next.get(following)

    def ahead(self, key: Use) -> Iterator[tuple[Movable, ...]]:
        """What the uses after this one need, as far as it may be fetched now. Before others the loop's own code runs
        (clipping before an update). What it writes through `.data` no version counts, and it would write to the slot of
        what is on its way."""
        for coming in self._coming(key):
            if (key[0] == FORWARD) != (coming[0] == FORWARD) or (coming[0] == UPDATE and key[0] != UPDATE):
                return
            yield self._uses[coming]

    def distance(self, item: Movable) -> int:
        return self._distance.get(item, _NEVER)

    def stay_with(self, needed: set[Movable]) -> set[Movable]:
        """These, and all else that must not leave."""
        return needed.union(self.staying, *self.open)


class WeightMoves:
    """See the module's text. All methods may be called from any thread."""

    def __init__(self, engine: Engine, device: torch.device, tiers: Sequence[str]) -> None:
        self.engine = engine
        self.device = device
        self.stats = WeightStats()
        self.order = UseOrder()
        self.here_bytes = 0
        self.items: dict[int, Movable] = {}
        """By the storage that has the bytes now, or that stands for them while they are away."""
        self.lock = threading.RLock()
        self._tiers = tiers
        self._here: dict[Movable, None] = {}
        """What takes memory of the device, longest unused first."""
        self._pass = -1
        """The backward pass that was seen last."""
        self._left: list[tuple[Slot, torch.Tensor]] = []
        """Slots that belong to what somebody has kept, and what shows them."""
        self._has_warned = False

    # -- places --------------------------------------------------------------------------------------------------------

    def place(self, item: Movable) -> None:
        """Reserve the item's place on a slower tier. Raises `TierFull` where none has room."""
        for tier in self._tiers:
            with contextlib.suppress(*(() if tier == self._tiers[-1] else (TierFull,))):
                item.slot, view = self.engine.allocate_visible(item.nbytes, tier)
                break
        with quiet():
            start = int(view.storage_offset())
            item.host = item.away = item.shape.over(view.untyped_storage()[start : start + item.nbytes])
            if self.device.type != "cpu":
                item.away = nan_in_place_of(item.shape, self.device)
            self.items[storage_key(item.away.untyped_storage())] = item

    def take_in(self, item: Movable) -> bool:
        """Take in what somebody else has put in the item's place. False for a tensor that cannot move."""
        tensor = item.tensor
        if tensor is None or item.is_here or item.is_away:
            return tensor is not None
        if self._is_copy_of_nothing(item):
            self.put_copied_back()
        if not self._is_alike(item):
            return False
        item.num_assigned += 1
        with quiet():
            shape, storage = Shape.of(tensor), tensor.untyped_storage()
            # Of a gradient that autograd has made, it holds parts itself.
            is_fresh = item.is_gradient and not item.is_assigned
            is_shared = not is_fresh and self._is_held(item, storage)
            self._wait_out(item)
            self._forget(item)
            self._leave_slot(item)
            item.version = None
            if is_shared:
                return False
            if shape != item.shape or storage.nbytes() != item.nbytes:
                storage = self.engine.new_buffer(item.nbytes, self.device)
                item.shape.over(storage).copy_(tensor.detach())
                tensor.data = item.shape.over(storage)
            item.buffer = storage
            self._count(item)
        return True

    def _is_copy_of_nothing(self, item: Movable) -> bool:
        """Whether somebody has put a copy of what a weight shows while it is away in its place, as `model.double()`
        does."""
        tensor, was_here = item.parameter, item.buffer is not None and item.event is None
        if self.device.type == "cpu" or item.is_gradient or was_here or item.is_away or item.version is None:
            return False
        return tensor.dtype.is_floating_point and bool(tensor.isnan().all())

    def put_copied_back(self) -> None:
        """Have weights show what they showed before somebody copied that. Raises RuntimeError if there are such."""
        with self.lock, quiet():
            copied = [item for item in dict.fromkeys(self.items.values()) if self._is_copy_of_nothing(item)]
            for item in copied:
                self._forget(item)
                assert item.away is not None
                item.parameter.data = item.away
                item.version = version_of(item.parameter)
        if copied:
            raise RuntimeError(
                f"lowtide: {copied[0].name} was copied while it was not on {self.device} (model.to(), .data =), and "
                "is as it was before; do that inside of 'with handle.here():', or after remove()"
            )

    def _is_alike(self, item: Movable) -> bool:
        """Whether what is in the item's place could move as the item does."""
        tensor = item.tensor
        if tensor is None or type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided:
            return False
        found = tensor.size(), tensor.dtype, tensor.device.type
        return found == (item.shape.size, item.shape.dtype, self.device.type)

    def _is_held(self, item: Movable, storage: torch.UntypedStorage, num_own: int = 2) -> bool:
        """Whether somebody else holds the storage that the item's tensor shows; it says so once."""
        if not _has_others(storage, num_own):
            return False
        if not self._has_warned:
            gc.collect()  # an error's frames hold what nobody can reach any more
            if not _has_others(storage, num_own):
                return False
            self._has_warned = True
            where = f"the {_tier(item)}" if item.is_away else self.device
            warnings.warn(
                f"lowtide: {item.name} stays on {where}: somebody has kept a view, .data or an array of its memory, "
                "which would not follow it; let go of that, or keep a clone()",
                RuntimeWarning,
                stacklevel=2,
            )
        return True

    def is_free(self, item: Movable) -> bool:
        """Whether the item's bytes are in its slot, and nobody else holds what shows them there: who does may write to
        them later. Used from the slot, the item is right then, too."""
        if item.away is None or not item.is_away:
            return False
        if self.device.type == "cpu":
            return not self._is_held(item, item.away.untyped_storage(), num_own=3)
        if not item.is_clean:  # a fill, which is all that one number in the place of many lets through
            for each in {*self.items.values()}:
                if each.is_away and each.away is not None and each.tensor is not None:
                    each.version = version_of(each.tensor)
                    each.away.untyped_storage().copy_(nan_in_place_of(each.shape, self.device).untyped_storage())
            raise RuntimeError(
                f"lowtide: {item.name} was written to while it was not on {self.device}, and is as it was before; "
                "write inside of 'with handle.here():' (of zero_grad(set_to_none=False): call zero_grad())"
            )
        return True

    def _leave_slot(self, item: Movable) -> None:
        """Give the item another slot if somebody has kept what shows the bytes in this one."""
        self.free_left()
        slot, shown = item.slot, item.away
        if slot is None or shown is None or not _has_others(shown.untyped_storage()):
            return
        if self.device.type != "cpu" and not item.is_gradient:
            raise RuntimeError(
                f"lowtide: {item.name} was given other memory, and what its .data showed while it was away, which has "
                "no bytes, is kept; put that back, and exchange .data inside of 'with handle.here():'"
            )
        self.place(item)
        self.items.pop(storage_key(shown.untyped_storage()))
        self._left.append((slot, shown))

    def free_left(self) -> None:
        """Give back the slots that nobody has kept any more."""
        for slot, shown in self._left:
            if not _has_others(shown.untyped_storage()):
                self.engine.free(slot)
        self._left = [(slot, shown) for slot, shown in self._left if _has_others(shown.untyped_storage())]

    def _count(self, item: Movable) -> None:
        """The item's buffer takes memory from now on."""
        assert item.buffer is not None
        self.items[storage_key(item.buffer)] = item
        self._here[item] = None
        self.here_bytes += item.nbytes
        self.stats.peak_bytes = max(self.stats.peak_bytes, self.here_bytes)

    def _forget(self, item: Movable) -> None:
        """The item's buffer is not looked at any more."""
        if item.buffer is None:
            return
        if item.event is not None:
            self.stats.stall_seconds += self.engine.wait(Lane.COMPUTE, item.event)
        self.items.pop(storage_key(item.buffer), None)
        if item in self._here:
            del self._here[item]
            self.here_bytes -= item.nbytes
        item.buffer = item.event = None

    # -- uses ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def keeping(self, items: tuple[Movable, ...]) -> Iterator[None]:
        """Within, these items do not leave."""
        self.order.open.append(items)
        try:
            yield
        finally:
            self.order.open.remove(items)

    @contextlib.contextmanager
    def using(self, key: Use, items: Iterable[Movable]) -> Iterator[None]:
        """`use`, and these items stay until its end."""
        needed = tuple(items)
        with self.keeping(needed):
            self.use(key, needed)
            yield

    def bring(self, items: Iterable[Movable]) -> None:
        """Have these items on the device, out of turn."""
        with self.lock, quiet():
            self._bring(tuple(item for item in items if item.slot is not None))  # a copied module outlives `remove()`

    def arrive(self) -> None:
        """Have what is on its way arrive: the loop's own code runs next, and what it writes through `.data` would go to
        a slot that was read already."""
        with self.lock, quiet():
            for item in [each for each in self._here if each.event is not None]:
                self._arrive(item)

    def arrive_at_the_end(self) -> None:
        """`arrive` when the backward pass that runs now is over."""
        running = current_graph_task_id()
        if self.order.gathers:
            return  # the next pass is of the same step, and no code of the loop runs before it
        if running not in (-1, self._pass):
            self._pass = running
            queue_callback(self.arrive)

    @property
    def _taken_bytes(self) -> int:
        """What is on the device, and what is about to be made there."""
        return self.here_bytes + sum(item.nbytes for item in self.order.expected if item.buffer is None)

    def use(self, key: Use, items: Iterable[Movable], expected: tuple[Movable, ...] = ()) -> None:
        """Have these items on the device: a use of the name `key` begins. The next ones are fetched ahead. `expected`:
        gradients that it will make."""
        with self.lock, quiet():
            needed = tuple(items)
            self.order.begin(key, needed, expected)
            self._retire()
            self._bring(needed)
            self._fetch_ahead(key, set(needed))

    def _bring(self, needed: tuple[Movable, ...]) -> None:
        for item in needed:
            self._see(item)
            if item in self._here:
                self._here[item] = self._here.pop(item)  # used last
        missing = [item for item in needed if item.buffer is None and self.is_free(item)]
        self._make_room(sum(item.nbytes for item in missing), set(needed))
        for item in missing:
            self._fetch(item)
        for item in needed:
            self._arrive(item)

    def _see(self, item: Movable) -> None:
        """Notice what somebody else has put in the item's place."""
        if item.is_away:
            if item.buffer is not None and item.event is None:  # what the slot shows was put back
                self._wait_out(item)
                self._forget(item)
        elif not item.is_here and not self.take_in(item) and not item.is_gradient and not self._is_alike(item):
            tensor = item.parameter
            raise RuntimeError(
                f"lowtide: {item.name} is {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device} now, and was "
                f"{tuple(item.shape.size)}, {item.shape.dtype}, on {self.device} when its weights were swapped; call "
                "remove() of the handle, change the model, and call swap_weights again"
            )

    def _fetch_ahead(self, key: Use, needed: set[Movable]) -> None:
        for number, items in enumerate(self.order.ahead(key), 1):
            missing = [item for item in items if item.buffer is None and self.is_free(item)]
            wanted = sum(item.nbytes for item in missing)
            needed |= set(items)
            if number > _MOST_AHEAD or not self._make_room(wanted, needed, later_than=number):
                return
            try:
                for item in missing:
                    self._fetch(item)
            except torch.OutOfMemoryError:
                return  # its own use will make room

    def _make_room(self, nbytes: int, needed: set[Movable], later_than: int | None = None) -> bool:
        """Send away what is used last until there is room for so many bytes, if there can be. With `later_than`, only
        what is used later than that many uses from now, and goes without waiting."""
        excess = self._taken_bytes + nbytes - self.stats.window_bytes
        if excess <= 0:
            return True
        needed = self.order.stay_with(needed)
        candidates = [item for item in self._here if item not in needed]
        if later_than is not None:
            candidates = [i for i in candidates if i.can_go and self.order.distance(i) > later_than]
            if sum(item.nbytes for item in candidates) < excess:
                return False
        candidates.sort(key=lambda item: -self.order.distance(item))
        leaving: list[Movable] = []
        while candidates and sum(item.nbytes for item in leaving) < excess:
            leaving.append(candidates.pop(0))
        self.hide(leaving)
        return self._taken_bytes + nbytes <= self.stats.window_bytes

    # -- in ------------------------------------------------------------------------------------------------------------

    def _fetch(self, item: Movable) -> None:
        engine = self.engine
        tensor = item.tensor
        assert item.slot is not None and item.buffer is None and tensor is not None
        if self.device.type == "cpu" and tensor.is_shared():
            raise RuntimeError(f"lowtide: {item.name} is shared by processes now; call remove() of the handle before")
        item.version = version_of(tensor)
        buffer = engine.new_buffer(item.nbytes, self.device)
        engine.wait(Lane.IN, engine.record(Lane.COMPUTE))
        item.buffer = buffer
        engine.copy_in(item.slot, buffer)
        item.event = engine.record(Lane.IN)
        self._count(item)
        self.stats.fetched_bytes += item.nbytes

    def _arrive(self, item: Movable) -> None:
        """Have the tensor show its buffer, for what compute does from now on. Raises what went wrong in the copy."""
        if item.event is None:
            return
        assert item.buffer is not None
        self.stats.stall_seconds += self.engine.wait(Lane.COMPUTE, item.event)
        error = self.engine.failure(item.event)
        tensor = item.tensor
        if error is not None or not item.is_away or tensor is None:
            self._forget(item)  # somebody has put other bytes there meanwhile, or they did not come
            if error is not None:
                raise RuntimeError(f"lowtide: {item.name} could not be read back from the {_tier(item)}: {error}")
            return
        if not item.is_clean:  # written to in its slot, by whoever read it there, meanwhile
            self._forget(item)
            self._bring((item,))
            return
        if not self.is_free(item):
            self._forget(item)
            return
        tensor.data = item.shape.over(item.buffer)
        item.event = None
        item.total = sum_of_bytes(byte_view(item.buffer))

    # -- out -----------------------------------------------------------------------------------------------------------

    def leave(self, item: Movable) -> None:
        """Let go of the item's bytes on the device if the slot has the same, and nobody has written to them through
        `.data`; else send them. Not within a use of it."""
        if any(item in items for items in self.order.open):
            return
        buffer, total = item.buffer, item.total
        if (
            item.can_go
            and buffer is not None
            and total is not None
            and torch.equal(total, sum_of_bytes(byte_view(buffer)))
        ):
            self._drop(item)
        elif not self.send(item) and not item.is_here:  # gone, or not ours any more
            self._forget(item)

    def sums(self, items: Iterable[Movable]) -> dict[Movable, torch.Tensor | None]:
        """The sum of each item's bytes as they are now; None for one that was never seen."""
        with self.lock, quiet():
            return {
                i: sum_of_bytes(byte_view(i.buffer)) if i.is_here and i.buffer is not None else i.total for i in items
            }

    def _drop(self, item: Movable) -> None:
        """Have the tensor show its slot, and let go of the buffer."""
        tensor = item.tensor
        assert tensor is not None and item.away is not None and item.buffer is not None
        if self._is_held(item, item.buffer):
            return
        tensor.data = item.away
        self._forget(item)

    def send(self, item: Movable) -> bool:
        """Start the copy of the item's bytes to its slot. False where there is nothing that could be sent."""
        with self.lock, quiet():
            if item.leaving is not None:
                return True
            if not item.is_here and (item.is_away or not self.take_in(item)):
                return False
            tensor, engine = item.tensor, self.engine
            assert tensor is not None and item.slot is not None and item.buffer is not None
            version = version_of(tensor)
            engine.wait(Lane.OUT, engine.record(Lane.COMPUTE))
            engine.copy_out(item.buffer, item.slot)
            item.leaving = engine.record(Lane.OUT), version
            item.total = sum_of_bytes(byte_view(item.buffer))
            self.stats.sent_bytes += item.nbytes
            return True

    def _retire(self) -> None:
        """See to the copies out that are complete."""
        for item in [*self._here]:
            if item.leaving is not None and self.engine.query(item.leaving[0]):
                self._wait_out(item)

    def _wait_out(self, item: Movable) -> bool:
        """The item's copy out, if there is one, to its end. False if it failed, and the item stays."""
        if item.leaving is None:
            return True
        event, version = item.leaving
        self.stats.stall_seconds += block(self.engine, event)
        error = self.engine.failure(event)
        item.leaving = None
        item.version = version if error is None else None
        if error is not None:
            warnings.warn(
                f"lowtide: {item.name} could not be written to the {_tier(item)} ({error}); it stays on {self.device}, "
                "above the budget, until it can be",
                RuntimeWarning,
                stacklevel=2,
            )
        return error is None

    def hide(self, items: Iterable[Movable]) -> None:
        """Have these items leave, and wait until main memory and files have them."""
        leaving = list(items)
        with self.lock, quiet():
            for item in leaving:
                self._arrive(item)
                self.leave(item)
            for item in leaving:
                while item.leaving is not None and self._wait_out(item):
                    self.leave(item)

    def hide_all(self) -> None:
        """Have everything leave that does not stay."""
        with self.lock:
            self.hide(item for item in self._here if item not in self.order.staying)

    def keep_to_window(self) -> None:
        """More is there than room was made for: send away what is needed last, waiting where that is too much."""
        with self.lock, quiet():
            self._retire()
            self._make_room(0, set())

    def free(self, item: Movable) -> None:
        """Give the item's place back, unless somebody has kept what shows it, as its tensor may do itself."""
        self._wait_out(item)
        self._forget(item)
        if item.slot is not None and item.away is not None:
            self.items.pop(storage_key(item.away.untyped_storage()), None)
            self._left.append((item.slot, item.away))
            item.slot = item.host = item.away = None


_NEVER = 1 << 30


def _has_others(storage: torch.UntypedStorage, num_own: int = 2) -> bool:
    """Whether more than `num_own` hold a storage: one tensor and this object."""
    return storage_uses(storage_key(storage)) > num_own


def _tier(item: Movable) -> str:
    return "slower tier" if item.slot is None else item.slot.tier


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What lowtide does itself is no part of the program: no gradients, no modes that watch."""
    with DisableFuncTorch(), disable_current_modes(), torch.inference_mode(mode=False), torch.no_grad():
        yield
