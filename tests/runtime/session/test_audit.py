"""The audited peak: predicted beside audited, whatever is around it, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.core.plan import Plan
from lowtide.errors import ConfigError
from lowtide.units import format_bytes
from tests.support.virtual_engine import virtual


def gemma2() -> tuple[nn.Module, Callable[[int], dict]]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=16, attn_implementation="eager",
    )  # fmt: skip
    return Gemma2ForCausalLM(config), lambda length: _tokens(512, length)


def bert() -> tuple[nn.Module, Callable[[int], dict]]:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=512, hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4
    )
    return BertForMaskedLM(config), lambda length: _tokens(512, length)


def _tokens(size: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(size, (2, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


class Steps:
    """Steps of some micro-batches each, and what they leave."""

    def __init__(self, model: nn.Module, batch: dict, num_micro_batches: int = 1) -> None:
        self.model, self.batch, self.num_micro_batches = model, batch, num_micro_batches
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        torch.manual_seed(1)

    def run(self) -> None:
        for _ in range(self.num_micro_batches):
            self.model(**self.batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def left(self) -> list[Any]:
        return [*(p.detach().clone() for p in self.model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("build", "engine", "num_micro_batches"),
    [
        (gemma2, "host", 3),
        pytest.param(bert, virtual(0), 1, marks=pytest.mark.extended),
        pytest.param(gemma2, "host", 1, marks=pytest.mark.extended),
        pytest.param(bert, virtual(0), 3, marks=pytest.mark.extended),
    ],
)
def test_predicted_stands_beside_audited_and_they_are_close(
    build: Callable, engine: str, num_micro_batches: int
) -> None:
    model, batch = build()
    steps = Steps(model, batch(32), num_micro_batches)
    plain = lowtide.plan(model, steps.batch, budget="1GiB", optimizer=steps.optimizer).predicted
    budget = (plain.floor_bytes + plain.plain_peak_bytes) // 2
    with lowtide.optimize(model, budget=budget, optimizer=steps.optimizer, engine=engine) as tide:
        with pytest.raises(ConfigError) as error, tide.audit():
            pass
        assert str(error.value) == "audit: no plan is in force; run a step first"
        for _ in range(3):
            steps.run()
        with tide.audit() as audit:
            steps.run()
        plan, stats = tide.plan, tide.stats
        assert plan.audited_peak_bytes == audit.peak_bytes <= budget
        # The account without temporaries is further off: what the audit is for.
        assert audit.peak_bytes >= 0.98 * plan.predicted.peak_bytes
        assert stats.peak_device_bytes < audit.peak_bytes
        both = f"peak {format_bytes(plan.predicted.peak_bytes)}, audited {format_bytes(audit.peak_bytes)} of a budget"
        assert both in str(plan)
        assert Plan.from_json(plan.to_json()) == plan


def test_an_audit_leaves_nothing_but_its_number() -> None:
    left = []
    for has_audit in (False, True):
        model, batch = bert()
        steps = Steps(model, batch(32), 2)
        with lowtide.optimize(model, budget="3MiB", optimizer=steps.optimizer, engine=virtual(0)) as tide:
            for number in range(8):
                if has_audit and number in (1, 4):
                    phase, num_reviews = tide.phase, [shape.num_reviews for shape in tide.source.table]
                    with tide.audit() as audit:
                        steps.run()
                        steps.model(**steps.batch)
                    # What takes longer because it is watched is not compared with what was predicted.
                    assert (phase, num_reviews) == (tide.phase, [shape.num_reviews for shape in tide.source.table])
                    assert audit.peak_bytes == tide.plan.audited_peak_bytes
                else:
                    steps.run()
                    if number in (1, 4):
                        steps.model(**steps.batch)
            assert tide.tide._scheduler.on_buffer is None
        left.append(steps.left())
    assert all(map(torch.equal, *left))


def test_what_an_audit_is_left_by_and_where_it_may_stand() -> None:
    model, batch = bert()
    steps = Steps(model, batch(16))
    with lowtide.apply(model, {"swap": "all", "min_bytes": 0}, engine=virtual(0)) as tide:
        steps.run()
        with tide.audit():
            pass
        assert tide.plan.audited_peak_bytes is None  # no step ran inside
        optimizer, steps.optimizer = steps.optimizer, None
        audit = tide.audit()
        with pytest.raises(AttributeError), audit:
            steps.run()
        steps.optimizer = optimizer
        assert audit.peak_bytes > 0
        assert tide.plan.audited_peak_bytes is None
        with tide.audit() as outer:
            with pytest.raises(ConfigError) as error, tide.audit():
                pass
            steps.run()
        assert str(error.value) == "audit: one audit is open or was used already; leave it, and ask for a new one"
        assert tide.plan.audited_peak_bytes == outer.peak_bytes
        with pytest.raises(ConfigError), outer:
            pass
        assert tide._scheduler.on_buffer is None
        assert Plan.from_json(tide.plan.to_json()) == tide.plan


def test_another_plan_inside_is_followed_and_the_number_is_nobodys() -> None:
    model, batch = bert()
    steps = Steps(model, batch(16))
    with lowtide.optimize(model, budget="4MiB", optimizer=steps.optimizer, engine=virtual(0)) as tide:
        steps.run()
        with tide.audit() as audit:
            steps.batch = batch(40)  # larger: observed and planned inside
            steps.run()
            assert tide.tide._scheduler.on_buffer is not None
        assert audit.peak_bytes > 0
        assert tide.plan.audited_peak_bytes is None
        with tide.audit() as audit:
            steps.run()
        assert tide.plan.audited_peak_bytes == audit.peak_bytes
        tide.source.for_less()
        assert tide.plan.audited_peak_bytes is None
