"""The parts of a plan for a cluster, by hand: the model's numbers, layers, network, stages, ranks and the step."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from lowtide.cluster.layer import make_layer
from lowtide.cluster.layout import Layout, schedules_of, split_layers
from lowtide.cluster.rank import RankAtWorst, Stage, least_bytes, plan_rank
from lowtide.cluster.shape import DENSE, MOE
from lowtide.cluster.step import StageTimes, durations, step_seconds_of
from lowtide.core.fate import Fate
from lowtide.pipeline.clock import play
from lowtide.timeline.hardware import all_to_all_seconds, hand_over_seconds, load_cluster, ring_seconds
from lowtide.units import GIB
from tests.support.cluster_cases import DENSE_SHAPE, MOE_SHAPE, place, question
from tests.support.row_counts import peak_live_chunks

H800 = load_cluster("h800")

# -- layers --------------------------------------------------------------------------------------------------------


def test_a_dense_layer_by_hand() -> None:
    asked = question(DENSE_SHAPE)
    layer = make_layer(*place(asked), DENSE)
    tokens = 2 * 4096
    assert layer.nbytes == {
        "x1": 2 * tokens * 2048, "n1": 2 * tokens * 2048, "q": 2 * tokens * 2048, "k": 2 * tokens * 512,
        "v": 2 * tokens * 512, "a": 2 * tokens * 2048, "x2": 2 * tokens * 2048, "n2": 2 * tokens * 2048,
        "h": 2 * tokens * 2 * 8192, "g": 2 * tokens * 8192,
    }  # fmt: skip
    products = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192
    assert (layer.parameters, layer.expert_parameters) == (products, 0)
    assert layer.times.backward_weight == pytest.approx(2 * tokens * products / 794.5e12)
    assert layer.times.collective == layer.times.exchange == 0
    named = {op.name: op for op in layer.ops}
    # Causal: half of the scores and of their product with the values.
    flops, ramp = tokens * 4096 * 16 * 256, 4096 / (4096 + 230)
    assert named["attention"].times.forward == pytest.approx(flops / (340e12 * ramp))
    assert named["attention"].times.backward_input == pytest.approx(2.5 * flops / (325e12 * ramp))
    assert layer.recipes.keys() == layer.nbytes.keys() - {"x1"}


def test_tensor_ranks_split_products_and_sequence_parallel_the_rest() -> None:
    asked = question(DENSE_SHAPE)
    whole, half = (make_layer(*place(asked, tensor=tensor), DENSE) for tensor in (1, 2))
    assert {name: half.nbytes[name] * 2 for name in half.nbytes} == whole.nbytes
    assert half.parameters * 2 == whole.parameters
    assert half.times.collective == pytest.approx(4 * (1e-5 + 2 * 2 * 4096 * 2048 / 2 / 360e9))
    plain = dataclasses.replace(asked, config=dataclasses.replace(asked.config, sequence_parallel=False))
    # A sum on both ranks is a scattered sum and a gather: as much in all.
    assert make_layer(*place(plain, tensor=2), DENSE).times.collective == half.times.collective
    kept_whole = make_layer(*place(plain, tensor=2), DENSE)
    assert {name for name in whole.nbytes if kept_whole.nbytes[name] == whole.nbytes[name]} == {"x1", "n1", "x2", "n2"}


def test_tensor_ranks_gather_short_vectors_and_have_their_matrices_whole() -> None:
    latent = {"query_rank": 768, "key_rank": 512, "rope_width": 64}
    shape = dataclasses.replace(DENSE_SHAPE, **latent, key_heads=16, key_width=128 + 64, value_width=128)
    asked = question(shape)
    whole, half = (make_layer(*place(asked, tensor=tensor), DENSE) for tensor in (1, 2))
    short = 2048 * (768 + 512 + 64)
    assert half.parameters - short == (whole.parameters - short) // 2
    tokens, rate = 2 * 4096, 360e9

    def ring(width: int) -> float:
        return 1e-5 + 2 * tokens * width / 2 / rate

    # Of attention: short vectors of queries, those of keys and values, and the sum after it. Of the MLP: before, after.
    assert half.times.collective == pytest.approx(ring(768) + ring(512 + 64) + 3 * ring(2048))
    plain = dataclasses.replace(asked, config=dataclasses.replace(asked.config, sequence_parallel=False))
    assert make_layer(*place(plain, tensor=2), DENSE).times.collective == pytest.approx(4 * ring(2048))


def test_experts_keep_what_came_over_the_network() -> None:
    asked = question(MOE_SHAPE)
    layer = make_layer(*place(asked, expert=4), MOE)
    tokens = 2 * 4096
    assert layer.nbytes["d"] == 2 * 4 * tokens * 2048
    assert layer.nbytes["expert h"] == 2 * 4 * tokens * 2 * 1024
    assert "d" not in layer.recipes and "expert h" in layer.recipes
    assert layer.expert_parameters == 16 // 4 * 3 * 2048 * 1024
    # Dispatch and combine, 4 ranks of one node: 3/4 of 4 vectors a token.
    assert layer.times.exchange == pytest.approx(2 * (1e-5 + tokens * 2 * 2048 * 4 * 3 / 4 / 360e9))
    narrow = dataclasses.replace(asked, config=dataclasses.replace(asked.config, precision="fp8"))
    low = make_layer(*place(narrow, expert=4), MOE)
    assert low.nbytes["d"] * 2 == layer.nbytes["d"]
    assert low.nbytes["q"] == layer.nbytes["q"]  # attention stays in bf16
    assert low.times.forward < layer.times.forward


def test_context_ranks_share_a_sequence() -> None:
    asked = question(DENSE_SHAPE)
    whole, half = (make_layer(*place(asked, context=context), DENSE) for context in (1, 2))
    assert half.saved_bytes * 2 == whole.saved_bytes
    assert half.parameters == whole.parameters
    (ahead,) = [op for op in half.ops if op.name == "attention"]
    assert ahead.times.forward * 2 == pytest.approx(sum(op.times.forward for op in whole.ops if op.name == "attention"))


# -- network -------------------------------------------------------------------------------------------------------


def test_network_times_by_hand() -> None:
    def exchange(ranks: int, most_nodes: int | None = 4) -> float:
        return all_to_all_seconds(H800, ranks, tokens=100, vector_bytes=14336, top_k=8, most_nodes=most_nodes)

    assert exchange(1) == 0
    assert exchange(8) == pytest.approx(1e-5 + 100 * 14336 * 8 * 7 / 8 / 160e9)
    assert exchange(64) == pytest.approx(1e-5 + 100 * 14336 * 4 * 7 / 8 / 50e9)  # 8 nodes, 4 of them for each token
    reached = 8 * (1 - (7 / 8) ** 8)
    assert exchange(64, None) == pytest.approx(1e-5 + 100 * 14336 * reached * 7 / 8 / 50e9)
    assert ring_seconds(H800, 1, 1e9) == 0
    assert ring_seconds(H800, 4, 1e9) == pytest.approx(1e-5 + 1e9 * 3 / 4 / 160e9)
    assert ring_seconds(H800, 4, 1e9, stride=8) == pytest.approx(1e-5 + 1e9 * 3 / 4 / 50e9)
    # Two nodes: a ring for each device of a node, over an adapter of its own, and no faster than within a node.
    assert ring_seconds(H800, 16, 1e9) == pytest.approx(1e-5 + 1e9 * 15 / 16 / 160e9)
    assert ring_seconds(H800, 8, 1e9, stride=4) == pytest.approx(1e-5 + 1e9 * 7 / 8 / 100e9)
    assert hand_over_seconds(H800, 1e9, stride=8, ranks=1) == 0
    assert hand_over_seconds(H800, 1e9, stride=8, ranks=2) == pytest.approx(1e-5 + 1e9 / 50e9)


# -- stages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.5, 3.0), (0.0, 7.0)])
def test_a_balanced_split_is_the_best_there_is(num_stages: int, first: float, last: float) -> None:
    costs = (3.0, 1.0, 1.0, 2.0, 2.0, 2.0, 1.5)

    def slowest(counts: tuple[int, ...]) -> float:
        ends = list(itertools.accumulate(counts))
        sums = [sum(costs[end - count : end]) for count, end in zip(counts, ends, strict=True)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    ways = (
        tuple(end - start for start, end in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), num_stages - 1)
    )
    best = min(slowest(counts) for counts in ways if 0 not in counts[1:-1])
    found = split_layers(costs, num_stages, first=first, last=last)
    assert sum(found) == len(costs)
    assert slowest(found) == pytest.approx(best)


def test_wanted_splits_are_taken_as_they_are() -> None:
    assert split_layers([1.0] * 6, 3, wanted="even") == (2, 2, 2)
    assert split_layers([1.0] * 6, 3, wanted=(1, 4, 1)) == (1, 4, 1)
    # The output layer is as long as two layers: the last stage has none.
    assert split_layers([1.0] * 6, 4, last=2.0) == (2, 2, 2, 0)


# -- ranks ---------------------------------------------------------------------------------------------------------


def task(budget_gib: float, chunks: int = 3, fates: tuple[Fate, ...] = tuple(Fate)) -> RankAtWorst:
    return RankAtWorst(
        stages=(Stage(kinds=(DENSE,) * 2),),
        chunks=(chunks,),
        state_bytes=GIB,
        budget_bytes=int(budget_gib * GIB),
        fates=fates,
    )


@pytest.mark.parametrize("chunks", [3, 12])
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_a_rank_holds_its_budget_and_no_plan_is_below_its_bounds(chunks: int, share: float) -> None:
    asked = question(DENSE_SHAPE)
    layers = {DENSE: make_layer(*place(asked), DENSE)}
    link = asked.hardware.link
    base = GIB + layers[DENSE].temporary_bytes
    budget_gib = (base + share * chunks * 2 * layers[DENSE].saved_bytes) / GIB
    plan = plan_rank(task(budget_gib, chunks), layers, link, {})
    assert plan is not None
    assert plan.peak_bytes <= plan.task.budget_bytes
    assert least_bytes(plan.task, layers) <= plan.peak_bytes
    assert plan.kept_bytes + plan.swapped_bytes + plan.recomputed_bytes == pytest.approx(plan.saved_bytes, abs=3)
    assert plan.swapped_bytes + plan.recomputed_bytes >= (1 - share) * plan.saved_bytes * 0.999
    for name, (swapped, recomputed) in plan.shares[0][DENSE].items():
        assert 0 <= swapped + recomputed <= 1, name


def test_a_rank_with_room_keeps_everything_and_one_without_has_no_plan() -> None:
    asked = question(DENSE_SHAPE)
    layers = {DENSE: make_layer(*place(asked), DENSE)}
    plan = plan_rank(task(64.0), layers, asked.hardware.link, {})
    assert plan is not None
    assert plan.kept_bytes == plan.saved_bytes == 6 * layers[DENSE].saved_bytes
    assert plan.recompute_seconds == plan.stall_seconds == (0.0,)
    assert plan_rank(task(1.1), layers, asked.hardware.link, {}) is None
    assert plan_rank(task(3.0, fates=(Fate.KEEP,)), layers, asked.hardware.link, {}) is None


def test_fates_that_rules_forbid_are_not_used() -> None:
    asked = question(DENSE_SHAPE)
    layers = {DENSE: make_layer(*place(asked), DENSE)}
    for fates, nothing in (
        ((Fate.KEEP, Fate.RECOMPUTE), "swapped_bytes"),
        ((Fate.KEEP, Fate.SWAP), "recomputed_bytes"),
    ):
        plan = plan_rank(task(4.5, fates=fates), layers, asked.hardware.link, {})
        assert plan is not None
        assert getattr(plan, nothing) == 0
    every = plan_rank(task(64.0, fates=(Fate.RECOMPUTE,)), layers, asked.hardware.link, {})
    assert every is not None
    # Only the input of a layer cannot be made again.
    assert every.kept_bytes == 6 * layers[DENSE].nbytes["x1"]


# -- the step ------------------------------------------------------------------------------------------------------

TIMES = StageTimes(forward=1.0, backward_input=1.0, backward_weight=1.0, exchange=0.5)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v", "dualpipev", "interleaved_overlap"])
@pytest.mark.parametrize("num_micro_batches", [8, 20, 40])
def test_a_long_step_is_the_short_one_and_more_of_the_same(schedule: str, num_micro_batches: int) -> None:
    layout = Layout(pipeline=4, interleave=1 if schedule == "1f1b" else 2, schedule=schedule, data=1)
    stages = tuple(dataclasses.replace(TIMES, forward=1 + 0.1 * (stage % 3)) for stage in range(layout.num_stages))
    parts = step_seconds_of(
        schedules_of(layout, num_micro_batches), stages, 0.1, num_micro_batches, transfer_seconds=0.05, gradients=2.0,
        optimizer=1.0,
    )  # fmt: skip
    from lowtide.pipeline.generators import make_schedule

    each = 2 if "interleaved" in schedule else None
    whole = make_schedule(schedule, num_ranks=4, num_micro_batches=num_micro_batches, stages_per_rank=each)
    played = play(whole, durations(stages, 0.1), transfer_seconds=0.05)
    # Stages that differ settle slowly where each rank has several of them.
    assert parts.total == pytest.approx(played.step_seconds + 3.0, rel=5e-3 if "interleaved" in schedule else 1e-6)
    assert all(value >= -1e-9 for value in dataclasses.asdict(parts).values())


def test_pairs_hide_the_all_to_all_and_slow_the_rest() -> None:
    layout = Layout(schedule="one_stage_overlap")
    parts = step_seconds_of(schedules_of(layout, 3), (TIMES,), 0.2, 3, transfer_seconds=0, gradients=0, optimizer=0)
    # A forward and a backward alone show their all-to-all; two pairs lose a fifth of a second a second.
    assert parts.compute == 9.0
    assert parts.exchange == pytest.approx(2 * 0.5 + 2 * 0.2 * 1.0)
    assert parts.bubble == pytest.approx(0)
    slow = (dataclasses.replace(TIMES, exchange=4.0),)
    parts = step_seconds_of(schedules_of(layout, 3), slow, 0.2, 3, transfer_seconds=0, gradients=0, optimizer=0)
    assert parts.total == pytest.approx(5.0 + 2 * 8.0 + 6.0)  # where the network is slower, it sets the pace


def test_the_fullest_mix_is_the_peak_of_the_schedule() -> None:
    for schedule, interleave in (("1f1b", 1), ("interleaved", 3), ("zb_v", 2), ("dualpipev", 2)):
        layout = Layout(pipeline=4, interleave=interleave, schedule=schedule)
        schedules = schedules_of(layout, 16)
        fullest = schedules.fullest([1.0] * layout.num_stages)
        assert tuple(sum(mix) for mix in fullest) == peak_live_chunks(schedules.schedule)


def test_a_schedule_is_named_by_what_is_played() -> None:
    layout = Layout(pipeline=8, interleave=2, schedule="dualpipe", data=2)
    assert (layout.schedule_ranks, layout.num_stages, layout.shared_ranks) == (4, 8, 4)
    assert schedules_of(layout, 16).schedule.name == "dualpipev"
    assert math.prod((layout.tensor, layout.pipeline, layout.context, layout.data)) == layout.num_devices == 16
