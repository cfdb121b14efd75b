"""What a recomputed module reads beside its inputs is, when it runs again, what it was, or it is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import lowtide
from lowtide.errors import RecomputeRefusedError
from tests.support import zoo
from tests.support.virtual_engine import virtual

WIDTH = 8
LAYERS = ["layers.0", "layers.1"]
LAYER = {"recompute": "all", "min_bytes": 0, "layers": LAYERS}
SWAPPED = {**LAYER, "swap": "all"}
LEAF = {"recompute": ["layers.*.act", "layers.*.a"], "min_bytes": 0, "layers": LAYERS}
PLANS = {"layer": LAYER, "layer_swapped": SWAPPED, "leaf": LEAF}
every_plan = pytest.mark.parametrize("plan", PLANS)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x))).square()


def stack(block: Callable[[], nn.Module]) -> zoo.Stack:
    seed(0)
    return zoo.Stack(block(), block())


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def rows(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def in_turn(model: nn.Module) -> list[Tensor]:
    found = []
    for step in range(3):
        model(rows(step)).square().mean().backward()
        found += gradients(model)
    return found


def two_in_flight(model: nn.Module, between: Callable[[nn.Module], None] = lambda model: None) -> list[Tensor]:
    found, last = [], model(rows(0)).square().mean()
    for step in range(1, 4):
        loss = model(rows(step)).square().mean()
        between(model)
        last.backward()
        found += gradients(model)
        last = loss
    return found


def twice_through(model: nn.Module) -> list[Tensor]:
    loss = model(rows(0)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


WAYS = {"in_turn": in_turn, "two_in_flight": two_in_flight, "twice_through": twice_through}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything in the modules' attributes, and the process's random states."""
    plain = {
        (name, key): repr(_readable(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not key.startswith("_") and key != "forward"
    }
    random_states = (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()))
    return {**plain, "buffers": [buffer.tolist() for buffer in model.buffers()], "random": random_states}


def _readable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value


def assert_same(block: Callable[[], nn.Module], memory: dict, way: Callable[[nn.Module], list[Tensor]]) -> None:
    """Gradients, and the state afterwards, are plain's."""
    answers = []
    for plan in (None, memory):
        model = stack(block)
        tide = None if plan is None else lowtide.apply(model, plan, engine=virtual(1))
        seed(1)
        found = way(model)
        if tide is not None:
            tide.remove()
        answers.append((found, state_of(model)))
    (want, want_state), (got, got_state) = answers
    assert len(got) == len(want)
    assert all(map(zoo.same_bits, got, want))
    assert got_state == want_state


def refusal(block: Callable[[], nn.Module], memory: dict, way: Callable[[nn.Module], list[Tensor]]) -> str:
    with lowtide.apply(stack(block), memory, engine=virtual(1)) as tide, pytest.raises(RuntimeError) as caught:
        way(tide.model)
    return str(caught.value)


# -- what moves by itself ----------------------------------------------------------------------------------------------


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        return self.act(self.a(x) * self.count * len(self.seen)).square()


class Remembers(Block):
    """A hidden state, as a recurrent block's."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x) if self.hidden is None else self.a(x) + self.hidden)
        self.hidden = y.detach()
        return y.square()


class WritesInPlace(Block):
    """Into a tensor that is no buffer, into a small buffer and into one that is not copied each time."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)
        self.register_buffer("small", torch.ones(1))
        self.register_buffer("large", torch.ones(20_000))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.small.mul_(1.5)
        self.large.mul_(1.25)
        return self.act(self.a(x) * self.small.item() * self.large[-1].item() + self.mean.clone()).square()


@dataclasses.dataclass(slots=True)
class Box:
    number: int = 0


class Holds(Block):
    """Objects in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.table, self.array = Box(), {"inner": [1]}, np.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        self.box.number += 1
        self.table["inner"].append(self.box.number)
        self.array *= 1.25
        return self.act(self.a(x) * self.box.number / len(self.table["inner"]) * float(self.array[0])).square()


class Draws(Block):
    """From five generators; a single normal number leaves numpy with half of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.pythons = torch.Generator().manual_seed(3), random.Random(4)
        self.numpys = np.random.default_rng(5)

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() + np.random.normal() + self.pythons.random() + self.numpys.random()
        return self.act(self.a(x) * factor + torch.rand(WIDTH, generator=self.torchs)).square()


class NotesOnWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.a.weight
        weight.num_calls = getattr(weight, "num_calls", 0) + 1
        return self.act(self.a(x) * weight.num_calls).square()


class MakesOnce(Block):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.mask = torch.rand(WIDTH)
        return self.act(self.a(x) * self.mask).square()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [Counts, Remembers, WritesInPlace, Holds, Draws, NotesOnWeight, MakesOnce])
def test_what_a_layer_moves_by_itself_is_put_back(block: type[nn.Module], way: str) -> None:
    assert_same(block, LAYER, WAYS[way])
    assert_same(block, SWAPPED, WAYS[way])


class Numbered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.act(self.a(x) * self.number).square()


def test_what_was_reset_before_backward_is_put_back() -> None:
    """The second run finds everything as it was before the first, and moves it all the same."""

    def way(model: nn.Module) -> list[Tensor]:
        loss = model(rows(0)).square().mean()
        for layer in model.layers:
            layer.number = 0
        loss.backward()
        return gradients(model)

    assert_same(Numbered, LAYER, way)


_counts = {"all": 0}
_number = 0


class CountsOutside(Block):
    """In a global's contents, in a global, and in an attribute of the class."""

    total = 0

    def forward(self, x: Tensor) -> Tensor:
        global _number  # noqa: PLW0603  the test is about globals
        _counts["all"] += 1
        _number += 3
        type(self).total += 2
        return self.act(self.a(x) * _counts["all"] / type(self).total + _number).square() + self.total


def test_globals_and_attributes_of_the_class_are_put_back() -> None:
    def way(model: nn.Module) -> list[Tensor]:
        global _number
        _counts["all"], CountsOutside.total, _number = 0, 0, 0
        return [*in_turn(model), torch.tensor([_counts["all"], CountsOutside.total, _number])]

    assert_same(CountsOutside, LAYER, way)


def test_a_forward_that_was_replaced_on_the_instance() -> None:
    """As Accelerate and others do; its own variables are put back too."""

    def block() -> nn.Module:
        made, count = Block(), 0

        def forward(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return made.act(made.a(x) * count).square()

        made.forward = forward  # type: ignore[method-assign]
        return made

    assert_same(block, LAYER, in_turn)


def test_a_module_of_torchs_own_that_is_patched_draws_as_it_did() -> None:
    """Those are not asked for Python's random state, unless somebody has put something into them."""

    def block() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        made[1].forward = lambda x: x.tanh().square() * random.random()  # type: ignore[method-assign]
        return made

    assert_same(block, LAYER, two_in_flight)


def test_an_argument_with_a_state_is_put_back() -> None:
    class Takes(Block):
        def forward(self, x: Tensor, box: Box, generator: torch.Generator) -> Tensor:
            box.number += 1
            return self.act(self.a(x) * box.number + torch.rand(WIDTH, generator=generator)).square()

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Takes(), Takes()])
            self.box, self.generator = Box(), torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, self.box, generator=self.generator)
            return x

    def answer(memory: dict | None) -> list[Tensor]:
        seed(0)
        model = Gives()
        tide = None if memory is None else lowtide.apply(model, memory, engine=virtual(1))
        found = in_turn(model)
        if tide is not None:
            tide.remove()
        return [*found, torch.tensor(model.box.number), model.generator.get_state()]

    assert all(map(zoo.same_bits, answer(LAYER), answer(None)))


def test_a_reseeded_numpy_with_half_a_pair_is_seen() -> None:
    """The bytes of numpy's generator are the same before both forwards, its state is not."""

    class Normal(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.a(x) * np.random.normal()).square()

    def way(model: nn.Module) -> list[Tensor]:
        found = []
        for num_drawn in (2, 1, 2):
            np.random.seed(0)
            np.random.normal(size=num_drawn)
            model(rows(0)).square().mean().backward()
            found += gradients(model)
        return found

    assert_same(Normal, LAYER, way)


# -- what others move --------------------------------------------------------------------------------------------------


@every_plan
def test_spectral_norm_with_two_forwards_in_flight(plan: str) -> None:
    """Its weight is a plain tensor in an attribute, another one in each forward."""

    class Spectral(Block):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    assert_same(Spectral, PLANS[plan], two_in_flight)


@every_plan
def test_parametrized_weights_with_two_forwards_in_flight(plan: str) -> None:
    def block() -> nn.Module:
        made = Block()
        parametrizations.weight_norm(made.a)
        parametrizations.spectral_norm(made.b)
        return made

    assert_same(block, PLANS[plan], two_in_flight)


@every_plan
def test_functional_call_with_other_weights_in_flight(plan: str) -> None:
    def way(model: nn.Module) -> list[Tensor]:
        losses, weights = [], []
        for step in range(3):
            weights.append({n: (p.detach() * (step + 1)).requires_grad_() for n, p in model.named_parameters()})
            losses.append(torch.func.functional_call(model, weights[-1], (rows(step),)).square().mean())
        for step in (1, 0, 2):
            losses[step].backward()
        return [weight.grad for leaves in weights for weight in leaves.values()]

    assert_same(Block, PLANS[plan], way)


def _one_more(_module: nn.Module, args: tuple, kwargs: dict) -> tuple:
    return (args[0] + 1,), kwargs


@every_plan
def test_hooks_that_were_there_in_the_forward_only(plan: str) -> None:
    def way(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(3):
            hooks = [
                layer.act.register_forward_hook(lambda _m, _i, out, by=step + 2: out * by) for layer in model.layers
            ]
            hooks += [layer.b.register_forward_pre_hook(_one_more, with_kwargs=True) for layer in model.layers]
            loss = model(rows(step)).square().mean()
            for hook in hooks:
                hook.remove()
            loss.backward()
            found += gradients(model)
        assert not any(layer.act._forward_hooks or layer.b._forward_pre_hooks for layer in model.layers)
        assert not any(layer.b._forward_pre_hooks_with_kwargs for layer in model.layers)
        return found

    assert_same(Block, PLANS[plan], way)


class Scaled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop = 1.0, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.a(x)) * self.scale).square()


def _other_numbers(model: nn.Module) -> None:
    for layer in model.layers:
        layer.scale += 1.0


def _freeze(model: nn.Module) -> None:
    model.layers[0].requires_grad_(requires_grad=False)


@every_plan
@pytest.mark.parametrize("change", [_other_numbers, nn.Module.eval, _freeze])
def test_numbers_flags_and_modes_that_change_before_backward(plan: str, change: Callable[[Any], Any]) -> None:
    def way(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(3):
            model.train().requires_grad_()
            loss = model(rows(step)).square().mean()
            change(model)
            loss.backward()
            found += [*gradients(model), torch.tensor([m.training for m in model.modules()])]
            found.append(torch.tensor([p.requires_grad for p in model.parameters()]))
        return found

    assert_same(Scaled, PLANS[plan], way)


def test_batch_norm_in_both_modes_in_flight() -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.act(self.a(x))).square()

    assert_same(Normed, LAYER, two_in_flight)


# -- what is refused ---------------------------------------------------------------------------------------------------


class Frozen(Block):
    """Only the bias is trained: plain autograd saves no parameter that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sigmoid()
        self.a.weight.requires_grad_(requires_grad=False)
        self.b.weight.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


def _step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.sub_(0.1)


def _exchange(model: nn.Module) -> None:
    for layer in model.layers:
        layer.a.bias.data = layer.a.bias.data + 1


@every_plan
@pytest.mark.parametrize(
    ("change", "how"), [(_step, "is at version 2, was at 1"), (_exchange, "its data was exchanged")]
)
def test_a_parameter_written_before_backward_is_refused(plan: str, change: Callable, how: str) -> None:
    where, what = ("layers.1.a", "Linear") if plan == "leaf" else ("layers.1", "Frozen")
    text = refusal(Frozen, PLANS[plan], lambda model: two_in_flight(model, change))
    assert text == (
        "lowtide: the parameter 'layers.1.a.bias' was written to between the forward pass of the recomputed "
        f"'{where}' ({what}) and its backward ({how}). Run again, it would give other gradients. Write to it after the "
        "backward pass (an optimizer's step, a copy_), or give this module the fate keep or swap."
    )


def test_a_parameter_that_plain_autograd_saved_gets_its_error() -> None:
    plain = stack(Block)
    with pytest.raises(RuntimeError) as want:
        two_in_flight(plain, _step)
    got = refusal(Block, LAYER, lambda model: two_in_flight(model, _step))
    assert got.split("[")[0] == str(want.value).split("[")[0]


def _add(model: nn.Module) -> None:
    model.layers[1].table.add_(1)


def test_a_large_tensor_written_before_backward_is_refused() -> None:
    class Large(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(20_000)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.a(x) * self.table[0].item()).square()

    def way(model: nn.Module) -> list[Tensor]:
        in_turn(model)
        return two_in_flight(model, _add)

    text = refusal(Large, LAYER, way)
    assert text.startswith("lowtide: the tensor 'layers.1.table' was written to between the forward pass of the recomp")


def test_a_layer_that_writes_to_its_own_parameter_is_refused_in_the_first_step() -> None:
    class Shrinks(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.a.weight.mul_(0.9)
            return super().forward(x)

    assert refusal(Shrinks, LAYER, in_turn) == (
        "lowtide: the recomputed 'layers.0' (Shrinks) wrote to its parameter 'a.weight' in its own forward, and there "
        "is no copy of it to run it again from. Give it the fate keep or swap."
    )


def test_an_iterator_is_refused_in_the_first_step() -> None:
    class Iterates(Block):
        def __init__(self) -> None:
            super().__init__()
            self.steps = itertools.count(1)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.a(x) * next(self.steps)).square()

    assert refusal(Iterates, LAYER, in_turn) == (
        "lowtide: the recomputed 'layers.0' (Iterates) can reach an iterator, 'steps', and an iterator cannot be wound "
        "back to run the module again. Give it the fate keep or swap, or keep the position as a number."
    )


class Breaks(Block):
    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("broken")
        return super().forward(x)


def test_an_error_in_the_second_run_names_the_module() -> None:
    text = refusal(Breaks, LAYER, in_turn)
    assert text.startswith("lowtide: the recomputed 'layers.1' (Breaks) failed when it was run again for its backward")
    assert "with ValueError: broken." in text


def test_a_second_run_that_saves_something_else_names_the_module() -> None:
    """torch's own error says nothing about lowtide."""

    def way(model: nn.Module) -> list[Tensor]:
        with parametrize.cached():
            loss = model(rows(0)).square().mean() + model(rows(1)).square().mean()
        loss.backward()
        return []

    text = refusal(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), LAYER, way)
    assert text.startswith(
        "lowtide: the recomputed 'layers.1' (ParametrizedLinear) did something else when it was run a"
    )
    assert "Give this module the fate keep or swap." in text


# -- what stays cheap -------------------------------------------------------------------------------------------------


def test_a_layer_at_rest_is_walked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime.recompute import watch as state

    num_walks = 0

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_walks
        num_walks += 1
        return taken(*args, **kwargs)

    taken = state.take
    model = stack(Block)
    with lowtide.apply(model, LAYER, engine=virtual(1)):
        in_turn(model)
        monkeypatch.setattr(state, "take", count)
        in_turn(model)
    assert num_walks == 0


class Cached(Block):
    def forward(self, x: Tensor, past_key_values: list | None = None) -> Tensor:  # type: ignore[override]
        return self.act(self.a(x) + sum(past_key_values or [])).square()


class WithCache(nn.Module):
    def __init__(self, cache: list) -> None:
        super().__init__()
        self.layers, self.cache = nn.ModuleList([Cached(), Cached()]), cache

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, past_key_values=self.cache)
        return x


def test_a_cache_that_holds_tokens_is_refused() -> None:
    with lowtide.apply(WithCache([1.0]), LAYER, engine=virtual(1)) as tide:
        with pytest.raises(RuntimeError) as caught:
            tide.model(torch.ones(2, WIDTH))
        assert str(caught.value) == (
            "lowtide: a layer under recompute was called with past_key_values that already holds tokens; running it "
            "again would change them. Train with use_cache=False, or give this layer another fate."
        )


def _gemma4() -> nn.Module:
    """Its last three layers read the keys of earlier ones: they have no tokens of their own in the cache."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "sliding_window": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 3}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    per_layer = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    config = Gemma4TextConfig(**sizes, **heads, **per_layer, num_hidden_layers=6, layer_types=kinds, use_cache=True)
    torch.manual_seed(0)
    return Gemma4ForCausalLM(config).train()


def _lfm2() -> nn.Module:
    """Each second layer is a convolution, which keeps a state of its own in the cache."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = ["conv", "full_attention"] * 2
    torch.manual_seed(0)
    return Lfm2ForCausalLM(Lfm2Config(**sizes, **heads, layer_types=kinds, use_cache=True)).train()


@pytest.mark.filterwarnings("ignore:lowtide. recomputed layers leave")
@pytest.mark.parametrize(
    ("build", "layers"),
    [(_gemma4, "model.layers.*"), (_gemma4, "model.layers.3,5"), (_lfm2, "model.layers.2")],
)
def test_layers_that_keep_no_tokens_in_the_cache_are_recomputed(build: Callable[[], nn.Module], layers: str) -> None:
    ids = torch.arange(24).view(2, 12)

    def run(model: nn.Module) -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *gradients(model)]

    truth, model = run(build()), build()
    with lowtide.apply(model, {"recompute": [layers]}) as tide:
        assert all(map(torch.equal, run(model), truth))
        assert tide.stats.recomputed_bytes > 0


class _OwnBackward(Block):
    """Trains its first linear by a loss of its own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x.detach()))
        h.square().mean().backward(retain_graph=True)
        return self.b(h.detach() + x)


class _OwnPenalty(Block):
    """Adds to the gradient of its first linear by a backward pass that reads nothing that was saved."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.a.weight.sum().backward()
        return self.b(self.act(self.a(x))).square()


@pytest.mark.parametrize("kind", [_OwnBackward, _OwnPenalty])
def test_a_backward_pass_in_a_forward_is_refused_in_the_first_step(kind: type[Block]) -> None:
    truth = in_turn(stack(kind))
    model = stack(kind)
    with lowtide.apply(model, LAYER):
        for name in ("layers.1", "layers.0"):
            with pytest.raises(RecomputeRefusedError) as caught:
                model(rows(0)).square().mean().backward()
            assert str(caught.value) == (
                f"lowtide: the recomputed '{name}' ({kind.__name__}) calls backward() in its own forward, and run "
                "again it added to gradients once more: set them to zero, and keep or swap it. It is not run again "
                "from the next step on."
            )
            model.zero_grad()
        assert all(map(torch.equal, in_turn(model), truth))


class _WithStatistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.norm(self.a(x)))).square()


def test_statistics_that_were_put_in_the_place_of_others_move_once() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(8):
            if step == 6:
                there = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(there, assign=True)
            model(rows(step)).square().mean().backward()
            found += [*gradients(model), *(buffer.clone() for buffer in model.buffers())]
        return found

    truth = run(stack(_WithStatistics))
    for plan in (LAYER, {**LEAF, "recompute": ["layers.*.norm"]}):
        model = stack(_WithStatistics)
        with lowtide.apply(model, plan):
            assert all(map(torch.equal, run(model), truth)), plan
