"""Optimizers that a swap must not change by a single bit, on small parameters.

What: `OPTIMIZERS` makes each optimizer of torch, and one that a user might write, in each implementation that torch has
of it. `train` takes steps with gradients from a generator, a scheduler that changes the learning rate, two groups, and
where asked for, gradients that are missing in turn. `Result` is what the steps left; `assert_same` compares two.
Named exceptions: SGD with fused=True in bfloat16 does not repeat its own bits on the CPU, and cannot step when a
momentum is missing; both are torch's, and left out of `cases`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.optimizer.swap import OptimizerSwap
from tests.support.zoo import same_bits

SHAPES = ((24, 16), (16,), (16, 16), (7, 33), (5, 4, 6), (40, 30), (3,), (19, 19))
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2)
BUCKET_BYTES = 4096
STEPS = 12


class Counted(torch.optim.Optimizer):
    """A user's: counts steps in its groups and in tensors of them, keeps a scratch list there, makes state anew."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "step": 0, "scratch": [None] * 3})
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            group["count"] += 1
            group["scratch"][group["step"] % 3] = group["step"]
            correction = 1 - group["beta"] ** group["step"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["calls"] = state.get("calls", 0) + 1
                average = state.get("average", torch.zeros_like(parameter))
                state["average"] = average * group["beta"] + parameter.grad * (1 - group["beta"])
                if state["calls"] == 3:
                    state["late"] = torch.zeros_like(parameter)
                if "late" in state:
                    state["late"].add_(state["average"])
                parameter.sub_(state["average"] * (group["lr"] / correction / float(group["count"])))
        return loss


def _of_torch(kind: type, **defaults: Any) -> Callable[[Any, dict], torch.optim.Optimizer]:
    return lambda groups, flags: kind(groups, **{"lr": 1e-2, **defaults, **flags})


LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
IMPLEMENTATIONS: dict[str, dict] = {"for-loop": LOOP, "foreach": FOREACH, "fused": FUSED}

OPTIMIZERS: dict[str, tuple[Callable[[Any, dict], torch.optim.Optimizer], tuple[str, ...]]] = {
    "AdamW": (_of_torch(torch.optim.AdamW), ("for-loop", "foreach", "fused")),
    "AdamW amsgrad": (_of_torch(torch.optim.AdamW, amsgrad=True), ("for-loop", "foreach", "fused")),
    "Adam": (_of_torch(torch.optim.Adam, weight_decay=0.1), ("for-loop", "foreach", "fused")),
    "SGD": (_of_torch(torch.optim.SGD, momentum=0.9), ("for-loop", "foreach", "fused")),
    "SGD plain": (_of_torch(torch.optim.SGD), ("for-loop", "foreach", "fused")),
    "Adagrad": (_of_torch(torch.optim.Adagrad), ("for-loop", "foreach", "fused")),
    "Adafactor": (_of_torch(torch.optim.Adafactor), ("for-loop", "foreach")),
    "RMSprop": (_of_torch(torch.optim.RMSprop, momentum=0.5, centered=True), ("for-loop", "foreach")),
    "NAdam": (_of_torch(torch.optim.NAdam), ("for-loop", "foreach")),
    "RAdam": (_of_torch(torch.optim.RAdam), ("for-loop", "foreach")),
    "Adamax": (_of_torch(torch.optim.Adamax), ("for-loop", "foreach")),
    "Adadelta": (_of_torch(torch.optim.Adadelta), ("for-loop", "foreach")),
    "ASGD": (_of_torch(torch.optim.ASGD), ("for-loop", "foreach")),
    "Rprop": (_of_torch(torch.optim.Rprop), ("for-loop", "foreach")),
    "Muon": (lambda groups, flags: torch.optim.Muon(groups, lr=1e-2), ("for-loop",)),
    "Counted": (lambda groups, flags: Counted(groups), ("for-loop",)),
}


@dataclass(frozen=True)
class Case:
    """One optimizer in one implementation, on parameters of one dtype."""

    kind: str
    implementation: str
    dtype: torch.dtype
    has_missing: bool
    """Gradients are missing in turn."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return MATRICES if self.kind == "Muon" else SHAPES

    def build(self) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(7)
        parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(self.dtype)) for shape in self.shapes
        ]
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-2}]
        return parameters, OPTIMIZERS[self.kind][0](groups, IMPLEMENTATIONS[self.implementation])

    def set_gradients(self, parameters: list[torch.nn.Parameter], step: int) -> None:
        """Gradients of one step; drawn from a generator of the step."""
        generator = torch.Generator().manual_seed(1000 + step)
        for index, parameter in enumerate(parameters):
            values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            # One parameter in three is without, one gets its first gradient late, one never any.
            skipped = self.has_missing and ((step + index) % 3 == 0 or (index == 5 and step < 4) or index == 2)
            parameter.grad = None if skipped else values


def cases(kind: str, implementation: str) -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for has_missing in (False, True):
            if kind.startswith("SGD") and implementation == "fused" and (dtype == torch.bfloat16 or has_missing):
                continue
            yield Case(kind, implementation, dtype, has_missing)


NAMES = [(kind, name) for kind, (_, names) in OPTIMIZERS.items() for name in names]


@dataclass
class Result:
    """What training left. Copies."""

    parameters: list[torch.Tensor]
    state: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def result_of(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Result:
    return Result(
        [p.detach().clone() for p in parameters],
        [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in parameters],
        [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    )


def train(case: Case, swap: Callable[[torch.optim.Optimizer], OptimizerSwap] | None, steps: int = STEPS) -> Result:
    """Steps of one case, swapped or plain."""
    parameters, optimizer = case.build()
    handle = swap(optimizer) if swap is not None else None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    own_groups = optimizer.param_groups
    for step in range(steps):
        case.set_gradients(parameters, step)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups is own_groups
    result = result_of(parameters, optimizer)
    if handle is not None:
        handle.detach()
        assert_same(result_of(parameters, optimizer), result)
    return result


class Tower(nn.Module):
    """Layers of which a step may skip one; the first weight is the head's too."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(num_layers))
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: Tensor, skip: int = -1) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x).tanh()
        return self.head(x)


def swapped(optimizer: torch.optim.Optimizer, engine: Any, **options: Any) -> OptimizerSwap:
    """A swap that moves even the small tensors of these tests, in several buckets."""
    return lowtide.swap_optimizer(optimizer, engine=engine, **{"bucket_bytes": BUCKET_BYTES, "min_bytes": 1, **options})


def assert_same(result: Result, truth: Result) -> None:
    """Parameters, state and groups are the same to the bit."""
    for index, (one, other) in enumerate(zip(result.parameters, truth.parameters, strict=True)):
        assert same_bits(one, other), f"parameter {index}"
    assert_same_value(result.state, truth.state, "state")
    assert_same_value(result.groups, truth.groups, "groups")


def assert_same_value(one: Any, other: Any, where: str) -> None:
    if isinstance(other, torch.Tensor):
        assert isinstance(one, torch.Tensor), where
        assert same_bits(one, other), where
    elif isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in other:
            assert_same_value(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(other, list | tuple):
        assert type(one) is type(other), where
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_value(a, b, f"{where}[{index}]")
    else:
        assert type(one) is type(other), where
        assert one == other, where
