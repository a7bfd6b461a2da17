from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import functools
import math
import re
import threading
import types
import weakref
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from paritas.core.numerics.contents import Opaque, contents, same_leaf, walk


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0

    @functools.cached_property
    def length(self):
        return math.hypot(self.x, self.y)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    y: Any = 0


class Plain:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a


class Hostile(dict):
    """All it overrides would tell us something else, or nothing."""

    def _refuse(self, *_):
        raise AssertionError("called")

    items = keys = values = get = __iter__ = __len__ = __getitem__ = __eq__ = _refuse
    __getattr__ = __repr__ = __copy__ = __deepcopy__ = __reduce_ex__ = __bool__ = _refuse
    __hash__ = None


class Secret:
    def __getattribute__(self, name):
        raise AssertionError(name)


class Colour(enum.Enum):
    RED = 1


class Metres(float):
    pass


T = TypeVar("T")


class Box(Generic[T]):
    def __init__(self, content):
        self.content = content


def hostile():
    value = Hostile(a=1)
    object.__setattr__(value, "note", "x")
    return value


def secret():
    value = object.__new__(Secret)
    vars(Secret)["__dict__"].__get__(value)["a"] = 1
    return value


TRIED = [
    ({"a": 1, 2: [3, None]}, {"['a']": 1, "[2][0]": 3, "[2][1]": None}),
    ({Colour.RED: 1, torch.float32: 2}, {"[Colour.RED]": 1, "[torch.float32]": 2}),
    ({Slots(5): 1}, {"[0][0].a": 5, "[0][1]": 1}),
    (types.MappingProxyType({"a": 1}), {"['a']": 1}),
    (collections.deque([1, 2]), {"[0]": 1, "[1]": 2}),
    (Pair(1, (2,)), {".left": 1, ".right[0]": 2}),
    (Point(1), {".x": 1, ".y": 0}),
    (FrozenSlots(1), {".x": 1, ".y": 0}),
    (types.SimpleNamespace(a=1), {".a": 1}),
    (Plain(a=1, _b=[2]), {".a": 1, "._b[0]": 2}),
    (Slots(1), {".a": 1}),
    (Box(3), {".content": 3}),
    (collections.UserDict(a=1), {".data['a']": 1}),
    (slice(1, None, 2), {".start": 1, ".stop": None, ".step": 2}),
    (ValueError("no", 1), {".args[0]": "no", ".args[1]": 1}),
    (Metres(2.5), {".value": 2.5}),
    (np.array([1, "a"], dtype=object), {".shape[0]": 2, ".flat[0]": 1, ".flat[1]": "a"}),
    (torch.Size([2, 3]), {"[0]": 2, "[1]": 3}),
    (hostile(), {"['a']": 1, ".note": "x"}),
    (secret(), {".a": 1}),
    (Plain(a=1, _lock=threading.Lock(), _ref=weakref.ref(Plain)), {".a": 1}),
]


@pytest.mark.parametrize(("value", "expected"), TRIED, ids=[type(v).__name__ for v, _ in TRIED])
def test_everything_is_read_by_its_path_and_no_method_of_the_class_is_called(value, expected):
    assert dict(contents(value)) == expected


def test_what_is_cached_is_no_content():
    fresh, used = Point(3, 4), Point(3, 4)
    assert used.length == 5
    assert dict(contents(fresh)) == dict(contents(used))


def test_a_cycle_ends_where_it_began():
    loop = Plain(name="a")
    loop.itself = [loop]
    assert dict(contents(loop, "x")) == {"x.name": "a", "x.itself[0]": "<the object at x>"}


def test_an_endless_chain_ends():
    first = last = Plain()
    for _ in range(5000):
        last.next = Plain()
        last = last.next
    (leaf,) = dict(contents(first)).values()
    assert isinstance(leaf, Opaque)
    assert leaf.reason == "too deep to be compared"


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        (x for x in ()),
        iter([1]),
        weakref.ref(Plain),
        threading.Event(),
        {Slots(1)},
        Plain(_lock=threading.Lock()),
        Plain(a=lambda: 1),
        torch.nn.Linear(1, 1),
        object(),
        memoryview(b"a"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_read_is_opaque(value):
    (leaf,) = dict(contents(value)).values()
    assert isinstance(leaf, Opaque)


def test_kinds_say_what_may_stand_for_what():
    below = {path: parts.kind for path, _, parts in walk({"a": [(), Point(1)]}, "x") if parts}
    assert {path: (kind.name, kind.family) for path, kind in below.items()} == {
        "x": ("dict", "mapping"),
        "x['a']": ("list", "sequence"),
        "x['a'][0]": ("tuple", "sequence"),
        "x['a'][1]": ("Point", "record"),
    }
    ((_, _, plain),) = walk(Plain(), "")
    assert plain.kind.family.endswith("test_contents.Plain")


def leaf(value):
    (one,) = dict(contents(value)).values()
    return one


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1,
        lambda: True,
        lambda: "a",
        lambda: math.nan,
        lambda: Colour.RED,
        lambda: {1, "a", (2.0, None)},
        lambda: frozenset([math.inf]),
        lambda: torch.float32,
        lambda: torch.device("cpu"),
        lambda: dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        lambda: re.compile("a"),
        lambda: np.dtype("float32"),
        lambda: range(3),
        lambda: len,
        lambda: Plain,
        lambda: None,
        lambda: ...,
    ],
)
def test_equal_leaves_are_equal(make):
    assert same_leaf(leaf(make()), leaf(make())) is True


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, True),
        (1, 1.0),
        (0, False),
        (0.0, -0.0),
        ("a", b"a"),
        (None, False),
        ({1}, {True}),
        ({1}, {1, 2}),
        ({1}, frozenset({1})),
        ({(1,)}, {(1.0,)}),
        (torch.float32, torch.float64),
        (range(3), range(4)),
        (re.compile("a"), re.compile("b")),
        (Colour.RED, 1),
    ],
)
def test_leaves_of_another_class_or_value_are_not(left, right):
    assert same_leaf(leaf(left), leaf(right)) is False


@pytest.mark.parametrize("make", [threading.Lock, object, lambda: lambda: 1, lambda: {Slots(1)}])
def test_of_leaves_that_cannot_be_read_nobody_can_say(make):
    assert same_leaf(leaf(make()), leaf(make())) is None


def test_a_generator_is_not_even_equal_to_itself():
    one = (x for x in ())
    assert same_leaf(leaf(one), leaf(one)) is None


class Linked:
    """An object that knows another one, by a name of its own."""

    def __init__(self, number):
        self.number = number
        self._other = None


def test_objects_that_refer_to_each_other_in_a_circle_are_read():
    parent, child = Linked(1), Linked(2)
    parent._other, child._other = child, parent
    assert dict(contents(parent)) == {
        ".number": 1,
        "._other.number": 2,
        "._other._other": "<the object at the root>",
    }
