"""A pipeline schedule as data: for each rank, the row of actions that it carries out, in order. No torch.

What: the model is cut into *stages*, numbered in the order of the model; each stage lives on one rank. A batch is cut
into *micro-batches*. An *action* is one piece of work on one stage for one micro-batch; a *chunk* is one stage with one
micro-batch, which is the unit that activations are counted in. A rank that holds several stages holds them either in
rounds (ranks 0 1 0 1) or as a V (ranks 0 1 1 0). In a V the last rank hands the turn over to itself, and rank 0 has
both ends of the model.

Kinds and their names are those of `torch.distributed.pipelining`, so that `3B0` means the same here, in its CSV files
and in its errors.

What flows: the forward of a stage makes its *output*, which the next stage reads; its backward makes the *gradient* of
its input, which the stage before it reads. A full backward (B) makes the gradients of the weights too. Split in two, I
makes the gradient of the input only, and a later W those of the weights.

`to_csv` and `from_csv` write and read torch's CSV files: a line for each rank, a cell for each action, `compute_only`
without transfers and `compute_comms` with them; a pair is `(0F7;7B3)OVERLAP_F_B`.

Not covered: skip connections (a stage reads only its neighbours), collectives and copies inside an action; of a file,
the cells for FSDP (UNSHARD, RESHARD, REDUCE_GRAD), which are left out.
"""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lowtide.errors import ConfigError


class Kind(enum.StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradient of the input, and of the weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the input only. Its activations stay until W has run."""
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    """The output of this stage goes to the rank of the next stage."""
    RECEIVE_FORWARD = "RECV_F"
    """The output of the stage before comes to this one."""
    SEND_BACKWARD = "SEND_B"
    """The gradient of this stage's input goes to the rank of the stage before."""
    RECEIVE_BACKWARD = "RECV_B"
    """The gradient of this stage's output comes from the rank of the next stage."""

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)

    @property
    def is_transfer(self) -> bool:
        return self.is_send or self.is_receive


PAIR = "OVERLAP_F_B"
"""How torch writes a pair."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one rank."""

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    @property
    def makes(self) -> Result | None:
        """What it computes for others; None for weight gradients, which stay where they are."""
        if self.kind is Kind.FORWARD:
            return Result(Kind.FORWARD, self.stage, self.micro_batch)
        if self.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            return Result(Kind.BACKWARD, self.stage, self.micro_batch)
        return None

    @property
    def carries(self) -> Result:
        """What a send or a receive moves."""
        is_forward = self.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
        away = 0 if self.kind.is_send else -1 if is_forward else 1
        return Result(Kind.FORWARD if is_forward else Kind.BACKWARD, self.stage + away, self.micro_batch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a full backward of two independent chunks, carried out together so that each hides the
    communication of the other. It starts when both can start, and what either makes is there when both are done."""

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){PAIR}"


AnyAction = Action | Pair


class Result(NamedTuple):
    """What an action makes and others read: the output of a stage, or the gradient of its input."""

    kind: Kind
    """FORWARD: the output. BACKWARD: the gradient, whether a full backward made it or an input-only one."""
    stage: int
    micro_batch: int

    @property
    def send(self) -> Action:
        """What sends it."""
        kind = Kind.SEND_FORWARD if self.kind is Kind.FORWARD else Kind.SEND_BACKWARD
        return Action(kind, self.stage, self.micro_batch)

    @property
    def receive(self) -> Action:
        """What takes it in, at the stage that reads it."""
        if self.kind is Kind.FORWARD:
            return Action(Kind.RECEIVE_FORWARD, self.stage + 1, self.micro_batch)
        return Action(Kind.RECEIVE_BACKWARD, self.stage - 1, self.micro_batch)


Computed = tuple[AnyAction, tuple[int, ...], tuple[int, ...]]
"""An action that computes, and the numbers of the results that it reads and makes (those of one schedule)."""


@dataclass(frozen=True)
class Schedule:
    """What each rank does in one step. A value of this class may be wrong; `verify` says whether it is."""

    name: str
    num_micro_batches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[AnyAction, ...], ...]
    """Of each rank, in order."""

    @property
    def num_ranks(self) -> int:
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    def parts(self) -> Iterator[tuple[int, int, Action]]:
        """Rank, place in its row, action; pairs as their two actions."""
        for rank, row in enumerate(self.actions):
            for place, every in enumerate(row):
                for action in every.parts:
                    yield rank, place, action

    @cached_property
    def splits_backwards(self) -> bool:
        """Whether any backward is I and W."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for *_, action in self.parts())

    @cached_property
    def has_transfers(self) -> bool:
        """Whether sends and receives are written out. Generators leave them out; `with_transfers` adds them."""
        return any(action.kind.is_transfer for *_, action in self.parts())

    @cached_property
    def computed(self) -> tuple[tuple[Computed, ...], ...]:
        """Of each rank, its actions without sends and receives. A clock plays them for many durations."""
        number: dict[Result, int] = {}

        def numbers(results: Iterable[Result | None]) -> tuple[int, ...]:
            return tuple(number.setdefault(each, len(number)) for each in results if each is not None)

        return tuple(
            tuple(
                (
                    action,
                    numbers(need for part in action.parts for need in self.needs(part)),
                    numbers(part.makes for part in action.parts),
                )
                for action in row
                if not action.parts[0].kind.is_transfer
            )
            for row in self.actions
        )

    @cached_property
    def num_results(self) -> int:
        """That are read or made."""
        each = (result for row in self.computed for _, needs, makes in row for result in (*needs, *makes))
        return 1 + max(each, default=-1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages that live on a rank, in the order of the model."""
        return tuple(stage for stage, home in enumerate(self.rank_of_stage) if home == rank)

    def needs(self, action: Action) -> tuple[Result, ...]:
        """What must be there before a computing action can start."""
        stage, micro_batch = action.stage, action.micro_batch
        if action.kind is Kind.BACKWARD_WEIGHT:
            return (Result(Kind.BACKWARD, stage, micro_batch),)
        if action.kind is Kind.FORWARD:
            return (Result(Kind.FORWARD, stage - 1, micro_batch),) if stage > 0 else ()
        output = Result(Kind.FORWARD, stage, micro_batch)
        if stage == self.num_stages - 1:
            return (output,)
        return (output, Result(Kind.BACKWARD, stage + 1, micro_batch))

    def reader(self, result: Result) -> int | None:
        """The rank of the neighbour that reads a result; None for the loss and for the gradient of the batch."""
        stage = result.stage + (1 if result.kind is Kind.FORWARD else -1)
        return self.rank_of_stage[stage] if 0 <= stage < self.num_stages else None


def in_rounds(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage when stages go round: 0 1 2 0 1 2."""
    return tuple(range(num_ranks)) * stages_per_rank


def as_v(num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage when they go down and come back: 0 1 2 2 1 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def layers_of_stages(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """The layers of each stage, equally many in each."""
    if num_layers < 1 or num_layers % num_stages:
        below, above = num_layers // num_stages * num_stages, -(-num_layers // num_stages) * num_stages
        near = f"{below} or {above}" if below > 0 else f"{max(above, num_stages)}"
        raise ConfigError(
            f"pipeline: {num_layers} layers do not split evenly over {num_stages} stages; "
            f"use a model of {near} layers, or a number of stages that divides {num_layers}"
        )
    each = num_layers // num_stages
    return tuple(range(stage * each, (stage + 1) * each) for stage in range(num_stages))


# -- as text of torch -------------------------------------------------------------------------------------------------


_KINDS = "|".join(sorted(Kind, key=len, reverse=True))
_ACTION = re.compile(rf"(\d+)({_KINDS})(\d+)")
_PAIR = re.compile(rf"\(([^;()]*);([^;()]*)\){PAIR}")
_OF_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def to_csv(schedule: Schedule) -> str:
    """Lines end as in torch's files."""
    text = io.StringIO()
    csv.writer(text).writerows(schedule.actions)
    return text.getvalue()


def from_csv(text: str, *, source: str, name: str) -> Schedule:
    """The schedule in this text. `source` is for errors: the file that the text comes from.

    Which rank a stage lives on is read off its forwards. What the text leaves out (a stage without any forward, a
    transfer without its other end) is for `verify` to find.
    """
    rows = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row = []
        for column, cell in enumerate(cells, start=1):
            word = cell.strip()
            if word and not _OF_FSDP.fullmatch(word):
                row.append(_parsed(word, f"{source}: line {line}, cell {column}"))
        rows.append(tuple(row))
    homes = {
        action.stage: rank
        for rank, row in enumerate(rows)
        for every in row
        for action in every.parts
        if action.kind is Kind.FORWARD
    }
    if sorted(homes) != list(range(len(homes))) or not homes:
        missing = next(stage for stage in range(len(homes) + 1) if stage not in homes)
        raise ConfigError(f"{source}: no rank has a forward of stage {missing}")
    most = max(action.micro_batch for row in rows for every in row for action in every.parts)
    return Schedule(name, most + 1, tuple(homes[stage] for stage in range(len(homes))), tuple(rows))


def _parsed(word: str, where: str) -> AnyAction:
    if found := _PAIR.fullmatch(word):
        forward, backward = (_single(part.strip(), where) for part in found.groups())
        return Pair(forward, backward)
    return _single(word, where)


def _single(word: str, where: str) -> Action:
    found = _ACTION.fullmatch(word)
    if not found:
        raise ConfigError(
            f"{where}: '{word}' is no action; one reads [stage][kind][micro-batch] with a kind of "
            f"{', '.join(Kind)}, or (0F7;7B3){PAIR}"
        )
    stage, kind, micro_batch = found.groups()
    return Action(Kind(kind), int(stage), int(micro_batch))
