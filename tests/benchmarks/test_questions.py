"""Each question's command, end to end at a tiny size: a valid record, without errors."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import details, planning_time, predicted, published_setting, scaling
from benchmarks.record import Record, read_all

LLAMA = ["--layers=2", "--hidden=64", "--sequence=32"]


def answer(module: ModuleType, folder: Path, *words: str) -> Record:
    """What the command leaves behind in an empty folder."""
    assert module.main([*words, "--out", str(folder)]) == 0
    (record,) = read_all(folder)
    assert record.question == module.__name__.removeprefix("benchmarks.")
    assert record.rows and not any(row.get("error") for row in record.rows)
    assert record.command.startswith(f"python -m {module.__name__}")
    return record


# -- predicted ---------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "MODELS", ("llama", "gpt2"))
    record = answer(
        predicted, tmp_path, *LLAMA, "--plans=2", "--rounds=2", "--batch=2", "--min-bytes=4096", "--scales=1"
    )
    assert [(row["model"], row["draw"]) for row in record.rows] == [
        ("llama", 0), ("llama", 1), ("gpt2", 0), ("gpt2", 1)
    ]  # fmt: skip
    for row in record.rows:
        assert row["is_equal"]
        assert row["plan"].startswith("fates" if row["draw"] else "budget")
        assert row["peak_bytes"] <= row["budget_bytes"]
        # Where no budget binds, copies that a busy machine makes late hold memory for longer.
        tolerance = 0.05 if row["plan"].startswith("budget") else 0.25
        assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=tolerance)
        assert row["ratio_min"] <= row["ratio_median"] <= row["ratio_max"]


# -- planning time -----------------------------------------------------------------------------------------------------


def test_planning_of_a_tiny_model() -> None:
    row = planning_time.plan_once(planning_time.TINY, tokens=4096, hardware_name="h200")
    assert row["num_layers"] == 2
    assert row["num_parameters"] == sum(
        p.numel() for p in _meta_model(planning_time.config_of(planning_time.TINY, 4096)).parameters()
    )
    assert row["floor_bytes"] < row["budget_bytes"] < row["plain_peak_bytes"]
    assert row["trace_seconds"] > 0 and row["solve_seconds"] > 0
    assert row["peak_resident_bytes"] >= row["rest_resident_bytes"] > 2**20


def _meta_model(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama_8b", 8.03),
        ("llama_70b", 70.6),
        ("llama_405b", 405.9),
        ("mixtral_8x22b", 140.6),
        ("deepseek_v3_671b", 671),
    ],
)
def test_models_have_the_published_sizes(name: str, billions: float) -> None:
    model = _meta_model(planning_time.config_of(name, 64))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.extended
def test_planning_time_in_a_process_of_its_own(tmp_path: Path) -> None:
    record = answer(planning_time, tmp_path, "--models", "tiny", "--tokens=64")
    assert record.rows[0]["model"] == "tiny"


def test_a_child_that_fails_is_a_row(tmp_path: Path) -> None:
    assert planning_time.main(["--models", "tiny", "--hardware", "h2000", "--out", str(tmp_path)]) == 1
    (record,) = read_all(tmp_path)
    assert "unknown device 'h2000'" in record.rows[0]["error"]


# -- the published setting ---------------------------------------------------------------------------------------------


def test_the_published_setting_on_the_timeline(tmp_path: Path) -> None:
    record = answer(published_setting, tmp_path)
    assert (record.kind, record.hardware["folder"]) == ("computed", "timeline")
    for row in record.rows:
        assert row["published_gain_percent"] < row["planned_gain_percent"] <= row["ceiling_gain_percent"]


@pytest.mark.extended
def test_the_published_setting_for_real_at_a_tiny_size(tmp_path: Path) -> None:
    shape = ["--layers=3", "--hidden=128", "--heads=2", "--head-size=32", "--ffn=128", "--sequence=64",
             "--micro-batch=2", "--dtype=float32"]  # fmt: skip
    limits = ["--cap=5MiB", "--reserved=0.4MiB", "--link=5e8", "--min-bytes=4096", "--rounds=2"]
    record = answer(published_setting, tmp_path, "--device", "cpu", *shape, *limits)
    assert record.kind == "emulated"
    rows = {row["method"]: row for row in record.rows}
    assert set(rows) == {"full recompute", "lowtide, throttled link", "lowtide", "plain, no cap"}
    assert len({row["loss_and_gradients"] for row in record.rows}) == 1
    for method in ("lowtide, throttled link", "lowtide"):
        assert rows[method]["peak_bytes"] <= 4.6 * 2**20 < rows["plain, no cap"]["peak_bytes"]
        assert rows[method]["swapped_bytes"] + rows[method]["recomputed_bytes"] > 0
    assert rows["full recompute"]["peak_bytes"] < rows["plain, no cap"]["peak_bytes"]


# -- scaling -----------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_scaling(tmp_path: Path) -> None:
    record = answer(scaling, tmp_path, "--devices", "16", "2048")
    assert record.kind == "computed"
    small, fastest, published = record.rows
    assert small["outcome"].startswith("budget 68.5 GiB: no layout of 16 devices fits; the nearest, ")
    assert fastest["outcome"] == published["outcome"] == "fits"
    assert fastest["step_seconds"] <= published["step_seconds"]
    assert published["published_step_seconds"] == pytest.approx(19.9, abs=0.05)


# -- details -----------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_details_of_copies_and_hooks(tmp_path: Path) -> None:
    record = answer(details, tmp_path, "--total-mib=4", "--matrix=64", "--rounds=2")
    pieces = {row["piece"]: row for row in record.rows}
    assert set(pieces) == {"hooks", "copy_size", "matmul_while_copying"}
    assert pieces["hooks"]["num_tensors"] == 512
    assert pieces["copy_size"]["both_bytes_per_second"] > 0
    copying = [row for row in record.rows if row["piece"] == "matmul_while_copying"]
    assert [row["setting"] for row in copying] == ["nothing beside", "copies out", "copies in", "both"]
    assert copying[0]["slower_percent"] == 0


@pytest.mark.extended
def test_prefetch_lead(tmp_path: Path) -> None:
    record = answer(details, tmp_path, *LLAMA, "--rounds=1", "--only", "prefetch_lead")
    assert [row["setting"] for row in record.rows][-1] == "by bytes"
    assert all(row["peak_bytes"] > 0 for row in record.rows)


def test_pieces_of_an_accelerator_say_that_they_need_one(tmp_path: Path) -> None:
    words = ["--only", "issue", "pinned_memory", "fragmentation", *LLAMA, "--out", str(tmp_path)]
    assert details.main(words) == 1
    (record,) = read_all(tmp_path)
    assert [row["error"] for row in record.rows] == [
        "ValueError: a CPU issues nothing: the host's time is the step's",
        "ValueError: pinned memory needs an accelerator",
        "ValueError: main memory has no allocator that tells what it reserves",
    ]


def test_pinned_memory_is_counted_for_arena_and_torch() -> None:
    import torch

    from benchmarks.details_copies import pinned_rows

    def new(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    sizes = [3 * 2**20, 5 * 2**20] * 4
    arena, torch_row = pinned_rows(sizes, new, new)
    assert arena["asked_bytes"] == torch_row["asked_bytes"] == 32 * 2**20
    # torch rounds to 4 and 8 MiB; the arena's slabs double from 2 MiB on, so the last one may be half empty.
    assert torch_row["pinned_bytes"] == 48 * 2**20
    assert 32 * 2**20 <= arena["pinned_bytes"] < 64 * 2**20
