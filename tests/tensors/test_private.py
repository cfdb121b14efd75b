"""What lowtide takes each private symbol of torch and transformers to mean, on the smallest case that shows it.

Fails where torch changes a meaning. These are the tests to run first with a new version of torch
(lowtide/tensors/private.py); they need no accelerator and no second rank.
"""

from __future__ import annotations

import ast
import gc
import logging
import sys
import tomllib
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from lowtide.errors import ConfigError
from lowtide.tensors import private
from tests.support import processes

_HERE = Path(__file__)
_ROOT = _HERE.parents[2]


def leaf() -> Tensor:
    return torch.ones(4, requires_grad=True)


class Counting(private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


# -- the file itself ---------------------------------------------------------------------------------------------------


def test_each_name_has_a_test() -> None:
    tree = ast.parse(Path(private.__file__).read_text())
    assigned = [t for n in tree.body if isinstance(n, ast.AnnAssign | ast.Assign) for t in _targets(n)]
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {*assigned, *functions, *private.__all__}
    public = {name for name in names if not name.startswith("_")}
    used = {
        node.attr
        for node in ast.walk(ast.parse(_HERE.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "private"
    }
    assert public - {"Hooks"} <= used


def _targets(node: ast.AnnAssign | ast.Assign) -> list[str]:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_each_assigned_name_has_a_line_of_its_own() -> None:
    body = ast.parse(Path(private.__file__).read_text()).body
    for node, following in zip(body, [*body[1:], None]):
        for name in _targets(node) if isinstance(node, ast.AnnAssign | ast.Assign) else ():
            if name.startswith("_") or name == "Hooks":
                continue
            has_line = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert has_line, f"{name} says nothing of itself"


def test_find_names_what_is_missing() -> None:
    assert private.find("torch.autograd.graph") is torch.autograd.graph
    with pytest.raises(ConfigError) as raised:
        private.find("torch._C._no_such_thing")
    assert str(raised.value) == (
        f"lowtide: torch {torch.__version__} does not have what lowtide needs of it: torch._C._no_such_thing; lowtide "
        "was tested with torch 2.11 to 2.15: install one of these"
    )
    assert str(private.missing("x")) == str(raised.value).replace("torch._C._no_such_thing", "x")


@pytest.mark.parametrize(
    ("without", "named"),
    [
        ("del torch._C._current_graph_task_id", "torch._C._current_graph_task_id"),
        ("import torch.utils._pytree as p; del p.tree_leaves", "cannot import name 'tree_leaves'"),
        ("import torch.nn as nn; nn.Module.__init__ = lambda self: None", "_parameters of torch.nn.Module"),
    ],
)
def test_a_torch_without_one_is_refused_at_import(without: str, named: str, tmp_path: Path) -> None:
    code = f"""
import sys, torch
for loaded in [name for name in sys.modules if name.split(".")[0] == "lowtide"]:
    del sys.modules[loaded]  # a fork has it
{without}
try:
    import lowtide.tensors.private
except ValueError as error:
    print(type(error).__name__, error)
"""
    status, out, err = processes.program(code, tmp_path)
    assert status == 0, err
    assert out.startswith(f"ConfigError lowtide: torch {torch.__version__} does not have")
    assert named in out


def test_the_versions_are_those_of_the_package() -> None:
    """One place in the code, and what a reader sees says the same."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={private.TESTED[0]}" in project["dependencies"]
    words = f"tested with {private.TESTED[0]} to {private.TESTED[-1]}"
    assert words in (_ROOT / "pyproject.toml").read_text()
    assert f"torch {private.TESTED[0]} to {private.TESTED[-1]}" in (_ROOT / "README.md").read_text()
    assert ".".join(torch.__version__.split(".")[:2]) in private.TESTED, "run these tests, and add this version"


# -- the backward pass that is running ---------------------------------------------------------------------------------


def test_the_running_backward() -> None:
    seen: list[Any] = []

    def note(gradients: Any) -> None:
        seen.append((private.current_graph_task_id(), private.current_autograd_node(), private.keeps_graph()))

    assert private.current_graph_task_id() == -1
    assert private.current_autograd_node() is None
    loss = (leaf() * 2).sum()
    loss.grad_fn.register_prehook(note)
    loss.grad_fn.next_functions[0][0].register_prehook(note)
    loss.backward(retain_graph=True)
    loss.backward()
    tasks, nodes, keeps = zip(*seen)
    assert tasks[0] == tasks[1] != tasks[2] == tasks[3]
    assert min(tasks) >= 0
    assert [type(node).__name__ for node in nodes] == ["SumBackward0", "MulBackward0"] * 2
    assert list(keeps) == [True, True, False, False]
    assert private.current_graph_task_id() == -1


def test_the_group_of_backward_passes_that_is_open() -> None:
    kind = getattr(torch.utils.checkpoint, "GraphExecGroup", None)
    assert private.current_graph_group() is None
    if kind is not None:
        with kind() as group:
            assert private.current_graph_group() is group
        assert private.current_graph_group() is None


def test_a_nested_backward_has_a_number_of_its_own() -> None:
    tasks = []

    def nested(gradient: Tensor) -> None:
        tasks.append(private.current_graph_task_id())
        with torch.enable_grad():
            inner = leaf() * 2
            inner.register_hook(lambda _: tasks.append(private.current_graph_task_id()))
            inner.sum().backward()
        tasks.append(private.current_graph_task_id())

    outer = leaf() * 2
    outer.register_hook(nested)
    outer.sum().backward()
    assert tasks[0] == tasks[2] != tasks[1]


def test_a_callback_runs_at_the_end_of_the_backward() -> None:
    order: list[str] = []
    first = leaf()
    loss = (first * 2).sum()
    loss.grad_fn.register_prehook(lambda _: private.queue_callback(lambda: order.append("end")))
    first.register_hook(lambda _: order.append("gradient"))
    loss.backward()
    assert order == ["gradient", "end"]
    with pytest.raises(RuntimeError, match="backward"):
        private.queue_callback(lambda: None)


def test_sequence_numbers_count_nodes() -> None:
    first = leaf()
    before = private.next_sequence_number()
    second = first * 2
    third = second + 1
    assert private.sequence_number(second.grad_fn) == before
    assert private.sequence_number(third.grad_fn) == before + 1
    assert private.next_sequence_number() == before + 2
    with torch.no_grad():
        first * 2
    assert private.next_sequence_number() == before + 2
    assert private.sequence_number(second.grad_fn.next_functions[0][0]) == 2**64 - 1


# -- saved-tensor hooks ------------------------------------------------------------------------------------------------


def test_hooks_on_and_off() -> None:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    assert private.top_saved_tensors_hooks() is None
    with saved_tensors_hooks(pack, pack):
        assert private.top_saved_tensors_hooks() == (pack, pack)
        private.pop_saved_tensors_hooks()
        assert private.top_saved_tensors_hooks() is None
        private.push_saved_tensors_hooks(pack, pack)
        assert private.top_saved_tensors_hooks() == (pack, pack)
    assert private.top_saved_tensors_hooks() is None


def test_hooks_can_be_forbidden() -> None:
    assert private.are_saved_tensors_hooks_enabled()
    with disable_saved_tensors_hooks("not here"):
        assert not private.are_saved_tensors_hooks_enabled()
    assert private.are_saved_tensors_hooks_enabled()


# -- tensors and storages ----------------------------------------------------------------------------------------------


def test_versions_count_writes_and_can_be_set_back() -> None:
    tensor = torch.zeros(4)
    view = tensor[:2]
    assert private.version_of(tensor) == 0
    view.add_(1)
    assert (private.version_of(tensor), private.version_of(view)) == (1, 1)
    assert private.version_of(tensor.detach()) == 1, "it shares the counter"
    tensor.data.add_(1)
    assert private.version_of(tensor) == 1, "`.data` does not"
    private.set_versions((tensor,), (0,))
    assert (private.version_of(tensor), private.version_of(view)) == (0, 0)
    with torch.inference_mode():
        unseen = torch.zeros(1)
    with pytest.raises(RuntimeError, match="Inference tensors do not track version"):
        private.version_of(unseen)


def test_a_negated_view_has_the_negative_bit_and_the_same_bytes() -> None:
    tensor = torch.ones(2)
    view = private.negated(tensor)
    assert view.is_neg() and not tensor.is_neg() and view.data_ptr() == tensor.data_ptr()
    assert torch.equal(view, -tensor) and view._is_view()


def test_autograd_compares_the_version() -> None:
    first = leaf()
    saved = first * 2
    loss = (saved * saved).sum()
    with torch.no_grad():
        saved.add_(1)
    private.set_versions((saved,), (0,))
    loss.backward()
    assert first.grad is not None


def test_storages_are_told_apart() -> None:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    assert private.storage_key(storage) == private.storage_key(tensor[1:].untyped_storage())
    assert private.storage_key(storage) == StorageWeakRef(storage).cdata
    empty = torch.zeros(0), torch.zeros(0)
    assert private.storage_key(empty[0].untyped_storage()) != private.storage_key(empty[1].untyped_storage())


def test_who_holds_a_storage_is_counted() -> None:
    tensor = torch.zeros(4)
    key = private.storage_key(tensor.untyped_storage())
    alone = private.storage_uses(key)
    view, array = tensor[1:], tensor.numpy()
    assert private.storage_uses(key) > alone
    del view, array
    gc.collect()
    assert private.storage_uses(key) == alone


def test_a_storage_is_found_while_it_lives() -> None:
    tensor = torch.zeros(4)
    weak = StorageWeakRef(tensor.untyped_storage())
    found = private.storage_at(weak.cdata)
    assert found is not None and private.storage_key(found) == weak.cdata
    assert found.data_ptr() == tensor.data_ptr()
    del found, tensor
    gc.collect()
    assert private.storage_at(weak.cdata) is None and weak.expired()


def test_views_and_their_base() -> None:
    tensor = torch.zeros(4)
    view = tensor.view(2, 2)[0]
    assert private.is_view(view) and private.base_of(view) is tensor
    assert not private.is_view(tensor) and private.base_of(tensor) is None
    part = torch.unsafe_chunk(tensor, 2)[0]
    assert not private.is_view(part), "unsafe_chunk gives no views"


def test_zeros_without_memory() -> None:
    zeros = torch._efficientzerotensor(4)
    assert private.is_zero_tensor(zeros)
    assert not private.is_zero_tensor(torch.zeros(4))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        tangent = forward_ad.unpack_dual(torch.cat([dual, torch.zeros(2)])).tangent
    assert tangent is not None and not private.is_zero_tensor(tangent)


def test_parts_of_sparse_tensors() -> None:
    twice = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))
    assert private.sparse_indices(twice).tolist() == [[1, 1]]
    assert private.sparse_values(twice).tolist() == [2.0, 3.0]
    with pytest.raises(RuntimeError, match="uncoalesced"):
        twice.indices()


def test_hooks_of_tensors() -> None:
    tensor = leaf()
    assert [getattr(tensor, name) for name in private.TENSOR_HOOKS] == [None, None]
    assert not private.gradient_hooks(tensor)
    tensor.register_hook(lambda gradient: None)
    handle = tensor.register_post_accumulate_grad_hook(lambda tensor: None)
    assert [len(getattr(tensor, name)) for name in private.TENSOR_HOOKS] == [1, 1]
    assert len(private.gradient_hooks(tensor)) == 1
    handle.remove()
    assert not private.gradient_hooks(tensor)


def test_parametrized_weights_that_are_remembered() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached():
        weight = linear.weight
        assert [found is weight for found in private.parametrized_weights().values()] == [True]
        private.parametrized_weights().clear()
        assert linear.weight is not weight
    assert private.parametrized_weights() == {}


# -- modes, dispatch, derivatives --------------------------------------------------------------------------------------


def test_modes_are_listed_and_passed_over() -> None:
    assert (private.num_function_modes(), private.num_dispatch_modes()) == (0, 0)
    with Passing() as outer, Passing() as inner, Counting() as counting:
        assert private.num_function_modes() == 2
        assert private.num_dispatch_modes() == 1
        assert private.function_modes() == [outer, inner]
        with torch.device("meta"):
            assert private.DeviceContext in map(type, private.function_modes())
        assert private.dispatch_modes() == [counting]
        torch.zeros(2)
        seen = len(counting.ops)
        assert seen
        with private.disable_current_modes():
            torch.zeros(2)
            assert private.num_dispatch_modes() == 0
        with private.DisableTorchDispatch():
            torch.zeros(2)
        assert len(counting.ops) == seen
        torch.zeros(2)
        assert len(counting.ops) == 2 * seen


def test_detach_shares_the_version_in_a_dispatch_mode() -> None:
    class Holds(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                alone = output.detach()
                with private.sharing_versions():
                    held.extend((alone, output.detach()))
            return output

    held: list[Tensor] = []
    with Holds():
        product = torch.ones(2, requires_grad=True) * 2
    product.add_(1)
    assert [private.version_of(tensor) for tensor in held] == [0, 1]


def test_fake_mode() -> None:
    assert private.current_fake_mode() is None
    with private.FakeTensorMode() as mode, Counting():
        assert private.current_fake_mode() is mode
    assert private.current_fake_mode() is None


def test_modes_are_put_on_without_being_entered() -> None:
    function_mode, dispatch_mode = Passing(), Counting()
    private.push_function_mode(function_mode)
    private.push_dispatch_mode(dispatch_mode)
    try:
        assert private.function_modes() == [function_mode] and private.dispatch_modes() == [dispatch_mode]
        torch.ones(1)
        assert dispatch_mode.ops == [torch.ops.aten.ones.default]
    finally:
        assert private.pop_dispatch_mode() is dispatch_mode
        assert private.pop_function_mode() is function_mode
    assert private.function_modes() == private.dispatch_modes() == []


def test_autocast_is_passed_over() -> None:
    square = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (square @ square).dtype is torch.bfloat16
        with private.DisableAutocast():
            assert (square @ square).dtype is torch.float32


def test_below_autograd_there_is_no_graph() -> None:
    first = leaf()
    with torch.enable_grad(), private.AutoDispatchBelowAutograd():
        out = first * 2
        assert torch.is_grad_enabled() and out.grad_fn is None and not out.requires_grad
    assert (first * 2).grad_fn is not None


def test_transforms_are_seen() -> None:
    seen: list[bool] = []

    def ask(tensor: Tensor) -> Tensor:
        seen.extend((private.are_transforms_active(), private.is_transformed(tensor)))
        return tensor.sum()

    assert not private.are_transforms_active()
    torch.func.grad(ask)(torch.ones(2))
    torch.func.vmap(ask)(torch.ones(2, 2))
    assert seen == [True] * 4
    assert not private.is_transformed(torch.ones(2))


def test_the_order_of_attention_backends() -> None:
    before = private.get_attention_order()
    assert len(before) > 1
    try:
        private.set_attention_order(before[::-1])
        assert private.get_attention_order() == before[::-1]
    finally:
        private.set_attention_order(before)
    assert private.get_attention_order() == before


def test_whether_subclasses_have_their_functions_called() -> None:
    before = private.get_function_state()
    with torch._C.DisableTorchFunctionSubclass():
        inside = private.get_function_state()
        assert inside != before
        private.set_function_state(before)
        assert type(torch.ones(2).as_subclass(nn.Buffer) + 1) is not nn.Buffer
        assert private.get_function_state() == before
        private.set_function_state(inside)
    assert private.get_function_state() == before


def test_precisions_are_those_that_are_public() -> None:
    libraries = {"cuda": (torch.backends.cudnn, torch.backends.cuda.matmul), "mkldnn": (torch.backends.mkldnn,) * 2}
    for name, (library, owner) in libraries.items():
        kinds = {"matmul": getattr(owner, "matmul", owner), "conv": library.conv, "rnn": library.rnn}
        for kind, holder in kinds.items():
            before = holder.fp32_precision
            try:
                for value in ("ieee", "tf32"):
                    holder.fp32_precision = value
                    assert private.fp32_precision(name, kind) == value == holder.fp32_precision
            finally:
                holder.fp32_precision = before


def test_how_cublas_sums() -> None:
    owner = torch.backends.cuda.matmul
    for kind, read in (
        ("fp16_reduced_precision_reduction", private.fp16_reduction),
        ("bf16_reduced_precision_reduction", private.bf16_reduction),
        ("fp16_accumulation", private.fp16_accumulation),
    ):
        before = read()
        try:
            setattr(owner, f"allow_{kind}", not getattr(owner, f"allow_{kind}"))
            assert read() != before
        finally:
            setattr(owner, f"allow_{kind}", before)
        assert read() == before


def test_forward_mode_is_seen() -> None:
    assert not private.is_forward_mode()
    with forward_ad.dual_level():
        assert private.is_forward_mode()
    assert not private.is_forward_mode()


def test_wrappers_break_down() -> None:
    sparse = torch.eye(2).to_sparse()
    assert not private.is_traceable_wrapper_subclass(torch.ones(2))
    assert not private.is_traceable_wrapper_subclass(sparse)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert private.is_traceable_wrapper_subclass(nested)


# -- trees, operators and fake tensors ---------------------------------------------------------------------------------


def test_trees() -> None:
    tree = {"b": [1, (2, None)], "a": 3}
    leaves, spec = private.tree_flatten(tree)
    assert leaves == private.tree_leaves(tree)
    assert [leaf for leaf in leaves if leaf is not None] == [1, 2, 3], "in the order in which they were put in"
    assert private.tree_unflatten(leaves, spec) == tree
    assert private.tree_map_only(int, lambda number: -number, tree) == {"b": [-1, (-2, None)], "a": -3}


def test_leaves_are_those_of_pytree() -> None:
    pair = namedtuple("pair", "first second")
    ones = torch.ones(2)
    containers = [(), [], {}, OrderedDict(b=ones, a=None), pair(ones, [1]), torch.Size((2, 3)), deque([ones, 2])]
    leaves = [ones, nn.Parameter(ones), None, 1, "word", {1, 2}, slice(3), private.FakeTensorMode]
    for tree in [*containers, *leaves, containers, {"x": (containers, {"y": leaves}), "a": [[[ones]]]}]:
        found, wanted = private.tree_leaves(tree), private.tree_flatten(tree)[0]
        assert len(found) == len(wanted)
        assert all(one is other or one == other for one, other in zip(found, wanted, strict=True)), tree


def test_operators_and_their_schemas() -> None:
    assert isinstance(torch.ops.aten.add_.Tensor, private.OpOverload)
    assert not isinstance(torch.ops.aten.add_, private.OpOverload)
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert [bool(argument.alias_info and argument.alias_info.is_write) for argument in schema.arguments] == [1, 0, 0]
    assert str(schema).startswith("aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1)")
    view = private.schema_of(torch.ops.aten.view.default)
    assert not view.is_mutable and view.returns[0].alias_info is not None


def test_the_grouped_product_is_what_a_mode_sees() -> None:
    rows = torch.ones(16, 16, dtype=torch.bfloat16)
    weights = torch.ones(2, 16, 16, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    with Counting() as counting:
        F.grouped_mm(rows, weights, offs=ends)
    assert private.grouped_mm in counting.ops


def test_fake_tensors_have_a_size_and_no_bytes() -> None:
    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake = torch.empty(2, 3)
        product = fake @ torch.ones(3, 4)
        with private.unset_fake_temporarily():
            assert type(torch.ones(1)) is Tensor
    assert type(product) is private.FakeTensor and product.size() == (2, 4)
    assert product.fake_mode is mode
    assert private.FakeTensor.__module__ == private.FAKE_TENSOR_MODULE
    assert fake.untyped_storage().nbytes() == 24


def test_why_an_operator_on_fake_tensors_fails() -> None:
    with private.FakeTensorMode():
        numbers = torch.ones(3)
        with pytest.raises(private.DataDependentOutputException):
            numbers[0].item()
        with pytest.raises(private.DynamicOutputShapeException):
            numbers.nonzero()
    reasons = (private.UnsupportedFakeTensorException, private.UnsupportedOperatorException)
    assert all(issubclass(reason, RuntimeError) for reason in reasons)


def test_the_logger_of_fake_tensors_has_the_name_of_their_module() -> None:
    module = sys.modules[private.FAKE_TENSOR_MODULE]
    assert module.log is logging.getLogger(private.FAKE_TENSOR_MODULE)


# -- modules and optimizers --------------------------------------------------------------------------------------------


def test_what_a_module_keeps() -> None:
    module = nn.BatchNorm1d(3)
    parameters, buffers, modules = (vars(module)[name] for name in private.MODULE_TABLES)
    assert private.own_parameters(module) is parameters and list(parameters) == ["weight", "bias"]
    assert private.own_buffers(module) is buffers and "running_mean" in buffers
    assert private.own_modules(module) is modules and modules == {}
    private.own_parameters(module)["weight"] = None
    assert module.weight is None


def test_hooks_of_modules() -> None:
    module = nn.Linear(2, 2)
    names = (*private.FORWARD_HOOKS, *private.FORWARD_HOOK_FLAGS, *private.BACKWARD_HOOKS)
    assert not private.has_hooks(module)
    assert [len(vars(module)[name]) for name in names] == [0] * 7
    module.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    assert private.has_hooks(module)
    module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    assert [len(vars(module)[name]) for name in names] == [1] * 7


def test_modes_of_torchs_own() -> None:
    assert private.FakeTensorMode.__module__.startswith(private.INTERNAL_MODES)
    assert not FlopCounterMode.__module__.startswith(private.INTERNAL_MODES)


def test_hooks_of_all_modules() -> None:
    register = nn.modules.module
    hooks = [
        getattr(register, f"register_module_{which}_hook")(print)
        for which in ("forward", "forward_pre", "full_backward", "full_backward_pre")
    ]
    try:
        assert [list(found.values()).count(print) for found in private.global_module_hooks()] == [1] * 4
        assert [list(found.values()).count(print) for found in private.GLOBAL_FORWARD_HOOKS[:2]] == [1] * 2
    finally:
        for hook in hooks:
            hook.remove()


def test_the_flat_weights_of_a_recurrent_module() -> None:
    module = nn.GRU(2, 3)
    weights = private.flat_weights(module)
    assert all(getattr(module, name) is each for name, each in zip(private.flat_names(module), weights, strict=True))
    assert [id(weight) for weight in weights] == [id(parameter) for parameter in module.parameters()]
    zeros = [torch.zeros_like(weight) for weight in weights]
    private.set_flat_weights(module, zeros)
    assert not module(torch.ones(1, 2))[0].any()
    private.set_flat_weights(module, weights)
    assert module(torch.ones(1, 2))[0].any()


def test_hooks_of_optimizers() -> None:
    optimizer = torch.optim.SGD([leaf()])
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.register_state_dict_pre_hook(lambda *_: None)
    optimizer.register_state_dict_post_hook(lambda *_: None)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    optimizer.register_load_state_dict_post_hook(lambda *_: None)
    assert [len(vars(optimizer)[name]) for name in private.OPTIMIZER_HOOKS] == [1, 1]
    assert [len(vars(optimizer)[name]) for name in private.OPTIMIZER_STATE_HOOKS] == [1, 1, 1, 1]


def test_what_runs_after_a_step() -> None:
    optimizer = torch.optim.SGD([leaf()])
    before = private.step_post_hooks(optimizer)
    own = optimizer.register_step_post_hook(lambda *_: None)
    everyones = register_optimizer_step_post_hook(lambda *_: None)
    try:
        assert len(private.step_post_hooks(optimizer)) == len(before) + 2
    finally:
        own.remove()
        everyones.remove()
    assert private.step_post_hooks(optimizer) == before


def test_schedulers_watch_the_step_of_an_optimizer(recwarn: pytest.WarningsRecorder) -> None:
    optimizer = torch.optim.SGD([leaf()])
    assert not private.is_wrapped_by_scheduler(optimizer.step)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert private.is_wrapped_by_scheduler(optimizer.step)
    private.tell_scheduler(optimizer)
    scheduler.step()
    assert not [str(w.message) for w in recwarn.list]
    torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([leaf()])).step()
    assert "before `optimizer.step()`" in str(recwarn.pop().message)


# -- the compiler ------------------------------------------------------------------------------------------------------


def test_compiled_functions_and_modules_are_known() -> None:
    def plain(tensor: Tensor) -> Tensor:
        return tensor * 2

    assert not private.is_compiled_function(plain)
    assert private.is_compiled_function(torch.compile(plain, backend="eager"))
    assert not private.is_compiled_function(torch.compiler.disable(plain))
    module = nn.Linear(2, 2)
    assert not private.is_compiled_module(module)
    module.compile(backend="eager")
    assert private.is_compiled_module(module)


def test_a_compiled_module_is_told_from_its_wrapper_and_each_graph_has_a_node_of_its_own() -> None:
    before, module = private.num_compiled_graphs(), nn.Linear(2, 2)
    assert not private.is_wrapper_of_compiled(module)
    wrapper: Any = torch.compile(module, backend="aot_eager")
    assert private.is_wrapper_of_compiled(wrapper)
    assert private.inside_wrapper_of_compiled(wrapper) is module

    def double(tensor: Tensor) -> Tensor:
        return tensor.sin() * 2

    assert private.original_of_compiled(torch.compile(double, backend="eager")) is double
    compiled: Any = torch.compile(double, backend="aot_eager", dynamic=False)
    outputs = [compiled(torch.ones(rows, requires_grad=True)) for rows in (2, 2, 3)]
    nodes = [type(output.grad_fn) for output in outputs]
    assert {node.__name__ for node in nodes} == {private.COMPILED_NODE}
    assert nodes[0] is nodes[1]
    assert nodes[0] is not nodes[2]
    assert private.num_compiled_graphs() == before + 2


def test_allocations_are_noted_in_their_order() -> None:
    assert private.begin_counting_allocations()
    assert not private.begin_counting_allocations()
    one = torch.empty(1000)
    two = torch.empty(2000)
    del one, two
    threads = private.end_counting_allocations("cpu")
    assert [4000, 8000, -4000, -8000] in threads


def test_the_call_of_a_compiled_module_can_be_wrapped() -> None:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    inner, seen = getattr(module, private.COMPILED_CALL), []

    def call(*args: Any) -> Any:
        seen.append(args)
        return inner(*args)

    vars(module)[private.COMPILED_CALL] = call
    module(torch.ones(1, 2))
    assert len(seen) == 1


def test_what_is_hidden_with_its_callees_is_never_compiled() -> None:
    from torch._dynamo.utils import counters

    def inner(tensor: Tensor) -> Tensor:
        return tensor.cos()

    def hidden(tensor: Tensor) -> Tensor:
        return inner(tensor)

    def program(tensor: Tensor) -> Tensor:
        return hidden(tensor.sin())

    private.hide_from_compiler(hidden, "hidden", with_callees=True)
    counters.clear()
    torch.compile(program, backend="eager")(torch.ones(2))
    # `program`, up to the call and after it; not `hidden`, and not `inner`.
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["frames"]["total"] <= 2


def test_code_under_the_compiler_is_seen() -> None:
    seen: list[bool] = []
    frames: list[tuple[str, str]] = []

    def ask() -> None:
        seen.append(bool(private.in_compiled_code()))
        frame: Any = sys._getframe()
        while frame is not None:
            frames.append((frame.f_code.co_name, frame.f_code.co_filename))
            frame = frame.f_back

    private.hide_from_compiler(ask, "asks")

    def program(tensor: Tensor) -> Tensor:
        ask()
        return tensor * 2

    program(torch.ones(2))
    assert seen == [False]
    frames.clear()
    torch.compile(program, backend="eager")(torch.ones(2))
    assert seen == [False, True]
    name, file = private.AROUND_COMPILED
    assert any(code == name and path.endswith(file) for code, path in frames)
    assert private.COMPILER_MODULE in sys.modules
    assert not private.in_compiled_code()


# -- process groups, FSDP2 and wrapped tensors -------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_store_of_a_process_group() -> None:
    store = private.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.usefixtures("alone")
def test_whether_replicas_exchange_gradients_in_another_way() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    replicated = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    assert not private.has_comm_hook(replicated)
    replicated.register_comm_hook(None, allreduce_hook)
    assert private.has_comm_hook(replicated)


def test_there_is_no_store_before_a_process_group() -> None:
    with pytest.raises(ValueError, match="process group"):
        private.default_store()


@pytest.mark.usefixtures("alone")
def test_collectives_by_the_name_of_a_group() -> None:
    name = dist.group.WORLD.group_name
    with Counting() as counting:
        assert private.lowest_of_ranks(torch.tensor(3), name).item() == 3
    names = [op.overloadpacket.__name__ for op in counting.ops if op.namespace == "_c10d_functional"]
    assert names == ["all_reduce", "wait_tensor"]
    assert private.functional_collectives.all_reduce.default.namespace == "_c10d_functional"


@pytest.mark.usefixtures("alone")
def test_what_collectives_of_torch_are_given_and_give() -> None:
    import torch.distributed._functional_collectives as functional

    seen = []

    class Sees(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if private.schema_of(func).name.partition("::")[2] in ("allreduce_", "all_reduce"):
                seen.append(private.ranks_of_group(args))
            if "allreduce_" in private.schema_of(func).name:
                return args[0], private.finished_work()
            return func(*args, **(kwargs or {}))

    with Sees():
        dist.all_reduce(torch.ones(2))
        functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert seen == [[0], [0]]


@pytest.mark.usefixtures("alone")
def test_what_a_functional_collective_gives_out() -> None:
    import torch.distributed._functional_collectives as functional

    pending = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert (type(pending).__module__, type(pending).__name__) == private.PENDING_COLLECTIVE
    assert private.is_traceable_wrapper_subclass(pending)
    pending.trigger_wait()


def test_torchs_runtime_carries_out_rows_that_it_is_given() -> None:
    from torch.distributed.pipelining import schedules

    asked: list[str] = []

    def stage(number: int) -> Any:
        asks = {f"get_{way}_recv_ops": lambda place: asked.append(f"ask {place}") or [] for way in ("fwd", "bwd")}
        gives = {f"get_{way}_send_ops": lambda place: [] for way in ("fwd", "bwd")}
        about = {"stage_index": number, "num_stages": 2, "is_last": number == 1, "group_rank": number, "group_size": 2}
        return SimpleNamespace(submod=nn.Identity(), clear_runtime_states=lambda: None, **about, **asks, **gives)

    first = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0I0", "0W0", "0RECV_B1", "0B1"]
    second = ["1RECV_F0", "1F0", "1RECV_F1", "(1F1;1B0)OVERLAP_F_B", "1SEND_B0", "1B1", "1SEND_B1"]
    for number, wanted in ((0, "0F0 0F1 ask 0 0I0 0W0 ask 1 0B1"), (1, "ask 0 1F0 ask 1 (1F1;1B0)OVERLAP_F_B 1B1")):
        asked.clear()
        runtime = private.make_schedule_runtime([stage(number)], 2, [first, second])
        for kind in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"):
            runtime.register_custom_function(getattr(schedules, kind), lambda action, _: asked.append(str(action)))
        runtime.step(return_outputs=False)
        assert " ".join(asked) == wanted
        assert runtime.fwd_recv_ops.keys() | runtime.bwd_recv_ops.keys() == {(number, 0), (number, 1)}


@pytest.mark.usefixtures("alone")
def test_what_runs_a_schedule_of_torchs_in_another_way_reads() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    stages = [PipelineStage(nn.Linear(2, 2), number, 2, torch.device("cpu")) for number in range(2)]
    schedule = ScheduleDualPipeV(stages, 3, loss_fn=loss)
    assert private.schedule_stages(schedule) == stages
    assert private.schedule_micro_batches(schedule) == 3
    assert private.schedule_loss(schedule) is loss
    given: list[Any] = []
    before = private.replace_step(schedule, lambda *args, **kwargs: given.append((args, kwargs)))
    schedule.step(torch.ones(3, 2), target=torch.zeros(3, 2), losses=[], return_outputs=False)
    ((arguments, keywords),) = given
    assert [len(each) for each in arguments[:3]] == [3, 3, 3]
    assert (arguments[3:], keywords) == (([], False), {"loss_kwargs": None})
    private.restore_step(schedule)
    private.restore_step(schedule)
    assert schedule._step_microbatches == before


@pytest.mark.usefixtures("alone")
def test_what_fsdp_keeps() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    states = [private.fsdp_state(module) for module in (model, model[0])]
    assert states[0] is not states[1]
    assert all(isinstance(getattr(state, private.FSDP_RESHARDS), bool) for state in states)
    model.set_reshard_after_forward(False, recurse=False)
    assert getattr(states[0], private.FSDP_RESHARDS) is False

    under_way: list[Any] = []
    model[1].register_forward_hook(lambda *_: under_way.append(private.fsdp_context(model).iter_forward_root))
    loss = model(torch.ones(1, 2)).sum()
    assert private.is_fsdp_root(model) and not private.is_fsdp_root(model[0])
    assert private.fsdp_context(model) is private.fsdp_context(model[0])
    assert under_way == [states[0]] and private.fsdp_context(model).iter_forward_root is None
    assert private.fsdp_context(model).is_last_backward is True
    loss.backward()

    node = model[0](torch.ones(1, 2, requires_grad=True)).grad_fn
    behind = {private.fsdp_module_of(following) for following, _ in node.next_functions if following is not None}
    assert behind == {None, "0"} and private.fsdp_module_of(node) is None

    assert [len(private.fsdp_groups(module)) for module in (model, model[0], model[2])] == [1, 1, 0]
    group = private.fsdp_groups(model[0])[0]
    assert getattr(group, private.FSDP_PARTIAL_SUM) is None
    assert group.mp_policy.reduce_dtype is None
    half = nn.Linear(2, 2)
    fully_shard(half, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    assert [each.mp_policy.reduce_dtype for each in private.fsdp_groups(half)] == [torch.float64]
    assert hasattr(group, "post_forward_mesh_info")
    gathered = [private.gathered_parameter(parameter) for parameter in group.fsdp_params]
    assert [tensor.size() for tensor in gathered if tensor is not None] == [(2, 2), (2,)]
    assert all(hasattr(parameter, "unsharded_accumulated_grad") for parameter in group.fsdp_params)


def test_a_module_that_fsdp_does_not_know() -> None:
    with pytest.raises(AttributeError):
        private.fsdp_state(nn.Linear(2, 2))
    assert private.gathered_parameter(nn.Parameter(torch.ones(1))) is None


def test_the_gradient_of_log_softmax() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output = torch.log_softmax(x, 1)
    outer = torch.arange(15.0).view(3, 5)
    output.backward(outer)
    assert x.grad is not None
    assert torch.equal(private.log_softmax_backward(outer, output.detach(), 1, torch.float32), x.grad)
    made = torch.empty(3, 5)
    assert private.log_softmax_backward_into(outer, output.detach(), 1, torch.float32, out=made) is made
    assert torch.equal(made, x.grad)


# -- transformers ------------------------------------------------------------------------------------------------------


def test_how_a_model_runs_its_experts() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    assert private.experts_implementation(model.config) == "eager"
    private.set_experts_implementation(model.config, "grouped_mm")
    assert private.experts_implementation(model.config) == "grouped_mm"
    assert model.config._experts_implementation == "grouped_mm", "what the model asks for"
    assert private.experts_implementation(nn.Linear(2, 2)) is None


def test_whether_a_loss_function_was_set() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plain, before = model.loss_function, set(vars(model))
    assert not private.has_loss_function(model)
    model.loss_function = print
    assert private.has_loss_function(model) and model.loss_function is print
    private.forget_loss_function(model)
    assert model.loss_function is plain and set(vars(model)) == before


def test_number_in_graph() -> None:
    x = torch.ones(2, requires_grad=True)
    assert float(private.number_in_graph((x / 3).grad_fn)) == 3
    assert private.number_in_graph(x.exp().grad_fn) is None


def test_await_unshard() -> None:
    asked: list[object] = []
    private.await_unshard(SimpleNamespace(_assert_unsharded=asked.append), "stage")
    assert asked == ["stage"]
    assert callable(torch.distributed.pipelining.schedules._PipelineScheduleRuntime._assert_unsharded)


def test_what_is_made_past_transforms_is_plain() -> None:
    made = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        made.append(torch.zeros(2))
        with private.DisableFuncTorch():
            made.append(torch.zeros(2))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert [private.is_transformed(each) for each in made] == [True, False]
