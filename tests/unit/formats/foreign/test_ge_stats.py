"""Statistics in the place of tensors, in a dump of Ascend's graph engine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paritas.core.errors import UsageError
from paritas.core.numerics.statistics import Statistics
from paritas.formats.files.records import TensorFacts
from paritas.formats.foreign.ge_dump import open_dump
from unit.formats.foreign import ge_files as ge

COLUMNS = "Input/Output,Index,Data Size,Data Type,Format,Shape"
CLASSIC = (
    f"{COLUMNS},Max Value,Min Value,Avg Value,Count,Nan Count,Negative Inf Count,Positive Inf Count"
)
NAME = ge.file_name("Add", "Add_2")


def records_of(tmp_path, *lines):
    ge.write(tmp_path, "", f"{NAME}.csv", "\n".join(lines).encode())
    dump = open_dump(tmp_path)
    return dump, list(dump.records())


def test_the_table_of_an_operator_becomes_statistics(tmp_path):
    dump, (taken, given) = records_of(
        tmp_path,
        CLASSIC,
        "Input,0,12,DT_FLOAT16,ND,2x3,1.5,-2,0.25,6,0,0,0",
        "Output,0,8,DT_BF16,ND,-,inf,-3,nan,4,1,0,2",
    )
    assert taken.id == "forward/Add_2#0/input.0"
    assert taken.tensor == TensorFacts(dtype="float16", shape=(2, 3), stride=(3, 1))
    assert taken.statistics == Statistics(count=6, minimum=-2, maximum=1.5, mean=0.25)
    assert taken.payload is None
    assert given.tensor == TensorFacts(dtype="bfloat16", shape=(), stride=())
    assert given.statistics == Statistics(count=4, minimum=-3, nans=1, positive_infinities=2)
    assert (dump.header(0).data, dump.problems) == ("stats", [])
    with pytest.raises(UsageError, match="only statistics were recorded"):
        dump.read(taken)


def test_columns_are_found_by_name_and_what_is_not_computed_is_not_known(tmp_path):
    _, (one,) = records_of(
        tmp_path,
        f"{COLUMNS},Count,Max Value,l2norm",
        "Output,1,12,DT_FLOAT,ND,3,NA,NA,2.5",
    )
    assert one.site.position == "1"
    assert one.statistics == Statistics(count=3, l2=2.5)


def test_what_is_not_finite_is_counted_where_no_column_does(tmp_path):
    _, (one,) = records_of(
        tmp_path,
        f"{COLUMNS},Count,Max Value,Min Value,Avg Value",
        "Output,0,12,DT_FLOAT,ND,3,3,inf,-inf,nan",
    )
    counted = Statistics(count=3, nans=1, positive_infinities=1, negative_infinities=1)
    assert one.statistics == counted


def test_figures_of_a_blocked_layout_are_pointed_out(tmp_path):
    dump, (one,) = records_of(
        tmp_path, CLASSIC, "Input,0,512,DT_FLOAT16,FRACTAL_NZ,1x1x16x16,1,0,0,256,0,0,0"
    )
    assert one.tensor.shape == (1, 1, 16, 16)
    assert "only in the device's layout (FRACTAL_NZ), including its padding" in dump.problems[0]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["a,b", "1,2"], "not a table of the engine: its columns are a, b"),
        ([CLASSIC, "Sideways,0"], "a row describes 'sideways' '0'"),
        ([CLASSIC, "Input,x"], "a row describes 'input' 'x'"),
        ([COLUMNS, *["Input,0,1,DT_INT8,ND,1"] * 5000], "it has more than 4096 rows"),
        ([COLUMNS, "Input," + "0" * 200_000], "field larger than field limit"),
    ],
)
def test_a_damaged_table_is_a_problem(tmp_path, lines, why):
    dump, (one,) = records_of(tmp_path, *lines)
    assert why in dump.problems[0]
    with pytest.raises(UsageError, match=why):
        dump.read(one)


def test_strings_have_no_dtype_and_odd_shapes_are_not_known(tmp_path):
    _, records = records_of(
        tmp_path,
        CLASSIC,
        "Input,0,8,DT_STRING,ND,2,NA,NA,NA,2,NA,NA,NA",
        "Input,1,8,DT_INT8,ND,2x?,1,0,0,2,0,0,0",
    )
    assert [record.tensor for record in records] == [None, None]
    assert [record.statistics.count for record in records] == [2, 2]


def test_extremes_that_replaced_the_tensors_are_read(tmp_path):
    taken = [np.float32([3, -1]), np.int64([7])]
    extremes = [[one.min(), one.max()] for one in taken]
    path = tmp_path / f"{NAME}_min_max.npz"
    np.savez(path, inputs=extremes, outputs=[[np.float16("nan"), np.float16("nan")]])
    dump = open_dump(tmp_path)
    found = [(one.site.side, one.site.position, one.statistics) for one in dump.records()]
    assert found == [
        ("input", "0", Statistics(count=0, minimum=-1, maximum=3)),
        ("input", "1", Statistics(count=0, minimum=7, maximum=7)),
        ("output", "0", Statistics(count=0, nans=1)),
    ]
    assert (dump.problems, dump.header(0).data) == ([], "stats")


def test_an_operator_without_inputs_has_no_extremes_of_them(tmp_path):
    np.savez(tmp_path / f"{NAME}_min_max.npz", inputs=[], outputs=[[1.0, math.inf]])
    (one,) = open_dump(tmp_path).records()
    assert one.statistics == Statistics(count=0, minimum=1, positive_infinities=1)


def test_extremes_of_another_shape_or_kind_are_a_problem(tmp_path):
    np.savez(tmp_path / f"{NAME}_min_max.npz", inputs=np.zeros((2, 3)))
    dump = open_dump(tmp_path)
    assert "inputs has shape (2, 3): expected pairs" in dump.problems[0]
    np.savez(tmp_path / f"{NAME}_min_max.npz", inputs=np.array([{}], dtype=object))
    assert "inputs cannot be read" in open_dump(tmp_path).problems[0]
