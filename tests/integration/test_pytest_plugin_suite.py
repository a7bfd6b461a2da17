"""`--paritas-guard` over suites that know nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from integration.pytest_runs import outcomes, run_suite

pytest_plugins = ["pytester"]

SUITE = """
import unittest
import pytest
import torch

def spoiled(graph, inputs):
    return lambda *args: tuple(result * 1.01 for result in graph(*args))

def right(x):
    return x.sin() + 1

def wrong_below_zero(graph, inputs):
    def run(*args):
        off = 1.01 if float(args[0].sum()) < 0 else 1
        return tuple(result * off for result in graph(*args))
    return run

@torch.compile(backend=wrong_below_zero)
def shared(x):
    return x.cos() * 3

def test_without_torch():
    pass

def test_eager():
    right(torch.ones(3))

def test_right():
    compiled = torch.compile(right, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(3)), right(torch.ones(3)))

def test_wrong():
    compiled = torch.compile(right, backend=spoiled)
    assert compiled(torch.ones(3)).shape == (3,)

def test_shared_first():
    shared(torch.ones(3))

def test_shared_then():
    shared(-torch.ones(3))

class TestOld(unittest.TestCase):
    def test_old(self):
        torch.compile(right, backend=spoiled)(torch.ones(2))

@pytest.fixture
def made():
    return torch.compile(right, backend=spoiled)(torch.ones(4))

def test_fixture(made):
    pass

@pytest.mark.parity(enabled=False)
def test_left_alone():
    torch.compile(right, backend=spoiled)(torch.ones(5))

def test_expected_error():
    compiled = torch.compile(lambda x, i: x[i], backend="eager")
    with pytest.raises(IndexError):
        compiled(torch.ones(3), torch.tensor([7]))

@pytest.mark.xfail(strict=True)
def test_known():
    torch.compile(right, backend=spoiled)(torch.ones(6))
"""


def test_a_test_fails_where_a_graph_that_ran_in_it_is_wrong(pytester):
    torch.compiler.reset()
    pytester.makepyfile(test_old=SUITE)
    plain = run_suite(pytester)
    plain.assert_outcomes(passed=10, failed=1)  # that which is expected to fail does not
    torch.compiler.reset()
    result = run_suite(pytester, "--paritas-guard")
    result.assert_outcomes(passed=6, failed=3, errors=1, xfailed=1)
    seen = {
        name: [(it.status, it.checked) for it in found] for name, found in outcomes(result).items()
    }
    assert seen == {
        "test_without_torch": [],
        "test_eager": [],
        "test_right": [("identical", 1)],
        "test_wrong": [("different", 1)],
        "test_shared_first": [("identical", 1)],
        "test_shared_then": [("different", 1)],
        "TestOld::test_old": [("different", 1)],
        "test_fixture": [("different", 1)],
        "test_left_alone": [],
        "test_expected_error": [],
        "test_known": [("different", 1)],
    }
    result.stdout.fnmatch_lines(
        [
            "*_ ERROR at setup of test_fixture _*",
            "different: the candidate computes something else; *",
            "7 verdicts in 7 tests: 5 different, 2 identical",
            "guarded: 7 graphs, 7 of 7 calls checked",
            "note: 1 call raised in the compiled code and in its graph: nothing to compare",
        ]
    )


def test_what_is_wrong_at_collection_fails_the_run(pytester):
    torch.compiler.reset()
    pytester.makepyfile(
        test_early="""
import torch

def spoiled(graph, inputs):
    return lambda *args: tuple(result * 1.01 for result in graph(*args))

TABLE = torch.compile(lambda x: x.exp() + 2, backend=spoiled)(torch.ones(3))

def test_it():
    assert TABLE.shape == (3,)
"""
    )
    result = run_suite(pytester, "--paritas-guard")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["different: outside of tests (suite guard) graph 0: *"])


def test_calls_that_were_not_due_are_counted(pytester):
    torch.compiler.reset()
    pytester.makepyfile(
        test_often="""
import torch

def test_it():
    compiled = torch.compile(lambda x: x.tanh() - 1, backend="eager")
    for _ in range(5):
        compiled(torch.ones(3))
"""
    )
    result = run_suite(pytester, "--paritas-guard", "--paritas-every=4")
    result.stdout.fnmatch_lines(["guarded: 1 graph, 2 of 5 calls checked"])
    refused = run_suite(pytester, "--paritas-guard", "--paritas-every=1.5")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["ERROR: every must be a whole number n *, not 1.5"])


def test_a_suite_without_torch_stays_without(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n", encoding="utf-8"
    )
    code = (
        "import pytest, sys; code = pytest.main(['-q', '--paritas-guard', '-p', "
        "'no:cacheprovider']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "guarded: nothing, because no test called a compiled function" in done.stdout
