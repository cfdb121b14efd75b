"""Messages between two ranks, in the order that the schedule proves.

What: `send` begins and returns. `ask` tells the thread that serves this peer to expect a message; the thread reads its
head, allocates, and takes the tensors in. `read` waits for it. `finish` waits until all that was sent has gone.
Why a head: see heads.py. Why threads: gloo says that a transfer is complete only after somebody waited for it, so heads
cannot be polled, and what was sent could not be let go of before the end of the step.
Heads travel on a gloo group of their own. Tensors on the CPU travel there too; those on a device travel on two groups
of the job's backend, one for each direction: two ranks that send to each other at once on one communicator of NCCL,
which does one thing at a time, would each wait for the other's receive.

A wait ends when the message is there, when a connection closes, or when any rank has noted a failure. `give_up` closes
the connections of this rank, so that the waits of all others end at once.

Cost: one message of 512 bytes beside each result; two threads for each peer, asleep while nothing comes.
Not covered: a message that is taken back. Devices have been seen with one rank only.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lowtide.errors import PipelineError
from lowtide.pipeline import heads
from lowtide.pipeline.failure import POLL_SECONDS, FailureNote
from lowtide.pipeline.schedule import Result, receive_of, send_of
from lowtide.pipeline.step_log import StepLog

Tensors = tuple[torch.Tensor | None, ...]
_PATIENCE_SECONDS = 10.0
"""With a thread that should end at once: a rank that fails must end, whatever holds its threads."""


class Transport(Protocol):
    """What an executor needs of the ranks around it. Ranks are those of the schedule."""

    def begin(self, divide_by: float) -> None:
        """A step begins, in which both ends of each message must divide gradients by the same number."""

    def send(self, result: Result, tensors: Sequence[torch.Tensor | None], *, to: int) -> None:
        """Begin, and return. The tensors are let go of when they have gone."""

    def ask(self, result: Result, *, source: int) -> None:
        """Expect a result. Those of one source come in the order in which they were asked for."""

    def read(self, result: Result) -> Tensors:
        """What came, on this rank's device, as leaves that require grad where the sender's tensors did."""

    def let_go_of(self, results: Collection[Result]) -> None:
        """Wait until these are held no more. Their readers have them, so only a thread has to get its turn."""

    def finish(self) -> None:
        """Wait until everything that was sent has gone."""

    def give_up(self) -> None:
        """After a failure: end the waits of all ranks. Nothing can be sent any more."""


class _Asked:
    """A message that is expected."""

    def __init__(self, result: Result, stream: torch.Stream | None) -> None:
        self.result = result
        self.stream = stream
        """The stream that will read it; None on the CPU."""
        self.is_there = threading.Event()
        self.tensors: Tensors = ()
        self.works: list[Any] = []
        """Of a device: transfers that its stream has to wait for."""
        self.error: BaseException | None = None


_Sent = tuple[Result, float, Any, list[Any], list[torch.Tensor]]
"""On its way: since when by the clock of the host, the work of its head, that of its tensors, and all of them."""


class _Peer:
    """The other end: what is expected from it, and what is on its way to it."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []


class GroupTransport:
    """`Transport` over a process group. To be made by all its ranks at once."""

    def __init__(self, group: Any, device: torch.device, note: FailureNote, log: StepLog | None = None) -> None:
        """log: notes when each message was on its way."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.rank = dist.get_rank(group)
        self._device = device
        self._note = note
        self._log = log
        self._heads = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._ways = [self._heads, self._heads]
        """Of tensors: to higher ranks, to lower ranks."""
        if device.type != "cpu":
            self._ways = [dist.new_group(ranks, use_local_synchronization=True) for _ in range(2)]
        self._peers: dict[int, _Peer] = {}
        self._asked: dict[Result, tuple[int, _Asked]] = {}
        self._sending = threading.Condition()
        self._on_the_way: set[Result] = set()
        self._send_error: tuple[int, BaseException] | None = None
        self._divide_by = 0.0

    def begin(self, divide_by: float) -> None:
        self._divide_by = divide_by

    def send(self, result: Result, tensors: Sequence[torch.Tensor | None], *, to: int) -> None:
        self._raise_lost_send()
        there = [tensor.detach().contiguous() for tensor in tensors if tensor is not None and tensor.numel()]
        head = heads.write(result, tensors, self._divide_by)
        start = time.perf_counter()
        way = self._ways[int(to < self.rank)]
        try:
            head_work = dist.isend(head, group=self._heads, group_dst=to)
            works = [dist.isend(_bytes_of(tensor), group=way, group_dst=to) for tensor in there]
        except RuntimeError as error:
            raise self._lost(to, f"was sending {send_of(result)} to it", error) from error
        with self._sending:
            self._on_the_way.add(result)
        self._peer(to).sent.put((result, start, head_work, works, [head, *there]))

    def ask(self, result: Result, *, source: int) -> None:
        is_cpu = self._device.type == "cpu"
        asked = _Asked(result, None if is_cpu else torch.accelerator.current_stream(self._device))
        self._asked[result] = (source, asked)
        self._peer(source).asked.put(asked)

    def read(self, result: Result) -> Tensors:
        source, asked = self._asked[result]
        while not asked.is_there.wait(POLL_SECONDS):
            self._raise_noted()
        del self._asked[result]
        if asked.error is not None:
            if isinstance(asked.error, PipelineError):
                raise asked.error
            raise self._lost(source, f"waited for {send_of(result)} of it", asked.error) from asked.error
        for work in asked.works:
            work.wait()
        return asked.tensors

    def let_go_of(self, results: Collection[Result]) -> None:
        self._until(lambda: self._on_the_way.isdisjoint(results))

    def finish(self) -> None:
        self._until(lambda: not self._on_the_way)

    def _until(self, is_gone: Callable[[], bool]) -> None:
        with self._sending:
            while not is_gone() and self._send_error is None:
                if not self._sending.wait(POLL_SECONDS):
                    self._raise_noted()
        self._raise_lost_send()

    def give_up(self) -> None:
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
        for peer in self._peers.values():
            peer.asked.put(None)
            peer.sent.put(None)
            for thread in peer.threads:
                thread.join(_PATIENCE_SECONDS)
        self._peers.clear()
        self._asked.clear()

    # -- threads -------------------------------------------------------------------------------------------------------

    def _peer(self, rank: int) -> _Peer:
        if rank not in self._peers:
            peer = self._peers[rank] = _Peer()
            for work in (self._receive, self._let_go):
                name = f"lowtide-pipeline-{work.__name__.strip('_')}-{rank}"
                thread = threading.Thread(target=work, args=(rank, peer), name=name, daemon=True)
                peer.threads.append(thread)
                thread.start()
        return self._peers[rank]

    def _receive(self, source: int, peer: _Peer) -> None:
        while (asked := peer.asked.get()) is not None:
            try:
                self._take_in(source, asked)
            except BaseException as error:  # whatever it is, the thread that reads must hear of it
                asked.error = error
            asked.is_there.set()
            del asked  # the thread waits for the next one without holding this one's tensors

    def _take_in(self, source: int, asked: _Asked) -> None:
        words = torch.empty(heads.NUM_WORDS, dtype=torch.int64)
        dist.recv(words, group=self._heads, group_src=source)
        start = time.perf_counter()
        head = self._checked(words, asked.result, source)
        if asked.stream is not None:
            torch.accelerator.set_stream(asked.stream)  # of this thread: memory and order are those of the reader
        way = self._ways[int(source > self.rank)]
        tensors: list[torch.Tensor | None] = []
        for blank in head.blanks:
            if blank is None:
                tensors.append(None)
                continue
            tensor = torch.empty(blank.shape, dtype=blank.dtype, device=self._device)
            if tensor.numel():
                work: Any = dist.irecv(_bytes_of(tensor), group=way, group_src=source)
                if asked.stream is None:
                    work.wait()
                else:
                    asked.works.append(work)
            tensors.append(tensor.requires_grad_(blank.requires_grad))
        asked.tensors = tuple(tensors)
        if self._log is not None:
            self._log.passed("receive", str(receive_of(asked.result)), start, time.perf_counter())

    def _checked(self, words: torch.Tensor, expected: Result, source: int) -> heads.Head:
        wanted = f"rank {self.rank} stands at {receive_of(expected)}"
        try:
            head = heads.read(words)
        except heads.HeadError as error:
            raise PipelineError(f"pipeline: {wanted}, and from rank {source}: {error}") from None
        if head.result != expected:
            raise PipelineError(f"pipeline: {wanted}, and rank {source} sent {send_of(head.result)}")
        if head.divide_by != self._divide_by:
            raise PipelineError(
                f"pipeline: rank {self.rank} divides gradients by {self._divide_by:g} in this step, and rank {source} "
                f"by {head.divide_by:g}; give all ranks the same divide_by"
            )
        return head

    def _let_go(self, to: int, peer: _Peer) -> None:
        while (sent := peer.sent.get()) is not None:
            result, start, head_work, works, tensors = sent
            error: BaseException | None = None
            try:
                head_work.wait()
                for work in works:
                    _wait_on_host(work, self._device)
                if self._log is not None:
                    self._log.passed("send", str(send_of(result)), start, time.perf_counter())
            except BaseException as raised:
                error = raised
            del sent, head_work, works, tensors
            with self._sending:
                self._on_the_way.discard(result)
                if error is not None and self._send_error is None:
                    self._send_error = (to, error)
                self._sending.notify_all()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _raise_noted(self) -> None:
        text = self._note.read()
        if text is not None:
            raise PipelineError(f"pipeline: {text}")

    def _raise_lost_send(self) -> None:
        if self._send_error is not None:
            to, error = self._send_error
            raise self._lost(to, "was sending to it", error) from error

    def _lost(self, peer: int, doing: str, error: BaseException) -> PipelineError:
        """What to say of a connection that broke: the cause that somebody noted, else that the peer is gone."""
        noted = self._note.read()
        if noted is None:
            own = f"rank {peer} ended without a word; rank {self.rank} {doing} ({_first_line(error)})"
            noted = self._note.settle(own)
        return PipelineError(f"pipeline: {noted}")


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
