"""Small MoE models of `transformers`, and two of them taken through their layers together, as the truth for two ranks.

`together` is what expert parallelism on two ranks must equal to the bit, in one process and from plain torch: each
batch has its own model and thread; at each block the two threads meet, and one computes the experts for both, with the
rows of both batches concatenated for each expert in the order of the batches.
"""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

KINDS = ("qwen3_moe", "deepseek_v3", "mixtral")
_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "use_cache": False,
    "tie_word_embeddings": False,
}


def make_model(kind: str, implementation: str, *, num_experts: int = 8, top_k: int = 3, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **_COMMON, intermediate_size=48, moe_intermediate_size=16, head_dim=8, num_key_value_heads=2,
            num_experts=num_experts, num_experts_per_tok=top_k, norm_topk_prob=True,
        )  # fmt: skip
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "deepseek_v3":
        config = transformers.DeepseekV3Config(
            **_COMMON, intermediate_size=48, moe_intermediate_size=16, num_key_value_heads=4,
            n_routed_experts=num_experts, n_group=2, topk_group=1, num_experts_per_tok=top_k, first_k_dense_replace=1,
            q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_shared_experts=1,
        )  # fmt: skip
        model = transformers.DeepseekV3ForCausalLM(config)
    else:
        config = transformers.MixtralConfig(
            **_COMMON, intermediate_size=24, num_key_value_heads=2, num_local_experts=num_experts,
            num_experts_per_tok=top_k,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(implementation)
    return model.train()


def make_batch(rank: int, *, step: int = 0, rows: int = 2, length: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 96, (rows, length), generator=generator)


def run_step(model: nn.Module, tokens: Tensor) -> Tensor:
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def together(model: Any, batches: list[list[Tensor]]) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """For each rank its batches, one after the other. The losses, and the gradients of the mean over ranks of the sum
    over batches: sums in the order of the ranks, division last."""
    meeting = _Meeting(len(batches))
    models = [copy.deepcopy(model) for _ in batches]
    blocks = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    for name in blocks:
        experts = models[0].get_submodule(name)
        for number, each in enumerate(models):
            parent = each.get_submodule(name.removesuffix(".experts"))
            parent.experts = _Together(experts, meeting, number)
    losses: list[Any] = [None] * len(batches)

    def run(number: int) -> None:
        try:
            losses[number] = [run_step(models[number], batch) for batch in batches[number]]
        except BaseException:
            meeting.barrier.abort()
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(loss is not None for loss in losses)
    found = [{name.replace("experts.inside.", "experts."): g for name, g in gradients_of(m).items()} for m in models]
    gradients = {}
    for name, first in found[0].items():
        others = [other[name] for other in found[1:] if name in other]
        gradients[name] = sum(others, start=first) / len(batches)
    return losses, gradients


class _Meeting:
    def __init__(self, num_batches: int) -> None:
        self.barrier = threading.Barrier(num_batches, timeout=300)
        self.given: list[Any] = [None] * num_batches
        self.results: Any = None

    def meet(self, number: int, value: Any, work: Any) -> Any:
        """All bring a value; the first does the work on all values; each gets its own result."""
        self.given[number] = value
        self.barrier.wait()
        if number == 0:
            self.results = work(list(self.given))
        self.barrier.wait()
        result = self.results[number]
        self.barrier.wait()
        return result


class _Together(nn.Module):
    def __init__(self, experts: Any, meeting: _Meeting, number: int) -> None:
        super().__init__()
        if number == 0:
            self.inside = experts  # the others' gradients of the experts would only be those again
        self.__dict__["shared"] = experts
        self.meet = functools.partial(meeting.meet, number)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _Run.apply(hidden_states, top_k_index, top_k_weights, self)


class _Run(torch.autograd.Function):
    """Forward and backward of the experts, for both batches at once, by the first thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, weights: Tensor, block: _Together) -> Any:
        def work(given: list[Any]) -> list[Any]:
            with torch.enable_grad():
                leaves = [(x.detach().requires_grad_(), w.detach().requires_grad_()) for x, _, w in given]
                outputs = _experts(block.shared, leaves, [index for _, index, _ in given])
            return [(output.detach(), leaves, outputs) for output in outputs]

        output, ctx.leaves, ctx.outputs = block.meet((x, index, weights), work)
        ctx.block = block
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        def work(given: list[Tensor]) -> list[Any]:
            torch.autograd.backward(ctx.outputs, given)
            return [(x.grad, w.grad) for x, w in ctx.leaves]

        x, weights = ctx.block.meet(gradient, work)
        return x, None, weights, None


def _experts(experts: Any, leaves: list[tuple[Tensor, Tensor]], indices: list[Tensor]) -> list[Tensor]:
    """What the block of transformers does, but for all batches: each expert gets the rows of one after the other."""
    is_grouped = experts.config._experts_implementation == "grouped_mm"
    rows, places = (_all_rows if is_grouped else _rows_by_expert)(experts.num_experts, leaves, indices)
    sizes = [len(each) for each in rows]
    counts = [sum(sizes[i : i + len(leaves)]) for i in range(0, len(sizes), len(leaves))]
    if is_grouped:
        ends = torch.tensor(counts).cumsum(0).int()
        gate_up = functional.grouped_mm(torch.cat(rows), experts.gate_up_proj.transpose(-2, -1), offs=ends)
        gate, up = gate_up.chunk(2, dim=-1)
        made = functional.grouped_mm(experts.act_fn(gate) * up, experts.down_proj.transpose(-2, -1), offs=ends)
    else:
        parts = []
        for expert, state in enumerate(torch.cat(rows).split(counts)):
            gate, up = functional.linear(state, experts.gate_up_proj[expert]).chunk(2, dim=-1)
            parts.append(functional.linear(experts.act_fn(gate) * up, experts.down_proj[expert]))
        made = torch.cat(parts)
    pieces = made.split(sizes)
    outputs = []
    for batch, ((x, w), index) in enumerate(zip(leaves, indices, strict=True)):
        own = [(pieces[i], *places[i]) for i in range(batch, len(sizes), len(leaves))]
        weighted = [(piece * w[token, position, None], token, position) for piece, token, position in own]
        if is_grouped:
            slots = torch.cat([token * index.shape[1] + position for _, token, position in weighted])
            ordered = torch.cat([piece for piece, _, _ in weighted])[torch.argsort(slots)]
            outputs.append(ordered.view(*index.shape, -1).sum(dim=1).to(x.dtype))
        else:
            total = torch.zeros_like(x)
            for piece, token, _ in weighted:
                total = total.index_add(0, token, piece.to(x.dtype))
            outputs.append(total)
    return outputs


def _rows_by_expert(num_experts: int, leaves: Any, indices: list[Tensor]) -> Any:
    """Rows of expert 0 of each batch, then of expert 1, ...; and their tokens and places among the token's experts."""
    rows, places = [], []
    for expert in range(num_experts):
        for (x, _), index in zip(leaves, indices, strict=True):
            position, token = torch.where(index.t() == expert)
            rows.append(x[token])
            places.append((token, position))
    return rows, places


def _all_rows(num_experts: int, leaves: Any, indices: list[Tensor]) -> Any:
    """The same, with all rows of a batch taken at once."""
    rows: list[Any] = [None] * (num_experts * len(leaves))
    places: list[Any] = [None] * len(rows)
    for batch, ((x, _), index) in enumerate(zip(leaves, indices, strict=True)):
        expert, pair = torch.sort(index.reshape(-1))
        counts = torch.bincount(expert, minlength=num_experts).tolist()
        taken = x[pair // index.shape[1]].split(counts)
        for number, own in enumerate(pair.split(counts)):
            rows[number * len(leaves) + batch] = taken[number]
            places[number * len(leaves) + batch] = (own // index.shape[1], own % index.shape[1])
    return rows, places
