"""Sizes that an exported program keeps as symbols, as numbers.

The program says which number each had when it was exported. Where it could not know (how many
elements are not zero), a number inside the symbol's range is taken. Expressions stand in the file
as the text of a Python call; it is parsed here, never evaluated.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from paritas.graphs.reading.exported_schema import Range

__all__ = ["Symbols", "Unknown"]

_LONGEST = 10_000
_LARGEST = 1 << 62
# Divisible by the numbers of ranks that people ask for.
_GUESS = 8


class Unknown(Exception):  # noqa: N818  (no failure: a call with such an argument is told of)
    """A value that the archive does not say, or in a way that is not known."""


class Symbols:
    """The numbers that symbols stand for.

    Attributes:
        guessed: symbols of which no number was known, with the one taken.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._ranges = ranges
        self.guessed: dict[str, int] = {}

    def notes(self) -> tuple[str, ...]:
        """What was guessed, in words."""
        shown = ", ".join(f"{name} = {value}" for name, value in self.guessed.items())
        return (f"sizes that depend on values are guessed: {shown}",) if shown else ()

    def number(self, given: Mapping[str, Any]) -> int | float | bool:
        """A `SymInt`, `SymFloat` or `SymBool` as the archive has it.

        Raises:
            Unknown: no number can be found.
        """
        for key in ("as_int", "as_float", "as_bool"):
            if isinstance(given.get(key), int | float):
                return given[key]  # type: ignore[no-any-return]
        written = given.get("as_expr")
        if not isinstance(written, Mapping):
            raise Unknown(f"a size is given as {given!r:.80}")
        hint = written.get("hint")
        if isinstance(hint, Mapping) and hint:
            return self.number(hint)
        return self._evaluated(written.get("expr_str"))

    def size(self, given: Mapping[str, Any]) -> int:
        """The length of a dimension.

        Raises:
            Unknown: it is no such length.
        """
        found = self.number(given)
        if type(found) is not int or not 0 <= found < _LARGEST:
            raise Unknown(f"a dimension is {found!r:.40} long")
        return found

    def _evaluated(self, text: Any) -> int | float | bool:
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise Unknown(f"a size is given as {text!r:.80}")
        try:
            found = self._value(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, TypeError, IndexError, RecursionError):
            raise Unknown(f"a size is given as {text:.80}") from None
        if abs(found) >= _LARGEST:
            raise Unknown(f"a size is given as {text:.80}")
        return found

    def _value(self, node: ast.expr) -> int | float | bool:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise TypeError
        name = node.func.id
        if name == "Symbol":
            symbol = node.args[0]
            if not isinstance(symbol, ast.Constant) or not isinstance(symbol.value, str):
                raise ValueError
            return self.guess(symbol.value)
        values = [self._value(one) for one in node.args]
        if name in {"Pow", "PowByNatural"} and (abs(values[0]) > _LARGEST or abs(values[1]) > 64):  # noqa: PLR2004
            raise ValueError
        return _FUNCTIONS[name](*values) if name in _FUNCTIONS else _unknown(name)

    def guess(self, symbol: str) -> int:
        """A number inside the range of a symbol."""
        within = self._ranges.get(symbol, Range())
        low = within.min_val if within.min_val is not None else 0
        high = within.max_val if within.max_val is not None else _LARGEST
        self.guessed[symbol] = max(low, min(_GUESS, high))
        return self.guessed[symbol]


def _unknown(name: str) -> int:
    raise ValueError(name)


_FUNCTIONS: dict[str, Callable[..., int | float | bool]] = {
    "Integer": int,
    "Float": float,
    "Rational": operator.truediv,
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "ModularIndexing": lambda base, by, modulus: base // by % modulus,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "TruncToInt": math.trunc,
    "ToFloat": float,
    "GreaterThan": operator.ge,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "StrictLessThan": operator.lt,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "Max": max,
    "Min": min,
}
