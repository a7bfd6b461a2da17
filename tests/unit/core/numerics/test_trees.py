from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from letters import LETTERS
from paritas.core.numerics.contents import children, leaves, map_leaves, replace_leaves


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Derived:
    x: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.twice = (self.x, self.x)


class ModelOutput(collections.OrderedDict):
    """The ways of Hugging Face's ModelOutput: a dataclass that is a mapping of what is not None."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                super().__setitem__(field.name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

    def update(self, *args, **kwargs):
        raise TypeError("You cannot use update on a ModelOutput")

    def __reduce__(self):
        fields = dataclasses.fields(self)
        return type(self), tuple(getattr(self, field.name) for field in fields)


@dataclasses.dataclass
class CausalOutput(ModelOutput):
    logits: Any
    loss: Any = None
    hidden: Any = None


CONTAINERS = {
    "dict": ({"a": 1, "b": 2}, ["['a']", "['b']"]),
    "int keys": ({0: 1, 10: 2}, ["[0]", "[10]"]),
    "list": ([1, 2], ["[0]", "[1]"]),
    "tuple": ((1, 2), ["[0]", "[1]"]),
    "namedtuple": (Pair(1, 2), [".left", ".right"]),
    "dataclass": (Point(1, 2), [".x", ".y"]),
    "frozen dataclass": (Frozen(1, 2), [".x", ".y"]),
    "frozen dataclass with slots": (FrozenSlots(1, 2), [".x", ".y"]),
    "namespace": (types.SimpleNamespace(x=1, y=2), [".x", ".y"]),
    "OrderedDict": (collections.OrderedDict(b=1, a=2), ["['b']", "['a']"]),
    "defaultdict": (collections.defaultdict(list, a=1, b=2), ["['a']", "['b']"]),
    "UserDict": (collections.UserDict(a=1, b=2), ["['a']", "['b']"]),
    "model output": (CausalOutput(logits=1, hidden=2), ["['logits']", "['hidden']"]),
    "torch.Size": (torch.Size([1, 2]), ["[0]", "[1]"]),
    "mappingproxy": (types.MappingProxyType({"a": 1, "b": 2}), ["['a']", "['b']"]),
}
EVERY_CONTAINER = pytest.mark.parametrize(
    ("tree", "paths"), CONTAINERS.values(), ids=CONTAINERS.keys()
)


@EVERY_CONTAINER
def test_leaves_have_paths_that_a_caller_could_write(tree, paths):
    assert list(leaves(tree)) == list(zip(paths, [1, 2], strict=True))


@EVERY_CONTAINER
def test_the_path_of_a_leaf_starts_where_the_caller_says(tree, paths):
    assert [path for path, _ in leaves(tree, "output")] == [f"output{path}" for path in paths]


@EVERY_CONTAINER
def test_mapping_gives_a_new_container_of_the_same_class(tree, paths):
    mapped = map_leaves(tree, lambda leaf: leaf * 10)
    assert type(mapped) is type(tree)
    assert mapped is not tree
    assert list(leaves(mapped)) == list(zip(paths, [10, 20], strict=True))
    assert list(leaves(tree)) == list(zip(paths, [1, 2], strict=True)), "the original was changed"


@EVERY_CONTAINER
def test_mapping_with_the_identity_gives_an_equal_container(tree, paths):
    assert map_leaves(tree, lambda leaf: leaf) == tree


@pytest.mark.parametrize("tree", [entry[0] for entry in CONTAINERS.values()], ids=CONTAINERS.keys())
def test_containers_inside_containers_are_new_too(tree):
    outer = {"deep": [tree]}
    mapped = map_leaves(outer, lambda leaf: leaf)
    assert mapped == outer
    assert mapped["deep"] is not outer["deep"]
    assert mapped["deep"][0] is not tree


def test_a_tensor_is_one_leaf_although_it_can_be_iterated():
    x = torch.arange(3)
    assert children(x) is None
    ((path, leaf),) = leaves([x])
    assert path == "[0]"
    assert leaf is x


@pytest.mark.parametrize("leaf", ["text", b"bytes", None, 1, 2.5, object(), Point, torch.float32])
def test_what_is_no_container_is_a_leaf(leaf):
    assert list(leaves(leaf, "here")) == [("here", leaf)]
    assert map_leaves(leaf, lambda value: [value]) == [leaf]


def test_a_model_output_keeps_its_attributes_and_its_keys_in_step():
    output = CausalOutput(logits=torch.ones(2), loss=torch.zeros(()))
    mapped = map_leaves(output, lambda tensor: tensor + 1)
    assert type(mapped) is CausalOutput
    assert torch.equal(mapped.logits, torch.full((2,), 2.0))
    assert mapped["logits"] is mapped.logits
    assert mapped[1] is mapped.loss
    assert mapped.hidden is None
    assert list(mapped) == ["logits", "loss"]


def test_a_result_of_torch_with_named_fields_is_rebuilt():
    result = torch.topk(torch.tensor([1.0, 3.0, 2.0]), 2)
    assert [path for path, _ in leaves(result)] == ["[0]", "[1]"]
    mapped = map_leaves(result, lambda tensor: tensor.clone())
    assert torch.equal(mapped.indices, result.indices)
    assert mapped.indices is not result.indices


def test_a_field_that_is_not_an_argument_of_the_constructor_is_mapped():
    mapped = map_leaves(Derived(2), lambda leaf: leaf + 1)
    assert mapped.x == 3
    assert mapped.twice == (3, 3)


def test_a_defaultdict_keeps_its_default():
    mapped = map_leaves(collections.defaultdict(list, a=1), lambda leaf: leaf)
    assert mapped["new"] == []


def test_nested_paths_tell_the_way_from_the_root():
    tree = {"layers": [Pair(Point(1), {"k": (2,)})]}
    assert list(leaves(tree, "output")) == [
        ("output['layers'][0].left.x", 1),
        ("output['layers'][0].left.y", 0),
        ("output['layers'][0].right['k'][0]", 2),
    ]


def test_empty_containers_have_no_leaves_and_are_kept():
    tree = {"a": [], "b": (), "c": {}}
    assert list(leaves(tree)) == []
    assert map_leaves(tree, lambda leaf: leaf) == tree


TREES = st.recursive(
    st.integers() | st.none() | st.text(LETTERS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(LETTERS, max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.builds(lambda x: types.SimpleNamespace(x=x), inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_paths_are_stable_and_no_two_leaves_share_one(tree):
    found = list(leaves(tree))
    paths = [path for path, _ in found]
    assert len(set(paths)) == len(paths)
    assert list(leaves(map_leaves(tree, lambda leaf: leaf))) == found


@given(TREES)
def test_mapping_keeps_the_structure_and_visits_every_leaf_once(tree):
    visited = []
    mapped = map_leaves(tree, lambda leaf: visited.append(leaf) or leaf)
    assert mapped == tree
    assert visited == [leaf for _, leaf in leaves(tree)]


def test_what_occurs_twice_is_mapped_once():
    x, items = torch.ones(2), [torch.zeros(2)]
    mapped = map_leaves({"a": x, "pair": (x, x), "left": items, "right": items}, torch.clone)
    assert mapped["pair"][0] is mapped["pair"][1] is mapped["a"] is not x
    assert mapped["left"] is mapped["right"] is not items


def test_equal_numbers_are_mapped_one_by_one():
    numbers = iter(range(3))
    assert map_leaves([7, 7, 7], lambda _: next(numbers)) == [0, 1, 2]


@EVERY_CONTAINER
def test_leaves_are_replaced_in_their_order(tree, paths):
    replaced = replace_leaves([tree, tree], [6, 7, 8, 9])
    assert [leaf for _, leaf in leaves(replaced)] == [6, 7, 8, 9]
    assert [type(part) for part in replaced] == [type(tree)] * 2
