"""A run whose parameters are dealt to ranks: what of the model each rank has, by torch's own means.

What: over the dimension `product` of a mesh the products of each layer are cut, by `parallelize_module` and by the plan
that transformers has for the model (`base_model_tp_plan`). Over the others FSDP2 deals all parameters out
(`fully_shard`, each layer and the rest); with `hsdp` to the ranks of one replica.
What that plan names and torch has no style for (experts) is refused by name. A parameter that two modules share
(tied embeddings), and an embedding or head whose words do not divide, stays whole on each rank.
Cost: all ranks build the whole model on the CPU first. Gradients are reduced after each micro-batch, since keeping them
whole would take the memory that was saved. Not covered: sequence parallelism. Not yet measured on a GPU.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from examples.train.ranks import Layout
from lowtide.config.run import RunConfig
from lowtide.errors import ConfigError
from lowtide.pipeline.gradients import elements_of
from lowtide.profiling.layers import find_layers
from lowtide.tensors.ranks import ALONE, gather

_STYLES: Mapping[str, tuple[str, ParallelStyle]] = {
    "colwise": ("out_features", ColwiseParallel()),
    "colwise_gather_output": ("out_features", ColwiseParallel(output_layouts=Replicate())),
    "colwise_rep": ("out_features", ColwiseParallel(output_layouts=Replicate())),
    "embedding_rowwise": ("num_embeddings", RowwiseParallel(input_layouts=Replicate())),
    "rowwise": ("in_features", RowwiseParallel()),
    "rowwise_rep": ("in_features", RowwiseParallel(input_layouts=Replicate())),
    "rowwise_split_input": ("in_features", RowwiseParallel(input_layouts=Replicate())),
    # Each rank has the norm, and runs it on its own heads (dimension 2); its gradient is summed over all of them.
    "replicated_with_grad_allreduce": ("", SequenceParallel(sequence_dim=2, use_local_output=True)),
}
"""What transformers calls a way to cut a module: the size that is cut, and torch's style for it."""
_BETWEEN = ("colwise", "rowwise")
"""What leaves the activations of a block cut."""
_OF_WORDS = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")
_MESH = ("replica", "text", "product")
_ROUNDING = 1e-3
"""Two sums of the same numbers in other orders differ by less, relative to the largest element."""


def shard(run: RunConfig, model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Deal the model out as the run file says, on the run's device. Raises `ConfigError` for a model that cannot be cut
    so."""
    assert run.parallel is not None
    sizes = tuple(layout.sizes[name] for name in _MESH)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=_MESH)
    if mesh["product"].size() > 1:
        _cut(run, model, mesh["product"])
    dealt_over = mesh["replica", "text"] if run.parallel.shard == "hsdp" else mesh["text"]
    for name in find_layers(model):
        fully_shard(model.get_submodule(name), mesh=dealt_over)
    fully_shard(model, mesh=dealt_over)


def _cut(run: RunConfig, model: nn.Module, mesh: DeviceMesh) -> None:
    size = mesh.size()

    def fail(message: str) -> NoReturn:
        run.fail("parallel.tensor", f"'parallel.tensor' is {size}, but {message}")

    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        fail(f"transformers has no plan (base_model_tp_plan) of what of {type(model).__name__} is cut; leave it out")
    check_heads(model, size, fail)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    parts = {**dict(model.named_modules()), **dict(model.named_parameters(remove_duplicate=False))}
    for pattern, style in plan.items():
        is_meant = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        for name, part in parts.items():
            if not is_meant(name):
                continue
            if style not in _STYLES or isinstance(part, nn.Parameter):
                fail(f"transformers cuts '{name}' as '{style}', which is not covered in this version; leave it out")
            block = name.rpartition(".")[0]
            if style in _BETWEEN and block:
                check_draws(model.get_submodule(block), block, fail)
            cut_size, how = _STYLES[style]
            width = getattr(part, cut_size, 0)
            if width % size and style not in _OF_WORDS:
                fail(f"'{name}' has {width} features, which do not divide by that; choose a divisor")
            if not width % size and all(owners[id(parameter)] == 1 for parameter in part.parameters()):
                # All ranks have the same weights already.
                parallelize_module(model, mesh, {name: how}, src_data_rank=None)


def check_draws(block: nn.Module, name: str, fail: Callable[[str], NoReturn]) -> None:
    """Ranks that share products draw alike, so heads of different ranks would have the same masks."""
    for inner, module in block.named_modules():
        for key, value in vars(module).items():
            is_share = key == "p" if isinstance(module, nn.Dropout) else "drop" in key
            if is_share and isinstance(value, float) and value > 0:
                place = ".".join(filter(None, (name, inner, key)))
                fail(f"'{place}' is {value}: each rank would draw the same mask for its part; set it to 0")


def check_heads(model: Any, size: int, fail: Callable[[str], NoReturn]) -> None:
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        num = getattr(config, key, None)
        if num is not None and num % size:
            fail(f"'model.{key}' is {num}, and a head is not cut; choose a divisor")


def compare_gradients(model: nn.Module) -> None:
    """After the first backward: what ranks that share products have in common must have one gradient, up to rounding. A
    parameter that is used on a part of a layer on each of them has parts. Compares some elements of each. Collective;
    raises `ConfigError` on all."""
    own: dict[str, torch.Tensor] = {}
    group: Any = ALONE
    parameter: Any
    for name, parameter in model.named_parameters():
        names = parameter.device_mesh.mesh_dim_names
        if "product" in names and not parameter.placements[names.index("product")].is_replicate():
            group = parameter.device_mesh.get_group("product")
        elif parameter.grad is not None:
            own[name] = elements_of(parameter.grad).double().cpu()
    first, *others = gather(own, group)
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if not torch.allclose(value, other[name], rtol=0.0, atol=_ROUNDING * float(value.abs().max())):
                raise ConfigError(
                    "'parallel.tensor': a parameter is used on a part of a layer, and its gradients are parts; not "
                    f"covered, leave it out: '{name}' differs between rank 0 and rank {rank} of the ranks that share it"
                )
