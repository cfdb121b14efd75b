"""Messages between two ranks, in the order that the schedule proves.

What: in `begin` all ranks hear of which shape each micro-batch of the step is. `send` begins and returns. `ask`
allocates what will come and begins to take it in. `read` waits for it. `finish` waits until all that was sent has gone.
Shapes: the first message of each stage for each shape of a micro-batch has a head that says what follows; both ends
remember it, so later ones have none, until something has changed on any rank (weights were frozen, autocast is on). A
stage that gives other tensors for the same shape of its batch is refused.
Why a thread that sends: gloo says that a transfer is over only after somebody waited for it, and until then it holds
what was sent.
Heads travel on a gloo group of their own. Tensors on the CPU travel there too; those on a device travel on two groups
of the job's backend, one for each direction: two ranks that send to each other at once on one communicator of NCCL,
which does one thing at a time, would each wait for the other's receive.

A wait ends when the message is there, or when a connection closes. `give_up` closes the connections of this rank, so
that the waits of all others end, one after the other; each then finds the note of the rank that failed first.

Cost: one small collective in each step; a thread for each peer, asleep while nothing is sent. Not covered: a message
that is taken back. Devices have been seen with one rank only.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowtide.errors import ConfigError, PipelineError
from lowtide.pipeline.agree import POLL_SECONDS, FailureNote, refuse_difference
from lowtide.pipeline.live_chunks import HEAD_BYTES
from lowtide.pipeline.schedule import Kind, Result, receive_of, send_of
from lowtide.tensors.ranks import gather

Tensors = tuple[torch.Tensor | None, ...]
_PATIENCE_SECONDS = 10.0
"""With a thread that should end at once: a rank that fails must end, whatever holds its threads."""


@dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor that is to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...]
    """Of its dimensions in memory, slowest first: a product of transposed tensors has other bits."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Blank:
        stride = tensor.stride()
        order = tuple(sorted(range(tensor.ndim), key=lambda dim: -stride[dim]))
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, order)

    def empty(self, device: torch.device) -> torch.Tensor:
        stride, step = [0] * len(self.shape), 1
        for dim in reversed(self.order):
            stride[dim] = step
            step *= max(1, self.shape[dim])
        return torch.empty_strided(self.shape, stride, dtype=self.dtype, device=device)


_Blanks = tuple[_Blank | None, ...]
"""None: there is no tensor, as with the gradient of an output that nobody used."""
_Sent = tuple[Result | None, list[Any], Sequence[torch.Tensor]]
"""On its way: the works, and the tensors that they need."""


class GroupTransport:
    """Over a process group. To be made by all its ranks at once. Ranks are those of the schedule."""

    def __init__(self, group: Any, device: torch.device, note: FailureNote) -> None:
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank = dist.get_rank(group)
        self._device = device
        self.note = note
        self._heads = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._ways = [self._heads, self._heads]
        """Of tensors: to higher ranks, to lower ranks."""
        if device.type != "cpu":
            self._ways = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(2)]
        self._numbers: dict[Hashable, int] = {}
        """Of the shapes of micro-batches that were seen."""
        self._state: Any = None
        """Of stages, in the last step."""
        self._shapes: list[int] = []
        """The number of the shape of each micro-batch of this step."""
        self._known: dict[tuple[Kind, int, int], _Blanks] = {}
        """By the kind and stage of a result and the number of a shape."""
        self._asked: dict[Result, tuple[int, Tensors, Sequence[Any]]] = {}
        """What is expected: from which rank, into which tensors, and the works that bring it."""
        self._queues: dict[int, queue.SimpleQueue[_Sent | None]] = {}
        self._threads: list[threading.Thread] = []
        self._sending = threading.Condition()
        self._on_the_way: set[Result] = set()
        self._send_error: tuple[int, BaseException] | None = None

    def begin(self, shapes: Sequence[Hashable] | None, *, state: Any, divide_by: float) -> None:
        """A step begins. shapes: of each micro-batch, on the first rank. state: where it is another one than in the
        last step, stages of this rank may pass on other tensors for the same shapes. Raises ConfigError where ranks
        divide by different numbers."""
        has_changed, self._state = state != self._state, state
        said = self.meet((shapes, has_changed, {"values of divide_by": divide_by}), "was beginning a step")
        refuse_difference("pipeline", [facts for *_, facts in said])
        if any(has_changed for _, has_changed, _ in said):
            self._known.clear()
        every = next(shapes for shapes, *_ in said if shapes is not None)
        self._shapes = [self._numbers.setdefault(shape, len(self._numbers)) for shape in every]

    def meet(self, value: Any, doing: str) -> list[Any]:
        """What each rank brings."""
        try:
            return gather(value, self._heads)
        except RuntimeError as error:
            raise self._lost(None, doing, error) from error

    def send(self, result: Result, tensors: Sequence[torch.Tensor | None], *, to: int) -> None:
        """Begin, and return. The tensors are let go of when they have gone."""
        self._raise_lost_send()
        blanks = tuple(None if tensor is None else _Blank.of(tensor) for tensor in tensors)
        key = self._key_of(result)
        doing = f"was sending {send_of(result)} to it"
        known = None if key is None else self._known.get(key)
        if known is None:
            self._post(None, [_head_of(result, blanks)], self._heads, to, doing)
            if key is not None:
                self._known[key] = blanks
        elif known != blanks:
            raise ConfigError(
                f"pipeline: at {send_of(result)} stage {result.stage} passes on {_told(blanks)}, and for another "
                f"micro-batch of the same shape it was {_told(known)}; what a stage passes on must follow from the "
                "shapes of its batch"
            )
        with self._sending:
            self._on_the_way.add(result)
        there = [
            tensor.detach().permute(blank.order).contiguous()
            for tensor, blank in zip(tensors, blanks, strict=True)
            if tensor is not None and blank is not None and tensor.numel()
        ]
        self._post(result, there, self._ways[int(to < self.rank)], to, doing)

    def ask(self, result: Result, *, source: int) -> None:
        """Expect a result. Those of one source come in the order in which they were asked for."""
        key = self._key_of(result)
        blanks = None if key is None else self._known.get(key)
        if blanks is None:
            blanks = self._read_head(result, source)
            if key is not None:
                self._known[key] = blanks
        way = self._ways[int(source > self.rank)]
        tensors: list[torch.Tensor | None] = []
        works: list[Any] = []
        for blank in blanks:
            if blank is None:
                tensors.append(None)
                continue
            tensor = blank.empty(self._device)
            if tensor.numel():
                try:
                    works.append(dist.irecv(_bytes_of(tensor.permute(blank.order)), group=way, group_src=source))
                except RuntimeError as error:
                    raise self._lost(source, f"waited for {send_of(result)} of it", error) from error
            tensors.append(tensor.requires_grad_(blank.requires_grad))
        self._asked[result] = source, tuple(tensors), works

    def read(self, result: Result) -> Tensors:
        """What came, on this rank's device, as leaves that require grad where the sender's tensors did."""
        source, tensors, works = self._asked.pop(result)
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(source, f"waited for {send_of(result)} of it", error) from error
        return tensors

    def let_go_of(self, results: Collection[Result]) -> None:
        """Wait until these are held no more. Their readers have them, so only a thread has to get its turn."""
        self._until(lambda: self._on_the_way.isdisjoint(results))

    def finish(self) -> None:
        """Wait until everything that was sent has gone."""
        self._until(lambda: not self._on_the_way)
        self._shapes = []

    def _until(self, is_gone: Callable[[], bool]) -> None:
        with self._sending:
            while not is_gone() and self._send_error is None:
                if not self._sending.wait(POLL_SECONDS):
                    self._raise_noted()
        self._raise_lost_send()

    def give_up(self) -> None:
        """After a failure: end the waits of all ranks. Nothing can be sent any more."""
        # A wait that times out closes all connections of a gloo group. No call does so: seen with torch 2.13.
        # On a connection that another rank has closed already nothing times out, so each is tried.
        for rank in range(dist.get_world_size(self._heads)):
            if rank != self.rank:
                with contextlib.suppress(RuntimeError):
                    work: Any = dist.irecv(torch.empty(1), group=self._heads, group_src=rank, tag=1)
                    work.wait(timedelta(milliseconds=1))
        self.close()

    def close(self) -> None:
        """End the threads. Before `give_up` only between two steps."""
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join(_PATIENCE_SECONDS)
        self._queues.clear()
        self._threads.clear()
        self._asked.clear()

    # -- what follows --------------------------------------------------------------------------------------------------

    def _key_of(self, result: Result) -> tuple[Kind, int, int] | None:
        """Under which it is known what follows; None outside of steps, and for sums of weight gradients."""
        if result.kind is Kind.BACKWARD_WEIGHT or not self._shapes:
            return None
        return result.kind, result.stage, self._shapes[result.micro_batch]

    def _read_head(self, expected: Result, source: int) -> _Blanks:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        self._take_in(head, source, f"waited for {send_of(expected)} of it")
        wanted = f"rank {self.rank} stands at {receive_of(expected)}"
        try:
            (kind, *place), blanks = json.loads(head.numpy().tobytes())
        except ValueError:
            raise PipelineError(f"pipeline: {wanted}, and from rank {source} came no head of a message") from None
        result = Result(Kind(kind), *place)
        if result != expected:
            raise PipelineError(f"pipeline: {wanted}, and rank {source} sent {send_of(result)}")
        return tuple(
            None if each is None else _Blank(tuple(each[0]), getattr(torch, each[1]), each[2], tuple(each[3]))
            for each in blanks
        )

    def _take_in(self, words: torch.Tensor, source: int, doing: str) -> None:
        try:
            dist.recv(words, group=self._heads, group_src=source)
        except RuntimeError as error:
            raise self._lost(source, doing, error) from error

    # -- threads that send ---------------------------------------------------------------------------------------------

    def _post(self, result: Result | None, tensors: Sequence[torch.Tensor], way: Any, to: int, doing: str) -> None:
        try:
            works = [dist.isend(_bytes_of(tensor), group=way, group_dst=to) for tensor in tensors]
        except RuntimeError as error:
            raise self._lost(to, doing, error) from error
        if to not in self._queues:
            self._queues[to] = queue.SimpleQueue()
            name = f"lowtide-pipeline-let-go-{to}"
            self._threads.append(threading.Thread(target=self._let_go, args=(to,), name=name, daemon=True))
            self._threads[-1].start()
        self._queues[to].put((result, works, tensors))

    def _let_go(self, to: int) -> None:
        waiting = self._queues[to]
        while (sent := waiting.get()) is not None:
            result, works, tensors = sent
            error: BaseException | None = None
            try:
                while works:
                    _wait_on_host(works.pop(0), self._device)  # nothing of this thread holds it any longer
            except BaseException as raised:
                error = raised
            del sent, works, tensors
            with self._sending:
                if result is not None:
                    self._on_the_way.discard(result)
                if error is not None and self._send_error is None:
                    self._send_error = (to, error)
                self._sending.notify_all()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _raise_noted(self) -> None:
        text = self.note.read()
        if text is not None:
            raise PipelineError(f"pipeline: {text}")

    def _raise_lost_send(self) -> None:
        if self._send_error is not None:
            to, error = self._send_error
            raise self._lost(to, "was sending to it", error) from error

    def _lost(self, peer: int | None, doing: str, error: BaseException) -> PipelineError:
        """What to say of a connection that broke: the cause that somebody noted, else that the peer is gone."""
        who = "another rank" if peer is None else f"rank {peer}"
        noted = self.note.read()
        if noted is None:
            own = f"{who} ended without a word; rank {self.rank} {doing} ({_first_line(error)})"
            noted = self.note.settle(own)
        return PipelineError(f"pipeline: {noted}")


def _head_of(result: Result, blanks: _Blanks) -> torch.Tensor:
    """So many bytes, whatever they say. Raises ConfigError for what they cannot say."""
    every = [
        None if each is None else [each.shape, _name(each.dtype), each.requires_grad, each.order] for each in blanks
    ]
    text = json.dumps([result, every]).encode()
    if len(text) > HEAD_BYTES:
        raise ConfigError(
            f"pipeline: stage {result.stage} passes on {len(blanks)} tensors, too many for the {HEAD_BYTES} bytes that "
            "say what follows. Pass on fewer, for instance stacked"
        )
    return torch.frombuffer(bytearray(text.ljust(HEAD_BYTES)), dtype=torch.uint8)


def _told(blanks: _Blanks | None) -> str:
    words = {True: " with a graph", False: ""}
    every = [
        "nothing" if each is None else f"{_name(each.dtype)}{list(each.shape)}{words[each.requires_grad]}"
        for each in blanks or ()
    ]
    return ", ".join(every) or "nothing"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory: backends know few dtypes."""
    return tensor.reshape(-1).view(torch.uint8)


def _wait_on_host(work: Any, device: torch.device) -> None:
    """Until the transfer is over, so that its memory can be given back. On a device `wait` holds only a stream up."""
    if device.type == "cpu":
        work.wait()
        return
    while not work.is_completed():
        time.sleep(0.0005)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
