"""Shorter dimensions for a call that would take too long at its real ones.

Lengths that belong together shrink together: those that the operator's rule gives one name, and
the sizes among its other arguments. Whether the call still makes sense is not argued but tried, on
tensors without contents; if it does not, the real shapes are kept and that is told.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paritas.errors import UsageError
from paritas.graphs.calls import TensorValue, tensor_values
from paritas.graphs.operators.foretelling import foretold
from paritas.graphs.operators.values import hollow
from paritas.partition.annotations.expanding import expand
from paritas.partition.recipes import OperatorCall

if TYPE_CHECKING:
    from paritas.graphs.operators.resolving import Subject
    from paritas.graphs.settings import Settings
    from paritas.partition.annotations.annotation import Annotation
    from paritas.partition.annotations.expanding import Expansion
    from paritas.partition.annotations.grammar import Dim

__all__ = ["Capped", "capped"]

Lengths = dict[int, int]
# Operators whose numbers are all lengths, and keywords that are positions of dimensions.
_TAKE_SIZES = {"broadcast_to", "expand", "repeat", "reshape", "view", "_unsafe_view"}
_POSITIONS = ("dim", "axis", "start_dim", "end_dim")


@dataclasses.dataclass(frozen=True)
class Capped:
    """A call with shorter dimensions, or as it was, and what to say about that."""

    subject: Subject
    note: str


def capped(
    subject: Subject,
    outputs: tuple[TensorValue, ...],
    settings: Settings,
    annotation: Annotation | None,
    *,
    declared: bool,
) -> Capped | None:
    """The call with no dimension longer than the cap; None if there is none.

    Args:
        annotation: says which lengths belong together.
        declared: whether the graph says it; then it has to fit afterwards too, with whatever
            lengths it has as numbers. Otherwise there is another one for other shapes.
    """
    cap = settings.cap
    assert cap is not None  # noqa: S101  (only called where one is set)
    values = list(tensor_values((subject.args, dict(subject.kwargs))))
    long = sorted({n for value in values for n in value.shape if n > cap}, reverse=True)
    if not long:
        return None
    before = foretold(subject)
    expected = before.shapes if before is not None else tuple(out.shape for out in outputs)
    fixed = annotation if declared else None
    for lengths in _ways(subject, long, settings, annotation, declared=declared):
        if not any(new < old for old, new in lengths.items()):
            continue
        small = _with_lengths(subject, lengths, cap)
        if _is_like(small, expected) and (fixed is None or _fits(fixed, small)):
            told = ", ".join(
                f"{old} -> {new}" for old, new in sorted(lengths.items()) if old != new
            )
            return Capped(small, f"capped: {told}")
    told = ", ".join(map(str, long))
    return Capped(subject, f"not capped: with {told} cut to {cap} it does not run; at real shapes")


def _ways(
    subject: Subject,
    long: list[int],
    settings: Settings,
    annotation: Annotation | None,
    *,
    declared: bool,
) -> Iterator[Lengths]:
    """Lengths and what each becomes: as the rule says, by one common factor, each by itself."""
    cap = settings.cap or 1
    step = math.lcm(*settings.ranks)
    if annotation is not None:
        by_rule = _by_rule(subject, annotation, cap, step, declared=declared)
        if by_rule:
            yield by_rule
    # Numbers among the arguments that are no length, but a part of one.
    parts = {n for n in _numbers((subject.args, dict(subject.kwargs))) if cap < n < long[0]}
    together = sorted({*long, *parts}, reverse=True)
    common = _common_factor(together, cap)
    if common > 1:
        yield {length: length // common for length in together}
    yield {length: _shorter(length, cap, step, at) for at, length in enumerate(long)}
    yield {length: _shorter(length, cap, step, 0) for length in long}


def _numbers(tree: Any) -> Iterator[int]:
    if type(tree) is int:
        yield tree
    elif isinstance(tree, Mapping):
        yield from _numbers(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _numbers(item)


def _shorter(length: int, cap: int, step: int, at: int) -> int:
    """A length below the cap, divisible by the ranks if the real one is, and no other's."""
    if length <= cap:
        return length
    if length % step == 0 and cap >= step:
        steps = cap // step
        return max(1, steps - at) * step
    return max(1, cap - at)


def _common_factor(long: list[int], cap: int) -> int:
    """The least number that divides all of them and brings all of them down to the cap."""
    common = math.gcd(*long)
    need = math.ceil(long[0] / cap)
    return next((n for n in range(need, common + 1) if common % n == 0), 1)


def _by_rule(
    subject: Subject, annotation: Annotation, cap: int, step: int, *, declared: bool
) -> Lengths:
    """What the rule's names become; a product of several follows from its factors."""
    try:
        expansion = expand(annotation.signature, _bare(subject))
    except UsageError:
        return {}
    known = dict(expansion.lengths)
    if not declared:
        factors = [
            f for operand in expansion.operands for d in operand.dims or () for f in d.factors
        ]
        known |= {factor.name: int(factor.name) for factor in factors if factor.is_number}
    long = sorted({n for n in known.values() if n > cap}, reverse=True)
    sizes = {
        name: _shorter(length, cap, step, long.index(length)) if length in long else length
        for name, length in known.items()
    }
    _shrink_products(expansion, sizes, cap, step)
    lengths: Lengths = {}
    for dim, length in _measured(expansion, known):
        new = _product(dim.factors, sizes)
        if length == 1 or new is None:
            continue
        if lengths.setdefault(length, new) != new:
            return {}  # one length, two meanings: a number among the arguments is neither
    lengths = {known[name]: sizes[name] for name in sizes} | lengths
    return {old: new for old, new in lengths.items() if old > 1}


def _measured(expansion: Expansion, known: Mapping[str, int]) -> Iterator[tuple[Dim, int]]:
    """Every dimension and how long it is: those of results follow from their names."""
    for operand in expansion.inputs:
        for shape in operand.shapes:
            yield from zip(operand.dims or (), shape, strict=False)
    for operand in expansion.outputs:
        for dim in operand.dims or ():
            length = _product(dim.factors, known)
            if length is not None:
                yield dim, length


def _shrink_products(expansion: Expansion, sizes: dict[str, int], cap: int, step: int) -> None:
    """Halve the largest factor of a product until it is below the cap too."""
    for operand in expansion.inputs:
        for dim in operand.dims or ():
            names = [factor.name for factor in dim.factors if factor.name in sizes]
            while len(dim.factors) > 1 and names and (_product(dim.factors, sizes) or 0) > cap:
                largest = max(names, key=lambda name: sizes[name])
                if sizes[largest] % 2 or sizes[largest] // 2 < step:
                    break
                sizes[largest] //= 2


def _product(factors: tuple[Any, ...], sizes: Mapping[str, int]) -> int | None:
    """How long a product is; a number among its factors that has no other size is its own."""
    found = [
        sizes.get(factor.name, int(factor.name) if factor.is_number else None) for factor in factors
    ]
    return None if any(n is None for n in found) else math.prod(n for n in found if n is not None)


def _with_lengths(subject: Subject, lengths: Lengths, cap: int) -> Subject:
    """The same call, with these lengths in its tensors and among its other arguments."""

    def tensor(value: TensorValue) -> TensorValue:
        shape = tuple(lengths.get(n, n) for n in value.shape)
        return dataclasses.replace(value, shape=shape)

    def mapped(tree: Any, *, is_size: bool) -> Any:
        if isinstance(tree, TensorValue):
            return tensor(tree)
        if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
            return tuple(mapped(item, is_size=is_size) for item in tree)
        if isinstance(tree, list):
            return [mapped(item, is_size=is_size) for item in tree]
        if isinstance(tree, slice):
            parts = (tree.start, tree.stop, tree.step)
            return slice(*(mapped(part, is_size=is_size) for part in parts))
        # A small number may be a dimension's position as well as a length.
        return lengths.get(tree, tree) if type(tree) is int and (is_size or tree > cap) else tree

    sizes = subject.name.rpartition(".")[2] in _TAKE_SIZES
    args = tuple(mapped(value, is_size=sizes) for value in subject.args)
    kwargs = {
        key: mapped(value, is_size=sizes or not key.startswith(_POSITIONS))
        for key, value in subject.kwargs.items()
    }
    return dataclasses.replace(subject, args=args, kwargs=kwargs)


def _fits(annotation: Annotation, small: Subject) -> bool:
    """Whether the rule, which fits the real shapes, still does: it may have lengths as numbers."""
    try:
        annotation.check(_bare(small))
    except UsageError:
        return False
    return True


def _bare(subject: Subject) -> OperatorCall:
    given = hollow(subject.args, subject.kwargs)
    return OperatorCall(subject.function, given.args, dict(given.kwargs), name=subject.name)


def _is_like(small: Subject, expected: tuple[tuple[int, ...], ...]) -> bool:
    """Whether it runs, and gives as many tensors, of as many dimensions, none empty or longer."""
    made = foretold(small)
    if made is None or len(made.shapes) != len(expected):
        return False
    return all(
        len(new) == len(old) and all(0 < n <= m or n == m for n, m in zip(new, old, strict=True))
        for new, old in zip(made.shapes, expected, strict=True)
    )
