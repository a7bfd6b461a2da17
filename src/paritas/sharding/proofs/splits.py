"""Both sides of a split as normal forms: the whole operator, and the ranks' results put together.

A split replaces an index of the whole by a rank and an index within its part: `i = o(r) + j`, where
the part of rank r begins at `o(r)` and has `m(r)` elements. Nothing else is known about the parts
than that they follow each other and make up the whole, so what is shown holds for every length,
every number of ranks and parts of unequal size. If that fails, the parts are taken to be equal: `m`
for all ranks, `o(r) = r m`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from paritas.core.operators import indices
from paritas.core.operators.indices import LENGTH, OFFSET, PART, ZERO, Atom, Poly, symbol
from paritas.core.operators.terms import OutsideTheoryError
from paritas.sharding.proofs import algebra
from paritas.sharding.proofs.algebra import RANKS, Binder, Normal, Normaliser, Side

if TYPE_CHECKING:
    from collections.abc import Mapping
    from fractions import Fraction

    from paritas.core.operators.catalogue import DefinedOutput

# The rank of which a result is compared.
RANK = "%r"

# What a rank receives of a tensor, and what its result is: ("shard", dim), ("replicate",),
# ("once",), ("partial", reduction).
RoleWords = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A split of an operator as data: all that a proof needs, and all that a certificate has.

    Attributes:
        tensors: for each argument, its sizes in terms of lengths, and its role.
        numbers: for each number that depends on a length, its value on the whole and on a rank.
        outputs: the results, and their roles.
        requires: what sizes must satisfy for the operator to run: `("same", a, b)`, or
            `("keep", a)`, a size that a split must leave as it is.
    """

    tensors: Mapping[str, tuple[tuple[Poly, ...], RoleWords]]
    numbers: Mapping[str, tuple[Poly, Poly]]
    outputs: tuple[tuple[DefinedOutput, RoleWords], ...]
    requires: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why the two sides are not known to be equal."""

    reason: str


def find_proof(claim: Claim) -> tuple[str, tuple[str, ...]] | Failure:
    """Compare both sides, for any parts and then for equal ones.

    Returns:
        "any" or "equal", and the normal form of each result; or why there is no proof.
    """
    first = _Comparison(claim, equal=False).forms()
    if not isinstance(first, Failure):
        return "any", first
    second = _Comparison(claim, equal=True).forms()
    return first if isinstance(second, Failure) else ("equal", second)


class _Comparison:
    def __init__(self, claim: Claim, *, equal: bool) -> None:
        self.claim = claim
        self.equal = equal
        rank = symbol(RANK)
        self.part: Poly = symbol("m") if equal else symbol((PART, RANK))
        self.offset: Poly = indices.multiply(rank, symbol("m")) if equal else symbol((OFFSET, RANK))
        length = indices.multiply(symbol(RANKS), symbol("m")) if equal else symbol(LENGTH)
        self.lengths: dict[Atom, Poly] = {LENGTH: length}
        self.whole_sizes: dict[Atom, Poly] = {}
        self.local_sizes: dict[Atom, Poly] = {}
        self.offsets: dict[str, tuple[int, Poly]] = {}

    def forms(self) -> tuple[str, ...] | Failure:
        """The normal form of each result, if both sides have the same."""
        self._unify()
        self._measure()
        failure = self._requirements()
        if failure is not None:
            return failure
        self.whole = Normaliser(
            Side(self.whole_sizes, self._read_whole, self._draw_whole, self._tile)
        )
        self.local = Normaliser(
            Side(self.local_sizes, self._read_local, self._draw_local, lambda *_: None)
        )
        normal_forms = []
        for at, (output, role) in enumerate(self.claim.outputs):
            what = f"result {at}" if output.written is None else f"argument {output.written} after"
            form = self._compare(output, role, what)
            if isinstance(form, Failure):
                return form
            normal_forms.append(form)
        return tuple(normal_forms)

    # --- sizes ------------------------------------------------------------------------------------

    def _unify(self) -> None:
        """Sizes that the operator needs to be equal are equal: it would not run otherwise."""
        generic = {
            f"{name}.{at}": size
            for name, (sizes, _) in self.claim.tensors.items()
            for at, size in enumerate(sizes)
        } | {name: whole_number for name, (whole_number, _) in self.claim.numbers.items()}
        for kind, *sizes in self.claim.requires:
            if kind != "same":
                continue
            left, right = (
                indices.replace(indices.replace(size, generic, {}), self.lengths, {})
                for size in sizes
            )
            for replaced_size, other in ((left, right), (right, left)):
                name = _single(replaced_size)
                if left != right and name is not None and name not in (LENGTH, RANKS, "m"):
                    if name in indices.atoms(other):
                        raise OutsideTheoryError(f"a size that depends on itself ({name})")
                    self.lengths = {
                        key: indices.replace(value, {name: other}, {})
                        for key, value in self.lengths.items()
                    } | {name: other}
                    break

    def _resolve(self, poly: Poly) -> Poly:
        return indices.replace(poly, self.lengths, {})

    def _measure(self) -> None:
        length = self.lengths[LENGTH]
        for name, (sizes, role) in self.claim.tensors.items():
            for at, size in enumerate(sizes):
                whole_size = self._resolve(size)
                local = whole_size
                if role[0] == "shard" and role[1] == at:
                    unit = indices.quotient(whole_size, length)
                    if unit is None:
                        raise OutsideTheoryError(
                            f"dimension {at} of {name}, which is not a multiple of the length"
                        )
                    local = indices.multiply(self.part, unit)
                    self.offsets[name] = (at, indices.multiply(self.offset, unit))
                self.whole_sizes[f"{name}.{at}"] = whole_size
                self.local_sizes[f"{name}.{at}"] = local
        ranked = {**self.lengths, "m": self.part, "o": self.offset}
        for name, (whole_size, local) in self.claim.numbers.items():
            self.whole_sizes[name] = self._resolve(whole_size)
            self.local_sizes[name] = indices.replace(local, ranked, {})

    def _requirements(self) -> Failure | None:
        for kind, *sizes in self.claim.requires:
            local = [indices.replace(size, self.local_sizes, {}) for size in sizes]
            whole_sizes = [indices.replace(size, self.whole_sizes, {}) for size in sizes]
            if kind == "same" and local[0] != local[1] and local != whole_sizes:
                return Failure("on a rank, sizes that must be equal are not")
            if kind == "keep" and local != whole_sizes:
                what = shown_index(sizes[0])
                what = f"argument {what[1:]}" if what.startswith("#") else f"the size {what}"
                changed = f"{shown_index(whole_sizes[0])}, on a rank {shown_index(local[0])}"
                return Failure(
                    f"{what} is {changed}; how the operator depends on it is not written out"
                )
        return None

    # --- elements ---------------------------------------------------------------------------------

    def _read_whole(self, name: str, places: tuple[Poly, ...]) -> Normal:
        role = self.claim.tensors[name][1]
        if role[0] != "partial":
            return algebra.factor(("read", name, None, places))
        rank = self.whole.fresh() + "r"
        term = algebra.factor(("read", name, symbol(rank), places))
        return self._over_ranks(role[1], rank, term)

    def _read_local(self, name: str, places: tuple[Poly, ...]) -> Normal:
        role = self.claim.tensors[name][1]
        if role[0] == "partial":
            return algebra.factor(("read", name, symbol(RANK), places))
        if name in self.offsets:
            dim, offset = self.offsets[name]
            moved = indices.add(places[dim], offset)
            places = (*places[:dim], moved, *places[dim + 1 :])
        term = algebra.factor(("read", name, None, places))
        if role[0] == "once":
            return algebra.product(algebra.factor(("first", symbol(RANK))), term)
        return term

    def _draw_whole(self, name: str, shape: tuple[Poly, ...], places: tuple[Poly, ...]) -> Normal:
        return algebra.factor(("draw", name, None, places))

    def _draw_local(self, name: str, shape: tuple[Poly, ...], places: tuple[Poly, ...]) -> Normal:
        """Each rank draws its part of the numbers of the whole."""
        moved = list(places)
        for at, size in enumerate(shape):
            whole_size = indices.replace(size, self.whole_sizes, {})
            local = indices.replace(size, self.local_sizes, {})
            if whole_size != local:
                moved[at] = indices.add(moved[at], self._offset_of(whole_size, local))
        return algebra.factor(("draw", name, None, tuple(moved)))

    def _offset_of(self, poly: Poly, local: Poly) -> Poly:
        """Where a part begins; its size and that of the whole are the same multiple of a length."""
        unit = indices.quotient(poly, self.lengths[LENGTH])
        if unit is None or indices.multiply(self.part, unit) != local:
            raise OutsideTheoryError("a part whose size is not a multiple of the rank's length")
        return indices.multiply(self.offset, unit)

    def _tile(self, name: str, size: Poly) -> tuple[tuple[Binder, ...], Poly] | None:
        unit = indices.quotient(size, self.lengths[LENGTH])
        if unit is None or unit == ZERO:
            return None
        rank = name + "r"
        if self.equal:
            part, offset = symbol("m"), indices.multiply(symbol(rank), symbol("m"))
        else:
            part, offset = symbol((PART, rank)), symbol((OFFSET, rank))
        binders = ((rank, symbol(RANKS)), (name, indices.multiply(part, unit)))
        return binders, indices.add(indices.multiply(offset, unit), symbol(name))

    # --- results ----------------------------------------------------------------------------------

    def _compare(self, output: DefinedOutput, role: RoleWords, what: str) -> str | Failure:
        whole_shape = [indices.replace(size, self.whole_sizes, {}) for size in output.shape]
        local_shape = [indices.replace(size, self.local_sizes, {}) for size in output.shape]
        places = {name: symbol(name) for name in output.index}
        ranges: dict[Atom, Poly] = dict(zip(output.index, local_shape, strict=True))
        ranges[RANK] = symbol(RANKS)
        whole_places: dict[Atom, Poly] = dict(places)
        if role[0] == "shard":
            dim = role[1]
            if dim >= len(whole_shape):
                return Failure(f"{what} has no dimension {dim}")
            try:
                offset = self._offset_of(whole_shape[dim], local_shape[dim])
            except OutsideTheoryError:
                return Failure(f"the parts of {what} do not make up its dimension {dim}")
            name = output.index[dim]
            whole_places[name] = indices.add(offset, symbol(name))
            whole_shape[dim] = local_shape[dim]
        if whole_shape != local_shape:
            return Failure(f"{what} of a rank has another shape than the whole")
        whole_form = self.whole.normal(output.term, whole_places, ranges)
        local = self.local.normal(output.term, places, ranges)
        if role[0] == "partial":
            local = self._over_ranks(role[1], RANK, local)
        if whole_form != local:
            return Failure(
                f"{what}: the whole has {show_form(whole_form)}, the ranks have {show_form(local)}"
            )
        return show_form(whole_form)

    def _over_ranks(self, reduction: str, rank: str, term: Normal) -> Normal:
        binders = ((rank, symbol(RANKS)),)
        if reduction in ("max", "min"):
            return algebra.reduce_over(reduction, binders, term)
        if reduction == "product":
            return algebra.reduce_over("prod", binders, term)
        joined = algebra.sum_over(binders, term)
        if reduction == "avg":
            joined = algebra.product(joined, algebra.inverse(algebra.of_index(symbol(RANKS))))
        return joined


def _single(poly: Poly) -> str | None:
    """The symbol that it is."""
    if len(poly) == 1 and poly[0][1] == 1 and len(poly[0][0]) == 1:
        atom = poly[0][0][0]
        return atom if isinstance(atom, str) else None
    return None


# --- Normal forms in words ------------------------------------------------------------------------

_SHORT = {PART: "m", OFFSET: "o"}


def show_form(value: Normal) -> str:
    """A normal form as a person reads it."""
    if not value:
        return "0"
    return " + ".join(_shown_monomial(monomial, size) for monomial, size in value)


def _shown_monomial(monomial: algebra.Monomial, size: Fraction) -> str:
    binders, factors = monomial
    sums = "".join(f"sum({name} < {shown_index(length)}) " for name, length in binders)
    parts = [_shown_atom(atom) + ("" if power == 1 else f"^{power}") for atom, power in factors]
    if size != 1 or not parts:
        parts.insert(0, str(size))
    return sums + " ".join(parts)


def _shown_atom(atom: Atom) -> str:
    kind = atom[0]
    if kind == "sym":
        return shown_index(symbol(atom[1]))
    if kind in ("read", "draw"):
        places = ", ".join(map(shown_index, atom[3]))
        name = f"args[{atom[1]}]" if atom[1][:1].isdigit() else atom[1]
        rank = "" if atom[2] is None else f" of rank {shown_index(atom[2])}"
        return f"{name}[{places}]{rank}"
    if kind == "first":
        return f"[{shown_index(atom[1])} = 0]"
    if kind == "fn":
        return f"{atom[1]}({', '.join(map(show_form, atom[2]))})"
    if kind == "inv":
        return f"1/({show_form(atom[1])})"
    if kind == "fun":
        arrays = []
        for binders, body in atom[2]:
            names = ", ".join(f"{name} < {shown_index(size)}" for name, size in binders)
            arrays.append(f"({names}: {show_form(body)})" if names else show_form(body))
        places = ", ".join(map(shown_index, atom[3]))
        return f"{atom[1]}({', '.join(arrays)})[{places}]"
    names = ", ".join(f"{name} < {shown_index(size)}" for name, size in atom[1])
    return f"{kind}({names}: {show_form(atom[2])})"


def shown_index(poly: Poly) -> str:
    """An index or a size as a person reads it."""
    if poly == ZERO:
        return "0"
    parts = []
    for monomial, value in poly:
        names = [_shown_symbol(symbol_name) for symbol_name in monomial]
        if value != 1 or not names:
            names.insert(0, str(value))
        parts.append(" ".join(names))
    return " + ".join(parts)


def _shown_symbol(atom: Atom) -> str:
    if isinstance(atom, str):
        return atom
    if atom[0] in ("//", "%"):
        return f"({shown_index(atom[1])} {atom[0]} {shown_index(atom[2])})"
    if atom[0] == "size":
        return f"size({atom[1]})"
    return f"{_SHORT[atom[0]]}({atom[1]})"
