"""The first forward decides, and carries out nothing."""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.rules import Decision
from lowtide.runtime.hooks.context import LayerTable, Parameters, Saved
from lowtide.runtime.hooks.first_forward import FirstForward
from tests.support.virtual_engine import virtual


def test_it_gives_back_an_entry_and_moves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with lowtide.apply(model, {"swap": ["1.tanh"], "min_bytes": 0}, engine=virtual(0)) as tide:
        context = tide._context
        tide.suspend()  # the model runs as it is: only what decides is here
        first = FirstForward(context, Parameters(model))
        layer = LayerTable("", model, False, Decision(fate=Fate.KEEP, reason=""))
        with first.observing(layer):
            output = model(torch.ones(2, 4))
            saved, weight = (Saved(t, t.grad_fn, torch.device("cpu")) for t in (output, model[0].weight))
            entries = [first.entry_of(record, layer, is_output=False) for record in (saved, saved, weight)]
        assert [entry.decision.fate for entry in entries] == [Fate.SWAP, Fate.SWAP, Fate.KEEP]
        assert [entry.is_counted for entry in entries] == [True, False, False]
        assert context.sites["1.tanh"].nbytes == 2 * 4 * 4
        assert not first.is_on
        assert tide._scheduler.num_open() == 0
        assert tide.stats.swapped_bytes == tide.stats.kept_bytes == 0
