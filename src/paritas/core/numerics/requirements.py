"""Rules of a user for a pair of tensors, written as conditions on its figures.

::

    rel_l2 <= 1e-3 and (max_abs < 1 or max_ulp <= 4)

A name is a figure of `Metrics` or `PairFigures`, or a column of the table (`cosine_similarity`).
A figure that is NaN or was not computed is unknown: a condition that depends on it does not hold,
not even after `not`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
from typing import TYPE_CHECKING, NoReturn, Self

from paritas.core.errors import UsageError
from paritas.core.results.items import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paritas.core.results.items import PairFigures

__all__ = ["NAMES", "Requirement"]

# Column name of the table -> figure.
_COLUMNS = {
    "cosine_similarity": "cosine",
    "max_relative_error": "max_rel",
    "mean_relative_error": "mean_rel",
    "max_absolute_error": "max_abs",
    "mean_absolute_error": "mean_abs",
    "relative_euclidean_distance": "rel_l2",
}
_OF_PAIR = ("mean_rel", "kl_divergence")
_OF_METRICS = tuple(name for name in Metrics.__struct_fields__ if name != "max_abs_index")
NAMES = (*_OF_METRICS, *_OF_PAIR, *_COLUMNS)
_OF_EQUALS = {"cosine": 1.0, "pcc": 1.0} | dict.fromkeys(
    (
        *("mismatched", "max_abs", "max_rel", "mean_abs", "rmse", "rel_l2", "max_ulp"),
        *("nonfinite_mismatches", *_OF_PAIR),
    ),
    0.0,
)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?inf\b)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign><=|>=|==|!=|<|>|\(|\)))"
)
_WORDS = ("and", "or", "not")
_LONGEST, _DEEPEST = 2000, 50


@dataclasses.dataclass(frozen=True)
class _Compared:
    """Two figures, or a figure and a number."""

    left: str | float
    sign: str
    right: str | float


@dataclasses.dataclass(frozen=True)
class _Joined:
    """`and`, `or`, `not` of one or two others."""

    word: str
    of: tuple[_Compared | _Joined, ...]


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A condition on the figures of a pair, as text and parsed."""

    text: str
    condition: _Compared | _Joined

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a rule.

        Raises:
            UsageError: the text is not a valid rule; the message shows where.
        """
        return cls(text, _RuleParser(text).whole())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the figures it uses, each once."""
        return tuple(dict.fromkeys(_figure_names(self.condition)))

    def holds(self, figures: PairFigures) -> bool:
        """Whether a pair meets the rule; False if a deciding figure is unknown."""
        return _evaluate(self.condition, figures) is True

    def describe_figures(self, figures: PairFigures) -> str:
        """The values of its figures: `rel_l2 = 0.02, max_ulp = unknown`."""
        named_figures = ((name, _figure_value(name, figures)) for name in self.names)
        return ", ".join(
            f"{name} = {'unknown' if value is None else f'{value:.4g}'}"
            for name, value in named_figures
        )


def _figure_names(condition: _Compared | _Joined) -> Iterator[str]:
    if isinstance(condition, _Joined):
        for operand in condition.of:
            yield from _figure_names(operand)
        return
    for side in (condition.left, condition.right):
        if isinstance(side, str):
            yield side


def _evaluate(condition: _Compared | _Joined, figures: PairFigures) -> bool | None:
    """True, False, or None if unknown."""
    if isinstance(condition, _Compared):
        left = _figure_value(condition.left, figures)
        right = _figure_value(condition.right, figures)
        if left is None or right is None or math.isnan(left) or math.isnan(right):
            return None
        return _OPERATORS[condition.sign](left, right)
    parts = [_evaluate(operand, figures) for operand in condition.of]
    if condition.word == "not":
        return None if parts[0] is None else not parts[0]
    # One part that is false decides an `and`; one that is true decides an `or`.
    decisive = condition.word == "or"
    if decisive in parts:
        return decisive
    return None if None in parts else not decisive


def _figure_value(name: str | float, figures: PairFigures) -> float | None:
    if not isinstance(name, str):
        return name
    figure: float | None = None
    if name in _OF_PAIR:
        figure = getattr(figures, name)
    elif figures.metrics is not None:
        figure = getattr(figures.metrics, name)
    if figure is None and figures.identical:
        return _OF_EQUALS.get(name)
    return figure


@dataclasses.dataclass(frozen=True)
class _RuleToken:
    kind: str
    text: str
    begin: int


class _RuleParser:
    """A parser of rules: `or` binds least, then `and`, then `not`."""

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _LONGEST:
            raise UsageError(f"the rule has {len(text)} characters: give at most {_LONGEST}")
        self._tokens = list(self._read())
        self._at = 0
        self._depth = 0

    def whole(self) -> _Compared | _Joined:
        """Parse the whole text as one condition."""
        condition = self._any()
        if self._next.kind != "end":
            self._refuse("expected `and` or `or` here")
        return condition

    def _read(self) -> Iterator[_RuleToken]:
        at = 0
        end = len(self._text.rstrip())
        while at < end:
            match = _TOKEN.match(self._text, at)
            if match is None:
                begin = at + len(self._text[at:]) - len(self._text[at:].lstrip())
                _refuse(self._text, begin, "unexpected character")
            kind = match.lastgroup or ""
            text = match[kind]
            yield _RuleToken(
                text if text in _WORDS or kind == "sign" else kind, text, match.start(kind)
            )
            at = match.end()
        yield _RuleToken("end", "", end)

    @property
    def _next(self) -> _RuleToken:
        return self._tokens[self._at]

    def _take(self, *kinds: str) -> bool:
        is_match = self._next.kind in kinds
        self._at += is_match
        return is_match

    def _any(self) -> _Compared | _Joined:
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else _Joined("or", tuple(parts))

    def _all(self) -> _Compared | _Joined:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else _Joined("and", tuple(parts))

    def _one(self) -> _Compared | _Joined:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"more than {_DEEPEST} nested `not` and `(`")
        joined: _Compared | _Joined
        if self._take("not"):
            joined = _Joined("not", (self._one(),))
        elif self._take("("):
            joined = self._any()
            if not self._take(")"):
                self._refuse("expected `)` here")
        else:
            joined = self._comparison()
        self._depth -= 1
        return joined

    def _comparison(self) -> _Compared:
        left = self._value()
        sign = self._next.kind
        if not self._take(*_OPERATORS):
            self._refuse(f"expected one of {' '.join(_OPERATORS)} here")
        compared = _Compared(left, sign, self._value())
        if isinstance(compared.left, float) and isinstance(compared.right, float):
            self._refuse("this compares two numbers; use a figure, such as rel_l2")
        if self._next.kind in _OPERATORS:
            self._refuse("comparisons cannot be chained; join them with `and`")
        return compared

    def _value(self) -> str | float:
        token = self._next
        if self._take("number"):
            return float(token.text)
        if not self._take("name"):
            self._refuse("expected a number, or a figure such as rel_l2, here")
        name = _COLUMNS.get(token.text, token.text)
        if name not in _OF_METRICS and name not in _OF_PAIR:
            nearest = difflib.get_close_matches(token.text.lower(), NAMES, n=1, cutoff=0.0)[0]
            _refuse(self._text, token.begin, f"unknown figure; did you mean {nearest}?")
        return name

    def _refuse(self, why: str) -> NoReturn:
        _refuse(self._text, self._next.begin, why)


def _refuse(text: str, at: int, why: str) -> NoReturn:
    shown = text.replace("\n", " ").replace("\t", " ")
    raise UsageError(f"cannot read the rule: {why}\n  {shown}\n  {' ' * at}^")
