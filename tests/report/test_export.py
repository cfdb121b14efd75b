"""A plan in the words of other frameworks: golden files, and each read back by what will read it."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from lowtide.cli.main import COMMANDS, main
from lowtide.config.memory import MemoryConfig, SwapRule
from lowtide.core.decisions import OptimizerPlacement
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import LayerCall, Profile
from lowtide.core.recipe import Codec
from lowtide.errors import ConfigError
from lowtide.mindformers.schema.aliases import layer_tree
from lowtide.mindformers.schema.file import read_sections
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.export import SYSTEMS, Setting, export, play_setting, settings_for
from lowtide.timeline.hardware import load_hardware
from lowtide.units import MIB, format_bytes
from tests.support.profiles import OPS, decoder_profile

GOLDEN = Path(__file__).parent / "golden"
LINK = load_hardware("h200").link


HF_NAMES = {
    "attn.sdpa": "self_attn.sdpa",
    "mlp.gate.mm": "mlp.gate_proj.mm",
    "mlp.up.mm": "mlp.up_proj.mm",
    "mlp.silu": "mlp.act_fn.silu",
    "norm.mul": "input_layernorm.mul",
}


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock ends a search: golden files are the same on a machine that does much else."""
    still = types.SimpleNamespace(perf_counter=lambda: 0.0)
    for module in ("solve", "local_search"):
        monkeypatch.setattr(f"lowtide.planner.{module}.time", still)


def _profile() -> Profile:
    """The decoder with the names of Hugging Face's Llama, whose layers can run again."""
    text = decoder_profile().to_json()
    for name, other in HF_NAMES.items():
        text = text.replace(name, other)
    profile = Profile.from_json(text)
    calls = tuple(
        LayerCall(
            name=layer,
            first_op=index * len(OPS),
            end_op=(index + 1) * len(OPS),
            enough_op=(index + 1) * len(OPS),
            end_sequence=(index + 1) * len(OPS),
            inputs=(f"{layer}.input",),
            op_bytes=(0,) * len(OPS),
            staying_bytes=0,
        )
        for index, layer in enumerate(profile.layers)
    )
    return dataclasses.replace(profile, calls=calls)


def _plan(profile: Profile, mib: int, **memory: Any) -> Plan:
    return plan_profile(profile, MemoryConfig(budget=mib * MIB, min_bytes=0, **memory), link=LINK)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "roomy": (4096, {}),
    "swaps": (1340, {}),
    "makes_and_swaps": (1470, {"recompute": ("layers.0.mlp.act_fn",), "swap": (SwapRule(match="layers.*.self_attn"),)}),
    "least": (600, {}),
}


def test_the_command_line_knows_every_framework() -> None:
    assert COMMANDS["export"]["options"]["--to"]["choices"] == [*SYSTEMS]


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("case", CASES)
def test_golden_files(case: str, system: str) -> None:
    mib, memory = CASES[case]
    profile = _profile()
    text = export(_plan(profile, mib, **memory), system, profile, link=LINK)
    assert text == (GOLDEN / f"export_{case}_{system}.txt").read_text(encoding="utf-8")


def test_the_nearest_is_the_fastest_that_fits() -> None:
    profile = _profile()
    plan = _plan(profile, 1200)
    for system in SYSTEMS:
        text = export(plan, system, profile, link=LINK)
        settings = settings_for(system, plan, profile)
        played = [play_setting(setting, profile, link=LINK, budget_bytes=1200 * MIB) for setting in settings]
        chosen = next(one for one in played if text.endswith("\n".join(one.lines) + "\n"))
        assert chosen.peak_bytes <= 1200 * MIB
        assert all(one.step_seconds >= chosen.step_seconds for one in played if one.peak_bytes <= 1200 * MIB)


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_setting_costs_what_the_solver_predicts_for_the_same_rules(number: int) -> None:
    profile = _profile()
    layers = profile.layers[:number]
    played = play_setting(Setting(lines=(), layers=layers), profile, link=LINK)
    plan = _plan(profile, 4096, recompute=layers or "none", swap="none")
    assert plan.predicted is not None
    assert played.peak_bytes == plan.predicted.peak_bytes
    assert played.step_seconds == pytest.approx(plan.predicted.step_seconds)


def test_copies_that_block_are_in_the_time_in_full() -> None:
    profile = _profile()
    inputs = tuple(f"{layer}.input" for layer in profile.layers[1:])
    settings = [Setting(lines=(), layers=profile.layers, swapped=names, copies_block=True) for names in ((), inputs)]
    plain, offloading = (play_setting(setting, profile, link=LINK) for setting in settings)
    assert offloading.copied_bytes == 3 * 16 * MIB
    assert offloading.peak_bytes <= plain.peak_bytes
    seconds = 3 * 16 * MIB * (1 / LINK.out_bytes_per_second + 1 / LINK.in_bytes_per_second)
    assert offloading.step_seconds == pytest.approx(plain.step_seconds + seconds)


def test_gradients_that_accumulate_are_seen_in_the_plan() -> None:
    profile = _profile()
    config = MemoryConfig(budget=4096 * MIB, min_bytes=0)
    plan = plan_profile(profile, config, link=LINK, has_gradients=True)
    assert plan.predicted is not None
    text = export(plan, "torchtitan", profile, link=LINK)
    assert f"This setting: peak {format_bytes(plan.predicted.peak_bytes)}" in text
    assert plan.predicted.peak_bytes != _plan(profile, 4096).predicted.peak_bytes  # type: ignore[union-attr]


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_it(case: str, tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    mib, memory = CASES[case]
    profile = _profile()
    plan = _plan(profile, mib, **memory)
    path = tmp_path / "arguments.yaml"
    path.write_text(export(plan, "transformers", profile, link=LINK) + f"output_dir: {tmp_path}\nuse_cpu: true\n")
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file(str(path))
    assert arguments.activation_checkpointing == (case != "roomy")
    options = arguments.activation_checkpointing_kwargs or {}
    assert case == "roomy" or set(options) == {"use_reentrant", "every_n_layers", "offload"}


@pytest.mark.parametrize("case", CASES)
def test_trl_reads_it(case: str, tmp_path: Path) -> None:
    from transformers import HfArgumentParser
    from trl import SFTConfig

    mib, memory = CASES[case]
    profile = _profile()
    path = tmp_path / "arguments.yaml"
    text = export(_plan(profile, mib, **memory), "trl", profile, link=LINK)
    path.write_text(f"{text}output_dir: {tmp_path}\nuse_cpu: true\n", encoding="utf-8")
    (arguments,) = HfArgumentParser(SFTConfig).parse_yaml_file(str(path))
    assert (arguments.gradient_checkpointing or arguments.activation_offloading) == (case != "roomy")


@pytest.mark.parametrize("system", ["axolotl", "torchtune", "deepspeed"])
def test_what_is_for_a_file_of_settings_is_read_as_one(system: str) -> None:
    """Each setting, of a plan that moves the optimizer's state too."""
    profile = _profile()
    moved = OptimizerPlacement(moved_bytes=MIB, reason="test")
    for setting in settings_for(system, dataclasses.replace(_plan(profile, 600), optimizer=moved), profile):
        written = yaml.safe_load("\n".join(setting.lines))
        assert isinstance(written, dict) and len(written) == len(setting.lines)


def test_megatron_is_told_of_parts_of_layers() -> None:
    """Each kind of flag, with what it acts on; layers that are offloaded do not run again."""
    profile = _profile()
    found = {one.lines: one for one in settings_for("megatron", _plan(profile, 600), profile)}
    mlp = found["--recompute-granularity selective", "--recompute-modules mlp"]
    assert mlp.made and all(".mlp." in name for name in mlp.made) and not (mlp.layers or mlp.swapped)
    attention = found["--fine-grained-activation-offloading", "--offload-modules core_attn attn_proj"]
    assert attention.swapped and all(".self_attn." in name for name in attention.swapped)
    two = found["--cpu-offloading", "--cpu-offloading-num-layers 2"]
    assert {name.split(".")[2] for name in two.swapped} == {"0", "1"} and not two.layers


@pytest.mark.parametrize("case", CASES)
def test_our_loader_reads_what_is_for_mindformers(case: str, tmp_path: Path) -> None:
    """And does to the same layers and names what the setting says."""
    mib, memory = CASES[case]
    profile = _profile()
    plan = _plan(profile, mib, **memory)
    path = tmp_path / "run.yaml"
    path.write_text(export(plan, "mindformers", profile, link=LINK), encoding="utf-8")
    settings = {setting.lines: setting for setting in settings_for("mindformers", plan, profile)}
    lines = tuple(line for line in path.read_text().splitlines() if not line.startswith("#"))
    setting = settings[lines]
    resolution = read_sections(path).resolve(names=layer_tree("llama"))
    assert not resolution.warnings
    assert [layer.index for layer in resolution.layers if layer.full_recompute] == [
        profile.layers.index(name) for name in setting.layers
    ]
    for read, written in (("swap_ops", setting.swapped), ("recompute_ops", setting.made)):
        found = [f"model.layers.{layer.index}.{part}" for layer in resolution.layers for part in getattr(layer, read)]
        assert len(found) == len(written)
        assert all(any(name.startswith(part) for part in found) for name in written)
    assert case != "makes_and_swaps" or (setting.swapped and setting.made)


def test_an_operator_without_a_name_there_is_not_taken_for_its_whole_module() -> None:
    profile = Profile.from_json(_profile().to_json().replace("mlp.act_fn.silu", "mlp.silu"))
    plan = _plan(profile, 1000, recompute="none")
    assert any(site.name.endswith("mlp.silu") and site.fate is Fate.SWAP for site in plan.sites)
    *_, own = settings_for("mindformers", plan, profile)
    assert own.swapped
    assert not any(name.endswith("mlp.silu") for name in own.swapped)
    assert not any("op_name: 'feed_forward'" in line for line in own.lines)


def test_what_a_layer_is_given_by_keyword_is_not_offloaded() -> None:
    """Of the inputs of layers, those that several share: a mask, the angles of rotary embeddings."""
    profile = _profile()
    calls = tuple(dataclasses.replace(call, inputs=(*call.inputs, "angles")) for call in profile.calls)
    shared = dataclasses.replace(profile, calls=calls)
    offloading = [one for one in settings_for("transformers", _plan(profile, 600), shared) if one.copies_block]
    assert offloading[0].swapped == tuple(f"{layer}.input" for layer in profile.layers)


def test_what_no_other_framework_has_is_said() -> None:
    profile = _profile()
    plan = _plan(profile, 1200)
    moved = OptimizerPlacement(moved_bytes=3 * MIB, reason="test")
    codec = Codec(kind="bits", nbytes=MIB, work_bytes=0, seconds=0.0)
    sites = tuple(
        dataclasses.replace(site, codec=codec) if site.name == "model.layers.3.mlp.mul" else site for site in plan.sites
    )
    text = export(
        dataclasses.replace(plan, optimizer=moved, loss="sliced", sites=sites), "megatron", profile, link=LINK
    )
    assert "# - 3.0 MiB of the optimizer's state: elsewhere in the plan, on the device here\n" in text
    assert "# - the loss: in slices of rows in the plan, in one piece here, with its buffers\n" in text
    assert "# - 55.0 MiB that the plan saves by storing 1 activation smaller: here they are whole\n" in text


def test_mindspeed_moves_the_state_too_and_makes_activation_functions_again() -> None:
    profile, moved_bytes = _profile(), 200 * MIB
    plan = _plan(profile, 1350)
    profile = dataclasses.replace(profile, state=dataclasses.replace(profile.state, optimizer_movable=moved_bytes))
    moved = OptimizerPlacement(moved_bytes=moved_bytes, reason="test")
    swapping = dataclasses.replace(plan, optimizer=moved)
    text = export(swapping, "mindspeed", profile, link=LINK)
    assert text.endswith("\n--swap-optimizer\n")
    assert "of the optimizer's state: elsewhere in the plan" not in text
    settings = list(settings_for("mindspeed", swapping, profile))
    plain, made = settings[:2]
    assert plain.lines == ("--swap-optimizer",)
    assert made.lines[:2] == ("--recompute-activation-function", "--recompute-activation-function-num-layers 4")
    assert len(made.made) in (4, 8)
    played = [play_setting(setting, profile, link=LINK) for setting in (Setting(lines=()), plain, made)]
    assert played[0].peak_bytes - played[1].peak_bytes == moved_bytes
    assert played[2].peak_bytes < played[1].peak_bytes and played[2].step_seconds > played[1].step_seconds
    full = settings[-1]
    assert full.layers == profile.layers and not full.made


def test_mistakes_are_named(tmp_path: Path) -> None:
    profile = _profile()
    with pytest.raises(ConfigError) as caught:
        export(Plan(layers=profile.layers, min_bytes=0), "megatron", profile, link=LINK)
    assert str(caught.value) == "export: this plan was made from rules, not for a budget; translate its rules by hand"
    other = dataclasses.replace(profile, state=dataclasses.replace(profile.state, optimizer=0))
    with pytest.raises(ConfigError) as caught:
        export(_plan(profile, 1350), "megatron", other, link=LINK)
    assert str(caught.value) == (
        "--profile: it is not of the step that the plan was made for: everything kept, that needs 1.5 GiB, the "
        "step of the profile 1.3 GiB; make both from one run file: lowtide profile RUN.yaml --out P, lowtide plan "
        "RUN.yaml --profile P --out PLAN"
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = _profile()
    plan = _plan(profile, CASES["swaps"][0])
    files = {"plan.json": plan.to_json(), "profile.json": profile.to_json()}
    files["real.json"] = dataclasses.replace(profile, is_fake=False, device="cuda").to_json()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = ["export", str(tmp_path / "plan.json"), "--to", "megatron", "--profile"]
    assert main([*command, str(tmp_path / "profile.json")]) == 0
    golden = (GOLDEN / "export_swaps_megatron.txt").read_text(encoding="utf-8")
    assert capsys.readouterr().out == golden
    assert main([*command, str(tmp_path / "profile.json"), "--out", str(tmp_path / "args.txt")]) == 0
    assert (tmp_path / "args.txt").read_text(encoding="utf-8") == golden
    assert main([*command, str(tmp_path / "real.json"), "--hardware", "h200"]) == 0
    assert main([*command, str(tmp_path / "real.json")]) == 2
    assert capsys.readouterr().err == (
        "--hardware: the profile was observed on cuda, and says nothing of the link of that machine; name its "
        "hardware, such as --hardware h200\n"
    )
    assert (
        main(["export", str(tmp_path / "none.json"), "--to", "megatron", "--profile", str(tmp_path / "plan.json")]) == 2
    )
    assert capsys.readouterr().err == f"{tmp_path / 'none.json'}: no such file; check the path\n"
