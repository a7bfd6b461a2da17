"""`paritas run`, from a script to the exit code. What compiles to C++ or starts ranks is slow."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import processes
from integration.run_scripts import NET, TRAIN, verdict_in, write
from paritas.app.cli import main
from paritas.core.errors import ParityWarning
from paritas.core.results.findings import OriginKind, Status
from paritas.core.results.wording import headline


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A current directory with a script to train a net."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("RANK", "WORLD_SIZE", "PARITAS_GUARD"):
        monkeypatch.delenv(name, raising=False)
    write("train.py", TRAIN)
    torch.compiler.reset()
    yield tmp_path
    torch.compiler.reset()


def paritas(*arguments):
    return CliRunner().invoke(main, ["run", *arguments])


def summary(result):
    """What paritas says, after what the script says."""
    lines = [line.rstrip() for line in result.stderr.splitlines()]
    return lines[next(i for i, line in enumerate(lines) if "─ paritas run ─" in line) :]


def paritas_in_a_process(*arguments):
    done = processes.run("-m", "paritas", "run", *arguments)
    return done.returncode, done.stdout, done.stderr


# --- verdicts -------------------------------------------------------------------------------------


def test_a_right_compiler_passes_and_stdout_is_the_scripts_own(capsys):
    result = paritas("--json", "verdict.json", "train.py")
    assert result.exit_code == 0, result.output
    torch.compiler.reset()
    runpy.run_path("train.py")
    assert result.stdout == capsys.readouterr().out
    verdict = verdict_in("verdict.json")
    assert verdict.passed
    assert verdict.coverage.compared >= 8
    lines = summary(result)
    assert re.fullmatch(r"graph 0 +4 +4 +0 +4  train\.py:\d+, in forward", lines[3])
    assert lines[-1] == headline(verdict)


def test_a_wrong_compiler_is_1_the_script_runs_to_its_end_and_json_has_the_form_of_every_verdict(
    folder,
):
    result = paritas("--json", "verdict.json", "train.py", "--faulty")
    assert result.exit_code == 1, result.output
    assert len(result.stdout.splitlines()) == 4
    content = json.loads(Path("verdict.json").read_text(encoding="utf-8"))
    known = {"findings", "coverage", "notes", "strict", "enabled", "shrink_command"}
    assert set(content) == known
    verdict = verdict_in("verdict.json")
    assert verdict.status is Status.DIFFERENT
    origin = next(f.origin for f in verdict.failures if f.origin is not None)
    assert (origin.kind, origin.name) == (OriginKind.NODE, "relu")
    assert origin.source.startswith(str(folder / "train.py"))
    lines = summary(result)
    assert any(line.startswith("  node relu: relu(") for line in lines)
    assert "    return self.outer(torch.relu(self.inner(x)))" in lines
    assert lines[-1] == headline(verdict)
    assert max(map(len, lines[:-1])) <= 80


def test_by_share_or_number_fewer_calls_are_checked():
    for every in ("3", "0.000001"):
        result = paritas("--every", every, "--json", "verdict.json", "train.py")
        assert result.exit_code == 0, result.output
        (skipped, *_) = verdict_in("verdict.json").coverage.skipped
        assert skipped == f"graph 0: {2 if every == '3' else 3} of 4 calls, because of `every`"
        torch.compiler.reset()


def test_what_rounding_decides_passes_unless_strict():
    write(
        "tied.py",
        """
        import torch

        def last(graph, example_inputs):
            return lambda x: (graph.forward(x)[0] + 2,)

        torch.compile(lambda x: (x / 3).argmax(-1), backend=last)(torch.ones(2, 3))
        """,
    )
    assert paritas("tied.py").exit_code == 0
    torch.compiler.reset()
    assert paritas("--strict", "tied.py").exit_code == 1


# --- what to do about a mismatch ------------------------------------------------------------------


def test_raising_ends_the_script_with_its_traceback():
    result = paritas("--on-mismatch", "raise", "train.py", "--faulty")
    assert result.exit_code == 1
    assert result.stdout == ""
    own = result.stderr.rpartition("Traceback (most recent call last):\n")[2]
    assert "train.py" in own.splitlines()[0]
    assert "it ended with MismatchError: different: " in "\n".join(summary(result))


@pytest.mark.usefixtures("undiagnosed")
def test_warning_goes_on_with_the_wrong_result():
    with pytest.warns(ParityWarning, match="different: the candidate computes something else"):
        result = paritas("--on-mismatch", "warn", "train.py", "--faulty")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 4


def test_falling_back_gives_the_script_the_right_result():
    right = paritas("train.py").stdout
    torch.compiler.reset()
    with pytest.warns(ParityWarning):
        result = paritas("--on-mismatch", "fallback", "train.py", "--faulty")
    assert result.exit_code == 1
    assert result.stdout == right


# --- every torch.compile, as it is ----------------------------------------------------------------


def test_each_compile_keeps_its_backend_mode_and_options():
    write(
        "several.py",
        """
        import torch

        def noting(graph, example_inputs, **settings):
            print("noting", settings)
            return graph.forward

        x = torch.ones(3)
        for settings in ({}, {"mode": "fast"}, {"options": {"level": 2}}):
            torch.compile(lambda x: x + 1, backend=noting, **settings)(x)

        @torch.compile(backend="eager", fullgraph=True, dynamic=True)
        def decorated(x):
            return x.sin()

        decorated(x), decorated(torch.ones(4))

        class Module(torch.nn.Module):
            def forward(self, x):
                return x.cos()

        in_place = Module()
        in_place.compile(backend="aot_eager")
        in_place(x)
        """,
    )
    result = paritas("--json", "verdict.json", "several.py")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "noting {}",
        "noting {'mode': 'fast'}",
        "noting {'options': {'level': 2}}",
    ]
    paths = {finding.path.partition(":")[0] for finding in verdict_in("verdict.json").findings}
    assert paths == {f"graph {number}" for number in range(5)}


def test_a_guard_of_the_scripts_own_is_left_alone():
    write(
        "guarded.py",
        """
        import paritas, torch

        guard = paritas.guard("eager")
        torch.compile(lambda x: x + 1, backend=guard)(torch.ones(3))
        print(guard.verdict().passed)
        """,
    )
    result = paritas("--json", "verdict.json", "guarded.py")
    assert result.exit_code == 3
    assert result.stdout == "True\n"
    assert any("has its own paritas.guard" in note for note in verdict_in("verdict.json").notes)


def test_what_paritas_compiles_to_verify_something_is_not_guarded():
    write(
        "verifying.py",
        """
        import paritas, torch

        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        compiled = torch.compile(model, backend="eager")
        print(paritas.verify([torch.ones(2, 4)], model, compiled).passed)
        """,
    )
    result = paritas("--json", "verdict.json", "verifying.py")
    assert result.stdout == "True\n", result.output
    dtypes = {finding.dtype for finding in verdict_in("verdict.json").findings}
    assert "float64" not in dtypes


@pytest.mark.slow
def test_inductor_is_guarded_forward_and_backward_with_its_random_numbers():
    write(
        "dropout.py",
        f"""{NET}
compiled = torch.compile(nn.Sequential(model, nn.Dropout(0.5)), options={{"max_fusion_size": 8}})
for step in range(2):
    compiled(torch.randn(32, 8)).square().mean().backward()
""",
    )
    result = paritas("--json", "verdict.json", "dropout.py")
    assert result.exit_code == 0, result.output
    paths = {finding.path.partition(":")[0] for finding in verdict_in("verdict.json").findings}
    assert paths == {"graph 0 forward", "graph 0 backward"}


# --- how a script ends ----------------------------------------------------------------------------


def test_a_script_that_compiles_nothing_is_unverified():
    write("plain.py", "print('hello')\n")
    result = paritas("--json", "verdict.json", "plain.py")
    assert result.exit_code == 3
    assert result.stdout == "hello\n"
    assert (
        "nothing was compiled: the program called nothing that torch.compile made" in result.stderr
    )
    assert "TORCHDYNAMO_DISABLE" in result.stderr
    assert verdict_in("verdict.json").status is Status.UNVERIFIED


def test_a_compile_without_a_graph_is_unverified():
    write("empty.py", "import torch\ntorch.compile(lambda: 3, backend='eager')()\n")
    result = paritas("empty.py")
    assert result.exit_code == 3
    assert "torch.compile found no graph to capture" in " ".join(result.stderr.split())
    assert "note: torch.compile was called (eager), but captured no graph" in result.stderr


@pytest.mark.usefixtures("undiagnosed")
@pytest.mark.parametrize(
    ("options", "code"), [(["--fail"], 3), (["--fail", "--faulty"], 1)], ids=["right", "wrong"]
)
def test_a_script_that_fails_never_passes(options, code):
    result = paritas("train.py", *options)
    assert result.exit_code == code
    own = result.stderr.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    assert own[0].endswith("in <module>")
    assert own[2] == "ValueError: no more data"
    assert (
        "it ended with ValueError: no more data; the rest of the script was not checked"
        in result.stderr
    )


def test_a_script_that_exits_with_a_code_of_its_own_is_unverified():
    write("exits.py", f"{TRAIN}\nsys.exit(7)\n")
    result = paritas("exits.py")
    assert result.exit_code == 3
    assert "it exited with 7; the rest of the script was not checked" in result.stderr


def test_a_script_that_exits_with_0_passes():
    write("exits.py", f"{TRAIN}\nsys.exit(0)\n")
    assert paritas("exits.py").exit_code == 0


# What a script may leave to the end of its process: a pool that nobody closes, with work to do,
# and a thread that ends because the main one does.
LEFT = """
import threading
import time
from concurrent.futures import ThreadPoolExecutor


def last():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    compiled(torch.randn(32, 8))


threading.Thread(target=last).start()
pool = ThreadPoolExecutor(1)
pool.submit(compiled, torch.randn(32, 8))
"""
# Ctrl-C while python waits for the thread of a pool: it waits no longer. The script says so then.
POOL_AT_WORK = """
import threading
import time
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)
pool.submit(time.sleep, 3600)
threading._register_atexit(print, "ready")
"""
# SIGTERM ends a process, whatever its threads do.
THREAD_AT_WORK = """
import threading
import time

threading.Thread(target=time.sleep, args=(3600,)).start()
print("ready")
while True:
    pass
"""


@pytest.mark.slow
def test_threads_are_let_go_and_waited_for_as_python_does():
    write("threads.py", TRAIN + LEFT)
    code, _, stderr = paritas_in_a_process("threads.py")
    assert code == 0, stderr
    assert re.search(r"^graph 0 +6 +6 +0 +6 ", stderr, re.MULTILINE), stderr


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(os.name == "nt", reason="there is no such signal")
@pytest.mark.parametrize(
    ("left", "number", "code", "words"),
    [
        (POOL_AT_WORK, signal.SIGINT, 130, "it was interrupted by Ctrl-C"),
        (THREAD_AT_WORK, signal.SIGTERM, 143, "it was terminated by SIGTERM"),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_script_that_is_stopped_is_reported_as_far_as_it_came(left, number, code, words):
    write("endless.py", TRAIN + left)
    process = processes.start("-m", "paritas", "run", "--json", "v.json", "endless.py")
    try:
        for line in process.stdout:
            if line == "ready\n":
                break
        process.send_signal(number)
        _, stderr = process.communicate()
    finally:
        process.kill()  # it would go on for ever
    assert process.returncode == code, stderr
    assert f"{words}; the rest of the script was not checked" in stderr
    assert verdict_in("v.json").coverage.compared >= 8


# --- usage ----------------------------------------------------------------------------------------


def test_a_module_is_run_with_m_and_what_follows_is_its_own(folder):
    (folder / "package_to_run").mkdir()
    write("package_to_run/train_it.py", f"{TRAIN}\nprint(sys.argv[1:])\n")
    result = paritas(
        "-m", "package_to_run.train_it", "--every", "3", "--json", "x", "-h", "--", "--strict"
    )
    assert result.exit_code == 0, result.output
    expected = "['--every', '3', '--json', 'x', '-h', '--', '--strict']"
    assert result.stdout.splitlines()[-1] == expected
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["nosuch.py"], "SCRIPT 'nosuch.py' does not exist"),
        (["-m", "nosuch"], "-m 'nosuch': no such module, or it has no __main__"),
        (["--evry", "2", "train.py"], "No such option '--evry'. Did you mean '--every'?"),
        (
            ["--every", "1.5", "train.py"],
            "Invalid value for '--every': '1.5' is neither an integer n",
        ),
        (["--every", "0", "train.py"], "Invalid value for '--every': '0' is neither"),
        (["--every", "inf", "train.py"], "Invalid value for '--every': 'inf' is neither"),
        (["--every", "x", "train.py"], "Invalid value for '--every': 'x' is neither"),
        (
            ["--on-mismatch", "shout", "train.py"],
            "Invalid value for '--on-mismatch': 'shout' is not one of",
        ),
        (["--json", "no/where.json", "train.py"], "cannot write 'no/where.json': "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_with_the_value_and_is_2(arguments, message):
    result = paritas(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert f"Error: {message}" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_switched_off_guard_is_wrong_usage(monkeypatch):
    monkeypatch.setenv("PARITAS_GUARD", "0")
    result = paritas("train.py")
    assert result.exit_code == 2
    assert "PARITAS_GUARD=0 in the environment disables guards: unset it" in result.stderr


@pytest.mark.slow
def test_torch_is_imported_by_the_script_and_an_end_without_a_farewell_is_reported():
    write(
        "first.py",
        """
        import os, sys
        print("torch" in sys.modules)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # is read when torch is imported
        import torch
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        print("the end")
        os._exit(0)
        """,
    )
    done = subprocess.run(
        [sys.executable, "-m", "paritas", "run", "first.py"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout == "False\nthe end\n"
    assert done.returncode == 3
    assert "nothing was compiled" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("unverified: ")


@pytest.mark.slow
def test_a_fault_before_a_script_replaces_itself_is_reported_and_is_the_exit_code():
    write("replaced.py", TRAIN + 'import os\nos.execlp("echo", "echo", "the end")\n')
    code, out, err = paritas_in_a_process("replaced.py", "--faulty")
    assert code == 1
    assert out.splitlines()[-1] == "the end"
    assert "it replaced itself with '" in err
    assert err.splitlines()[-1].startswith("different: ")


@pytest.mark.slow
def test_a_script_that_closes_its_streams_keeps_its_report_and_its_code():
    write("closing.py", TRAIN + "sys.stdout.close()\nsys.stderr.close()\n")
    code, out, err = paritas_in_a_process("closing.py")
    assert code == 0, err
    assert len(out.splitlines()) == 4
    assert err.splitlines()[-1].startswith("identical: ")
