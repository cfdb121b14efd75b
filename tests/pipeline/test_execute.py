"""Pipelines on real ranks: loss and every gradient equal those of one process to the bit; mistakes end all ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.pipeline.clock import with_transfers
from lowtide.pipeline.generators import GENERATORS, make_schedule
from tests.support import pipeline_jobs, two_ranks
from tests.support.receives import peak_receives
from tests.support.row_counts import peak_live_chunks
from tests.support.staged_models import MANY
from tests.support.zoo import mixed

SPLIT = ("zb_v", "dualpipev")
RECOMPUTE = mixed(recompute=["layers.*"])
SWAP = mixed(swap=["layers.*"])
SEVERAL = [name for name in GENERATORS if name != "one_stage_overlap"]
"""Schedules of more than one rank."""


PASSED_ON = {
    "expanded": "zb_v",
    "conjugated": "zb_v",
    "negated": "interleaved",
    "transposed": "gpipe",
    "copied": "zb_v",
    "written": "interleaved",
}
"""Kinds of tensors, each under a schedule."""
Job = two_ranks.Job


def _jobs_of(name: str) -> dict[str, Job]:
    """Of one schedule: with a plan that recomputes, or with one that swaps, in turn."""
    recomputes = SEVERAL.index(name) % 2 == 0
    planned = "uneven, recompute" if recomputes else "swap"
    how = {"uneven": True, "memory": RECOMPUTE} if recomputes else {"memory": SWAP}
    jobs: dict[str, Job] = {
        name: ("trained", {"name": name, "num_steps": 2}),
        f"{name}, {planned}": ("trained", {"name": name, **how}),
        f"{name}, counted": ("counted", {"name": name}),
    }
    if name in SPLIT:
        jobs[f"{name}, tied"] = ("trained", {"name": name, "tied": True})
        jobs[f"{name}, split, tied"] = ("trained", {"name": name, "split": True, "tied": True, "num_steps": 2})
        jobs[f"{name}, split, recompute"] = ("trained", {"name": name, "split": True, "memory": RECOMPUTE})
        jobs[f"{name}, split, swap"] = ("trained", {"name": name, "split": True, "memory": SWAP})
    return jobs


JOBS = {words: job for name in SEVERAL for words, job in _jobs_of(name).items()}
JOBS["refused"] = ("refused", {})
for _how in ("raises", "other width", "too few inputs", "generator"):
    JOBS[_how] = ("broken_step", {"name": "1f1b", "how": _how})
FOR_TWO: dict[str, Job] = {
    "many steps": ("many_steps", {"num_steps": 25}),
    "budgets": ("trained", {"name": "dualpipev", "split": True, "budget": "1MiB", "num_steps": 2}),
    "resumed": ("resumed", {}),
    "kept gradients": ("kept_gradients", {}),
    "swapped": ("swapped", {}),
    "changing": ("changing", {}),
    **{f"passed on, {how}": ("passed_on", {"how": how, "name": name}) for how, name in PASSED_ON.items()},
    **{f"norm, {how}": ("norm_of_some", {"how": how}) for how in ("alone", "too early", "sparse")},
}
"""Jobs that more ranks would only make longer."""
FOR_FOUR: dict[str, Job] = {
    "experts": ("with_experts", {"names": ["gpipe", "dualpipev", "zb_v", "1f1b"]}),
    "fully sharded": ("fully_sharded", {"names": ["interleaved", "dualpipev"]}),
    "sharded under torch": ("sharded_under_torch", {}),
    "sharded budgets": (
        "within_budgets",
        {
            "each": [
                ("zb_v", {"reshards": False, "puts_off": True}, {"swap": "none"}),
                ("1f1b", {"reshards": "replicas"}, {}),
            ]
        },
    ),
    "sharded needs": ("needs", {"each": [("1f1b", {"reshards": True, "casts": True})]}),
}
MORE_FOR_FOUR: dict[str, Job] = {
    "sharded budgets": ("within_budgets", {"each": [("1f1b", {"reshards": True, "casts": True}, {})]}),
    "sharded needs": (
        "needs",
        {"each": [("zb_v", {"reshards": False, "puts_off": True}), ("1f1b", {"reshards": "replicas"})]},
    ),
}
"""Each way to shard is above once, under a budget or as a need."""
ON_FOUR = [
    words
    for words, (function, how) in JOBS.items()
    if function != "trained" or words.startswith("dualpipev") or not ({"memory", "tied"} & how.keys())
]
"""Ranks in the middle have neither batch nor loss: under plans and with tied weights by one schedule."""


def _given(jobs: dict[str, Job], num_ranks: int, folder: Path) -> dict[str, tuple[Any, ...]]:
    given = two_ranks.run(pipeline_jobs.__name__, list(jobs.values()), folder, num_ranks=num_ranks)
    return dict(zip(jobs, given, strict=True))


# After the steps that fail: new groups can be made, and their steps end well.


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    return _given(JOBS | FOR_TWO, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    return _given({words: JOBS[words] for words in ON_FOUR} | FOR_FOUR, 4, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(params=["two", "four"])
def answers(request: pytest.FixtureRequest) -> dict[str, tuple[Any, ...]]:
    """What two ranks gave, or four. Each are run once, in whatever order tests ask."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("answers", "job"),
    [
        pytest.param(ranks, name, id=f"{ranks}-{name}")
        for ranks, jobs in (("two", list(JOBS)), ("four", ON_FOUR))
        for name in jobs
        if JOBS[name][0] == "trained"
    ],
    indirect=["answers"],
)
def test_bits_are_those_of_one_process(answers: dict[str, tuple[Any, ...]], job: str) -> None:
    assert [answer["different"] for answer in answers[job]] == [[]] * len(answers[job])
    memory = JOBS[job][1].get("memory")
    if memory is not None:
        which = 0 if memory is RECOMPUTE else 1
        assert all(sum(done[which] for done in answer["done"]) > 0 for answer in answers[job])


@pytest.mark.parametrize("name", SEVERAL)
def test_memory_is_what_the_figures_say(answers: dict[str, tuple[Any, ...]], name: str) -> None:
    given = answers[f"{name}, counted"]
    schedule = with_transfers(make_schedule(name, num_ranks=len(given), num_micro_batches=MANY))
    assert given == tuple(zip(peak_live_chunks(schedule), peak_receives(schedule), strict=True))


def test_ranks_that_do_not_fit_together_refuse_together(answers: dict[str, tuple[Any, ...]]) -> None:
    told = answers["refused"]
    num_ranks = len(told)
    assert len({tuple(each) for each in told}) == 1
    missing, no_loss, two_losses, schedules, smaller, no_module, replicated, hooked, sharded = told[0]
    last = 2 * num_ranks - 1
    assert missing == f"pipeline: 'dualpipev' has stages 0, {last} on this rank, and it was given 0 (rank 0)"
    assert no_loss == f"pipeline: this rank has the last stage, {last}, and no loss (rank 0)"
    assert two_losses == (
        f"pipeline: this rank has a loss, and not the last stage, {last}; give the loss to rank 0 (rank 1)"
    )
    assert re.fullmatch(
        "pipeline: ranks have different schedules: rank 0 has [0-9a-f]{16}, rank 1 has [0-9a-f]{16}", schedules
    )
    assert smaller == f"pipeline: the schedule '1f1b' is for {num_ranks - 1} ranks, not {num_ranks} (rank 0)"
    assert no_module == "pipeline: stage 0 is a str, not a torch.nn.Module (rank 0)"
    assert replicated == (
        "pipeline: '0' of stage 0 is in DistributedDataParallel, which exchanges the gradients of one micro-batch when "
        "its backward ends, and here several are in flight; put it around the whole stage (rank 0)"
    )
    assert hooked == (
        "pipeline: stage 0 is in DistributedDataParallel with a communication hook, and a pipeline sums gradients over "
        "the replicas itself, once a step; leave the hook out (rank 0)"
    )
    assert sharded == (
        "pipeline: 'layers.0' of stage 0 is a module of FSDP2, which takes one forward or backward at a time: in a "
        "pair it would lose gradients; leave run_pair out, or leave the stage unsharded (rank 0)"
    )


@pytest.mark.parametrize(
    ("how", "place", "error"),
    [
        ("raises", "rank 1 failed at 1F2 of step 1", "RuntimeError: no more"),
        (
            "too few inputs",
            "rank 0 failed at its start of step 1",
            "ConfigError: pipeline: rank 0 has stage 0 and needs inputs for 10 micro-batches; it was given 9",
        ),
        (
            "generator",
            "rank 0 failed at its start of step 1",
            "ConfigError: pipeline: rank 0 has stage 0 and needs inputs for 10 micro-batches; it was given a generator",
        ),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_one_text(
    answers: dict[str, tuple[Any, ...]], how: str, place: str, error: str
) -> None:
    failed = int(place.split()[1])
    for rank, told in enumerate(answers[how]):
        if rank == failed:
            assert told == f"{error}; lowtide: {place}"
        else:
            assert told == f"PipelineError: pipeline: {place}: {error}"


@pytest.mark.parametrize("answers", ["two"], indirect=True)
def test_a_stage_that_does_not_fit_ends_all_with_one_text(answers: dict[str, tuple[Any, ...]]) -> None:
    why = "RuntimeError: Given normalized_shape=[8], expected input with shape [*, 8], but got input of size[2, 5, 9]"
    first, second = answers["other width"]
    assert first == f"PipelineError: pipeline: rank 1 failed at 1F0 of step 1: {why}"
    assert second == f"{why}; lowtide: rank 1 failed at 1F0 of step 1"


def test_a_killed_rank_ends_all_with_one_text(tmp_path: Path) -> None:
    (told,) = two_ranks.run(pipeline_jobs.__name__, [("killed", {})], tmp_path, num_ranks=3, killed=frozenset({1}))
    assert told[0] == told[2]
    doing = (
        r"(waited for 1SEND_[FB]\d of it|was sending (\dSEND_[FB]\d )?to it)"  # who sees it first is a matter of luck
    )
    assert re.match(f"pipeline: rank 1 ended without a word; rank [02] {doing}", told[0])


@pytest.mark.parametrize("answers", ["two"], indirect=True)
def test_each_stage_has_a_budget_of_its_own(answers: dict[str, tuple[Any, ...]]) -> None:
    given = answers["budgets"]
    assert [answer["different"] for answer in given] == [[], []]


@pytest.mark.parametrize("answers", ["two"], indirect=True)
@pytest.mark.parametrize("job", ["resumed", "kept gradients"])
def test_nothing_differs(answers: dict[str, tuple[Any, ...]], job: str) -> None:
    assert answers[job] == ([], [])


@pytest.mark.parametrize("answers", ["four"], indirect=True)
def test_two_pipelines_whose_stages_share_experts(answers: dict[str, tuple[Any, ...]]) -> None:
    for which in range(2):  # of the two pipelines
        both = [answers["experts"][which], answers["experts"][which + 2]]
        schedules = [
            (first[0] + second[0], [g for _, own in sorted((first[1] | second[1]).items()) for g in own])
            for first, second in zip(*both, strict=True)
        ]
        losses, gradients = schedules[0]
        assert (len(losses), len(gradients)) == (MANY, 4 * 10)
        assert all(other == schedules[0] for other in schedules[1:])


@pytest.mark.parametrize("answers", ["two"], indirect=True)
def test_what_a_stage_passes_on_may_change_with_its_weights_and_not_by_itself(
    answers: dict[str, tuple[Any, ...]],
) -> None:
    text = (
        "at 0SEND_F7 stage 0 passes on float32[1, 5, 8] with a graph, float32[8] with a graph, int64[1, 5], and for "
        "another micro-batch of the same shape it was float32[2, 5, 8] with a graph, float32[8] with a graph, int64[2, "
        "5]; what a stage passes on must follow from the shapes of its batch"
    )
    first, second = answers["changing"]
    assert first == [f"pipeline: {text}"]
    assert second == [f"pipeline: rank 0 failed at 0F7 of step 4: ConfigError: pipeline: {text}"]


@pytest.mark.parametrize("answers", ["two"], indirect=True)
@pytest.mark.parametrize("how", PASSED_ON)
def test_what_is_passed_on_arrives_as_in_one_process_or_is_refused(
    answers: dict[str, tuple[Any, ...]], how: str
) -> None:
    text = "what stage N passed on at NSEND_FN was written to before its reader began; pass on a copy: clone()"
    assert answers[f"passed on, {how}"] == ([f"pipeline: {text}"] if how == "written" else [],) * 2


@pytest.mark.parametrize("answers", ["two"], indirect=True)
@pytest.mark.parametrize("how", ["alone", "too early"])
def test_a_norm_that_one_rank_asks_for_is_refused_on_all(answers: dict[str, tuple[Any, ...]], how: str) -> None:
    other = "the first step" if how == "too early" else "the beginning of a step"
    for told in answers[f"norm, {how}"]:
        assert told.startswith(f"ConfigError: pipeline: rank 0 is at gradient_norm, and rank 1 at {other}; all ranks")


@pytest.mark.parametrize("answers", ["two"], indirect=True)
def test_a_norm_that_one_rank_cannot_tell_ends_all(answers: dict[str, tuple[Any, ...]]) -> None:
    first, second = answers["norm, sparse"]
    assert first.startswith("NotImplementedError") and first.endswith("lowtide: rank 0 failed at gradient_norm")
    assert second.startswith("PipelineError: pipeline: rank 0 failed at gradient_norm: NotImplementedError")


@pytest.mark.parametrize("answers", ["four"], indirect=True)
def test_stages_that_are_sharded_or_replicated_have_the_mean_of_two_processes(
    answers: dict[str, tuple[Any, ...]],
) -> None:
    assert answers["fully sharded"] == ([],) * 4


@pytest.mark.parametrize("answers", ["four"], indirect=True)
def test_a_budget_counts_what_fsdp2_gathers_and_changes_no_bit(answers: dict[str, tuple[Any, ...]]) -> None:
    """Of ranks whose stages FSDP2 shards: gathered weights and whole gradients stay for the step."""
    assert_budgets_kept(answers)


def assert_budgets_kept(answers: dict[str, tuple[Any, ...]]) -> None:
    for each in answers["sharded budgets"]:
        for told in each:
            assert told["different"] == []
            assert max(told["peaks"]) <= told["promised"] <= told["budget"]
            assert told["spilled"] == 0
    for every in zip(*answers["sharded budgets"], strict=True):  # on some rank it would not hold without a plan
        assert max(max(told["plain"]) for told in every) > every[0]["budget"]
        assert max(told["swapped"] + told["recomputed"] for told in every) > 0


@pytest.mark.parametrize("answers", ["four"], indirect=True)
def test_what_a_rank_needs_beside_fsdp2_and_ddp_is_known(answers: dict[str, tuple[Any, ...]]) -> None:
    """Gathered weights that a forward lets go of, whole gradients, and room for buckets."""
    assert_needs_known(answers)


def assert_needs_known(answers: dict[str, tuple[Any, ...]]) -> None:
    for each in answers["sharded needs"]:
        for said, needed in each:
            assert needed <= said <= 1.02 * needed


@pytest.mark.extended
def test_so_it_is_under_other_schedules(tmp_path: Path) -> None:
    more = _given(MORE_FOR_FOUR | {"others": ("fully_sharded", {"names": ["gpipe", "1f1b", "zb_v"]})}, 4, tmp_path)
    assert more["others"] == ([],) * 4
    assert_budgets_kept(more)
    assert_needs_known(more)


@pytest.mark.parametrize("answers", ["four"], indirect=True)
def test_torchs_own_split_of_a_sharded_stage_is_wrong_and_ours_is_right(answers: dict[str, tuple[Any, ...]]) -> None:
    """With FSDP2's default setting, torch 2.13: docs/history/torch-zero-bubble-fsdp2.md."""
    told = answers["sharded under torch"]
    for each in told:
        assert (each[True, False], each[True, True], each[False, False]) == ([], [], [])
    if not any(each[False, True] for each in told):
        pytest.skip("this torch splits the backward of a sharded stage correctly")
    assert all(each[False, True] for each in told)


@pytest.mark.parametrize("answers", ["two"], indirect=True)
def test_a_message_in_the_place_of_another_is_named(answers: dict[str, tuple[Any, ...]]) -> None:
    sender, reader = answers["swapped"]
    assert reader == ["pipeline: rank 1 stands at 1RECV_F1, and rank 0 sent 0SEND_F0"]
    assert sender == ["pipeline: rank 1 ended without a word; rank 0 was sending 0SEND_F0 to it"]


@pytest.mark.parametrize("answers", ["two"], indirect=True)
def test_nothing_grows_over_many_steps(answers: dict[str, tuple[Any, ...]]) -> None:
    assert answers["many steps"] == ({"tensors": 0, "threads": 0},) * 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_v", "dualpipev", "one_stage_overlap"])
@pytest.mark.parametrize("split", [False, True])
def test_one_rank_needs_no_process_group(name: str, split: bool) -> None:
    assert pipeline_jobs.trained(0, name, split=split, num_steps=1)["different"] == []
