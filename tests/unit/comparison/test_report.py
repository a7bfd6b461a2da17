"""What a comparison looks like on a terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from paritas.comparison.report import MOST_ROWS, comparison_report
from paritas.comparison.rows import Basis, Comparison, ComparisonRow, Divergence, DumpFacts
from paritas.core.results.findings import Coverage, Status
from paritas.core.results.wording import headline
from unit.comparison.comparison_samples import (
    dump,
    figures,
    row,
    score,
    transformer,
    transformer_rows,
)

CALL = ("act", "aten.gelu.default", ())


def printed(comparison, *remarked, width=80):
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    console.print(comparison_report(comparison, *remarked), crop=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def text_of(comparison, *remarked):
    """Without regard to where lines are broken."""
    return " ".join(" ".join(printed(comparison, *remarked)).split())


def made_of(*rows, **facts):
    coverage = Coverage(compared=len(rows))
    return Comparison(my=dump("a"), golden=dump("b"), rows=rows, coverage=coverage, **facts)


def failing(index=0, **facts):
    return row(index, "layers.0", CALL, Status.DIFFERENT, **{"reason": "it is off", **facts})


def table_rows(comparison):
    """The items of the table of rows, each with its status."""
    lines = printed(comparison)
    start = next(n for n, line in enumerate(lines) if line.startswith("status ")) + 2
    end = lines.index("", start)
    return [line.split()[:2] for line in lines[start:end] if line.startswith(tuple(Status))]


@pytest.mark.parametrize(
    "comparison", [transformer(), transformer(faulty=None)], ids=["bad", "good"]
)
def test_it_fits_80_columns_and_ends_with_the_verdict(comparison):
    *lines, last = printed(comparison)
    assert max(map(len, lines)) <= 80
    assert last == f"{headline(comparison.verdict)}, 1 by statistics only"


def test_equal_statistics_are_not_called_equal_bits():
    rows = [
        ComparisonRow(
            index=0,
            step=0,
            name="a",
            status=Status.IDENTICAL,
            judged_by="statistics",
            basis=Basis.SUMMARIES,
        )
    ]
    facts = DumpFacts(path="a", kind="msprobe")
    found = Comparison(my=facts, golden=facts, rows=tuple(rows), coverage=Coverage(compared=1))
    assert printed(found)[-1] == (
        "identical: the candidate is the same in everything recorded; 1 item compared, "
        "1 by statistics only"
    )


def test_the_counts_are_by_status_phase_and_level():
    lines = printed(transformer())
    place = next(n for n, line in enumerate(lines) if line.startswith("rows "))
    assert lines[place - 1].split() == ["forward", "forward", "backward"]
    assert lines[place].split() == ["rows", "node", "buffer", "node"]
    assert lines[place + 2].split() == ["different", "38", "9", "1"]
    assert lines[place + 7].split() == ["identical", "4"]


def test_the_first_divergence_is_the_first_row_though_others_are_as_grave():
    assert table_rows(transformer())[0] == ["different", "layers_7_mlp_act"]


def test_rows_that_only_inherit_are_few_and_counted():
    shown = table_rows(transformer())
    assert sum(item.startswith(("layers_", "backward")) for _, item in shown) == 9
    assert "39 more, 39 of them inherit it" in text_of(transformer())


def test_many_rows_share_a_line():
    rows = [msgspec.structs.replace(failing(n), index=n) for n in range(100)]
    assert len(table_rows(made_of(*rows))) == MOST_ROWS
    assert f"{100 - MOST_ROWS} more" in text_of(made_of(*rows))


def test_the_first_divergence_in_words_has_all_that_is_asked_for():
    text = text_of(transformer())
    story = text[text.index("first divergence: ") : text.index("next: ")]
    for words in (
        "forward/graph_0/layers_7_mlp_act#0/output.0 (step 0): different (value)",
        "7372 of 8192 elements differ (90 %)",
        "worst at [1, 3, 17]: candidate 1.52913954, reference 1.25",
        "worst error 46.5 times the noise (allowed 12)",
        "compiled together: mul, erf, add, mul_1",
        "call of aten.gelu.default in module layers.7.mlp.act",
        "at model/mlp.py:47, in forward: x = self.act(x)",
        "written by cpp_fused_mul_erf_add_mul_1_85",
        "made here",
        "added here 0.031, came in 0.00098; measured by running the operator again",
        "matched by node, judged by noise of bfloat16",
    ):
        assert words in story
    assert "next: run this call by itself: paritas verify" in text


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        ("given", "", "not made here: it was in the inputs of the program"),
        (
            "unclear",
            "no input is recorded",
            "it is unknown whether it was made here: no input is recorded",
        ),
    ],
)
def test_a_divergence_that_was_not_made_there_says_so(kind, reason, words):
    first = Divergence(kind=kind, row=0, reason=reason)
    text = text_of(made_of(failing(), first=first))
    assert words in text
    assert "call of aten.gelu.default in module layers.0.act" in text
    assert "next: " in text


def test_what_a_row_cannot_show_is_told():
    limited = failing(limits="only statistics were recorded")
    text = text_of(made_of(limited, first=Divergence(kind="unclear", row=0)))
    assert "limits of this check: only statistics were recorded" in text


def test_a_nan_that_begins_elsewhere_is_told_by_itself():
    rows = (failing(0), failing(1, reason="3 of 8192 NaN/Inf positions differ"))
    where = Divergence(kind="made", row=1)
    text = text_of(made_of(*rows, first=Divergence(kind="made", row=0), first_non_finite=where))
    assert text.index("first divergence: ") < text.index("first NaN or infinity: ")
    assert "3 of 8192 NaN/Inf positions differ" in text


def test_a_nan_that_begins_at_the_divergence_is_told_with_it():
    where = Divergence(kind="made", row=0)
    text = text_of(made_of(failing(), first=where, first_non_finite=where))
    assert "first divergence; also the first NaN or infinity: " in text
    assert text.count("it is off") == 1


def test_what_could_not_be_compared_says_why():
    unread = failing(1, reason="cut off after 12 bytes")
    unread = msgspec.structs.replace(unread, status=Status.UNVERIFIED)
    text = text_of(made_of(failing(), unread, first=Divergence(kind="made", row=0)))
    assert "unverified (value) cut off after 12 bytes" in text


def test_without_a_divergence_the_failures_are_told_themselves():
    assert "different (value) it is off" in text_of(made_of(failing()))


def test_unmatched_problems_and_remarks_are_listed():
    found = transformer()
    damaged = dump("runs/eager", problems=("rank0/index.jsonl: line 7 is cut off",))
    text = text_of(msgspec.structs.replace(found, golden=damaged), "written to OUT: report.html")
    assert "coverage: 137 compared, 1 skipped, 2 unmatched" in text
    assert "unmatched: forward/graph_0/head_dropout#0/output.0" in text
    assert "problem in the golden dump: rank0/index.jsonl: line 7 is cut off" in text
    assert "note: step 0 of mine is step 0 of golden written to OUT: report.html" in text


def test_where_all_passes_the_rows_nearest_to_their_limits_are_shown():
    rows = transformer_rows(layers=3, faulty=None)
    shown = table_rows(made_of(*rows))
    assert {status for status, _ in shown} == {"equivalent"}
    nearest = max(rows, key=lambda row: row.score.excess if row.score else 0)
    assert shown[0][1] == nearest.name.split("/")[2].removesuffix("#0")


def test_where_all_is_identical_there_is_no_table_of_rows():
    same = row(0, "layers.0", CALL, Status.IDENTICAL, figures=figures(0.0))
    assert not any(line.startswith("status") for line in printed(made_of(same)))


def test_steps_and_ranks_are_named_where_there_are_several():
    rows = (failing(0, score=score(3)), failing(1, step=2, rank=3, score=score(3)))
    assert "layers_0_act step 0 rank 0" in text_of(made_of(*rows))
    assert "layers_0_act step 2 rank 3" in text_of(made_of(*rows))


def test_nothing_compared_is_unverified():
    empty = Comparison(my=dump("a"), golden=dump("b"))
    assert printed(empty)[-1] == "unverified: nothing was compared"


def test_brackets_in_names_are_no_markup():
    assert "[bold]x[/bold]" in text_of(made_of(failing(name="forward/[bold]x[/bold]#0/output.0")))
