"""Values for a call: they fit the operator, and one value is one tensor."""

from __future__ import annotations

import pytest
import torch

from paritas.sharding.graphs.calls import TensorValue, draw_values, without_gradient_in


def value(name, *shape, dtype=torch.float32, grad=True):
    return TensorValue(name, shape, dtype, requires_grad=grad)


def ids(name, *shape):
    return value(name, *shape, dtype=torch.int64)


def test_a_value_passed_twice_is_one_tensor():
    x = value("x", 4, 8)
    drawn = draw_values("torch.mul", (x, x), {}, 0).args
    assert drawn[0] is drawn[1]
    other = draw_values("torch.mul", (x, value("y", 4, 8)), {}, 0).args
    assert not torch.equal(other[0], other[1])


def test_a_value_passed_twice_is_drawn_for_its_stricter_use():
    x = value("x", 64, 64)
    drawn = draw_values("torch.div", (x, x), {}, 0).args[0]
    assert drawn.abs().min() >= 0.5


def test_shapes_and_dtypes_are_the_graph_s():
    given = (value("a", 3, 5, dtype=torch.bfloat16), [value("b", 2), ids("c", 4)])
    a, (b, c) = draw_values("my.op", given, {"m": value("m", 2, dtype=torch.bool)}, 0).args
    assert (a.shape, a.dtype) == ((3, 5), torch.bfloat16)
    assert (b.shape, c.dtype) == ((2,), torch.int64)


@pytest.mark.parametrize(
    ("name", "args", "which", "limit"),
    [
        ("aten.embedding", (value("w", 7, 2), ids("i", 50)), 1, 7),
        ("torch.nn.functional.embedding", (ids("i", 50), value("w", 7, 2)), 0, 7),
        ("aten.gather", (value("x", 50, 7), 1, ids("i", 50, 3)), 2, 7),
        ("aten.cross_entropy_loss", (value("x", 50, 7), ids("t", 50)), 1, 7),
        ("torch.Tensor.index_select", (value("x", 5, 7), 1, ids("i", 50)), 2, 7),
        (
            "nnscaler.runtime.function.fullslice",
            (value("x", 5, 7), slice(None), ids("i", 50)),
            2,
            7,
        ),
        ("nnscaler.runtime.function.fullslice", (value("x", 5, 3, 7), ..., ids("i", 50)), 2, 7),
    ],
)
def test_indices_are_those_of_what_they_pick_from(name, args, which, limit):
    drawn = draw_values(name, args, {}, 0).args[which]
    assert int(drawn.min()) == 0
    assert int(drawn.max()) == limit - 1


def test_indices_in_a_list_are_those_of_their_dimension():
    args = (value("x", 3, 5, 7), [None, ids("i", 40), ids("j", 40)])
    _, (none, i, j) = draw_values("aten.index", args, {}, 0).args
    assert none is None
    assert (int(i.max()), int(j.max())) == (4, 6)


def test_every_query_sees_a_key():
    mask = value("m", 64, 4, dtype=torch.bool)
    args = (value("q", 64, 8), value("k", 4, 8), value("v", 4, 8), mask)
    drawn = draw_values("aten.scaled_dot_product_attention", args, {}, 0).args[3]
    assert bool(drawn.any(-1).all())
    assert not bool(drawn.all())


def test_there_is_no_gradient_if_the_graph_or_the_operator_has_none():
    x, still = value("x", 4, 8), value("b", 8, grad=False)
    assert without_gradient_in("torch.mul", (x, still), {}) == {1}
    assert without_gradient_in("torch.cat", ([x, still],), {}) == frozenset()
    norm = (x, value("w", 8), value("b", 8), value("m", 8), value("v", 8), False, 0.1, 1e-5, True)
    assert without_gradient_in("aten.batch_norm", norm, {}) == {3, 4}
