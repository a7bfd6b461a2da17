"""Dropout under a plan."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from paritas.core.results.findings import Status
from paritas.sharding.plans.plan import DropoutMode
from paritas.sharding.plans.verify import verify_parallel

BATCH = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    """Attention over heads with dropout of its weights and of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        q, k, v = (
            part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
        return x + self.drop(self.o(heads.transpose(1, 2).flatten(2)))


STYLES = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}


def test_dropout_of_shards_passes():
    verdict = verify_parallel(Attention(), STYLES, [BATCH], steps=1)
    assert verdict.passed, str(verdict)
    assert verdict.notes[-1] == (
        "dropout was switched off, and checked in float64 with masks that depend on the masked "
        "values; the numbers that ranks draw were not compared"
    )


def test_another_probability_on_the_ranks_is_found():
    def plan(model, mesh):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model[1].p = 0.1

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    verdict = verify_parallel(model, plan, [BATCH], steps=1)
    assert verdict.status is Status.DIFFERENT
    assert verdict.failures[0].origin.name == "1"
    assert verdict.failures[0].reason.startswith("with dropout: ")


@pytest.mark.parametrize("kind", ["first", "second"])
def test_masks_keep_about_as_much_as_asked_and_do_not_depend_on_rounding(kind):
    values = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with DropoutMode(kind):
        whole = F.dropout(values, 0.25)
        again = F.dropout(values[5000:] * (1 + 2**-52), 0.25)
        constant = F.dropout(torch.tensor([1.0, 1 - 2**-53], dtype=torch.float64), 0.25)
    assert abs(float((whole != 0).double().mean()) - 0.75) < 0.02
    assert torch.equal(whole[5000:] != 0, again != 0)
    assert bool(constant[0] == 0) is bool(constant[1] == 0)
    torch.testing.assert_close(whole[whole != 0], values[whole != 0] / 0.75)


def test_two_kinds_of_masks_differ():
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    masks = []
    for kind in ("first", "second"):
        with DropoutMode(kind):
            masks.append(F.dropout(values) != 0)
    assert not torch.equal(*masks)
