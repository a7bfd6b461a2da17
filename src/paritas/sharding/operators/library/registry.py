"""The annotation of an operator: the rules of the library, and what users register."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from paritas.core.errors import UsageError
from paritas.sharding.operators.annotation import Annotation

if TYPE_CHECKING:
    from paritas.core.placement.placement import OperatorCall

# --- What a rule gets and returns: a call whose arguments have names, and a claim -----------------

# Rules know parameters by name, annotations know arguments by position. `bind` and `claim_text`
# translate, so that a rule does not depend on how its operator is called.

# The suffix of a dimension that the result does not have: how its parts are reduced.
SUM, AVERAGE, MAXIMUM, MINIMUM, PRODUCT = "+", "+avg", "+max", "+min", "+prod"
_ALPHABET = "abcdefgh"
# The namespaces of torch have different names for the first parameter of an operator.
_FIRST = ("input", "self")

# The dimensions of a tensor: one string each, or all in one string.
Dims = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Bound:
    """A call whose arguments have names.

    Attributes:
        values: the arguments that were passed, by parameter.
        positions: the parameter of each positional argument.
        keywords: the parameter of each keyword argument, by keyword.
        starred: parameters whose items were passed one by one.
    """

    values: Mapping[str, Any]
    positions: tuple[str, ...]
    keywords: Mapping[str, str]
    starred: frozenset[str] = frozenset()

    def get(self, name: str, default: Any = None) -> Any:
        """The argument of a parameter."""
        return self.values.get(name, default)

    def shape(self, name: str = "x") -> tuple[int, ...] | None:
        """The shape of a tensor argument; None if it is not a tensor."""
        value = self.values.get(name)
        return tuple(value.shape) if isinstance(value, torch.Tensor) else None

    def dims(self, name: str = "x") -> list[str] | None:
        """An identifier for each dimension of a tensor argument; None if it is not a tensor."""
        shape = self.shape(name)
        return None if shape is None else named(shape, letters(len(shape)))

    def has(self, name: str) -> bool:
        """Whether the argument is a tensor."""
        return isinstance(self.values.get(name), torch.Tensor)

    def spread(self, name: str) -> bool:
        """Whether the items of a sequence were passed one by one, as in `x.view(2, 3)`."""
        return name in self.starred


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


def bind(parameters: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Bound | None:
    """Assign arguments to parameters.

    Args:
        parameters: names in order; a last one with a star takes all remaining arguments.

    Returns:
        None if the rule does not know an argument, and so cannot claim anything.
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


def letters(count: int, start: int = 0) -> list[str]:
    """Identifiers for a number of dimensions."""
    return [_ALPHABET[i] if i < len(_ALPHABET) else f"a{i}" for i in range(start, start + count)]


def dim_of(size: int, name: str) -> str:
    """A dimension by name; a length of 1 is never split."""
    return "1" if size == 1 else name


def named(shape: Sequence[int], names: Sequence[str]) -> list[str]:
    """The dimensions of a shape; the names are aligned to the right."""
    offset = len(names) - len(shape)
    return [dim_of(size, names[offset + i]) for i, size in enumerate(shape)]


def frozen(dims: Sequence[str], whole: Iterable[int]) -> list[str]:
    """The dimensions, with those at the given positions never split."""
    stay = set(whole)
    return [f"{dim}^" if i in stay and dim != "1" else dim for i, dim in enumerate(dims)]


def once(dims: Sequence[str], *summed: str) -> Dims:
    """A tensor that is one term of the sums over these dimensions: only one rank adds it."""
    marks = [f"!{dim.removesuffix(SUM)}" for dim in summed if dim.endswith(SUM)]
    return [*dims, ":", *marks] if dims and marks else dims


def positive_dims(dim: Any, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Dimensions counted from the front; None and an empty list mean all of them."""
    if not shape:
        return None
    given = (dim,) if isinstance(dim, int) else tuple(dim or range(len(shape)))
    if any(not isinstance(d, int) or not -len(shape) <= d < len(shape) for d in given):
        return None
    return tuple(d % len(shape) for d in given)


def broadcast(shapes: Iterable[tuple[int, ...]]) -> tuple[list[list[str]], list[str]] | None:
    """The dimensions of tensors that broadcast with each other, and those of the result."""
    shapes = list(shapes)
    try:
        whole = torch.broadcast_shapes(*shapes)
    except RuntimeError:
        return None
    names = letters(len(whole))
    return [named(shape, names) for shape in shapes], named(whole, names)


# --- The registry ---------------------------------------------------------------------------------

# A rule is a function of the call. It claims what is true for these shapes and keywords. It returns
# None if it does not know every argument of the call.

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Bound], RuleClaim | None]
# What a user registers: an annotation, or a function of the call that returns one (or None).
Registered = str | Callable[..., "str | None"]


@dataclasses.dataclass(frozen=True)
class _LibraryRule:
    """A rule of the library, and the parameters of its operators."""

    rule: Rule
    parameters: str


_RULES: dict[str, _LibraryRule] = {}
_REGISTERED: dict[str, Registered] = {}


def name_of(operator: str | Callable[..., Any]) -> str:
    """The name under which an operator is registered.

    `torch.ops.aten.add.Tensor`, `aten::add.Tensor` and `aten.add` have the same name.
    """
    if not isinstance(operator, str):
        return _name_of_function(operator)
    name = operator.strip().replace("::", ".").removeprefix("torch.ops.")
    if name.startswith("aten."):
        return ".".join(name.split(".")[:2])
    return name


def _name_of_function(function: Callable[..., Any]) -> str:
    """The name of a function; some of torch's functions do not know their public name."""
    text = str(function)
    if text.startswith("aten."):
        return name_of(text)
    module = getattr(function, "__module__", None) or ""
    own = f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"
    return own if own in _REGISTERED else _torch_names().get(id(function), own)


@functools.cache
def _torch_names() -> dict[int, str]:
    """The names of the library's rules, by the id of the function with that name."""
    found: dict[int, str] = {}
    for name in _RULES:
        place: Any = torch
        for part in name.split(".")[1:] if name.startswith("torch.") else ():
            place = getattr(place, part, None)
        if place is not torch and place is not None:
            found.setdefault(id(place), name)
    return found


# --- The library ----------------------------------------------------------------------------------


def rule(parameters: str, *names: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operators.

    Args:
        parameters: of the operators, in order; see `bind`.
        names: full names (`torch.add`), several in one string.
    """

    def add(function: Rule) -> Rule:
        for name in " ".join(names).split():
            if name in _RULES:
                raise ValueError(f"{name} has two rules in the library")
            _RULES[name] = _LibraryRule(function, parameters)
        return function

    return add


def everywhere(*short: str) -> str:
    """Full names of operators that are torch functions, tensor methods and aten operators."""
    words = " ".join(short).split()
    return " ".join(f"torch.{word} torch.Tensor.{word} aten.{word}" for word in words)


def functional(*short: str) -> str:
    """Full names of operators in `torch.nn.functional`."""
    return " ".join(f"torch.nn.functional.{word}" for word in " ".join(short).split())


def shipped() -> list[str]:
    """The sorted names of the operators in the library."""
    return sorted(_RULES)


def known() -> list[str]:
    """The sorted names of all operators with an annotation."""
    return sorted({*_RULES, *_REGISTERED})


def parameters_of(name: str) -> str | None:
    """The parameters of an operator of the library, as `bind` reads them."""
    entry = _RULES.get(name)
    return None if entry is None else entry.parameters


def rule_of(name: str) -> Rule | None:
    """The library's rule of an operator."""
    entry = _RULES.get(name)
    return None if entry is None else entry.rule


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
    entry = _RULES.get(key)
    bound = bind(entry.parameters, args, keywords) if entry else None
    if entry is None or bound is None:
        return None
    claim = entry.rule(bound)
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
    if not overwrite and (key in _REGISTERED or key in _RULES):
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
