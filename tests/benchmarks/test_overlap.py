"""Question f, with durations so short that only its arithmetic is looked at."""

from __future__ import annotations

import pytest

from benchmarks import overlap
from benchmarks.tables import text_table

ARGS = {"layers": 1, "micro_batches": 3, "segment": 0.001, "rounds": 1}


def test_a_row_says_what_was_measured_beside_what_was_predicted() -> None:
    rounds = overlap.on_rank(0, 1, 0.5, ARGS)
    assert rounds.keys() == {(s, m) for s in overlap.SETTINGS for m in ("without", "serial", "overlapped")}
    for setting in overlap.SETTINGS:
        row = overlap.row_of(setting, rounds, 0.5, ARGS)
        without, serial, overlapped = (row[f"{mode}_seconds"] for mode in ("without", "serial", "overlapped"))
        assert row["hidden_share_median"] == pytest.approx(1 - (overlapped - without) / (serial - without))
        assert row["off_by_points"] == pytest.approx(100 * (row["hidden_share_median"] - row["predicted_hidden_share"]))
        # Of 3 micro-batches the first forward and the last backward have no partner.
        assert row["ceiling_share"] == pytest.approx(2 / 3)
        assert 0 < row["predicted_hidden_share"] < 1
        assert (row["copied_bytes"] > 0) == (row["recomputed_bytes"] > 0) == (setting != "plain")
        assert text_table([{"setting": setting, **row}])
