"""torch's own pipeline schedules: lowtide brings rules to the stages of a rank.

torchrun --nproc-per-node 2 examples/with_pipelining.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lowtide.pipeline

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, ranks = dist.get_rank(), dist.get_world_size()
layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
part = nn.ModuleDict({"layers": nn.Sequential(*layers[rank * 4 // ranks : (rank + 1) * 4 // ranks])})["layers"]
stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(part.parameters())

attached = lowtide.pipeline.attach(schedule, memory={"recompute": ["0"], "swap": ["1"], "min_bytes": 0})
for _ in range(3):
    rows = torch.randn(64, 64)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(rows)
    elif rank == ranks - 1:
        schedule.step(target=rows, losses=losses)
    else:
        schedule.step()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank}: {attached.tides[0].stats.swapped_bytes} bytes were elsewhere between forward and backward")
attached.remove()
dist.destroy_process_group()
