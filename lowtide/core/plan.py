"""The plan: which fate each activation has, and why. It is the contract between the part that decides and the part
that does, so it is plain data: frozen, comparable, printable, and the same after a trip through JSON.

A plan made from rules knows the layers of the model and the rules. The sites (names, bytes, dtypes) are known once a
step was observed; until then `sites` is empty and the table shows the rules.

A plan that the solver found has `sites` from the start, with recipes and distances, and says what it will cost
(`predicted`) and where the bytes are at the worst moment (`account`).

As plain text (`plan_table`, `print(plan)`) it has one row per run of equal layers, bytes by fate, and why. Layers are
equal when their sites are the same in name (after the layer's own), bytes, dtype and fate; the reasons of a run are
joined. What lies outside the layers has a row of its own. A solved plan says first what it promises, and where the
bytes are. Its rows have a cost, name the sites that leave, and count separately the retained inputs that are held only
because a recipe starts from them.

Not covered in this version: schedules of pipelines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import itertools
import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowtide.core.decisions import AccountLine, OptimizerPlacement, Prediction, SiteDecision, WeightsPlacement
from lowtide.core.fate import Fate
from lowtide.core.json_text import build, parse_json
from lowtide.core.rules import Rules
from lowtide.core.text_table import align, first_few, layers_label, percent, plural, runs, wrapped
from lowtide.errors import ConfigError
from lowtide.units import format_bytes, format_seconds

SCHEMA = 2
_LEFT_OUT = ("loss_rows", "layer_rows", "row_wise", "weights", "audited_peak_bytes")
"""Where there are none, the key is not in the file, and no activation has a key `codec`: as older versions wrote it."""
_NOTICED = 0.0005
"""Share of the step below which a number is not worth a word."""


_FATES = (Fate.KEEP, Fate.SWAP, Fate.RECOMPUTE)
OUTSIDE = "outside layers"
_FITS = "fits"
_DECLARED = "as declared (one block has the bits of the whole)"
_LOSS = "loss: sliced (its rows in slices, the same bits)"
_TOO_SMALL = "smaller than min_bytes"
_VERBS = {Fate.RECOMPUTE: "recomputed", Fate.SWAP: "away and back"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fates of a model's activations. Sizes are bytes per rank."""

    layers: tuple[str, ...]
    """Dotted names of the layers, in order of the forward pass."""
    min_bytes: int
    """Storages smaller than this are kept."""
    host_budget_bytes: int | None = None
    disk_budget_bytes: int | None = None
    disk_path: str | None = None
    rules: Rules = field(default_factory=Rules)
    is_solved: bool = False
    """True when `sites` decides (a solver made it); else the rules decide, and `sites` shows what came of them."""
    check: Literal["full", "deep"] = "full"
    """How recipes are proven in planned steps: 'full' (every forward pass) or 'deep' (every byte)."""
    loss: str = "plain"
    """'sliced': the loss of the model in slices of rows, which has the same bits."""
    loss_rows: int | None = None
    """Of a block of head and loss (`memory.loss: {rows: ...}`), on which the bits depend; None: the head is whole."""
    layer_rows: int | None = None
    """Of a block of a layer (`memory.rows`), likewise."""
    row_wise: tuple[str, ...] = ()
    """Patterns of the modules that are taken in such blocks in place of layers."""
    budget_bytes: int | None = None
    predicted: Prediction | None = None
    account: tuple[AccountLine, ...] = ()
    optimizer: OptimizerPlacement | None = None
    """Where the optimizer's state is between steps; None: it stays where it is."""
    weights: WeightsPlacement | None = None
    """Where the weights of layers are between their turns; None: they stay."""
    audited_peak_bytes: int | None = None
    """The peak of steps in which every live byte was counted (`tide.audit()`), to stand beside the predicted one."""
    sites: tuple[SiteDecision, ...] = ()
    """In order of production; empty until a step was observed."""

    def with_sites(self, sites: Iterable[SiteDecision]) -> Plan:
        """The same plan with what was observed."""
        return dataclasses.replace(self, sites=tuple(sites))

    @property
    def does_nothing(self) -> bool:
        """Whether every activation, all weights and all of the optimizer's state stay on the device, and the loss is
        plain."""
        if self.loss != "plain" or self._rows() or (self.optimizer is not None and self.optimizer.moves):
            return False
        if self.moves_weights:
            return False
        if self.sites:
            return all(site.fate is Fate.KEEP and site.codec is None for site in self.sites)
        return self.rules.does_nothing

    @property
    def moves_weights(self) -> bool:
        """Whether the weights of some layers are elsewhere until their turn."""
        return self.weights is not None and self.weights.moved_bytes > 0

    def digest(self) -> str:
        """12 hex digits over what all ranks must agree on: rules, `min_bytes` and layer names, and the fates of a
        solved plan, and when the optimizer's state travels; not byte counts, not budgets, and not where a rule was
        written."""
        agreed = {
            "schema": SCHEMA,
            "layers": self.layers,
            "min_bytes": self.min_bytes,
            "rules": [{key: value for key, value in rule.items() if key != "where"} for rule in self.rules.to_plain()],
            "sites": [_agreed(site) for site in self.sites] if self.is_solved else [],
            **({} if self.check == "full" else {"check": self.check}),
            **({} if self.loss == "plain" else {"loss": self.loss}),
            **self._rows(),
            **({} if self.optimizer is None or not self.optimizer.moves else {"optimizer": self.optimizer.overlap}),
            **({"weights": self.weights.layers} if self.weights is not None and self.moves_weights else {}),
        }
        text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def _rows(self) -> dict[str, Any]:
        rows = {"loss_rows": self.loss_rows, "layer_rows": self.layer_rows, "row_wise": self.row_wise}
        return {key: value for key, value in rows.items() if value}

    def to_json(self) -> str:
        """JSON text with two-space indentation and a fixed order of keys; `Plan.from_json` gives back an equal plan."""
        fields = dataclasses.asdict(self) | {"rules": self.rules.to_plain()}
        written = {key: value for key, value in fields.items() if value not in (None, ()) or key not in _LEFT_OUT}
        for site in written["sites"]:
            if site["codec"] is None:
                del site["codec"]
        return json.dumps({"schema": SCHEMA, "digest": self.digest(), **written}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote. Raises `ConfigError` when the text is something else or was edited badly."""
        if isinstance(text, str) and text.endswith(".json"):
            raise ConfigError(f"plan: expected the text of a plan, not a file's name; write Path('{text}').read_text()")
        document = parse_json(text, "plan", "; write one: lowtide plan RUN.yaml --out plan.json")
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema is None:
            raise ConfigError("plan: this is no plan of lowtide; write one: lowtide plan RUN.yaml --out plan.json")
        if schema != SCHEMA:
            raise ConfigError(
                f"plan: schema {schema} is not supported by this version; write the plan again (schema {SCHEMA})"
            )
        del document["schema"]
        digest = document.pop("digest", None)
        try:
            plan = build(cls, document)
        except ConfigError as error:
            raise ConfigError(f"plan: {error}; write the plan again") from None
        if plan.digest() != digest:
            raise ConfigError(f"plan: the digest {digest} does not fit the rules and layers; write the plan again")
        return plan

    def __str__(self) -> str:
        return plan_table(self)

    def _repr_html_(self) -> str:
        return notebook_html("lowtide.Plan", self)


def _agreed(site: SiteDecision) -> tuple[Any, ...]:
    """What all ranks must agree on about one site."""
    codec = () if site.codec is None else (site.codec.kind,)
    return (site.name, site.fate.value, site.tier, site.prefetch, site.leave, *codec)


# -- as text ----------------------------------------------------------------------------------------------------------


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


def plan_table(plan: Plan, width: int | None = None) -> str:
    """The text of `print(plan)`, without a trailing newline. `width`: the most characters of a line; None: any."""
    lines = [", ".join([f"plan {plan.digest()}", *_contents(plan)])]
    if plan.is_solved and plan.predicted is not None:
        promise, *others = promise_lines(plan)
        lines = [f"plan {plan.digest()}: {promise}", *others, ", ".join(_contents(plan))]
    if plan.does_nothing:
        lines.append(f"This plan does nothing: {'everything fits' if plan.is_solved else 'every activation is kept'}.")
    lines += _lines_about_rows(plan)
    if plan.optimizer is not None:
        lines += plan.optimizer.lines()
    if plan.weights is not None:
        lines += plan.weights.lines()
    if plan.is_solved and any(site.recipe is not None for site in plan.sites):
        lines.append(_check_line(plan))
    if plan.is_solved and any(site.codec is not None for site in plan.sites):
        lines.append(_codec_line(plan))
    if plan.rules.rules:
        lines += ["", *_rule_lines(plan, width)]
    if plan.is_solved and plan.account:
        lines += ["", *account_lines(plan.account, width)]
    if plan.sites:
        lines += ["", *_table(plan, width)]
    elif not plan.is_solved:
        lines += ["", *_unobserved_lines(plan, width)]
    return "\n".join(wrapped(lines, width))


def notebook_html(title: str, plan: Plan | None) -> str:
    """What a notebook shows of a plan, or of the handle that carries it out: the table, in a box that scrolls."""
    text = "no plan yet: it is made in the first step" if plan is None else plan_table(plan)
    style = "overflow-x: auto; white-space: pre; line-height: 1.35"
    return f'<b>{html.escape(title)}</b><pre style="{style}">{html.escape(text)}</pre>'


def _lines_about_rows(plan: Plan) -> Iterator[str]:
    if plan.loss_rows is not None:
        yield f"loss: head and loss in blocks of {plan.loss_rows} rows, {_DECLARED}"
    elif plan.loss != "plain":
        yield _LOSS
    if plan.layer_rows is not None:
        names = ", ".join(plan.row_wise) or "layers"
        yield f"{names}: in blocks of {plan.layer_rows} rows but for attention, {_DECLARED}"


def _check_line(plan: Plan) -> str:
    seconds = plan.predicted.check_seconds if plan.predicted is not None else 0.0
    price = f", {format_seconds(seconds)} a step" if seconds else ""
    depth = ", every byte" if plan.check == "deep" else ""
    return f"check: {plan.check} (recipes are proven in every forward pass{depth}{price})"


def _codec_line(plan: Plan) -> str:
    smaller = [site for site in plan.sites if site.codec is not None]
    before, after = sum(site.nbytes for site in smaller), sum(site.stored_bytes for site in smaller)
    seconds = format_seconds(sum(site.cost_seconds for site in smaller))
    return (
        f"codecs: {len(smaller)} {plural('site', len(smaller))} stored smaller, to the bit: {format_bytes(before)} in "
        f"{format_bytes(after)}, {seconds} a step"
    )


def _contents(plan: Plan) -> Iterator[str]:
    num_layers = len(plan.layers)
    num_retained_inputs = sum(site.retained_input is not None for site in plan.sites)
    num_sites = len(plan.sites) - num_retained_inputs
    observed = f"{num_sites} {plural('site', num_sites)}" if plan.sites else "no step observed yet"
    yield from (f"{num_layers} {plural('layer', num_layers)}", observed)
    if num_retained_inputs:
        yield f"{num_retained_inputs} {plural('retained input', num_retained_inputs)}"
    yield f"storages below {format_bytes(plan.min_bytes)} are kept"
    if plan.host_budget_bytes is not None:
        yield f"host budget {format_bytes(plan.host_budget_bytes)}"
    if plan.disk_budget_bytes is not None:
        yield f"disk budget {format_bytes(plan.disk_budget_bytes)}"
    if plan.disk_path is not None:
        yield f"disk path {plan.disk_path}"


def _rule_lines(plan: Plan, width: int | None) -> list[str]:
    cells = [("rule", "fate", "prefetch", "tier", "written at")]
    for rule in plan.rules.rules:
        is_swap = rule.fate is Fate.SWAP
        prefetch = ("auto" if rule.prefetch is None else str(rule.prefetch)) if is_swap else ""
        tier = (rule.tier.value if rule.tier else "fastest") if is_swap else ""
        cells.append((rule.pattern.text, rule.fate.value, prefetch, tier, rule.where))
    return align(cells, numeric=(), width=width)


def _unobserved_lines(plan: Plan, width: int | None) -> list[str]:
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


def _site_rows(plan: Plan) -> Iterator[_SiteRow]:
    by_layer: dict[str | None, list[SiteDecision]] = {layer: [] for layer in plan.layers}
    for site in plan.sites:
        by_layer.setdefault(site.layer if site.layer in by_layer else None, []).append(site)
    keys = [_signature(layer, by_layer[layer]) for layer in plan.layers]
    for first, last in runs(plan.layers, keys):
        sites = [site for layer in plan.layers[first : last + 1] for site in by_layer[layer]]
        yield _row(layers_label(plan.layers, first, last), last - first + 1, sites, is_solved=plan.is_solved)
    if by_layer.get(None):
        yield _row(OUTSIDE, 1, by_layer[None], is_solved=plan.is_solved)


def _signature(layer: str, sites: Iterable[SiteDecision]) -> Hashable:
    return tuple((site.name.removeprefix(layer), site.stored_bytes, site.dtype, site.fate, site.tier) for site in sites)


def _row(label: str, num_layers: int, sites: Sequence[SiteDecision], *, is_solved: bool) -> _SiteRow:
    saved = [site for site in sites if site.retained_input is None] if is_solved else sites
    held = [site for site in sites if site.retained_input is not None and site.fate is not Fate.RECOMPUTE]
    counts = [(sum(site.fate is fate for site in saved) // num_layers, fate) for fate in _FATES]
    moved = [site for site in sites if site.fate is not Fate.KEEP]
    reasons = _solved_reasons(saved) if is_solved else dict.fromkeys(site.reason for site in moved or sites)
    return _SiteRow(
        label=label,
        fate=" + ".join(f"{count} {fate.value}" for count, fate in counts if count) or "no sites",
        bytes_by_fate=tuple(sum(site.stored_bytes for site in saved if site.fate is fate) for fate in _FATES),
        retained_input_bytes=sum(site.nbytes for site in held),
        cost_seconds=sum(site.cost_seconds for site in sites),
        why="; ".join(reasons),
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


def _table(plan: Plan, width: int | None) -> list[str]:
    rows = list(_site_rows(plan))
    total = _SiteRow(
        label="total",
        fate="",
        bytes_by_fate=tuple(map(sum, zip(*(row.bytes_by_fate for row in rows), strict=True))),
        retained_input_bytes=sum(row.retained_input_bytes for row in rows),
        cost_seconds=sum(row.cost_seconds for row in rows),
        why="",
    )
    cells: list[tuple[str, ...]] = [("", "sites each", "kept", "swapped", "recomputed", "retained", "cost", "why")]
    for row in (*rows, total):
        sizes = (*map(_size, row.bytes_by_fate), _size(row.retained_input_bytes))
        cost = format_seconds(row.cost_seconds) if row.cost_seconds else "-"
        cells.append((row.label, row.fate, *sizes, cost, row.why))
    is_shown = (*[True] * 5, plan.is_solved and bool(total.retained_input_bytes), plan.is_solved, True)
    shown = [tuple(itertools.compress(row, is_shown)) for row in cells]
    return align(shown, numeric=tuple(range(2, len(shown[0]) - 1)), width=width)


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def promise_lines(plan: Plan) -> list[str]:
    """Peak and time of a solved plan, and how sure they are. The first line carries on after the plan's name."""
    predicted = plan.predicted
    assert predicted is not None
    audited = "" if plan.audited_peak_bytes is None else f", audited {format_bytes(plan.audited_peak_bytes)}"
    budget = "" if plan.budget_bytes is None else f" of a budget of {format_bytes(plan.budget_bytes)}"
    plain = format_bytes(predicted.plain_peak_bytes)
    floor = "" if predicted.floor_bytes is None else f", floor {format_bytes(predicted.floor_bytes)}"
    return [
        f"peak {format_bytes(predicted.peak_bytes)}{audited}{budget}; everything kept {plain}{floor}",
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


def why_unswapped(plan: Plan) -> list[str]:
    """One line where a price is why nothing is swapped."""
    seconds = plan.predicted.swap_excess_seconds if plan.predicted is not None else 0.0
    if not seconds:
        return []
    return [f"no activation is swapped: that would take {format_seconds(seconds)} more, to take freed memory again"]


def account_lines(account: Sequence[AccountLine], width: int | None = None) -> list[str]:
    """Bytes at the worst moment, before and after."""
    cells = [("at the worst moment", "everything kept", "planned")]
    for line in account:
        cells.append((line.what, format_bytes(line.plain_bytes), format_bytes(line.planned_bytes)))
    return align(cells, numeric=(1, 2), width=width)
