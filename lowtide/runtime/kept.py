"""Kept tensors that tell the tape how far backward has come.

Why: a fetch that is to start some operators ahead of its reader has to be started by somebody, and only the unpack hook
sees backward go by. So once a forward pass has swapped something with a distance, what it keeps is on the tape too.

Cost: 1 us at unpack. Not covered: operators that saved nothing; they are not seen.
"""

from __future__ import annotations

import torch

from lowtide.runtime.handle import Kept, KeptSite
from lowtide.runtime.stats import Ledger
from lowtide.runtime.swap import Mover
from lowtide.runtime.tape import Tape


class KeptOnTape(Kept):
    """A kept tensor that tells the tape how far backward has come: written prefetch distances count these reads."""

    __slots__ = ("mover", "tape")

    def __init__(self, tensor: torch.Tensor, mover: Mover, tape: Tape) -> None:
        super().__init__(tensor)
        self.mover = mover
        self.tape = tape

    def open(self) -> torch.Tensor:
        self.mover.follow(self.tape)
        return super().open()


class KeptSiteOnTape(KeptSite):
    """The first handle on a kept storage, which also tells the tape how far backward has come."""

    __slots__ = ("mover", "tape")

    def __init__(self, tensor: torch.Tensor, nbytes: int, ledger: Ledger, mover: Mover, tape: Tape) -> None:
        super().__init__(tensor, nbytes, ledger)
        self.mover = mover
        self.tape = tape

    def open(self) -> torch.Tensor:
        self.mover.follow(self.tape)
        return super().open()
