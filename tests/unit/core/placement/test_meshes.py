from __future__ import annotations

import itertools

from paritas.core.placement.meshes import (
    coordinate_of,
    coordinates_by_axis,
    lines_along,
    number_meshes,
    rank_at,
    read_axis,
)


def test_ranks_are_numbered_with_the_last_axis_fastest():
    coordinates = list(itertools.product(range(2), range(3)))
    assert [coordinate_of(rank, (2, 3)) for rank in range(6)] == coordinates
    assert [rank_at(coordinate, (2, 3)) for coordinate in coordinates] == list(range(6))
    assert coordinates_by_axis(4, {"dp": 2, "tp": 3}) == {"dp": 1, "tp": 1}


def test_ranks_of_a_line_differ_along_one_axis_only():
    coordinates = {rank: coordinate_of(rank, (2, 3)) for rank in range(6)}
    assert lines_along(coordinates, 0) == [[0, 3], [1, 4], [2, 5]]
    assert lines_along(coordinates, 1) == [[0, 1, 2], [3, 4, 5]]


def test_the_nth_rank_at_a_coordinate_belongs_to_the_nth_mesh():
    assert number_meshes([(0,), (1,), (0,), (1,), (0,)]) == [0, 0, 1, 1, 2]


def test_an_axis_is_a_name_and_a_number():
    assert read_axis(" tp = 2 ") == ("tp", 2)
    assert [read_axis(text) for text in ("tp", "tp=two", "2=4", "tp=2,cp=4")] == [None] * 4
