"""Expert parallelism in a run: which ranks share the experts, and what of a checkpoint is whose.

What: `split_for` splits the model's experts over groups of `train.expert_parallel` consecutive ranks. Each group has
all experts; ranks with the same place in their group have the same ones. All ranks are data-parallel to each other.
Why names of slices: a checkpoint then holds every expert under a name that says which part it is
(`...experts.down_proj[0/2]`), and none twice.
Cost: see pipeline/experts.py. Not covered: other numbers of ranks for a checkpoint than those it was saved by.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from examples.train.ranks import Ranks
from lowtide.config.run import RunConfig
from lowtide.errors import ConfigError
from lowtide.pipeline.experts import ExpertParallel, split_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExperts:
    """The experts of one rank."""

    split: ExpertParallel
    ranks: Any
    """The ranks that have the same other parameters; None for all of the job."""
    replicas: Any
    """The ranks that have the same experts; None where there is no other."""

    def average_gradients(self) -> None:
        """Make every gradient the mean over all ranks that have it."""
        self.split.average_gradients(
            ranks=dist.group.WORLD if self.ranks is None else self.ranks, replicas=self.replicas
        )

    def name_of(self, name: str) -> str:
        """The name under which a checkpoint has a tensor: experts with the place of this rank, which has a part."""
        is_own = name.endswith(self.split.parameter_names)
        return f"{name}[{self.split.rank}/{self.split.num_ranks}]" if is_own else name


def check_ranks(run: RunConfig, ranks: Ranks) -> None:
    """Raises `ConfigError`, on all ranks alike, for a number of ranks that the experts cannot be split over."""
    wanted = run.train.expert_parallel
    if ranks.num_ranks % wanted:
        are = "is 1 rank" if ranks.is_alone else f"are {ranks.num_ranks} ranks"
        run.fail(
            "train.expert_parallel",
            f"'train.expert_parallel' is {wanted}, but there {are}; start it with torchrun --nproc-per-node {wanted}, "
            "or a multiple of that",
        )


def split_for(run: RunConfig, model: torch.nn.Module, ranks: Ranks) -> RankExperts | None:
    """Split the experts as the run file says; None where each rank has all. Collective. Raises `ConfigError`.

    `model`: of a pipeline the stages of this rank, which need not have experts.
    """
    size = run.train.expert_parallel
    if size == 1:
        return None
    places = torch.arange(ranks.num_ranks).view(-1, size)  # a row: ranks that share experts
    group, _ = dist.new_subgroups_by_enumeration(places.tolist())
    if run.pipeline is not None:
        # Other groups have other layers.
        has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
        none: Any = ExpertParallel(model, {}, group=group, num_parts=1)
        return RankExperts(split=split_experts(model, group=group) if has_experts else none, ranks=group, replicas=None)
    replicas = None
    if len(places) > 1:
        replicas, _ = dist.new_subgroups_by_enumeration(places.T.tolist())
    with named(run):
        split = split_experts(model, group=group)
    return RankExperts(split=split, ranks=None, replicas=replicas)


@contextlib.contextmanager
def named(run: RunConfig) -> Iterator[None]:
    """Inside, a mistake in what is split is told with its place in the run file."""
    try:
        yield
    except ConfigError as error:
        run.fail("train.expert_parallel", f"'train.expert_parallel' is {run.train.expert_parallel}, but {error}")
