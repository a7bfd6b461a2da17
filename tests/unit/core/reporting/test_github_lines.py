"""Annotations that GitHub reads from the output of a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paritas.comparison.report import comparison_account
from paritas.core.reporting.annotations import MOST_LINES, github_lines
from paritas.core.results.findings import Status
from paritas.sharding.graphs.report import graph_account
from unit.comparison import comparison_samples
from unit.core.results.account_samples import HOSTILE, account, finding, traced
from unit.sharding.graphs import graph_samples

LINE = re.compile(
    r"::(?P<level>error|warning) file=(?P<file>[^,:]+),line=(?P<line>\d+),"
    r"title=(?P<title>[^,:]+)::(?P<message>.*)"
)


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    """A repository with one file, and the working directory in a folder of it."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "net.py").write_text("")
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path / "pkg")
    return tmp_path


def read(text):
    """The annotations in a text, as GitHub takes them apart."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [
        {name: _unescaped(value) for name, value in one.groupdict().items() if value is not None}
        for one in found
    ]


def _unescaped(text):
    for code, sign in (("%2C", ","), ("%3A", ":"), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(code, sign)
    return text


def test_a_failure_is_an_error_at_the_line_where_it_starts(repository):
    (one,) = read(github_lines(account(traced(f"{repository}/pkg/net.py:7"))))
    assert one == {
        "level": "error",
        "file": "pkg/net.py",
        "line": "7",
        "title": "paritas: output 0: different",
        "message": "node mm: aten.mm.default in module layers.0\n"
        "at net.py:7, in forward\nreturn x @ self.weight",
    }


def test_a_path_is_relative_to_the_workspace_that_github_names(repository, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(repository / "pkg"))
    (one,) = read(github_lines(account(traced(f"{repository}/pkg/net.py:7"))))
    assert one["file"] == "net.py"


@pytest.mark.parametrize("source", ["/usr/lib/python/torch/nn.py:3", "gone.py:3", "<string>:1", ""])
def test_without_a_line_in_the_repository_the_definition_of_the_subject_is_annotated(source):
    (one,) = read(github_lines(account(traced(source), file="pkg/net.py", line=12)))
    assert (one["file"], one["line"]) == ("pkg/net.py", "12")


def test_a_line_of_a_library_is_annotated_if_the_subject_has_no_file(repository):
    library = repository.parent / "library.py"
    library.write_text("")
    for file in ("", "runs/dump"):
        (one,) = read(github_lines(account(traced(f"{library}:3"), file=file)))
        assert (one["file"], one["line"]) == (str(library), "3")


def test_no_annotation_is_without_a_file_and_a_line():
    (one,) = read(github_lines(account(finding())))
    assert (one["file"], one["line"]) == ("nets:make", "1")
    many = [finding(f"output {n}", reason=f"reason {n}") for n in range(30)]
    found = read(github_lines(account(*many, file="pkg/net.py", line=12)))
    assert {(one["file"], one["line"]) for one in found} == {("pkg/net.py", "12")}


def test_a_cause_has_one_annotation_that_names_what_results_from_it(repository):
    start = traced(f"{repository}/pkg/net.py:7", "node mm")
    results = [finding(f"output {n}", cause="node mm", reason=f"reason {n}") for n in range(5)]
    (one,) = read(github_lines(account(*results, start)))
    assert (one["file"], one["line"]) == ("pkg/net.py", "7")
    assert one["message"].endswith(
        "\nas a result, also 5 values: output 0, output 1, output 2, output 3, output 4"
    )


def test_what_passes_is_not_annotated():
    passed = [finding(f"output {n}", status) for n, status in enumerate(list(Status)[:2])]
    assert github_lines(account(*passed, skipped=["gradients"])) == ""


def test_unstable_is_a_warning_and_an_error_where_it_counts_as_one():
    unstable = finding(status=Status.UNSTABLE, reason="a tie")
    assert read(github_lines(account(unstable)))[0]["level"] == "warning"
    assert read(github_lines(account(unstable, strict=True)))[0]["level"] == "error"


def test_a_failure_without_a_finding_is_told_all_the_same():
    (one,) = read(github_lines(account(compared=0)))
    assert one["level"] == "error"
    assert one["message"] == "unverified: nothing was compared"


def test_signs_with_a_meaning_are_escaped_and_control_characters_spelled_out():
    text = github_lines(account(finding(HOSTILE, reason=HOSTILE)))
    (one,) = read(text)
    spelled = r"a,b:c%d" + "\n" + r"::error::e\x1b[31m</failure>]]>\x00\xd800"
    assert one["title"] == f"paritas: {spelled}: different"
    assert one["message"] == spelled
    text.encode()


def test_items_wrong_in_the_same_way_on_one_line_share_an_annotation(repository):
    source = f"{repository}/pkg/net.py:7"
    (one,) = read(github_lines(account(*(traced(source, f"output {n}") for n in range(12)))))
    assert one["message"].endswith(
        "as a result, also 11 values: output 1, output 2, output 3, output 4, output 5, output 6, "
        "output 7, output 8, output 9, output 10 and 1 more"
    )


@pytest.mark.parametrize("many", [MOST_LINES, MOST_LINES + 1, 100])
def test_no_more_are_written_than_github_shows_and_the_rest_is_counted(many):
    bad = [finding(f"output {n}", reason=f"reason {n}") for n in range(many)]
    found = read(github_lines(account(*bad)))
    assert len(found) == MOST_LINES
    rest = found[-1]["title"]
    assert (
        rest == "paritas: output 9: different"
        if many == MOST_LINES
        else f"paritas: {many - 9} more"
    )


def test_the_gravest_come_first():
    found = [finding(f"output {n}", status, reason=str(n)) for n, status in enumerate(Status)]
    titles = [one["title"].rpartition(" ")[2] for one in read(github_lines(account(*found)))]
    assert titles == ["different", "degraded", "unverified", "unstable"]


def test_a_comparison_begins_with_the_row_that_made_the_difference():
    comparison = comparison_samples.transformer(layers=3, faulty=1)
    text = github_lines(comparison_account(comparison, subject="mine golden"))
    made = next(row for row in comparison.rows if row.made == "here")
    assert read(text)[0]["title"].startswith(f"paritas: {made.name}")


def test_a_wrong_split_of_a_graph_is_an_error_at_its_line(repository):
    (repository / "models").mkdir()
    Path(repository / "models" / "block.py").write_text("")
    found = read(github_lines(graph_account(graph_samples.transformer(), subject="model.pt2")))
    wrong = next(one for one in found if "different" in one["title"])
    assert wrong["file"] == "models/block.py"
    assert {one["level"] for one in found} == {"error"}


@pytest.mark.parametrize("make", ["unsupported", "interrupted", "empty", "hostile"])
def test_a_graph_that_does_not_pass_is_never_without_an_error(make):
    report = getattr(graph_samples, make)()
    assert report.exit_code
    assert read(github_lines(graph_account(report, subject="model.pt2")))


def test_a_graph_that_passes_has_no_error():
    assert "::error" not in github_lines(
        graph_account(graph_samples.passing(), subject="model.pt2")
    )
