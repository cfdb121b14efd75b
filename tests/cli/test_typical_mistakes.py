"""What people get wrong in their first hour, and the one line that each mistake gives; and that printed advice works."""
# ruff: noqa: E501 -- messages are easier to compare in one piece

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lowtide
from lowtide.adapters.transformers import TideCallback
from lowtide.cli.main import _parse, main
from lowtide.cli.run_file import load_run
from lowtide.cli.run_step import changes_of, trace_run
from lowtide.timeline.hardware import load_hardware

TOKENS = torch.zeros(2, 32, dtype=torch.long)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
UNIT = "memory.budget: 20 is 20 bytes; write the unit too, such as '20GiB'"
NO_SIZE = "is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"
KNOWN = "(known: a100, a6000, ascend910b, ascend910c, b200, cpu, gh200, h100, h200, l40s, mi300x, rtx4090, rtx5090; a file of your own is given by its path, which ends in .toml)"


def llama() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, use_cache=False))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def first_step(model: nn.Module, *args: Any, **more: Any) -> None:
    with lowtide.optimize(model, *args, **more):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()


def on_the_cpu() -> None:
    model = llama()
    with lowtide.apply(model, {"swap": "all"}), torch.autograd.graph.save_on_cpu():
        model(input_ids=TOKENS, labels=TOKENS)


def compiled_afterwards() -> None:
    model = llama()
    lowtide.optimize(model, "1GiB")
    torch.compile(model)(input_ids=TOKENS, labels=TOKENS)


def twice() -> None:
    model = llama()
    lowtide.apply(model, {"swap": "all"})
    lowtide.apply(model, {"swap": "all"})


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "no budget": (lambda: lowtide.optimize(llama()), "memory.budget: a budget is needed to plan for; write e.g. budget='20GiB'"),
    "a number": (lambda: lowtide.optimize(llama(), budget=20), UNIT),
    "a number as text": (lambda: lowtide.optimize(llama(), "20"), UNIT),
    "another unit": (lambda: lowtide.optimize(llama(), "20 gigs"), f"memory.budget: '20 gigs' {NO_SIZE}"),
    "a share": (lambda: lowtide.optimize(llama(), 0.9), "memory.budget: expected a size such as 20GiB, a share such as 90% or auto, not 0.9"),
    "a share above all": (lambda: lowtide.optimize(llama(), "200%"), "memory.budget: '200%' is not a share of a device; write more than 0% and at most 100%, such as 90%"),
    "nothing": (lambda: lowtide.optimize(llama(), "0GiB"), "memory.budget: must be more than 0 bytes; write e.g. budget: 20GiB, or leave it out"),
    "a size to apply": (lambda: lowtide.apply(llama(), "20GiB"), "lowtide.apply: '20GiB' is a budget, not a plan; write lowtide.optimize(model, budget='20GiB')"),
    "a file that is not there": (lambda: lowtide.apply(llama(), "missing.yaml"), "missing.yaml: no such file; check the path"),
    "a key": (lambda: lowtide.apply(llama(), {"recomptue": "all"}), "memory.recomptue: unknown key; did you mean 'recompute'?"),
    "a value": (lambda: lowtide.apply(llama(), {"recompute": "al"}), "memory.recompute: expected auto, none, all, a list or null, not 'al'; did you mean 'all'?"),
    "a pattern": (lambda: lowtide.apply(llama(), {"swap": ["layres.0"]}), "memory.swap[0]: pattern 'layres.0' matches no layer, module or op of this model; nearest: 'layers.0', 'layers.1-3', 'layers.*.mlp'"),
    "more layers than there are": (lambda: lowtide.apply(llama(), {"swap": ["layers.0-31"]}), "memory.swap[0]: pattern 'layers.0-31' reaches past this model, whose numbers there end at 3; write a range that ends there, or 'layers.*' for all"),
    "a layer that is not there": (lambda: lowtide.apply(llama(), {"recompute": ["layers.9.mlp"]}), "memory.recompute[0]: pattern 'layers.9.mlp' matches no layer, module or op of this model; nearest: 'layers.0-3.mlp', 'model.layers.*.mlp', 'layers.*.mlp.act_fn' (recompute acts on layers and modules; single operators can be kept or swapped)"),
    "a class": (lambda: lowtide.optimize(LlamaForCausalLM, "1GiB"), "lowtide.optimize: expected a torch.nn.Module, not type"),  # type: ignore[arg-type]
    "DataParallel": (lambda: first_step(nn.DataParallel(llama()), "1GiB"), "lowtide: nn.DataParallel is not supported, its replicas cannot be told apart; use DistributedDataParallel, one process a device"),
    "compiled before": (lambda: lowtide.optimize(torch.compile(llama()), "1GiB"), "lowtide.optimize: this model is compiled as a whole (torch.compile(module)), and one compiled graph has no layers to decide about; give lowtide the model before that, with its layers compiled: `for layer in model.model.layers: layer.compile()`"),
    "compiled after": (compiled_afterwards, "lowtide: LlamaForCausalLM is under a lowtide plan and was compiled after that (torch.compile), and compiled code has no eager forward to follow; compile the layers of a model before lowtide gets it, or remove() the tide first"),
    "another optimizer": (lambda: first_step(llama(), "1GiB", optimizer=adam(llama())), "lowtide.optimize: this AdamW has none of the parameters of LlamaForCausalLM: it steps 39 others. Give the optimizer that trains the model, made from model.parameters()"),
    "an optimizer's class": (lambda: lowtide.optimize(llama(), "1GiB", optimizer=torch.optim.AdamW), "lowtide.optimize: optimizer= takes a torch.optim.Optimizer, or a wrapper around one, not type"),
    "twice": (twice, "lowtide.apply: this model is already under a lowtide plan; call remove() on that tide first"),
    "nothing to train": (lambda: first_step(llama().requires_grad_(False), "1GiB"), "lowtide: no parameter requires a gradient, so there is nothing to plan; unfreeze what is to be trained first"),
    "save_on_cpu": (on_the_cpu, "lowtide: the model was called inside other saved-tensor hooks (torch.autograd.graph.save_on_cpu.__init__.<locals>.pack_to_cpu). PyTorch calls only the innermost pair, so those would see nothing. Leave them out, enter them around single modules inside the model, or call tide.remove() first."),
    "logits of a batch": (lambda: lowtide.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)), "lowtide.cross_entropy: needs logits of shape [rows, words] and targets of shape [rows], not [2, 3, 4] and [2, 3]; use logits.view(-1, words) and target.view(-1)"),
    "a device": (lambda: lowtide.plan(llama(), BATCH, "1GiB", hardware="h300"), f"hardware: unknown device 'h300'; did you mean 'h200'? {KNOWN}"),
    "a batch": (lambda: lowtide.plan(llama(), {"input_id": TOKENS}, "1GiB"), "observe: the batch does not fit the model: LlamaForCausalLM(input_id=int64[2, 32]) raised ValueError: You must specify exactly one of input_ids or inputs_embeds"),
    "no labels": (lambda: lowtide.plan(llama(), {"input_ids": TOKENS}, "1GiB"), "observe: the output is no loss but CausalLMOutputWithPast; return a scalar tensor, an output with `.loss`, or say how to get it with loss="),
    "host memory": (lambda: lowtide.optimize(llama(), "1GiB", memory={"host_budget": "lots"}), f"memory.host_budget: 'lots' {NO_SIZE}"),
    "an engine": (lambda: lowtide.optimize(llama(), "1GiB", engine="cudaa"), "engine: 'cudaa' is none of accelerator, host"),
    "a tier": (lambda: lowtide.swap_optimizer(adam(llama()), tier="gpu"), "lowtide.swap_optimizer: tier 'gpu' is none of host, disk, mapped"),
    "a form": (lambda: lowtide.write_report(llama(), "x.pdf"), "report: x.pdf: write to a file that ends in .html, .trace.json, .json or .pickle"),
    "a report of nothing": (lambda: lowtide.write_report(llama(), "x.html"), "lowtide.write_report: this model is not under lowtide; give it the model or the handle that is"),
    "a callback": (TideCallback, "TideCallback: nothing to do; write budget='20GiB', or memory= with rules or the path of a YAML file"),
    "a model to a callback": (lambda: TideCallback(llama()), "TideCallback: budget: a LlamaForCausalLM is not a size; write a number and a unit, such as 20GiB, 512MiB or 20GB"),
    "an optimizer as budget": (lambda: lowtide.optimize(llama(), adam(llama())), "memory.budget: expected a size such as 20GiB; the optimizer goes to optimizer="),  # type: ignore[arg-type]
    "a rule to apply": (lambda: lowtide.apply(llama(), "swap"), "lowtide.apply: 'swap' alone is no plan; write lowtide.apply(model, {'swap': 'all'})"),
    "yes": (lambda: lowtide.apply(llama(), {"recompute": True}), "memory.recompute: expected auto, none, all, a list or null, not True; write all"),
    "no": (lambda: lowtide.apply(llama(), {"swap": False}), "memory.swap: expected auto, none, all, a list or null, not False; write none"),
    "how many layers": (lambda: lowtide.apply(llama(), {"recompute": 4}), "memory.recompute: expected auto, none, all, a list or null, not 4"),
    "a word of others": (lambda: lowtide.apply(llama(), {"gradient_checkpointing": True}), "memory.gradient_checkpointing: unknown key; did you mean 'recompute'?"),
    "another word of others": (lambda: lowtide.apply(llama(), {"offload": "all"}), "memory.offload: unknown key; did you mean 'swap'?"),
    "a section in its section": (lambda: lowtide.apply(llama(), {"memory": {"swap": "all"}}), "memory.memory: unknown key; leave 'memory' out, and write what is below it"),
    "the name of a plan's file": (lambda: lowtide.Plan.from_json("plan.json"), "plan: expected the text of a plan, not a file's name; write Path('plan.json').read_text()"),
    "a tensor as batch": (lambda: lowtide.plan(llama(), TOKENS, "1GiB"), "observe: batch must be a mapping (model(**batch)), a tuple (model(*batch)) or a function that returns the loss, not Tensor; write (tensor,)"),
    "a kind of device": (lambda: lowtide.plan(llama(), BATCH, "1GiB", hardware="cuda"), f"hardware: unknown device 'cuda'; leave it out for this machine's own device {KNOWN}"),
    "parameters": (lambda: lowtide.optimize(llama().parameters(), "1GiB"), "lowtide.optimize: expected a torch.nn.Module, not generator"),  # type: ignore[arg-type]
    "an optimizer's name": (lambda: lowtide.optimize(llama(), "1GiB", optimizer="adamw"), "lowtide.optimize: optimizer= takes a torch.optim.Optimizer, or a wrapper around one, not str"),  # type: ignore[arg-type]
    "a list of rules": (lambda: lowtide.apply(llama(), ["layers.0"]), "memory: expected a plan, a mapping or the path of a YAML file, not ['layers.0']"),  # type: ignore[arg-type]
    "one pattern": (lambda: lowtide.apply(llama(), {"swap": "layers.0"}), "memory.swap: expected auto, none, all, a list or null, not 'layers.0'; write ['layers.0']"),
    "a percentage as share": (lambda: lowtide.swap_optimizer(adam(llama()), resident=50), "lowtide.swap_optimizer: resident is a share from 0 to 1, not 50; memory.optimizer: auto finds the share for a budget"),
    "a model's optimizer": (lambda: lowtide.swap_optimizer(llama()), "lowtide.swap_optimizer: takes a torch.optim.Optimizer, or a wrapper around one, not LlamaForCausalLM"),
    "a report before a step": (lambda: lowtide.write_report(lowtide.optimize(llama(), "1GiB"), "x.json"), "lowtide.write_report: no step has run under this handle yet; run one, then report"),
    "a callback's unit": (lambda: TideCallback(budget="20"), "TideCallback: budget: 20 is 20 bytes; write the unit too, such as '20GiB'"),
}  # fmt: skip

COMMANDS = {
    "plan run.yaml --hardware h100": "run.yaml: there is no budget to plan for; write --budget 20GiB, or 'budget: 20GiB' in the section 'memory'",
    "plan run.yaml --budget 20": "--budget: 20 is 20 bytes; write the unit too, such as '20GiB'",
    "plan run.yaml --bugdet 20GiB": "lowtide plan: unknown argument '--bugdet'; did you mean '--budget'?; see lowtide plan --help",
    "plan typo.yaml": "typo.yaml:3:10: unknown key 'memory.budgett'; did you mean 'budget'?",
    "plan section.yaml": "section.yaml:3:1: unknown section 'memmory'; did you mean 'memory'?",
    "plan kind.yaml": "kind.yaml:1:21: unknown model_type 'lama'; did you mean 'llama'?",
    "plan field.yaml": "field.yaml:1:28: unknown key 'model.hiden_size'; did you mean 'hidden_size'?",
    "plan meta-llama/Llama-3-8B": "meta-llama/Llama-3-8B: no such file; give a run file, or for a model of that name: --model meta-llama/Llama-3-8B",
    "plan config.json": "config.json:1:2: unknown section 'model_type'; did you mean 'model'?; a model's config.json is asked about with --model config.json",
    "plan --model config.json --optimizer adam": "lowtide plan: argument --optimizer: invalid choice: 'adam' (choose from 'keep', 'swap', 'auto', 'in_backward', 'adamw', 'sgd', 'adafactor'); did you mean 'adamw'?; see lowtide plan --help",
    "plan --model config.json --sequence 8k": "lowtide plan: argument --sequence: expected a whole number, such as 8192, not '8k'; see lowtide plan --help",
    "plan --model config.json --seq-len 64": "lowtide plan: unknown argument '--seq-len'; did you mean '--sequence'?; see lowtide plan --help",
    "plan --model config.json --hardware a100-80gb": f"hardware: unknown device 'a100-80gb'; did you mean 'a100'? {KNOWN}",
    "plan run.yaml --budget 120 %": "--budget: '120%' is not a share of a device; write more than 0% and at most 100%, such as 90%",
    "plan run.yaml --report plan.pdf": "report: plan.pdf: write to a file that ends in .html, .trace.json, .json or .pickle",
    "export plan.json --to trl": "lowtide export: the following arguments are required: --profile; see lowtide export --help",
    "report run.yaml": "run.yaml: this is a file; give the train.output_dir of a run of `lowtide train`",
    "report .": ".: no run of `lowtide train`: there is no metrics.jsonl in it; give its train.output_dir",
    "explain run.yaml": "run.yaml:1:1: missing section 'recompute_config' or 'swap_config'; write one of them, or use lowtide plan for a section 'memory'",
}
RUN = "model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}\ndata: {sequence_length: 32}\ntrain: {steps: 1, batch_size: 2, device: cpu}\n"
FILES = {
    "run.yaml": RUN,
    "config.json": '{"model_type": "llama"}',
    "typo.yaml": "model: {model_type: llama}\ntrain: {steps: 1}\nmemory: {budgett: 20GiB}\n",
    "section.yaml": "model: {model_type: llama}\ntrain: {steps: 1}\nmemmory: {budget: 20GiB}\n",
    "kind.yaml": "model: {model_type: lama}\ntrain: {steps: 1}\nmemory: {budget: 20GiB}\n",
    "field.yaml": "model: {model_type: llama, hiden_size: 64}\ntrain: {steps: 1}\nmemory: {budget: 20GiB}\n",
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")


def test_there_are_enough_of_them() -> None:
    assert len(CALLS) + len(COMMANDS) >= 70


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", CALLS)
def test_a_call(mistake: str) -> None:
    call, message = CALLS[mistake]
    with pytest.raises(lowtide.ConfigError) as error:
        call()
    assert str(error.value) == message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(command.split())
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert (status, capsys.readouterr().err.splitlines()[-1]) == (2, COMMANDS[command])


def test_a_unit_after_a_blank_is_taken() -> None:
    assert _parse(["plan", "run.yaml", "--budget", "80", "GiB", "--json"]).budget == "80GiB"
    assert _parse(["plan", "--budget", "90", "%", "run.yaml"]).run == "run.yaml"


def test_a_misspelt_name_is_told_the_right_one() -> None:
    done = subprocess.run([sys.executable, "-c", "import lowtide; lowtide.optimise"], capture_output=True, text=True)
    assert done.stderr.endswith("has no attribute 'optimise'. Did you mean: 'optimize'?\n")


def test_a_model_that_checkpoints_is_told_once() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        first_step(model, "1GiB", memory={"min_bytes": 0})
    (said,) = [str(each.message) for each in heard if "lowtide" in str(each.message)]
    assert "already use gradient checkpointing" in said and "model.gradient_checkpointing_disable()" in said


def test_a_budget_without_its_name_is_taken() -> None:
    first_step(llama(), "1GiB")


@pytest.mark.parametrize("name", ["transformers", "peft"])
def test_a_package_that_is_not_there_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiny.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}), encoding="utf-8")
    for module in [
        each for each in sys.modules if each.partition(".")[0] == name or each.startswith("lowtide.cli.run_")
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert main(["plan", "--model", "tiny.json", "--lora", "4", "--sequence", "32", "--hardware", "h100"]) == 2
    install = {"transformers": "lowtide[train]", "peft": "peft"}[name]
    assert capsys.readouterr().err.splitlines()[-1] == f"lowtide: this needs {name}; run: pip install '{install}'"


@pytest.mark.extended  # one change, followed: test_plan.py
def test_advice_that_is_printed_can_be_followed() -> None:
    """Each change that a refusal may offer is written into the run file as it is printed: it is read, and it is the
    step that the refusal had planned."""
    run, hardware = load_run("run.yaml"), load_hardware("h100")
    offered = list(changes_of(run, hardware, trace_run(run, hardware, say=lambda text: None)))
    assert len(offered) == 5
    for change in offered:
        text = re.search(r"(?:^|, )((?:train|memory)\.\w+: \S+$|parallel: \{.*\})", change.text)
        assert text is not None, change.text
        section, _, key = text[1].partition(".") if not text[1].startswith("parallel") else ("", "", text[1])
        written = yaml.safe_load(RUN)
        written.setdefault(section, {}) if section else None
        (written[section] if section else written).update(yaml.safe_load(key))
        Path("changed.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
        changed = load_run("changed.yaml")
        if changed.is_sharded:
            assert changed.parallel is not None and changed.parallel.data in (2, 8)
            continue
        traced, planned = trace_run(changed, hardware, say=lambda text: None), change.profile()
        assert (traced.state, traced.loss, traced.batch) == (planned.state, planned.loss, planned.batch)
