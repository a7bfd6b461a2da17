"""Reading real graph checkpoints of nnScaler."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from paritas.core.operators.calls import OperatorCall
from paritas.sharding.graphs.calls import Graph, GraphCall, TensorValue
from paritas.sharding.graphs.checkpoints import read_checkpoint
from paritas.sharding.operators.annotation import Annotation
from unit.sharding.graphs.ckp_files import BLOCK, GATHER, NORMS

# What nnScaler itself would split: `idx,dim` of each identifier that its annotation leaves free,
# where it first occurs.
OPTIONS = {
    GATHER: {
        "linear_1": "0,0 1,0",
        "gather_3": "0,0",
        "sum_4": "0,0 0,1",
        "sum_5": "0,0",
        "sum_6": "0,0 0,1",
        "add_7": "",
    },
    BLOCK: {
        "embedding_1": "0,0 0,1 1,0 1,1",
        **dict.fromkeys(("layernorm_3", "layernorm_27"), "0,0 0,1"),
        **dict.fromkeys((f"linear_{n}" for n in (4, 8, 12, 25, 32)), "0,0 0,1 0,2 1,0"),
        **dict.fromkeys(("linear_28", "linear_30"), "0,0 0,1 1,0"),
        **dict.fromkeys(("view_6", "view_10", "view_14", "reshape_24"), "0,0 0,1 0,2"),
        **dict.fromkeys((f"transpose_{n}" for n in (7, 11, 15, 16, 23)), "0,0 0,1 0,2 0,3"),
        "mul_20": "0,0 0,1 0,2 0,3",
        **dict.fromkeys(("matmul_17", "matmul_22"), "0,0 0,1 0,2 0,3 1,3"),
        **dict.fromkeys(("softmax_21", "add_26", "gelu_29", "add_31"), "0,0 0,1 0,2"),
        "view_33": "0,0 0,2",
        "view_34": "0,0",
        "cross_entropy_35": "",
    },
    NORMS: {
        "conv2d_1": "0,0 1,0",
        "wrap_batchnorm2d_func_3": "0,0 0,1",
        "gelu_4": "0,0 0,1 0,2 0,3",
        "wrap_instancenorm2d_func_6": "0,0",
        "sum_7": "0,0 0,1 0,2 0,3",
    },
}


@pytest.fixture(scope="module")
def block() -> Graph:
    return read_checkpoint(BLOCK)


@pytest.fixture(scope="module")
def gather() -> Graph:
    return read_checkpoint(GATHER)


def named(graph: Graph, name: str) -> GraphCall:
    return next(call for call in graph.calls if call.name == name)


def test_every_node_is_a_call_and_counted(block: Graph, gather: Graph) -> None:
    assert (block.kind, block.name) == ("nnscaler", "transformer_block.ckp")
    assert [len(graph.calls) for graph in (block, gather)] == [63, 14]
    for graph in (block, gather):
        assert [call.position for call in graph.calls] == list(range(len(graph.calls)))
        assert len({call.name for call in graph.calls}) == len(graph.calls)
    written = "a checkpoint in the format of nnScaler 0.9, pickle protocol 4; its code was not run"
    assert block.notes == (
        f"graph Block: {written}",
        "nodes: 28 IRBpOperation, 29 IRDimops, 6 IRPyFunc",
    )
    assert gather.notes[1] == "nodes: 7 IRBpOperation, 6 IRDimops, 1 IRFwOperation"


def test_the_operators_are_those_of_the_model(gather: Graph, block: Graph) -> None:
    assert [call.operator for call in gather.calls[:7]] == [
        "torch.nn.functional.linear", "torch.relu", "torch.gather", "torch.sum", "torch.sum",
        "torch.sum", "torch.add",
    ]  # fmt: skip
    counts = collections.Counter(call.operator for call in block.calls)
    assert counts["torch.autograd.grad"] == 28
    assert counts["torch.nn.functional.linear"] == 7
    assert counts["torch.transpose"] == counts["torch.Tensor.view"] == 5


def test_a_node_has_its_tensors_its_line_and_its_module(gather: Graph) -> None:
    x = TensorValue("x", (4, 8), torch.float32, "input")
    weight = TensorValue("lin.weight", (8, 8), torch.float32, "parameter")
    bias = TensorValue("lin.bias", (8,), torch.float32, "parameter")
    assert gather.calls[0] == GraphCall(
        position=0,
        name="linear_1",
        operator="torch.nn.functional.linear",
        args=(x, weight, bias),
        kwargs={},
        outputs=(TensorValue("linear", (4, 8), torch.float32),),
        annotation="a k^, n k^, n -> a n",
        source="model.py:30",
        code="y=torch.relu(s.lin(x)); z=torch.gather(y,1,idx)",
        module="lin",
    )


def test_plain_arguments_are_what_they_were(gather: Graph, block: Graph) -> None:
    index = TensorValue("idx", (4, 8), torch.int64, "input", requires_grad=False)
    call = named(gather, "gather_3")
    assert call.args[1:] == (1, index)
    assert call.annotation == "a b^, ?, a b^ -> a b^"
    assert named(gather, "sum_4").kwargs == {"dim": (0,), "keepdim": False}
    assert named(block, "mul_20").args[1] == 0.25
    assert named(block, "view_6").kwargs == {"size": (2, 16, 4, 16)}
    assert named(block, "embedding_1").kwargs == {"padding_idx": None, "start": 0, "stop": 512}


def test_an_argument_that_no_function_of_torch_takes_is_left_out(block: Graph) -> None:
    call = named(block, "softmax_21")
    assert (call.operator, dict(call.kwargs)) == ("torch.softmax", {"dim": -1, "dtype": None})


def test_a_tensor_without_dimensions_has_none(gather: Graph) -> None:
    assert named(gather, "sum_5").outputs[0].shape == ()
    assert [value.shape for value in named(gather, "add_7").tensors()] == [(), ()]
    assert named(gather, "add_7").annotation == "1, 1 -> 1"


def test_an_operator_that_nnscaler_does_not_know_has_no_annotation(gather: Graph) -> None:
    call = named(gather, "relu_2")
    assert (call.operator, call.annotation, call.idle) == ("torch.relu", None, "")


def test_what_there_is_nothing_to_check_of_says_so(block: Graph) -> None:
    reasons = collections.Counter(call.idle for call in block.calls if call.idle)
    assert reasons["Python code on plain values, which returns no tensor"] == 5
    taken = "it reads a part or an attribute of a value: there is nothing to split"
    assert named(block, "getattr_2").idle == taken
    assert block.calls[35].idle == "a backward pass, checked with its forward call"
    assert sum(not call.idle for call in block.calls) == 29


def test_values_are_inputs_and_parameters(block: Graph) -> None:
    kinds = {name: value.kind for name, value in block.values.items()}
    assert [name for name, kind in kinds.items() if kind == "input"] == ["ids", "labels"]
    assert len(kinds) == 16
    assert block.values["emb.weight"].shape == (512, 64)
    assert not block.values["ids"].requires_grad


def test_rules_that_are_code_are_written_as_numbers(block: Graph) -> None:
    assert {call.annotation for call in block.calls if "view" in call.operator} == {
        "a b (c 16) -> a b c 16 ; size[0]=a, size[1]=b, size[2]=c",
        "a 16 b -> (a 16) b ; size[0]=(a 16), size[1]=b",
        "a 16 -> (a 16) ; size[0]=(a 16)",
    }
    shape = "shape[0]=a, shape[1]=b, shape[2]=(c 16)"
    assert named(block, "reshape_24").annotation == f"a b c 16 -> a b (c 16) ; {shape}"
    table = "a b, n+ e -> a b e ; start:stop=n"
    assert named(block, "embedding_1").annotation == table


@pytest.mark.parametrize("path", OPTIONS, ids=lambda path: str(path.stem))
def test_annotations_give_the_options_of_nnscaler(path: Any) -> None:
    found = {
        call.name: " ".join(
            f"{option.idx},{option.dim}"
            for option in Annotation.parse(call.annotation).options(hollow(call))
        )
        for call in read_checkpoint(path).calls
        if call.annotation is not None
    }
    assert found == OPTIONS[path]


def hollow(call: GraphCall) -> OperatorCall:
    """The call with tensors that have a shape and no values."""

    def made(value: Any) -> Any:
        if isinstance(value, TensorValue):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value

    return OperatorCall(print, tuple(map(made, call.args)), dict(call.kwargs), call.operator)


def test_norms_are_read_with_what_their_ranks_exchange_or_keep() -> None:
    """The file does not hold the code that nnScaler writes for a rank: the name implies it."""
    graph = read_checkpoint(NORMS)
    assert named(graph, "wrap_batchnorm2d_func_3").annotation == (
        "n c h^ w^, c, c, c, c, 1 -> n c h^ w^ ; process_group=ranks(n)"
    )
    assert named(graph, "wrap_instancenorm2d_func_6").annotation == (
        "n c^ h^ w^, c^, c^, c^ : @n, c^ : @n -> n c^ h^ w^"
    )
