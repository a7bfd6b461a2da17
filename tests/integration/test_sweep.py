"""`paritas sweep` with real processes: what passes, what fails, what dies, and going on after."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

import processes
from docs.pages import DOCS, blocks
from paritas.sweeping.rows import SweepReport

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere each run is a new interpreter"
)
MODELS = """
import ctypes, os, time
from pathlib import Path
import torch
from torch import nn


def note(name):
    with Path("calls").open("a") as calls:
        calls.write(f"{name} {os.getpid()}\\n")


def fine():
    note("fine")
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [torch.ones(2, 4)]


def scaled(model):
    return lambda x: 1.01 * model(x)


def exits():
    os._exit(3)


def segfaults():
    ctypes.string_at(0)


def raises():
    raise ValueError("no weights here")


def sleeps():
    note("sleeps")
    if not Path("go").exists():
        time.sleep(3600)
    return fine()


def eats():
    held = []
    while sum(map(len, held)) < 4e9:
        held.append(b"x" * 50_000_000)
    time.sleep(3600)


def numbers():
    return [torch.randn(3, 5)]


def doubled(x):
    return 2 * x


def added(x):
    return x + x


def forged(x):
    # Whatever the process of a sweep has open, a kernel cannot write its own verdict there.
    for end in range(3, 64):
        try:
            os.write(end, b'{"ended": "verdict", "verdict": {"coverage": {"compared": 9}}}\\n')
        except OSError:
            pass
    return x
"""
KINDS = """
[defaults]
candidates = ["aot_eager"]
[[target]]
name = "models:fine"
modes = "eval-forward"
[[target]]
name = "models:fine"
candidates = ["models:scaled"]
[[target]]
names = ["models:exits", "models:segfaults", "models:raises"]
[[target]]
name = "models:sleeps"
seconds = 0.5
[[target]]
name = "models:eats"
memory = "1 GB"
[[kernel]]
reference = "models:doubled"
inputs = "models:numbers"
candidates = ["models:added", "models:forged"]
cases = 6
"""
THREE = """
[defaults]
candidates = ["aot_eager"]
modes = ["eval-forward"]
[[target]]
names = ["models:fine", "models:sleeps", "models:raises"]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def start(folder, toml, *options):
    (folder / "targets.toml").write_text(toml)
    arguments = ("targets.toml", "--output", "out", *options)
    return processes.start("-m", "integration.forked_sweep", *arguments, cwd=folder)


def ended(process):
    output, errors = process.communicate()
    return process.returncode, output, errors


def report_of(folder):
    return SweepReport.from_json((folder / "out" / "sweep.json").read_bytes())


def test_whatever_becomes_of_a_run_is_a_row(folder):
    code, output, errors = ended(start(folder, KINDS, "--jobs", "2"))
    assert code == 1, errors
    assert output.splitlines()[-1] == "different: 9 runs; 7 of 9 fail (2 different, 5 unverified)"
    report = report_of(folder)
    assert [(row.run.target, row.status.value, row.ended.value) for row in report.rows] == [
        ("models:fine", "identical", "verdict"),
        ("models:fine", "different", "verdict"),
        ("models:exits", "unverified", "crashed"),
        ("models:segfaults", "unverified", "crashed"),
        ("models:raises", "unverified", "raised"),
        ("models:sleeps", "unverified", "timed out"),
        ("models:eats", "unverified", "out of memory"),
        ("models:doubled", "identical", "verdict"),
        ("models:doubled", "different", "verdict"),
    ]
    reasons = [row.worst.reason for row in report.rows[2:]]
    assert reasons[:2] == [
        "the process crashed (exit code 3), during: building models:exits",
        "the process crashed (killed by SIGSEGV), during: building models:segfaults",
    ]
    assert "ValueError: no weights here" in reasons[2]
    assert reasons[3] == "not finished after 0 s, the time limit, during: building models:sleeps"
    assert "more than the limit of 1 GB, during: building models:eats" in reasons[4]
    assert "in segfaults" in report.rows[3].log
    assert "in sleeps" in report.rows[5].log  # where it was when its time was over
    for row in report.rows:
        assert row.began
        assert row.versions.keys() >= {"torch", "python", "platform"}
    written = {path.name for path in (folder / "out").iterdir()}
    assert {"sweep.json", "junit.xml", "report.html", "journal.jsonl"} <= written


def test_the_page_about_it_runs_as_written(folder):
    files = [block for block in blocks(DOCS / "sweep.md") if block.language in ("python", "output")]
    nets, script, printed = files
    (folder / "nets.py").write_text(nets.text)
    (folder / "script.py").write_text(script.text)
    process = processes.start("-m", "integration.forked_sweep", "script.py", cwd=folder)
    assert ended(process) == (0, printed.text, "")


def wait_for(condition):
    limit = time.monotonic() + processes.LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def calls_of(folder):
    path = folder / "calls"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def is_gone(process):
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_was_stopped_goes_on_where_it_was(folder, number, ctrl_c):
    process = start(folder, THREE, "--jobs", "1")
    wait_for(lambda: "sleeps" in calls_of(folder))
    process.send_signal(number)
    code, output, errors = ended(process)
    if number == signal.SIGINT:
        assert code == 130, errors
        assert output.splitlines()[-1] == "unverified: interrupted after 1 of 3 runs; all pass"
        assert report_of(folder).stopped == "interrupt"
    sleeping = (folder / "calls").read_text().split()[-1]
    wait_for(lambda: is_gone(sleeping))  # nothing goes on behind our back

    with (folder / "out" / "journal.jsonl").open("a") as journal:
        journal.write('{"run": {"target": "models:sl')
    (folder / "go").touch()
    code, output, errors = ended(start(folder, THREE))
    assert code == 3, errors
    assert "note: 1 of 3 rows are from before this sweep was resumed" in output
    assert [row.status.value for row in report_of(folder).rows] == [
        "identical",
        "identical",
        "unverified",
    ]
    # The first was not run again; the second calls the first.
    assert calls_of(folder) == ["fine", "sleeps", "sleeps", "fine"]


def test_a_mistake_is_told_before_anything_runs(folder):
    code, output, errors = ended(start(folder, '[[target]]\nname = "models"\n'))
    assert (code, output) == (2, "")
    assert "targets.toml, target 1: name = 'models' is not a target: write package" in errors
    assert not (folder / "out").exists()
