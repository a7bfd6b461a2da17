"""Operators by family, written out as a formula with a mistake that no argument can express."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paritas.diagnosis.patterns.variations import Variation, mask_changes
from paritas.results.findings import PatternKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from paritas.diagnosis.calls import Step

Formula = "Callable[[Step], Tensor]"


def family_variations(step: Step) -> Iterator[Variation]:
    """The mistakes that are known of the operator's family."""
    name = step.name
    if name in _ATTENTIONS or name.startswith("scaled_dot_product"):
        yield from _attention_variations(step)
    if name in _NORMS:
        yield from _norm_variations(step)
    if name in ("softmax", "log_softmax"):
        yield from _softmax_variations(step)
    if name in _REDUCING:
        yield from _reduction_variations(step)
    if name in ("cumsum", "cumprod"):
        yield from _running_variations()
    if name in _SCATTERS:
        yield from _scatter_variations(step)
    if name in _PRODUCTS:
        yield from _product_variations(step)
    if name == "convolution":
        yield from _convolution_variations(step)
    if name.endswith("loss") or name.startswith("nll_loss"):
        yield from _loss_variations(step)
    if name == "softmax_backward_data":
        said = "the sum over the row is left out of the gradient"
        yield Variation(PatternKind.MISSING_OPERAND, said, _gradient_without_sum)
    if name in ("rsqrt", "sqrt", "reciprocal"):
        yield from _root_variations()
    yield from _other_functions(step)


def _instead(formula: Callable[[Step], Tensor]) -> Callable[[Step], Any]:
    return lambda step: step.with_first(formula(step))


def tails(length: int) -> list[int]:
    """How many of the last terms may be left out: one, the rest of a tile, a whole tile."""
    tiles = [2**power for power in range(1, 10) if 2**power < length]
    rests = [length % tile for tile in tiles]
    return list(dict.fromkeys(count for count in (1, *rests, *tiles[::-1]) if 0 < count < length))


# --- Attention ------------------------------------------------------------------------------------

_ATTENTIONS = frozenset({"scaled_dot_product_attention", "attention"})


def _attention_variations(step: Step) -> Iterator[Variation]:
    query, key = step.values["query"], step.values["key"]
    mask = _attention_mask(step)
    causal = step.values.get("is_causal") is True
    late = key.shape[-2] - query.shape[-2]
    plain = 0 if causal else None

    def attends(**changes: Any) -> Callable[[Step], Any]:
        return _instead(partial(_attend, **{"diagonal": plain, **changes}))

    if causal:
        said = "the causal mask is not applied"
        yield Variation(PatternKind.MASK, said, attends(diagonal=None))
        said = "the causal mask is off by one: each token sees the next"
        yield Variation(PatternKind.MASK, said, attends(diagonal=1))
        said = "the causal mask is off by one: no token sees itself"
        yield Variation(PatternKind.MASK, said, attends(diagonal=-1))
        if late:
            said = "the causal mask is aligned to the last key, not to the first"
            yield Variation(PatternKind.MASK, said, attends(diagonal=late))
    else:
        for diagonal in dict.fromkeys((0, late)):
            said = "a causal mask is applied although none was requested"
            yield Variation(PatternKind.MASK, said, attends(diagonal=diagonal))
    said = "the causal mask hides the past instead of the future"
    yield Variation(PatternKind.MASK, said, attends(diagonal=0, future=True))
    if mask is not None:
        said = "the mask is not applied"
        yield Variation(PatternKind.MASK, said, attends(alter=lambda _: None))
        for said, alter in mask_changes(mask):
            yield Variation(PatternKind.MASK, said, attends(alter=alter))
        said = "the mask is applied after the softmax, whose rows no longer add up to 1"
        yield Variation(PatternKind.MASK, said, attends(after=True))
    size = query.shape[-1]
    right = _factor_of(step)
    for factor, words in (
        (1.0, "left out"),
        (right * right, "applied twice"),
        (1 / size, f"1 / {size} instead of 1 / sqrt({size})"),
        (math.sqrt(size), f"sqrt({size}) instead of 1 / sqrt({size})"),
        (1 / math.sqrt(key.shape[-2]), f"1 / sqrt({key.shape[-2]}), of the number of keys"),
        (right * math.log2(math.e), "multiplied by log2 e once too often"),
        (right * math.log(2), "multiplied by ln 2: exp2 for exp"),
        (2 * right, "twice the right one"),
        (right / 2, "half the right one"),
    ):
        said = f"the factor on the scores is {words}"
        yield Variation(PatternKind.FACTOR, said, attends(factor=factor))
    for count in tails(key.shape[-2]):
        said = f"the last {count} of the {key.shape[-2]} keys are left out"
        yield Variation(PatternKind.PARTIAL_SUM, said, attends(keys=key.shape[-2] - count))
    said = "the softmax is taken over the queries instead of the keys"
    yield Variation(PatternKind.WRONG_AXIS, said, attends(dim=-2))


def _attention_mask(step: Step) -> Tensor | None:
    mask = step.values.get("attn_mask", step.values.get("attn_bias"))
    return mask if isinstance(mask, torch.Tensor) else None


def _factor_of(step: Step) -> float:
    given = step.values.get("scale")
    size = step.values["query"].shape[-1]
    return float(given) if isinstance(given, float) else 1 / math.sqrt(size)


def _attend(
    step: Step,
    *,
    diagonal: int | None,
    future: bool = False,
    factor: float | None = None,
    keys: int | None = None,
    dim: int = -1,
    after: bool = False,
    alter: Callable[[Tensor], Tensor | None] = lambda mask: mask,
) -> Tensor:
    query, key, value = (step.values[name] for name in ("query", "key", "value"))
    if key.shape[1] != query.shape[1]:
        key, value = (
            one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value)
        )
    scores = (query @ key.mT) * (_factor_of(step) if factor is None else factor)
    if diagonal is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        seen = seen.triu(diagonal) if future else seen.tril(diagonal)
        scores = scores.masked_fill(~seen, -math.inf)
    mask = _attention_mask(step)
    mask = None if mask is None else alter(mask)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores if after else scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores if after else scores + mask
        mask = mask > -1  # what is kept
    if keys is not None:
        scores, value = scores[..., :keys], value[..., :keys, :]
    # A row that sees nothing gives zeros in torch's own kernels.
    weights = scores.softmax(dim=dim).nan_to_num(0.0)
    if after and mask is not None:
        weights = weights * mask
    return weights @ value


# --- Normalisations -------------------------------------------------------------------------------

_LAYER = frozenset({"native_layer_norm", "fused_rms_norm", "rms_norm", "layer_norm"})
_BATCH = frozenset(
    {
        "native_batch_norm",
        "native_batch_norm_legit",
        "native_batch_norm_legit_functional",
        "native_batch_norm_legit_no_training",
        "cudnn_batch_norm",
        "native_batch_norm_legit.no_stats",
    }
)
_NORMS = _LAYER | _BATCH | {"native_group_norm"}


@dataclasses.dataclass(frozen=True)
class _Norm:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, of `x` with axes to reduce.

    Attributes:
        view: the shape in which `dims` are reduced.
        mean: the running mean, if that is used instead of the batch's; also `var`.
    """

    x: Tensor
    view: tuple[int, ...]
    dims: tuple[int, ...]
    eps: float
    weight: Tensor | float
    bias: Tensor | float
    centred: bool
    mean: Tensor | None = None
    var: Tensor | None = None

    def value(
        self,
        *,
        centred: bool | None = None,
        outside: bool = False,
        after: bool = False,
        divided: bool = True,
        correction: int = 0,
        less: int = 0,
        first: int = 0,
        dims: tuple[int, ...] | None = None,
        bias_first: bool = False,
        power: float = 0.5,
    ) -> Tensor:
        x = self.x.reshape(self.view)
        dims = self.dims if dims is None else dims
        axis = dims[-1]
        part = x.narrow(axis, first, x.shape[axis] - less - first)
        count = math.prod(part.shape[one] for one in dims)
        centred = self.centred if centred is None else centred
        mean = part.mean(dims, keepdim=True) if self.mean is None else self.mean
        squares = (part - mean if centred else part).square().sum(dims, keepdim=True)
        var = squares / (count - correction) if self.var is None else self.var
        if outside:
            below = var.sqrt() + self.eps
        elif after:
            below = var.sqrt()
        else:
            below = (var + self.eps) ** power
        value = x - mean if centred else x
        value = value / below if divided else value
        value = (value + self.eps if after else value).reshape(self.x.shape)
        if bias_first:
            return (value + self.bias) * self.weight
        return value * self.weight + self.bias


def _norm_of(step: Step) -> _Norm | None:
    values = step.values
    x = values["input"]
    eps = values.get("eps", values.get("epsilon"))
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    shape = tuple(x.shape)
    weight, bias = (1.0 if values.get("weight") is None else values["weight"]), values.get("bias")
    bias = 0.0 if bias is None else bias
    if step.name in _LAYER:
        count = len(values["normalized_shape"])
        dims = tuple(range(x.dim() - count, x.dim()))
        return _Norm(x, shape, dims, eps, weight, bias, centred="rms" not in step.name)
    channels = (1, -1, *(1,) * (x.dim() - 2))
    weight, bias = (
        one.reshape(channels) if isinstance(one, torch.Tensor) else one for one in (weight, bias)
    )
    if step.name == "native_group_norm":
        view = (shape[0], values["group"], -1)
        return _Norm(x, view, (2,), eps, weight, bias, centred=True)
    dims = (0, *range(2, x.dim()))
    if values.get("training", False) is True:
        return _Norm(x, shape, dims, eps, weight, bias, centred=True)
    mean, var = values.get("running_mean"), values.get("running_var")
    if mean is None or var is None:
        return None
    mean, var = mean.reshape(channels), var.reshape(channels)
    return _Norm(x, shape, dims, eps, weight, bias, True, mean, var)


def _norm_variations(step: Step) -> Iterator[Variation]:
    norm = _norm_of(step)
    if norm is None:
        return

    def computes(**changes: Any) -> Callable[[Step], Any]:
        return _instead(lambda step: _norm_of(step).value(**changes))  # type: ignore[union-attr]

    def take(kind: PatternKind, said: str, **changes: Any) -> Variation:
        return Variation(kind, said, computes(**changes))

    eps = f"eps ({norm.eps:.3g})"
    yield take(
        PatternKind.EPS, f"{eps} is added to the deviation, not to the variance", outside=True
    )
    yield take(PatternKind.EPS, f"{eps} is added to the quotient, not to the variance", after=True)
    if norm.centred:
        said = "the mean is not subtracted, as in RMS norm"
        yield take(PatternKind.STATISTICS, said, centred=False)
    else:
        said = "the mean is subtracted, as in layer norm"
        yield take(PatternKind.STATISTICS, said, centred=True)
    said = "it is not divided by the deviation"
    yield take(PatternKind.STATISTICS, said, divided=False)
    said = "it is divided by the variance, not by the deviation"
    yield take(PatternKind.STATISTICS, said, power=1.0)
    if isinstance(norm.weight, torch.Tensor) and isinstance(norm.bias, torch.Tensor):
        said = "the bias is added before the factor"
        yield take(PatternKind.SWAPPED_OPERANDS, said, bias_first=True)
    if norm.mean is not None:
        return
    x = norm.x.reshape(norm.view)
    length = math.prod(x.shape[one] for one in norm.dims)
    if length > 1:
        said = f"the variance is divided by {length - 1} instead of {length}"
        yield take(PatternKind.OFF_BY_ONE, said, correction=1)
    size = x.shape[norm.dims[-1]]
    for count in tails(size):
        kind = PatternKind.OFF_BY_ONE if count == 1 else PatternKind.PARTIAL_SUM
        verb = "is" if count == 1 else "are"
        said = f"the last {count} of the {size} elements {verb} left out of mean and variance"
        yield take(kind, said, less=count)
    if size > 1:
        said = f"the first of the {size} elements is left out of mean and variance"
        yield take(PatternKind.OFF_BY_ONE, said, first=1)
    for dims in _other_dims(x.dim(), norm.dims):
        said = f"mean and variance are taken along axes {list(dims)} instead of {list(norm.dims)}"
        yield take(PatternKind.WRONG_AXIS, said, dims=dims)


def _other_dims(rank: int, dims: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(1, rank):
        for other in itertools.combinations(range(rank), count):
            if other != dims:
                yield other


# --- Softmax and reductions -----------------------------------------------------------------------


def _softmax_variations(step: Step) -> Iterator[Variation]:
    dim, is_log = step.values["dim"], step.name == "log_softmax"
    size = step.values["self"].shape[dim] if step.values["self"].dim() else 1

    def scaled(step: Step, factor: float) -> Any:
        return step.run(self=step.values["self"] * factor)

    def over(step: Step, part: slice) -> Tensor:
        x = step.values["self"].movedim(dim, -1)
        value = x - x[..., part].logsumexp(-1, keepdim=True)
        return (value if is_log else value.exp()).movedim(-1, dim)

    for factor, words in (
        (math.log(2), "exp2 is taken instead of exp: ln 2 is missing"),
        (math.log2(math.e), "the input is multiplied by log2 e, but exp is taken"),
        (-1.0, "the sign of the input is flipped"),
        (0.5, "the input is halved"),
        (2.0, "the input is doubled"),
    ):
        kind = PatternKind.FACTOR
        yield Variation(kind, words, partial(scaled, factor=factor))
    for width in {one for one in (size, *_sizes(step)) if one > 1}:
        said = f"the input is divided by sqrt({width})"
        yield Variation(PatternKind.FACTOR, said, partial(scaled, factor=1 / math.sqrt(width)))
        said = f"the input is multiplied by sqrt({width})"
        yield Variation(PatternKind.FACTOR, said, partial(scaled, factor=math.sqrt(width)))
    for count in tails(size):
        kind = PatternKind.OFF_BY_ONE if count == 1 else PatternKind.PARTIAL_SUM
        some = "element is" if count == 1 else f"{count} elements are"
        said = f"the last {some} left out of the {size} in the sum that softmax divides by"
        yield Variation(kind, said, partial(over, part=slice(0, size - count)))
    if size > 1:
        said = f"the first element is left out of the {size} in the sum that softmax divides by"
        yield Variation(PatternKind.OFF_BY_ONE, said, partial(over, part=slice(1, None)))
    said = "it is not divided by the sum"
    yield Variation(PatternKind.WRONG_REDUCTION, said, partial(_unnormalised, is_log=is_log))
    other, words = (
        (torch.softmax, "the logarithm is left out")
        if is_log
        else (
            torch.log_softmax,
            "the logarithm of softmax",
        )
    )
    yield Variation(PatternKind.OTHER_FUNCTION, words, lambda step: other(step.values["self"], dim))
    said = "the softmax of the whole tensor instead of each row"
    yield Variation(PatternKind.WRONG_AXIS, said, _softmax_of_all)


def _sizes(step: Step) -> tuple[int, ...]:
    return tuple(step.values["self"].shape)


def _unnormalised(step: Step, *, is_log: bool) -> Tensor:
    x, dim = step.values["self"], step.values["dim"]
    value = x - x.amax(dim, keepdim=True)
    return value if is_log else value.exp()


def _softmax_of_all(step: Step) -> Tensor:
    x = step.values["self"]
    return step.run(self=x.reshape(-1), dim=0).reshape(x.shape)


_REDUCERS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "prod": lambda x, dims, keepdim: _product(x, dims, keepdim=keepdim),
    "logsumexp": torch.logsumexp,
    "linalg_vector_norm": lambda x, dims, keepdim: x.square().sum(dims, keepdim).sqrt(),
    "var": lambda x, dims, keepdim: x.var(dims, keepdim=keepdim, correction=0),
    "std": lambda x, dims, keepdim: x.std(dims, keepdim=keepdim, correction=0),
}
_REDUCER_NAMES = {
    "amax": "the maximum",
    "amin": "the minimum",
    "linalg_vector_norm": "the norm",
    "var": "the variance",
    "std": "the standard deviation",
    "prod": "the product",
}
_ALIASES = {"max": "amax", "min": "amin", "norm": "linalg_vector_norm"}
_PICKING = frozenset({"argmax", "argmin", "any", "all", "median"})
_REDUCING = frozenset({*_REDUCERS, *_ALIASES, *_PICKING, "var_mean"})


def _product(x: Tensor, dims: tuple[int, ...], *, keepdim: bool) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.prod(dim, keepdim=keepdim)
    return x


def _reduced_dims(step: Step) -> tuple[int, ...]:
    rank, dim = step.values["self"].dim(), step.values.get("dim")
    if isinstance(dim, int):
        return (dim % rank,) if rank else ()
    return tuple(one % rank for one in dim) if dim else tuple(range(rank))


def _reduction_variations(step: Step) -> Iterator[Variation]:
    x, dims = step.values["self"], _reduced_dims(step)
    keepdim = bool(step.values.get("keepdim", False))
    name = _ALIASES.get(step.name, step.name)
    for dim in dims:
        size = x.shape[dim]
        for first, count in ((0, 1), (1, 0), *((0, count) for count in tails(size)[1:])):
            if size - count - first < 1:
                continue
            kind = PatternKind.OFF_BY_ONE if first + count == 1 else PatternKind.PARTIAL_SUM
            end = "first" if first else "last"
            some = f"{end} element is" if first + count == 1 else f"last {count} elements are"
            said = f"the {some} left out of the {size} along dim {dim}"
            cut = partial(_cut, dim=dim, first=first, size=size - count - first)
            yield Variation(kind, said, cut)
            if name == "mean":
                yield Variation(
                    kind,
                    f"{said}, which is still divided by {size}",
                    partial(_scaled_cut, cut=cut, factor=(size - count - first) / size),
                )
    if name == "mean":
        yield from _divisor_variations(x, dims)
    if name in _REDUCERS and x.is_floating_point():
        right = _REDUCER_NAMES.get(name, f"the {name}")
        for other, reduce in _REDUCERS.items():
            if other != name:
                words = _REDUCER_NAMES.get(other, f"the {other}")
                change = partial(_reduced, reduce=reduce, dims=dims, keepdim=keepdim)
                yield Variation(PatternKind.WRONG_REDUCTION, f"{words} instead of {right}", change)
        for words, alter in (("absolute values", torch.abs), ("squares", torch.square)):
            said = f"{right} of the {words}"
            change = partial(_of_altered, alter=alter)
            yield Variation(PatternKind.WRONG_REDUCTION, said, change)
    pairs = {"argmax": torch.argmin, "argmin": torch.argmax, "any": torch.all, "all": torch.any}
    if name in pairs:
        opposite: Any = pairs[name]
        said = f"{opposite.__name__} instead of {name}"
        change = partial(_opposite, function=opposite)
        yield Variation(PatternKind.WRONG_REDUCTION, said, change)


def _cut(step: Step, dim: int, first: int, size: int) -> Any:
    return step.run(self=step.values["self"].narrow(dim, first, size))


def _scaled_cut(step: Step, cut: Callable[[Step], Any], factor: float) -> Any:
    return cut(step) * factor


def _reduced(step: Step, reduce: Callable[..., Tensor], dims: Any, *, keepdim: bool) -> Tensor:
    return step.with_first(reduce(step.values["self"], dims, keepdim))


def _of_altered(step: Step, alter: Callable[[Tensor], Tensor]) -> Any:
    return step.run(self=alter(step.values["self"]))


def _opposite(step: Step, function: Callable[..., Tensor]) -> Tensor:
    if step.values.get("dim") is None:
        return function(step.values["self"])
    return function(step.values["self"], step.values["dim"], step.values["keepdim"])


def _divisor_variations(x: Tensor, dims: tuple[int, ...]) -> Iterator[Variation]:
    length = math.prod(x.shape[one] for one in dims)
    others = [length - 1, length + 1]
    for kind, counts in (
        (PatternKind.OFF_BY_ONE, others),
        (
            PatternKind.WRONG_REDUCTION,
            [one for one in {*x.shape, x.numel()} if one not in (1, length)],
        ),
    ):
        for count in counts:
            if count > 0:
                said = f"the mean of {length} elements is divided by {count}"
                yield Variation(kind, said, partial(_scaled_result, factor=length / count))


def _scaled_result(step: Step, factor: float) -> Any:
    return step.run() * factor


def _running_variations() -> Iterator[Variation]:
    def exclusive(step: Step) -> Tensor:
        x, dim = step.values["self"], step.values["dim"]
        start = torch.full_like(x.narrow(dim, 0, 1), 0.0 if step.name == "cumsum" else 1.0)
        return step.run(self=torch.cat([start, x.narrow(dim, 0, x.shape[dim] - 1)], dim))

    def backwards(step: Step) -> Tensor:
        dim = step.values["dim"]
        return step.run(self=step.values["self"].flip(dim)).flip(dim)

    said = "each sum leaves out its own element: exclusive, not inclusive"
    yield Variation(PatternKind.OFF_BY_ONE, said, exclusive)
    said = "it runs from the last element to the first"
    yield Variation(PatternKind.ARGUMENT, said, backwards)


# --- Scattered sums -------------------------------------------------------------------------------

_SCATTERS = frozenset({"embedding_dense_backward", "index_add", "scatter_add", "index_put"})


def _scatter_variations(step: Step) -> Iterator[Variation]:
    if step.name == "index_put":
        return  # its flag says it
    for said, last in (
        ("rows with the same index are not added up: the last one wins", True),
        ("rows with the same index are not added up: the first one wins", False),
    ):
        change = partial(_overwritten, last=last)
        yield Variation(PatternKind.LOST_ACCUMULATION, said, change)
    said = "rows with the same index are averaged, not added up"
    yield Variation(PatternKind.WRONG_REDUCTION, said, _averaged)


def _parts(step: Step) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tensor to add to, the rows, their indices and the axis."""
    values = step.values
    if step.name == "embedding_dense_backward":
        rows = values["grad_output"].reshape(values["indices"].numel(), -1)
        index = values["indices"].reshape(-1)
        rows = rows.masked_fill((index == values["padding_idx"])[:, None], 0.0)
        zero = rows.new_zeros(values["num_weights"], rows.shape[1])
        return zero, rows, index, 0
    rows = values["source"] * values["alpha"] if step.name == "index_add" else values["src"]
    return values["self"], rows, values["index"], values["dim"]


def _overwritten(step: Step, *, last: bool) -> Tensor:
    """Later rows overwrite earlier ones, in order, one at a time."""
    into, rows, index, dim = _parts(step)
    value = into.clone()
    if step.name == "scatter_add":
        order = range(index.shape[dim])
        for place in order if last else reversed(order):
            chosen = index.narrow(dim, place, 1)
            value.scatter_(dim, chosen, rows.narrow(dim, place, 1))
        return value
    winner = torch.full((into.shape[dim],), -1, dtype=torch.long, device=index.device)
    places = torch.arange(len(index), device=index.device)
    amount = "amax" if last else "amin"
    winner = winner.scatter_reduce(0, index.long(), places, amount, include_self=False)
    hit = winner >= 0
    value.index_copy_(dim, hit.nonzero().flatten(), rows.index_select(dim, winner[hit]))
    return value


def _averaged(step: Step) -> Tensor:
    into, rows, index, dim = _parts(step)
    if step.name == "scatter_add":
        return into.scatter_reduce(dim, index, rows, "mean", include_self=False)
    return into.index_reduce(dim, index, rows, "mean", include_self=False)


# --- Matrix products ------------------------------------------------------------------------------

_PRODUCTS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def _product_variations(step: Step) -> Iterator[Variation]:
    left, right = _PRODUCTS[step.name]
    length = step.values[left].shape[-1]

    def cut(step: Step, start: int, size: int) -> Any:
        a, b = (step.values[name] for name in (left, right))
        return step.run(**{left: a.narrow(-1, start, size), right: b.narrow(-2, start, size)})

    for start, count in ((1, 1), *((0, count) for count in tails(length))):
        if count < length:
            end = "first" if start else "last"
            words = f"the {end} {count} of the {length} terms of each sum are missing"
            change = partial(cut, start=start, size=length - count)
            yield Variation(PatternKind.PARTIAL_SUM, words, change)


# --- Convolutions, losses, gradients --------------------------------------------------------------


def _convolution_variations(step: Step) -> Iterator[Variation]:
    weight = step.values["weight"]
    spatial = tuple(range(2, weight.dim()))

    def padded(step: Step, mode: str) -> Any:
        sides = [side for size in reversed(step.values["padding"]) for side in (size, size)]
        x = torch.nn.functional.pad(step.values["input"], sides, mode=mode)
        return step.run(input=x, padding=[0] * len(step.values["padding"]))

    def transposed(step: Step) -> Any:
        return step.run(weight=step.values["weight"].transpose(0, 1))

    said = "the kernel is flipped: a true convolution, not a correlation"
    flip = lambda step: step.run(weight=step.values["weight"].flip(spatial))  # noqa: E731
    yield Variation(PatternKind.ARGUMENT, said, flip)
    if any(step.values["padding"]):
        for mode in ("replicate", "reflect", "circular"):
            said = f"the padding is {mode!r}, not zeros"
            yield Variation(PatternKind.ARGUMENT, said, partial(padded, mode=mode))
    if weight.shape[0] == weight.shape[1]:
        said = "the kernel's input and output channels are swapped"
        yield Variation(PatternKind.SWAPPED_OPERANDS, said, transposed)
    for count in tails(weight.shape[1]):
        some = "channel is" if count == 1 else f"{count} channels are"
        said = f"the last input {some} left out of each sum ({weight.shape[1]} in all)"
        yield Variation(PatternKind.PARTIAL_SUM, said, partial(_without_last, dim=1, count=count))
    for dim in spatial:
        for count in tails(weight.shape[dim]):
            said = f"the last {count} of the kernel's {weight.shape[dim]} along axis {dim} left out"
            change = partial(_without_last, dim=dim, count=count)
            yield Variation(PatternKind.PARTIAL_SUM, said, change)


def _without_last(step: Step, dim: int, count: int) -> Any:
    weight = step.values["weight"].clone()
    weight.narrow(dim, weight.shape[dim] - count, count).zero_()
    return step.run(weight=weight)


def _loss_variations(step: Step) -> Iterator[Variation]:
    if step.values.get("reduction") != 1:
        return
    first = next(one for one in step.values.values() if isinstance(one, torch.Tensor))
    target = step.values.get("target")
    counts = {"the batch": first.shape[0] if first.dim() else 1, "all elements": first.numel()}
    if isinstance(target, torch.Tensor):
        counts["all targets, also those to ignore"] = target.numel()
    for words, count in counts.items():
        said = f"the sum is divided by {count}, the size of {words}"
        change = partial(_divided_sum, count=count)
        yield Variation(PatternKind.WRONG_REDUCTION, said, change)


def _divided_sum(step: Step, count: int) -> Any:
    total = step.run(reduction=2)
    total = total if isinstance(total, torch.Tensor) else total[0]
    return step.with_first(total / count)


def _gradient_without_sum(step: Step) -> Tensor:
    value: Tensor = step.values["grad_output"] * step.values["output"]
    return value


def _root_variations() -> Iterator[Variation]:
    """The root of a variance that already has its eps."""
    for eps in (1e-12, 1e-8, 1e-6, 1e-5, 1e-3):

        def moved(step: Step, eps: float = eps) -> Any:
            outer = step.run(self=step.values["self"] - eps)
            return outer + eps if step.name == "sqrt" else 1 / (1 / outer + eps)

        said = f"eps ({eps:g}) is added to the root, not to what is under it"
        yield Variation(PatternKind.EPS, said, moved)
        for by, words in ((-eps, "left out"), (eps, "added twice")):

            def shifted(step: Step, by: float = by) -> Any:
                return step.run(self=step.values["self"] + by)

            yield Variation(PatternKind.EPS, f"eps ({eps:g}) is {words}", shifted)


# --- Another function -----------------------------------------------------------------------------

_F = torch.nn.functional
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "abs": torch.abs,
    "neg": torch.neg,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "atan": torch.atan,
    "relu": torch.relu,
    "relu6": _F.relu6,
    "silu": _F.silu,
    "gelu": _F.gelu,
    "tanh gelu": lambda x: _F.gelu(x, approximate="tanh"),
    "x * sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "elu": _F.elu,
    "selu": _F.selu,
    "leaky_relu": _F.leaky_relu,
    "softplus": _F.softplus,
    "softsign": _F.softsign,
    "hardswish": _F.hardswish,
    "hardsigmoid": _F.hardsigmoid,
    "hardtanh": _F.hardtanh,
    "mish": _F.mish,
    "log_sigmoid": _F.logsigmoid,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "sign": torch.sign,
}
_UNARY_NAMES = {"log_sigmoid_forward": "log_sigmoid"}
_BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "atan2": torch.atan2,
}
_COMPARISONS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "lt": ("<", torch.lt),
    "le": ("<=", torch.le),
    "gt": (">", torch.gt),
    "ge": (">=", torch.ge),
    "eq": ("==", torch.eq),
    "ne": ("!=", torch.ne),
}
_LOGICAL: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "bitwise_and": ("and", torch.logical_and),
    "logical_and": ("and", torch.logical_and),
    "bitwise_or": ("or", torch.logical_or),
    "logical_or": ("or", torch.logical_or),
    "bitwise_xor": ("xor", torch.logical_xor),
    "logical_xor": ("xor", torch.logical_xor),
}
_RESIZED = {
    "upsample_nearest": "_upsample_nearest_exact",
    "upsample_nearest_exact": "upsample_nearest",
}
_INNER = {
    math.log(2): "ln 2",
    math.log2(math.e): "log2 e",
    2.0: "2",
    0.5: "1 / 2",
    math.sqrt(2): "sqrt(2)",
    math.sqrt(0.5): "1 / sqrt(2)",
    -1.0: "-1",
}


def _other_functions(step: Step) -> Iterator[Variation]:
    name = _UNARY_NAMES.get(step.name, step.name)
    kind = PatternKind.OTHER_FUNCTION
    if name in UNARY and "self" in step.values:
        for other, compute in UNARY.items():
            if other != name:
                said = f"{other} instead of {name}"
                yield Variation(kind, said, partial(_unary, compute=compute))
        for factor, words in _INNER.items():
            said = f"the argument of {name} is multiplied by {words}"
            yield Variation(PatternKind.FACTOR, said, partial(_with_inner, factor=factor))
    tensors = [one for one in step.values.values() if isinstance(one, torch.Tensor)]
    if name in _BINARY and len(tensors) == 2:  # noqa: PLR2004
        for other, compute in _BINARY.items():
            if other != name:
                yield Variation(
                    kind, f"{other} instead of {name}", partial(_binary, compute=compute)
                )
    if name in _COMPARISONS:
        yield from _comparison_variations(name)
    if name in _LOGICAL:
        for word, compute in dict(_LOGICAL.values()).items():
            if word != _LOGICAL[name][0]:
                said = f"the masks are joined with {word} instead of {_LOGICAL[name][0]}"
                yield Variation(PatternKind.MASK, said, partial(_binary, compute=compute))


def _comparison_variations(name: str) -> Iterator[Variation]:
    sign = _COMPARISONS[name][0]
    for other, (word, compute) in _COMPARISONS.items():
        if other != name:
            said = f"the comparison is {word} instead of {sign}"
            yield Variation(PatternKind.MASK, said, partial(_binary, compute=compute))
    for by in (1, -1):
        said = f"the mask is off by one: the right side of {sign} is one too {'large' if by > 0 else 'small'}"
        yield Variation(
            PatternKind.MASK, said, lambda step, by=by: step.run(other=step.values["other"] + by)
        )


def _unary(step: Step, compute: Callable[[Tensor], Tensor]) -> Any:
    return step.with_first(compute(step.values["self"]))


def _with_inner(step: Step, factor: float) -> Any:
    return step.run(self=step.values["self"] * factor)


def _binary(step: Step, compute: Callable[..., Tensor]) -> Tensor:
    left, right = list(step.values.values())[:2]
    return compute(left, right)
