"""Plans whose updates wait for the next forward pass (`memory.optimizer: {state: swap, overlap: deferred}`): the same
bits beside every fate of activations, and words where it cannot be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.mindformers.follow import follow, sections_in
from tests.zoo import same_bits

WIDTH = 128
DEFERRED = {"state": "swap", "overlap": "deferred"}


class Block(nn.Module):
    """Reads a parameter of its own by hand, before the modules in it run."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x) * self.scale)).sin())


class Net(nn.Module):
    """Tied weights, a block that is called twice, and a parameter that is read outside of its module, before it."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.late = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 200, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.late.weight.mean(0)
        for layer in self.layers:
            x = layer(x)
        x = self.layers[0](x)
        return nn.functional.cross_entropy(self.head(self.late(x).tanh()).flatten(0, 1), tokens.flatten())


def build(kind: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def tokens(seed: int, rows: int = 4) -> Tensor:
    return torch.randint(200, (rows, 64), generator=torch.Generator().manual_seed(seed))


def train(
    model: nn.Module, optimizer: Any, tide: Any = None, *, steps: int = 12, accumulate: int = 1, sizes: Any = (4,)
) -> list[Tensor]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    seen: list[Tensor] = []
    for step in range(steps):
        for micro in range(accumulate):

            def closure(seed: int = 100 * step + micro, rows: int = sizes[step % len(sizes)]) -> Tensor:
                loss = model(tokens(seed, rows))
                (loss / accumulate).backward()
                return loss.detach()

            seen.append(closure() if tide is None or step % 3 == 2 else tide.step(closure))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == 5:  # a checkpoint in the middle
            seen += [value.clone() for value in model.state_dict().values()]
        if step == 7:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
    return seen


def everything(seen: list[Tensor], model: nn.Module, optimizer: Any) -> list[Tensor]:
    moments = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return [*seen, *(parameter.detach() for parameter in model.parameters()), *moments]


def assert_plain(found: list[Tensor], kind: str = "adamw", **how: Any) -> None:
    model, optimizer = build(kind)
    expected = everything(train(model, optimizer, **how), model, optimizer)
    assert len(found) == len(expected)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


RULES: dict[str, dict[str, Any]] = {
    "keep": {},
    "swap": {"swap": "all"},
    "layers run again": {"recompute": "all"},
    "modules run again": {"recompute": ["layers.*.up", "layers.*.norm", "late"], "swap": ["layers.2"]},
    "one layer runs again": {"recompute": ["layers.0"], "swap": ["layers.1"]},
}


@pytest.mark.parametrize("rules", RULES)
def test_rules_beside_updates_that_wait(rules: str) -> None:
    kind, accumulate = ("sgd", 2) if rules in ("swap", "one layer runs again") else ("adamw", 1)
    model, optimizer = build(kind)
    memory = {**RULES[rules], "optimizer": DEFERRED, "min_bytes": "1B"}
    with lowtide.apply(model, memory, optimizer=optimizer, engine="virtual:3") as tide:
        seen = train(model, optimizer, tide, accumulate=accumulate)
        handle = tide.optimizer_swap
        assert handle is not None and handle.stats.overlap == "deferred"
        assert handle.put_off_gradients(), "the last step's updates wait"
        assert tide.stats.num_retries == 0 and not tide.refused_layers
    assert_plain([*seen, *everything([], model, optimizer)], kind, accumulate=accumulate)
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())


def floor_of(memory: dict[str, Any], rows: int) -> int:
    model, optimizer = build()
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.plan(model, (tokens(0, rows),), budget=1024, memory=memory, optimizer=optimizer)
    return caught.value.floor_bytes


@pytest.mark.parametrize(("engine", "limits"), [("virtual:1", {}), ("host", {"swap": "none"})])
def test_a_budget_beside_updates_that_wait(
    engine: str, limits: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of two sizes: the second one is observed while updates wait. Plans run layers and recipes again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = {"optimizer": DEFERRED, "min_bytes": "1KiB", **limits}
    budget = int(floor_of(memory, 6) * 1.15)
    sizes = (4, 4, 6, 4, 6)
    model, optimizer = build()
    with lowtide.optimize(model, budget=budget, memory=memory, optimizer=optimizer, engine=engine) as tide:
        seen = train(model, optimizer, tide, sizes=sizes)
        assert tide.plan is not None and tide.plan.optimizer is not None
        assert tide.plan.optimizer.overlap == "deferred"
        assert any(site.fate is not Fate.KEEP for site in tide.plan.sites)
        handle = tide.optimizer_swap
        assert handle is not None and handle.stats.overlap == "deferred" and handle.put_off_gradients()
        assert tide.stats.num_retries == 0 and tide.tide is not None and not tide.tide.refused_layers
        assert {event.why for event in tide.events} >= {"first step", "new shape"}
    assert_plain([*seen, *everything([], model, optimizer)], sizes=sizes)


def test_updates_wait_until_their_layer_begins(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a budget too, whose guard looks at what is on the device when a forward pass begins."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, optimizer = build()
    memory = {"optimizer": DEFERRED, "min_bytes": "1KiB"}
    waiting: list[int] = []
    with lowtide.optimize(model, budget="1GiB", memory=memory, optimizer=optimizer, engine="virtual:1") as tide:
        train(model, optimizer, tide, steps=3)
        handle = tide.optimizer_swap
        assert handle is not None
        hooks = [
            layer.register_forward_hook(lambda *_: waiting.append(len(handle.put_off_gradients())))
            for layer in model.layers
        ]
        model(tokens(9)).backward()
        for hook in hooks:
            hook.remove()
    assert waiting[0] > waiting[1] > 0 == waiting[2] == waiting[3], "the first layer is called twice"


def test_a_micro_batch_that_runs_again_keeps_the_updates_that_were_done(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    results = []
    for is_planned in (False, True):
        model, optimizer = build()
        memory = {"optimizer": DEFERRED, "swap": "all", "min_bytes": "1B"}
        tide = lowtide.apply(model, memory, optimizer=optimizer, engine="virtual:4") if is_planned else None
        calls = itertools.count(0 if is_planned else 1)  # what a retry does not put back

        def fail(*_: Any, calls: Any = calls) -> None:
            if next(calls) == 0:
                raise torch.OutOfMemoryError("of the test")

        seen = train(model, optimizer, tide, steps=3)
        hook = model.layers[2].register_forward_pre_hook(fail)

        def closure(model: nn.Module = model) -> Tensor:
            loss = model(tokens(9))
            loss.backward()
            return loss.detach()

        if tide is None:
            seen.append(closure())
        else:
            with pytest.warns(UserWarning, match=r"out of memory .*; .*, and the micro-batch is run again"):
                seen.append(tide.step(closure))
        hook.remove()
        optimizer.step()
        if tide is not None:
            tide.remove()
        results.append([*seen, *everything([], model, optimizer)])
    assert all(same_bits(*pair) for pair in zip(*results, strict=True))


def test_a_closure_that_writes_to_parameters_is_not_run_again() -> None:
    model, optimizer = build()
    memory = {"optimizer": DEFERRED, "swap": "all", "min_bytes": "1B"}
    with lowtide.apply(model, memory, optimizer=optimizer, engine="virtual:4") as tide:
        train(model, optimizer, tide, steps=2)

        def closure() -> None:
            model(tokens(9)).backward()
            with torch.no_grad():
                model.late.weight.add_(1.0)
            raise torch.OutOfMemoryError("of the test")

        with pytest.raises(torch.OutOfMemoryError) as caught:
            tide.step(closure)
        assert "the closure wrote to parameters (an optimizer step belongs outside of it)." in caught.value.__notes__[0]


# -- what cannot be --------------------------------------------------------------------------------------------------


def by_rules(model: nn.Module, optimizer: Any) -> Any:
    return lowtide.apply(model, {"optimizer": DEFERRED}, optimizer=optimizer, engine="virtual:0")


def by_a_budget(model: nn.Module, optimizer: Any) -> Any:
    memory = {"optimizer": {"state": "auto", "overlap": "deferred"}}
    return lowtide.optimize(model, budget="1GiB", memory=memory, optimizer=optimizer, engine="virtual:0")


@pytest.mark.parametrize("way", [by_rules, by_a_budget])
def test_compiled_parts_are_refused(way: Callable) -> None:
    model, optimizer = build()
    model.layers[1].compile(backend="eager")
    with pytest.raises(lowtide.ConfigError) as caught:
        way(model, optimizer)
    assert str(caught.value) == (
        "memory.optimizer.overlap: deferred does not go with a compiled model; write overlap: auto"
    )
    assert "forward" not in vars(model) and "step" not in vars(optimizer)


@pytest.mark.parametrize("way", [by_rules, by_a_budget])
def test_several_ranks_are_refused(way: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    monkeypatch.setattr("lowtide.runtime.session.optimizer_state.has_company", lambda group: True)
    with pytest.raises(lowtide.ConfigError) as caught:
        way(model, optimizer)
    assert str(caught.value) == (
        "memory.optimizer.overlap: deferred is for one rank: it was not tried beside the exchanges of several; write "
        "overlap: auto"
    )


def test_beside_a_file_of_mindspore_transformers_it_is_refused() -> None:
    model, optimizer = build()
    sections = sections_in({"recompute_config": {"recompute": True}})
    with pytest.raises(lowtide.ConfigError) as caught:
        follow(model, sections, memory=load_memory({"optimizer": DEFERRED}), optimizer=optimizer, engine="virtual:0")
    assert str(caught.value) == (
        "memory.optimizer.overlap: deferred is not carried out beside recompute_config and swap_config; write overlap: "
        "auto"
    )
