"""The observed step: its bytes are those of a plain step, its names those of the runtime, and it leaves no trace."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.config.memory import load_memory
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.errors import ConfigError
from lowtide.planner.plan_profile import plan_profile
from lowtide.profiling import observe_step
from lowtide.profiling.observe_step import observe
from lowtide.tensors import private
from lowtide.tensors.live_bytes import LiveBytes
from lowtide.tensors.snapshot import take
from lowtide.timeline.step import Link
from tests.support import zoo
from tests.support.grid import one_of
from tests.support.virtual_engine import virtual
from tests.support.what_moved import changed

MODELS = (
    "llama", "llama_bf16", "llama_eager", "llama_autocast", "llama_cache", "qwen3_moe", "deepseek_v3", "gpt2_dropout",
    "unet", "custom_function", "lora_autocast", "tied", "transformer_encoder", "shared_layer", "strided_views",
    "structured_outputs", "complex", "integers", "zero_size", "inplace_input", "draws", "sparse", "llama_checkpointed",
)  # fmt: skip


@functools.cache
def observed(name: str) -> Profile:
    """Once for all tests that only read it."""
    return observed_anew(name)


def observed_anew(name: str) -> Profile:
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    torch.manual_seed(1)
    return observe(model, lambda: case.loss(model, batch))


def keep_curve(profile: Profile) -> list[int]:
    """Live bytes of the plan that keeps everything, as a simulator would add them up."""
    state = profile.state
    num_ops = len(profile.op_names)
    curve = [state.parameters + state.buffers + state.inputs + nbytes for nbytes in profile.op_bytes]
    for node in profile.nodes:
        for index in range(max(0, node.born), min(num_ops, max(node.dies, node.release))):
            curve[index] += node.nbytes
    return curve


@pytest.mark.parametrize("name", one_of(2, MODELS, first=1))
def test_the_kept_plan_has_the_peak_of_a_plain_step(name: str) -> None:
    case = zoo.CASES[name]
    profile = observed(name)
    model, batch = case.build(0), case.batch(0)
    torch.manual_seed(1)
    with LiveBytes(model=model) as live:
        live.add_all(batch.values())
        case.loss(model, batch).backward()
    assert max(keep_curve(profile)) == live.peak_bytes


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "transformer_encoder", "integers", "shared_layer"])
def test_the_kept_curve_is_the_plain_curve_at_every_operator(name: str) -> None:
    case = zoo.CASES[name]
    profile = observed(name)
    model, batch = case.build(0), case.batch(0)
    trained = [p for p in model.parameters() if p.requires_grad]

    class Curve(LiveBytes):
        """Without the detached aliases that only one of the two runs makes."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func is not torch.ops.aten.detach.default:
                found.append(self.now_bytes)
            return out

    torch.manual_seed(1)
    found: list[int] = []
    with Curve(model=model) as live:
        live.add_all(batch.values())
        # Hooks that keep everything: a step with hooks saves the same, and makes the same operators.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t if t.grad_fn is None else t.detach(), lambda t: t):
            loss = case.loss(model, batch)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        del loss
    assert keep_curve(profile) == found
    assert len(grads) == len(trained)


@pytest.mark.parametrize("name", one_of(2, MODELS))
def test_sites_have_the_names_that_the_runtime_gives_them(name: str) -> None:
    case = zoo.CASES[name]
    profile = observed(name)
    model, batch = case.build(0), case.batch(0)
    torch.manual_seed(1)
    with lowtide.apply(model, {"swap": "none", "recompute": "none", "min_bytes": 0}) as tide:
        case.loss(model, batch).backward()
        runtime = {site.name: site.nbytes for site in tide.plan.sites}
    ours = {site.name: site.nbytes for site in (*profile.sites, *profile.staying)}
    assert ours.items() <= runtime.items()
    absent = {site: nbytes for site, nbytes in runtime.items() if site not in ours}
    assert not any(absent.values()), absent


@pytest.mark.parametrize("name", MODELS)
def test_lifetimes_are_in_order(name: str) -> None:
    profile = observed(name)
    num_ops, num_forward = len(profile.op_names), profile.num_forward_ops
    assert len({node.name for node in profile.nodes}) == len(profile.nodes)
    assert len(profile.op_seconds) == len(profile.op_bytes) == len(profile.op_gradient_bytes) == num_ops
    assert min(profile.op_bytes) >= 0
    assert all(0 <= g <= b for g, b in zip(profile.op_gradient_bytes, profile.op_bytes))
    for site in profile.sites:
        assert -1 <= site.born <= site.saved < num_forward, site.name
        assert site.saved < site.dies <= num_ops, site.name
        assert site.reads == tuple(sorted(site.reads)), site.name
        assert num_forward <= site.reads[0] <= site.reads[-1] < num_ops, site.name
        assert site.reads[-1] < site.release <= num_ops, site.name
        assert 0 <= site.first_sequence <= site.last_sequence, site.name
    # How long the copy of a swapped retained input may take is counted from where the retained input is caught.
    for retained_input in (node for node in profile.nodes if node.retained_input):
        before = [site.first_sequence for site in profile.sites if site.saved < retained_input.saved]
        after = [site.last_sequence for site in profile.sites if site.saved > retained_input.saved]
        assert max(before, default=0) <= retained_input.first_sequence <= min(after, default=10**9), retained_input.name
    needed = {name for node in profile.nodes if node.recipe for name in node.recipe.nodes}
    retained_inputs = [node for node in profile.nodes if node.retained_input and node.name not in needed]
    # What a layer that runs again starts from is one too.
    assert all(node.retained_input.module in profile.layers for node in retained_inputs), (
        "a retained input that nothing starts from"
    )
    assert Profile.from_json(profile.to_json()) == profile


def test_equal_layers_share_a_signature() -> None:
    profile = observed("llama")
    assert profile.layers == ("model.layers.0", "model.layers.1")
    assert len(set(profile.signatures)) == 1
    assert len(set(observed("deepseek_v3").signatures)) == 2


@pytest.mark.parametrize("name", ["stateful", "unet", "gpt2_dropout", "inplace_input", "checkpointed"])
def test_it_leaves_no_trace(name: str) -> None:
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    inputs = {key: value.clone() for key, value in batch.items()}
    grads = {p: torch.ones_like(p) for p in model.parameters()}
    for parameter, grad in grads.items():
        parameter.grad = grad
    torch.manual_seed(7)
    state = torch.get_rng_state()
    everything = take(model, code=True, beside=batch)
    observe(model, batch, loss=lambda out: out.float().square().mean() if isinstance(out, torch.Tensor) else out.loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, inputs[key]) for key, value in batch.items())
    assert all(p.grad is grad and bool((grad == 1).all()) for p, grad in grads.items())
    assert everything.is_whole
    assert changed(everything) == []


def test_backward_sees_the_bytes_that_were_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked bytes come back: a saved tensor that is filled after it was saved, too."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rrelu(self.linear(x), training=True).square().sum()

    seen = []
    model = Noisy()
    backward = observe_step._backward

    def seen_backward(*given: Any) -> Any:
        found = backward(*given)
        seen.extend(grad.clone() for grad in found)
        return found

    monkeypatch.setattr(observe_step, "_backward", seen_backward)
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    observe(model, (x,))
    torch.manual_seed(3)
    model(x).backward()
    assert model.linear.weight.grad is not None
    assert torch.equal(seen[0], model.linear.weight.grad)


def test_what_a_function_hides_is_named() -> None:
    class Hides(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.exp()
            return ctx.kept * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.kept * 2

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Hides.apply(self.linear(x)).sum()

    profile = observe(Block(), (torch.randn(4, 16),))
    assert [(hidden.name, hidden.nbytes) for hidden in profile.hidden] == [("exp", 256)]
    assert not observed("llama").hidden


def test_optimizer_state_is_counted_before_it_exists() -> None:
    model = nn.Linear(100, 100)
    batch = (torch.randn(2, 100),)
    weights = 10_100 * 4
    for make, factor, extra in ((torch.optim.AdamW, 2, 8), (torch.optim.SGD, 0, 0)):
        optimizer = make(model.parameters(), lr=0.1)
        state = observe(model, batch, loss=torch.sum, optimizer=optimizer).state
        assert (state.parameters, state.gradients) == (weights, weights)
        assert state.optimizer == factor * weights + extra
        assert not optimizer.state
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    assert observe(model, batch, loss=torch.sum, optimizer=optimizer).state.optimizer_temporaries >= weights


def test_an_optimizer_that_needs_values_is_said_so() -> None:
    model = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profile = observe(
            model, (torch.randn(2, 4),), loss=torch.sum, optimizer=torch.optim.Adafactor(model.parameters())
        )
    assert profile.state.optimizer == 0
    assert "Adafactor cannot step without values" in str(caught[0].message)


def test_any_output_will_do_when_no_scalar_is_asked_for() -> None:
    model = nn.Linear(4, 4)
    profile = observe(model, (torch.randn(2, 4),), needs_scalar=False)
    assert profile.batch == "float32[2, 4]"
    assert profile.num_forward_ops < len(profile.op_names)


def test_what_a_model_returns_in_an_object_of_its_own() -> None:
    found = [
        observe(nn.Linear(4, 4), (torch.ones(2, 4),), loss=wrap, needs_scalar=False).num_forward_ops
        for wrap in (lambda out: out, lambda out: SimpleNamespace(logits=out, others=[]))
    ]
    assert found[0] == found[1]
    with pytest.raises(ConfigError) as error:
        observe(nn.Linear(4, 4), (torch.ones(2, 4),), loss=lambda out: iter([out]), needs_scalar=False)
    assert str(error.value) == (
        "observe: no tensor that requires a gradient was found in what Linear returns (list_iterator); return tensors, "
        "in containers, or in attributes of one object"
    )


@pytest.mark.parametrize(
    ("batch", "loss", "message"),
    [
        ((torch.ones(2, 4),), None, "observe: the loss must be one number, not a tensor of shape [2, 4]; reduce it "
         "(`.mean()`), or say how with loss="),
        ((torch.ones(2, 4),), lambda out: {"a": out}, "observe: loss(output) is no loss but dict; return a scalar "
         "tensor, an output with `.loss`, or say how to get it with loss="),
        ((torch.ones(2, 4),), lambda out: out.detach().sum(), "observe: the loss does not depend on anything that "
         "requires a gradient"),
        ((torch.ones(2, 5),), torch.sum, "observe: the batch does not fit the model: Linear(float32[2, 5]) raised "
         "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 4x4)"),
        ([torch.ones(2, 4)], torch.sum, "observe: batch must be a mapping (model(**batch)), a tuple (model(*batch)) "
         "or a function that returns the loss, not list"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(batch, loss, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        observe(nn.Linear(4, 4), batch, loss=loss)
    assert str(error.value) == message


def test_a_batch_with_a_wrong_name_is_explained() -> None:
    with pytest.raises(ConfigError) as error:
        observe(nn.Linear(4, 4), {"x": torch.ones(2, 4)})
    assert str(error.value).startswith(
        "observe: the batch does not fit the model: Linear(x=float32[2, 4]) raised TypeError: "
    )


def test_a_frozen_model_and_a_meta_model_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"^lowtide: no parameter requires a gradient, so there is nothing to plan"):
        observe(nn.Linear(4, 4).requires_grad_(False), (torch.ones(2, 4),))
    with pytest.raises(ConfigError, match=r"^observe: the model is on the meta device; give it weights"):
        observe(nn.Linear(4, 4, device="meta"), (torch.ones(2, 4),))


def test_two_observations_agree_in_everything_but_time() -> None:
    first, second = observed_anew("qwen3_moe"), observed_anew("qwen3_moe")
    times = {"op_seconds": (), "nodes": ()}
    assert dataclasses.replace(first, **times) == dataclasses.replace(second, **times)
    for one, other in zip(first.nodes, second.nodes):
        assert dataclasses.replace(one, recipe=None) == dataclasses.replace(other, recipe=None)


def test_state_that_exists_is_counted_as_it_is() -> None:
    """A resumed optimizer has stepped before; its counters are looked at, and nothing of it changes."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[model.weight].items()}
    state = observe(model, (torch.ones(2, 100),), loss=torch.sum, optimizer=optimizer).state
    assert state.optimizer == 2 * 10_100 * 4 + 8
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[model.weight].items())


# ---------------------------------------------------------------------------------------------------------------------
# What no plan can decide about


LINK = Link(out_bytes_per_second=1e9, in_bytes_per_second=1e9)


def halfway(profile: Profile) -> Plan:
    """A plan for half of what can be saved, or for all of it where nothing can."""
    generous = plan_profile(profile, load_memory({"budget": 1 << 40, "min_bytes": 0}), link=LINK)
    assert generous.predicted is not None
    budget = (generous.predicted.floor_bytes + generous.predicted.plain_peak_bytes) // 2
    memory = load_memory({"budget": budget, "min_bytes": 0})
    return plan_profile(profile, memory, link=LINK, time_limit_seconds=0.1)


@pytest.mark.parametrize("name", one_of(6, zoo.CASES))
def test_a_plan_knows_everything_that_the_runtime_sees(name: str) -> None:
    case = zoo.CASES[name]
    model, batch = case.build(0), case.batch(0)
    with warnings.catch_warnings(), lowtide.apply(model, halfway(observed(name)), engine=virtual(1)) as tide:
        if name != "llama_checkpointed":  # lowtide says that the model checkpoints
            warnings.simplefilter("error")
        torch.manual_seed(1)
        case.loss(model, batch).backward()
        assert (tide.stats.num_unknown, tide.stats.num_divergences) == (0, 0)


def test_what_backward_never_reads_is_listed_and_counted_once() -> None:
    profile = observed("structured_outputs")
    assert [(entry.name, entry.reason) for entry in profile.staying] == [("layers.1.exp", "never read by backward")]
    (planned,) = [site for site in halfway(profile).sites if site.name == "layers.1.exp"]
    assert (planned.fate, planned.reason, planned.nbytes) == (Fate.KEEP, "never read by backward", 2048)
    assert planned.layer == "layers.1"
    assert Profile.from_json(profile.to_json()) == profile


def test_what_is_first_saved_as_a_conjugate_is_not_decided_about() -> None:
    """Its first handle cannot be made from a storage, so no later one may count on that."""

    class Conjugates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.weight
            z = (y * 2.0).conj()
            return (z * self.weight * z.conj().exp()).abs().sum()

    torch.manual_seed(0)
    model, x = Conjugates(), torch.randn(4, 4, dtype=torch.complex64)
    profile = observe(model, (x,))
    reasons = {entry.name: entry.reason for entry in profile.staying}
    assert reasons == {"mul_1": "not a plain tensor on the device"}
    assert "mul_1" not in {node.name for node in profile.nodes}
    with lowtide.apply(model, halfway(profile), engine=virtual(2)) as tide:
        for _ in range(2):
            model(x).backward()
        assert (tide.stats.num_unknown, tide.stats.num_divergences) == (0, 0)


def test_a_buffer_that_the_forward_replaces_is_no_start_of_a_recipe() -> None:
    profile = observed("stateful")
    inputs = {entry.name for node in profile.nodes if node.recipe for entry in node.recipe.inputs}
    assert not any(name.endswith("average") for name in inputs)
    by_name = {node.name: node for node in profile.nodes}
    assert by_name["layers.0.tanh"].why_no_recipe == "unknown producer"  # of the average times something
    assert by_name["layers.0.mul_3"].recipe is not None


class Cross(nn.Module):
    """Its inputs are made before its forward begins: no operator inside gives them a name."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_inputs))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        parts = [linear(x.exp() * x) for linear, x in zip(self.linears, inputs, strict=True)]
        return torch.stack(parts).square().mean()


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_inputs_made_outside_have_the_name_that_the_runtime_gives_them(num_inputs: int) -> None:
    torch.manual_seed(0)
    model, x = Cross(num_inputs), torch.randn(16, 8)

    def loss() -> torch.Tensor:
        return model(*(model.embed(x) + number for number in range(num_inputs)))

    profile = observe(model, loss)
    by_name = {node.name: node for node in profile.nodes}
    assert by_name["input"].recipe is None
    assert by_name["input"].why_no_recipe == "unknown producer"
    starts = {name for node in profile.nodes if node.recipe for name in node.recipe.nodes}
    assert starts <= by_name.keys()
    if num_inputs == 1:
        assert "input" in starts
        assert profile.staying == ()
    else:
        # Both are called 'input' by the runtime: one of them stays, and recipes start from neither.
        assert "input" not in starts
        assert profile.staying == ()  # by name it is in the plan
    truth = torch.autograd.grad(loss(), list(model.parameters()))
    with lowtide.apply(model, halfway(profile), engine=virtual(3)) as tide:
        for _ in range(2):
            found = torch.autograd.grad(loss(), list(model.parameters()))
            assert all(zoo.same_bits(a, b) for a, b in zip(found, truth, strict=True))
        assert (tide.stats.num_unknown, tide.stats.num_divergences) == (0, 0)


class _Asks(nn.Module):
    """Asks in its first forward what an operator would give, as DTensor does."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.asks:
            with private.FakeTensorMode():
                torch.ones(2, 4).relu().sum()
        return self.linear(x).relu().sum()


def test_what_only_asks_is_no_operator_of_the_step() -> None:
    asking, plain = (observe(_Asks(asks=asks), (torch.ones(2, 4),)) for asks in (True, False))
    assert [node.name for node in asking.nodes] == [node.name for node in plain.nodes]
    assert asking.op_names == plain.op_names


@torch.library.custom_op("lowtide_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws, and no tag says so."""
    return x + torch.rand_like(x)


@torch.library.custom_op("lowtide_tests::quiet", mutates_args=())
def quiet(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_what_an_operator_of_somebody_elses_has_drawn_has_no_recipe() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x).exp()
            return h * noisy(h.detach()) * quiet(h.detach())

    profile = observe(Net(8, 8), (torch.randn(4, 8),), loss=torch.sum)
    by_name = {node.name: node for node in profile.nodes}
    assert by_name["noisy"].why_no_recipe == "random"
    assert by_name["quiet"].recipe is not None


def test_what_goes_on_as_a_class_of_the_users_keeps_its_name() -> None:
    class Own(torch.Tensor):
        pass

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = super().forward(x).as_subclass(Own).exp()
            return super().forward(own).as_subclass(torch.Tensor).exp()

    profile = observe(Net(8, 8), (torch.randn(2, 4, 8),), loss=lambda out: out.square().mean())
    by_name = {node.name: node for node in profile.nodes}
    assert by_name["exp_1"].recipe is not None
    assert set(by_name["exp_1"].recipe.nodes) <= by_name.keys() and "exp" in by_name
