"""Recurrent networks: kernels that give another set of results without gradients, packed sequences, projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lowtide
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual

KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {"bidirectional": True}),
    "lstm_dropout": (nn.LSTM, {"dropout": 0.3}),
    "lstm_projected": (nn.LSTM, {"proj_size": 4, "bidirectional": True}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "rnn": (nn.RNN, {"bidirectional": True, "nonlinearity": "relu"}),
}


class Net(nn.Module):
    def __init__(self, name: str, is_packed: bool) -> None:
        super().__init__()
        kind, more = KINDS[name]
        self.is_packed = is_packed
        self.embed = nn.Embedding(20, 8)
        self.recurrent = kind(8, 8, num_layers=2, batch_first=True, **more)
        width = more.get("proj_size", 8) * (2 if more.get("bidirectional") else 1)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Any = self.embed(tokens)
        if self.is_packed:
            x = pack_padded_sequence(x, torch.tensor([5, 3, 3, 1]), batch_first=True)
        x, hidden = self.recurrent(x)
        if self.is_packed:
            x, _ = pad_packed_sequence(x, batch_first=True)
        last = hidden[1] if isinstance(hidden, tuple) else hidden
        return self.head(torch.tanh(x) * torch.sigmoid(x)).square().mean() + last.sum()


def _train(name: str, is_packed: bool, memory: dict[str, Any] | None, budget: int | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    model = Net(name, is_packed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tide: Any = None
    if budget is not None:
        tide = lowtide.optimize(
            model, budget=budget, memory={"min_bytes": 0, "strict": True}, optimizer=optimizer, engine=virtual(1)
        )
    elif memory is not None:
        tide = lowtide.apply(model, {"min_bytes": 0, **memory}, engine=virtual(1))
    found = []
    torch.manual_seed(2)
    for _ in range(2):
        loss = model(torch.randint(20, (4, 5)))
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    if tide is not None:
        assert tide.stats.num_divergences == 0
        tide.remove()
    return found


@pytest.mark.parametrize(
    ("name", "is_packed"), one_of(2, [*((name, False) for name in KINDS), ("lstm", True), ("gru", True)])
)
def test_recurrent_networks_are_the_same_to_the_bit(name: str, is_packed: bool) -> None:
    plain = _train(name, is_packed, None)
    with pytest.raises(lowtide.BudgetError) as least:
        _train(name, is_packed, None, budget=1 << 10)
    for found in (
        _train(name, is_packed, None, budget=least.value.floor_bytes),
        _train(name, is_packed, {"swap": "all"}),
        _train(name, is_packed, {"recompute": ["recurrent"]}),
    ):
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
