"""One run of the demo, measured: `demo.py` starts this file in a process of its own for each run.

What: trains as the settings say (JSON, the only argument), a step for each line that it reads, and prints a JSON line
per step and one with the result.
Why the first step is not measured: it makes the optimizer state, and lowtide learns the model in it.
Not covered: anything but the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.util
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from examples.train.data import Sampler, read_files, standard_library
from examples.train.progress import resident_bytes
from lowtide.config.run import NUM_BYTE_TOKENS
from lowtide.engines.tiers.host_buffers import configure_malloc


def run(settings: Mapping[str, Any]) -> None:
    """Train; `settings`: `memory` (None: without lowtide), `size`, `num_steps`, `seed`, `sets_malloc`,
    `swaps_weights`."""
    model, optimizer, batches = _build(settings["size"], settings["seed"])
    if settings["sets_malloc"]:
        configure_malloc()  # where lowtide.apply does it in the other runs
    memory, weights = settings["memory"], None
    if settings["swaps_weights"]:
        size = {key: value for key, value in settings["size"].items() if key == "min_bytes"}
        weights = lowtide.swap_weights(model, optimizer, update="in_backward", tier="disk", **size)
    tide = lowtide.apply(model, memory, optimizer=optimizer) if memory is not None else None
    meter = PeakMeter()
    saved: dict[int, int] = {}
    _wait_for_turn()
    warm_up_loss = _step(model, optimizer, next(batches), _counting(saved) if tide is None else None)
    _say({"step": 1, "loss": warm_up_loss})
    rest_bytes = _come_to_rest(tide)
    meter.restart()
    losses, step_seconds = [warm_up_loss], []
    for step in range(2, settings["num_steps"] + 1):
        if tide is not None:
            tide.reset_stats()
        _wait_for_turn()
        start = time.perf_counter()
        losses.append(_step(model, optimizer, next(batches)))
        step_seconds.append(time.perf_counter() - start)
        _say({"step": step, "loss": losses[-1], "seconds": step_seconds[-1]})
    result = {
        "peak_resident_bytes": meter.peak_bytes(),
        "peak_method": meter.method,
        "rest_resident_bytes": rest_bytes,
        "state_bytes": _state_bytes(model, optimizer),
        "step_seconds": step_seconds,
        "losses": [loss.hex() for loss in losses],
        "weights_sha256": _sha256(model),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    _say({"result": result | (_plain_fates(model, saved) if tide is None else _fates(tide))})
    if tide is not None:
        tide.remove()
    if weights is not None:
        weights.remove()


def _fates(tide: lowtide.Tide) -> dict[str, float]:
    """Of the last step."""
    names = ("saved_bytes", "kept_bytes", "swapped_bytes", "recomputed_bytes", "stall_seconds")
    return {name: getattr(tide.stats, name) for name in names}


def _plain_fates(model: Any, saved: dict[int, int]) -> dict[str, float]:
    """What autograd saved beside the parameters; all of it was kept."""
    for parameter in model.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    saved_bytes = sum(saved.values())
    none = dict.fromkeys(("swapped_bytes", "recomputed_bytes", "stall_seconds"), 0)
    return {"saved_bytes": saved_bytes, "kept_bytes": saved_bytes, **none}


def _build(size: Mapping[str, int], seed: int) -> tuple[Any, torch.optim.Optimizer, Iterator[torch.Tensor]]:
    """The model, its optimizer and its batches, all from one seed."""
    torch.manual_seed(seed)
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
    sampler = Sampler(
        text=read_files(standard_library()), sequence_length=size["sequence"], batch_size=size["batch"], seed=seed
    )
    return model, optimizer, map(sampler.batch, itertools.count())


def _step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    context: AbstractContextManager[Any] | None = None,
) -> float:
    """One optimizer step, its forward inside `context`; the loss before it."""
    with context or nullcontext():
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _counting(saved: dict[int, int]) -> AbstractContextManager[Any]:
    """Puts into `saved` the bytes of every storage that autograd saves, each once; parameters too."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _come_to_rest(tide: Any) -> int:
    """Resident bytes between two steps: the program, the weights and the optimizer state, and no free heap."""
    if tide is not None:
        tide.settle()
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()[0] or 0


def _state_bytes(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Parameters and optimizer state."""
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


def _wait_for_turn() -> None:
    """The runs take their steps in turn."""
    if not sys.stdin.readline():
        sys.exit("the demo has ended")


def _say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
