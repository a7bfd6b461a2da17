"""What an operator read instead of one of its operands: solved for from its result.

The result and the other operands determine an operand: a sum by subtraction, a matrix product or a
convolution by least squares. Each value that was read is then looked for in the operand. The places
where the values are found say which were read: those of another tile, in another order, of another
operand. Where the result does not determine an operand, its tiles are the unknowns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.calls import step_names
from paritas.core.diagnosis.case import unravel, widen
from paritas.core.diagnosis.patterns.arrangements import describe_places
from paritas.core.diagnosis.patterns.attention import is_attention, weights_and_values
from paritas.core.diagnosis.patterns.dropping import dropped_elements
from paritas.core.diagnosis.patterns.fits import is_determined
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.limited import Limits, limits_of
from paritas.core.diagnosis.patterns.linear_maps import windows_in_rows
from paritas.core.diagnosis.patterns.steps import (
    first_of,
    take_slices,
    with_altered,
    with_order,
)
from paritas.core.diagnosis.patterns.sums import PRODUCTS, orders_of_terms
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step

# Larger results and operands are not solved for.
_MOST_ELEMENTS = 1 << 18
_MOST_TERMS = 512
# Matrices with a larger condition number hide what was multiplied by them.
_MOST_CONDITION = 1e7
# What is multiplied by less than this share of the largest factor is not seen.
_UNSEEN = 1e-6
_WHOLE_PLACE = 1e-6
# What is found at random may be this near, as a share of the values.
_BY_CHANCE = 0.02
# A match of values that is not better than this is none, whatever its chance.
_NEAR = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class _Result:
    """The result of one operator of a call, as the candidate shows it.

    Attributes:
        step: the operator in float64.
        given: what the candidate shows that it gave.
        right: what it should give.
    """

    step: Step
    given: Tensor
    right: Tensor


def solved_operands(
    step: Step,
    predict: Callable[[Variation], Tensor | None],
    candidate: Tensor,
    around: Sequence[Tensor] = (),
) -> Iterator[Variation]:
    """The operator with another operand, which gives the candidate.

    Args:
        predict: the value in question if the operator is computed so.
        candidate: the candidate, in float64.
        around: other tensors that might have been read.
    """
    yield from _rearranged_operands(step)
    if not _is_solvable(step) or candidate.numel() > _MOST_ELEMENTS:
        return
    result = result_of(predict, candidate)
    if result is None:
        return
    if any(True for _ in _slices_of(result.given, result.right)):
        return  # the result is right, but at other places
    variations = [
        variation for reading in _readings(result) for variation in reading.variations(around)
    ]
    yield from variations
    if not variations and (step.name in PRODUCTS or is_attention(step)):
        yield from _tile_variations(result)


# Fewer values that are found in other places say nothing of places.
_FEWEST_MOVED = 2
_SUMS = step_names("arithmetic")


def _is_solvable(step: Step) -> bool:
    if step.name in _SUMS:
        return isinstance(step.values.get("other"), torch.Tensor)
    is_forward = is_attention(step) and "grad_out" not in step.values
    return step.name in PRODUCTS or step.name == "convolution" or is_forward


# --- The result of one of several operators -------------------------------------------------------


def result_of(predict: Callable[[Variation], Tensor | None], candidate: Tensor) -> _Result | None:
    """None if what comes after the operator does more than move, scale and offset its result."""
    steps: list[Step] = []

    def look(step: Step) -> Any:
        steps.append(step)
        return step.run()

    def predict_replaced(make: Callable[[Tensor], Tensor]) -> Tensor | None:
        def change(step: Step) -> Any:
            right = first_of(step.run())
            return step.with_first(make(right.double()).to(right.dtype))

        return predict(Variation(PatternKind.WRONG_INDEX, "", change))

    if predict(Variation(PatternKind.WRONG_INDEX, "", look)) is None or not steps:
        return None
    right = first_of(steps[0].run())
    if right.numel() != candidate.numel():
        return None
    numbers = torch.arange(right.numel(), dtype=torch.float64, device=right.device)
    parts = [
        predict_replaced(torch.zeros_like),
        predict_replaced(torch.ones_like),
        predict_replaced(lambda value: numbers.reshape(value.shape)),
    ]
    if any(part is None or not bool(torch.isfinite(part).all()) for part in parts):
        return None
    none, at_one, counted = (part.reshape(-1) for part in parts if part is not None)
    slope = at_one - none
    # What is multiplied by zero later on is not seen: it counts as right.
    seen_here = slope.abs() > _UNSEEN * float(slope.abs().max())
    if 2 * int(seen_here.sum()) < len(slope):
        return None
    places = ((counted - none) / slope)[seen_here]
    rounded = places.round().long()
    is_place = (places - rounded).abs() <= _WHOLE_PLACE * max(1, right.numel())
    if not bool(is_place.all()) or len(torch.unique(rounded)) < len(rounded):
        return None
    if bool((rounded < 0).any() | (rounded >= right.numel()).any()):
        return None
    flat = widen(right).reshape(-1).clone()
    flat[rounded] = ((candidate.reshape(-1) - none) / slope)[seen_here]
    if not bool(torch.isfinite(flat).all() and torch.isfinite(right).all()):
        return None
    return _Result(steps[0], flat.reshape(right.shape), widen(right))


# --- What was read --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Reading:
    """What an operator read instead of an operand.

    Attributes:
        name: the operand's.
        value: what was read.
        operand: what should have been read, in the same shape.
        others: the other operands that might have been read, by name.
        put: the operator with something else in the operand's place.
        own: the operand as it is in the program, in the shape of the values.
        is_bias: it is added to the rest of the result.
    """

    name: str
    value: Tensor
    operand: Tensor
    others: dict[str, Tensor]
    put: Callable[[Step, Tensor], Any]
    own: Callable[[Step], Tensor]
    is_bias: bool = False

    def variations(self, around: Sequence[Tensor]) -> Iterator[Variation]:
        """The operator with what was read, if that is known by name.

        Args:
            around: other tensors that might have been read.
        """
        if _is_near(self.value, self.operand):
            return  # it is something else that is wrong
        foreign = partial(self._foreign, around)
        # A bound is one number, and a place for each element that was moved is many.
        ways = (
            self._limited_variations,
            self._moved_variations,
            self._replaced_variations,
            foreign,
            self._scaled_variations,
            self._bent,
            self._find_dropped_elements,
        )
        for variations in ways:
            proposals = list(variations())
            yield from proposals
            if proposals:
                return

    def _limited_variations(self) -> Iterator[Variation]:
        near = _NEAR * float(self.operand.square().mean().sqrt())
        limits = limits_of(self.value, self.operand, near)
        if limits is not None and limits != Limits(0.0, None):  # that is a relu
            sentence = f"{self.name} is limited to {limits.words}"
            yield self._variation(PatternKind.CLIPPED, sentence, limits.apply)

    def _moved_variations(self) -> Iterator[Variation]:
        for axis, source in _slices_of(self.value, self.operand):
            kind, words = describe_places(source)
            sentence = f"{self.name} is read from other places along axis {axis}: {words}"
            take = partial(take_slices, axis=axis, order=source)
            yield self._variation(kind, sentence, take)
            return
        elements = _elements_of(self.value, self.operand)
        if elements is None:
            yield from self._moved_with_signs()
            return
        moved = elements != torch.arange(len(elements))
        if len(self.value.flatten()[moved].unique()) < _FEWEST_MOVED:
            return  # one value, such as 0, is found anywhere
        kind, words = _describe_elements(elements.reshape(self.value.shape), self.operand)
        sentence = f"{self.name} is read from other places: {words}"
        variation = self._variation(kind, sentence, partial(_take_elements, source=elements))
        yield dataclasses.replace(variation, chosen=int(moved.sum()))

    def _moved_with_signs(self) -> Iterator[Variation]:
        source = _elements_of(self.value.abs(), self.operand.abs())
        if source is None or torch.equal(source, torch.arange(len(source))):
            return
        taken = self.operand.reshape(-1)[source].reshape(self.value.shape)
        signs = self.value.sign() * taken.sign()
        sentence = f"{self.name} is read from other places, with other signs"
        take = lambda value: _take_elements(value, source) * signs.to(value)  # noqa: E731
        yield self._variation(PatternKind.WRONG_INDEX, sentence, take)

    def _replaced_variations(self) -> Iterator[Variation]:
        for name, other in self.others.items():
            if _is_broadcast(other, self.value) and _is_near(self.value, other):
                sentence = f"{self.name} is never read: {name} is used in its place"
                change = partial(_with_other, reading=self, name=name)
                yield Variation(PatternKind.MISSING_OPERAND, sentence, change)
                return

    def _foreign(self, around: Sequence[Tensor]) -> Iterator[Variation]:
        for number, other in enumerate(around):
            for turned in (other, other.mT) if other.dim() > 1 else (other,):
                if _is_broadcast(turned, self.value) and _is_near(self.value, widen(turned)):
                    sentence = f"{self.name} is never read: tensor {number} of the call is used"
                    words = f"{sentence} in its place"
                    put = partial(_put_instead, turned)
                    yield self._variation(PatternKind.MISSING_OPERAND, words, put)
                    return

    def _scaled_variations(self) -> Iterator[Variation]:
        if not self.is_bias:
            return  # it is the result that is scaled, or a factor of the operator is another one
        size = float(self.operand.square().sum())
        factor = float((self.value * self.operand).sum()) / size if size else 0.0
        near = float(f"{factor:.6g}")
        if abs(near) < _NEAR or not _is_near(self.value, near * self.operand):
            return
        kind, sentence = PatternKind.FACTOR, f"{self.name} is multiplied by {near:g}"
        if self.is_bias and near == round(near) and near > 1:
            kind, sentence = PatternKind.REPEATED_BIAS, f"the bias is added {near:g} times"
        elif near == -1:
            kind, sentence = PatternKind.SIGN, f"{self.name} is negated"
        yield self._variation(kind, sentence, partial(torch.mul, other=near))

    def _bent(self) -> Iterator[Variation]:
        for name in _BENDING:
            function = UNARY[name]
            bent = function(self.operand)
            if bool(torch.isfinite(bent).all()) and _is_near(self.value, bent):
                sentence = f"{name} of {self.name} is used instead of {self.name}"
                yield self._variation(PatternKind.OTHER_FUNCTION, sentence, function)
                return

    def _find_dropped_elements(self) -> Iterator[Variation]:
        dropped = dropped_elements(self.value, self.operand)
        if dropped is not None:
            residual = dropped.kept * dropped.factor
            sentence = f"{self.name}: {dropped.sentence}"
            yield self._variation(dropped.kind, sentence, lambda value: value * residual.to(value))

    def _variation(
        self, kind: PatternKind, sentence: str, alter: Callable[[Tensor], Tensor]
    ) -> Variation:
        def change(step: Step) -> Any:
            operand = self.own(step)
            return self.put(step, alter(operand).to(operand.dtype))

        return Variation(kind, sentence, change)


_BENDING = tuple(
    name
    for name in ("relu", "abs", "gelu", "silu", "sigmoid", "tanh", "exp", "square")
    if name in UNARY
)


def _with_other(step: Step, reading: _Reading, name: str) -> Any:
    return reading.put(step, step.values[name])


def _put_instead(other: Tensor, value: Tensor) -> Tensor:
    return other.to(value).expand_as(value)


def _take_elements(value: Tensor, source: Tensor) -> Tensor:
    return value.reshape(-1)[source.to(value.device)].reshape(value.shape)


def _is_broadcast(other: Tensor, value: Tensor) -> bool:
    """Whether it may be read in the place of a value, as it is or along further axes."""
    sizes = zip(reversed(other.shape), reversed(value.shape), strict=False)
    return 0 < other.dim() <= value.dim() and all(length in (1, size) for length, size in sizes)


def _is_near(value: Tensor, other: Tensor) -> bool:
    size = float(other.square().mean().sqrt())
    return float((value - other).abs().max()) <= _NEAR * max(size, 1e-30)


# --- Operands by operator -------------------------------------------------------------------------


def _readings(result: _Result) -> Iterator[_Reading]:
    step = result.step
    if step.name in _SUMS:
        yield from _summands(result)
    elif step.name in PRODUCTS:
        yield from _factors(result)
    elif is_attention(step):
        yield from _values(result)
    else:
        yield from _kernels(result)


def _reading(step: Step, name: str, value: Tensor, *, is_bias: bool = False) -> _Reading:
    """An operand that has the shape of what was read, or broadcasts to it."""
    operands = {
        key: widen(operand)
        for key, operand in step.values.items()
        if isinstance(operand, torch.Tensor) and operand.is_floating_point() and key != name
    }

    def put(step: Step, other: Tensor) -> Any:
        return step.run(**{name: other})

    def read_own(step: Step) -> Tensor:
        operand: Tensor = step.values[name]
        return operand.expand(value.shape)

    return _Reading(name, value, widen(read_own(step)), operands, put, read_own, is_bias)


def _summands(result: _Result) -> Iterator[_Reading]:
    step, candidate = result.step, result.given
    if not isinstance(step.values["self"], torch.Tensor):
        return
    left, right = (widen(step.values[name]) for name in ("self", "other"))
    alpha = float(step.values.get("alpha", 1))
    solved: tuple[Tensor, Tensor]
    if step.name in ("add", "sub"):
        alpha = alpha if step.name == "add" else -alpha
        solved = candidate - alpha * right, (candidate - left) / (alpha or math.nan)
    elif step.name == "mul":
        solved = candidate / right, candidate / left
    elif step.values.get("rounding_mode") is None:
        solved = candidate * right, left / candidate
    else:
        return
    for name, value in zip(("other", "self"), solved[::-1], strict=True):
        # Where it is multiplied by zero, it may be anything.
        finite = torch.isfinite(value)
        if bool(finite.any()):
            original = widen(step.values[name]).expand_as(value)
            yield _reading(step, name, torch.where(finite, value, original))


def _factors(result: _Result) -> Iterator[_Reading]:
    step = result.step
    left, right = PRODUCTS[step.name]
    a, b = widen(step.values[left]), widen(step.values[right])
    product = _product_given(result)
    if product is None:
        return
    if step.values.get("beta"):
        alpha, beta = (float(step.values[name]) for name in ("alpha", "beta"))
        yield _reading(step, "self", (result.given - alpha * (a @ b)) / beta, is_bias=True)
    if a.shape[-1] > _MOST_TERMS:
        return
    for name, value in (
        (right, _solution(a, product)),
        (left, _solution(b.mT, product.mT)),
    ):
        if value is not None:
            yield _reading(step, name, value if name == right else value.mT)


def _values(result: _Result) -> Iterator[_Reading]:
    """The values of attention, if no heads share them."""
    weights, value = _attention_product(result.step)
    if value.shape != result.step.values["value"].shape or weights.shape[-1] > _MOST_TERMS:
        return
    read = _solution(weights, result.given.reshape(*weights.shape[:-1], -1))
    if read is not None:
        yield _reading(result.step, "value", read)


def _attention_product(step: Step) -> tuple[Tensor, Tensor]:
    """The weights and the values whose product is the result."""
    weights, value = weights_and_values(step)
    return widen(weights), widen(value)


def _product_given(result: _Result) -> Tensor | None:
    values = result.step.values
    if "beta" not in values:
        return result.given
    alpha, beta = float(values["alpha"]), float(values["beta"])
    return (result.given - beta * widen(values["self"])) / alpha if alpha else None


def _solution(matrix: Tensor, product: Tensor) -> Tensor | None:
    rows, columns = matrix.shape[-2:]
    if rows < columns or rows * columns > _MOST_ELEMENTS:
        return None
    if not is_determined(matrix, _MOST_CONDITION):
        return None
    value: Tensor = torch.linalg.lstsq(matrix, product).solution
    residual = (matrix @ value - product).abs().max()
    is_exact = float(residual) <= _NEAR * float(product.abs().max())
    return value if is_exact else None


def _kernels(result: _Result) -> Iterator[_Reading]:
    """The bias and the kernel of a convolution."""
    step, values = result.step, result.step.values
    if values["bias"] is not None:
        without = widen(step.run(bias=None))

        def spread_bias(step: Step) -> Tensor:
            bias: Tensor = step.values["bias"]
            return bias.reshape(1, -1, *[1] * (without.dim() - 2)).expand(without.shape)

        def add_bias(step: Step, value: Tensor) -> Any:
            return step.run(bias=None) + value

        bias, read = widen(spread_bias(step)), result.given - without
        yield _Reading("the bias", read, bias, {}, add_bias, spread_bias, is_bias=True)
    if values["transposed"] or values["groups"] != 1 or values["input"].dim() not in (3, 4):
        return
    weight, candidate_result = widen(values["weight"]), result.given
    if values["bias"] is not None:
        candidate_result = candidate_result - bias
    rows = windows_in_rows(widen(values["input"]), values)[0]
    if rows.shape[1] > _MOST_TERMS:
        return
    target = candidate_result.movedim(1, -1).reshape(-1, candidate_result.shape[1])
    value = _solution(rows, target)
    if value is not None:
        yield _reading(step, "weight", value.T.reshape(weight.shape))


# --- Where values are found -----------------------------------------------------------------------

_MOST_SLICES = 1024


def _slices_of(value: Tensor, operand: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The axes along which each slice is one of the operand's, and which."""
    for axis in reversed(range(operand.dim())):
        size = operand.shape[axis]
        if not 1 < size <= _MOST_SLICES or value.shape != operand.shape:
            continue
        slices, other_slices = (
            tensor.movedim(axis, 0).reshape(size, -1) for tensor in (value, operand)
        )
        if slices.shape[1] < 2:  # noqa: PLR2004
            continue
        way = "donot_use_mm_for_euclid_dist"
        apart = torch.cdist(slices, other_slices, compute_mode=way)
        least, source = apart.min(dim=1)
        scale = float(other_slices.square().sum(1).mean().sqrt())
        if float(least.max()) > _NEAR * scale or torch.equal(source, torch.arange(size)):
            continue
        # Equal slices say nothing about where they come from: the own place, if it can be.
        from_itself = apart.diagonal() <= least + 1e-9 * scale
        source = torch.where(from_itself, torch.arange(size), source)
        if not torch.equal(source, torch.arange(size)):
            yield axis, source


def _elements_of(value: Tensor, operand: Tensor) -> Tensor | None:
    """The element of the operand that each value is; None if some are not found."""
    ordered, places = operand.reshape(-1).sort()
    flat = value.reshape(-1).contiguous()
    count = len(ordered)
    if count < 4 or not float(ordered[-1] - ordered[0]) > 0:  # noqa: PLR2004
        return None
    above = torch.searchsorted(ordered, flat).clamp(1, count - 1)
    nearer = (flat - ordered[above - 1]).abs() <= (ordered[above] - flat).abs()
    nearest = torch.where(nearer, above - 1, above)
    apart = (flat - ordered[nearest]).abs()
    # Numbers that are this near to some element by chance are no match.
    typical = float(operand.square().mean().sqrt())
    if float(apart.max()) * len(torch.unique(ordered)) > _BY_CHANCE * typical:
        return None
    source = places[nearest]
    identity = torch.arange(len(flat))
    is_own = (flat - operand.reshape(-1)).abs() <= apart + 1e-9 * typical
    return torch.where(is_own, identity, source)


def _only_axis(value: Tensor) -> int | None:
    """The axis along which a tensor that was broadcast differs; None if there are several."""
    axes = [
        axis
        for axis, size in enumerate(value.shape)
        if size > 1 and not bool((value == value.narrow(axis, 0, 1)).all())
    ]
    return axes[0] if len(axes) == 1 else None


def _describe_elements(source: Tensor, operand: Tensor) -> tuple[PatternKind, str]:
    """What the places of the elements have in common."""
    own_axis, other = (_only_axis(tensor) for tensor in (operand, operand.reshape(-1)[source]))
    if own_axis is not None and other is not None and own_axis != other:
        return PatternKind.WRONG_AXIS, f"it lies along axis {other} instead of axis {own_axis}"
    numbers = torch.arange(operand.numel()).reshape(operand.shape)
    flat = operand.reshape(-1)
    read = flat[source]
    for first in range(operand.dim()):
        for second in range(first + 1, operand.dim()):
            swapped = numbers.transpose(first, second)
            words = f"axes {first} and {second}"
            if swapped.shape == operand.shape and torch.equal(flat[swapped], read):
                return PatternKind.TRANSPOSE, f"{words} are swapped"
            others = swapped.reshape(operand.shape), numbers.reshape(swapped.shape)
            if any(
                torch.equal(flat[order], read)
                for order in (others[0], others[1].transpose(first, second))
            ):
                return PatternKind.PERMUTATION, f"its memory has {words} in the other order"
    moved = int((source.reshape(-1) != torch.arange(source.numel())).sum())
    some = f"{moved} of {source.numel()} elements"
    if torch.equal(read.reshape(-1).sort().values, flat.sort().values):
        return PatternKind.PERMUTATION, f"{some} are in another order"
    return PatternKind.WRONG_INDEX, f"{some} are those of other places"


# --- Tiles ----------------------------------------------------------------------------------------

_MOST_TILES = 16
# So many equations for each unknown.
_ENOUGH = 1.5
_WHOLE = 1e-3


def _tile_variations(result: _Result) -> Iterator[Variation]:
    """A matrix product whose tiles along the summed axis are multiplied by other tiles."""
    step, product = result.step, _product_given(result)
    if is_attention(step):
        left, right = "", "value"
        a, b = _attention_product(step)
        if b.shape != step.values["value"].shape:
            return  # shared by heads
    else:
        left, right = PRODUCTS[step.name]
        a, b = widen(step.values[left]), widen(step.values[right])
    if product is None or product.shape != (a @ b).shape:
        return
    length = a.shape[-1]
    for size in _tile_sizes(length):
        weights = _solve_tiles(a, b, product, size)
        if weights is not None:
            change = partial(_with_tiles, name=right, weights=weights, size=size)
            yield from _describe_tiles((left, right), change, size, length)
            return


def _tile_sizes(length: int) -> list[int]:
    powers = [2**power for power in range(10, -1, -1)]
    parts = [-(-length // count) for count in (2, 3, 4, 5, 6, 8)]
    sizes = sorted({*powers, *parts}, reverse=True)
    return [size for size in sizes if size < length and -(-length // size) <= _MOST_TILES]


def _solve_tiles(a: Tensor, b: Tensor, product: Tensor, size: int) -> Tensor | None:
    """How often each tile of the first factor is multiplied by each of the second."""
    length = a.shape[-1]
    count = -(-length // size)
    if product.numel() < _ENOUGH * count * count:
        return None
    most = max(256, 4 * count * count)
    chosen = torch.arange(product.numel())
    if len(chosen) > most:
        chosen = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:most]
    at = unravel(chosen, product.shape)
    more = count * size - length
    rows = torch.nn.functional.pad(a[(*at[:-1],)], (0, more)).reshape(-1, count, size)
    columns = torch.nn.functional.pad(b.mT[(*at[:-2], at[-1])], (0, more)).reshape(-1, count, size)
    matrix = (rows @ columns.mT).reshape(len(chosen), -1)
    target = product[at]
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd")
    if int(solution.rank) < matrix.shape[1]:
        return None
    residual = (matrix @ solution.solution).squeeze(1) - target
    weights = solution.solution.reshape(count, count)
    rounded = weights.round()
    is_exact = float(residual.abs().max()) <= _NEAR * float(target.abs().max())
    is_whole = float((weights - rounded).abs().max()) <= _WHOLE
    return rounded if is_exact and is_whole else None


def _describe_tiles(
    names: tuple[str, str], change: partial[Any], size: int, length: int
) -> Iterator[Variation]:
    """The product with these tiles, in words: rows are tiles of the first factor.

    Args:
        names: the factors.
        change: the product, with the weights of all pairs of tiles.
    """
    weights: Tensor = change.keywords["weights"]
    count = len(weights)
    diagonal = torch.diag(weights)
    is_own = bool((weights == torch.diag(diagonal)).all())
    tiles = f"of the {count} tiles of {size} terms (of {length})"
    if is_own:
        lost, often = ((diagonal == 0).nonzero().reshape(-1), (diagonal > 1).nonzero().reshape(-1))
        if bool((diagonal < 0).any()) or (not len(lost) and not len(often)):
            return
        if bool((diagonal == diagonal[0]).all()):
            return  # one factor for all terms
        if len(lost) and len(often):
            if float(diagonal.sum()) != count:
                return
            sentence = f"{_numbers(often)} {tiles} is used again in the place of {_numbers(lost)}"
            kind = PatternKind.STALE
        elif len(lost):
            kind, sentence = PatternKind.PARTIAL_SUM, f"{_numbers(lost)} {tiles} left out"
        else:
            kind = PatternKind.DOUBLED_REDUCTION
            sentence = f"{_numbers(often)} {tiles} count too often"
        yield Variation(kind, sentence, change)
        return
    for name, table in zip(names, (weights, weights.T), strict=True):
        if name and bool(((table == 0) | (table == 1)).all()) and bool((table.sum(0) == 1).all()):
            kind, words = describe_places(table.argmax(0))
            sentence = f"tiles of {size} along the summed axis of {name} are those of other places"
            yield Variation(kind, f"{sentence}: {words}", change)
            return


def _numbers(places: Tensor) -> str:
    return f"number {', '.join(map(str, places.tolist()))}"


def _with_tiles(step: Step, name: str, weights: Tensor, size: int) -> Any:
    """The product with each tile of the second factor replaced by what multiplies the first's."""
    b = step.values[name]
    count, length = len(weights), b.shape[-2]
    tiles = torch.nn.functional.pad(b, (0, 0, 0, count * size - length))
    tiles = tiles.reshape(*b.shape[:-2], count, size, b.shape[-1])
    mixed = torch.einsum("ij,...jsn->...isn", weights.to(b), tiles)
    return step.run(**{name: mixed.reshape(*b.shape[:-2], count * size, -1)[..., :length, :]})


# --- Operands in other orders that the result does not determine ----------------------------------

_MOST_AXES = 4


def _rearranged_operands(step: Step) -> Iterator[Variation]:
    """The memory of an operand read as if its axes were in another order; other tiles of it."""
    operands = {name: operand for name, operand in step.values.items() if _is_operand(operand)}
    if torch.Tag.pointwise not in step.operator.tags:  # or else it is the result
        for name, value in operands.items():
            yield from _other_layouts(name, value)
    if len(operands) < 2:  # noqa: PLR2004
        return  # it is the result that is read elsewhere
    for name, value in operands.items():
        long = [axis for axis, size in enumerate(value.shape) if size > 1]
        if not 2 <= len(long) <= _MOST_AXES or value.numel() > _MOST_ELEMENTS:  # noqa: PLR2004
            continue
        for first, second in itertools.combinations(long, 2):
            axes = f"axes {first} and {second}"
            sentence = f"the memory of {name} is read with {axes} in the other order"
            for back in (False, True):
                read = partial(_reread, axes=(first, second), back=back)
                yield Variation(PatternKind.PERMUTATION, sentence, with_altered(name, read))
    for name in PRODUCTS.get(step.name, ()):
        for word in _BENDING:
            sentence = f"{word} of {name} is used instead of {name}"
            change = with_altered(name, UNARY[word])
            yield Variation(PatternKind.OTHER_FUNCTION, sentence, change)
    if is_attention(step):
        for name in ("query", "key", "value"):
            yield from _other_tiles(name, -2, step.values[name].shape[-2])
            yield from _other_orders(name, step.values[name].shape[-1])


def _other_layouts(name: str, value: Tensor) -> Iterator[Variation]:
    """The channels behind all other axes in memory, and before them where they are read."""
    if value.dim() < 3 or value.shape[1] < 2 or value.numel() > _MOST_ELEMENTS:  # noqa: PLR2004
        return
    for has, reads in (("last", "first"), ("first", "last")):
        memory = f"the memory of {name} has its channels {has}"
        sentence = f"{memory}, and is read as if they were {reads}"
        change = with_altered(name, partial(_reread_channels, has_last=has == "last"))
        yield Variation(PatternKind.PERMUTATION, sentence, change)


def _reread_channels(value: Tensor, *, has_last: bool) -> Tensor:
    last = value.movedim(1, -1)
    return last.reshape(value.shape) if has_last else value.reshape(last.shape).movedim(-1, 1)


def _is_operand(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


def _reread(value: Tensor, axes: tuple[int, int], *, back: bool) -> Tensor:
    swapped = value.transpose(*axes)
    return value.reshape(swapped.shape).transpose(*axes) if back else swapped.reshape(value.shape)


_FEW_TILES = 8


def _other_tiles(name: str, axis: int, length: int) -> Iterator[Variation]:
    """One tile, or each of them, that is not loaded: the one before is used again."""
    for size in _tile_sizes(length):
        count = -(-length // size)
        if count > _FEW_TILES:
            continue
        for position in (*range(1, count), None):
            source = torch.arange(length)
            late = source >= size if position is None else source // size == position
            source = torch.where(late, source - size, source)
            which = "each tile" if position is None else f"tile {position} of {count}"
            sentence = f"{which} of {size} along axis {axis} of {name} is not loaded"
            change = with_order(name, axis, source)
            yield Variation(PatternKind.STALE, f"{sentence}: the one before is used again", change)


def _other_orders(name: str, width: int) -> Iterator[Variation]:
    for words, order in orders_of_terms(width):
        sentence = f"{name} has another order along its last axis: {words}"
        yield Variation(PatternKind.PERMUTATION, sentence, with_order(name, -1, order))
