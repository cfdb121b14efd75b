"""The demo: the same training steps plain and under lowtide, in one table. `make demo` runs it.

What: a Llama on the bytes of the Python standard library, on the CPU, each run in a process of its own from the same
seed. Printed are the peak of resident memory as the kernel saw it, what became of the activations, the time of a step,
and whether every loss and every weight is the same to the bit.
Why resident memory: without an accelerator main memory plays the device and the next tier is the disk, so what the
kernel counts is what a run needs. Why processes: a peak belongs to a process, and memory once freed is reused.
Cost: about a minute on two cores, 3 GB of memory, 1 GB of disk. Nothing is downloaded and nothing is left behind.
Not covered: accelerators; long runs. A few steps give the memory exactly and the time roughly.

    python examples/demo.py                  the table on stdout, progress on stderr
    python examples/demo.py --json           JSON on stdout, progress and the table on stderr
Exit status: 0; 1 if a loss or a weight differs or a run fails; 2 wrong flags; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED = 0
MIB = 2**20
RUNS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "recompute": {"recompute": "all"},
    # Early layers have the most time to leave and to come back. Backward begins with the last layer: at that moment
    # a recompute would bring all of it back, so keeping it costs nothing at the peak.
    "mixed": {"swap": ["layers.0-3"], "recompute": ["layers.4-6"], "keep": ["layers.7"]},
    "swap": {"swap": "all"},
}
SIZES = {
    "demo": {"layers": 8, "hidden": 512, "heads": 8, "intermediate": 1408, "sequence": 512, "batch": 4},
    "tiny": {"layers": 8, "hidden": 64, "heads": 2, "intermediate": 128, "sequence": 64, "batch": 2, "min_bytes": 0},
}
# Huge pages and page-aligned storages. torch reads it once; lowtide.apply sets it by itself, but here the model is
# built before that, and the plain run must have the same.
CHILD_ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# -- one run, in a process of its own --------------------------------------------------------------------------------


def run_child(name: str, size: Mapping[str, int], num_steps: int) -> None:
    """Train `num_steps` steps; a JSON line per step on stdout, and one with the result at the end."""
    import torch

    import lowtide

    memory = _memory_of(name, size)
    model, optimizer, batches = _build(size)
    tide = lowtide.apply(model, memory, optimizer=optimizer) if memory is not None else None
    losses: list[float] = []
    step_seconds: list[float] = []
    rest_bytes = saved_bytes = 0
    stats = None
    meter = PeakMeter()
    for step in range(num_steps):
        if tide is not None:
            tide.reset_stats()
        start = time.perf_counter()
        # The first step warms up: it makes the optimizer state, and lowtide learns the model. Not timed.
        if step == 0 and tide is None:
            loss, saved_bytes = _counted_step(model, optimizer, next(batches))
        else:
            loss = _step(model, optimizer, next(batches))
        seconds = time.perf_counter() - start
        losses.append(loss)
        if step == 0:
            rest_bytes = _come_to_rest(tide)
            meter.restart()
        else:
            step_seconds.append(seconds)
        stats = tide.stats if tide is not None else None
        _say({"step": step + 1, "loss": loss, "seconds": seconds})
    result = {
        "peak_resident_bytes": meter.peak_bytes(),
        "peak_method": meter.method,
        "rest_resident_bytes": rest_bytes,
        "state_bytes": _state_bytes(model, optimizer),
        "saved_bytes": stats.saved_bytes if stats else saved_bytes,
        "kept_bytes": stats.kept_bytes if stats else saved_bytes,
        "swapped_bytes": stats.swapped_bytes if stats else 0,
        "recomputed_bytes": stats.recomputed_bytes if stats else 0,
        "stall_seconds": stats.stall_seconds if stats else 0.0,
        "step_seconds": step_seconds,
        "losses": [loss.hex() for loss in losses],
        "weights_sha256": _sha256(model),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if tide is not None:
        tide.remove()
    _say({"result": result})


def _memory_of(name: str, size: Mapping[str, int]) -> dict[str, Any] | None:
    rules = RUNS[name]
    if rules is None or "min_bytes" not in size:
        return rules
    return {**rules, "min_bytes": size["min_bytes"]}


def _build(size: Mapping[str, int]) -> tuple[Any, torch.optim.Optimizer, Iterator[torch.Tensor]]:
    """The model, its optimizer and its batches, all from one seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from lowtide.train.data import NUM_BYTE_TOKENS, Sampler, open_corpus, standard_library

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=NUM_BYTE_TOKENS,
        hidden_size=size["hidden"],
        intermediate_size=size["intermediate"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"],
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    corpus = open_corpus(standard_library())
    sampler = Sampler(corpus, sequence_length=size["sequence"], batch_size=size["batch"], seed=SEED)
    return model, optimizer, iter(sampler.next_batch, None)


def _step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """One optimizer step; the loss before it."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _counted_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> tuple[float, int]:
    """A step without lowtide, and the bytes of the storages that autograd saved beside the parameters."""
    import torch

    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach()), sum(saved.values())


def _come_to_rest(tide: Any) -> int:
    """Resident bytes between two steps: the program, the weights and the optimizer state, and no free heap."""
    from lowtide.train.progress import resident_bytes

    if tide is not None:
        tide.settle()
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()[0] or 0


def _state_bytes(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Parameters and optimizer state."""
    import torch

    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _sha256(model: Any) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().numpy())
    return digest.hexdigest()


class PeakMeter:
    """The highest resident memory since `restart`: the kernel's own mark, else samples, else that of the whole run."""

    def __init__(self) -> None:
        self.method = self._choose()
        self._peak_bytes = 0
        self._is_over = threading.Event()
        if self.method == "sampled":
            threading.Thread(target=self._sample, daemon=True).start()

    def restart(self) -> None:
        self._peak_bytes = 0
        if self.method == "kernel":
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_bytes(self) -> int:
        """Ends the measurement."""
        self._is_over.set()
        if self.method == "kernel":
            from lowtide.train.progress import resident_bytes

            return resident_bytes()[1] or 0
        if self.method == "sampled":
            return self._peak_bytes
        import resource

        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes

    def _choose(self) -> str:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            return "kernel"
        return "sampled" if importlib.util.find_spec("psutil") else "whole process"

    def _sample(self) -> None:
        import psutil

        process = psutil.Process()
        while not self._is_over.wait(0.002):
            self._peak_bytes = max(self._peak_bytes, process.memory_info().rss)


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


# -- the runs together -----------------------------------------------------------------------------------------------


class DemoError(Exception):
    """A run failed. One line."""


def run_all(size_name: str, num_steps: int) -> dict[str, Any]:
    """Every run, one after the other, with progress on stderr; everything measured, as JSON takes it."""
    start = time.perf_counter()
    runs: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        runs[name] = _run(name, size_name, num_steps)
        for key in ("num_parameters", "num_threads", "torch", "peak_method"):
            runs["plain"].setdefault(key, runs[name][key])
    plain = runs["plain"]
    return {
        "command": "python examples/demo.py --json",
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


def _run(name: str, size_name: str, num_steps: int) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), "--steps", str(num_steps), "--child", name]
    command += ["--tiny"] if size_name == "tiny" else []
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    _note(f"{name:<10} starting")
    result = None
    with _process(command, environment) as process:
        assert process.stdout is not None
        for text in process.stdout:
            line = json.loads(text)
            result = line.get("result", result)
            if "step" in line:
                _note(
                    f"{name:<10} step {line['step']}/{num_steps}  loss {line['loss']:.4f}  {line['seconds']:.1f} s"
                    + ("  (warm-up)" if line["step"] == 1 else "")
                )
    if process.returncode or result is None:
        raise DemoError(f"run '{name}' failed with status {process.returncode}; its own message is above")
    return result


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child that does not hear the terminal's Ctrl-C, and never outlives this block."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        with process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
    finally:
        process.wait()


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


def table(report: Mapping[str, Any]) -> str:
    """The measured table as plain text."""
    runs = report["runs"]
    differing = {line.split("'")[1] for line in differences(runs)}
    plain_seconds = statistics.median(runs["plain"]["step_seconds"])
    rows = [("", "peak MiB", "above rest", "kept", "swapped", "recomputed", "s/step", "x plain", "losses, weights")]
    for name, run in runs.items():
        seconds = statistics.median(run["step_seconds"])
        above_bytes = run["peak_resident_bytes"] - run["rest_resident_bytes"]
        sizes = (run["peak_resident_bytes"], above_bytes, *(run[f"{fate}_bytes"] for fate in _FATES))
        verdict = "-" if name == "plain" else "DIFFERENT" if name in differing else "identical"
        times = (f"{seconds:.2f}", f"{seconds / plain_seconds:.2f}")
        rows.append((name, *(f"{round(size / MIB)}" for size in sizes), *times, verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(_aligned(row, widths) for row in rows)


_FATES = ("kept", "swapped", "recomputed")


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
            "s/step        median",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the exit status."""
    parser = argparse.ArgumentParser(description="Train a small model plain and under lowtide, and compare.")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps of each run, at least 2 (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON on stdout; the table goes to stderr")
    parser.add_argument("--tiny", action="store_true", help="a very small model: for tests, says little about memory")
    parser.add_argument("--child", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step warms up")
    size_name = "tiny" if args.tiny else "demo"
    if args.child:
        run_child(args.child, SIZES[size_name], args.steps)
        return 0
    try:
        report = run_all(size_name, args.steps)
    except DemoError as error:
        _note(f"demo: {error}")
        return 1
    except KeyboardInterrupt:
        _note("demo: interrupted")
        return 130
    print(f"\n{table(report)}\n\n{legend(report)}", file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(report, indent=2))
    found = differences(report["runs"])
    for line in found:
        _note(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
