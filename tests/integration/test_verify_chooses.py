"""verify() without `by`: as a whole or by blocks, whichever costs less and decides."""

import copy

import pytest
import torch
from torch import nn

import paritas
from paritas import Inputs, Status, VerifyConfig
from paritas.core.execution import fitting

QUIET = VerifyConfig(raise_on_mismatch=False, locate_seconds=0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, cache=None):
        if cache is not None:
            cache.append(x.sum())
        return x + self.second(self.first(x).relu())


class Model(nn.Module):
    fills_cache = False

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        cache = [] if self.fills_cache else None
        for layer in self.layers:
            x = layer(x, cache)
        return self.head(x)


@pytest.fixture
def large(monkeypatch):
    """Models of any size count as large."""
    monkeypatch.setattr(fitting, "LARGE_MODEL", 1)


def check(model, candidate):
    return paritas.verify(Inputs((torch.randn(3, 8),)), model, candidate, QUIET)


def is_by_blocks(verdict) -> bool:
    return any(finding.item.graph == "layers.1" for finding in verdict.findings)


def test_a_large_model_of_alike_blocks_is_checked_by_blocks_and_a_note_says_why(large):
    model = Model()
    verdict = check(model, copy.deepcopy(model))
    assert verdict.status is Status.IDENTICAL
    assert is_by_blocks(verdict)
    assert verdict.notes[0] == (
        "checked by blocks, which compiles less and takes less memory: 5 of its blocks are alike, "
        "and it has 1,436 parameters; by='whole' checks it as a whole"
    )


def test_a_small_model_is_checked_as_a_whole():
    model = Model()
    assert not is_by_blocks(check(model, copy.deepcopy(model)))


def test_a_few_blocks_are_checked_as_a_whole(large):
    model = Model(3)
    assert not is_by_blocks(check(model, copy.deepcopy(model)))


def test_a_fault_in_a_block_is_found_at_that_block_without_the_whole(large):
    model = Model()
    candidate = copy.deepcopy(model)
    candidate.layers[2].second.weight.data[3] *= 1.001
    verdict = check(model, candidate)
    assert verdict.status is Status.DIFFERENT
    assert {f.item.graph for f in verdict.failures if f.item.graph} == {"layers.2"}


def test_a_model_that_cannot_be_cut_is_checked_as_a_whole(large):
    model = Model()
    model.fills_cache = True
    verdict = check(model, copy.deepcopy(model))
    assert verdict.status is Status.IDENTICAL
    assert not is_by_blocks(verdict)


def test_a_fault_that_no_piece_shows_is_decided_by_the_whole(large):
    """The candidate computes something else only where all its own blocks run."""
    model = Model()
    candidate = copy.deepcopy(model)

    def forward(x):
        x = Model.forward(candidate, x)
        return x * 1.01 if all(type(layer) is Layer for layer in candidate.layers) else x

    candidate.forward = forward
    verdict = check(model, candidate)
    assert verdict.status is Status.DIFFERENT
    assert not is_by_blocks(verdict)
