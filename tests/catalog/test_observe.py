"""The observed step: its bytes are those of a plain step, its names those of the runtime, and it leaves no trace."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import zoo
from torch import nn

import lowtide
from lowtide.catalog.live import LiveBytes
from lowtide.catalog.observe import observe
from lowtide.catalog.site import Profile
from lowtide.errors import ConfigError

MODELS = (
    "llama", "llama_bf16", "llama_eager", "llama_autocast", "llama_cache", "qwen3_moe", "deepseek_v3", "gpt2_dropout",
    "unet", "custom_function", "lora_autocast", "tied", "transformer_encoder", "shared_layer", "strided_views",
    "structured_outputs", "complex", "integers", "zero_size", "inplace_input", "draws", "sparse", "llama_checkpointed",
)  # fmt: skip


def observed(name: str, model: nn.Module | None = None) -> Profile:
    case = zoo.CASES[name]
    model = case.build(0) if model is None else model
    batch = case.batch(0)
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


@pytest.mark.parametrize("name", MODELS)
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
            if func is torch.ops.aten.detach.default:
                self.curve.pop()
            return out

    torch.manual_seed(1)
    with Curve(model=model, keeps_curve=True) as live:
        live.add_all(batch.values())
        # Hooks that keep everything: a step with hooks saves the same, and makes the same operators.
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t if t.grad_fn is None else t.detach(), lambda t: t):
            loss = case.loss(model, batch)
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        del loss
    assert keep_curve(profile) == live.curve
    assert len(grads) == len(trained)


@pytest.mark.parametrize("name", MODELS)
def test_sites_have_the_names_that_the_runtime_gives_them(name: str) -> None:
    case = zoo.CASES[name]
    profile = observed(name)
    model, batch = case.build(0), case.batch(0)
    torch.manual_seed(1)
    with lowtide.apply(model, {"swap": "none", "recompute": "none", "min_bytes": 0}) as tide:
        case.loss(model, batch).backward()
        runtime = {site.name: site.nbytes for site in tide.plan.sites}
    ours = {site.name: site.nbytes for site in profile.sites}
    assert ours.items() <= runtime.items()
    # What backward never reads, what has no bytes and what is a conjugate stays where it is: no decision to make.
    absent = {site for site in runtime if site not in ours}
    assert all(runtime[site] <= 2048 for site in absent)
    if name in ("llama", "llama_autocast", "gpt2_dropout", "unet", "lora_autocast"):
        assert not absent


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
    needed = {name for node in profile.nodes if node.recipe for name in node.recipe.nodes}
    assert all(node.name in needed for node in profile.nodes if node.anchor), "an anchor that no recipe reads"
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
    observe(model, batch, loss=lambda out: out.float().square().mean() if isinstance(out, torch.Tensor) else out.loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(torch.equal(value, inputs[key]) for key, value in batch.items())
    assert all(p.grad is grad and bool((grad == 1).all()) for p, grad in grads.items())
    assert zoo.footprint(model) == zoo.plain_footprint(name)


def test_backward_sees_the_bytes_that_were_saved() -> None:
    """Parked bytes come back: a saved tensor that is filled after it was saved, too."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rrelu(self.linear(x), training=True).square().sum()

    seen = []
    model = Noisy()
    model.linear.weight.register_hook(lambda grad: seen.append(grad.clone()))
    x = torch.randn(4, 8)
    torch.manual_seed(3)
    observe(model, (x,))
    torch.manual_seed(3)
    model(x).backward()
    assert torch.equal(seen[0], seen[1])


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
    with pytest.raises(ConfigError, match=r"^observe: no parameter requires a gradient; nothing is saved"):
        observe(nn.Linear(4, 4).requires_grad_(False), (torch.ones(2, 4),))
    with pytest.raises(ConfigError, match=r"^observe: the model is on the meta device; give it weights"):
        observe(nn.Linear(4, 4, device="meta"), (torch.ones(2, 4),))


def test_two_observations_agree_in_everything_but_time() -> None:
    first, second = observed("qwen3_moe"), observed("qwen3_moe")
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
