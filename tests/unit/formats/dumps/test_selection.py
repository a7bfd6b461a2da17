"""Which steps, places, sides and ranks a selection wants, and what it says of what never came."""

from __future__ import annotations

import re

import numpy as np
import pytest

from paritas.core.errors import UsageError
from paritas.formats.dumps.selection import Selection, SelectionFilter
from paritas.formats.files.records import Site


def module(name, op="Linear", **more):
    return Site(source="eager", level="module", name=name, module=name, op=op, **more)


def operator(path, op, **more):
    return Site(source="eager", level="op", name=f"{path}/{op}", module=path, op=op, **more)


def node(name, op="aten.add.Tensor", **more):
    return Site(source="fx", level="node", name=name, op=op, **more)


def wanted(selection, *sites):
    sieve = SelectionFilter(selection)
    return [sieve.wants(site) for site in sites]


# --- Ascend's names -------------------------------------------------------------------------------


def test_operators_may_be_named_as_in_the_graph_engine():
    names = ["add", "convolution", "convolution_1", "addmm_1", "sum_1", "sum_2", "where", "select"]
    sites = [node(name) for name in names]

    def chosen(*layers):
        taken = wanted(Selection.of(layers=layers), *sites)
        return [name for name, is_wanted in zip(names, taken, strict=True) if is_wanted]

    assert chosen("Add", "Conv_1") == ["add", "convolution_1"]
    assert chosen("Conv2D", "MatMulV2_1") == ["convolution", "addmm_1"]
    assert chosen("ReduceSum", "ReduceSumD_1") == ["sum_1", "sum_2"]
    assert chosen("Select") == ["where", "select"]
    assert chosen("select") == ["select"], "torch's spelling is torch's operator"


def test_a_name_of_the_graph_engine_that_matches_nothing_is_reported_once():
    sieve = SelectionFilter(Selection.of(layers=["Conv_7"]))
    sieve.wants(node("convolution"))
    sieve.saw_step(0)
    assert sieve.report_unmatched() == [
        "layers: 'Conv_7' matched none of 1 name; the most similar: 'convolution'"
    ]


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, [3]),
        ([1, 2, 5], [1, 2, 5]),
        ("2-4", [2, 3, 4]),
        ("0|1|3-5|7", [0, 1, 3, 4, 5, 7]),
        (["0", "2-3", 6], [0, 2, 3, 6]),
        (range(2, 5), [2, 3, 4]),
        (range(0, 8, 3), [0, 3, 6]),
        ([0, range(4, 6)], [0, 4, 5]),
        (np.array([1, 4]), [1, 4]),
    ],
)
def test_steps_are_numbers_ranges_or_text(steps, expected):
    selection = Selection.of(steps=steps)
    assert [step for step in range(8) if selection.wants_step(step)] == expected


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([-1], "steps=[-1]: -1 is not a step; steps are numbers from 0"),
        ([2, 1], "steps=[2, 1]: 1 comes after 2; list steps in ascending order, each once"),
        ([1, 1], "steps=[1, 1]: 1 comes after 1; list steps in ascending order, each once"),
        ("2-5|4", "steps='2-5|4': 4 comes after 5; list steps in ascending order, each once"),
        ("5-2", "steps='5-2': '5-2' is not a step or range; write 3, 2-5 or 0|1|2-5|6"),
        ("all", "steps='all': 'all' is not a step or range; write 3, 2-5 or 0|1|2-5|6"),
        ("", "steps='': '' is not a step or range; write 3, 2-5 or 0|1|2-5|6"),
        ([1.5], "steps=[1.5]: 1.5 is not a step; steps are numbers from 0"),
        ([True], "steps=[True]: True is not a step; steps are numbers from 0"),
        (2.0, "steps=2.0 is not valid: use numbers, ranges such as '2-5', or a list of them"),
        ([], "steps=[] selects nothing; omit it to record all steps"),
        (range(3, -3, -1), "steps=range(3, -3, -1): -1 is not a step; steps are numbers from 0"),
    ],
)
def test_steps_that_make_no_sense_are_refused_with_their_value(steps, complaint):
    with pytest.raises(UsageError) as caught:
        Selection.of(steps=steps)
    assert str(caught.value) == complaint


def test_each_nth_step_is_counted_from_the_first():
    selection = Selection.of(every=3)
    assert [step for step in range(8) if selection.wants_step(step)] == [0, 3, 6]
    both = Selection.of(every=2, steps="3-6")
    assert [step for step in range(8) if both.wants_step(step)] == [4, 6]


def test_a_step_that_every_leaves_out_is_refused():
    with pytest.raises(UsageError, match="steps: 3 is never recorded with every=2"):
        Selection.of(steps=[2, 3], every=2)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("mode", "outputs", "mode='outputs' is not supported: use one of input, output, all"),
        ("every", 0, "every must be a whole number, 1 or more, got 0"),
        ("every", True, "every must be a whole number, 1 or more, got True"),
        ("layers", [], "layers=[] selects nothing; omit it to record all"),
        ("layers", [3], "layers: 3 is not a name or glob; use text such as 'layers.0'"),
        ("ops", [" "], "ops: ' ' is not a name or glob; use text such as 'layers.0'"),
        ("ranks", [-1], "ranks: -1 is not a rank; ranks are numbers from 0"),
        ("ranks", [], "ranks=[] selects nothing; omit it to record all"),
        ("phases", "sideways", "phases='sideways' is not supported: use one of forward, backward"),
        ("phases", (), "phases=() selects nothing; omit it to record all"),
    ],
)
def test_other_criteria_that_make_no_sense_are_refused(field, value, complaint):
    with pytest.raises(UsageError) as caught:
        Selection.of(**{field: value})
    assert str(caught.value) == complaint


def test_ranks_are_a_number_or_several():
    assert Selection.of().wants_rank(7)
    assert [Selection.of(ranks=2).wants_rank(rank) for rank in range(4)] == [0, 0, 1, 0]
    assert [Selection.of(ranks=[0, 3]).wants_rank(rank) for rank in range(4)] == [1, 0, 0, 1]


def test_a_selection_describes_what_was_asked_for_and_nothing_else():
    assert Selection.of().describe() == {}
    asked = Selection.of(mode="input", steps="0|2-5", layers="a.*", ops=["mm", "bmm"], every=1)
    assert asked.describe() == {
        "mode": "input",
        "steps": "0|2-5",
        "layers": "a.*",
        "ops": "mm, bmm",
    }


# --- places ---------------------------------------------------------------------------------------


def test_a_module_brings_all_that_is_inside_it():
    inside = [
        module("layers.0"),
        module("layers.0.attn"),
        operator("layers.0.attn.q", "aten.mm.default"),
        Site(source="eager", level="parameter", name="layers.0.w", module="layers.0"),
        node("mm_1", module="layers.0.mlp"),
    ]
    outside = [module("layers"), module("layers.01"), module("layers.1"), node("add")]
    selection = Selection.of(layers="layers.0")
    assert wanted(selection, *inside) == [True] * 5
    assert wanted(selection, *outside) == [False] * 4


def test_globs_match_modules_at_any_depth():
    sites = [module("layers.0.attn.q"), module("layers.1.attn"), module("layers.1.mlp")]
    assert wanted(Selection.of(layers=["layers.*.attn"]), *sites) == [True, True, False]


def test_names_of_nodes_match_whatever_their_case():
    sites = [node("add"), node("add_1"), node("conv_1"), node("conv_10")]
    assert wanted(Selection.of(layers=["Add", "Conv_1"]), *sites) == [True, False, True, False]


def test_a_buffer_is_found_by_each_node_it_stands_for():
    buffer = Site(source="fused", level="buffer", name="buf3", nodes=("mm", "relu"))
    assert wanted(Selection.of(layers=["relu"]), buffer) == [True]
    assert wanted(Selection.of(layers=["buf3"]), buffer) == [True]
    assert wanted(Selection.of(layers=["tanh"]), buffer) == [False]


@pytest.mark.parametrize("pattern", ["aten.mm", "aten.mm.default", "mm", "aten.m*", "m?"])
def test_an_operator_goes_by_several_names(pattern):
    sites = [operator("a", "aten.mm.default"), operator("a", "aten.bmm.default"), module("mm")]
    assert wanted(Selection.of(ops=pattern), *sites) == [True, False, False]


def test_modules_are_selected_by_their_class():
    sites = [module("a", "Linear"), module("b", "LinearNorm"), operator("a", "aten.linear.default")]
    assert wanted(Selection.of(ops=["Linear"]), *sites) == [True, False, False]


def test_layers_and_ops_must_both_match():
    sites = [module("a", "Linear"), module("a", "ReLU"), module("b", "Linear")]
    assert wanted(Selection.of(layers="a", ops="Linear"), *sites) == [True, False, False]


def test_sides_and_phases():
    sites = [
        module("a", side=side, phase=phase)
        for phase in ("forward", "backward")
        for side in ("input", "output")
    ]
    assert wanted(Selection.of(mode="input"), *sites) == [True, False, True, False]
    assert wanted(Selection.of(mode="output"), *sites) == [False, True, False, True]
    assert wanted(Selection.of(phases="backward"), *sites) == [False, False, True, True]


# --- what never came ------------------------------------------------------------------------------


def after(selection, sites, steps=(0,)):
    sieve = SelectionFilter(selection)
    for site in sites:
        sieve.wants(site)
    for step in steps:
        sieve.saw_step(step)
    return sieve.report_unmatched()


def test_each_pattern_that_met_nothing_is_told_with_the_nearest_names():
    sites = [module(f"layers.{n}.{part}") for n in range(2) for part in ("attn", "mlp")]
    problems = after(Selection.of(layers=["layers.0", "layer.*.attention", "mpl"]), sites)
    assert problems == [
        f"layers: {pattern} matched none of 7 names; the most similar: {nearest}"
        for pattern, nearest in (
            ("'layer.*.attention'", "'layers.0.attn', 'layers.1.attn', 'layers.0'"),
            ("'mpl'", "'layers.0.mlp', 'layers.1.mlp', 'layers'"),
        )
    ]


def test_an_operator_that_never_came_is_told_with_the_nearest():
    sites = [operator("a", "aten.addmm.default"), operator("a", "aten.relu.default")]
    assert after(Selection.of(ops=["mm"]), sites) == [
        "ops: 'mm' matched none of 2 names; the most similar: 'aten.addmm'"
    ]


def test_steps_that_never_came_are_told():
    selection = Selection.of(steps=[1, "3-5", 7])
    assert after(selection, [module("a")], steps=range(3)) == [
        "steps: 3-5 did not run; the program ran steps 0 to 2",
        "steps: 7 did not run; the program ran steps 0 to 2",
    ]
    assert after(Selection.of(steps=[1]), [], steps=[0]) == [
        "steps: 1 did not run; the program ran step 0"
    ]


def test_a_range_of_which_some_came_is_content():
    assert after(Selection.of(steps="1-100"), [module("a")], steps=range(3)) == []


def test_patterns_are_not_blamed_when_no_wanted_step_came():
    assert after(Selection.of(steps=[5], layers=["b"]), [], steps=[0, 1]) == [
        "steps: 5 did not run; the program ran steps 0 to 1"
    ]


def test_a_phase_that_never_came_is_told():
    assert after(Selection.of(phases="backward"), [module("a")]) == [
        "phases: 'backward' did not run, only forward"
    ]


def test_layers_and_ops_that_exclude_each_other_are_told():
    sites = [module("a", "Linear"), module("b", "ReLU")]
    (problem,) = after(Selection.of(layers="a", ops="ReLU"), sites)
    assert problem == (
        "layers and ops: each pattern matched something, but no value matched both; "
        "use only one of them"
    )


def test_a_selection_that_was_met_has_no_complaint():
    selection = Selection.of(layers=["a"], ops=["Linear"], steps=[0], phases=["forward"])
    assert after(selection, [module("a"), module("b")]) == []


# --- what a dump says of it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"mode": "output"},
        {"steps": [1, 2, 5]},
        {"steps": "0|2-5", "every": 2},
        {"layers": ["Add", "Conv_1", "layers.*.attn"], "ops": ["aten.mm"]},
        {"ranks": [0, 3], "phases": ["backward"]},
    ],
    ids=str,
)
def test_what_was_asked_for_is_read_back_from_its_words(given):
    selection = Selection.of(**given)
    assert Selection.from_header(selection.describe()) == selection


@pytest.mark.parametrize("words", [{"containers": "{}"}, {"ranks": "a"}, {"steps": "two"}])
def test_words_of_something_else_are_refused(words):
    with pytest.raises(UsageError, match=r"^selection: |^steps="):
        Selection.from_header(words)


def test_several_names_in_one_text_are_refused_with_the_list_that_was_meant():
    message = "layers: 'attn, mlp' is one string for several names; use a list, ['attn', 'mlp']"
    with pytest.raises(UsageError, match=re.escape(message)):
        Selection.of(layers="attn, mlp")


def test_a_module_brings_what_was_fused_with_something_else():
    site = Site(source="fused", level="buffer", name="mul", op="aten.mul.Tensor", nodes=("erf",))
    within = (("erf", "net.gelu", "aten.erf.default"), ("mul", "net", "aten.mul.Tensor"))
    for asked in ({"layers": ["net.gelu"]}, {"layers": ["ERF"]}, {"ops": ["aten.erf"]}):
        assert SelectionFilter(Selection.of(**asked)).wants(site, within), asked
    for asked in ({"layers": ["net.norm"]}, {"ops": ["aten.exp"]}):
        assert not SelectionFilter(Selection.of(**asked)).wants(site, within), asked
