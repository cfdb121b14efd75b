"""Updates within the backward pass: same bits, and gradients gone as soon as they were used."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.support.optimizer_zoo import Counted, Tower, assert_same, result_of, swapped
from tests.support.virtual_engine import VirtualEngine


def _make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest, "lr": 3e-2}]
    if kind == "Counted":
        return Counted(groups)
    if kind == "SGD":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, foreach=True)
    return torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused")


def _both() -> Iterator[tuple[Tower, torch.optim.Optimizer]]:
    """To train plainly, then the same with updates in backward; in the end the results are the same to the bit."""
    results = []
    for engine in (None, VirtualEngine(2)):
        torch.manual_seed(3)
        model = Tower()
        optimizer = _make("AdamW", model)
        if engine:
            swapped(optimizer, engine, overlap="in_backward")
        yield model, optimizer
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


def _train(engine: Any, kind: str = "AdamW", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    model = Tower().to(dtype)
    optimizer = _make(kind, model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    handle = swapped(optimizer, engine, overlap="in_backward") if engine else None
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    left = []
    for step in range(9):
        model(torch.full((3, 24), 0.1 * step, dtype=dtype), skip=step % 5 + 1).square().mean().backward()
        left.append(sum(p.grad is not None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert len(calls) == 9
    result = result_of(list(model.parameters()), optimizer)
    if handle:
        assert handle.stats.num_steps == 9
        assert handle._store.transfers.held_bytes == 0
        handle.detach()
        assert engine.violations == []
        assert engine.num_slots == 0
    return result, left


@pytest.mark.parametrize("kind", ["AdamW", "fused", "Counted", "SGD"])
def test_same_bits(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        truth, all_left = _train(None, kind, dtype)
        for seed in range(3):
            result, left = _train(VirtualEngine(seed), kind, dtype)
            assert_same(result, truth)
            # The first momenta of a group make SGD step all of it at once.
            assert left[0] == 1 or kind == "SGD", "a step that makes the state frees gradients too"
            most = 4 if dtype == torch.float32 else all_left[0]
            assert max(left[6:]) < most, "gradients of complete buckets are gone when backward ends"


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(10, 60))
def test_same_bits_under_many_schedules(seed: int) -> None:
    assert_same(_train(VirtualEngine(seed))[0], _train(None)[0])


def test_a_second_backward_pass_is_refused() -> None:
    model = Tower()
    optimizer = _make("AdamW", model)
    handle = swapped(optimizer, VirtualEngine(0), overlap="in_backward")
    for _ in range(2):
        model(torch.ones(3, 24)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(3, 24)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^lowtide: state_dict: the step that backward began is not done; call "):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"^lowtide: load_state_dict: the step that backward began is not done; "):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(
        RuntimeError, match=r"^lowtide: a second backward pass before optimizer.step\(\): parameters are"
    ):
        model(torch.ones(3, 24)).sum().backward()
    del handle


def _replace_moments(optimizer: Any, model: nn.Module) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"] = torch.full_like(parameter, 0.01)


def _forget_one(optimizer: Any, model: nn.Module) -> None:
    del optimizer.state[next(model.parameters())]


def _forget_all(optimizer: Any, model: nn.Module) -> None:
    optimizer.state.clear()


def _put_another(optimizer: Any, model: nn.Module) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("change", [_replace_moments, _forget_one, _forget_all, _put_another])
def test_state_that_was_replaced_between_steps_counts(change: Any) -> None:
    results = []
    for engine in (None, VirtualEngine(2)):
        torch.manual_seed(3)
        model = Tower()
        optimizer = _make("AdamW", model)
        handle = swapped(optimizer, engine, overlap="in_backward") if engine else None
        for step in range(6):
            model(torch.full((3, 24), 0.1 * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                change(optimizer, model)
        if engine:
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


def test_gradients_that_were_kept_are_not_those_of_this_pass() -> None:
    for model, optimizer in _both():
        for step in range(6):
            model(torch.full((3, 24), 0.1 * step), skip=2 if step == 0 else -1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("to_none", [False, True])
def test_what_a_step_does_not_use_is_stepped_as_plain_training_does(to_none: bool) -> None:
    """With gradients of zero where they are set to zero, as an expert without a token is; else not at all."""
    for model, optimizer in _both():
        for step in range(8):
            model(torch.full((3, 24), 0.1 * step), skip=step % 3 + 3 if step > 2 else -1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)


def test_state_that_is_replaced_while_a_step_is_under_way_is_refused() -> None:
    model = Tower()
    optimizer = _make("AdamW", model)
    handle = swapped(optimizer, VirtualEngine(0), overlap="in_backward")
    for _ in range(2):
        model(torch.ones(3, 24)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(3, 24)).sum().backward()
    before = optimizer.state
    optimizer.state = defaultdict(dict)
    handle.flush()
    with pytest.raises(RuntimeError, match=r"^lowtide: step: optimizer.state was replaced after backward had begun"):
        optimizer.step()
    optimizer.state = before
    optimizer.step()


def test_a_step_past_the_swap_ends_what_backward_began() -> None:
    results = []
    for engine in (None, VirtualEngine(2)):
        torch.manual_seed(3)
        model = Tower()
        optimizer = _make("Counted", model)
        if engine:
            swapped(optimizer, engine, overlap="in_backward")
        for step in range(6):
            model(torch.full((3, 24), 0.1 * step)).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                _ = optimizer.step() if step != 3 else type(optimizer).step(optimizer)
            optimizer.zero_grad()
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


def test_a_bucket_that_fails_within_the_backward_pass_cannot_be_resumed() -> None:
    """The gradients of the other buckets were not there yet, and who caught the error has no backward to go on with."""
    torch.manual_seed(3)
    model = Tower()
    optimizer = _make("AdamW", model)
    engine = VirtualEngine(1)
    handle = swapped(optimizer, engine, overlap="in_backward")
    for _ in range(2):
        model(torch.ones(3, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def no_copy(*_: Any) -> None:
        raise OSError("the disk is gone")

    engine.copy_in = no_copy  # type: ignore[method-assign]
    loss = model(torch.ones(3, 24)).square().mean()
    with pytest.raises(lowtide.PartialStepError) as caught:
        loss.backward()
    del engine.copy_in
    assert not caught.value.can_resume
    assert str(caught.value).endswith(
        "(OSError: the disk is gone) within the backward pass, whose other gradients will not come: load a checkpoint"
    )
    with pytest.raises(RuntimeError, match=r"^lowtide: resume: the last step stopped half-way .*; load a checkpoint$"):
        handle.resume()
    handle.detach()


# -- gradients ---------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Twelve matrices, whose gradients come last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


MATRIX_BYTES = 32 * 32 * 4


def _count(parameters: list[nn.Parameter], counts: list[int], _: Tensor) -> None:
    counts.append(sum(p.grad is not None for p in parameters))


def _limit(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize("resident", [0.0, 0.5, 1.0])
def test_no_step_ever_has_more_gradients_than_a_bucket_and_the_next_one(resident: float) -> None:
    """The first step too. A bucket has the state of two matrices. Counted by hand beside what the handle says."""
    results = []
    for engine in (None, VirtualEngine(2)):
        torch.manual_seed(3)
        model = Stack()
        parameters, counts = list(model.parameters()), []
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        handle = None
        if engine:
            options: Any = {"bucket_bytes": 4 * MATRIX_BYTES + 256, "resident": resident}
            handle = swapped(optimizer, engine, overlap="in_backward", **options)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(functools.partial(_count, parameters, counts))
        for step in range(5):
            model(torch.full((3, 32), 0.1 * (step + 1))).square().mean().backward()
            left = sum(p.grad is not None for p in parameters)
            optimizer.step()
            if handle:
                assert 1 <= left <= 3, "some are left, so that a change of gradients is seen"
                assert handle.stats.gradient_peak_bytes <= 3 * MATRIX_BYTES
                assert handle.stats.bucket_peak_bytes <= 3 * 4 * MATRIX_BYTES
            optimizer.zero_grad()
        if handle:
            assert max(counts) <= 3 < len(parameters)
            assert handle.stats.gradient_peak_bytes == 3 * MATRIX_BYTES
            assert "(overlap 'in_backward', with 0.012 MiB of gradients at most at a time)" in str(handle)
            handle.detach()
            assert (engine.violations, engine.num_slots) == ([], 0)
        else:
            assert max(counts) == len(parameters)
        results.append(result_of(parameters, optimizer))
    assert_same(results[1], results[0])


def test_hooks_of_others_on_a_gradient_run_before_its_update() -> None:
    """Also those that were put on a parameter after ours, on the last one of a bucket."""
    results = []
    for engine in (None, VirtualEngine(2)):
        torch.manual_seed(3)
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = swapped(optimizer, engine, overlap="in_backward", bucket_bytes=4 * MATRIX_BYTES) if engine else None
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_limit)
        for step in range(5):
            model(torch.full((3, 32), 0.1 * (step + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if handle:
            assert handle.stats.gradient_peak_bytes == 3 * MATRIX_BYTES
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


def _fail(_: Tensor) -> None:
    raise ArithmeticError


def test_clipping_is_seen_after_a_backward_pass_that_failed() -> None:
    """That pass has no end at which its gradients are looked at; the next one has."""
    torch.manual_seed(3)
    model, x = Stack(), torch.full((3, 32), 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    swapped(optimizer, VirtualEngine(2), overlap="in_backward", bucket_bytes=4 * MATRIX_BYTES + 256)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hook = model.layers[-1].weight.register_post_accumulate_grad_hook(_fail)
    with pytest.raises(ArithmeticError):
        model(x).square().mean().backward()
    hook.remove()
    optimizer.zero_grad()
    model(x).square().mean().backward()
    _clip(optimizer, model)
    with pytest.raises(
        RuntimeError, match=r"gradients were changed between the backward pass and the step \(clipping, GradScaler\)"
    ):
        optimizer.step()


def test_backward_passes_over_different_parameters_are_one_step() -> None:
    """Two losses, each with a model of its own: what the first pass leaves steps in the second one."""
    results = []
    for engine in (None, VirtualEngine(2)):
        torch.manual_seed(3)
        models = [Stack(), Stack()]
        parameters = [p for model in models for p in model.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        if engine:
            handle = swapped(optimizer, engine, overlap="in_backward", bucket_bytes=4 * MATRIX_BYTES + 256)
        for step in range(4):
            for model in models:
                model(torch.full((3, 32), 0.1 * (step + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine:
            assert handle.stats.gradient_peak_bytes <= 4 * MATRIX_BYTES
        results.append(result_of(parameters, optimizer))
    assert_same(results[1], results[0])


def _clip(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def _unscale(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _write_through_data(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.5)


def _write_an_element(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.view(-1)[1] += 1


CHANGED = "gradients were changed between the backward pass and the step (clipping, GradScaler)"


def _change_rate(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _change_tensor(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["count"].add_(1)


def _change_data(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["count"].data.add_(1)


def _add_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))]})


def _tell_of_infs(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.found_inf = torch.zeros(())  # as GradScaler tells a fused optimizer


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("AdamW", _clip, CHANGED),
        ("AdamW", _unscale, CHANGED),
        ("AdamW", _write_through_data, CHANGED),
        ("AdamW", _write_an_element, CHANGED),
        ("fused", _tell_of_infs, "GradScaler unscales gradients when the optimizer steps"),
        ("AdamW", _change_rate, "param_groups[0]['lr'] was changed between the backward pass and the step"),
        ("Counted", _change_tensor, "param_groups[0]['count'] was changed between the backward pass and the step"),
        ("Counted", _change_data, "param_groups[0]['count'] was changed between the backward pass and the step"),
        ("AdamW", _add_group, "param_groups was changed between the backward pass and the step"),
    ],
)
def test_what_comes_too_late_for_some_parameters_is_refused_and_a_checkpoint_mends_it(
    kind: str, change: Any, reason: str
) -> None:
    torch.manual_seed(3)
    model = Tower()
    optimizer = _make(kind, model)
    handle = swapped(optimizer, VirtualEngine(0), overlap="in_backward")

    def step(number: int, between: Any = None) -> None:
        model(torch.full((3, 24), 0.1 * number)).square().mean().backward()
        if between is not None:
            between(optimizer, model)
        optimizer.step()
        optimizer.zero_grad()

    step(1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(RuntimeError) as caught:
        step(2, change)
    assert str(caught.value) == (
        f"lowtide: step: {reason}, and parameters were updated in backward, before that: load a checkpoint, and use "
        "another way of updating (overlap='backward' of swap_optimizer, update='step' of swap_weights, or optimizer: "
        "auto without weights: auto in a plan)"
    )
    with pytest.raises(RuntimeError, match=r"^lowtide: step: the last step stopped half-way \(.*; load a checkpoint$"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"^lowtide: state_dict: the last step stopped half-way"):
        optimizer.state_dict()
    optimizer.zero_grad()
    if change is _add_group:
        return  # plain refuses the checkpoint too
    if change is _tell_of_infs:
        del optimizer.found_inf
    if change in (_change_tensor, _change_data):
        optimizer.param_groups[0]["count"].sub_(1)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for number in range(2, 5):
        step(number)
    found = result_of(list(model.parameters()), optimizer)
    handle.detach()
    torch.manual_seed(3)
    model = Tower()
    optimizer = _make(kind, model)
    for number in range(1, 5):
        step(number)
    assert_same(found, result_of(list(model.parameters()), optimizer))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_is_frozen_between_forward_and_backward_is_not_stepped(set_to_none: bool) -> None:
    """In step 2 it is what would have come last, so that no gradient seemed to be left for `step()`, and nothing told
    how gradients are cleared: in step 3 what had no gradient was stepped with zeros."""
    results = []
    for engine in (None, VirtualEngine(1)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {"overlap": "in_backward", "bucket_bytes": 4096, "min_bytes": 8192}
        handle = lowtide.swap_optimizer(optimizer, engine=engine, **options) if engine else None
        for step, frozen in enumerate(([], [], [model[0].weight, model[0].bias], [model[2].weight])):
            loss = model(torch.full((3, 32), 0.1 * (step + 1))).square().mean()
            for parameter in frozen:
                parameter.requires_grad_(False)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            for parameter in frozen:
                parameter.requires_grad_()
        if handle:
            handle.detach()
        results.append(result_of(list(model.parameters()), optimizer))
    assert_same(results[1], results[0])


def _by_hand(model: nn.Module) -> None:
    some = list(model.parameters())[::2]
    for parameter, gradient in zip(some, torch.autograd.grad(model(torch.ones(3, 24)).sum(), some), strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("gives", [_by_hand, lambda model: None])
def test_a_step_without_a_backward_pass_takes_no_gradients_of_zero(gives: Any) -> None:
    """Gradients that are set by hand, or a batch that is skipped: no hook tells that `zero_grad()` was called."""
    for model, optimizer in _both():
        for step in range(4):
            model(torch.full((3, 24), 0.1 * step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            gives(model)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("steps_at_once", [True, False])
def test_gradients_that_are_not_set_to_zero_between_steps_are_refused(steps_at_once: bool) -> None:
    model = Tower()
    optimizer = _make("AdamW", model)
    swapped(optimizer, VirtualEngine(0), overlap="in_backward")
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 24)).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"^lowtide: gradients of the last step are still there, to be added to or"):
        optimizer.step() if steps_at_once else model(torch.ones(3, 24)).sum().backward()


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("word", [1, 301])
def test_an_embedding_of_few_words_shows_that_gradients_were_unscaled(word: int, is_sparse: bool) -> None:
    """Almost all of the gradient that is left for the step is zero, and no version counts what unscales it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(512, 8, sparse=is_sparse), nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swapped(optimizer, VirtualEngine(0), overlap="in_backward")

    def step(change: Any = None) -> None:
        model(torch.tensor([word])).square().mean().backward()
        if change is not None:
            change(optimizer, model)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pytest.raises(RuntimeError, match=re.escape(CHANGED)):
        step(_unscale)
