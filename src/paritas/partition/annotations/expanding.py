"""An annotation laid over one call: which argument each input is, and how long each dimension.

`*` becomes as many dimensions as the call has, the factors of brackets are found out, and whatever
cannot be split in this call is known with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from paritas.errors import UsageError
from paritas.partition.annotations.arguments import Shape, given_tensors, operator_name, value_at
from paritas.partition.annotations.grammar import (
    ANY_LENGTH,
    REST_MARK,
    Dim,
    Factor,
    Number,
    Signature,
    Suffix,
    Tensor,
)
from paritas.partition.annotations.lengths import Measure, lengths_of

if TYPE_CHECKING:
    from paritas.partition.recipes import OperatorCall, Place

__all__ = ["Expansion", "Operand", "expand"]

_ONE = Dim((Factor("1"),))


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input or an output of the call.

    Attributes:
        place: which argument; None for an output.
        dims: with `*` written out; None where nothing can be split.
        shapes: of the tensor, or of those in the list; none for an output, which is not there yet.
        tensor: what the annotation says.
    """

    place: Place | None
    dims: tuple[Dim, ...] | None
    shapes: tuple[Shape, ...]
    tensor: Tensor

    @property
    def words(self) -> str:
        """What to call it in a message."""
        if self.place is None:
            return f"output `{self.tensor}`"
        return (
            f"argument {self.place}" if isinstance(self.place, int) else f"argument `{self.place}`"
        )


@dataclasses.dataclass(frozen=True)
class Expansion:
    """An annotation laid over a call.

    Attributes:
        lengths: of the identifiers, as far as they are known: those of outputs alone may not be.
        suffixes: of the identifiers.
        frozen: identifiers that cannot be split, and why.
    """

    signature: Signature
    call: OperatorCall
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    lengths: dict[str, int]
    suffixes: dict[str, Suffix]
    frozen: dict[str, str]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """In the order in which an option counts them."""
        return self.inputs + self.outputs

    def first_factor(self, dim: Dim) -> Factor:
        """What a dimension is split by: its first factor that is not 1."""
        return _first(dim, self.lengths)


def expand(signature: Signature, call: OperatorCall) -> Expansion:
    """Lay an annotation over a call.

    Raises:
        UsageError: they do not fit: ranks, lengths, arguments that are missing.
    """
    return _Expander(signature, call).expansion()


def _first(dim: Dim, lengths: dict[str, int]) -> Factor:
    for factor in dim.factors:
        if factor.name != "1" and lengths.get(factor.name) != 1:
            return factor
    return dim.factors[-1]


class _Expander:
    def __init__(self, signature: Signature, call: OperatorCall) -> None:
        self._signature = signature
        self._call = call

    def expansion(self) -> Expansion:
        given = given_tensors(self._signature, self._call, self._fail)
        rest = max(
            (self._rest(tensor, shape) for _, tensor, shapes in given for shape in shapes),
            default=0,
        )
        inputs = tuple(
            self._operand(place, tensor, shapes, rest) for place, tensor, shapes in given
        )
        outputs = tuple(self._operand(None, tensor, (), rest) for tensor in self._signature.outputs)
        lengths = self._measure(inputs, outputs)
        inputs = tuple(self._without_broadcast(operand, lengths) for operand in inputs)
        operands = inputs + outputs
        suffixes: dict[str, Suffix] = {}
        for dim in _dims(operands):
            for factor in dim.factors:
                suffixes.setdefault(factor.name, factor.suffix)
        frozen = _frozen(operands, lengths, suffixes)
        return Expansion(self._signature, self._call, inputs, outputs, lengths, suffixes, frozen)

    def _rest(self, tensor: Tensor, shape: Shape) -> int:
        """For how many dimensions `*` stands here."""
        dims = tensor.dims or ()
        return len(shape) - len(dims) + 1 if any(dim.is_rest for dim in dims) else 0

    def _operand(
        self, place: Place | None, tensor: Tensor, shapes: tuple[Shape, ...], rest: int
    ) -> Operand:
        dims = tensor.dims
        if dims is None or (place is not None and not shapes):
            return Operand(place, None, shapes, tensor)
        if dims == (_ONE,) and shapes and not any(shapes):
            dims = ()  # `1` is how a number without dimensions is written too
        own = rest if not shapes else self._rest(Tensor(dims), shapes[0])
        written: list[Dim] = []
        for dim in dims:
            if dim.is_rest:
                # Fewer dimensions are the last ones: so torch broadcasts.
                names = [f"{REST_MARK}{at}" for at in range(rest - own, rest)]
                written += [Dim((Factor(name, dim.factors[0].suffix),)) for name in names]
            else:
                written.append(dim)
        operand = Operand(place, tuple(written), shapes, tensor)
        for shape in shapes:
            if len(shape) != len(written):
                least = " or more" if any(dim.is_rest for dim in dims) else ""
                count = len([dim for dim in dims if not dim.is_rest])
                have = f"{len(shape)} dimensions {shape}"
                self._fail(f"{operand.words} has {have}, `{tensor}` has {count}{least}")
        return operand

    def _measure(self, inputs: tuple[Operand, ...], outputs: tuple[Operand, ...]) -> dict[str, int]:
        names = {factor.name for dim in _dims(inputs + outputs) for factor in dim.factors}
        told: list[tuple[Dim, Any, str]] = [
            (Dim((Factor(name),)), value, f"argument `{name}`")
            for name, value in self._call.kwargs.items()
            if name in names
        ]
        for number in self._signature.numbers:
            if isinstance(number, Number):
                value = value_at(self._call, number.place, number.item)
                told.append((number.dim, value, f"argument `{str(number).partition('=')[0]}`"))
        measured = [
            Measure(dim, length, f"dimension {at} of {operand.words}")
            for operand in inputs
            for shape in operand.shapes
            for at, (dim, length) in enumerate(zip(operand.dims or (), shape, strict=False))
        ]
        # -1 is a size that follows from the others.
        sizes = [Measure(*each) for each in told if type(each[1]) is int and each[1] >= 0]
        return lengths_of(sizes, measured, self._fail)

    def _without_broadcast(self, operand: Operand, lengths: dict[str, int]) -> Operand:
        """A dimension of length 1 beside longer ones of its name is the same on all ranks."""
        if operand.dims is None or not operand.shapes:
            return operand
        dims = list(operand.dims)
        for at, dim in enumerate(dims):
            ones = {shape[at] == 1 for shape in operand.shapes}
            if True in ones and any(lengths.get(each.name, 1) != 1 for each in dim.factors):
                if len(ones) > 1:
                    some = "is a list of which only some are 1 long"
                    self._fail(f"{operand.words} {some} at `{dim}`: write `_`")
                dims[at] = _ONE
        return dataclasses.replace(operand, dims=tuple(dims))

    def _fail(self, why: str) -> NoReturn:
        raise UsageError(
            f"`{self._signature}` does not fit this call of {operator_name(self._call)}: {why}"
        )


def _dims(operands: tuple[Operand, ...]) -> Iterator[Dim]:
    for operand in operands:
        yield from operand.dims or ()


def _frozen(
    operands: tuple[Operand, ...], lengths: dict[str, int], suffixes: dict[str, Suffix]
) -> dict[str, str]:
    """The identifiers that cannot be split, and why."""
    why: dict[str, str] = {
        name: "is frozen by `^`" for name, suffix in suffixes.items() if suffix == "^"
    }
    why[ANY_LENGTH] = "is a dimension that is never split"
    for name, length in lengths.items():
        if length <= 1:
            why.setdefault(name, f"has length {length}")
    for operand in operands:
        seen: set[str] = set()
        for dim in operand.dims or ():
            first = _first(dim, lengths)
            for factor in dim.factors:
                if factor.is_number:
                    continue
                if factor.name in seen:
                    why.setdefault(factor.name, f"occurs twice in `{operand.tensor}`")
                seen.add(factor.name)
                if factor != first:
                    why.setdefault(factor.name, f"is not the first factor of `{dim}`")
    return why
