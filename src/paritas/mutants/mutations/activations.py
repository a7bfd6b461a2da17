"""Wrong activations, forward and backward: another one, none, or another form of gelu."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from paritas.mutants.mutations.calls import Call, Fault, Place

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten

_OTHERS: dict[str, Callable[..., Any]] = {
    "relu": F.gelu,
    "gelu": F.silu,
    "silu": F.gelu,
    "tanh": torch.erf,
    "erf": torch.tanh,
    "sigmoid": F.hardsigmoid,
    "hardsigmoid": torch.sigmoid,
    "elu": F.relu,
    "leaky_relu": F.relu,
    "softplus": F.relu,
    "hardswish": F.silu,
    "mish": F.silu,
    "hardtanh": torch.tanh,
    "log_sigmoid_forward": F.relu,
}
# Of the gradient that comes in and what the forward pass kept.
_OTHERS_BACKWARD: dict[str, Callable[..., Any]] = {
    "gelu_backward": aten.silu_backward.default,
    "silu_backward": aten.gelu_backward.default,
    "tanh_backward": aten.sigmoid_backward.default,
    "sigmoid_backward": aten.tanh_backward.default,
    "threshold_backward": lambda g, y: torch.where(y > 0, g, torch.mul(g, 0.01)),
    "hardswish_backward": aten.silu_backward.default,
    "elu_backward": lambda g, _: g.clone(),
    "leaky_relu_backward": lambda g, x: torch.where(x > 0, g, torch.zeros_like(g)),
}


def _activates(place: Place) -> list[str]:
    known = place.name in _OTHERS or place.name in _OTHERS_BACKWARD
    return [""] if known and isinstance(place.value, torch.Tensor) and place.parts() else []


def _another(call: Call, _: str) -> Any:
    name = call.name
    if name in _OTHERS:
        return _OTHERS[name](call.args[0])
    return _OTHERS_BACKWARD[name](call.args[0], call.args[1])


def _none(call: Call, _: str) -> Any:
    # Of a backward node, the first argument is the gradient that comes in.
    return call.args[0].clone()


def _other_form(call: Call, _: str) -> Any:
    known = call.kwargs.get("approximate", "none")
    return call.given(approximate="tanh" if known == "none" else "none")


FAULTS: dict[str, Fault] = {
    "wrong_activation": Fault(_activates, _another),
    "dropped_activation": Fault(_activates, _none),
    "other_gelu": Fault(
        lambda place: [""] if place.name in {"gelu", "gelu_backward"} else [], _other_form
    ),
}
