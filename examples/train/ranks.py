"""The processes of a job, as one of them sees it: what they agree on, and how they stop and end together.

What: `Ranks` joins the process group that `torchrun` describes in the environment (or is alone), averages numbers over
all ranks, and watches for failures. A rank that fails writes so in the job's store and says why; every other rank has
a thread that looks there five times a second and ends its process, even while the main thread waits in a collective.
Why: without it, one failed rank leaves the others waiting in an all-reduce for half an hour.
`StopRequest` turns the first SIGTERM or SIGINT into a note that the loop reads between two steps, so that no signal
leaves half a step behind. A second Ctrl-C ends the process at once, without saving; a second SIGTERM changes nothing,
because schedulers and launchers send several.
Cost: one small all-reduce on the CPU per step; one look into the store per rank every 0.2 s.
Not covered: a rank that dies without a word (SIGKILL, power). gloo notices and the survivors say so; for other
backends the launcher must end the job, and torchrun does. Only the failing rank prints its message.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import FrameType
from typing import NoReturn, Self

import torch
import torch.distributed as dist

from lowtide.errors import ConfigError, PipelineError

_POLL_SECONDS = 0.2
_LINGER_SECONDS = 1.0
"""How long a failed rank stays, so that the others read its note before the store may vanish with it."""
_VICTIM_SECONDS = 3.0
"""How long a rank whose pipeline broke waits for the rank that broke it, which may be gone."""


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TrainingError(RuntimeError):
    """The run cannot go on (not the user's settings, not our bug). One message; exit status 1."""


class StopRequest:
    """While entered, notes the first of `SIGNALS` in `asked` instead of letting it end the process.

    Signal handlers belong to the main thread; entered from another one, this does nothing.
    """

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked is signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self.asked is None:
            self.asked = signal.Signals(number)
            # os.write, because print is not safe to call inside a signal handler
            os.write(
                2,
                f"lowtide: {self.asked.name}: finishing this step, then saving (Ctrl-C twice: end at once)\n".encode(),
            )


class Ranks:
    """One process of the job. Alone (`num_ranks == 1`) nothing here costs anything."""

    def __init__(self, *, rank: int = 0, num_ranks: int = 1, store: dist.Store | None = None) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.step = 0
        """The step this rank is in, for its last words; 0 while it starts."""
        self._store = store
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="lowtide-failure-watch", daemon=True)
        if store is not None:
            self._watch.start()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    @classmethod
    def join(cls, device: torch.device) -> Ranks:
        """Joins the group that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (set by torchrun)."""
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if num_ranks == 1:
            return cls()
        store, rank, num_ranks = next(dist.rendezvous("env://"))
        backend = dist.get_default_backend_for_device(device)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
            backend = f"cpu:gloo,{device.type}:{backend}"  # numbers are averaged on the CPU, gradients on the device
        dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=num_ranks)
        return cls(rank=rank, num_ranks=num_ranks, store=dist.PrefixStore("lowtide", store.clone()))

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks; every rank gets the same numbers."""
        if self.is_alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def norm(self, parts: Iterable[tuple[torch.Tensor, float]]) -> torch.Tensor:
        """The norm of what all ranks have together, the same on each. `parts`: tensors of this rank, and how many ranks
        hold the same one."""
        squares = [torch.linalg.vector_norm(part, dtype=torch.float64).square() / number for part, number in parts]
        return torch.tensor(self.sum([float(torch.stack(squares).sum()) if squares else 0.0])[0]).sqrt()

    def barrier(self) -> None:
        """Waits for all ranks."""
        if not self.is_alone:
            self.sum([0.0])

    def leave(self) -> None:
        """The end of a run without errors: wait for all ranks, stop the watching thread, leave the process group."""
        if self.is_alone:
            return
        self._stop_looking()
        self.barrier()
        # DDP's reducer holds the group from C++. If that were the last reference, the group's threads would be joined
        # with the interpreter's lock held, and now and then one of them waits for that very lock: a hang.
        gc.collect()
        dist.destroy_process_group()

    def fail(self, error: BaseException) -> NoReturn:
        """The bad end: alone, the error goes on its way; in a group, says it once and ends every rank."""
        is_expected = isinstance(error, ConfigError | TrainingError | PipelineError)
        text = str(error) if is_expected else f"{type(error).__name__}: {error}"
        if self._store is None:
            raise error
        if isinstance(error, PipelineError):
            time.sleep(_VICTIM_SECONDS)  # the rank that failed says why itself, and the watch ends this one
        self._stop_looking()
        if self._is_first_to_fail(self._store):
            if not is_expected:
                traceback.print_exception(error)
            place = f"at step {self.step}" if self.step else "while it started"
            print(f"lowtide: rank {self.rank} failed {place}: {text}", file=sys.stderr, flush=True)
            time.sleep(_LINGER_SECONDS)
        # not sys.exit: threads of the process group may wait for ranks that are gone
        _end(2 if isinstance(error, ConfigError) else 1)

    def _is_first_to_fail(self, store: dist.Store) -> bool:
        """Notes that this rank failed. The message of the first one is the job's message."""
        try:
            store.set_timeout(timedelta(seconds=5))
            return store.add("num_failures", 1) == 1
        except RuntimeError:
            return True  # the store died with its rank; one that fails in good order stays until all have read it

    def _stop_looking(self) -> None:
        self._is_over.set()
        self._watch.join()

    def _look(self) -> None:
        """Ends this process when another rank notes a failure."""
        assert self._store is not None
        while not self._is_over.wait(_POLL_SECONDS):
            try:
                has_failed = self._store.check(["num_failures"])
            except RuntimeError:
                print(f"lowtide: rank {self.rank} lost the rank that holds the job's store; ending", file=sys.stderr)
                _end(1)
            if has_failed:
                _end(1)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
