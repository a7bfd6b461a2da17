"""What the two real checkpoints lack: segments, classes of users, other rules and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paritas.core.errors import UsageError
from paritas.sharding.graphs.calls import Graph, TensorValue
from paritas.sharding.graphs.checkpoints import read_checkpoint
from unit.sharding.graphs.ckp_files import Writer

DIMOPS = "nnscaler.graph.function.dimops"


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(monkeypatch)


def read(folder: Path, data: bytes, **options: Any) -> Graph:
    path = folder / "graph.ckp"
    path.write_bytes(data)
    return read_checkpoint(path, **options)


def test_the_nodes_of_a_segment_stand_in_its_place(write: Writer, tmp_path: Path) -> None:
    x = write.tensor("x", (2, 3), 1)
    inner = [write.node("torch.relu", [x], [x], _id=number) for number in (2, 3)]
    segment = write.make("nnscaler.graph.segment.IRSegment", _id=7, name="part", _nodes=inner)
    last = write.node("torch.neg", [x], [x], _id=4)
    graph = read(tmp_path, write.graph([segment, last], [{"named": (x,)}]))
    assert [call.name for call in graph.calls] == ["relu_2", "relu_3", "neg_4"]
    assert graph.values == {"x": TensorValue("x", (2, 3), torch.float32, "input")}


def test_a_class_of_the_users_model_is_a_name_and_nothing_more(
    write: Writer, tmp_path: Path
) -> None:
    x = write.tensor("x", (2, 3), 1)
    stack = {"layers.0": write.kind("my_models.llama.Layer"), "layers.0.up": torch.nn.Linear}
    node = write.node("torch.relu", [x], [x], _module_stack=stack)
    assert read(tmp_path, write.graph([node])).calls[0].module == "layers.0.up"


def test_a_name_of_the_users_elsewhere_needs_its_module_to_be_named(
    write: Writer, tmp_path: Path
) -> None:
    x = write.tensor("x", (2, 3), 1)
    data = write.graph([write.node("torch.relu", [x], [x], _hook_meta=write.kind("mine.ops.hook"))])
    with pytest.raises(UsageError, match=r"`mine.ops.hook` at byte \d+.*`--import mine.ops`"):
        read(tmp_path, data)
    assert len(read(tmp_path, data, modules=["mine.ops"]).calls) == 1


def test_a_class_of_the_standard_library_is_none_of_a_model(write: Writer, tmp_path: Path) -> None:
    x = write.tensor("x", (2, 3), 1)
    node = write.node("torch.relu", [x], [x], _module_stack={"a": Path})
    with pytest.raises(
        UsageError, match="nnScaler graphs do not contain it; do not unpickle this file"
    ):
        read(tmp_path, write.graph([node]))


def test_slices_and_other_values_come_out_as_they_were(write: Writer, tmp_path: Path) -> None:
    x = write.tensor("x", (4, 3), 1)
    cut = write.call("dill._dill._load_type", "slice")
    kwargs = {
        "at": (
            write.call(cut, write.value("begin", 1), None, x),
            write.call("dill._dill._eval_repr", "Ellipsis"),
        ),
        "dtype": torch.bfloat16,
        "layout": torch.channels_last,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 2]),
        "nested": {"a": [write.value("n", {"b": (1, 2.5)})]},
    }
    call = read(tmp_path, write.graph([write.node("torch.x", [x], [x], _kwargs=kwargs)])).calls[0]
    assert call.obstacle == ""
    assert dict(call.kwargs) == {
        "at": (slice(1, None, TensorValue("x", (4, 3), torch.float32)), ...),
        "dtype": torch.bfloat16,
        "layout": torch.channels_last,
        "device": torch.device("cpu"),
        "size": (2, 2),
        "nested": {"a": [{"b": (1, 2.5)}]},
    }


def test_a_value_that_is_not_in_the_file_is_an_obstacle(write: Writer, tmp_path: Path) -> None:
    x = write.tensor("x", (4, 3), 1)
    unset = write.call(write.call("dill._dill._load_type", "object"))
    node = write.node("torch.roll", [x, write.value("steps", unset)], [x])
    call = read(tmp_path, write.graph([node])).calls[0]
    assert call.obstacle == "the file has no value for `steps`"


def test_kinds_of_tensors_are_distinguished(write: Writer, tmp_path: Path) -> None:
    given = write.tensor("x", (4,), 1, _requires_grad=False)
    weight = write.tensor("w", (4,), 2, _is_attr=True)
    mean = write.tensor("mean", (4,), 3, _is_attr=True, _requires_grad=False)
    same_name = write.tensor("x", (4,), 4)
    node = write.node("torch.f", [given, weight, mean], [same_name], _kwargs={"out": given})
    graph = read(tmp_path, write.graph([node], [given]))
    kinds = [(value.name, value.kind) for value in graph.calls[0].tensors()]
    assert kinds == [("x", "input"), ("w", "parameter"), ("mean", "buffer"), ("x", "input")]
    assert graph.calls[0].outputs[0].name == "x_4"
    assert list(graph.values) == ["x", "w", "mean"]


@pytest.mark.parametrize(
    ("kind", "signature", "idle"),
    [
        (
            "nnscaler.ir.operator.IRDataOperation",
            "next",
            "it loads data: there is nothing to split",
        ),
        (
            "nnscaler.graph.function.anchor.IRGraphAnchor",
            "nnscaler.runtime.function.anchor",
            "it marks a place in the graph and computes nothing",
        ),
        (
            "nnscaler.ir.operator.IRBpOperation",
            "torch.autograd.grad",
            "a backward pass, checked with its forward call",
        ),
        ("nnscaler.graph.function.pyfunc.IRPyFunc", "mine.makes_a_tensor", ""),
    ],
)
def test_other_nodes_say_what_they_are(
    kind: str, signature: str, idle: str, write: Writer, tmp_path: Path
) -> None:
    x = write.tensor("x", (4,), 1)
    node = write.node(signature, [x], [x], kind=kind)
    assert read(tmp_path, write.graph([node])).calls[0].idle == idle


# --- annotations ----------------------------------------------------------------------------------


def annotation(
    write: Writer, folder: Path, inputs: list[Any], outputs: list[Any], **fields: Any
) -> tuple[str | None, tuple[str, ...]]:
    x = write.tensor("x", (4, 6), 1)
    node = write.annotated(
        "mine.f", [x] * len(inputs), [x] * len(outputs), inputs_as=inputs, outputs_as=outputs,
        **fields,
    )  # fmt: skip
    graph = read(folder, write.graph([node]))
    return graph.calls[0].annotation, graph.notes[2:]


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        (["a k+", "n k+"], ["a n"], "a k+, n k+ -> a n"),
        (["(h+ d^) ?"], ["d^"], None),
        (["(h d^) k^", "?"], ["h d^ k^"], "(h d^) k^, ? -> h d^ k^"),
        (["(1 a b^)"], ["a b^"], "(a b^) -> a b^"),
        (["a b^", "a b"], ["a b"], "a b^, a b^ -> a b^"),
        (["a 64^"], ["a 1^"], "a 64 -> a 1"),
        ([], ["8^ 4^"], "-> 8 4"),
    ],
)
def test_annotations_are_spelled_in_our_language(
    inputs: list[str], outputs: list[str], text: str | None, write: Writer, tmp_path: Path
) -> None:
    shapes = [[write.shape_annotation(each) for each in side] for side in (inputs, outputs)]
    found, notes = annotation(write, tmp_path, *shapes)
    assert found == text
    assert bool(notes) == (text is None)


def test_gradients_that_are_whole_already_are_marked(write: Writer, tmp_path: Path) -> None:
    inputs = [
        write.shape_annotation("a b^", ("m", "a")),
        write.shape_annotation("m b^", ("",)),
        write.shape_annotation("?^", ("",)),
        write.shape_annotation("?"),
    ]
    found, _ = annotation(write, tmp_path, inputs, [write.shape_annotation("a m")])
    assert found == "a b^ : /m, m b^ : /, /, ? -> a m"


def rule(write: Writer, inputs: list[Any], outputs: list[Any], modifier: Any = None) -> Any:
    def split(what: Any) -> Any:
        dims = (what,) if isinstance(what, int) else None
        told = {"dims": dims, "rep": what == "whole", "val": what == "value"}
        return write.make(f"{DIMOPS}.DimopSplit", **told)

    return write.make(
        f"{DIMOPS}.TransformRule",
        _inputs=tuple(map(split, inputs)),
        _outputs=tuple(map(split, outputs)),
        _modifier=(modifier,),
        _no_grad_reduce_inputs=[],
    )


def test_a_rule_that_says_what_the_annotation_says_changes_nothing(
    write: Writer, tmp_path: Path
) -> None:
    shapes = [write.shape_annotation("a k+"), write.shape_annotation("n k+")]
    rules = (rule(write, [1, 1], ["value"]), rule(write, [0, "whole"], [0]))
    out = [write.shape_annotation("a n")]
    found, notes = annotation(write, tmp_path, shapes, out, _trans_rules=rules)
    assert (found, notes) == ("a k+, n k+ -> a n", ())


def test_a_rule_that_says_something_else_is_noted(write: Writer, tmp_path: Path) -> None:
    shapes = [write.shape_annotation("a k+"), write.shape_annotation("n k+")]
    rules = (rule(write, ["value", "whole"], ["value"]),)
    out = [write.shape_annotation("a n")]
    found, notes = annotation(write, tmp_path, shapes, out, _trans_rules=rules)
    assert found == "a k+, n k+ -> a n"
    assert notes == ("IRDimops f 1: one of its rules differs from its annotation: ignored",)


def test_a_rule_that_is_unknown_code_leaves_the_node_without_an_annotation(
    write: Writer, tmp_path: Path
) -> None:
    made_by = write.kind("nnscaler.graph.function.function.some_modifier")
    rules = (rule(write, [0], [0], made_by),)
    shapes = [write.shape_annotation("a b")]
    found, notes = annotation(write, tmp_path, shapes, shapes, _trans_rules=rules)
    assert found is None
    code = (
        "one of its rules is code (`nnscaler.graph.function.function.some_modifier`), which is not"
    )
    assert notes == (f"IRDimops f 1: {code} run; its splits are not read from the file",)


def test_an_annotation_of_another_number_of_values_is_noted(write: Writer, tmp_path: Path) -> None:
    x = write.tensor("x", (4, 6), 1)
    shape = write.shape_annotation("a b")
    node = write.annotated("mine.f", [x, 1], [x], inputs_as=[shape], outputs_as=[shape])
    graph = read(tmp_path, write.graph([node]))
    assert graph.calls[0].annotation is None
    assert (
        graph.notes[2] == "IRDimops f 1: its annotation has 1 -> 1 values, but the node has 2 -> 1"
    )
