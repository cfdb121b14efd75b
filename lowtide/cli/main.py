"""The `lowtide` command: a table of subcommands, whose files are imported when they are asked for.

Why so late: torch takes seconds to import, and `lowtide --help` must answer at once. A command's own file is imported
only when that command is run or its help is asked for; it offers `add_arguments(parser)` and `run(args) -> int`, and
imports torch inside `run`.

Exit status: what the command returns; 2 for a mistake of the user (one line on stderr); 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

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

_SHORT = "lowtide.cli.commands"
COMMANDS = {
    "diff": ("lowtide.cli.diff", "compare two plans"),
    "doctor": (_SHORT, "say whether this machine is ready, and what is in the way"),
    "explain": ("lowtide.cli.explain", "say what recompute_config and swap_config mean, layer by layer"),
    "export": (_SHORT, "write a plan as another framework's settings"),
    "plan": ("lowtide.cli.plan", "find the fastest plan within a budget, without running a step"),
    "profile": ("lowtide.cli.profile", "look at one training step, and save what was seen"),
    "report": (_SHORT, "write what a run did as one HTML file, a trace or data"),
    "train": (_SHORT, "train a model as a run file says"),
}
"""By name: the module of a subcommand, and its help."""


def functions_of(name: str) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[..., int]]:
    """What adds the arguments of a command, and what runs it."""
    module = importlib.import_module(COMMANDS[name][0])
    if COMMANDS[name][0] == _SHORT:
        return getattr(module, f"{name}_arguments"), getattr(module, name)
    return module.add_arguments, module.run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. `SystemExit` only for `--help`, `--version` and misuse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
        return int(functions_of(args.command)[1](args))
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
    """`--budget -1GiB` as `--budget=-1GiB`: argparse would take the size for an option, and say that one is missing."""
    joined: list[str] = []
    for argument in arguments:
        if re.match(r"-\d", argument) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def parsers(asked: str | None) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command line, and that of each command; arguments has only that of the command `asked`."""
    parser = _Parser(prog="lowtide", description="Fit training into the memory you have.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    adder = parser.add_subparsers(dest="command", metavar="command", required=True)
    found: dict[str, argparse.ArgumentParser] = {}
    for name, (_, text) in COMMANDS.items():
        found[name] = adder.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == asked:
            functions_of(name)[0](found[name])
    return parser, found


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line; argparse itself prints its usage first, several lines of it."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        hint = did_you_mean(choice[1], re.split("[', ]+", choice[2])) if choice else ""
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message}{hint}; see {self.prog} --help\n")


if __name__ == "__main__":
    sys.exit(main())
