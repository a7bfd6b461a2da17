"""Convolutions: samples, channels and groups of channels can be split; space is left whole."""

from __future__ import annotations

from paritas.partition.library.claims import SUM, Bound, Claim, once
from paritas.partition.library.registry import functional, rule

_PLAIN = "x weight bias stride padding dilation groups"
_TRANSPOSED = "x weight bias stride padding output_padding groups dilation"
_SPACE = ("t", "h", "w")


def _claim(bound: Bound, groups: int, *, transposed: bool) -> Claim | None:
    shape, weight = bound.shape("x"), bound.shape("weight")
    if shape is None or weight is None:
        return None
    space = _SPACE[len(_SPACE) - (len(weight) - 2) :]
    samples = [] if len(shape) == len(weight) - 1 else ["1" if shape[0] == 1 else "b"]
    if len(shape) != len(samples) + 1 + len(space):
        return None
    inside, outside, kernel = _channels(weight, groups, transposed=transposed)
    inputs = {
        "x": " ".join([*samples, inside, *(f"{s}^" for s in space)]),
        "weight": " ".join([*kernel, *(f"k{s}^" for s in space)]),
    }
    if bound.has("bias"):
        inputs["bias"] = once(outside, inside)
    numbers = () if groups == 1 else (("groups", None, "g"),)
    return Claim(inputs, (" ".join([*samples, outside, *(f"{s}o^" for s in space)]),), numbers)


def _channels(
    weight: tuple[int, ...], groups: int, *, transposed: bool
) -> tuple[str, str, tuple[str, str]]:
    """The channels of the input, of the result, and those two of the weight.

    The channels of a group make those of the same group. So groups go to ranks as they are, and
    their number is divided; inside of a group, channels of the result are not in a row.
    """
    if groups == 1:
        taken, made = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
        inside = "1" if taken == 1 else f"c{SUM}"
        outside = "1" if made == 1 else "o"
        return inside, outside, (inside, outside) if transposed else (outside, inside)
    inside, outside = "(g c^)", "(g o^)"
    return inside, outside, (inside, "o^") if transposed else (outside, "c^")


@rule(
    _PLAIN,
    functional("conv1d conv2d conv3d"),
    "torch.conv1d torch.conv2d torch.conv3d aten.conv1d aten.conv2d aten.conv3d",
)
def _convolution(bound: Bound) -> Claim | None:
    return _claim(bound, bound.get("groups", 1), transposed=False)


@rule(
    _TRANSPOSED,
    functional("conv_transpose1d conv_transpose2d conv_transpose3d"),
    "torch.conv_transpose1d torch.conv_transpose2d torch.conv_transpose3d",
    "aten.conv_transpose1d aten.conv_transpose2d aten.conv_transpose3d",
)
def _transposed(bound: Bound) -> Claim | None:
    return _claim(bound, bound.get("groups", 1), transposed=True)


@rule(
    "x weight bias stride padding dilation transposed output_padding groups",
    "torch.convolution aten.convolution",
)
def _general(bound: Bound) -> Claim | None:
    return _claim(bound, bound.get("groups", 1), transposed=bool(bound.get("transposed")))
