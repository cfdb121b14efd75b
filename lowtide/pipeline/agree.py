"""What ranks compare before any of them waits for another: facts that must be equal, by name.

What: each rank brings facts (a setting, a version, a digest) and what is wrong on it, if anything. A mistake of one, or
a fact in which two ranks differ, is an error of all, with one text that names the fact and both values.
`same_on_all` does so for any training on several ranks; a pipeline does so when it is made and before its first step.
Ranks also say where they are: one that plans for a budget does not take what another says before a step for an answer.
Cost: one small collective each. Not covered: shapes that stages pass on (trial.py); a rank that never comes.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.pipeline.schedule import Schedule
from lowtide.pipeline.tied import elements_of, sample_of
from lowtide.tensors.fsdp import is_sharded
from lowtide.tensors.ranks import gather

Facts = Mapping[str, object]
"""By name, as a message says it. Plain, so that it can travel."""
_ABSENT = "none"
_ROUNDING = 1e-3
"""Two sums of the same numbers in other orders differ by less, relative to the largest element."""


@dataclass(frozen=True, slots=True)
class Belief:
    """What one rank brings when a pipeline is made. Plain, so that it can travel."""

    mistake: str | None
    facts: Facts
    job: str
    """A name that no other pipeline of the job has; the first rank's is taken."""
    weights: Mapping[Any, Any] = field(default_factory=dict)
    """Of its stages, by place, as tied.py describes them."""


@dataclass(frozen=True, slots=True)
class _Said:
    """With where a rank is."""

    place: str
    value: Any


def belief_of(schedule: Schedule, mistake: str | None, facts: Facts, weights: Mapping[Any, Any]) -> Belief:
    every = {
        "schedules": digest_of(schedule),
        "versions of torch": torch.__version__,
        **facts,
    }
    return Belief(mistake, every, uuid.uuid4().hex, weights)


def digest_of(schedule: Schedule) -> str:
    """The same for schedules with the same rows, on every machine."""
    rows = ["\n".join(map(str, row)) for row in schedule.actions]
    text = "\n\n".join([str(schedule.rank_of_stage), str(schedule.num_micro_batches), *rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(belief: Belief, group: Any) -> list[Belief]:
    """Those of all ranks of `group`. Raises ConfigError on all of them together."""
    beliefs: list[Belief] = meet("Pipeline(...)", belief, group)
    for rank, each in enumerate(beliefs):
        if each.mistake is not None:
            raise ConfigError(each.mistake if len(beliefs) == 1 else f"{each.mistake} (rank {rank})")
    refuse_difference("pipeline", [each.facts for each in beliefs])
    return beliefs


def meet(place: str, value: Any, group: Any) -> list[Any]:
    """What every rank brings to this place. Raises ConfigError on all ranks where one of them is at another."""
    said = [
        each if isinstance(each, _Said) else _Said("another call", each) for each in gather(_Said(place, value), group)
    ]
    for rank, each in enumerate(said):
        if each.place != said[0].place:
            raise ConfigError(
                f"pipeline: rank 0 is at {said[0].place}, and rank {rank} at {each.place}; all ranks must make the "
                "same calls (a budget is for all ranks or for none)"
            )
    return [each.value for each in said]


def same_on_all(facts: Facts, *, group: Any = None, what: str = "lowtide") -> None:
    """Compare facts with all ranks of `group`. Collective. Raises ConfigError on all ranks, with the name of the first
    fact in which two differ and both values; `what` begins the text."""
    refuse_difference(what, gather({name: str(value) for name, value in facts.items()}, group))


def refuse_difference(what: str, ranks: Sequence[Facts]) -> None:
    """Raises ConfigError for the first fact in which a rank differs from rank 0."""
    for name in dict.fromkeys(name for facts in ranks for name in facts):
        values = [str(facts.get(name, _ABSENT)) for facts in ranks]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ConfigError(
                    f"{what}: ranks have different {name}: rank 0 has {values[0]}, rank {rank} has {value}"
                )


def facts_of_optimizer(optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Its class, and each number, flag and word of the settings of its groups."""
    if optimizer is None:
        return {}
    facts: dict[str, object] = {"optimizers": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        where = f"optimizer.param_groups[{number}]" if len(optimizer.param_groups) > 1 else "optimizer settings"
        for name, setting in group.items():
            value = setting.item() if isinstance(setting, torch.Tensor) and setting.numel() == 1 else setting
            if name != "params" and (value is None or isinstance(value, bool | int | float | str | tuple)):
                facts[f"{where}: '{name}'"] = value
    return facts


def facts_of_numerics(device: torch.device) -> dict[str, object]:
    """What of torch's settings changes what is computed: autocast, and how products are rounded."""
    is_on = torch.is_autocast_enabled(device.type)
    return {
        "autocast": torch.get_autocast_dtype(device.type) if is_on else "off",
        "default dtypes": torch.get_default_dtype(),
        "precisions of float32 products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def facts_of_model(model: torch.nn.Module) -> dict[str, object]:
    """The parameters of a model that all ranks have whole: shapes, dtypes, whether they are trained, and a digest of
    some elements."""
    facts: dict[str, object] = {}
    for name, weight in model.named_parameters():
        words = [f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}"]
        words += [] if weight.requires_grad else ["frozen"]
        if not is_sharded(weight) and (sample := sample_of(weight)) is not None:
            words.append(f"values {hashlib.sha256(sample).hexdigest()[:8]}")
        facts[f"parameters '{name}'"] = ", ".join(words)
    return facts


def same_values(tensors: Mapping[str, torch.Tensor], *, group: Any, what: str) -> None:
    """Compare some elements of each of these tensors with the other ranks of `group`. Collective. Raises ConfigError on
    all ranks for the first that differs by more than rounding; `what` begins the text, and says what follows."""
    own = {name: elements_of(tensor).double().cpu() for name, tensor in tensors.items()}
    first, *others = gather(own, group)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if not torch.allclose(value, other[name], rtol=0.0, atol=_ROUNDING * float(value.abs().max())):
                raise ConfigError(f"{what}: '{name}' differs between rank 0 and rank {rank} of the ranks that share it")
