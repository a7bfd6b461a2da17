"""What a model holds, and the memory that a check of it needs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paritas.core.execution import fitting
from paritas.core.execution.blocks import count_kinds
from paritas.core.execution.fitting import describe_shortage, measure_model


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_what_modules_share_counts_once_and_buffers_are_no_parameters():
    model_size = measure_model([Tied(), Tied()], gradients=False)
    assert (model_size.parameters, model_size.nbytes) == (2 * 16, 2 * (16 * 4 + 8))
    tied = Tied()
    assert measure_model([tied, tied.first], gradients=False).parameters == 16


@pytest.mark.parametrize(("gradients", "copies"), [(False, 1.5), (True, 8)])
def test_float64_takes_its_copies_beside_one_of_the_model(gradients, copies):
    model_size = measure_model([Tied()], gradients=gradients)
    assert model_size.needed == 16 * 4 + 8 + copies * 16 * 8


def test_the_dtype_is_that_of_most_numbers():
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8))
    assert measure_model([model], gradients=True).dtype is torch.bfloat16
    assert measure_model([nn.Linear(2, 2).double()], gradients=True).dtype is None


def test_nothing_is_needed_for_no_parameters_or_for_those_that_are_not_there_yet():
    for modules in ([], [nn.ReLU()], [nn.LazyLinear(3)]):
        model_size = measure_model(modules, gradients=True)
        assert (model_size.parameters, model_size.needed) == (0, 0)
        assert model_size.device.type == "cpu"


def test_a_model_is_too_large_if_it_needs_more_than_is_free(monkeypatch):
    needed = measure_model([Tied()], gradients=True).needed
    monkeypatch.setattr(fitting, "free_bytes", lambda _: needed)
    assert describe_shortage(Tied(), gradients=True)[0] == ""
    monkeypatch.setattr(fitting, "free_bytes", lambda _: needed - 1)
    assert describe_shortage(Tied(), gradients=True)[0] == (
        "the whole model needs about 1.1 kB, 1.09 kB are free on cpu"
    )
    monkeypatch.setattr(fitting, "free_bytes", lambda _: None)
    assert describe_shortage(Tied(), gradients=True)[0] == ""


def test_blocks_that_differ_only_in_their_weights_are_of_one_kind():
    alike = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    assert count_kinds(alike) == 1
    other_size, other_parts = nn.Sequential(nn.Linear(4, 5)), nn.Sequential(nn.Linear(4, 4))
    assert count_kinds([*alike, other_size, other_parts]) == 3
