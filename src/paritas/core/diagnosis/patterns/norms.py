"""Norms with a wrong statistic, eps elsewhere, or a weight in the wrong place."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.patterns.sums import left_out, words_of
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.patterns.steps import StepChange


_LAYER = step_names("layer norm", "rms norm") | {"rms_norm", "layer_norm"}
# Without those that take no `training`: they always train. Those of inference sum nothing, so they
# have no group.
_BATCH = (
    step_names("batch norm", "functional batch norm")
    - {"batch_norm_with_update", "batch_norm_with_update_functional"}
) | {"native_batch_norm_legit_no_training"}
NORMS = _LAYER | _BATCH | step_names("group norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormMistake:
    """A wrong way to compute a norm; each field by itself is a mistake.

    Attributes:
        centred: whether the mean is subtracted.
        outside: eps is added to the root.
        after: eps is added to the quotient.
        divided: whether it is divided by the root.
        correction: what is subtracted from the count of elements.
        less: how many elements at the end of a row its statistics leave out; `first` at its start.
        dims: other axes.
        bias_first: the bias is added before the weight is multiplied.
        about_mean: whether the squares are of what deviates from the mean.
        padded: how many zeros the statistics count at the end of a row.
    """

    centred: bool | None = None
    outside: bool = False
    after: bool = False
    divided: bool = True
    correction: int = 0
    less: int = 0
    first: int = 0
    dims: tuple[int, ...] | None = None
    bias_first: bool = False
    power: float = 0.5
    about_mean: bool | None = None
    padded: int = 0
    eps: float | None = None


@dataclasses.dataclass(frozen=True)
class Norm:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, of `x` with axes to reduce.

    Attributes:
        view: the shape in which `dims` are reduced.
        mean: the running mean, if that is used instead of the batch's; also `var`.
    """

    x: Tensor
    view: tuple[int, ...]
    dims: tuple[int, ...]
    eps: float
    weight: Tensor | float
    bias: Tensor | float
    centred: bool
    mean: Tensor | None = None
    var: Tensor | None = None

    def value(self, mistake: NormMistake | None = None) -> Tensor:
        """What it gives, with a mistake if there is one."""
        wrong = mistake or NormMistake()
        x, dims = self.rows, self.dims if wrong.dims is None else wrong.dims
        eps = self.eps if wrong.eps is None else wrong.eps
        axis = dims[-1]
        part = x.narrow(axis, wrong.first, x.shape[axis] - wrong.less - wrong.first)
        if wrong.padded:
            zeros = [0] * (2 * (x.dim() - 1 - axis % x.dim()))
            part = torch.nn.functional.pad(part, (*zeros, 0, wrong.padded))
        count = math.prod(part.shape[dim] for dim in dims)
        centred = self.centred if wrong.centred is None else wrong.centred
        mean = part.mean(dims, keepdim=True) if self.mean is None else self.mean
        about_mean = centred if wrong.about_mean is None else wrong.about_mean
        squares = (part - mean if about_mean else part).square().sum(dims, keepdim=True)
        var = squares / (count - wrong.correction) if self.var is None else self.var
        if wrong.outside:
            below = var.sqrt() + eps
        elif wrong.after:
            below = var.sqrt()
        else:
            below = (var + eps) ** wrong.power
        value = x - mean if centred else x
        value = value / below if wrong.divided else value
        value = value + eps if wrong.after else value
        if wrong.bias_first:
            return (value.reshape(self.x.shape) + self.bias) * self.weight
        return self.finish(value)

    def finish(self, value: Tensor) -> Tensor:
        """Weight and bias applied to normalised rows."""
        return value.reshape(self.x.shape) * self.weight + self.bias

    @property
    def rows(self) -> Tensor:
        """The input in the shape in which axes are reduced."""
        return self.x.reshape(self.view)

    @property
    def length(self) -> int:
        """How many elements a row has."""
        return math.prod(self.rows.shape[dim] for dim in self.dims)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """What is subtracted from each row, and what it is divided by."""
        x = self.rows
        mean = x.mean(self.dims, keepdim=True) if self.mean is None else self.mean
        mean = mean if self.centred else torch.zeros_like(mean)
        var = (x - mean).square().mean(self.dims, keepdim=True) if self.var is None else self.var
        return mean, (var + self.eps).sqrt()


def with_norm(formula: Callable[[Norm], Tensor]) -> StepChange:
    """The result of a norm by another formula."""

    def change(step: Step) -> Any:
        norm = norm_of(step)
        if norm is None:
            raise ValueError("its statistics are not known")
        return step.with_first(formula(norm))

    return change


def norm_of(step: Step) -> Norm | None:
    """The operator as a norm; None if its statistics are not known."""
    return norm_by_name(step.name, step.values)


def norm_by_name(name: str, values: Mapping[str, Any]) -> Norm | None:
    """A norm by the name of its operator and by its arguments."""
    x = values["input"]
    eps = values.get("eps", values.get("epsilon"))
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    shape = tuple(x.shape)
    weight, bias = (1.0 if values.get("weight") is None else values["weight"]), values.get("bias")
    bias = 0.0 if bias is None else bias
    if name in _LAYER:
        count = len(values["normalized_shape"])
        dims = tuple(range(x.dim() - count, x.dim()))
        return Norm(x, shape, dims, eps, weight, bias, centred="rms" not in name)
    channels = (1, -1, *(1,) * (x.dim() - 2))
    weight, bias = (
        tensor.reshape(channels) if isinstance(tensor, torch.Tensor) else tensor
        for tensor in (weight, bias)
    )
    if name == "native_group_norm":
        view = (shape[0], values["group"], -1)
        return Norm(x, view, (2,), eps, weight, bias, centred=True)
    dims = (0, *range(2, x.dim()))
    if values.get("training", False) is True:
        return Norm(x, shape, dims, eps, weight, bias, centred=True)
    mean, var = values.get("running_mean"), values.get("running_var")
    if mean is None or var is None:
        return None
    mean, var = mean.reshape(channels), var.reshape(channels)
    return Norm(x, shape, dims, eps, weight, bias, True, mean, var)


def norm_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of norms."""
    norm = norm_of(step) if step.name in NORMS else None
    if norm is None:
        return
    yield from _formula_variations(norm)
    if isinstance(norm.weight, torch.Tensor):
        sentence = "the weight is applied before the norm, not after it"
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, with_norm(_weighted_before))
    if isinstance(norm.weight, torch.Tensor) and isinstance(norm.bias, torch.Tensor):
        sentence = "weight and bias are applied before the norm, not after it"
        yield Variation(PatternKind.SWAPPED_OPERANDS, sentence, with_norm(_affine_before))
    if norm.mean is not None:
        # Other statistics than the running ones, and wrong signs where these are folded into one.
        for kind, alterations in _OF_GIVEN.items():
            for sentence, alter in alterations.items():
                yield Variation(kind, sentence, with_norm(partial(_alter_norm, alter=alter)))
        return
    yield from _length_variations(norm)
    if step.name == "native_group_norm":
        yield from _group_variations(norm)
    for words, spread in _SPREADS.items():
        sentence = f"it is divided by {words}, not by the deviation"
        for eps_added in (norm.eps, 0.0):
            change = with_norm(partial(_with_spread, spread=spread, eps=eps_added))
            yield Variation(PatternKind.STATISTICS, sentence, change)


def _take(kind: PatternKind, sentence: str, **changes: Any) -> Variation:
    mistake = NormMistake(**changes)
    return Variation(kind, sentence, with_norm(lambda norm: norm.value(mistake)))


def _formula_variations(norm: Norm) -> Iterator[Variation]:
    eps = f"eps ({norm.eps:.3g})"
    yield _take(
        PatternKind.EPS, f"{eps} is added to the deviation, not to the variance", outside=True
    )
    yield _take(PatternKind.EPS, f"{eps} is added to the quotient, not to the variance", after=True)
    if norm.centred:
        yield from _of_other_norm(norm, "the mean is not subtracted, as in RMS norm", centred=False)
        sentence = "the mean is not subtracted from the squares of the variance"
        yield _take(PatternKind.STATISTICS, sentence, about_mean=False)
    else:
        sentence = "the mean is subtracted from what is squared"
        yield _take(PatternKind.STATISTICS, sentence, about_mean=True)
        yield from _of_other_norm(norm, "the mean is subtracted, as in layer norm", centred=True)
    sentence = "it is not divided by the deviation"
    yield _take(PatternKind.STATISTICS, sentence, divided=False)
    sentence = "it is divided by the variance, not by the deviation"
    yield _take(PatternKind.STATISTICS, sentence, power=1.0)
    yield _take(PatternKind.STATISTICS, f"{sentence}, and {eps} is left out", power=1.0, eps=0.0)
    if isinstance(norm.weight, torch.Tensor) and isinstance(norm.bias, torch.Tensor):
        sentence = "the bias is added before the factor"
        yield _take(PatternKind.SWAPPED_OPERANDS, sentence, bias_first=True)


# What the other kind of norm usually has.
_USUAL_EPS = (1e-5, 1e-6, 1e-8, 1e-12, float(torch.finfo(torch.float32).eps))


def _of_other_norm(norm: Norm, sentence: str, *, centred: bool) -> Iterator[Variation]:
    """A layer norm for an RMS norm, or the other way round; each may have an eps of its own."""
    yield _take(PatternKind.STATISTICS, sentence, centred=centred)
    for eps in _USUAL_EPS:
        if not math.isclose(eps, norm.eps):
            words = f"{sentence}, and eps is {eps:.3g}"
            yield _take(PatternKind.STATISTICS, words, centred=centred, eps=eps)


def _length_variations(norm: Norm) -> Iterator[Variation]:
    """Statistics of fewer elements, of more, or along other axes."""
    x, length = norm.rows, norm.length
    if length > 1:
        sentence = f"the variance is divided by {length - 1} instead of {length}"
        yield _take(PatternKind.OFF_BY_ONE, sentence, correction=1)
    size = x.shape[norm.dims[-1]]
    for first, last in left_out(size):
        is_one = first + last == 1
        kind = PatternKind.OFF_BY_ONE if is_one else PatternKind.PARTIAL_SUM
        some = f"{words_of(first, last)} of the {size} elements {'is' if is_one else 'are'}"
        yield _take(kind, f"{some} left out of mean and variance", first=first, less=last)
    for tile in (width for width in (8, 16, 32, 64, 128, 256, 512, 1024) if size % width):
        sentence = f"the zeros that pad {size} elements to a multiple of {tile} count as elements"
        yield _take(PatternKind.STATISTICS, sentence, padded=-size % tile)
    yield from _part_variations(norm, x)
    for dims in _other_dims(x.dim(), norm.dims):
        sentence = (
            f"mean and variance are taken along axes {list(dims)} instead of {list(norm.dims)}"
        )
        yield _take(PatternKind.WRONG_AXIS, sentence, dims=dims)


# So many parts of a row are tried, and so many rows together.
_PARTS = (2, 3, 4, 6, 8, 16, 32)


def _part_variations(norm: Norm, x: Tensor) -> Iterator[Variation]:
    """Statistics of each part of a row, of several rows, or of what comes before an element."""
    axis = norm.dims[-1]
    size = x.shape[axis]
    if len(norm.dims) > 1:
        return
    what = "mean and deviation" if norm.centred else "the mean square"
    verb = "are those" if norm.centred else "is that"
    for parts in (
        part_count for part_count in _PARTS if size % part_count == 0 and part_count < size
    ):
        for strided in (False, True):
            words = f"every {parts}th element" if strided else f"each of {parts} parts of the row"
            sentence = f"{what} {verb} of {words}"
            change = with_norm(partial(_in_parts, parts=parts, strided=strided))
            yield Variation(PatternKind.STATISTICS, sentence, change)
    rows = x.shape[axis - 1] if axis else 1
    for together in (
        row_count for row_count in _PARTS if rows % row_count == 0 and row_count < rows
    ):
        sentence = f"{what} {verb} of {together} neighbouring rows"
        change = with_norm(partial(_of_rows, together=together))
        yield Variation(PatternKind.STATISTICS, sentence, change)
    sentence = f"{what} {verb} of the row up to each element"
    yield Variation(PatternKind.STATISTICS, sentence, with_norm(_up_to_each))


def _in_parts(norm: Norm, parts: int, *, strided: bool) -> Tensor:
    axis = norm.dims[-1]
    x = norm.rows.unflatten(axis, (-1, parts) if strided else (parts, -1))
    return _compute_reshaped_norm(norm, x, (axis if strided else axis + 1,))


def _of_rows(norm: Norm, together: int) -> Tensor:
    axis = norm.dims[-1]
    x = norm.rows.unflatten(axis - 1, (-1, together))
    return _compute_reshaped_norm(norm, x, (axis, axis + 1))


def _compute_reshaped_norm(norm: Norm, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The norm of the same elements in another shape."""
    view = tuple(x.shape)
    plain = dataclasses.replace(norm, x=x, view=view, dims=dims, weight=1.0, bias=0.0).value()
    return norm.finish(plain)


def _up_to_each(norm: Norm) -> Tensor:
    axis, x = norm.dims[-1], norm.rows
    shape = [1] * x.dim()
    shape[axis] = -1
    counts = torch.arange(1, x.shape[axis] + 1, device=x.device).to(x).reshape(shape)
    mean = x.cumsum(axis) / counts if norm.centred else torch.zeros_like(x)
    var = x.square().cumsum(axis) / counts - mean.square()
    return norm.finish((x - mean) / (var.clamp(min=0) + norm.eps).sqrt())


_SPREADS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "the mean of the absolute values": lambda x, dims: x.abs().mean(dims, keepdim=True),
    "the largest absolute value": lambda x, dims: x.abs().amax(dims, keepdim=True),
    "the sum of the absolute values": lambda x, dims: x.abs().sum(dims, keepdim=True),
    "the range of the values": lambda x, dims: (
        x.amax(dims, keepdim=True) - x.amin(dims, keepdim=True)
    ),
}


def _with_spread(
    norm: Norm, spread: Callable[[Tensor, tuple[int, ...]], Tensor], eps: float
) -> Tensor:
    x = norm.rows
    value = x - x.mean(norm.dims, keepdim=True) if norm.centred else x
    return norm.finish(value / (spread(value, norm.dims) + eps))


def _weighted_before(norm: Norm) -> Tensor:
    return dataclasses.replace(norm, x=norm.x * norm.weight, weight=1.0).value()


def _affine_before(norm: Norm) -> Tensor:
    x = norm.x * norm.weight + norm.bias
    return dataclasses.replace(norm, x=x, weight=1.0, bias=0.0).value()


def _other_dims(rank: int, dims: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(1, rank):
        for other in itertools.combinations(range(rank), count):
            if other != dims:
                yield other


def _alter_norm(norm: Norm, alter: Callable[[Norm], dict[str, Any]]) -> Tensor:
    return dataclasses.replace(norm, **alter(norm)).value()


def _compute_statistics(
    norm: Norm, *, mean: bool = True, var: bool = True, images: bool = False
) -> Any:
    dims = tuple(dim for dim in norm.dims if dim != 0) if images else norm.dims
    statistics = {
        "mean": norm.x.mean(dims, keepdim=True),
        "var": norm.x.var(dims, correction=0, keepdim=True),
    }
    return {name: statistics[name] for name, is_own in (("mean", mean), ("var", var)) if is_own}


def _alter_statistics(
    alter: Callable[[Tensor], Tensor], *names: str
) -> Callable[[Norm], dict[str, Any]]:
    def change(norm: Norm) -> dict[str, Any]:
        values = {name: getattr(norm, name) for name in names}
        if not all(isinstance(value, torch.Tensor) for value in values.values()):
            raise ValueError("it has no such tensor")
        return {name: alter(value) for name, value in values.items()}

    return change


_OF_GIVEN: dict[PatternKind, dict[str, Callable[[Norm], dict[str, Any]]]] = {
    PatternKind.STATISTICS: {
        "mean and variance are that of the batch, not the running one": _compute_statistics,
        "the mean is that of the batch, not the running one": partial(
            _compute_statistics, var=False
        ),
        "the variance is that of the batch, not the running one": partial(
            _compute_statistics, mean=False
        ),
        "mean and variance are those of each image, as in an instance norm": partial(
            _compute_statistics, images=True
        ),
        "the variance is taken for a deviation: it is squared before the root": _alter_statistics(
            torch.square, "var"
        ),
        "the root of the variance is taken twice": _alter_statistics(torch.sqrt, "var"),
        "mean and variance are those of the channel before it": _alter_statistics(
            lambda value: value.roll(1, 1), "mean", "var"
        ),
        "mean and variance are those of the channel after it": _alter_statistics(
            lambda value: value.roll(-1, 1), "mean", "var"
        ),
    },
    PatternKind.SIGN: {
        "the mean is added, not subtracted": _alter_statistics(torch.neg, "mean"),
        "the bias is subtracted, not added": _alter_statistics(torch.neg, "bias"),
        "mean and bias have the wrong sign": _alter_statistics(torch.neg, "mean", "bias"),
    },
}


def _group_variations(norm: Norm) -> Iterator[Variation]:
    """Other groups of channels."""
    channels, right = norm.x.shape[1], norm.view[1]

    def normalize_groups(norm: Norm, groups: int, *, strided: bool) -> Tensor:
        if not strided:
            view = (norm.x.shape[0], groups, -1)
            return dataclasses.replace(norm, view=view).value()
        parts = norm.x.unflatten(1, (-1, groups)).transpose(1, 2)
        plain = dataclasses.replace(norm, x=parts.flatten(1, 2), weight=1.0, bias=0.0).value()
        return norm.finish(plain.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2))

    for groups in (divisor for divisor in range(1, channels + 1) if channels % divisor == 0):
        if groups != right:
            sentence = f"the channels are in {groups} groups instead of {right}"
            change = with_norm(partial(normalize_groups, groups=groups, strided=False))
            yield Variation(PatternKind.STATISTICS, sentence, change)
    if 1 < right < channels:
        sentence = f"every channel number 0, {right}, ... is a group, not neighbouring ones"
        change = with_norm(partial(normalize_groups, groups=right, strided=True))
        yield Variation(PatternKind.STATISTICS, sentence, change)


# --- Lengths --------------------------------------------------------------------------------------


def _product_over(step: Step, power: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    left, right, dim = (step.values[name] for name in ("x1", "x2", "dim"))
    lengths = (tensor.norm(dim=dim).clamp(min=step.values["eps"]) for tensor in (left, right))
    product: Tensor = (left * right).sum(dim)
    return product / power(*lengths)


_OVER: dict[PatternKind, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    PatternKind.MISSING_OPERAND: {
        "it is not divided by the lengths": lambda left, _: torch.ones_like(left),
        "it is divided by the length of x1 only": lambda left, _: left,
        "it is divided by the length of x2 only": lambda _, right: right,
    },
    PatternKind.OTHER_FUNCTION: {
        "it is divided by the squares of the lengths": lambda left, right: (left * right).square(),
        "it is divided by the square of the length of x1": lambda left, _: left.square(),
        "it is divided by the square of the length of x2": lambda _, right: right.square(),
        "it is divided by the root of the lengths": lambda left, right: (left * right).sqrt(),
    },
}


def cosine_variations(step: Step) -> Iterator[Variation]:
    """A cosine similarity over other lengths."""
    if step.name != "cosine_similarity":
        return
    for kind, divisors in _OVER.items():
        for sentence, power in divisors.items():
            yield Variation(kind, sentence, partial(_product_over, power=power))
    sentence = "1 - cosine_similarity instead of cosine_similarity"
    yield Variation(PatternKind.OTHER_FUNCTION, sentence, lambda step: 1 - step.run())
