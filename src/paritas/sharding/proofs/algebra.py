"""Terms of real numbers with reductions over indices, and their normal form.

`core.operators.terms` says how a term is written.

The normal form is a sum of products, each under the sums over its indices. It is unique up to what
the laws of addition, multiplication and of the reductions say; functions are equal if their
arguments are. All of these laws are kept by differentiation (an unknown function has an unknown
derivative), so terms with the same normal form also have the same gradients.
"""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from paritas.core.operators import indices
from paritas.core.operators.indices import LENGTH, ONE, ZERO, Atom, Poly, Ranges, order, symbol
from paritas.core.operators.terms import OutsideTheoryError, Term

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# An index of a reduction, and its size.
Binder = tuple[str, Poly]
# Factors and their powers.
Factors = tuple[tuple[Atom, int], ...]
Monomial = tuple[tuple[Binder, ...], Factors]
# A sum of products.
Normal = tuple[tuple[Monomial, Fraction], ...]

RANKS = "R"
_MOST_BINDERS = 6


# --- Terms brought to their normal form -----------------------------------------------------------


class Side(NamedTuple):
    """One side of a split: the whole, or what a rank computes.

    Attributes:
        sizes: what the symbols of sizes and numbers stand for.
        read: the value of an element of an argument.
        draw: the value of an element of a random tensor.
        tile: an index over a size that is split, as the index of a rank and one within its part;
            None if the size is not split or the side is a rank.
    """

    sizes: Mapping[Atom, Poly]
    read: Callable[[str, tuple[Poly, ...]], Normal]
    draw: Callable[[str, tuple[Poly, ...], tuple[Poly, ...]], Normal]
    tile: Callable[[str, Poly], tuple[tuple[Binder, ...], Poly] | None]


class Normaliser:
    """Brings the terms of one side to their normal form."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._count = itertools.count()

    def index(self, poly: Poly, env: Mapping[Atom, Poly], ranges: Ranges) -> Poly:
        """An index or a size on this side."""
        return indices.replace(poly, {**self._side.sizes, **env}, ranges)

    def normal(self, term: Term, env: Mapping[Atom, Poly], ranges: Ranges) -> Normal:
        """The normal form of a term whose free indices stand for these expressions."""
        kind = term[0]
        if kind == "num":
            return number(Fraction(term[1]))
        if kind == "int":
            return of_index(self.index(term[1], env, ranges))
        if kind in ("add", "mul", "inv", "fn"):
            return self._arithmetic(term, env, ranges)
        if kind == "read":
            return self._side.read(term[1], self._places(term[2], env, ranges))
        if kind == "draw":
            return self._side.draw(term[1], term[2], self._places(term[3], env, ranges))
        if kind == "fun":
            return self._function(term, env, ranges)
        return self._reduction(term, env, ranges)

    def _arithmetic(self, term: Term, env: Mapping[Atom, Poly], ranges: Ranges) -> Normal:
        kind = term[0]
        parts = (term[1],) if kind == "inv" else term[-1]
        values = tuple(self.normal(part, env, ranges) for part in parts)
        if kind == "add":
            return total(*values)
        if kind == "mul":
            return functools.reduce(product, values, number(1))
        return inverse(values[0]) if kind == "inv" else factor(("fn", term[1], values))

    def _places(
        self, places: tuple[Poly, ...], env: Mapping[Atom, Poly], ranges: Ranges
    ) -> tuple[Poly, ...]:
        return tuple(self.index(position, env, ranges) for position in places)

    def fresh(self) -> str:
        """A new name of an index."""
        return f"%k{next(self._count)}"

    def _reduction(self, term: Term, env: Mapping[Atom, Poly], ranges: Ranges) -> Normal:
        kind, name, size, body = term
        length = self.index(size, env, ranges)
        if length == ONE:
            return self.normal(body, {**env, name: ZERO}, ranges)
        fresh = self.fresh()
        untiled: tuple[tuple[Binder, ...], Poly] = (((fresh, length),), symbol(fresh))
        binders, at = self._side.tile(fresh, length) or untiled
        inner = self.normal(body, {**env, name: at}, {**ranges, **dict(binders)})
        if kind == "sum":
            return sum_over(binders, inner)
        return reduce_over(kind, binders, inner)

    def _function(self, term: Term, env: Mapping[Atom, Poly], ranges: Ranges) -> Normal:
        _, name, arrays, places = term
        normal_arrays = []
        for binders, body in arrays:
            inner_env, inner_ranges, fresh = dict(env), dict(ranges), []
            for binder_name, size in binders:
                new = self.fresh()
                length = self.index(size, env, ranges)
                inner_env[binder_name], inner_ranges[new] = symbol(new), length
                fresh.append((new, length))
            normal_arrays.append(array(tuple(fresh), self.normal(body, inner_env, inner_ranges)))
        return factor(("fun", name, tuple(normal_arrays), self._places(places, env, ranges)))


def sum_over(binders: tuple[Binder, ...], body: Normal) -> Normal:
    """The sum over indices."""
    out = []
    for (inner, factors), coefficient in body:
        by = {name: symbol(name + "'") for name, _ in inner}
        ((((inner_binders, renamed), scale)),) = _uncanonical((inner, factors), by)
        out.append(
            _scale_terms(canonical((*binders, *inner_binders), renamed), coefficient * scale)
        )
    return total(*out)


# --- Normal forms ---------------------------------------------------------------------------------


def number(value: Fraction | int) -> Normal:
    """A number."""
    return ((((), ()), Fraction(value)),) if value else ()


def factor(atom: Atom, power: int = 1) -> Normal:
    """A product of one factor."""
    return ((((), ((atom, power),)), Fraction(1)),)


def total(*parts: Normal) -> Normal:
    """The sum."""
    coefficients: dict[Monomial, Fraction] = {}
    for part in parts:
        for monomial, value in part:
            coefficients[monomial] = coefficients.get(monomial, Fraction(0)) + value
    nonzero_terms = [(monomial, value) for monomial, value in coefficients.items() if value]
    return (
        tuple(sorted(nonzero_terms, key=order)) if len(nonzero_terms) > 1 else tuple(nonzero_terms)
    )


def product(left: Normal, right: Normal) -> Normal:
    """The product; indices of sums are renamed apart."""
    terms = []
    for first, a in left:
        for second, b in right:
            terms.append(_scale_terms(_join_monomials(first, second), a * b))
    return total(*terms)


def _scale_terms(normal: Normal, by: Fraction) -> Normal:
    return tuple((monomial, value * by) for monomial, value in normal)


def _join_monomials(first: Monomial, second: Monomial) -> Normal:
    # Names of other terms must not be taken for the names inside a factor.
    first = _rename_binders(first, "'") if first[0] else first
    second = _rename_binders(second, '"') if second[0] else second
    return canonical((*first[0], *second[0]), _merge_factors(first[1], second[1]))


def _merge_factors(left: Factors, right: Factors) -> Factors:
    powers: dict[Atom, int] = dict(left)
    for atom, power in right:
        powers[atom] = powers.get(atom, 0) + power
    return _sort_factors(powers)


def _sort_factors(powers: Mapping[Atom, int]) -> Factors:
    nonzero_factors = []
    for atom, power in powers.items():
        if power:  # the first rank counts or does not: its powers are equal
            nonzero_factors.append((atom, min(power, 1) if atom[0] == "first" else power))
    return tuple(sorted(nonzero_factors, key=order))


def inverse(value: Normal) -> Normal:
    """One over it; a single product is inverted factor by factor."""
    if len(value) == 1 and not value[0][0][0]:
        (_, factors), coefficient = value[0]
        turned = tuple((atom, -power) for atom, power in factors)
        if all(atom[0] != "first" for atom, _ in factors):
            return ((((), turned), 1 / coefficient),)
    return factor(("inv", value))


def of_index(poly: Poly) -> Normal:
    """An index or a size as a number."""
    terms = []
    for monomial, value in poly:
        powers: dict[Atom, int] = {}
        for symbol_name in monomial:
            powers[("sym", symbol_name)] = powers.get(("sym", symbol_name), 0) + 1
        terms.append(((((), _sort_factors(powers)), Fraction(value)),))
    return total(*terms)


# --- Replacing indices ----------------------------------------------------------------------------


def replace_in(value: Normal, by: Mapping[Atom, Poly]) -> Normal:
    """A normal form with indices replaced."""
    return total(
        *(_scale_terms(_replace_in_monomial(monomial, by), size) for monomial, size in value)
    )


def _replace_in_monomial(monomial: Monomial, by: Mapping[Atom, Poly]) -> Normal:
    binders, factors = monomial
    result = number(1)
    for atom, power in factors:
        replace = _replace_in_atom(atom, by)
        if len(replace) == 1 and not replace[0][0][0]:
            ((_, inner), coefficient) = replace[0]
            powered = tuple((inner_atom, exponent * power) for inner_atom, exponent in inner)
            replace = ((((), powered), coefficient**power),)
        elif power != 1:
            replace = factor(("inv", replace)) if power < 0 else replace
            for _ in range(abs(power) - 1):
                replace = product(replace, replace)
        result = product(result, replace)
    if not binders:
        return result
    sizes = tuple(_replace_in_binder(binder, by) for binder in binders)
    out = []
    for (inner_binders, inner), coefficient in result:
        out.append(_scale_terms(canonical((*sizes, *inner_binders), inner), coefficient))
    return total(*out)


def _replace_in_binder(binder: Binder, by: Mapping[Atom, Poly]) -> Binder:
    name, size = binder
    replaced = by.get(name)
    new = replaced[0][0][0] if replaced else name
    return new, indices.replace(size, by, {})


def _replace_in_atom(atom: Atom, by: Mapping[Atom, Poly]) -> Normal:
    kind = atom[0]
    if kind == "sym":
        return of_index(indices.replace(symbol(atom[1]), by, {}))
    if kind in ("read", "draw"):
        places = tuple(indices.replace(position, by, {}) for position in atom[3])
        rank = atom[2] if atom[2] is None else indices.replace(atom[2], by, {})
        return factor((kind, atom[1], rank, places))
    if kind == "first":
        return factor(("first", indices.replace(atom[1], by, {})))
    if kind == "fn":
        return factor((kind, atom[1], tuple(replace_in(argument, by) for argument in atom[2])))
    if kind == "inv":
        return inverse(replace_in(atom[1], by))
    if kind == "fun":
        arrays = tuple(
            (tuple(_replace_in_binder(b, by) for b in binders), replace_in(body, by))
            for binders, body in atom[2]
        )
        return factor((kind, atom[1], arrays, tuple(indices.replace(p, by, {}) for p in atom[3])))
    binders = tuple(_replace_in_binder(binder, by) for binder in atom[1])
    return factor((kind, binders, replace_in(atom[2], by)))


def _rename_binders(monomial: Monomial, mark: str) -> Monomial:
    by = {name: symbol(name + mark) for name, _ in monomial[0]}
    ((renamed, _),) = _uncanonical(monomial, by)
    return renamed


def _uncanonical(monomial: Monomial, by: Mapping[Atom, Poly]) -> Normal:
    binders, factors = monomial
    replaced = _replace_in_monomial(((), factors), by)
    sizes = tuple(_replace_in_binder(binder, by) for binder in binders)
    (((_, inner), coefficient),) = replaced
    return (((sizes, inner), coefficient),)


# --- Names of bound indices -----------------------------------------------------------------------


def depth(thing: Any, apart: frozenset[str] = frozenset()) -> int:
    """The number of levels of bound indices in it, without some names."""
    if isinstance(thing, str):
        level_parts = thing[1:].partition(".")
        is_bound_index = thing.startswith("%") and level_parts[0].isdigit() and thing not in apart
        return int(level_parts[0]) if is_bound_index else 0
    if isinstance(thing, tuple):
        return max((depth(part, apart) for part in thing), default=0)
    return 0


def occurs(name: str, thing: Any) -> bool:
    """Whether an index occurs in it."""
    if isinstance(thing, tuple):
        return any(occurs(name, part) for part in thing)
    return isinstance(thing, str) and thing == name


def canonical(binders: tuple[Binder, ...], factors: Factors) -> Normal:
    """A product under sums, with bound indices named by their places.

    A sum over an index that does not occur is a multiplication by its size.
    """
    for binder in binders:
        if not _is_used(binder, binders, factors):
            other_binders = tuple(other for other in binders if other != binder)
            return total(
                *(
                    _scale_terms(canonical(other_binders, _merge_factors(factors, sizes)), value)
                    for (_, sizes), value in of_index(binder[1])
                )
            )
    binders, factors = _without_ranks(binders, factors)
    if not binders:
        return (((binders, factors), Fraction(1)),)
    level = _level(binders, factors)
    return (
        (_best_names(binders, level, lambda by: _apply_names(binders, factors, by)), Fraction(1)),
    )


def _level(binders: tuple[Binder, ...], body: Any) -> int:
    """The level of bound indices: above all inside."""
    return depth(body, frozenset(name for name, _ in binders)) + 1


def _apply_names(
    binders: tuple[Binder, ...], factors: Factors, by: Mapping[Atom, Poly]
) -> tuple[tuple[Binder, ...], Factors]:
    ((((sizes, inner), _)),) = _uncanonical((binders, factors), by)
    return tuple(sorted(sizes, key=order)), inner


def _is_used(binder: Binder, binders: tuple[Binder, ...], body: Any) -> bool:
    name = binder[0]
    sizes = tuple(size for other, size in binders if other != name)
    return occurs(name, body) or occurs(name, sizes)


def _without_ranks(
    binders: tuple[Binder, ...], factors: Factors
) -> tuple[tuple[Binder, ...], Factors]:
    """Sums over ranks that are known.

    If only the first rank counts, it is its term. The sizes of the parts add up to the whole.
    """
    for name, size in binders:
        if size != symbol(RANKS):
            continue
        others = tuple(binder for binder in binders if binder[0] != name)
        only = (("first", symbol(name)), 1)
        if only in factors:
            other_factors = tuple(factor_pair for factor_pair in factors if factor_pair != only)
            ((((sizes, inner), _)),) = _uncanonical((others, other_factors), {name: ZERO})
            return _without_ranks(sizes, inner)
        part = (("sym", (indices.PART, name)), 1)
        if part in factors:
            other_factors = tuple(factor_pair for factor_pair in factors if factor_pair != part)
            if not occurs(name, other_factors) and not occurs(
                name, tuple(size for _, size in others)
            ):
                return _without_ranks(
                    others, _merge_factors(other_factors, ((("sym", LENGTH), 1),))
                )
    return binders, factors


def _best_names(binders: tuple[Binder, ...], level: int, named: Callable[..., Any]) -> Any:
    """The smallest of the forms under all orders of the bound indices."""
    if len(binders) > _MOST_BINDERS:
        raise OutsideTheoryError(f"a term with {len(binders)} nested reductions")
    names = [name for name, _ in binders]
    groups: dict[str, list[str]] = {}
    for name, size in binders:
        masked = "".join("?" if atom in names else order(atom) for atom in indices.atoms(size))
        groups.setdefault(masked + order(size) * (not _mentions(size, names)), []).append(name)
    ordered = [groups[key] for key in sorted(groups)]
    forms = []
    for choice in itertools.product(*(itertools.permutations(group) for group in ordered)):
        flat = [name for group in choice for name in group]
        by = {name: symbol(f"%{level}.{at}") for at, name in enumerate(flat)}
        forms.append(named(by))
    return min(forms, key=order) if len(forms) > 1 else forms[0]


def _mentions(size: Poly, names: list[str]) -> bool:
    return any(atom in names for atom in indices.atoms(size))


def reduce_over(kind: str, binders: tuple[Binder, ...], body: Normal) -> Normal:
    """The maximum, minimum or product over indices."""
    if len(body) == 1 and body[0][1] == 1 and not body[0][0][0]:
        factors = body[0][0][1]
        if len(factors) == 1 and factors[0][1] == 1 and factors[0][0][0] == kind:
            inner = factors[0][0]
            by = {name: symbol(name + "'") for name, _ in inner[1]}
            renamed = tuple(_replace_in_binder(binder, by) for binder in inner[1])
            return reduce_over(kind, (*binders, *renamed), replace_in(inner[2], by))
    if kind in ("max", "min"):  # the same for all values of an index that does not occur
        for binder in binders:
            if not _is_used(binder, binders, body):
                return reduce_over(kind, tuple(other for other in binders if other != binder), body)
        if not binders:
            return body
    return factor(_close(kind, binders, body))


def _close(kind: str, binders: tuple[Binder, ...], body: Normal) -> Atom:
    level = _level(binders, body)

    def rename_atom(by: Mapping[Atom, Poly]) -> Atom:
        sizes = tuple(_replace_in_binder(binder, by) for binder in binders)
        return kind, tuple(sorted(sizes, key=order)), replace_in(body, by)

    return _best_names(binders, level, rename_atom)


def array(binders: tuple[Binder, ...], body: Normal) -> tuple[tuple[Binder, ...], Normal]:
    """A term over its own indices, in their order."""
    level = _level(binders, body)
    by = {name: symbol(f"%{level}.{at}") for at, (name, _) in enumerate(binders)}
    return tuple(_replace_in_binder(binder, by) for binder in binders), replace_in(body, by)
