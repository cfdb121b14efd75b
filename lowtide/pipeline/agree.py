"""What ranks compare before any of them waits for another, and the one text that says which of them failed first.

What: each rank brings facts (a setting, a version, a digest) and what is wrong on it, if anything. A mistake of one, or
a fact in which two ranks differ, is an error of all, with one text that names the fact and both values.
`same_on_all` does so for any training on several ranks; a pipeline does so when it is made and before its first step.
`Together.all_do` does something on all ranks, and what one of them raises ends all.
Ranks also say where they are: one that plans for a budget does not take what another says before a step for an answer.
The rank that fails writes a `FailureNote` into the store of the job; the others find it while they wait, and end with
it. What is written first stays, so that all ranks name the same cause, and none names a rank that ended only because
another had.
Cost: one small collective each. Not covered: shapes that stages pass on, which the first forward finds; a rank that
never comes. A rank that is killed writes nothing; one that waited for it sees its connection close, and writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import BudgetError, ConfigError, PipelineError
from lowtide.pipeline.clock import with_transfers
from lowtide.pipeline.gradients import Place, Tie, refuse_look_alikes, sample_of
from lowtide.pipeline.live_chunks import is_in_order
from lowtide.pipeline.schedule import Schedule
from lowtide.pipeline.verify import verify
from lowtide.tensors.fsdp import is_fsdp, is_sharded
from lowtide.tensors.private import default_store, has_comm_hook
from lowtide.tensors.ranks import gather

Facts = Mapping[str, object]
"""By name, as a message says it. Plain, so that it can travel."""
_ABSENT = "none"
_MET = "lowtide: at"
"""Begins what a rank brings to a place. What ranks gather in other calls begins otherwise."""
_Made = TypeVar("_Made")
_LINGER_SECONDS = 3.0
"""How long a failed rank stays for the others to read its note: the store may live in its process."""
_POLL_SECONDS = 0.05


def agree(schedule: Schedule, mistake: str | None, facts: Facts, weights: Mapping[Place, Any], group: Any) -> str:
    """Of ranks that make a pipeline. `weights`: of its stages, as `described`, where nobody knows whether they are
    shared. Raises ConfigError on all ranks together. Gives a name that no other pipeline of the job has."""
    facts = {"schedules": _digest_of(schedule), "versions of torch": torch.__version__, **facts}
    said = meet("Pipeline(...)", (mistake, facts, weights, uuid.uuid4().hex), group)
    for rank, (each, *_) in enumerate(said):
        if each is not None:
            raise ConfigError(each if len(said) == 1 else f"{each} (rank {rank})")
    refuse_difference("pipeline", [facts for _, facts, *_ in said])
    refuse_look_alikes([weights for *_, weights, _ in said])
    name: str = said[0][-1]
    return name


def _digest_of(schedule: Schedule) -> str:
    """The same for schedules with the same rows, on every machine."""
    rows = ["\n".join(map(str, row)) for row in schedule.actions]
    text = "\n\n".join([str(schedule.rank_of_stage), str(schedule.num_micro_batches), *rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def meet(place: str, value: Any, group: Any) -> list[Any]:
    """What every rank brings to this place. Raises ConfigError on all ranks where one of them is at another."""
    said = gather((_MET, place, value), group)
    places = [each[1] if isinstance(each, tuple) and each[:1] == (_MET,) else "another call" for each in said]
    for rank, other in enumerate(places):
        if other != places[0]:
            raise ConfigError(
                f"pipeline: rank 0 is at {places[0]}, and rank {rank} at {other}; all ranks must make the same calls "
                "(a budget is for all ranks or for none)"
            )
    return [value for *_, value in said]


@dataclass(frozen=True, slots=True)
class Together:
    """Ranks that make one call at the same time."""

    place: str
    """The call."""
    rank: int
    group: Any

    def all_do(self, what: str, do: Callable[[], _Made]) -> _Made:
        """What `do` gives, once it has given something on all ranks. What it raises on one ends all of them."""
        error: Exception | None = None
        made: list[_Made] = []
        try:
            made.append(do())
        except Exception as raised:
            error = raised
        told = None if error is None else {"rank": self.rank, **_told(error)}
        failures = [each for each in meet(self.place, told, self.group) if each is not None]
        if not failures:
            return made[0]
        # The rank that needs most says what would be enough for all.
        worst = max(failures, key=lambda each: (not each["is_echo"], each["floor_bytes"] or 0))
        rank, text = worst["rank"], worst["text"]
        if worst["floor_bytes"] is not None:
            raise BudgetError(f"pipeline: rank {rank}: {text}", floor_bytes=worst["floor_bytes"]) from error
        if error is not None:
            raise error
        if worst["is_mistake"]:
            raise ConfigError(f"{text} (rank {rank})")
        raise PipelineError(f"pipeline: rank {rank} failed at {what}: {worst['kind']}: {text}")


def _told(error: Exception) -> dict[str, Any]:
    """What one rank tells the others of its failure. Plain, so that it can travel."""
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "is_mistake": isinstance(error, ConfigError),
        "is_echo": isinstance(error, PipelineError),  # it only heard that another rank has failed
        "floor_bytes": error.floor_bytes if isinstance(error, BudgetError) else None,
    }


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


# -- what one rank checks ----------------------------------------------------------------------------------------------


def checked(schedule: Schedule, num_ranks: int) -> Schedule:
    """The same schedule with transfers, proven."""
    if schedule.num_ranks != num_ranks:
        raise ConfigError(
            f"pipeline: the schedule '{schedule.name}' is for {schedule.num_ranks} ranks, not {num_ranks}"
        )
    verify(schedule, sends_wait=False)
    if not is_in_order(schedule):
        raise ConfigError(
            f"pipeline: a stage of the schedule '{schedule.name}' adds up its weight gradients in another order than "
            "that of the micro-batches, which changes their rounding"
        )
    return schedule if schedule.has_transfers else with_transfers(schedule)


def check_stages(schedule: Schedule, rank: int, stages: Mapping[int, Any], loss: Any) -> None:
    wanted = schedule.stages_of(rank)
    if tuple(sorted(stages)) != wanted:
        words = ", ".join(map(str, sorted(stages))) or "none"
        raise ConfigError(
            f"pipeline: '{schedule.name}' has stages {', '.join(map(str, wanted)) or 'none'} on this rank, and it was "
            f"given {words}"
        )
    for stage, module in stages.items():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"pipeline: stage {stage} is a {type(module).__name__}, not a torch.nn.Module")
    has_end = schedule.num_stages - 1 in wanted
    if has_end and loss is None:
        raise ConfigError(f"pipeline: this rank has the last stage, {schedule.num_stages - 1}, and no loss")
    if not has_end and loss is not None:
        raise ConfigError(
            f"pipeline: this rank has a loss, and not the last stage, {schedule.num_stages - 1}; give the loss to rank "
            f"{schedule.rank_of_stage[-1]}"
        )


def named_weights(stages: Mapping[int, nn.Module], loss: Any, last: int) -> dict[Place, torch.Tensor]:
    """What the stages of a rank train, and its loss, which is part of the last one."""
    found: dict[Place, torch.Tensor] = {}
    for stage, module in sorted(stages.items()):
        found |= {Place(stage, name): weight for name, weight in module.named_parameters()}
        if stage == last and isinstance(loss, nn.Module):
            own = set(module.parameters())
            weights = loss.named_parameters(prefix="loss")
            found |= {Place(stage, name): weight for name, weight in weights if weight not in own}
    return found


def facts_of(
    stages: Iterable[Any], tied: Sequence[Tie] | None, *, takes_turns: bool
) -> tuple[dict[str, object], tuple[Tie, ...] | None]:
    """What the ranks must have in common, and the ties that are known: those given, or of a model that was cut."""
    origins: list[Any] = [getattr(stage, "origin", None) for stage in stages]
    facts: dict[str, object] = {"ways to carry out pairs (run_pair)": "in turns" if takes_turns else "plain"}
    for origin in filter(None, origins):
        facts |= origin[0]
    if tied is None and origins and all(origins):
        tied = origins[-1][1]
    known = None if tied is None else tuple(map(tuple, tied))
    words = "none" if known == () else "; ".join(" = ".join(map(str, tie)) for tie in known or ())
    return facts | {"tied weights": "not known" if known is None else words}, known


def check_parallel(stages: Mapping[int, Any], replicas: Mapping[int, Any], *, takes_turns: bool) -> None:
    """Wrappers that expect one forward and its backward at a time."""
    for stage, replicated in replicas.items():
        if has_comm_hook(replicated):
            raise ConfigError(
                f"pipeline: stage {stage} is in DistributedDataParallel with a communication hook, and a pipeline sums "
                "gradients over the replicas itself, once a step; leave the hook out"
            )
    for stage, module in stages.items():
        for name, each in module.named_modules():
            what = f"stage {stage}" if not name else f"'{name}' of stage {stage}"
            if isinstance(each, nn.parallel.DistributedDataParallel):
                raise ConfigError(
                    f"pipeline: {what} is in DistributedDataParallel, which exchanges the gradients of one micro-batch "
                    "when its backward ends, and here several are in flight; put it around the whole stage"
                )
            if takes_turns and is_fsdp(each):
                raise ConfigError(
                    f"pipeline: {what} is a module of FSDP2, which takes one forward or backward at a time: in a pair "
                    "it would lose gradients; leave run_pair out, or leave the stage unsharded"
                )


# -- which rank failed first -------------------------------------------------------------------------------------------


class FailureNote:
    """Made by all ranks of a pipeline, with the same `place`."""

    def __init__(self, place: str, num_ranks: int) -> None:
        self._store: dist.Store = default_store().clone()  # another thread may wait in that one
        self._place = place
        self._num_ranks = num_ranks

    def read(self) -> str | None:
        """None: nobody has failed, as far as the store says."""
        try:
            if not self._store.check([self._place]):
                return None
            text: str = self._store.get(self._place).decode()
            self._store.add(f"{self._place}/readers", 1)
            return text
        except RuntimeError:
            return "the rank that holds the job's store is gone"

    def settle(self, text: str) -> str:
        """The text that stays: this one if it is the first, so that ranks that notice at once tell the same."""
        try:
            kept: str = self._store.compare_set(self._place, "", text).decode()
            if kept != text:
                self._store.add(f"{self._place}/readers", 1)
            return kept
        except RuntimeError:
            return text

    def linger(self) -> None:
        """Stay until all others have read it, or for a moment. For the rank that wrote it."""
        end = time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and self._store.add(f"{self._place}/readers", 0) < self._num_ranks - 1:
                time.sleep(_POLL_SECONDS)
