"""A picture of a wrong value shows the slice and the axes along which it is wrong."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch

from paritas.core.diagnosis.diagnose import diagnose
from paritas.core.diagnosis.pictures import draw_picture
from paritas.core.results.findings import Region
from paritas.core.results.pictures import (
    MOST_COLUMNS,
    MOST_ROWS,
    Picture,
    axis_words,
    nonfinite_words,
    scale_words,
)


def drawn(reference, candidate):
    return draw_picture(reference, candidate, diagnose(candidate, reference).where)


def wrong_cells(picture):
    return [[cell != 0 for cell in row] for row in picture.difference]


def test_a_wrong_tail_of_four_dimensions_is_the_right_edge_of_its_slice():
    torch.manual_seed(0)
    reference = torch.randn(2, 3, 5, 40)
    candidate = reference.clone()
    candidate[..., 32:] = 0
    picture = drawn(reference, candidate)
    assert picture.axes == (2, 3)
    assert picture.slice_text.endswith(":, :]")
    assert wrong_cells(picture) == [[False] * 32 + [True] * 8] * 5
    assert picture.candidate[0][-1] == 0
    slice_shown = picture.slice_text
    assert axis_words(picture) == (
        f"down: axis 2 (0 to 4), across: axis 3 (0 to 39); slice {slice_shown}"
    )


def test_the_axes_are_those_that_limit_the_wrong_region():
    torch.manual_seed(0)
    reference = torch.randn(4, 6, 5, 7)
    candidate = reference.clone()
    candidate[:, 2] += 1
    picture = drawn(reference, candidate)
    assert picture.axes == (1, 3)
    assert [any(row) for row in wrong_cells(picture)] == [row == 2 for row in range(6)]


def test_a_long_axis_keeps_the_largest_difference_of_each_cell():
    reference = torch.zeros(1000, 3000)
    candidate = reference.clone()
    candidate[997, 2999] = 5
    picture = draw_picture(reference, candidate, None)
    assert (len(picture.difference), len(picture.difference[0])) == (MOST_ROWS, MOST_COLUMNS)
    assert picture.difference[-1][-1] == 5
    assert sum(map(sum, wrong_cells(picture))) == 1
    assert "0 to 2999, 46-47 per cell" in axis_words(picture)


def test_a_line_has_one_row_and_a_scalar_one_cell():
    line = draw_picture(torch.zeros(5), torch.ones(5), None)
    assert line.difference == ((1.0,) * 5,)
    assert axis_words(line) == "across: axis 0 (0 to 4)"
    scalar = draw_picture(torch.tensor(2.0), torch.tensor(3.5), None)
    assert (scalar.reference, scalar.candidate, scalar.difference) == (
        ((2.0,),),
        ((3.5,),),
        ((1.5,),),
    )
    assert axis_words(scalar) == "a single number"


def test_nan_and_infinities_of_one_side_are_differences_and_of_both_are_none():
    reference = torch.tensor([1.0, math.nan, math.inf, 4.0, 5.0])
    candidate = torch.tensor([math.nan, math.nan, math.inf, -math.inf, 5.0])
    picture = draw_picture(reference, candidate, None)
    (row,) = picture.difference
    assert math.isnan(row[0])
    assert row[1:] == (0.0, 0.0, -math.inf, 0.0)
    assert picture.nonfinite == 4
    assert scale_words(picture) == "values 1 to 5; |difference| 0 to 0"
    assert nonfinite_words(picture, "N") == "; N: NaN or Inf (4 cells)"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.bfloat16])
def test_every_dtype_of_numbers_is_drawn(dtype):
    reference = torch.zeros(3, 4, dtype=dtype)
    candidate = reference.clone()
    candidate[1, 2] = 1
    picture = draw_picture(reference, candidate, None)
    assert picture.difference[1][2] == 1
    assert sum(map(sum, wrong_cells(picture))) == 1


def test_axes_of_one_element_are_not_shown():
    where = Region(kind="row", text="[0]", elements=1, share=1.0, axes=(0,))
    picture = draw_picture(torch.zeros(1, 3, 1, 2), torch.ones(1, 3, 1, 2), where)
    assert picture.axes == (1, 3)


def test_a_picture_of_ten_million_elements_is_small():
    reference = torch.arange(10_000_000, dtype=torch.float32).reshape(10, 1000, 1000)
    picture = draw_picture(reference, reference * 1.01, None)
    assert len(msgspec.json.encode(picture)) < 64_000


@pytest.mark.parametrize(
    "changes",
    [
        {"reference": []},
        {"candidate": [[]]},
        {"difference": [[1.0]]},
        {"reference": [[1.0, 2.0], [3.0]]},
        {"axes": [0, 7]},
        {"axes": [0, 1, 1]},
        {"axes": [1]},
        {"index": []},
    ],
    ids=str,
)
def test_a_damaged_picture_is_not_read(changes):
    picture = draw_picture(torch.zeros(2, 2), torch.ones(2, 2), None)
    data = msgspec.to_builtins(picture)
    assert msgspec.convert(data, Picture) == picture
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(data | changes, Picture)
