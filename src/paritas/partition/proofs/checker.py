"""Check a certificate: `python checker.py certificate.json`.

This file imports nothing of paritas and shares no code with what writes certificates. It takes the
definition of the operator from the certificate, works out both sides of the split itself, and
compares them. (That the definition is what torch computes is not in a certificate: each proof and
the tests compare them by running torch.)

The laws: sums and products of real numbers; a sum, maximum, minimum or product over the whole is one
over the ranks of those over their parts, which begin at `o(r)`, have `m(r)` elements and make up `N`;
functions of equal arguments are equal. Terms are compared one by one, under every renaming of bound
indices. All of these laws are kept by differentiation.
"""

from __future__ import annotations

import itertools
import json
import sys
from fractions import Fraction
from typing import Any

COUNT = itertools.count()


class Refused(Exception):  # noqa: N818
    """The certificate does not show what it claims."""


class Poly(frozenset):  # type: ignore[type-arg]
    """An integer expression: pairs of a frozen set of (atom, power), and a coefficient.

    Atoms are sizes, indices (`%...`), ("//", a, b), ("%", a, b), ("size", function, arguments), and
    for a rank ("m", rank) and ("o", rank).
    """

    @staticmethod
    def of(items: Any) -> Poly:
        found: dict[Any, int] = {}
        for monomial, value in items:
            found[monomial] = found.get(monomial, 0) + value
        return Poly((monomial, value) for monomial, value in found.items() if value)

    def __add__(self, other: Any) -> Poly:
        return Poly.of((*self, *other))

    def __mul__(self, other: Any) -> Poly:
        return Poly.of((powers(a, b), x * y) for (a, x), (b, y) in itertools.product(self, other))

    def __sub__(self, other: Any) -> Poly:
        return self + number(-1) * other

    def each(self, function: Any) -> Poly:
        """The expression with each atom replaced."""
        total = number(0)
        for monomial, value in self:
            term = number(value)
            for atom, power in monomial:
                for _ in range(power):
                    term = term * function(atom)
            total = total + term
        return total

    def put(self, by: Any, ranges: Any = ()) -> Poly:
        return self.each(lambda atom: put_atom(atom, by, ranges))

    def divide(self, by: Poly) -> tuple[Poly, Poly]:
        """The terms that a single product divides, divided, and the other terms."""
        if len(by) != 1:
            return (number(1), number(0)) if self == by else (number(0), self)
        ((divisor, value),) = by
        whole, rest = [], []
        for monomial, size in self:
            left = powers(monomial, ((atom, -power) for atom, power in divisor))
            if size % value == 0 and all(power > 0 for _, power in left):
                whole.append((left, size // value))
            else:
                rest.append((monomial, size))
        return Poly.of(whole), Poly.of(rest)

    def floor(self, kind: str, by: Poly, ranges: Any) -> Poly:
        """The quotient rounded down (`//`), or the rest (`%`)."""
        whole, rest = self.divide(by)
        if self <= {*number(self.constant)} and by == number(by.constant) and by:
            pair = divmod(self.constant, by.constant)
            return number(pair[kind == "%"])
        if not rest or rest.below(by, ranges):
            return whole if kind == "//" else rest
        atom = name((kind, rest, by))
        return whole + atom if kind == "//" else atom

    @property
    def constant(self) -> int:
        return dict(self).get(frozenset(), 0)

    def below(self, size: Poly, ranges: Any) -> bool:
        """Whether it is certainly from 0 to size - 1."""
        try:
            return (size - self.top(ranges)).is_positive
        except ValueError:
            return False

    def top(self, ranges: Any) -> Poly:
        """A bound; ValueError if it may be negative, or has none."""
        if any(value < 0 for _, value in self):
            raise ValueError
        return self.each(lambda atom: top_of(atom, ranges))

    @property
    def is_positive(self) -> bool:
        """Whether it is 1 or more if all sizes are 1 or more, and all else 0 or more."""
        sizes = self.each(lambda atom: name(atom) + number(int(is_size(atom))))
        return all(value >= 0 for _, value in sizes) and sizes.constant > 0


def number(value: int) -> Poly:
    return Poly({(frozenset(), value)} if value else ())


def name(atom: Any) -> Poly:
    return Poly({(frozenset({(atom, 1)}), 1)})


def powers(left: Any, right: Any) -> Any:
    found = dict(left)
    for atom, power in right:
        found[atom] = found.get(atom, 0) + power
    return frozenset((atom, power) for atom, power in found.items() if power)


def is_size(atom: Any) -> bool:
    return not atom.startswith("%") if isinstance(atom, str) else atom[0] == "m"


def top_of(atom: Any, ranges: Any) -> Poly:
    if atom in ranges or (isinstance(atom, tuple) and atom[0] == "%"):
        return (ranges[atom] if atom in ranges else atom[2]) - number(1)  # type: ignore[no-any-return]
    if isinstance(atom, tuple) and atom[0] == "o":  # a part ends within the whole
        return name("N") - name(("m", atom[1]))
    if isinstance(atom, tuple) and atom[0] == "//":
        whole, rest = atom[1].top(ranges).divide(atom[2])
        if rest == number(-1):
            return whole - number(1)  # type: ignore[no-any-return]
        if rest and not rest.below(atom[2], ranges):
            raise ValueError
        return whole  # type: ignore[no-any-return]
    if isinstance(atom, str) and not is_size(atom):
        raise ValueError
    return name(atom)


def put_atom(atom: Any, by: Any, ranges: Any) -> Poly:
    if atom in by or isinstance(atom, str):
        return by[atom] if atom in by else name(atom)  # type: ignore[no-any-return]
    if atom[0] in ("//", "%"):
        left, right = (part.put(by, ranges) for part in atom[1:])
        return left.floor(atom[0], right, ranges)  # type: ignore[no-any-return]
    if atom[0] == "size":
        return name(("size", atom[1], tuple(part.put(by, ranges) for part in atom[2])))
    if atom[1] in by and not by[atom[1]]:  # the first rank
        return number(0) if atom[0] == "o" else name(("m", "first"))
    return name((atom[0], renamed(atom[1], by)))


def renamed(bound: str, by: Any) -> str:
    found = [atom for monomial, _ in (by[bound] if bound in by else ()) for atom, _ in monomial]
    return found[0] if found else bound


def read(data: Any) -> Poly:
    total = number(0)
    for atoms, value in data:
        term = number(value)
        for atom in atoms:
            if isinstance(atom, list) and atom[0] == "size":
                atom = ("size", atom[1], tuple(map(read, atom[2])))
            elif isinstance(atom, list):
                atom = ({"//": "//", "%": "%"}[atom[0]], *map(read, atom[1:]))
            term = term * name(atom)
        total = total + term
    return total


# --- Sums of products: lists of (coefficient, binders, factors) -----------------------------------

# Binders are pairs of a name, unlike all others, and a size. Factors are pairs of an atom and its
# power. An atom is a tuple that may contain such sums, also as ("bound", binders, sum, is ordered).


def one(*atom: Any) -> list[Any]:
    return [(Fraction(1), (), ((atom, 1),))]


def of_poly(poly: Poly) -> list[Any]:
    return [(Fraction(v), (), tuple((("sym", a), p) for a, p in m)) for m, v in poly]


def rename(thing: Any, by: Any) -> Any:
    """Replace indices in a sum or an atom."""
    if isinstance(thing, Poly):
        return thing.put(by)
    if isinstance(thing, list):
        return [made for term in thing for made in rename_term(term, by)]
    if isinstance(thing, tuple) and thing[:1] == ("bound",):
        return ("bound", rename_binders(thing[1], by), rename(thing[2], by), thing[3])
    return tuple(rename(part, by) for part in thing) if isinstance(thing, tuple) else thing


def rename_binders(binders: Any, by: Any) -> Any:
    return tuple((renamed(k, by), size.put(by)) for k, size in binders)


def rename_term(term: Any, by: Any) -> list[Any]:
    value, binders, factors = term
    terms = [(value, rename_binders(binders, by), ())]
    for atom, power in factors:
        parts = of_poly(name(atom[1]).put(by)) if atom[0] == "sym" else one(*rename(atom, by))
        if power != 1 and len(parts) != 1:
            raise Refused("a power of a sum")
        terms = [
            (x * y**power, bound, join(some, tuple((a, p * power) for a, p in others)))
            for (x, bound, some), (y, _, others) in itertools.product(terms, parts)
        ]
    return terms


def fresh(binders: Any) -> dict[str, Poly]:
    return {k: name(f"%c{next(COUNT)}") for k, _ in binders}


def mentions(thing: Any, what: str) -> bool:
    if isinstance(thing, frozenset | tuple | list):
        return any(mentions(part, what) for part in thing)
    return bool(thing == what)


def add(*sums: list[Any]) -> list[Any]:
    """The sum; equal terms are collected."""
    found: list[Any] = []
    for term in itertools.chain(*sums):
        at = next((i for i, other in enumerate(found) if same_term(term, other)), None)
        if at is None:
            found.append(term)
        else:
            found[at] = (found[at][0] + term[0], *found[at][1:])
    return [term for term in found if term[0]]


def multiply(left: list[Any], right: list[Any]) -> list[Any]:
    made = []
    for pair in itertools.product(left, right):
        (x, first, some), (y, second, others) = (rename_term(t, fresh(t[1]))[0] for t in pair)
        made.append((x * y, first + second, join(some, others)))
    return add(made)


def join(left: Any, right: Any) -> tuple[Any, ...]:
    found = list(left)
    for atom, power in right:
        at = next((i for i, (other, _) in enumerate(found) if same(atom, other)), None)
        if at is None:
            found.append((atom, power))
        else:  # ("first", r) is 0 or 1
            found[at] = (atom, 1 if atom[0] == "first" else found[at][1] + power)
    return tuple((atom, power) for atom, power in found if power)


def invert(value: list[Any]) -> list[Any]:
    if len(value) == 1 and not value[0][1] and all(a[0] != "first" for a, _ in value[0][2]):
        return [(1 / value[0][0], (), tuple((atom, -power) for atom, power in value[0][2]))]
    return one("inv", value)


def sum_over(k: str, size: Poly, body: list[Any]) -> list[Any]:
    made = []
    for term in body:
        ((value, binders, factors),) = rename_term(term, fresh(term[1]))
        left = tuple(pair for pair in factors if not same(pair[0], ("first", name(k))))
        others = tuple(pair for pair in factors if pair != (("sym", ("m", k)), 1))
        if not mentions((factors, binders), k):
            made += [(value * f, binders, join(factors, own)) for f, _, own in of_poly(size)]
        elif size == name("R") and left != factors:  # only the first rank has it
            made += rename_term((value, binders, left), {k: number(0)})
        elif size == name("R") and others != factors and not mentions((others, binders), k):
            made.append((value, binders, join(others, ((("sym", "N"), 1),))))  # all parts
        else:
            made.append((value, (*binders, (k, size)), factors))
    return add(made)


def extreme(kind: str, binders: Any, body: list[Any]) -> list[Any]:
    """The maximum, minimum or product over indices."""
    if len(body) == 1 and body[0][:2] == (1, ()) and [p for _, p in body[0][2]] == [1]:
        atom = body[0][2][0][0]
        if atom[0] == kind:
            _, inner, inside, _ = rename(atom[1], fresh(atom[1][1]))
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
    if isinstance(left, list) and isinstance(right, list):
        rest = list(right)
        for term in left:
            fitting = [o for o in rest if o[0] == term[0] and same_term(term, o)]
            if not fitting:
                return False
            rest.remove(fitting[0])
        return not rest
    if not isinstance(left, tuple) or not isinstance(right, tuple):
        return bool(left == right)
    if left[:1] == right[:1] == ("bound",):
        ways = renamings(left[1], right[1], ordered=left[3])
        return left[3] == right[3] and any(same(rename(left[2], by), right[2]) for by in ways)
    return len(left) == len(right) and all(map(same, left, right))


def renamings(left: Any, right: Any, *, ordered: bool = False) -> Any:
    """The ways to rename bound indices under which their sizes are equal too."""
    if len(left) != len(right) or len(left) > 6:  # noqa: PLR2004 - 720 ways
        return
    for order in [right] if ordered else itertools.permutations(right):
        by = {k: name(other) for (k, _), (other, _) in zip(left, order, strict=True)}
        if all(a[1].put(by) == b[1] for a, b in zip(left, order, strict=True)):
            yield by


def same_term(left: Any, right: Any) -> bool:
    """Whether two terms are equal apart from their coefficients."""
    for by in renamings(left[1], right[1]) if len(left[2]) == len(right[2]) else ():
        rest = list(right[2])
        for atom, power in rename_term((Fraction(1), (), left[2]), by)[0][2]:
            fitting = [o for o in rest if o[1] == power and same(atom, o[0])]
            rest = [o for o in rest if o is not fitting[0]] if fitting else [*rest, None]
        if not rest:
            return True
    return False


# --- The certificate ------------------------------------------------------------------------------


class Checker:
    """A certificate, and the sizes on both sides."""

    def __init__(self, data: Any) -> None:
        self.data, self.equal = data, {"any": False, "equal": True}[data["parts"]]
        self.length = name("R") * name("m") if self.equal else name("N")
        self.part, self.offset = self.parts("%r")
        self.roles = {key: tensor["role"] for key, tensor in data["tensors"].items()}
        sizes = {
            f"{key}.{at}": read(size)
            for key, tensor in data["tensors"].items()
            for at, size in enumerate(tensor["sizes"])
        } | {key: read(pair[0]) for key, pair in data["numbers"].items()}
        known = self.equalities(sizes)
        self.whole = {key: size.put(known) for key, size in sizes.items()}
        self.local = dict(self.whole)
        for key, role in self.roles.items():
            if role[0] == "shard":
                size = self.local[f"{key}.{role[1]}"]
                self.local[f"{key}.{role[1]}"] = self.part * self.unit(size)
        by = {**known, "m": self.part, "o": self.offset}
        self.local |= {key: read(pair[1]).put(by) for key, pair in data["numbers"].items()}

    def parts(self, rank: str) -> tuple[Poly, Poly]:
        if self.equal:
            return name("m"), name(rank) * name("m")
        return name(("m", rank)), name(("o", rank))

    def unit(self, size: Poly) -> Poly:
        whole, rest = size.divide(self.length)
        if rest or not whole:
            raise Refused("what is split is not a multiple of the length")
        return whole

    def equalities(self, sizes: Any) -> dict[Any, Poly]:
        """Sizes that must be equal for the operator to run at all."""
        known = {"N": self.length}
        for pair in [rest for kind, *rest in self.data["requires"] if kind == "same"]:
            left, right = (read(size).put(sizes).put(known) for size in pair)
            for a, b in ((left, right), (right, left)):
                atoms = [atom for monomial, _ in a for atom, _ in monomial]
                if a != b and len(atoms) == 1 and a == name(atoms[0]) and atoms[0] not in known:
                    if isinstance(atoms[0], str) and atoms[0] not in ("R", "m"):
                        if not mentions(b, atoms[0]):
                            known = {k: v.put({atoms[0]: b}) for k, v in known.items()}
                            known[atoms[0]] = b
                            break
        return known

    def element(self, kind: str, rest: Any, places: list[Poly], *, local: bool) -> list[Any]:
        """An element of an argument, or of what the operator draws."""
        key = rest[0]
        if kind == "draw":
            for at, data in enumerate(rest[1]):
                whole, own = (read(data).put(sizes) for sizes in (self.whole, self.local))
                if local and whole != own:
                    if own != self.part * self.unit(whole):
                        raise Refused("a part of a random tensor")
                    places[at] = places[at] + self.offset * self.unit(whole)
            return one("draw", key, tuple(places))
        role, rank = self.roles[key], "%r" if local else f"%c{next(COUNT)}"
        if role[0] == "partial":
            term = one("read", key, tuple(places), name(rank))
            return term if local else over_ranks(role[1], rank, term)
        if role[0] == "shard" and local:
            unit = self.unit(self.whole[f"{key}.{role[1]}"])
            places[role[1]] = places[role[1]] + self.offset * unit
        term = one("read", key, tuple(places))
        if role[0] == "once" and local:
            return multiply(one("first", name("%r")), term)
        return term

    def value(self, term: Any, env: Any, ranges: Any, *, local: bool) -> list[Any]:
        """A term as a sum of products."""
        kind, *rest = term
        sizes = self.local if local else self.whole

        def index(data: Any) -> Poly:
            return read(data).put({**sizes, **env}, ranges)

        def inner(part: Any) -> list[Any]:
            return self.value(part, env, ranges, local=local)

        if kind == "num":
            return [(Fraction(rest[0]), (), ())] if Fraction(rest[0]) else []
        if kind == "int":
            return of_poly(index(rest[0]))
        if kind == "inv":
            return invert(inner(rest[0]))
        if kind == "fn":
            return one("fn", rest[0], tuple(map(inner, rest[1])))
        if kind == "add":
            return add(*map(inner, rest[0]))
        if kind == "mul":
            result = [(Fraction(1), (), ())]
            for part in rest[0]:
                result = multiply(result, inner(part))
            return result
        if kind in ("read", "draw"):
            return self.element(kind, rest, list(map(index, rest[-1])), local=local)
        if kind == "fun":
            arrays = []
            for binders, body in rest[1]:
                own = [(f"%c{next(COUNT)}", index(size)) for _, size in binders]
                bound = {k: name(new) for (k, _), (new, _) in zip(binders, own, strict=True)}
                array = self.value(body, {**env, **bound}, {**ranges, **dict(own)}, local=local)
                arrays.append(("bound", tuple(own), array, True))
            return one("fun", rest[0], tuple(arrays), tuple(map(index, rest[2])))
        k, rank, size = f"%c{next(COUNT)}", f"%c{next(COUNT)}", index(rest[1])
        unit, left = size.divide(self.length)
        binders, at = ((k, size),), name(k)
        if size == number(1):
            binders, at = (), number(0)
        elif not local and unit and not left:  # over the parts of all ranks
            part, offset = self.parts(rank)
            binders, at = ((rank, name("R")), (k, part * unit)), offset * unit + name(k)
        body = self.value(rest[2], {**env, rest[0]: at}, {**ranges, **dict(binders)}, local=local)
        if kind in ("max", "min", "prod"):
            return extreme(kind, binders, body)
        for bound, length in reversed(binders if kind == "sum" else [][0]):
            body = sum_over(bound, length, body)
        return body

    def check(self) -> None:
        """Raise `Refused` unless both sides are equal."""
        for kind, *pair in self.data["requires"]:
            whole, local = (
                [read(p).put(sizes) for p in pair] for sizes in (self.whole, self.local)
            )
            if local != whole and (kind != "same" or local[0] != local[1]):
                raise Refused("the operator does not run on a rank")
        for output in self.data["outputs"]:
            role, shape = output["role"], list(map(read, output["shape"]))
            whole, local = ([s.put(sizes) for s in shape] for sizes in (self.whole, self.local))
            ranges = {**dict(zip(output["index"], local, strict=True)), "%r": name("R")}
            env = {k: name(k) for k in output["index"]}
            if role[0] == "shard":
                unit = self.unit(whole[role[1]])
                k = output["index"][role[1]]
                env[k], whole[role[1]] = self.offset * unit + name(k), self.part * unit
            if whole != local:
                raise Refused("the results of the ranks have other shapes")
            left = self.value(output["term"], env, ranges, local=False)
            right = self.value(output["term"], {}, ranges, local=True)
            if role[0] == "partial":
                right = over_ranks(role[1], "%r", right)
            if role[0] == "once" or not same(left, right):
                raise Refused("the results of the ranks do not make up the result of the whole")
        if not self.data["outputs"]:
            raise Refused("there is no result")


def main() -> int:
    """Check the files on the command line."""
    for path in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            data = json.load(file)
        try:
            Checker(data).check()
        except (Refused, KeyError, IndexError, TypeError, ValueError) as error:
            print(f"{path}: refused: {error!r}")  # noqa: T201
            return 1
        print(f"{path}: {data['operator']} split by {data['split by']}: proved")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
