"""The `lowtide` command: a table of subcommands, one file each, imported when they are asked for.

Why so late: torch takes seconds to import, and `lowtide --help` must answer at once. A command's own file is imported
only when that command is run or its help is asked for; it offers `add_arguments(parser)` and `run(args) -> int`, and
imports torch inside `run`.

Exit status: what the command returns; 2 for a mistake of the user (one line on stderr); 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import ConfigError
from lowtide.version import __version__

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_NOBODY_READS = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand."""

    module: str
    help: str


COMMANDS = {
    "diff": Command(module="lowtide.cli.diff", help="say what one plan does otherwise than another"),
    "doctor": Command(module="lowtide.cli.doctor", help="say whether this machine is ready, and what is in the way"),
    "explain": Command(
        module="lowtide.cli.explain", help="say what recompute_config and swap_config mean, layer by layer"
    ),
    "export": Command(module="lowtide.cli.export", help="say a plan in the words of another framework"),
    "plan": Command(module="lowtide.cli.plan", help="find the fastest plan within a budget, without running a step"),
    "profile": Command(module="lowtide.cli.profile", help="look at one training step, and save what was seen"),
    "report": Command(module="lowtide.cli.report", help="write what a run did as one HTML file, a trace or data"),
    "train": Command(module="lowtide.cli.train", help="train a model as a run file says"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. `SystemExit` only for `--help`, `--version` and misuse."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parse(arguments)
    try:
        return int(importlib.import_module(COMMANDS[args.command].module).run(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 -- flushed once more when Python ends
        return EXIT_NOBODY_READS
    except KeyboardInterrupt:
        print("lowtide: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lowtide", description="Fit training into the memory you have.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help.capitalize() + ".")
        if name == asked:
            importlib.import_module(command.module).add_arguments(subparser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
