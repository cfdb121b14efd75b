"""The `memory` section: what a person may ask for, and the rules it turns into.

    memory:
      recompute: [layers.0-15]                 # none | all | [patterns]
      swap:                                    # none | all | [patterns or {match, prefetch, tier}]
        - layers.16-31.mlp
        - {match: layers.16-31.self_attn, prefetch: 20, tier: disk}
      keep: [layers.31]                        # wins over both
      min_bytes: 1MiB                          # smaller storages are kept; absent: it fits the model
      host_budget: 96GiB                       # pinned or pageable bytes per rank
      check: full                              # full | deep: how what is recomputed is proven

      budget: 20GiB                          # or 90%, or auto: peak device bytes per rank; the solver decides the rest
      strict: true                           # BudgetError for shapes that no plan fits, not the smallest plan

      loss: auto                               # auto | sliced | plain: the loss in slices of rows, to the bit;
                                               # or {rows: 16384}: head and loss in blocks of so many rows
      optimizer: auto                          # keep | swap | auto | in_backward: where its state is between steps
      weights: auto                            # keep | swap | auto: where layers' weights are between their turns

Every key is optional; a section that names nothing does nothing. Patterns are described in core/rules.py. With a
budget, `recompute` and `swap` are `auto` unless written otherwise, and rules are limits for the solver.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from lowtide.config.loader import BudgetSize, ByteSize, Locations, load_mapping, load_tree
from lowtide.config.source import RawValue, read_yaml
from lowtide.core.budget import Budget, DeviceMemory, settle
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Fate, Tier
from lowtide.core.plan import Plan
from lowtide.core.rules import Pattern, Rule, Rules
from lowtide.errors import ConfigError, FieldError, did_you_mean
from lowtide.units import KIB, MIB

_ELSEWHERE: dict[str, OptimizerPlacement] = {
    "swap": OptimizerPlacement(moved_bytes=None, reason="memory.optimizer asks for it"),
    "in_backward": OptimizerPlacement(moved_bytes=None, overlap="in_backward", reason="memory.optimizer asks for it"),
}
_RUN_SECTIONS = {"model", "data", "train", "parallel", "pipeline"}
"""Sections that stand beside `memory` in a run file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule:
    """One item of `swap`; a plain string is its `match`."""

    SHORTHAND: ClassVar[str] = "match"

    match: str
    """A pattern."""
    prefetch: int | None = None
    """Start the fetch this many operators of the backward pass before the first reader; 0 fetches when it is needed.
    Absent: as early as a window of bytes allows."""
    tier: Literal["host", "disk"] | None = None
    """Where the bytes go; absent = the fastest tier with room."""

    def __post_init__(self) -> None:
        if self.prefetch is not None and self.prefetch < 0:
            raise FieldError("prefetch", f"must be 0 or more, not {self.prefetch}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksOfRows:
    """Head and loss in blocks of rows."""

    rows: int
    """Of a block. The bits of steps with more rows depend on it."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise FieldError("rows", f"must be 1 or more, not {self.rows}; write e.g. rows: 16384")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """The `memory` section as written. Sizes are bytes per rank."""

    budget: BudgetSize | None = None
    """Peak device bytes; `90%` of what the device has; or `auto`, what it has less a headroom (core/budget.py)."""
    host_budget: ByteSize | None = None
    """Cap on host bytes for swapped activations and optimizer state; absent = what the cgroup and the machine allow."""
    disk_budget: ByteSize | None = None
    """Cap on disk bytes for swapped activations; absent = what the disk has."""
    disk_path: Path | None = None
    """Directory for swap files; they are unlinked at once, so nothing is left behind. Absent = the system's own."""
    recompute: Literal["auto", "none", "all"] | tuple[str, ...] | None = None
    """Absent: auto with a budget, none without."""
    swap: Literal["auto", "none", "all"] | tuple[SwapRule, ...] | None = None
    """Absent: auto with a budget, none without."""
    keep: tuple[str, ...] = ()
    """Patterns that are kept whatever `recompute` and `swap` say."""
    optimizer: Literal["keep", "swap", "auto", "in_backward"] = "keep"
    """swap: the state is on the next tier between steps. auto: as far as a budget asks for it and time allows it.
    in_backward: as swap, and it travels while backward runs, where each parameter is updated as soon as its gradient is
    there, and the gradient freed. For one backward pass a step and no clipping over all parameters."""
    weights: Literal["keep", "swap", "auto"] = "keep"
    """swap: the weights of layers are on the next tier, but for the layer's turn in forward and backward. auto: where
    that is faster, or nothing else fits. Both mean `optimizer: in_backward`."""
    loss: Literal["auto", "sliced", "plain"] | BlocksOfRows | None = None
    """sliced: the row-wise part of the loss in slices of rows, with the same bits. auto: where the model's loss is one
    that lowtide knows. Absent: auto with a budget, plain without. `rows`: head and loss in blocks of so many rows, so
    that logits never exist whole; the weight's gradient is then the sum of the blocks' (loss/head.py)."""
    rows: int | None = None
    """The layers, and with them head and loss, in blocks of so many rows: all but attention itself (loss/layers.py).
    The gradients of all weights are then the sums of the blocks'."""
    row_wise: tuple[str, ...] = ()
    """Patterns of modules whose rows do not talk to each other. These are taken in blocks of `rows`, not the layers."""
    min_bytes: ByteSize | None = None
    """Storages smaller than this are kept. Absent: 1 MiB, or less where a budget meets a model whose activations are
    smaller (planner/problem.py); rules that move nothing for it are named."""
    check: Literal["full", "deep"] = "full"
    """How recipes are proven. full: in every forward pass, by all operators that ran, at a price that the solver knows.
    deep: as full, and fingerprints, also those of layers that run again, take every byte (docs/limits.md says what the
    others miss)."""
    strict: bool = False
    """Whether `optimize` raises a `BudgetError` for shapes that no plan fits. Else they run under the plan with the
    smallest peak, with a warning that says by how much that is above the budget."""
    layers: tuple[str, ...] | None = None
    """Dotted names of the layers, in order of the forward pass, for models where they are not found by themselves."""
    locations: Locations = field(default_factory=lambda: Locations(prefix="memory"), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.budget == 0:
            raise FieldError("budget", "must be more than 0 bytes; write e.g. budget: 20GiB, or leave it out")
        for key in ("recompute", "swap"):
            if not self.has_budget and getattr(self, key) == "auto":
                raise FieldError(key, "auto needs a budget to plan for; write e.g. budget: 20GiB")
        if self.weights != "keep":
            if not self.has_budget:
                raise FieldError(
                    "weights",
                    f"{self.weights} needs a budget to plan for; write e.g. budget: 20GiB, or call "
                    "lowtide.swap_weights",
                )
            if self.optimizer not in ("keep", "in_backward"):
                raise FieldError(
                    "weights",
                    f"{self.weights} updates parameters while backward runs, and optimizer: "
                    f"{self.optimizer} does not; write optimizer: in_backward, or leave it out",
                )
            object.__setattr__(self, "optimizer", "in_backward")
        if self.strict and not self.has_budget:
            raise FieldError("strict", "true needs a budget to plan for; write e.g. budget: 20GiB")
        if self.rows is not None and self.rows < 2:
            raise FieldError("rows", f"must be 2 or more, not {self.rows}; write e.g. rows: 16384")
        if self.row_wise and self.rows is None:
            raise FieldError("row_wise", "needs the number of rows of a block; write e.g. rows: 16384")
        if self.layers == ():
            raise FieldError("layers", "names no layer; remove it to have the layers found, or list their names")

    @property
    def tier_limits(self) -> dict[str, Any]:
        """The fields of a `Plan` that say where bytes may go, and how many."""
        path = None if self.disk_path is None else str(self.disk_path)
        return {"host_budget_bytes": self.host_budget, "disk_budget_bytes": self.disk_budget, "disk_path": path}

    @property
    def least_bytes(self) -> int:
        """`min_bytes`, or 1 MiB where it is absent."""
        return MIB if self.min_bytes is None else self.min_bytes

    @property
    def has_budget(self) -> bool:
        """Whether there is something to plan for."""
        return self.budget is not None

    def settled(self, memory: Callable[[], DeviceMemory]) -> tuple[MemoryConfig, int, str]:
        """The same section with its budget in bytes, these bytes, and how they came about for people: empty where bytes
        are written. `memory` of the device is asked for only if the budget is a share or `auto`. There must be a
        budget. Raises `ConfigError` for one of no bytes."""
        assert self.budget is not None
        if isinstance(self.budget, int):
            return self, self.budget, ""
        budget_bytes, line = settle(self.budget, memory())
        return dataclasses.replace(self, budget=budget_bytes), budget_bytes, line

    @property
    def recomputes_freely(self) -> bool:
        """Whether the solver may recompute what no rule names."""
        return self.has_budget and self.recompute in (None, "auto")

    @property
    def swaps_freely(self) -> bool:
        """Whether the solver may swap what no rule names."""
        return self.has_budget and self.swap in (None, "auto")

    @property
    def slices_loss(self) -> dict[str, Any]:
        """`may`: whether the loss is to be sliced where the model's can be. `must`: it is a mistake where it cannot.
        `rows`: of the blocks of head and loss. `layer_rows`: of those of layers, or of what `row_wise` names."""
        rows = self.loss.rows if isinstance(self.loss, BlocksOfRows) else self.rows if self.loss is None else None
        may = rows is not None or self.loss in ("auto", "sliced") or (self.loss is None and self.has_budget)
        return {
            "may": may,
            "must": isinstance(self.loss, BlocksOfRows) or self.loss == "sliced",
            "rows": rows,
            "layer_rows": self.rows,
            "row_wise": self.row_wise,
        }

    def rules(self) -> Rules:
        """The rules in the order recompute, swap, keep; raises `ConfigError` for a malformed pattern."""
        recompute = ("*",) if self.recompute == "all" else _patterns(self.recompute)
        swap = (SwapRule(match="*"),) if self.swap == "all" else _patterns(self.swap)
        rules = [self._rule(Fate.RECOMPUTE, text, f"recompute[{index}]") for index, text in enumerate(recompute)]
        for index, item in enumerate(swap):
            tier = Tier(item.tier) if item.tier else None
            rules.append(self._rule(Fate.SWAP, item.match, f"swap[{index}]", prefetch=item.prefetch, tier=tier))
        rules += [self._rule(Fate.KEEP, text, f"keep[{index}]") for index, text in enumerate(self.keep)]
        return Rules(tuple(rules))

    def _rule(self, fate: Fate, text: str, path: str, *, prefetch: int | None = None, tier: Tier | None = None) -> Rule:
        if getattr(self, fate.value) == "all":
            path = fate.value
        where = self.locations.of(path)
        pattern = Pattern.parse(text, where=where)
        return Rule(pattern=pattern, fate=fate, prefetch=prefetch, tier=tier, where=where)


def check_unit(where: str, budget: Budget | None) -> None:
    """Raises `ConfigError` for `budget=20`, which is 20 bytes: no step fits, and a unit was meant."""
    if isinstance(budget, int) and budget < KIB:
        raise ConfigError(f"{where}: {budget} is {budget} bytes; write the unit too, such as '{budget}GiB'")


def _patterns(value: Any) -> tuple:
    return value if isinstance(value, tuple) else ()


def load_memory(source: MemoryConfig | Mapping[str, Any] | str | os.PathLike[str]) -> MemoryConfig:
    """A `MemoryConfig` from a mapping, from a file of its own, or from the `memory` section of a run file.

    Raises `ConfigError` for any mistake, also in a pattern.
    """
    if isinstance(source, MemoryConfig):
        config = source
    elif isinstance(source, Mapping):
        config = load_mapping(source, MemoryConfig, where="memory")
    elif isinstance(source, str | os.PathLike):
        root = read_yaml(source)
        config = load_tree(root, MemoryConfig, section=_section_of(root))
    else:
        raise ConfigError(f"memory: expected a plan, a mapping or the path of a YAML file, not {source!r}")
    config.rules()  # a malformed pattern is found when it is read, not when the model is there
    return config


def _section_of(root: RawValue) -> str | None:
    """None: the file is the section itself. A run file, or one whose section is misspelt, must have it."""
    keys = [entry.key for entry in root.entries]
    fields = [field.name for field in dataclasses.fields(MemoryConfig)]
    is_misspelt = any(key not in fields and did_you_mean(key, ("memory",)) for key in keys)
    return "memory" if "memory" in keys or is_misspelt or _RUN_SECTIONS & set(keys) else None


def plan_from_rules(config: MemoryConfig, layers: Sequence[str]) -> Plan:
    """The plan that a `memory` section asks for, on a model with these layers.

    Raises `ConfigError` for a malformed pattern. It does not see patterns that match nothing, because it does not know
    the model's names; `plan.rules.unmatched(names)` finds them.
    """
    return Plan(
        layers=tuple(layers),
        rules=config.rules(),
        min_bytes=config.least_bytes,
        **config.tier_limits,
        check=config.check,
        optimizer=_ELSEWHERE.get(config.optimizer),
    )
