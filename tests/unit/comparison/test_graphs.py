"""Fused code, graph engines and graphs run node by node, matched by the nodes of the graph."""

from __future__ import annotations

import numpy as np
import pytest

from paritas.comparison.operands import Operand
from paritas.comparison.pairing import match
from paritas.comparison.rules import Rules
from paritas.formats.dumps.opening import open_dump
from unit.comparison.operand_samples import Side, found, told
from unit.formats.foreign import ge_files as ge
from unit.formats.foreign.ge_graph_texts import graph_text, op_text

KERNEL = {"level": "buffer", "kernel": "cpp_fused_mul_sum_0"}


def node_by_node(graph="graph_0"):
    """x -> mul -> sum -> mm, as a graph that was run node by node has it."""
    side = Side("fx", "node", graph=graph)
    side.add("x", op="placeholder", nodes=("x",))
    side.add("mul", side="input", nodes=("x",)).add("mul", side="input", position="1", value="2")
    side.add("mul", nodes=("mul",))
    side.add("sum_1", side="input", nodes=("mul",)).add("sum_1", (2,), nodes=("sum_1",))
    side.add("mm", side="input", nodes=("sum_1",)).add("mm", (2, 2), nodes=("mm",))
    return side


def fused(graph="graph_0"):
    """The same, with mul and sum in one kernel, which also writes something of its own."""
    side = Side("fused", "node", graph=graph).add("x", op="placeholder", nodes=("x",))
    side.add("sum_1", side="input", nodes=("x",), **KERNEL)
    side.add("mul", nodes=("mul",), exact=False, **KERNEL)
    side.add("sum_1", (2,), nodes=("mul", "sum_1"), **KERNEL)
    side.add("mm", (2,), side="input", nodes=("sum_1",), level="buffer", kernel="extern.mm")
    side.add("mm", (2, 2), nodes=("mm",), level="buffer", kernel="extern.mm")
    side.add("mm", (2, 2), nodes=("mm",))
    return side


FUSED_PAIRS = [
    ("node", "graph_0/~x#0/output.0", "graph_0/x#0/output.0"),
    ("node", "graph_0/sum_1#0/input.0", "graph_0/x#0/output.0"),
    ("id", "graph_0/sum_1#0/output.0", "graph_0/sum_1#0/output.0"),
    ("node", "graph_0/mm#0/input.0", "graph_0/sum_1#0/output.0"),
    ("id", "graph_0/mm#0/output.0", "graph_0/mm#0/output.0"),
    ("node", "graph_0/~mm#0/output.0", "graph_0/mm#0/output.0"),
]
FUSED_SKIPPED = [
    "1 buffer of fused code without a value of the graph",
    "3 inputs of nodes; compared where computed or read",
    "1 number inlined into fused kernels",
    "1 node inside fused kernels; compared at their outputs",
]


def test_a_fused_group_is_compared_at_its_true_inputs_and_outputs():
    matches = found(fused(), node_by_node())
    assert told(matches) == FUSED_PAIRS
    assert sorted(matches.skipped) == sorted(FUSED_SKIPPED)
    assert matches.notes == []


def test_fused_code_may_be_the_golden_side():
    matches = found(node_by_node(), fused())
    assert told(matches) == [(by, golden, my) for by, my, golden in FUSED_PAIRS]
    assert sorted(matches.skipped) == sorted(FUSED_SKIPPED)


def test_the_same_name_of_a_kernels_input_is_not_the_same_value():
    # Under `mm/input.0`, fused code has what the kernel reads: here, what was permuted before.
    my = Side("fused", "node", graph="g").add("w", (3, 2), op="placeholder", nodes=("w",))
    my.add("mm", (3, 2), side="input", nodes=("w",), level="buffer", kernel="extern.mm")
    my.add("mm", nodes=("permute", "mm"), level="buffer", kernel="extern.mm")
    golden = Side("fx", "node", graph="g").add("w", (3, 2), op="placeholder", nodes=("w",))
    golden.add("permute", (2, 3), nodes=("permute",))
    golden.add("mm", (2, 3), side="input", nodes=("permute",)).add("mm", nodes=("mm",))
    pairs = told(found(my, golden))
    assert ("node", "g/mm#0/input.0", "g/w#0/output.0") in pairs
    assert not any(golden == "g/mm#0/input.0" for _, _, golden in pairs)


def test_graphs_of_other_names_are_found_by_their_nodes():
    matches = found(fused(graph="model_7"), node_by_node())
    assert [pair.matched_by for pair in matches.pairs] == ["node"] * 6
    assert matches.notes == ["my graph model_7 forward was matched with the golden graph_0 forward"]
    apart = found(node_by_node(graph="b").add("own", nodes=("own",)), node_by_node(graph="a"))
    assert [pair.matched_by for pair in apart.pairs] == ["node"] * 8 + [""]


def test_a_value_that_was_never_made_has_no_counterpart():
    golden = node_by_node().add("relu", (2, 2), nodes=("relu",))
    assert told(found(fused(), golden))[-1] == ("", None, "graph_0/relu#0/output.0")


def test_a_fused_group_that_is_not_compared_hides_nothing():
    my = Side("fused", "buffer", graph="g").add("last", (9,), nodes=("mul", "last"), kernel="k")
    golden = Side("fx", "node", graph="g").add("mul", nodes=("mul",))
    assert told(found(my, golden)) == [
        ("", "g/last#0/output.0", None),
        ("", None, "g/mul#0/output.0"),
    ]


def test_a_program_compared_with_itself_is_compared_in_all_its_buffers():
    matches = found(fused(), fused())
    assert [pair.matched_by for pair in matches.pairs] == ["id"] * 7
    assert matches.skipped == []


def test_what_a_compiler_put_in_the_place_of_something_else_is_counted():
    my = Side("fx", "node", graph="g").add("a", nodes=("a",))
    my.add("amax_default", nodes=("amax_default",)).add("z", nodes=("z",))
    golden = Side("fx", "node", graph="g").add("a", nodes=("a",))
    golden.add("amax", nodes=("amax",)).add("div", nodes=("div",)).add("z", nodes=("z",))
    matches = found(my, golden)
    assert [pair.matched_by for pair in matches.pairs] == ["id", "id"]
    assert matches.skipped == [
        (
            "3 values from nodes that only one of the two graphs has; compared at the next "
            "value of both"
        )
    ]
    # At the end of the program nothing follows that could show it.
    my.add("exp_default", nodes=("exp_default",))
    assert found(my, golden).pairs[-1].golden is None


def test_nodes_that_one_side_lacks_without_a_replacement_are_not_explained_away():
    my = Side("fx", "node", graph="g").add("a", nodes=("a",)).add("z", nodes=("z",))
    golden = Side("fx", "node", graph="g").add("a", nodes=("a",))
    golden.add("amax", nodes=("amax",)).add("z", nodes=("z",))
    assert ("", None, "g/amax#0/output.0") in told(found(my, golden))


def test_several_results_of_a_node_are_told_apart_by_place_or_else_by_shape():
    golden = Side("fx", "node", graph="g")
    golden.add("topk", (2, 2), nodes=("topk",)).add("topk", (2, 5), nodes=("topk",), position="1")
    my = Side("fused", "buffer", graph="g")
    my.add("TopK", (2, 2), nodes=("topk",)).add("TopK", (2, 5), nodes=("topk",), position="1")
    my.add("Next", (2, 5), side="input", nodes=("topk",))
    assert [(my, golden) for _, my, golden in told(found(my, golden))] == [
        ("g/TopK#0/output.0", "g/topk#0/output.0"),
        ("g/TopK#0/output.1", "g/topk#0/output.1"),
        ("g/Next#0/input.0", "g/topk#0/output.1"),
    ]


@pytest.fixture
def engine_dumps(tmp_path):
    """A dump of a graph engine with one fused operator, and the graph's nodes one by one."""
    top = tmp_path / "msit_ge_dump"
    stems = {"Add_2": "add_1-aten.add.Tensor", "Cast_9": "to-aten._to_copy.default"}
    text = graph_text(
        op_text("x", "Data", outputs=[""]),
        op_text("Add_2", "Add", ["x:0"], outputs=[f"{stems['Add_2']}.OUTPUT.0"]),
        op_text("Cast_9", "Cast", ["Add_2:0"], outputs=[f"{stems['Cast_9']}.OUTPUT.0"]),
        op_text("Mul", "Mul", ["Cast_9:0", "x:0"], outputs=["mul-aten.mul.Tensor.OUTPUT.0"]),
    )
    ge.write(top, "", "dynamo_original_graph_1_rank_0_pid_7_ts_2024.txt", text.encode())
    folder = "worldsize1_global_rank0/20240130064152/0/model/11/0"
    one = ge.tensor(np.ones(2, np.float32), ge.F32)
    for number, (kind, name, taken) in enumerate(
        [
            ("AutomaticBufferFusionOp", "Add_2Cast_9", 1),
            ("TransData", "trans_1", 1),
            ("Mul", "Mul", 2),
        ]
    ):
        data = ge.ge_bytes([one] * taken, [one], name=name)
        ge.write(top, folder, ge.file_name(kind, name, ge.TIME + number), data)
    nodes = tmp_path / "msit_fx_dump/worldsize1_global_rank0/graph_1/0"
    nodes.mkdir(parents=True)
    calls = [(stems["Add_2"], 2), (stems["Cast_9"], 1), ("mul-aten.mul.Tensor", 2)]
    for number, (stem, taken) in enumerate(calls):
        time = f"2024012503111878735{number}"
        for place in range(taken):
            # The second of what is added is a number of Python's.
            scalar = stem.startswith("add") and place
            values = np.array(3) if scalar else np.ones(2, np.float32)
            np.save(nodes / f"{stem}.INPUT.{place}.{time}.npy", values)
        np.save(nodes / f"{stem}.OUTPUT.0.{time}.npy", np.ones(2, np.float32))
    return tuple(
        [Operand((record,)) for record in open_dump(path).records()]
        for path in (top, tmp_path / "msit_fx_dump")
    )


def test_operators_of_an_engine_are_held_against_the_nodes_of_the_captured_graph(engine_dumps):
    my, golden = engine_dumps
    matches = match(my, golden, Rules(), {0: 0})
    assert told(matches) == [
        ("node", "model/Add_2Cast_9#0/input.0", "graph_1/add_1#0/input.0"),
        ("node", "model/Add_2Cast_9#0/output.0", "graph_1/to#0/output.0"),
        ("node", "model/Mul#0/input.0", "graph_1/to#0/output.0"),
        ("node", "model/Mul#0/input.1", "graph_1/mul#0/input.1"),
        ("node", "model/Mul#0/output.0", "graph_1/mul#0/output.0"),
    ]
    assert sorted(matches.skipped) == [
        "1 node inside fused kernels; compared at their outputs",
        "1 number inlined into fused kernels",
        "2 inputs of nodes; compared where computed or read",
        "2 values of operators that the engine added to move data",
    ]
