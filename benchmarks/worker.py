"""One variant in a process of its own: builds the subject, checks it against plain, measures its peak, times its steps.

What: `start(arguments)` is what children.py calls; it returns the orders that the process answers:

- `ready`: one plain step for reference, the method put in force, its warm-up, a check of loss and gradients against the
  reference, and one step whose peak is measured;
- `step`: one timed step with the method's own counters;
- `finish`: whether loss and gradients of the last of those steps are still plain's.

The peak on an accelerator is the allocator's own, of every step. On a CPU it is an audit of every live byte
(`lowtide.tensors.live_bytes.LiveBytes`) in a step of its own before the clock runs; for compiled code, whose buffers no
dispatch mode sees, the events of the allocator. Resident memory is the kernel's high-water mark over each timed step.
Cost: a plain step, an audited step and the hashes of the gradients more than the steps that are timed.
Not covered: what other processes hold; `driver_bytes` is the whole device.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import methods, subjects
from benchmarks.peaks import peak_bytes
from benchmarks.subjects import Subject


def start(arguments: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Orders of one variant. `arguments`: model, shape, method, setting, device, dtype, threads, budget_bytes,
    wants_profile (of what plain autograd saves)."""
    worker = Worker(arguments)
    return {"ready": worker.ready, "step": worker.step, "finish": worker.finish}


class Worker:
    """See the module."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._method = methods.METHODS[arguments["method"]]
        self._version = methods.version_of(self._method)  # before anything is built: it may be missing
        set_up_process(arguments)
        self.subject = subjects.build(
            arguments["model"], arguments["shape"], device=arguments["device"], dtype=arguments["dtype"]
        )
        self._is_cpu = self.subject.device.type == "cpu"

    def ready(self) -> dict[str, Any]:
        subject, arguments = self.subject, self._arguments
        answer: dict[str, Any] = {"package": self._version}
        reference = None
        if arguments.get("has_reference", True):
            with contextlib.suppress(_out_of_memory()):
                subject.step()  # the first step of a process may have other bits than all later ones (docs/contract.md)
                reference = take_gradients(subject, subject.step())
        release_memory()
        if arguments.get("wants_profile"):
            answer |= self._profile()
        started = time.perf_counter()
        self.running = self._method.prepare(subject, arguments.get("setting"), arguments.get("budget_bytes"))
        for _ in range(self.running.warm_up_steps):
            loss = subject.step()
        subject.synchronize()
        answer["prepare_seconds"] = time.perf_counter() - started
        answer |= compare(reference, take_gradients(subject, loss))
        self._reference_digest = digest(*reference) if reference is not None else None
        del reference
        answer["peak_bytes"] = peak_bytes(subject, self.running)
        self._copied_bytes: int | None = None
        # Compiled code would be compiled anew under a dispatch mode, and has no copies to count.
        if not self._is_cpu and "copied_bytes" not in self.running.counters() and not self.running.allocates_outside:
            self._copied_bytes = counted_copies(subject)
        return {**answer, **self.running.facts()}

    def _profile(self) -> dict[str, Any]:
        import lowtide

        profile = lowtide.observe(self.subject.model, self.subject.batch)
        return {"saved_bytes": profile.saved_bytes}

    def step(self) -> dict[str, Any]:
        import torch

        subject, running = self.subject, self.running
        running.reset()
        if not self._is_cpu:
            torch.accelerator.reset_peak_memory_stats(subject.device)
        reset_resident_peak()
        subject.synchronize()
        started, cpu_started = time.perf_counter(), time.process_time()
        loss = subject.step()
        subject.synchronize()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds}
        answer |= {"peak_resident_bytes": resident_peak_bytes(), "copied_bytes": self._copied_bytes}
        answer |= {**running.counters(), "loss": loss.item()}
        self._loss = loss
        if not self._is_cpu:
            answer |= device_memory(subject)
        return answer

    def finish(self) -> dict[str, Any]:
        if self._reference_digest is None:
            return {"is_equal": None}
        answer = {"is_equal": digest(*take_gradients(self.subject, self._loss)) == self._reference_digest}
        self.running.close()
        return answer


def set_up_process(arguments: Mapping[str, Any]) -> None:
    """Threads, and the C library's heap as lowtide sets it, for every method alike."""
    import torch

    torch.set_num_threads(arguments["threads"])
    if arguments["device"] == "cpu":
        from lowtide.engines.tiers.host_buffers import configure_malloc

        configure_malloc()


def _out_of_memory() -> type[BaseException]:
    import torch

    return torch.OutOfMemoryError


# -- the same gradients? -----------------------------------------------------------------------------------------------


def take_gradients(subject: Subject, loss: Any) -> tuple[Any, list[Any]]:
    """Loss and copies of all gradients in host memory."""
    return loss.cpu().clone(), [parameter.grad.cpu().clone() for parameter in subject.model.parameters()]


def compare(reference: tuple[Any, list[Any]] | None, found: tuple[Any, list[Any]]) -> dict[str, Any]:
    """`is_equal` to the bit, and `difference`: the largest relative norm of one parameter's change, 0 where equal."""
    import torch

    if reference is None:
        return {"is_equal": None, "difference": None}
    if digest(*reference) == digest(*found):
        return {"is_equal": True, "difference": 0.0}
    worst = 0.0
    for plain, ours in zip([reference[0], *reference[1]], [found[0], *found[1]], strict=True):
        size = torch.linalg.vector_norm(plain.double())
        change = torch.linalg.vector_norm(plain.double() - ours.double())
        worst = max(worst, (change / size).item() if size > 0 else float(change > 0))
    return {"is_equal": False, "difference": worst}


def digest(loss: Any, gradients: list[Any]) -> str:
    """A hash of the bits of the loss and of all gradients."""
    import torch

    found = hashlib.sha256()
    for tensor in (loss, *gradients):
        found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# -- memory ------------------------------------------------------------------------------------------------------------


def device_memory(subject: Subject) -> dict[str, Any]:
    """An accelerator after a step: the allocator's peak, what it reserves, the driver's view, pinned bytes."""
    import torch

    module = torch.get_device_module(subject.device)
    free_bytes, total_bytes = module.mem_get_info()
    answer = {
        "peak_bytes": int(torch.accelerator.max_memory_allocated(subject.device)),
        "reserved_bytes": int(torch.accelerator.max_memory_reserved(subject.device)),
        "driver_bytes": total_bytes - free_bytes,
    }
    if hasattr(module, "host_memory_stats"):
        answer["torch_pinned_bytes"] = module.host_memory_stats().get("allocated_bytes.peak")
    return answer


def counted_copies(subject: Subject) -> int:
    """Bytes that operators of one step copy between devices."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        copied_bytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            out = func(*args, **(kwargs or {}))
            source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
            if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
                self.copied_bytes += (
                    out.nbytes if isinstance(source, torch.Tensor) and source.device != out.device else 0
                )
            return out

    with Copies() as copies:
        subject.step()
    return copies.copied_bytes


def reset_resident_peak() -> None:
    """Let the kernel start a new high-water mark of resident memory; nothing where it has none."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident_peak_bytes() -> int | None:
    """The kernel's high-water mark of resident memory since the last reset; None where there is none."""
    for line in _status_lines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _status_lines() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from Path("/proc/self/status").read_text().splitlines()


def release_memory() -> None:
    """Give back what the reference step left free, so that resident peaks are the method's own."""
    import gc

    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
