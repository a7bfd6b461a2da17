"""Does torch still trace, and round, as the graphs that guard runs assume? More canaries."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from paritas._torch import equality, indexing, perturbing


def gradient_of_a_maximum(x):
    y = (x * 3.3).amax(0)
    return torch.autograd.grad(y.sum(), x)[0]


def test_the_place_of_a_maximum_is_asked_for_by_equality():
    x = torch.randn(5, 3, requires_grad=True)
    graph = make_fx(gradient_of_a_maximum, tracing_mode="fake")(x)
    tolerant = equality.with_tolerant_equality(graph)
    assert tolerant is not None
    targets = [node.target for node in tolerant.graph.nodes]
    assert equality.nearly_equal in targets
    assert torch.ops.aten.eq.Tensor in [node.target for node in graph.graph.nodes]
    assert torch.equal(tolerant(x), graph(x))


def test_a_graph_without_an_equality_of_floats_has_no_other_form():
    graph = make_fx(lambda x: (x == 2) & (x.int() == x.int()), tracing_mode="fake")(torch.ones(3))
    assert equality.with_tolerant_equality(graph) is None


def test_numbers_a_few_roundings_apart_are_equal_and_no_others():
    left = torch.tensor([1.0, 1.0, 1.0, 0.0, torch.inf, torch.nan])
    right = torch.tensor([1.0, 1 + 2e-7, 1 + 2e-5, 1e-12, torch.inf, torch.nan])
    nearly = equality.nearly_equal(left, right, unit=2.0**-24)
    assert nearly.tolist() == [True, True, False, False, True, False]


def test_indices_that_fit_stay_and_others_are_made_to():
    x = torch.arange(12.0).view(3, 4)
    columns = torch.tensor([[0, -1, 9, 3]])
    _, _, index = indexing.in_bounds("gather", (x, 1, columns))
    assert index.tolist() == [[0, 3, 1, 3]]
    _, indices = indexing.in_bounds("index", (x, [None, torch.tensor([-1, 5])]))
    assert indices[0] is None
    assert indices[1].tolist() == [3, 1]
    mask = x > 3
    assert indexing.in_bounds("index", (x, [mask]))[1][0] is mask
    assert torch.ops.aten.gather(*indexing.in_bounds("gather", (x, 1, columns))).shape == (1, 4)


def test_whether_tensor_cores_may_be_used_is_told_without_a_device():
    for name in ("convolution", "convolution_backward", "mm", "add"):
        assert isinstance(perturbing._may_use_tf32(name), bool)
    assert not perturbing._may_use_tf32("add")
