"""A plan as plain text: one row per run of equal layers, bytes by fate, and why.

Layers are equal when their sites are the same in name (after the layer's own), bytes, dtype and fate; the reasons of a
run are joined. What lies outside the layers has a row of its own.

A solved plan says first what it promises, and where the bytes are. Its rows have a cost, name the sites that leave, and
count separately the retained inputs that are held only because a recipe starts from them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lowtide.core.decisions import AccountLine, OptimizerPlacement, Prediction, SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.rules import Rules
from lowtide.core.text_table import align, wrapped
from lowtide.units import format_bytes, format_seconds


class TabledPlan(Protocol):
    """What a table shows of a plan. A `Plan` has all of it; the table so stands below the plan that prints itself."""

    @property
    def layers(self) -> tuple[str, ...]: ...
    @property
    def rules(self) -> Rules: ...
    @property
    def sites(self) -> tuple[SiteDecision, ...]: ...
    @property
    def min_bytes(self) -> int: ...
    @property
    def host_budget_bytes(self) -> int | None: ...
    @property
    def disk_budget_bytes(self) -> int | None: ...
    @property
    def disk_path(self) -> str | None: ...
    @property
    def check(self) -> str: ...
    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def predicted(self) -> Prediction | None: ...
    @property
    def account(self) -> tuple[AccountLine, ...]: ...
    @property
    def loss(self) -> str: ...
    @property
    def loss_rows(self) -> int | None: ...
    @property
    def mlp_rows(self) -> int | None: ...
    @property
    def optimizer(self) -> OptimizerPlacement | None: ...
    @property
    def audited_peak_bytes(self) -> int | None: ...
    @property
    def is_solved(self) -> bool: ...
    @property
    def does_nothing(self) -> bool: ...
    def digest(self) -> str: ...


_NOTICED = 0.0005
"""Share of the step below which a number is not worth a word."""


_FATES = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
_OUTSIDE = "outside layers"
_FITS = "fits"
_LOSS = "loss: sliced (its rows in slices, the same bits)"
_DECLARED = "as declared (one block has the bits of the whole)"
_TOO_SMALL = "smaller than min_bytes"
_VERBS = {Fate.RECOMPUTE: "recomputed", Fate.SWAP: "away and back"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _SiteRow:
    label: str
    fate: str
    bytes_by_fate: tuple[int, ...]
    """Bytes of all layers of the run, in the order of `_FATES`."""
    retained_input_bytes: int = 0
    """Part of the above that autograd would not have saved."""
    cost_seconds: float = 0.0
    why: str


def plan_table(plan: TabledPlan, width: int | None = None) -> str:
    """The text of `print(plan)`, without a trailing newline. `width`: the most characters of a line; None: any."""
    lines = _solved_lines(plan, width) if plan.is_solved else _written_lines(plan, width)
    return "\n".join(wrapped(lines, width))


def _written_lines(plan: TabledPlan, width: int | None) -> list[str]:
    lines = [_headline(plan)]
    if plan.does_nothing:
        lines.append("This plan does nothing: every activation is kept.")
    lines += _lines_about_rows(plan)
    if plan.optimizer is not None:
        lines += placement_lines(plan.optimizer)
    if plan.rules.rules:
        lines.append("")
        lines += _rule_lines(plan, width)
    if not plan.sites:
        return [*lines, "", *_unobserved_lines(plan, width)]
    return [*lines, "", *_table(_site_rows(plan, _row), width)]


def _lines_about_rows(plan: TabledPlan) -> Iterator[str]:
    if plan.loss_rows is not None:
        yield f"loss: head and loss in blocks of {plan.loss_rows} rows, {_DECLARED}"
    elif plan.loss != "plain":
        yield _LOSS
    if plan.mlp_rows is not None:
        yield f"mlp: in blocks of {plan.mlp_rows} rows, {_DECLARED}"


def _solved_lines(plan: TabledPlan, width: int | None) -> list[str]:
    if plan.predicted is None:
        lines = [_headline(plan)]
    else:
        promise, *others = promise_lines(plan)
        lines = [f"plan {plan.digest()}: {promise}", *others, ", ".join(_contents(plan))]
    if plan.does_nothing:
        lines.append("This plan does nothing: everything fits.")
    lines += _lines_about_rows(plan)
    if plan.optimizer is not None:
        lines += placement_lines(plan.optimizer)
    if any(site.recipe is not None for site in plan.sites):
        lines.append(_check_line(plan))
    if any(site.codec is not None for site in plan.sites):
        lines.append(_codec_line(plan))
    if plan.rules.rules:
        lines += ["", *_rule_lines(plan, width)]
    if plan.account:
        lines += ["", *account_lines(plan.account, width)]
    if plan.sites:
        lines += ["", *_solved_table(_site_rows(plan, _solved_row), width)]
    return lines


def _check_line(plan: TabledPlan) -> str:
    if plan.check == "sampled":
        return "check: sampled (recipes are proven in the first forward pass and in every 64th)"
    seconds = plan.predicted.check_seconds if plan.predicted is not None else 0.0
    price = f", {format_seconds(seconds)} a step" if seconds else ""
    depth = ", every byte" if plan.check == "deep" else ""
    return f"check: {plan.check} (recipes are proven in every forward pass{depth}{price})"


def _codec_line(plan: TabledPlan) -> str:
    smaller = [site for site in plan.sites if site.codec is not None]
    before, after = sum(site.nbytes for site in smaller), sum(site.stored_bytes for site in smaller)
    seconds = format_seconds(sum(site.cost_seconds for site in smaller))
    return (
        f"codecs: {len(smaller)} {plural('site', len(smaller))} stored smaller, to the bit: {format_bytes(before)} in "
        f"{format_bytes(after)}, {seconds} a step"
    )


def _headline(plan: TabledPlan) -> str:
    return ", ".join([f"plan {plan.digest()}", *_contents(plan)])


def _contents(plan: TabledPlan) -> list[str]:
    num_layers = len(plan.layers)
    num_retained_inputs = sum(site.retained_input is not None for site in plan.sites)
    num_sites = len(plan.sites) - num_retained_inputs
    observed = f"{num_sites} {plural('site', num_sites)}" if plan.sites else "no step observed yet"
    parts = [f"{num_layers} {plural('layer', num_layers)}", observed]
    if num_retained_inputs:
        parts.append(f"{num_retained_inputs} {plural('retained input', num_retained_inputs)}")
    parts.append(f"storages below {format_bytes(plan.min_bytes)} are kept")
    if plan.host_budget_bytes is not None:
        parts.append(f"host budget {format_bytes(plan.host_budget_bytes)}")
    if plan.disk_budget_bytes is not None:
        parts.append(f"disk budget {format_bytes(plan.disk_budget_bytes)}")
    if plan.disk_path is not None:
        parts.append(f"disk path {plan.disk_path}")
    return parts


def _rule_lines(plan: TabledPlan, width: int | None) -> list[str]:
    cells = [("rule", "fate", "prefetch", "tier", "written at")]
    for rule in plan.rules.rules:
        is_swap = rule.fate is Fate.SWAP
        prefetch = ("auto" if rule.prefetch is None else str(rule.prefetch)) if is_swap else ""
        tier = (rule.tier.value if rule.tier else "fastest") if is_swap else ""
        cells.append((rule.pattern.text, rule.fate.value, prefetch, tier, rule.where))
    return align(cells, numeric=(), width=width)


def _unobserved_lines(plan: TabledPlan, width: int | None) -> list[str]:
    """Which layers a rule covers whole; what rules say of ops inside layers is known after a step."""
    if not plan.layers:
        return ["no layers"]
    keys: list[tuple[str, str]] = []
    for layer in plan.layers:
        decision = plan.rules.decide(layer, is_site=False)
        keys.append((decision.fate.value, decision.reason if decision.rule else "no rule names the whole layer"))
    cells = [("layers", "fate", "why")]
    for first, last in runs(plan.layers, keys):
        cells.append((layers_label(plan.layers, first, last), *keys[first]))
    return align(cells, numeric=(), width=width)


def _site_rows(plan: TabledPlan, make_row: Callable[[str, int, Sequence[SiteDecision]], _SiteRow]) -> list[_SiteRow]:
    by_layer: dict[str | None, list[SiteDecision]] = {layer: [] for layer in plan.layers}
    for site in plan.sites:
        by_layer.setdefault(site.layer if site.layer in by_layer else None, []).append(site)
    keys = [_signature(layer, by_layer[layer]) for layer in plan.layers]
    rows = []
    for first, last in runs(plan.layers, keys):
        sites = [site for layer in plan.layers[first : last + 1] for site in by_layer[layer]]
        rows.append(make_row(layers_label(plan.layers, first, last), last - first + 1, sites))
    if by_layer.get(None):
        rows.append(make_row(_OUTSIDE, 1, by_layer[None]))
    return rows


def _signature(layer: str, sites: Iterable[SiteDecision]) -> Hashable:
    return tuple((site.name.removeprefix(layer), site.stored_bytes, site.dtype, site.fate, site.tier) for site in sites)


def _row(label: str, num_layers: int, sites: Sequence[SiteDecision]) -> _SiteRow:
    totals = tuple(sum(site.nbytes for site in sites if site.fate is fate) for fate in _FATES)
    counts = [(sum(site.fate is fate for site in sites) // num_layers, fate) for fate in _FATES]
    mix = " + ".join(f"{count} {fate.value}" for count, fate in counts if count)
    moved = [site for site in sites if site.fate is not Fate.KEEP]
    reasons = list(dict.fromkeys(site.reason for site in moved or sites))
    return _SiteRow(label=label, fate=mix or "no sites", bytes_by_fate=totals, why="; ".join(reasons))


def _solved_row(label: str, num_layers: int, sites: Sequence[SiteDecision]) -> _SiteRow:
    saved = [site for site in sites if site.retained_input is None]
    retained_inputs = [site for site in sites if site.retained_input is not None]
    counts = [(sum(site.fate is fate for site in saved) // num_layers, fate) for fate in _FATES]
    mix = " + ".join(f"{count} {fate.value}" for count, fate in counts if count)
    return _SiteRow(
        label=label,
        fate=mix or "no sites",
        bytes_by_fate=tuple(sum(site.stored_bytes for site in saved if site.fate is fate) for fate in _FATES),
        retained_input_bytes=sum(site.nbytes for site in retained_inputs if site.fate is not Fate.RECOMPUTE),
        cost_seconds=sum(site.cost_seconds for site in sites),
        why="; ".join(_solved_reasons(saved)),
    )


def _solved_reasons(sites: Sequence[SiteDecision]) -> list[str]:
    """What leaves, by name, the largest first; and what cannot, with the reason."""
    texts = []
    for fate, verb in _VERBS.items():
        if names := _names_by_bytes([site for site in sites if site.fate is fate]):
            texts.append(f"{verb}: {first_few(names, 2)}")
    smaller = [site for site in sites if site.codec is not None]
    for kind in dict.fromkeys(site.codec.kind for site in smaller if site.codec is not None):
        names = _names_by_bytes([site for site in smaller if site.codec is not None and site.codec.kind == kind])
        texts.append(f"stored as {kind}: {first_few(names, 2)}")
    kept = [site for site in sites if site.fate is Fate.KEEP and site.codec is None]
    for reason in dict.fromkeys(site.reason for site in kept):
        if reason not in (_FITS, _TOO_SMALL):
            names = _names_by_bytes([site for site in kept if site.reason == reason])
            texts.append(f"kept, {reason}: {first_few(names, 2)}")
    reasons = dict.fromkeys(site.reason for site in kept)
    return texts or ([_FITS] if _FITS in reasons else list(reasons))


def _names_by_bytes(sites: Sequence[SiteDecision]) -> list[str]:
    """Names after the layer's own."""
    sizes: dict[str, int] = {}
    for site in sites:
        name = site.name.removeprefix(f"{site.layer}.")
        sizes[name] = sizes.get(name, 0) + site.nbytes
    return sorted(sizes, key=lambda name: -sizes[name])


def _solved_table(rows: Sequence[_SiteRow], width: int | None) -> list[str]:
    cells: list[tuple[str, ...]] = [("", "sites each", "kept", "swapped", "recomputed", "retained", "cost", "why")]
    totals = [sum(row.bytes_by_fate[index] for row in rows) for index in range(len(_FATES))]
    retained_input_bytes, cost_seconds = (
        sum(row.retained_input_bytes for row in rows),
        sum(row.cost_seconds for row in rows),
    )
    total = _SiteRow(
        label="total", fate="", bytes_by_fate=tuple(totals), retained_input_bytes=retained_input_bytes,
        cost_seconds=cost_seconds, why="",
    )  # fmt: skip
    for row in (*rows, total):
        sizes = (*map(_size, row.bytes_by_fate), _size(row.retained_input_bytes))
        cost = format_seconds(row.cost_seconds) if row.cost_seconds else "-"
        cells.append((row.label, row.fate, *sizes, cost, row.why))
    if not retained_input_bytes:
        cells = [(*row[:5], *row[6:]) for row in cells]
        return align(cells, numeric=(2, 3, 4, 5), width=width)
    return align(cells, numeric=(2, 3, 4, 5, 6), width=width)


def _table(rows: Sequence[_SiteRow], width: int | None) -> list[str]:
    cells: list[tuple[str, ...]] = [("", "sites each", "kept", "swapped", "recomputed", "why")]
    cells += [(row.label, row.fate, *map(_size, row.bytes_by_fate), row.why) for row in rows]
    totals = [sum(row.bytes_by_fate[index] for row in rows) for index in range(len(_FATES))]
    cells.append(("total", "", *map(_size, totals), ""))
    return align(cells, numeric=(2, 3, 4), width=width)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def runs(layers: Sequence[str], keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Inclusive index ranges of neighbours with equal keys and names that count up: `h.3`, `h.4`."""
    runs: list[tuple[int, int]] = []
    for index, key in enumerate(keys):
        if runs and keys[runs[-1][0]] == key and _follows(layers[index - 1], layers[index]):
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _follows(before: str, after: str) -> bool:
    stem, _, number = after.rpartition(".")
    return number.isdecimal() and before == f"{stem}.{int(number) - 1}"


def layers_label(layers: Sequence[str], first: int, last: int) -> str:
    """`layers 2-5`, or with its stem where there are several kinds."""
    stem, _, number = layers[first].rpartition(".")
    if not number.isdecimal():
        return layers[first]
    is_only_stem = all(layer.rpartition(".")[0] == stem for layer in layers)
    numbers = number if first == last else f"{number}-{layers[last].rpartition('.')[2]}"
    if not is_only_stem:
        return f"{stem}.{numbers}"
    return f"layer {numbers}" if first == last else f"layers {numbers}"


def plural(word: str, count: int) -> str:
    """`sites`, unless there is one."""
    return word if count == 1 else f"{word}s"


def first_few(names: Sequence[str], count: int) -> str:
    """`a, b and 3 more`."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


def promise_lines(plan: TabledPlan) -> list[str]:
    """Peak and time of a solved plan, and how sure they are. The first line carries on after the plan's name."""
    predicted = plan.predicted
    assert predicted is not None
    audited = "" if plan.audited_peak_bytes is None else f", audited {format_bytes(plan.audited_peak_bytes)}"
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    plain = format_bytes(predicted.plain_peak_bytes)
    return [
        f"peak {format_bytes(predicted.peak_bytes)}{audited}{budget}; everything kept {plain}"
        f", floor {format_bytes(predicted.floor_bytes)}",
        _time_line(predicted),
        f"certainty: {predicted.certainty}",
        *why_unswapped(plan),
    ]


def _time_line(predicted: Prediction) -> str:
    seconds, plain = predicted.step_seconds, predicted.plain_seconds
    more = seconds / plain - 1 if plain else 0.0
    known = predicted.stall_seconds + predicted.recompute_seconds + predicted.codec_seconds
    known += predicted.check_seconds + predicted.page_fault_seconds
    slower = predicted.pass_seconds - plain - known
    coded = f", codecs {format_seconds(predicted.codec_seconds)}" if predicted.codec_seconds else ""
    moved = f", optimizer state {format_seconds(predicted.optimizer_seconds)}" if predicted.optimizer_seconds else ""
    touched = (
        f", freed memory taken again {format_seconds(predicted.page_fault_seconds)}"
        if predicted.page_fault_seconds
        else ""
    )
    slowed = f", copies slow it by {format_seconds(slower)}" if slower > _NOTICED * seconds else ""
    stalls, recompute = format_seconds(predicted.stall_seconds), format_seconds(predicted.recompute_seconds)
    return (
        f"step {format_seconds(seconds)}, {percent(more)} over {format_seconds(plain)} with everything kept: "
        f"stalls {stalls}, recompute {recompute}{coded}{moved}{touched}{slowed}; "
        f"at most {percent(predicted.gap)} from the fastest possible"
    )


def why_unswapped(plan: TabledPlan) -> list[str]:
    """One line where a price is why nothing is swapped."""
    seconds = plan.predicted.swap_excess_seconds if plan.predicted is not None else 0.0
    if not seconds:
        return []
    return [f"no activation is swapped: that would take {format_seconds(seconds)} more, to take freed memory again"]


def placement_lines(placement: OptimizerPlacement) -> list[str]:
    """Where the optimizer's state is between steps, when it travels, and what that costs."""
    if not placement.moves:
        return [f"optimizer state: stays on the device, {placement.reason}"]
    if placement.moved_bytes is None:
        return [f"optimizer state: on the {placement.tier.value} between steps, {placement.reason}"]
    stays = f", {format_bytes(placement.resident_bytes)} stays" if placement.resident_bytes else ""
    lines = [
        f"optimizer state: {format_bytes(placement.moved_bytes)} on the {placement.tier.value} between steps{stays}; "
        f"{placement.reason}"
    ]
    ways = []
    if placement.beside_bytes:
        ways.append(f"{format_bytes(placement.beside_bytes)} come back while backward runs, leave in the next forward")
    streamed_bytes = placement.moved_bytes - placement.beside_bytes
    if streamed_bytes:
        ways.append(f"{format_bytes(streamed_bytes)} come and go while the optimizer steps")
    bucket = "" if placement.bucket_bytes is None else f", in buckets of {format_bytes(placement.bucket_bytes)}"
    lines.append(f"  {'; '.join(ways)}{bucket}")
    free = "" if placement.free_from_tokens is None else f"; free from {placement.free_from_tokens:,} tokens a step"
    lines.append(
        f"  exposed {format_seconds(placement.exposed_seconds)} a step, slows compute by "
        f"{format_seconds(placement.slowed_seconds)}{free}"
    )
    return lines


def account_lines(account: Sequence[AccountLine], width: int | None = None) -> list[str]:
    """Bytes at the worst moment, before and after."""
    cells = [("at the worst moment", "everything kept", "planned")]
    for line in account:
        cells.append((line.what, format_bytes(line.plain_bytes), format_bytes(line.planned_bytes)))
    return align(cells, numeric=(1, 2), width=width)


def percent(share: float) -> str:
    """`4.2 %`."""
    return f"{round(100 * share, 1) + 0.0:.1f} %"  # + 0.0: no `-0.0 %`
