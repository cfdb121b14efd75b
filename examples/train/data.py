"""Bytes in, sequences out: the text a run trains on, and its order, shuffled by the seed. Tokens are bytes.

Why: a run that is resumed must see the very sequences it would have seen. Which ones a micro-batch has follows from its
number alone, so there is no place in the text that a checkpoint would have to keep.
Cost: each rank has the whole text in main memory. Not covered: tokenizers, packing of documents, masks.
"""

from __future__ import annotations

import functools
import glob
import os
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.config.run import RunConfig
from lowtide.config.source import shown
from lowtide.errors import ConfigError


def standard_library() -> tuple[Path, ...]:
    """The .py files of the running Python's standard library, sorted, without tests and installed packages: about 12 MB
    of text that is on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return tuple(root / path for path in sorted(relative) if not skipped & set(path.parts))


def read_files(paths: Sequence[Path]) -> bytes:
    """Reads the files, in the order given. Raises `ConfigError` for one that cannot be read."""
    try:
        return b"".join(path.read_bytes() for path in paths)
    except OSError as error:
        message = f"{error.filename}: cannot be read: {error.strerror}; fix the file or take it out of data.files"
        raise ConfigError(message) from None


def text_of(run: RunConfig) -> bytes:
    """The text of a run. Raises `ConfigError`: a pattern that matches no file, not enough text for one sequence."""
    paths: list[Path] = []
    for index, written in enumerate(run.data.files):
        where = f"data.files[{index}]"
        pattern = os.path.expanduser(written)  # noqa: PTH111 -- Path.expanduser raises for `~nobody`
        # Not Path.glob and Path.is_file, which raise for some texts.
        found = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)  # noqa: PTH113, PTH207
        files = sorted(map(Path, filter(os.path.isfile, found)))
        if not files:
            run.fail(where, f"'{where}': no file matches {shown(written)}; check the path")
        paths += files
    text = read_files(paths or standard_library())
    if len(text) < run.data.sequence_length:
        what = f"the text has {len(text)} bytes, less than one sequence of {run.data.sequence_length}"
        run.fail("data.files", f"'data.files': {what}; add files or lower 'data.sequence_length'")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Deals sequences out. A micro-batch of the job is `batch_size * num_ranks` consecutive places of the shuffled
    order, of which each rank has its own. After the last sequence a new epoch begins in a new order."""

    text: bytes
    sequence_length: int
    batch_size: int
    seed: int
    rank: int = 0
    num_ranks: int = 1

    def indices(self, number: int) -> list[int]:
        """Which sequences this rank has in micro-batch `number` of the run, counted from 0."""
        num_sequences = len(self.text) // self.sequence_length
        first = (number * self.num_ranks + self.rank) * self.batch_size
        places = (divmod(place, num_sequences) for place in range(first, first + self.batch_size))
        return [_order(self.seed, epoch, num_sequences)[index] for epoch, index in places]

    def batch(self, number: int) -> torch.Tensor:
        """That micro-batch: int64 (B, T), values 0..255."""
        length = self.sequence_length
        rows = [bytearray(self.text[index * length : (index + 1) * length]) for index in self.indices(number)]
        return torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows]).long()


@functools.lru_cache(maxsize=2)  # a micro-batch may begin in one epoch and end in the next
def _order(seed: int, epoch: int, num_sequences: int) -> list[int]:
    order = list(range(num_sequences))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order
