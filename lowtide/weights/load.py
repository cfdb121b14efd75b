"""Weights that are not on the device yet: in a folder of safetensors, or in main memory.

What: `Incoming` gives each parameter and buffer of a model its bytes on the device, one after the other. Until then a
parameter shows one NaN in its shape. `load` takes all of them; `swap_weights(folder=...)` sends each to its tier before
the next one comes. So neither device nor host ever holds a model twice, and the device never holds all of one that does
not fit.
Why the parameters stay the objects that they are: an optimizer that was made before goes on working. A parameter on
another device cannot be given memory by `.data`; `torch.utils.swap_tensors` exchanges what the two objects are.

Checked before anything is touched: every parameter, and every buffer that has no memory yet, has a tensor of its shape
in the folder under one of its names, the same under all of them. Types may differ (values are cast as `load_state_dict`
does), but for those of quantized checkpoints.
Cost: the header of a file is read again for each tensor (0.1 ms for a small one), so that no file stays mapped.
Not covered: checkpoints whose names are not those of the model; hooks that hang on parameters before their bytes come.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.core.log import LOG
from lowtide.core.text_table import some_quoted
from lowtide.errors import ConfigError
from lowtide.tensors.view import Shape, nan_in_place_of, same_bytes
from lowtide.units import format_bytes

_INDEX = "model.safetensors.index.json"
_SECONDS_BETWEEN_LINES = 5.0
_FLOATS = ("F64", "F32", "F16", "BF16")


def load(model: nn.Module, folder: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> None:
    """Give a model that was built on 'meta' the weights in the safetensors files of `folder`, one after the other, on
    `device`. Parameters stay the objects that they are. For a model that does not fit there: `swap_weights(folder=)`.

    Raises `ConfigError` for a tensor that is missing or has another shape, a buffer without memory, and a model that
    has memory already; nothing is touched then.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"lowtide.load: model= takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"lowtide.load: folder= takes the path of a folder, not {folder!r}")
    incoming = Incoming("lowtide.load", model, folder, device)
    try:
        incoming.promise()
        incoming.take_rest()
    finally:
        incoming.give_back()


class Incoming:
    """See the module's text. `folder`: None for weights that are in main memory. `call`: for messages.

    Raises ConfigError where something is missing or does not fit; the model is as it was then."""

    def __init__(self, call: str, model: nn.Module, folder: Any, device: Any) -> None:
        self.call = call
        self.device = _device(call, device)
        self._names = _names_of(model)
        self._folder = None if folder is None else Path(os.fspath(folder))
        wanted = {"meta"} if folder is not None else {"cpu"}
        found = {parameter.device.type for parameter in model.parameters()}
        if found != wanted:
            where = " and ".join(sorted(found)) or "no device: it has none"
            way = (
                "folder= fills a model that was built on 'meta'" if folder is not None else "device= takes one on 'cpu'"
            )
            raise ConfigError(f"{call}: {type(model).__name__} has parameters on {where}; {way}")
        self._place_of = {} if self._folder is None else _tensors_in(call, self._folder)
        self._left = [t for t in self._names if isinstance(t, nn.Parameter) or t.is_meta or t.device != self.device]
        """Parameters, then buffers, whose bytes are not on the device."""
        self._before: dict[torch.Tensor, torch.Tensor] = {}
        """What was in the place of each parameter that shows NaN now."""
        self._check()
        self._said = time.monotonic()

    def promise(self) -> None:
        """All parameters are on the device from now on, and show NaN."""
        for tensor in self._left:
            if isinstance(tensor, nn.Parameter):
                self._before[tensor] = _exchange(tensor, nan_in_place_of(Shape.of(tensor), self.device))

    def take(self, tensor: torch.Tensor) -> None:
        """Give a parameter or buffer its bytes on the device."""
        own = self._before.pop(tensor, tensor)
        value = own.detach() if not own.is_meta else self._read(self._names_in_folder(tensor)[0])
        with torch.no_grad():
            memory = torch.empty_strided(own.size(), own.stride(), dtype=own.dtype, device=self.device).copy_(value)
        _exchange(tensor, memory)
        self._left = [other for other in self._left if other is not tensor]
        if time.monotonic() - self._said > _SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            LOG.info("%s: %s to go", self.call, format_bytes(sum(other.nbytes for other in self._left)))

    def take_rest(self) -> None:
        """Take all that is left, buffers too."""
        for tensor in list(self._left):
            self.take(tensor)

    def give_back(self) -> None:
        """Leave parameters that were not taken as they were. Idempotent."""
        for tensor, before in self._before.items():
            _exchange(tensor, before)
        self._before.clear()

    # -- the folder ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._folder is None:
            return
        missing = [tensor for tensor in self._left if tensor.is_meta and not self._names_in_folder(tensor)]
        buffers = [self._names[tensor][0] for tensor in missing if not isinstance(tensor, nn.Parameter)]
        if buffers:
            raise ConfigError(
                f"{self.call}: buffer {some_quoted(buffers)} is on 'meta' and not in {self._folder}; build the model "
                "so that buffers have memory (accelerate.init_empty_weights does)"
            )
        if missing:
            lost = some_quoted(self._names[tensor][0] for tensor in missing)
            raise ConfigError(
                f"{self.call}: {self._folder} has no tensor {lost}; its names begin with "
                f"{some_quoted(sorted(self._place_of))}"
            )
        for tensor in self._left:
            names = self._names_in_folder(tensor) if tensor.is_meta else []
            for name in names:
                file, shape, kind = self._place_of[name]
                if shape != tensor.size():
                    raise ConfigError(
                        f"{self.call}: '{name}' is {tuple(shape)} in {file}, and {tuple(tensor.size())} in the model; "
                        "give the folder of this model's checkpoint"
                    )
                if tensor.is_floating_point() and tensor.element_size() > 1 and kind not in _FLOATS:
                    raise ConfigError(
                        f"{self.call}: '{name}' is {kind} in {file}, and {tensor.dtype} in the model; if this is "
                        "quantized, give the folder of a checkpoint that is not"
                    )
                if name != names[0] and not same_bytes(self._read(names[0]), self._read(name)):
                    raise ConfigError(
                        f"{self.call}: '{names[0]}' and '{name}' are one tensor in the model, and not the same in "
                        f"{self._folder}; build the model without tying them (tie_word_embeddings=False)"
                    )

    def _names_in_folder(self, tensor: torch.Tensor) -> list[str]:
        return [name for name in self._names[tensor] if name in self._place_of]

    def _read(self, name: str) -> torch.Tensor:
        with _opened(self._place_of[name][0]) as file:
            return file.get_tensor(name)


def _names_of(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """All names of each parameter, then of each buffer."""
    names: dict[torch.Tensor, list[str]] = {}
    for found in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in found:
            names.setdefault(tensor, []).append(name)
    return names


def _exchange(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Let `tensor`, the same object, be on `other`'s memory. Returns what it was on."""
    if tensor.device == other.device:
        before = tensor.detach()
        tensor.data = other
        return before
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other.detach(), requires_grad=tensor.requires_grad)
    vars(other).update(vars(tensor))
    torch.utils.swap_tensors(tensor, other)
    return other


def _device(call: str, device: Any) -> torch.device:
    try:
        found = torch.device(device)
        if found.index is None and found.type not in ("cpu", "meta"):
            found = torch.device(found.type, torch.accelerator.current_device_index())
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"{call}: device: {str(error).splitlines()[0]}") from error
    if found.type == "meta":
        raise ConfigError(f"{call}: device 'meta' has no memory; give the device to train on")
    return found


def _tensors_in(call: str, folder: Path) -> dict[str, tuple[Path, torch.Size, str]]:
    """The file, the size and the type of each tensor in a folder. Raises ConfigError for a folder without any, or with
    a part missing."""
    index, files = folder / _INDEX, {*folder.glob("*.safetensors")}
    if index.is_file():
        try:
            files = {folder / file for file in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{call}: {index} is no index of safetensors ({type(error).__name__}: {error})"
            ) from error
        lost = sorted(str(file) for file in files if not file.is_file())
        if lost:
            raise ConfigError(f"{call}: {index} names {some_quoted(lost)}, which is not there; download it again")
    place_of: dict[str, tuple[Path, torch.Size, str]] = {}
    for path in sorted(files):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                place_of[name] = path, torch.Size(part.get_shape()), part.get_dtype()
    if not place_of:
        raise ConfigError(f"{call}: {folder} has no safetensors files with tensors; give the folder of a checkpoint")
    return place_of


def _opened(path: Path) -> contextlib.AbstractContextManager[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"lowtide: {path} is no safetensors file ({error})") from error
