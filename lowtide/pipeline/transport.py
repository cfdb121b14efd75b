"""Messages between two ranks, in the order that the schedule proves.

What: in `begin` all ranks hear of which shape each micro-batch of the step is. `send` begins and returns. `ask`
allocates what will come and begins to take it in. `read` waits for it. `let_go_of` waits for what was sent, and so does
`finish` for all that is left.
Shapes: the first message of each stage for each shape of a micro-batch has a head that says what follows; both ends
remember it, so later ones have none, until something has changed on any rank (weights were frozen, autocast is on). A
stage that gives other tensors for the same shape of its batch is refused.
Why what was sent is held until the schedule says that its reader has begun (live_chunks.read_by_then): gloo says that a
transfer is over only after somebody waited for it, and by then nobody has to wait. So what a rank holds follows from
the schedule alone, and a plan counts just that.
Heads travel on a gloo group of their own. Tensors on the CPU travel there too; those on a device travel on two groups
of the job's backend, one for each direction: two ranks that send to each other at once on one communicator of NCCL,
which does one thing at a time, would each wait for the other's receive.

A wait ends when the message is there, or when a connection closes. `give_up` closes the connections of this rank, so
that the waits of all others end, one after the other; each then finds the note of the rank that failed first.

Cost: one small collective in each step. Not covered: a message that is taken back. Devices have been seen with one rank
only.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lowtide.errors import ConfigError, PipelineError
from lowtide.pipeline.agree import Facts, FailureNote, meet, refuse_difference
from lowtide.pipeline.live_chunks import HEAD_BYTES
from lowtide.pipeline.schedule import Kind, Result
from lowtide.pipeline.torch_stage import Tensors, unwritten


class _Blank(NamedTuple):
    """A tensor that is to come, in words that travel."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    order: tuple[int, ...]
    """Of its dimensions in memory, slowest first: a product of transposed tensors has other bits."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Blank:
        stride = torch.empty_like(tensor, device="meta").stride()  # of a copy: an expanded dimension has none
        order = tuple(sorted(range(tensor.ndim), key=lambda dim: -stride[dim]))
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad, order)

    def empty(self, device: torch.device) -> torch.Tensor:
        stride, step = [0] * len(self.shape), 1
        for dim in reversed(self.order):
            stride[dim] = step
            step *= max(1, self.shape[dim])
        return torch.empty_strided(self.shape, stride, dtype=getattr(torch, self.dtype), device=device)


_Blanks = tuple[_Blank | None, ...]
"""None: there is no tensor, as with the gradient of an output that nobody used."""


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
        self._on_the_way: defaultdict[Result, list[tuple[int, list[Any], Callable[[], None]]]] = defaultdict(list)
        """What was sent: to which ranks, the works that carry it, and a check of the tensors that they need."""

    def begin(self, shapes: Sequence[Hashable] | None, *, state: Any, facts: Facts, lack: int) -> int:
        """A step begins. shapes: of each micro-batch, on the first rank. state: where it is another one than in the
        last step, stages of this rank may pass on other tensors for the same shapes. Raises ConfigError where `facts`
        of ranks differ. Gives the largest `lack` of any rank."""
        has_changed, self._state = state != self._state, state
        said = self.meet("the beginning of a step", (shapes, has_changed, facts, lack))
        refuse_difference("pipeline", [facts for *_, facts, _ in said])
        if any(has_changed for _, has_changed, *_ in said):
            self._known.clear()
        every = next(shapes for shapes, *_ in said if shapes is not None)
        self._shapes = [self._numbers.setdefault(shape, len(self._numbers)) for shape in every]
        return max(lack for *_, lack in said)

    def meet(self, place: str, value: Any) -> list[Any]:
        """What each rank brings. Raises ConfigError on all ranks where one of them is at another place."""
        with self._telling(None, f"was at {place}"):
            return meet(place, value, self._heads)

    def send(self, result: Result, tensors: Sequence[torch.Tensor | None], *, to: int) -> None:
        """Begin, and return. The tensors are held until `let_go_of` or `finish`."""
        blanks = tuple(None if tensor is None else _Blank.of(tensor) for tensor in tensors)
        key = self._key_of(result)
        known = None if key is None else self._known.get(key)
        parts: list[tuple[torch.Tensor, Any]] = []
        if known is None:
            parts.append((_head_of(result, blanks), self._heads))
            if key is not None:
                self._known[key] = blanks
        elif known != blanks:
            raise ConfigError(
                f"pipeline: at {result.send} stage {result.stage} passes on {_told(blanks)}, and for another "
                f"micro-batch of the same shape it was {_told(known)}; what a stage passes on must follow from the "
                "shapes of its batch"
            )
        way = self._ways[int(to < self.rank)]
        parts += [
            (tensor.detach().resolve_conj().resolve_neg().permute(blank.order).contiguous(), way)
            for tensor, blank in zip(tensors, blanks, strict=True)
            if tensor is not None and blank is not None and tensor.numel()
        ]
        with self._telling(to, f"was sending {result.send} to it"):
            works = [dist.isend(_bytes_of(part), group=group, group_dst=to) for part, group in parts]
        self._on_the_way[result].append((to, works, unwritten(result, tuple(part for part, _ in parts))))

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
                with self._telling(source, f"waited for {result.send} of it"):
                    works.append(dist.irecv(_bytes_of(tensor.permute(blank.order)), group=way, group_src=source))
            tensors.append(tensor.requires_grad_(blank.requires_grad))
        self._asked[result] = source, tuple(tensors), works

    def read(self, result: Result) -> Tensors:
        """What came, on this rank's device, as leaves that require grad where the sender's tensors did."""
        source, tensors, works = self._asked.pop(result)
        with self._telling(source, f"waited for {result.send} of it"):
            for work in works:
                work.wait()
        return tensors

    def let_go_of(self, results: Iterable[Result]) -> None:
        """Wait until these have gone."""
        for result in results:
            for to, works, check in self._on_the_way.pop(result):
                with self._telling(to, f"was sending {result.send} to it"):
                    for work in works:
                        work.wait()
                check()

    def finish(self) -> None:
        """Wait until everything that was sent has gone."""
        self.let_go_of(list(self._on_the_way))
        self._shapes = []

    def give_up(self) -> None:
        """After a failure: end the waits of all ranks. Nothing can be sent any more."""
        # A wait that times out closes all connections of a gloo group. No call does so: seen with torch 2.13.
        # On a connection that another rank has closed already nothing times out, so each is tried.
        for rank in range(dist.get_world_size(self._heads)):
            if rank != self.rank:
                with contextlib.suppress(RuntimeError):
                    work: Any = dist.irecv(torch.empty(1), group=self._heads, group_src=rank, tag=1)
                    work.wait(timedelta(milliseconds=1))
        self._asked.clear()
        self._on_the_way.clear()

    # -- what follows --------------------------------------------------------------------------------------------------

    def _key_of(self, result: Result) -> tuple[Kind, int, int] | None:
        """Under which it is known what follows; None outside of steps, and for sums of weight gradients."""
        if result.kind is Kind.BACKWARD_WEIGHT or not self._shapes:
            return None
        return result.kind, result.stage, self._shapes[result.micro_batch]

    def _read_head(self, expected: Result, source: int) -> _Blanks:
        head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
        with self._telling(source, f"waited for {expected.send} of it"):
            dist.recv(head, group=self._heads, group_src=source)
        wanted = f"rank {self.rank} stands at {expected.receive}"
        (kind, *place), blanks = json.loads(head.numpy().tobytes())
        result = Result(Kind(kind), *place)
        if result != expected:
            raise PipelineError(f"pipeline: {wanted}, and rank {source} sent {result.send}")
        return tuple(
            None if each is None else _Blank(tuple(each[0]), each[1], each[2], tuple(each[3])) for each in blanks
        )

    # -- failures ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _telling(self, peer: int | None, doing: str) -> Iterator[None]:
        """Inside, a connection that breaks is told with the cause that somebody noted, else that the peer is gone."""
        try:
            yield
        except RuntimeError as error:
            who = "another rank" if peer is None else f"rank {peer}"
            noted = self.note.read()
            if noted is None:
                first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                own = f"{who} ended without a word; rank {self.rank} {doing} ({first_line})"
                noted = self.note.settle(own)
            raise PipelineError(f"pipeline: {noted}") from error


def _head_of(result: Result, blanks: _Blanks) -> torch.Tensor:
    """So many bytes, whatever they say. Raises ConfigError for what they cannot say."""
    text = json.dumps([result, blanks]).encode()
    if len(text) > HEAD_BYTES:
        raise ConfigError(
            f"pipeline: stage {result.stage} passes on {len(blanks)} tensors, too many for the {HEAD_BYTES} bytes that "
            "say what follows. Pass on fewer, for instance stacked"
        )
    return torch.frombuffer(bytearray(text.ljust(HEAD_BYTES)), dtype=torch.uint8)


def _told(blanks: _Blanks | None) -> str:
    words = {True: " with a graph", False: ""}
    every = [
        "nothing" if each is None else f"{each.dtype}{list(each.shape)}{words[each.requires_grad]}"
        for each in blanks or ()
    ]
    return ", ".join(every) or "nothing"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory: backends know few dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
