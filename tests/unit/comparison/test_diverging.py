"""The first divergence is the call that made it, not the first row that looks large."""

from __future__ import annotations

import math

import torch

from paritas.comparison.compare import first_divergence, first_non_finite
from paritas.comparison.rows import ComparisonRow
from paritas.core.numerics.pair_figures import pair_figures
from paritas.core.results.findings import Status


def table(*ends, **rest):
    return [
        ComparisonRow(index=place, step=0, name=f"row {place}", status=status, made=made, **rest)
        for place, (status, made) in enumerate(ends)
    ]


RIGHT = (Status.EQUIVALENT, "")
HERE = (Status.DIFFERENT, "here")
BEFORE = (Status.DIFFERENT, "before")
UNKNOWN = (Status.DIFFERENT, "")


def test_nothing_diverges_where_all_agree():
    assert first_divergence(table(RIGHT, RIGHT)) is None


def test_it_is_the_row_that_made_the_difference():
    found = first_divergence(table(RIGHT, BEFORE, HERE, HERE))
    assert (found.kind, found.row) == ("made", 2)


def test_a_row_of_which_it_is_not_known_whether_it_made_it_is_not_passed_over():
    found = first_divergence(table(RIGHT, UNKNOWN, HERE))
    assert (found.kind, found.row) == ("unclear", 1)


def test_programs_that_were_given_different_values_are_told_so():
    rows = table(UNKNOWN, HERE)
    rows[0] = ComparisonRow(index=0, step=0, name="x", op="placeholder", status=Status.DIFFERENT)
    assert first_divergence(rows).kind == "given"
    rows[0] = ComparisonRow(index=0, step=0, name="x", side="input", status=Status.DIFFERENT)
    assert first_divergence(rows).kind == "given"


def test_an_argument_in_the_middle_of_the_program_was_not_given_to_it():
    rows = [
        *table(RIGHT),
        ComparisonRow(index=1, step=0, name="x", side="input", status=Status.DIFFERENT),
    ]
    assert first_divergence(rows).kind == "unclear"


def test_of_several_ranks_the_one_that_diverges_earliest_counts():
    first = table(RIGHT, RIGHT, HERE)
    second = [
        ComparisonRow(index=3 + place, step=0, rank=1, name="r", status=status, made=made)
        for place, (status, made) in enumerate([RIGHT, HERE, BEFORE])
    ]
    assert first_divergence([*first, *second]).row == 4


def test_an_earlier_step_counts_before_an_earlier_place():
    late = [ComparisonRow(index=0, step=1, name="a", status=Status.DIFFERENT, made="here")]
    early = [
        ComparisonRow(index=1, step=0, name="a", status=Status.EQUIVALENT),
        ComparisonRow(index=2, step=0, name="b", status=Status.DIFFERENT, made="here"),
    ]
    assert first_divergence([*late, *early]).row == 2


def test_a_nan_is_found_by_itself():
    figures = pair_figures(torch.ones(3), torch.tensor([1.0, math.nan, 1.0]))
    rows = [
        ComparisonRow(index=0, step=0, name="large", status=Status.DIFFERENT, made="here"),
        ComparisonRow(
            index=1, step=0, name="nan", status=Status.DIFFERENT, made="here", figures=figures
        ),
    ]
    assert first_divergence(rows).row == 0
    assert first_non_finite(rows).row == 1
