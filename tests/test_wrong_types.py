"""Arguments of the wrong type: every public call says in one line what it takes, and ignores none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.pipeline.cut_model import cut

WRONG = (20, 20.5, -1, "banana", b"x", True, [], (1,), {"a": 1}, object(), nn.Linear, torch.ones(2), iter([1]))
ROWS = torch.ones(4, 8)
LABELS = torch.zeros(4, dtype=torch.int64)
SECTIONS = {"recompute_config": {"recompute": True}}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW(model().parameters())


def total(output: torch.Tensor) -> torch.Tensor:
    return output.sum()


def policy(*args: Any, **kwargs: Any) -> None:
    pass


CALLS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "optimize model": (lambda x: lowtide.optimize(x, "1GiB"), ()),
    "optimize budget": (lambda x: lowtide.optimize(model(), x), ()),
    "optimize memory": (lambda x: lowtide.optimize(model(), memory=x), ()),
    "optimize optimizer": (lambda x: lowtide.optimize(model(), "1GiB", optimizer=x), ()),
    "optimize engine": (lambda x: lowtide.optimize(model(), "1GiB", engine=x), ()),
    "optimize group": (lambda x: lowtide.optimize(model(), "1GiB", group=x), ()),
    "apply model": (lambda x: lowtide.apply(x, {"swap": "none"}), ()),
    "apply memory": (lambda x: lowtide.apply(model(), x), ()),
    "apply optimizer": (lambda x: lowtide.apply(model(), {"swap": "none"}, optimizer=x), ()),
    "apply engine": (lambda x: lowtide.apply(model(), {"swap": "none"}, engine=x), ()),
    "apply group": (lambda x: lowtide.apply(model(), {"swap": "none"}, group=x), ()),
    "apply first_layer": (lambda x: lowtide.apply(model(), SECTIONS, first_layer=x), ()),
    "apply tp_group": (lambda x: lowtide.apply(model(), SECTIONS, tp_group=x), ()),
    "apply recompute_config": (lambda x: lowtide.apply(model(), {"recompute_config": x}), (True,)),
    "apply swap_config": (lambda x: lowtide.apply(model(), {"swap_config": x}), ()),
    "plan model": (lambda x: lowtide.plan(x, (ROWS,), "1GiB"), ()),
    "plan batch": (lambda x: lowtide.plan(model(), x, "1GiB", loss=total), (nn.Linear,)),
    "plan input": (lambda x: lowtide.plan(model(), (x,), "1GiB", loss=total), ()),
    "plan budget": (lambda x: lowtide.plan(model(), (ROWS,), x, loss=total), ()),
    "plan memory": (lambda x: lowtide.plan(model(), (ROWS,), memory=x), ()),
    "plan host_budget": (lambda x: lowtide.plan(model(), (ROWS,), "1GiB", host_budget=x, loss=total), (20,)),
    "plan optimizer": (lambda x: lowtide.plan(model(), (ROWS,), "1GiB", optimizer=x), ()),
    "plan hardware": (lambda x: lowtide.plan(model(), (ROWS,), "1GiB", hardware=x), ()),
    "plan loss": (lambda x: lowtide.plan(model(), (ROWS,), "1GiB", loss=x), (nn.Linear,)),
    "plan progress": (lambda x: lowtide.plan(model(), (ROWS,), "1GiB", loss=total, progress=x), (nn.Linear,)),
    "observe model": (lambda x: lowtide.observe(x, (ROWS,), loss=total), ()),
    "observe batch": (lambda x: lowtide.observe(model(), x, loss=total), (nn.Linear,)),
    "observe input": (lambda x: lowtide.observe(model(), (x,), loss=total), ()),
    "observe loss": (lambda x: lowtide.observe(model(), (ROWS,), loss=x), (nn.Linear,)),
    "observe optimizer": (lambda x: lowtide.observe(model(), (ROWS,), loss=total, optimizer=x), ()),
    "current model": (lowtide.current, ()),
    "remove model": (lowtide.remove, ()),
    "write_report handle": (lambda x: lowtide.write_report(x, "never.html"), ()),
    "write_report path": (lambda x: lowtide.write_report(model(), x), ()),
    "load model": (lambda x: lowtide.load(x, "folder"), ()),
    "load folder": (lambda x: lowtide.load(torch.nn.Linear(2, 2), x), ()),
    "load device": (lambda x: lowtide.load(torch.nn.Linear(2, 2), "folder", device=x), ()),
    "swap_optimizer optimizer": (lowtide.swap_optimizer, ()),
    "swap_optimizer tier": (lambda x: lowtide.swap_optimizer(adam(), tier=x), ()),
    "swap_optimizer overlap": (lambda x: lowtide.swap_optimizer(adam(), overlap=x), ()),
    "swap_optimizer bucket_bytes": (lambda x: lowtide.swap_optimizer(adam(), bucket_bytes=x), ()),
    "swap_optimizer engine": (lambda x: lowtide.swap_optimizer(adam(), engine=x), ()),
    "swap_optimizer min_bytes": (lambda x: lowtide.swap_optimizer(adam(), min_bytes=x), (20,)),
    "selective_offload policy": (lambda x: lowtide.selective_offload(x, model()), (nn.Linear,)),
    "selective_offload model": (lambda x: lowtide.selective_offload(policy, x), ()),
    "selective_offload host_budget": (lambda x: lowtide.selective_offload(policy, model(), host_budget=x), (20,)),
    "selective_offload min_bytes": (lambda x: lowtide.selective_offload(policy, model(), min_bytes=x), (20,)),
    "selective_offload engine": (lambda x: lowtide.selective_offload(policy, model(), engine=x), ()),
    "cross_entropy logits": (lambda x: lowtide.cross_entropy(x, LABELS), ()),
    "cross_entropy labels": (lambda x: lowtide.cross_entropy(ROWS, x), ()),
    "cross_entropy reduction": (lambda x: lowtide.cross_entropy(ROWS, LABELS, reduction=x), ()),
    "cross_entropy ignore_index": (lambda x: lowtide.cross_entropy(ROWS, LABELS, ignore_index=x), (20, -1)),
    "cross_entropy z_loss": (lambda x: lowtide.cross_entropy(ROWS, LABELS, z_loss=x), (20, 20.5)),
    "cross_entropy label_smoothing": (lambda x: lowtide.cross_entropy(ROWS, LABELS, label_smoothing=x), ()),
    "cut model": (lambda x: cut(x, [range(1)]), ()),
    "Plan.from_json": (lowtide.Plan.from_json, ()),
    "Profile.from_json": (lowtide.Profile.from_json, ()),
}
"""Call -> how to make it, and which of `WRONG` are right for it."""


@pytest.mark.parametrize("call", CALLS)
def test_one_line_says_what_it_takes(call: str) -> None:
    make, right = CALLS[call]
    for wrong in WRONG:
        if any(wrong is value for value in right):
            continue
        try:
            make(wrong)
        except lowtide.ConfigError as error:
            text = str(error)
        except Exception as error:
            pytest.fail(f"{wrong!r}: {type(error).__name__}: {error}")
        else:
            pytest.fail(f"{wrong!r} was taken without a word")
        assert "\n" not in text and "object has no" not in text, text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: lowtide.apply(model(), "20GiB"),
            "lowtide.apply: '20GiB' is a budget, not a plan; write lowtide.optimize(model, budget='20GiB')",
        ),
        (
            lambda: lowtide.optimize(model(), 20),
            "memory.budget: 20 is 20 bytes; write the unit too, such as '20GiB'",
        ),
        (
            lambda: lowtide.optimize(model(), {"budget": "20GiB"}),
            "memory.budget: expected a size such as 20GiB; a section goes to memory=, not to budget=",
        ),
        (
            lambda: lowtide.optimize(model(), "20GiB", group="alon"),
            "lowtide.optimize: group= takes a process group, as torch.distributed.new_group makes it, not str",
        ),
        (
            lambda: lowtide.observe(model(), (iter([ROWS]),)),
            "observe: an input of Sequential is a list_iterator, which can be read once, and the observed step reads "
            "it too; pass a list or a tuple",
        ),
        (lambda: lowtide.current(3), "lowtide.current and lowtide.remove: model= takes a torch.nn.Module, not int"),
    ],
)
def test_the_sentence(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(lowtide.ConfigError) as caught:
        make()
    assert str(caught.value) == message


def test_a_model_that_eats_its_input_is_not_observed_on_it() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, rows: Any) -> torch.Tensor:
            return sum(self.linear(each).sum() for each in rows)  # type: ignore[return-value]

    net = Sum()
    with lowtide.optimize(net, "1GiB"):
        rows = iter([ROWS, ROWS])
        with pytest.raises(lowtide.ConfigError, match="which can be read once"):
            net(rows)
        assert len(list(rows)) == 2
        assert net([ROWS, ROWS]).isfinite()


def test_a_wrapped_model_is_cut_inside() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=32,
                                      num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    inner = transformers.LlamaForCausalLM(config)

    class Adapted(nn.Module):  # as peft wraps a model: what it does not have itself is asked of the model inside
        def __init__(self) -> None:
            super().__init__()
            self.base_model = nn.ModuleDict({"model": inner})
            self.config = config

        @property
        def model(self) -> nn.Module:
            return inner

        def get_base_model(self) -> nn.Module:
            return inner

    wrapped = Adapted()
    with pytest.raises(lowtide.ConfigError) as caught:
        cut(wrapped, [range(1), range(1, 2)])
    assert str(caught.value) == ("pipeline: Adapted has no model.layers to cut; cut model.get_base_model() instead")
    assert len(cut(wrapped.get_base_model(), (range(i, i + 1) for i in range(2)))) == 2
