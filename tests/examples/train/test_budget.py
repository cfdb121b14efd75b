"""Training within a budget: the same bits as without one, in every kind of run, and a record of what was promised."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from examples.train.trainer import train
from lowtide.cli.main import main
from lowtide.cli.run_file import load_run
from lowtide.cli.run_step import observe_run
from lowtide.config.memory import load_memory
from lowtide.config.run import RunConfig
from lowtide.core.decisions import Prediction
from lowtide.planner.plan_profile import plan_profile
from lowtide.timeline.step import Link
from tests.support.trained import bits_of, steps_of

ROOT = Path(__file__).parents[3]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "attention_dropout": 0.1,
}
LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(200)))


def write(*, budget: int | None = None, **train_keys: object) -> RunConfig:
    keys = {"steps": 3, "batch_size": 2, "device": "cpu", "log_every": 1, **train_keys}
    sections = {"model": LLAMA, "data": {"files": ["text"], "sequence_length": 64}, "train": keys}
    if budget is not None:
        sections["memory"] = {"budget": budget, "min_bytes": 1024, "strict": True}
    path = Path("run.yaml")
    path.write_text("".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items()))
    return load_run(path)


def go(*, output_dir: str, **keys: object) -> tuple[list[float], str]:
    """The bits of the run."""
    train(write(output_dir=output_dir, **keys))  # type: ignore[arg-type]
    return bits_of(output_dir)


@functools.cache
def limits(precision: str) -> Prediction:
    """Floor and peak of a micro-batch."""
    run = write(precision=precision)
    profile = observe_run(run, say=lambda text: None)
    memory = load_memory({"budget": "1GiB", "min_bytes": "1KiB"})
    predicted = plan_profile(profile, memory, link=LINK).predicted
    assert predicted is not None
    return predicted


def budget_of(share: float, precision: str = "float32") -> int:
    """So much of the way from the floor to everything kept."""
    found = limits(precision)
    return found.floor_bytes + int(share * (found.plain_peak_bytes - found.floor_bytes))


# ---- the same bits


def test_bits_under_autocast() -> None:
    """The observed step must not leave its casts of weights to the real one."""
    plain = go(output_dir="plain", precision="bf16_autocast")
    budget = budget_of(0.3, precision="bf16_autocast")
    saving = go(output_dir="saving", precision="bf16_autocast", budget=budget)
    assert saving == plain
    assert steps_of("saving")[-1]["tide"]["num_divergences"] == 0


def test_gradients_of_earlier_micro_batches_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of the first micro-batch does not know of them; the second one finds them."""
    budget = budget_of(0.3)
    go(output_dir="out", grad_accumulation=2, budget=budget, engine="host", steps=2)
    made = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lowtide: plan ")]
    made = [line for line in made if "(stalls: " not in line]  # a machine that others use, too
    assert ["(first step)" in made[0], "(gradients stay)" in made[1]] == [True, True]
    assert len(made) == 2
    assert all(step["peak_bytes"] <= budget for step in steps_of("out"))


# ---- what is said and kept


def test_bits_are_those_of_no_budget_and_every_step_knows_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plain = go(output_dir="plain", steps=4)
    budget = budget_of(0.1)
    write(output_dir="out", budget=budget, steps=4)
    capsys.readouterr()
    assert main(["train", "run.yaml"]) == 0
    assert bits_of("out") == plain
    steps = steps_of("out")
    assert steps[-1]["tide"]["swapped_bytes"] + steps[-1]["tide"]["recomputed_bytes"] > 0
    assert steps[-1]["tide"]["num_divergences"] == 0
    for record in steps:
        assert record["plan"]["predicted_peak_bytes"] <= budget
        assert record["plan"]["measured_seconds"] > 0
        assert record["peak_bytes"] <= budget
    said = capsys.readouterr().err.splitlines()
    assert "lowtide: observing one step (first step)" in said
    made = [line for line in said if line.startswith("lowtide: plan ")]
    assert made[0].startswith(f"lowtide: plan {steps[0]['plan']['digest']} (first step): peak ")
    assert 1 <= len(made) <= 3
    # Totals do not grow from step to step, also after corrections have ended. Of one plan; others save other bytes.
    saved = {(record["plan"]["digest"], record["tide"]["saved_bytes"]) for record in steps}
    assert len(saved) == len({record["plan"]["digest"] for record in steps})
    assert [record["tide"]["num_forwards"] for record in steps] == [1] * 4
    assert steps_of("plain")[0]["plan"] is None


def test_a_budget_below_the_floor_ends_the_run_with_the_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    write(output_dir="out", budget=limits("float32").floor_bytes // 2)
    assert main(["train", "run.yaml"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "no plan fits" in line or line.startswith("  - ")]
    assert said[0].startswith("budget 0.")
    assert len(said) >= 2


def test_settings_of_a_budget_are_checked_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    write(budget=1 << 20)
    text = Path("run.yaml").read_text().replace('"budget": 1048576', '"budget": "lots"')
    Path("run.yaml").write_text(text)
    assert main(["train", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "run.yaml:4:20: 'memory.budget': 'lots' is not a size; write a number and a unit, such as 20GiB, 512MiB or "
        "20GB\n"
    )
