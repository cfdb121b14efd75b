"""The loss of a vocabulary that is spread over ranks: two real ranks, to the bit against torch's `loss_parallel`."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import lowtide
from lowtide.errors import ConfigError
from lowtide.loss.parallel import (
    VocabularyPart,
    _keeps_bits,
    _rows_at_a_time,
    dtensor_cross_entropy,
    parallel_cross_entropy,
)
from lowtide.tensors.private import TorchDispatchMode
from lowtide.tensors.ranks import ALONE
from tests.support.two_ranks import run
from tests.support.zoo import same_bits

_WORDS = 67


def test_on_two_ranks(tmp_path: Path) -> None:
    jobs: list[tuple[str, dict[str, Any]]] = [
        ("random_cases", {}),
        ("messages", {}),
        ("mistakes", {}),
        ("habits", {}),
        ("whole_models", {}),
    ]
    cases, counts, mistakes, habits, models = run("tests.loss.test_parallel", jobs, tmp_path)
    assert cases == ([], []), cases
    assert counts == ((3, 2, 0), (3, 2, 0))  # all-reduces: torch's; ours; ours in the backward pass
    assert mistakes == ([], []), mistakes
    assert habits == ([], []), habits
    assert models == ([], []), models


def _on_mesh(values: Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(values.ndim - 1)])


def _loss_parallel() -> Any:
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _same(one: Tensor, other: Tensor) -> bool:
    return same_bits(one.contiguous(), other.contiguous())


def random_cases(rank: int) -> list[str]:
    """Of both ways in, those that differ from torch's."""
    found = []
    for seed in range(60):
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        num_rows, num_words = draw.choice((1, 7, 64, 130, 200)), draw.choice((2, 5, 33, 100, 257))
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
        numbers = (torch.randn(num_rows, num_words, generator=generator) * draw.choice((1, 10))).to(dtype)
        target = torch.randint(num_words, (num_rows,), generator=generator)
        how: dict[str, Any] = {
            "ignore_index": draw.choice((-100, 1)),
            "reduction": draw.choice(("mean", "sum", "none")),
        }
        target[torch.rand(num_rows, generator=generator) < draw.choice((0.0, 0.3, 1.0))] = how["ignore_index"]
        upcast = draw.random() < 0.5
        theirs, ours = (_on_mesh(numbers).requires_grad_() for _ in range(2))
        local = ours.to_local().detach().clone().requires_grad_()
        with _loss_parallel():
            want = F.cross_entropy(theirs.float() if upcast and dtype.itemsize < 4 else theirs, target, **how)
            want.sum().backward()
        got = dtensor_cross_entropy(ours, target, upcast=upcast, slice_rows=64, **how)
        got.sum().backward()
        first = rank * -(-num_words // 2)
        alone = lowtide.cross_entropy(local, target, upcast=upcast, group=dist.group.WORLD, first_word=first, **how)
        alone.sum().backward()
        assert local.grad is not None
        pairs = {
            "loss": (want.to_local(), got.to_local()),
            "gradient": (theirs.grad.to_local(), ours.grad.to_local()),
            "loss of a part": (want.to_local(), alone.detach()),
            "gradient of a part": (theirs.grad.to_local(), local.grad),
        }
        what = f"seed {seed}: {num_rows} x {num_words} {dtype} upcast={upcast} {how}: "
        found += [what + name for name, pair in pairs.items() if not _same(*pair)]
    return found


class _Count(TorchDispatchMode):
    """All-reduces, of either family of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen["reduce"] += func.overloadpacket.__name__ in ("allreduce_", "all_reduce", "all_reduce_")
        return func(*args, **(kwargs or {}))


def messages(rank: int) -> tuple[int, int, int]:
    """All-reduces of torch's loss, of ours, and of our backward pass."""
    from torch.distributed.tensor.debug import CommDebugMode

    numbers, target = torch.randn(130, 40, generator=torch.Generator().manual_seed(0)), torch.zeros(130).long()
    counts = []
    with _loss_parallel(), CommDebugMode() as theirs:
        F.cross_entropy(_on_mesh(numbers), target)
        counts.append(theirs.get_comm_counts()[torch.ops.c10d_functional.all_reduce])
    local = _on_mesh(numbers).to_local().requires_grad_()
    with _Count() as count:
        loss = lowtide.cross_entropy(local, target, group=dist.group.WORLD)
        counts.append(count.seen["reduce"])
        loss.backward()
        counts.append(count.seen["reduce"] - counts[-1])
    return counts[0], counts[1], counts[2]


def _told(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


_BELONGS = (
    "ConfigError: lowtide.cross_entropy: group and first_word say where the plain part of a rank belongs: first_word "
    "goes with group, and a DTensor knows both; leave them out"
)


def mistakes(rank: int) -> list[tuple[str, str]]:
    """What was said, and what should have been, where that is something else."""
    group, target = dist.group.WORLD, torch.zeros(4, dtype=torch.int64)
    spread = _on_mesh(torch.zeros(4, 6))
    rows = _on_mesh(torch.zeros(6, 4)).redistribute(placements=[_shard(0)])
    told = {
        _told(lambda: lowtide.cross_entropy(torch.zeros(4, 3), target, group=group, first_word=rank * 2)): (
            "ConfigError: lowtide.cross_entropy: the parts of the ranks make no vocabulary: by rank, words 0-2, 2-4; "
            "give each rank's first_word"
        ),
        _told(lambda: lowtide.cross_entropy(torch.zeros(4, 3 + rank), target, group=group)): (
            "ConfigError: lowtide.cross_entropy: the parts of the ranks make no vocabulary: by rank, words 0-2, 4-7; "
            "give each rank's first_word"
        ),
        _told(lambda: lowtide.cross_entropy(spread, target, label_smoothing=0.1)): (
            "ConfigError: lowtide.cross_entropy: weight, label_smoothing and z_loss are not covered where the words "
            "are spread over ranks; leave them out, or gather the logits"
        ),
        _told(lambda: lowtide.cross_entropy(rows, torch.zeros(6, dtype=torch.int64))): (
            "ConfigError: lowtide.cross_entropy: a DTensor must be sharded over its words on a mesh of one dimension, "
            "not (Shard(dim=0),) on 1; give its local part, and group="
        ),
        _told(lambda: lowtide.cross_entropy(spread, target, group=group)): _BELONGS,
        _told(lambda: lowtide.cross_entropy(torch.zeros(4, 3), target, first_word=3)): _BELONGS,
        _told(lambda: lowtide.cross_entropy(spread, target + 6)): "IndexError: Target 6 is out of bounds.",
    }
    return [(said, wanted) for said, wanted in told.items() if said != wanted]


def _shard(dim: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(dim)


def habits(rank: int) -> list[str]:
    """What goes wrong without saying so."""
    generator, found = torch.Generator().manual_seed(0), []
    weight = torch.randn(70, 10, generator=generator, requires_grad=True)
    target = torch.randint(20, (70,), generator=generator)

    def loss(logits: Tensor) -> Tensor:
        return lowtide.cross_entropy(logits, target, group=dist.group.WORLD)

    gradients = torch.autograd.grad(loss(weight * 2), weight, create_graph=True)
    told = _told(lambda: torch.autograd.grad(gradients[0].pow(2).sum(), weight))
    found += [] if told.startswith("RuntimeError: lowtide: a second derivative of a loss in slices") else [told]
    logits = weight * 2
    made = loss(logits)
    with torch.no_grad():
        logits.mul_(2)
    told = _told(made.backward)
    found += [] if told.startswith("RuntimeError: lowtide: the logits were written to between") else [told]
    made = loss(weight * 2)
    (once,) = torch.autograd.grad(made, weight, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (twice,) = torch.autograd.grad(made, weight)
    found += [] if _same(once, twice) else ["a second backward pass under autocast"]
    with torch.no_grad():
        found += [] if _same(loss(weight * 2), made.detach()) else ["without gradients"]
    return found


def whole_models(rank: int) -> list[str]:
    """What differs in a model whose head is split by `ColwiseParallel`, with and without lowtide."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from lowtide.loss import cross_entropy
    from lowtide.loss.attach import loss_of
    from tests.loss.test_attach import MODELS, _batches

    warnings.simplefilter("ignore")
    cross_entropy._LEAST_BYTES = 1  # this process has no other test
    found = []
    for name, dtype in (("llama", torch.float32), ("gemma2-softcap", torch.bfloat16)):
        model: Any = MODELS[name]().to(dtype)
        head = model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        assert head is not model.model.embed_tokens.weight
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model.lm_head, mesh, ColwiseParallel(use_local_output=False))

        def step(model: Any = model, name: str = name) -> dict[str, Tensor]:
            model.zero_grad()
            result = {}
            for number, batch in enumerate(_batches()):
                with _loss_parallel():
                    loss = model(**batch, num_items_in_batch=None if number else 100).loss
                    loss.backward()
                result[f"loss {number}"] = loss.full_tensor().detach()
            grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            return result | {
                key: (grad.to_local() if hasattr(grad, "to_local") else grad).clone() for key, grad in grads.items()
            }

        want = step()
        with lowtide.apply(model, {"loss": "sliced", "recompute": ["layers.*.mlp"]}):
            got = step()
            found += [] if loss_of(model) == "sliced" else [f"{name}: not sliced"]
        found += [f"{name}: {key}" for key in want if not _same(want[key], got[key])]
        found += [] if want.keys() == got.keys() else [f"{name}: other keys"]
    return found


def test_one_rank_with_all_words_has_torch_s_loss() -> None:
    """Not to the bit: torch's kernel of the whole adds the exponentials in another order than its parallel one."""
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(130, 33, generator=generator), torch.randint(33, (130,), generator=generator)
    made = parallel_cross_entropy(logits, target, VocabularyPart(ALONE, 0), slice_rows=64)
    torch.testing.assert_close(made, F.cross_entropy(logits, target))


def test_it_takes_slices_where_they_save_memory_and_keep_the_bits() -> None:
    assert _rows_at_a_time(torch.empty(256, 16_384), torch.float32) == 64
    assert _rows_at_a_time(torch.empty(255, 16_384), torch.float32) == 255
    assert _rows_at_a_time(torch.empty(0, 16_384), torch.float32) == 1


def test_elsewhere_than_on_the_cpu_it_takes_all_rows_at_once_and_says_so() -> None:
    with pytest.warns(UserWarning, match="all rows at once") as caught:
        assert not _keeps_bits(torch.device("cuda:0"), torch.bfloat16, 37, torch.float32)
    assert [str(each.message) for each in caught] == [
        "lowtide: cross_entropy over ranks takes all rows at once: in slices it is not known to have the same bits "
        f"here (torch {torch.__version__}, cuda:0, bfloat16, 37 words)"
    ]
    _keeps_bits.cache_clear()


def test_parts_are_compared_before_anything_is_computed_from_them() -> None:
    part: Any = None  # never asked
    with pytest.raises(ConfigError, match="needs logits of shape"):
        parallel_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64), part)
