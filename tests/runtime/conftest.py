"""One thread: the models are tiny, the machine is shared, and sums are then made in one order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# The zoo lives one directory up, beside the tests of the whole library.
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
