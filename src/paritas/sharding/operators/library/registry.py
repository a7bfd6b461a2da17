"""The annotation of an operator: the rules of the library, and what users register."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from paritas.core.errors import UsageError
from paritas.core.operators.calls import Bound, bind
from paritas.core.operators.catalogue import (
    full_name,
    name_in_module,
    operator_called,
    operator_names,
)
from paritas.sharding.operators.annotation import Annotation

if TYPE_CHECKING:
    from paritas.core.placement.placement import OperatorCall

# --- What a rule gets and returns: a call whose arguments have names, and a claim -----------------

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
        place = _number_place(bound, name) if name in bound.values else name
        numbers.append(f"{place}=ranks({dim})")
    text = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    return text + (f" ; {', '.join(numbers)}" if numbers else "")


def _spell(dims: Dims) -> str:
    return dims if isinstance(dims, str) else " ".join(dims)


def _number_place(bound: Bound, name: str, item: int | None = None) -> str:
    """The position or keyword of a number, or of the sequence of which it is an item."""
    position = bound.positions.index(name) if name in bound.positions else None
    if position is None:
        place = next(keyword for keyword, given in bound.keywords.items() if given == name)
    else:
        place = str(position)
    if item is None:
        return place
    if position is not None and bound.spread(name):
        return str(position + item)
    return f"{place}[{item}]"


def frozen(dims: Sequence[str], whole: Iterable[int]) -> list[str]:
    """The dimensions, with those at the given positions never split."""
    stay = set(whole)
    return [f"{dim}^" if i in stay and dim != "1" else dim for i, dim in enumerate(dims)]


def once(dims: Sequence[str], *summed: str) -> Dims:
    """A tensor that is one term of the sums over these dimensions: only one rank adds it."""
    marks = [f"!{dim.removesuffix(SUM)}" for dim in summed if dim.endswith(SUM)]
    return [*dims, ":", *marks] if dims and marks else dims


# --- The registry ---------------------------------------------------------------------------------

# A rule is a function of the call. It claims what is true for these shapes and keywords. It returns
# None if it does not know every argument of the call.

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Bound], RuleClaim | None]
# What a user registers: an annotation, or a function of the call that returns one (or None).
Registered = str | Callable[..., "str | None"]


_RULES: dict[str, Rule] = {}
_REGISTERED: dict[str, Registered] = {}


def name_of(operator: str | Callable[..., Any]) -> str:
    """The name under which an operator is registered, or defined."""
    own = "" if isinstance(operator, str) else name_in_module(operator)
    return own if own in _REGISTERED else full_name(operator)


# --- The library ----------------------------------------------------------------------------------


def rule(*endings: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operators, by the ends of their names."""

    def add(function: Rule) -> Rule:
        for ending in " ".join(endings).split():
            if ending in _RULES:
                raise ValueError(f"{ending} has two rules in the library")
            _RULES[ending] = function
        return function

    return add


def _rule_of(name: str) -> Rule | None:
    parts = name.split(".")
    endings = (".".join(parts[begin:]) for begin in range(len(parts)))
    return next((_RULES[ending] for ending in endings if ending in _RULES), None)


def known() -> list[str]:
    """The sorted names of all operators with an annotation."""
    return sorted({*operator_names(), *_REGISTERED})


def is_registered(operator: str | Callable[..., Any]) -> bool:
    """Whether a user registered an annotation for an operator."""
    return name_of(operator) in _REGISTERED


def registration(operator: str | Callable[..., Any]) -> Registered | None:
    """What a user registered for an operator, if anything."""
    return _REGISTERED.get(name_of(operator))


def annotation_for(
    name: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Annotation | None:
    """The annotation of an operator for these arguments, or None if no rule covers the call.

    A user's registration takes precedence over the library.
    """
    key, keywords = name_of(name), dict(kwargs or {})
    if key in _REGISTERED:
        text = _REGISTERED[key]
        said = text if isinstance(text, str) else text(*args, **keywords)
        return None if said is None else Annotation.parse(said)
    operator = operator_called(key)
    bound = bind(operator.parameters, args, keywords) if operator else None
    rule_of_operator = _rule_of(key)
    if rule_of_operator is None or bound is None:
        return None
    claim = rule_of_operator(bound)
    return None if claim is None else Annotation.parse(claim_text(claim, bound))


def annotation_of_call(call: OperatorCall) -> Annotation | None:
    """The annotation of a call, by its name or by its function.

    A decorated function is registered under its own module, not under the name of an import.
    """
    named = annotation_for(call.name, call.args, call.kwargs) if call.name else None
    return named or annotation_for(call.function, call.args, call.kwargs)


# --- Registrations of users -----------------------------------------------------------------------


def register(
    name: str | Callable[..., Any], annotation: Registered, *, overwrite: bool = False
) -> None:
    """Register an annotation for an operator.

    Args:
        name: full name of the operator (`my_package.ops.my_matmul`), or the operator itself.
        annotation: the text, or a function of the operator's arguments that returns it, or None
            for calls without an annotation.
        overwrite: whether to replace an existing annotation.
    """
    key = name_of(name)
    if not overwrite and (key in _REGISTERED or operator_called(key)):
        raise UsageError(
            f"{key} already has an annotation; register(..., overwrite=True) replaces it"
        )
    if isinstance(annotation, str):
        Annotation.parse(annotation)
    elif not callable(annotation):
        raise UsageError(
            f"the annotation of {key} must be a string, or a function of the operator's arguments "
            f"that returns one, got {annotation!r}"
        )
    _REGISTERED[key] = annotation


def unregister(name: str | Callable[..., Any]) -> None:
    """Remove a registration; the library's rule applies again, if there is one."""
    key = name_of(name)
    if key not in _REGISTERED:
        raise UsageError(f"nothing is registered for {key}")
    del _REGISTERED[key]


def annotated(
    annotation: Registered, *, name: str | None = None, overwrite: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Annotate a function; the function itself is not changed.

    ```python
    @annotated("m k+, k+ n -> m n")
    def my_matmul(a, b): ...
    ```
    """

    def add(function: Callable[P, R]) -> Callable[P, R]:
        register(name or function, annotation, overwrite=overwrite)
        return function

    return add
