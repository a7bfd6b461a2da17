"""The axes that an operator of aten sums over, read from its index formula."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.operators import indices
from paritas.core.operators.calls import Bound, OperatorCall
from paritas.core.operators.catalogue import operator_called, symbolic_outputs
from paritas.core.operators.definitions import SymbolicCall
from paritas.core.operators.terms import OutsideTheoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paritas.core.operators.indices import Poly
    from paritas.core.operators.terms import Term


@dataclasses.dataclass(frozen=True)
class SummedAxes:
    """What one element of a result reads of a tensor.

    Attributes:
        axes: those along which it reads more than one element; none of length 1 inside a function
            that is not written out.
        terms: how many elements it reads.
    """

    axes: tuple[int, ...]
    terms: int


def summed_axes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, SummedAxes]:
    """What one element of the first result reads of each tensor, in the order of the arguments.

    The names are those of the parameters in the operator's definition.

    Raises:
        OutsideTheoryError: there is no formula, or it does not cover this call.
    """
    operator = operator_called(f"aten.{name}")
    if operator is None:
        raise OutsideTheoryError(f"no definition of aten.{name}")
    names = operator.parameters.split()
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    # Dtypes and complex factors decide nothing here, and definitions do not take all of them.
    values = {
        name: named[name]
        for name in names
        if name in named and not isinstance(named[name], torch.dtype | complex)
    }
    key = name, *((name, _hashable(value)) for name, value in values.items())
    if key not in _SUMMED_AXES:
        if len(_SUMMED_AXES) >= _MOST_REMEMBERED:
            _SUMMED_AXES.clear()
        bound = Bound(values, (), {name: name for name in values})
        call = SymbolicCall(OperatorCall(operator.define, (), values, f"aten.{name}"), bound, ())
        _SUMMED_AXES[key] = _read_axes(symbolic_outputs(operator, call)[0].term, values)
    return _SUMMED_AXES[key]


# By the shapes and the other arguments of a call. Operators are called again and again with few of
# them, and to write a formula out takes as long as a small operator.
_SUMMED_AXES: dict[tuple[Any, ...], dict[str, SummedAxes]] = {}
_MOST_REMEMBERED = 4096


def _hashable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(value) if isinstance(value, list) else value


def _read_axes(term: Term, values: Mapping[str, Any]) -> dict[str, SummedAxes]:
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    lengths = {
        f"{name}.{axis}": indices.constant(size)
        for name, tensor in tensors.items()
        for axis, size in enumerate(tensor.shape)
    }
    summed = dict.fromkeys(tensors, SummedAxes((), 1))
    for name, places, sizes in _reads(term, {}):
        used = [{atom for atom in indices.atoms(place) if atom in sizes} for place in places]
        count = indices.multiply(*(sizes[atom] for atom in set().union(*used)))
        terms = indices.as_number(indices.replace(count, lengths, {}))
        if terms is None:
            raise OutsideTheoryError(f"a sum of {name} whose length is not known")
        summed[name] = SummedAxes(tuple(axis for axis, atoms in enumerate(used) if atoms), terms)
    return summed


def _reads(
    term: Term, sizes: Mapping[str, Poly]
) -> Iterator[tuple[str, tuple[Poly, ...], Mapping[str, Poly]]]:
    """The elements that a term reads, with the sizes of the indices that are bound there."""
    tag, *parts = term
    if tag == "read":
        yield parts[0], parts[1], sizes
    elif tag in ("sum", "max", "min", "prod"):
        index, size, body = parts
        yield from _reads(body, {**sizes, index: size})
    elif tag == "fun":
        for binders, body in parts[1]:
            yield from _reads(body, {**sizes, **dict(binders)})
    elif tag in ("add", "mul", "fn"):
        for operand in parts[-1]:
            yield from _reads(operand, sizes)
    elif tag == "inv":
        yield from _reads(parts[0], sizes)
