"""The annotation of an operator: the rules of the library, and what users register."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
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
from paritas.sharding.operators.library.claims import RuleClaim, claim_text
from paritas.sharding.operators.library.derivation import derive_claim

if TYPE_CHECKING:
    from paritas.core.operators.calls import OperatorCall

# --- The registry ---------------------------------------------------------------------------------

# A rule is a function of the call. It claims what is true for these shapes and keywords. It returns
# None if it does not know every argument of the call, and `DERIVED` if the definition says it.


class Derived(enum.Enum):
    """What a rule returns for a call of which the claim is derived from the definition."""

    CLAIM = 0


DERIVED = Derived.CLAIM

P = ParamSpec("P")
R = TypeVar("R")
Rule = Callable[[Bound], "RuleClaim | Derived | None"]
# What a user registers: an annotation, or a function of the call that returns one (or None).
Registered = str | Callable[..., "str | None"]


_RULES: dict[str, Rule] = {}
_REGISTERED: dict[str, Registered] = {}


def name_of(operator: str | Callable[..., Any]) -> str:
    """The name under which an operator is registered, or defined."""
    own_name = "" if isinstance(operator, str) else name_in_module(operator)
    return own_name if own_name in _REGISTERED else full_name(operator)


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
        annotation_text = text if isinstance(text, str) else text(*args, **keywords)
        return None if annotation_text is None else Annotation.parse(annotation_text)
    operator = operator_called(key)
    bound = bind(operator.parameters, args, keywords) if operator else None
    if operator is None or bound is None:
        return None
    exception = _rule_of(key)
    claim = exception(bound) if exception else DERIVED
    if isinstance(claim, Derived):
        claim = derive_claim(key, operator, bound)
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
