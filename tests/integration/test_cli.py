"""`paritas verify`, from the command line to the exit code. Nothing here is compiled to C++."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import processes
from paritas.app.cli import main
from paritas.core.results.findings import Aspect, Status, Verdict
from paritas.core.results.wording import headline
from paritas.verification import verify

NETS = Path(__file__).with_name("nets.py")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current directory with a module `nets`; what it leaves in the interpreter is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shutil.copy(NETS, tmp_path)
    torch.compiler.reset()
    yield tmp_path
    sys.modules.pop("nets", None)
    torch.compiler.reset()


def paritas(*arguments):
    return CliRunner().invoke(main, ["verify", *arguments])


def last_line(result):
    return result.stdout.splitlines()[-1]


def verdict_in(path):
    return Verdict.from_json(path.read_bytes())


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_backend_that_computes_the_same_passes(backend, folder):
    result = paritas("nets:build", "--backend", backend, "--json", "verdict.json")
    assert result.exit_code == 0, result.output
    verdict = verdict_in(folder / "verdict.json")
    assert verdict.passed
    assert last_line(result) == headline(verdict)
    assert last_line(result).startswith("identical: ")


def test_a_candidate_that_computes_something_else_is_1(folder):
    result = paritas("nets:build", "--candidate", "nets:scaled_in_place", "--json", "verdict.json")
    assert result.exit_code == 1, result.output
    verdict = verdict_in(folder / "verdict.json")
    assert verdict.status is Status.DIFFERENT
    assert last_line(result) == headline(verdict)
    assert "output['y']: different (value)" in result.stdout


def test_where_both_sides_raise_nothing_is_verified_and_the_exit_code_is_3(folder):
    result = paritas("nets:failing", "--backend", "eager", "--json", "verdict.json")
    assert result.exit_code == 3, result.output
    assert last_line(result) == headline(verdict_in(folder / "verdict.json"))
    assert "no such thing" in result.stdout


def test_what_rounding_decides_passes_unless_strict():
    assert paritas("nets:tied", "--candidate", "nets:last_index").exit_code == 0
    assert paritas("nets:tied", "--candidate", "nets:last_index", "--strict").exit_code == 1


def test_the_report_fits_80_columns():
    result = paritas("nets:build", "--candidate", "nets:scaled_in_place")
    lines = result.stdout.splitlines()
    assert any("a_layer_with_a_long_name.weight" in line for line in lines)
    assert max(map(len, lines)) <= 80


# --- options --------------------------------------------------------------------------------------


def test_a_model_is_in_evaluation_mode_unless_training_is_asked_for(folder):
    arguments = ("nets:build", "--candidate", "nets:unchanged", "--json", "verdict.json")
    assert paritas(*arguments).exit_code == 0
    evaluated = verdict_in(folder / "verdict.json")
    assert paritas(*arguments, "--train").exit_code == 0
    trained = verdict_in(folder / "verdict.json")
    # Dropout draws only in training mode, and what draws is called a second time.
    assert len(trained.findings) > len(evaluated.findings)


def test_dtype_moves_the_model_and_its_floating_inputs(folder):
    options = ("--dtype", "bfloat16", "--backend", "eager", "--json", "verdict.json")
    assert paritas("nets:build", *options).exit_code == 0
    found = verdict_in(folder / "verdict.json").findings
    # The caller does not ask for the input's gradient: of compiled code it comes from float64 runs.
    dtypes = {finding.dtype for finding in found if finding.path != "gradient of input[0]"}
    assert dtypes == {"bfloat16", None}


def test_inputs_come_from_a_function_of_their_own_and_may_be_several_sets(folder):
    options = ("--inputs", "nets:sets", "--candidate", "nets:unchanged", "--json", "verdict.json")
    result = paritas("nets:model", *options)
    assert result.exit_code == 0, result.output
    paths = {finding.path for finding in verdict_in(folder / "verdict.json").findings}
    assert {"output['y'] (inputs 1)", "output['y'] (inputs 2)"} <= paths


def test_gradients_can_be_left_out(folder):
    arguments = ("nets:build", "--candidate", "nets:unchanged", "--json", "verdict.json")
    counts = []
    for options in ((), ("--no-gradients",)):
        assert paritas(*arguments, *options).exit_code == 0
        found = verdict_in(folder / "verdict.json").findings
        counts.append(sum(finding.path.startswith("gradient") for finding in found))
    assert counts[0] > 0
    assert counts[1] == 0


def test_without_the_lifted_run_no_finding_has_a_lifted_score(folder):
    arguments = ("nets:build", "--candidate", "nets:scaled_in_place", "--json", "verdict.json")
    for options, lifts in (((), True), (("--no-lift",), False)):
        assert paritas(*arguments, *options).exit_code == 1
        found = verdict_in(folder / "verdict.json").findings
        assert any(finding.lifted is not None for finding in found) is lifts


def test_a_run_can_be_repeated(folder):
    arguments = ("nets:build", "--candidate", "nets:scaled_in_place", "--json")
    paritas(*arguments, "first.json")
    paritas(*arguments, "second.json")
    assert (folder / "first.json").read_bytes() == (folder / "second.json").read_bytes()


def test_a_terminal_that_knows_no_unicode_is_written_to_all_the_same():
    code = """
import sys
from paritas.app.cli import main

sys.stdout.reconfigure(encoding="ascii", errors="strict")
sys.stderr.reconfigure(encoding="ascii", errors="strict")
main(["verify", "nets:build", "--backend", "eager"])
"""
    done = processes.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("identical: ")
    assert done.stderr == ""


# --- wrong usage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nets.build"],
            (
                "FACTORY 'nets.build' is not of the form package.module:name; write one colon "
                "between module and function, as in 'nets.build:build'"
            ),
        ),
        (
            ["nest:build"],
            ("FACTORY 'nest:build': no module 'nest' in the current directory or the environment"),
        ),
        (
            ["nets:biuld"],
            "FACTORY 'nets:biuld': module nets has no 'biuld'; did you mean 'build'?",
        ),
        (
            ["nets:raising"],
            (
                "FACTORY 'nets:raising', called with no arguments, raised OSError: no weights at "
                "nets.py:LINE in raising\n"
                'For the full traceback: python -c "import nets; nets.raising()"'
            ),
        ),
        (
            ["nets:model"],
            (
                "FACTORY 'nets:model' returned a Net, not (model, inputs); return both, or give "
                "the inputs with --inputs module:function"
            ),
        ),
        (
            ["nets:bare_tensor", "--backend", "eager"],
            (
                "inputs must be a list or tuple of positional inputs, a dict of keyword "
                "arguments, Inputs(args, kwargs), or a list of Inputs, not Tensor; for one tensor "
                "x, pass [x]"
            ),
        ),
        (
            ["nets:build", "--candidate", "nets:nothing"],
            (
                "--candidate 'nets:nothing' returned None, which cannot be called; return what is "
                "to be called in place of the model"
            ),
        ),
        (
            ["nets:build", "--device", "abacus"],
            "--device 'abacus' cannot be used: Expected one of cpu, cuda,",
        ),
        (
            ["nets:build", "--device", "meta"],
            "--device 'meta' holds no values, so nothing can be compared: use a device such as cpu",
        ),
        (
            ["nets:build", "--backend", "indcutor"],
            "unknown --backend 'indcutor'; did you mean 'inductor'? known are",
        ),
        (
            ["nets:build", "--mode", "fastest"],
            (
                "torch.compile(backend='inductor', mode='fastest', dynamic=None, fullgraph=False) "
                "refuses: Unrecognized mode=fastest"
            ),
        ),
        (
            ["nets:build", "--dtype", "bfloat61"],
            "Invalid value for '--dtype': 'bfloat61' is not one of",
        ),
        (
            ["nets:build", "--candidate", "nets:unchanged", "--mode", "default", "--dynamic"],
            (
                "--mode, --dynamic cannot be combined with --candidate 'nets:unchanged', which "
                "replaces torch.compile"
            ),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_with_the_value_and_is_2(arguments, message):
    result = paritas(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = NETS.read_text(encoding="utf-8").splitlines()
    line = next(number for number, line in enumerate(lines, 1) if "no weights" in line)
    assert f"Error: {message.replace('LINE', str(line))}" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_2():
    result = paritas("nets:build", "--device", "cuda")
    assert result.exit_code == 2
    assert "Error: --device 'cuda' cannot be used: " in result.stderr


@pytest.mark.parametrize("path", ["missing/verdict.json", "."])
def test_an_unwritable_file_is_told_before_anything_runs(path):
    result = paritas("nets:interrupted", "--backend", "eager", "--json", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: cannot write {path!r}: ")


def test_a_misspelt_command_is_told_its_nearest():
    result = CliRunner().invoke(main, ["verfy"])
    assert result.exit_code == 2
    assert "Error: no command 'verfy'; did you mean 'verify'?" in result.stderr


# --- other ends -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_with_130_and_one_line():
    result = paritas("nets:interrupted", "--backend", "eager")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1] == "interrupted: there is no verdict"
    assert "Traceback" not in result.stderr


def test_a_fault_of_paritas_itself_is_no_verdict(monkeypatch):
    def fail(*args, **options):
        raise LookupError("a fault of our own")

    monkeypatch.setattr(verify, "verify", fail)
    result = paritas("nets:build", "--backend", "eager")
    assert result.exit_code == 3
    assert "LookupError: a fault of our own" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: paritas itself failed")


def test_a_candidate_that_raises_is_different(folder):
    (folder / "bad.py").write_text("def fail(model):\n    return lambda x: 1 / 0\n")
    result = paritas("nets:build", "--candidate", "bad:fail", "--json", "verdict.json")
    assert result.exit_code == 1
    (finding,) = verdict_in(folder / "verdict.json").failures
    assert finding.aspect is Aspect.EXCEPTION


def test_short_work_outside_of_a_terminal_shows_no_progress():
    result = paritas("nets:build", "--backend", "eager")
    assert result.stderr == ""
    assert result.stdout.startswith("status ")


def test_progress_goes_to_stderr_and_the_report_to_stdout(monkeypatch):
    monkeypatch.setattr("paritas.core.results.progress.SECONDS_BETWEEN_LINES", 0.0)
    result = paritas("nets:build", "--backend", "eager")
    steps = result.stderr.splitlines()
    assert steps[:3] == [
        "importing torch ...",
        "building nets:build ...",
        "running the reference: step 1 of 5",
    ]
    assert result.stdout.startswith("status ")


def test_the_command_line_starts_without_torch_rich_or_any_command():
    code = textwrap.dedent("""
        import sys, paritas.app.cli
        commands = {'paritas.verification.command', 'paritas.app.cli.getting_started'}
        loaded = {'torch', 'rich', *commands} & set(sys.modules)
        assert not loaded, loaded
        paritas.app.cli.main(['--help'], standalone_mode=False)
        assert not {'torch', 'rich'} & set(sys.modules)
    """)
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=600)
