"""Which annotation an operator has: the library's own rules, and what users register."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from paritas.errors import UsageError
from paritas.partition.annotation import Annotation

# --- What a rule of the library is given and what it gives: a call bound to names, and a claim ----

# A rule knows parameters by name; an annotation knows arguments by position. This module is the
# step between the two, so that a rule does not care how its operator was called.

# How what a dimension leaves behind is put together again, if the result does not have it.
SUM, AVERAGE, MAXIMUM, MINIMUM, PRODUCT = "+", "+avg", "+max", "+min", "+prod"
_ALPHABET = "abcdefgh"
# The first parameter of an operator is called differently by torch's own namespaces.
_FIRST = ("input", "self")


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call whose arguments have names.

    Attributes:
        values: what was passed, by parameter; what was not passed is not there.
        positions: the parameter of each positional argument.
        keywords: the parameter of each keyword argument, by the keyword used.
        starred: the parameter whose items were passed one by one.
    """

    values: Mapping[str, Any]
    positions: tuple[str, ...]
    keywords: Mapping[str, str]
    starred: frozenset[str] = frozenset()

    def get(self, name: str, default: Any = None) -> Any:
        """What was passed as a parameter."""
        return self.values.get(name, default)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor that was passed; None for a number or for nothing."""
        value = self.values.get(name)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def has(self, name: str) -> bool:
        """Whether a tensor was passed."""
        return isinstance(self.values.get(name), torch.Tensor)

    def spread(self, name: str) -> bool:
        """Whether the items of a sequence were passed one by one, as in `x.view(2, 3)`."""
        return name in self.starred


@dataclasses.dataclass(frozen=True)
class RuleClaim:
    """What a rule says of a call.

    Attributes:
        inputs: the dimensions of a parameter; a parameter that is not named is given whole.
        outputs: the dimensions of each result.
        numbers: parameters that are as large as a dimension and are divided with it: the parameter,
            the item of it if it is a sequence, the dimension.
        bounds: the parameters that say where a rank's part of a dimension begins and ends, and the
            dimension.
        group: the parameter that takes the process group of the ranks, and the dimension whose
            split needs one; the call need not have it.
    """

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]
    numbers: tuple[tuple[str, int | None, str], ...] = ()
    bounds: tuple[str, str, str] | None = None
    group: tuple[str, str] | None = None


def bind(parameters: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound | None:
    """Give arguments their names.

    Args:
        parameters: names in their order; a last one with a star takes all that is left.

    Returns:
        None if there are arguments that the rule has not heard of: it cannot speak for them.
    """
    names = parameters.split()
    rest = names.pop()[1:] if names[-1].startswith("*") else None
    if len(args) > len(names) and rest is None:
        return None
    positions = names[: len(args)]
    values = dict(zip(positions, args, strict=False))
    starred: frozenset[str] = frozenset()
    if rest is not None and len(args) > len(names):
        left = tuple(args[len(names) :])
        one_sequence = len(left) == 1 and isinstance(left[0], list | tuple | torch.Size)
        values[rest] = tuple(left[0]) if one_sequence else left
        starred = frozenset() if one_sequence else frozenset([rest])
        positions += [rest] * len(left)
    keywords = {}
    for keyword, value in kwargs.items():
        name = names[0] if keyword in _FIRST and keyword not in names else keyword
        if name in values or name not in (*names, rest):
            return None
        values[name] = value
        keywords[keyword] = name
    return Bound(values, tuple(positions), keywords, starred)


def claim_text(claim: RuleClaim, bound: Bound) -> str:
    """A claim as an annotation of this call: positional arguments, then tensors by keyword."""
    starred = Counter[str]()
    inputs = []
    for name in bound.positions:
        item = f"{name}[{starred[name]}]"
        starred[name] += 1
        inputs.append(claim.inputs.get(name) or claim.inputs.get(item) or "?")
    for keyword, name in bound.keywords.items():
        if claim.inputs.get(name):
            inputs.append(f"{keyword}={claim.inputs[name]}")
    outputs = [dims or "1" for dims in claim.outputs]
    numbers = [f"{_number_place(bound, name, item)}={dim}" for name, item, dim in claim.numbers]
    if claim.bounds is not None:
        begin, end, dim = claim.bounds
        numbers.append(
            f"{_number_place(bound, begin, None)}:{_number_place(bound, end, None)}={dim}"
        )
    if claim.group is not None:
        name, dim = claim.group
        numbers.append(
            f"{_number_place(bound, name, None) if name in bound.values else name}=ranks({dim})"
        )
    text = f"{', '.join(inputs)} -> {', '.join(outputs)}"
    return text + (f" ; {', '.join(numbers)}" if numbers else "")


def _number_place(bound: Bound, name: str, item: int | None) -> str:
    """Where a number was passed: by position or by keyword, alone or as an item of a sequence."""
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


def letters(count: int, start: int = 0) -> list[str]:
    """Identifiers for so many dimensions."""
    return [_ALPHABET[i] if i < len(_ALPHABET) else f"a{i}" for i in range(start, start + count)]


def named(shape: Sequence[int], names: Sequence[str]) -> str:
    """The dimensions of a shape, aligned to the right of names: a length of 1 is frozen."""
    offset = len(names) - len(shape)
    return " ".join("1" if size == 1 else names[offset + i] for i, size in enumerate(shape))


def frozen(dims: str, whole: Iterable[int]) -> str:
    """Dimensions of which some, by their positions, stay whole."""
    stay = set(whole)
    return " ".join(
        f"{dim}^" if i in stay and dim != "1" else dim for i, dim in enumerate(dims.split())
    )


def once(dims: str, *summed: str) -> str:
    """A tensor that is one term of the sums over these dimensions: one rank adds it."""
    marks = [f"!{dim.removesuffix(SUM)}" for dim in summed if dim.endswith(SUM)]
    return f"{dims} : {' '.join(marks)}" if dims and marks else dims


def positive_dims(dim: Any, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Dimensions counted from the front; None names them all, and so does an empty list."""
    if not shape:
        return None
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(len(shape)))
    if any(not isinstance(d, int) or not -len(shape) <= d < len(shape) for d in given):
        return None
    return tuple(d % len(shape) for d in given)


def broadcast(
    shapes: Iterable[tuple[int, ...]], suffix: Mapping[int, str] | str = ""
) -> tuple[list[str], list[str], tuple[int, ...]] | None:
    """Dimensions of tensors that broadcast with each other.

    Args:
        suffix: what follows the identifiers, for all or by dimension of the result.

    Returns:
        The dimensions of each tensor, those of the result and its shape.
    """
    shapes = list(shapes)
    try:
        whole = tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None
    marks = suffix if isinstance(suffix, Mapping) else dict.fromkeys(range(len(whole)), suffix)
    names = [name + marks.get(i, "") for i, name in enumerate(letters(len(whole)))]
    return [named(shape, names) for shape in shapes], named(whole, names).split(), whole


# --- The registry ---------------------------------------------------------------------------------

# A rule is a function of the actual call. It claims what is true for these shapes and these
# keywords, and claims nothing (None) for a call that it does not know to the last argument.

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Bound], RuleClaim | None]
# What a user registers: the annotation, or a function of the call that gives it (or None).
Registered = str | Callable[..., "str | None"]


@dataclasses.dataclass(frozen=True)
class _LibraryRule:
    """A rule of the library and the parameters it speaks for."""

    rule: Rule
    parameters: str


_RULES: dict[str, _LibraryRule] = {}
_REGISTERED: dict[str, Registered] = {}


def name_of(operator: str | Callable[..., Any]) -> str:
    """The name under which an operator is looked up.

    The spellings of one operator come to one: `torch.ops.aten.add.Tensor`, `aten::add.Tensor` and
    `aten.add`.
    """
    if not isinstance(operator, str):
        return _name_of_function(operator)
    name = operator.strip().replace("::", ".").removeprefix("torch.ops.")
    if name.startswith("aten."):
        return ".".join(name.split(".")[:2])
    return name


def _name_of_function(function: Callable[..., Any]) -> str:
    """Torch's own functions do not all know where people find them: they are looked for there."""
    text = str(function)
    if text.startswith("aten."):
        return name_of(text)
    module = getattr(function, "__module__", None) or ""
    own = f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
    return own if own in _REGISTERED else _torch_names().get(id(function), own)


@functools.cache
def _torch_names() -> dict[int, str]:
    """The names of the library's rules, by the function that each name leads to."""
    found: dict[int, str] = {}
    for name in _RULES:
        place: Any = torch
        for part in name.split(".")[1:] if name.startswith("torch.") else ():
            place = getattr(place, part, None)
        if place is not torch and place is not None:
            found.setdefault(id(place), name)
    return found


# --- the library's own ----------------------------------------------------------------------------


def rule(parameters: str, *names: str) -> Callable[[Rule], Rule]:
    """Make a function the rule of operators.

    Args:
        parameters: of the operators, in their order; see `claims.bind`.
        names: in full (`torch.add`), or several in one string.
    """

    def add(function: Rule) -> Rule:
        for name in " ".join(names).split():
            if name in _RULES:
                raise ValueError(f"{name} has two rules in the library")
            _RULES[name] = _LibraryRule(function, parameters)
        return function

    return add


def everywhere(*short: str) -> str:
    """Names of operators that are functions of torch, methods of tensors and aten operators."""
    words = " ".join(short).split()
    return " ".join(f"torch.{word} torch.Tensor.{word} aten.{word}" for word in words)


def functional(*short: str) -> str:
    """Names of operators in `torch.nn.functional`."""
    return " ".join(f"torch.nn.functional.{word}" for word in " ".join(short).split())


def shipped() -> list[str]:
    """The names of the operators that the library itself has rules for, sorted."""
    return sorted(_RULES)


def known() -> list[str]:
    """The names of all operators that have an annotation, sorted."""
    return sorted({*_RULES, *_REGISTERED})


def is_registered(operator: str | Callable[..., Any]) -> bool:
    """Whether a user gave an operator an annotation of their own."""
    return name_of(operator) in _REGISTERED


def registration(operator: str | Callable[..., Any]) -> Registered | None:
    """What a user registered for an operator; None if nothing is."""
    return _REGISTERED.get(name_of(operator))


def annotation_for(
    name: str | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Annotation | None:
    """The annotation of an operator for these arguments.

    What a user registered is preferred to the library's own rule.

    Returns:
        None if there is no rule, or if the rule has nothing to say of such a call.
    """
    key, keywords = name_of(name), dict(kwargs or {})
    if key in _REGISTERED:
        text = _REGISTERED[key]
        said = text if isinstance(text, str) else text(*args, **keywords)
        return None if said is None else Annotation.parse(said)
    entry = _RULES.get(key)
    bound = bind(entry.parameters, args, keywords) if entry else None
    if entry is None or bound is None:
        return None
    claim = entry.rule(bound)
    return None if claim is None else Annotation.parse(claim_text(claim, bound))


# --- the users' own -------------------------------------------------------------------------------


def register(
    name: str | Callable[..., Any], annotation: Registered, *, overwrite: bool = False
) -> None:
    """Give an operator an annotation.

    Args:
        name: of the operator as it is called (`my_package.ops.my_matmul`), or the operator.
        annotation: the text, or a function of the operator's arguments that gives it; such a
            function says None for calls it has no annotation for.
        overwrite: an operator that has an annotation already is refused without it.
    """
    key = name_of(name)
    if not overwrite and (key in _REGISTERED or key in _RULES):
        raise UsageError(
            f"{key} has an annotation already; register(..., overwrite=True) replaces it"
        )
    if isinstance(annotation, str):
        Annotation.parse(annotation)
    elif not callable(annotation):
        raise UsageError(
            f"the annotation of {key} is {annotation!r}: give its text, or a function of the "
            "operator's arguments that gives it"
        )
    _REGISTERED[key] = annotation


def unregister(name: str | Callable[..., Any]) -> None:
    """Forget what was registered for an operator; the library's own rule is back, if it has one."""
    key = name_of(name)
    if key not in _REGISTERED:
        raise UsageError(f"nothing is registered for {key}")
    del _REGISTERED[key]


def annotated(
    annotation: Registered, *, name: str | None = None, overwrite: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Annotate a function of your own; the function itself is not changed.

    ```python
    @annotated("m k+, k+ n -> m n")
    def my_matmul(a, b): ...
    ```
    """

    def add(function: Callable[P, R]) -> Callable[P, R]:
        register(name or function, annotation, overwrite=overwrite)
        return function

    return add
