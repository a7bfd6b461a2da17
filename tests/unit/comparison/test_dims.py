"""Annotations of dimensions: what is read, and what is refused with a finger on the place."""

from __future__ import annotations

import pickle

import pytest

from paritas.comparison.gathering import arrange
from paritas.comparison.rules import AxisSplit, Dimension, parse_dims
from paritas.core.errors import UsageError


def test_names_axes_orders_and_declarations_are_read():
    dims = parse_dims("b s[cp:zigzag] h[tp] d # dp:=moe_dp ep:replicated")
    assert dims.dimensions == (
        Dimension(("b",)),
        Dimension(("s",), (AxisSplit("cp", "zigzag"),)),
        Dimension(("h",), (AxisSplit("tp"),)),
        Dimension(("d",)),
    )
    assert dims.data_axis == "moe_dp"
    assert dims.replicated == ("ep",)


def test_several_axes_split_one_dimension_the_outermost_first():
    (dimension,) = parse_dims("s[cp:zigzag, sp]").dimensions
    assert dimension.splits == (AxisSplit("cp", "zigzag"), AxisSplit("sp"))


def test_partial_is_a_term_of_a_sum():
    assert parse_dims("b h[tp:partial]").splits == (AxisSplit("tp", partial=True),)


@pytest.mark.parametrize("text", ["t (heads*dim)[tp]", "t heads*dim[tp]", "t (heads * dim)(tp)"])
def test_fused_dimensions_have_several_names(text):
    dims = parse_dims(text)
    assert dims.names == (("t",), ("heads", "dim"))
    assert dims.splits == (AxisSplit("tp"),)


def test_a_dimension_of_length_one_is_left_out_of_the_names():
    dims = parse_dims("t 1 h[tp:sharded]")
    assert [one.is_squeezed for one in dims.dimensions] == [False, True, False]
    assert dims.names == (("t",), ("h",))


def test_it_is_read_once_and_can_be_sent():
    assert parse_dims("b s") is parse_dims("b s")
    dims = parse_dims("b s[cp] # tp:replicated")
    assert pickle.loads(pickle.dumps(dims)) == dims


@pytest.mark.parametrize(
    ("text", "why", "at"),
    [
        ("", "no dimension given", 0),
        ("  # tp:replicated", "no dimension given", 0),
        ("b s[cp h", "not a dimension", 2),
        ("b s[cp]x", "not a dimension", 2),
        ("b s[cp:zigzig]", "unknown qualifier 'zigzig'", 4),
        ("b s[cp,]", "'' is not a valid axis", 7),
        ("b s[c-p]", "'c-p' is not a valid axis", 4),
        ("b 2x h", "'2x' is not a valid name", 2),
        ("b (h*)", "'' is not a valid name", 2),
        ("b 1[tp]", "a dimension of length 1", 2),
        ("b s b", "the dimension 'b' appears twice", 4),
        ("b[tp] s[tp]", "the axis 'tp' appears twice", 8),
        ("b[tp] s # tp:replicated", "the axis 'tp' appears twice", 10),
        ("b s # tp:copied", "'tp:copied'", 6),
        ("b s # dp:=a dp:=b", "dp is already a", 12),
        ("b s[cp:zigzag+partial]", "zigzag and partial exclude each other", 4),
    ],
)
def test_a_mistake_is_shown_with_its_place(text, why, at):
    with pytest.raises(UsageError) as caught:
        parse_dims(text)
    first, shown, caret = str(caught.value).split("\n")
    assert why in first
    assert shown == f"    {text}"
    assert caret == f"    {' ' * at}^"


def test_a_text_without_end_is_not_read():
    with pytest.raises(UsageError, match="2000 characters"):
        parse_dims("b " * 1000)


def names(text):
    return parse_dims(text).names


def test_the_order_of_the_golden_side_is_that_of_both():
    mine, golden = arrange(names("s b h"), names("b s h"))
    assert golden is None
    assert mine.order == (1, 0, 2)
    assert mine.words == "dimensions rearranged to b s h"


def test_what_one_side_lays_into_one_dimension_the_other_does_too():
    mine, golden = arrange(names("b s h d"), names("s b (h*d)"))
    assert golden is None
    assert (mine.order, mine.joined) == ((1, 0, 2, 3), (1, 1, 2))
    mine, golden = arrange(names("t (h*d)"), names("t h d"))
    assert mine is None
    assert (golden.order, golden.joined) == ((0, 1, 2), (1, 2))


@pytest.mark.parametrize("golden", ["b s", "b s x", "(s*b) h", "(h*s) b", "(b*h) s"])
def test_what_cannot_be_brought_into_one_order_is_left(golden):
    assert arrange(names("(b*s) h"), names(golden)) == (None, None)
