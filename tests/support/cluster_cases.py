"""Questions for a plan of a cluster, small enough for a test: a model of numbers, no transformers."""

from __future__ import annotations

from typing import Any

from lowtide.cluster.layout import Layout, Question
from lowtide.cluster.shape import DENSE, MOE, Experts, ModelShape
from lowtide.config.run import ParallelConfig
from lowtide.core.fate import Fate
from lowtide.timeline.hardware import load_cluster, load_hardware
from lowtide.units import GIB

DENSE_SHAPE = ModelShape(
    name="llama",
    hidden=2048,
    vocabulary=32000,
    kinds=(DENSE,) * 8,
    heads=16,
    key_heads=4,
    key_width=128,
    value_width=128,
    inner=8192,
)
MOE_SHAPE = ModelShape(
    name="qwen3_moe",
    hidden=2048,
    vocabulary=32000,
    kinds=(DENSE, *(MOE,) * 8),
    heads=16,
    key_heads=4,
    key_width=128,
    value_width=128,
    inner=8192,
    experts=Experts(num=16, top_k=4, inner=1024, shared_inner=1024, most_nodes=None),
)


def question(
    shape: ModelShape = MOE_SHAPE,
    *,
    devices: int = 8,
    budget_gib: float = 16.0,
    sequences: int | None = 64,
    micro_batch: int = 2,
    sequence_length: int = 4096,
    accumulation: int = 1,
    cluster: str = "h100",
    fates: tuple[Fate, ...] = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE),
    **parallel: Any,
) -> Question:
    """A question about 8 devices of an H100 cluster, unless something else is asked."""
    return Question(
        shape=shape,
        sequences=sequences,
        micro_batch=micro_batch,
        accumulation=accumulation,
        sequence_length=sequence_length,
        config=ParallelConfig(**parallel),
        devices=devices,
        hardware=load_hardware("h100"),
        cluster=load_cluster(cluster),
        budget_bytes=int(budget_gib * GIB),
        fates=fates,
    )


def place(asked: Question, **layout: Any) -> tuple[Question, Layout]:
    """Where a layer of the question's model runs, with the rates of the device's own file."""
    return asked, Layout(**layout)
