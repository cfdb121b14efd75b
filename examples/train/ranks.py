"""The processes of a job, as one of them sees it: how they stop and end together, and what they share.

What: `Ranks` joins the process group of `torchrun`, or is alone. A rank that fails writes so in the job's store and
says why; every other rank has a thread that looks there, and ends its process even while the main thread waits in a
collective. `StopRequest` turns a first SIGTERM or SIGINT into a note that the loop reads between two steps.
`Layout` sets the ranks up in a grid: `stage` of a pipeline, `replica`, `text`, and `product`, the ranks that share each
product of a layer and read the same text. Ranks that differ in the last three have the same layers; experts are dealt
to those that differ in the last two. `parts` says which parameters are dealt, and over which dimensions; over the
others `average_gradients` sums their gradients.
Cost: a small all-reduce on the CPU per step, a look into the store every 0.2 s; a collective per parameter and step,
but where DDP and FSDP2 exchange gradients.
Not covered: a rank that dies without a word (SIGKILL, power). gloo notices and the survivors say so; for other
backends the launcher must end the job, and torchrun does.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lowtide.config.run import RunConfig
from lowtide.errors import ConfigError, PipelineError
from lowtide.pipeline.agree import FailureNote
from lowtide.pipeline.experts import find_experts, split_experts
from lowtide.tensors.fsdp import local_part
from lowtide.tensors.ranks import gather

_FAILED = "lowtide: rank"
_POLL_SECONDS = 0.2
_LINGER_SECONDS = 1.0
"""How long a failed rank stays, so that the others read its note before the store may vanish with it."""
_VICTIM_SECONDS = 3.0
"""How long a rank whose pipeline broke waits for the rank that broke it, which may be gone."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_LAYERS = ("replica", "text", "product")
_DIMENSIONS = ("stage", *SAME_LAYERS)
EXPERTS = ("text", "product")
PRODUCTS = ("product",)


class TrainingError(RuntimeError):
    """The run cannot go on (not the user's settings, not our bug). One message; exit status 1."""


class StopRequest:
    """While entered, notes the first of `SIGNALS` in `asked`, so that none leaves half a step behind. A second Ctrl-C
    ends the process at once; a second SIGTERM changes nothing, for schedulers send several."""

    asked: signal.Signals | None = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()  # others may not have handlers
        self._previous = {number: signal.signal(number, self._note) for number in (SIGNALS if is_main else ())}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.asked is signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self.asked is None:
            self.asked = signal.Signals(number)
            text = f"lowtide: {self.asked.name}: finishing this step, then saving (Ctrl-C twice: end at once)\n"
            os.write(2, text.encode())  # print is not safe to call inside a signal handler


class Ranks:
    """One process of the job. Alone (`num_ranks == 1`) nothing here costs anything."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Joins the group that the environment describes, to train on `device`; without a device, alone."""
        self.rank, self.num_ranks = 0, 1
        self.step = 0
        """The step this rank is in, for its last words; 0 while it starts."""
        self._note: FailureNote | None = None
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="lowtide-failure-watch", daemon=True)
        if device is None or os.environ.get("WORLD_SIZE", "1") == "1":
            return
        backend = dist.get_default_backend_for_device(device)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
            backend = f"cpu:gloo,{device.type}:{backend}"  # numbers are gathered on the CPU, gradients on the device
        dist.init_process_group(backend)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._note = FailureNote("lowtide/train", self.num_ranks)
        self._watch.start()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.num_ranks == 1

    def say(self, text: str) -> None:
        """A line on stderr, of the first rank."""
        if self.is_first:
            print(text, file=sys.stderr, flush=True)

    def barrier(self) -> None:
        """Waits for all ranks."""
        gather(None, None)

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

    def fail(self, error: Exception) -> NoReturn:
        """The bad end: alone, the error goes on its way; in a group, says it once and ends every rank."""
        if self._note is None:
            raise error
        if isinstance(error, PipelineError):
            time.sleep(_VICTIM_SECONDS)  # the rank that failed says why itself, and the watch ends this one
        self._stop_looking()
        is_plain = isinstance(error, ConfigError | TrainingError | PipelineError)
        place = f"at step {self.step}" if self.step else "while it started"
        text = f"{_FAILED} {self.rank} failed {place}: {'' if is_plain else f'{type(error).__name__}: '}{error}"
        if self._note.settle(text) == text:
            if not is_plain:
                traceback.print_exception(error)
            print(text, file=sys.stderr, flush=True)
            time.sleep(_LINGER_SECONDS)
        _end(2 if isinstance(error, ConfigError) else 1)

    def _stop_looking(self) -> None:
        self._is_over.set()
        self._watch.join()

    def _look(self) -> None:
        """Ends this process when another rank notes a failure."""
        assert self._note is not None
        while not self._is_over.wait(_POLL_SECONDS):
            if (said := self._note.read()) is not None:
                if not said.startswith(_FAILED):
                    print(f"{_FAILED} {self.rank} ends: {said}", file=sys.stderr)
                _end(1)


def _end(status: int) -> NoReturn:
    """Not sys.exit: threads of the process group may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Layout:
    """The place of one rank. Raises `ConfigError`, on all ranks alike, for a number of ranks that does not fit."""

    def __init__(self, run: RunConfig, ranks: Ranks) -> None:
        sizes = _sizes(run, ranks)
        self.sizes = dict(zip(_DIMENSIONS, sizes, strict=True))
        self._grid = torch.arange(ranks.num_ranks).view(sizes)
        self.stage, replica, text, self.product = (self._grid == ranks.rank).nonzero()[0].tolist()
        self.text, self.num_texts = replica * self.sizes["text"] + text, self.sizes["replica"] * self.sizes["text"]
        """Which of how many readers of the text this rank is: ranks of one pipeline, and ranks that share products, are
        one."""
        self.share = text * self.sizes["product"] + self.product
        """Which share of the experts this rank has."""
        self.parts: dict[nn.Parameter, tuple[str, ...]] = {}
        """The dimensions in which ranks have different parts of a parameter."""
        self.expert_names: tuple[str, ...] = ()
        """How the names of the parameters end that are experts of this rank."""
        self._groups: dict[tuple[str, ...], Any] = {}
        self.pipeline: Any = None
        """The ranks of this rank's pipeline; None: all of the job are."""
        if run.pipeline is None and run.train.expert_parallel == 1:
            return
        if self.num_ranks(SAME_LAYERS) > 1:
            self.pipeline = self._group_of(("stage",))
        for key in map(self._long, (SAME_LAYERS, EXPERTS, PRODUCTS, ("replica", "text"), ("replica",))):
            if key and key not in self._groups:
                self._groups[key] = self._group_of(key)

    def __str__(self) -> str:
        sizes = ", ".join(f"{size} in {name}" for name, size in self.sizes.items() if size > 1)
        return f" on {self._grid.numel()} ranks ({sizes})" if sizes else ""

    def _group_of(self, dimensions: Sequence[str]) -> Any:
        places = self._grid.movedim([_DIMENSIONS.index(name) for name in dimensions], list(range(-len(dimensions), 0)))
        return dist.new_subgroups_by_enumeration(places.reshape(-1, self.num_ranks(dimensions)).tolist())[0]

    def _long(self, dimensions: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in dimensions if self.sizes[name] > 1)

    def num_ranks(self, dimensions: Iterable[str]) -> int:
        """How many ranks differ in these dimensions only."""
        return math.prod(self.sizes[name] for name in dimensions)

    def group(self, dimensions: Iterable[str]) -> Any:
        """The process group of the ranks that differ from this one in these dimensions only; None without another."""
        return self._groups.get(self._long(dimensions))

    def split_experts(self, run: RunConfig, model: nn.Module, own: nn.Module) -> None:
        """Leave this rank its share of the experts of `own`, the part that it has of `model`. Collective. Raises
        `ConfigError` for a model without experts."""
        try:
            find_experts(model)
            if not any(name.endswith(".experts") for name, _ in own.named_modules()):
                return
            split = split_experts(own, group=self.group(EXPERTS))
        except ConfigError as error:
            run.fail("train.expert_parallel", f"'train.expert_parallel' is {run.train.expert_parallel}, but {error}")
        self.parts |= dict.fromkeys(split.own_parameters(), EXPERTS)
        self.expert_names = split.parameter_names

    def _alike(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """The dimensions in which ranks have the same elements of a parameter."""
        return tuple(name for name in SAME_LAYERS if name not in self.parts.get(parameter, ()))

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make every gradient the mean over all texts, once a step. Those of experts have the rows of all ranks that
        share them already. Collective."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        together = self.group(SAME_LAYERS)
        if together is None or not trained:
            return
        # A gradient that no rank has stays absent, and is not decayed; else absent ones are zeros.
        has_gradient = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=together)
        for parameter, is_there in zip(trained, has_gradient.tolist(), strict=True):
            if not is_there:
                continue
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if (group := self.group(self._alike(parameter))) is not None:
                dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(self.num_texts)

    def squares(self, parameters: Iterable[nn.Parameter]) -> list[float]:
        """Of the norms of the gradients, divided by the number of ranks that have the same one: their sum over all
        ranks is the square of the norm of the whole model's gradients."""
        norms, shares = [], []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            num_holders: float = self.num_ranks(self._alike(parameter))
            if isinstance(parameter.grad, DTensor):
                sizes = zip(parameter.grad.device_mesh.shape, parameter.grad.placements, strict=True)
                num_holders /= math.prod(1 if placement.is_replicate() else size for size, placement in sizes)
            norms.append(torch.linalg.vector_norm(local_part(parameter.grad), dtype=torch.float32))
            shares.append(num_holders)
        # One wait for the device, not one for each parameter.
        found = torch.stack(norms).tolist() if norms else []
        return [norm**2 / num_holders for norm, num_holders in zip(found, shares, strict=True)]


def _sizes(run: RunConfig, ranks: Ranks) -> tuple[int, ...]:
    """Of the four dimensions. One that the run file leaves free takes the ranks that there are."""
    experts, tensor, parallel = run.train.expert_parallel, run.train.tensor_parallel, run.parallel
    sizes: tuple[int | None, ...] = (1, None, experts, 1)
    written: dict[str, Any] = {}
    if run.pipeline is not None:
        for key, number in {"data.sequence_length": run.data.sequence_length, "train.expert_parallel": experts}.items():
            if number > 1 and number % tensor:
                each = f"'train.tensor_parallel' is {tensor}, and '{key}' {number} does not divide by it"
                run.fail("train.tensor_parallel", f"{each}; each rank has a part of the tokens, so choose a divisor")
        sizes = (run.pipeline.stages, 1, max(experts, tensor) // tensor, tensor)
        written = {"pipeline.stages": run.pipeline.stages}
    elif parallel is not None and run.is_sharded:
        replicas = parallel.replicas or 1
        sizes = (1, replicas, parallel.data and parallel.data // replicas, parallel.tensor or 1)
        written = {f"parallel.{key}": getattr(parallel, key) for key in ("shard", "data", "replicas", "tensor")}
    of_train = {"train.expert_parallel": experts, "train.tensor_parallel": tensor}
    written |= {key: number for key, number in of_train.items() if number > 1}
    fixed = math.prod(size for size in sizes if size is not None)
    free = max(2 if run.is_sharded and fixed == 1 else 1, ranks.num_ranks // fixed)
    found = tuple(free if size is None else size for size in sizes)
    wanted = math.prod(found)
    if wanted == ranks.num_ranks and not (run.is_sharded and ranks.is_alone):
        return found
    (key, first), *others = ((name, value) for name, value in written.items() if value is not None)
    beside = "".join(f" and '{other}' {number}" for other, number in others)
    there = "is 1 rank" if ranks.is_alone else f"are {ranks.num_ranks} ranks"
    or_more = ", or a multiple of that" if None in sizes else ""
    start = f"start it with torchrun --nproc-per-node {wanted}{or_more}"
    run.fail(key, f"'{key}' is {first}{beside}, but there {there}; {start}")
