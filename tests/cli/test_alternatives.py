"""`lowtide plan --model`: the rows are those of plans by rules, the largest is the largest, mistakes are one line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.cli.alternatives import _search, settings_of
from lowtide.cli.main import main
from lowtide.cli.run_step import trace_run
from lowtide.timeline.hardware import load_hardware

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
WITH_TABLE = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
NAMES = ["plain", "every layer checkpointed", "every second layer", "lowtide"]


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("tiny.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    Path("table.json").write_text(json.dumps(WITH_TABLE), encoding="utf-8")


def plan(*arguments: str) -> int:
    return main(["plan", "--model", "tiny.json", "--hardware", "h100", *arguments])


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert plan("--json", *arguments) in (0, 2)
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


def test_rows_are_those_of_plans_by_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """This table and `lowtide.plan` with rules give the same figures, and the products are those of the formula."""
    rows = rows_of(capsys, "--sequence", "512", "--batch", "2", "--budget", "12MiB")
    assert list(rows) == NAMES
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**CONFIG, use_cache=False)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(2, 512, dtype=torch.int64, device="meta"))
    forms = {
        "plain": {"recompute": "none"},
        "every layer checkpointed": {"recompute": "all"},
        "every second layer": {"recompute": ["model.layers.0"]},
    }
    for name, rules in forms.items():
        memory = {"swap": "none", "loss": "plain", "keep": [], **rules}
        if name == "every second layer":
            memory["keep"] = ["model.layers.1"]
        found = lowtide.plan(model, batch, "1TiB", memory=memory, optimizer=optimizer, hardware="h100").predicted
        assert found is not None
        assert rows[name]["peak_bytes"] == pytest.approx(found.peak_bytes, abs=256), name  # one group of weights more
        assert rows[name]["step_seconds"] == pytest.approx(found.step_seconds, rel=0.01), name
    own = lowtide.plan(model, batch, "12MiB", optimizer=optimizer, hardware="h100").predicted
    assert own is not None
    assert max(rows["lowtide"]["peak_bytes"], own.peak_bytes) <= 12 * 2**20
    assert [row["fits"] for row in rows.values()] == [row["peak_bytes"] <= 12 * 2**20 for row in rows.values()]
    tokens = 2 * 512
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_seconds"])
    weights = sum(
        weight.numel() for name, weight in model.named_parameters() if "norm" not in name and "embed" not in name
    )
    attention = 3.5 * 4 * 2 * 512**2 * 64 * 2 / 2  # forward once, backward 2.5 times; causal: half of it
    flops = rows["plain"]["mfu"] * rows["plain"]["step_seconds"] * rate()
    assert flops == pytest.approx(6 * weights * tokens + attention, rel=0.02)


def rate() -> float:
    from lowtide.timeline.hardware import load_hardware

    return load_hardware("h100").flops_per_second["bfloat16"]


def test_no_text_is_read_so_a_vocabulary_may_be_small(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tiny.json").write_text(json.dumps(CONFIG | {"vocab_size": 100}), encoding="utf-8")
    assert rows_of(capsys, "--sequence", "64")["plain"]["fits"]


@pytest.mark.parametrize("budget", ["1MiB", pytest.param("auto", marks=pytest.mark.extended)])
def test_the_table_as_text(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is there also where no plan fits, and the refusal after it."""
    status = plan("--sequence", "512", "--lora", "4", "--budget", budget, "--out", "plan.json")
    out, err = capsys.readouterr()
    question, device, _, head, *rows, _, note = out.splitlines()
    assert question == (
        "PeftModelForCausalLM of 0.2 million parameters, 0.0 million of them trained; 1 x 512 tokens, bf16, adamw"
    )
    said = "70.8 GiB" if budget == "auto" else "1.0 MiB"
    assert device == f"one h100, of which the budget is {said}; nothing has run"
    assert head.split() == ["predicted", "peak", "step", "over", "plain", "tokens/s", "MFU"]
    assert [row.partition("  ")[0] for row in rows] == NAMES
    assert note == (
        "MFU: the products of the plain step, as a share of what the device computes in that time with large ones"
    )
    if budget == "auto":
        assert status == 0 and lowtide.Plan.from_json(Path("plan.json").read_text(encoding="utf-8")).does_nothing
    else:
        assert status == 2 and rows[-1].endswith("does not fit") and "budget 1.0 MiB: no plan fits" in err


@pytest.mark.parametrize(
    ("asked", "note"),
    [
        pytest.param(("tiny.json", "--sequence", "512"), None, marks=pytest.mark.extended),
        pytest.param(
            ("tiny.json", "--sequence", "2048"),
            "the model is made for sequences of up to 1,024 (max_position_embeddings)",
            marks=pytest.mark.extended,
        ),
        pytest.param(("table.json", "--sequence", "512"), None, marks=pytest.mark.extended),
        (
            ("table.json", "--largest", "sequence"),
            "1,024: the model has no positions for more (max_position_embeddings)",
        ),
    ],
)
def test_a_note_on_long_sequences(asked: tuple[str, ...], note: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    """Rotary positions go on for ever, a table of them ends."""
    assert main(["plan", "--hardware", "h100", "--budget", "70GiB", "--model", *asked]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if "max_position_embeddings" in line]
    assert notes == ([] if note is None else [note])


def test_the_search_takes_few_tries() -> None:
    """For peaks that are straight, curved or have a step, the size is the largest, and no size is tried twice."""
    for seed in range(200):
        chosen = random.Random(seed)
        unit, most = 256, chosen.choice([2**24, 8192])
        straight, curved = chosen.uniform(1e-4, 3) / unit, chosen.choice([0.0, chosen.uniform(0, 1e-3) / unit**2])
        fixed, step, place = chosen.uniform(0, 60), chosen.choice([0.0, 4.0]), chosen.randrange(1, 4000) * unit

        def peak(size: int) -> int:
            return round(1e6 * (fixed + straight * size + curved * size**2 + step * (size > place)))  # noqa: B023

        asked = Mock(side_effect=peak)
        found = _search(asked, 72_000_000, unit, most)
        tried = [call.args[0] for call in asked.call_args_list]
        assert found == 0 or peak(found) <= 72_000_000
        assert found == most or peak(found + unit) > 72_000_000
        assert len(set(tried)) == len(tried) <= 9


def test_guesses_stay_below_what_does_not_fit() -> None:
    """On stairs, which no line follows: 17 tries in the mean, and 27 where lines go past what does not fit."""
    numbers = []
    for seed in range(200):
        chosen = random.Random(seed)
        stair, rise, fixed = chosen.randrange(64, 1024) * 256, chosen.uniform(1, 10_000), chosen.uniform(0, 6e7)
        asked = Mock(side_effect=lambda size: round(fixed + rise * (size // stair * stair) / 256) + size // 1000)  # noqa: B023
        _search(asked, 72_000_000, 256, 2**24)
        numbers.append(asked.call_count)
    assert sum(numbers) / len(numbers) < 20


def test_the_optimizer_of_a_run_is_looked_at_once_for_all_batches() -> None:
    """Nothing of its state depends on the batch but the bytes of that."""
    asked: dict[str, Any] = {"model": "tiny.json", "precision": None, "lora": None, "batch": None, "rows": None}
    short = settings_of(argparse.Namespace(**asked, sequence=256), "adamw")
    long = dataclasses.replace(short, data=dataclasses.replace(short.data, sequence_length=1024))
    hardware, quiet = load_hardware("h100"), cast(Any, {"say": lambda text: None})
    like = trace_run(short, hardware, **quiet)
    whole = trace_run(long, hardware, **quiet)
    assert trace_run(long, hardware, like=like, **quiet) == whole
    assert whole.state.inputs == 4 * like.state.inputs > 0 and whole.state.optimizer_movable > 0


@pytest.mark.slow
@pytest.mark.extended
def test_layers_in_blocks_are_longer_and_each_length_that_was_tried_has_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("--batch", "1", "--budget", "8MiB", "--rows", "256", "--largest", "sequence", "--json")
    assert plan(*asked) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [*NAMES, "lowtide, updates in backward"]
    assert rows["lowtide"]["largest"] > 2 * rows["every layer checkpointed"]["largest"]
    assert rows["lowtide, updates in backward"]["largest"] >= rows["lowtide"]["largest"]
    lengths = [row["largest"] for row in found["tries"]]
    assert lengths == sorted(lengths) and rows["lowtide, updates in backward"] in found["tries"]
    assert all(row["fits"] == (row["peak_bytes"] <= 8 * 2**20) and row["set_by"] for row in found["tries"])
    # Its products were not counted: they follow from those of two other lengths.
    asked = ("--batch", "1", "--sequence", str(rows["plain"]["largest"]), "--budget", "8MiB")
    assert rows_of(capsys, *asked)["plain"]["mfu"] == pytest.approx(rows["plain"]["mfu"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("grown", "unit"), [("batch", 1), pytest.param("sequence", 256, marks=pytest.mark.extended)])
def test_the_largest_is_the_largest(grown: str, unit: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits, and one more does not."""
    budget = 8
    asked = ("--sequence", "256") if grown == "batch" else ("--batch", "1")
    rows = rows_of(capsys, *asked, "--budget", f"{budget}MiB", "--largest", grown)
    assert list(rows) == NAMES
    for name, row in rows.items():
        assert row["largest"] >= unit and row["fits"] and row["peak_bytes"] <= budget * 2**20, name
    assert rows["plain"]["largest"] < rows["every layer checkpointed"]["largest"] <= rows["lowtide"]["largest"]
    more = rows_of(capsys, *asked, f"--{grown}", str(rows["lowtide"]["largest"] + unit), "--budget", f"{budget}MiB")
    assert not any(row["fits"] for row in more.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "lowtide plan: give a run file, or --model with a config.json, a folder or a name"),
        (["--lora", "4", "run.yaml"], "--lora: goes with --model; in a run file it is written in its section"),
        (
            ["run.yaml", "--model", "tiny.json"],
            "--model: give either a run file or --model, not both; leave out run.yaml",
        ),
        (["--model", "tiny.json", "--batch", "0"], "--batch: must be at least 1, not 0"),
        (["--model", "tiny.json", "--lora", "0"], "--lora: must be at least 1, not 0"),
        (
            ["--model", "table.json", "--sequence", "4096"],
            "--sequence: 'data.sequence_length' is 4096, but the model has 1024 positions; lower it or raise "
            "'model.max_position_embeddings'",
        ),
        (
            ["--model", "org/name"],
            "--model: org/name is no file and no folder, and not in the cache of Hugging Face on this machine (nothing "
            "is downloaded); give the path of its config.json",
        ),
        (
            ["--model", "tiny.json", "--devices", "8"],
            "--devices: needs a run file, and --model is instead of one; leave one of them out",
        ),
        (
            ["--model", "tiny.json", "--largest", "batch", "--out", "f"],
            "--out: is not for this table; leave it out, or plan the step of a run file",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments, "--hardware", "h100"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == message
