"""Counts by hand. Those of whole schedules stand beside their formulas in test_clock.py."""

from __future__ import annotations

import pytest

from lowtide.pipeline.generators import GENERATORS, make_schedule
from lowtide.pipeline.live_chunks import is_in_order
from lowtide.pipeline.schedule import Schedule, from_csv
from tests.support.receives import peak_receives
from tests.support.row_counts import paired_share, peak_live_chunks


def written(*rows: str) -> Schedule:
    return from_csv("\n".join(",".join(row.split()) for row in rows), source="text", name="mine")


def test_a_chunk_lives_until_its_full_backward_or_its_weight_gradient() -> None:
    assert peak_live_chunks(written("0F0 0B0 0F1 0B1")) == (1,)
    assert peak_live_chunks(written("0F0 0I0 0F1 0W0 0B1")) == (2,)


def test_in_a_pair_both_chunks_live() -> None:
    assert peak_live_chunks(written("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == (2,)


def test_half_of_two_micro_batches_is_paired() -> None:
    assert paired_share(written("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == (0.5,)
    assert paired_share(written("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")) == (0.0, 0.5)


def test_a_receive_waits_until_the_action_that_reads_it() -> None:
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    late = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    early = "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    assert peak_receives(written(first, late)) == (1, 1)
    assert peak_receives(written(first, early)) == (1, 2)


def test_weight_gradients_out_of_order_are_noticed() -> None:
    assert is_in_order(written("0F0 0F1 0I0 0I1 0W0 0W1"))
    assert not is_in_order(written("0F0 0F1 0I0 0B1 0W0"))
    assert not is_in_order(written("0F0 0F1 0B1 0B0"))


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_adds_up_in_order(name: str) -> None:
    for num_ranks in (1, 2, 3, 4, 8) if name != "one_stage_overlap" else (1,):
        for factor in (2, 3):
            assert is_in_order(make_schedule(name, num_ranks=num_ranks, num_micro_batches=factor * num_ranks))
