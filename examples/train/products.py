"""Products of layers that ranks share, in a model whose parameters are dealt to ranks, and in stages of a pipeline.

What: `shard` cuts products over the dimension `product` of a mesh, by `parallelize_module` and by the plan that
transformers has for the model (`base_model_tp_plan`); over the other dimensions FSDP2 deals all parameters out, with
`hsdp` to the ranks of one replica. What that plan names and torch has no style for (experts) is refused by name. A
parameter that two modules share, and an embedding or head whose words do not divide, stays whole on each rank.
`cut_stages` leaves each rank its heads of attention, and its columns and rows of the dense MLPs. These blocks gather
the sequence where they begin, and scatter their sums where they end; all else sees the rank's own part of it.
Cost: all ranks build the whole model on the CPU first. Shards reduce gradients after each micro-batch, since keeping
them whole would take the memory that was saved. In stages two gathers and two scatters in each layer and direction.
Not covered: sequence parallelism of shards; in stages attention that needs a mask; dropout inside the cut blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, parallel

from examples.train.ranks import PRODUCTS, SAME_LAYERS, Layout
from lowtide.config.run import RunConfig
from lowtide.errors import ConfigError
from lowtide.pipeline.gradients import elements_of
from lowtide.profiling.layers import find_layers
from lowtide.tensors.ranks import ALONE, gather

_STYLES: Mapping[str, tuple[str, parallel.ParallelStyle]] = {
    "colwise": ("out_features", parallel.ColwiseParallel()),
    "colwise_gather_output": ("out_features", parallel.ColwiseParallel(output_layouts=Replicate())),
    "colwise_rep": ("out_features", parallel.ColwiseParallel(output_layouts=Replicate())),
    "embedding_rowwise": ("num_embeddings", parallel.RowwiseParallel(input_layouts=Replicate())),
    "rowwise": ("in_features", parallel.RowwiseParallel()),
    "rowwise_rep": ("in_features", parallel.RowwiseParallel(input_layouts=Replicate())),
    "rowwise_split_input": ("in_features", parallel.RowwiseParallel(input_layouts=Replicate())),
    # Each rank has the norm, and runs it on its own heads (dimension 2); its gradient is summed over all of them.
    "replicated_with_grad_allreduce": ("", parallel.SequenceParallel(sequence_dim=2, use_local_output=True)),
}
"""What transformers calls a way to cut a module: the size that is cut, and torch's style for it."""
_BETWEEN = ("colwise", "rowwise")
"""What leaves the activations of a block cut."""
_OF_WORDS = ("embedding_rowwise", "colwise_gather_output", "colwise_rep")
_ROUNDING = 1e-3
"""Two sums of the same numbers in other orders differ by less, relative to the largest element."""
_COLUMNS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")
SEQUENCE = 1
"""The dimension of tokens in a hidden state."""
_gather: Any = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
_scatter: Any = getattr(functional, "reduce_scatter_single_autograd", None) or functional.reduce_scatter_tensor_autograd


@dataclass(frozen=True)
class _Cut:
    """Products of `model` that `size` ranks share, as `key` of the run file says. Its methods raise `ConfigError`."""

    run: RunConfig
    key: str
    model: Any
    size: int

    def fail(self, message: str) -> NoReturn:
        self.run.fail(self.key, f"'{self.key}' is {self.size}, but {message}")

    def check_heads(self) -> None:
        config = self.model.config.get_text_config()
        for key in ("num_attention_heads", "num_key_value_heads"):
            num = getattr(config, key, None)
            if num is not None and num % self.size:
                self.fail(f"'model.{key}' is {num}, and a head is not cut; choose a divisor")

    def check_width(self, name: str, width: int) -> None:
        if width % self.size:
            self.fail(f"'{name}' has {width} features, which do not divide by that; choose a divisor")

    def check_draws(self, block: nn.Module, name: str) -> None:
        """Ranks that share products draw alike, so heads of different ranks would have the same masks."""
        for inner, module in block.named_modules():
            for key, value in vars(module).items():
                is_share = key == "p" if isinstance(module, nn.Dropout) else "drop" in key
                if is_share and isinstance(value, float) and value > 0:
                    place = ".".join(filter(None, (name, inner, key)))
                    self.fail(f"'{place}' is {value}: each rank would draw the same mask for its part; set it to 0")


def shard(run: RunConfig, model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Deal the model out as the run file says, on the run's device. Raises `ConfigError` for a model that cannot be cut
    so."""
    assert run.parallel is not None
    sizes = tuple(layout.sizes[name] for name in SAME_LAYERS)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=SAME_LAYERS)
    if (size := mesh["product"].size()) > 1:
        _cut_by_plan(_Cut(run, "parallel.tensor", model, size), mesh["product"])
    dealt_over = mesh["replica", "text"] if run.parallel.shard == "hsdp" else mesh["text"]
    for name in find_layers(model):
        fully_shard(model.get_submodule(name), mesh=dealt_over)
    fully_shard(model, mesh=dealt_over)


def _cut_by_plan(cut: _Cut, mesh: DeviceMesh) -> None:
    model = cut.model
    plan: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not plan:
        kind = type(model).__name__
        cut.fail(f"transformers has no plan (base_model_tp_plan) of what of {kind} is cut; leave it out")
    cut.check_heads()
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    parts = {**dict(model.named_modules()), **dict(model.named_parameters(remove_duplicate=False))}
    for pattern, style in plan.items():
        is_meant = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        for name, part in parts.items():
            if not is_meant(name):
                continue
            if style not in _STYLES or isinstance(part, nn.Parameter):
                cut.fail(f"transformers cuts '{name}' as '{style}', which is not covered in this version; leave it out")
            block = name.rpartition(".")[0]
            if style in _BETWEEN and block:
                cut.check_draws(model.get_submodule(block), block)
            cut_size, how = _STYLES[style]
            width = getattr(part, cut_size, 0)
            if style not in _OF_WORDS:
                cut.check_width(name, width)
            if not width % cut.size and all(owners[id(parameter)] == 1 for parameter in part.parameters()):
                # All ranks have the same weights already.
                parallel.parallelize_module(model, mesh, {name: how}, src_data_rank=None)


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


def cut_stages(run: RunConfig, model: Any, stages: Iterable[Any], layout: Layout) -> None:
    """Cut the stages of this rank, whose layers are those of `model`, where ranks share products. Raises `ConfigError`
    for a model that cannot be cut so."""
    size, group = layout.sizes["product"], layout.group(PRODUCTS)
    if size == 1:
        return
    cut = _Cut(run, "train.tensor_parallel", model, size)
    cut.check_heads()
    attention = model.config._attn_implementation
    if attention != "sdpa":
        cut.fail(f"attention runs by '{attention}', whose mask is for the tokens of a rank; use sdpa")

    def count_all_tokens(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The model would count positions by its part of the sequence."""
        given = next(kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None)
        places = torch.arange(size * given.shape[SEQUENCE], device=given.device)
        return args, {**kwargs, "position_ids": places.unsqueeze(0)}

    def gather_sequence(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A block gets all tokens."""
        hidden, *others = args or (kwargs.pop("hidden_states"),)
        return (_gather(hidden, SEQUENCE, group), *others), kwargs

    def scatter_sums(module: nn.Module, args: tuple, output: torch.Tensor) -> Any:
        """The sums over ranks, of the rank's own tokens."""
        return _scatter(output, "sum", SEQUENCE, group)

    for stage in stages:
        stage.model.register_forward_pre_hook(count_all_tokens, with_kwargs=True)
        for name, block in stage.named_modules():
            if not name.endswith((".self_attn", ".mlp")) or hasattr(block, "experts"):
                continue
            cut.check_draws(block, name)
            block.register_forward_pre_hook(gather_sequence, with_kwargs=True)
            for key, linear in block.named_children():
                if key in _COLUMNS or key in _ROWS:
                    _leave_own(linear, f"{name}.{key}", key in _ROWS, layout, cut)
                if key in _ROWS:
                    linear.register_forward_hook(scatter_sums)


def _leave_own(linear: Any, name: str, is_row: bool, layout: Layout, cut: _Cut) -> None:
    """Leave a linear its columns or rows."""
    if is_row and linear.bias is not None:
        cut.fail(f"'{name}' has a bias, which each rank would add; not covered, leave it out")
    key = "in_features" if is_row else "out_features"
    width = getattr(linear, key)
    cut.check_width(name, width)
    for parameter in linear.parameters():
        # A copy, or the whole would stay in memory behind the part.
        parameter.data = parameter.data.chunk(cut.size, dim=1 if is_row else 0)[layout.product].clone()
        layout.parts[parameter] = PRODUCTS
    setattr(linear, key, width // cut.size)
