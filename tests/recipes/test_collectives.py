"""Recipes and collectives: none without being asked for, and what the recipe holds for who asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

from lowtide.core.profile import Profile, Site
from lowtide.profiling.observe_step import observe

WIDTH = 8


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of one: collectives are issued and recorded as in any other."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """A norm-like op, a collective, a projection that saves what the collective gives out."""

    def __init__(self, collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.collective = collective
        self.act = nn.Tanh()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.collective(self.act(x))).sin().sum()


def gathered(x: torch.Tensor) -> torch.Tensor:
    return functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def gathered_and_scaled(x: torch.Tensor) -> torch.Tensor:
    return gathered(x) * 2.0


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def profile_of(collective: Callable[[torch.Tensor], torch.Tensor]) -> Profile:
    torch.manual_seed(0)
    return observe(Block(collective), (torch.randn(4, WIDTH, requires_grad=True),))


def read_by_projection(profile: Profile) -> Site:
    """What the projection saves."""
    sites = [site for site in profile.sites if not site.name.startswith(("act", "proj"))]
    assert len(sites) == 1
    return sites[0]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_collective_gives_out_has_no_recipe_but_for_who_asks() -> None:
    profile = profile_of(gathered)
    site = read_by_projection(profile)
    assert (site.recipe, site.why_no_recipe) == (None, "collective")
    recipe = site.collective_recipe
    assert recipe is not None
    assert recipe.collectives == ("all_gather_into_tensor",)
    assert recipe.groups == (dist.group.WORLD.group_name,)
    assert recipe.nodes == ("act.tanh",)
    assert recipe.steps[-1].op == "_c10d_functional.wait_tensor.default"
    assert not any(other.recipe.collectives for other in profile.nodes if other.recipe)
    assert Profile.from_json(profile.to_json()) == profile
    slower = profile.with_times(2.0)
    assert read_by_projection(slower).collective_recipe.seconds == pytest.approx(2 * recipe.seconds)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_recipe_that_passes_through_a_collective_is_none_either() -> None:
    site = read_by_projection(profile_of(gathered_and_scaled))
    assert site.op == "mul"
    assert (site.recipe, site.why_no_recipe) == (None, "collective")
    assert site.collective_recipe is not None
    assert [step.op.split(".")[1] for step in site.collective_recipe.steps] == [
        "all_gather_into_tensor",
        "wait_tensor",
        "mul",
    ]


def test_collectives_that_write_into_what_they_are_given_are_named() -> None:
    site = read_by_projection(profile_of(_InPlace.apply))
    assert site.recipe is None
    assert site.collective_recipe is None
    assert site.why_no_recipe == "collective c10d._allgather_base_, which is not a functional one"


def test_a_tensor_that_was_reduced_in_place_is_no_longer_what_made_it() -> None:
    """The schemas of the older collectives do not say that they write."""

    def reduce(x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        dist.all_reduce(x.detach())
        return x

    profile = profile_of(reduce)
    site = next(site for site in profile.sites if site.op == "exp")
    assert site.recipe is None
    assert site.why_no_recipe == "collective c10d.allreduce_, which is not a functional one"
