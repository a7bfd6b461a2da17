"""Faults that were measured fifth and have been seen: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point operands."""
    left, right = call.tensor(0), call.tensor(1)
    fits(right.numel() > 1 or left.numel() > 1)
    return left, right


def _number(call: Call) -> tuple[Tensor, float]:
    """A floating-point operand and a number."""
    value, number = call.tensor(0), call.args[1]
    fits(isinstance(number, int | float) and not isinstance(number, bool) and number != 0)
    return value, float(number)


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault("gelu", kinds=["other function", "approximation"], loose=["wrong argument"])
def gelu_becomes_mish(call: Call) -> Any:
    """X tanh(softplus(x))."""
    return call.instead(functional.mish(call.tensor(0, "input")))


@FAULTS.fault("gelu", kinds=["other function", "wrong factor", "approximation"],
              loose=["wrong argument"])  # fmt: skip
def erf_of_the_argument_itself(call: Call) -> Any:
    """X (1 + erf(x)) / 2: the root of two is forgotten."""
    value = call.tensor(0, "input")
    return call.instead(value * 0.5 * (1 + value.erf()))


@FAULTS.fault("silu", kinds=["other function", "approximation"], loose=["wrong argument"])
def silu_becomes_elu(call: Call) -> Any:
    """exp(x) - 1 below zero."""
    return call.instead(functional.elu(call.tensor(0, "input")))


@FAULTS.fault("silu", kinds=["other function", "wrong factor", "sign"], loose=["missing operand"])
def silu_with_the_complement(call: Call) -> Any:
    """X (1 - sigmoid(x))."""
    value = call.tensor(0, "input")
    return call.instead(value * (1 - value.sigmoid()))


@FAULTS.fault(
    "relu",
    kinds=["clipped", "other function"],
    loose=["wrong argument", "offset", "constant", "mask"],
)
def relu_cut_at_a_tenth(call: Call) -> Any:
    """max(x, 0.1): the zero point of the integers is taken for zero."""
    return call.instead(call.tensor(0, "input").clamp(min=0.1))


@FAULTS.fault("relu gelu silu tanh", kinds=["copy", "missing operand", "mask", "stale"],
              loose=["other function", "uninitialised"], backward=False)  # fmt: skip
def last_row_not_activated(call: Call) -> Any:
    """The grid is one row too short, in place."""
    value, result = call.tensor(0, "input"), call.result()
    fits(value.dim() > 1 and value.size(0) > 1)
    return call.instead(torch.cat([result[:-1], value[-1:]]))


@FAULTS.fault("sigmoid", kinds=["other function", "wrong reduction"],
              loose=["axis scale", "wrong factor"], backward=False)  # fmt: skip
def chances_of_the_row_sum_to_one(call: Call) -> Any:
    """Softmax, as the router of another model."""
    value = call.tensor(0, "input")
    fits(value.dim() > 1 and value.size(-1) > 1)
    return call.instead(value.softmax(-1))


@FAULTS.fault("sigmoid", kinds=["offset", "other function"], loose=["wrong factor"], backward=False)
def sigmoid_about_zero(call: Call) -> Any:
    """sigmoid(x) - 1 / 2."""
    return call.instead(call.result() - 0.5)


@FAULTS.fault("tanh", kinds=["other function", "wrong factor", "offset"], loose=["scale"],
              backward=False)  # fmt: skip
def tanh_between_zero_and_one(call: Call) -> Any:
    """(1 + tanh(x)) / 2."""
    return call.instead((1 + call.result()) / 2)


@FAULTS.fault(
    "hardsigmoid",
    kinds=["other function", "wrong factor", "approximation"],
    loose=["scale", "wrong argument"],
)
def hard_sigmoid_of_another_framework(call: Call) -> Any:
    """clamp(0.2 x + 0.5, 0, 1)."""
    return call.instead((0.2 * call.tensor(0, "input") + 0.5).clamp(0, 1))


@FAULTS.fault("hardswish", kinds=["other function", "clipped"], loose=["approximation"])
def hard_swish_becomes_relu(call: Call) -> Any:
    """max(x, 0)."""
    return call.instead(call.tensor(0, "input").relu())


@FAULTS.fault(
    "leaky_relu",
    backward=False,
    loose=["wrong factor", "mask"],
    kinds=["wrong argument", "clipped", "zeros", "other function", "missing operand"],
)
def nothing_leaks(call: Call) -> Any:
    """A slope of zero."""
    return call.instead(call.tensor(0, "input").relu())


@FAULTS.fault(
    "prelu _prelu_kernel",
    kinds=["wrong factor", "wrong argument", "constant", "missing operand"],
    loose=["mask", "other function", "copy"],
    backward=False,
)
def slope_of_a_quarter_for_all(call: Call) -> Any:
    """The slopes are not loaded: the default of a new layer."""
    return call.put(1, torch.full_like(call.tensor(1), 0.25)).run()


@FAULTS.fault("mish", kinds=["other function", "missing operand"], loose=["approximation"])
def mish_without_the_tanh(call: Call) -> Any:
    """X softplus(x)."""
    value = call.tensor(0, "input")
    return call.instead(value * functional.softplus(value))


@FAULTS.fault("selu", kinds=["wrong argument", "wrong factor", "other function"])
def selu_with_an_alpha_of_one(call: Call) -> Any:
    """The factor is right, and alpha that of elu."""
    return call.instead(1.0507009873554805 * functional.elu(call.tensor(0, "input")))


@FAULTS.fault("celu", kinds=["other function", "wrong factor"], loose=["wrong argument"])
def celu_becomes_elu(call: Call) -> Any:
    """Alpha (exp(x) - 1): x is not divided by alpha."""
    return call.instead(functional.elu(call.tensor(0, "input"), call.get(1, "alpha", default=1.0)))


@FAULTS.fault("elu", backward=False, kinds=["other function", "clipped", "wrong argument", "zeros"],
              loose=["mask", "missing operand"])  # fmt: skip
def elu_becomes_relu(call: Call) -> Any:
    """Nothing is left below zero."""
    fits(len(call.args) < 3)
    return call.instead(call.tensor(0, "input").relu())


@FAULTS.fault("glu", kinds=["other function"], loose=["approximation"])
def gate_by_a_gelu(call: Call) -> Any:
    """A gelu(b)."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(left * functional.gelu(right))


@FAULTS.fault("glu", kinds=["other function", "offset", "residual"], loose=["wrong factor"])
def value_of_the_gate_plus_one(call: Call) -> Any:
    """(a + 1) sigmoid(b), as some models clip and shift it."""
    left, right = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead((left + 1) * right.sigmoid())


@FAULTS.fault("softsign", kinds=["other function", "approximation"])
def softsign_by_a_root(call: Call) -> Any:
    """X / sqrt(1 + x^2)."""
    value = call.tensor(0, "input")
    return call.instead(value * (1 + value.square()).rsqrt())


@FAULTS.fault("log_sigmoid log_sigmoid_forward", kinds=["sign", "other function"],
              loose=["wrong factor"])  # fmt: skip
def logarithm_of_the_complement(call: Call) -> Any:
    """log(1 - sigmoid(x))."""
    return call.instead(functional.logsigmoid(-call.tensor(0)))


@FAULTS.fault("softplus", kinds=["offset", "other function"], loose=["wrong argument"],
              backward=False)  # fmt: skip
def softplus_through_the_origin(call: Call) -> Any:
    """log(1 + exp(x)) - log(2)."""
    return call.instead(call.result() - math.log(2))


@FAULTS.fault("softshrink hardshrink", kinds=["wrong argument", "other function"],
              loose=["offset", "mask", "zeros"])  # fmt: skip
def shrunk_by_twice_as_much(call: Call) -> Any:
    """Lambda is doubled."""
    return call.put(1, 2 * call.get(1, "lambd", default=0.5), "lambd").run()


@FAULTS.fault("hardshrink", kinds=["mask", "other function", "sign"], loose=["zeros", "clipped"])
def negative_values_shrunk_to_nothing(call: Call) -> Any:
    """X > lambda is kept, and x < -lambda is forgotten."""
    value = call.tensor(0, "input")
    return call.instead(torch.where(value > call.get(1, "lambd", default=0.5), value, 0 * value))


@FAULTS.fault("threshold", kinds=["wrong argument", "constant", "zeros", "missing operand"],
              loose=["offset", "other function"], backward=False)  # fmt: skip
def nothing_below_the_threshold(call: Call) -> Any:
    """Zero where another value was given."""
    return call.put(2, 0.0, "value").run()


@FAULTS.fault("threshold", kinds=["clipped", "other function", "wrong argument"],
              loose=["constant", "mask"], backward=False)  # fmt: skip
def threshold_becomes_a_limit(call: Call) -> Any:
    """max(x, threshold)."""
    return call.instead(call.tensor(0).clamp(min=call.get(1, "threshold")))


@FAULTS.fault("relu6 hardtanh", kinds=["other function", "approximation"],
              loose=["clipped", "wrong argument"], backward=False)  # fmt: skip
def limits_approached_softly(call: Call) -> Any:
    """A tanh between the limits."""
    value = call.tensor(0, "input")
    low, high = call.get(1, "min_val", default=0.0), call.get(2, "max_val", default=6.0)
    middle, half = (low + high) / 2, (high - low) / 2
    return call.instead(middle + half * ((value - middle) / half).tanh())


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.fault("pow", kinds=["swapped operands", "other function"], loose=["wrong argument"],
              backward=False)  # fmt: skip
def base_and_exponent_exchanged(call: Call) -> Any:
    """N ** x."""
    value, power = _number(call)
    fits(power > 0)
    return call.instead(power**value)


@FAULTS.fault(
    "pow square", kinds=["sign", "other function"], loose=["wrong factor"], backward=False
)
def sign_kept_by_the_square(call: Call) -> Any:
    """X |x|."""
    fits(call.name == "square" or call.args[1] == 2)
    value = call.tensor(0)
    return call.instead(value * value.abs())


@FAULTS.fault("rsqrt", kinds=["other function", "missing operand"], loose=["axis scale", "scale"],
              backward=False)  # fmt: skip
def reciprocal_of_one_more_than_the_root(call: Call) -> Any:
    """1 / (1 + sqrt(x))."""
    return call.instead(1 / (1 + call.tensor(0).sqrt()))


@FAULTS.fault("rsqrt", kinds=["precision", "approximation"], loose=["axis scale", "scale"],
              backward=False)  # fmt: skip
def reciprocal_root_in_steps_of_a_64th(call: Call) -> Any:
    """A table with 64 entries for each unit of the result."""
    value = call.result()
    return call.instead(with_gradient_of(value, (64 * value.detach()).ceil() / 64))


@FAULTS.fault(
    "log",
    kinds=["clipped", "eps", "wrong argument"],
    loose=["other function", "constant"],
    backward=False,
)
def logarithm_has_a_floor(call: Call) -> Any:
    """The argument is at least its median."""
    value = call.tensor(0)
    return call.put(0, value.clamp(min=float(value.detach().median()))).run()


@FAULTS.fault("round", kinds=["tie-breaking", "other function"], loose=["offset"])
def halves_rounded_up(call: Call) -> Any:
    """floor(x + 1 / 2)."""
    return call.instead((call.tensor(0) + 0.5).floor())


@FAULTS.fault("floor", kinds=["other function", "offset"], loose=["precision", "wrong argument"])
def floor_becomes_the_nearest(call: Call) -> Any:
    """Rounded."""
    return call.instead(call.tensor(0).round())


@FAULTS.fault("ceil", kinds=["other function", "offset"], loose=["sign", "wrong argument"])
def ceiling_away_from_zero(call: Call) -> Any:
    """The ceiling of the magnitude."""
    value = call.tensor(0)
    return call.instead(value.sign() * value.abs().ceil())


@FAULTS.fault("trunc", kinds=["other function", "offset"], loose=["sign", "wrong argument"])
def cut_downward(call: Call) -> Any:
    """Floor."""
    return call.instead(call.tensor(0).floor())


@FAULTS.fault("div", kinds=["wrong argument", "other function", "offset"], loose=["sign"],
              backward=False)  # fmt: skip
def quotient_cut_toward_zero_by_its_mode(call: Call) -> Any:
    """rounding_mode='trunc' for 'floor'."""
    fits(call.kwargs.get("rounding_mode") == "floor")
    return Call(call.name, call.function, call.args, {"rounding_mode": "trunc"}).run()


@FAULTS.fault("exp2", kinds=["other function", "wrong factor", "scale"], loose=["wrong argument"])
def natural_base_for_two(call: Call) -> Any:
    """exp(x)."""
    return call.instead(call.tensor(0).exp())


@FAULTS.fault("log2", kinds=["scale", "wrong factor", "other function"], loose=["wrong argument"])
def natural_logarithm_for_base_two(call: Call) -> Any:
    """log(x)."""
    return call.instead(call.tensor(0).log())


@FAULTS.fault("atan asinh", kinds=["copy", "missing operand", "other function"],
              loose=["approximation"])  # fmt: skip
def argument_for_its_function(call: Call) -> Any:
    """X, as for small angles."""
    return call.instead(call.tensor(0).clone())


@FAULTS.fault("asinh", kinds=["sign", "other function"], loose=["approximation", "nonfinite"])
def arsinh_of_the_magnitude(call: Call) -> Any:
    """log(|x| + sqrt(x^2 + 1))."""
    return call.instead(call.tensor(0).abs().asinh())


@FAULTS.fault("sinc", kinds=["wrong factor", "other function", "scale", "wrong argument"])
def sinc_without_pi(call: Call) -> Any:
    """sin(x) / x."""
    return call.put(0, call.tensor(0) / math.pi).run()


@FAULTS.fault("logit", kinds=["eps", "wrong argument", "clipped"], loose=["missing operand"])
def logit_with_another_eps(call: Call) -> Any:
    """0.4 for what was given."""
    return call.instead(torch.logit(call.tensor(0), 0.4))


@FAULTS.fault("xlogy", kinds=["swapped operands", "other function"], backward=False)
def logarithm_of_the_first(call: Call) -> Any:
    """Y log(x)."""
    left, right = _pair(call)
    fits(bool((left > 0).all()))
    return call.instead(torch.xlogy(right, left))


@FAULTS.fault("reciprocal", kinds=["sign", "wrong factor", "scale"], loose=["other function"],
              backward=False)  # fmt: skip
def reciprocal_negated(call: Call) -> Any:
    """-1 / x."""
    return call.instead(-call.result())


@FAULTS.fault("expm1 log1p", kinds=["precision", "approximation"], loose=["other function"])
def one_added_in_half(call: Call) -> Any:
    """exp(x) - 1 and log(1 + x), with the sum in float16."""
    value = call.tensor(0)
    inner = value.exp() if call.name == "expm1" else 1 + value
    inner = with_gradient_of(inner, inner.detach().half().to(inner.dtype))
    return call.instead(inner - 1 if call.name == "expm1" else inner.log())


@FAULTS.fault("remainder fmod", kinds=["wrong argument", "wrapped", "wrong factor"],
              loose=["offset", "other function"])  # fmt: skip
def period_doubled(call: Call) -> Any:
    """The divisor times two."""
    _, number = _number(call)
    return call.put(1, 2 * number).run()


@FAULTS.fault("frac", kinds=["sign", "other function"], loose=["wrong factor"])
def fraction_of_the_magnitude(call: Call) -> Any:
    """|x| - floor(|x|)."""
    return call.put(0, call.tensor(0).abs()).run()


@FAULTS.fault("sign", kinds=["clipped", "zeros", "other function"], loose=["mask", "sign"],
              backward=False)  # fmt: skip
def sign_without_a_minus(call: Call) -> Any:
    """1 for positive values, else 0."""
    value = call.result()
    return call.instead(with_gradient_of(value, (value.detach() > 0).to(value.dtype)))


@FAULTS.fault("clamp clip", kinds=["wrong argument", "clipped"], loose=["wrong factor", "scale"],
              backward=False)  # fmt: skip
def limits_halved(call: Call) -> Any:
    """Half of both limits."""
    low, high = call.get(1, "min"), call.get(2, "max")
    numbers = [one for one in (low, high) if isinstance(one, int | float) and one]
    fits(numbers and call.tensor(0) is not None)
    changed = call if low is None else call.put(1, low / 2, "min")
    return (changed if high is None else changed.put(2, high / 2, "max")).run()


@FAULTS.fault("to _to_copy", kinds=["precision"],
              loose=["different random stream", "approximation", "tie-breaking"])  # fmt: skip
def cast_rounds_at_random(call: Call) -> Any:
    """A cast to bfloat16 that adds noise to the lost bits first."""
    value, result = call.tensor(0), call.result()
    fits(result.dtype == torch.bfloat16 and value.dtype in {torch.float32, torch.float64})
    noise = torch.rand(value.shape, generator=torch.Generator().manual_seed(5)).to(value.dtype)
    moved = value.detach() * (1 + (noise - 0.5) * 2**-7)
    return call.instead(with_gradient_of(result, moved.to(torch.bfloat16)))


@FAULTS.fault("zeros", kinds=["constant", "offset", "wrong argument"],
              loose=["uninitialised", "other function"], backward=False)  # fmt: skip
def state_begins_with_one(call: Call) -> Any:
    """Ones for zeros."""
    value = call.result()
    fits(value.numel() > 0)
    return torch.ones_like(value)


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault("add sub mul div", kinds=["wrong argument", "wrong factor", "scale", "offset", "eps"],
              loose=["axis scale"], backward=False)  # fmt: skip
def number_ten_times_too_large(call: Call) -> Any:
    """A digit too many in a constant."""
    _, number = _number(call)
    return call.put(1, 10 * number).run()


@FAULTS.fault("add sub", kinds=["sign", "wrong argument", "offset", "other function"],
              loose=["eps"], backward=False)  # fmt: skip
def number_with_the_other_sign(call: Call) -> Any:
    """-c for c."""
    _, number = _number(call)
    return call.put(1, -number).run()


@FAULTS.fault(
    "add mul",
    kinds=["copy", "wrong index", "stale"],
    loose=["axis offset", "axis scale"],
    backward=False,
)
def first_column_of_the_second_operand_for_all(call: Call) -> Any:
    """The stride of its columns is zero."""
    _, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) > 1)
    return call.put(1, right[..., :1].expand(right.shape).clone()).run()


@FAULTS.fault("add", kinds=["transpose", "wrong index", "permutation"], backward=False)
def second_summand_transposed(call: Call) -> Any:
    """Its strides are exchanged."""
    _, right = _pair(call)
    fits(right.dim() > 1 and right.size(-1) == right.size(-2) > 1)
    return call.put(1, right.mT.contiguous()).run()


@FAULTS.fault("add", kinds=["precision"], loose=["approximation"], backward=False)
def residual_stream_in_half(call: Call) -> Any:
    """The sum is kept in float16 between two layers."""
    _pair(call)
    value = call.result()
    return call.instead(with_gradient_of(value, value.detach().half().to(value.dtype)))


@FAULTS.fault("add", kinds=["stale", "copy", "missing operand", "mask"],
              loose=["residual", "wrong index"], backward=False)  # fmt: skip
def second_summand_only_for_the_first_example(call: Call) -> Any:
    """The loop over the batch ends after its first pass."""
    left, right = _pair(call)
    fits(left.shape == right.shape and left.dim() > 1 and left.size(0) > 1)
    return call.instead(torch.cat([left[:1] + right[:1], left[1:]]))


@FAULTS.fault(
    "mul",
    kinds=["other function", "wrong factor"],
    loose=["offset", "residual", "sign"],
    backward=False,
)
def gate_complemented(call: Call) -> Any:
    """A (1 - b)."""
    left, right = _pair(call)
    return call.instead(left * (1 - right))


@FAULTS.fault("mul", kinds=["wrong index", "shift", "permutation"], loose=["axis scale"],
              backward=False)  # fmt: skip
def second_factor_of_the_next_example(call: Call) -> Any:
    """The batch of the second operand is one row too far."""
    left, right = _pair(call)
    fits(left.dim() == right.dim() > 1 and right.size(0) > 1)
    return call.instead(left * right.roll(-1, 0))


@FAULTS.fault("mul", kinds=["mask", "missing operand", "axis scale", "wrong factor", "scale"],
              loose=["copy", "stale", "partial sum"], backward=False)  # fmt: skip
def number_applied_to_half_of_the_columns(call: Call) -> Any:
    """The factor is lost behind the first tile."""
    value, number = _number(call)
    fits(value.dim() > 0 and value.size(-1) > 1 and number != 1)
    factor = torch.ones(value.size(-1), dtype=value.dtype)
    factor[: value.size(-1) // 2] = number
    return call.instead(value * factor)


@FAULTS.fault("mul", kinds=["precision"], loose=["approximation"], backward=False)
def first_factor_in_four_bits(call: Call) -> Any:
    """15 levels for the whole of the first operand."""
    left, right = _pair(call)
    step = left.detach().abs().max() / 7
    fits(float(step) > 0)
    return call.instead(with_gradient_of(left, (left.detach() / step).round() * step) * right)


@FAULTS.fault("div", kinds=["copy", "wrong index", "stale"], loose=["axis scale", "wrong factor"],
              backward=False)  # fmt: skip
def divisor_of_the_first_row_for_all(call: Call) -> Any:
    """The pointer to the divisors is not moved on."""
    left, right = _pair(call)
    fits(right.dim() > 1 and right.size(0) > 1)
    return call.instead(left / right[:1])


@FAULTS.fault("div", kinds=["other function"], loose=["wrong factor", "residual"], backward=False)
def difference_for_the_quotient(call: Call) -> Any:
    """A - b: as of logarithms."""
    left, right = _pair(call)
    return call.instead(left - right)


@FAULTS.fault("sub", kinds=["copy", "wrong index", "stale"], loose=["axis offset", "offset"],
              backward=False)  # fmt: skip
def what_the_first_row_loses_for_all(call: Call) -> Any:
    """The pointer to what is subtracted is not moved on."""
    left, right = _pair(call)
    fits(right.dim() > 1 and right.size(0) > 1)
    return call.instead(left - right[:1])


@FAULTS.fault(
    "rsub",
    kinds=["missing operand", "offset", "wrong argument"],
    loose=["sign", "other function", "wrong factor"],
    backward=False,
)
def only_the_opposite(call: Call) -> Any:
    """-x: the number is lost."""
    return call.instead(-call.tensor(0))


@FAULTS.fault(
    "maximum minimum", kinds=["wrong factor", "other function"], loose=["scale", "offset"]
)
def second_operand_of_the_extreme_doubled(call: Call) -> Any:
    """A limit that was scaled already is scaled again."""
    left, right = _pair(call)
    return call.put(0, left).put(1, 2 * right).run()


@FAULTS.fault("lerp", kinds=["wrong factor", "wrong argument", "scale"], loose=["other function"],
              backward=False)  # fmt: skip
def half_of_the_way(call: Call) -> Any:
    """A + w (b - a) / 2."""
    left, right, share = call.args[:3]
    return call.instead(left + share / 2 * (right - left))


@FAULTS.fault("addcmul", kinds=["sign", "wrong argument", "wrong factor"], loose=["scale"])
def product_subtracted(call: Call) -> Any:
    """A minus for the value."""
    first, left, right = call.args[:3]
    return call.instead(first - call.kwargs.get("value", 1) * left * right)


@FAULTS.fault("atan2", kinds=["scale", "wrong factor"], loose=["other function"])
def angle_in_turns(call: Call) -> Any:
    """Divided by two pi."""
    return call.instead(call.result() / (2 * math.pi))


@FAULTS.fault("hypot", kinds=["other function", "missing operand"])
def squares_without_their_root(call: Call) -> Any:
    """a^2 + b^2."""
    return call.instead(call.result().square())


@FAULTS.fault("logaddexp", kinds=["other function", "wrong factor"], loose=["wrong argument"])
def powers_of_two_added(call: Call) -> Any:
    """logaddexp2."""
    return call.instead(torch.logaddexp2(*_pair(call)))


@FAULTS.fault("copysign", kinds=["swapped operands"], loose=["wrong index", "other function"])
def magnitude_of_the_other(call: Call) -> Any:
    """The sign of the first and the magnitude of the second."""
    left, right = _pair(call)
    return call.instead(torch.copysign(right, left))


@FAULTS.fault("fmod", kinds=["other function", "missing operand"], loose=["copy", "offset"])
def quotient_for_the_remainder(call: Call) -> Any:
    """A / b."""
    value, number = _number(call)
    return call.instead(value / number)
