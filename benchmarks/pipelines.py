"""Question l: what does a pipeline of torch's take under lowtide, beside torch's runtime alone?

    python -m benchmarks.pipelines [--rounds 5] [--only 1f1b]

The same schedule of torch's, the same stages, the same batch, on 2 and 4 processes of gloo: alone, and with
`lowtide.pipeline.attach`; with everything kept, and with every block run again (torch's checkpoint, lowtide's rules).
Steps of the four take turns. Peaks are live bytes of a step, weights and gradients among them, of the rank that has
most; the predicted one is that of a plan with all the room there is. A run of a block counts in forward and when it
runs again. Gradients are compared to the bit.

Cost: five minutes. Not covered: devices, FSDP2, pairs that overlap (overlap_pipeline.py).
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from benchmarks.overlap import on_processes
from benchmarks.record import Record
from benchmarks.rows import Row, command_of, parser, run
from lowtide.config.run import SCHEDULES as KINDS
from lowtide.pipeline import attach, linear
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import Schedule
from lowtide.tensors.live_bytes import LiveBytes

TITLE = "What does a pipeline of torch's take under lowtide?"
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
MODES = ("torch", "lowtide", "torch_again", "lowtide_again")
"""`again`: every block runs again."""
_BLOCKS, _WIDTH, _ROWS, _MICRO_BATCHES = 16, 128, 256, 8
_ROOM = 1 << 40
RUNS = dict.fromkeys(MODES, 0)
"""Of blocks on this rank."""


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str) -> Tensor:
        RUNS[mode] += 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 512), nn.Linear(512, _WIDTH)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.mode == "torch_again" else self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        h = linear(self.norm(Counted.apply(x, self.mode)), self.up.weight, self.up.bias)
        return x + linear(nn.functional.gelu(h), self.down.weight, self.down.bias)


class Stage(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Rig:
    """The stages of one rank under a schedule of torch's."""

    def __init__(self, mode: str, name: str, made: Schedule, own: Sequence[int]) -> None:
        """`own`: the stages of this rank."""
        torch.manual_seed(0)
        every, each = [Block(mode) for _ in range(_BLOCKS)], _BLOCKS // made.num_stages
        self.ends = 0 in own, made.num_stages - 1 in own
        self.batch = torch.randn(_MICRO_BATCHES * _ROWS, _WIDTH) if any(self.ends) else None
        self.stages = []
        for number in own:
            stage = Stage(every[number * each : (number + 1) * each])
            self.stages.append(pipelining.PipelineStage(stage, number, made.num_stages, torch.device("cpu")))
        given: Any = self.stages[0] if KINDS[name].stages_per_rank == 1 else self.stages
        self.schedule = getattr(pipelining, SCHEDULES[name])(given, _MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
        self.model = nn.ModuleList(stage.submod for stage in self.stages)
        self.seconds: list[float] = []

    def step(self) -> None:
        self.model.zero_grad()
        how: dict[str, Any] = {"target": self.batch if self.ends[1] else None, "losses": [], "return_outputs": False}
        self.schedule.step(*((self.batch,) if self.ends[0] else ()), **how)

    def timed(self) -> None:
        dist.barrier()
        began = time.perf_counter()
        self.step()
        dist.barrier()
        self.seconds.append(time.perf_counter() - began)

    def peak_bytes(self) -> int:
        """Of what this process holds at most in one step, with what is held between steps."""
        self.model.zero_grad()
        gc.collect()
        with LiveBytes(model=self.model) as live:
            live.add_all(each for each in gc.get_objects() if issubclass(type(each), Tensor))
            self.step()
        return live.peak_bytes


def on_rank(rank: int, num_ranks: int, _: float, args: Mapping[str, Any]) -> Row:
    """Of all ranks together: what each mode takes."""
    torch.set_num_threads(1)
    name = args["schedule"]
    made = make_schedule(name, num_ranks=num_ranks, num_micro_batches=_MICRO_BATCHES)
    each = _BLOCKS // made.num_stages
    own = made.stages_of(rank)

    found: Row = {}
    rigs: dict[str, Rig] = {}

    def everywhere(value: Any) -> list[Any]:
        values: list[Any] = [None] * num_ranks
        dist.all_gather_object(values, value)
        return values

    # Memory: each rig alone, since what another holds would count.
    for mode in MODES:
        rig = Rig(mode, name, made, own)
        rules = {"recompute": ["blocks.*"] if mode.endswith("again") else "none", "swap": "none", "min_bytes": 0}
        attached = attach(rig.schedule, memory={"budget": _ROOM, **rules}, tied=()) if "lowtide" in mode else None
        for _ in range(2):
            rig.step()
        peaks = everywhere(rig.peak_bytes())
        found[f"{mode}_peak_bytes"] = max(peaks)
        if attached is not None:
            predicted = everywhere(attached.plans.found.peak_bytes)
            found[f"{mode}_predicted_over_peak_max"] = max(p / q for p, q in zip(predicted, peaks, strict=True))
            found[f"{mode}_predicted_over_peak_min"] = min(p / q for p, q in zip(predicted, peaks, strict=True))
            attached.remove()
        del rig
    # Time, and bits.
    for mode in MODES:
        rigs[mode] = Rig(mode, name, made, own)
        if "lowtide" in mode:
            attach(rigs[mode].schedule, memory=rules if mode.endswith("again") else None, tied=())
    for number in range(args["rounds"] + 2):
        for mode, rig in rigs.items():
            if number == 2:
                RUNS[mode] = 0
                rig.seconds.clear()
            rig.timed()
    gradients = {mode: [p.grad for p in rig.model.parameters()] for mode, rig in rigs.items()}
    equal = all(
        torch.equal(one, other) for mode in MODES[1:] for one, other in zip(gradients[mode], gradients["torch"])
    )
    once = args["rounds"] * _MICRO_BATCHES * each * len(own)
    found |= {f"{mode}_seconds": statistics.median(rig.seconds) for mode, rig in rigs.items()}
    found |= {f"{mode}_runs": max(everywhere(RUNS[mode] / once)) for mode in MODES}
    found["is_equal"] = all(everywhere(equal))
    for words in ("", "_again"):
        found[f"peak_ratio{words}"] = found[f"lowtide{words}_peak_bytes"] / found[f"torch{words}_peak_bytes"]
        found[f"time_ratio{words}"] = found[f"lowtide{words}_seconds"] / found[f"torch{words}_seconds"]
    return found


def main(argv: Sequence[str]) -> int:
    options = parser("pipelines", __doc__)
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args(argv)

    def measure(piece: Mapping[str, Any]) -> Row:
        found: Row = on_processes(on_rank, piece["ranks"], 0.0, {"schedule": piece["schedule"], "rounds": args.rounds})
        return found

    record = Record(
        question="pipelines",
        title=TITLE,
        kind="measured",
        command=command_of("pipelines", argv),
        settings={"blocks": _BLOCKS, "width": _WIDTH, "rows": _ROWS, "micro_batches": _MICRO_BATCHES,
                  "rounds": args.rounds},
        rows=[],
        notes=["Peaks have weights and gradients in them; `predicted_over_peak` is of a plan with all the room."],
    )  # fmt: skip
    pieces = [{"schedule": name, "ranks": ranks} for ranks in (2, 4) for name in SCHEDULES]
    return run(record, pieces, measure, args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
