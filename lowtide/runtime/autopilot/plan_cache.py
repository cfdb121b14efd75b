"""The plans that an autopilot has made, by the shapes that they were made for.

What: `CachedPlan` is one of them: what was observed, the plan, and the tide that carries it out, in force or not.
`PlanCache` holds the last sixteen that were used, and says which of them can be used for a batch.
Cost: profiles and tables stay in main memory, some megabytes a shape. Not covered: making plans.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.core.decisions import Prediction
from lowtide.core.plan import Plan
from lowtide.core.profile import Profile
from lowtide.runtime.autopilot.contest import SOLVERS, Contest
from lowtide.runtime.autopilot.race import Pace
from lowtide.runtime.session.tide import Tide
from lowtide.tensors.private import tree_leaves

MOST_TIMES_LARGER = 2.0
"""A plan serves no batch of which some tensor is smaller than this part of what it was made for."""

_MAX_SHAPES = 16


@dataclass(slots=True)
class CachedPlan:
    """What is known about one shape bucket."""

    profile: Profile
    plan: Plan
    tide: Tide | None = None
    """The plan at work, or put aside; None if it never was."""
    serves_smaller: bool = False
    """No recipe of the plan holds for one shape only."""
    num_reviews: int = 0
    """How many planned steps were compared with their prediction."""
    unforeseen_bytes: int = 0
    loop_bytes: int = 0
    """What the profile has for what the loop does between forward and backward, as it was measured (peaks.py)."""
    has_more_loop_bytes: bool = False
    """The profile has got more of them since the plan was made."""
    name: str = SOLVERS
    """What the plan is called in a race."""
    before: Plan | None = None
    """What the plan was before it was corrected; None where it was not, or that is no plan any more."""
    is_raced: bool = False
    """It need not race, or not again."""
    contest: Contest | None = None
    """The race that is under way; the plan in force is that of whose turn it is."""
    rivals: dict[str, Plan] | None = None
    """What the plan has raced with."""
    pace: Pace | None = None
    """Of the plan that has won."""
    result: str = ""
    """Of the last race, in words."""
    measured: Prediction | None = None
    """What the plan that has won says by what its steps in the race took; None before, and where nobody timed them."""

    @property
    def has_sizes(self) -> bool:
        """Whether a recipe of the plan, or of one that it races with, holds for these shapes only."""
        plans = [self.plan] if self.contest is None else [entrant.plan for entrant in self.contest.entrants]
        recipes = ((site.recipe, plan.check != "sampled") for plan in plans for site in plan.sites)
        return any(recipe is not None and not recipe.serves_all(is_proven=full) for recipe, full in recipes)

    def retire(self) -> None:
        """Its plan is not used again, and no race that it is in goes on."""
        if self.contest is not None:
            self.contest.retire(but=None)
            self.contest = None
        if self.tide is not None:
            self.tide.remove()
            self.tide = None

    def replace(self, plan: Plan) -> None:
        """Another plan, which has not raced."""
        self.retire()
        self.plan, self.name, self.before, self.rivals, self.pace, self.result = plan, SOLVERS, None, None, None, ""
        self.measured = None
        self.is_raced = self.has_more_loop_bytes = False


class PlanCache:
    """By shape bucket; the one that was used last is the last."""

    def __init__(self) -> None:
        self._plans: OrderedDict[ShapeBucket, CachedPlan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[CachedPlan]:
        return iter(self._plans.values())

    def __getitem__(self, key: ShapeBucket) -> CachedPlan:
        return self._plans[key]

    def add(self, key: ShapeBucket, known: CachedPlan) -> None:
        """One more; the one that was not used for longest goes if there are too many."""
        self._plans[key] = known
        if len(self._plans) > _MAX_SHAPES:
            _, oldest = self._plans.popitem(last=False)
            oldest.retire()

    def use(self, key: ShapeBucket) -> CachedPlan:
        """The one of `key`, which is the last to go now."""
        self._plans.move_to_end(key)
        return self._plans[key]

    def cover(self, shape: ShapeBucket) -> ShapeBucket | None:
        """The class whose plan is near enough to serve `shape`, or None. Of sixteen, any that covers it."""
        key = smallest_cover(shape, self._plans)
        if key is None or key == shape or self._plans[key].plan.does_nothing:
            return key
        is_near = key.times_larger(shape) <= MOST_TIMES_LARGER
        return key if is_near or len(self._plans) >= _MAX_SHAPES else None

    def largest_for(self, shape: ShapeBucket) -> ShapeBucket:
        """The class of the most elements, of the same kinds if there is one."""
        return max(self._plans, key=lambda known: (known.kinds == shape.kinds, known.num_elements))


@dataclass(frozen=True, slots=True)
class ShapeBucket:
    """The shapes of a batch, and what else decides which operators run."""

    shapes: tuple[tuple[int, ...], ...]
    """Sizes of every tensor in the inputs, in the order of `torch.utils._pytree`."""
    kinds: tuple[Any, ...]
    """Their dtypes, and which autocasts are on, to which dtype."""

    def covers(self, other: ShapeBucket) -> bool:
        """Whether a batch of `other` is like one of this, and nowhere larger."""
        if self.kinds != other.kinds:
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


def shape_bucket(args: tuple, kwargs: dict) -> ShapeBucket:
    """The class of a model's inputs."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return ShapeBucket(tuple(tuple(t.shape) for t in tensors), (*(t.dtype for t in tensors), *_autocasts()))


def _autocasts() -> Iterator[tuple[str, torch.dtype]]:
    """The autocasts that are on: on which type of device, to what."""
    accelerator = torch.accelerator.current_accelerator()
    for device_type in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            yield device_type, torch.get_autocast_dtype(device_type)


def smallest_cover(shape: ShapeBucket, known: Iterable[ShapeBucket]) -> ShapeBucket | None:
    """Of the known classes that cover `shape`, the one with the fewest elements; itself if it is known."""
    return min((other for other in known if other.covers(shape)), key=lambda other: other.num_elements, default=None)
