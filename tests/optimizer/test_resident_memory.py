"""On a machine without an accelerator the state is in a file between steps, and the kernel sees it gone."""

from __future__ import annotations

from pathlib import Path

from tests.support import processes

PROGRAM = """
import gc, torch, lowtide
from lowtide.engines.tiers.host_buffers import configure_malloc

configure_malloc()
torch.set_num_threads(1)


def resident_mib():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


parameters = [torch.nn.Parameter(torch.full((1024, 1024), 0.5)) for _ in range(48)]
optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
gradient = torch.full((1024, 1024), 0.25)
for parameter in parameters:
    parameter.grad = gradient
before = resident_mib()
handle = lowtide.swap_optimizer(optimizer, bucket_bytes="8MiB")
for _ in range(2):
    optimizer.step()
swapped = resident_mib()
state_mib = handle.stats.swapped_bytes / 2**20
handle.detach()
print(state_mib, swapped - before, resident_mib() - before)
"""


def test_nine_tenths_of_the_state_leave_main_memory(tmp_path: Path) -> None:
    status, out, err = processes.program(PROGRAM, tmp_path)
    assert status == 0, err
    state_mib, swapped_mib, plain_mib = map(float, out.split())
    assert state_mib == 384
    assert plain_mib >= state_mib
    assert plain_mib - swapped_mib >= 0.9 * state_mib
