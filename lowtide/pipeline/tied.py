"""Weights that stages of different ranks share: found, kept equal, or refused by name.

What: each rank that has a shared weight has a copy of it. After a step the ranks exchange the raw sums of their stages
and each adds them in the order of the stages, so all have one gradient, divided once, and optimizers with the same
settings keep the copies equal. That they are still equal is compared in each step.
What is shared: `find_ties` looks at all stages of a model by identity. A rank that is given its own stages only cannot
do so; then weights with the same values on two ranks are refused by name until `tied=` says what they are.
Bits: those of one process that adds up the uses of each stage apart, and their sums last, first stage first.
Cost: in each step a tied weight goes once from each of its ranks to each other one; a sample of each weight once.
Not covered: a shared weight whose elements are all equal when training begins, on stages that `find_ties` has not seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.errors import ConfigError
from lowtide.pipeline.gradients import StepGradients
from lowtide.pipeline.schedule import Kind, Result
from lowtide.tensors.fsdp import is_sharded, local_part

_SAMPLED = 64
"""Elements of a weight that are compared."""


class Place(NamedTuple):
    """Where a weight is."""

    stage: int
    name: str

    def __str__(self) -> str:
        return f"'{self.name}' of stage {self.stage}"


Tie = tuple[Place, ...]
"""The places of one weight, in the order of the stages, one in each."""


def find_ties(stages: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """The weights that several stages have. `stages`: all those of a model, in order."""
    places: dict[nn.Parameter, list[Place]] = defaultdict(list)
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places[parameter].append(Place(number, name))
    return tuple(tuple(every) for every in places.values() if len(every) > 1)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of some elements, spread over this rank's part of it."""
    local = local_part(tensor).detach()
    return local.reshape(-1)[:: max(1, local.numel() // _SAMPLED)][:_SAMPLED].clone()


def sample_of(weight: torch.Tensor) -> bytes | None:
    """Some of its elements, equal for equal weights. None: they say nothing, for they are all the same or not there."""
    sample = elements_of(weight)
    if sample.is_meta or sample.numel() < 2 or bool((sample == sample[0]).all()):
        return None
    return sample.cpu().view(torch.uint8).numpy().tobytes()


def described(weight: torch.Tensor) -> tuple[str, tuple[int, ...], bytes] | None:
    """What two copies of one weight have in common; None where it says nothing. Plain, so that it can travel."""
    sample = sample_of(weight)
    return None if sample is None else (str(weight.dtype), tuple(weight.shape), sample)


def refuse_look_alikes(ranks: Sequence[Mapping[Place, Any]]) -> None:
    """Raises ConfigError where stages of two ranks have equal weights. `ranks`: of each one, what `described` says."""
    seen: dict[Any, tuple[int, Place]] = {}
    for rank, places in enumerate(ranks):
        for place, words in places.items():
            if words is None:
                continue
            first_rank, first = seen.setdefault(words, (rank, place))
            if first_rank != rank:
                raise ConfigError(
                    f"pipeline: {first} (rank {first_rank}) and {place} (rank {rank}) have the same values. If they "
                    "are one weight, give tied=find_ties(stages) with all stages of the model; if they only begin "
                    "alike, give tied=()"
                )


class TiedWeights:
    """Of one rank: the weights that it shares with others."""

    def __init__(
        self, ties: Sequence[Tie], weights: Mapping[Place, torch.Tensor], rank_of_stage: Sequence[int], rank: int
    ) -> None:
        """weights: those of the rank, by place. Raises ConfigError for a place of the rank that has no weight."""
        self._rank_of_stage, self._rank = rank_of_stage, rank
        self._ties: list[tuple[int, Tie, dict[Place, torch.Tensor]]] = []
        """Number, places, and which of them are here."""
        for number, tie in enumerate(ties):
            for place in tie:
                if rank_of_stage[place.stage] == rank and place not in weights:
                    raise ConfigError(f"pipeline: tied= names {place}, which has no weight of this name")
            own = {place: weights[place] for place in tie if place in weights}
            if len({rank_of_stage[place.stage] for place in tie}) > 1 and any(map(is_sharded, own.values())):
                raise ConfigError(f"pipeline: {tie[0]} is shared between ranks and sharded, which is not covered")
            if own and len(set(map(id, own.values()))) + len(tie) - len(own) > 1:
                self._ties.append((number, tie, own))

    @property
    def weights(self) -> set[torch.Tensor]:
        """Those of this rank that have another copy."""
        return {weight for _, _, own in self._ties for weight in own.values()}

    @property
    def num_bytes(self) -> int:
        """That the sums of other ranks and the whole sums take."""
        return sum(weight.nbytes * (len(tie) - len(own) + 1) for _, tie, own in self._ties for weight in own.values())

    def counted_elsewhere(self) -> set[torch.Tensor]:
        """Weights of this rank whose first copy is at another place: a norm of the whole model counts that one."""
        return {weight for _, tie, own in self._ties for weight in own.values() if own.get(tie[0]) is not weight}

    def samples(self) -> dict[Place, bytes | None]:
        """Of all copies on this rank."""
        return {place: sample_of(weight) for _, _, own in self._ties for place, weight in own.items()}

    def check(self, ranks: Sequence[Mapping[Place, bytes | None]]) -> None:
        """Raises ConfigError where two copies differ. ranks: the samples of each."""
        everywhere = {place: (rank, sample) for rank, own in enumerate(ranks) for place, sample in own.items()}
        for _, tie, _ in self._ties:
            (first_rank, first), *others = [everywhere[place] for place in tie]
            for place, (rank, sample) in zip(tie[1:], others, strict=True):
                if sample != first:
                    raise _unequal(tie[0], first_rank, place, rank)

    def exchange(self, gradients: StepGradients, transport: Any) -> None:
        """Give each copy the sums of all others. All ranks come to it after their last action."""
        for number, tie, own in self._ties:
            others = {self._rank_of_stage[place.stage] for place in tie} - {self._rank}
            for place, weight in own.items():
                message = (gradients.sum_of(place.stage, weight), elements_of(weight))
                for other in sorted(others):
                    transport.send(_result_of(place, number), message, to=other)
            for place in tie:
                if place not in own:
                    transport.ask(_result_of(place, number), source=self._rank_of_stage[place.stage])
        for number, tie, own in self._ties:
            sums = {place: gradients.sum_of(place.stage, weight) for place, weight in own.items()}
            for place in tie:
                if place not in own:
                    sums[place], sample = transport.read(_result_of(place, number))
                    self._compare(own, place, sample)
            for place, given in sums.items():
                for weight in own.values():
                    gradients.add_remote(place.stage, weight, None if given is None else given.clone())

    def _compare(self, own: Mapping[Place, torch.Tensor], place: Place, sample: torch.Tensor) -> None:
        for here, weight in own.items():
            if not torch.equal(elements_of(weight), sample):
                raise _unequal(here, self._rank, place, self._rank_of_stage[place.stage])


def _unequal(one: Place, its_rank: int, other: Place, others_rank: int) -> ConfigError:
    return ConfigError(
        f"pipeline: {one} (rank {its_rank}) and {other} (rank {others_rank}) are one weight and have other values; "
        "begin with the same, and give their optimizers the same settings"
    )


def _result_of(place: Place, number: int) -> Result:
    return Result(Kind.BACKWARD_WEIGHT, place.stage, number)
