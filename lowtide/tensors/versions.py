"""The versions of torch that lowtide was tested with, and what it says where a torch is too old or too new.

What: `TESTED`, and the error for a symbol that is not there. Cost: none. Not covered: symbols that are there and mean
something else; for these there are the tests of tests/tensors/test_private.py.
"""

from __future__ import annotations

import torch

from lowtide.errors import ConfigError

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Versions that the tests of lowtide/tensors/private.py have passed with, oldest first, as pyproject.toml says them.
The whole suite runs with 2.13."""


def missing(symbol: str) -> ConfigError:
    """The error for a torch without `symbol`, a dotted path or the text of an ImportError."""
    return ConfigError(
        f"lowtide: torch {torch.__version__} does not have what lowtide needs of it: {symbol}; lowtide was tested with "
        f"torch {TESTED[0]} to {TESTED[-1]}: install one of these"
    )
