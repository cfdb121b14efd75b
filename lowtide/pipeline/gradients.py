"""The gradients of a rank during one step: added up raw, apart for each stage, divided once; weights that stages share.

What: at its beginning a step sets the gradients that are there aside. Weights that several stages have (tied
embeddings) get one sum for each stage: `of_stage` puts the sum of a stage in place while its backward runs. At the end
the sums of the stages are added in the order of the stages, divided, and added to what was set aside.
Why apart: the stages of a V take turns, in an order that differs from that of one process, and so would the rounding.
Where stages of several ranks share a weight, each rank has a copy. After its last action it sends the raw sums of its
stages to the others, so all have one gradient, and optimizers with the same settings keep the copies equal, which is
compared in each step. A buffer that several stages have may be read; one that a stage has written is refused by name.
`find_ties` finds both by identity in all stages of a model. A rank that is given its own
stages only cannot; then weights with the same values on two ranks are refused until `tied=` says what they are.
`gradient_norm` is that of the whole model in one process, to the bit: norms of single weights, in the order of the
stages, a shared weight at its first place.
Bits: those of one process that adds up the uses of each stage apart, and their sums last, first stage first.
Cost: for a shared weight one more gradient for each stage, and each step one message between its ranks; a sample of
each weight once; for gradients that are kept from step to step one more of each during the step.
Not covered: hooks that use a gradient up as soon as it is added, for it is not yet divided then; a shared weight whose
elements are all equal when training begins, on stages that `find_ties` has not seen; the other norms of torch.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import Kind, Result
from lowtide.tensors.fsdp import is_sharded, local_part, whole_of
from lowtide.tensors.live_bytes import unique_bytes
from lowtide.tensors.private import version_of

_SAMPLED = 64
"""Elements of a weight that are compared."""


class Place(NamedTuple):
    """Where a weight is."""

    stage: int
    name: str

    def __str__(self) -> str:
        return f"'{self.name}' of stage {self.stage}"


Tie = tuple[Place, ...]
"""The places of one weight or buffer, in the order of the stages, one in each."""


def without_ddp(stages: Mapping[int, Any]) -> tuple[dict[int, Any], dict[int, DistributedDataParallel]]:
    """The modules of stages, and what was around some: a pipeline adds gradients of replicas up once a step, itself."""
    replicas = {number: each for number, each in stages.items() if isinstance(each, DistributedDataParallel)}
    return {number: each.module if number in replicas else each for number, each in stages.items()}, replicas


def find_ties(stages: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """The weights and buffers that several stages have. `stages`: all those of a model, in order."""
    places: dict[torch.Tensor, list[Place]] = defaultdict(list)
    for number, stage in without_ddp(dict(enumerate(stages)))[0].items():
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            places[tensor].append(Place(number, name))
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
    """Of one rank: the weights that it shares with others, and buffers that several stages have."""

    def __init__(
        self,
        ties: Sequence[Tie],
        weights: Mapping[Place, torch.Tensor],
        rank_of_stage: Sequence[int],
        rank: int,
        stages: Mapping[int, nn.Module] | None = None,
    ) -> None:
        """weights: those of the rank, by place. Raises ConfigError for a place of the rank that has no weight, and is
        no buffer of the stage."""
        self._rank_of_stage, self._rank = rank_of_stage, rank
        self._stages = stages or {}
        self.has_ties = bool(ties)
        self._buffers: list[tuple[Tie, list[Place]]] = []
        """Places, and those that are here."""
        self._versions: dict[Place, tuple[torch.Tensor | None, int]] = {}
        """Of these buffers, when the step began."""
        self._ties: list[tuple[int, Tie, dict[Place, torch.Tensor]]] = []
        """Number, places, and which of them are here."""
        for number, tie in enumerate(ties):
            here = [place for place in tie if rank_of_stage[place.stage] == rank]
            if here and not any(place in weights or self._buffer(place) is None for place in here):
                self._buffers.append((tie, here))
                continue
            for place in here:
                if place not in weights:
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

    def _buffer(self, place: Place) -> torch.Tensor | None:
        """None where the stage has no buffer of this name."""
        try:
            return self._stages[place.stage].get_buffer(place.name) if place.stage in self._stages else None
        except AttributeError:
            return None

    def _now(self, place: Place) -> tuple[torch.Tensor | None, int]:
        buffer = self._buffer(place)
        return buffer, 0 if buffer is None else version_of(buffer)

    def begin(self) -> None:
        """A step begins."""
        self._versions = {place: self._now(place) for _, own in self._buffers for place in own}

    def written_buffer(self) -> str | None:
        """After the actions of a step: what to say of a shared buffer that a stage of this rank has written. In one
        process it would see what all stages write."""
        for tie, own in self._buffers:
            for place in own:
                (buffer, version), (now, version_now) = self._versions[place], self._now(place)
                if now is not buffer or version_now != version:
                    others = " and ".join(str(other) for other in tie if other != place)
                    return (
                        f"pipeline: {place} is one buffer with {others}, and stage {place.stage} has written it, which "
                        "no other rank sees; give each stage a buffer of its own"
                    )
        return None

    def exchange(self, gradients: StepGradients, transport: Any) -> None:
        """Give each copy the sums of all others. All ranks come to it after their last action."""
        for number, tie, own in self._ties:
            others = {self._rank_of_stage[place.stage] for place in tie} - {self._rank}
            for place, weight in own.items():
                message = (gradients.sums_of(weight).get(place.stage), elements_of(weight))
                for other in sorted(others):
                    transport.send(_result_of(place, number), message, to=other)
            for place in tie:
                if place not in own:
                    transport.ask(_result_of(place, number), source=self._rank_of_stage[place.stage])
        for number, tie, own in self._ties:
            sums = {place: gradients.sums_of(weight).get(place.stage) for place, weight in own.items()}
            for place in tie:
                if place not in own:
                    sums[place], sample = transport.read(_result_of(place, number))
                    self._compare(own, place, sample)
            for place, given in sums.items():
                for weight in own.values():
                    gradients.sums_of(weight)[place.stage] = None if given is None else given.clone()

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


class StepGradients:
    """Of one step. Ends in `give` or in `take_back`."""

    def __init__(self, weights: Mapping[int, Iterable[torch.Tensor]], *, shared: Collection[torch.Tensor] = ()) -> None:
        """weights: what each stage of the rank trains, by its number. shared: those that stages of other ranks have
        too."""
        self._stages: dict[torch.Tensor, list[int]] = {}
        """That each weight belongs to."""
        self._sums: dict[torch.Tensor, dict[int, torch.Tensor | None]] = {weight: {} for weight in shared}
        """Of the shared ones, by stage."""
        self._before: dict[torch.Tensor, torch.Tensor | None] = {}
        self._running: set[int] = set()
        """Stages whose backward is under way."""
        for stage, own in sorted(weights.items()):
            for weight in own:
                self.include(stage, weight)

    def include(self, stage: int, weight: torch.Tensor) -> None:
        """From now on it belongs to this stage too: no backward of this step has given it a gradient from there yet."""
        stages = self._stages.setdefault(weight, [])
        if stage in stages:
            return
        if not stages:
            self._before[weight] = weight.grad
            weight.grad = None
        elif weight not in self._sums:
            if self._running:
                raise ConfigError(
                    f"pipeline: a weight of shape {list(weight.shape)} is shared by the stages {stages[0]} and "
                    f"{stage}, and was first used by the second one after backwards had begun; use it in each "
                    "micro-batch"
                )
            self._sums[weight] = {stages[0]: weight.grad}
            weight.grad = None
        stages.append(stage)

    @contextlib.contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Inside, what a shared weight has as its gradient is the sum of this stage. While the backward of a stage
        waits, what was put off for another one, or for the same, may be added up."""
        if stage in self._running:
            yield
            return
        shared = [(weight, sums) for weight, sums in self._sums.items() if stage in self._stages.get(weight, ())]
        outer = [weight.grad for weight, _ in shared]
        for weight, sums in shared:
            weight.grad = sums.pop(stage, None)
        self._running.add(stage)
        try:
            yield
        finally:
            self._running.discard(stage)
            for (weight, sums), gradient in zip(shared, outer, strict=True):
                sums[stage] = weight.grad
                weight.grad = gradient

    def sums_of(self, weight: torch.Tensor) -> dict[int, torch.Tensor | None]:
        """Of a shared weight, what each stage has added up. Those of other ranks are to be put there."""
        return self._sums[weight]

    def give(self, divide_by: float) -> None:
        """Make the sums the gradients of the weights."""
        for weight, sums in self._sums.items():
            for _, gradient in sorted(sums.items()):
                if gradient is not None:
                    weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self._sums.clear()
        for weight, before in self._before.items():
            if weight.grad is None:
                weight.grad = before
                continue
            if divide_by != 1:
                weight.grad.div_(divide_by)
            if before is not None:
                weight.grad = before.add_(weight.grad)

    def bytes_before(self) -> int:
        """Of the gradients that were there when the step began."""
        return unique_bytes(gradient for gradient in self._before.values() if gradient is not None)

    def take_back(self) -> None:
        """After a step that failed: the gradients are those from before it."""
        for weight, before in self._before.items():
            weight.grad = before


# -- their norm --------------------------------------------------------------------------------------------------------


def gradient_norm(
    weights: Mapping[int, Sequence[torch.Tensor]], elsewhere: Collection[torch.Tensor], gather: Callable[[Any], Any]
) -> torch.Tensor:
    """weights: of each stage of the rank. elsewhere: those that another place counts. gather: gives what each rank
    brings."""
    seen = set(elsewhere)
    own: dict[int, list[tuple[torch.dtype, float]]] = {}
    for stage, each in sorted(weights.items()):
        own[stage] = []
        for weight in each:
            if weight.grad is not None and weight not in seen:
                norm = whole_of(torch.nn.utils.get_total_norm([weight.grad]))
                own[stage].append((norm.dtype, float(norm)))
            seen.add(weight)
    stages = {stage: norms for rank in gather(own) for stage, norms in rank.items()}
    norms = [torch.tensor(norm, dtype=dtype) for _, every in sorted(stages.items()) for dtype, norm in every]
    device = next((weight.device for each in weights.values() for weight in each), torch.device("cpu"))
    return torch.nn.utils.get_total_norm(norms).to(device)
