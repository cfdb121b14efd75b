"""`lowtide plan --model CONFIG.json`: a step of a model plain, checkpointed by hand, and under lowtide, in one table.

What: `settings_of` makes of the command line what a run file would say. `by_hand` has the rows that need no plan: every
activation kept, every layer checkpointed, every second layer; `of_plan` the row of a plan. `largest` finds for each of
them the largest batch, or the longest sequence, that fits. Rows by hand have the loss in one piece, as plain training
has it.
MFU counts the products of the plain step, whatever runs twice, over what large products reach on the device.
Cost: two traces for a table, two for each size that is tried (about five). Not covered: more than one micro-batch a
step; time of the optimizer's step, which is the same in all rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.config.loader import Locations
from lowtide.config.memory import MemoryConfig
from lowtide.config.run import DataConfig, ModelConfig, OptimizerKind, Precision, RunConfig, TrainConfig
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.text_table import align, percent
from lowtide.errors import BudgetError, ConfigError, FieldError
from lowtide.report.budget_sweep import BY_HAND, by_hand
from lowtide.timeline.hardware import Hardware
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

Grown = Literal["batch", "sequence"]
_LOWTIDE = "lowtide"
_UNIT = {"batch": 1, "sequence": 256}
"""Sizes that are tried are multiples of it."""
_FIRST_UNITS = 8
_KNOWN_UNITS = (_FIRST_UNITS, 1)
"""Sequences whose products are counted."""
_MOST_UNITS = 2**16
_MOST_LINES = 4
"""Sizes that are known, from which on growing is no longer guessed."""
_FIRST_TOKENS_IN_BLOCKS = 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to run a step, predicted."""

    name: str
    peak_bytes: int
    """The least that is possible, where there is no plan."""
    step_seconds: float | None
    """Forward and backward; None: no plan fits."""
    host_bytes: int = 0
    """Main memory that a rank needs for what is swapped."""
    fits: bool
    tokens_per_second: float | None
    mfu: float | None
    largest: int | None = None
    """The largest batch, or the longest sequence, where that was asked for; all other figures are of it."""
    set_by: str = ""
    """The operator that sets the least peak, where it was asked for."""


def is_of_model(args: argparse.Namespace) -> bool:
    """Whether a model is asked about, without a run file. Raises `ConfigError` for neither, and for both."""
    if args.model is None:
        if args.run is None:
            raise ConfigError("lowtide plan: give a run file, or --model with a config.json, a folder or a name")
        for option in ("batch", "sequence", "lora", "precision", "rows"):
            if getattr(args, option) is not None:
                raise ConfigError(f"--{option}: goes with --model; in a run file it is written in its section")
        return False
    if args.run is not None:
        raise ConfigError(f"--model: give either a run file or --model, not both; leave out {args.run}")
    for option in ("profile", "devices", "cluster", "export"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option}: needs a run file, and --model is instead of one; leave one of them out")
    return True


def settings_of(args: argparse.Namespace, kind: OptimizerKind) -> RunConfig:
    """The run that the command line describes, for `lowtide plan`: one micro-batch a step."""
    precision: Precision = args.precision or "bf16"
    options = {"batch_size": "--batch", "sequence_length": "--sequence", "rows": "--rows"}
    if args.lora is not None and args.lora < 1:
        raise ConfigError(f"--lora: must be at least 1, not {args.lora}")
    try:
        return RunConfig(
            model=ModelConfig(
                path=Path(args.model).expanduser(),
                dtype="bfloat16" if precision == "bf16" else "float32",
                lora=args.lora,
            ),
            data=DataConfig(sequence_length=2048 if args.sequence is None else args.sequence),
            train=TrainConfig(
                steps=1, batch_size=1 if args.batch is None else args.batch, precision=precision, optimizer=kind
            ),
            memory=MemoryConfig(budget="auto", rows=args.rows),
            output_dir=Path("runs"),
            places=Locations(places={"model": "--model", "data.sequence_length": "--sequence"}),
        )
    except FieldError as error:
        raise ConfigError(f"{options[str(error.path[0])]}: {error.message}") from None


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step of a run as plain training runs it, traced when it is asked for."""

    run: RunConfig
    hardware: Hardware
    budget_bytes: int
    say: Callable[[str], None]
    first: TracedStep | None = None
    """The same with another length, whose optimizer has the same state."""
    like: tuple[TracedStep, ...] = ()
    """The same with two other lengths: products grow with a length and its square."""

    @functools.cached_property
    def plain(self) -> Profile:
        """Its profile."""
        return self._traced(self.hardware, like=None if self.first is None else self.first.plain)

    @functools.cached_property
    def flops(self) -> float:
        """Of the products of forward and backward, on a device where each of these operations takes a second."""
        if self.like:
            return _through([(0, 0.0), *((step.num_tokens, step.flops) for step in self.like)], self.num_tokens)
        return sum(self._traced(counting(self.hardware), like=(self.first or self).plain).op_seconds)

    @property
    def num_tokens(self) -> int:
        """Of a sequence."""
        return self.run.data.sequence_length

    @property
    def names(self) -> tuple[str, str]:
        """Of the model, and of its batch."""
        shape = [self.run.train.batch_size, self.num_tokens]
        return (self.first or self).plain.model, f"input_ids=int64{shape}, labels=int64{shape}"

    def _traced(self, hardware: Hardware, *, like: Profile | None) -> Profile:
        from lowtide.cli.run_step import trace_run

        whole = dataclasses.replace(self.run, memory=MemoryConfig(loss="plain"))
        return trace_run(whole, hardware, say=self.say, like=like)

    def by_hand(self, name: str) -> Alternative:
        """A row of `BY_HAND`."""
        return self._row(name, *self.played(name))

    def played(self, name: str) -> tuple[int, float]:
        """Peak and seconds of a row of `BY_HAND`."""
        played = by_hand(self.plain, BY_HAND[name], link=self.hardware.link)
        return played.peak_bytes, played.step_seconds

    def of_plan(self, plan: Plan, name: str = _LOWTIDE) -> Alternative:
        """The row of lowtide's plan, its proofs of recipes included."""
        assert plan.predicted is not None
        swapped = sum(site.stored_bytes for site in plan.sites if site.fate is Fate.SWAP)
        moved = 0 if plan.optimizer is None else plan.optimizer.moved_bytes or 0
        moved += 0 if plan.weights is None else plan.weights.moved_bytes
        found = plan.predicted
        seconds = found.step_seconds + found.check_seconds
        return self._row(name, found.peak_bytes, seconds, host_bytes=swapped + moved)

    def refused(self, error: BudgetError, name: str = _LOWTIDE) -> Alternative:
        """The row where no plan fits."""
        return self._row(name, error.floor_bytes, None)

    def _row(self, name: str, peak_bytes: int, seconds: float | None, *, host_bytes: int = 0) -> Alternative:
        rate = self.hardware.flops_per_second
        fastest = rate.get("float32" if self.run.train.precision == "float32" else "bfloat16", rate["float32"])
        tokens = self.run.train.batch_size * self.run.data.sequence_length
        return Alternative(
            name=name,
            peak_bytes=peak_bytes,
            step_seconds=seconds,
            host_bytes=host_bytes,
            fits=peak_bytes <= self.budget_bytes and seconds is not None,
            tokens_per_second=tokens / seconds if seconds else None,
            mfu=self.flops / seconds / fastest if seconds else None,
        )


def _through(points: Sequence[tuple[int, float]], at: int) -> float:
    """What the curve through these points has at another place: a parabola, where there are three."""
    return sum(
        value * math.prod((at - other) / (place - other) for other, _ in points if other != place)
        for place, value in points
    )


Maker = Callable[[RunConfig, int | None], "Plan"]
"""Gives the plan of a run for the budget, or for another number of bytes. Raises `BudgetError`."""


def counting(hardware: Hardware) -> Hardware:
    """A device on which each floating point operation takes a second, and everything else no time."""
    return dataclasses.replace(
        hardware,
        flops_per_second=dict.fromkeys(hardware.flops_per_second, 1.0),
        attention={"flash": (1.0, 1.0)},
        ramp_tokens=0.0,
        memory_bytes_per_second=math.inf,
        eager_bytes_per_second=math.inf,
        launch_seconds=0.0,
        multiprocessors=0,
    )


# -- the largest that fits -----------------------------------------------------------------------------------------


def largest(
    run: RunConfig,
    hardware: Hardware,
    budget_bytes: int,
    grown: Grown,
    makes: Mapping[str, Maker],
    *,
    say: Callable[[str], None],
) -> tuple[TracedStep, list[Alternative], list[Alternative]]:
    """A step of the run, and a row for each way, at the largest size that fits; and, for layers in blocks, a row for
    each size that was tried for the last of `makes`, which are lowtide's ways by name."""
    rows: list[Alternative] = []
    tries: dict[int, Alternative] = {}

    how: Any = {"hardware": hardware, "budget_bytes": budget_bytes, "say": lambda text: None}
    most, unit = _most(run, grown), _UNIT[grown]
    known = [min(number * unit, most) for number in _KNOWN_UNITS]
    is_known = grown == "sequence" and len(set(known)) == len(known)
    like: list[TracedStep] = []
    for size in known if is_known else ():
        like.append(TracedStep(run=_grown(run, grown, size), first=like[0] if like else None, **how))

    @functools.cache
    def step_of(size: int) -> TracedStep:
        same = next((step for step in like if step.num_tokens == size), None)
        first = like[0] if like else None
        return same or TracedStep(run=_grown(run, grown, size), first=first, like=tuple(like), **how)

    def planned(name: str, size: int, error: BudgetError | None) -> Alternative:
        step = step_of(size or unit)
        if error is not None and error.floor_bytes > budget_bytes:
            row = step.refused(error, name)
        else:
            row = step.of_plan(makes[name](step.run, None), name)
        return dataclasses.replace(_at(row, size), set_by="" if error is None else error.set_by)

    def floor_of(name: str, size: int) -> int:
        say(f"{name}: trying a {grown} of {size:,}")
        try:
            made = makes[name](_grown(run, grown, size), 1).predicted
        except BudgetError as error:
            if block is not None and name == list(makes)[-1]:
                tries[size] = planned(name, size, error)
            return error.floor_bytes
        assert made is not None
        return made.peak_bytes

    def peak_of(name: str, size: int) -> int:
        say(f"{name}: trying a {grown} of {size:,}")
        return step_of(size).played(name)[0]

    for name in BY_HAND:
        size = _search(lambda size, name=name: peak_of(name, size), budget_bytes, unit, most)  # type: ignore[misc]
        rows.append(_at(step_of(size or unit).by_hand(name), size))
    block = None if run.memory is None or grown == "batch" else run.memory.rows
    first = _FIRST_UNITS
    if block is not None:
        unit = max(unit, block)
        first = max(1, _FIRST_TOKENS_IN_BLOCKS // unit)
    for name in makes:
        size = _search(lambda size, name=name: floor_of(name, size), budget_bytes, unit, most, first)  # type: ignore[misc]
        rows.append(tries.get(size) or planned(name, size, None))
    return step_of(size or unit), rows, [tries[size] for size in sorted(tries)]


def _at(row: Alternative, size: int) -> Alternative:
    return dataclasses.replace(row, largest=size, fits=row.fits and size > 0)


def _grown(run: RunConfig, grown: Grown, size: int) -> RunConfig:
    if grown == "batch":
        return dataclasses.replace(run, train=dataclasses.replace(run.train, batch_size=size))
    return dataclasses.replace(run, data=dataclasses.replace(run.data, sequence_length=size))


def _most(run: RunConfig, grown: Grown) -> int:
    """The largest size that is tried: what the model has positions for."""
    if grown == "batch":
        return _MOST_UNITS
    from lowtide.cli.run_model import model_config, most_positions

    return most_positions(run, model_config(_grown(run, grown, 2))) or _MOST_UNITS * _UNIT[grown]


def _search(
    peak: Callable[[int], int], budget_bytes: int, unit: int, most: int, first_units: int = _FIRST_UNITS
) -> int:
    """The largest size whose peak is within the budget; 0 where not even the smallest is. Peaks grow nearly in
    proportion, so a straight line through the largest that fits and what was tried next to it is a good guess; where a
    few such guesses have found none that does not fit, sizes grow fourfold, and where two have not halved what is left,
    the middle is tried."""
    known = {0: 0}
    low, high = 0, max(most // unit, 1) + 1
    guess, num_misses = min(first_units, high - 1), 0
    while high - low > 1:
        left = high - low
        known[guess] = peak(min(guess * unit, most))
        if known[guess] <= budget_bytes:
            low = guess
        else:
            high = guess
        num_misses = num_misses + 1 if num_misses < 2 and 2 * (high - low) > left else 0
        is_open = high not in known
        if is_open and not 2 < len(known) <= _MOST_LINES:
            guess, num_misses = 4 * low, 0
        else:
            line = _by_line(known, low, budget_bytes) if is_open or num_misses < 2 else None
            guess = line or (4 * low if is_open else (low + high) // 2)
        guess = min(max(guess, low + 1), high - 1)
    return min(low * unit, most)


def _by_line(known: Mapping[int, int], low: int, budget_bytes: int) -> int | None:
    """Where the line through `low` and the size next to it reaches the budget; where that is past the least size that
    does not fit, where the line between the two does. None where it does not rise."""
    above = min((size for size in known if size > low), default=None)
    nearest = min((size for size in known if size and size != low), key=lambda size: abs(size - low))
    guess = _where(known, low, nearest, budget_bytes)
    if above is not None and (guess is None or guess >= above):
        return _where(known, low, above, budget_bytes)
    return guess


def _where(known: Mapping[int, int], low: int, other: int, budget_bytes: int) -> int | None:
    growth = (known[other] - known[low]) / (other - low)
    return low + int((budget_bytes - known[low]) / growth) if growth > 0 else None


# -- what is printed -----------------------------------------------------------------------------------------------


def lines(
    step: TracedStep,
    rows: Sequence[Alternative],
    weights: Mapping[str, torch.nn.Parameter],
    grown: Grown | None,
    width: int | None,
    *,
    tries: Sequence[Alternative] = (),
) -> list[str]:
    """The question in one line, the table, that of sizes that were tried, and what two of its columns are."""
    notes = ["MFU: the products of the plain step, as a share of what the device computes in that time with large ones"]
    if any(row.host_bytes for row in rows):
        notes.append("main memory: what a rank needs of it for what is swapped")
    notes += _positions_notes(step.run, rows, grown)
    table = _table(rows, grown)
    tried = _table(tries, grown, tried=True) if tries else []
    return [
        _question(step, weights, grown),
        f"one {step.hardware.name}, of which the budget is {format_bytes(step.budget_bytes)}; nothing has run",
        "",
        *align(table, numeric=tuple(range(1, len(table[0]) - 1)), width=width),
        "",
        *(align(tried, numeric=tuple(range(1, len(tried[0]) - 1)), width=width) if tried else ()),
        *([""] if tried else ()),
        *notes,
    ]


def _positions_notes(run: RunConfig, rows: Sequence[Alternative], grown: Grown | None) -> list[str]:
    """Where a sequence is as long as the model has positions for, or longer than it was made for."""
    from lowtide.cli.run_model import model_config, most_positions

    lengths = [row.largest or 0 for row in rows] if grown == "sequence" else [run.data.sequence_length]
    config = model_config(run)
    made_for = getattr(config.get_text_config(), "max_position_embeddings", None)
    if made_for is None or max(lengths) < made_for:
        return []
    if most_positions(run, config) is None:
        longer = f"the model is made for sequences of up to {made_for:,} (max_position_embeddings)"
        return [longer] if max(lengths) > made_for else []
    return [f"{made_for:,}: the model has no positions for more (max_position_embeddings)"]


def _table(rows: Sequence[Alternative], grown: Grown | None, *, tried: bool = False) -> list[tuple[str, ...]]:
    """The head and a line for each row, without columns that have nothing to say. `tried`: of sizes that were tried."""
    plain = rows[0].step_seconds
    lines = []
    for row in rows:
        what = f"tried {grown}" if tried else f"largest {grown}"
        size = {} if grown is None else {what: f"{row.largest:,}" if row.largest else "none"}
        over = "-" if row.step_seconds is None or not plain else f"+{percent(row.step_seconds / plain - 1)}"
        lines.append(
            {
                "predicted": row.name,
                **size,
                "peak": format_bytes(row.peak_bytes),
                "step": "-" if row.step_seconds is None else format_seconds(row.step_seconds),
                **({"over plain": over} if grown is None else {}),
                "tokens/s": "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
                "MFU": "-" if row.mfu is None else f"{100 * row.mfu:.0f} %",
                "main memory": format_bytes(row.host_bytes) if row.host_bytes else "-",
                **({"the floor is set by": row.set_by} if tried else {}),
                "": "" if row.fits else "does not fit",
            }
        )
    names = [name for name in lines[0] if name != "main memory" or any(row.host_bytes for row in rows)]
    return [tuple(names), *(tuple(line[name] for name in names) for line in lines)]


def _question(step: TracedStep, weights: Mapping[str, torch.nn.Parameter], grown: Grown | None) -> str:
    run, count = step.run, sum(weight.numel() for weight in weights.values())
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)
    batch = "as many as fit" if grown == "batch" else f"{run.train.batch_size}"
    tokens = "as many tokens as fit" if grown == "sequence" else f"{run.data.sequence_length:,} tokens"
    which = f", {_millions(trained)} of them trained" if trained < count else ""
    return (
        f"{step.names[0]} of {_millions(count)} parameters{which}; {batch} x {tokens}, "
        f"{run.train.precision}, {run.train.optimizer}"
    )


def _millions(count: int) -> str:
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def document(
    step: TracedStep, rows: Sequence[Alternative], plan: Plan | None, tries: Sequence[Alternative]
) -> dict[str, object]:
    """The same as plain data."""
    return {
        "model": step.names[0],
        "batch": step.names[1],
        "device": step.hardware.name,
        "budget_bytes": step.budget_bytes,
        "flops": step.flops,
        "rows": [dataclasses.asdict(row) for row in rows],
        "tries": [dataclasses.asdict(row) for row in tries],
        "digest": None if plan is None else plan.digest(),
        **({} if plan is None or plan.weights is None else {"weights": dataclasses.asdict(plan.weights)}),
    }
