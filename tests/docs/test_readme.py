"""The README and the guides: their code runs as written, and their commands exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import paritas
from paritas.cli.compare import compare
from paritas.cli.convert import convert
from paritas.cli.inspect import inspect as inspect_command
from paritas.cli.partition import partition
from paritas.cli.power import power
from paritas.cli.report import report
from paritas.cli.run import run
from paritas.cli.shrink import shrink
from paritas.cli.verify import verify
from paritas.cli.verify_graph import verify_graph
from paritas.cli.verify_parallel import verify_parallel
from paritas.dumps.reading import Dump
from paritas.numerics.findings import Status
from paritas.partition.library import unregister

README = Path(__file__).parents[2] / "README.md"
PARTITION = Path(__file__).parents[2] / "docs" / "partition.md"
RECORDING = Path(__file__).parents[2] / "docs" / "recording.md"
GRAPHS = Path(__file__).parents[2] / "docs" / "graphs.md"
PARALLEL = Path(__file__).parents[2] / "docs" / "parallel.md"
POWER = Path(__file__).parents[2] / "docs" / "power.md"
COMMANDS = Path(__file__).parents[2] / "docs" / "commands.md"


def python_code(path):
    text = path.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_the_code_runs_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.manual_seed(0)
    code = python_code(README)
    assert code.count("verify(") > 3
    exec(compile(code, str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    passes = ("identical: ", "equivalent: ")
    assert printed[0].startswith(passes)
    data = next(index for index, line in enumerate(printed) if line.startswith("True "))
    assert printed[data + 1].startswith(passes)  # of the guard
    assert {record.step for record in Dump.open("dumps/eager").records()} == {0, 1}
    assert any(record.site.kernel for record in Dump.open("dumps/fused").records())
    rules = printed.index("a b+, c b+ -> a c")
    assert printed[rules - 1].startswith(("equivalent None ", "identical None "))
    assert printed[rules + 1].startswith("True {<Outcome.VERIFIED: ")
    assert printed[rules + 2].startswith(passes)  # under a plan
    torch.compiler.reset()


@pytest.mark.slow
def test_the_code_about_recording_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.compiler.reset()
    torch.manual_seed(0)
    exec(compile(python_code(RECORDING), str(RECORDING), "exec"), {})
    assert Dump.open("runs/eager").problems == []
    assert Dump.open("runs/fused").header(0).observed[0].status == "unchanged"
    assert list(Path("runs/dump/msit_fx_dump").rglob("addmm-aten.addmm.default.OUTPUT.0.*.npy"))
    torch.compiler.reset()


def test_the_code_about_partition_runs_as_written(capsys):
    exec(compile(python_code(PARTITION), str(PARTITION), "exec"), {})
    printed = capsys.readouterr().out
    assert "a b+, c b+ -> a c" in printed
    unregister("torch.nn.functional.hardtanh")


def test_the_code_about_graphs_runs_as_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(python_code(GRAPHS), str(GRAPHS), "exec"), {})
    printed = capsys.readouterr().out
    assert "verified aten.gelu.default" in printed
    assert "split by b different" in printed
    assert Path("checked/report.html").exists()


def test_the_code_about_plans_runs_as_written(capsys):
    exec(compile(python_code(PARALLEL), str(PARALLEL), "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith(("identical: ", "equivalent: "))
    assert "step 1: output 2 " in printed


def test_the_code_about_power_runs_as_written(capsys):
    exec(compile(python_code(POWER), str(POWER), "exec"), {})
    printed = capsys.readouterr().out
    assert "faults above 8 times the rounding noise are caught" in printed


def test_every_argument_of_a_recording_is_explained():
    text = RECORDING.read_text(encoding="utf-8")
    asked = {*inspect.signature(paritas.capture).parameters}
    asked |= {*inspect.signature(paritas.record).parameters}
    assert not {name for name in asked if f"`{name}" not in text} - {"path"}


@pytest.mark.parametrize(
    ("command", "start"),
    [
        (verify, "paritas verify package.module:factory "),
        (run, "paritas run "),
        (shrink, "paritas shrink package.module:factory|"),
        (power, "paritas power package.module:factory "),
        (inspect_command, "paritas inspect "),
        (convert, "paritas convert "),
        (compare, "paritas compare "),
        (report, "paritas report "),
        (partition, "paritas partition package.module:operator "),
        (verify_graph, "paritas verify-graph "),
        (verify_parallel, "paritas verify-parallel "),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_every_option_it_names_exists_and_none_is_left_out(command, start):
    text = COMMANDS.read_text(encoding="utf-8")
    usage = re.split("```|\ntorchrun |\nparitas ", text.partition(f"\n{start}")[2])[0]
    known = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
    known = {name for name in known if name.startswith("--")} - {"--help"}
    assert set(re.findall(r"--[a-z-]+", usage)) == known


def test_every_status_has_its_row():
    text = README.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(Status)


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) < 200
