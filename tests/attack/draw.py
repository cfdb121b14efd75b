"""One draw: a model, habits, a plan and an engine, all from one integer; and the verdict on it.

`drawn_from(seed)` says what is tried; `judge(draw)` runs it plain and under its plan and compares. A `Draw` is data: it
can be printed, read again, and made smaller (shrink.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.errors import BudgetError, ConfigError
from tests.attack import chosen, classes, moody, ordinary
from tests.attack.classes import CHANGE, CLASSES, COUNTED_CORES, NOT_YET
from tests.attack.habits import CORES, LEAN_CORES, RARE_SIDES, SIDES, WORD_SIDES, Run, own_process_state
from tests.attack.models import TRAITS, ModelDraw, build
from tests.attack.now import TOKENS, WAYS
from tests.attack.plans import (
    KINDS,
    PLANNED_WEIGHTS,
    WITH_BUDGET,
    Broken,
    OverBudget,
    PlainRig,
    RowsRig,
    plain_peak,
    rig_for,
)
from tests.attack.traces import Trace, process_state
from tests.attack.words import SAMPLES, WordLoss, drawn_loss

WRONG = ("silently wrong", "error lost", "crash", "over budget", "left behind", "broken", "killed", "no end")

SEES_ALL = frozenset({"keep", "swap", "solved"})
"""Plans that run no region again. Of what a region reads, docs/contract.md (5) leaves two things out: writes through
`.data`, and state that only functions further down know of, such as our global numbers."""


_ALL_SIDES = {**SIDES, **RARE_SIDES, **WORD_SIDES, **classes.SIDES}
_ALL_CORES = {**CORES, **classes.CORES}

STATES = ("stays", "step", "backward", "in_backward", "auto", "mapped", "by plan")
"""Of `lowtide.swap_optimizer` the ways to overlap, or tier 'mapped'; or where a plan has it (`memory.optimizer`)."""
EARLY_BY_PLAN = "in_backward by plan"
"""`memory.optimizer: in_backward`: of half the draws in which a plan has the state."""
WEIGHTS = ("weights", "weights in_backward")
"""Weights are elsewhere too (`lowtide.swap_weights`), with its two ways to update."""
NOT_SIDES = ("averages", "clips", "gradient_hooks", "writes_gradients")
NOT_CORES = ("accumulate", "failing_backward", "in_closure", "in_flight", "retained")
"""What docs/optimizer.md leaves out of updates in backward: several backward passes, and what is looked at between the
pass and the step."""
_ROW_BLOCKS = ("pointwise", "gated", "own_norm", "nested", "casts", "tied")
_DECLARED = ("adapted", "mixed", "talking", "counting", "reparametrized", "dropouts", "checkpointed", "hooked")
_BLOCKS_TO_REFUSE = ("attention", "in_place", "placed", "lent")
"""In some of their forms."""


@dataclass(frozen=True)
class Draw:
    """What is tried."""

    seed: int
    model: ModelDraw
    way: str
    core: str
    sides: tuple[str, ...]
    optimizer: str
    plan: str
    engine: str
    num_samples: int = 4
    num_steps: int = 4
    state: str = "stays"
    """Where the optimizer's state is: see `STATES`; and `WEIGHTS`."""
    fault: str = ""
    """Of `CLASSES`: the draw is made for it, and ordinary otherwise."""
    rows: int = 0
    """Of `memory.rows`: layers, and head and loss, are in blocks; 0: they are whole."""
    row_wise: tuple[str, ...] = ()
    """Of `memory.row_wise`: what is in such blocks in place of layers."""

    @property
    def is_lean(self) -> bool:
        """Nothing but what a budget counts is alive in a step."""
        is_lean = self.core in LEAN_CORES or self.core in COUNTED_CORES
        return is_lean and self.model.own_loss and all(_ALL_SIDES[name].is_lean for name in self.sides)

    @property
    def slices_loss(self) -> bool:
        """Whether its model has a loss that `memory.loss` can slice."""
        return self.model.words is not None and self.model.words.place in ("function", "masked")

    @property
    def updates_early(self) -> bool:
        """Whether backward has updated the model when it ends."""
        return "in_backward" in self.state

    def truth_rig(self) -> PlainRig:
        """What the plan must be equal to: plain, or the declared rows without a plan where there are several blocks."""
        num_rows = self.num_samples * TOKENS
        is_one_block = self.rows >= num_rows and not {"sizes", "lengths"} & set(self.sides)
        return PlainRig() if not self.rows or is_one_block else RowsRig(self.rows, self.row_wise)

    def to_text(self) -> str:
        """One line, to be read by `from_text`."""
        fields = dataclasses.asdict(self)
        fields["model"]["traits"] = sorted(self.model.traits)
        return json.dumps(fields, separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Draw:
        """The draw that `to_text` wrote."""
        fields = json.loads(text)
        model = fields.pop("model")
        layers = tuple(tuple((name, seed) for name, seed in layer) for layer in model["layers"])
        words = model.get("words")
        words = None if words is None else WordLoss(**words)
        drawn = ModelDraw(layers, frozenset(model["traits"]), model["own_loss"], words)
        return Draw(**{**fields, "model": drawn, **{key: tuple(fields[key]) for key in ("sides", "row_wise")}})

    def describe(self) -> str:
        """For people."""
        layers = " | ".join("+".join(f"{name}:{seed}" for name, seed in layer) for layer in self.model.layers)
        words = "" if self.model.words is None else f"{self.model.words}; "
        return (
            f"seed {self.seed}: {layers}; traits {', '.join(sorted(self.model.traits)) or 'none'}; "
            f"{'own loss; ' if self.model.own_loss else ''}{words}numbers {self.way}; {self.core}"
            f"{''.join(' + ' + side for side in self.sides)}; {self.optimizer}, state {self.state}; plan {self.plan}"
            f"{f' in blocks of {self.rows} rows' if self.rows else ''}"
            f"{' of ' * bool(self.row_wise)}{', '.join(self.row_wise)}; "
            f"engine {self.engine}; {self.num_steps} steps of {self.num_samples} samples"
        )

    def new_run(self, rig: Any, trace: Trace) -> Run:
        """A fresh model, optimizer and habits, and random states as at the start."""
        seed_all(self.seed)
        model = build(self.model, self.seed)
        if self.core == "delayed":
            only_biases(model)
        run = Run(model, make_optimizer(self.optimizer, model), self.model, self.way, self.seed, rig, trace)
        run.size = (self.num_samples, TOKENS)
        run.sides = [_ALL_SIDES[name]() for name in self.sides]
        for side in run.sides:
            side.start(run)
        run.optimizer_steps = self.core != "searching"
        run.play = lambda step: _step(self, run, step)
        trace.sees_gradients = not self.updates_early  # the backward pass may have used and freed them
        seed_all(self.seed + 1)
        return run


def drawn_from(seed: int) -> Draw:
    """The draw of a seed. Two of five are made for a class of faults that was found once."""
    r = Random(f"{seed} class")
    name = r.choice(sorted(CLASSES))
    return of_class(name, seed) if r.random() < 0.4 and name not in NOT_YET else any_draw(seed)


def of_class(name: str, seed: int) -> Draw:
    """A draw for this class of faults."""
    r, fault = Random(f"{seed} {name}"), CLASSES[name]
    layers = [((fault.block or block, r.randrange(1000)),) for block in fault.layers]
    if fault.block:
        layers.append(((r.choice(fault.layers), r.randrange(1000)),))
    layers += r.choices(layers, k=r.choice((0, 1)))
    plan = r.choice(fault.plans)
    own_loss = (plan in WITH_BUDGET or r.random() < 0.5) if fault.own_loss is None else fault.own_loss
    return Draw(
        seed,
        ModelDraw(tuple(layers), frozenset(r.choice(((), (), ("post_norm",), ("keywords",)))), own_loss),
        way="steady",
        core=fault.core,
        sides=(fault.side,) if fault.side else (),
        optimizer=fault.optimizer or r.choice(("sgd", "adamw")),
        plan=plan,
        engine=r.choice(("host", f"virtual:{r.randrange(100)}")),
        num_samples=16,
        num_steps=fault.num_steps,
        state=r.choice(fault.states),
        fault=name,
    )


def any_draw(seed: int) -> Draw:
    """A draw of anything. Most of it is ordinary: of too many odd parts at once, the first would hide the rest."""
    r = Random(seed)
    pool = [_layer(r) for _ in range(r.choice((1, 1, 2)))]
    layers = tuple(r.choice(pool) for _ in range(r.choice((2, 3, 4))))
    traits = frozenset(r.sample(TRAITS, r.choice((0, 0, 1, 1, 2, 3))))
    way = r.choice(("steady", "steady", "argument", "argument", "argument", "mapping", "attribute", "attribute"))
    if r.random() < 0.04:
        way = "global"
    assert way in WAYS
    sides = tuple(r.sample(sorted(SIDES), r.choice((0, 0, 0, 1, 1, 2))))
    core = r.choice(sorted(CORES)) if r.random() < 0.6 else r.choice(sorted(LEAN_CORES))
    plan = r.choice((*KINDS, "optimize", "optimize", "solved", "recompute"))
    optimizer = r.choice(("sgd", "momentum", "adamw", "wrapped"))
    engine = r.choice(("host", "virtual:0", "virtual:1", f"virtual:{r.randrange(100)}"))
    if plan not in SEES_ALL:
        sides = tuple(side for side in sides if side != "writes_data")
        way = "attribute" if way == "global" else way
    own_loss = plan in WITH_BUDGET or r.random() < 0.3
    if core == "searching":
        optimizer = "lbfgs"
    state = Random(f"{seed} state").choice(("stays", "stays", "stays", *STATES)) if optimizer != "lbfgs" else "stays"
    if state == "stays" and optimizer != "lbfgs" and Random(f"{seed} weights").random() < 0.25:
        state = Random(f"{seed} weights").choice(WEIGHTS)
    if state == "by plan":
        state = Random(f"{seed} early").choice((state, EARLY_BY_PLAN))
    if state == "stays" and plan == "optimize" and Random(f"{seed} planned weights").random() < 0.2:
        state = PLANNED_WEIGHTS if optimizer != "lbfgs" else state
    if state in ("by plan", EARLY_BY_PLAN, PLANNED_WEIGHTS):
        layers = (*layers, (("wide", 0),))
        optimizer = "momentum" if optimizer == "sgd" else optimizer  # which has no state
    model = ModelDraw(layers, traits, own_loss)
    # What changes in a few elements shows in any sample of a small tensor, and in few samples of a large one.
    num_samples = r.choice((4, 4, 4, 64))
    rare = Random(f"{seed} rare")
    sides += ("writes_gradients",) if rare.random() < 0.05 else ()
    sides += ("unscales_gradients",) if Random(f"{seed} unscales").random() < 0.05 else ()
    sides += ("freezes_between",) if state != "stays" and "freezes_between" not in sides and rare.random() < 0.1 else ()
    draw = Draw(seed, model, way, core, sides, optimizer, plan, engine, num_samples, state=state)
    if draw.updates_early:
        sides = tuple(side for side in sides if side not in NOT_SIDES)
        draw = dataclasses.replace(draw, sides=sides, core="plain" if core in NOT_CORES else core)
    words = drawn_loss(seed, is_inside=plan in WITH_BUDGET)
    draw = draw if words is None else _with_words(draw, words)
    return with_rows(draw) if rare.random() < 0.08 else draw


def with_rows(draw: Draw) -> Draw:
    """The same with layers as in Llama, and these in blocks of rows. The numbers of a step are in attributes: layers in
    blocks are given tensors alone."""
    r = Random(f"{draw.seed} rows")
    others = _ROW_BLOCKS if r.random() < 0.6 else _BLOCKS_TO_REFUSE
    pool = [[("heads", r.randrange(1000)), (r.choice(others), r.randrange(1000))] for _ in range(2)]
    pool += [[(r.choice(_ROW_BLOCKS), r.randrange(1000))]]
    layers = tuple(tuple(r.sample(layer, len(layer))) for layer in r.choices(pool, k=r.choice((2, 3))))
    layers += tuple(layer for layer in draw.model.layers if layer[0][0] == "wide")
    model = dataclasses.replace(draw.model, layers=layers, traits=draw.model.traits - {"keywords", "shared_list"})
    state = "stays" if draw.state in WEIGHTS else draw.state  # which have the layers' forward already
    rows = max(2, draw.num_samples * TOKENS // r.choice((9, 7, 5, 3, 2, 1))) if r.random() < 0.9 else 10_000
    draw = dataclasses.replace(draw, model=model, way="attribute", state=state, rows=rows)
    return _with_row_wise(draw, Random(f"{draw.seed} row_wise")) if draw.seed % 2 else draw


def _with_row_wise(draw: Draw, r: Random) -> Draw:
    """The same with other modules that are declared row-wise: some are, some are not."""
    others = [*_ROW_BLOCKS, *_BLOCKS_TO_REFUSE, *_DECLARED] if r.random() < 0.5 else _DECLARED
    layers = tuple(
        tuple(
            (r.choice(others), r.randrange(1000)) if name != "wide" and r.random() < 0.6 else (name, seed)
            for name, seed in layer
        )
        for layer in draw.model.layers
    )
    row_wise = r.choice(
        (
            ("layers",),
            ("blocks",),
            ("blocks", "inlet"),
            ("inlet", "layers.0"),
            ("blocks.0", "outlet"),
            ("norm", "out", "up"),
        )
    )
    return dataclasses.replace(draw, model=dataclasses.replace(draw.model, layers=layers), row_wise=row_wise)


def _with_words(draw: Draw, words: WordLoss) -> Draw:
    """The same with a vocabulary, whose logits may be there to look at, and larger batches."""
    r = Random(f"{draw.seed} logits")
    traits = draw.model.traits | ({"dataclass"} if r.random() < 0.7 else set())
    model = dataclasses.replace(draw.model, words=words, own_loss=words.place != "loop", traits=traits)
    sides = draw.sides + tuple(r.sample(sorted(WORD_SIDES), r.choice((0, 0, 1))))
    return dataclasses.replace(draw, model=model, sides=sides, num_samples=SAMPLES, num_steps=3)


def _layer(r: Random) -> tuple[tuple[str, int], ...]:
    families = (ordinary.BLOCKS, ordinary.BLOCKS, ordinary.BLOCKS, chosen.BLOCKS, chosen.BLOCKS, moody.BLOCKS)
    names = [r.choice(sorted(r.choice(families))) for _ in range(r.choice((1, 1, 2)))]
    return tuple((name, r.randrange(1000)) for name in names)


def seed_all(seed: int) -> None:
    """Every global random state."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def only_biases(model: nn.Module) -> None:
    """Train the biases of linears alone: their values are never saved, so a backward may come after a step."""
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.requires_grad_()


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another one, which writes through whatever is assigned to it, as training libraries do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    def add_param_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer for what is trained."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:  # everything is frozen: gradients of the input alone
        parameters = [nn.Parameter(torch.zeros(1))]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2)
    if name == "lbfgs":
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)
    if name in classes.OPTIMIZERS:
        return classes.OPTIMIZERS[name](parameters)
    if name == "wrapped":
        return Wrapped(torch.optim.AdamW(parameters, lr=1e-2))
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if name == "momentum" else 0.0)


# -- running and judging -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a run left, and the error that ended it."""

    trace: Trace
    error: BaseException | None = None
    left_behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of a draw."""

    kind: str
    detail: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.kind in WRONG


def train(draw: Draw, rig: Any) -> Outcome:
    """Run a draw with a rig; errors are part of the outcome."""
    outcome = Outcome(Trace())
    before = process_state()
    with own_process_state(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = None
        try:
            run = draw.new_run(rig, outcome.trace)
            rig.start(run.model, run.optimizer)
            outcome.trace.note_random("begun")
            seed_all(draw.seed + 2)
            for step in range(draw.num_steps):
                _step(draw, run, step)
            run.pending = None
            rig.stop()
            outcome.trace.note("in the end", [sorted(vars(module)) for module in run.model.modules()])
            outcome.trace.note("in the end, state", dict(run.model.state_dict()))
        except Exception as error:
            outcome.error = error
            with contextlib.suppress(Exception):
                rig.stop()
        finally:
            for side in run.sides if run is not None else ():
                side.close()
    after = process_state()
    outcome.left_behind = tuple(name for name in before if before[name] != after[name])
    return outcome


def _step(draw: Draw, run: Run, step: int) -> None:
    run.around, run.around_backward = [], []
    for side in run.sides:
        side.before(run, step)
    if draw.is_lean and draw.core != "accumulate":
        with run.rig.counted(run):
            _ALL_CORES[draw.core](run, step)
    else:
        _ALL_CORES[draw.core](run, step)
    if not draw.updates_early:  # there the backward pass has updated the model already
        run.trace.note_model(f"{step}", run.model)
    run.trace.note_random(f"{step}")
    for side in run.sides:
        side.after(run, step)
    if run.optimizer_steps:
        run.optimizer.step()
        if draw.updates_early:
            run.trace.note_model(f"{step}", run.model)
        run.optimizer.zero_grad(set_to_none=not getattr(run, "zeroes_in_place", False))
    run.trace.note_weights(f"{step}", run.model, run.optimizer)


def judge(draw: Draw) -> Verdict:
    """Run a draw plain and under its plan."""
    truth = train(draw, draw.truth_rig())
    try:
        with own_process_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rig = rig_for(draw.plan, draw.seed, draw)
    except Exception as error:
        if names_lowtide(error):
            return Verdict("refused", f"in planning: {_line(error)}")
        if truth.error is not None and is_same_error(error, truth.error):
            return Verdict("same error", _line(error))
        return Verdict(
            "broken" if isinstance(error, Broken) else "crash", f"in planning: {_line(error)}{_where(error)}"
        )
    got = train(draw, rig)
    # The floor is that of the first step, with an ordinary forward: others (dual numbers, say) may need more, and so
    # may a later step whose numbers send other rows to other experts.
    is_floor = rig.floor_bytes is not None and draw.core in LEAN_CORES and draw.way == "steady" and not got.trace.seen
    if isinstance(got.error, BudgetError) and is_floor:
        return Verdict(
            "broken", f"refused {rig.budget_bytes}, above its own floor, {rig.floor_bytes}: {_line(got.error)}"
        )
    verdict = _verdict(draw, truth, got)
    # In the first step, or in a longer one: a strict budget below a floor that plain does not need more than.
    is_small = isinstance(got.error, BudgetError) and (
        "0 random torch" not in got.trace.seen or got.error.floor_bytes <= plain_peak(draw)
    )
    if verdict.kind == "refused" and draw.fault and not CLASSES[draw.fault].may_be_refused and not is_small:
        return Verdict("broken", f"a run that could go on was stopped: {verdict.detail}")
    if verdict.kind == "equal":
        try:
            rig.check_budget(but=CHANGE if draw.fault else None)
            got.trace = Trace()
            rig.check_engines()
        except OverBudget as error:
            # A budget is planned for the step that was observed. Where the numbers change, the step that shows it may
            # need more than the plan: counted apart, and no fault.
            return Verdict("over budget" if draw.way == "steady" else "over, changing", str(error))
        except Broken as error:
            return Verdict("broken", str(error))
    return verdict


def _verdict(draw: Draw, truth: Outcome, got: Outcome) -> Verdict:
    different = got.trace.differences(truth.trace, is_part=got.error is not None, is_truth_part=truth.error is not None)
    if different:
        again = train(draw, draw.truth_rig())
        if again.trace.differences(truth.trace):
            return Verdict("unrepeatable", "plain differs from plain: " + ", ".join(different[:3]))
        what = f"{len(different)} of {len(truth.trace.seen)} values, first: {', '.join(different[:4])}"
        return Verdict("silently wrong", what + (f"; then {_line(got.error)}" if got.error else ""))
    if got.left_behind and not truth.left_behind:
        return Verdict("left behind", ", ".join(got.left_behind))
    if got.error is None:
        if truth.error is None:
            return Verdict("equal")
        return Verdict("error lost", f"plain raises {_line(truth.error)}")
    if truth.error is not None and is_same_error(got.error, truth.error):
        return Verdict("same error", _line(got.error))
    if names_lowtide(got.error):
        return Verdict("refused", _line(got.error))
    return Verdict("crash", f"{_line(got.error)}{_where(got.error)}")


def names_lowtide(error: BaseException) -> bool:
    """Whether an error says that it is lowtide's."""
    return isinstance(error, ConfigError) or "lowtide" in str(error)


_IN_PLACE = ("modified by an inplace operation", "has been modified inplace")


def is_same_error(error: BaseException, other: BaseException) -> bool:
    """Whether both say the same."""
    if type(error) is not type(other):
        return False
    # Blocks of rows read every weight again. That one was written to they see in what they give, plans in its version.
    if "a layer in blocks gave other values" in str(other) and any(text in str(error) for text in _IN_PLACE):
        return True
    # Of a view that a custom function made, plain autograd complains when it looks for the view's node, before it
    # compares versions. Under any saved-tensor hook it does not look; the version tells, and the fault is the same one.
    are_in_place = all(any(words in str(one) for words in _IN_PLACE) for one in (error, other))
    return are_in_place or str(error)[:60] == str(other)[:60]


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " @ " + " <- ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
