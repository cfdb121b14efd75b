"""What the ranks of tests/pipeline/test_budget.py do: one function a job, run by every rank of a process group."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lowtide.core.log import Listener
from lowtide.errors import BudgetError, ConfigError, PipelineError
from lowtide.pipeline.budget import StagePlans, fit_stages
from lowtide.pipeline.exchange import Route, start_on_group
from lowtide.pipeline.execute import Pipeline
from lowtide.pipeline.generators import make_schedule
from lowtide.pipeline.overlap import Overlap
from lowtide.pipeline.weight_gradients import WeightGradients, linear
from lowtide.tensors.fsdp import local_part
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.tensors.private import disable_current_modes
from tests.pipeline import moe
from tests.support.virtual_engine import virtual
from tests.support.zoo import same_bits

WIDTH, INNER, VOCABULARY, LENGTH = 16, 64, 32, 48
NUM_BLOCKS = 4


class Block(nn.Module):
    """Saves several times what it passes on; some of it can be made again, the noise cannot."""

    def __init__(self, inner: int = INNER, *, product: Callable[..., Tensor] = nn.functional.linear) -> None:
        super().__init__()
        self.product = product
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        inner = nn.functional.silu(self._by(self.gate, h)) * self._by(self.up, h)
        return x + self.drop(self._by(self.down, inner))

    def _by(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return self.product(x, layer.weight, layer.bias)


class Stage(nn.Module):
    def __init__(self, layers: list[nn.Module], *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch_of(step: int, number: int, length: int = LENGTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, VOCABULARY, (4, length), generator=generator) for _ in range(number)]


def _copy(gradient: Tensor) -> Tensor:
    """Of one that may be zeroed in place. Nobody counts it, also while the optimizer steps."""
    with disable_current_modes():
        return gradient.clone()


class Rank:
    """A rank of a pipeline, which can be begun again.

    `experts`: blocks with experts, whose exchanges of rows pairs hide. "own": each rank has all of them. "shared": each
    rank is a pipeline, and the ranks share the experts. `inner`: of the blocks without experts. `casts`: all of a step
    is under autocast. `puts_off`: the weight gradients of these blocks wait for W. `reshards`: there are two pipelines
    side by side, whose stages FSDP2 shards, with this setting of `reshard_after_forward` (and `casts` is FSDP2's).
    "replicas": they have DistributedDataParallel around them instead.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        *,
        num_micro_batches: int = 6,
        experts: str = "",
        inner: int = INNER,
        casts: bool = False,
        puts_off: bool = False,
        reshards: bool | str | None = None,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        self.num_blocks = num_blocks
        self.puts_off = puts_off
        self.reshards = reshards
        self.bucket_bytes = 0
        """Of DistributedDataParallel, which no operator makes."""
        self.length = LENGTH
        self.sets_to_none = True
        self.inner = inner
        self.casts = casts
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.experts = experts
        self.is_sharing = experts == "shared"
        self.alone = [dist.new_group([each]) for each in range(num_ranks)][rank] if experts else None
        num = 1 if self.is_sharing else num_ranks
        self.group, self.mesh, self.seed, self.rank = self.alone, None, rank, 0 if self.is_sharing else rank
        if reshards is not None:
            num, self.seed, self.rank = num_ranks // 2, rank % 2, rank // 2
            self.group = [dist.new_group(range(which, num_ranks, 2)) for which in range(2)][self.seed]
            pairs = [dist.new_group([2 * place, 2 * place + 1]) for place in range(num)]
            self.mesh = DeviceMesh.from_group(pairs[self.rank], "cpu")
        self.schedule = make_schedule(name, num_ranks=num, num_micro_batches=num_micro_batches)
        self.begin()

    def _start(self, rows: Tensor, sent: Tensor, route: Route) -> Any:
        group = None if self.is_sharing else self.alone
        return start_on_group(rows, sent, dataclasses.replace(route, group=group))

    def begin(self) -> None:
        torch.manual_seed(self.seed if self.is_sharing else 0)
        number = self.schedule.num_stages
        product = linear if self.puts_off else nn.functional.linear
        blocks: list[nn.Module] = [Block(self.inner, product=product) for _ in range(self.num_blocks)]
        if self.experts:
            blocks = [moe.Block(2 if self.is_sharing else 1, hides=n % 2 == 1) for n in range(self.num_blocks)]
        each = len(blocks) // number
        every = [
            Stage(blocks[each * stage : each * (stage + 1)], first=stage == 0, last=stage == number - 1)
            for stage in range(number)
        ]
        self.stages = {stage: every[stage] for stage in self.schedule.stages_of(self.rank)}
        self.own = nn.ModuleList(self.stages.values())
        if self.reshards == "replicas":
            around = functools.partial(nn.parallel.DistributedDataParallel, process_group=self.mesh.get_group())
            self.stages = {number: around(stage) for number, stage in self.stages.items()}
            self.bucket_bytes = sum(parameter.nbytes for parameter in self.own.parameters())
        elif self.mesh is not None:
            types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if self.casts else {}
            how = {
                "mesh": self.mesh,
                "reshard_after_forward": self.reshards,
                "mp_policy": MixedPrecisionPolicy(**types),
            }
            for module in (*(layer for stage in self.own for layer in stage.layers), *self.own):
                fully_shard(module, **how)
        self.optimizer = torch.optim.AdamW(self.own.parameters(), lr=1e-3)
        self.has_loss = number - 1 in self.stages
        more: dict[str, Any] = {"run_pair": Overlap(start=self._start).run_pair} if self.experts else {}
        if self.group is not None and (self.is_sharing or self.mesh is not None):
            more |= {"group": self.group, "tied": ()}
        if self.puts_off:
            more["weight_gradients"] = WeightGradients()
        self.pipeline = Pipeline(self.schedule, self.stages, loss=loss_of if self.has_loss else None, **more)
        torch.manual_seed(1 + self.seed)

    def batch(self, step: int) -> tuple[list[Tensor] | None, list[Tensor] | None]:
        number = step + 10 * self.seed * (self.is_sharing or self.mesh is not None)
        tokens = batch_of(number, self.schedule.num_micro_batches, self.length)
        return tokens if 0 in self.stages else None, tokens if self.has_loss else None

    def fit(self, budget: int, **memory: Any) -> StagePlans:
        section = {"budget": budget, "min_bytes": 0, **memory}
        how: dict[str, Any] = {"optimizer": self.optimizer, "engine": virtual(self.seed)}
        if self.is_sharing or self.mesh is not None:
            how["together"] = dist.group.WORLD
        with self._casting():
            return fit_stages(self.pipeline, *self.batch(0), memory=section, **how)

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.casts and self.mesh is None)

    @contextlib.contextmanager
    def coming_late(self, seconds: float) -> Iterator[None]:
        """Inside, each product of a block without experts takes so much longer."""

        def late(*given: Any) -> Tensor:
            time.sleep(seconds)
            return product(*given)

        blocks = [module for module in self.own.modules() if isinstance(module, Block)]
        product = blocks[0].product if blocks else linear
        for block in blocks:
            block.product = late
        try:
            yield
        finally:
            for block in blocks:
                block.product = product

    def train(self, num_steps: int, plans: StagePlans | None = None) -> tuple[list[list[Tensor]], list[int]]:
        """Of each step: losses and gradients; and the peak."""
        bits, peaks = [], []
        for step in range(num_steps):
            batch = self.batch(step)
            live = LiveBytes(model=self.own, optimizer=self.optimizer)
            with live if plans is None else plans.audit() as counted, self._casting():
                counted.add_all(tensor for tokens in batch for tensor in tokens or ())
                losses = self.pipeline.step(*batch)
                found = [*losses, *(_copy(local_part(p.grad)) for p in self.own.parameters())]
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=self.sets_to_none)
            bits.append(found)
            peaks.append(counted.peak_bytes + self.bucket_bytes)
        return bits, peaks

    def end(self) -> None:
        self.pipeline.close()


def budgets(
    rank: int,
    name: str,
    share: float,
    *,
    is_of_plain: bool = False,
    num_steps: int = 2,
    about: dict[str, Any] | None = None,
    **memory: Any,
) -> dict[str, Any]:
    """Between the least that is possible and what the plain pipeline needs: what differs, and what was needed.

    `is_of_plain`: the share is of what the plain pipeline needs, and the least is not looked for, unless it is more.
    """
    it = Rank(name, rank, **(about or {}))
    truth, plain = it.train(num_steps)
    most = max(max(peaks) for peaks in _everywhere(plain))
    budget, text = int(share * most), ""
    try:
        it.end()
        it.begin()
        plans = it.fit(budget if is_of_plain else 1 << 10, **memory)
    except BudgetError as error:
        text, floor = str(error), error.floor_bytes
        budget = floor if is_of_plain else int(floor + share * (most - floor))
        it.end()
        it.begin()
        plans = it.fit(budget, **memory)
    with contextlib.closing(it.pipeline), plans:
        bits, peaks = it.train(num_steps, plans)
        stats = [tide.stats for tide in plans.tides.values()]
    return {
        "plain": plain,
        "text": text,
        "budget": budget,
        "peaks": peaks,
        "promised": plans.found.peak_bytes,
        "different": [
            (step, number)
            for step, (own, want) in enumerate(zip(bits, truth, strict=True))
            for number, pair in enumerate(zip(own, want, strict=True))
            if not same_bits(*pair)
        ],
        "recomputed": sum(each.recomputed_bytes for each in stats),
        "swapped": sum(each.swapped_bytes for each in stats),
        "spilled": sum(each.num_spills for each in stats),
        "divergences": sum(each.num_divergences for each in stats),
        "summaries": list(plans.summaries.values()),
        "moved": 0 if plans.found.optimizer is None else plans.found.optimizer.moved_bytes,
    }


def changes(
    rank: int,
    name: str,
    budgets: list[float],
    *,
    steps: list[tuple[int, bool]],
    about: dict[str, Any] | None = None,
    **memory: Any,
) -> list[dict[str, Any]]:
    """Steps of other lengths than the first, after which gradients are zeroed in place or not, under budgets that are
    shares of what the plain pipeline needs: what differs, what was needed, and what was said.

    `steps`: of each one, the length of its sequences, and whether gradients become None."""

    def train(it: Rank, plans: StagePlans | None = None) -> tuple[list[Any], list[int], list[int]]:
        bits, peaks, promised = [], [], []
        for it.length, it.sets_to_none in steps:
            own, counted = it.train(1, plans)
            bits += own
            peaks += counted
            promised.append(0 if plans is None else plans.found.peak_bytes)
        return bits, peaks, promised

    truth, plain, _ = train(Rank(name, rank, **(about or {})))
    most = max(max(peaks) for peaks in _everywhere(plain))
    found = []
    for share in budgets:
        it, said = Rank(name, rank, **(about or {})), []
        it.length = steps[0][0]
        with Listener(said.append), contextlib.closing(it.pipeline), it.fit(int(share * most), **memory) as plans:
            bits, peaks, promised = train(it, plans)
        different = [step for step, (own, want) in enumerate(zip(bits, truth)) if not all(map(same_bits, own, want))]
        about_one = {"different": different, "peaks": peaks, "promised": promised, "said": said}
        found.append(about_one | {"budget": int(share * most), "plain": plain})
    return found


def too_long(rank: int) -> str:
    """A step that is longer than the first, under the least budget of that and with `strict`: its error."""
    it = Rank("1f1b", rank)
    with pytest.raises(BudgetError) as least:
        it.fit(2**16)
    with contextlib.closing(it.pipeline), it.fit(least.value.floor_bytes, strict=True) as plans:
        it.length *= 2
        with pytest.raises(BudgetError) as caught:
            it.train(1, plans)
    return str(caught.value)


def _everywhere(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def kept(
    rank: int, names: list[str], about: dict[str, Any] | None = None, recompute: list[str] | None = None
) -> list[tuple[int, int]]:
    """With all the room there is: what each pipeline is said to need, and what it needs. `recompute`: layers that run
    again by rule."""
    found = []
    rules: dict[str, Any] = {} if recompute is None else {"recompute": recompute, "swap": "none"}
    for name in names:
        it = Rank(name, rank, **(about or {}))
        with contextlib.closing(it.pipeline), it.fit(2**30, **rules) as plans:
            assert all(plan.does_nothing for plan in plans.plans.values()) == (recompute is None)
            _, peaks = it.train(1, plans)
            # What is there at once follows from the schedule, whichever rank comes late. With FSDP2 a second step needs
            # more than the first.
            for slow in range(dist.get_world_size() if it.mesh is None else 1):
                with it.coming_late(0.003 * (slow == rank)):
                    peaks += it.train(1, plans)[1]
            assert it.experts or it.mesh or len(set(peaks[1:])) == 1, peaks
            found.append((plans.found.peak_bytes, max(peaks)))
    return found


def refused(rank: int) -> list[str]:
    """What each rank is told."""
    told = []

    def attempt(it: Rank, *batch: Any, **memory: Any) -> None:
        with contextlib.closing(it.pipeline), pytest.raises(ConfigError) as caught:
            fit_stages(it.pipeline, *(batch or it.batch(0)), memory=memory, engine=virtual(0))
        told.append(str(caught.value))

    attempt(Rank("1f1b", rank), **({"budget": 2**30} if rank == 0 else {}))
    attempt(Rank("1f1b", rank), None, batch_of(0, 6), budget=2**30)
    taking_turns = Rank("1f1b", rank)
    taking_turns.pipeline.run_pair = lambda forward, backward: None
    attempt(taking_turns, budget=2**30)
    attempt(Rank("1f1b", rank), budget=2**30, optimizer="swap")
    attempt(Rank("1f1b", rank), budget=2**30, loss="sliced")
    twice = Rank("1f1b", rank)
    with twice.fit(2**30):
        attempt(twice, budget=2**30)
    alone = Rank("1f1b", rank)
    plans = alone.fit(2**30)
    if rank == 1:
        plans.remove()
    with contextlib.closing(alone.pipeline), plans, pytest.raises(ConfigError) as caught:
        alone.pipeline.step(*alone.batch(0))
    return [*told, str(caught.value)]


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no luck")


class InDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x}


def raises(rank: int, how: str) -> str:
    """What each rank is told when a stage of one of them raises, or cannot be planned for."""
    it = Rank("1f1b", rank)
    if rank == 1 and how == "raises":
        it.stages[1].layers.insert(1, Raising())
    if rank == 0 and how == "a dict":
        it.stages[0].layers.append(InDict())
    if rank == 0 and how == "frozen":
        it.stages[0].requires_grad_(False)
    if rank == 0 and how == "empty":
        it.stages[0].embed, it.stages[0].layers = None, nn.ModuleList()
    with pytest.raises((RuntimeError, ConfigError, PipelineError)) as caught:
        it.fit(2**30)
    return f"{type(caught.value).__name__}: {caught.value}"
