"""Tensor parallelism with the sequence split, in the stages of a pipeline: what of each layer a rank has.

What: `cut_stages` leaves each rank of a group its heads of attention, and its columns and rows of the dense MLPs, as
plain parameters. Between these blocks a rank has its part of each sequence; a block gathers the sequence where it
begins, and scatters its sums where it ends. Embedding, norms, routers, experts and head see the rank's own part, so
ranks that share products may share experts too. What passes between stages is a part of the sequence.
Gradients: a parameter that all ranks of the group have gets the gradient of a part on each, and `sum_gradients` adds
these up once a step. The losses are those of one process up to rounding.
Cost: two gathers and two scatters in each layer and direction; embedding, head and routers are whole on each rank.
Not covered: kinds of models that `cut` does not know, attention that needs a mask, dropout inside the cut blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn import functional as functional_nn
from transformers.loss.loss_utils import ForCausalLMLoss

from examples.train.ranks import Ranks
from examples.train.shards import check_draws, check_heads
from lowtide.config.run import RunConfig
from lowtide.loss.attach import SlicedLoss

_COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")
_SEQUENCE = 1
"""The dimension of tokens in a hidden state."""
_NONE = -100
"""The target of the last token."""
_gather: Any = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_scatter: Any = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd


def ranks_of_a_stage(run: RunConfig) -> int:
    """How many ranks of a pipeline have the same stages."""
    return max(run.train.tensor_parallel, run.train.expert_parallel)


def check_tensor(run: RunConfig) -> None:
    """Raises `ConfigError` for a layout that does not exist, and for a section 'parallel' that says another one. For
    runs with a pipeline."""
    size, experts = run.train.tensor_parallel, run.train.expert_parallel

    def fail(message: str) -> NoReturn:
        run.fail("train.tensor_parallel", f"'train.tensor_parallel' is {size}, {message}")

    if run.data.sequence_length % size:
        fail(f"and 'data.sequence_length' {run.data.sequence_length} does not divide by it; choose a divisor")
    if experts > 1 and experts % size:
        fail(f"and 'train.expert_parallel' {experts} is no multiple of it; each rank has a part of the tokens then")
    if run.parallel is None:
        return
    assert run.pipeline is not None
    here = {"tensor": size, "pipeline": run.pipeline.stages, "expert": experts, "context": 1}
    for key, number in here.items():
        written = getattr(run.parallel, key)
        if written not in (None, number):
            why = "the trainer has no context parallelism" if key == "context" else f"this run has {number}"
            run.fail(f"parallel.{key}", f"'parallel.{key}' is {written}, and {why}; take it out, or plan another file")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """The parts of one rank."""

    rank: int
    """Among the ranks that share its products."""
    num_ranks: int
    replicas: Any
    """The ranks of the same stages that have the same parts, and other text; None where there is no other."""
    together: Any
    """All ranks of the same stages."""
    cut: frozenset[nn.Parameter]
    """The parameters of which each rank that shares products has a part."""

    def own_part(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T / ranks)."""
        return tokens.chunk(self.num_ranks, dim=_SEQUENCE)[self.rank]

    def loss_function(self, *, may_slice: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Of the logits of the own part and of all tokens: what that part adds to the mean of all tokens."""
        loss: Any = SlicedLoss(ForCausalLMLoss, shifts=True) if may_slice else ForCausalLMLoss

        def part(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            following = self.own_part(functional_nn.pad(tokens, (0, 1), value=_NONE)[:, 1:]).contiguous()
            num_targets = tokens.shape[0] * (tokens.shape[1] - 1)
            how: Any = {"num_items_in_batch": num_targets, "shift_labels": following, "ignore_index": _NONE}
            mean: torch.Tensor = loss(logits, tokens, logits.shape[-1], **how)
            return mean

        return part

    def average_gradients(self, parameters: Iterable[nn.Parameter], own: Collection[nn.Parameter]) -> None:
        """Make every gradient the mean over the texts that ranks of the same stages read; once a step. `own`: experts,
        whose gradients have the rows of all ranks already. Collective."""
        num_texts = dist.get_world_size(self.together) // self.num_ranks
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if parameter not in self.cut and parameter not in own:
                dist.all_reduce(parameter.grad, group=self.together)
            elif parameter in self.cut and self.replicas is not None:
                dist.all_reduce(parameter.grad, group=self.replicas)
            parameter.grad.div_(num_texts)


def cut_stages(run: RunConfig, model: Any, stages: Iterable[Any], ranks: Ranks) -> RankParts | None:
    """Cut the stages of this rank, whose layers are those of `model`; None where ranks share no products. Collective.
    Raises `ConfigError` for a model that cannot be cut so."""
    size, beside = run.train.tensor_parallel, ranks_of_a_stage(run)
    if size == 1:
        return None
    places = torch.arange(ranks.num_ranks).view(-1, size)  # a row: ranks that share products
    group, _ = dist.new_subgroups_by_enumeration(places.tolist())
    together, replicas, rank = group, None, ranks.rank % size
    if beside > size:
        together, _ = dist.new_subgroups_by_enumeration(places.view(-1, beside).tolist())
        replicas, _ = dist.new_subgroups_by_enumeration(places.view(-1, beside // size, size).mT.flatten(0, 1).tolist())
    cut: list[nn.Parameter] = []

    def fail(message: str) -> NoReturn:
        run.fail("train.tensor_parallel", f"'train.tensor_parallel' is {size}, but {message}")

    check_heads(model, size, fail)
    if model.config._attn_implementation != "sdpa":
        fail(
            f"attention runs by '{model.config._attn_implementation}', whose mask is for the tokens of a rank; use sdpa"
        )
    for stage in stages:
        names = {module: name for name, module in stage.named_modules()}
        stage.model.register_forward_pre_hook(_counting_all_tokens(size), with_kwargs=True)
        for layer in stage.model.layers:
            for block in (layer.self_attn, layer.mlp):
                children = dict(block.named_children())
                if "experts" in children:
                    continue
                check_draws(stage, f"{names[block]}.", fail)
                block.register_forward_pre_hook(_gathering(group), with_kwargs=True)
                for name, child in children.items():
                    if name in _COLUMNS or name in _ROWS:
                        cut += _cut(child, names[child], name in _ROWS, (rank, size), fail)
                    if name in _ROWS:
                        child.register_forward_hook(_scattering(group))
    return RankParts(rank=rank, num_ranks=size, replicas=replicas, together=together, cut=frozenset(cut))


def _cut(
    linear: Any, name: str, is_row: bool, place: tuple[int, int], fail: Callable[[str], NoReturn]
) -> list[nn.Parameter]:
    """Leave a linear its columns or rows."""
    rank, size = place
    if is_row and linear.bias is not None:
        fail(f"'{name}' has a bias, which each rank would add; not covered, leave it out")
    width = linear.in_features if is_row else linear.out_features
    if width % size:
        fail(f"'{name}' has {width} features, which do not divide by that; choose a divisor")
    parameters = [parameter for parameter in (linear.weight, linear.bias) if parameter is not None]
    for parameter in parameters:
        # A copy, or the whole would stay in memory behind the part.
        parameter.data = parameter.data.chunk(size, dim=1 if is_row else 0)[rank].clone()
    if is_row:
        linear.in_features //= size
    else:
        linear.out_features //= size
    return parameters


def _counting_all_tokens(size: int) -> Callable[..., Any]:
    """A hook: the model would count positions by its part of the sequence."""

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("input_ids")
        given = kwargs["inputs_embeds"] if given is None else given
        places = torch.arange(size * given.shape[_SEQUENCE], device=given.device)
        return args, {**kwargs, "position_ids": places.unsqueeze(0)}

    return hook


def _gathering(group: Any) -> Callable[..., Any]:
    """A hook: a block gets all tokens."""

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if args:
            return (_gather(args[0], _SEQUENCE, group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": _gather(kwargs["hidden_states"], _SEQUENCE, group)}

    return hook


def _scattering(group: Any) -> Callable[..., Any]:
    """A hook: the sums over ranks, of the rank's own tokens."""

    def hook(module: nn.Module, args: tuple, output: torch.Tensor) -> Any:
        return _scatter(output, "sum", _SEQUENCE, group)

    return hook
