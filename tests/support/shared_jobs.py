"""What the ranks of tests/pipeline/test_shared.py do: pipelines whose stages share weights, whose loss has some, and
ranks that disagree with each other."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import lowtide
from lowtide.errors import BudgetError, ConfigError, PipelineError
from lowtide.pipeline import Pipeline, WeightGradients, find_ties, fit_stages, linear
from lowtide.pipeline.cut_model import cut, loss_of
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.schedule import layers_of_stages
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.tensors.ranks import ALONE, gather
from tests.pipeline.test_cut_model import CONFIGS
from tests.support.virtual_engine import virtual
from tests.support.zoo import mixed, same_bits

M, WIDTH, CLASSES = 6, 12, 7


class Truth:
    """One process: micro-batches in order, the uses of each stage added up apart, their sums last, one division."""

    def __init__(self, stages: Sequence[nn.Module], loss: Callable[[Any, Any], Tensor]) -> None:
        own = [dict(stage.named_parameters()) for stage in stages]
        self.ties = [tie for tie in find_ties(stages) if tie[0].name in own[tie[0].stage]]
        self.stages = [copy.deepcopy(stage) for stage in stages]
        self.loss = copy.deepcopy(loss)
        own = [*self.stages, self.loss] if isinstance(self.loss, nn.Module) else self.stages
        self.optimizer = torch.optim.SGD(nn.ModuleList(own).parameters(), lr=0.5)

    def copies(self, tie: Any) -> list[Tensor]:
        return [self.stages[place.stage].get_parameter(place.name) for place in tie]

    def step(self, inputs: Sequence[Any], targets: Sequence[Any]) -> tuple[list[Tensor], Tensor]:
        self.optimizer.zero_grad()
        losses = []
        for given, target in zip(inputs, targets, strict=True):
            loss = self.loss(nn.Sequential(*self.stages)(given), target)
            loss.backward()
            losses.append(loss.detach())
        later = []
        for tie in self.ties:
            first, *others = self.copies(tie)
            total = first.grad
            for other in others:
                total = total + other.grad
            for each in (first, *others):
                each.grad = total.clone()
            later += others
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        for parameter in every:
            parameter.grad.div_(len(inputs))
        norm = torch.nn.utils.get_total_norm([p.grad for p in every if not any(p is each for each in later)])
        return losses, norm

    def update(self, norm: Tensor) -> None:
        every = [p for group in self.optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(every, 0.1, norm)
        self.optimizer.step()


def compared(
    rank: int,
    stages: Sequence[nn.Module],
    loss: Any,
    name: str,
    batches: list[Any],
    *,
    split: bool = False,
    fate: str = "keep",
    **more: Any,
) -> list[str]:
    """What differs from one process in losses, norms, gradients and weights of some steps with clipping. `fate`: of all
    that stages save: keep, recompute, swap, or what a budget of 7 / 8 of what they need asks for."""
    truth = Truth(stages, loss)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    schedule = make_schedule(name, num_ranks=num_ranks, num_micro_batches=len(batches[0][0]))
    own = {stage: stages[stage] for stage in schedule.stages_of(rank)}
    has_loss = len(stages) - 1 in own
    trained = nn.ModuleList([*own.values(), *([loss] if has_loss and isinstance(loss, nn.Module) else [])])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    weights = WeightGradients() if split else None
    pipeline = Pipeline(
        schedule, own, loss=loss if has_loss else None, optimizer=optimizer, weight_gradients=weights, **more
    )
    different = []
    given = [(inputs if 0 in own else None, targets if has_loss else None) for inputs, targets in batches]
    tides, plans = _under(fate, rank, pipeline, given[0], optimizer)
    for number, (inputs, targets) in enumerate(batches):
        wanted, wanted_norm = truth.step(inputs, targets)
        optimizer.zero_grad()
        with contextlib.nullcontext() if plans is None else plans.audit() as live:
            losses = pipeline.step(*given[number])
        if plans is not None and not live.peak_bytes <= plans.found.peak_bytes <= plans.budget_bytes:
            different.append(f"peak of step {number}: {live.peak_bytes}, {plans.found.peak_bytes} promised")
        if has_loss:
            different += [f"loss of step {number}" for pair in zip(losses, wanted, strict=True) if not same_bits(*pair)]
        norm = pipeline.gradient_norm()
        different += [f"norm of step {number}"] * (not same_bits(norm, wanted_norm))
        pairs = [(own[stage], truth.stages[stage]) for stage in own]
        pairs += [(loss, truth.loss)] if has_loss and isinstance(loss, nn.Module) else []
        for when in ("gradient", "weight"):
            for mine, theirs in pairs:
                for (place, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
                    both = (one.grad, other.grad) if when == "gradient" else (one.data, other.data)
                    different += [f"{when} of {place} in step {number}"] * (not same_bits(*both))
            if when == "gradient":
                torch.nn.utils.clip_grads_with_norm_(trained.parameters(), 0.1, norm)
                optimizer.step()
                truth.update(wanted_norm)
    pipeline.close()
    done = {fate: sum(getattr(tide.stats, f"{fate}_bytes") for tide in tides) for fate in ("recomputed", "swapped")}
    different += [f"nothing is {wanted}" for wanted, nbytes in done.items() if wanted.startswith(fate) and not nbytes]
    for handle in tides if plans is None else (plans,):
        handle.remove()
    return different


def _under(
    fate: str, rank: int, pipeline: Pipeline, given: Any, optimizer: torch.optim.Optimizer
) -> tuple[list[Any], Any]:
    """The tides of all stages, and the plans that they are of, if they are of a budget."""
    engine: Any = virtual(rank)
    if fate in ("recompute", "swap"):
        rules = mixed(recompute="all") if fate == "recompute" else mixed(swap=["*"])
        return [lowtide.apply(s, rules, engine=engine, group=ALONE) for s in pipeline.stages.values()], None
    if fate == "keep":
        return [], None
    how: Any = {"optimizer": optimizer, "engine": engine}
    with LiveBytes(model=nn.ModuleList(pipeline.stages.values()), optimizer=optimizer) as plain:
        pipeline.step(*given)
    optimizer.zero_grad()
    # To look for the floor would take as long again as the plan.
    budget = max(gather(plain.peak_bytes, None)) * 7 // 8
    try:
        plans = fit_stages(pipeline, *given, memory={"budget": budget, "min_bytes": 0}, **how)
    except BudgetError as error:
        plans = fit_stages(pipeline, *given, memory={"budget": error.floor_bytes, "min_bytes": 0}, **how)
    return list(plans.tides.values()), plans


# -- models that are cut -------------------------------------------------------------------------------------------


def _model(kind: str, **fields: Any) -> Any:
    config = CONFIGS[kind]()
    for name, value in fields.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def _texts(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 64, (2, 7 + number), generator=generator) for number in range(M)]


def cut_models(rank: int, each: list[tuple[str, str]]) -> list[list[str]]:
    """What differs, of (kind of model with tied embeddings, schedule)."""
    found = []
    for kind, name in each:
        model = _model(kind, tie_word_embeddings=True)
        schedule = make_schedule(name, num_ranks=dist.get_world_size(), num_micro_batches=M)
        stages = cut(model, layers_of_stages(4, schedule.num_stages))
        found.append(compared(rank, stages, loss_of, name, [(_texts(step), _texts(step)) for step in range(3)]))
    return found


# -- stages of one's own -------------------------------------------------------------------------------------------


class Linear(nn.Linear):
    """Whose weight gradient can be put off."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, mlp: nn.Module | None = None, scale: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = mlp or nn.Sequential(Linear(WIDTH, WIDTH), nn.Tanh())
        self.scale = scale if scale is not None else nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * self.scale


def _sharing(how: str) -> list[nn.Module]:
    """Four stages; what is shared is on both ranks."""
    torch.manual_seed(0)
    whole, mlp, scale = Block(), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
    if how == "a layer":
        return [nn.Sequential(Block(), whole), nn.Sequential(Block()), nn.Sequential(Block()), nn.Sequential(whole)]
    if how == "an MLP":
        return [nn.Sequential(Block(mlp)), nn.Sequential(Block(mlp)), nn.Sequential(Block()), nn.Sequential(Block(mlp))]
    return [nn.Sequential(Block(scale=scale)) if number != 1 else nn.Sequential(Block()) for number in range(4)]


def _batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    inputs = [torch.randn(3 + number, WIDTH, generator=generator) for number in range(M)]
    return inputs, [torch.randint(0, CLASSES, (len(each),), generator=generator) for each in inputs]


def _plain_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :CLASSES], target)


def shared(rank: int, how: str, name: str = "interleaved") -> tuple[str, list[str]]:
    """The refusal of stages that are given alone, and what differs with all that they share."""
    schedule = make_schedule(name, num_ranks=dist.get_world_size(), num_micro_batches=M)
    stages = _sharing(how)
    own = {stage: stages[stage] for stage in schedule.stages_of(rank)}
    with pytest.raises(ConfigError) as caught:
        Pipeline(schedule, own, loss=_plain_loss if 3 in own else None)
    batches = [_batch(step) for step in range(3)]
    return str(caught.value), compared(rank, stages, _plain_loss, name, batches, tied=find_ties(stages))


class Total(nn.Module):
    """A buffer that its forward adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        return x * self.scale


def shared_buffers(rank: int) -> list[str]:
    """What each rank is told of a buffer that two stages have and write; one that they read is no fault."""
    told = []
    for name, both in (("1f1b", (0, 1)), ("dualpipev", (0, 3))):
        torch.manual_seed(0)
        schedule, total = make_schedule(name, num_ranks=2, num_micro_batches=M), Total()
        stages = [
            nn.Sequential(Block(), total) if number in both else nn.Sequential(Block())
            for number in range(schedule.num_stages)
        ]
        own = {stage: stages[stage] for stage in schedule.stages_of(rank)}
        has_loss = schedule.num_stages - 1 in own
        pipeline = Pipeline(schedule, own, loss=_plain_loss if has_loss else None, tied=find_ties(stages))
        inputs, targets = _batch(0)
        with pytest.raises((ConfigError, PipelineError)) as caught:
            pipeline.step(inputs if 0 in own else None, targets if has_loss else None)
        told.append(str(caught.value))
        pipeline.close()
    return told


# -- losses and inputs ---------------------------------------------------------------------------------------------


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(linear(x, self.head.weight, self.head.bias), target)


class Outside(nn.Module):
    """Uses a weight that is not registered in it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(WIDTH, WIDTH), [weight]

    def forward(self, x: Tensor) -> Tensor:
        return linear(torch.tanh(self.inner(x)), self.hidden[0])


def weights_of_losses(rank: int) -> list[str]:
    """What differs where the loss has weights, and where weights are reached that are in no stage."""
    torch.manual_seed(0)
    different = []
    for name, split, fate in (("1f1b", False, "keep"), ("zb_v", True, "keep"), ("1f1b", False, "budget")):
        num_stages = make_schedule(name, num_ranks=2, num_micro_batches=M).num_stages
        stages = [nn.Sequential(Block()) for _ in range(num_stages)]
        batches = [_batch(step) for step in range(3)]
        different += compared(rank, stages, Criterion(), name, batches, split=split, fate=fate)
    # A loss that is a plain function, inputs that were computed, a weight in a list: no names, so gradients alone.
    head, hidden, encoder = (nn.Parameter(torch.randn(*shape)) for shape in ((CLASSES, WIDTH), *[(WIDTH, WIDTH)] * 2))
    for name, split in (("1f1b", False), ("zb_v", True), ("dualpipev", False)):
        schedule = make_schedule(name, num_ranks=2, num_micro_batches=M)
        stages = [Block() for _ in range(schedule.num_stages - 1)]
        every = [Outside(hidden), *stages]
        own = {stage: every[stage] for stage in schedule.stages_of(rank)}
        has_loss = schedule.num_stages - 1 in own

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(linear(output, head), target)

        inputs, targets = _batch(0)
        for given, target in zip(inputs, targets, strict=True):
            x = given @ encoder
            for stage in every:
                x = stage(x)
            loss(x, target).backward()
        wanted = [weight.grad / M for weight in (encoder, hidden, head)]
        weights = WeightGradients() if split else None
        pipeline = Pipeline(schedule, own, loss=loss if has_loss else None, weight_gradients=weights, tied=())
        for _ in range(2):
            for weight in (encoder, hidden, head):
                weight.grad = None
            pipeline.step([x @ encoder for x in inputs] if 0 in own else None, targets if has_loss else None)
        pipeline.close()
        here = [0, 1] * (0 in own) + [2] * has_loss
        found = [weight.grad for weight in (encoder, hidden, head)]
        different += [f"{name}: {number}" for number in here if not same_bits(found[number], wanted[number])]
        for weight in (encoder, hidden, head):
            weight.grad = None
    return different


def _step(rank: int, how: str, step: int = 0) -> Any:
    """A pipeline of two plain stages, after so many steps, and what its next step is given."""
    torch.manual_seed(rank)
    schedule = make_schedule("1f1b", num_ranks=2, num_micro_batches=M)
    inner: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) if how == "dropout" else Block()
    losses = {
        "detached": lambda output, target: _plain_loss(output, target).detach(),
        "of numbers": lambda output, target: torch.tensor(_plain_loss(output, target).item()),
        "no_grad": torch.no_grad()(_plain_loss),
    }
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3 * (1 + (rank if how == "lr" else 0)))
    pipeline = Pipeline(
        schedule, {rank: inner}, loss=losses.get(how, _plain_loss) if rank == 1 else None, optimizer=optimizer
    )
    inputs, targets = _batch(0)
    given = (inputs if rank == 0 else None, targets if rank == 1 else None)
    for _ in range(step):
        pipeline.step(*given)
    return pipeline, given


def refusals(rank: int) -> dict[str, str]:
    """What each rank is told."""
    told = {}
    for how in ("detached", "of numbers", "no_grad", "lr", "divide_by", "divide_by later", "autocast", "fit_stages"):
        pipeline, given = _step(rank, how, step=int(how.endswith("later")))
        before = [weight.grad for weight in pipeline.stages[rank].parameters()]
        call = functools.partial(fit_stages, pipeline, budget="1GiB")
        if how != "fit_stages" or rank == 1:
            call = functools.partial(pipeline.step, divide_by=3 if how.startswith("divide_by") and rank == 0 else None)
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast" and rank == 1),
            pytest.raises((ConfigError, PipelineError)) as caught,
        ):
            call(*given)
        told[how] = f"{type(caught.value).__name__}: {caught.value}"
        now = [weight.grad for weight in pipeline.stages[rank].parameters()]
        assert all(one is other for one, other in zip(before, now, strict=True))
        pipeline.close()
    model = _model("llama", rms_norm_eps=1e-5 * (1 + rank))
    with pytest.raises(ConfigError) as caught:
        Pipeline(pipeline.schedule, {rank: cut(model, [range(2), range(2, 4)])[rank]}, loss=loss_of if rank else None)
    told["model"] = str(caught.value)
    return told


def drifts(rank: int) -> tuple[str, str]:
    """What each rank is told of tied embeddings that begin with other values, and that are stepped by other rates."""
    told = []
    for how in ("seed", "rate"):
        model = _model("llama", tie_word_embeddings=True)
        if how == "seed" and rank == 1:
            nn.init.normal_(model.lm_head.weight)
        stage = cut(model, [range(2), range(2, 4)])[rank]
        schedule = make_schedule("1f1b", num_ranks=2, num_micro_batches=M)
        pipeline = Pipeline(schedule, {rank: stage}, loss=loss_of if rank else None)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1 * (1 + rank))
        for step in range(how == "rate"):
            pipeline.step(*(_texts(step) if place == rank else None for place in (0, 1)))
            optimizer.step()
        with pytest.raises((ConfigError, PipelineError)) as caught:
            pipeline.step(*(_texts(1) if place == rank else None for place in (0, 1)))
        told.append(str(caught.value))
        pipeline.close()
    return told[0], told[1]


def warned(rank: int) -> list[str]:
    """The warnings of two steps with dropout, and of two without."""
    said = []
    for how in ("dropout", "none"):
        pipeline, given = _step(rank, how)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                pipeline.step(*given)
        said += [str(each.message) for each in caught if "lowtide" in str(each.message)]
        pipeline.close()
    return said
