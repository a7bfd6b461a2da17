from __future__ import annotations

import re
import textwrap

import pytest
import torch

from paritas.comparison.rows import Comparison, ComparisonRow, DumpFacts
from paritas.core.judging.judge import judge
from paritas.core.numerics.metrics import pair_metrics
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Diagnosis,
    Finding,
    Origin,
    OriginKind,
    Pattern,
    Score,
    Status,
    Verdict,
)
from paritas.core.results.items import Item
from paritas.core.results.wording import ranges, read_span
from paritas.sharding.graphs.rows import GraphReport


def said(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def of(*findings: Finding, compared: int | None = None, **fields) -> Verdict:
    count = len(findings) if compared is None else compared
    return Verdict(findings=findings, coverage=Coverage(compared=count), **fields)


def finding(status: Status, path: str = "output", **fields) -> Finding:
    return Finding(**{"item": Item(name=path), "aspect": Aspect.VALUE, "status": status, **fields})


# --- passing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status.IDENTICAL, "identical: the candidate is equal bit for bit; 1 item compared"),
        (Status.EQUIVALENT, "equivalent: the candidate differs by rounding only; 1 item compared"),
    ],
)
def test_a_pass_is_one_line_that_says_how_much_was_compared(status, text):
    assert str(of(finding(status))) == text


def test_many_items_are_counted_in_the_plural():
    verdict = of(finding(Status.IDENTICAL), finding(Status.EQUIVALENT))
    assert str(verdict) == ("equivalent: the candidate differs by rounding only; 2 items compared")


def test_an_unstable_verdict_is_a_warning_that_shows_what_is_unstable():
    shaky = finding(
        Status.UNSTABLE,
        "output['tokens']",
        reason="1 of 8 values differ, each decided by the reference's own rounding",
    )
    assert str(of(finding(Status.IDENTICAL), shaky)) == said("""
        unstable: the candidate differs where the reference's own rounding decides (a warning, not a failure); 2 items compared
          output['tokens']: unstable (value)
            1 of 8 values differ, each decided by the reference's own rounding
    """)  # noqa: E501


# --- failing --------------------------------------------------------------------------------------


def test_a_difference_tells_what_how_many_the_worst_where_and_what_next():
    reference = torch.zeros(4, 250)
    reference[:] = 0.5
    candidate = reference.clone()
    candidate[2, 17] = 0.75
    candidate[3, 1] = 0.625
    verdict = of(
        finding(Status.IDENTICAL, "output[0]"),
        finding(
            Status.DIFFERENT,
            "output[1]",
            reason="its error is 2.5e+04 times what the reference's own noise allows",
            metrics=pair_metrics(reference, candidate),
            native=Score(
                max_z=3e5,
                max_limit=12.0,
                rms_z=1e4,
                rms_limit=2.658,
                index=(2, 17),
                noise="perturbed float64 runs",
            ),
            source="model.py:12, in forward",
            advice="compare the two programs layer by layer",
        ),
    )
    assert str(verdict) == said("""
        different: the candidate computes something else; 1 finding, 2 items compared
          output[1]: different (value)
            its error is 2.5e+04 times what the reference's own noise allows
            2 of 1000 elements differ (0.2 %); relative L2 0.018
            worst at [2, 17]: candidate 0.75, reference 0.5
            native: worst error 3e+05 times the noise (allowed 12), rms 1e+04 (allowed 2.66); noise from perturbed float64 runs
            at model.py:12, in forward
            compare the two programs layer by layer
    """)  # noqa: E501


def test_a_shape_says_both_shapes():
    assert str(judge({"x": torch.ones(1000)}, {"x": torch.ones(1, 1000)})) == said("""
        different: the candidate computes something else; 1 finding, 1 item compared
          value['x']: different (shape)
            shape [1, 1000] instead of [1000]
    """)


def test_integers_show_the_worst_of_them():
    reference = torch.arange(10)
    candidate = reference.clone()
    candidate[3] = 7
    assert str(judge(reference, candidate)) == said("""
        different: the candidate computes something else; 1 finding, 1 item compared
          value: different (value)
            1 of 10 values differ; these values are exact
            1 of 10 elements differ (10 %)
            worst at [3]: candidate 7, reference 3
    """)


def test_a_nan_is_shown_where_it_is():
    candidate = torch.ones(4)
    candidate[2] = torch.nan
    assert str(judge(torch.ones(4), candidate)) == said("""
        different: the candidate computes something else; 1 finding, 1 item compared
          value: different (value)
            1 of 4 NaN/Inf positions differ, the first at [2]
            1 of 4 elements differ (25 %); relative L2 inf
            worst at [2]: candidate nan, reference 1
    """)


def test_degraded_is_told_apart_from_different():
    line = str(of(finding(Status.DEGRADED))).splitlines()[0]
    assert line == (
        "degraded: the candidate is the same function, but less accurate than the reference's "
        "noise allows; 1 finding, 1 item compared"
    )


def test_a_slice_over_its_limit_is_named_where_nothing_else_is():
    score = Score(
        max_z=9.0,
        max_limit=12.0,
        rms_z=1.8,
        rms_limit=2.5,
        slice_axis=1,
        slice_index=17,
        slice_z=8.75,
        slice_limit=6.5,
        noise="perturbed float64 runs",
    )
    text = str(of(finding(Status.DEGRADED, native=score)))
    assert not score.passed
    assert re.search(r"axis 1\b", text), text
    assert re.search(r"\b17\b", text), text
    assert "8.75" in text
    assert "6.5" in text


def test_an_unstable_finding_fails_and_is_shown_when_strict():
    text = str(of(finding(Status.UNSTABLE, reason="a tie"), strict=True))
    assert text == said("""
        unstable: the candidate differs where the reference's own rounding decides; 1 finding, 1 item compared
          output: unstable (value)
            a tie
    """)  # noqa: E501


def test_the_gravest_findings_come_first_and_the_rest_is_counted():
    findings = [finding(Status.DEGRADED, f"output[{i}]") for i in range(12)]
    text = str(of(*findings, finding(Status.DIFFERENT, "output[12]")))
    lines = text.splitlines()
    assert lines[0].startswith("different: ")
    assert lines[0].endswith("; 13 findings, 13 items compared")
    assert lines[1] == "  output[12]: different (value)"
    assert lines[2] == "  output[0]: degraded (value)"
    assert lines[-1] == "  and 3 more"
    assert len(lines) == 12


# --- not compared ---------------------------------------------------------------------------------


def test_nothing_compared_says_so():
    assert str(Verdict()) == "unverified: nothing was compared"
    assert str(judge([], [])) == "unverified: nothing was compared"


def test_what_was_switched_off_says_so():
    assert str(Verdict(enabled=False)) == (
        "not verified: comparison was switched off (enabled=False); both sides ran"
    )


def test_what_could_not_be_compared_shows_why_and_what_to_do():
    assert str(judge(object(), object())) == said("""
        unverified: the candidate could not be compared; 1 finding, 1 item compared
          value: unverified (value)
            paritas cannot compare objects of type object
            return tensors or plain values, or pass a value_checker that accepts this type
    """)


def test_what_was_left_out_is_listed_even_on_a_pass():
    verdict = Verdict(
        findings=(finding(Status.IDENTICAL),),
        coverage=Coverage(compared=1, skipped=("3 gradients: why",), unmatched=("output[1]",)),
        notes=("the lifted run is switched off (lift=False)",),
    )
    assert str(verdict) == said("""
        identical: the candidate is equal bit for bit; 1 item compared
          not compared: output[1]
          skipped: 3 gradients: why
          note: the lifted run is switched off (lift=False)
    """)


def test_values_on_one_side_only_are_listed():
    x = torch.ones(2)
    assert str(judge({"a": x, "b": x}, {"a": x})) == said("""
        different: the candidate computes something else; 1 finding, 1 item compared
          value: different (structure)
            the reference returns 2 values, the candidate 1
          not compared: value['b'] (reference only)
    """)


# --- where it starts ------------------------------------------------------------------------------


def lines_about(origin: Origin, **fields) -> list[str]:
    text = str(of(finding(Status.DIFFERENT, "graph 0: it", origin=origin, **fields)))
    return [line.removeprefix("    ") for line in text.splitlines()[2:]]


def test_a_wrong_node_is_told_with_its_operator_module_and_line():
    origin = Origin(
        kind=OriginKind.NODE,
        name="relu_1",
        operator="aten.relu.default",
        module="layers.0.act",
        source="model.py:18, in forward",
        code="x = torch.relu(x)",
    )
    told = [
        "node relu_1: aten.relu.default in module layers.0.act",
        "at model.py:18, in forward",
        "  x = torch.relu(x)",
    ]
    assert lines_about(origin) == told
    assert lines_about(origin, source="model.py:18, in forward") == told


def test_nodes_compiled_together_are_all_named():
    origin = Origin(
        kind=OriginKind.FUSION,
        name="tanh, exp",
        operator="aten.tanh.default",
        nodes=("tanh", "exp"),
        remedies=("max_fusion_size=1", "layout_optimization=False"),
    )
    assert lines_about(origin) == [
        "compiled together: tanh, exp",
        "first of them: aten.tanh.default",
        "the difference disappears with the option max_fusion_size=1 or layout_optimization=False",
    ]


def test_a_remedy_that_the_reason_names_is_not_told_again():
    origin = Origin(kind=OriginKind.GRAPH, name="graph 0", remedies=("max_fusion_size=1",))
    assert lines_about(origin, reason="it goes away with max_fusion_size=1") == [
        "it goes away with max_fusion_size=1"
    ]


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (Origin(kind=OriginKind.NODE, name="add"), ["node add"]),
        (
            Origin(kind=OriginKind.NODE, name="add", module="head"),
            ["node add: in module head"],
        ),
        (Origin(kind=OriginKind.FUSION, name="a, b"), ["compiled together: a, b"]),
        (Origin(kind=OriginKind.PASS, name="fuse_all"), ["compiler pass fuse_all"]),
        (
            Origin(kind=OriginKind.PASS, name="fuse_all", operator="aten.mm.default"),
            ["compiler pass fuse_all: aten.mm.default"],
        ),
        (
            Origin(kind=OriginKind.PARTITION, name="min_cut"),
            ["the split of the graph into forward and backward"],
        ),
        (Origin(kind=OriginKind.GRAPH, name="graph 0"), []),
        (
            Origin(kind=OriginKind.GRAPH, name="graph 0", operator="aten.mm.default"),
            ["nearest operator: aten.mm.default"],
        ),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Origin) else "",
)
def test_every_kind_of_origin_has_its_words(origin, told):
    assert lines_about(origin) == told


# --- one finding ----------------------------------------------------------------------------------


def test_a_printed_finding_says_what_the_report_says_in_three_lines():
    found = finding(
        Status.DIFFERENT,
        dtype="float32",
        shape=(2, 8),
        reason="in float64, where rounding is negligible, it is 5 times over its limit",
        advice="look at that line",
        metrics=pair_metrics(torch.ones(2, 8), torch.full((2, 8), 1.5)),
        lifted=Score(max_z=60.0, max_limit=12.0, rms_z=9.0, rms_limit=2.5),
        native=Score(max_z=3.0, max_limit=12.0, rms_z=1.0, rms_limit=2.5),
        origin=Origin(
            kind=OriginKind.NODE,
            name="mul",
            operator="aten.mul",
            module="blocks.0",
            source="model.py:7",
            code="x = y * z",
        ),
        diagnosis=Diagnosis(
            patterns=(Pattern(kind="scale", confidence=1.0, sentence="scaled by 1.5"),)
        ),
    )
    assert str(found) == said(
        """
        different: output, float32[2,8], relative L2 0.5, worst 60 times the noise (allowed 12, lifted run)
          in float64, where rounding is negligible, it is 5 times over its limit; scaled by 1.5
          node mul: aten.mul in module blocks.0; at model.py:7; x = y * z; look at that line
        """  # noqa: E501
    )
    assert repr(found).startswith("Finding(path='output', ")


def test_a_printed_finding_that_passes_is_one_line():
    assert str(finding(Status.IDENTICAL, dtype="int64", shape=())) == "identical: output, int64[]"


def test_a_printed_finding_names_the_aspect_and_counts_exact_values():
    shape = finding(Status.DIFFERENT, aspect=Aspect.SHAPE, reason="(2,) against (3,)")
    assert str(shape) == "different: output (shape)\n  (2,) against (3,)"
    metrics = pair_metrics(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]))
    counted = finding(Status.DIFFERENT, dtype="int64", shape=(3,), metrics=metrics)
    assert str(counted) == "different: output, int64[3], 1 of 3 elements differ"


def test_a_printed_finding_counts_nan_and_inf_that_only_one_side_has():
    metrics = pair_metrics(torch.ones(4), torch.tensor([1, torch.nan, 1, torch.inf]))
    found = finding(Status.DIFFERENT, dtype="float32", shape=(4,), metrics=metrics)
    assert str(found) == "different: output, float32[4], NaN or Inf in 2 of 4 elements"


def test_a_printed_finding_shows_the_figure_that_decided():
    row = Score(
        max_z=3.0,
        max_limit=12.0,
        rms_z=1.0,
        rms_limit=2.5,
        slice_axis=0,
        slice_index=1,
        slice_z=9.0,
        slice_limit=4.0,
    )
    said_of = str(finding(Status.DEGRADED, native=row))
    assert said_of == "degraded: output, slice 9 times the noise (allowed 4, native run)"


def test_larger_results_are_printed_in_words_too():
    row = ComparisonRow(index=0, name="mul", step=1, status=Status.DIFFERENT, reason="off")
    assert str(row) == "different: mul (step 1)\n  off"
    sides = DumpFacts(path="a", kind="dump")
    comparison = Comparison(my=sides, golden=sides, rows=(row,), coverage=Coverage(compared=1))
    assert str(comparison) == str(comparison.verdict)
    assert str(GraphReport(graph="g.pt", kind="fx")) == (
        "g.pt: no calls\nunverified: nothing was compared"
    )


def test_a_span_is_read_as_it_is_written():
    assert [read_span(text) for text in ranges([3, (5, 8)]).split(", ")] == [(3, 3), (5, 8)]
    assert [read_span(text) for text in ("", "3-", "-3", "a", "3-4-5")] == [None] * 5
