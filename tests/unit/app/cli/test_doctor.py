"""`paritas doctor`: what is looked at, how it is told, and what happens where things are broken."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys

import pytest
import torch
from click.testing import CliRunner

import paritas.core.precision
import paritas.core.torch_private
from paritas.app.cli import main
from paritas.app.doctor import compiler_probes, examination, probes, self_test
from paritas.app.doctor.examination import GROUPS, Check, run_check

WELL = Check("self-test", "right candidate", "ok", "identical, 5 compared")


def doctor(*args):
    return CliRunner().invoke(main, ["--no-config", "doctor", *args])


@pytest.fixture
def found(monkeypatch):
    """Let the examination find just these checks."""

    def given(*checks):
        monkeypatch.setattr(examination, "examine", lambda *, quick: iter(checks))

    return given


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Let the process that looks at torch be a script of the shell."""

    def given(text):
        script = tmp_path / "child"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return given


def test_every_module_that_touches_torch_s_insides_has_a_probe_that_says_what_it_asks():
    text = inspect.getsource(probes) + inspect.getsource(compiler_probes)
    silent = [
        f"{package.__name__}.{module.name}"
        for package in (paritas.core.torch_private, paritas.core.precision)
        for module in pkgutil.iter_modules(package.__path__)
        if not re.search(rf"{package.__name__}(\.|\s+import\s[^\n]*\b){module.name}\b", text)
    ]
    assert not silent, "no probe imports these"
    assert all(probe.__doc__ for probe in probes.PROBES.values())


def test_torch_answers_every_probe_as_expected():
    found = list(probes.run_probes())
    assert [check for check in found if check.state != "ok"] == []
    assert len(found) == len(probes.PROBES)


def test_the_self_test_knows_right_from_wrong_without_a_compiler():
    found = list(self_test.run_self_test("aot_eager"))
    assert [check for check in found if check.state != "ok"] == []
    assert [check.name for check in found] == list(self_test.STEPS)


def test_a_self_test_that_misses_a_fault_fails(monkeypatch):
    monkeypatch.setattr(self_test, "STEPS", {"wrong candidate": self_test.wrong_candidate})
    monkeypatch.setattr("paritas.verification.verify.verify", lambda *_: VERDICT)
    (check,) = self_test.run_self_test("aot_eager")
    assert check.state == "failed"
    assert "the status of a wrong candidate: <Status.UNVERIFIED" in check.found


VERDICT = paritas.Verdict()


@pytest.mark.parametrize("error", [RuntimeError("no\nanswer"), SystemExit(1), AssertionError()])
def test_a_broken_probe_fails_alone(monkeypatch, error):
    def broken():
        raise error

    monkeypatch.setattr(
        probes, "PROBES", {"broken": broken, "operators": probes.PROBES["operators"]}
    )
    first, second = probes.run_probes()
    assert (first.state, second.state) == ("failed", "ok")
    assert first.found.startswith(type(error).__name__)
    assert "\n" not in first.found
    assert first.advice


def test_a_hook_that_answers_otherwise_is_shown_with_its_answer(monkeypatch):
    monkeypatch.setattr("paritas.core.torch_private.replaying.in_bounds", lambda _name, args: args)
    check = run_check("hooks into torch", "indexing", _indexing, "advice")
    assert check.state == "failed"
    assert check.found == ("UnexpectedAnswerError: indices: [[0, -1, 9]], expected [[0, 3, 1]]")


def _indexing():
    probes.PROBES["indexing"]()
    raise AssertionError("it should not have come here")


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        ("2.13.1+cu130", "ok", "2.13.1+cu130"),
        ("2.10.0", "failed", "2.10.0 is too old"),
        ("3.0.0a0+git1234", "ok", "newer than any tested"),
        ("main", "ok", "an unknown version"),
    ],
)
def test_a_torch_of_another_version_is_told(monkeypatch, version, state, words):
    monkeypatch.setattr(torch, "__version__", version)
    check = next(self_test.torch_versions())
    assert check.state == state
    assert words in check.found
    assert bool(check.advice) is not version.startswith("2.13")


def test_no_compiler_is_not_available_and_one_that_was_asked_for_and_is_not_there_fails(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert next(examination.compilers()).state == "not available"
    monkeypatch.setenv("CXX", "/nonexistent")
    check = next(examination.compilers())
    assert (check.state, check.found) == ("failed", "CXX=/nonexistent does not exist")
    (compiled,) = self_test.compiling(has_compiler=False)
    assert compiled.state == "not available"


def test_a_compiler_that_does_not_run_fails(monkeypatch, tmp_path):
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    check = next(examination.compilers())
    assert check.state == "failed"
    assert check.found.endswith("--version exits with 3: broken")


def test_folders_that_cannot_be_written_fail_with_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "no such folder"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/proc/cache")
    monkeypatch.setattr("tempfile.tempdir", None)
    temporary, compiled = examination.folders()
    assert (temporary.state, compiled.state) == ("failed", "failed")
    assert "TMPDIR" in temporary.advice
    assert "TORCHINDUCTOR_CACHE_DIR" in compiled.advice


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo 'no torch' >&2; exit 1", "it ended with exit code 1 after 'the start': no torch"),
        (f"echo '{WELL.to_line()}'; kill -11 $$", "killed by SIGSEGV after 'right candidate'"),
        ("echo nonsense", "it printed 'nonsense'"),
    ],
)
def test_a_crash_while_looking_at_torch_is_told_and_ends_with_3(child, text, words):
    child(text)
    checks = list(examination.examine(quick=True))
    assert checks[-1].name == examination.PROCESS
    assert words in checks[-1].found
    assert examination.exit_code(checks) == 3


def test_a_torch_that_hangs_is_not_waited_for_for_ever(child, monkeypatch):
    child("exec sleep 60")
    monkeypatch.setattr(examination, "SECONDS", 0.1)
    checks = list(examination.examine(quick=True))
    assert "did not finish within 0.1 s" in checks[-1].found


def test_all_well_ends_with_0_and_says_so(found):
    found(WELL, Check("torch", "triton", "not available", "not installed"))
    result = doctor()
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "everything works: 1 of 2 checks ok, 1 not available"


def test_a_failure_ends_with_1_and_says_what_to_do_within_80_columns(found):
    found(WELL, Check("self-test", "dumps", "failed", "off " * 40, "look at it " * 20))
    result = doctor("--quick")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[-1] == "1 of 2 checks failed: dumps"
    assert max(map(len, lines)) <= 80
    assert any(line.strip().startswith("-> look at it") for line in lines)


def test_hooks_that_answer_are_counted_and_those_that_fail_alike_share_a_line(found):
    group = "hooks into torch"
    well = [Check(group, f"hook {n}", "ok", "") for n in range(3)]
    bad = [Check(group, f"bad {n}", "failed", "no answer", "upgrade") for n in range(2)]
    found(*well, *bad)
    output = doctor().output
    assert "3 of 5 behave as expected" in output
    assert "no answer; also bad 1" in output
    assert "hook 1" not in output


def test_everything_is_in_the_json(found, tmp_path):
    found(WELL)
    printed = json.loads(doctor("--json", "-").output)
    assert doctor("--json", str(tmp_path / "doctor.json")).exit_code == 0
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert printed == written == {"exit_code": 0, "checks": [json.loads(WELL.to_line())]}


def test_every_check_of_this_machine_is_of_a_known_group(child):
    child("exit 0")
    checks = list(examination.examine(quick=True))
    assert {check.group for check in checks} <= {*GROUPS}
    assert len({(check.group, check.name) for check in checks}) == len(checks)


def test_what_torch_prints_is_not_taken_for_an_answer(child):
    program = """
import sys
import paritas.app.doctor.__main__ as asked
from paritas.app.doctor.examination import Check

def examine(quick):
    print("noise on stdout")
    yield Check("torch", "quick", "ok", str(quick))

assert "torch" not in sys.modules
sys.argv.append("--quick")
asked.examine = examine
asked.main()
"""
    child(f"exec {sys.executable} - <<'END'\n{program}\nEND")
    *_, last = examination.examine(quick=True)
    assert last == Check("torch", "quick", "ok", "True")
