"""Wrong arithmetic: the wrong operation, an addend too few or too many, a factor, an epsilon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from paritas.mutants.mutations.calls import Call, Fault, Place, is_number, number_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# A constant below this, added, is there to keep a denominator from zero.
_LARGEST_EPSILON = 1e-2
_RSQRT = -0.5  # as an exponent
# Where an operator holds its bias, and where its epsilon.
_BIAS = {"addmm": 0, "baddbmm": 0, "addmv": 0, "convolution": 2}
_NORM_BIAS = {"native_layer_norm": 3, "native_batch_norm": 2, "native_group_norm": 2}
_EPSILON = {
    "native_layer_norm": 4,
    "native_batch_norm": 7,
    "native_group_norm": 7,
    "_fused_rms_norm": 3,
    "clamp_min": 1,
}
_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)


def _named(*names: str) -> Callable[[Place], list[str]]:
    return lambda place: [""] if place.name in names and place.parts(floating=False) else []


def _alpha(call: Call) -> Any:
    return call.kwargs.get("alpha", 1)


def _like(result: Any, call: Call) -> Tensor:
    """A wrong value in the shape and dtype of the right one."""
    right: Tensor = call.right()
    return torch.as_tensor(result).to(right.dtype).expand(right.shape).clone()


# --- 1, 2, 3, 14: another operation ---------------------------------------------------------------


def _multiplies(place: Place) -> list[str]:
    return [""] if place.name == "mul" and place.parts() else []


def _sum(call: Call, _: str) -> Any:
    return torch.add(call.args[0], call.args[1])


def _difference(call: Call, _: str) -> Any:
    return torch.sub(call.args[0], call.args[1], alpha=_alpha(call))


def _sum_of_difference(call: Call, _: str) -> Any:
    alpha = call.args[2] if len(call.args) > 2 else _alpha(call)  # noqa: PLR2004
    left, right = call.args[:2]
    if call.name == "rsub":
        return torch.add(torch.mul(left, alpha), right)
    return torch.add(left, right, alpha=alpha)


def _is_rsqrt(place: Place) -> list[str]:
    root = place.name == "pow" and place.argument(1) == _RSQRT
    return [""] if place.name == "rsqrt" or root else []


# --- 4, 5, 35: addends ----------------------------------------------------------------------------


def addends(place: Place) -> list[str]:
    """The addends of an addition that are tensors, or numbers that are no epsilon."""
    if place.name != "add" or not place.parts(floating=False):
        return []
    found = []
    for side, other in ((0, 1), (1, 0)):
        value = place.argument(side)
        addend = isinstance(value, Node) or (is_number(value) and abs(value) >= _LARGEST_EPSILON)
        if addend and isinstance(place.argument(other), Node):
            found.append(f"argument {side}")
    return found


def is_bias(place: Place, detail: str) -> bool:
    """Whether an addend is a vector added to every row."""
    value = place.given(number_in(detail))
    return value is not None and value.dim() < len(place.shape) and value.numel() > 1


def _droppable(place: Place) -> list[str]:
    position = _BIAS.get(place.name, _NORM_BIAS.get(place.name))
    if position is not None:
        return ["bias"] if isinstance(place.argument(position), Node) else []
    if place.backward and is_gradient(place):
        return []  # that one is called untied_gradient
    return addends(place)


def is_gradient(place: Place) -> bool:
    """Whether the call's result is the gradient of something, but for views."""
    return any(name.startswith("gradient of ") for name in place.ends.values())


def _dropped(call: Call, detail: str) -> Any:
    if detail != "bias":
        return without_addend(call, detail)
    name = call.name
    position = _BIAS.get(name, _NORM_BIAS.get(name, 0))
    if name in _BIAS and name != "convolution":
        return call.given((position, torch.zeros_like(call.args[position])))
    return call.given((position, None))


def without_addend(call: Call, detail: str) -> Tensor:
    """A sum of two without one of them."""
    left, right = call.args[:2]
    kept = torch.mul(right, _alpha(call)) if detail == "argument 0" else left
    return _like(kept, call)


def _doublable(place: Place) -> list[str]:
    return [detail for detail in addends(place) if not is_bias(place, detail)]


def _doubled(call: Call, detail: str) -> Any:
    left, right = call.args[:2]
    again = left if detail == "argument 0" else torch.mul(right, _alpha(call))
    return torch.add(call.right(), again)


def _biases(place: Place) -> list[str]:
    if place.name in _BIAS:
        return ["bias"] if isinstance(place.argument(_BIAS[place.name]), Node) else []
    return [detail for detail in addends(place) if is_bias(place, detail)]


def _bias_twice(call: Call, detail: str) -> Any:
    if detail != "bias":
        return _doubled(call, detail)
    position = _BIAS[call.name]
    return call.given((position, torch.mul(call.args[position], 2)))


# --- 6, 7, 8: factors -----------------------------------------------------------------------------


def _scalable(place: Place) -> list[str]:
    return [detail for detail, _ in place.parts()] if place.computes else []


def scaled(factor: float) -> Fault:
    """A result times `factor`."""
    return Fault(
        _scalable, lambda call, detail: call.spoil(detail, lambda part: torch.mul(part, factor))
    )


def _has_scale(place: Place) -> list[str]:
    if place.name in _ATTENTION:
        return [""]
    if place.name not in {"mul", "div"} or not place.parts() or place.given(0) is None:
        return []
    scale, traced = place.argument(1), place.given(1)
    if traced is not None:
        return [""] if traced.dim() == 0 and len(place.shape) > 0 else []
    return [""] if is_number(scale) and scale != 1 else []


def _unscaled(call: Call, _: str) -> Any:
    if call.name in _ATTENTION:
        return call.given(scale=1.0)
    return _like(call.args[0], call)


# --- 9, 10: epsilons ------------------------------------------------------------------------------


def _has_epsilon(place: Place) -> list[str]:
    position = 1 if place.name == "add" else _EPSILON.get(place.name)
    value: Any = None if position is None else place.argument(position)
    found = is_number(value) and 0 < value <= _LARGEST_EPSILON and place.parts()
    return [f"argument {position}"] if found else []


def _with_epsilon(call: Call, detail: str, factor: float) -> Any:
    position = number_in(detail.partition(",")[0])
    if factor == 0 and call.name == "clamp_min":
        return _like(call.args[0], call)
    return call.given((position, call.args[position] * factor))


def _growable(place: Place) -> list[str]:
    return [f"{detail}, times {n}" for detail in _has_epsilon(place) for n in (2, 10)]


FAULTS: dict[str, Fault] = {
    "mul_to_add": Fault(_multiplies, _sum),
    "add_to_sub": Fault(_named("add"), _difference),
    "sub_to_add": Fault(_named("sub", "rsub"), _sum_of_difference),
    "dropped_addend": Fault(_droppable, _dropped),
    "doubled_addend": Fault(_doublable, _doubled),
    "scaled_by_percent": scaled(1.01),
    "scaled_by_permille": scaled(1.001),
    "missing_scale": Fault(_has_scale, _unscaled),
    "dropped_epsilon": Fault(_has_epsilon, lambda call, detail: _with_epsilon(call, detail, 0.0)),
    "larger_epsilon": Fault(
        _growable,
        lambda call, detail: _with_epsilon(call, detail, number_in(detail)),
    ),
    "rsqrt_to_sqrt": Fault(_is_rsqrt, lambda call, _: torch.sqrt(call.args[0])),
    "bias_on_every_rank": Fault(_biases, _bias_twice),
}
