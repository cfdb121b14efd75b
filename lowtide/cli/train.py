"""`lowtide train RUN.yaml`: the door to the trainer of the examples, where the clone is at hand.

lowtide is no trainer. The one in `examples/train` is short enough to read, and trains what a run file says.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from lowtide.errors import ConfigError

_CLONE = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of the example; without it there is nothing to run."""
    if not (_CLONE / "examples" / "train").is_dir():
        raise ConfigError(
            "lowtide train: the trainer is an example and not in this installation; in a clone of lowtide's repository "
            "write: python -m examples.train RUN.yaml"
        )
    sys.path.insert(0, str(_CLONE))
    importlib.import_module("examples.train.__main__").add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return int(importlib.import_module("examples.train.__main__").run(args))
