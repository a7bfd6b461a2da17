from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.core.operators.calls import OperatorCall
from paritas.sharding.operators import library
from paritas.sharding.operators.library import (
    annotated,
    annotation_for,
    known,
    register,
    unregister,
)
from paritas.sharding.operators.library.registry import name_of
from paritas.sharding.operators.recipe_checks import check_recipe

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = dict(library.registry._REGISTERED)
    yield
    library.registry._REGISTERED.clear()
    library.registry._REGISTERED.update(before)


def my_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def text_for(name: str, *args: object, **kwargs: object) -> str | None:
    annotation = annotation_for(name, args, kwargs)
    return None if annotation is None else annotation.text


def test_the_library_knows_many_operators() -> None:
    names = known()

    assert len({name.rpartition(".")[2] for name in names}) >= 300
    assert {"torch.add", "torch.nn.functional.linear", "torch.Tensor.view", "aten.addmm"} <= set(
        names
    )


@pytest.mark.parametrize(
    "spelling", ["aten.add", "aten::add", "aten::add.Tensor", "torch.ops.aten.add.Tensor"]
)
def test_the_spellings_of_an_aten_operator_are_one(spelling: str) -> None:
    assert text_for(spelling, torch.ones(2, 3), torch.ones(3)) == "a b, b -> a b"


def test_an_unknown_operator_has_no_annotation() -> None:
    assert annotation_for("my_package.unheard_of", (torch.ones(2),)) is None


def test_a_function_of_ones_own_is_annotated_by_a_decorator() -> None:
    same = annotated("m k+, k+ n -> m n")(my_matmul)
    args = torch.randn(4, 6), torch.randn(6, 2)

    annotation = annotation_for(my_matmul, args)

    assert same is my_matmul
    assert annotation is not None
    call = OperatorCall(my_matmul, args)
    for option in annotation.options(call):
        assert check_recipe(call, annotation.recipe(call, option)).passed


def test_an_annotation_can_be_a_function_of_the_arguments() -> None:
    def rule(x: torch.Tensor, dim: int = 0) -> str | None:
        return {0: "a^ b -> a^ b", 1: "a b^ -> a b^"}.get(dim)

    register("mine.norm", rule)

    assert text_for("mine.norm", torch.ones(2, 3), dim=1) == "a b^ -> a b^"
    assert text_for("mine.norm", torch.ones(2, 3), dim=2) is None


def test_a_second_annotation_is_refused_unless_it_is_meant() -> None:
    register("mine.op", "a -> a")

    with pytest.raises(UsageError, match="already has an annotation"):
        register("mine.op", "a^ -> a^")
    with pytest.raises(UsageError, match="already has an annotation"):
        register("torch.add", "a^, a^ -> a^")
    register("mine.op", "a^ -> a^", overwrite=True)

    assert text_for("mine.op", torch.ones(2)) == "a^ -> a^"


def test_a_registered_annotation_overrides_the_library_until_it_is_removed() -> None:
    register("torch.relu", "a^ b^ -> a^ b^", overwrite=True)
    assert text_for("torch.relu", torch.ones(2, 3)) == "a^ b^ -> a^ b^"

    unregister("torch.relu")

    assert text_for("torch.relu", torch.ones(2, 3)) == "a b -> a b"
    with pytest.raises(UsageError, match=r"nothing is registered for torch\.relu"):
        unregister("torch.relu")


def test_an_invalid_annotation_is_refused_when_it_is_registered() -> None:
    with pytest.raises(UsageError):
        register("mine.op", "m k+ n")
    with pytest.raises(UsageError, match=r"the annotation of mine\.op must be a string"):
        register("mine.op", 3)  # type: ignore[arg-type]
    assert "mine.op" not in known()


def test_a_function_is_known_by_its_module_and_name() -> None:
    assert name_of(my_matmul) == f"{__name__}.my_matmul"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.nn.functional.linear, "torch.nn.functional.linear"),
        (torch.Tensor.view, "torch.Tensor.view"),
        (torch.nn.functional.max_pool2d, "torch.nn.functional.max_pool2d"),
        (torch.ops.aten.add.Tensor, "aten.add"),
        (torch.ops.aten.add, "aten.add"),
    ],
)
def test_a_function_of_torch_is_known_by_where_people_find_it(function: object, name: str) -> None:
    assert name_of(function) == name  # type: ignore[arg-type]
