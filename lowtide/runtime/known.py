"""The plans that an autopilot has made, by the shapes that they were made for.

What: `Known` is one of them: what was observed, the plan, and the tide that carries it out, at work or put aside.
`KnownPlans` holds the last sixteen that were used, and says which of them serves a batch (shapes.py).
Cost: profiles and tables stay in main memory, some megabytes a shape. Not covered: making plans.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.catalog.site import Profile
from lowtide.planner.plan import Plan
from lowtide.runtime.shapes import MOST_TIMES_LARGER, ShapeClass, smallest_cover
from lowtide.runtime.tide import Tide

_MAX_SHAPES = 16


@dataclass(slots=True)
class Known:
    """What is known about one shape class."""

    profile: Profile
    plan: Plan
    tide: Tide | None = None
    """The plan at work, or put aside; None if it never was."""
    serves_smaller: bool = False
    """No recipe of the plan has a size in it."""
    num_reviews: int = 0
    """How many planned steps were compared with their prediction."""
    unforeseen_bytes: int = 0

    @property
    def has_sizes(self) -> bool:
        """Whether a recipe of the plan holds for these shapes only."""
        return any(site.recipe is not None and not site.recipe.is_shape_free for site in self.plan.sites)

    def retire(self) -> None:
        """Its plan is not used again."""
        if self.tide is not None:
            self.tide.remove()
            self.tide = None


class KnownPlans:
    """By shape class; the one that was used last is the last."""

    def __init__(self) -> None:
        self._plans: OrderedDict[ShapeClass, Known] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[Known]:
        return iter(self._plans.values())

    def __getitem__(self, key: ShapeClass) -> Known:
        return self._plans[key]

    def add(self, key: ShapeClass, known: Known) -> None:
        """One more; the one that was not used for longest goes if there are too many."""
        self._plans[key] = known
        if len(self._plans) > _MAX_SHAPES:
            _, oldest = self._plans.popitem(last=False)
            oldest.retire()

    def use(self, key: ShapeClass) -> Known:
        """The one of `key`, which is the last to go now."""
        self._plans.move_to_end(key)
        return self._plans[key]

    def cover(self, shape: ShapeClass) -> ShapeClass | None:
        """The class whose plan is near enough to serve `shape`, or None. Of sixteen, any that covers it."""
        key = smallest_cover(shape, self._plans)
        if key is None or key == shape or self._plans[key].plan.does_nothing:
            return key
        is_near = key.times_larger(shape) <= MOST_TIMES_LARGER
        return key if is_near or len(self._plans) >= _MAX_SHAPES else None

    def largest_for(self, shape: ShapeClass) -> ShapeClass:
        """The class of the most elements, of the same kinds if there is one."""
        return max(self._plans, key=lambda known: (known.kinds == shape.kinds, known.num_elements))
