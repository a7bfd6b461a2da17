"""Which modules are blocks, and what a cut shows of a block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paritas.core.errors import UsageError
from paritas.core.execution.blocks import find_blocks
from paritas.core.execution.cut_models import (
    ReachedInsideError,
    find_passages,
    make_cut,
    make_rest,
    replaced_modules,
)
from paritas.core.execution.observation import MOST_KEPT, keep_gradient


def test_a_large_gradient_is_kept_as_sums_that_show_which_of_them_are_not_finite():
    gradient = torch.randn(MOST_KEPT + 1, generator=torch.Generator().manual_seed(0))
    assert keep_gradient(gradient).isfinite().all()
    # Their sums are beyond float64, and they are not.
    assert (
        keep_gradient(torch.full((4 * MOST_KEPT,), 1.7e308, dtype=torch.float64)).isfinite().all()
    )
    plain = keep_gradient(gradient)
    gradient[5], gradient[2 * len(plain) + 9] = torch.nan, torch.inf
    sums = keep_gradient(gradient)
    assert (~sums.isfinite()).nonzero().flatten().tolist() == [5, 9]
    assert sums[5].isnan()
    assert sums[9].isinf()
    assert torch.allclose(sums[10:], plain[10:])


def layer(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module, table: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(16)
        if table:
            self.table = nn.Embedding(table, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.layers:
            x = one(x)
        return self.norm(x)


def names(model: nn.Module, patterns: list[str] | None = None) -> list[str]:
    return list(find_blocks({"": model}, patterns))


def test_repeated_modules_are_blocks_and_small_ones_around_them_are_not():
    assert names(Stack(layer(), layer(), layer())) == ["layers.0", "layers.1", "layers.2"]


def test_a_large_module_outside_of_the_layers_is_a_block_of_its_own():
    assert names(Stack(layer(), layer(), table=100)) == ["layers.0", "layers.1", "table"]


def test_stages_that_all_differ_are_searched_for_their_own_layers():
    small = nn.Sequential(*(layer(4) for _ in range(2)))
    large = nn.Sequential(*(layer(8) for _ in range(3)))
    huge = nn.Sequential(*(layer(16) for _ in range(2)))
    found = names(nn.ModuleList([small, large, huge]))
    assert found == ["0.0", "0.1", "1.0", "1.1", "1.2", "2.0", "2.1"]


def test_experts_inside_of_equal_layers_stay_parts_of_them():
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(layer() for _ in range(4))

    assert names(Stack(Mixture(), Mixture())) == ["layers.0", "layers.1"]


def test_single_operators_are_no_blocks():
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []


def test_a_glob_names_the_outermost_modules_that_it_matches():
    model = Stack(layer(), layer())
    assert names(model, ["layers.*"]) == ["layers.0", "layers.1"]
    assert names(model, ["layers.1", "norm"]) == ["layers.1", "norm"]
    with pytest.raises(UsageError, match=r"no module of the model matches 'layer\.\*'"):
        names(model, ["layer.*"])


def test_the_rest_takes_what_blocks_get_and_leaves_the_model_as_it_was():
    model = Stack(layer(), layer())
    blocks = find_blocks({"": model})
    cuts = {name: make_cut(block, name) for name, block in blocks.items()}
    x, one, two = torch.randn(3, 2, 16)
    with replaced_modules({"": model}, [(blocks[name], cuts[name]) for name in blocks]):
        assert isinstance(model.layers[0], nn.Sequential)
        assert dict(model.named_parameters()).keys() == {"norm.weight", "norm.bias"}
        rest = make_rest(model, cuts)
        given = {"layers.0": [one], "layers.1": [two]}
        result, taken = rest(x, results_of_blocks=given)
    assert torch.equal(result, model.norm(two))
    assert taken["layers.0"] == [([x], {})]
    assert taken["layers.1"][0][0][0] is one
    assert find_passages(given, taken) == {
        ("layers.1", 0): (("layers.0", "returns", 0, ""),),
    }
    assert model.layers[0] is blocks["layers.0"]
    assert not cuts["layers.0"].cut_taken


def test_a_cut_has_plain_attributes_of_its_block_but_none_of_its_parameters():
    block = nn.Linear(4, 4)
    block.kind = "sliding"
    cut = make_cut(block, "layers.0")
    assert (cut.kind, cut.in_features, hasattr(nn.Linear, "extra_repr")) == ("sliding", 4, True)
    with pytest.raises(ReachedInsideError, match=r"the model reads weight of its block layers\.0"):
        _ = cut.weight
