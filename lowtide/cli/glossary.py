"""`lowtide glossary [WORD]`: what a word of lowtide's output means; without one, all of them.

Exit status: 0, or 2 for a word that is not in it.
"""

from __future__ import annotations

import argparse

from lowtide.cli.terminal import width_of_stdout
from lowtide.core.glossary import WORDS, find, lines
from lowtide.core.text_table import wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "word", nargs="*", metavar="WORD", help="one word of the output, such as gap; absent: all of them"
    )


def run(args: argparse.Namespace) -> int:
    """Prints entries. Raises `ConfigError` for an unknown word."""
    words = [find(" ".join(args.word))] if args.word else list(WORDS)
    told = (line for word in words for line in lines(word))
    print("\n".join(wrapped(told, width_of_stdout(), indent="    ")))
    return 0
