from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from paritas.core.precision.lifting import LiftingError, LiftMode, is_rounding


def values(*shape, seed=0):
    """Float32 numbers, in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


WIDE_WEIGHT = values(8, 8, seed=3)
HIDDEN_WEIGHT = WIDE_WEIGHT.float()


def cast(x, narrow):
    return x.to(narrow) * 3


def made_inside(x, narrow):
    made = torch.zeros(8, dtype=narrow) + torch.full((8,), 1 / 3, dtype=narrow)
    return made * x + torch.arange(8, dtype=narrow) / 7 + torch.linspace(0, 1, 8, dtype=narrow)


def hidden_weight(x, narrow):
    weight = HIDDEN_WEIGHT if narrow is torch.float32 else WIDE_WEIGHT
    return F.layer_norm(F.linear(x, weight, weight[0]), (8,), weight[1], weight[2])


def attention(x, narrow):
    weight = HIDDEN_WEIGHT if narrow is torch.float32 else WIDE_WEIGHT
    return F.scaled_dot_product_attention(x, x @ weight, x.sin(), is_causal=True)


def in_place(x, narrow):
    weight = HIDDEN_WEIGHT if narrow is torch.float32 else WIDE_WEIGHT
    y = (x / 3).add_(weight[0])
    y[:, 2].mul_(1 / 7)
    y[1:, :3] += weight[1:, :3]
    return y.index_add(0, torch.tensor([1, 1]), weight[:2])


def buffer_in_place(x, narrow):
    buffer = torch.full((8,), 1 / 3, dtype=narrow)
    buffer.add_(x.detach().sum(0)).mul_(0.1)
    return buffer * x


def out_argument(x, narrow):
    out = torch.empty(8, 8, dtype=narrow)
    torch.mul(x.detach(), 1 / 3, out=out)
    return out + x


# Each takes its input and what it spells as float32; with float64 it is the program by hand.
PROGRAMS = {
    "to float32": cast,
    ".float()": lambda x, narrow: (x.float() if narrow is torch.float32 else x).exp() / 3,
    "to bfloat16": lambda x, narrow: cast(
        x, torch.bfloat16 if narrow is torch.float32 else torch.float64
    ),
    ".half()": lambda x, narrow: (x.half() if narrow is torch.float32 else x).tanh(),
    "made inside": made_inside,
    "softmax(dtype=)": lambda x, narrow: F.softmax(x, dim=-1, dtype=narrow),
    "sum(dtype=)": lambda x, narrow: x.sum(0, dtype=narrow) * x.mean(dtype=narrow),
    "hidden weights": hidden_weight,
    "attention": attention,
    "in place": in_place,
    "a buffer made inside, in place": buffer_in_place,
    "out=": out_argument,
    "cat with a hidden one": lambda x, narrow: torch.cat([x, HIDDEN_WEIGHT]).sin(),
    "complex": lambda x, narrow: torch.fft.fft(x).abs(),
}


def run_lifted(program, x, *, gradient=True):
    """What `program` gives for `x`, and the gradient of its squares, all below a LiftMode."""
    x = x.clone().requires_grad_(gradient)
    with LiftMode(torch.float32, torch.float32):
        result = program(x)
        slope = torch.autograd.grad(result.square().sum(), x)[0] if gradient else None
    return result.detach(), slope


def assert_lifted(got, wanted):
    assert got.dtype is wanted.dtype is torch.float64
    assert float((got - wanted).abs().max()) <= 1e-15 * float(wanted.abs().max())


# --- arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_float32_program_is_computed_in_float64_forward_and_backward(name):
    program, x = PROGRAMS[name], values(8, 8)
    result, slope = run_lifted(lambda x: program(x, torch.float32), x)
    leaf = x.clone().requires_grad_()
    expected = program(leaf, torch.float64)
    (expected_slope,) = torch.autograd.grad(expected.square().sum(), leaf)
    assert_lifted(result, expected.detach())
    assert_lifted(slope, expected_slope)


def test_a_narrow_input_is_widened():
    with LiftMode(torch.float32, torch.float32):
        result = values(8).float() / 3
    assert_lifted(result, values(8) / 3)


def test_a_hidden_buffer_is_written_to_and_keeps_its_dtype():
    hidden = torch.zeros(8)
    run_lifted(lambda x: hidden.add_(x.sum(0)), values(8, 8), gradient=False)
    assert hidden.dtype is torch.float32
    assert torch.equal(hidden, values(8, 8).sum(0).float())


def test_what_an_exported_program_asserts_about_a_tensor_is_true_in_float64_too():
    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x.to(torch.float32) * torch.arange(3).to(x.device).to(torch.float32)

    x = values(4, 3)
    exported = torch.export.export(Scaled(), (x,), strict=False).module()
    asserted = torch.ops.aten._assert_tensor_metadata.default
    assert asserted in {node.target for node in exported.graph.nodes}
    with LiftMode(torch.float32, torch.float32):
        got = exported(x)
    assert_lifted(got, x.double() * torch.arange(3))


def test_integers_and_bools_stay_what_they_are():
    with LiftMode(torch.float32, torch.float32):
        assert (torch.arange(3) * 2).dtype is torch.int64
        assert (torch.ones(3) > 0).dtype is torch.bool
        assert torch.ones(3).to(torch.int32).dtype is torch.int32


@pytest.mark.parametrize("bits", [torch.int32, torch.uint8, torch.float32])
def test_reading_the_bits_of_a_float_has_no_meaning_in_float64(bits):
    with LiftMode(torch.float32, torch.float32), pytest.raises(LiftingError, match="bits"):
        torch.ones(4).view(bits)


def test_a_cast_that_is_not_rounding_is_kept():
    x = values(8)
    keep = LiftMode(torch.float32, torch.float32, lifts=lambda dtype: dtype is torch.float32)
    with keep:
        assert_lifted(x.float() * 1, x)
        assert_lifted(x.to(torch.bfloat16) * 1, x.to(torch.bfloat16).double())
    assert keep.casts == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("dtype", "used", "expected"),
    [
        (torch.float32, {torch.float32}, True),
        (torch.bfloat16, {torch.float32}, False),
        (torch.bfloat16, {torch.float32, torch.bfloat16}, True),
        (torch.float32, {torch.bfloat16}, True),
        (torch.float16, {torch.float16}, True),
        (torch.float16, {torch.bfloat16}, False),
    ],
)
def test_a_cast_is_rounding_if_the_reference_is_as_coarse_and_as_narrow(dtype, used, expected):
    assert is_rounding(dtype, frozenset(used)) is expected


def test_operators_of_others_are_known_by_name():
    with torch.library._scoped_library("paritas_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        with LiftMode(torch.float32, torch.float32) as mode:
            torch.ops.paritas_test.twice(torch.ones(4) + 1)
    assert mode.foreign == {"paritas_test::twice"}


# --- random numbers -------------------------------------------------------------------------------

DRAWS = {
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(x.shape),
    "rand(dtype=)": lambda x: torch.rand(x.shape, dtype=torch.float32),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.zeros_like(x).normal_(1, 3),
    "exponential_": lambda x: torch.zeros_like(x).exponential_(2.0),
    "normal": lambda x: torch.normal(0.0, 2.0, x.shape),
    "bernoulli_ of a number": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "bernoulli of a tensor": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x), 4).to(x.dtype),
    "randint": lambda x: torch.randint(9, x.shape).to(x.dtype),
    "randperm": lambda x: torch.randperm(len(x)).to(x.dtype),
}


@pytest.mark.parametrize("size", [5, 64])
@pytest.mark.parametrize("name", DRAWS)
def test_a_lifted_program_draws_the_numbers_of_the_native_one(name, size):
    x, draw = values(size), DRAWS[name]
    torch.manual_seed(7)
    native = draw(x.float())
    after = torch.get_rng_state()
    torch.manual_seed(7)
    result, _ = run_lifted(draw, x, gradient=False)
    assert torch.equal(result, native.to(result.dtype))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("native", [torch.float32, torch.bfloat16])
def test_numbers_are_drawn_in_the_dtype_the_program_runs_in(native):
    x = values(64).to(native)
    torch.manual_seed(7)
    expected = torch.randn_like(x)
    torch.manual_seed(7)
    with LiftMode(native, torch.float32):
        drawn = torch.randn_like(x.double())
    assert torch.equal(drawn, expected.double())


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_keeps_what_the_native_run_keeps(p):
    x = values(50, 20)
    torch.manual_seed(7)
    kept = F.dropout(torch.ones(50, 20), p) != 0
    torch.manual_seed(7)
    result, slope = run_lifted(lambda x: F.dropout(x, p) / 3, x)
    expected = x * kept / (1 - p) / 3 if p < 1 else torch.zeros_like(x)
    assert float((result - expected).abs().max()) <= 1e-15
    assert torch.equal(slope != 0, kept)


# --- decisions ------------------------------------------------------------------------------------

SCORES = torch.tensor([[1.0, 4.0, 3.5], [2.0, 0.0, 1.0]])


def decided(choose):
    mode = LiftMode(torch.float32, torch.float32, remember_decisions=True)
    with mode:
        result = choose(SCORES)
    return result, mode.decision_for(result)


def test_the_margin_of_a_choice_is_what_the_other_choice_scores_less():
    chosen, decision = decided(lambda x: x.argmax(1))
    assert decision.margin(chosen, torch.tensor([2, 2])).tolist() == [0.5, 1.0]
    assert decision.margin(chosen, torch.tensor([3, 0])) is None, "there is no such element"


def test_the_margin_of_a_choice_over_everything():
    chosen, decision = decided(lambda x: x.argmax())
    assert int(chosen) == 1
    assert float(decision.margin(chosen, torch.tensor(2))) == 0.5


@pytest.mark.parametrize(
    "choose", [lambda x: x.topk(2).indices, lambda x: x.sort(descending=True).indices[:, :2]]
)
def test_the_margin_of_an_order_is_between_the_two_that_changed_places(choose):
    order, decision = decided(choose)
    assert decision.margin(order, order.flip(1))[0].tolist() == [0.5, -0.5]


def test_the_margin_of_a_comparison_is_the_distance_of_its_operands():
    above, decision = decided(lambda x: x > 3)
    assert decision.margin(above, ~above)[0].tolist() == [-2.0, 1.0, 0.5]


def test_what_no_operator_decided_has_no_margin():
    _, decision = decided(lambda x: torch.arange(3))
    assert decision is None
