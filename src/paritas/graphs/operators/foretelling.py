"""What a call will give, told from shapes alone: nothing is computed, no memory is taken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from paritas._torch.quiet import quietly
from paritas.graphs.calls import TensorValue, tensor_values
from paritas.graphs.operators.values import hollow
from paritas.numerics.trees import leaves

if TYPE_CHECKING:
    from paritas.graphs.operators.resolving import Subject

__all__ = ["Foretold", "bytes_words", "foretold", "most_bytes"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_WIDEST = 16  # bytes of a complex number
# Where the two factors of a matrix product stand among the arguments.
_FACTORS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


@dataclasses.dataclass(frozen=True)
class Foretold:
    """The tensors that a call will give."""

    shapes: tuple[tuple[int, ...], ...]
    bytes: int


def foretold(subject: Subject) -> Foretold | None:
    """What the call gives; None where that depends on values, or torch cannot tell."""
    kwargs = dict(subject.kwargs)
    if not any(True for _ in tensor_values((subject.args, kwargs))):
        kwargs["device"] = torch.device("meta")  # it makes a tensor anew, where it is told to
    given = hollow(subject.args, kwargs)
    try:
        with quietly(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = subject.function(*given.args, **given.kwargs)
    except Exception:  # noqa: BLE001  (not to be told: whoever asks has another way)
        return None
    tensors = [one for _, one in leaves(made, "output") if isinstance(one, torch.Tensor)]
    shapes = tuple(tuple(one.shape) for one in tensors)
    return Foretold(shapes, sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors))


def most_bytes(subject: Subject) -> int:
    """More than the results can take, at a glance: to ask torch costs a second the first time.

    Every element of a result is made from one of each tensor; numbers can make it larger as often
    as they say. Products of matrices lose the dimension that they sum over.
    """
    first = _FACTORS.get(subject.name.rpartition(".")[2])
    if first is not None:
        left, right = (_sizes(value) for value in subject.args[first : first + 2])
        if left and right:
            rows = math.prod(left) // max(left[-1], 1)
            columns = math.prod(right) // max(min(right[-2:]), 1)
            return rows * columns * _WIDEST
    tree = (subject.args, dict(subject.kwargs))
    sizes = [math.prod(value.shape) for value in tensor_values(tree)]
    return math.prod(max(n, 1) for n in [*sizes, *numbers_in(tree)]) * _WIDEST


def _sizes(value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, TensorValue) else ()


def numbers_in(tree: Any) -> Iterator[int]:
    """The numbers among the arguments, none negative; how often to repeat, how much to pad."""
    if type(tree) is int:
        yield abs(tree)
    elif isinstance(tree, float):
        yield math.ceil(abs(tree)) if math.isfinite(tree) else 1
    elif isinstance(tree, Mapping):
        yield from numbers_in(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from numbers_in(item)


def bytes_words(count: int) -> str:
    """`1.5 GiB`."""
    size = float(count)
    for unit in _UNITS:
        if size < _STEP or unit == _UNITS[-1]:
            return f"{size:.4g} {unit}"
        size /= _STEP
    raise AssertionError(count)
