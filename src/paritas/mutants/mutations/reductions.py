"""Wrong reductions: another axis, another divisor, another variance."""

from __future__ import annotations

import math
from typing import Any

import torch

from paritas.mutants.mutations.calls import Call, Fault, Place, is_number, number_in

# What keeps its shape whatever axis it runs along, with the axis' position.
_ALONG = {
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 1,
    "flip": 1,
}
_REDUCES = frozenset({"sum", "mean", "amax", "amin", "var", "std", "var_mean", "logsumexp"})
_CHOOSES = frozenset({"max", "min", "argmax", "argmin", "prod", "any", "all"})
_NORMS = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm"})


def _other_axes(place: Place) -> list[str]:
    source = place.given(0)
    if source is None or source.dim() < 2:  # noqa: PLR2004
        return []
    count = source.dim()
    if place.name in _ALONG:
        axis = place.argument(_ALONG[place.name])
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        return [f"axis {(axis - 1) % count}"] if isinstance(axis, int) else []
    axes = reduced_axes(place)
    if not axes or len(axes) == count:
        return []
    free = [axis for axis in range(count) if axis not in axes]
    sizes = source.shape
    # The shape has to come out the same, or the program would stop by itself.
    return [
        f"axis {other}"
        for other in free
        if sizes[other] == sizes[axes[-1]] > 1 and other == axes[-1] - 1
    ]


def reduced_axes(place: Place) -> list[int]:
    """The axes a reduction runs along; none where it names none."""
    source, axes = place.given(0), place.argument(1)
    if source is None or place.name not in _REDUCES | _CHOOSES:
        return []
    axes = [axes] if isinstance(axes, int) and not isinstance(axes, bool) else axes
    if not isinstance(axes, list | tuple):
        return []
    return sorted(axis % source.dim() for axis in axes)


def _along_other(call: Call, detail: str) -> Any:
    axis = number_in(detail)
    position = _ALONG.get(call.name)
    if position is not None:
        asked = call.args[position]
        return call.given((position, [axis] if isinstance(asked, list | tuple) else axis))
    # The two axes are of one size: reduced along the other, the result has the shape it should.
    return call.given((0, call.args[0].transpose(axis, axis + 1)))


def _averages(place: Place) -> list[str]:
    source = place.given(0)
    if source is None:
        return []
    if place.name == "mean":
        return [""] if _terms(place) > 1 else []
    count = place.argument(1)
    # Backward, a mean divides what it spreads out by the number of its terms.
    spread = place.name == "div" and place.backward and place.parts()
    whole = is_number(count) and 1 < count <= source.numel() and count == int(count)
    return [""] if spread and whole and "expand" in str(place.argument(0)) else []


def _terms(place: Place) -> int:
    source = place.given(0)
    if source is None:
        return 0
    return source.numel() // max(1, math.prod(place.shape))


def _one_less(call: Call, _: str) -> Any:
    if call.name == "div":
        return torch.div(call.args[0], call.args[1] - 1)
    right = call.right()
    count = call.args[0].numel() // max(1, right.numel())
    return torch.mul(right, count / (count - 1))


def _has_variance(place: Place) -> list[str]:
    if place.name in {"var", "std", "var_mean"}:
        return [""] if _terms(place) > 1 else []
    if place.name == "native_batch_norm":
        return [""] if place.argument(5) is True and _norm_terms(place.shape, place) > 1 else []
    return [""] if place.name in _NORMS and _norm_terms(place.shape, place) > 1 else []


def _norm_terms(shape: tuple[int, ...], place: Place) -> int:
    arguments = [place.argument(i) for i in range(8)]
    return _terms_of_norm(place.name, shape, arguments)


def _terms_of_norm(name: str, shape: tuple[int, ...], args: Any) -> int:
    """How many values a normalisation takes one variance over."""
    if name == "native_layer_norm":
        return math.prod(args[1])
    if name == "native_group_norm":
        return int(args[4] * args[5] // args[6])
    return math.prod(shape) // shape[1]


def _other_correction(call: Call, _: str) -> Any:
    name = call.name
    if name not in _NORMS:
        known = call.kwargs.get("correction", 1)
        return call.given(correction=1 - (1 if known is None else known))
    # 1/sqrt(k var + eps) = 1/sqrt(k) * 1/sqrt(var + eps/k), with k = n / (n - 1).
    count = _terms_of_norm(name, call.args[0].shape, call.args)
    k = count / (count - 1)
    weight_at, eps_at = (2, 4) if name == "native_layer_norm" else (1, 7)
    weight = call.args[weight_at]
    weight = call.args[0].new_ones(_channels(name, call)) if weight is None else weight
    shrunk = torch.mul(weight, k**-0.5)
    out, mean, rstd = call.given((weight_at, shrunk), (eps_at, call.args[eps_at] / k))
    return out, mean, torch.mul(rstd, k**-0.5)


def _channels(name: str, call: Call) -> list[int]:
    return list(call.args[1]) if name == "native_layer_norm" else [call.args[0].shape[1]]


FAULTS: dict[str, Fault] = {
    "wrong_dim": Fault(_other_axes, _along_other),
    "mean_over_one_less": Fault(_averages, _one_less),
    "wrong_correction": Fault(_has_variance, _other_correction),
}
