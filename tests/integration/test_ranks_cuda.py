"""Splits on a GPU: `partition` and `verify-graph` with `--device cuda`, and real ranks there.

The ranks are started once for all tests: each imports torch anew where there is an accelerator.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from paritas.app.cli import main
from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe, on_device
from paritas.core.results.findings import Status
from paritas.core.results.items import Once, Partial, Shard
from paritas.partition import TensorInfo, VerifyConfig, check_partition, discover_partitions
from paritas.sharding.graphs.rows import CallOutcome, GraphReport
from paritas.sharding.graphs.verify import verify_graph
from paritas.sharding.operators.recipe_checks import check_recipe, confirmation
from paritas.sharding.plans.rank_pool import close_pools
from unit.sharding.graphs.small_graphs import WRONG, graph, linear, relu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = ((0, Shard(1)), (1, Shard(1)))
BATCH = Recipe(((0, Shard(0)),), (Shard(0),))


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    yield
    close_pools()


def call(function, *shapes, name="", **kwargs):
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    told = name or f"torch.{function.__name__}"
    return on_device(OperatorCall(function, tuple(made), kwargs, told), torch.device("cuda"))


LINEAR = ("torch.nn.functional.linear", (4, 6), (8, 6), (8,))


def linear_call():
    return call(F.linear, *LINEAR[1:], name=LINEAR[0])


@pytest.mark.parametrize(
    ("recipe", "right"),
    [
        (BATCH, True),
        (Recipe((*ROWS, (2, Once())), (Partial("sum"),)), True),
        (Recipe(ROWS, (Partial("sum"),)), False),
    ],
)
def test_simulated_ranks_and_gloo_ranks_that_share_a_gpu_agree(recipe, right):
    operator = linear_call()
    assert check_recipe(operator, recipe).passed is right
    verdict = confirmation("gloo", operator, recipe, 2)
    assert verdict.passed is right
    assert verdict.status is not Status.UNVERIFIED


@pytest.mark.parametrize("recipe", [BATCH, Recipe((*ROWS, (2, Once())), (Partial("sum"),))])
def test_nccl_carries_results_and_gradients(recipe):
    """On as many GPUs as there are, one by itself too: the way is the same."""
    verdict = confirmation("nccl", linear_call(), recipe, min(2, torch.cuda.device_count()))
    assert verdict.passed, str(verdict)
    assert any(finding.item.kind.is_gradient for finding in verdict.findings)


def test_more_nccl_ranks_than_gpus_are_refused():
    ranks = torch.cuda.device_count() + 1
    with pytest.raises(UsageError, match=f"NCCL needs one GPU for each of {ranks} ranks"):
        verify_graph(graph(relu(0)), device="cuda", confirm="nccl", ranks=max(2, ranks))


def test_an_operator_that_draws_on_the_gpu_gives_each_rank_its_part():
    operator = call(F.dropout, (8, 6), name="torch.nn.functional.dropout", p=0.5, training=True)
    before = torch.cuda.get_rng_state()
    verdict = check_recipe(operator, BATCH)
    assert verdict.passed, str(verdict)
    assert any("draws random numbers" in note for note in verdict.notes)
    assert torch.equal(before, torch.cuda.get_rng_state())
    assert confirmation("gloo", operator, BATCH, 2).passed


def test_splits_are_found_by_running_on_the_gpu():
    found = discover_partitions(
        torch.matmul, (torch.randn(4, 6, device="cuda"), torch.randn(6, 8, device="cuda"))
    )
    assert [one.annotation for one in found] == ["a b+, b+ c -> a c"] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_configuration_is_checked_on_the_gpu(dtype):
    args = [TensorInfo("shape", shape, dtype) for shape in LINEAR[1:]]
    options = [{"idx": 0, "dim": 0}, {"idx": 0, "dim": 1}, {"idx": 1, "dim": 0}]
    config = VerifyConfig(LINEAR[0], args, {}, 1, options)
    verdict = check_partition(config, device="cuda", confirm="gloo")
    assert verdict.passed, str(verdict)


def test_a_graph_is_checked_and_confirmed_on_the_gpu(tmp_path):
    whole = graph(linear(0), relu(1), linear(2, WRONG))
    report = verify_graph(whole, tmp_path, device="cuda", confirm="gloo", html=False)
    outcomes = [one.outcome for one in report.operators]
    assert outcomes == [CallOutcome.VERIFIED, CallOutcome.VERIFIED, CallOutcome.FAILED]
    for operator in report.operators:
        for option in operator.options:
            assert option.confirmation.status.passes() is option.confirmation.simulated.passes()
    assert report.settings["device"] == "cuda"
    # The script runs on the host, and shows it there.
    assert report.operators[2].script


def test_a_graph_that_makes_tensors_makes_them_where_it_is_checked():
    class Shifted(torch.nn.Module):
        def forward(self, x):
            return x + torch.arange(6, device=x.device, dtype=x.dtype)

    exported = torch.export.export(Shifted(), (torch.randn(4, 6),))
    report = verify_graph(exported, device="cuda", confirm="gloo")
    assert report.exit_code == 0, str(report)


def test_the_commands_run_on_the_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.export.save(torch.export.export(torch.nn.Linear(8, 6), (torch.randn(4, 8),)), "model.pt2")
    asked = ["--graph", "model.pt2", "--outdir", "out", "--device", "cuda", "--confirm", "gloo"]
    result = CliRunner().invoke(main, ["verify-graph", *asked])
    assert result.exit_code == 0, result.output
    report = GraphReport.from_json((tmp_path / "out" / "results.json").read_bytes())
    assert report.settings["device"] == "cuda"
    arguments = [LINEAR[0].replace("functional.", "functional:")]
    for shape in ("4x8", "10x8", "10"):
        arguments += ["--arg", shape]
    for more in ([], ["--confirm", "gloo"], ["--discover"]):
        result = CliRunner().invoke(main, ["partition", *arguments, "--device", "cuda", *more])
        assert result.exit_code == 0, result.output
