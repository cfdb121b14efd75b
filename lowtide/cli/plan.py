"""`lowtide plan RUN.yaml`: the fastest plan within a budget, without a device, without weights, without a step.

With `--model CONFIG.json` in place of the run file it is compared with plain and with checkpointed training, and with
`--largest` the largest batch or the longest sequence of each is found (alternatives.py).
The model of the run file is traced with fake tensors, or a profile that `lowtide profile` saved is used. stdout has the
plan, or with `--json` one JSON document; stderr says what takes longer than a second. Exit status: 0, or 2 for a
mistake in the settings and for a budget that no plan fits.
With a section `parallel`, or `--devices`, it is a plan for a cluster (plan_cluster.py); with `parallel.shard`
it is that of one of the ranks that share the parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lowtide.cli import alternatives, plan_cluster
from lowtide.cli.plan_cluster import NO_BYTES
from lowtide.cli.run_file import load_run
from lowtide.cli.waiting import Waiting, width_of_stdout
from lowtide.cluster import report as cluster_report
from lowtide.config.memory import MemoryConfig, check_unit
from lowtide.config.run import OptimizerKind, RunConfig
from lowtide.config.source import read_text, write_file
from lowtide.core.budget import Budget, DeviceMemory, parse_budget
from lowtide.core.plan import Plan, plan_table
from lowtide.core.profile import Profile
from lowtide.core.text_table import wrapped
from lowtide.errors import BudgetError, ConfigError
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.budget_sweep import (
    BY_HAND,
    Sweep,
    budget_sweep,
    checkpointed,
    document_of,
    sweep_document,
    sweep_lines,
)
from lowtide.report.export import Setting
from lowtide.report.played_step import Played, play
from lowtide.report.report import report_of_plan
from lowtide.report.write import check_form, write_report
from lowtide.timeline.hardware import Hardware, load_hardware, memory_of_hardware
from lowtide.timeline.step import Link
from lowtide.units import MIB, format_bytes, parse_bytes

_MAX_CURVE_POINTS = 1024
_MOST_BYTES = 256 * MIB
"""Of a plan or a profile: a plan of 1,000 layers has some 20 MB."""
_STATE_PLACES = ("keep", "swap", "auto", "in_backward")


def run(args: argparse.Namespace) -> int:
    """Prints a plan. Raises `ConfigError` for mistakes, `BudgetError` when no plan fits."""
    is_of_model = alternatives.is_of_model(args)
    settings = alternatives.settings_of(args, _kind(args)) if is_of_model else _run_file(args.run)
    if plan_cluster.is_cluster_requested(settings, args):
        return _run_cluster(settings, args)
    check_writable(args.out)
    if args.report is not None:
        check_form(args.report)
        check_writable(args.report, "--report")
    wanted = memory_with(settings, args.run or args.model, args)
    settings = dataclasses.replace(settings, memory=wanted)  # what is traced follows the budget: the loss in slices
    if is_of_model or args.largest is not None:
        return _run_alternatives(settings, args)
    if settings.is_sharded:
        plan_cluster.check_sharded(settings, args)
    with Waiting() as waiting, _stdout_kept_clean():
        waiting.say("starting")
        profile, link = _profile_and_link(settings, args, waiting)
        if args.profile is not None:
            _refuse_other_model(settings, profile)
        network_of = None
        if settings.is_sharded:
            profile, network_of = plan_cluster.sharded_rank(settings, args, profile)
        from lowtide.cli.run_step import changes_of

        memory, budget_bytes, line = wanted.settled(lambda: _memory(settings, args, profile))
        if args.hardware is not None:
            _say_where_it_is_too_much(budget_bytes, args.hardware)
        lines = [line] if line else []
        waiting.say("planning")
        # From the second micro-batch of a step on, gradients are there from the start.
        kind: Any = {"link": link, "has_gradients": settings.train.grad_accumulation > 1}
        shared: Any = {**kind, "num_micro_batches": settings.train.grad_accumulation}
        told: Any = {"progress": lambda text: waiting.say(f"planning: {text}")}
        if args.profile is None and network_of is None:
            told["changes"] = tuple(changes_of(settings, _hardware(settings, args), profile))
        plan = plan_profile(profile, memory, **shared, **told)
        sweep = budget_sweep(plan, profile, memory, **shared, progress=waiting.say)
        others = checkpointed(profile, **kind)
        if args.report is not None:
            waiting.say("drawing")
            write_report(report_of_plan(plan, profile, memory, **kind, sweep=sweep), args.report)
        network = None if network_of is None else network_of(plan)
    if args.out is not None:
        write_file(args.out, plan.to_json(), where="--out")
    if args.json:
        document = _document(plan, profile, sweep, play(plan, profile, memory, **kind))
        document |= {"by_hand": document_of(others)} | ({"budget_came_from": lines} if lines else {})
        document |= {} if network is None else {"network": plan_cluster.network_document(network)}
        print(json.dumps(document))
    else:
        told_of_network = [] if network is None else ["", *plan_cluster.network_lines(network)]
        lines += _lines(plan, profile, sweep, others, told_of_network)
        print("\n".join(wrapped(lines, width_of_stdout())))
    return 0


def _run_file(path: str) -> RunConfig:
    """A name that is no file may be meant for `--model`."""
    if not path.endswith((".yaml", ".yml")) and not os.path.exists(path):  # noqa: PTH110 -- does not raise
        raise ConfigError(f"{path}: no such file; give a run file, or for a model of that name: --model {path}")
    try:
        return load_run(path)
    except ConfigError as error:
        hint = f"; a model's config.json is asked about with --model {path}" if path.endswith(".json") else ""
        raise ConfigError(f"{error}{hint}") from None


def _kind(args: argparse.Namespace) -> OptimizerKind:
    return "adamw" if args.optimizer in (None, *_STATE_PLACES) else args.optimizer


def _run_alternatives(settings: RunConfig, args: argparse.Namespace) -> int:
    """Prints what the step needs plain, checkpointed, and under lowtide; then raises `BudgetError` if no plan fits."""
    for option in ("profile",) if args.largest is None else ("profile", "out", "report"):
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option}: is not for this table; leave it out, or plan the step of a run file")
    if settings.is_sharded:
        raise ConfigError("--largest: is for a step on one device; leave 'parallel.shard' out")
    assert settings.memory is not None
    plan, error = None, None
    with Waiting() as waiting, _stdout_kept_clean():
        waiting.say("loading torch")
        from lowtide.cli.run_step import weights_of_run

        hardware = _hardware(settings, args)
        memory, budget_bytes, _ = settings.memory.settled(lambda: _memory(settings, args))
        profile_of = _tracing(hardware, waiting.say if args.largest is None else lambda text: None)
        planned = _plans_within(memory, hardware, waiting, profile_of)
        tries: list[alternatives.Alternative] = []
        if args.largest is not None:
            makes = {"lowtide": planned}
            has_own = memory.weights != "keep"  # which update in backward too
            if memory.rows is not None and settings.train.grad_accumulation == 1 and not has_own:
                early = dataclasses.replace(memory, optimizer="in_backward")
                makes["lowtide, updates in backward"] = _plans_within(early, hardware, waiting, profile_of)
            step, rows, tries = alternatives.largest(
                settings, hardware, budget_bytes, args.largest, makes, say=waiting.say
            )
        else:
            step = alternatives.TracedStep(run=settings, hardware=hardware, budget_bytes=budget_bytes, say=waiting.say)
            rows = [step.by_hand(name) for name in BY_HAND]
            try:
                plan = planned(settings, None)
                rows.append(step.of_plan(plan))
            except BudgetError as refused:
                error = refused
                rows.append(step.refused(error))
        waiting.say("counting the weights")
        weights = weights_of_run(step.run)
        if args.report is not None and plan is not None:
            waiting.say("drawing")
            report = report_of_plan(plan, profile_of(settings), memory, link=hardware.link)
            write_report(report, args.report)
    if args.out is not None and plan is not None:
        write_file(args.out, plan.to_json(), where="--out")
    if args.json:
        print(json.dumps(alternatives.document(step, rows, plan, tries)))
    else:
        print("\n".join(alternatives.lines(step, rows, weights, args.largest, width_of_stdout(), tries=tries)))
        if plan is not None and plan.weights is not None:
            print("\n".join(wrapped(["", *plan.weights.lines()], width_of_stdout())))
    if error is not None:
        raise error
    return 0


def _tracing(hardware: Hardware, say: Callable[[str], None]) -> Callable[[RunConfig], Profile]:
    """What traces the step of a run, once for each size: all else of the runs is the same."""
    from lowtide.cli.run_step import trace_run

    traced: dict[tuple[int, int], Profile] = {}

    def profile_of(run: RunConfig) -> Profile:
        size = (run.train.batch_size, run.data.sequence_length)
        if size not in traced:
            like = next(iter(traced.values()), None)
            traced[size] = trace_run(run, hardware, say=say, like=like)
        return traced[size]

    return profile_of


def _plans_within(
    memory: MemoryConfig, hardware: Hardware, waiting: Waiting, profile_of: Callable[[RunConfig], Profile]
) -> alternatives.Maker:
    """What makes the plan of a run within the budget of `memory`, or within another number of bytes; then a refusal is
    without ways out."""

    def make(run: RunConfig, budget_bytes: int | None) -> Plan:
        from lowtide.cli.run_step import changes_of

        profile, config, micro_batches = profile_of(run), memory, run.train.grad_accumulation
        movable = profile.state.optimizer_movable
        has_room = config.host_budget is None or config.host_budget >= movable
        if config.optimizer == "in_backward" and not (movable and has_room):
            config = dataclasses.replace(config, optimizer="keep")
        how: Any = {"link": hardware.link, "has_gradients": micro_batches > 1, "num_micro_batches": micro_batches}
        if budget_bytes is not None:
            return plan_profile(profile, config, budget_bytes=budget_bytes, with_suggestions=False, **how)
        waiting.say("planning")
        return plan_profile(profile, config, changes=tuple(changes_of(run, hardware, profile)), **how)

    return make


def _refuse_other_model(settings: RunConfig, profile: Profile) -> None:
    """A saved profile says how many bytes of weights its model has."""
    from lowtide.cli.run_step import weights_of_run

    run_bytes = sum(weight.nbytes for weight in weights_of_run(settings).values())
    if profile.state.parameters != run_bytes:
        raise ConfigError(
            f"--profile: it is of a model with {profile.state.parameters:,} bytes of weights, the run's has "
            f"{run_bytes:,}; profile the run again"
        )


def _say_where_it_is_too_much(budget_bytes: int, hardware: str) -> None:
    """A budget above what the device has is a question that one may ask, and mostly a slip."""
    found = load_hardware(hardware)
    if budget_bytes > found.memory_bytes:
        print(
            f"lowtide: the budget {format_bytes(budget_bytes)} is more than {found.name} has "
            f"({format_bytes(found.memory_bytes)}); --budget auto takes what it has",
            file=sys.stderr,
        )


def _run_cluster(settings: RunConfig, args: argparse.Namespace) -> int:
    with _stdout_kept_clean():
        found = plan_cluster.plan(settings, args)
    if args.json:
        print(json.dumps(cluster_report.document(found)))
    else:
        print("\n".join(cluster_report.lines(found, width_of_stdout())))
    return 0


def memory_with(settings: RunConfig, path: str | os.PathLike[str], args: argparse.Namespace) -> MemoryConfig:
    """The `memory` section, with the command line written over its own. Refuses to go without a budget."""
    memory = settings.memory or MemoryConfig()
    changes: dict[str, Any] = {
        key: _amount(f"--{key.replace('_', '-')}", text, parse)
        for key, text, parse in (("budget", args.budget, parse_budget), ("host_budget", args.host_budget, parse_bytes))
        if text is not None
    }
    if args.optimizer in _STATE_PLACES:
        changes["optimizer"] = args.optimizer
    if args.weights is not None:
        changes["weights"] = args.weights
    if args.optimizer not in (None, *_STATE_PLACES) and args.model is None:
        raise ConfigError(f"--optimizer: {args.optimizer} goes with --model; in a run file write it as train.optimizer")
    if changes.get("budget") == 0:
        raise ConfigError(NO_BYTES)
    memory = dataclasses.replace(memory, **changes)
    if not memory.has_budget:
        raise ConfigError(
            f"{os.fspath(path)}: there is no budget to plan for; write --budget 20GiB, or 'budget: 20GiB' in the "
            "section 'memory'"
        )
    check_unit("--budget" if args.budget is not None else memory.locations.of("budget"), memory.budget)
    return memory


def check_writable(path: Path | None, option: str = "--out") -> None:
    """Refuses a file that the command line names and that cannot be written, before the work for it is done."""
    if path is None:
        return
    try:
        is_there = path.exists()
        if is_there and not path.is_file() and not path.is_dir():
            return  # a pipe or a device: to open one now would be to end it
        path.open("a").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}; choose another file") from None


def _amount(option: str, text: str, parse: Callable[[str], Budget]) -> Budget:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _profile_and_link(settings: RunConfig, args: argparse.Namespace, waiting: Waiting) -> tuple[Profile, Link]:
    if args.profile is None:
        waiting.say("loading torch")
        from lowtide.cli.run_step import trace_run

        device = _hardware(settings, args)
        return trace_run(settings, device, say=waiting.say), device.link
    profile = read_profile(args.profile)
    shape = [settings.train.batch_size, settings.data.sequence_length]
    batch = f"input_ids=int64{shape}, labels=int64{shape}"
    if profile.batch != batch:
        raise ConfigError(f"--profile: it is of {profile.batch}, the run has {batch}; profile the run again")
    if args.hardware is not None or profile.is_fake:
        return profile, load_hardware(args.hardware or profile.device).link
    waiting.say("measuring the link")
    from lowtide.cli.run_step import link_of_device

    return profile, link_of_device(settings, profile.device)


def read_plan(path: Path) -> Plan:
    """What `lowtide plan --out` saved. Raises `ConfigError`, with the path, for a file that is no plan."""
    return _read(Plan.from_json, path)


def read_profile(path: Path) -> Profile:
    """What `lowtide profile` saved."""
    return _read(Profile.from_json, path, where="--profile: ")


def _read(parse: Callable[[str], Any], path: Path, *, where: str = "") -> Any:
    text = read_text(path, most_bytes=_MOST_BYTES, where=where)
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{where}{path}: {error}") from None


def _hardware(settings: RunConfig, args: argparse.Namespace) -> Hardware:
    """The device that is named, or what is known of this machine's."""
    from lowtide.cli.run_step import hardware_of_run

    return load_hardware(args.hardware) if args.hardware is not None else hardware_of_run(settings)


def _memory(settings: RunConfig, args: argparse.Namespace, profile: Profile | None = None) -> DeviceMemory:
    """That a share or `auto` is about: of the device that is named, here or in a `profile`, or of this machine's."""
    name = args.hardware
    if name is None and args.profile is not None and profile is not None and profile.is_fake:
        name = profile.device
    if name is not None:
        return memory_of_hardware(load_hardware(name))
    from lowtide.cli.run_step import device_of_run
    from lowtide.engines.choose import device_memory

    return device_memory(device_of_run(settings), own_bytes=0)


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Solvers written in C++ print to file descriptor 1 now and then; that goes to stderr."""
    sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # closed: nothing can be printed to it anyway
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


# -- what is printed -----------------------------------------------------------------------------------------------


def _lines(
    plan: Plan, profile: Profile, sweep: Sweep, others: Mapping[str, Setting], network: Sequence[str]
) -> list[str]:
    width = width_of_stdout()
    lines = [f"{profile.model}, one step of {profile.batch}", *plan_table(plan, width).splitlines(), *network]
    if profile.hidden:
        hidden_bytes = sum(entry.nbytes for entry in profile.hidden)
        lines += [
            "",
            f"{format_bytes(hidden_bytes)} more stay from forward to backward in custom functions, out of reach:",
        ]
        lines += [f"  {entry.name}: {format_bytes(entry.nbytes)}" for entry in profile.hidden]
    return [*lines, "", "what other budgets would give", *sweep_lines(sweep, plan.budget_bytes, width, others=others)]


def _document(plan: Plan, profile: Profile, sweep: Sweep, played: Played) -> dict[str, Any]:
    return {
        "model": profile.model,
        "batch": profile.batch,
        "device": profile.device,
        "is_fake": profile.is_fake,
        "plan": json.loads(plan.to_json()),
        "budgets": sweep_document(sweep, plan.budget_bytes),
        "hidden": [dataclasses.asdict(entry) for entry in profile.hidden],
        "curve": played.thinned(_MAX_CURVE_POINTS),
    }
