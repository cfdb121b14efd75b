"""Batches of many shapes: few plans serve them, no bit changes, no budget is passed, no rank waits for another."""

from __future__ import annotations

import warnings
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.runtime.session.shapes import ShapeBucket, shape_bucket, smallest_cover
from tests.runtime.autopilot.test_autopilot import assert_same, budget_of, gradients, optimize
from tests.support import two_ranks
from tests.support.virtual_engine import virtual

MOST = 96


def of(*shapes: tuple[int, ...], kinds: tuple = ()) -> ShapeBucket:
    return ShapeBucket(shapes, kinds)


def test_a_class_covers_what_is_nowhere_larger() -> None:
    assert of((4, 16), (16,)).covers(of((4, 16), (16,)))
    assert of((4, 16), (16,)).covers(of((3, 9), (9,)))
    assert not of((4, 16), (16,)).covers(of((5, 9), (9,)))
    assert not of((4, 16)).covers(of((4,)))
    assert not of((4, 16), kinds=(torch.int64,)).covers(of((4, 16), kinds=(torch.float32,)))


def test_of_several_covers_the_smallest_is_taken() -> None:
    known = [of((4, 64)), of((8, 16)), of((4, 24)), of((2, 2))]
    assert smallest_cover(of((4, 20)), known) == of((4, 24))
    assert smallest_cover(of((8, 16)), known) == of((8, 16))
    assert smallest_cover(of((8, 17)), known) is None
    assert of((4, 64), (64,)).times_larger(of((4, 32), (8,))) == 8.0


def test_the_class_of_inputs_is_that_of_all_their_tensors() -> None:
    x = torch.zeros(2, 3)
    found = shape_bucket((x, [x[0], 7]), {"mask": x.bool()})
    assert found.shapes == ((2, 3), (3,), (2, 3))
    assert found.kinds[:3] == (torch.float32, torch.float32, torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        assert not found.covers(shape_bucket((x, [x[0], 7]), {"mask": x.bool()}))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, use_cache=False, **sizes)).train()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=MOST, use_cache=False)
    return GPT2LMHeadModel(config).train()


def step(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Loss, gradients and random state of one step."""
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return [loss.detach().clone(), *gradients(model), torch.get_rng_state()]


def text(length: int, num_rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (num_rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, length // 2 :] = 0  # padded, as batches of several lengths are
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("build", [pytest.param(llama, marks=pytest.mark.extended), gpt2])
def test_batches_of_random_lengths(build: Any) -> None:
    """Dropout in gpt2: its numbers come from the same places of the generator."""
    draw = Random(7)
    batches = [text(draw.randint(12, MOST), draw.choice([1, 2, 2, 2])) for _ in range(24)]
    truth_model = build()
    torch.manual_seed(5)
    truth = [step(truth_model, batch) for batch in batches]
    model = build()
    budget = budget_of(model, text(MOST), 0.3)
    torch.manual_seed(5)
    with optimize(model, budget, engine=virtual(3)) as tide:
        for batch, plain in zip(batches, truth, strict=True):
            assert_same(step(model, batch), plain)
            assert tide.stats is not None and tide.stats.num_divergences == 0
        num_shapes = len({batch["input_ids"].shape for batch in batches})
        num_observed = sum(event.why in ("first step", "new shape") for event in tide.events)
        assert num_observed <= num_shapes // 3
        for length in (MOST, MOST - 1, 61, 40, 13):
            step(model, text(length))
            model.zero_grad(set_to_none=True)
            with tide.tide.audit() as audit:
                model(**text(length)).loss.backward()
            assert audit.peak_bytes <= budget


def test_what_is_written_is_not_changed_for_other_shapes() -> None:
    """In a file each op keeps the fate that it was given. Recipes with sizes in them follow those of each pass."""
    truth_model, model = llama(), llama()
    whole = {"recompute_config": {"recompute": [1]}, "swap_config": {"swap": False}}
    with lowtide.apply(model, whole, engine=virtual(3)) as tide:
        for length in (40, 31, 24, 40):
            assert_same(step(model, text(length)), step(truth_model, text(length)))
        assert [event.why for event in tide.events] == ["first step"]
    sized = {"recompute_config": {"select_recompute": [r"attention\.apply_rotary_emb"]}}
    with lowtide.apply(model, sized, engine=virtual(3)) as tide:
        for length in (40, 31, 40):
            assert_same(step(model, text(length)), step(truth_model, text(length)))
            assert tide.stats is not None and tide.stats.num_divergences == 0
            assert tide.stats.recomputed_bytes > 0
        assert [event.why for event in tide.events] == ["first step"]


# ---------------------------------------------------------------------------------------------------------------------
# Ranks

PATIENT, IMPATIENT = 600.0, 1.0
"""Seconds: longer than the tests wait for an answer, and shorter than a job waits for a rank that does not come."""


class Averaged(nn.Module):
    """A model that exchanges data with other ranks in its own forward and backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_reduce

        loss = self.inner(input_ids=input_ids, **more).loss
        return all_reduce(loss)


def _train(model: nn.Module, lengths: list[int], *, synchronize: bool, patience_seconds: float = PATIENT) -> dict:
    """Steps under a budget; gradients are averaged after each, as data parallelism does. Ranks wait so long for one
    another."""
    truth = Averaged() if isinstance(model, Averaged) else llama()
    plain = []
    for length in lengths:
        plain.append(step(truth, text(length)))
        _exchange(truth, synchronize)
    budget = budget_of(model, text(max(lengths)), 0.4)
    with warnings.catch_warnings(record=True) as caught, optimize(model, budget) as tide:
        warnings.simplefilter("always")
        tide.source.planner.consensus._patience_seconds = patience_seconds
        peaks = []
        for length, expected in zip(lengths, plain, strict=True):
            assert_same(step(model, text(length)), expected)
            _exchange(model, synchronize)
            peaks.append(tide.plan.predicted.plain_peak_bytes)
        return {
            "first_peak": peaks[0],
            "whys": [event.why for event in tide.events],
            "digests": [event.digest for event in tide.events],
            "warnings": [str(w.message) for w in caught if "on this rank alone" in str(w.message)],
        }


def _exchange(model: nn.Module, synchronize: bool) -> None:
    for parameter in model.parameters() if synchronize else ():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def _late(rank: int, model: nn.Module) -> dict:
    """The ranks part company after two steps."""
    lengths = [40, 40, 60, 60, 40] if rank == 0 else [40, 40, 40, 70, 40]
    return _train(model, lengths, synchronize=not isinstance(model, Averaged), patience_seconds=IMPATIENT)


def different(rank: int) -> dict:
    """Rank 0: one length; rank 1: new ones all the time."""
    return _train(llama(), [48] * 6 if rank == 0 else [40, 60, 30, 70, 90, 20], synchronize=True)


def same(rank: int) -> dict:
    return _train(llama(), [40, 40, 60, 60, 24, 40], synchronize=True)


def late(rank: int) -> dict:
    return _late(rank, llama())


def collectives(rank: int) -> dict:
    return _late(rank, Averaged())


JOBS = ("different", "same", "late", "collectives")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, dict]]:
    """What the two ranks say of each job."""
    answers = two_ranks.run(__name__, [(name, {}) for name in JOBS], tmp_path_factory.mktemp("ranks"))
    return dict(zip(JOBS, answers, strict=True))


def test_two_ranks_with_batches_of_different_lengths_do_not_wait_for_each_other(said: dict) -> None:
    first, second = said["different"]
    assert first["whys"][0] == second["whys"][0] == "first step"
    assert first["whys"].count("new shape") == 0
    assert second["whys"].count("new shape") == 3
    # The plan of the larger batch is the first rank's alone.
    assert first["first_peak"] > second["first_peak"]


def test_two_ranks_with_the_same_batches_follow_the_same_plans(said: dict) -> None:
    first, second = said["same"]
    assert first["whys"] == second["whys"]
    assert first["digests"] == second["digests"]
    assert first["whys"].count("new shape") == 1


def test_ranks_that_part_company_go_on_alone(said: dict) -> None:
    first, second = said["late"]
    assert first["whys"].count("new shape") == second["whys"].count("new shape") == 1
    assert not first["warnings"]


def test_a_model_with_collectives_is_not_observed_by_one_rank_alone(said: dict) -> None:
    first, second = said["collectives"]
    assert first["whys"].count("new shape") == second["whys"].count("new shape") == 0
    assert len(first["warnings"]) == len(second["warnings"]) == 1
    assert first["warnings"][0] == (
        "lowtide: inputs of ((2, 60), (2, 60), (2, 60)) on this rank alone, while the model exchanges data with other "
        "ranks in its forward pass, so no step can be observed for them; they run under the plan for "
        "((2, 40), (2, 40), (2, 40)), and the guard keeps the limit. Begin with the largest batch, or pad to common "
        "lengths."
    )
