"""The `lowtide` command: subcommands and their options from one table, commands.toml.

Why a table: torch takes seconds to import, and `--help` must answer at once. A command's own file is imported when the
command runs; its function `run(args) -> int` imports torch inside.

Exit status: what the command returns; 2 for a mistake of the user (one line on stderr); 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lowtide.errors import ConfigError, did_you_mean
from lowtide.version import __version__

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_NOBODY_READS = 141
EXTRAS = {
    **dict.fromkeys(("transformers", "safetensors"), "lowtide[train]"),
    **{name: name for name in ("peft", "torch", "scipy", "numpy")},
    "yaml": "PyYAML",
}
"""What an installation of lowtide alone, or one without what it depends on, lacks -> what to install."""

COMMANDS: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "commands.toml").read_text(encoding="utf-8"))
"""By name: `run`, `help` and `options` of a subcommand; `arguments`, which adds those that stand elsewhere."""
_TYPES = {"int": int, "path": Path}


def _function(place: str) -> Callable[..., Any]:
    """`doctor` of commands.py for `commands:doctor`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"lowtide.cli.{module}"), name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. `SystemExit` only for `--help`, `--version` and misuse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
        return int(_function(COMMANDS[args.command]["run"])(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"lowtide: this needs {package}; run: pip install '{EXTRAS[package]}'", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 -- flushed once more when Python ends
        return EXIT_NOBODY_READS
    except KeyboardInterrupt:
        print("lowtide: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser, subparsers = parsers(asked)
    args, unknown = parser.parse_known_args(_joined(arguments))
    if unknown:
        from lowtide.config.source import shown

        chosen, name = subparsers[args.command], unknown[0].partition("=")[0]
        near = did_you_mean(name, re.findall(r"--[\w-]+", chosen.format_usage()))
        chosen.error(f"unknown argument {shown(name)}{near}")
    return args


def _joined(arguments: Sequence[str]) -> list[str]:
    """`--budget -1GiB` as `--budget=-1GiB`: argparse would take the size for an option, and say that one is missing.
    `--budget 80 GiB` as `--budget 80GiB`: it would take the unit for a file."""
    joined: list[str] = []
    for argument in arguments:
        if re.match(r"-\d", argument) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={argument}"
        elif re.fullmatch(r"[KMGT]i?B|%", argument, re.IGNORECASE) and joined and re.fullmatch(r"[\d.]+", joined[-1]):
            joined[-1] += argument
        else:
            joined.append(argument)
    return joined


def parsers(asked: str | None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line, and that of each command; arguments has only that of the command `asked`."""
    parser = _Parser(prog="lowtide", description="Fit training into the memory you have.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    adder = parser.add_subparsers(dest="command", metavar="command", required=True)
    found: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        text = command["help"]
        found[name] = adder.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == asked:
            _add_options(found[name], command)
    return parser, found


def _add_options(parser: argparse.ArgumentParser, command: Mapping[str, Any]) -> None:
    for name, option in command.get("options", {}).items():
        how = dict(option)
        if "type" in how:
            how["type"] = _TYPES[how["type"]]
        if isinstance(how.get("metavar"), list):
            how["metavar"] = tuple(how["metavar"])
        parser.add_argument(name, **how)
    if "arguments" in command:
        _function(command["arguments"])(parser)


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line; argparse itself prints its usage first, several lines of it."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        message = re.sub(r"invalid int value: ('.*')", r"expected a whole number, such as 8192, not \1", message)
        hint = did_you_mean(choice[1], re.split("[', ]+", choice[2])) if choice else ""
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message}{hint}; see {self.prog} --help\n")
