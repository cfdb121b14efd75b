"""What is written of a plan: the text for people, the document, and files for other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.cluster.export import decisions, export, patterns_of
from lowtide.cluster.report import document, lines
from lowtide.cluster.search import ClusterPlan, plan_cluster
from lowtide.core.fate import Fate
from lowtide.errors import ConfigError
from lowtide.mindformers.schema import read_sections
from tests.support.cluster_cases import DENSE_SHAPE, MOE_SHAPE, question

GOLDEN = Path(__file__).parent / "golden"


def small_plan(**changes: Any) -> ClusterPlan:
    """Two ranks of four layers, too little memory for all of it."""
    asked: dict[str, Any] = {"devices": 4, "tensor": 1, "context": 1, "pipeline": 2, "data": 2, "schedule": "1f1b"}
    asked |= {"budget_gib": 8.0, "micro_batch": 4, "sequences": 64}
    return plan_cluster(question(DENSE_SHAPE, **asked | changes))


def test_the_text_is_the_golden_one() -> None:
    text = "\n".join(lines(small_plan(budget_gib=11.0))) + "\n"
    assert text == (GOLDEN / "small.txt").read_text(encoding="utf-8")


def test_the_document_has_what_the_text_has() -> None:
    plan = small_plan()
    made = json.loads(json.dumps(document(plan)))
    (best,) = made["plans"]
    assert best["step_seconds"] == plan.best.step_seconds == pytest.approx(sum(best["parts"].values()))
    assert best["layout"]["pipeline"] == 2
    assert best["num_layers"] == [4, 4]
    assert [rank["peak_bytes"] <= made["budget_bytes"] for rank in best["ranks"]] == [True, True]
    assert all(entry["source"] for entry in made["assumptions"].values())


def test_decisions_send_away_no_less_than_the_plan() -> None:
    plan = small_plan().best
    by_layer = decisions(plan)
    assert len(by_layer) == 8
    for rank, first in ((0, 0), (1, 4)):
        for name, shares in plan.ranks[rank].shares[0]["dense"].items():
            gone = [layer.get(name) for layer in by_layer[first : first + 4]]
            for share, fate in zip(shares, (Fate.SWAP, Fate.RECOMPUTE), strict=True):
                assert 4 * share <= gone.count(fate) + 1e-9 or None not in gone


EXPORTED: list[dict[str, Any]] = [
    {},
    {"fates": (Fate.KEEP, Fate.RECOMPUTE), "budget_gib": 10.0},
    {"schedule": "zb_v", "fates": (Fate.KEEP, Fate.RECOMPUTE), "budget_gib": 10.0},
    {"schedule": "zb_v", "budget_gib": 10.0},
    {"schedule": "interleaved", "interleave": 2, "layers": (1, 3, 2, 2), "fates": (Fate.KEEP, Fate.RECOMPUTE),
     "budget_gib": 11.0},
]  # fmt: skip


@pytest.mark.parametrize("changes", EXPORTED)
def test_our_own_reader_finds_the_same_decisions(changes: dict[str, Any], tmp_path: Path) -> None:
    plan = small_plan(**changes)
    by_layer = decisions(plan.best)
    path = tmp_path / "mindformers.yaml"
    export(plan, "mindformers", path)
    resolution = read_sections(path).resolve()
    assert any(by_layer), "a plan that keeps everything shows nothing"
    is_told = "there it stays on the device" in path.read_text(encoding="utf-8")
    assert all("reads instead" in warning or "recomputed" in warning for warning in resolution.warnings)
    assert is_told or not resolution.warnings
    for layer, decided in zip(resolution.layers, by_layer, strict=True):
        wanted: dict[Fate, set[str]] = {Fate.RECOMPUTE: set(), Fate.SWAP: set()}
        for name, fate in decided.items():
            wanted[fate] |= set(patterns_of(plan.question, name))
        assert set(layer.recompute_ops) == wanted[Fate.RECOMPUTE]
        assert set(layer.swap_ops) == wanted[Fate.SWAP]
        assert not layer.full_recompute
    sizes = [sum(row) for row in resolution.num_layers_per_stage]
    assert sum(sizes) == 8
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# PP 2 ")
    assert "\n# What this file cannot say:\n# - " in text


def test_stages_of_a_v_are_those_of_the_plan(tmp_path: Path) -> None:
    plan = small_plan(schedule="zb_v", layers=(1, 3, 2, 2), budget_gib=12.0)
    path = tmp_path / "v.yaml"
    export(plan, "mindformers", path)
    cells = [(layer.chunk, layer.stage) for layer in read_sections(path).resolve().layers]
    assert cells == [(0, 0)] + [(0, 1)] * 3 + [(1, 1)] * 2 + [(1, 0)] * 2
    assert "    offset: [[-1, 1], [0, 0]]\n" in path.read_text(encoding="utf-8")


def test_megatron_gets_its_flags(tmp_path: Path) -> None:
    path = tmp_path / "flags.txt"
    asked: dict[str, Any] = {
        "devices": 4,
        "tensor": 2,
        "context": 1,
        "pipeline": 2,
        "data": 1,
        "expert": 2,
        "schedule": "interleaved_overlap",
        "interleave": 2,
        "budget_gib": 9.0,
        "micro_batch": 4,
    }
    export(plan_cluster(question(MOE_SHAPE, **asked)), "megatron", path)  # fmt: skip
    flags = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for flag in (
        "--tensor-model-parallel-size 2", "--sequence-parallel", "--context-parallel-size 1",
        "--pipeline-model-parallel-size 2", "--overlap-moe-expert-parallel-comm", "--expert-model-parallel-size 2",
        "--micro-batch-size 4", "--global-batch-size 64",
    ):  # fmt: skip
        assert flag in flags
    (stages,) = [flag for flag in flags if flag.startswith("--pipeline-model-parallel-layout ")]
    assert stages.count("t") - "--pipeline-model-parallel-layout".count("t") == 9
    assert stages.count("|") == 3


def test_a_v_is_interleaved_in_megatron_and_a_v_in_mindspeed(tmp_path: Path) -> None:
    """DualPipe is DualPipeV on half of the ranks, each twice."""
    path = tmp_path / "flags.txt"
    asked: dict[str, Any] = {"devices": 4, "tensor": 1, "context": 1, "pipeline": 4, "data": 1, "expert": 1}
    whole = plan_cluster(question(MOE_SHAPE, **asked, schedule="dualpipe", budget_gib=40.0))
    files = {}
    for system in ("megatron", "mindspeed"):
        export(whole, system, path)
        files[system] = path.read_text(encoding="utf-8").splitlines()
        assert "--pipeline-model-parallel-size 2" in files[system]
        assert (
            "# - 'dualpipe': here 'dualpipev' on 2 ranks, each twice in data parallelism, which is the same"
            in files[system]
        )
        sequences = whole.question.sequences
        assert f"--global-batch-size {sequences}" in files[system]
    (stages,) = [line for line in files["megatron"] if line.startswith("--pipeline-model-parallel-layout ")]
    assert stages.count("|") == 3 and "--overlap-moe-expert-parallel-comm" in files["megatron"]
    assert {"--schedules-method dualpipev", "--moe-fb-overlap"} <= set(files["mindspeed"])
    assert not any("layout" in line for line in files["mindspeed"])


def test_what_a_system_has_no_word_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    asked: dict[str, Any] = {"devices": 4, "tensor": 1, "context": 1, "pipeline": 4, "data": 1, "expert": 1}
    whole = plan_cluster(question(MOE_SHAPE, **asked, schedule="dualpipe", budget_gib=40.0))
    with pytest.raises(ConfigError) as error:
        export(whole, "mindformers", path)
    assert str(error.value) == (
        "--export: MindSpore Transformers has no schedule 'dualpipe'; 'dualpipev' on half of the ranks is the same"
    )
    with pytest.raises(ConfigError) as error:
        export(small_plan(), "megatron", tmp_path / "no" / "folder")
    assert (
        str(error.value)
        == f"--export: {tmp_path / 'no' / 'folder'} cannot be written: No such file or directory; choose another file"
    )
