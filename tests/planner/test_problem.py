"""From a profile to a problem and back, on a step small enough to write down.

Forward: op 0 makes a, op 1 makes b from a, op 2 makes c from b, op 3 makes the loss. Backward: ops 4 .. 7.
"""

from __future__ import annotations

import dataclasses

import pytest

from lowtide.core.fate import Fate
from lowtide.core.profile import Profile, Site, StateBytes, StayingBytes
from lowtide.core.recipe import Geometry, Recipe, RecipeInput, RecipeStep, RetainedInput
from lowtide.planner.problem import Problem, decisions, make_problem, needed_retained_inputs, op_base_bytes
from lowtide.timeline.memory import curve, plain_curve

KEEP, SWAP, RECOMPUTE = Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE


def recipe(*names: str, transient_bytes: int = 0) -> Recipe:
    geometry = Geometry(size=(1,), stride=(1,), offset=0, dtype="float32")
    inputs = tuple(RecipeInput(kind="node", name=name, geometry=geometry) for name in names)
    step = RecipeStep(op="aten.neg.default", args=({"input": 0},))
    return Recipe(
        inputs=inputs, steps=(step,), seconds=0.25, transient_bytes=transient_bytes
    )  # fmt: skip


def node(name: str, nbytes: int, born: int, saved: int, dies: int, sequence: int, **more: object) -> Site:  # noqa: PLR0917
    return Site(
        name=name, layer=None, nbytes=nbytes, dtype="float32", op="neg", born=born, saved=saved, dies=dies,
        first_sequence=sequence, last_sequence=sequence, **more,
    )  # type: ignore[arg-type]  # fmt: skip


ANCHOR = RetainedInput(module="m", side="input", leaf=0)
NODES = (
    node("x", 50, 0, 0, 1, 0, retained_input=ANCHOR),
    node("a", 100, 0, 1, 2, 1, reads=(6,), release=7, recipe=recipe("x")),
    node("tiny", 4, 1, 1, 2, 1, reads=(6,), release=7),
    node("b", 200, 1, 2, 3, 2, reads=(5,), release=6, recipe=recipe("a", "tiny", transient_bytes=230)),
    node("c", 400, 2, 3, 9, 3, reads=(4,), release=5),
)
PROFILE = Profile(
    model="M", device="cpu", is_fake=False, batch="(1,) float32", layers=(), signatures=(),
    state=StateBytes(parameters=1000, gradients=30, optimizer=2000, optimizer_temporaries=5, inputs=7, buffers=3),
    num_forward_ops=4,
    op_names=("m.neg", "m.neg_1", "m.neg_2", "m.sum", "m.a:backward", "m.b:backward", "m.c:backward", "m.d:backward"),
    op_seconds=(1.0,) * 8,
    op_bytes=(1, 2, 3, 4, 5, 6, 17, 38),
    op_gradient_bytes=(0, 0, 0, 0, 0, 0, 10, 30),
    nodes=NODES,
)  # fmt: skip


def problem(**more: object) -> Problem:
    return make_problem(PROFILE, **{"allowed": {}, "min_bytes": 10, **more})  # type: ignore[arg-type]


def test_what_can_have_only_one_fate_is_no_item() -> None:
    made = problem()
    assert [item.name for item in made.step.items] == ["x", "a", "b"]
    assert made.why_fixed == {2: "smaller than min_bytes", 4: "something else holds it until backward"}
    x, a, b = made.step.items
    assert x.is_retained_input and x.fates == (KEEP, SWAP)
    assert a.fates == b.fates == (KEEP, SWAP, RECOMPUTE)
    assert (a.inputs, b.inputs, b.recipe_bytes, b.recipe_seconds) == ((0,), (1,), 30, 0.25)


def test_ticks_end_where_something_happens() -> None:
    made = problem()
    assert made.starts == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert made.step.num_forward_ticks == 4
    assert len(made.step.ticks) == 9  # and the optimizer's own step
    assert made.step.ticks[-1].base_bytes == 1000 + 3 + 2000 + 30 + 5 + 7
    rules = dict.fromkeys(("x", "a", "b"), ((KEEP,), "keep"))
    # only where the runtime looks: after saves, before reads
    assert problem(allowed=rules).starts == (0, 2, 3, 4, 5, 6, 8)


def test_the_runtime_looks_after_saves_and_before_reads() -> None:
    made = problem()
    assert [made.starts[stop] for stop in made.step.stops] == [2, 3, 4, 5, 6]


def test_the_plain_curve_is_every_node_kept() -> None:
    state = 1000 + 3 + 2000 + 7
    nodes = [
        sum(n.nbytes for n in NODES if n.born <= op < max(n.dies, n.release)) for op in range(len(PROFILE.op_bytes))
    ]
    expected = [state + own + nbytes for own, nbytes in zip(PROFILE.op_bytes, nodes, strict=True)]
    curve = plain_curve(problem().step)
    assert list(curve[:-1]) == expected


def test_gradients_that_exist_already_are_there_from_the_start() -> None:
    held = dict.fromkeys(range(len(NODES)), True)
    without = op_base_bytes(PROFILE, held)
    with_gradients = op_base_bytes(PROFILE, held, has_gradients=True)
    # A new gradient exists beside the old one until it is added: not before the module's backward is over.
    assert list(with_gradients - without) == [30] * 8
    names = (*PROFILE.op_names[:7], "n.d:backward")
    elsewhere = dataclasses.replace(PROFILE, op_names=names)
    with_gradients = op_base_bytes(elsewhere, held, has_gradients=True)
    assert list(with_gradients - without) == [30, 30, 30, 30, 30, 30, 30, 20]


def test_what_is_made_again_has_a_fingerprint_on_the_device_until_backward_is_over() -> None:
    state = dataclasses.replace(PROFILE.state, fingerprint=8)
    made, without = make_problem(dataclasses.replace(PROFILE, state=state), allowed={}, min_bytes=10), problem()
    assert ([item.check_bytes for item in made.step.items], made.step.check_until) == ([0, 8, 8], 8)
    for fates, grown in (
        ((KEEP, KEEP, SWAP), [0] * 9),
        ((KEEP, RECOMPUTE, SWAP), [8, 8, 8, 8, 8, 8, 8, 8, 0]),
        ((KEEP, RECOMPUTE, RECOMPUTE), [8, 16, 16, 16, 16, 16, 16, 16, 0]),  # b is made by operator 1
    ):
        assert list(curve(made.step, fates) - curve(without.step, fates)) == grown


def test_an_retained_input_that_no_recipe_reads_is_nothing() -> None:
    allowed = {"a": ((KEEP, SWAP), "rule")}
    made = problem(allowed=allowed)
    assert [item.name for item in made.step.items] == ["a", "b"]
    told = decisions(made, (KEEP, RECOMPUTE), (None, None), (None, None), {0: "fits", 1: "made"})
    assert [(site.name, site.fate) for site in told] == [
        ("a", KEEP),
        ("tiny", KEEP),
        ("b", RECOMPUTE),
        ("c", KEEP),
    ]


def test_retained_inputs_are_told_only_if_something_starts_from_them() -> None:
    made = problem()
    reasons = dict.fromkeys(range(3), "because")
    fates = (KEEP, KEEP, RECOMPUTE)
    assert "x" not in [site.name for site in decisions(made, fates, (None,) * 3, (None,) * 3, reasons)]
    fates = (KEEP, RECOMPUTE, RECOMPUTE)
    told = {site.name: site for site in decisions(made, fates, (None,) * 3, (None,) * 3, reasons)}
    assert told["x"].retained_input == ANCHOR
    assert told["a"].recipe == NODES[1].recipe
    assert told["a"].cost_seconds == 0.25


def test_an_retained_input_that_a_made_retained_input_starts_from_is_told_too() -> None:
    first, second = (node(name, 50, 0, 0, 1, 0, retained_input=ANCHOR) for name in ("first", "second"))
    profile = dataclasses.replace(PROFILE, nodes=(first, second, *NODES[1:]))
    assert needed_retained_inputs(profile, {"second": recipe("first")}) == set()
    assert needed_retained_inputs(profile, {"a": recipe("second")}) == {"second"}
    assert needed_retained_inputs(profile, {"a": recipe("second"), "second": recipe("first")}) == {"first", "second"}


def test_ticks_become_distances_that_the_runtime_can_count() -> None:
    made = problem()
    reasons = dict.fromkeys(range(3), "because")
    # b: gone before tick 3, fetched from tick 4 on (where c, sequence 3, is read)
    told = {s.name: s for s in decisions(made, (KEEP, KEEP, SWAP), (None, None, 3), (None, None, 4), reasons)}
    assert (told["b"].leave, told["b"].prefetch) == (0, 1)
    # fetched when it is read
    told = {s.name: s for s in decisions(made, (KEEP, SWAP, KEEP), (None, 4, None), (None, 6, None), reasons)}
    assert (told["a"].leave, told["a"].prefetch) == (2, 0)


def test_an_input_of_a_recipe_is_needed_when_the_recipe_runs() -> None:
    made = problem()
    reasons = dict.fromkeys(range(3), "because")
    # b is made at op 5 (sequence 2) from a, so a's distance counts from there
    told = {s.name: s for s in decisions(made, (KEEP, SWAP, RECOMPUTE), (None, 4, None), (None, 4, None), reasons)}
    assert told["a"].prefetch == 1


@pytest.mark.parametrize("fate", [KEEP, SWAP])
def test_rules_leave_one_fate(fate: Fate) -> None:
    made = problem(allowed={"b": ((fate,), "a rule")})
    names = [item.name for item in made.step.items]
    assert ("b" in names) == (fate is SWAP)
    if fate is KEEP:
        assert made.why_fixed[3] == "a rule"


def test_a_profile_survives_json() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    assert dataclasses.replace(PROFILE, nodes=()).saved_bytes == 0


def test_ticks_have_the_name_of_the_operator_that_needs_most() -> None:
    names = [tick.name for tick in problem().step.ticks]
    assert names == [*PROFILE.op_names, "the step of the optimizer"]
    rules = dict.fromkeys(("x", "a", "b"), ((KEEP,), "keep"))
    assert [tick.name for tick in problem(allowed=rules).step.ticks][:2] == ["m.neg_1", "m.neg_2"]


def test_what_no_plan_can_move_is_kept_and_said() -> None:
    stays = StayingBytes(name="m.topk:1", layer=None, nbytes=64, dtype="int64", reason="never read by backward")
    made = make_problem(dataclasses.replace(PROFILE, staying=(stays,)), allowed={}, min_bytes=10)
    assert made.step == problem().step  # its bytes are among those of the operators
    *_, last = decisions(made, [KEEP] * 3, [None] * 3, [None] * 3, dict.fromkeys(range(3), "fits"))
    assert (last.name, last.nbytes, last.fate, last.reason) == ("m.topk:1", 64, KEEP, "never read by backward")


def test_the_step_of_the_optimizer_must_fit_too() -> None:
    """Beside it are the gradients, and the batch, which the loop has still."""
    last = problem().step.ticks[-1]
    nbytes = 1000 + 3 + 2000 + 30 + 5 + 7
    assert (last.name, last.base_bytes, last.seconds) == ("the step of the optimizer", nbytes, 0.0)


def test_what_is_saved_is_sent_with_the_next_save() -> None:
    """a and tiny are saved by one operator: a copy of a begins when b is saved, not before."""
    made = problem()
    _, a, b = made.step.items
    assert [made.starts[item.saved] for item in (a, b)] == [2, 3]
