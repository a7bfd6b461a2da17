"""All operators that have a definition, and the definition of a call."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, get_args

import torch

from paritas.core.errors import in_one_line
from paritas.core.operators import contractions, elementwise, norms_and_losses, rearrangements
from paritas.core.operators.calls import bind
from paritas.core.operators.definitions import (
    GROUPS,
    OPERATORS,
    Array,
    DefinedOperator,
    Group,
    Layout,
    Summation,
    SymbolicCall,
    flat,
)
from paritas.core.operators.indices import Poly, symbol
from paritas.core.operators.terms import OutsideTheoryError, Term

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paritas.core.operators.calls import OperatorCall, Place

# Importing a family registers its operators.
FAMILIES = (contractions, elementwise, norms_and_losses, rearrangements)

SUMMATIONS: dict[str, Summation] = {
    name: summation for summation in get_args(Summation) for name in GROUPS[summation]
}


def operator_names() -> list[str]:
    """The sorted names of all operators that have a definition."""
    return sorted(OPERATORS)


def operator_called(name: str) -> DefinedOperator | None:
    """The operator of this name."""
    return OPERATORS.get(name)


def summation_of(name: str) -> Summation | None:
    """How an operator sums, by its name in aten; None if it has no long sum."""
    return SUMMATIONS.get(name)


@functools.cache
def operators_of(*groups: Group) -> frozenset[str]:
    """The operators that belong to any of these groups, by their names in aten.

    Raises:
        KeyError: there is no such group.
    """
    return frozenset(name for group in groups for name in GROUPS[group])


def full_name(operator: str | Callable[..., Any]) -> str:
    """The name under which an operator is defined.

    `torch.ops.aten.add.Tensor`, `aten::add.Tensor` and `aten.add` have the same name. A function of
    torch may not know its public name.
    """
    if isinstance(operator, str):
        name = operator.strip().replace("::", ".").removeprefix("torch.ops.")
        return ".".join(name.split(".")[:2]) if name.startswith("aten.") else name
    text = str(operator)
    return (
        full_name(text)
        if text.startswith("aten.")
        else _torch_names().get(id(operator), name_in_module(operator))
    )


def name_in_module(function: Callable[..., Any]) -> str:
    """A function's name in the module that defines it."""
    module = getattr(function, "__module__", None) or ""
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


@functools.cache
def _torch_names() -> dict[int, str]:
    """The names of operators, by the id of the function with that name."""
    names: dict[int, str] = {}
    for name in OPERATORS:
        torch_object: Any = torch
        for part in name.split(".")[1:] if name.startswith("torch.") else ():
            torch_object = getattr(torch_object, part, None)
        if torch_object is not torch and torch_object is not None:
            names.setdefault(id(torch_object), name)
    return names


# --- The definition of a call ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DefinedOutput:
    """A result of an operator as index algebra.

    Attributes:
        index: the names of its indices.
        term: its element there.
        written: the argument that it is written to; None for a result.
        names: the names of its dimensions, if they have any.
    """

    shape: tuple[Poly, ...]
    index: tuple[str, ...]
    term: Term
    written: str | None = None
    names: Layout = ()


@dataclasses.dataclass(frozen=True)
class Definition:
    """An operator call as index algebra, and what it returns for the real arguments."""

    call: SymbolicCall
    outputs: tuple[DefinedOutput, ...]
    tensors: Mapping[str, torch.Tensor]
    results: list[torch.Tensor]


def define(
    call: OperatorCall,
    symbolic: Iterable[tuple[Place, int | None]] = (),
    assumed: Sequence[str] | None = None,
) -> Definition:
    """The definition of a call.

    Args:
        symbolic: the numbers that are lengths, by place and item.
        assumed: what to take for granted about values; by default, what holds for those given.

    Raises:
        OutsideTheoryError: there is none, or it does not cover this call.
    """
    key = full_name(call.name or call.function)
    operator = operator_called(key)
    if operator is None:
        key = full_name(call.function)
        operator = operator_called(key)
    bound = bind(operator.parameters, call.args, call.kwargs) if operator else None
    if bound is None or operator is None:
        raise OutsideTheoryError(f"no definition of {call.name or key}")
    named = dataclasses.replace(call, name=key)
    symbolic_call = SymbolicCall(named, bound, symbolic, assumed)
    results, changed = run_quietly(named)
    outputs = symbolic_outputs(operator, symbolic_call)
    for name in changed - symbolic_call.writes.keys():
        raise OutsideTheoryError(f"an operator that writes to its argument {name}")
    symbolic_call.keep_unused_lengths()
    tensors = tensors_by_name(call)
    read = {name for output in outputs for name in _tensors_read(output.term)}
    for name in tensors.keys() - read - symbolic_call.without_values:
        raise OutsideTheoryError(f"a call of {key} with argument {name}, which it does not read")
    return Definition(symbolic_call, outputs, tensors, results)


def symbolic_outputs(operator: DefinedOperator, call: SymbolicCall) -> tuple[DefinedOutput, ...]:
    """What an operator computes, and what it writes to its arguments.

    Raises:
        OutsideTheoryError: its definition does not cover this call.
    """
    try:
        defined = operator.define(call)
        arrays = [defined] if isinstance(defined, Array) else list(defined)
        outputs = [_output(array, None) for array in arrays]
        outputs += [_output(array, name) for name, array in call.writes.items()]
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        StopIteration,
        TypeError,
        ValueError,
    ) as error:
        raise OutsideTheoryError(
            f"a call of {call.call.name} that its definition does not cover: "
            f"{in_one_line(error, 80)}"
        ) from error
    return tuple(outputs)


def _tensors_read(term: Any) -> Iterable[str]:
    if isinstance(term, tuple):
        if term[:1] == ("read",):
            yield term[1]
        for part in term:
            yield from _tensors_read(part)


def _output(array: Array, written: str | None) -> DefinedOutput:
    index = tuple(f"%o{at}" for at in range(array.dim))
    term = array[tuple(map(symbol, index))]
    return DefinedOutput(array.shape, index, term, written, array.names)


def run_quietly(call: OperatorCall) -> tuple[list[torch.Tensor], set[str]]:
    """The results of the call, and the names of arguments that it writes to.

    The arguments themselves and the random numbers stay as they are.
    """
    copied = call.map_tensors(lambda tensor: tensor.detach().clone())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(call.seed)
        results = flat(call.function(*copied.args, **copied.kwargs))
    tensors = tensors_by_name(copied)
    return results, {name for name, tensor in tensors.items() if tensor._version}  # noqa: SLF001


def tensors_by_name(call: OperatorCall) -> dict[str, torch.Tensor]:
    """The tensor arguments by the names that terms have for them: `0`, `bias`, `0[1]`."""
    named_tensors: dict[str, torch.Tensor] = {}
    for argument_key, value in (*enumerate(call.args), *call.kwargs.items()):
        if isinstance(value, torch.Tensor):
            named_tensors[str(argument_key)] = value
        elif isinstance(value, list | tuple):
            named_tensors |= {
                f"{argument_key}[{at}]": item
                for at, item in enumerate(value)
                if isinstance(item, torch.Tensor)
            }
    return named_tensors
