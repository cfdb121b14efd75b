"""Indices that an operator keeps below a limit are narrowed on an accelerator without a look at them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.log import Listener
from lowtide.core.plan import Plan
from lowtide.profiling.smaller import measured_codec
from lowtide.runtime.recompute.fingerprint import RecipeMismatchError, _places_of
from lowtide.tensors.codecs import encode
from tests.standin import device
from tests.support import zoo
from tests.support.solved import plan_with

DEVICE = torch.device(device.NAME, 0)


class Pools(nn.Module):
    """Images of any size: a convolution and a max-pool, whose int64 indices are eight bytes for four of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.max_pool2d(layer(x), 3, stride=1, padding=1)
        return x.square().mean()


def images(size: int, seed: int, count: int = 8) -> Tensor:
    return torch.randn(count, 4, size, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def made() -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = Pools().to(DEVICE)
    profile = lowtide.observe(model, (images(8, 0),))
    indices = {node.name: node.codec for node in profile.sites if node.codec is not None}
    assert [codec.kind for codec in indices.values()] == ["uint8"] * 3  # 64 places in a plane
    assert all(codec.nbytes == 8 * 4 * 8 * 8 for codec in indices.values())
    plan = plan_with(profile, {})
    return model, plan.with_sites(dataclasses.replace(s, codec=indices.get(s.name)) for s in plan.sites)


def same(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(zoo.same_bits(a.cpu(), b.cpu()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.SWAP])
@pytest.mark.parametrize("policy", ["late", "early", 3])
def test_indices_of_pools_are_stored_in_a_byte(fate: Fate, policy: str | int) -> None:
    model, plan = made()
    plan = plan.with_sites(dataclasses.replace(s, fate=fate if s.codec is not None else s.fate) for s in plan.sites)
    want = [step(model, images(8, seed)) for seed in range(3)]
    device.play(policy, 0.3)
    with lowtide.apply(model, plan) as tide:
        for seed in range(3):
            assert same(step(model, images(8, seed)), want[seed])
        stats = tide.stats
        assert (stats.num_divergences, tide.failed_recipes) == (0, {})
    indices_bytes = sum(site.nbytes for site in plan.sites if site.codec is not None)
    assert stats.narrowed_bytes == 3 * indices_bytes * 7 // 8
    assert stats.swapped_bytes == (3 * indices_bytes // 8 if fate is Fate.SWAP else 0)
    assert device.violations() == []


def test_indices_beyond_the_type_are_refused_before_gradients_are_used() -> None:
    """The plan is for planes of 64 places; these have 400, in fewer images, so that there are not more of them."""
    model, plan = made()
    small, large = images(8, 1), images(20, 1, count=1)
    want = [step(model, small), step(model, large)]
    with lowtide.apply(model, plan) as tide:
        assert same(step(model, small), want[0])
        with pytest.raises(RecipeMismatchError):
            step(model, large)
        for _ in range(5):  # each mismatch is told for one site, which is kept from then on
            try:
                got = step(model, large)
            except RecipeMismatchError:
                continue
            break
        assert same(got, want[1])
        assert len(tide.failed_recipes) == 3


class Largest(nn.Module):
    """The largest of each row: one index a row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).max(dim=1)[0].square().sum()


def test_one_index_of_thousands_is_seen() -> None:
    """64 words are compared anyway; this one is in none of them."""
    model = Largest().to(DEVICE)
    x = torch.zeros(4096, 200)
    x[:, 3] = 1.0
    profile = lowtide.observe(model, (x.to(DEVICE),))
    plan = plan_with(profile, {})
    codecs = {node.name: node.codec for node in profile.sites}
    plan = plan.with_sites(dataclasses.replace(site, codec=codecs[site.name]) for site in plan.sites)
    assert [site.codec.kind for site in plan.sites if site.codec is not None] == ["uint8"]
    wide = F.pad(x, (0, 200))
    taken = set((_places_of(8192) // 2).tolist())
    wide[next(row for row in range(4096) if row not in taken), 300] = 2.0
    wide = wide.to(DEVICE)
    want = step(model, wide)
    with lowtide.apply(model, plan) as tide:
        assert same(step(model, x.to(DEVICE)), step(model, x.to(DEVICE)))
        with pytest.raises(RecipeMismatchError):
            step(model, wide)
        assert same(step(model, wide), want)
        assert len(tide.failed_recipes) == 1


def test_more_indices_than_planned_stay_whole() -> None:
    model, plan = made()
    large = images(8, 1, count=9)
    want = step(model, large)
    with lowtide.apply(model, plan) as tide:
        with pytest.warns(UserWarning, match="does not fit its codec"):
            got = step(model, large)
        assert same(got, want)
        assert same(step(model, large), want)
        assert tide.stats.narrowed_bytes == 0
        why = "it is larger than planned, and nobody looks whether it fits its codec (uint8)"
        assert list(tide.failed_recipes.values()) == [why] * 3


def test_nothing_else_is_narrowed_on_a_device() -> None:
    tokens = torch.arange(4096, device=DEVICE) % 7
    storage = tokens.untyped_storage()
    assert measured_codec(storage, torch.int64) is None
    found = measured_codec(storage, torch.int64, 7)
    assert found is not None and (found.kind, found.nbytes) == ("uint8", 4096)
    for kind, most in (("uint8", 255), ("int16", 32767), ("int32", 2**31 - 1)):
        for value, is_misfit in ((most, 0), (most + 1, 1), (-(2**40), 1)):
            tokens[4095] = value
            encoded = encode(kind, storage, torch.int64)
            assert encoded is not None and encoded.misfit is not None
            assert int(encoded.misfit) == is_misfit
            decoded = encoded.decoder.run([encoded.data], DEVICE)
            assert torch.equal(decoded.cpu(), tokens.cpu()) != bool(is_misfit)
            assert 0 <= int(decoded.min()) <= int(decoded.max()) <= most, "out of bounds before it is told"


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_a_budget_has_room_for_batches_that_wait_on_the_device(share: float) -> None:
    """Nor do they belong to the step that is observed: without them the first planned step passed its budget by a
    tenth."""
    torch.manual_seed(0)
    model, batches = Pools().to(DEVICE), [images(8, seed, count=64) for seed in range(3)]
    resting_bytes = torch.accelerator.memory_allocated()
    device.take_peak()
    want = [[tensor.cpu() for tensor in step(model, x)] for x in batches]
    budget_bytes = resting_bytes + int(share * (device.take_peak() - resting_bytes))
    peaks, predicted = [], []

    def hear(line: str) -> None:
        if "(first step)" in line:
            device.take_peak()  # the observed step is no planned one

    memory = {"min_bytes": 0, "swap": "none"}
    with Listener(hear), lowtide.optimize(model, budget=budget_bytes, memory=memory) as tide:
        for x, expected in zip(batches, want, strict=True):
            assert same(step(model, x), expected)
            peaks.append(device.take_peak())
            assert tide.plan is not None and tide.plan.predicted is not None
            predicted.append(tide.plan.predicted.peak_bytes)
        assert [event.why for event in tide.events] == ["first step"]
    assert all(peak <= most <= budget_bytes for peak, most in zip(peaks, predicted, strict=True)), (peaks, predicted)
    assert device.violations() == []
