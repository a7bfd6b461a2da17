"""Values of one framework made into those of another."""

from __future__ import annotations

import pickle

import pytest
import torch

from paritas.comparison.rules import Joined, Rearranged, Rules, TensorPart
from paritas.core.errors import UsageError
from unit.comparison.operand_samples import Side, found, told


def rules_of(tmp_path, text):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return Rules.of(path)


def weights(**shapes):
    side = Side(source="file", level="tensor")
    for name, shape in shapes.items():
        side.add(name.replace("__", "."), shape)
    return side


def test_a_name_that_is_found_is_replaced_and_the_pair_is_marked():
    my = weights(h__0__fc=(2, 3), h__1__fc=(2, 3), other=(4,))
    golden = weights(layers__0__up=(2, 3), layers__1__up=(2, 3), other=(4,))
    matches = found(my, golden, Rules.of(renames=[(r"h\.(\d+)\.fc", r"layers.\1.up")]))
    assert told(matches) == [
        ("rename", "h.0.fc#0/output.0", "layers.0.up#0/output.0"),
        ("rename", "h.1.fc#0/output.0", "layers.1.up#0/output.0"),
        ("id", "other#0/output.0", "other#0/output.0"),
    ]


def test_a_rule_comes_before_the_same_name(tmp_path):
    rules = rules_of(tmp_path, "[[rename]]\nmy = 'w'\ngolden = 'w'\npermute = [1, 0]\n")
    (pair,) = found(weights(w=(2, 3)), weights(w=(3, 2)), rules).pairs
    assert pair.matched_by == "rename"
    assert pair.my.words == "dimensions permuted to 1, 0"
    value = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(pair.my.read(lambda _: value), value.T)


def test_mine_is_taken_apart_and_turned_where_the_golden_side_has_its_parts(tmp_path):
    rules = rules_of(
        tmp_path,
        r"""
        [[rename]]
        my = '(.*)\.c_attn'
        golden = '\1.{part}_proj'
        permute = [1, 0]
        split = { dim = 1, parts = ["q", "k", "v"], sizes = [4, 1, 1] }
        """,
    )
    golden = weights(h__q_proj=(4, 2), h__k_proj=(1, 2), h__v_proj=(1, 2))
    matches = found(weights(h__c_attn=(2, 6)), golden, rules)
    assert [pair.matched_by for pair in matches.pairs] == ["rename"] * 3
    assert matches.notes == []
    fused = torch.arange(12.0).reshape(2, 6)
    found_parts = [pair.my.read(lambda _: fused) for pair in matches.pairs]
    assert [tuple(part.shape) for part in found_parts] == [(4, 2), (1, 2), (1, 2)]
    assert torch.equal(torch.cat(found_parts).T, fused)
    assert matches.pairs[1].my.words == (
        "part 2 of 3 along dimension 1, then dimensions permuted to 1, 0"
    )


def test_mine_are_joined_where_the_golden_side_has_them_in_one(tmp_path):
    text = r"""
        [[rename]]
        my = '(.*)\.{part}'
        golden = '\1.gate_up'
        concat = { of = ["gate", "up"] }
        """
    rules = rules_of(tmp_path, text)
    my = weights(m__up=(2, 3), m__gate=(1, 3), n__up=(2, 3))
    golden = weights(m__gate_up=(3, 3), n__gate_up=(3, 3))
    matches = found(my, golden, rules)
    assert told(matches)[:2] == [
        ("rename", "m.gate#0/output.0", "m.gate_up#0/output.0"),
        ("", "n.up#0/output.0", None),
    ]
    tensors = {"m.gate": torch.zeros(1, 3), "m.up": torch.ones(2, 3)}
    joined = matches.pairs[0].my.read(lambda record: tensors[record.site.name])
    assert joined[:, 0].tolist() == [0, 1, 1]
    (note,) = matches.notes
    assert note.endswith("cannot concatenate forward/n.gate_up#0/output.0, because gate is missing")


def test_a_rule_that_does_nothing_is_noted():
    rules = Rules.of(renames=[("nothing", "x"), ("w", "missing")])
    assert found(weights(w=(2,)), weights(v=(3,)), rules).notes == [
        "rename 'nothing' to 'x' matched none of my names",
        "rename 'w' to 'missing' matched 1 of my names but produced no golden name",
    ]


@pytest.mark.parametrize(
    ("recipe", "shapes", "message"),
    [
        (Rearranged("permuted", (1, 0)), [(2, 3, 4)], r"expected 2 dimensions.*\(2, 3, 4\)"),
        (TensorPart(0, 0, 3), [(4, 2)], r"dimension 0 of shape \(4, 2\).*3 equal parts"),
        (TensorPart(1, 0, 2, (1, 2)), [(4, 2)], r"cannot be split into parts of \[1, 2\]"),
        (TensorPart(2, 0, 2), [(4, 2)], "uses dimension 2"),
        (Joined(0, 2), [(2, 3), (2, 4)], r"\(2, 3\) and \(2, 4\) along dimension 0"),
        (Joined(0, 2), [(2, 3), ()], "uses dimension 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_shape(recipe, shapes, message):
    with pytest.raises(UsageError, match=message):
        recipe.apply([torch.zeros(shape) for shape in shapes])


def test_parts_of_other_dtypes_are_not_joined():
    with pytest.raises(UsageError, match=r"cannot concatenate dtypes torch.float32, torch.float64"):
        Joined(0, 2).apply([torch.zeros(1), torch.zeros(1, dtype=torch.float64)])


@pytest.mark.parametrize(
    "recipe", [Rearranged("permuted", (1, 0)), TensorPart(0, 1, 2), Joined(0, 2)]
)
def test_a_recipe_can_be_sent_to_another_process(recipe):
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipe.words
