"""What importing costs, and what the package shows to the world."""

from __future__ import annotations

import inspect
import pkgutil
import pydoc
import subprocess
import sys

import pytest

import lowtide
import lowtide.config
import lowtide.core
import lowtide.planner
import lowtide.timeline

HEAVY = ("torch", "transformers", "numpy", "scipy", "rich")
FRONT = ["lowtide", "lowtide.units", "lowtide.errors", "lowtide.cli.main"]
PLAIN = [
    f"{package.__name__}.{module.name}"
    for package in (lowtide.core, lowtide.config, lowtide.planner, lowtide.timeline)
    for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize(("modules", "heavy"), [(FRONT, HEAVY), (FRONT + PLAIN, ("torch", "transformers", "rich"))])
def test_plain_modules_import_nothing_heavy(modules: list[str], heavy: tuple[str, ...]) -> None:
    imports = "\n".join(f"import {name}" for name in modules)
    code = f"{imports}\nimport sys, lowtide\nlowtide.Plan, lowtide.ConfigError\n"
    code += f"print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_lowtide_imports_itself_alone() -> None:
    code = "import sys; before = {'__future__', *sys.modules}; import lowtide; print(sorted(set(sys.modules) - before))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert result.stdout.strip() == "['lowtide', 'lowtide.version']"


def test_every_public_name_has_help() -> None:
    text = pydoc.plain(pydoc.render_doc(lowtide))
    for name in set(lowtide.__all__) - {"__version__"}:
        assert name in text
        assert inspect.getdoc(getattr(lowtide, name))


def test_public_surface() -> None:
    types = ["BudgetError", "ConfigError", "PartialStepError", "Plan", "Profile", "Tide"]
    assert dir(lowtide) == [
        *types,
        "__version__",
        "apply",
        "cross_entropy",
        "current",
        "load",
        "observe",
        "optimize",
        "plan",
        "remove",
        "selective_offload",
        "swap_optimizer",
        "swap_weights",
        "write_report",
    ]
    assert lowtide.__version__ == "0.2.0"
    assert issubclass(lowtide.ConfigError, ValueError)
    with pytest.raises(AttributeError, match=r"^module 'lowtide' has no attribute 'plann'$"):
        _ = lowtide.plann  # type: ignore[attr-defined]
