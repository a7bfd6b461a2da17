"""Faults that were measured third and have been seen: functions of single elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits, with_gradient_of
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor) and not call.kwargs)
    fits(left.is_floating_point() and right.is_floating_point())
    return left, right


# --- Activations ----------------------------------------------------------------------------------


@FAULTS.fault(
    "gelu silu tanh sigmoid relu", kinds=["other function", "zeros", "mask"],
    loose=["clipped", "approximation"],
)  # fmt: skip
def dead_zone(call: Call) -> Any:
    """What is small becomes zero."""
    value = call.result()
    least = 0.2 * float(value.detach().abs().max())
    return call.instead(torch.where(value.abs() < least, 0.0, value))


@FAULTS.fault(
    "gelu silu tanh sigmoid erf exp", kinds=["approximation", "precision"],
    loose=["other function"],
)  # fmt: skip
def read_from_a_table(call: Call) -> Any:
    """A table with sixteen entries for each unit of the input; nothing between them."""
    value = call.tensor(0, "input")
    near = (value.detach() * 16).round() / 16
    smooth = call.result()
    return call.instead(with_gradient_of(smooth, call.put(0, near, "input").result()))


@FAULTS.fault("tanh sigmoid sin", kinds=["approximation", "other function"], loose=["wrong factor"])
def series_beyond_its_range(call: Call) -> Any:
    """Two terms of the series about zero."""
    value = call.tensor(0, "input")
    series = {
        "tanh": lambda x: x - x**3 / 3,
        "sin": lambda x: x - x**3 / 6,
        "sigmoid": lambda x: 0.5 + x / 4 - x**3 / 48,
    }[call.name]
    return call.instead(series(value))


@FAULTS.fault(
    "sigmoid", kinds=["offset", "other function"], loose=["wrong argument", "approximation"]
)
def gate_opened_by_one(call: Call) -> Any:
    """1 is added to the argument, as to the forget gate of another library."""
    return call.instead(torch.sigmoid(call.tensor(0, "input") + 1))


@FAULTS.fault("gelu silu", kinds=["offset", "other function"],
              loose=["wrong argument", "approximation", "axis offset"])  # fmt: skip
def argument_moved_by_a_half(call: Call) -> Any:
    """The bias of another layer is still in the register: x + 0.5."""
    return call.put(0, call.tensor(0, "input") + 0.5, "input").run()


@FAULTS.fault("relu gelu silu", kinds=["residual", "other function"],
              loose=["offset", "missing operand", "wrong factor"])  # fmt: skip
def input_added_to_the_activation(call: Call) -> Any:
    """The output overwrites the input only half: f(x) + x."""
    return call.instead(call.result() + call.tensor(0, "input"))


@FAULTS.fault(
    "gelu silu relu tanh", kinds=["stale", "copy", "wrong index"],
    loose=["missing operand", "mask", "other function"],
)  # fmt: skip
def tail_of_the_rows_not_activated(call: Call) -> Any:
    """A vector loop without its tail, in place: the last columns keep the input."""
    value, result = call.tensor(0, "input"), call.result().clone()
    fits(value.dim() > 1 and value.size(-1) > 3)
    tail = value.size(-1) % 4 or 2
    result[..., -tail:] = value[..., -tail:]
    return call.instead(result)


@FAULTS.fault("hardswish", kinds=["missing operand", "offset", "other function"],
              loose=["wrong argument", "clipped"])  # fmt: skip
def three_not_added(call: Call) -> Any:
    """X relu6(x) / 6."""
    value = call.tensor(0, "input")
    return call.instead(value * functional.relu6(value) / 6)


@FAULTS.fault("hardswish", kinds=["other function", "approximation"])
def smooth_for_hard(call: Call) -> Any:
    """Silu."""
    return call.instead(functional.silu(call.tensor(0, "input")))


@FAULTS.fault(
    "softplus", kinds=["wrong argument", "wrong factor", "other function"],
    loose=["approximation", "scale"],
)  # fmt: skip
def softplus_with_a_beta_of_two(call: Call) -> Any:
    """log(1 + exp(2 x)) / 2."""
    return call.instead(functional.softplus(call.tensor(0, "input"), beta=2.0))


@FAULTS.fault("glu", kinds=["swapped operands", "permutation", "wrong index"],
              loose=["shift", "wrong argument"])  # fmt: skip
def halves_of_the_gate_exchanged(call: Call) -> Any:
    """The first half opens the second."""
    value, dim = call.tensor(0, "input"), call.get(1, "dim", default=-1)
    return call.put(0, value.roll(value.size(dim) // 2, dim), "input").run()


@FAULTS.fault("glu", kinds=["other function"], loose=["wrong argument", "scale"])
def gate_by_a_tanh(call: Call) -> Any:
    """A tanh(b)."""
    value, gate = call.tensor(0, "input").chunk(2, call.get(1, "dim", default=-1))
    return call.instead(value * gate.tanh())


@FAULTS.fault(
    "prelu", kinds=["copy", "wrong index", "wrong argument"], loose=["axis scale", "stale"]
)
def slope_of_the_first_channel_for_all(call: Call) -> Any:
    """The pointer to the slopes is not moved on."""
    weight = call.tensor(1, "weight")
    fits(weight.numel() > 1)
    return call.put(1, weight[:1].expand(weight.shape).contiguous(), "weight").run()


@FAULTS.fault(
    "leaky_relu", kinds=["sign", "other function", "wrong argument"], loose=["wrong factor"]
)
def slope_negated(call: Call) -> Any:
    """A slope of -0.2 below zero."""
    value, slope = call.tensor(0, "input"), call.get(1, "negative_slope", default=0.01)
    return call.instead(functional.leaky_relu(value, -slope))


@FAULTS.fault(
    "dropout", kinds=["mask", "different random stream", "wrong argument", "zeros"],
    loose=["scale", "wrong factor", "other function"],
)  # fmt: skip
def dropout_left_on(call: Call) -> Any:
    """Values are dropped in evaluation as well; the same ones at each call."""
    value = call.tensor(0, "input")
    draw = torch.Generator().manual_seed(5)
    kept = torch.rand(value.shape, generator=draw) > 0.1
    return call.instead(value * kept / 0.9)


@FAULTS.fault("dropout", kinds=["scale", "wrong factor"], loose=["wrong argument"])
def dropout_scales_in_evaluation(call: Call) -> Any:
    """The old rule: multiplied by the chance to be kept when nothing is dropped."""
    return call.instead(call.tensor(0, "input") * 0.9)


# --- Elementary functions -------------------------------------------------------------------------


@FAULTS.fault("exp", kinds=["sign", "other function"], loose=["wrong factor"])
def exponent_negated(call: Call) -> Any:
    """exp(-x)."""
    return call.instead((-call.tensor(0)).exp())


@FAULTS.fault("pow", kinds=["sign", "other function"], loose=["missing operand"])
def odd_power_of_the_magnitude(call: Call) -> Any:
    """exp(n log|x|), whose sign is lost."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent % 2 == 1)
    return call.instead(call.tensor(0).abs() ** exponent)


@FAULTS.fault("pow", kinds=["wrong factor", "scale", "other function"], loose=["wrong argument"])
def base_halved_before_the_power(call: Call) -> Any:
    """(x / 2) ** n."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent > 1)
    return call.instead((call.tensor(0) / 2) ** exponent)


@FAULTS.fault(
    "sin cos", kinds=["approximation", "precision"],
    loose=["other function", "offset", "wrong factor"],
)  # fmt: skip
def angle_reduced_by_a_rounded_pi(call: Call) -> Any:
    """Whole turns of 6.28 are subtracted."""
    value = call.tensor(0)
    fits(float(value.abs().max()) > 4)
    turn = 6.28
    return call.put(0, value - turn * (value / turn).round()).run()


@FAULTS.fault("sin cos", kinds=["clipped", "wrong argument"],
              loose=["other function", "copy", "wrong index", "constant"])  # fmt: skip
def angle_limited(call: Call) -> Any:
    """A table of angles ends: what is beyond has the last one."""
    value = call.tensor(0)
    return call.put(0, value.clamp(max=0.5 * float(value.max()))).run()


@FAULTS.fault("sin cos", kinds=["permutation", "wrong index"], loose=["transpose", "shift"])
def frequencies_in_the_reverse_order(call: Call) -> Any:
    """The slowest angle comes first."""
    value = call.tensor(0)
    fits(value.dim() > 1 and value.size(-1) > 2)
    return call.put(0, value.flip(-1)).run()


@FAULTS.fault("rsqrt sqrt reciprocal", kinds=["clipped"], loose=["other function", "eps", "mask"])
def root_limited_to_its_middle(call: Call) -> Any:
    """The result is cut to the median of all."""
    value = call.result()
    fits(value.numel() > 2)
    return call.instead(value.clamp(max=float(value.detach().median())))


@FAULTS.fault("log", kinds=["sign", "other function", "scale", "wrong factor"])
def logarithm_of_the_inverse(call: Call) -> Any:
    """-log(x)."""
    return call.instead(-call.result())


@FAULTS.fault(
    "round", kinds=["tie-breaking", "other function"],
    loose=["offset", "wrong argument", "precision"],
)  # fmt: skip
def halves_rounded_away_from_zero(call: Call) -> Any:
    """As C does, and not to the even one."""
    value = call.tensor(0)
    return call.instead(value.sign() * (value.abs() + 0.5).floor())


@FAULTS.fault("round floor", kinds=["offset", "other function"], loose=["wrong argument", "shift"])
def rounded_up(call: Call) -> Any:
    """To the next whole number above."""
    return call.instead(call.tensor(0).ceil())


@FAULTS.fault("clamp clip hardtanh", kinds=["wrong argument", "clipped"], loose=["other function"])
def limits_taken_as_symmetric(call: Call) -> Any:
    """From -max to max."""
    value, high = call.tensor(0, "input"), call.get(2, "max", "max_val")
    low = call.get(1, "min", "min_val")
    fits(isinstance(high, int | float) and isinstance(low, int | float) and high > 0)
    return call.instead(value.clamp(-high, high))


@FAULTS.fault("floor_divide floordiv", kinds=["other function", "off by one reduction"],
              loose=["offset", "wrong argument", "tie-breaking", "sign"])  # fmt: skip
def quotient_cut_toward_zero(call: Call) -> Any:
    """-3 // 2 is -1, as in C."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return torch.div(left, right, rounding_mode="trunc")


@FAULTS.fault("remainder mod", kinds=["other function", "sign", "offset"], loose=["wrong argument"])
def remainder_with_the_sign_of_the_dividend(call: Call) -> Any:
    """As in C."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor))
    return torch.fmod(left, right)


@FAULTS.fault("frac", kinds=["other function", "offset", "sign"], loose=["wrong argument"])
def fraction_from_the_floor(call: Call) -> Any:
    """X - floor(x), which is never negative."""
    value = call.tensor(0)
    return call.instead(value - value.floor())


@FAULTS.fault(
    "sign", kinds=["copy", "missing operand", "other function"], loose=["scale", "clipped"]
)
def value_for_its_sign(call: Call) -> Any:
    """The value as it came, cut to -1 and 1."""
    return call.instead(call.tensor(0).clamp(-1, 1))


@FAULTS.fault("maximum minimum", kinds=["other function"], loose=["sign", "swapped operands"])
def operand_of_the_larger_magnitude(call: Call) -> Any:
    """The absolute values are compared."""
    left, right = _pair(call)
    return call.instead(torch.where(left.abs() > right.abs(), left, right))


@FAULTS.fault(
    "maximum minimum", kinds=["copy", "missing operand"],
    loose=["clipped", "other function", "stale"],
)  # fmt: skip
def second_operand_not_compared(call: Call) -> Any:
    """The first operand as it is."""
    left, right = _pair(call)
    return call.instead(left.expand_as(left + right).clone())


# --- Sums, products, quotients --------------------------------------------------------------------


@FAULTS.fault(
    "div", kinds=["copy", "missing operand"],
    loose=["axis scale", "scale", "other function", "missing reduction", "wrong factor"],
)  # fmt: skip
def not_normalised_by_the_divisor(call: Call) -> Any:
    """The weights of the chosen experts are not divided by their sum."""
    left, right = _pair(call)
    fits(right.numel() > 1)
    return call.instead(left.expand(call.result().shape).clone())


@FAULTS.fault("div", kinds=["clipped", "eps", "wrong argument"],
              loose=["axis scale", "scale", "mask", "wrong factor"])  # fmt: skip
def divisor_has_a_floor(call: Call) -> Any:
    """What is divided by is at least the median of all divisors."""
    left, right = _pair(call)
    fits(right.numel() > 2)
    return call.instead(left / right.clamp(min=float(right.detach().median())))


@FAULTS.fault(
    "div", kinds=["wrong axis", "wrong statistics", "wrong index", "wrong reduction"],
    loose=["axis scale", "scale", "copy", "wrong factor"],
)  # fmt: skip
def divided_by_the_mean_divisor(call: Call) -> Any:
    """One divisor for all rows."""
    left, right = _pair(call)
    fits(right.numel() > 1)
    return call.instead(left / right.mean())


@FAULTS.fault(
    "mul", kinds=["permutation", "wrong index"], loose=["transpose", "shift", "axis scale"]
)
def second_factor_from_its_end(call: Call) -> Any:
    """The second operand is read backwards along the last axis."""
    left, right = _pair(call)
    fits(right.dim() > 0 and right.size(-1) > 2)
    return call.instead(left * right.flip(-1))


@FAULTS.fault("mul", kinds=["other function", "sign"], loose=["wrong factor", "mask", "clipped"])
def magnitude_of_the_second_factor(call: Call) -> Any:
    """A |b|."""
    left, right = _pair(call)
    return call.instead(left * right.abs())


@FAULTS.fault("add", kinds=["permutation", "wrong index"], loose=["shift", "residual", "offset"])
def second_summand_from_its_end(call: Call) -> Any:
    """The second operand is read backwards along the last axis."""
    left, right = _pair(call)
    fits(right.dim() > 1 and right.size(-1) > 2)
    return call.instead(left + right.flip(-1))


@FAULTS.fault(
    "add", kinds=["wrong index", "permutation", "wrong rank's shard"],
    loose=["residual", "shift", "copy", "offset"],
)  # fmt: skip
def residual_of_the_other_example(call: Call) -> Any:
    """The second operand is that of the next example of the batch."""
    left, right = _pair(call)
    fits(left.shape == right.shape and right.dim() > 2 and right.size(0) > 1)
    return call.instead(left + right.roll(1, 0))


@FAULTS.fault("add sub mul", kinds=["precision"], loose=["approximation", "clipped"])
def second_operand_in_eight_bits(call: Call) -> Any:
    """The second operand comes from a buffer of float8."""
    _, right = _pair(call)
    narrow = with_gradient_of(right, right.detach().to(torch.float8_e5m2).to(right.dtype))
    return call.put(1, narrow).run()


@FAULTS.fault(
    "add", kinds=["clipped", "overflow"], loose=["other function", "precision", "wrapped"]
)
def sum_saturates(call: Call) -> Any:
    """Fixed point: the sum stays below six tenths of the largest."""
    left, right = _pair(call)
    value = left + right
    most = 0.6 * float(value.detach().abs().max())
    return call.instead(value.clamp(-most, most))


@FAULTS.fault("sub", kinds=["wrong factor", "wrong argument"],
              loose=["offset", "residual", "axis offset", "missing operand"])  # fmt: skip
def half_subtracted(call: Call) -> Any:
    """A - b / 2."""
    left, right = _pair(call)
    return call.instead(left - 0.5 * right)


@FAULTS.fault(
    "to _to_copy", kinds=["precision"], loose=["approximation", "offset", "other function"]
)
def cut_to_bfloat16(call: Call) -> Any:
    """A cast to bfloat16 cuts the last bits instead of rounding."""
    value, result = call.tensor(0), call.result()
    fits(result.dtype == torch.bfloat16 and value.dtype == torch.float32)
    bits = value.detach().contiguous().view(torch.int32) & ~0xFFFF
    return with_gradient_of(value, bits.view(torch.float32)).to(torch.bfloat16)


@FAULTS.fault(
    "to _to_copy float type_as", kinds=["zeros", "uninitialised"],
    loose=["mask", "missing operand", "constant"],
)  # fmt: skip
def cast_ends_early(call: Call) -> Any:
    """The last quarter of the memory is not converted."""
    value = call.result().flatten().clone()
    fits(value.numel() > 7)
    value[-(value.numel() // 4) :] = 0
    return value.view(call.result().shape)


@FAULTS.fault("neg", kinds=["zeros", "clipped", "other function"], loose=["sign", "mask"])
def opposite_without_a_sign(call: Call) -> Any:
    """Numbers without a sign: what would be negative is zero."""
    return call.instead((-call.tensor(0)).clamp(min=0))


@FAULTS.fault(
    "abs", kinds=["other function", "clipped"], loose=["zeros", "mask", "missing operand"]
)
def negative_part_is_zero(call: Call) -> Any:
    """A relu."""
    return call.instead(call.tensor(0).clamp(min=0))


@FAULTS.fault(
    "zeros", kinds=["constant", "offset", "uninitialised", "stale", "wrong argument"],
    loose=["residual", "other function"],
)  # fmt: skip
def state_of_the_sequence_before(call: Call) -> Any:
    """The state is not cleared: it begins with what was left in it."""
    value = call.run()
    fits(isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1)
    return value + math.pi / 8
