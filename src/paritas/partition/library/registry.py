"""Which annotation an operator has: the library's own rules, and what users register.

A rule is a function of the actual call. It claims what is true for these shapes and these keywords,
and claims nothing (None) for a call that it does not know to the last argument.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from paritas.errors import UsageError
from paritas.partition.annotations.annotation import Annotation
from paritas.partition.library.claims import Bound, Claim, bind, text_of

__all__ = [
    "annotated",
    "annotation_for",
    "is_registered",
    "known",
    "name_of",
    "register",
    "registration",
    "rule",
    "shipped",
    "unregister",
]

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Bound], Claim | None]
# What a user registers: the annotation, or a function of the call that gives it (or None).
Registered = str | Callable[..., "str | None"]


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A rule of the library and the parameters it speaks for."""

    rule: Rule
    parameters: str


_RULES: dict[str, _Entry] = {}
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
            _RULES[name] = _Entry(function, parameters)
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
    return None if claim is None else Annotation.parse(text_of(claim, bound))


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
