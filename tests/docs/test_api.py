"""docs/api.md is what the docstrings say, and each public name has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import lowtide

MAKER = Path(__file__).parents[2] / "docs" / "make_api.py"


def test_the_page_is_made_from_the_docstrings() -> None:
    spec = importlib.util.spec_from_file_location("make_api", MAKER)
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    assert maker.PAGE.read_text(encoding="utf-8") == maker.text(), "run: python docs/make_api.py"
    for name in lowtide.__all__:
        assert name.startswith("_") or f"## lowtide.{name}\n" in maker.text()
        assert name.startswith("_") or getattr(lowtide, name).__doc__, name
