"""The table of a comparison, as CSV and as Parquet."""

from __future__ import annotations

import csv
import io
import math
import sys

import duckdb
import msgspec
import pytest
import torch

from paritas.comparison.columns import (
    comparison_columns,
    comparison_csv,
    write_comparison_parquet,
)
from paritas.comparison.rows import Comparison, SideFacts
from paritas.core.errors import UsageError
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.findings import Coverage, Status
from paritas.core.results.items import PairFigures
from unit.comparison.comparison_samples import dump, figures, row, transformer

MSIT = (
    "token_id,data_id,golden_data_path,golden_op_type,golden_dtype,golden_shape,golden_max_value,"
    "golden_min_value,golden_mean_value,my_data_path,my_op_type,my_dtype,my_shape,my_max_value,"
    "my_min_value,my_mean_value,cosine_similarity,max_relative_error,mean_relative_error,"
    "max_absolute_error,mean_absolute_error,kl_divergence,relative_euclidean_distance,"
    "cmp_fail_reason"
)
CALL = ("act", "aten.gelu.default", ())


def made_of(*rows, **facts):
    coverage = Coverage(compared=len(rows))
    return Comparison(my=dump("a"), golden=dump("b"), rows=rows, coverage=coverage, **facts)


def one_row(status=Status.DIFFERENT, **facts):
    return row(0, "layers.0", CALL, status, **facts)


def lines_of(comparison):
    return list(csv.DictReader(io.StringIO(comparison_csv(comparison), newline="")))


def test_the_first_columns_are_those_of_msit_in_its_order():
    assert comparison_csv(transformer()).startswith(f"{MSIT},status,")


def test_every_row_has_a_line_whatever_became_of_it():
    comparison = transformer()
    lines = lines_of(comparison)
    assert [line["status"] for line in lines] == [row.status for row in comparison.rows]
    assert [int(line["data_id"]) for line in lines] == [row.index for row in comparison.rows]


def test_a_row_without_counterpart_has_its_own_side_and_the_reason():
    comparison = transformer()
    alone = next(row for row in comparison.rows if row.my is None)
    line = lines_of(comparison)[alone.index]
    assert (line["golden_dtype"], line["golden_shape"]) == ("float32", "[2, 4]")
    assert (line["my_dtype"], line["my_shape"], line["cosine_similarity"]) == ("", "", "")
    assert line["cmp_fail_reason"] == "mine has no such value; nearest: head_norm, head_drop"


def test_the_reason_is_empty_exactly_where_a_row_passes():
    comparison = transformer()
    for line, one in zip(lines_of(comparison), comparison.rows, strict=True):
        assert bool(line["cmp_fail_reason"]) is not one.status.passes()


def test_a_failing_row_that_says_nothing_gets_a_reason_all_the_same():
    (line,) = lines_of(made_of(one_row(reason="")))
    assert line["cmp_fail_reason"] == "computes something else"


def test_an_unstable_row_has_a_reason_under_strict_alone():
    unstable = one_row(Status.UNSTABLE, reason="a tie")
    assert lines_of(made_of(unstable))[0]["cmp_fail_reason"] == ""
    assert lines_of(made_of(unstable, strict=True))[0]["cmp_fail_reason"] == "a tie"


def test_numbers_keep_all_their_digits():
    third = 1 / 3
    (line,) = lines_of(made_of(one_row(figures=figures(third), own=third)))
    assert float(line["relative_euclidean_distance"]) == third
    assert line["own_error"] == repr(third)


def test_the_bits_being_the_same_means_no_error_and_a_cosine_of_1():
    (line,) = lines_of(made_of(one_row(Status.IDENTICAL, figures=PairFigures(identical=True))))
    errors = ("max_relative_error", "mean_relative_error", "max_absolute_error", "kl_divergence")
    assert [float(line[name]) for name in errors] == [0.0] * 4
    assert float(line["cosine_similarity"]) == 1.0


def test_an_error_at_a_golden_zero_is_seen():
    found = pair_metrics(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.0]))
    (line,) = lines_of(made_of(one_row(figures=PairFigures(metrics=found))))
    assert float(line["max_absolute_error"]) == 0.5
    assert line["max_relative_error"] == "inf"


def test_a_nan_blanks_nothing():
    found = pair_metrics(torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0]))
    (line,) = lines_of(made_of(one_row(figures=PairFigures(metrics=found))))
    assert (line["nan_my"], line["nan_golden"], line["nonfinite_mismatches"]) == ("1", "0", "1")
    assert (line["max_absolute_error"], line["cosine_similarity"]) == ("inf", "nan")


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_a_name_does_not_become_a_formula(name):
    (line,) = lines_of(made_of(one_row(name=name, nodes=(name, "b"))))
    assert line["name"] == f"'{name}"
    assert line["nodes"] == f"'{name}; b"


@pytest.mark.parametrize("value", ["-0.125", "+3", "-inf"])
def test_a_number_that_is_text_stays_as_it_is(value):
    (line,) = lines_of(made_of(one_row(my=SideFacts(value=value))))
    assert line["my_value"] == value


def test_a_scalar_has_an_empty_shape_and_no_nodes_are_nothing():
    scalar = SideFacts(dtype="float32", shape=())
    (line,) = lines_of(made_of(one_row(my=scalar, golden=scalar, nodes=())))
    assert (line["my_shape"], line["numel"], line["nodes"]) == ("[]", "1", "")


def test_a_name_that_is_no_text_is_spelled_out():
    (line,) = lines_of(made_of(one_row(name="x\udcff/é")))
    assert line["name"] == "x\\udcff/é"
    assert comparison_csv(made_of(one_row(name="x\udcff"))).encode()


# --- Parquet --------------------------------------------------------------------------------------


def test_parquet_has_the_same_columns_with_types(tmp_path):
    write_comparison_parquet(tmp_path / "out.parquet", transformer())
    described = duckdb.sql(f"DESCRIBE SELECT * FROM '{tmp_path}/out.parquet'").fetchall()
    assert [name for name, *_ in described] == [column.name for column in comparison_columns()]
    types = {name: kind for name, kind, *_ in described}
    assert types["token_id"] == types["mismatched"] == "BIGINT"
    assert types["golden_shape"] == "BIGINT[]"
    assert types["nodes"] == "VARCHAR[]"
    assert {types[name] for name in ("own_error", "kl_divergence", "my_max_value")} == {"DOUBLE"}
    assert types["name"] == "VARCHAR"


def test_parquet_keeps_values_order_and_what_json_has_no_number_for(tmp_path):
    odd = "=1+1 'quoted', \"twice\"\nand é"
    rows = [
        msgspec.structs.replace(one_row(name=odd, own=own), index=place)
        for place, own in enumerate([1 / 3, math.inf, -math.inf, math.nan, None])
    ]
    write_comparison_parquet(tmp_path / "it's [here].parquet", made_of(*rows))
    connection = duckdb.connect()
    table = connection.read_parquet([str(tmp_path / "it's ?here?.parquet")])
    found = table.project("data_id, name, own_error, golden_shape, advice").fetchall()
    assert [line[0] for line in found] == [0, 1, 2, 3, 4]
    assert {line[1] for line in found} == {odd}
    assert [line[2] for line in found[:3]] == [1 / 3, math.inf, -math.inf]
    assert math.isnan(found[3][2])
    assert found[4][2] is None
    assert found[0][3:] == ([2, 16, 256], None)
    assert [path.name for path in tmp_path.iterdir()] == ["it's [here].parquet"]


def test_without_duckdb_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(UsageError, match=r"pip install 'paritas\[table\]'"):
        write_comparison_parquet(tmp_path / "out.parquet", transformer())
    assert not list(tmp_path.iterdir())
