"""Terms of real numbers with reductions over indices: how definitions write what is computed.

A term is written as nested tuples, so that it is also JSON:

==================================  ================================================================
`("read", x, [i, j])`               an element of an argument
`("draw", n, shape, [i, j])`        an element of the n-th random tensor that the operator draws
`("num", "1/2")`, `("int", size)`   a number; an index or a size as a number
`("add", [..])`, `("mul", [..])`    sum and product; `("inv", t)` is one over t
`("fn", f, [..])`                   a function of numbers of which nothing is known
`("sum", k, size, t)`               the sum of t over 0 <= k < size; also max, min, prod
`("fun", f, [[[[k, size]], t]], [i])`  an element of a function of whole arrays, of which nothing is
                                    known; each array is a term over its own indices
==================================  ================================================================
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from paritas.core.operators import indices

if TYPE_CHECKING:
    from paritas.core.operators.indices import Poly

Term = tuple[Any, ...]


class OutsideTheoryError(Exception):
    """A construct that the theory does not have; the message names it."""


def number_term(value: complex | Fraction) -> Term:
    """A number as a term."""
    if isinstance(value, complex):
        raise OutsideTheoryError("a complex number")
    return ("num", str(Fraction(value)))


def plus(*terms: Term) -> Term:
    """A sum."""
    return ("add", terms)


def times(*terms: Term) -> Term:
    """A product."""
    return ("mul", terms)


def size_term(*sizes: Poly) -> Term:
    """A product of sizes as a number."""
    return ("int", indices.multiply(*sizes))
