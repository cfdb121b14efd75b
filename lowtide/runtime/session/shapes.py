"""The plans of one model, by the shapes of the inputs that they were made for.

What: `ShapePlan` is one of them: the profile of the observed step, the plan, and the tide that carries it out, in force
or not. `PlanTable` holds the last sixteen that were used, and says which of them can be used for a batch.
Cost: profiles and tables stay in main memory, some megabytes a shape. Not covered: making plans.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.modes import autocasts
from lowtide.tensors.private import tree_leaves

MOST_TIMES_LARGER = 2.0
"""A plan serves no batch of which some tensor is smaller than this part of what it was made for."""

_MAX_SHAPES = 16


@dataclass(slots=True)
class ShapePlan:
    """The plan for one shape bucket. The last six fields are an autopilot's (runtime/autopilot)."""

    profile: Profile
    plan: Plan
    tide: Tide | None = None
    """The plan at work, or put aside; None if it never was."""
    num_reviews: int = 0
    """How many planned steps were compared with their prediction."""
    unforeseen_bytes: int = 0
    """What steps took beyond the prediction: it is taken from the budget."""
    loop_bytes: int = 0
    """The part of the profile's bytes that the loop takes between forward and backward, as it was measured."""
    has_more_loop_bytes: bool = False
    """The profile has got more of them since the plan was made."""
    misfits: dict[bool, int] = field(default_factory=dict)
    """Saved tensors that a plan of it did not expect: in the last forward pass that was the first under its plan
    (False), and in the last one that was not."""

    @property
    def has_sizes(self) -> bool:
        """Whether a recipe of the plan holds for these shapes only."""
        recipes = [site.recipe for site in self.plan.sites if site.recipe is not None]
        return any(not recipe.can_follow_sizes for recipe in recipes)

    def retire(self) -> None:
        """Its plan is not used again."""
        if self.tide is not None:
            self.tide.remove()
            self.tide = None

    def replace(self, plan: Plan) -> None:
        """Another plan."""
        self.retire()
        self.plan = plan
        self.has_more_loop_bytes = False


class PlanTable:
    """By shape bucket; the one that was used last is the last."""

    def __init__(self) -> None:
        self._plans: OrderedDict[ShapeBucket, ShapePlan] = OrderedDict()
        self._has_warned = False
        self._ignored_numbers: set[int] = set()
        """Places of numbers among the inputs that change nothing."""
        self.untrained: set[int] = set()
        """States of the model in which nothing is trained, as while the other model of a pair learns."""

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[ShapePlan]:
        return iter(self._plans.values())

    def __getitem__(self, key: ShapeBucket) -> ShapePlan:
        return self._plans[key]

    def add(self, key: ShapeBucket, known: ShapePlan) -> None:
        """One more; the one that was not used for longest goes if there are too many."""
        self._plans[key] = known
        if len(self._plans) > _MAX_SHAPES:
            _, oldest = self._plans.popitem(last=False)
            oldest.retire()

    def bucket(self, args: tuple, kwargs: dict, *, model: int = 0) -> ShapeBucket:
        """The key of a plan for these inputs, and for this state of the model."""
        return shape_bucket(args, kwargs, model=model, ignored=self._ignored_numbers)

    def is_of_new_model(self, key: ShapeBucket) -> bool:
        """Whether all plans were made for other states of the model."""
        return bool(self._plans) and all(known.model != key.model for known in self._plans)

    def same_but_numbers(self, key: ShapeBucket, profile: Profile) -> ShapeBucket | None:
        """The known bucket that differs from `key` in numbers alone, and whose observed step did the same as the one
        of `profile`; None without one. The numbers in which they differ are left out of keys from then on."""
        for known, shape in self._plans.items():
            if (known.shapes, known.kinds) == (key.shapes, key.kinds) and _does_the_same(profile, shape.profile):
                self._ignored_numbers |= {place for place, _ in set(known.numbers) ^ set(key.numbers)}
                return known
        return None

    def clear(self) -> None:
        """None is used again: the model is another one, or the end has come."""
        for known in self._plans.values():
            known.retire()
        self._plans.clear()

    def use(self, key: ShapeBucket) -> ShapePlan:
        """The one of `key`, which is the last to go now."""
        self._plans.move_to_end(key)
        return self._plans[key]

    def cover(self, shape: ShapeBucket) -> ShapeBucket | None:
        """The bucket whose plan is near enough to serve `shape`, or None. Of sixteen, any that covers it."""
        key = smallest_cover(shape, self._plans)
        if key is None or key == shape or self._plans[key].plan.does_nothing:
            return key
        is_near = key.times_larger(shape) <= MOST_TIMES_LARGER
        return key if is_near or len(self._plans) >= _MAX_SHAPES else None

    def largest_for(self, shape: ShapeBucket, beside: str = "") -> ShapeBucket:
        """The bucket for inputs that no plan was made for, and that cannot be observed: that of the most elements, of
        the same kinds if there is one. Warns once; `beside` says what else helps."""
        key = max(self._plans, key=lambda known: (known.is_alike(shape), known.num_elements))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"lowtide: inputs of {shape.shapes} on this rank alone, while the model exchanges data with other "
                "ranks in its forward pass, so no step can be observed for them; they run under the plan for "
                f"{key.shapes}{beside}. Begin with the largest batch, or pad to common lengths.",
                stacklevel=2,
            )
        return key


@dataclass(frozen=True, slots=True)
class ShapeBucket:
    """What a plan was made for: the shapes of a batch, and what else decides which operators run."""

    shapes: tuple[tuple[int, ...], ...]
    """Sizes of every tensor in the inputs, in the order of `torch.utils._pytree`."""
    kinds: tuple[Any, ...]
    """Names of keyword inputs; dtypes, and which tensors need gradients; flags and words, or types of what else there
    is; and which autocasts are on, to which dtype."""
    numbers: tuple[tuple[int, float], ...] = ()
    """Numbers among the inputs, by their place."""
    model: int = 0
    """The number of the model's state (runtime/autopilot/model_state.py)."""

    def is_alike(self, other: ShapeBucket) -> bool:
        """Whether they may differ in shapes alone."""
        return (self.kinds, self.numbers, self.model) == (other.kinds, other.numbers, other.model)

    def covers(self, other: ShapeBucket) -> bool:
        """Whether a batch of `other` is like one of this, and nowhere larger."""
        if not self.is_alike(other):
            return False
        pairs = zip(self.shapes, other.shapes, strict=True)
        return all(len(own) == len(their) and all(map(int.__ge__, own, their)) for own, their in pairs)

    def times_larger(self, other: ShapeBucket) -> float:
        """The largest ratio of two tensors' numbers of elements; `other` must be covered."""
        pairs = zip(self.shapes, other.shapes, strict=True)
        return max((math.prod(own) / max(1, math.prod(their)) for own, their in pairs), default=1.0)

    @property
    def num_elements(self) -> int:
        """Of all tensors together."""
        return sum(map(math.prod, self.shapes))


def shape_bucket(args: tuple, kwargs: dict, *, model: int = 0, ignored: Collection[int] = ()) -> ShapeBucket:
    """What a plan for a model's inputs is made for. Numbers at the places `ignored` decide nothing."""
    shapes: list[tuple[int, ...]] = []
    kinds: list[Any] = []
    numbers: list[tuple[int, float]] = []
    for place, leaf in enumerate(tree_leaves((args, kwargs))):
        if isinstance(leaf, torch.Tensor):
            shapes.append(_sizes(leaf))
            kinds.append((leaf.dtype, True) if leaf.requires_grad else leaf.dtype)
        elif isinstance(leaf, bool | str) or leaf is None:
            kinds.append(leaf)
        elif isinstance(leaf, int | float):
            if place not in ignored:
                numbers.append((place, leaf))
        else:
            kinds.append(type(leaf))
    return ShapeBucket(tuple(shapes), (*kinds, *kwargs, *autocasts()), tuple(numbers), model)


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of a nested tensor, whose own sizes are no numbers: how many parts it has, and the sizes of all together."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    is_jagged = tensor.layout is torch.jagged
    return (tensor.size(0), *(tensor.values().shape if is_jagged else (tensor.numel(),)))


def smallest_cover(shape: ShapeBucket, known: Iterable[ShapeBucket]) -> ShapeBucket | None:
    """Of the known buckets that cover `shape`, the one with the fewest elements; itself if it is known."""
    return min((other for other in known if other.covers(shape)), key=lambda other: other.num_elements, default=None)


def _does_the_same(one: Profile, other: Profile) -> bool:
    """Whether two observed steps ran the same operators, and saved the same."""
    sites = ([(site.name, site.nbytes) for site in profile.sites] for profile in (one, other))
    return one.op_names == other.op_names and next(sites) == next(sites)
