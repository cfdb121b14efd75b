"""Changes of a run file that `lowtide plan` tries where no plan fits: each is traced and planned as it would run.

What: half the micro-batch, weights in bf16, the loss in slices or with its head in blocks, parameters in shards. Only
changes that make the largest part of the memory smaller are tried (planner/advice.py).
Cost: a trace for each that is tried. Not covered: plans from a saved profile, which has one step and no model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowtide.config.memory import BlocksOfRows, MemoryConfig
from lowtide.config.run import RunConfig
from lowtide.planner.advice import ACTIVATIONS, GRADIENTS, HALF_A_BATCH, LOSS, OPTIMIZER, STEP, WEIGHTS, Change

if TYPE_CHECKING:
    from lowtide.core.profile import Profile
    from lowtide.timeline.hardware import Hardware

_RANKS = (2, 8)
_ROWS = 16384


def changes_of(run: RunConfig, hardware: Hardware, traced: Profile) -> Iterator[Change]:
    """Of a run whose step was `traced` for this device."""

    def change(text: str, helps: tuple[str, ...], other: RunConfig) -> Change:
        return Change(text=text, helps=frozenset(helps), profile=lambda: _trace(other, hardware))

    state = (WEIGHTS, GRADIENTS, OPTIMIZER, STEP)
    train, memory = run.train, run.memory or MemoryConfig()
    if traced.loss == "plain" and memory.loss != "auto":
        sliced = dataclasses.replace(memory, loss="auto")
        yield change("memory.loss: auto", (LOSS,), dataclasses.replace(run, memory=sliced))
    if memory.slices_loss["rows"] is None and train.batch_size * run.data.sequence_length > 2 * _ROWS:
        blocks = dataclasses.replace(memory, loss=BlocksOfRows(rows=_ROWS))
        text = f"memory.loss: {{rows: {_ROWS}}}, which has bits of its own"
        yield change(text, (LOSS,), dataclasses.replace(run, memory=blocks))
    if train.batch_size >= 2:
        half = dataclasses.replace(run, train=dataclasses.replace(train, batch_size=train.batch_size // 2))
        text = f"{HALF_A_BATCH}, train.batch_size: {train.batch_size // 2}"
        yield change(text, (ACTIVATIONS, LOSS), half)
    if train.precision != "bf16":
        narrow = dataclasses.replace(
            run,
            train=dataclasses.replace(train, precision="bf16"),
            model=dataclasses.replace(run.model, dtype="bfloat16"),
        )
        yield change("train.precision: bf16", state, narrow)
    for ranks in _RANKS:
        yield Change(
            text=f"parallel: {{shard: fsdp2, data: {ranks}}}, without its network",
            helps=frozenset(state),
            profile=lambda ranks=ranks: _sharded(run, traced, ranks),  # type: ignore[misc]
        )


def _trace(run: RunConfig, hardware: Hardware) -> Profile:
    from lowtide.cli.run_step import trace_run

    return trace_run(run, hardware, say=lambda text: None)


def _sharded(run: RunConfig, whole: Profile, ranks: int) -> Profile:
    from lowtide.cli.run_step import layer_bytes
    from lowtide.cluster.sharded import Sharding, sharded_profile

    width = 2 if run.model.dtype == "bfloat16" else 4
    sharding = Sharding(ranks=ranks, stored_width=width, gathered_width=width, reduced_width=width)
    return sharded_profile(whole, layer_bytes(run, whole.layers), sharding)
