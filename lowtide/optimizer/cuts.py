"""One step of a large parameter, stretch by stretch.

What: `Cut` is one parameter in one step, `Stretch` a part of its elements. `show` makes a one-dimensional tensor of the
stretch, with its gradient and its state, as if it were a parameter; the optimizer steps it; `put_away` takes what the
optimizer has left.
What has no elements (`step`, numbers) is copied for each stretch, so that each begins where the whole parameter would,
and is written back once, after the last one. All stretches agree on it, since it does not depend on the elements.

In the first step each stretch makes its own part of the state; the parameter's new home is filled part by part, and
`optimizer.state` shows it once the last part is there. Where no tier has room the parts are put together on the device.

Where it stops between two stretches the ones before are updated: `resume` goes on with the next. `optimizer.state` has
the counters of before the step until then.
Cost: some ten microseconds a stretch. Not covered: which parameters may be cut (stretches.py).
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from lowtide.optimizer.buckets import Bucket, StateBucket, StateChunk
from lowtide.optimizer.store import StateStore, entries_of
from lowtide.optimizer.stretches import halves, in_order
from lowtide.tensors.wrappers import inside, is_distributed, shell_of


class Cut:
    """See the module's text. `home`: None in the first step."""

    def __init__(self, store: StateStore, parameter: torch.Tensor, home: StateBucket | None, ends: list[int]) -> None:
        self.store = store
        self.parameter = parameter
        self.home = home
        self.is_first_step = home is None
        self.ends = ends
        self.made: dict[Hashable, torch.Tensor] = {}
        """State on the device that was made in this step and has no home, whole."""

    def stretches(self, start: int = 0) -> list[Stretch]:
        """Those from an element on."""
        pairs = zip([0, *self.ends], self.ends, strict=False)
        return [Stretch(self, begin, end) for begin, end in pairs if begin >= start]

    def halve(self) -> bool:
        """From now on stretches are half as long, where there is no memory for one; False if they are short already."""
        assert self.home is not None
        ends = halves(self.ends)
        if ends == self.ends:
            return False
        self.ends = ends
        self.home.cut(ends, self.store.engine)
        return True

    def take_in(self, stretch: Stretch, new: dict[Hashable, torch.Tensor]) -> None:
        """Keep state that the optimizer made for a stretch of a parameter that had none."""
        if self.home is None and not self.made and self.parameter not in self.store.residents:
            dtypes = {key: value.dtype for key, value in new.items()}
            self.home = self.store.begin_bucket(self.parameter, dtypes, self.ends)
        if self.home is not None and new.keys() == {entry.key for entry in self.home.entries}:
            self.store.put(stretch.piece_of(self.home), [new[entry.key] for entry in self.home.entries])
            return
        local = inside(self.parameter.detach())
        shell = shell_of(self.parameter.detach())
        for key, value in new.items():
            if key not in self.made:
                whole = torch.empty_strided(local.size(), local.stride(), dtype=value.dtype, device=value.device)
                self.made[key] = whole if shell is None else shell.around(whole)
            in_order(inside(self.made[key]), stretch.start, stretch.end).copy_(value)

    def finish(self, rest: dict[Hashable, Any]) -> None:
        """After the last stretch: `optimizer.state` shows all of it, and `rest`, which has no elements."""
        store, home = self.store, self.home
        entries = store.optimizer.state[self.parameter] if rest or self.made or home is not None else {}
        for key, value in rest.items():
            own = entries.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                own.copy_(value)
            else:
                entries[key] = value
        entries.update(self.made)
        if is_distributed(self.parameter):
            increment_version(self.parameter)  # what is inside was written to, which its own counter does not see
        if home is None:
            return
        if home in store.unfinished:
            store.unfinished.remove(home)
            store.settled_in(home)
        if home.resident is not None:  # a copy out had failed
            storage, home.resident = home.resident, None
            store.transfers.send(home.whole, (storage,))
            home.bind_host(store.optimizer.state)


class Stretch:
    """Elements [start, end) of a parameter that is cut, in order of memory."""

    def __init__(self, cut: Cut, start: int, end: int) -> None:
        self.cut = cut
        self.start = start
        self.end = end
        self._shown: torch.Tensor | None = None
        self._own: dict[Hashable, torch.Tensor] = {}

    def piece(self) -> StateChunk | None:
        """What of the parameter's home has to be here; None in its first step."""
        return None if self.cut.is_first_step or self.cut.home is None else self.piece_of(self.cut.home)

    def piece_of(self, home: StateBucket) -> StateChunk:
        return next(piece for piece in home.pieces if (piece.start, piece.end) == (self.start, self.end))

    def show(self, bucket: Bucket | None) -> torch.Tensor:
        """The stretch as a parameter of its own, with a gradient and with state in `bucket` (None: in its home)."""
        cut, piece = self.cut, self.piece()
        state, parameter = cut.store.optimizer.state, cut.parameter
        shown = in_order(inside(parameter.detach()), self.start, self.end)
        assert parameter.grad is not None
        shown.grad = in_order(inside(parameter.grad.detach()), self.start, self.end)
        tensors = [] if piece is None else piece.stretches(bucket)
        entries = [] if piece is None else piece.home.entries
        self._own = {entry.key: tensor for entry, tensor in zip(entries, tensors, strict=True)}
        begun = {
            key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for key, value in entries_of(state, parameter).items()
            if key not in self._own
        }
        if begun or self._own:
            state[shown] = {**begun, **self._own}
        self._shown = shown
        return shown

    def hide(self) -> dict[Hashable, Any]:
        """Take the stretch out of `optimizer.state`. Returns what was there."""
        shown, self._shown = self._shown, None
        return {} if shown is None else self.cut.store.optimizer.state.pop(shown, {})

    @torch.no_grad()
    def put_away(self, bucket: Bucket | None) -> None:
        """Send back what the optimizer has left, after it stepped."""
        cut = self.cut
        left, piece = self.hide(), self.piece()
        for key, own in self._own.items():
            if left[key] is not own:
                own.copy_(left[key])
        rest = {key: value for key, value in left.items() if key not in self._own}
        new = {key: value for key, value in rest.items() if isinstance(value, torch.Tensor) and value.dim()}
        if piece is not None and bucket is not None:
            if piece.home.resident is None:
                cut.store.transfers.send(piece, bucket)
            else:  # another stretch could not be sent meanwhile
                cut.store.transfers.drop(bucket)
                for there, own in zip(piece.stretches(None), self._own.values(), strict=True):
                    there.copy_(own)
        self._own = {}
        if new:
            cut.take_in(self, new)
        if self.end == cut.ends[-1]:
            cut.finish({key: value for key, value in rest.items() if key not in new})
