"""The scripts and the notebook of examples/ run as they are, those of one rank one after the other in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import processes, two_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = {
    "with_a_loop": "of a budget of 8.0 MiB",
    "with_trainer": "'train_loss'",
    "with_trl_sft": "'train_loss'",
    "with_dpo": "of a budget of 12.0 MiB",
    "with_lightning": "",
    "with_accelerate": "",
    "with_unet": "of a budget of 8.0 MiB",
    "with_mindspore_yaml": "recomputed: mlp",
    "with_weights_elsewhere": "of a budget of 12.0 MiB",
    "notebook": "step 3: loss ",
}
"""Name -> what it prints."""
MORE = ("with_trl_sft", "with_dpo", "with_lightning", "with_accelerate", "with_unet")
"""Bits with trl, accelerate and lightning are compared in tests/adapters, those of a U-Net wherever the zoo is."""
RANKS = {
    "with_fsdp2": "of a budget of 7.0 MiB",
    "with_pipelining": " bytes were elsewhere between forward and backward",
}
WITH_REPORT = ("with_a_loop", "with_trainer", "with_trl_sft", "with_lightning", "with_accelerate")
RUN = """
import ast, contextlib, io, json, os, pathlib, time

def cells(path):
    if path.suffix == ".py":  # a report as JSON has the figures of one with pictures, which the notebook draws
        return [path.read_text().replace("run.html", "run.json")]
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]

said = {}
for path in map(pathlib.Path, PATHS):
    folder = (HOME / path.stem)
    folder.mkdir()
    os.chdir(folder)
    scope, start, out = {"__name__": "__main__", "__file__": str(path)}, time.perf_counter(), io.StringIO()
    with contextlib.redirect_stdout(out):
        for text in cells(path):
            tree = ast.parse(text)
            last = tree.body.pop() if path.suffix == ".ipynb" and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, str(path), "exec"), scope)
            if last is not None:  # as a notebook does: what the last line gives shows itself
                shown = eval(compile(ast.Expression(last.value), str(path), "eval"), scope)
                print(shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown))
    said[path.stem] = out.getvalue(), time.perf_counter() - start
print(json.dumps(said))
"""


def scripts() -> list[Path]:
    return sorted(EXAMPLES.glob("with_*.py"))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder, and by name what each printed."""
    return ran([name for name in ALONE if name not in MORE], tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def more_said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    return ran([*MORE], tmp_path_factory.mktemp("more"))


def ran(names: list[str], home: Path) -> tuple[Path, dict[str, str]]:
    paths = [str(EXAMPLES / (f"{name}.py" if name != "notebook" else "notebook.ipynb")) for name in names]
    code = f"import pathlib\nHOME, PATHS = pathlib.Path({str(home)!r}), {paths!r}\n{RUN}"
    status, out, err = processes.program(code, home, seconds=240)
    assert status == 0, err
    found = json.loads(out.splitlines()[-1])
    print({name: f"{seconds:.1f} s" for name, (_, seconds) in found.items()})  # seen with pytest -s
    return home, {name: text for name, (text, _) in found.items()}


def test_there_are_eleven_and_they_are_short() -> None:
    names = [path.stem for path in scripts()]
    assert sorted([*names, "notebook"]) == sorted((*ALONE, *RANKS)) and len(names) == 11
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 60 for path in scripts())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ran"),
    [pytest.param(name, "more_said", marks=pytest.mark.extended) if name in MORE else (name, "said") for name in ALONE],
)
def test_it_runs_on_one_rank(name: str, ran: str, request: pytest.FixtureRequest) -> None:
    home, printed = request.getfixturevalue(ran)
    assert ALONE[name] in printed[name] and "does nothing" not in printed[name], printed[name]
    if name in WITH_REPORT:
        figures = json.loads((home / name / "run.json").read_text(encoding="utf-8"))["figures"]
        tiles = {tile["what"]: tile for tile in figures}
        assert {"peak, predicted", "everything kept", "peak, measured"} <= tiles.keys()
        assert float(tiles["saved by the plan"]["beside"].partition(" %")[0]) >= 10
    if name == "notebook":
        assert "What happened" in (home / name / "run.html").read_text(encoding="utf-8")
        assert printed[name].count("<pre") == 2 and printed[name].endswith("True\n")
    if name == "with_dpo":
        assert printed[name].count("spills so far 0") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_it_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / f"{name}.py"
    ends = two_ranks.finish(two_ranks.start(path.read_text(encoding="utf-8"), tmp_path), tmp_path)
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert RANKS[name] in ends[0][1]
    if name == "with_pipelining":
        assert all(int(out.split()[2]) > 0 for _, out, _ in ends)
