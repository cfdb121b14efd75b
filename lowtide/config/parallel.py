"""The `parallel` section of a run file: over how many devices a model is spread, and how.

What: every key may be left out; `lowtide plan` then looks for the best value. A value that is written is never changed.
Sizes count ranks: `tensor` x `pipeline` x `context` x `data` is the number of devices, and `expert` ranks are taken
from `tensor` x `context` x `data`. `lowtide plan` reads this section; `lowtide train` does where it has `shard`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from lowtide.config.loader import FieldError, Locations
from lowtide.config.schedules import SCHEDULES, ClusterSchedule

AXES = ("tensor", "pipeline", "interleave", "expert", "context", "data", "optimizer_shards")
"""The keys that are sizes of a layout, in the order in which they are printed."""
_BESIDE_SHARD = ("shard", "replicas", "tensor", "data", "cluster", "places")
_MOST = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The section as written; None is free."""

    tensor: int | None = None
    """Ranks that share each product of a layer."""
    pipeline: int | None = None
    """Ranks that layers are dealt to."""
    interleave: int | None = None
    """Stages on each pipeline rank."""
    expert: int | None = None
    """Ranks that share the experts."""
    context: int | None = None
    """Ranks that share each sequence."""
    data: int | None = None
    """Ranks that have the same layers and other sequences."""
    optimizer_shards: int | None = None
    """Ranks that the optimizer's state is dealt to; 1: each rank has all of that of its parameters."""
    shard: Literal["fsdp2", "hsdp"] | None = None
    """Parameters and gradients are dealt to the data ranks as well, as by `fully_shard`. `fsdp2`: to all of them;
    `hsdp`: to those of one replica. `lowtide train` trains so, and `lowtide plan` plans one rank."""
    replicas: int | None = None
    """With `hsdp`: the number of groups of data ranks that hold all parameters together."""
    schedule: ClusterSchedule = "auto"
    devices: int | None = None
    """Number of devices of the whole cluster; `--devices` overrides it."""
    global_batch: int | None = None
    """Sequences of one optimizer step, over all devices. Left out: `train.batch_size` x `train.grad_accumulation` for
    each of the data ranks."""
    layers: Literal["balanced", "even"] | tuple[int, ...] = "balanced"
    """How layers are dealt to stages: balanced by their time, equally many, or so many to each stage."""
    sequence_parallel: bool = True
    """Whether norms and the residual stream are split over the tensor ranks too, along the sequence."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Number format of the linear layers' products. `fp8`: their saved inputs have one byte an element as well."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the optimizer's moments. Master weights and gradients are float32."""
    cluster: str | None = None
    """What connects the devices: `h800`, `ideal` (communication is left out), or the path of a TOML file. Left out:
    that of the device's own name."""
    places: Locations = field(default_factory=lambda: Locations(prefix="parallel"), compare=False, repr=False)

    def __post_init__(self) -> None:
        for key in (*AXES, "replicas", "devices", "global_batch"):
            value = getattr(self, key)
            if value is not None and not 1 <= value <= _MOST:
                bound = "at least 1" if value < 1 else f"at most {_MOST}"
                raise FieldError(key, f"must be {bound}, not {value}")
        if self.shard is not None:
            self._check_beside_shard()
        if (self.replicas is not None) != (self.shard == "hsdp"):
            raise FieldError("replicas", "goes with 'shard: hsdp', and that needs it; write e.g. replicas: 2")
        if self.data is not None and self.data % (self.replicas or 1):
            raise FieldError("replicas", f"must divide the {self.data} data ranks, and {self.replicas} does not")
        if isinstance(self.layers, tuple) and (not self.layers or min(self.layers) < 0):
            raise FieldError("layers", "must be one number of layers for each stage, none of them below 0")
        kind = SCHEDULES.get(self.schedule)
        if kind is not None and kind.is_for_one_rank and self.pipeline not in (None, 1):
            raise FieldError("schedule", f"'{self.schedule}' is for 1 pipeline rank, not {self.pipeline}")

    def place_of(self, key: str) -> str:
        """Where a key is written, or where it would be."""
        return self.places.of(key) if key in self.places.places else self.places.of("")

    def pinned(self) -> dict[str, int]:
        """The sizes that are written."""
        return {key: value for key in AXES if (value := getattr(self, key)) is not None}

    def _check_beside_shard(self) -> None:
        for entry in dataclasses.fields(self):
            if entry.name not in _BESIDE_SHARD and getattr(self, entry.name) != entry.default:
                raise FieldError(entry.name, "cannot stand beside 'shard', which takes data, replicas and tensor")
