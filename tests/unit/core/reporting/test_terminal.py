"""What a verdict looks like on a terminal."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from paritas.core.numerics.metrics import pair_metrics
from paritas.core.reporting.tables import MOST_ROWS, STYLES
from paritas.core.reporting.terminal import verdict_report
from paritas.core.results.findings import (
    Aspect,
    Coverage,
    Finding,
    Origin,
    OriginKind,
    Score,
    Status,
    Verdict,
)
from paritas.core.results.items import Item
from paritas.core.results.wording import headline

LONG_PATH = "gradient of encoder.layers.11.self_attention.output_projection.weight (second call)"


def printed(verdict, width=80, **options):
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, **options).print(
        verdict_report(verdict), crop=False
    )
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def score(max_z, *, rms_z=1.0, slice_z=None):
    return Score(
        max_z=max_z,
        max_limit=12.0,
        rms_z=rms_z,
        rms_limit=2.5,
        slice_z=slice_z,
        slice_limit=None if slice_z is None else 3.0,
        noise="perturbed float64 runs",
    )


def metrics(difference=1e-3):
    reference = torch.tensor([1.0, 2.0, 3.0, 4.0])
    return pair_metrics(reference, reference + difference)


def finding(path, status, **options):
    options.setdefault("aspect", Aspect.VALUE)
    return Finding(item=Item(name=path), status=status, **options)


def floats(path, status, **options):
    return finding(path, status, dtype="float32", shape=(4,), metrics=metrics(), **options)


def identical(count):
    return [finding(f"output[{i}]", Status.IDENTICAL) for i in range(count)]


def verdict_of(*findings, **options):
    options.setdefault("coverage", Coverage(compared=len(findings)))
    return Verdict(findings=findings, **options)


def test_a_report_reads_like_this():
    verdict = verdict_of(
        *identical(5),
        floats("output", Status.EQUIVALENT, native=score(0.71), lifted=score(0.01)),
        floats("gradient of w", Status.DIFFERENT, reason="it is scaled", lifted=score(4.2e5)),
        coverage=Coverage(compared=7, skipped=("buffers: not seen",), unmatched=("output[9]",)),
        notes=("the strides differ",),
    )
    assert printed(verdict) == [
        "status      item           value       off by   worst / allowed",
        "───────────────────────────────────────────────────────────────────",
        "different   gradient of w  float32[4]  3.7e-04  4.2e+05 / 12 lifted",
        "equivalent  output         float32[4]  3.7e-04  0.71 / 12",
        "identical   5 items",
        "off by: norm of the difference / norm of the reference, or a count of values",
        "worst / allowed: in multiples of the reference's own rounding noise",
        "",
        "gradient of w: different (value)",
        "  it is scaled",
        "  4 of 4 elements differ (100 %); relative L2 0.00037",
        "  worst at [0]: candidate 1.00100005, reference 1",
        "  lifted: worst error 4.2e+05 times the noise (allowed 12), rms 1 (allowed 2.5);",
        "  noise from perturbed float64 runs",
        "",
        "coverage: 7 compared, 1 skipped, 1 unmatched",
        "  skipped: buffers: not seen",
        "  unmatched: output[9]",
        "  note: the strides differ",
        "different: the candidate computes something else; 1 finding, 7 items compared",
    ]


def test_columns_without_a_figure_are_left_out():
    assert printed(verdict_of(finding("call", Status.DIFFERENT, aspect=Aspect.EXCEPTION)))[:3] == [
        "status     item",
        "───────────────────────────",
        "different  call (exception)",
    ]


def test_few_identical_items_have_a_row_each_and_many_share_one():
    few, many = MOST_ROWS[Status.IDENTICAL], MOST_ROWS[Status.IDENTICAL] + 1
    assert sum("output[" in line for line in printed(verdict_of(*identical(few)))) == few
    lines = printed(verdict_of(*identical(many)))
    assert not any("output[" in line for line in lines)
    assert f"identical  {many} items" in lines


@pytest.mark.parametrize("status", [Status.EQUIVALENT, Status.UNSTABLE, Status.DIFFERENT])
def test_rows_are_never_dropped_without_a_count(status):
    count = MOST_ROWS[status] + 5
    verdict = verdict_of(*(finding(f"item{i}", status) for i in range(count)))
    lines = printed(verdict)
    rows = [line for line in lines if line.startswith(f"{status.value}  ")]
    assert len(rows) == MOST_ROWS[status] + 1
    assert rows[-1].split() == [status.value, "5", "more", "items"]


def test_what_results_from_a_known_place_has_few_rows_and_a_count():
    place = finding(
        "node softmax",
        Status.DIFFERENT,
        origin=Origin(kind=OriginKind.NODE, name="softmax"),
    )
    ends = [finding(f"item{i}", Status.DIFFERENT, cause="node softmax") for i in range(20)]
    apart = finding("apart", Status.DIFFERENT)
    rows = [
        line.split(maxsplit=1)[1]
        for line in printed(verdict_of(*ends, apart, place))
        if line.startswith("different  ")
    ]
    assert rows == [
        "node softmax",
        "apart",
        "item0",
        "item1",
        "item2",
        "17 more items, as a result",
    ]


def test_of_many_equivalent_items_those_nearest_to_their_limits_are_shown():
    count = MOST_ROWS[Status.EQUIVALENT] + 5
    found = (floats(f"item{i}.", Status.EQUIVALENT, native=score(6 + i / 4)) for i in range(count))
    text = "\n".join(printed(verdict_of(*found)))
    assert "item4." not in text
    assert "item5." in text


def test_the_gravest_status_comes_first_and_then_the_order_of_the_program():
    verdict = verdict_of(
        finding("b", Status.EQUIVALENT),
        finding("a", Status.DEGRADED),
        finding("d", Status.DIFFERENT),
        finding("c", Status.DIFFERENT),
    )
    rows = [line.split() for line in printed(verdict)[2:6]]
    assert [path for _, path in rows] == ["d", "c", "a", "b"]


def test_no_line_is_longer_than_80_columns_but_for_the_last():
    verdict = verdict_of(
        floats(LONG_PATH, Status.DEGRADED, reason="long " * 40, native=score(4.2e5)),
        finding(
            "output['a']",
            Status.DIFFERENT,
            dtype="complex128",
            shape=(2, 1024, 1024, 32, 64),
            metrics=metrics(),
            lifted=score(3.1e12),
            advice="do " * 60,
        ),
        coverage=Coverage(compared=2, skipped=("why " * 50,), unmatched=("what " * 50,)),
        notes=("note " * 50,),
    )
    lines = printed(verdict)
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == headline(verdict)


def test_a_path_that_is_folded_is_still_whole():
    lines = printed(verdict_of(floats(LONG_PATH, Status.EQUIVALENT, native=score(1.0))))
    column = "".join(line[12:].split("  ")[0] for line in lines[2:9] if line[:2] in {"eq", "  "})
    assert column.replace(" ", "") == LONG_PATH.replace(" ", "")


def test_brackets_in_a_path_are_not_taken_for_markup():
    text = "\n".join(printed(verdict_of(finding("output['bold'][red]", Status.DIFFERENT))))
    assert "output['bold'][red]" in text


@pytest.mark.parametrize(
    ("native", "shown"),
    [
        (score(13.0), "13 / 12"),
        (score(11.0, rms_z=3.0), "rms 3 / 2.5"),
        (score(11.0, rms_z=2.0, slice_z=4.0), "slice 4 / 3"),
        (score(float("nan")), "nan / 12"),
        (score(float("inf")), "inf / 12"),
    ],
)
def test_the_figure_shown_is_the_one_over_its_limit(native, shown):
    lines = printed(verdict_of(floats("output", Status.DEGRADED, native=native)))
    assert lines[2].endswith(f"  {shown}")


def test_a_lifted_figure_says_so_and_goes_before_a_native_one_that_passes():
    both = floats("output", Status.DIFFERENT, native=score(1.0), lifted=score(1e6))
    assert printed(verdict_of(both))[2].endswith("1e+06 / 12 lifted")


def test_exact_values_are_counted_and_nonfinite_ones_named():
    exact = finding(
        "ids",
        Status.DIFFERENT,
        dtype="int64",
        shape=(3,),
        metrics=pair_metrics(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])),
    )
    nonfinite = finding(
        "logits",
        Status.DIFFERENT,
        dtype="float32",
        shape=(2,),
        metrics=pair_metrics(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])),
    )
    lines = printed(verdict_of(exact, nonfinite))
    assert lines[2].endswith("1 of 3")
    assert lines[3].endswith("1 NaN/Inf")


def test_many_unmatched_items_are_counted():
    coverage = Coverage(compared=1, unmatched=tuple(f"output[{i}]" for i in range(25)))
    lines = printed(verdict_of(*identical(1), coverage=coverage))
    assert "coverage: 1 compared, 0 skipped, 25 unmatched" in lines
    assert "  unmatched: 15 more" in lines


def test_findings_with_the_same_words_are_told_together():
    found = [finding(f"output[{i}]", Status.UNVERIFIED, reason="other draws") for i in range(3)]
    other = finding("ids", Status.UNVERIFIED, reason="no match")
    lines = printed(verdict_of(*found, other))
    start = lines.index("output[0]: unverified (value)")
    assert lines[start : start + 6] == [
        "output[0]: unverified (value)",
        "  other draws",
        "  also: output[1], output[2]",
        "ids: unverified (value)",
        "  no match",
        "",
    ]


def test_where_it_starts_is_told_with_a_path_relative_to_the_current_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    origin = Origin(
        kind=OriginKind.NODE,
        name="mm",
        operator="aten.mm.default",
        source=f"{tmp_path}/net.py:7, in forward",
        code="return x @ w",
    )
    lines = printed(verdict_of(finding("mm", Status.DIFFERENT, origin=origin)))
    start = lines.index("mm: different (value)")
    assert lines[start + 1 : start + 4] == [
        "  node mm: aten.mm.default",
        "  at net.py:7, in forward",
        "    return x @ w",
    ]


def test_many_failures_are_counted():
    found = [floats(f"item{i}", Status.DIFFERENT, lifted=score(99.0 + i)) for i in range(14)]
    same = [finding(f"other{i}", Status.DIFFERENT, reason="one reason") for i in range(14)]
    assert "and 4 more" in printed(verdict_of(*found))
    told = " ".join(" ".join(printed(verdict_of(*same))).split())
    assert "also: other1, other2," in told
    assert "other10 and 3 more" in told


def test_what_is_unstable_is_told_although_it_passes():
    lines = printed(verdict_of(finding("ids", Status.UNSTABLE, reason="a tie")))
    assert "ids: unstable (value)" in lines
    assert "  a tie" in lines


@pytest.mark.parametrize(
    "verdict",
    [Verdict(), Verdict(enabled=False), verdict_of(*identical(2)), verdict_of(strict=True)],
)
def test_the_last_line_is_the_headline(verdict):
    assert printed(verdict)[-1] == headline(verdict)


def test_every_status_has_a_style_and_a_limit():
    assert set(STYLES) == set(MOST_ROWS) == set(Status)


def test_colours_only_add_to_what_is_readable_without_them():
    verdict = verdict_of(*identical(2), floats("output", Status.DIFFERENT, lifted=score(99.0)))
    coloured = printed(verdict, force_terminal=True, color_system="standard")
    stream = io.StringIO()
    Console(file=stream, width=80, highlight=False, force_terminal=True, no_color=True).print(
        verdict_report(verdict), crop=False
    )
    assert any("\x1b[1;31mdifferent" in line for line in coloured)
    assert "different" in stream.getvalue()
