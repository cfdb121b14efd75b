"""The list of mutants fits the code and the tests that are there: else it would rot unnoticed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import BROKEN, EQUIVALENT, KILLED, SURVIVED, TIMEOUT, chosen, mutated, share_killed, table
from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_change_can_be_made_and_its_tests_exist(mutant: Mutant) -> None:
    text = (ROOT / "lowtide" / mutant.file).read_text()
    changed = mutated(mutant, text)
    assert changed != text
    ast.parse(changed)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        source = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", source, re.MULTILINE), test


def test_names_are_unique_and_a_change_that_does_not_fit_is_refused() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    with pytest.raises(ValueError, match="its old text occurs 0 times"):
        mutated(MUTANTS[0], "")


def test_only_what_could_be_noticed_is_counted() -> None:
    assert share_killed([KILLED, TIMEOUT, EQUIVALENT, KILLED, SURVIVED]) == 0.75
    assert share_killed([KILLED, BROKEN]) == 0.5
    few = chosen(["kept-version", "window-of-fetches"], [])
    assert [mutant.area for mutant in few] == ["hooks", "swap"]
    assert chosen(["kept-version"], ["swap"]) == []
    assert table(few, {"kept-version": KILLED, "window-of-fetches": SURVIVED}).splitlines()[2:] == [
        "| hooks | 1 | 1 | 0 | 0 |",
        "| swap | 1 | 0 | 1 | 0 |",
        "| all | 2 | 1 | 1 | 0 |",
    ]


@pytest.mark.slow
def test_a_run_says_what_became_of_a_mutant_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.mutants", "--only", "optimizers-step-is-free", "--json"]
    said = []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--results", str(results)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith("100.0% noticed, 95% wanted\n")
        assert json.loads(done.stdout)["optimizers-step-is-free"]["fate"] == KILLED
        said.append("1/1 killed" in done.stderr)
    assert said == [True, False]
