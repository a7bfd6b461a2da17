"""Wrong reductions: terms missing or counted twice, a count off by one, another eps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.case import Probe, first_supported, supported_pattern, unravel
from paritas.core.diagnosis.patterns.norms import NormMistake, norm_by_name
from paritas.core.diagnosis.patterns.operations import (
    Operation,
    Product,
    Variants,
    attempt,
    convolution_of,
    operation_of,
    product_of,
    trusted_formula,
)
from paritas.core.diagnosis.patterns.ranks import explain_by_parts
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.case import Case
    from paritas.core.diagnosis.patterns.norms import Norm
    from paritas.core.results.findings import Pattern


# --- Sums with missing terms or missing parts of ranks --------------------------------------------

_KIND = PatternKind.PARTIAL_SUM
# Elements for which the terms of a contraction are written out.
_WRITTEN_OUT = 64
_LONGEST = 1 << 14
_TILES = (8, 16, 32, 64, 128, 256)
_NEAR = 0.95


def propose_partial_sums(case: Case) -> list[Pattern]:
    """`partial sum` and `doubled reduction`, by the ranks' parts or by the terms of a sum."""
    if not case.is_beyond_noise or case.given.is_complex():
        return []
    return explain_by_parts(case) or _explain_by_terms(case)


# --- contractions -------------------------------------------------------------------------------


def _explain_by_terms(case: Case) -> list[Pattern]:
    operation = operation_of(case)
    if operation is None or not case.shape:
        return []
    sums = contraction_of(operation, case.shape)
    if sums is None or not 2 <= sums.length <= _LONGEST:  # noqa: PLR2004
        return []
    everything = torch.ones(sums.length, dtype=torch.bool)
    if trusted_formula(case, lambda: sums.product(everything, 1.0)) is None:
        return []
    return first_supported(
        itertools.chain(_twice(case, sums, everything), _without_some(case, sums))
    )


def _twice(case: Case, sums: Contraction, everything: Tensor) -> Iterator[Pattern | None]:
    """Twice the sum, with the added term once.

    Only where there are ranks can it be that they reduced a whole value. A factor of two on the
    input gives the same numbers.
    """
    if not sums.adds:
        return  # `scale` covers it
    kind, sentence = PatternKind.FACTOR, "the sum of products counts twice, the added term once"
    if case.context.world:
        kind, sentence = PatternKind.DOUBLED_REDUCTION, f"reduced twice: {sentence}"
    value = sums.product(everything, 2.0)
    yield supported_pattern(case, value, kind, sentence, cost=1.0, evidence={"times": 2.0})


def _without_some(case: Case, sums: Contraction) -> Iterator[Pattern | None]:
    probe = Probe(case)
    terms = attempt(lambda: sums.terms(probe.flat[:_WRITTEN_OUT]))
    if terms is None:
        return
    length = sums.length
    for missing, words in _missing_terms(case, probe, terms, length):
        yield supported_pattern(
            case,
            sums.product(~missing, 1.0),
            _KIND,
            f"{words} of the {length} terms of each sum are missing",
            cost=math.log2(length) + 2,
            evidence={"terms": length, "missing": int(missing.sum())},
        )


def _missing_terms(
    case: Case, probe: Probe, terms: Tensor, length: int
) -> list[tuple[Tensor, str]]:
    error = case.error.flatten()[probe.flat[:_WRITTEN_OUT]]
    allowed = MAX_Z * probe.noise[:_WRITTEN_OUT]
    running = torch.cat([torch.zeros(len(terms), 1, dtype=terms.dtype), terms.cumsum(dim=1)], dim=1)
    spans = [(stop, length) for stop in range(1, length)]
    spans += [(0, start) for start in range(1, length)]
    for tile in _TILES:
        spans += [(at, min(at + tile, length)) for at in range(tile, length - tile, tile)]
    starts, stops = (torch.tensor(side) for side in zip(*spans, strict=True))
    lost = running[:, stops] - running[:, starts]
    close_share = ((lost + error[:, None]).abs() <= allowed[:, None]).double().mean(dim=0)
    apart = (lost + error[:, None]).square().sum(dim=0)
    good = (close_share >= _NEAR).nonzero().flatten()
    best = good[apart[good].argsort()][:2].tolist()
    index = torch.arange(length)
    spans_found = []
    for start, stop in (spans[span_number] for span_number in best):
        words = f"terms {start} to {stop - 1}"
        if stop == length:
            words = f"the last {length - start}"
        elif start == 0:
            words = f"the first {stop}"
        spans_found.append(((index >= start) & (index < stop), words))
    return spans_found


# --- A sum of products as separate terms ----------------------------------------------------------

# A convolution is computed once for each of its channels.
_MOST_CHANNELS = 128
_MOST_WORK = 1 << 28


def contraction_of(operation: Operation, shape: tuple[int, ...]) -> Contraction | None:
    """The operator as a contraction, if it is one."""
    inputs, name = operation.inputs, operation.name
    product = product_of(operation)
    if product is not None:
        flat = name != "linear" and min(product.left.dim(), product.right.dim()) < 2  # noqa: PLR2004
        return None if flat or not product.left.dim() else _contract_product(product, shape)
    if name == "sum" and len(operation.dims) == 1 and inputs[0].is_floating_point():
        x = inputs[0].movedim(operation.dims[0], -1)
        ones = torch.ones(x.shape[-1], 1, dtype=x.dtype)
        return _contract_product(Product(x, ones, None), shape)
    return _contract_channels(operation, shape)


@dataclasses.dataclass(frozen=True)
class Contraction:
    """Sums of products, with an optional added term.

    Attributes:
        length: number of terms of each sum; for a convolution, number of channels.
        adds: whether something else is added, such as a bias.
        product: the result with only some of the terms, multiplied by a number.
        terms: the terms of some elements of the flattened result, one row each.
    """

    length: int
    adds: bool
    product: Callable[[Tensor, float], Tensor]
    terms: Callable[[Tensor], Tensor]


def _contract_product(factors: Product, shape: tuple[int, ...]) -> Contraction:
    """A matrix product as a sum over the inner dimension."""
    left, right, added = factors.left, factors.right, factors.added

    def product(chosen: Tensor, times: float) -> Tensor:
        value = (left[..., chosen] @ right[..., chosen, :]).reshape(shape) * times
        return value if added is None else value + added

    def terms(places: Tensor) -> Tensor:
        lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        rows = left.shape[-2] if left.dim() > 1 else 1
        at = unravel(places, (*lead, rows, right.shape[-1]))
        a = left.expand(*lead, rows, left.shape[-1])[at[:-1]]
        b = right.expand(*lead, *right.shape[-2:]).mT[(*at[:-2], at[-1])]
        return a * b

    return Contraction(left.shape[-1], added is not None, product, terms)


def _contract_channels(operation: Operation, shape: tuple[int, ...]) -> Contraction | None:
    """A convolution as a sum over the input channels."""
    convolve = convolution_of(operation)
    if convolve is None or operation.context.arguments.get("groups", 1) != 1:
        return None
    x, weight, *rest = operation.inputs
    channels, bias = weight.shape[1], rest[0] if rest else None
    work = math.prod(shape) * weight.numel() // max(1, weight.shape[0])
    if channels > _MOST_CHANNELS or work > _MOST_WORK:
        return None

    def product(chosen: Tensor, times: float) -> Tensor:
        value = convolve(x[:, chosen], weight[:, chosen]) * times
        return value if bias is None else value + bias.view(1, -1, *(1,) * (value.dim() - 2))

    def terms(places: Tensor) -> Tensor:
        parts = [convolve(x[:, [each]], weight[:, [each]]) for each in range(channels)]
        return torch.stack([part.flatten()[places] for part in parts], dim=1)

    return Contraction(channels, bias is not None, product, terms)


# --- Reductions off by one ------------------------------------------------------------------------

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


def propose_reductions(case: Case) -> list[Pattern]:
    """`off by one reduction`: the operator computed with one element more or less."""
    operation = operation_of(case)
    if operation is None or not case.is_beyond_noise or not operation.dims:
        return []
    plain, variants = _reduction_variants(operation)
    if plain is None:
        return []
    if trusted_formula(case, lambda: operation.shape_result(plain(), case.shape)) is None:
        return []
    length = math.prod(operation.inputs[0].shape[dim] for dim in operation.dims)
    values = (
        (sentence, attempt(partial(_compute_shaped, operation, compute, case.shape)))
        for sentence, compute in variants
    )
    return first_supported(
        supported_pattern(
            case,
            value,
            PatternKind.OFF_BY_ONE,
            sentence,
            cost=math.log2(1 + len(variants)),
            evidence={"operator": operation.context.operator, "length": length},
        )
        for sentence, value in values
        if value is not None
    )


def _reduction_variants(operation: Operation) -> Variants:
    x, name, dims = operation.inputs[0], operation.name, operation.dims
    if not x.is_floating_point() or not x.numel():
        return None, []
    if name in _PLAIN:
        reduce = _PLAIN[name]
        variants = _drop_end_elements(x, dims, reduce)
        if name == "mean":
            variants += _divide_by_wrong_count(x, dims)
        return lambda: reduce(x, dims), variants
    if name in _SPREADS:
        return _spread_variants(operation, x, dims)
    if name in step_names("softmaxes") and len(dims) == 1:
        return _softmax_variants(x, dims[0], is_log=name == "log_softmax")
    if name in ("cumsum", "cumprod") and len(dims) == 1:
        return _running_variants(x, dims[0], is_sum=name == "cumsum")
    return None, []


def _compute_shaped(
    operation: Operation, compute: Callable[[], Tensor], shape: tuple[int, ...]
) -> Tensor | None:
    return operation.shape_result(compute(), shape)


def _quotient(x: Tensor, dims: tuple[int, ...], count: int) -> Tensor:
    return x.sum(dims) / count


def _drop_end(x: Tensor, dim: int, *, last: bool) -> Tensor:
    return x.narrow(dim, 0 if last else 1, x.shape[dim] - 1)


def _drop_end_elements(
    x: Tensor, dims: tuple[int, ...], reduce: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> list[tuple[str, Callable[[], Tensor]]]:
    variants: list[tuple[str, Callable[[], Tensor]]] = []
    for dim in dims:
        if x.shape[dim] < 2:  # noqa: PLR2004
            continue
        for last, text in ((True, _LAST), (False, _FIRST)):
            drop_end = _drop_end(x, dim, last=last)
            sentence = f"{text} of the {x.shape[dim]} along dim {dim}"
            variants.append((sentence, partial(reduce, drop_end, dims)))
    return variants


def _divide_by_wrong_count(
    x: Tensor, dims: tuple[int, ...]
) -> list[tuple[str, Callable[[], Tensor]]]:
    """A mean with a count, or only a sum, that is off by one."""
    length = math.prod(x.shape[dim_number] for dim_number in dims)
    variants: list[tuple[str, Callable[[], Tensor]]] = []
    for count in (length - 1, length + 1):
        if count > 0:
            sentence = f"the mean of {length} elements is divided by {count}"
            variants.append((sentence, partial(_quotient, x, dims, count)))
    for dim in dims:
        for last, text in ((True, _LAST), (False, _FIRST)):
            drop_end = _drop_end(x, dim, last=last)
            sentence = f"{text} of the sum along dim {dim}, which is still divided by {length}"
            variants.append((sentence, partial(_quotient, drop_end, dims, length)))
    return variants


def _spread_variants(operation: Operation, x: Tensor, dims: tuple[int, ...]) -> Variants:
    length = math.prod(x.shape[dim] for dim in dims)
    correction = operation.argument("correction", 2, None)
    unbiased = operation.argument("unbiased", 2, True)
    taken = correction if isinstance(correction, int) else int(bool(unbiased))

    def spread(value: Tensor, less: int) -> Tensor:
        var = value.var(dims, correction=less)
        return var.sqrt() if operation.name == "std" else var

    variants = [
        (
            f"the variance is divided by {length - less} instead of {length - taken}",
            partial(spread, x, less),
        )
        for less in (0, 1, 2)
        if less != taken and length > less
    ]
    dropped = _drop_end_elements(x, dims, lambda value, _: spread(value, taken))
    return lambda: spread(x, taken), [*variants, *dropped]


def _softmax_variants(x: Tensor, dim: int, *, is_log: bool) -> Variants:
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
        for text, part in (
            (_LAST, _drop_end(x, dim, last=True)),
            (_FIRST, _drop_end(x, dim, last=False)),
        )
    ]


def _running_variants(x: Tensor, dim: int, *, is_sum: bool) -> Variants:
    def running(value: Tensor) -> Tensor:
        return value.cumsum(dim) if is_sum else value.cumprod(dim)

    start = torch.full_like(x.narrow(dim, 0, 1), 0.0 if is_sum else 1.0)
    before = torch.cat([start, _drop_end(x, dim, last=True)], dim)
    after = torch.cat([_drop_end(x, dim, last=False), start], dim)
    return lambda: running(x), [
        ("each sum leaves out its own element: exclusive, not inclusive", lambda: running(before)),
        ("each sum starts with the second element", lambda: running(after)),
    ]


# --- Normalisations -------------------------------------------------------------------------------

_USUAL = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
# A larger number is no eps.
_LARGEST_EPS = 0.1
_USUAL_EPS = 1e-5
_RMS = ("rms_norm", "fused_rms_norm")


def propose_norms(case: Case) -> list[Pattern]:
    """`eps` and `off by one reduction`: another eps, eps outside the root, n - 1 for n."""
    operation = operation_of(case)
    if operation is None or not case.is_beyond_noise or not case.shape:
        return []
    norm = _norm_of(operation)
    if norm is None or trusted_formula(case, norm.value) is None:
        return []
    evidence: dict[str, float | str] = {"operator": operation.context.operator, "eps": norm.eps}
    return first_supported(
        supported_pattern(case, norm.value(mistake), kind, text, cost=cost, evidence=evidence)
        for kind, text, mistake, cost in _norm_mistakes(case, norm)
    )


def _norm_of(operation: Operation) -> Norm | None:
    """A norm of its own statistics: others, as of a batch norm in evaluation, are not known."""
    name, (x, *parameters) = operation.name, operation.inputs
    if not x.is_floating_point():
        return None
    values: dict[str, Any] = {"input": x, "training": True}
    if name in ("batch_norm", "native_batch_norm"):
        arguments = operation.context.arguments
        eps = arguments.get("eps", _USUAL_EPS)
        if arguments.get("training") is not True or x.dim() < 2 or not isinstance(eps, float):  # noqa: PLR2004
            return None
    elif name in ("layer_norm", "native_layer_norm", *_RMS):
        shape = operation.argument("normalized_shape", 1, None)
        count = len(shape) if isinstance(shape, list | tuple) else 0
        count = count or (parameters[0].dim() if parameters else 1)
        is_rms = name in _RMS
        usual = torch.finfo(operation.context.inputs[0].dtype).eps if is_rms else _USUAL_EPS
        eps = operation.argument("eps", 3 if is_rms else 4, usual)
        if not count or isinstance(eps, bool) or not isinstance(eps, float | int):
            return None
        values["normalized_shape"] = range(count)
        parameters = parameters[:1] if is_rms else parameters
    else:
        return None
    values |= dict(zip(("weight", "bias"), parameters, strict=False))
    return norm_by_name(name, {**values, "eps": float(eps)})


def _norm_mistakes(case: Case, norm: Norm) -> Iterator[tuple[PatternKind, str, NormMistake, float]]:
    """The kinds and the words, and the bits of the choice among them."""
    bits, off = math.log2(len(_USUAL) + 6), PatternKind.OFF_BY_ONE
    for other in _USUAL:
        if not math.isclose(other, norm.eps):
            text = f"eps is {other:g} instead of {norm.eps:g}" if other else "eps is left out"
            yield PatternKind.EPS, text, NormMistake(eps=other), bits
    text = f"eps ({norm.eps:g}) is added to the deviation, not to the variance"
    yield PatternKind.EPS, text, NormMistake(outside=True), bits
    if norm.length > 1:
        text = f"the variance is divided by {norm.length - 1} instead of {norm.length}"
        yield off, text, NormMistake(correction=1), bits
        size = norm.view[norm.dims[-1]]
        for which in ("last", "first") if size > 1 else ():
            text = f"the {which} of the {size} elements is left out of mean and variance"
            mistake = NormMistake(less=1) if which == "last" else NormMistake(first=1)
            yield off, text, mistake, bits
    estimate = _estimate_eps(case, norm)
    if estimate is not None:
        text = f"eps is about {estimate:.3g} instead of {norm.eps:g}"
        yield PatternKind.EPS, text, NormMistake(eps=estimate), bits + 10


def _estimate_eps(case: Case, norm: Norm) -> float | None:
    """An estimate of the candidate's eps from the rows where it matters most."""
    plain = norm.value(NormMistake(eps=0.0)) - norm.bias
    candidate = case.given - norm.bias
    usable = (plain.abs() > 0) & (candidate.abs() > 0) & case.wrong & torch.isfinite(candidate)
    if not bool(usable.any()):
        return None
    mean = norm.x.mean(norm.dims, keepdim=True) if norm.centred else torch.zeros(())
    var = (norm.x - mean).square().mean(norm.dims, keepdim=True).expand_as(norm.x)
    ratio = (plain[usable] / candidate[usable]).square() - 1
    estimates = ratio * var[usable]
    middle = float(estimates.median())
    return middle if 0 < middle <= _LARGEST_EPS else None
