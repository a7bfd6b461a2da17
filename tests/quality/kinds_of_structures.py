"""Results that are no tensor, or hold several: wrong ones beside right ones, each by its name."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import functools
import pathlib
import re
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Structure:
    """What a program returns of a float tensor of shape (4,).

    Attributes:
        reference: makes it.
        twins: the same, made anew.
        wrong: something else, which must not pass.
        unverified: nobody can say, which must not pass either, nor be called different.
    """

    reference: Callable[[Tensor], Any]
    twins: dict[str, Callable[[Tensor], Any]] = dataclasses.field(default_factory=dict)
    wrong: dict[str, Callable[[Tensor], Any]] = dataclasses.field(default_factory=dict)
    unverified: dict[str, Callable[[Tensor], Any]] = dataclasses.field(default_factory=dict)


def example() -> Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(0))


def rounded(x: Tensor) -> Tensor:
    """The same function, rounded otherwise."""
    return (x * 3 + x * 4) / 7


class Yes:
    """An object that says yes to every comparison."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Elementwise(Yes):
    """One whose `==` gives a tensor."""

    def __eq__(self, other: object) -> Any:
        return self.value == getattr(other, "value", None)

    __hash__ = None  # type: ignore[assignment]


class Refusing(Yes):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class Identity:
    """One with the `==` of every object."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    __slots__ = ("other", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Private:
    """With a lock for itself, and what it holds behind a property."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._lock = threading.Lock()
        self._me = weakref.ref(self)

    @property
    def value(self) -> Any:
        return self._value


class YesDict(dict):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class YesList(list):  # type: ignore[type-arg]
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(eq=False)
class Out:
    logits: Any
    loss: Any = None


@dataclasses.dataclass(eq=False)
class Renamed:
    scores: Any
    loss: Any = None


@dataclasses.dataclass
class Uncompared:
    logits: Any = dataclasses.field(compare=False)


class Pair(NamedTuple):
    first: Any
    second: Any


class OtherPair(NamedTuple):
    first: Any
    last: Any


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]
    """The ways of Hugging Face's: items that are attributes too, without those that are None."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({name: value for name, value in fields.items() if value is not None})
        for name, value in fields.items():
            object.__setattr__(self, name, value)


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Other(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Metres(float):
    pass


class Tagged(torch.Tensor):
    """A subclass with an attribute, as torchvision's boxes have."""


def tagged(x: Tensor, tag: str) -> Tensor:
    one = x.as_subclass(Tagged)
    one.tag = tag  # type: ignore[attr-defined]
    return one


def _loop(x: Tensor) -> Any:
    one = Identity(x * 2)
    one.itself = one  # type: ignore[attr-defined]
    return one


def _holder(kind: Callable[[Any], Any]) -> Structure:
    return Structure(
        lambda x: kind(x * 2),
        {"same": lambda x: kind(x * 2), "rounded": lambda x: kind(rounded(x) * 2)},
        {
            "other value": lambda x: kind(x * 2.002),
            "other class": lambda x: types.SimpleNamespace(value=x * 2),
            "its value": lambda x: x * 2,
            "nothing": lambda x: kind(None),
            "a NaN": lambda x: kind(x * torch.tensor([2, 2, 2, torch.nan])),
        },
    )


def _values(right: Any, *wrong: Any, twins: tuple[Any, ...] = ()) -> Structure:
    """A value beside a tensor."""
    return Structure(
        lambda x: (x * 2, right),
        {"same": lambda x: (x * 2, right)}
        | {f"{value!r}": lambda x, value=value: (x * 2, value) for value in twins},
        {f"{type(v).__name__} {v!r}": lambda x, v=v: (x * 2, v) for v in wrong},
    )


def _opaque(make: Callable[[], Any]) -> Structure:
    return Structure(lambda x: (x, make()), unverified={"another": lambda x: (x, make())})


STRUCTURES: dict[str, Structure] = {
    "dict": Structure(
        lambda x: {"a": x * 2, "b": x + 1},
        {
            "other order": lambda x: {"b": x + 1, "a": x * 2},
            "ordered": lambda x: collections.OrderedDict(a=x * 2, b=x + 1),
            "model output": lambda x: ModelOutput(a=x * 2, b=x + 1, c=None),
        },
        {
            "renamed": lambda x: {"c": x * 2, "d": x + 1},
            "one renamed": lambda x: {"a": x * 2, "c": x + 1},
            "swapped": lambda x: {"b": x * 2, "a": x + 1},
            "tuple": lambda x: (x * 2, x + 1),
            "list": lambda x: [x * 2, x + 1],
            "dataclass": lambda x: types.SimpleNamespace(a=x * 2, b=x + 1),
            "fewer": lambda x: {"a": x * 2},
            "more": lambda x: {"a": x * 2, "b": x + 1, "c": x},
            "more, empty": lambda x: {"a": x * 2, "b": x + 1, "c": []},
            "other class of key": lambda x: {b"a": x * 2, b"b": x + 1},
        },
    ),
    "integer keys": Structure(
        lambda x: {0: x * 2, 1: x + 1},
        {"same": lambda x: {1: x + 1, 0: x * 2}},
        {
            "booleans": lambda x: {False: x * 2, True: x + 1},
            "floats": lambda x: {0.0: x * 2, 1.0: x + 1},
            "strings": lambda x: {"0": x * 2, "1": x + 1},
            "list": lambda x: [x * 2, x + 1],
        },
    ),
    "object keys": Structure(
        lambda x: {Slots(1): x * 2},
        {"same": lambda x: {Slots(1): x * 2}},
        {"other": lambda x: {Slots(2): x * 2}, "other value": lambda x: {Slots(1): x * 3}},
    ),
    "tuple": Structure(
        lambda x: (x * 2, x + 1),
        {"list": lambda x: [x * 2, x + 1], "deque": lambda x: collections.deque([x * 2, x + 1])},
        {
            "swapped": lambda x: (x + 1, x * 2),
            "dict": lambda x: {"a": x * 2, "b": x + 1},
            "fewer": lambda x: (x * 2,),
            "nested": lambda x: ((x * 2, x + 1),),
            "named": lambda x: Pair(x * 2, x + 1),
            "stacked": lambda x: torch.stack([x * 2, x + 1]),
        },
    ),
    "one tensor": Structure(
        lambda x: x * 2,
        {},
        {
            "in a list": lambda x: [x * 2],
            "in a dict": lambda x: {"out": x * 2},
            "as an array": lambda x: (x * 2).numpy(),
            "as a list of numbers": lambda x: (x * 2).tolist(),
        },
    ),
    "scalar tensor": Structure(
        lambda x: x.double().sum(), {}, {"a float": lambda x: x.double().sum().item()}
    ),
    "named tuple": Structure(
        lambda x: Pair(x * 2, x + 1),
        {"same": lambda x: Pair(x * 2, x + 1)},
        {
            "renamed": lambda x: OtherPair(x * 2, x + 1),
            "tuple": lambda x: (x * 2, x + 1),
            "swapped": lambda x: Pair(x + 1, x * 2),
        },
    ),
    "dataclass": Structure(
        lambda x: Out(x * 2, 1.5),
        {"same": lambda x: Out(x * 2, 1.5)},
        {
            "renamed": lambda x: Renamed(x * 2, 1.5),
            "dict": lambda x: {"logits": x * 2, "loss": 1.5},
            "tuple": lambda x: (x * 2, 1.5),
            "other value": lambda x: Out(x * 2, 1.6),
            "None": lambda x: Out(x * 2, None),
        },
    ),
    "model output": Structure(
        lambda x: ModelOutput(logits=x * 2, cache=None),
        {
            "same": lambda x: ModelOutput(logits=x * 2, cache=None),
            "dict": lambda x: {"logits": x * 2},
        },
        {
            "renamed": lambda x: ModelOutput(scores=x * 2, cache=None),
            "tuple": lambda x: (x * 2,),
            "more": lambda x: ModelOutput(logits=x * 2, cache=x),
        },
    ),
    "empty": Structure(
        lambda x: (x, []),
        {"tuple": lambda x: (x, ())},
        {"dict": lambda x: (x, {}), "None": lambda x: (x, None), "missing": lambda x: (x,)},
    ),
    "yes": _holder(Yes),
    "elementwise": _holder(Elementwise),
    "refusing": _holder(Refusing),
    "identity": _holder(Identity),
    "slots": _holder(Slots),
    "private": _holder(Private),
    "uncompared": Structure(
        lambda x: Uncompared(x * 2),
        {"same": lambda x: Uncompared(x * 2)},
        {"other": lambda x: Uncompared(x * 3)},
    ),
    "loop": Structure(
        _loop, {"same": _loop}, {"straight": lambda x: types.SimpleNamespace(value=x * 2)}
    ),
    "yes to dicts": Structure(
        lambda x: YesDict(a=x * 2),
        {"same": lambda x: YesDict(a=x * 2)},
        {"other": lambda x: YesDict(a=x * 3), "renamed": lambda x: YesDict(b=x * 2)},
    ),
    "yes to lists": Structure(
        lambda x: YesList([x * 2]),
        {"same": lambda x: YesList([x * 2])},
        {"other": lambda x: YesList([x * 3]), "longer": lambda x: YesList([x * 2, x])},
    ),
    "tagged": Structure(
        lambda x: tagged(x * 2, "xyxy"),
        {"same": lambda x: tagged(x * 2, "xyxy")},
        {"other tag": lambda x: tagged(x * 2, "xywh"), "other": lambda x: tagged(x * 3, "xyxy")},
    ),
    "array": Structure(
        lambda x: (x * 2).numpy(),
        {"same": lambda x: (x * 2).numpy(), "rounded": lambda x: (rounded(x) * 2).numpy()},
        {
            "other": lambda x: (x * 2.002).numpy(),
            "tensor": lambda x: x * 2,
            "other dtype": lambda x: (x * 2).numpy().astype("float64"),
            "other shape": lambda x: (x * 2).numpy()[None],
            "objects": lambda x: (x * 2).numpy().astype(object),
        },
    ),
    "array of strings": _values(np.array(["a", "b"]), np.array(["a", "c"]), np.array([b"a", b"b"])),
    "array of objects": Structure(
        lambda x: np.array([Yes(1), x * 2], dtype=object),
        {"same": lambda x: np.array([Yes(1), x * 2], dtype=object)},
        {"other": lambda x: np.array([Yes(2), x * 2], dtype=object)},
    ),
    "masked array": Structure(
        lambda x: np.ma.MaskedArray(x.numpy(), x.numpy() > 0),
        {"other below": lambda x: np.ma.MaskedArray(np.where(x > 0, 7, x), x.numpy() > 0)},
        {"other mask": lambda x: np.ma.MaskedArray(x.numpy(), x.numpy() > 1)},
    ),
    "numpy scalar": _values(
        np.float32(1.5), np.float32(1.6), 1.5, np.float64(1.5), torch.tensor(1.5)
    ),
    "int": _values(1, True, 1.0, "1", 2, None, np.int64(1), Number.ONE, torch.tensor(1), 1 + 0j),
    "bool": _values(True, 1, False, "True", np.bool_(True), torch.tensor(True)),
    "float": _values(1.5, 1.50001, "1.5", np.float64(1.5), Metres(1.5), torch.tensor(1.5)),
    "nan": _values(float("nan"), 0.0, None, twins=(float("nan"),)),
    "own float": _values(Metres(1.5), 1.5, Metres(1.6), twins=(Metres(1.5),)),
    "string": _values("a", "b", b"a", None, ["a"], ("a",)),
    "none": _values(None, False, 0, "", [], ...),
    "enum": _values(Colour.RED, Colour.GREEN, Other.RED, 1, "RED"),
    "set": _values(
        {1, 2}, {1, 3}, {1, 2, 3}, {True, 2}, frozenset({1, 2}), [1, 2], twins=({2, 1},)
    ),
    "range": _values(range(3), range(4), [0, 1, 2], twins=(range(3),)),
    "slice": _values(slice(1, 2), slice(1, 3), slice(1, 2, 1), (1, 2), twins=(slice(1, 2),)),
    "size": _values(torch.Size([2, 3]), torch.Size([3, 2]), {0: 2, 1: 3}, twins=((2, 3),)),
    "dtype": _values(torch.float32, torch.float64, "torch.float32", torch.device("cpu")),
    "device": _values(torch.device("cpu"), torch.device("meta"), "cpu"),
    "date": _values(dt.date(2020, 1, 1), dt.date(2020, 1, 2), twins=(dt.date(2020, 1, 1),)),
    "decimal": _values(decimal.Decimal("1.5"), decimal.Decimal("1.6"), 1.5),
    "fraction": _values(fractions.Fraction(1, 2), fractions.Fraction(1, 3), 0.5),
    "path": _values(pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b"), "a"),
    "pattern": _values(re.compile("a"), re.compile("b"), twins=(re.compile("a"),)),
    "bytes": _values(bytearray(b"a"), bytearray(b"b"), b"a", twins=(bytearray(b"a"),)),
    "array.array": _values(array.array("i", [1]), array.array("i", [2]), [1]),
    "function": Structure(
        lambda x: (x, len), {"same": lambda x: (x, len)}, unverified={"other": lambda x: (x, min)}
    ),
    "partial": _values(
        functools.partial(min, 1), functools.partial(min, 2), twins=(functools.partial(min, 1),)
    ),
    "error": _values(ValueError("a"), ValueError("b"), KeyError("a"), twins=(ValueError("a"),)),
    "generator": _opaque(lambda: (i for i in range(3))),
    "lambda": _opaque(lambda: lambda: 1),
    "lock": _opaque(threading.Lock),
    "iterator": _opaque(lambda: iter([1])),
    "set of objects": _opaque(lambda: {Slots(1)}),
    "object": _opaque(object),
    "weak reference": _opaque(lambda: weakref.ref(Colour)),
    "thread": _opaque(threading.Thread),
}
