"""From a profile to a step that a solver can work on, and from its solution to a plan that the runtime can carry out.

What: operators between two events (something is born, saved, let go of, read, released) become one tick; nodes that may
have only one fate become part of the ticks' base bytes; the rest become items. On the way back, ticks become autograd's
sequence numbers, which are what the runtime can count in a step without a dispatch mode.

Cost: linear in operators and nodes. Not covered: choosing fates (solve.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.core.decisions import SiteDecision
from lowtide.core.fate import Fate
from lowtide.core.profile import Profile, Site
from lowtide.core.recipe import Recipe
from lowtide.planner.smaller import form_of, is_form, send_ops, stored_as
from lowtide.timeline.step import Item, Step, Tick
from lowtide.units import MIB

_SMALL_SHARE = 10
"""So many times as much is in larger storages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A step, and the way back from it to the profile."""

    profile: Profile
    step: Step
    nodes: tuple[int, ...]
    """Index in `profile.nodes` of each item."""
    starts: tuple[int, ...]
    """First operator of each tick, and at the end the number of operators."""
    why_fixed: Mapping[int, str]
    """Nodes that are no items: why they are kept."""
    held: tuple[int, ...]
    """Of each forward tick: its base bytes, without those that live for a few operators."""
    state_bytes: int = 0
    """Of the optimizer's state that is no base: shares of it that are the last items."""


def make_problem(
    profile: Profile,
    *,
    allowed: Mapping[str, tuple[tuple[Fate, ...], str]],
    min_bytes: int,
    has_gradients: bool = False,
) -> Problem:
    """The step of `profile`.

    `allowed` gives for a node's name the fates that rules leave to it, and the reason; a name that is absent may have
    any. `has_gradients`: gradients of earlier micro-batches are on the device from the start.
    """
    fates, why_fixed = _fates(profile, allowed, min_bytes)
    chosen = [
        index
        for index, node_fates in enumerate(fates)
        if node_fates not in ((), (Fate.KEEP,)) or (node_fates and is_form(profile.nodes[index]))
    ]
    sends = send_ops(profile)
    starts = _tick_starts(profile, chosen, sends)
    items_at = set(chosen)
    # Fixed nodes, and whether they are held for backward: a retained input that no recipe reads is not.
    fixed = {index: fates[index] != () for index in range(len(profile.nodes)) if index not in items_at}
    base = op_base_bytes(profile, fixed, has_gradients=has_gradients)
    items = tuple(_items(profile, chosen, fates, starts, sends))
    num_forward = bisect.bisect_left(starts, profile.num_forward_ops)
    stops = _stop_ops(profile) | {profile.num_forward_ops}
    step = Step(
        ticks=_ticks(profile, starts, base),
        num_forward_ticks=num_forward,
        items=items,
        stops=tuple(tick for tick, start in enumerate(starts[:-1]) if start in stops),
        check_until=len(starts) - 1,
    )
    held = _held(profile, starts[:num_forward], base)
    return Problem(profile=profile, step=step, nodes=tuple(chosen), starts=starts, why_fixed=why_fixed, held=held)


def fitting_min_bytes(profile: Profile) -> int:
    """1 MiB, or the largest power of two below it under which there is at most a tenth of the bytes that are saved: a
    copy costs its start, but a plan must not leave a small model alone for that."""
    sizes = [node.nbytes for node in profile.nodes if node.retained_input is None]
    least = MIB
    while least > 1 and sum(size for size in sizes if size < least) > sum(sizes) // _SMALL_SHARE:
        least //= 2
    return least


def _fates(
    profile: Profile, allowed: Mapping[str, tuple[tuple[Fate, ...], str]], min_bytes: int
) -> tuple[list[tuple[Fate, ...]], dict[int, str]]:
    result: list[tuple[Fate, ...]] = []
    why: dict[int, str] = {}
    forms = {node.name for node in profile.nodes if is_form(node)}
    for index, node in enumerate(profile.nodes):
        possible = [Fate.KEEP]
        if node.nbytes < min_bytes:
            why[index] = "smaller than min_bytes"
        elif node.reads and node.dies >= node.reads[0]:
            why[index] = "something else holds it until backward"
        else:
            possible.append(Fate.SWAP)
            if node.recipe is not None or form_of(node.name) in forms:
                possible.append(Fate.RECOMPUTE)
        if node.name in allowed:
            wanted, reason = allowed[node.name]
            left = [fate for fate in possible if fate in wanted]
            possible = left or [Fate.KEEP]
            if possible == [Fate.KEEP]:
                why.setdefault(index, reason)
        result.append(tuple(possible))
    # What is made by its recipe has no smaller form.
    with_recipes = {form_of(node.name) for node in profile.sites if node.recipe is not None}
    # A retained input of its own accord is nothing: it matters only as the input of a recipe.
    needed = _read_by_recipes(profile, result)
    for index, node in enumerate(profile.nodes):
        if is_form(node):
            result[index] += (Fate.RECOMPUTE,) if node.name in with_recipes else ()
        elif node.retained_input is not None and node.name not in needed:
            result[index] = ()
    return result, why


def _read_by_recipes(profile: Profile, fates: Sequence[tuple[Fate, ...]]) -> set[str]:
    return {
        name
        for node, node_fates in zip(profile.nodes, fates, strict=True)
        if node.recipe is not None and Fate.RECOMPUTE in node_fates
        for name in node.recipe.nodes
    }


def _stop_ops(profile: Profile) -> set[int]:
    """Operators right after a save, and right before a read."""
    after_saves = {node.saved + 1 for node in profile.sites}
    return after_saves | {node.reads[0] for node in profile.sites if node.reads}


def _tick_starts(profile: Profile, chosen: Iterable[int], sends: Sequence[int]) -> tuple[int, ...]:
    num_ops = len(profile.op_seconds)
    starts = {0, profile.num_forward_ops, num_ops, *_stop_ops(profile)}
    for index in chosen:
        node = profile.nodes[index]
        starts.update((node.born, sends[index] + 1, node.dies, *node.reads))
        if node.reads:
            starts.add(node.release)
    return tuple(sorted(start for start in starts if 0 <= start <= num_ops))


def state_bytes(profile: Profile, *, has_gradients: bool = False) -> int:
    """Bytes that are on the device during the whole of forward and backward."""
    state = profile.state
    given = state.gradients if has_gradients else 0
    return state.parameters + state.buffers + state.optimizer + state.inputs + state.foreign + state.rounding + given


def op_base_bytes(profile: Profile, fixed: Mapping[int, bool], *, has_gradients: bool = False) -> np.ndarray:
    """Bytes on the device at each operator, with only the nodes `fixed` among the nodes: kept if True, else only as
    long as the forward pass itself holds them."""
    num_ops = len(profile.op_seconds)
    change = np.zeros(num_ops + 1, dtype=np.int64)
    last_use = _last_uses(profile)
    for index, is_held in fixed.items():
        node = profile.nodes[index]
        end = max(node.dies, node.release, last_use.get(node.name, 0)) if is_held else node.dies
        change[max(node.born, 0)] += node.nbytes
        change[min(max(end, 0), num_ops)] -= node.nbytes
    base = np.cumsum(change)[:num_ops] + np.asarray(profile.op_bytes, dtype=np.int64)
    if has_gradients:
        base -= accumulated(profile)
    return base + state_bytes(profile, has_gradients=has_gradients)


def accumulated(profile: Profile) -> np.ndarray:
    """Of the gradients that a micro-batch has made before each operator, the bytes that are in older ones by then.

    The older ones are in the state. A new one exists beside its older one until autograd adds it.
    """
    gone = np.zeros(len(profile.op_names), dtype=np.int64)
    for index, nbytes in added_gradients(profile):
        gone[index] += nbytes
    return np.cumsum(gone)


def added_gradients(profile: Profile) -> Iterator[tuple[int, int]]:
    """The bytes of each gradient, and the operator before which autograd adds it: where the backward of the module at
    hand goes over to another. What is left of it there (a transpose, a bias) runs first."""
    waiting: list[int] = []
    before = ""
    for index, (name, nbytes) in enumerate(zip(profile.op_names, new_gradients(profile).tolist(), strict=True)):
        path = name.rpartition(".")[0]
        if path != before:
            yield from ((index, gradient) for gradient in waiting)
            waiting, before = [], path
        waiting += [nbytes] * (nbytes > 0)


def new_gradients(profile: Profile) -> np.ndarray:
    """Bytes of gradients that each operator makes."""
    return np.maximum(np.diff(np.asarray(profile.op_gradient_bytes, dtype=np.int64), prepend=0), 0)


def _last_uses(profile: Profile) -> dict[str, int]:
    """For each node, when the last node that could be made from it is let go of: until then it may be held."""
    uses: dict[str, int] = {}
    for node in reversed(profile.nodes):
        if node.recipe is None:
            continue
        end = max(node.release, uses.get(node.name, 0))
        for name in node.recipe.nodes:
            uses[name] = max(uses.get(name, 0), end)
    return uses


def _ticks(profile: Profile, starts: Sequence[int], base: np.ndarray) -> tuple[Tick, ...]:
    seconds = np.asarray(profile.op_seconds)
    first = list(starts[:-1])
    peaks = np.maximum.reduceat(base, first)
    sums = np.add.reduceat(seconds, first)
    ends = [*first[1:], len(base)]
    largest = [start + int(np.argmax(base[start:end])) for start, end in zip(first, ends, strict=True)]
    ticks = [
        Tick(seconds=float(s), base_bytes=int(b), name=profile.op_names[op])
        for s, b, op in zip(sums, peaks, largest, strict=True)
    ]
    after = state_bytes(profile, has_gradients=True) + profile.state.optimizer_temporaries
    # The optimizer's own step: no time of this micro-batch, but bytes that must fit. The loop has its batch still.
    return (*ticks, Tick(seconds=0.0, base_bytes=after, name="the step of the optimizer"))


def _held(profile: Profile, first: Sequence[int], base: np.ndarray) -> tuple[int, ...]:
    kept = base[: profile.num_forward_ops] - np.asarray(profile.op_bytes[: profile.num_forward_ops], dtype=np.int64)
    staying = sum(entry.nbytes for entry in profile.staying)
    ticks = np.maximum.reduceat(kept, list(first)) + staying if first else ()
    return tuple(int(nbytes) for nbytes in ticks)


def _items(
    profile: Profile,
    chosen: Sequence[int],
    fates: Sequence[tuple[Fate, ...]],
    starts: Sequence[int],
    sends: Sequence[int],
) -> Iterator[Item]:
    place = {profile.nodes[index].name: position for position, index in enumerate(chosen)}

    def tick(op: int) -> int:
        return max(bisect.bisect_right(starts, op) - 1, 0)

    def boundary(op: int) -> int:
        return bisect.bisect_left(starts, op)

    own = {form_of(name): position for name, position in place.items()}
    for index in chosen:
        node, recipe = profile.nodes[index], profile.nodes[index].recipe
        can_remake = Fate.RECOMPUTE in fates[index] and not is_form(node)
        form_at, is_of = place.get(form_of(node.name)), own.get(node.name)
        codec = None if is_of is None else profile.nodes[chosen[is_of]].codec
        seconds, nbytes = (codec.seconds, codec.work_bytes) if codec is not None else (0.0, 0)
        if can_remake and recipe is not None:
            seconds, nbytes = recipe.seconds, max(recipe.transient_bytes - node.nbytes, 0)
        yield Item(
            name=node.name,
            nbytes=node.nbytes,
            born=tick(node.born),
            saved=tick(sends[index]),
            dies=boundary(node.dies),
            reads=tuple(dict.fromkeys(tick(read) for read in node.reads)),
            release=boundary(node.release) if node.reads else 0,
            fates=fates[index],
            recipe_seconds=seconds,
            recipe_bytes=nbytes,
            check_bytes=profile.state.fingerprint if can_remake else 0,
            inputs=tuple(place[name] for name in recipe.nodes if name in place) if can_remake and recipe else (),
            form=form_at,
            form_of=is_of,
        )


# -- the way back --------------------------------------------------------------------------------------------------


def decisions(
    problem: Problem,
    fates: Sequence[Fate],
    evict_by: Sequence[int | None],
    prefetch_at: Sequence[int | None],
    reasons: Mapping[int, str],
) -> tuple[SiteDecision, ...]:
    """What the runtime is told about each node, in order of saving.

    `evict_by` and `prefetch_at` are ticks; `reasons` says for an item why it has its fate.
    """
    profile = problem.profile
    items = {index: position for position, index in enumerate(problem.nodes)}
    made = [
        profile.nodes[index]
        for position, (index, fate) in enumerate(zip(problem.nodes, fates, strict=False))
        if fate is Fate.RECOMPUTE and stored_form(problem, fates, position) is None
    ]
    needed = needed_retained_inputs(profile, {node.name: node.recipe for node in made if node.recipe is not None})
    clock = _SequenceClock(problem, fates)
    result = []
    for index, node in enumerate(profile.nodes):
        position = items.get(index)
        if is_form(node) or (node.retained_input is not None and node.name not in needed):
            continue
        fate = Fate.KEEP if position is None else fates[position]
        reason = problem.why_fixed.get(index, "fits") if position is None else reasons[position]
        recipe, codec, sent = node.recipe if fate is Fate.RECOMPUTE else None, None, node
        cost_seconds = 0.0 if recipe is None else recipe.seconds
        form = None if position is None else stored_form(problem, fates, position)
        if form is not None:
            # It is what is kept or swapped in place of the site.
            recipe, codec, sent = None, node.codec, profile.nodes[problem.nodes[form]]
            position, fate = form, fates[form]
            assert codec is not None
            reason, cost_seconds = stored_as(codec), codec.seconds
        swap = position if fate is Fate.SWAP else None
        result.append(
            SiteDecision.of(
                node,
                fate,
                reason,
                prefetch=None if swap is None else clock.prefetch(swap, prefetch_at[swap]),
                leave=None if swap is None else clock.leave(sent, evict_by[swap]),
                retained_input=node.retained_input,
                recipe=recipe,
                codec=codec,
                cost_seconds=cost_seconds,
            )
        )
    return (*result, *(SiteDecision.of(entry, Fate.KEEP, entry.reason) for entry in profile.staying))


def stored_form(problem: Problem, fates: Sequence[Fate], position: int) -> int | None:
    """The item that an item is made from, if that is its smaller form; None where it is not stored smaller."""
    form = problem.step.items[position].form
    is_stored = form is not None and fates[position] is Fate.RECOMPUTE and fates[form] is not Fate.RECOMPUTE
    return form if is_stored else None


def needed_retained_inputs(profile: Profile, recipes: Mapping[str, Recipe]) -> set[str]:
    """Retained inputs that something recomputed starts from, directly or through other recomputed retained inputs.
    `recipes`: of what is recomputed, by name."""
    retained_inputs = {node.name for node in profile.nodes if node.retained_input is not None}
    open_names = [name for name in recipes if name not in retained_inputs]
    needed: set[str] = set()
    while open_names:
        for name in recipes[open_names.pop()].nodes:
            if name in retained_inputs and name not in needed:
                needed.add(name)
                if name in recipes:
                    open_names.append(name)
    return needed


class _SequenceClock:
    """Ticks to autograd's sequence numbers. The runtime can look at its plan only where something is saved or read."""

    def __init__(self, problem: Problem, fates: Sequence[Fate]) -> None:
        profile = problem.profile
        self._problem = problem
        saves = sorted((node.saved, node.first_sequence) for node in profile.sites)
        self._save_ops = [op for op, _ in saves]
        self._save_sequences = [sequence for _, sequence in saves]
        reads = sorted((node.reads[0], -node.last_sequence) for node in profile.sites if node.reads)
        self._read_ops = [op for op, _ in reads]
        self._read_sequences = [-negative for _, negative in reads]
        self._need = self._need_sequences(fates)

    def _need_sequences(self, fates: Sequence[Fate]) -> list[int]:
        """Sequence number at which backward first needs each item, also for making others."""
        problem = self._problem
        need = [problem.profile.nodes[index].last_sequence for index in problem.nodes]
        for position in reversed(range(len(need))):
            if fates[position] is Fate.RECOMPUTE:
                form = stored_form(problem, fates, position)
                for source in problem.step.items[position].inputs if form is None else (form,):
                    need[source] = max(need[source], need[position])
        return need

    def leave(self, node: Site, tick: int | None) -> int:
        """Distance from the first save of `node` to the last save before `tick`."""
        assert tick is not None, "every swapped item leaves at some tick"
        start = self._problem.starts[min(tick, len(self._problem.starts) - 1)]
        last = bisect.bisect_left(self._save_ops, start) - 1
        return max(max(self._save_sequences[: last + 1], default=0) - node.first_sequence, 0)

    def prefetch(self, position: int, tick: int | None) -> int:
        """Distance from the first read at or after `tick` to the first need of the item: earlier would cost memory."""
        assert tick is not None, "every swapped item is fetched at some tick"
        start = self._problem.starts[min(tick, len(self._problem.starts) - 1)]
        first = bisect.bisect_left(self._read_ops, start)
        return max(self._read_sequences[first] - self._need[position], 0)
