"""The graphs in words beside a dump of Ascend's graph engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paritas.core.errors import UsageError
from paritas.formats.foreign.ge_graph_text import NodeFacts, ValueFacts, original_graph_text
from paritas.formats.foreign.ge_graphs import (
    GeNodes,
    GeOp,
    GeOutput,
    GeProvenance,
    fx_node,
    read_graph,
)
from unit.formats.foreign.ge_graph_texts import graph_text, op_text

FIXTURES = Path(__file__).parents[5] / "shared" / "fixtures" / "ascend" / "ge_graph_text"
ORIGINAL = "dynamo_original_graph_1_rank_0_pid_77_ts_20240130064152000000.txt"
OPTIMIZED = ORIGINAL.replace("original", "optimized")


@pytest.fixture
def graph_of(tmp_path):
    def read(text, name=ORIGINAL):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return read_graph(tmp_path / name)

    return read


CHAIN = graph_text(
    op_text("arg0_1", "Data", outputs=[""]),
    op_text("arg1_1", "Data", outputs=[""]),
    op_text("Add_2", "Add", ["arg0_1:0", "arg1_1:0"], outputs=["add_1-aten.add.Tensor.OUTPUT.0"]),
    op_text("Cast_9", "Cast", ["Add_2:0"], outputs=[""]),
    op_text("Sort", "Sort", ["Cast_9:0", "arg1_1:0"], outputs=["sort-x.OUT.0", "sort-x.OUT.1"]),
    op_text("ConcatV2", "ConcatV2", ["Cast_9:0", "Add:0"], outputs=["cat-aten.cat.OUTPUT.0"]),
    op_text("Add", "Add", ["arg1_1:0", "Add_2:-1"], outputs=["add-aten.add.Tensor.OUTPUT.0"]),
)


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="the real graphs are away")
def test_real_graphs_are_read():
    graph = read_graph(FIXTURES / "ge_proto_00000001_Build.txt")
    assert graph.kind == "other"
    assert graph.name == "ge_default_20230713074125_11"
    assert len(graph.ops) == 18
    gather = graph.ops["GatherV2"]
    assert gather.type == "GatherV2"
    assert gather.outputs == (GeOutput("DT_FLOAT", (2,)),)
    assert gather.sources[0] == ("Unique", 0)
    assert gather.sources[-1] == ("ge_default_20230713074125_sub_2_unknow_Data_1", 0)
    assert graph.find("GatherV2_axis") is graph.ops["GatherV2/axis"]
    assert graph.ops["Node_Output"].sources == [
        ("ge_default_20230713074125_sub_2_unknow_PartitionedCall_2", 0)
    ]


def test_the_name_of_the_file_tells_kind_graph_and_rank(graph_of):
    graph = graph_of(CHAIN)
    assert (graph.kind, graph.label, graph.rank, graph.name) == (
        "original",
        "graph_1",
        0,
        "a_graph",
    )
    assert graph_of(CHAIN, OPTIMIZED).kind == "optimized"
    assert graph_of(CHAIN, "dynamo_original_graph_2.txt").rank is None


def test_a_model_in_json_is_the_same_as_its_graph_in_text(graph_of):
    text = graph_text(
        op_text("Add_2", "Add", ["x:0"], outputs=["add-aten.add.Tensor.OUTPUT.0"]),
        op_text("AddMul", "Fused", ["Add_2:0"], originals=["add", "mul"]),
    )

    def attribute(key, value):
        return {"key": key, "value": value}

    ops = [
        {
            "name": "Add_2",
            "type": "Add",
            "input": ["x:0"],
            "output_desc": [
                {
                    "dtype": "DT_FLOAT16",
                    "shape": {"dim": [2, 3]},
                    "attr": [attribute("_fx_tensor_name", {"s": "add-aten.add.Tensor.OUTPUT.0"})],
                }
            ],
        },
        {
            "name": "AddMul",
            "type": "Fused",
            "input": ["Add_2:0"],
            "attr": [
                attribute("_datadump_original_op_names", {"list": {"s": ["add", "mul"]}}),
                attribute("is_input_const", {"list": {"b": [False]}}),
            ],
        },
    ]
    model = {"name": "a_graph", "graph": [{"name": "a_graph", "op": ops}], "version": 3}
    graph = graph_of(json.dumps(model), "ge_proto_00000001_Build.json")
    assert (graph.kind, graph.name) == ("other", "a_graph")
    assert graph.ops == graph_of(text).ops


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[1]", "it has no list of graphs"),
        ('{"graph": {}}', "it has no list of graphs"),
        ('{"graph": ' + "[" * 100_000, "it is nested too deeply"),
    ],
)
def test_other_json_is_refused_with_the_reason(text, why, graph_of):
    with pytest.raises(UsageError, match=f"m.json is not an OM model in JSON: {why}"):
        graph_of(text, "m.json")


def test_an_operator_has_its_inputs_and_the_files_of_its_results(graph_of):
    graph = graph_of(CHAIN)
    assert graph.ops["Sort"] == GeOp(
        name="Sort",
        type="Sort",
        inputs=("Cast_9:0", "arg1_1:0"),
        outputs=tuple(GeOutput("DT_FLOAT16", (2, 3), f"sort-x.OUT.{one}") for one in range(2)),
    )
    assert fx_node(graph.fx_name("Add_2", 0)) == "add_1"
    assert graph.fx_name("Cast_9", 0) == graph.fx_name("Add_2", 5) == graph.fx_name("none", 0) == ""


def test_values_that_look_like_syntax_do_no_harm(graph_of):
    meta = 'torch.float16 of [2, 3]: { "a": 1 } name: "Fake" } op {'
    graph = graph_of(graph_text(op_text("Add_2", "Add", outputs=["x-y.OUTPUT.0"], meta=meta)))
    assert list(graph.ops) == ["Add_2"]
    assert graph.fx_name("Add_2", 0) == "x-y.OUTPUT.0"


def test_our_own_graphs_in_words_are_read_back(graph_of):
    node = NodeFacts(
        name="mm", op="aten.mm.default", inputs=("x:0",), outputs=(ValueFacts("bfloat16", (2, 2)),)
    )
    graph = graph_of(original_graph_text("grün: {a}", [node]))
    assert graph.name == "grün: {a}"
    expected = GeOutput("DT_BF16", (2, 2), "mm-aten.mm.default.OUTPUT.0")
    assert graph.ops["mm"].outputs == (expected,)


def test_operators_of_inner_graphs_are_found_too(graph_of):
    inner = op_text("Inner", "Add", outputs=["inner-x.OUTPUT.0"])
    branch = f'attr {{ key: "branch" value {{ g {{ {inner} }} }} }}'
    text = f'graph {{ name: "outer" op {{ name: "Outer" type: "If" {branch} }} }}'
    assert set(graph_of(text).ops) == {"Outer", "Inner"}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Add_2", ["Add_2"]),
        ("Add_2Cast_9ConcatV2", ["Add_2", "Cast_9", "ConcatV2"]),
        ("AddAdd_2Add", ["Add", "Add_2", "Add"]),
        ("Add_2Cast_8", []),
        ("", []),
        ("Add_2" * 2000, []),
    ],
)
def test_a_fused_name_is_split_into_those_that_are_known(graph_of, name, parts):
    assert [op.name for op in graph_of(CHAIN).split(name)] == parts


def test_the_longest_name_is_given_up_where_the_rest_would_mean_nothing(graph_of):
    graph = graph_of(graph_text(op_text("A", "X"), op_text("AB", "X"), op_text("BC", "X")))
    assert [op.name for op in graph.split("ABC")] == ["A", "BC"]
    assert [op.name for op in graph.split("ABAB")] == ["AB", "AB"]


def test_names_with_slashes_are_split_as_the_files_spell_them(graph_of):
    graph = graph_of(graph_text(op_text("a/Add.1", "Add"), op_text("b/Mul", "Mul")))
    assert [op.name for op in graph.split("a_Add_1b_Mul")] == ["a/Add.1", "b/Mul"]


def test_a_hostile_name_does_not_take_long(graph_of):
    graph = graph_of(graph_text(*(op_text("A" * count, "X") for count in range(1, 600))))
    assert graph.split("A" * 4000 + "B") == ()


def test_results_stand_for_the_nodes_of_all_parts_and_the_last_is_the_value(graph_of):
    provenance = GeProvenance([graph_of(CHAIN)], "graph_1", ["Add_2"])
    assert provenance.output("Add_2", 0, 1) == GeNodes(("add_1",), exact=True)
    assert provenance.output("Add_2Cast_9ConcatV2", 0, 1) == GeNodes(("add_1", "cat"), exact=True)
    # A cast that the engine put in has no node; what it computes is near that of the add.
    assert provenance.output("Add_2Cast_9", 0, 1) == GeNodes(("add_1",), exact=False)
    # More results than the last part has: nobody knows which is which.
    assert provenance.output("Add_2Add", 1, 2) == GeNodes(("add_1", "add"), exact=False)
    assert provenance.output("trans_TransData_1", 0, 1) == GeNodes()


def test_arguments_stand_for_what_was_computed_outside_of_the_parts(graph_of):
    provenance = GeProvenance([graph_of(CHAIN)], "graph_1", ["Add_2"])
    assert provenance.argument("Cast_9", 0, 1) == GeNodes(("add_1",), exact=True)
    assert provenance.argument("Add_2", 1, 2) == GeNodes(("arg1_1",), exact=False)
    # Add_2 and Cast_9 are inside; Add_2 takes two, ConcatV2 one of another operator.
    assert provenance.argument("Add_2Cast_9ConcatV2", 2, 3) == GeNodes(("add",), exact=True)
    assert provenance.argument("Add_2Cast_9ConcatV2", 0, 5) == GeNodes()


def test_the_parts_that_a_graph_lists_go_before_those_that_a_name_spells(graph_of):
    fused = graph_text(op_text("Add_2", "Fused", originals=["Add", "Sort"]))
    graphs = [graph_of(CHAIN), graph_of(fused, OPTIMIZED)]
    fusion = GeProvenance(graphs, "graph_1", []).fusion("Add_2")
    assert fusion is not None
    assert [part.name for part in fusion.parts] == ["Add", "Sort"]
    assert fusion.nodes == ("add", "sort")


def test_of_several_graphs_the_one_named_like_the_model_or_with_its_operators_is_taken(graph_of):
    other = graph_text(op_text("Add_2", "Add", outputs=["other-x.OUTPUT.0"]))
    graphs = [graph_of(CHAIN), graph_of(other, ORIGINAL.replace("graph_1", "graph_2"))]
    by_name = GeProvenance(graphs, "prefix_graph_2", ["Add_2"])
    assert by_name.output("Add_2", 0, 1).names == ("other",)
    by_operators = GeProvenance(graphs, "model", ["Add_2", "Cast_9"])
    assert by_operators.output("Add_2", 0, 1).names == ("add_1",)
    unclear = GeProvenance(graphs, "model", ["Add_2"])
    assert unclear.output("Add_2", 0, 1) == GeNodes()
    assert "may come from any of 2 graphs" in unclear.unclear[0]


def test_a_damaged_graph_is_refused_with_the_reason(graph_of):
    with pytest.raises(UsageError, match="is not a text graph: it is truncated"):
        graph_of(CHAIN[: len(CHAIN) // 2])
