"""`make gpu`: says what it will do, keeps what pieces say as they say it, and does not repeat what succeeded."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu_run import PIECES, ROOT, Log, announcement, command_of, run_piece


def ended(piece: str, status: int = 0, seconds: float = 42.0, torch: str = "2.13") -> dict:
    return {"piece": piece, "status": status, "seconds": seconds, "torch": torch}


def test_it_says_what_it_will_do_and_how_long(tmp_path: Path) -> None:
    log = Log(tmp_path / "somewhere" / "gpu_run.jsonl")
    log.add(ended("tests", seconds=42.0))
    log.add(ended("details", status=1))
    lines = announcement(["tests", "gpu", "details", "idle"], log, done=["idle"])
    assert [line.split("  ")[1] for line in lines[:4]] == ["tests", "gpu", "details", "idle"]
    assert "42 s, as last time" in lines[0]
    assert f"at most {PIECES['gpu'][0]} min" in lines[1]
    assert f"at most {PIECES['details'][0]} min" in lines[2]
    assert "done before" in lines[3]
    minutes = PIECES["gpu"][0] + PIECES["details"][0]
    assert lines[4] == f"  together {(42 + 60 * minutes) / 60:.0f} min or less"


def test_what_succeeded_is_not_run_again_unless_torch_is_another(tmp_path: Path) -> None:
    path = tmp_path / "gpu_run.jsonl"
    log = Log(path)
    log.add(ended("tests"))
    log.add(ended("idle"))
    log.add(ended("idle", status=1))
    with path.open("a") as file:
        file.write('{"piece": "largest", "sta')  # the machine was taken away
    again = Log(path)
    assert again.is_done("tests", "2.13")
    assert not again.is_done("tests", "2.14")
    assert not again.is_done("idle", "2.13"), "it failed when it last ran"
    assert not again.is_done("largest", "2.13")


def test_what_the_tests_say_is_kept_line_by_line(tmp_path: Path) -> None:
    kept = tmp_path / "gpu_tests.txt"
    child = (
        "import pathlib, sys, time\n"
        "print('one', flush=True)\n"
        f"path = pathlib.Path({str(kept)!r})\n"
        "for _ in range(3000):\n"
        "    if 'one' in path.read_text(): break\n"
        "    time.sleep(0.01)\n"
        "else: sys.exit(4)\n"
        "print('two', file=sys.stderr); sys.exit(3)"
    )
    assert run_piece("tests", [sys.executable, "-c", child], tmp_path, {}) == 3
    assert kept.read_text() == "one\ntwo\n"


def test_every_piece_is_a_command_that_there_is(tmp_path: Path) -> None:
    for piece in PIECES:
        command = command_of(piece, "cuda:1", tmp_path)
        if piece == "tests":
            assert command[1:5] == ["-m", "pytest", "-m", "gpu"]
        else:
            assert (ROOT / "benchmarks" / f"{piece}.py").is_file()
            assert command[3:5] == ["--device", "cuda:1"]
