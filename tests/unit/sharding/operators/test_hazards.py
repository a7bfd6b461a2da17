"""A rule that would crash torch becomes a finding and does not end the process."""

from __future__ import annotations

import torch

from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.results.findings import Status
from paritas.core.results.items import Partial, Shard
from paritas.sharding.operators.recipe_checks import check_recipe


def test_keys_without_their_values_are_different_and_do_not_crash_the_process():
    torch.manual_seed(0)
    args = tuple(torch.randn(2, 4, 8, 16) for _ in range(3))
    call = OperatorCall(torch.nn.functional.scaled_dot_product_attention, args)
    recipe = Recipe(inputs=((1, Shard(2)),), outputs=(Partial("sum"),))
    verdict = check_recipe(call, recipe)
    assert verdict.status is Status.DIFFERENT
    assert "got 4 keys and 8 values" in str(verdict)
