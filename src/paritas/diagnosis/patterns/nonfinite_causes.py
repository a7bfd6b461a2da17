"""Conditions on an operator's inputs under which some way to compute it gives NaN or infinity."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from paritas.diagnosis.cases import Case

__all__ = ["Cause", "nan_causes"]

_ROWS = frozenset(
    """
    softmax _softmax log_softmax _log_softmax logsumexp scaled_dot_product_attention layer_norm
    native_layer_norm rms_norm normalize norm linalg_vector_norm var std mean sum nanmean
    cosine_similarity group_norm batch_norm
    """.split()  # noqa: SIM905  (quoted names are harder to read)
)
_EXPONENTIALS = frozenset(
    """
    softmax _softmax log_softmax _log_softmax logsumexp exp sigmoid silu softplus tanh cosh sinh
    logaddexp gelu mish log_sigmoid elu expm1 scaled_dot_product_attention
    """.split()  # noqa: SIM905
)
_ROOTS = {
    "sqrt": "the square root",
    "rsqrt": "the root",
    "pow": "a power",
    "log": "the logarithm",
    "log2": "the logarithm",
    "log10": "the logarithm",
    "log1p": "the logarithm",
    "xlogy": "the logarithm",
}
_LARGEST = (("float16", 65504.0), ("float32", 3.4e38), ("float64", 1.79e308))


@dataclasses.dataclass(frozen=True)
class Cause:
    """Where a condition holds, in the shape of the result.

    Attributes:
        name: in short, `0 * inf`.
        sentence: goes on after "NaN ".
        mask: where.
        is_specific: whether the operator is known to meet it, and not only the inputs.
    """

    name: str
    sentence: str
    mask: Tensor
    is_specific: bool


def nan_causes(case: Case) -> Iterator[Cause]:
    """All conditions that hold somewhere, the most telling first."""
    found = [*_of_pairs(case), *_of_elements(case), *_of_rows(case), *_of_sums(case)]
    for cause in sorted(found, key=lambda cause: not cause.is_specific):
        if bool(cause.mask.any()):
            yield cause


def _operator(case: Case) -> str:
    parts = case.context.operator.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _elementwise(case: Case) -> list[tuple[int, Tensor]]:
    """The inputs that can be laid over the result element by element."""
    found = []
    for place, tensor in enumerate(case.context.inputs):
        try:
            shape = torch.broadcast_shapes(tensor.shape, case.shape)
        except RuntimeError:
            continue
        if tuple(shape) == case.shape and not tensor.is_complex():
            found.append((place, tensor.detach().cpu().double().expand(case.shape)))
    return found


def _of_pairs(case: Case) -> Iterator[Cause]:
    inputs, name = _elementwise(case), _operator(case)
    for first, a in inputs:
        for second, b in inputs:
            if first == second:
                continue
            both = f"of inputs {first} and {second}"
            zero_inf = (a == 0) & torch.isinf(b)
            yield Cause("0 * inf", f"from 0 * inf {both}", zero_inf, name in {"mul", "where", ""})
            if first < second:
                infs = torch.isinf(a) & torch.isinf(b)
                known = name in {"add", "sub", "rsub"}
                yield Cause("inf - inf", f"from inf - inf {both}", infs, known)
                zeros = (a == 0) & (b == 0)
                yield Cause("0 / 0", f"from 0 / 0 {both}", zeros, name in {"div", "where"})


def _of_elements(case: Case) -> Iterator[Cause]:
    name = _operator(case)
    for place, x in _elementwise(case):
        yield Cause("NaN of an input", f"that came in with input {place}", torch.isnan(x), True)
        if name in _ROOTS:
            what = f"from {_ROOTS[name]} of negative numbers in input {place}"
            yield Cause("root or log of a negative", what, x < 0, True)
        if name in _EXPONENTIALS - _ROWS:
            yield from _too_large(f"input {place}", x)
        zero = f"where input {place} is 0: 0 / 0, 0 * inf or the logarithm of 0"
        yield Cause("zero", zero, x == 0, name in {"div", "log", "xlogy", "reciprocal", "rsqrt"})
        infinite = f"where input {place} is infinite: inf - inf or 0 * inf"
        yield Cause("inf - inf or 0 * inf", infinite, torch.isinf(x), False)
        negative = f"where input {place} is negative, as from its root or logarithm"
        yield Cause("negative", negative, x < 0, False)


def _too_large(what: str, x: Tensor) -> Iterator[Cause]:
    """exp(x) runs over, and inf / inf follows."""
    for name, largest in _LARGEST:
        limit = math.log(largest)
        mask = (x > limit) & torch.isfinite(x)
        text = f"from inf / inf: exp of {what} is too large for {name} (over {limit:.4g})"
        yield Cause("inf / inf", text, mask, True)
        twice = f"from inf / inf: exp of twice {what} is too large for {name}"
        yield Cause("inf / inf", twice, (2 * x.abs() > limit) & torch.isfinite(x), True)


def _of_rows(case: Case) -> Iterator[Cause]:
    """Conditions on a row of the first input as a whole."""
    name = _operator(case)
    if not case.context.inputs or name not in _ROWS:
        return
    x = case.context.inputs[0].detach().cpu()
    dim = case.context.arguments.get("dim", -1)
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if x.is_complex() or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        return
    x = x.double()
    rows = [
        ("-inf - -inf", "from -inf - -inf: all of the row is masked", torch.isneginf(x).all(dim)),
        ("0 / 0", "from 0 / 0: all of the row is 0", (x == 0).all(dim)),
        ("0 / 0", "from 0 / 0: all of the row is the same", x.amin(dim) == x.amax(dim)),
        ("inf - inf", "from inf - inf: infinity in the row", torch.isposinf(x).any(dim)),
        ("NaN of an input", "that came in with input 0", torch.isnan(x).any(dim)),
    ]
    if name in _EXPONENTIALS:
        large = _too_large("the row's largest", x.amax(dim))
        rows += [(cause.name, cause.sentence, cause.mask) for cause in large]
    for short, text, mask in rows:
        for shaped in (mask.unsqueeze(dim), mask):
            if _fits(shaped, case.shape):
                yield Cause(short, text, shaped.expand(case.shape), True)
                break


def _of_sums(case: Case) -> Iterator[Cause]:
    """0 * inf and inf - inf among the terms of a matrix product."""
    if _operator(case) not in {"mm", "bmm", "matmul"} or len(case.context.inputs) != 2:  # noqa: PLR2004
        return
    a, b = (tensor.detach().cpu().double() for tensor in case.context.inputs)
    if a.dim() < 2 or b.dim() < 2:  # noqa: PLR2004
        return
    zero = _any(torch.isinf(a), b == 0) | _any(a == 0, torch.isinf(b))
    above = _any(a == torch.inf, b > 0) | _any(a == -torch.inf, b < 0)
    above |= _any(a > 0, b == torch.inf) | _any(a < 0, b == -torch.inf)
    below = _any(a == torch.inf, b < 0) | _any(a == -torch.inf, b > 0)
    below |= _any(a < 0, b == torch.inf) | _any(a > 0, b == -torch.inf)
    if tuple(zero.shape) == case.shape:
        yield Cause("0 * inf", "from 0 * inf among the products that are summed", zero, True)
        yield Cause("inf - inf", "from inf - inf among the terms of a sum", above & below, True)


def _any(left: Tensor, right: Tensor) -> Tensor:
    return (left.float() @ right.float()) > 0


def _fits(mask: Tensor, shape: tuple[int, ...]) -> bool:
    try:
        return tuple(torch.broadcast_shapes(mask.shape, shape)) == shape
    except RuntimeError:
        return False
