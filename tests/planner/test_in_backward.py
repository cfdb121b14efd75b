"""Gradients that are freed as they are used, in the account of a plan."""

from __future__ import annotations

import dataclasses

from lowtide.config.memory import load_memory
from lowtide.planner.in_backward import account_in_backward, gradients_in_flight, with_updates_in_backward
from lowtide.planner.plan_profile import plan_profile
from lowtide.report.budget_sweep import in_backward_lines
from lowtide.timeline.step import Link
from tests.support.profiles import MIB, decoder_profile

LINK = Link(out_bytes_per_second=20e9, in_bytes_per_second=20e9)
MEMORY = load_memory({"budget": 4096 * MIB})


def profile_of(num_layers: int = 4, temporaries: int = 0):
    profile = decoder_profile(num_layers)
    state = dataclasses.replace(profile.state, optimizer_movable=256 * MIB, optimizer_temporaries=temporaries)
    return dataclasses.replace(profile, state=state)


def test_a_bucket_is_there_until_the_gradient_after_it_has_come() -> None:
    profile = profile_of(1)
    num_ops = len(profile.op_names)
    names = ("f",) * (num_ops - 6) + ("c.mm", "c.add", "b.mm", "a.mm", "a.add", "a.mul")
    made = (0,) * (num_ops - 6) + (10, 10, 14, 20, 21, 21)
    profile = dataclasses.replace(profile, op_names=names, op_gradient_bytes=made)
    # c: 10, b: 4, a: 6 and 1. With room for 14 the gradients of c and b go once the first one of a has come.
    assert gradients_in_flight(profile, 14).tolist()[-6:] == [10, 10, 14, 20, 21, 21], "that of a is not added yet"
    assert gradients_in_flight(profile, 10).tolist()[-6:] == [10, 10, 14, 10, 11, 11], "c is gone when b's was added"
    assert gradients_in_flight(profile, 1).tolist()[-6:] == [10, 10, 14, 10, 11, 11]
    assert gradients_in_flight(profile, 100).tolist() == list(made)


def test_the_account_has_the_gradients_in_flight_and_three_buckets() -> None:
    profile = profile_of()
    account = {line.what: line for line in account_in_backward(profile, MEMORY, LINK)}
    in_flight = with_updates_in_backward(profile, LINK).op_gradient_bytes
    # A bucket is an eighth of the state: an eighth of the gradients, and what has come since, are there.
    assert max(in_flight) <= 16 * MIB + 128 * MIB // 25 + 1
    for column in ("plain_bytes", "planned_bytes"):
        found = {what: getattr(line, column) for what, line in account.items()}
        assert found["weights"] == 128 * MIB
        assert found["optimizer state"] == (3 * 32 * MIB if found["gradients"] else 0)
        assert found["gradients"] <= max(in_flight)
        assert sum(nbytes for what, nbytes in found.items() if what != "peak") == found["peak"]
    lines = in_backward_lines(tuple(account.values()), profile.state, LINK, 0.05)
    assert lines[2].split() == ["at", "the", "worst", "moment", "everything", "kept", "least"]
    assert lines[-1] == "copies: 256.0 MiB of state each way, 13.4 ms of the link, beside a backward pass of 50.0 ms"
    assert len(lines) == 4 + len(account)
    plan = plan_profile(profile, load_memory({"budget": 4096 * MIB, "optimizer": "swap"}), link=LINK)
    assert plan.predicted is not None
    assert account["peak"].planned_bytes < plan.predicted.floor_bytes


def test_the_state_on_the_device_and_the_gradients_are_all_that_differs() -> None:
    profile = profile_of(temporaries=64 * MIB)
    own = with_updates_in_backward(profile, LINK)
    beside = 64 * MIB // 8 + 3 * 32 * MIB
    assert own.state.optimizer == profile.state.optimizer - 256 * MIB
    assert (own.state.optimizer_movable, own.state.optimizer_temporaries) == (0, beside)
    for number, (one, other) in enumerate(zip(own.op_bytes, profile.op_bytes, strict=True)):
        made, in_flight = profile.op_gradient_bytes[number], own.op_gradient_bytes[number]
        assert one == other - made + in_flight + (beside if made else 0)
        assert 0 <= in_flight <= made
    assert own.state.gradients == own.op_gradient_bytes[-1] < profile.state.gradients
