"""The table of what lowtide works with: nobody is left out, and each row has a test or says that nobody has tried."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lowtide.config.memory import load_memory
from lowtide.config.source import read_yaml
from lowtide.mindformers.schema.recompute import KEYS as RECOMPUTE_KEYS
from lowtide.mindformers.schema.swap import KEYS as SWAP_KEYS

DOCS = Path(__file__).parents[2] / "docs"
PAGE, MIGRATION = DOCS / "compatibility.md", DOCS / "migration.md"
ASKED = (
    *("Hugging Face's Trainer", "TRL: SFT", "TRL: DPO", "TRL: GRPO", "PEFT: LoRA", "PEFT: QLoRA", "Accelerate"),
    *("Lightning", "torchtitan", "DeepSpeed", "FSDP1", "FSDP2", "tensor parallelism"),
    *("tensor parallelism with FSDP2", "torch.compile: of layers"),
    *("torch.compile: of the whole model", "Liger", "FlashAttention 2 and 3", "FP8", "context parallelism"),
    "DataParallel",
)
MIGRATE = ("MindSpeed", "MindSpore Transformers", "Megatron-LM", "torchtune", "TRL", "Axolotl", "DeepSpeed")


def rows(head: str, page: Path = PAGE) -> list[list[str]]:
    text = page.read_text(encoding="utf-8").partition(head)[2]
    lines = text.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_everybody_who_asks_has_a_row() -> None:
    assert tuple(row[0] for row in rows("| what | | shown by |\n")) == ASKED
    text = MIGRATION.read_text(encoding="utf-8")
    assert all(name in text for name in MIGRATE)
    written = " ".join(row[0] for row in rows("| key | here | limits there | limits here |\n", MIGRATION))
    assert all(f"`{key}`" in written for key in (*RECOMPUTE_KEYS, *SWAP_KEYS))


@pytest.mark.parametrize("name", ASKED)
def test_a_row_has_its_test_or_says_that_nobody_has_tried(name: str) -> None:
    """That the test exists, test_readme.py says."""
    (row,) = [row for row in rows("| what | | shown by |\n") if row[0] == name]
    is_tried = row[1].startswith(("works", "refused", "torch's"))
    assert is_tried == bool(re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", row[2])), row
    assert is_tried or row[1].startswith("not covered"), row


@pytest.mark.parametrize("name", [row[0] for row in rows("| what | | shown by |\n") if row[2]])
def test_what_is_said_to_work_is_tried_where_the_suite_runs(name: str) -> None:
    """Not by a test that only `make test-extended` runs, nor by one that is skipped: what a test skips itself without
    is among what the suite installs, or the row says so."""
    (row,) = [row for row in rows("| what | | shown by |\n") if row[0] == name]
    path, _, wanted = row[2].strip("`").partition("::")
    body = ast.parse((DOCS.parent / path).read_text(encoding="utf-8")).body
    (test,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == wanted]
    around = [ast.unparse(node) for node in body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    marks = [ast.unparse(mark).partition("(")[0] for mark in test.decorator_list]
    assert not {"pytest.mark.extended", "pytest.mark.skip", "pytest.mark.skipif"} & {*marks}
    assert "pytest.mark.skip" not in "".join(around)
    needed = re.findall(r"importorskip\('(\w+)'", "".join([*around, ast.unparse(test)]))
    pyproject = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    installed = re.findall(r'^    "([\w-]+)', pyproject, re.MULTILINE)
    assert all(library in installed or f"only where {library} is installed" in row[1] for library in needed), needed


def test_each_line_for_here_is_one_that_lowtide_reads(tmp_path: Path) -> None:
    heads = ("| there | here |\n", "| flag | here | limits there | limits here | published; here |\n")
    written = [row[1] for head in heads for row in rows(head, MIGRATION)]
    found = [setting for cell in written for setting in re.findall(r"`(\w+: [^`]+)`", cell)]
    settings = [setting for setting in found if not setting.startswith("pipeline:")]
    assert len(settings) >= 15
    for text in settings:
        file = tmp_path / "memory.yaml"
        file.write_text(f"memory:\n  {text}\n", encoding="utf-8")
        assert read_yaml(file).entries and load_memory(file) is not None
