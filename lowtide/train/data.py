"""Bytes in, sequences out: the text a run trains on, and the place it has reached in it.

What: `Corpus` is the concatenation of some files, read on demand; `Sampler` deals its sequences out in a shuffled
order that depends on nothing but the seed. Tokens are bytes, so there is no tokenizer and the vocabulary is 256.
Why: a run that is stopped and resumed must see the very sequences it would have seen. The place is one number (how
many sequences all ranks together have taken), and the order is arithmetic on integers, so it is the same for every
version of torch, numpy and Python.
Cost: opening a corpus reads it once for its hash; afterwards a sequence costs one `open` and `read` (the page cache
does the rest) and a few microseconds of shuffling. Memory does not grow with the text.
Not covered: other tokenizers, packing of documents, masks. Sequences cross the borders between files. A file that
changes while the run reads it is not noticed before the next start.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.config.source import shown
from lowtide.errors import ConfigError
from lowtide.train.run_file import RunConfig

NUM_BYTE_TOKENS = 256
_CHUNK_BYTES = 1 << 20
_MASK_64 = (1 << 64) - 1
_NUM_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Files seen as one long string of bytes."""

    paths: tuple[Path, ...]
    ends: tuple[int, ...]
    """For each file, the position in the whole text at which it ends."""
    sha256: str
    """Hash of the whole text: two corpora with the same hash give the same sequences."""

    @property
    def num_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, num_bytes: int) -> bytearray:
        """The bytes [start, start + num_bytes); all of them must exist."""
        assert start >= 0
        assert start + num_bytes <= self.num_bytes
        found = bytearray()
        index = bisect.bisect_right(self.ends, start)
        while len(found) < num_bytes:
            begin = self.ends[index - 1] if index else 0
            with self.paths[index].open("rb") as file:
                file.seek(start + len(found) - begin)
                piece = file.read(min(num_bytes - len(found), self.ends[index] - start - len(found)))
            if not piece and self.ends[index] > start + len(found):
                raise ConfigError(
                    f"{self.paths[index]}: became shorter while the run was reading it; start the run again"
                )
            found += piece
            index += 1
        return found


def standard_library() -> tuple[Path, ...]:
    """The .py files of the running Python's standard library, sorted, without tests and installed packages.

    About 12 MB of real text that is on every machine. It differs between versions of Python, which is why the
    hash of the text is recorded with every checkpoint.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    return tuple(root / path for path in sorted(relative) if not skipped & set(path.parts))


def open_corpus(paths: Sequence[Path]) -> Corpus:
    """Measures and hashes the files, in the order given."""
    digest = hashlib.sha256()
    ends: list[int] = []
    end = 0
    for path in paths:
        for chunk in _chunks(path):
            digest.update(chunk)
            end += len(chunk)
        ends.append(end)
    return Corpus(paths=tuple(paths), ends=tuple(ends), sha256=digest.hexdigest())


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; fix the file or take it out of data.files"
        ) from None


def open_text(run: RunConfig) -> Corpus:
    """The text of a run. Raises `ConfigError`: a pattern that matches no file, not enough text for one sequence."""
    paths: list[Path] = []
    for index, pattern in enumerate(run.data.files):
        try:
            found = _match(pattern)
        except (ValueError, OSError) as error:
            where = f"data.files[{index}]"
            run.fail(where, f"'{where}': {shown(pattern)} is not a path or a glob: {error}")
        if not found:
            run.fail(f"data.files[{index}]", f"'data.files[{index}]': no file matches {pattern!r}; check the path")
        paths += found
    corpus = open_corpus(paths or standard_library())
    if corpus.num_bytes < run.data.sequence_length:
        run.fail(
            "data.files",
            f"'data.files': the text has {corpus.num_bytes} bytes, less than one sequence of "
            f"{run.data.sequence_length}; add files or lower 'data.sequence_length'",
        )
    return corpus


def _match(pattern: str) -> list[Path]:
    """The files that a path or a glob names, sorted. Raises `ValueError` or `OSError` for one that cannot be."""
    path = Path(os.path.expanduser(pattern))  # noqa: PTH111 -- Path.expanduser raises for `~nobody`
    if path.is_file():
        return [path]
    root = Path(path.anchor or ".")
    parts = path.relative_to(path.anchor) if path.anchor else path
    return sorted(found for found in root.glob(str(parts)) if found.is_file()) if str(parts) != "." else []


class Sampler:
    """Deals sequences out to the ranks; the only thing that changes is `position`.

    A micro-batch of the whole job is `batch_size * num_ranks` consecutive places of the shuffled order, of which this
    rank takes its own `batch_size`: ranks never share a sequence within an epoch. After the last sequence a new epoch
    begins in a new order, without dropping the remainder.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        assert 0 <= rank < num_ranks
        self.num_sequences = corpus.num_bytes // sequence_length
        if self.num_sequences == 0:
            raise ConfigError(
                f"data: the text has {corpus.num_bytes} bytes, shorter than one sequence of {sequence_length}; "
                "add files to data.files or lower data.sequence_length"
            )
        self.position = 0
        self._corpus = corpus
        self._sequence_length = sequence_length
        self._batch_size = batch_size
        self._seed = seed
        self._rank = rank
        self._num_ranks = num_ranks

    def next_indices(self) -> list[int]:
        """Which sequences this rank takes next; moves on by one micro-batch of all ranks."""
        first = self.position + self._rank * self._batch_size
        self.position += self._batch_size * self._num_ranks
        return [self._sequence_at(place) for place in range(first, first + self._batch_size)]

    def next_batch(self) -> torch.Tensor:
        """The next micro-batch of this rank: int64 (B, T), values 0..255."""
        length = self._sequence_length
        rows = [self._corpus.read(index * length, length) for index in self.next_indices()]
        return torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows]).long()

    def state(self) -> dict[str, int | str]:
        """What a checkpoint must hold to go on from here; the same on every rank."""
        return {
            "position": self.position,
            "seed": self._seed,
            "sequence_length": self._sequence_length,
            "text_sha256": self._corpus.sha256,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Goes back to a saved place; the text, the seed and the sequence length must be what they were."""
        for key, now in self.state().items():
            if key != "position" and state.get(key) != now:
                raise ConfigError(
                    f"data: the checkpoint was made with {key} {state.get(key)!r}, this run has {now!r}; "
                    "give it the same data, or start a new run with another train.output_dir"
                )
        position = state["position"]
        assert isinstance(position, int)
        self.position = position

    def _sequence_at(self, place: int) -> int:
        epoch, index = divmod(place, self.num_sequences)
        return permute(index, self.num_sequences, key=mix(self._seed, epoch))


def mix(*values: int) -> int:
    """Stirs integers into one of 64 bits (the finalizer of splitmix64)."""
    stirred = 0
    for value in values:
        stirred = (stirred + value + 0x9E3779B97F4A7C15) & _MASK_64
        stirred = ((stirred ^ (stirred >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        stirred = ((stirred ^ (stirred >> 27)) * 0x94D049BB133111EB) & _MASK_64
        stirred ^= stirred >> 31
    return stirred


def permute(index: int, size: int, *, key: int) -> int:
    """Where `index` goes in the shuffle of range(size) that belongs to `key`.

    A Feistel network on the smallest even number of bits that holds `size`, walked until it lands inside: a bijection
    without a table, at most four steps of the walk on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for round_number in range(_NUM_ROUNDS):
            left, right = right, left ^ (mix(key, round_number, right) & half_mask)
        index = (left << half_bits) | right
        if index < size:
            return index
