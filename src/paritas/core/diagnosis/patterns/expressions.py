"""Pointwise operators as another expression of the same operands, by a small grammar.

Functions of an operand, functions of these, sums, products and quotients of two of them, with
numbers that are solved for. They are tried on some of the elements; what gives these, in the
fewest words, is then a prediction as any other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.diagnosis.case import same, widen
from paritas.core.diagnosis.patterns.functions import UNARY
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
        if (
            len(chosen[0]) < _FEWEST
            or len(candidate.unique()) < few
            or len(wrong.unique()) < few - 1
        ):
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
        unit = torch.maximum(self.noise, 2 * torch.finfo(torch.float64).eps * self.given.abs())
        near = same(values, self.given) | ((values - self.given).abs() <= MAX_Z * unit)
        return near.double().mean(-1) >= _HOPEFUL

    def inverted(self, compute: Callable[[Tensor], Tensor], slope: Tensor) -> Sample:
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
        result = self.step.run(**changes)
        return result if isinstance(result, torch.Tensor) else result[0]

    def change(self, expression: Expression, places: tuple[int, ...]) -> Callable[[Step], Any]:
        """The operator computed by an expression of some of its operands."""

        def run(step: Step) -> Any:
            result = step.run()
            result = result if isinstance(result, torch.Tensor) else result[0]
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
    words = step.name
    tables = {
        index: _Table.of(value, alone, words)
        for index, value in enumerate(wide)
        if not case.is_exact and bool((value != value[0]).any())
    }
    is_near = float(case.error.norm()) <= _NEAR * float(case.right.norm())
    tried = sum(len(operand_table.formats) for operand_table in tables.values())
    for position, table in tables.items():
        expressions += [
            ((position,), expression_found)
            for expression_found in _of_one(sample, table, is_near=is_near)
        ]
    for pair in itertools.permutations(range(len(wide)), 2):
        a, b = (wide[expression] for expression in pair)
        if pair[1] in tables:
            expressions += [(pair, index) for index in _of_two(sample, a, tables[pair[1]])]
        if pair[0] < pair[1]:
            expressions += [
                (pair, expression) for expression in _of_both(sample, a, b, exact=case.is_exact)
            ]
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
    """The operator with a function of one of its operands."""
    for position, (sentence, function) in itertools.product(range(len(wide)), FUNCTIONS.items()):
        compute = _OfChanged(operands, position, function)
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


@dataclasses.dataclass(frozen=True)
class _OfChanged:
    operands: Operands
    place: int
    function: Callable[[Tensor], Tensor]

    def __call__(self, *values: Tensor) -> Tensor:
        changed = list(values)
        changed[self.place] = self.function(changed[self.place])
        return self.operands.own(*changed)


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
    _IDENTITY: lambda x: x,
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
    functions: list[Callable[[Tensor], Tensor]]
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
                table.functions.append(_Composed(functions[outer], functions[sentence]))
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
    """Which rows are finite and not constant."""
    is_finite = torch.isfinite(rows).double().mean(-1) >= _HOPEFUL
    return is_finite & (rows != rows[:, :1]).any(-1)


@dataclasses.dataclass(frozen=True)
class _Composed:
    outer: Callable[[Tensor], Tensor]
    inner: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x))


# --- Of one operand -------------------------------------------------------------------------------


def _of_one(sample: Sample, table: _Table, *, is_near: bool) -> Iterator[Expression]:
    """Expressions of one operand that give the sample."""
    yield from _plain_ones(sample, table)
    yield from _scaled_ones(sample, table)
    simple = [at for at, length in enumerate(table.lengths) if length <= 1]
    values = table.values[simple]
    for sentence, pair in itertools.islice(_PAIRS.items(), 6):
        both = pair(values[:, None], values[None, :])
        for i, j in sample.fits(both).nonzero().tolist():
            left, right = simple[i], simple[j]
            words = sentence.format(table.formats[left], table.formats[right])
            compute = _Paired(pair, table.functions[left], table.functions[right])
            length = 2 + table.lengths[left] + table.lengths[right]
            yield Expression(words, length, compute)
    for sentence, pair in (("{} * {}", torch.mul), ("{} / {}", torch.div)):
        both = pair(values[:, None], values[None, :]).flatten(0, 1)
        names: list[str] = []
        functions: list[Callable[[Tensor], Tensor]] = []
        lengths: list[int] = []
        for left, right in itertools.product(simple, repeat=2):
            words = sentence.format(table.formats[left], table.formats[right])
            names.append(words)
            functions.append(_Paired(pair, table.functions[left], table.functions[right]))
            lengths.append(2 + table.lengths[left] + table.lengths[right])
        yield from _scaled_ones(sample, _Table(names, functions, lengths, both))
    yield from _series(sample, table.values[0], is_near=is_near)


@dataclasses.dataclass(frozen=True)
class _Paired:
    pair: Callable[[Tensor, Tensor], Tensor]
    left: Callable[[Tensor], Tensor]
    right: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.pair(self.left(x), self.right(x))


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
    mean, middle = (
        (values * weight).sum(-1, keepdim=True) / total,
        (sampled_values * weight).sum() / total,
    )
    apart = values - mean
    spread = (apart.square() * weight).sum(-1)
    slope = (apart * (sampled_values - middle) * weight).sum(-1) / spread
    start = middle - slope * mean[:, 0]
    alone = (values * sampled_values * weight).sum(-1) / (values.square() * weight).sum(-1)
    for factors, offsets, numbers in (
        (alone, torch.zeros_like(alone), 1),
        (slope, start, 2),
    ):
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
            _rounded(factor, digits), _rounded(offset, digits) if offset else [0.0]
        ):
            if short_factor and bool(sample.fits(short_factor * row + other)):
                return short_factor, other
    return None


def _rounded(number: float, digits: int) -> list[float]:
    short = [float(f"{number:.{digits}g}")]
    if abs(number) < 10**-digits:
        short.append(0.0)
    inverse = float(f"{1 / number:.{digits}g}") if number and math.isfinite(1 / number) else 0.0
    return [*short, 1 / inverse] if inverse else short


@dataclasses.dataclass(frozen=True)
class _Affine:
    function: Callable[[Tensor], Tensor]
    factor: float
    offset: float

    def __call__(self, x: Tensor) -> Tensor:
        value = self.function(x)
        value = value if self.factor == 1 else value * self.factor
        return value if self.offset == 0 else value + self.offset


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
    return Expression(sentence, length, _Affine(table.functions[at], factor, offset), numbers)


# --- Series ---------------------------------------------------------------------------------------

_DEGREES = (2, 3, 4, 5, 7, 9)


@dataclasses.dataclass(frozen=True)
class _Polynomial:
    numbers: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        value = torch.zeros_like(x)
        for number in reversed(self.numbers):
            value = value * x + number
        return value


def _series(sample: Sample, x: Tensor, *, is_near: bool) -> Iterator[Expression]:
    """A polynomial of few terms."""
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
        yield Expression(sentence, 3 + terms, _Polynomial(tuple(numbers)), terms, kind)
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
        residual = sample.inverted(inverse, slope)
        if not bool(torch.isfinite(residual.given).all()):
            keep = torch.isfinite(residual.given)
            if int(keep.sum()) < _FEWEST:
                continue
            residual = Sample(residual.given[keep], residual.noise[keep])
            part = dataclasses.replace(table, values=table.values[:, keep])
        else:
            part = table
        if _count_values(residual.given) < _FEWEST:
            continue
        for expression in itertools.chain(
            _plain_ones(residual, part), _scaled_ones(residual, part)
        ):
            if expression.said == _IDENTITY and not expression.numbers:
                continue  # a plain operation of both: see below
            inner = expression.said.replace("{}", "{1}")
            words = sentence.format("{0}", f"({inner})" if expression.numbers else inner)
            compute = _Joined(pair, expression.compute)
            yield dataclasses.replace(
                expression, said=words, length=expression.length + 2, compute=compute
            )


def _count_values(solved: Tensor) -> int:
    """How many values there are, apart from rounding; many functions give one of few."""
    size = float(solved.abs().max()) or 1.0
    return len((solved / (_SAME * size)).round().unique())


@dataclasses.dataclass(frozen=True)
class _Joined:
    pair: Callable[[Tensor, Tensor], Tensor]
    second: Callable[[Tensor], Tensor]

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.pair(a, self.second(b))


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
        functions = [_Both(pair, FUNCTIONS[u], FUNCTIONS[v]) for u, v in names]
        words = [sentence.format(u.format("{0}"), v.format("{1}")) for u, v in names]
        lengths = [1 + sum(name != _IDENTITY for name in two) for two in names]
        table = _Table(words, functions, lengths, both)  # type: ignore[arg-type]
        yield from _scaled_pairs(sample, table)


def _scaled_pairs(sample: Sample, table: _Table) -> Iterator[Expression]:
    for scaled_one in _scaled_ones(sample, table):
        if scaled_one.numbers == 1:
            compute = _AffineOfBoth(scaled_one.compute.function, scaled_one.compute.factor)  # type: ignore[attr-defined]
            words = (
                scaled_one.said.replace("* ", "* (", 1) + ")"
                if " * " in scaled_one.said
                else scaled_one.said
            )
            yield dataclasses.replace(scaled_one, said=words, compute=compute)


@dataclasses.dataclass(frozen=True)
class _AffineOfBoth:
    function: Callable[[Tensor, Tensor], Tensor]
    factor: float

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.factor * self.function(a, b)


@dataclasses.dataclass(frozen=True)
class _Both:
    pair: Callable[[Tensor, Tensor], Tensor]
    left: Callable[[Tensor], Tensor]
    right: Callable[[Tensor], Tensor]
    outer: Callable[[Tensor], Tensor] = FUNCTIONS[_IDENTITY]

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.outer(self.pair(self.left(a), self.right(b)))


def _of_names(
    sentence: str, pair: Callable[[Tensor, Tensor], Tensor], names: tuple[str, str], outer: str
) -> Expression:
    left, right = names
    words = outer.format(sentence.format(left.format("{0}"), right.format("{1}")))
    length = 1 + sum(name != _IDENTITY for name in (left, right, outer))
    compute = _Both(pair, FUNCTIONS[left], FUNCTIONS[right], FUNCTIONS[outer])
    return Expression(words, length, compute)
