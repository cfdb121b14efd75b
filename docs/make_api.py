"""Writes docs/api.md from the docstrings of the public names.

    python docs/make_api.py

Cost: the import of torch. Not covered: modules that one imports by name (`lowtide.pipeline`, adapters); their pages
have their calls.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import lowtide

PAGE = Path(__file__).parent / "api.md"
HEAD = """# API

Everything that `import lowtide` has. Made from the docstrings by `python docs/make_api.py`.
"""
ORDER = (
    *("plan", "optimize", "apply", "observe", "swap_optimizer", "swap_weights", "cross_entropy"),
    *("selective_offload", "write_report"),
)
"""First what people call, in the order in which they need it."""
OURS = (
    *("hold_at_most", "keep_layers", "settle", "is_audited"),
    *("suspend", "resume", "resume_with", "failed_recipes", "refused_layers"),
)
"""Members that lowtide calls itself."""


def text() -> str:
    names = [name for name in lowtide.__all__ if not name.startswith("_")]
    rest = [name for name in names if name not in ORDER]
    functions = [name for name in (*ORDER, *rest) if not inspect.isclass(getattr(lowtide, name))]
    classes = [name for name in names if inspect.isclass(getattr(lowtide, name))]
    return "\n".join([HEAD, *(_function(name) for name in functions), *(_class(name) for name in classes)])


def _function(name: str) -> str:
    found = getattr(lowtide, name)
    return f"## lowtide.{name}\n\n```text\n{name}{_signature(found)}\n```\n\n{_doc(found)}\n"


def _class(name: str) -> str:
    kind = getattr(lowtide, name)
    members = [] if name == "Profile" else _members(kind)  # of a profile, `lowtide profile` shows what there is
    rows = [f"| `{member}` | {_first(value)} |" for member, value in members]
    table = "\n".join(["| | |", "|---|---|", *rows])
    return f"## lowtide.{name}\n\n{_doc(kind)}\n" + (f"\n{table}\n" if rows else "")


def _members(kind: type) -> list[tuple[str, Any]]:
    """Methods and properties of its own, and of those of its bases that are lowtide's, as they are written."""
    found = []
    bases = [base for base in kind.__mro__ if base.__module__.startswith("lowtide.")]
    for name, written in {
        name: vars(kind).get(name, one) for base in bases for name, one in vars(base).items()
    }.items():
        value = written.__func__ if isinstance(written, staticmethod | classmethod) else written
        if not name.startswith("_") and name not in OURS and (inspect.isfunction(value) or _is_property(value)):
            found.append((name if _is_property(value) else f"{name}{_names(value)}", value))
    return found


def _is_property(value: Any) -> bool:
    return isinstance(value, property)


def _names(function: Any) -> str:
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return f"({', '.join(names)})"


def _signature(function: Any) -> str:
    parts, has_star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        parts.append(str(parameter).replace("'", ""))
    return textwrap.fill(f"({', '.join(parts)})", 100, subsequent_indent="    ", break_on_hyphens=False)


def _doc(found: Any) -> str:
    return inspect.cleandoc(found.__doc__ or "")


def _first(value: Any) -> str:
    """The first sentence."""
    doc = _doc(value.fget if _is_property(value) else value).replace("\n", " ").replace("|", "\\|")
    return re.split(r"(?<=\.)\s", doc)[0]


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
