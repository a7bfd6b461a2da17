"""How much error adding up many terms makes, per operator, in half units of last place.

Adding n terms one by one rounds n partial sums. Partial sums of terms of one sign grow like r k/n
towards the result r; those of random signs like the square root of the sum of squares q. Together
the roundings amount to a random error of u/2 times the amplitude

    a = sqrt(n) * sqrt(r^2 / 3 + q / 2).

Implementations that add in blocks or pairs do better; none that is correct does much worse.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch._ops import OpOverload

Amplitudes = list["Tensor | None"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator, on its unperturbed arguments."""

    name: str
    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def accumulation(call: Call) -> Amplitudes:
    """The amplitude for each result, or nothing where no long sum is made."""
    rule = _RULES.get(call.name)
    first = call.args[0] if call.args else None
    if rule is None or not isinstance(first, torch.Tensor) or not first.numel():
        return []
    if not (first.is_floating_point() or first.is_complex()):
        return []
    return rule(call)


def amplitude_from(result: Tensor, squares: Tensor, length: int) -> Tensor:
    """The amplitude a, made in place of `squares`, which is q."""
    size = result.abs() if result.is_complex() else result
    if squares.dtype != size.dtype:
        squares = squares.to(size.dtype)
    return squares.mul_(length / 2).addcmul_(size, size, value=length / 3).sqrt_()


def _squared(tensor: Tensor) -> Tensor:
    return tensor.abs().square_() if tensor.is_complex() else tensor.square()


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Squares of a tensor over the square of `top`, so that float32 holds them and their sums."""

    values: Tensor
    top: float


def _narrow_squares(*tensors: Tensor) -> list[_Squares] | None:
    """Squares in float32, in which a product costs half: an amplitude needs but a few digits.

    Not of complex numbers, nor where a value is not finite or too large to be scaled.
    """
    found = []
    for tensor in tensors:
        if tensor.is_complex() or not tensor.numel():
            return None
        narrow = tensor.to(torch.float32, copy=True)
        top = max(abs(float(end)) for end in torch.aminmax(narrow))
        if not _TINIEST < top < _LARGEST and (top or bool(tensor.any())):  # nor is a NaN between
            return None
        if _SMALL <= top <= _LARGE or not top:
            top = 1.0
        else:
            top = math.ldexp(1.0, math.frexp(top)[1])  # a power of two: no digit is lost
            narrow.mul_(1 / top)
        found.append(_Squares(narrow.square_(), top))
    return found


# Values of this size need no scaling: their squares, and products of two of these, stay normal.
_SMALL, _LARGE = 1e-3, 1e3
# What float32 itself holds with room to spare.
_TINIEST, _LARGEST = 1e-30, 1e30
# Of a result over the scale of its factors: a bias far above them would not have a square.
_ABOVE = 1e12


def _narrow_amplitude(result: Tensor, squares: Tensor, length: int, top: float) -> Tensor | None:
    """The amplitude from squares in float32 that were scaled by `top`; None if out of range."""
    narrow = (result if top == 1 else result / top).to(torch.float32, copy=True)
    if not max(abs(float(end)) for end in torch.aminmax(narrow)) < _ABOVE:
        return None
    amplitude = squares.mul_(length / 2).addcmul_(narrow, narrow, value=length / 3).sqrt_()
    wide = amplitude.to(result.dtype)
    return wide if top == 1 else wide.mul_(top)


def _ratio(x: Tensor, result: Tensor) -> int:
    """How many elements went into one."""
    return max(1, x.numel() // max(1, result.numel()))


def _matmul(position: int) -> Callable[[Call], Amplitudes]:
    def rule(call: Call) -> Amplitudes:
        left, right = call.args[position], call.args[position + 1]
        length = left.shape[-1]
        narrow = _narrow_squares(left, right)
        if narrow is not None and call.result.numel():
            squares = torch.matmul(narrow[0].values, narrow[1].values)
            top = narrow[0].top * narrow[1].top
            amplitude = _narrow_amplitude(call.result, squares, length, top)
            if amplitude is not None:
                return [amplitude]
        squares = torch.matmul(_squared(left), _squared(right))
        return [amplitude_from(call.result, squares, length)]

    return rule


def _sum(call: Call) -> Amplitudes:
    x, *rest = call.args
    squares = call.func(_squared(x), *rest, **call.kwargs)
    return [amplitude_from(call.result, squares, _ratio(x, call.result))]


def _mean(call: Call) -> Amplitudes:
    x, *rest = call.args
    squares = call.func(_squared(x), *rest, **call.kwargs)
    length = _ratio(x, call.result)
    # A mean is the sum over n: so is its amplitude, and q is the mean of squares over n.
    return [amplitude_from(call.result, squares.div_(length), length)]


def _cumsum(call: Call) -> Amplitudes:
    x, dim = call.args[0], call.args[1]
    squares = call.func(_squared(x), dim, **call.kwargs)
    return [amplitude_from(call.result, squares, x.shape[dim] if x.dim() else 1)]


def _one_sign(call: Call) -> Amplitudes:
    """A sum of positive terms, or a product: the error is relative."""
    result = call.result[0] if isinstance(call.result, list | tuple) else call.result
    return [result.abs() * math.sqrt(_ratio(call.args[0], result) / 3)]


def _along(call: Call) -> Amplitudes:
    """Every value of a row shares the sum of positive terms made along it."""
    x, dim = call.args[0], call.args[1]
    factor = math.sqrt((x.shape[dim] if x.dim() else 1) / 3)
    absolute = call.name == "_log_softmax"  # there the sum is under a logarithm
    return [torch.full_like(call.result, factor) if absolute else call.result.abs() * factor]


def _log_sum(call: Call) -> Amplitudes:
    length = _ratio(call.args[0], call.result)
    return [torch.full_like(call.result, math.sqrt(length / 3))]


def _attention(call: Call) -> Amplitudes:
    keys = call.args[1].shape[-2]
    return [call.result[0].abs() * math.sqrt(keys / 3)]


def _variance(call: Call) -> Amplitudes:
    """A mean far from zero is subtracted from every term, with the error it has."""
    x = call.args[0]
    multiple = isinstance(call.result, list | tuple)
    spread = call.result[0] if multiple else call.result
    length = _ratio(x, spread)
    size = x.abs().amax()
    is_std = call.name.startswith("std")
    steep = 1.0 if is_std else 2 * spread.sqrt()
    amplitude = spread * math.sqrt(length / 3) + steep * size / math.sqrt(length)
    if not multiple:
        return [amplitude]
    mean = _squared(call.result[1])
    squares = mean + (spread.square() if is_std else spread)
    return [amplitude, (length * mean / 3 + squares / 2).sqrt()]


def _shifted(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int) -> Tensor:
    """What the error of a row's mean does to its normalised values."""
    shift = math.sqrt(n / 3) * mean.abs() * rstd
    scale = shift if weight is None else shift * weight.abs()
    return scale.expand(x.shape)


def _moments(x: Tensor, mean: Tensor, rstd: Tensor, n: int) -> Amplitudes:
    """The error of a row's mean, and of one over its deviation, each made over n terms."""
    n = max(1, n)
    squares = _squared(mean) + rstd.square().reciprocal()
    steep = rstd.square() * x.abs().amax() / math.sqrt(n) if x.numel() else torch.zeros_like(rstd)
    return [
        (n * _squared(mean) / 3 + squares / 2).sqrt(),
        rstd * math.sqrt(n / 12) + steep,
    ]


def _layer_norm(call: Call) -> Amplitudes:
    x, shape, weight = call.args[:3]
    _, mean, rstd = call.result
    n = math.prod(shape)
    return [_shifted(x, mean, rstd, weight, n), *_moments(x, mean, rstd, n)]


def _batch_norm(call: Call) -> Amplitudes:
    x, weight = call.args[:2]
    _, mean, rstd = call.result
    if not mean.numel():  # evaluation: no statistics are made
        return []
    channels = (1, -1, *(1,) * (x.dim() - 2))
    scale = None if weight is None else weight.view(channels)
    count = x.numel() // x.shape[1]
    shifted = _shifted(x, mean.view(channels), rstd.view(channels), scale, count)
    return [shifted, *_moments(x, mean, rstd, count)]


def _group_norm(call: Call) -> Amplitudes:
    x, weight, _, _, _, _, groups = call.args[:7]
    _, mean, rstd = call.result
    each = x.shape[1] // groups
    channels = (x.shape[0], x.shape[1], *(1,) * (x.dim() - 2))
    wide = [s.repeat_interleave(each, dim=-1).view(channels) for s in (mean, rstd)]
    scale = None if weight is None else weight.view(1, -1, *(1,) * (x.dim() - 2))
    n = x[0].numel() // groups if x.shape[0] else 1
    return [_shifted(x, wide[0], wide[1], scale, n), *_moments(x, mean, rstd, n)]


def _parameter_sums(
    grad: Tensor, normal: Tensor, over: Sequence[int], result: Any, n: int
) -> Amplitudes:
    """Weight and bias gradients of a normalisation are sums over everything else."""
    terms = (None, _squared(grad * normal), _squared(grad))
    dims = list(over)
    return [
        None if r is None or q is None else amplitude_from(r, q.sum(dim=dims).view_as(r), n)
        for r, q in zip(result, terms, strict=True)
    ]


def _layer_norm_backward(call: Call) -> Amplitudes:
    grad, x, shape, mean, rstd = call.args[:5]
    over = range(x.dim() - len(shape))
    rows = max(1, x.numel() // max(1, math.prod(shape)))
    return _parameter_sums(grad, (x - mean) * rstd, over, call.result, rows) if over else []


def _batch_norm_backward(call: Call) -> Amplitudes:
    grad, x, _, _, _, mean, rstd = call.args[:7]
    if mean is None or not mean.numel():
        return []
    channels = (1, -1, *(1,) * (x.dim() - 2))
    normal = (x - mean.view(channels)) * rstd.view(channels)
    over = [dim for dim in range(x.dim()) if dim != 1]
    return _parameter_sums(grad, normal, over, call.result, x.numel() // x.shape[1])


def _convolution(call: Call) -> Amplitudes:
    x, weight, _, *rest = call.args
    length = weight.numel() // max(1, weight.shape[0])
    narrow = _narrow_squares(x, weight)
    if narrow is not None and call.result.numel():
        values, top = [each.values for each in narrow], narrow[0].top * narrow[1].top
        squares = call.func(*values, None, *rest, **call.kwargs)
        amplitude = _narrow_amplitude(call.result, squares, length, top)
        if amplitude is not None:
            return [amplitude]
    squares = call.func(_squared(x), _squared(weight), None, *rest, **call.kwargs)
    return [amplitude_from(call.result, squares, length)]


def _convolution_backward(call: Call) -> Amplitudes:
    grad, x, weight, *rest = call.args
    positions = grad.numel() // max(1, grad.shape[1])
    lengths = (weight.numel() // max(1, weight.shape[1]), positions, positions)
    narrow = _narrow_squares(grad, x, weight)
    if narrow is not None:
        squares = call.func(*(each.values for each in narrow), *rest, **call.kwargs)
        g, i, w = (each.top for each in narrow)
        amplitudes = [
            None if r is None or q is None else _narrow_amplitude(r, q, n, top)
            for r, q, n, top in zip(call.result, squares, lengths, (g * w, g * i, g), strict=True)
        ]
        if all((r is None) == (a is None) for r, a in zip(call.result, amplitudes, strict=True)):
            return amplitudes
    squares = call.func(_squared(grad), _squared(x), _squared(weight), *rest, **call.kwargs)
    return [
        None if r is None or q is None else amplitude_from(r, q, n)
        for r, q, n in zip(call.result, squares, lengths, strict=True)
    ]


def _embedding_backward(call: Call) -> Amplitudes:
    grad, indices, *rest = call.args
    squares = call.func(_squared(grad), indices, *rest, **call.kwargs)
    return [amplitude_from(call.result, squares, _most(indices))]


def _indexed_sum(call: Call) -> Amplitudes:
    x, dim, index, source, *rest = call.args
    squares = call.func(_squared(x), dim, index, _squared(source), *rest, **call.kwargs)
    return [amplitude_from(call.result, squares.abs_(), 1 + _most(index))]  # alpha has a sign


def _most(indices: Tensor) -> int:
    """How often the most frequent index occurs."""
    return int(torch.bincount(indices.reshape(-1)).max()) if indices.numel() else 1


# Vectorised forms of the error function are rational approximations, good to so many half units of
# one whatever the value: nobody promises more, and gelu inherits it.
_ERF = 8.0


def _erf(call: Call) -> Amplitudes:
    return [torch.full_like(call.result, _ERF)]


def _gelu(call: Call) -> Amplitudes:
    return [call.args[0].abs().mul_(_ERF / 2)]


_RULES: dict[str, Callable[[Call], Amplitudes]] = {
    "mm": _matmul(0),
    "bmm": _matmul(0),
    "mv": _matmul(0),
    "dot": _matmul(0),
    "addmm": _matmul(1),
    "baddbmm": _matmul(1),
    "addmv": _matmul(1),
    "sum": _sum,
    "mean": _mean,
    "cumsum": _cumsum,
    "prod": _one_sign,
    "norm": _one_sign,
    "linalg_vector_norm": _one_sign,
    "mse_loss": _one_sign,
    "nll_loss_forward": _one_sign,
    "binary_cross_entropy": _one_sign,
    "_softmax": _along,
    "_log_softmax": _along,
    "logsumexp": _log_sum,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "var": _variance,
    "std": _variance,
    "var_mean": _variance,
    "std_mean": _variance,
    "native_layer_norm": _layer_norm,
    "native_batch_norm": _batch_norm,
    "native_group_norm": _group_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "native_batch_norm_backward": _batch_norm_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
    "erf": _erf,
    "erfc": _erf,
    "gelu": _gelu,
    "gelu_backward": _gelu,
    "index_add": _indexed_sum,
    "scatter_add": _indexed_sum,
}
