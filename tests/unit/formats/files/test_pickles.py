"""Following a pickle without doing what it says."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest

from paritas.core.errors import UsageError
from paritas.formats.files.torch_files import Call, Name, follow, leaves, plain_text

PLAIN: list[Any] = [
    None, True, 0, 255, 65_535, -1, 2**40, -(2**70), 1.5, float("inf"), "text", "ü" * 300, b"raw",
    [], [1, [2, (3,)]], (), (1, 2), (1, 2, 3, 4), {}, {"a": {"b": [1]}, 2: "x", None: 0},
]  # fmt: skip


@pytest.mark.parametrize("version", [2, 3, 4, 5])
@pytest.mark.parametrize("given", PLAIN, ids=repr)
def test_containers_numbers_and_text_come_out_as_they_went_in(given: Any, version: int) -> None:
    if isinstance(given, bytes) and version < 3:
        pytest.skip("this version writes bytes as a call")
    data = pickle.dumps(given, version)
    assert follow(data) == (given, len(data))


@pytest.mark.parametrize("version", [2, 4])
def test_an_ordered_dict_comes_out_as_a_dict(version: int) -> None:
    given = collections.OrderedDict([("b", 1), ("a", [2])])
    assert follow(pickle.dumps(given, version))[0] == {"b": 1, "a": [2]}


@pytest.mark.parametrize("version", [2, 4])
def test_what_would_be_called_is_described(version: int) -> None:
    found, _ = follow(pickle.dumps({"x": complex(1, 2)}, version))
    made = found["x"]
    assert isinstance(made, Call)
    assert isinstance(made.what, Name)
    assert made.what.path.rpartition(".")[2] == "complex"
    assert made.arguments == (1.0, 2.0)


def test_the_state_of_an_object_is_kept() -> None:
    found, _ = follow(pickle.dumps(Exception("told")))
    assert isinstance(found, Call)
    assert found.arguments == ("told",)


def test_the_pickle_may_begin_anywhere() -> None:
    first, second = pickle.dumps([1], 2), pickle.dumps("x", 2)
    data = first + second
    assert follow(data, len(first)) == ("x", len(data))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "ends 1 bytes too early"),
        (b"\x80\x02", "too early"),
        (b"\x80\x09.", "version 9"),
        (b".", "pops from an empty stack"),
        (b"t.", "was never begun"),
        (b"h\x05.", "reads memo 5"),
        (b"X\xff\xff\xff\x7fabc.", "too early"),
        (b"\x8d" + b"\xff" * 8 + b".", "too early"),
        (b"\x8b\xff\xff\xff\x7f.", "integer of 2147483647 bytes"),
        (b"}(K\x01u.", "key without a value"),
        (b"K\x01K\x02a.", "into a int"),
        (b"P0\n.", "unknown instruction 0x50"),
    ],
)
def test_a_damaged_pickle_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        follow(data)


def test_a_key_of_many_storeys_is_not_hashed() -> None:
    data = b"})" + b"\x85" * 200_000 + b"K\x01s."
    found, _ = follow(data)
    assert list(found) == ["<tuple 1>"]


def test_a_container_in_itself_does_not_go_on_for_ever() -> None:
    itself, _ = follow(b"]q\x00h\x00a.")
    with pytest.raises(UsageError, match="deeper than 64 containers"):
        list(leaves(itself, 1000))


def test_parts_that_share_parts_are_not_multiplied_without_bound() -> None:
    shared: list[Any] = []
    for _ in range(40):
        shared = [shared, shared]
    data = pickle.dumps(shared, 2)
    tree, _ = follow(data)
    with pytest.raises(UsageError, match="too many for its size"):
        list(leaves(tree, len(data)))


def test_leaves_come_in_order_with_the_way_to_them() -> None:
    tree = {"b": [1, (2,)], 3: "x"}
    assert list(leaves(tree, 100)) == [(("b", "0"), 1), (("b", "1", "0"), 2), (("3",), "x")]


def test_only_plain_things_have_a_text() -> None:
    assert plain_text("a") == "'a'"
    assert plain_text(Name("torch.float16")) == "torch.float16"
    assert plain_text(Call(Name("f"), ())) is None
