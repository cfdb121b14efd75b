"""What the ranks of a pipeline compare before any of them waits for another.

What: each rank says what is wrong on it, if anything, and what it goes by: its schedule, its version of torch, the
layout of messages. A mistake of one is an error of all, with one text.
Cost: one small collective when a pipeline is made.
Not covered: shapes that stages pass on (trial.py).
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import ConfigError
from lowtide.pipeline import heads
from lowtide.pipeline.schedule import Schedule
from lowtide.tensors.ranks import gather


@dataclass(frozen=True, slots=True)
class Belief:
    """What one rank brings. Plain, so that it can travel."""

    mistake: str | None
    schedule: str
    torch_version: str
    heads_version: int
    job: str
    """A name that no other pipeline of the job has; the first rank's is taken."""


def belief_of(schedule: Schedule, mistake: str | None) -> Belief:
    return Belief(mistake, digest_of(schedule), torch.__version__, heads.VERSION, uuid.uuid4().hex)


def digest_of(schedule: Schedule) -> str:
    """The same for schedules with the same rows, on every machine."""
    rows = ["\n".join(map(str, row)) for row in schedule.actions]
    text = "\n\n".join([str(schedule.rank_of_stage), str(schedule.num_micro_batches), *rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(belief: Belief, group: Any) -> str:
    """The name of this pipeline, the same on all ranks of `group`. Raises ConfigError on all of them together."""
    beliefs: list[Belief] = gather(belief, group)
    mistake = _first_mistake(beliefs)
    if mistake is not None:
        raise ConfigError(mistake)
    return beliefs[0].job


def _first_mistake(beliefs: Sequence[Belief]) -> str | None:
    for rank, belief in enumerate(beliefs):
        if belief.mistake is not None:
            return belief.mistake if len(beliefs) == 1 else f"{belief.mistake} (rank {rank})"
    for what, values in (
        ("schedules", [belief.schedule for belief in beliefs]),
        ("versions of torch", [belief.torch_version for belief in beliefs]),
        ("versions of messages between ranks", [str(belief.heads_version) for belief in beliefs]),
    ):
        for rank, value in enumerate(values):
            if value != values[0]:
                return f"pipeline: ranks have different {what}: rank 0 has {values[0]}, rank {rank} has {value}"
    return None
