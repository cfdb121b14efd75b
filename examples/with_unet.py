"""A UNet of a diffusion model: layers of different sizes, with skip connections, which keep early activations long."""

import torch
import torch.nn.functional as F
from torch import nn

import lowtide


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm, self.skip = nn.GroupNorm(1, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.skip(x) + self.second(F.silu(self.norm(self.first(x))))


class UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.time = nn.Linear(1, 3)
        self.down = nn.ModuleList(Block(a, b) for a, b in zip((3, *widths), widths))
        self.up = nn.ModuleList(Block(2 * b, a) for a, b in zip((3, *widths), widths))

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x, seen = noisy + self.time(time)[:, :, None, None], []
        for block in self.down:
            seen.append(block(x))
            x = F.avg_pool2d(seen[-1], 2)
        for block in reversed(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), seen.pop()], 1))
        return x


model = UNet()
optimizer = torch.optim.AdamW(model.parameters())
with lowtide.optimize(model, "8MiB", memory={"min_bytes": 0}, optimizer=optimizer) as tide:
    for step in range(4):
        images, noise, time = torch.randn(8, 3, 32, 32), torch.randn(8, 3, 32, 32), torch.rand(8, 1)
        mixed = (1 - time[:, :, None, None]) * images + time[:, :, None, None] * noise
        loss = F.mse_loss(model(mixed, time), noise - images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")
    print(tide.plan)
