"""The pytest plugin, seen by the suites that use it."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ET

import msgspec
import pytest
import torch

import processes
from integration.pytest_runs import outcomes, run_suite
from paritas import Verdict

pytest_plugins = ["pytester"]

HEAD = """
import pytest
import torch

def double(x):
    return x * 2

def almost_double(x):
    return x * 2.001

def spoiled(graph, inputs):
    return lambda *args: tuple(result * 1.01 for result in graph(*args))
"""


def suite(pytester, body, name="test_suite"):
    pytester.makepyfile(**{name: HEAD + body})


# --- verify ---------------------------------------------------------------------------------------


def test_verify_records_what_passes_and_fails_the_test_with_its_text(pytester):
    suite(
        pytester,
        """
def test_good(parity):
    assert parity.verify([torch.ones(3)], double, lambda x: x + x)

def test_bad(parity):
    parity.verify([torch.ones(3)], double, almost_double)

def test_as_data(parity):
    verdict = parity.verify([torch.ones(3)], double, almost_double, raise_on_mismatch=False)
    assert not verdict
""",
    )
    result = run_suite(pytester, "--junitxml=out.xml", "--paritas-report=pages")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *MismatchError: different: the candidate computes something else; *",
            "*= paritas =*",
            "3 verdicts in 3 tests: 2 different, 1 identical",
            "different: test_suite.py::test_bad (verify) output: *",
            "2 pages about failures: pages?index.html",
        ]
    )
    result.stdout.no_fnmatch_line("*raise MismatchError*")
    cases = {
        case.get("name"): [msgspec.json.decode(it.get("value")) for it in case.iter("property")]
        for case in ET.parse(pytester.path / "out.xml").iter("testcase")
    }
    assert cases["test_good"] == [
        {"kind": "verify", "status": "identical", "passed": True, "compared": 4}
    ]
    assert cases["test_bad"][0]["worst"].startswith("output: ")
    pages = pytester.path / "pages"
    names = sorted(path.name for path in pages.iterdir())
    assert names == [
        "index.html",
        "test_suite.py.test_as_data-0.html",
        "test_suite.py.test_as_data-0.json",
        "test_suite.py.test_bad-0.html",
        "test_suite.py.test_bad-0.json",
    ]
    whole = Verdict.from_json((pages / names[-1]).read_bytes())
    assert whole.status.value == "different"


# --- marks ----------------------------------------------------------------------------------------


def test_the_inner_mark_wins_and_the_call_before_it(pytester):
    suite(
        pytester,
        """
pytestmark = pytest.mark.parity(verify_values=False, verify_second_call=False)

def test_of_module(parity):
    parity.verify([torch.ones(3)], double, almost_double)

@pytest.mark.parity(verify_values=True)
class TestClass:
    def test_of_class(self, parity):
        with pytest.raises(AssertionError):
            parity.verify([torch.ones(3)], double, almost_double)
        assert parity.settings["verify_second_call"] is False

    @pytest.mark.parity(verify_values=False)
    def test_of_function(self, parity):
        parity.verify([torch.ones(3)], double, almost_double)
        with pytest.raises(AssertionError):
            parity.verify([torch.ones(3)], double, almost_double, verify_values=True)
""",
    )
    run_suite(pytester).assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("strct=True", "*unknown setting 'strct'; did you mean 'strict'?"),
        ("lift='no'", "lift must be True or False, not 'no'"),
        ("on_mismatch='cry'", "on_mismatch must be one of *, not 'cry'"),
        ("True", "*has a positional value True; write name=value, such as strict=True"),
    ],
)
def test_a_wrong_mark_is_an_error_also_where_nothing_is_checked(pytester, mark, message):
    suite(pytester, f"@pytest.mark.parity({mark})\ndef test_it():\n    pass\n")
    result = run_suite(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


# --- guard ----------------------------------------------------------------------------------------


def test_a_guard_is_judged_at_the_end_of_its_test(pytester):
    torch.compiler.reset()
    suite(
        pytester,
        """
reached = []

def test_wrong(parity):
    torch.compile(double, backend=parity.guard(spoiled))(torch.ones(3))
    reached.append(1)

def test_reached():
    assert reached

def test_right(parity):
    torch.compile(double, backend=parity.guard("eager"))(torch.ones(3))

def test_unused(parity):
    parity.guard("eager")

def test_skipped(parity):
    parity.guard("eager")
    pytest.skip("not today")

def test_failed(parity):
    torch.compile(double, backend=parity.guard(spoiled))(torch.ones(3))
    assert reached == 5
""",
    )
    result = run_suite(pytester)
    result.assert_outcomes(passed=2, failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_wrong _*",
            "different: the candidate computes something else; *",
            "*_ test_unused _*",
            "unverified: the candidate could not be compared; 1 finding, 0 items compared",
            "*the test compiled nothing with it",
            "*_ test_failed _*",
            "E *assert *",
            "E *paritas found this in the compiled code of the test:",
            "E *different: the candidate computes something else; *",
            "guarded: 3 graphs, 3 of 3 calls checked",
        ]
    )
    result.stdout.no_fnmatch_line("*hidden*")


def test_a_guard_that_the_environment_switches_off_is_said_to_be_so(pytester, monkeypatch):
    monkeypatch.setenv("PARITAS_GUARD", "0")
    suite(pytester, "def test_it(parity):\n    parity.guard('eager')\n")
    result = run_suite(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["1 check disabled: nothing was compared there"])
    refused = run_suite(pytester, "--paritas-guard")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(
        ["ERROR: --paritas-guard has no effect: PARITAS_GUARD=0 *unset it"]
    )


# --- goldens --------------------------------------------------------------------------------------


def test_goldens_are_missed_written_kept_and_changed(pytester):
    body = """
def test_it(parity):
    parity.golden({"y": double(torch.ones(4)) VALUE, "n": 3}, "out")
"""
    suite(pytester, body.replace("VALUE", ""))
    missed = run_suite(pytester)
    missed.assert_outcomes(failed=1)
    missed.stdout.fnmatch_lines(
        [
            "E *golden 'out': unverified (harness)",
            "E *golden?test_suite?test_it?out does not exist",
            "E *run pytest with --paritas-update to write it, *",
        ]
    )
    run_suite(pytester, "--paritas-update").assert_outcomes(passed=1)
    header = pytester.path / "golden" / "test_suite" / "test_it" / "out" / "rank0" / "header.json"
    written = header.read_bytes()
    # Rounding is no reason to write anew.
    suite(pytester, body.replace("VALUE", "* (1 + 2**-23)"))
    kept = run_suite(pytester, "--paritas-update")
    kept.stdout.fnmatch_lines(["1 verdict in 1 test: 1 equivalent"])
    assert header.read_bytes() == written
    suite(pytester, body.replace("VALUE", "* 1.01"))
    run_suite(pytester).assert_outcomes(failed=1)
    changed = run_suite(pytester, "--paritas-update")
    changed.assert_outcomes(passed=1)
    changed.stdout.fnmatch_lines(
        [
            "goldens: 1 changed, 0 unchanged",
            "  changed: golden?test_suite?test_it?out (it was off: value?'y'?: *)",
        ]
    )
    run_suite(pytester).assert_outcomes(passed=1)


def test_goldens_that_no_test_asks_for_are_named(pytester):
    body = """
def test_one(parity):
    parity.golden(torch.ones(1), "out")
"""
    suite(
        pytester,
        body + '    parity.golden(1, "old")\n' + body.replace("test_one", "test_two"),
    )
    run_suite(pytester, "--paritas-update").assert_outcomes(passed=2)
    suite(pytester, body)
    result = run_suite(pytester)
    result.stdout.fnmatch_lines(
        [
            "unused golden: golden?test_suite?test_one?old; *",
            "unused golden: golden?test_suite?test_two?out; *",
        ]
    )
    narrow = run_suite(pytester, "test_suite.py::test_one")
    narrow.stdout.no_fnmatch_line("*test_two*")


def test_a_golden_has_its_name_once_in_a_test(pytester):
    suite(
        pytester,
        """
def test_it(parity):
    parity.golden(1, "out")
    parity.golden(2, "out")
""",
    )
    result = run_suite(pytester, "--paritas-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *this test already has a golden 'out'; *"])


# --- quiet, and several processes -----------------------------------------------------------------


def test_a_suite_that_asks_nothing_hears_nothing(pytester):
    suite(pytester, "def test_it():\n    pass\n")
    result = run_suite(pytester)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*= paritas =*")
    assert outcomes(result) == {"test_it": []}


@pytest.mark.slow
def test_workers_of_xdist_are_summed_up_once(pytester, monkeypatch):
    suite(
        pytester,
        """
@pytest.mark.parametrize("factor", [1, 2])
def test_it(parity, factor):
    parity.golden(torch.ones(2) * factor, "out")
""",
    )
    golden = pytester.path / "golden" / "test_suite"
    (golden / "test_gone" / "out" / "rank0").mkdir(parents=True)
    run_suite(pytester, "--paritas-update").assert_outcomes(passed=2)
    shutil.rmtree(golden / "test_it[1]" / "out")
    (golden / "test_it[2]" / "out").rename(golden / "test_it[1]" / "out")
    if processes._can_fork():
        monkeypatch.setattr(subprocess, "Popen", processes.ForkedWorker)
    result = run_suite(pytester, "-n2", "--paritas-update")
    result.assert_outcomes(passed=2)
    text = result.stdout.str()
    assert text.count("2 verdicts in 2 tests: 2 identical") == 1
    assert text.count("goldens: 1 written, 1 changed, 0 unchanged") == 1
    assert text.count("unused golden: golden") == 1
