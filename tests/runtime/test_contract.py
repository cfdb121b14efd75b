"""The contract of the runtime, line by line. The number in a test's name is the line in the design's list.

Line 1 (the same bits for every model and plan) has a file of its own, `test_bit_equality.py`; so has line 8 under
thousands of schedules, `test_virtual_seeds.py`, and the thousand steps of line 6, `test_leaks.py`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.runtime.hooks import forward_pass as hooks
from lowtide.runtime.offload import scheduler as swap
from lowtide.runtime.offload import site as queue
from lowtide.runtime.recompute import region as recompute
from lowtide.runtime.recompute import saves
from lowtide.runtime.recompute import watch as state
from lowtide.runtime.saved import handle
from tests.support import two_ranks, zoo
from tests.support.grid import in_turn, one_of
from tests.support.virtual_engine import virtual

KEEP = {"keep": ["layers"], "swap": "all", "min_bytes": 0}
SWAP = {"swap": "all", "min_bytes": 0}
RECOMPUTE = {"recompute": "all", "min_bytes": 0}
BOTH = {"recompute": "all", "swap": "all", "min_bytes": 0}
FATES = {"keep": KEEP, "swap": SWAP, "recompute": RECOMPUTE, "both": BOTH}
every_fate = pytest.mark.parametrize("fate", FATES)
WIDTH = 8


class Block(nn.Module):
    """Linear, tanh and a product: an input, an own output and a view of a parameter are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x))
        return x + y * y.cos()


def small(block: Callable[[], nn.Module] = Block, num_layers: int = 3) -> zoo.Stack:
    torch.manual_seed(0)
    return zoo.Stack(*(block() for _ in range(num_layers)))


def rows(seed: int = 0, num_rows: int = 4, *, requires_grad: bool = False) -> Tensor:
    drawn = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return drawn.requires_grad_(requires_grad)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    wrong = [i for i, pair in enumerate(zip(got, want, strict=True)) if not zoo.same_bits(*pair)]
    assert not wrong, f"tensors {wrong} of {len(want)} differ"


VIRTUAL = virtual(0)


@contextlib.contextmanager
def under(model: nn.Module, memory: dict, engine: Any = VIRTUAL) -> Iterator[Any]:
    """A tide over the model. Afterwards nothing may be left of it: no byte on a slower tier, no handle."""
    handles_before = num_handles()
    if isinstance(model, zoo.Stack):  # blocks without parameters are layers only where the user says so
        memory = {**memory, "layers": [f"layers.{i}" for i in range(len(model.layers))]}
    tide = lowtide.apply(model, memory, engine=engine)
    try:
        yield tide
    finally:
        tide.remove()
    assert num_handles() == handles_before


# What lives as long as the tide itself; everything else belongs to graphs.
_OF_THE_TIDE = (
    "OffloadScheduler",
    "Window",
    "PlanContext",
    "Counters",
    "Ledger",
    "LayerTable",
    "SavedTensorEntry",
    "Watch",
    "Draws",
    "Known",
    "Tree",
    "Path",
    "SavedRole",
)
_OWNERS = {
    found
    for module in (handle, hooks, recompute, saves, state, swap, queue)
    for found in vars(module).values()
    if isinstance(found, type) and found.__module__ == module.__name__ and found.__name__ not in _OF_THE_TIDE
}


def num_handles() -> int:
    """Objects of the runtime that own activations, or lead to some."""
    gc.collect()
    return sum(type(found) in _OWNERS for found in gc.get_objects())


def step_twice(tide_model: nn.Module, twin: nn.Module, do: Callable[[nn.Module], list[Tensor]], num: int = 3) -> None:
    """`do` gives the same tensors with and without lowtide, in the observed step and in planned ones."""
    for _ in range(num):
        torch.manual_seed(1)
        got = do(tide_model)
        torch.manual_seed(1)
        assert_equal(got, do(twin))


def outer_view(run: Callable[[], Any], skip: Callable[[Tensor], bool]) -> dict[int, int]:
    """Unique storages, with their bytes, that ordinary saved-tensor hooks see while `run` runs. Keeps them alive."""
    storages: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and not skip(tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return {key: storage.nbytes() for key, storage in storages.items()}


def activation_bytes(case: zoo.Case, model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes of unique activation storages of one forward of `model`: no parameters, buffers, casts, inputs."""
    theirs = [*model.parameters(), *model.buffers(), *inputs.values()]
    parameters = {tensor.untyped_storage()._cdata for tensor in theirs}
    casts = _casts_of(model)

    def skip(tensor: Tensor) -> bool:
        if tensor.untyped_storage()._cdata in parameters:
            return True
        base = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        return tensor.dtype == torch.bfloat16 and _key(base) in casts

    model_only: dict[int, int] = {}

    def observed(*args: Any, **kwargs: Any) -> Any:
        nonlocal model_only
        output: list[Any] = []
        model_only = outer_view(lambda: output.append(model(*args, **kwargs)), skip)
        return output[0]

    wrapper = _Calls(observed, model)
    case.loss(wrapper, inputs)
    return sum(model_only.values())


class _Calls(nn.Module):
    """Looks like a model to a loss function; the call goes elsewhere."""

    def __init__(self, call: Callable, model: nn.Module) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _casts_of(model: nn.Module) -> set[bytes]:
    return {_key(p.detach().to(torch.bfloat16).reshape(-1)) for p in model.parameters() if p.dtype == torch.float32}


def _key(flat: Tensor) -> bytes:
    return flat.detach().contiguous().view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# 2. Ownership


@pytest.mark.parametrize("seed", range(6))
def test_contract_02_device_memory_is_freed_once_the_copy_is_complete(seed: int) -> None:
    model = small()
    storages: list[StorageWeakRef] = []
    with under(model, SWAP, virtual(seed)) as tide:
        for _ in range(2):
            storages.clear()
            hooks = [
                layer.linear.register_forward_hook(
                    lambda _m, _i, out: storages.append(StorageWeakRef(out.untyped_storage()))
                )
                for layer in model.layers
            ]
            loss = loss_of(model, rows())
            tide.settle()
            assert all(storage.expired() for storage in storages)
            loss.backward()
            for hook in hooks:
                hook.remove()


@every_fate
def test_contract_02_a_tensor_that_the_user_holds_is_still_his(fate: str) -> None:
    model, twin = small(), small()

    def do(tried: nn.Module) -> list[Tensor]:
        held: list[Tensor] = []
        hooks = [layer.register_forward_hook(lambda _m, _i, out: held.append(out)) for layer in tried.layers]
        loss = loss_of(tried, rows()) + sum(h.sin().sum() for h in held)
        for hook in hooks:
            hook.remove()
        copies = [h.detach().clone() for h in held]
        loss.backward()
        assert_equal([h.detach() for h in held], copies)
        return [*copies, *grads(tried)]

    with under(model, FATES[fate]):
        step_twice(model, twin, do)


@every_fate
def test_contract_02_a_storage_is_never_resized(fate: str) -> None:
    model = small()
    with under(model, FATES[fate]) as tide:
        for _ in range(2):
            x = rows(requires_grad=True)
            y = model(x)
            tide.settle()
            assert y.untyped_storage().nbytes() == y.numel() * 4
            assert x.untyped_storage().nbytes() == x.numel() * 4
            y.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# 3. One copy per storage, keyed by a live storage and its version

# Left out: tensors that stay where they are (sparse, conjugate views), autocast (line 4), counts that depend on the
# data, tensors that become buffers when the forward ends, and a router whose top-k indices are saved, dropped with
# their graph, and saved again (and so moved twice).
NOT_COUNTED = {
    "sparse", "complex", "llama_autocast", "lora_autocast", "llama_cache", "draws", "qwen3_moe_eager", "stateful",
    "deepseek_v3",
}  # fmt: skip
COUNTED = [name for name in zoo.CASES if name not in NOT_COUNTED]


@pytest.mark.parametrize("name", COUNTED)
def test_contract_03_each_unique_storage_is_copied_out_once(name: str) -> None:
    """Exact bytes: what ordinary hooks around the model see, each storage once, parameters left out."""
    case = zoo.CASES[name]
    model, twin = case.build(3), case.build(3)
    twin.load_state_dict(model.state_dict())
    with under(model, SWAP) as tide:
        for step in range(3):
            inputs = case.batch(step)
            torch.manual_seed(step)
            want = activation_bytes(case, twin, inputs)
            tide.reset_stats()
            torch.manual_seed(step)
            loss = case.loss(model, inputs)
            tide.settle()
            stats = tide.stats
            assert (stats.saved_bytes, stats.swapped_bytes, stats.copied_out_bytes) == (want, want, want), step
            loss.backward()


class ThreeReaders(nn.Module):
    """One product is saved by three linears, and by a fourth as a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.narrow = nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return sum(head(y) for head in self.heads) + self.narrow(y[:, WIDTH // 2 :])


def test_contract_03_a_tensor_saved_by_four_operations_counts_once() -> None:
    model = small(ThreeReaders, 1)
    with under(model, SWAP) as tide:
        for _ in range(3):
            tide.reset_stats()
            loss = model(rows()).sum()
            tide.settle()
            assert tide.stats.copied_out_bytes == tide.stats.saved_bytes == 4 * WIDTH * 4
            loss.backward()
            assert tide.stats.copied_in_bytes == 4 * WIDTH * 4


class Views(nn.Module):
    """Saves views that share a storage and differ in offset, stride, size, order and dtype."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        views = (
            y[1:, 2:], y.t(), y[:, ::2], y[0].expand(3, WIDTH), y.unfold(1, 3, 1), y.diagonal(),
            y.as_strided((2, 3), (WIDTH, 2), 1), y.flatten().view(-1, 2)[3:], y[2, 3], torch.view_as_complex(
                y.unflatten(1, (-1, 2))
            ).conj(), y.unsqueeze(0).movedim(0, 2),
        )  # fmt: skip
        total: Any = 0
        for view in views:
            total = total + (view * view * 0.5).abs().sum()
        return total * torch.ones_like(x)


@every_fate
def test_contract_03_views_are_rebuilt_with_size_stride_and_offset(fate: str) -> None:
    model, twin = small(Views, 2), small(Views, 2)

    def do(tried: nn.Module) -> list[Tensor]:
        x = rows(requires_grad=True)
        geometry: list[Tensor] = []
        y = tried(x)
        loss = y.square().mean()
        nodes, seen = [y.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
            if node.name() == "MulBackward0" and node._saved_self is not None:
                for saved in (node._saved_self, node._saved_other):
                    if saved is not None:
                        geometry.append(torch.tensor([*saved.shape, *saved.stride(), saved.storage_offset()]))
                        assert saved.is_conj() or saved.dtype != torch.complex64
        loss.backward()
        return [loss.detach(), x.grad, *sorted(geometry, key=lambda g: (len(g), g.tolist()))]

    if fate in ("keep", "swap"):
        with under(model, FATES[fate]):
            step_twice(model, twin, do)
    else:  # the tensors of a recomputed region are not reachable before backward
        with under(model, FATES[fate]):
            step_twice(model, twin, _input_grad)


def _input_grad(model: nn.Module) -> list[Tensor]:
    x = rows(requires_grad=True)
    loss = loss_of(model, x)
    loss.backward()
    return [loss.detach(), x.grad, *grads(model)]


class Churn(nn.Module):
    """Makes and drops many storages of one size, so that addresses are used again while sites are alive."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for i in range(12):
            y = (x * (i + 1)).sin()
            total = total + y * y.cos()
            del y
            scratch = torch.full_like(x, float(i))
            total = total + scratch.exp().detach().clamp(max=2.0) * x
            del scratch
        return total


@pytest.mark.parametrize("seed", range(8))
def test_contract_03_an_address_that_is_used_again_is_another_site(seed: int) -> None:
    model, twin = small(Churn, 2), small(Churn, 2)
    with under(model, SWAP, virtual(seed)):
        step_twice(model, twin, _input_grad)


class TwoVersions(nn.Module):
    """A storage is saved, the graph that saved it is dropped, it changes in place, and is saved again."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.5
        y.sin()
        y.add_(1.0)
        z = y.cos()
        return z + x


@every_fate
@pytest.mark.parametrize("seed", range(4))
def test_contract_03_a_new_version_is_another_site(fate: str, seed: int) -> None:
    model, twin = small(TwoVersions), small(TwoVersions)
    with under(model, FATES[fate], virtual(seed)):
        step_twice(model, twin, _input_grad)


class OldAndNew(nn.Module):
    """The graph that saved a storage first is alive, and never run; the storage changes, and is saved again."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.5
        # What is saved is sent with the next save.
        self.old = y.sin() + x.exp()
        with torch.no_grad():
            y.add_(1.0)
        return y.cos() + x


@every_fate
@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("seed", range(4))
def test_contract_03_a_write_makes_a_new_site_while_the_old_one_lives(fate: str, limit: int | None, seed: int) -> None:
    model, twin = small(OldAndNew), small(OldAndNew)

    def do(tried: nn.Module) -> list[Tensor]:
        found = _input_grad(tried)
        for layer in tried.layers:
            layer.old = None
        return found

    with under(model, FATES[fate], virtual(seed)) as tide:
        tide.set_limit(limit)
        step_twice(model, twin, do)
        tide.set_limit(None)  # a guard remembers its last queues


# ---------------------------------------------------------------------------------------------------------------------
# 4. Parameters


class Projections(nn.Module):
    """x @ W, x @ W.t(), x @ (a slice of W): x needs a gradient and W does not, so that only views of W are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        return x @ w + x @ w.t() + (x @ w[: WIDTH // 2].t()).repeat(1, 2) + x * w[0] + x * w.detach()[1].expand(4, -1)


@every_fate
def test_contract_04_parameters_and_their_views_are_not_activations(fate: str) -> None:
    model, twin = small(Projections), small(Projections)
    assert sum(outer_view(lambda: model(rows(requires_grad=True)), lambda _: False).values()) == 3 * WIDTH * WIDTH * 4
    with under(model, FATES[fate]) as tide:
        for _ in range(3):
            step_twice(model, twin, _input_grad, num=1)
        stats = tide.stats
        # A recomputed layer holds on to its input, and drops nothing: there is nothing but parameters to drop.
        num_inputs_held = 2 * 3 if "recompute" in FATES[fate] else 0
        assert stats.saved_bytes == num_inputs_held * 4 * WIDTH * 4
        assert stats.recomputed_bytes == 0
        assert stats.swapped_bytes == stats.copied_out_bytes == (stats.saved_bytes if fate == "both" else 0)


@pytest.mark.parametrize("name", ["llama_autocast", "lora_autocast"])
def test_contract_04_autocast_copies_of_parameters_are_not_activations(name: str) -> None:
    case = zoo.CASES[name]
    model, twin = case.build(3), case.build(3)
    with under(model, SWAP) as tide:
        for step in range(3):
            torch.manual_seed(step)
            want = activation_bytes(case, twin, case.batch(step))
            tide.reset_stats()
            torch.manual_seed(step)
            loss = case.loss(model, case.batch(step))
            tide.settle()
            assert (tide.stats.swapped_bytes, tide.stats.copied_out_bytes) == (want, want)
            loss.backward()


def test_contract_04_autocast_copies_of_parameters_are_not_counted_as_recomputed() -> None:
    case = zoo.CASES["llama_autocast"]
    model = case.build(3)
    with under(model, RECOMPUTE) as tide:
        found = []
        for step in range(3):
            tide.reset_stats()
            case.loss(model, case.batch(step)).backward()
            found.append(tide.stats.recomputed_bytes)
        assert found[0] == found[1] == found[2] > 0


def test_contract_04_parameters_that_are_replaced_or_added_later_are_not_activations() -> None:
    model, twin = small(Projections), small(Projections)
    with under(model, SWAP) as tide:
        step_twice(model, twin, _input_grad, num=2)
        for tried in (model, twin):
            torch.manual_seed(5)
            tried.layers[1].weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
            tried.layers[2].weight.data = torch.randn(WIDTH, WIDTH)
        step_twice(model, twin, _input_grad, num=2)
        assert tide.stats.swapped_bytes == 0


# ---------------------------------------------------------------------------------------------------------------------
# 5. In-place modification after saving


class Exp(nn.Module):
    """Saves its own output."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Square(nn.Module):
    """Saves its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Rows(nn.Module):
    """Saves a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x[1:] * x[1:]


def _text_of_backward(model: nn.Module, where: str) -> str:
    x = rows(requires_grad=True) * 1.0
    y = model(x)
    with torch.no_grad():
        (y if where == "output" else x).add_(1.0)
    with pytest.raises(RuntimeError) as caught:
        y.sum().backward()
    return str(caught.value)


@every_fate
@pytest.mark.parametrize(
    ("block", "where"), [(Exp, "output"), (Square, "input"), (Rows, "input")], ids=["output", "input", "view"]
)
def test_contract_05_modified_after_saving_raises_what_plain_autograd_raises(
    fate: str, block: type[nn.Module], where: str
) -> None:
    model, twin = small(block, 1), small(block, 1)
    want = _text_of_backward(twin, where)
    assert "modified by an inplace operation" in want
    with under(model, FATES[fate]):
        for _ in range(3):
            assert _text_of_backward(model, where) == want
            step_twice(model, twin, _input_grad, num=1)


@every_fate
def test_contract_05_modified_before_saving_is_fine(fate: str) -> None:
    class Early(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y[0] = 0.5
            y.mul_(1.5)
            return y * y

    model, twin = small(Early), small(Early)
    with under(model, FATES[fate]):
        step_twice(model, twin, _input_grad)


@every_fate
def test_contract_05_modified_between_forward_and_backward_but_not_saved(fate: str) -> None:
    """Plain autograd saves the exponential only. A layer that is to be run again needs its input, and says so."""
    model, twin = small(Exp, 1), small(Exp, 1)

    def do(tried: nn.Module) -> list[Tensor]:
        leaf = rows(requires_grad=True)
        x = leaf * 0.5
        y = tried(x)
        with torch.no_grad():
            x.add_(1.0)
        y.sum().backward()
        return [y.detach(), leaf.grad]

    with under(model, FATES[fate]):
        if fate in ("keep", "swap"):
            step_twice(model, twin, do)
            return
        for _ in range(3):
            with pytest.raises(RuntimeError) as caught:
                do(model)
            assert str(caught.value).startswith(
                "lowtide: an input of the recomputed 'layers.0' (Exp) was modified in place"
            )
            del caught
            step_twice(model, twin, _input_grad, num=1)


@every_fate
def test_contract_05_a_parameter_stepped_between_forward_and_backward_raises(fate: str) -> None:
    model, twin = small(), small()

    def text(tried: nn.Module) -> str:
        loss = loss_of(tried, rows(requires_grad=True))
        with torch.no_grad():
            tried.layers[1].linear.weight.mul_(0.5)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        tried.zero_grad(set_to_none=True)
        return str(caught.value)

    with under(model, FATES[fate]):
        for _ in range(2):
            assert text(model) == text(twin)
            step_twice(model, twin, _input_grad, num=1)


# ---------------------------------------------------------------------------------------------------------------------
# 6. Graphs that live unusual lives


def _retain(model: nn.Module) -> list[Tensor]:
    loss = loss_of(model, rows())
    loss.backward(retain_graph=True)
    first = grads(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return [*first, *grads(model)]


def _double(model: nn.Module) -> list[Tensor]:
    x = rows(requires_grad=True)
    first = torch.autograd.grad(loss_of(model, x), [x, *model.parameters()], create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return [*(g.detach() for g in first), x.grad, *grads(model)]


def _penalty(model: nn.Module) -> list[Tensor]:
    x = rows(requires_grad=True)
    loss = loss_of(model, x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().mean()).backward()
    return grads(model)


def _part(model: nn.Module) -> list[Tensor]:
    x = rows(requires_grad=True)
    loss = loss_of(model, x)
    last = torch.autograd.grad(loss, model.layers[-1].linear.weight, retain_graph=True)
    first = torch.autograd.grad(loss, [model.layers[0].linear.weight, x], retain_graph=True)
    loss.backward(inputs=[model.layers[1].linear.bias])
    return [*last, *first, *grads(model)]


def _dropped(model: nn.Module) -> list[Tensor]:
    kept = loss_of(model, rows(0))
    loss_of(model, rows(1))
    del kept
    loss = loss_of(model, rows(2))
    loss.backward()
    return grads(model)


def _backward_through_a_piece_of_a_dropped_graph(model: nn.Module) -> list[Tensor]:
    half: list[Tensor] = []
    hook = model.layers[1].register_forward_hook(lambda _m, _i, out: half.append(out))
    whole = loss_of(model, rows())
    hook.remove()
    del whole
    half.pop().sum().backward()
    return grads(model)


def _several(model: nn.Module) -> list[Tensor]:
    losses = [loss_of(model, rows(seed)) for seed in range(4)]
    for i in (2, 0, 3):
        losses[i].backward()
        losses[i] = losses[i].detach()
    losses.append(loss_of(model, rows(5)))
    losses[1].backward()
    losses[4].backward()
    return [*(loss.detach() for loss in losses), *grads(model)]


def _one_forward_one_backward(model: nn.Module) -> list[Tensor]:
    live = [loss_of(model, rows(seed)) for seed in range(3)]
    for seed in range(3, 8):
        live.append(loss_of(model, rows(seed)))
        live.pop(0).backward()
    for loss in live:
        loss.backward()
    return grads(model)


def _joint(model: nn.Module) -> list[Tensor]:
    """Two forwards in one graph, one feeding the other: the layers occur twice in one backward."""
    x = rows(requires_grad=True)
    loss = loss_of(model, model(x) * 0.5) + loss_of(model, x)
    loss.backward()
    return [x.grad, *grads(model)]


def _no_grad(model: nn.Module) -> list[Tensor]:
    with torch.no_grad():
        quiet = model(rows(0))
    with torch.inference_mode():
        quieter = model(rows(1)) + 0
    loss_of(model, rows(2)).backward()
    return [quiet, quieter.clone(), *grads(model)]


def _exception_in_forward(model: nn.Module) -> list[Tensor]:
    hook = model.layers[1].linear.register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        model(rows(0))
    hook.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    loss_of(model, rows(1)).backward()
    return grads(model)


def _exception_in_backward(model: nn.Module) -> list[Tensor]:
    hook = model.layers[1].linear.weight.register_hook(_fail)
    loss = loss_of(model, rows(0))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    grads(model)
    del loss
    loss_of(model, rows(1)).backward()
    return grads(model)


def _retry_after_exception_in_backward(model: nn.Module) -> list[Tensor]:
    loss = loss_of(model, rows(0))
    hook = model.layers[1].linear.weight.register_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    hook.remove()
    grads(model)
    loss.backward()
    return grads(model)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def _thread(model: nn.Module) -> list[Tensor]:
    """Forward in one thread, backward in another."""
    loss = loss_of(model, rows(0))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss.detach(), *grads(model)]


def _forward_in_a_thread(model: nn.Module) -> list[Tensor]:
    losses: list[Tensor] = []
    thread = threading.Thread(target=lambda: losses.append(loss_of(model, rows(0))))
    thread.start()
    thread.join()
    losses[0].backward()
    return grads(model)


def _backward_inside_backward(model: nn.Module) -> list[Tensor]:
    inner: list[Tensor] = []

    def again(_grad: Tensor) -> None:
        hook.remove()  # the inner backward must not come here again
        with torch.enable_grad():
            y = loss_of(model, rows(3).requires_grad_())
        inner.extend(torch.autograd.grad(y, list(model.parameters())))

    hook = model.layers[1].linear.weight.register_hook(again)
    loss_of(model, rows(0)).backward()
    return [*inner, *grads(model)]


def _forward_while_a_backward_is_half_done(model: nn.Module) -> list[Tensor]:
    """A partial backward, another whole step, then the rest."""
    loss = loss_of(model, rows(0))
    last = torch.autograd.grad(loss, model.layers[-1].linear.weight, retain_graph=True)
    loss_of(model, rows(1)).backward()
    other = grads(model)
    loss.backward()
    return [*last, *other, *grads(model)]


LIVES = [
    _retain, _double, _penalty, _part, _dropped, _backward_through_a_piece_of_a_dropped_graph, _several,
    _one_forward_one_backward, _joint, _no_grad, _exception_in_forward, _exception_in_backward,
    _retry_after_exception_in_backward, _thread, _forward_in_a_thread, _backward_inside_backward,
    _forward_while_a_backward_is_half_done,
]  # fmt: skip


# Dropping single modules' outputs is a mechanism of its own.
OUTPUTS = {
    "outputs": {"recompute": ["layers.*.act"], "min_bytes": 0},
    "outputs_and_swap": {"recompute": ["layers.*.act"], "swap": "all", "min_bytes": 0},
}


@pytest.mark.parametrize(("number", "fate"), in_turn(2, range(len(LIVES)), [*FATES, *OUTPUTS]))
def test_contract_06_unusual_lives_of_a_graph(number: int, fate: str) -> None:
    model, twin = small(), small()
    # A schedule of the engine for each life; test_virtual_seeds.py has more of them.
    with under(model, {**FATES, **OUTPUTS}[fate], virtual(number)) as tide:
        step_twice(model, twin, LIVES[number], num=3)
        step_twice(model, twin, _input_grad, num=1)
        tide.settle()
        gc.collect()
        stats = tide.stats
        assert (stats.host_bytes, stats.disk_bytes) == (0, 0)
        assert tide._scheduler.ledger.now_bytes == 0


@every_fate
def test_contract_06_the_first_step_may_be_the_unusual_one(fate: str) -> None:
    """What is observed must not be what a failed or partial step happened to do."""
    for life in (_exception_in_forward, _no_grad, _dropped, _part, _several):
        model, twin = small(), small()
        with under(model, FATES[fate]):
            step_twice(model, twin, life, num=1)
            step_twice(model, twin, _input_grad)


@every_fate
def test_contract_06_threads_that_train_one_model_at_the_same_time(fate: str) -> None:
    """As the stages of a pipeline in one process do: each thread has its own graphs, all share the layers."""
    model, twin = small(), small()
    num_threads, num_steps = 4, 10

    def steps(tried: nn.Module, thread: int, found: dict[int, list[Tensor]]) -> None:
        found[thread] = []
        for step in range(num_steps):
            loss = loss_of(tried, rows(thread * num_steps + step))
            found[thread] += torch.autograd.grad(loss, list(tried.parameters()))

    with under(model, FATES[fate]):
        got: dict[int, list[Tensor]] = {}
        threads = [threading.Thread(target=steps, args=(model, i, got)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    want: dict[int, list[Tensor]] = {}
    for i in range(num_threads):
        steps(twin, i, want)
        assert_equal(got[i], want[i])


def _func_grad(model: nn.Module) -> list[Tensor]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    found = torch.func.grad(loss)(parameters, rows(0))
    return [found[name] for name in parameters]


def _func_vmap(model: nn.Module) -> list[Tensor]:
    """A gradient for every sample."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, rows(0))
    return [found[name] for name in parameters]


def _func_jvp(model: nn.Module) -> list[Tensor]:
    return list(torch.func.jvp(model, (rows(0),), (rows(1),)))


def _func_call_with_autograd(model: nn.Module) -> list[Tensor]:
    """functional_call with other leaves: the tensors that play the parameters are not the module's parameters."""
    leaves = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, leaves, (rows(0),)).square().mean().backward()
    return [leaf.grad for leaf in leaves.values()]


@every_fate
@pytest.mark.parametrize("life", [_func_grad, _func_vmap, _func_jvp, _func_call_with_autograd])
def test_contract_06_torch_func(fate: str, life: Callable[[nn.Module], list[Tensor]]) -> None:
    model, twin = small(), small()
    with under(model, FATES[fate]):
        step_twice(model, twin, lambda tried: [t.detach() for t in life(tried)], num=2)
        step_twice(model, twin, _input_grad)
        step_twice(model, twin, lambda tried: [t.detach() for t in life(tried)], num=1)


@every_fate
def test_contract_06_the_users_own_hooks_and_modes_still_work(fate: str) -> None:
    model, twin = small(), small()

    def do(tried: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        hooks = [tried.layers[1].register_full_backward_hook(lambda _m, gi, go: seen.extend([*gi, *go]))]
        hooks.append(tried.layers[0].register_forward_hook(lambda _m, _i, out: out * 2))
        hooks.append(tried.layers[2].register_forward_pre_hook(lambda _m, args: (args[0] + 1,)))
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss = loss_of(tried, rows(requires_grad=True))
            loss.backward()
        for hook in hooks:
            hook.remove()
        return [*seen, *grads(tried)]

    with under(model, FATES[fate]):
        step_twice(model, twin, do)


def test_contract_06_saved_tensor_hooks_around_the_model_are_refused_by_name() -> None:
    """PyTorch calls the innermost pair only: the user's would see nothing, and he must know."""
    model, twin = small(), small()
    with under(model, SWAP):
        with pytest.raises(lowtide.ConfigError) as caught, torch.autograd.graph.save_on_cpu():
            model(rows())
        assert "save_on_cpu" in str(caught.value)
        step_twice(model, twin, _input_grad)


@every_fate
def test_contract_06_saved_tensor_hooks_inside_a_layer_still_work(fate: str) -> None:
    class Offloading(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                y = super().forward(x)
            return y * y.sin()

    model, twin = small(Offloading), small(Offloading)
    with under(model, FATES[fate]):
        step_twice(model, twin, _input_grad)


# ---------------------------------------------------------------------------------------------------------------------
# 7. Positional plans are checked


class Moody(nn.Module):
    """Saves what `mood` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mood = "calm"

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.mood == "more":
            y = y.tanh() * y.sin()
        if self.mood == "less":
            return x + 1
        if self.mood == "double":
            return (y.double().exp() * y).float()
        if self.mood == "other":
            return y.relu() * torch.where(y > 0, y, -y)
        return y.cos() * y


MOODS = ["calm", "calm", "more", "calm", "less", "other", "calm", "double", "more", "calm"]


@every_fate
def test_contract_07_a_layer_that_saves_something_else_keeps_its_values(fate: str) -> None:
    for seed in range(4):
        model, twin = small(Moody), small(Moody)
        with under(model, FATES[fate], virtual(seed)):
            for i, mood in enumerate(MOODS):
                model.layers[i % 3].mood = twin.layers[i % 3].mood = mood
                step_twice(model, twin, _input_grad, num=1)


def _freeze(model: nn.Module) -> None:
    model.layers[0].requires_grad_(False)


def _unfreeze(model: nn.Module) -> None:
    model.requires_grad_(True)


def _evaluate(model: nn.Module) -> None:
    model.eval()


def _train(model: nn.Module) -> None:
    model.train()


def _widen(model: nn.Module) -> None:
    model.double()


def _narrow(model: nn.Module) -> None:
    model.float()


def _exchange(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.layers[1] = Draws()


def _assign(model: nn.Module) -> None:
    model.load_state_dict({k: v.clone() * 0.5 for k, v in model.state_dict().items()}, assign=True)


CHANGES = [_freeze, _evaluate, _unfreeze, _train, _widen, _evaluate, _narrow, _assign, _freeze, _train, _exchange]


@every_fate
def test_contract_07_a_model_that_changes_between_steps(fate: str) -> None:
    """Frozen and unfrozen, train and eval, other dtypes, other tensors for parameters, an exchanged layer."""
    model, twin = small(Draws), small(Draws)

    def do(tried: nn.Module) -> list[Tensor]:
        loss = loss_of(tried, rows().to(next(tried.parameters()).dtype))
        loss.backward()
        return [loss.detach(), *grads(tried)]

    with under(model, FATES[fate]):
        step_twice(model, twin, do, num=2)
        for change in CHANGES:
            change(model)
            change(twin)
            step_twice(model, twin, do, num=2)


@every_fate
def test_contract_07_layers_called_without_their_model(fate: str) -> None:
    """In another order, twice, under no_grad, alone: a model may have more methods than `forward`."""
    model, twin = small(), small()

    def do(tried: nn.Module) -> list[Tensor]:
        x = rows(requires_grad=True)
        y = tried.layers[2](tried.layers[0](x))
        with torch.no_grad():
            z = tried.layers[1](y)
        (tried.layers[2](y * z) + tried.layers[0].forward(z)).square().mean().backward()
        return [x.grad, *grads(tried)]

    with under(model, FATES[fate]):
        step_twice(model, twin, do)
        step_twice(model, twin, _input_grad)
        step_twice(model, twin, do)


class PartlyQuiet(zoo.Stack):
    """One layer runs without gradients, in the middle of the others."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            y = self.layers[1](x)
        with torch.enable_grad():
            return self.layers[2](x * y)


@every_fate
def test_contract_07_a_layer_under_no_grad_inside_the_model(fate: str) -> None:
    torch.manual_seed(0)
    model = PartlyQuiet(*(Draws() for _ in range(3)))
    torch.manual_seed(0)
    twin = PartlyQuiet(*(Draws() for _ in range(3)))
    with under(model, FATES[fate]):
        step_twice(model, twin, _input_grad)


def test_contract_07_divergence_is_counted() -> None:
    model = small(Moody)
    with under(model, SWAP) as tide:
        for _ in range(3):
            _input_grad(model)
        assert tide.stats.num_divergences == 0
        model.layers[1].mood = "double"
        _input_grad(model)
        assert tide.stats.num_divergences > 0
        model.layers[1].mood = "calm"
        tide.reset_stats()
        _input_grad(model)
        assert tide.stats.num_divergences == 0


class Alternating(nn.Module):
    """Saves one tensor in all moods."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.mood = "calm"

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight
        return {"calm": y.sin, "result": y.exp, "rows": lambda: torch.sin(y[None] + self.weight)}[self.mood]()


@pytest.mark.parametrize(("mood", "fate"), [("result", "swap"), ("result", "keep"), ("rows", "swap")])
def test_contract_07_what_was_made_otherwise_or_has_other_dimensions_is_counted(mood: str, fate: str) -> None:
    model = small(Alternating)
    with under(model, FATES[fate]) as tide:
        for _ in range(2):
            _input_grad(model)
        assert tide.stats.num_divergences == 0
        for layer in model.layers:
            layer.mood = mood
        _input_grad(model)
        assert tide.stats.num_divergences > 0


@every_fate
def test_contract_07_other_shapes_keep_their_values(fate: str) -> None:
    model, twin = small(), small()

    def do(tried: nn.Module, num_rows: int) -> list[Tensor]:
        loss = loss_of(tried, rows(num_rows, num_rows))
        loss.backward()
        return [loss.detach(), *grads(tried)]

    with under(model, FATES[fate]):
        for num_rows in (4, 4, 2, 7, 4, 1, 0, 4, 64):
            step_twice(model, twin, lambda tried, n=num_rows: do(tried, n), num=1)


@pytest.mark.parametrize("name", one_of(4, ["qwen3_moe_eager", "draws", "t5", "llama"]))
def test_contract_07_lengths_and_routing_that_change_every_step(name: str) -> None:
    case = zoo.CASES[name]
    for plan in (SWAP, RECOMPUTE, *case.mixed_plans):
        model, twin = case.build(3), case.build(3)
        optimizer, twin_optimizer = zoo.make_optimizer(model), zoo.make_optimizer(twin)
        with under(model, dict(plan)):
            for step in range(4):
                result = zoo.train(case, model, optimizer, step)
                zoo.assert_same(result, zoo.train(case, twin, twin_optimizer, step))


# ---------------------------------------------------------------------------------------------------------------------
# 8. and 9. Order of copies; room on the slower tiers


def test_contract_08_no_ordering_is_left_to_chance() -> None:
    """The adversarial engine saw no copy that was not ordered after the work it depends on."""
    for seed in range(8):
        model = small()
        with under(model, SWAP, virtual(seed)) as tide:
            for _ in range(3):
                _several(model)
                _input_grad(model)
                _dropped(model)
            tide.settle()
            assert tide.engine.violations == []


@pytest.mark.parametrize("host_budget", [0, 100, 1000])
def test_contract_09_without_room_activations_stay_and_nothing_is_lost(host_budget: int) -> None:
    model, twin = small(), small()
    memory = {**SWAP, "host_budget": host_budget, "disk_budget": 0}
    with under(model, memory) as tide:
        with pytest.warns(UserWarning, match="no room"):
            step_twice(model, twin, _input_grad, num=1)
        step_twice(model, twin, _several, num=2)
        stats = tide.stats
        assert stats.num_kept_for_lack_of_room > 0
        assert stats.host_bytes <= host_budget
        assert stats.disk_bytes == 0
        assert stats.saved_bytes == stats.kept_bytes + stats.swapped_bytes


# ---------------------------------------------------------------------------------------------------------------------
# 10. Checkpointing that is already there


class Checkpointed(nn.Module):
    """Two of three layers under torch's own checkpointing."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[0], x, use_reentrant=self.use_reentrant)
        x = self.layers[1](x)
        return checkpoint(self.layers[2], x, use_reentrant=self.use_reentrant)


@every_fate
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_contract_10_a_model_that_already_checkpoints(fate: str, use_reentrant: bool) -> None:
    model, twin = Checkpointed(use_reentrant), Checkpointed(use_reentrant)
    with under(model, FATES[fate]):
        step_twice(model, twin, _input_grad)


def test_contract_10_hooks_do_not_defeat_a_checkpoint_inside_the_model() -> None:
    """What is swapped is what outer hooks see: the inputs of the regions, not what the regions would save."""
    model, twin = Checkpointed(False), Checkpointed(False)
    parameters = {p.untyped_storage()._cdata for p in twin.parameters()}
    with under(model, SWAP) as tide:
        for _ in range(3):
            x = rows(requires_grad=True)
            not_counted = {*parameters, x.untyped_storage()._cdata}
            seen = outer_view(lambda x=x: twin(x), lambda t, s=not_counted: t.untyped_storage()._cdata in s)
            tide.reset_stats()
            loss = loss_of(model, x)
            tide.settle()
            assert tide.stats.swapped_bytes == sum(seen.values())
            loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_fate
def test_contract_10_a_checkpoint_around_the_model(fate: str, use_reentrant: bool) -> None:
    model, twin = small(), small()

    def do(tried: nn.Module) -> list[Tensor]:
        x = rows(requires_grad=True)
        loss = checkpoint(tried, x, use_reentrant=use_reentrant).square().mean()
        loss.backward()
        return [loss.detach(), x.grad, *grads(tried)]

    with under(model, FATES[fate]) as tide:
        step_twice(model, twin, do)
        if not use_reentrant:
            assert tide.stats.swapped_bytes == 0, "the region around the model drops everything already"
        step_twice(model, twin, _input_grad)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", ["swap", "recompute", "both"])
def test_contract_10_transformers_gradient_checkpointing(plan: str, use_reentrant: bool) -> None:
    case = zoo.CASES["llama"]

    def build() -> nn.Module:
        model = case.build(3)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    model, twin = build(), build()
    optimizer, twin_optimizer = zoo.make_optimizer(model), zoo.make_optimizer(twin)
    with under(model, FATES[plan]):
        result = zoo.train(case, model, optimizer, 3, num_steps=3)
    zoo.assert_same(result, zoo.train(case, twin, twin_optimizer, 3, num_steps=3))


class KeywordBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, hidden: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return torch.tanh(self.linear(hidden) * extra["scale"])


class KeywordStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(KeywordBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(hidden=x, extra={"scale": x + 1})
        return x


def test_contract_10_keyword_inputs_of_a_recomputed_layer_are_swapped() -> None:
    """Each layer's two inputs, both by keyword, one of them in a mapping; the first is the caller's own, and stays."""
    held_bytes = 5 * 4 * WIDTH * 4
    model, twin = KeywordStack(), KeywordStack()
    with under(model, BOTH) as tide:
        for _ in range(3):
            tide.reset_stats()
            loss = loss_of(model, rows(requires_grad=True))
            tide.settle()
            stats = tide.stats
            assert stats.swapped_bytes == stats.copied_out_bytes == held_bytes
            assert stats.recomputed_bytes > 0
            loss.backward()
            assert tide.stats.copied_in_bytes == held_bytes
            grads(model)
        step_twice(model, twin, _input_grad)


class Attends(nn.Module):
    """As torch's attention does, asks whether its inputs are one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.separate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if query is key:
            a, b = self.joint(query).chunk(2, dim=-1)
            return a.tanh() * b
        return self.separate(query).tanh() * self.separate(key)


class AttendsToItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attends = Attends()

    def forward(self, x: Tensor) -> Tensor:
        return self.attends(x, key=x) + self.attends(x, key=x * 2)


@pytest.mark.parametrize("memory", [{"recompute": ["attends"], "swap": swap} for swap in ("none", "all")])
def test_contract_10_one_tensor_given_twice_is_one_tensor_when_run_again(memory: dict) -> None:
    model, twin = small(AttendsToItself), small(AttendsToItself)
    with under(model, {**memory, "min_bytes": 0}):
        step_twice(model, twin, _input_grad)


class Accounts(nn.Module):
    """Writes an auxiliary loss into a list, and a count into a mapping, that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: list[Tensor], *, notes: dict[str, int]) -> Tensor:
        y = self.linear(x).tanh()
        losses.append(y.square().mean())
        notes["calls"] = notes.get("calls", 0) + 1
        return y * x


class Accounting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Accounts() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        notes: dict[str, int] = {}
        for layer in self.layers:
            x = layer(x, losses, notes=notes)
        assert (len(losses), notes) == (3, {"calls": 3})
        return x + sum(losses)


@every_fate
def test_contract_10_what_a_layer_writes_into_its_arguments_is_written_once(fate: str) -> None:
    model, twin = Accounting(), Accounting()
    with under(model, FATES[fate]):
        step_twice(model, twin, _input_grad)


def test_contract_10_recomputed_layers_drop_what_they_save() -> None:
    model = small()
    x = rows(requires_grad=True)
    not_counted = {tensor.untyped_storage()._cdata for tensor in (x, *model.parameters())}
    seen = outer_view(lambda: model(x), lambda t: t.untyped_storage()._cdata in not_counted)
    held_bytes = 2 * 4 * WIDTH * 4  # the inputs of the second and third layer, which the regions start from
    with under(model, RECOMPUTE) as tide:
        for _ in range(3):
            tide.reset_stats()
            loss = loss_of(model, x)
            stats = tide.stats
            assert (stats.kept_bytes, stats.saved_bytes) == (held_bytes, sum(seen.values()))
            assert stats.recomputed_bytes == sum(seen.values()) - held_bytes
            loss.backward()


# ---------------------------------------------------------------------------------------------------------------------
# 11. Random state


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x))) + torch.rand_like(x) * x


@every_fate
def test_contract_11_random_state_is_the_same_before_in_between_and_after(fate: str) -> None:
    model, twin = small(Draws), small(Draws)

    def do(tried: nn.Module) -> list[Tensor]:
        loss = loss_of(tried, rows())
        between = torch.get_rng_state()
        torch.rand(7)  # the data of the next step, say: must not be drawn again by a recompute
        moved = torch.get_rng_state()
        loss.backward()
        return [loss.detach(), between, moved, torch.get_rng_state(), torch.rand(3), *grads(tried)]

    with under(model, FATES[fate]):
        step_twice(model, twin, do)


@every_fate
def test_contract_11_reseeding_between_forward_and_backward(fate: str) -> None:
    model, twin = small(Draws), small(Draws)

    def do(tried: nn.Module) -> list[Tensor]:
        losses = [loss_of(tried, rows(seed)) for seed in range(2)]
        torch.manual_seed(77)
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
        return [torch.rand(3), *grads(tried)]

    with under(model, FATES[fate]):
        step_twice(model, twin, do)


# ---------------------------------------------------------------------------------------------------------------------
# 12. Several ranks


def apply_on_a_rank(rank: int, memories: list[dict]) -> str:
    try:
        model = small()
        with lowtide.apply(model, memories[rank], engine=virtual(rank)):
            loss_of(model, rows()).backward()
        return "fine"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _on_two_ranks(folder: Path, memories: list[dict]) -> tuple[str, str]:
    return two_ranks.run(__name__, [("apply_on_a_rank", {"memories": memories})], folder)[0]


@pytest.mark.slow
def test_contract_12_ranks_with_different_rules_fail_with_one_clear_message(tmp_path: Path) -> None:
    texts = _on_two_ranks(tmp_path, [SWAP, {"recompute": ["layers.1"], "min_bytes": 0}])
    assert texts[0] == texts[1]
    assert texts[0].startswith("ConfigError: ")
    assert "rank" in texts[0]
    assert "\n" not in texts[0]


@pytest.mark.slow
def test_contract_12_ranks_with_the_same_rules_agree(tmp_path: Path) -> None:
    assert _on_two_ranks(tmp_path, [SWAP, dict(SWAP)]) == ("fine", "fine")
