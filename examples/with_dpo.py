"""Direct preference optimization: two forward passes before one backward pass are planned as one step.

The reference model runs without gradients and needs no plan.
"""

import copy

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
policy = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)


def log_probability(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each sequence."""
    logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))


with lowtide.optimize(policy, "12MiB", memory={"min_bytes": 0}, optimizer=optimizer) as tide:
    for step in range(4):
        chosen, rejected = torch.randint(256, (2, 2, 128))
        with torch.no_grad():
            known = log_probability(reference, chosen) - log_probability(reference, rejected)
        margin = log_probability(policy, chosen) - log_probability(policy, rejected)
        loss = -F.logsigmoid(0.1 * (margin - known)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, spills so far {tide.stats.num_spills}")
    print(str(tide.plan).splitlines()[0])
