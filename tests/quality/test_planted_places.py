"""The lab of planted faults: two halves that share nothing, and places that are known."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.places import building, measured, models, passes, plain, table
from benchmarks.places.claims import Claims
from benchmarks.places.planting import Subject, Truth, backpropagate
from benchmarks.places.triton_kernels import TEXT
from benchmarks.places.trying import place_of, try_unit

from paritas.core.results.findings import Origin, OriginKind, PatternKind


@pytest.mark.parametrize("table_of", ["FAULTS", "EDITS", "KERNEL_EDITS", "TRITON_EDITS"])
def test_the_halves_share_no_kind_of_fault(table_of):
    ours, theirs = getattr(building, table_of), getattr(measured, table_of)
    assert ours
    assert theirs or table_of in {"KERNEL_EDITS", "TRITON_EDITS"}  # a small set has none
    assert not set(ours) & set(theirs)


@pytest.mark.parametrize("half", [building, measured])
def test_the_labels_of_faults_are_words_that_paritas_has(half):
    edits = {**half.EDITS, **half.KERNEL_EDITS, **half.TRITON_EDITS}
    for name, fault in {**half.FAULTS, **edits}.items():
        assert {*(fault.kinds or ()), *fault.loose} <= set(PatternKind), name
        assert not set(fault.kinds or ()) & fault.loose, name


@pytest.mark.parametrize("half", [building, measured])
def test_no_fault_hides_another_of_its_name(half):
    assert len(half.FAULTS) == sum(len(getattr(one, "FAULTS", ())) for one in half.FILES)


def test_a_fault_is_planted_once_before_any_is_planted_twice():
    claims = Claims("building", ["one percent too large"])
    subject = Subject("Perceptron", "building", claims)
    assert not subject.take("one percent too large")
    assert subject.take("bias dropped")
    assert not subject.take("bias dropped")
    claims.begin_round()
    assert subject.take("one percent too large")


def test_the_code_of_a_fault_of_either_half_is_the_place_of_the_fault():
    for half in (building, measured):
        for family in half.FILES:
            origin = Origin(kind=OriginKind.NODE, name="x", source=f"{family.__file__}:7")
            assert place_of(origin, Truth(("chunk",)), by_node=False) == "exact"


def test_the_halves_share_no_model_and_have_all_of_them():
    ours, theirs = models.models_of("building"), models.models_of("measured")
    assert not set(ours) & set(theirs)
    assert {*ours, *theirs} == {*plain.MODELS, *models.LIBRARY}


def test_every_edit_of_a_kernel_in_triton_changes_its_text():
    edits = {**building.TRITON_EDITS, **measured.TRITON_EDITS}
    assert [name for name, edit in edits.items() if edit.apply(TEXT) == TEXT] == []


def test_a_plan_plants_in_its_node_and_in_no_other():
    subject = Subject("Perceptron", "building")
    seen = subject.fitting("captured", "one percent too large")
    plan = passes.Plan("building", "one percent too large", "captured", "place", seen[-1].node)
    right, _ = backpropagate(subject.model, subject)
    torch.compiler.reset()
    with mock.patch.dict(os.environ, {passes.PLAN: plan.to_text()}):
        wrong, _ = backpropagate(torch.compile(subject.model, backend=passes.faulty), subject)
    torch.testing.assert_close(wrong[0], right[0] * 1.01)  # the last linear layer alone


@pytest.mark.usefixtures("undiagnosed")
def test_guard_names_a_planted_node_and_the_row_says_so():
    row = try_unit(Subject("Perceptron", "building"), "guard", "pass captured place", 0, 0)
    assert row["outcome"] == "exact"
    assert table.figures([{**row, "half": "building", "what": "guard"}])[0].value == 100


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        (Origin(kind=OriginKind.NODE, name="chunk"), "exact"),
        (Origin(kind=OriginKind.NODE, name="getitem", source="/a/m.py:7, in forward"), "exact"),
        (Origin(kind=OriginKind.NODE, name="x", operator="chunk", module="layers.0"), "exact"),
        (Origin(kind=OriginKind.MODULE, name="layers", module="layers"), "near"),
        (Origin(kind=OriginKind.FUSION, name="two nodes", nodes=("chunk", "add")), "near"),
        (Origin(kind=OriginKind.NODE, name="add", source="/a/m.py:8"), "other"),
        (Origin(kind=OriginKind.GRAPH, name="graph 0"), "none"),
    ],
)
def test_an_answer_is_compared_with_the_true_place(origin, place):
    truth = Truth(("chunk",), ("chunk",), ("/b/m.py:7",), ("layers.0",))
    assert place_of(origin, truth, by_node=False) == place


def test_for_guard_the_line_alone_is_not_the_node():
    truth = Truth(("chunk",), ("chunk",), ("m.py:7",))
    origin = Origin(kind=OriginKind.NODE, name="query", operator="getitem", source="m.py:7")
    assert place_of(origin, truth, by_node=True) == "other"
