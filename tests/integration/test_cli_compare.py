"""`paritas compare` and `paritas report`, from the command line to the exit code."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
from click.testing import CliRunner

from integration.dump_making import Making, values
from paritas.app.cli import main
from paritas.comparison import compare as comparing
from paritas.comparison.results_folder import read_comparison
from paritas.core.results.findings import Status
from unit.comparison.comparison_samples import transformer

FILES = ["comparison.csv", "comparison.json", "report.html"]


def paritas(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def last_line(result):
    return result.stdout.splitlines()[-1]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_chain(path, fault=None):
    """Four calls, each of the one before; `fault` is called with the second one's result."""
    making = Making(path)
    x = values(4, 8)
    for layer in range(4):
        y = x.cos()
        if layer == 1 and fault is not None:
            y = fault(y)
        making.call(
            f"layers.{layer}/aten.cos.default",
            [x],
            y,
            op="aten.cos.default",
            module=f"layers.{layer}",
        )
        x = y
    making.close()
    return path


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("golden") / "dump")


@pytest.fixture
def stub(monkeypatch):
    """What `compare` was asked for; it gives a comparison made up."""
    asked = {}

    def compare(my, golden, **options):
        asked.update(options, my=my, golden=golden)
        return asked.get("result", transformer(layers=2, faulty=1))

    monkeypatch.setattr(comparing, "compare", compare)
    return asked


# --- two dumps ------------------------------------------------------------------------------------


def test_the_same_program_twice_is_identical_and_0(golden, tmp_path):
    again = write_chain(tmp_path / "again")
    result = paritas(
        "compare", "--my-path", again, "--golden-path", golden, "--output", tmp_path / "o"
    )
    assert result.exit_code == 0, result.output
    assert last_line(result).startswith("identical: ")
    assert names(tmp_path / "o") == FILES
    assert read_comparison(tmp_path / "o").status is Status.IDENTICAL


def test_a_fault_is_named_where_it_was_made_and_is_1(golden, tmp_path):
    wrong = write_chain(tmp_path / "wrong", fault=lambda y: y * 1.5)
    result = paritas(
        "compare", "--my-path", wrong, "--golden-path", golden, "--output", tmp_path / "o"
    )
    assert result.exit_code == 1, result.output
    assert last_line(result).startswith("different: ")
    found = read_comparison(tmp_path / "o")
    assert found.rows[found.first.row].module == "layers.1"
    assert "first divergence: forward/layers.1/aten.cos.default#0/output.0" in result.stdout
    with (tmp_path / "o" / "comparison.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(found.rows)
    made = [line["name"] for line in lines if line["made"] == "here"]
    assert made == ["forward/layers.1/aten.cos.default#0/output.0"]


@pytest.mark.parametrize(
    ("mine", "golden", "result", "status"),
    [
        (1, -1, 0.0, "equivalent"),  # another spelling
        (1, 2, 1.0, "different"),  # the results differ, too
        (1e-6, 1e-5, 0.0, "different"),  # rounding may hide it
        (True, False, 0.0, "different"),
    ],
)
def test_another_integer_is_accepted_if_the_results_of_the_call_agree(
    tmp_path, mine, golden, result, status
):
    for name, argument, added in (("my", mine, result), ("golden", golden, 0.0)):
        making = Making(tmp_path / name)
        making.call("attn/aten.f.default", [values(2, 3), argument], values(2, 3) + added)
        making.close()
    found = comparing.compare(tmp_path / "my", tmp_path / "golden")
    (row,) = [row for row in found.rows if row.position == "1"]
    assert row.status.value == status
    assert ("results of the call agree" in row.limits) == (status == "equivalent")


def test_nothing_in_common_is_unverified_and_3(golden, tmp_path):
    making = Making(tmp_path / "other")
    making.call("elsewhere", [values(3)], values(5, 5), op="aten.sin.default", level="node")
    making.close()
    result = paritas(
        "compare",
        "--my-path",
        tmp_path / "other",
        "--golden-path",
        golden,
        "--output",
        tmp_path / "o",
    )
    assert result.exit_code == 3, result.output
    assert read_comparison(tmp_path / "o").coverage.unmatched


def test_a_dump_that_is_not_there_is_2_and_nothing_is_left(golden, tmp_path):
    result = paritas(
        "compare", "--my-path", tmp_path / "no", "--golden-path", golden, "--output", tmp_path / "o"
    )
    assert result.exit_code == 2
    assert f"{tmp_path / 'no'}" in result.stderr
    assert not (tmp_path / "o").exists()


def test_a_bad_rule_is_2_and_shown(golden, tmp_path):
    options = ("--golden-path", golden, "--output", tmp_path / "o", "--rule", "[: max_abs < 1")
    result = paritas("compare", "--my-path", golden, *options)
    assert result.exit_code == 2
    assert "invalid regular expression '['" in result.stderr


# --- options --------------------------------------------------------------------------------------


def test_every_option_reaches_the_comparison(stub, tmp_path):
    config = tmp_path / "rules.toml"
    config.write_text("")
    options = [
        *("--my-path", "a", "--golden-path", "s3://b/c", "--output", tmp_path / "o"),
        *("--my-kind", "ge", "--golden-kind", "fx", "--config", config),
        *("--rule", "attn: max_abs < 1", "--rename", r"^m\.=t.", "--rename", "x=y"),
        *("--dims", "q: b s[cp]", "--mesh", "tp=2,cp=2", "--steps", "0-4", "--steps", "1:0"),
        *("-r", "0-1", "--ranks", "5", "--rank", "7", "--ignore", "rotary", "--unmatched", "list"),
        *("--no-replay", "--quick", "--strict", "--executor", "dask://host:1", "--jobs", "3"),
        "--trust-digests",
    ]
    result = paritas("compare", *options)
    assert result.exit_code == 1, result.output
    assert stub.pop("on_progress") is not None
    assert stub == {
        "my": "a",
        "golden": "s3://b/c",
        "my_kind": "ge",
        "golden_kind": "fx",
        "config": config,
        "rules": (("attn", "max_abs < 1"),),
        "renames": ((r"^m\.", "t."), ("x", "y")),
        "dims": (("q", "b s[cp]"),),
        "mesh": "tp=2,cp=2",
        "steps": ("0-4", "1:0"),
        "ranks": [0, 1, 5, 7],
        "ignore": ("rotary",),
        "unmatched": "list",
        "replay": False,
        "quick": True,
        "strict": True,
        "executor": "dask://host:1",
        "jobs": 3,
        "trust_digests": True,
    }


def test_it_writes_to_the_current_directory_by_default(stub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert paritas("compare", "--my-path", "a", "--golden-path", "b").exit_code == 1
    assert names(tmp_path) == FILES


def test_parquet_comes_and_html_goes_when_asked(stub, tmp_path):
    options = ("--my-path", "a", "--golden-path", "b", "--output", tmp_path)
    paritas("compare", *options, "--parquet", "--no-html")
    assert names(tmp_path) == ["comparison.csv", "comparison.json", "comparison.parquet"]


def test_an_earlier_comparison_is_refused_before_any_work(stub, tmp_path):
    options = ("--my-path", "a", "--golden-path", "b", "--output", tmp_path)
    paritas("compare", *options)
    stub.clear()
    result = paritas("compare", *options)
    assert result.exit_code == 2
    assert "contains an earlier comparison" in result.stderr
    assert not stub
    assert paritas("compare", *options, "--overwrite").exit_code == 1
    assert stub["my"] == "a"


def test_a_url_is_written_to_and_looked_at_before_the_work(stub, golden):
    import fsspec

    place = "memory://compared/here"
    arguments = ["compare", "--my-path", "a", "--golden-path", "b", "--output", place]
    assert f"written to {place}: report.html" in " ".join(paritas(*arguments).output.split())
    store = fsspec.filesystem("memory")
    assert store.exists("/compared/here/comparison.csv")
    stub.clear()
    again = paritas(*arguments)
    assert again.exit_code == 2
    assert "contains an earlier comparison" in again.output
    assert not stub
    store.rm("/compared", recursive=True)


def test_quiet_says_the_verdict_alone(stub, tmp_path):
    result = paritas(
        "compare", "--my-path", "a", "--golden-path", "b", "--output", tmp_path, "--quiet"
    )
    assert len(result.stdout.splitlines()) == 1
    assert last_line(result).startswith("different: ")
    assert result.stderr == ""


def test_interrupted_is_130_and_leaves_nothing(monkeypatch, tmp_path):
    def compare(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparing, "compare", compare)
    result = paritas("compare", "--my-path", "a", "--golden-path", "b", "--output", tmp_path / "o")
    assert result.exit_code == 130
    assert "interrupted: there is no verdict" in result.stderr
    assert not (tmp_path / "o").exists()


def test_a_slip_is_told_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from paritas.app.cli import main\n"
        "try: main(['compare', '--my-path', 'a', '--golden-path', 'b', '--rule', 'x'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "'x' does not have the form REGEX: EXPRESSION" in done.stderr


# --- the report, again ----------------------------------------------------------------------------


def test_a_report_is_made_again_from_the_json(stub, tmp_path):
    paritas("compare", "--my-path", "a", "--golden-path", "b", "--output", tmp_path)
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "report.html").unlink()
    for given in (tmp_path, tmp_path / "comparison.json"):
        result = paritas("report", given)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("different: ")
    assert (tmp_path / "report.html").read_bytes() == before


def test_a_report_can_go_elsewhere(stub, tmp_path):
    options = ("--my-path", "a", "--golden-path", "b", "--output", tmp_path / "o", "--no-html")
    paritas("compare", *options)
    result = paritas("report", tmp_path / "o", "--output", tmp_path / "page.html")
    assert last_line(result) == f"written: {tmp_path / 'page.html'}"
    assert not (tmp_path / "o" / "report.html").exists()


def test_a_report_of_nothing_is_2(tmp_path):
    result = paritas("report", tmp_path)
    assert result.exit_code == 2
    assert "has no comparison.json" in result.stderr
