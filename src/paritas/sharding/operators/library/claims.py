"""What a rule claims about a call, and the claim as an annotation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paritas.core.operators.calls import Bound

# Rules know parameters by name, annotations know arguments by position. `bind` and `claim_text`
# translate, so that a rule does not depend on how its operator is called.

# The suffix of a dimension that the result does not have: how its parts are reduced.
SUM, AVERAGE, MAXIMUM, MINIMUM, PRODUCT = "+", "+avg", "+max", "+min", "+prod"

# The dimensions of a tensor: one string each, or all in one string.
Dims = Sequence[str]


@dataclasses.dataclass(frozen=True)
class RuleClaim:
    """What a rule claims about a call.

    Attributes:
        inputs: the dimensions of parameters; parameters not listed are not split.
        outputs: the dimensions of each result.
        numbers: parameters that are the length of a dimension and are divided with it: the
            parameter, the item if it is a sequence, and the dimension.
        bounds: the parameters for the start and end of a rank's part, and the dimension.
        group: the parameter for the process group of the ranks, which the call may omit, and the
            dimension whose split needs it.
    """

    inputs: Mapping[str, Dims]
    outputs: tuple[Dims, ...]
    numbers: tuple[tuple[str, int | None, str], ...] = ()
    bounds: tuple[str, str, str] | None = None
    group: tuple[str, str] | None = None


def unary(inside: Dims | None, *outside: Dims) -> RuleClaim | None:
    """A claim about `x` alone; by default the result has the same dimensions."""
    return None if inside is None else RuleClaim({"x": inside}, outside or (inside,))


def claim_text(claim: RuleClaim, bound: Bound) -> str:
    """A claim as an annotation of this call: positional arguments, then keyword tensors."""
    starred = Counter[str]()
    inputs = []
    for name in bound.positions:
        item = f"{name}[{starred[name]}]"
        starred[name] += 1
        inputs.append(_spell(claim.inputs.get(name) or claim.inputs.get(item) or "?"))
    for keyword, name in bound.keywords.items():
        if claim.inputs.get(name):
            inputs.append(f"{keyword}={_spell(claim.inputs[name])}")
    outputs = [_spell(dims or "1") for dims in claim.outputs]
    numbers = [f"{_number_place(bound, name, item)}={dim}" for name, item, dim in claim.numbers]
    if claim.bounds is not None:
        begin, end, dim = claim.bounds
        numbers.append(f"{_number_place(bound, begin)}:{_number_place(bound, end)}={dim}")
    if claim.group is not None:
        name, dim = claim.group
        place_text = _number_place(bound, name) if name in bound.values else name
        numbers.append(f"{place_text}=ranks({dim})")
    text = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    return text + (f" ; {', '.join(numbers)}" if numbers else "")


def _spell(dims: Dims) -> str:
    return dims if isinstance(dims, str) else " ".join(dims)


def _number_place(bound: Bound, name: str, item: int | None = None) -> str:
    """The position or keyword of a number, or of the sequence of which it is an item."""
    position = bound.positions.index(name) if name in bound.positions else None
    if position is None:
        place_text = next(
            keyword for keyword, parameter_name in bound.keywords.items() if parameter_name == name
        )
    else:
        place_text = str(position)
    if item is None:
        return place_text
    if position is not None and bound.spread(name):
        return str(position + item)
    return f"{place_text}[{item}]"


def frozen(dims: Sequence[str], whole_positions: Iterable[int]) -> list[str]:
    """The dimensions, with those at the given positions never split."""
    stay = set(whole_positions)
    return [f"{dim}^" if i in stay and dim != "1" else dim for i, dim in enumerate(dims)]


def once(dims: Sequence[str], *summed: str) -> Dims:
    """A tensor that is one term of the sums over these dimensions: only one rank adds it."""
    marks = [f"!{dim.removesuffix(SUM)}" for dim in summed if dim.endswith(SUM)]
    return [*dims, ":", *marks] if dims and marks else dims
