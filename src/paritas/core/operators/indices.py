"""Integer expressions of indices and sizes: polynomials with floor division.

An expression is a tuple of monomials and their coefficients, in a fixed order, so that equal tuples
are equal functions. Symbols stand for sizes (at least 1) and for indices. What does not divide is
kept as a symbol of its own: `("//", numerator, denominator)` and `("%", ...)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

# A symbol, or an operation that is treated as one: ("//", Poly, Poly), ("m", rank), ("size", ...).
Atom = Any
# Products of atoms, and their coefficients.
Poly = tuple[tuple[tuple[Atom, ...], int], ...]

ZERO: Poly = ()
ONE: Poly = (((), 1),)

# The sizes of parts and where they begin, as functions of the rank.
PART, OFFSET = "m", "o"
# The length of the identifier that is split.
LENGTH = "N"


# The names of indices, which are 0 or more, begin with this; all other names are sizes.
INDEX_MARK = "%"


def is_index(atom: Atom) -> bool:
    """Whether it is the name of an index or of a rank."""
    return isinstance(atom, str) and atom.startswith(INDEX_MARK)


@lru_cache(maxsize=65536)
def order(thing: Any) -> str:
    """A key that sorts anything made of tuples."""
    return repr(thing)


def constant(value: int) -> Poly:
    """A number."""
    return (((), value),) if value else ()


def symbol(name: Atom) -> Poly:
    """A symbol."""
    return (((name,), 1),)


def _collect(terms: Iterable[tuple[tuple[Atom, ...], int]]) -> Poly:
    total: dict[tuple[Atom, ...], int] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    nonzero_terms = [(monomial, value) for monomial, value in total.items() if value]
    return (
        tuple(sorted(nonzero_terms, key=order)) if len(nonzero_terms) > 1 else tuple(nonzero_terms)
    )


def add(*polys: Poly) -> Poly:
    """The sum."""
    return _collect(term for poly in polys for term in poly)


def multiply(*polys: Poly) -> Poly:
    """The product."""
    total = ONE
    for poly in polys:
        total = _collect(
            (tuple(sorted(left + right, key=order)), a * b)
            for left, a in total
            for right, b in poly
        )
    return total


def negate(poly: Poly) -> Poly:
    """The negative."""
    return tuple((monomial, -value) for monomial, value in poly)


def subtract(left: Poly, right: Poly) -> Poly:
    """The difference."""
    return add(left, negate(right))


def as_number(poly: Poly) -> int | None:
    """The number that it is, if it has no symbol."""
    if not poly:
        return 0
    return poly[0][1] if len(poly) == 1 and not poly[0][0] else None


def quotient(poly: Poly, by: Poly) -> Poly | None:
    """The exact quotient by a product of symbols; None if it leaves a rest."""
    whole_terms, rest = _divide(poly, by)
    return whole_terms if not rest else None


def _divide(poly: Poly, by: Poly) -> tuple[Poly, Poly]:
    """The terms that a product of symbols divides, divided, and the other terms."""
    if len(by) != 1:
        return (ONE, ZERO) if poly == by and poly else (ZERO, poly)
    (divisor, value) = by[0]
    whole_terms, rest = [], []
    for monomial, coefficient in poly:
        remaining_atoms = list(monomial)
        fits = coefficient % value == 0
        for atom in divisor:
            if atom in remaining_atoms:
                remaining_atoms.remove(atom)
            else:
                fits = False
        if fits:
            whole_terms.append((tuple(remaining_atoms), coefficient // value))
        else:
            rest.append((monomial, coefficient))
    return _collect(whole_terms), _collect(rest)


Ranges = Mapping[Atom, Poly]


def floor_divide(poly: Poly, by: Poly, ranges: Ranges) -> Poly:
    """The quotient rounded down; the divisor is positive."""
    if by == ONE:
        return poly
    numbers = as_number(poly), as_number(by)
    if numbers[0] is not None and numbers[1]:
        return constant(numbers[0] // numbers[1])
    whole_terms, rest = _divide(poly, by)
    if not rest or is_within(rest, by, ranges):
        return whole_terms
    return add(whole_terms, symbol(("//", rest, by)))


def remainder(poly: Poly, by: Poly, ranges: Ranges) -> Poly:
    """The rest of the division, from 0 to the divisor."""
    if by == ONE:
        return ZERO
    numbers = as_number(poly), as_number(by)
    if numbers[0] is not None and numbers[1]:
        return constant(numbers[0] % numbers[1])
    _, rest = _divide(poly, by)
    if not rest or is_within(rest, by, ranges):
        return rest
    return symbol(("%", rest, by))


def is_within(poly: Poly, size: Poly, ranges: Ranges) -> bool:
    """Whether 0 <= poly < size is certain, from the ranges of the indices."""
    if any(value < 0 for _, value in poly):
        return False
    highest = _highest(poly, ranges)
    return highest is not None and is_positive(subtract(size, highest))


def _highest(poly: Poly, ranges: Ranges) -> Poly | None:
    """A bound of an expression without negative terms; None if there is none."""
    total = ZERO
    for monomial, value in poly:
        term = constant(value)
        for atom in monomial:
            bound = _highest_of(atom, ranges)
            if bound is None:
                return None
            term = multiply(term, bound)
        total = add(total, term)
    return total


def _highest_of(atom: Atom, ranges: Ranges) -> Poly | None:
    if atom in ranges:
        return subtract(ranges[atom], ONE)
    if is_index(atom):
        return None
    if isinstance(atom, tuple) and atom[0] == "%":
        return subtract(atom[2], ONE)
    if isinstance(atom, tuple) and atom[0] == "//":
        inner = _highest(atom[1], ranges)
        whole_terms, rest = _divide(inner or ZERO, atom[2])
        if inner is None or any(value < 0 for _, value in atom[1]):
            return None
        if as_number(rest) == -1:  # the largest one below a multiple
            return subtract(whole_terms, ONE)
        return whole_terms if not rest or is_within(rest, atom[2], ranges) else None
    if isinstance(atom, tuple) and atom[0] == OFFSET:
        # A part ends within the whole.
        return subtract(symbol(LENGTH), symbol((PART, atom[1])))
    return symbol(atom)


def is_positive(poly: Poly) -> bool:
    """Whether it is certainly positive: sizes are 1 or more."""
    shifted = ZERO
    for monomial, value in poly:
        term = constant(value)
        for atom in monomial:
            zero = is_index(atom) or (isinstance(atom, tuple) and atom[0] != PART)
            least = ZERO if zero else ONE
            term = multiply(term, add(symbol(atom), least))
        shifted = add(shifted, term)
    return all(value >= 0 for _, value in shifted) and any(not m for m, _ in shifted)


def replace(poly: Poly, by: Mapping[Atom, Poly], ranges: Ranges) -> Poly:
    """The expression with symbols replaced, simplified again."""
    total = ZERO
    for monomial, value in poly:
        term = constant(value)
        for atom in monomial:
            term = multiply(term, _replace_atom(atom, by, ranges))
        total = add(total, term)
    return total


def _replace_atom(atom: Atom, by: Mapping[Atom, Poly], ranges: Ranges) -> Poly:
    if atom in by:
        return by[atom]
    if isinstance(atom, tuple):
        if atom[0] == "//":
            return floor_divide(replace(atom[1], by, ranges), replace(atom[2], by, ranges), ranges)
        if atom[0] == "%":
            return remainder(replace(atom[1], by, ranges), replace(atom[2], by, ranges), ranges)
        if atom[0] == "size":
            inner = tuple(replace(part, by, ranges) for part in atom[2])
            return symbol(("size", atom[1], inner))
        if atom[0] in (PART, OFFSET) and atom[1] in by:
            return _at_rank(atom[0], by[atom[1]])
    return symbol(atom)


def _at_rank(what: str, rank: Poly) -> Poly:
    if rank == ZERO and what == OFFSET:
        return ZERO
    name = rank[0][0][0] if len(rank) == 1 and rank[0][1] == 1 and rank[0][0] else "first"
    return symbol((what, name))


def atoms(poly: Poly) -> Iterable[Atom]:
    """All symbols in it, including those inside others."""
    for monomial, _ in poly:
        for atom in monomial:
            yield atom
            if isinstance(atom, tuple):
                if atom[0] in ("//", "%"):
                    yield from atoms(atom[1])
                    yield from atoms(atom[2])
                elif atom[0] == "size":
                    for part in atom[2]:
                        yield from atoms(part)
                else:
                    yield atom[1]
