"""A plan of one device in the words of another framework: for people who cannot install a runtime.

What: `export` finds the nearest setting that a framework has, and writes it as that framework reads it, after what it
cannot say, in words and bytes. A `Setting` is what a framework can be told: layers that run again, activations that are
elsewhere or recomputed meanwhile. `settings_for` lists those of a framework; `play_setting` plays each on the timeline
of the plan's own profile. The nearest is the fastest of those that fit the plan's budget; where none fits, the one with
the smallest peak, and the text says so.
Why a profile: a plan says what it does, and only the step that it was made for says what something else would do.
Cost: one run of the timeline for each setting, about two for each layer. Not covered: what a framework does around the
layers; its own kernels, which save other tensors; plans for a cluster (cluster/export.py).
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.core.text_table import plural
from lowtide.errors import ConfigError
from lowtide.mindformers.schema.aliases import ROLES
from lowtide.planner.problem import make_problem
from lowtide.planner.rerun_layers import can_rerun, with_reruns
from lowtide.timeline.events import run
from lowtide.timeline.memory import Lifetimes, StepArrays, floor_curve, plain_curve
from lowtide.timeline.step import Link
from lowtide.units import format_bytes, format_seconds

PREFETCH = 1
"""Operators ahead of its reader at which a swapped activation is asked for, where a file has to say a number. The
timeline knows better, a file for another system's operators does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a framework can be told, in the plan's names; and once it was played, what a step takes under it."""

    lines: tuple[str, ...]
    """As the framework reads it."""
    layers: tuple[str, ...] = ()
    """They run again as a whole."""
    swapped: tuple[str, ...] = ()
    """These activations are elsewhere between forward and backward."""
    made: tuple[str, ...] = ()
    """Activations that are dropped and recomputed one by one."""
    copies_block: bool = False
    """Compute waits for each copy."""
    moved_bytes: int = 0
    """Of the optimizer's state: elsewhere until it steps."""
    peak_bytes: int = 0
    step_seconds: float = 0.0
    """Forward and backward of one micro-batch."""
    copied_bytes: int = 0
    """Copied away, and back again."""


def export(plan: Plan, system: str, profile: Profile, *, link: Link) -> str:
    """The text for `system`, one of `SYSTEMS`. Raises ConfigError for a plan that no solver made, and for a profile
    that is not the one that the plan was made for."""
    assert system in SYSTEMS
    if not plan.is_solved or plan.predicted is None:
        raise ConfigError("export: this plan was made from rules, not for a budget; translate its rules by hand")
    how: Any = {"has_gradients": _has_gradients(plan, profile), "link": link}
    how["budget_bytes"] = plan.budget_bytes or plan.predicted.peak_bytes
    played = [play_setting(setting, profile, **how) for setting in settings_for(system, plan, profile)]
    nearest = _nearest(played, how["budget_bytes"])
    words = [f"# {line}" if line else "#" for line in _comment_lines(plan, system, profile, nearest)]
    return "\n".join([*words, *nearest.lines, ""])


def _nearest(played: Sequence[Setting], budget_bytes: int) -> Setting:
    """The fastest that fits; of equally fast ones that which moves least. Where none fits, the smallest."""
    fitting = [one for one in played if one.peak_bytes <= budget_bytes]
    if not fitting:
        return min(played, key=lambda one: (one.peak_bytes, one.step_seconds))
    return min(fitting, key=lambda one: (one.step_seconds, one.copied_bytes, one.peak_bytes))


def play_setting(
    setting: Setting, profile: Profile, *, link: Link, budget_bytes: int | None = None, has_gradients: bool = False
) -> Setting:
    """One step under a setting, on the timeline that plans are made on. Copies that block are there in full; others
    are fetched as early as `budget_bytes` allows."""
    swapped, made = set(setting.swapped), set(setting.made)
    step_profile = with_reruns(profile, setting.layers)

    def fate(name: str) -> Fate:
        return Fate.SWAP if name in swapped else Fate.RECOMPUTE if name in made else Fate.KEEP

    allowed = {node.name: ((fate(node.name),), "the setting") for node in step_profile.nodes}
    step = make_problem(step_profile, allowed=allowed, min_bytes=0, has_gradients=has_gradients).step
    fates = [item.fates[0] for item in step.items]
    copied_bytes = sum(item.nbytes for item, its in zip(step.items, fates, strict=True) if its is Fate.SWAP)
    if setting.copies_block:
        arrays = StepArrays.of(step)
        peak_bytes = int(floor_curve(arrays, Lifetimes.of(arrays, fates)).max())
        copy_seconds = copied_bytes / link.out_bytes_per_second + copied_bytes / link.in_bytes_per_second
        seconds = step.compute_seconds + copy_seconds
    else:
        timeline = run(step, fates, link, budget_bytes=budget_bytes)
        peak_bytes, seconds = timeline.peak_bytes, timeline.step_seconds
    peak_bytes -= setting.moved_bytes
    return dataclasses.replace(setting, peak_bytes=peak_bytes, step_seconds=seconds, copied_bytes=copied_bytes)


def _has_gradients(plan: Plan, profile: Profile) -> bool:
    """Whether the plan was made for a micro-batch after the first. Refuses another step's profile."""
    assert plan.predicted is not None
    kept = {node.name: ((Fate.KEEP,), "") for node in profile.nodes}
    peaks = {}
    for has_gradients in (False, True):
        step = make_problem(profile, allowed=kept, min_bytes=0, has_gradients=has_gradients).step
        peaks[int(plain_curve(step).max())] = has_gradients
    if plan.predicted.plain_peak_bytes not in peaks or plan.layers != profile.layers:
        raise ConfigError(
            "--profile: it is not of the step that the plan was made for: everything kept, that needs "
            f"{format_bytes(plan.predicted.plain_peak_bytes)}, the step of the profile {format_bytes(min(peaks))}; "
            "make both from one run file: lowtide profile RUN.yaml --out P, lowtide plan RUN.yaml --profile P --out "
            "PLAN"
        )
    return peaks[plan.predicted.plain_peak_bytes]


# -- what frameworks can be told -----------------------------------------------------------------------------------


Settings = Iterator[Setting]
_FRAMEWORKS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "frameworks.toml").read_text(encoding="utf-8"))
SYSTEMS = tuple(_FRAMEWORKS)


def settings_for(system: str, plan: Plan, profile: Profile) -> Settings:
    """All that are worth a look, the one that does nothing first."""
    for form in _FRAMEWORKS[system]["settings"]:
        for number in range(1, len(plan.layers) + 1) if form.get("layers") in ("first", "every", "each") else (0,):
            yield from _of_form(form, number, plan, profile, _FRAMEWORKS[system].get("with_state", ()))
    if system == "mindformers" and (own := _as_mindformers(plan, profile)) is not None:
        yield own


def _of_form(form: Mapping[str, Any], number: int, plan: Plan, profile: Profile, with_state: Sequence[str]) -> Settings:
    """The setting that a table of frameworks.toml describes; none where there is nothing that it acts on. `with_state`:
    lines that move all of the optimizer's state, where the plan moves some."""
    chosen = {"first": plan.layers[:number], "every": plan.layers[:: number or 1], "all": plan.layers}
    chosen["each"] = plan.layers[number - 1 :: number or 1]
    named = chosen.get(form.get("layers", ""), ())
    moves = bool(with_state) and plan.optimizer is not None and bool(plan.optimizer.moved_bytes)
    layers, offloaded = ((), named) if form.get("is_offloaded") else (named, ())
    rest = [layer for layer in plan.layers if layer not in layers]
    made = _saved(profile, rest, form.get("recompute", ()), has_recipe=True)
    swapped = _inputs(profile, layers) if form.get("has_inputs_offloaded") else _saved(profile, offloaded, [""])
    swapped += _saved(profile, rest, form.get("offload", ()))
    if ("recompute" in form and not made) or ("offload" in form and not swapped):
        return
    counts = {"number": number, "rest": len(rest), "all": len(plan.layers)}
    lines = [] if moves and not (layers or made or swapped) else [line.format(**counts) for line in form["lines"]]
    yield Setting(
        lines=(*lines, *(with_state if moves else ())),
        layers=layers,
        swapped=swapped,
        made=made,
        copies_block=form.get("copies_block", False),
        moved_bytes=profile.state.optimizer_movable if moves else 0,
    )


def _saved(
    profile: Profile, layers: Sequence[str], parts: Sequence[str], *, has_recipe: bool = False
) -> tuple[str, ...]:
    """Activations of these layers whose names go on with one of `parts`. `has_recipe`: only those that have one."""
    starts = tuple(f"{layer}.{part}" for layer in layers for part in parts)
    saved = (node for node in profile.nodes if node.retained_input is None)
    return tuple(node.name for node in saved if node.name.startswith(starts) and (node.recipe or not has_recipe))


def _inputs(profile: Profile, layers: Sequence[str]) -> tuple[str, ...]:
    """What each of these layers alone is given: the hidden states. What all share (a mask, angles) comes by keyword,
    where no saved-tensor hook sees it."""
    given = [name for call in profile.calls for name in call.inputs]
    own = (name for call in profile.calls if call.name in layers for name in call.inputs if given.count(name) == 1)
    return tuple(dict.fromkeys(own))


def _as_mindformers(plan: Plan, profile: Profile) -> Setting | None:
    """The plan itself in MindSpore Transformers' words, as far as its activations have names there. None where it swaps
    nothing that has a name: then a number counts layers."""
    able = set(can_rerun(profile))
    layers = tuple(name for name in plan.rules.rerun(plan.layers) if name in able)
    stays = {name for call in profile.calls if call.name in layers for name in call.inputs}
    made, swapped = (_named(plan, fate, layers) for fate in (Fate.RECOMPUTE, Fate.SWAP))
    recipes = {node.name: node.recipe for node in profile.nodes if node.recipe is not None}
    made = {name: where for name, where in made.items() if name in recipes}
    # What is recomputed there keeps what it reads on the device.
    stays.update(read for name in made for read in recipes[name].nodes)
    swapped = {name: where for name, where in swapped.items() if name not in stays}
    if not swapped:
        return None
    lines = ["model:", "  model_config:", f"    num_layers: {len(plan.layers)}", "recompute_config:"]
    numbers = [plan.layers.index(name) for name in layers]
    lines += [f"  recompute: {numbers or 'false'}"]
    lines += ["  select_recompute:", *_by_pattern(made, "    '{}': {}")] if made else []
    lines += ["swap_config:", "  swap: true", "  op_swap:"]
    lines += _by_pattern(swapped, f"    - {{{{op_name: '{{}}', backward_prefetch: {PREFETCH}, layers: {{}}}}}}")
    return Setting(lines=tuple(lines), layers=layers, made=tuple(made), swapped=tuple(swapped))


def _above(name: str) -> Iterator[str]:
    """`mlp` for `mlp.mul`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _named(plan: Plan, fate: Fate, layers: Sequence[str]) -> dict[str, tuple[str, int]]:
    """By name: pattern and layer of the activations with this fate outside of layers that run again."""
    found = {}
    for site in plan.sites:
        if site.fate is fate and site.layer is not None and site.layer not in layers and site.retained_input is None:
            pattern = _pattern_of(site.name.removeprefix(f"{site.layer}."))
            if pattern is not None:
                found[site.name] = (pattern, plan.layers.index(site.layer))
    return found


_WHOLE = frozenset(outer for role in ROLES for name in role.hf for outer in _above(name))
"""Modules that have named parts: to name one is to name all of them."""


def _pattern_of(name: str) -> str | None:
    """What MindSpore Transformers calls an activation of a layer; None where it has no name for it alone."""
    for candidate in (name, name.rpartition(".")[0]):
        for role in ROLES:
            if role.hf == (candidate,) and role.legacy and candidate not in _WHOLE:
                return role.legacy[0].replace(".", "\\.")
    return None


def _by_pattern(named: Mapping[str, tuple[str, int]], form: str) -> list[str]:
    by_pattern: dict[str, list[int]] = {}
    for pattern, layer in named.values():
        by_pattern.setdefault(pattern, []).append(layer)
    return [form.format(pattern, sorted(set(layers))) for pattern, layers in by_pattern.items()]


# -- what is lost --------------------------------------------------------------------------------------------------


def _comment_lines(plan: Plan, system: str, profile: Profile, nearest: Setting) -> Iterator[str]:
    """The lines above the setting."""
    predicted, budget_bytes = plan.predicted, plan.budget_bytes
    assert predicted is not None
    yield f"lowtide plan {plan.digest()} of {profile.model}, for {system}."
    for what, its in (("The plan:    ", predicted), ("This setting:", nearest)):
        seconds = format_seconds(its.step_seconds)
        yield f"{what} peak {format_bytes(its.peak_bytes)}, forward and backward {seconds}."
    yield f"Both are predictions of one timeline: {predicted.certainty}."
    if budget_bytes is not None and nearest.peak_bytes > budget_bytes:
        over_bytes = nearest.peak_bytes - budget_bytes
        yield f"It does not fit: {format_bytes(over_bytes)} more than the budget of {format_bytes(budget_bytes)}."
        yield f"No setting of {system} that lowtide knows needs less."
    lost = [*_lost(plan, profile, nearest)]
    yield "What it does otherwise than the plan:" if lost else "It does what the plan does."
    yield from (f"- {line}" for line in lost)
    yield from (line.format(prefetch=PREFETCH) for line in _FRAMEWORKS[system]["remarks"])


_DONE = {Fate.KEEP: "kept", Fate.SWAP: "swapped", Fate.RECOMPUTE: "recomputed"}


def _lost(plan: Plan, profile: Profile, setting: Setting) -> Iterator[str]:
    """Activations whose fate is another, the most bytes first; then what is no activation."""
    step = with_reruns(profile, setting.layers)
    there = {node.name for node in step.nodes}
    groups: dict[tuple[str, str], list[SiteDecision]] = {}
    for site in plan.sites:
        if site.retained_input is not None:
            continue
        planned = _DONE[site.fate]
        got = "swapped" if site.name in setting.swapped else "recomputed"
        if site.name in there and site.name not in setting.swapped and site.name not in setting.made:
            got = "kept"
        if got != planned:
            groups.setdefault((planned, got), []).append(site)
    for (planned, got), sites in sorted(groups.items(), key=lambda pair: -sum(site.nbytes for site in pair[1])):
        nbytes = format_bytes(sum(site.nbytes for site in sites))
        yield f"{nbytes} in {len(sites)} {plural('activation', len(sites))}: {planned} in the plan, {got} here"
    smaller = [site for site in plan.sites if site.codec is not None]
    if smaller:
        saved = format_bytes(sum(site.nbytes - site.stored_bytes for site in smaller))
        count = f"{len(smaller)} {plural('activation', len(smaller))}"
        yield f"{saved} that the plan saves by storing {count} smaller: here they are whole"
    if plan.optimizer is not None and plan.optimizer.moved_bytes and not setting.moved_bytes:
        moved = format_bytes(plan.optimizer.moved_bytes)
        yield f"{moved} of the optimizer's state: elsewhere in the plan, on the device here"
    if plan.loss != "plain":
        yield "the loss: in slices of rows in the plan, in one piece here, with its buffers"
