"""The switch file: what is read, what is refused, and which settings come of it."""

from __future__ import annotations

import json

import pytest

from paritas.core.errors import UsageError
from paritas.core.torch_private import inductor
from paritas.formats.foreign.fusion_switch import EXAMPLE, PASSES, is_ascend_name, load_switch


def switch(tmp_path, content):
    path = tmp_path / "fusion.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_switch(path)


def sections(graph=None, kernel=None):
    return {"Switch": {"GraphFusion": graph or {}, "UBFusion": kernel or {}}}


def test_the_example_turns_everything_off(tmp_path):
    found = switch(tmp_path, EXAMPLE)
    options = found.inductor_options()
    assert found.describe() == "GraphFusion: ALL off; UBFusion: ALL off"
    assert options["pattern_matcher"] is False
    assert options["layout_optimization"] is False
    assert options["max_fusion_size"] == 1
    assert options["epilogue_fusion"] is False
    assert "PASS_PATTERN_0" in options["disabled_passes"]
    assert isinstance(options["post_grad_custom_post_pass"], inductor.Materialize)


def test_graph_and_kernel_fusion_are_turned_off_apart(tmp_path):
    graph = switch(tmp_path, sections({"ALL": "off"})).inductor_options()
    kernel = switch(tmp_path, sections(None, {"ALL": "off"})).inductor_options()
    assert "max_fusion_size" not in graph
    assert "pattern_matcher" not in kernel
    assert "disabled_passes" not in kernel


def test_everything_on_sets_nothing(tmp_path):
    found = switch(tmp_path, sections({"ALL": "on"}, {"ALL": "on", "inlining": "on"}))
    assert found.inductor_options() == {}


def test_a_single_pass_is_turned_off_by_its_name(tmp_path):
    found = switch(tmp_path, sections({"remove_noop_ops": "off"}, {"epilogue_fusion": "off"}))
    options = found.inductor_options()
    assert options["disabled_passes"] == "REMOVE_NOOP_OPS"
    assert "pattern_matcher" not in options
    assert options["epilogue_fusion"] is False
    assert "max_fusion_size" not in options


@pytest.mark.parametrize("order", [("ALL", "pass_pattern_0"), ("pass_pattern_0", "ALL")])
def test_a_name_of_its_own_says_more_than_all(order, tmp_path):
    values = {"ALL": "off", "pass_pattern_0": "on"}
    options = switch(tmp_path, sections({name: values[name] for name in order})).inductor_options()
    # Turning pattern matching off would take the pass with it that is to stay on.
    assert "pattern_matcher" not in options
    assert "PASS_PATTERN_0" not in options["disabled_passes"].split(",")
    assert "PASS_PATTERN_1" in options["disabled_passes"].split(",")


def test_passes_without_which_a_graph_cannot_be_lowered_are_not_offered():
    names = inductor.graph_names()
    assert not [name for name in names if "decompose" in name or "custom" in name]


def refusal(tmp_path, content):
    with pytest.raises(UsageError) as caught:
        switch(tmp_path, content)
    return str(caught.value).replace(str(tmp_path / "fusion.json"), "FILE")


def test_an_unknown_pass_is_an_error_that_names_the_known_ones_nearest_first(tmp_path):
    message = refusal(tmp_path, sections({"remove_noop": "off"}))
    assert message.startswith(
        "FILE: GraphFusion has no 'remove_noop'; the names are remove_noop_ops, "
    )
    assert all(name in message for name in ("ALL", *inductor.graph_names()))


def test_an_unknown_kernel_fusion_is_an_error_that_names_the_known_ones(tmp_path):
    message = refusal(tmp_path, sections(None, {"epilogue": "off"}))
    assert message.startswith("FILE: UBFusion has no 'epilogue'; the names are epilogue_fusion, ")


def test_an_unknown_section_is_an_error(tmp_path):
    message = refusal(tmp_path, {"Switch": {"GraphFusions": {"ALL": "off"}}})
    assert message == "FILE: unknown section 'GraphFusions'; the sections are GraphFusion, UBFusion"


def test_a_value_other_than_on_and_off_is_an_error(tmp_path):
    message = refusal(tmp_path, sections({"ALL": False}))
    assert message == 'FILE: GraphFusion, ALL: false; give "on" or "off"'


@pytest.mark.parametrize("content", [{}, [], {"Switch": {}}, {"Switch": 3}, {"GraphFusion": {}}])
def test_another_structure_is_an_error_that_shows_the_right_one(content, tmp_path):
    message = refusal(tmp_path, content)
    assert message == (
        f"the fusion switch file FILE contains {json.dumps(content)}; give, for example, {EXAMPLE}"
    )


def test_a_section_that_is_no_table_is_an_error(tmp_path):
    message = refusal(tmp_path, {"Switch": {"UBFusion": "off"}})
    assert message == 'FILE: UBFusion is "off"; give names with on or off'


def test_what_is_no_json_is_an_error_with_the_place(tmp_path):
    message = refusal(tmp_path, '{"Switch": ')
    assert message.startswith("the fusion switch file FILE is not JSON: Expecting value: line 1")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UsageError) as caught:
        load_switch(tmp_path / "none.json")
    assert str(caught.value) == (
        f"the fusion switch file {tmp_path / 'none.json'} cannot be read: No such file or directory"
    )


# --- names of Ascend's passes ---------------------------------------------------------------------


def test_every_pass_means_names_that_are_known_here_or_nothing():
    known = {*inductor.graph_names(), *inductor.kernel_names()}
    for name, found in PASSES.items():
        assert is_ascend_name(name)
        assert known.intersection(found.here) or not found.here, name


def test_a_pass_of_ascends_is_taken_for_what_does_its_work_here(tmp_path):
    found = switch(
        tmp_path,
        sections({"MatMulBiasAddFusionPass": "off"}, {"TbeReduceElemwiseFusionPass": "off"}),
    )
    assert found.graph == {"pattern_matcher": False}
    assert found.kernel == {"loop_fusion": False, "inlining": False}
    options = found.inductor_options()
    assert options["pattern_matcher"] is False
    assert options["max_fusion_size"] == 1
    assert found.notes == (
        (
            "GraphFusion: MatMulBiasAddFusionPass off means pattern_matcher in Inductor (a matrix "
            "product and its bias)"
        ),
        (
            "UBFusion: TbeReduceElemwiseFusionPass off means loop_fusion, inlining in Inductor (a "
            "reduction and elementwise operators)"
        ),
    )


def test_a_pass_may_be_of_the_other_section_here_or_of_none(tmp_path):
    found = switch(tmp_path, sections({"ConvConcatFusionPass": "off", "PoolingFusionPass": "off"}))
    assert (found.graph, found.kernel) == ({}, {"pointwise_cat": False})
    assert found.notes[1] == (
        "GraphFusion: PoolingFusionPass off means nothing in Inductor (pooling turned into a "
        "convolution)"
    )


def test_all_but_one_pass_is_off_and_the_name_of_the_own_says_most(tmp_path):
    graph = {"ALL": "off", "SoftmaxFusionPass": "on"}
    kernel = {"loop_fusion": "on", "TbeEltwiseFusionPass": "off", "AutomaticUbFusion": "on"}
    found = switch(tmp_path, sections(graph, kernel))
    assert found.graph == {"pattern_matcher": True, "ALL": False}
    assert found.kernel == {"loop_fusion": True, "horizontal_fusion": False, "inlining": False}


def test_an_unknown_pass_is_noted_with_the_nearest_known_one(tmp_path):
    with pytest.warns(UserWarning, match="has no effect: paritas does not know this pass"):
        found = switch(tmp_path, sections({"SoftMaxFusionPasses": "off", "ALL": "on"}))
    assert found.notes == (
        (
            "GraphFusion: SoftMaxFusionPasses off has no effect: paritas does not know this "
            "pass; the closest known one is SoftmaxFusionPass (the parts of a softmax)"
        ),
    )
    assert found.inductor_options() == {}
