"""The wheel of a clone: what is in it, and what it does in an environment that has nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from lowtide.version import __version__

ROOT = Path(__file__).parents[2]
SHARE = "share/lowtide/examples"
PLANS = ROOT / "tests" / "core" / "golden"
PLAIN = ("yaml", "_yaml", "numpy", "numpy.libs", "scipy", "scipy.libs")
"""What lowtide depends on beside torch, by the names of their folders."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of it stays in the clone."""
    pytest.importorskip("setuptools", minversion="77")
    clone = tmp_path_factory.mktemp("wheel") / "lowtide"
    for name in ("lowtide", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return clone.parent / done.stdout.splitlines()[-1]


def test_the_wheel_has_the_package_and_the_examples_that_pages_name_and_nothing_else(wheel: Path) -> None:
    package = [
        file for file in (ROOT / "lowtide").rglob("*") if file.suffix in (".py", ".toml", ".css", ".html", ".typed")
    ]
    examples = {
        file.name
        for pattern in ("*.json", "*.yaml", "with_*.py", "notebook.ipynb")
        for file in (ROOT / "examples").glob(pattern)
    }
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    expected = {file.relative_to(ROOT).as_posix() for file in package}
    expected |= {f"lowtide-{__version__}.data/data/{SHARE}/{name}" for name in examples}
    expected |= {f"lowtide-{__version__}.dist-info/{name}" for name in about}
    with zipfile.ZipFile(wheel) as built:
        assert set(built.namelist()) == expected
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"examples/(\w+\.(?:json|yaml))", text))
    assert "llama_3_8b.json" in named and named <= examples


@pytest.mark.extended
def test_it_is_installed_alone_and_says_what_it_needs(wheel: Path, tmp_path: Path) -> None:
    """Without torch it reads, explains and compares; what needs more says in one line what to install."""
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=True)
    install = [bare / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", wheel]
    subprocess.run(install, check=True, timeout=120)
    run = bare / SHARE / "llama_8b.yaml"

    def said(*words: object) -> tuple[int, str, str]:
        command = [bare / "bin" / "lowtide", *map(str, words)]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    status, out, _ = said("--help")
    assert status == 0 and "find the fastest plan within a budget" in out
    assert said("--version") == (0, f"lowtide {__version__}\n", "")
    assert said("plan", run, "--hardware", "h200") == (2, "", "lowtide: this needs yaml; run: pip install 'PyYAML'\n")

    packages = next((bare / "lib").glob("python3*/site-packages"))
    spec = find_spec("yaml")
    assert spec is not None and spec.origin is not None
    for folder in (Path(spec.origin).parents[1] / name for name in PLAIN):
        if folder.exists():
            (packages / folder.name).symlink_to(folder)
    assert said("plan", run, "--hardware", "h200") == (2, "", "lowtide: this needs torch; run: pip install 'torch'\n")
    file = tmp_path / "upstream.yaml"
    file.write_text("model: {model_config: {num_layers: 2}}\nrecompute_config: {recompute: [1]}\n", encoding="utf-8")
    status, out, errors = said("explain", file)
    assert (status, errors) == (0, "") and "Set full recompute at layer 0" in out
    status, out, errors = said("diff", PLANS / "solved_plan.json", PLANS / "solved_plan.json")
    assert (status, errors) == (0, "") and "the same fates" in out
    mistake = tmp_path / "run.yaml"
    mistake.write_text("train: {steps: 1}\nmodel: {model_type: llama}\nmemory: {budgett: 1GiB}\n", encoding="utf-8")
    wrong = f"{mistake}:3:10: unknown key 'memory.budgett'; did you mean 'budget'?\n"
    assert said("plan", mistake, "--hardware", "h200") == (2, "", wrong)
