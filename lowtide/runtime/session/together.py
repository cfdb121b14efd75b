"""Ranks that take a micro-batch back together: none of them waits in a collective for one that ran out of memory.

What: `tide.step(closure, is_joint=True)`, called on all ranks of the job with closures that issue the same collectives.
Before a collective its ranks meet in the store of the process group: it begins when all of them have come. A rank that
ran out of memory does not come. It says so in the store, and whoever waits for others sees it: the meeting is over, and
the closure ends with an error there, too. So each collective that has begun ends, and no rank is left in one. After its
closure each rank meets all others. Then they say whether each can take the micro-batch back, and what each does to need
less; all do the same, since a layer that runs again issues its collectives again.

The job ends with the reason where one of them cannot: sends and receives (the other side may wait for ever), FSDP2,
which is in the middle of its own work, and an error of another kind.

Cost: for each collective two or three messages to the store (80 us each on one machine), and the wait for the slowest
rank, which an accelerator's stream would hide otherwise; 4 us an operator. Not covered: a rank that dies; a closure
that catches the error; collectives that a thread other than autograd's issues; DDP's own, since its reducer does not
begin anew.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import uuid
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from lowtide.runtime.session.consensus import meet
from lowtide.tensors.compiled import CompiledMode
from lowtide.tensors.fsdp import fsdp_modules
from lowtide.tensors.out_of_memory import is_out_of_memory
from lowtide.tensors.private import default_store, ranks_of_group, schema_of
from lowtide.tensors.ranks import gather
from lowtide.tensors.wrappers import is_desugared

_PATIENCE = datetime.timedelta(seconds=300)
"""A rank that computes comes to its next meeting within this time."""
_POLL_SECONDS = 0.0002


class JointStepError(RuntimeError):
    """A rank of the job could not end its micro-batch, so that the others do not either."""

    def __init__(self, message: str, *, is_memory: bool) -> None:
        self.is_memory = is_memory
        """It ran out of memory."""
        super().__init__(message)


def places() -> Iterator[str]:
    """Where in the store the attempts of a job meet, one after the other. All ranks ask for the first at once."""
    name = f"lowtide/step/{gather(uuid.uuid4().hex, None)[0]}"
    for number in itertools.count(1):
        yield f"{name}/{number}"


class Attempt(CompiledMode):
    """One run of the closure on all ranks, which meet before each collective. A context manager around it."""

    def __init__(self, model: nn.Module, place: str) -> None:
        super().__init__()
        self._model = model
        self._store = default_store()
        self._place = place
        self._num_met: dict[str, int] = {}
        """By ranks of a group: collectives so far."""
        self._num_exchanged = 0
        self._has_sent = False
        """It has sent to, or received from, a single rank."""
        self._kinds: dict[int, str] = {}
        """Of operators, by identity: the name of a collective; empty for all others."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raises JointStepError if another rank has failed."""
        super().__exit__(kind, error, trace)
        if error is None:
            self.meet([*range(dist.get_world_size())])
        elif not isinstance(error, JointStepError):
            is_memory = is_out_of_memory(error)
            what = "ran out of memory" if is_memory else "failed"
            first = (str(error).splitlines() or [type(error).__name__])[0]
            self._store.compare_set(
                f"{self._place}/failed", "", f"{int(is_memory)}rank {dist.get_rank()} {what}: {first}"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if types and is_desugared(types):
            return NotImplemented
        name = self._kinds.get(id(func))
        if name is None:
            name = self._kinds[id(func)] = _collective(func)
        if name in ("send", "recv_", "recv_any_source_"):
            self._has_sent = True
        elif name:
            self.meet(ranks_of_group(args))
        return func(*args, **kwargs) if kwargs else func(*args)

    def meet(self, ranks: list[int]) -> None:
        """Wait until all of `ranks` are here. Raises JointStepError if a rank of the job has failed before."""
        group = "-".join(map(str, ranks))
        number = self._num_met[group] = self._num_met.get(group, 0) + 1
        place = f"{self._place}/{group}/{number}"
        has_failed = functools.partial(self._store.check, [f"{self._place}/failed"])
        if not meet(self._store, place, len(ranks), has_failed, poll_seconds=_POLL_SECONDS):
            failed = self._store.get(f"{self._place}/failed").decode()
            raise JointStepError(f"lowtide: {failed[1:]}", is_memory=failed[0] == "1")
        if number > 1 and ranks[0] == dist.get_rank():
            for key in ("count", "decision"):  # all have left the meeting before
                self._store.delete_key(f"{self._place}/{group}/{number - 1}/{key}")

    def exchange(self, value: str) -> list[str]:
        """What every rank says, by rank. Raises JointStepError if one says nothing."""
        self._num_exchanged += 1
        keys = [f"{self._place}/said/{self._num_exchanged}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], value)
        try:
            self._store.wait(keys, _PATIENCE)
        except Exception as error:
            raise JointStepError(
                f"lowtide: a rank ran out of memory, and another one did not come to take the micro-batch back within "
                f"{_PATIENCE.total_seconds():.0f} s: it waits for somebody in a send, a receive or a thread of its "
                "own. End all ranks and lower the budget.",
                is_memory=True,
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def obstacle(self) -> str | None:
        """Why this rank cannot take the micro-batch back, or None."""
        if self._has_sent:
            return "it has sent to or received from a single rank, which may wait for the rest for ever."
        if fsdp_modules(self._model):
            return "the model is sharded by FSDP2, which is in the middle of its own work."
        return None


def _collective(func: Any) -> str:
    """The name of an operator that exchanges something between ranks; empty for all others."""
    try:
        space, _, name = schema_of(func).name.partition("::")
    except AttributeError:  # no operator of torch's own kind
        return ""
    is_one = space in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap"))
    return name if is_one else ""
