"""The list of mutants fits the code and the tests that are there: else it would rot unnoticed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import BROKEN, EQUIVALENT, KILLED, SURVIVED, TIMEOUT, chosen, share_killed, table
from tests.mutants.edits import Edit, always, changed, drops, gives, last_step, never, puts, without
from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_change_can_be_made_and_its_tests_exist(mutant: Mutant) -> None:
    text = (ROOT / "lowtide" / mutant.file).read_text()
    assert ast.dump(ast.parse(changed(text, mutant.function, mutant.edit))) != ast.dump(ast.parse(text))
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / "tests" / path).exists(), test
        pattern = rf"^def {re.escape(name)}\("  # a case in brackets may be numbered anew: tests stand whole
        assert not name or re.search(pattern, (ROOT / "tests" / path).read_text(), re.MULTILINE), test


_CODE = '''
class Some:
    def work(self, items):
        """Something."""
        total = 0
        for item in items:
            if item.is_good and not item.is_old:
                total += item.size
                self.note(item)
        return [i for i in items if i.is_good], max(total, 1)
'''


@pytest.mark.parametrize(
    ("edit", "old", "new"),
    [
        (gives("items"), _CODE[_CODE.index("total = 0") - 8 :], "        return items\n"),
        (drops("note"), "self.note(item)", "pass"),
        (never("is_old"), "item.is_good and not item.is_old", "False"),
        (always("is_good", "i"), "if i.is_good]", "if True]"),
        (without("is_old"), "item.is_good and not item.is_old", "item.is_good and True"),
        (puts("max(total, 1)", "total"), "max(total, 1)", "total"),
        (last_step("1"), "total += item.size", "total += 1"),
    ],
)
def test_an_edit_changes_one_place_of_one_function(edit: Edit, old: str, new: str) -> None:
    expected = _CODE.replace(old, new).replace('        """Something."""\n', "" if edit.kind == "gives" else "\\g")
    expected = expected.replace("\\g", '        """Something."""\n')
    assert changed(_CODE, "Some.work", edit) == ast.unparse(ast.parse(expected))


@pytest.mark.parametrize(
    ("function", "edit", "message"),
    [
        ("Some.rest", drops("note"), "there is no 'Some.rest'"),
        ("Some.work", drops("other"), "drops ('other',) fits 0 places in 'work'"),
        ("Some.work", never("is_good"), "condition ('is_good',) fits 2 places in 'work'"),
        ("Some.work", puts("min(total, 1)", "total"), "puts ('min(total, 1)',) fits 0 places in 'work'"),
    ],
)
def test_an_edit_that_does_not_fit_is_refused(function: str, edit: Edit, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        changed(_CODE, function, edit)
    assert str(caught.value) == message


def test_names_are_unique_and_only_what_could_be_noticed_is_counted() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert share_killed([KILLED, TIMEOUT, EQUIVALENT, KILLED, SURVIVED]) == 0.75
    assert share_killed([KILLED, BROKEN]) == 0.5
    few = chosen(["float64-under-autocast", "blocks-in-pieces"], [])
    assert {mutant.area for mutant in few} == {"engines", "loss"}
    assert chosen(["float64-under-autocast"], ["engines"]) == []
    assert table(few, {few[0].name: KILLED, few[1].name: SURVIVED}).splitlines()[2:] == [
        f"| {few[0].area} | 1 | 1 | 0 | 0 |",
        f"| {few[1].area} | 1 | 0 | 1 | 0 |",
        "| all | 2 | 1 | 1 | 0 |",
    ]


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_says_what_became_of_a_mutant_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.mutants", "--only", "several-gradients-at-once", "--json"]
    said = []
    for _ in range(2):
        done = subprocess.run(
            [*command, "--results", str(results)], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.endswith("100.0% noticed, 95% wanted\n")
        said.append("1/1 killed" in done.stderr)
    assert json.loads(done.stdout)
    assert said == [True, False]
