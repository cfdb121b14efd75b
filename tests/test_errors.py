"""Errors for users: they go through process pools as they are. Their texts are tested where they are raised."""

from __future__ import annotations

import pickle

from lowtide.errors import BudgetError, PartialStepError, RecomputeRefusedError


def test_errors_survive_pickle() -> None:
    budget = pickle.loads(pickle.dumps(BudgetError("too small", floor_bytes=3, suggestions=("more",))))
    assert (str(budget), budget.floor_bytes, budget.suggestions) == ("too small", 3, ("more",))
    refused = pickle.loads(pickle.dumps(RecomputeRefusedError("no", "layers.0", can_stay=True)))
    stopped = pickle.loads(pickle.dumps(PartialStepError("half", bucket=2, can_resume=True)))
    assert (str(stopped), stopped.bucket, stopped.can_resume) == ("half", 2, True)
    assert (str(refused), refused.path, refused.can_stay) == ("no", "layers.0", True)
