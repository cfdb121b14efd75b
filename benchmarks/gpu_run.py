"""Everything that wants an accelerator, piece by piece: what `make gpu` runs.

    python -m benchmarks.gpu_run [--device cuda] [--only tests details ...] [--again] [--list]

First it says what it will do and how long that may take: what a piece took here before, or a bound where it has not run
yet. Then the GPU tests, and each question that a device can answer, in processes of their own; what they print is shown
as it comes. Questions write each row when they have it (benchmarks/rows.py) and go on where they were cut short; the
tests' verdicts are in `gpu_tests.txt`, and `gpu_run.jsonl` has a line for each piece that ended: both beside the rows.
A piece that succeeded in an earlier run with the same version of torch is not run again, unless `--again` or `--only`
says so. One that fails does not stop the others; an interruption does.

Cost: an import of torch more for each piece. Not covered: several devices (`--device cuda:1` takes another one).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, hardware

ROOT = Path(__file__).resolve().parents[1]
PIECES = {
    "tests": (10, "the tests marked `gpu`: bytes, order, budgets, optimizers, bits against plain"),
    "gpu": (5, "a first table: plain, layer checkpointing, `save_on_cpu`, and each fate"),
    "details": (5, "hooks, copies, allocators"),
    "predicted": (10, "predicted against measured: peak, step time, order"),
    "time_against_memory": (40, "what a step costs at less activation memory"),
    "idle": (15, "the cost where there is nothing to do"),
    "largest": (40, "the largest batch and sequence that fit"),
    "published_setting": (10, "the published setting of adaptive memory optimization, with a throttled link"),
    "optimizer": (10, "optimizer state elsewhere between steps"),
}
"""Name -> minutes that it may take (bounds by hand: not yet measured on a GPU), and what it asks."""
_INTERRUPTED = 130


class Log:
    """What has been run on this hardware: one line of JSON a piece."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.ended: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]

    def last(self, piece: str) -> Mapping[str, Any] | None:
        """How this piece ended when it last ran."""
        return next((entry for entry in reversed(self.ended) if entry["piece"] == piece), None)

    def is_done(self, piece: str, torch_version: str) -> bool:
        last = self.last(piece)
        return last is not None and last["status"] == 0 and last["torch"] == torch_version

    def add(self, entry: dict[str, Any]) -> None:
        self.ended.append(entry)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def command_of(piece: str, device: str, out: Path) -> list[str]:
    """The command of a piece, as a person would type it."""
    if piece == "tests":
        return [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    words = [sys.executable, "-m", f"benchmarks.{piece}", "--device", device]
    return words if piece == "gpu" else [*words, "--resume", "--out", str(out)]


def announcement(pieces: Sequence[str], log: Log, done: Sequence[str]) -> list[str]:
    """What will be run and how long it may take, a line a piece."""
    lines, total = [], 0.0
    for piece in pieces:
        minutes, what = PIECES[piece]
        last = log.last(piece)
        if piece in done:
            lines.append(f"  {piece:<20} done before     {what}")
            continue
        if last is not None and last["status"] == 0:
            seconds, how = last["seconds"], f"{_minutes(last['seconds'])}, as last time"
        else:
            seconds, how = 60.0 * minutes, f"at most {minutes} min"
        total += seconds
        lines.append(f"  {piece:<20} {how:<15} {what}")
    return [*lines, f"  together {_minutes(total)} or less"]


def run_piece(piece: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run one piece, show what it says as it comes, and keep the tests' words. Returns the exit status."""
    if piece != "tests":
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "gpu_tests.txt").open("w") as kept:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                print(line, end="", flush=True)
                kept.write(line)
                kept.flush()
        except KeyboardInterrupt:
            child.terminate()
            raise
        finally:
            status = child.wait()
    return status


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", help="default: the accelerator of this torch")
    options.add_argument("--only", nargs="+", choices=list(PIECES), metavar="PIECE", help=" ".join(PIECES))
    options.add_argument("--again", action="store_true", help="also what succeeded before")
    options.add_argument("--list", action="store_true", help="say what would be run, and stop")
    options.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where results/ is")
    args = options.parse_args(argv)
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = args.device or (None if accelerator is None else accelerator.type)
    if device is None:
        print("benchmarks.gpu_run: no accelerator on this machine; nothing was run", file=sys.stderr)
        return 1
    machine = hardware(device)
    folder = args.out / machine["folder"]
    log = Log(folder / "gpu_run.jsonl")
    pieces = args.only or list(PIECES)
    done = [] if args.again or args.only else [piece for piece in pieces if log.is_done(piece, torch.__version__)]
    print(f"On {machine['name']} ({device}), torch {torch.__version__}; results in {folder}:")
    print("\n".join(announcement(pieces, log, done)), flush=True)
    if args.list:
        return 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    failed = []
    for piece in pieces:
        if piece in done:
            continue
        print(f"== {piece}", flush=True)
        started = time.perf_counter()
        try:
            status = run_piece(piece, command_of(piece, device, args.out), folder, environment)
        except KeyboardInterrupt:
            status = _INTERRUPTED
        if status == _INTERRUPTED:
            print(f"interrupted in {piece}; run it again, and it goes on from there", file=sys.stderr)
            return _INTERRUPTED
        seconds = time.perf_counter() - started
        log.add({"piece": piece, "status": status, "seconds": round(seconds, 1), "torch": torch.__version__})
        print(f"== {piece}: {'done' if status == 0 else f'FAILED ({status})'} in {_minutes(seconds)}", flush=True)
        failed += [piece] if status else []
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
