"""A step that stops half-way: what is said, what can go on, and what cannot."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engines.base import Lane
from tests.support.optimizer_zoo import Case, assert_same, result_of, swapped, train
from tests.support.virtual_engine import VirtualEngine

STEPS = 4
CASES = (
    Case("AdamW", "foreach", torch.float32, has_missing=True),
    Case("SGD", "for-loop", torch.bfloat16, has_missing=True),
    Case("Counted", "for-loop", torch.float32, has_missing=False),
)


class Failing(VirtualEngine):
    """The copy in of a given number fails."""

    failing = -1
    num_copies = 0
    _failed: object = None

    def copy_in(self, slot, target):
        super().copy_in(slot, target)
        self.num_copies += 1
        if self.num_copies == self.failing:
            self._failed = super().record(Lane.IN)

    def failure(self, event):
        return OSError("no such bytes") if event == self._failed else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_failed_fetch_at_every_bucket_is_resumed_to_the_same_bits(case: Case) -> None:
    truth = train(case, None, steps=STEPS)
    failing, num_failures = 1, 0
    while True:
        engine = Failing(failing)
        engine.failing = failing
        parameters, optimizer = case.build()
        handle = swapped(optimizer, engine)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        calls: list[int] = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))  # noqa: B023
        has_failed = False
        for step in range(STEPS):
            case.set_gradients(parameters, step)
            stopped = _step(optimizer)
            if stopped is not None:
                has_failed = True
                assert stopped.can_resume
                assert "no such bytes" in str(stopped)
                with pytest.raises(RuntimeError, match=r"^lowtide: state_dict: the last step stopped half-way"):
                    optimizer.state_dict()
                with pytest.raises(RuntimeError, match=r"^lowtide: step: the last step stopped half-way"):
                    optimizer.step()
                handle.resume()
            assert len(calls) == step + 1
            scheduler.step()
        assert_same(result_of(parameters, optimizer), truth)
        handle.detach()
        assert engine.violations == []
        assert engine.num_slots == 0
        if not has_failed:
            break
        failing, num_failures = failing + 1, num_failures + 1
    assert num_failures >= 3
    with pytest.raises(RuntimeError, match=r"^lowtide: no step of this optimizer stopped half-way; there is nothing"):
        handle.resume()


def _step(optimizer: torch.optim.Optimizer) -> lowtide.PartialStepError | None:
    try:
        optimizer.step()
    except lowtide.PartialStepError as error:
        return error
    return None


class Fragile(torch.optim.SGD):
    """Fails inside its own step when it is told to, after it has updated a parameter."""

    calls_left: ClassVar = [-1]

    def step(self, closure=None):
        super().step(closure)
        self.calls_left[0] -= 1
        if self.calls_left[0] == 0:
            raise ValueError("inside")


def test_a_failure_inside_a_part_cannot_be_resumed() -> None:
    parameters = [torch.nn.Parameter(torch.ones(20, 30)) for _ in range(4)]
    optimizer = Fragile(parameters, lr=0.1, momentum=0.9)
    handle = swapped(optimizer, VirtualEngine(0))
    groups = optimizer.param_groups
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    Fragile.calls_left[0] = 2
    with pytest.raises(lowtide.PartialStepError) as caught:
        optimizer.step()
    assert (caught.value.bucket, caught.value.can_resume) == (1, False)
    assert str(caught.value) == (
        "Fragile.step failed inside part 1 of 4 (ValueError: inside); some of its parameters may be updated and others "
        "not, so it cannot be resumed: load a checkpoint"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    momenta = [optimizer.state[p]["momentum_buffer"].unique().tolist() for p in parameters]
    assert momenta == [[pytest.approx(1.9)], [1.0], [1.0], [1.0]], "of the part that failed, as it was before"
    assert optimizer.param_groups is groups
    with pytest.raises(RuntimeError, match=r"^lowtide: resume: the last step stopped half-way .*; load a checkpoint$"):
        handle.resume()
    optimizer.load_state_dict(saved)
    optimizer.step()
    handle.detach()


def test_resume_refuses_other_gradients() -> None:
    case = CASES[0]
    engine = Failing(0)
    engine.failing = 2
    parameters, optimizer = case.build()
    handle = swapped(optimizer, engine)
    for step in range(2):
        case.set_gradients(parameters, step)
        if _step(optimizer) is not None:
            break
    else:
        pytest.fail("no copy failed")
    case.set_gradients(parameters, 9)
    with pytest.raises(RuntimeError, match="gradients were replaced since the step stopped"):
        handle.resume()
    handle.detach()


class Unwritable(VirtualEngine):
    """Copies out fail from a given one on, for a while, and leave other bytes."""

    failing = range(0)
    num_copies = 0

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._failed: dict = {}

    def copy_out(self, source, slot):
        super().copy_out(source, slot)
        self.num_copies += 1
        if self.num_copies in self.failing:
            self._failed[super().record(Lane.OUT)] = slot

    def failure(self, event):
        if event not in self._failed:
            return None
        self._failed[event].place.fill_(9)  # now that the copy has run
        return OSError("disk broke")


UNWRITTEN = r"could not be written to the tier 'host' \(disk broke\); they stay on cpu"


@pytest.mark.parametrize("last", [15, 10**6], ids=["for a while", "for ever"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
def test_a_bucket_that_cannot_be_written_stays_on_the_device(case: Case, last: int) -> None:
    truth = train(case, None)
    engine = Unwritable(1)
    engine.failing = range(9, last + 1)
    with pytest.warns(RuntimeWarning, match=UNWRITTEN):
        assert_same(train(case, lambda optimizer: swapped(optimizer, engine)), truth)
    assert engine.violations == []
    assert engine.num_slots == 0


def test_what_could_not_be_written_leaves_the_device_once_it_can() -> None:
    case = CASES[0]
    engine = Unwritable(1)
    parameters, optimizer = case.build()
    handle = swapped(optimizer, engine)
    case.set_gradients(parameters, 0)
    optimizer.step()
    swapped_bytes, engine.failing = handle.stats.swapped_bytes, range(10**6)
    with pytest.warns(RuntimeWarning, match=UNWRITTEN):
        optimizer.step()
    assert handle.stats.swapped_bytes == 0 < swapped_bytes
    engine.failing, result = range(0), result_of(parameters, optimizer)
    handle.keep_no_more_than(0.0)
    assert handle.stats.swapped_bytes == swapped_bytes
    assert_same(result_of(parameters, optimizer), result)
    handle.detach()
    assert (engine.violations, engine.num_slots) == ([], 0)


def test_what_no_tier_has_room_for_stays_on_the_device() -> None:
    case = CASES[0]
    truth = train(case, None)
    engine = VirtualEngine(0, host_bytes=8000, disk_bytes=5000)
    handles = []

    def swap(optimizer):
        handles.append(swapped(optimizer, engine))
        return handles[0]

    with pytest.warns(RuntimeWarning, match=r"bytes of optimizer state stay on cpu: host: .* more wanted; disk: "):
        assert_same(train(case, swap), truth)
    assert engine.violations == []


def test_a_parameter_on_another_device_is_refused_by_name() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(8, 8))])
    handle = swapped(optimizer, VirtualEngine(0))
    moved = nn.Parameter(torch.ones(8, 8, device="meta"))
    moved.grad = torch.ones_like(moved)
    optimizer.param_groups[0]["params"].append(moved)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "lowtide: a parameter is on meta, and its optimizer was swapped for parameters on cpu; call handle.detach(), "
        "move the model, and swap the optimizer again (with Accelerate: model.to(accelerator.device) first)"
    )
    optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    handle.detach()
