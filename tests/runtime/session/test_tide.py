"""`apply`, what it refuses and in which words, and `remove`."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.core.fate import Fate
from lowtide.engines.host import HostEngine
from lowtide.errors import ConfigError
from lowtide.runtime.saved.stats import COUNTED, Counters
from tests.support import processes, zoo
from tests.support.virtual_engine import VirtualEngine, virtual

SWAP = {"swap": "all", "min_bytes": 0}


@pytest.fixture
def llama() -> nn.Module:
    return zoo.CASES["llama"].build(0)


def run(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(16).view(2, 8) % model.config.vocab_size
    return model(input_ids=ids, labels=ids).loss


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*args, **kwargs)
    return str(refused.value)


# -- patterns --------------------------------------------------------------------------------------------------------


def test_a_pattern_below_a_module_that_does_not_exist_is_refused_at_once(llama: nn.Module) -> None:
    text = refusal(lowtide.apply, llama, {"swap": ["layers.*.mpl.down_proj"]})
    assert text == (
        "memory.swap[0]: pattern 'layers.*.mpl.down_proj' matches no layer, module or op of this model; "
        "nearest: 'layers.*.mlp.down_proj', 'model.layers.*.mlp.down_proj', 'layers.*.mlp.up_proj'"
    )


def test_an_operator_that_does_not_exist_is_refused_after_the_first_forward(llama: nn.Module) -> None:
    tide = lowtide.apply(llama, {"swap": ["layers.*.mlp.mull"]}, engine=virtual(0))
    text = refusal(run, llama)
    assert text == (
        "memory.swap[0]: pattern 'layers.*.mlp.mull' matches no layer, module or op of this model; "
        "nearest: 'layers.*.mlp.mul', 'model.layers.*.mlp.mul', 'layers.*.mlp.up_proj'"
    )
    tide.remove()


def test_an_evaluation_before_the_first_step_does_not_decide_about_operators(llama: nn.Module) -> None:
    with lowtide.apply(llama, {"swap": ["mul"], "min_bytes": 0}, engine=virtual(0)) as tide:
        with torch.no_grad():
            run(llama)
        run(llama).backward()
        assert tide.stats.swapped_bytes > 0


def test_recompute_of_a_single_operator_is_refused(llama: nn.Module) -> None:
    text = refusal(lowtide.apply, llama, {"recompute": ["layers.*.mlp.mul"]})
    assert text.startswith(
        "memory.recompute[0]: pattern 'layers.*.mlp.mul' matches no layer, module or op of this model;"
    )
    assert text.endswith("(recompute acts on layers and modules; single operators can be kept or swapped)")


def test_recompute_all_without_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert refusal(lowtide.apply, model, {"recompute": "all"}) == (
        "memory.recompute: recompute: all needs layers, and no repeated block was found in this model; "
        "name them with layers: [...]"
    )


def test_layers_that_are_named_are_layers() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8))
    with lowtide.apply(model, {"recompute": "all", "layers": ["0"], "min_bytes": 0}, engine=virtual(0)) as tide:
        model(torch.ones(4, 8)).sum().backward()
        # The tanh's output is an output of the layer: it stays, as the input of what follows.
        assert tide.plan.layers == ("0",)
        assert tide.stats.num_forwards == 1


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_second_apply_is_refused_wherever_the_first_one_was(llama: nn.Module) -> None:
    with lowtide.apply(llama, SWAP, engine=virtual(0)):
        text = "lowtide.apply: this model is already under a lowtide plan; call remove() on that tide first"
        assert refusal(lowtide.apply, llama, SWAP) == text
        assert refusal(lowtide.apply, llama.model.layers[0], SWAP) == text
    with lowtide.apply(llama.model, SWAP, engine=virtual(0)):
        assert refusal(lowtide.apply, llama, SWAP) == (
            "lowtide.apply: its module 'model' is already under a lowtide plan; call remove() on that tide first"
        )
    lowtide.apply(llama, SWAP, engine=virtual(0)).remove()


def test_what_is_no_eager_module_is_refused() -> None:
    assert refusal(lowtide.apply, [], SWAP) == "lowtide.apply: expected a torch.nn.Module, not list"
    assert refusal(lowtide.apply, nn.DataParallel(nn.Linear(2, 2)), SWAP) == (
        "lowtide: nn.DataParallel is not supported, its replicas cannot be told apart; use "
        "DistributedDataParallel, one process a device"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert refusal(lowtide.apply, scripted, SWAP).startswith("lowtide.apply: this model is compiled (torch.jit), and")


def test_a_model_inside_foreign_hooks_is_refused_and_works_again_outside(llama: nn.Module) -> None:
    with lowtide.apply(llama, SWAP, engine=virtual(0)) as tide:
        with torch.autograd.graph.save_on_cpu():
            text = refusal(run, llama)
        assert text.startswith("lowtide: the model was called inside other saved-tensor hooks (torch.autograd.graph.")
        assert text.endswith(
            "PyTorch calls only the innermost pair, so those would see nothing. Leave them out, enter them around "
            "single modules inside the model, or call tide.remove() first."
        )
        run(llama).backward()
        assert tide.stats.num_forwards == 1


def test_foreign_hooks_around_a_part_of_the_model_see_that_part(llama: nn.Module) -> None:
    seen: list[torch.Tensor] = []
    mlp = llama.model.layers[0].mlp
    forward = mlp.forward

    def hooked(*args):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            return forward(*args)

    mlp.forward = hooked
    with lowtide.apply(llama, SWAP, engine=virtual(0)):
        run(llama).backward()
    assert seen


def test_a_model_that_checkpoints_already_is_warned_about_and_right() -> None:
    case = zoo.CASES["llama"]
    model = case.build(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    with pytest.warns(UserWarning, match="modules of this model already use gradient checkpointing") as caught:
        tide = lowtide.apply(model, {"recompute": "all", "swap": "all", "min_bytes": 0}, engine=virtual(0))
    assert "model.gradient_checkpointing_disable()" in str(caught[0].message)
    result = zoo.train(case, model, zoo.make_optimizer(model), 0)
    zoo.assert_same(result, zoo.plain_result("llama", 0))
    assert tide.stats.swapped_bytes > 0
    tide.remove()


def test_a_directory_that_cannot_be_written_is_refused(llama: nn.Module, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    text = refusal(lowtide.apply, llama, {"swap": "all", "disk_path": str(missing)}, engine="host")
    assert str(missing) in text
    assert "cannot" in text


# -- engines ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("hots", "engine: 'hots' is none of accelerator, host; did you mean 'host'?"),
        ("accelerator", "engine: 'accelerator' needs the model on an accelerator; move it there, or use 'host'"),
    ],
)
def test_engine_names(llama: nn.Module, engine: str, text: str) -> None:
    assert refusal(lowtide.apply, llama, SWAP, engine=engine) == text


def test_a_cap_is_kept_and_what_has_no_room_stays(llama: nn.Module) -> None:
    engine = VirtualEngine(3, host_bytes=20_000, disk_bytes=10_000)
    with lowtide.apply(llama, SWAP, engine=engine) as tide:
        with pytest.warns(UserWarning, match="no room left for swapped activations \\(disk: ") as caught:
            loss = run(llama)
        assert len(caught) == 1
        assert tide.stats.host_bytes <= 20_000
        assert tide.stats.disk_bytes <= 10_000
        loss.backward()
        stats = tide.stats
        assert stats.num_kept_for_lack_of_room > 0
        assert stats.kept_bytes > 0
        assert stats.swapped_bytes > 0
    assert engine.memory_in_use() == {"host": 0, "disk": 0}


def test_a_rule_about_a_part_of_a_recomputed_layer_says_that_it_has_no_effect(llama: nn.Module) -> None:
    memory = {"recompute": ["layers.0-1"], "keep": ["*.mlp"]}
    with pytest.warns(UserWarning, match="has no effect") as caught:
        lowtide.apply(llama, memory, engine=virtual(0)).remove()
    assert [str(warning.message) for warning in caught] == [
        "lowtide: memory.keep[0]: keep '*.mlp' has no effect inside 'model.layers.0' and 1 more: a recomputed layer "
        "holds on to nothing but its inputs. To treat its parts differently, name the modules to recompute instead of "
        "the layer."
    ]


def test_a_tier_that_the_engine_does_not_have_is_said_to_be_another(llama: nn.Module, tmp_path: Path) -> None:
    memory = {"swap": [{"match": "layers.0", "tier": "host"}], "disk_path": str(tmp_path)}
    with pytest.warns(UserWarning, match="has no tier") as caught:
        lowtide.apply(llama, memory, engine="host").remove()
    assert [str(warning.message) for warning in caught] == [
        "lowtide: memory.swap[0]: engine 'host' has no tier 'host'; these activations go to 'disk'."
    ]


# -- what is left behind ---------------------------------------------------------------------------------------------


def test_signature_and_state_dict_are_those_of_the_model(llama: nn.Module) -> None:
    signature, keys = inspect.signature(llama.forward), list(llama.state_dict())
    with lowtide.apply(llama, {"recompute": "all"}, engine=virtual(0)):
        assert inspect.signature(llama.forward) == signature
        assert list(llama.state_dict()) == keys
    assert "forward" not in vars(llama)
    assert all("forward" not in vars(module) for module in llama.modules())


def test_a_copy_of_a_model_under_lowtide_is_a_plain_model_of_its_own(llama: nn.Module) -> None:
    with lowtide.apply(llama, {"recompute": "all", "swap": "all", "min_bytes": 0}, engine=virtual(0)) as tide:
        written = pickle.dumps(llama)
        assert b"lowtide" not in written  # it is read where lowtide is not installed
        for twin in (copy.deepcopy(llama), pickle.loads(written)):
            before = tide.stats.num_forwards
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert run(twin).item() == pytest.approx(torch.tensor(float(llama.config.vocab_size)).log().item(), 1e-4)
            assert tide.stats.num_forwards == before
            assert run(llama).item() != run(twin).item()


def test_someone_elses_wrapper_on_top_survives_remove(llama: nn.Module) -> None:
    calls = []
    tide = lowtide.apply(llama, SWAP, engine=virtual(0))
    inner = llama.forward
    llama.forward = lambda *args, **kwargs: (calls.append(1), inner(*args, **kwargs))[1]
    tide.remove()
    run(llama).backward()
    assert calls == [1]
    assert tide.stats.num_forwards == 0
    lowtide.apply(llama, SWAP, engine=virtual(0)).remove()


def test_a_graph_built_before_remove_can_be_run_after_it(llama: nn.Module) -> None:
    tide = lowtide.apply(llama, SWAP, engine=virtual(5))
    loss = run(llama)
    tide.remove()
    loss.backward()
    grads = [parameter.grad.clone() for parameter in llama.parameters()]
    llama.zero_grad()
    run(llama).backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(grads, llama.parameters(), strict=True))


def test_a_keyboard_interrupt_leaves_no_hook_behind(llama: nn.Module) -> None:
    def interrupt(*args):
        raise KeyboardInterrupt

    with lowtide.apply(llama, SWAP, engine=virtual(0)) as tide:
        handle = llama.model.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(llama)
        handle.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        run(llama).backward()
        assert tide.stats.swapped_bytes > 0


# -- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_shows_every_site_after_the_first_step(llama: nn.Module) -> None:
    memory = {"recompute": ["layers.0"], "swap": ["layers.1.mlp"], "min_bytes": 0}
    with lowtide.apply(llama, memory, engine=virtual(0)) as tide:
        assert tide.plan.sites == ()
        run(llama).backward()
        fates = {site.name: site.fate for site in tide.plan.sites}
        assert fates["model.layers.0.mlp.mul"] is Fate.RECOMPUTE
        assert fates["model.layers.1.mlp.mul"] is Fate.SWAP
        assert fates["model.layers.1.self_attn.sdpa"] is Fate.KEEP
        again = lowtide.Plan.from_json(tide.plan.to_json())
        assert again == tide.plan
    truth = zoo.plain_result("llama", 0, 2)
    zoo.assert_same(zoo.lowtide_step(zoo.CASES["llama"], 0, again, engine=virtual(1), num_steps=2)[0], truth)


def test_a_plan_that_does_nothing_says_so(llama: nn.Module) -> None:
    with lowtide.apply(llama, {}, engine=virtual(0)) as tide:
        run(llama).backward()
        assert "This plan does nothing: every activation is kept." in str(tide.plan)
        assert tide.stats.saved_bytes == tide.stats.kept_bytes > 0


# -- a disk that fills up in the middle of a step ----------------------------------------------------------------------

_FULL_DISK = """
import resource, signal, sys, warnings
import torch, lowtide
from tests.support import zoo

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
case = zoo.CASES["llama"]
model = case.build(0)
optimizer = zoo.make_optimizer(model)
memory = {"swap": "all", "min_bytes": 0, "disk_path": sys.argv[1]}
tide = lowtide.apply(model, memory, optimizer=optimizer, engine="host")
if sys.argv[2] == "in the middle":  # the file has its space already; it is the writes that fail
    case.loss(model, case.batch(99))
    tide.settle()
    tide.reset_stats()
resource.setrlimit(resource.RLIMIT_FSIZE, (10 * 4096, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = zoo.train(case, model, optimizer, 0, num_steps=2)
tide.settle()
stats = tide.stats
tide.remove()
zoo.assert_same(result, zoo.plain_result("llama", 0, 2))
assert stats.num_kept_for_lack_of_room > 0
assert stats.disk_bytes == 0, stats.disk_bytes
texts = [str(w.message) for w in caught if "lowtide" in str(w.message)]
assert len(texts) == 1, texts
print(texts[0])
"""


@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("from the start", "lowtide: no room left for swapped activations (disk: "),
        ("in the middle", "lowtide: writing an activation to a slower tier failed ("),
    ],
)
def test_nothing_is_lost_when_the_disk_is_full(tmp_path: Path, when: str, text: str) -> None:
    (tmp_path / "disk").mkdir()
    status, out, err = processes.program(_FULL_DISK, tmp_path, str(tmp_path / "disk"), when)
    assert status == 0, err
    assert out.startswith(text)


def test_a_read_that_fails_is_an_error_with_the_tier(
    llama: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = zoo.CASES["llama"]
    engine = HostEngine(tmp_path)

    def fail(*_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine.disk, "read", fail)
    with lowtide.apply(llama, {"swap": "all", "min_bytes": 0}, engine=engine) as tide:
        loss = case.loss(llama, case.batch(0))
        tide.settle()
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        assert re.fullmatch(
            r"lowtide: a swapped activation of \d+ bytes could not be read back from tier 'disk': "
            r"\[Errno 5\] Input/output error",
            str(caught.value),
        )
    engine.close()


def test_the_handle_of_a_model_can_be_asked_for() -> None:
    """As a notebook cell does that runs again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert lowtide.current(model) is None
    lowtide.remove(model)
    for call in (
        lambda: lowtide.apply(model, {"swap": "all", "min_bytes": 0}, engine=virtual(1)),
        lambda: lowtide.apply(model, {"recompute": ["0"], "layers": ["0", "2"]}, engine=virtual(1)),
        lambda: lowtide.optimize(model, budget="1GiB", engine=virtual(1)),
    ):
        handle = call()
        assert lowtide.current(model) is handle
        assert lowtide.current(nn.Sequential(model)) is handle  # what wraps it, as DDP does
        assert handle.stats.kept_bytes == 0
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            assert lowtide.current(model) is handle
        lowtide.remove(model)
        assert lowtide.current(model) is None
        lowtide.remove(model)


def test_what_is_counted_is_what_stats_have() -> None:
    files = Path(lowtide.__file__).parent.rglob("*.py")
    counted = {name for file in files for name in re.findall(r"counters\.(\w+) [+-]= ", file.read_text("utf-8"))}
    assert counted == set(COUNTED)


def test_stalls_are_those_since_the_tally_began() -> None:
    class Stalled(VirtualEngine):
        def stall_seconds(self) -> float:
            return 5.0

    counters = Counters(stall_seconds=0.5, kept_bytes=7, narrowed_bytes=3, retained_input_bytes=2)
    stats = counters.totals(Stalled(0), peak_bytes=11, since_seconds=4.0, num_unknown=1)
    assert (stats.stall_seconds, stats.saved_bytes, stats.peak_device_bytes) == (1.5, 8, 11)
    assert (stats.kept_bytes, stats.num_unknown, stats.host_bytes, stats.disk_bytes) == (7, 1, 0, 0)
