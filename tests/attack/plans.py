"""Plans for models that nobody named: written by rules, solved, drawn at random, or left to the autopilot.

A `Rig` puts a plan on a model, and takes it off; `PlainRig` is what a run without lowtide has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import lowtide
from lowtide.config.memory import MemoryConfig
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.log import Listener
from lowtide.errors import BudgetError, ConfigError
from lowtide.loss.attach import attach_where
from lowtide.runtime.autopilot.autopilot import SEVERAL_PASSES
from lowtide.runtime.offload.selective import SelectiveOffload
from tests.attack.habits import Run
from tests.attack.hidden import CONTEXTS, SelectiveCells
from tests.attack.models import batch_of, build, loss_of
from tests.attack.now import Now
from tests.attack.traces import Trace
from tests.attack.words import plain_cross_entropy
from tests.support.independent_count import IndependentCount
from tests.support.solved import random_plan
from tests.support.virtual_engine import VirtualEngine, virtual

PLANNED_WEIGHTS = "weights by plan, in_backward"
"""A state: `memory.weights: swap`, which updates in backward."""
KINDS = ("keep", "swap", "recompute", "both", "leaves", "mixed", "solved", "planned", "optimize")
WITH_BUDGET = frozenset({"planned", "optimize"})
MEMORY = {"min_bytes": 0}
_OVERLAPS = ("step", "backward")


class OverBudget(Exception):
    """More bytes were alive than the budget allows."""


class Broken(Exception):
    """Something other than a value is wrong: a breach of order, memory that is not given back, a floor that is none."""


class PlainRig:
    """No plan at all."""

    def start(self, model: nn.Module, optimizer: Any) -> None:
        """Nothing to put on."""

    stop = suspend = resume = settle = lambda self, *args: None

    cross_entropy = staticmethod(plain_cross_entropy)

    def step(self, closure: Callable[[], Any]) -> Any:
        return closure()

    @contextlib.contextmanager
    def counted(self, run: Run) -> Iterator[None]:
        yield


class RowsRig(PlainRig):
    """No plan, and layers, or what is `row_wise`, and head and loss in blocks of `rows` rows."""

    def __init__(self, rows: int, row_wise: tuple[str, ...]) -> None:
        self._how = MemoryConfig(rows=rows, row_wise=row_wise).slices_loss
        self._blocks = contextlib.ExitStack()

    def start(self, model: nn.Module, optimizer: Any) -> None:
        self.stop()
        self._blocks.enter_context(attach_where(model, **self._how))

    def stop(self) -> None:
        self._blocks.close()


@dataclass
class Rig:
    """One plan, on and off a model."""

    apply: Callable[[nn.Module, Any, Any], Any]
    """Puts the plan on: model, optimizer, engine."""
    engine_name: str
    budget_bytes: int | None = None
    is_counted: bool = False
    floor_bytes: int | None = None
    """The least that lowtide said could be reached."""
    state: str = "stays"
    """Of draw.STATES."""
    may_stay: bool = False
    """Whether the run goes on without a swap that was refused."""
    tide: Any = None
    swap: Any = None
    peaks: list[tuple[int, int]] = field(default_factory=list)
    """Of each counted forward and backward: lowtide's audit (0 where it had none), and the independent count."""
    _live: IndependentCount | None = None
    _engines: list[VirtualEngine] = field(default_factory=list)
    _is_suspended: bool = False
    _removed: list[Any] = field(default_factory=list)
    """Handles of weights."""

    def start(self, model: nn.Module, optimizer: Any) -> None:
        """Put the plan on, and have the optimizer's state elsewhere."""
        if self.tide is not None or self.swap is not None:
            self.stop()
        if self.state.startswith("weights") and self.state != PLANNED_WEIGHTS:
            update = "in_backward" if self.state.endswith("in_backward") else "step"
            self.swap = lowtide.swap_weights(model, optimizer, update=update, min_bytes=1, engine=self._engine())
        self.tide = self.apply(model, optimizer, self._engine())
        if self.state != "stays" and "by plan" not in self.state and not self.state.startswith("weights"):
            way = {"tier": "mapped"} if self.state == "mapped" else {"overlap": self.state}
            options: dict[str, Any] = {**way, "bucket_bytes": 4096, "min_bytes": 1}
            with contextlib.suppress(*((ConfigError,) if self.may_stay else ())):
                self.swap = lowtide.swap_optimizer(optimizer, engine=self._engine(), **options)

    def _engine(self) -> Any:
        if not self.engine_name.startswith("virtual"):
            return self.engine_name
        self._engines.append(VirtualEngine(int(self.engine_name.partition(":")[2])))
        return self._engines[-1]

    def stop(self) -> None:
        """Take both off."""
        is_optimizer = hasattr(self.swap, "detach")
        if is_optimizer:
            self.swap.detach()
        if isinstance(self.tide, SelectiveOffload):
            self.tide.close()
        elif self.tide is not None:
            self.tide.remove()
        self.tide, self._is_suspended = None, False
        if self.swap is not None and not is_optimizer:
            self.swap.remove()
            self._removed.append(self.swap)
        self.swap = None

    def suspend(self) -> None:
        """Leave the model alone for a while."""
        if hasattr(self.tide, "suspend"):
            self.tide.suspend()
            self._is_suspended = True

    def resume(self) -> None:
        if self._is_suspended:
            self.tide.resume()
        self._is_suspended = False

    def cross_entropy(self, *args: Any, **kwargs: Any) -> Any:
        """What a loop calls that has lowtide."""
        return lowtide.cross_entropy(*args, **kwargs)

    def step(self, closure: Callable[[], Any]) -> Any:
        return closure() if self.tide is None else self.tide.step(closure)

    def _hear(self, line: str) -> None:
        # From here on the step is the planned one; what was observed before it is not what the budget is about. A plan
        # that is made in the middle of a step, with nothing observed, must keep it all along.
        if self._live is not None and line.startswith("lowtide: plan") and SEVERAL_PASSES not in line:
            self._live.restart()

    @contextlib.contextmanager
    def counted(self, run: Run) -> Iterator[None]:
        """Count live bytes inside. Raises OverBudget where they passed the budget."""
        if not self.is_counted or self.budget_bytes is None:
            yield
            return
        state = [*run.model.parameters(), *run.model.buffers(), list(run.optimizer.state.values())]
        state += [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        tide = getattr(self.tide, "tide", self.tide)
        self._live = IndependentCount(state)
        del state  # else gradients that are set to zero would stay
        audit = None
        with Listener(self._hear), self._live:
            if tide is None:
                yield
            else:
                with tide.audit() as audit:
                    yield
        # An autopilot that plans anew in between has another tide then.
        is_same = tide is not None and tide is getattr(self.tide, "tide", self.tide)
        audited = audit.peak_bytes if is_same and audit is not None else 0
        self.peaks.append((audited, self._live.peak_bytes))
        self._live = None

    def check_budget(self, *, but: int | None = None) -> None:
        """Raise OverBudget if any step was, but for one that showed something new."""
        budget = self.budget_bytes
        over = [(step, *both) for step, both in enumerate(self.peaks) if budget is not None and max(both) > budget]
        over = [found for found in over if found[0] != but or len(over) > 1]
        if over:
            assert budget is not None
            listed = ", ".join(
                f"step {step}: audit {audited / budget:.3f}, count {counted / budget:.3f}"
                for step, audited, counted in over
            )
            raise OverBudget(f"budget {budget} bytes; {listed}; of {len(self.peaks)} counted")

    def check_engines(self) -> None:
        """Raise Broken for a breach of order, or memory that nobody gives back. When no graph is alive any more."""
        for engine in self._engines:
            if engine.violations:
                raise Broken(f"virtual engine: {engine.violations[0]}")
            if engine.num_slots:
                for handle in self._removed:
                    forget_graphs(handle.model)
                gc.collect()
                for handle in self._removed:
                    handle.remove()  # slots that a graph, or the loop, held when it was called first
            if engine.num_slots:
                raise Broken(f"{engine.num_slots} slots of the virtual engine are never given back")


def forget_graphs(model: nn.Module) -> None:
    """A model may keep a graph that was not freed: the old `spectral_norm` leaves the weight that it made as an
    attribute, and only a part of that may have been differentiated. It is alive as long as the model, which a handle
    on its weights holds."""
    for module in model.modules():
        for name, value in [*vars(module).items()]:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                delattr(module, name)


def rig_for(kind: str, seed: int, draw: Any) -> Rig:
    """The rig for a kind of plan. Raises what observing and planning raise."""
    rig = _rig_of_plan(kind, seed, draw)
    rig.state, rig.may_stay = draw.state, draw.fault == "trial_of_an_optimizer"
    rig.is_counted &= draw.state == "stays"  # else buckets are on the device too
    return rig


def _rig_of_plan(kind: str, seed: int, draw: Any) -> Rig:
    r = Random(f"{seed} plan")
    if kind == "looked":
        return Rig(_looking(draw, r), draw.engine)
    if kind == "selective":
        return Rig(_selecting, draw.engine)
    if kind == "optimize":
        return _optimized(draw, r)
    if kind == "planned":
        return _planned(draw, r)
    if kind == "solved":
        profile = _on_twin(draw, _observing(draw))
        plan = random_plan(profile, seed, made=r.choice((0.3, 0.5, 1.0)), swapped=r.choice((0.0, 0.3, 1.0)))
        rows: dict[str, Any] = {key: getattr(profile, key) for key in ("loss_rows", "layer_rows", "row_wise")}
        plan = dataclasses.replace(plan, loss=profile.loss, optimizer=_placement(draw), **rows)
        return Rig(_applying(plan), draw.engine)
    more: dict[str, Any] = _moving(draw, "swap") | _rows(draw)
    if draw.slices_loss and not draw.rows:
        more["loss"] = "sliced"
    return Rig(_applying({**_rules(kind, draw, r), **more}), draw.engine)


def _looking(draw: Any, r: Random) -> Callable[..., Any]:
    """A plan or a profile is made of the model, and not used: training goes on as if nobody had looked."""
    given = batch_of(draw.model, 5, draw.num_samples) | {"now": Now()}
    batch = {key: value for key, value in given.items() if key != "labels" or draw.model.own_loss}

    def look(model: nn.Module, optimizer: Any, engine: Any) -> None:
        more: dict[str, Any] = {} if draw.model.own_loss else {"loss": lambda out: loss_of(out, given["labels"])}
        if r.random() < 0.5:
            lowtide.plan(model, batch, budget="1GiB", optimizer=optimizer, hardware="cpu", memory=MEMORY, **more)
        else:
            lowtide.observe(model, batch, **more)

    return look


def _selecting(model: nn.Module, optimizer: Any, engine: Any) -> Any:
    """Blocks that checkpoint themselves offload what they save."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        # Not sums and products: the cells write to those, their counters tell of it, and that is refused.
        is_saved = "chunk" in str(op) or "split" in str(op)
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    offload = lowtide.selective_offload(policy, model, min_bytes=1, engine=engine)
    for module in model.modules():
        if isinstance(module, SelectiveCells):
            CONTEXTS[module] = offload
    return offload


def _moving(draw: Any, state: str) -> dict[str, Any]:
    """What `memory` says of the optimizer's state."""
    if draw.state == PLANNED_WEIGHTS:
        return {"weights": "swap"}
    if "by plan" not in draw.state:
        return {}
    return {"optimizer": "in_backward" if draw.updates_early else state}


def _rows(draw: Any) -> dict[str, Any]:
    """What `memory` says of blocks of rows."""
    return {"rows": draw.rows, **({"row_wise": [*draw.row_wise]} if draw.row_wise else {})} if draw.rows else {}


def _placement(draw: Any) -> OptimizerPlacement | None:
    """The same in a plan that nobody has solved for it; a bucket for each weight."""
    if draw.state not in ("by plan", "in_backward by plan"):
        return None
    overlap: Any = "in_backward" if draw.updates_early else Random(f"{draw.seed} overlap").choice(_OVERLAPS)
    return OptimizerPlacement(moved_bytes=None, bucket_bytes=4096, overlap=overlap, reason="drawn")


def _observing(draw: Any) -> Callable[[nn.Module, Any], Any]:
    """`lowtide.observe`, with the loss in slices, or layers in blocks, as the plan has them."""
    how: dict[str, Any] = {"may": draw.slices_loss, "must": draw.slices_loss}
    how = MemoryConfig(rows=draw.rows, row_wise=draw.row_wise).slices_loss if draw.rows else how

    def observe(model: nn.Module, batch: Any) -> Any:
        with attach_where(model, **how):
            return lowtide.observe(model, batch)

    return observe


def _applying(memory: Any) -> Callable[..., Any]:
    return lambda model, optimizer, engine: lowtide.apply(model, memory, optimizer=optimizer, engine=engine)


def _rules(kind: str, draw: Any, r: Random) -> dict[str, Any]:
    model = build(draw.model, draw.seed)
    names = [name for name, _ in model.named_modules() if name]
    leaves = [name for name, module in model.named_modules() if name and not list(module.children())]
    if kind == "keep":
        return {**MEMORY, "keep": ["*"]}
    if kind == "swap":
        return {**MEMORY, "swap": "all"}
    if kind == "recompute":
        return {**MEMORY, "recompute": "all"}
    if kind == "both":
        return {**MEMORY, "recompute": "all", "swap": "all"}
    if kind == "leaves":
        return {**MEMORY, "recompute": leaves[:: r.choice((1, 1, 2))], "swap": r.choice(("all", "none"))}
    fates: dict[str, list[Any]] = {"recompute": [], "swap": [], "keep": []}
    for name in names:
        fates[r.choice(("recompute", "swap", "swap", "keep", "keep", "keep"))].append(name)
    tier = Random(f"{draw.seed} tier").choice((None, "disk", "host" if draw.engine.startswith("virtual") else "disk"))
    if tier is not None:
        fates["swap"] = [{"match": name, "tier": tier} for name in fates["swap"]]
    return {**MEMORY, **{fate: listed for fate, listed in fates.items() if listed}}


def _on_twin(draw: Any, do: Callable[[Any, Callable[[], Any]], Any]) -> Any:
    """Something done to another model of the same draw, with the loss of its first step."""
    run = draw.new_run(PlainRig(), Trace())
    run.trace.note = lambda *args: None  # type: ignore[method-assign]
    for side in run.sides:
        side.before(run, 0)
    return do(run.model, lambda: run.forward(0))


class _Counting(PlainRig):
    """Counts the bytes that are alive in each step of a plain run."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextlib.contextmanager
    def counted(self, run: Run) -> Iterator[None]:
        state = [*run.model.parameters(), *run.model.buffers(), list(run.optimizer.state.values())]
        state += [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
        with IndependentCount(state) as live:
            yield
        self.peak_bytes = max(self.peak_bytes, live.peak_bytes)


def plain_peak(draw: Any) -> int:
    """The most bytes alive without a plan: in the first step, or of a draw for a class of faults in any."""
    if draw.fault and draw.is_lean:
        counting = _Counting()
        train = draw.new_run(counting, Trace())
        for step in range(draw.num_steps):
            train.play(step)
        return counting.peak_bytes
    run = draw.new_run(PlainRig(), Trace())
    for side in run.sides:
        side.before(run, 0)
    with IndependentCount([*run.model.parameters(), *run.model.buffers()]) as live:
        run.backward(run.forward(0))
    return live.peak_bytes


def _limits(r: Random) -> dict[str, Any]:
    return r.choice(({}, {}, {}, {"swap": "none"}, {"recompute": "none"}))


def _optimized(draw: Any, r: Random) -> Rig:
    share, limits = r.choice((0.0, 0.05, 0.2, 0.8, 1.5)), {**MEMORY, **_limits(r), **_rows(draw)}
    is_counted = r.random() < 0.6
    limits |= _moving(draw, Random(f"{draw.seed} moved").choice(("auto", "swap")))
    if draw.fault:
        share, is_counted = r.choice((0.75, 0.9, 1.5) if draw.is_lean else (0.05, 0.2, 0.8)), True
    peak, floor = plain_peak(draw), None

    def apply(budget: int) -> Callable[..., Any]:
        return lambda model, optimizer, engine: lowtide.optimize(
            model, budget=budget, memory=limits, optimizer=optimizer, engine=engine, strict=True
        )

    budget = int(peak * share)
    if share < 0.5:
        floor = _floor(draw, apply(1024))
        budget = floor + 64 + int(share * max(0, peak - floor))
    return Rig(apply(budget), draw.engine, budget, is_counted and draw.is_lean, floor)


def _floor(draw: Any, apply: Callable[..., Any]) -> int:
    """What the autopilot says is the least that can be reached."""
    run = draw.new_run(PlainRig(), Trace())
    for side in run.sides:
        side.before(run, 0)
    tide = apply(run.model, run.optimizer, virtual(0))
    try:
        run.forward(0)
    except BudgetError as error:
        return error.floor_bytes
    finally:
        tide.remove()
    raise Broken("a budget of 1,024 bytes was not refused")


def _planned(draw: Any, r: Random) -> Rig:
    share, is_counted = r.choice((0.0, 0.1, 0.4)), r.random() < 0.6
    limits = {**MEMORY, **_limits(r), **_rows(draw)}

    def plan(budget: int) -> Any:
        return _on_twin(
            draw, lambda model, loss: lowtide.plan(model, loss, budget=budget, memory=limits, hardware="cpu")
        )

    try:
        plan(1024)
    except BudgetError as error:
        floor = error.floor_bytes
    else:
        raise Broken("a budget of 1,024 bytes was not refused")
    budget = floor + 64 + int(share * max(0, plain_peak(draw) - floor))
    try:
        made = plan(budget)
    except BudgetError as error:
        raise Broken(f"refused a budget above its own floor, {floor} bytes: {error}") from error
    # Planned without the optimizer's state, which SGD with momentum has from the second step on.
    made = dataclasses.replace(made, optimizer=_placement(draw))
    return Rig(_applying(made), draw.engine, budget, is_counted and draw.is_lean and draw.optimizer == "sgd")
