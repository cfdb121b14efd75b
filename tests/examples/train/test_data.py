"""The text and its order: every sequence once an epoch, and which ones a micro-batch has follows from its number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.train.data import Sampler, read_files, standard_library


@pytest.fixture
def text(tmp_path: Path) -> bytes:
    """Three files, one of them empty, 1,000 bytes together."""
    whole = bytes(number % 251 for number in range(1000))
    for name, piece in {"a": whole[:123], "b": b"", "c": whole[123:]}.items():
        (tmp_path / name).write_bytes(piece)
    return read_files([tmp_path / "a", tmp_path / "b", tmp_path / "c"])


def sampler(text: bytes, **changes: int) -> Sampler:
    settings = {"sequence_length": 10, "batch_size": 3, "seed": 7, **changes}
    return Sampler(text=text, **settings)  # type: ignore[arg-type]


def test_the_text_is_that_of_all_files(text: bytes) -> None:
    assert text == bytes(number % 251 for number in range(1000))


def test_the_order_never_changes(text: bytes) -> None:
    """It is part of what a checkpoint means: a new release must not shuffle differently."""
    assert sampler(text, batch_size=8).indices(0) == [79, 13, 41, 11, 30, 53, 64, 63]


def test_epoch_takes_every_sequence_once_and_the_next_one_in_another_order(text: bytes) -> None:
    dealer = sampler(text, batch_size=5)
    first = [index for number in range(20) for index in dealer.indices(number)]
    second = [index for number in range(20, 40) for index in dealer.indices(number)]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


def test_ranks_share_nothing_and_together_take_what_one_rank_would(text: bytes) -> None:
    dealers = [sampler(text, rank=rank, num_ranks=4) for rank in range(4)]
    together = [index for number in range(8) for dealer in dealers for index in dealer.indices(number)]
    alone = sampler(text, batch_size=12)
    assert together == [index for number in range(8) for index in alone.indices(number)]
    assert len(set(together)) == 96


def test_batch_holds_the_bytes_of_its_sequences(text: bytes) -> None:
    indices = sampler(text).indices(5)
    batch = sampler(text).batch(5)
    assert (batch.shape, batch.dtype) == ((3, 10), torch.int64)
    assert [bytes(row.tolist()) for row in batch] == [text[index * 10 : index * 10 + 10] for index in indices]


def test_a_micro_batch_that_begins_in_one_epoch_ends_in_the_next(text: bytes) -> None:
    """Also out of turn, as after a resume."""
    dealer = sampler(text)
    numbered = {number: dealer.indices(number) for number in (70, 33, 0, 34)}
    in_turn = [dealer.indices(number) for number in range(71)]
    assert all(in_turn[number] == indices for number, indices in numbered.items())
    assert sorted(index for indices in in_turn[:34] for index in indices)[:100] != list(range(100))
    assert sorted([*(index for indices in in_turn[:33] for index in indices), in_turn[33][0]]) == list(range(100))


def test_standard_library_is_text_without_tests() -> None:
    paths = standard_library()
    names = [path.name for path in paths]
    assert "argparse.py" in names
    assert len(paths) > 300
    assert not any("test" in path.parts or "site-packages" in path.parts for path in paths)
    assert paths == standard_library()
