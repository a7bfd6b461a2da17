"""Ctrl-C at any moment: exit code 130, and every file that is there can be read whole."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from integration.dump_making import Making, values
from integration.interrupting import endings
from integration.once import made_once
from paritas.comparison.results_folder import read_comparison
from paritas.core.results.findings import Verdict
from paritas.formats.dumps.reading import Dump
from paritas.mutants.rows import PowerReport
from paritas.sharding.graphs.rows import GraphReport

# The same calls each time. With the whole corpus more of them, and the commands that take long.
SEED = 7
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
MOMENTS = 20 if WHOLE else 2

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.sin(self.first(x)) + x)


def build():
    torch.manual_seed(0)
    return Net(), [torch.randn(4, 8)]


def graph():
    model, inputs = build()
    return torch.fx.symbolic_trace(model), tuple(inputs)


def wrong(graph, inputs):
    for node in graph.graph.find_nodes(op="call_function", target=torch.sin):
        node.target = torch.cos
    graph.recompile()
    return graph.forward
"""
RUN = """
import torch
import net

model, inputs = net.build()
compiled = torch.compile(model, backend="eager")
for _ in range(3):
    compiled(*inputs).sum().backward()
"""
CAPTURE = """
import net
import paritas

model, inputs = net.build()
with paritas.capture("recorded", level="op"):
    for _ in range(3):
        model(*inputs).sum().backward()
"""
COMMANDS = {
    "compare": "compare --my-path my --golden-path golden --output compared --jobs 1",
    "convert": "convert golden --to stats --output converted",
    "verify": "verify net:build --backend eager --json verdict.json",
    "run": "run --json verdict.json run.py",
}
LONG_COMMANDS = {
    "verify-graph": "verify-graph --graph net:graph --outdir checked --jobs 1 --cap 4",
    "shrink": "shrink net:build --backend net:wrong --output bug --time 30",
    "power": "power net:build --faults 4 --json power.json",
}
CODES = {"compare": 1, "shrink": 1}
# What was found before Ctrl-C came is told all the same: the verdict of `run` about a program that
# had ended.
TOLD_ALL_THE_SAME = {"run": 0}


def prepare(folder):
    """What every command is given."""
    folder.mkdir()
    for name, text in {"net.py": NET, "run.py": RUN, "capture.py": CAPTURE}.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("my", "golden"):
        making = Making(folder / name)
        x = values(4, 8)
        for layer in range(3):
            y = x.cos() + (name == "my" and layer == 1)
            making.call(f"layers.{layer}/cos", [x], y, op="aten.cos.default")
            x = y
        making.close()


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How every command ended, at each of its moments."""
    return json.loads((made_once(tmp_path_factory, "interrupted", make) / "ended.json").read_text())


def make(folder):
    prepare(folder / "prepared")
    common = {"prepared": str(folder / "prepared"), "moments": MOMENTS, "seed": SEED}
    commands = COMMANDS | (LONG_COMMANDS if WHOLE else {})
    tasks = [{"name": name, "arguments": text.split(), **common} for name, text in commands.items()]
    tasks.append({"name": "capture", "script": "capture.py", **common})
    (folder / "ended.json").write_text(json.dumps(endings(folder, tasks)))


def test_a_command_left_alone_runs_to_its_end(ended):
    for one in ended:
        if one["stop"] is None:
            assert one["code"] == CODES.get(one["name"], 0), one["said"]
            assert_readable(one)


def test_ctrl_c_ends_every_command_with_130_and_without_a_traceback(ended):
    for one in ended:
        if one["stop"] is not None:
            told = f"{one['name']}, call {one['stop']} in {one['at']}: {one['said']}"
            assert one["code"] in (130, TOLD_ALL_THE_SAME.get(one["name"])), told
            assert "Traceback" not in one["said"], told


def test_what_an_interrupted_command_leaves_is_whole(ended):
    for one in ended:
        if one["stop"] is not None:
            assert_readable(one)


# --- what readable means --------------------------------------------------------------------------


def assert_readable(one):
    folder = Path(one["folder"])
    told = f"{one['name']}, call {one['stop']} in {one['at']}"
    # The data of a dump is read by way of its index: a file not closed has no header of its own.
    dumps = [folder / name for name in ("my", "golden", "recorded", "converted")]
    for path in sorted(folder.rglob("*")):
        if any(path.is_relative_to(dump) for dump in dumps):
            continue
        assert "unfinished" not in path.name, f"{told}: {path} was left"
        if path.is_file():
            check = CHECKS.get(path.name) or CHECKS.get(path.suffix)
            assert path.stat().st_size or path.suffix not in CHECKS, f"{told}: {path} is empty"
            if check is not None:
                check(path)
    for dump in dumps:
        if dump.exists():
            read_dump(dump, told)


def read_dump(path, told):
    dump = Dump.open(path)
    for record in dump.records():
        if record.payload is not None:
            assert isinstance(dump.read(record), torch.Tensor), told


def read_tensors(path):
    with safe_open(path, "pt") as file:
        assert all(isinstance(file.get_tensor(name), torch.Tensor) for name in file.keys())  # noqa: SIM118


def read_script(path):
    compile(path.read_bytes(), str(path), "exec")


def read_page(path):
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")


def read_table(path):
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    assert len({len(row) for row in rows}) <= 1, path


CHECKS = {
    "verdict.json": lambda path: Verdict.from_json(path.read_bytes()),
    "power.json": lambda path: PowerReport.from_json(path.read_bytes()),
    "results.json": lambda path: GraphReport.from_json(path.read_bytes()),
    "comparison.json": lambda path: read_comparison(path.parent),
    ".json": lambda path: json.loads(path.read_bytes()),
    ".html": read_page,
    ".csv": read_table,
    ".py": read_script,
    ".safetensors": read_tensors,
}
