"""What the other dump was not asked to record is set apart; what is missing otherwise fails."""

from __future__ import annotations

import pytest

from paritas.comparison.selections import RecordedSelection
from paritas.formats.dumps.selection import Selection
from unit.comparison.operand_samples import Side, found


def asked(fusion="", **given):
    return RecordedSelection(Selection.of(**given), fusion)


WHOLE = asked()
FUSED = asked(fusion="on")


def alone(matches):
    """Names of what has no counterpart and fails, and of what was not selected."""
    failing = [pair for pair in matches.pairs if pair.my is None or pair.golden is None]
    both = (failing, matches.not_selected)
    return [[pair.leading.record.site.name for pair in pairs] for pairs in both]


def fx(*names, **more):
    side = Side("fx", "node", graph="graph_0", **more)
    for name in names:
        side.add(name, op=f"aten.{name}.default", nodes=(name,), module=f"m.{name}")
    return side


def test_steps_that_the_other_dump_was_not_asked_for_are_not_selected():
    my = fx("a", step=1)
    golden = Side("fx", "node", graph="graph_0")
    for step in (0, 1, 2, 3):
        golden.add("a", op="aten.a.default", nodes=("a",), module="m.a", step=step)
    matches = found(my, golden, asked=(asked(steps=[1, 2]), WHOLE))
    failing = [pair.golden.step for pair in matches.pairs if pair.my is None]
    assert failing == [2]  # asked for, and not there
    assert [pair.golden.step for pair in matches.not_selected] == [0, 3]
    (note,) = matches.notes
    assert note == (
        "2 golden values were not selected when my dump was recorded (steps 1|2); they are listed "
        "but cannot fail"
    )


def test_each_side_may_have_been_asked_for_a_part():
    my, golden = fx("a", "b"), fx("b", "c")
    matches = found(my, golden, asked=(asked(layers=["a", "b"]), asked(layers=["b", "c"])))
    assert alone(matches) == [[], ["a", "c"]]
    mine, theirs = matches.notes
    assert mine.startswith("1 my value was not selected when the golden dump was recorded (layers ")
    assert theirs == (
        "1 golden value was not selected when my dump was recorded (layers a, b); it is listed but "
        "cannot fail"
    )


def test_nothing_in_common_leaves_nothing_to_compare():
    matches = found(fx("a"), fx("b"), asked=(asked(layers=["a"]), asked(layers=["b"])))
    assert matches.pairs == []  # of which the verdict is unverified
    assert len(matches.not_selected) == 2


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"layers": ["A", "gone"]}, ["gone"]),
        ({"layers": ["m.gone"]}, ["gone"]),
        ({"ops": ["aten.gone"]}, ["gone"]),
        ({"phases": ["forward"]}, ["b", "gone"]),
        ({"phases": ["backward"]}, []),
        ({"ranks": [1]}, []),
        ({"mode": "input"}, []),
        ({"mode": "output"}, ["b", "gone"]),
        ({}, ["b", "gone"]),
    ],
    ids=str,
)
def test_what_was_asked_for_and_is_missing_still_fails(given, left):
    matches = found(fx("a"), fx("a", "b", "gone"), asked=(asked(**given), WHOLE))
    assert alone(matches) == [left, [name for name in ("b", "gone") if name not in left]]


def test_what_was_not_selected_is_not_guessed_by_order():
    my = fx("kept").add("mine", op="aten.b.default", nodes=("mine",))
    golden = fx("kept", "b")
    guessed = found(my, golden)
    assert [pair.matched_by for pair in guessed.pairs] == ["id", "order"]
    matches = found(my, golden, asked=(asked(layers=["kept", "mine"]), WHOLE))
    assert alone(matches) == [["mine"], ["b"]]


def test_names_of_a_dump_that_mean_nothing_on_the_other_side_excuse_nothing():
    eager = Side().add("net.a/aten.a", module="net.a", op="aten.a.default")
    eager.add("net.b/aten.b", (4, 4), module="net.b", op="aten.b.default")
    graph = fx("a")
    named = found(graph, eager, asked=(asked(layers=["a"]), WHOLE))
    assert alone(named)[1] == []
    by_module = found(graph, eager, asked=(asked(layers=["net.a"]), WHOLE))
    assert alone(by_module)[1] == ["net.b/aten.b"]


# --- fused code -----------------------------------------------------------------------------------


def buffer(dump, name, nodes, **site):
    facts = {"op": "aten.x.default", "kernel": f"k_{name}", "nodes": tuple(nodes)}
    return dump.add(name, source="fused", level="buffer", **{**facts, **site})


def nodes_with_inputs():
    golden = Side("fx", "node", graph="graph_0")
    made = ""
    for name in ("a", "b", "c", "d"):
        if made:
            golden.add(name, side="input", nodes=(made,), op="aten.x.default")
        golden.add(name, nodes=(name,), op="aten.x.default")
        made = name
    return golden


def fused():
    return Side("fused", "node", graph="graph_0")


def test_inside_of_a_selected_buffer_nothing_is_missing():
    my = buffer(fused(), "c", ["a", "b", "c"])
    matches = found(my, nodes_with_inputs(), asked=(asked("on", layers=["b"]), WHOLE))
    assert alone(matches) == [[], ["d"]]
    assert sorted(matches.skipped) == [
        "2 nodes inside fused kernels; compared at their outputs",
        "3 inputs of nodes; compared where computed or read",
    ]


def test_of_inputs_alone_what_kernels_read_is_compared_and_the_rest_not_selected():
    my = buffer(fused(), "d", ["b"], side="input")
    matches = found(my, nodes_with_inputs(), asked=(asked("on", mode="input"), WHOLE))
    # What `d` is given is the output of `c`, which stays inside of the kernel.
    assert alone(matches) == [[], ["a", "c", "d", "d"]]


@pytest.mark.parametrize(("fusion", "fails"), [("on", True), ("GraphFusion: ALL off", False)])
def test_code_that_is_fused_otherwise_has_the_value_alone(fusion, fails):
    my = buffer(fused(), "erf", ["erf"])
    golden = buffer(buffer(fused(), "erf", ["erf"]), "mul", ["erf", "mul"])
    matches = found(my, golden, asked=(asked(fusion, layers=["erf"]), FUSED))
    assert alone(matches) == ([["mul"], []] if fails else [[], ["mul"]])
