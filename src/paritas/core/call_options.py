"""takes_options(): a function whose many keyword arguments are the fields of one struct.

The struct says each name, type and default once. Callers write keyword arguments, as before, and a
type checker and `help()` show them; the function gets the struct.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from paritas.core.errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable

OptionsT = TypeVar("OptionsT")
_OptionsT_co = TypeVar("_OptionsT_co", covariant=True)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_A = TypeVar("_A")
_B = TypeVar("_B")
_C = TypeVar("_C")


class _Decorator(Protocol[_OptionsT_co, _P]):
    """For functions of up to three subjects; Python cannot type any number of them."""

    @overload
    def __call__(self, work: Callable[[_OptionsT_co], _R], /) -> Callable[_P, _R]: ...
    @overload
    def __call__(
        self, work: Callable[[_A, _OptionsT_co], _R], /
    ) -> Callable[Concatenate[_A, _P], _R]: ...
    @overload
    def __call__(
        self, work: Callable[[_A, _B, _OptionsT_co], _R], /
    ) -> Callable[Concatenate[_A, _B, _P], _R]: ...
    @overload
    def __call__(
        self, work: Callable[[_A, _B, _C, _OptionsT_co], _R], /
    ) -> Callable[Concatenate[_A, _B, _C, _P], _R]: ...


def takes_options(struct: Callable[_P, OptionsT]) -> _Decorator[OptionsT, _P]:
    """Replace the last parameter of a function, a struct, by the struct's own parameters.

    Args:
        struct: a dataclass. Fields before `KW_ONLY` may also be given by position, after the
            function's other arguments.
    """

    def decorate(work: Callable[..., _R]) -> Callable[..., _R]:
        work_signature = inspect.signature(work)
        *subjects, _ = work_signature.parameters.values()
        options = inspect.signature(struct).parameters.values()
        signature = work_signature.replace(parameters=[*subjects, *options])
        make: Callable[..., OptionsT] = struct

        @functools.wraps(work)
        def call(*args: Any, **kwargs: Any) -> _R:
            __tracebackhide__ = True
            _check_names(work.__name__, kwargs, signature.parameters)
            bound: dict[str, Any] = signature.bind(*args, **kwargs).arguments
            values = [bound.pop(subject.name) for subject in subjects]
            return work(*values, make(**bound))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _check_names(function: str, keyword_arguments: dict[str, Any], parameter_names: Any) -> None:
    """Refuse an unknown name as Python does, with the name that was probably meant."""
    for name in keyword_arguments:
        if name not in parameter_names:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}; "
                f"{did_you_mean(name, sorted(parameter_names))}"
            )
