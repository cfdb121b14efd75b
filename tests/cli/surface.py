"""What people have in their files and scripts: commands and options, public names, keys of run files; as text.

`python -m tests.cli.surface` writes it over golden/surface.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lowtide
from lowtide.cli.main import COMMANDS, parsers

GOLDEN = Path(__file__).parent / "golden" / "surface.txt"
_MODULES = ("lowtide.pipeline", "lowtide.adapters.transformers", "lowtide.adapters.lightning")
_CLASSES = ("lowtide.Plan", "lowtide.Tide", "lowtide.runtime.session.tides.Tides")


def surface() -> str:
    return "\n".join([*_commands(), "", *_names(), "", *_keys()]) + "\n"


def _commands() -> Iterator[str]:
    for name in COMMANDS:
        _, found = parsers(name)
        for action in found[name]._actions:
            if not isinstance(action, argparse._HelpAction):
                yield f"lowtide {name} {_argument(action)}"


def _argument(action: argparse.Action) -> str:
    words = ["/".join(action.option_strings) or str(action.metavar or action.dest)]
    if action.option_strings and action.nargs != 0:
        values = action.metavar if isinstance(action.metavar, tuple) else (action.metavar,)
        words += ["|".join(action.choices)] if action.choices else [str(value) for value in values]
    return " ".join(words)


def _names() -> Iterator[str]:
    for name in lowtide.__all__:
        value = getattr(lowtide, name)
        yield f"lowtide.{name}" + ("" if inspect.isclass(value) else _parameters(value))  # apply and plan make these
    for place in _MODULES:
        module = importlib.import_module(place)
        names = getattr(module, "__all__", None) or getattr(module, "_HOMES", None) or _own(module)
        for name in sorted(names):
            yield f"{place}.{name}{_parameters(getattr(module, name))}"
    for place in _CLASSES:
        module, _, name = place.rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        for member in sorted(each for each in dir(kind) if not each.startswith("_")):
            yield f"{name}.{member}{_parameters(inspect.getattr_static(kind, member))}"


def _own(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _parameters(value: Any) -> str:
    """`(model, *, budget=None)`: names and defaults. Nothing for what is no function."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    is_made = inspect.isclass(value) and "__init__" in vars(value) and not issubclass(value, Exception)
    if not (inspect.isfunction(value) or is_made):
        return ""
    parameters = inspect.signature(value).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return re.sub(r"<function (\w+) at 0x\w+>", r"\1", str(inspect.Signature(bare)))


def _keys() -> Iterator[str]:
    """Of the sections of a run file."""
    from lowtide.config.memory import MemoryConfig
    from lowtide.config.run import DataConfig, ModelConfig, ParallelConfig, PipelineConfig, TrainConfig

    sections = {
        "model": ModelConfig,
        "data": DataConfig,
        "train": TrainConfig,
        "memory": MemoryConfig,
        "pipeline": PipelineConfig,
        "parallel": ParallelConfig,
    }
    for section, kind in sections.items():
        for field in dataclasses.fields(kind):
            if field.compare:
                yield f"{section}.{field.name}"


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(surface(), encoding="utf-8")
