"""The documents' own examples in the trainer: their log lines, bytes that really move, and the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.main import main
from lowtide.core.log import LOG, Listener
from tests.support.grid import one_of
from tests.support.trained import bits_of, steps_of

EXAMPLES = Path(__file__).parents[3] / "examples" / "mindformers"
CASES = json.loads((Path(__file__).parents[2] / "mindformers" / "schema" / "cases" / "upstream.json").read_text())
DOCUMENTED = {
    "swap_1_default": "doc_ex1_default",
    "swap_2_layers": "doc_ex2_layer",
    "swap_3_ops": "doc_ex3_op",
    "swap_4_mixed": "doc_ex4_mixed",
}


def train(path: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    """What was said, and what the runtime counted in the last step."""
    assert main(["train", str(path), "--output-dir", str(out)]) == 0
    return capfd.readouterr().err.splitlines(), steps_of(out)[-1]["tide"]


def without_sections(path: Path, to: Path) -> Path:
    text = path.read_text()
    start = text.index("recompute_config:")
    to.write_text(
        text[:start]
        .replace('context:\n  memory_optimize_level: "O0"\n', "")
        .replace("  model_config:\n    num_layers: 4\n", "")
    )
    return to


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of(4, DOCUMENTED, first=3))
def test_documented_example(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in CASES if case.get("id") == DOCUMENTED[name])
    path = EXAMPLES / f"{name}.yaml"
    said, counted = train(path, tmp_path / "out", capfd)
    documented = [
        " ".join(line.removeprefix("INFO - ").split()) for layer in case["expected_per_layer"] for line in layer["log"]
    ]
    assert [line for line in said if line.startswith("Set ")] == documented
    assert "note: have no meaning here: context.memory_optimize_level" in said

    assert main(["explain", str(path), "--json"]) == 0
    explained = json.loads(capfd.readouterr().out)
    moved = sum(layer["moved_bytes"] for layer in explained["bytes_by_layer"])
    freed = sum(layer["freed_bytes"] for layer in explained["bytes_by_layer"])
    assert moved > 0
    assert counted["swapped_bytes"] == moved
    # A copy that has not begun when backward needs its bytes is called off, on a busy machine nearly every one.
    assert counted["copied_out_bytes"] <= moved
    assert counted["recomputed_bytes"] >= freed

    plain = without_sections(path, tmp_path / "plain.yaml")
    assert main(["train", str(plain), "--output-dir", str(tmp_path / "plain")]) == 0
    assert bits_of(tmp_path / "out") == bits_of(tmp_path / "plain")


def test_beside_a_memory_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "swap_1_default.yaml").read_text()
    Path("run.yaml").write_text(text + "memory:\n  budget: 1GiB\n")
    assert main(["train", "run.yaml"]) == 2
    assert capfd.readouterr().err == (
        "run.yaml:28:11: 'memory.budget' cannot stand beside recompute_config and swap_config; write all of it here, "
        "or all of it there\n"
    )
    Path("run.yaml").write_text(text.replace("\n    num_layers: 4", "\n    num_layers: 6"))
    assert main(["train", "run.yaml"]) == 2
    assert capfd.readouterr().err == "run.yaml: says 6 layers, but the model has 4\n"
    assert not any(isinstance(each, Listener) for each in LOG.handlers)  # else the next run's lines would come twice


def test_a_misspelt_section_is_not_taken_for_one_of_upstream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES / "swap_1_default.yaml").read_text() + "trainer: {type: CausalLanguageModelingTrainer}\n"
    Path("run.yaml").write_text(text + "memoryy: {}\n")
    assert main(["train", "run.yaml"]) == 2
    assert capfd.readouterr().err == "run.yaml:28:1: unknown section 'memoryy'; did you mean 'memory'?\n"
