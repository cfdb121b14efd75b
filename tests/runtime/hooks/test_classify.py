"""What a saved tensor is, asked once: the record, and which tensors are the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.runtime.hooks.context import Parameters, Saved

HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("tensor", "is_plain", "is_movable"),
    [
        (torch.ones(3), True, True),
        (torch.ones(3)[1:], True, True),
        (torch.ones(0), True, False),
        (torch.ones(3, dtype=torch.complex64).conj(), True, False),
        (torch.ones(3, dtype=torch.complex64).conj().imag, True, False),
        (torch.ones(3).to_sparse(), False, False),
        (torch.ones(3, device="meta"), True, False),
    ],
    ids=["tensor", "view", "empty", "conjugate", "negative", "sparse", "another device"],
)
def test_a_record_says_what_a_fate_needs_to_know(tensor: torch.Tensor, is_plain: bool, is_movable: bool) -> None:
    saved = Saved(tensor, None, HOST)
    assert (saved.is_plain, saved.is_movable) == (is_plain, is_movable)
    assert (saved.storage is not None) == is_plain


def test_views_and_casts_of_parameters_are_the_models_own() -> None:
    layer = nn.Linear(3, 3)
    parameters = Parameters(nn.Sequential(layer))
    own = (layer.weight, layer.weight.t(), layer.weight.detach()[1:], layer.weight.to(torch.bfloat16))
    assert all(parameters.has(tensor, layer) for tensor in own)
    assert not parameters.has(layer(torch.ones(3)), layer)


def test_parameters_that_come_with_a_layer_are_found_once_it_runs() -> None:
    model, layer = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = Parameters(model)
    view = layer.weight.detach()
    assert not parameters.has(view, model)
    assert not parameters.has(view, layer)  # it is not looked for again within one layer
    parameters.forget_layer()
    assert parameters.has(view, layer)


def test_a_teacher_in_a_list_is_the_models_own() -> None:
    """Reached, and not registered: neither its parameters nor its buffers are activations."""
    student, teacher = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    student.teachers = [teacher]
    parameters = Parameters(student)
    weight, buffer = teacher[0].weight, teacher[1].running_mean
    assert all(parameters.has(tensor, student) for tensor in (weight, weight.t(), weight.detach(), buffer, buffer[1:]))
    assert not parameters.has(teacher(torch.ones(2, 3)), student)
