"""Every private symbol of torch and transformers that lowtide uses, each under one public name.

What: torch has no public way to say in which backward pass a thread is, what version a tensor has, or what hooks are
active. Code takes them from here; a test of the source forbids such names elsewhere. Each name says
what it gives, and which public way is missing. Each has a test of what it means (tests/tensors/test_private.py); they
were seen in torch 2.11 to 2.15 alike (`TESTED`).

At import each is looked up, and ConfigError names one that is missing. What belongs to a part of torch that most
programs never import (FSDP2, the compiler, process groups) or to transformers is looked up when it is asked for.

Cost: functions of torch are bound here as they are, so a call costs what it did, and less than a look-up through
`torch._C`. An attribute is read by `operator.attrgetter`: 15 ns more than to name it. Not covered: names of operators
(`aten._unsafe_view`, `_saved_self` of a node), which are data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from lowtide.errors import ConfigError

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Versions of torch that the tests of this file have passed with, oldest first, as pyproject.toml says them. The whole
suite runs with 2.13."""


def missing(symbol: str) -> ConfigError:
    """The error for a torch without `symbol`, a dotted path or the text of an ImportError."""
    return ConfigError(
        f"lowtide: torch {torch.__version__} does not have what lowtide needs of it: {symbol}; lowtide was tested with "
        f"torch {TESTED[0]} to {TESTED[-1]}: install one of these"
    )


try:
    # A small tree library. torch has no public one.
    # The class of an operator, as `torch.ops.aten.add.Tensor` is one.
    from torch._ops import OpOverload

    # Tensors with a size and no bytes, and the mode that makes them: what `torch.export` uses under its public surface.
    from torch._subclasses import FakeTensor, FakeTensorMode

    # Why an operator on fake tensors fails; and a context in which no tensor is fake.
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
        unset_fake_temporarily,
    )

    # Hooks of the `step` of every optimizer. They can be added publicly, not listed.
    from torch.optim.optimizer import _global_optimizer_post_hooks

    # The mode of `with torch.device(...)`.
    from torch.utils._device import DeviceContext

    # What sees each operator below autograd. torch documents it, in a module whose name is private.
    # `is_traceable_wrapper_subclass`: whether a tensor breaks down into plain ones by `__tensor_flatten__`.
    from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
    from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
    from torch.utils._pytree import tree_leaves as _registered_leaves
except ImportError as error:
    raise missing(str(error)) from error

__all__ = [
    "DataDependentOutputException",
    "DeviceContext",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
    "unset_fake_temporarily",
]


def find(path: str) -> Any:
    """What is at a dotted path that begins with `torch`. Raises ConfigError where this torch has nothing there."""
    value: Any = torch
    for name in path.split(".")[1:]:
        if not hasattr(value, name):
            raise missing(path)
        value = getattr(value, name)
    return value


def _reader(path: str) -> Callable[[Any], Any]:
    """A function that reads the last name of `path` from an object of the class before it."""
    find(path)
    return attrgetter(path.rpartition(".")[2])


# -- containers within containers --------------------------------------------------------------------------------------

_WALKS: dict[type, Callable[[Any], Iterable[Any]]] = {tuple: iter, list: iter, dict: dict.values}


def tree_leaves(tree: Any) -> list[Any]:
    """What torch's pytree gives, in its order. An observed step asks for every operator; tuples, lists and
    dictionaries, which nearly all containers are, take a third of pytree's time here."""
    leaves: list[Any] = []
    _add_leaves(tree, leaves)
    return leaves


def _add_leaves(tree: Any, leaves: list[Any]) -> None:
    walk = _WALKS.get(type(tree))
    if walk is not None:
        for inside in walk(tree):
            _add_leaves(inside, leaves)
    elif tree is None or isinstance(tree, torch.Tensor):
        leaves.append(tree)
    else:
        leaves += _registered_leaves(tree)


# -- the backward pass that is running ---------------------------------------------------------------------------------

current_graph_task_id: Callable[[], int] = find("torch._C._current_graph_task_id")
"""The number of the backward pass that this thread works for; -1 outside of any. No public way to ask."""

current_graph_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)
"""The `torch.utils.checkpoint.GraphExecGroup` that is open on this thread, whose backward passes are one; else None. No
public way to ask. Older versions of torch have no such thing."""

current_autograd_node: Callable[[], Any] = find("torch._C._current_autograd_node")
"""The autograd node whose backward runs on this thread; None where there is none. No public way to ask."""

keeps_graph: Callable[[], bool] = find("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the backward pass that is running was called with `retain_graph=True`; True outside of any."""

queue_callback: Callable[[Callable[[], None]], None] = find("torch.autograd.Variable._execution_engine.queue_callback")
"""Call a function once the backward pass that is running is over. RuntimeError outside of any. torch's own FSDP and DDP
end their backward so; no public way."""

next_sequence_number: Callable[[], int] = find("torch.autograd._get_sequence_nr")
"""The number that the next autograd node made on this thread will have. It counts up. No public way to ask."""


def sequence_number(node: Any) -> int:
    """The number of an autograd node: later ones have higher ones. An accumulator has 2**64 - 1."""
    number: int = node._sequence_nr()
    return number


# -- saved-tensor hooks ------------------------------------------------------------------------------------------------

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_top: Callable[[bool], Any] = find("torch._C._autograd._top_saved_tensors_default_hooks")
pop_saved_tensors_hooks: Callable[[], None] = find("torch._C._autograd._pop_saved_tensors_default_hooks")
"""Take the innermost saved-tensor hooks of this thread off. The public context manager can only take off its own."""

push_saved_tensors_hooks: Callable[..., None] = find("torch._C._autograd._push_saved_tensors_default_hooks")
"""Put a pair of saved-tensor hooks on top, as `torch.autograd.graph.saved_tensors_hooks` does on entry."""

are_saved_tensors_hooks_enabled: Callable[[], bool] = find("torch._C._autograd._saved_tensors_hooks_is_enabled")
"""Whether hooks may be set: not inside `torch.autograd.graph.disable_saved_tensors_hooks`. No public way to ask."""


def top_saved_tensors_hooks() -> Hooks | None:
    """The innermost saved-tensor hooks of this thread, or None. Only the innermost pair is ever called.

    No public way to ask.
    """
    hooks: Hooks | None = _top(True)  # True: also while something is traced
    return hooks


# -- tensors and storages ----------------------------------------------------------------------------------------------

version_of: Callable[[torch.Tensor], int] = _reader("torch.Tensor._version")
"""How often a tensor, or another view of it, was written to in place. RuntimeError for an inference tensor. torch's
notes on autograd name the attribute; there is no other way."""

negated: Callable[[torch.Tensor], torch.Tensor] = find("torch._neg_view")
"""A view with the negative bit. Public functions give one only of the imaginary part of a conjugate."""

set_versions: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = find(
    "torch._C._autograd._unsafe_set_version_counter"
)
"""Make these the versions of these tensors: for bytes that are again what they were. No public way to set one."""

storage_key: Callable[[torch.UntypedStorage], int] = _reader("torch.UntypedStorage._cdata")
"""What tells a storage from all others that live now, also an empty one, whose public `data_ptr()` is 0."""

storage_uses: Callable[[int], int] = find("torch._C._storage_Use_Count")
"""How many tensors, arrays and Python objects hold the storage with this key. No public way to ask."""

storage_at: Callable[[int], torch.UntypedStorage | None] = find("torch.UntypedStorage._new_with_weak_ptr")
"""The storage that a `StorageWeakRef` means (by its `cdata`), or None once it is gone. That public class can only say
whether it is gone."""

base_of: Callable[[torch.Tensor], torch.Tensor | None] = _reader("torch.Tensor._base")
"""The tensor that a view is a view of, or None for no view. torch's notes on views name the attribute."""

is_view: Callable[[torch.Tensor], bool] = find("torch.Tensor._is_view")
"""Whether autograd holds a tensor for a view of another. Public only through `_base`, which makes an object of it."""

is_zero_tensor: Callable[[torch.Tensor], bool] = find("torch.Tensor._is_zerotensor")
"""Whether a tensor is zeros without memory, as forward-mode derivatives make them. No public way to ask."""

sparse_indices: Callable[[torch.Tensor], torch.Tensor] = find("torch.Tensor._indices")
"""The indices of a COO tensor. The public `indices()` refuses one that is not coalesced."""

sparse_values: Callable[[torch.Tensor], torch.Tensor] = find("torch.Tensor._values")
"""The values of a COO tensor, as `sparse_indices`."""

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes of a leaf that hold its hooks: None, or an ordered mapping. Hooks can be added publicly, not listed."""


def gradient_hooks(tensor: torch.Tensor) -> Any:
    """The hooks that run when a gradient was accumulated in `tensor`: a mapping, or None."""
    return getattr(tensor, TENSOR_HOOKS[1], None)


INTERNAL_MODES = ("torch._", "torch.fx.")
"""How the modules begin whose modes are torch's own machinery (fake tensors, tracing), and no state of a model."""

find("torch.nn.utils.parametrize._cache")


def parametrized_weights() -> dict[Any, Any]:
    """What `torch.nn.utils.parametrize.cached()` remembers now: weights that were computed inside of it, with their
    graphs. No public way to ask."""
    found: dict[Any, Any] = parametrize._cache
    return found


# -- modes, dispatch, derivatives --------------------------------------------------------------------------------------

disable_current_modes: Callable[[], AbstractContextManager[Any]] = find(
    "torch.utils._python_dispatch._disable_current_modes"
)
"""A context in which no dispatch mode sees anything: what lowtide does itself is no part of the program."""

num_function_modes: Callable[[], int] = find("torch._C._len_torch_function_stack")
"""How many `TorchFunctionMode`s are active. No public way to ask."""

num_dispatch_modes: Callable[[], int] = find("torch._C._len_torch_dispatch_stack")
"""How many `TorchDispatchMode`s are active. No public way to ask."""

function_modes: Callable[[], list[Any]] = find("torch.overrides._get_current_function_mode_stack")
"""The `TorchFunctionMode`s that are active, outermost first. No public way to ask."""

get_function_state: Callable[[], Any] = find("torch._C._get_torch_function_state")
"""Whether `__torch_function__` of tensor subclasses is called on this thread: not inside of `backward()` of one."""

set_function_state: Callable[[Any], None] = find("torch._C._set_torch_function_state")
"""The other half of `get_function_state`."""

push_function_mode: Callable[[Any], None] = find("torch.overrides._push_mode")
"""Have a `TorchFunctionMode` see what this thread does, as `with` would, without touching the mode itself: it may be
active on another thread."""

pop_function_mode: Callable[[], Any] = find("torch.overrides._pop_mode")
"""Take the innermost `TorchFunctionMode` of this thread off."""

dispatch_modes: Callable[[], list[Any]] = find("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
"""The `TorchDispatchMode`s that are active, outermost first. No public way to ask."""

push_dispatch_mode: Callable[[Any], None] = find("torch.utils._python_dispatch._push_mode")
"""As `push_function_mode`, of a `TorchDispatchMode`."""

pop_dispatch_mode: Callable[[], Any] = find("torch.utils._python_dispatch._pop_mode")
"""As `pop_function_mode`, of a `TorchDispatchMode`."""

_share_versions: Callable[..., AbstractContextManager[Any]] = find("torch._C._SetExcludeDispatchKeyGuard")
_VIEWS_AND_WRITES = find("torch._C.DispatchKey.ADInplaceOrView")


def sharing_versions() -> AbstractContextManager[Any]:
    """A context in a dispatch mode in which `detach()` shares the version counter, as it does outside of one. torch's
    own selective checkpointing holds tensors so; no public way."""
    return _share_versions(_VIEWS_AND_WRITES, False)


_dispatch_mode: Callable[[Any], Any] = find("torch._C._get_dispatch_mode")
_FAKE_KEY = find("torch._C._TorchDispatchModeKey.FAKE")


def current_fake_mode() -> Any:
    """The `FakeTensorMode` that is active on this thread; None where there is none. No public way to ask."""
    return _dispatch_mode(_FAKE_KEY)


DisableTorchDispatch: Callable[[], AbstractContextManager[Any]] = find("torch._C._DisableTorchDispatch")
"""A context in which operators pass over `__torch_dispatch__`, at 0.3 us; `disable_current_modes` takes 3 us."""

DisableAutocast: Callable[[], AbstractContextManager[Any]] = find("torch._C._DisableAutocast")
"""A context in which operators pass over autocast, of whatever device. The public `autocast` is of one device."""

AutoDispatchBelowAutograd: Callable[[], AbstractContextManager[Any]] = find("torch._C._AutoDispatchBelowAutograd")
"""A context in which operators pass over autograd: no node, while gradients are on for code that asks."""

are_transforms_active: Callable[[], bool] = find("torch._C._are_functorch_transforms_active")
"""Whether this runs under a transform of `torch.func`. No public way to ask."""

DisableFuncTorch: Callable[[], AbstractContextManager[Any]] = find("torch._C._DisableFuncTorch")
"""A context in which no transform of `torch.func` sees anything: a tensor that is made there is a plain one."""

is_transformed: Callable[[torch.Tensor], bool] = find("torch._C._functorch.is_functorch_wrapped_tensor")
"""Whether `torch.func` has put something around this tensor, which then has no storage. No public way to ask."""

get_attention_order: Callable[[], list[int]] = find("torch._C._get_sdp_priority_order")
"""In which order torch tries its attention backends. `sdpa_kernel(..., set_priority=True)` sets it; no public way to
ask."""

set_attention_order: Callable[[list[int]], None] = find("torch._C._set_sdp_priority_order")
"""As `get_attention_order`. Publicly only as a context manager."""

fp32_precision: Callable[[str, str], str] = find("torch._C._get_fp32_precision_getter")
"""How exactly a library ("cuda", "mkldnn") computes a kind of operator ("matmul", "conv", "rnn") in fp32. Publicly
`torch.backends.cudnn.conv.fp32_precision`, which takes ten times as long."""

fp16_reduction: Callable[[], Any] = find("torch._C._get_cublas_allow_fp16_reduced_precision_reduction")
"""Whether cuBLAS may sum halves in halves, and split sums. Publicly `torch.backends.cuda.matmul`'s attributes, which
take ten times as long."""
bf16_reduction: Callable[[], Any] = find("torch._C._get_cublas_allow_bf16_reduced_precision_reduction")
"""As `fp16_reduction`, of bfloat16."""
fp16_accumulation: Callable[[], bool] = find("torch._C._get_cublas_allow_fp16_accumulation")
"""Whether cuBLAS may keep its running sums in halves. Publicly as `fp16_reduction`."""

find("torch.autograd.forward_ad._current_level")


def is_forward_mode() -> bool:
    """Whether this runs inside `torch.autograd.forward_ad.dual_level`. No public way to ask."""
    return forward_ad._current_level >= 0


# -- operators and fake tensors ----------------------------------------------------------------------------------------

find("torch.ops.aten.add.Tensor._schema")

functional_collectives: Any = find("torch.ops._c10d_functional")
"""The namespace of the collectives that give new tensors."""

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The schema of an operator (`OpOverload`): its arguments, and what it writes to. Publicly only as text, by `str`."""

grouped_mm: Any = find("torch.ops.aten._grouped_mm.default")
"""The operator below `torch.nn.functional.grouped_mm`, as a dispatch mode sees it."""

log_softmax_backward: Callable[[torch.Tensor, torch.Tensor, int, torch.dtype], torch.Tensor] = find(
    "torch.ops.aten._log_softmax_backward_data.default"
)
"""The gradient of the input of `log_softmax`, from that of its output and the output, as autograd computes it. Publicly
only by a graph of its own."""

log_softmax_backward_into: Callable[..., torch.Tensor] = find("torch.ops.aten._log_softmax_backward_data.out")
"""`log_softmax_backward` that writes to memory that is there, `out=`."""

FAKE_TENSOR_MODULE = "torch._subclasses.fake_tensor"
"""The module of `FakeTensor`, and the name of the logger that tells why an operator on fake tensors failed."""


# -- modules and optimizers --------------------------------------------------------------------------------------------

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold what it owns by name: ordinary mappings. The public methods give copies, in which
nothing can be exchanged."""

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
"""Attributes of a module that hold its forward hooks by number. Hooks can be added publicly, not listed."""

GLOBAL_FORWARD_HOOKS: list[dict[int, Any]] = [
    find(f"torch.nn.modules.module._global_forward_{name}")
    for name in ("hooks", "pre_hooks", "hooks_with_kwargs", "hooks_always_called")
]
"""The hooks that run in the forward of every module, by number, and which of them want what. They can be added
publicly, not listed."""

FORWARD_HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
"""Attributes of a module that say which of its forward hooks want what."""

BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
"""Attributes of a module that hold its backward hooks by number."""

OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that hold the hooks of its `step` by number."""
OPTIMIZER_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes of an optimizer that hold the hooks of its `state_dict` and `load_state_dict` by number."""

_GLOBAL_HOOKS = tuple(
    find(f"torch.nn.modules.module._global_{which}_hooks")
    for which in ("forward", "forward_pre", "backward", "backward_pre")
)


def global_module_hooks() -> tuple[Any, ...]:
    """The mappings of the hooks that run for every module of the process. Hooks can be added publicly, not listed."""
    return _GLOBAL_HOOKS


for _name in (*MODULE_TABLES, *FORWARD_HOOKS, *FORWARD_HOOK_FLAGS, *BACKWARD_HOOKS):
    if _name not in vars(nn.Module()):
        raise missing(f"{_name} of torch.nn.Module")

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(MODULE_TABLES[0])
"""The mapping in which a module itself keeps its parameters, to be written to."""

own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter(MODULE_TABLES[1])
"""The mapping in which a module itself keeps its buffers, to be written to."""

own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(MODULE_TABLES[2])
"""The mapping in which a module keeps its children. The public walks make a name for each, which takes most of their
time."""


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward or backward. No public way to ask."""
    return any(getattr(module, name) for name in (*FORWARD_HOOKS, *BACKWARD_HOOKS))


def flat_weights(module: nn.RNNBase) -> list[Any]:
    """The list in which a recurrent module keeps its parameters for its kernel, beside its attributes."""
    return module._flat_weights


def flat_names(module: nn.RNNBase) -> list[str]:
    """The names of the parameters in that list."""
    return module._flat_weights_names


def set_flat_weights(module: nn.RNNBase, weights: list[Any]) -> None:
    """As `flat_weights`. Publicly a module only makes the list anew from its parameters."""
    module._flat_weights = weights


# -- the compiler, which most programs never import --------------------------------------------------------------------

COMPILER_MODULE = "torch._dynamo.eval_frame"
"""The module that is imported once anything was compiled."""

AROUND_COMPILED = ("compile_wrapper", "_dynamo/eval_frame.py")
"""Name and end of the file of the function that stands around compiled code. (What is kept from the compiler runs
inside another one of that file.)"""

in_compiled_code: Callable[[], Any] = find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
"""Whether the compiler looks at the functions that are called now; anything true. The public `is_compiling` is only
true while it traces."""

find("torch._C._dynamo.eval_frame._FrameExecStrategy")
find("torch._C._dynamo.eval_frame._FrameAction.SKIP")
find("torch._C._dynamo.eval_frame.set_code_exec_strategy")


def hide_from_compiler(function: Any, why: str, *, with_callees: bool = False) -> None:
    """The compiler does not look into `function`, as with `torch.compiler.disable`; `why` is for its report.

    That one imports the compiler, and would hide from the function that compiled code is calling it. `with_callees`:
    neither does it look into what `function` calls.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why
    frames = torch._C._dynamo.eval_frame
    callees = frames._FrameAction.SKIP if with_callees else frames._FrameAction.DEFAULT
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, callees))


def is_compiled_function(function: Any) -> bool:
    """Whether `torch.compile` gave this function out. No public way to ask.

    `torch.compiler.disable` leaves the same mark, and beside it that nothing is compiled.
    """
    is_marked = isinstance(function, FunctionType) and "_torchdynamo_orig_callable" in function.__dict__
    return is_marked and not function.__dict__.get("_torchdynamo_disable", False)


def original_of_compiled(function: Any) -> Any:
    """What `torch.compile` was given, for a function that it gave out. No public way to ask."""
    return function._torchdynamo_orig_callable


COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that `module.compile()` sets: what runs in place of its own `__call__`, its hooks included."""


def is_compiled_module(module: nn.Module) -> bool:
    """Whether `module.compile()` was called. No public way to ask."""
    return getattr(module, COMPILED_CALL, None) is not None


def is_wrapper_of_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(...)` of a module gave this module out. No public way to ask."""
    found = sys.modules.get(COMPILER_MODULE)
    return found is not None and isinstance(module, found.OptimizedModule)


def inside_wrapper_of_compiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, for one that `is_wrapper_of_compiled`. No public way to ask."""
    found: nn.Module = module._orig_mod  # type: ignore[assignment]
    return found


def num_compiled_graphs() -> int:
    """How many graphs the compiler has made so far in this process. No public way to ask."""
    found = sys.modules.get("torch._dynamo.utils")
    return 0 if found is None else int(found.counters["stats"]["unique_graphs"])


find("torch.autograd._enable_profiler_legacy")
find("torch.autograd._disable_profiler_legacy")


def begin_counting_allocations() -> bool:
    """Have each allocation of this process noted until `end_counting_allocations`; False, and nothing is noted, while
    some profiler is on already. Torch's public profiler tells sums for operators, not what came after what."""
    if torch.autograd._profiler_enabled():
        return False
    states, config = torch.autograd.ProfilerState, torch.autograd.ProfilerConfig
    experimental = torch._C._profiler._ExperimentalConfig()
    torch.autograd._enable_profiler_legacy(config(states.CPU, False, True, False, False, False, experimental))
    return True


def end_counting_allocations(device_type: str) -> list[list[int]]:
    """Of each thread, the bytes of its allocations on `device_type` in their order; what was freed is negative."""
    read = "cpu_memory_usage" if device_type == "cpu" else "device_memory_usage"
    threads: Any = torch.autograd._disable_profiler_legacy()
    return [[getattr(each, read)() for each in events if each.kind() == "memory_alloc"] for events in threads]


COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the class of autograd's node for a compiled graph. Each graph has a class of its own."""


# -- process groups, FSDP2 and wrapped tensors -------------------------------------------------------------------------

PENDING_COLLECTIVE = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
"""Module and name of the class of what a functional collective gives out, which may still be under way."""


def default_store() -> Any:
    """The store that `init_process_group` made or was given. Raises ValueError before it. No public way to ask."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store()


def finished_work() -> Any:
    """What an operator of `torch.distributed` returns beside its tensors, of one that is over. No public way to make
    one."""
    future: Any = torch.futures.Future()
    future.set_result(None)
    return find("torch._C._distributed_c10d._create_work_from_future")(future).boxed()


def ranks_of_group(args: Sequence[Any]) -> list[int]:
    """The ranks of the process group that an operator of `torch.distributed` is given, among its arguments: the group
    itself, or, last of all, its name. No public way from a name to a group."""
    import torch.distributed as dist

    if isinstance(args[-1], str):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return dist.get_process_group_ranks(resolve(args[-1]))
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed))


def lowest_of_ranks(value: torch.Tensor, group_name: str) -> torch.Tensor:
    """The lowest `value` on any rank of the process group that torch knows by `group_name`; collective.

    Publicly a group is an object, which a recorded operator does not have.
    """
    reduced = functional_collectives.all_reduce(value, "min", group_name)
    result: torch.Tensor = functional_collectives.wait_tensor(reduced)
    return result


def fsdp_state(module: Any) -> Any:
    """What FSDP2 keeps for a module of `fully_shard`. AttributeError where this torch keeps it elsewhere."""
    return module._get_fsdp_state()


def fsdp_context(module: Any) -> Any:
    """What the modules of one FSDP2 model share: `iter_forward_root` is the module whose forward is under way, or None;
    `is_last_backward` can be set."""
    return fsdp_state(module)._state_ctx


def is_fsdp_root(module: Any) -> bool:
    """Whether FSDP2 takes this module for the outermost; it knows from the first forward on."""
    return bool(fsdp_state(module)._is_root)


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers for a module together; none for one without parameters."""
    state = fsdp_state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]


FSDP_PARTIAL_SUM = "_partial_reduce_output"
"""Attribute of a group of `fsdp_groups`: gradients summed over some ranks, that wait for the others; or None."""

_FSDP_NODE = "RegisterPostBackwardFunctionBackward"


def fsdp_module_of(node: Any) -> str | None:
    """The module on whose inputs FSDP2 has put this autograd node, to learn when the module's backward is over: its
    name, or its class where FSDP2 has no name for it. None for any other node. No public way to ask."""
    if type(node).__name__ != _FSDP_NODE:
        return None
    group = node.param_group
    return group._module_fqn or type(group.modules[0]).__name__


FSDP_RESHARDS = "_auto_reshard_after_forward"
"""Attribute of a `fsdp_state`: whether FSDP2 decides itself about resharding. It can be set publicly, not asked for."""


def gathered_parameter(parameter: Any) -> torch.Tensor | None:
    """The plain tensor that one parameter of a group is gathered into, once there is one."""
    return getattr(parameter, "_unsharded_param", None)


def has_comm_hook(replicated: Any) -> bool:
    """Whether somebody has DistributedDataParallel exchange gradients in another way (`register_comm_hook`)."""
    return bool(replicated._comm_hooks)


# -- torch's pipeline schedules ----------------------------------------------------------------------------------------
# What runs a schedule of torch's in another way has to read, and cannot publicly.


def schedule_stages(schedule: Any) -> list[Any]:
    """The stages of this rank."""
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def schedule_micro_batches(schedule: Any) -> int:
    """How many micro-batches a step has."""
    return int(schedule._n_microbatches)


def schedule_loss(schedule: Any) -> Any:
    """Its loss function."""
    return schedule._loss_fn


def replace_step(schedule: Any, step: Callable[..., None]) -> Callable[..., None]:
    """From now on `step` carries out what `schedule.step` and `schedule.eval` have split into micro-batches; gives what
    did so before."""
    before: Callable[..., None] = schedule._step_microbatches
    schedule._step_microbatches = step
    return before


def restore_step(schedule: Any) -> None:
    """Undo `replace_step`. Idempotent."""
    vars(schedule).pop("_step_microbatches", None)


def make_schedule_runtime(stages: list[Any], num_micro_batches: int, rows: Sequence[Sequence[str]]) -> Any:
    """Torch's runtime of pipeline schedules with these rows, one for each rank, sends and receives among their actions.

    Its stages are not asked for shapes, and its loss function is never called: whoever registers functions for all
    actions that compute does both.
    """
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    class Runtime(_PipelineScheduleRuntime):
        def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
            """Without the exchange in which torch's stages learn shapes."""

    def no_loss(*_: Any) -> Any:
        raise AssertionError("a function is registered for every forward")

    runtime = Runtime(stages, num_micro_batches, loss_fn=no_loss, scale_grads=False)
    actions = {rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")
    return runtime


def await_unshard(schedule: Any, stage: Any) -> None:
    """Wait until the parameters of a stage under FSDP2 are gathered; nothing for any other."""
    schedule._assert_unsharded(stage)


# -- transformers ------------------------------------------------------------------------------------------------------

_EXPERTS = "_experts_implementation_internal"


def experts_implementation(config: Any) -> str | None:
    """How a model of transformers runs its experts ("eager", "grouped_mm"); None for any other model's configuration.

    `PreTrainedModel.set_experts_implementation` is public, but goes by the model and not by the configurations inside.
    """
    return getattr(config, _EXPERTS, None)


def set_experts_implementation(config: Any, name: str) -> None:
    """As `experts_implementation`, which must not have been None."""
    setattr(config, _EXPERTS, name)


_LOSS = "_loss_function"


def has_loss_function(model: nn.Module) -> bool:
    """Whether somebody has set `loss_function` of a model of transformers; else it goes by the model's configuration.

    The property can be set and read publicly; not asked whether it was set, nor unset.
    """
    return _LOSS in vars(model)


def forget_loss_function(model: nn.Module) -> None:
    """As if `loss_function` had never been set."""
    delattr(model, _LOSS)


def number_in_graph(node: Any) -> torch.Tensor | None:
    """What a node of a graph for `x * number` or `x / number` has saved of the number; None for other nodes. Written
    down for people in torch's tutorial on autograd, but named as private."""
    number: torch.Tensor | None = getattr(node, "_saved_other", None)
    return number


# -- optimizers --------------------------------------------------------------------------------------------------------


def step_post_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What runs after each `step` of an optimizer, in this order. Hooks can be added publicly, not listed."""
    own = getattr(optimizer, OPTIMIZER_HOOKS[1])
    return [*own.values(), *_global_optimizer_post_hooks.values()]


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether a learning-rate scheduler has put a function of its own in place of an optimizer's `step`, to see whether
    it was called. No public way to ask."""
    return hasattr(step, "_wrapped_by_lr_sched")


def tell_scheduler(optimizer: Any) -> None:
    """What a scheduler's function around `step` would do: say that the optimizer has stepped."""
    optimizer._opt_called = True
