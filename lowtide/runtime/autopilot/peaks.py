"""The device's peak of planned steps, as lowtide itself saw it.

What: an allocator has one counter of its peak for the whole process, which anybody may reset at any time, and which
remembers what happened before a plan was in force. `PeakWatch` reads it where a planned step is at its largest or has
just been (at the end of the forward pass, at the end of the backward pass, before the next one begins) and keeps the
maximum. Where somebody else reset the counter the true peak may be higher; it is never taken for a reason to use more
(corrections.py).

Cost: three reads of a counter and one hook a step that is reviewed, two of them after a new plan; nothing after that.
Not covered: somebody who resets the counter between the forward and the backward pass, and after an optimizer's step
that needs more than both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide.tensors.private import queue_callback, tree_leaves


class PeakWatch:
    """`read` gives the allocator's peak since its last reset; None where there is no such counter."""

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self.peak_bytes = 0
        """The most that was seen since `restart`."""

    def restart(self) -> None:
        """A new measurement: the counter has just been reset by us."""
        self.peak_bytes = 0

    def note(self) -> None:
        """Look at the counter."""
        now_bytes = self._read()
        if now_bytes is None:
            return
        self.peak_bytes = max(self.peak_bytes, now_bytes)

    def follow(self, output: Any) -> None:
        """A planned forward pass is over, which gave `output`: look now, and at the end of its backward passes."""
        self.note()
        root = next(
            (leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn), None
        )
        if root is not None:
            root.register_prehook(lambda gradients: _at_the_end(self.note))


def _at_the_end(note: Callable[[], None]) -> None:
    queue_callback(note)
