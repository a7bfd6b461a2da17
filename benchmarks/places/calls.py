"""A call of an operator, whichever way a graph writes it down, and a fault in such a call."""

# ruff: noqa: TID251, SLF001  (a graph of aten operators is made of private ones)

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.places.words import split
from torch import Tensor

# Other spellings of the same operator with the same leading arguments.
_SAME = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "truediv": "div",
    "true_divide": "div",
    "subtract": "sub",
    "multiply": "mul",
    "concat": "cat",
    "concatenate": "cat",
    "_scaled_dot_product_flash_attention_for_cpu": "flash_attention",
    "_native_batch_norm_legit_no_training": "batch_norm_from_statistics",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "negative": "neg",
}


class DoesNotFitError(Exception):
    """The fault cannot be planted in this call."""


def fits(condition: Any) -> None:
    """Go on only if a fault can be planted here."""
    if not condition:
        raise DoesNotFitError


def operator_of(target: Any) -> str:
    """The name of an operator without its namespace, overload and leading underscores."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.partition("::")[2]
    else:
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return _SAME.get(name, name)


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator and its arguments.

    Attributes:
        name: of the operator, as `operator_of` says it.
        function: what to call.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call of a node; a method is called on its first argument."""
        if not isinstance(target, str):
            return cls(operator_of(target), target, tuple(args), dict(kwargs))

        def method(receiver: Any, *given: Any, **named: Any) -> Any:
            return getattr(receiver, target)(*given, **named)

        return cls(operator_of(target), method, tuple(args), dict(kwargs))

    def run(self) -> Any:
        """What the operator gives."""
        return self.function(*self.args, **self.kwargs)

    def get(self, place: int, *keys: str, default: Any = None) -> Any:
        """An argument by position or by one of its names."""
        if place < len(self.args):
            return self.args[place]
        return next((self.kwargs[key] for key in keys if key in self.kwargs), default)

    def put(self, place: int, value: Any, *keys: str) -> Call:
        """The call with another argument."""
        if place < len(self.args):
            changed = [*self.args]
            changed[place] = value
            return dataclasses.replace(self, args=tuple(changed))
        if place == len(self.args) and not any(key in self.kwargs for key in keys):
            if keys and not isinstance(self.function, torch._ops.OpOverload):
                return dataclasses.replace(self, kwargs={**self.kwargs, keys[0]: value})
            return dataclasses.replace(self, args=(*self.args, value))
        known = next((key for key in keys if key in self.kwargs), keys[0])
        return dataclasses.replace(self, kwargs={**self.kwargs, known: value})

    def tensor(self, place: int, *keys: str) -> Tensor:
        """A floating-point tensor among the arguments."""
        value = self.get(place, *keys)
        fits(isinstance(value, Tensor) and value.is_floating_point())
        return value

    def result(self) -> Tensor:
        """The first result, if it is a floating-point tensor."""
        value = first(self.run())
        fits(isinstance(value, Tensor) and value.is_floating_point())
        return value

    def instead(self, value: Tensor) -> Any:
        """All results, with another first one of the same layout."""
        right = self.run()
        kept = first(right)
        fits(isinstance(kept, Tensor) and value.shape == kept.shape)
        value = _laid_out_as(kept, value.to(kept.dtype))
        return value if isinstance(right, Tensor) else (value, *right[1:])


def _laid_out_as(kept: Tensor, value: Tensor) -> Tensor:
    """The value with the strides of another: later views depend on them."""
    if value.stride() == kept.stride() or 0 in kept.stride():
        return value
    empty = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device=kept.device)
    return empty.copy_(value)


def with_gradient_of(smooth: Tensor, value: Tensor) -> Tensor:
    """A value that has no derivative, such as a rounded one, with the gradient of another."""
    return smooth + (value - smooth).detach()


def first(value: Any) -> Any:
    """The value, or the first of several."""
    return value[0] if isinstance(value, list | tuple) and value else value


@dataclasses.dataclass(frozen=True)
class Fault:
    """A mistake that somebody could make in an operator.

    Attributes:
        name: what is wrong.
        operators: where it can be planted.
        wrong: what is computed instead; raises if the fault does not fit the call.
        kinds: the kinds of `PatternKind` that name it; empty if there is no word for it, so that
            every kind that is stated is wrong.
        loose: kinds that are true and say less; they count neither as right nor as wrong.
        backward: only in backward graphs (True), or only in forward ones (False).
    """

    name: str
    operators: frozenset[str]
    wrong: Callable[[Call], Any]
    kinds: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    backward: bool | None = None


Wrong = Callable[[Call], Any]
Decorator = Callable[[Wrong], Wrong]


class Catalogue(dict[str, Fault]):
    """Faults by name; those of a catalogue with `backward` are all in backward graphs, or none."""

    def __init__(self, *, backward: bool | None = None) -> None:
        super().__init__()
        self.is_backward = backward

    def add(
        self,
        name: str,
        operators: str,
        words: str,
        wrong: Callable[[Call], Any],
        *,
        backward: bool | None = None,
    ) -> None:
        """Add a fault of some operators, separated by blanks; its words are as in `words.py`."""
        kinds, loose = split(words)
        where = frozenset(operators.split())
        backward = self.is_backward if backward is None else backward
        self[name] = Fault(name, where, wrong, kinds or frozenset(), loose, backward)

    def fault(self, operators: str, words: str, *, backward: bool | None = None) -> Decorator:
        """Add the decorated function, which computes the wrong result of a call."""

        def add(wrong: Wrong) -> Wrong:
            name = wrong.__name__.replace("_", " ")
            self.add(name, operators, words, wrong, backward=backward)
            return wrong

        return add

    def forward(self, operators: str, words: str) -> Decorator:
        """A fault of forward graphs only."""
        return self.fault(operators, words, backward=False)

    def backward(self, operators: str, words: str) -> Decorator:
        """A fault of backward graphs only."""
        return self.fault(operators, words, backward=True)


def try_fault(fault: Fault, call: Call, *, backward: bool) -> Any:
    """The wrong result of a call; None if the fault does not fit or changes nothing.

    The results have the shapes and dtypes of the right ones: another shape needs no verifier.
    """
    if call.name not in fault.operators or fault.backward not in {None, backward}:
        return None
    try:
        right, wrong = call.run(), fault.wrong(call)
    except Exception:  # noqa: BLE001  (whatever a fault cannot cope with is no place for it)
        return None
    return wrong if is_changed(right, wrong) else None


def is_changed(right: Any, wrong: Any) -> bool:
    """Whether results have the form of the right ones and differ by more than rounding."""
    if len(_tensors(right)) != len(_tensors(wrong)):
        return False
    pairs = list(zip(_tensors(right), _tensors(wrong), strict=True))
    if any(a.shape != b.shape or a.dtype != b.dtype or not a.numel() for a, b in pairs):
        return False
    return not all(_is_rounding(a, b) for a, b in pairs)


# Of the largest value: what a right way of writing the same may differ by.
_ROUNDING = 3e-6


def _is_rounding(right: Tensor, wrong: Tensor) -> bool:
    if torch.equal(right, wrong):
        return True
    if not right.is_floating_point():
        return False
    a, b = right.double(), wrong.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf)
    largest = torch.where(a.isfinite(), a.abs(), 0.0).max()
    return bool(difference.max() <= _ROUNDING * largest)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [one for part in value for one in _tensors(part)]
    return []


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of generated code, or of a source line.

    Attributes:
        changes: regular expressions and what replaces them; the first that matches is used.
        kinds: the kinds that name it; None if they depend on the place.
        loose: kinds that are true and say less.
        operators: for kernels: the operators whose code it changes.
        constant: for kernels: a number among the arguments of these operators.
    """

    changes: tuple[tuple[str, str], ...]
    kinds: frozenset[str] | None = frozenset()
    loose: frozenset[str] = frozenset()
    operators: frozenset[str] = frozenset()
    constant: float | None = None

    def apply(self, text: str, count: int = 1) -> str:
        """The edited text; the same if nothing matches."""
        for pattern, replacement in self.changes:
            edited = re.sub(pattern, replacement, text, count=count)
            if edited != text:
                return edited
        return text

    def apply_everywhere(self, text: str) -> str:
        """All patterns, wherever they match."""
        for pattern, replacement in self.changes:
            text = re.sub(pattern, replacement, text)
        return text


def edit(
    *changes: tuple[str, str],
    words: str | None = "",
    operators: str = "",
    constant: float | None = None,
) -> Edit:
    """An edit, with its words as they are written; None if they depend on the place."""
    kinds, loose = split(words)
    return Edit(changes, kinds, loose, frozenset(operators.split()), constant)
