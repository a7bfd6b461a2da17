"""What a script does to its own process costs it neither its report nor its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paritas.core.commands.scripts import (
    Ending,
    ScriptProgram,
    run_program,
)
from paritas.guarding.leaving import exits_reported


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    return tmp_path


def script(text, name="script.py"):
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return ScriptProgram(name, False, ())


# --- os._exit and os.exec -------------------------------------------------------------------------


def test_an_exit_that_nothing_else_sees_is_told_with_another_code(monkeypatch):
    told, exits = [], []
    monkeypatch.setattr(os, "_exit", exits.append)

    def tell(ending):
        told.append(ending)
        return 3

    with exits_reported(tell):
        run_program(script("import os; os._exit(0)"))
    assert (told, exits) == ([Ending()], [3])
    assert os._exit == exits.append


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_ends_as_ever():
    def tell(ending):
        raise AssertionError("not this process")

    with exits_reported(tell):
        ending = run_program(
            script("""
                import os
                child = os.fork()
                if child == 0:
                    os._exit(7)
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == 7
                child = os.fork()
                if child == 0:
                    import signal, time
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(600)
                _, status = os.waitpid(child, 0)
                assert os.WIFSIGNALED(status), status
            """)
        )
    assert ending == Ending()


def test_an_exit_that_python_refuses_is_refused(monkeypatch):
    monkeypatch.setattr(os, "_exit", None)
    with exits_reported(lambda ending: 0):
        ending = run_program(script("import os; os._exit('bad')"))
    assert ending.words == "ended with TypeError: 'str' object cannot be interpreted as an integer"


REPORTED = """
import os, signal, sys
from paritas.guarding.leaving import exits_reported

def report(ending):
    print(f"it {ending.words}", flush=True)
    return 1

with exits_reported(report):
"""


def run_reported(statements, **given):
    text = REPORTED + textwrap.indent(textwrap.dedent(statements), "    ")
    command = [sys.executable, "-c", text]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, **given
    )


SHOW = "import os; print(os.environ['GIVEN'], os.getcwd())"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("os.environ['GIVEN'] = 'x'; os.execv(python, arguments)", repr(sys.executable)),
        ("os.execve(python, arguments, {**os.environ, 'GIVEN': 'x'})", repr(sys.executable)),
        ("os.execlpe('env', *arguments, {**os.environ, 'GIVEN': 'x'})", "env"),
        ("os.execve(os.open(python, 0), arguments, {**os.environ, 'GIVEN': 'x'})", ""),
    ],
    ids=["execv", "execve", "on the path", "an open file"],
)
def test_before_a_script_replaces_itself_it_is_reported_and_keeps_its_code(call, name, folder):
    python = "env" if "lpe" in call else sys.executable
    done = run_reported(f"""
        python = {sys.executable!r}
        arguments = [{python!r}, {sys.executable!r}, "-c", {SHOW!r}]
        arguments = arguments if {python!r} == "env" else [python, *arguments[2:]]
        {call}
    """)
    first, second = done.stdout.splitlines()
    assert first.startswith("it replaced itself with ")
    assert first.endswith(", which is not checked")
    assert name in first
    assert second == f"x {folder}"
    assert (done.returncode, done.stderr) == (1, "")


def test_a_program_that_does_not_exist_does_not_replace_a_script():
    done = run_reported("""
        try:
            os.execvp("no-such-program", ["no-such-program"])
        except FileNotFoundError:
            print("it continues")
    """)
    assert (done.stdout, done.returncode) == ("it continues\n", 0)


def test_a_signal_reaches_the_program_that_replaced_the_script():
    program = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    done = run_reported(f"os.execv(sys.executable, [sys.executable, '-c', {program!r}])")
    assert done.returncode == 1


# --- closed streams -------------------------------------------------------------------------------

STREAMS = """
import os, sys, click
from rich.console import Console
from paritas.guarding.leaving import ReportStreams

streams = ReportStreams()
print("of the script")
{closes}
with streams.reporting():
    click.echo("report", err=True)
    Console(stderr=True).print("table")
"""


@pytest.mark.parametrize(
    ("closes", "out", "err"),
    [
        ("", "of the script\n", "report\ntable\n"),
        ("sys.stdout.close(); sys.stderr.close()", "of the script\n", "report\ntable\n"),
        ("sys.stdout = sys.stderr = None", "of the script\n", "report\ntable\n"),
        ("os.close(2)", "of the script\nreport\ntable\n", ""),
        ("os.close(1)", "", "report\ntable\n"),
        ("os.close(1); os.close(2)", "", ""),
        ("sys.stderr.close(); os.close(2); file = open('own', 'w')", None, ""),
        ("import io; sys.stderr = io.StringIO()", "of the script\n", ""),
    ],
)
def test_a_report_goes_to_what_is_open_and_the_exit_code_stays(closes, out, err):
    command = [sys.executable, "-c", STREAMS.format(closes=closes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    out = "of the script\nreport\ntable\n" if out is None else out
    assert (done.stdout, done.stderr, done.returncode) == (out, err, 0)
    assert not Path("own").exists() or Path("own").read_text(encoding="utf-8") == ""


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes of unix")
def test_a_reader_that_is_gone_does_not_change_the_exit_code():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", STREAMS.format(closes="")]
    done = subprocess.run(command, stdout=writing, stderr=writing, timeout=600, check=False)
    os.close(writing)
    assert done.returncode == 0
