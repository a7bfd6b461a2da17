"""Findings are grouped under the place where the difference starts."""

from __future__ import annotations

import msgspec
import pytest

from paritas.core.results.causes import group_causes
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    Pattern,
    Region,
    Status,
    Verdict,
)
from paritas.core.results.items import Item, ItemKind, gradient, nth_output
from paritas.core.results.pictures import Picture

SOFTMAX = Origin(
    kind=OriginKind.NODE,
    name="softmax",
    operator="aten._softmax.default",
    module="layers.0.attn",
    source="model.py:18, in forward",
    code="weights = scores.softmax(-1)",
    arguments=("input: float32 [2, 4, 8, 8]", "dim=-1"),
    chain=("softmax", "bmm", "linear", "output[0]"),
)


def located(**fields):
    fields.setdefault("origin", SOFTMAX)
    item = Item(ItemKind.NODE, fields["origin"].name)
    return Finding(item=item, aspect=Aspect.VALUE, status=Status.DIFFERENT, **fields)


def wrong(item, **fields):
    fields.setdefault("aspect", Aspect.VALUE)
    return Finding(item=item, status=Status.DIFFERENT, **fields)


def results(count, cause="node softmax"):
    items = [nth_output(0), *(gradient(f"w{place}") for place in range(1, count))]
    return [wrong(item, cause=cause, reason="far off") for item in items]


def verdict_of(*findings, **fields):
    return Verdict(findings=findings, coverage=Coverage(compared=len(findings)), **fields)


def shape_of(causes):
    return [(one.start.path, (*one.result_names, *one.gradient_names)) for one in causes]


def test_findings_that_name_their_cause_are_grouped_under_it():
    found = [*results(2), wrong(nth_output(3)), located()]
    assert shape_of(group_causes(found)) == [
        ("node softmax", ("output[0]", "gradient of w1")),
        ("output[3]", ()),
    ]


def test_a_cause_that_is_not_in_the_verdict_hides_nothing():
    found = results(2, cause="node gone")
    assert shape_of(group_causes(found)) == [("output[0]", ()), ("gradient of w1", ())]


def test_wrong_values_of_a_graph_result_from_what_was_located_in_it():
    start = msgspec.structs.replace(located(), item=Item(ItemKind.NODE, "mul", graph="graph 0"))
    same, other = (wrong(nth_output(0).in_graph(f"graph {n}")) for n in (0, 1))
    strides = wrong(nth_output(1).in_graph("graph 0"), aspect=Aspect.STRIDE)
    assert shape_of(group_causes([same, other, strides, start])) == [
        ("graph 0: node mul", ("output[0]",)),
        ("graph 1: output[0]", ()),
        ("graph 0: output[1]", ()),
    ]


def test_an_alias_that_was_located_explains_no_wrong_value():
    item = Item(ItemKind.NODE, "getitem", graph="graph 0")
    start = msgspec.structs.replace(located(), item=item, aspect=Aspect.ALIAS)
    value = wrong(nth_output(0).in_graph("graph 0"))
    assert [one.results for one in group_causes([start, value])] == [(), ()]


def test_values_with_one_origin_are_one_cause():
    found = [wrong(gradient(name), origin=SOFTMAX) for name in "abc"]
    assert shape_of(group_causes(found)) == [("gradient of a", ("gradient of b", "gradient of c"))]


def test_what_could_not_be_checked_explains_nothing():
    search = msgspec.structs.replace(located(), status=Status.UNVERIFIED, aspect=Aspect.HARNESS)
    assert [one.results for one in group_causes([*results(2), search])] == [(), (), ()]


@pytest.mark.parametrize("count", [5, 14])
def test_no_finding_is_lost(count):
    found = [*results(count), located(), wrong(nth_output(9))]
    assert sum(len(one.findings) for one in group_causes(found)) == len(found)


def test_a_located_verdict_is_told_in_few_lines():
    diagnosis = Diagnosis(
        where=Region(kind="slices", text="[...]", elements=9, share=0.1, sentence="in the tail"),
        patterns=(Pattern(kind="zeros", confidence=0.99, sentence="zero instead of a value"),),
    )
    start = located(reason="starts here", source=SOFTMAX.source, diagnosis=diagnosis)
    verdict = verdict_of(*results(5), start, notes=("a remark",))
    assert str(verdict).splitlines() == [
        "different: the candidate computes something else; 6 findings, 6 items compared",
        "  node softmax: different (value)",
        "    starts here",
        "    zero instead of a value; in the tail",
        "    node softmax: aten._softmax.default(input: float32 [2, 4, 8, 8], dim=-1) in module layers.0.attn",  # noqa: E501
        "    at model.py:18, in forward",
        "      weights = scores.softmax(-1)",
        "    from there on: softmax -> bmm -> linear -> output[0]",
        "    as a result, also 1 value: output[0]; 4 gradients, which may hide a fault of their own: gradient of w1, gradient of w2, gradient of w3, gradient of w4",  # noqa: E501
        "  note: a remark",
    ]


def test_a_long_chain_is_told_without_its_middle():
    chain = tuple(f"n{place}" for place in range(40))
    start = located(origin=msgspec.structs.replace(SOFTMAX, chain=chain))
    shown = "n0 -> n1 -> n2 -> n3 -> n4 -> (30 more places) -> n35 -> n36 -> n37 -> n38 -> n39"
    assert f"from there on: {shown}" in str(verdict_of(start))


def test_many_values_without_a_place_have_one_line_each_after_the_first():
    found = [wrong(nth_output(n), reason=f"off {n}", advice="look") for n in range(5)]
    assert str(verdict_of(*found)).splitlines()[-3:] == [
        "    look",
        "  output[3]: different (value); off 3",
        "  output[4]: different (value); off 4",
    ]


def test_a_located_verdict_with_a_picture_survives_json():
    cells = ((1.0, float("nan")), (2.0, float("inf")))
    picture = Picture(
        shape=(3, 2, 2),
        axes=(1, 2),
        index=(0, None, None),
        reference=cells,
        candidate=cells,
        difference=cells,
    )
    verdict = verdict_of(located(picture=picture), *results(2))
    read = Verdict.from_json(verdict.to_json())
    # NaN is not equal to itself; its text is.
    assert repr(read) == repr(verdict)
