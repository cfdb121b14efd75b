"""Expert parallelism: each rank of a group keeps a share of the experts of every MoE block, and of their gradients.

What: `split_experts(model, group=group)` puts a `SplitExperts` (expert_block.py) in the place of the experts of each
block. Of E experts on R ranks, rank r keeps those from r * E / R on. Everything else of the model stays on every rank,
which are data-parallel to each other: each has batches of its own. The parameters stay the objects that they are and
only become smaller, so an optimizer that has not stepped yet may be older than the split. (A graph may not: while one
from before the split holds on to these parameters, torch refuses the next backward for its shapes.)

The rule for gradients. A backward adds up the gradients of an expert over the batches of all ranks by itself, since all
their rows are there. For all other parameters each rank has the gradient of its own batch. `average_gradients`, called
once after the last micro-batch of a step, sums these over the ranks, and then divides every gradient by the number of
ranks. So the step is that of the mean of the ranks' losses.

Bits: those of one process that takes the batches of all ranks through the layers together (docs/pipelines.md), rows and
sums in the order of the ranks, division last. Beyond two ranks the backend chooses the order of the sums over ranks.

State. `model.state_dict()` has the keys that it had, and of the experts this rank's share; `full_state_dict` is that of
the whole model.

Cost: gradients of the parameters that all ranks have are exchanged after the backward, not during it; each bucket is
copied there and back. Before the split each rank needs main memory for all experts (or the model on `meta`).
Not covered: experts of other classes than `KNOWN`, which are refused by name, for they may compute something else;
numbers of experts that do not divide, FSDP2 or tensor parallelism on the same model, changing the model's experts
implementation afterwards, `copy.deepcopy` of the split model (torch copies no process group).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowtide.errors import ConfigError
from lowtide.pipeline.agree import facts_of_model, same_on_all
from lowtide.pipeline.expert_block import WEIGHTS, SplitExperts
from lowtide.runtime.session.forward_patch import patched_module
from lowtide.tensors.compiled import ForwardPatch
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import experts_implementation
from lowtide.tensors.ranks import any_rank

_BUCKET_BYTES = 25 << 20
"""Of gradients that are exchanged in one collective."""


def split_experts(model: nn.Module, *, group: Any, num_parts: int = 1) -> ExpertParallel:
    """Split the experts of `model` over the ranks of `group`, until `remove()`; every rank of it must call this.

    `group`: a process group; None: all ranks. `num_parts`: of a rank's experts in each block, whose rows travel while
    another part computes. Call it before `lowtide.apply` or `lowtide.optimize` and before wrapping
    the model. Raises ConfigError: no process group, a model without experts or with unknown ones, a number of experts
    that does not divide by that of the ranks and parts, a model that is split already.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "lowtide.pipeline.split_experts: there is no process group; start the ranks with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if dist.get_rank(group) < 0:
        raise ConfigError("lowtide.pipeline.split_experts: this rank is not in the group; pass the one that it is in")
    for name, module in model.named_modules():
        if isinstance(module, SplitExperts):
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}' is split already; call remove() on the handle of that split"
            )
    if patched_module(model) is not None:
        raise ConfigError(
            "lowtide.pipeline.split_experts: the model is under a lowtide plan already; split first, then apply the "
            "plan"
        )
    found = find_experts(model)
    same_on_all(facts_of_model(model) | {"num_parts": num_parts}, group=group, what="lowtide.pipeline.split_experts")
    for name, experts in found.items():
        _check(name, experts, dist.get_world_size(group), num_parts)
    return ExpertParallel(model, found, group=group, num_parts=num_parts)


class ExpertParallel:
    """A model whose experts are split. All methods are collective: every rank of the group calls them."""

    def __init__(self, model: nn.Module, found: Mapping[str, Any], *, group: Any, num_parts: int) -> None:
        self.model = model
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._found = found
        self._is_split = True
        self._with_shared: list[ForwardPatch] = []
        self._blocks = [self._split(name, experts, num_parts) for name, experts in found.items()]

    def _split(self, name: str, experts: Any, num_parts: int) -> SplitExperts:
        for weight in WEIGHTS:
            parameter = getattr(experts, weight)
            # A copy, or the whole would stay in memory behind the slice.
            parameter.data = self._own_slice(parameter.data).clone()
        is_grouped = _IMPLEMENTATIONS[experts_implementation(experts.config)]
        block: Any = self.model.get_submodule(name.rpartition(".")[0])
        split = SplitExperts(experts, group=self.group, is_grouped=is_grouped, num_parts=num_parts)
        self.model.set_submodule(name, split.train(experts.training))
        if _has_shared(block):
            around = functools.partial(_run_with_shared, block)
            self._with_shared.append(ForwardPatch(block, around, is_below=True))
        return split

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Of the parameters that hold this rank's experts."""
        return tuple(f"{name}.{weight}" for name in self._found for weight in WEIGHTS)

    def remove(self) -> None:
        """Put the model's own experts back, with the weights and gradients of all ranks."""
        if not self._is_split:
            return
        self._is_split = False
        while self._with_shared:
            self._with_shared.pop().close()
        for (name, experts), split in zip(self._found.items(), self._blocks, strict=True):
            for weight in WEIGHTS:
                parameter = getattr(split, weight)
                self._make_whole(parameter)
                setattr(experts, weight, parameter)
            self.model.set_submodule(name, experts.train(split.training))

    def _make_whole(self, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if any_rank(gradient is not None, self.group):
            gradient = self._gathered(torch.zeros_like(parameter) if gradient is None else gradient)
        parameter.data = self._gathered(parameter.data)
        parameter.grad = gradient

    # -- gradients -----------------------------------------------------------------------------------------------------

    def average_gradients(self, *, ranks: Any = None, replicas: Any = None) -> None:
        """Make every gradient that of the mean of all ranks' losses; once a step, after its last backward.

        `ranks`: all ranks that train this model, if they are more than the group that splits the experts. Then
        `replicas` are those that have the same experts as this one. Raises ConfigError for groups that do not fit
        together, and after `remove()`.
        """
        if not self._is_split:
            raise ConfigError("average_gradients: remove() was called on this handle; split the experts again")
        ranks = self.group if ranks is None else ranks
        num_ranks, num_replicas = dist.get_world_size(ranks), 1 if replicas is None else dist.get_world_size(replicas)
        if num_ranks != self.num_ranks * num_replicas:
            raise ConfigError(
                f"average_gradients: {num_ranks} ranks, of which {self.num_ranks} share the experts and {num_replicas} "
                f"have the same ones; {self.num_ranks} times {num_replicas} is {self.num_ranks * num_replicas}"
            )
        own, shared = self.own_parameters(), self.shared_parameters()
        _sum_over(shared, ranks)
        if num_replicas > 1:
            _sum_over(own, replicas)
        for parameter in (*shared, *own):
            if parameter.grad is not None:
                parameter.grad.div_(num_ranks)

    def gradient_norm(self) -> torch.Tensor:
        """The norm over the gradients of the whole model, with the experts of all ranks; the same on every rank."""
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            for parameters in (self.shared_parameters(), self.own_parameters())
        ]
        device = next(self.model.parameters()).device
        shared, own = (norm.to(device=device, dtype=torch.float64).square() for norm in norms)
        dist.all_reduce(own, group=self.group)
        return (shared + own).sqrt().to(torch.float32)

    def own_parameters(self) -> list[nn.Parameter]:
        """Of this rank's experts."""
        return [getattr(split, weight) for split in self._blocks for weight in WEIGHTS]

    def shared_parameters(self) -> list[nn.Parameter]:
        """All others, which every rank has."""
        own = {id(parameter) for parameter in self.own_parameters()}
        return [parameter for parameter in self.model.parameters() if id(parameter) not in own]

    # -- the whole model's state ---------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """That of the model as it was before the split, on every rank, with the experts of all ranks."""
        state = dict(self.model.state_dict())
        for name in self.parameter_names:
            state[name] = self._gathered(state[name])
        return state

    def _own_slice(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.num_ranks)[self.rank]

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(own) for _ in range(self.num_ranks)]
        dist.all_gather(parts, own.contiguous(), group=self.group)
        return torch.cat(parts)


def _check(name: str, experts: Any, num_ranks: int, num_parts: int) -> None:
    if num_parts < 1 or experts.num_experts % (num_ranks * num_parts):
        into = f" with num_parts={num_parts}" if num_parts != 1 else ""
        raise ConfigError(
            f"lowtide.pipeline.split_experts: '{name}' has {experts.num_experts} experts, which do not "
            f"divide by {num_ranks} ranks{into}; choose a group of as many ranks as divide them"
        )
    for weight in WEIGHTS:
        parameter = getattr(experts, weight)
        if not is_plain(parameter):
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}.{weight}' is a {type(parameter).__name__}; split the "
                "experts before anything else is done to the parameters"
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}.{weight}' has a gradient; split the experts before the "
                "first backward, or after zero_grad()"
            )


def _sum_over(parameters: Sequence[nn.Parameter], group: Any) -> None:
    """Each gradient becomes its sum over the ranks. One that no rank has stays absent; else absent ones are zeros."""
    if not parameters:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, is_there in zip(parameters, has_gradient.tolist(), strict=True):
        if is_there:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def average_over_replicas(replicated: nn.parallel.DistributedDataParallel) -> None:
    """Each gradient becomes the mean over the replicas: divided first, as DistributedDataParallel does."""
    trained = trained_by(replicated)
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad.div_(dist.get_world_size(replicated.process_group))
    _sum_over(trained, replicated.process_group)


def trained_by(replicated: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    """Whose gradients it averages."""
    ignored: set[str] = replicated.parameters_to_ignore
    return [p for name, p in replicated.module.named_parameters() if p.requires_grad and name not in ignored]


def averaging_bytes(parameters: Sequence[torch.Tensor]) -> int:
    """The most that `average_gradients` needs beside these parameters' gradients: the copy of one bucket."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return max((sum(each.nbytes for each in bucket) for bucket in _buckets(trained)), default=0)


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Runs of gradients of one type; a new one begins where the last is full."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        if not buckets or gradient.nbytes > room or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            room = _BUCKET_BYTES
        buckets[-1].append(gradient)
        room -= gradient.nbytes
    return buckets


# -- which modules hold experts ----------------------------------------------------------------------------------------


KNOWN = ("Qwen3MoeExperts", "DeepseekV3Experts", "MixtralExperts")
"""Classes whose experts were compared with ours to the bit."""
_IMPLEMENTATIONS = {None: False, "eager": False, "grouped_mm": True}
"""Whether the model runs them as one grouped product."""


def _with_shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    # Never called. A block with the same code as this function is known to add up what both kinds of experts give.
    whole = x
    shape = x.shape
    _, weights, index = self.gate(x)
    x = x.view(-1, x.shape[-1])
    x = self.experts(x, index, weights).view(*shape)
    x = x + self.shared_experts(whole)
    return x  # noqa: RET504 (the same code, to the last instruction)


def _has_shared(block: Any) -> bool:
    """Whether a block adds what its shared experts give as `_with_shared` does."""
    codes = [getattr(each, "__code__", None) for each in (type(block).forward, _with_shared)]
    found, known = ([each.co_code, each.co_names, each.co_consts] if each is not None else None for each in codes)
    return found == known and "forward" not in vars(block)


def _run_with_shared(block: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """The forward of such a block, whose shared experts run while rows travel."""
    if len(args) != 1 or kwargs:
        return forward(*args, **kwargs)
    (x,) = args
    _, weights, index = block.gate(x)
    routed, from_shared = block.experts(x.view(-1, x.shape[-1]), index, weights, block.shared_experts, x)
    return routed.view(*x.shape) + from_shared


def find_experts(model: nn.Module) -> dict[str, Any]:
    """The experts of all blocks, by name. Raises ConfigError: none is there, or one that is not known."""
    found = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] != "experts":
            continue
        kind = type(module).__name__
        if kind not in KNOWN or not type(module).__module__.startswith("transformers."):
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}' is of class {kind}; only the experts of transformers' "
                f"{', '.join(KNOWN)} can be split"
            )
        implementation = experts_implementation(module.config)
        if implementation not in _IMPLEMENTATIONS:
            raise ConfigError(
                f"lowtide.pipeline.split_experts: '{name}' runs by '{implementation}'; choose one that can be split: "
                'model.set_experts_implementation("grouped_mm") or "eager"'
            )
        found[name] = module
    if not found:
        raise ConfigError(
            f"lowtide.pipeline.split_experts: {type(model).__name__} has no experts; only the experts of transformers' "
            f"{', '.join(KNOWN)} can be split"
        )
    return found
