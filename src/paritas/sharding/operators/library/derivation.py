"""The rule of an operator, read off its definition.

A result is a term over indices. A dimension of an argument that is read at an index of the result,
wherever it is read, can be split with it. One that is read at the index of a sum (or maximum,
minimum, product) of which the result is made can be split too, and leaves terms of it. All others
are needed as a whole. `tests/quality/test_partition_proofs.py` proves what is derived.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.operators.calls import OperatorCall, letters
from paritas.core.operators.catalogue import symbolic_outputs
from paritas.core.operators.definitions import SymbolicCall
from paritas.core.operators.indices import ONE, Poly, atoms, constant, is_index, replace
from paritas.core.operators.terms import OutsideTheoryError, Term
from paritas.sharding.operators.library.claims import (
    AVERAGE,
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    RuleClaim,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paritas.core.operators.calls import Bound
    from paritas.core.operators.catalogue import DefinedOutput
    from paritas.core.operators.definitions import DefinedOperator

_MARKS = {"sum": SUM, "max": MAXIMUM, "min": MINIMUM, "prod": PRODUCT}


_MOST_REMEMBERED = 4096
_DERIVED: dict[Any, RuleClaim | None] = {}


def derive_claim(name: str, operator: DefinedOperator, bound: Bound) -> RuleClaim | None:
    """What a definition says about the splits of a call; None if it does not cover the call.

    The operator is not called. Unless its definition reads values, a call with the same shapes has
    the same claim.
    """
    call = (bound.positions, tuple(bound.keywords.items()), bound.starred)
    arguments = tuple(
        (operand_name, _without_values(value)) for operand_name, value in bound.values.items()
    )
    key = (name, operator, call, arguments)
    if key in _DERIVED:
        return _DERIVED[key]
    symbolic_call = SymbolicCall(OperatorCall(_refuse_call, name=name), bound, ())
    claim = _derive_once(operator, symbolic_call)
    if not symbolic_call.reads_values:
        if len(_DERIVED) >= _MOST_REMEMBERED:
            _DERIVED.clear()
        _DERIVED[key] = claim
    return claim


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return type(value), *map(_without_values, value)
    return repr(value)


def _derive_once(operator: DefinedOperator, call: SymbolicCall) -> RuleClaim | None:
    if call.bound.get("inplace"):
        return None
    try:
        outputs = symbolic_outputs(operator, call)
        if "dim" in operator.parameters.split() and not any(output.shape for output in outputs):
            _refuse_scalar(call)
        return _Derivation(call, outputs).claim()
    except OutsideTheoryError:
        return None


def _refuse_call(*_: Any, **__: Any) -> Any:
    raise OutsideTheoryError("a definition that calls the operator")


def _refuse_scalar(call: SymbolicCall) -> None:
    """A tensor without dimensions has none that it could be reduced along."""
    shapes = [tensor.shape for _, tensor in call.tensors_in_terms().values()]
    if len(shapes) == 1 and not any(shapes):
        raise OutsideTheoryError("a dimension that is not there")


@dataclasses.dataclass
class _Index:
    """An index, or several that dimensions of arguments are read at.

    Attributes:
        dims: the dimensions, each as the tensor and its place.
        outputs: the dimensions of results that have it, each as the result and its place.
        marks: how it is reduced, for each result in which it is.
        beside: tensors in terms that are added to its sum.
        whole: whether some term needs the dimensions as a whole.
    """

    dims: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    outputs: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    marks: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    beside: set[str] = dataclasses.field(default_factory=set)
    whole: bool = False

    def join(self, other: _Index) -> None:
        """Take over all that another one is."""
        self.dims |= other.dims
        self.outputs |= other.outputs
        self.marks |= other.marks
        self.beside |= other.beside
        self.whole |= other.whole

    @property
    def is_split(self) -> bool:
        """Whether its dimensions can be split: each result has it once, or is one reduction."""
        results = [number for number, _ in (*self.outputs, *self.marks)]
        return not self.whole and bool(results) and len(results) == len(set(results))


class _Derivation:
    def __init__(self, call: SymbolicCall, outputs: Sequence[DefinedOutput]) -> None:
        self._call = call
        self._outputs = outputs
        self._tensors = call.tensors_in_terms()
        if not self._tensors:
            raise OutsideTheoryError("a call without a tensor")
        self._check_sizes()
        self._indices: dict[tuple[int, str], _Index] = {}

    def _check_sizes(self) -> None:
        """The operator refuses a call whose sizes do not fit."""
        sizes: dict[Any, Poly] = {
            f"{name}.{at}": constant(size)
            for name, (_, tensor) in self._tensors.items()
            for at, size in enumerate(tensor.shape)
        }
        for kind, *operands in self._call.requires:
            values = [replace(operand, sizes, {}) for operand in operands]
            if kind == "same" and not any(map(atoms, values)) and values[0] != values[1]:
                raise OutsideTheoryError("sizes that do not fit")

    def claim(self) -> RuleClaim:
        """The claim that follows from the terms."""
        for number, output in enumerate(self._outputs):
            for at, name in enumerate(output.index):
                index = self._index(number, name)
                index.outputs.add((number, at))
            self._read_result(number, output.term)
        return self._claim_of(self._joined_indices())

    def _index(self, number: int, name: str) -> _Index:
        """The index of this name in the term of a result."""
        return self._indices.setdefault((number, name), _Index())

    # --- terms ------------------------------------------------------------------------------------

    def _read_result(self, number: int, term: Term) -> None:
        """Read the terms that a result is the sum of, each with the reductions that it is in."""
        sizes, parts = _reduced_parts(term)
        for reductions, body in parts:
            kinds = {kind for kind, _, _ in reductions}
            unlike = len(kinds) > 1 or (kinds != {"sum"} and len(parts) > 1)
            missing = set(sizes) - {atom for _, _, size in reductions for atom in atoms(size)}
            for kind, name, size in reductions:
                index = self._index(number, name)
                is_mean = bool(set(atoms(size)) & set(sizes))
                index.whole |= unlike or bool(missing) or (is_mean and kind != "sum")
                index.marks.add((number, AVERAGE if is_mean else _MARKS[kind]))
                for other, beside in parts:
                    if name not in {reduction_name for _, reduction_name, _ in other}:
                        index.beside |= set(_tensors_read(beside))
            self._read_term(number, body)

    def _read_term(self, number: int, term: Term) -> None:
        kind, *parts = term
        if kind == "read":
            for at, poly in enumerate(parts[1]):
                self._read_dim(number, (parts[0], at), poly)
            return
        for name in _indices_needed_whole(term):
            self._index(number, name).whole = True
        for part in _terms_in(term):
            self._read_term(number, part)

    def _read_dim(self, number: int, dim: tuple[str, int], poly: Poly) -> None:
        if dim[0] not in self._tensors:
            raise OutsideTheoryError("a tensor where the definition has a list of them")
        if self._tensors[dim[0]][1].shape[dim[1]] == 1:
            return
        name = poly[0][0][0] if len(poly) == 1 and len(poly[0][0]) == 1 else None
        if poly != (((name,), 1),) or not isinstance(name, str):
            raise OutsideTheoryError("an element at a place that is computed")
        self._index(number, name).dims.add(dim)

    # --- dimensions -------------------------------------------------------------------------------

    def _joined_indices(self) -> list[_Index]:
        """The indices; those that read the same dimension are one."""
        joined: list[_Index] = []
        for index in self._indices.values():
            merged = _Index()
            merged.join(index)
            for other in [each for each in joined if each.dims & index.dims]:
                joined.remove(other)
                merged.join(other)
            joined.append(merged)
        return joined

    def _claim_of(self, indices: Sequence[_Index]) -> RuleClaim:
        inside = {
            tensor: [
                "_" if name is None else "1" if size == 1 else ""
                for name, size in zip(self._names(tensor), value.shape, strict=True)
            ]
            for tensor, (_, value) in self._tensors.items()
        }
        results = [(n, o) for n, o in enumerate(self._outputs) if o.written is None]
        outside = {number: self._unread_dims(output) for number, output in results}
        after: dict[int, list[str]] = {number: [] for number, _ in results}
        once: dict[str, list[str]] = {}
        split: dict[str, bool] = {"_": False}
        for index in sorted(
            (each for each in indices if each.dims), key=lambda read_index: min(read_index.dims)
        ):
            name, mark = self._name_of(index), ""
            if index.is_split and index.marks:
                mark = min(index.marks)[1]
                for number, other in sorted(index.marks):
                    after[number] += [name + other] if other != mark else []
                for tensor in sorted(index.beside) if mark == SUM else ():
                    once.setdefault(tensor, []).append(f"!{name}")
            spelled = name if index.is_split or name == "_" else f"{name}^"
            if name in split and (split[name] or index.is_split):
                raise OutsideTheoryError("two indices of one name")
            split[name] = index.is_split
            for tensor, at in index.dims:
                inside[tensor][at] = "_" if self._names(tensor)[at] is None else spelled + mark
            for number, at in index.outputs:
                if number in outside:
                    outside[number][at] = spelled
        outputs = [
            [*(outside[n] or ["1"]), ":", *after[n]] if after[n] else outside[n] for n, _ in results
        ]
        return RuleClaim(self._inputs(inside, once), tuple(outputs))

    def _unread_dims(self, output: DefinedOutput) -> list[str]:
        """The dimensions of a result, as far as no argument has them."""
        names = output.names or [None] * len(output.shape)
        dims = []
        for size, name in zip(output.shape, names, strict=True):
            if size == ONE:
                dims.append("1")
            elif not atoms(size):
                dims.append(str(size[0][1]) if size else "0")
            else:
                dims.append(name or "_")
        return [self._length_one(dim) for dim in dims]

    def _length_one(self, dim: str) -> str:
        """A dimension that is as long as one of length 1 of an argument."""
        lengths = {
            size
            for tensor, (_, value) in self._tensors.items()
            for name, size in zip(self._names(tensor), value.shape, strict=True)
            if name == dim
        }
        return "1" if lengths == {1} else dim

    def _names(self, tensor: str) -> Sequence[str | None]:
        parameter, value = self._tensors[tensor]
        names = self._call.names.get(parameter, letters(value.dim()))
        if len(names) != value.dim():
            raise OutsideTheoryError("names for another number of dimensions")
        return names

    def _name_of(self, index: _Index) -> str:
        names = {self._names(tensor)[at] for tensor, at in index.dims} - {None}
        return min((str(name).removesuffix("^") for name in names), default="_")

    def _inputs(
        self, inside: Mapping[str, list[str]], once: Mapping[str, list[str]]
    ) -> dict[str, Sequence[str]]:
        inputs: dict[str, Sequence[str]] = {}
        for tensor, (parameter, _) in self._tensors.items():
            dims = inside[tensor]
            if "" in dims:
                raise OutsideTheoryError("a dimension that it does not read")
            marked = [*dims, ":", *once[tensor]] if tensor in once and dims else dims
            base = parameter.partition("[")[0]
            name = parameter if self._call.bound.spread(base) else base
            if inputs.setdefault(name, marked) != marked:
                raise OutsideTheoryError("tensors of a list that are split differently")
        return inputs


# A reduction of a term: its kind, its index and the size of that.
Reduction = tuple[str, str, Poly]


def _reduced_parts(term: Term) -> tuple[list[Any], list[tuple[list[Reduction], Term]]]:
    """The sizes that a term is divided by, and the terms that it is the sum of, in reductions."""
    as_it_is: tuple[list[Any], list[tuple[list[Reduction], Term]]] = [], [([], term)]
    if term[0] == "mul":
        divisors = [part[1][1] for part in term[1] if part[0] == "inv" and part[1][0] == "int"]
        others = [p for p in term[1] if p[0] != "num" and not (p[0] == "inv" and p[1][0] == "int")]
        if len(others) != 1 or any(len(size) != 1 or size[0][1] != 1 for size in divisors):
            return as_it_is
        sizes, parts = _reduced_parts(others[0])
        return [*(atom for size in divisors for atom in size[0][0]), *sizes], parts
    if term[0] == "add":
        reduced_parts = [_reduced_parts(part) for part in term[1]]
        if any(sizes for sizes, _ in reduced_parts):
            return as_it_is
        return [], [part for _, parts in reduced_parts for part in parts]
    if term[0] in _MARKS:
        kind, name, size, body = term
        sizes, parts = _reduced_parts(body)
        if sizes or (kind != "sum" and (len(parts) > 1 or not _is_plain(body, kind))):
            return [], [([(kind, name, size)], body)]
        return [], [([(kind, name, size), *reductions], inner) for reductions, inner in parts]
    return as_it_is


def _is_plain(body: Term, kind: str) -> bool:
    """Whether factors and terms around a reduction can be left out: not in a maximum."""
    return body[0] not in ("mul", "add") and (body[0] not in _MARKS or body[0] == kind)


def _terms_in(term: Term) -> list[Term]:
    """The terms that a term is made of."""
    kind, *parts = term
    if kind in ("add", "mul"):
        return list(parts[0])
    if kind == "fun":
        return [body for _, body in parts[1]]
    if kind == "fn":
        return list(parts[1])
    if kind == "inv":
        return parts
    return parts[2:] if kind in _MARKS else []


def _indices_needed_whole(term: Term) -> Sequence[Any]:
    """The indices of which no part can be left to another rank: all of an array, or a number."""
    kind, *parts = term
    if kind == "fun":
        return [name for binders, _ in parts[1] for name, _ in binders]
    if kind == "int":
        return [atom for atom in atoms(parts[0]) if is_index(atom)]
    return parts[:1] if kind in _MARKS else ()


def _tensors_read(term: Any) -> set[str]:
    if not isinstance(term, tuple):
        return set()
    own_tensor = {term[1]} if term[:1] == ("read",) else set()
    return own_tensor.union(*map(_tensors_read, term))
