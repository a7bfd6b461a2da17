"""What the code that Inductor generates tells of its buffers."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from integration.fused_graphs import Block, Listening, convolutional, perceptron

pytestmark = pytest.mark.slow


def bitwise(left, right):
    return all(
        torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
        for mine, theirs in zip(left, right, strict=True)
    )


def trained(model, x, options=None):
    """What the forward and the backward graph of a model told."""
    torch.compiler.reset()
    backend = Listening(options)
    torch.compile(model, backend=backend)(x).float().square().mean().backward()
    return backend.told


def told_of(function, *inputs, **how):
    torch.compiler.reset()
    backend = Listening()
    with torch.no_grad():
        torch.compile(function, backend=backend, **how)(*inputs)
    return backend.told


CASES = {"convolutional": (convolutional, (2, 3, 6, 6), torch.float32)}
# Others where all is asked for: see tests/README.md.
WHOLE = bool(os.environ.get("PARITAS_WHOLE_CORPUS"))
if WHOLE:
    CASES["perceptron"] = (perceptron, (3, 8), torch.float32)
    CASES["transformer"] = (Block, (2, 5, 16), torch.float32)
    CASES["perceptron in float64"] = (perceptron, (3, 8), torch.float64)


def told_in(case):
    build, shape, dtype = CASES[case]
    torch.manual_seed(0)
    return trained(build().to(dtype), torch.randn(shape, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("case", CASES)
def test_each_named_buffer_holds_the_value_of_its_node_and_listening_changes_no_bit(case):
    told = told_in(case)
    assert [one.lowered.is_backward for one in told] == [False, True]
    for one in told:
        assert one.wrong() == []
        named = [seen for seen, _ in one.outputs if seen.buffer.exact]
        assert len(named) >= 0.75 * len(one.outputs)
        assert bitwise(one.plain, one.listening)
        assert one.code.missed == ()
        heard = sum(len(kernel.reads) + len(kernel.writes) for kernel in one.code.kernels)
        assert heard == len(one.heard)


def plain():
    return nn.Sequential(nn.Linear(8, 4, bias=False), nn.GELU())


IN_BFLOAT16 = [(plain, (3, 8)), *([(Block, (2, 5, 16))] if WHOLE else [])]


@pytest.mark.parametrize(("build", "shape"), IN_BFLOAT16)
def test_in_bfloat16_named_buffers_hold_the_values_of_their_nodes_up_to_its_rounding(build, shape):
    torch.manual_seed(0)
    model, x = build().bfloat16(), torch.randn(shape, dtype=torch.bfloat16)
    for one in trained(model, x) if WHOLE else told_of(model, x):
        assert one.outputs
        assert one.wrong(allowed=0.05) == []


def test_a_buffer_stands_for_the_nodes_inside_of_its_kernel_and_is_told_before_it_is_reused():
    (one,) = told_of(
        lambda x, w: torch.tanh(x @ w).square() * 3, torch.randn(4, 5), torch.ones(5, 6)
    )
    product, fused = one.code.kernels
    assert product.writes[0].nodes == ("mm",)
    assert [buffer.exact for buffer in fused.reads] == ["mm"]
    assert fused.writes[0].nodes == ("tanh", "pow_1", "mul")
    assert fused.writes[0].exact == "mul"
    assert fused.name.startswith("cpp_fused")

    reads = [
        value for seen, value in one.heard if seen.side == "input" and seen.buffer.exact == "mm"
    ]
    assert torch.equal(reads[0], one.nodes["mm"])
    assert not torch.equal(reads[0], one.nodes["mul"])
    assert one.wrong() == []


def test_what_a_pass_made_of_several_nodes_is_named_after_the_last_of_them():
    (one,) = told_of(lambda a, b, c: torch.mm(a, b) + c, *(torch.randn(4, 4) for _ in range(3)))
    assert [str(node.target) for node in one.lowered.module.graph.nodes][3] == "aten.mm.default"
    (kernel,) = one.code.kernels
    assert kernel.name == "extern_kernels.addmm"
    assert kernel.writes[0].nodes == ("mm", "add")
    assert kernel.writes[0].exact == "add"
    assert one.wrong() == []


def test_inputs_that_are_written_to_are_told_as_they_are_left():
    def function(x, cache, place):
        cache.index_copy_(0, place, x * 2)
        cache.add_(1)
        return cache.sum()

    place = torch.tensor([1, 3])
    (one,) = told_of(function, torch.randn(2, 6), torch.zeros(5, 6), place)
    assert one.wrong() == []
    written = [value for seen, value in one.outputs if seen.buffer.exact == "copy_"]
    assert len(written) == 1
    assert bitwise(one.plain, one.listening)


OPERATORS = {
    "scatter": lambda x, i: torch.zeros(5, 8).scatter_reduce(
        0, i[:, None].expand(-1, 8), x, "amax"
    ),
    "index_put": lambda x, i: torch.zeros(5, 8).index_put((i,), x, accumulate=True).exp(),
    "cat": lambda x, i: torch.cat([x.relu(), x @ x.T, x.sum(1, keepdim=True)], 1) * 2,
    "several results": lambda x, i: [part * 2 for part in torch.topk(x, 3)],
    "fallback": lambda x, i: torch.linalg.qr(x)[1].abs(),
    "split reduction": lambda x, i: (x.repeat(500, 60).exp().sum(), x.var()),
    "complex": lambda x, i: torch.fft.fft(x).abs(),
    "random": lambda x, i: torch.rand(4, 8) + F.dropout(x[:4], 0.5),
    "branch": lambda x, i: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
}


# The nodes of which a buffer must be heard, for each of them.
HEARD = {
    "scatter": {"scatter_reduce"},
    "index_put": {"index_put", "exp"},
    "cat": {"relu", "mm", "sum_1", "cat", "mul"},
    "several results": {"getitem", "getitem_1", "mul_1", "mul_2"},
    "fallback": {"getitem_3", "abs_1"},
    "split reduction": {"sum_2", "var"},
    "complex": {"_fft_r2c", "abs_2"},
    "random": {"inductor_seeds_default", "add"},
    "branch": {"sum_3", "gt_1", "getitem_4"},
}


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_every_kind_of_kernel_is_heard():
    """All in one program, which is compiled once."""
    torch.manual_seed(0)
    (one,) = told_of(
        lambda x, i: [function(x, i) for function in OPERATORS.values()],
        torch.randn(6, 8),
        torch.tensor([0, 1, 1, 2, 4, 4]),
    )
    assert one.wrong() == []
    assert one.code.missed == ()
    assert bitwise(one.plain, one.listening)
    heard = {seen.buffer.exact for seen, _ in one.outputs}
    assert {kind: nodes - heard for kind, nodes in HEARD.items()} == {
        kind: set() for kind in OPERATORS
    }


def test_shapes_that_vary_are_followed():
    told = told_of(lambda x: torch.softmax(x, -1), torch.randn(5, 5), dynamic=True)
    assert told[0].wrong() == []
    assert told[0].outputs
