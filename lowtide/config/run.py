"""The sections of a run file but `memory`, and a whole one, as frozen dataclasses.

What: `lowtide plan`, `lowtide profile` and the trainer in examples/train read the same file; cli/run_file.py reads it.
Each section checks its own numbers. `places` keeps where keys were written, so that mistakes that are seen late (fields
of the model's config class, the text) name their line too.
`parallel` says over how many devices a model is spread, and how. Every key of it may be left out; `lowtide plan` then
looks for the best value. A value that is written is never changed. Sizes count ranks: `tensor` x `pipeline` x `context`
x `data` is the number of devices, and `expert` ranks are taken from `tensor` x `context` x `data`. `lowtide plan` reads
this section; the trainer does where it has `shard`.
Cost: none. Not covered: what keys of several sections mean together (cli/run_file.py).

`SCHEDULES` is what run files, the search for a cluster and the generators have to know of each pipeline schedule; how
one is made is in pipeline/generators.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from lowtide.config.loader import NO_KEY, Locations
from lowtide.config.memory import MemoryConfig
from lowtide.errors import ConfigError, FieldError

RunSchedule = Literal["gpipe", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev", "one_stage_overlap"]
"""Those that can be run, and so all that have a generator."""
ClusterSchedule = Literal[
    "auto", "1f1b", "interleaved", "interleaved_overlap", "zb_v", "dualpipev", "dualpipe", "one_stage_overlap"
]
"""Those that a plan for a cluster takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """What is known of a schedule before one is made."""

    stages_per_rank: int | None
    """None: as many as are asked for; 2 by default."""
    has_pairs: bool = False
    """Whether a forward and a backward run together, so that each hides the other's communication."""
    is_searched: bool = True
    """Whether the search for a cluster tries it where the run file leaves it open."""
    is_for_one_rank: bool = False
    played_as: str | None = None
    """The schedule that stands for this one on a clock, if it has no generator of its own."""
    upstream: str | None = None
    """`pipeline_scheduler` of MindSpore Transformers."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(stages_per_rank=1, is_searched=False),
    "1f1b": ScheduleKind(stages_per_rank=1, upstream="1f1b"),
    "interleaved": ScheduleKind(stages_per_rank=None, upstream="1f1b"),
    "zb_v": ScheduleKind(stages_per_rank=2, upstream="zero_bubble_v"),
    "interleaved_overlap": ScheduleKind(stages_per_rank=None, has_pairs=True),
    "dualpipev": ScheduleKind(stages_per_rank=2, has_pairs=True, upstream="zero_bubble_v"),
    "dualpipe": ScheduleKind(stages_per_rank=2, has_pairs=True, played_as="dualpipev"),
    "one_stage_overlap": ScheduleKind(stages_per_rank=1, has_pairs=True, is_for_one_rank=True),
}
"""In the order in which a search tries them."""

DType = Literal["float32", "bfloat16"]
Precision = Literal["float32", "bf16_autocast", "bf16"]
OptimizerKind = Literal["adamw", "sgd", "adafactor"]
NUM_BYTE_TOKENS = 256
"""The vocabulary, unless the file says otherwise: tokens are bytes."""

AXES = ("tensor", "pipeline", "interleave", "expert", "context", "data", "optimizer_shards")
"""The keys that are sizes of a layout, in the order in which they are printed."""
_BESIDE_SHARD = ("shard", "replicas", "tensor", "data", "cluster", "places")
_MOST_RANKS = 2**24
_BOUNDS = {
    "steps": (1, 10**15),
    "batch_size": (1, 2**20),
    "grad_accumulation": (1, 2**20),
    "expert_parallel": (1, 2**20),
    "tensor_parallel": (1, 2**20),
    "stages": (1, 4096),
    "micro_batches": (1, 65536),
    "log_every": (1, 10**15),
    "checkpoint_every": (1, 10**15),
    "threads": (1, 1024),
    "warmup_steps": (0, 10**15),
    "weight_decay": (0, float("inf")),
    "sequence_length": (2, 2**26),
}
"""What no run has less or more of. Below, a wrong number costs a message; above, it would cost the machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model: a folder with weights, or a kind of model with fields for its config class and fresh weights."""

    REST: ClassVar[str] = "fields"

    path: Path | None = None
    """A local folder for `from_pretrained`; nothing is ever downloaded."""
    model_type: str | None = None
    """`llama`, `qwen3_moe`, `deepseek_v3`, or any other causal language model that transformers knows."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """All other keys of the section; checked against the config class of `model_type` when the model is built."""
    dtype: DType = "float32"
    """Of the weights. Left out, it follows `train.precision`."""
    seed: int = 0
    """Of fresh weights; the same on every rank."""
    lora: int | None = None
    """Rank of LoRA on all linear layers; all other weights are frozen. None: all weights are trained."""
    locations: Locations = field(default_factory=lambda: Locations(prefix="model"), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.lora is not None and self.lora < 1:
            raise FieldError("lora", f"must be a rank from 1, not {self.lora}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which text, in pieces of which length. Tokens are bytes."""

    files: tuple[str, ...] = ()
    """Paths or globs, concatenated in this order (a glob: sorted). Empty: the standard library's .py files."""
    sequence_length: int = 256

    def __post_init__(self) -> None:
        _check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. One step is `grad_accumulation` micro-batches of `batch_size` sequences on every rank."""

    steps: int
    batch_size: int = 8
    """Sequences per micro-batch and rank."""
    grad_accumulation: int = 1
    expert_parallel: int = 1
    """Ranks that share the experts of an MoE model; 1: each has all of them."""
    tensor_parallel: int = 1
    """Ranks that share each product of a layer, and the sequence between them. Only beside a section `pipeline`."""
    optimizer: OptimizerKind = "adamw"
    """`sgd` with momentum 0.9."""
    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up. `cosine` falls to zero at `steps`."""
    warmup_steps: int = 0
    """The learning rate grows linearly over this many steps."""
    weight_decay: float = 0.1
    """Of matrices; norms and biases are not decayed."""
    clip_grad_norm: float | None = 1.0
    """null: no clipping."""
    seed: int = 0
    """Of the order of the text and of dropout."""
    precision: Precision = "float32"
    """`float32`; `bf16_autocast`: float32 weights, bf16 compute; `bf16`: weights, gradients and AdamW state in bf16."""
    allow_non_finite: bool = False
    """true: go on after a loss or a gradient that is nan or infinite, instead of stopping."""
    log_every: int = 10
    checkpoint_every: int | None = None
    """Steps between checkpoints; null: only at the end of the run and at a signal."""
    output_dir: Path | None = None
    """Receives metrics.jsonl; null: `runs/` and the name of the run file."""
    checkpoint_dir: Path | None = None
    """null: `checkpoints` inside `output_dir`."""
    resume: str = "auto"
    """`auto`: from the newest checkpoint of `checkpoint_dir`, if any; `never`; or the path of a checkpoint."""
    device: str = "auto"
    """`auto`: the accelerator if there is one; or `cpu`, `cuda`, `cuda:1`, ..."""
    engine: str | None = None
    """Which lowtide engine moves memory; null: the one of the device. Only with a `memory` section."""
    threads: int | None = None
    """Threads of the CPU; null: torch's choice."""

    def __post_init__(self) -> None:
        _check_bounds(self)
        for name in ("learning_rate", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise FieldError(name, f"must be above 0, not {value}")


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
            if value is not None and not 1 <= value <= _MOST_RANKS:
                bound = "at least 1" if value < 1 else f"at most {_MOST_RANKS}"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """How the layers are split over ranks, and in which order their micro-batches go through them."""

    schedule: RunSchedule = "1f1b"
    stages: int
    """Ranks in a row. `zb_v`, `dualpipev` and the interleaved schedules put two parts of the model on each."""
    micro_batches: int
    """Of a step. `train.grad_accumulation` stays out."""
    layers: Literal["even", "balanced"] | tuple[int, ...] = "even"
    """How layers are dealt to stages: equally many, balanced by their time, or so many to each stage."""
    overlap: bool = False
    """Whether the halves of a pair take turns, so that each hides the other's exchange of rows between experts."""

    def __post_init__(self) -> None:
        _check_bounds(self)
        if isinstance(self.layers, tuple) and (not self.layers or min(self.layers) < 1):
            raise FieldError("layers", "must be one number of layers for each stage, each at least 1")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run file."""

    model: ModelConfig
    train: TrainConfig
    data: DataConfig = field(default_factory=DataConfig)
    memory: MemoryConfig | None = None
    """None, and no sections: plain training, lowtide's runtime is not touched."""
    parallel: ParallelConfig | None = None
    """What `lowtide plan` plans for; with `shard`, also how the trainer shards the model over ranks."""
    pipeline: PipelineConfig | None = None
    """None: every rank has the whole model."""
    places: Locations = field(default_factory=Locations, compare=False)
    sections: Any = field(default=None, metadata=NO_KEY)
    """`recompute_config` and `swap_config` (mindformers.schema.Sections), where the file has them."""
    output_dir: Path = field(default=Path("runs"), metadata=NO_KEY)
    """`train.output_dir`, or what it is when left out."""

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are dealt to ranks."""
        return self.parallel is not None and self.parallel.shard is not None

    def fail(self, path: str, message: str) -> NoReturn:
        """A mistake in `path` ("model.vocab_size")."""
        raise self.mistake(path, message)

    def mistake(self, path: str, message: str) -> ConfigError:
        """The same, to be raised by the caller."""
        return ConfigError(f"{self.places.of(path)}: {message}")

    @property
    def checkpoint_dir(self) -> Path:
        return self.train.checkpoint_dir or self.output_dir / "checkpoints"


def _check_bounds(config: Any) -> None:
    for name, (least, most) in _BOUNDS.items():
        value = getattr(config, name, None)
        if value is not None and not least <= value < float("inf"):
            raise FieldError(name, f"must be at least {least}, not {value}")
        if value is not None and value > most:
            raise FieldError(name, f"must be at most {most}, not {value}")
