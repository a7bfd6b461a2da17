"""Pointwise operators as another expression of the same operands, by a small grammar.

Functions of an operand, functions of these, sums, products and quotients of two of them, with
numbers that are solved for. They are tried on some of the elements; what gives these, in the
fewest words, is then a prediction as any other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import same, widen
from paritas.core.diagnosis.patterns.functions import UNARY
from paritas.core.diagnosis.patterns.steps import (
    check_varied,
    first_of,
    with_altered,
    with_result,
)
from paritas.core.diagnosis.patterns.variations import Variation
from paritas.core.numerics.criterion import MAX_Z
from paritas.core.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from paritas.core.diagnosis.calls import Step
    from paritas.core.diagnosis.case import Case


# So many elements are compared with all expressions, and so few decide nothing.
_SAMPLED = 64
_FEWEST = 4
# Numbers are solved for with so many.
_FEWEST_SOLVED = 12
# The share of them that an expression must give.
_HOPEFUL = 0.97
# The digits of a number that may be stated, and the most of its error that they may leave.
_DIGITS = range(1, 5)
_MOST_OPERANDS = 3
# So many expressions are tried on all elements.
_MOST_TRIED = 12


@dataclasses.dataclass(frozen=True)
class Expression:
    """What may be computed instead, of the operands in their order.

    Attributes:
        said: how it is written.
        length: how many functions, operands and numbers it has.
        numbers: how many of these were solved for.
    """

    said: str
    length: float
    compute: Callable[..., Tensor]
    numbers: int = 0
    kind: PatternKind = PatternKind.OTHER_FUNCTION


# The share of the elements of many rows that is looked at first: one of so many.
_PART_LOOKED_AT_FIRST = 6


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some elements of the candidate, with how far an expression may be off."""

    given: Tensor
    noise: Tensor

    @classmethod
    def of(cls, case: Case, part: Tensor) -> tuple[Sample, Tensor] | None:
        """Elements of a part, most of them wrong ones, and where they are; None if too few."""
        places = (part & case.both_finite).flatten().nonzero().flatten()
        wrong = case.wrong.flatten()[places]
        chosen = []
        for some, most in ((places[wrong], _SAMPLED), (places[~wrong], _SAMPLED // 2)):
            step = max(1, len(some) // most)
            chosen.append(some[::step][:most])
        at = torch.cat(chosen)
        candidate = case.given.flatten()[at]
        wrong = case.given.flatten()[chosen[0]]
        # One or two values are limits, or what was put there.
        few = 3 if case.is_exact else 4
        is_enough = len(candidate.unique()) >= few and len(wrong.unique()) >= few - 1
        if len(chosen[0]) < _FEWEST or not is_enough:
            return None
        sample = cls(candidate, case.allowed.flatten()[at])
        return None if sample.is_straight(case.right.flatten()[at]) else (sample, at)

    def is_straight(self, right: Tensor) -> bool:
        """Whether it is the right value with a factor or with an offset, which have kinds."""
        alone = right.dot(self.given) / right.dot(right)
        offset = (self.given - right).median()
        return bool(self.fits(right + offset) | self.fits(alone * right))

    def fits(self, values: Tensor) -> Tensor:
        """Which rows of values are the sample's."""
        first, count = values.shape[-1] // _PART_LOOKED_AT_FIRST, values.shape[-1]
        if values.dim() == 1 or not first:
            return self._are_near(values, count).double().mean(-1) >= _HOPEFUL
        # Most rows are far off, and cannot be near enough whatever their other elements are.
        most = self._are_near(values[..., :first], first).sum(-1) + count - first
        may_fit = most + 1 >= _HOPEFUL * count
        fits = torch.zeros_like(may_fit)
        fits[may_fit] = self._are_near(values[may_fit], count).double().mean(-1) >= _HOPEFUL
        return fits

    def _are_near(self, values: Tensor, count: int) -> Tensor:
        """Which of the first elements of each row are near."""
        candidate, noise = self.given[:count], self.noise[:count]
        unit = torch.maximum(noise, 2 * torch.finfo(torch.float64).eps * candidate.abs())
        return same(values, candidate) | ((values - candidate).abs() <= MAX_Z * unit)

    def invert_operation(self, compute: Callable[[Tensor], Tensor], slope: Tensor) -> Sample:
        """The sample of what an operation is applied to, by the size of its derivative."""
        return Sample(compute(self.given), self.noise * slope.abs())


# --- The operands ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operands:
    """The tensors of which an operator computes each element, and some elements of them."""

    step: Step
    names: tuple[str, ...]
    sampled: tuple[Tensor, ...]

    @classmethod
    def of(cls, step: Step, case: Case, at: Tensor) -> Operands | None:
        """None if an element depends on more than its own place."""
        values = {name: value for name, value in _operand_values(step).items() if value.numel() > 1}
        if not 1 <= len(values) <= _MOST_OPERANDS:
            return None
        try:
            sampled = [
                value.expand(case.shape).flatten()[at].detach().cpu() for value in values.values()
            ]
            if any(len(sample.unique()) < _FEWEST for sample in sampled):
                return None  # of few numbers, some function gives any others
            operands = cls(step, tuple(values), tuple(sampled))
            alone = operands.own(
                *(widen(sample) if sample.is_floating_point() else sample for sample in sampled)
            )
        except (RuntimeError, ValueError, TypeError, LookupError):
            return None
        right = case.right.flatten()[at]
        fits = alone.shape == right.shape and torch.allclose(
            alone.double(), right, rtol=_SAME, atol=_SAME * float(right.abs().max()), equal_nan=True
        )
        return operands if fits else None

    def own(self, *values: Tensor) -> Tensor:
        """The operator of other values."""
        if self.step.name == "glu":
            return values[0] * values[1].sigmoid()
        changes = dict(zip(self.names, values, strict=True))
        if not isinstance(self.step.values.get("other", values[0]), torch.Tensor):
            del changes["other"]  # a number
        return first_of(self.step.run(**changes))

    def change(self, expression: Expression, places: tuple[int, ...]) -> Callable[[Step], Any]:
        """The operator computed by an expression of some of its operands."""

        def run(step: Step) -> Any:
            result = first_of(step.run())
            values = [_operand_values(step)[name].expand_as(result) for name in self.names]
            return step.with_first(
                expression.compute(*(values[position] for position in places)).to(result)
            )

        return run


_SAME = 1e-4
# A series whose error is a smaller share of the values is an approximation.
_NEAR = 0.5


def _operand_values(step: Step) -> dict[str, Tensor]:
    if step.name == "glu":
        halves = step.values["self"].chunk(2, step.values["dim"])
        return dict(zip(("the first half", "the second half"), halves, strict=True))
    values = {name: value for name, value in step.values.items() if isinstance(value, torch.Tensor)}
    number = step.values.get("other")
    if isinstance(number, int | float) and len(values) == 1:
        values["other"] = torch.full_like(values["self"], number, dtype=torch.float64)
    return values


def expressed_variations(
    step: Step, case: Case, part: Tensor
) -> tuple[int, list[tuple[float, int, Variation]]]:
    """How many expressions were tried, and those that give some elements, the shortest first.

    With each its length and how many of its numbers were solved for.
    """
    drawn = Sample.of(case, part)
    operands = None if drawn is None else Operands.of(step, case, drawn[1])
    if drawn is None or operands is None:
        return 0, []
    sample = drawn[0]
    expressions: list[tuple[tuple[int, ...], Expression]] = []
    wide = [widen(value) for value in operands.sampled]
    alone = operands.own if len(wide) == 1 and operands.sampled[0].is_floating_point() else None
    tables = {
        index: _Table.of(value, alone, step.name)
        for index, value in enumerate(wide)
        if not case.is_exact and bool((value != value[0]).any())
    }
    is_near = float(case.error.norm()) <= _NEAR * float(case.right.norm())
    tried = sum(len(operand_table.formats) for operand_table in tables.values())
    for position, table in tables.items():
        expressions += [((position,), each) for each in _of_one(sample, table, is_near=is_near)]
    for pair in itertools.permutations(range(len(wide)), 2):
        a, b = (wide[expression] for expression in pair)
        if pair[1] in tables:
            expressions += [(pair, each) for each in _of_two(sample, a, tables[pair[1]])]
        if pair[0] < pair[1]:
            expressions += [(pair, each) for each in _of_both(sample, a, b, exact=case.is_exact)]
            tried += len(_PLAIN) ** 2 * len(_PAIRS)
    if len(wide) > 1 and not case.is_exact:
        every = tuple(range(len(wide)))
        expressions += [(every, expression) for expression in _of_operator(sample, operands, wide)]
    shortest = _shortest(operands, expressions)
    if case.is_exact and shortest:  # only a plain operation, and what is made of it: few of these
        tried = int(
            min(tried, math.prod([len(_PAIRS), *[len(_OF_WHOLE)] * int(shortest[0][0] - 1)]))
        )
    return tried, shortest


def _of_operator(
    sample: Sample, operands: Operands, wide: Sequence[Tensor]
) -> Iterator[Expression]:
    for position, (sentence, function) in itertools.product(range(len(wide)), FUNCTIONS.items()):
        functions = [function if index == position else _keep for index in range(len(wide))]
        compute = _join(operands.own, functions)
        value = None if sentence == _IDENTITY else _attempt_compute(compute, wide)
        if value is not None and bool(sample.fits(value)):
            marks = [f"{{{index}}}" for index in range(len(wide))]
            marks[position] = sentence.format(marks[position])
            yield Expression(f"{operands.step.name}({', '.join(marks)})", 2, compute)


def _attempt_compute(compute: Callable[..., Tensor], values: Sequence[Tensor]) -> Tensor | None:
    try:
        return compute(*values)
    except (RuntimeError, TypeError, ValueError):
        return None


# --- Functions of functions -----------------------------------------------------------------------


def _keep(x: Tensor) -> Tensor:
    return x


def _compose(outer: Callable[..., Tensor], inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *values: outer(inner(*values))


def _join(
    outer: Callable[..., Tensor], inner: Sequence[Callable[[Tensor], Tensor]]
) -> Callable[..., Tensor]:
    """An operation of a function of each operand."""
    return lambda *values: outer(*(f(x) for f, x in zip(inner, values, strict=True)))


def _of_itself(pair: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: pair(x, x)


def _move(function: Callable[..., Tensor], factor: float, offset: float) -> Callable[..., Tensor]:
    """A function times a factor, and with a number added."""

    def compute(*values: Tensor) -> Tensor:
        value = function(*values)
        value = value if factor == 1 else value * factor
        return value if offset == 0 else value + offset

    return compute


def _shortest(
    operands: Operands, expressions: list[tuple[tuple[int, ...], Expression]]
) -> list[tuple[float, int, Variation]]:
    expressions.sort(key=lambda entry: (entry[1].length, entry[1].numbers))
    variations: dict[str, tuple[float, int, Variation]] = {}
    letters = ("x",) if len(operands.names) == 1 else operands.names
    for places, expression in itertools.islice(expressions, _MOST_TRIED):
        sentence = expression.said.replace("{}", "{0}").format(
            *(letters[position] for position in places)
        )
        words = f"{sentence} instead of {operands.step.name}"
        variation = Variation(expression.kind, words, operands.change(expression, places))
        variations.setdefault(sentence, (expression.length, expression.numbers, variation))
    return list(variations.values())


# --- The functions --------------------------------------------------------------------------------

_POWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "{} ** (1 / 3)": lambda x: x ** (1 / 3),
    "{} ** 3": lambda x: x**3,
    "{} ** 1.5": lambda x: x**1.5,
    "{} ** 4": lambda x: x**4,
    "{} ** 0.25": lambda x: x**0.25,
    "({} > 0)": lambda x: (x > 0).to(x.dtype),
    "clamp({}, 0, 1)": lambda x: x.clamp(0, 1),
    "clamp({}, max=0)": lambda x: x.clamp(max=0),
}
_IDENTITY = "{}"
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    _IDENTITY: _keep,
    **{_name.replace(" ", "_") + "({})": _f for _name, _f in UNARY.items() if " x)" not in _name},
    **_POWERS,
}
FUNCTIONS["cdf({})"] = FUNCTIONS.pop("the_normal_distribution_function({})")
_PLAIN: tuple[str, ...] = (
    *("{}", "neg({})", "abs({})", "square({})", "sqrt({})", "exp({})", "log({})", "sign({})"),
    *("reciprocal({})", "relu({})", "tanh({})", "sigmoid({})", "sin({})", "cos({})"),
    *("floor({})", "ceil({})", "round({})", "trunc({})", "silu({})", "gelu({})", "log1p({})"),
    *("expm1({})", "({} > 0)", "clamp({}, 0, 1)"),
)
_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "{} + {}": torch.add,
    "{} - {}": torch.sub,
    "{} * {}": torch.mul,
    "{} / {}": torch.div,
    "max({}, {})": torch.maximum,
    "min({}, {})": torch.minimum,
    "{} ** {}": torch.pow,
    "{} % {}": torch.remainder,
    "fmod({}, {})": torch.fmod,
    "hypot({}, {})": torch.hypot,
    "the larger in magnitude of {} and {}": lambda a, b: torch.where(a.abs() >= b.abs(), a, b),
    "the smaller in magnitude of {} and {}": lambda a, b: torch.where(a.abs() <= b.abs(), a, b),
    "atan2({}, {})": torch.atan2,
}
_ROUNDED = ("floor({})", "ceil({})", "round({})", "trunc({})")
# What may be made of a whole number, so that it stays one.
_OF_WHOLE = (*_ROUNDED, "neg({})", "abs({})", "square({})", "sign({})", "relu({})")


@dataclasses.dataclass(frozen=True)
class _Table:
    """Values of many expressions of one operand, one row each."""

    formats: list[str]
    functions: list[Callable[..., Tensor]]
    lengths: list[int]
    values: Tensor

    @classmethod
    def of(cls, x: Tensor, function: Callable[[Tensor], Tensor] | None, words: str) -> _Table:
        """All functions of an operand, and all functions of those."""
        functions = dict(FUNCTIONS)
        if function is not None:
            functions[f"{words}({{}})"] = function
        simple = _rows_of(functions, x[None])
        inner = {text: value[0] for text, value in simple.items()}
        deep = {text: value for text, value in inner.items() if text != _IDENTITY}
        table = cls([*inner], [functions[text] for text in inner], [], torch.empty(0))
        table.lengths.extend(int(text != _IDENTITY) for text in inner)
        rows = [torch.stack([*inner.values()])]
        outers = {text: value for text, value in functions.items() if text != _IDENTITY}
        for outer, values in _rows_of(outers, torch.stack([*deep.values()])).items():
            useful = _are_useful(values)
            rows.append(values[useful])
            for sentence in itertools.compress(deep, useful.tolist()):
                table.formats.append(outer.format(sentence))
                table.functions.append(_compose(functions[outer], functions[sentence]))
                table.lengths.append(2)
        return dataclasses.replace(table, values=torch.cat(rows))


def _rows_of(
    functions: Mapping[str, Callable[[Tensor], Tensor]], values: Tensor
) -> dict[str, Tensor]:
    """Functions of rows of values; only those that give something for some row."""
    rows: dict[str, Tensor] = {}
    for sentence, function in functions.items():
        value = _attempt_compute(function, [values])
        if value is not None and value.shape == values.shape and bool(_are_useful(value).any()):
            rows[sentence] = value.double()
    return rows


def _are_useful(rows: Tensor) -> Tensor:
    is_finite = torch.isfinite(rows).double().mean(-1) >= _HOPEFUL
    return is_finite & (rows != rows[:, :1]).any(-1)


# --- Of one operand -------------------------------------------------------------------------------


def _of_one(sample: Sample, table: _Table, *, is_near: bool) -> Iterator[Expression]:
    yield from _plain_ones(sample, table)
    yield from _scaled_ones(sample, table)
    simple = [at for at, length in enumerate(table.lengths) if length <= 1]
    values = table.values[simple]
    for sentence, pair in itertools.islice(_PAIRS.items(), 6):
        both = pair(values[:, None], values[None, :])
        for i, j in sample.fits(both).nonzero().tolist():
            left, right = simple[i], simple[j]
            words = sentence.format(table.formats[left], table.formats[right])
            both_functions = table.functions[left], table.functions[right]
            compute = _of_itself(_join(pair, both_functions))
            length = 2 + table.lengths[left] + table.lengths[right]
            yield Expression(words, length, compute)
    for sentence, pair in (("{} * {}", torch.mul), ("{} / {}", torch.div)):
        both = pair(values[:, None], values[None, :]).flatten(0, 1)
        names: list[str] = []
        functions: list[Callable[..., Tensor]] = []
        lengths: list[int] = []
        for left, right in itertools.product(simple, repeat=2):
            words = sentence.format(table.formats[left], table.formats[right])
            names.append(words)
            both_functions = table.functions[left], table.functions[right]
            functions.append(_of_itself(_join(pair, both_functions)))
            lengths.append(2 + table.lengths[left] + table.lengths[right])
        yield from _scaled_ones(sample, _Table(names, functions, lengths, both))
    yield from _series(sample, table.values[0], is_near=is_near)


def _plain_ones(sample: Sample, table: _Table) -> Iterator[Expression]:
    for at in sample.fits(table.values).nonzero().flatten().tolist():
        yield Expression(table.formats[at], table.lengths[at], table.functions[at])


def _scaled_ones(sample: Sample, table: _Table) -> Iterator[Expression]:
    """With a factor and a number added, which are solved for and must be short."""
    values, sampled_values = table.values.nan_to_num(0.0, 0.0, 0.0), sample.given
    if len(sampled_values) < _FEWEST_SOLVED:
        return
    weight = 1 / sample.noise.clamp(min=1e-300).square()
    weight = torch.where(torch.isfinite(sample.noise) & (sample.noise > 0), weight, 0.0)
    if not bool(weight.any()):
        weight = torch.ones_like(sampled_values)
    weight = weight / weight.max()
    total = weight.sum()
    mean = (values * weight).sum(-1, keepdim=True) / total
    middle = (sampled_values * weight).sum() / total
    apart = values - mean
    spread = (apart.square() * weight).sum(-1)
    slope = (apart * (sampled_values - middle) * weight).sum(-1) / spread
    start = middle - slope * mean[:, 0]
    alone = (values * sampled_values * weight).sum(-1) / (values.square() * weight).sum(-1)
    for factors, offsets, numbers in ((alone, torch.zeros_like(alone), 1), (slope, start, 2)):
        close = sample.fits(factors[:, None] * values + offsets[:, None])
        for at in close.nonzero().flatten().tolist():
            row = table.values[at]
            short = _short_numbers(float(factors[at]), float(offsets[at]), sample, row)
            if short is not None:
                yield _scale_expression(table, at, short, numbers)


def _short_numbers(
    factor: float, offset: float, sample: Sample, row: Tensor
) -> tuple[float, float] | None:
    """The shortest factor and offset near these that still give the sample."""
    for digits in _DIGITS:
        for short_factor, other in itertools.product(
            _round_either_way(factor, digits),
            _round_either_way(offset, digits) if offset else [0.0],
        ):
            if short_factor and bool(sample.fits(short_factor * row + other)):
                return short_factor, other
    return None


def _round_either_way(number: float, digits: int) -> list[float]:
    short = [float(f"{number:.{digits}g}")]
    if abs(number) < 10**-digits:
        short.append(0.0)
    inverse = float(f"{1 / number:.{digits}g}") if number and math.isfinite(1 / number) else 0.0
    return [*short, 1 / inverse] if inverse else short


def _scale_expression(
    table: _Table, at: int, short: tuple[float, float], numbers: int
) -> Expression:
    factor, offset = short
    sentence = table.formats[at]
    if factor != 1:
        sentence = f"-({sentence})" if factor == -1 else f"{factor:.5g} * {sentence}"
    if offset:
        sentence = f"{sentence} {'+' if offset > 0 else '-'} {abs(offset):.5g}"
    length = table.lengths[at] + (factor != 1) + (offset != 0)
    return Expression(sentence, length, _move(table.functions[at], factor, offset), numbers)


# --- Series ---------------------------------------------------------------------------------------

_DEGREES = (2, 3, 4, 5, 7, 9)


def _polynomial(numbers: Sequence[float]) -> Callable[[Tensor], Tensor]:
    def compute(x: Tensor) -> Tensor:
        value = torch.zeros_like(x)
        for number in reversed(numbers):
            value = value * x + number
        return value

    return compute


def _series(sample: Sample, x: Tensor, *, is_near: bool) -> Iterator[Expression]:
    size = float(x.abs().max())
    for degree in _DEGREES:
        if len(x) < max(_FEWEST_SOLVED, 3 * (degree + 1)) or not size:
            return
        powers = torch.stack([(x / size) ** power for power in range(degree + 1)], -1)
        solution = torch.linalg.lstsq(powers, sample.given[:, None]).solution[:, 0]
        if not bool(sample.fits(powers @ solution)):
            continue
        numbers = [float(coefficient) / size**power for power, coefficient in enumerate(solution)]
        least = max(float(sample.noise.max()), _NOTHING * float(sample.given.abs().max()))
        numbers = [
            0.0 if abs(number) * size**power < 2 * least else float(f"{number:.7g}")
            for power, number in enumerate(numbers)
        ]
        terms = sum(number != 0 for number in numbers)
        if terms > _MOST_TERMS:
            return  # so many numbers give any smooth function
        if not any(numbers[2:]):
            return  # a factor and an offset, which have kinds
        sentence = f"a polynomial of degree {degree}, {_write_polynomial(numbers)},"
        kind = PatternKind.APPROXIMATION if is_near else PatternKind.OTHER_FUNCTION
        yield Expression(sentence, 3 + terms, _polynomial(numbers), terms, kind)
        return


_NOTHING = 1e-9
_MOST_TERMS = 4


def _write_polynomial(numbers: Sequence[float]) -> str:
    terms = []
    for power, number in enumerate(numbers):
        if number:
            argument = "" if not power else " {}" if power == 1 else f" {{}}^{power}"
            terms.append(f"{number:.4g}{argument}")
    return " + ".join(terms).replace("+ -", "- ")


# --- Of two operands ------------------------------------------------------------------------------


def _of_two(sample: Sample, a: Tensor, table: _Table) -> Iterator[Expression]:
    """Expressions of two operands: something of the second, and the first."""
    size = a.abs().clamp(min=1e-30)
    candidate_size = sample.given.abs().clamp(min=1e-30)
    for sentence, pair, inverse, slope in (
        ("{} * {}", torch.mul, lambda y: y / a, 1 / size),
        ("{} + {}", torch.add, lambda y: y - a, torch.ones_like(a)),
        ("{} - {}", torch.sub, lambda y: a - y, torch.ones_like(a)),
        ("{} / {}", torch.div, lambda y: a / y, size / candidate_size.square()),
    ):
        residual = sample.invert_operation(inverse, slope)
        keep = torch.isfinite(residual.given)
        if int(keep.sum()) < _FEWEST:
            continue
        residual = Sample(residual.given[keep], residual.noise[keep])
        part = dataclasses.replace(table, values=table.values[:, keep])
        if _count_values(residual.given) < _FEWEST:
            continue
        for expression in itertools.chain(
            _plain_ones(residual, part), _scaled_ones(residual, part)
        ):
            if expression.said == _IDENTITY and not expression.numbers:
                continue  # a plain operation of both: see below
            inner = expression.said.replace("{}", "{1}")
            words = sentence.format("{0}", f"({inner})" if expression.numbers else inner)
            compute = _join(pair, (_keep, expression.compute))
            yield dataclasses.replace(
                expression, said=words, length=expression.length + 2, compute=compute
            )


def _count_values(solved: Tensor) -> int:
    """How many values there are, apart from rounding; many functions give one of few."""
    size = float(solved.abs().max()) or 1.0
    return len((solved / (_SAME * size)).round().unique())


def _of_both(sample: Sample, a: Tensor, b: Tensor, *, exact: bool) -> Iterator[Expression]:
    """w(u(a) op v(b)) of plain functions, with a factor."""
    plain = {text: FUNCTIONS[text] for text in _PLAIN}
    first, second = (_rows_of(plain, x[None]) or {_IDENTITY: x[None]} for x in (a, b))
    rows, columns = (torch.cat([*rows_by_name.values()]) for rows_by_name in (first, second))
    outers = _OF_WHOLE if exact else _PLAIN
    for sentence, pair in _PAIRS.items():
        both = pair(rows[:, None], columns[None, :]).flatten(0, 1)
        names = list(itertools.product(first, second))
        for outer in outers:
            values = FUNCTIONS[outer](both)
            for at in sample.fits(values).nonzero().flatten().tolist():
                yield _of_names(sentence, pair, names[at], outer)
        if exact:
            continue
        plainly = pair(a, b)
        for outer in FUNCTIONS.keys() - set(outers):
            value = _attempt_compute(FUNCTIONS[outer], [plainly])
            if value is not None and bool(sample.fits(value)):
                yield _of_names(sentence, pair, (_IDENTITY, _IDENTITY), outer)
        functions = [_join(pair, (FUNCTIONS[u], FUNCTIONS[v])) for u, v in names]
        words = [sentence.format(u.format("{0}"), v.format("{1}")) for u, v in names]
        lengths = [1 + sum(name != _IDENTITY for name in two) for two in names]
        for scaled in _scaled_ones(sample, _Table(words, functions, lengths, both)):
            said = scaled.said
            said = said.replace("* ", "* (", 1) + ")" if " * " in said else said
            if scaled.numbers == 1:
                yield dataclasses.replace(scaled, said=said)


def _of_names(
    sentence: str, pair: Callable[[Tensor, Tensor], Tensor], names: tuple[str, str], outer: str
) -> Expression:
    left, right = names
    words = outer.format(sentence.format(left.format("{0}"), right.format("{1}")))
    length = 1 + sum(name != _IDENTITY for name in (left, right, outer))
    compute = _compose(FUNCTIONS[outer], _join(pair, (FUNCTIONS[left], FUNCTIONS[right])))
    return Expression(words, length, compute)


# --- An operand or a result that is rounded, limited, wrapped -------------------------------------


def altered_variations(step: Step, case: Case) -> tuple[int, list[tuple[float, int, Variation]]]:
    """How many there are, and the operator of an altered operand.

    With each its length and how many of its numbers were solved for.
    """
    operands = {
        name: operand
        for name, operand in step.values.items()
        if isinstance(operand, torch.Tensor) and operand.is_floating_point() and operand.numel() > 1
    }
    variations: list[tuple[float, int, Variation]] = []
    for name, value in itertools.islice(operands.items(), _MOST_OPERANDS):
        variations += ((2, 1, variation) for variation in _limit_operand(name, value, case))
        variations += ((3, 1, variation) for variation in _round_operand_to_steps(name, value))
        if name == "self" and torch.Tag.pointwise not in step.operator.tags:
            variations += ((2, 0, variation) for variation in _vary_functions_around(step.name))
        period = _PERIODIC.get(step.name)
        if period is not None:
            variations += ((3, 1, variation) for variation in _subtract_turns(name, period))
    if torch.Tag.pointwise in step.operator.tags:
        variations += ((3, 1, variation) for variation in _rounded_result(step))
    variations.sort(key=operator.itemgetter(0))
    return len(variations), variations


# --- A function before and one after --------------------------------------------------------------

_BEFORE = (
    *("{}", "neg({})", "abs({})", "square({})", "exp({})", "sqrt({})", "log({})", "relu({})"),
    *("reciprocal({})", "sigmoid({})", "tanh({})"),
)
_AFTER = (*_BEFORE, "log1p({})", "{} ** (1 / 3)")


def _vary_functions_around(operator_name: str) -> Iterator[Variation]:
    for before, after in itertools.product(_BEFORE, _AFTER):
        if before != after or before == "neg({})":
            sentence = after.format(f"{operator_name}({before.format('x')})")
            change = partial(_around, before=FUNCTIONS[before], after=FUNCTIONS[after])
            is_sign = {before, after} == {"{}", "neg({})"}
            kind = PatternKind.SIGN if is_sign else PatternKind.OTHER_FUNCTION
            yield Variation(kind, f"{sentence} instead of {operator_name}(x)", change)


def _around(
    step: Step, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]
) -> Any:
    first = first_of(step.run(self=before(step.values["self"])))
    return step.with_first(check_varied(after(first)))


# --- Limits ---------------------------------------------------------------------------------------


def _limit_operand(name: str, value: Tensor, case: Case) -> Iterator[Variation]:
    """Limits beyond which all is wrong, and below which nothing is."""
    if tuple(value.shape) != case.shape:
        return
    wide = widen(value)
    for sentence, size, limit in (
        ("above {0}", wide, lambda x, most: x.clamp(max=most)),
        ("below {0}", -wide, lambda x, most: x.clamp(min=-most)),
        ("at -{0} and {0}", wide.abs(), lambda x, most: x.clamp(-most, most)),
    ):
        least = float(size[case.wrong].min())
        inside = size[~case.wrong & (size < least)]
        if not inside.numel():
            continue
        for most in _between(float(inside.max()), least):
            shown = -most if sentence.startswith("below") else most
            words = f"{name} is clipped {sentence.format(f'{shown:.7g}')}"
            change = with_altered(name, partial(limit, most=most))
            yield Variation(PatternKind.CLIPPED, words, change)


def _between(low: float, high: float) -> list[float]:
    """The shortest numbers between two, and the first of them."""
    numbers = [low]
    for digits in range(1, 5):
        middle = float(f"{(low + high) / 2:.{digits}g}")
        if low <= middle <= high:
            numbers.append(middle)
    if math.floor(high) >= low:
        numbers.append(float(math.floor(high)))
    return list(dict.fromkeys(numbers))


# --- Steps and turns ------------------------------------------------------------------------------

_STEPS = (*(2.0**-power for power in range(-1, 13)), 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)
_WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "the nearest": torch.round,
    "the next lower": torch.floor,
    "the next in the direction of zero": torch.trunc,
}
# A step must be seen in this many different values of the operand.
_FEWEST_STEPS = 4


def _round_operand_to_steps(name: str, value: Tensor) -> Iterator[Variation]:
    """A value for each step of the operand, as a table has."""
    size = float(widen(value).abs().max())
    for step, (words, way) in itertools.product(_STEPS, _WAYS.items()):
        if math.isfinite(size) and size / step >= _FEWEST_STEPS:
            sentence = (
                f"one value for each {step:.6g} of {name}: it is rounded to {words} of such steps"
            )
            change = with_altered(name, partial(_round_to_steps, way=way, step=step))
            is_nearest = way is torch.round
            kind = PatternKind.PRECISION if is_nearest else PatternKind.APPROXIMATION
            yield Variation(kind, sentence, change)


def _rounded_result(step: Step) -> Iterator[Variation]:
    """The nearest of such steps for each result."""
    result = step.run()
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return
    size = float(widen(result).abs().max())
    for length in _STEPS:
        if math.isfinite(size) and size / length >= _FEWEST_STEPS:
            sentence = f"the result is rounded to the nearest of steps of {length:.6g}"
            change = with_result(partial(_round_to_steps, way=torch.round, step=length))
            yield Variation(PatternKind.PRECISION, sentence, change)


def _round_to_steps(value: Tensor, way: Callable[[Tensor], Tensor], step: float) -> Tensor:
    count = way(value / step)
    if len(count.unique()) < _FEWEST_STEPS:
        raise ValueError("too few steps")
    return count * step


_PERIODIC = {"sin": 2 * math.pi, "cos": 2 * math.pi, "tan": math.pi}


def _subtract_turns(name: str, period: float) -> Iterator[Variation]:
    """Whole turns subtracted, of a number that is near to the right one."""
    turns = [float(f"{period:.{digits}g}") for digits in range(1, 7)]
    turns += [2 * float(f"{period / 2:.{digits}g}") for digits in range(1, 7)]
    turns += [period * (22 / 7) / math.pi]
    for dtype in (torch.bfloat16, torch.float16):
        turns.append(float(torch.tensor(period).to(dtype)))
    for turn, way in itertools.product(dict.fromkeys(turns), _WAYS.values()):
        sentence = f"turns of {turn:.7g} instead of {period:.7g} are subtracted from {name}"
        change = with_altered(name, partial(_subtract_turn, turn=turn, way=way))
        yield Variation(PatternKind.APPROXIMATION, sentence, change)


def _subtract_turn(value: Tensor, turn: float, way: Callable[[Tensor], Tensor]) -> Tensor:
    return value - turn * way(value / turn)
