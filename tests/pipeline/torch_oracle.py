"""Torch's own schedules, without processes: its generators and its lowering, on the few numbers that they read.

The names are private to torch. Seen with 2.13.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as torch_schedules

from lowtide.pipeline.schedule import Schedule

Rows = dict[int, list]


def rows_of(name: str, num_ranks: int, num_micro_batches: int, stages_per_rank: int = 2) -> Rows:
    """Torch's computing actions, by rank."""
    numbers = SimpleNamespace(
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        number_of_rounds=max(1, num_micro_batches // num_ranks),
        microbatches_per_round=num_micro_batches // max(1, num_micro_batches // num_ranks),
        _n_microbatches=num_micro_batches,
        _num_stages=num_ranks,
        num_stages=2 * num_ranks,
    )
    if name in ("gpipe", "1f1b"):
        single = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}[name]
        rows = single._get_pipeline_order(numbers)
    else:
        several = {
            "interleaved": torch_schedules.ScheduleInterleaved1F1B,
            "zb_v": torch_schedules.ScheduleZBVZeroBubble,
            "dualpipev": torch_schedules.ScheduleDualPipeV,
            "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
        }[name]
        rows = {rank: several._calculate_single_rank_operations(numbers, rank) for rank in range(num_ranks)}
    return {
        rank: [action for action in row if action is not None and action.is_compute_op] for rank, row in rows.items()
    }


def lowered(rows: Rows, rank_of_stage: tuple[int, ...], *, defer: bool) -> Rows:
    """With torch's sends and receives; `defer` is its `defer_pp_recv`."""
    home = rank_of_stage.__getitem__
    rows = torch_schedules._add_send_recv(
        {rank: list(row) for rank, row in rows.items()}, stage_to_rank=home, num_stages=len(rank_of_stage)
    )
    return torch_schedules._defer_recv_ops(rows, stage_to_rank=home) if defer else rows


def loaded(path: Path, schedule: Schedule) -> torch_schedules._PipelineScheduleRuntime:
    """What torch's loader makes of a file of computing actions: it validates, and lowers."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pp_group_size = schedule.num_ranks
    runtime._num_stages = schedule.num_stages
    runtime._n_microbatches = schedule.num_micro_batches
    runtime._stages = []
    runtime._defer_pp_recv = False
    runtime.pipeline_order = {}
    runtime._load_csv(str(path))
    return runtime
