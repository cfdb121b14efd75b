"""What a training run leaves behind, as bytes: to be compared with what another one left.

`Trace` is written in the order of events, so that of a run that ended early the part before its end can be compared.
Values are digests: a trace of a long run is small.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_OF_LOWTIDE = frozenset({"forward", "_loss_function"})


def digest(value: Any) -> str:
    """A short text that two values share only if they are the same to the bit."""
    made = hashlib.blake2b(digest_size=12)
    _feed(made, value, 0)
    return made.hexdigest()


def _feed(made: Any, value: Any, depth: int) -> None:
    made.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        made.update(f"{value.dtype} {tuple(value.shape)} {value.requires_grad}".encode())
        made.update(tensor_bytes(value))
    elif isinstance(value, torch.Generator):
        made.update(tensor_bytes(value.get_state()))
    elif isinstance(value, np.random.Generator):
        made.update(repr(value.bit_generator.state).encode())
    elif isinstance(value, np.ndarray):
        made.update(value.tobytes())
    elif isinstance(value, random.Random):
        made.update(repr(value.getstate()).encode())
    elif isinstance(value, nn.Module) or callable(value) or depth > 8:
        pass  # modules are visited by themselves, functions have no state
    elif isinstance(value, Mapping):
        for key in value:
            _feed(made, key, depth + 1)
            _feed(made, value[key], depth + 1)
    elif isinstance(value, (list, tuple, collections.deque)):
        for item in value:
            _feed(made, item, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _feed(made, vars(value), depth + 1)
    elif isinstance(value, (set, frozenset)):
        made.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, contextvars.ContextVar):
        _feed(made, value.get(None), depth + 1)
    elif " at 0x" not in repr(value):
        made.update(repr(value).encode())
    elif hasattr(value, "__dict__"):
        _feed(made, vars(value), depth + 1)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor of any layout."""
    if isinstance(tensor, FakeTensor):
        return b"fake"  # which nobody's own tensors are
    plain = tensor.detach()
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    plain = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


@dataclass
class Trace:
    """Names and digests of what was seen, in order."""

    seen: dict[str, str] = field(default_factory=dict)
    sees_gradients: bool = True

    def note(self, name: str, value: Any) -> None:
        """Write down one value; a name that comes again gets a number."""
        key, count = name, 1
        while key in self.seen:
            count += 1
            key = f"{name} ({count})"
        self.seen[key] = digest(value)

    def note_model(self, when: str, model: nn.Module) -> None:
        """Gradients, buffers, attributes of modules and parameters, modes."""
        for name, parameter in model.named_parameters():
            if self.sees_gradients:
                self.note(f"{when} gradient {name}", parameter.grad)
            self.note(f"{when} attributes of {name}", {**vars(parameter)})
        for name, buffer in model.named_buffers():
            self.note(f"{when} buffer {name}", buffer)
        for name, module in model.named_modules():
            own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH | _OF_LOWTIDE}
            self.note(f"{when} attributes of {name or 'model'}", own)

    def note_weights(self, when: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Parameters and the optimizer's state, by position. The state first: to read it has done what was put off."""
        state = optimizer.state
        numbered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.note(f"{when} optimizer", [dict(state[parameter]) if parameter in state else {} for parameter in numbered])
        for name, parameter in model.named_parameters():
            self.note(f"{when} weight {name}", parameter)
        self.note(f"{when} optimizer settings", [{**group, "params": None} for group in optimizer.param_groups])

    def note_random(self, when: str) -> None:
        """The global random states."""
        self.note(f"{when} random torch", torch.get_rng_state())
        self.note(f"{when} random python", repr(random.getstate()))
        self.note(f"{when} random numpy", np.random.get_state())

    def differences(self, truth: Trace, *, is_part: bool = False, is_truth_part: bool = False) -> list[str]:
        """Names of what is not as in `truth`; `is_part`: this run ended early, so what it has not is left out."""
        other = [name for name, value in self.seen.items() if truth.seen.get(name, value) != value]
        if not is_truth_part:
            other += [name for name in self.seen if name not in truth.seen]
        return other if is_part else other + [name for name in truth.seen if name not in self.seen]


def process_state() -> dict[str, Any]:
    """What is the whole process's, and must be as it was after every run."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "attention": (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()),
        "saved-tensor hooks": None if hooks is None else repr(hooks),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "multithreaded backward": torch.autograd.is_multithreading_enabled(),
    }
