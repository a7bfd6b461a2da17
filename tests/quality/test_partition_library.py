"""The library of annotations: what it claims is true, and what it does not claim is not.

Every option of every operator is checked, forward and backward, in float64, over 2 and 3 ranks; and
each dimension that a rule freezes is split all the same, which has to show.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.core.results.findings import Status
from paritas.sharding.operators import nnscaler_functions
from paritas.sharding.operators.annotation import Annotation, Option
from paritas.sharding.operators.library import annotation_for, known
from paritas.sharding.operators.recipe_checks import check_recipe
from quality import partition_samples, partition_samples_layout, partition_samples_lowered
from quality.partition_samples import Sample, call, mask, normal, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RIGHT = (Status.IDENTICAL, Status.EQUIVALENT)
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
# Named by the last part: the spellings of one operator are checked together.
OPERATORS = sorted({name.rpartition(".")[2] for name in known()})


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # torch says once per process that an index is not contiguous, or a mode is new.
        warnings.simplefilter("ignore")
        yield


@functools.cache
def samples() -> dict[str, list[Sample]]:
    families = (
        partition_samples.unary,
        partition_samples.binary,
        partition_samples.products,
        partition_samples.convolutions,
        partition_samples.norms,
        partition_samples.reductions,
        partition_samples_layout.shapes,
        partition_samples_layout.slicing,
        partition_samples_layout.indexing,
        partition_samples_layout.losses,
        partition_samples_layout.pooling,
        partition_samples_layout.attention,
        partition_samples_layout.nnscaler,
        partition_samples_lowered.lowered,
    )
    return {name: calls for family in families for name, calls in family().items()}


def samples_of(name: str) -> list[Sample]:
    return samples().get(name) or samples()[name.rpartition(".")[2]]


def function_of(name: str) -> Callable[..., Any]:
    if name.startswith("aten."):
        return getattr(torch.ops.aten, name.removeprefix("aten."))
    if name.startswith("nnscaler."):
        return getattr(nnscaler_functions, name.rpartition(".")[2])
    return functools.reduce(getattr, name.split(".")[1:], torch)


def calls_of(name: str) -> Iterator[tuple[OperatorCall, Annotation]]:
    for sample in samples_of(name):
        annotation = annotation_for(name, sample.args, sample.kwargs)
        assert annotation is not None, f"{name} has no annotation for a call of its own sample"
        function, still = function_of(name), sample.without_gradient
        yield OperatorCall(function, sample.args, sample.kwargs, name, still), annotation


def splits(
    operator: OperatorCall, annotation: Annotation, option: Option, ranks: int
) -> tuple[str, Status] | None:
    """What is found of an option; None if the sizes forbid it, which the annotation says itself."""
    try:
        recipe = annotation.recipe(operator, dataclasses.replace(option, num=ranks))
    except UsageError:
        return None
    verdict = check_recipe(operator, recipe, ranks)
    return f"{operator.name}: {recipe.words} over {ranks} ranks", verdict.status


def identifier(operator: OperatorCall, annotation: Annotation, option: Option) -> str:
    return annotation.recipe(operator, option).words.rpartition("split by ")[2]


def ranks_for(number: int, *, first: bool) -> tuple[int, ...]:
    """Over how many ranks an option is split: one spelling of an operator is as good as another.

    The first is checked at length, in the usual run over three ranks every second option.
    """
    return (2, 3) if first and (WHOLE or number % 2 == 0) else (2,)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_claim_is_true(operator: str) -> None:
    names = [name for name in known() if name.rpartition(".")[2] == operator]
    found = [
        result
        for name in names
        for sample, annotation in calls_of(name)
        for number, option in enumerate(annotation.options(sample))
        for ranks in ranks_for(number, first=name == names[0])
        if (result := splits(sample, annotation, option, ranks)) is not None
    ]

    assert found, f"no option of {names} was checked"
    assert [result for result in found if result[1] not in RIGHT] == []


FREEZING = [
    name
    for name in known()
    if name.startswith(("torch.nn.functional.", "torch.linalg."))
    or name in ("torch.cumsum", "torch.var", "torch.argmax", "torch.logsumexp", "torch.median")
]


@pytest.mark.usefixtures("undiagnosed")
def test_every_frozen_dimension_has_to_be() -> None:
    """Thawed, it is found to be wrong: a rule that froze too much would show here."""
    right, tried = [], 0
    for name in FREEZING if WHOLE else FREEZING[::2]:
        for sample, annotation in calls_of(name):
            thawed = Annotation.parse(annotation.text.replace("^", ""))
            claimed = {identifier(sample, annotation, o) for o in annotation.options(sample)}
            for option in thawed.options(sample):
                if identifier(sample, thawed, option) not in claimed:
                    result = splits(sample, thawed, option, 2)
                    tried += result is not None
                    right += [result] if result is not None and result[1] in RIGHT else []

    assert right == []
    assert tried > (200 if WHOLE else 80)


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("torch.nn.functional.mse_loss", call(normal(6, 4), normal(6, 4), reduction="median")),
        ("torch.nn.functional.mse_loss", call(normal(6, 4), normal(6, 4), size_average=True)),
        ("torch.nn.functional.mse_loss", call(normal(6, 4), normal(4))),
        ("torch.nn.functional.embedding", call(whole(0, 5, 6), normal(5, 4), max_norm=1.0)),
        ("torch.nn.functional.one_hot", call(whole(0, 5, 6))),
        ("torch.nn.functional.dropout", call(normal(6, 4), inplace=True)),
        ("torch.nn.functional.relu", call(normal(6, 4), inplace=True)),
        ("torch.squeeze", call(normal(6, 1), ())),
        (
            "torch.nn.functional.embedding_bag",
            call(whole(0, 5, 6), normal(5, 4), torch.tensor([0, 2])),
        ),
        ("torch.where", call(mask(6, 4))),
        ("torch.sum", call(normal(6, 4), weights=normal(4))),
        ("torch.scatter", call(normal(6, 5), 1, whole(0, 5, 6, 4), normal(6, 4), reduce="add")),
        ("torch.take_along_dim", call(normal(6, 5), whole(0, 5, 1, 4), 1)),
        ("torch.einsum", call("...i,i->...", normal(6, 4), normal(4))),
        ("torch.einsum", call("ii->i", normal(4, 4))),
        ("torch.ops.aten.var", call(normal(6, 4), 1)),
        ("torch.nonzero", call(mask(6, 4))),
    ],
)
def test_nothing_is_claimed_of_a_call_that_a_rule_does_not_know(name: str, sample: Sample) -> None:
    assert annotation_for(name, sample.args, sample.kwargs) is None


@pytest.mark.parametrize("way", ["weight", "ignore_index"])
def test_a_mean_in_which_targets_count_differently_is_not_split(way: str) -> None:
    target = torch.tensor([0, 3, 2, 1, 2, 2])
    kwargs = {"weight": torch.rand(4) + 0.5} if way == "weight" else {"ignore_index": 2}

    annotation = annotation_for("torch.nn.functional.cross_entropy", (normal(6, 4), target), kwargs)

    assert annotation is not None
    operator = OperatorCall(torch.nn.functional.cross_entropy, (normal(6, 4), target), kwargs)
    assert annotation.options(operator) == []
