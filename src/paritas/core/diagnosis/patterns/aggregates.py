"""Reductions and norms of lines as other ones, by a small grammar.

A reduction is a function of each element, something that makes one number of a line, and a function
of that number; a softmax or a norm divides each element by such a number; a similarity is a sum
over two lines, divided by one. The reference's own form is looked for in the same grammar: what the
candidate's form has in another place is the mistake.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import widen
from paritas.core.diagnosis.patterns.expressions import Sample
from paritas.core.diagnosis.patterns.steps import first_of
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.case import Case

    Parts = Mapping[str, Callable[..., Tensor]]
    Shapes = tuple[tuple[int, ...], ...]

# Of more numbers, every form is computed on some lines only, and of still more on none.
_ALL_LINES = 1 << 11
_MOST_ELEMENTS = 1 << 21
_MOST_RANK = 4
# So many forms are tried with the judge's evidence.
_MOST_TRIED = 8
# How near the reference's own form must be, as a share of the values.
_SAME = 1e-5
# With fewer results, only one part of the form may differ.
_FEW_RESULTS = 8


# --- What the candidate has in another place ------------------------------------------------------


def aggregate_variations(
    case: Case, operands: Sequence[Tensor]
) -> tuple[int, list[tuple[int, int, Variation]]]:
    """How many forms were tried, and those that give the candidate, the nearest to the right one.

    With each how many parts differ, and that no number was solved for.

    Args:
        operands: the floating-point tensors that the value is computed of.
    """
    tensors = [operand for operand in operands if operand.numel() > 1]
    if not 1 <= len(tensors) <= 2 or sum(tensor.numel() for tensor in tensors) > _MOST_ELEMENTS:  # noqa: PLR2004
        return 0, []
    if not bool(case.both_finite.all()) or not case.is_beyond_noise or case.is_exact:
        return 0, []
    try:
        wide = torch.broadcast_tensors(*map(widen, tensors))
    except RuntimeError:
        return 0, []
    tried = 0
    for lines in _layouts(tuple(wide[0].shape), case.shape, pairs=len(wide) > 1):
        search = _all_forms(lines, wide, case)
        tried += len(search.forms)
        if search.own is not None:
            return tried, _differing(search, search.own, lines, tensors)
    return tried, []


@dataclasses.dataclass(frozen=True)
class Lines:
    """How operands are laid out as lines, and a result in the reference's shape."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    keeps: bool

    def of(self, x: Tensor) -> Tensor:
        """All lines of a tensor."""
        x = x.movedim(self.dims, tuple(range(-len(self.dims), 0)))
        return x.reshape(-1, math.prod(self.shape[dim] for dim in self.dims))

    def back(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A result in its shape."""
        if not self.keeps:
            return value.reshape(shape)
        rest = [size for axis, size in enumerate(self.shape) if axis not in self.dims]
        moved = value.reshape(*rest, *(self.shape[dim] for dim in self.dims))
        return moved.movedim(tuple(range(-len(self.dims), 0)), self.dims)


def _layouts(shape: tuple[int, ...], result: tuple[int, ...], *, pairs: bool) -> Iterator[Lines]:
    """The axes that the lines may be along, by the shape of the result; the last axis first."""
    rank = len(shape)
    if rank > _MOST_RANK or not rank:
        return
    if shape == result:
        for axis in reversed(range(rank)):
            if shape[axis] > 1 and not pairs:
                yield Lines(shape, (axis,), keeps=True)
        return
    for count in range(1, rank + 1):
        for dims in itertools.combinations(reversed(range(rank)), count):
            rest = tuple(size for axis, size in enumerate(shape) if axis not in dims)
            shape_kept = tuple(1 if axis in dims else size for axis, size in enumerate(shape))
            if result in (rest, shape_kept) and math.prod(shape[dim] for dim in dims) > 1:
                yield Lines(shape, tuple(sorted(dims)), keeps=False)


@dataclasses.dataclass(frozen=True)
class _Search:
    """All forms of some lines, and the values that these lines have.

    Attributes:
        own: the reference's own form.
    """

    forms: list[Form]
    values: Tensor
    sample: Sample
    own: Form | None


def _all_forms(lines: Lines, wide: Sequence[Tensor], case: Case) -> _Search:
    laid = [lines.of(tensor) for tensor in wide]
    step = max(1, -(-laid[0].numel() // _ALL_LINES))
    some = [tensor[::step] for tensor in laid]
    if len(some) > 1:
        forms_found = _similarities(some[0], some[1])
    elif lines.keeps:
        forms_found = itertools.chain(_quotients(some[0]), _chains(some[0], _RUNNING))
    else:
        forms_found = _reductions(some[0])
    right, candidate, noise = (
        (lines.of(tensor) if lines.keeps else tensor.flatten())[::step].flatten()
        for tensor in (case.right, case.given, case.allowed)
    )
    forms, values = [], []
    for form, value in forms_found:
        if step == 1 or form.parts[1] not in _OF_OTHERS:
            forms.append(form)
            values.append(value.flatten())
    stacked = torch.stack(values)
    limit = _SAME * right.abs().max()
    first = stacked[:, : max(1, len(right) // 8)]
    # Most forms are another value in their first elements.
    near = ((first - right[: first.shape[1]]).abs().amax(-1) <= limit).nonzero().flatten()
    fits = near[(stacked[near] - right).abs().amax(-1) <= limit].tolist()
    own_form = min((forms[fit] for fit in fits), key=_simplicity, default=None)
    return _Search(forms, stacked, Sample(candidate, noise), own_form)


def _simplicity(form: Form) -> int:
    return sum(map(len, form.parts))


def _differing(
    search: _Search, right: Form, lines: Lines, tensors: Sequence[Tensor]
) -> list[tuple[int, int, Variation]]:
    is_few = len(search.sample.given.unique()) < _FEW_RESULTS
    variations = []
    for position in search.sample.fits(search.values).nonzero().flatten().tolist():
        form = search.forms[position]
        differ = sum(part != other for part, other in zip(form.parts, right.parts, strict=True))
        if differ and not (is_few and differ > 1):
            sentence = f"{form.said} instead of {right.said}"
            change = _Change(lines, tuple(tensors), form)
            variations.append(
                (differ, _simplicity(form), Variation(_kind(form, right), sentence, change))
            )
    variations.sort(key=lambda variation: variation[:2])
    if variations or is_few:
        return [(differ, 0, variation) for differ, _, variation in variations[:_MOST_TRIED]]
    return _find_scaled_forms(search, right, lines, tensors)


# A factor that was solved for must be so short.
_DIGITS = (1, 2)


def _find_scaled_forms(
    search: _Search, right: Form, lines: Lines, tensors: Sequence[Tensor]
) -> list[tuple[int, int, Variation]]:
    """Forms with one part that differs, and a short factor."""
    values, sampled_values = search.values.nan_to_num(0.0, 0.0, 0.0), search.sample.given
    factors = (values * sampled_values).sum(-1) / values.square().sum(-1)
    variations = []
    for position in search.sample.fits(factors[:, None] * values).nonzero().flatten().tolist():
        form, factor = search.forms[position], float(factors[position])
        differ = sum(part != other for part, other in zip(form.parts, right.parts, strict=True))
        if not differ:
            return []  # a factor on the right value has a kind of its own
        for digits in _DIGITS:
            for short in (float(f"{factor:.{digits}g}"), 1 / float(f"{1 / factor:.{digits}g}")):
                if differ <= 2 and bool(search.sample.fits(short * search.values[position])):  # noqa: PLR2004
                    change = _Change(lines, tuple(tensors), form, short)
                    sentence = f"{short:.4g} times {form.said} instead of {right.said}"
                    variation = Variation(_kind(form, right), sentence, change)
                    variations.append((differ, _simplicity(form) + digits, variation))
    variations.sort(key=lambda entry: entry[:2])
    return [(differ + 1, 1, entry) for differ, _, entry in variations[:_MOST_TRIED]]


def _kind(form: Form, right: Form) -> PatternKind:
    (first, middle, last), (_, other, _) = form.parts, right.parts
    if first == "exp(x - max(x))" and right.parts[0] == "exp(x)" and "log" in last:
        return PatternKind.MISSING_OPERAND  # the maximum that comes back after the logarithm
    if (first, last) != (right.parts[0], right.parts[2]):
        return PatternKind.OTHER_FUNCTION
    if right.template is _quotient_words:
        if middle == "1":
            return PatternKind.MISSING_OPERAND
        if middle in _ACROSS:
            return PatternKind.WRONG_AXIS
        if middle in _OTHER_LINE:
            return PatternKind.WRONG_INDEX
        return PatternKind.STATISTICS
    if middle in _OF_ALL_LINES:
        return PatternKind.WRONG_AXIS
    return PatternKind.WRONG_REDUCTION if other != middle else PatternKind.OTHER_FUNCTION


@dataclasses.dataclass(frozen=True)
class _Change:
    """The last operator's result as a form of the operands, in the dtype that it has."""

    lines: Lines
    operands: tuple[Tensor, ...]
    form: Form
    factor: float = 1.0

    def __call__(self, step: Any) -> Any:
        result = first_of(step.run())
        operands = torch.broadcast_tensors(*(operand.to(result) for operand in self.operands))
        value = self.form.compute(*map(self.lines.of, operands))
        value = value if self.factor == 1 else value * self.factor
        return step.with_first(self.lines.back(value, tuple(result.shape)))


# --- Forms of one line ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """A form in words, by its parts.

    Attributes:
        parts: the name of each part.
        template: how they are written.
    """

    parts: tuple[str, ...]
    template: Callable[[tuple[str, ...]], str]
    compute: Callable[..., Tensor]

    @property
    def said(self) -> str:
        """How it is written."""
        return self.template(self.parts)


def _subtract_mean(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def _subtract_max(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def _by_magnitude(x: Tensor, *, largest: bool) -> Tensor:
    size = x.abs()
    at = size.argmax(-1, keepdim=True) if largest else size.argmin(-1, keepdim=True)
    return x.gather(-1, at).squeeze(-1)


_BEFORE: Parts = {
    "x": lambda x: x,
    "abs(x)": torch.abs,
    "square(x)": torch.square,
    "x - mean(x)": _subtract_mean,
    "abs(x - mean(x))": lambda x: _subtract_mean(x).abs(),
    "square(x - mean(x))": lambda x: _subtract_mean(x).square(),
    "exp(x)": torch.exp,
    "exp(x - max(x))": lambda x: _subtract_max(x).exp(),
    "exp(-x)": lambda x: (-x).exp(),
    "log(x)": torch.log,
    "sqrt(abs(x))": lambda x: x.abs().sqrt(),
    "relu(x)": torch.relu,
    "x ** 3": lambda x: x**3,
    "reciprocal(x)": torch.reciprocal,
    "sign(x)": torch.sign,
    "2 ** x": torch.exp2,
}
_OF_LINE: Parts = {
    "sum": lambda x: x.sum(-1),
    "mean": lambda x: x.mean(-1),
    "product": lambda x: x.prod(-1),
    "maximum": lambda x: x.amax(-1),
    "minimum": lambda x: x.amin(-1),
    "largest in magnitude": lambda x: _by_magnitude(x, largest=True),
    "smallest in magnitude": lambda x: _by_magnitude(x, largest=False),
    "median": lambda x: x.median(-1).values,
    "middle": lambda x: x.quantile(0.5, -1),
    "first": lambda x: x[..., 0],
    "last": lambda x: x[..., -1],
    "range": lambda x: x.amax(-1) - x.amin(-1),
    "middle of the range": lambda x: (x.amax(-1) + x.amin(-1)) / 2,
    "sum / (n - 1)": lambda x: x.sum(-1) / (x.shape[-1] - 1),
    "sum / (n + 1)": lambda x: x.sum(-1) / (x.shape[-1] + 1),
    "sum / sqrt(n)": lambda x: x.sum(-1) / math.sqrt(x.shape[-1]),
    "second largest": lambda x: x.topk(2, -1).values[..., 1],
    "mean without the largest and the smallest": lambda x: (
        (x.sum(-1) - x.amax(-1) - x.amin(-1)) / (x.shape[-1] - 2)
    ),
    "mean weighted by softmax": lambda x: (x.softmax(-1) * x).sum(-1),
    "mean of the positive ones": lambda x: x.relu().sum(-1) / (x > 0).sum(-1),
}
_OF_ALL_LINES: Parts = {
    "sum of all lines": lambda x: x.sum().expand(len(x)),
    "mean of all lines": lambda x: x.mean().expand(len(x)),
    "maximum of all lines": lambda x: x.amax().expand(len(x)),
    "minimum of all lines": lambda x: x.amin().expand(len(x)),
    "length of all lines": lambda x: x.square().sum().sqrt().expand(len(x)),
}
_AFTER: Parts = {
    "": lambda x: x,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "exp": torch.exp,
    "reciprocal": torch.reciprocal,
    "neg": torch.neg,
    "abs": torch.abs,
    "neg log": lambda x: -x.log(),
    "root of root": lambda x: x.sqrt().sqrt(),
    "cube root": lambda x: x ** (1 / 3),
}


def _describe_application(after: str, words: str) -> str:
    return f"{after}({words})" if after else words


def _reduction_words(parts: tuple[str, ...]) -> str:
    before, reduce, after = parts
    if reduce in _OF_ALL_LINES:
        return f"the {reduce}"
    return _describe_application(
        after, f"the {reduce} of {'the line' if before == 'x' else before}"
    )


def _reductions(x: Tensor) -> Iterator[tuple[Form, Tensor]]:
    yield from _chains(x, _OF_LINE)
    for name, reduce in _OF_ALL_LINES.items():
        yield Form(("x", name, ""), _reduction_words, reduce), reduce(x)


def _chains(x: Tensor, reductions: Parts) -> Iterator[tuple[Form, Tensor]]:
    """A function of each element, a reduction, and a function of what it gives."""
    for (before, pre), (name, reduce) in itertools.product(_BEFORE.items(), reductions.items()):
        with contextlib.suppress(RuntimeError, ValueError, IndexError):
            value = reduce(pre(x))
            for after, post in _AFTER.items():
                compute = _chain(pre, reduce, post)
                yield Form((before, name, after), _reduction_words, compute), post(value)


def _chain(*functions: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: functools.reduce(lambda value, function: function(value), functions, x)


# --- Running forms --------------------------------------------------------------------------------


def _count(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)


_RUNNING: Parts = {
    "running sum": lambda x: x.cumsum(-1),
    "running product": lambda x: x.cumprod(-1),
    "running maximum": lambda x: x.cummax(-1).values,
    "running minimum": lambda x: x.cummin(-1).values,
    "running mean": lambda x: x.cumsum(-1) / _count(x),
    "running logsumexp": lambda x: x.logcumsumexp(-1),
    "running sum from the end": lambda x: x.flip(-1).cumsum(-1).flip(-1),
    "running sum of all before": lambda x: x.cumsum(-1) - x,
    "sum with the element before": lambda x: x + torch.nn.functional.pad(x, (1, 0))[..., :-1],
    "sum of the whole line": lambda x: x.sum(-1, keepdim=True).expand_as(x),
    "line itself": lambda x: x,
}


# --- Lines divided by a number --------------------------------------------------------------------


def _on_simplex(x: Tensor) -> Tensor:
    """The nearest point with positive elements whose sum is 1 (sparsemax)."""
    ordered = x.sort(-1, descending=True).values
    excess = (ordered.cumsum(-1) - 1) / _count(x)
    number = (ordered > excess).sum(-1, keepdim=True)
    return (x - excess.gather(-1, number - 1)).relu()


def _largest_only(x: Tensor) -> Tensor:
    return torch.where(x == x.amax(-1, keepdim=True), x.exp(), 0.0)


_ABOVE: Parts = {
    "exp(x)": torch.exp,
    "x": lambda x: x,
    "relu(x)": torch.relu,
    "square(x)": torch.square,
    "abs(x)": torch.abs,
    "softplus(x)": torch.nn.functional.softplus,
    "sigmoid(x)": torch.sigmoid,
    "2 ** x": torch.exp2,
    "exp(-x)": lambda x: (-x).exp(),
    "10 ** x": lambda x: 10**x,
    "x - min(x)": lambda x: x - x.amin(-1, keepdim=True),
    "x - max(x)": _subtract_max,
    "x - mean(x)": _subtract_mean,
    "sign(x)": torch.sign,
    "exp(x) of the largest only": _largest_only,
    "the projection of x onto the simplex": _on_simplex,
    "1 + x": lambda x: 1 + x,
    "1 + x + square(x) / 2": lambda x: 1 + x + x.square() / 2,
}
_BELOW: Parts = {
    "1": lambda v, _: torch.ones_like(v[..., :1]),
    "their sum": lambda v, _: v.sum(-1, keepdim=True),
    "the sum of their magnitudes": lambda v, _: v.abs().sum(-1, keepdim=True),
    "their maximum": lambda v, _: v.amax(-1, keepdim=True),
    "their largest magnitude": lambda v, _: v.abs().amax(-1, keepdim=True),
    "their length": lambda v, _: v.square().sum(-1, keepdim=True).sqrt(),
    "their squared length": lambda v, _: v.square().sum(-1, keepdim=True),
    "the root of their mean square": lambda v, _: v.square().mean(-1, keepdim=True).sqrt(),
    "their mean": lambda v, _: v.mean(-1, keepdim=True),
    "their number": lambda v, _: torch.full_like(v[..., :1], v.shape[-1]),
    "their standard deviation": lambda v, _: v.std(-1, keepdim=True),
    "the first of them": lambda v, _: v[..., :1],
    "the last of them": lambda v, _: v[..., -1:],
    "1 + their sum": lambda v, _: 1 + v.sum(-1, keepdim=True),
    "the sum of exp(x)": lambda _, x: x.exp().sum(-1, keepdim=True),
    "the sum of all lines": lambda v, _: v.sum().expand_as(v[..., :1]),
    "the length of all lines": lambda v, _: v.square().sum().sqrt().expand_as(v[..., :1]),
    "the maximum of all lines": lambda v, _: v.amax().expand_as(v[..., :1]),
    "the sum of the first line": lambda v, _: v[:1].sum(-1, keepdim=True).expand_as(v[..., :1]),
    "the sum across the lines": lambda v, _: v.sum(0, keepdim=True).expand_as(v),
    "the length across the lines": lambda v, _: v.square().sum(0, keepdim=True).sqrt().expand_as(v),
    "the mean of their sums": lambda v, _: v.sum(-1).mean().expand_as(v[..., :1]),
    "the mean of their lengths": lambda v, _: (
        v.square().sum(-1).sqrt().mean().expand_as(v[..., :1])
    ),
}
_ACROSS = frozenset(
    sentence for sentence in _BELOW if "all lines" in sentence or "across" in sentence
)
_OTHER_LINE = frozenset({"the sum of the first line"})
_OF_OTHERS = {
    *(*_ACROSS, *_OTHER_LINE, *_OF_ALL_LINES),
    *("the mean of their sums", "the mean of their lengths"),
}


def _quotient_words(parts: tuple[str, ...]) -> str:
    above, below, after = parts
    return _describe_application(after, above if below == "1" else f"{above} divided by {below}")


def _quotient(
    above: Callable[..., Tensor], below: Callable[..., Tensor], after: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        value = above(x)
        return after(value / below(value, x))

    return compute


def _quotients(x: Tensor) -> Iterator[tuple[Form, Tensor]]:
    for above, top in _ABOVE.items():
        values = top(x)
        for below, bottom in _BELOW.items():
            quotient = values / bottom(values, x)
            for after, post in itertools.islice(_AFTER.items(), 12):
                compute = _quotient(top, bottom, post)
                yield Form((above, below, after), _quotient_words, compute), post(quotient)


# --- Sums over two lines --------------------------------------------------------------------------

_OF_BOTH: Parts = {
    "the sum of a * b": lambda a, b: (a * b).sum(-1),
    "the sum of (a - mean(a)) * (b - mean(b))": lambda a, b: (
        _subtract_mean(a) * _subtract_mean(b)
    ).sum(-1),
    "the sum of abs(a * b)": lambda a, b: (a * b).abs().sum(-1),
    "the sum of abs(a - b)": lambda a, b: (a - b).abs().sum(-1),
    "the length of a - b": lambda a, b: (a - b).square().sum(-1).sqrt(),
    "the squared length of a - b": lambda a, b: (a - b).square().sum(-1),
    "the length of a + b": lambda a, b: (a + b).square().sum(-1).sqrt(),
    "the largest of abs(a - b)": lambda a, b: (a - b).abs().amax(-1),
    "the largest of a * b": lambda a, b: (a * b).amax(-1),
    "the sum of min(a, b)": lambda a, b: torch.minimum(a, b).sum(-1),
    "the sum of sign(a) * sign(b)": lambda a, b: (a.sign() * b.sign()).sum(-1),
    "the sum of a - b": lambda a, b: (a - b).sum(-1),
}


def _length(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


_DIVISORS: Parts = {
    "1": lambda a, _: torch.ones_like(a[..., 0]),
    "both lengths": lambda a, b: _length(a) * _length(b),
    "the length of a": lambda a, _: _length(a),
    "the length of b": lambda _, b: _length(b),
    "the squared length of a": lambda a, _: _length(a).square(),
    "the squared length of b": lambda _, b: _length(b).square(),
    "both squared lengths": lambda a, b: (_length(a) * _length(b)).square(),
    "the root of both lengths": lambda a, b: (_length(a) * _length(b)).sqrt(),
    "the sum of the lengths": lambda a, b: _length(a) + _length(b),
    "the mean of the squared lengths": lambda a, b: (_length(a) ** 2 + _length(b) ** 2) / 2,
    "the larger squared length": lambda a, b: torch.maximum(_length(a), _length(b)).square(),
    "both lengths around the means": lambda a, b: (
        _length(_subtract_mean(a)) * _length(_subtract_mean(b))
    ),
    "both sums of magnitudes": lambda a, b: a.abs().sum(-1) * b.abs().sum(-1),
    "both largest magnitudes": lambda a, b: a.abs().amax(-1) * b.abs().amax(-1),
    "their number": lambda a, _: torch.full_like(a[..., 0], a.shape[-1]),
    "the root of their number": lambda a, _: torch.full_like(a[..., 0], math.sqrt(a.shape[-1])),
}
_AFTER_BOTH: Parts = {
    **{name: _AFTER[name] for name in ("", "sqrt", "square", "abs", "exp", "neg", "reciprocal")},
    "1 minus ": lambda x: 1 - x,
    "relu": torch.relu,
    "acos": torch.acos,
    "half of 1 plus ": lambda x: (1 + x) / 2,
}


def _similarity(
    above: Callable[..., Tensor], below: Callable[..., Tensor], after: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: after(above(a, b) / below(a, b))


def _similarities(a: Tensor, b: Tensor) -> Iterator[tuple[Form, Tensor]]:
    for (above, top), (below, bottom) in itertools.product(_OF_BOTH.items(), _DIVISORS.items()):
        quotient = top(a, b) / bottom(a, b)
        for after, post in _AFTER_BOTH.items():
            compute = _similarity(top, bottom, post)
            yield Form((above, below, after), _quotient_words, compute), post(quotient)
