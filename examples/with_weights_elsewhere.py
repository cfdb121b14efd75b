"""A model whose weights, gradients and optimizer state are more than the budget: they come for their layer's turn."""

import torch

import lowtide

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = 4 * sum(parameter.nbytes for parameter in model.parameters())

with lowtide.swap_weights(model, optimizer, budget="12MiB", update="in_backward") as handle:
    for step in range(5):
        loss = model(torch.randn(16, 512)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    print(handle)
print(f"{state / 2**20:.1f} MiB of weights, gradients and moments, of a budget of 12.0 MiB")
