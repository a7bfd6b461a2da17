"""A script is run as python would run it, and how it ended is known."""

from __future__ import annotations

import ast
import builtins
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paritas.core.commands import scripts
from paritas.core.commands.options import INTERRUPTED
from paritas.core.commands.scripts import (
    TERMINATED,
    Ending,
    ScriptProgram,
    StopSignals,
    check_program,
    run_program,
)
from paritas.core.errors import UsageError

SHOWS = "import sys\nprint([__name__, __file__, sys.argv, sys.path[0], __spec__ is None])\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return tmp_path


def script(text, name="script.py"):
    Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
    return ScriptProgram(name, False, ())


def as_python_shows(*command):
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True, timeout=600
    )
    return ast.literal_eval(done.stdout)


# --- like python ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["script.py", "below/script.py"])
def test_a_script_sees_what_it_sees_under_python(name, capsys, folder):
    (folder / "below").mkdir()
    script(SHOWS, name)
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    assert run_program(ScriptProgram(name, False, ("--flag", "7"))) == Ending()
    assert ast.literal_eval(capsys.readouterr().out) == as_python_shows(name, "--flag", "7")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_module_sees_what_it_sees_under_python(capsys, folder):
    (folder / "package_running").mkdir()
    script("", "package_running/__init__.py")
    script(SHOWS, "package_running/shows_it.py")
    assert run_program(ScriptProgram("package_running.shows_it", True, ("a",))) == Ending()
    assert ast.literal_eval(capsys.readouterr().out) == as_python_shows(
        "-m", "package_running.shows_it", "a"
    )


def test_a_folder_with_a_main_is_run(capsys, folder):
    (folder / "app").mkdir()
    script("import helper_of_app\nprint(helper_of_app.WORD)\n", "app/__main__.py")
    script("WORD = 'hello'\n", "app/helper_of_app.py")
    check_program(ScriptProgram("app", False, ()))
    assert run_program(ScriptProgram("app", False, ())) == Ending()
    assert capsys.readouterr().out == "hello\n"


def test_a_script_can_be_pickled_from_and_imports_its_neighbours(folder):
    script("VALUE = 3\n", "neighbour_of_script.py")
    program = script("""
        import pickle
        import neighbour_of_script

        class Kept:
            value = neighbour_of_script.VALUE

        assert type(pickle.loads(pickle.dumps(Kept()))) is Kept
    """)
    assert run_program(program) == Ending()


def test_threads_of_the_script_are_waited_for(capsys):
    program = script("""
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("done"))).start()
    """)
    assert run_program(program) == Ending()
    assert capsys.readouterr() == ("done\n", "")


def test_work_that_a_pool_was_given_is_waited_for_and_the_idle_pool_is_not(capsys):
    program = script("""
        import builtins, time
        from concurrent.futures import ThreadPoolExecutor

        builtins.kept = ThreadPoolExecutor(2)
        for number in range(3):
            kept.submit(lambda: (time.sleep(0.1), print("done")))
    """)
    try:
        assert run_program(program) == Ending()
        assert capsys.readouterr() == ("done\n" * 3, "")
        assert builtins.kept.submit(int).result() == 0  # what comes after may use it
    finally:
        builtins.kept.shutdown()
        del builtins.kept


def test_threads_that_do_not_end_are_not_waited_for_for_ever(capsys, monkeypatch):
    monkeypatch.setattr(scripts, "_WORK_SECONDS", 0.1)
    program = script("""
        import builtins, threading

        builtins.kept = threading.Event()
        threading.Thread(target=kept.wait, name="server").start()
    """)
    try:
        assert run_program(program) == Ending()
    finally:
        builtins.kept.set()
        del builtins.kept
    expected = "stopped waiting for threads that the script left running: server\n"
    assert capsys.readouterr() == ("", expected)


# --- endings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("import sys; sys.exit()", Ending()),
        ("import sys; sys.exit(0)", Ending()),
        ("import sys; sys.exit(5)", Ending(5, "exited with 5")),
        ("import sys; sys.exit('too bad')", Ending(1, "exited with 'too bad'")),
        ("raise ValueError('no data\\nat all')", Ending(1, "ended with ValueError: no data")),
        ("assert False", Ending(1, "ended with AssertionError")),
        ("raise KeyboardInterrupt", Ending(INTERRUPTED, "was interrupted by Ctrl-C", True)),
        (
            "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)",
            Ending(TERMINATED, "was terminated by SIGTERM", True),
        ),
    ],
)
def test_how_a_script_ended_is_known(text, ending):
    former = signal.getsignal(signal.SIGTERM)
    assert run_program(script(text)) == ending
    assert signal.getsignal(signal.SIGTERM) is former


def test_words_given_to_exit_go_to_stderr(capsys):
    run_program(script("import sys; sys.exit('too bad')"))
    assert capsys.readouterr().err == "too bad\n"


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.excepthook = lambda *_: 1 / 0\nraise ValueError('no data')\n",
        "def fail():\n    raise ValueError('no data')\nfail()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError('x') from error\n",
        "def unfinished(:\n",
    ],
    ids=["a hook that fails", "an error", "a chain", "a syntax error"],
)
def test_a_traceback_is_what_python_shows(text, capsys):
    run_program(script(text))
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, check=False, timeout=600
    )
    assert capsys.readouterr().err == done.stderr


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_end_is_told_only_hurries(number):
    former = signal.getsignal(number)
    with StopSignals() as signals:
        signals.only_hurry()
        assert not signals.hurried.is_set()
        signal.raise_signal(number)
        assert signals.hurried.is_set()
    assert signal.getsignal(number) is former


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_ignored_stays_so(number):
    former = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(number)
            signals.only_hurry()
            signal.raise_signal(number)
            assert not signals.hurried.is_set()
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, former)


def test_the_signal_to_end_can_be_ignored_at_last():
    former = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals() as signals:
            signals.only_hurry()
            signals.ignore_termination()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)


# --- nothing to run -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nosuch.py", "SCRIPT 'nosuch.py' does not exist"),
        ("trian.py", "SCRIPT 'trian.py' does not exist; did you mean 'train.py'?"),
        (
            "below/trian.py",
            "SCRIPT 'below/trian.py' does not exist; did you mean 'below/train.py'?",
        ),
        (
            "python3",
            "SCRIPT 'python3' does not exist; drop the interpreter: paritas run script.py",
        ),
        (
            "torchrun",
            (
                "SCRIPT 'torchrun' does not exist; start paritas by torchrun: "
                "torchrun ... --no-python paritas run script.py"
            ),
        ),
        (
            "pack.mod",
            "SCRIPT 'pack.mod' does not exist; for a module, use paritas run -m pack.mod",
        ),
        ("below", "SCRIPT 'below' is a directory without a __main__.py; give a file"),
    ],
)
def test_a_script_that_is_not_there_is_refused_with_its_name(target, message, folder):
    (folder / "below").mkdir()
    script("", "train.py")
    script("", "below/train.py")
    with pytest.raises(UsageError) as caught:
        check_program(ScriptProgram(target, False, ()))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nosuch", "-m 'nosuch': no such module, or it has no __main__"),
        (
            "nosuch.part",
            "-m 'nosuch.part' cannot be run: ModuleNotFoundError: No module named 'nosuch'",
        ),
        ("train.py", "-m 'train.py' is a file; drop -m, or give the module's dotted name"),
        ("broken_pack.part", "-m 'broken_pack.part' cannot be run: ValueError: not today"),
        (".", "-m '.' cannot be run: "),
    ],
)
def test_a_module_that_is_not_there_is_refused_with_its_name(target, message, folder):
    (folder / "broken_pack").mkdir()
    script("raise ValueError('not today')", "broken_pack/__init__.py")
    script("raise SystemExit('it was run')", "train.py")
    with pytest.raises(UsageError) as caught:
        check_program(ScriptProgram(target, True, ()))
    assert str(caught.value).startswith(message)
