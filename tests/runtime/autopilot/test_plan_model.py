"""What is asked for wrongly is answered in clear words: `lowtide.plan`, `lowtide.observe`, `lowtide.optimize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.runtime.autopilot.plan_model import hardware_of_device
from tests.support.virtual_engine import virtual
from tests.support.zoo import footprint, same_bits


class Net(nn.Module):
    """Two layers."""

    def __init__(self, *, reduces: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.reduces = reduces

    def forward(self, x: Tensor) -> Tensor:  # (N, 8) -> scalar
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean() if self.reduces else x


class Branch(Net):
    """Looks at what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y > 1.0 else y * 2.0


def rows(width: int = 8) -> Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(0))


def plan(model: nn.Module, batch: Any, **more: Any) -> lowtide.Plan:
    return lowtide.plan(model, batch, **{"budget": "1GiB", "hardware": "cpu", **more})


def message(call: Callable[[], Any]) -> str:
    with pytest.raises(lowtide.ConfigError) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Budgets


ZERO = "memory.budget: must be more than 0 bytes; write e.g. budget: 20GiB, or leave it out"
BUDGETS = [
    (None, "memory.budget: a budget is needed to plan for; write e.g. budget='20GiB'"),
    (0, ZERO),
    ("0GiB", ZERO),
    (-1, "memory.budget: -1 is not a size; a size is never negative"),
    ("lots", "memory.budget: 'lots' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
    ("20I", "memory.budget: '20I' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
    (1.5, "memory.budget: expected a size such as 20GiB, a share such as 90% or auto, not 1.5"),
]


@pytest.mark.parametrize(("budget", "said"), BUDGETS)
def test_budgets_that_are_none(budget: Any, said: str) -> None:
    model = Net()
    before = footprint(model)
    assert message(lambda: plan(model, (rows(),), budget=budget)) == said
    assert message(lambda: lowtide.optimize(model, budget=budget)) == said
    if budget is not None:
        assert message(lambda: plan(model, (rows(),), budget=None, memory={"budget": budget})) == said
    assert footprint(model) == before


def test_a_host_budget_that_is_none() -> None:
    said = "memory.host_budget: 'much' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"
    assert message(lambda: plan(Net(), (rows(),), host_budget="much")) == said


FLOOR = (
    "budget 0.001 MiB: no plan fits; the least that can be reached is 0.1 MiB, set by pow:backward: 0.010 MiB there "
    "is not activations, the largest activation there is 'add_1' with 0.002 MiB; raise the budget to 0.1 MiB or make "
    "the micro-batch smaller"
)


def test_a_budget_below_the_floor_names_the_floor_and_what_sets_it() -> None:
    with pytest.raises(lowtide.BudgetError) as caught:
        plan(Net(), (rows(),), budget=1024, memory={"min_bytes": 1})
    first, most, *ways = str(caught.value).splitlines()
    assert first == FLOOR
    assert most == "  most of it is the loss and other temporaries: 0.010 MiB of 0.012 MiB"
    assert ways == [f"  - {way}" for way in caught.value.suggestions]
    assert ways[0].startswith("  - with 'half the micro-batch' it needs 0.")
    assert not any(" about " in way for way in ways)
    assert 1024 < caught.value.floor_bytes < 1 << 17
    with lowtide.optimize(Net(), budget=1024, memory={"min_bytes": 1}, engine=virtual(0), strict=True) as tide:
        with pytest.raises(lowtide.BudgetError) as seen:
            tide.model(rows())
        assert seen.value.floor_bytes == caught.value.floor_bytes
        assert str(seen.value).splitlines()[0] == FLOOR


# ---------------------------------------------------------------------------------------------------------------------
# Models and batches


@pytest.mark.parametrize("call", [plan, lowtide.observe])
def test_a_loss_that_is_no_scalar(call: Callable) -> None:
    said = (
        "observe: the loss must be one number, not a tensor of shape [64, 8]; reduce it (`.mean()`), or say how with "
        "loss="
    )
    assert message(lambda: call(Net(reduces=False), (rows(),))) == said
    said = (
        "observe: the output is no loss but list; return a scalar tensor, an output with `.loss`, or say how to get it "
        "with loss="
    )
    assert message(lambda: call(Net(), lambda: [1.0])) == said
    assert call(Net(reduces=False), (rows(),), loss=lambda output: output.sum()) is not None


def test_an_autopilot_needs_no_scalar() -> None:
    truth, model = Net(reduces=False), Net(reduces=False)
    model.load_state_dict(truth.state_dict())
    with lowtide.optimize(model, budget="1GiB", engine=virtual(0)):
        for one in (truth, model):
            one(rows()).sum().backward()
    pairs = zip(model.parameters(), truth.parameters(), strict=True)
    assert all(same_bits(mine.grad, plain.grad) for mine, plain in pairs)  # type: ignore[arg-type]


def test_a_batch_that_does_not_fit(capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    start = "observe: the batch does not fit the model: Net(float32[64, 7]) raised RuntimeError: "
    assert message(lambda: plan(model, (rows(7),))) == (
        f"{start}a and b must have same reduction dim, but got [64, 7] X [8, 8]."
    )
    assert message(lambda: lowtide.observe(model, (rows(7),))) == (
        f"{start}mat1 and mat2 shapes cannot be multiplied (64x7 and 8x8)"
    )
    said = (
        "observe: the batch does not fit the model: Net(y=float32[64, 8]) raised TypeError: Net.forward() got an "
        "unexpected keyword argument 'y'"
    )
    assert message(lambda: plan(model, {"y": rows()})) == said
    assert message(lambda: lowtide.observe(model, {"y": rows()})) == said
    assert capfd.readouterr().err == ""  # torch would log a traceback


@pytest.mark.parametrize("call", [plan, lowtide.observe])
def test_a_batch_of_no_known_kind(call: Callable) -> None:
    said = (
        "observe: batch must be a mapping (model(**batch)), a tuple (model(*batch)) or a function that returns the "
        "loss, not {}"
    )
    assert message(lambda: call(Net(), rows())) == said.format("Tensor; write (tensor,)")
    assert message(lambda: call(Net(), [rows()])) == said.format("list")


def test_a_batch_that_does_not_fit_an_autopilot_raises_what_the_model_raises() -> None:
    model = Net()
    with lowtide.optimize(model, budget="1GiB", engine=virtual(0)) as tide:
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            model(rows(7))
        model(rows()).backward()
        assert [event.why for event in tide.events] == ["first step"]
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            model(rows(7))
        model(rows()).backward()


def test_what_is_no_model() -> None:
    assert message(lambda: plan("llama", (rows(),))) == "lowtide.plan: expected a torch.nn.Module, not str"  # type: ignore[arg-type]
    assert message(lambda: lowtide.observe(3, (rows(),))) == "observe: expected a torch.nn.Module, not int"  # type: ignore[arg-type]


def test_control_flow_that_depends_on_data_is_refused_by_a_trace_and_followed_by_a_real_step() -> None:
    model = Branch()
    assert message(lambda: plan(model, (rows(),))) == (
        "trace: the model looks at the values of its tensors (aten._local_scalar_dense in the model), and a trace has "
        "none; profile it with real ones: `lowtide profile RUN.yaml`, or lowtide.observe(model, batch)"
    )
    assert lowtide.observe(model, (rows(),)).num_forward_ops > 0
    with lowtide.optimize(model, budget="1GiB", engine=virtual(0)) as tide:
        for factor in (0.01, 100.0):
            model.zero_grad()
            model(rows() * factor).backward()
        assert tide.plan is not None


# ---------------------------------------------------------------------------------------------------------------------
# The rest


def test_hardware_is_that_of_the_device() -> None:
    assert hardware_of_device(torch.device("cpu")) == hardware_of_device(torch.device("meta")) == "cpu"
    assert message(lambda: plan(Net(), (rows(),), hardware="h2000")).startswith(
        "hardware: unknown device 'h2000'; did you mean 'h200'?"
    )


def test_a_plan_runs_nothing_and_leaves_no_trace() -> None:
    model, said = Net(), list[str]()
    before = footprint(model)
    found = plan(model, (rows(),), progress=said.append)
    assert footprint(model) == before
    assert said[0] == "tracing one step"
    assert found.is_solved and found.does_nothing and found.budget_bytes == 1 << 30
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_optimizers_state_is_placed_where_the_optimizer_is_known() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1))
    model.forward = lambda x: nn.Sequential.forward(model, x).mean()  # type: ignore[method-assign]
    batch = (rows(256),)
    assert message(lambda: plan(model, batch, memory={"optimizer": "swap", "layers": ["0"]})) == (
        "memory.optimizer: swap has nothing to move: there is no optimizer, or it has no state; pass optimizer=, "
        "take its first step before this if it has none yet, or write optimizer: keep"
    )
    memory = {"optimizer": "swap", "layers": ["0"]}
    placed = plan(model, batch, memory=memory, optimizer=torch.optim.AdamW(model.parameters())).optimizer
    assert placed is not None and placed.moved_bytes == 2 * 4 * 256 * 256
    assert placed.tier == "disk", "what plays the device on a CPU is its memory"
