"""Files go to torch's loader and come back from torch's writer; a cell that is no action is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.pipeline.clock import with_transfers
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import from_csv, to_csv
from lowtide.pipeline.verify import verify
from tests.pipeline.torch_oracle import loaded


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev"])
def test_torch_loads_what_we_write_and_we_read_what_torch_writes(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, num_ranks=4, num_micro_batches=8)
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(schedule), encoding="utf-8", newline="")
    runtime = loaded(path, schedule)
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.rank_of_stage))

    for form in ("compute_only", "compute_comms"):
        runtime._dump_csv(str(path), format=form)
        with path.open(newline="", encoding="utf-8") as file:
            back = from_csv(file.read(), source=str(path), name=name)
        verify(back)
        if form == "compute_only":
            assert back == schedule
    assert back.has_transfers


def test_transfers_come_back(tmp_path: Path) -> None:
    schedule = with_transfers(make_schedule("dualpipev", num_ranks=3, num_micro_batches=6))
    assert from_csv(to_csv(schedule), source="text", name="dualpipev") == schedule


def test_torch_s_empty_cells_and_those_of_fsdp_are_left_out() -> None:
    schedule = from_csv("0UNSHARD,0F0, ,0B0,0REDUCE_GRAD,0RESHARD\r\n", source="text", name="mine")
    assert to_csv(schedule) == "0F0,0B0\r\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "0F0,0B0\n1F0,1X0",
            "s.csv: line 2, cell 2: '1X0' is no action; one reads [stage][kind][micro-batch] with a kind of F, B, I, "
            "W, SEND_F, RECV_F, SEND_B, RECV_B, or (0F7;7B3)OVERLAP_F_B",
        ),
        (
            "(0F0;0B)OVERLAP_F_B",
            "s.csv: line 1, cell 1: '0B' is no action; one reads [stage][kind][micro-batch] with a kind of F, B, I, "
            "W, SEND_F, RECV_F, SEND_B, RECV_B, or (0F7;7B3)OVERLAP_F_B",
        ),
        ("0F0,0B0\n2F0,2B0", "s.csv: no rank has a forward of stage 1"),
        ("", "s.csv: no rank has a forward of stage 0"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_csv(text, source="s.csv", name="mine")
    assert str(caught.value) == words
