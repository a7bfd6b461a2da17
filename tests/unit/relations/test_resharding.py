"""Distributed checkpoints on another number of ranks: what is lost on the way is found."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint

import paritas
from paritas.core.results.findings import Status
from paritas.relations import resharding

WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
FURTHER = pytest.mark.skipif(not WHOLE, reason="PARITAS_WHOLE_CORPUS")


class Tied(nn.Module):
    """Seven rows, which no number of ranks divides; a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.embed(x).mean(1)))


def report(monkeypatch, before, after):
    monkeypatch.setattr(resharding, "PAIRS", ((before, after),))
    torch.manual_seed(0)
    return paritas.invariants(Tied(), [torch.randint(0, 7, (4, 5))], only=["reshard"])


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(3, 2, marks=FURTHER), (2, 1)])
def test_a_checkpoint_is_the_same_on_another_number_of_ranks(monkeypatch, before, after):
    assert report(monkeypatch, before, after).verdict.status is Status.IDENTICAL


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        pytest.param("a shard is not loaded", "embed.weight", marks=FURTHER),
        ("a stale optimizer", "exp_avg_sq of embed.weight"),
        pytest.param("shards of another rank", "embed.weight", marks=FURTHER),
    ],
)
@pytest.mark.usefixtures("undiagnosed")
def test_what_is_lost_on_the_way_is_found(monkeypatch, spoil, name):
    load = checkpoint.load

    def spoiled(state, **how):
        weight = state["model"]["embed.weight"].to_local()
        moments = state["optimizer"]["state"]["embed.weight"]["exp_avg_sq"].to_local()
        before, stale = weight.clone(), moments.clone()
        load(state, **how)
        rank = torch.distributed.get_rank()
        if spoil == "a shard is not loaded" and rank == 1:
            weight.copy_(before)
        if spoil == "a stale optimizer":
            moments.copy_(stale)
        if spoil == "shards of another rank":
            weight.copy_(weight.flip(0))

    monkeypatch.setattr(checkpoint, "load", spoiled)
    found = report(monkeypatch, 4, 2)
    assert found.verdict.status is Status.DIFFERENT
    assert name in str(found)
