"""The first forward: which operator made each saved tensor, and which fate it gets. Later passes use these decisions.

What: while a pass is observed, a `Recorder` names each storage after the operator that made it. By that name each saved
tensor gets a `SavedTensorEntry`, from the rules or from a solved plan. The entry only says what to do. `ForwardPass`
does it, in this pass as in every later one, and stores the entries as the table of the layer.

After it a warning says, with names, if it was not the forward that a solved plan was made for (a plan that does not fit
costs memory and gives no wrong value, so nothing fails), or if a swap rule moves nothing. Models that change later show
in `stats.num_divergences`.

A compiled part (tensors/compiled.py) runs without the recorder: what it saves is named after the part, in the order of
saving.

Cost: 7 us an operator, and some 10 us a saved tensor; in the first forward only, and where a table did not fit.
Not covered: what a tensor is (context.py), and how its fate is carried out (forward_pass.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Iterator

from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.rules import Decision, Rule
from lowtide.core.text_table import some_quoted
from lowtide.profiling.producer_names import Recorder
from lowtide.runtime.hooks.context import LayerTable, Parameters, PlanContext, Saved, SavedTensorEntry
from lowtide.runtime.recompute.recipe_graph import Node
from lowtide.tensors.compiled import refuse_compiled_part, without
from lowtide.tensors.kinds import storage_keys
from lowtide.units import format_bytes


class FirstForward:
    """What one forward pass learns in the layers that have no table yet."""

    def __init__(self, context: PlanContext, parameters: Parameters) -> None:
        self._context = context
        self._parameters = parameters
        self._recorder: Recorder | None = None
        self._recorded: dict[int, tuple[StorageWeakRef, str]] = {}
        """By storage key: the storage, and the name under which this pass recorded it."""
        self._given: set[int] | None = None
        """Keys of what the compiled part that is running was given; None outside of such parts."""

    @property
    def is_on(self) -> bool:
        """Whether operators are being observed now."""
        return self._recorder is not None

    @contextlib.contextmanager
    def observing(self, layer: LayerTable) -> Iterator[None]:
        """Inside, operators are named by the modules that run them. Not to be nested."""
        self._recorder = recorder = Recorder(storage_keys(self._context.model))
        try:
            with recorder.following(layer.module, layer.name), recorder:
                yield
        finally:
            self._recorder = None
            self._context.seen_names |= recorder.seen_ops

    @contextlib.contextmanager
    def inside_compiled(self, name: str, given: Iterable[int]) -> Iterator[None]:
        """The compiled part `name` runs on storages with the keys `given`, and shows nothing but what it saves."""
        assert self._recorder is not None
        self._given = set(given)
        try:
            with without([self._recorder]), self._recorder.inside(name):
                yield
        finally:
            self._given = None

    def name_outputs(self, name: str, keys: Iterable[int], given: Iterable[int]) -> None:
        """The compiled part `name` gave out storages with these keys."""
        assert self._recorder is not None
        known = {key for key in keys if key in {*given} or self._recorded_name(key) is not None}
        with self._recorder.inside(name):
            self._recorder.name_fresh([key for key in keys if key not in known])

    def entry_of(self, saved: Saved, layer: LayerTable, *, is_output: bool) -> SavedTensorEntry:
        """The decision about a saved tensor, for now and for this position in later passes.

        `is_output`: it is a dropped output of a module, which is recomputed by running the module again.
        """
        tensor, producer = saved.tensor, type(saved.grad_fn)
        entry = SavedTensorEntry(tensor.dtype, tensor.dim(), producer, _NO_ACTIVATION, is_counted=False)
        if self._recorder is not None and self._given is None:
            refuse_compiled_part(self._recorder.path)
        if not self._is_activation(saved, layer):
            return entry
        assert self._recorder is not None and saved.storage is not None
        entry.is_activation = True
        key = saved.key
        # A storage keeps the name of its first save. The recorder renames it when another operator writes to it.
        known = self._recorded_name(key)
        name = known or self._recorder.names.get(key) or f"{layer.name}.input".lstrip(".")
        if known is None:
            self._recorded[key] = (StorageWeakRef(saved.storage), name)
        nbytes = saved.storage.nbytes()
        entry.decision = decision = self._decide(name, saved, nbytes, is_output=is_output)
        entry.is_counted = known is None
        if self._context.nodes is not None:
            self._plan_entry(entry, self._context.nodes, name, nbytes)
        if known is None:
            self._note_site(name, saved, layer, decision)
        return entry

    def note_dropped(self, saved: Saved, layer: LayerTable) -> bool:
        """Whether a tensor that a recomputed region drops is an activation. If so, it is recorded."""
        if not self._is_activation(saved, layer):
            return False
        assert self._recorder is not None and saved.storage is not None
        key = saved.key
        name = self._recorder.names.get(key)
        # An input of the region is recorded already, with the fate that it has outside.
        if name is not None and self._recorded_name(key) is None:
            self._recorded[key] = (StorageWeakRef(saved.storage), name)
            reason = self._context.rules.decide(name).reason
            self._note_site(name, saved, layer, Decision(fate=Fate.RECOMPUTE, reason=reason))
        return True

    def _is_activation(self, saved: Saved, layer: LayerTable) -> bool:
        """Whether it is a plain tensor, no parameter or buffer (or view or cast of one), and not the caller's input."""
        if not saved.is_plain or self._parameters.has(saved.tensor, layer.module):
            return False
        assert self._recorder is not None
        key = saved.key
        if self._given is not None and key not in self._given:
            if self._recorded_name(key) is None:
                self._recorder.name_fresh([key])
            return True
        if key in self._recorder.parameter_keys:
            return False
        return key in self._recorder.names or saved.grad_fn is not None

    def _recorded_name(self, key: int) -> str | None:
        """The name under which this forward recorded the storage; None if it did not yet."""
        seen = self._recorded.get(key)
        return None if seen is None or seen[0].expired() else seen[1]

    def _decide(self, name: str, saved: Saved, nbytes: int, *, is_output: bool) -> Decision | SiteDecision:
        if is_output:
            reason = self._context.rules.decide(name).reason
            return Decision(fate=Fate.RECOMPUTE, reason=reason)
        assert self._recorder is not None
        if saved.storage is not None and saved.key in self._recorder.statistics:
            return _kept("a batch norm writes to it, which no version counts")
        if self._context.nodes is not None:
            return self._decide_as_planned(self._context.nodes.get(name), saved)
        decision = self._context.stay_rules.decide(name)
        if decision.fate is Fate.SWAP and nbytes < self._context.min_bytes:
            return _kept(f"smaller than min_bytes; {decision.reason}")
        if decision.fate is Fate.SWAP and not saved.is_movable:
            return _kept(f"not a plain tensor on {self._context.scheduler.engine.device}; {decision.reason}")
        return decision

    def _decide_as_planned(self, node: Node | None, saved: Saved) -> Decision | SiteDecision:
        planned = node.decision if node is not None else None
        if planned is None:
            return _kept("the plan does not know it")
        if planned.retained_input is not None:
            return _kept("the plan took it for a retained input, but it is saved")
        if planned.fate is Fate.RECOMPUTE and planned.recipe is None:
            return _kept("to be recomputed with its layer, but saved outside of it")
        if planned.fate is Fate.SWAP and not saved.is_movable:
            return _kept(f"not a plain tensor on {self._context.scheduler.engine.device}")
        return planned

    def _plan_entry(self, entry: SavedTensorEntry, nodes: dict[str, Node], name: str, nbytes: int) -> None:
        """What a solved plan says about a saved tensor beyond its fate."""
        node = nodes.get(name)
        if node is None:
            entry.is_planned = False
            if entry.is_counted and nbytes and name not in self._context.unknown_site_bytes:
                self._context.unknown_site_bytes[name] = nbytes
            return
        node.was_seen = True
        is_start = node.is_input and (entry.is_counted or entry.decision.fate is Fate.SWAP)
        takes_part = node.is_made or node.is_encoded or is_start
        entry.node = node if takes_part and entry.decision.fate is node.decision.fate else None

    def _note_site(self, name: str, saved: Saved, layer: LayerTable, decision: Decision | SiteDecision) -> None:
        assert saved.storage is not None
        self._context.sites.setdefault(
            name,
            SiteDecision(
                name=name,
                layer=layer.name or None,
                nbytes=saved.storage.nbytes(),
                dtype=str(saved.tensor.dtype).removeprefix("torch."),
                fate=decision.fate,
                tier=decision.tier,
                prefetch=decision.prefetch,
                reason=decision.reason,
            ),
        )


def _kept(reason: str) -> Decision:
    return Decision(fate=Fate.KEEP, reason=reason)


_NO_ACTIVATION = _kept("no activation")


# -- whether it was the forward that the plan was made for -------------------------------------------------------------


# A solved plan that misses more than this share of the saved bytes was made for something else.
_UNPLANNED_SHARE = 0.01


def with_bytes_seen(site: SiteDecision, seen: SiteDecision | None) -> SiteDecision:
    """A planned site with the bytes that the first forward showed."""
    return site if seen is None else dataclasses.replace(site, nbytes=seen.nbytes, dtype=seen.dtype)


def warn_about_other_sites(context: PlanContext) -> None:
    """Warn after the first forward under a solved plan if it was not the forward that the plan was made for."""
    assert context.nodes is not None
    planned = [node for node in context.nodes.values() if node.decision.fate is not Fate.KEEP or node.is_encoded]
    # Without a recipe it is recomputed with its layer, in which nothing is saved.
    expected = [node for node in planned if node.decision.fate is Fate.SWAP or node.is_made]
    absent = [node.name for node in expected if not node.was_seen]
    wrong = [node.name for node in planned if node.has_failed and not node.is_encoded]
    whole = [node.name for node in planned if node.has_failed and node.is_encoded]
    saved_bytes = sum(site.nbytes for site in context.sites.values())
    unknown_bytes = sum(context.unknown_site_bytes.values())
    parts = []
    if unknown_bytes > _UNPLANNED_SHARE * saved_bytes:
        largest = sorted(context.unknown_site_bytes, key=lambda name: -context.unknown_site_bytes[name])
        share = 100 * unknown_bytes / saved_bytes
        parts.append(f"{share:.0f} % of what it saved is not in the plan and is kept ({some_quoted(largest)})")
    if absent:
        parts.append(f"it did not save what the plan wants swapped or recomputed ({some_quoted(absent)})")
    if wrong:
        parts.append(f"recipes of the plan do not hold in it, and their sites are kept ({some_quoted(wrong)})")
    if whole:
        parts.append(f"what the plan stores smaller does not fit its codec, and is kept whole ({some_quoted(whole)})")
    if parts:
        warnings.warn(
            f"lowtide: the first forward was not the one that the plan was made for: {'; '.join(parts)}. Memory may "
            "differ from what was predicted; plan again for this model and batch.",
            stacklevel=4,
        )


def warn_about_idle_regions(context: PlanContext) -> None:
    """Warn after the first forward about each recompute rule all of whose modules run again and free nothing."""
    names = {module: name for name, module in context.model.named_modules()}
    frees: dict[Rule | None, bool] = {}
    for module, watch in context.watches.items():
        rule = context.rules.decide(names.get(module, ""), is_site=False).rule
        frees[rule] = frees.get(rule, False) or watch.frees or bool(watch.refusal)
    for rule in [rule for rule, is_used in frees.items() if rule is not None and not is_used]:
        where = f" ({rule.where})" if rule.where else ""
        warnings.warn(
            f"lowtide: {rule}{where} frees nothing: what it names saves no more than its inputs, which stay, and runs "
            "again all the same; take it out of the rule",
            stacklevel=4,
        )


def warn_about_small_sites(context: PlanContext) -> None:
    """Warn after the first forward under rules about each swap rule that moves nothing, for all that it names is
    smaller than `min_bytes`."""
    by_rule: dict[int, tuple[Rule, list[SiteDecision]]] = {}
    for site in context.sites.values():
        rule = context.stay_rules.decide(site.name).rule
        if rule is not None and rule.fate is Fate.SWAP:
            by_rule.setdefault(id(rule), (rule, []))[1].append(site)
    for rule, sites in by_rule.values():
        if any(site.fate is not Fate.KEEP or site.nbytes >= context.min_bytes for site in sites):
            continue
        largest = max(site.nbytes for site in sites)
        where = f" ({rule.where})" if rule.where else ""
        warnings.warn(
            f"lowtide: {rule}{where} moves nothing: what it names is smaller than min_bytes, "
            f"{format_bytes(context.min_bytes)} (the largest of {len(sites)} activations has {format_bytes(largest)}); "
            f"write min_bytes: {largest}, or less",
            stacklevel=4,
        )
