"""Faults that were measured and have been seen: pointwise operators, and what moves values."""

from __future__ import annotations

import math
from typing import Any

import torch
from benchmarks.places.calls import Call, Catalogue, fits
from benchmarks.places.changes import computed, longer, on, operand, result
from torch import Tensor
from torch.nn import functional

FAULTS = Catalogue()


def read_as_contiguous(value: Tensor) -> Tensor:
    """What a kernel reads that ignores the strides of a permuted tensor."""
    order = sorted(range(value.dim()), key=lambda axis: -value.stride(axis))
    fits(order != list(range(value.dim())) and 0 not in value.stride())
    return value.permute(order).reshape(value.shape)


def _pair(call: Call) -> tuple[Tensor, Tensor]:
    """Two floating-point tensors."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) and isinstance(right, Tensor))
    fits(left.is_floating_point() and right.is_floating_point() and not call.kwargs)
    return left, right


def _number(call: Call) -> float:
    """The second operand, if it is a number that does something."""
    other = call.args[1]
    fits(isinstance(other, int | float) and not isinstance(other, bool) and other not in {0, 1, -1})
    return float(other)


# --- Activations and other functions of one value -------------------------------------------------


@FAULTS.fault("gelu silu", "clipped; other function, wrong argument")
def input_of_the_activation_limited(call: Call) -> Any:
    """The limit of another model: inputs above half of the largest are cut to it."""
    value = call.tensor(0, "input")
    limit = float(value.detach().max()) / 2
    fits(limit > 0)
    return call.put(0, value.clamp(max=limit), "input").run()


@FAULTS.fault("exp", "approximation; precision, scale, other function")
def exp_by_its_bits(call: Call) -> Any:
    """The number whose exponent and mantissa are a linear function of the input."""
    value = call.tensor(0)
    fits(value.dtype == torch.float32)
    codes = (value.detach().clamp(-80, 80) * 12102203.0 + 1064866805.0).to(torch.int32)
    right = call.result()
    return call.instead(right + (codes.contiguous().view(torch.float32) - right).detach())


@FAULTS.fault("pow", "other function, wrong argument, copy, missing operand; wrong factor")
def power_one_too_low(call: Call) -> Any:
    """It is x for x ** 2, and x ** 2 for x ** 3."""
    exponent = call.args[1]
    fits(isinstance(exponent, int | float) and exponent in {2, 3})
    value = call.tensor(0)
    return call.instead(value.clone() if exponent == 2 else value.square())


# fmt: off
# 0.797 * (x + 0.04 x ** 3) inside of the tanh.
FAULTS.add("gelu with a rounded constant", "gelu", "approximation, other function; wrong factor",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: 0.5 * value * (1 + torch.tanh(0.797 * (value + 0.04 * value**3)))))
# The form x * sigmoid(1.702 x), which is another activation.
FAULTS.add("swish with a slope", "silu",
    "other function, approximation, wrong factor; wrong argument",
    computed(lambda call: (call.tensor(0, "input"),),
        lambda value: value * torch.sigmoid(1.702 * value)))
# The activation of another model.
FAULTS.add("relu squared", "relu", "other function; wrong factor", result(torch.square))
# The input is negated first.
FAULTS.add("activation of the opposite", "relu silu gelu", "sign, other function; wrong factor",
    operand(0, torch.neg, "input"))
# Three straight lines.
FAULTS.add("hard sigmoid", "sigmoid", "approximation, other function; clipped",
    lambda call: call.instead(functional.hardsigmoid(call.tensor(0))))
# The sine of the opposite angle.
FAULTS.add("turned the other way", "sin", "sign; wrong factor, other function", result(torch.neg))
# A cache of angles that is filled from position 1.
FAULTS.add("table begins one position later", "cos sin", "shift, wrong index; permutation, copy",
    result(lambda v: v.roll(-1, -2), where=longer(-2, 2)))
# A cast to float32 through float16.
FAULTS.add("cast by way of half", "to float _to_copy type_as", "precision; overflow, nonfinite",
    result(lambda v: v.half().to(v.dtype), where=lambda v: bool((v.abs() < 60000.0).all())))
# fmt: on


# --- Sums and products ----------------------------------------------------------------------------


@FAULTS.fault("add", "missing operand, offset, copy, eps; missing bias, wrong argument")
def number_not_added(call: Call) -> Any:
    """1 + weight becomes weight, x + eps becomes x."""
    left, right = call.args[:2]
    fits(isinstance(left, Tensor) != isinstance(right, Tensor))
    kept = left if isinstance(left, Tensor) else right
    fits(kept.is_floating_point())
    return call.instead(kept.clone())


@FAULTS.fault("add mul", "permutation, wrong index, transpose; shift")
def strides_of_an_operand_ignored(call: Call) -> Any:
    """A permuted operand is read as if it was contiguous."""
    left, right = _pair(call)
    fits(left.shape == right.shape)
    places = [at for at, one in enumerate((left, right)) if not one.is_contiguous()]
    fits(places)
    return call.put(places[0], read_as_contiguous(call.args[places[0]])).run()


@FAULTS.fault("div mul", "scale, wrong factor; wrong argument")
def root_of_the_size_forgotten(call: Call) -> Any:
    """Divided by d instead of by sqrt(d)."""
    other = _number(call)
    size = other**2 if call.name == "div" else other**-2
    fits(size > 1 and abs(size - round(size)) < 1e-6)
    return call.instead(call.result() / math.sqrt(size))


@FAULTS.fault("mul div", "scale, wrong factor, precision; wrong argument")
def number_kept_in_bfloat16(call: Call) -> Any:
    """A factor is rounded to eight bits."""
    other = _number(call)
    rounded = float(torch.tensor(other).bfloat16())
    fits(abs(rounded - other) > 1e-4 * abs(other))
    return call.put(1, rounded).run()


# fmt: off
# Each of two ranks adds its half, and one is lost.
FAULTS.add("residual halved", "add",
    "wrong factor; residual, offset, missing operand, wrong argument, scale",
    computed(_pair, lambda left, right: left + 0.5 * right,
        where=lambda left, right: left.shape == right.shape))
# Added by the kernel before and again.
FAULTS.add("second summand twice", "add",
    "residual, wrong factor, repeated bias; offset, axis offset, doubled reduction",
    computed(_pair, lambda left, right: left + right + right))
# It was given away too early and holds the second summand.
FAULTS.add("buffer of the first summand reused", "add",
    "stale, missing operand, copy, wrong index; residual, scale, wrong factor",
    computed(_pair, lambda _, right: right + right,
        where=lambda left, right: left.shape == right.shape))
# The pointer to the second operand is not moved on.
FAULTS.add("factor of the first row for all", "mul", "copy, wrong index, stale; axis scale",
    on(_pair, lambda call, _, right:
            call.put(1, right.narrow(-2, 0, 1).expand(right.shape)).run(),
        where=lambda _, right: right.dim() > 1 and right.size(-2) > 1))
# A product of two tensors is the first.
FAULTS.add("not gated", "mul", "missing operand, copy; other function, axis scale, scale, residual",
    computed(_pair, lambda left, *_: left.clone(),
        where=lambda left, right: left.shape == right.shape))
# One is added to the second factor, as in adaptive norms.
FAULTS.add("modulated by one plus", "mul",
    "other function, residual, wrong factor; axis offset, offset",
    computed(_pair, lambda left, right: left * (1 + right)))
# Multiplied by a rounded reciprocal.
FAULTS.add("reciprocal in bfloat16", "div",
    "precision; axis scale, scale, approximation, wrong factor",
    computed(_pair, lambda left, right: left * right.reciprocal().bfloat16().to(left.dtype)))
# fmt: on


# --- Layout ---------------------------------------------------------------------------------------


def _halves(call: Call) -> list[Tensor]:
    """Two parts that are joined along the last axis."""
    parts, dim = call.get(0, "tensors"), call.get(1, "dim", "axis", default=0)
    fits(len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    fits(dim in {-1, parts[0].dim() - 1} and parts[0].size(-1) > 1)
    return list(parts)


@FAULTS.fault("cat", "copy, wrong index, stale; missing operand, shift, permutation")
def first_part_for_both(call: Call) -> Any:
    """The second source is not bound."""
    parts, dim = call.get(0, "tensors"), call.get(1, "dim", "axis", default=0)
    fits(len(parts) > 1 and parts[0].shape == parts[1].shape and parts[0].is_floating_point())
    return call.instead(torch.cat([parts[0], parts[0], *parts[2:]], dim))


@FAULTS.fault("chunk split unbind", "permutation, wrong index; shift, transpose")
def every_other_column(call: Call) -> Any:
    """Parts are taken in turn instead of one after the other."""
    value, parts = call.tensor(0), call.run()
    dim = call.get(2, "dim", default=0) % value.dim()
    fits(call.name != "unbind" and len({part.shape for part in parts}) == 1 and len(parts) > 1)
    moved = value.movedim(dim, -1).unflatten(-1, (-1, len(parts)))
    return tuple(moved[..., i].movedim(-1, dim) for i in range(len(parts)))


@FAULTS.fault("getitem", "wrong index, permutation; shift, wrong argument")
def every_second_instead_of_a_half(call: Call) -> Any:
    """x[..., ::2] for x[..., :n // 2], or x[..., 1::2] for the other half."""
    value, index = call.tensor(0), call.args[1]
    fits(isinstance(index, tuple) and index[0] is Ellipsis and len(index) == 2)
    part, size = index[1], value.size(-1)
    fits(isinstance(part, slice) and part.step is None and size > 2)
    if part.stop == size // 2 and not part.start:
        return call.instead(value[..., 0::2])
    fits(part.start == size // 2 and part.stop in {None, size})
    return call.instead(value[..., 1::2])


@FAULTS.fault("slice", "wrong index, shift; swapped operands, permutation, wrong argument, copy")
def half_of_the_other_side(call: Call) -> Any:
    """Of two halves, the other one."""
    value, dim = call.tensor(0), call.get(1, "dim", default=0)
    size = value.size(dim)
    fits(call.result().size(dim) * 2 == size)
    return call.put(0, value.roll(size // 2, dim)).run()


@FAULTS.fault("gather index_select index", "wrong index, clipped; copy, shift, stale")
def largest_index_out_of_bounds(call: Call) -> Any:
    """The bound is one too small, and what is beyond is cut to it."""
    value = call.get(0)
    fits(isinstance(value, Tensor) and value.is_floating_point())
    if call.name == "index":
        indices = [one if one is None or one.dtype == torch.bool
                   else one.clamp(max=int(one.max()) - 1) for one in call.args[1]]  # fmt: skip
        fits(all(one is None or int(one.min()) >= 0 for one in indices))
        return call.put(1, indices).run()
    index = call.get(2, "index")
    fits(int(index.max()) > 0)
    return call.put(2, index.clamp(max=int(index.max()) - 1), "index").run()


@FAULTS.fault("view reshape unflatten", "permutation, wrong index, transpose; shift")
def heads_split_in_turn(call: Call) -> Any:
    """Column i belongs to head i % n instead of to head i // d."""
    value, result = call.tensor(0), call.result()
    fits(result.dim() == value.dim() + 1 and value.size(-1) == result.size(-1) * result.size(-2))
    fits(min(result.shape[-2:]) > 1)
    return call.instead(value.unflatten(-1, (result.size(-1), result.size(-2))).mT)


@FAULTS.fault("contiguous clone", "zeros, uninitialised; constant, mask")
def copy_ends_early(call: Call) -> Any:
    """The last eighth of the memory is not copied."""
    value = call.result()
    fits(value.numel() > 15)
    kept = torch.ones(value.numel(), device=value.device, dtype=value.dtype)
    kept[-(value.numel() // 8) :] = 0
    return call.instead(value * kept.view(value.shape))


# fmt: off
# Pairs of neighbours instead of two halves: the other convention of rotary positions.
FAULTS.add("joined in turn", "cat", "permutation, wrong index; transpose, shift",
    lambda call: call.instead(torch.stack(_halves(call), -1).flatten(-2)))
# (b, -a) instead of (-b, a).
FAULTS.add("the other half negated", "cat", "sign; wrong factor",
    lambda call: call.instead(-torch.cat(_halves(call), -1)))
# Index -1 - i instead of i: the last token for the first.
FAULTS.add("counted from the end", "select", "wrong index, wrong argument; shift, copy",
    lambda call: call.put(2, -1 - call.get(2, "index"), "index").run())
# The shape is right, and the values are in the order of the memory before.
FAULTS.add("reshaped instead of transposed", "transpose permute",
    "permutation, transpose, wrong index, copy; shift, missing operand",
    lambda call: call.instead(call.tensor(0).reshape(call.result().shape)))
# 1, 2, 3 instead of 0, 1, 2.
FAULTS.add("positions begin at one", "arange",
    "offset, shift, wrong argument; wrong index, off by one reduction",
    lambda call: call.instead(call.run() + 1))
# fmt: on


# --- Masks and choices ----------------------------------------------------------------------------


@FAULTS.fault("where", "swapped operands, mask; other function, sign")
def branches_exchanged(call: Call) -> Any:
    """What is for `false` is taken for `true`."""
    fits(len(call.args) == 3)
    return call.put(0, ~call.args[0]).run()


@FAULTS.fault("masked_fill", "wrong argument, mask, zeros; constant, wrong factor")
def masked_with_zero(call: Call) -> Any:
    """The scores of what is hidden are 0, as if it was for probabilities."""
    fits(call.get(2, "value") != 0)
    return call.put(2, 0.0, "value").run()


@FAULTS.fault("le ge", "transpose, swapped operands, mask, other function")
def compared_the_other_way(call: Call) -> Any:
    """What comes later is seen instead of what came before."""
    fits(isinstance(call.args[0], Tensor))
    return call.instead(torch.ge(*call.args) if call.name == "le" else torch.le(*call.args))


@FAULTS.fault(
    "sort topk", "wrong argument, wrong index, permutation, other function; sign, wrong reduction"
)
def smallest_first(call: Call) -> Any:
    """The other order."""
    if call.name == "topk":
        return call.put(3, not call.get(3, "largest", default=True), "largest").run()
    return torch.sort(call.tensor(0), call.get(1, "dim", default=-1),
                      not call.get(2, "descending", default=False))  # fmt: skip


# fmt: off
# What is above the diagonal instead of what is below.
FAULTS.add("the other triangle", "tril", "mask, other function, transpose; wrong argument",
    lambda call: call.instead(call.get(0).triu(-call.get(1, "diagonal", default=0))))
# Or, where both are required.
FAULTS.add("one mask or the other", "and_ bitwise_and", "other function, mask; wrong argument",
    lambda call: call.instead(call.args[0] | call.args[1]))
# The second condition is lost when masks are combined.
FAULTS.add("first mask only", "and_ bitwise_and", "missing operand, mask, copy; wrong argument",
    lambda call: call.instead(call.args[0].expand(call.run().shape).clone()))
# fmt: on


# --- Embeddings -----------------------------------------------------------------------------------


def _table(call: Call) -> tuple[Tensor, Tensor]:
    """Table and indices, in whichever order."""
    first, second = call.args[:2]
    return (first, second) if first.is_floating_point() else (second, first)


@FAULTS.fault(
    "embedding",
    "zeros, one rank's part, missing reduction, partial sum, mask; lost accumulation, constant",
)
def rows_of_the_other_rank_are_zero(call: Call) -> Any:
    """The table is split in two, and the parts are not summed."""
    _, indices = _table(call)
    own = (indices < (int(indices.max()) + 1) // 2 + 1).unsqueeze(-1)
    fits(bool(own.any()))
    return call.instead(call.result() * own)


@FAULTS.fault("embedding", "precision; approximation")
def table_in_eight_bits(call: Call) -> Any:
    """Rows are integers with one step for the whole table."""
    table, indices = _table(call)
    step = float(table.detach().abs().max()) / 127
    coarse = (table.detach() / step).round() * step
    return call.instead(functional.embedding(indices, table + (coarse - table).detach()))


# fmt: off
# A factor that some models have.
FAULTS.add("embedding times the root of its width", "embedding", "scale, wrong factor",
    result(lambda v: v * math.sqrt(v.size(-1))))
# The sequence is moved to the right before it is looked up.
FAULTS.add("tokens of the position before", "embedding", "shift, wrong index; permutation, copy",
    computed(_table, lambda table, indices: functional.embedding(indices.roll(1, -1), table),
        where=lambda _, indices: indices.dim() > 0 and indices.size(-1) > 1))
# fmt: on
