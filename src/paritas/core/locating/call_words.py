"""Calls of operators and functions, as sentences name them."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

from paritas.core.numerics.bits import dtype_name
from paritas.core.results.wording import count_things
from paritas.core.torch_private import unseen_kernels
from paritas.core.torch_private.operators import traits
from paritas.core.tracing.traces import Operation, TracedCall, ValueRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paritas.core.tracing.traces import Trace


def describe_settings(reference: Operation, candidate: Operation) -> str:
    """The candidate's call, with what is another argument than in the reference's."""
    texts = [
        f"{name}={shown_setting(candidate_setting)} instead of {shown_setting(ours)}"
        for name, (ours, candidate_setting) in changed_settings(reference, candidate).items()
    ]
    return f"{call_name(candidate)} with {', '.join(texts) or 'other arguments'}"


def changed_settings(
    reference: Operation | TracedCall, candidate: Operation | TracedCall
) -> dict[str, tuple[Any, Any]]:
    """The arguments that are other ones, tensors left out: the reference's, the candidate's."""
    ours, candidate_settings = (_settings_of(called) for called in (reference, candidate))
    return {
        name: (ours.get(name), candidate_settings.get(name))
        for name in dict.fromkeys((*ours, *candidate_settings))
        if not _is_tensor(ours.get(name))
        and not _is_tensor(candidate_settings.get(name))
        and ours.get(name) != candidate_settings.get(name)
    }


def _settings_of(called: Operation | TracedCall) -> dict[str, Any]:
    """All arguments by name, those that are not given by their defaults."""
    if isinstance(called, Operation):
        schema = called.func._schema  # noqa: SLF001
        defaults = {
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        }
        return {**defaults, **dict(_named_arguments(called))}
    try:
        bound = inspect.signature(called.target).bind(*called.args, **called.kwargs)
    except (TypeError, ValueError):  # a function that is built in has no signature
        places = {
            f"argument {position}": argument
            for position, argument in enumerate(called.args, start=1)
        }
        return {**places, **called.kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def shown_setting(value: Any) -> str:
    """An argument that is no tensor, in words."""
    if isinstance(value, float):
        return f"{value:.7g}"
    return "not given" if value is None else f"{value!r:.40}"


def _is_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_tensor, value))
    return isinstance(value, ValueRef)


def call_name(operation: Operation) -> str:
    """An operator, as sentences name it."""
    if operation.function:
        return f"{operation.function}.backward"
    kind = traits(operation.func)
    if kind.namespace == unseen_kernels.NAMESPACE:
        return f"{kind.name} (a kernel that torch does not see)"
    name = operation.name.removesuffix(".default")
    return f"{name} of the backward pass" if operation.is_backward else name


_MOST_NAMED = 3


def call_names(operations: Sequence[Operation]) -> str:
    """Several operators, as sentences name them: the first few, and how many more."""
    times = Counter(call_name(operation) for operation in operations)
    names = [name if count == 1 else f"{name} ({count} times)" for name, count in times.items()]
    if len(names) > _MOST_NAMED:
        more = count_things(len(names) - _MOST_NAMED, "other operator")
        return f"{', '.join(names[:_MOST_NAMED])} and {more}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _named_arguments(called: Operation | TracedCall) -> Iterator[tuple[str, Any]]:
    """The arguments with their names; "" for those by position of a function without a schema."""
    names = [""] * len(called.args)
    if isinstance(called, Operation):
        schema = called.func._schema  # noqa: SLF001
        names = [argument.name for argument in schema.arguments]
    yield from zip(names, called.args, strict=False)
    yield from called.kwargs.items()


def describe_arguments(called: Operation | TracedCall, trace: Trace) -> Iterator[str]:
    """The arguments of an operator or a function in words."""

    def words(value: Any) -> str:
        if isinstance(value, ValueRef):
            figures = trace.values[value.index].figures
            if figures is None:
                return "a tensor"
            return f"{dtype_name(figures.dtype)} {list(figures.shape)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(words, value))}]"
        return repr(value)

    for name, value in _named_arguments(called):
        if value is not None and _is_tensor(value):
            yield f"{name}: {words(value)}" if name else words(value)
        elif value is not None:
            yield f"{name}={value!r:.60}" if name else f"{value!r:.60}"
