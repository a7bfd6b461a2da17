"""`paritas verify-parallel`, from the command line to the exit code."""

from __future__ import annotations

import signal
import sys

import pytest
from click.testing import CliRunner

import processes
from paritas.app.cli import main
from paritas.core.results.findings import Status, Verdict

PROGRAM = """

import torch
from torch import distributed, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

TENSOR = {"0": ColwiseParallel(), "2": RowwiseParallel()}
NUMBER = 3


def build():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, [torch.randn(4, 6)]


def build_model():
    return build()[0]


def build_batch():
    return [torch.randn(4, 6)]


def squared(output, x):
    return output.square().mean()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Row(nn.Module):
    def __init__(self, whole, mesh):
        super().__init__()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.weight = nn.Parameter(whole.weight.detach().chunk(size, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        part = self.weight.shape[1]
        first = distributed.get_rank() * part
        x = x[:, first : first + part]
        return Summed.apply(nn.functional.linear(x, self.weight, self.bias))


def bias_on_every_rank(model, mesh):
    model[2] = Row(model[2], mesh)


def function_alone():
    return torch.sin, [torch.randn(3)]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "own_parallel.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parallel", raising=False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def verify_parallel(*arguments):
    return CliRunner().invoke(main, ["verify-parallel", *map(str, arguments)])


def words(text):
    """Without regard to where lines are broken."""
    return " ".join(text.split())


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["ddp", "fsdp", "own_parallel:TENSOR"])
def test_a_right_plan_passes_with_exit_code_0(plan):
    result = verify_parallel("own_parallel:build", "--plan", plan)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(("equivalent: ", "identical: "))
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_a_bias_on_every_rank_is_different_and_the_module_is_named(tmp_path):
    path = tmp_path / "verdict.json"
    result = verify_parallel(
        "own_parallel:build", "--plan", "own_parallel:bias_on_every_rank", "--json", path
    )
    assert result.exit_code == 1, result.output
    verdict = Verdict.from_json(path.read_bytes())
    assert verdict.status is Status.DIFFERENT
    [origin] = {f.origin.name for f in verdict.failures if f.origin is not None}
    assert origin == "2"
    assert "bias" in words(result.stdout)
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_every_option_reaches_the_verification():
    result = verify_parallel(
        *("own_parallel:build_model", "--inputs", "own_parallel:build_batch"),
        *("--plan", "ddp", "--loss", "own_parallel:squared", "--optimizer", "torch.optim:AdamW"),
        *("--mesh", "dp=2", "--split", "dp", "--steps", "3", "--dtype", "bfloat16"),
        *("--seed", "3", "--timeout", "60", "--strict"),
    )
    assert result.exit_code in {0, 1}, result.output
    assert "bfloat16" in result.stdout
    assert "step 3" in result.stdout or result.exit_code == 0


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("own_parallel:build",), "Missing option '--plan'"),
        (
            ("own_parallel:build", "--plan", "dpd"),
            "is unknown; give ddp, fsdp, hf, hf-ep or your own",
        ),
        (("own_parallel.build", "--plan", "ddp"), "is not of the form package.module:name"),
        (
            ("own_parallel:build", "--plan", "own_parallel:NUMBER"),
            "--plan 'own_parallel:NUMBER' is of type int: 3; name a dict of parallel styles",
        ),
        (
            ("own_parallel:build", "--plan", "own_parallel:bias_on_each_rank"),
            "did you mean 'bias_on_every_rank'?",
        ),
        (
            ("own_parallel:build", "--plan", "ddp", "--mesh", "dp=two"),
            "'dp=two' is neither a number of ranks (4) nor a list of axes (dp=2,tp=2)",
        ),
        (
            ("own_parallel:build", "--plan", "ddp", "--mesh", "dp=2,dp=2"),
            "names the axis 'dp' twice",
        ),
        (
            ("own_parallel:build", "--plan", "ddp", "--mesh", "1"),
            "has only one rank: pass 2 or more",
        ),
        (
            ("own_parallel:build", "--plan", "ddp", "--mesh", "dp=2", "--split", "tp"),
            "the mesh has no axis 'tp'",
        ),
        (
            ("own_parallel:function_alone", "--plan", "ddp"),
            "a parallel plan needs a torch.nn.Module",
        ),
        (
            ("own_parallel:build", "--plan", "ddp", "--device", "cpu", "--ranks", "gloo"),
            "--device is for simulated ranks: torchrun gives each rank its own, gloo the CPU",
        ),
        (
            ("own_parallel:build", "--plan", "ddp", "--json", "missing/verdict.json"),
            "missing/verdict.json",
        ),
    ],
)
def test_bad_input_has_its_message_and_exit_code_2(arguments, told):
    result = verify_parallel(*arguments)
    assert result.exit_code == 2, result.output
    assert told in words(result.stderr)
    assert "Traceback" not in result.stderr


def test_torchrun_brings_its_own_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = verify_parallel("own_parallel:build", "--plan", "ddp", "--ranks", "gloo")
    assert result.exit_code == 2
    assert "torchrun already starts the ranks (RANK=0 is set): drop --ranks gloo" in words(
        result.stderr
    )


def test_interrupted_is_130(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("paritas.sharding.plans.verify.verify_parallel", interrupt)
    result = verify_parallel("own_parallel:build", "--plan", "ddp")
    assert result.exit_code == 130
    assert "interrupted: there is no verdict" in result.stderr


# --- ranks of a launcher --------------------------------------------------------------------------


@pytest.mark.slow
def test_of_ranks_that_a_launcher_brings_the_first_alone_tells_and_does_so_before_any_ends():
    plan = ("--plan", "own_parallel:bias_on_every_rank")
    ranks = processes.run_ranks("-m", "paritas", "verify-parallel", "own_parallel:build", *plan)
    # Whichever ends first has the launcher end the other, which may be on its way out already.
    codes = {rank.returncode for rank in ranks}
    assert 1 in codes
    assert codes <= {1, -signal.SIGTERM}
    first, other = (rank.stdout.splitlines() for rank in ranks)
    assert [line for line in first if line.startswith("different: ")] == first[-1:]
    assert other == []
