"""The error of summing many terms, per operator: the amplitudes of `summing` for its results.

The axes of a sum, and how many terms it has, are read from the operator's index formula. These
have none that says it, so they are stated here: the backward kernels, the fused attentions,
`_trilinear`, `_grouped_mm` and `_safe_softmax`, which have no definition; norms and variances,
whose statistics are results of their own; windows, which may overlap, so that the formula reads the
plane; and sums by index, where it depends on values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from paritas.core.operators.catalogue import summation_of
from paritas.core.operators.summed_axes import summed_axes
from paritas.core.precision.summing import (
    FAR_FROM_RANDOM,
    FEW,
    PATH_BLOCKS,
    SHORTEST_PATH,
    SharedError,
    amplitude_from,
    amplitude_in_order,
    path_of_product,
    path_of_rows,
    rows_of,
    square,
    with_error_of_equal_terms,
)
from paritas.core.torch_private.kernels import attention_weights, grouped_mm, place_of_argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from paritas.core.operators.definitions import Summation
    from paritas.core.operators.summed_axes import SummedAxes
    from paritas.core.precision.summing import Amplitudes, UnperturbedCall
    from paritas.core.torch_private.operators import Operator


def accumulation(call: UnperturbedCall) -> Amplitudes:
    """The amplitude for each result; empty if there is no long sum."""
    summation = summation_of(call.name)
    first = call.args[0] if call.args else None
    if summation is None or not isinstance(first, torch.Tensor) or not first.numel():
        return []
    if not (first.is_floating_point() or first.is_complex()):
        return []
    if isinstance(call.result, torch.Tensor) and not (
        call.result.is_floating_point() or call.result.is_complex()
    ):
        return []  # `cumsum(counts, 0, dtype=torch.int32)`
    return _RULES[summation].amplitudes(call)


def rounded_parts(call: UnperturbedCall, accumulated: Amplitudes) -> list[Tensor | None]:
    """For each result, the size of the partial sums that another program may round and add up.

    In half precisions a sum is computed in float32 and rounded once. But ranks, micro-batches and
    kernels that split it round each part. Where the parts cancel, they are larger than the result.
    An amplitude has the squares of all partial sums in it.
    """
    summation = summation_of(call.name)
    lengths = _RULES[summation].lengths(call) if summation else []
    return [
        amplitude / math.sqrt(length) if isinstance(amplitude, torch.Tensor) and length else None
        for amplitude, length in zip(accumulated, lengths, strict=False)
    ]


@dataclasses.dataclass(frozen=True)
class _Squares:
    """Squares of a tensor divided by the square of `top`, which keeps them in float32's range."""

    values: Tensor
    top: float


def _narrow_squares(*tensors: Tensor) -> list[_Squares] | None:
    """Squares in float32, where a product costs half: an amplitude needs only a few digits.

    None for complex numbers, and if a value is not finite or too large to scale.
    """
    narrow_squares = []
    for tensor in tensors:
        if tensor.is_complex() or not tensor.numel():
            return None
        narrow = tensor.to(torch.float32, copy=True)
        top = max(abs(float(end)) for end in torch.aminmax(narrow))
        in_range = _SMALLEST_SCALED < top < _LARGEST_SCALED  # False for NaN
        if not in_range and (top or bool(tensor.any())):
            return None
        if _SMALLEST_UNSCALED <= top <= _LARGEST_UNSCALED or not top:
            top = 1.0
        else:
            top = math.ldexp(1.0, math.frexp(top)[1])  # a power of two, which is exact
            narrow.mul_(1 / top)
        narrow_squares.append(_Squares(narrow.square_(), top))
    return narrow_squares


# Values in this range need no scaling: their squares, and products of two squares, stay normal.
_SMALLEST_UNSCALED, _LARGEST_UNSCALED = 1e-3, 1e3
# Values well inside the range of float32.
_SMALLEST_SCALED, _LARGEST_SCALED = 1e-30, 1e30
# Limit of a result over the scale of its factors: the square of a larger bias would overflow.
_MOST_ABOVE_SCALE = 1e12


def _narrow_amplitude(result: Tensor, squares: Tensor, length: int, top: float) -> Tensor | None:
    """The amplitude from squares in float32 that were scaled by `top`; None if out of range."""
    narrow = (result if top == 1 else result / top).to(torch.float32, copy=True)
    if not max(abs(float(end)) for end in torch.aminmax(narrow)) < _MOST_ABOVE_SCALE:
        return None
    amplitude = squares.mul_(length / 2).addcmul_(narrow, narrow, value=length / 3).sqrt_()
    wide = amplitude.to(result.dtype)
    return wide if top == 1 else wide.mul_(top)


def _count_terms(x: Tensor, result: Tensor) -> int:
    """The number of elements per result."""
    return max(1, x.numel() // max(1, result.numel()))


def _amplitude_of_products(
    result: Tensor, factors: Sequence[Tensor], length: int, multiply: Callable[..., Tensor]
) -> Tensor:
    """The amplitude of sums of products of two factors."""
    narrow = _narrow_squares(*factors)
    if narrow is not None and result.numel():
        squares = multiply(*(each.values for each in narrow))
        amplitude = _narrow_amplitude(result, squares, length, narrow[0].top * narrow[1].top)
        if amplitude is not None:
            return amplitude
    return amplitude_from(result, multiply(*map(square, factors)), length)


def _summed(call: UnperturbedCall) -> dict[str, SummedAxes]:
    """What a result sums over, of each tensor by the parameters of the operator's definition."""
    return summed_axes(call.name, call.args, call.kwargs)


def _products(call: UnperturbedCall) -> Amplitudes:
    tensors = zip(call.args, _summed(call).values(), strict=False)
    left, right = factors = [tensor for tensor, summed in tensors if summed.axes]
    (length,) = _terms_of_products(call)
    amplitude = _amplitude_of_products(call.result, factors, length, torch.matmul)
    return [amplitude_in_order(amplitude, length, path_of_product(left, right))]


def _terms_of_products(call: UnperturbedCall) -> list[int]:
    return [next(summed.terms for summed in _summed(call).values() if summed.axes)]


def _sum(call: UnperturbedCall) -> Amplitudes:
    x, *rest = call.args
    squares = call.func(square(x), *rest, **call.kwargs)
    (length,) = _terms_of_sum(call)
    rows = rows_of(x, _summed(call)["x"].axes)
    amplitude = amplitude_from(call.result, squares, length)
    amplitude = with_error_of_equal_terms(amplitude, rows)
    return [amplitude_in_order(amplitude, length, path_of_rows(rows))]


def _terms_of_sum(call: UnperturbedCall) -> list[int]:
    return [_summed(call)["x"].terms]


def _mean(call: UnperturbedCall) -> Amplitudes:
    x, *rest = call.args
    squares = call.func(square(x), *rest, **call.kwargs)
    (length,) = _terms_of_sum(call)
    # A mean is the sum over n, and so is its amplitude; q is the mean of squares over n.
    amplitude = amplitude_from(call.result, squares.div_(length), length)
    rows = rows_of(x, _summed(call)["x"].axes)
    amplitude = with_error_of_equal_terms(amplitude * length, rows).div_(length)
    path = path_of_rows(rows)
    path = None if path is None else path.div_(length**2)
    return [amplitude_in_order(amplitude, length, path)]


def _cumsum(call: UnperturbedCall) -> Amplitudes:
    x, dim = call.args[0], call.args[1]
    squares = call.func(square(x), dim, **call.kwargs)
    amplitude = amplitude_from(call.result, squares, x.shape[dim] if x.dim() else 1)
    # Here the partial sums are the results.
    path = call.func(square(call.result), dim) if x.dim() else None
    return [amplitude_in_order(amplitude, 1, path)]


def _one_sign(call: UnperturbedCall) -> Amplitudes:
    """A sum of positive terms, or a product: the error is relative."""
    result = call.result[0] if isinstance(call.result, list | tuple) else call.result
    return [result.abs() * math.sqrt(_count_terms(call.args[0], result) / 3)]


def _softmax(call: UnperturbedCall, *, is_log: bool = False) -> Amplitudes:
    """All values of a row share one sum of positive terms; its error moves them together."""
    x, dim = call.args[0], call.args[1]
    factor = math.sqrt((x.shape[dim] if x.dim() else 1) / 3)
    error = torch.full_like(call.result, factor) if is_log else call.result.abs() * factor
    return [[SharedError(error, error.shape), SharedError(error, _shape_of_sums(error, dim))]]


def _softmax_backward(call: UnperturbedCall, *, is_log: bool = False) -> Amplitudes:
    """Each value minus its share of the row's sum, which is far larger where the two cancel."""
    grad, output, dim = call.args[:3]
    terms = grad if is_log else grad * output
    shape = _shape_of_sums(terms, dim)
    total, squares = (each.sum(dim).view(shape) for each in (terms, square(terms)))
    error = amplitude_from(total, squares, terms.shape[dim] if terms.dim() else 1)
    share = output.exp() if is_log else output.abs()
    return [[SharedError(share * error, shape)]]


def _shape_of_sums(values: Tensor, dim: int) -> torch.Size:
    """The shape of the sums along a dimension, which is kept."""
    sizes = list(values.shape)
    if sizes:
        sizes[dim] = 1
    return torch.Size(sizes)


def _log_sum(call: UnperturbedCall) -> Amplitudes:
    (length,) = _terms_of_sum(call)
    return [torch.full_like(call.result, math.sqrt(length / 3))]


def _attention(call: UnperturbedCall) -> Amplitudes:
    """Each row of the output is divided by one sum, whose logarithm is kept for the backward."""
    query, key, value = call.args[:3]
    output, sums = call.result[:2]
    keys = key.shape[-2]
    shared = output.abs() * math.sqrt(keys / 3)
    of_sums = torch.full_like(sums, math.sqrt(keys / 3))
    weights_and_scale = _attention_weights(call, query, key, value)
    if weights_and_scale is None:
        return [shared, of_sums]
    weights, _ = weights_and_scale
    amplitude = amplitude_from(output, weights.square() @ value.square(), keys)
    amplitude = amplitude_in_order(amplitude, keys, path_of_product(weights, value))
    rows = SharedError(shared, _shape_of_sums(output, -1))
    return [[SharedError(amplitude, output.shape), rows], of_sums]


def _attention_backward(call: UnperturbedCall) -> Amplitudes:
    """Scores and the gradients of weights are sums over a head; three more products use them."""
    grad, query, key, value = call.args[:4]
    weights_and_scale = _attention_weights(call, query, key, value)
    lengths = key.shape[-2], query.shape[-2], query.shape[-2]
    if weights_and_scale is None:
        return [
            None if r is None else r.abs() * math.sqrt(n / 3)
            for r, n in zip(call.result[:3], lengths, strict=True)
        ]
    weights, scale = weights_and_scale
    head = query.shape[-1]
    of_scores = _variance_of_product(query, key.mT, head).mul_(scale**2)
    of_gradients = _variance_of_product(grad, value.mT, head)
    to_weights = grad @ value.mT
    to_scores = to_weights.sub_((to_weights * weights).sum(dim=-1, keepdim=True)).square_()
    chances = weights.square()
    variance = chances * (to_scores * of_scores + of_gradients)
    terms = to_scores.mul_(chances)
    pairs = (
        (terms, variance, key * scale),
        (terms.mT, variance.mT, query * scale),
        (chances.mT, (chances * of_scores).mT, grad),
    )
    return [
        None
        if result is None
        else _with_variance(amplitude_from(result, squares @ square(by), n), errors @ square(by))
        for result, n, (squares, errors, by) in zip(call.result[:3], lengths, pairs, strict=True)
    ]


def _variance_of_product(left: Tensor, right: Tensor, length: int) -> Tensor:
    return amplitude_from(left @ right, square(left) @ square(right), length).square_()


def _with_variance(amplitude: Tensor, variance: Tensor) -> Tensor:
    return amplitude.square_().add_(variance).sqrt_()


def errors_of_inner_sums(
    name: str, func: Operator, args: tuple[Any, ...]
) -> list[tuple[int, SharedError]]:
    """Errors of sums inside of a kernel, as errors of the arguments that they are made of.

    The backward of attention reduces each row of gradients by the sum of the output times its
    gradient, and uses the output for nothing else. An error along the gradient moves that sum.
    """
    if summation_of(name) != "attention backward":
        return []
    output_position = place_of_argument(func, "out")
    grad, output = args[0], args[output_position]
    terms = grad * output
    total, squares = terms.sum(-1, keepdim=True), terms.square().sum(-1, keepdim=True)
    error = amplitude_from(total, squares, terms.shape[-1])
    along = (grad / grad.square().sum(-1, keepdim=True)).nan_to_num_(0.0, 0.0, 0.0)
    return [(output_position, SharedError(error * along, error.shape))]


# More weights than this are not computed again.
_MOST_WEIGHTS = 1 << 22


def _attention_weights(
    call: UnperturbedCall, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, float] | None:
    """What the values are weighted with; None if that would take long, or is not known here."""
    queries, keys = query.shape[-2], key.shape[-2]
    shape = (*query.shape[:-2], queries, keys)
    if math.prod(shape) > _MOST_WEIGHTS or query.shape[:-2] != value.shape[:-2]:
        return None
    return attention_weights(call.func, call.args, call.kwargs)


def _variance(call: UnperturbedCall, *, is_deviation: bool = False) -> Amplitudes:
    """A mean far from zero is subtracted from every term, with its error."""
    x = call.args[0]
    multiple = isinstance(call.result, list | tuple)
    spread = call.result[0] if multiple else call.result
    length = _count_terms(x, spread)
    size = x.abs().amax()
    steep = 1.0 if is_deviation else 2 * spread.sqrt()
    amplitude = spread * math.sqrt(length / 3) + steep * size / math.sqrt(length)
    if not multiple:
        return [amplitude]
    mean = square(call.result[1])
    squares = mean + (spread.square() if is_deviation else spread)
    return [amplitude, (length * mean / 3 + squares / 2).sqrt()]


def _spread_error_of_mean(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, n: int, path: Tensor | None
) -> SharedError:
    """The effect of the error of a row's mean on its normalised values: all shift together."""
    squared = None if path is None else path / max(1, n) ** 2
    shift = amplitude_in_order(math.sqrt(n / 3) * mean.abs(), n, squared) * rstd
    scale = shift if weight is None else shift * weight.abs()
    return SharedError(scale.expand(x.shape), mean.shape)


def _errors_of_moments(x: Tensor, mean: Tensor, rstd: Tensor, n: int) -> list[Tensor]:
    """The errors of a row's mean and of its reciprocal deviation, each over n terms."""
    n = max(1, n)
    squares = square(mean) + rstd.square().reciprocal()
    steep = rstd.square() * x.abs().amax() / math.sqrt(n) if x.numel() else torch.zeros_like(rstd)
    return [
        (n * square(mean) / 3 + squares / 2).sqrt(),
        rstd * math.sqrt(n / 12) + steep,
    ]


def _layer_norm(call: UnperturbedCall) -> Amplitudes:
    x, shape, weight = call.args[:3]
    _, mean, rstd = call.result
    n = math.prod(shape)
    path = path_of_rows(x.flatten(-len(shape)))
    shifted = _spread_error_of_mean(x, mean, rstd, weight, n, path)
    return [[shifted], *_errors_of_moments(x, mean, rstd, n)]


def _batch_norm(call: UnperturbedCall, *, gives_statistics: bool = False) -> Amplitudes:
    x, weight = call.args[:2]
    mean, rstd = call.result[1:3]
    if not mean.numel():  # evaluation: no statistics are computed
        return []
    channels = (1, -1, *(1,) * (x.dim() - 2))
    scale = None if weight is None else weight.view(channels)
    count = x.numel() // x.shape[1]
    wide = mean.view(channels), rstd.view(channels)
    path = path_of_rows(x.transpose(0, 1).flatten(1))
    shifted = _spread_error_of_mean(x, *wide, scale, count, path)
    normal = (x - wide[0]) * wide[1]
    scaled = (normal if scale is None else normal * scale) * math.sqrt(count / 12)
    moments = _errors_of_moments(x, mean, rstd, count)
    errors: Amplitudes = [[shifted, SharedError(scaled, wide[0].shape)], *moments]
    if gives_statistics:
        between = len(call.result) - _RESULTS_WITH_STATISTICS
        errors += [*[None] * between, *_errors_of_statistics(call, *moments)]
    return errors


_RESULTS_WITH_STATISTICS = 5


def _errors_of_statistics(call: UnperturbedCall, mean: Tensor, rstd: Tensor) -> list[Tensor]:
    """The errors of running statistics, from those of the mean and the reciprocal deviation."""
    numbers = [
        number_argument for number_argument in call.args if isinstance(number_argument, float | int)
    ]
    momentum = next(number for number in numbers if not isinstance(number, bool))
    return [momentum * mean, momentum * 2 * rstd / call.result[2].abs().pow(3)]


def errors_of_written_statistics(call: UnperturbedCall) -> list[tuple[Tensor, Tensor]]:
    """The running statistics that a batch norm has just updated, with their amplitudes."""
    if summation_of(call.name) != "batch norm":
        return []
    written = call.args[3:5]
    if not all(isinstance(each, torch.Tensor) for each in written):
        return []
    x, (mean, rstd) = call.args[0], call.result[1:3]
    if not mean.numel():
        return []
    moments = _errors_of_moments(x, mean, rstd, x.numel() // x.shape[1])
    return list(zip(written, _errors_of_statistics(call, *moments), strict=True))


def _group_norm(call: UnperturbedCall) -> Amplitudes:
    x, weight, _, _, _, _, groups = call.args[:7]
    _, mean, rstd = call.result
    each = x.shape[1] // groups
    channels = (x.shape[0], x.shape[1], *(1,) * (x.dim() - 2))
    wide = [s.repeat_interleave(each, dim=-1).view(channels) for s in (mean, rstd)]
    scale = None if weight is None else weight.view(1, -1, *(1,) * (x.dim() - 2))
    n = x[0].numel() // groups if x.shape[0] else 1
    path = path_of_rows(x.reshape(*mean.shape, -1)) if x.numel() else None
    path = None if path is None else path.repeat_interleave(each, dim=-1)
    shifted = _spread_error_of_mean(x, wide[0], wide[1], scale, n, path)
    shared = SharedError(shifted.amplitude, torch.Size((*mean.shape, *channels[2:])), each)
    return [[shared], *_errors_of_moments(x, mean, rstd, n)]


def _parameter_sums(
    grad: Tensor, normal: Tensor, over: Sequence[int], result: Any, n: int
) -> Amplitudes:
    """Weight and bias gradients of a normalisation are sums over everything else."""
    dims = list(over)
    amplitudes: Amplitudes = [None]
    for total, terms in zip(result[1:], (grad * normal, grad), strict=True):
        if total is None:
            amplitudes.append(None)
            continue
        amplitude = amplitude_from(total, square(terms).sum(dim=dims).view_as(total), n)
        amplitudes.append(with_error_of_equal_terms(amplitude, rows_of(terms, dims)))
    return amplitudes


def _errors_of_subtracted_means(
    grad: Tensor, normal: Tensor, rstd: Tensor, dims: Sequence[int]
) -> list[SharedError]:
    """Two means over a row or channel are subtracted from each of its values, with their errors."""
    errors, dims = [], list(dims)
    for factor in (None, normal):
        terms = grad if factor is None else grad * factor
        squares = square(terms).sum(dim=dims, keepdim=True)
        count = max(1, terms.numel() // max(1, squares.numel()))
        total = terms.sum(dim=dims, keepdim=True)
        error = amplitude_from(total, squares, count) * rstd / count
        size = error.expand(grad.shape) if factor is None else error * factor
        errors.append(SharedError(size, error.shape))
    return errors


def _layer_norm_backward(call: UnperturbedCall) -> Amplitudes:
    grad, x, shape, mean, rstd, weight = call.args[:6]
    over = range(x.dim() - len(shape))
    rows = max(1, x.numel() // max(1, math.prod(shape)))
    normal = (x - mean) * rstd
    scaled = grad if weight is None else grad * weight
    errors = _errors_of_subtracted_means(scaled, normal, rstd, range(len(over), x.dim()))
    sums = _parameter_sums(grad, normal, over, call.result, rows) if over else [None]
    return [errors, *sums[1:]]


def _group_norm_backward(call: UnperturbedCall) -> Amplitudes:
    grad, x, mean, rstd, weight, samples, channels, size, groups = call.args[:9]
    grouped = samples, groups, channels // groups, size
    rows = [each.view(samples, groups, 1, 1) for each in (mean, rstd)]
    normal = (x.reshape(grouped) - rows[0]) * rows[1]
    scaled = grad.reshape(grouped)
    if weight is not None:
        scaled = scaled * weight.view(1, groups, -1, 1)
    shape = torch.Size((samples, groups, *(1,) * (x.dim() - 2)))
    errors = [
        SharedError(error.amplitude.reshape(x.shape), shape, channels // groups)
        for error in _errors_of_subtracted_means(scaled, normal, rows[1], (2, 3))
    ]
    over = [dim for dim in range(x.dim()) if dim != 1]
    sums = _parameter_sums(grad, normal.reshape(x.shape), over, call.result, samples * size)
    return [errors, *sums[1:]]


def _batch_norm_backward(call: UnperturbedCall, *, is_cudnn: bool = False) -> Amplitudes:
    grad, x, weight, _, _, mean, rstd = call.args[:7]
    if is_cudnn:
        grad, x = x, grad
    evaluates = mean is None or not mean.numel()
    if evaluates:
        mean, rstd = _running_statistics(call)
    if mean is None:
        return []
    channels = (1, -1, *(1,) * (x.dim() - 2))
    normal = (x - mean.view(channels)) * rstd.view(channels)
    over = [dim for dim in range(x.dim()) if dim != 1]
    sums = _parameter_sums(grad, normal, over, call.result, x.numel() // x.shape[1])
    if evaluates:
        return [None, *sums[1:]]
    scaled = grad if weight is None else grad * weight.view(channels)
    errors = _errors_of_subtracted_means(scaled, normal, rstd.view(channels), over)
    return [errors, *sums[1:]]


def _running_statistics(call: UnperturbedCall) -> tuple[Tensor | None, Tensor | None]:
    """The mean and the reciprocal deviation that a batch norm uses in evaluation."""
    mean, variance = call.args[3:5]
    epsilon = call.args[8] if len(call.args) > 8 else None  # noqa: PLR2004
    if mean is None or variance is None or not isinstance(epsilon, float):
        return None, None  # cudnn's has no evaluation
    return mean, (variance + epsilon).rsqrt()


def _convolution(call: UnperturbedCall) -> Amplitudes:
    x, weight, _, *rest = call.args
    (length,) = _terms_of_convolution(call)
    amplitude = _amplitude_of_products(
        call.result,
        (x, weight),
        length,
        lambda *factors: call.func(*factors, None, *rest, **call.kwargs),
    )
    return [amplitude_in_order(amplitude, length, _path_of_convolution(call))]


def _terms_of_convolution(call: UnperturbedCall) -> list[int]:
    """As many as a result reads of the weight: the elements of a plane may be fewer."""
    return [_summed(call)["weight"].terms]


def _path_of_convolution(call: UnperturbedCall) -> Tensor | None:
    """The mean square of the partial sums over the channels; None if a sample is not ordered.

    A kernel of one channel has too few elements to go far.
    """
    x, weight, _, *rest = call.args
    is_transposed, groups = rest[3], rest[5]
    channels = 0 if is_transposed else 1
    length = weight.numel() // max(1, weight.shape[1 - channels])
    if groups != 1 or x.shape[1] < PATH_BLOCKS or length < SHORTEST_PATH or not x.numel():
        return None

    def partial_sums(x: Tensor, weight: Tensor) -> Iterator[Tensor]:
        total: Any = 0
        for part in zip(x.chunk(PATH_BLOCKS, 1), weight.chunk(PATH_BLOCKS, channels), strict=True):
            total = total + call.func(*part, None, *rest, **call.kwargs)
            yield total

    few = x[:FEW], weight.narrow(1 - channels, 0, min(FEW, weight.shape[1 - channels]))
    sums = list(partial_sums(*few))
    squares = call.func(square(few[0]), square(few[1]), None, *rest, **call.kwargs)
    expected = amplitude_from(sums[-1], squares, length).mul_(FAR_FROM_RANDOM)
    path = sum(square(running_sum).mean() for running_sum in sums) / len(sums)
    if not path * length > expected.square_().mean():
        return None
    total_of_squares: Any = 0
    for partial_sum in partial_sums(x, weight):
        total_of_squares = total_of_squares + square(partial_sum)
    return total_of_squares / len(sums)  # type: ignore[no-any-return]


def _convolution_backward(call: UnperturbedCall) -> Amplitudes:
    grad, x, weight, *rest = call.args
    lengths = _lengths_of_convolution_backward(call)
    narrow = _narrow_squares(grad, x, weight)
    if narrow is not None:
        squares = call.func(*(each.values for each in narrow), *rest, **call.kwargs)
        g, i, w = (each.top for each in narrow)
        amplitudes: Amplitudes = [
            None if r is None or q is None else _narrow_amplitude(r, q, n, top)
            for r, q, n, top in zip(call.result, squares, lengths, (g * w, g * i, g), strict=True)
        ]
        if all((r is None) == (a is None) for r, a in zip(call.result, amplitudes, strict=True)):
            return [*amplitudes[:2], _of_bias(amplitudes[2], grad)]
    squares = call.func(square(grad), square(x), square(weight), *rest, **call.kwargs)
    wide = [
        None if r is None or q is None else amplitude_from(r, q, n)
        for r, q, n in zip(call.result, squares, lengths, strict=True)
    ]
    return [*wide[:2], _of_bias(wide[2], grad)]


def _lengths_of_convolution_backward(call: UnperturbedCall) -> list[int]:
    """The gradient of the input is a transposed convolution, and the other way round."""
    grad, _, weight, _, *rest = call.args
    stride, padding, dilation, transposed, output_padding, groups = rest[:6]
    forward = grad, weight, None, stride, padding, dilation, not transposed, output_padding, groups
    terms = summed_axes("convolution", forward, {})["weight"].terms
    positions = grad.numel() // max(1, grad.shape[1])
    return [terms, positions, positions]


def _of_bias(amplitude: Any, grad: Tensor) -> Any:
    """Behind an average over positions, all of them have the same gradient."""
    if amplitude is None:
        return None
    return with_error_of_equal_terms(amplitude, grad.transpose(0, 1).flatten(1))


def _trilinear(call: UnperturbedCall) -> Amplitudes:
    factors, rest = call.args[:3], call.args[3:]
    squares = call.func(*map(square, factors), *rest, **call.kwargs)
    counts = call.func(*map(torch.ones_like, factors), *rest, **call.kwargs)
    return [amplitude_from(call.result, squares, int(counts.max()))]


def _average_of_windows(call: UnperturbedCall) -> Amplitudes:
    x, *rest = call.args
    axes = 3 if call.name.endswith("3d") else 2
    if call.name.startswith("_adaptive"):
        sizes = zip(x.shape[-axes:], call.result.shape[-axes:], strict=True)
        length = math.prod(-(-size // max(1, output_size)) for size, output_size in sizes)
    else:
        window = list(rest[0])
        length = math.prod(window) if len(window) > 1 else window[0] ** axes
    squares = call.func(square(x), *rest, **call.kwargs).div_(length)
    return [amplitude_from(call.result, squares, length)]


def _embedding_backward(call: UnperturbedCall) -> Amplitudes:
    grad, indices, *rest = call.args
    squares = call.func(square(grad), indices, *rest, **call.kwargs)
    return [amplitude_from(call.result, squares, _count_most_frequent(indices))]


def _indexed_sum(call: UnperturbedCall) -> Amplitudes:
    x, dim, index, source, *rest = call.args
    squares = call.func(square(x), dim, index, square(source), *rest, **call.kwargs)
    squares = squares.abs_()  # alpha has a sign
    return [amplitude_from(call.result, squares, 1 + _count_most_frequent(index))]


def _count_most_frequent(indices: Tensor) -> int:
    """The number of occurrences of the most frequent index."""
    return int(torch.bincount(indices.reshape(-1)).max()) if indices.numel() else 1


# Vectorised forms of the error function are rational approximations, accurate to this many half
# units of 1 for any value: nobody guarantees more, and gelu inherits the error.
_ERF_HALF_UNITS = 8.0


def _erf(call: UnperturbedCall) -> Amplitudes:
    return [torch.full_like(call.result, _ERF_HALF_UNITS)]


def _gelu(call: UnperturbedCall) -> Amplitudes:
    return [call.args[0].abs().mul_(_ERF_HALF_UNITS / 2)]


def _estimate_grouped_product(call: UnperturbedCall) -> Amplitudes:
    left, right, *rest = call.args
    squares = grouped_mm(square(left), square(right), *rest[:1], **_offsets(call.kwargs))
    return [amplitude_from(call.result, squares, left.shape[-1])]


def _offsets(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name == "offs"}


def _lengths_of_norm_backward(call: UnperturbedCall) -> list[int]:
    rows = call.args[0].numel() // max(1, math.prod(call.args[2]))
    return [0, rows, rows]


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The error of one way to sum.

    Attributes:
        amplitudes: for each result.
        lengths: how many terms each result of a plain sum has; 0 if it is not one.
    """

    amplitudes: Callable[[UnperturbedCall], Amplitudes]
    lengths: Callable[[UnperturbedCall], list[int]] = lambda _: []


_RULES: dict[Summation, _Rule] = {
    "products": _Rule(_products, _terms_of_products),
    "products added to a tensor": _Rule(_products, _terms_of_products),
    "products in groups": _Rule(_estimate_grouped_product, lambda call: [call.args[0].shape[-1]]),
    "trilinear products": _Rule(_trilinear),
    "sum": _Rule(_sum, _terms_of_sum),
    "mean": _Rule(_mean, _terms_of_sum),
    "running sum": _Rule(_cumsum),
    "indexed sum": _Rule(_indexed_sum),
    "terms of one sign": _Rule(_one_sign),
    "averages of windows": _Rule(_average_of_windows),
    "softmax": _Rule(_softmax),
    "log softmax": _Rule(functools.partial(_softmax, is_log=True)),
    "softmax backward": _Rule(_softmax_backward),
    "log softmax backward": _Rule(functools.partial(_softmax_backward, is_log=True)),
    "logarithm of a sum": _Rule(_log_sum),
    "attention": _Rule(_attention),
    "attention backward": _Rule(_attention_backward),
    "variance": _Rule(_variance),
    "deviation": _Rule(functools.partial(_variance, is_deviation=True)),
    "layer norm": _Rule(_layer_norm),
    "layer norm backward": _Rule(_layer_norm_backward, _lengths_of_norm_backward),
    "group norm": _Rule(_group_norm),
    "group norm backward": _Rule(_group_norm_backward),
    "batch norm": _Rule(_batch_norm),
    "functional batch norm": _Rule(functools.partial(_batch_norm, gives_statistics=True)),
    "batch norm backward": _Rule(_batch_norm_backward),
    "batch norm backward of cuDNN": _Rule(functools.partial(_batch_norm_backward, is_cudnn=True)),
    "convolution": _Rule(_convolution, _terms_of_convolution),
    "convolution backward": _Rule(_convolution_backward, _lengths_of_convolution_backward),
    "embedding backward": _Rule(
        _embedding_backward, lambda call: [_count_most_frequent(call.args[1])]
    ),
    "error function": _Rule(_erf),
    "gelu": _Rule(_gelu),
}
