"""`paritas explain` reads what other commands wrote, and refuses what they did not."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.comparison.results_folder import write_all
from paritas.core.results.findings import Aspect, Coverage, Finding, Status, Verdict
from paritas.core.results.items import output
from paritas.engines.rows import EngineReport
from paritas.kernels.rows import CaseFamily, KernelReport, KernelRow
from paritas.relations.rows import InvariantsReport
from paritas.sweeping.rows import SweepReport
from unit.comparison import comparison_samples
from unit.sharding.graphs import graph_samples

WRONG = Finding(item=output(), aspect=Aspect.VALUE, status=Status.DIFFERENT, reason="far off")
VERDICT = Verdict(findings=(WRONG,), coverage=Coverage(compared=1))


def explain(*arguments):
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "verdict.json"
    path.write_bytes(VERDICT.to_json())
    return path


def test_a_verdict_is_explained_and_that_is_a_success(file):
    result = explain(file)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("different: the candidate computes something else")
    assert "far off" in result.stdout


def test_the_page_says_the_same(file, tmp_path):
    page = tmp_path / "pages" / "v.html"
    page.parent.mkdir()
    assert explain(file, "--html", page).exit_code == 0
    text = page.read_text()
    assert "far off" in text
    assert 'href="../verdict.json"' in text
    assert "What to do next" in text


def test_one_finding_is_explained(file):
    assert "output: different" in explain(file, "--finding", "output").stdout
    refused = explain(file, "--finding", "outptu")
    assert refused.exit_code == 2
    assert "no finding has this path" in refused.stderr


def kernel():
    row = KernelRow(case="zeros", family=CaseFamily.GIVEN, status=Status.DIFFERENT, verdict=VERDICT)
    return KernelReport(reference="r", candidate="c", rows=(row,), script="case.py")


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (kernel(), "run the script that shows it: python case.py"),
        (comparison_samples.transformer(layers=3, faulty=1), "paritas shrink "),
        (graph_samples.transformer(), "paritas shrink "),
        (InvariantsReport(), "unverified: nothing was compared"),
        (EngineReport(), "unverified: nothing was compared"),
        (SweepReport(), "unverified: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_result_is_explained(report, words, tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(report.to_json())
    result = explain(path)
    assert result.exit_code == 0, result.output
    assert words in result.stdout


def test_the_folder_of_a_comparison_is_explained(tmp_path):
    write_all(tmp_path / "out", comparison_samples.transformer(layers=3, faulty=1))
    result = explain(tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "as a result, also " in result.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a JSON object"),
        (b"[1]", "is not a JSON object"),
        (b"\xff\xfe", "is not a JSON object"),
        (VERDICT.to_json()[:100], "is not a JSON object"),
        (b'{"name": "x", "version": 1}', "it has no verdict (its fields: name, version)"),
        (b'{"findings": [], "from_the_future": 1}', "damaged or from another version"),
    ],
    ids=["empty", "list", "binary", "truncated", "foreign", "newer"],
)
def test_what_is_not_a_verdict_is_refused(content, words, tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    result = explain(path)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_does_not_exist_is_refused(tmp_path):
    missing = explain(tmp_path / "gone.json")
    assert missing.exit_code == 2
    assert "does not exist: give a file that --json wrote" in missing.stderr
    empty = explain(tmp_path)
    assert empty.exit_code == 2
    assert "has none of comparison.json, results.json, sweep.json" in empty.stderr
