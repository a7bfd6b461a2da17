"""Reductions over one element too few, or divided by one too many."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from paritas.diagnosis.patterns.hypotheses import stated
from paritas.diagnosis.patterns.operations import Operation, attempted, operation_of, trusted
from paritas.diagnosis.patterns.weighing import beyond_noise

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paritas.diagnosis.cases import Case
    from paritas.numerics.diagnoses import Pattern

__all__ = ["propose"]

_LAST, _FIRST = "the last element is left out", "the first element is left out"
_PLAIN: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "sum": lambda x, dims: x.sum(dims),
    "mean": lambda x, dims: x.mean(dims),
    "amax": lambda x, dims: x.amax(dims),
    "max": lambda x, dims: x.amax(dims),
    "amin": lambda x, dims: x.amin(dims),
    "min": lambda x, dims: x.amin(dims),
    "logsumexp": lambda x, dims: x.logsumexp(dims),
    "norm": lambda x, dims: x.square().sum(dims).sqrt(),
    "linalg_vector_norm": lambda x, dims: x.square().sum(dims).sqrt(),
}
_SPREADS = frozenset({"var", "std"})


def propose(case: Case) -> list[Pattern]:
    """Off by one along the reduced dimensions, by computing the operator so."""
    operation = operation_of(case)
    if operation is None or not beyond_noise(case) or not operation.dims:
        return []
    plain, variants = _variants(operation)
    if plain is None or trusted(case, lambda: operation.shaped(plain(), case.shape)) is None:
        return []
    for sentence, compute in variants:
        value = attempted(partial(_shaped, operation, compute, case.shape))
        if value is None:
            continue
        length = math.prod(operation.inputs[0].shape[one] for one in operation.dims)
        pattern = stated(
            case,
            value,
            "off by one reduction",
            sentence,
            cost=math.log2(1 + len(variants)),
            evidence={"operator": operation.context.operator, "length": length},
        )
        if pattern is not None:
            return [pattern]
    return []


_Variants = tuple["Callable[[], Tensor] | None", "list[tuple[str, Callable[[], Tensor]]]"]


def _variants(operation: Operation) -> _Variants:
    x, name, dims = operation.inputs[0], operation.name, operation.dims
    if not x.is_floating_point() or not x.numel():
        return None, []
    if name in _PLAIN:
        reduce = _PLAIN[name]
        found = _dropped(x, dims, reduce)
        if name == "mean":
            found += _divided(x, dims)
        return lambda: reduce(x, dims), found
    if name in _SPREADS:
        return _spreads(operation, x, dims)
    if name in ("softmax", "log_softmax") and len(dims) == 1:
        return _softmax(x, dims[0], is_log=name == "log_softmax")
    if name in ("cumsum", "cumprod") and len(dims) == 1:
        return _running(x, dims[0], is_sum=name == "cumsum")
    return None, []


def _shaped(
    operation: Operation, compute: Callable[[], Tensor], shape: tuple[int, ...]
) -> Tensor | None:
    return operation.shaped(compute(), shape)


def _quotient(x: Tensor, dims: tuple[int, ...], count: int) -> Tensor:
    return x.sum(dims) / count


def _cut(x: Tensor, dim: int, *, last: bool) -> Tensor:
    return x.narrow(dim, 0 if last else 1, x.shape[dim] - 1)


def _dropped(
    x: Tensor, dims: tuple[int, ...], reduce: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> list[tuple[str, Callable[[], Tensor]]]:
    found: list[tuple[str, Callable[[], Tensor]]] = []
    for dim in dims:
        if x.shape[dim] < 2:  # noqa: PLR2004
            continue
        for last, text in ((True, _LAST), (False, _FIRST)):
            kept = _cut(x, dim, last=last)
            said = f"{text} of the {x.shape[dim]} along dim {dim}"
            found.append((said, partial(reduce, kept, dims)))
    return found


def _divided(x: Tensor, dims: tuple[int, ...]) -> list[tuple[str, Callable[[], Tensor]]]:
    """A mean whose count is off by one, or whose sum is while the count is not."""
    length = math.prod(x.shape[one] for one in dims)
    found: list[tuple[str, Callable[[], Tensor]]] = []
    for count in (length - 1, length + 1):
        if count > 0:
            said = f"the mean of {length} elements is divided by {count}"
            found.append((said, partial(_quotient, x, dims, count)))
    for dim in dims:
        for last, text in ((True, _LAST), (False, _FIRST)):
            kept = _cut(x, dim, last=last)
            said = f"{text} of the sum along dim {dim}, which is still divided by {length}"
            found.append((said, partial(_quotient, kept, dims, length)))
    return found


def _spreads(operation: Operation, x: Tensor, dims: tuple[int, ...]) -> _Variants:
    length = math.prod(x.shape[one] for one in dims)
    correction = operation.argument("correction", 2, None)
    unbiased = operation.argument("unbiased", 2, True)
    taken = correction if isinstance(correction, int) else int(bool(unbiased))

    def spread(value: Tensor, less: int) -> Tensor:
        var = value.var(dims, correction=less)
        return var.sqrt() if operation.name == "std" else var

    found = [
        (
            f"the variance is divided by {length - less} in place of {length - taken}",
            partial(spread, x, less),
        )
        for less in (0, 1, 2)
        if less != taken and length > less
    ]
    dropped = _dropped(x, dims, lambda value, _: spread(value, taken))
    return lambda: spread(x, taken), [*found, *dropped]


def _softmax(x: Tensor, dim: int, *, is_log: bool) -> _Variants:
    def with_total(part: Tensor) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            value = x - part.logsumexp(dim, keepdim=True)
            return value if is_log else value.exp()

        return compute

    size = x.shape[dim]
    if size < 2:  # noqa: PLR2004
        return None, []
    return with_total(x), [
        (f"{text} of the {size} in the sum that softmax divides by", with_total(part))
        for text, part in ((_LAST, _cut(x, dim, last=True)), (_FIRST, _cut(x, dim, last=False)))
    ]


def _running(x: Tensor, dim: int, *, is_sum: bool) -> _Variants:
    def running(value: Tensor) -> Tensor:
        return value.cumsum(dim) if is_sum else value.cumprod(dim)

    start = torch.full_like(x.narrow(dim, 0, 1), 0.0 if is_sum else 1.0)
    before = torch.cat([start, _cut(x, dim, last=True)], dim)
    after = torch.cat([_cut(x, dim, last=False), start], dim)
    return lambda: running(x), [
        ("each sum leaves out its own element: exclusive, not inclusive", lambda: running(before)),
        ("each sum starts with the second element", lambda: running(after)),
    ]
