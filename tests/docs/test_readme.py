"""What the documentation says is true: its code runs, its tests exist, its numbers are the measured ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import statistics
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.grid import one_of

ROOT = Path(__file__).parents[2]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "history"]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "train" / "README.md",
    *DOCS,
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(path: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(path.read_text(encoding="utf-8")) if found == language]


@pytest.fixture(scope="module")
def make_picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_picture", ROOT / "docs" / "make_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- code --------------------------------------------------------------------------------------------------------------


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = ROOT / "README.md"
    (yaml,) = blocks(readme, "yaml")
    (tmp_path / "run.yaml").write_text(yaml, encoding="utf-8")
    scope: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "optimizer": None, "train": lambda: None}
    for number, code in enumerate(blocks(readme, "python"), start=1):
        exec(compile(code, f"README.md, block {number}", "exec"), scope)
    printed = capsys.readouterr().out
    assert "of a budget of 4.0 MiB; everything kept" in printed
    assert "does nothing" not in printed
    assert "swap 'layers.0'" in printed
    assert int(printed.split()[-2]) > 0
    assert "forward" not in vars(scope["model"])


def test_the_python_of_the_page_on_optimizers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(ROOT / "docs" / "optimizer.md", "python")
    exec(compile(code, "optimizer.md", "exec"), {})
    assert capsys.readouterr().out.startswith("AdamW: 2.0 MiB of state on disk between steps, 0% resident; 4 buckets, ")


def test_the_python_of_the_page_on_adapters_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The block for torchtitan is a configuration: test_torchtitan.py has it. The others are examples."""
    _, selective = blocks(ROOT / "docs" / "adapters.md", "python")
    exec(compile(selective, "adapters.md, the last block", "exec"), {})
    assert int(capsys.readouterr().out) == 4 * 512 * 64 * 4


def test_the_python_of_the_page_on_reports_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "docs" / "report.md", "python")
    exec(compile(code, "report.md", "exec"), {})
    assert "What happened" in (tmp_path / "run.html").read_text(encoding="utf-8")
    assert (tmp_path / "run.trace.json").exists()
    assert (tmp_path / "run.pickle").exists()


@pytest.mark.parametrize("page", ["budget.md", "techniques/sliced-loss.md"])
def test_the_python_of_short_pages_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, *_ = [text for text in blocks(ROOT / "docs" / page, "python") if text.startswith("import lowtide, torch")]
    exec(compile(code, page, "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert all("of the plain step" in line for line in printed) and len(printed) == 3 * (page == "budget.md")


def commands_of_the_readme() -> list[list[str]]:
    return [shlex.split(line, comments=True) for text in blocks(ROOT / "README.md", "") for line in text.splitlines()]


def test_the_commands_of_the_readme_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """That `train` and `report` run on such files, tests/report/test_run_folder.py shows; plans, the test below."""
    from lowtide.cli.run_file import load_run

    commands = commands_of_the_readme()
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {words[1] for words in commands if words and words[0] == "make"} <= set(targets)
    *_, plan, report = [words[1:] for words in commands if words and words[0] == "lowtide"]
    (train,) = [words[2:] for words in commands if words[:2] == ["python", "-m"]]
    monkeypatch.chdir(ROOT)
    assert (plan[0], plan[2:]) == ("plan", ["--hardware", "h200"])
    memory = load_run(plan[1]).memory
    assert memory is not None and memory.has_budget
    run = load_run(train[1])
    assert (train[0], report[0], Path(report[1])) == ("examples.train", "report", run.output_dir)
    assert run.memory is not None and run.memory.has_budget


@pytest.mark.slow
@pytest.mark.parametrize("number", one_of(2, range(2)))
def test_each_figure_of_the_readme_is_one_that_its_command_prints(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lowtide.cli.main import main

    monkeypatch.chdir(ROOT)
    asked = [words[1:] for words in commands_of_the_readme() if words[:3] == ["lowtide", "plan", "--model"]]
    assert len(asked) == 2
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    still = types.SimpleNamespace(perf_counter=lambda: 0.0)  # no clock ends a search, on whatever machine
    for module in ("solve", "local_search"):
        monkeypatch.setattr(f"lowtide.planner.{module}.time", still)
    assert main(asked[number]) == 0
    for row in capsys.readouterr().out.splitlines()[4:8]:
        peak, step = re.search(r"([\d.]+ GiB) +([\d.]+ m?s)", row).groups()  # type: ignore[union-attr]
        seconds = float(step.split()[0]) / (1000 if step.endswith("ms") else 1)
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {row.partition('  ')[0]}")]
        written = {peak: float(found) for peak, found in re.findall(r"([\d.]+ GiB)[^|]*\| ([\d.]+) s", line)}
        assert written[peak] == pytest.approx(seconds, rel=0.05 if row.startswith("lowtide") else 0.006), row


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_yaml_block_is_a_good_section(page: Path, tmp_path: Path) -> None:
    from lowtide.cli.run_file import load_run
    from lowtide.config.memory import load_memory
    from lowtide.config.source import read_yaml
    from lowtide.mindformers.schema import has_sections, read_sections

    for text in blocks(page, "yaml"):
        file = tmp_path / "run.yaml"
        if text.startswith("pipeline:"):
            file.write_text(f"model: {{model_type: llama}}\ntrain: {{steps: 1}}\n{text}", encoding="utf-8")
            assert load_run(file).pipeline is not None
            continue
        file.write_text(text, encoding="utf-8")
        if has_sections(read_yaml(file)):
            assert read_sections(file).resolve().layers
            continue
        memory = load_memory(file)
        assert memory.budget is not None or not memory.rules().does_nothing
        if text.startswith("model:"):
            assert load_run(file).memory is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_python_block_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)


def test_the_mistakes_that_are_shown_are_the_ones_that_are_made(tmp_path: Path) -> None:
    from lowtide.config.memory import load_memory
    from lowtide.errors import ConfigError

    file = tmp_path / "run.yaml"
    file.write_text("memory:\n  recomptue: all\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_memory(file)
    said = str(error.value).replace(str(file), "run.yaml")
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")
    assert said in (ROOT / "docs" / "memory-rules.md").read_text(encoding="utf-8")


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"`((?:tests|examples|lowtide|docs)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        assert (ROOT / "lowtide" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_pages_stay_few_and_users_are_sent_to_no_decision() -> None:
    lines = {page: len(page.read_text(encoding="utf-8").splitlines()) for page in [*PAGES, *DOCS]}
    assert sum(lines[page] for page in DOCS) <= 4000
    assert max(lines[ROOT / "README.md"], lines[ROOT / "CHANGELOG.md"]) <= 150
    for page in PAGES:
        if page.parent.name != "decisions" and page.name != "CONTRIBUTING.md":
            assert "decisions/" not in page.read_text(encoding="utf-8"), page


def test_the_contract_has_twenty_points_with_tests() -> None:
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    points = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [point.split(".")[0] for point in points[:20]] == [str(number) for number in range(1, 21)]
    assert all("::test_" in point for point in points)


def test_every_key_is_documented() -> None:
    import dataclasses

    from lowtide.config.memory import MemoryConfig
    from lowtide.config.run import DataConfig, ModelConfig, TrainConfig

    trainer = "../examples/train/README.md"
    pages = {MemoryConfig: "memory-rules.md", ModelConfig: trainer, DataConfig: trainer, TrainConfig: trainer}
    for config, page in pages.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for field in dataclasses.fields(config):
            if field.name not in ("locations", "places", "fields"):
                assert f"| `{field.name}` |" in text, f"{page}: {field.name}"


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_picture_and_table_are_of_the_measured_numbers(make_picture: ModuleType) -> None:
    report = json.loads(make_picture.RESULT.read_text(encoding="utf-8"))
    assert make_picture.PICTURE.read_text(encoding="utf-8") == make_picture.picture(report)
    page = make_picture.PAGE.read_text(encoding="utf-8")
    interleaved = json.loads(make_picture.INTERLEAVED.read_text(encoding="utf-8"))
    assert make_picture.page(page, report, interleaved) == page
    assert make_picture._demo().differences(report["runs"]) == []


def test_the_picture_says_what_was_measured(make_picture: ModuleType) -> None:
    report = json.loads(make_picture.RESULT.read_text(encoding="utf-8"))
    report["runs"]["swap"]["peak_resident_bytes"] = 1234 * 2**20
    assert ">1234<" in make_picture.picture(report)


def test_times_are_over_the_run_that_the_page_says_to_compare_with(make_picture: ModuleType) -> None:
    """In the demo, in the picture and in the interleaved run the same baseline is 1, and no row is left out."""
    text = make_picture.PAGE.read_text(encoding="utf-8")
    report = json.loads(make_picture.RESULT.read_text(encoding="utf-8"))
    interleaved = json.loads(make_picture.INTERLEAVED.read_text(encoding="utf-8"))
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    start = next(place for place, row in enumerate(rows) if row[:2] == ["| run", "peak MiB"])
    length = len(make_picture._demo().rows(report)) + 1
    demo = {row[0].removeprefix("| "): row for row in rows[start : start + length]}
    assert list(demo)[2:] == list(report["runs"])
    column = demo["run"].index("x fastest plain")
    medians = {name: statistics.median(run["step_seconds"]) for name, run in report["runs"].items()}
    base = min(medians["plain"], medians["plain, malloc"])
    for name in report["runs"]:
        assert demo[name][column] == f"{medians[name] / base:.2f}"
        assert f">{demo[name][column]}<" in make_picture.PICTURE.read_text(encoding="utf-8")
    assert "Time of a step, fastest plain = 1" in make_picture.PICTURE.read_text(encoding="utf-8")
    table = [
        row for row in rows if len(row) == 5 and row[0] in {f"| {name}" for name in make_picture.VARIANTS.values()}
    ]
    fastest = min(row["ratio_median"] for row in interleaved["rows"] if row["method"] in ("plain", "plain_default"))
    assert [float(row[1]) for row in table] == [round(row["ratio_median"] / fastest, 2) for row in interleaved["rows"]]
