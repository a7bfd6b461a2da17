"""The right operator on the wrong operands: exchanged, or one of them transposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.operations import Operation, first_variant, operation_of
from paritas.diagnosis.patterns.weighing import beyond_noise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

_PAIRS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "sub": ("b - a in place of a - b", torch.sub),
    "div": ("b / a in place of a / b", torch.div),
    "true_divide": ("b / a in place of a / b", torch.div),
    "floor_divide": ("b // a in place of a // b", torch.floor_divide),
    "remainder": ("b % a in place of a % b", torch.remainder),
    "fmod": ("fmod(b, a) in place of fmod(a, b)", torch.fmod),
    "pow": ("b ** a in place of a ** b", torch.pow),
    "atan2": ("atan2(b, a) in place of atan2(a, b)", torch.atan2),
    "lt": ("b < a in place of a < b", torch.lt),
    "le": ("b <= a in place of a <= b", torch.le),
    "gt": ("b > a in place of a > b", torch.gt),
    "ge": ("b >= a in place of a >= b", torch.ge),
}
_PRODUCTS = frozenset({"mm", "bmm", "matmul", "dot", "linear", "addmm", "baddbmm"})
_JOINED = frozenset({"cat", "concat", "concatenate", "stack"})


def propose(case: Case) -> list[Pattern]:
    """What the operator gives if its operands are exchanged or transposed, if that is it."""
    operation = operation_of(case, inputs=2)
    if operation is None or not beyond_noise(case):
        return []
    return first_variant(case, operation, "swapped operands", *_variants(operation))


_Variants = tuple["Callable[[], Tensor] | None", "list[tuple[str, Callable[[], Tensor]]]"]


def _variants(operation: Operation) -> _Variants:
    """The plain formula, and what else it may have been."""
    name, inputs = operation.name, operation.inputs
    if name in _PAIRS and len(inputs) == 2:  # noqa: PLR2004
        text, compute = _PAIRS[name]
        a, b = inputs
        said = f"the operands are exchanged: {text}"
        return lambda: compute(a, b), [(said, lambda: compute(b, a))]
    if name == "where" and len(inputs) == 3:  # noqa: PLR2004
        test, a, b = inputs
        said = "the branches of where() are exchanged, or its condition is negated"
        return lambda: torch.where(test.bool(), a, b), [
            (said, lambda: torch.where(test.bool(), b, a))
        ]
    if name in _PRODUCTS:
        return _products(operation)
    if name in _JOINED:
        join: Any = torch.stack if name == "stack" else torch.cat
        dim = operation.argument("dim", 1, 0)
        said = "the tensors are joined in the reverse order"
        return lambda: join(list(inputs), dim=dim), [
            (said, lambda: join(list(inputs)[::-1], dim=dim))
        ]
    return None, []


def _products(operation: Operation) -> _Variants:
    inputs = operation.inputs
    added: Tensor | None = None
    if operation.name in ("addmm", "baddbmm"):
        if len(inputs) < 3:  # noqa: PLR2004
            return None, []
        added, a, b = inputs[:3]
    else:
        a, b = inputs[:2]
        if operation.name == "linear":
            b = b.mT
            added = inputs[2] if len(inputs) > 2 else None  # noqa: PLR2004

    def sum_of(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            product = torch.matmul(left, right)
            return product if added is None else product + added

        return compute

    return sum_of(a, b), [(text, sum_of(*pair)) for text, pair in _other_products(a, b)]


def _other_products(a: Tensor, b: Tensor) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    if min(a.dim(), b.dim()) < 2:  # noqa: PLR2004
        return
    yield "the second factor is transposed: a @ b.T in place of a @ b", (a, b.mT)
    yield "the first factor is transposed: a.T @ b in place of a @ b", (a.mT, b)
    yield "the factors are exchanged: b @ a in place of a @ b", (b, a)
    yield "both factors are transposed: a.T @ b.T in place of a @ b", (a.mT, b.mT)
    yield "the product is transposed: b.T @ a.T in place of a @ b", (b.mT, a.mT)
