"""Real msprobe (mindstudio-probe, from PyPI) records a program; we read what it left."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paritas.core.numerics.statistics import summarize
from paritas.formats.dumps.opening import open_dump

# Two steps of training in float32, seed 0; the layer b is called twice, a takes and gives trees.
# The first argument says who looks on: msprobe with a configuration, or paritas with a folder.
PROGRAM = """
import sys
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x, scale=1.0, mask=None):
        h = self.act(self.lin(x)) * scale
        if mask is not None:
            h = h + mask["m"]
        return h, {"aux": h.sum(), "flags": h > 0}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Block()
        self.b = Block()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h, _ = self.a(x, scale=2.0, mask={"m": torch.ones(8)})
        for _ in range(2):
            h, _ = self.b(h)
        return self.head(h)


def train(begin, end):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        begin(net)
        net(x).square().mean().backward()
        end()
        optimizer.step()
        optimizer.zero_grad()


if sys.argv[1] == "msprobe":
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger(config_path=sys.argv[2])

    def end():
        debugger.stop()
        debugger.step()

    train(lambda net: debugger.start(model=net), end)
else:
    import paritas

    with paritas.capture(sys.argv[2], level="module"):
        train(lambda net: None, lambda: None)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the program with somebody looking on; gives the folder of the dump."""
    if importlib.util.find_spec("msprobe") is None:
        pytest.skip("mindstudio-probe is not installed")
    folder = tmp_path_factory.mktemp("msprobe")
    script = folder / "program.py"
    script.write_text(PROGRAM)

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        # It patches torch, so it gets a process of its own.
        return subprocess.run(  # noqa: PLW1510  (the caller asks)
            command, env=dict(os.environ), capture_output=True, text=True, cwd=folder, timeout=600
        )

    tried = start("-c", "import msprobe.pytorch")
    if tried.returncode:
        pytest.skip(f"mindstudio-probe cannot be imported: {tried.stderr.splitlines()[-1]}")

    @functools.cache
    def record(who: str, **settings: object) -> Path:
        dump = folder / "-".join([who, *map(str, settings.values())])
        given = str(dump)
        if who == "msprobe":
            task = {"scope": [], "list": [], "data_mode": ["all"]} | settings
            whole = {"task": settings["task"], "dump_path": given, "rank": [], "step": []}
            whole |= {"level": "mix", settings["task"]: task}
            given = f"{dump}.json"
            Path(given).write_text(json.dumps(whole))
        done = start(str(script), who, given)
        assert done.returncode == 0, done.stderr
        return dump

    return record


@pytest.mark.slow
def test_a_dump_of_tensors_holds_what_our_own_recording_of_the_program_holds(run):
    theirs, ours = open_dump(run("msprobe", task="tensor")), open_dump(run("paritas"))
    assert (theirs.kind, theirs.problems) == ("msprobe", [])
    found = {(record.step, record.id): record for record in theirs.records()}
    compared = 0
    for record in ours.records():
        if record.site.name == "Net":
            continue  # msprobe leaves the model itself out
        twin = found[record.step, record.id]
        assert (twin.site.level, twin.site.op) == (record.site.level, record.site.op)
        assert twin.site.module == record.site.module
        assert twin.site.line == record.site.line
        if record.tensor is None:
            assert twin.value == record.value, record.id
        else:
            assert torch.equal(theirs.read(twin), ours.read(record)), record.id
            compared += 1
    # In each step at least what 3 blocks, their 6 layers and the head take and give, twice.
    assert compared > 2 * 2 * 20
    own = [record for record in ours.records() if record.site.name != "Net"]
    order = [(record.step, record.id) for record in own if record.site.phase == "forward"]
    known = set(order)
    assert [key for key in found if key in known] == order


@pytest.mark.slow
def test_figures_of_a_real_dump_are_those_of_its_tensors(run):
    tensors = open_dump(run("msprobe", task="tensor"))
    figures = open_dump(run("msprobe", task="statistics", summary_mode="statistics"))
    twins = {(record.step, record.id): record for record in figures.records()}
    checked = 0
    for record in tensors.records():
        twin = twins.pop((record.step, record.id))
        assert twin.payload is None
        assert twin.tensor == record.tensor
        assert twin.value == record.value
        if record.tensor is None:
            continue
        exact = summarize(tensors.read(record))
        assert (twin.statistics.minimum, twin.statistics.maximum) == (exact.minimum, exact.maximum)
        if twin.statistics.mean is not None:
            assert twin.statistics.mean == pytest.approx(exact.mean, rel=1e-5, abs=1e-6)
            assert twin.statistics.l2 == pytest.approx(exact.l2, rel=1e-5)
        checked += 1
    assert checked > 150
    assert not twins
    assert figures.header(0).data == "stats"


@pytest.mark.slow
def test_checksums_of_a_real_dump_are_kept(run):
    dump = open_dump(run("msprobe", task="statistics", summary_mode="md5"))
    tensors = [record for record in dump.records() if record.tensor is not None]
    assert tensors
    assert all(record.digest.startswith("crc32:") for record in tensors)
