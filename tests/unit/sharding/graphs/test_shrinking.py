"""A wrong split is shown on the smallest shapes at which it is wrong in the same way."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from drawing import normal
from paritas.core.errors import UsageError
from paritas.core.judging.failures import recall_failed
from paritas.core.operators.calls import OperatorCall
from paritas.core.placement.placement import Recipe
from paritas.core.results.items import Replicate, Shard
from paritas.core.shrinking import NothingFailsError
from paritas.partition import TensorInfo, VerifyConfig, check_partition, check_recipe
from paritas.sharding.graphs.shrinking import graph_call, shrink_splits

if TYPE_CHECKING:
    from paritas.core.results.findings import Verdict

K_IS_NOT_SUMMED = "m k, k n -> m n"
ROWS = Recipe(((0, Shard(0)),), (Shard(0),))


# A script is run in test_cli_partition.py; a process for each test here would take long.
pytestmark = pytest.mark.usefixtures("untried", "undiagnosed")


def centred(x: torch.Tensor) -> torch.Tensor:
    """Its rows depend on each other."""
    return x - x.mean(dim=0)


def wrong_if_large(x: torch.Tensor) -> torch.Tensor:
    """Its rows depend on each other only if a value is large."""
    return x + torch.where(x.abs().max() > 1000, x.detach().abs().max(), torch.zeros(()).to(x))


def product(*options: dict[str, int], ranks: int = 2, annotation: str | None = None) -> Verdict:
    shapes = [TensorInfo("shape", (64, 48)), TensorInfo("shape", (48, 32))]
    config = VerifyConfig(
        fsig="torch.matmul", args=shapes, kwargs={}, noutputs=1, parti_options=list(options)
    )
    return check_partition(config, ranks=ranks, annotation=annotation)


def call(function, *args, name: str = "") -> OperatorCall:
    return OperatorCall(function, args, name=name or f"{__name__}.{function.__name__}")


def text(report) -> str:
    return Path(report.script).read_text()


# --- what comes out -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_wrong_annotation_is_shown_on_dimensions_of_one_element_a_rank(tmp_path, ranks) -> None:
    verdict = product({"idx": 0, "dim": 1}, ranks=ranks, annotation=K_IS_NOT_SUMMED)
    report = verdict.shrink(outdir=tmp_path)
    assert report.what == f"torch.matmul, split by k over {ranks} ranks: different"
    assert report.before == "matmul(f32[64, 48], f32[48, 32])"
    assert report.after == f"no dimension longer than {ranks}"
    assert report.queries == 1
    assert f"torch.randn([{ranks}, {ranks}], generator=generator)" in text(report)
    assert f"Annotation: {K_IS_NOT_SUMMED} (declared)" in text(report)


def test_of_several_options_the_one_that_is_wrong_is_shown(tmp_path) -> None:
    # The second tensor names k a second time; the rule has it once, at the first.
    verdict = product({"idx": 0, "dim": 0}, {"idx": 1, "dim": 0}, annotation=K_IS_NOT_SUMMED)
    report = verdict.shrink(outdir=tmp_path)
    assert report.what == "torch.matmul, split by k over 2 ranks: different"


def test_an_option_that_says_how_many_ranks_is_split_over_so_many(tmp_path) -> None:
    verdict = product({"idx": 0, "dim": 1, "num": 3}, annotation=K_IS_NOT_SUMMED)
    assert "over 3 ranks" in verdict.shrink(outdir=tmp_path).what


def test_a_recipe_without_a_rule_is_shown_too(tmp_path) -> None:
    report = check_recipe(call(centred, normal(64, 5)), ROWS, 4).shrink(outdir=tmp_path)
    assert report.what.endswith("centred, split over 4 ranks: different")
    # Different lengths stay different.
    assert "torch.randn([4, 3], generator=generator)" in text(report)
    assert "import centred" in text(report)


def test_parts_as_unequal_as_in_the_check_are_kept_where_they_are_the_fault(tmp_path) -> None:
    verdict = check_partition(
        VerifyConfig(
            fsig="torch.mean",
            args=[TensorInfo("shape", (5,))],
            kwargs={},
            noutputs=1,
            parti_options=[{"idx": 0, "dim": 0}],
        ),
        annotation="a+avg -> 1",
    )
    report = verdict.shrink(outdir=tmp_path)
    assert report.after == "the values of the check"
    assert "narrow(0, 0, 3)" in text(report)


def test_values_that_alone_show_it_are_kept_beside_the_script(tmp_path) -> None:
    x = normal(40, 2)
    x[0, 0] = 5000.0
    report = check_recipe(call(wrong_if_large, x), ROWS).shrink(outdir=tmp_path)
    assert report.after == "the values of the check"
    assert Path(report.data).exists()


def test_an_operator_without_a_name_is_called_as_people_call_it(tmp_path) -> None:
    recipe = Recipe(((0, Shard(1)), (1, Shard(1))), (Replicate(),))
    linear = OperatorCall(torch.nn.functional.linear, (normal(16, 8), normal(12, 8)))
    report = check_recipe(linear, recipe).shrink(outdir=tmp_path)
    assert report.what == "torch.nn.functional.linear, split over 2 ranks: different"
    assert "compute = torch.nn.functional.linear" in text(report)


def test_a_tensor_passed_twice_stays_one() -> None:
    x = normal(3, 3)
    first, second = graph_call(call(torch.matmul, x, x)).args
    assert first == second
    assert graph_call(call(torch.matmul, x, x.clone())).args[1] != first


def test_a_wrong_result_does_not_become_a_wrong_gradient(tmp_path) -> None:
    (failed,) = recall_failed(product({"idx": 0, "dim": 1}, annotation=K_IS_NOT_SUMMED))
    assert {role for _, role in failed.kinds} == {"result", "gradient"}
    wanted = {(aspect, role) for aspect, role in failed.kinds if role == "gradient"}
    with pytest.raises(NothingFailsError, match="checked again, it is not wrong in the same way"):
        shrink_splits([dataclasses.replace(failed, kinds=frozenset(wanted))], tmp_path)


# --- what is refused ------------------------------------------------------------------------------


def test_an_operator_that_no_script_could_import_is_refused() -> None:
    verdict = check_recipe(call(lambda x: x - x.mean(), normal(4, 2), name="mine"), ROWS)
    with pytest.raises(UsageError, match=r"mine exists only in memory.*top level of a module"):
        verdict.shrink()


def test_a_mesh_of_ranks_is_refused() -> None:
    both = (ROWS, Recipe(((0, Shard(1)),), (Shard(1),)))
    verdict = check_recipe(call(centred, normal(4, 4)), both, (2, 2))
    with pytest.raises(UsageError, match=r"a mesh of \(2, 2\) ranks.*check the axes one by one"):
        verdict.shrink()


def test_a_statement_that_is_not_an_import_is_refused() -> None:
    verdict = check_recipe(call(centred, normal(4, 4)), ROWS)
    with pytest.raises(UsageError, match=r"setup 'x = 1': only imports are supported"):
        verdict.shrink(setup=["x = 1"])


def test_a_split_that_only_could_not_be_checked_is_nothing_to_shrink() -> None:
    verdict = product({"idx": 0, "dim": 1}, annotation="m k^, k^ n -> m n")
    with pytest.raises(UsageError, match=r"^nothing is certainly wrong \(the verdict is unver"):
        verdict.shrink()


def test_a_split_that_is_right_is_not_remembered() -> None:
    recipe = Recipe(((0, Shard(0)),), (Shard(0),))
    assert recall_failed(check_recipe(call(torch.relu, normal(4)), recipe)) == ()


def test_a_verdict_that_is_gone_keeps_no_tensor_alive() -> None:
    x = normal(4, 2)
    kept = weakref.ref(x)
    verdict = check_recipe(call(centred, x), Recipe(((0, Shard(0)),), (Replicate(),)))
    del x
    assert recall_failed(verdict)
    del verdict
    gc.collect()
    assert kept() is None
