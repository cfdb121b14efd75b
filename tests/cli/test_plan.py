"""`lowtide plan` and `lowtide profile`: what they print, where, and how they refuse."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.cli import waiting
from lowtide.cli.main import main
from lowtide.cli.run_file import load_run
from lowtide.cli.run_step import weights_of_run
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.report import budget_sweep
from tests.support import processes
from tests.support.profiles import decoder_profile

ROOT = Path(__file__).parents[2]
RUN = """\
model:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 3
  num_attention_heads: 2
data:
  sequence_length: 64
train:
  steps: 4
  batch_size: 2
  device: cpu
memory:
  min_bytes: 1KiB
"""
BATCH = "input_ids=int64[2, 64], labels=int64[2, 64]"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    still = types.SimpleNamespace(perf_counter=lambda: 0.0)  # no clock ends a search, on whatever machine
    for module in ("solve", "local_search"):
        monkeypatch.setattr(f"lowtide.planner.{module}.time", still)
    monkeypatch.setattr(budget_sweep, "_WAY_UP", (1.0,))  # one other budget tells as much as six
    Path("text").write_bytes(b"".join(b"%d bottles of tea\n" % number for number in range(200)))
    write()


def write(text: str = RUN, **train: object) -> None:
    lines = "".join(f"  {key}: {value}\n" for key, value in train.items())
    text = text.replace("train:\n", f"train:\n{lines}").replace("data:\n", "data:\n  files: [text]\n")
    Path("run.yaml").write_text(text, encoding="utf-8")


def lowtide(*arguments: str) -> int:
    return main([*arguments])


def plan(*arguments: str) -> int:
    return lowtide("plan", "run.yaml", "--hardware", "h200", *arguments)


_ANSWERS: dict[tuple[str, ...], str] = {}
"""Run file and arguments -> what is printed: that a command gives the same answer again, a test of its own says."""


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    question = (Path("run.yaml").read_text(encoding="utf-8"), *arguments)
    if "--out" in arguments or question not in _ANSWERS:
        assert plan("--json", *arguments) == 0
        _ANSWERS[question] = capsys.readouterr().out
    return json.loads(_ANSWERS[question])


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused command says, and nothing but that."""
    assert lowtide(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("lowtide: ")]  # a slow machine waits
    return "\n".join(lines)


# -- what is printed -----------------------------------------------------------------------------------------------


def test_the_whole_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--budget", "1.2MiB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"LlamaForCausalLM, one step of {BATCH}"
    assert lines[1].startswith("plan ")
    assert " of a budget of 1.2 MiB; everything kept " in lines[1]
    assert lines[2].startswith("step ")
    assert lines[3] == "certainty: bytes traced without a device, times by roofline of h200"
    assert lines[4].startswith("3 layers, 60 sites, ")
    text = "\n".join(lines)
    for what in ("weights", "optimizer state", "gradients", "activations", "head, loss, temporaries", "peak"):
        assert f"\n{what} " in text
    assert "\nlayer" in text
    assert "recomputed: " in text or "away and back: " in text
    assert text.count("<- this plan") == 1


def test_every_line_fits_a_terminal_of_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No word is cut: what the plan has as JSON stands there, in the units of the text."""
    saved = Plan.from_json(json.dumps(document(capsys, "--budget", "1.2MiB")["plan"]))
    monkeypatch.setattr("lowtide.cli.plan.width_of_stdout", lambda: 80)
    assert plan("--budget", "1.2MiB") == 0
    narrow = capsys.readouterr().out
    assert max(map(len, str(saved).splitlines())) > 100 and max(map(len, narrow.splitlines())) <= 80
    assert {word for word in str(saved).split() if word not in narrow.split()} <= {"why"}  # no head of its own there


def test_json_is_one_document_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--budget", "1.2MiB", "--out", "plan.json")
    assert found["model"] == "LlamaForCausalLM"
    assert (found["batch"], found["device"], found["is_fake"]) == (BATCH, "h200", True)
    saved = Plan.from_json(Path("plan.json").read_text(encoding="utf-8"))
    assert saved == Plan.from_json(json.dumps(found["plan"]))
    assert saved.predicted is not None
    assert saved.predicted.peak_bytes <= saved.budget_bytes == int(1.2 * 2**20)
    assert max(found["curve"]["planned_bytes"]) == saved.predicted.peak_bytes
    assert max(found["curve"]["plain_bytes"]) == saved.predicted.plain_peak_bytes
    asked = [rung for rung in found["budgets"] if rung["is_requested"]]
    assert [rung["peak_bytes"] for rung in asked] == [saved.predicted.peak_bytes]
    assert found["hidden"] == []


def test_the_same_command_gives_the_same_answer(
    capsys: pytest.CaptureFixture[str], forget_traces: Callable[[], None]
) -> None:
    before = document(capsys, "--budget", "1.2MiB")
    forget_traces()
    assert plan("--json", "--budget", "1.2MiB") == 0
    assert json.loads(capsys.readouterr().out) == before


def test_the_optimizer_and_the_precision_are_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    accounts = {}
    for precision in ("float32", "bf16_autocast", "bf16"):
        write(precision=precision)
        lines = document(capsys, "--budget", "1GiB")["plan"]["account"]
        accounts[precision] = {line["what"]: line["plain_bytes"] for line in lines}
    whole, mixed, half = accounts["float32"], accounts["bf16_autocast"], accounts["bf16"]
    assert whole["weights"] == mixed["weights"] == 2 * half["weights"]
    for account in accounts.values():
        assert account["optimizer state"] == pytest.approx(2 * account["weights"], rel=0.01)
    assert whole["activations"] > mixed["activations"] > half["activations"]


def test_the_command_line_says_where_the_state_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN.replace("hidden_size: 32", "hidden_size: 256"))
    keep = document(capsys, "--budget", "1GiB")["plan"]
    swap = document(capsys, "--budget", "1GiB", "--optimizer", "swap")["plan"]
    assert keep["optimizer"] is None and swap["optimizer"]["reason"] == "memory.optimizer asks for it"
    moved = swap["optimizer"]["moved_bytes"]
    assert 0 < moved <= {line["what"]: line["plain_bytes"] for line in swap["account"]}["optimizer state"]
    assert swap["predicted"]["floor_bytes"] < keep["predicted"]["floor_bytes"]
    assert swap["predicted"]["plain_peak_bytes"] == keep["predicted"]["plain_peak_bytes"]


def test_gradients_of_earlier_micro_batches_are_there_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    once = document(capsys, "--budget", "1GiB")["plan"]["predicted"]
    write(grad_accumulation=2)
    twice = document(capsys, "--budget", "1GiB")["plan"]["predicted"]
    assert twice["plain_peak_bytes"] > once["plain_peak_bytes"]


def test_the_budget_of_the_file_is_used_unless_the_command_says_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN + "  budget: 1.5MiB\n  host_budget: 1GiB\n")
    assert document(capsys)["plan"]["budget_bytes"] == int(1.5 * 2**20)
    found = document(capsys, "--budget", "1.2MiB", "--host-budget", "2GiB")["plan"]
    assert (found["budget_bytes"], found["host_budget_bytes"]) == (int(1.2 * 2**20), 2 << 30)


def test_a_budget_asks_the_same_whoever_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss is in slices under a budget, also one of the command line."""
    text = RUN.replace("hidden_size: 32", "hidden_size: 32\n  vocab_size: 32000").replace("length: 64", "length: 512")
    write(text + "  budget: 1GiB\n")
    of_file = document(capsys)["plan"]
    write(text)
    assert document(capsys, "--budget", "1GiB")["plan"] == of_file
    assert of_file["loss"] == "sliced"


def test_rules_are_limits_for_the_solver(capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN + "  recompute: none\n  keep: [layers.2]\n")
    sites = document(capsys, "--budget", "1.5MiB")["plan"]["sites"]
    assert {site["fate"] for site in sites} == {"keep", "swap"}
    assert {site["fate"] for site in sites if site["layer"] == "model.layers.2"} == {"keep"}


def in_little_memory(code: str) -> Any:
    """What a program with a run file for 671 billion parameters prints as JSON: it needs at most 1 GiB. In a process of
    its own, because the test's own has other things in memory."""
    fields = "  model_type: deepseek_v3\n  vocab_size: 129280\n"
    run = f"model:\n{fields}data:\n  sequence_length: 4096\ntrain:\n  steps: 1\n  batch_size: 1\n  precision: bf16\n"
    Path("run.yaml").write_text(run, encoding="utf-8")
    # not `ru_maxrss`, which a process inherits from the one that started it
    code += (
        "import pathlib, sys\n"
        "lines = pathlib.Path('/proc/self/status').read_text().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')), file=sys.stderr)\n"
    )
    status, out, err = processes.program(code, Path(), seconds=300)
    assert status == 0, err
    assert int(err.splitlines()[-1]) <= 1 << 20  # KiB
    return json.loads(out)


def test_a_traced_model_of_671_billion_parameters_needs_no_memory() -> None:
    found = in_little_memory(
        "import json, pathlib\n"
        "from lowtide.cli.run_step import trace_run\n"
        "from lowtide.cli.run_file import load_run\n"
        "from lowtide.timeline.hardware import load_hardware\n"
        "run = load_run(pathlib.Path('run.yaml'))\n"
        "profile = trace_run(run, load_hardware('h200'), say=lambda _: None)\n"
        "print(json.dumps([len(profile.layers), profile.state.parameters]))\n"
    )
    assert found == [61, pytest.approx(2 * 671e9, rel=0.005)]


@pytest.mark.extended
def test_a_planned_model_of_671_billion_parameters_needs_no_memory() -> None:
    found = in_little_memory(
        "from lowtide.cli.main import main\n"
        "assert not main(['plan', 'run.yaml', '--budget', '5001GiB', '--hardware', 'h200', '--json'])\n"
    )
    assert len(found["plan"]["layers"]) == 61
    weights = {line["what"]: line["plain_bytes"] for line in found["plan"]["account"]}["weights"]
    assert weights == pytest.approx(2 * 671e9, rel=0.005)
    assert found["plan"]["predicted"]["peak_bytes"] <= found["plan"]["budget_bytes"]


# -- ranks that share the parameters -----------------------------------------------------------------------------


SHARDED = RUN + "parallel: {data: 4, shard: fsdp2}\n"


def test_one_rank_of_a_fully_sharded_model(capsys: pytest.CaptureFixture[str]) -> None:
    whole = document(capsys, "--budget", "1GiB")["plan"]
    write(SHARDED)
    found = document(capsys, "--budget", "1GiB")
    before, after = ({line["what"]: line["plain_bytes"] for line in plan["account"]} for plan in (whole, found["plan"]))
    for what in ("weights", "optimizer state"):
        assert after[what] == pytest.approx(before[what] / 4, rel=0.01)
    assert after["activations"] == before["activations"]
    network = found["network"]
    assert (network["ranks"], network["cluster"]) == (4, "h200")
    added = network["exposed_seconds"] + network["slowed_seconds"] + network["copy_seconds"]
    assert network["step_seconds"] == pytest.approx(found["plan"]["predicted"]["step_seconds"] + added)
    assert 0 < network["exposed_seconds"] <= network["network_seconds"]
    assert plan("--budget", "1GiB", "--cluster", "ideal") == 0
    printed = capsys.readouterr().out
    assert "\nfully sharded over 4 ranks (cluster ideal): step " in printed
    write(RUN + "parallel: {data: 4, shard: hsdp, replicas: 2}\n")
    assert plan("--budget", "1GiB") == 0
    assert "\nfully sharded over 2 ranks, 2 replicas (cluster h200): step " in capsys.readouterr().out


def test_layers_that_run_again_hide_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    """They are in the step that is played, once for each layer of the plan."""
    numbers = {"node_devices": 8, "node_bytes_per_second": 1e8, "network_bytes_per_second": 1e8, "message_seconds": 0,
               "overlap_share": 0, "compute_share": 1, "reserved_share": 0}  # fmt: skip
    lines = (f'{key} = {{ value = {value}, source = "assumed: slow" }}\n' for key, value in numbers.items())
    Path("slow.toml").write_text("".join(lines), encoding="utf-8")
    asked = ("--budget", "1GiB", "--cluster", "slow.toml")
    write(SHARDED)
    plain = document(capsys, *asked)
    write(SHARDED.replace("memory:\n", "memory:\n  recompute: all\n"))
    again = document(capsys, *asked)
    longer = again["plan"]["predicted"]["step_seconds"] - plain["plan"]["predicted"]["step_seconds"]
    hidden = plain["network"]["exposed_seconds"] - again["network"]["exposed_seconds"]
    assert 0 < hidden <= longer


def test_what_a_fully_sharded_plan_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    write(SHARDED)
    command = ["plan", "run.yaml", "--budget", "1GiB"]
    for options, text in (
        (["--hardware", "h200", "--devices", "4"],
         "--devices: the ranks of a fully sharded model are 'parallel.data'; leave it out"),
        (["--hardware", "h200", "--export", "megatron", "f"],
         "--export: is for a plan for a cluster; write --devices, or a section 'parallel'"),
        (["--hardware", "rtx4090"],
         "cluster: unknown cluster 'rtx4090' (known: a100, ascend910b, h100, h200, h800, ideal; a file of your own is "
         "given by its path, which ends in .toml)"),
        ([], "--hardware: say for which device: --hardware h100, ascend910b, ... or a TOML file"),
    ):  # fmt: skip
        assert error_of(capsys, *command, *options) == text
    for parallel, text in (
        ("{shard: fsdp2}", "run.yaml:16:19: 'parallel.shard' is planned for a number of ranks; write e.g. data: 8"),
        ("{shard: fsdp2, data: 2, tensor: 2}",
         "run.yaml:16:43: 'parallel.tensor' is 2, and a plan beside 'shard' is of whole products in this version; "
         "leave it out to plan, or let lowtide train observe a step of such a rank"),
    ):  # fmt: skip
        write(RUN + f"parallel: {parallel}\n")
        assert error_of(capsys, *command, "--hardware", "h200") == text


# -- profiles ------------------------------------------------------------------------------------------------------


def test_a_fake_profile_plans_as_the_run_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide("profile", "run.yaml", "--fake", "--hardware", "h200", "--out", "profile.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"LlamaForCausalLM, one step of {BATCH}: traced, times by roofline of h200"
    assert [line.split("  ")[0] for line in lines[4:6]] == ["layers 0-2", "outside layers"]
    direct = document(capsys, "--budget", "1.2MiB")
    assert main(["plan", "run.yaml", "--profile", "profile.json", "--budget", "1.2MiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == direct


def test_a_real_profile_has_the_bytes_of_the_fake_one() -> None:
    assert lowtide("profile", "run.yaml", "--out", "real.json") == 0
    assert lowtide("profile", "run.yaml", "--fake", "--out", "fake.json") == 0
    real, fake = (Profile.from_json(Path(name).read_text()) for name in ("real.json", "fake.json"))
    assert (real.device, real.is_fake, fake.device, fake.is_fake) == ("cpu", False, "cpu", True)
    assert [(site.name, site.nbytes) for site in real.sites] == [(site.name, site.nbytes) for site in fake.sites]
    assert real.state == fake.state
    assert sum(real.op_seconds) > 0


def test_a_real_profile_is_planned_with_the_measured_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide("profile", "run.yaml", "--out", "profile.json") == 0
    capsys.readouterr()
    assert main(["plan", "run.yaml", "--profile", "profile.json", "--budget", "1.2MiB"]) == 0
    assert "certainty: bytes and times observed on cpu" in capsys.readouterr().out
    assert "host" in Path("lowtide/links.json").read_text(encoding="utf-8")


def test_a_model_in_a_folder_needs_only_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig

    fields = document(capsys, "--budget", "1GiB")["plan"]["account"]
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2
    )
    config.save_pretrained("folder")
    model = RUN.partition("data:")[0]
    write(RUN.replace(model, "model:\n  path: folder\n"))
    assert document(capsys, "--budget", "1GiB")["plan"]["account"] == fields


def test_what_custom_functions_hide_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(decoder_profile(2, hidden=True))
    assert plan("--profile", "profile.json", "--budget", "2GiB") == 0
    said = capsys.readouterr().out
    expected = (
        "24.0 MiB more stay from forward to backward in custom functions, out of reach:\n"
        "  model.layers.0.attn.Rotary: 24.0 MiB\n"
    )
    assert expected in said


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "run.yaml: there is no budget to plan for; write --budget 20GiB, or 'budget: 20GiB' in the section "
            "'memory'",
        ),
        (
            ["--budget", "lots"],
            "--budget: 'lots' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB",
        ),
        (["--budget", "0"], "--budget: must be more than 0 bytes; write e.g. --budget 20GiB"),
        (
            ["--budget", "-1GiB"],
            "--budget: '-1GiB' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB",
        ),
        (
            ["--budget", "1GiB", "--host-budget", "20I"],
            "--host-budget: '20I' is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB",
        ),
        (
            ["--budget", "1GiB", "--profile", "nowhere.json"],
            "--profile: nowhere.json: no such file; check the path",
        ),
        (
            ["--budget", "0%"],
            "--budget: '0%' is not a share of a device; write more than 0% and at most 100%, such as 90%",
        ),
        (
            ["--budget", "1GiB", "--profile", "run.yaml"],
            "--profile: run.yaml: profile:1:1: not valid JSON: Expecting value; write one: lowtide profile "
            "RUN.yaml --out profile.json",
        ),
        (
            ["--budget", "1GiB", "--hardware", "h2000"],
            "hardware: unknown device 'h2000'; did you mean 'h200'? (known: a100, a6000, ascend910b, ascend910c, "
            "b200, cpu, gh200, h100, h200, l40s, mi300x, rtx4090, rtx5090; a file of "
            "your own is given by its path, which ends in .toml)",
        ),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "plan", "run.yaml", *arguments) == message


def test_a_budget_above_the_device_is_planned_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN)
    assert lowtide("plan", "run.yaml", "--hardware", "rtx4090", "--budget", "500GiB") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if " ..." not in line]
    assert said == [
        "lowtide: the budget 500.0 GiB is more than rtx4090 has (22.4 GiB); --budget auto takes what it has"
    ]


def test_a_budget_of_zero_in_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN + "  budget: 0\n")
    said = "run.yaml:16:11: 'memory.budget' must be more than 0 bytes; write e.g. budget: 20GiB, or leave it out"
    assert error_of(capsys, "plan", "run.yaml") == said


def test_a_budget_below_the_floor_says_the_floor_and_the_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "plan", "run.yaml", "--hardware", "h200", "--budget", "100KiB").splitlines()
    assert said[0].startswith("budget 0.098 MiB: no plan fits; the least that can be reached is 1.0 MiB, set by ")
    assert said[1].startswith("  most of it is the optimizer's state: ")
    assert said[2].startswith("  - with '")
    assert len(said) <= 6


def test_changes_of_the_run_file_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """What it says fits does fit, with that change in the file; the budget is below the floor of this one."""
    write(RUN.replace("hidden_size: 32", "hidden_size: 128"))
    floor = document(capsys, "--budget", "1GiB")["plan"]["predicted"]["floor_bytes"]
    budget = ("--budget", str(floor * 3 // 4))
    text = error_of(capsys, "plan", "run.yaml", "--hardware", "h200", *budget)
    assert "  - with 'train.precision: bf16' it fits: peak " in text
    write(RUN.replace("hidden_size: 32", "hidden_size: 128"), precision="bf16")
    assert document(capsys, *budget)["plan"]["predicted"]["peak_bytes"] <= floor * 3 // 4


def test_what_a_budget_comes_to_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "--hardware", "H200", "--budget", "90%"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "budget 90% = 118.2 GiB: of 131.3 GiB of h200"


def test_a_profile_of_another_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide("profile", "run.yaml", "--fake", "--out", "profile.json") == 0
    capsys.readouterr()
    write(RUN.replace("batch_size: 2", "batch_size: 4"))
    said = error_of(capsys, "plan", "run.yaml", "--budget", "1GiB", "--profile", "profile.json")
    assert said == (
        f"--profile: it is of {BATCH}, the run has input_ids=int64[4, 64], labels=int64[4, 64]; profile the run again"
    )


def test_a_profile_of_another_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide("profile", "run.yaml", "--fake", "--out", "profile.json") == 0
    capsys.readouterr()
    write(RUN.replace("num_hidden_layers: 3", "num_hidden_layers: 2"))
    said = error_of(capsys, "plan", "run.yaml", "--budget", "1GiB", "--profile", "profile.json")
    assert said == (
        "--profile: it is of a model with 189,312 bytes of weights, the run's has 148,096; profile the run again"
    )


def test_hardware_of_a_real_step(capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "profile", "run.yaml", "--hardware", "h200")
    assert said == "--hardware: a real step runs on the device of the run; add --fake, or leave it out"


def test_a_text_that_does_not_fit_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    write(RUN.replace("hidden_size: 32", "hidden_size: 32\n  max_position_embeddings: 32"))
    said = error_of(capsys, "plan", "run.yaml", "--budget", "1GiB")
    assert said == (
        "run.yaml:10:20: 'data.sequence_length' is 64, but the model has 32 positions; lower it or raise "
        "'model.max_position_embeddings'"
    )


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "profile", "run.yaml", "--fake", "--out", "no/where.json")
    assert said == "--out: no/where.json cannot be written: No such file or directory; choose another file"


@pytest.fixture
def kind_of_model():
    """Makes transformers know a Llama with a forward of one's own, for the time of a test."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

    class OddConfig(LlamaConfig):
        model_type = "odd"

    def register(before_forward) -> None:
        class OddModel(LlamaForCausalLM):
            config_class = OddConfig

            def forward(self, input_ids, labels):
                before_forward(input_ids)
                return super().forward(input_ids=input_ids, labels=labels)

        CONFIG_MAPPING.register("odd", OddConfig, exist_ok=True)
        MODEL_FOR_CAUSAL_LM_MAPPING.register(OddConfig, OddModel, exist_ok=True)

    yield register
    CONFIG_MAPPING._extra_content.pop("odd", None)
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OddConfig, None)


def test_a_model_that_looks_at_values(kind_of_model, capsys: pytest.CaptureFixture[str]) -> None:
    kind_of_model(lambda tokens: bool(tokens.sum() > 0))
    write(RUN.replace("model_type: llama", "model_type: odd"))
    said = error_of(capsys, "plan", "run.yaml", "--budget", "1GiB")
    assert said == (
        "trace: the model looks at the values of its tensors (aten._local_scalar_dense in the model), and a trace has "
        "none; profile it with real ones: `lowtide profile RUN.yaml`, or lowtide.observe(model, batch)"
    )
    assert lowtide("profile", "run.yaml", "--out", "profile.json") == 0  # the way out that it names


def test_a_batch_that_does_not_fit_the_model(kind_of_model, capsys: pytest.CaptureFixture[str]) -> None:
    kind_of_model(lambda tokens: tokens + torch.ones(3, device=tokens.device))
    write(RUN.replace("model_type: llama", "model_type: odd"))
    for command in (["plan", "run.yaml", "--budget", "1GiB"], ["profile", "run.yaml"]):
        said = error_of(capsys, *command)
        assert said.startswith(f"observe: the batch does not fit the model: OddModel({BATCH}) raised RuntimeError: ")
        assert "\n" not in said


# -- what is said while it works -----------------------------------------------------------------------------------


def test_whoever_waits_is_told_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, forget_traces: Callable[[], None]
) -> None:
    forget_traces()
    monkeypatch.setattr(waiting, "_FIRST_SECONDS", 0.0)
    say = waiting.Waiting.say

    def until_shown(line: waiting.Waiting, what: str) -> None:
        """However fast this machine is."""
        say(line, what)
        while not line._num_shown:
            time.sleep(0.01)

    monkeypatch.setattr(waiting.Waiting, "say", until_shown)
    assert plan("--budget", "1.2MiB") == 0
    said = capsys.readouterr().err.splitlines()
    assert "lowtide: tracing one step ..." in said


def test_what_is_quick_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_FIRST_SECONDS", 600.0)
    with waiting.Waiting() as line:
        line.say("blinking")
    assert capsys.readouterr().err == ""


def test_stdout_stays_clean_whoever_prints(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    from lowtide.cli.plan import _stdout_kept_clean

    with _stdout_kept_clean():
        os.write(1, b"Writing model to /tmp/highs\n")
    print("the plan", flush=True)
    captured = capfd.readouterr()
    assert captured.out == "the plan\n"
    assert captured.err == "Writing model to /tmp/highs\n"


def write_profile(made: Profile) -> None:
    """As `profile.json`, with the batch and the weights of the run."""
    run_bytes = sum(weight.nbytes for weight in weights_of_run(load_run("run.yaml")).values())
    profile = dataclasses.replace(made, batch=BATCH, state=dataclasses.replace(made.state, parameters=run_bytes))
    Path("profile.json").write_text(profile.to_json(), encoding="utf-8")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """More than a pipe holds is left unread."""
    write_profile(decoder_profile(2))
    words = "plan run.yaml --profile profile.json --hardware h200 --budget 100GiB --json"
    command, pipe = [sys.executable, "-m", "lowtide", *words.split()], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, bufsize=1, pipesize=4096) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(9) == '{"model":'
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == 141
