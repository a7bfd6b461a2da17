"""Arguments of a block that the two sides pass in different forms, such as None and a full mask.

What a block gets is no result of the model. Each side's block is called with the arguments that its
own side passes, and what the two blocks make of them is compared.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.numerics.bits import dtype_name
from paritas.core.numerics.contents import same_leaf
from paritas.core.numerics.flattening import flatten_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# A position or a keyword.
ArgumentKey = int | str
# The keyword by which both sides' calls take them; the reference drops it.
OTHERS = "arguments_of_the_candidate"


@dataclasses.dataclass(frozen=True)
class OtherArguments:
    """The arguments that a candidate passes to a block in another form than the reference.

    Attributes:
        replaced: key in the reference's call, or a new keyword -> the candidate's value.
        dropped: the keywords that only the reference passes.
        described: key in the reference's call, or a new keyword -> both values in words.
        renamed: key in the candidate's call -> key in the reference's, or a new keyword.
    """

    replaced: dict[ArgumentKey, Any]
    dropped: tuple[str, ...]
    described: dict[ArgumentKey, str]
    renamed: dict[ArgumentKey, ArgumentKey]

    def as_argument(self) -> dict[str, Any]:
        """The argument by which the blocks of `take_both_arguments` take them."""
        return {OTHERS: {"replaced": self.replaced, "dropped": list(self.dropped)}}


def find_other_arguments(
    block: nn.Module,
    reference: tuple[list[Any], dict[str, Any]],
    candidate: tuple[list[Any], dict[str, Any]],
) -> OtherArguments | None:
    """What the candidate passes to a block in another form; None if all has the same form.

    Two tensors of one shape and dtype have the same form, and so have equal values of other types.
    An argument that one side passes by position and the other by keyword is one argument.
    """
    keys, values = _name_arguments(block, *reference)
    other_keys, others = _name_arguments(block, *candidate)
    replaced: dict[ArgumentKey, Any] = {}
    described: dict[ArgumentKey, str] = {}
    renamed: dict[ArgumentKey, ArgumentKey] = {}
    for name, value in others.items():
        key = keys.get(name, name)
        renamed |= {other_keys[name]: key} if key != other_keys[name] else {}
        if name in values and _have_same_form(values[name], value):
            continue
        replaced[key] = value
        was = _describe_value(values[name]) if name in values else "nothing"
        described[key] = f"the reference passes {was}, the candidate {_describe_value(value)}"
    dropped = [name for name in values if name not in others]
    described |= {
        keys[name]: f"the reference passes {_describe_value(values[name])}, the candidate nothing"
        for name in dropped
    }
    if any(isinstance(keys[name], int) for name in dropped):
        return None  # without it, the arguments after it would move
    if any(isinstance(key, str) and not key.isidentifier() for key in replaced):
        return None  # one more of `*args`
    if not described and not renamed:
        return None
    return OtherArguments(replaced, tuple(dropped), described, renamed)


def _name_arguments(
    block: nn.Module, args: list[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, ArgumentKey], dict[str, Any]]:
    """Name of an argument -> its key in the call, and -> its value."""
    try:
        parameters = list(inspect.signature(block.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    positional = [parameter.name for parameter in parameters if parameter.kind in by_position]
    names = [*positional, *(f"argument {place}" for place in range(len(positional), len(args)))]
    keys: dict[str, ArgumentKey] = {name: place for place, name in enumerate(names[: len(args)])}
    keys |= {name: name for name in kwargs if name not in keys}
    return keys, dict(zip(names, args, strict=False)) | dict(kwargs)


def _have_same_form(left: Any, right: Any) -> bool:
    first, second = flatten_value(left), flatten_value(right)
    families = [
        {path: kind.family for path, kind in side.kinds.items()} for side in (first, second)
    ]
    if families[0] != families[1] or first.leaves.keys() != second.leaves.keys():
        return False
    return all(_are_alike(leaf, second.leaves[path]) for path, leaf in first.leaves.items())


def _are_alike(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and left.dtype is right.dtype
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return False
    return same_leaf(left, right) is not False  # what nobody can compare is not another form


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {dtype_name(value.dtype)}{list(value.shape)}"
    is_short = value is None or isinstance(value, bool | int | float | str)
    return f"{value!r:.40}" if is_short else f"a {type(value).__name__}"


# --- Blocks that take both sides' arguments -------------------------------------------------------


class _ForReference:
    """A block that leaves out what only the candidate passes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop(OTHERS)
        call: Any = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs)


class _ForCandidate:
    """A block that takes what the candidate passes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        others = kwargs.pop(OTHERS)
        replaced, dropped = others["replaced"], others["dropped"]
        args = tuple(replaced.get(place, value) for place, value in enumerate(args))
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        kwargs.update({key: value for key, value in replaced.items() if isinstance(key, str)})
        call: Any = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs)


def take_both_arguments(reference: nn.Module, candidate: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The blocks of both sides, as modules that take one call with the arguments of both."""
    return _view_as(_ForReference, reference), _view_as(_ForCandidate, candidate)


def _view_as(taking: Any, block: nn.Module) -> nn.Module:
    """The same module, with the same names of parameters, called in another way."""
    block_class: Any = type(block)
    view: nn.Module = object.__new__(_view_class(taking, block_class))
    object.__setattr__(view, "__dict__", vars(block))
    return view


@functools.cache
def _view_class(taking: Any, block_class: Any) -> Any:
    # One class for all blocks of a class: compiled code depends on it.
    return type(f"{block_class.__name__}{taking.__name__}", (taking, block_class), {})
