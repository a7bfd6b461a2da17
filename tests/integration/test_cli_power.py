"""`paritas power`, from the command line to the report and the exit code."""

from __future__ import annotations

import re
import sys

import pytest
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.results.findings import Status
from paritas.mutants import power as searching
from paritas.mutants.rows import PowerReport

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.sin(self.first(x)) + x)


class Deciding(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x.exp()


class Opaque(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.numpy() * 2)


class Failing(nn.Module):
    def forward(self, x):
        raise ValueError("no such thing")


class Counting(nn.Module):
    def forward(self, x):
        return x.shape[0]


def build():
    return Net(), [torch.randn(4, 8)]


def model():
    return Net()


def inputs():
    return [torch.randn(3, 8)]


def deciding():
    return Deciding(), [torch.ones(5)]


def opaque():
    return Opaque(), [torch.ones(5)]


def failing():
    return Failing(), [torch.ones(5)]


def counting():
    return Counting(), [torch.ones(5)]


def stacked():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))), [torch.randn(3, 4)]


def reshaping():
    return (lambda x: x.view(5, 1)), [torch.arange(5)]
"""


@pytest.fixture(autouse=True)
def net(tmp_path, monkeypatch):
    (tmp_path / "power_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("power_net", None)


def run(*args):
    return CliRunner().invoke(main, ["power", *args])


def test_the_report_fits_a_terminal_and_ends_with_the_answer(net):
    done = run("power_net:build", "--faults", "24", "--time", "600", "--json", "power.json")
    assert done.exit_code == 0, done.output
    printed = done.stdout.splitlines()
    assert printed[0].startswith("2") or " operators" in printed[0]
    assert re.match(r"more than 8 times +\d+ +[\d.]+ %", printed[4]), done.stdout
    last = r"\d+ of \d+ faults above 8 times the rounding noise are caught \(at least [\d.]+ % "
    assert re.match(last, printed[-1])
    assert all(len(line) <= 80 for line in printed[:-1])
    found = PowerReport.from_json((net / "power.json").read_bytes())
    assert len(found.faults) == 24
    assert found.backward > 0


def test_options_say_how_the_model_is_built(net):
    done = run(
        *("power_net:model", "--inputs", "power_net:inputs", "--dtype", "bfloat16"),
        *("--no-gradients", "--faults", "3", "--json", "power.json"),
    )
    assert done.exit_code == 0, done.output
    found = PowerReport.from_json((net / "power.json").read_bytes())
    assert found.dtypes == ("bfloat16",)
    assert found.backward == 0


def test_faults_are_judged_block_by_block(net):
    done = run(
        *("power_net:stacked", "--by", "blocks", "--blocks", "1", "--no-gradients"),
        *("--faults", "2", "--json", "power.json"),
    )
    assert done.exit_code == 0, done.output
    found = PowerReport.from_json((net / "power.json").read_bytes())
    assert {one.block for one in found.faults} == {"1", "between blocks"}
    assert "by blocks: 1 block (1), and between them;" in " ".join(done.stdout.split())


def test_fewer_caught_than_required_ends_with_1(monkeypatch):
    monkeypatch.setattr(searching._PowerSearch, "_judge", lambda *_, **__: Status.EQUIVALENT)
    arguments = ("power_net:build", "--faults", "4", "--no-gradients")
    assert run(*arguments, "--at-least", "0.99").exit_code == 1
    assert run(*arguments).exit_code == 0


def test_a_branch_on_values_is_traced_as_it_is_taken():
    done = run("power_net:deciding", "--faults", "4")
    assert done.exit_code == 0, done.output
    assert "traced as constants: 1 value that Python code reads" in " ".join(done.stdout.split())


def test_what_numpy_computes_is_said_to_be_out_of_sight():
    done = run("power_net:opaque")
    assert "traced as constants: 1 tensor that Python or numpy code creates" in " ".join(
        done.stdout.split()
    )


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("power_net:failing", "cannot be traced as one graph: ValueError: no such thing"),
        ("power_net:counting", "the model returns no tensor on these inputs: Counting()"),
        ("power_net:missing", "module power_net has no 'missing'"),
        ("power_net", "is not of the form package.module:name"),
    ],
)
def test_a_model_without_a_place_for_faults_is_reported_without_a_traceback(factory, words):
    done = run(factory)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "Traceback" not in done.output


def test_where_nothing_can_be_planted_nothing_is_verified():
    done = run("power_net:reshaping")
    assert done.exit_code == 3
    assert done.stdout.splitlines()[-1].startswith("no result: ")


def test_an_interrupt_reports_what_was_found_so_far(monkeypatch):
    tried = searching._PowerSearch._try

    def interrupted(self, *args):
        if len(self.faults) == 3:
            raise KeyboardInterrupt
        return tried(self, *args)

    monkeypatch.setattr(searching._PowerSearch, "_try", interrupted)
    done = run("power_net:build", "--faults", "30", "--no-gradients")
    assert done.exit_code == 130
    assert "27 of 30 planned faults were not tried: interrupted" in " ".join(done.stdout.split())
