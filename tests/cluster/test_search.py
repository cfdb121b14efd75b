"""The search: the best of all, by brute force; pinned values; and the refusals, to the letter."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from lowtide.cluster.layout import Question, layouts
from lowtide.cluster.report import document, lines
from lowtide.cluster.search import ClusterPlan, Planner, plan_cluster
from lowtide.config.run import AXES
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from tests.support.cluster_cases import DENSE_SHAPE, MOE_SHAPE, question
from tests.support.grid import one_of

ALL = 10**6


def found(asked: Question, **options: Any) -> ClusterPlan:
    return plan_cluster(asked, most_planned=ALL, **options)


def planned(asked: Question) -> dict[str, float]:
    """Every layout that fits, without any bound: name -> seconds. On the way, no bound is above the plan's time."""
    planner = Planner(asked)
    times = {}
    for layout in layouts(asked)[0]:
        draft = planner.draft(layout)
        plan = planner.plan(draft)
        if plan is None:
            continue
        assert draft.least_bytes <= asked.budget_bytes
        assert max(draft.least_seconds, planner.sharper(draft)) <= plan.step_seconds * (1 + 1e-9)
        times[str(layout)] = plan.step_seconds
    return times


TIGHT: dict[str, Any] = {"shape": DENSE_SHAPE, "budget_gib": 8.0, "micro_batch": 4, "devices": 4, "tensor": 1}
SMALL_GRIDS: dict[str, dict[str, Any]] = {
    "room for all": {"devices": 4, "context": 1},
    "experts and little room": {"budget_gib": 12.0, "micro_batch": 4, "devices": 4, "tensor": 1, "context": 1,
                                "expert": 4},
    "no experts": TIGHT | {"context": 1, "pipeline": 2},
    "no swap": TIGHT | {"budget_gib": 10.0, "context": 1, "pipeline": 2, "fates": (Fate.KEEP, Fate.RECOMPUTE)},
}  # fmt: skip


@pytest.mark.parametrize("name", one_of(2, reversed(SMALL_GRIDS)))
def test_the_fastest_layouts_are_those_of_brute_force(name: str) -> None:
    asked = question(**SMALL_GRIDS[name])
    times = planned(asked)
    plan = found(asked)
    assert [entry.step_seconds for entry in plan.plans] == sorted(times.values())[: len(plan.plans)]
    assert plan.num_layouts - plan.num_too_large >= len(times) >= len(plan.plans) > 1
    assert plan.bound_seconds is None


def test_a_free_layout_is_never_slower_than_a_pinned_one() -> None:
    best = found(question(**TIGHT), num_shown=1).best.step_seconds
    for pipeline, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "zb_v"), (4, "interleaved")):
        plan = found(question(**TIGHT, pipeline=pipeline, schedule=schedule), num_shown=1)
        assert best <= plan.best.step_seconds


@pytest.mark.parametrize(
    "pinned",
    [
        {"pipeline": 4, "data": 2},
        {"tensor": 2, "expert": 4, "schedule": "dualpipev", "pipeline": 2},
        {"interleave": 3, "pipeline": 2, "schedule": "interleaved"},
        {"optimizer_shards": 1, "context": 1},
        {"tensor": 1, "pipeline": 4, "interleave": 2, "expert": 2, "context": 1, "data": 2, "optimizer_shards": 2},
    ],
)
def test_a_pinned_value_is_never_changed(pinned: dict[str, Any]) -> None:
    for plan in found(question(**pinned)).plans:
        assert {key: getattr(plan.layout, key) for key in pinned} == pinned
        assert plan.layout.num_devices == 8


def test_all_pinned_is_one_layout() -> None:
    sizes = dict(zip(AXES, (1, 4, 1, 2, 1, 2, 2), strict=True))
    plan = found(question(**sizes, schedule="1f1b"))
    assert (plan.num_layouts, plan.num_planned, len(plan.plans)) == (1, 1, 1)
    assert str(plan.best.layout) == "PP 4 1f1b, TP 1, EP 2, DP 2, ZeRO-1 over 2"


def test_the_limit_of_the_search_is_said() -> None:
    plan = plan_cluster(question(**TIGHT), most_planned=1)
    assert plan.num_planned == len(plan.plans) == 1
    assert plan.bound_seconds is not None


def test_dualpipe_is_dualpipev_on_half_of_the_ranks() -> None:
    common: dict[str, Any] = {"tensor": 1, "context": 1, "expert": 2}
    whole = found(question(**common, pipeline=4, data=2, schedule="dualpipe", optimizer_shards=4)).best
    half = found(question(**common, pipeline=2, data=4, schedule="dualpipev", optimizer_shards=4)).best
    assert whole.seconds.compute == half.seconds.compute
    assert whole.peak_bytes == half.peak_bytes
    assert whole.seconds.bubble == pytest.approx(half.seconds.bubble, rel=1e-3)


def test_more_memory_is_never_slower_and_the_budget_holds() -> None:
    times = []
    for budget_gib in (7.0, 8.0, 10.0):
        limits = TIGHT | {"budget_gib": budget_gib}
        plan = found(question(**limits, context=1, pipeline=4, schedule="1f1b"), num_shown=1)
        assert plan.best.peak_bytes <= budget_gib * 2**30
        times.append(plan.best.step_seconds)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.parametrize(
    ("shape", "asked", "text"),
    [
        (MOE_SHAPE, {"tensor": 2, "pipeline": 2, "context": 1, "data": 3},
         "parallel: 'parallel.data': tensor 2 x pipeline 2 x context 1 x data 3 makes 12 devices, not 8; leave "
         "one of "
         "them out"),
        (MOE_SHAPE, {"tensor": 3, "pipeline": 1, "context": 1},
         "parallel: 'parallel.data': tensor 3 x pipeline 1 x context 1 x data 2 makes 6 devices, not 8; leave "
         "one of "
         "them out"),
        (MOE_SHAPE, {"pipeline": 3, "expert": 2},
         "parallel: 'parallel.devices': no sizes with pipeline 3, expert 2 multiply to 8 devices; leave one of them "
         "out"),
        (MOE_SHAPE, {"expert": 3}, "parallel: 'parallel.expert': 16 experts do not divide over 3 expert ranks"),
        (MOE_SHAPE, {"expert": 16, "pipeline": 2},
         "parallel: 'parallel.expert': 16 expert ranks cannot be taken from 4 (tensor x context x data)"),
        (DENSE_SHAPE, {"expert": 2},
         "parallel: 'parallel.expert': 'llama' has no experts to divide over 2 ranks; remove the key"),
        (DENSE_SHAPE, {"devices": 64, "tensor": 32, "pipeline": 1, "context": 1},
         "parallel: 'parallel.tensor': 16 heads do not divide over 32 tensor ranks"),
        (MOE_SHAPE, {"layers": "even", "pipeline": 4, "schedule": "1f1b"},
         "parallel: 'parallel.layers': 9 layers do not split evenly over 4 stages; use a model of 8 or 12 "
         "layers, or "
         "a number of stages that divides 9"),
        (MOE_SHAPE, {"layers": (4, 4), "pipeline": 2, "schedule": "1f1b"},
         "parallel: 'parallel.layers': adds up to 8 of 9 layers"),
        (MOE_SHAPE, {"layers": (5, 4), "pipeline": 4, "schedule": "1f1b"},
         "parallel: 'parallel.layers': has 2 numbers for 4 stages"),
        (DENSE_SHAPE, {"devices": 16, "pipeline": 16, "schedule": "1f1b"},
         "parallel: 'parallel.pipeline': 8 layers are too few for 16 stages"),
        (MOE_SHAPE, {"pipeline": 4, "schedule": "dualpipev", "sequences": 16, "tensor": 1, "context": 1},
         "parallel: 'parallel.schedule': 'dualpipev' on 4 ranks needs at least 8 micro-batches (2 x ranks), "
         "not 4"),
        (MOE_SHAPE, {"pipeline": 4, "schedule": "interleaved", "interleave": 2, "sequences": 36, "tensor": 1,
                     "context": 1},
         "parallel: 'parallel.schedule': 9 micro-batches on 4 ranks do not split into 2 equal rounds of "
         "'interleaved'; use 8 or 10 micro-batches"),
        (MOE_SHAPE, {"data": 8, "sequences": 60, "tensor": 1, "pipeline": 1},
         "parallel: 'parallel.global_batch': 60 sequences do not divide into micro-batches of 2 on 8 data "
         "ranks"),
        (MOE_SHAPE, {"schedule": "zb_v", "interleave": 3, "pipeline": 2},
         "parallel: 'parallel.interleave': 'zb_v' has 2 stages a rank, not 3"),
        (MOE_SHAPE, {"schedule": "dualpipe", "pipeline": 1, "layers": "even"},
         "parallel: 'parallel.pipeline': 'dualpipe' needs an even number of pipeline ranks, not 1"),
        (MOE_SHAPE, {"schedule": "dualpipe", "pipeline": 4, "data": 2, "sequences": None, "accumulation": 17},
         "parallel: 'parallel.schedule': 'dualpipe' needs an even number of micro-batches, not 17"),
        (MOE_SHAPE, {"optimizer_shards": 3, "data": 8},
         "parallel: 'parallel.optimizer_shards': 3 shards do not divide 8 ranks with the same "
         "parameters"),
        (MOE_SHAPE, {"tensor": 2, "sequence_parallel": False},
         "parallel: 'parallel.sequence_parallel': experts beside tensor ranks need "
         "'sequence_parallel: "
         "true'"),
        (MOE_SHAPE, {"budget_gib": 0.5, "pipeline": 1, "tensor": 1, "context": 1, "expert": 8, "schedule": "1f1b"},
         "budget 512.0 MiB: no layout of 8 devices fits; the nearest, PP 1, TP 1, EP 8, DP 8, ZeRO-1 over 8, needs "
         "4.7 GiB "
         "at least, of which 4.0 GiB are weights, gradients and optimizer; take more devices, a smaller micro-batch, "
         "or "
         "leave more of 'parallel' open"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_words(shape: Any, asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan_cluster(question(shape, **asked))
    assert str(error.value) == text


def test_whatever_is_asked_is_refused_with_words_or_planned_within_the_budget() -> None:
    draw = random.Random(1)
    sizes = {"tensor": (1, 2, 4), "pipeline": (1, 2, 3, 4), "interleave": (1, 2, 3), "expert": (1, 2, 4, 8),
             "context": (1, 2), "data": (1, 2, 4), "optimizer_shards": (1, 2, 4)}  # fmt: skip
    schedules = ("1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev", "dualpipe", "one_stage_overlap")
    num_planned = 0
    for _ in range(300):
        asked: dict[str, Any] = {key: draw.choice(values) for key, values in sizes.items() if draw.random() < 0.5}
        asked |= {"schedule": draw.choice(schedules)} if draw.random() < 0.8 else {}
        asked |= {"layers": draw.choice(("even", (4, 5), (2, 2, 2, 3), (0, 9, 0)))} if draw.random() < 0.2 else {}
        asked |= {"sequence_parallel": False} if draw.random() < 0.2 else {}
        asked |= {"devices": draw.choice((1, 2, 4, 8, 12)), "budget_gib": draw.choice((12.0, 20.0, 40.0))}
        asked |= {"sequences": draw.choice((16, 32, 48, None)), "accumulation": draw.choice((1, 4, 6, 8))}
        try:
            plan = plan_cluster(question(draw.choice((DENSE_SHAPE, MOE_SHAPE)), **asked), num_shown=1, most_planned=1)
        except ConfigError:
            continue
        num_planned += 1
        assert plan.best.peak_bytes <= asked["budget_gib"] * 2**30
        assert {key: getattr(plan.best.layout, key) for key in sizes if key in asked}.items() <= asked.items()
    assert num_planned > 20


@pytest.mark.parametrize("stages", [1, 2])
def test_the_rank_with_the_logits_knows_the_loss(stages: int) -> None:
    """Plain: 14 bytes a logit; in slices 4, and the slices; where tensor ranks share the words, 6."""
    asked: dict[str, Any] = {"devices": 4, "context": 1, "pipeline": stages, "schedule": "1f1b", "budget_gib": 60.0}
    logits = 2 * 4096 * DENSE_SHAPE.vocabulary
    for tensor, slices, wanted in ((1, False, 14 * logits), (1, True, 4 * logits + 2**28), (2, True, 3 * logits)):
        made = question(DENSE_SHAPE, tensor=tensor, data=4 // stages // tensor, **asked)
        plan = plan_cluster(dataclasses.replace(made, slices_loss=slices)).best
        *others, last = plan.ranks
        assert last.task.stages[-1].head_bytes == wanted, (tensor, slices)
        assert all(not stage.head_bytes for rank in others for stage in rank.task.stages)
        assert last.peak_bytes >= last.task.state_bytes + wanted
        document_of = document(plan_cluster(dataclasses.replace(made, slices_loss=slices)))
        assert document_of["loss"] == ("sliced" if slices else "plain")


def test_slices_that_save_nothing_are_not_counted() -> None:
    made = question(dataclasses.replace(DENSE_SHAPE, vocabulary=64), devices=1, tensor=1, pipeline=1, budget_gib=60.0)
    (rank,) = plan_cluster(made).best.ranks
    assert rank.task.stages[0].head_bytes == 14 * 2 * 4096 * 64


def test_state_elsewhere_fits_where_it_does_not_and_costs_its_copies() -> None:
    asked: dict[str, Any] = {"shape": DENSE_SHAPE, "devices": 4, "tensor": 1, "context": 1, "pipeline": 2}
    keep, swap, auto = (
        found(dataclasses.replace(question(**asked, budget_gib=40.0), optimizer=where)).best
        for where in ("keep", "swap", "auto")
    )
    link = question(**asked).hardware.link
    assert swap.moved_bytes and not keep.moved_bytes
    assert max(rank.task.state_bytes for rank in keep.ranks) > max(rank.task.state_bytes for rank in swap.ranks)
    copies = swap.moved_bytes / min(link.in_bytes_per_second, link.out_bytes_per_second)
    assert swap.seconds.optimizer == pytest.approx(copies) and copies > keep.seconds.optimizer
    assert auto.step_seconds == keep.step_seconds < swap.step_seconds  # there is room for all
    least = next(gib for gib in (2.0, 2.5, 3.0, 3.5, 4.0, 5.0) if _fits(question(**asked, budget_gib=gib), "auto"))
    assert not _fits(question(**asked, budget_gib=least), "keep")
    assert any("optimizer's state" in line for line in lines(_fits(question(**asked, budget_gib=least), "auto")))


def _fits(asked: Question, where: Any) -> Any:
    try:
        return found(dataclasses.replace(asked, optimizer=where))
    except ConfigError:
        return None
