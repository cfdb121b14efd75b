"""A link for one rank: what is sent arrives at the wait, not before, and whoever reads early gets NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.pipeline.exchange import Route


class Arriving:
    def __init__(self, rows: Tensor, sent: Tensor) -> None:
        self._rows, self._sent = rows, sent

    def wait(self) -> None:
        self._rows.copy_(self._sent)


def late(rows: Tensor, sent: Tensor, route: Route) -> Arriving:
    assert route.output_splits == route.input_splits == (len(sent),), "one rank keeps its rows"
    if rows.is_floating_point():
        rows.fill_(torch.nan)
    return Arriving(rows, sent)
