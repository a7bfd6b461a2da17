"""What may be done to a tensor on its way: bent, moved, centred, divided, added up, exchanged.

A change knows nothing of the operator. Any of them may happen to an operand before it is used, to a
result before it is returned, or to a value between two operators. They are many, so they are tried
late, and what they reproduce by chance does not hold with other operands.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.patterns.steps import take_slices, with_output
from paritas.core.diagnosis.patterns.variations import (
    Variation,
    is_summand,
    moves_along,
    shift_in_zeros,
)
from paritas.core.diagnosis.tapes import is_within
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# Of a tensor with more axes, only the last ones are looked at.
_MOST_AXES = 4
# Values that differ by less than this share are one value: the chances of a row sum to 1.
_SAME = 1e-5


@dataclasses.dataclass(frozen=True)
class Change:
    """Something that may happen to a tensor.

    Attributes:
        words: what happens, with `{}` for what it happens to.
        apply: the tensor afterwards.
    """

    kind: PatternKind
    words: str
    apply: Callable[[Tensor], Tensor]


def changes_of(value: Tensor) -> Iterator[Change]:
    """All that may happen to a tensor, the simplest first."""
    if value.is_complex() or value.dtype == torch.bool or not value.numel():
        return
    for words, (kind, apply) in _BENT.items():
        # Whole numbers are mostly places, which have no limit.
        if value.is_floating_point() or kind is not PatternKind.CLIPPED:
            yield Change(kind, words, apply)
    if value.numel() == 1:
        return
    axes = [axis for axis, size in enumerate(value.shape) if size > 1][-_MOST_AXES:]
    for axis in axes:
        yield from _moves(axis, value.shape[axis])
    for first, second in itertools.combinations(axes, 2):
        if value.shape[first] == value.shape[second]:
            sentence = f"{{}} is transposed (axes {first} and {second})"
            apply = partial(torch.transpose, dim0=first, dim1=second)
            yield Change(PatternKind.TRANSPOSE, sentence, apply)
    # Along other axes, a statistic is the value itself, and a sum a multiple of it.
    varied = [axis for axis in axes if not bool((value == value.narrow(axis, 0, 1)).all())]
    if value.is_floating_point():
        for dims in _extents(value, varied):
            yield from _by_statistics(dims, value.dim())
    for axis in varied:
        yield from _sums_along(axis)


# --- Each element by itself -----------------------------------------------------------------------


def _with_sign_of(value: Tensor) -> Tensor:
    return value.sign() * value.abs().mean()


_FUNCTION, _ADDED, _FACTOR = PatternKind.OTHER_FUNCTION, PatternKind.OFFSET, PatternKind.FACTOR
_BENT: dict[str, tuple[PatternKind, Callable[[Tensor], Tensor]]] = {
    "{} is negated": (PatternKind.SIGN, torch.neg),
    "{} is doubled": (_FACTOR, lambda x: 2 * x),
    "{} is halved": (_FACTOR, lambda x: x / 2),
    "the absolute value of {} is used": (_FUNCTION, torch.abs),
    "negative values of {} become 0": (PatternKind.CLIPPED, torch.relu),
    "positive values of {} become 0": (PatternKind.CLIPPED, lambda x: x.clamp(max=0)),
    "the square of {} is used": (_FUNCTION, torch.square),
    "the square of {} with its sign is used": (_FUNCTION, lambda x: x * x.abs()),
    "the sign of {} is used": (_FUNCTION, torch.sign),
    "the sign of {} times its mean magnitude is used": (PatternKind.PRECISION, _with_sign_of),
    "the root of {} is used": (_FUNCTION, torch.sqrt),
    "the reciprocal of {} is used": (_FUNCTION, torch.reciprocal),
    "1 is added to {}": (_ADDED, lambda x: x + 1),
    "1 is subtracted from {}": (_ADDED, lambda x: x - 1),
    "1 - x is used for each x of {}": (_FUNCTION, lambda x: 1 - x),
    "(1 + x) / 2 is used for each x of {}": (_FUNCTION, lambda x: (1 + x) / 2),
    "{} is rounded to a whole number": (_FUNCTION, torch.round),
    "{} is rounded down": (_FUNCTION, torch.floor),
    "{} is rounded up": (_FUNCTION, torch.ceil),
    "{} is rounded towards zero": (_FUNCTION, torch.trunc),
    **{
        f"{word} of {{}} is used": (_FUNCTION, compute)
        for word, compute in (
            *(("exp", torch.exp), ("log", torch.log), ("sigmoid", torch.sigmoid)),
            *(("tanh", torch.tanh), ("gelu", torch.nn.functional.gelu)),
            *(("silu", torch.nn.functional.silu), ("softplus", torch.nn.functional.softplus)),
        )
    },
}


# --- Other places ---------------------------------------------------------------------------------


def _moves(axis: int, size: int) -> Iterator[Change]:
    along = f"along axis {axis}"
    for words, move in moves_along(axis, size, pairs=False):
        yield Change(PatternKind.SHIFT, words, move)
    for words, order in _orders(size):
        take = partial(take_slices, axis=axis, order=order)
        yield Change(PatternKind.PERMUTATION, f"{words} {along}", take)
    for position, which in ((0, "first"), (size - 1, "last")):
        sentence = f"the {which} slice of {{}} {along} is used for all"
        take = partial(take_slices, axis=axis, order=torch.full((size,), position))
        yield Change(PatternKind.COPY, sentence, take)
    half = size // 2
    for start, end, which in (
        *((0, 1, "first slice"), (size - 1, size, "last slice")),
        *((0, half, "first half"), (half, size, "second half")),
    ):
        sentence = f"the {which} of {{}} {along} is 0"
        yield Change(PatternKind.ZEROS, sentence, partial(_zero_range, axis, start, end))


def _orders(size: int) -> Iterator[tuple[str, Tensor]]:
    every = torch.arange(size)
    yield "{} is in the reverse order", every.flip(0)
    if size > 2:  # noqa: PLR2004  (two can only be exchanged)
        yield "the first two slices of {} are exchanged", _exchange(every, 0, 1)
        yield "the last two slices of {} are exchanged", _exchange(every, size - 2, size - 1)
        yield "the first and the last slice of {} are exchanged", _exchange(every, 0, size - 1)
    if size % 2 == 0 and size > 2:  # noqa: PLR2004
        yield "the halves of {} are exchanged", every.roll(size // 2)
        yield "neighbouring slices of {} are exchanged", every ^ 1
        yield "slices of {} are interleaved by halves", every.reshape(2, -1).T.flatten()
        yield "slices of {} are taken apart into even and odd", every.reshape(-1, 2).T.flatten()


def _exchange(order: Tensor, first: int, second: int) -> Tensor:
    other = order.clone()
    other[first], other[second] = second, first
    return other


def _zero_range(axis: int, start: int, end: int, value: Tensor) -> Tensor:
    other = value.clone()
    other.narrow(axis, start, end - start).zero_()
    return other


# --- By a number of all elements, or of each line -------------------------------------------------


_NUMBERS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "mean": lambda x, dims: x.mean(dims, keepdim=True),
    "maximum": lambda x, dims: x.amax(dims, keepdim=True),
    "minimum": lambda x, dims: x.amin(dims, keepdim=True),
    "sum": lambda x, dims: x.sum(dims, keepdim=True),
    "largest magnitude": lambda x, dims: x.abs().amax(dims, keepdim=True),
    "root of the mean square": lambda x, dims: x.square().mean(dims, keepdim=True).sqrt(),
    "length": lambda x, dims: x.square().sum(dims, keepdim=True).sqrt(),
    "deviation": lambda x, dims: x.var(dims, correction=0, keepdim=True).sqrt(),
}
_SUBTRACTED = ("mean", "maximum", "minimum")
# What a tensor may be divided by, and what is added to that so that it is not 0.
_DIVISORS: dict[str, tuple[float, ...]] = {
    "sum": (0.0,),
    "largest magnitude": (0.0,),
    "root of the mean square": (0.0, 1e-6, 1e-5),
    "length": (0.0, 1e-6, 1e-5),
    "deviation": (0.0,),
}


def _extents(value: Tensor, axes: list[int]) -> list[tuple[int, ...]]:
    """All axes, each of these, the last two, and all but one of the first two."""
    every = tuple(range(value.dim()))
    several = [every[-2:], every[1:], (*every[:1], *every[2:])] if len(every) > 2 else []  # noqa: PLR2004
    extents = dict.fromkeys([every, *((axis,) for axis in axes), *several])
    return [dims for dims in extents if any(dim in axes for dim in dims)]


def _by_statistics(dims: tuple[int, ...], rank: int) -> Iterator[Change]:
    is_whole = len(dims) == rank
    where = "all of it" if is_whole else f"ax{'e' if len(dims) > 1 else 'i'}s {_name(dims)}"
    for name in _SUBTRACTED:
        kind = PatternKind.OFFSET if is_whole else PatternKind.AXIS_OFFSET
        sentence = f"the {name} of {{}} over {where} is subtracted from it"
        yield Change(kind, sentence, partial(_subtract_statistic, _NUMBERS[name], dims))
    for name, epsilons in _DIVISORS.items():
        kind = PatternKind.FACTOR if is_whole else PatternKind.AXIS_SCALE
        sentence = f"{{}} is divided by its {name} over {where}"
        for eps in epsilons:
            yield Change(kind, sentence, partial(_divide_by_statistic, _NUMBERS[name], dims, eps))
    for name, reduce in _NUMBERS.items():
        sentence = f"the {name} of {{}} over {where} is used instead of each element"
        yield Change(PatternKind.STATISTICS, sentence, partial(_spread, reduce, dims))
    sentence = f"{{}} is standardised over {where}"
    yield Change(PatternKind.OTHER_FUNCTION, sentence, partial(_standardise_lines, dims))
    if len(dims) == 1:
        sentence = f"the first slice of {{}} along axis {dims[0]} is subtracted from all"
        first = lambda x, dims: x.narrow(dims[0], 0, 1)  # noqa: E731
        yield Change(PatternKind.AXIS_OFFSET, sentence, partial(_subtract_statistic, first, dims))
        sentence = f"softmax of {{}} along axis {dims[0]} is used"
        yield Change(PatternKind.OTHER_FUNCTION, sentence, partial(torch.softmax, dim=dims[0]))


def _name(dims: tuple[int, ...]) -> str:
    return str(dims[0]) if len(dims) == 1 else str(list(dims))


def _subtract_statistic(reduce: Any, dims: tuple[int, ...], value: Tensor) -> Tensor:
    result: Tensor = value - reduce(value, dims)
    return result


def _divide_by_statistic(reduce: Any, dims: tuple[int, ...], eps: float, value: Tensor) -> Tensor:
    result: Tensor = value / (reduce(value, dims) + eps)
    return result


def _spread(reduce: Any, dims: tuple[int, ...], value: Tensor) -> Tensor:
    result: Tensor = reduce(value, dims).expand_as(value).contiguous()
    return result


def _standardise_lines(dims: tuple[int, ...], value: Tensor) -> Tensor:
    apart = _subtract_statistic(_NUMBERS["mean"], dims, value)
    return _divide_by_statistic(_NUMBERS["deviation"], dims, 0.0, apart)


# --- Sums along an axis ---------------------------------------------------------------------------


def _sums_along(axis: int) -> Iterator[Change]:
    along = f"along axis {axis}"
    sentence = f"{{}} is added up {along}: every slice is the sum of all"
    total = partial(_spread, _NUMBERS["sum"], (axis,))
    yield Change(PatternKind.WRONG_REDUCTION, sentence, total)
    sentence = f"{{}} is a running sum {along}: what came before is kept"
    yield Change(PatternKind.WRONG_REDUCTION, sentence, partial(torch.cumsum, dim=axis))
    for by, where in ((1, "before"), (-1, "after")):
        sentence = f"the slice of {{}} {where} each one {along} is added to it"
        yield Change(PatternKind.RESIDUAL, sentence, partial(_with_neighbour, axis, by, 1))
        sentence = f"the slice of {{}} {where} each one {along} is subtracted from it"
        yield Change(PatternKind.RESIDUAL, sentence, partial(_with_neighbour, axis, by, -1))


def _with_neighbour(axis: int, by: int, sign: int, value: Tensor) -> Tensor:
    return value + sign * shift_in_zeros(value, axis=axis, by=by)


# --- Where they happen ----------------------------------------------------------------------------


def operand_changes(step: Step, among: Step | None = None) -> Iterator[Variation]:
    """The operator with something done to one of its operands.

    Args:
        among: only to those that are operands of this one, too.
    """
    operands = [slot for slot in _slots(step) if not slot.is_mask(step)]
    if among is not None:
        memory = {_memory(slot.of(among)) for slot in _slots(among)}
        operands = [slot for slot in operands if _memory(slot.of(step)) in memory]
    for slot in operands:
        for change in changes_of(slot.of(step)):
            run = partial(_with_operand, slot=slot, alter=change.apply)
            kind, words = change.kind, change.words
            if kind is PatternKind.ZEROS and is_summand(step.name, slot.name):
                kind, words = PatternKind.MISSING_OPERAND, words.replace("is 0", "is left out")
            yield Variation(kind, words.format(slot.words), run)


def operand_pairs(step: Step) -> Iterator[Variation]:
    """The operator with one operand together with another one of the same shape."""
    for slot, other in itertools.permutations(_slots(step), 2):
        if _are_alike(slot.of(step), other.of(step)):
            for kind, sentence, combine in _COMBINED:
                words = sentence.format(other.words, slot.words)
                run = partial(_with_combined, slot=slot, other=other, combine=combine)
                yield Variation(kind, words, run)


def _memory(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def result_changes(
    step: Step, output: int = 0, shape: tuple[int, ...] | None = None
) -> Iterator[Variation]:
    """Something done to a result of the operator.

    Args:
        shape: that of the result as the caller gets it, if it is another: of a linear map, say,
            whose rows are counted together.
    """
    right = _output_of(step, output)
    right = right if shape is None else right.reshape(shape)
    for change in changes_of(right):
        run = partial(_with_result, output=output, shape=shape, alter=change.apply)
        is_scale = change.kind is PatternKind.FACTOR and "is " in change.words
        kind = PatternKind.SCALE if is_scale else change.kind
        yield Variation(kind, change.words.format("the result"), run)
    if not (right.is_floating_point() or right.dtype == torch.bool):
        yield from _other_places(step, output)


def result_pairs(step: Step, output: int = 0) -> Iterator[Variation]:
    """A result of the operator together with an operand of the same shape."""
    right = _output_of(step, output)
    for slot in _slots(step):
        if _are_alike(right, slot.of(step)):
            for kind, sentence, combine in _COMBINED:
                words = sentence.format(slot.words, "the result")
                run = partial(_with_result_of, output=output, other=slot, combine=combine)
                yield Variation(kind, words, run)


_COMBINED: tuple[tuple[PatternKind, str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    (PatternKind.RESIDUAL, "{0} is added to {1}", torch.add),
    (PatternKind.RESIDUAL, "{0} is subtracted from {1}", torch.sub),
    (PatternKind.FACTOR, "{1} is multiplied by {0}", torch.mul),
)


def _are_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.is_floating_point() and other.is_floating_point() and tensor.shape == other.shape


def _other_places(step: Step, output: int) -> Iterator[Variation]:
    """Integers that are places along an axis, one too large or too small."""
    sizes = {size for slot in _slots(step) for size in slot.of(step).shape if size > 1}
    for size, by in itertools.product(sorted(sizes), (1, -1)):
        way = "large" if by > 0 else "small"
        sentence = f"every place is one too {way}, and wraps around at {size}"
        run = partial(_with_result, output=output, alter=partial(_counted_on, by, size))
        yield Variation(PatternKind.WRONG_INDEX, sentence, run)


def _counted_on(by: int, size: int, value: Tensor) -> Tensor:
    return (value + by) % size


@dataclasses.dataclass(frozen=True)
class _Slot:
    """A tensor among the arguments of an operator.

    Attributes:
        place: where it is, if the argument is a list.
    """

    name: str
    place: int | None = None

    @property
    def words(self) -> str:
        return self.name if self.place is None else f"{self.name}[{self.place}]"

    def of(self, step: Step) -> Tensor:
        value = step.values[self.name]
        tensor: Tensor = value if self.place is None else value[self.place]
        return tensor

    def is_mask(self, step: Step) -> bool:
        """Whether it says which elements count: what may be wrong with it is known."""
        return "mask" in self.name or self.of(step).dtype == torch.bool

    def run(self, step: Step, value: Tensor) -> Any:
        """The operator with this tensor in its place."""
        if self.place is None:
            return step.run(**{self.name: value})
        values = list(step.values[self.name])
        values[self.place] = value
        return step.run(**{self.name: values})


# Of a longer list, only the first tensors are looked at.
_MOST_LISTED = 4


def _slots(step: Step) -> Iterator[_Slot]:
    for name, value in step.values.items():
        if isinstance(value, torch.Tensor):
            yield _Slot(name)
        elif isinstance(value, list | tuple):
            for position, tensor in enumerate(value[:_MOST_LISTED]):
                if isinstance(tensor, torch.Tensor):
                    yield _Slot(name, position)


def _with_operand(step: Step, slot: _Slot, alter: Callable[[Tensor], Tensor]) -> Any:
    value = slot.of(step)
    other = _alter_tensor(value, alter)
    if not is_within(value, other):
        raise ValueError("places out of range")
    return slot.run(step, other)


def _with_combined(
    step: Step, slot: _Slot, other: _Slot, combine: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    return slot.run(step, combine(slot.of(step), other.of(step)))


def _with_result(
    step: Step, output: int, shape: tuple[int, ...] | None, alter: Callable[[Tensor], Tensor]
) -> Any:
    value = _output_of(step, output)
    shaped = value if shape is None else value.reshape(shape)
    return with_output(step, output, _alter_tensor(shaped, alter).reshape(value.shape))


def _with_result_of(
    step: Step, output: int, other: _Slot, combine: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    return with_output(step, output, combine(_output_of(step, output), other.of(step)))


def _output_of(step: Step, output: int) -> Tensor:
    result = step.results
    value: Tensor = result if isinstance(result, torch.Tensor) else result[output]
    return value


def _alter_tensor(value: Tensor, alter: Callable[[Tensor], Tensor]) -> Tensor:
    """What a change makes of a tensor.

    Raises:
        ValueError: it changes nothing, or leaves one value, which has many reasons.
    """
    other = alter(value)
    if torch.equal(other, value):
        raise ValueError("it changes nothing")
    first = other.reshape(-1)[0]
    if value.numel() > 1 and bool(((other - first).abs() <= _SAME * first.abs()).all()):
        raise ValueError("one value everywhere has many reasons")
    return other.to(value.dtype)
