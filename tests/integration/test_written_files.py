"""A command writes what it was asked to write, and nothing else: not beside, not at home."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile

import pytest
import torch
from click.testing import CliRunner

from integration.dump_making import Making, values
from paritas.app.cli import main

NET = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [torch.randn(2, 4)]


def graph():
    model, inputs = build()
    return torch.fx.symbolic_trace(model), tuple(inputs)


def wrong(graph, inputs):
    return lambda *args: [value + 1 for value in graph.forward(*args)]
"""
RUN = """
import torch
import written_net

model, inputs = written_net.build()
torch.compile(model, backend="eager")(*inputs)
"""
# A command, its exit code, and all that lies in the working directory after it and not before.
COMMANDS = {
    "inspect golden": (0, set()),
    "compare --my-path my --golden-path golden --output compared --jobs 1": (1, {"compared"}),
    "report compared --output page.html": (0, {"page.html"}),
    "convert golden --to stats --output converted": (0, {"converted"}),
    "verify written_net:build --backend eager": (0, set()),
    "verify written_net:build --backend eager --json verdict.json": (0, {"verdict.json"}),
    "verify written_net:build --backend eager --format junit --format-file unit.xml": (
        0,
        {"unit.xml"},
    ),
    "run --json told.json run.py": (0, {"told.json"}),
    "power written_net:build --faults 2": (0, set()),
    "verify-graph --graph written_net:graph --outdir checked --jobs 1 --cap 2": (0, {"checked"}),
    "config": (0, set()),
    "partition torch:mul --arg 4x4 --arg 4x4 --annotation 'a b, a b -> a b'": (0, set()),
    "partition torch:mul --arg 4x4 --arg 4x4 --option 0,0 --json split.json": (0, {"split.json"}),
    "verify-parallel written_net:build --plan ddp --steps 1 --json ranks.json": (
        0,
        {"ranks.json"},
    ),
    "doctor --quick --json looked_at.json": (0, {"looked_at.json"}),
}
# These run processes of their own, or compile.
SLOW_COMMANDS = {
    "shrink written_net:build --backend written_net:wrong --json told.json": (
        1,
        {"shrunk", "told.json"},
    ),
    "shrink compared --output operator": (1, {"operator"}),
    "partition torch:mm --arg 4x4 --arg 4x4 --annotation 'm k, k n -> m n' --shrink split": (
        1,
        {"split"},
    ),
}
# These compile a model of their own, each for long, and have tests of what they say.
WHOLE = os.environ.get("PARITAS_WHOLE_CORPUS") == "1"
if WHOLE:
    SLOW_COMMANDS |= {"demo": (0, set()), "doctor": (0, set())}
WATCHED = {"HOME": "home", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config"}
TEMPORARY = "temporary"


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A working directory with what the commands need, and every other place they might take."""
    work = tmp_path / "work"
    work.mkdir()
    for variable, name in WATCHED.items():
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    (tmp_path / TEMPORARY).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / TEMPORARY))
    monkeypatch.setattr(tempfile, "tempdir", None)  # what was found out of the old variable
    for name in [name for name in os.environ if name.startswith("PARITAS_")]:
        monkeypatch.delenv(name)
    (work / "written_net.py").write_text(NET, encoding="utf-8")
    (work / "run.py").write_text(RUN, encoding="utf-8")
    for name in ("my", "golden"):
        making, x = Making(work / name), values(4, 8)
        making.call("layers.0/cos", [x], x.cos() + (name == "my"), op="aten.cos.default")
        making.close()
    monkeypatch.chdir(work)
    monkeypatch.syspath_prepend(str(work))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    torch.compiler.reset()  # other tests may have used up what torch compiles of one function
    yield tmp_path
    sys.modules.pop("written_net", None)
    torch.compiler.reset()


def seen(folder):
    """Every file below, and when it was written; of folders, that they are there."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns if path.is_file() else 0
        for path in folder.rglob("*")
        # What torch's compiler keeps is torch's own.
        if not any(part.startswith("torchinductor") for part in path.parts)
    }


def test_a_command_writes_what_it_was_asked_for_and_nothing_else(places, monkeypatch):
    if not WHOLE:  # torch is looked at in a process of its own, for long
        monkeypatch.setattr(
            "paritas.app.doctor.examination._examine_torch", lambda *_, quick: iter(())
        )
    check_written(places, COMMANDS)


@pytest.mark.slow
def test_so_does_one_that_runs_processes_of_its_own_or_compiles(places, monkeypatch):
    # What the processes compile of the modules they import is Python's own.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    compared = next(line for line in COMMANDS if line.startswith("compare "))
    check_written(places, {compared: COMMANDS[compared], **SLOW_COMMANDS})


def check_written(places, commands):
    before = seen(places)
    for line, (code, written) in commands.items():
        result = CliRunner().invoke(main, shlex.split(line))
        assert result.exit_code == code, f"{line}: {result.output}"
        after = seen(places)
        changed = {name for name in after if after[name] != before.get(name)}
        tops = {"/".join(name.split("/")[:2]) for name in changed}
        assert tops == {f"work/{name}" for name in written}, line
        assert before.keys() <= after.keys(), f"{line} removed something"
        before = after


def test_a_command_that_is_refused_writes_nothing(places):
    before = seen(places)
    for line in (
        "compare --my-path absent --golden-path golden --output compared",
        "convert absent --to stats --output converted",
        "verify written_net:absent --json verdict.json",
        "run --json told.json absent.py",
        "verify-graph --graph written_net:absent --outdir checked",
        "verify written_net:build --backend eager --json absent/verdict.json",
    ):
        result = CliRunner().invoke(main, line.split())
        assert result.exit_code == 2, f"{line}: {result.output}"
        assert seen(places) == before, line
