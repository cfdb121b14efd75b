"""Recipes are proven in every forward pass: what a model chooses or counts anew in each step is never made from old."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide.core.fate import Fate
from lowtide.core.log import Listener
from lowtide.core.recipe import Geometry, Recipe, RecipeInput, RecipeStep
from lowtide.recipes import proof
from lowtide.recipes.proof import OperatorLog, Start, is_same_constant, proof_of
from lowtide.runtime.recompute.fingerprint import Fingerprints, RecipeMismatchError
from lowtide.tensors.view import Shape
from tests.support import zoo
from tests.support.small_models import (
    WIDTH,
    Gated,
    assert_plain,
    gradients,
    only_made,
    profiled,
    rows,
    small_loss,
    stack,
)
from tests.support.virtual_engine import virtual


class Changing(nn.Module):
    """One operator, or a few, that depend on the number of the step."""

    def __init__(self, change: Callable[[Changing, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.frozen = nn.ModuleList(nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(3))
        self.register_buffer("table", torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(4)))
        # Rows that differ in one number.
        self.register_buffer("sparse", torch.zeros(3, WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH))
        for row in range(3):
            self.sparse[row, row] = 1.0
        self.change = change
        self.step = [0]  # a list: plans do not look into it

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.change(self, self.first(x), self.step[0]).tanh()).sin())


def _of_inference_mode(model: Changing, x: Tensor, step: int) -> Tensor:
    """As a state that an evaluation leaves in the model."""
    with torch.inference_mode(mode=step > 0):
        state = model.table[step % 3] * 2.0
    return x + state


CHANGES: dict[str, Callable[[Changing, Tensor, int], Tensor]] = {
    "a frozen layer": lambda m, x, k: m.frozen[k % 3](x),
    "a row of a buffer": lambda m, x, k: x + m.table[k % 3],
    "a row that differs in one number": lambda m, x, k: x + m.sparse[k % 3],
    "a temperature": lambda m, x, k: x / (1.0 + k),
    "a scale": lambda m, x, k: x * (0.5 + k),
    "a number that is added": lambda m, x, k: x + 0.1 * k,
    "an exponent": lambda m, x, k: x.abs().add(0.5).pow(1.5 + k),
    "a slope": lambda m, x, k: F.leaky_relu(x, 0.1 + 0.1 * k),
    "bounds": lambda m, x, k: x.clamp(-1.0 - k, 1.0),
    "a roll": lambda m, x, k: x.roll(k, 0),
    "a slice": lambda m, x, k: torch.cat([x[:, k : k + WIDTH // 2], x[:, : WIDTH // 2]], 1),
    "a dimension": lambda m, x, k: x.softmax(k % 2),
    "a threshold": lambda m, x, k: torch.where(x > 0.1 * k, x, -x),
    "an epsilon": lambda m, x, k: F.layer_norm(x, (WIDTH,), eps=1e-5 * 10**k),
    "an operator": lambda m, x, k: x.sin() if k % 2 else x.cos(),
    "the sign of zero": lambda m, x, k: x * (0.0 if k % 2 else -0.0) + x.exp(),
    "written in place": lambda m, x, k: x.mul(2.0).add_(0.1 * k),
    "a tensor of inference mode": _of_inference_mode,
    "an alpha": lambda m, x, k: torch.add(x, x.sin(), alpha=1 + k),
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(1)
    return zoo.Stack(Changing(CHANGES[name]), Changing(CHANGES[name]))


def _at_step(model: nn.Module, step: int) -> nn.Module:
    for layer in model.layers:
        layer.step = [step]
    return model


def _train(model: nn.Module, num_steps: int = 5, num_rows: int = 8) -> list[Tensor]:
    found = []
    for step in range(num_steps):
        loss = small_loss(_at_step(model, step), rows(num_rows, seed=step))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found += [loss.detach(), *torch.autograd.grad(loss, trained)]
    return found


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(zoo.same_bits(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:lowtide")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_from_step_to_step_is_not_made_from_the_first_one(name: str) -> None:
    model = _model(name)
    truth = _train(model)
    plan = only_made(profiled(_at_step(model, 0)))
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        assert _same(_train(model), truth)
        assert tide.stats.recomputed_bytes > 0


class Gates(nn.Module):
    """Parts of one storage, each with a version counter of its own, two of them written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        reset, update, new = self.inputs(x).unsafe_chunk(3, 1)
        reset, update = reset.sigmoid_(), update.sigmoid_()
        new = (new.sin() + reset * x).tanh()
        return (new - update * new).cos() + update.sin() + reset.exp()


def test_parts_with_versions_of_their_own_are_told_apart_by_where_they_lie() -> None:
    model = stack(Gates(), Gates())
    profile = profiled(model)
    for name in [site.name for site in profile.sites if site.recipe is not None]:
        others = {site.name: Fate.KEEP for site in profile.sites if site.name != name}
        with lowtide.apply(model, only_made(profile, **others), engine=virtual(0)) as tide:
            got = [gradients(model, rows()) for _ in range(3)]
            assert tide.stats.recomputed_bytes > 0, name
            assert tide.stats.num_divergences == 0, name
        for each in got:
            assert_plain(model, rows(), each)


@pytest.mark.parametrize("name", ["a row that differs in one number", "a threshold", "a number that is added"])
def test_without_the_proof_a_fingerprint_may_not_see_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests would fail if the proof were gone: gradients are wrong, or the net under it raises."""
    monkeypatch.setattr(proof.Proof, "mismatch", lambda *_: "")
    model = _model(name)
    truth = _train(model)
    with lowtide.apply(model, only_made(profiled(_at_step(model, 0))), engine=virtual(0)):
        try:
            is_right = _same(_train(model), truth)
        except RecipeMismatchError:
            is_right = False
    assert not is_right


@pytest.mark.parametrize("name", ["a temperature", "a scale"])
def test_under_a_budget_recipes_that_do_not_hold_are_planned_away(name: str) -> None:
    model = _model(name)
    truth = _train(model, num_rows=512)
    memory = {"recompute": ["layers.*.tanh"], "min_bytes": "1B", "layers": ["layers.0", "layers.1"]}
    lines: list[str] = []
    _at_step(model, 0)
    with Listener(lines.append), lowtide.optimize(model, budget="1MiB", memory=memory, engine="host") as tide:
        assert _same(_train(model, num_rows=512), truth)
        assert [event.why for event in tide.events].count("recipes do not hold") == 1
        assert {site.fate.value for site in tide.plan.sites if site.name.endswith(".tanh")} == {"keep"}
    step = {
        "a temperature": "aten.div.Tensor got 2.0 in place of 1.0",
        "a scale": "aten.mul.Tensor got 1.5 in place of 0.5",
    }
    assert f"lowtide: 2 recipes do not hold in every step: 'layers.0.tanh' {step[name]}" in lines


def test_where_nothing_fits_without_a_recipe_every_forward_is_refused() -> None:
    memory = {"recompute": ["layers.*.tanh"], "swap": "none", "min_bytes": "1B", "layers": ["layers.0", "layers.1"]}
    # Autograd saves the input of sin() anyway, so that making tanh() from it saves its bytes.
    model = _at_step(zoo.Stack(*(Changing(lambda m, x, k: x.sin() * (0.5 + k)) for _ in range(2))), 0)
    with lowtide.optimize(model, budget="1MiB", memory=memory) as tide:
        small_loss(model, rows(512))
        needed_bytes = tide.plan.predicted.peak_bytes
    with lowtide.optimize(_at_step(model, 0), budget=needed_bytes, memory=memory, strict=True) as tide:
        small_loss(model, rows(512))
        small_loss(_at_step(model, 1), rows(512))  # finds that a recipe does not hold
        for _ in range(2):
            with pytest.raises(lowtide.BudgetError):
                small_loss(model, rows(512))


def test_it_says_which_operator_and_why() -> None:
    model = _at_step(_model("a temperature"), 0)
    with lowtide.apply(model, only_made(profiled(model)), engine=virtual(0)) as tide:
        _train(model, 2)
        assert tide.failed_recipes == dict.fromkeys(
            ("layers.0.tanh", "layers.1.tanh"), "aten.div.Tensor got 2.0 in place of 1.0"
        )


# -- fingerprints ----------------------------------------------------------------------------------------------------


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).sin()


def test_a_write_that_no_version_counts_is_refused() -> None:
    model = stack(Gated(), Shifted(), Gated())
    with lowtide.apply(model, only_made(profiled(model)), engine=virtual(0)) as tide:
        loss = small_loss(model, rows())
        model.layers[1].shift.data.mul_(3.0)
        with pytest.raises(RecipeMismatchError) as refused:
            loss.backward()
        assert str(refused.value) == (
            "lowtide: 'layers.1.add' was dropped, and what its recipe made in its place has other bytes: something "
            "that no operator was given has changed since the forward pass (a weight written through .data, a switch "
            "of the process, a kernel that does not repeat itself). Gradients of this step are not right: set them to "
            "zero before you go on. The site is kept from now on; a micro-batch inside tide.step(...) is run again by "
            "itself."
        )
        assert tide.failed_recipes == {"layers.1.add": "it made other bytes"}


def test_inside_a_step_it_is_run_again_with_the_site_kept() -> None:
    model = stack(Gated(), Shifted(), Gated())
    plan = only_made(profiled(model))

    def closure() -> Tensor:
        model.layers[1].shift.data.fill_(1.0)
        loss = small_loss(model, rows())
        model.layers[1].shift.data.fill_(3.0)
        loss.backward()
        return loss.detach()

    truth = [closure(), *(parameter.grad.clone() for parameter in model.parameters())]
    for parameter in model.parameters():
        parameter.grad = None
    with lowtide.apply(model, plan, engine=virtual(0)) as tide:
        with pytest.warns(UserWarning, match="'layers.1.add' is kept now, and the micro-batch is run again"):
            found = [tide.step(closure), *(parameter.grad for parameter in model.parameters())]
        assert tide.stats.num_retries == 1
    assert _same(found, truth)


def test_fingerprints_see_every_byte_of_small_storages_and_the_ends_of_large_ones() -> None:
    told: list[str] = []
    prints = Fingerprints(told.append)
    for num_bytes in (1, 3, 7, 256, 257, 100_000):
        tensor = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        then = prints.take(tensor.untyped_storage())
        prints.compare("same", then, tensor.clone().untyped_storage(), 5)
        last = num_bytes // 4 * 4 - 1 if num_bytes >= 4 else num_bytes - 1
        for place in {0, last} if num_bytes > 257 else range(last + 1):
            other = tensor.clone()
            other[place] ^= 1
            with pytest.raises(RecipeMismatchError):
                prints.compare(f"{num_bytes}:{place}", then, other.untyped_storage(), 5)
            assert told[-1] == f"{num_bytes}:{place}"
    empty = torch.empty(0)
    prints.compare("nothing", prints.take(empty.untyped_storage()), empty.untyped_storage(), 5)


def test_on_a_device_that_runs_behind_they_are_compared_at_the_end_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: words stay tensors, and are looked at once a backward pass."""
    words = Fingerprints._words
    monkeypatch.setattr(Fingerprints, "take", words)
    model = stack(Gated(), Shifted(), Gated())
    with lowtide.apply(model, only_made(profiled(model)), engine=virtual(0)) as tide:
        want = gradients(model, rows())
        loss = small_loss(model, rows())
        model.layers[1].shift.data.mul_(3.0)
        with pytest.raises(RecipeMismatchError, match=r"'layers\.1\.add' was dropped"):
            loss.backward()
        assert all(parameter.grad is not None for parameter in model.layers[0].parameters())
        model.layers[1].shift.data.div_(3.0)
        assert _same(gradients(model, rows()), want)
        assert not tide._context.fingerprints._waiting


# -- the comparison itself -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "actual", "is_same"),
    [
        (1, 1, True), (1, 2, False), (1, 1.0, False), (True, 1, False), (None, None, True), (None, 0, False),
        (0.0, -0.0, False), (0.0, 0.0, True), ("tanh", "tanh", True), ({"float": "inf"}, math.inf, True),
        ({"float": "nan"}, math.nan, True), ({"float": "inf"}, -math.inf, False),
        ({"dtype": "bfloat16"}, torch.bfloat16, True), ({"dtype": "bfloat16"}, torch.float16, False),
        ({"device": "cpu"}, torch.device("cpu"), True), ({"device": "cuda"}, torch.device("cpu"), False),
        ({"layout": "strided"}, torch.strided, True),
        ({"memory_format": "contiguous_format"}, torch.channels_last, False),
    ],
)  # fmt: skip
def test_constants(planned: object, actual: object, is_same: bool) -> None:
    assert is_same_constant(planned, actual) is is_same


def _recipe(*steps: RecipeStep, inputs: tuple[Tensor, ...]) -> Recipe:
    given = tuple(
        RecipeInput(kind="node", name=f"in{i}", geometry=Geometry(
            size=tuple(x.size()), stride=x.stride(), offset=x.storage_offset(), dtype="float32"))
        for i, x in enumerate(inputs)
    )  # fmt: skip
    return Recipe(inputs=given, steps=steps, seconds=0.0, transient_bytes=0)


def _mismatch(recipe: Recipe, inputs: tuple[Tensor, ...], run: Callable[[], Tensor]) -> str:
    ready = proof_of(recipe)
    with OperatorLog(ready.kinds) as log:
        result = run()

    def start(tensor: Tensor, name: str) -> Start:
        return Start(name, tensor.untyped_storage()._cdata, tensor._version, Shape.of(tensor))

    starts = [start(tensor, f"in{i}") for i, tensor in enumerate(inputs)]
    return ready.mismatch(log, start(result, "site"), starts)


def test_operands_are_told_apart_by_storage_version_and_shape() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    recipe = _recipe(RecipeStep(op="aten.mul.Tensor", args=({"input": 0}, {"input": 1})), inputs=(a, b))
    assert _mismatch(recipe, (a, b), lambda: a * b) == ""
    assert _mismatch(recipe, (a, b), lambda: b * a) == "aten.mul.Tensor read another tensor than 'in0'"
    assert _mismatch(recipe, (a, b), lambda: a * b.T) == "aten.mul.Tensor read 'in1' in another shape"
    assert _mismatch(recipe, (a, b), lambda: a + b) == "started from what another operator than aten.mul.Tensor made"
    assert _mismatch(recipe, (a, b), lambda: a * b.clone()) == "aten.mul.Tensor read another tensor than 'in1'"

    def written_after() -> Tensor:
        made = a * b
        b.add_(1)
        return made

    assert _mismatch(recipe, (a, b), written_after) == "aten.mul.Tensor read 'in1' before or after it was written to"


def test_steps_between_and_writes_in_place_are_followed() -> None:
    a = torch.randn(4, 4)
    steps = (
        RecipeStep(op="aten.mul.Tensor", args=({"input": 0}, 2)),
        RecipeStep(op="aten.add_.Tensor", args=({"step": 0, "output": 0}, 1)),
        RecipeStep(op="aten.as_strided.default", args=({"step": 0, "output": 0}, [4, 4], [1, 4], 0)),
        RecipeStep(op="aten.sin.default", args=({"step": 2, "output": 0},)),
    )
    recipe = _recipe(*steps, inputs=(a,))
    assert _mismatch(recipe, (a,), lambda: torch.sin((a * 2).add_(1).T)) == ""
    assert _mismatch(recipe, (a,), lambda: torch.sin((a * 2).add_(1))) == (
        "aten.sin.default read the result of aten.mul.Tensor in another shape"
    )
    assert _mismatch(recipe, (a,), lambda: torch.sin((a * 2).T)) != ""
    assert _mismatch(recipe, (a,), lambda: torch.sin((a * 2).add_(3).T)) == "aten.add_.Tensor got 3 in place of 1"
    assert _mismatch(recipe, (a,), lambda: torch.sin((a * 2).add_(1).add_(1).T)) != ""
    assert _mismatch(recipe, (a,), lambda: torch.sin((a * 3).add_(1).T)) == "aten.mul.Tensor got 3 in place of 2"


def test_freed_addresses_are_not_taken_for_one_another() -> None:
    """A storage that died and one that has its address now are two: the log holds on to addresses."""
    a = torch.randn(64, 64)
    recipe = _recipe(RecipeStep(op="aten.mul.Tensor", args=({"input": 0}, 2)), inputs=(a,))

    def run() -> Tensor:
        for _ in range(50):
            a * 2
        return a + 2

    assert _mismatch(recipe, (a,), run) == "started from what another operator than aten.mul.Tensor made"


def test_two_results_of_one_operator_are_told_apart() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    sine = {"step": 0, "output": 0}
    steps = RecipeStep(op="aten.sin.default", args=({"input": 0},)), RecipeStep(op="aten.mul.Tensor", args=(sine, sine))
    recipe = _recipe(*steps, inputs=(a,))

    def square(x: Tensor) -> Tensor:
        y = x.sin()
        return y * y

    assert _mismatch(recipe, (a,), lambda: square(a)) == ""
    said = "aten.mul.Tensor read the result of another aten.sin.default than the recipe"
    assert _mismatch(recipe, (a,), lambda: a.sin() * b.sin()) == said


def test_outputs_of_one_operator_are_told_apart() -> None:
    a = torch.randn(4, 4)
    steps = (
        RecipeStep(op="aten.aminmax.default", args=({"input": 0},), kwargs={"dim": 1}),
        RecipeStep(op="aten.sin.default", args=({"step": 0, "output": 1},)),
    )
    recipe = _recipe(*steps, inputs=(a,))
    assert _mismatch(recipe, (a,), lambda: torch.sin(a.aminmax(dim=1)[1])) == ""
    said = "aten.sin.default read another output of aten.aminmax.default"
    assert _mismatch(recipe, (a,), lambda: torch.sin(a.aminmax(dim=1)[0])) == said
