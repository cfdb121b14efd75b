"""The demo: the same training steps plain and under lowtide, in one table. `make demo` runs it.

What: a Llama on the bytes of the Python standard library, on the CPU, each run in a process of its own from the same
seed. The runs take their steps in turn, so that a slow minute of the machine is a slow minute of all. Printed are the
peak of resident memory as the kernel saw it, what became of the activations, the time of a step with its spread, and
whether every loss and every weight is the same to the bit. Times are divided by that of the fastest plain run.
Why resident memory: without an accelerator main memory plays the device and the next tier is the disk, so what the
kernel counts is what a run needs. Why processes: a peak belongs to a process, and memory once freed is reused.
Cost: two to three minutes on two cores, 6 GB of memory, 1 GB of disk. Nothing is downloaded, nothing is left behind.
Not covered: accelerators; long runs. A few steps give the memory exactly and the time roughly.

    python examples/demo.py                  the table on stdout, progress on stderr
    python examples/demo.py --json           JSON on stdout, progress and the table on stderr
Exit status: 0; 1 if a loss or a weight differs or a run fails; 2 wrong flags; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

SEED = 0
MIB = 2**20
_FATES = ("kept", "swapped", "recomputed")
RATIO = "x fastest plain"
WITH_THRESHOLDS = "plain, malloc"
"""lowtide also sets the C library's thresholds; this is plain training with the same ones."""
RUNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    WITH_THRESHOLDS: None,
    "recompute": {"recompute": "all"},
    # Early layers have the most time to leave and to come back. Backward begins with the last layer: at that moment
    # a recompute would bring all of it back, so keeping it costs nothing at the peak.
    "mixed": {"swap": ["layers.0-3"], "recompute": ["layers.4-6"], "keep": ["layers.7"]},
    "swap": {"swap": "all"},
    "swap, state": {"swap": "all", "optimizer": "swap"},
    "all elsewhere": {"swap": "all"},
}
WITH_WEIGHTS = "all elsewhere"
"""Beside activations: weights, gradients and the optimizer's state, which come for their layer's turn."""
SIZES = {
    "demo": {"layers": 8, "hidden": 512, "heads": 8, "intermediate": 1408, "sequence": 512, "batch": 3},
    "tiny": {"layers": 8, "hidden": 64, "heads": 2, "intermediate": 128, "sequence": 64, "batch": 2, "min_bytes": 0},
}
# Huge pages and page-aligned storages. torch reads it once; lowtide.apply sets it by itself, but here the model is
# built before that, and the plain run must have the same.
CHILD_ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# -- the runs together -----------------------------------------------------------------------------------------------


class DemoError(Exception):
    """A run failed. One line."""


def run_all(size_name: str, num_steps: int) -> dict[str, Any]:
    """Every run, a step of each in turn, with progress on stderr; everything measured, as JSON takes it."""
    start = time.perf_counter()
    with ExitStack() as stack:
        children = {name: stack.enter_context(_started(name, size_name, num_steps)) for name in RUNS}
        names = list(RUNS)
        for step in range(num_steps):
            first = step % len(names)  # nobody comes always after the same one
            for name in (*names[first:], *names[:first]):
                line = _answer(name, children[name], "step")
                seconds = f"{line['seconds']:.1f} s" if "seconds" in line else "warm-up, not measured"
                _note(f"{name:<13} step {line['step']}/{num_steps}  loss {line['loss']:.4f}  {seconds}")
        runs = {name: _answer(name, child, "")["result"] for name, child in children.items()}
    plain = runs["plain"]
    return {
        "command": f"python examples/demo.py --steps {num_steps} --json",
        "machine": {
            "cores": os.cpu_count(),
            "threads": plain["num_threads"],
            "system": platform.system(),
            "python": platform.python_version(),
            "torch": plain["torch"],
        },
        "size": SIZES[size_name],
        "num_parameters": plain["num_parameters"],
        "num_steps": num_steps,
        "peak_method": plain["peak_method"],
        "seconds": round(time.perf_counter() - start, 1),
        "memory": RUNS,
        "runs": runs,
    }


def _answer(name: str, child: subprocess.Popen[str], ask: str) -> dict[str, Any]:
    """The next line of a run, which takes a step for it if it is asked to."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(BrokenPipeError):
        if ask:
            child.stdin.write(f"{ask}\n")
            child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise DemoError(f"run '{name}' failed with status {child.wait()}; its own message is above")
    return json.loads(line)


@contextmanager
def _started(name: str, size_name: str, num_steps: int) -> Iterator[subprocess.Popen[str]]:
    """A run, from its start to its end: a child that does not hear the terminal's Ctrl-C, and never outlives this."""
    size = SIZES[size_name]
    settings = {"memory": _memory_of(name, size), "size": size, "num_steps": num_steps, "seed": SEED}
    settings["sets_malloc"] = name == WITH_THRESHOLDS
    settings["swaps_weights"] = name == WITH_WEIGHTS
    command = [sys.executable, str(Path(__file__).resolve().with_name("demo_run.py")), json.dumps(settings)]
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **CHILD_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    _note(f"{name:<13} starting")
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _memory_of(name: str, size: Mapping[str, int]) -> dict[str, Any] | None:
    rules = RUNS[name]
    return rules if rules is None or "min_bytes" not in size else {**rules, "min_bytes": size["min_bytes"]}


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- what it says ----------------------------------------------------------------------------------------------------


def differences(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is not the same to the bit as in the plain run, a line each."""
    plain = runs["plain"]
    found = []
    for name, run in runs.items():
        pairs = list(zip(plain["losses"], run["losses"], strict=True))
        step = next((index for index, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs), None)
        if step is not None:
            ours, theirs = (float.fromhex(loss) for loss in pairs[step - 1])
            found.append(f"demo: run '{name}': the loss of step {step} is {theirs!r}, in the plain run {ours!r}")
        elif run["weights_sha256"] != plain["weights_sha256"]:
            found.append(f"demo: run '{name}': the losses are the same, the weights at the end are not")
    return found


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The measured table: a header, then a row for each run."""
    runs = report["runs"]
    differing = {line.split("'")[1] for line in differences(runs)}
    found: list[tuple[str, ...]] = [
        ("run", "peak MiB", "above rest", "kept", "swapped", "recomputed", "s/step", "range", RATIO, "losses, weights")
    ]
    for name, run in runs.items():
        above_bytes = run["peak_resident_bytes"] - run["rest_resident_bytes"]
        sizes = (run["peak_resident_bytes"], above_bytes, *(run[f"{fate}_bytes"] for fate in _FATES))
        verdict = "-" if name == "plain" else "DIFFERENT" if name in differing else "identical"
        times = run["step_seconds"]
        spread = f"{min(times):.2f} - {max(times):.2f}"
        cells = (f"{statistics.median(times):.2f}", spread, f"{time_ratio(runs, name):.2f}", verdict)
        found.append((name, *(f"{round(size / MIB)}" for size in sizes), *cells))
    return found


def baseline(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The run that all are compared with: the fastest of those without lowtide."""
    plain = [name for name in ("plain", WITH_THRESHOLDS) if name in runs]
    return min(plain, key=lambda name: statistics.median(runs[name]["step_seconds"]))


def time_ratio(runs: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """The median step of a run over that of the fastest plain run."""
    return statistics.median(runs[name]["step_seconds"]) / statistics.median(runs[baseline(runs)]["step_seconds"])


def words(report: Mapping[str, Any]) -> list[str]:
    """What the table says, in sentences. Each is worked out from the cells of the table as they are printed."""
    header, *cells = rows(report)
    by_name = {row[0]: dict(zip(header, row, strict=True)) for row in cells}
    peaks = {name: int(row["peak MiB"]) for name, row in by_name.items()}
    times = {name: row[RATIO] for name, row in by_name.items()}
    base = baseline(report["runs"])
    plans = [name for name, rules in RUNS.items() if rules is not None and name in by_name]
    sentences = [
        f"{name} takes {times[name]} of its time, with a peak {_change(peaks[name], peaks[base])}." for name in plans
    ]
    sentences.insert(0, f"The fastest plain run is '{base}', with a peak of {peaks[base]} MiB. Compared with it:")
    lowest = [name for name in plans if peaks[name] == min(peaks[each] for each in plans)]
    fastest = [name for name in plans if float(times[name]) == min(float(times[each]) for each in plans)]
    sentences.append(f"Of the plans {_names(lowest)} the lowest peak, and {_names(fastest)} the shortest step.")
    differing = [name for name, row in by_name.items() if row[header[-1]] == "DIFFERENT"]
    if differing:
        sentences.append(f"NOT the same to the bit as plain: {', '.join(differing)}.")
    else:
        sentences.append("Every loss, and every weight at the end, is plain's to the bit.")
    return sentences


def _change(size: int, baseline: int) -> str:
    percent = round(100 * (size - baseline) / baseline)
    return "as high" if percent == 0 else f"{abs(percent)} % {'lower' if percent < 0 else 'higher'}"


def _names(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'has' if len(names) == 1 else 'have'}"


def table(report: Mapping[str, Any]) -> str:
    """The measured table as plain text."""
    found = rows(report)
    widths = [max(len(row[column]) for row in found) for column in range(len(found[0]))]
    return "\n".join(_aligned(row, widths) for row in found)


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    cells = [
        cell.ljust(width) if column in (0, last) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def legend(report: Mapping[str, Any]) -> str:
    """What the numbers of the table are."""
    size, plain = report["size"], report["runs"]["plain"]
    peak = {"kernel": "the kernel's high-water mark", "sampled": "sampled every 2 ms"}
    return "\n".join(
        [
            f"Llama, {report['num_parameters'] / 1e6:.1f} M parameters, {size['layers']} layers of {size['hidden']}, "
            f"{size['batch']} x {size['sequence']} tokens, fp32, AdamW; {report['machine']['threads']} threads; "
            f"{report['num_steps']} steps, the first one warms up",
            f"peak MiB      resident memory at its highest: {peak.get(report['peak_method'], 'since the start')}",
            "above rest    the peak above what is resident between steps (the program, weights and optimizer state of "
            f"{plain['state_bytes'] / MIB:.0f} MiB): activations, gradients, temporaries",
            "kept ...      MiB of activations of one step, by what became of them",
            "s/step, range the median of the measured steps, and the fastest and the slowest of them",
            f"{WITH_THRESHOLDS} plain with the C library's thresholds as lowtide sets them",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description="Train a small model plain and under lowtide, and compare.")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps of each run, at least 2 (default: 6)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout; the table goes to stderr")
    parser.add_argument("--tiny", action="store_true", help="a very small model: for tests, says little about memory")
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step warms up")
    size_name = "tiny" if args.tiny else "demo"
    try:
        report = run_all(size_name, args.steps)
    except DemoError as error:
        _note(f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        _note("demo: interrupted")
        return 130
    print(
        "\n" + "\n\n".join([table(report), legend(report), "\n".join(words(report))]),
        file=sys.stderr if args.json else sys.stdout,
    )
    if args.json:
        print(json.dumps(report, indent=2))
    found = differences(report["runs"])
    for line in found:
        _note(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
