"""Which values of two dumps belong together, by names, steps, ranks and order."""

from __future__ import annotations

import pytest

from paritas.comparison.operands import Operand
from paritas.comparison.ordering import propose_renames
from paritas.comparison.pairing import match
from paritas.comparison.rules import Rules
from unit.comparison.operand_samples import Side, found, told


def test_the_same_canonical_name_belongs_together_in_the_order_of_the_golden_program():
    my = Side().add("b", op="aten.add.Tensor").add("a").add("n", value="3")
    golden = Side().add("a").add("b").add("n", value="4")
    matches = found(my, golden)
    assert told(matches) == [
        ("id", "a#0/output.0", "a#0/output.0"),
        ("id", "b#0/output.0", "b#0/output.0"),
        ("id", "n#0/output.0", "n#0/output.0"),
    ]
    assert matches.skipped == []
    assert matches.notes == []


def test_what_has_no_counterpart_stands_where_it_was_and_has_the_nearest_names():
    my = Side().add("a", (1,)).add("layers.0.attention", (7,)).add("z", (3,))
    golden = Side().add("a", (1,)).add("layers.0.attn", (5,)).add("other", (6,)).add("z", (3,))
    matches = found(my, golden)
    assert told(matches) == [
        ("id", "a#0/output.0", "a#0/output.0"),
        ("", "layers.0.attention#0/output.0", None),
        ("", None, "layers.0.attn#0/output.0"),
        ("", None, "other#0/output.0"),
        ("id", "z#0/output.0", "z#0/output.0"),
    ]
    assert matches.pairs[1].nearest[0] == "forward/layers.0.attn#0/output.0"
    assert matches.pairs[2].nearest == ("forward/layers.0.attention#0/output.0",)


def test_values_of_other_steps_and_ranks_do_not_belong_together():
    my = Side().add("a", step=0, rank=0).add("a", step=0, rank=1).add("a", step=1, rank=0)
    golden = Side().add("a", step=0, rank=0).add("a", step=0, rank=1)
    pairs = found(my, golden).pairs
    ranks = [(pair.my.step, pair.my.ranks, pair.golden and pair.golden.ranks) for pair in pairs]
    assert ranks == [(0, (0,), (0,)), (0, (1,), (1,)), (1, (0,), None)]


def test_steps_that_were_not_asked_for_are_left_out_and_counted():
    my = Side().add("a", step=0).add("a", step=1).add("a", step=2)
    golden = Side().add("a", step=0).add("a", step=7)
    matches = found(my, golden, Rules.of(steps=["1:0", "2:0"]))
    assert [(pair.my.step, pair.golden.step) for pair in matches.pairs] == [(1, 0), (2, 0)]
    assert matches.skipped == [
        "1 value of my dump in unselected steps 0",
        "1 value of the golden dump in unselected steps 7",
    ]


def test_what_is_put_together_from_ranks_belongs_to_the_only_rank_of_the_other_side():
    parts = Side().add("a", rank=0).add("a", rank=1).operands
    whole = Operand((*parts[0].parts, *parts[1].parts))
    golden = Side().add("a", rank=0).operands
    (pair,) = match([whole], golden, Rules(), {0: 0}).pairs
    assert pair.matched_by == "id"
    assert pair.my.ranks == (0, 1)


def test_the_only_rank_of_each_side_is_compared_whatever_its_number():
    matches = found(Side(rank=3).add("a"), Side(rank=0).add("a"))
    assert [pair.matched_by for pair in matches.pairs] == ["id"]
    assert matches.notes == ["my rank 3 is compared with golden rank 0, the only ones"]


def test_what_the_user_ignores_is_counted_and_has_no_row():
    my = Side().add("rotary.cos").add("mm", module="rotary")
    golden = Side().add("rotary.cos").add("b")
    matches = found(my, golden, Rules.of(ignore=["^rotary"]))
    assert told(matches) == [("", None, "b#0/output.0")]
    assert matches.skipped == [
        "2 values of my dump, ignored as requested",
        "1 value of the golden dump, ignored as requested",
    ]


def test_a_prefix_that_all_names_of_one_side_have_is_left_out():
    my, golden = Side(level="module"), Side(level="module")
    for name in ("embed", "layers.0.attn", "layers.0.mlp", "head"):
        my.add(f"model._orig_mod.{name}")
        golden.add(name)
    matches = found(my, golden)
    assert [pair.matched_by for pair in matches.pairs] == ["module"] * 4
    assert matches.notes == ["my names start with 'model.'; this prefix was ignored to match them"]


def test_few_names_that_end_alike_are_no_prefix():
    my = Side(level="module").add("x.weight", (1,)).add("y", (2,)).add("z", (3,)).add("u", (9,))
    golden = Side(level="module").add("weight", (4,)).add("k", (5,)).add("l", (6,)).add("m", (8,))
    assert all(pair.matched_by == "" for pair in found(my, golden).pairs)


def test_outermost_modules_of_other_classes_are_the_same_module():
    my = Side(level="module").add("Net", op="Net").add("a", op="Linear")
    my.add("Net/aten.add.Tensor", level="op", op="aten.add.Tensor")
    golden = Side(level="module").add("PortedNet", op="PortedNet").add("a", op="Linear")
    golden.add("PortedNet/aten.add.Tensor", level="op", op="aten.add.Tensor")
    matches = found(my, golden)
    assert [pair.matched_by for pair in matches.pairs] == ["module", "id", "module"]
    assert matches.notes == ["my Net was matched with the golden PortedNet"]


def test_order_and_shape_are_the_last_resort_and_marked():
    my = Side(source="file", level="tensor").add("p", (2, 3)).add("q", (4,)).add("r", (2, 3))
    golden = Side(source="file", level="tensor").add("t1", (2, 3)).add("t2", (4,)).add("t3", (5,))
    matches = found(my, golden)
    assert told(matches) == [
        ("order", "p#0/output.0", "t1#0/output.0"),
        ("order", "q#0/output.0", "t2#0/output.0"),
        ("", "r#0/output.0", None),
        ("", None, "t3#0/output.0"),
    ]
    assert matches.notes == [
        (
            "2 pairs matched by order and shape only, because the names are unrelated: "
            "check these rows with care"
        )
    ]


def test_order_matches_no_input_with_an_output_and_no_sum_with_a_product():
    my = Side().add("p", side="input", op="aten.mul.Tensor").add("q", op="aten.mul.Tensor")
    golden = Side().add("t", op="aten.add.Tensor").add("u", op="aten.mul.Tensor")
    assert told(found(my, golden)) == [
        ("", "p#0/input.0", None),
        ("", None, "t#0/output.0"),
        ("order", "q#0/output.0", "u#0/output.0"),
    ]


def test_of_the_same_words_eager_code_and_graphs_are_not_guessed_by_order():
    my = Side("eager", "op").add("a/aten.mul.Tensor", op="aten.mul.Tensor", phase="backward")
    golden = Side("fx", "node", graph="g").add("mul", op="aten.mul.Tensor", phase="backward")
    golden.add("mul_1", op="aten.mul.Tensor", phase="backward")
    assert {pair.matched_by for pair in found(my, golden).pairs} == {""}


def test_operators_of_other_words_are_compared_by_shape():
    my = Side("fused", "buffer", graph="model").add("MatMul_1", (4, 4), op="MatMulV2", exact=False)
    golden = Side("fx", "node", graph="graph_0").add("mm", (4, 4), op="aten.mm.default")
    assert [pair.matched_by for pair in found(my, golden).pairs] == ["order"]
    foreign = Side(source="eager", level="op").add("mm.3", (4, 4), op="Functional.linear")
    other = Side(source="eager", level="op").add("MatMul", (4, 4), op="")
    assert [pair.matched_by for pair in found(foreign, other).pairs] == ["order"]


# --- calls with unrelated names -------------------------------------------------------------------


def linear(side, name, given, made, **facts):
    """A call of a linear layer."""
    side.add(name, (2, given), side="input", op="Linear", level="module", **facts)
    return side.add(name, (2, made), op="Linear", level="module")


def test_a_call_is_matched_as_a_whole_or_not_at_all():
    my, golden = Side(), Side()
    linear(my, "mlp.w13", 4, 12)
    linear(golden, "self_attn.k_proj", 4, 2)
    assert {pair.matched_by for pair in found(my, golden).pairs} == {""}


def test_order_decides_only_between_equally_many_calls():
    my, golden = Side(), Side()
    for name in ("qkv", "wo"):
        linear(my, name, 4, 4 if name == "wo" else 12)
    for name in ("q", "k", "v", "o"):
        linear(golden, name, 4, 4)
    assert {pair.matched_by for pair in found(my, golden).pairs} == {""}
    for side, name in ((my, "w2"), (golden, "down")):
        linear(side, name, 6, 4)
    matched = [pair for pair in told(found(my, golden)) if pair[0]]
    assert matched == [
        ("order", "w2#0/input.0", "down#0/input.0"),
        ("order", "w2#0/output.0", "down#0/output.0"),
    ]


def test_what_follows_a_match_is_not_matched_with_what_precedes_it():
    my, golden = Side(), Side()
    linear(my, "a", 4, 4)
    for side in (my, golden):
        side.add("same", (7,))
    linear(golden, "z", 4, 4)
    assert [pair.matched_by for pair in found(my, golden).pairs if pair.matched_by] == ["id"]


def test_a_shared_weight_or_result_identifies_a_call():
    my, golden = Side(), Side()
    for side, names in ((my, ("a", "b")), (golden, ("y", "x"))):
        for name in names:
            op = {"op": "aten.t.default"}
            side.add(f"{name}/t", (4, 4), side="input", content=ord(name) % 2 + 1, **op)
            side.add(f"{name}/t", (4, 4), **op)
    # "a" and "y" have the same content, as have "b" and "x".
    my_last = my.add("c", (5,), content=7)
    golden.add("w", (5,), content=7)
    assert told(found(my_last, golden)) == [
        ("value", "a/t#0/input.0", "y/t#0/input.0"),
        ("value", "a/t#0/output.0", "y/t#0/output.0"),
        ("value", "b/t#0/input.0", "x/t#0/input.0"),
        ("value", "b/t#0/output.0", "x/t#0/output.0"),
        ("value", "c#0/output.0", "w#0/output.0"),
    ]


def normed(side, scale, *, exchanged=False):
    """A value times its own reciprocal, and then times a weight that identifies the last call."""
    side.add(f"{scale}.square", (2, 4), op="aten.pow.Tensor_Scalar")
    side.add(f"{scale}.root", (2, 4), op="aten.rsqrt.default")
    operands = [len(side.operands) - 2, len(side.operands) - 1]
    for position, source in enumerate(reversed(operands) if exchanged else operands):
        at = {"side": "input", "position": str(position)}
        side.add(scale, (2, 4), alias_of=source, op="aten.mul.Tensor", **at)
    side.add(scale, (2, 4), op="aten.mul.Tensor")
    made = len(side.operands) - 1
    weighted = {"side": "input", "op": "aten.mul.Tensor"}
    side.add(f"{scale}.weighted", (2, 4), alias_of=made, position="0", **weighted)
    side.add(f"{scale}.weighted", (4,), content=9, position="1", **weighted)
    side.add(f"{scale}.weighted", (2, 4), op="aten.mul.Tensor")
    return side


def matched_by_value(my, golden):
    return {mine for by, mine, _ in told(found(my, golden)) if by == "value"}


def test_a_call_that_made_what_an_identified_call_reads_is_identified_too():
    known = matched_by_value(normed(Side(), "a"), normed(Side(), "z"))
    assert {"a#0/input.0", "a#0/input.1", "a#0/output.0"} <= known


def test_operands_that_a_port_exchanges_are_not_taken_for_each_other():
    known = matched_by_value(normed(Side(), "a", exchanged=True), normed(Side(), "z"))
    assert "a.weighted#0/input.1" in known
    assert not {"a#0/input.0", "a#0/input.1"} & known


def test_calls_of_an_operator_do_not_match_by_number_if_one_side_has_more():
    my, golden = Side(), Side()
    for call in range(2):
        my.add("attn/t", op="aten.transpose.int", call=call)
    for call in range(3):
        golden.add("attn/t", op="aten.transpose.int", call=call)
    assert {pair.matched_by for pair in found(my, golden).pairs} == {""}
    my.add("attn/t", op="aten.transpose.int", call=2)
    assert {pair.matched_by for pair in found(my, golden).pairs} == {"id"}


@pytest.mark.parametrize(
    ("names", "rules"),
    [
        ([("tok", "embed")], [(r"^tok\b", "embed")]),
        ([("same", "same")], []),
        (
            [("b.0.n", "l.0.norm"), ("b.1.n", "l.1.norm")],
            [(r"^b\b", "l"), (r"^b\.(\d+)\.n\b", r"l.\1.norm")],
        ),
        ([("b.0.mlp", "l.0.mlp")], [(r"^b\b", "l")]),  # the rest follows
        ([("b.0.n", "l.1.norm")], [(r"^b\b", "l")]),  # another layer
        ([("a.0.c.3", "m.x.0.y.3")], [(r"^a\.(\d+)\.c\.(\d+)\b", r"m.x.\1.y.\2")]),
    ],
)  # fmt: skip
def test_rules_are_proposed_for_names_whose_numbers_agree(names, rules):
    assert propose_renames(names) == rules
