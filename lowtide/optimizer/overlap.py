"""When buckets are fetched: within the step, or ahead of it while the last backward pass before it still runs.

What: `BackwardPrefetch` counts gradients as they come. In the last backward pass before a step, and once the device
holds fewer bytes than it did at its worst moment, it fetches the first buckets, into memory that backward has freed.
Why: within a step the copies are all that happens; in backward they run beside computation and cost nothing.

The last backward pass is known from the step before: as many gradients came then. With another number of passes a
bucket is fetched too early or not at all, which costs memory or time and never a bit. The worst moment is looked at
where gradients come, so memory that is higher in between is not seen; where a device has no counter, no more than two
buckets are fetched ahead, in the second half of the pass.
What was fetched is used only if the bytes in its slot are still the same: not after `load_state_dict`, nor where a
tensor of the state was written to, nor where anybody looked into `optimizer.state` since, as a write through `.data`
leaves no trace. A step that is skipped (`GradScaler`) drops what was fetched.

Cost: some 10 us of Python at each of at most `NUM_MARKS` parameters a backward pass.
Not covered: the way back; buckets leave while the step computes with later ones. A tensor of the state that was kept in
a variable since before the backward pass, and is written to through `.data` after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from lowtide.optimizer.homes import Home, Piece
from lowtide.optimizer.hooks import OwnedHook
from lowtide.optimizer.store import StateStore
from lowtide.optimizer.transfers import Arrival
from lowtide.tensors.private import version_of
from lowtide.tensors.wrappers import inside

NUM_MARKS = 32
NUM_TRIED = 3


class BackwardPrefetch:
    """See the module's text. Attached to the parameters of one optimizer until `remove`."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._transfers = store.transfers
        self._arrivals: dict[int, tuple[Arrival, list[int]]] = {}
        self._count = 0
        """Gradients since the last step."""
        self._usual_count = 0
        self._marks_in_a_pass = 0
        self._most_bytes = 0
        """Of the device, at gradients since the last step; and the same for the step before."""
        self._usual_bytes = 0
        self._seen: set[int] = set()
        self._stream: torch.Stream | None = None
        """The stream of the last step."""
        parameters = [p for group in store.optimizer.param_groups for p in group["params"] if p.requires_grad]
        marks = parameters[:: -(-len(parameters) // NUM_MARKS)] if parameters else []
        hook = BackwardPrefetch._on_gradient
        self._hooks = [OwnedHook(self, hook).put_on(p.register_post_accumulate_grad_hook) for p in marks]

    def remove(self) -> None:
        self.give_up()
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._count == 0:
            self.give_up()  # from before a step that was skipped
        if self._stream != self._current_stream():
            return  # of a wrapper that reduces gradients on a stream of its own; memory of that one is not ours to use
        self._count += 1
        self._seen.add(id(parameter))
        in_use = self._store.engine.device_bytes()
        self._most_bytes = max(self._most_bytes, in_use or 0)
        if self._usual_count and self._count > self._usual_count - self._marks_in_a_pass:
            self._fetch(in_use)

    def _fetch(self, in_use: int | None) -> None:
        """As many buckets as there is room for."""
        is_late = self._usual_count - self._count < self._marks_in_a_pass / 2
        for piece in (piece for home in self._store.homes for piece in home.pieces):
            home = piece.home
            if id(piece) in self._arrivals or home.resident is not None or home.was_idle:
                continue
            if in_use is None and (not is_late or len(self._arrivals) >= self._transfers.num_buffers - 1):
                return
            if in_use is not None:
                in_use += piece.nbytes
                if in_use > self._usual_bytes:
                    return
            self._start(piece)

    def _start(self, piece: Piece) -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            versions = _versions(piece.home)
            self._arrivals[id(piece)] = self._transfers.fetch(piece), versions

    def take(self) -> dict[int, Arrival]:
        """What was fetched and is still right, by the identity of its piece. A step begins."""
        self._stream = self._current_stream()
        pieces = {id(piece) for home in self._store.homes for piece in home.pieces}
        right: dict[int, Arrival] = {}
        for key, (arrival, versions) in self._arrivals.items():
            home = arrival.piece.home
            if key in pieces and home.is_bound(self._store.optimizer.state) and _versions(home) == versions:
                right[key] = arrival
            else:
                self._transfers.give_up(arrival)
        self._arrivals.clear()
        self._usual_count, self._count = self._count, 0
        self._usual_bytes, self._most_bytes = self._most_bytes, 0
        self._marks_in_a_pass = len(self._seen)
        self._seen.clear()
        return right

    def _current_stream(self) -> torch.Stream | None:
        device = self._store.device
        return None if device.type == "cpu" else torch.accelerator.current_stream(device)

    def give_up(self) -> None:
        """Drop what was fetched."""
        for arrival, _ in self._arrivals.values():
            self._transfers.give_up(arrival)
        self._arrivals.clear()


class Overlap:
    """Which way of fetching is in force. With 'auto' it is tried: `NUM_TRIED` steps of each, and the faster one stays.

    `stall_seconds` says how long steps have waited so far. Where the device has no counter of its memory 'auto' is
    'step': nobody could tell whether a bucket that is fetched early raises the peak.
    """

    def __init__(self, wanted: str, store: StateStore, stall_seconds: Callable[[], float]) -> None:
        self._store = store
        self._stall_seconds = stall_seconds
        self._prefetch = BackwardPrefetch(store) if wanted == "backward" else None
        self._is_trying = wanted == "auto" and store.engine.device_bytes() is not None
        self._stalls: list[float] = []
        self.tried: tuple[float, float] | None = None
        """With 'auto', after the trial: seconds that a step waits as 'step', and as 'backward'."""

    @property
    def is_trying(self) -> bool:
        """Whether the way may still change."""
        return self._is_trying

    @property
    def mode(self) -> str:
        return "step" if self._prefetch is None else "backward"

    def begin_step(self) -> dict[int, Arrival]:
        """Buckets that were fetched ahead, by the identity of their piece."""
        if self._is_trying:
            self._try()
        return {} if self._prefetch is None else self._prefetch.take()

    def _try(self) -> None:
        """The first step makes the state, and the first with a prefetch learns when gradients come."""
        self._stalls.append(self._stall_seconds())
        number = len(self._stalls)
        if number == 2 + NUM_TRIED:
            self._prefetch = BackwardPrefetch(self._store)
        elif number == 2 + 2 * NUM_TRIED + 1:
            self._is_trying = False
            without = self._stalls[1 + NUM_TRIED] - self._stalls[1]
            ahead = self._stalls[-1] - self._stalls[-1 - NUM_TRIED]
            self.tried = (without / NUM_TRIED, ahead / NUM_TRIED)
            if ahead >= without:
                self.close()

    def give_up(self) -> None:
        if self._prefetch is not None:
            self._prefetch.give_up()

    def close(self) -> None:
        if self._prefetch is not None:
            self._prefetch.remove()
            self._prefetch = None


def _versions(home: Home) -> list[int]:
    return [version_of(inside(host)) for host in home.hosts]
