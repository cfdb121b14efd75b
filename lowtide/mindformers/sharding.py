"""What a file says about memory that ranks share: inputs of recomputed layers, and gathered parameters.

`parallel_optimizer_comm_recompute`: whether the parameters of recomputed layers are gathered again in backward.

What: after a module's forward FSDP2 either shards its parameters again (and gathers them a second time before the
backward), or keeps them whole until then. In recomputed layers true asks for the first, false for the second. Where the
file does not have the key, FSDP2 stays as the user built it.
Why here: what reads these parameters in backward is the layer that runs again.
Cost of true: one all-gather a layer and step; of false: the layer's parameters from forward to backward.
Not covered: recomputed single ops, and modules that shard several layers as one.

`recompute_slice_activation`: tensor-parallel ranks share the inputs of recomputed layers between them.

What: with tensor parallelism each rank runs a layer on the same input, and a recomputed layer holds only its inputs. So
each of N ranks keeps one N-th of an input, and the whole is gathered when backward runs the layer again. The flat
storage is cut, so layout and shape do not matter.
Why inputs are compared: if ranks had different inputs, their slices would make up a tensor that no rank had, and
gradients would be wrong without an error. So in each forward pass that is recorded (the first, and those after a change
of shapes) every input is compared over the group before it is cut. If it differs, all ranks refuse the step. With
sequence parallelism inputs differ: there each rank has its own slice already, and there is nothing to gain.

Only inputs are cut that need a gradient and whose storage nothing else holds whole: hidden states, not masks or rotary
tables. An input of several layers is cut once. An input that has no N equal parts is kept whole, and a line says so.

Cost: one all-gather for each input in backward, in the order in which backward reaches the layers. Not covered:
swapped inputs (those stay whole), and inputs that begin to differ between ranks after they were compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.errors import ConfigError
from lowtide.mindformers.schema import Resolution
from lowtide.mindformers.schema.issues import layers_text
from lowtide.runtime.saved.handle import Kept, Shared
from lowtide.runtime.saved.stats import Counters, Ledger
from lowtide.tensors.codecs import INTEGERS
from lowtide.tensors.fsdp import after_forward, fsdp_modules
from lowtide.tensors.kinds import is_plain
from lowtide.tensors.private import storage_key, version_of
from lowtide.tensors.ranks import gather

KEY_SLICES = "recompute_slice_activation"
KEY_GATHERS = "parallel_optimizer_comm_recompute"
_MAX_CHUNK = 2**20
# Any odd number will do: as a factor it makes the sum depend on the order.
_FACTOR = 0x9E3779B97F4A7C1

Parts = dict[int, tuple[StorageWeakRef, int, "InputSlice"]]
"""What one forward pass has cut, by storage key: the storage, its version then, and this rank's part."""


def tensor_parallel_group(model: nn.Module) -> Any:
    """The process group of the mesh dimension 'tp' of the model's DTensor parameters; None without one."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            return mesh.get_group("tp")
    return None


class InputSlice:
    """This rank's part of one storage. Counts its bytes in the ledger."""

    __slots__ = ("__weakref__", "flat", "group", "nbytes")

    def __init__(self, flat: torch.Tensor, group: Any, ledger: Ledger) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.nbytes = flat.numel() // size
        ledger.hold(self, self.nbytes)
        self.group = group
        self.flat = flat.narrow(0, rank * self.nbytes, self.nbytes).clone()

    def read(self) -> torch.UntypedStorage:
        """The storage with the parts of all ranks. Collective: all ranks must call it."""
        flat = self.flat.new_empty(self.nbytes * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(flat, self.flat, group=self.group)
        return flat.untyped_storage()


def slice_instead_of(
    handle: Any,
    tensor: torch.Tensor,
    parts: Parts,
    where: str,
    *,
    group: Any,
    say: Callable[[str], None],
    counters: Counters,
    ledger: Ledger,
    compares: bool,
) -> Any:
    """The handle on an input of layer `where`: `handle`, or one on this rank's slice of it. Collective with `compares`.

    Raises ConfigError on every rank if the ranks have different inputs.
    """
    if not is_plain(tensor) or not tensor.is_floating_point() or not tensor.requires_grad:
        return handle
    storage = tensor.untyped_storage()
    known = parts.get(storage_key(storage))
    if known is not None and not known[0].expired() and known[1] == version_of(tensor):
        return Shared(known[2], tensor)
    if type(handle) is not Kept or not handle.is_first:
        return handle
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    num_ranks = dist.get_world_size(group)
    fits = tensor.numel() % num_ranks == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
    if compares:
        # Also where it does not fit: all ranks must issue the same collectives.
        _compare(group, flat.view(INTEGERS[tensor.element_size()]), where)
    if not fits:
        if compares:
            say(
                f"note: {KEY_SLICES}: an input of '{where}' is kept whole; its {tensor.numel()} numbers are no "
                f"storage of their own that {num_ranks} ranks could share equally"
            )
        return handle
    part = InputSlice(flat, group, ledger)
    counters.kept_bytes += part.nbytes - storage.nbytes()
    parts[storage_key(storage)] = (StorageWeakRef(storage), version_of(tensor), part)
    return Shared(part, tensor)


def _compare(group: Any, bits: torch.Tensor, where: str) -> None:
    checksums = gather((bits.numel(), _checksum(bits)), group)
    differing = next((rank for rank, entry in enumerate(checksums) if entry != checksums[0]), None)
    if differing is None:
        return
    raise ConfigError(
        f"{KEY_SLICES}: an input of '{where}' is not the same on ranks 0 and {differing} of the tensor-parallel "
        "group, so a slice of it would give wrong gradients. With sequence parallelism each rank has its own slice "
        f"already; set {KEY_SLICES} to false"
    )


def _checksum(bits: torch.Tensor) -> int:
    """A number that depends on each bit and on their order. `bits` is 1-D, of an integer dtype."""
    total = 0
    for start in range(0, bits.numel(), _MAX_CHUNK):
        chunk = bits[start : start + _MAX_CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + chunk.numel(), device=bits.device) * _FACTOR
        total = (total + int((chunk * (weights | 1)).sum())) % 2**62
    return total


def resharded(model: nn.Module, resolution: Resolution, layers: Sequence[str], undo: contextlib.ExitStack) -> list[str]:
    """Set FSDP2's modules in recomputed layers as the file says, until `undo` is closed. Lines that say what has no
    effect, and why."""
    # In a stage of a pipeline, plans have the whole model's layer numbers, and names have the stage's own.
    recomputed = [(plan.index, name) for plan, name in zip(resolution.layers, layers, strict=True)
                  if plan.full_recompute]  # fmt: skip
    if resolution.regathers is None or not recomputed:
        return []
    if not fsdp_modules(model):
        no_effect = f"no effect: {KEY_GATHERS}; no parameters are sharded by FSDP2 in this model"
        return [no_effect] if resolution.regathers else []
    sharded = {index: fsdp_modules(model.get_submodule(name)) for index, name in recomputed}
    for module in (module for modules in sharded.values() for module in modules):
        for owner, name, value in after_forward(module):
            undo.callback(setattr, owner, name, value)
        module.set_reshard_after_forward(resolution.regathers, recurse=False)
    notes = []
    untouched = [index for index, modules in sharded.items() if not modules]
    if untouched:
        notes.append(f"no effect: {KEY_GATHERS} in {layers_text(untouched)}; no module there is sharded by itself")
    kept = [index for index, modules in sharded.items() if modules and not resolution.regathers]
    if kept:
        notes.append(
            f"{KEY_GATHERS} is false: the gathered parameters of {layers_text(kept)} stay on the device from "
            "forward to backward; true frees them"
        )
    return notes
