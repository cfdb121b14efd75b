"""`recompute_slice_activation`: tensor-parallel ranks share the inputs of recomputed layers between them.

What: with tensor parallelism each rank runs a layer on the same input. A recomputed layer holds on to nothing else, so
of a group of N ranks each keeps one N-th of it, and the whole is gathered again when backward runs the layer. What is
cut is the flat storage, so layout and shape do not matter.
Why it needs a proof: a slice of a tensor that another rank does not have gives wrong gradients, silently. So in each
forward pass that is recorded (the first, and those after a change of shapes) every input is compared over the group
before it is cut; if it differs, the step is refused on all ranks. Sequence parallelism makes inputs differ: there each
rank has its own slice already, and there is nothing to gain.

Cut are inputs that need a gradient and whose storage nobody else holds whole: hidden states, not masks or rotary
tables. An input of several layers is cut once. What has no N equal parts is kept whole, and a line says so.

Cost: one all-gather for each input in backward, in the order in which backward comes to the layers. Not covered:
swapped inputs (those stay whole), and inputs that begin to differ between ranks after they were compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.catalog.trace import is_plain
from lowtide.errors import ConfigError
from lowtide.runtime.handle import KeptSite, View
from lowtide.runtime.kept import KeptSiteOnTape
from lowtide.runtime.stats import Counters, Ledger

KEY = "recompute_slice_activation"
_MAX_CHUNK = 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Any odd number: it makes the sum depend on the order.
_FACTOR = 0x9E3779B97F4A7C1

Parts = dict[int, tuple[StorageWeakRef, int, "Part"]]
"""Of one forward pass: what was cut, by storage, with the version at which it was."""


def tensor_parallel_group(model: nn.Module) -> Any:
    """The process group of the mesh dimension 'tp' of the model's DTensor parameters; None without one."""
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            return mesh.get_group("tp")
    return None


class Part:
    """This rank's part of one storage. Carries its bytes in the ledger."""

    __slots__ = ("flat", "group", "ledger", "nbytes")

    def __init__(self, flat: torch.Tensor, group: Any, ledger: Ledger) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.nbytes = flat.numel() // size
        self.ledger = ledger
        ledger.add(self.nbytes)
        self.group = group
        self.flat = flat.narrow(0, rank * self.nbytes, self.nbytes).clone()

    def whole(self) -> torch.UntypedStorage:
        """The bytes of all ranks. Collective."""
        flat = self.flat.new_empty(self.nbytes * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(flat, self.flat, group=self.group)
        return flat.untyped_storage()

    def __del__(self) -> None:
        self.ledger.subtract(self.nbytes)


class Sliced:
    """A saved tensor of which this rank has a part only."""

    __slots__ = ("part", "view")

    def __init__(self, part: Part, tensor: torch.Tensor) -> None:
        self.part = part
        self.view = View(tensor)

    def open(self) -> torch.Tensor:
        """The tensor, gathered. Raises RuntimeError if it was modified in place since it was saved."""
        self.view.check()
        return self.view.over(self.part.whole())


class Slices:
    """How inputs of recomputed layers are cut in one tide."""

    def __init__(self, group: Any, say: Callable[[str], None]) -> None:
        self.group = group
        self.say = say

    def instead_of(
        self, handle: Any, tensor: torch.Tensor, parts: Parts, where: str, counters: Counters, *, compares: bool
    ) -> Any:
        """The handle on an input of layer `where`: `handle`, or one on a slice. Collective with `compares`.

        Raises ConfigError on every rank if the ranks have different inputs.
        """
        if not is_plain(tensor) or not tensor.is_floating_point() or not tensor.requires_grad:
            return handle
        storage = tensor.untyped_storage()
        known = parts.get(storage._cdata)
        if known is not None and not known[0].expired() and known[1] == tensor._version:
            return Sliced(known[2], tensor)
        if type(handle) not in (KeptSite, KeptSiteOnTape):
            return handle
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        num_ranks = dist.get_world_size(self.group)
        fits = tensor.numel() % num_ranks == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
        if compares:
            # Whether it fits or not: the ranks must not disagree about what comes next.
            self._compare(flat.view(_BITS[tensor.element_size()]), where)
        if not fits:
            if compares:
                self.say(
                    f"note: {KEY}: an input of '{where}' is kept whole; its {tensor.numel()} numbers are no storage of "
                    f"their own that {num_ranks} ranks could share equally"
                )
            return handle
        part = Part(flat, self.group, handle.ledger)
        counters.kept_bytes += part.nbytes - handle.nbytes
        parts[storage._cdata] = (StorageWeakRef(storage), tensor._version, part)
        return Sliced(part, tensor)

    def _compare(self, bits: torch.Tensor, where: str) -> None:
        mine = torch.tensor([bits.numel(), _checksum(bits)], device=bits.device)
        all_of_them = mine.new_empty(2 * dist.get_world_size(self.group))
        dist.all_gather_into_tensor(all_of_them, mine, group=self.group)
        found = all_of_them.view(-1, 2).tolist()
        other = next((rank for rank, entry in enumerate(found) if entry != found[0]), None)
        if other is None:
            return
        raise ConfigError(
            f"{KEY}: an input of '{where}' is not the same on ranks 0 and {other} of the tensor-parallel group, so a "
            "slice of it would give wrong gradients. With sequence parallelism each rank has its own slice already; "
            f"set {KEY} to false"
        )


def _checksum(bits: torch.Tensor) -> int:
    """A number that depends on each bit and on their order. `bits` is 1-D, of whole numbers."""
    total = 0
    for start in range(0, bits.numel(), _MAX_CHUNK):
        chunk = bits[start : start + _MAX_CHUNK].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + chunk.numel(), device=bits.device) * _FACTOR
        total = (total + int((chunk * (weights | 1)).sum())) % 2**62
    return total
