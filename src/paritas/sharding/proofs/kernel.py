"""The algebra of a certificate: whether a split is right for the definition in it.

It imports nothing of paritas and shares no code with what finds proofs. It takes the definition of
the operator from the certificate, works out both sides of the split itself, and compares them.
Whether this is the definition of the operator that the certificate names is not known here:
`checker` builds it again from the name and the arguments, and compares.

The laws: sums and products of real numbers; a sum, maximum, minimum or product over the whole is
one over the ranks of those over their parts, which begin at `o(r)` and have `m(r)` elements of `N`;
functions of equal arguments are equal. All of these laws are kept by differentiation.
"""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction
from typing import Any

COUNT = itertools.count()


class Refused(Exception):
    """The certificate does not show what it claims."""


class Poly(frozenset):  # type: ignore[type-arg]
    # An integer expression: pairs of a frozen set of (atom, power), and a coefficient. Atoms are
    # sizes, indices (`%...`), ("//", a, b), ("%", a, b), ("size", function, arguments), and for a
    # rank ("m", rank) and ("o", rank).

    @staticmethod
    def read(data: Any) -> Poly:
        def atom(atom_data: Any) -> Any:
            if isinstance(atom_data, str):
                return atom_data
            if atom_data[0] == "size":
                return ("size", atom_data[1], tuple(map(Poly.read, atom_data[2])))
            return ({"//": "//", "%": "%"}[atom_data[0]], *map(Poly.read, atom_data[1:]))

        monomials = ((add((atom(raw), 1) for raw in atoms), value) for atoms, value in data)
        return Poly(add((frozenset(monomial), value) for monomial, value in monomials))

    def __add__(self, other: Any) -> Poly:
        return Poly(add((*self, *other)))

    def __sub__(self, other: Any) -> Poly:
        return Poly(add((*self, *((monomial, -value) for monomial, value in other))))

    def __mul__(self, other: Any) -> Poly:
        pairs = itertools.product(self, other)
        return Poly(add((frozenset(add((*a, *b))), x * y) for (a, x), (b, y) in pairs))

    def each(self, function: Any) -> Poly:
        total = number(0)
        for monomial, value in self:
            term = number(value)
            for atom, power in monomial:
                for _ in range(power):
                    term = term * function(atom)
            total = total + term
        return total

    def put(self, by: Any, ranges: Any = ()) -> Poly:
        def replaced(atom: Any) -> Any:
            if atom in by or atom[0] not in ("//", "%", "size") or isinstance(atom, str):
                return by.get(atom, name(atom))
            if atom[0] == "size":
                return name(("size", atom[1], tuple(part.put(by, ranges) for part in atom[2])))
            return atom[1].put(by, ranges).floor(atom[0], atom[2].put(by, ranges), ranges)

        return self.each(replaced)

    def divide(self, by: Poly) -> tuple[Poly, Poly]:
        if len(by) != 1:
            return (number(1), number(0)) if self == by else (number(0), self)
        ((divisor, value),) = by
        parts: tuple[list[Any], list[Any]] = ([], [])
        for monomial, size in self:
            quotient = frozenset(add((*monomial, *((atom, -power) for atom, power in divisor))))
            fits = size % value == 0 and all(power > 0 for _, power in quotient)
            parts[not fits].append((quotient, size // value) if fits else (monomial, size))
        return Poly(add(parts[0])), Poly(add(parts[1]))

    def floor(self, kind: str, by: Poly, ranges: Any) -> Poly:
        quotient, rest = self.divide(by)
        if not rest or rest.below(by, ranges):
            return quotient if kind == "//" else rest
        return (quotient if kind == "//" else number(0)) + name((kind, rest, by))

    def below(self, size: Poly, ranges: Any) -> bool:
        """Whether it is certainly from 0 to size - 1, if sizes are 1 or more."""
        try:
            slack = (size - self.top(ranges)).each(lambda atom: name(atom) + number(is_size(atom)))
        except ValueError:
            return False
        return all(value >= 0 for _, value in slack) and any(not monomial for monomial, _ in slack)

    def top(self, ranges: Any) -> Poly:
        """A bound; ValueError if it may be negative, or has none."""

        def bound(atom: Any) -> Any:
            if atom in ranges or atom[0] == "%":
                if isinstance(atom, str) and atom not in ranges:
                    raise ValueError
                return (ranges[atom] if atom in ranges else atom[2]) - number(1)
            if isinstance(atom, tuple) and atom[0] == "o":  # a part ends within the whole
                return name("N") - name(("m", atom[1]))
            if isinstance(atom, tuple) and atom[0] == "//":
                quotient, rest = atom[1].top(ranges).divide(atom[2])
                if rest and rest != number(-1) and not rest.below(atom[2], ranges):
                    raise ValueError
                return quotient - number(int(rest == number(-1)))
            return name(atom)

        if any(value < 0 for _, value in self):
            raise ValueError
        return self.each(bound)


def number(value: int) -> Poly:
    return Poly({(frozenset(), value)} if value else ())


def name(atom: Any) -> Poly:
    return Poly({(frozenset({(atom, 1)}), 1)})


def is_size(atom: Any) -> bool:
    return not atom.startswith("%") if isinstance(atom, str) else atom[0] == "m"


# --- Sums of products: lists of pairs of a term and its coefficient -------------------------------

# A term is ("bound", binders, factors, False): its factors, a list of pairs of an atom and a power,
# under sums over its binders, pairs of a name, unlike all others, and a size. An atom is a tuple,
# perhaps with sums, also under binders of its own; if their order counts, the last entry is True.


def term(binders: Any, factors: Any, value: Any = 1) -> list[Any]:
    return [(("bound", tuple(binders), list(factors), False), Fraction(value))]


def one(*atom: Any) -> list[Any]:
    return term((), [(atom, 1)])


def of_poly(poly: Poly) -> list[Any]:
    return add(*(term((), [(("sym", a), p) for a, p in monomial], v) for monomial, v in poly))


def rename(thing: Any, by: Any) -> Any:
    if isinstance(thing, frozenset | tuple | list):
        return type(thing)(rename(part, by) for part in thing)
    return by.get(thing, thing) if isinstance(thing, str) else thing


def apart(bound: Any) -> Any:
    return rename(bound, {k: f"%c{next(COUNT)}" for k, _ in bound[1]})[1:3]


def mentions(thing: Any, what: str) -> bool:
    return bool(rename(thing, {what: ""}) != thing)


def add(*lists: Any) -> list[Any]:
    """All pairs, with the numbers of equal things added: a sum of sums, a product of factors."""
    totals: list[Any] = []
    for thing, value in itertools.chain(*lists):
        at = next((i for i, (other, _) in enumerate(totals) if same(thing, other)), None)
        if at is None:
            totals.append((thing, value))
        else:
            totals[at] = (thing, totals[at][1] + value)
    return [(thing, value) for thing, value in totals if value]


def multiply(left: list[Any], right: list[Any]) -> list[Any]:
    terms = []
    for (a, x), (b, y) in itertools.product(left, right):
        (first, some), (second, others) = apart(a), apart(b)
        terms.append(term(first + second, add(some, others), x * y))
    return add(*terms)


def invert(value: list[Any]) -> list[Any]:
    if len(value) == 1 and not value[0][0][1] and not mentions(value, "first"):
        return term((), [(atom, -power) for atom, power in value[0][0][2]], 1 / value[0][1])
    return one("inv", value)


def sum_over(k: str, size: Poly, body: list[Any]) -> list[Any]:
    terms = []
    for bound, value in body:
        binders, factors = apart(bound)
        first, part = ("first", name(k)), ("sym", ("m", k))
        others = [pair for pair in factors if pair not in ((first, 1), (part, 1))]
        rank_factors = [atom for atom in (first, part) if (atom, 1) in factors]
        if not mentions((factors, binders), k):
            terms.append(multiply(term(binders, factors, value), of_poly(size)))
        elif size == name("R") and len(rank_factors) == 1 and not mentions((others, binders), k):
            # Only the first rank has it; or the parts of all ranks make up the whole.
            length_factors = [] if rank_factors == [first] else [(("sym", "N"), 1)]
            terms.append(term(binders, add(others, length_factors), value))
        else:
            terms.append(term((*binders, (k, size)), factors, value))
    return add(*terms)


def extreme(kind: str, binders: Any, body: list[Any]) -> list[Any]:
    if len(body) == 1 and body[0][1] == 1 and not body[0][0][1]:
        factors = body[0][0][2]
        if [(atom[0], power) for atom, power in factors] == [(kind, 1)]:
            inner, inside = apart(factors[0][0][1])
            return extreme(kind, (*binders, *inner), inside)
    for at, (k, _) in enumerate(binders if kind != "prod" else ()):
        others = binders[:at] + binders[at + 1 :]
        if not mentions((body, others), k):
            return extreme(kind, others, body)
    return one(kind, ("bound", tuple(binders), body, False)) if binders else body


def over_ranks(kind: str, rank: str, body: list[Any]) -> list[Any]:
    if kind in ("max", "min", "product"):
        return extreme("prod" if kind == "product" else kind, ((rank, name("R")),), body)
    joined = sum_over(rank, name("R"), body)
    return multiply(joined, invert(of_poly(name("R")))) if kind == "avg" else joined


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right) or not isinstance(left, tuple | list):
        return bool(left == right)
    if len(left) != len(right):
        return False
    if isinstance(left, list):
        rest = list(right)
        for thing in left:
            at = next((i for i, other in enumerate(rest) if same(thing, other)), None)
            if at is None:
                return False
            del rest[at]
        return True
    if left[:1] != ("bound",) or right[:1] != ("bound",):
        return all(map(same, left, right))
    if left[3] != right[3] or len(left[1]) != len(right[1]) or len(left[1]) > 6:  # noqa: PLR2004
        return False
    for order in [right[1]] if left[3] else itertools.permutations(right[1]):
        renamed = rename(left, {k: new for (k, _), (new, _) in zip(left[1], order, strict=True)})
        if renamed[1] == tuple(order) and same(renamed[2], right[2]):
            return True
    return False


# --- The certificate ------------------------------------------------------------------------------


class Kernel:
    def __init__(self, data: Any) -> None:
        self.data, self.equal = data, {"any": False, "equal": True}[data["parts"]]
        self.length = name("R") * name("m") if self.equal else name("N")
        self.part, self.offset = self.parts("%r")
        self.roles = {key: tensor["role"] for key, tensor in data["tensors"].items()}
        sizes = {
            f"{key}.{at}": Poly.read(size)
            for key, tensor in data["tensors"].items()
            for at, size in enumerate(tensor["sizes"])
        } | {key: Poly.read(pair[0]) for key, pair in data["numbers"].items()}
        substitutions = self.equalities(sizes)
        self.whole = {key: size.put(substitutions) for key, size in sizes.items()}
        self.local = dict(self.whole)
        for key, role in self.roles.items():
            if role[0] == "shard":
                size = self.local[f"{key}.{role[1]}"]
                self.local[f"{key}.{role[1]}"] = self.part * self.unit(size)
        by = {**substitutions, "m": self.part, "o": self.offset}
        self.local |= {key: Poly.read(pair[1]).put(by) for key, pair in data["numbers"].items()}

    def parts(self, rank: str) -> tuple[Poly, Poly]:
        equal_part = (name("m"), name(rank) * name("m"))
        return equal_part if self.equal else (name(("m", rank)), name(("o", rank)))

    def unit(self, size: Poly) -> Poly:
        quotient, rest = size.divide(self.length)
        if rest or not quotient:
            raise Refused("what is split is not a multiple of the length")
        return quotient

    def equalities(self, sizes: Any) -> dict[Any, Poly]:
        substitutions = {"N": self.length}
        for pair in [rest for kind, *rest in self.data["requires"] if kind == "same"]:
            left, right = (Poly.read(size).put(sizes).put(substitutions) for size in pair)
            for a, b in ((left, right), (right, left)):
                size_name = next((atom for monomial, _ in a for atom, _ in monomial), "R")
                free = (
                    isinstance(size_name, str)
                    and size_name not in ("N", "R", "m")
                    and a == name(size_name)
                )
                if left != right and free and not mentions(b, size_name):
                    substitutions = {k: v.put({size_name: b}) for k, v in substitutions.items()} | {
                        size_name: b
                    }
                    break
        return substitutions

    def element(self, key: str, places: list[Poly], *, local: bool) -> list[Any]:
        role, rank = self.roles[key], "%r" if local else f"%c{next(COUNT)}"
        if role[0] == "partial":
            read_term = one("read", key, tuple(places), name(rank))
            return read_term if local else over_ranks(role[1], rank, read_term)
        if role[0] == "shard" and local:
            unit = self.unit(self.whole[f"{key}.{role[1]}"])
            places[role[1]] = places[role[1]] + self.offset * unit
        read_term = one("read", key, tuple(places))
        return (
            multiply(one("first", name("%r")), read_term)
            if role[0] == "once" and local
            else read_term
        )

    def value(self, data: Any, env: Any, ranges: Any, *, local: bool) -> list[Any]:
        kind, *rest = data

        def index(poly: Any) -> Poly:
            sizes = self.local if local else self.whole
            return Poly.read(poly).put({**sizes, **env}, ranges)

        def inner(part: Any) -> list[Any]:
            return self.value(part, env, ranges, local=local)

        if kind == "num":
            return add(term((), [], Fraction(rest[0])))
        if kind == "int":
            return of_poly(index(rest[0]))
        if kind in ("inv", "add"):
            return invert(inner(rest[0])) if kind == "inv" else add(*map(inner, rest[0]))
        if kind == "fn":
            return one("fn", rest[0], tuple(map(inner, rest[1])))
        if kind == "mul":
            return functools.reduce(multiply, map(inner, rest[0]), term((), []))
        if kind == "read":
            return self.element(rest[0], list(map(index, rest[1])), local=local)
        if kind == "fun":
            arrays = []
            for binders, body in rest[1]:
                new_binders = [(f"%c{next(COUNT)}", index(size)) for _, size in binders]
                bound = {
                    k: name(new) for (k, _), (new, _) in zip(binders, new_binders, strict=True)
                }
                array = self.value(
                    body, {**env, **bound}, {**ranges, **dict(new_binders)}, local=local
                )
                arrays.append(("bound", tuple(new_binders), array, True))
            return one("fun", rest[0], tuple(arrays), tuple(map(index, rest[2])))
        return self.reduction(kind, rest, (env, ranges), index(rest[1]), local=local)

    def reduction(self, kind: str, rest: Any, where: Any, size: Poly, *, local: bool) -> list[Any]:
        k, rank = f"%c{next(COUNT)}", f"%c{next(COUNT)}"
        unit, remainder = size.divide(self.length)
        binders: Any = ((k, size),)
        at = name(k)
        if size == number(1):
            binders, at = (), number(0)
        elif not local and unit and not remainder:  # over the parts of all ranks
            part, offset = self.parts(rank)
            binders, at = ((rank, name("R")), (k, part * unit)), offset * unit + name(k)
        env, ranges = {**where[0], rest[0]: at}, {**where[1], **dict(binders)}
        body = self.value(rest[2], env, ranges, local=local)
        if kind in ("max", "min", "prod"):
            return extreme(kind, binders, body)
        if kind != "sum":
            raise Refused(f"unknown term {kind!r:.40}")
        for bound, length in reversed(binders):
            body = sum_over(bound, length, body)
        return body

    def check(self) -> None:
        """Raise `Refused` unless both sides are equal."""
        both = (self.whole, self.local)
        if not self.data["outputs"]:
            raise Refused("nothing is claimed: the certificate has no result")
        for kind, *pair in self.data["requires"]:
            whole_sizes, local = ([Poly.read(size).put(sizes) for size in pair] for sizes in both)
            if local != whole_sizes and (kind != "same" or local[0] != local[1]):
                raise Refused("the operator does not run on a rank")
        for output in self.data["outputs"]:
            role, shape, names = output["role"], output["shape"], output["index"]
            whole_sizes, local = ([Poly.read(size).put(sizes) for size in shape] for sizes in both)
            ranges, env = {**dict(zip(names, local, strict=True)), "%r": name("R")}, {}
            if role[0] == "shard":
                unit, k = self.unit(whole_sizes[role[1]]), names[role[1]]
                env[k], whole_sizes[role[1]] = self.offset * unit + name(k), self.part * unit
            left = self.value(output["term"], env, ranges, local=False)
            right = self.value(output["term"], {}, ranges, local=True)
            if role[0] == "partial":
                right = over_ranks(role[1], "%r", right)
            if whole_sizes != local or role[0] == "once" or not same(left, right):
                raise Refused("the results of the ranks do not make up the result of the whole")
