"""The engine for devices with streams: CUDA, NPU, XPU.

What: copies between device storages and pinned host memory on two streams of our own (`Lane.OUT`, `Lane.IN`), ordered
against the computation by events; and, where a disk tier is given, copies on to the disk through pinned staging.
Why: a copy engine moves bytes while the compute units work. All that is needed for right answers is order, and all of
it is said in `record` and `wait`; nothing here calls `record_stream` (it would hold memory back without bound).
Cost: a direct copy is two stream switches and one `copy_` per piece, some 10 us of Python. A wait for something already
complete costs one query. Each event is a new one: to record an event again for which a stream has yet to wait is right
on CUDA; where an event has one state for all, the stream waits for the wrong thing, or for ever.

Streams, exactly:
- The compute lane is the calling thread's current stream, looked up in each call, before any stream is switched.
- Several compute streams: what one saves may be sent while another is current, and memory that the one frees goes to
  the pool of the stream that allocated it, which cannot be asked for. So once a second one was seen, a recording on
  the compute lane is one on each of them, and `wait(COMPUTE, out_event)` blocks the caller until the copy is complete:
  then the source may be reused by anyone. Until then one stream is all there is, and it waits by itself.
- Memory comes from the allocator's pool of the compute stream (`new_buffer`), so a block freed by Python may be handed
  to later *compute* work at once. That is safe for a source after `wait(COMPUTE, out_event)`, and for a target after
  `wait(COMPUTE, in_event)`; and a copy in must be behind `wait(IN, record(COMPUTE))` made after `new_buffer`. The
  caller issues these waits; the engine keeps no storage alive beyond the calls, but for jobs that have not settled.
- Host blocks and disk ranges are freed by the caller when the events are complete, so they need no event of their own.

Disk: no stream can call `pwrite`, so a disk copy is a job of the lane's worker thread (staging.py), and an event behind
a job is compound: first the host's part (the job is settled), then the device's (the event recorded when it settled).
While a lane has an unsettled job, later copies queue behind it, since a lane is in order and an event speaks for all
before it. `wait(COMPUTE, e)` blocks the caller until the job is settled (on the way in: the last copy is issued; on
the way out: the last byte is *written*, so that `failure(e)` is known before anybody drops the source). `wait(OUT|IN,
e)` never blocks: it becomes a job itself.

Not covered: CUDA graph capture (refused, see tide.py), peer-to-peer transfer, devices without streams (host.py). A
device error is sticky: it surfaces from the next torch call, not from `failure`, which reports the disk.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping

import torch

from lowtide.core.fate import Tier
from lowtide.core.plan import Plan
from lowtide.engines.base import Engine, Event, Lane, Slot
from lowtide.engines.device_ops import CopyPairs, StallMeter, TorchDevice
from lowtide.engines.staging import NUM_STAGES, STAGE_BYTES, CopyLane, Mark, Staging
from lowtide.engines.tiers.arena import Arena, Block
from lowtide.engines.tiers.disk import BLOCK_BYTES, DiskTier
from lowtide.engines.tiers.host_limit import Cap, host_limit
from lowtide.errors import ConfigError, TierFull
from lowtide.tensors.view import byte_view
from lowtide.timeline.step import Link

COPY_BYTES = 64 * 2**20
"""Largest single transfer. Lanes have streams of their own, so nothing urgent waits behind it. To be measured."""
PROBE_ROUNDS = 4


class AcceleratorEngine(Engine):
    """`Engine` on streams. See the module's text.

    `host_budget_bytes`: the user's cap on pinned host memory; what the cgroup and the machine can spare is one as well.
    `cap`: one that others share, instead of it.
    `disk`: a `DiskTier`, which the engine closes with itself; None = no disk tier.
    `ops`: the device, for tests; None = the accelerator of this torch.
    """

    name = "accelerator"

    def __init__(
        self,
        device: torch.device,
        host_budget_bytes: int | None = None,
        disk: DiskTier | None = None,
        *,
        ops: TorchDevice | None = None,
        cap: Cap | None = None,
    ) -> None:
        self._ops = ops if ops is not None else TorchDevice(device)
        self.device = self._ops.device
        self.device_type = self.device.type
        self.leftovers: deque = deque()
        self.tiers: tuple[str, ...] = ("host",) if disk is None else ("host", "disk")
        host_cap = cap if cap is not None else Cap(_host_cap_bytes(host_budget_bytes))
        self.caps: Mapping[str, Cap] = {"host": host_cap, **({} if disk is None else {"disk": disk.cap})}
        self._arena = Arena(host_cap, self._ops.new_slab)
        self._lanes = {lane: CopyLane(lane, self._ops) for lane in (Lane.OUT, Lane.IN)}
        # The stream that the model is expected to run on, and any others that it was seen on.
        self._compute_streams: list[torch.Stream] = [self._ops.current_stream()]
        self._stalls = StallMeter(self._ops)
        self._disk = disk
        self._stage_blocks: list[Block] = []
        if disk is not None:
            self._staging = {lane: self._make_staging(lane, disk) for lane in self._lanes}
        self._staging_bytes = self._arena.bytes_in_use
        self._is_closed = False

    @classmethod
    def for_plan(cls, device: torch.device, plan: Plan, caps: Mapping[str, Cap]) -> AcceleratorEngine:
        disk = DiskTier(plan.disk_path, plan.disk_budget_bytes, cap=caps.get("disk")) if wants_disk(plan) else None
        return cls(device, plan.host_budget_bytes, disk, cap=caps.get("host"))

    def another(self, plan: Plan) -> AcceleratorEngine:
        return AcceleratorEngine.for_plan(self.device, plan, self.caps)

    # -- memory --------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str) -> Slot:
        if tier == "host":
            return Slot(tier, nbytes, self._arena.allocate(nbytes))
        assert tier in self.tiers, f"no tier '{tier}'"
        assert self._disk is not None
        return Slot(tier, nbytes, self._disk.allocate(nbytes))

    def allocate_visible(self, nbytes: int, tier: str) -> tuple[Slot, torch.Tensor]:
        if tier == "host":
            block = self._arena.allocate(nbytes, whole=True)
            return Slot(tier, nbytes, block), block.ranges()[0]
        slot = self.allocate(nbytes, tier)
        assert self._disk is not None
        return slot, torch.frombuffer(self._disk.view(slot.place, nbytes), dtype=torch.uint8)

    def part_of(self, slot: Slot, start_bytes: int, nbytes: int) -> Slot:
        place = slot.place.part(start_bytes, nbytes) if slot.tier == "host" else slot.place + start_bytes
        return Slot(slot.tier, nbytes, place)

    def in_place(self, slot: Slot) -> torch.UntypedStorage:
        assert slot.tier == "host", slot.tier
        return self._ops.in_place(slot.place.ranges()[0])

    def free(self, slot: Slot) -> None:
        if slot.tier == "host":
            self._arena.free(slot.place)
        elif self._disk is not None:
            self._disk.free(slot.place, slot.nbytes)
        slot.place = None

    def new_buffer(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        return self._ops.new_storage(nbytes, device)

    def memory_in_use(self) -> Mapping[str, int]:
        in_use = {"host": self._arena.bytes_in_use - self._staging_bytes}
        if self._disk is not None:
            in_use["disk"] = self._disk.used_bytes
        return in_use

    # -- copies --------------------------------------------------------------------------------------------------------

    def copy_out(self, source: torch.UntypedStorage, slot: Slot) -> None:
        assert source.nbytes() == slot.nbytes
        data = byte_view(source)
        if slot.tier == "host":
            self._copy(self._lanes[Lane.OUT], list(_pair_up(slot.place, data)))
        else:
            staging, offset = self._staging[Lane.OUT], slot.place
            self._lanes[Lane.OUT].submit(lambda: staging.write_out(data, offset))

    def copy_in(self, slot: Slot, target: torch.UntypedStorage) -> None:
        assert target.nbytes() == slot.nbytes
        data = byte_view(target)
        if slot.tier == "host":
            self._copy(self._lanes[Lane.IN], [(part, host) for host, part in _pair_up(slot.place, data)])
        else:
            staging, offset = self._staging[Lane.IN], slot.place
            self._lanes[Lane.IN].submit(lambda: staging.read_in(offset, data))

    def _copy(self, lane: CopyLane, pairs: CopyPairs) -> None:
        if lane.open_job() is None:
            self._ops.copy(lane.stream, pairs)
            lane.last_copy = None
        else:
            ops, stream = self._ops, lane.stream
            lane.submit(lambda: ops.copy(stream, pairs))

    # -- order ---------------------------------------------------------------------------------------------------------

    def compute_stream(self) -> torch.Stream:
        stream = self._ops.current_stream()
        if stream not in self._compute_streams:
            self._compute_streams.append(stream)
        return stream

    def record(self, lane: Lane) -> Mark:
        if lane is Lane.COMPUTE:
            self.compute_stream()
            return Mark(lane, tuple(self._recorded(stream) for stream in self._compute_streams), None, None)
        copy_lane = self._lanes[lane]
        job = copy_lane.open_job()
        raw = (self._recorded(copy_lane.stream),) if job is None else ()
        return Mark(lane, raw, job, copy_lane.last_copy)

    def _recorded(self, stream: torch.Stream) -> torch.Event:
        event = self._ops.new_event()
        event.record(stream)
        return event

    def wait(self, lane: Lane, event: Event) -> float:
        mark = _mark(event)
        if mark.is_complete():
            return 0.0
        if lane is not Lane.COMPUTE:
            self._wait_on_copy_lane(self._lanes[lane], mark)
            return 0.0
        stream = self.compute_stream()
        blocked_seconds = self._block_for(mark)
        for raw in mark.device_events():
            if mark.lane is Lane.COMPUTE:
                stream.wait_event(raw)  # one compute stream behind another: no stall of a copy's making
            elif not raw.query():
                self._stalls.wait(stream, raw)
        return blocked_seconds

    def _block_for(self, mark: Mark) -> float:
        """Until streams can wait for it by themselves; for a source that several streams may reuse, until it left."""
        must_leave = mark.lane is Lane.OUT and len(self._compute_streams) > 1
        if not must_leave and (mark.job is None or mark.job.settled.is_set()):
            return 0.0
        start = time.perf_counter()
        if mark.job is not None:
            mark.job.settled.wait()
        for raw in mark.device_events() if must_leave else ():
            raw.synchronize()
        return time.perf_counter() - start

    def _wait_on_copy_lane(self, lane: CopyLane, mark: Mark) -> None:
        events = mark.device_events()
        for raw in events:
            lane.stream.wait_event(raw)  # at once, even ahead of queued jobs: they too reach the stream only later
        job = mark.job
        if events or mark.lane is lane.lane or job is None:
            return  # a lane is in order by itself

        def wait_for_job() -> None:
            job.settled.wait()
            if job.tail is not None:
                lane.stream.wait_event(job.tail)

        lane.submit(wait_for_job, is_copy=False)

    def query(self, event: Event) -> bool:
        return _mark(event).is_complete()

    def failure(self, event: Event) -> BaseException | None:
        copy = _mark(event).copy
        return copy.error if copy is not None else None

    def cancel(self, event: Event) -> bool:
        mark = _mark(event)
        return mark.copy is not None and self._lanes[mark.lane].cancel(mark)

    # -- measures ------------------------------------------------------------------------------------------------------

    def device_bytes(self) -> int | None:
        return self._ops.allocated_bytes("current")

    def device_peak_bytes(self) -> int | None:
        return self._ops.allocated_bytes("peak")

    def reset_device_peak(self) -> None:
        self._ops.reset_peak()

    def stall_seconds(self) -> float:
        return self._stalls.seconds()

    def mark_time(self) -> torch.Event:
        event = self._ops.new_event(timing=True)
        event.record(self._ops.current_stream())
        return event

    def seconds_between(self, start: torch.Event, end: torch.Event) -> float | None:
        return start.elapsed_time(end) / 1e3 if start.query() and end.query() else None

    def is_capturing(self) -> bool:
        return self._ops.is_capturing()

    def probe_bandwidth(self, nbytes: int) -> Link:
        """Copies a buffer of `nbytes` each way, `PROBE_ROUNDS` times, both ways at once, after one round unmeasured.
        Takes `2 * nbytes` on the device and on the host for its duration; raises `TierFull` if the host has no room."""
        assert all(lane.open_job() is None for lane in self._lanes.values()), "the lanes are busy with the disk"
        with contextlib.ExitStack() as undo:
            slots = []
            for _ in self._lanes:
                slots.append(self.allocate(nbytes, "host"))
                undo.callback(self.free, slots[-1])
            out_seconds, in_seconds = self._time_copies(nbytes, *slots)
        moved_bytes = PROBE_ROUNDS * nbytes
        return Link(out_bytes_per_second=moved_bytes / out_seconds, in_bytes_per_second=moved_bytes / in_seconds)

    def _time_copies(self, nbytes: int, out_slot: Slot, in_slot: Slot) -> tuple[float, float]:
        source = self.new_buffer(nbytes, self._ops.device)
        target = self.new_buffer(nbytes, self._ops.device)
        lanes = (self._lanes[Lane.OUT], self._lanes[Lane.IN])
        starts, ends = ([self._ops.new_event(timing=True) for _ in lanes] for _ in range(2))
        ready = self.record(Lane.COMPUTE)
        for round_index in range(PROBE_ROUNDS + 1):
            for lane, start in zip(lanes, starts, strict=True):
                if round_index == 0:
                    self.wait(lane.lane, ready)
                elif round_index == 1:
                    start.record(lane.stream)
            self.copy_out(source, out_slot)
            self.copy_in(in_slot, target)
        for lane, end in zip(lanes, ends, strict=True):
            end.record(lane.stream)
        for end in ends:
            end.synchronize()  # both, before the buffers and slots go
        out_seconds, in_seconds = (
            max(start.elapsed_time(end) / 1e3, 1e-9) for start, end in zip(starts, ends, strict=True)
        )
        return out_seconds, in_seconds

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def _make_staging(self, lane: Lane, disk: DiskTier) -> Staging:
        try:
            block = self._arena.allocate(NUM_STAGES * STAGE_BYTES)
        except TierFull as full:
            raise ConfigError(
                f"host_budget: {self._arena.cap_bytes} bytes are too few for the disk tier, which sends everything "
                f"through {2 * NUM_STAGES * STAGE_BYTES} bytes of pinned host memory; raise it or drop the disk"
            ) from full
        self._stage_blocks.append(block)
        # A power of two is one piece of a slab, so all chunks of the ring are equal.
        (piece,) = block.ranges()
        return Staging(self._ops, self._lanes[lane].stream, disk, list(piece.split(STAGE_BYTES)))

    def close(self) -> None:
        """Idempotent. Jobs that have not started are dropped; copies under way finish first."""
        if self._is_closed:
            return
        self._is_closed = True
        for lane in self._lanes.values():
            lane.begin_close()
        for lane in self._lanes.values():
            lane.join()
            lane.stream.synchronize()  # no copy may still touch pinned memory that is about to go
        if self._disk is not None:
            self._disk.close()
        for block in self._stage_blocks:
            self._arena.free(block)
        self._stage_blocks.clear()
        self._staging_bytes = 0
        # To torch's cache of pinned memory. Emptying that is for the program to do: others have blocks in it.
        self._arena.trim()


def _mark(event: Event) -> Mark:
    assert isinstance(event, Mark), "an event of another engine"
    return event


def _pair_up(block: Block, data: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(host, device) parts of equal length, none longer than `COPY_BYTES`."""
    start = 0
    for piece in block.ranges():
        for host in piece.split(COPY_BYTES):
            yield host, data[start : start + host.numel()]
            start += host.numel()


def _host_cap_bytes(host_budget_bytes: int | None) -> int:
    """The user's budget, if the cgroup and the machine have that much. Unasked: this rank's share of four fifths of it,
    since pinned memory cannot be taken back and the program wants to live beside it."""
    limit = host_limit(host_budget_bytes)
    assert limit.limit_bytes is not None, "no /proc: give a host_budget"
    if host_budget_bytes is not None:
        return limit.limit_bytes // BLOCK_BYTES * BLOCK_BYTES
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return limit.limit_bytes * 4 // 5 // num_local_ranks // BLOCK_BYTES * BLOCK_BYTES


def wants_disk(plan: Plan) -> bool:
    """Whether an accelerator needs a disk tier: somebody named it. Staging for one takes pinned memory."""
    is_named = plan.disk_path is not None or plan.disk_budget_bytes is not None
    decisions = plan.sites if plan.is_solved else plan.rules.rules
    return is_named or any(decision.tier is Tier.DISK for decision in decisions)
